"""Answers pulls whose offset was reset after the caller last read the group's offset. Reads the store; any thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protomq.v1.pull_service_pb2 import PullStatus

from .pull_answer import encode_detour

if TYPE_CHECKING:
    from protomq.v1.pull_service_pb2 import PullRequest

    from .store.store import Store


def reset_answer(store: Store, request: PullRequest, incarnation: int) -> bytes | None:
    """Returns the encoded answer that says where to go on. None if the request names the last reset, or no reset.

    Raises StoreError where the queue is being healed.
    """
    if not request.HasField("reset_epoch"):
        return None
    place = (request.consumer_group, request.topic, incarnation, request.queue_id)
    epoch = store.offsets.reset_epoch(*place)
    if not epoch or epoch == request.reset_epoch:
        return None
    next_offset = store.offsets.find(*place)
    if next_offset is None:  # The group was deleted between the two looks.
        return None
    queue_range = store.queue_range(request.topic, request.queue_id)
    reset = PullStatus.PULL_STATUS_OFFSET_RESET
    return encode_detour(reset, next_offset, queue_range, incarnation, reset_epoch=epoch)
