"""Recognises a send that is stored already: a producer that got no answer sends the same sequences again.

For each producer the table knows its epoch and the runs of sequences that are stored, each with the place of its first record. What goes
on in sequence, queue and offset makes its run longer, so a producer that stays in one queue has one run.

    repeatedsends/table.bin   state file (`side_files.py`): position u64, covered position u64, forgotten i64, runs forgotten i64,
                              producers u32, queues u32, older runs u64, names (u32 size, UTF-8, lines "topic/queue"), producers
                              (`producer_table.ROW`), older runs of all producers: first, end, queue, queue offset u64

What is recognised (by its numbers: whether the messages are the same, `same_messages.py` looks up):
- A record that enters no consume queue (a half message, one with a due time) is known by its position. Such records that stand one
  behind the other in the log make one run; its "queue" is ~queue id, and its "queue offset" the position of its first record.
- Sequences may come in any order. Below the producer's floor old runs were forgotten: an unknown sequence there may be stored or not,
  and is refused.
- A send may name a previous sequence of its producer that must be stored here. Whoever names one to a broker that does not know the
  producer is told so (SequenceExpiredError): it was forgotten, and with it whether this very send is stored. Where the producer is known
  and that sequence is not, the one before was refused or is under way (SendOutOfOrderError): nothing is stored out of order.
- A send that names none is its producer's first here. So that it is recognised too, nobody is forgotten within 15 minutes, longer than
  any retry, whatever the number of producers: a million of them, and new ones are refused (TooManyProducersError).

What is forgotten, and when, follows from the log alone: the same log makes the same table, live, after a start and in a replica.
- Time is the store time of the records. After 24 hours (in steps of one) a producer is forgotten; where there is a million, all that have
  sent nothing for 15 minutes are, at once.
- Older runs: of one producer a quarter when it has too many; when all together have too many, those of producers that have sent nothing
  for 15 minutes; if that does not help, a quarter of the one who has just sent.

How:
- `admit` asks and claims on the writer thread, `apply` enters what was appended. So two attempts of one send in one group are noticed.
- Whatever is derived from a part of the log that did not survive must go: a run beyond its queue's end is cut (`truncate`). Else a message
  that was lost would be answered as stored.
- The lock keeps the snapshot on the flusher thread and the writer apart, for a thousand rows at a time.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protomq.v1.state_pb2 import KnownProducers
from protomq_broker.store.errors import StoreError
from protomq_broker.store.files.disk import Disk, remove_file
from protomq_broker.store.files.side_files import read_state_file, why_not, write_state_file
from protomq_broker.store.log.append import AppendRequest, ScannedRecords
from protomq_broker.store.log.kinds import NO_OFFSET, is_sent
from protomq_broker.store.log.record_runs import run_continues

from .producer_runs import RUN_FIELDS, Run, forget_oldest_runs, insert_run, overlapping_run
from .producer_table import NEVER_MS, ROW, ProducerTable

PRODUCERS_MAX: Final = 1_000_000
"""170 MiB."""
RUNS_PER_PRODUCER_MAX: Final = 262_144
"""A producer that sends 65,000 single messages a second, round robin, makes a run of each: 4 s, longer than a send takes with all its
retries (3 s). 8 MB."""
RUNS_TOLD_MAX: Final = 1_024
"""Older runs of one producer that a record of the log tells of; what is older is refused where only that record is left."""
RUNS_MAX: Final = 1 << 20
"""32 MB for all producers together, and 190 bytes for each that has any."""
RETRY_MAX_MS: Final = 15 * 60_000
"""The longest time after which a send may be tried again: whoever has sent within it is known."""
IDLE_MAX_MS: Final = 24 * 3_600_000
IDLE_STEP_MS: Final = 3_600_000
"""Who has sent nothing for a day is forgotten when an hour of the log's time is full: all at once, for one look at the times."""
SWEEP_STEP_MS: Final = 1_000
"""Interval, in the log's time, at which a full table is searched for room: a search of a million producers takes 3 ms."""

_SEQUENCE_END_MAX: Final = 1 << 63
_MAGIC: Final = b"PMQRPS02"
_HEAD: Final = struct.Struct("<QQqqIIQI")
_FILE_NAME: Final = "table.bin"
_PIECE_SIZE_BYTES: Final = 512 << 10
_GONE: Final = ""
"""Topic of records that belong to nobody any more, in `replay`."""

EndOffsetOf = Callable[[str, int], int]
_Claim = tuple[int, int, list[tuple[int, int]]]


def _no_time() -> int:
    return 0


class RepeatedSendError(StoreError):
    """A send that is refused for what is known of its producer."""

    def __init__(self, text: str, producer_id: int, producer_epoch: int, sequence: int = 0) -> None:
        super().__init__(text)
        self.producer_id = f"{producer_id:016X}"
        self.producer_epoch = producer_epoch
        self.sequence = sequence


class ProducerFencedError(RepeatedSendError):
    """A producer with the same id and a higher epoch, `newer_epoch`, has written."""

    def __init__(self, producer_id: int, producer_epoch: int, newer_epoch: int) -> None:
        super().__init__(
            f"producer {producer_id:016X} has started again with epoch {newer_epoch}: this one, of epoch {producer_epoch},"
            " is fenced off and must stop",
            producer_id,
            producer_epoch,
        )
        self.newer_epoch = newer_epoch


class SequenceExpiredError(RepeatedSendError):
    """It cannot be told any more whether this send is stored. `sequence`: its first. `previous_sequence`: the one that it names, where
    that is what is not known; else None.
    """

    def __init__(
        self,
        text: str,
        producer_id: int,
        producer_epoch: int,
        sequence: int = 0,
        previous_sequence: int | None = None,
    ) -> None:
        super().__init__(text, producer_id, producer_epoch, sequence)
        self.previous_sequence = previous_sequence


class PartlyStoredError(SequenceExpiredError):
    """Of this send `count` sequences from `first_known` on are stored, at `part`, and others are not."""

    def __init__(
        self,
        text: str,
        producer_id: int,
        producer_epoch: int,
        sequence: int,
        part: RepeatedSend,
        first_known: int,
        count: int,
    ) -> None:
        super().__init__(text, producer_id, producer_epoch, sequence)
        self.part = part
        self.first_known = first_known
        self.count = count


class ProducerIdTakenError(RepeatedSendError):
    """The sequences of this send are those of other messages: it is not stored, and will not be. `sequence`: its first."""


class SendInFlightError(SequenceExpiredError):
    """The same send is part of the group that is not appended yet: ask again after the append."""


class SendOutOfOrderError(RepeatedSendError):
    """The message that is to stand before this one, `sequence`, is not stored. Nor is this one."""


class TooManyProducersError(StoreError):
    """A million producers have sent within 15 minutes: nobody new is taken. `limit`: how many are."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"{limit} producers have sent within {RETRY_MAX_MS // 60_000} minutes, the most that the broker remembers;"
            " use fewer producers and keep them, or try again later"
        )
        self.limit = limit


class RepeatedSend(NamedTuple):
    """Where a send was stored the first time: its first record. Where that enters no consume queue, `queue_offset` is NO_OFFSET, and it
    comes `ahead` records behind the one at `position` of the log."""

    topic: str
    queue_id: int
    queue_offset: int
    position: int = 0
    ahead: int = 0


class _Frozen(NamedTuple):
    """What belongs to a snapshot beside the rows."""

    covered_position: int
    forgotten_ms: int
    runs_forgotten_ms: int
    queue_names: list[tuple[str, int] | None]


class RepeatedSends:
    """The table of a store.

    Attributes:
        replay_from: after `load`: what the log has below this position is in the table already.
        needs_rebuild: always False: a damaged table is empty after `load`.
        damage: after `load`: why its file was not taken over; "" if it was.
    """

    outlives_topics = True  # what was sent is known even if nobody can read it any more
    takes_plain = True

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
        self.damage = ""
        self._disk = disk
        self._folder = folder
        self._end_offset_of = end_offset_of
        self._producers_max = producers_max
        self._runs_per_producer_max = runs_per_producer_max
        self._runs_max = runs_max
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._table = ProducerTable()
        self._claims: dict[int, _Claim] = {}
        self._new_claims = 0
        self._free_places: int | None = None  # those whom this group may take the places of
        self._looked_for_room_ms = NEVER_MS
        self._queue_numbers: dict[tuple[str, int], int] = {}
        self._queue_names: list[tuple[str, int] | None] = []
        self._next_look_ms = NEVER_MS  # for those that have rested for a day
        self._covered_position = 0
        self._claimed_position = 0  # by the snapshot on the disk: the log is durable up to there
        self._snapshot_end = 0  # it tells of nothing behind
        self._is_partial = False  # made from a log whose beginning is deleted
        self._frozen: _Frozen | None = None

    # Writer thread.

    def admit(
        self,
        producer_id: int,
        producer_epoch: int,
        first_sequence: int,
        count: int,
        *,
        topic: str,
        previous_sequence: int | None = None,
        now_ms: Callable[[], int] = _no_time,
    ) -> RepeatedSend | None:
        """Where this send is stored already; None if it is new: then it is to be part of the next `apply`, or of `drop_claims`.

        `previous_sequence`: a sequence of this producer that must be stored here; None: its first send here. `now_ms` tells the
        store time that it would have.

        Raises ProducerFencedError, SequenceExpiredError, PartlyStoredError, ProducerIdTakenError, SendInFlightError, SendOutOfOrderError,
        TooManyProducersError.
        """
        if producer_id == 0:
            return None
        end = first_sequence + count
        table = self._table
        row = table.shards[producer_id & 255].get(producer_id, -1)  # as `table.find` does
        if row >= 0 and table.used_ms[row] <= table.forgotten_ms:
            row = -1
        is_known = False
        if row >= 0:
            known_epoch = table.epochs[row]
            if producer_epoch < known_epoch:
                raise ProducerFencedError(producer_id, producer_epoch, known_epoch)
            is_known = producer_epoch == known_epoch
            if is_known and first_sequence < table.ends[row]:
                found = self._look_up(row, first_sequence, end, topic)
                if found is not None:
                    return found
        claim = self._claims.get(producer_id)
        if claim is None:
            if previous_sequence is not None:
                if not is_known or not table.firsts[row] <= previous_sequence < table.ends[row]:
                    known = row if is_known else -1
                    self._require(
                        producer_id, producer_epoch, known, first_sequence, previous_sequence, ()
                    )
            elif row < 0:
                self._require_room(now_ms)
            if row < 0:
                self._new_claims += 1
            self._claims[producer_id] = (producer_epoch, end, [(first_sequence, end)])
            return None
        epoch, claimed_end, ranges = claim
        if producer_epoch < epoch:
            raise ProducerFencedError(producer_id, producer_epoch, epoch)
        if producer_epoch > epoch:
            ranges = []
        elif first_sequence < claimed_end:
            for first, stop in ranges:
                if first < end and first_sequence < stop:
                    raise SendInFlightError(
                        f"sequences {first_sequence} to {end - 1}: another attempt of this send is being stored, try again",
                        producer_id,
                        producer_epoch,
                        first_sequence,
                    )
            end = claimed_end
        if previous_sequence is not None and not (
            ranges and ranges[-1][0] <= previous_sequence < ranges[-1][1]
        ):
            known = row if is_known else -1
            self._require(
                producer_id, producer_epoch, known, first_sequence, previous_sequence, ranges
            )
        ranges.append((first_sequence, first_sequence + count))
        self._claims[producer_id] = (producer_epoch, end, ranges)
        return None

    def apply(self, requests: Sequence[AppendRequest]) -> None:
        """Enters what was just appended to the log."""
        with self._lock:
            for request in requests:
                region = request.region
                if region.producer_id:
                    if region.flags:
                        at = request.physical_offset
                        self._apply_kinds([r for r in requests if r.physical_offset >= at])
                        break
                    self._enter(
                        region.producer_id,
                        region.producer_epoch,
                        region.first_sequence,
                        region.first_sequence + region.count,
                        (region.topic, request.queue_id),
                        request.queue_offset,
                        request.store_time_ms,
                        request.store_time_ms,
                    )
            if requests:
                last = requests[-1]
                self._covered_position = last.physical_offset + len(last.region.data)
        if self._claims:
            self.drop_claims()

    def _apply_kinds(self, requests: Sequence[AppendRequest]) -> None:
        """As `apply`, where some of the records are no plain messages."""
        run: _Entered | None = None
        for request in requests:
            region = request.region
            if not region.producer_id or not is_sent(region.flags):
                continue
            sent = _Entered.of(request)
            if run is not None and run.is_followed_by(sent):
                run = run._replace(end=sent.end, end_position=sent.end_position)
                continue
            if run is not None:
                self._enter(*run[:-1])
            run = sent
        if run is not None:
            self._enter(*run[:-1])

    def drop_claims(self) -> None:
        """The group that was admitted is not in the log."""
        self._claims.clear()
        self._new_claims = 0
        self._free_places = None

    # Any thread.

    def begin_partial(self) -> None:
        """The log begins behind sends that its leader knows: a producer that comes up may have stored earlier ones. Until `end_partial`."""
        self._is_partial = True

    def end_partial(self) -> None:
        """From here on every send comes to this table first."""
        self._is_partial = False

    def remove_topic(self, topic: str) -> None:
        """The topic is gone: what was stored in it is neither known nor new."""
        with self._lock:
            for key, number in list(self._queue_numbers.items()):
                if key[0] == topic:
                    del self._queue_numbers[key]
                    self._queue_names[number] = None

    def producers_since(self, time_ms: int) -> list[int]:
        """The ids of producers that are known and have sent something after `time_ms` of the log's time."""
        with self._lock:
            table = self._table
            if not len(table.ids):
                return []
            used = np.array(table.used_ms, np.int64)
            ids = np.array(table.ids, np.uint64)
            return ids[used > max(time_ms, table.forgotten_ms)].tolist()

    def told_of(self, producer_ids: Sequence[int]) -> KnownProducers:
        """What is known of producers at this moment, for `take_told`. The writer thread."""
        table = self._table
        rows = [row for row in map(table.find, producer_ids) if row >= 0]
        columns, older = table.copy(rows, RUNS_TOLD_MAX)
        runs = np.frombuffer(b"".join(older), "<u8").reshape(-1, RUN_FIELDS).copy()
        numbers, last = np.unique(np.append(columns["queue"], runs[:, 2]), return_inverse=True)
        columns["queue"] = last[: len(columns)]
        runs[:, 2] = last[len(columns) :]
        names = (self._queue_names[number] for number in numbers.astype(int).tolist())
        return KnownProducers(
            rows=columns.tobytes(),
            older_runs=runs.tobytes(),
            queues=["" if name is None else f"{name[0]}/{name[1]}" for name in names],
        )

    # Flusher thread.

    def flush(self) -> None:
        """Nothing to do between checkpoints: the log has all of it."""

    def freeze(self) -> int:
        """The next `checkpoint` tells of this moment; up to where the log was in the table then."""
        with self._lock:
            table = self._table
            table.freeze()
            self._frozen = _Frozen(
                self._covered_position,
                table.forgotten_ms,
                table.runs_forgotten_ms,
                list(self._queue_names),
            )
            return self._covered_position

    def thaw(self) -> None:
        """After `freeze`: there will be no `checkpoint` now."""
        with self._lock:
            self._table.thaw()
            self._frozen = None

    def checkpoint(self, position: int) -> None:
        """Makes durable that everything that the log holds below `position` is in the table.

        What the table had at `freeze` is durable in the log; without it the snapshot is of now.
        """
        if self._frozen is None:
            self.freeze()
        assert self._frozen is not None
        frozen = self._frozen
        rows: list[bytes] = []
        older: list[bytes] = []
        row_count = older_size = 0
        while True:
            with self._lock:
                taken = self._table.take()
            if taken is None:
                break
            part, runs = taken
            row_count += len(part)
            rows.append(part.tobytes())
            older.append(b"".join(runs))
            older_size += len(older[-1])
        self.thaw()
        names = "\n".join(
            "" if name is None else f"{name[0]}/{name[1]}" for name in frozen.queue_names
        ).encode()
        head = _HEAD.pack(
            position,
            frozen.covered_position,
            frozen.forgotten_ms,
            frozen.runs_forgotten_ms,
            row_count,
            len(frozen.queue_names),
            older_size // (8 * RUN_FIELDS),
            len(names),
        )
        self._disk.make_folder(self._folder)
        write_state_file(self._disk, self._path, _MAGIC, *_gathered((head, names, *rows, *older)))
        self._claimed_position = position
        self._snapshot_end = max(position, frozen.covered_position)

    def delete_below(self, log_start: int) -> None:
        """Nothing to do: sequences are known for as long as the table has room. Whose they are can be told while the message is there."""

    def close(self) -> None:
        """Nothing is open."""

    # Recovery: one thread, nobody else.

    def load(self, log_start: int = 0) -> None:
        """Takes over the snapshot, if it holds; else a replay from `log_start` brings back what the log still tells."""
        self._clear()
        payload = read_state_file(self._disk, self._path, _MAGIC)
        if payload is None:
            self.damage = why_not(self._disk, self._path, _MAGIC)
            self.start_rebuild()
            self._is_partial = log_start > 0
            return
        (
            position,
            covered,
            forgotten_ms,
            runs_forgotten_ms,
            row_count,
            queue_count,
            _,
            names_size,
        ) = _HEAD.unpack_from(payload)
        at = _HEAD.size
        names = payload[at : at + names_size].decode().split("\n")[:queue_count]
        at += names_size
        rows = np.frombuffer(payload, ROW, row_count, at)
        for name in names:
            topic, _, queue_id = name.partition("/")
            key = (topic, int(queue_id)) if topic else None
            if key is not None:
                self._queue_numbers[key] = len(self._queue_names)
            self._queue_names.append(key)
        table = self._table
        table.forgotten_ms, table.runs_forgotten_ms = forgotten_ms, runs_forgotten_ms
        table.load(rows, memoryview(payload)[at + rows.nbytes :])
        self._covered_position = covered
        self._snapshot_end = max(position, covered)
        self.replay_from = self._claimed_position = position

    def forget_deleted(self, positions: Mapping[str, int]) -> None:
        """Topics that were deleted, and where the log ended then: the snapshot may be of a time before that."""
        for topic, position in positions.items():
            if position >= self._covered_position:
                self.remove_topic(topic)

    def start_rebuild(self) -> None:
        """Forgets everything; a replay from the log's start brings it back."""
        self._clear()
        remove_file(self._disk, self._path)
        self.replay_from = 0

    def replay(self, records: ScannedRecords) -> None:
        """Enters records read back from the log, in its order; those that are there already are skipped.

        Records of the topic "" belong to a topic that was deleted since.
        """
        if not records.count:
            return
        covered = self._covered_position
        end_position = int(records.positions[-1] + records.sizes[-1])
        if end_position <= covered:
            return
        self._covered_position = end_position
        records = _with_places(records.select(is_sent(records.flags)))
        known = int(np.searchsorted(records.positions, covered))
        if known == records.count:
            return
        begins = ~run_continues(records)
        begins[known] = True
        # A rest in the middle may have let the first half be forgotten.
        begins[1:] |= np.diff(records.store_times_ms) >= RETRY_MAX_MS
        starts = np.flatnonzero(begins)
        starts = starts[starts >= known]
        lengths = np.diff(np.append(starts, records.count))
        columns = (
            records.producer_ids, records.producer_epochs, records.sequences, records.topic_indexes, records.queue_ids,
            records.queue_offsets, records.store_times_ms,
        )  # fmt: skip
        last_times = records.store_times_ms[starts + lengths - 1].tolist()
        rows = zip(*(column[starts].tolist() for column in columns), lengths.tolist(), last_times, strict=True)  # fmt: skip
        for id_, epoch, sequence, topic_index, queue_id, queue_offset, time_ms, length, last_ms in rows:  # fmt: skip
            if id_:
                queue_key = (records.topics[topic_index], queue_id)
                end = sequence + length
                self._enter(id_, epoch, sequence, end, queue_key, queue_offset, time_ms, last_ms)

    def take_told(
        self, told: KnownProducers, position: int, is_gone: Callable[[str], bool]
    ) -> None:
        """A replay has come to the record at `position` that tells of producers: what it says counts, and is all that is known of them.

        `is_gone`: whether a topic was deleted since.
        """
        if position < self._covered_position:
            return
        with self._lock:
            keys = [name.partition("/") for name in told.queues]
            numbers = np.array(
                [self._number_of(_GONE if is_gone(key[0]) else key[0], int(key[2] or 0)) for key in keys],
                np.uint32,
            )
            rows = np.frombuffer(told.rows, ROW).copy()
            rows["queue"] = numbers[rows["queue"]]
            runs = np.frombuffer(told.older_runs, "<u8").reshape(-1, RUN_FIELDS).copy()
            runs[:, 2] = numbers[runs[:, 2].astype(np.int64)]
            self._table.enter(rows, runs.tobytes())

    def _number_of(self, topic: str, queue_id: int) -> int:
        key = (topic, queue_id)
        number = self._queue_numbers.get(key)
        if number is None:
            number = self._queue_numbers[key] = len(self._queue_names)
            self._queue_names.append(None if topic == _GONE else key)
        return number

    def pass_over(self, start_position: int, end_position: int) -> None:
        """Nothing to do: what the damage has taken may be sent again."""

    def truncate(self, end_position: int) -> None:
        """The log ends here: forgets what lies beyond the end of its queue; the consume queues have been cut before. Nobody appends."""
        self._is_partial = False
        if end_position >= self._covered_position:
            return
        self.drop_claims()
        with self._lock:
            self._table.clip(self._ends(end_position))
        self._covered_position = end_position
        if end_position < self._snapshot_end:
            self.checkpoint(min(end_position, self._claimed_position))

    # Parts.

    @property
    def _path(self) -> str:
        return f"{self._folder}/{_FILE_NAME}"

    def _floor(self, row: int) -> int:
        """Below it, what is not known may be stored all the same."""
        table = self._table
        if table.older_counts[row] and not table.has_older(row):
            return table.firsts[row]
        return table.floors[row]

    def _overlapping(self, row: int, first: int, end: int) -> Run | None:
        """The first run of a producer that shares sequences with [first, end)."""
        table = self._table
        if table.has_older(row):
            run = overlapping_run(table.older[row], first, end)
            if run is not None:
                return run
        if table.firsts[row] < end and first < table.ends[row]:
            return table.firsts[row], table.ends[row], table.queues[row], table.queue_offsets[row]
        return None

    def _look_up(self, row: int, first: int, end: int, topic: str) -> RepeatedSend | None:
        run = self._overlapping(row, first, end)
        asked = self._table.ids[row], self._table.epochs[row], first
        if run is None:
            floor = self._floor(row)
            if first < floor:
                raise SequenceExpiredError(
                    f"sequences {first} to {end - 1}: too old to know whether they are stored: all below {floor} are forgotten",
                    *asked,
                )
            return None
        run_first, run_end, queue, queue_offset = run
        first_known, end_known = max(first, run_first), min(end, run_end)
        name = self._queue_names[queue]
        found_offset = queue_offset + first_known - run_first
        if name is None or (name[1] >= 0 and found_offset >= self._end_offset_of(*name)):
            raise SequenceExpiredError(
                f"sequences {first} to {end - 1}: they were stored in a topic that was deleted since",
                *asked,
            )
        if name[0] != topic:
            raise ProducerIdTakenError(
                f"sequences {first} to {end - 1}: they were used for topic {name[0]}; take new ones, or another producer id",
                *asked,
            )
        found = RepeatedSend(name[0], name[1], found_offset)
        if name[1] < 0:
            found = RepeatedSend(
                name[0], ~name[1], NO_OFFSET, queue_offset, first_known - run_first
            )
        if (first_known, end_known) != (first, end):
            raise PartlyStoredError(
                f"sequences {first} to {end - 1}: some of them are stored and some are not: repeat a send as it was, or take new sequences",
                *asked,
                found,
                first_known,
                end_known - first_known,
            )
        return found

    def _require(
        self,
        producer_id: int,
        epoch: int,
        row: int,
        sequence: int,
        previous: int,
        claimed: Sequence[tuple[int, int]],
    ) -> None:
        """For a send that begins with `sequence`: raises unless `previous` is stored, or will be with this group.

        `row` -1: nothing of this producer and epoch is stored.
        """
        for first, stop in reversed(claimed):
            if first <= previous < stop:
                return
        if row >= 0:
            table = self._table
            if table.firsts[row] <= previous < table.ends[row] or previous < self._floor(row):
                return
            if self._overlapping(row, previous, previous + 1) is not None:
                return
        elif not claimed:
            raise SequenceExpiredError(
                f"producer {producer_id:016X} with epoch {epoch} is not known here, but names sequence {previous} as sent before:"
                " the broker forgot it, or that was never stored. Messages with an unknown outcome may be stored or not; send new ones"
                " without previous_sequence",
                producer_id,
                epoch,
                sequence,
                previous,
            )
        raise SendOutOfOrderError(
            f"sequence {previous} of producer {producer_id:016X}, which must stand before this message, is not stored here: send it"
            " first, or name another",
            producer_id,
            epoch,
            previous,
        )

    def _require_room(self, now_ms: Callable[[], int]) -> None:
        """Raises unless one more producer will have a place."""
        table = self._table
        known = table.count + self._new_claims
        if known < self._producers_max:
            return
        if self._free_places is None:
            # A look costs 1 ms, and a group of refused sends changes nothing: one look for each sweep that there could be.
            limit = now_ms() - RETRY_MAX_MS
            last = max(table.forgotten_ms, self._looked_for_room_ms)
            self._free_places = 0
            if limit >= last + SWEEP_STEP_MS:
                self._looked_for_room_ms = limit
                self._free_places = table.count_used_until(limit)
        if known - self._free_places >= self._producers_max:
            raise TooManyProducersError(self._producers_max)

    def _enter(
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
        if end > _SEQUENCE_END_MAX:
            return  # no producer gets there by counting: such sends are not recognised
        if time_ms >= self._next_look_ms:
            self._forget_idle(time_ms)
        queue = self._queue_numbers.get(queue_key)
        if queue is None:
            queue = self._number_of(*queue_key)
        table = self._table
        row = table.shards[producer_id & 255].get(producer_id, -1)  # as `table.find` does
        if row < 0 or (used_ms := table.used_ms[row]) <= table.forgotten_ms:
            if table.count >= self._producers_max:
                self._make_room(time_ms)
            row = table.add(producer_id, epoch, last_time_ms)
            if self._is_partial:
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
                older = table.older.get(row)
                if older is None:
                    older = table.older_of(row)
                older.extend((last_first, last_end, last_queue, last_offset))
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

    def _bound_runs(self, row: int, time_ms: int) -> None:
        """Keeps the numbers of older runs within their limits; `row` has just got one more."""
        table = self._table
        if table.older_counts[row] > self._runs_per_producer_max:
            self._forget_oldest_runs(row)
        if table.older_count > self._runs_max:
            limit = time_ms - RETRY_MAX_MS
            if limit >= table.runs_forgotten_ms + SWEEP_STEP_MS:
                table.forget_runs_until(limit)
            while table.older_count > self._runs_max and table.older_counts[row]:
                self._forget_oldest_runs(row)

    def _forget_oldest_runs(self, row: int) -> None:
        table = self._table
        count, table.floors[row] = forget_oldest_runs(table.older[row])
        table.older_counts[row] -= count
        table.older_count -= count
        if not table.older_counts[row]:
            del table.older[row]

    def _forget_idle(self, time_ms: int) -> None:
        hour_ms = time_ms - time_ms % IDLE_STEP_MS
        self._table.forget_until(hour_ms - IDLE_MAX_MS)
        self._next_look_ms = hour_ms + IDLE_STEP_MS

    def _make_room(self, time_ms: int) -> None:
        limit = time_ms - RETRY_MAX_MS
        if limit >= self._table.forgotten_ms + SWEEP_STEP_MS:
            self._table.forget_until(limit)

    def _ends(self, end_position: int) -> NDArray[np.int64]:
        """End of each queue by its number, of a log that ends at `end_position`; those that are gone have none."""
        gone = np.iinfo(np.int64).max
        ends = [
            gone if name is None else self._end_offset_of(*name) if name[1] >= 0 else end_position
            for name in self._queue_names
        ]
        return np.array(ends, np.int64)


class _Entered(NamedTuple):
    """The arguments of `_enter`, and where in the log the records end."""

    producer_id: int
    epoch: int
    first: int
    end: int
    queue_key: tuple[str, int]
    queue_offset: int
    time_ms: int
    last_time_ms: int
    end_position: int

    @classmethod
    def of(cls, request: AppendRequest) -> _Entered:
        """What a request makes."""
        region = request.region
        position, queue_id, offset = request.physical_offset, request.queue_id, request.queue_offset
        if offset == NO_OFFSET:
            queue_id, offset = ~queue_id, position
        return cls(
            region.producer_id, region.producer_epoch, region.first_sequence, region.first_sequence + region.count,
            (region.topic, queue_id), offset, request.store_time_ms, request.store_time_ms, position + len(region.data),
        )  # fmt: skip

    def is_followed_by(self, other: _Entered) -> bool:
        """Whether both are one run: neither enters a queue, and the other one stands right behind."""
        return (
            self.queue_key == other.queue_key
            and self.queue_key[1] < 0
            and (self.producer_id, self.epoch) == (other.producer_id, other.epoch)
            and self.end == other.first
            and self.end_position == other.queue_offset
        )


def _with_places(records: ScannedRecords) -> ScannedRecords:
    """The records, those that enter no queue with ~queue id and their position in place of the offset."""
    unqueued = records.queue_offsets == NO_OFFSET
    if not np.count_nonzero(unqueued):
        return records
    return replace(
        records,
        queue_ids=np.where(unqueued, ~records.queue_ids, records.queue_ids),
        queue_offsets=np.where(unqueued, records.positions, records.queue_offsets),
    )


def _gathered(parts: Sequence[bytes]) -> list[bytes]:
    """The parts in pieces that are worth a write each."""
    pieces: list[bytes] = []
    piece: list[bytes] = []
    size = 0
    for part in parts:
        piece.append(part)
        size += len(part)
        if size >= _PIECE_SIZE_BYTES:
            pieces.append(b"".join(piece))
            piece, size = [], 0
    return [*pieces, b"".join(piece)]


def stored_position(disk: Disk, folder: str) -> int:
    """Up to where the files in `folder` say that they had covered the log durably; 0 if they do not say."""
    payload = read_state_file(disk, f"{folder}/{_FILE_NAME}", _MAGIC)
    return int(_HEAD.unpack_from(payload)[0]) if payload is not None else 0
