"""How often each client asks at most, counted at the servers of a fake cluster: the table of `protomq._retry`, line by line."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from protomq import Admin, MessageQueue, Producer, _admin, _methods
from protomq.errors import (
    ConnectFailedError,
    ConnectionLostError,
    NoRouteError,
    ProtomqError,
    RequestTimeoutError,
    SystemBusyError,
)
from tests.support.fake_cluster import FakeCluster, FakeSyncTransport

NAME_SERVER = ""
MANY = 20


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster({"T": {"a": 1, "b": 1, "c": 1}})


def busy() -> list[ProtomqError]:
    return [SystemBusyError("x") for _ in range(MANY)]


@pytest.fixture
def admin(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Admin]:
    monkeypatch.setattr(_admin, "SyncTransport", lambda _: FakeSyncTransport(cluster))
    with Admin(namesrv="n:1") as admin:
        yield admin


def test_name_servers_are_asked_twice_where_connections_are_lost(cluster: FakeCluster) -> None:
    cluster.fail(NAME_SERVER, _methods.GET_ROUTE, *(ConnectionLostError("x") for _ in range(MANY)))
    with Producer(transport=FakeSyncTransport(cluster), namesrv="n:1;m:1") as producer:
        with pytest.raises(NoRouteError):
            producer.queues("T")
    assert cluster.tries(NAME_SERVER, _methods.GET_ROUTE) == 4


def test_name_servers_are_asked_once_where_they_answer_with_an_error(cluster: FakeCluster) -> None:
    cluster.fail(NAME_SERVER, _methods.GET_ROUTE, *busy())
    with Producer(transport=FakeSyncTransport(cluster), namesrv="n:1;m:1") as producer:
        with pytest.raises(NoRouteError):
            producer.queues("T")
    assert cluster.tries(NAME_SERVER, _methods.GET_ROUTE) == 2


@pytest.mark.parametrize(
    ("error", "tries"),
    [(SystemBusyError, 3), (RequestTimeoutError, 1), (ConnectFailedError, 1)],
)
def test_admin_asks_a_broker_three_times_while_nothing_happened(
    cluster: FakeCluster, admin: Admin, error: type[ProtomqError], tries: int
) -> None:
    cluster.fail("a", _methods.GET_BROKER_STATUS, *(error("x") for _ in range(MANY)))
    with pytest.raises(error):
        admin.broker_status("a")
    assert cluster.tries("a", _methods.GET_BROKER_STATUS) == tries


def test_admin_goes_on_when_a_busy_broker_takes_the_call(cluster: FakeCluster, admin: Admin) -> None:
    cluster.fail("a", _methods.GET_BROKER_STATUS, *busy()[:2])
    assert [status.broker_name for status in admin.broker_status()] == ["a", "b", "c"]


@pytest.mark.parametrize("error", [RequestTimeoutError, SystemBusyError, ConnectionLostError])
def test_a_send_to_any_queue_is_tried_six_times(
    cluster: FakeCluster, error: type[ProtomqError]
) -> None:
    """Twice at each of three brokers where the outcome is unknown, else once."""
    for name in cluster.brokers:
        cluster.script(name, *(error("x") for _ in range(MANY)))
    with Producer(transport=FakeSyncTransport(cluster)) as producer, pytest.raises(error):
        producer.send("T", b"x")
    assert len(cluster.calls) == (3 if error.definite else 6)


def test_a_send_to_a_chosen_queue_is_tried_three_times_by_a_broker_that_answers(
    cluster: FakeCluster,
) -> None:
    cluster.script("a", *busy())
    with Producer(transport=FakeSyncTransport(cluster)) as producer:
        with pytest.raises(SystemBusyError):
            producer.send("T", b"x", queue=MessageQueue("T", "a", 0))
    assert len(cluster.calls) == 3


def test_a_send_without_retries_is_tried_once(cluster: FakeCluster) -> None:
    for name in cluster.brokers:
        cluster.script(name, *busy())
    with Producer(transport=FakeSyncTransport(cluster), retries=0) as producer:
        with pytest.raises(SystemBusyError):
            producer.send("T", b"x")
    assert len(cluster.calls) == 1
