"""Plans the next step of popped messages: one record of %SYS%POP for all pops that have arrived. Runs on the pop lane's thread.

    popped     one pop for each queue of a group: the next one looks at what this one leaves, in the next plan
    dead       messages that were handed out as often as their group lets them, and whose time is up: copies for its dead letters

Rules:
- A plan changes no state, and one plan is under way at a time. Until its record is appended, the last holder of a due message may still
  settle it (`pop_settling.py`), and an operator may reset the queue (`offset_commits.py`). Then the plan is void.
- Due messages come first, then those that no other message of their message group holds back any more, then new ones.
- A pop with tags or a filter looks at all due messages, for SCAN_S at most. The next one that wants the same goes on behind them.
- A message that is not readable yet waits until it is: after a fail-over, members may hold some of these.
- A due message in a damaged part of the log is put off for a minute. New ones behind damage wait until it is healed or repaired.
- Of a queue that the topic has no more, since it was made smaller, only open messages are handed out. They come until none is open.
- If a new message does not match a pop's filter, the group skips it for ever. A message that was handed out before waits for another pop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from itertools import count as counted
from typing import TYPE_CHECKING, Final

import numpy as np

from protomq.v1.state_pb2 import HandOut, PoppedQueue, PopRecord
from protomq.wire.runs import runs_of
from protomq.wire.topics import DEAD_LETTER_PREFIX, dead_letter_topic, retry_topic
from protomq_runtime.errors import too_many

from .pop_orders import Part, PopAnswer, PopOrder
from .pop_reading import SCAN_S, Limits, PopReader
from .pop_time import deadline_ms
from .said_once import SaidOnce
from .store.log.append import AppendRequest
from .store.log.move import move_records
from .store.log.transit import attempt_of
from .store.state.pop import QUEUES_MAX
from .store.state.popped_queue import (
    OPEN_MAX,
    Holding,
    OpenMessages,
    QueueOfGroup,
)

if TYPE_CHECKING:
    from .store.state.pop import PopState
    from .store.state.topics import TopicConfig
    from .store.store import Store

log = logging.getLogger("protomq.broker")

DEAD_COUNT_MAX: Final = 64
DEAD_SIZE_MAX_BYTES: Final = 1 << 20
"""Most bytes of dead letters in one plan, so that sends can go on in between."""
DAMAGED_RETRY_MS: Final = 60_000
"""How long a due message that cannot be read is put off: it does not take the place of others that are due."""
CHUNK_COUNT: Final = 64
"""At least as many due messages are looked at together."""
_UNLIMITED: Final = 1 << 32


class Plan:
    """What will be appended, and what callers will be answered then.

    Attributes:
        time_ms: pop time.
        queues: what the record says, by queue.
        copies: dead letters.
        known: each queue's state when the plan read it; None: the queue is new. The plan is void if the state has changed.
        committed: of each new queue the group's committed offset, where it begins; None: it has none. The plan is void if it has changed.
        due: for each queue the messages of which the plan says something, and their last holders. The plan is void if one of them is
            settled meanwhile.
        again: pops of queues from which another pop of this plan has taken; they come in the next plan.
        nothing: pops that found nothing.
        copied_size_bytes: size of the copies.
        buried_count: how many there are.
        is_sweep_cut: more messages failed too often than this plan moves; the look goes on when this is stored.
        message_count: messages that are handed out.
        is_time_told: the record says the pop time although nothing else has happened.
    """

    __slots__ = (
        "again", "buried_count", "committed", "copied_size_bytes", "copies", "due", "is_sweep_cut", "is_time_told", "known",
        "message_count", "nothing", "pop_answers", "popped", "queues", "time_ms",
    )  # fmt: skip

    def __init__(self, time_ms: int) -> None:
        self.time_ms = time_ms
        self.queues: dict[QueueOfGroup, PoppedQueue] = {}
        self.copies: list[AppendRequest] = []
        self.known: dict[QueueOfGroup, tuple[int, OpenMessages | None]] = {}
        self.committed: dict[QueueOfGroup, int | None] = {}
        self.due: dict[QueueOfGroup, dict[int, Holding]] = {}
        self.popped: set[QueueOfGroup] = set()
        self.pop_answers: list[PopAnswer] = []
        self.again: list[PopOrder] = []
        self.nothing: list[PopOrder] = []
        self.copied_size_bytes = 0
        self.buried_count = 0
        self.is_sweep_cut = False
        self.message_count = 0
        self.is_time_told = False

    def told(self, key: QueueOfGroup, incarnation: int) -> PoppedQueue:
        """Returns the part of the record about one queue; creates an empty one at first."""
        told = self.queues.get(key)
        if told is None:
            told = self.queues[key] = PoppedQueue(
                consumer_group=key.group,
                topic=key.topic,
                topic_incarnation=incarnation,
                queue_id=key.queue_id,
            )
        return told

    def rely_on(self, key: QueueOfGroup, offsets: Iterable[int], holders: Mapping[int, Holding]) -> None:
        """The plan is void if one of these messages is settled meanwhile."""
        self.due.setdefault(key, {}).update((offset, holders[offset]) for offset in offsets)

    def body(self) -> bytes:
        """The record's body."""
        return PopRecord(time_ms=self.time_ms, queues=self.queues.values()).SerializeToString()


class PopPlanner:
    """Call `pop` and `bury` with a plan that was just made.

    Attributes: full_count: how often a pop got nothing new from a queue because OPEN_MAX of its messages were open.
    """

    def __init__(self, store: Store, monotonic: Callable[[], float]) -> None:
        self._store = store
        self._monotonic = monotonic
        self._state: PopState = store.popped
        self._reader = PopReader(store, monotonic)
        self._turns: dict[tuple[str, str], counted[int]] = {}
        self._looked_at: dict[tuple[object, ...], int] = {}  # how many due messages, by who wants them of which queue
        self._dead_size_max_bytes = min(DEAD_SIZE_MAX_BYTES, store.append_size_max_bytes // 4)
        self.full_count = 0
        self._said = SaidOnce(now_s=monotonic)

    def pop(self, plan: Plan, order: PopOrder, topic: TopicConfig) -> None:
        """Finds messages for a pop. Raises ServiceError, the filter's errors, and StoreError if it met only damage."""
        request = order.request
        answer = PopAnswer(order, topic, plan.time_ms)
        limits = Limits(request.record_count_max, request.size_max_bytes)
        self._reader.failure = None
        is_deferred = False
        has_more = False
        for queue_id in self._queue_ids(order, topic):
            key = QueueOfGroup(request.consumer_group, request.topic, queue_id)
            if key in plan.popped:
                is_deferred = True
                continue
            parts_before = len(answer.parts)
            try:
                has_more = self._pop_queue(plan, answer, key, limits) or has_more
            except Exception:  # a filter fails: what other queues have given is handed out already
                if key in plan.queues:
                    plan.popped.add(key)  # Another pop of this plan would say it again, and bury the same messages once more.
                if not answer.parts:
                    raise
                break
            record_count, size_bytes = limits
            for part in answer.parts[parts_before:]:
                record_count -= len(part.offsets)
                size_bytes -= part.result.regions_size_bytes
            if record_count <= 0 or size_bytes <= 0:
                break
            limits = Limits(record_count, size_bytes)
        if answer.parts:
            plan.pop_answers.append(answer)
        elif is_deferred or has_more:
            plan.again.append(order)
        elif self._reader.failure is not None:
            raise self._reader.failure
        else:
            plan.nothing.append(order)

    def bury(self, plan: Plan, key: QueueOfGroup, incarnation: int) -> bool:
        """Moves messages that failed too often to the dead letters, even if nobody pops. Returns whether there may be more of them."""
        topic = self._store.topics.find(key.topic)
        if topic is None or topic.incarnation != incarnation:
            return False  # It is being deleted: no plan about it holds, and the next one would follow at once.
        with self._state.lock:
            known = self._state.find(key, incarnation)
            if known is None:
                return False
            dead = known.dead(plan.time_ms, self.deliveries_max(key.group), DEAD_COUNT_MAX)
            if not dead:
                return False
            if key in plan.queues:
                return True  # a pop of this plan may have buried the same
            due = [(offset, known.open[offset]) for offset in dead]
            moved = dict(known.moved)
        plan.known[key] = (incarnation, known)
        self._bury(plan, known, due, moved)
        # If nothing can be read of them, the next look must not follow at once.
        return key in plan.queues

    def has_buried_enough(self, plan: Plan) -> bool:
        """Whether a plan may move no more messages to the dead letters, so that its turn stays short."""
        return plan.buried_count >= DEAD_COUNT_MAX or plan.copied_size_bytes >= self._dead_size_max_bytes

    def forget_unwanted(self) -> None:
        """Forgets what was read ahead for pops that have not come since the last call."""
        self._reader.ahead.forget_unwanted()

    def deliveries_max(self, group: str) -> int:
        """How often a message of the group is handed out before it is dead: once, and then as many retries as the settings allow."""
        limit = self._store.groups.find(group).retry_limit
        return _UNLIMITED if limit is None else limit + 1

    def _find(self, plan: Plan, key: QueueOfGroup, incarnation: int) -> OpenMessages | None:
        known = self._state.find(key, incarnation)
        plan.known[key] = (incarnation, known)
        return known

    def _queue_ids(self, order: PopOrder, topic: TopicConfig) -> Iterable[int]:
        """The queues from which the pop may take; each pop begins with another one. Those that the topic has no more are among them, as
        long as messages of them are open: they come again.
        """
        request = order.request
        if request.queue_id >= 0:
            return (request.queue_id,)
        name = (request.consumer_group, request.topic)
        turn = self._turns.get(name)
        if turn is None:
            if len(self._turns) > QUEUES_MAX:
                self._turns.clear()
            turn = self._turns[name] = counted()
        queues = topic.read_queues
        with self._state.lock:
            gone = self._state.open_queues_from(*name, topic.incarnation, queues)
        if gone:
            all_queues = [*range(queues), *gone]
            first = next(turn) % len(all_queues)
            return all_queues[first:] + all_queues[:first]
        first = next(turn) % queues
        return chain(range(first, queues), range(first))

    def _pop_queue(self, plan: Plan, answer: PopAnswer, key: QueueOfGroup, limits: Limits) -> bool:
        """Adds messages of one queue to the answer. Returns whether the queue may have more that this pop had no time to examine."""
        order, incarnation = answer.order, answer.topic.incarnation
        request = order.request
        is_gone = key.queue_id >= answer.topic.read_queues
        with self._state.lock:
            known = self._find(plan, key, incarnation)
            if known is None:
                if is_gone:
                    return False
                if not self._state.has_room():
                    raise too_many("popped queues", QUEUES_MAX, "delete groups that nobody needs")
                found, moved = [], {}
                room, number = OPEN_MAX, 0
                next_offset = self._first_offset(plan, order, key, incarnation)
            else:
                # Those that do not match must not keep it from the others.
                is_selective = order.tag_codes or order.filter is not None
                count = OPEN_MAX if is_selective else limits.record_count
                found = _due(known, plan.time_ms, count, in_order=request.fifo)
                # Nor those that are damaged. Due ones of these are put off: pops need not look at thousands of sound ones.
                ready_count = OPEN_MAX if self._store.damaged_ranges else count
                found += [(offset, known.open[offset]) for offset in known.ready(ready_count - len(found))]
                moved = dict(known.moved)
                room, number = known.room, known.hand_out_count
                next_offset = known.next_offset
        # The queue's start is recorded even if the queue is empty.
        if known is None:
            plan.told(key, incarnation).next_offset = next_offset
        parts_before = len(answer.parts)
        has_more = False
        try:
            if found:
                assert known is not None
                limits, has_more = self._pop_open(plan, answer, known, found, moved, limits)
            if limits.record_count > 0 and limits.size_bytes > 0 and not is_gone:
                if room == 0:
                    self.full_count += 1
                    self._say_full(plan, key, known)
                else:
                    has_more |= self._pop_fresh(plan, answer, key, known, next_offset, limits, room)
        except Exception:  # a filter fails: what stands before that message is handed out, and the next pop begins with it
            if len(answer.parts) == parts_before:
                raise
        new_parts = answer.parts[parts_before:]
        if new_parts:
            self._hand_out(plan, key, incarnation, new_parts, number, request.invisible_ms)
        if key in plan.queues:
            plan.popped.add(key)
        return has_more

    def _say_full(self, plan: Plan, key: QueueOfGroup, known: OpenMessages | None) -> None:
        """Its members get nothing new, and no error says why."""
        if known is None or not self._said.is_due(key):
            return
        with self._state.lock:
            counts = known.open_counts(plan.time_ms)
        log.warning(
            "group %s gets nothing new of queue %d of topic %s: %d of its messages there are open, as many as may be. Members hold %d,"
            " %d are due again, and %d wait for others of their sharding key. Acknowledge what is done, or add members or queues;"
            " if most wait, use more sharding keys",
            key.group, key.queue_id, key.topic, sum(counts), *counts,
        )  # fmt: skip

    def _pop_open(
        self,
        plan: Plan,
        answer: PopAnswer,
        known: OpenMessages,
        open_ones: Sequence[tuple[int, Holding]],
        moved: dict[int, int],
        limits: Limits,
    ) -> tuple[Limits, bool]:
        """Adds messages that were looked at before. Returns what is left of the limits, and whether there may be more of them."""
        order, key = answer.order, known.key
        wish = (key, order.request.fifo, order.tag_codes, order.request.filter_key)
        at = self._looked_at.pop(wish, 0)
        if at >= len(open_ones):
            at = 0
        has_more = False
        until_s = self._monotonic() + SCAN_S
        while at < len(open_ones) and limits.record_count > 0 and limits.size_bytes > 0:
            chunk = open_ones[at : at + max(limits.record_count, CHUNK_COUNT)]
            at += len(chunk)
            alive = self._bury(plan, known, chunk, moved)
            # They hide those behind them no more once the plan is appended.
            has_more |= len(alive) < len(chunk) and bool(plan.queues)
            holders = dict(alive)
            by_attempt: dict[int, list[int]] = {}
            for offset, holding in alive:
                by_attempt.setdefault(holding.attempt + 1, []).append(offset)
            for attempt, offsets in by_attempt.items():
                found = self._reader.open_ones(key, offsets, moved, limits, order.tag_codes, order.filter)
                plan.rely_on(key, found.lost, holders)
                if found.lost:
                    plan.told(key, known.incarnation).lost_runs.extend(runs_of(found.lost))
                    has_more = True
                if found.damaged and attempt > 1:
                    plan.rely_on(key, found.damaged, holders)
                    self._put_off(plan, key, known.incarnation, found.damaged)
                for given, result in found.results:
                    plan.rely_on(key, given, holders)
                    answer.parts.append(Part(key.queue_id, 0, attempt, given, result))
                    limits = Limits(limits.record_count - len(given), limits.size_bytes - result.regions_size_bytes)
                if found.filter_error is not None:
                    raise found.filter_error
                if limits.record_count <= 0 or limits.size_bytes <= 0:
                    break
            if at < len(open_ones) and self._monotonic() > until_s:
                if len(self._looked_at) > QUEUES_MAX:
                    self._looked_at.clear()
                self._looked_at[wish] = at
                return limits, True
        return limits, has_more

    def _pop_fresh(
        self,
        plan: Plan,
        answer: PopAnswer,
        key: QueueOfGroup,
        known: OpenMessages | None,
        next_offset: int,
        limits: Limits,
        room: int,
    ) -> bool:
        """Adds messages that no pop of the group has seen."""
        order = answer.order
        # The records say which of them retention has left there for the group.
        is_opened = order.filter is not None or order.request.fifo or key.topic == retry_topic(key.group)
        if not is_opened:
            limits = Limits(min(limits.record_count, room), limits.size_bytes)
            incarnation = answer.topic.incarnation
            fresh = self._reader.fresh(key, incarnation, next_offset, limits, order.tag_codes)
        else:
            is_open = None
            if order.request.fifo:
                is_open = known.is_group_open if known is not None else _is_never_open
            fresh = self._reader.scanned(
                key, next_offset, limits, order.tag_codes, order.filter, is_open, room
            )
        for offsets, result in fresh.results:
            answer.parts.append(Part(key.queue_id, 0, 1, offsets, result))
        if fresh.next_offset > next_offset:
            told = plan.told(key, answer.topic.incarnation)
            told.next_offset = fresh.next_offset
            if fresh.lost:
                told.lost_runs.extend(runs_of(fresh.lost))
            if fresh.waiting:
                told.waiting_runs.extend(runs_of(fresh.waiting))
            for offset, sharding_hash in fresh.grouped:
                told.grouped_offsets.append(offset)
                told.sharding_hashes.append(sharding_hash)
        return fresh.has_more and fresh.next_offset > next_offset

    def _put_off(
        self, plan: Plan, key: QueueOfGroup, incarnation: int, offsets: Sequence[int]
    ) -> None:
        """Looks at due messages again after a while."""
        told = plan.told(key, incarnation)
        told.changes.add(deadline_ms=plan.time_ms + DAMAGED_RETRY_MS, runs=runs_of(offsets))

    def _hand_out(
        self,
        plan: Plan,
        key: QueueOfGroup,
        incarnation: int,
        parts: Sequence[Part],
        number: int,
        invisible_ms: int,
    ) -> None:
        """Numbers the parts and adds them to the record. Neighbours with the same attempt share a number."""
        told = plan.told(key, incarnation)
        hand_out: HandOut | None = None
        for part in parts:
            if hand_out is None or hand_out.attempt != part.attempt:
                number += 1
                hand_out = told.hand_outs.add(
                    number=number,
                    time_ms=plan.time_ms,
                    deadline_ms=deadline_ms(plan.time_ms, invisible_ms),
                    attempt=part.attempt,
                )
            part.number = number
            plan.message_count += len(part.offsets)
            hand_out.runs.extend(runs_of(part.offsets))

    def _bury(
        self,
        plan: Plan,
        known: OpenMessages,
        due: Sequence[tuple[int, Holding]],
        moved: dict[int, int],
    ) -> list[tuple[int, Holding]]:
        """Copies messages that were handed out too often to the dead letters, unless they stand there. Returns the others."""
        key, incarnation = known.key, known.incarnation
        deliveries_max = self.deliveries_max(key.group)
        dead: dict[int, list[int]] = {}
        for offset, holding in due:
            if holding.attempt >= deliveries_max:
                dead.setdefault(holding.attempt, []).append(offset)
        if not dead:
            return list(due)
        for offsets in dead.values():
            plan.rely_on(key, offsets, dict(due))
        with self._state.lock:
            errors = {offset: known.errors.get(offset) for offsets in dead.values() for offset in offsets}
        size_max_bytes = self._dead_size_max_bytes
        for attempt, offsets in dead.items():
            if plan.copied_size_bytes >= size_max_bytes:
                break  # they stay as they are until the next plan
            if key.topic == dead_letter_topic(key.group):
                # They are its dead letters already. Only those of which retention has left nothing but a copy become some again.
                plan.told(key, incarnation).dead_runs.extend(runs_of([offset for offset in offsets if offset not in moved]))
                offsets = [offset for offset in offsets if offset in moved]
                if not offsets:
                    continue
            limits = Limits(DEAD_COUNT_MAX, size_max_bytes - plan.copied_size_bytes)
            found, copied = self._reader.open_ones_to_copy(key, offsets, moved, limits)
            if found.damaged:
                self._put_off(plan, key, incarnation, found.damaged)
            if not found.results and not found.lost:
                continue
            told = plan.told(key, incarnation)
            told.lost_runs.extend(runs_of(found.lost))
            for (given, result), data in zip(found.results, copied, strict=True):
                starts, sizes = result.starts.astype(np.int64), result.sizes.astype(np.int64)
                attempts: int | list[int] = attempt
                if key.topic.startswith(DEAD_LETTER_PREFIX):
                    # What its record counts is of another group, as in `send_backs.py`.
                    ends = (starts + sizes).tolist()
                    attempts = [attempt - attempt_of(data, start, end) for start, end in zip(starts.tolist(), ends, strict=True)]
                region = move_records(
                    data, starts, sizes, dead_letter_topic(key.group),
                    attempts=attempts, last_errors=[errors[offset] for offset in given],
                )  # fmt: skip
                plan.copies.append(AppendRequest(region, 0))
                plan.copied_size_bytes += len(region.data)
                plan.buried_count += len(given)
                told.dead_runs.extend(runs_of(given))
        return [(offset, holding) for offset, holding in due if holding.attempt < deliveries_max]

    def _first_offset(self, plan: Plan, order: PopOrder, key: QueueOfGroup, incarnation: int) -> int:
        """Returns where a group begins: at its committed offset, or where the pop says."""
        committed = self._store.offsets.find(key.group, key.topic, incarnation, key.queue_id)
        plan.committed[key] = committed
        # Whether it is readable or not: who has just begun to lead does not know yet what is confirmed.
        end_offset = self._store.appended_end_offset(key.topic, key.queue_id)
        min_offset, _ = self._store.queue_range(key.topic, key.queue_id)
        if committed is not None:
            return min(max(committed, min_offset), end_offset)
        return end_offset if order.request.is_from_end else min_offset


def _due(known: OpenMessages, now_ms: int, count_max: int, *, in_order: bool = False) -> list[tuple[int, Holding]]:
    """Returns the due messages of a queue with their last holders. Call under the lock."""
    return [(offset, known.open[offset]) for offset, _ in known.due(now_ms, count_max, in_order=in_order)]


def _is_never_open(_: int) -> bool:
    return False
