"""The timer of a store: it follows the log in two ways.

    TimerEntries    derived: a record with a due time that is no half message is pending from its append on
    TimerState      the machine of %SYS%TIMER: a TimerRecord says of which records that is over

Both lead to the same rows (`pending.py`). An entry stands before the record that ends it, so a start takes all entries first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from protomq.v1.state_pb2 import TimerEnd, TimerRecord
from protomq.wire.record import FLAG_DUE_TIME, FLAG_KIND_HALF, FLAG_KIND_MASK, encode_varint
from protomq.wire.topics import TIMER_TOPIC
from protomq_broker.store.log.append import AppendRequest, ScannedRecords
from protomq_broker.store.state.machine import Carrier, Snapshot

from .pending import PendingTimers
from .recalled import recalled_key

log = logging.getLogger(__name__)

_POSITIONS_TAG, _DUE_TIMES_TAG, _SIZES_TAG = (
    TimerRecord.DESCRIPTOR.fields_by_name[name].number << 3 | 2  # packed
    for name in ("positions", "due_times_ms", "sizes")
)
RECORD_ROWS_MAX: Final = 4_096
"""Messages of which one TimerRecord tells, at most."""


class Watch:
    """What has ended since it began: whoever prepares copies on another thread than the writer's looks here before they are appended."""

    def __init__(self) -> None:
        self._ended: list[NDArray[Any]] = []
        self._has_all_ended = False

    def note(self, positions: NDArray[Any]) -> None:
        """These are pending no more. Writer thread."""
        self._ended.append(positions)

    def note_all(self) -> None:
        """Nobody can tell any more: all are taken to have ended. Writer thread."""
        self._has_all_ended = True

    def has_ended(self, rows: NDArray[Any]) -> NDArray[np.bool_]:
        """Which of the rows, which were pending when the watch began, are so no more."""
        if self._has_all_ended:
            return np.ones(len(rows), np.bool_)
        if not self._ended:
            return np.zeros(len(rows), np.bool_)
        return np.isin(rows["position"], np.concatenate(self._ended))


class TimerEntries:
    """Implements `Derived`; what it writes, `TimerState` does."""

    outlives_topics = True  # who takes what is due asks whether its topic is there
    takes_plain = False

    def __init__(self, pending: PendingTimers) -> None:
        self.replay_from = 0
        self.needs_rebuild = False
        self.damage = ""
        self._pending = pending
        self._log_start = 0

    def load(self, log_start: int) -> None:
        """Takes over what the files hold. The log begins at `log_start`."""
        self._log_start = log_start
        self._pending.load()
        damage = self._pending.damage
        if 0 < self._pending.entries_from < log_start:
            # What came and went in between, the log has no more. All that is alive stands in it, too.
            damage = f"the timer's files end at {self._pending.entries_from}, and the log begins behind them"
            self._pending.start_rebuild()
        if not self._pending.entries_from:
            self._pending.rows_from = log_start
        self.replay_from, self.damage = self._pending.entries_from, damage

    def start_rebuild(self) -> None:
        """Forgets everything."""
        self._pending.start_rebuild()
        self._pending.rows_from = self._log_start
        self.needs_rebuild, self.replay_from = False, 0

    def replay(self, records: ScannedRecords) -> None:
        """Takes those that have a due time."""
        chosen = is_timed(records.flags) & (records.positions >= self.replay_from)
        if not chosen.any():
            return
        positions, sizes = records.positions[chosen], records.sizes[chosen]
        end_position = int(positions[-1] + sizes[-1])
        self._pending.note(records.due_times_ms[chosen], positions, sizes, end_position)

    def pass_over(self, start_position: int, end_position: int) -> None:
        """What is damaged can be delivered to nobody, and is not pending. What the log says of its end counts for nothing."""
        start = max(start_position, self.replay_from)
        if start < end_position:
            self._pending.pass_over(start, end_position)

    def forget_deleted(self, positions: Mapping[str, int]) -> None:
        """Nothing to do: who takes what is due asks whether its topic is there."""

    def truncate(self, end_position: int) -> None:
        """The log ends here. Files that know more are not of this log: they are ignored, and the log is read for what is pending."""
        if max(self._pending.entries_from, self._pending.removals_from) > end_position:
            log.warning("the timer's files are ahead of the log: they are rebuilt from it")
            self.needs_rebuild = True

    def apply(self, requests: Sequence[AppendRequest]) -> None:
        """Takes those that have a due time."""
        for request in requests:
            region = request.region
            if region.flags & FLAG_DUE_TIME and region.flags & FLAG_KIND_MASK != FLAG_KIND_HALF:
                self._apply(request)

    def _apply(self, request: AppendRequest) -> None:
        region, at = request.region, request.physical_offset
        due_times_ms: Any = region.due_times_ms
        positions: Any = [at]
        sizes: Any = len(region.data)
        if region.starts is not None:
            positions, sizes = region.starts + at, region.sizes
        self._pending.note(due_times_ms, positions, sizes, at + len(region.data))

    def remove_topic(self, topic: str) -> None:
        """Nothing to do: who takes what is due asks whether its topic is there."""

    def flush(self) -> None:
        """Memory to files, without a sync."""
        self._pending.flush()

    def checkpoint(self, position: int) -> None:
        """Nothing to do: the snapshot of `TimerState` has everything."""

    def delete_below(self, log_start: int) -> None:
        """Nothing to do: what was pending there has been carried forward."""

    def close(self) -> None:
        """Nothing is open but files that close themselves."""


class TimerState:
    """Implements `StateMachine`.

    Attributes: replay_from: what the log has before this position is in the state already.
    """

    topic = TIMER_TOPIC

    def __init__(self, pending: PendingTimers) -> None:
        self._pending = pending
        self.replay_from = pending.removals_from
        self.ended_counts = dict.fromkeys(TimerEnd.values(), 0)
        """How many came to which end since `begin_counting`."""
        self.carried_bytes = 0
        """How much was carried forward since then."""
        self._watches: list[Watch] = []

    def apply(self, body: bytes, position: int) -> Sequence[str]:
        """Takes the body of the record at `position`; no topic goes with it."""
        try:
            record = TimerRecord.FromString(body)
        except DecodeError:
            log.error("the record of %s at position %d does not parse", TIMER_TOPIC, position)
            return ()
        positions = np.array(record.positions, np.uint64)
        due_times_ms = np.array(record.due_times_ms, np.uint64)
        sizes = np.array(record.sizes, np.uint32)
        if not len(positions) == len(due_times_ms) == len(sizes):
            log.error(
                "the columns of the record of %s at position %d differ", TIMER_TOPIC, position
            )
            return ()
        if len(positions):
            key = b""
            if record.end == TimerEnd.TIMER_END_RECALLED and record.producer_id:  # earlier versions wrote no id
                message_id = (record.producer_id, record.producer_epoch, record.sequence)
                key = recalled_key(record.due_times_ms[0], message_id)
            self._pending.note_removed(due_times_ms, positions, position + 1, sizes, key)
        self._pending.log_time_ms = max(self._pending.log_time_ms, record.log_time_ms)
        self.ended_counts[record.end] = self.ended_counts.get(record.end, 0) + len(positions)
        if record.end == TimerEnd.TIMER_END_CARRIED:
            self.carried_bytes += int(sizes.sum())
        for watch in self._watches:
            watch.note(positions)
        return ()

    def begin_counting(self) -> None:
        """A start has read everything: what comes now happens."""
        self.ended_counts = dict.fromkeys(TimerEnd.values(), 0)
        self.carried_bytes = 0

    def begin_rebuild(self, log_start: int) -> None:
        """See `PendingTimers.begin_rebuild`; who prepares copies of rows is told that nobody knows of them. Writer thread."""
        for watch in self._watches:
            watch.note_all()
        self._pending.begin_rebuild(log_start)

    # Any thread.

    @contextmanager
    def watch(self) -> Iterator[Watch]:
        """Notices from here on what ends."""
        watch = Watch()
        self._watches = [*self._watches, watch]
        try:
            yield watch
        finally:
            self._watches = [other for other in self._watches if other is not watch]

    def carry(self, cut: int) -> Sequence[Carrier]:
        """Nothing to do: the store carries messages as a whole."""
        return ()

    def unsaved(self) -> Snapshot | None:
        """All that is pending at this moment; nothing while not everything is known."""
        if self._pending.is_rebuilding:
            return None
        return Snapshot(self._pending.freeze(), self._pending.checkpoint)


def ended_columns(body: bytes) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint32]]:
    """(due times, positions, sizes) of which a record of %SYS%TIMER tells; none if it does not parse, which `apply` has said."""
    try:
        record = TimerRecord.FromString(body)
    except DecodeError:
        record = TimerRecord()
    if not len(record.due_times_ms) == len(record.positions) == len(record.sizes):
        record = TimerRecord()
    return np.array(record.due_times_ms, np.uint64), np.array(record.positions, np.uint64), np.array(record.sizes, np.uint32)


def timer_record(
    rows: NDArray[Any],
    end: TimerEnd.ValueType,
    log_time_ms: int,
    message_id: tuple[int, int, int] = (0, 0, 0),
) -> bytes:
    """The body of a record that says what became of these rows. `message_id`: of the one that was recalled."""
    assert 0 < len(rows) <= RECORD_ROWS_MAX
    columns = b"".join(
        bytes((tag,)) + encode_varint(len(octets)) + octets
        for tag, octets in (
            (_POSITIONS_TAG, rows["position"].astype("<u8").tobytes()),
            (_DUE_TIMES_TAG, rows["due_ms"].astype("<u8").tobytes()),
            (_SIZES_TAG, rows["size"].astype("<u4").tobytes()),
        )
    )
    producer_id, epoch, sequence = message_id
    record = TimerRecord(
        end=end, log_time_ms=log_time_ms, producer_id=producer_id, producer_epoch=epoch, sequence=sequence
    )
    return columns + record.SerializeToString()


def is_timed(flags: NDArray[np.uint32]) -> NDArray[np.bool_]:
    """Which records are pending from their append on, until a record of %SYS%TIMER says otherwise."""
    return (flags & FLAG_DUE_TIME != 0) & (flags & FLAG_KIND_MASK != FLAG_KIND_HALF)
