"""The locks by which a consumer has its queues to itself, in steps: docs/groups.md.

    share of the group ──▶ follow: asks brokers for what it has no lock of, renews the rest ──▶ token(queue): commits carry it
    queues that go     ──▶ release: after the last commit, and once no listener has a message of theirs

Rules:
- A queue is consumed while it is locked. A member that has lost a lock, by time or to another, drops what is left of the queue.
  `follow` returns these queues. The next `follow` asks for them again: what is left of them has been dropped by then. So a listener has
  one message of the old lock at most. While it has, the queue is not locked.
- A lock is of one incarnation of the topic, as offsets are. Queues of a topic that is made again are locked again (`forget_queues`).
  That it was made again since it was locked is noticed by the look-up where to begin (`is_of_other_topic`).
- A broker keeps a lock for as long as its owner is a member. It may have granted one that this member does not know: no answer came.
  It may also have given the member up, and not have freed its locks before it was back. Such a lock is given up, unless it is wanted.
- A lock is asked for each RENEW_S, as RocketMQ does; brokers hold it as long as the member is one. A broker that does not answer takes
  nothing away.
- The share may grow at any moment, for brokers answer on another thread. A queue that came after `follow` is asked for at once (`locked`).
- A broker that knows no locks (UNKNOWN_METHOD) is one of an older version: its queues are consumed without.

One thread at a time, or coroutines of one loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from typing import Final

from . import _methods
from ._call_steps import call_broker
from ._consumer_calls import Limits
from ._decoding import decoded
from ._late_imports import fork_waits
from ._membership_logic import MemberKey
from ._steps import Steps
from ._types import MessageQueue
from .errors import MemberUnknownError, ProtomqError, UnknownMethodError

logger = logging.getLogger("protomq")

RENEW_S: Final = 20.0
"""RocketMQ's rocketmq.client.rebalance.lockInterval."""
RETRY_S: Final = 0.5
"""Until a queue that somebody else has is asked for again."""
NO_TOKEN: Final = 0
"""Of a queue at a broker that knows no locks."""


class QueueLocks:
    """The locks of one consumer. `key`: name and random number of the member, another one in a forked child."""

    def __init__(self, group: str, key: Callable[[], MemberKey], clock: Callable[[], float]) -> None:
        self._group = group
        self._key = key
        self._clock = clock
        self._for_key: MemberKey | None = None
        self._tokens: dict[MessageQueue, int] = {}
        self._incarnations: dict[MessageQueue, int] = {}
        """Of the topics in which they are locked; 0: the broker does not say."""
        self._lost: set[MessageQueue] = set()
        self._going: set[MessageQueue] = set()
        """Queues that are to be unlocked."""
        self._doubtful: set[MessageQueue] = set()
        """Queues that a broker may have locked for this member, which does not know."""
        self._followed: frozenset[MessageQueue] = frozenset()
        """The queues that the last `follow` was given."""
        self._due_s = 0.0
        self._renew_s = 0.0
        self._told_of: set[str] = set()
        self.is_busy: Callable[[MessageQueue], bool] = lambda _: False
        """Whether somebody still works on a message of the queue."""

    # -- questions -------------------------------------------------------------------------------------------------------

    def token(self, queue: MessageQueue) -> int:
        """What a commit carries; 0: the queue is not locked."""
        return self._tokens.get(queue, NO_TOKEN)

    def is_of_other_topic(self, queue: MessageQueue, incarnation: int) -> bool:
        """Whether the queue is locked in another incarnation of its topic than this one, which is now; 0: there is none now."""
        return queue in self._tokens and self._incarnations.get(queue, 0) not in (0, incarnation)

    def locked(self, queues: Collection[MessageQueue]) -> list[MessageQueue]:
        """Those of the queues that may be consumed. Where one came after the last `follow`, the next is due at once."""
        if any(queue not in self._tokens and queue not in self._followed for queue in queues):
            self._due_s = 0.0
        return [queue for queue in queues if queue in self._tokens]

    def beside(self, queues: Collection[MessageQueue]) -> list[MessageQueue]:
        """What is locked besides these queues: it went to another member while its lock was on its way."""
        return [queue for queue in self._tokens if queue not in queues]

    def due_in_s(self, now_s: float) -> float:
        """Until `follow` has something to do: 0 if it has now."""
        return 0.0 if self._lost else max(self._due_s - now_s, 0.0)

    # -- what brokers said ----------------------------------------------------------------------------------------------

    def refused(self, queues: Collection[MessageQueue]) -> None:
        """A commit was refused: these are locked by others, or by nobody."""
        self._lost.update(queue for queue in queues if self._tokens.pop(queue, None) is not None)
        self._doubtful.update(queues)

    def forget(self, broker_names: Collection[str]) -> None:
        """These brokers have given the member up, and its locks with it."""
        self.forget_queues([queue for queue in self._tokens if queue.broker_name in broker_names])
        self._due_s = 0.0

    def forget_queues(self, queues: Iterable[MessageQueue]) -> None:
        """The topics of these queues are gone, say, and with them what was locked."""
        for queue in queues:
            if self._tokens.pop(queue, None) is not None:
                self._doubtful.add(queue)
                self._due_s = 0.0

    # -- steps -----------------------------------------------------------------------------------------------------------

    def follow(self, wanted: Collection[MessageQueue], limits: Limits) -> Steps[list[MessageQueue]]:
        """Locks what it can of the queues, renews what is due. The queues whose locks were lost since the last time.

        Drop what is here of those, and call it again.
        """
        now_s = self._clock()
        if self._for_key != self._key():
            self._for_key = self._key()
            self._tokens.clear()
            self._going.clear()
            self._doubtful.clear()
        # One that is to go and is wanted again is locked still, unless it is said again: it must not be forgotten if it goes after all.
        self._doubtful |= self._going
        self._going = self._doubtful.difference(wanted)
        self._doubtful -= self._going
        self._followed = frozenset(wanted)
        is_renewal = now_s >= self._renew_s
        if is_renewal:
            self._renew_s = now_s + RENEW_S
        asked: dict[str, list[MessageQueue]] = {}
        for queue in wanted:
            # A listener that has a message of an earlier lock still works on it: two at a time would not be in order.
            is_free = queue not in self._lost and not self.is_busy(queue)
            if (is_renewal or queue not in self._tokens) and (queue in self._tokens or is_free):
                asked.setdefault(queue.broker_name, []).append(queue)
        for broker_name, queues in asked.items():
            yield from self._lock(broker_name, queues, limits)
        yield from self._unlock(limits)
        is_complete = not self._going and all(queue in self._tokens for queue in wanted)
        self._due_s = self._renew_s if is_complete else min(now_s + RETRY_S, self._renew_s)
        lost, self._lost = sorted(self._lost), set()
        return lost

    def release(self, queues: Iterable[MessageQueue], limits: Limits) -> Steps[None]:
        """These queues go; what was finished is committed."""
        for queue in queues:
            if self._tokens.pop(queue, NO_TOKEN) != NO_TOKEN:
                self._going.add(queue)
        yield from self._unlock(limits)
        if self._going:
            self._due_s = min(self._due_s, self._clock() + RETRY_S)

    def _lock(
        self, broker_name: str, queues: list[MessageQueue], limits: Limits
    ) -> Steps[None]:
        with fork_waits:
            from .v1 import queue_lock_service_pb2 as pb

        client_id, nonce = self._key()
        request = pb.LockQueuesRequest(
            consumer_group=self._group,
            client_id=client_id,
            nonce=nonce,
            queues=[pb.QueueName(topic=queue.topic, queue_id=queue.queue_id) for queue in queues],
            is_member=True,
        )
        try:
            data = yield from call_broker(
                queues[0].topic, broker_name, _methods.LOCK_QUEUES, (request.SerializeToString(),),
                limits.timeout_s, limits.retries, self._clock,
            )  # fmt: skip
        except UnknownMethodError:
            self._tell(f"broker {broker_name} knows no locks of queues: while members change, two may have a queue of group {self._group}")
            for queue in queues:
                self._tokens[queue] = NO_TOKEN
            return
        except MemberUnknownError:
            return  # Whom the broker does not know yet, after a restart, or any more, joins again.
        except BaseException as error:
            self._doubtful.update(queue for queue in queues if queue not in self._tokens)
            if not isinstance(error, ProtomqError):
                raise  # Its `poll` was cancelled: the broker may have locked them all the same.
            if not error.retriable:
                self._tell(f"broker {broker_name} locks no queues for group {self._group}: {error}")
            return
        for said in decoded(data, pb.LockQueuesResponse.FromString).queues:
            queue = MessageQueue(said.queue.topic, broker_name, said.queue.queue_id)
            before = self._tokens.pop(queue, None)
            self._doubtful.discard(queue)
            if before is not None and before != said.token:
                self._lost.add(queue)
                if said.token:
                    self._doubtful.add(queue)
            elif said.token:
                self._tokens[queue], self._incarnations[queue] = said.token, said.topic_incarnation

    def _unlock(self, limits: Limits) -> Steps[None]:
        free: dict[str, list[MessageQueue]] = {}
        for queue in self._going:
            if not self.is_busy(queue):
                free.setdefault(queue.broker_name, []).append(queue)
        if not free:
            return
        with fork_waits:
            from .v1 import queue_lock_service_pb2 as pb

        client_id, nonce = self._key()
        for broker_name, queues in free.items():
            request = pb.UnlockQueuesRequest(
                consumer_group=self._group,
                client_id=client_id,
                nonce=nonce,
                queues=[pb.QueueName(topic=queue.topic, queue_id=queue.queue_id) for queue in queues],
            )
            try:
                yield from call_broker(
                    queues[0].topic, broker_name, _methods.UNLOCK_QUEUES, (request.SerializeToString(),),
                    limits.timeout_s, limits.retries, self._clock,
                )  # fmt: skip
            except ProtomqError as error:
                if error.retriable:
                    continue  # It is tried again; at the latest the lock ends with the membership.
            self._going.difference_update(queues)

    def _tell(self, text: str) -> None:
        if text not in self._told_of and len(self._told_of) < 1_000:
            self._told_of.add(text)
            logger.warning("%s", text)
