"""The field `transit` of a copy: where the message stood first, and why its deliveries failed. Pure: values in, bytes out."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
from google.protobuf.message import DecodeError

from protomq.v1.record_pb2 import Transit
from protomq.wire import record as layout
from protomq.wire.varints import LENGTH_SIZE_MAX_BYTES, read_varint

LAST_ERROR_SIZE_MAX_BYTES: Final = 512
"""In UTF-8; more is cut off: a copy has to stay within the largest record of a log."""

KEPT_FLAGS: Final = layout.COMPRESSION_MAX | layout.FLAG_MANY_KEYS
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
"""Transit behind its first field, of a message that is moved for the first time before anybody got it; zeros are written too."""
ORIGIN_TAGS: Final = {
    "queue_id_tag": 0x15,
    "queue_offset_tag": 0x19,
    "store_time_tag": 0x29,
}


def opened_transit(
    written: bytes,
    topic: bytes,
    origin: tuple[int, int, int],
    attempts: int,
    last_error: str | None,
    replayed_group: str,
) -> bytes:
    """The field `transit` of one copy, the way that is always right. `written`: the field as it stands; b"" at the first move.

    `origin`: queue, queue offset and store time, for the first move.
    """
    if written:
        _, at = read_varint(written, 1, LENGTH_SIZE_MAX_BYTES)
        try:
            transit = Transit.FromString(written[at:])
        except DecodeError as error:
            raise ValueError("a record whose transit does not parse") from error
    else:
        transit = Transit(
            origin_topic=topic.decode(),
            origin_queue_id=origin[0],
            origin_queue_offset=origin[1],
            first_store_time_ms=origin[2],
        )
    if replayed_group:
        transit.replayed_group, transit.attempt = replayed_group, 0
    transit.attempt = min(transit.attempt + attempts, 0xFFFFFFFF)
    if last_error is not None:
        transit.last_error = cut_error(last_error)
    octets = transit.SerializeToString()
    return bytes((layout.TRANSIT_TAG,)) + layout.encode_varint(len(octets)) + octets


def cut_error(text: str) -> str:
    """As much of it as is kept."""
    return text.encode()[:LAST_ERROR_SIZE_MAX_BYTES].decode(errors="ignore")


@lru_cache(maxsize=256)
def transit_head(topic: bytes) -> bytes:
    """The field `transit` of a first move up to where `ORIGIN` begins."""
    first = b"\x0a" + layout.encode_varint(len(topic)) + topic
    size = len(first) + ORIGIN.itemsize
    return bytes((layout.TRANSIT_TAG,)) + layout.encode_varint(size) + first
