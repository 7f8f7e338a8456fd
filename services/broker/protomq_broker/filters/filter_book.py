"""The filters that consumers use, compiled once: made on a thread of its own, kept while they are used.

`find` costs a lane a look into a dictionary. What is not there is compiled (`prepare`): an SQL92 expression of the largest size takes 50
ms,
for which no lane waits. What is wrong with a filter is kept like a filter: nobody compiles it twice. A disk that could not read a module is
asked again by the next pull.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, Protocol

from numpy.typing import NDArray

KEPT_MAX: Final = 1_000
"""Filters; of SQL92 ones each takes some 10 KiB."""
WAITING_MAX: Final = 1_000
"""Filters that are to be compiled: some seconds' work."""


class Matches(NamedTuple):
    """What a filter says of a run: the indexes of its matches, ascending, among the first `examined` records. It has seen no others."""

    indexes: list[int]
    examined: int


class Filter(Protocol):
    """A compiled filter. Any thread.

    Attributes:
        tags: every match has one of these tags (UTF-8); empty: any or none.
        records_min: fewer at once cost hardly less time, if they are as most records are.
        records_max: of one call of `matching`: what an expression can make it cost at worst is bounded by that.
    """

    tags: frozenset[bytes]
    records_min: int
    records_max: int

    def matching(self, data: bytes, starts: NDArray[Any], sizes: NDArray[Any]) -> Matches:
        """Which of the record fields [start, start + size) of `data` are let through. Raises FilterError.

        It looks at one record at least. It may stop before the last one, where the rest would take too long for one slice.
        """
        ...


class FilterKey(NamedTuple):
    """A language, and an expression in it."""

    language: str
    text: str


class Refused(NamedTuple):
    """Why there is no such filter: a FilterError, a FilterUnavailableError, or a defect."""

    error: Exception


class FilterBook:
    """Any thread. `compile_` makes a filter or raises FilterError or FilterUnavailableError."""

    def __init__(self, compile_: Callable[[FilterKey], Filter]) -> None:
        self._compile = compile_
        self._lock = threading.Lock()
        self._made: OrderedDict[FilterKey, Filter | Refused] = OrderedDict()
        self._waiting: dict[FilterKey, list[Callable[[Filter | Refused], None]]] = {}
        self._changed: set[FilterKey] = set()
        """Those of `_waiting` that were forgotten since their compilation began."""
        self._executor = ThreadPoolExecutor(1, "filters")

    def find(self, key: FilterKey) -> Filter | Refused | None:
        """The filter, or why it cannot be; None: it was not made yet."""
        with self._lock:
            made = self._made.get(key)
            if made is not None:
                self._made.move_to_end(key)
            return made

    def prepare(self, key: FilterKey, done: Callable[[Filter | Refused], None]) -> bool:
        """Has the filter made; `done` is called on another thread. False: too many are waiting."""
        with self._lock:
            waiting = self._waiting.get(key)
            if waiting is not None:
                waiting.append(done)
                return True
            if len(self._waiting) >= WAITING_MAX:
                return False
            self._waiting[key] = [done]
        self._executor.submit(self._make, key)
        return True

    def forget(self, key: FilterKey) -> None:
        """What stands behind the key has changed."""
        with self._lock:
            self._made.pop(key, None)
            if key in self._waiting:
                self._changed.add(key)

    def close(self) -> None:
        """Ends the thread. Nobody waits for what has not begun."""
        self._executor.shutdown(cancel_futures=True)

    def _make(self, key: FilterKey) -> None:
        while True:
            with self._lock:
                self._changed.discard(key)
            made = self._compiled(key)
            with self._lock:
                if key in self._changed:
                    continue  # It may be of what stood behind the key before.
                if not (isinstance(made, Refused) and isinstance(made.error, OSError)):
                    self._made[key] = made
                while len(self._made) > KEPT_MAX:
                    self._made.popitem(last=False)
                waiting = self._waiting.pop(key)
                break
        for done in waiting:
            done(made)

    def _compiled(self, key: FilterKey) -> Filter | Refused:
        try:
            return self._compile(key)
        except Exception as error:  # Any other than these two is a defect, of which who waits is told, too.
            return Refused(error)
