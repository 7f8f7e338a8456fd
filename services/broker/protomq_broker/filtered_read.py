"""Reads a queue through a filter, slice by slice, to answer a pull with a filter.

    queue     a run of records | a run | a run ...           a run is what one look of the store gives: 2,048 records, 1 MiB
    slice     pieces of a run, for 1 ms                      a piece: records for 0.7 ms, or the fewest that pay
    answer    the regions of the records that match, where they are neighbours put together

The read ends when it has found enough, at the end of the queue, after a second, or when it has examined its maximum. The caller learns
how far it got.
Between two slices somebody may delete the topic or segments, or find damage, so each look reads again. If an error comes after some
progress, the pull answers the progress, and the next pull gets the error.

One lane's thread at a time.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple, Protocol

import numpy as np

from protomq.wire.record import SEAL_SIZE_BYTES

from .filters.errors import FilterFailedError
from .filters.filter_book import Filter
from .store.queues.reading import LogRegion, ReadResult, ReadStatus

RUN_COUNT: Final = 2_048
RUN_COUNT_OF_TAGS: Final = 256
"""Records of a run that tags select. Such records are scattered, so each one needs its own read."""
RUN_SIZE_BYTES: Final = 1 << 20
PIECE_S: Final = 0.000_7
PIECE_WORST_S: Final = 2 * PIECE_S
PIECE_PAYS: Final = 0.7
"""A piece of half as many records has to take less than this part of the time."""
TAKEN_COUNT: Final = 256
"""Matches that are put into the answer at once."""
SCAN_S: Final = 1.0
"""After this an answer says how far the read got. Else on a busy machine a caller could give up and ask again from the same offset for
ever."""
SCAN_COUNT_MAX: Final = 262_144
"""Most records that one pull examines."""
SCAN_SIZE_MAX_BYTES: Final = 64 << 20
"""Most bytes that one pull examines: some 0.1 s of work. Then the answer says how far it got, with the matches so far."""


class Look(Protocol):
    """Reads a run of a queue: up to a number of records and bytes, from an offset on."""

    def __call__(self, queue_offset: int, count_max: int, size_max_bytes: int) -> ReadResult: ...


class _Run(NamedTuple):
    """Records that were read but not all examined yet."""

    result: ReadResult
    data: bytes
    offsets: Sequence[int]
    region_ends: Sequence[int]


class PieceSize:
    """How many records a filter is asked about at once, by what the pieces before took.

    A filter has a cost for each piece, and one for each record. If a smaller piece takes hardly less time, most of the time is a fixed
    cost. Then the size goes back, and stays unless a piece takes PIECE_WORST_S. A busy machine makes that cost several times as large.

    The first piece has the fewest records that pay, since the cost of a record is not known yet. A piece that takes PIECE_WORST_S says that
    these records cost more than most: then no number is too small.

    Attributes: count: of the next piece.
    """

    def __init__(self, records_min: int, records_max: int) -> None:
        self._records_min = min(records_min, records_max)
        self._records_max = records_max
        self.count = self._records_min
        self._halved: tuple[int, float] | None = None
        """Count and time of the piece before, if it took too long."""
        self._count_kept = 0
        """A smaller count does not pay."""

    def stopped_at(self, count: int) -> None:
        """Learns that the filter examined only so many records of a piece."""
        self._halved, self._count_kept, self.count = None, 0, count

    def note(self, taken_s: float) -> None:
        """Learns what a piece of `count` took."""
        halved, self._halved = self._halved, None
        if halved is not None and taken_s > halved[1] * PIECE_PAYS and halved[1] < PIECE_WORST_S:
            self.count = self._count_kept = halved[0]
        elif taken_s > (PIECE_WORST_S if self.count <= self._count_kept else PIECE_S):
            self._halved, self._count_kept = (self.count, taken_s), 0
            smallest = 1 if taken_s > PIECE_WORST_S else min(self._records_min, self.count)
            self.count = max(self.count // 2, smallest)
        elif taken_s < PIECE_S / 2:
            self.count = min(self.count * 2, self._records_max)


@dataclass
class FilteredRead:
    """Call `advance` until it returns an answer.

    `look`, `read_bytes` and the filter may raise any error. `advance` passes it on, unless the read has examined records already. `now`:
    monotonic seconds. `cpu_now`: CPU seconds of this thread, so that a busy machine does not make a filter look slow.

    Attributes: failed_offset: of the message at which the filter has failed; -1: it has not.
    """

    look: Look
    read_bytes: Callable[[Sequence[LogRegion]], bytes]
    filter: Filter
    queue_offset: int
    record_count_max: int
    size_max_bytes: int
    now: Callable[[], float]
    cpu_now: Callable[[], float]

    def __post_init__(self) -> None:
        self._begin_offset = self.queue_offset
        self.failed_offset = -1
        self.restart()

    def restart(self) -> None:
        """Discards the matches so far, and begins again at the first offset."""
        self.queue_offset = self._begin_offset
        # Arrays, since an answer has up to 32,768 messages: three lists of that length would take 2 ms to convert.
        self._sizes = array("I")
        self._starts = array("I")
        self._offsets = array("Q")
        self._regions: list[LogRegion] = []
        self._size_bytes = 0
        self._run: _Run | None = None
        self._matches: Sequence[int] = ()
        """Of the pieces up to `_at`: indexes in the run, which are not in the answer yet."""
        self._at = 0
        self._run_offset = self.queue_offset
        self._scanned_count = 0
        self._scanned_size_bytes = 0
        self._piece = PieceSize(self.filter.records_min, self.filter.records_max)
        self._ends_s: float | None = None
        self._range = (0, 0)
        self.slice_count = 0
        """Number of calls of `advance`. The log may have changed between two calls."""

    def advance(self, slice_s: float) -> ReadResult | None:
        """Goes on for `slice_s` seconds. Returns the answer, or None if the read needs more time."""
        self.slice_count += 1
        began = self.now()
        if self._ends_s is None:
            self._ends_s = began + SCAN_S
        while True:
            run = self._run
            if run is None:
                if self._scanned_count and self.now() >= self._ends_s:
                    return self.so_far()
                try:
                    ended = self._next_run()
                except Exception:
                    if self._scanned_count:
                        return self.so_far()
                    raise
                if ended is not None:
                    return ended
            else:
                try:
                    is_complete = self._look_at_piece(run)
                except Exception:
                    if self._scanned_count:
                        return self.so_far()
                    raise
                if is_complete:
                    return self.so_far()
            if self.now() - began >= slice_s:
                return None

    def so_far(self) -> ReadResult:
        """Returns the answer with what was found until now."""
        min_offset, end_offset = self._range
        if not self._sizes:
            return ReadResult(
                ReadStatus.NO_MATCHED_MSG, self.queue_offset, min_offset, end_offset
            )
        offsets = self._offsets
        dense = offsets[-1] - offsets[0] == len(offsets) - 1
        return ReadResult(
            ReadStatus.FOUND,
            self.queue_offset,
            min_offset,
            end_offset,
            offsets[0],
            np.array(self._starts, np.uint32),
            np.array(self._sizes, np.uint32),
            None if dense else np.array(offsets, np.uint64),
            self._regions,
            self._size_bytes,
        )

    def _next_run(self) -> ReadResult | None:
        """Reads the next run, or returns the answer if the read is over."""
        if (
            self._scanned_count >= SCAN_COUNT_MAX
            or self._scanned_size_bytes >= SCAN_SIZE_MAX_BYTES
        ):
            return self.so_far()
        self._run_offset = self.queue_offset
        count = RUN_COUNT_OF_TAGS if self.filter.tags else RUN_COUNT
        result = self.look(self.queue_offset, count, RUN_SIZE_BYTES)
        if result.status is ReadStatus.OFFSET_ILLEGAL or (
            result.status is ReadStatus.NO_NEW_MSG and not self._scanned_count
        ):
            return self.so_far() if self._sizes else result
        self._range = result.min_offset, result.end_offset
        if result.status is ReadStatus.NO_NEW_MSG:
            return self.so_far()
        if result.status is ReadStatus.NO_MATCHED_MSG:
            return None if self._passed(result) else self.so_far()
        first = result.first_offset
        self._run = _Run(
            result,
            self.read_bytes(result.regions),
            range(first, first + result.record_count)
            if result.queue_offsets is None
            else result.queue_offsets.tolist(),
            list(accumulate(region.size_bytes for region in result.regions)),
        )
        self._at = 0
        return None

    def _passed(self, result: ReadResult) -> bool:
        """Counts a run as examined. Returns False at the end of the queue."""
        self._scanned_size_bytes += result.regions_size_bytes
        moved = result.next_offset > self._run_offset
        self._move_to(result.next_offset)
        return moved and result.next_offset < result.end_offset

    def _move_to(self, queue_offset: int) -> None:
        """Counts what stands before the offset as examined."""
        self._scanned_count += queue_offset - self.queue_offset
        self.queue_offset = queue_offset

    def _look_at_piece(self, run: _Run) -> bool:
        """Asks the filter about some records of the run, and puts some of its matches into the answer. Returns whether that is complete."""
        if not self._matches:
            self._ask(run)
        for index in self._matches[:TAKEN_COUNT]:
            if not self._take(run, index):
                self.queue_offset = run.offsets[index]
                return True
            if len(self._sizes) == self.record_count_max:
                self.queue_offset = run.offsets[index] + 1
                return True
        self._matches = self._matches[TAKEN_COUNT:]
        if self._matches:
            self._move_to(run.offsets[self._matches[0]])
            return False
        if self._at < len(run.offsets):
            self._move_to(run.offsets[self._at])
            return False
        self._run = None
        return not self._passed(run.result)

    def _ask(self, run: _Run) -> None:
        starts, sizes = run.result.starts, run.result.sizes
        begin, end = self._at, min(self._at + self._piece.count, len(starts))
        began = self.cpu_now()
        try:
            found, count = self.filter.matching(run.data, starts[begin:end], sizes[begin:end])
        except FilterFailedError:
            self.failed_offset = run.offsets[begin]
            raise
        if begin + count < end:
            self._piece.stopped_at(count)
        else:
            self._piece.note(self.cpu_now() - began)
        self._at = begin + count
        self._matches = [begin + index for index in found]

    def _take(self, run: _Run, index: int) -> bool:
        """Puts a record into the answer. Returns False if it does not fit."""
        start, size = int(run.result.starts[index]), int(run.result.sizes[index])
        region_index = bisect_right(run.region_ends, start)
        region = run.result.regions[region_index]
        offset = region.offset + start - (run.region_ends[region_index] - region.size_bytes)
        gap = -1
        if self._regions:
            last = self._regions[-1]
            if last.file is region.file:
                gap = offset - last.offset - last.size_bytes
        is_joined = gap in (0, SEAL_SIZE_BYTES)
        added = size + gap if is_joined else size
        if self._sizes and self._size_bytes + added > self.size_max_bytes:
            return False
        self._size_bytes += added
        if is_joined:
            last = self._regions[-1]
            self._regions[-1] = LogRegion(last.file, last.offset, last.size_bytes + added)
        else:
            self._regions.append(LogRegion(region.file, offset, size))
        self._starts.append(self._size_bytes - size)
        self._sizes.append(size)
        self._offsets.append(run.offsets[index])
        return True
