"""Decisions of many threads on transactions of one broker: who tells them, and who wakes whom."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Sequence
from functools import partial

import pytest

from protomq._company import Company
from protomq._end_lines import AsyncEndLine, EndLine
from protomq._lines import CHAINS
from protomq._transactions import End, TransactionDecision
from protomq.errors import ConnectionLostError, ProtomqError
from tests.support.eager_tasks import eager_task_factory
from tests.support.interrupting_lock import InterruptingLock
from tests.support.waiting import wait_for


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


def end_of(handle: str) -> End:
    return End("T", "a", handle, TransactionDecision.COMMIT)


class Callers:
    """Threads with a decision each; `outcomes` by handle."""

    def __init__(self, line: EndLine) -> None:
        self.line = line
        self.outcomes: dict[str, object] = {}
        self.threads: list[threading.Thread] = []

    def begin(self, *handles: str, timeout_s: float = 30.0) -> None:
        for handle in handles:
            thread = threading.Thread(target=self._call, args=(handle, timeout_s), daemon=True)
            self.threads.append(thread)
            thread.start()
            wait_for(partial(self._is_under_way, handle), pause_s=0.001)

    def _call(self, handle: str, timeout_s: float) -> None:
        try:
            self.outcomes[handle] = self.line.end(end_of(handle), timeout_s)
        except ProtomqError as error:
            self.outcomes[handle] = error

    def _is_under_way(self, handle: str) -> bool:
        waiting = [entry.end.handle for entry in list(self.line._waiting)]
        return handle in waiting or (self.line._leader is not None and not waiting)

    def join(self) -> None:
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()


def test_what_gathers_while_a_request_is_on_its_way_is_told_together() -> None:
    broker = Broker()
    callers = Callers(EndLine(broker.end))
    callers.begin("first")
    handles = [f"{n}" for n in range(3 * CHAINS)] + ["again"]
    callers.begin(*handles)
    broker.may_answer.release(2)
    callers.join()
    assert broker.told == [["first"], handles]
    assert callers.outcomes == dict.fromkeys(["first", *handles], False) | {"again": True}


def test_who_has_much_time_left_shares_no_request_with_who_has_little() -> None:
    """It has the time of its leader."""
    broker = Broker()
    callers = Callers(EndLine(broker.end))
    callers.begin("first")
    callers.begin("hurried", "too", timeout_s=10.0)
    callers.begin("patient", "as well")
    broker.may_answer.release(3)
    callers.join()
    assert broker.told == [["first"], ["hurried", "too"], ["patient", "as well"]]
    assert callers.outcomes == dict.fromkeys(("first", "hurried", "too", "patient", "as well"), False)


def test_the_same_of_coroutines() -> None:
    told: list[tuple[list[str], bool]] = []

    async def call(ends: Sequence[End], timeout_s: float) -> list[bool | ProtomqError]:
        told.append(([end.handle for end in ends], timeout_s > 20))
        return [False] * len(ends)

    async def run() -> None:
        line = AsyncEndLine(call)
        await asyncio.gather(
            *(line.tell(end_of(handle), timeout_s) for handle, timeout_s in (("hurried", 10.0), ("too", 10.0), ("patient", 30.0)))
        )

    asyncio.run(run())
    assert told == [(["hurried", "too"], False), (["patient"], True)]


def test_those_around_the_deadline_of_the_first_one_go_with_it() -> None:
    broker = Broker()
    callers = Callers(EndLine(broker.end))
    callers.begin("first")
    for handle, timeout_s in (("leads", 20.0), ("a little less", 19.7), ("a little more", 20.3)):
        callers.begin(handle, timeout_s=timeout_s)
    broker.may_answer.release(2)
    callers.join()
    assert broker.told == [["first"], ["leads", "a little less", "a little more"]]
    assert callers.outcomes == dict.fromkeys(("first", "leads", "a little less", "a little more"), False)


def test_the_same_of_tasks_around_the_deadline_of_the_first_one() -> None:
    told: list[list[str]] = []

    async def call(ends: Sequence[End], _: float) -> list[bool | ProtomqError]:
        told.append([end.handle for end in ends])
        return [False] * len(ends)

    async def run() -> None:
        line = AsyncEndLine(call)
        await asyncio.gather(*(line.tell(end_of(handle), timeout_s) for handle, timeout_s in (("a", 20.0), ("b", 19.7), ("c", 20.3))))

    asyncio.run(run())
    assert told == [["a", "b", "c"]]


def test_a_drain_waits_for_what_is_on_its_way_and_for_what_waits_behind_it() -> None:
    broker = Broker()
    line = EndLine(broker.end)
    line.drain(60.0)
    callers = Callers(line)
    callers.begin("first")
    callers.begin("second")
    draining = threading.Thread(target=line.drain, args=(60.0,))
    draining.start()
    broker.may_answer.release()
    wait_for(lambda: "first" in callers.outcomes)
    draining.join(0.1)
    assert draining.is_alive()
    broker.may_answer.release()
    draining.join(10)
    callers.join()
    assert callers.outcomes == {"first": False, "second": False}


def test_callers_that_were_answered_together_are_told_together() -> None:
    broker, answered = Broker(), list[int]()
    line = EndLine(broker.end, Company(together_s=60), answered.append)
    callers = Callers(line)
    line.company.expect(3)
    callers.begin("first", "second")
    assert broker.told == []
    callers.begin("third")
    broker.may_answer.release()
    callers.join()
    assert broker.told == [["first", "second", "third"]]
    assert answered == [3]


def test_a_request_that_fails_is_an_error_of_its_own_to_each_caller() -> None:
    broker = Broker()
    callers = Callers(EndLine(broker.end))
    callers.begin("first")
    callers.begin("a", "b", "c")
    broker.fails = True
    broker.may_answer.release(2)
    callers.join()
    assert len({id(error) for error in callers.outcomes.values()}) == 4
    assert all(isinstance(error, ConnectionLostError) for error in callers.outcomes.values())


@pytest.mark.parametrize("place", [1, 4])
def test_a_caller_that_is_interrupted_leaves_nobody_waiting(place: int) -> None:
    broker = Broker()
    line = EndLine(broker.end)
    callers = Callers(line)
    callers.begin("first")
    before = [f"before {n}" for n in range(place)]
    callers.begin(*before)

    def interrupt() -> None:
        wait_for(lambda: len(line._waiting) == place + 1, pause_s=0.001)
        callers.begin(*(f"behind {n}" for n in range(3 * CHAINS)))
        broker.may_answer.release()  # those behind the first are on their way now
        wait_for(lambda: len(broker.told) == 2, pause_s=0.001)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        line.end(end_of("interrupted"), 30.0)
    interrupter.join()
    broker.may_answer.release(8)
    callers.join()
    assert line._leader is None
    assert set(callers.outcomes.values()) == {False}
    assert len(callers.outcomes) == 1 + place + 3 * CHAINS


@pytest.mark.parametrize("place", ["leads", "follows"])
def test_a_caller_that_is_interrupted_at_its_arrival_leaves_the_line_free(place: str) -> None:
    broker = Broker()
    line = EndLine(broker.end, Company(together_s=0.0))
    callers = Callers(line)
    if place == "follows":
        callers.begin("first")
    line.company._missing = 2
    line.company._lock = InterruptingLock()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        line.end(end_of("interrupted"), 30.0)
    broker.may_answer.release(2)
    callers.join()
    assert line._leader is None
    assert not line._waiting
    assert not line.end(end_of("later"), 30.0)


def test_a_leader_that_is_interrupted_while_it_says_whom_it_wakes_leaves_nobody_waiting() -> None:
    broker = Broker()
    main = threading.main_thread()

    def on_told(_: int) -> None:
        if threading.current_thread() is main:
            raise KeyboardInterrupt

    line = EndLine(broker.end, on_told=on_told)
    callers = Callers(line)
    callers.begin("first")

    def follow() -> None:
        wait_for(lambda: len(line._waiting) == 1, pause_s=0.001)
        callers.begin("along")
        broker.may_answer.release()  # now the main thread leads, and takes the other along
        wait_for(lambda: len(broker.told) == 2, pause_s=0.001)
        callers.begin("behind")
        broker.may_answer.release(8)

    follower = threading.Thread(target=follow)
    follower.start()
    with pytest.raises(KeyboardInterrupt):
        line.end(end_of("interrupted"), 30.0)
    follower.join()
    callers.join()
    assert line._leader is None
    assert callers.outcomes == {"first": False, "along": False, "behind": False}


@pytest.mark.parametrize("answers_at_once", [False, True])
async def test_tasks_that_begin_at_once_tell_every_decision(answers_at_once: bool) -> None:
    told: list[str] = []

    async def call(ends: Sequence[End], _: float) -> list[bool | ProtomqError]:
        if not answers_at_once:
            await asyncio.sleep(0)
        told.extend(end.handle for end in ends)
        return [False for _ in ends]

    asyncio.get_running_loop().set_task_factory(eager_task_factory)
    line = AsyncEndLine(call)
    for handle in "abc":
        async with asyncio.timeout(5):
            assert not await line.tell(end_of(handle), 1.0)
    async with asyncio.timeout(5):
        assert await asyncio.gather(*(line.tell(end_of(handle), 1.0) for handle in "de")) == [False, False]
    assert told == list("abcde")


async def test_a_request_that_fails_is_an_error_of_its_own_to_each_task() -> None:
    async def call(ends: Sequence[End], _: float) -> list[bool | ProtomqError]:
        raise ConnectionLostError("gone")

    line = AsyncEndLine(call)
    outcomes = await asyncio.gather(*(line.tell(end_of(handle), 9.0) for handle in "abc"), return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["gone"] * 3
    assert len({id(outcome) for outcome in outcomes}) == 3
