"""From rows to the bytes of a SendRequest, all rows at a time. Pure.

    0A len record   ...   0A len record        one join by Arrow: head, body, front, trailer of each
    22 len topic    28 queue_id    32 len sizes (u32 each)    [38 00]

The bytes are those that the SDK's `RecordEncoder` writes row by row: a property test says so. Here it is 0.35 us a row of
1 KiB instead of 1.5: bodies are copied once, and trailers are columns of one array. The CRC of a record covers what Arrow
joins, so it is put into its place afterwards.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from protomq.records import RecordEncoder
from protomq.wire.record import (
    BODY_TAG,
    CRC32C_AT,
    FIXED_TRAILER,
    FIXED_TRAILER_SIZE_BYTES,
    FIXED_TRAILER_TAGS,
    RECORD_TAG,
    TOPIC_TAG,
    encode_varint,
)
from protomq.wire.trailer_arrays import FIXED_TRAILER_DTYPE

from .checksums import crc32c_of_pieces
from .rows import Rows, bounds_of, sizes_of

_RECORD_TAG, _BODY_TAG = bytes((RECORD_TAG,)), bytes((BODY_TAG,))
_EPOCH: Final = 0
"""Always: a higher one would make the broker forget what the attempts before have stored."""


class EncodedRows(NamedTuple):
    """A SendRequest, and what it says about each row."""

    payload: tuple[memoryview, bytes]
    """Two pieces, which are the request together."""
    trailers: NDArray[Any]
    """`FIXED_TRAILER_DTYPE` of each row, stamped fields zero."""


class TopicEncoder:
    """Writes requests of one producer for one topic. One thread."""

    def __init__(self, topic: str, producer_id: int) -> None:
        self._tails = RecordEncoder(topic, producer_id, _EPOCH)
        encoded = topic.encode()
        values = (0, 0, 0, producer_id, _EPOCH, 0, 0, 0, 0, 0, 0, 0, 0)
        fields = [part for pair in zip(FIXED_TRAILER_TAGS, values, strict=True) for part in pair]
        self._trailer = np.frombuffer(
            bytes((TOPIC_TAG, len(encoded))) + encoded + FIXED_TRAILER.pack(*fields), np.uint8
        )

    def encode(
        self, rows: Rows, first_sequence: int, born_time_ms: int, queue_id: int, wait_store_ok: bool
    ) -> EncodedRows:
        """A request with these rows, numbered from `first_sequence`."""
        count = rows.row_count
        bounds = bounds_of(rows.bodies)
        room = np.empty((count, len(self._trailer)), np.uint8)
        room[:] = self._trailer
        trailers: NDArray[Any] = np.ndarray(
            (count,),
            FIXED_TRAILER_DTYPE,
            room,
            len(self._trailer) - FIXED_TRAILER_SIZE_BYTES,
            room.strides[:1],
        )
        trailers["tag_code"] = rows.tag_codes
        trailers["key_hash"] = rows.key_hashes
        trailers["sharding_hash"] = rows.sharding_hashes
        trailers["sequence"] = np.arange(count, dtype=np.uint64) + np.uint64(first_sequence)
        trailers["born_time_ms"] = born_time_ms
        trailers["flags"] = rows.flags
        rest = sizes_of(rows.fronts) + np.int64(len(self._trailer))
        heads, record_sizes = _heads(np.diff(bounds), rest)
        middle = [rows.bodies] if rows.fronts is None else [rows.bodies, rows.fronts]
        records = pc.binary_join_element_wise(heads, *middle, _rows_as_binary(room), b"")
        ends = bounds_of(records)
        written = np.frombuffer(records.buffers()[2], np.uint8)  # Arrow made it just now, for us alone.
        crcs = crc32c_of_pieces(
            memoryview(written.data), ends[1:] - record_sizes, ends[1:] - len(self._trailer)
        )
        trailers["crc32c"] = crcs
        windows: NDArray[Any] = np.ndarray((len(written) - 3,), np.dtype("<u4"), written, 0, (1,))
        windows[ends[1:] + CRC32C_AT] = crcs
        end = int(ends[-1])
        tail = self._tails.encode_tail(record_sizes.tolist(), queue_id, wait_store_ok)
        return EncodedRows((memoryview(records.buffers()[2])[:end], tail), trailers)


def _heads(
    body_sizes: NDArray[np.int64], rest_sizes: NDArray[np.int64] | np.int64
) -> tuple[pa.BinaryArray | pa.BinaryScalar, NDArray[np.int64]]:
    """Tag and length of each record, tag and length of its body; and the sizes of the records."""
    record_sizes = 1 + _varint_sizes(body_sizes) + body_sizes + rest_sizes
    pairs = record_sizes << 32 | body_sizes
    if (pairs == pairs[0]).all():  # Sorting a window to find that out would cost a tenth of it.
        return pa.scalar(_head(int(pairs[0])), pa.binary()), record_sizes
    distinct, indices = np.unique(pairs, return_inverse=True)
    heads = pa.array([_head(pair) for pair in distinct.tolist()], pa.binary())
    return heads.take(pa.array(indices)), record_sizes


def _head(pair: int) -> bytes:
    record_size, body_size = pair >> 32, pair & 0xFFFFFFFF
    return b"".join((_RECORD_TAG, encode_varint(record_size), _BODY_TAG, encode_varint(body_size)))


def _varint_sizes(values: NDArray[np.int64]) -> NDArray[np.int64]:
    limits = 1 << 7 * np.arange(1, 5, dtype=np.int64)
    return np.searchsorted(limits, values, "right") + 1


def _rows_as_binary(room: NDArray[np.uint8]) -> pa.BinaryArray:
    count, size = room.shape
    bounds = np.arange(0, count * size + 1, size, dtype=np.int32)
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(room)]
    return pa.Array.from_buffers(pa.binary(), count, buffers)
