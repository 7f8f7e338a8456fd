"""Bugs put into pops on purpose. `planted.py` says what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

from protomq.v1.state_pb2 import PoppedQueue
from protomq.wire.runs import offsets_in, runs_of
from protomq_broker import offset_commits
from protomq_broker.pop_planner import Plan, PopPlanner
from protomq_broker.pop_time import PopTime
from protomq_broker.store.housekeeping.pop_carrying import PopCarrier
from protomq_broker.store.state.pop import PopState
from protomq_broker.store.state.popped_queue import (
    OpenMessages,
    QueueOfGroup,
)
from protomq_broker.waiting_answers import WaitingAnswers


def counts_time_by_the_wall() -> Any:
    """Pop time begins with the wall clock, as if nobody set it while a broker is down."""

    def begin(self: PopTime, clock: Any, floor_ms: int) -> None:
        self._clock = clock
        self._base_ms = max(clock.now_ms(), floor_ms) - clock.monotonic_ms()

    return mock.patch.object(PopTime, "__init__", begin)


def answers_before_the_sync() -> Any:
    """Hand-outs and acknowledgements are answered as soon as they are appended."""
    return mock.patch.object(WaitingAnswers, "is_stored", return_value=True)


def leaves_open_messages_behind() -> Any:
    """Retention takes what is popped and not acknowledged."""
    return mock.patch.object(PopCarrier, "move_below", return_value=None)


def forgets_popped_queues() -> Any:
    """What groups have popped is not said again before its segment goes."""
    return mock.patch.object(PopState, "carry", return_value=[])


def hands_out_what_is_settled() -> Any:
    """A plan holds, though what was due when it was made is settled by now."""
    return mock.patch.object(Plan, "rely_on", return_value=None)


def ignores_changes() -> Any:
    """Another invisible time is answered, and not kept."""
    return mock.patch.object(OpenMessages, "_change", return_value=None)


def gives_back_late() -> Any:
    """What is due is found five seconds later."""
    real = OpenMessages.due
    return mock.patch.object(
        OpenMessages, "due", lambda self, now_ms, *rest, **named: real(self, now_ms - 5_000, *rest, **named)
    )


def takes_any_receipt() -> Any:
    """A receipt is good as long as the message is open, whoever has it."""

    def held_and_lost(
        self: OpenMessages, runs: Sequence[int], number: int, time_ms: int
    ) -> tuple[list[int], list[int]]:
        offsets = list(offsets_in(runs))
        return (
            runs_of(offset for offset in offsets if offset in self.open),
            runs_of(offset for offset in offsets if offset not in self.open),
        )

    return mock.patch.object(OpenMessages, "held_and_lost", held_and_lost)


def resets_under_plans() -> Any:
    """A hand-out that was planned before a reset is appended behind it."""
    real = PopState._take

    def take(self: PopState, told: PoppedQueue, position: int, time_ms: int) -> None:
        key = QueueOfGroup(told.consumer_group, told.topic, told.queue_id)
        known = self._queues.get(key)
        real(self, told, position, time_ms)
        if told.whole and known is not None and known.incarnation == told.topic_incarnation:
            known.take(told, position)
            self._queues[key] = known

    return mock.patch.object(PopState, "_take", take)


def resets_leave_messages_open() -> Any:
    """After a reset what was handed out before comes again, wherever it is."""
    real = OpenMessages.reset_to

    def reset_to(self: OpenMessages, next_offset: int) -> PoppedQueue:
        told = real(self, next_offset)
        told.whole = next_offset == self.next_offset  # as in a statement
        return told

    return mock.patch.object(OpenMessages, "reset_to", reset_to)


def resets_only_what_is_committed() -> Any:
    """A reset is a commit, which pops do not look at."""
    return mock.patch.object(offset_commits._Record, "_reset_of_popped", return_value=None)


def gives_keys_together() -> Any:
    """Messages of one key do not wait for each other."""
    return mock.patch.object(OpenMessages, "is_group_open", return_value=False)


def buries_too_late() -> Any:
    """A message is handed out once more than its group allows."""
    real = PopPlanner.deliveries_max
    return mock.patch.object(PopPlanner, "deliveries_max", lambda self, group: real(self, group) + 1)


def buries_in_two_appends() -> Any:
    """Dead letters are appended by a plan, and the record that says so by a later one."""
    real = PopPlanner._bury

    def bury(self: PopPlanner, plan: Plan, known: OpenMessages, due: Sequence[Any], moved: Any) -> Any:
        found = real(self, plan, known, due, moved)
        told = plan.queues.get(known.key)
        if told is not None and known.key.queue_id:
            del told.dead_runs[:]
        return found

    return mock.patch.object(PopPlanner, "_bury", bury)


def begins_anew_at_a_start() -> Any:
    """What stands in the cache counts as done: nobody gets it again."""
    real = OpenMessages.statement

    def statement(self: OpenMessages) -> PoppedQueue:
        told = real(self)
        del told.hand_outs[:]
        return told

    return mock.patch.object(OpenMessages, "statement", statement)


def forgets_what_failed() -> Any:
    """What messages failed of is known until it is said again: in a cache, or before a segment goes."""
    real = OpenMessages.statement

    def statement(self: OpenMessages) -> PoppedQueue:
        told = real(self)
        del told.errors[:]
        return told

    return mock.patch.object(OpenMessages, "statement", statement)
