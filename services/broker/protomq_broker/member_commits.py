"""Refuses commits of members whom their group has given up, as Kafka does with a member epoch. No I/O, no lock.

A member that was stopped may send a commit when others have its queues. Such a commit names its membership, and `Memberships` know whether
that is one of now, and which queues it has. The check is made on the send lane, in the turn that appends the commit.

A broker that has just started knows no members. Then it refuses, too: the member calls HoldMembership, and commits again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protomq_runtime.errors import Code, ServiceError

from .queue_locks import not_owned

if TYPE_CHECKING:
    from protomq.v1.consumer_service_pb2 import CommitOffsetsRequest

    from .memberships import Memberships


class MemberCommits:
    """Checks the commits of one broker against its memberships. Any thread."""

    def __init__(self, memberships: Memberships) -> None:
        self._memberships = memberships

    def check(self, request: CommitOffsetsRequest) -> None:
        """Raises ServiceError MEMBER_UNKNOWN or QUEUE_NOT_OWNED, all or none. The request names a member."""
        group, member = request.consumer_group, request.member
        queues = [(offset.topic, offset.queue_id) for offset in request.offsets]
        missing = self._memberships.may_commit(group, (member.client_id, member.nonce), member.member_epoch, queues)
        if missing is None:
            self._memberships.refused_commit_count += 1
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "MEMBER_UNKNOWN",
                f"this membership of {member.client_id!r} in {group} is over, or this broker has just started and does not know it yet. "
                "Nothing of the commit was stored: call HoldMembership, and commit again if that is answered",
                metadata={"consumer_group": group, "client_id": member.client_id},
            )
        if missing:
            self._memberships.refused_commit_count += 1
            topic = missing[0][0]
            ids = [queue_id for name, queue_id in missing if name == topic]
            raise not_owned(group, topic, ids, self._memberships.owner(group, missing[0]))
