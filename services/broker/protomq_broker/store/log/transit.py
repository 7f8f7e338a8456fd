"""The field `transit` of a copy: where the message stood first, and why its deliveries failed. Pure: values in, bytes out."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from protomq.v1.record_pb2 import Record, Transit
from protomq.wire import record as layout
from protomq.wire.topics import RETRY_PREFIX
from protomq.wire.varints import LENGTH_SIZE_MAX_BYTES, read_varint

LAST_ERROR_SIZE_MAX_BYTES: Final = 512
"""In UTF-8; more is cut off."""
_TEXTS_SIZE_MAX_BYTES: Final = 600
"""Of `last_error`, `replayed_group` and `consumed_topic` together: with long names less of the error is kept. So a copy stays within the
largest record of a log (`log_walk.RECORD_FIELD_SIZE_MAX_BYTES`). One beyond that would be damage.
"""
_RETRY_PREFIX: Final = RETRY_PREFIX.encode()
ATTEMPT_MAX: Final = 0xFFFFFFFF
"""Attempts are counted up to here."""

KEPT_FLAGS: Final = layout.COMPRESSION_MAX | layout.FLAG_MANY_KEYS | layout.FLAG_COMMITTED | layout.FLAG_EXPIRED
"""What of a record's flags stays when it moves."""
ORIGIN: Final = np.dtype(
    [
        ("queue_id_tag", "u1"),
        ("queue_id", "<u4"),
        ("queue_offset_tag", "u1"),
        ("queue_offset", "<u8"),
        ("store_time_tag", "u1"),
        ("store_time_ms", "<u8"),
    ]
)
"""Transit behind its first field, of a message that is moved for the first time; zeros are written too."""
ORIGIN_TAGS: Final = {
    "queue_id_tag": 0x15,
    "queue_offset_tag": 0x19,
    "store_time_tag": 0x29,
}
_U32: Final = struct.Struct("<I").unpack_from
_ORIGIN_OF_ZEROS: Final = np.array([(0x15, 0, 0x19, 0, 0x29, 0)], ORIGIN)
assert list(ORIGIN_TAGS.values()) == [0x15, 0x19, 0x29]


def origins_of(trailers: NDArray[np.void]) -> NDArray[np.void]:
    """For messages that are moved for the first time: where they stand, for all that the topic does not say."""
    origins = np.repeat(_ORIGIN_OF_ZEROS, len(trailers))
    for name in ("queue_id", "queue_offset", "store_time_ms"):
        origins[name] = trailers[name]
    return origins


def attempt_of(data: bytes, start: int, end: int) -> int:
    """How often the message of this record field was handed out before, as the record says."""
    if not _U32(data, end + layout.FLAGS_AT)[0] & layout.FLAG_TRANSIT:
        return 0
    _, start = read_varint(data, start + 1, LENGTH_SIZE_MAX_BYTES)
    return Record.FromString(data[start:end]).transit.attempt


def raised_transit(
    written: bytes, topic: bytes, attempts: int, last_error: str | None, replayed_group: str
) -> bytes:
    """The field `transit` of a copy of a message that was moved before, and failed or is replayed. `written`: the field as it stands, in
    `topic`. Raises ValueError.
    """
    _, at = read_varint(written, 1, LENGTH_SIZE_MAX_BYTES)
    try:
        transit = Transit.FromString(written[at:])
    except DecodeError as error:
        raise ValueError("a record whose transit does not parse") from error
    if replayed_group:
        transit.replayed_group, transit.attempt, transit.consumed_topic = replayed_group, 0, ""
    elif not topic.startswith(_RETRY_PREFIX):
        consumed = topic.decode()
        transit.consumed_topic = consumed if consumed != transit.origin_topic else ""
    transit.attempt = min(transit.attempt + attempts, ATTEMPT_MAX)
    names_size = len(transit.replayed_group.encode()) + len(transit.consumed_topic.encode())
    room = min(LAST_ERROR_SIZE_MAX_BYTES, _TEXTS_SIZE_MAX_BYTES - names_size)
    transit.last_error = cut_error(transit.last_error if last_error is None else last_error, room)
    octets = transit.SerializeToString()
    return bytes((layout.TRANSIT_TAG,)) + layout.encode_varint(len(octets)) + octets


def cut_error(text: str, size_max_bytes: int = LAST_ERROR_SIZE_MAX_BYTES) -> str:
    """As much of it as is kept."""
    # No character has more than four octets.
    if 4 * len(text) <= size_max_bytes:
        return text
    return text.encode()[:size_max_bytes].decode(errors="ignore")


@lru_cache(maxsize=256)
def transit_head(topic: bytes, tail_size: int = 0) -> bytes:
    """The field `transit` of a first move up to where `ORIGIN` begins. `tail_size`: of the `transit_tail` behind that."""
    first = b"\x0a" + layout.encode_varint(len(topic)) + topic
    size = len(first) + ORIGIN.itemsize + tail_size
    return bytes((layout.TRANSIT_TAG,)) + layout.encode_varint(size) + first


def transit_tail(attempts: int, last_error: str | None, replayed_group: str) -> bytes:
    """What a first move writes behind `ORIGIN`: how deliveries failed. Equal bytes are one object while the cache has them."""
    return _transit_tail(attempts, cut_error(last_error or ""), replayed_group)


@lru_cache(maxsize=256)
def _transit_tail(attempts: int, last_error: str, replayed_group: str) -> bytes:
    return Transit(
        attempt=min(attempts, ATTEMPT_MAX), last_error=last_error, replayed_group=replayed_group
    ).SerializeToString()
