"""Pulls that ask for plain bodies: rewrites records with a compressed body, so that they contain the original body.

    stored    0A len [ 0A len packed | rest of the front ][ transit, topic, trailer: flags 1, crc32c of the stored front ]
    answered  0A len [ 0A len body   | rest of the front ][ the same, but     flags 0, crc32c of this front              ]

Rules:
- A record whose CRC fails goes out as stored, with its CRC: its reader must see the damage, not a correct CRC over it.
- A body may unpack to 4 MiB, the maximum of a plain send. A body that would be larger, is damaged, or has a codec that is not installed
  stays compressed. Its flags stay too, so the reader knows.
- The maximum size of an answer counts plain bytes. Records that do not fit come with the next pull. One record is always given.
- An answer without a compressed body is not touched.

Pure functions.
"""

from __future__ import annotations

from dataclasses import replace
from struct import Struct

import numpy as np

from protomq.wire.codecs import CodecError, unpack_body
from protomq.wire.hashing import crc32c
from protomq.wire.record import (
    BODY_SIZE_MAX_BYTES,
    BODY_TAG,
    CRC32C_AT,
    FLAG_COMPRESSION_MASK,
    FLAGS_AT,
    encode_record_field,
    encode_varint,
    front_end,
)
from protomq.wire.varints import read_varint

from .store.queues.reading import ReadResult

_U32 = Struct("<I")


def with_plain_bodies(
    result: ReadResult, data: bytes, size_max_bytes: int
) -> tuple[ReadResult, bytes] | None:
    """Returns the result and bytes to answer in place of `result` and `data`; None if these are plain already.

    The new result has no regions: its records follow one another in the returned bytes.
    """
    starts, sizes = result.starts.tolist(), result.sizes.tolist()
    fields = [data[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    if not any(_flags(field) & FLAG_COMPRESSION_MASK for field in fields):
        return None
    plain: list[bytes] = []
    total = 0
    for field in fields:
        made = plain_field(field)
        if plain and total + len(made) > size_max_bytes:
            break
        plain.append(made)
        total += len(made)
    count = len(plain)
    new_sizes = np.array([len(field) for field in plain], np.uint32)
    next_offset = result.next_offset
    queue_offsets = result.queue_offsets
    if count < len(fields):
        next_offset = (
            result.first_offset + count if queue_offsets is None else int(queue_offsets[count])
        )
    answered = replace(
        result,
        next_offset=next_offset,
        starts=(np.cumsum(new_sizes, dtype=np.uint32) - new_sizes).astype(np.uint32),
        sizes=new_sizes,
        queue_offsets=None if queue_offsets is None else queue_offsets[:count],
        regions=[],
        regions_size_bytes=total,
    )
    return answered, b"".join(plain)


def plain_field(field: bytes) -> bytes:
    """Returns a record field with a plain body. Returns `field` itself if it is plain, its CRC fails, or it cannot be unpacked."""
    flags = _flags(field)
    if not flags & FLAG_COMPRESSION_MASK:
        return field
    _, start = read_varint(field, 1)
    if field[start] != BODY_TAG:
        return field  # A compressed body is never empty.
    size, body_start = read_varint(field, start + 1)
    body_end = body_start + size
    end = front_end(field, start, len(field))
    if crc32c(field[start:end]) != _crc32c(field):
        return field
    try:
        body = unpack_body(field[body_start:body_end], flags, BODY_SIZE_MAX_BYTES)
    except CodecError:
        return field
    front = b"".join(
        (bytes((BODY_TAG,)), encode_varint(len(body)), body, field[body_end:end])
    )
    rest = bytearray(field[end:])
    _U32.pack_into(rest, len(rest) + FLAGS_AT, flags & ~FLAG_COMPRESSION_MASK)
    _U32.pack_into(rest, len(rest) + CRC32C_AT, crc32c(front))
    return encode_record_field(front + bytes(rest))


def _flags(field: bytes) -> int:
    flags: int = _U32.unpack_from(field, len(field) + FLAGS_AT)[0]
    return flags


def _crc32c(field: bytes) -> int:
    """The producer's CRC-32C, from the record's trailer."""
    value: int = _U32.unpack_from(field, len(field) + CRC32C_AT)[0]
    return value
