"""Encodes the answer to a pop: its header, with receipts. The records behind it are regions of the log. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from protomq.v1.pop_service_pb2 import PopResponse, PopStatus
from protomq.wire.record import encode_varint

from .pop_orders import PopAnswer
from .pop_receipts import Receipt, encode_receipt


def encode_pop_answer(answer: PopAnswer, broker_name: str, epoch: int) -> tuple[bytes, int]:
    """Encodes the fields of a PopResponse that stand before the regions. Returns them and the total size of the regions in bytes."""
    request, topic = answer.order.request, answer.topic
    size_bytes = sum(part.result.regions_size_bytes for part in answer.parts)
    response = PopResponse(
        status=PopStatus.POP_STATUS_FOUND,
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
    pieces = [response.SerializeToString()]
    _append_packed(pieces, b"\x4a", starts)  # 9, record_starts
    _append_packed(pieces, b"\x52", [part.result.sizes for part in answer.parts])  # 10
    offsets = [np.array(part.offsets, np.uint64) for part in answer.parts]
    _append_packed(pieces, b"\x5a", offsets)  # 11, queue_offsets
    return b"".join(pieces), size_bytes


def _append_packed(pieces: list[bytes], tag: bytes, columns: Sequence[Any]) -> None:
    data = columns[0].tobytes() if len(columns) == 1 else np.concatenate(columns).tobytes()
    pieces += (tag, encode_varint(len(data)), data)
