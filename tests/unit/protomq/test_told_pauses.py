"""Sends that a broker has told to wait, while somebody else gets its place. A simulated clock, no sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from protomq import MessageQueue
from protomq._async_steps import AsyncDriver
from protomq._outgoing import Stored
from protomq._producer_options import ProducerOptions
from protomq._send_core import SendCore
from protomq._send_steps import send_request
from protomq._steps import Driver
from protomq._types import BrokerAddress, MethodInfo, Route, Target
from protomq.errors import (
    ClosedError,
    DiskFullError,
    NoRouteError,
    ProtomqError,
    RequestTimeoutError,
    TooManyError,
)
from protomq.v1.send_service_pb2 import SendResponse, SendStatus

FIRST = BrokerAddress("a", "first:1", "first:2")
SECOND = BrokerAddress("a", "second:1", "second:2")
OTHER = BrokerAddress("b", "other:1", "other:2")
QUEUE = MessageQueue("T", "a", 0)
ELECTED = Route(
    "T", (QUEUE,), (QUEUE,), {"a": FIRST}, ("a",), slaves={("a", 2): SECOND}, elected_brokers=frozenset({"a"})
)
FOLLOWED = replace(ELECTED, elected_brokers=frozenset())
"""Its master has a slave, and was not elected."""
LONE = replace(FOLLOWED, slaves={}, lone_brokers=frozenset({"a"}))
REPLACED = replace(ELECTED, brokers={"a": SECOND}, slaves={("a", 1): FIRST})
LEADERLESS = replace(ELECTED, write_queues=(), writable_brokers=(), leaderless_brokers=("a",), elected_brokers=frozenset())
OPENED = replace(
    LONE, write_queues=(QUEUE, MessageQueue("T", "b", 0)), brokers={"a": FIRST, "b": OTHER}, writable_brokers=("a", "b"),
    lone_brokers=frozenset({"a", "b"}),
)  # fmt: skip
LOOK_UP_S = 0.02
"""How long a name server takes."""


class World:
    """A producer's route and brokers. A look-up behind its back is there LOOK_UP_S later."""

    def __init__(self, route: Route, **options: Any) -> None:
        self.now_s = 1000.0
        self.core = SendCore(ProducerOptions(**options), clock=lambda: self.now_s)
        self.route = self.known = route
        """As the name servers have it, and as the producer has it."""
        self.changes: list[tuple[float, Route]] = []
        self.full = {FIRST}
        self.error: Callable[[], ProtomqError] = lambda: DiskFullError("full", retry_delay_ms=10_000)
        self.tries: list[tuple[float, BrokerAddress]] = []
        self.looks = 0
        self.unknown: ProtomqError | None = None
        self._is_old = False
        self._answers: list[float] = []

    def changed(self, after_s: float, route: Route) -> None:
        """The name servers have another route from then on."""
        self.changes.append((1000.0 + after_s, route))

    def pause(self, seconds: float) -> None:
        """Time passes."""
        assert seconds > 0
        self.now_s += seconds
        for at_s in [at_s for at_s in self._answers if at_s <= self.now_s]:
            self._answers.remove(at_s)
            self.known, self._is_old = self._route_at(at_s), False

    def _route_at(self, at_s: float) -> Route:
        return next((route for since_s, route in reversed(self.changes) if since_s <= at_s), self.route)

    def get(self, topic: str, timeout_s: float) -> Route:
        """See Routes.get."""
        if self._is_old:
            self.known, self._is_old = self._route_at(self.now_s), False
        return self.known

    def current(self, topic: str, timeout_s: float) -> Route:
        """See Routes.current."""
        if self.unknown is not None:
            raise self.unknown
        if self._is_old and not self._answers:
            self.looks += 1
            self._answers.append(self.now_s + LOOK_UP_S)
        return self.known

    def invalidate(self, topic: str, *, may_be_old: bool = False, is_denied: bool = False) -> None:
        """See RouteBook.invalidate."""
        self._is_old = True

    def call(
        self, address: BrokerAddress, method: MethodInfo, payload: Sequence[bytes], timeout_s: float, *, one_way: bool = False
    ) -> bytes:
        """See SyncTransport.call."""
        self.tries.append((round(self.now_s - 1000.0, 3), address))
        if address in self.full:
            raise self.error()
        return SendResponse(status=SendStatus.SEND_STATUS_SEND_OK, record_count=1).SerializeToString()

    def steps(self, timeout_s: float, queue: MessageQueue | None) -> object:
        """One message."""
        records = [self.core.prepare(b"x")]
        return send_request(self.core, self.known, records, Target(queue, None), self.now_s + timeout_s)


class AsyncWorld:
    """The same for coroutines."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def pause(self, seconds: float) -> None:
        self._world.pause(seconds)

    async def get(self, topic: str, timeout_s: float) -> Route:
        return self._world.get(topic, timeout_s)

    async def current(self, topic: str, timeout_s: float) -> Route:
        return self._world.current(topic, timeout_s)

    def invalidate(self, topic: str, *, may_be_old: bool = False, is_denied: bool = False) -> None:
        self._world.invalidate(topic)

    async def call(
        self, address: BrokerAddress, method: MethodInfo, payload: Sequence[bytes], timeout_s: float, *, one_way: bool = False
    ) -> bytes:
        return self._world.call(address, method, payload, timeout_s)

    def came_late(self, address: BrokerAddress, method: MethodInfo, payload: Sequence[bytes], answer: bytes) -> None:
        """Nothing does."""


Send = Callable[..., Stored]


@pytest.fixture(params=["threads", "coroutines"])
def send(request: pytest.FixtureRequest) -> Send:
    """Sends one message."""

    def run(world: World, timeout_s: float, queue: MessageQueue | None = QUEUE) -> Stored:
        steps = world.steps(timeout_s, queue)
        if request.param == "threads":
            return Driver(world, world, world.pause).run(steps)  # type: ignore[arg-type]
        coroutines = AsyncWorld(world)
        return asyncio.run(AsyncDriver(coroutines, coroutines, coroutines.pause).run(steps))  # type: ignore[arg-type]

    return run


@pytest.mark.parametrize("queue", [QUEUE, None])
@pytest.mark.parametrize("timeout_s", [30.0, 10.0, 6.0])
@pytest.mark.parametrize("after_s", [0.3, 3.0, 4.4, 5.3])
def test_a_new_master_ends_the_pause_that_the_old_one_told(
    send: Send, queue: MessageQueue | None, timeout_s: float, after_s: float
) -> None:
    world = World(ELECTED)
    world.changed(after_s, REPLACED)
    send(world, timeout_s, queue)
    assert [address for _, address in world.tries] == [FIRST, SECOND]
    assert after_s <= world.tries[1][0] <= after_s + 1.1
    assert world.looks <= after_s + 2


def test_while_nobody_leads_the_pause_goes_on(send: Send) -> None:
    world = World(ELECTED)
    world.changed(2.0, LEADERLESS)
    world.changed(5.0, REPLACED)
    send(world, 10.0)
    assert [address for _, address in world.tries] == [FIRST, SECOND]
    assert 5.0 <= world.tries[1][0] <= 6.1


def test_a_master_that_was_not_elected_may_be_replaced_within_the_pause(send: Send) -> None:
    world = World(FOLLOWED)
    world.changed(3.0, REPLACED)
    send(world, 30.0)
    assert 3.0 <= world.tries[1][0] <= 4.1
    with pytest.raises(DiskFullError):
        send(world := World(FOLLOWED), 9.0)
    assert world.now_s == 1000.0, "nobody takes its place by itself"


def test_another_broker_that_may_be_written_ends_the_pause(send: Send) -> None:
    world = World(LONE)
    world.changed(3.0, OPENED)
    send(world, 30.0, None)
    assert [address for _, address in world.tries] == [FIRST, OTHER]
    assert 3.0 <= world.tries[1][0] <= 4.1


def test_a_queue_that_was_named_stays_at_its_broker(send: Send) -> None:
    world = World(LONE)
    world.changed(3.0, OPENED)
    with pytest.raises(DiskFullError):
        send(world, 20.0)
    assert {address for _, address in world.tries} == {FIRST}


@pytest.mark.parametrize("route", [LONE, FOLLOWED, ELECTED])
@pytest.mark.parametrize("queue", [QUEUE, None])
def test_without_a_change_the_broker_is_asked_when_it_has_said(
    send: Send, route: Route, queue: MessageQueue | None
) -> None:
    world = World(route)
    with pytest.raises(DiskFullError) as raised:
        send(world, 31.0, queue)
    assert raised.value.definite
    gaps_s = [later - earlier for (earlier, _), (later, _) in zip(world.tries, world.tries[1:], strict=False)]
    assert gaps_s
    assert all(10.0 <= gap_s <= 15.1 for gap_s in gaps_s), gaps_s
    if route is LONE and queue is not None:
        assert world.looks == 0, "nobody takes its place"


def test_a_full_disk_of_a_lone_broker_is_an_error_at_once_if_the_pause_is_too_long(send: Send) -> None:
    world = World(LONE)
    with pytest.raises(DiskFullError):
        send(world, 9.0)
    assert world.now_s == 1000.0


def test_where_no_disk_has_room_the_error_comes_within_the_time_out(send: Send) -> None:
    world = World(ELECTED)
    with pytest.raises(DiskFullError) as raised:
        send(world, 6.0)
    assert raised.value.definite
    assert len(world.tries) == 1
    assert 1004.9 <= world.now_s <= 1006.0


def test_with_hardly_any_time_left_the_error_comes_at_once(send: Send) -> None:
    world = World(ELECTED)
    with pytest.raises(DiskFullError):
        send(world, 1.4)
    assert world.now_s == 1000.0


def test_without_retries_the_error_comes_at_once(send: Send) -> None:
    world = World(ELECTED, retries=0)
    with pytest.raises(DiskFullError):
        send(world, 6.0)
    assert world.now_s == 1000.0


def test_what_the_next_master_refuses_too_is_not_waited_for(send: Send) -> None:
    world = World(ELECTED)
    world.error = lambda: TooManyError("too many", retry_delay_ms=5000)
    with pytest.raises(TooManyError):
        send(world, 4.0)
    assert world.now_s == 1000.0


def test_a_message_that_may_be_stored_stays_at_its_name(send: Send) -> None:
    world = World(LONE)
    errors: list[ProtomqError] = [RequestTimeoutError("lost")]
    world.error = lambda: errors.pop() if errors else DiskFullError("full", retry_delay_ms=10_000)
    world.changed(3.0, OPENED)
    with pytest.raises(DiskFullError) as raised:
        send(world, 14.0, None)
    assert not raised.value.definite


def test_a_route_that_is_not_known_any_more_ends_nothing(send: Send) -> None:
    world = World(ELECTED)
    world.unknown = NoRouteError("no name server answers")
    with pytest.raises(DiskFullError):
        send(world, 6.0)
    world = World(ELECTED)
    world.unknown = ClosedError("closed")
    with pytest.raises(ClosedError):
        send(world, 6.0)
