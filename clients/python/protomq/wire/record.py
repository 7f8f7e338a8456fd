"""Layout of a record: where everything stands, and how to write one fast.

    record field   0x0A, varint(size), record
    record         [front: body, keys, tag, properties, attributes] [transit] [trailer]

The producer's CRC-32C covers the front, octet by octet. Transit (32 len ...) stands on a copy that the broker moved, and nowhere else.

    trailer, from its start (n = bytes of the topic, 1 to 127)      from the end of the record
    +0      3A nn  topic                                            -(105 + n), 9 less with a due time
            41     due_time_ms       fixed64    only where flags have bit 4: -112
    +2+n    49     tag_code          sfixed64                       -103
            51     key_hash          fixed64                        -94
            5D     sharding_hash     fixed32                        -85
            61     producer_id       fixed64                        -80
            6D     producer_epoch    fixed32                        -71
            71     sequence          fixed64                        -66
            7D     crc32c            fixed32                        -57
            81 01  born_time_ms      fixed64                        -52
            8D 01  flags             fixed32                        -42
            95 01  queue_id          fixed32    stamped             -36
            99 01  store_time_ms     fixed64    stamped             -30
            A1 01  queue_offset      fixed64    stamped             -20
            A9 01  physical_offset   fixed64    stamped             -10

Offsets in this module are counted from the end of the record: they are the same in every record, whatever stands in front.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping
from typing import Final

from .hashing import Octets, crc32c, extend_crc32c, hash63, sharding_hash_of, tag_code_of
from .varints import LENGTH_SIZE_MAX_BYTES, read_varint

RECORD_TAG: Final = 0x0A
SEAL_TAG: Final = 0x12
PADDING_TAG: Final = 0x1A
BODY_TAG: Final = 0x0A
FRONT_TAGS: Final = frozenset((0x0A, 0x12, 0x1A, 0x22, 0x2A))
"""Body, keys, tag, properties, attributes: what the producer's CRC covers."""
TRANSIT_TAG: Final = 0x32
TOPIC_TAG: Final = 0x3A
DUE_TIME_TAG: Final = 0x41
DUE_TIME_SIZE_BYTES: Final = 9
"""Of the field with its tag."""

FIXED_TRAILER: Final = struct.Struct("<BqBQBIBQBIBQBI2sQ2sI2sI2sQ2sQ2sQ")
"""The trailer behind the topic: each tag followed by its value."""

FIXED_TRAILER_SIZE_BYTES: Final = FIXED_TRAILER.size
assert FIXED_TRAILER_SIZE_BYTES == 103

# Where each value (not its tag) starts, counted from the end of the record.
DUE_TIME_MS_AT: Final = -111
"""Only where `flags` say so."""
TAG_CODE_AT: Final = -102
KEY_HASH_AT: Final = -93
SHARDING_HASH_AT: Final = -84
PRODUCER_ID_AT: Final = -79
PRODUCER_EPOCH_AT: Final = -70
SEQUENCE_AT: Final = -65
CRC32C_AT: Final = -56
BORN_TIME_MS_AT: Final = -50
FLAGS_AT: Final = -40
QUEUE_ID_AT: Final = -34
STORE_TIME_MS_AT: Final = -28
QUEUE_OFFSET_AT: Final = -18
PHYSICAL_OFFSET_AT: Final = -8

STAMP: Final = struct.Struct("<2sI2sQ2sQ2sQ")
"""The last 36 bytes of a record: what the broker stamps."""
STAMP_SIZE_BYTES: Final = STAMP.size
assert STAMP_SIZE_BYTES == 36
STAMP_TAGS: Final = (b"\x95\x01", b"\x99\x01", b"\xa1\x01", b"\xa9\x01")

FIXED_TRAILER_TAGS: Final = (
    0x49,
    0x51,
    0x5D,
    0x61,
    0x6D,
    0x71,
    0x7D,
    b"\x81\x01",
    b"\x8d\x01",
    *STAMP_TAGS,
)

BODY_SIZE_MAX_BYTES: Final = 4 << 20
"""4 MiB, as RocketMQ's maxMessageSize."""
FRONT_SIZE_MAX_BYTES: Final = 32 << 10
"""Keys, tag, properties and attributes together; RocketMQ's limit for properties is 32,767 bytes."""
RECORDS_PER_REQUEST_MAX: Final = 32_768
RECORDS_WITHOUT_TRAILER_MAX: Final = 4_096
TOPIC_SIZE_MAX_BYTES: Final = 127

KEYS_MAX: Final = 64
"""Of one message: each of them is indexed."""
NOT_IN_TAGS: Final = re.compile(r"[|\x00-\x1f\x7f-\x9f]")
"""What a tag must not have: subscriptions separate tags by ||, and RocketMQ's proxy refuses control characters, too."""

FLAG_COMPRESSION_MASK: Final = 0x07
COMPRESSION_NONE: Final = 0
COMPRESSION_ZLIB: Final = 1
COMPRESSION_LZ4: Final = 2
COMPRESSION_ZSTD: Final = 3
COMPRESSION_MAX: Final = COMPRESSION_ZSTD
"""Codes above are kept for later, and refused."""
FLAG_MANY_KEYS: Final = 0x08
FLAG_DUE_TIME: Final = 0x10
"""`due_time_ms` stands between topic and tag_code."""
PRODUCER_FLAGS_MASK: Final = COMPRESSION_MAX | FLAG_MANY_KEYS | FLAG_DUE_TIME
"""The bits of `flags` that a producer may set: so a code of compression above `COMPRESSION_MAX` is refused as any other bit is."""
FLAG_KIND_MASK: Final = 0x0700
"""The broker's, bits 8 to 10, as a number: what kind of record it is; 0: a plain message."""
FLAG_KIND_HALF: Final = 0x0100
"""A message of a transaction that is not committed."""
FLAG_KIND_COPY: Final = 0x0200
"""The copy of a message that stands, or stood, elsewhere in the log."""
FLAG_KIND_STATE: Final = 0x0300
"""A state of the broker, in a system topic."""
FLAG_TRANSIT: Final = 0x0800
"""The broker's: `transit` stands before the topic."""
FLAG_COMMITTED: Final = 0x1000
"""The broker's, of a copy and all further ones: the transaction of the message was committed."""
FLAG_EXPIRED: Final = 0x2000
"""The broker's, of a copy and all further ones: nobody ended the transaction. The message never stood in the topic of its origin."""
FLAG_KEPT: Final = 0x4000
"""The broker's, of a copy, not of further ones: retention keeps the message for a group that has popped it, and gets it from there."""

SEAL: Final = struct.Struct("<BBBIBQBQBIBQBQBI")
"""A whole seal field: tag, length 51, then epoch, start_position, size_bytes, record_count, store_time_ms, synced_position, crc32c."""
SEAL_SIZE_BYTES: Final = SEAL.size
assert SEAL_SIZE_BYTES == 53
SEAL_FIELD_TAGS: Final = (0x0D, 0x11, 0x19, 0x25, 0x29, 0x31, 0x3D)
SEAL_COVERED_BYTES: Final = SEAL_SIZE_BYTES - 4
"""The part of a seal field that its own CRC covers."""
_pack_covered = struct.Struct("<BBBIBQBQBIBQBQB").pack
_SEAL_LENGTH: Final = SEAL_SIZE_BYTES - 2

NO_QUEUE_OFFSET: Final = (1 << 64) - 1
"""Stamped as `queue_offset` on a record that enters no consume queue."""

MESSAGE_ID_LENGTH: Final = 40
_HEX_DIGITS: Final = re.compile("[0-9A-Fa-f]*")


def trailer_size_bytes(topic: bytes, *, has_due_time: bool = False) -> int:
    """Bytes from the topic's tag to the end of the record."""
    return 2 + len(topic) + has_due_time * DUE_TIME_SIZE_BYTES + FIXED_TRAILER_SIZE_BYTES


def front_end(data: bytes | bytearray | memoryview, position: int, end: int) -> int:
    """Where fields 1 to 5 of the record that begins at `position` end: what its CRC covers. Raises ValueError if they do not fit."""
    while position < end and data[position] in FRONT_TAGS:
        try:
            size, position = read_varint(data, position + 1, LENGTH_SIZE_MAX_BYTES)
        except IndexError:
            raise ValueError("a length does not end") from None
        position += size
    if position > end:
        raise ValueError("a field ends outside of its record")
    return position


def encode_varint(value: int) -> bytes:
    """Shortest base-128 encoding of a number in [0, 2**64)."""
    if value < 0x80:
        return bytes((value,))
    if value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def encode_message_id(producer_id: int, producer_epoch: int, sequence: int) -> str:
    """40 hex digits: producer id, epoch, sequence."""
    return f"{producer_id:016X}{producer_epoch:08X}{sequence:016X}"


def decode_message_id(message_id: str) -> tuple[int, int, int]:
    """(producer_id, producer_epoch, sequence); raises ValueError for anything but 40 hex digits."""
    if len(message_id) != MESSAGE_ID_LENGTH:
        raise ValueError(
            f"a message id has {MESSAGE_ID_LENGTH} hex digits, this has {len(message_id)}"
        )
    # `int` alone would take 0x, signs, spaces and underscores, too.
    if not _HEX_DIGITS.fullmatch(message_id):
        raise ValueError(f"a message id has {MESSAGE_ID_LENGTH} hex digits, {message_id!r} has others")
    return int(message_id[:16], 16), int(message_id[16:24], 16), int(message_id[24:], 16)


def encode_front(
    keys: Iterable[str] = (),
    tag: str = "",
    properties: Mapping[str, str] | None = None,
    sharding_key: str = "",
    born_host: str = "",
) -> bytes:
    """Fields 2 to 5 in canonical form: what stands between body and trailer."""
    parts: list[bytes] = []
    for key in keys:
        _append_text(parts, b"\x12", key)
    if tag:
        _append_text(parts, b"\x1a", tag)
    if properties:
        for name in sorted(properties):
            entry: list[bytes] = []
            _append_text(entry, b"\x0a", name)
            _append_text(entry, b"\x12", properties[name])
            _append_bytes(parts, b"\x22", b"".join(entry))
    if sharding_key or born_host:
        attributes: list[bytes] = []
        if sharding_key:
            _append_text(attributes, b"\x0a", sharding_key)
        if born_host:
            _append_text(attributes, b"\x12", born_host)
        _append_bytes(parts, b"\x2a", b"".join(attributes))
    return b"".join(parts)


class RecordTemplate:
    """Writes records of one producer and one topic: the slow way is protobuf's, this gives the same bytes (a property test says so).

    Raises ValueError for a topic that is empty or longer than 127 bytes.
    """

    __slots__ = ("_producer_epoch", "_producer_id", "_topic_field")

    def __init__(self, topic: str, producer_id: int, producer_epoch: int) -> None:
        encoded = topic.encode()
        if not 0 < len(encoded) <= TOPIC_SIZE_MAX_BYTES:
            raise ValueError(
                f"a topic has 1 to {TOPIC_SIZE_MAX_BYTES} bytes, {topic!r} has {len(encoded)}"
            )
        self._topic_field = bytes((TOPIC_TAG, len(encoded))) + encoded
        self._producer_id = producer_id
        self._producer_epoch = producer_epoch

    def encode(
        self,
        body: bytes,
        sequence: int,
        born_time_ms: int,
        *,
        key: str = "",
        tag: str = "",
        sharding_key: str = "",
        front: bytes = b"",
        flags: int = 0,
        due_time_ms: int | None = None,
    ) -> bytes:
        """The record (without its own tag and length).

        `front` holds fields 2 to 5 as `encode_front` writes them: keys, tag, properties and attributes together. `key` (the first
        one), `tag` and `sharding_key` are given again for their codes. Stamped fields are written as zeros.
        """
        size = len(body)
        length = (
            bytes((size,))
            if size < 0x80
            else bytes((size & 0x7F | 0x80, size >> 7))
            if size < 0x4000
            else encode_varint(size)
        )
        crc = extend_crc32c(crc32c(b"\x0a" + length), body)
        due_time = b""
        if due_time_ms is not None:
            due_time = b"\x41" + due_time_ms.to_bytes(8, "little")
            flags |= FLAG_DUE_TIME
        trailer = FIXED_TRAILER.pack(
            0x49, tag_code_of(tag) if tag else 0,
            0x51, hash63(key.encode()) if key else 0,
            0x5D, sharding_hash_of(sharding_key),
            0x61, self._producer_id,
            0x6D, self._producer_epoch,
            0x71, sequence,
            0x7D, extend_crc32c(crc, front) if front else crc,
            b"\x81\x01", born_time_ms,
            b"\x8d\x01", flags,
            b"\x95\x01", 0,
            b"\x99\x01", 0,
            b"\xa1\x01", 0,
            b"\xa9\x01", 0,
        )  # fmt: skip
        return b"".join((b"\x0a", length, body, front, self._topic_field, due_time, trailer))


def encode_record_field(record: bytes) -> bytes:
    """The record with its tag and length, as it stands in a request, in a segment and in an answer."""
    return b"".join((b"\x0a", encode_varint(len(record)), record))


def encode_seal(
    previous_crc32c: int,
    *append: Octets,
    epoch: int,
    start_position: int,
    record_count: int,
    store_time_ms: int,
    synced_position: int,
) -> bytes:
    """The seal field that closes `append`, given in parts; the CRC chain stands at `previous_crc32c` before it."""
    size = sum(map(len, append))
    return seal_of(
        append, size, previous_crc32c, epoch, start_position, record_count, store_time_ms, synced_position
    )[0]


def seal_of(
    parts: Iterable[Octets],
    size_bytes: int,
    previous_crc32c: int,
    epoch: int,
    start_position: int,
    record_count: int,
    store_time_ms: int,
    synced_position: int,
) -> tuple[bytes, int]:
    """As `encode_seal`, for parts that have `size_bytes` together, with the CRC behind the seal: what each append of a broker needs."""
    covered = _pack_covered(
        SEAL_TAG, _SEAL_LENGTH, 0x0D, epoch, 0x11, start_position, 0x19, size_bytes, 0x25, record_count,
        0x29, store_time_ms, 0x31, synced_position, 0x3D,
    )  # fmt: skip
    crc = crc32c(previous_crc32c.to_bytes(4, "little"))
    for part in parts:
        crc = extend_crc32c(crc, part)
    crc = extend_crc32c(crc, covered)
    return covered + crc.to_bytes(4, "little"), crc


def _append_text(parts: list[bytes], tag: bytes, text: str) -> None:
    _append_bytes(parts, tag, text.encode())


def _append_bytes(parts: list[bytes], tag: bytes, data: bytes) -> None:
    parts.append(tag)
    parts.append(encode_varint(len(data)))
    parts.append(data)
