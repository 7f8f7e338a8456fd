"""Recognises a send that is stored already: a producer that got no answer sends the same sequences again.

For each producer the table knows its epoch and the runs of sequences that are stored, each with the place of its first record. What goes
on in sequence, queue and offset makes its run longer, so a producer that stays in one queue has one run.

    repeatedsends/table.bin   state file (`side_files.py`): position u64, producers u32, queues u32, older runs u64, names (u32 size, UTF-8,
                              lines "topic/queue"), producers (id u64, epoch u32, floor u64, last run, number of older runs u32), older
                              runs of all producers; a run: first u64, end u64, queue u32, queue offset u64

Rules:
- Sequences may come in any order. Below the producer's floor old runs were forgotten: an unknown sequence there may be stored or not,
  and is refused. A producer that was forgotten as a whole begins anew.
- `admit` asks and claims on the writer thread, `apply` enters what was appended. So two attempts of one send in one group are noticed.
- Whatever is derived from a part of the log that did not survive must go: a run beyond its queue's end is cut (`load`, `truncate`). Else
  a message that was lost would be answered as stored.
- The lock keeps the snapshot on the flusher thread and the writer apart, for a few hundred producers at a time.
"""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .append import AppendRequest, ScannedRecords
from .disk import Disk, remove_file
from .errors import StoreError
from .producer_runs import NO_RUNS, RUN, RUN_FIELDS, ProducerRuns, clipped, clipped_ends
from .record_runs import run_continues
from .side_files import read_state_file, write_state_file

PRODUCERS_MAX: Final = 100_000
RUNS_PER_PRODUCER_MAX: Final = 262_144
"""A producer that sends 65,000 single messages a second, round robin, makes a run of each: 4 s, longer than a send takes with all its
retries (3 s). 7 MB."""
RUNS_MAX: Final = 1 << 20
"""29 MB for all producers together."""
IDLE_MAX_MS: Final = 24 * 3_600_000

_SEQUENCE_END_MAX: Final = 1 << 63
_MAGIC: Final = b"PMQRPS01"
_HEAD: Final = struct.Struct("<QIIQI")
_FILE_NAME: Final = "table.bin"
_PRODUCER: Final = np.dtype(
    [("id", "<u8"), ("epoch", "<u4"), ("floor", "<u8"), *RUN_FIELDS, ("older", "<u4")]
)
_SNAPSHOT_STEP: Final = 256

EndOffsetOf = Callable[[str, int], int]


class ProducerFencedError(StoreError):
    """A producer with the same id and a higher epoch has written."""


class SequenceExpiredError(StoreError):
    """It cannot be told any more whether this send is stored."""


class SendInFlightError(SequenceExpiredError):
    """The same send is part of the group that is not appended yet: ask again after the append."""


class RepeatedSend(NamedTuple):
    """Where a send was stored the first time: its first record."""

    topic: str
    queue_id: int
    queue_offset: int


class RepeatedSends:
    """The table of a store.

    Attributes:
        replay_from: after `load`: what the log has below this position is in the table already.
        needs_rebuild: always False: a damaged table is empty after `load`.
    """

    def __init__(
        self,
        disk: Disk,
        folder: str,
        *,
        end_offset_of: EndOffsetOf,
        producers_max: int = PRODUCERS_MAX,
        runs_per_producer_max: int = RUNS_PER_PRODUCER_MAX,
        runs_max: int = RUNS_MAX,
    ) -> None:
        """`end_offset_of` tells the end of a queue; it follows the log first, this table second."""
        assert runs_per_producer_max > 1
        self.replay_from = 0
        self.needs_rebuild = False
        self._disk = disk
        self._folder = folder
        self._end_offset_of = end_offset_of
        self._producers_max = producers_max
        self._runs_per_producer_max = runs_per_producer_max
        self._runs_max = runs_max
        self._lock = threading.Lock()
        self._now_ms = 0
        self._clear()

    def _clear(self) -> None:
        self._producers: OrderedDict[int, ProducerRuns] = (
            OrderedDict()
        )  # the one used last stands last
        self._claims: dict[int, tuple[int, int, list[tuple[int, int]]]] = {}
        self._queue_numbers: dict[tuple[str, int], int] = {}
        self._queue_names: list[tuple[str, int] | None] = []
        self._older_run_count = 0
        self._covered_position = 0
        self._checkpoint_position = 0

    # Writer thread.

    def admit(
        self, producer_id: int, producer_epoch: int, first_sequence: int, count: int, *, topic: str
    ) -> RepeatedSend | None:
        """Where this send is stored already; None if it is new: then it is to be part of the next `apply`, or of `drop_claims`.

        Raises ProducerFencedError, SequenceExpiredError, SendInFlightError.
        """
        if producer_id == 0:
            return None
        end = first_sequence + count
        producer = self._producers.get(producer_id)
        if producer is not None:
            if producer_epoch < producer.epoch:
                raise _fenced(producer_id, producer_epoch, producer.epoch)
            if producer_epoch == producer.epoch and first_sequence < producer.end:
                found = self._look_up(producer, first_sequence, end, topic)
                if found is not None:
                    return found
        claim = self._claims.get(producer_id)
        if claim is None:
            self._claims[producer_id] = (producer_epoch, end, [(first_sequence, end)])
            return None
        epoch, claimed_end, ranges = claim
        if producer_epoch < epoch:
            raise _fenced(producer_id, producer_epoch, epoch)
        if producer_epoch > epoch:
            ranges = []
        elif first_sequence < claimed_end:
            for first, stop in ranges:
                if first < end and first_sequence < stop:
                    raise SendInFlightError(
                        f"sequences {first_sequence} to {end - 1}: another attempt of this send is being stored, try again"
                    )
            end = claimed_end
        ranges.append((first_sequence, first_sequence + count))
        self._claims[producer_id] = (producer_epoch, end, ranges)
        return None

    def apply(self, requests: Sequence[AppendRequest]) -> None:
        """Enters what was just appended to the log."""
        with self._lock:
            for request in requests:
                region = request.region
                if region.producer_id:
                    self._enter(
                        region.producer_id,
                        region.producer_epoch,
                        region.first_sequence,
                        region.first_sequence + region.count,
                        (region.topic, request.queue_id),
                        request.queue_offset,
                    )
            if requests:
                last = requests[-1]
                self._covered_position = last.physical_offset + len(last.region.data)
        self._claims.clear()

    def drop_claims(self) -> None:
        """The group that was admitted is not in the log."""
        self._claims.clear()

    # Any thread.

    def remove_topic(self, topic: str) -> None:
        """The topic is gone: what was stored in it is neither known nor new."""
        with self._lock:
            for key, number in list(self._queue_numbers.items()):
                if key[0] == topic:
                    del self._queue_numbers[key]
                    self._queue_names[number] = None

    def expire(self, now_ms: int) -> None:
        """Forgets producers that have sent nothing for a day; to be called every minute or so with a clock that does not jump."""
        with self._lock:
            self._now_ms = now_ms
            while self._producers:
                producer = next(iter(self._producers.values()))
                if producer.used_ms > now_ms - IDLE_MAX_MS:
                    return
                self._forget_least_used()

    def producer_count(self) -> int:
        """Number of producers known."""
        return len(self._producers)

    # Flusher thread.

    def flush(self) -> None:
        """Nothing to do between checkpoints: the log has all of it."""

    def checkpoint(self, position: int) -> None:
        """Makes durable that everything that the log holds below `position` is in the table."""
        with self._lock:
            ids = list(self._producers)
        rows: list[tuple[int, ...]] = []
        older: list[NDArray[Any]] = []
        for start in range(0, len(ids), _SNAPSHOT_STEP):
            with self._lock:
                for producer_id in ids[start : start + _SNAPSHOT_STEP]:
                    p = self._producers.get(producer_id)
                    if p is None:
                        continue
                    rows.append(
                        (
                            producer_id,
                            p.epoch,
                            p.floor,
                            p.first,
                            p.end,
                            p.queue,
                            p.queue_offset,
                            len(p.firsts),
                        )
                    )
                    if p.firsts:
                        older.append(p.older_runs())
        with self._lock:  # the writer waits for it: no more than a copy
            queue_names = list(self._queue_names)
        names = "\n".join(
            "" if name is None else f"{name[0]}/{name[1]}" for name in queue_names
        ).encode()
        producers = np.array(rows, _PRODUCER)
        runs = np.concatenate(older) if older else NO_RUNS
        head = _HEAD.pack(position, len(rows), len(queue_names), len(runs), len(names))
        self._disk.make_folder(self._folder)
        payload = b"".join((head, names, producers.tobytes(), runs.tobytes()))
        write_state_file(self._disk, self._path, _MAGIC, payload)
        self._checkpoint_position = position

    def delete_below(self, log_start: int) -> None:
        """Nothing to do: a send is recognised for as long as the table has room, whether or not its message is still there."""

    def close(self) -> None:
        """Nothing is open."""

    # Recovery: one thread, nobody else. The consume queues have been loaded before.

    def load(self, log_start: int = 0) -> None:
        """Takes over the snapshot, as far as the queues reach; nothing if it does not hold. `log_start` is not needed."""
        self._clear()
        payload = read_state_file(self._disk, self._path, _MAGIC)
        if payload is None:
            self.start_rebuild()
            return
        position, producer_count, queue_count, run_count, names_size = _HEAD.unpack_from(payload)
        at = _HEAD.size
        names = payload[at : at + names_size].decode().split("\n")[:queue_count]
        at += names_size
        producers = np.frombuffer(payload, _PRODUCER, producer_count, at)
        runs = np.frombuffer(payload, RUN, run_count, at + producers.nbytes)
        for name in names:
            topic, _, queue_id = name.partition("/")
            key = (topic, int(queue_id)) if topic else None
            if key is not None:
                self._queue_numbers[key] = len(self._queue_names)
            self._queue_names.append(key)
        ends = self._ends()
        last_ends = clipped_ends(producers, ends).tolist()
        start = 0
        for row, last_end in zip(producers.tolist(), last_ends, strict=True):
            producer_id, epoch, floor, first, _, queue, queue_offset, older = row
            producer = self._producers[producer_id] = ProducerRuns(epoch)
            producer.floor = floor
            producer.used_ms = self._now_ms
            if older:
                producer.set_older_runs(clipped(runs[start : start + older], ends))
                start += older
            producer.set_last_run(first, last_end, queue, queue_offset)
            self._older_run_count += len(producer.firsts)
        self.replay_from = self._covered_position = self._checkpoint_position = position

    def start_rebuild(self) -> None:
        """Forgets everything; a replay from the log's start brings it back."""
        self._clear()
        remove_file(self._disk, self._path)
        self.replay_from = 0

    def replay(self, records: ScannedRecords) -> None:
        """Enters records read back from the log, in its order; those that are there already are passed over."""
        if not records.count:
            return
        self._covered_position = max(
            self._covered_position, int(records.positions[-1] + records.sizes[-1])
        )
        starts = np.flatnonzero(~run_continues(records))
        lengths = np.diff(np.append(starts, records.count))
        columns = (
            records.producer_ids, records.producer_epochs, records.sequences, records.topic_indexes, records.queue_ids,
            records.queue_offsets,
        )  # fmt: skip
        rows = zip(*(column[starts].tolist() for column in columns), lengths.tolist(), strict=True)
        for producer_id, epoch, sequence, topic_index, queue_id, queue_offset, length in rows:
            if producer_id:
                queue_key = (records.topics[topic_index], queue_id)
                self._enter(
                    producer_id, epoch, sequence, sequence + length, queue_key, queue_offset
                )

    def truncate(self, end_position: int) -> None:
        """Forgets what lies beyond the end of its queue; the consume queues have been cut before. Nobody appends meanwhile."""
        if end_position >= self._covered_position:
            return
        self._claims.clear()
        with self._lock:
            ends = self._ends()
            self._older_run_count = 0
            for p in self._producers.values():
                last = np.array((p.first, p.end, p.queue, p.queue_offset), RUN)
                p.set_older_runs(clipped(p.older_runs(), ends))
                p.set_last_run(p.first, int(clipped_ends(last, ends)), p.queue, p.queue_offset)
                self._older_run_count += len(p.firsts)
        self._covered_position = end_position
        if end_position < self._checkpoint_position:
            self.checkpoint(end_position)

    # Parts.

    @property
    def _path(self) -> str:
        return f"{self._folder}/{_FILE_NAME}"

    def _look_up(
        self, producer: ProducerRuns, first: int, end: int, topic: str
    ) -> RepeatedSend | None:
        run = producer.overlapping(first, end)
        if run is None:
            if first < producer.floor:
                raise SequenceExpiredError(
                    f"sequences {first} to {end - 1}: too old to tell whether they are stored, all below {producer.floor} are forgotten"
                )
            return None
        run_first, run_end, queue, queue_offset = run
        if not (run_first <= first and end <= run_end):
            raise SequenceExpiredError(
                f"sequences {first} to {end - 1}: some of them are stored and some are not: repeat a send as it was, or take new sequences"
            )
        name = self._queue_names[queue]
        found_offset = queue_offset + first - run_first
        if name is None or found_offset >= self._end_offset_of(*name):
            raise SequenceExpiredError(
                f"sequences {first} to {end - 1}: they were stored in a topic that was deleted since"
            )
        if name[0] != topic:
            raise SequenceExpiredError(
                f"sequences {first} to {end - 1}: they were used for topic {name[0]}, take new ones"
            )
        return RepeatedSend(name[0], name[1], found_offset)

    def _enter(
        self,
        producer_id: int,
        epoch: int,
        first: int,
        end: int,
        queue_key: tuple[str, int],
        queue_offset: int,
    ) -> None:
        if end > _SEQUENCE_END_MAX:
            return  # no producer gets there by counting: such sends are not recognised
        queue = self._queue_numbers.get(queue_key)
        if queue is None:
            queue = self._queue_numbers[queue_key] = len(self._queue_names)
            self._queue_names.append(queue_key)
        producer = self._producers.get(producer_id)
        if producer is None:
            producer = self._producers[producer_id] = ProducerRuns(epoch)
            if len(self._producers) > self._producers_max:
                self._forget_least_used()
        else:
            self._producers.move_to_end(producer_id)
        if epoch != producer.epoch:
            if epoch < producer.epoch:
                return
            self._older_run_count -= len(producer.firsts)
            producer.epoch, producer.floor = epoch, 0
            producer.set_older_runs(NO_RUNS)
            producer.first = producer.end = 0
        producer.used_ms = self._now_ms
        if producer.insert(first, end, queue, queue_offset):
            self._older_run_count += 1
            if len(producer.firsts) > self._runs_per_producer_max:
                self._older_run_count -= producer.forget_oldest()
            while self._older_run_count > self._runs_max:
                if len(producer.firsts) >= self._runs_max // 16:
                    self._older_run_count -= producer.forget_oldest()
                else:
                    self._forget_least_used()

    def _forget_least_used(self) -> None:
        _, producer = self._producers.popitem(last=False)
        self._older_run_count -= len(producer.firsts)

    def _ends(self) -> NDArray[np.int64]:
        """End of each queue by its number; 0 for those that are gone."""
        return np.array(
            [0 if name is None else self._end_offset_of(*name) for name in self._queue_names],
            np.int64,
        )


def _fenced(producer_id: int, epoch: int, newer: int) -> ProducerFencedError:
    return ProducerFencedError(
        f"producer {producer_id:016X} has started anew with epoch {newer}: this one, of epoch {epoch}, is fenced off and must stop"
    )
