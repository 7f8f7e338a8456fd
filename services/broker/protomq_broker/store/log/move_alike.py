"""`move.move_records` for records that are alike, as the messages of one sender often are. Pure.

    alike   one size, one topic, the same fields of the same lengths, the same flags. Their octets may differ

One record is moved by itself (`move_one.py`). The others are that copy again, with their own octets written over it. So a batch costs some
twenty array operations.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from protomq.v1.record_pb2 import Transit
from protomq.wire import record as layout
from protomq.wire.trailer_arrays import FIXED_TRAILER_DTYPE
from protomq.wire.varints import LENGTH_SIZE_MAX_BYTES, read_varint

from .append import RecordRegion
from .move_one import move_one
from .record_arrays import U64, column, opaque, windows
from .record_region import steps
from .transit import ORIGIN, ORIGIN_TAGS, origins_of, transit_tail

ALIKE_MIN = 3
"""Fewer are moved faster as any others are."""
_TRAILER_SIZE_BYTES = layout.FIXED_TRAILER_SIZE_BYTES
_OF_EACH = (ORIGIN_TAGS["queue_offset_tag"], ORIGIN_TAGS["store_time_tag"])
"""Tags of what differs in the `transit` of messages that moved together; in the order of fields."""


def rows_of(data: bytes, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.uint8] | None:
    """The octets of records of one size, a row for each; None if their sizes differ."""
    size = int(sizes[0])
    if sizes.tobytes() != sizes[:1].tobytes() * len(sizes):
        return None
    return windows(data, opaque(size))[starts].view(np.uint8).reshape(len(starts), size)


def move_alike(
    rows: NDArray[np.uint8],
    topic: str,
    kind: int,
    *,
    due_times_ms: NDArray[np.uint64] | None,
    attempts: int,
    last_error: str | None,
    replayed_group: str,
    marks: int,
) -> RecordRegion | None:
    """The copies; None if the records are not alike. See `move_records` for the rest."""
    count, size = rows.shape
    first = rows[0].tobytes()
    fields = _fields_of(first)
    if fields is None:
        return None
    heads, front_end, topic_start = fields
    kept = rows[:, _compared(size, heads, topic_start)]
    if kept.tobytes() != kept[0].tobytes() * count:
        return None
    is_opened = bool(attempts) or last_error is not None or bool(replayed_group)
    is_moved = topic_start > front_end
    if is_moved and is_opened and not _transits_are_alike(rows, first, front_end, topic_start):
        return None
    model = move_one(
        first,
        topic,
        kind,
        due_time_ms=None if due_times_ms is None else int(due_times_ms[0]),
        attempts=attempts,
        last_error=last_error,
        replayed_group=replayed_group,
        marks=marks,
    )
    stride = len(model.data)
    data = model.data * count
    copies = np.frombuffer(data, np.uint8).reshape(count, stride)
    _, at = read_varint(model.data, 1, LENGTH_SIZE_MAX_BYTES)
    front_start = heads[0][1]
    if is_moved and is_opened:
        new_front_end = at + front_end - front_start
        copies[:, at:new_front_end] = rows[:, front_start:front_end]
        old, new = origin_places(first, front_end), origin_places(model.data, new_front_end)
        for old_place, new_place in zip(old, new, strict=True):
            copies[:, new_place] = rows[:, old_place]
    else:
        copies[:, at : at + topic_start - front_start] = rows[:, front_start:topic_start]
    copies[:, -_TRAILER_SIZE_BYTES : layout.FLAGS_AT] = rows[:, -_TRAILER_SIZE_BYTES : layout.FLAGS_AT]
    copies[:, layout.FLAGS_AT + 4 :] = rows[:, layout.FLAGS_AT + 4 :]
    trailers = column(data, FIXED_TRAILER_DTYPE, stride - _TRAILER_SIZE_BYTES, stride, count)
    if not is_moved:
        tail = transit_tail(attempts, last_error, replayed_group) if is_opened else b""
        topic_size = layout.trailer_size_bytes(topic.encode(), has_due_time=due_times_ms is not None)
        at = stride - topic_size - len(tail) - ORIGIN.itemsize
        copies[:, at : at + ORIGIN.itemsize] = origins_of(trailers).view(np.uint8).reshape(count, ORIGIN.itemsize)
    if due_times_ms is not None:
        column(data, U64, stride + layout.DUE_TIME_MS_AT, stride, count)[:] = due_times_ms
    identities = np.empty((count, 3), np.uint64)
    for place, name in enumerate(("producer_id", "producer_epoch", "sequence")):
        identities[:, place] = trailers[name]
    starts, sizes = steps(stride, count)
    return RecordRegion(
        topic,
        data,
        count,
        starts,
        sizes,
        trailers["tag_code"].copy(),
        trailers["key_hash"].copy(),
        producer_id=0,
        producer_epoch=0,
        first_sequence=0,
        stride=stride,
        due_times_ms=due_times_ms,
        flags=model.flags,
        identities=identities,
    )


def attempt_of_all(rows: NDArray[np.uint8]) -> int | None:
    """How often the messages were handed out before, which were moved before; None if each has to be asked. See `move_records`."""
    first = rows[0].tobytes()
    fields = _fields_of(first)
    if fields is None or fields[2] == fields[1]:
        return None
    heads, front_end, topic_start = fields
    kept = rows[:, _compared(rows.shape[1], heads, topic_start)]
    is_same = kept.tobytes() == kept[0].tobytes() * len(rows)
    if not is_same or not _transits_are_alike(rows, first, front_end, topic_start):
        return None
    _, at = read_varint(first, front_end + 1, LENGTH_SIZE_MAX_BYTES)
    return Transit.FromString(first[at:topic_start]).attempt


def _transits_are_alike(rows: NDArray[np.uint8], first: bytes, start: int, end: int) -> bool:
    """Whether records have the same `transit`, but for offsets and times of their origins, which none of them leaves out."""
    places = origin_places(first, start)
    if len(places) < len(_OF_EACH):
        return False
    at = start
    for place in places:
        numbers = np.ascontiguousarray(rows[:, place]).view(U64)
        others = rows[:, at : place.start]
        if not numbers.all() or others.tobytes() != others[0].tobytes() * len(rows):
            return False
        at = place.stop
    others = rows[:, at:end]
    return others.tobytes() == others[0].tobytes() * len(rows)


def origin_places(record: bytes | bytearray, at: int) -> list[slice]:
    """Where the offset and the time of the origin stand in the field `transit` that begins at `at`, as far as it has them."""
    size, at = read_varint(record, at + 1, LENGTH_SIZE_MAX_BYTES)
    end = at + size
    found = []
    while at < end:
        tag, at = read_varint(record, at)
        wire_type = tag & 7
        if wire_type == 0:
            _, behind = read_varint(record, at)
        elif wire_type == 2:
            size, behind = read_varint(record, at)
            behind += size
        else:
            behind = at + (4 if wire_type == 5 else 8)
        if tag in _OF_EACH:
            found.append(slice(at, behind))
        at = behind
    return found


_Heads = tuple[tuple[int, int], ...]


def _fields_of(record: bytes) -> tuple[_Heads, int, int] | None:
    """(Where tags and lengths stand, where the front ends, where the topic begins); None where a look at each record is needed.

    Raises ValueError for what is no record of a log.
    """
    try:
        size, at = read_varint(record, 1, LENGTH_SIZE_MAX_BYTES)
        if record[0] != layout.RECORD_TAG or at + size != len(record):
            raise ValueError("no record field")
        flags = int.from_bytes(record[layout.FLAGS_AT : layout.FLAGS_AT + 4], "little")
        if flags & layout.FLAG_MANY_KEYS:
            return None
        heads = [(0, at)]
        while record[at] in layout.FRONT_TAGS:
            size, end = read_varint(record, at + 1, LENGTH_SIZE_MAX_BYTES)
            heads.append((at, end))
            at = end + size
        front_end = at
        if flags & layout.FLAG_TRANSIT:
            size, end = read_varint(record, at + 1, LENGTH_SIZE_MAX_BYTES)
            heads.append((at, end))
            at = end + size
        heads.append((at, at + 2 + record[at + 1]))
    except IndexError:
        raise ValueError("a record that is cut short") from None
    return tuple(heads), front_end, at


@lru_cache(maxsize=256)
def _compared(size: int, heads: _Heads, topic_start: int) -> NDArray[np.intp]:
    """The columns that records have to share: tags, lengths, the topic, the trailer's tags, the flags."""
    shared = [at for start, end in heads for at in range(start, end)]
    fixed = np.ones(_TRAILER_SIZE_BYTES, np.bool_)
    for name in FIXED_TRAILER_DTYPE.names or ():
        if not name.endswith("_tag") and name != "flags":
            field_type, start = FIXED_TRAILER_DTYPE.fields[name][:2]  # type: ignore[index]
            fixed[start : start + field_type.itemsize] = False
    shared += (np.flatnonzero(fixed) + size - _TRAILER_SIZE_BYTES).tolist()
    return np.array([at for at in shared if at < size], np.intp)
