"""Whether a reader's past is this log's: after an unclean promotion, or a power cut under ASYNC_FLUSH, messages that it has may be gone.

A reader names the epoch of the log that gave its last answer. A later leader knows where its own log parts from every log that ended with
that epoch, as Kafka's KIP-320 does. Reads the store; any thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protomq.v1.pull_service_pb2 import PullStatus

from .pull_answer import encode_detour

if TYPE_CHECKING:
    from protomq.v1.consumer_service_pb2 import QueueOffset
    from protomq.v1.pull_service_pb2 import PullRequest

    from .store.store import Store


def fork_answer(store: Store, request: PullRequest, incarnation: int) -> bytes | None:
    """Returns the encoded answer that says where the logs part. None if they do not part before the request's offset.

    Raises StoreError where the queue is being healed.
    """
    if not request.log_epoch:
        return None
    shared_end = store.shared_end_offset(request.topic, request.queue_id, request.log_epoch)
    if shared_end is None or request.queue_offset <= shared_end:
        return None
    queue_range = store.queue_range(request.topic, request.queue_id)
    # Before an epoch's first confirmed message the end may be lower for a moment: the pull waits there.
    next_offset = max(shared_end, queue_range[0])
    diverged = PullStatus.PULL_STATUS_DIVERGED
    return encode_detour(
        diverged, next_offset, queue_range, incarnation, log_epoch=store.last_epoch
    )


def settle_commit(store: Store, offset: QueueOffset) -> None:
    """Lowers an offset that is to be committed to where the logs part, and takes the epoch out, which is of no more use."""
    if offset.log_epoch:
        shared_end = store.shared_end_offset(offset.topic, offset.queue_id, offset.log_epoch)
        if shared_end is not None:
            offset.queue_offset = min(offset.queue_offset, shared_end)
        offset.ClearField("log_epoch")
