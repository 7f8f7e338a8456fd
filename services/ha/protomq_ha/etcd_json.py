"""Requests of leadership.py as etcd's JSON gateway takes them (v3, https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway), and its answers.

Keys and values are Base64, 64-bit numbers are texts, and what is 0 or false is left out. Values in, values out.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any, Final

from .cluster_state import KEYS, PREFIXES_OF_MEMBERS, ClusterView, Row, Transaction
from .leadership_values import (
    Committed,
    GrantLease,
    Lease,
    ReadCluster,
    RenewLease,
    Request,
    Result,
)

RANGE_PATH: Final = "/v3/kv/range"
TRANSACTION_PATH: Final = "/v3/kv/txn"
_REFUSALS: Final = frozenset({3, 7, 8, 9, 12, 15, 16})
"""gRPC codes of an etcd that is full (8), has lost data (15), or wants a password (3, 7, 9, 16). With others it may soon do it: it has no
leader, or a lease has run out.
"""


def path_and_body(request: Request, prefix: str) -> tuple[str, dict[str, Any]]:
    """Returns the path and the body of the request. `prefix`: prefix of all keys, without the slash behind it."""
    if isinstance(request, ReadCluster):
        # The slash and what follows it: "0" is the character behind "/". Linearizable, as etcd does by default.
        return RANGE_PATH, {"key": _text(f"{prefix}/"), "range_end": _text(f"{prefix}0")}
    if isinstance(request, GrantLease):
        return "/v3/lease/grant", {"TTL": str(-(-request.ttl_ms // 1_000))}
    if isinstance(request, RenewLease):
        return "/v3/lease/keepalive", {"ID": str(request.lease)}
    return TRANSACTION_PATH, _transaction_body(request, prefix)


def result_of(request: Request, prefix: str, answer: Mapping[str, Any]) -> Result:
    """Decodes an answer. Raises ValueError for an answer that etcd would not give, or a key that no broker has written."""
    try:
        if isinstance(request, RenewLease):
            return _lease(answer["result"])
        if isinstance(request, GrantLease):
            return _lease(answer)
        revision = int(answer["header"]["revision"])
        if isinstance(request, ReadCluster):
            return ClusterView(revision, _rows(answer, prefix))
        return Committed(bool(answer.get("succeeded", False)), revision)
    except (KeyError, TypeError) as error:
        text = json.dumps(answer)[:200]
        raise ValueError(f"etcd answered {type(request).__name__} with {text}") from error


def refusal_of(content: bytes) -> str:
    """Why etcd does not do what it is asked for; "": it does, or has no leader now, or that is no answer of etcd."""
    try:
        answer = json.loads(content)
    except ValueError:
        return ""
    # Of a stream, which a renewal is, the error stands one level deeper.
    error = answer.get("error", answer) if isinstance(answer, dict) else None
    fields = error if isinstance(error, dict) else answer
    if not isinstance(error, dict | str) or fields.get("code", fields.get("grpc_code")) not in _REFUSALS:
        return ""
    return str(fields.get("message") or fields.get("error"))


def _transaction_body(transaction: Transaction, prefix: str) -> dict[str, Any]:
    compares = [
        {
            "key": _text(f"{prefix}/{key}"),
            "target": "MOD",
            "mod_revision": str(revision),
            "result": "EQUAL",
        }
        for key, revision in transaction.compares
    ]
    puts = [
        {
            "request_put": {
                "key": _text(f"{prefix}/{put.key}"),
                "value": b64encode(put.value).decode(),
                "lease": str(put.lease),
            }
        }
        for put in transaction.puts
    ]
    deletes = [
        {"request_delete_range": {"key": _text(f"{prefix}/{key}")}} for key in transaction.deletes
    ]
    return {"compare": compares, "success": puts + deletes}


def _lease(answer: Mapping[str, Any]) -> Lease:
    return Lease(int(answer["ID"]), 1_000 * int(answer.get("TTL", 0)))


def _rows(answer: Mapping[str, Any], prefix: str) -> dict[str, Row]:
    rows = {}
    for each in answer.get("kvs", ()):
        key = b64decode(each["key"]).decode().removeprefix(f"{prefix}/")
        if key in KEYS or key.startswith(PREFIXES_OF_MEMBERS):
            value = b64decode(each.get("value", ""))
            rows[key] = Row(value, int(each["mod_revision"]), int(each.get("lease", 0)))
    return rows


def _text(text: str) -> str:
    return b64encode(text.encode()).decode()
