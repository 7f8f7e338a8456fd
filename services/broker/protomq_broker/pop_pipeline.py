"""Brings pops into the log: plans together what has arrived, appends the plan as one record, and answers when it is stored.

    pop lane     orders of a turn > plan                             > held again, or planned again      > answers
    send lane                            append, applied as it is                         stored

Rules:
- One plan is under way at a time; pops that come meanwhile form the next plan. So no message is planned twice, and a busier broker puts
  more into one record.
- A plan may be out of date when it reaches the send lane. A topic or group was deleted, a queue was reset, a due message was settled, or a
  caller has given up. Then the pop lane rebuilds it.
- An answer waits for what SEND_OK waits for; the next plan does not.
- Messages that failed too often are looked for each second, and moved in slices. The next slice waits until the one before is stored. So
  other calls come in between, and the dead letters of a large backlog do not outrun the disk.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from protomq.wire.topics import POP_TOPIC

from .pop_orders import PopAnswer, PopOrder
from .pop_planner import Plan, PopPlanner
from .pop_reading import SCAN_S
from .said_once import SaidOnce
from .store.state.topics import topic_of_broker
from .topic_access import check_incarnation, group_disabled, readable_topic

if TYPE_CHECKING:
    from protomq_runtime.call import CallLane

    from .config import BrokerConfig
    from .pop_time import PopTime
    from .store.state.popped_queue import OpenMessages
    from .store.store import Store
    from .system_writer import SystemWriter
    from .waiting_answers import WaitingAnswers

log = logging.getLogger("protomq.broker")

ORDERS_MAX: Final = 500
"""Most pops in one plan."""
MESSAGES_MAX: Final = 8_192
"""Most messages that one plan hands out. The send lane applies it within 1 to 2 ms."""
SWEEP_INTERVAL_MS: Final = 1_000
"""Interval at which the pipeline looks for messages that failed too often, while any message is open."""
TELL_INTERVAL_MS: Final = 60_000
"""Interval at which the pipeline appends pop time while any message is open. After a crash a message may be held longer by this time."""
SWEPT_COUNT_MAX: Final = 2_000
"""Most queues that one such look examines, within SCAN_S."""


class PopAnswers(Protocol):
    """What the pipeline reports to the service, always on the pop lane."""

    def popped(self, answer: PopAnswer, failure: Exception | None) -> None:
        """The messages are handed out, and the record is stored unless there is a failure."""

    def found_nothing(self, order: PopOrder, time_ms: int) -> None:
        """A pop has found no message that it wants among those that are due at this pop time, or new."""

    def refused(self, order: PopOrder, failure: Exception) -> None:
        """A pop has failed."""


class PopPipeline:
    """Call `begin` and `add` on the pop lane. `planner` is public for metrics."""

    def __init__(
        self,
        store: Store,
        writer: SystemWriter,
        waiting: WaitingAnswers,
        pop_time: PopTime,
        config: BrokerConfig,
        answers: PopAnswers,
        monotonic: Callable[[], float],
    ) -> None:
        self._store = store
        self._writer = writer
        self._waiting = waiting
        self._time = pop_time
        self._config = config
        self._answers = answers
        self._monotonic = monotonic
        self.planner = PopPlanner(store, monotonic)
        self._pops: deque[PopOrder] = deque()
        self._lane: CallLane | None = None
        self._is_busy = False
        self._is_posted = False
        self._is_sweep_due = False
        self._swept: deque[OpenMessages] = deque()
        self._is_any_open = False
        self._said = SaidOnce(now_s=monotonic)

    def begin(self, lane: CallLane) -> None:
        """Looks after what is open since before the start, though nobody pops: messages that failed too often, and pop time."""
        if self._lane is None and any(known.open for known in self._store.popped.queues()):
            self._begin_sweeps(lane)

    def add(self, order: PopOrder) -> None:
        """Takes a pop. It goes into the next plan that has room."""
        self._take(order)
        self._post()

    def add_all(self, orders: Iterable[PopOrder]) -> None:
        """Takes all pops of a turn, when the turn has delivered them. If no plan is under way, they are planned at once."""
        for order in orders:
            self._take(order)
        if self._pops and not self._is_busy:
            self._begin()

    def _take(self, order: PopOrder) -> None:
        if self._lane is None:
            self._begin_sweeps(order.call.lane)
        self._pops.append(order)

    def _begin_sweeps(self, lane: CallLane) -> None:
        self._lane = lane
        lane.call_later(SWEEP_INTERVAL_MS, self._sweep)

    def _post(self) -> None:
        """Makes the next plan once this turn of the lane has delivered all its pops."""
        if not self._is_busy and not self._is_posted:
            self._is_posted = True
            assert self._lane is not None
            self._lane.post(self._begin_posted)

    def _begin_posted(self) -> None:
        self._is_posted = False
        if not self._is_busy:
            self._begin()

    def _begin(self) -> None:
        plan = self._make_plan()
        for order in plan.nothing:
            self._answers.found_nothing(order, plan.time_ms)
        if plan.queues or plan.is_time_told:
            self._is_busy = True
            self._writer.post(partial(self._append, plan))
            return
        self._pops.extendleft(reversed(plan.again))
        if self._pops:
            self._post()

    def _make_plan(self) -> Plan:
        plan = Plan(self._time.now_ms())
        nothing: set[tuple[object, ...]] = set()
        for _ in range(min(len(self._pops), ORDERS_MAX)):
            if plan.message_count >= MESSAGES_MAX:
                break
            pop = self._pops.popleft()
            if pop.call.answered:
                continue  # its caller has gone
            if pop.call.is_late or (nothing and pop.wanted in nothing):  # Its caller has stopped waiting, or it would find nothing.
                plan.nothing.append(pop)
                continue
            try:
                self._plan_pop(plan, pop)
            except Exception as error:
                self._answers.refused(pop, error)
            if plan.nothing and plan.nothing[-1] is pop:
                nothing.add(pop.wanted)
        if self._is_sweep_due:
            self._is_sweep_due = False
            self._plan_sweep(plan)
        return plan

    def _plan_pop(self, plan: Plan, order: PopOrder) -> None:
        request = order.request
        if request.consumer_group in self._store.groups.disabled:
            raise group_disabled(request.consumer_group)
        topic = readable_topic(self._store, request.topic)
        check_incarnation(topic, request.topic_incarnation)
        self.planner.pop(plan, order, topic)

    def _plan_sweep(self, plan: Plan) -> None:
        """Moves messages that failed too often to the dead letters, and appends the pop time if TELL_INTERVAL_MS has passed.

        It comes behind the pops of the plan: their queues are not kept from them, however many messages are to be moved.
        """
        if not self._swept:
            self._swept.extend(self._store.popped.queues())
        until_s = self._monotonic() + SCAN_S
        again: list[OpenMessages] = []
        for _ in range(min(len(self._swept), SWEPT_COUNT_MAX)):
            known = self._swept.popleft()
            self._is_any_open = self._is_any_open or bool(known.open)
            try:
                has_more = self.planner.bury(plan, known.key, known.incarnation)
            except Exception:  # It is tried again a second later. The pops of this plan have nothing to do with it.
                has_more = False
                if self._said.is_due(known.key):
                    log.exception("messages of %s that failed too often cannot be moved to the dead letters yet", known.key)
            if has_more:
                again.append(known)
            if self.planner.has_buried_enough(plan) or self._monotonic() > until_s:
                break
        self._swept.extendleft(again)
        plan.is_sweep_cut = bool(again)
        if self._is_any_open and plan.time_ms - self._store.popped.time_ms > TELL_INTERVAL_MS:
            plan.is_time_told, self._is_any_open = True, False

    def _sweep(self) -> None:
        assert self._lane is not None
        self._is_sweep_due = True
        self.planner.forget_unwanted()
        self._post()
        self._lane.call_later(SWEEP_INTERVAL_MS, self._sweep)

    # The send lane.

    def _append(self, plan: Plan) -> None:
        pop_lane = self._lane
        assert pop_lane is not None
        try:
            if not self._holds(plan):
                pop_lane.post(partial(self._make_anew, plan))
                return
            end_position = self._writer.append_moved(plan.copies, [(POP_TOPIC, [plan.body()])])
            if plan.copies:
                end_position = max(end_position, self._add_topics(plan))
        except Exception as error:
            pop_lane.post(partial(self._done, plan, error))
            return
        if self._waiting.is_stored(end_position):
            pop_lane.post(partial(self._done, plan, None))
            return
        pop_lane.post(partial(self._applied, plan))
        wait_ms = self._config.sync_flush_timeout_ms

        def stored(failure: Exception | None) -> None:
            pop_lane.post(partial(self._answer, plan, failure))

        self._waiting.wait(self._writer.lane, end_position, wait_ms, stored)
        self._waiting.request_flush()

    def _holds(self, plan: Plan) -> bool:
        """Whether everything that the plan has read is unchanged, and all its callers are there."""
        if any(answer.order.call.answered for answer in plan.pop_answers):
            return False
        state, topics, offsets = self._store.popped, self._store.topics, self._store.offsets
        with state.lock:
            for key, (incarnation, known) in plan.known.items():
                if state.find(key, incarnation) is not known:
                    return False
            for key, holders in plan.due.items():
                known = state.find(key, plan.known[key][0])
                if known is None or any(
                    known.open.get(offset) is not holder for offset, holder in holders.items()
                ):
                    return False
        for key, committed in plan.committed.items():
            if offsets.find(key.group, key.topic, plan.known[key][0], key.queue_id) != committed:
                return False
        for key in plan.queues:
            topic = topics.find(key.topic)
            if topic is None or topic.incarnation != plan.known[key][0]:
                return False
        return True

    def _add_topics(self, plan: Plan) -> int:
        names = dict.fromkeys(copy.region.topic for copy in plan.copies)
        missing = [topic_of_broker(name) for name in names if self._store.topics.find(name) is None]
        return self._store.topics.add(missing) if missing else 0

    # The pop lane again.

    def _make_anew(self, plan: Plan) -> None:
        self._is_busy = False
        self._is_sweep_due = self._is_sweep_due or plan.is_sweep_cut
        self._pops.extendleft(reversed([*(answer.order for answer in plan.pop_answers), *plan.again]))
        self._post()

    def _done(self, plan: Plan, failure: Exception | None) -> None:
        if failure is None:
            self._applied(plan)
        else:
            self._is_busy = False
            self._post()
            for order in plan.again:  # They would find what this plan could not change, and so on for ever.
                self._answers.refused(order, failure)
        self._answer(plan, failure)

    def _applied(self, plan: Plan) -> None:
        self._is_busy = False
        self._pops.extendleft(reversed(plan.again))
        if self._pops or self._is_sweep_due:
            self._post()

    def _answer(self, plan: Plan, failure: Exception | None) -> None:
        if plan.is_sweep_cut and failure is None:
            self._is_sweep_due = True
            self._post()
        for pop in plan.pop_answers:
            self._answers.popped(pop, failure)
