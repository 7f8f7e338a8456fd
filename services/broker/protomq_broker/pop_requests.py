"""Reads and checks requests of pops and acknowledgements, and fills in their defaults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from google.protobuf.message import DecodeError

from protomq.v1.pop_service_pb2 import ChangeInvisibleRequest, PopRequest, PopStart
from protomq.v1.pull_service_pb2 import FilterType
from protomq.wire.hashing import tag_code_of
from protomq.wire.record import NOT_IN_TAGS
from protomq.wire.runs import count_in
from protomq_runtime.errors import invalid_argument, unparsable

from .filter_searches import key_of
from .pop_orders import PopTerms
from .pop_receipts import Receipt, check_receipt, decode_receipt
from .pull_answer import RECORD_COUNT_DEFAULT, SIZE_DEFAULT_BYTES
from .pull_requests import GRPC_SIZE_MAX_BYTES, read_filter, shortened_hold_ms
from .pull_service import SIZE_MAX_BYTES, TAGS_MAX
from .store.state.group_settings import retry_delays_of
from .store.state.popped_queue import OPEN_MAX, QueueOfGroup
from .topic_access import (
    check_group_name,
    check_incarnation,
    check_read_queue,
    existing_topic,
    group_disabled,
    readable_topic,
)

if TYPE_CHECKING:
    from protomq_runtime.call import Call

    from .config import BrokerConfig
    from .store.state.topics import TopicConfig
    from .store.store import Store

RECORD_COUNT_MAX: Final = 1_024
SETTLED_COUNT_MAX: Final = OPEN_MAX
INVISIBLE_DEFAULT_MS: Final = 60_000
_STARTS: Final = frozenset(PopStart.values())
_FROM_END: Final = PopStart.POP_START_END
_BY_TAG: Final = FilterType.FILTER_TYPE_TAG
"""Kept, since protobuf looks an enum's values up in 2 microseconds."""
KNOWN_COUNT_MAX: Final = 1_024
KNOWN_SIZE_MAX_BYTES: Final = 512
"""Requests that are kept with their terms, and the largest of them: 1 MiB."""
HOLD_ID_SIZE_BYTES: Final = 16
_HOLD_ID_TAG: Final = bytes((14 << 3 | 2, HOLD_ID_SIZE_BYTES))
_HOLD_ID_FIELD_SIZE_BYTES: Final = len(_HOLD_ID_TAG) + HOLD_ID_SIZE_BYTES
"""The field as most clients send it: behind all others. That nothing else ends so is proved by the rest, which can be parsed."""


class PopRequests:
    """`pop`: the pop lane; the rest: the send lane."""

    def __init__(self, store: Store, config: BrokerConfig, broker_name: str) -> None:
        self._store = store
        self._config = config
        self._broker_name = broker_name
        self._levels_ms = config.delay_levels_ms
        self._known: dict[tuple[bytes, str], PopTerms] = {}

    def pop(self, call: Call) -> tuple[PopTerms, bytes]:
        """Returns what is asked for, and the call's `hold_id`. Raises ServiceError.

        A member sends the same request again and again, but for the id at its end. So its terms are made once; what may change meanwhile
        is checked each time.
        """
        payload, hold_id = bytes(call.payload), b""
        if payload[-_HOLD_ID_FIELD_SIZE_BYTES:].startswith(_HOLD_ID_TAG):
            payload, hold_id = payload[:-_HOLD_ID_FIELD_SIZE_BYTES], payload[-HOLD_ID_SIZE_BYTES:]
        terms = self._known.get((payload, call.transport))
        if terms is None:
            try:
                request = PopRequest.FromString(payload)
            except DecodeError:
                # Another field ends so, or nothing can be read.
                payload = bytes(call.payload)
                request = _parsed(payload)
                hold_id = b""
            if request.hold_id and not hold_id:  # It stands in another place.
                hold_id = checked_hold_id(request.hold_id)
            terms = self._read(call, request)
            if len(payload) <= KNOWN_SIZE_MAX_BYTES and not request.hold_id:
                if len(self._known) >= KNOWN_COUNT_MAX:
                    self._known.clear()
                self._known[payload, call.transport] = terms
            return terms, hold_id
        if terms.consumer_group in self._store.groups.disabled:
            raise group_disabled(terms.consumer_group)
        topic = readable_topic(self._store, terms.topic)
        check_incarnation(topic, terms.topic_incarnation)
        if terms.queue_id >= 0:
            self._check_queue(topic, terms.consumer_group, terms.queue_id)
        return terms, hold_id

    def _read(self, call: Call, request: PopRequest) -> PopTerms:
        check_group_name(request.consumer_group)
        if request.consumer_group in self._store.groups.disabled:
            raise group_disabled(request.consumer_group)
        topic = readable_topic(self._store, request.topic)
        check_incarnation(topic, request.topic_incarnation)
        if request.HasField("queue_id"):
            self._check_queue(topic, request.consumer_group, request.queue_id)
        config = self._config
        for field, largest in (
            ("record_count_max", RECORD_COUNT_MAX),
            ("size_max_bytes", SIZE_MAX_BYTES),
        ):
            if not 0 <= getattr(request, field) <= largest:
                raise invalid_argument(field, f"must be 0 to {largest}")
        request.hold_ms = shortened_hold_ms(request.hold_ms, config.hold_max_ms)
        request.record_count_max = request.record_count_max or RECORD_COUNT_DEFAULT
        request.size_max_bytes = request.size_max_bytes or SIZE_DEFAULT_BYTES
        if call.transport == "grpc":
            request.size_max_bytes = min(request.size_max_bytes, GRPC_SIZE_MAX_BYTES)
        request.invisible_ms = request.invisible_ms or INVISIBLE_DEFAULT_MS
        least, most = config.pop_invisible_min_ms, config.pop_invisible_max_ms
        if not least <= request.invisible_ms <= most:
            text = f"must be {least} to {most}; {_in_seconds(request.invisible_ms, least, most)}"
            raise invalid_argument("invisible_ms", text)
        if request.start not in _STARTS:
            raise invalid_argument("start", f"this broker knows no start {request.start}")
        if len(request.tags) > TAGS_MAX:
            raise invalid_argument("tags", f"at most {TAGS_MAX}")
        if request.filter_type or request.filter:
            read_filter(cast("Any", request))
        if request.filter_type == _BY_TAG:
            request.filter_type = FilterType.FILTER_TYPE_UNSPECIFIED
        wrong = next(filter(NOT_IN_TAGS.search, request.tags), None)
        if wrong is not None:
            raise invalid_argument(
                "tags", f"no message has the tag {wrong!r}: give the tags one by one, without ||"
            )
        return PopTerms(
            request.consumer_group,
            request.topic,
            request.topic_incarnation,
            request.queue_id if request.HasField("queue_id") else -1,
            request.record_count_max,
            request.size_max_bytes,
            request.hold_ms,
            request.invisible_ms,
            request.fifo,
            request.start == _FROM_END,
            frozenset(map(tag_code_of, request.tags)),
            key_of(cast("Any", request)),
        )

    def _check_queue(self, topic: TopicConfig, group: str, queue_id: int) -> None:
        """Raises ServiceError if the topic has no such queue to read. One that is gone gives messages that the group has open there."""
        if queue_id >= topic.read_queues:
            with self._store.popped.lock:
                known = self._store.popped.find(QueueOfGroup(group, topic.name, queue_id), topic.incarnation)
                if known is not None and known.open:
                    return
        check_read_queue(topic, queue_id)

    def receipts(self, request: Any) -> list[tuple[Receipt, Sequence[int]]]:
        """Returns the receipts with their runs of offsets. Raises ServiceError."""
        group, topic = request.consumer_group, request.topic
        check_group_name(group)
        # Who may not read it any more has these messages, and they would come again.
        existing_topic(self._store, topic)
        messages: list[tuple[Receipt, Sequence[int]]] = []
        count = 0
        for number, named in enumerate(request.messages):
            receipt = decode_receipt(named.receipt)
            check_receipt(receipt, self._broker_name, group, topic)
            runs = tuple(named.offset_runs)
            if not runs or len(runs) % 2 or min(runs) < 0 or min(runs[1::2]) < 1:
                raise invalid_argument(
                    f"messages[{number}].offset_runs", "has pairs of a queue offset and a number of messages"
                )
            count += count_in(runs)
            messages.append((receipt, runs))
        if not 0 < count <= SETTLED_COUNT_MAX:
            raise invalid_argument("messages", f"1 to {SETTLED_COUNT_MAX} at once, these are {count}")
        return messages

    def invisible_times_ms(self, request: ChangeInvisibleRequest, attempts: Sequence[int]) -> list[int]:
        """Returns the new invisible time in milliseconds for each of these attempts. Raises ServiceError."""
        most = self._config.pop_invisible_max_ms
        if not 0 <= request.invisible_ms <= most:
            raise invalid_argument("invisible_ms", f"must be 0 to {most}; {_in_seconds(request.invisible_ms, 0, most)}")
        if not request.HasField("retry_level"):
            return [request.invisible_ms] * len(attempts)
        levels_ms, level = self._levels_ms, request.retry_level
        if level < 0:
            raise invalid_argument("retry_level", "is the number of a delay level, or 0 for the settings of the group")
        if level:
            return [min(levels_ms[min(level, len(levels_ms)) - 1], most)] * len(attempts)
        delays_ms = retry_delays_of(self._store.groups.find(request.consumer_group), levels_ms)
        return [min(delays_ms[min(attempt, len(delays_ms)) - 1], most) for attempt in attempts]


def checked_hold_id(hold_id: bytes) -> bytes:
    """Returns it. Raises ServiceError if it has not HOLD_ID_SIZE_BYTES."""
    if len(hold_id) != HOLD_ID_SIZE_BYTES:
        raise invalid_argument("hold_id", f"has {HOLD_ID_SIZE_BYTES} octets, not {len(hold_id)}")
    return hold_id


def _parsed(payload: bytes) -> PopRequest:
    try:
        return PopRequest.FromString(payload)
    except DecodeError as error:
        raise unparsable("protomq.v1.PopRequest") from error


def _in_seconds(given_ms: int, least_ms: int, most_ms: int) -> str:
    """Says the same range in seconds, for users of the SDK and the command line, who give seconds."""
    least_s, most_s, given_s = (f"{ms / 1000:.3f}".rstrip("0").rstrip(".") for ms in (least_ms, most_ms, given_ms))
    return f"that is {least_s} s to {most_s} s, and not {given_s} s"
