"""The six allocations give what RocketMQ's classes give, and share each queue to one member."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq import MessageQueue
from protomq.allocation import (
    Allocation,
    Average,
    Circle,
    Configured,
    ConsistentHash,
    GroupMember,
    MachineRoom,
    MachineRoomNear,
)
from protomq.errors import ConfigurationError
from protomq.wire.broker_names import is_broker_name

VECTORS = Path(__file__).parent / "allocation_vectors" / "vectors.json"


def strategy_of(case: dict[str, Any], queues: list[MessageQueue]) -> Allocation:
    settings = case["settings"]
    match case["strategy"]:
        case "average":
            return Average()
        case "circle":
            return Circle()
        case "configuration":
            return Configured(tuple(queues[: settings["count"]]))
        case "machine-room":
            return MachineRoom(frozenset(settings["rooms"]))
        case "machine-room-near":
            inner: dict[str, Allocation] = {"average": Average(), "circle": Circle()}
            return MachineRoomNear(inner[settings["inner"]])
        case "consistent-hash":
            return ConsistentHash(settings["virtual_nodes"])
    raise AssertionError(case["strategy"])


@pytest.mark.parametrize("strategy", ["average", "circle", "configuration", "machine-room", "machine-room-near", "consistent-hash"])
def test_the_shares_are_those_of_the_java_classes(strategy: str) -> None:
    cases = [case for case in json.loads(VECTORS.read_text()) if case["strategy"] == strategy]
    assert len(cases) >= 15
    for case in cases:
        queues = [MessageQueue(*queue) for queue in case["queues"]]
        assert all(is_broker_name(queue.broker_name) for queue in queues)
        allocation = strategy_of(case, queues)
        members = [GroupMember(name, name.split("-")[0]) for name in case["members"]]
        for member in members:
            expected = [queues[i] for i in case["shares"][member.name]]
            assert allocation.share(member, queues, members) == expected


ROOMS = ("north", "south", "west")


@given(
    st.integers(0, 40),
    st.lists(st.integers(0, 999), unique=True, min_size=1, max_size=20),
    st.sampled_from([Average(), Circle(), ConsistentHash(), MachineRoomNear(), MachineRoomNear(Circle())]),
)
def test_each_queue_goes_to_one_member(count: int, names: list[int], allocation: Allocation) -> None:
    queues = sorted(MessageQueue("T", f"{ROOMS[i % 3]}@b{i % 5}", i) for i in range(count))
    members = [GroupMember(f"m{name:03}", ROOMS[name % 2]) for name in sorted(names)]
    shared = [queue for member in members for queue in allocation.share(member, queues, members)]
    assert sorted(shared) == queues
    stranger = GroupMember("stranger", "north")
    assert allocation.share(stranger, queues, members) == []


def test_a_member_that_goes_moves_only_its_own_queues_by_consistent_hash() -> None:
    queues = [MessageQueue("T", "b", i) for i in range(200)]
    members = [GroupMember(f"m{i}") for i in range(6)]
    left = members[:3] + members[4:]
    for member in left:
        before = set(ConsistentHash().share(member, queues, members))
        assert before <= set(ConsistentHash().share(member, queues, left))


def test_a_member_or_a_broker_without_a_room_is_told() -> None:
    queues = [MessageQueue("T", "north@b", 0)]
    with pytest.raises(ConfigurationError, match="machine room"):
        MachineRoomNear().share(GroupMember("m"), queues, [GroupMember("m")])
    with pytest.raises(ConfigurationError, match="1 or more"):
        ConsistentHash(0)


def test_rooms_without_a_member_follow_its_own_in_the_order_of_their_names() -> None:
    """As in Java, whose map of rooms is sorted. A set has another order in each process."""
    rooms = [f"room{number}" for number in range(10)]
    queues = [MessageQueue("T", f"{room}@a", queue_id) for room in reversed(rooms) for queue_id in range(2)]
    member = GroupMember("m", machine_room="room7")
    wanted = ["room7", *(room for room in rooms if room != "room7")]
    share = MachineRoomNear().share(member, queues, [member])
    assert [(queue.broker_name, queue.queue_id) for queue in share] == [(f"{room}@a", n) for room in wanted for n in range(2)]


def test_what_an_allocation_of_ones_own_returns_is_left_as_it_is() -> None:
    class Remembered(Average):
        """Shares out what it has shared out before: the same list."""

        shares: ClassVar[dict[tuple[MessageQueue, ...], list[MessageQueue]]] = {}

        def share(
            self, member: GroupMember, queues: Sequence[MessageQueue], members: Sequence[GroupMember]
        ) -> list[MessageQueue]:
            return self.shares.setdefault(tuple(queues), list(queues))

    queues = [MessageQueue("T", "north@b", 0), MessageQueue("T", "south@b", 0)]
    member = GroupMember("m", machine_room="north")
    for _ in range(2):
        assert MachineRoomNear(Remembered()).share(member, queues, [member]) == queues


def test_machine_rooms_are_named_in_order_and_share_in_the_order_of_the_queues() -> None:
    rooms = [f"room{number}" for number in range(10)]
    assert MachineRoom(frozenset(rooms)).name == f"machine-room {','.join(rooms)}", "members compare it"
    queues = [MessageQueue("T", f"{room}@a", 0) for room in reversed([*rooms, "room99"])]
    members = [GroupMember("m"), GroupMember("n")]
    shares = [MachineRoom(frozenset(rooms)).share(member, queues, members) for member in members]
    assert [queue.broker_name for queue in shares[0]] == [f"room{number}@a" for number in (9, 8, 7, 6, 5)]
    assert [queue.broker_name for queue in shares[1]] == [f"room{number}@a" for number in (4, 3, 2, 1, 0)]


def test_names_tell_strategies_and_their_settings_apart() -> None:
    strategies: list[Allocation] = [
        Average(),
        Circle(),
        Configured(()),
        MachineRoom(frozenset("a")),
        MachineRoom(frozenset("b")),
        MachineRoomNear(),
        MachineRoomNear(Circle()),
        ConsistentHash(),
        ConsistentHash(3),
    ]
    assert len({strategy.name for strategy in strategies}) == len(strategies)
