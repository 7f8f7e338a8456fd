"""Carries forward: before retention deletes segments, it appends what is alive in them again at the end of the log.

The cleaner of a log-structured file system does the same. So the log is complete from its first segment on. A new replica needs only
the log, and a timer of 40 days does not keep 40 days of log.

    delayed messages that are not due, half messages that are open    copies, with a record that says where they stand now
    messages that were popped and not acknowledged                    move to the queues of retries (pop_carrying.py)
    state machines                                                    records of what they know
    log start                                                         a record: the log begins at the cut; then segments may go

The caller's thread prepares everything, the writer's thread appends it. The writer skips what has ended meanwhile.

What is damaged is lost with its segment. Where the damage was found just now, all is put off until the next try: a replica may heal it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from protomq.v1.state_pb2 import TimerEnd
from protomq.wire.topics import TIMER_TOPIC, TRANSACTIONS_TOPIC
from protomq_broker.store.errors import AppendTooLargeError, StoreError
from protomq_broker.store.log.append import AppendRequest
from protomq_broker.store.log.commit_log import Reserve
from protomq_broker.store.log.positions import Positions
from protomq_broker.store.log.recovery import DamagedRange, chain_at_end
from protomq_broker.store.log.segment import SegmentFolder
from protomq_broker.store.state.half_copies import (
    CARRIED_COUNT,
    HalfCopies,
    copied_size_max_bytes,
    first_halves,
)
from protomq_broker.store.state.log_front import LogFront
from protomq_broker.store.state.machine import Carrier, StateMachine
from protomq_broker.store.state.topics import TopicTable
from protomq_broker.store.state.transactions import Ending, HalfMessage, Transactions, ended_record
from protomq_broker.store.timer.carrying import Copies, copies_of, first_rows
from protomq_broker.store.timer.pending import PendingTimers
from protomq_broker.store.timer.timer import TimerState, Watch, timer_record

from .pop_carrying import PopCarrier

log = logging.getLogger(__name__)

_COUNT_MAX: Final = 1_024
_SIZE_MAX_BYTES: Final = 1 << 20
"""Most bytes of delayed messages that are carried forward together."""


class CarriedStore(Protocol):
    """The parts of the store that carrying forward uses."""

    topics: TopicTable
    pending: PendingTimers
    timer: TimerState
    transactions: Transactions
    positions: Positions

    @property
    def damaged_ranges(self) -> Sequence[DamagedRange]: ...

    @property
    def append_size_max_bytes(self) -> int: ...

    def append_state(
        self, topic: str, bodies: Sequence[bytes], reserve: Reserve = Reserve.STATE
    ) -> int: ...

    def append_moved(
        self,
        copies: Sequence[AppendRequest],
        states: Sequence[tuple[str, Sequence[bytes]]],
        reserve: Reserve = Reserve.STATE,
    ) -> int: ...

    def read_records(
        self, positions: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> tuple[bytes, NDArray[np.int64], NDArray[np.bool_]]: ...

    def half_copies(
        self, halves: Sequence[HalfMessage], *, is_half: bool = False
    ) -> HalfCopies: ...

    def has_topic_of(self, topic: str, queue_id: int, position: int) -> bool: ...

    def flush(self) -> int: ...


class CarryForward:
    """See the module's docstring."""

    def __init__(
        self,
        store: CarriedStore,
        folder: SegmentFolder,
        machines: Iterable[StateMachine],
        front: LogFront,
        pop_carrier: PopCarrier,
        on_writer: Callable[[Callable[[], None]], None],
    ) -> None:
        self._store = store
        self._folder = folder
        self._machines = tuple(machines)
        self._front = front
        self._pop_carrier = pop_carrier
        self._on_writer = on_writer
        self._known_damage = store.damaged_ranges
        self._lost_count = 0
        """Delayed messages that are lost once the segments go."""

    def forward(self, cut: int) -> None:
        """Appends again what is alive before `cut`, and syncs it. Then it appends, durably, the record that the log begins at `cut`.

        Raises StoreError if that fails; then nothing may be deleted.
        """
        self._known_damage = self._store.damaged_ranges
        self._lost_count = 0
        self._carry_pending(cut)
        self._carry_halves(cut)
        self._pop_carrier.move_below(cut, self._check_loss)
        for machine in self._machines:
            for carry in machine.carry(cut):
                self._on_writer(partial(self._carry, machine.topic, carry))
        self._sync()
        crc = chain_at_end(self._folder.at(cut - 1), unreadable_is_damage=True)
        start = self._front.start_record(cut, crc)
        self._on_writer(partial(self._carry, self._front.topic, Carrier(lambda _: start, ())))
        self._sync()
        if self._lost_count:  # If this fails before, it is tried again, and nothing is lost yet.
            log.error("%d delayed messages are damaged, and are lost with their segment", self._lost_count)

    def forward_popped(self, cut: int) -> None:
        """Appends again, and syncs, what was popped before `cut` since `forward`: replicas took their time. Raises StoreError."""
        self._known_damage = self._store.damaged_ranges
        self._pop_carrier.move_below(cut, self._check_loss)
        self._sync()

    def _check_loss(self) -> None:
        """Messages are damaged, and would be lost. Raises StoreError if the damage was found just now."""
        if self._store.damaged_ranges is not self._known_damage:
            raise StoreError("segments that were to be deleted are damaged: they stay until the next try, since a replica may heal them")

    def tell_untold(self) -> None:
        """Appends missing records of states: of topics that are known only from their messages, or from a file of an earlier version.
        Writer thread."""
        try:
            for machine in self._machines:
                for carry in machine.carry(0):
                    self._carry(machine.topic, carry)
        except StoreError as error:
            # Carrying forward appends these states before the segments go that still report them.
            log.warning("some states have no record yet: %s", error)

    def _carry(self, topic: str, carry: Carrier) -> None:
        """Appends one slice of a state on the writer thread, with its present values; in several appends if segments are small."""
        body = carry()
        if not body:
            return
        try:
            self._store.append_state(topic, [body], Reserve.CARRIED)
        except AppendTooLargeError:
            halves = carry.halves()
            if halves is None:
                raise
            for half in halves:
                self._carry(topic, half)

    def _sync(self) -> None:
        position = self._store.positions.appended
        if self._store.flush() < position:
            raise StoreError(f"what was appended up to position {position} could not be synced")

    def _carry_pending(self, cut: int) -> None:
        """Appends copies of the delayed messages that stand before `cut`."""
        store = self._store
        with store.timer.watch() as watch:
            for rows in store.pending.below(cut):
                while len(rows := rows[~watch.has_ended(rows)]):
                    size_max_bytes = min(_SIZE_MAX_BYTES, store.append_size_max_bytes // 4)
                    part = first_rows(rows, _COUNT_MAX, size_max_bytes)
                    deleted = store.topics.deleted
                    copies = copies_of(
                        part, store.read_records, store.has_topic_of, keeps_due_times=True
                    )
                    if len(copies.unreadable):
                        self._check_loss()
                        # Those that went before are pending until they are due.
                        self._lost_count += int(np.count_nonzero(copies.unreadable["position"] >= self._folder.first_position))
                    self._on_writer(partial(self._append_pending, copies, watch, deleted))
                    rows = rows[
                        np.isin(rows["position"], copies.unreadable["position"], invert=True)
                    ]

    def _append_pending(self, copies: Copies, watch: Watch, deleted: Mapping[str, int]) -> None:
        """Appends copies on the writer thread. If one of them has ended or a topic was deleted, appends nothing; the caller prepares them
        again.
        """
        store = self._store
        if store.topics.deleted is not deleted:
            return
        if watch.has_ended(copies.rows).any() or not len(copies.rows) + len(copies.dropped):
            return
        log_time_ms = store.pending.log_time_ms
        ends = (
            (copies.rows, TimerEnd.TIMER_END_CARRIED),
            (copies.dropped, TimerEnd.TIMER_END_DROPPED),
        )
        bodies = [timer_record(rows, end, log_time_ms) for rows, end in ends if len(rows)]
        store.append_moved(copies.requests, [(TIMER_TOPIC, bodies)], Reserve.CARRIED)

    def _carry_halves(self, cut: int) -> None:
        """Appends again the half messages before `cut` that are open."""
        store = self._store
        while halves := store.transactions.below(cut, CARRIED_COUNT):
            first = first_halves(halves, copied_size_max_bytes(store.append_size_max_bytes))
            self._on_writer(partial(self._append_halves, first))

    def _append_halves(self, halves: Sequence[HalfMessage]) -> None:
        """Appends again, on the writer thread, the half messages that are still open and still stand where they stood."""
        transactions = self._store.transactions
        live = [
            half for half in halves if (known := transactions.find(half.key)) and known.half == half
        ]
        copies = self._store.half_copies(live, is_half=True)
        bodies = []
        if copies.halves:
            bodies.append(transactions.carried_record([half.key for half in copies.halves]))
        if copies.unreadable:
            self._check_loss()
            lost = [half.key for half in copies.unreadable]
            bodies.append(ended_record(lost, bytes([Ending.EXPIRED]) * len(lost)))
        if bodies:
            self._store.append_moved(copies.requests, [(TRANSACTIONS_TOPIC, bodies)], Reserve.CARRIED)
        if copies.unreadable:
            log.error(
                "%d half messages are damaged, and are lost with their segment: their transactions expire",
                len(copies.unreadable),
            )
