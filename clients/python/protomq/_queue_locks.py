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
- Where the member's call has broken, others may have its locks soon. Nothing of those queues is begun (`may_begin`) until they are
  renewed, in one call for each broker. That comes behind an answer to a later call of the member. A slave (NOT_MASTER) locks nothing.
- A broker that knows no locks (UNKNOWN_METHOD) is one of an older version: its queues are consumed without.

One thread at a time, or coroutines of one loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, Protocol

from . import _methods
from ._call_steps import call_broker
from ._consumer_calls import Limits
from ._decoding import decoded
from ._late_imports import fork_waits
from ._membership_logic import MemberKey
from ._steps import Steps
from ._types import MessageQueue
from .errors import (
    MemberUnknownError,
    NoRouteError,
    NotMasterError,
    ProtomqError,
    TopicNotFoundError,
    UnknownMethodError,
)

logger = logging.getLogger("protomq")

RENEW_S: Final = 20.0
"""RocketMQ's rocketmq.client.rebalance.lockInterval."""
RETRY_S: Final = 0.5
"""Until a queue that somebody else has is asked for again."""
_NONE: Final[frozenset[MessageQueue]] = frozenset()
NO_TOKEN: Final = 0
"""Of a queue at a broker that knows no locks."""


class Breaks(Protocol):
    """Where calls of the member broke; see MembershipState."""

    @property
    def unsure(self) -> Mapping[str, int]:
        """By broker, the last such call. Any thread."""

    def renewable(self) -> Mapping[str, int]:
        """Of those, the ones at brokers that have answered since."""

    def renewed(self, broker_name: str, number: int) -> None:
        """The broker has said whose the locks are."""


class QueueLocks:
    """The locks of one consumer. `key`: name and random number of the member, another one in a forked child."""

    def __init__(
        self, group: str, key: Callable[[], MemberKey], clock: Callable[[], float], breaks: Breaks | None = None
    ) -> None:
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
        self._breaks = breaks
        self._unsure: Mapping[str, int] = {} if breaks is None else breaks.unsure
        self._misses = 0
        """How often the broker of some queues was not found by a topic's route."""
        self._tries: dict[str, tuple[int, float]] = {}
        """The break behind which locks of a broker were renewed last, in vain, and when they are again."""
        self.is_busy: Callable[[MessageQueue], bool] = lambda _: False
        """Whether somebody still works on a message of the queue."""
        self.on_sure: Callable[[], None] = lambda: None
        """Queues of which nothing was to be begun may go on."""

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

    def may_begin(self, queue: MessageQueue) -> bool:
        """Whether the queue is locked, and its broker has said so since the member's call broke there last. Any thread."""
        return queue in self._tokens and queue.broker_name not in self._unsure

    def unsure(self) -> frozenset[MessageQueue]:
        """The queues that are locked, as far as is known, and may be another member's by now."""
        if not self._unsure:
            return _NONE
        return frozenset(queue for queue in self._tokens if queue.broker_name in self._unsure)

    def beside(self, queues: Collection[MessageQueue]) -> list[MessageQueue]:
        """What is locked besides these queues: it went to another member while its lock was on its way."""
        return [queue for queue in self._tokens if queue not in queues]

    def due_in_s(self, now_s: float) -> float:
        """Until `follow` has something to do: 0 if it has now."""
        if self._lost:
            return 0.0
        due_s = self._due_s
        if self._unsure and self._breaks is not None:
            for name, number in self._breaks.renewable().items():
                due_s = min(due_s, self._next_try_s(name, number))
        return max(due_s - now_s, 0.0)

    def _next_try_s(self, broker_name: str, number: int) -> float:
        tried, again_s = self._tries.get(broker_name, (0, 0.0))
        return again_s if tried == number else 0.0

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
        broken = self._renewable(now_s)
        # Also of those that go: something of them may be begun until they do.
        asked: dict[str, list[MessageQueue]] = {name: [queue for queue in self._tokens if queue.broker_name == name] for name in broken}
        for queue in wanted:
            if queue in self._tokens:
                if is_renewal and queue.broker_name not in broken:
                    asked.setdefault(queue.broker_name, []).append(queue)
            # A listener that has a message of an earlier lock still works on it: two at a time would not be in order.
            elif queue not in self._lost and not self.is_busy(queue):
                asked.setdefault(queue.broker_name, []).append(queue)
        for broker_name, queues in asked.items():
            is_told = not queues or (yield from self._lock(broker_name, queues, limits))
            if broker_name in broken:
                self._note_renewal(broker_name, broken[broker_name], is_told=is_told)
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

    def _renewable(self, now_s: float) -> dict[str, int]:
        """Brokers at which all locks are to be renewed now, for a call of the member broke there; and which one."""
        if not self._unsure or self._breaks is None:
            return {}
        return {name: number for name, number in self._breaks.renewable().items() if self._next_try_s(name, number) <= now_s}

    def _note_renewal(self, broker_name: str, number: int, *, is_told: bool) -> None:
        assert self._breaks is not None
        if is_told:
            self._tries.pop(broker_name, None)
            self._breaks.renewed(broker_name, number)
            self.on_sure()
        else:
            self._tries[broker_name] = number, self._clock() + RETRY_S

    def _lock(
        self, broker_name: str, queues: list[MessageQueue], limits: Limits
    ) -> Steps[bool]:
        """Whether it is known now which of the queues are locked for this member."""
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
        topics = list(dict.fromkeys(queue.topic for queue in queues))
        try:
            data = yield from call_broker(
                topics[self._misses % len(topics)], broker_name, _methods.LOCK_QUEUES, (request.SerializeToString(),),
                limits.timeout_s, limits.retries, self._clock,
            )  # fmt: skip
        except UnknownMethodError:
            self._tell(f"broker {broker_name} knows no locks of queues: while members change, two may have a queue of group {self._group}")
            for queue in queues:
                self._tokens[queue] = NO_TOKEN
            return True
        except MemberUnknownError:
            return False  # Whom the broker does not know yet, after a restart, or any more, joins again.
        except BaseException as error:
            self._doubtful.update(queue for queue in queues if queue not in self._tokens)
            # A deleted topic leads to no broker. The next try goes by the route of another one.
            self._misses += isinstance(error, (NoRouteError, TopicNotFoundError))
            if not isinstance(error, ProtomqError):
                raise  # Its `poll` was cancelled: the broker may have locked them all the same.
            if not error.retriable:
                self._tell(f"broker {broker_name} locks no queues for group {self._group}: {error}")
            return isinstance(error, NotMasterError)
        for said in decoded(data, pb.LockQueuesResponse.FromString).queues:
            queue = MessageQueue(said.queue.topic, broker_name, said.queue.queue_id)
            before = self._tokens.get(queue)
            self._doubtful.discard(queue)
            if before is not None and before != said.token:
                del self._tokens[queue]
                self._lost.add(queue)
                if said.token:
                    self._doubtful.add(queue)
            elif said.token:
                # Never without its token between: listeners ask on other threads.
                self._tokens[queue], self._incarnations[queue] = said.token, said.topic_incarnation
        return True

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
