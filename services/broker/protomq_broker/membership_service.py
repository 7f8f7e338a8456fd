"""MembershipService: holds the calls of members of consumer groups, and answers them when members or their queues change.

`memberships.py` has the state, `member_questions.py` has the callers who want a member to describe itself; this module has the members'
calls. Each member has one held call, its latest. The service gathers news for GATHER_MS: a hundred members who come together get one
answer each, not a hundred. The time grows with the group: each answer has all members, so an answer to everybody costs the square of
their number.

It runs on the consumer lane, which may have several threads. A lock protects the state; each call is answered on its own lane.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from google.protobuf.message import DecodeError

from protomq.v1.membership_service_pb2 import (
    DescribeMemberRequest,
    HoldMembershipRequest,
    HoldMembershipResponse,
    LeaveGroupRequest,
    LeaveGroupResponse,
    ListedMember,
    ListMembersRequest,
    ListMembersResponse,
    TakenQueues,
    TopicQueueCount,
)
from protomq.wire.texts import one_line
from protomq_runtime.dispatch import never_shed, raw
from protomq_runtime.errors import (
    SHUTTING_DOWN,
    Code,
    ServiceError,
    invalid_argument,
    unparsable,
)
from protomq_runtime.regions import Region, SharedBytes

from .group_members import MEMBER_SIZE_MAX
from .member_questions import (
    DESCRIPTION_WAIT_MAX_MS,
    DESCRIPTION_WAIT_MS,
    MemberId,
    MemberQuestions,
    WaitingCall,
)
from .memberships import (
    Group,
    MemberKey,
    Memberships,
    check_member,
    difference,
    kind_of,
    left_member,
    unknown_member,
)
from .said_once import SaidOnce
from .store_errors import tells_store_errors, to_service_error
from .topic_access import check_group_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from protomq.v1.membership_service_pb2 import GroupMember
    from protomq_runtime.call import Call, CallContext, CallLane
    from protomq_runtime.clock import Clock
    from protomq_runtime.server import Server

log = logging.getLogger("protomq.broker")

GATHER_MS: Final = 30.0
"""How long the service gathers news before it answers. A member that joins waits this much longer for the others."""
GATHER_MAX_MS: Final = 500.0
MEMBER_GATHER_MS: Final = 0.5
"""By how much longer for each member beyond SMALL_COUNT: 1,000 members' answers have 90 MB."""
SMALL_COUNT: Final = 16
"""Up to this number of members, one that joins is answered at once, so that a program starts quickly. In a larger group it is answered
with the news."""
ANSWERS_MAX: Final = 50
"""Most calls that a lane answers in one turn. An answer is made only then: all at once, those of 1,000 members took 90 MB."""
SHARED_MIN_BYTES: Final = 32 << 10
"""From this size on answers share the list of members, instead of a copy each."""
BACK_MS: Final = 400.0
"""How long the locks of a member whose connection broke wait for it alone: it calls again after 100 ms, if it lives. For that long it stays
a member, so that nobody claims its queues. From then on they are whose who asks first."""
TOGETHER_MS: Final = 250.0
"""Long holds end at multiples of this. For 1,000 members at rest the lane would else wake up twice for each of 67 calls a second."""
TOGETHER_MIN_MS: Final = 5_000.0
"""The shortest hold that ends earlier for that."""
TICK_MS: Final = 500.0
"""Interval at which the service looks for members that were not heard of in time."""

MAKE_ALIKE: Final = "Topics, filters and settings have to be the same in all members: else messages come to nobody, or twice"


class _Waiter(WaitingCall):
    """The held call of a member."""

    __slots__ = ()

    @property
    def request(self) -> HoldMembershipRequest:
        """What the member said, read again: parsed, it takes seven times the memory of its octets."""
        return HoldMembershipRequest.FromString(bytes(self.call.payload))


class _Answer(NamedTuple):
    """What a call is answered with: arguments of `Call.answer`."""

    payload: bytes
    regions: tuple[Region, ...] = ()
    regions_size_bytes: int = 0


class _Encoded(NamedTuple):
    """The encoded list of a group's members, as answers contain it."""

    version: int
    members: bytes
    """Empty where answers share the list."""
    shared: tuple[Region, ...]
    of_each_kind: list[GroupMember]
    """The first member of each kind, by name: `difference` needs no others."""


class MembershipCounts(NamedTuple):
    """The counts that the metrics page shows."""

    groups: int
    members: int
    rebalances: int
    ownerless_queues: int
    ownerless_s: float
    refused_commits: int


class MembershipService:
    """Implements protomq.v1.MembershipService."""

    def __init__(
        self,
        memberships: Memberships,
        clock: Clock,
        *,
        broker_start: int,
        hold_max_ms: int,
        beside: Callable[[], Mapping[str, str]],
        tells_routes: Callable[[], bool] = lambda: False,
    ) -> None:
        """`beside`: who consumes under the name of which group and is no member, for people. `tells_routes`: name servers say what
        `routes_changed` takes. Any thread calls it.
        """
        self._memberships = memberships
        self._clock = clock
        self._broker_start = broker_start
        self._hold_max_ms = hold_max_ms
        self._beside = beside
        self._tells_routes = tells_routes
        self._lock = threading.Lock()
        self._waiters: dict[str, dict[MemberKey, _Waiter]] = {}
        self._between: dict[MemberId, Call] = {}
        """The last call of each member that was answered and has not called again yet."""
        self._awaited: dict[MemberId, object] = {}
        """Members whose connection broke a moment ago, each with what tells this break from a later one."""
        self._encoded: dict[str, _Encoded] = {}
        self._questions = MemberQuestions(self._lock)
        self._news: set[str] = set()
        self._looks_at_topics = False
        self._is_stopping = False
        self._lane: CallLane | None = None
        self._said = SaidOnce()
        self._tell_gone: Callable[[str, str, int, bool], None] = lambda *_: None
        self._tell_left: Callable[[str, str], None] = lambda *_: None

    def listen_for_gone(self, listener: Callable[[str, str, int, bool], None]) -> None:
        """Registers a listener, called under the lock with group, name and number of a member that is gone. And with whether it may be back
        in a moment, since only its connection broke. Call before the broker runs.
        """
        self._tell_gone = listener

    def listen_for_left(self, listener: Callable[[str, str], None]) -> None:
        """Registers a listener, called with a group and the name in pulls of a member that pulls no more. Call before the broker runs."""
        self._tell_left = listener

    def is_member(self, group: str, client_id: str, nonce: int) -> bool:
        """Whether this broker knows such a member. Any thread."""
        with self._lock:
            known = self._memberships.find(group)
            return known is not None and (client_id, nonce) in known.members

    def a_member(self, group: str) -> str:
        """Returns the name of a member of the group; "": there is none here. Any thread."""
        with self._lock:
            known = self._memberships.find(group)
            return min(known.members)[0] if known is not None else ""

    def start(self, server: Server) -> None:
        """The server calls this hook before it accepts connections. The first consumer lane gets the work that answers no call."""
        self.use_lane(server.pools["consumer"].lanes[0])

    def use_lane(self, lane: CallLane) -> None:
        """Sets the lane for work that answers no call."""
        self._lane = lane
        lane.post(self._tick)

    def stop(self) -> None:
        """Refuses new calls, and answers the held ones. Any thread."""
        with self._lock:
            self._is_stopping = True
            held = [waiter for of_group in self._waiters.values() for waiter in of_group.values()]
            waiting: list[WaitingCall] = [*held, *self._questions.take_all()]
        for one in waiting:
            one.call.lane.post(one.refuse)

    def topics_changed(self) -> None:
        """Called when topics were created, changed or deleted. Any thread."""
        lane = self._lane
        # Without the lock, which the writer of a slave must not wait for: two looks instead of one do no harm.
        if lane is not None and not self._looks_at_topics:
            self._looks_at_topics = True
            lane.post(lambda: void(lane.call_later(GATHER_MS, self._look_at_topics)))

    def routes_changed(self, topics: Collection[str] | None) -> None:
        """Called when other brokers have changed the routes of topics; None: it may be any. Any thread."""
        if self._lane is not None:
            self._lane.post(partial(self._take_changed_routes, topics))

    def counts(self) -> MembershipCounts:
        """Returns what metrics show. Any thread."""
        with self._lock:
            known = self._memberships
            groups = [group for _, group in known.groups()]
            return MembershipCounts(
                len(groups),
                sum(len(group.members) for group in groups),
                known.rebalance_count,
                sum(group.ownerless_queues for group in groups),
                known.ownerless_ms_upto(self._clock.monotonic_ms()) / 1000,
                known.refused_commit_count,
            )

    @never_shed
    @raw
    def hold_membership(self, call: Call) -> None:
        """Notes what the member says, holds the call, and answers when there is news."""
        try:
            request = HoldMembershipRequest.FromString(bytes(call.payload))
            if not self._memberships.says_the_same(request.consumer_group, request.member):
                check_group_name(request.consumer_group)
                check_member(request.member)
            if request.hold_ms < 0:
                raise invalid_argument("hold_ms", "is below 0")
            with self._lock:
                self._take(call, request)
        except DecodeError:
            call.fail(unparsable("protomq.v1.HoldMembershipRequest"))
        except Exception as error:
            call.fail(to_service_error(error))

    @raw
    def describe_member(self, call: Call) -> None:
        """Asks a member to describe itself. Answers when it has done so, or when the time is over."""
        try:
            request = DescribeMemberRequest.FromString(bytes(call.payload))
            check_group_name(request.consumer_group)
            wait_ms = request.wait_ms or DESCRIPTION_WAIT_MS
            if not 0 < wait_ms <= DESCRIPTION_WAIT_MAX_MS:
                raise invalid_argument("wait_ms", f"is 1 to {DESCRIPTION_WAIT_MAX_MS}")
            with self._lock:
                self._ask(call, request, wait_ms)
        except DecodeError:
            call.fail(unparsable("protomq.v1.DescribeMemberRequest"))
        except Exception as error:
            call.fail(to_service_error(error))

    @never_shed
    @tells_store_errors
    def leave_group(self, request: LeaveGroupRequest, context: CallContext) -> LeaveGroupResponse:
        """See the service."""
        name = request.consumer_group
        check_group_name(name)
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            self._memberships.note_left(name, request, now_ms)
            if request.is_final or not request.member_epoch or not self._memberships.is_late(name, request):
                self._leave((name, (request.client_id, request.nonce)), now_ms)
        if request.pull_member:
            if len(request.pull_member) > MEMBER_SIZE_MAX:
                raise invalid_argument("pull_member", f"has at most {MEMBER_SIZE_MAX} characters")
            self._tell_left(name, request.pull_member)
        return LeaveGroupResponse()

    @tells_store_errors
    def list_members(
        self, request: ListMembersRequest, context: CallContext
    ) -> ListMembersResponse:
        """See the service."""
        check_group_name(request.consumer_group)
        name, now_ms = request.consumer_group, self._clock.monotonic_ms()
        with self._lock:
            response = ListMembersResponse(settling_ms=self._memberships.settling_ms(name, now_ms))
            group = self._memberships.find(name)
            if group is None:
                return response
            response.ownerless_queues = group.ownerless_queues
            for key in sorted(group.members):
                member = group.members[key]
                response.members.append(
                    ListedMember(
                        member=member.said,
                        peer=member.peer,
                        member_ms=now_ms - member.since_ms,
                        silent_ms=0 if member.held_count > 0 else now_ms - member.seen_ms,
                    )
                )
        return response

    # With the lock.

    def _take(self, call: Call, request: HoldMembershipRequest) -> None:
        if self._is_stopping:
            raise SHUTTING_DOWN
        name, said, now_ms = request.consumer_group, request.member, self._clock.monotonic_ms()
        member = (name, (said.client_id, said.nonce))
        hold_ms = call.hold_time_ms(min(request.hold_ms, self._hold_max_ms))
        if not said.topics:
            # Who calls again after it has left gets no answer at once: else a client that knows only members' calls would call without end.
            if self._leave(member, now_ms) or hold_ms <= 0:
                call.answer(*self._answer(request))
            else:
                self._hold(member, call, hold_ms)
            return
        if self._memberships.is_late(name, said):
            # It arrived after the call that replaces it, and is answered as if it had been held here before.
            call.answer(*self._answer_replaced(request))
            return
        if self._memberships.has_left(name, said, now_ms):
            raise left_member(name, said)
        if request.only_if_member and not self._memberships.knows(name, said):
            raise unknown_member(name, said)
        # Before it counts as a member: the call that ends may be of one that was none.
        self._end_waiter(member)
        knows_this_start = request.broker_start == self._broker_start
        was_known = request.known_version > 0
        has_news = self._memberships.seen(
            name, said, call.peer, now_ms, rejoins=was_known and knows_this_start, was_known=was_known
        )
        group = self._memberships.find(name)
        assert group is not None
        if has_news:
            self._tell(name)
            self._warn_of_difference(name, said, group)
        self._between.pop(member, None)
        self._awaited.pop(member, None)
        if request.HasField("description"):
            self._questions.answer(member, request.description)
            request.ClearField("description")  # It is not to stay for as long as the call is held.
            call.payload = request.SerializeToString()
        question_id = self._questions.next_for(member) if request.hold_ms > 0 else 0
        is_claim = request.claims_only and knows_this_start and request.known_version > 0
        is_up_to_date = knows_this_start and request.known_version == group.version
        # A caller that has part of the news which is being gathered waits for the rest.
        waits_for_news = name in self._news and (knows_this_start or len(group.members) > SMALL_COUNT)
        is_asked_at_once = bool(question_id) or is_claim or request.only_if_member
        if hold_ms > 0 and not is_asked_at_once and (is_up_to_date or waits_for_news):
            self._memberships.held(*member)
            self._hold(member, call, hold_ms)
        else:
            if request.hold_ms > 0:
                self._memberships.held(*member)
                self._note_answered(member, call, now_ms)
            call.answer(*self._answer(request, question_id, is_claim=is_claim))

    def _hold(self, member: MemberId, call: Call, hold_ms: float) -> None:
        waiter = _Waiter(call)
        if hold_ms >= TOGETHER_MIN_MS:
            hold_ms -= (self._clock.monotonic() * 1000 + hold_ms) % TOGETHER_MS
        self._waiters.setdefault(member[0], {})[member[1]] = waiter
        waiter.timer = call.lane.call_later(hold_ms, partial(self._give_up, member, waiter))
        call.hold(partial(self._broke, member, waiter))

    def _leave(self, member: MemberId, now_ms: int) -> bool:
        """Takes out a member that consumes nothing here any more. Returns whether it was one."""
        name, key = member
        self._end_waiter(member)
        self._between.pop(member, None)
        self._awaited.pop(member, None)
        was_member = self._memberships.left(name, key, now_ms)
        if was_member:
            self._tell(name)
        # Also of one that is none any more: its connection may have closed before this arrived, and its locks would wait for it.
        self._tell_gone(name, *key, False)
        return was_member

    def _ask(self, call: Call, request: DescribeMemberRequest, wait_ms: float) -> None:
        if self._is_stopping:
            raise SHUTTING_DOWN
        name = request.consumer_group
        group = self._memberships.find(name)
        keys = sorted(
            key
            for key in (group.members if group is not None else ())
            if key[0] == request.client_id and request.nonce in (0, key[1])
        )
        if not keys:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "MEMBER_UNKNOWN",
                f"this broker knows no member {request.client_id!r} of the group {name!r}",
                metadata={"consumer_group": name, "client_id": request.client_id},
            )
        member = (name, keys[0])
        self._questions.add(call, member, wait_ms, wants_stacks=request.wants_stacks)
        # A member that holds no call now is asked in the answer to its next call.
        waiter = self._pop_waiter(member)
        if waiter is not None:
            self._note_answered(member, waiter.call, self._clock.monotonic_ms())
            answer = self._answer(waiter.request, self._questions.next_for(member))
            waiter.call.lane.post(partial(waiter.answer, *answer))

    def _note_answered(self, member: MemberId, call: Call, now_ms: int) -> None:
        """Notes that a call is answered that was held. Who consumes nothing is no member: nothing would end what is known of it."""
        if self._memberships.answered(*member, now_ms):
            self._between[member] = call

    def _take_out_closed(self) -> None:
        """Takes out members that died between two calls: the connection of the last one is closed. Calls of gRPC do not tell."""
        for member in [member for member, call in self._between.items() if call.closed]:
            del self._between[member]
            if self._memberships.may_be_back(*member):
                assert self._lane is not None
                self._await(member, self._lane)
            elif self._memberships.left(*member, self._clock.monotonic_ms()):
                self._tell(member[0])
                self._tell_gone(member[0], *member[1], True)

    def _await(self, member: MemberId, lane: CallLane) -> None:
        """Waits for a member whose connection broke. Its locks wait, too."""
        self._awaited[member] = this_break = object()
        lane.call_later(BACK_MS, partial(self._not_back, member, this_break))

    def _end_waiter(self, member: MemberId) -> None:
        """Ends the previous call of a member that has called again, or leaves."""
        waiter = self._pop_waiter(member)
        if waiter is not None:
            self._memberships.answered(*member, self._clock.monotonic_ms())
            waiter.call.lane.post(partial(self._end, waiter))

    def _tell(self, name: str) -> None:
        """Makes the members of the group get an answer within the time for gathering."""
        lane = self._lane
        if name in self._news or lane is None:
            return
        self._news.add(name)
        group = self._memberships.find(name)
        count = len(group.members) if group is not None else 0
        wait_ms = min(GATHER_MS + MEMBER_GATHER_MS * max(count - SMALL_COUNT, 0), GATHER_MAX_MS)
        lane.post(lambda: void(lane.call_later(wait_ms, partial(self._tell_news, name))))

    def _pop_waiter(self, member: MemberId, waiter: _Waiter | None = None) -> _Waiter | None:
        """Takes out the held call of a member, or this one only, and returns it; None: it is not there."""
        name, key = member
        of_group = self._waiters.get(name)
        found = of_group.get(key) if of_group is not None else None
        if of_group is None or found is None or (waiter is not None and found is not waiter):
            return None
        del of_group[key]
        if not of_group:
            del self._waiters[name]
        return found

    def _answer_without_list(self, request: HoldMembershipRequest) -> HoldMembershipResponse:
        """Makes an answer with the version that the caller knows: news come with its next call."""
        known = self._memberships
        return HoldMembershipResponse(
            version=request.known_version if request.broker_start == self._broker_start else 0,
            broker_start=self._broker_start,
            settling_ms=known.settling_ms(request.consumer_group, self._clock.monotonic_ms()),
            expiry_ms=known.gap_ms if request.hold_ms > 0 else known.expiry_ms,
            tells_routes=self._tells_routes(),
        )

    def _answer_replaced(self, request: HoldMembershipRequest) -> _Answer:
        response = self._answer_without_list(request)
        response.is_unchanged = True
        return _Answer(response.SerializeToString())

    def _answer(self, request: HoldMembershipRequest, question_id: int = 0, *, is_claim: bool = False) -> _Answer:
        name, known = request.consumer_group, self._memberships
        group = known.find(name)
        response = self._answer_without_list(request)
        response.is_confirmed = request.only_if_member
        if question_id:
            response.description_id = question_id
            response.wants_stacks = self._questions.wants_stacks(question_id)
        if is_claim:
            response.is_about_claims = True
            taken = known.taken(name, (request.member.client_id, request.member.nonce))
            response.taken.extend(TakenQueues(topic=topic, queue_ids=queue_ids) for topic, queue_ids in taken.items())
            return _Answer(response.SerializeToString())
        knows_this_start = request.broker_start == self._broker_start
        response.version = group.version if group is not None else request.known_version
        if group is None or (knows_this_start and request.known_version == group.version):
            response.is_unchanged = True
            return _Answer(response.SerializeToString())
        for topic in request.member.topics:
            if count := known.queue_count(topic.topic):
                response.queue_counts.append(
                    TopicQueueCount(topic=topic.topic, read_queues=count, route_changes=known.route_changes(topic.topic))
                )
        encoded = self._encode(name, group)
        if len(encoded.of_each_kind) > 1:
            response.difference = difference(request.member, encoded.of_each_kind)
        response.difference = response.difference or group.beside
        size_bytes = sum(region.size_bytes for region in encoded.shared)
        return _Answer(response.SerializeToString() + encoded.members, encoded.shared, size_bytes)

    def _encode(self, name: str, group: Group) -> _Encoded:
        encoded = self._encoded.get(name)
        if encoded is None or encoded.version != group.version:
            said = group.said()
            members = HoldMembershipResponse(members=said).SerializeToString()
            first: dict[tuple[object, ...], GroupMember] = {}
            for one in said if not group.are_alike else ():
                first.setdefault(kind_of(one), one)
            shared = _shared(members) if len(members) >= SHARED_MIN_BYTES else ()
            encoded = self._encoded[name] = _Encoded(group.version, b"" if shared else members, shared, list(first.values()))
        return encoded

    def _warn_of_difference(self, name: str, said: GroupMember, group: Group) -> None:
        self._warn(name, "" if group.are_alike else difference(said, group.said()), MAKE_ALIKE)

    def _warn(self, name: str, text: str, advice: str) -> None:
        if text and self._said.is_due((name, text)):
            log.warning("the members of group %s are not alike: %s. %s", name, one_line(text), advice)

    # On lanes.

    def _look_at_topics(self) -> None:
        self._looks_at_topics = False
        with self._lock:
            for name in self._memberships.topics_changed(self._clock.monotonic_ms()):
                self._tell(name)

    def _take_changed_routes(self, topics: Collection[str] | None) -> None:
        with self._lock:
            for name in self._memberships.routes_changed(topics):
                self._tell(name)

    def _tick(self) -> None:
        assert self._lane is not None
        with self._lock:
            expired = self._memberships.expire(self._clock.monotonic_ms())
            for name, key in expired:
                self._between.pop((name, key), None)
                self._awaited.pop((name, key), None)
                self._tell(name)
                self._tell_gone(name, *key, False)
            self._take_out_closed()
            for name in self._memberships.beside_changed(self._beside()):
                self._tell(name)
                group = self._memberships.find(name)
                self._warn(name, group.beside if group is not None else "", "Give each kind a group of its own")
            if len(self._encoded) > self._memberships.group_count:
                for name in [name for name in self._encoded if self._memberships.find(name) is None]:
                    del self._encoded[name]
        if expired:
            names = ", ".join(dict.fromkeys(name for name, _ in expired))
            log.warning("members of %s were not heard of in time: the others take their queues", names)
        if not self._is_stopping:
            self._lane.call_later(TICK_MS, self._tick)

    def _tell_news(self, name: str) -> None:
        """Answers the members of a group that has news."""
        with self._lock:
            self._news.discard(name)
            by_lane: dict[CallLane, deque[MemberKey]] = {}
            for key, waiter in self._waiters.get(name, {}).items():
                by_lane.setdefault(waiter.call.lane, deque()).append(key)
        for lane, keys in by_lane.items():
            lane.post(partial(self._tell_some, lane, name, keys))

    def _tell_some(self, lane: CallLane, name: str, keys: deque[MemberKey]) -> None:
        """Answers some of these members if they hold calls on this lane and do not know the version that there is now; others later."""
        answers: list[tuple[_Waiter, _Answer]] = []
        with self._lock:
            group = self._memberships.find(name)
            now_ms = self._clock.monotonic_ms()
            while keys and group is not None and len(answers) < ANSWERS_MAX:
                key = keys.popleft()
                waiter = self._waiters.get(name, {}).get(key)
                if waiter is None or waiter.call.lane is not lane:
                    continue  # Its next call tells it.
                request = waiter.request
                if request.broker_start == self._broker_start and request.known_version == group.version:
                    continue
                self._pop_waiter((name, key))
                self._note_answered((name, key), waiter.call, now_ms)
                answers.append((waiter, self._answer(request)))
        for waiter, answer in answers:
            waiter.answer(*answer)
        if keys and group is not None:
            lane.post(partial(self._tell_some, lane, name, keys))

    def _give_up(self, member: MemberId, waiter: _Waiter) -> None:
        """Answers a call whose hold is over."""
        with self._lock:
            if self._pop_waiter(member, waiter) is None:
                return
            self._note_answered(member, waiter.call, self._clock.monotonic_ms())
            answer = self._answer(waiter.request)
        waiter.answer(*answer)

    def _broke(self, member: MemberId, waiter: _Waiter) -> None:
        """Notes that the caller of a held call is gone."""
        if waiter.timer is not None:
            waiter.timer.cancel()
        with self._lock:
            if self._pop_waiter(member, waiter) is None:
                return
            is_gone = self._memberships.broke(*member, self._clock.monotonic_ms())
            if is_gone:
                self._tell(member[0])
            if is_gone or self._memberships.may_be_back(*member):
                self._await(member, waiter.call.lane)

    def _not_back(self, member: MemberId, this_break: object) -> None:
        """Takes out a member whose connection broke, unless it has called again since, over another one."""
        with self._lock:
            if self._awaited.get(member) is not this_break:
                return
            del self._awaited[member]
            if self._memberships.left(*member, self._clock.monotonic_ms()):
                self._tell(member[0])
            self._tell_gone(member[0], *member[1], True)

    def _end(self, waiter: _Waiter) -> None:
        """Answers a call that a newer call of its member has replaced: what is news by now, the newer one is told."""
        with self._lock:
            answer = self._answer_replaced(waiter.request)
        waiter.answer(*answer)


def void(value: object) -> None:
    """Does nothing: a callback for an unwanted result."""


def _shared(data: bytes) -> tuple[Region, ...]:
    """Returns the data as what answers share; nothing: each has to copy it, since no descriptor is left."""
    try:
        return (SharedBytes("protomq-members", data).region,)
    except OSError as error:
        log.debug("lists of members are copied: %s", error)
        return ()
