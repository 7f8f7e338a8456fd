"""`ha status` and `ha forget`: what a row says, and who is forgotten."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from protomq import (
    BrokerInfo,
    BrokerRole,
    HaStatus,
    KnownMember,
    LeadershipStatus,
    Permission,
    RefusedBroker,
    ReplicaStatus,
)
from protomq.errors import BrokerNotFoundError, UnsupportedError
from protomq_cli import replication
from protomq_cli.replication import _row
from tests.support.cli import run


def state(role: BrokerRole, *, problem: str = "", master_address: str = "") -> HaStatus:
    return HaStatus(
        broker_name="b",
        broker_id=0,
        role=role,
        epoch=1,
        first_position=0,
        end_position=100,
        flushed_position=100,
        confirmed_position=100,
        replicas=(),
        in_sync_count=3,
        in_sync_replicas=2,
        min_in_sync_replicas=1,
        master_address=master_address,
        master_end_position=0,
        master_silence_ms=None,
        problem=problem,
    )


@pytest.mark.parametrize("problem", ["", "no space for an append"])
def test_a_master_with_a_problem_still_shows_its_copies(problem: str) -> None:
    row = _row(state(BrokerRole.SYNC_MASTER, problem=problem), as_table=True)
    assert (row["in_sync"], row["problem"]) == ("3 of 2", problem)


@pytest.mark.parametrize("problem", ["", "it does not follow"])
def test_a_slave_counts_no_copies(problem: str) -> None:
    row = _row(state(BrokerRole.SLAVE, problem=problem, master_address="m:1"), as_table=True)
    assert (row["in_sync"], row["problem"]) == ("", problem)


def test_a_master_lags_by_what_a_member_of_its_set_lacks_that_follows_nobody() -> None:
    leads = LeadershipStatus("m1", "LEADING", 3, "m1", ("m1", "m2"), (), 1)
    master = replace(state(BrokerRole.SYNC_MASTER), confirmed_position=70, leadership=leads)
    assert master.lag_bytes == 0
    assert replace(master, leadership=replace(leads, late=("m2",))).lag_bytes == 30
    behind = ReplicaStatus(3, "h:1", False, 60, 60, 40, 5)
    assert replace(master, replicas=(behind,), leadership=replace(leads, late=("m2",))).lag_bytes == 40


class FakeAdmin:
    """An elected master whose id is 1 while it follows. 2, in the in-sync set, and 3, which is not, do not answer."""

    def __init__(self) -> None:
        away = (KnownMember("m2", 2, "host2:1"), KnownMember("m3", 3, "host3:1"))
        known = (KnownMember("m1", 1, "host1:1"), *away)
        leadership = LeadershipStatus("m1", "LEADING", 3, "m1", ("m1", "m2"), (), 1, known)
        self.states = [replace(state(BrokerRole.SYNC_MASTER), leadership=leadership, away=away)]
        self.forgotten: list[int] = []
        self.refused: list[RefusedBroker] = []

    def ha_status(self, broker: str | None) -> list[HaStatus]:
        assert broker in (None, "b")
        return self.states

    def refused_brokers(self) -> list[RefusedBroker]:
        return self.refused

    def forget_member(self, broker: str, broker_id: int) -> None:
        if broker_id != 3:
            raise BrokerNotFoundError(f"broker_id {broker_id} cannot be forgotten")
        self.forgotten.append(broker_id)


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> FakeAdmin:
    admin = FakeAdmin()
    monkeypatch.setattr(replication, "open_admin", lambda *_: nullcontext(admin))
    return admin


def test_elected_brokers_that_do_not_answer_have_rows(admin: FakeAdmin) -> None:
    # What another one has read of etcd may be older.
    (master,) = admin.states
    assert master.leadership is not None
    slave = replace(master.leadership, state="FOLLOWING")
    gone = (*master.away, KnownMember("m0", 9, "host9:1"))
    admin.states.append(replace(master, broker_id=4, role=BrokerRole.SLAVE, leadership=slave, away=gone))
    rows = json.loads(run("ha", "status", "-o", "json").stdout)
    assert [(row["broker_id"], row["role"]) for row in rows] == [(0, "SYNC_MASTER"), (2, "AWAY"), (3, "AWAY"), (4, "SLAVE")]
    assert (rows[1]["member"], rows[1]["address"], rows[1]["end_position"]) == ("m2", "host2:1", None)
    assert "is in the in-sync set still; last at host2:1" in rows[1]["problem"]
    assert rows[2]["problem"].endswith("If it was removed for good: protomq ha forget b --id 3")
    assert rows[0]["leadership"]["known"][2] == {"member": "m3", "broker_id": 3, "address": "host3:1"}
    assert "AWAY" in run("ha", "status").stdout


def test_a_broker_that_a_name_server_refuses_has_a_row(admin: FakeAdmin) -> None:
    """Without it nobody but the broker's log tells why a replica is not there."""
    stray = BrokerInfo("other", "b", 1, "stray:8081", "stray:10911", "", 7, Permission.READ_WRITE)
    elsewhere = replace(stray, broker_name="z")
    when = datetime(2026, 1, 1, tzinfo=UTC)
    cause = "the name b belongs to brokers that elect their master in another etcd"
    admin.refused = [RefusedBroker(each, when, "NAME_TAKEN", cause) for each in (stray, elsewhere)]
    rows = json.loads(run("ha", "status", "-b", "b", "-o", "json").stdout)
    assert [(row["broker_id"], row["role"]) for row in rows] == [(0, "SYNC_MASTER"), (1, "REFUSED"), (2, "AWAY"), (3, "AWAY")]
    assert rows[1]["problem"] == f"a name server refuses it, so nobody finds it; it is at stray:10911. {cause}"
    assert rows[1].keys() >= rows[0].keys()
    assert "REFUSED" in run("ha", "status").stdout


def test_a_broker_that_was_removed_is_forgotten(admin: FakeAdmin) -> None:
    assert json.loads(run("ha", "forget", "b", "--id", "3", "-o", "json").stdout) == [
        {"broker": "b", "broker_id": 3, "forgotten": True}
    ]
    assert admin.forgotten == [3]


@pytest.mark.parametrize(
    ("broker_id", "code", "said"),
    [("1", 6, "broker_id 1 of b runs: stop it first"), ("2", 6, "it may have what nobody else has"), ("5", 4, "cannot be forgotten")],
)
def test_one_that_runs_or_is_in_the_set_or_unknown_is_not_forgotten(admin: FakeAdmin, broker_id: str, code: int, said: str) -> None:
    assert said in run("ha", "forget", "b", "--id", broker_id, code=code).stderr
    assert not admin.forgotten


def test_where_roles_are_fixed_there_is_nobody_to_forget(admin: FakeAdmin, monkeypatch: pytest.MonkeyPatch) -> None:
    def forget_member(broker: str, broker_id: int) -> None:
        raise UnsupportedError("b elects nobody", metadata={"field": "broker_name"})

    admin.states = [state(BrokerRole.SYNC_MASTER)]
    monkeypatch.setattr(admin, "forget_member", forget_member)
    assert "b has fixed roles (broker_role)" in run("ha", "forget", "b", "--id", "3", code=6).stderr


def test_an_id_that_no_broker_can_have_is_wrong_usage(admin: FakeAdmin) -> None:
    assert "2147483647" in run("ha", "forget", "b", "--id", str(1 << 63), code=2).stderr
