"""SendService: appends messages. It runs on one lane of one thread, the only writer of the log.

All sends that a turn of the lane has collected are appended as one group: one write, one seal. Under SYNC_FLUSH the answers wait for the
disk (`waiting_answers.py`).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from google.protobuf.message import DecodeError

from protomq.v1.send_service_pb2 import RecallMessageRequest, SendResponse, SendStatus
from protomq.v1.topic_pb2 import TopicType
from protomq.wire.record import FLAG_DUE_TIME, FLAG_KIND_HALF, encode_message_id
from protomq.wire.topics import TRANSACTIONS_TOPIC
from protomq_ha.replicas import Confirmation
from protomq_runtime.dispatch import drained, raw
from protomq_runtime.errors import ServiceError, invalid_argument, unparsable

from .queue_choice import QueueChoice
from .send_request import ProducerIdentity, parse_send_header, read_records
from .store.errors import AppendTooLargeError
from .store.log.append import AppendRequest
from .store.log.commit_log import Reserve
from .store.state.send_errors import SendInFlightError
from .store.state.sent_runs import SEQUENCE_END_MAX
from .store.state.topics import incarnation_of_first
from .store_errors import to_service_error
from .topic_access import check_write_queue, writable_topic
from .topic_types import check_type
from .waiting_answers import NOT_COPIED_IN_TIME, NOT_STORED_IN_TIME

if TYPE_CHECKING:
    from protomq_runtime.call import Call
    from protomq_runtime.clock import Clock

    from .config import BrokerConfig
    from .delays import Delays
    from .half_sends import HalfSends
    from .recalls import Recalls
    from .store.log.append import RecordRegion
    from .store.state.topics import TopicConfig
    from .store.store import Store, StoredPlace
    from .transaction_checks import TransactionChecks
    from .waiting_answers import WaitingAnswers

MIXED = TopicType.TOPIC_TYPE_MIXED
SEND_OK = SendStatus.SEND_STATUS_SEND_OK
FLUSH_DISK_TIMEOUT = SendStatus.SEND_STATUS_FLUSH_DISK_TIMEOUT
FLUSH_SLAVE_TIMEOUT = SendStatus.SEND_STATUS_FLUSH_SLAVE_TIMEOUT
SLAVE_NOT_AVAILABLE = SendStatus.SEND_STATUS_SLAVE_NOT_AVAILABLE
GROUP_SIZE_BYTES = 8 << 20
"""A group of this many bytes is appended at once. A larger group gains nothing and delays its first caller."""
COPY_ROOM_BYTES = 1 << 10
"""By which the copy of a message may be larger, with the record of a state that goes with it."""


class _Pending(NamedTuple):
    """A send to be appended with the others of this turn."""

    call: Call
    topic: TopicConfig
    request: AppendRequest
    identified_here: bool
    wait_store_ok: bool
    new_topic: TopicConfig | None
    """The topic to create when the send is stored: a refused send leaves no topic behind."""
    previous_sequence: int | None


def _check_copies_fit(region: RecordRegion, append_size_max_bytes: int) -> None:
    """Raises AppendTooLargeError for delayed and half messages that could be stored, and then never delivered: a copy is an append, too."""
    size_max_bytes = append_size_max_bytes - COPY_ROOM_BYTES
    if len(region.data) <= size_max_bytes:  # always, unless segments are small
        return
    largest = len(region.data) if region.sizes is None else int(region.sizes.max())
    if largest > size_max_bytes:
        raise AppendTooLargeError(largest, size_max_bytes)


class _Group:
    """The sends that are appended together: with one write, one seal."""

    __slots__ = ("has_halves", "new_topics", "orders", "requests", "size_bytes")

    def __init__(self) -> None:
        self.orders: list[_Pending] = []
        self.requests: list[AppendRequest] = []
        self.new_topics: list[_Pending] = []
        """Those of the orders that create their topic."""
        self.size_bytes = 0
        self.has_halves = False


class SendService:
    """Implements protomq.v1.SendService. All methods on the send lane's thread."""

    def __init__(
        self,
        store: Store,
        config: BrokerConfig,
        clock: Clock,
        waiting: WaitingAnswers,
        delays: Delays,
        recalls: Recalls,
        halves: HalfSends,
        checks: TransactionChecks,
    ) -> None:
        self._store = store
        self._config = config
        self._now_ms = clock.now_ms
        self._waiting = waiting
        self._delays = delays
        self._recalls = recalls
        self._halves = halves
        self._checks = checks
        # One request more may join a group that is just below the limit.
        self._group_size_bytes = min(GROUP_SIZE_BYTES, store.append_size_max_bytes // 2)
        self._producer_id = secrets.randbits(63) | 1
        self._next_sequence = 0
        self._choice = QueueChoice()
        self._plain_response = SendResponse(status=SEND_OK)
        self.refusal: ServiceError | None = None
        """Why no send is taken at all: the broker's name belongs to another broker. Any thread sets it."""
        self.shortage: ServiceError | None = None
        """Why no send is taken now: too few slaves are in sync. Then repeated sends are not answered either."""
        self.confirmation = Confirmation()
        """Whether enough copies have the stored messages. The send lane."""

    @drained
    def send(self, calls: list[Call]) -> None:
        """Appends all sends that have arrived by now as one group."""
        refusal = self.refusal or self.shortage
        if refusal is not None:
            for call in calls:
                call.fail(refusal)
            return
        group = _Group()
        find_repeated = self._store.find_repeated
        for call in calls:
            try:
                order = self._read(call)
                request = order.request
                try:
                    repeated = find_repeated(request, order.previous_sequence)
                except SendInFlightError:
                    # The same send came twice in one turn. The broker recognises the second only when the first is stored.
                    self._append(group)
                    group = _Group()
                    repeated = find_repeated(request, order.previous_sequence)
            except Exception as error:
                call.fail(to_service_error(error))
                continue
            if repeated is not None:
                self._answer_repeated(order, repeated)
                continue
            region = request.region
            topic = order.topic
            is_checked = region.flags or topic.type != MIXED or not 0 <= request.queue_id < topic.write_queues
            if is_checked and not self._is_taken(order):
                # Otherwise the claims of the refused send would go on counting.
                self._append(group)
                group = _Group()
                continue
            group.orders.append(order)
            group.requests.append(request)
            if order.new_topic is not None:
                group.new_topics.append(order)
            group.size_bytes += len(region.data)
            if region.flags & FLAG_KIND_HALF:
                group.has_halves = True
            if group.size_bytes >= self._group_size_bytes:
                self._append(group)
                group = _Group()
        if group.orders:
            self._append(group)

    @raw
    def recall_message(self, call: Call) -> None:
        """Recalls a delayed message, or answers that it is too late. The answer comes when the recall is stored."""
        if self.refusal is not None:
            call.fail(self.refusal)
            return
        try:
            self._recalls.recall(RecallMessageRequest.FromString(bytes(call.payload)), call)
        except DecodeError:
            call.fail(unparsable("protomq.v1.RecallMessageRequest"))
        except Exception as error:
            call.fail(to_service_error(error))

    def _read(self, call: Call) -> _Pending:
        header = parse_send_header(call.payload)
        topic, exists = writable_topic(self._store, self._config, header.topic)
        region, identified_here = read_records(
            call.payload,
            header,
            now_ms=self._now_ms,
            identify=self._identify,
            # Most sends ask for no delay; they save this call.
            due_time_ms=self._delays.due_time_ms(header) if header.WhichOneof("delay") else None,
        )
        if region.first_sequence + region.count > SEQUENCE_END_MAX and region.producer_id:
            raise invalid_argument(
                "records[0].sequence",
                f"the last sequence of this send is {region.first_sequence + region.count - 1}, {SEQUENCE_END_MAX - 1} is the highest"
                " there can be; go on with a higher producer epoch, from 0",
            )
        if region.flags:
            self._delays.check(region)
        if header.half:
            self._halves.mark(region, not identified_here)
        queue_id = header.queue_id if header.HasField("queue_id") else self._choice.choose(topic, region, exists)
        wait_store_ok = header.wait_store_ok if header.HasField("wait_store_ok") else True
        previous_sequence = header.previous_sequence if header.HasField("previous_sequence") else None
        if identified_here and previous_sequence is not None:
            raise invalid_argument(
                "records[0].producer_id",
                "is 0, and previous_sequence names an earlier message of its producer: give both, or leave out previous_sequence",
            )
        return _Pending(
            call,
            topic,
            AppendRequest(region, queue_id),
            identified_here,
            wait_store_ok,
            None if exists else topic,
            previous_sequence,
        )

    def _is_taken(self, order: _Pending) -> bool:
        """Whether the broker takes these new messages; if not, the call gets the error."""
        region = order.request.region
        try:
            check_write_queue(order.topic, order.request.queue_id)
            check_type(order.topic, region)
            if region.flags:
                _check_copies_fit(region, self._store.append_size_max_bytes)
            if region.flags & FLAG_DUE_TIME:
                self._delays.check_room()
            if region.flags & FLAG_KIND_HALF:
                self._halves.check(region)
        except Exception as error:
            order.call.fail(to_service_error(error))
            return False
        return True

    def _identify(self, count: int) -> ProducerIdentity:
        first = self._next_sequence
        self._next_sequence += count
        return ProducerIdentity(self._producer_id, 0, first)

    def _answer_repeated(self, order: _Pending, found: StoredPlace) -> None:
        """Answers a send that is already stored with the places of the first time. It waits for the disk as the first send did."""
        response = SendResponse(
            status=SEND_OK,
            queue_id=found.queue_id,
            queue_offset=found.queue_offset,
            record_count=order.request.region.count,
            physical_offset=found.physical_offset,
            repeated_send=True,
        )
        region = order.request.region
        if region.flags & FLAG_KIND_HALF:
            response.transaction_handles.extend(
                self._halves.handles_at(found.physical_offset, region)
            )
        elif region.flags:
            response.recall_handle = self._recalls.handle_at(found.physical_offset, region)
        self._answer(order, response, self._store.appended_position)
        self._waiting.request_flush()

    def _append(self, group: _Group) -> None:
        if not group.orders:
            self._store.drop_claims()
            return
        try:
            end_position = self._append_halves(group) if group.has_halves else self._store.append(group.requests)
        except Exception as error:
            failure = to_service_error(error)
            for order in group.orders:
                order.call.fail(failure)
            return
        if group.new_topics:
            end_position = max(end_position, self._add_topics(group.new_topics))
        is_stored = self._waiting.is_stored(end_position)
        status = self._status_at(end_position)
        for order in group.orders:
            request = order.request
            region = request.region
            is_answered_now = is_stored or not order.wait_store_ok
            if is_answered_now and not region.flags and not order.identified_here:
                # Nearly all sends go this way: filling one message object again costs half of creating a new one.
                plain = self._plain_response
                plain.status = status
                plain.queue_id = request.queue_id
                plain.queue_offset = request.queue_offset
                plain.record_count = region.count
                plain.physical_offset = request.physical_offset
                order.call.answer(plain.SerializeToString())
                continue
            response = SendResponse(
                status=SEND_OK,
                queue_id=request.queue_id,
                queue_offset=request.queue_offset,
                record_count=region.count,
                physical_offset=request.physical_offset,
            )
            handles = self._add_handles(response, request) if region.flags else b""
            if order.identified_here:
                response.message_id = encode_message_id(
                    region.producer_id, region.producer_epoch, region.first_sequence
                )
            self._answer(order, response, end_position, handles)
        self._waiting.request_flush()

    def _append_halves(self, group: _Group) -> int:
        """Appends sends with half messages among them, and when those are due, if their store times do not tell. Returns where they end."""
        store = self._store
        begun = self._checks.begun_record(group.requests)
        if begun is None:
            return store.append(group.requests)
        if group.size_bytes + len(begun) + COPY_ROOM_BYTES <= store.append_size_max_bytes:
            return store.append_moved(group.requests, [(TRANSACTIONS_TOPIC, [begun])], Reserve.MESSAGES)
        store.append(group.requests)  # only if segments are small
        return store.append_state(TRANSACTIONS_TOPIC, [begun])

    def _add_handles(self, response: SendResponse, request: AppendRequest) -> bytes:
        """Adds the handles of messages that nobody gets yet: delayed and half messages. Returns further fields of the response."""
        if request.region.flags & FLAG_KIND_HALF:
            self._checks.arm()
            return self._halves.handle_fields_of(request)
        response.recall_handle = self._recalls.handle_of(request)
        return b""

    def _add_topics(self, pending: Sequence[_Pending]) -> int:
        """Adds the topics that these stored sends have created. Returns where their record ends."""
        topics = []
        for order in pending:
            topic, position = order.new_topic, order.request.physical_offset
            assert topic is not None
            incarnation = incarnation_of_first(self._store.id, topic.name, position)
            topics.append(replace(topic, incarnation=incarnation))
            self._choice.begin(topic.name)
        return self._store.topics.add(topics)

    def _answer(
        self, order: _Pending, response: SendResponse, position: int, more: bytes = b""
    ) -> None:
        """`more`: further fields of the response."""
        call = order.call
        if not order.wait_store_ok or self._waiting.is_stored(position):
            response.status = self._status_at(position)
            call.answer(response.SerializeToString() + more)
            return
        positions = self._store.positions
        timeout_ms = self._config.sync_flush_timeout_ms
        if positions.waits_for_replicas:
            timeout_ms = self._config.ha.sync_timeout_ms
        wait_ms = call.hold_time_ms(timeout_ms)
        answer = partial(self._answer_late, call, response, position, more)
        self._waiting.wait(call.lane, position, wait_ms, answer)

    def _status_at(self, position: int) -> SendStatus.ValueType:
        """The status of a send that is stored as promised, up to `position`."""
        return SEND_OK if self.confirmation.has_all_copies(position) else SLAVE_NOT_AVAILABLE

    def _answer_late(
        self,
        call: Call,
        response: SendResponse,
        position: int,
        more: bytes,
        failure: Exception | None,
    ) -> None:
        """Answers a send that waited for the disk or for slaves: it is stored, or may not be."""
        if call.answered:  # its time was up before
            return
        if failure is NOT_COPIED_IN_TIME:
            response.status = FLUSH_SLAVE_TIMEOUT
        elif failure is NOT_STORED_IN_TIME:
            response.status = FLUSH_DISK_TIMEOUT
        elif failure is not None:
            call.fail(to_service_error(failure))
            return
        else:
            response.status = self._status_at(position)
        call.answer(response.SerializeToString() + more)
