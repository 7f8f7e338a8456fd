"""Requests that sent messages back, so that one that is sent again makes no second copies. Values only; a part of the state `groups.py`.

Rules:
- A request is remembered for 15 minutes, as a send is, by the times in the records: same records, same state.
- Of more than `REQUESTS_MAX` the ones that were noted first are forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

REMEMBERED_MS: Final = 15 * 60_000
REQUESTS_MAX: Final = 100_000
_ROW: Final = np.dtype([("key", "<u8"), ("time_ms", "<u8"), ("position", "<u8")])


class SentBackRequest(NamedTuple):
    """A request that was done.

    Attributes: time_ms: when, by log time; position: where the newest record stands that reports it.
    """

    time_ms: int
    position: int


class SentBackRequests:
    """Those that are remembered, by their key. One thread at a time."""

    def __init__(self) -> None:
        self._known: dict[int, SentBackRequest] = {}
        self._newest_ms = 0

    def __contains__(self, key: int) -> bool:
        """Whether this request is known to be done."""
        return key in self._known

    def __len__(self) -> int:
        return len(self._known)

    def note(self, keys: Iterable[int], times_ms: Iterable[int], position: int) -> None:
        """The record at `position` reports these."""
        known = self._known
        for key, time_ms in zip(keys, times_ms, strict=False):
            known.pop(key, None)
            known[key] = SentBackRequest(time_ms, position)
            self._newest_ms = max(self._newest_ms, time_ms)
        oldest_ms = self._newest_ms - REMEMBERED_MS
        while known:
            key, first = next(iter(known.items()))
            if first.time_ms >= oldest_ms and len(known) <= REQUESTS_MAX:
                break
            del known[key]

    def below(self, position: int) -> list[int]:
        """Keys of those whose newest record stands before `position`."""
        return [key for key, request in self._known.items() if request.position < position]

    def times_of(self, keys: Sequence[int], position: int) -> dict[int, int]:
        """When those of `keys` were done that are still told before `position`."""
        found = ((key, self._known.get(key)) for key in keys)
        return {
            key: request.time_ms
            for key, request in found
            if request is not None and request.position < position
        }

    def all(self) -> list[tuple[int, SentBackRequest]]:
        """All that are known, in the order in which they are forgotten: a copy."""
        return list(self._known.items())

    @classmethod
    def load(cls, text: str) -> SentBackRequests:
        """Those of a text that `dump` gave; ValueError for what is none."""
        found = cls()
        octets = bytes.fromhex(text)
        if len(octets) % _ROW.itemsize:
            raise ValueError("half a row of a request that sent messages back")
        for key, time_ms, position in np.frombuffer(octets, _ROW).tolist():
            found._known[key] = SentBackRequest(time_ms, position)
            found._newest_ms = max(found._newest_ms, time_ms)
        return found


def dump(requests: Sequence[tuple[int, SentBackRequest]]) -> str:
    """Requests as text."""
    rows = np.array([(key, *request) for key, request in requests], _ROW)
    return rows.tobytes().hex()
