"""PopService: messages for members of a group that have no queues of their own.

Pops run on one lane of one thread. Only this thread plans hand-outs (`pop_planner.py`); the send lane appends them (`pop_pipeline.py`).
Acknowledgements run on the send lane itself (`pop_settling.py`). An answer to a pop is a header and regions of the log as they stand on
disk, as that of a pull.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Final, cast

from protomq.v1.pop_service_pb2 import (
    AckRequest,
    AckResponse,
    ChangeInvisibleRequest,
    ChangeInvisibleResponse,
    GiveUpPopRequest,
    GiveUpPopResponse,
    PopResponse,
    PopStatus,
)
from protomq.wire.hashing import tag_code_of
from protomq.wire.topics import RETRY_PREFIX, retry_topic
from protomq_runtime.dispatch import drained
from protomq_runtime.errors import (
    ServiceError,
    corrupt_log,
    too_many,
)

from .filter_searches import FilterSearches, filter_failure
from .filters.errors import FilterError, FilterFailedError, FilterUnavailableError
from .filters.filter_book import Filter, FilterKey
from .filters.languages import MODULE, compile_filter
from .pop_answer import encode_pop_answer
from .pop_orders import PopAnswer, PopOrder
from .pop_pipeline import PopPipeline
from .pop_requests import PopRequests, checked_hold_id
from .pop_settling import PopSettler
from .store.state.popped_queue import QueueOfGroup
from .store_errors import to_service_error

if TYPE_CHECKING:
    from protomq_runtime.call import Call, CallContext, CallLane
    from protomq_runtime.clock import Clock
    from protomq_runtime.regions import Region

    from .config import BrokerConfig
    from .filter_modules import FilterModules
    from .group_members import GroupMembers
    from .pop_time import PopTime
    from .store.queues.reading import LogRegion
    from .store.store import Store
    from .system_writer import SystemWriter
    from .waiting_answers import WaitingAnswers

GIVEN_UP_COUNT_MAX: Final = 4_096
"""Pops that were given up when they were not held: each may be on its way. The oldest are forgotten: these were answered long ago."""


class PopService:
    """Implements protomq.v1.PopService. `signal`, `signal_deleted`, `signal_grown`, `forget_module`, `stop`: any thread; `ack` and
    `change_invisible`: the send lane; the rest: the pop lane."""

    def __init__(
        self,
        store: Store,
        config: BrokerConfig,
        writer: SystemWriter,
        waiting: WaitingAnswers,
        modules: FilterModules,
        members: GroupMembers,
        clock: Clock,
        pop_time: PopTime,
        broker_name: str,
    ) -> None:
        self._store = store
        self._config = config
        self._members = members
        self._clock = clock
        self._time = pop_time
        self._broker_name = broker_name
        self._requests = PopRequests(store, config, broker_name)
        self.pipeline = PopPipeline(store, writer, waiting, pop_time, config, self, clock.monotonic)
        self._settler = PopSettler(
            store, config, writer, waiting, pop_time, self._requests, self._signal_freed
        )
        self._searches = FilterSearches(partial(compile_filter, module=modules.read))
        self._held: dict[str, dict[PopOrder, None]] = {}  # by topic
        self._held_by_id: dict[bytes, PopOrder] = {}
        self._given_up: dict[bytes, None] = {}
        self._arrivals: dict[str, int] = {}
        """Of topics for which pops were held, and of the retry topics of their groups: retention may have left a message a copy there.

        Other threads change counts under the lock, else a count could fall back to one that a pop has seen. The lane adds topics.
        """
        self._counting = threading.Lock()
        # Topics, with the group where it is about one only.
        self._woken: deque[tuple[str, str | None]] = deque()
        self._is_posted = False
        self._lane: CallLane | None = None
        self._stopping = False

    def begin(self, lane: CallLane) -> None:
        """The broker takes changes now. `lane`: the pop lane, on which this is called."""
        self.pipeline.begin(lane)

    # Calls.

    @drained
    def pop(self, calls: list[Call]) -> None:
        """Answers each with messages, or holds it."""
        orders: list[PopOrder] = []
        for call in calls:
            try:
                order = self._order_of(call)
            except Exception as error:
                if not call.answered:
                    call.fail(to_service_error(error))
                continue
            if order is not None:
                self._note_arrivals(order)
                orders.append(order)
        self.pipeline.add_all(orders)

    def _order_of(self, call: Call) -> PopOrder | None:
        """What the call asks for; None if that is added once its filter is compiled. Raises ServiceError."""
        request, hold_id = self._requests.pop(call)
        self._lane = call.lane
        self._members.seen(request.consumer_group, call.peer, request.hold_ms)
        self._members.came_beside(request.consumer_group, "a simple consumer (pop)", call.peer, request.hold_ms)
        order = PopOrder(call, request, request.tag_codes, hold_id=hold_id)
        if request.hold_ms:
            order.ends_ms = self._clock.monotonic_ms() + call.hold_time_ms(request.hold_ms)
        if request.filter_key is None:
            return order

        def use(filter_: Filter) -> None:
            order.filter = filter_
            order.tag_codes = frozenset(tag_code_of(tag.decode()) for tag in filter_.tags)
            self._add(order)

        self._searches.find(call, request.filter_key, use)
        return None

    @drained
    def ack(self, calls: list[Call]) -> None:
        """Settles messages. The answer comes when that is stored."""
        self._settler.settle(calls, AckRequest, AckResponse)

    @drained
    def change_invisible(self, calls: list[Call]) -> None:
        """Gives messages another invisible time. The answer comes when that is stored."""
        self._settler.settle(calls, ChangeInvisibleRequest, ChangeInvisibleResponse)

    def give_up_pop(self, request: GiveUpPopRequest, _: CallContext) -> GiveUpPopResponse:
        """Ends a pop that is held, or will be. One that finds messages is answered with them: its caller gives them back."""
        order = self._held_by_id.get(checked_hold_id(request.hold_id))
        if order is not None:
            order.call.cancel()
        else:
            self._given_up[request.hold_id] = None
            if len(self._given_up) > GIVEN_UP_COUNT_MAX:
                del self._given_up[next(iter(self._given_up))]
        return GiveUpPopResponse()

    # Other threads.

    def signal(self, keys: Iterable[tuple[str, int]]) -> None:
        """Called when messages of these queues have become readable. Any thread."""
        arrivals = self._arrivals
        if not arrivals:
            return
        for topic in {topic for topic, _ in keys}:
            if topic in arrivals:
                self._arrived(topic, None)

    def _signal_freed(self, group: str, topic: str) -> None:
        """Called on the send lane when messages were settled, so that others of the group may be free."""
        if topic in self._arrivals:
            self._arrived(topic, group)

    def signal_deleted(self, topic: str) -> None:
        """Answers the pops that wait for messages of a deleted topic."""
        self.signal([(topic, 0)])

    def signal_grown(self, topic: str) -> None:
        """Plans the pops of a topic again that has got more queues: messages may stand there since it was made smaller."""
        self.signal([(topic, 0)])

    def signal_group(self, group: str) -> None:
        """Plans the waiting pops of a group again: it was reset or deleted, or its new settings forbid it to consume."""
        if self._lane is not None:
            self._lane.post(partial(self._look_for_group, group))

    def forget_module(self, name: str) -> None:
        """Forgets a filter module that was replaced or deleted."""
        self._searches.forget(FilterKey(MODULE, name))

    @property
    def failed_filter_count(self) -> int:
        """How often a module of a user has failed at a message."""
        return self._searches.failed_count

    def stop(self) -> None:
        """Answers all held pops; from now on no pop is held."""
        self._stopping = True
        if self._lane is not None:
            self._lane.post(self._release)

    def close(self) -> None:
        """Ends the thread that compiles filters. Call it when no lane runs any more."""
        self._searches.close()

    # What the pipeline tells.

    def popped(self, answer: PopAnswer, failure: Exception | None) -> None:
        """Answers a pop with its messages. If its caller has gone, given it up or stopped waiting, others may have them at once."""
        order = answer.order
        self._drop(order)
        if order.call.answered or order.call.closed or order.call.is_late:
            if failure is None:
                self._settler.post_give_back(answer)
            if not order.call.answered:
                self._answer_nothing(order)
            return
        if failure is not None:
            order.call.fail(to_service_error(failure))
            return
        regions: list[LogRegion] = []
        for part in answer.parts:
            if not self._store.regions_hold(part.result.regions):
                order.call.fail(to_service_error(_damaged_meanwhile()))
                return
            regions += part.result.regions
        for part in answer.parts:
            self._store.count_read(order.request.topic, part.result)
        header, size_bytes = encode_pop_answer(answer, self._broker_name, self._store.epoch)
        # The store's regions have the same three fields as the runtime's: the store cannot import that one.
        order.call.answer(header, cast("list[Region]", regions), size_bytes)

    def found_nothing(self, order: PopOrder, time_ms: int) -> None:
        """Holds the pop if its hold time is not over. What was due at this pop time has been looked at."""
        left_ms = order.ends_ms - self._clock.monotonic_ms()
        if left_ms <= 0 or self._stopping or order.call.is_late:
            self._answer_nothing(order)
            return
        call, request = order.call, order.request
        if not order.is_held:
            limit = self._config.lanes.hold_max
            if call.lane.holds >= limit:
                message = f"{limit} pops are held already; pop without a hold, or at another broker"
                call.fail(too_many("held pops", limit, message, retry_delay_ms=1_000))
                return
            order.is_held = True
            self._held.setdefault(request.topic, {})[order] = None
            call.hold(lambda: self._drop(order))
            if order.hold_id:
                self._held_by_id[order.hold_id] = order
                if order.hold_id in self._given_up:
                    del self._given_up[order.hold_id]
                    call.cancel()
                    return
        arrivals = self._arrivals_for(order)
        if order.arrival_count != arrivals:  # they came while it was looked for, or it was not known that anybody waits
            order.arrival_count = arrivals
            self._add(order)
            return
        due_ms = self._next_due_ms(order, time_ms)
        if due_ms is not None:
            left_ms = min(left_ms, max(due_ms - self._time.now_ms(), 1))
        order.timer = call.lane.call_later(left_ms, partial(self._look_again, order))

    def refused(self, order: PopOrder, failure: Exception) -> None:
        """Answers with an error."""
        self._drop(order)
        if isinstance(failure, FilterError | FilterUnavailableError):
            assert order.request.filter_key is not None
            if isinstance(failure, FilterFailedError):
                assert failure.queue is not None
                self._searches.note_failure(failure, failure.queue, order.request)
            failure = filter_failure(failure, order.request.filter_key.language)
        if not order.call.answered:
            order.call.fail(to_service_error(failure))

    # Parts.

    def _add(self, order: PopOrder) -> None:
        self._note_arrivals(order)
        self.pipeline.add(order)

    def _note_arrivals(self, order: PopOrder) -> None:
        if order.request.hold_ms and order.arrival_count < 0:
            order.arrival_count = self._arrivals_for(order)

    def _arrivals_for(self, order: PopOrder) -> int:
        """Number of arrivals where the pop reads."""
        arrivals, topic, kept = self._arrivals, order.request.topic, retry_topic(order.request.consumer_group)
        if kept not in arrivals and self._store.topics.find(kept) is not None:
            arrivals[kept] = 1  # They may have come before: who has looked looks again.
        return arrivals.setdefault(topic, 0) + (arrivals.get(kept, 0) if kept != topic else 0)

    def _look_again(self, order: PopOrder) -> None:
        """Plans one held pop again."""
        if order.timer is None:
            return  # it is about to be
        order.timer.cancel()
        order.timer = None
        order.arrival_count = self._arrivals_for(order)
        self.pipeline.add(order)

    def _arrived(self, topic: str, group: str | None) -> None:
        """Counts before it wakes: a pop that is looked for now, and so not held yet, sees it by the count."""
        with self._counting:
            self._arrivals[topic] += 1
        self._wake(topic, group)

    def _wake(self, topic: str, group: str | None) -> None:
        """Makes the lane plan the waiting pops of a topic again, for one group or all. Many arrivals cause one look. Any thread."""
        lane = self._lane
        self._woken.append((topic, group))
        if not self._is_posted and lane is not None:
            self._is_posted = True
            lane.post(self._run_woken)

    def _run_woken(self) -> None:
        self._is_posted = (
            False  # before the queue is drained: what is signalled from here on posts again
        )
        woken = self._woken
        for topic, group in dict.fromkeys(woken.popleft() for _ in range(len(woken))):
            self._look_at(topic, group)
            if topic.startswith(RETRY_PREFIX):
                self._look_for_group(topic.removeprefix(RETRY_PREFIX))

    def _look_at(self, topic: str, group: str | None) -> None:
        for order in list(self._held.get(topic, ())):
            if group is None or order.request.consumer_group == group:
                self._look_again(order)

    def _look_for_group(self, group: str) -> None:
        for topic in list(self._held):
            self._look_at(topic, group)

    def _release(self) -> None:
        for held in list(self._held.values()):
            for order in list(held):
                self._answer_nothing(order)

    def _answer_nothing(self, order: PopOrder) -> None:
        self._drop(order)
        if order.call.answered:
            return
        topic = self._store.topics.find(order.request.topic)
        incarnation = topic.incarnation if topic is not None else 0
        response = PopResponse(
            status=PopStatus.POP_STATUS_NO_NEW_MSG,
            topic_incarnation=incarnation,
            invisible_ms=order.request.invisible_ms,
            may_be_given_up=True,
        )
        order.call.answer(response.SerializeToString())

    def _drop(self, order: PopOrder) -> None:
        """Removes a pop from the held ones."""
        if order.timer is not None:
            order.timer.cancel()
            order.timer = None
        if not order.is_held:
            return
        order.is_held = False
        if self._held_by_id.get(order.hold_id) is order:
            del self._held_by_id[order.hold_id]
        topic = order.request.topic
        held = self._held.get(topic)
        if held is not None:
            held.pop(order, None)
            if not held:
                del self._held[topic]

    def _next_due_ms(self, order: PopOrder, after_ms: int) -> int | None:
        """Pop time behind `after_ms` at which a message that another member holds is due, if this pop may have it."""
        request = order.request
        topic = self._store.topics.find(request.topic)
        if topic is None:
            return None
        due_ms: int | None = None
        state = self._store.popped
        group, name = request.consumer_group, request.topic
        with state.lock:
            if request.queue_id >= 0:
                queue_ids = [request.queue_id]
            else:
                gone = state.open_queues_from(group, name, topic.incarnation, topic.read_queues)
                queue_ids = [*range(topic.read_queues), *gone]
            for queue_id in queue_ids:
                key = QueueOfGroup(group, name, queue_id)
                known = state.find(key, topic.incarnation)
                found = known.next_deadline_ms(after_ms) if known is not None else None
                if found is not None and (due_ms is None or found < due_ms):
                    due_ms = found
        return due_ms


def _damaged_meanwhile() -> ServiceError:
    return corrupt_log(
        "the messages were found damaged while they were handed out; they come again", {}
    )
