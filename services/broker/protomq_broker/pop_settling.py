"""Settles popped messages: all acknowledgements and changes of invisible times that came in one turn of the send lane.

Rules:
- What comes together is one record, and one append: an acknowledgement costs no record.
- It is looked at and appended on the one thread that applies records, so nothing comes in between. The pop lane is not asked; a plan of
  its own that holds no more is void (`pop_pipeline.py`).
- Long work is done in parts, in the order in which it came. Each part has its own turn of the lane, so a send waits for one part.
- A delivery that nobody has seen is taken back in a record of its own, for it opens messages, and other calls may acknowledge them.
- An answer waits for what SEND_OK waits for: a stale receipt is known by a record, too, that may not be stored yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from google.protobuf.message import DecodeError

from protomq.v1.pop_service_pb2 import ChangeInvisibleRequest
from protomq.v1.state_pb2 import PoppedQueue, PopRecord
from protomq.wire.runs import count_in, runs_of
from protomq.wire.topics import POP_TOPIC
from protomq_runtime.errors import DEADLINE_EXCEEDED, system_busy, unparsable

from .pop_receipts import stale_receipt
from .pop_time import deadline_ms
from .store.log.transit import cut_error
from .store.state.popped_queue import QueueOfGroup, take_back
from .store_errors import to_service_error

if TYPE_CHECKING:
    from protomq_runtime.call import Call, CallLane

    from .config import BrokerConfig
    from .pop_orders import PopAnswer
    from .pop_requests import PopRequests
    from .pop_time import PopTime
    from .store.store import Store
    from .system_writer import SystemWriter
    from .waiting_answers import WaitingAnswers

PART_COST_MAX: Final = 10_000
"""After this a part ends: messages, and RECEIPT_COST for each receipt. Some 5 ms; a call is not parted, so it may be twice as long."""
RECEIPT_COST: Final = 40
"""What reading a receipt and answering costs, in messages of a long run."""
WAITING_SIZE_MAX_BYTES: Final = 16 << 20
"""Of calls that wait for their part; more are refused as by a full lane, unless nothing waits."""
WAITING_CALL_BYTES: Final = 1_000
"""What a waiting call takes besides its payload."""
BUSY_RETRY_DELAY_MS: Final = 100


class _Settled(NamedTuple):
    """A call and its outcome: an error, or an encoded answer."""

    call: Call
    outcome: Exception | bytes


class _Wait(NamedTuple):
    """A call that is not looked at yet, and what it brings and gets."""

    call: Call
    request_class: type[Any]
    response_class: type[Any]


class PopSettler:
    """Runs on the send lane. `on_freed` is called with (group, topic) when other pops may get messages now."""

    def __init__(
        self,
        store: Store,
        config: BrokerConfig,
        writer: SystemWriter,
        waiting: WaitingAnswers,
        pop_time: PopTime,
        requests: PopRequests,
        on_freed: Callable[[str, str], None],
    ) -> None:
        self._store = store
        self._state = store.popped
        self._config = config
        self._writer = writer
        self._waiting = waiting
        self._time = pop_time
        self._requests = requests
        self._on_freed = on_freed
        self._waits: deque[_Wait] = deque()
        self._waiting_bytes = 0

    def settle(
        self, calls: Sequence[Call], request_class: type[Any], response_class: type[Any]
    ) -> None:
        """Does what the calls ask for, and answers them when that is stored. What exceeds one part goes on in the lane's next turns."""
        lane = calls[0].lane
        is_idle = not self._waits
        for call in calls:
            size_bytes = len(call.payload)
            if self._waits and self._waiting_bytes + size_bytes > WAITING_SIZE_MAX_BYTES:
                call.fail(system_busy(lane.pool_name, BUSY_RETRY_DELAY_MS))
                continue
            self._waiting_bytes += size_bytes + WAITING_CALL_BYTES
            self._waits.append(_Wait(call, request_class, response_class))
        if is_idle:
            self._settle_part(lane)

    def post_give_back(self, answer: PopAnswer) -> None:
        """Makes the send lane take back what was handed out to a caller who is not there any more: it does not count. Any thread."""
        self._writer.post(partial(self._give_back, answer))

    def _give_back(self, answer: PopAnswer) -> None:
        request, incarnation = answer.order.request, answer.topic.incarnation
        turn = _Turn(self._time.now_ms())
        for part in answer.parts:
            key = QueueOfGroup(request.consumer_group, request.topic, part.queue_id)
            with self._state.lock:
                known = self._state.find(key, incarnation)
                held = known.held_and_lost(runs_of(part.offsets), part.number, answer.time_ms)[0] if known is not None else ()
            if held:
                told = turn.queue(key, incarnation)
                take_back(told, part.number, answer.time_ms, part.attempt, turn.record.time_ms, held)
                turn.freed[key.group, key.topic] = None
        # If that cannot be stored, they come again when their time is up.
        self._store_and_answer(turn, ())

    def _settle_part(self, lane: CallLane) -> None:
        """Of what waits, the first that are enough for a turn. The rest goes on in the next turn, in the order in which it came."""
        try:
            self._settle_some()
        finally:
            if self._waits:
                lane.post(partial(self._settle_part, lane))

    def _settle_some(self) -> None:
        turn = _Turn(self._time.now_ms())
        settled: list[_Settled] = []
        while self._waits and turn.cost < PART_COST_MAX:
            call, request_class, response_class = self._waits.popleft()
            self._waiting_bytes -= len(call.payload) + WAITING_CALL_BYTES
            if call.answered:
                continue
            try:
                if call.is_late:
                    raise DEADLINE_EXCEEDED
                try:
                    request = request_class.FromString(bytes(call.payload))
                except DecodeError:
                    raise unparsable(request_class.DESCRIPTOR.full_name) from None
                is_unseen = isinstance(request, ChangeInvisibleRequest) and request.unseen
                if is_unseen and turn.told:
                    # It would open again what this turn's record says is acknowledged.
                    self._store_and_answer(turn, settled)
                    turn, settled = _Turn(turn.record.time_ms, turn.cost), []
                outcome = self._look_at(turn, request, response_class)
            except Exception as error:
                call.fail(to_service_error(error))
                continue
            settled.append(_Settled(call, outcome))
            if is_unseen and turn.told:
                self._store_and_answer(turn, settled)
                turn, settled = _Turn(turn.record.time_ms, turn.cost), []
        if settled:
            self._store_and_answer(turn, settled)

    def _store_and_answer(self, turn: _Turn, settled: Sequence[_Settled]) -> None:
        position = self._store.appended_position
        if turn.told:
            try:
                body = turn.record.SerializeToString()
                position = self._writer.append_moved((), [(POP_TOPIC, [body])])
            except Exception as error:
                failure = to_service_error(error)
                for call, _ in settled:
                    call.fail(failure)
                return
            for group, topic in turn.freed:
                self._on_freed(group, topic)
        if self._waiting.is_stored(position):
            _answer(settled, None)
            return
        wait_ms = self._config.sync_flush_timeout_ms
        self._waiting.wait(self._writer.lane, position, wait_ms, partial(_answer, settled))
        self._waiting.request_flush()

    def _look_at(self, turn: _Turn, request: Any, response_class: type[Any]) -> Exception | bytes:
        """Adds the messages of a request that its receipts still hold to the turn's record. Returns the outcome. Raises ServiceError."""
        invisible_times_ms: Sequence[int] | None = None
        error = ""
        is_ack, is_unseen = True, False
        messages = self._requests.receipts(request)
        if isinstance(request, ChangeInvisibleRequest):
            is_ack = False
            invisible_times_ms = self._requests.invisible_times_ms(request, [receipt.attempt for receipt, _ in messages])
            error = cut_error(request.error)
            is_unseen = request.unseen
        group, topic = request.consumer_group, request.topic
        is_any_held, never_acknowledged = False, True
        stale: list[tuple[int, Sequence[int]]] = []
        for index, (receipt, runs) in enumerate(messages):
            turn.cost += RECEIPT_COST + count_in(runs)
            key = QueueOfGroup(group, topic, receipt.queue_id)
            held: Sequence[int] = ()
            lost, is_known, holds_back = runs, False, False
            with self._state.lock:
                known = self._state.find(key, receipt.incarnation)
                if known is not None:
                    held, lost = known.held_and_lost(runs, receipt.number, receipt.time_ms)
                    holds_back = known.holds_back
                    if lost and is_ack:
                        # The answer to an acknowledgement was lost, and it is said again.
                        acknowledged, lost = known.acknowledged.parted(lost, receipt.number, receipt.time_ms)
                        is_any_held = is_any_held or bool(acknowledged)
                        is_known = known.acknowledged.is_whole(receipt.number, receipt.time_ms)
            if held:
                told = turn.queue(key, receipt.incarnation)
                if is_unseen:
                    # By the receipt's attempt: said twice, it is the same.
                    take_back(told, receipt.number, receipt.time_ms, receipt.attempt, turn.record.time_ms, held)
                elif invisible_times_ms is None:
                    told.acked_runs.extend(held)
                else:
                    due_ms = deadline_ms(turn.record.time_ms, invisible_times_ms[index])
                    told.changes.add(deadline_ms=due_ms, runs=held)
                    if error:
                        told.errors.add(error=error, runs=held)
                is_any_held = True
                if holds_back or invisible_times_ms is not None:
                    turn.freed[group, topic] = None
            if lost:
                stale.append((index, lost))
                never_acknowledged = never_acknowledged and is_known
        if stale and not is_any_held:
            index, runs = stale[0]
            return stale_receipt(topic, messages[index][0].queue_id, runs[0], never_acknowledged=never_acknowledged)
        if not stale:
            return b""
        response = response_class(never_acknowledged=True) if never_acknowledged else response_class()
        for index, runs in stale:
            response.stale_messages.add(receipt=request.messages[index].receipt, offset_runs=runs)
        return bytes(response.SerializeToString())


class _Turn:
    """What the calls of one turn settle.

    Attributes:
        record: is appended.
        told: its queues.
        cost: of looking at all that, as of PART_COST_MAX.
        freed: groups and topics of which others may get messages then.
    """

    __slots__ = ("cost", "freed", "record", "told")

    def __init__(self, time_ms: int, cost: int = 0) -> None:
        self.record = PopRecord(time_ms=time_ms)
        self.cost = cost
        self.told: dict[QueueOfGroup, PoppedQueue] = {}
        self.freed: dict[tuple[str, str], None] = {}

    def queue(self, key: QueueOfGroup, incarnation: int) -> PoppedQueue:
        """Returns the part of the record about one queue; creates an empty one at first."""
        told = self.told.get(key)
        if told is None:
            told = self.told[key] = self.record.queues.add(
                consumer_group=key.group,
                topic=key.topic,
                topic_incarnation=incarnation,
                queue_id=key.queue_id,
            )
        return told


def _answer(settled: Sequence[_Settled], failure: Exception | None) -> None:
    for call, outcome in settled:
        if call.answered:
            continue
        if failure is not None:
            call.fail(to_service_error(failure))
        elif isinstance(outcome, bytes):
            call.answer(outcome)
        else:
            call.fail(to_service_error(outcome))
