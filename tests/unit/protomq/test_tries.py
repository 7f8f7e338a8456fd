"""How often each client asks at most, counted at the servers of a fake cluster: the table of `protomq._retry`, line by line."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from protomq import (
    Admin,
    MessageQueue,
    Producer,
    PullConsumer,
    _admin_calls,
    _methods,
    _pull_consumer,
    _routes,
    calls,
)
from protomq.calls import ONCE, Calls
from protomq.errors import (
    ConnectFailedError,
    ConnectionLostError,
    NoRouteError,
    NotMasterError,
    ProtomqError,
    RequestTimeoutError,
    SystemBusyError,
    TopicNotFoundError,
)
from protomq.v1.send_service_pb2 import SendRequest
from protomq.wire.record import RecordTemplate
from tests.support.fake_cluster import FakeCluster, FakeSyncTransport, after_storing

NAME_SERVER = ""
MANY = 20


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster({"T": {"a": 1, "b": 1, "c": 1}})


def busy() -> list[ProtomqError]:
    return [SystemBusyError("x") for _ in range(MANY)]


@pytest.fixture
def admin(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Admin]:
    monkeypatch.setattr(_admin_calls, "SyncTransport", lambda _: FakeSyncTransport(cluster))
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


@pytest.fixture
def consumer(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[PullConsumer]:
    monkeypatch.setattr(_pull_consumer, "transport_with", lambda *_: FakeSyncTransport(cluster))
    with PullConsumer("g", namesrv="n:1", auto_commit=False) as consumer:
        yield consumer


@pytest.mark.parametrize("error", [SystemBusyError, ConnectionLostError, ConnectFailedError])
def test_a_consumer_asks_a_broker_three_times(
    cluster: FakeCluster, consumer: PullConsumer, error: type[ProtomqError]
) -> None:
    queue = MessageQueue("T", "a", 0)
    methods = {
        _methods.GET_OFFSETS: lambda: consumer.committed(queue),
        _methods.GET_QUEUE_RANGE: lambda: consumer.end_offset(queue),
        _methods.COMMIT_OFFSETS: lambda: consumer.commit({queue: 0}),
    }
    for method, call in methods.items():
        cluster.fail("a", method, *(error("x") for _ in range(MANY)))
        with pytest.raises(error):
            call()
        assert cluster.tries("a", method) == 3


def test_a_lost_name_server_and_a_lost_broker_do_not_multiply(
    cluster: FakeCluster, consumer: PullConsumer
) -> None:
    """There were three layers once that tried again."""
    cluster.fail(NAME_SERVER, _methods.GET_ROUTE, *(ConnectionLostError("x") for _ in range(MANY)))
    with pytest.raises(NoRouteError):
        consumer.end_offset(MessageQueue("T", "a", 0))
    assert cluster.tries(NAME_SERVER, _methods.GET_ROUTE) == 6  # Three tries, each with one connection rebuilt.
    assert cluster.tries("a", _methods.GET_QUEUE_RANGE) == 0


@pytest.fixture
def once(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    monkeypatch.setattr(calls, "SyncTransport", lambda _: FakeSyncTransport(cluster))
    with Calls(namesrv="n:1", retries=ONCE) as made:
        yield made


def test_calls_that_are_made_once_are_made_once(cluster: FakeCluster, once: Calls) -> None:
    cluster.fail("a", _methods.GET_QUEUE_RANGE, *busy())
    with pytest.raises(SystemBusyError):
        once.queue_ranges("T", "a", [0])
    assert cluster.tries("a", _methods.GET_QUEUE_RANGE) == 1


def test_a_broker_that_leads_no_more_does_not_deny_its_topic_so_a_name_server_that_has_just_started_is_not_believed(
    cluster: FakeCluster, once: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_routes, "INVALIDATE_INTERVAL_S", 0.0)
    assert once.queue_ranges("T", "a", [0]).ranges
    cluster.fail("a", _methods.GET_QUEUE_RANGE, NotMasterError("x"))
    cluster.fail(NAME_SERVER, _methods.GET_ROUTE, TopicNotFoundError("nobody has registered yet"))
    with pytest.raises(NotMasterError):
        once.queue_ranges("T", "a", [0])
    assert once.queue_ranges("T", "a", [0]).ranges


def test_who_looks_for_a_topic_hears_that_it_is_not_there_or_that_nobody_answers(cluster: FakeCluster, once: Calls) -> None:
    cluster.fail(NAME_SERVER, _methods.GET_ROUTE, TopicNotFoundError("x"))
    assert once.find_route("new") is None
    cluster.fail(NAME_SERVER, _methods.GET_ROUTE, *(ConnectionLostError("x") for _ in range(2)))
    with pytest.raises(NoRouteError):
        once.find_route("T")
    found = once.find_route("T")
    assert found is not None
    assert [queue.broker_name for queue in found.read_queues] == ["a", "b", "c"]


def test_a_broker_that_denies_a_topic_and_a_name_server_that_agrees_are_believed(
    cluster: FakeCluster, once: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_routes, "INVALIDATE_INTERVAL_S", 0.0)
    assert once.queue_ranges("T", "a", [0]).ranges
    cluster.fail("a", _methods.GET_QUEUE_RANGE, TopicNotFoundError("it was deleted"))
    cluster.fail(NAME_SERVER, _methods.GET_ROUTE, TopicNotFoundError("nobody has it"))
    for _ in range(2):
        with pytest.raises(TopicNotFoundError):
            once.queue_ranges("T", "a", [0])


def test_calls_until_the_end_send_the_same_octets_again_which_brokers_recognise(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "SyncTransport", lambda _: FakeSyncTransport(cluster))
    template = RecordTemplate("T", 5, 0)
    request = SendRequest(topic="T")
    request.records.add().ParseFromString(template.encode(b"x", 1, 0))
    queue = MessageQueue("T", "a", 0)
    cluster.script("a", SystemBusyError("x"), after_storing(ConnectionLostError("x")))
    with Calls(namesrv="n:1", timeout_s=60.0) as made:
        stored = made.send(queue, request.SerializeToString())
    assert (stored.queue_offset, stored.repeated) == (0, True)
    assert cluster.bodies() == [b"x"]
    assert len(cluster.calls) == 3
