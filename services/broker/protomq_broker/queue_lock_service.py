"""QueueLockService: locks queues for members of groups that consume in order. One member at a time has a queue.

`queue_locks.py` decides who gets a lock; `store/state/locks.py` has the locks that are appended. This module has calls and records. It
decides on the send lane, the only writer, so a lock's record stands before all later commits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from google.protobuf.message import DecodeError

from protomq.v1.queue_lock_service_pb2 import (
    ListedQueueLock,
    ListQueueLocksRequest,
    ListQueueLocksResponse,
    LockQueuesRequest,
    LockQueuesResponse,
    QueueName,
    UnlockQueuesRequest,
    UnlockQueuesResponse,
)
from protomq.wire.topics import LOCKS_TOPIC
from protomq_runtime.dispatch import never_shed, raw
from protomq_runtime.errors import Code, ServiceError, invalid_argument, unparsable

from .memberships import QUEUES_MAX, TEXT_MAX_BYTES
from .queue_locks import SLICE_COUNT
from .said_once import SaidOnce
from .store.state.locks import LockKey, locks_record
from .store_errors import to_service_error
from .topic_access import check_group_name

if TYPE_CHECKING:
    from protomq_runtime.call import Call
    from protomq_runtime.clock import Clock

    from .config import BrokerConfig
    from .queue_locks import Changes, QueueLocks
    from .store.store import Store
    from .system_writer import SystemWriter
    from .waiting_answers import WaitingAnswers

log = logging.getLogger("protomq.broker")

_Request = TypeVar("_Request", LockQueuesRequest, UnlockQueuesRequest, ListQueueLocksRequest)

TICK_MS: Final = 1_000.0
"""Interval at which the service looks for locks that nobody has renewed."""


class QueueLockService:
    """Implements protomq.v1.QueueLockService. Call `arm` on the send lane, when the broker may write. `gone`: any thread."""

    def __init__(
        self,
        store: Store,
        locks: QueueLocks,
        writer: SystemWriter,
        waiting: WaitingAnswers,
        config: BrokerConfig,
        clock: Clock,
    ) -> None:
        self._store = store
        self._locks = locks
        self._writer = writer
        self._waiting = waiting
        self._config = config
        self._clock = clock
        self._said = SaidOnce()
        locks.is_there = self._is_there

    @never_shed
    @raw
    def lock_queues(self, call: Call) -> None:
        """Locks the free queues among those named for the member, and renews its locks."""
        self._parse(call, LockQueuesRequest, self._lock)

    @never_shed
    @raw
    def unlock_queues(self, call: Call) -> None:
        """Unlocks the queues that the member names."""
        self._parse(call, UnlockQueuesRequest, self._unlock)

    @raw
    def list_queue_locks(self, call: Call) -> None:
        """Lists the locks and their owners."""
        self._parse(call, ListQueueLocksRequest, self._list)

    def arm(self) -> None:
        """Starts the expiry of locks."""
        self._locks.begin(self._clock.monotonic_ms())
        self._tick()

    def gone(self, group: str, client_id: str, nonce: int, may_return: bool) -> None:
        """Frees the queues of a member that seems to be gone, unless it comes back before that is done.

        `may_return`: see `QueueLocks.gone`. A slave does nothing: members are there while the master is away, and locks are the master's.
        """
        if not self._store.is_leading:
            return
        self._writer.post(partial(self._free, group, client_id, nonce, may_return))

    # On the consumer lane.

    def _parse(
        self, call: Call, kind: type[_Request], then: Callable[[Call, _Request], None]
    ) -> None:
        try:
            request = kind.FromString(bytes(call.payload))
            check_group_name(request.consumer_group)
            if not isinstance(request, ListQueueLocksRequest):
                _check(request)
        except DecodeError:
            call.fail(unparsable(kind.DESCRIPTOR.full_name))
        except ServiceError as error:
            call.fail(error)
        else:
            self._writer.post(partial(then, call, request))

    # On the send lane.

    def _tick(self) -> None:
        now_ms = self._clock.monotonic_ms()
        changes = self._locks.expired(now_ms)
        is_done = self._append_or_log(changes)
        if is_done and changes:
            self._locks.on_expired(changes)
            _tell("nobody renewed them in time, their members did not come back after the start, or their topics are gone", changes)
        if is_done and self._locks.is_due(now_ms):
            self._writer.post(self._tick)
        else:
            self._writer.lane.call_later(TICK_MS, self._tick)

    def _lock(self, call: Call, request: LockQueuesRequest) -> None:
        keys = [self._key(request.consumer_group, queue) for queue in request.queues]
        there = [key for key in keys if key is not None]
        try:
            if request.is_member and not self._locks.is_member(request.consumer_group, request.client_id, request.nonce):
                raise _no_member(request)
            now_ms = self._clock.monotonic_ms()
            changes, owners = self._locks.take(
                there, request.client_id, request.nonce, now_ms, self._clock.now_ms()
            )
            for start in range(0, len(changes), SLICE_COUNT):
                part = changes[start : start + SLICE_COUNT]
                freed_count = sum(self._store.locks.owner(key) is not None for key, _ in part)
                self._append(part)
                # Those of a slice have their time, even if the log does not take the next one.
                self._locks.on_granted(part, now_ms)
                self._locks.on_freed(freed_count)
        except Exception as error:
            self._answer(call, None, error)
            return
        owner_of = dict(zip(there, owners, strict=True))
        response = LockQueuesResponse(lock_ms=self._locks.lock_ms)
        for queue, key in zip(request.queues, keys, strict=True):
            owner = owner_of.get(key) if key is not None else None
            locked = response.queues.add(queue=queue)
            if key is not None and owner is not None and owner.has_name(request.client_id, request.nonce):
                locked.token, locked.topic_incarnation = owner.token, key.incarnation
            elif owner is not None:
                locked.owner = owner.client_id
        self._answer_when_stored(call, response.SerializeToString())

    def _unlock(self, call: Call, request: UnlockQueuesRequest) -> None:
        group = request.consumer_group
        keys = [self._key(group, queue) for queue in request.queues]
        there = [key for key in keys if key is not None]
        if request.queues and not there:  # Their topics are gone, and so are the locks, for everybody.
            self._answer(call, UnlockQueuesResponse().SerializeToString(), None)
            return
        try:
            self._append(self._locks.give_up(there, group, request.client_id, request.nonce))
        except Exception as error:
            self._answer(call, None, error)
            return
        self._answer_when_stored(call, UnlockQueuesResponse().SerializeToString())

    def _list(self, call: Call, request: ListQueueLocksRequest) -> None:
        now_ms, wall_clock_ms = self._clock.monotonic_ms(), self._clock.now_ms()
        response = ListQueueLocksResponse(
            locks=[
                ListedQueueLock(
                    queue=QueueName(topic=key.topic, queue_id=key.queue_id),
                    client_id=owner.client_id,
                    nonce=owner.nonce,
                    left_ms=self._locks.left_ms(key, now_ms),
                    token=owner.token,
                    # The clock may have been set back since.
                    age_ms=max(wall_clock_ms - owner.locked_at_ms, 0) if owner.locked_at_ms else None,
                    is_member=self._locks.is_member(key.group, owner.client_id, owner.nonce),
                )
                for key, owner in sorted(self._store.locks.of_group(request.consumer_group).items())
                if self._is_there(key) and not self._locks.is_loose(key)
            ]
        )
        self._answer(call, response.SerializeToString(), None)

    def _free(self, group: str, client_id: str, nonce: int, may_return: bool) -> None:
        all_changes = self._locks.gone(group, client_id, nonce, self._clock.monotonic_ms(), may_return=may_return)
        changes = all_changes[:SLICE_COUNT]
        if not changes or not self._append_or_log(changes):
            return
        self._locks.on_gone(changes)
        _tell(f"{client_id} is gone", changes)
        if len(changes) < len(all_changes):
            self._writer.post(partial(self._free, group, client_id, nonce, may_return))

    def _key(self, group: str, queue: QueueName) -> LockKey | None:
        """Returns the lock's key; None if this broker has no such queue, or nobody may read it, and it is not locked.

        Who has locked it before may still commit what it has done, and gives the lock up then. If the queue comes back, it is free.
        """
        topic = self._store.topics.find(queue.topic)
        if topic is None:
            return None
        key = LockKey(group, queue.topic, topic.incarnation, queue.queue_id)
        is_readable = topic.readable and queue.queue_id < topic.read_queues
        return key if is_readable or self._store.locks.owner(key) is not None else None

    def _is_there(self, key: LockKey) -> bool:
        """Whether the topic is still the one in which the queue was locked."""
        topic = self._store.topics.find(key.topic)
        return topic is not None and topic.incarnation == key.incarnation

    def _append(self, changes: Changes) -> None:
        for start in range(0, len(changes), SLICE_COUNT):
            self._writer.append(LOCKS_TOPIC, [locks_record(changes[start : start + SLICE_COUNT])])

    def _append_or_log(self, changes: Changes) -> bool:
        """Appends changes of locks. Returns whether they are in the log. If not, the next look tries again: an expired lock stays expired.
        """
        try:
            self._append(changes)
        except Exception as error:
            if self._said.is_due(type(error).__name__):
                log.warning("%d queues cannot be unlocked now, trying again each second: %s", len(changes), error)
            return False
        return True

    def _answer_when_stored(self, call: Call, answer: bytes) -> None:
        """Answers when the log is stored up to now, even if nothing has changed: the record with the present lock may not be stored yet."""
        position = self._store.locks.end_position
        if self._waiting.is_stored(position):
            self._answer(call, answer, None)
            return
        wait_ms = call.hold_time_ms(self._config.sync_flush_timeout_ms)
        self._waiting.wait(
            self._writer.lane, self._store.appended_position, wait_ms, partial(self._answer, call, answer)
        )
        self._waiting.request_flush()

    def _answer(self, call: Call, answer: bytes | None, error: Exception | None) -> None:
        failure = None if error is None else to_service_error(error)
        call.lane.post(partial(_answer_here, call, answer, failure))


def _check(request: LockQueuesRequest | UnlockQueuesRequest) -> None:
    """Raises ServiceError INVALID_ARGUMENT."""
    if not 0 < len(request.client_id.encode()) <= TEXT_MAX_BYTES:
        raise invalid_argument("client_id", f"has 1 to {TEXT_MAX_BYTES} octets")
    if not request.nonce:
        raise invalid_argument("nonce", "is a random number, not 0")
    if len(request.queues) > QUEUES_MAX:
        raise invalid_argument("queues", f"are {QUEUES_MAX} at most, not {len(request.queues)}")
    names = {(queue.topic, queue.queue_id) for queue in request.queues}
    if len(names) < len(request.queues):
        raise invalid_argument("queues", "has a queue twice")
    if any(queue.queue_id < 0 for queue in request.queues):
        raise invalid_argument("queues", "has a queue id below 0")


def _no_member(request: LockQueuesRequest) -> ServiceError:
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "MEMBER_UNKNOWN",
        f"{request.client_id} is no member of {request.consumer_group} here (any more), so no queue is locked for it: join by "
        "HoldMembership first, or leave `is_member` out",
        metadata={"consumer_group": request.consumer_group, "client_id": request.client_id},
    )


def _tell(why: str, changes: Iterable[object]) -> None:
    log.warning("%d locks of queues end: %s", len(list(changes)), why)


def _answer_here(call: Call, answer: bytes | None, failure: ServiceError | None) -> None:
    if call.answered:
        return
    if failure is not None:
        call.fail(failure)
    else:
        assert answer is not None
        call.answer(answer)
