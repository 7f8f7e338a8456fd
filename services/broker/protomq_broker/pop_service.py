"""PopService: messages for members of a group that have no queues of their own.

It runs on one lane of one thread, which alone plans what is handed out (`pop_planner.py`) and waits for the send lane to append it
(`pop_pipeline.py`). An answer to a pop is a header and regions of the log as they stand on disk, as that of a pull.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
from google.protobuf.message import DecodeError

from protomq.v1.pop_service_pb2 import (
    AckRequest,
    AckResponse,
    ChangeInvisibleRequest,
    ChangeInvisibleResponse,
    PoppedMessages,
    PopRequest,
    PopResponse,
    PopStart,
    PopStatus,
)
from protomq.v1.pull_service_pb2 import FilterType
from protomq.wire.hashing import tag_code_of
from protomq.wire.record import NOT_IN_TAGS, encode_varint
from protomq_runtime.dispatch import raw
from protomq_runtime.errors import (
    ServiceError,
    corrupt_log,
    invalid_argument,
    too_many,
    unparsable,
)

from .filter_searches import FilterSearches, filter_failure, key_of, language_of
from .filters.errors import FilterError, FilterUnavailableError
from .filters.filter_book import Filter, FilterKey
from .filters.languages import MODULE, compile_filter
from .pop_orders import PopAnswer, PopOrder, SettleAnswer, SettleOrder
from .pop_pipeline import PopPipeline
from .pop_receipts import (
    Receipt,
    check_receipt,
    decode_receipt,
    encode_receipt,
    stale_receipt,
)
from .pull_answer import RECORD_COUNT_DEFAULT, SIZE_DEFAULT_BYTES
from .pull_service import GRPC_SIZE_MAX_BYTES, SIZE_MAX_BYTES, TAGS_MAX, read_filter
from .store.state.popped_queue import OPEN_MAX, QueueOfGroup, count_in
from .store_errors import to_service_error
from .topic_access import (
    check_group_name,
    check_incarnation,
    check_read_queue,
    group_disabled,
    readable_topic,
)

if TYPE_CHECKING:
    from protomq_runtime.call import Call, CallLane
    from protomq_runtime.clock import Clock
    from protomq_runtime.regions import Region

    from .config import BrokerConfig
    from .filter_modules import FilterModules
    from .group_members import GroupMembers
    from .pop_time import PopTime
    from .store.store import Store
    from .system_writer import SystemWriter
    from .waiting_answers import WaitingAnswers

RECORD_COUNT_MAX: Final = 1_024
SETTLED_COUNT_MAX: Final = OPEN_MAX
INVISIBLE_DEFAULT_MS: Final = 60_000
WAKE_COUNT_MAX: Final = 500
"""Held pops that are looked at again together."""


class PopService:
    """Implements protomq.v1.PopService. `signal`, `signal_deleted`, `forget_module`, `stop`: any thread; the rest: the pop lane."""

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
        self.pipeline = PopPipeline(store, writer, waiting, pop_time, config, self, clock.monotonic)
        self._searches = FilterSearches(partial(compile_filter, module=modules.read))
        self._held: dict[str, dict[PopOrder, None]] = {}  # by topic
        self._arrivals: dict[str, int] = {}  # of topics for which pops were held
        self._woken: deque[str] = deque()
        self._is_posted = False
        self._lane: CallLane | None = None
        self._stopping = False

    # Calls.

    @raw
    def pop(self, call: Call) -> None:
        """Answers with messages, or holds the call."""
        try:
            request, tag_codes = self._read_pop(call)
            filter_key = key_of(cast("Any", request))
        except Exception as error:
            call.fail(to_service_error(error))
            return
        self._lane = call.lane
        self._members.seen(request.consumer_group, call.peer, request.hold_ms)
        order = PopOrder(call, request, tag_codes)
        order.ends_ms = self._clock.monotonic_ms() + call.hold_time_ms(request.hold_ms)
        if filter_key is None:
            self._add(order)
            return

        def use(filter_: Filter) -> None:
            order.filter = filter_
            order.tag_codes = frozenset(tag_code_of(tag.decode()) for tag in filter_.tags)
            self._add(order)

        self._searches.find(call, filter_key, use)

    @raw
    def ack(self, call: Call) -> None:
        """Settles messages; answered when that is stored."""
        self._settle(call, AckRequest, None)

    @raw
    def change_invisible(self, call: Call) -> None:
        """Holds messages for another time; answered when that is stored."""
        self._settle(call, ChangeInvisibleRequest, self._invisible_ms_of)

    def _settle(
        self,
        call: Call,
        request_class: type[Any],
        invisible_ms_of: Callable[[Any], int] | None,
    ) -> None:
        try:
            request = request_class.FromString(bytes(call.payload))
            messages = self._read_receipts(request)
            invisible_ms = invisible_ms_of(request) if invisible_ms_of is not None else None
        except DecodeError:
            call.fail(unparsable(f"protomq.v1.{request_class.__name__}"))
            return
        except Exception as error:
            call.fail(to_service_error(error))
            return
        self._lane = call.lane
        group, topic = request.consumer_group, request.topic
        self.pipeline.add(SettleOrder(call, group, topic, messages, invisible_ms))

    # Other threads.

    def signal(self, keys: Iterable[tuple[str, int]]) -> None:
        """Messages of these queues have become readable."""
        arrivals = self._arrivals
        if not arrivals:
            return
        for topic in {topic for topic, _ in keys}:
            count = arrivals.get(topic)
            if count is not None:
                arrivals[topic] = count + 1
                self._wake(topic)

    def signal_deleted(self, topic: str) -> None:
        """The topic was deleted: who waits for its messages is answered."""
        self.signal([(topic, 0)])

    def signal_group(self, group: str) -> None:
        """The group has other settings: those who wait for messages of its are refused, if it may not consume any more."""
        if self._lane is not None:
            self._lane.post(partial(self._look_for_group, group))

    def forget_module(self, name: str) -> None:
        """A module by which pops may filter is another one now, or gone."""
        self._searches.forget(FilterKey(MODULE, name))

    def stop(self) -> None:
        """Answers all that is held; from now on nothing is held."""
        self._stopping = True
        if self._lane is not None:
            self._lane.post(self._release)

    def close(self) -> None:
        """Ends the thread of filters; no lane runs any more."""
        self._searches.close()

    # What the pipeline tells.

    def popped(self, answer: PopAnswer, failure: Exception | None) -> None:
        """Answers a pop with its messages."""
        order = answer.order
        self._drop(order)
        if order.call.answered:
            return
        if failure is not None:
            order.call.fail(to_service_error(failure))
            return
        results = [part.result for part in answer.parts]
        if not all(self._store.regions_hold(result.regions) for result in results):
            order.call.fail(to_service_error(_damaged_meanwhile()))
            return
        for result in results:
            self._store.count_read(order.request.topic, result)
        header, size_bytes = self._encode(answer)
        # The store's regions have the same three fields as the runtime's: the store cannot import that one.
        regions = cast("list[Region]", [region for result in results for region in result.regions])
        order.call.answer(header, regions, size_bytes)

    def settled(self, answer: SettleAnswer, failure: Exception | None) -> None:
        """Answers who has settled messages."""
        order = answer.order
        call = order.call
        if call.answered:
            return
        if failure is not None:
            call.fail(to_service_error(failure))
            return
        if answer.stale and not answer.done_count:
            index, runs = answer.stale[0]
            call.fail(stale_receipt(order.topic, order.messages[index][0].queue_id, runs[0]))
            return
        response = AckResponse() if order.invisible_ms is None else ChangeInvisibleResponse()
        for index, runs in answer.stale:
            receipt = encode_receipt(order.messages[index][0])
            response.stale_messages.append(PoppedMessages(receipt=receipt, offset_runs=runs))
        call.answer(response.SerializeToString())

    def found_nothing(self, order: PopOrder) -> None:
        """Holds the pop, if it may be held for longer."""
        left_ms = order.ends_ms - self._clock.monotonic_ms()
        if left_ms <= 0 or self._stopping:
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
        arrivals = self._arrivals.get(request.topic, 0)
        if order.arrival_count != arrivals:  # they came while it was looked for, or it was not known that anybody waits
            order.arrival_count = arrivals
            self._add(order)
            return
        due_ms = self._next_due_ms(order)
        if due_ms is not None:
            left_ms = min(left_ms, max(due_ms - self._time.now_ms(), 1))
        order.timer = call.lane.call_later(left_ms, partial(self._look_again, order))

    def refused(self, order: PopOrder | SettleOrder, failure: Exception) -> None:
        """Answers with an error."""
        if isinstance(order, PopOrder):
            self._drop(order)
            if isinstance(failure, FilterError | FilterUnavailableError):
                failure = filter_failure(failure, language_of(cast("Any", order.request)))
        if not order.call.answered:
            order.call.fail(to_service_error(failure))

    def changed(self, group: str, topic: str) -> None:
        """Messages were settled: others may be free."""
        for order in list(self._held.get(topic, ())):
            if order.request.consumer_group == group:
                self._look_again(order)

    # Parts.

    def _add(self, order: PopOrder) -> None:
        topic = order.request.topic
        if order.request.hold_ms and order.arrival_count < 0:
            order.arrival_count = self._arrivals.setdefault(topic, 0)
        self.pipeline.add(order)

    def _look_again(self, order: PopOrder) -> None:
        """On its own, a held pop is planned again."""
        if order.timer is None:
            return  # it is about to be
        order.timer.cancel()
        order.timer = None
        order.arrival_count = self._arrivals.get(order.request.topic, 0)
        self.pipeline.add(order)

    def _wake(self, topic: str) -> None:
        """Any thread: the lane looks at who waits for the topic, once however much arrives."""
        lane = self._lane
        self._woken.append(topic)
        if not self._is_posted and lane is not None:
            self._is_posted = True
            lane.post(self._run_woken)

    def _run_woken(self) -> None:
        self._is_posted = False  # before the queue is drained: what is signalled from here on posts again
        woken = self._woken
        for topic in dict.fromkeys(woken.popleft() for _ in range(len(woken))):
            for order in list(self._held.get(topic, ())):
                self._look_again(order)

    def _look_for_group(self, group: str) -> None:
        for topic in list(self._held):
            self.changed(group, topic)

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
        )
        order.call.answer(response.SerializeToString())

    def _drop(self, order: PopOrder) -> None:
        """It is not held any more."""
        if order.timer is not None:
            order.timer.cancel()
            order.timer = None
        if not order.is_held:
            return
        order.is_held = False
        topic = order.request.topic
        held = self._held.get(topic)
        if held is not None:
            held.pop(order, None)
            if not held:
                del self._held[topic]

    def _next_due_ms(self, order: PopOrder) -> int | None:
        """Pop time at which somebody else's message is due that this pop may have."""
        request = order.request
        topic = self._store.topics.find(request.topic)
        if topic is None:
            return None
        queue_ids = (request.queue_id,) if request.HasField("queue_id") else range(topic.read_queues)
        due_ms: int | None = None
        state = self._store.popped
        with state.lock:
            for queue_id in queue_ids:
                key = QueueOfGroup(request.consumer_group, request.topic, queue_id)
                known = state.find(key, topic.incarnation)
                found = known.next_due_ms() if known is not None else None
                if found is not None and (due_ms is None or found < due_ms):
                    due_ms = found
        return due_ms

    def _encode(self, answer: PopAnswer) -> tuple[bytes, int]:
        """The fields of a PopResponse that stand in front of the regions, and the size of these."""
        request, topic = answer.order.request, answer.topic
        size_bytes = sum(part.result.regions_size_bytes for part in answer.parts)
        response = PopResponse(
            status=PopStatus.POP_STATUS_FOUND,
            topic_incarnation=topic.incarnation,
            invisible_ms=request.invisible_ms,
            regions_size_bytes=size_bytes,
        )
        last: Any = None
        place: tuple[int, int] | None = None
        starts, shift = [], 0
        for part in answer.parts:
            if place == (part.queue_id, part.number):
                last.record_count += len(part.offsets)
            else:
                place = part.queue_id, part.number
                receipt = encode_receipt(
                    Receipt(
                        self._broker_name, request.consumer_group, request.topic, topic.incarnation,
                        part.queue_id, part.number, answer.time_ms, request.invisible_ms, part.attempt,
                        self._store.epoch,
                    )
                )  # fmt: skip
                last = response.hand_outs.add(
                    queue_id=part.queue_id,
                    record_count=len(part.offsets),
                    attempt=part.attempt,
                    receipt=receipt,
                )
            starts.append(part.result.starts + np.uint32(shift) if shift else part.result.starts)
            shift += part.result.regions_size_bytes
        pieces = [response.SerializeToString()]
        _append_packed(pieces, b"\x4a", starts)  # 9, record_starts
        _append_packed(pieces, b"\x52", [part.result.sizes for part in answer.parts])  # 10
        offsets = [np.array(part.offsets, np.uint64) for part in answer.parts]
        _append_packed(pieces, b"\x5a", offsets)  # 11, queue_offsets
        return b"".join(pieces), size_bytes

    def _read_pop(self, call: Call) -> tuple[PopRequest, frozenset[int]]:
        """The request with its defaults filled in. Raises ServiceError."""
        try:
            request = PopRequest.FromString(bytes(call.payload))
        except DecodeError as error:
            raise unparsable("protomq.v1.PopRequest") from error
        check_group_name(request.consumer_group)
        if request.consumer_group in self._store.groups.disabled:
            raise group_disabled(request.consumer_group)
        topic = readable_topic(self._store, request.topic)
        check_incarnation(topic, request.topic_incarnation)
        if request.HasField("queue_id"):
            check_read_queue(topic, request.queue_id)
        config = self._config
        for field, largest in (
            ("record_count_max", RECORD_COUNT_MAX),
            ("size_max_bytes", SIZE_MAX_BYTES),
            ("hold_ms", config.hold_max_ms),
        ):
            if not 0 <= getattr(request, field) <= largest:
                raise invalid_argument(field, f"must be 0 to {largest}")
        request.record_count_max = request.record_count_max or RECORD_COUNT_DEFAULT
        request.size_max_bytes = request.size_max_bytes or SIZE_DEFAULT_BYTES
        if call.transport == "grpc":
            request.size_max_bytes = min(request.size_max_bytes, GRPC_SIZE_MAX_BYTES)
        request.invisible_ms = request.invisible_ms or INVISIBLE_DEFAULT_MS
        least, most = config.pop_invisible_min_ms, config.pop_invisible_max_ms
        if not least <= request.invisible_ms <= most:
            raise invalid_argument("invisible_ms", f"must be {least} to {most}, or 0 for {INVISIBLE_DEFAULT_MS}")
        if request.start not in PopStart.values():
            raise invalid_argument("start", f"this broker knows no start {request.start}")
        if len(request.tags) > TAGS_MAX:
            raise invalid_argument("tags", f"at most {TAGS_MAX}")
        if request.filter_type or request.filter:
            read_filter(cast("Any", request))
        if request.filter_type in (FilterType.FILTER_TYPE_UNSPECIFIED, FilterType.FILTER_TYPE_TAG):
            request.filter_type = FilterType.FILTER_TYPE_UNSPECIFIED
        wrong = next(filter(NOT_IN_TAGS.search, request.tags), None)
        if wrong is not None:
            raise invalid_argument(
                "tags", f"no message has the tag {wrong!r}: give the tags one by one, without ||"
            )
        return request, frozenset(map(tag_code_of, request.tags))

    def _read_receipts(self, request: Any) -> list[tuple[Receipt, Sequence[int]]]:
        """Receipts and runs of offsets. Raises ServiceError."""
        check_group_name(request.consumer_group)
        readable_topic(self._store, request.topic)
        messages: list[tuple[Receipt, Sequence[int]]] = []
        count = 0
        for number, named in enumerate(request.messages):
            receipt = decode_receipt(named.receipt)
            check_receipt(receipt, self._broker_name, request.consumer_group, request.topic)
            runs = tuple(named.offset_runs)
            if not runs or len(runs) % 2 or min(runs) < 0 or min(runs[1::2]) < 1 or max(runs[1::2]) > OPEN_MAX:
                raise invalid_argument(
                    f"messages[{number}].offset_runs", "has pairs of a queue offset and a number of messages"
                )
            count += count_in(runs)
            messages.append((receipt, runs))
        if not 0 < count <= SETTLED_COUNT_MAX:
            raise invalid_argument("messages", f"1 to {SETTLED_COUNT_MAX} at once, these are {count}")
        return messages

    def _invisible_ms_of(self, request: ChangeInvisibleRequest) -> int:
        most = self._config.pop_invisible_max_ms
        if not 0 <= request.invisible_ms <= most:
            raise invalid_argument("invisible_ms", f"must be 0 to {most}")
        return request.invisible_ms


def _damaged_meanwhile() -> ServiceError:
    return corrupt_log("the messages were found damaged while they were handed out; they come again", {})


def _append_packed(pieces: list[bytes], tag: bytes, columns: Sequence[Any]) -> None:
    data = columns[0].tobytes() if len(columns) == 1 else np.concatenate(columns).tobytes()
    pieces += (tag, encode_varint(len(data)), data)
