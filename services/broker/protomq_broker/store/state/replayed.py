"""Which dead letters were replayed, as runs of offsets; a part of the state `groups.py`. Values only."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, Final

from protomq.v1.state_pb2 import ReplayedDeadLetters


class OffsetRuns:
    """A set of offsets as disjoint rising runs [start, end), joined where they touch."""

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        """`numbers`: as `numbers` gives them."""
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.add_runs(numbers)

    def copy(self) -> OffsetRuns:
        """The same set, to be changed. There may be a hundred thousand runs: none is looked at."""
        found = OffsetRuns()
        found._starts, found._ends = self._starts.copy(), self._ends.copy()
        return found

    @property
    def run_count(self) -> int:
        """Number of runs."""
        return len(self._starts)

    def __contains__(self, offset: int) -> bool:
        index = bisect_right(self._starts, offset) - 1
        return index >= 0 and offset < self._ends[index]

    def add_runs(self, numbers: Iterable[int]) -> None:
        """Adds runs: start, end, start, end, …; empty ones are skipped."""
        pairs = iter(numbers)
        for start, end in zip(pairs, pairs, strict=False):
            if start < end:
                self._add(start, end)

    def _add(self, start: int, end: int) -> None:
        first = bisect_right(self._ends, start - 1)  # the first run that touches it
        last = bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def count_within(self, start: int, end: int) -> int:
        """Offsets of [start, end) that are in it."""
        runs = zip(self._starts, self._ends, strict=True)
        return sum(max(min(last, end) - max(first, start), 0) for first, last in runs)

    def numbers(self) -> list[int]:
        """Start, end, start, end, …"""
        return [number for run in zip(self._starts, self._ends, strict=True) for number in run]


class _Replayed:
    """Of one group. `since`: position of the first record that is needed for knowing it."""

    __slots__ = ("incarnation", "runs", "since")

    def __init__(self, incarnation: int, since: int) -> None:
        self.incarnation = incarnation
        self.runs = OffsetRuns()
        self.since = since


_NONE: Final = OffsetRuns()


class ReplayedLetters:
    """Of all groups. One thread at a time; `of`: any."""

    def __init__(self) -> None:
        self._groups: dict[str, _Replayed] = {}

    def of(self, group: str, incarnation: int) -> OffsetRuns:
        """Offsets of the dead letters of a group that were replayed, in this incarnation of their topic. Not to be changed."""
        known = self._groups.get(group)
        return known.runs if known is not None and known.incarnation == incarnation else _NONE

    def note(self, told: ReplayedDeadLetters, position: int) -> None:
        """The record at `position` reports these. Readers see the runs as they were, or as they are then."""
        known = self._groups.get(told.consumer_group)
        if known is None or known.incarnation != told.topic_incarnation:
            known = _Replayed(told.topic_incarnation, position)
        runs = known.runs.copy()
        runs.add_runs(told.runs)
        known.runs = runs
        if len(told.runs) == 2 * runs.run_count and runs.numbers() == list(told.runs):  # it says all again
            known.since = position
        self._groups[told.consumer_group] = known

    def forget(self, group: str) -> None:
        """The group is deleted."""
        self._groups.pop(group, None)

    def below(self, position: int) -> list[str]:
        """Groups of which a record is needed that stands before `position`."""
        return [group for group, known in self._groups.items() if known.since < position]

    def told(self, groups: Iterable[str], position: int) -> list[ReplayedDeadLetters]:
        """What is known of those of `groups` of which a record is still needed that stands before `position`, to be said again."""
        return [
            ReplayedDeadLetters(
                consumer_group=group,
                topic_incarnation=known.incarnation,
                runs=known.runs.numbers(),
            )
            for group in groups
            if (known := self._groups.get(group)) is not None and known.since < position
        ]

    def dump(self) -> list[Any]:
        """All that is known, for a file."""
        return [
            [group, known.incarnation, known.since, known.runs.numbers()]
            for group, known in self._groups.items()
        ]

    @classmethod
    def load(cls, content: Sequence[Any]) -> ReplayedLetters:
        """What `dump` gave."""
        found = cls()
        for group, incarnation, since, numbers in content:
            known = found._groups[str(group)] = _Replayed(int(incarnation), int(since))
            known.runs = OffsetRuns(map(int, numbers))
        return found
