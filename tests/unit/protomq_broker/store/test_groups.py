"""Settings of groups are records of the log: the highest version holds, the cache is never believed against the log."""

from __future__ import annotations

import random
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq.v1.state_pb2 import GroupsRecord
from protomq_broker.store.errors import DiskFullError
from protomq_broker.store.state import groups as groups_module
from protomq_broker.store.state.group_settings import GroupSettings, group_to_message
from protomq_broker.store.state.groups import GroupTable, TooManySettingsError
from protomq_broker.testing.simdisk import Fault, SimDisk, SimulatedCrash
from tests.support.lost_files import lose_all_but_log

from .log_helpers import make_request
from .store_helpers import SEGMENT, open_store

PATH = "/s/config/groups.json"


def make_table(disk: SimDisk | None = None, start: int = 0, end: int = 1 << 40) -> GroupTable:
    disk = disk or SimDisk()
    disk.make_folder("/s/config")
    return GroupTable(disk, PATH, start, end)


def record(*settings: GroupSettings, deleted: tuple[str, ...] = ()) -> bytes:
    return GroupsRecord(
        settings=map(group_to_message, settings), deleted_groups=deleted
    ).SerializeToString()


def test_a_group_that_nobody_has_set_up_has_the_defaults() -> None:
    table = make_table()
    assert table.find("g") == GroupSettings("g")
    assert table.all() == []
    assert not table.has_settings("g")


def test_the_highest_version_holds_in_whatever_order_they_come() -> None:
    settings = [GroupSettings("g", retry_count_max=n, version=n) for n in (3, 5, 4)]
    for order in permutations(settings):
        table = make_table()
        for position, each in enumerate(order):
            table.apply(record(each), position)
        assert table.find("g") == settings[1]


def test_groups_that_may_not_consume_are_known() -> None:
    table = make_table()
    off = GroupSettings("off", consume_enabled=False, version=1)
    table.apply(record(off, GroupSettings("on", version=1)), 0)
    assert table.disabled == {"off"}
    table.apply(record(GroupSettings("off", version=2)), 1)
    assert table.disabled == frozenset()
    table.apply(record(GroupSettings("off", consume_enabled=False, version=3)), 2)
    table.apply(record(deleted=("off",)), 3)
    assert table.disabled == frozenset()
    assert not table.has_settings("off")


@pytest.mark.parametrize("body", [b"\xff", GroupsRecord(settings=[{"version": 3}]).SerializeToString()])  # type: ignore[list-item]
def test_a_record_that_is_none_changes_nothing(body: bytes) -> None:
    table = make_table()
    table.apply(record(GroupSettings("g", version=1)), 0)
    table.apply(body, 10)
    assert table.all() == [GroupSettings("g", version=1)]


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.booleans(), st.booleans()),
        max_size=20,
    ),
    st.integers(0, 20),
)
def test_snapshot_and_records_behind_it_make_the_same(
    changes: list[tuple[str, int, bool, bool]], saved: int
) -> None:
    disk = SimDisk()
    table = make_table(disk)
    bodies = [
        record(deleted=(name,))
        if is_gone
        else record(GroupSettings(name, consume_enabled=is_on, version=version))
        for name, version, is_on, is_gone in changes
    ]
    for position, body in enumerate(bodies):
        if position == saved and (snapshot := table.unsaved()) is not None:
            snapshot.save(position)
        table.apply(body, position)
    again = make_table(disk)
    for position, body in enumerate(bodies):
        if position >= again.replay_from:
            again.apply(body, position)
    assert (again.all(), again.disabled) == (table.all(), table.disabled)
    if bodies and saved < len(bodies) and saved:
        assert again.replay_from == saved


def test_put_answers_what_holds() -> None:
    store = open_store(SimDisk())
    assert store.groups.put(GroupSettings("g", retry_count_max=3)).version == 1
    assert store.groups.put(GroupSettings("g", retry_count_max=4)).version == 2
    newer = GroupSettings("g", retry_count_max=9, version=70)
    assert store.groups.put(newer) == newer
    before = store.appended_position
    for version in (69, 70):
        assert store.groups.put(GroupSettings("g", version=version)) == newer
    assert store.appended_position == before, "what changes nothing has no record"


def test_settings_that_the_log_does_not_take_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(SimDisk())

    def refuse(*_: object) -> int:
        raise DiskFullError("no space")

    monkeypatch.setattr(store, "append_state", refuse)
    with pytest.raises(DiskFullError):
        store.groups.put(GroupSettings("g"))
    assert not store.groups.has_settings("g")


def test_no_more_groups_are_set_up_than_a_broker_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups_module, "GROUPS_SET_UP_MAX", 2)
    store = open_store(SimDisk())
    for name in ("a", "b"):
        store.groups.put(GroupSettings(name))
    with pytest.raises(TooManySettingsError):
        store.groups.put(GroupSettings("c"))
    assert store.groups.put(GroupSettings("a", orderly=True)).orderly


def test_settings_outlive_the_segments_that_told_of_them() -> None:
    disk = SimDisk()
    store = open_store(disk)
    wanted = [GroupSettings(f"g{n}", retry_count_max=n, version=n + 1) for n in range(20)]
    for settings in wanted:
        store.groups.put(settings)
    for number in range(40):
        store.append([make_request([bytes(300)], sequence=number)])
        if number % 10 == 9:
            store.flush()
            store.checkpoint()
            store.delete_segments_below(store.appended_position)
    assert store.min_position > SEGMENT
    store.close()
    lose_all_but_log(disk)
    assert open_store(disk).groups.all() == sorted(wanted, key=lambda each: each.group)


@pytest.mark.parametrize("ends", ["kill", "power cut"])
def test_settings_that_were_answered_are_there_after_any_crash(ends: str) -> None:
    for number in range(1, 200):
        disk = SimDisk()
        store = open_store(disk, sync_flush=True)
        disk.fail_at(number, Fault.CRASH)
        answered: dict[str, GroupSettings] = {}
        ended = False
        try:
            for turn in range(6):
                settings = store.groups.put(GroupSettings("ab"[turn % 2], retry_count_max=turn))
                store.flush()
                answered[settings.group] = settings
                if turn == 3:
                    store.checkpoint()
            ended = True
        except SimulatedCrash:
            pass
        disk = disk.killed() if ends == "kill" else disk.crash(random.Random(number))
        again = open_store(disk, sync_flush=True)
        for group, settings in answered.items():
            found = again.groups.find(group)
            assert found.version >= settings.version
            assert found.version > settings.version or found == settings
        if ended:
            return
    raise AssertionError("the work never came to its end")
