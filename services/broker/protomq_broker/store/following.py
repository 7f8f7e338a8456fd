"""A store that follows a leader: it stores the leader's bytes at the same positions, and updates at once what is derived from the log.

    append      bytes that were proved (`log/verbatim.py`) are written, then applied append by append, then published
    readable    up to what the leader says is confirmed
    retention   segments go when the leader has said, and confirmed, that its log begins behind them

Rules:
- The log is the leader's, octet by octet. Nothing of this store's own is ever appended.
- Each append is applied as on the leader: first to derived structures, then to the machines of its state records.
- The follower refuses bytes that do not continue the log before it writes any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
from google.protobuf.message import DecodeError

from protomq.v1.record_pb2 import RecordBatch
from protomq.v1.state_pb2 import LogRecord
from protomq.wire.topics import LOG_TOPIC

from .derived import Derived
from .errors import StoreFailedError
from .log.append import AppendRequest
from .log.checked_log import CheckedLog
from .log.commit_log import CommitLog
from .log.epochs import Epochs
from .log.kinds import is_queued
from .log.positions import Positions, QueueKey
from .log.verbatim import ForeignBlock, LogEnd, prove, requests_of
from .queues.consume_queue_table import ConsumeQueueTable
from .queues.repaired import RepairedRange, repaired_in
from .start.log_replay import deletions_in_block
from .state.log_front import tell
from .state.machine import StateMachine
from .state.repeated_sends import RepeatedSends
from .timer.pending import PendingTimers


class LogFollowers:
    """Applies appends of another log, block by block, to everything that follows the log. The writer thread."""

    def __init__(
        self,
        derived: Sequence[Derived],
        machines: Mapping[str, StateMachine],
        queues: ConsumeQueueTable,
        repeated: RepeatedSends,
        pending: PendingTimers,
        forget_topic: Callable[[str], None],
    ) -> None:
        """`machines`: by their system topics. `forget_topic` is called with a deleted topic, once no derived structure has it any more."""
        self._derived = derived
        self._machines = machines
        self._queues = queues
        self._repeated = repeated
        self._pending = pending
        self._forget_topic = forget_topic
        self.leader_starts: list[tuple[int, int]] = []
        """The starts of the leader's log: (position of the record that says so, where the log begins)."""

    def begin_behind_the_start(self, position: int) -> None:
        """Notes that this log is empty, and begins at `position`, behind the start of the leader's log."""
        self._repeated.begin_partial()
        self._pending.rows_from = position

    def apply(self, block: ForeignBlock) -> list[AppendRequest]:
        """Applies the appends of a block to everything that follows the log, and returns them."""
        records = block.records
        topics = [index for index, name in enumerate(records.topics) if name in self._machines]
        if not topics:
            return self._apply(block, 0, records.count)
        states = np.flatnonzero(np.isin(records.topic_indexes, topics))
        # An append with state records is applied alone: first what stands before it, then the states, then what stands behind.
        ends = np.array([seal.end_position for seal in block.appends.seals], np.int64)
        appends = np.unique(np.searchsorted(ends, records.positions[states], "right"))
        starts = np.array([seal.start_position for seal in block.appends.seals], np.int64)
        bounds = np.searchsorted(
            records.positions, np.sort(np.concatenate((starts[appends], ends[appends])))
        )
        applied: list[AppendRequest] = []
        rows = states.tolist()
        for first, end in pairwise([0, *bounds.tolist(), records.count]):
            here = [row for row in rows if first <= row < end]
            bodies = [(row, *self._state_at(block, row)) for row in here]
            for row, topic, body in bodies:
                if topic == LOG_TOPIC:
                    self._note_front(body, int(records.positions[row]))
            applied += self._apply(block, first, end)
            for row, topic, body in bodies:
                self._apply_state(topic, body, int(records.positions[row]))
        return applied

    def pass_over(self, repaired: Sequence[RepairedRange]) -> None:
        """Delayed messages that a repair has taken out are not pending here, whatever the log says of their end."""
        for each in repaired:
            self._pending.pass_over(each.damage.start_position, each.damage.end_position)

    def fill_lost(self, block: ForeignBlock, repaired: Sequence[RepairedRange]) -> None:
        """Messages that a repair has taken out keep their offsets, also where no later message of their queue shows that they are missing.
        """
        deleted = dict(deletions_in_block(block.appends, block.records))
        for each in repaired:
            self._queues.fill_lost(each.ends, [each.damage], deleted)

    def _apply(self, block: ForeignBlock, first: int, end: int) -> list[AppendRequest]:
        requests = requests_of(block, first, end)
        group: list[AppendRequest] = []
        ends: dict[QueueKey, int] = {}
        for request in requests:
            region, offset = request.region, request.queue_offset
            if is_queued(region.flags):
                key = (region.topic, request.queue_id)
                expected = ends[key] if key in ends else self._queues.end_offset(*key)
                # What is missing in between is made good behind what came before.
                if offset != expected:
                    self._tell(group)
                    group = []
                    if offset > expected:
                        self._queues.skip_to(*key, offset)
                    else:
                        self._queues.go_back_to(*key, offset, request.physical_offset)
                ends[key] = offset + region.count
            group.append(request)
        self._tell(group)
        return requests

    def _tell(self, requests: Sequence[AppendRequest]) -> None:
        if requests:
            for structure in self._derived:
                structure.apply(requests)

    def _state_at(self, block: ForeignBlock, row: int) -> tuple[str, bytes]:
        """(system topic, body) of a state record."""
        records = block.records
        at = int(records.positions[row]) - block.appends.base_position
        field = bytes(block.appends.data[at : at + int(records.sizes[row])])
        (record,) = RecordBatch.FromString(field).records
        return records.topics[int(records.topic_indexes[row])], record.body

    def _apply_state(self, topic: str, body: bytes, position: int) -> None:
        for gone in self._machines[topic].apply(body, position):
            for structure in self._derived:
                structure.remove_topic(gone)
            self._forget_topic(gone)

    def _note_front(self, body: bytes, position: int) -> None:
        """Notes what the leader carried forward from its log's front. A log that begins behind that front takes it from here."""
        tell(body, position, {}, self._queues, self._repeated)
        self._queues.begin_carried()
        try:
            record = LogRecord.FromString(body)
        except DecodeError:
            return
        if record.HasField("start"):
            self.leader_starts = [*self.leader_starts, (position, record.start.position)]


class Follower:
    """See the module's docstring. `append`: the writer thread.

    Attribute: epochs: the epochs of the log up to its end.
    """

    def __init__(
        self,
        commit_log: CommitLog,
        checked: CheckedLog,
        positions: Positions,
        followers: LogFollowers,
        epochs: Epochs,
        now_ms: Callable[[], int],
        count: Callable[[Sequence[AppendRequest]], list[QueueKey]],
        note_repaired: Callable[[RepairedRange], None],
        note_start: Callable[[int | None], None],
    ) -> None:
        """`count` counts what was appended, and returns the queues that got it. `note_repaired` is told what the leader's log has lost.

        `note_start`: the log begins behind 0 now; it is told the CRC with which the chain comes there.
        """
        self.epochs = epochs
        self._log = commit_log
        self._checked = checked
        self._positions = positions
        self._followers = followers
        self._now_ms = now_ms
        self._count = count
        self._note_repaired = note_repaired
        self._note_start = note_start

    def append(
        self,
        position: int,
        data: bytes | memoryview,
        *,
        may_end_within: bool = False,
        previous_crc32c: int | None = None,
    ) -> int:
        """Stores whole appends of the leader's log, which stand at `position` there. Returns the new end of the log.

        `may_end_within`: the data may end with a part of one more append, which is not stored yet. `previous_crc32c`: as of `prove`. Raises
        ForeignBytesError: nothing is stored; DiskFullError, StoreFailedError: the appends up to the log's end are stored.
        """
        commit_log = self._log
        if commit_log.failure:
            raise StoreFailedError(commit_log.failure)
        folder, tail = commit_log.folder, commit_log.tail
        # A log whose front was deleted up to its end knows the CRC there.
        is_empty = tail.crc32c == 0 and (not folder.files or tail.position == folder.first_position)
        end = LogEnd(tail, self._last_epoch, is_empty)
        blocks = prove(
            data,
            position,
            end,
            folder.segment_size_bytes,
            may_end_within=may_end_within,
            previous_crc32c=previous_crc32c,
        )
        if blocks and is_empty and position:
            commit_log.begin_at(position)
            self._note_start(previous_crc32c)
            self._followers.begin_behind_the_start(position)
        for block in blocks:
            self._store(block)
        return commit_log.tail.position

    def deletable_below(self) -> int:
        """The confirmed start of the leader's log: segments before it may be deleted here, too."""
        confirmed = min(self._positions.readable, self._positions.flushed)
        starts = self._followers.leader_starts
        return max((start for position, start in starts if position < confirmed), default=0)

    @property
    def _last_epoch(self) -> int:
        return self.epochs.rows[-1].epoch if self.epochs.rows else 0

    def _store(self, block: ForeignBlock) -> None:
        commit_log = self._log
        before = commit_log.tail
        if before.position >= self._checked.next_note:
            self._checked.note_append(before)
        tail = commit_log.append_verbatim(block.appends, self._now_ms())
        try:
            repaired = repaired_in(block.appends, commit_log.folder)
            self._followers.pass_over(repaired)
            requests = self._followers.apply(block)
            if repaired:
                self._followers.fill_lost(block, repaired)
        except Exception as error:
            reason = f"what is derived from the log could not follow it: {error!r}"
            commit_log.take_back(before, reason)
            raise StoreFailedError(reason) from error
        self.epochs = self.epochs.note(block.appends.seals)
        self._positions.publish(tail, self._count(requests))
        for each in repaired:
            self._note_repaired(each)
