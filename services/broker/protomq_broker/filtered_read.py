"""A read of a queue through a filter, slice by slice: what a pull with a filter is answered.

    queue     a run of records | a run | a run ...           a run is what one look of the store gives: 1,024 records, 512 KiB
    slice     pieces of a run, for 1 ms                      a piece: as many records as the filter manages in 0.7 ms
    answer    the regions of the records that match, where they are neighbours put together

It ends when enough was found, at the end of the queue, or when it has examined its maximum: then the caller learns how far it got.
Between two slices the topic may go, segments may be deleted, the log may turn out to be damaged: each look is a new one. How far
it got before an error is answered; the next pull meets the error.

One lane's thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np

from protomq.wire.record import SEAL_SIZE_BYTES

from .filters.filter_book import Filter
from .store.queues.reading import LogRegion, ReadResult, ReadStatus

RUN_COUNT: Final = 1_024
RUN_COUNT_OF_TAGS: Final = 256
"""Where tags choose them they are scattered: each is read by itself."""
RUN_SIZE_BYTES: Final = 512 << 10
PIECE_S: Final = 0.000_7
PIECE_COUNT_MIN: Final = 4
PIECE_COUNT_FIRST: Final = 256
SCAN_COUNT_MAX: Final = 262_144
"""Records that one pull looks at."""
SCAN_SIZE_MAX_BYTES: Final = 64 << 20
"""The same in bytes: some 0.1 s of work. Then the caller is told how far it got, with what was found."""


class Look(Protocol):
    """Reads a run of a queue: up to a number of records and bytes, from an offset on."""

    def __call__(self, queue_offset: int, count_max: int, size_max_bytes: int) -> ReadResult: ...


class _Run(NamedTuple):
    """Records that were read, and not all of which were looked at yet."""

    result: ReadResult
    data: bytes
    starts: Sequence[int]
    sizes: Sequence[int]
    offsets: Sequence[int]
    region_ends: Sequence[int]


@dataclass
class FilteredRead:
    """`advance` until it answers.

    `look` and `read_bytes` may raise anything; so does `advance` then, unless it got somewhere before. `now`: seconds, monotonic;
    `cpu_now`: those that this thread has computed, so that a busy machine does not pass for a slow filter.
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
        self.restart()

    def restart(self) -> None:
        """Forgets what was found, and begins again."""
        self.queue_offset = self._begin_offset
        self._sizes: list[int] = []
        self._starts: list[int] = []
        self._offsets: list[int] = []
        self._regions: list[LogRegion] = []
        self._size_bytes = 0
        self._run: _Run | None = None
        self._at = 0
        self._scanned_count = 0
        self._scanned_size_bytes = 0
        self._piece_count = min(PIECE_COUNT_FIRST, self.filter.records_max)
        self._range = (0, 0)
        self.slice_count = 0
        """How often `advance` was called: between two calls the log may have changed."""

    def advance(self, slice_s: float) -> ReadResult | None:
        """Continues for a time; returns the answer, or None if it takes longer."""
        self.slice_count += 1
        began = self.now()
        while True:
            run = self._run
            if run is None:
                try:
                    ended = self._next_run()
                except Exception:
                    if self._scanned_count:
                        return self.so_far()
                    raise
                if ended is not None:
                    return ended
            elif self._look_at_piece(run):
                return self.so_far()
            if self.now() - began >= slice_s:
                return None

    def so_far(self) -> ReadResult:
        """The answer as far as it goes."""
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
        """Reads the next run, or says what the answer is."""
        if (
            self._scanned_count >= SCAN_COUNT_MAX
            or self._scanned_size_bytes >= SCAN_SIZE_MAX_BYTES
        ):
            return self.so_far()
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
        starts = result.starts.tolist()
        first = result.first_offset
        self._run = _Run(
            result,
            self.read_bytes(result.regions),
            starts,
            result.sizes.tolist(),
            range(first, first + len(starts))
            if result.queue_offsets is None
            else result.queue_offsets.tolist(),
            np.cumsum([region.size_bytes for region in result.regions]).tolist(),
        )
        self._at = 0
        return None

    def _passed(self, result: ReadResult) -> bool:
        """What was read has been looked at; False at the end of the queue."""
        self._scanned_count += result.next_offset - self.queue_offset
        self._scanned_size_bytes += result.regions_size_bytes
        moved = result.next_offset > self.queue_offset
        self.queue_offset = result.next_offset
        return moved and result.next_offset < result.end_offset

    def _look_at_piece(self, run: _Run) -> bool:
        """Asks the filter about some records of the run. Whether the answer is complete."""
        begin, end = self._at, min(self._at + self._piece_count, len(run.starts))
        began = self.cpu_now()
        found = self.filter.matching(run.data, run.starts[begin:end], run.sizes[begin:end])
        taken_s = self.cpu_now() - began
        if taken_s > PIECE_S:
            self._piece_count = max(self._piece_count // 2, min(PIECE_COUNT_MIN, self._piece_count))
        elif taken_s < PIECE_S / 2:
            self._piece_count = min(self._piece_count * 2, self.filter.records_max)
        for index in found:
            if not self._take(run, begin + index):
                self.queue_offset = run.offsets[begin + index]
                return True
            if len(self._sizes) == self.record_count_max:
                self.queue_offset = run.offsets[begin + index] + 1
                return True
        self._at = end
        if end < len(run.starts):
            return False
        self._run = None
        return not self._passed(run.result)

    def _take(self, run: _Run, index: int) -> bool:
        """Puts a record into the answer; False if it does not fit."""
        start, size = run.starts[index], run.sizes[index]
        region_index = int(np.searchsorted(run.region_ends, start, "right"))
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
