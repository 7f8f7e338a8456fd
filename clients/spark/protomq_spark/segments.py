"""Walking commit-log segments without a broker. Pure: bytes in, records and damaged ranges out.

    segment   head append   append   ...   padding append, or zeros
    append    0A len record   0A len record   ...   12 33 seal

Appends are walked, and proved, by the store's own walker (protomq.wire.log_walk). Behind damage there is nothing to walk from.
So the reader searches for the next seal that holds by all of these; what lies between is the damaged range.

This is the reader's side of services/broker/protomq_broker/store/FORMAT.md; no server is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protomq.wire.log_walk import (
    APPEND_SIZE_MAX_BYTES,
    EMPTY,
    SEAL_HEAD,
    decode_seal,
    walk_appends,
)
from protomq.wire.record import (
    FIXED_TRAILER_SIZE_BYTES,
    NO_QUEUE_OFFSET,
    QUEUE_OFFSET_AT,
    SEAL_SIZE_BYTES,
    TOPIC_TAG,
)
from protomq.wire.varints import LENGTH_SIZE_MAX_BYTES, read_varint

STRETCH_MAX_BYTES: Final = APPEND_SIZE_MAX_BYTES + 2 * SEAL_SIZE_BYTES
"""Of an append, and the seals before and behind it."""
_TOPIC_SIZE_UNAMBIGUOUS_BYTES: Final = 36


class Damage(NamedTuple):
    """A range of the log that does not hold."""

    start_position: int
    end_position: int
    reason: str
    tail: bool
    """Nothing that holds stands behind it in its segment: a torn tail, or an append that is being written."""


@dataclass(slots=True)
class Window:
    """What a stretch of a segment holds. Positions of records are relative to the stretch."""

    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    appends: list[tuple[int, int]] = field(default_factory=list)
    """(where it ends, seal included, CRC of its seal) of each append."""
    walked_bytes: int = 0
    """Up to where whole appends reach."""
    crc: int | None = None
    """Of the last seal: what the next one is chained to. None: not known."""
    finished: bool = False
    """The zeros behind the last append are reached."""
    reason: str = ""
    """Why the append at `walked_bytes` does not hold; "" if it does, or needs more bytes to tell."""


def walk(data: bytes, base_position: int, crc: int | None, *, whole: bool) -> Window:
    """Walks appends from the first octet of `data`, which stands at `base_position` of the log.

    `crc`: of the seal before; None at the head of a segment, which is taken as it is. `whole`: the segment ends with `data`.
    """
    block = walk_appends(data, base_position, crc)
    finished = block.problem == EMPTY
    reason = "" if finished else block.problem
    if whole and not block.problem and block.size_bytes < len(data):
        reason = "an append that ends outside of its segment"
    starts, sizes = block.records()
    return Window(
        starts=starts.tolist(),
        ends=(starts + sizes).tolist(),
        appends=[(seal.end_position - base_position, seal.crc32c) for seal in block.seals],
        walked_bytes=block.size_bytes,
        crc=block.seals[-1].crc32c if block.seals else crc,
        finished=finished,
        reason=reason,
    )


def find_append(data: bytes, base_position: int, start: int) -> int | None:
    """Where, from `start` on, the next append begins that holds by itself; None if there is none in `data`."""
    at = data.find(SEAL_HEAD, start)
    while at >= 0:
        if at + SEAL_SIZE_BYTES <= len(data):
            seal = decode_seal(data, at)
            if seal is not None and seal.start_position + seal.size_bytes == base_position + at:
                begins = seal.start_position - base_position
                before = begins - SEAL_SIZE_BYTES
                if begins >= start and before >= 0 and _holds(data, base_position, begins, at):
                    return begins
        at = data.find(SEAL_HEAD, at + 1)
    return None


def _holds(data: bytes, base_position: int, begins: int, seal_at: int) -> bool:
    """Whether the append holds, chained to what stands where the seal before it must be."""
    before = decode_seal(data, begins - SEAL_SIZE_BYTES)
    if before is None:
        return False
    stretch = data[begins : seal_at + SEAL_SIZE_BYTES]
    block = walk_appends(stretch, base_position + begins, before.crc32c)
    return block.size_bytes == len(stretch) and len(block.seals) == 1


def _length(data: bytes, position: int) -> tuple[int, int]:
    """(position behind the length, length); (0, 0) for one that does not end within 5 octets or the data."""
    try:
        length, behind = read_varint(data, position, LENGTH_SIZE_MAX_BYTES)
    except (IndexError, ValueError):
        return 0, 0
    return behind, length


# -- topics --------------------------------------------------------------------------------------------------------------


def in_queues(data: bytes, ends: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each record that ends there stands in a queue: a half message, and one that was not due, does not. When it is committed, or
    due, the log has it again, as a copy."""
    words = np.ndarray((len(data) - 7,), "<u8", buffer=data, strides=(1,))
    queued: NDArray[np.bool_] = words[ends + QUEUE_OFFSET_AT] != NO_QUEUE_OFFSET
    return queued


def by_topic(
    data: bytes, starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """(topic, indexes of its records). The topic of a record is parsed once for all that have the same field in the same place.

    That is exact for topics of up to 36 bytes. A longer field with the same end would have to hold the shorter one's
    length octet, which is no character of a name. Longer ones are parsed one by one.
    """
    octets = np.frombuffer(data, np.uint8)
    left = np.arange(len(ends))
    found: dict[str, list[NDArray[np.int64]]] = {}
    while len(left):
        first = int(left[0])
        topic = _parse_topic(data, int(starts[first]), int(ends[first]))
        encoded = topic.encode()
        same = left == first
        if len(encoded) <= _TOPIC_SIZE_UNAMBIGUOUS_BYTES:
            pattern = np.frombuffer(bytes((TOPIC_TAG, len(encoded))) + encoded, np.uint8)
            at = ends[left] - FIXED_TRAILER_SIZE_BYTES - len(pattern)
            inside = at > starts[left]
            same = inside.copy()
            rows = octets[at[inside][:, None] + np.arange(len(pattern))]
            same[inside] = (rows == pattern).all(axis=1)
            same[0] = True
        found.setdefault(topic, []).append(left[same])
        left = left[~same]
    for topic, parts in found.items():
        yield topic, np.sort(np.concatenate(parts))


def _parse_topic(data: bytes, start: int, end: int) -> str:
    from protomq.v1.record_pb2 import Record

    content, _ = _length(data, start + 1)
    topic: str = Record.FromString(data[content:end]).topic
    return topic
