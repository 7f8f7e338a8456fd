"""Transactions that have ended, the newest: so that a decision that comes twice, late or contradictory is known as such."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

ENDED_ROW: Final = np.dtype(
    [
        ("producer_id", "<u8"),
        ("producer_epoch", "<u4"),
        ("sequence", "<u8"),
        ("ending", "u1"),
        ("position", "<u8"),
    ]
)
"""As it stands in the state file. `position`: of the record that reports the ending."""

Key = tuple[int, int, int]


class Run(NamedTuple):
    """Transactions of one producer that one record has ended, whose sequences follow each other: mostly all that were sent together."""

    position: int
    producer_id: int
    producer_epoch: int
    first_sequence: int
    endings: bytes


class EndedTransactions:
    """A table of bounded size.

    By the producer and then by the sequence. A key of three numbers for each would be hashed, kept and deleted at several times the cost.
    """

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._count = 0
        self._runs: deque[Run] = deque()
        """The oldest first."""
        self._endings: dict[tuple[int, int], dict[int, int]] = {}

    def __len__(self) -> int:
        return self._count

    def get(self, key: Key) -> int | None:
        """How it ended; None if that is not known, or it has not."""
        known = self._endings.get((key[0], key[1]))
        return None if known is None else known.get(key[2])

    def has_any(self, producer_id: int, producer_epoch: int, sequences: range) -> bool:
        """Whether one of these is known to have ended."""
        known = self._endings.get((producer_id, producer_epoch))
        return known is not None and not known.keys().isdisjoint(sequences)

    def add_all(self, keys: Sequence[Key], endings: Sequence[int], position: int) -> None:
        """These have ended, by the record at a position that is never less than the one before. Of each the first ending counts; the oldest
        are forgotten if they must be.
        """
        if not keys:
            return
        count = len(keys)
        producer_id, producer_epoch, first = keys[0]
        producer_ids, epochs, sequences = zip(*keys, strict=True)
        # Nearly always.
        if (
            sequences == tuple(range(first, first + count))
            and producer_ids.count(producer_id) == epochs.count(producer_epoch) == count
            and not self.has_any(producer_id, producer_epoch, range(first, first + count))
        ):
            self._add(Run(position, producer_id, producer_epoch, first, bytes(endings)))
            return
        new: dict[Key, int] = {}
        deque(map(new.setdefault, keys, endings), maxlen=0)
        # Threads decide in no order, on what was sent together.
        ordered = sorted(new.items())
        begin = 0
        for end in range(1, len(ordered) + 1):
            (one, two, three), _ = ordered[end - 1]
            if end < len(ordered) and ordered[end][0] == (one, two, three + 1):
                continue
            self._add_unknown(ordered[begin:end], position)
            begin = end

    def _add_unknown(self, run: Sequence[tuple[Key, int]], position: int) -> None:
        producer_id, producer_epoch, first = run[0][0]
        if self.has_any(producer_id, producer_epoch, range(first, first + len(run))):
            if len(run) > 1:
                for one in run:
                    self._add_unknown((one,), position)
            return
        self._add(Run(position, producer_id, producer_epoch, first, bytes(ending for _, ending in run)))

    def _add(self, run: Run) -> None:
        _, producer_id, producer_epoch, first, endings = run
        known = self._endings.setdefault((producer_id, producer_epoch), {})
        known.update(zip(range(first, first + len(endings)), endings, strict=True))
        self._runs.append(run)
        self._count += len(endings)
        while self._count > self._count_max:
            self._forget_first(self._count - self._count_max)

    def forget_below(self, position: int) -> None:
        """Forgets what is told by records before `position`."""
        while self._runs and self._runs[0].position < position:
            self._forget_first(len(self._runs[0].endings))

    def runs(self) -> list[Run]:
        """All that is known, the oldest first; see `rows_of`."""
        return list(self._runs)

    def load(self, rows: Sequence[Any] | NDArray[Any]) -> None:
        """Takes over what `rows_of` gave."""
        for position, some in groupby(np.asarray(rows, ENDED_ROW).tolist(), itemgetter(4)):
            *identities, endings, _ = zip(*some, strict=True)
            self.add_all(list(zip(*identities, strict=True)), endings, position)

    def _forget_first(self, count: int) -> None:
        """Forgets the oldest of the oldest run, `count` of them if it has so many."""
        run = self._runs.popleft()
        _, producer_id, producer_epoch, first, endings = run
        if count < len(endings):
            self._runs.appendleft(run._replace(first_sequence=first + count, endings=endings[count:]))
        gone = range(first, first + min(count, len(endings)))
        known = self._endings[producer_id, producer_epoch]
        deque(map(known.__delitem__, gone), maxlen=0)
        if not known:
            del self._endings[producer_id, producer_epoch]
        self._count -= len(gone)


def rows_of(runs: Sequence[Run]) -> NDArray[Any]:
    """As they stand in the state file, the oldest first. Any thread: it takes a while where each run is one transaction."""
    counts = np.array([len(run.endings) for run in runs], np.int64)
    rows = np.zeros(int(counts.sum()), ENDED_ROW)
    if not runs:
        return rows
    positions, producer_ids, epochs, firsts, endings = zip(*runs, strict=True)
    for name, values in (("position", positions), ("producer_id", producer_ids), ("producer_epoch", epochs)):
        rows[name] = np.repeat(np.array(values, np.uint64), counts)
    behind = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows["sequence"] = np.repeat(np.array(firsts, np.uint64), counts) + behind.astype(np.uint64)
    rows["ending"] = np.frombuffer(b"".join(endings), np.uint8)
    return rows
