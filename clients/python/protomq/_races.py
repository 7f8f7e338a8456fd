"""Races from threads (`_steps.Race`): each has its calls in flight without threads of its own (`_pull_multiplexer.py`).

What is under way when a race is over is given up, and its end is waited for: it may be an answer with messages. A connection on which that
does not come in time is closed. Then its server knows that nobody takes the answer.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import Final

from . import _forks
from ._hooked_calls import multiplexer_with
from ._pull_multiplexer import PullMultiplexer
from ._steps import CallRace, Start
from ._transport import SyncTransport
from ._types import MethodInfo
from .errors import ClosedError

GIVEN_UP_S: Final = 0.05
"""For which the end of a call that was given up is waited for."""
SIZE_MAX_BYTES: Final = 16 << 20


class Races:
    """Of one client. Any thread."""

    def __init__(self, transport: SyncTransport, method: MethodInfo) -> None:
        """`method`: that of all calls."""
        self._transport = transport
        self._method = method
        self._closed = False
        self._tickets = itertools.count()
        self._start()

    def _start(self) -> None:
        self._fork_count = _forks.fork_count
        self._lock = threading.Lock()
        self._idle: list[PullMultiplexer] = []
        self._busy: set[PullMultiplexer] = set()

    def run(self, race: CallRace) -> None:
        """Makes the calls that the race wants, until it is over. Raises ClosedError."""
        calls = self._take()
        names: dict[int, str] = {}

        def start(starts: list[Start]) -> None:
            for name, (address, _, payload, timeout_s) in starts:
                ticket = next(self._tickets)
                names[ticket] = name
                calls.send(address, ticket, b"".join(payload), timeout_s)

        is_usable = False
        try:
            start(race.begin())
            while not race.is_over:
                for ticket, result in calls.wait(race.wait_s(), SIZE_MAX_BYTES):
                    if ticket in names:
                        start(race.ended(names.pop(ticket), result))
                if self._closed:
                    raise ClosedError("it was closed while this call waited")
                start(race.due())
            self._give_up(calls, race, names)
            is_usable = True
        finally:
            self._give_back(calls, is_usable=is_usable)

    def _give_up(self, calls: PullMultiplexer, race: CallRace, names: dict[int, str]) -> None:
        silent = set(race.silent)
        awaited = set()
        for ticket, name in names.items():
            calls.give_up(ticket)
            if name not in silent:
                awaited.add(ticket)
        until_s = time.monotonic() + GIVEN_UP_S
        while awaited and (left_s := until_s - time.monotonic()) > 0:
            for ticket, result in calls.wait(left_s, SIZE_MAX_BYTES):
                awaited.discard(ticket)
                if ticket in names:
                    race.ended(names.pop(ticket), result)
        if names:
            for ticket in names:
                calls.drop(ticket)
            calls.wait(0.0, SIZE_MAX_BYTES)  # Hooks are told how they ended.

    def close(self) -> None:
        """Ends all races with ClosedError."""
        self._closed = True
        if self._fork_count != _forks.fork_count:
            return
        with self._lock:
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for calls in idle:
            calls.close()
        for calls in busy:
            calls.wake()

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
