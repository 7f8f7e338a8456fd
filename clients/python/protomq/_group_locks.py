"""The locks of a group's queues, as brokers list them for operators. Used by Admin."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _methods
from ._checks import check_group
from ._late_imports import fork_waits
from ._types import MessageQueue
from .errors import ProtomqError

if TYPE_CHECKING:
    from ._admin_calls import AdminCalls


@dataclass(frozen=True, slots=True)
class QueueLockInfo:
    """A queue that a member of a group has to itself, as the queue's broker knows it.

    `client_id` and `nonce`: of the member. `token`: what its commits carry; each lock has another one. `age_s`: for how long the member has
    had the queue, None for locks of an earlier version. `left_s`: until the lock ends unless it is renewed. `is_member`: whether the member
    holds a call at the broker now; one that does renews by that.
    """

    queue: MessageQueue
    client_id: str
    nonce: int
    token: int
    age_s: float | None
    left_s: float
    is_member: bool


def queue_locks(
    admin: AdminCalls, group: str, brokers: Iterable[str] | None
) -> tuple[list[QueueLockInfo], dict[str, ProtomqError]]:
    """The locks at all brokers, by queue, and the failures by broker."""
    with fork_waits:
        from .v1 import queue_lock_service_pb2 as pb

    check_group(group)

    def ask(broker: Any) -> list[QueueLockInfo]:
        request = pb.ListQueueLocksRequest(consumer_group=group)
        answer = admin._call(broker.address, _methods.LIST_QUEUE_LOCKS, request, pb.ListQueueLocksResponse)
        return [
            QueueLockInfo(
                queue=MessageQueue(lock.queue.topic, broker.broker_name, lock.queue.queue_id),
                client_id=lock.client_id,
                nonce=lock.nonce,
                token=lock.token,
                age_s=lock.age_ms / 1000 if lock.HasField("age_ms") else None,
                left_s=lock.left_ms / 1000,
                is_member=lock.is_member,
            )
            for lock in answer.locks
        ]

    answers, failures = admin._answers(brokers, ask)
    return sorted((lock for _, locks in answers for lock in locks), key=lambda lock: lock.queue), failures
