"""Brokers whose names begin with their machine rooms, as `MachineRoom` and `MachineRoomNear` need them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protomq import PullConsumer
from protomq.allocation import Allocation, MachineRoom, MachineRoomNear
from tests.support.cli import run
from tests.support.ha_brokers import HaBroker, running
from tests.support.namesrv import running_namesrv
from tests.support.waiting import PATIENCE_S, wait_for

ROOMS = [
    (MachineRoom(frozenset({"north"})), [["north@a"], ["north@a"]]),
    (MachineRoomNear(), [["north@a"] * 2, ["south@b"] * 2]),
]


@pytest.mark.parametrize(("allocation", "expected"), ROOMS, ids=["room", "near"])
def test_members_get_queues_of_the_brokers_of_their_rooms(
    tmp_path: Path, allocation: Allocation, expected: list[list[str]]
) -> None:
    with running_namesrv() as server:
        namesrv = str(server.remoting)
        brokers = [HaBroker(tmp_path / name, "ASYNC_MASTER", 0, broker_name=name, namesrv=[namesrv]) for name in ("north@a", "south@b")]
        with running(*brokers):
            wait_for(lambda: run("cluster", "list", "-o", "jsonl", namesrv=namesrv).stdout.count("\n") == 2)
            run("topic", "create", "t", "-q", "2", namesrv=namesrv)
            (line,) = run("send", "t", "x", "-b", "north@a", "-o", "jsonl", namesrv=namesrv).stdout.splitlines()
            assert "north@a" in json.loads(line).values()
            with (
                PullConsumer("g", namesrv=namesrv, begin="earliest", allocation=allocation, machine_room="north") as north,
                PullConsumer("g", namesrv=namesrv, begin="earliest", allocation=allocation, machine_room="south") as south,
            ):
                members = (north, south)
                for member in members:
                    member.subscribe("t")

                def owned() -> list[list[str]]:
                    for member in members:
                        member.poll(0.05)
                    return [[queue.broker_name for queue in member.assignment()] for member in members]

                wait_for(lambda: owned() == expected, PATIENCE_S)
