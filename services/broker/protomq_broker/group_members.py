"""Remembers who pulls which queue for a group, so that the broker can warn two members that both get all messages.

If the members of a group do not share queues, each member that subscribes to a topic gets all its messages. This module knows no
registrations, only pulls: two names that pull one queue in turns are two members.

It also remembers who pulled last for each group: the broker refuses to delete a group that is in use. And who consumes under a group's name
beside its members, by pop or in broadcast mode, so that the broker can warn them. Each message comes to both.

Rules:
- A restart is no second member: the old name does not pull again. Nor are members with queues of their own.
- A pair of members is remembered for a minute after the hold of its last turn, not over a restart. At most 100,000 queues of groups are.
- A group is in use for a minute after the end of the last hold that was asked for. Who says that it pulls no more does not count. No more
  than 20,000 who pulled are remembered, and 1,000 who pull no more: a last pull of theirs may come late.

Any thread.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from protomq_runtime.clock import Clock

REMEMBERED_MS: Final = 60_000
"""Beyond the hold that was asked for: a member that waits for messages pulls again by then."""
MEMBER_SIZE_MAX: Final = 255
"""Most characters of a name in pulls."""
QUEUES_MAX: Final = 100_000
GROUPS_MAX: Final = 10_000
USERS_MAX: Final = 20_000
LEFT_MAX: Final = 1_000
MEMBERS_MAX: Final = 8
"""Most members that are remembered for one queue."""

Key = tuple[str, str, int]
"""Group, topic, queue id."""


class _Queue:
    __slots__ = ("latest", "shared_until_ms", "until_ms")

    def __init__(self, member: str, until_ms: int) -> None:
        self.latest = member
        self.until_ms: dict[str, int] = {member: until_ms}
        """Until when each member is expected to pull again; the latest pull stands last."""
        self.shared_until_ms = 0


class GroupMembers:
    """The members that have pulled lately, by group and queue."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._queues: dict[Key, _Queue | tuple[str, int]] = {}
        """Nearly all queues have one member: of those only its name, and until when it is expected to pull again."""
        self._users: dict[tuple[str, str], int] = {}
        """Until when each one that pulled for a group, by the group's name and its own, uses that; the latest stands last."""
        self._left: dict[tuple[str, str], None] = {}
        """Who pulls no more, by group and name; the latest stands last."""
        self._beside: dict[str, tuple[str, int]] = {}
        """Who consumes beside the members of a group, for people, and until when; the latest stands last."""
        self._alone = ("", 0)
        """The last value of a queue with one member: those that are pulled together have one tuple."""
        self._lock = threading.Lock()

    def pulled(self, key: Key, member: str, hold_ms: int = 0) -> None:
        """A member pulls a queue, and may be held for `hold_ms`."""
        now_ms = self._clock.monotonic_ms()
        until_ms = now_ms + hold_ms + REMEMBERED_MS
        with self._lock:
            queue = self._queues.get(key)
            if queue is None and len(self._queues) >= QUEUES_MAX:
                del self._queues[next(iter(self._queues))]
            if queue is None or (isinstance(queue, tuple) and queue[0] == member):
                if self._alone != (member, until_ms):
                    self._alone = (member, until_ms)
                self._queues[key] = self._alone
                return
            if isinstance(queue, tuple):
                queue = self._queues[key] = _Queue(*queue)
            before_ms = queue.until_ms.pop(member, None)
            if queue.latest != member:
                if before_ms is not None and now_ms <= before_ms:
                    queue.shared_until_ms = until_ms
                queue.latest = member
            queue.until_ms[member] = until_ms
            if len(queue.until_ms) > MEMBERS_MAX:
                del queue.until_ms[next(iter(queue.until_ms))]

    def seen(self, group: str, name: str, hold_ms: int) -> None:
        """Notes that a member pulls for a group and may be held for `hold_ms`."""
        now_ms, user = self._clock.monotonic_ms(), (group, name)
        with self._lock:
            if user in self._left:
                return
            self._users.pop(user, None)
            self._users[user] = now_ms + hold_ms + REMEMBERED_MS
            oldest, until_ms = next(iter(self._users.items()))
            if until_ms <= now_ms or len(self._users) > USERS_MAX:
                del self._users[oldest]

    def left(self, group: str, name: str) -> None:
        """Notes that a member pulls no more for a group. Another one has another name."""
        with self._lock:
            self._users.pop((group, name), None)
            self._left[group, name] = None
            if len(self._left) > LEFT_MAX:
                del self._left[next(iter(self._left))]

    def came_beside(self, group: str, how: str, peer: str, hold_ms: int = 0) -> None:
        """Notes that somebody consumes under the group's name, and not as a member; may be held for `hold_ms`. The first one is named."""
        now_ms = self._clock.monotonic_ms()
        with self._lock:
            text, until_ms = self._beside.pop(group, ("", 0))
            if now_ms >= until_ms:
                host = peer.rpartition(":")[0] or peer
                text = f"{how} at {host} consumes under the group's name and shares nothing with its members, so each message comes to both"
            self._beside[group] = (text, now_ms + hold_ms + REMEMBERED_MS)
            if len(self._beside) > GROUPS_MAX:
                del self._beside[next(iter(self._beside))]

    def beside(self) -> dict[str, str]:
        """Returns who consumes beside the members, for people, by group."""
        with self._lock:
            if not self._beside:
                return {}
            now_ms = self._clock.monotonic_ms()
            self._beside = {group: known for group, known in self._beside.items() if now_ms < known[1]}
            return {group: text for group, (text, _) in self._beside.items()}

    def user_of(self, group: str) -> str:
        """Returns the name of the member that pulled last for the group, of those that use it; "": nobody does."""
        now_ms = self._clock.monotonic_ms()
        with self._lock:
            users = reversed(self._users.items())
            return next((name for (used, name), until_ms in users if used == group and now_ms < until_ms), "")

    def other(self, key: Key, member: str) -> str:
        """Returns the name of another member that pulls the queue at the same time; "" if there is none."""
        queue = self._queues.get(key)
        if queue is None or isinstance(queue, tuple) or not queue.shared_until_ms:
            return ""
        with self._lock:
            if self._clock.monotonic_ms() >= queue.shared_until_ms:
                return ""
            return next((name for name in reversed(queue.until_ms) if name != member), "")
