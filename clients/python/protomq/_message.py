"""A received message: its body, and the rest of its record, decoded where it is touched.

    record field   0x0A size | 0x0A length body | keys, tag, properties, attributes | topic, 103 bytes of fixed trailer
                               ---------------------------------------------------- the producer's, under its CRC-32C
                                           ----   ----------------------------------------------------------------- _rest

Rules:
- Body and rest are cut out, and the CRC-32C compared, when the answer is decoded (`_pull_answer`). Everything else is read
  when somebody asks: numbers at their distance from the record's end, texts by walking what stands before them.
- A message gives out only what its producer wrote: reading body, keys, tag, properties or attributes of a DamagedMessage raises
  CorruptMessageError.
- A message whose body is compressed is a StoredMessage; the body of all others is a plain attribute.
- A program may assign `body`, to unpack in place: a property would be several times as slow to read. So nothing but `body` and
  `value` goes by it. What is counted, sent on or tried again goes by `_stored`, and by fields that refuse.
- A message keeps no other part of its answer in memory.

Messages are immutable but for that, and may be shared between threads and pickled.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import ClassVar, Final, TypeVar

from ._fields import read_varint, skip_value
from ._transit import MessageOrigin, MessageTransit, read_transit
from ._types import MessageQueue
from .body_codecs import decode_body
from .errors import CorruptMessageError, ProtocolError
from .wire.record import (
    BODY_SIZE_MAX_BYTES,
    BORN_TIME_MS_AT,
    COMPRESSION_LZ4,
    COMPRESSION_NONE,
    COMPRESSION_ZLIB,
    COMPRESSION_ZSTD,
    CRC32C_AT,
    FIXED_TRAILER_SIZE_BYTES,
    FLAG_COMPRESSION_MASK,
    FLAG_TRANSIT,
    FLAGS_AT,
    KEY_HASH_AT,
    PHYSICAL_OFFSET_AT,
    PRODUCER_EPOCH_AT,
    PRODUCER_ID_AT,
    QUEUE_OFFSET_AT,
    SEQUENCE_AT,
    SHARDING_HASH_AT,
    STORE_TIME_MS_AT,
    TAG_CODE_AT,
    TOPIC_TAG,
    TRANSIT_TAG,
    encode_message_id,
    encode_record_field,
    encode_varint,
)
from .wire.topics import DEAD_LETTER_PREFIX

DECOMPRESSED_SIZE_MAX_BYTES: Final = 8 * BODY_SIZE_MAX_BYTES
"""Most bytes to which one body may unpack. The sender chooses what we unpack, and 4 MiB of zeros fit into 4 KiB."""

_U32: Final = struct.Struct("<I").unpack_from
_U64: Final = struct.Struct("<Q").unpack_from
_I64: Final = struct.Struct("<q").unpack_from
_IDENTITY: Final = struct.Struct("<QxIxQ")
"""Producer id, epoch and sequence, as they stand in a trailer, with a tag between."""
_ID: Final = struct.Struct(">QIQ")

DATETIME_MAX_MS: Final = 253_402_300_799_999
"""The last millisecond that a datetime can be."""
TRAILER_SIZE_MIN_BYTES: Final = FIXED_TRAILER_SIZE_BYTES + 3
_KEY_TAG: Final = 0x12
_TAG_TAG: Final = 0x1A
_PROPERTY_TAG: Final = 0x22
_ATTRIBUTES_TAG: Final = 0x2A
_COMPRESSION_NAMES: Final = {
    COMPRESSION_NONE: "none",
    COMPRESSION_ZLIB: "zlib",
    COMPRESSION_LZ4: "lz4",
    COMPRESSION_ZSTD: "zstd",
}
_NO_PROPERTIES: Final[Mapping[str, str]] = MappingProxyType({})


_T = TypeVar("_T")


class Message:
    """A message as it was received.

    Its fields refuse assignment, all but `body`.
    """

    __slots__ = ("_parsed", "_queue", "_queue_offset", "_rest", "_stored", "_tries", "_tries_error", "body")

    body: bytes
    """The payload, decompressed.

    Reading it raises CorruptMessageError if the record is not what its producer wrote; so do key, tag, properties and the like.
    It raises CompressionError if it cannot be decompressed. A listener may assign it, to unpack it in place: only its own try sees that,
    here and in `value`.
    """
    is_damaged: ClassVar[bool] = False
    """Whether the record is not what its producer wrote."""

    _queue: MessageQueue
    _queue_offset: int
    _stored: bytes  # The body as it is stored.
    _rest: bytes  # What stands behind the body: at least the trailer.
    # Set when the texts were walked.
    _parsed: tuple[tuple[str, ...], str, Mapping[str, str], str, str]
    _tries: int  # Set by an orderly consumer that tries it again: how often it has by now.
    _tries_error: str  # With `_tries`: why the last of these failed.

    def __init__(self, body: bytes, rest: bytes, queue_offset: int, queue: MessageQueue) -> None:
        """Not for users: `decode_messages` and `Message.from_record` make messages."""
        self.body = self._stored = body
        self._rest = rest
        self._queue_offset = queue_offset
        self._queue = queue

    @classmethod
    def from_record(
        cls, record: bytes, queue: MessageQueue, queue_offset: int | None = None
    ) -> Message:
        """The message in a stored record (without tag and length of its field). Raises ProtocolError."""
        field = encode_record_field(record)
        if queue_offset is None:
            queue_offset = (
                _U64(field, len(field) + QUEUE_OFFSET_AT)[0]
                if len(field) > TRAILER_SIZE_MIN_BYTES
                else 0
            )
        from ._pull_answer import decode_records  # It makes Messages, and needs this module.

        return decode_records(field, 0, (0,), (len(field),), (queue_offset,), queue)[0]

    def value(self, type_: type[_T]) -> _T:
        """The body as a value of this type: a pydantic or protobuf class, str, dict, list, or what a body codec decodes (`body_codecs`).

        Raises SchemaError if the body is no such value, WrongTypeError for a type without a codec, and what `body` raises.
        """
        return decode_body(self.body, lambda: self.properties, type_)

    @property
    def queue_offset(self) -> int:
        """Position of the message in its queue, counted in messages from 0."""
        return self._queue_offset

    @property
    def queue(self) -> MessageQueue:
        """Topic, broker and queue from which it was pulled."""
        return self._queue

    @property
    def stored_body(self) -> bytes:
        """The payload as it is stored: still compressed if it was, and even if the CRC is wrong."""
        return self._stored

    @property
    def key(self) -> str:
        """The first key, "" if there is none."""
        rest = self._rest
        if rest[0] != _KEY_TAG:
            return ""
        size = rest[1]
        if size < 0x80:
            try:
                return rest[2 : 2 + size].decode()
            except UnicodeDecodeError:
                pass  # The long way says what is wrong.
        return self._walk()[0][0]

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys."""
        return self._walk()[0]

    @property
    def tag(self) -> str:
        """The tag, "" if there is none."""
        return self._walk()[1]

    @property
    def properties(self) -> Mapping[str, str]:
        """The user properties (read-only)."""
        return self._walk()[2]

    @property
    def sharding_key(self) -> str:
        """The key that chose the queue, "" if there was none."""
        return self._walk()[3]

    @property
    def born_host(self) -> str:
        """The producer's host as it stated it, "" if it did not."""
        return self._walk()[4]

    @property
    def attempt(self) -> int:
        """How often the message was handed out before: in earlier deliveries, and in this one by an orderly consumer.

        A dead letter of another group says what that group did until it comes again, and then counts the deliveries of this one.
        """
        own_tries = self.own_tries
        if own_tries and self.queue.topic.startswith(DEAD_LETTER_PREFIX):
            return own_tries
        transit = self._transit()
        return (transit.attempt if transit is not None else 0) + own_tries

    @property
    def own_tries(self) -> int:
        """Those deliveries that its record does not count: of an orderly consumer that tried again itself, and of pops."""
        try:
            return self._tries
        except AttributeError:
            # A popped message has its number from the hand-out, counted from 1.
            return int(getattr(self.queue, "attempt", 1)) - 1

    def _forget_assigned(self) -> None:
        """It is to be tried again: with the body that is stored, whatever a listener has assigned."""
        self.body = self._stored

    def _tried(self, tries: int, error: str) -> None:
        """An orderly consumer has tried it so often, and is to try it again."""
        self._tries, self._tries_error = tries, error

    @property
    def last_error(self) -> str:
        """Why its last delivery failed, or its last try by an orderly consumer, as the listener said; "" if there was none."""
        try:
            if self._tries:
                return self._tries_error
        except AttributeError:
            pass
        transit = self._transit()
        return transit.last_error if transit is not None else ""

    @property
    def replayed_group(self) -> str:
        """The group whose dead letter this message was before it was replayed; "" for any other message."""
        transit = self._transit()
        return transit.replayed_group if transit is not None else ""

    @property
    def origin(self) -> MessageOrigin | None:
        """Where a retry, a dead letter or a delayed message stood before the broker moved it; None if it was not moved."""
        transit = self._transit()
        return transit.origin if transit is not None else None

    @property
    def topic(self) -> str:
        """The topic."""
        return self.queue.topic

    @property
    def queue_id(self) -> int:
        """The queue's number."""
        return self.queue.queue_id

    @property
    def physical_offset(self) -> int:
        """Byte address of the record in the broker's log."""
        return int(_U64(self._rest, PHYSICAL_OFFSET_AT)[0])

    @property
    def store_time_ms(self) -> int:
        """When the broker stored it: milliseconds since 1970-01-01 UTC."""
        return int(_U64(self._rest, STORE_TIME_MS_AT)[0])

    @property
    def store_time(self) -> datetime:
        """`store_time_ms` as a datetime in UTC."""
        return datetime.fromtimestamp(self.store_time_ms / 1000, UTC)

    @property
    def born_time_ms(self) -> int:
        """When the producer made it: milliseconds since 1970-01-01 UTC."""
        return int(_U64(self._rest, BORN_TIME_MS_AT)[0])

    @property
    def born_time(self) -> datetime:
        """`born_time_ms` as a datetime in UTC. The end of the year 9999 where the producer said a later time, as in microseconds."""
        return datetime.fromtimestamp(min(self.born_time_ms, DATETIME_MAX_MS) / 1000, UTC)

    @property
    def message_id(self) -> str:
        """40 hex digits: producer id, epoch, sequence."""
        return encode_message_id(self.producer_id, self.producer_epoch, self.sequence)

    @property
    def _identity(self) -> bytes:
        """The octets that `message_id` says in hexadecimal."""
        return _ID.pack(*_IDENTITY.unpack_from(self._rest, len(self._rest) + PRODUCER_ID_AT))

    @property
    def producer_id(self) -> int:
        """Random identity of the producer, 0 for none."""
        return int(_U64(self._rest, PRODUCER_ID_AT)[0])

    @property
    def producer_epoch(self) -> int:
        """Epoch of the producer."""
        return int(_U32(self._rest, PRODUCER_EPOCH_AT)[0])

    @property
    def sequence(self) -> int:
        """Number of the message in its producer and epoch."""
        return int(_U64(self._rest, SEQUENCE_AT)[0])

    @property
    def tag_code(self) -> int:
        """Filter code of the tag."""
        return int(_I64(self._rest, TAG_CODE_AT)[0])

    @property
    def key_hash(self) -> int:
        """Index code of the first key."""
        return int(_U64(self._rest, KEY_HASH_AT)[0])

    @property
    def sharding_hash(self) -> int:
        """CRC-32C of the sharding key, 0 without one; 1 where that of a key is 0."""
        return int(_U32(self._rest, SHARDING_HASH_AT)[0])

    @property
    def crc32c(self) -> int:
        """CRC-32C of body, keys, tag, properties and attributes as they were encoded by the producer, who computed it."""
        return int(_U32(self._rest, CRC32C_AT)[0])

    @property
    def flags(self) -> int:
        """The bits of Record.flags."""
        return int(_U32(self._rest, FLAGS_AT)[0])

    @property
    def compression(self) -> str:
        """ "none", "zlib", "lz4" or "zstd"; "unknown" for a newer one."""
        return _COMPRESSION_NAMES.get(self.flags & FLAG_COMPRESSION_MASK, "unknown")

    @property
    def size_bytes(self) -> int:
        """Bytes in memory before its body is decompressed, without the head of its record."""
        return len(self._rest) + len(self._stored)

    @property
    def record(self) -> bytes:
        """The stored record, without tag and length of its field: what `Record.FromString` takes."""
        stored = self._stored
        return b"".join((b"\x0a", encode_varint(len(stored)), stored, self._rest))

    def __reduce__(self) -> tuple[object, ...]:
        return Message.from_record, (self.record, self.queue, self.queue_offset)

    def __repr__(self) -> str:
        return (
            f"<Message {self.topic}/{self.queue.broker_name}/{self.queue_id}@{self.queue_offset}>"
        )

    def _walk(self) -> tuple[tuple[str, ...], str, Mapping[str, str], str, str]:
        try:
            return self._parsed
        except AttributeError:
            pass
        try:
            self._parsed = parsed = _walk_texts(self._rest)
        except (IndexError, UnicodeDecodeError, ProtocolError) as error:
            raise self._corrupt("its keys and properties do not parse") from error
        return parsed

    def _transit(self) -> MessageTransit | None:
        if not self.flags & FLAG_TRANSIT:
            return None
        try:
            return read_transit(self._rest)
        except (IndexError, ValueError) as error:
            raise self._corrupt("what the broker says of its origin does not parse") from error

    def _corrupt(self, what: str) -> CorruptMessageError:
        where = {
            "topic": self.topic,
            "broker_name": self.queue.broker_name,
            "queue_id": str(self.queue_id),
            "queue_offset": str(self.queue_offset),
            "physical_offset": str(self.physical_offset),
        }
        return CorruptMessageError(f"{self!r}: {what}", metadata=where)


class StoredMessage(Message):
    """A message whose body is compressed: it is unpacked when it is read."""

    __slots__ = ("_unpacked",)

    _unpacked: bytes  # Set when the body was read, or assigned.

    def __init__(self, body: bytes, rest: bytes, queue_offset: int, queue: MessageQueue) -> None:
        """`body`: as it is stored."""
        self._stored = body
        self._rest = rest
        self._queue_offset = queue_offset
        self._queue = queue

    @property
    def body(self) -> bytes:
        """See Message.body."""
        try:
            return self._unpacked
        except AttributeError:
            pass
        from ._compression import decompress

        codec = self.flags & FLAG_COMPRESSION_MASK
        self._unpacked = body = decompress(self._stored, codec, DECOMPRESSED_SIZE_MAX_BYTES)
        return body

    @body.setter
    def body(self, body: bytes) -> None:
        self._unpacked = body

    def _forget_assigned(self) -> None:
        try:
            del self._unpacked
        except AttributeError:
            pass


class DamagedMessage(StoredMessage):
    """A message that is not what its producer wrote. The broker's data are still there: where it stands, when it was stored."""

    __slots__ = ("_record",)

    is_damaged = True
    _record: bytes

    def __init__(
        self, body: bytes, rest: bytes, queue_offset: int, queue: MessageQueue, record: bytes
    ) -> None:
        """`body`: the bytes that seem to be the body. `record`: the whole record, since nobody knows where its parts begin."""
        super().__init__(body, rest, queue_offset, queue)
        self._record = record

    @property  # type: ignore[misc]
    def body(self) -> bytes:  # type: ignore[override]
        """Raises CorruptMessageError."""
        raise self._damage()

    @property
    def key(self) -> str:
        """Raises CorruptMessageError."""
        raise self._damage()

    @property
    def record(self) -> bytes:
        """See Message.record."""
        return self._record

    def _walk(self) -> tuple[tuple[str, ...], str, Mapping[str, str], str, str]:
        raise self._damage()

    def _transit(self) -> MessageTransit | None:
        raise self._damage()

    def _damage(self) -> CorruptMessageError:
        return self._corrupt("its CRC-32C is wrong: it is not what its producer wrote")


def _walk_texts(raw: bytes) -> tuple[tuple[str, ...], str, Mapping[str, str], str, str]:
    """(keys, tag, properties, sharding_key, born_host) of what stands behind a body, up to the topic."""
    position, end = 0, len(raw)
    keys: list[str] = []
    tag = sharding_key = born_host = ""
    properties: dict[str, str] = {}
    while position < end:
        field_tag = raw[position]
        if field_tag in (TOPIC_TAG, TRANSIT_TAG):
            break
        if field_tag not in (_KEY_TAG, _TAG_TAG, _PROPERTY_TAG, _ATTRIBUTES_TAG):
            raise ProtocolError(
                f"field tag {field_tag:#x} stands where keys and properties were expected"
            )
        size, start = read_varint(raw, position + 1)
        position = start + size
        if field_tag == _KEY_TAG:
            keys.append(raw[start:position].decode())
        elif field_tag == _TAG_TAG:
            tag = raw[start:position].decode()
        else:
            first, second = _read_two_texts(raw, start, position)
            if field_tag == _PROPERTY_TAG:
                properties[first] = second
            else:
                sharding_key, born_host = first or sharding_key, second or born_host
    if position >= end:
        raise ProtocolError("keys and properties run beyond the record")
    return (
        tuple(keys),
        tag,
        MappingProxyType(properties) if properties else _NO_PROPERTIES,
        sharding_key,
        born_host,
    )


def _read_two_texts(raw: bytes, position: int, end: int) -> tuple[str, str]:
    """Fields 1 and 2 of a small message of texts; fields of a newer version are skipped."""
    first = second = ""
    while position < end:
        field_tag, position = read_varint(raw, position)
        if field_tag & 7 == 2:
            size, start = read_varint(raw, position)
            position = start + size
            if field_tag == 0x0A:
                first = raw[start:position].decode()
            elif field_tag == 0x12:
                second = raw[start:position].decode()
        else:
            position = skip_value(raw, position, field_tag)
    return first, second
