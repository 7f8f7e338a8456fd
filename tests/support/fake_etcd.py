"""etcd's JSON gateway in the memory of a test: the model of the campaign `leadership`, behind the texts that a real one takes and gives."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from random import Random
from typing import Any

import httpx

from protomq_ha.cluster_state import ClusterView, Compare, Put, Transaction
from protomq_ha.leadership_values import Committed, GrantLease, Lease, ReadCluster, RenewLease
from tests.chaos.leadership_etcd import SimEtcd


class FakeEtcd:
    """`transport` answers as long as `is_up`. Times are those of the test: `model.expire` ends leases."""

    def __init__(self, prefix: str) -> None:
        self.model = SimEtcd(Random(0))
        self.is_up = True
        self.transport = httpx.MockTransport(self._answer)
        self.asked: list[str] = []
        self._prefix = f"{prefix}/"

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(f"{request.url.host} {request.url.path}")
        if not self.is_up:
            raise httpx.ConnectError("refused", request=request)
        body = json.loads(request.content)
        if self.model.refusal and (self.model.refuses_reads or request.url.path in ("/v3/kv/txn", "/v3/lease/grant")):
            return httpx.Response(429, json={"error": self.model.refusal, "code": 8})
        if request.url.path == "/v3/kv/range":
            view = self.model.do(ReadCluster(), 0)
            assert isinstance(view, ClusterView)
            return self._said(view.revision, kvs=[self._row(key) for key in view.rows])
        if request.url.path == "/v3/lease/grant":
            return self._leased(self.model.do(GrantLease(1_000 * int(body["TTL"])), 0))
        if request.url.path == "/v3/lease/keepalive":
            answer = self._leased(self.model.do(RenewLease(int(body["ID"])), 0))
            return httpx.Response(200, json={"result": answer.json()})
        committed = self.model.do(self._transaction(body), 0)
        if committed is None:
            return httpx.Response(404, json={"error": "etcdserver: requested lease not found"})
        assert isinstance(committed, Committed)
        made = {"succeeded": True} if committed.is_made else {}
        return self._said(committed.revision, **made)

    def _said(self, revision: int, **fields: Any) -> httpx.Response:
        return httpx.Response(200, json={"header": {"revision": str(revision)}, **fields})

    def _leased(self, lease: object) -> httpx.Response:
        assert isinstance(lease, Lease)
        left = {"TTL": str(lease.ttl_ms // 1_000)} if lease.ttl_ms else {}
        return self._said(self.model.revision, ID=str(lease.lease), **left)

    def _row(self, key: str) -> dict[str, str]:
        row = self.model.rows[key]
        fields = {
            "key": b64encode(f"{self._prefix}{key}".encode()).decode(),
            "value": b64encode(row.value).decode(),
            "mod_revision": str(row.revision),
        }
        return fields | ({"lease": str(row.lease)} if row.lease else {})

    def _transaction(self, body: dict[str, Any]) -> Transaction:
        def name(key: str) -> str:
            text = b64decode(key).decode()
            assert text.startswith(self._prefix)
            return text.removeprefix(self._prefix)

        for each in body["compare"]:
            assert (each["target"], each["result"]) == ("MOD", "EQUAL")
        compares = [Compare(name(each["key"]), int(each["mod_revision"])) for each in body["compare"]]
        puts = [each["request_put"] for each in body["success"] if "request_put" in each]
        deletes = [each["request_delete_range"] for each in body["success"] if "request_delete_range" in each]
        return Transaction(
            tuple(compares),
            tuple(Put(name(each["key"]), b64decode(each["value"]), int(each["lease"])) for each in puts),
            tuple(name(each["key"]) for each in deletes),
        )
