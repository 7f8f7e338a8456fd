"""All brokers of a topic are away, and the name servers say so: that is an outage, not a topic that was deleted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

from protomq import (
    Admin,
    AsyncProducer,
    MessageQueue,
    Producer,
    PullConsumer,
    SimpleConsumer,
    TransactionProducer,
    _admin_calls,
    _methods,
    _pop,
    _pull_consumer,
    _routes,
    calls,
)
from protomq._name_servers import NameServerList, outcome_of_failures
from protomq._outages import Outages
from protomq._retry import is_away, is_denial
from protomq.calls import Calls
from protomq.errors import ConnectionLostError, NoRouteError, ProtomqError, TopicNotFoundError
from tests.support.fake_cluster import FakeAsyncTransport, FakeCluster, FakeSyncTransport
from tests.support.waiting import wait_for

NAME_SERVER = ""
TEXT = "no broker has the topic T; not registered any more, but had it: a"
AWAY = {"topic": "T", "missing_brokers": "a"}


def away() -> TopicNotFoundError:
    """As a name server answers."""
    return TopicNotFoundError(TEXT, metadata=AWAY)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    monkeypatch.setattr(_routes, "INVALIDATE_INTERVAL_S", 0.0)
    made = FakeCluster()
    for module in (_pull_consumer, _pop):
        monkeypatch.setattr(module, "transport_with", lambda *_: FakeSyncTransport(made))
    for module in (_admin_calls, calls):
        monkeypatch.setattr(module, "SyncTransport", lambda _: FakeSyncTransport(made))
    return made


def leave(cluster: FakeCluster) -> None:
    """All brokers go."""
    cluster.fail(NAME_SERVER, _methods.GET_ROUTE, *(away() for _ in range(200)))


def send(cluster: FakeCluster) -> None:
    with Producer(transport=FakeSyncTransport(cluster), send_timeout_s=0.3) as producer:
        producer.send("T", b"x")


def send_async(cluster: FakeCluster) -> None:
    async def run() -> None:
        async with AsyncProducer(transport=FakeAsyncTransport(cluster), send_timeout_s=0.3) as producer:
            await producer.send("T", b"x")

    asyncio.run(run())


def send_batch(cluster: FakeCluster) -> None:
    with Producer(transport=FakeSyncTransport(cluster), send_timeout_s=0.3) as producer:
        producer.send_batch("T", [b"x", b"y"])


def request(cluster: FakeCluster) -> None:
    with Producer(transport=FakeSyncTransport(cluster), send_timeout_s=0.3) as producer:
        producer.request("T", b"x", timeout_s=0.3)


def look(cluster: FakeCluster) -> None:
    with Producer(transport=FakeSyncTransport(cluster)) as producer:
        producer.queues("T")


def begin(cluster: FakeCluster) -> None:
    transport = FakeSyncTransport(cluster)
    with TransactionProducer("g", lambda _: None, transport=transport, send_timeout_s=0.3) as producer:  # type: ignore[arg-type,return-value]
        producer.begin("T", b"x")


def subscribe(cluster: FakeCluster) -> None:
    with PullConsumer("", namesrv="n:1") as consumer:
        consumer.subscribe("T")


def ranges(cluster: FakeCluster) -> None:
    with PullConsumer("", namesrv="n:1", request_timeout_s=0.3) as consumer:
        consumer.queue_range(MessageQueue("T", "a", 0))


@pytest.mark.parametrize("do", [send, send_async, send_batch, request, look, begin, subscribe, ranges])
def test_who_needs_a_topic_whose_brokers_are_away_hears_that_no_route_is_there(
    cluster: FakeCluster, do: Callable[[FakeCluster], None]
) -> None:
    leave(cluster)
    with pytest.raises(NoRouteError, match=TEXT) as caught:
        do(cluster)
    error = caught.value
    assert (error.definite, error.retriable, error.metadata["missing_brokers"]) == (True, True, "a")
    assert isinstance(error.__cause__, TopicNotFoundError) or error.__suppress_context__


@pytest.mark.parametrize("do", [send, send_async, look, subscribe])
def test_of_a_topic_that_nobody_had_it_is_said_that_it_does_not_exist(cluster: FakeCluster, do: Callable[[FakeCluster], None]) -> None:
    cluster.fail(NAME_SERVER, _methods.GET_ROUTE, *(TopicNotFoundError("none", metadata={"missing_brokers": ""}) for _ in range(9)))
    with pytest.raises(TopicNotFoundError):
        do(cluster)


@pytest.mark.parametrize("lost", [True, False])
def test_after_a_try_whose_answer_was_lost_it_is_not_definite(cluster: FakeCluster, lost: bool) -> None:
    with Producer(transport=FakeSyncTransport(cluster), send_timeout_s=0.3) as producer:
        producer.send("T", b"first")
        cluster.script("a", ConnectionLostError("it was killed"))
        if not lost:
            producer._routes.invalidate("T")
        leave(cluster)
        with pytest.raises(NoRouteError, match=TEXT) as caught:
            producer.send("T", b"x")
    assert caught.value.definite is not lost


def test_a_receive_waits_for_brokers_that_are_away(cluster: FakeCluster, caplog: pytest.LogCaptureFixture) -> None:
    leave(cluster)
    with SimpleConsumer("g", namesrv="n:1") as consumer:
        assert consumer.receive("T", hold_s=0.3) == []
    assert "the name server does not answer" not in caplog.text


def test_admin_asks_nobody_for_queues_of_a_topic_that_is_away(cluster: FakeCluster) -> None:
    leave(cluster)
    cluster.away.add("a")
    with Admin(namesrv="n:1") as admin, pytest.raises(NoRouteError, match="not registered any more"):
        admin.describe_topic("T")


def test_calls_say_the_same_and_find_no_route(cluster: FakeCluster) -> None:
    leave(cluster)
    with Calls(namesrv="n:1", timeout_s=0.3) as made:
        with pytest.raises(NoRouteError, match=TEXT):
            made.route("T")
        assert made.find_route("T") is None


def test_of_name_servers_the_one_counts_that_knows_who_is_away() -> None:
    names = NameServerList("a:1;b:1")
    new, old = TopicNotFoundError("no topic", metadata={"topic": "T", "missing_brokers": ""}), away()
    assert outcome_of_failures([new, old], names) is old
    assert outcome_of_failures([old, new], names) is old
    assert outcome_of_failures([new], names) is new
    started = TopicNotFoundError("no broker", metadata={"topic": "T", "missing_brokers": "", "registered_brokers": "0"})
    assert outcome_of_failures([started, new], names) is new
    assert outcome_of_failures([started, new, old], names) is old
    assert outcome_of_failures([started], names) is started


def test_who_is_away_is_not_who_denies() -> None:
    told: list[tuple[ProtomqError, bool, bool]] = [
        (away(), True, False),
        (NoRouteError(TEXT, metadata=AWAY), True, False),
        (NoRouteError("no name server answers"), False, False),
        (TopicNotFoundError("none"), False, True),
    ]
    assert [(is_away(error), is_denial(error)) for error, *_ in told] == [(is_it, denies) for _, is_it, denies in told]


def test_the_log_says_that_the_name_server_has_answered(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "protomq")
    outages = Outages(lambda: 0.0)
    outages.failed("the name server", "T", NoRouteError(TEXT, metadata=AWAY))
    outages.failed("broker a", "T", NoRouteError(TEXT, metadata=AWAY))
    outages.failed("the name server", "U", NoRouteError("no name server answers"))
    assert caplog.messages == [
        f"the name server, asked about topic T, knows of no broker that is there, trying again: {TEXT}",
        f"broker a does not answer, trying again: {TEXT}",
        "the name server does not answer, trying again: no name server answers",
    ]


def test_a_consumer_whose_broker_goes_in_that_moment_does_not_begin_as_in_a_topic_that_is_not_made_yet(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    queue = MessageQueue("T", "a", 0)

    def has_begun() -> bool:
        consumer.poll(0.05)
        return not consumer._steps.state.lacks_position(queue)

    cluster.committed["g", "T", 0] = 7
    with PullConsumer("g", namesrv="n:1", request_timeout_s=0.3) as consumer:
        leave(cluster)
        consumer.assign([queue])
        assert consumer._steps.state.lacks_position(queue)
        consumer.poll(0.0)
        cluster._failures.clear()
        wait_for(has_begun, 5.0)
        assert consumer.position(queue) == 7
    assert "does not exist" not in caplog.text
