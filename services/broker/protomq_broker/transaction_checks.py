"""Check-backs: asks producers about transactions that nobody has ended, and expires a transaction after its last check-back.

    due < record "checked" < readable < a held call of the group is answered; the producer ends the transaction, or is asked again

Rules:
- A half message is asked about once it is `immunity_ms` old, then every `interval_ms`, `check_count_max` times. It is that old by the
  clock of checks. Where its store time is behind that clock, a record of the same append says when it is due. A check counts when it
  is made, whether or not a producer of the group was there (as with RocketMQ). The next interval later the transaction expires: its
  message goes to TRANS_CHECK_MAX_TIME_TOPIC, and nobody else gets it.
- The broker asks the producers of the group in turn. If there is none, it asks the first that comes, at once.
- A question has the number that its own record made, however late that is stored. So no two questions have the same number.
- The broker never asks about a damaged half message, and never expires it: it waits for healing, or for an operator. Once it can be read,
  producers are asked at least once more. One that `protomq log repair` has taken out expires after its checks: there is no message.
- A timer of the lane runs while a transaction is open. Messages are read in batches of a few milliseconds.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

import numpy as np

from protomq.v1.record_pb2 import RecordBatch
from protomq.v1.transaction_service_pb2 import TransactionCheck
from protomq.wire.record import encode_record_field
from protomq.wire.topics import EXPIRED_TOPIC, TRANSACTIONS_TOPIC

from .check_clock import CheckClock
from .said_once import SaidOnce
from .store.state.half_copies import copied_size_max_bytes, first_halves
from .store.state.half_messages import half_keys
from .store.state.topics import TopicConfig
from .store.state.transactions import (
    Ending,
    HalfMessage,
    TransactionKey,
    checked_record,
    due_record,
    ended_record,
)

if TYPE_CHECKING:
    from protomq.v1.record_pb2 import Record
    from protomq_runtime.call import Call
    from protomq_runtime.clock import Clock
    from protomq_runtime.timers import Timer

    from .log_time import LogTime
    from .store.log.append import AppendRequest
    from .store.store import Store
    from .system_writer import SystemWriter
    from .transaction_handles import Handles
    from .waiting_answers import WaitingAnswers

log = logging.getLogger("protomq.broker")

BATCH_COUNT_MAX: Final = 128
"""Most half messages that one turn examines."""
AMENDED_COUNT_MAX: Final = 512
"""Most open transactions that one slice looks at, when the broker begins to lead: 5 ms, if all of them get another time."""
TURN_INTERVAL_MS: Final = 50.0
"""Shortest time between two turns: half messages that fall due in between are asked about together."""
RETRY_INTERVAL_MS: Final = 1_000.0
APART_MAX_MS: Final = 10
"""How far a store time may be from the clock of checks. Log time follows the wall clock to about 2 ms, unless that is set."""
STORED_TIMEOUT_MS: Final = 60_000.0
UNASKED_MAX: Final = 100_000
"""Most transactions that wait for a producer of their group. Beyond that, the broker asks only after the next interval."""
UNASKED_LOOKS_MAX: Final = 1_024
"""Most of them at which one turn looks: nearly all may have ended."""


class _Waiter:
    """A held call of a producer."""

    __slots__ = ("call", "timer")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.timer: Timer | None = None


class TransactionChecks:
    """The send lane."""

    def __init__(
        self,
        store: Store,
        writer: SystemWriter,
        waiting: WaitingAnswers,
        log_time: LogTime,
        clock: Clock,
        handles: Handles,
    ) -> None:
        self._store = store
        self._writer = writer
        self._waiting = waiting
        self._log_time = log_time
        self._clock = clock
        self._check_clock = CheckClock(log_time.now_ms(), clock.monotonic_ms())
        self._handles = handles
        self._to_amend: list[TransactionKey] | None = None
        """Those whose times are still to be looked at, the first one last; None: the broker has not begun to lead."""
        self._apart_ms = 0
        """How far store times were behind the clock of checks then."""
        self._timer: Timer | None = None
        self._timer_due_ms = 0
        self._waiters: dict[str, deque[_Waiter]] = {}
        self._unasked: dict[str, dict[TransactionKey, int]] = {}
        """By group: transactions whose check found no producer, with the number of the check."""
        self._unasked_count = 0
        self._offered_count = 0
        """How often a transaction was to be kept since ended ones were dropped."""
        self._unread: set[TransactionKey] = set()
        """Those that could not be read when producers were to be asked about them last, or when they were to expire."""
        self._said = SaidOnce()

    # Time.

    def now_ms(self) -> int:
        """The time that decides which checks are due."""
        store_time_ms = self._store.positions.tail.store_time_ms
        return self._check_clock.now_ms(
            self._log_time.now_ms(), store_time_ms, self._clock.monotonic_ms()
        )

    def begun_record(self, requests: Sequence[AppendRequest]) -> bytes | None:
        """The record for the append of these sends, which says when their half messages are due; None if their store times do.

        Store times stand still while the wall clock is behind them. By those alone, producers would be asked at once.
        """
        now_ms = self.now_ms()
        if now_ms - self._store.next_store_time_ms() <= APART_MAX_MS:
            return None
        return self._store.transactions.begun_record(half_keys(requests), now_ms)

    def begin(self) -> None:
        """Called when the broker begins to lead."""
        if self._timer is not None:
            self._timer.cancel()
        self._run()

    def _begin_amending(self) -> None:
        transactions = self._store.transactions
        self._unread.update(transactions.checked_too_often())
        apart_ms = self.now_ms() - self._store.next_store_time_ms()
        self._apart_ms = apart_ms if apart_ms > APART_MAX_MS else 0
        self._to_amend = [known.half.key for known in transactions.open_transactions()]
        self._to_amend.reverse()

    def _amend(self) -> None:
        """Says again when some of the open transactions are due, where the clock of checks is another one than before this start.

        After another boot of the machine, or a fail-over, it may be behind. Then they would be asked about late. An earlier version let
        store times alone decide. Where the wall clock is behind, they would be asked about early.
        """
        assert self._to_amend is not None
        keys = self._to_amend[: -AMENDED_COUNT_MAX - 1 : -1]
        amended = self._store.transactions.amended(keys, self.now_ms(), self._apart_ms)
        parts = [amended[start : start + BATCH_COUNT_MAX] for start in range(0, len(amended), BATCH_COUNT_MAX)]
        if parts:
            self._writer.append(TRANSACTIONS_TOPIC, list(map(due_record, parts)))
            self._waiting.request_flush()
        del self._to_amend[-len(keys) :]
        self._store.transactions.next_due_ms()  # which drops the times that they had: all at once would take long

    def arm(self) -> None:
        """Called when a check may be due earlier than before."""
        due_ms = self._store.transactions.next_due_ms()
        if due_ms is None or (self._timer is not None and self._timer_due_ms <= due_ms):
            return
        self._set_timer(due_ms, max(float(due_ms - self.now_ms()), TURN_INTERVAL_MS))

    def _set_timer(self, due_ms: int, wait_ms: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due_ms = due_ms
        self._timer = self._writer.lane.call_later(wait_ms, self._run)

    def _run(self) -> None:
        self._timer = None
        try:
            if self._to_amend is None:
                self._begin_amending()
            if self._to_amend:
                self._amend()
            if self._to_amend:  # nobody is asked before all have their times
                self._set_timer(0, 0.0)
                return
            self.turn()
        except Exception as error:
            if self._said.is_due(type(error).__name__):
                log.exception("transactions could not be checked; the broker tries again each second")
            self._set_timer(self.now_ms(), RETRY_INTERVAL_MS)
            return
        self.arm()

    def turn(self) -> bool:
        """Asks about one batch of due half messages. Returns whether any were due."""
        now_ms = self.now_ms()
        due = self._store.transactions.due(now_ms, BATCH_COUNT_MAX)
        # All checks of one may have gone by while it was damaged.
        waiting = [half for half in due.to_expire if half.key in self._unread and not self._store.is_repaired(half.position)]
        to_check = [*due.to_check, *waiting]
        to_expire = [half for half in due.to_expire if half not in waiting]
        if to_expire:
            self._expire(self._first(to_expire), now_ms)
        if to_check:
            self._check(self._first(to_check), now_ms)
        return bool(due.to_check or due.to_expire)

    def _first(self, halves: Sequence[HalfMessage]) -> list[HalfMessage]:
        return first_halves(halves, copied_size_max_bytes(self._store.append_size_max_bytes))

    def _expire(self, halves: Sequence[HalfMessage], now_ms: int) -> None:
        copies = self._store.half_copies(halves, topic=EXPIRED_TOPIC)
        lost = [half for half in copies.unreadable if self._store.is_repaired(half.position)]
        damaged = [half for half in copies.unreadable if half not in lost]
        bodies = []
        if copies.halves or lost:
            keys = [half.key for half in (*copies.halves, *lost)]
            bodies.append(ended_record(keys, bytes([Ending.EXPIRED]) * len(keys)))
        if damaged:
            self._say_unreadable(damaged)
            self._unread.update(half.key for half in damaged)
            bodies.append(checked_record([half.key for half in damaged], now_ms))
        self._writer.append_moved(copies.requests, [(TRANSACTIONS_TOPIC, bodies)])
        if lost:  # What cannot be appended is tried again, and they are said once.
            log.error("%d half messages are lost: `protomq log repair` has taken them out. Their transactions expire", len(lost))
        if copies.requests and self._store.topics.find(EXPIRED_TOPIC) is None:
            self._store.topics.add([TopicConfig(EXPIRED_TOPIC, 1, 1, writable=False)])
        self._waiting.request_flush()

    def _check(self, halves: Sequence[HalfMessage], now_ms: int) -> None:
        keys = [half.key for half in halves]
        end_position = self._writer.append(TRANSACTIONS_TOPIC, [checked_record(keys, now_ms)])
        find = self._store.transactions.find
        counts = {key: known.check_count for key in keys if (known := find(key)) is not None}

        def ask(failure: Exception | None) -> None:
            if failure is None:
                self._ask(counts)

        # The record of a check must be readable before any producer hears of it.
        self._waiting.wait(self._writer.lane, end_position, STORED_TIMEOUT_MS, ask)
        self._waiting.request_flush()

    # Producers.

    def wait(self, group: str, call: Call, hold_ms: float) -> None:
        """Takes the call of a producer of the group: answers it at once, or holds it."""
        if not call.closed and (checks := self._take_unasked(group)):
            _answer(call, checks)
            return
        if hold_ms <= 0:
            _answer(call, [])
            return
        waiter = _Waiter(call)
        self._waiters.setdefault(group, deque()).append(waiter)
        waiter.timer = self._writer.lane.call_later(hold_ms, partial(self._give_up, group, waiter))
        call.hold(partial(self._forget, group, waiter))
        self._offer_later(group)

    def _offer_later(self, group: str) -> None:
        if group in self._unasked and group in self._waiters:
            self._writer.lane.call_later(0.0, partial(self._offer, group))

    def _offer(self, group: str) -> None:
        """Asks whoever waits. Of the transactions before, none could be read any more, or none was open."""
        waiter = self._take_waiter(group)
        if waiter is None:
            return
        checks = self._take_unasked(group)
        if checks:
            self._end(waiter, checks)
        else:
            self._waiters.setdefault(group, deque()).appendleft(waiter)
        self._offer_later(group)

    def stop(self) -> None:
        """Answers all waiting producers with nothing. Any thread."""
        self._writer.post(self.close)

    def close(self) -> None:
        """See `stop`."""
        for waiters in list(self._waiters.values()):
            for waiter in list(waiters):
                self._end(waiter, [])
        self._waiters.clear()

    def _take_unasked(self, group: str) -> list[bytes]:
        """Takes the first of those that wait for a producer of the group, as many as fit into an answer. Returns those that can be read."""
        unasked = self._unasked.get(group)
        if unasked is None:
            return []
        find = self._store.transactions.find
        counts: dict[TransactionKey, int] = {}
        halves: list[HalfMessage] = []
        for key, count in islice(unasked.items(), UNASKED_LOOKS_MAX):
            counts[key] = count
            known = find(key)
            if known is not None:
                halves.append(known.half)
                if len(halves) == BATCH_COUNT_MAX:
                    break
        chosen = first_halves(halves)
        self._forget_unasked(group, counts.keys() - {half.key for half in halves[len(chosen) :]})
        return [check for _, _, check in self._checks_of(chosen, counts)]

    def _ask(self, counts: Mapping[TransactionKey, int]) -> None:
        """`counts`: the number of each transaction's check."""
        find = self._store.transactions.find
        halves = [known.half for key in counts if (known := find(key)) is not None]
        by_group: dict[str, list[tuple[TransactionKey, bytes]]] = {}
        for group, key, check in self._checks_of(halves, counts):
            by_group.setdefault(group, []).append((key, check))
        for group, asked in by_group.items():
            waiter = self._take_waiter(group)
            if waiter is not None:
                self._end(waiter, [check for _, check in asked])
                self._forget_unasked(group, [key for key, _ in asked])
            elif group:
                self._keep_unasked(group, {key: counts[key] for key, _ in asked})

    def _take_waiter(self, group: str) -> _Waiter | None:
        """Whoever waits for longest, and is there: of those that are gone, the lane may hear a moment later."""
        waiters = self._waiters.get(group)
        taken = None
        while waiters and taken is None:
            waiter = waiters.popleft()
            if waiter.call.closed:
                self._end(waiter, [])
            else:
                taken = waiter
        if waiters is not None and not waiters:
            del self._waiters[group]
        return taken

    def _forget_unasked(self, group: str, keys: Iterable[TransactionKey]) -> None:
        """Somebody is asked about these now, with a later number."""
        unasked = self._unasked.get(group)
        if unasked is None:
            return
        for key in keys:
            if unasked.pop(key, None) is not None:
                self._unasked_count -= 1
        if not unasked:
            del self._unasked[group]

    def _keep_unasked(self, group: str, counts: Mapping[TransactionKey, int]) -> None:
        self._offered_count += len(counts)
        if self._offered_count >= self._unasked_count:
            self._drop_ended()
        unasked = self._unasked.setdefault(group, {})
        for key, count in counts.items():
            if key in unasked:
                unasked[key] = count
            elif self._unasked_count < UNASKED_MAX:
                unasked[key] = count
                self._unasked_count += 1

    def _drop_ended(self) -> None:
        """Drops transactions that have ended meanwhile, of groups too whose producers never come back."""
        find = self._store.transactions.find
        by_group = {
            group: {key: count for key, count in counts.items() if find(key) is not None} for group, counts in self._unasked.items()
        }
        self._unasked = {group: counts for group, counts in by_group.items() if counts}
        self._unasked_count = sum(map(len, self._unasked.values()))
        self._offered_count = 0

    def _checks_of(
        self, halves: Sequence[HalfMessage], counts: Mapping[TransactionKey, int]
    ) -> list[tuple[str, TransactionKey, bytes]]:
        """For each half message that can be read: its group, its transaction, and the encoded question.

        The question has the message's stored bytes, because its CRC covers them in this form.
        """
        found = []
        fields = self.fields_of(halves)
        read = {half.key for half, _ in fields}
        self._unread |= {half.key for half in halves}
        self._unread -= read
        transactions = self._store.transactions
        if len(self._unread) > 2 * transactions.open_count + BATCH_COUNT_MAX:  # most of them have ended
            self._unread = {key for key in self._unread if transactions.find(key) is not None}
        for half, field in fields:
            check = TransactionCheck(
                transaction_handle=self._handles.encode(half.position, half.key),
                check_count=counts[half.key],
            )
            octets = check.SerializeToString() + b"\x12" + field[1:]
            group = record_of(field).attributes.producer_group
            found.append((group, half.key, octets))
        return found

    def fields_of(self, halves: Sequence[HalfMessage]) -> list[tuple[HalfMessage, bytes]]:
        """Returns the half messages that can be read, by position, with their record fields."""
        halves = sorted(halves, key=lambda half: half.position)
        if not halves:
            return []
        positions = np.array([half.position for half in halves], np.int64)
        sizes = np.array([half.size_bytes for half in halves], np.int64)
        data, starts, is_sound = self._store.read_records(positions, sizes)
        found = []
        unreadable = []
        for half, start, holds in zip(halves, starts.tolist(), is_sound.tolist(), strict=True):
            if holds:
                found.append((half, data[start : start + half.size_bytes]))
            else:
                unreadable.append(half)
        if unreadable:
            self._say_unreadable(unreadable)
        return found

    def _give_up(self, group: str, waiter: _Waiter) -> None:
        """Answers a call whose hold is over."""
        waiter.timer = None
        self._forget(group, waiter)
        if not waiter.call.answered:
            _answer(waiter.call, [])

    def _forget(self, group: str, waiter: _Waiter) -> None:
        """Drops a call whose caller is gone, or whose time is up."""
        if waiter.timer is not None:
            waiter.timer.cancel()
        waiters = self._waiters.get(group)
        if waiters is not None and waiter in waiters:
            waiters.remove(waiter)
            if not waiters:
                del self._waiters[group]

    def _end(self, waiter: _Waiter, checks: Sequence[bytes]) -> None:
        if waiter.timer is not None:
            waiter.timer.cancel()
        _answer(waiter.call, checks)

    def _say_unreadable(self, halves: Sequence[HalfMessage]) -> None:
        if self._said.is_due(halves[0].position):
            log.error(
                "%d half messages cannot be read (the first stands at position %d): their transactions stay open",
                len(halves),
                halves[0].position,
            )


def record_of(field: bytes) -> Record:
    """The record in a record field."""
    (record,) = RecordBatch.FromString(field).records
    return record


def _answer(call: Call, checks: Sequence[bytes]) -> None:
    """With a WaitForChecksResponse; its field 1 is written as that of a RecordBatch."""
    call.answer(b"".join(map(encode_record_field, checks)))
