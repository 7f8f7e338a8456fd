"""Layout of a record: where everything stands, and how to write one fast.

    record field   0x0A, varint(size), record
    record         [front: body, keys, tag, properties, attributes] [trailer]

    trailer, from its start (n = bytes of the topic, 1 to 127)      from the end of the record
    +0      32 nn  topic                                            -(97 + n)
    +2+n    39     tag_code          sfixed64                       -95
            41     key_hash          fixed64                        -86
            49     producer_id       fixed64                        -77
            55     producer_epoch    fixed32                        -68
            59     sequence          fixed64                        -63
            65     body_crc32c       fixed32                        -54
            69     born_time_ms      fixed64                        -49
            75     flags             fixed32                        -40
            7D     queue_id          fixed32    stamped             -35
            81 01  store_time_ms     fixed64    stamped             -30
            89 01  queue_offset      fixed64    stamped             -20
            91 01  physical_offset   fixed64    stamped             -10

Offsets in this module are counted from the end of the record: they are the same in every record, whatever stands in front.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Final

from .hashing import Octets, crc32c, extend_crc32c, hash63, tag_code_of

RECORD_TAG: Final = 0x0A
SEAL_TAG: Final = 0x12
PADDING_TAG: Final = 0x1A
TOPIC_TAG: Final = 0x32
BODY_TAG: Final = 0x0A

FIXED_TRAILER: Final = struct.Struct("<BqBQBQBIBQBIBQBIBI2sQ2sQ2sQ")
"""The trailer behind the topic: each tag followed by its value."""

FIXED_TRAILER_SIZE_BYTES: Final = FIXED_TRAILER.size
assert FIXED_TRAILER_SIZE_BYTES == 95

# Where each value (not its tag) starts, counted from the end of the record.
TAG_CODE_AT: Final = -94
KEY_HASH_AT: Final = -85
PRODUCER_ID_AT: Final = -76
PRODUCER_EPOCH_AT: Final = -67
SEQUENCE_AT: Final = -62
BODY_CRC32C_AT: Final = -53
BORN_TIME_MS_AT: Final = -48
FLAGS_AT: Final = -39
QUEUE_ID_AT: Final = -34
STORE_TIME_MS_AT: Final = -28
QUEUE_OFFSET_AT: Final = -18
PHYSICAL_OFFSET_AT: Final = -8

STAMP: Final = struct.Struct("<BI2sQ2sQ2sQ")
"""The last 35 bytes of a record: what the broker stamps."""
STAMP_SIZE_BYTES: Final = STAMP.size
assert STAMP_SIZE_BYTES == 35

FIXED_TRAILER_TAGS: Final = (
    0x39,
    0x41,
    0x49,
    0x55,
    0x59,
    0x65,
    0x69,
    0x75,
    0x7D,
    b"\x81\x01",
    b"\x89\x01",
    b"\x91\x01",
)

BODY_SIZE_MAX_BYTES: Final = 4 << 20
"""4 MiB, as RocketMQ's maxMessageSize."""
FRONT_SIZE_MAX_BYTES: Final = 32 << 10
"""Keys, tag, properties and attributes together; RocketMQ's limit for properties is 32,767 bytes."""
RECORDS_PER_REQUEST_MAX: Final = 32_768
RECORDS_WITHOUT_TRAILER_MAX: Final = 4_096
TOPIC_SIZE_MAX_BYTES: Final = 127

FLAG_COMPRESSION_MASK: Final = 0x07
COMPRESSION_NONE: Final = 0
COMPRESSION_ZLIB: Final = 1
COMPRESSION_LZ4: Final = 2
COMPRESSION_ZSTD: Final = 3
FLAG_MANY_KEYS: Final = 0x08
PRODUCER_FLAGS_MASK: Final = FLAG_COMPRESSION_MASK | FLAG_MANY_KEYS
"""The bits of `flags` that a producer may set."""

SEAL: Final = struct.Struct("<BBBIBQBQBIBQBQBI")
"""A whole seal field: tag, length 51, then epoch, start_position, size_bytes, record_count, store_time_ms, synced_position, crc32c."""
SEAL_SIZE_BYTES: Final = SEAL.size
assert SEAL_SIZE_BYTES == 53
SEAL_FIELD_TAGS: Final = (0x0D, 0x11, 0x19, 0x25, 0x29, 0x31, 0x3D)
SEAL_COVERED_BYTES: Final = SEAL_SIZE_BYTES - 4
"""The part of a seal field that its own CRC covers."""

MESSAGE_ID_LENGTH: Final = 40


def trailer_size_bytes(topic: bytes) -> int:
    """Bytes from the topic's tag to the end of the record."""
    return 2 + len(topic) + FIXED_TRAILER_SIZE_BYTES


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

    __slots__ = ("_producer_epoch", "_producer_id", "_topic_field", "_trailer_size_bytes")

    def __init__(self, topic: str, producer_id: int, producer_epoch: int) -> None:
        encoded = topic.encode()
        if not 0 < len(encoded) <= TOPIC_SIZE_MAX_BYTES:
            raise ValueError(
                f"a topic has 1 to {TOPIC_SIZE_MAX_BYTES} bytes, {topic!r} has {len(encoded)}"
            )
        self._topic_field = bytes((TOPIC_TAG, len(encoded))) + encoded
        self._producer_id = producer_id
        self._producer_epoch = producer_epoch
        self._trailer_size_bytes = trailer_size_bytes(encoded)

    def encode(
        self,
        body: bytes,
        sequence: int,
        born_time_ms: int,
        *,
        key: str = "",
        tag: str = "",
        front: bytes = b"",
        flags: int = 0,
    ) -> bytes:
        """The record (without its own tag and length).

        `front` holds fields 2 to 5 as `encode_front` writes them, for keys, tag, properties and attributes together; `key` (the first
        one) and `tag` are given again for their codes. Stamped fields are written as zeros.
        """
        size = len(body)
        trailer = FIXED_TRAILER.pack(
            0x39, tag_code_of(tag) if tag else 0,
            0x41, hash63(key.encode()) if key else 0,
            0x49, self._producer_id,
            0x55, self._producer_epoch,
            0x59, sequence,
            0x65, crc32c(body),
            0x69, born_time_ms,
            0x75, flags,
            0x7D, 0,
            b"\x81\x01", 0,
            b"\x89\x01", 0,
            b"\x91\x01", 0,
        )  # fmt: skip
        length = (
            bytes((size,))
            if size < 0x80
            else bytes((size & 0x7F | 0x80, size >> 7))
            if size < 0x4000
            else encode_varint(size)
        )
        return b"".join((b"\x0a", length, body, front, self._topic_field, trailer))


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
    unsigned = SEAL.pack(
        SEAL_TAG, SEAL_SIZE_BYTES - 2, 0x0D, epoch, 0x11, start_position, 0x19, size, 0x25, record_count,
        0x29, store_time_ms, 0x31, synced_position, 0x3D, 0,
    )  # fmt: skip
    crc = crc32c(previous_crc32c.to_bytes(4, "little"))
    for part in append:
        crc = extend_crc32c(crc, part)
    crc = extend_crc32c(crc, unsigned[:SEAL_COVERED_BYTES])
    return unsigned[:SEAL_COVERED_BYTES] + crc.to_bytes(4, "little")


def _append_text(parts: list[bytes], tag: bytes, text: str) -> None:
    _append_bytes(parts, tag, text.encode())


def _append_bytes(parts: list[bytes], tag: bytes, data: bytes) -> None:
    parts.append(tag)
    parts.append(encode_varint(len(data)))
    parts.append(data)
