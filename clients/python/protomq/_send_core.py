"""What Producer and AsyncProducer have in common: options, messages to requests, answers to results. No sockets, no waiting.

A send goes through `prepare` (the message checked, compressed, its front written), and gathers with others in a line. Then come
`make_request` (sequences taken, queue chosen, bytes assembled), the transport, and `store_result`. A request keeps its sequences for all
its attempts.

Each request names the last sequence that its broker has acknowledged to this producer. A broker that does not have that one has forgotten
the producer, or lost what it had (a power cut). Then messages whose outcome there is unknown stay unknown. Messages that were never sent
to it go there as if for the first time.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from ._batching import (
    PreparedRecord,
    RecordEncoder,
    make_front,
    refuse_large_body,
    refuse_unreadable_body,
)
from ._checks import check_encodable, check_queue, check_texts, check_topic
from ._compression import DECOMPRESSED_SIZE_MAX_BYTES, compress_body, make_compressor
from ._delays import When, delay_flags, delayed
from ._fault_tolerance import LatencyFaultTolerance
from ._hook_points import HookPoints
from ._interrupts import comes_of_signal
from ._outgoing import OutgoingMessage, SendResult, SendStatus, Stored
from ._permitted import nothing_to_write
from ._producer_options import ProducerOptions
from ._retry import RetryPolicy
from ._selectors import RoundRobin
from ._send_arguments import (
    field_of,
    group_by_target,
    is_at_once,
    refuse_beside_message,
    when_of_message,
)
from ._send_request import Request, places_of
from ._sequence import SequenceSource
from ._types import MessageQueue, Route, Target
from .body_codecs import encode_body
from .errors import (
    ConfigurationError,
    ProtocolError,
    RequestTimeoutError,
)
from .wire.hashing import sharded_index, sharding_hash_of
from .wire.record import BODY_SIZE_MAX_BYTES

if TYPE_CHECKING:
    from ._selectors import QueueSelector
    from .hooks import SendContext

logger = logging.getLogger("protomq.producer")

_STATUSES: Final = {int(status): status for status in SendStatus}
_NO_KEYS: Final[Sequence[str]] = ()
"""The default. An array, say, cannot be compared with it."""


class SendCore:
    """The part of a producer that does not wait. Any thread."""

    encoder_class: type[RecordEncoder] = RecordEncoder
    _front_end = b""
    """Behind the front of every message: attributes that the producer gives to all."""

    def __init__(
        self,
        options: ProducerOptions,
        hooks: HookPoints | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options
        self.hooks = hooks or HookPoints(options.group, options.hooks)
        self.clock = clock
        self.retry_policy = RetryPolicy(options.retries, options.retry_another_broker)
        self.compressor = make_compressor(options.compression, options.compression_level)
        self.fault_tolerance = LatencyFaultTolerance() if options.fault_tolerance else None
        self.round_robin = RoundRobin()
        self.rng = random.Random()
        self.sequences = SequenceSource(options.producer_id, options.producer_epoch)
        # The largest body with which nothing is to be done.
        self.plain_size_max = (
            options.compress_over_bytes
            if self.compressor.compress is not None
            else BODY_SIZE_MAX_BYTES
        )
        self._encoders: dict[str, RecordEncoder] = {}
        self._acknowledged: dict[str, int] = {}

    def acknowledged(self, broker_name: str) -> int | None:
        """The last sequence that a broker has acknowledged, None if it has none yet."""
        return self._acknowledged.get(broker_name)

    def forget_acknowledged(self, broker_name: str) -> None:
        """The broker does not know of it."""
        self._acknowledged.pop(broker_name, None)

    def prepare(
        self,
        body: Any,
        key: str | None = None,
        keys: Sequence[str] = (),
        tag: str = "",
        properties: Mapping[str, str] | None = None,
        sharding_key: str | None = None,
        deadline_s: float = math.inf,
    ) -> PreparedRecord:
        """Checks and compresses a message. Raises WrongTypeError, MessageTooLargeError or, compressing, RequestTimeoutError."""
        if type(body) is not bytes:
            body, properties = encode_body(body, properties)
        flags = 0
        if len(body) > self.plain_size_max:
            if self.compressor.compress is not None:
                if len(body) > DECOMPRESSED_SIZE_MAX_BYTES:
                    raise refuse_unreadable_body(len(body))
                body, flags = compress_body(
                    self.compressor, body, lambda: self._check_time_is_left(deadline_s)
                )
            if len(body) > BODY_SIZE_MAX_BYTES:
                raise refuse_large_body(len(body))
        # Not `if key`: a key 0, a tag None or keys 0 must be refused like a key 5.
        if (
            key is not None
            or tag != ""
            or keys is not _NO_KEYS
            or properties is not None
            or sharding_key is not None
            or self.options.born_host
        ):
            plain = (key is None or type(key) is str) and type(tag) is str
            if not plain or keys is not _NO_KEYS or properties is not None or sharding_key is not None:
                check_texts(key, keys, tag, properties, sharding_key)
            try:
                first_key, front, more_flags = make_front(
                    key, keys, tag, properties, sharding_key, self.options.born_host
                )
            except UnicodeEncodeError:
                check_encodable(key, keys, tag, properties, sharding_key)
                raise
            sharding_hash = sharding_hash_of(sharding_key) if sharding_key else 0
            flags |= more_flags
            front += self._front_end
            return body, first_key, tag, front, flags, time.time_ns() // 1_000_000, sharding_hash
        return body, "", "", self._front_end, flags, time.time_ns() // 1_000_000, 0

    def prepare_many(
        self,
        messages: Sequence[bytes | OutgoingMessage],
        topic: str,
        keys: Sequence[str | None] | None,
        tags: str | Sequence[str],
        deadline_s: float = math.inf,
        when: When | None = None,
        sharding_key: str | None = None,
    ) -> list[PreparedRecord]:
        """`prepare` for a batch. `keys` and `tags` go with bodies; an OutgoingMessage has its own. `when`: of those that do not say it.

        `sharding_key`: of those that have neither one nor a queue.
        """
        check_topic(topic)
        self._check_counts(len(messages), keys, tags)
        if (
            keys is None
            and not tags
            and not sharding_key
            and not self.options.born_host
            and set(map(type, messages)) == {bytes}
        ):
            if max(map(len, messages)) <= self.plain_size_max:  # type: ignore[arg-type]
                # Bodies and nothing else: no call per message.
                born_time_ms = time.time_ns() // 1_000_000
                flags = delay_flags(when)
                return [(body, "", "", b"", flags, born_time_ms, 0) for body in messages]  # type: ignore[misc]
        prepare = self.prepare
        records: list[PreparedRecord] = []
        for index, message in enumerate(messages):
            if isinstance(message, OutgoingMessage):
                if message.topic != topic:
                    raise ConfigurationError(
                        f"a batch has one topic: {topic!r}, not {message.topic!r}"
                    )
                if keys is not None or tags:
                    refuse_beside_message(index, keys, tags)
                if sharding_key and not message.sharding_key and message.queue is None:
                    message = replace(message, sharding_key=sharding_key)
                record = self.prepare_message(message, deadline_s)
                records.append(delayed(record, when) if is_at_once(message) else record)
            else:
                key = None if keys is None else keys[index]
                tag = tags if isinstance(tags, str) else tags[index]
                records.append(delayed(prepare(message, key, (), tag, None, sharding_key, deadline_s), when))
        return records

    def _check_time_is_left(self, deadline_s: float) -> None:
        if self.clock() >= deadline_s:
            error = RequestTimeoutError(
                "the time was up while the body was compressed: give it more, or a faster codec or level"
            )
            error.definite = True
            raise error

    def prepare_message(
        self, message: OutgoingMessage, deadline_s: float = math.inf
    ) -> PreparedRecord:
        """`prepare` for the other form."""
        record = self.prepare(
            message.body,
            message.key,
            message.keys,
            message.tag,
            message.properties,
            message.sharding_key,
            deadline_s,
        )
        return record if is_at_once(message) else delayed(record, when_of_message(message))

    def as_messages(
        self,
        topic: str,
        messages: Sequence[bytes | OutgoingMessage],
        keys: Sequence[str | None] | None,
        tags: str | Sequence[str],
    ) -> list[OutgoingMessage]:
        """A batch in the form that hooks are given."""
        self._check_counts(len(messages), keys, tags)
        found: list[OutgoingMessage] = []
        for index, message in enumerate(messages):
            if isinstance(message, OutgoingMessage):
                refuse_beside_message(index, keys, tags)
            else:
                key = None if keys is None else keys[index]
                message = OutgoingMessage(
                    topic, message, key, tag=tags if isinstance(tags, str) else tags[index]
                )
            found.append(_encoded(message))
        return found

    def _check_counts(
        self, count: int, keys: Sequence[str | None] | None, tags: str | Sequence[str]
    ) -> None:
        if (keys is not None and len(keys) != count) or (
            not isinstance(tags, str) and len(tags) != count
        ):
            raise ConfigurationError(f"{count} messages need as many keys and tags")

    def encoder(self, topic: str) -> RecordEncoder:
        """The encoder for a topic, made on first use."""
        encoder = self._encoders.get(topic)
        if encoder is None:
            encoder = self.encoder_class(
                topic, self.sequences.producer_id, self.sequences.producer_epoch
            )
            encoder = self._encoders.setdefault(topic, encoder)
        return encoder

    def choose_queue(self, route: Route, avoid_broker: str = "") -> MessageQueue:
        """The next queue for messages that may go to any. Raises NoRouteError or NotPermittedError if the topic has none to write."""
        queues = route.write_queues
        if not queues:
            raise nothing_to_write(route)
        if self.fault_tolerance is None:
            return self.round_robin.next_queue(queues, avoid_broker=avoid_broker)
        now_ms = self.clock() * 1000
        tolerance = self.fault_tolerance
        return self.round_robin.next_queue(
            queues,
            avoid_broker=avoid_broker,
            is_available=lambda broker_name: tolerance.is_available(broker_name, now_ms),
        )

    def target_queue(
        self, route: Route, message: OutgoingMessage, selector: QueueSelector | None
    ) -> MessageQueue | None:
        """The queue that a message asks for by itself, its selector or its sharding key; None: any."""
        if message.queue is not None:
            check_queue(route.topic, message.queue)
            return message.queue
        if selector is None and not message.sharding_key:
            return None
        queues = route.write_queues
        if not queues:
            raise nothing_to_write(route)
        if selector is not None:
            queue = selector(queues, message)
            if queue is None:
                raise ConfigurationError("the selector returned None: it returns one of the queues that it is given")
            if queue not in queues:
                raise ConfigurationError(
                    f"the selector chose {queue!r}, which is not a queue of topic {route.topic!r} to write"
                )
            return queue
        assert message.sharding_key
        return queues[sharded_index(message.sharding_key, len(queues))]

    def group(
        self,
        route: Route,
        records: Sequence[PreparedRecord],
        messages: Sequence[bytes | OutgoingMessage],
        queue: MessageQueue | None,
        sharding_key: str | None,
        when: When | None = None,
    ) -> tuple[Mapping[Target, Sequence[PreparedRecord]], Sequence[tuple[Target, int]] | None]:
        """The records of a batch by target, and for each its target and place there; None: all have one, in order.

        `queue`, `sharding_key` and `when` are those of the batch; a message's own go first.
        """
        check_queue(route.topic, queue)
        if queue is None and sharding_key:
            queue = self.target_queue(
                route, OutgoingMessage(route.topic, b"", sharding_key=sharding_key), None
            )
        target = Target(queue, field_of(when))
        targets: dict[int, Target] = {}
        for index, message in enumerate(messages):
            if not isinstance(message, OutgoingMessage):
                continue
            own = target
            if message.queue is not None or message.sharding_key:
                own = own._replace(queue=self.target_queue(route, message, None))
            if not is_at_once(message):
                own = own._replace(delay_field=field_of(when_of_message(message)))
            if own is not target:
                targets[index] = own
        if not targets:
            return {target: records}, None
        return group_by_target(
            records, (targets.get(index, target) for index in range(len(records)))
        )

    def make_request(
        self,
        route: Route,
        records: Sequence[PreparedRecord],
        queue: MessageQueue | None,
        delay_field: bytes | None = None,
    ) -> Request:
        """Takes sequences for the records and assembles the bytes. `queue` None: any. Raises if there is none to write."""
        queue_is_open = queue is None
        if queue is None:
            queue = self.choose_queue(route)
        sequences = self.sequences
        previous_sequence = self._acknowledged.get(queue.broker_name)
        return Request(
            self.encoder(route.topic),
            (sequences.producer_id, sequences.producer_epoch),
            records,
            sequences.take(len(records)),
            queue,
            route.brokers.get(queue.broker_name),
            queue_is_open,
            self.options.wait_store_ok,
            previous_sequence,
            self.clock(),
            delay_field,
        )

    def store_result(self, request: Request, answer: bytes) -> Stored:
        """What the broker answered. Raises ProtocolError if that does not fit the request."""
        try:
            response = _response_class().FromString(answer)
            status = _STATUSES[response.status]
        except (
            Exception
        ) as error:  # DecodeError and ValueError alike: the peer speaks something else.
            if comes_of_signal(error):
                raise
            raise ProtocolError(f"the answer to a send does not parse: {error}") from error
        count = len(request.records)
        if response.record_count != count:
            raise ProtocolError(
                f"{count} messages were sent, the broker answered for {response.record_count}"
            )
        queue = request.queue
        self._acknowledged[queue.broker_name] = request.first_sequence + count - 1
        if response.queue_id != queue.queue_id:
            # A repeated send stands where it was stored the first time.
            queue = queue._replace(queue_id=response.queue_id)
        return self._stored(request, status, queue, response)

    def _stored(
        self, request: Request, status: SendStatus, queue: MessageQueue, response: Any
    ) -> Stored:
        return Stored(
            status,
            queue,
            response.queue_offset,
            response.physical_offset,
            response.repeated_send,
            request.identity,
            request.first_sequence,
            response.record_count,
            None if request.delay_field is None else places_of(request, response.recall_handle),
        )

    def answered(self, request: Request, answer: bytes, started_s: float) -> Stored:
        """Takes the answer to an attempt that began then. Raises ProtocolError if it does not fit the request."""
        stored = self.store_result(request, answer)
        if self.fault_tolerance is not None:
            self._record_latency(request, started_s, failed=False)
        return stored

    def failed(self, request: Request, started_s: float) -> None:
        """An attempt that began then has failed."""
        if self.fault_tolerance is not None:
            self._record_latency(request, started_s, failed=True)

    def _record_latency(self, request: Request, started_s: float, *, failed: bool) -> None:
        assert self.fault_tolerance is not None
        now_s = self.clock()
        self.fault_tolerance.record(
            request.queue.broker_name, (now_s - started_s) * 1000, now_s * 1000, failed=failed
        )

    def before_send(
        self, message: OutgoingMessage, *, is_one_way: bool = False
    ) -> tuple[OutgoingMessage, SendContext | None]:
        """The message, its body encoded, that the hooks make of one; the context is for `after_send`, None where there are no hooks."""
        message = _encoded(message)
        if not self.hooks.send:
            return message, None
        context = self.hooks.before_send(message.topic, (message,), is_one_way=is_one_way)
        return context.messages[0], context

    def after_send(
        self, context: SendContext | None, result: SendResult | None, error: BaseException | None
    ) -> None:
        """Tells the hooks of the outcome."""
        if context is not None:
            self.hooks.after_send(context, () if result is None else (result,), error)

    def after_fork(self) -> None:
        """In the child: another producer, with nothing of the parent's."""
        self.sequences.renew()
        self._encoders = {}
        self._acknowledged = {}


def _encoded(message: OutgoingMessage) -> OutgoingMessage:
    """Hooks and selectors are given bodies as they are sent."""
    if type(message.body) is bytes:
        return message
    body, properties = encode_body(message.body, message.properties)
    return replace(message, body=body, properties=properties)


_response: Any = None


def _response_class() -> Any:
    """protomq.v1.SendResponse, loaded on first use: protobuf costs 30 ms of import."""
    global _response
    if _response is None:
        from .v1.send_service_pb2 import SendResponse

        _response = SendResponse
    return _response
