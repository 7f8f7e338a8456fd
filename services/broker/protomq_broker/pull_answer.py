"""Encodes the header of the answer to a pull. Pure."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from numpy.typing import NDArray

from protomq.v1.pull_service_pb2 import PullResponse, PullStatus
from protomq.wire.record import encode_varint

from .store.queues.reading import ReadResult, ReadStatus

RECORD_COUNT_DEFAULT: Final = 32
SIZE_DEFAULT_BYTES: Final = 4 << 20

_STATUS = {
    ReadStatus.FOUND: PullStatus.PULL_STATUS_FOUND,
    ReadStatus.NO_NEW_MSG: PullStatus.PULL_STATUS_NO_NEW_MSG,
    ReadStatus.NO_MATCHED_MSG: PullStatus.PULL_STATUS_NO_MATCHED_MSG,
    ReadStatus.OFFSET_ILLEGAL: PullStatus.PULL_STATUS_OFFSET_ILLEGAL,
}


class Found(NamedTuple):
    """The result of a look, and the incarnation of the topic that was read."""

    result: ReadResult
    incarnation: int


def encode_header(
    result: ReadResult, topic_incarnation: int, log_epoch: int, other_member: str = "", suggested_broker_id: int = 0
) -> bytes:
    """Encodes the fields of a PullResponse that stand before the regions. It copies packed arrays without visiting their items."""
    response = PullResponse(
        status=_STATUS[result.status],
        next_offset=result.next_offset,
        min_offset=result.min_offset,
        end_offset=result.end_offset,
        topic_incarnation=topic_incarnation,
        other_member=other_member,
        log_epoch=log_epoch,
        suggested_broker_id=suggested_broker_id,
    )
    if not result.regions_size_bytes:
        return response.SerializeToString()
    response.regions_size_bytes = result.regions_size_bytes
    response.first_offset = result.first_offset
    parts = [response.SerializeToString()]
    _append_packed(parts, b"\x4a", result.starts)  # 9, record_starts
    _append_packed(parts, b"\x52", result.sizes)  # 10, record_sizes
    if result.queue_offsets is not None:
        _append_packed(parts, b"\x5a", result.queue_offsets)  # 11
    return b"".join(parts)


def encode_detour(
    status: PullStatus.ValueType,
    next_offset: int,
    queue_range: tuple[int, int],
    topic_incarnation: int,
    *,
    log_epoch: int = 0,
    reset_epoch: int = 0,
) -> bytes:
    """Encodes the whole answer to a pull that must go on at another offset: its own was reset, or its past is not this log's."""
    min_offset, end_offset = queue_range
    return PullResponse(
        status=status,
        next_offset=next_offset,
        min_offset=min_offset,
        end_offset=end_offset,
        topic_incarnation=topic_incarnation,
        log_epoch=log_epoch,
        reset_epoch=reset_epoch,
    ).SerializeToString()


def _append_packed(parts: list[bytes], tag: bytes, values: NDArray[Any]) -> None:
    data = values.tobytes()
    parts += (tag, encode_varint(len(data)), data)


def end_position(result: ReadResult) -> int | None:
    """Returns where the last message found ends in the log; None if there is none."""
    if not result.regions:
        return None
    last = result.regions[-1]
    return last.file.base_position + last.offset + last.size_bytes


def nothing_yet(result: ReadResult) -> bool:
    """Whether a pull keeps waiting: it is at the end of the queue, and nothing in front matched."""
    if result.status is ReadStatus.NO_NEW_MSG:
        return True
    return result.status is ReadStatus.NO_MATCHED_MSG and result.next_offset >= result.end_offset
