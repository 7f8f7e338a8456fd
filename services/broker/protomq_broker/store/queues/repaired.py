"""What `protomq log repair` has taken out of a log, by the log itself: whoever gets the log from elsewhere learns of it there.

A repair fills a damaged range with padding appends. The last four octets of the last one are chosen, and no other padding ends so. The
padding begins with a note of what it replaces, as far as it has room:

    "PMQREP01" | [start position, end position, ends, reason] as JSON | 00        ends: as in config/queue_ends.json

A repair of an earlier version has left no note. Its range is what holds no record before that padding, and its reason is not known.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Final, NamedTuple

from protomq.wire.log_walk import Seal, WalkedBlock
from protomq.wire.record import PADDING_TAG, SEAL_SIZE_BYTES
from protomq.wire.varints import LENGTH_SIZE_MAX_BYTES, read_varint
from protomq_broker.store.log.recovery import DamagedRange
from protomq_broker.store.log.seals import seal_before
from protomq_broker.store.log.segment import SegmentFolder

from .queue_ends import QueueEnd

FORCED_SIZE_BYTES: Final = 4
"""At the end of the last padding of a range: what makes its seal end in the CRC that is wished for."""
_MAGIC: Final = b"PMQREP01"
_UNKNOWN_REASON: Final = "`protomq log repair` has taken it out"


class RepairedRange(NamedTuple):
    """A range that was taken out. Attribute: ends: how far queues went in it, as far as the padding tells."""

    damage: DamagedRange
    ends: tuple[QueueEnd, ...] = ()


class _Note(NamedTuple):
    start_position: int
    end_position: int
    reason: str
    ends: tuple[QueueEnd, ...]


def encode_note(damage: DamagedRange, ends: Iterable[QueueEnd], room_bytes: int) -> bytes:
    """What padding says of the range that it fills, in at most `room_bytes`: the reason may be cut, the ends left out; or b""."""
    furthest: dict[tuple[str, int], QueueEnd] = {}
    for end in ends:
        known = furthest.get((end.topic, end.queue_id))
        if known is None or known.end_offset < end.end_offset:
            furthest[end.topic, end.queue_id] = end
    reason = damage.reason.encode("ascii", "replace").decode()
    kept = [furthest[key] for key in sorted(furthest)]
    full = _encode(damage, reason, kept)
    short = _encode(damage, reason[: max(len(reason) - max(len(full) - room_bytes, 0), 0)], kept)
    for note in (full, short, _encode(damage, "", [])):
        if len(note) <= room_bytes:
            return note
    return b""


def _encode(damage: DamagedRange, reason: str, ends: list[QueueEnd]) -> bytes:
    # Short: the smallest message leaves room for a hundred octets or so.
    content = [damage.start_position, damage.end_position, ends, reason]
    return _MAGIC + json.dumps(content, separators=(",", ":")).encode() + b"\x00"


def repaired_in(block: WalkedBlock, folder: SegmentFolder) -> list[RepairedRange]:
    """The ranges that were taken out and end in a block. What stands before the block is in the log already."""
    found = []
    for index, seal in enumerate(block.seals):
        if seal.record_count or not seal.size_bytes:
            continue
        content = _content(block, folder, seal)
        if any(content[-FORCED_SIZE_BYTES:]):
            found.append(_range_of(block, folder, index, _decode(content)))
    return found


def is_within(damage: DamagedRange, known: Iterable[DamagedRange]) -> bool:
    """Whether a range lies in one of others."""
    return any(
        each.start_position <= damage.start_position and damage.end_position <= each.end_position for each in known
    )


def _range_of(block: WalkedBlock, folder: SegmentFolder, index: int, note: _Note | None) -> RepairedRange:
    """The range that ends with the padding of a seal of the block."""
    last = block.seals[index]
    end, start = last.end_position, last.start_position
    while note is None:
        index -= 1
        before = block.seals[index] if index >= 0 else seal_before(folder, start)
        if before is None or before.record_count:
            break
        if before.size_bytes:
            content = _content(block, folder, before)
            if any(content[-FORCED_SIZE_BYTES:]):  # of another range
                break
            note = _decode(content)
        start = before.start_position
    if note is None:
        return RepairedRange(DamagedRange(start, end, last.crc32c, _UNKNOWN_REASON))
    # A range may end with the head of a segment, behind the padding. And its beginning may be gone by now.
    if note.end_position in (end, end + SEAL_SIZE_BYTES):
        start = max(min(note.start_position, start), folder.first_position)
    return RepairedRange(DamagedRange(start, end, last.crc32c, note.reason or _UNKNOWN_REASON), note.ends)


def _content(block: WalkedBlock, folder: SegmentFolder, seal: Seal) -> bytes:
    """What the padding of an append without records holds."""
    at = seal.start_position - block.base_position
    if at >= 0:
        data = bytes(block.data[at : at + seal.size_bytes])
    else:
        segment = folder.at(seal.start_position)
        if segment is None:
            return b""
        data = segment.read(seal.start_position - segment.base_position, seal.size_bytes)
    if not data or data[0] != PADDING_TAG:
        return b""
    _, start = read_varint(data, 1, LENGTH_SIZE_MAX_BYTES)
    return data[start:]


def _decode(content: bytes) -> _Note | None:
    if not content.startswith(_MAGIC):
        return None
    try:
        start, end, ends, reason = json.loads(content[len(_MAGIC) : content.index(b"\x00", len(_MAGIC))])
        found = tuple(QueueEnd(str(end[0]), *map(int, end[1:])) for end in ends)
        return _Note(int(start), int(end), str(reason), found)
    except (TypeError, ValueError, IndexError):
        return None
