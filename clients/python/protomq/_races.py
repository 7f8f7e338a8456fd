"""Races from threads (`_steps.Race`): each has its calls in flight without threads of its own (`_pull_multiplexer.py`).

What is under way when a race is over is given up, and its end is waited for: it may be an answer with messages. If it does not come soon, a
thread waits for it instead, with the connections of the race. The next race has others. A connection is closed only when that thread has
waited for long, too: what had left the server by then is lost.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from . import _forks
from ._daemon_threads import DaemonThreads
from ._hooked_calls import multiplexer_with
from ._pull_multiplexer import PullMultiplexer
from ._steps import CallRace, CallServer, Start
from ._transport import SyncTransport
from ._types import MethodInfo
from .errors import ClosedError

GIVEN_UP_S: Final = 0.05
"""For which the caller waits for the end of a call that was given up."""
LATE_S: Final = 10.0
"""For which a thread waits for it then."""
LOOK_S: Final = 0.5
"""Between two looks whether the time of calls is up."""
SIZE_MAX_BYTES: Final = 16 << 20


logger = logging.getLogger("protomq")


class Races:
    """Of one client. Any thread."""

    def __init__(
        self,
        transport: SyncTransport,
        method: MethodInfo,
        came_late: Callable[[CallServer, bytes], None],
        run_aside: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        """`method`: that of all calls; `came_late`: gets an answer that nobody waits for any more, and may take its time.

        `run_aside`: in place of threads.
        """
        self._transport = transport
        self._method = method
        self._came_late = came_late
        self._run_aside = run_aside or self._submit
        self._closed = False
        self._close_s = float("inf")
        """Until when late answers are waited for after a close."""
        self._tickets = itertools.count()
        self._start()

    def _start(self) -> None:
        self._fork_count = _forks.fork_count
        # A signal's handler may close the consumer on the thread that has it.
        self._lock = threading.RLock()
        self._idle: list[PullMultiplexer] = []
        self._busy: set[PullMultiplexer] = set()
        self._late: set[PullMultiplexer] = set()
        """Those of races that are over, which wait for late answers."""
        self._late_ended = threading.Condition(self._lock)
        self._threads = DaemonThreads("protomq-late")

    def run(self, race: CallRace) -> None:
        """Makes the calls that the race wants, until it is over. Raises ClosedError."""
        calls = self._take()
        under_way: dict[int, Start] = {}

        def start(starts: list[Start]) -> None:
            for each in starts:
                address, _, payload, timeout_s = each.call
                ticket = next(self._tickets)
                under_way[ticket] = each
                calls.send(address, ticket, b"".join(payload), timeout_s)

        is_usable = False
        try:
            start(race.begin())
            while not race.is_over:
                for ticket, result in calls.wait(race.wait_s(), SIZE_MAX_BYTES):
                    if ticket in under_way:
                        start(race.ended(under_way.pop(ticket).name, result))
                if self._closed:
                    raise ClosedError("it was closed while this call waited")
                start(race.due())
            self._give_up(calls, race, under_way)
            is_usable = True
        finally:
            if is_usable and under_way:
                self._wait_aside(calls, under_way)
            else:
                self._give_back(calls, is_usable=is_usable)

    def _give_up(self, calls: PullMultiplexer, race: CallRace, under_way: dict[int, Start]) -> None:
        if not under_way:
            return
        silent = set(race.silent)
        awaited = set()
        for ticket, (name, _) in under_way.items():
            calls.give_up(ticket)
            if name not in silent:
                awaited.add(ticket)
        left_s = GIVEN_UP_S if awaited else 0.0
        until_s = time.monotonic() + left_s
        while True:
            for ticket, result in calls.wait(left_s, SIZE_MAX_BYTES):
                awaited.discard(ticket)
                if ticket in under_way:
                    race.ended(under_way.pop(ticket).name, result)
            left_s = until_s - time.monotonic()
            if not awaited or left_s <= 0:
                return

    def _wait_aside(self, calls: PullMultiplexer, under_way: dict[int, Start]) -> None:
        with self._lock:
            self._busy.discard(calls)
            self._late.add(calls)
        try:
            self._run_aside(lambda: self._wait_for_late(calls, under_way))
        except RuntimeError:  # The interpreter ends: no thread begins any more.
            self._late_is_over(calls, under_way)

    def _submit(self, function: Callable[[], None]) -> None:
        self._threads.submit(function)

    def _wait_for_late(self, calls: PullMultiplexer, under_way: dict[int, Start]) -> None:
        until_s = time.monotonic() + LATE_S
        try:
            while under_way and (left_s := min(until_s, self._close_s) - time.monotonic()) > 0:
                for ticket, result in calls.wait(min(left_s, LOOK_S), SIZE_MAX_BYTES):
                    each = under_way.pop(ticket, None)
                    if each is not None and isinstance(result, bytes):
                        self._came_late(each.call, result)
            for ticket in under_way:
                calls.drop(ticket)
            calls.wait(0.0, SIZE_MAX_BYTES)  # Hooks are told how they ended.
        except Exception:
            logger.exception("waiting for late answers of %s", self._method.path)
        finally:
            self._late_is_over(calls, under_way)

    def _late_is_over(self, calls: PullMultiplexer, under_way: dict[int, Start]) -> None:
        with self._late_ended:
            self._late.discard(calls)
            self._late_ended.notify_all()
        self._give_back(calls, is_usable=not under_way)

    def close(self, late_s: float) -> None:
        """Ends all races with ClosedError. Waits that long at most for late answers."""
        self._close_s = time.monotonic() + late_s
        self._closed = True
        if self._fork_count != _forks.fork_count:
            return
        with self._lock:
            idle, self._idle = self._idle, []
            busy, late = list(self._busy), list(self._late)
        for calls in idle:
            calls.close()
        for calls in (*busy, *late):
            calls.wake()
        with self._late_ended:
            self._late_ended.wait_for(lambda: not self._late, late_s if late else 0.0)
        self._threads.close()

    def _take(self) -> PullMultiplexer:
        if self._fork_count != _forks.fork_count:
            idle = self._idle
            self._start()
            for calls in idle:
                calls.abandon()
        with self._lock:
            if self._closed:
                raise ClosedError("the consumer is closed")
            calls = self._idle.pop() if self._idle else multiplexer_with(self._transport, self._method)
            self._busy.add(calls)
        return calls

    def _give_back(self, calls: PullMultiplexer, *, is_usable: bool) -> None:
        with self._lock:
            self._busy.discard(calls)
            if is_usable and not self._closed:
                self._idle.append(calls)
                return
        calls.close()
