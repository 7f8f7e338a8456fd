"""What producers have sent: their runs of sequences, and when those are forgotten (why, `repeated_sends.py` says, which asks here).

The columns stand in `producer_table.py`, the arithmetic of older runs in `producer_runs.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protomq_broker.store.log.append import AppendRequest

from .producer_runs import Run, forget_oldest_runs, insert_run, overlapping_run, pack_run
from .producer_table import NEVER_MS, ProducerTable
from .send_errors import RETRY_MAX_MS

PRODUCERS_MAX: Final = 1_000_000
"""170 MiB."""
RUNS_PER_PRODUCER_MAX: Final = 262_144
"""A producer that sends 65,000 single messages a second, round robin, makes a run of each. That lasts 4 s, longer than a send with
all its retries (3 s). 8 MB."""
RUNS_MAX: Final = 1 << 20
"""32 MB for all producers together, and 190 bytes for each that has any."""
IDLE_MAX_MS: Final = 24 * 3_600_000
IDLE_STEP_MS: Final = 3_600_000
"""At each full hour of the log's time the table forgets producers that have sent nothing for a day. That is one look at the
times."""
SWEEP_STEP_MS: Final = 1_000
"""Interval, in the log's time, at which a full table is searched for room: a search of a million producers takes 3 ms."""

GONE: Final = ""
"""Topic of records that belong to nobody any more."""
SEQUENCE_END_MAX: Final = 1 << 63
"""One past the highest sequence of a producer, since columns are signed. A send beyond it is refused: no repeat of it would be known."""

EndOffsetOf = Callable[[str, int], int]


class SentRuns:
    """See the module's docstring. Not thread-safe: the owner has a lock.

    Attributes:
        table: the columns.
        queue_names: the queues by their numbers; None for one that is gone.
        is_partial: it is made from a log whose beginning is deleted: what a producer sent before its first record is not known.
    """

    __slots__ = (
        "_next_look_ms", "_producers_max", "_queue_numbers", "_runs_max", "_runs_per_producer_max", "is_partial", "queue_names", "table",
    )  # fmt: skip

    def __init__(self, producers_max: int, runs_per_producer_max: int, runs_max: int) -> None:
        self.table = ProducerTable()
        self.queue_names: list[tuple[str, int] | None] = []
        self.is_partial = False
        self._queue_numbers: dict[tuple[str, int], int] = {}
        self._next_look_ms = NEVER_MS  # for those that have rested for a day
        self._producers_max = producers_max
        self._runs_per_producer_max = runs_per_producer_max
        self._runs_max = runs_max

    def remove_topic(self, topic: str) -> None:
        """The queues of the topic are gone."""
        for key, number in list(self._queue_numbers.items()):
            if key[0] == topic:
                del self._queue_numbers[key]
                self.queue_names[number] = None

    def number_of(self, topic: str, queue_id: int) -> int:
        """The number of a queue, a new one if it has none; of the topic GONE: of one that is gone."""
        number = self._queue_numbers.get((topic, queue_id))
        return self.add_queue(topic, queue_id) if number is None else number

    def add_queue(self, topic: str, queue_id: int) -> int:
        """The next number, for a queue that has none."""
        key, number = (topic, queue_id), len(self.queue_names)
        self._queue_numbers[key] = number
        self.queue_names.append(None if topic == GONE else key)
        return number

    def floor(self, row: int) -> int:
        """Below it, what is not known may be stored all the same."""
        table = self.table
        if table.older_counts[row] and not table.has_older(row):
            return table.firsts[row]
        return table.floors[row]

    def overlapping(self, row: int, first: int, end: int) -> Run | None:
        """The first run of a producer that shares sequences with [first, end)."""
        table = self.table
        if table.has_older(row):
            run = overlapping_run(table.older[row], first, end)
            if run is not None:
                return run
        if table.firsts[row] < end and first < table.ends[row]:
            return table.firsts[row], table.ends[row], table.queues[row], table.queue_offsets[row]
        return None

    def enter(
        self,
        producer_id: int,
        epoch: int,
        first: int,
        end: int,
        queue_key: tuple[str, int],
        queue_offset: int,
        time_ms: int,
        last_time_ms: int,
    ) -> None:
        """Enters a run whose first record was stored at `time_ms` and its last at `last_time_ms`."""
        if end > SEQUENCE_END_MAX:
            return  # in a log of an earlier version: sends took them
        if time_ms >= self._next_look_ms:
            self._forget_idle(time_ms)
        queue = self._queue_numbers.get(queue_key)
        if queue is None:
            queue = self.number_of(*queue_key)
        table = self.table
        row = table.shards[producer_id & 255].get(producer_id, -1)  # as `table.find` does
        if row < 0 or (used_ms := table.used_ms[row]) <= table.forgotten_ms:
            if table.count >= self._producers_max:
                self._make_room(time_ms)
            row = table.add(producer_id, epoch, last_time_ms)
            if self.is_partial:
                table.floors[row] = first
        else:
            if table.is_frozen:
                table.keep(row)
            known_epoch = table.epochs[row]
            if epoch != known_epoch:
                if epoch < known_epoch:
                    return
                table.reset(row, epoch)
            elif used_ms <= table.runs_forgotten_ms and table.older_counts[row]:
                table.floors[row] = table.firsts[row]
                table.drop_older(row)
            table.used_ms[row] = last_time_ms
        firsts, ends = table.firsts, table.ends
        last_first, last_end = firsts[row], ends[row]
        if first < last_end:
            # One that overlaps the last run is left out: `admit` lets no such send through.
            added = end <= last_first and insert_run(
                table.older_of(row), first, end, queue, queue_offset
            )
        elif last_end > last_first:
            queues, queue_offsets = table.queues, table.queue_offsets
            last_queue, last_offset = queues[row], queue_offsets[row]
            ends[row] = end
            added = (
                first != last_end
                or queue != last_queue
                or queue_offset - last_offset != first - last_first
            )
            if added:
                table.older_of(row).extend((last_first, last_end, last_queue, last_offset))
                firsts[row], queues[row], queue_offsets[row] = first, queue, queue_offset
        else:
            added = False
            firsts[row], ends[row] = first, end
            table.queues[row], table.queue_offsets[row] = queue, queue_offset
        if added:
            older_count = table.older_counts[row] + 1
            table.older_counts[row] = older_count
            table.older_count += 1
            if table.older_count > self._runs_max or older_count > self._runs_per_producer_max:
                self._bound_runs(row, time_ms)
        if last_time_ms > time_ms and last_time_ms >= self._next_look_ms:
            self._forget_idle(last_time_ms)

    def enter_plain(self, requests: Sequence[AppendRequest]) -> int:
        """Enters plain messages that were appended now, up to the first request that is none; how many those are.

        As `enter` for each, but without a call where it goes the usual way: this runs once for each small send.
        """
        table = self.table
        shards, used_ms, epochs, firsts, ends, queues, queue_offsets, older_counts = (
            table.shards, table.used_ms, table.epochs, table.firsts, table.ends, table.queues, table.queue_offsets, table.older_counts,
        )  # fmt: skip
        number_of, older = self._queue_numbers.get, table.older
        known_from_ms, known_to_ms = self._usual_times()
        for index, request in enumerate(requests):
            region = request.region
            id_ = region.producer_id
            if not id_:
                continue
            if region.flags:
                return index
            epoch, first, time_ms = region.producer_epoch, region.first_sequence, request.store_time_ms
            key, offset = (region.topic, request.queue_id), request.queue_offset
            end = first + region.count
            row = shards[id_ & 255].get(id_, -1)
            queue = number_of(key)
            if (
                row < 0
                or queue is None
                or epochs[row] != epoch
                or not (last_first := firsts[row]) < (last_end := ends[row]) <= first
                or used_ms[row] < known_from_ms
                or time_ms >= known_to_ms
                or end > SEQUENCE_END_MAX
            ):
                self.enter(id_, epoch, first, end, key, offset, time_ms, time_ms)
                known_from_ms, known_to_ms = self._usual_times()
                continue
            used_ms[row] = time_ms
            ends[row] = end
            last_queue, last_offset = queues[row], queue_offsets[row]
            if (
                queue == last_queue
                and first == last_end
                and offset - last_offset == first - last_first
            ):
                continue
            runs = older.get(row)
            if runs is None:
                runs = table.older_of(row)
            runs.frombytes(pack_run(last_first, last_end, last_queue, last_offset))
            firsts[row], queues[row], queue_offsets[row] = first, queue, offset
            older_counts[row] = older_count = older_counts[row] + 1
            table.older_count += 1
            if older_count > self._runs_per_producer_max or table.older_count > self._runs_max:
                self._bound_runs(row, time_ms)
                known_from_ms, known_to_ms = self._usual_times()
        return len(requests)

    def _usual_times(self) -> tuple[int, int]:
        """[since when a producer must have sent for nothing of it to be forgotten, up to when none has to be looked for]."""
        table = self.table
        known_from_ms = max(table.forgotten_ms, table.runs_forgotten_ms) + 1
        return known_from_ms, NEVER_MS if table.is_frozen else self._next_look_ms

    def _bound_runs(self, row: int, time_ms: int) -> None:
        """Keeps the numbers of older runs within their limits; `row` has just got one more."""
        table = self.table
        if table.older_counts[row] > self._runs_per_producer_max:
            self._forget_oldest_runs(row)
        if table.older_count > self._runs_max:
            limit = time_ms - RETRY_MAX_MS
            if limit >= table.runs_forgotten_ms + SWEEP_STEP_MS:
                table.forget_runs_until(limit)
            while table.older_count > self._runs_max and table.older_counts[row]:
                self._forget_oldest_runs(row)

    def _forget_oldest_runs(self, row: int) -> None:
        table = self.table
        count, table.floors[row] = forget_oldest_runs(table.older[row])
        table.older_counts[row] -= count
        table.older_count -= count
        if not table.older_counts[row]:
            del table.older[row]

    def _forget_idle(self, time_ms: int) -> None:
        hour_ms = time_ms - time_ms % IDLE_STEP_MS
        self.table.forget_until(hour_ms - IDLE_MAX_MS)
        self._next_look_ms = hour_ms + IDLE_STEP_MS

    def _make_room(self, time_ms: int) -> None:
        limit = time_ms - RETRY_MAX_MS
        if limit >= self.table.forgotten_ms + SWEEP_STEP_MS:
            self.table.forget_until(limit)

    def ends(self, end_offset_of: EndOffsetOf, end_position: int) -> NDArray[np.int64]:
        """End of each queue by its number, of a log that ends at `end_position`; those that are gone have none."""
        gone = np.iinfo(np.int64).max
        ends = [
            gone if name is None else end_offset_of(*name) if name[1] >= 0 else end_position
            for name in self.queue_names
        ]
        return np.array(ends, np.int64)
