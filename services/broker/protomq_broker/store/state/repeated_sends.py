"""Recognises a send that is stored already: a producer that got no answer sends the same sequences again.

For each producer the table knows its epoch and the runs of sequences that are stored, each with the place of its first record. What goes
on in sequence, queue and offset makes its run longer, so a producer that stays in one queue has one run.

What is recognised (by its numbers: whether the messages are the same, `same_messages.py` looks up):
- A record that enters no consume queue (a half message, one with a due time) is known by its position. Such records that stand one
  behind the other in the log make one run. Its "queue" is ~queue id, and its "queue offset" is the position of its first record.
- Sequences may come in any order. Below the producer's floor old runs were forgotten: an unknown sequence there may be stored or not,
  and is refused.
- A send may name a previous sequence of its producer that must be stored here. If it names one and the broker does not know the
  producer, it fails with SequenceExpiredError. The producer was forgotten, and with it whether this very send is stored. If the producer
  is known and that sequence is not, the one before was refused or is under way. Then it fails with SendOutOfOrderError: nothing is
  stored out of order.
- A send that names none is its producer's first here. So that it is recognised too, no producer is forgotten within 15 minutes, longer
  than any retry. If there are a million producers, new ones are refused (TooManyProducersError).

What is forgotten, and when, follows from the log alone: the same log makes the same table, live, after a start and in a replica.
- Time is the store time of the records. After 24 hours (in steps of one) a producer is forgotten. If there are a million, all that have
  sent nothing for 15 minutes are forgotten at once.
- Older runs: when one producer has too many, a quarter of its runs. When all together have too many, the runs of producers that have
  sent nothing for 15 minutes. If that does not help, a quarter of the one who has just sent.

How:
- `admit` asks and claims on the writer thread, `apply` enters what was appended. So two attempts of one send in one group are noticed.
- Whatever is derived from a part of the log that did not survive must go: a run beyond its queue's end is cut (`truncate`). Else a message
  that was lost would be answered as stored.
- The lock keeps the snapshot on the flusher thread and the writer apart, for a thousand rows at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from protomq.v1.state_pb2 import KnownProducers
from protomq_broker.store.files.disk import Disk, remove_file
from protomq_broker.store.log.append import AppendRequest, ScannedRecords
from protomq_broker.store.log.kinds import NO_OFFSET, is_sent
from protomq_broker.store.log.record_runs import run_continues

from .producer_runs import RUN_FIELDS
from .producer_table import NEVER_MS, ROW
from .send_errors import (
    RETRY_MAX_MS,
    PartlyStoredError,
    ProducerFencedError,
    ProducerIdTakenError,
    RepeatedSend,
    SendInFlightError,
    SendOutOfOrderError,
    SequenceExpiredError,
    TooManyProducersError,
)
from .sent_runs import (
    GONE,
    PRODUCERS_MAX,
    RUNS_MAX,
    RUNS_PER_PRODUCER_MAX,
    SWEEP_STEP_MS,
    EndOffsetOf,
    SentRuns,
)
from .sent_snapshot import SnapshotHead, path_in, read_snapshot, write_snapshot

RUNS_TOLD_MAX: Final = 1_024
"""Older runs of one producer that a record of the log reports; what is older is refused where only that record is left."""

_Claim = tuple[int, int, list[tuple[int, int]]]
"""Of a producer in the group that is being made: its epoch, the end of all sequences that are stored or claimed, the ranges claimed."""


def _no_time() -> int:
    return 0


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
        self._runs = SentRuns(self._producers_max, self._runs_per_producer_max, self._runs_max)
        self._table = self._runs.table
        self._claims: dict[int, _Claim] = {}
        self._new_claims = 0
        self._free_places: int | None = None  # those whom this group may take the places of
        self._looked_for_room_ms = NEVER_MS
        self._covered_position = 0
        self._claimed_position = 0  # by the snapshot on the disk: the log is durable up to there
        self._snapshot_end = 0  # it reports nothing behind
        self._frozen: SnapshotHead | None = None

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
        claim = self._claims.get(producer_id)
        if claim is not None and claim[0] == producer_epoch and claim[1] <= first_sequence:
            ranges = claim[2]
            last_first, last_end = ranges[-1]
            if previous_sequence is None or last_first <= previous_sequence < last_end:
                # It goes on behind all that is known of its producer, this group included: nothing else has to be asked.
                ranges.append((first_sequence, end))
                self._claims[producer_id] = (producer_epoch, end, ranges)
                return None
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
            claimed_end = max(end, table.ends[row]) if is_known else end
            self._claims[producer_id] = (producer_epoch, claimed_end, [(first_sequence, end)])
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
            if len(requests) > 1 or (requests and requests[0].region.producer_id):  # else it is the broker's own
                taken = self._runs.enter_plain(requests)
                if taken < len(requests):
                    self._apply_kinds(requests[taken:])
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
                self._runs.enter(*run[:-1])
            run = sent
        if run is not None:
            self._runs.enter(*run[:-1])

    def drop_claims(self) -> None:
        """Drops the claims of sends that `admit` called new and that will not be appended."""
        self._claims.clear()
        self._new_claims = 0
        self._free_places = None

    # Any thread.

    def begin_partial(self) -> None:
        """The log begins behind sends that its leader knows: a producer that comes up may have stored earlier ones. Until `end_partial`."""
        self._runs.is_partial = True

    def end_partial(self) -> None:
        """From here on every send comes to this table first."""
        self._runs.is_partial = False

    def remove_topic(self, topic: str) -> None:
        """The topic is gone: what was stored in it is neither known nor new."""
        with self._lock:
            self._runs.remove_topic(topic)

    def producers_since(self, time_ms: int, count_max: int, runs_max: int) -> list[list[int]]:
        """The ids of producers that are known and have sent something after `time_ms` of the log's time, in slices.

        A slice has at most `count_max` producers. Together these have at most `runs_max` runs now, and those of one producer more.
        """
        with self._lock:
            table = self._table
            used = np.array(table.used_ms, np.int64)
            ids = np.array(table.ids, np.uint64)
            runs = np.array(table.older_counts, np.int64)
            is_used = used > max(time_ms, table.forgotten_ms)
        ids, runs = ids[is_used], np.minimum(runs[is_used], RUNS_TOLD_MAX) + 1
        if not len(ids):
            return []
        by_count, by_runs = np.arange(len(ids)) // count_max, np.cumsum(runs) // runs_max
        bounds = np.flatnonzero((np.diff(by_count) != 0) | (np.diff(by_runs) != 0)) + 1
        return [part.tolist() for part in np.split(ids, bounds)]

    def told_of(self, producer_ids: Sequence[int], runs_max: int = RUNS_TOLD_MAX) -> KnownProducers:
        """What is known of producers at this moment, of each the newest runs, for `take_told`. The writer thread."""
        table = self._table
        rows = [row for row in map(table.find, producer_ids) if row >= 0]
        columns, older = table.copy(rows, runs_max)
        runs = np.frombuffer(b"".join(older), "<u8").reshape(-1, RUN_FIELDS).copy()
        numbers, last = np.unique(np.append(columns["queue"], runs[:, 2]), return_inverse=True)
        columns["queue"] = last[: len(columns)]
        runs[:, 2] = last[len(columns) :]
        names = (self._runs.queue_names[number] for number in numbers.astype(int).tolist())
        return KnownProducers(
            rows=columns.tobytes(),
            older_runs=runs.tobytes(),
            queues=["" if name is None else f"{name[0]}/{name[1]}" for name in names],
        )

    # Flusher thread.

    def flush(self) -> None:
        """Nothing to do between checkpoints: the log has all of it."""

    def freeze(self) -> int:
        """The next `checkpoint` reports this moment; up to where the log was in the table then."""
        with self._lock:
            table = self._table
            table.freeze()
            self._frozen = SnapshotHead(
                self._covered_position,
                table.forgotten_ms,
                table.runs_forgotten_ms,
                list(self._runs.queue_names),
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
        while True:
            with self._lock:
                taken = self._table.take()
            if taken is None:
                break
            part, runs = taken
            rows.append(part.tobytes())
            older.append(b"".join(runs))
        self.thaw()
        write_snapshot(self._disk, self._folder, position, frozen, rows, older)
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
        found = read_snapshot(self._disk, self._folder)
        if isinstance(found, str):
            self.damage = found
            self.start_rebuild()
            self._runs.is_partial = log_start > 0
            return
        position, head, rows, older = found
        for name in head.queue_names:
            self._runs.add_queue(*(name or (GONE, 0)))
        table = self._table
        table.forgotten_ms, table.runs_forgotten_ms = head.forgotten_ms, head.runs_forgotten_ms
        table.load(rows, older)
        covered = head.covered_position
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
        remove_file(self._disk, path_in(self._folder))
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
                self._runs.enter(id_, epoch, sequence, end, queue_key, queue_offset, time_ms, last_ms)

    def take_told(
        self, told: KnownProducers, position: int, is_gone: Callable[[str], bool]
    ) -> None:
        """A replay has come to the record at `position` that reports producers: what it says counts, and is all that is known of them.

        `is_gone`: whether a topic was deleted since.
        """
        if position < self._covered_position:
            return
        with self._lock:
            number_of = self._runs.number_of
            keys = [name.partition("/") for name in told.queues]
            numbers = np.array(
                [number_of(GONE if is_gone(key[0]) else key[0], int(key[2] or 0)) for key in keys],
                np.uint32,
            )
            rows = np.frombuffer(told.rows, ROW).copy()
            rows["queue"] = numbers[rows["queue"]]
            runs = np.frombuffer(told.older_runs, "<u8").reshape(-1, RUN_FIELDS).copy()
            runs[:, 2] = numbers[runs[:, 2].astype(np.int64)]
            self._table.enter(rows, runs.tobytes())

    def pass_over(self, start_position: int, end_position: int) -> None:
        """Nothing to do: what the damage has taken may be sent again."""

    def truncate(self, end_position: int) -> None:
        """The log ends here: forgets what lies beyond the end of its queue; the consume queues have been cut before. Nobody appends."""
        self._runs.is_partial = False
        if end_position >= self._covered_position:
            return
        self.drop_claims()
        with self._lock:
            self._table.clip(self._runs.ends(self._end_offset_of, end_position))
        self._covered_position = end_position
        if end_position < self._snapshot_end:
            self.checkpoint(min(end_position, self._claimed_position))

    # Parts.

    def _look_up(self, row: int, first: int, end: int, topic: str) -> RepeatedSend | None:
        run = self._runs.overlapping(row, first, end)
        asked = self._table.ids[row], self._table.epochs[row], first
        if run is None:
            floor = self._runs.floor(row)
            if first < floor:
                raise SequenceExpiredError(
                    f"sequences {first} to {end - 1}: too old to know whether they are stored: all below {floor} are forgotten",
                    *asked,
                )
            return None
        run_first, run_end, queue, queue_offset = run
        first_known, end_known = max(first, run_first), min(end, run_end)
        name = self._runs.queue_names[queue]
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
            if table.firsts[row] <= previous < table.ends[row] or previous < self._runs.floor(row):
                return
            if self._runs.overlapping(row, previous, previous + 1) is not None:
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
