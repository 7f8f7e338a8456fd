"""Decisions that nobody waits for: what is told together, who waits after all, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from functools import partial

import pytest

from protomq import TransactionCheck, TransactionProducer
from protomq._end_lines import AsyncEndLine
from protomq._told_ends import ToldEnds
from protomq._transactions import ENDS_MAX, End, TransactionDecision
from protomq.errors import ClosedError, ConnectionLostError, ProtomqError, RequestTimeoutError
from tests.support.waiting import wait_for


def end_of(handle: str) -> End:
    return End("T", "a", handle, TransactionDecision.COMMIT)


class Broker:
    """Answers once it may; knows which decisions came together."""

    def __init__(self) -> None:
        self.told: list[list[str]] = []
        self.may_answer = threading.Semaphore(0)
        self.fails = False

    def end(self, ends: Sequence[End], _: float) -> list[bool | ProtomqError]:
        self.told.append([end.handle for end in ends])
        assert self.may_answer.acquire(timeout=30)
        if self.fails:
            raise ConnectionLostError("gone")
        return [end.handle.endswith("again") for end in ends]


class Outcomes:
    """Of decisions, by handle."""

    def __init__(self, ends: ToldEnds) -> None:
        self.ends = ends
        self.known: dict[str, object] = {}

    def tell(self, *handles: str, timeout_s: float = 30.0) -> None:
        for handle in handles:
            self.ends.tell(end_of(handle), timeout_s, partial(self.known.__setitem__, handle))


def test_what_has_much_time_left_shares_no_request_with_what_has_little() -> None:
    broker = Broker()
    outcomes = Outcomes(ToldEnds(broker.end))
    outcomes.tell("first")
    wait_for(lambda: broker.told, pause_s=0.001)
    outcomes.tell("hurried", "too", timeout_s=10.0)
    outcomes.tell("patient")
    broker.may_answer.release(3)
    outcomes.ends.drain(30.0)
    assert broker.told == [["first"], ["hurried", "too"], ["patient"]]
    assert outcomes.known == dict.fromkeys(("first", "hurried", "too", "patient"), False)


def test_those_around_the_deadline_of_the_first_one_go_with_it() -> None:
    broker = Broker()
    outcomes = Outcomes(ToldEnds(broker.end))
    outcomes.tell("first")
    wait_for(lambda: broker.told, pause_s=0.001)
    for handle, timeout_s in (("a", 20.0), ("b", 19.7), ("c", 20.3)):
        outcomes.tell(handle, timeout_s=timeout_s)
    broker.may_answer.release(2)
    outcomes.ends.drain(30.0)
    assert broker.told == [["first"], ["a", "b", "c"]]
    assert outcomes.known == dict.fromkeys(("first", "a", "b", "c"), False)


def test_what_gathers_is_told_together_and_nobody_waits() -> None:
    broker = Broker()
    outcomes = Outcomes(ToldEnds(broker.end))
    outcomes.tell("first")
    wait_for(lambda: broker.told, pause_s=0.001)
    outcomes.tell("a", "b", "again")
    assert broker.told == [["first"]]
    assert not outcomes.known
    broker.may_answer.release(2)
    outcomes.ends.drain(30.0)
    assert broker.told == [["first"], ["a", "b", "again"]]
    assert outcomes.known == {"first": False, "a": False, "b": False, "again": True}


def test_a_drain_gives_up_in_its_time() -> None:
    broker = Broker()
    outcomes = Outcomes(ToldEnds(broker.end))
    outcomes.tell("first")
    outcomes.ends.drain(0.01)
    assert not outcomes.known
    broker.may_answer.release()
    outcomes.ends.drain(30.0)
    assert outcomes.known == {"first": False}


def test_what_is_not_told_when_the_interpreter_ends_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    def undecided(check: TransactionCheck) -> TransactionDecision:
        return TransactionDecision.UNKNOWN

    broker = Broker()
    producer = TransactionProducer("desk", undecided, namesrv="127.0.0.1:1", send_timeout_s=0.1)
    ends = producer._told["a"] = ToldEnds(broker.end)
    outcomes = Outcomes(ends)
    outcomes.tell("first")
    wait_for(lambda: broker.told, pause_s=0.001)
    outcomes.tell("a", "b")
    assert producer.finish_at_exit() == 0
    assert "may not know yet of 3 decisions on transactions, it will ask: the interpreter ended" in caplog.text
    broker.may_answer.release(2)
    ends.drain(30.0)
    caplog.clear()
    assert producer.finish_at_exit() == 0
    outcomes.tell("late")
    producer.close(0.0)
    assert producer.finish_at_exit() == 0
    assert caplog.text == ""
    broker.may_answer.release()


def test_each_of_a_request_that_fails_hears_of_it() -> None:
    broker = Broker()
    outcomes = Outcomes(ToldEnds(broker.end))
    outcomes.tell("first")
    wait_for(lambda: broker.told, pause_s=0.001)
    outcomes.tell("a", "b")
    broker.fails = True
    broker.may_answer.release(2)
    outcomes.ends.drain(30.0)
    assert [type(outcomes.known[handle]) for handle in ("first", "a", "b")] == [
        ConnectionLostError
    ] * 3


def test_whoever_brings_more_than_a_request_takes_waits_for_room() -> None:
    broker = Broker()
    outcomes = Outcomes(ToldEnds(broker.end))
    outcomes.tell("first")
    wait_for(lambda: broker.told, pause_s=0.001)
    outcomes.tell(*map(str, range(ENDS_MAX)))
    with pytest.raises(RequestTimeoutError):
        outcomes.tell("one more", timeout_s=0.01)
    late = threading.Thread(target=outcomes.tell, args=("late",))
    late.start()
    broker.may_answer.release(3)
    late.join(30)
    outcomes.ends.drain(30.0)
    assert [len(told) for told in broker.told] == [1, ENDS_MAX, 1]
    assert outcomes.known["late"] is False
    assert "one more" not in outcomes.known


def test_a_decision_for_which_no_thread_can_be_started_is_refused_and_the_next_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    broker = Broker()
    broker.may_answer.release(2)
    outcomes = Outcomes(ToldEnds(broker.end))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError):
            outcomes.tell("first")
    outcomes.tell("second")
    outcomes.ends.drain(5.0)
    assert outcomes.known == {"second": False}


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(1)])
def test_whoever_raises_at_an_outcome_hides_no_other(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    def on_outcome(_: object) -> None:
        raise error

    broker = Broker()
    outcomes = Outcomes(ToldEnds(broker.end))
    outcomes.tell("first")
    wait_for(lambda: broker.told, pause_s=0.001)
    outcomes.ends.tell(end_of("raises"), 30.0, on_outcome)
    outcomes.tell("a")
    broker.may_answer.release(3)
    outcomes.ends.drain(5.0)
    outcomes.tell("b")
    outcomes.ends.drain(5.0)
    assert outcomes.known == {"first": False, "a": False, "b": False}
    assert "raises" not in outcomes.known
    assert caplog.records


def test_coroutines_need_not_wait_either() -> None:
    told: list[list[str]] = []

    async def run() -> None:
        may_answer = asyncio.Event()

        async def call(ends: Sequence[End], _: float) -> list[bool | ProtomqError]:
            told.append([end.handle for end in ends])
            await may_answer.wait()
            return [False] * len(ends)

        line = AsyncEndLine(call)
        futures = [line.tell(end_of("first"), 30.0)]
        await asyncio.sleep(0)
        futures += [line.tell(end_of(str(number)), 30.0) for number in range(ENDS_MAX)]
        assert line.room <= 0
        await line.drain(0.0)
        assert not any(future.done() for future in futures)
        may_answer.set()
        await line.drain(30.0)
        assert not any(future.result() for future in futures)
        assert line.room == ENDS_MAX

    asyncio.run(run())
    assert [len(some) for some in told] == [1, ENDS_MAX]


def test_whom_nobody_waits_for_is_heard_of_only_if_it_was_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    failed: dict[str, Exception] = {}

    async def run() -> None:
        may_answer = asyncio.Event()

        async def call(ends: Sequence[End], _: float) -> list[bool | ProtomqError]:
            if ends[0].handle == "lost":
                raise ConnectionLostError("gone")
            await may_answer.wait()
            return [ConnectionLostError("refused") if end.handle == "refused" else False for end in ends]

        def tell(handle: str, timeout_s: float = 30.0) -> None:
            line.tell_unawaited(end_of(handle), timeout_s, partial(failed.__setitem__, handle))

        line = AsyncEndLine(call)
        tell("first")
        await asyncio.sleep(0)
        tell("late", 0.0)
        tell("taken")
        tell("refused")
        waited_for = line.tell(end_of("waited for"), 30.0)
        may_answer.set()
        await line.drain(30.0)
        assert waited_for.result() is False
        assert failed.keys() == {"late", "refused"}
        assert isinstance(failed["late"], RequestTimeoutError)
        tell("lost")
        await line.drain(30.0)
        assert isinstance(failed["lost"], ConnectionLostError)
        may_answer.clear()
        tell("given up")
        await asyncio.sleep(0)
        assert line._task is not None
        line._task.cancel()
        await line.drain(30.0)

    asyncio.run(run())
    assert failed.keys() == {"late", "refused", "lost"}
    assert "may not know yet of 1 decision on transactions" in caplog.text


def test_what_nobody_waits_for_goes_behind_the_messages_that_are_sent_in_the_same_turn() -> None:
    """Then the broker answers those first, and their callers go on while it ends the transactions."""
    order: list[str] = []

    async def run() -> None:
        may_answer = asyncio.Event()

        async def call(ends: Sequence[End], _: float) -> list[bool | ProtomqError]:
            order.extend(end.handle for end in ends)
            await may_answer.wait()
            return [False] * len(ends)

        async def send(name: str) -> None:
            order.append(name)

        def tell(handle: str) -> None:
            line.tell_unawaited(end_of(handle), 30.0, lambda _: None)

        line = AsyncEndLine(call)
        tell("first end")
        await asyncio.create_task(send("first send"))
        await asyncio.sleep(0)
        assert order == ["first send", "first end"]
        # The same where a request was on its way.
        may_answer.set()
        tell("second end")
        await asyncio.create_task(send("second send"))
        await line.drain(30.0)

    asyncio.run(run())
    assert order == ["first send", "first end", "second send", "second end"]


def test_those_that_wait_in_line_hear_of_the_end_of_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    failed: dict[str, Exception] = {}

    async def run() -> None:
        async def call(ends: Sequence[End], _: float) -> list[bool | ProtomqError]:
            await asyncio.Event().wait()
            return []

        line = AsyncEndLine(call)
        waited_for = line.tell(end_of("under way"), 30.0)
        await asyncio.sleep(0)
        line.tell_unawaited(end_of("in line"), 30.0, partial(failed.__setitem__, "in line"))
        also = line.tell(end_of("in line, too"), 30.0)
        assert line._task is not None
        line._task.cancel()
        await line.drain(30.0)
        errors = [waited_for.exception(), also.exception()]
        assert [isinstance(error, ClosedError) and error.definite for error in errors] == [False, True]

    asyncio.run(run())
    assert not failed, "those that nobody waits for are one number"
    assert "may not know yet of 1 decision on transactions" in caplog.text
