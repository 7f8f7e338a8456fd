"""Messages of queues that the next pops will want: read once for many small pops, and handed out from there. The pop lane's thread.

    queue of a group     | handed out | found ahead: up to 512 messages | ...

Rules:
- What was found stays true in one epoch, with the same quarantine, while the log still begins before it. Else the pop reads again. Only a
  follower takes back what was readable, and who leads after that has another epoch.
- It is places only, not bytes: these are checked when they are handed out, as those of every pop are.
- What no pop wanted for a second or two is forgotten, since it keeps segments open.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from .store.queues.reading import LogRegion, ReadResult, ReadStatus

if TYPE_CHECKING:
    from .store.state.popped_queue import QueueOfGroup
    from .store.store import Store

AHEAD_COUNT: Final = 512
"""Messages of a look. Its size is what the pop allows, so that it has at least what the pop would find."""
QUEUES_MAX: Final = 1_024
"""Queues of groups: 5 MiB."""


class Truth(NamedTuple):
    """What was found stays true while all this is the same."""

    incarnation: int
    epoch: int
    quarantine: Any


@dataclass(slots=True)
class _Found:
    truth: Truth
    result: ReadResult
    region_ends: list[int]
    starts: list[int]
    ends: list[int]
    is_wanted: bool = True


class PopAhead:
    """See the module's docstring."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._found: dict[QueueOfGroup, _Found] = {}

    def truth(self, incarnation: int) -> Truth:
        """To be taken before the store is asked what `note` is given."""
        return Truth(incarnation, self._store.epoch, self._store.damaged_ranges)

    def note(self, key: QueueOfGroup, truth: Truth, result: ReadResult) -> None:
        """Keeps what a look found, if it is messages without gaps."""
        if result.status is ReadStatus.FOUND and result.queue_offsets is None:
            if key not in self._found and len(self._found) >= QUEUES_MAX:
                self._found.clear()
            region_ends = list(accumulate(region.size_bytes for region in result.regions))
            ends = (result.starts + result.sizes).tolist()
            self._found[key] = _Found(truth, result, region_ends, result.starts.tolist(), ends)

    def take(
        self, key: QueueOfGroup, truth: Truth, next_offset: int, record_count: int, size_max_bytes: int
    ) -> ReadResult | None:
        """What a look at `next_offset` would find, as the store would give it; None if the store has to be asked: it may have more."""
        found = self._found.get(key)
        if found is None:
            return None
        result, known = found.result, found.truth
        is_true = (
            known.incarnation == truth.incarnation
            and known.epoch == truth.epoch
            and known.quarantine is truth.quarantine
            and result.regions[0].file.base_position >= self._store.min_position
        )
        at = next_offset - result.first_offset
        if not is_true or not 0 <= at < len(found.ends):
            del self._found[key]
            return None
        found.is_wanted = True
        return _part_of(found, at, record_count, size_max_bytes)

    def forget_unwanted(self) -> None:
        """Forgets what nobody wanted since the last call."""
        self._found = {key: found for key, found in self._found.items() if found.is_wanted}
        for found in self._found.values():
            found.is_wanted = False


def _part_of(found: _Found, at: int, record_count: int, size_max_bytes: int) -> ReadResult | None:
    """The records from index `at` on, at least one; None if the limits allow more than there are."""
    result, region_ends, ends = found.result, found.region_ends, found.ends
    begin, stop = found.starts[at], at + record_count
    if ends[min(stop, len(ends)) - 1] - begin > size_max_bytes:
        stop = max(at + 1, bisect_right(ends, begin + size_max_bytes, at, min(stop, len(ends))))
    elif stop > len(ends):
        return None
    starts, sizes = result.starts[at:stop], result.sizes[at:stop]
    if begin:
        starts = starts - np.uint32(begin)
    size_bytes = ends[stop - 1] - begin
    end, first_offset = begin + size_bytes, result.first_offset + at
    regions: list[LogRegion] = []
    index = bisect_right(region_ends, begin)
    place = begin
    while place < end:
        region, region_end = result.regions[index], region_ends[index]
        behind = min(end, region_end)
        offset = region.offset + place - (region_end - region.size_bytes)
        regions.append(LogRegion(region.file, offset, behind - place))
        place, index = behind, index + 1
    return ReadResult(
        ReadStatus.FOUND,
        result.first_offset + stop,
        result.min_offset,
        result.end_offset,
        first_offset,
        starts,
        sizes,
        None,
        regions,
        size_bytes,
    )
