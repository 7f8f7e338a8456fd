"""etcd_gateway.py and etcd_json.py against a model of etcd; tests/integration/test_etcd.py asks a real one the same."""

from __future__ import annotations

import httpx
import pytest

from protomq_broker.etcd_gateway import HttpEtcd
from protomq_ha.cluster_state import (
    IN_SYNC,
    MASTER,
    ORDER,
    PREFIXES_OF_MEMBERS,
    ClusterView,
    Compare,
    Put,
    Transaction,
    encode_in_sync,
    encode_master,
)
from protomq_ha.leadership_values import (
    Committed,
    GrantLease,
    Lease,
    ReadCluster,
    Refused,
    RenewLease,
)
from tests.support.etcd_contract import check_contract
from tests.support.fake_etcd import FakeEtcd

PREFIX = "/protomq/DefaultCluster/a"
URLS = ("http://one:2379", "http://two:2379")
PUT = Transaction((Compare(IN_SYNC, 0),), (Put(IN_SYNC, encode_in_sync(1, frozenset({"7"}), unclean_epoch=0)),))


def test_the_model_keeps_the_contract() -> None:
    etcd = FakeEtcd(PREFIX)
    check_contract(HttpEtcd(URLS, PREFIX, etcd.transport))


def test_an_endpoint_that_is_not_there_is_followed_by_the_next_which_is_asked_first_from_then_on() -> None:
    etcd = FakeEtcd(PREFIX)

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host == "one":
            raise httpx.ConnectError("refused", request=request)
        return etcd.transport.handler(request)  # type: ignore[return-value]

    gateway = HttpEtcd(URLS, PREFIX, httpx.MockTransport(answer))
    assert isinstance(gateway.ask(PUT), Committed)
    assert gateway.problem == ""
    assert isinstance(gateway.ask(ReadCluster()), ClusterView)
    assert [each.split()[0] for each in etcd.asked] == ["two", "two"]


def test_a_transaction_that_may_have_been_seen_is_not_made_again_elsewhere() -> None:
    etcd = FakeEtcd(PREFIX)
    hosts = []

    def answer(request: httpx.Request) -> httpx.Response:
        hosts.append(request.url.host)
        if len(hosts) == 1:
            etcd.transport.handler(request)  # made, and the answer is lost
            raise httpx.ReadTimeout("silent", request=request)
        return etcd.transport.handler(request)  # type: ignore[return-value]

    gateway = HttpEtcd(URLS, PREFIX, httpx.MockTransport(answer))
    assert gateway.ask(PUT) is None
    assert hosts == ["one"]
    assert "silent" in gateway.problem
    view = gateway.ask(ReadCluster())
    assert isinstance(view, ClusterView)
    assert view.in_sync is not None
    assert hosts == ["one", "two"]


def test_nobody_answers() -> None:
    etcd = FakeEtcd(PREFIX)
    etcd.is_up = False
    gateway = HttpEtcd(URLS, PREFIX, etcd.transport)
    assert gateway.ask(ReadCluster()) is None
    assert len(etcd.asked) == 2
    assert "http://one:2379: refused; http://two:2379: refused" in gateway.problem


NO_SPACE = "etcdserver: mvcc: database space exceeded"


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (429, {"error": NO_SPACE, "message": NO_SPACE, "code": 8}),
        (400, {"error": NO_SPACE, "code": 3}),
        (200, {"error": {"grpc_code": 16, "http_code": 401, "message": NO_SPACE}}),
        (401, {"code": 16, "message": NO_SPACE, "details": []}),
    ],
)
def test_what_etcd_refuses_is_told_from_no_answer(status: int, answer: dict[str, object]) -> None:
    gateway = HttpEtcd(URLS, PREFIX, httpx.MockTransport(lambda _: httpx.Response(status, json=answer)))
    for request in (ReadCluster(), PUT, GrantLease(3_000), RenewLease(5)):
        assert gateway.ask(request) == Refused(NO_SPACE)


@pytest.mark.parametrize("code", [2, 4, 5, 14])
def test_an_etcd_without_a_leader_and_a_lease_that_is_gone_are_no_refusals(code: int) -> None:
    answer = httpx.Response(503, json={"error": "etcdserver: no leader", "code": code})
    assert HttpEtcd(URLS, PREFIX, httpx.MockTransport(lambda _: answer)).ask(PUT) is None


def test_the_log_says_once_that_etcd_refuses_and_once_that_it_takes_a_write_again(caplog: pytest.LogCaptureFixture) -> None:
    etcd = FakeEtcd(PREFIX)
    gateway = HttpEtcd(URLS, PREFIX, etcd.transport)
    etcd.model.refusal = NO_SPACE
    for request in 3 * (PUT, ReadCluster(), GrantLease(3_000), RenewLease(5)):
        gateway.ask(request)
    assert caplog.messages == [f"etcd refuses requests: {NO_SPACE}. Nobody can take over until it takes a write"]
    etcd.is_up = False
    gateway.ask(ReadCluster())
    etcd.is_up, etcd.model.refusal = True, ""
    caplog.clear()
    for _ in range(2):
        gateway.ask(ReadCluster())
        gateway.ask(PUT)
    assert caplog.messages == ["etcd answers again", "etcd takes writes again"]


@pytest.mark.parametrize(
    "response",
    [
        httpx.Response(200, json=[]),
        httpx.Response(200, text="<html>"),
        httpx.Response(200, json={}),
        httpx.Response(503, text="no leader"),
        httpx.Response(200, json={"header": {"revision": "x"}}),
    ],
)
def test_what_is_no_answer_of_etcd_says_nothing(response: httpx.Response) -> None:
    gateway = HttpEtcd(URLS[:1], PREFIX, httpx.MockTransport(lambda _: response))
    for request in (ReadCluster(), PUT, GrantLease(3_000), RenewLease(5)):
        assert gateway.ask(request) is None
        assert gateway.problem


def test_a_value_that_no_broker_has_written_says_nothing() -> None:
    etcd = FakeEtcd(PREFIX)
    gateway = HttpEtcd(URLS, PREFIX, etcd.transport)
    gateway.ask(Transaction((), (Put(ORDER, b"what?"),)))
    assert gateway.ask(ReadCluster()) is None
    assert "which no broker has written" in gateway.problem


def test_a_lease_that_is_asked_for_lasts_no_shorter_than_that() -> None:
    lease = HttpEtcd(URLS, PREFIX, FakeEtcd(PREFIX).transport).ask(GrantLease(2_001))
    assert isinstance(lease, Lease)
    assert lease.ttl_ms == 3_000


def test_keys_of_others_are_no_keys_of_this_name() -> None:
    etcd = FakeEtcd(PREFIX)
    gateway = HttpEtcd(URLS, PREFIX, etcd.transport)
    gateway.ask(Transaction((), (Put(MASTER, encode_master("7", 1, "a:1")), Put("note", b"ours?"))))
    view = gateway.ask(ReadCluster())
    assert isinstance(view, ClusterView)
    assert set(view.rows) == {MASTER}


@pytest.mark.parametrize("prefix", PREFIXES_OF_MEMBERS)
def test_keys_that_each_member_has_of_its_own_are_read(prefix: str) -> None:
    gateway = HttpEtcd(URLS, PREFIX, FakeEtcd(PREFIX).transport)
    gateway.ask(Transaction((), (Put(f"{prefix}7", b"{}"),)))
    view = gateway.ask(ReadCluster())
    assert isinstance(view, ClusterView)
    assert set(view.rows) == {f"{prefix}7"}
