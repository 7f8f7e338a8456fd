"""Routes: how long they are trusted, what survives silent name servers, how addresses are read."""

from __future__ import annotations

import asyncio
import io
import socket
import threading
import time
import urllib.request
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import pytest

from protomq import _routes
from protomq._async_routes import AsyncRoutes
from protomq._async_transport import AsyncTransport
from protomq._call_steps import pull_address
from protomq._environment import NAMESRV_ADDR_VARIABLE
from protomq._name_servers import (
    NAMESRV_ADDR_DEFAULT,
    NameServerList,
    outcome_of_failures,
    parse_addresses,
)
from protomq._remoting_hello import split_address
from protomq._routes import (
    AUTO_CREATE_FRESH_S,
    BROKER_KEPT_S,
    CLOSED_FRESH_S,
    CLOSED_LONG_FRESH_S,
    KNOWN_WAIT_S,
    LACKING_FRESH_S,
    ROUTE_FRESH_S,
    SELDOM_FRESH_S,
    RouteCache,
    Routes,
    decode_route,
)
from protomq._transport import SyncTransport
from protomq._types import BrokerAddress, MessageQueue, Route
from protomq.errors import (
    ClosedError,
    ConfigurationError,
    ConnectFailedError,
    NoRouteError,
    RequestTimeoutError,
    TopicNotFoundError,
)
from protomq.v1 import route_service_pb2, topic_pb2
from tests.support.waiting import wait_for


def route(topic: str = "t", queues: int = 1, *, auto_create: bool = False) -> Route:
    members = tuple(MessageQueue(topic, "a", i) for i in range(queues))
    return Route(
        topic, members, members, {"a": BrokerAddress("a", "h:1", "h:2")}, ("a",), auto_create
    )


def test_addresses_are_separated_by_what_people_type() -> None:
    assert parse_addresses("a:1;b:2") == ["a:1", "b:2"]
    assert parse_addresses(" a:1, b:2\n[::1]:3 a:1") == ["a:1", "b:2", "[::1]:3"]
    assert parse_addresses(["a:1", "b:2"]) == ["a:1", "b:2"]


@pytest.mark.parametrize("text", ["", " ; ", "a", "a:", ":1", "a:x", "a:0", "a:70000", "a:-1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        parse_addresses(text)


def test_an_ipv6_address_loses_its_brackets() -> None:
    assert split_address("[::1]:9876") == ("::1", 9876)


def test_addresses_come_from_code_then_environment_then_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(NAMESRV_ADDR_VARIABLE, "env:1;env:2")
    assert {server.grpc_address for server in NameServerList().in_order()} == {"env:1", "env:2"}
    assert [server.grpc_address for server in NameServerList("code:3").in_order()] == ["code:3"]
    monkeypatch.delenv(NAMESRV_ADDR_VARIABLE)
    addresses = {server.grpc_address for server in NameServerList().in_order()}
    assert addresses == set(NAMESRV_ADDR_DEFAULT.split(";"))


def test_a_url_is_read_every_two_minutes_and_a_failure_keeps_what_was_known() -> None:
    names = NameServerList("http://127.0.0.1:1/list")
    assert names.needs_reading(0.0)
    names.read_url(0.2, 1000.0)  # Nobody listens there.
    assert names.in_order() == []
    assert not names.needs_reading(1001.0)
    assert names.needs_reading(1002.0)
    assert "http://127.0.0.1:1/list" in str(outcome_of_failures([], names))


def test_who_comes_during_the_first_read_of_a_url_reads_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = NameServerList("http://127.0.0.1:1/list")
    due_meanwhile = []

    def answer(*_: object, **__: object) -> io.BytesIO:
        due_meanwhile.append(names.needs_reading(now_s))
        return io.BytesIO(b"a:1;b:1")

    monkeypatch.setattr(urllib.request, "urlopen", answer)
    for now_s in (1000.0, 1000.0, 1120.0):
        names.read_url(0.2, now_s)
        assert len(names.in_order()) == 2
    # The second caller found it done; while it is read again, callers go on with what is known.
    assert due_meanwhile == [True, False]


def test_the_server_that_answered_is_asked_first() -> None:
    names = NameServerList(["a:1", "b:1", "c:1"])
    for server in names.in_order():
        names.prefer(server)
        order = names.in_order()
        assert order[0] == server
        assert len(set(order)) == 3


def test_a_route_is_fresh_for_thirty_seconds_and_used_afterwards() -> None:
    cache = RouteCache()
    assert cache.fresh("t", 0.0) is None
    stored = cache.store(route(), 0.0)
    assert cache.fresh("t", 29.9) is stored
    assert cache.fresh("t", 30.0) is None
    assert cache.known("t", 1000.0) is stored


def test_a_route_of_which_brokers_tell_is_trusted_for_longer_unless_it_is_in_doubt() -> None:
    cache = RouteCache()
    stored = cache.store(route(), 0.0, is_told=True)
    assert cache.fresh("t", ROUTE_FRESH_S) is stored
    assert cache.fresh("t", SELDOM_FRESH_S - 0.1) is stored
    assert cache.fresh("t", SELDOM_FRESH_S) is None
    cache.store(route(), 0.0, is_told=True)
    cache.invalidate("t", may_be_old=True)
    assert cache.fresh("t", 1.0) is None
    cache.store(route(auto_create=True), 0.0, is_told=True)
    assert cache.fresh("t", AUTO_CREATE_FRESH_S) is None


def test_one_caller_refreshes() -> None:
    cache = RouteCache()
    cache.store(route(), 0.0)
    assert cache.begin_refresh("t")
    assert not cache.begin_refresh("t")
    cache.store(route(), 30.0)
    assert cache.begin_refresh("t")


class NoThreads:
    """A server that cannot be called: the process gets no more threads."""

    def call(self, *_: object, **__: object) -> bytes:
        raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("refusing", [True, False], ids=["the thread", "the call"])
def test_a_refresh_that_gets_no_thread_is_not_the_last_one(
    monkeypatch: pytest.MonkeyPatch, refusing: bool
) -> None:
    routes = Routes(cast(SyncTransport, NoThreads()), "a:1")
    old = routes._cache.store(route(), time.monotonic() - 100.0)

    def start(thread: threading.Thread) -> None:
        if refusing:
            raise RuntimeError("can't start new thread")
        with suppress(RuntimeError):
            thread.run()

    monkeypatch.setattr(threading.Thread, "start", start)
    assert routes.get("t") is old
    assert routes._cache.begin_refresh("t")


def test_an_unchanged_route_stays_the_same_object() -> None:
    cache = RouteCache()
    first = cache.store(route(), 0.0)
    assert cache.store(route(), 1.0) is first
    assert cache.store(route(queues=2), 2.0) is not first


def route_at(*names: str) -> Route:
    members = tuple(MessageQueue("t", name, 0) for name in names)
    return Route("t", members, members, {name: BrokerAddress(name, f"{name}:1", f"{name}:2") for name in names}, names)


def test_a_broker_that_a_name_server_suddenly_does_not_know_is_kept_for_a_while() -> None:
    cache = RouteCache()
    whole = cache.store(route_at("a", "b"), 0.0)
    assert cache.begin_refresh("t")
    assert cache.store(route_at("a"), 30.0) is whole
    assert cache.fresh("t", 30.0 + LACKING_FRESH_S) is None, "it is looked up again soon"
    assert cache.begin_refresh("t")
    assert cache.store(route_at("a", "b"), 31.0) is whole
    assert cache.store(route_at("b"), 40.0) is whole, "it was complete meanwhile"
    assert cache.store(route_at("b"), 39.9 + BROKER_KEPT_S) is whole
    assert cache.store(route_at("b"), 40.0 + BROKER_KEPT_S) == route_at("b")


def test_a_broker_that_is_missing_after_an_error_is_gone_and_one_that_is_new_is_there_at_once() -> None:
    cache = RouteCache()
    cache.store(route_at("a"), 0.0)
    assert cache.store(route_at("a", "b"), 1.0) == route_at("a", "b")
    cache.invalidate("t", may_be_old=True)
    assert cache.store(route_at("a"), 2.0) == route_at("a", "b"), "a doubt is no error"
    cache.invalidate("t")
    assert cache.store(route_at("a"), 3.0) == route_at("a")


def test_a_topic_to_be_created_is_looked_up_soon() -> None:
    cache = RouteCache()
    cache.store(route(auto_create=True), 0.0)
    assert cache.fresh("t", 1.9) is not None
    assert cache.fresh("t", 2.0) is None


def test_a_producer_sends_by_no_old_route_of_a_topic_that_was_to_be_created() -> None:
    for sends in (True, False):
        cache = RouteCache(sends=sends)
        cache.store(route(auto_create=True), 0.0)
        assert (cache.known("t", 2.0) is None) is sends, "others may have made it meanwhile, elsewhere"
        assert cache.failed("t", NoRouteError("silent"), 2.0) is not None, "while no name server answers it is used"


def test_a_route_that_was_only_looked_at_is_forgotten_if_the_topic_does_not_exist() -> None:
    cache = RouteCache(sends=True)
    cache.store(route(auto_create=True), 0.0)
    cache.forget_unmade("t")
    assert cache.last_known("t") is None
    cache.store(route(), 0.0)
    cache.forget_unmade("t")
    assert cache.last_known("t") == route()


def test_a_producer_looks_for_a_closed_broker_each_second_as_long_as_others_can_be_written() -> None:
    closed = replace(route_at("a", "b"), writable_brokers=("b",), is_partly_closed=True)
    for sends, fresh_s in ((True, CLOSED_FRESH_S), (False, ROUTE_FRESH_S)):
        cache = RouteCache(sends=sends)
        cache.store(closed, 0.0)
        assert cache.fresh("t", fresh_s - 0.1) is closed
        assert cache.fresh("t", fresh_s) is None
        cache.store(route_at("a", "b"), 100.0)
        assert cache.fresh("t", 99.9 + ROUTE_FRESH_S) == route_at("a", "b")


def test_a_broker_that_is_closed_for_long_is_looked_for_less_often_until_something_changes() -> None:
    closed = replace(route_at("a", "b"), writable_brokers=("b",), is_partly_closed=True)
    cache = RouteCache(sends=True)

    def fresh_s(found: Route, now_s: float) -> float:
        cache.store(replace(found), now_s)
        return next(age_s for age_s in (CLOSED_FRESH_S, CLOSED_LONG_FRESH_S, ROUTE_FRESH_S) if not cache.fresh("t", now_s + age_s))

    assert [fresh_s(closed, float(now_s)) for now_s in range(300)] == [CLOSED_FRESH_S] * 300
    assert [fresh_s(closed, 300.0 + now_s) for now_s in (0, 5, 10)] == [CLOSED_LONG_FRESH_S] * 3
    assert fresh_s(replace(closed, writable_brokers=("a",)), 315.0) == CLOSED_FRESH_S, "another one is closed"
    assert fresh_s(route_at("a", "b"), 316.0) == ROUTE_FRESH_S
    assert fresh_s(closed, 900.0) == CLOSED_FRESH_S


def test_an_invalid_route_is_looked_up_but_not_five_times_in_a_row() -> None:
    cache = RouteCache()
    cache.store(route(), 0.0)
    cache.invalidate("t")
    assert cache.fresh("t", 0.1) is None
    assert cache.known("t", 0.1) is not None
    assert cache.known("t", 0.2) is None


def test_who_doubts_a_route_while_it_is_looked_up_has_it_looked_up_once_more() -> None:
    cache = RouteCache()
    old = cache.store(route(), 0.0)
    cache.invalidate("t", may_be_old=True)
    doubt_count = cache.doubt_count("t")
    cache.invalidate("t", may_be_old=True)
    assert cache.store(route(), 1.0, doubt_count=doubt_count) is old
    assert cache.fresh("t", 1.0) is None, "the name server may have answered before the change"
    doubt_count = cache.doubt_count("t")
    cache.store(route(queues=2), 2.0, doubt_count=doubt_count)
    assert cache.fresh("t", 2.0) == route(queues=2)
    # Another thread has begun before the first doubt, and is answered last.
    cache.store(route(), 3.0, doubt_count=0)
    assert cache.fresh("t", 3.0) is None


def test_a_thread_that_waits_for_a_route_trusts_none_that_was_doubted_meanwhile() -> None:
    class DoubtingOthers:
        def __init__(self) -> None:
            self.asked = 0

        def call(self, *_: object, **__: object) -> bytes:
            self.asked += 1
            share = route_service_pb2.QueueRoute(
                broker_name="a", write_queues=self.asked, read_queues=1, permission=topic_pb2.PERMISSION_READ_WRITE
            )
            broker = route_service_pb2.Broker(broker_name="a", grpc_address="h:1", permission=topic_pb2.PERMISSION_READ_WRITE)
            answer = route_service_pb2.GetRouteResponse(route=route_service_pb2.Route(topic="t", queues=[share], brokers=[broker]))
            if self.asked == 1:  # Another thread's call fails while the answer is on its way.
                routes.invalidate("t")
            return answer.SerializeToString()

    names = DoubtingOthers()
    routes = Routes(cast(SyncTransport, names), "a:1")
    routes._cache.store(route(queues=9), time.monotonic() - ROUTE_FRESH_S)
    routes.invalidate("t")
    assert len(routes.get("t").write_queues) == 1
    assert routes.cached("t") is None, "the name server may have answered before the change"
    routes.get("t")
    wait_for(lambda: routes.cached("t") is not None and names.asked == 2)


def test_the_last_known_route_is_used_while_no_name_server_answers() -> None:
    cache = RouteCache()
    stored = cache.store(route(), 0.0)
    cache.invalidate("t")
    assert cache.failed("t", NoRouteError("silence"), 10.0) is stored
    assert cache.fresh("t", 11.9) is stored
    assert cache.fresh("t", 12.0) is None
    assert cache.failed("u", NoRouteError("silence"), 10.0) is None


class SilentNameServer:
    """Says nothing for as long as it is asked."""

    def __init__(self) -> None:
        self.waited_s: list[float] = []

    def call(self, _: object, __: object, ___: object, timeout_s: float, **____: object) -> bytes:
        self.waited_s.append(timeout_s)
        raise RequestTimeoutError("silence")


class SilentNameServerOfLoop(SilentNameServer):
    async def call(self, *_: object, **__: object) -> bytes:  # type: ignore[override]
        await asyncio.sleep(3600)
        return b""


def test_silent_name_servers_hold_up_nobody_who_has_a_route() -> None:
    names = SilentNameServer()
    routes = Routes(cast(SyncTransport, names), "a:1")
    with pytest.raises(NoRouteError):
        routes.get("t", 3.0)
    known = routes._cache.store(route(), time.monotonic() - 1.0)
    routes.invalidate("t")
    assert routes.get("t", 3.0) is known
    assert names.waited_s == [pytest.approx(3.0, abs=0.3), pytest.approx(KNOWN_WAIT_S, abs=0.3)]
    assert routes.cached("t") is known, "the next one does not wait"


async def test_silent_name_servers_hold_up_no_coroutine_that_has_a_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_routes, "KNOWN_WAIT_S", 0.001)
    routes = AsyncRoutes(cast(AsyncTransport, SilentNameServerOfLoop()), "a:1")
    with pytest.raises(NoRouteError):
        await routes.get("t", 0.01)
    known = routes._cache.store(route(), time.monotonic() - 1.0)
    routes.invalidate("t")
    assert await routes.get("t", 3600.0) is known
    assert routes.cached("t") is known, "the next one does not wait"
    await routes.close()


class SlowNameServerOfLoop:
    """Answers each look-up when the test lets it, with the queues that it knew when it was asked."""

    def __init__(self) -> None:
        self.queues = 1
        self.may_answer = asyncio.Event()
        self.asked = 0

    async def call(self, *_: object, **__: object) -> bytes:
        self.asked += 1
        share = route_service_pb2.QueueRoute(
            broker_name="a", write_queues=self.queues, read_queues=self.queues, permission=topic_pb2.PERMISSION_READ_WRITE
        )
        broker = route_service_pb2.Broker(broker_name="a", grpc_address="h:1", permission=topic_pb2.PERMISSION_READ_WRITE)
        answer = route_service_pb2.GetRouteResponse(route=route_service_pb2.Route(topic="t", queues=[share], brokers=[broker]))
        await self.may_answer.wait()
        return answer.SerializeToString()

    def look_again(self) -> None:
        pass


async def test_a_coroutine_that_doubts_a_route_while_it_is_looked_up_has_it_looked_up_once_more() -> None:
    """A broker says that the route is another one, and the answer under way may be from before that. As for threads."""
    names = SlowNameServerOfLoop()
    routes = AsyncRoutes(cast(AsyncTransport, names), "a:1")
    routes._cache.store(route(), time.monotonic() - ROUTE_FRESH_S)
    await routes.current("t")
    await asyncio.sleep(0)
    names.queues = 2
    routes.invalidate("t", may_be_old=True)
    await routes.current("t")
    names.may_answer.set()
    await asyncio.wait(routes._looking_up.values())
    assert routes.cached("t") is None, "the name server may have answered before the change"
    await routes.current("t")
    await asyncio.wait(routes._looking_up.values())
    assert len((await routes.get("t")).read_queues) == 2
    assert names.asked == 2


async def test_coroutines_that_share_a_look_up_raise_an_exception_object_each() -> None:
    class Gone:
        async def call(self, *_: object, **__: object) -> bytes:
            await asyncio.sleep(0)
            raise TopicNotFoundError("no such topic")

    routes = AsyncRoutes(cast(AsyncTransport, Gone()), "a:1")
    errors = await asyncio.gather(*[routes.get("t") for _ in range(3)], return_exceptions=True)
    assert [type(error) for error in errors] == [TopicNotFoundError] * 3
    assert len({id(error) for error in errors}) == 3, "they would write into each other's traceback"


async def test_a_close_ends_a_look_up_with_an_error_of_its_own_and_cancels_none_who_wait() -> None:
    routes = AsyncRoutes(cast(AsyncTransport, SilentNameServerOfLoop()), "a:1")
    cancelled, *waiting = [asyncio.create_task(routes.get("t", 3600.0)) for _ in range(3)]
    await asyncio.sleep(0.01)
    cancelled.cancel()
    await asyncio.wait((cancelled,))
    assert cancelled.cancelled()
    assert not any(task.done() for task in waiting), "they share the look-up, not the cancellation"
    await routes.close()
    for task in waiting:
        with pytest.raises(ClosedError):
            await task


class ClosedTransport:
    def call(self, *_: object, **__: object) -> bytes:
        raise ClosedError("the transport is closed")


def test_no_name_server_is_blamed_for_a_look_up_of_a_client_that_was_closed(caplog: pytest.LogCaptureFixture) -> None:
    routes = Routes(cast(SyncTransport, ClosedTransport()), "a:1")
    known = routes._cache.store(route(), time.monotonic() - ROUTE_FRESH_S - 1.0)
    routes._refresh("t")
    assert routes.last_known("t") is known
    assert caplog.messages == []


GONE = TopicNotFoundError("no such topic")
AWAY = TopicNotFoundError("away", metadata={"topic": "t", "missing_brokers": "a"})


def test_a_route_that_every_name_server_forgot_is_kept_for_five_minutes() -> None:
    cache = RouteCache()
    stored = cache.store(route(), 0.0)
    assert cache.failed("t", GONE, 30.0) is stored
    assert cache.failed("t", GONE, 329.0) is stored
    assert cache.failed("t", GONE, 330.0) is None
    assert cache.last_known("t") is None


def test_while_its_broker_is_away_too_a_name_server_that_has_just_started_is_not_believed() -> None:
    cache = RouteCache(sends=True)
    stored = cache.store(route(), 0.0)
    for second in range(1, 301):
        cache.invalidate("t")
        assert cache.failed("t", GONE, float(second)) is stored
    cache.invalidate("t")
    assert cache.failed("t", GONE, 301.0) is None, "a broker that was removed for good"


def test_of_topics_that_are_said_to_be_away_the_latest_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that goes from topic to topic, for replies say, must not keep what it knew of each."""
    monkeypatch.setattr(_routes, "AWAY_MAX", 2)
    cache = RouteCache()
    for topic in ("a", "b", "a", "c"):
        cache.store(route(topic), 0.0)
        cache.invalidate(topic)
        assert cache.failed(topic, AWAY, 1.0) is None
    cache.store(route("d"), 0.0)
    cache.invalidate("d")
    assert cache.failed("d", AWAY, 1.0) is None
    assert cache.failed("a", GONE, 2.0) is None
    assert cache.failed("c", GONE, 2.0) == route("c")
    assert cache.failed("d", GONE, 2.0) == route("d")


def test_what_is_said_to_be_away_is_known_to_the_name_server_that_comes_next() -> None:
    cache = RouteCache()
    stored = cache.store(route(), 0.0)
    cache.invalidate("t")
    assert cache.failed("t", AWAY, 1.0) is None
    assert cache.failed("t", AWAY, 2.0) is None
    assert cache.failed("t", NoRouteError("it restarts"), 3.0) is stored
    assert cache.failed("t", GONE, 4.0) is stored
    cache.invalidate("t")
    assert cache.failed("t", GONE, 303.0) is stored
    assert cache.failed("t", AWAY, 304.0) is None
    cache.invalidate("t", is_denied=True)
    assert cache.failed("t", GONE, 305.0) is None, "the broker is back, and does not have it"


def test_when_a_broker_denies_the_topic_not_found_is_believed_at_once() -> None:
    cache = RouteCache()
    cache.store(route(), 0.0)
    cache.invalidate("t", is_denied=True)
    cache.invalidate("t", may_be_old=True)
    assert cache.failed("t", GONE, 1.0) is None
    assert cache.last_known("t") is None
    again = cache.store(route(), 2.0)
    cache.invalidate("t")
    assert cache.failed("t", GONE, 3.0) is again, "it was made again since"


def test_a_topic_that_was_to_be_made_is_nowhere_after_a_routing_error() -> None:
    cache = RouteCache(sends=True)
    cache.store(route(auto_create=True), 0.0)
    cache.invalidate("t")
    assert cache.failed("t", GONE, 1.0) is None


def test_an_answer_counts_more_than_silence() -> None:
    names = NameServerList("a:1;b:1")
    missing = TopicNotFoundError("no such topic")
    assert outcome_of_failures([ConnectFailedError("dead"), missing], names) is missing
    assert isinstance(outcome_of_failures([ConnectFailedError("dead")], names), NoRouteError)


def test_permissions_and_slaves_decide_what_is_written_and_read() -> None:
    def broker(name: str, broker_id: int, permission: Any = 0) -> route_service_pb2.Broker:
        return route_service_pb2.Broker(
            broker_name=name,
            broker_id=broker_id,
            grpc_address=f"{name}{broker_id}:1",
            permission=permission,
        )

    message = route_service_pb2.Route(
        topic="t",
        queues=[
            route_service_pb2.QueueRoute(broker_name="c", write_queues=1, read_queues=2),
            route_service_pb2.QueueRoute(broker_name="a", write_queues=2, read_queues=2),
            route_service_pb2.QueueRoute(
                broker_name="b", write_queues=2, read_queues=2, permission=topic_pb2.PERMISSION_READ
            ),
            route_service_pb2.QueueRoute(broker_name="d", write_queues=2, read_queues=2),
            route_service_pb2.QueueRoute(broker_name="unknown", write_queues=2, read_queues=2),
        ],
        brokers=[
            broker("a", 1), broker("a", 0), broker("b", 0), broker("c", 2), broker("d", 0, topic_pb2.PERMISSION_WRITE),
            route_service_pb2.Broker(broker_name="e", epoch=3),
        ],
    )  # fmt: skip
    found = decode_route(route_service_pb2.GetRouteResponse(route=message).SerializeToString())
    assert [(queue.broker_name, queue.queue_id) for queue in found.write_queues] == [
        ("a", 0), ("a", 1), ("d", 0), ("d", 1),
    ]  # fmt: skip
    assert found.writable_brokers == ("a", "d")
    assert {queue.broker_name for queue in found.read_queues} == {"a", "b", "c"}
    assert found.brokers["a"].grpc_address == "a0:1"
    assert found.brokers["c"].grpc_address == "c2:1"
    assert found.is_partly_closed
    assert found.elected_brokers == {"e"}
    assert found.lone_brokers == {"b", "d"}, "the others have slaves, or were elected"


def test_a_page_that_is_no_list_is_said_by_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: io.BytesIO(b"<html>"))
    names = NameServerList("http://web/page")
    names.read_url(1.0, 0.0)
    error = outcome_of_failures([], names)
    assert "cannot be read from http://web/page: an address has the form host:port, " in str(error)


def test_a_url_that_is_no_list_is_said_with_what_to_write() -> None:
    # A name server that is written as a URL: it answers, but not in HTTP.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(1024)
                peer.sendall(b"\0\0\0\x04nope\r\n\r\n")

        answering = threading.Thread(target=answer)
        answering.start()
        names = NameServerList(f"http://127.0.0.1:{port}")
        names.read_url(10.0, 0.0)
        answering.join()
    error = outcome_of_failures([], names)
    assert isinstance(error, NoRouteError)
    assert f"cannot be read from http://127.0.0.1:{port}" in str(error)
    assert "what answers there does not speak HTTP; a URL names a list of addresses" in str(error)
    assert "a name server itself is written host:port" in str(error)


@pytest.mark.parametrize("url", ["http://", "https:///list", "http://a:b/list", "http://a:0", "http://a b/", "http://[::1/list"])
def test_a_url_that_names_no_host_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigurationError, match="write http://host:port/path, or host:port"):
        NameServerList(url)


def test_a_pull_goes_to_the_slave_that_was_suggested_while_the_route_has_it() -> None:
    message = route_service_pb2.Route(topic="t")
    for broker_id in (2, 0, 1):
        message.brokers.add(broker_name="a", broker_id=broker_id, grpc_address=f"g:{broker_id}", remoting_address=f"r:{broker_id}")
    message.queues.add(broker_name="a", read_queues=1, write_queues=1, permission=topic_pb2.PERMISSION_READ_WRITE)
    data = route_service_pb2.GetRouteResponse(route=message).SerializeToString()
    found = decode_route(data)
    queue = MessageQueue("t", "a", 0)
    assert found.slaves == {("a", 1): BrokerAddress("a", "g:1", "r:1"), ("a", 2): BrokerAddress("a", "g:2", "r:2")}
    addresses = [pull_address(found, queue, broker_id) for broker_id in (0, 2, 9)]
    assert addresses == [BrokerAddress("a", f"g:{i}", f"r:{i}") for i in (0, 2, 0)]
    assert pull_address(None, queue, 2) is None
    assert pull_address(found, MessageQueue("t", "b", 0), 2) is None
