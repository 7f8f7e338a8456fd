"""Members and brokers together, in memory: whatever comes and goes, in the end each queue has one owner, and none ever has two by intent.

The brokers are the real service on fake lanes; the members are the SDK's `MembershipState`, driven here.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protomq import MessageQueue
from protomq._group_routes import route_number
from protomq._membership_logic import CLAIM_WAIT_S, HOLD_S, MembershipState, MemberTicket, _Claim
from protomq._types import BrokerAddress
from protomq.allocation import Allocation, Average, Circle, ConsistentHash
from protomq.errors import ConnectionLostError, ProtomqError, UnknownMethodError, error_from_status
from protomq.v1 import membership_service_pb2
from protomq.v1.membership_service_pb2 import (
    DescribeMemberRequest,
    DescribeMemberResponse,
    GroupMember,
    HoldMembershipRequest,
    HoldMembershipResponse,
    LeaveGroupRequest,
    ListMembersRequest,
    ListMembersResponse,
    MemberDescription,
    MemberTopic,
)
from protomq_broker.group_members import GroupMembers
from protomq_broker.member_questions import DESCRIPTION_MAX_BYTES, QUESTIONS_MAX
from protomq_broker.membership_service import (
    ANSWERS_MAX,
    BACK_MS,
    GATHER_MAX_MS,
    SMALL_COUNT,
    TICK_MS,
    MembershipService,
)
from protomq_broker.memberships import Memberships
from protomq_runtime.dispatch import DispatchTable
from protomq_runtime.regions import read_regions
from protomq_runtime.testing import FakeCall, FakeServer
from tests.support.examples import examples

from .store.log_helpers import ManualClock

HOLD = "/protomq.v1.MembershipService/HoldMembership"
LEAVE = "/protomq.v1.MembershipService/LeaveGroup"
DESCRIBE = "/protomq.v1.MembershipService/DescribeMember"
LIST = "/protomq.v1.MembershipService/ListMembers"
SERVICE = membership_service_pb2.DESCRIPTOR.services_by_name["MembershipService"]


class BrokerNode:
    """One broker."""

    def __init__(
        self, name: str, queues: int, known: tuple[str, ...] = (), start: int = 1, takes_commits: bool = True
    ) -> None:
        self.name = name
        self.clock = ManualClock()
        self.queue_count = queues
        known_members = Memberships(
            self.clock.monotonic_ms(),
            settle_ms=3_000,
            expiry_ms=120_000,
            gap_ms=25_000,
            queue_count=lambda topic: self.queue_count,
            known_groups=known,
            takes_commits=takes_commits,
        )
        self.beside: dict[str, str] = {}
        self.tells_routes = True
        self.service = MembershipService(
            known_members,
            self.clock,
            broker_start=start,
            hold_max_ms=60_000,
            beside=lambda: self.beside,
            tells_routes=lambda: self.tells_routes,
        )
        table = DispatchTable()
        table.add_service(SERVICE, self.service)
        self.server = FakeServer(table)
        (self.lane,) = self.server.lanes.values()
        self.service.use_lane(self.lane)

    def advance(self, time_ms: int) -> None:
        self.clock.time_ms += time_ms
        self.server.advance(time_ms)

    def queues(self) -> list[MessageQueue]:
        return [MessageQueue("T", self.name, i) for i in range(self.queue_count)]


class MemberNode:
    """One member: it has what it is given, and gives away what is not its own."""

    def __init__(self, world: World, name: str, allocation: Allocation, wanted: str = "") -> None:
        self.world = world
        self.state = MembershipState("g", name, allocation, locks_queues=world.locks_queues)
        self.queues: set[MessageQueue] = set()
        self.calls: list[tuple[object, BrokerNode, FakeCall]] = []
        self.wanted = wanted
        self.lost_count = 0
        self.misses: set[str] = set()
        """Brokers that its route does not have."""

    def turn(self) -> None:
        """What its driver and its `poll` do."""
        world, now_s = self.world, self.world.now_s
        addresses = {name: BrokerAddress(name, name, name) for name in world.brokers if name not in self.misses}
        queues = [queue for queue in world.queues() if queue.broker_name not in self.misses]
        self.state.want({"T": self.wanted}, addresses, {"T": route_number(queues)})
        self._take_outcomes(now_s)
        self.state.check_expiry(now_s)
        lost = self.state.take_lost()
        self.lost_count += bool(lost)
        self.queues = {queue for queue in self.queues if queue.broker_name not in lost}
        share = self.state.share({"T": queues}, now_s)
        if share is not None:
            self.queues = set(share)
        self.state.claim(self.queues)
        for name in self.state.due(now_s):
            ticket, _, request, _ = self.state.begin(name, now_s)
            broker = world.brokers[name]
            self.calls.append((ticket, broker, broker.server.call(HOLD, world.sent(request))))

    def _take_outcomes(self, now_s: float) -> None:
        for item in list(self.calls):
            ticket, broker, call = item
            if call.error is not None:
                self.state.failed(ticket, error_from_status(call.error.to_status()), now_s)  # type: ignore[arg-type]
            elif call.answer_payload is not None:
                self.state.answered(ticket, call.answer_payload, now_s)  # type: ignore[arg-type]
            elif self.world.brokers.get(broker.name) is not broker:
                self.state.failed(ticket, ConnectionLostError("it is gone"), now_s)  # type: ignore[arg-type]
            else:
                continue
            self.calls.remove(item)

    def crash(self) -> None:
        for _, _, call in self.calls:
            if not call.answered:
                call.hang_up()

    def lose_connections(self) -> None:
        """Both ends see it at once."""
        self.crash()
        for ticket, _, _ in self.calls:
            self.state.failed(ticket, ConnectionLostError("cut"), self.world.now_s)  # type: ignore[arg-type]
        self.calls.clear()


class World:
    """Brokers and members of one group."""

    def __init__(self, *brokers: BrokerNode, knows_claims: bool = True, locks_queues: bool = False) -> None:
        """`knows_claims`: whether brokers know `claims_only`; those of an older version do not. `locks_queues`: whether members say so."""
        self.brokers = {broker.name: broker for broker in brokers}
        self.members: list[MemberNode] = []
        self.now_s = 100.0
        self.knows_claims = knows_claims
        self.locks_queues = locks_queues

    def sent(self, request: bytes) -> bytes:
        """What a broker reads of a request."""
        if self.knows_claims:
            return request
        asked = HoldMembershipRequest.FromString(request)
        asked.ClearField("claims_only")
        return asked.SerializeToString()

    def queues(self) -> list[MessageQueue]:
        return [queue for broker in self.brokers.values() for queue in broker.queues()]

    def join(self, name: str, allocation: Allocation | None = None, wanted: str = "") -> MemberNode:
        self.members.append(MemberNode(self, name, allocation or Average(), wanted))
        return self.members[-1]

    def leave(self, member: MemberNode) -> None:
        self.members.remove(member)
        for leave in member.state.leave_requests():
            self.brokers[leave.address.broker_name].server.call(LEAVE, leave.payload)

    def crash(self, member: MemberNode) -> None:
        self.members.remove(member)
        member.crash()

    def run(self, time_ms: int, rng: random.Random | None = None) -> None:
        """Time passes, in steps of 20 ms; members have their turns in any order."""
        for _ in range(max(time_ms // 20, 1)):
            self.now_s += 0.02
            for broker in self.brokers.values():
                broker.advance(20)
            members = list(self.members)
            if rng is not None:
                rng.shuffle(members)
            for member in members:
                member.turn()

    def owners(self) -> dict[MessageQueue, int]:
        return {
            queue: sum(queue in member.queues for member in self.members) for queue in self.queues()
        }


def test_a_join_a_leave_and_a_crash_are_balanced_within_a_second() -> None:
    world = World(BrokerNode("a", 5), BrokerNode("b", 4))
    first = world.join("m1")
    world.run(1_000)
    assert len(first.queues) == 9
    second, third = world.join("m2"), world.join("m3")
    world.run(1_000)
    assert [len(member.queues) for member in (first, second, third)] == [3, 3, 3]
    world.leave(second)
    world.run(1_000)
    assert set(world.owners().values()) == {1}
    world.crash(first)
    world.run(1_000)
    assert len(third.queues) == 9


@pytest.mark.parametrize("broken", [["m1"], ["m2"], ["m1", "m3"], ["m1", "m2", "m3"]])
def test_a_connection_that_breaks_costs_no_member_with_locks_a_queue(broken: list[str]) -> None:
    world = World(BrokerNode("a", 5), BrokerNode("b", 4), locks_queues=True)
    members = [world.join(name) for name in ("m1", "m2", "m3")]
    world.run(1_000)
    before = [set(member.queues) for member in members]
    changes = [broker.service.counts().rebalances for broker in world.brokers.values()]
    # The second break comes while the first one would still be waited for.
    for pause_ms in (300, 1_000):
        for member in members:
            if member.state.key[0] in broken:
                member.lose_connections()
        for _ in range(pause_ms // 20):
            world.run(20)
            assert [member.queues for member in members] == before
            assert [broker.service.counts().ownerless_queues for broker in world.brokers.values()] == [0, 0]
    assert [member.lost_count for member in members] == [0, 0, 0]
    assert [broker.service.counts().rebalances for broker in world.brokers.values()] == changes
    assert not any(broker.service._awaited for broker in world.brokers.values())


def one_cut_off() -> tuple[World, MemberNode, MemberNode, list[tuple[str, bool]]]:
    """(a world, a member with locks whose connection has just broken, another one, who is told to be gone: whether it may be back)"""
    world = World(BrokerNode("a", 4), locks_queues=True)
    first, second = world.join("m1"), world.join("m2")
    world.run(1_000)
    gone: list[tuple[str, bool]] = []
    world.brokers["a"].service.listen_for_gone(lambda group, client_id, nonce, may_return: gone.append((client_id, may_return)))
    first.lose_connections()
    return world, first, second, gone


def test_the_queues_of_a_member_with_locks_that_does_not_come_back_are_others_once_its_locks_wait_no_longer() -> None:
    world, first, second, gone = one_cut_off()
    world.run(200)
    world.crash(first)  # It had just come back.
    world.run(int(BACK_MS) - 20)
    assert (gone, len(second.queues)) == ([], 2)
    world.run(120)
    assert (gone, len(second.queues)) == ([("m1", True)], 4)


def test_the_queues_of_a_member_with_locks_that_leaves_while_its_connection_is_broken_are_others_at_once() -> None:
    world, first, second, gone = one_cut_off()
    world.leave(first)
    world.run(100)
    assert len(second.queues) == 4
    world.run(1_000)
    assert gone == [("m1", False)], "nobody waits for it, or says later that it may be back"


def test_a_member_with_locks_whose_connection_is_closed_between_two_calls_may_be_back_too() -> None:
    broker = BrokerNode("a", 4)
    gone: list[str] = []
    broker.service.listen_for_gone(lambda group, client_id, nonce, may_return: gone.append(client_id))
    requests = [joining(number) for number in range(3)]
    for request in requests:
        request.member.locks_queues = True
    calls = [broker.server.call(HOLD, request) for request in requests]
    broker.advance(int(GATHER_MAX_MS))
    assert all(call.answered for call in calls)
    for call in calls[:2]:
        call.hang_up()
    broker.advance(int(TICK_MS))
    broker.server.call(HOLD, requests[0])
    assert [one.member.client_id for one in listed(broker).members] == ["m000", "m001", "m002"]
    broker.advance(int(BACK_MS) - 1)
    assert gone == []
    broker.advance(1)
    assert gone == ["m001"]
    assert [one.member.client_id for one in listed(broker).members] == ["m000", "m002"]


def test_a_queue_is_not_taken_before_its_owner_has_given_it_up_or_a_minute_has_passed() -> None:
    world = World(BrokerNode("a", 4))
    busy = world.join("m1")
    world.run(1_000)
    world.members.remove(busy)  # Its thread beats, but the program does not come to `poll`.
    late = world.join("m2")

    def beat() -> None:
        busy._take_outcomes(world.now_s)
        for name in busy.state.due(world.now_s):
            ticket, _, request, _ = busy.state.begin(name, world.now_s)
            busy.calls.append((ticket, world.brokers[name], world.brokers[name].server.call(HOLD, request)))

    for _ in range(int((CLAIM_WAIT_S - 5) / 0.1)):
        world.run(100)
        beat()
    assert late.queues == set()
    for _ in range(100):
        world.run(100)
        beat()
    assert len(late.queues) == 2


def test_a_broker_that_starts_again_takes_no_queue_from_anybody() -> None:
    world = World(BrokerNode("a", 4))
    members = [world.join("m1"), world.join("m2")]
    world.run(1_000)
    before = [set(member.queues) for member in members]
    world.brokers["a"] = BrokerNode("a", 4, known=("g",), start=2)
    for _ in range(50):
        world.run(100)
        assert [member.queues for member in members] == before
    assert [member.lost_count for member in members] == [0, 0]


@pytest.mark.parametrize("meets", ["at the slave", "at the new master", "at the new master, and is there first"])
def test_who_comes_second_to_a_slave_while_the_master_is_away_keeps_its_queues(meets: str) -> None:
    world = World(BrokerNode("a", 4))
    first, second = world.join("m1"), world.join("m2")
    world.run(1_000)
    before = [set(member.queues) for member in (first, second)]
    # The first member finds nobody else there for longer than the list settles, and claims all queues.
    slave = BrokerNode("a", 4, known=("g",), start=2, takes_commits=False)
    slave.advance(60_000)
    world.brokers["a"] = slave
    world.members.remove(second)
    world.run(4_000)
    assert slave.service.counts().ownerless_queues == 0
    world.members = [second, first] if meets.endswith("first") else [first, second]
    if meets != "at the slave":
        world.brokers["a"] = BrokerNode("a", 4, known=("g",), start=3)
    for _ in range(300):
        world.run(20)
        assert second.queues == before[1]
    assert first.queues == before[0]
    assert [member.lost_count for member in (first, second)] == [0, 0]


@pytest.mark.parametrize("is_first", [True, False])
def test_nobody_takes_a_queue_at_a_slave_before_the_others_have_had_time_to_come(is_first: bool) -> None:
    world = World(BrokerNode("a", 4))
    members = [world.join("m1"), world.join("m2")]
    world.run(1_000)
    before = [set(member.queues) for member in members]
    slave = BrokerNode("a", 4, known=("g",), start=2, takes_commits=False)
    slave.advance(60_000)
    world.brokers["a"] = slave
    late = members[1 if is_first else 0]
    world.members.remove(late)
    world.run(2_900)
    newcomer = world.join("m3")
    world.run(60)
    assert [member.queues for member in members] == before
    assert newcomer.queues == set()
    world.members.append(late)
    for _ in range(200):
        world.run(20)
        assert set(world.owners().values()) <= {0, 1}
    assert set(world.owners().values()) == {1}
    assert min(len(member.queues) for member in world.members) == 1
    # From then on who dies is gone at once, as at a master.
    world.crash(newcomer)
    world.run(1_000)
    assert [len(member.queues) for member in members] == [2, 2]


def test_who_comes_to_a_broker_that_started_again_after_others_took_its_queues_gives_them_up() -> None:
    world = World(BrokerNode("a", 4))
    first, second = world.join("m1"), world.join("m2")
    world.run(1_000)
    world.brokers["a"] = BrokerNode("a", 4, known=("g",), start=2)
    world.members.remove(second)  # It cannot reach the broker, or is stopped.
    world.run(5_000)
    assert len(first.queues) == 4
    world.members.append(second)
    for _ in range(100):
        world.run(20)
        assert set(world.owners().values()) <= {0, 1} or not second.lost_count
    assert second.lost_count == 1
    assert set(world.owners().values()) == {1}


@pytest.mark.parametrize("ends", ["the hold", "news"])
def test_nothing_stays_of_callers_that_consume_nothing(ends: str) -> None:
    """Over gRPC nothing tells that they are gone. Each has another number."""
    broker = BrokerNode("a", 4)
    consuming = GroupMember(client_id="m", nonce=1, topics=[MemberTopic(topic="T")])
    broker.server.call(HOLD, HoldMembershipRequest(consumer_group="g", member=consuming, hold_ms=60_000))
    left = [GroupMember(client_id="gone", nonce=number) for number in range(2, 12)]
    calls = [broker.server.call(HOLD, HoldMembershipRequest(consumer_group="g", member=said, hold_ms=1_000)) for said in left]
    broker.advance(100)
    if ends == "news":
        consuming.topics[0].filter = "other"
        broker.server.call(HOLD, HoldMembershipRequest(consumer_group="g", member=consuming, hold_ms=60_000))
    broker.advance(5_000)
    assert all(call.answered for call in calls)
    for _ in range(10):
        broker.advance(60_000)
    assert {member[1][0] for member in broker.service._between} <= {"m"}


def test_while_a_broker_settles_who_joins_waits() -> None:
    world = World(BrokerNode("a", 4, known=("g",)))
    newcomer = world.join("m1")
    world.run(2_000)
    assert newcomer.queues == set()
    world.run(2_000)
    assert len(newcomer.queues) == 4


def test_who_joins_claims_nothing_of_a_broker_that_settles_and_calls_it_no_more_often_for_that() -> None:
    """At the other one it takes its share. Each claim would be dropped with the answer, and made again."""
    world = World(settling := BrokerNode("a", 4, known=("g",)), BrokerNode("b", 4))
    newcomer = world.join("m1")
    world.run(1_000)
    with mock.patch.object(settling.server, "call", side_effect=settling.server.call) as calls:
        world.run(1_500)
    assert {queue.broker_name for queue in newcomer.queues} == {"b"}
    assert calls.call_count == 0
    world.run(2_000)
    assert len(newcomer.queues) == 8


def test_new_queues_get_owners() -> None:
    world = World(BrokerNode("a", 2))
    world.join("m1"), world.join("m2")
    world.run(1_000)
    broker = world.brokers["a"]
    broker.queue_count = 6
    broker.service.topics_changed()
    world.run(1_000)
    assert list(world.owners().values()) == [1] * 6


def test_owners_of_queues_hear_within_a_moment_that_a_topic_has_fewer() -> None:
    world = World(BrokerNode("a", 4))
    members = [world.join("m1"), world.join("m2")]
    world.run(1_000)
    queues = world.queues()
    world.queues = lambda: queues  # type: ignore[method-assign]  # As long as nobody looks the route up.
    assert [len(member.queues) for member in members] == [2, 2]
    assert [member.state.contradicted({"T": queues}) for member in members] == [{}, {}]
    broker = world.brokers["a"]
    broker.queue_count = 2
    broker.service.topics_changed()
    world.run(100)
    assert [member.state.contradicted({"T": queues}).keys() for member in members] == [{"T"}, {"T"}]


def test_members_hear_within_a_moment_that_a_route_has_changed_and_once() -> None:
    world = World(BrokerNode("a", 2), BrokerNode("b", 2))
    members = [world.join("m1"), world.join("m2")]
    world.run(1_000)
    assert [member.state.take_changed_routes() for member in members] == [set(), set()]
    world.brokers["a"].service.routes_changed(["of somebody else"])
    world.run(500)
    assert [member.state.take_changed_routes() for member in members] == [set(), set()]
    for topics in (["T"], None):
        world.brokers["a"].service.routes_changed(topics)
        world.run(200)
        assert [member.state.take_changed_routes() for member in members] == [{"T"}, {"T"}]
        assert [member.state.take_changed_routes() for member in members] == [set(), set()]


def test_members_do_not_know_whether_a_route_has_changed_while_nobody_could_tell_them() -> None:
    world = World(BrokerNode("a", 2), BrokerNode("b", 2))
    members = [world.join("m1"), world.join("m2")]
    world.run(1_000)
    assert [member.state.take_unsure_routes() for member in members] == [{"T"}, {"T"}], "it may have changed before they joined"
    world.brokers["a"] = BrokerNode("a", 2, ("g",), start=2)
    world.run(8_000)
    assert [member.state.take_unsure_routes() for member in members] == [set(), set()], "the other broker would have told them"
    for name in "ab":
        world.brokers[name] = BrokerNode(name, 2, ("g",), start=3)
    world.run(8_000)
    assert [member.state.take_unsure_routes() for member in members] == [{"T"}, {"T"}], "nobody told the brokers while they were away"
    assert [member.state.take_changed_routes() for member in members] == [set(), set()]


def test_a_route_is_not_unsure_where_the_broker_does_not_tell_and_members_look_by_themselves() -> None:
    world = World(BrokerNode("a", 2))
    world.brokers["a"].tells_routes = False
    member = world.join("m1")
    world.run(1_000)
    assert member.state.take_unsure_routes() == set()


def test_a_member_hears_of_routes_while_all_brokers_of_its_topics_tell_them() -> None:
    world = World(BrokerNode("a", 2), BrokerNode("b", 2))
    member = world.join("m1")
    queues = {"T": world.queues()}
    assert not member.state.hears_of_routes(queues)
    world.run(1_000)
    assert member.state.hears_of_routes(queues)
    assert not member.state.hears_of_routes({})
    assert not member.state.hears_of_routes(queues | {"U": []}), "a topic that nobody has yet"
    assert not member.state.hears_of_routes(queues | {"U": [MessageQueue("U", "a", 0)]}), "nor has this broker"
    assert not member.state.hears_of_routes({"T": [*queues["T"], MessageQueue("T", "c", 0)]})
    before = member.state.news
    world.brokers["b"].tells_routes = False
    world.run(16_000)
    assert not member.state.hears_of_routes(queues)
    assert member.state.news > before, "its steps are to hear of it, too"


def test_one_that_was_stopped_past_its_expiry_gives_its_queues_up_before_anything_else() -> None:
    world = World(BrokerNode("a", 4))
    stopped, other = world.join("m1"), world.join("m2")
    world.run(1_000)
    world.members.remove(stopped)
    world.run(60_000)
    assert len(other.queues) == 4
    world.members.append(stopped)
    stopped.turn()
    assert stopped.queues == set()
    assert stopped.lost_count == 1
    world.run(2_000)
    assert list(world.owners().values()) == [1] * 4


@pytest.mark.parametrize("comes", ["nobody", "another", "another that goes again"])
@pytest.mark.parametrize("is_alone", [True, False])
@pytest.mark.parametrize(("stopped_s", "is_lost"), [(12, False), (17, False), (24, False), (41, True)])
def test_one_that_was_stopped_for_less_than_the_broker_waits_keeps_its_queues(
    stopped_s: int, is_lost: bool, is_alone: bool, comes: str
) -> None:
    world = World(BrokerNode("a", 4))
    stopped = world.join("m1")
    if not is_alone:
        world.join("m2")
    world.run(14_500)  # The call that is held now is answered soon after it was stopped, with time to go.
    had = set(stopped.queues)
    world.members.remove(stopped)
    world.run(stopped_s * 500)
    third = world.join("m3") if comes != "nobody" else None
    world.run(stopped_s * 250)
    if third is not None and "again" in comes:
        world.leave(third)
    world.run(stopped_s * 250)
    now_s = world.now_s
    assert stopped.state.stands("a", now_s) is (now_s - stopped.state._brokers["a"].sent_s <= 22.5)
    world.members.append(stopped)
    if comes != "another" and not is_lost:
        world.run(100)
        assert stopped.queues == had
    world.run(3_000)
    assert stopped.state.stands("a", world.now_s)
    assert stopped.lost_count == is_lost
    assert set(world.owners().values()) == {1}


def test_members_whose_routes_differ_know_of_it_until_they_agree() -> None:
    world = World(BrokerNode("a", 4), BrokerNode("b", 4))
    first, second = world.join("m1"), world.join("m2")
    queues = {"T": world.queues()}
    world.run(1_000)
    assert [member.state.contradicted(queues) for member in (first, second)] == [{}, {}]
    second.misses = {"b"}
    world.run(1_000)
    assert first.state.contradicted(queues).keys() == {"T"}
    assert second.state.contradicted({"T": world.brokers["a"].queues()}).keys() == {"T"}
    second.misses = set()
    world.run(1_000)
    assert [member.state.contradicted(queues) for member in (first, second)] == [{}, {}]
    assert set(world.owners().values()) == {1}


def beat(member: MemberNode) -> None:
    """What the driver of a member does while its program does not come to `poll`."""
    member._take_outcomes(member.world.now_s)
    for name in member.state.due(member.world.now_s):
        ticket, _, request, _ = member.state.begin(name, member.world.now_s)
        broker = member.world.brokers[name]
        member.calls.append((ticket, broker, broker.server.call(HOLD, request)))


def test_nobody_takes_a_queue_at_a_broker_that_may_not_have_heard_of_its_owner_yet() -> None:
    world = World(BrokerNode("a", 4), BrokerNode("b", 4))
    owner = world.join("m1")
    world.run(1_000)
    world.brokers["a"] = BrokerNode("a", 4, known=("g",), start=2)
    world.members.remove(owner)
    newcomer = world.join("m0")  # It comes to the broker before the owner tries again.
    for _ in range(200):
        world.run(20)
        beat(owner)
        assert not owner.queues & newcomer.queues
    world.members.append(owner)
    world.run(1_000)
    assert set(world.owners().values()) == {1}


def test_who_consumes_nothing_of_a_broker_any_more_says_so() -> None:
    world = World(BrokerNode("a", 4))
    first, second = world.join("m1"), world.join("m2")
    world.run(1_000)
    world.members.remove(first)
    first.state.want({}, {}, {})
    first.state.claim(())
    for _ in range(10):
        world.run(100)
        beat(first)
    assert len(second.queues) == 4
    assert first.state._brokers == {}
    assert not first.calls
    answer = ListMembersResponse.FromString(
        world.brokers["a"].server.call(LIST, ListMembersRequest(consumer_group="g").SerializeToString()).answer_payload or b""
    )
    assert [listed.member.client_id for listed in answer.members] == ["m2"]


def test_a_broker_that_is_consumed_from_no_more_says_nothing_of_who_is_there() -> None:
    world = World(BrokerNode("a", 4), BrokerNode("b", 6))
    first, second, third = (world.join(name) for name in ("m1", "m2", "m3"))
    world.run(1_000)
    # The topic moves to b; the first member hears of it and still holds its call at a, which others never had a topic at.
    first.misses = second.misses = third.misses = {"a"}
    world.run(1_000)
    before = [set(member.queues) for member in (first, second, third)]
    assert [len(queues) for queues in before] == [2, 2, 2]
    world.brokers["b"] = BrokerNode("b", 6, known=("g",), start=2)
    for _ in range(100):
        world.run(50)
        assert [member.queues for member in (first, second, third)] == before


def test_a_call_that_fails_here_alone_is_followed_by_a_list() -> None:
    world = World(BrokerNode("a", 4))
    first, second = world.join("m1"), world.join("m2")
    world.run(1_000)
    ticket, _, _ = first.calls.pop()
    first.state.failed(ticket, ConnectionLostError("the broker does not notice"), world.now_s)  # type: ignore[arg-type]
    for _ in range(1_000):
        world.run(20)
        assert len(first.queues) == len(second.queues) == 2
        assert not first.state.has_open_claims()
    assert first.state._brokers["a"].members is not None


def test_members_of_one_name_share(caplog: pytest.LogCaptureFixture) -> None:
    world = World(BrokerNode("a", 4))
    twins = [world.join("twin"), world.join("twin")]
    world.run(1_000)
    assert [len(member.queues) for member in twins] == [2, 2]
    assert list(world.owners().values()) == [1] * 4


def test_other_subscriptions_and_strategies_are_told_on_both_sides(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(BrokerNode("a", 4))
    world.join("m1", wanted="tags X")
    world.join("m2")
    world.run(1_000)
    told = [record.getMessage() for record in caplog.records]
    both = "m2 wants all messages of T, m1 tags X", "m1 wants tags X of T, m2 all messages"
    assert any(both[0] in text and "says broker a" in text for text in told)
    assert any(both[1] in text and "says broker a" in text for text in told)
    assert any("of group g are not alike" in text and "says broker" not in text for text in told)
    alike = [text for text in told if "not alike" in text]
    assert all("have to be the same in all members" in text for text in alike), "it may be filters, or how queues are shared out"


def test_a_broker_that_knows_no_groups_gives_everybody_everything() -> None:
    state = MembershipState("g", "m", Average())
    state.want({"T": ""}, {"a": BrokerAddress("a", "a", "a")}, {})
    ticket, *_ = state.begin("a", 0.0)
    state.failed(ticket, UnknownMethodError("none"), 0.0)
    queues = BrokerNode("a", 3).queues()
    assert state.share({"T": queues}, 0.0) == queues


def test_errors_back_off_and_the_share_stays() -> None:
    state = MembershipState("g", "m", Average())
    state.want({"T": ""}, {"a": BrokerAddress("a", "a", "a")}, {})
    now_s, pauses = 0.0, []
    for _ in range(8):
        (name,) = state.due(now_s)
        ticket, *_ = state.begin(name, now_s)
        error: ProtomqError = ConnectionLostError("gone")
        state.failed(ticket, error, now_s)
        pauses.append(state.next_due_in_s(now_s))
        now_s += pauses[-1]
    assert pauses == sorted(pauses)
    assert pauses[-1] == 2.0
    assert state.share({"T": BrokerNode("a", 3).queues()}, now_s) is None


def test_a_hold_is_shorter_than_the_time_after_which_a_broker_gives_a_member_up() -> None:
    world = World(BrokerNode("a", 1))
    member = world.join("m1")
    for _ in range(20):
        world.run(int(HOLD_S * 100))
        assert member.lost_count == 0
    assert len(member.queues) == 1


@given(
    st.lists(st.sampled_from(["join", "leave", "crash", "break", "restart", "queues"]), max_size=8),
    st.sampled_from([Average(), Circle(), ConsistentHash()]),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.randoms(use_true_random=False),
)
@settings(max_examples=examples(40), deadline=None)
def test_in_the_end_each_queue_has_one_owner(
    events: list[str], allocation: Allocation, brokers: int, knows_claims: bool, locks_queues: bool, rng: random.Random
) -> None:
    nodes = [BrokerNode(f"b{i}", rng.randint(1, 4)) for i in range(brokers)]
    world = World(*nodes, knows_claims=knows_claims, locks_queues=locks_queues)
    world.join("m0", allocation)
    for number, event in enumerate(events):
        world.run(rng.choice([0, 40, 200, 1_000]), rng)
        match event:
            case "join":
                world.join(f"m{number + 1}", allocation)
            case "leave" if len(world.members) > 1:
                world.leave(rng.choice(world.members))
            case "crash" if len(world.members) > 1:
                world.crash(rng.choice(world.members))
            case "break":
                rng.choice(world.members).lose_connections()
            case "restart":
                name = rng.choice(sorted(world.brokers))
                count = world.brokers[name].queue_count
                world.brokers[name] = BrokerNode(name, count, ("g",), start=number + 2)
            case "queues":
                broker = rng.choice(list(world.brokers.values()))
                broker.queue_count += 1
                broker.service.topics_changed()
    world.run(6_000, rng)
    assert set(world.owners().values()) == {1}


# -- calls of the service ------------------------------------------------------------------------------------------------------


def hold(broker: BrokerNode, **fields: object) -> FakeCall:
    said = GroupMember(client_id="m", nonce=5, topics=[MemberTopic(topic="T")])
    request = HoldMembershipRequest(consumer_group="g", member=said, hold_ms=10_000, **fields)  # type: ignore[arg-type]
    return broker.server.call(HOLD, request)


def listed(broker: BrokerNode) -> ListMembersResponse:
    answer = broker.server.call(LIST, ListMembersRequest(consumer_group="g")).response()
    assert isinstance(answer, ListMembersResponse)
    return answer


def test_a_call_is_held_until_there_is_news_or_its_time_is_up() -> None:
    broker = BrokerNode("a", 2)
    first = hold(broker).response()
    assert [count.read_queues for count in first.queue_counts] == [2]
    held = hold(broker, known_version=first.version, broker_start=1)
    broker.advance(9_000)
    assert held.is_held
    broker.advance(1_000)
    assert held.response().is_unchanged
    held = hold(broker, known_version=first.version, broker_start=1)
    broker.server.call(
        HOLD,
        HoldMembershipRequest(
            consumer_group="g", member=GroupMember(client_id="n", nonce=6, topics=[MemberTopic(topic="T")])
        ),
    )
    broker.advance(30)
    assert [said.client_id for said in held.response().members] == ["m", "n"]


def test_long_holds_end_together_and_not_later_than_they_may() -> None:
    broker = BrokerNode("a", 2)
    calls = []
    for number in range(3):
        request = HoldMembershipRequest(
            consumer_group=f"g{number}", member=says("m"), hold_ms=15_000 if number < 2 else 3_000, known_version=0
        )
        first = broker.server.call(HOLD, request).response()
        request.known_version, request.broker_start = first.version, first.broker_start
        broker.advance(100)
        calls.append(broker.server.call(HOLD, request))
    broker.advance(2_999)
    assert all(call.is_held for call in calls)
    broker.advance(1)
    assert calls[2].answered, "a short one ends when it is to"
    broker.advance(11_699)
    assert all(call.is_held for call in calls[:2])
    broker.advance(1)
    assert all(call.answered for call in calls), "they would have ended 15,100 and 15,200 ms after the start"


def test_a_later_call_of_a_member_ends_the_one_before() -> None:
    broker = BrokerNode("a", 2)
    version = hold(broker).response().version
    held = hold(broker, known_version=version, broker_start=1)
    hold(broker, known_version=version, broker_start=1)
    broker.server.run()
    assert held.response().is_unchanged
    held.hang_up()
    assert len(listed(broker).members) == 1


def test_a_call_that_was_replaced_is_answered_without_the_list_which_the_newer_one_gets() -> None:
    broker = BrokerNode("a", 2)
    first = hold(broker).response()
    held = hold(broker, known_version=first.version, broker_start=1)
    broker.server.call(HOLD, joining(1).SerializeToString())
    newer = hold(broker, known_version=first.version, broker_start=1)
    broker.server.run()
    ended = held.response()
    assert (ended.is_unchanged, ended.version, len(ended.members)) == (True, first.version, 0)
    broker.advance(int(GATHER_MAX_MS))
    assert len(newer.response().members) == 2
    restarted = hold(broker, known_version=ended.version, broker_start=9)
    assert len(restarted.response().members) == 2


def says(name: str, *queue_ids: int, epoch: int = 0) -> GroupMember:
    return GroupMember(
        client_id=name, nonce=6, topics=[MemberTopic(topic="T", queue_ids=queue_ids)], member_epoch=epoch
    )


def test_a_call_from_before_the_member_gave_its_queues_up_arrives_late_and_changes_nothing() -> None:
    broker = BrokerNode("a", 2)

    def call(said: GroupMember, **fields: object) -> FakeCall:
        request = HoldMembershipRequest(consumer_group="g", member=said, hold_ms=10_000, **fields)  # type: ignore[arg-type]
        return broker.server.call(HOLD, request)

    first = call(says("n", 0, 1, epoch=1)).response()
    joined = call(says("n", epoch=2)).response()
    held = call(says("n", 1, epoch=2), known_version=joined.version, broker_start=1)
    late = call(says("n", 0, 1, epoch=1), known_version=first.version, broker_start=1).response()
    assert (late.is_unchanged, late.version, len(late.members)) == (True, first.version, 0)
    broker.server.run()
    assert held.is_held
    (member,) = listed(broker).members
    assert (member.member, member.silent_ms) == (says("n", 1, epoch=2), 0)


@pytest.mark.parametrize(("epoch", "is_gone"), [(1, False), (2, True), (0, True)])
def test_a_leave_of_an_earlier_membership_ends_no_later_one(epoch: int, is_gone: bool) -> None:
    broker = BrokerNode("a", 2)
    for joined in (1, 2):
        request = HoldMembershipRequest(consumer_group="g", member=says("n", epoch=joined), hold_ms=10_000)
        broker.server.call(HOLD, request).response()
    leave = LeaveGroupRequest(consumer_group="g", client_id="n", nonce=6, member_epoch=epoch)
    assert broker.server.call(LEAVE, leave).error is None
    assert len(listed(broker).members) == (not is_gone)


def test_a_claim_is_answered_at_once_without_the_list_and_the_news_come_with_the_next_call() -> None:
    broker = BrokerNode("a", 4)
    version = hold(broker).response().version
    known: dict[str, object] = {"consumer_group": "g", "broker_start": 1, "hold_ms": 10_000}

    def claim(said: GroupMember, **fields: object) -> HoldMembershipResponse:
        request = HoldMembershipRequest(member=said, claims_only=True, **(known | fields))  # type: ignore[arg-type]
        answer = broker.server.call(HOLD, request).response()
        assert isinstance(answer, HoldMembershipResponse)
        return answer

    joined = claim(says("n"), broker_start=0)
    assert [len(joined.members), joined.is_about_claims] == [2, False], "it has no list yet"
    granted = claim(says("n", 1, 2), known_version=joined.version)
    assert (granted.is_about_claims, granted.is_unchanged, len(granted.members), list(granted.taken)) == (True, False, 0, [])
    assert granted.version == joined.version
    mine = GroupMember(client_id="m", nonce=5, topics=[MemberTopic(topic="T", queue_ids=[0, 2])])
    refused = claim(mine, known_version=version)
    assert [(one.topic, list(one.queue_ids)) for one in refused.taken] == [("T", [2])]
    assert (refused.version, len(refused.members)) == (version, 0), "the other member is news that is still to come"
    news = hold(broker, known_version=refused.version, broker_start=1)
    broker.advance(int(GATHER_MAX_MS))
    assert len(news.response().members) == 2
    other_start = claim(says("n", 1), known_version=granted.version, broker_start=9)
    assert len(other_start.members) == 2


@pytest.mark.parametrize("knows_claims", [True, False])
def test_a_join_costs_two_lists_a_member_and_claims_cost_none(knows_claims: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[HoldMembershipResponse] = []
    take = MembershipState.answered

    def answered(self: MembershipState, ticket: MemberTicket, payload: bytes, now_s: float) -> None:
        answers.append(HoldMembershipResponse.FromString(payload))
        take(self, ticket, payload, now_s)

    world = World(BrokerNode("a", 32), knows_claims=knows_claims)
    for number in range(16):
        world.join(f"m{number:02}")
    world.run(1_000)
    monkeypatch.setattr(MembershipState, "answered", answered)
    world.join("last")
    world.run(1_000)
    assert set(world.owners().values()) == {1}
    assert sum(answer.is_about_claims for answer in answers) > 0 or not knows_claims
    lists = sum(bool(answer.members) for answer in answers)
    # That somebody came, and that queues are free. A member of an older version got a list for its claims, too.
    assert lists <= 2 * 17 + 2


def test_two_that_claim_one_queue_at_once_do_not_both_get_it() -> None:
    world = World(BrokerNode("a", 2))
    first, second = world.join("m1"), world.join("m2")
    world.run(1_000)
    queue = world.queues()[0]
    for member in (first, second):
        member.queues.clear()
        member.state.claim(())
        beat(member)
    world.run(0)
    for member in (first, second):
        member.state._claims = {queue: _Claim()}
        member.state._tell_brokers([queue])
        beat(member)
        member._take_outcomes(world.now_s)
    assert [claim.is_granted for claim in first.state._claims.values()] == [True]
    assert not second.state._claims
    assert second.state._is_taken(queue), "it is not claimed again before the broker says that it is free"


@pytest.mark.parametrize("is_faster", [True, False])
def test_who_claims_by_the_first_call_after_its_connection_broke_keeps_what_it_has(is_faster: bool) -> None:
    world = World(BrokerNode("a", 3))
    first, second = world.join("m1"), world.join("m2")
    world.run(1_000)
    assert (len(first.queues), len(second.queues)) == (2, 1)
    kept, queue = set(first.queues), next(iter(second.queues))
    second.queues.clear()
    second.state.claim(())
    beat(second)
    world.members.clear()  # None of them comes to `poll`.
    world.run(100)
    beat(first)
    assert not first.state._is_taken(queue)
    first.crash()  # The broker sees that its call broke; the member has not seen it yet.
    first.calls.clear()
    if is_faster:
        second.queues = {queue}
        second.state.claim({queue})
        beat(second)
    first.state._claims = {queue: _Claim()}
    first.state._tell_brokers([queue])
    beat(first)
    first._take_outcomes(world.now_s)
    assert first.state.take_lost() == set()
    assert first.queues == kept
    assert [claim.is_granted for claim in first.state._claims.values()] == ([] if is_faster else [True])


def lists_of(member: MemberNode) -> dict[str, int | None]:
    """Number of members in the list of each broker; None: it has no list."""
    return {name: None if broker.members is None else len(broker.members) for name, broker in member.state._brokers.items()}


def test_an_answer_without_a_list_to_who_has_forgotten_its_own_is_followed_by_a_list() -> None:
    world = World(BrokerNode("a", 2), BrokerNode("b", 2))
    first, second = world.join("m1"), world.join("m2")
    world.run(1_000)
    beats = [call for call in first.calls if call[1].name == "a"]
    first.state._forget("a", first.state._brokers["a"])
    for ticket, _, _ in beats:
        unchanged = HoldMembershipResponse(version=9, broker_start=1, is_unchanged=True, expiry_ms=25_000)
        first.state.answered(ticket, unchanged.SerializeToString(), world.now_s)  # type: ignore[arg-type]
    assert lists_of(first) == {"a": None, "b": 2}, "it does not believe that nobody else is there"
    world.run(1_000)
    assert lists_of(first) == {"a": 2, "b": 2}
    assert set(world.owners().values()) == {1}
    assert second.lost_count == 0


def test_who_has_left_and_calls_again_without_topics_is_held() -> None:
    broker = BrokerNode("a", 2)
    version = hold(broker).response().version
    nothing = HoldMembershipRequest(
        consumer_group="g", member=GroupMember(client_id="m", nonce=5), hold_ms=10_000, known_version=version, broker_start=1
    ).SerializeToString()
    assert broker.server.call(HOLD, nothing).response().is_unchanged
    assert not listed(broker).members
    again = broker.server.call(HOLD, nothing)
    broker.advance(9_999)
    assert again.is_held, "else a client that calls after each answer would call without end"
    broker.advance(1)
    assert again.response().is_unchanged
    assert not listed(broker).members
    stopped = broker.server.call(HOLD, nothing)
    broker.service.stop()
    broker.server.run()
    assert stopped.error is not None


def test_who_joins_while_it_waits_as_a_stranger_is_a_member_for_as_long_as_its_call_is_held() -> None:
    broker = BrokerNode("a", 2)
    nothing = HoldMembershipRequest(consumer_group="g", member=GroupMember(client_id="m", nonce=5), hold_ms=10_000).SerializeToString()
    stranger = broker.server.call(HOLD, nothing)
    assert stranger.is_held
    version = hold(broker).response().version
    broker.server.run()
    assert stranger.response().is_unchanged
    held = hold(broker, known_version=version, broker_start=1)
    broker.advance(2_000)
    (member,) = listed(broker).members
    assert held.is_held
    assert member.silent_ms == 0, "the stranger's call is not counted as one of the member's"


def test_members_are_listed_with_what_is_known_of_them() -> None:
    broker = BrokerNode("a", 2)
    hold(broker)
    broker.advance(2_000)
    (member,) = listed(broker).members
    assert (member.member.client_id, member.member_ms, member.silent_ms) == ("m", 2_000, 2_000)
    assert listed(broker).ownerless_queues == 2


def test_what_metrics_show_of_members_counts_queues_without_an_owner_in_seconds() -> None:
    broker = BrokerNode("a", 2)
    version = hold(broker).response().version
    hold(broker, known_version=version, broker_start=1)
    broker.advance(7_500)
    assert broker.service.counts() == (1, 1, 1, 2, 2 * 7.5, 0)


def test_a_stop_ends_what_is_held_and_refuses_what_comes() -> None:
    broker = BrokerNode("a", 2)
    version = hold(broker).response().version
    held = hold(broker, known_version=version, broker_start=1)
    broker.service.stop()
    broker.server.run()
    for call in (held, hold(broker)):
        assert call.error is not None
        assert call.error.reason == "SHUTTING_DOWN"


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"\xff", "INVALID_ARGUMENT"),
        (HoldMembershipRequest(consumer_group="g").SerializeToString(), "INVALID_ARGUMENT"),
        (
            HoldMembershipRequest(
                consumer_group="g", member=GroupMember(client_id="m", nonce=1), hold_ms=-1
            ).SerializeToString(),
            "INVALID_ARGUMENT",
        ),
        (
            HoldMembershipRequest(
                consumer_group="no group", member=GroupMember(client_id="m", nonce=1)
            ).SerializeToString(),
            "INVALID_ARGUMENT",
        ),
    ],
)
def test_nonsense_is_refused(payload: bytes, reason: str) -> None:
    call = BrokerNode("a", 1).server.call(HOLD, payload)
    assert call.error is not None
    assert call.error.reason == reason


# -- asking a member ---------------------------------------------------------------------------------------------------------


def ask(broker: BrokerNode, client_id: str = "m", **fields: object) -> FakeCall:
    request = DescribeMemberRequest(consumer_group="g", client_id=client_id, **fields)  # type: ignore[arg-type]
    return broker.server.call(DESCRIBE, request)


def described(call: FakeCall) -> DescribeMemberResponse:
    answer = call.response()
    assert isinstance(answer, DescribeMemberResponse)
    return answer


@pytest.mark.parametrize("is_back", [True, False])
def test_the_locks_of_a_member_whose_connection_breaks_wait_for_it_a_moment(is_back: bool) -> None:
    broker = BrokerNode("a", 2)
    gone: list[tuple[str, str, int, bool]] = []
    broker.service.listen_for_gone(lambda *member: gone.append(member))
    call = hold(broker)
    version = call.response().version
    hold(broker, known_version=version, broker_start=1).hang_up()
    (left,) = {(said.client_id, said.nonce) for said in call.response().members}
    assert not listed(broker).members
    broker.advance(int(BACK_MS) - 1)
    assert not gone
    if is_back:
        hold(broker)
    broker.advance(1)
    assert gone == ([] if is_back else [("g", *left, True)])


@pytest.mark.parametrize("way", ["by LeaveGroup", "over its calls"])
def test_the_locks_of_a_member_that_leaves_end_at_once_though_its_connection_was_closed_before(way: str) -> None:
    broker = BrokerNode("a", 2)
    gone: list[tuple[str, str, int, bool]] = []
    broker.service.listen_for_gone(lambda *member: gone.append(member))
    version = hold(broker).response().version
    hold(broker, known_version=version, broker_start=1).hang_up()
    if way == "by LeaveGroup":
        broker.server.call(LEAVE, LeaveGroupRequest(consumer_group="g", client_id="m", nonce=5).SerializeToString()).response()
    else:
        nothing = HoldMembershipRequest(consumer_group="g", member=GroupMember(client_id="m", nonce=5), hold_ms=10_000)
        broker.server.call(HOLD, nothing.SerializeToString())
    assert gone == [("g", "m", 5, False)]


def test_a_question_goes_down_the_held_call_and_the_answer_comes_with_the_next() -> None:
    broker = BrokerNode("a", 2)
    version = hold(broker).response().version
    held = hold(broker, known_version=version, broker_start=1)
    asked = ask(broker, wants_stacks=True)
    broker.server.run()
    question = held.response()
    assert question.is_unchanged
    assert question.wants_stacks
    assert not asked.answered
    said = MemberDescription(description_id=question.description_id, kind="PushConsumer")
    again = hold(broker, known_version=version, broker_start=1, description=said)
    broker.server.run()
    assert described(asked).description.kind == "PushConsumer"
    assert again.is_held, "there is nothing else to say"


def test_a_member_that_holds_no_call_is_asked_with_the_next_one() -> None:
    broker = BrokerNode("a", 2)
    version = hold(broker).response().version
    asked = ask(broker)
    question = hold(broker, known_version=version, broker_start=1).response()
    assert question.description_id
    assert not question.wants_stacks
    other = MemberDescription(description_id=question.description_id + 1)
    hold(broker, known_version=version, broker_start=1, description=other)
    broker.server.run()
    assert not asked.answered, "that was the answer to something else"


def test_a_member_that_says_nothing_in_time_is_silent() -> None:
    broker = BrokerNode("a", 2)
    version = hold(broker).response().version
    asked = ask(broker, wait_ms=2_000)
    hold(broker, known_version=version, broker_start=1)
    broker.advance(1_999)
    assert not asked.answered
    broker.advance(1)
    assert not described(asked).HasField("description")
    late = MemberDescription(description_id=1, kind="late")
    assert hold(broker, known_version=version, broker_start=1, description=late).error is None


def test_who_is_no_member_cannot_be_asked() -> None:
    broker = BrokerNode("a", 2)
    hold(broker)
    for call in (ask(broker, "nobody"), ask(broker, nonce=99)):
        assert call.error is not None
        assert call.error.reason == "MEMBER_UNKNOWN"
    wrong = ask(broker, wait_ms=30_001).error
    assert wrong is not None
    assert wrong.reason == "INVALID_ARGUMENT"


def test_questions_are_bounded_and_one_that_is_given_up_counts_no_more() -> None:
    broker = BrokerNode("a", 2)
    hold(broker)
    calls = [ask(broker, nonce=5) for _ in range(QUESTIONS_MAX)]
    refused = ask(broker).error
    assert refused is not None
    assert refused.reason == "TOO_MANY"
    calls[0].hang_up()
    broker.server.run()
    assert ask(broker).error is None


def test_a_description_that_is_too_large_is_cut() -> None:
    broker = BrokerNode("a", 2)
    version = hold(broker).response().version
    asked = ask(broker)
    question = hold(broker, known_version=version, broker_start=1).response()
    said = MemberDescription(
        description_id=question.description_id, kind="k", settings={"a": "x" * DESCRIPTION_MAX_BYTES}
    )
    held = hold(broker, known_version=version, broker_start=1, description=said)
    broker.server.run()
    assert described(asked).description.is_cut
    assert not described(asked).description.settings
    # Nor does it stay for as long as the member's call is held.
    assert held.is_held
    assert len(held.payload) < 1_000


def test_the_sdks_member_answers_and_one_that_cannot_says_nothing() -> None:
    broker = BrokerNode("a", 2)
    world = World(broker)
    member = MemberNode(world, "m", Average())
    wanted: list[bool] = []

    def describe(wants_stacks: bool) -> MemberDescription:
        wanted.append(wants_stacks)
        if len(wanted) > 1:
            raise RuntimeError("a defect")
        return MemberDescription(kind="here")

    member.state.describe = describe
    for _ in range(3):
        member.turn()
        broker.advance(40)
    for wants_stacks, kind in ((True, "here"), (False, "")):
        asked = ask(broker, wants_stacks=wants_stacks, wait_ms=1_000)
        for _ in range(4):
            member.turn()
            broker.advance(300)
        assert described(asked).description.kind == kind
    assert wanted == [True, False]


def joining(number: int, wanted: str = "") -> HoldMembershipRequest:
    topic = MemberTopic(topic="T", filter=wanted)
    said = GroupMember(client_id=f"m{number:03}", nonce=1, topics=[topic], allocation="average")
    return HoldMembershipRequest(consumer_group="g", member=said, hold_ms=15_000)


def test_many_who_join_together_get_one_answer_each_with_all_of_them() -> None:
    broker = BrokerNode("a", 4)
    calls = [broker.server.call(HOLD, joining(number).SerializeToString()) for number in range(200)]
    at_once = sum(call.answered for call in calls)
    assert at_once <= SMALL_COUNT, "an answer to each of them for each that comes would be the cube of their number"
    broker.advance(int(GATHER_MAX_MS))
    found = [HoldMembershipResponse.FromString(call.answer_payload) for call in calls if call.answer_payload is not None]
    assert len(found) == 200
    assert [len(answer.members) for answer in found[SMALL_COUNT:]] == [200] * (200 - SMALL_COUNT)


def list_in(call: FakeCall) -> HoldMembershipResponse:
    answer = call.response(lambda region: b"".join(read_regions([region])))
    assert isinstance(answer, HoldMembershipResponse)
    return answer


def test_a_large_list_of_members_is_one_that_their_answers_share() -> None:
    broker = BrokerNode("a", 4)

    def answers(wanted: str) -> list[FakeCall]:
        calls = [broker.server.call(HOLD, joining(number, wanted).SerializeToString()) for number in range(200)]
        broker.advance(int(GATHER_MAX_MS))
        members = [list_in(call).members for call in calls[SMALL_COUNT:]]
        assert all(found == members[0] and len(found) == 200 for found in members)
        return calls[SMALL_COUNT:]

    assert not any(call.regions for call in answers(""))
    large = answers("x" * 4_000)
    assert len({id(region.file) for call in large for region in call.regions}) == 1
    assert all(len(call.regions) == 1 for call in large)
    assert max(len(call.answer_payload or b"") for call in large) < 500, "nothing of the list is copied"


def test_without_a_descriptor_large_lists_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> int:
        raise OSError(errno.EMFILE, name)

    monkeypatch.setattr(os, "memfd_create", fail)
    broker = BrokerNode("a", 4)
    calls = [broker.server.call(HOLD, joining(number, "x" * 4_000).SerializeToString()) for number in range(50)]
    broker.advance(int(GATHER_MAX_MS))
    assert [len(call.response().members) for call in calls[SMALL_COUNT:]] == [50] * (50 - SMALL_COUNT)


def test_answers_to_many_are_made_turn_by_turn_each_with_what_is_so_then() -> None:
    broker = BrokerNode("a", 4)
    calls = [broker.server.call(HOLD, joining(number).SerializeToString()) for number in range(200)]
    broker.lane.run()
    for function in broker.lane.timers.due(GATHER_MAX_MS / 1000):
        function()
    answered = [sum(call.answered for call in calls)]
    leaves = LeaveGroupRequest(consumer_group="g", client_id="m199", nonce=1)
    while broker.lane.posted:
        if len(answered) == 3:
            broker.server.call(LEAVE, leaves)
        broker.lane.posted.popleft()()
        answered.append(sum(call.answered for call in calls))
    made = [after - before for before, after in itertools.pairwise(answered) if after > before]
    assert made[:3] == [ANSWERS_MAX] * 3
    answers = [list_in(call) for call in calls[SMALL_COUNT:-1]]
    versions = {answer.version: len(answer.members) for answer in answers}
    assert list(versions.values()) == [200, 199]
    assert all(len(answer.members) == versions[answer.version] for answer in answers)


def test_members_hear_of_who_consumes_beside_them_once(caplog: pytest.LogCaptureFixture) -> None:
    broker = BrokerNode("a", 4)
    first = hold(broker).response()
    assert first.difference == ""
    held = hold(broker, known_version=first.version, broker_start=1)
    broker.beside = {"g": "a simple consumer at 10.0.0.5", "others": "x"}
    broker.advance(1_000)
    answer = held.response()
    assert answer.difference == "a simple consumer at 10.0.0.5"
    held = hold(broker, known_version=answer.version, broker_start=1)
    broker.advance(5_000)
    assert not held.answered
    assert hold(broker).response().difference == answer.difference
    broker.beside.clear()
    broker.advance(1_000)
    assert hold(broker).response().difference == ""
    told = [text for text in caplog.messages if "the members of group g are not alike: a simple consumer at 10.0.0.5" in text]
    assert len(told) == 1
    assert told[0].endswith(". Give each kind a group of its own"), "settings cannot be made the same"


def test_who_consumes_beside_a_member_is_told_with_advice_that_helps(caplog: pytest.LogCaptureFixture) -> None:
    world = World(BrokerNode("a", 4))
    beside = GroupMembers(ManualClock())
    beside.came_beside("g", "a simple consumer (pop)", "10.0.0.5:4711")
    world.brokers["a"].beside = beside.beside()
    world.join("m1")
    world.run(3_000)
    told = [text for text in caplog.messages if "says broker a" in text]
    assert [text.partition("so each message comes to both. ")[2] for text in told] == ["Give each kind a group of its own"]


def test_each_of_many_hears_how_the_first_differs_from_it() -> None:
    broker = BrokerNode("a", 4)
    calls = [broker.server.call(HOLD, joining(number, "tags X" if number == 150 else "").SerializeToString()) for number in range(200)]
    broker.advance(int(GATHER_MAX_MS))
    texts = []
    for call in calls[SMALL_COUNT:]:
        assert call.answer_payload is not None
        texts.append(HoldMembershipResponse.FromString(call.answer_payload).difference)
    odd = texts.pop(150 - SMALL_COUNT)
    assert odd.startswith("m000 wants all messages")
    assert len(set(texts)) == len(texts)
    assert all(text.startswith("m150 wants tags X") for text in texts)


def test_who_dies_between_two_calls_is_gone_at_the_next_look_and_not_only_after_the_gap() -> None:
    broker = BrokerNode("a", 4)
    gone: list[tuple[str, bool]] = []
    broker.service.listen_for_gone(lambda group, client_id, nonce, may_return: gone.append((client_id, may_return)))
    dies, stays = (broker.server.call(HOLD, joining(number).SerializeToString()) for number in range(2))
    broker.advance(int(GATHER_MAX_MS))
    assert dies.answered
    assert stays.answered
    dies.hang_up()
    broker.advance(int(TICK_MS))
    assert gone == [("m000", True)]
    broker.advance(int(TICK_MS))
    answer = broker.server.call(LIST, ListMembersRequest(consumer_group="g").SerializeToString()).answer_payload
    assert answer is not None
    assert [one.member.client_id for one in ListMembersResponse.FromString(answer).members] == ["m001"]


def test_a_connection_that_ends_after_its_member_has_called_on_another_one_says_nothing() -> None:
    broker = BrokerNode("a", 4)
    first = broker.server.call(HOLD, joining(0).SerializeToString())
    assert first.answered
    broker.server.call(HOLD, joining(0).SerializeToString())
    first.hang_up()
    broker.advance(2 * int(TICK_MS))
    answer = broker.server.call(LIST, ListMembersRequest(consumer_group="g").SerializeToString()).answer_payload
    assert answer is not None
    assert len(ListMembersResponse.FromString(answer).members) == 1


def stopped_calls(world: World, *, locks_queues: bool) -> list[tuple[str, bytes]]:
    """What a member sends to a broker from its start to its stop: it joins, says that it has the queues, renews that, and leaves."""
    member = MemberNode(world, "stopped", Average())
    member.state.locks_queues, member.state.is_named = locks_queues, not locks_queues
    world.members.append(member)
    sent: list[tuple[str, bytes]] = []
    for _ in range(60):
        world.run(20)
        sent += [(HOLD, bytes(call.payload)) for _, _, call in member.calls]
    world.members.remove(member)
    sent += [(LEAVE, leave.payload) for leave in member.state.leave_requests()]
    return list(dict.fromkeys(sent))


@pytest.mark.parametrize("locks_queues", [False, True])
def test_calls_of_a_member_that_has_stopped_make_it_no_member_in_whatever_order_they_arrive(locks_queues: bool) -> None:
    sent = stopped_calls(World(BrokerNode("a", 4)), locks_queues=locks_queues)
    assert len(sent) >= 4
    for order in itertools.permutations(sent):
        world = World(BrokerNode("a", 4))
        server = world.brokers["a"].server
        for path, payload in order:
            server.call(path, payload)
            world.run(20)
        assert not server.call(LIST, ListMembersRequest(consumer_group="g")).response().members
        # The same program, started again.
        member = world.join("stopped")
        world.run(1_000)
        assert len(member.queues) == 4


@pytest.mark.parametrize("locks_queues", [False, True])
def test_others_have_the_queues_of_a_member_whose_call_arrives_behind_its_leave(locks_queues: bool) -> None:
    world = World(BrokerNode("a", 4))
    other = world.join("other")
    sent = stopped_calls(world, locks_queues=locks_queues)
    server = world.brokers["a"].server
    server.call(*sent[-1])
    late = [server.call(*call) for call in sent[:-1]]
    assert [call.error.reason if call.error is not None else "" for call in late] == ["MEMBER_UNKNOWN"] * len(late)
    world.run(1_000)
    assert len(other.queues) == 4


@pytest.mark.parametrize("is_named", [False, True])
def test_who_leaves_while_nobody_runs_its_loop_joins_again_at_once(is_named: bool) -> None:
    world = World(BrokerNode("a", 4))
    member = world.join("m1")
    member.state.is_named = is_named
    world.run(1_000)
    requests = member.state.leave_requests(is_final=False)
    member.state.restart()
    for leave in requests:
        world.brokers["a"].server.call(LEAVE, leave.payload)
    world.run(1_000)
    assert len(member.queues) == 4


def test_that_a_member_has_left_is_known_for_as_long_as_a_call_may_be_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protomq_broker.memberships.LEFT_MAX", 3)
    broker = BrokerNode("a", 4)
    known = broker.service._memberships

    def leave(nonce: int, epoch: int = 0, *, is_final: bool = False) -> None:
        request = LeaveGroupRequest(consumer_group="g", client_id="m", nonce=nonce, member_epoch=epoch, is_final=is_final)
        broker.server.call(LEAVE, request.SerializeToString())

    def has_left(nonce: int, epoch: int = 0) -> bool:
        return known.has_left("g", GroupMember(client_id="m", nonce=nonce, member_epoch=epoch), broker.clock.monotonic_ms())

    leave(1, is_final=True)
    leave(2, epoch=2)
    leave(2, epoch=1)
    leave(3)
    assert [has_left(1), has_left(1, 9), has_left(2), has_left(2, 2), has_left(2, 3), has_left(3)] == [True, True, True, True, False, False]
    broker.advance(known.expiry_ms)
    assert not has_left(1)
    assert not has_left(2)
    for nonce in range(10, 20):
        leave(nonce, is_final=True)
    assert len(known._left) == 3
    assert [has_left(nonce) for nonce in (16, 17, 18, 19)] == [False, True, True, True]


def test_of_who_can_be_no_member_it_is_not_noted_that_he_has_left() -> None:
    """Anybody may say so, of names of any length."""
    broker = BrokerNode("a", 4)
    for client_id, nonce in (("m" * 256, 1), ("", 1), ("m", 0)):
        request = LeaveGroupRequest(consumer_group="g", client_id=client_id, nonce=nonce, is_final=True)
        assert broker.server.call(LEAVE, request.SerializeToString()).error is None
    assert not broker.service._memberships._left
