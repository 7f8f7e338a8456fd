"""Both drivers do what steps ask for, in their order, and throw in what goes wrong."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Generator, Sequence
from typing import Any, get_args

import pytest

from protomq import _steps
from protomq._async_steps import AsyncDriver
from protomq._methods import PING
from protomq._steps import (
    Block,
    CallServer,
    Driver,
    Each,
    ForgetRoute,
    GetRoute,
    Pause,
    SendOneWay,
    Steps,
    to_end,
)
from protomq._types import BrokerAddress, MethodInfo, Route
from protomq.errors import ConnectionLostError, NoRouteError
from tests.support.fake_driver import address_of, route_of

A = address_of("a")


class Recorder:
    """What both drivers are given; each method notes its call."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.error: BaseException | None = None

    def call(
        self,
        address: BrokerAddress,
        method: MethodInfo,
        payload: Sequence[bytes],
        timeout_s: float,
        *,
        one_way: bool = False,
    ) -> bytes:
        kind = "one way" if one_way else "call"
        self.seen.append((kind, address.broker_name, method.path, payload, timeout_s))
        if self.error is not None:
            raise self.error
        return b"answer"

    def get(self, topic: str, timeout_s: float) -> Route:
        self.seen.append(("get", topic, timeout_s))
        return route_of(topic, "a")

    def current(self, topic: str, timeout_s: float) -> Route:
        self.seen.append(("current", topic, timeout_s))
        return route_of(topic, "a")

    def invalidate(self, topic: str, *, may_be_old: bool = False, is_denied: bool = False) -> None:
        self.seen.append(("invalidate", topic))

    def pause(self, seconds: float) -> None:
        self.seen.append(("pause", seconds))


class AsyncRecorder(Recorder):
    """The same with coroutines."""

    async def call(self, *arguments: Any, one_way: bool = False) -> bytes:  # type: ignore[override]
        return super().call(*arguments, one_way=one_way)

    def came_late(self, *arguments: Any) -> None:
        self.seen.append(("late", *arguments))

    async def get(self, topic: str, timeout_s: float) -> Route:  # type: ignore[override]
        return super().get(topic, timeout_s)

    async def current(self, topic: str, timeout_s: float) -> Route:  # type: ignore[override]
        return super().current(topic, timeout_s)

    async def pause(self, seconds: float) -> None:  # type: ignore[override]
        super().pause(seconds)
        await asyncio.sleep(0)


Run = Callable[[Generator[Any, Any, Any]], Any]


@pytest.fixture(params=["threads", "coroutines"])
def driven(request: pytest.FixtureRequest) -> tuple[Recorder, Run]:
    if request.param == "threads":
        recorder = Recorder()
        return recorder, Driver(recorder, recorder, recorder.pause).run
    waiting = AsyncRecorder()
    driver = AsyncDriver(waiting, waiting, waiting.pause)
    return waiting, lambda steps: asyncio.run(driver.run(steps))


def everything() -> Steps[list[Any]]:
    found: list[Any] = [(yield GetRoute("T", 1.0))]
    found.append((yield GetRoute("U", 2.0, may_be_old=True)))
    found.append((yield ForgetRoute("T")))
    found.append((yield CallServer(A, PING, (b"x", b"y"), 3.0)))
    found.append((yield Pause(0.5)))
    found.append((yield Block(lambda: 7)))
    found.append((yield SendOneWay(A, PING, (b"z",), 4.0)))
    return found


def test_each_effect_is_done_and_its_outcome_sent_in(driven: tuple[Recorder, Run]) -> None:
    recorder, run = driven
    assert run(everything()) == [route_of("T", "a"), route_of("U", "a"), None, b"answer", None, 7, None]
    assert recorder.seen == [
        ("get", "T", 1.0),
        ("current", "U", 2.0),
        ("invalidate", "T"),
        ("call", "a", PING.path, (b"x", b"y"), 3.0),
        ("pause", 0.5),
        ("one way", "a", PING.path, (b"z",), 4.0),
    ]


def test_no_effect_is_unknown_to_the_drivers() -> None:
    """A new effect without a case would silently do nothing."""
    effects = {effect.__name__ for effect in get_args(_steps.Effect)}
    assert len(effects) > 5
    for driver in (Driver, AsyncDriver):
        source = inspect.getsource(driver._do)
        assert {name for name in effects if f"case {name}(" in source} == effects


def test_an_error_is_thrown_in_and_steps_may_go_on(driven: tuple[Recorder, Run]) -> None:
    recorder, run = driven
    recorder.error = ConnectionLostError("gone")

    def steps() -> Steps[str]:
        try:
            yield CallServer(A, PING, (), 1.0)
        except ConnectionLostError as error:
            yield ForgetRoute("T")
            return f"went on after {error}"
        return "no error"

    assert run(steps()) == "went on after gone"
    assert recorder.seen[-1] == ("invalidate", "T")


@pytest.mark.parametrize("error", [ConnectionLostError("gone"), KeyboardInterrupt()], ids=type)
def test_what_steps_do_not_catch_ends_them_with_their_finally(
    driven: tuple[Recorder, Run], error: BaseException
) -> None:
    recorder, run = driven
    recorder.error = error
    ended = []

    def steps() -> Steps[None]:
        try:
            yield CallServer(A, PING, (), 1.0)
        finally:
            ended.append(True)

    with pytest.raises(type(error)):
        run(steps())
    assert ended == [True]


def test_what_steps_raise_after_an_error_that_they_took_does_not_drag_it_along(driven: tuple[Recorder, Run]) -> None:
    """The message says what came of the tries: their tracebacks would only hide it."""
    recorder, run = driven
    recorder.error = ConnectionLostError("gone")

    def steps() -> Steps[None]:
        errors = []
        try:
            yield CallServer(A, PING, (), 1.0)
        except ConnectionLostError as error:
            errors.append(str(error))
        raise NoRouteError(f"nobody answers: {errors[0]}")

    with pytest.raises(NoRouteError) as caught:
        run(steps())
    assert (str(caught.value), caught.value.__context__) == ("nobody answers: gone", None)


def test_several_steps_give_their_results_in_order(driven: tuple[Recorder, Run]) -> None:
    _, run = driven

    def one(number: int) -> Steps[int]:
        yield Pause(0.1)
        return number

    def steps() -> Steps[list[int]]:
        found: list[int] = yield Each([one(number) for number in range(3)])
        return found

    assert run(steps()) == [0, 1, 2]


def test_the_first_error_of_several_steps_is_raised_when_all_have_ended(driven: tuple[Recorder, Run]) -> None:
    _, run = driven
    ended: list[int] = []

    def one(number: int) -> Steps[None]:
        if number < 2:
            raise ConnectionLostError(f"lost {number}")
        yield Pause(0.1)
        yield Pause(0.1)
        ended.append(number)

    def steps() -> Steps[str]:
        try:
            yield Each([one(number) for number in range(4)])
        except ConnectionLostError as error:
            return f"{error}, {ended}"
        return "no error"

    assert run(steps()) == "lost 0, [2, 3]"


async def test_coroutines_take_several_steps_at_once() -> None:
    """Each waits for the other: one after the other they would wait for ever."""
    met = asyncio.Barrier(2)

    class Meeting(AsyncRecorder):
        async def pause(self, seconds: float) -> None:  # type: ignore[override]
            await met.wait()

    recorder = Meeting()

    def one() -> Steps[None]:
        yield Pause(0.0)

    def steps() -> Steps[None]:
        yield Each([one(), one()])

    async with asyncio.timeout(60):
        await AsyncDriver(recorder, recorder, recorder.pause).run(steps())


def test_steps_that_are_not_to_go_on_are_closed_before_their_next_effect() -> None:
    goes_on, seen = [True], list[str]()

    def steps() -> Steps[None]:
        try:
            try:
                yield Pause(1.0)
            except NoRouteError:
                seen.append("error")
            yield Pause(2.0)
            seen.append("end")
        finally:
            seen.append("closed")

    def run(*outcomes: str) -> bool:
        seen.clear()
        goes_on[0] = True
        wrapped = to_end(steps(), lambda: goes_on[0])
        assert next(wrapped) == Pause(1.0)
        try:
            for outcome in outcomes:
                goes_on[0] = "stop" not in outcome
                if "error" in outcome:
                    wrapped.throw(NoRouteError("gone"))
                else:
                    wrapped.send(None)
        except StopIteration as done:
            result: bool = done.value
            return result
        raise AssertionError("they wait for more")

    assert run("", "")
    assert seen == ["end", "closed"]
    assert run("error", "")
    assert seen == ["error", "end", "closed"]
    assert not run("stop")
    assert seen == ["closed"]
    assert not run("error, stop")
    assert seen == ["error", "closed"]
    assert run("", "stop"), "there was nothing left to do"
    wrapped = to_end(steps(), lambda: True)
    next(wrapped)
    with pytest.raises(KeyboardInterrupt):
        wrapped.throw(KeyboardInterrupt)
