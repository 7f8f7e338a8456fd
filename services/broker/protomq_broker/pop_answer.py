"""Encodes the answer to a pop: its header, with receipts. The records behind it are regions of the log. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protomq.v1.pop_service_pb2 import PopResponse, PopStatus
from protomq.wire.record import encode_varint

from .pop_orders import PopAnswer
from .pop_receipts import Receipt, encode_receipt

_FOUND: Final = PopStatus.POP_STATUS_FOUND
"""Kept, since protobuf looks an enum's value up in 2 microseconds."""


def encode_pop_answer(answer: PopAnswer, broker_name: str, epoch: int) -> tuple[bytes, int]:
    """Encodes the fields of a PopResponse that stand before the regions. Returns them and the total size of the regions in bytes."""
    request, topic = answer.order.request, answer.topic
    size_bytes = sum([part.result.regions_size_bytes for part in answer.parts])
    response = PopResponse(
        status=_FOUND,
        topic_incarnation=topic.incarnation,
        invisible_ms=request.invisible_ms,
        regions_size_bytes=size_bytes,
    )
    last: Any = None
    place: tuple[int, int] | None = None
    starts, shift = [], 0
    for part in answer.parts:
        if place == (part.queue_id, part.number):
            last.record_count += len(part.offsets)
        else:
            place = part.queue_id, part.number
            receipt = encode_receipt(
                Receipt(
                    broker_name, request.consumer_group, request.topic, topic.incarnation,
                    part.queue_id, part.number, answer.time_ms, request.invisible_ms, part.attempt,
                    epoch,
                )
            )  # fmt: skip
            last = response.hand_outs.add(
                queue_id=part.queue_id,
                record_count=len(part.offsets),
                attempt=part.attempt,
                receipt=receipt,
            )
        starts.append(part.result.starts + np.uint32(shift) if shift else part.result.starts)
        shift += part.result.regions_size_bytes
    count = sum([len(part.offsets) for part in answer.parts])
    of_4_bytes, of_8_bytes = encode_varint(4 * count), encode_varint(8 * count)
    pieces = (
        response.SerializeToString(),
        b"\x4a", of_4_bytes, _packed(starts),  # 9, record_starts
        b"\x52", of_4_bytes, _packed([part.result.sizes for part in answer.parts]),  # 10
        b"\x5a", of_8_bytes, _packed([_array_of(part.offsets) for part in answer.parts]),  # 11, queue_offsets
    )  # fmt: skip
    return b"".join(pieces), size_bytes


def _array_of(offsets: Sequence[int]) -> NDArray[np.uint64]:
    if isinstance(offsets, range):
        return np.arange(offsets.start, offsets.stop, dtype=np.uint64)
    return np.array(offsets, np.uint64)


def _packed(columns: Sequence[Any]) -> bytes:
    return bytes(columns[0].tobytes() if len(columns) == 1 else np.concatenate(columns).tobytes())
