"""Lines of decisions: where those of many callers on transactions of one broker gather while a request is on its way.

One kind for threads, one for coroutines. `_told_ends.py` has a third one, for threads that do not wait, and `_lines.py` the same for
sends. A line has one request in flight. What has gathered meanwhile goes out as one request when that one returns.
"""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import Any

from ._company import Company
from ._interrupts import is_interrupt
from ._lines import CHAINS, DEADLINE_SPREAD_S, own_error, wake
from ._loop_ends import fail, given_up, why_ended
from ._transactions import ENDS_MAX, PAUSE_S, End, say_not_told
from .errors import ConnectionLostError, ProtomqError, RequestTimeoutError


def late() -> RequestTimeoutError:
    return RequestTimeoutError("the decision was still waiting to be told when its time was up")


def near_count(deadlines_s: Sequence[float]) -> int:
    """How many of those in front are told together: only callers whose deadlines are near each other, as with sends. At least one."""
    if max(deadlines_s) - min(deadlines_s) <= DEADLINE_SPREAD_S:  # nearly always
        return len(deadlines_s)
    first_s = deadlines_s[0]
    far = (count for count, deadline_s in enumerate(deadlines_s) if abs(deadline_s - first_s) > DEADLINE_SPREAD_S)
    # Two of them may be far from each other, and both near the first one.
    return next(far, len(deadlines_s))


class _Entry:
    """A decision of one caller."""

    __slots__ = ("along", "deadline_s", "end", "is_in_line", "leads", "next_to_wake", "outcome", "wakeup")

    def __init__(self, end: End, deadline_s: float) -> None:
        self.end = end
        self.deadline_s = deadline_s
        self.outcome: bool | BaseException | None = None
        self.leads = False
        self.is_in_line = False
        """Whether the line has it, or has had it: then somebody sees to its outcome."""
        self.along: list[_Entry] = []
        """What a leader tells, its own first."""
        self.wakeup = threading.Lock()
        self.next_to_wake: _Entry | None = None

    def pass_on(self) -> None:
        """Wakes the next caller of the chain; first thing after being woken."""
        follower, self.next_to_wake = self.next_to_wake, None
        if follower is not None:
            wake(follower.wakeup)


class EndLine:
    """Where decisions for one broker gather while a request is on its way; as `_lines.py` has it for sends. Any thread."""

    def __init__(
        self,
        call: Callable[[Sequence[End], float], list[bool | ProtomqError]],
        company: Company | None = None,
        on_told: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`on_told` is called with the number of callers that are about to be woken with their outcomes."""
        self._call = call
        self._on_told = on_told
        self.company = company or Company()
        """Whom the leaders wait for."""
        self._lock = threading.Lock()
        self._waiting: list[_Entry] = []
        """A list: some are taken out by one instruction, so that Ctrl-C finds all of that done, or nothing."""
        self._leader: _Entry | None = None
        self._drained: threading.Event | None = None

    def drain(self, timeout_s: float) -> None:
        """Until no decision waits or is in flight, or the time is over."""
        with self._lock:
            if self._leader is None:
                return
            drained = self._drained = threading.Event()
        drained.wait(timeout_s)

    def end(self, end: End, timeout_s: float) -> bool:
        """Whether the transaction had ended so before. Raises what the call raises."""
        entry = _Entry(end, time.monotonic() + timeout_s)
        try:
            with self._lock:
                if self._leader is not None:
                    entry.wakeup.acquire()
                    entry.is_in_line = True
                    self._waiting.append(entry)
                else:
                    self._leader, entry.leads = entry, True
            if entry.leads:
                self._lead(entry, arrives=True)
            else:
                self._follow(entry, timeout_s)
        except BaseException as error:
            if is_interrupt(error):
                self._interrupted(entry)
            raise
        if isinstance(entry.outcome, BaseException):
            raise entry.outcome
        return bool(entry.outcome)

    def _follow(self, entry: _Entry, timeout_s: float) -> None:
        """Waits until the decision has its outcome, or this thread is to lead. Raises RequestTimeoutError if it was not told in time."""
        self.company.arrive()
        if not entry.wakeup.acquire(timeout=timeout_s + PAUSE_S) and self._withdraw(entry):
            raise late()
        self._finish_following(entry)

    def _interrupted(self, entry: _Entry) -> None:
        """Ctrl-C has come, nobody knows where: others may depend on this thread to wake them or to lead them. As `LineSender` has it."""
        if self._leader is entry or not self._withdraw(entry):
            threading.Thread(target=self._clean_up, args=(entry,), name="protomq-interrupted", daemon=True).start()

    def _clean_up(self, entry: _Entry) -> None:
        if self._leader is entry:
            self._hand_over()
        elif entry.is_in_line and not entry.leads:
            self._finish_following(entry)
        for other in entry.along:
            if other.outcome is None:
                other.outcome = ConnectionLostError("the thread that told the decision was stopped by an interrupt")
            wake(other.wakeup)
        leader = self._leader
        if leader is not None:
            wake(leader.wakeup)

    def _hand_over(self) -> _Entry | None:
        """The request has returned: who leads next, and is to be woken. None: the line is free."""
        with self._lock:
            next_ = self._waiting[0] if self._waiting else None
            if next_ is not None:
                next_.leads = True
            self._leader = next_
            del self._waiting[:1]
            if next_ is None and self._drained is not None:
                self._drained.set()
            return next_

    def _finish_following(self, entry: _Entry) -> None:
        while not entry.leads and entry.outcome is None:
            entry.wakeup.acquire(timeout=0.1)
        if entry.leads:
            self._lead(entry)
        else:
            entry.pass_on()

    def _withdraw(self, entry: _Entry) -> bool:
        """Takes back a decision that still waits in line; False if it is on its way, or its caller is to lead."""
        with self._lock:
            try:
                index = self._waiting.index(entry)
            except ValueError:
                return False
            del self._waiting[index]
            entry.is_in_line = False
            return True

    def _lead(self, own: _Entry, *, arrives: bool = False) -> None:
        """Tells what has gathered, and hands the lead over. `arrives`: the caller found the line free, and is not counted yet."""
        entries = own.along = [own]
        try:
            if arrives:
                self.company.arrive()
            self.company.wait()
            with self._lock:
                count = near_count([entry.deadline_s for entry in (own, *self._waiting[: ENDS_MAX - 1])])
                entries[1:] = self._waiting[: count - 1]
                del self._waiting[: count - 1]
            timeout_s = max(own.deadline_s - time.monotonic(), 0.001)
            outcomes: Sequence[Any] = self._call([entry.end for entry in entries], timeout_s)
        except BaseException as error:
            if is_interrupt(error):
                stopped = f"the thread that told the decision was stopped by {error!r}"
                outcomes = [error, *(ConnectionLostError(stopped) for _ in entries[1:])]
            else:
                # Threads that raise one exception object would write into each other's traceback.
                outcomes = [error, *(copy.copy(error) for _ in entries[1:])]
        next_ = self._hand_over()
        try:
            self._on_told(len(entries))
        except BaseException as error:
            # Interrupted: the others have their outcomes all the same.
            outcomes = [error, *outcomes[1:]]
        if next_ is not None:
            wake(next_.wakeup)
        for entry, outcome in zip(entries, outcomes, strict=True):
            entry.outcome = outcome
        # In chains, as senders are: threads that are all woken at once only fight for the GIL.
        others = entries[1:]
        for entry, follower in zip(others, others[CHAINS:], strict=False):
            entry.next_to_wake = follower
        for entry in others[:CHAINS]:
            wake(entry.wakeup)


_AsyncEntry = tuple[End, float, asyncio.Future[bool] | None, Callable[[Exception], None] | None]
"""A decision of one coroutine: (end, deadline_s, future, on_failure), with a future, a function, or both. A plain tuple: one is made for
every decision.
"""


class AsyncEndLine:
    """Where decisions for one broker gather while a request is on its way."""

    def __init__(
        self,
        call: Callable[[Sequence[End], float], Awaitable[list[bool | ProtomqError]]],
    ) -> None:
        self._call = call
        self._waiting: deque[_AsyncEntry] = deque()
        self._under_way: Sequence[_AsyncEntry] = ()
        """Those of the request that is on its way."""
        self._task: asyncio.Task[None] | None = None
        self._create_future: Callable[[], asyncio.Future[bool]]
        """That of the loop of the task: to ask which loop runs is a call of the kernel."""

    @property
    def room(self) -> int:
        """How many more may wait before whoever brings one waits, too."""
        return ENDS_MAX - len(self._waiting)

    @property
    def count(self) -> int:
        """Decisions without an outcome."""
        return len(self._under_way) + len(self._waiting)

    def forget(self) -> None:
        """Its task goes on no more, or in another process: what it has left is not this line's."""
        self._under_way = ()
        self._waiting.clear()

    async def drain(self, timeout_s: float) -> None:
        """Until all that waits has been told, or the time is over."""
        if self._task is not None:
            await asyncio.wait((self._task,), timeout=timeout_s)

    def tell(self, end: End, timeout_s: float, on_failure: Callable[[Exception], None] | None = None) -> asyncio.Future[bool]:
        """Whether the transaction had ended so before, or what the call raises; for whoever waits for it now, later, or never.

        `on_failure`: see `tell_unawaited`.
        """
        is_idle = self._task is None
        if is_idle:
            self._create_future = asyncio.get_running_loop().create_future
        future = self._create_future()
        self._waiting.append((end, time.monotonic() + timeout_s, future, on_failure))
        if is_idle:
            self._begin()
        return future

    def tell_unawaited(self, end: End, timeout_s: float, on_failure: Callable[[Exception], None]) -> None:
        """As `tell`, but nobody waits: `on_failure` is called if the decision was not taken, or may not have been.

        Of those that are given up, the log has one number. A future, and the call by which the loop says that it is done, were an eighth of
        what a transaction costs here.
        """
        is_idle = self._task is None
        if is_idle:
            self._create_future = asyncio.get_running_loop().create_future
        self._waiting.append((end, time.monotonic() + timeout_s, None, on_failure))
        if is_idle:
            self._begin()

    def _begin(self) -> None:
        # It starts in the next turn of the loop: what other coroutines decide in this one goes along. With an eager task factory it
        # starts here, so what it is to tell must be there. It may even have ended.
        task = asyncio.get_running_loop().create_task(self._serve())
        if not task.done():
            self._task = task
            task.add_done_callback(self._served)

    async def _serve(self) -> None:
        waiting = self._waiting
        try:
            while waiting:
                if waiting[0][2] is None:
                    # Nobody waits for it. What its caller sends next goes first: the broker ends it while that answer is worked on here.
                    await asyncio.sleep(0)
                count = near_count([entry[1] for entry in islice(waiting, ENDS_MAX)])
                await self._tell([waiting.popleft() for _ in range(count)])
        except BaseException as error:
            self._give_up(why_ended(error))
            raise
        finally:
            self._task = None

    def _served(self, task: asyncio.Task[None]) -> None:
        if self._task is task:  # It was cancelled before its first step.
            self._task = None
            self._give_up(why_ended(asyncio.CancelledError()))

    def _give_up(self, why: str) -> None:
        """Nobody tells any more what is left."""
        left = [(entry, True) for entry in self._under_way] + [(entry, False) for entry in self._waiting]
        self._under_way = ()
        self._waiting.clear()
        for (_, _, future, _), is_under_way in left:
            if future is not None:
                fail(future, given_up(why, is_under_way=is_under_way))
        if count := sum(on_failure is not None for (_, _, _, on_failure), _ in left):
            say_not_told(count, why)

    async def _tell(self, entries: Sequence[_AsyncEntry]) -> None:
        now_s = time.monotonic()
        for entry in entries:
            if entry[1] <= now_s:
                _fail(entry, late())
        live = [entry for entry in entries if entry[1] > now_s and (entry[2] is None or not entry[2].done())]
        if not live:
            return
        self._under_way = live
        ends, deadlines_s, _, _ = zip(*live, strict=True)
        try:
            outcomes: Sequence[Any] = await self._call(ends, min(deadlines_s) - now_s)
        except Exception as error:
            outcomes = [own_error(error, index) for index in range(len(live))]
        self._under_way = ()
        for entry, outcome in zip(live, outcomes, strict=True):
            future = entry[2]
            if isinstance(outcome, Exception):
                _fail(entry, outcome)
            elif future is not None and not future.done():
                future.set_result(outcome)


def _fail(entry: _AsyncEntry, error: Exception) -> None:
    _, _, future, on_failure = entry
    if future is not None:
        fail(future, error)
    if on_failure is not None:
        on_failure(error)
