"""Where a message that the broker moved came from: a retry, a dead letter, a delayed one. Read from its record when somebody asks."""

from __future__ import annotations

from typing import NamedTuple

from .wire.record import TOPIC_TAG, TRANSIT_TAG
from .wire.varints import LENGTH_SIZE_MAX_BYTES, read_varint

NO_OFFSET = (1 << 64) - 1


class MessageOrigin(NamedTuple):
    """Where a message stood before it was moved for the first time. Of an expired transaction: where it was to come.

    `queue_offset` is None if it was in no queue then, as a delayed one. `store_time_ms`: when it was stored there, milliseconds since 1970.
    """

    topic: str
    queue_id: int
    queue_offset: int | None
    store_time_ms: int


class MessageTransit(NamedTuple):
    """What the broker says of a message that it moved.

    `attempt`: how often it was handed out before; `last_error`: why that failed. `replayed_group`: it is a dead letter of this group
    that was replayed; "": it is none. `consumed_topic`: of a retry, where its group had it: the topic of its origin, or that of another
    group's dead letters.
    """

    origin: MessageOrigin
    attempt: int
    last_error: str
    replayed_group: str
    consumed_topic: str


def read_transit(rest: bytes) -> MessageTransit | None:
    """From what stands behind a body; None if the message was never moved. Raises IndexError, ValueError for what does not parse."""
    position = 0
    while rest[position] != TRANSIT_TAG:
        if rest[position] == TOPIC_TAG:
            return None
        size, start = read_varint(rest, position + 1, LENGTH_SIZE_MAX_BYTES)
        position = start + size
    from google.protobuf.message import DecodeError

    from .v1.record_pb2 import Transit  # with the answers to pulls, which are loaded

    size, start = read_varint(rest, position + 1, LENGTH_SIZE_MAX_BYTES)
    try:
        transit = Transit.FromString(rest[start : start + size])
    except DecodeError as error:
        raise ValueError(f"its transit does not parse: {error}") from error
    offset = transit.origin_queue_offset
    origin = MessageOrigin(
        transit.origin_topic,
        transit.origin_queue_id,
        None if offset == NO_OFFSET else offset,
        transit.first_store_time_ms,
    )
    consumed_topic = transit.consumed_topic or transit.origin_topic
    return MessageTransit(origin, transit.attempt, transit.last_error, transit.replayed_group, consumed_topic)
