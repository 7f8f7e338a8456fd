"""Decisions that no thread waits for: one thread for each broker tells them, those that have gathered meanwhile in one request."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from ._end_lines import late, near_count
from ._transactions import ENDS_MAX, End
from .errors import ProtomqError

logger = logging.getLogger("protomq.producer")

_IDLE_S: Final = 30.0
"""After this the thread ends; the next decision starts another one."""

Outcome = bool | BaseException
"""Whether the transaction had ended so before, or why that is not known or was refused."""


class _Told(NamedTuple):
    end: End
    deadline_s: float
    on_outcome: Callable[[Outcome], None]


class ToldEnds:
    """Of one broker. `call` tells it some decisions. Any thread."""

    def __init__(self, call: Callable[[Sequence[End], float], list[bool | ProtomqError]]) -> None:
        self._call = call
        self._changed = threading.Condition()
        self._waiting: deque[_Told] = deque()
        self._under_way = 0
        self._thread: threading.Thread | None = None

    def tell(self, end: End, timeout_s: float, on_outcome: Callable[[Outcome], None]) -> None:
        """Returns at once, unless as many wait as one request takes: then it waits, too. Raises RequestTimeoutError if that takes too long,
        RuntimeError where no thread can be started.

        `on_outcome` is called on a thread of this object, within `timeout_s` or a little later.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            if not self._changed.wait_for(self._has_room, timeout_s):
                raise late()
            self._waiting.append(_Told(end, deadline_s, on_outcome))
            if self._thread is None:
                thread = threading.Thread(
                    target=self._tell_all, name="protomq-transaction-ends", daemon=True
                )
                try:
                    thread.start()
                except BaseException:  # Nobody would tell it.
                    self._waiting.pop()
                    raise
                self._thread = thread
            elif len(self._waiting) == 1:
                self._changed.notify_all()

    @property
    def count(self) -> int:
        """Decisions without an outcome."""
        return len(self._waiting) + self._under_way

    def drain(self, timeout_s: float) -> None:
        """Until all that waits has its outcome, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._under_way, timeout_s)

    def _has_room(self) -> bool:
        return len(self._waiting) < ENDS_MAX

    def _tell_all(self) -> None:
        while True:
            with self._changed:
                self._under_way = 0
                self._changed.notify_all()
                # A thread that has nothing to do ends: nobody has to stop it.
                if not self._changed.wait_for(lambda: self._waiting, _IDLE_S):
                    self._thread = None
                    return
                count = near_count([one.deadline_s for one in self._waiting])
                told = [self._waiting.popleft() for _ in range(count)]
                self._under_way = len(told)
            outcomes = self._outcomes(told)
            for one, outcome in zip(told, outcomes, strict=True):
                try:
                    one.on_outcome(outcome)
                except BaseException:  # Nobody would begin another thread.
                    logger.exception("the outcome of a decision could not be told")

    def _outcomes(self, told: Sequence[_Told]) -> Sequence[Outcome]:
        timeout_s = min(one.deadline_s for one in told) - time.monotonic()
        try:
            return self._call([one.end for one in told], max(timeout_s, 0.001))
        except Exception as error:
            return [error] * len(told)
