"""The transactions of a store: how they follow the log, in two ways.

    HalfMessages       derived: a half message is open from its append on
    TransactionState   the machine of %SYS%TRANSACTIONS: a record says which were checked, carried forward, or have ended

Both lead to one state (`transactions.py`). At a start the half messages come first, then the records. Half messages wait until the
records have come to their positions, so that both are taken in the order of the log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from protomq.wire.record import FLAG_KIND_HALF, FLAG_KIND_MASK
from protomq.wire.topics import TRANSACTIONS_TOPIC
from protomq_broker.store.files.disk import Disk, remove_file
from protomq_broker.store.log.append import AppendRequest, RecordRegion, ScannedRecords

from .fresh_halves import FreshHalves
from .machine import Carrier, Snapshot
from .transaction_files import load_transactions, save_transactions
from .transactions import HalfMessage, TransactionKey, Transactions, new_half, new_key

log = logging.getLogger(__name__)


class HalfMessages:
    """Implements `Derived`; what it writes, `TransactionState` does."""

    outlives_topics = False
    takes_plain = False

    def __init__(self, disk: Disk, folder: str, transactions: Transactions) -> None:
        self.replay_from = 0
        self.needs_rebuild = False
        self.damage = ""
        self._disk = disk
        self._folder = folder
        self._transactions = transactions
        self._replayed: list[ScannedRecords] = []
        self.fresh = FreshHalves()
        """What of them need not be read again."""

    def load(self, log_start: int) -> None:
        """Takes over what the file holds. The log begins at `log_start`."""
        self._disk.make_folder(self._folder)
        found = load_transactions(self._disk, self._folder)
        if isinstance(found, str):
            self.start_rebuild()
            self.damage = found
            return
        if 0 < found.position < log_start:
            # What ended in between, the log does not tell any more. All that is open stands in it, too.
            self.start_rebuild()
            self.damage = f"the file of transactions ends at {found.position}, and the log begins behind that"
            return
        self._transactions.load(found.known)
        self._transactions.forget_below(log_start)
        self.replay_from, self.damage = found.position, ""

    def start_rebuild(self) -> None:
        """Forgets everything."""
        self._transactions.forget_all()
        self._replayed.clear()
        for name in self._disk.list(self._folder):
            remove_file(self._disk, f"{self._folder}/{name}")
        self.needs_rebuild, self.replay_from = False, 0

    def replay(self, records: ScannedRecords) -> None:
        """Keeps the half messages."""
        chosen = _is_half(records.flags) & (records.positions >= self.replay_from)
        if chosen.any():
            self._replayed.append(records.select(chosen))

    def open_replayed(self, position: int | None = None) -> None:
        """Opens those before a position; all of them without one: the start is done."""
        kept: list[ScannedRecords] = []
        for records in self._replayed:
            if position is not None and int(records.positions[-1]) >= position:
                is_behind = records.positions >= position
                kept.append(records.select(is_behind))
                records = records.select(~is_behind)
            self._transactions.open(_halves_of(records))
        self._replayed = kept

    def pass_over(self, start_position: int, end_position: int) -> None:
        """Nothing to do: what is damaged can be committed by nobody."""

    def forget_deleted(self, positions: Mapping[str, int]) -> None:
        """See `Derived`."""
        for topic, end_position in positions.items():
            self._transactions.forget_topic(topic, end_position)
            self._replayed = [
                kept
                for records in self._replayed
                if (kept := _without(records, topic, end_position)).count
            ]

    def truncate(self, end_position: int) -> None:
        """The log ends here. A file that knows more is not of this log: it is ignored, and the log is read again."""
        if self.replay_from > end_position:
            log.warning("the file of transactions is ahead of the log: it is rebuilt from it")
            self.needs_rebuild = True

    def apply(self, requests: Sequence[AppendRequest]) -> None:
        """Takes the half messages."""
        for request in requests:
            if request.region.flags & FLAG_KIND_MASK == FLAG_KIND_HALF:
                halves = halves_of(request)
                self._transactions.open(halves)
                self.fresh.note(request, halves)

    def remove_topic(self, topic: str) -> None:
        """See `Derived`."""
        self._transactions.forget_topic(topic)

    def flush(self) -> None:
        """Nothing to do: the snapshot of `TransactionState` has everything."""

    def checkpoint(self, position: int) -> None:
        """Nothing to do: the snapshot of `TransactionState` has everything."""

    def delete_below(self, log_start: int) -> None:
        """What is open there has been carried forward; what has ended is forgotten."""
        self._transactions.forget_below(log_start)

    def close(self) -> None:
        """Nothing is open."""


class TransactionState:
    """Implements `StateMachine`.

    Attributes: replay_from: what the log has before this position is in the state already.
    """

    topic = TRANSACTIONS_TOPIC

    def __init__(
        self, disk: Disk, folder: str, transactions: Transactions, halves: HalfMessages
    ) -> None:
        """`halves` was replayed."""
        self.replay_from = halves.replay_from
        self._disk = disk
        self._folder = folder
        self._transactions = transactions
        self._halves = halves

    def apply(self, body: bytes, position: int) -> Sequence[str]:
        """Takes the body of the record at `position`; no topic goes with it."""
        self._halves.open_replayed(position)
        self._transactions.apply(body, position)
        self.replay_from = position + 1
        return ()

    def end_replay(self) -> None:
        """There are no more records: what the log said about the past is not counted."""
        self._halves.open_replayed()
        self._transactions.start_counting()

    def carry(self, cut: int) -> Sequence[Carrier]:
        """Nothing to do: the store carries half messages as a whole."""
        return ()

    def unsaved(self) -> Snapshot:
        """All that is known at this moment."""
        known = self._transactions.known()
        return Snapshot(
            known.end_position, partial(save_transactions, self._disk, self._folder, known)
        )


def halves_of(request: AppendRequest) -> list[HalfMessage]:
    """The half messages of a request that was appended: sent now, or carried forward."""
    region, at = request.region, request.physical_offset
    if region.identities is not None:
        keys = list(map(new_key, region.identities.tolist()))
    else:
        keys = region_keys(region)
    positions = [at] if region.starts is None else (region.starts + at).tolist()
    sizes = [len(region.data)] if region.sizes is None else region.sizes.tolist()
    alike = map(repeat, (region.topic, request.queue_id, request.store_time_ms))
    return list(map(new_half, zip(keys, positions, sizes, *alike, strict=False)))


def region_keys(region: RecordRegion) -> list[TransactionKey]:
    """Names of the transactions that a request of half messages begins."""
    producer = map(repeat, (region.producer_id, region.producer_epoch))
    return list(map(new_key, zip(*producer, region_sequences(region), strict=False)))


def half_keys(requests: Sequence[AppendRequest]) -> list[TransactionKey]:
    """Names of the transactions that the half messages among some sends begin."""
    regions = [request.region for request in requests]
    return [key for region in regions if region.flags & FLAG_KIND_MASK == FLAG_KIND_HALF for key in region_keys(region)]


def region_sequences(region: RecordRegion) -> range:
    """Sequences of the messages of a request."""
    return range(region.first_sequence, region.first_sequence + region.count)


def _halves_of(records: ScannedRecords) -> list[HalfMessage]:
    columns = (
        records.producer_ids,
        records.producer_epochs,
        records.sequences,
        records.positions,
        records.sizes,
        records.topic_indexes,
        records.queue_ids,
        records.store_times_ms,
    )
    return [
        HalfMessage(
            TransactionKey(producer_id, epoch, sequence),
            position,
            size,
            records.topics[topic],
            queue_id,
            time_ms,
        )
        for producer_id, epoch, sequence, position, size, topic, queue_id, time_ms in zip(
            *(column.tolist() for column in columns), strict=True
        )
    ]


def _without(records: ScannedRecords, topic: str, end_position: int) -> ScannedRecords:
    """The records but those of a topic before a position."""
    if topic not in records.topics:
        return records
    is_gone = records.topic_indexes == records.topics.index(topic)
    return records.select(~(is_gone & (records.positions < end_position)))


def _is_half(flags: NDArray[np.uint32]) -> NDArray[np.bool_]:
    return flags & FLAG_KIND_MASK == FLAG_KIND_HALF
