"""One queue as one group pops it. Pure: it is told what happened, by records, and is asked what may be handed out.

    queue offsets    0 ....... 40 41 42 43 44 ........ next_offset ...........
                     done      held  done  held, due,  nobody has looked at these
                                           waiting

Rules:
- Below `next_offset` a message is open, or it is done: acknowledged, dead, lost, or skipped. Only the open ones are known one by one.
- An open message is held by a hand-out until its deadline. Behind that it is due: the next pop may have it, and the receipt of the
  hand-out is good until then. A message that waits for its message group is open, too, and was never handed out (attempt 0).
- A delivery that nobody has seen is taken back. The hand-out is said again with the attempt before, or the message
  waits as before the first.
- Of each message group (sharding hash) only the first open message may be handed out by pops in order.
- There is no clock here. A message that was due is taken from its holder by the record that hands it out again, or by a reset.
- A reset is a statement with another `next_offset` and nothing open: what was open is forgotten. Numbers of hand-outs go on, so no
  receipt from before is good again.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import groupby, repeat
from operator import itemgetter
from typing import Final, NamedTuple

from protomq.v1.state_pb2 import HandOut, PopError, PoppedQueue
from protomq.wire.runs import add_run, bounds, offsets_in, runs_of

from .acknowledged import Acknowledged

OPEN_MAX: Final = 10_000
"""Open messages of one queue and group: then nothing new is handed out before some are done. RocketMQ's popInflightMessageThreshold."""
ERRORS_MAX: Final = 1_000
"""Open messages of one queue and group of which it is known why they failed: of more, what was said first is forgotten. So a statement
of the queue stays well below what a record takes."""
_LONG_RUN: Final = 8
"""Messages of a run from which it is cheaper to settle it as one."""


class QueueOfGroup(NamedTuple):
    """Which queue of which group."""

    group: str
    topic: str
    queue_id: int


class OpenCounts(NamedTuple):
    """Open messages of a queue and group: those that members hold, those that are due, and those that wait for their sharding key."""

    held: int
    due: int
    waiting: int


class Holding:
    """What messages that were handed out together and are held equally have in common.

    Attributes:
        number: of the hand-out; 0: messages that were never handed out.
        time_ms: pop time of the hand-out.
        deadline_ms: pop time up to which nobody else gets them.
        attempt: which delivery it is, from 1; 0: none yet.
        runs: which messages it had at first.
        left: how many of them it has still.
    """

    __slots__ = ("attempt", "deadline_ms", "left", "number", "runs", "time_ms")

    def __init__(
        self, number: int, time_ms: int, deadline_ms: int, attempt: int, runs: Sequence[int]
    ) -> None:
        self.number = number
        self.time_ms = time_ms
        self.deadline_ms = deadline_ms
        self.attempt = attempt
        self.runs = runs
        self.left = 0


class OpenMessages:
    """The state of one queue of a group. The machine guards it.

    Attributes:
        key: which it is.
        incarnation: of the topic.
        next_offset: everything below was looked at.
        hand_out_count: numbers that hand-outs have had.
        acknowledged: which hand-outs have acknowledged messages, of late.
        open: the open messages, and who holds them.
        moved: of open messages whose segment is gone: where the copy stands in the group's retry topic.
        stored_ms: of the same: when the message was stored in this queue. Unknown of those that an earlier version copied.
        errors: of open messages that failed: what a holder said of it last.
        since: position of the first record that is needed for knowing all this.
        until: what records before this position say is in it.
    """

    __slots__ = (
        "_due", "_entry_count", "_groups", "_hashes", "_ready", "acknowledged", "errors", "hand_out_count", "incarnation", "key",
        "moved", "next_offset", "open", "since", "stored_ms", "until",
    )  # fmt: skip

    def __init__(self, key: QueueOfGroup, incarnation: int, since: int, acknowledged: Acknowledged) -> None:
        self.key = key
        self.acknowledged = acknowledged
        self.incarnation = incarnation
        self.since = since
        self.until = 0
        self._forget()

    def _forget(self) -> None:
        self.next_offset = 0
        self.hand_out_count = 0
        self.open: dict[int, Holding] = {}
        self.moved: dict[int, int] = {}
        self.stored_ms: dict[int, int] = {}
        self.errors: dict[int, str] = {}
        self._hashes: dict[int, int] = {}
        self._groups: dict[int, deque[int]] = {}  # in the order of the queue; ends with open ones
        self._due: list[tuple[int, int, Holding]] = []  # a heap; one that holds nothing is left out when it comes up
        self._ready: list[int] = []  # a heap: waiting ones that are the first of their group; may name others
        self._entry_count = 0

    # Records.

    def take(self, told: PoppedQueue, position: int) -> None:
        """What a record at `position` says of this queue; nothing new if that is known."""
        if position < self.until:
            return
        self.until = position + 1
        if told.whole:
            self._forget()
            self.since = position
            self.hand_out_count = told.hand_out_count
        if told.acked_runs:
            self._settle(told.acked_runs, self.acknowledged)
        for ended in (told.dead_runs, told.lost_runs):
            if ended:
                self._settle(ended, None)
        next_offset = told.next_offset
        if next_offset > self.next_offset:
            self.next_offset = next_offset
        if told.grouped_offsets:
            for offset, sharding_hash in zip(told.grouped_offsets, told.sharding_hashes, strict=True):
                self._hashes[offset] = sharding_hash
                self._groups.setdefault(sharding_hash, deque()).append(offset)
        if told.waiting_runs:
            self._wait(told.waiting_runs)
        for change in told.changes:
            self._change(change.deadline_ms, change.runs)
        for hand_out in told.hand_outs:
            number, runs = hand_out.number, tuple(hand_out.runs)
            self._hold(Holding(number, hand_out.time_ms, hand_out.deadline_ms, hand_out.attempt, runs))
            if number > self.hand_out_count:
                self.hand_out_count = number
        if told.moved_offsets:
            for offset, retry_offset in zip(told.moved_offsets, told.retry_offsets, strict=True):
                if offset in self.open:
                    self.moved[offset] = retry_offset
            for offset, stored_ms in zip(told.moved_offsets, told.moved_store_times_ms, strict=False):  # or there are none
                if offset in self.open and stored_ms:
                    self.stored_ms[offset] = stored_ms
        for failed in told.errors:
            self._fail(failed.error, failed.runs)

    def _settle(self, runs: Sequence[int], acknowledged: Acknowledged | None) -> None:
        known, hashes, moved, errors = self.open, self._hashes, self.moved, self.errors
        is_plain = not (hashes or moved or errors)
        for first, end in bounds(runs):
            if is_plain and end - first >= _LONG_RUN:
                holdings = list(map(known.pop, range(first, end), repeat(None)))
                held_by = set(holdings)
                for holding in held_by:
                    if holding is not None:
                        holding.left -= holdings.count(holding)
                if acknowledged is not None:
                    for holding, first_of_run, count in _runs_by_holding(holdings, first, is_one=len(held_by) == 1):
                        if holding is not None:
                            acknowledged.add(holding.number, holding.time_ms, first_of_run, count)
                continue
            for offset in range(first, end):
                holding = known.pop(offset, None)
                if holding is None:
                    continue
                holding.left -= 1
                if acknowledged is not None:
                    acknowledged.add(holding.number, holding.time_ms, offset, 1)
                if moved:
                    moved.pop(offset, None)
                    self.stored_ms.pop(offset, None)
                if errors:
                    errors.pop(offset, None)
                if hashes and offset in hashes:
                    self._leave_group(offset)

    def _leave_group(self, offset: int) -> None:
        sharding_hash = self._hashes.pop(offset)
        group = self._groups[sharding_hash]
        while group and group[0] not in self.open:
            group.popleft()
        if not group:
            del self._groups[sharding_hash]
        elif not self.open[group[0]].attempt:
            heapq.heappush(self._ready, group[0])

    def _wait(self, runs: Sequence[int]) -> None:
        holding = Holding(0, 0, 0, 0, runs)
        for offset in offsets_in(runs):
            known = self.open.get(offset)
            if known is not None:  # It was handed out to somebody who never saw it.
                known.left -= 1
            self.open[offset] = holding
            holding.left += 1
            sharding_hash = self._hashes.get(offset)
            if sharding_hash is None or self._groups[sharding_hash][0] == offset:
                heapq.heappush(self._ready, offset)

    def _change(self, deadline_ms: int, runs: Sequence[int]) -> None:
        by_holding: dict[Holding, list[int]] = {}
        for offset in offsets_in(runs):
            known = self.open.get(offset)
            if known is not None and known.attempt:
                by_holding.setdefault(known, []).append(offset)
        for known, offsets in by_holding.items():
            changed = runs_of(offsets)
            self._hold(Holding(known.number, known.time_ms, deadline_ms, known.attempt, changed))

    def _fail(self, error: str, runs: Sequence[int]) -> None:
        errors = self.errors
        for offset in offsets_in(runs):
            if offset in self.open:
                errors.pop(offset, None)
                errors[offset] = error
        while len(errors) > ERRORS_MAX:
            del errors[next(iter(errors))]

    def _hold(self, holding: Holding) -> None:
        known = self.open
        for first, end in bounds(holding.runs):
            offsets = range(first, end)
            if known and not known.keys().isdisjoint(offsets):
                for offset in offsets:
                    if offset in known:
                        known[offset].left -= 1
            known.update(dict.fromkeys(offsets, holding))
            holding.left += end - first
        self._entry_count += 1
        heapq.heappush(self._due, (holding.deadline_ms, self._entry_count, holding))

    # Questions.

    @property
    def low_offset(self) -> int:
        """Everything below is done."""
        return min(self.open, default=self.next_offset)

    @property
    def room(self) -> int:
        """How many more messages may be open."""
        return max(OPEN_MAX - len(self.open), 0)

    def open_counts(self, now_ms: int) -> OpenCounts:
        """How many messages are open, and why."""
        due = held = 0
        for holding in set(self.open.values()):
            if holding.attempt and holding.deadline_ms <= now_ms:
                due += holding.left
            elif holding.attempt:
                held += holding.left
        return OpenCounts(held, due, len(self.open) - held - due)

    @property
    def holds_back(self) -> bool:
        """Whether messages may wait for open ones to be done: for the first of their group, or since there is no room."""
        return bool(self._hashes) or len(self.open) >= OPEN_MAX

    def held_and_lost(
        self, runs: Sequence[int], number: int, time_ms: int
    ) -> tuple[list[int], list[int]]:
        """The runs, parted: what the hand-out of this number and time has, and what it has not. Both in their order."""
        held: list[int] = []
        lost: list[int] = []
        holding_of = self.open.get
        for first, end in bounds(runs):
            offsets = range(first, end)
            # Most runs are held as one: so the hand-outs are compared, not the messages.
            is_held: dict[Holding | None, bool] = {}
            for holding in set(map(holding_of, offsets)):
                is_held[holding] = (
                    holding is not None and holding.number == number and holding.time_ms == time_ms
                )
            if len(is_held) == 1 or len(set(is_held.values())) == 1:
                add_run(held if is_held.popitem()[1] else lost, first, end - first)
                continue
            for offset in offsets:
                add_run(held if is_held[holding_of(offset)] else lost, offset, 1)
        return held, lost

    def is_group_open(self, sharding_hash: int) -> bool:
        """Whether a message of this group is open: then others wait."""
        return sharding_hash in self._groups

    def due(self, now_ms: int, count_max: int, *, in_order: bool = False) -> list[tuple[int, int]]:
        """Offsets and attempts so far of messages whose time is up, the longest due first.

        `in_order`: only those that are the first of their group.
        """
        found: list[tuple[int, int]] = []
        looked_at: list[tuple[int, int, Holding]] = []
        while len(found) < count_max and self.next_due_ms(now_ms) is not None:
            entry = heapq.heappop(self._due)
            looked_at.append(entry)
            holding = entry[2]
            for offset in offsets_in(holding.runs):
                if self.open.get(offset) is not holding:
                    continue
                if in_order and not self._is_first(offset):
                    continue
                found.append((offset, holding.attempt))
                if len(found) == count_max:
                    break
        for entry in looked_at:
            heapq.heappush(self._due, entry)
        return found

    def ready(self, count_max: int) -> list[int]:
        """Messages that were never handed out and wait for nobody any more, in the order of the queue."""
        found: dict[int, None] = {}
        while self._ready and len(found) < count_max:
            offset = heapq.heappop(self._ready)
            holding = self.open.get(offset)
            if holding is not None and not holding.attempt:
                found[offset] = None
        for offset in found:
            heapq.heappush(self._ready, offset)
        return list(found)

    def next_due_ms(self, until_ms: int | None = None) -> int | None:
        """Pop time at which the next message is due; None if none is held, or not `until_ms`."""
        due = self._due
        while due and not due[0][2].left:
            heapq.heappop(due)
        if not due or (until_ms is not None and due[0][0] > until_ms):
            return None
        return due[0][0]

    def next_deadline_ms(self, after_ms: int) -> int | None:
        """Pop time behind `after_ms` at which the next message is due; None if none is held until then."""
        due_ms = self.next_due_ms()
        if due_ms is None or due_ms > after_ms:
            return due_ms
        return min((entry[0] for entry in self._due if entry[0] > after_ms and entry[2].left), default=None)

    def dead(self, now_ms: int, deliveries_max: int, count_max: int) -> list[int]:
        """Messages whose time is up and that were handed out so often, in no order. Others that are due hide none of them."""
        found: list[int] = []
        if self.next_due_ms(now_ms) is None:
            return found
        for due_ms, _, holding in self._due:
            if due_ms > now_ms or not holding.left or holding.attempt < deliveries_max:
                continue
            found += [offset for offset in offsets_in(holding.runs) if self.open.get(offset) is holding]
            if len(found) >= count_max:
                break
        return found[:count_max]

    def _is_first(self, offset: int) -> bool:
        sharding_hash = self._hashes.get(offset)
        return sharding_hash is None or self._groups[sharding_hash][0] == offset

    def reset_to(self, next_offset: int) -> PoppedQueue:
        """What a record says so that the group goes on at this offset, and nothing is open."""
        return PoppedQueue(
            consumer_group=self.key.group,
            topic=self.key.topic,
            topic_incarnation=self.incarnation,
            queue_id=self.key.queue_id,
            whole=True,
            next_offset=next_offset,
            hand_out_count=self.hand_out_count,
        )

    def statement(self) -> PoppedQueue:
        """Everything, for a record."""
        told = self.reset_to(self.next_offset)
        by_holding: dict[Holding, list[int]] = {}
        waiting: list[int] = []
        for offset in sorted(self.open):
            holding = self.open[offset]
            if holding.attempt:
                by_holding.setdefault(holding, []).append(offset)
            else:
                waiting.append(offset)
            if offset in self._hashes:
                told.grouped_offsets.append(offset)
                told.sharding_hashes.append(self._hashes[offset])
        told.waiting_runs.extend(runs_of(waiting))
        for holding, offsets in by_holding.items():
            told.hand_outs.append(
                HandOut(
                    number=holding.number,
                    time_ms=holding.time_ms,
                    deadline_ms=holding.deadline_ms,
                    attempt=holding.attempt,
                    runs=runs_of(offsets),
                )
            )
        told.moved_offsets.extend(self.moved)
        told.retry_offsets.extend(self.moved.values())
        told.moved_store_times_ms.extend(self.stored_ms.get(offset, 0) for offset in self.moved)
        for error, same in groupby(self.errors.items(), key=itemgetter(1)):  # in the order in which they were said
            told.errors.append(PopError(error=error, runs=runs_of(offset for offset, _ in same)))
        return told


def _runs_by_holding(
    holdings: Sequence[Holding | None], first: int, *, is_one: bool
) -> Iterable[tuple[Holding | None, int, int]]:
    """Neighbours that had one holding: it, the first offset, and how many they are. `is_one`: all had the same."""
    if is_one:
        return ((holdings[0], first, len(holdings)),)
    runs = []
    for holding, same in groupby(holdings):
        count = len(list(same))
        runs.append((holding, first, count))
        first += count
    return runs


def take_back(told: PoppedQueue, number: int, time_ms: int, attempt: int, deadline_ms: int, runs: Sequence[int]) -> None:
    """Says in a record that nobody has seen this delivery, so it does not count. The record must settle none of the messages."""
    if attempt > 1:
        told.hand_outs.add(number=number, time_ms=time_ms, deadline_ms=deadline_ms, attempt=attempt - 1, runs=runs)
    else:
        told.waiting_runs.extend(runs)
