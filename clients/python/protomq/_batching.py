"""From messages to the bytes of a SendRequest, and from an answer to results. Pure: no sockets, no clocks, no locks.

The code assembles a request by hand: protobuf's Python API costs 4-8 us per record, this costs 0.6 us (1 KiB body, CRC
included). A numpy variant was not faster. The bytes are those that protobuf itself would write, a property test says so, in
the order that lets the broker take them over unparsed:

    0A len record   ...   0A len record        records, each canonical, trailer complete, stamped fields zero
    22 len topic    28 queue_id    32 len sizes (u32 each)    [38 00]    [41 previous sequence:8]    [delay]
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final
from zlib import crc32 as zip_crc32

from ._compression import DECOMPRESSED_SIZE_MAX_BYTES
from .errors import ConfigurationError, MessageTooLargeError
from .wire.hashing import crc32c, extend_crc32c, tag_code_of
from .wire.record import (
    BODY_SIZE_MAX_BYTES,
    DUE_TIME_SIZE_BYTES,
    FIXED_TRAILER_SIZE_BYTES,
    FLAG_DUE_TIME,
    FLAG_MANY_KEYS,
    FRONT_SIZE_MAX_BYTES,
    KEYS_MAX,
    NOT_IN_TAGS,
    RECORDS_PER_REQUEST_MAX,
    STAMP,
    STAMP_TAGS,
    TOPIC_SIZE_MAX_BYTES,
    TOPIC_TAG,
    encode_front,
    encode_varint,
)

PreparedRecord = tuple[bytes, str, str, bytes, int, int, int]
"""(body as stored, first key, tag, front, flags, born_time_ms, sharding_hash). A plain tuple: one is made for every message.

The flags of a delayed message have its due time above their 32 bits.
"""

REQUEST_SIZE_MAX_BYTES: Final = 4 << 20
"""Default size at which a batch is split. RocketMQ: maxMessageSize holds for a whole batch."""

# key_hash; sharding_hash, producer_id, epoch, with tags around; sequence, tag; crc32c, tag; born_time_ms
_MIDDLE: Final = struct.Struct("<Q20sQBIHQ")
_IDENTITY: Final = struct.Struct("<BIBQBIB")
_STAMP_ZEROS: Final = STAMP.pack(*(value for tag in STAMP_TAGS for value in (tag, 0)))

_PREFIXES_MAX: Final = 4096
_SIZE: Final = struct.Struct("<I")


class RecordEncoder:
    """Writes records and requests of one producer for one topic. Any thread: its caches are dicts of immutable values."""

    __slots__ = ("_identity", "_prefixes", "_tails", "_topic_field", "fixed_size_bytes", "topic")

    def __init__(self, topic: str, producer_id: int, producer_epoch: int) -> None:
        encoded = topic.encode()
        if not 0 < len(encoded) <= TOPIC_SIZE_MAX_BYTES:
            raise ConfigurationError(
                f"a topic has 1 to {TOPIC_SIZE_MAX_BYTES} bytes, {topic!r} has {len(encoded)}"
            )
        self.topic = topic
        self._topic_field = bytes((TOPIC_TAG, len(encoded))) + encoded
        self._identity = _IDENTITY.pack(0x5D, 0, 0x61, producer_id, 0x6D, producer_epoch, 0x71)
        self._prefixes: dict[str, bytes] = {}
        self._tails: dict[int, bytes] = {}
        self.fixed_size_bytes = len(self._topic_field) + FIXED_TRAILER_SIZE_BYTES
        """Size of the trailer, topic included."""

    def encode_request(
        self,
        records: Sequence[PreparedRecord],
        first_sequence: int,
        queue_id: int,
        wait_store_ok: bool = True,
        previous_sequence: int | None = None,
        delay_field: bytes = b"",
    ) -> list[bytes]:
        """The pieces of a SendRequest with these records, numbered from `first_sequence`; `delay_field`: as in `When`."""
        parts: list[bytes] = []
        sizes = self.encode_records(parts, records, first_sequence)
        parts.append(self.encode_tail(sizes, queue_id, wait_store_ok))
        if previous_sequence is not None:
            parts.append(b"\x41" + previous_sequence.to_bytes(8, "little"))
        parts.append(delay_field)
        return [b"".join(parts)]

    def encode_records(
        self, parts: list[bytes], records: Sequence[PreparedRecord], first_sequence: int
    ) -> list[int]:
        """Appends the record fields to `parts`; answers the size of each record."""
        # Local names: this loop runs once per message, and it is most of what a message costs on this side.
        pack, extend = _MIDDLE.pack, extend_crc32c
        prefixes, identity = self._prefixes, self._identity
        fixed_size = self.fixed_size_bytes
        sizes: list[int] = []
        sequence = first_sequence
        for body, key, tag, front, flags, born_time_ms, sharding_hash in records:
            prefix = prefixes.get(tag) or self._prefix(tag)
            owner = _sharded(identity, sharding_hash) if sharding_hash else identity
            rest, end = fixed_size, _PLAIN_END
            if flags:
                end = _end(flags & 0xFFFFFFFF)
                if flags & FLAG_DUE_TIME:
                    prefix, rest = self._delayed(prefix, flags >> 32), rest + DUE_TIME_SIZE_BYTES
            if front:
                head, size, crc = _head(len(body), len(front) + rest)
                crc = extend(extend(crc, body), front)
                key_hash = 0
                if key:  # hash63, without a call of it
                    encoded = key.encode()
                    key_hash = crc32c(encoded) | (zip_crc32(encoded) & 0x7FFFFFFF) << 32
                middle = pack(key_hash, owner, sequence, 0x7D, crc, 0x0181, born_time_ms)
                parts += (head, body, front, prefix, middle, end)
            else:
                head, size, crc = _head(len(body), rest)
                middle = pack(0, owner, sequence, 0x7D, extend(crc, body), 0x0181, born_time_ms)
                parts += (head, body, prefix, middle, end)
            sizes.append(size)
            sequence += 1
        return sizes

    def encode_tail(self, sizes: Sequence[int], queue_id: int, wait_store_ok: bool = True) -> bytes:
        """What follows the records: topic, queue, sizes."""
        head = self._tails.get(queue_id)
        if head is None:
            head = self._tails[queue_id] = (
                b"\x22" + self._topic_field[1:] + b"\x28" + encode_varint(queue_id) + b"\x32"
            )
        count = len(sizes)
        packed = _SIZE.pack(sizes[0]) if count == 1 else struct.pack(f"<{count}I", *sizes)
        return b"".join(
            (head, encode_varint(4 * count), packed, b"" if wait_store_ok else b"\x38\x00")
        )

    def _prefix(self, tag: str) -> bytes:
        """From the topic to the tag of key_hash: constant for a tag."""
        prefix = (
            self._topic_field
            + b"\x49"
            + tag_code_of(tag).to_bytes(8, "little", signed=True)
            + b"\x51"
        )
        if len(self._prefixes) < _PREFIXES_MAX:
            self._prefixes[tag] = prefix
        return prefix

    def _delayed(self, prefix: bytes, due_time_ms: int) -> bytes:
        """The prefix with a due time behind the topic."""
        behind = len(self._topic_field)
        return b"%b\x41%b%b" % (prefix[:behind], due_time_ms.to_bytes(8, "little"), prefix[behind:])

    def field_sizes(self, records: Sequence[PreparedRecord]) -> list[int]:
        """Sizes in bytes of the record fields, with tag and length."""
        found: list[int] = []
        for body, _, _, front, flags, _, _ in records:
            rest = len(front) + self.fixed_size_bytes
            if flags & FLAG_DUE_TIME:
                rest += DUE_TIME_SIZE_BYTES
            _, size, _ = _head(len(body), rest)
            found.append(1 + len(encode_varint(size)) + size)
        return found


def _sharded(identity: bytes, sharding_hash: int) -> bytes:
    return identity[:1] + sharding_hash.to_bytes(4, "little") + identity[5:]


@lru_cache(maxsize=32)
def _end(flags: int) -> bytes:
    """Flags, and zeros for what the broker stamps."""
    return b"\x8d\x01" + flags.to_bytes(4, "little") + _STAMP_ZEROS


_PLAIN_END: Final = _end(0)


@lru_cache(maxsize=8192)
def _head(body_size_bytes: int, rest_size_bytes: int) -> tuple[bytes, int, int]:
    """Tag and length of the record, tag and length of its body; the record's size; the CRC-32C of the body's tag and length.

    `rest`: front and trailer.
    """
    body_head = b"\x0a" + encode_varint(body_size_bytes)
    size = len(body_head) + body_size_bytes + rest_size_bytes
    return b"\x0a" + encode_varint(size) + body_head, size, crc32c(body_head)


def make_front(
    key: str | None,
    keys: Sequence[str],
    tag: str,
    properties: Mapping[str, str] | None,
    sharding_key: str | None,
    born_host: str,
) -> tuple[str, bytes, int]:
    """(first key, fields 2 to 5 of the record, flags) of a message.

    Raises MessageTooLargeError over 32 KiB, ConfigurationError for a tag or key that nobody could ask for, and for too many keys.
    """
    if not (keys or properties or sharding_key or born_host):
        # A key and a tag at most: what most messages have, without the general writer.
        front = _tag_field(tag) if tag else b""
        if key:
            encoded = key.encode()
            size = len(encoded)
            front = (
                b"\x12%c%b%b" % (size, encoded, front)
                if size < 0x80
                else b"\x12" + encode_varint(size) + encoded + front
            )
        flags = 0
    else:
        _tag_field(tag)  # Checks it.
        all_keys = (key, *keys) if key else tuple(keys)
        front = encode_front(all_keys, tag, properties, sharding_key or "", born_host)
        if "" in all_keys or len(all_keys) > KEYS_MAX:
            raise ConfigurationError(
                f"a message has at most {KEYS_MAX} keys, and none of them is empty"
            )
        key = all_keys[0] if all_keys else ""
        flags = FLAG_MANY_KEYS if len(all_keys) > 1 else 0
    if len(front) > FRONT_SIZE_MAX_BYTES:
        raise MessageTooLargeError(
            f"keys, tag, properties and sharding key of a message come to {len(front)} bytes, {FRONT_SIZE_MAX_BYTES} are allowed",
            metadata={"limit_bytes": str(FRONT_SIZE_MAX_BYTES)},
        )
    return key or "", front, flags


@lru_cache(maxsize=4096)
def _tag_field(tag: str) -> bytes:
    """Raises ConfigurationError for what RocketMQ's proxy refuses, too."""
    if NOT_IN_TAGS.search(tag):
        raise ConfigurationError(
            f"tag {tag!r}: a tag has no | (subscriptions separate tags by ||) and no control characters"
        )
    if tag == "*":
        raise ConfigurationError("tag '*': consumers that ask for '*' get all messages, so nobody can ask for this tag")
    encoded = tag.encode()
    return b"\x1a" + encode_varint(len(encoded)) + encoded


def refuse_large_body(size_bytes: int) -> MessageTooLargeError:
    """The error for a body over 4 MiB."""
    return MessageTooLargeError(
        f"a body of {size_bytes} bytes (as it is stored), {BODY_SIZE_MAX_BYTES} are allowed",
        metadata={"limit_bytes": str(BODY_SIZE_MAX_BYTES)},
    )


def refuse_unreadable_body(size_bytes: int) -> MessageTooLargeError:
    """The error for a body that no consumer would unpack, however small it became."""
    return MessageTooLargeError(
        f"a body of {size_bytes} bytes (before compression), {DECOMPRESSED_SIZE_MAX_BYTES} are allowed",
        metadata={"limit_bytes": str(DECOMPRESSED_SIZE_MAX_BYTES)},
    )


def split_records(
    records: Sequence[PreparedRecord],
    fixed_size_bytes: int,
    size_max_bytes: int = REQUEST_SIZE_MAX_BYTES,
    count_max: int = RECORDS_PER_REQUEST_MAX,
) -> Iterator[Sequence[PreparedRecord]]:
    """Cuts a batch where a request would become too large or too long; a single record always fits."""
    start = size = 0
    # 18 bytes: the two tags and lengths of a record, and its entry in record_sizes.
    overhead = fixed_size_bytes + 18 + DUE_TIME_SIZE_BYTES
    for index, record in enumerate(records):
        record_size = len(record[0]) + len(record[3]) + overhead
        if index > start and (size + record_size > size_max_bytes or index - start >= count_max):
            yield records[start:index]
            start, size = index, 0
        size += record_size
    if start < len(records):
        yield records if start == 0 else records[start:]
