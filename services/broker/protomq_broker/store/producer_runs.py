"""The runs of sequences that one producer has stored, and where. Values and arithmetic only; see `repeated_sends.py`."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

RUN_FIELDS: Final = [("first", "<u8"), ("end", "<u8"), ("queue", "<u4"), ("queue_offset", "<u8")]
RUN: Final = np.dtype(RUN_FIELDS)
"""A run: sequences [first, end), the number of their queue, the queue offset of the first one."""
NO_RUNS: Final = np.empty(0, RUN)

_EMPTY: Final[array[int]] = array("Q")


class ProducerRuns:
    """One producer: its last run in plain fields, since most sends make that one longer; older runs in parallel arrays, sorted."""

    __slots__ = (
        "end",
        "ends",
        "epoch",
        "first",
        "firsts",
        "floor",
        "queue",
        "queue_offset",
        "queue_offsets",
        "queues",
        "used_ms",
    )

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.used_ms = 0
        self.floor = 0
        self.first = self.end = 0  # no run yet
        self.queue = self.queue_offset = 0
        self.firsts: array[int] = _EMPTY
        self.ends: array[int] = _EMPTY
        self.queue_offsets: array[int] = _EMPTY
        self.queues: array[int] = _EMPTY

    def insert(self, first: int, end: int, queue: int, queue_offset: int) -> int:
        """Adds a run; how many more older runs there are. What is known already is left alone."""
        if first >= self.end:
            if (
                first == self.end
                and queue == self.queue
                and queue_offset - self.queue_offset == first - self.first
            ):
                self.end = end
                return 0
            added = 0
            if self.end > self.first:
                if self.firsts is _EMPTY:
                    self._make_columns()
                self.firsts.append(self.first)
                self.ends.append(self.end)
                self.queues.append(self.queue)
                self.queue_offsets.append(self.queue_offset)
                added = 1
            self.first, self.end, self.queue, self.queue_offset = first, end, queue, queue_offset
            return added
        if end > self.first:
            return 0  # overlaps the last run: `admit` lets no such send through
        at = bisect_right(self.firsts, first)
        if (at and self.ends[at - 1] > first) or (at < len(self.firsts) and self.firsts[at] < end):
            return 0
        if at:
            before = at - 1
            ahead = first - self.firsts[before]
            if (
                self.ends[before] == first
                and self.queues[before] == queue
                and self.queue_offsets[before] + ahead == queue_offset
            ):
                self.ends[before] = end
                return 0
        if self.firsts is _EMPTY:
            self._make_columns()
        self.firsts.insert(at, first)
        self.ends.insert(at, end)
        self.queues.insert(at, queue)
        self.queue_offsets.insert(at, queue_offset)
        return 1

    def _make_columns(self) -> None:
        self.firsts, self.ends, self.queue_offsets, self.queues = (
            array("Q"),
            array("Q"),
            array("Q"),
            array("I"),
        )

    def overlapping(self, first: int, end: int) -> tuple[int, int, int, int] | None:
        """(first, end, queue, queue_offset) of the first run that shares sequences with [first, end)."""
        at = bisect_right(self.firsts, first)
        if at and self.ends[at - 1] > first:
            at -= 1
        if at < len(self.firsts) and self.firsts[at] < end:
            return self.firsts[at], self.ends[at], self.queues[at], self.queue_offsets[at]
        if self.first < end and first < self.end:
            return self.first, self.end, self.queue, self.queue_offset
        return None

    def forget_oldest(self) -> int:
        """Forgets a quarter of the older runs; how many."""
        count = max(1, len(self.firsts) // 4)
        self.floor = self.ends[count - 1]
        for column in (self.firsts, self.ends, self.queues, self.queue_offsets):
            del column[:count]
        return count

    def older_runs(self) -> NDArray[Any]:
        """All runs but the last, in order."""
        runs = np.empty(len(self.firsts), RUN)
        if len(runs):
            runs["first"], runs["end"] = self.firsts, self.ends
            runs["queue"], runs["queue_offset"] = self.queues, self.queue_offsets
        return runs

    def set_older_runs(self, runs: NDArray[Any]) -> None:
        """Replaces all runs but the last."""
        self.firsts = self.ends = self.queue_offsets = self.queues = _EMPTY
        if len(runs):
            self._make_columns()
            self.firsts.frombytes(runs["first"].tobytes())
            self.ends.frombytes(runs["end"].tobytes())
            self.queue_offsets.frombytes(runs["queue_offset"].tobytes())
            self.queues.extend(runs["queue"].tolist())

    def set_last_run(self, first: int, end: int, queue: int, queue_offset: int) -> None:
        """Replaces the last run; if it is empty, the newest of the older ones takes its place."""
        if end > first:
            self.first, self.end, self.queue, self.queue_offset = first, end, queue, queue_offset
        elif self.firsts:
            self.first, self.end = self.firsts.pop(), self.ends.pop()
            self.queue, self.queue_offset = self.queues.pop(), self.queue_offsets.pop()
        else:
            self.first = self.end = self.floor


def clipped(runs: NDArray[Any], ends: NDArray[np.int64]) -> NDArray[Any]:
    """The runs as far as their queues reach."""
    cut = runs.copy()
    cut["end"] = clipped_ends(runs, ends)
    return cut[cut["end"] > cut["first"]]


def clipped_ends(runs: NDArray[Any], ends: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The end of each run as far as its queue reaches."""
    if not runs.size or not len(ends):
        return runs["end"]
    allowed = ends[runs["queue"]] - runs["queue_offset"].astype(np.int64)
    lengths = (runs["end"] - runs["first"]).astype(np.int64)
    return runs["first"] + np.clip(allowed, 0, lengths).astype(np.uint64)
