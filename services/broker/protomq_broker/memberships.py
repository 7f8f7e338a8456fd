"""Knows who is a member of which group, and which queues each member has. No I/O; the caller gives the time.

Each call of a member says what it consumes and which queues it has (`seen`). Then the call is held (`held`) and answered (`answered`).
Rules:

- A member whose held call breaks is gone at once. One that locks its queues stays, until the service has waited for it (`may_be_back`).
- One that was answered, and does not call again, is gone after `gap_ms`. One that never holds a call is gone after `expiry_ms`, RocketMQ's
  120 s.
- Names need not differ: a member is a name and a random number.
- A group has a version. It grows when its members change, when what they consume changes, and when two of them or none of them has a queue.
  So it does when a topic of theirs gets queues or loses some.
  When a member takes a free queue, the version stays: no other member wants it.
- Who was forgotten since this start, and comes back with queues that others have by now, or had since, is refused. Queues that it did
  not have when it was forgotten do not count: it claims them with this call, and is answered as any other.
- After a start, or a promotion, everybody is taken back with the queues that he says he has, while the list settles. Who comes later is
  refused if others have them, or had them since, and if his commits name his membership. A slave refuses nobody, since it takes no commits.
- A call that a newer one has overtaken, from before the member gave its queues up, changes nothing (`is_late`).
- A call of a membership that has ended by its own word, and arrives behind that, makes nobody a member (`has_left`). What was said is known
  for `expiry_ms`: no call is under way for longer. Another membership of that member, or a member that has started, is taken at once.
- A member may commit in the queues that it says it has, and by the membership that it says it has (`member_epoch`).
- After a start lists are incomplete for `settle_ms`, for groups that the store knows: their members are still coming back.
- At a slave a group's list is incomplete for `settle_ms` after its first member came, whenever that is: the others are still to come.
- Ownerless seconds of a group are the number of its queues that no member has, times seconds. Counting begins when the group has settled.
- Bounded: members of a group, groups, topics of a member, queues that a member has. So is what is remembered of the past: last owners of
  free queues, queues of members that are gone, and who has left.

Not thread-safe: the service has a lock. Only `may_commit` and `owner` may be called without it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from protomq.wire.topics import TopicClass, class_of
from protomq_runtime.errors import Code, ServiceError, invalid_argument, too_many

if TYPE_CHECKING:
    from protomq.v1.membership_service_pb2 import GroupMember, LeaveGroupRequest

MEMBERS_MAX: Final = 2_000
"""Most members of a group."""
GROUPS_MAX: Final = 10_000
TOPICS_MAX: Final = 256
"""Most topics of a member."""
QUEUES_MAX: Final = 16_384
"""Most queues that a member has at one broker."""
LEFT_MAX: Final = 20_000
"""Most members that have left of which that is known."""
LAST_OWNERS_MAX: Final = 100_000
"""Most free queues of groups whose last owner is remembered, the newest; the same number as locks. And most queues of members that are
gone whose former owner is remembered."""
TEXT_MAX_BYTES: Final = 255
FILTER_MAX_BYTES: Final = 8_192

MemberKey = tuple[str, int]
"""Name and random number."""
Queue = tuple[str, int]
"""Topic and queue id."""


@dataclass(slots=True)
class Member:
    """One member."""

    said: GroupMember
    peer: str
    since_ms: int
    seen_ms: int
    held_count: int = 0
    expires_ms: int = 0
    """When the member counts as gone, if it holds no call."""
    queues: frozenset[Queue] = frozenset()


class _Departed(NamedTuple):
    """What a member had when it was forgotten, in which of its memberships."""

    member_epoch: int
    queues: frozenset[Queue]

    @property
    def cost(self) -> int:
        """What it counts of LAST_OWNERS_MAX: one without queues costs memory, too."""
        return len(self.queues) + 1


@dataclass(slots=True)
class Group:
    """One group."""

    version: int
    members: dict[MemberKey, Member] = field(default_factory=dict)
    owners: dict[Queue, int] = field(default_factory=dict)
    """Number of members that have each queue. A queue that nobody has is not in it."""
    settled_ms: int = 0
    """From when on its list is complete."""
    counted_ms: int = 0
    ownerless_queues: int = 0
    consumers: Counter[str] = field(default_factory=Counter)
    """Number of members that consume each topic."""
    kinds: Counter[tuple[object, ...]] = field(default_factory=Counter)
    """Number of members that are alike, by what `difference` compares."""
    beside: str = ""
    """Who consumes under the group's name and is no member, for people."""

    def said(self) -> list[GroupMember]:
        """The members, sorted by name."""
        return [self.members[key].said for key in sorted(self.members)]

    @property
    def are_alike(self) -> bool:
        """Whether no member differs from another."""
        return len(self.kinds) < 2


class Memberships:
    """The groups of a broker.

    `queue_count` returns how many queues of a topic can be read here. `known_groups`: groups that had offsets when the broker started.
    `takes_commits`: the broker is no slave.
    """

    def __init__(
        self,
        started_ms: int,
        *,
        settle_ms: int,
        expiry_ms: int,
        gap_ms: int,
        queue_count: Callable[[str], int],
        known_groups: Collection[str],
        takes_commits: bool = True,
    ) -> None:
        self._settle_ms = settle_ms
        self._settled_ms = started_ms + settle_ms
        self.expiry_ms = expiry_ms
        self.gap_ms = min(gap_ms, expiry_ms)
        self.queue_count = queue_count
        self._known_groups = frozenset(known_groups)
        self._takes_commits = takes_commits
        self._groups: dict[str, Group] = {}
        self._consuming: dict[str, list[str]] = {}
        """The groups that consume each topic. Most topics have one, and a set would take 150 octets more."""
        self._counted: dict[str, int] = {}
        """Queues of each topic that is consumed, by which free queues are counted: as many as it had at the last `topics_changed`."""
        self._queues: dict[str, list[Queue]] = {}
        """Those queues, one object each: groups that consume a topic share them. A tuple and a name for each took 4 KiB of 16 queues."""
        self._route_changes: Counter[str] = Counter()
        """How often the route of each consumed topic has changed, as far as name servers told; begins at any number."""
        self._last_owners: dict[tuple[str, Queue], MemberKey] = {}
        """Who was the last to have each free queue of each group; the newest stands last."""
        self._departed: dict[tuple[str, MemberKey], _Departed] = {}
        """Members that are gone; the newest stands last."""
        self._departed_cost = 0
        self._left: dict[tuple[str, MemberKey], tuple[float, int]] = {}
        """Up to which of its memberships each has left, and until when that is known; the newest stands last."""
        self._versions = itertools.count(1)
        self._expires_ms: float = math.inf
        """Before that no member is gone that is there now: those at rest are not looked through at each tick."""
        self._with_others_beside: set[str] = set()
        self.rebalance_count = 0
        """Number of times that a member came or went."""
        self.refused_commit_count = 0
        """Commits that were refused because they named a membership that is over, or queues that the member does not have."""
        self.ownerless_ms = 0
        """Queues without an owner times milliseconds, over all groups."""

    def is_late(self, name: str, said: GroupMember | LeaveGroupRequest) -> bool:
        """Whether the member has given its queues up, and joined again, since it made this call."""
        member = self._find(name, (said.client_id, said.nonce))
        return member is not None and said.member_epoch < member.said.member_epoch

    def note_left(self, name: str, said: LeaveGroupRequest, now_ms: int) -> None:
        """Takes that a member has said that it goes, known or not: its first call may still be on its way."""
        if not said.nonce or not 0 < len(said.client_id.encode()) <= TEXT_MAX_BYTES:
            return  # It can be no member, and what is known of those that leave is bounded.
        key = (name, (said.client_id, said.nonce))
        last_epoch = max(math.inf if said.is_final else said.member_epoch, self._left.pop(key, (0, 0))[0])
        if last_epoch:
            self._left[key] = last_epoch, now_ms + self.expiry_ms
        while self._left:
            oldest = next(iter(self._left))
            if self._left[oldest][1] > now_ms and len(self._left) <= LEFT_MAX:
                break
            del self._left[oldest]

    def has_left(self, name: str, said: GroupMember, now_ms: int) -> bool:
        """Whether the membership of this call has ended by the member's own word."""
        last_epoch, until_ms = self._left.get((name, (said.client_id, said.nonce)), (0, 0))
        return said.member_epoch <= last_epoch and now_ms < until_ms

    def knows(self, name: str, said: GroupMember) -> bool:
        """Whether it is a member, in the membership that it says."""
        member = self._find(name, (said.client_id, said.nonce))
        return member is not None and member.said.member_epoch == said.member_epoch

    def seen(
        self, name: str, said: GroupMember, peer: str, now_ms: int, *, rejoins: bool, was_known: bool = False
    ) -> bool:
        """Takes a call of a member, not a late one. Returns whether there is news for the group.

        `rejoins`: the member was known here since this broker started; `was_known`: it was, perhaps before. Raises ServiceError:
        MEMBER_UNKNOWN if it is not known any more and others have its queues by now, or had them since; TOO_MANY above a maximum.
        """
        group, key = self._groups.get(name), (said.client_id, said.nonce)
        member = group.members.get(key) if group is not None else None
        if group is not None and member is not None and said == member.said:
            # At rest it says the same again and again.
            self._count_ownerless(group, now_ms)
            member.peer, member.seen_ms = peer, now_ms
            self._expire_at(member, now_ms + self.expiry_ms)
            return False
        queues = self._queues_of(said)
        may_be_over = rejoins
        if not rejoins and was_known and said.member_epoch and self._takes_commits:
            may_be_over = name in self._known_groups and now_ms >= self._settled_ms
        if member is None and may_be_over and self._is_over(name, said, queues):
            raise unknown_member(name, said)
        if group is None:
            if len(self._groups) >= GROUPS_MAX:
                raise too_many("groups", GROUPS_MAX, f"this broker has members of {GROUPS_MAX} groups already")
            settled_ms = self._settles_until_ms(name, now_ms)
            group = self._groups[name] = Group(next(self._versions), settled_ms=settled_ms, counted_ms=now_ms)
        if member is None:
            if len(group.members) >= MEMBERS_MAX:
                raise too_many("members", MEMBERS_MAX, f"the group {name} has {MEMBERS_MAX} members already")
            has_news = True
            self._forget_departed(name, key)
            self._count_ownerless(group, now_ms)
            member = group.members[key] = Member(said, peer, now_ms, now_ms)
            self._add_interests(name, group, said)
            self.rebalance_count += 1
        else:
            has_news = interests(said) != interests(member.said)
            self._count_ownerless(group, now_ms)
            if has_news:
                self._add_interests(name, group, said)
                self._drop_interests(name, group, member.said)
        member.said, member.peer, member.seen_ms = said, peer, now_ms
        self._expire_at(member, now_ms + self.expiry_ms)
        has_news |= self._change_queues(name, group, member, queues)
        if has_news:
            group.version = next(self._versions)
        return has_news

    def says_the_same(self, name: str, said: GroupMember) -> bool:
        """Whether the member said exactly this in its last call, so that it need not be checked. Any thread, without the lock."""
        member = self._find(name, (said.client_id, said.nonce))
        return member is not None and member.said == said

    def held(self, name: str, key: MemberKey) -> None:
        """Notes that a call of the member is held."""
        if (member := self._find(name, key)) is not None:
            member.held_count += 1

    def answered(self, name: str, key: MemberKey, now_ms: int) -> bool:
        """Notes that a held call of the member was answered. The member will call again. Returns whether it is one."""
        member = self._find(name, key)
        if member is None:
            return False
        member.held_count -= 1
        member.seen_ms = now_ms
        self._expire_at(member, now_ms + self.gap_ms)
        return True

    def broke(self, name: str, key: MemberKey, now_ms: int) -> bool:
        """Notes that a held call of the member broke. It is gone, unless it holds another call or may be back. Returns whether it is."""
        member = self._find(name, key)
        if member is None:
            return False
        member.held_count -= 1
        if member.held_count > 0:
            return False
        if not self.may_be_back(name, key):
            return self.left(name, key, now_ms)
        member.seen_ms = now_ms
        self._expire_at(member, now_ms + self.gap_ms)
        return False

    def may_be_back(self, name: str, key: MemberKey) -> bool:
        """Whether a member that holds no call may stay for a moment: it locks its queues, so nobody else could consume them yet."""
        member = self._find(name, key)
        return member is not None and member.held_count <= 0 and member.said.locks_queues

    def left(self, name: str, key: MemberKey, now_ms: int) -> bool:
        """Takes the member out. Returns whether there is news."""
        group = self._groups.get(name)
        if group is None or key not in group.members:
            return False
        self._count_ownerless(group, now_ms)
        member = group.members.pop(key)
        self._note_departed(name, key, _Departed(member.said.member_epoch, member.queues))
        self._change_queues(name, group, member, frozenset())
        self._drop_interests(name, group, member.said)
        group.version = next(self._versions)
        self.rebalance_count += 1
        if not group.members:
            del self._groups[name]
        return True

    def expire(self, now_ms: int) -> list[tuple[str, MemberKey]]:
        """Takes out all members that were not heard of in time, and returns them with their groups."""
        if now_ms < self._expires_ms:
            return []
        late, self._expires_ms = [], math.inf
        for name, group in self._groups.items():
            for key, member in group.members.items():
                if member.held_count > 0:
                    continue
                if member.expires_ms <= now_ms:
                    late.append((name, key))
                else:
                    self._expires_ms = min(self._expires_ms, member.expires_ms)
        for name, key in late:
            self.left(name, key, now_ms)
        return late

    def topics_changed(self, now_ms: int) -> list[str]:
        """Takes a change of topics. Returns the groups for which the number of queues is news, whether a queue is free or not.

        Each group that starts makes a topic for its retries, so only groups that consume a changed topic are counted again.
        """
        counts = {topic: count for topic, before in self._counted.items() if (count := self.queue_count(topic)) != before}
        changed = list(dict.fromkeys(name for topic in counts for name in self._consuming[topic]))
        for topic, count in counts.items():
            was = self._counted[topic]
            self._counted[topic] = count
            self._share_queues(topic, count)
            for name in self._consuming[topic]:
                group = self._groups[name]
                self._count_ownerless(group, now_ms)
                change = _free_among(group, topic, range(was, count)) - _free_among(group, topic, range(count, was))
                group.ownerless_queues += change
        for name in changed:
            self._groups[name].version = next(self._versions)
        return changed

    def routes_changed(self, topics: Collection[str] | None) -> list[str]:
        """Takes that other brokers have changed the routes of topics; None: it may be any. Returns the groups that are to hear of it."""
        found = [topic for topic in (self._consuming if topics is None else topics) if topic in self._consuming]
        self._route_changes.update(found)
        changed = sorted({name for topic in found for name in self._consuming[topic]})
        for name in changed:
            self._groups[name].version = next(self._versions)
        return changed

    def route_changes(self, topic: str) -> int:
        """Returns a number that is another one each time that the route of a consumed topic has changed, or may have."""
        return self._route_changes[topic]

    def beside_changed(self, texts: Mapping[str, str]) -> list[str]:
        """Takes who consumes beside members, by group. Returns the groups whose members are to hear of it."""
        changed = []
        for name in self._with_others_beside - texts.keys():
            if (group := self._groups.get(name)) is not None:
                group.beside = ""
        self._with_others_beside = set(texts)
        for name, text in texts.items():
            group = self._groups.get(name)
            if group is not None and group.beside != text:
                group.beside = text
                group.version = next(self._versions)
                changed.append(name)
        return changed

    def taken(self, name: str, key: MemberKey) -> dict[str, list[int]]:
        """Returns the queues that the member has and another one, too: queue ids by topic, in order."""
        found: dict[str, list[int]] = {}
        group = self._groups.get(name)
        if group is not None:
            for topic, queue_id in sorted(queue for queue in group.members[key].queues if group.owners[queue] > 1):
                found.setdefault(topic, []).append(queue_id)
        return found

    def may_commit(
        self, name: str, key: MemberKey, member_epoch: int, queues: Iterable[Queue]
    ) -> list[Queue] | None:
        """Returns those of the queues that the member does not have; None: there is no such membership. Any thread, without the lock.

        The service may hold its lock while it makes many answers, and the send lane must not wait for those.
        """
        member = self._find(name, key)
        if member is None or member.said.member_epoch != member_epoch:
            return None
        has = member.queues
        return [queue for queue in queues if queue not in has]

    def owner(self, name: str, queue: Queue) -> str:
        """Returns the name of a member that has the queue; "": nobody has it. Any thread, without the lock."""
        group = self._groups.get(name)
        members = list(group.members.values()) if group is not None else []
        return next((member.said.client_id for member in members if queue in member.queues), "")

    def find(self, name: str) -> Group | None:
        """Returns the group if it has members."""
        return self._groups.get(name)

    @property
    def group_count(self) -> int:
        """Number of groups with members."""
        return len(self._groups)

    def groups(self) -> Iterator[tuple[str, Group]]:
        """Yields all groups with members."""
        return iter(list(self._groups.items()))

    def settling_ms(self, name: str, now_ms: int) -> int:
        """Milliseconds for which the list of a group may still be incomplete."""
        group = self._groups.get(name)
        if group is not None:
            return max(group.settled_ms - now_ms, 0)
        return max(self._settled_ms - now_ms, 0) if name in self._known_groups else 0

    def ownerless_ms_upto(self, now_ms: int) -> int:
        """Queues without an owner times milliseconds, over all groups, until now."""
        for group in self._groups.values():
            self._count_ownerless(group, now_ms)
        return self.ownerless_ms

    def _expire_at(self, member: Member, expires_ms: int) -> None:
        member.expires_ms = expires_ms
        self._expires_ms = min(self._expires_ms, expires_ms)

    def _settles_until_ms(self, name: str, now_ms: int) -> int:
        """From when on the list of a group is complete whose first member comes now."""
        if not self._takes_commits:
            return now_ms + self._settle_ms
        return self._settled_ms if name in self._known_groups else 0

    def _find(self, name: str, key: MemberKey) -> Member | None:
        group = self._groups.get(name)
        return group.members.get(key) if group is not None else None

    def _is_over(self, name: str, said: GroupMember, queues: frozenset[Queue]) -> bool:
        """Whether others have queues of a member that is not known any more, or had them since it was."""
        key = (said.client_id, said.nonce)
        departed = self._departed.get((name, key))
        if departed is not None and departed.member_epoch == said.member_epoch:
            queues &= departed.queues
        return self._have_others(name, queues) or self._had_others(name, key, queues)

    def _note_departed(self, name: str, key: MemberKey, departed: _Departed) -> None:
        self._departed[name, key] = departed
        self._departed_cost += departed.cost
        while self._departed_cost > LAST_OWNERS_MAX:
            self._forget_departed(*next(iter(self._departed)))

    def _forget_departed(self, name: str, key: MemberKey) -> None:
        departed = self._departed.pop((name, key), None)
        if departed is not None:
            self._departed_cost -= departed.cost

    def _have_others(self, name: str, queues: frozenset[Queue]) -> bool:
        """Whether members have any of the queues."""
        group = self._groups.get(name)
        return group is not None and not queues.isdisjoint(group.owners)

    def _had_others(self, name: str, key: MemberKey, queues: Iterable[Queue]) -> bool:
        """Whether any of the queues is free, and somebody else was the last to have it."""
        return any(self._last_owners.get((name, queue), key) != key for queue in queues)

    def _note_last_owner(self, name: str, queue: Queue, key: MemberKey) -> None:
        self._last_owners[name, queue] = key
        if len(self._last_owners) > LAST_OWNERS_MAX:
            del self._last_owners[next(iter(self._last_owners))]

    def _change_queues(self, name: str, group: Group, member: Member, queues: frozenset[Queue]) -> bool:
        """Sets the queues that the member has now. Returns whether a queue is free now, or has two owners."""
        has_news = False
        owners = group.owners
        for queue in member.queues - queues:
            owners[queue] -= 1
            if not owners[queue]:
                del owners[queue]
                self._note_last_owner(name, queue, (member.said.client_id, member.said.nonce))
                group.ownerless_queues += self._counts(group, queue)
                has_news = True
        for queue in queues - member.queues:
            owners[queue] = owners.get(queue, 0) + 1
            has_news |= owners[queue] > 1
            if owners[queue] == 1:
                self._last_owners.pop((name, queue), None)
                group.ownerless_queues -= self._counts(group, queue)
        member.queues = queues
        return has_news

    def _count_ownerless(self, group: Group, now_ms: int) -> None:
        begin_ms = max(group.counted_ms, group.settled_ms)
        if now_ms > begin_ms:
            self.ownerless_ms += group.ownerless_queues * (now_ms - begin_ms)
        group.counted_ms = now_ms

    def _free_count(self, group: Group, topic: str) -> int:
        return _free_among(group, topic, range(self._counted[topic]))

    def _counts(self, group: Group, queue: Queue) -> bool:
        """Whether a queue is one of those that should have an owner."""
        return group.consumers[queue[0]] > 0 and queue[1] < self._counted[queue[0]]

    def _add_interests(self, name: str, group: Group, said: GroupMember) -> None:
        group.kinds[kind_of(said)] += 1
        for topic in said.topics:
            if not group.consumers[topic.topic]:
                self._begin_consuming(name, topic.topic)
                group.ownerless_queues += self._free_count(group, topic.topic)
            group.consumers[topic.topic] += 1

    def _begin_consuming(self, name: str, topic: str) -> None:
        groups = self._consuming.setdefault(topic, [])
        if not groups:
            self._counted[topic] = count = self.queue_count(topic)
            self._share_queues(topic, count)
            # Another number than it had before: nobody has counted meanwhile.
            self._route_changes[topic] = next(self._versions)
        groups.append(name)

    def _share_queues(self, topic: str, count: int) -> None:
        shared = self._queues.setdefault(topic, [])
        shared += [(topic, queue_id) for queue_id in range(len(shared), count)]
        del shared[count:]

    def _queues_of(self, said: GroupMember) -> frozenset[Queue]:
        """Returns the queues that a member says it has."""
        queues: list[Queue] = []
        for had in said.topics:
            topic, shared = had.topic, self._queues.get(had.topic, [])
            queues += [shared[i] if i < len(shared) else (topic, i) for i in had.queue_ids]
        return frozenset(queues)

    def _end_consuming(self, name: str, topic: str) -> None:
        groups = self._consuming[topic]
        groups.remove(name)
        if not groups:
            del self._consuming[topic], self._counted[topic], self._queues[topic], self._route_changes[topic]

    def _drop_interests(self, name: str, group: Group, said: GroupMember) -> None:
        kind = kind_of(said)
        group.kinds[kind] -= 1
        if not group.kinds[kind]:
            del group.kinds[kind]
        for topic in said.topics:
            group.consumers[topic.topic] -= 1
            if not group.consumers[topic.topic]:
                del group.consumers[topic.topic]
                group.ownerless_queues -= self._free_count(group, topic.topic)
                self._end_consuming(name, topic.topic)


def _free_among(group: Group, topic: str, queue_ids: range) -> int:
    return sum((topic, queue_id) not in group.owners for queue_id in queue_ids)


def unknown_member(name: str, said: GroupMember) -> ServiceError:
    """Returns what a member gets that is none any more."""
    return _member_unknown(
        name,
        said,
        f"{said.client_id} is no member of {name} any more: it was not heard of in time, and others may have its queues. "
        "Give them up, and join again",
    )


def left_member(name: str, said: GroupMember) -> ServiceError:
    """Returns what a call gets that arrives behind the leave of its member."""
    return _member_unknown(
        name,
        said,
        f"{said.client_id} has left {name}, and this call of it came behind that. Who joins again does so with a higher `member_epoch`, "
        "or with another `nonce` after a final leave",
    )


def _member_unknown(name: str, said: GroupMember, text: str) -> ServiceError:
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "MEMBER_UNKNOWN",
        text,
        metadata={"consumer_group": name, "client_id": said.client_id},
    )


def check_member(said: GroupMember) -> None:
    """Checks what a member says of itself. Raises ServiceError INVALID_ARGUMENT."""
    if not said.client_id:
        raise invalid_argument("member.client_id", "is missing")
    for name in ("client_id", "allocation", "machine_room", "client_version"):
        if len(getattr(said, name).encode()) > TEXT_MAX_BYTES:
            raise invalid_argument(f"member.{name}", f"has more than {TEXT_MAX_BYTES} octets")
    if not said.nonce:
        raise invalid_argument("member.nonce", "is a random number, not 0")
    if len(said.topics) > TOPICS_MAX:
        raise invalid_argument("member.topics", f"has {len(said.topics)} topics, {TOPICS_MAX} at most are allowed")
    names = [topic.topic for topic in said.topics]
    if len(set(names)) < len(names):
        raise invalid_argument("member.topics", "has a topic twice")
    for topic in said.topics:
        if not topic.topic or len(topic.topic.encode()) > TEXT_MAX_BYTES:
            raise invalid_argument("member.topics", f"has a topic without a name, or of more than {TEXT_MAX_BYTES} octets")
        if len(topic.filter.encode()) > FILTER_MAX_BYTES:
            raise invalid_argument("member.topics", f"has a filter of more than {FILTER_MAX_BYTES} octets")
        if any(queue_id < 0 for queue_id in topic.queue_ids):
            raise invalid_argument("member.topics", "has a queue id below 0")
    if sum(len(topic.queue_ids) for topic in said.topics) > QUEUES_MAX:
        raise invalid_argument("member.topics", f"has more than {QUEUES_MAX} queues")


def difference(own: GroupMember, members: Iterable[GroupMember]) -> str:
    """Describes, for people, how the first member that differs from `own` differs; "" if all are alike.

    The group's retry topic does not count: a member may subscribe to it or leave it to others.
    """
    for other in members:
        if (other.client_id, other.nonce) == (own.client_id, own.nonce):
            continue
        if other.allocation != own.allocation:
            return f"{other.client_id} shares queues out by {other.allocation!r}, {own.client_id} by {own.allocation!r}"
        if _locks(own) is not None and _locks(other) is not None and _locks(own) != _locks(other):
            locking, free = (own, other) if own.locks_queues else (other, own)
            return (
                f"{locking.client_id} locks its queues, as orderly consumers do, {free.client_id} does not, so what it has of the group's "
                "queues is in no order"
            )
        mine, theirs = _filters(own), _filters(other)
        for topic in sorted(mine.keys() | theirs.keys()):
            if topic not in theirs:
                return f"{other.client_id} does not consume {topic}, {own.client_id} does"
            if topic not in mine:
                return f"{other.client_id} consumes {topic}, {own.client_id} does not"
            if mine[topic] != theirs[topic]:
                return (
                    f"{other.client_id} wants {theirs[topic] or 'all messages'} of {topic}, "
                    f"{own.client_id} {mine[topic] or 'all messages'}"
                )
    return ""


def _locks(said: GroupMember) -> bool | None:
    """Clients of earlier versions do not say it."""
    return said.locks_queues if said.HasField("locks_queues") else None


def _filters(said: GroupMember) -> dict[str, str]:
    return {
        topic.topic: topic.filter
        for topic in said.topics
        if class_of(topic.topic) is not TopicClass.RETRY
    }


def kind_of(said: GroupMember) -> tuple[object, ...]:
    """What `difference` compares: members of one kind are alike."""
    return said.allocation, _locks(said), tuple(sorted(_filters(said).items()))


def interests(said: GroupMember) -> tuple[object, ...]:
    """What other members need to know of a member, apart from its queues."""
    return (
        said.allocation,
        sorted((topic.topic, topic.filter, topic.route_number) for topic in said.topics),
        said.machine_room,
    )
