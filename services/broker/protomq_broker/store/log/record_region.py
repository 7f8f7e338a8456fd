"""The layout of records in bulk: proof and stamping.

A producer sends whole records; the broker must not open them one by one, and must not trust them either. The proof of a request
costs a few array operations and one run of the C parser, whatever the number of records:

1. The sizes that came with the request are proved by the chain tag, length, tag, length … from byte 0 on.
2. The trailer of each record is compared with the constant parts that it must have (tags, topic).
3. What stands before the trailer must be a message by itself. Otherwise the "trailer" could be the inside of a field, and the real
   one could say something else. So the proof shortens each record, in place, to its front, and hides its trailer inside a padding
   field. Then one parse proves all fronts at once (front.py). (Lengths keep their width: protobuf takes padded varints.)

Since the fronts are parsed anyway, the proof also checks that look-ups can find the message. A tag that nobody could ask for, an
empty key, and keys, tags or sharding keys without a code do not hold. Nor do more keys than the flags say, or than the limit. Keys
behind the first one are noted for the index.

Then the last fields of each record, in protobuf the ones that win, are the broker's: stamped in place. A layout that does not hold
gives None, and the caller rewrites the records (`send_request.py`), which is slow and always right.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protomq.wire import record as layout
from protomq.wire.hashing import key_hash_of
from protomq.wire.trailer_arrays import STAMP_DTYPE

from .append import MoreKey, RecordRegion
from .front import front_of, fronts_of, is_plain, names_hold
from .kinds import MIXED
from .record_arrays import (
    BROKER_FLAGS,
    I64,
    TAGS,
    U32,
    U64,
    column,
    opaque,
    sameness_mask,
    tag_mismatch,
    topic_field_of,
    trailer_dtype,
    windows,
)
from .record_scan import hashes_of_more_keys, record_field_at, record_head

_EQUAL_MIN = 4
_FEW = 24
_FEW_STAMPS = 16
"""Up to this number they are packed one by one. An array operation costs as much as two or three of them, and five are needed."""
_WORD_RECORD_SIZE_BYTES = 1 << 21
_RECORD_SIZE_MAX_BYTES = layout.BODY_SIZE_MAX_BYTES + layout.FRONT_SIZE_MAX_BYTES + 512
_COUNTING = np.arange(layout.RECORDS_PER_REQUEST_MAX, dtype=np.uint64)
_QUEUE_ID_TAG, _STORE_TIME_TAG, _QUEUE_OFFSET_TAG, _PHYSICAL_OFFSET_TAG = layout.STAMP_TAGS
# Where `FIXED_TRAILER.unpack` has values: tags stand between them.
_TAG_CODE, _KEY_HASH, _SHARDING_HASH, _PRODUCER_ID, _PRODUCER_EPOCH, _SEQUENCE, _FLAGS = 1, 3, 5, 7, 9, 11, 17
# Bound here: each message that is sent alone asks for these.
_unpack_trailer = layout.FIXED_TRAILER.unpack_from
_pack_stamp = layout.STAMP.pack_into
_FIXED_TRAILER_SIZE_BYTES = layout.FIXED_TRAILER_SIZE_BYTES
_STAMP_SIZE_BYTES = layout.STAMP_SIZE_BYTES
_BODY_SIZE_MAX_BYTES = layout.BODY_SIZE_MAX_BYTES
_TOPIC_SIZE_MAX_BYTES = layout.TOPIC_SIZE_MAX_BYTES
_FLAG_DUE_TIME = layout.FLAG_DUE_TIME
_HEAD_MASKS = np.array([0, 0xFFFF, 0xFFFFFF, 0xFFFFFFFF], np.uint32)


def prove_region(
    payload: bytes | bytearray, topic: str, record_sizes: Sequence[int] | NDArray[np.uint32]
) -> RecordRegion | None:
    """The records at the start of `payload` as a region, or None if their layout does not hold.

    `record_sizes` are the sizes of the records without tag and length. A bytearray is taken over: it becomes the region's data, cut
    behind the records. The topic is compared, not validated. Nothing is stamped yet.
    """
    count = len(record_sizes)
    if count == 0:
        return None
    first_size = int(record_sizes[0])
    if count == 1:
        return prove_lone(payload, topic, first_size)
    topic_bytes = topic.encode()
    if not 0 < len(topic_bytes) <= layout.TOPIC_SIZE_MAX_BYTES:
        return None
    # The heads of larger records do not fit into the words that are compared; there are few of those in a request.
    fits = count >= _EQUAL_MIN and first_size < _WORD_RECORD_SIZE_BYTES
    if fits and _are_equal(record_sizes):
        region = _prove_equal(payload, topic, topic_bytes, first_size, count)
        sizes = None
    else:
        sizes = np.asarray(record_sizes, np.int64)
        if count <= _FEW or int(sizes.max()) >= _WORD_RECORD_SIZE_BYTES:
            return _prove_few(payload, topic, topic_bytes, sizes.tolist())
        region = _prove_unequal(payload, topic, topic_bytes, sizes)
    if region is None:
        sizes = np.full(count, first_size) if sizes is None else sizes
        if _only_some_have_due_times(payload, sizes):
            return _prove_few(payload, topic, topic_bytes, sizes.tolist())
    return region


def stamp_region(
    region: RecordRegion, queue_id: int, store_time_ms: int, queue_offset: int, physical_offset: int
) -> None:
    """Writes into each record what the broker answers for.

    `queue_offset` and `physical_offset` are those of the first record; the queue offset is -1 for records that enter no queue.
    """
    data = region.data
    if region.starts is None:
        _pack_stamp(
            data, len(data) - _STAMP_SIZE_BYTES, _QUEUE_ID_TAG, queue_id, _STORE_TIME_TAG, store_time_ms,
            _QUEUE_OFFSET_TAG, queue_offset if queue_offset >= 0 else layout.NO_QUEUE_OFFSET, _PHYSICAL_OFFSET_TAG, physical_offset,
        )  # fmt: skip
        return
    if region.count <= _FEW_STAMPS:
        assert region.sizes is not None
        kept, next_offset = queue_offset >= 0, queue_offset
        for start, end in zip(region.starts.tolist(), (region.starts + region.sizes).tolist(), strict=True):
            _pack_stamp(
                data, end - _STAMP_SIZE_BYTES, _QUEUE_ID_TAG, queue_id, _STORE_TIME_TAG, store_time_ms,
                _QUEUE_OFFSET_TAG, next_offset if kept else layout.NO_QUEUE_OFFSET, _PHYSICAL_OFFSET_TAG, physical_offset + start,
            )  # fmt: skip
            next_offset += 1
        return
    if region.stride:
        stride, count = region.stride, region.count
        column(data, U32, stride + layout.QUEUE_ID_AT, stride, count)[:] = queue_id
        column(data, I64, stride + layout.STORE_TIME_MS_AT, stride, count)[:] = store_time_ms
        column(data, U64, stride + layout.QUEUE_OFFSET_AT, stride, count)[:] = (
            np.arange(queue_offset, queue_offset + count)
            if queue_offset >= 0
            else layout.NO_QUEUE_OFFSET
        )
        positions = region.starts + physical_offset
        column(data, I64, stride + layout.PHYSICAL_OFFSET_AT, stride, count)[:] = positions
        return
    assert region.sizes is not None
    stamps = np.empty(region.count, STAMP_DTYPE)
    stamps["queue_id_tag"] = np.void(_QUEUE_ID_TAG)
    stamps["queue_id"] = queue_id
    stamps["store_time_tag"] = np.void(_STORE_TIME_TAG)
    stamps["store_time_ms"] = store_time_ms
    stamps["queue_offset_tag"] = np.void(_QUEUE_OFFSET_TAG)
    stamps["queue_offset"] = (
        np.arange(queue_offset, queue_offset + region.count)
        if queue_offset >= 0
        else layout.NO_QUEUE_OFFSET
    )
    stamps["physical_offset_tag"] = np.void(_PHYSICAL_OFFSET_TAG)
    stamps["physical_offset"] = region.starts + physical_offset
    ends = region.starts + region.sizes
    windows(data, opaque(layout.STAMP_SIZE_BYTES))[ends - layout.STAMP_SIZE_BYTES] = stamps.view(
        opaque(layout.STAMP_SIZE_BYTES)
    )


def set_kind(region: RecordRegion, kind: int) -> None:
    """Makes the records what the broker says: `kind` is one of the bits FLAG_KIND_... of the record format."""
    data = region.data
    if region.starts is None:
        at = len(data) + layout.FLAGS_AT
        flags = int.from_bytes(data[at : at + 4], "little") | kind
        data[at : at + 4] = flags.to_bytes(4, "little")
    elif stride := region.stride:
        flags_of_all = column(data, U32, stride + layout.FLAGS_AT, stride, region.count)
        flags_of_all |= np.uint32(kind)
    else:
        assert region.sizes is not None
        places = region.starts + region.sizes + layout.FLAGS_AT
        windows(data, U32)[places] |= np.uint32(kind)
    region.flags |= kind


def sharding_hashes_of(region: RecordRegion) -> NDArray[np.uint32]:
    """Of each record; 0 of those without a sharding key."""
    data = region.data
    if region.starts is None:
        return windows(data, U32)[[len(data) + layout.SHARDING_HASH_AT]]
    if stride := region.stride:
        return column(data, U32, stride + layout.SHARDING_HASH_AT, stride, region.count)
    assert region.sizes is not None
    return windows(data, U32)[region.starts + region.sizes + layout.SHARDING_HASH_AT]


def stamp_due_time(region: RecordRegion, due_time_ms: int) -> None:
    """Writes one due time into all records, which have room for it: their flags say so."""
    assert region.flags == layout.FLAG_DUE_TIME
    data = region.data
    if region.starts is None:
        at = len(data) + layout.DUE_TIME_MS_AT
        data[at : at + 8] = due_time_ms.to_bytes(8, "little")
        region.due_times_ms = due_time_ms
        return
    assert region.sizes is not None
    ends = region.starts + region.sizes
    windows(data, U64)[ends + layout.DUE_TIME_MS_AT] = due_time_ms
    region.due_times_ms = np.full(region.count, due_time_ms, np.uint64)


def _are_equal(numbers: Sequence[int] | NDArray[Any]) -> bool:
    if isinstance(numbers, np.ndarray):
        return numbers.tobytes() == numbers[:1].tobytes() * len(numbers)
    return all(number == numbers[0] for number in numbers)


@lru_cache(maxsize=16)
def steps(stride: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(starts, sizes) of records of one size. Shared, so nobody may write to them."""
    starts, sizes = np.arange(0, stride * count, stride), np.full(count, stride)
    starts.flags.writeable = sizes.flags.writeable = False
    return starts, sizes


def prove_lone(payload: bytes | bytearray, topic: str, size: int) -> RecordRegion | None:
    """As `prove_region`, for a single record of `size` bytes without tag and length: what most small sends have."""
    topic_bytes = topic.encode()
    if not 0 < len(topic_bytes) <= _TOPIC_SIZE_MAX_BYTES:
        return None
    proved = _prove_record(payload, 0, topic_bytes, size)
    if proved is None:
        return None
    end, values, more_keys = proved
    has_due_time = values[_FLAGS] & _FLAG_DUE_TIME
    return RecordRegion(
        topic,
        _cut(payload, end),
        1,
        None,
        None,
        values[_TAG_CODE],
        values[_KEY_HASH],
        values[_PRODUCER_ID],
        values[_PRODUCER_EPOCH],
        values[_SEQUENCE],
        0,
        _due_time_ms(payload, end) if has_due_time else None,
        more_keys,
        has_due_time,
    )


def _prove_few(
    payload: bytes | bytearray, topic: str, topic_bytes: bytes, record_sizes: Sequence[int]
) -> RecordRegion | None:
    """Record by record: for few of them that is faster than the fixed cost of the array operations."""
    starts, trailers = [0], []
    more_keys: list[MoreKey] = []
    for size in record_sizes:
        proved = _prove_record(payload, starts[-1], topic_bytes, size)
        if proved is None:
            return None
        starts.append(proved[0])
        trailers.append(proved[1])
        more_keys += proved[2]
    of_producer = slice(_PRODUCER_ID, _PRODUCER_EPOCH + 1, 2)
    producer, first_sequence = trailers[0][of_producer], trailers[0][_SEQUENCE]
    if any(
        t[of_producer] != producer or t[_SEQUENCE] != first_sequence + index
        for index, t in enumerate(trailers)
    ):
        return None
    due_times_ms = None
    flags = 0
    due_count = sum(t[_FLAGS] & layout.FLAG_DUE_TIME != 0 for t in trailers)
    if due_count:
        flags = layout.FLAG_DUE_TIME if due_count == len(trailers) else MIXED
        due_times_ms = np.array(
            [
                _due_time_ms(payload, end) if t[_FLAGS] & layout.FLAG_DUE_TIME else 0
                for t, end in zip(trailers, starts[1:], strict=True)
            ],
            np.uint64,
        )
    bounds = np.array(starts, np.int64)
    return RecordRegion(
        topic,
        _cut(payload, starts[-1]),
        len(trailers),
        bounds[:-1],
        np.diff(bounds),
        np.array([t[_TAG_CODE] for t in trailers], np.int64),
        np.array([t[_KEY_HASH] for t in trailers], np.uint64),
        producer[0],
        producer[1],
        first_sequence,
        due_times_ms=due_times_ms,
        more_keys=more_keys,
        flags=flags,
    )


class _Shape(NamedTuple):
    """What records of one size have where, if they have no due time.

    Attributes:
        head: tag and length of the record.
        bare_head: the same, then tag and length of a body that is all of the front; None if no body makes a front of this size.
        front_size_bytes: size of all that stands before the trailer.
        topic_field: what stands behind the front.
    """

    head: bytes
    bare_head: bytes | None
    front_size_bytes: int
    topic_field: bytes


@lru_cache(maxsize=4096)
def _shape_of(size: int, topic_bytes: bytes) -> _Shape | None:
    """The shape of a record of this size; None if no record has this size."""
    front_size = size - _FIXED_TRAILER_SIZE_BYTES - 2 - len(topic_bytes)
    if front_size < 2 or size > _RECORD_SIZE_MAX_BYTES:
        return None
    head = record_head(size)
    bare_head = None
    size_of_length = len(layout.encode_varint(front_size))
    for guess in (size_of_length, size_of_length - 1):
        body_size = front_size - 1 - guess
        if 0 <= body_size <= _BODY_SIZE_MAX_BYTES:
            length = layout.encode_varint(body_size)
            if len(length) == guess:
                bare_head = head + bytes((layout.BODY_TAG,)) + length
    return _Shape(head, bare_head, front_size, topic_field_of(topic_bytes))


def _prove_record(
    payload: bytes | bytearray, start: int, topic_bytes: bytes, size: int
) -> tuple[int, tuple[int, ...], Sequence[MoreKey]] | None:
    """The scalar form of the proof for the record field at `start`. (Its end, the values of the fixed trailer, the keys behind the first
    one); None if it fails.
    """
    shape = _shape_of(size, topic_bytes)
    if shape is None:
        return None
    head, bare_head, front_size, topic_field = shape
    content = start + len(head)
    end = content + size
    if end > len(payload):
        return None
    values = _unpack_trailer(payload, end - _FIXED_TRAILER_SIZE_BYTES)
    flags = values[_FLAGS]
    if values[::2] != TAGS or flags & BROKER_FLAGS:
        return None
    front_end = content + front_size
    if flags & _FLAG_DUE_TIME:
        front_size -= layout.DUE_TIME_SIZE_BYTES
        front_end = content + front_size
        if front_size < 2 or payload[end + layout.DUE_TIME_MS_AT - 1] != layout.DUE_TIME_TAG:
            return None
    elif bare_head is not None and payload.startswith(bare_head, start):
        return (end, values, ()) if payload.startswith(topic_field, front_end) else None
    if not payload.startswith(head, start) or not payload.startswith(topic_field, front_end):
        return None
    # Field 1 of a record, as a record is of a batch.
    body_size, body_head = record_field_at(payload, content, front_end)
    rest = front_size - body_head - body_size
    if not rest and 0 <= body_size <= _BODY_SIZE_MAX_BYTES:
        return end, values, ()
    if not 0 <= body_size <= _BODY_SIZE_MAX_BYTES or rest > layout.FRONT_SIZE_MAX_BYTES:
        return None
    octets = payload[front_end - rest : front_end]
    if is_plain(octets, values[_KEY_HASH] != 0, values[_TAG_CODE] != 0):
        return end, values, ()
    front = front_of(octets)
    if front is None:
        return None
    more_keys: Sequence[MoreKey] = ()
    if flags & layout.FLAG_MANY_KEYS:
        if len(front.keys) > layout.KEYS_MAX:
            return None
        more_keys = [(start, key_hash_of(key)) for key in front.keys[1:]]
    key_count = (values[_KEY_HASH] != 0) + _count(more_keys)
    if not names_hold(front, key_count, values[_TAG_CODE] != 0, values[_SHARDING_HASH] != 0):
        return None
    return end, values, more_keys


def _count(more_keys: Sequence[MoreKey]) -> int:
    """Of those that can be looked for."""
    return sum(key_hash != 0 for _, key_hash in more_keys)


def _more_keys(
    data: bytearray,
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    front: Any | None,
    tag_codes: NDArray[np.int64],
    key_hashes: NDArray[np.uint64],
    sharding_hashes: NDArray[np.uint32],
    flags: NDArray[np.uint32],
) -> Sequence[MoreKey] | None:
    """The keys behind the first one of each record, whose fronts are one message; None if that is none, or its names do not hold."""
    if front is None:
        return None
    key_count = int(np.count_nonzero(key_hashes))
    found: list[MoreKey] = []
    if len(front.keys) > key_count:  # records are opened only if there is more than one key in some
        for row in np.flatnonzero(flags & layout.FLAG_MANY_KEYS).tolist():
            start, size = int(starts[row]), int(sizes[row])
            _, head = record_field_at(data, start, start + size)
            hashes = hashes_of_more_keys(bytes(data[start + head : start + size]))
            if len(hashes) >= layout.KEYS_MAX:
                return None
            found += [(start, key_hash) for key_hash in hashes]
        key_count += _count(found)
    tag_count, sharding_count = int(np.count_nonzero(tag_codes)), int(np.count_nonzero(sharding_hashes))
    return found if names_hold(front, key_count, tag_count, sharding_count) else None


def _due_time_ms(payload: bytes | bytearray, end: int) -> int:
    at = end + layout.DUE_TIME_MS_AT
    return int.from_bytes(payload[at : at + 8], "little")


def _only_some_have_due_times(payload: bytes | bytearray, record_sizes: NDArray[np.int64]) -> bool:
    """Then trailers do not all have one size, and the records are proved one by one. For sizes that are not proved."""
    if int(record_sizes.min()) < layout.FIXED_TRAILER_SIZE_BYTES:
        return False
    widths = 1 + (record_sizes >= 1 << 7) + (record_sizes >= 1 << 14)
    ends = np.cumsum(record_sizes + widths + 1)
    if int(ends[-1]) > len(payload):
        return False
    has_due_time = windows(payload, U32)[ends + layout.FLAGS_AT] & layout.FLAG_DUE_TIME != 0
    return bool(has_due_time.any() and not has_due_time.all())


def _cut(payload: bytes | bytearray, end: int) -> bytearray:
    """The first `end` bytes, to be written into: a bytearray is taken over."""
    if type(payload) is bytearray:
        del payload[end:]
        return payload
    return bytearray(memoryview(payload)[:end])


def _prove_equal(
    payload: bytes | bytearray, topic: str, topic_bytes: bytes, size: int, count: int
) -> RecordRegion | None:
    """For records of one size, the usual case: the first one is proved by itself, all others are compared with it."""
    proved = _prove_record(payload, 0, topic_bytes, size)
    if proved is None or proved[0] * count > len(payload):
        return None
    stride, first, _ = proved
    data = _cut(payload, stride * count)
    head = stride - size
    body_size, body_head = record_field_at(data, head, stride)
    heads = column(data, opaque(head + body_head), 0, stride, count).tobytes()
    has_due_time = bool(first[_FLAGS] & layout.FLAG_DUE_TIME)
    mask = sameness_mask(topic_bytes, has_due_time)
    if heads != heads[: head + body_head] * count or 8 * len(mask) > stride:
        # Bodies of different sizes, or records so small that the words of the mask do not fit.
        return _prove_unequal(data, topic, topic_bytes, np.full(count, size))
    trailers = np.ndarray((count, len(mask)), U64, data, stride - 8 * len(mask), (stride, 8))
    different = trailers ^ trailers[0]
    different &= mask
    if np.count_nonzero(different):
        return None
    first_sequence = first[_SEQUENCE]
    sequences = column(data, U64, stride + layout.SEQUENCE_AT, stride, count)
    if sequences.tobytes() != (_COUNTING[:count] + np.uint64(first_sequence)).tobytes():
        return None
    trailer_size = layout.trailer_size_bytes(topic_bytes, has_due_time=has_due_time)
    starts, sizes = steps(stride, count)
    tag_codes = column(data, I64, stride + layout.TAG_CODE_AT, stride, count).copy()
    key_hashes = column(data, U64, stride + layout.KEY_HASH_AT, stride, count).copy()
    more_keys: Sequence[MoreKey] = ()
    rest_size = size - trailer_size - body_head - body_size
    if rest_size:
        rests = column(data, opaque(rest_size), stride - trailer_size - rest_size, stride, count)
        flags = column(data, U32, stride + layout.FLAGS_AT, stride, count)
        sharding_hashes = column(data, U32, stride + layout.SHARDING_HASH_AT, stride, count)
        # Messages of one tag are alike, and half messages, which have their group there. Then the first one proves all of them.
        are_alike = all(map(_are_equal, (rests, flags, tag_codes, key_hashes, sharding_hashes)))
        if not are_alike or first[_FLAGS] & layout.FLAG_MANY_KEYS:
            front = _equal_fronts(data, stride, count, size, trailer_size)
            found = _more_keys(data, starts, sizes, front, tag_codes, key_hashes, sharding_hashes, flags)
            if found is None:
                return None
            more_keys = found
    return RecordRegion(
        topic,
        data,
        count,
        starts,
        sizes,
        tag_codes,
        key_hashes,
        first[_PRODUCER_ID],
        first[_PRODUCER_EPOCH],
        first_sequence,
        stride,
        column(data, U64, stride + layout.DUE_TIME_MS_AT, stride, count).copy()
        if has_due_time
        else None,
        more_keys,
        has_due_time * layout.FLAG_DUE_TIME,
    )


def _equal_fronts(
    data: bytearray, stride: int, count: int, size: int, trailer_size: int
) -> Any | None:
    """Step 3 of the module's docstring: the fronts as one message, None if they do not hold. Leaves the data as they were.

    Records that are bodies and trailers only need it not: their fronts are the bodies, whose heads were compared.
    """
    width = stride - size - 1
    front = np.frombuffer(_wide_varint(size - trailer_size, width), np.uint8)
    padding = np.frombuffer(
        bytes((layout.PADDING_TAG,)) + _wide_varint(trailer_size - 3, 2), np.uint8
    )
    octets = np.frombuffer(data, np.uint8).reshape(count, stride)
    lengths = octets[:, 1 : 1 + width]
    trailer_heads = octets[:, stride - trailer_size : stride - trailer_size + 3]
    kept = lengths[0].copy(), trailer_heads[0].copy()
    lengths[:], trailer_heads[:] = front, padding
    try:
        return fronts_of(data, count)
    finally:
        lengths[:], trailer_heads[:] = kept


def _wide_varint(value: int, width: int) -> bytes:
    """A number as a varint of exactly `width` octets."""
    octets = bytearray(value >> 7 * index & 0x7F | 0x80 for index in range(width))
    octets[-1] &= 0x7F
    return bytes(octets)


def _prove_unequal(
    payload: bytes | bytearray, topic: str, topic_bytes: bytes, record_sizes: NDArray[np.int64]
) -> RecordRegion | None:
    if int(record_sizes.max()) >= _WORD_RECORD_SIZE_BYTES:
        return None
    widths = 1 + (record_sizes >= 1 << 7) + (record_sizes >= 1 << 14)
    sizes = record_sizes + widths + 1
    ends = np.cumsum(sizes)
    if int(ends[-1]) > len(payload):
        return None
    data = _cut(payload, int(ends[-1]))
    words = windows(data, U32)
    # What holds for the first must hold for all.
    has_due_time = bool(int(words[ends[0] + layout.FLAGS_AT]) & layout.FLAG_DUE_TIME)
    trailer_size = layout.trailer_size_bytes(topic_bytes, has_due_time=has_due_time)
    if int(record_sizes.min()) < trailer_size + 2:
        return None
    starts, trailer_starts = ends - sizes, ends - trailer_size
    heads, head_masks = words[starts], _HEAD_MASKS[widths]
    if ((heads ^ _head_words(record_sizes, widths)) & head_masks).any():
        return None
    front_sizes = record_sizes - trailer_size
    if not _bodies_are_bounded(
        windows(data, U64)[starts + widths + 1].astype(np.int64), front_sizes
    ):
        return None
    # Gathered as opaque items: numpy copies a structure field by field, which takes ten times as long.
    items = windows(data, opaque(trailer_size))[trailer_starts]
    if tag_mismatch(items, topic_bytes, has_due_time) is not None:
        return None
    trailers = items.view(trailer_dtype(len(topic_bytes), has_due_time))
    flags = trailers["flags"]
    if ((flags ^ flags[0]) & layout.FLAG_DUE_TIME | flags & BROKER_FLAGS).any():
        return None
    if (np.diff(trailers["sequence"]) != 1).any():
        return None
    if any(
        (trailers[name] != trailers[name][0]).any() for name in ("producer_id", "producer_epoch")
    ):
        return None
    trailer_heads = words[trailer_starts]
    words[starts] = heads & ~head_masks | _head_words(front_sizes, widths) & head_masks
    words[trailer_starts] = trailer_heads & np.uint32(0xFF000000) | _padding_head(trailer_size - 3)
    try:
        front = fronts_of(data, len(record_sizes))
    finally:
        words[starts] = heads
        words[trailer_starts] = trailer_heads
    tag_codes = trailers["tag_code"].astype(np.int64)
    key_hashes = trailers["key_hash"].astype(np.uint64)
    more_keys = _more_keys(
        data, starts, sizes, front, tag_codes, key_hashes, trailers["sharding_hash"], flags
    )
    if more_keys is None:
        return None
    return RecordRegion(
        topic,
        data,
        len(record_sizes),
        starts,
        sizes,
        tag_codes,
        key_hashes,
        int(trailers["producer_id"][0]),
        int(trailers["producer_epoch"][0]),
        int(trailers["sequence"][0]),
        due_times_ms=trailers["due_time_ms"].astype(np.uint64) if has_due_time else None,
        more_keys=more_keys,
        flags=has_due_time * layout.FLAG_DUE_TIME,
    )


def _head_words(sizes: NDArray[np.int64], widths: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Tag and length of record fields as little-endian words. Lengths have 1 to 3 octets, more than they need where `widths` say
    so. Octets behind the length are zero.
    """
    more = (widths > 1) * 0x8000 | (widths > 2) * 0x800000
    words = (
        layout.RECORD_TAG | (sizes & 0x7F) << 8 | (sizes & 0x3F80) << 9 | (sizes & 0x1FC000) << 10
    )
    return (words | more).astype(np.uint32)


def _padding_head(size: int) -> np.uint32:
    """Tag and length, in 3 octets, of a padding field of up to 16,383 bytes."""
    return np.uint32(layout.PADDING_TAG | (size & 0x7F | 0x80) << 8 | size >> 7 << 16)


def _bodies_are_bounded(words: NDArray[np.int64], front_sizes: NDArray[np.int64]) -> bool:
    """Whether each record begins with its body, within the limits: before the parser runs, so that nothing can blow up in it.

    `words` are the first 8 octets of each record.
    """
    second = words >> 15 & 1
    third = second & words >> 23
    body_sizes = words >> 8 & 0x7F
    body_sizes += second * (words >> 9 & 0x3F80)
    body_sizes += third * (words >> 10 & 0x1FC000)
    rest = front_sizes - body_sizes - second - third - 2
    # A fourth octet means a body of 2 MiB and more: rare enough to be rewritten.
    wrong = ((words & 0xFF) != layout.BODY_TAG) | ((third & words >> 31) != 0)
    wrong |= (rest < 0) | (rest > layout.FRONT_SIZE_MAX_BYTES)
    return not np.count_nonzero(wrong)
