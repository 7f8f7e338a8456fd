"""Handlers of popped messages on threads and in tasks: what one of them, or one broker, does not hold up. The brokers are fakes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest

from protomq import HandledCounts, Message, Retry, _methods
from protomq._async_steps import AsyncDriver
from protomq._pop_handling import Handling, HandlingOptions, Hold, Holds
from protomq._pop_steps import PopSteps
from protomq._pop_tasks import HandlerTasks
from protomq._pop_threads import HandlerThreads
from protomq._push_results import Listener
from protomq._steps import CallRace, Driver
from protomq._types import BrokerAddress, MethodInfo, Route
from protomq.errors import RequestTimeoutError, StaleReceiptError
from protomq.v1.pop_service_pb2 import AckResponse, ChangeInvisibleRequest, ChangeInvisibleResponse
from tests.support.fake_driver import route_of

from .test_pop_steps import answer_of
from .test_send_back import SpeechlessError

WAIT_S = 30.0
FROZEN_S = 8.0
"""Longer than anything of another broker is waited for."""


class Brokers:
    """Two that hand out `messages`, one at a time. The `frozen` ones answer nothing that is told of messages, until it thaws."""

    def __init__(self) -> None:
        self.messages: dict[str, deque[bytes]] = {"a": deque(), "b": deque()}
        self.frozen: set[str] = set()
        self.thaws = threading.Event()
        self.told: list[tuple[str, MethodInfo]] = []

    def call(
        self, address: BrokerAddress, method: MethodInfo, payload: Sequence[bytes], timeout_s: float, *, one_way: bool = False
    ) -> bytes:
        name = address.broker_name
        if method is _methods.POP:
            if self.messages[name]:
                return answer_of([self.messages[name].popleft()])
            time.sleep(0.01)
            return answer_of([])
        self.told.append((name, method))
        if name in self.frozen:
            self.thaws.wait(FROZEN_S)
            raise RequestTimeoutError("no answer")
        answer = AckResponse() if method is _methods.ACK else ChangeInvisibleResponse()
        data: bytes = answer.SerializeToString()
        return data

    def get(self, topic: str, timeout_s: float) -> Route:
        return route_of(topic, "a", "b")

    current = get

    def race(self, race: CallRace) -> None:
        """One call after the other."""
        starts = race.begin()
        while not race.is_over:
            name, call = starts.pop(0)
            starts += race.ended(name, self.call(*call)) + race.due()

    def invalidate(self, topic: str, *, may_be_old: bool = False, is_denied: bool = False) -> None:
        """Nothing is kept."""


class AsyncBrokers:
    """The same for coroutines."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        self.invalidate = brokers.invalidate

    async def call(self, *arguments: Any, one_way: bool = False) -> bytes:
        return await asyncio.to_thread(self._brokers.call, *arguments)

    def came_late(self, address: BrokerAddress, method: MethodInfo, payload: Sequence[bytes], answer: bytes) -> None:
        raise AssertionError("nobody is cancelled here")

    async def get(self, topic: str, timeout_s: float) -> Route:
        return self._brokers.get(topic, timeout_s)

    current = get


class World:
    """Brokers, and a consumer whose handlers `handle` runs until one of them calls `stop`."""

    def __init__(self, flavour: str) -> None:
        self.brokers = Brokers()
        self.is_in_tasks = flavour == "tasks"
        self.stop: Callable[[], object]
        self.close: Callable[[], object]

    def prepare(self, **options: Any) -> None:
        self.steps = steps = PopSteps("group", 5.0)
        chosen = HandlingOptions(**options)
        wish = steps.wish(
            "T", 4, invisible_s=chosen.invisible_s, hold_s=0.0, queue=None, tags=(), sql=None, cel=None, module=None, fifo=False,
            start="earliest",
        )  # fmt: skip
        self.handling = Handling(steps, wish, chosen, "handler")

    def handle(self, handler: Callable[[Message], object], **options: Any) -> HandledCounts:
        self.prepare(**options)
        steps = self.steps
        listener = Listener.of(handler)
        if self.is_in_tasks:
            return asyncio.run(self._handle_in_tasks(steps, listener))
        threads = HandlerThreads(steps, self.handling, listener, Driver(self.brokers, self.brokers, race=self.brokers.race).run)
        self.stop, self.close = threads.stop, threads.close
        return threads.work()

    async def _handle_in_tasks(self, steps: PopSteps, listener: Listener) -> HandledCounts:
        brokers = AsyncBrokers(self.brokers)
        tasks = HandlerTasks(steps, self.handling, listener, AsyncDriver(brokers, brokers).run)
        loop = asyncio.get_running_loop()
        self.stop = lambda: loop.call_soon_threadsafe(tasks.stop)
        self.close = lambda: loop.call_soon_threadsafe(tasks.close)
        return await tasks.work()

    def hold(self, message: Message) -> Hold:
        hold = self.handling.holds.find(message)
        assert hold is not None
        return hold


@pytest.fixture(params=["threads", "tasks"])
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param)


def wait_until(is_so: Callable[[], bool]) -> bool:
    """Whether it comes to be, within a time in which it would."""
    deadline_s = time.monotonic() + 5.0
    while not is_so() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return is_so()


@pytest.mark.parametrize("is_lost", [False, True], ids=["past the limit", "lost"])
def test_a_handler_that_hangs_ends_no_renewals_of_others(world: World, caplog: pytest.LogCaptureFixture, is_lost: bool) -> None:
    other_is_done = threading.Event()
    found: list[bool] = []

    def handler(message: Message) -> None:
        if message.body == b"other":
            found.append(wait_until(lambda: world.hold(message).renewed_count > 0))
            world.stop()
            other_is_done.set()
            return
        hold = world.hold(message)
        if is_lost:
            world.handling.holds.renewed([hold], [message], time.monotonic())
        while "is renewed no more" not in caplog.text and not is_lost:
            time.sleep(0.01)
        time.sleep(0.5)  # Whoever renews looks for what is next.
        world.brokers.messages["a"].append(b"other")
        assert other_is_done.wait(WAIT_S)

    world.brokers.messages["a"].append(b"hangs")
    counts = world.handle(handler, invisible_s=0.4, renew_limit_s=0.3)
    assert found == [True]
    assert counts == ((1, 0, 1) if is_lost else (2, 0, 0))


@pytest.mark.parametrize("what_hangs", ["renewal", "ends of failed ones", "acknowledgement"])
def test_a_frozen_broker_holds_up_nothing_that_another_is_told(world: World, what_hangs: str) -> None:
    brokers = world.brokers
    brokers.frozen.add("a")
    found: list[bool] = []

    def handler(message: Message) -> object:
        if message.body == b"last":
            found.append(wait_until(lambda: ("b", _methods.ACK) in brokers.told))
            brokers.thaws.set()
            world.stop()
        elif message.queue.broker_name == "b":
            assert wait_until(lambda: any(name == "a" for name, _ in brokers.told))
            found.append(wait_until(lambda: world.hold(message).renewed_count > 0))
            brokers.messages["b"].append(b"last")
        elif what_hangs == "renewal":
            assert brokers.thaws.wait(WAIT_S)
        elif what_hangs == "ends of failed ones":
            return Retry()
        return None

    brokers.messages["a"].extend([b"first", b"second"])
    brokers.messages["b"].append(b"slow")
    world.handle(handler, invisible_s=0.6)
    assert found == [True, True]


def test_an_error_that_cannot_say_what_it_is_gives_its_message_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    # Formatters of others may stumble over such an error (PySpark's does), and pytest's handler raises then; Python's own does not.
    monkeypatch.setattr(logging.getLogger("protomq"), "propagate", False)

    def handler(message: Message) -> None:
        if message.body == b"last":
            world.stop()
        else:
            raise SpeechlessError

    world.brokers.messages["a"].extend([b"first", b"last"])
    counts = world.handle(handler, invisible_s=60.0, concurrency=1, drain_timeout_s=1.0)
    assert counts == (1, 1, 0)
    assert world.handling.holds.all() == []


def test_what_comes_when_the_consumer_stops_is_not_begun_and_counts_as_no_delivery(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    handled: list[bytes] = []
    told: list[tuple[bool, int]] = []

    def call(address: BrokerAddress, method: MethodInfo, payload: Sequence[bytes], *_: object, **__: object) -> bytes:
        if method is _methods.POP:
            world.stop()
            return answer_of([b"late"])
        request = ChangeInvisibleRequest.FromString(b"".join(payload))
        told.append((request.unseen, len(request.messages)))
        data: bytes = ChangeInvisibleResponse().SerializeToString()
        return data

    monkeypatch.setattr(world.brokers, "call", call)
    assert world.handle(lambda message: handled.append(message.body)) == (0, 0, 0)
    assert (handled, told) == ([], [(True, 1)])


def test_the_failure_of_a_message_is_told_behind_its_renewal(world: World) -> None:
    """A renewal behind it would hold what is to come again."""
    brokers = world.brokers
    brokers.frozen.add("a")

    def handler(message: Message) -> object:
        if message.queue.broker_name == "a":
            assert wait_until(lambda: ("a", _methods.CHANGE_INVISIBLE) in brokers.told)
            brokers.messages["b"].append(b"last")
            return Retry(delay=0.0)
        time.sleep(0.3)
        found.append(brokers.told.count(("a", _methods.CHANGE_INVISIBLE)))
        brokers.thaws.set()
        world.stop()
        return None

    found: list[int] = []
    brokers.messages["a"].append(b"first")
    world.handle(handler, invisible_s=0.6)
    assert found == [1]
    assert brokers.told.count(("a", _methods.CHANGE_INVISIBLE)) > 1


@pytest.mark.parametrize("concurrency", [1, 20], ids=["no slot is free", "slots are free"])
@pytest.mark.parametrize("was_stopped", [False, True], ids=["closed", "stopped and closed"])
def test_a_close_waits_for_no_handler_and_tells_nothing(
    world: World, caplog: pytest.LogCaptureFixture, concurrency: int, was_stopped: bool
) -> None:
    begun, is_over = threading.Event(), threading.Event()
    found: list[str] = []

    def handler(message: Message) -> None:
        hold = world.hold(message)
        begun.set()
        is_over.wait(WAIT_S)
        try:
            hold.check()
        except StaleReceiptError as error:
            found.append(str(error))

    def close() -> None:
        assert begun.wait(WAIT_S)
        if was_stopped:
            world.stop()
            time.sleep(0.1)  # It drains.
        world.close()

    closer = threading.Thread(target=close)
    closer.start()
    world.brokers.messages["a"].append(b"x")
    began_s = time.monotonic()
    assert world.handle(handler, invisible_s=0.4, concurrency=concurrency, drain_timeout_s=WAIT_S) == (0, 0, 0)
    assert time.monotonic() - began_s < WAIT_S / 4
    closer.join()
    told_before = list(world.brokers.told)
    time.sleep(0.5)
    is_over.set()
    assert wait_until(lambda: bool(found))
    time.sleep(0.1)
    assert "its consumer was closed" in found[0]
    assert world.brokers.told == told_before
    assert _methods.ACK not in [method for _, method in told_before]
    assert "1 messages are still with handler, and its consumer is closed" in caplog.text


@pytest.mark.parametrize("concurrency", [1, 20], ids=["no slot is free", "slots are free"])
def test_a_close_cancels_coroutines_and_one_that_ends_all_the_same_is_not_acknowledged(concurrency: int) -> None:
    world = World("tasks")
    found: list[str] = []

    async def handler(message: Message) -> None:
        world.close()
        try:
            await asyncio.sleep(WAIT_S)
        except asyncio.CancelledError:
            found.append("cancelled")
            with pytest.raises(StaleReceiptError, match="its consumer was closed"):
                world.hold(message).check()

    async def handle_in_tasks(*arguments: Any) -> HandledCounts:
        task = asyncio.current_task()
        assert task is not None
        if caught_before:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(WAIT_S)
        return await run(*arguments)

    run, caught_before = world._handle_in_tasks, concurrency == 1
    world._handle_in_tasks = handle_in_tasks  # type: ignore[method-assign,assignment]
    world.brokers.messages["a"].append(b"x")
    began_s = time.monotonic()
    assert world.handle(handler, invisible_s=60.0, concurrency=concurrency, drain_timeout_s=WAIT_S) == (0, 0, 1)
    assert time.monotonic() - began_s < WAIT_S / 4
    assert found == ["cancelled"]
    assert world.brokers.told == []


@pytest.mark.parametrize("how", ["cancelled", "a defect"])
def test_renewals_that_somebody_else_has_ended_hold_nothing_up_and_go_on(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World("tasks")
    world.brokers.messages["a"] += [b"x"]
    monkeypatch.setattr("protomq._pop_tasks.RENEW_ANEW_S", 0.01)

    async def handler(message: Message) -> object:
        hold = world.hold(message)
        if how == "cancelled":
            world.brokers.frozen = {"a"}
            await asyncio.to_thread(wait_until, lambda: hold.is_being_renewed)
            (task,) = [one for one in asyncio.all_tasks() if "_renew_until_end" in repr(one)]
            task.cancel()
            await asyncio.wait([task])
            world.brokers.frozen = set()
            world.brokers.thaws.set()
        else:
            monkeypatch.setattr(world.handling.holds, "renewed", broken)
        await asyncio.to_thread(wait_until, lambda: hold.renewed_count > 0)
        world.stop()
        return Retry()

    whole = Holds.renewed

    def broken(*_: object) -> None:
        monkeypatch.setattr(world.handling.holds, "renewed", lambda *args: whole(world.handling.holds, *args))
        raise ZeroDivisionError

    async def handle_in_time() -> HandledCounts:
        return await asyncio.wait_for(world._handle_in_tasks(world.steps, Listener.of(handler)), WAIT_S)

    world.prepare(invisible_s=1.0)
    assert asyncio.run(handle_in_time()) == HandledCounts(done=0, failed=1, refused=0)
    assert world.brokers.told == [("a", _methods.CHANGE_INVISIBLE)] * 3
    assert [text for text in caplog.messages if "begin again" in text] == (
        ["the renewals of handler at broker a have ended, they begin again"] if how == "a defect" else []
    )


@pytest.mark.parametrize("flavour", ["threads", "tasks", "threads of tasks"])
@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_that_leaves_its_handler_ends(flavour: str, code: int) -> None:
    world = World(flavour.split()[-1])
    world.brokers.messages["a"].extend([b"first", *(b"%d" % number for number in range(20))])
    pid = os.getpid()
    reading, writing = os.pipe()
    codes: list[int] = []

    def handle(message: Message) -> object:
        if os.getpid() != pid:
            os.write(writing, b"the child goes on")
            os._exit(9)
        if message.body == b"19":
            world.stop()
        if message.body == b"first":
            child = os.fork()
            if not child:
                signal.alarm(20)  # It must never go on with this test.
                return sys.exit(code) if code else None
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return None

    async def handle_async(message: Message) -> object:
        return handle(message)

    counts = world.handle(handle_async if flavour == "tasks" else handle, concurrency=1, ahead=20)
    os.close(writing)
    assert (codes, os.read(reading, 100)) == ([code], b"")
    os.close(reading)
    assert counts.done >= 20
