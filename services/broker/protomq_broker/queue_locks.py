"""Decides which member has a queue's lock, and until when. No I/O; the caller gives time and random numbers.

    take(...)        what a member asks for: the changes, and who has the queues then
    give_up(...)     what it gives up
    gone(...)        a member is none any more: its queues are free
    expired(...)     locks that nobody renewed in time

Each returns changes, which go into one record. `LockTable` (store/state/locks.py) applies them once the record is appended. Rules:

- A queue has one owner or none. An owner keeps the lock while it asks again, or while it is a member of the group. Where a member has left,
  or was not heard of in time, its queues are free at once, not only with the lock's time. Many locks end in slices, in more than one turn.
- A member whose connection broke may be back in a moment. Its queues go to whoever asks for them first. If that is itself, its locks are as
  they were, token and all: nobody had the queues meanwhile. If nobody asks within `gap_ms`, they are free.
- A topic that is made again has locks of its own. Nobody asks for those of the one before: they end with their time, members or not.
- The log does not contain the end time of a lock. After a start or a promotion each owner counts as having asked just then. An owner that
  was a member when it got its lock comes back within `gap_ms`. Else it is gone: it may have died with the broker.
- Each lock gets a new token, also for the same member. A member that lost a queue and got it again does not know what happened in between.
  After a start nobody knows whose connection had broken before: such owners have `gap_ms`, too, and others wait for them.

The writer's thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final, NamedTuple

from protomq_runtime.errors import Code, ServiceError, too_many

from .store.state.locks import LockKey, LockOwner, LockTable

LOCK_MS: Final = 60_000
"""RocketMQ's rocketmq.broker.rebalance.lockMaxLiveTime."""
LOCKS_MAX: Final = 100_000
"""Most locks of a broker, one for each queue of each group that consumes in order; the same number as popped queues. RocketMQ has no
maximum; here group names are free, and a start and a cache walk all locks.
"""
RETRY_DELAY_MS: Final = 1_000
SLICE_COUNT: Final = 500
"""Most locks that one record changes, and that one turn of the send lane examines: some 20 ms of work."""

Changes = list[tuple[LockKey, LockOwner | None]]
"""The new owner of each queue; None: nobody."""


class LockCounts(NamedTuple):
    """Counts for metrics: `held` as of now, the others since the start."""

    held: int
    granted: int
    expired: int
    freed: int
    refused_commits: int


class QueueLocks:
    """The locks of a broker. `is_member` says whether a member, by group, name and number, is present. `draw` returns a random number,
    not 0.
    """

    def __init__(
        self,
        table: LockTable,
        is_member: Callable[[str, str, int], bool],
        draw: Callable[[], int],
        lock_ms: int = LOCK_MS,
        count_max: int = LOCKS_MAX,
        gap_ms: int = LOCK_MS,
    ) -> None:
        self._table = table
        self.is_member = is_member
        self.is_there: Callable[[LockKey], bool] = lambda _: True
        """Says whether the topic is still the one in which the queue was locked."""
        self._draw = draw
        self.lock_ms = lock_ms
        self._count_max = count_max
        self._deadlines_ms: dict[LockKey, tuple[int, int]] = {}
        """Token of each lock, and when it ends. The earliest stands first, since all locks last equally long and a renewed one moves to the
        end.
        """
        self._gap_ms = gap_ms
        self._awaited: dict[LockKey, int] = {}
        """Token of each lock whose owner was a member before the start, and is not known to be back."""
        self._awaited_until_ms = 0
        self._loose: dict[LockKey, tuple[int, int]] = {}
        """Token of each lock whose owner's connection broke, and until when it may come back. Whoever asks for the queue gets it. The
        earliest stands first. Those of owners that are back stay until somebody looks. Also of who has left: until that is appended. Where
        that fails, they may stand behind later ones, and end with those at the latest.
        """
        self._granted = self._expired = self._freed = 0
        self.refused_commit_count = 0
        """Commits that were refused because they lacked the token of their queue's lock."""

    def take(
        self, keys: Sequence[LockKey], client_id: str, nonce: int, now_ms: int, wall_clock_ms: int = 0
    ) -> tuple[Changes, list[LockOwner]]:
        """Returns the changes when a member asks for queues, and the owner of each after them. Raises ServiceError TOO_MANY; then nothing
        changes.
        """
        free_count = sum(1 for key in keys if self._table.owner(key) is None)
        if free_count and self._table.count + free_count > self._count_max:
            text = f"{self._count_max} queues of groups are locked at most: unlock what nobody needs, or delete groups that nobody needs"
            raise too_many("locked queues", self._count_max, text, retry_delay_ms=RETRY_DELAY_MS)
        changes: Changes = []
        owners: list[LockOwner] = []
        for key in keys:
            owner = self._table.owner(key)
            if owner is None or (not owner.has_name(client_id, nonce) and self.is_loose(key)):
                is_member = self.is_member(key.group, client_id, nonce)
                owner = LockOwner(self._draw(), client_id, nonce, is_member, wall_clock_ms)
                changes.append((key, owner))
            elif owner.has_name(client_id, nonce):
                self._renew(key, owner, now_ms)
            owners.append(owner)
        return changes, owners

    def give_up(
        self, keys: Sequence[LockKey], group: str, client_id: str, nonce: int
    ) -> Changes:
        """Returns the changes when a member gives queues up; no keys: all queues of its group that it has."""
        owned = keys or list(self._table.of_group(group))
        changes: Changes = []
        for key in owned:
            owner = self._table.owner(key)
            if owner is not None and owner.has_name(client_id, nonce):
                changes.append((key, None))
        return changes

    def gone(self, group: str, client_id: str, nonce: int, now_ms: int, *, may_return: bool) -> Changes:
        """Returns the changes when a member is gone, unless it has come back since. `may_return`: its connection broke, so nothing changes
        until others ask for its queues.

        Until the changes are appended, in turns of the lane, the queues are whose who asks first. Members that do not lock commit there.
        """
        if self.is_member(group, client_id, nonce):
            return []
        changes = self.give_up((), group, client_id, nonce)
        for key, _ in changes:
            owner = self._table.owner(key)
            assert owner is not None
            self._loose.pop(key, None)
            self._loose[key] = (owner.token, now_ms + self._gap_ms if may_return else now_ms)
            self._awaited.pop(key, None)
        return [] if may_return else changes

    def is_loose(self, key: LockKey) -> bool:
        """Whether the queue is locked by a member whose connection broke, so that it is anybody's who asks first."""
        token, _ = self._loose.get(key, (0, 0))
        if not token:
            return False
        owner = self._table.owner(key)
        if owner is not None and owner.token == token and not self.is_member(key.group, owner.client_id, owner.nonce):
            return True
        del self._loose[key]
        return False

    def begin(self, now_ms: int) -> None:
        """Starts the time of owners that have not asked here yet. Call it soon after a start or a promotion. It walks all locks."""
        self._loose.clear()  # Of a slave, which members come to and leave again.
        for key, owner in self._table.all().items():
            if self._deadlines_ms.get(key, (0, 0))[0] != owner.token:
                self._renew(key, owner, now_ms)
                if owner.is_member:
                    self._awaited[key] = owner.token
        self._awaited_until_ms = now_ms + self._gap_ms

    def expired(self, now_ms: int) -> Changes:
        """Returns the changes for at most SLICE_COUNT locks that nobody renewed in time. Call it at intervals, and again at once while
        `is_due`. It returns the same changes again until they are appended."""
        changes: Changes = []
        if self._awaited and self._awaited_until_ms <= now_ms:
            return self._not_back()
        for key, (_, until_ms) in list(islice(self._loose.items(), SLICE_COUNT)):
            if self.is_loose(key) and until_ms <= now_ms:
                changes.append((key, None))
        if changes:
            return changes
        for key, (token, deadline_ms) in list(islice(self._deadlines_ms.items(), SLICE_COUNT)):
            if deadline_ms > now_ms:
                break
            owner = self._table.owner(key)
            if owner is None or owner.token != token:
                del self._deadlines_ms[key]
            elif self.is_member(key.group, owner.client_id, owner.nonce) and self.is_there(key):
                self._renew(key, owner, now_ms)
            elif self.is_loose(key):  # It has its own end.
                self._begin_time(key, owner.token, now_ms)
            else:
                changes.append((key, None))
        return changes

    def is_due(self, now_ms: int) -> bool:
        """Whether the time of any lock is over."""
        if self._awaited and self._awaited_until_ms <= now_ms:
            return True
        firsts = [next(iter(ends.values()), None) for ends in (self._loose, self._deadlines_ms)]
        return any(first is not None and first[1] <= now_ms for first in firsts)

    def on_granted(self, changes: Changes, now_ms: int) -> None:
        """Notes that the changes that `take` returned are appended."""
        for key, owner in changes:
            assert owner is not None
            self._renew(key, owner, now_ms)
        self._granted += len(changes)

    def on_expired(self, changes: Changes) -> None:
        """Notes that the changes that `expired` returned are appended."""
        for key, _ in changes:
            self._deadlines_ms.pop(key, None)
            self._awaited.pop(key, None)
            self._loose.pop(key, None)
        self._expired += len(changes)

    def on_gone(self, changes: Changes) -> None:
        """Notes that changes that `gone` returned are appended: these queues have no lock any more that could be loose."""
        for key, _ in changes:
            self._loose.pop(key, None)
        self.on_freed(len(changes))

    def on_freed(self, count: int) -> None:
        """Counts freed locks of members that are gone, once their record is appended."""
        self._freed += count

    def left_ms(self, key: LockKey, now_ms: int) -> int:
        """Milliseconds that a lock holds unless it is renewed."""
        _, deadline_ms = self._deadlines_ms.get(key, (0, now_ms + self.lock_ms))
        return max(deadline_ms - now_ms, 0)

    def may_commit(self, key: LockKey, token: int) -> bool:
        """Whether a commit with this token is accepted; 0: it has none. One without a token in a queue that is loose ends its lock."""
        owner = self._table.owner(key)
        return token == (owner.token if owner is not None else 0) or (not token and self.is_loose(key))

    def _begin_time(self, key: LockKey, token: int, now_ms: int) -> None:
        self._deadlines_ms.pop(key, None)
        self._deadlines_ms[key] = (token, now_ms + self.lock_ms)

    def _renew(self, key: LockKey, owner: LockOwner, now_ms: int) -> None:
        self._begin_time(key, owner.token, now_ms)
        self._awaited.pop(key, None)
        self._loose.pop(key, None)

    def _not_back(self) -> Changes:
        """The changes for at most SLICE_COUNT locks of members that did not come back after the start."""
        changes: Changes = []
        for key, token in list(islice(self._awaited.items(), SLICE_COUNT)):
            owner = self._table.owner(key)
            if owner is None or owner.token != token or self.is_member(key.group, owner.client_id, owner.nonce):
                del self._awaited[key]
            else:
                changes.append((key, None))
        return changes

    def counts(self) -> LockCounts:
        """Returns what metrics show. Any thread."""
        return LockCounts(
            max(self._table.count - len(self._loose), 0), self._granted, self._expired, self._freed, self.refused_commit_count
        )


def not_owned(group: str, topic: str, queue_ids: Sequence[int], owner: str) -> ServiceError:
    """Makes a FAILED_PRECONDITION error for a commit in queues that the member does not have, or without the tokens of their locks."""
    ids = ",".join(map(str, queue_ids))
    has = f"{owner} has it now" if owner else "nobody has it now"
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "QUEUE_NOT_OWNED",
        f"queue {ids} of {topic!r} is not this member's in {group} (any more): {has}. Forget what is left of it, and lock or claim it "
        "again. Nothing of the commit was stored",
        metadata={"consumer_group": group, "topic": topic, "queue_ids": ids, "owner": owner},
    )
