"""Walking commit-log segments without a broker. Pure: bytes in, records and damaged ranges out.

    segment   head append   append   ...   padding append, or zeros
    append    0A len record   0A len record   ...   12 33 seal

An append holds if the chain of tags and lengths leads from its first octet to a seal whose position, size and count are true
and whose CRC-32C, which covers the seal before it as well, is right. Boundaries are found by walking. Behind damage, where
there is nothing to walk from, the next seal is searched for that holds by all of these: what lies between is the damaged range.

This is the reader's side of services/broker/protomq_broker/store/FORMAT.md; no server is imported.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protomq.wire.hashing import crc32c, extend_crc32c
from protomq.wire.record import (
    FIXED_TRAILER_SIZE_BYTES,
    NO_QUEUE_OFFSET,
    PADDING_TAG,
    QUEUE_OFFSET_AT,
    RECORD_TAG,
    SEAL,
    SEAL_COVERED_BYTES,
    SEAL_FIELD_TAGS,
    SEAL_SIZE_BYTES,
    SEAL_TAG,
    TOPIC_TAG,
)
from protomq.wire.varints import LENGTH_SIZE_MAX_BYTES, read_varint

APPEND_SIZE_MAX_BYTES: Final = (64 << 20) + 2 * SEAL_SIZE_BYTES
_TOPIC_SIZE_UNAMBIGUOUS_BYTES: Final = 36
_SEAL_HEAD: Final = bytes((SEAL_TAG, SEAL_SIZE_BYTES - 2, SEAL_FIELD_TAGS[0]))
_U64: Final = struct.Struct("<Q").unpack_from


class Damage(NamedTuple):
    """A range of the log that does not hold."""

    start_position: int
    end_position: int
    reason: str
    tail: bool
    """Nothing that holds stands behind it in its segment: a torn tail, or an append that is being written."""


class Seal(NamedTuple):
    """What a seal says."""

    start_position: int
    size_bytes: int
    record_count: int
    crc: int


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
    window = Window(crc=crc)
    position, size = 0, len(data)
    starts: list[int] = []
    ends: list[int] = []
    while position < size:
        tag = data[position]
        if tag in (RECORD_TAG, PADDING_TAG):
            content, length = _length(data, position + 1)
            end = content + length
            if content == 0 or end - window.walked_bytes > APPEND_SIZE_MAX_BYTES:
                if content == 0 and size - position < 6 and not whole:
                    return window
                window.reason = "a length that cannot be"
                return window
            if end > size:
                window.reason = "a record that ends outside of its segment" if whole else ""
                return window
            if tag == RECORD_TAG:
                starts.append(position)
                ends.append(end)
            position = end
        elif tag == SEAL_TAG:
            if position + SEAL_SIZE_BYTES > size:
                window.reason = "a seal that ends outside of its segment" if whole else ""
                return window
            seal = read_seal(data, position)
            window.reason = _why_not(data, base_position, window, position, len(starts), seal)
            if seal is None or window.reason:
                return window
            window.starts += starts
            window.ends += ends
            starts, ends = [], []
            position += SEAL_SIZE_BYTES
            window.walked_bytes, window.crc = position, seal.crc
            window.appends.append((position, seal.crc))
        elif tag == 0 and position == window.walked_bytes:
            window.finished = True
            return window
        else:
            window.reason = f"tag {tag:#04x} where a record or a seal must stand"
            return window
    if whole and position > window.walked_bytes:
        window.reason = "an append without its seal"
    return window


def read_seal(data: bytes, position: int) -> Seal | None:
    """The seal field at `position`; None if none stands there."""
    values = SEAL.unpack_from(data, position)
    if values[0] != SEAL_TAG or values[1] != SEAL_SIZE_BYTES - 2:
        return None
    if values[2::2] != SEAL_FIELD_TAGS:
        return None
    return Seal(values[5], values[7], values[9], values[15])


def find_append(data: bytes, base_position: int, start: int) -> int | None:
    """Where, from `start` on, the next append begins that holds by itself; None if there is none in `data`."""
    at = data.find(_SEAL_HEAD, start)
    while at >= 0:
        if at + SEAL_SIZE_BYTES <= len(data):
            seal = read_seal(data, at)
            if seal is not None and seal.start_position + seal.size_bytes == base_position + at:
                begins = seal.start_position - base_position
                before = begins - SEAL_SIZE_BYTES
                if begins >= start and before >= 0 and _holds(data, base_position, begins, at):
                    return begins
        at = data.find(_SEAL_HEAD, at + 1)
    return None


def _holds(data: bytes, base_position: int, begins: int, seal_at: int) -> bool:
    """Whether the append holds, chained to what stands where the seal before it must be."""
    before = read_seal(data, begins - SEAL_SIZE_BYTES)
    stretch = data[begins : seal_at + SEAL_SIZE_BYTES]
    window = walk(stretch, base_position + begins, before.crc if before else None, whole=True)
    return before is not None and window.walked_bytes == len(stretch) and len(window.appends) == 1


def _why_not(
    data: bytes, base_position: int, window: Window, at: int, count: int, seal: Seal | None
) -> str:
    """Why a seal does not close the append in front of it; "" if it does."""
    if seal is None:
        return "a seal that is none"
    start = window.walked_bytes
    if (seal.start_position, seal.size_bytes) != (base_position + start, at - start):
        return "a seal of another place"
    if seal.record_count != count:
        return f"a seal for {seal.record_count} records behind {count}"
    if window.crc is None:
        return "" if seal.size_bytes == 0 else "no seal before it to be chained to"
    crc = crc32c(window.crc.to_bytes(4, "little"))
    crc = extend_crc32c(crc, data[start:at])
    crc = extend_crc32c(crc, data[at : at + SEAL_COVERED_BYTES])
    return "" if crc == seal.crc else "a CRC that does not hold"


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

    That is exact for topics of up to 36 bytes: a longer field that ends alike would have to hold the shorter one's length
    octet, which is no character of a name. Longer ones are parsed one by one.
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
