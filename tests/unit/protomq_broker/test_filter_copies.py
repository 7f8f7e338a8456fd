"""What a slave takes over of its master's filter modules, and what it removes: values in, values out."""

from __future__ import annotations

import random

import pytest

from protomq_broker.filter_copies import (
    NOTHING_KNOWN,
    Change,
    CopiesFile,
    KnownCopies,
    known_after,
    plan_changes,
)
from protomq_broker.filter_modules import ModuleInfo
from protomq_broker.testing.simdisk import SimDisk

MASTER, OTHER = 7, 8
LATE, LATE_2, EARLY = ModuleInfo("late", 3, 11), ModuleInfo("late", 4, 12), ModuleInfo("early", 5, 13)


def test_what_is_missing_or_another_version_is_fetched():
    assert plan_changes([], [LATE, EARLY], NOTHING_KNOWN, MASTER) == [Change("late", None, LATE), Change("early", None, EARLY)]
    assert plan_changes([LATE], [LATE_2], NOTHING_KNOWN, MASTER) == [Change("late", LATE.crc32c, LATE_2)]
    assert plan_changes([LATE, EARLY], [EARLY, LATE], NOTHING_KNOWN, MASTER) == []


def test_a_module_is_removed_only_if_this_version_was_the_masters():
    known = KnownCopies(MASTER, {"late": LATE.crc32c})
    assert plan_changes([LATE], [], known, MASTER) == [Change("late", LATE.crc32c, None)]
    assert plan_changes([LATE_2], [], known, MASTER) == [], "it was deployed here since"
    assert plan_changes([EARLY], [], known, MASTER) == [], "it never was the master's"
    assert plan_changes([LATE], [], NOTHING_KNOWN, MASTER) == []


def test_a_master_with_another_store_removes_nothing():
    """An emptied replica that was promoted must not empty the others."""
    known = KnownCopies(MASTER, {"late": LATE.crc32c})
    assert plan_changes([LATE], [], known, OTHER) == []
    assert known_after([LATE], [], OTHER) == KnownCopies(OTHER, {})


def test_a_master_that_does_not_say_who_it_is_removes_nothing():
    assert known_after([LATE], [LATE], 0) == NOTHING_KNOWN
    assert plan_changes([LATE], [], KnownCopies(0, {"late": LATE.crc32c}), 0) == []


def test_removals_come_first():
    plan = plan_changes([LATE], [EARLY], KnownCopies(MASTER, {"late": LATE.crc32c}), MASTER)
    assert [(change.name, change.wanted) for change in plan] == [("late", None), ("early", EARLY)]


def test_names_that_are_no_modules_name_are_left_out():
    assert plan_changes([], [ModuleInfo("../topics", 3, 1)], NOTHING_KNOWN, MASTER) == []


def test_known_is_what_both_have():
    assert known_after([LATE, EARLY], [LATE_2, EARLY], MASTER) == KnownCopies(MASTER, {"early": EARLY.crc32c})


def made(disk: SimDisk) -> CopiesFile:
    return CopiesFile(disk, "/s")


def test_a_module_that_is_damaged_at_the_master_stays_here_and_one_that_is_damaged_here_is_fetched():
    damaged = ModuleInfo("late", 0, 0)
    known = KnownCopies(MASTER, {"late": LATE.crc32c})
    assert plan_changes([LATE], [damaged], known, MASTER) == []
    assert known_after([LATE], [damaged], MASTER).modules == {}
    assert plan_changes([damaged], [LATE], known, MASTER) == [Change("late", None, LATE)]
    assert plan_changes([damaged], [damaged], known, MASTER) == []


def test_what_is_known_outlives_a_restart():
    disk = SimDisk()
    disk.make_folder("/s/config")
    assert made(disk).read() == NOTHING_KNOWN
    known = KnownCopies(MASTER, {"late": LATE.crc32c})
    made(disk).write(known)
    assert made(disk).read() == known


@pytest.mark.parametrize("bit", [100, 500])
def test_a_damaged_file_says_nothing(bit):
    disk = SimDisk()
    disk.make_folder("/s/config")
    made(disk).write(KnownCopies(MASTER, {"late": LATE.crc32c}))
    disk.flip_bit("/s/config/filter_copies.json", bit)
    assert made(disk).read() == NOTHING_KNOWN


def test_it_is_written_only_if_it_has_changed():
    disk = SimDisk()
    disk.make_folder("/s/config")
    file = made(disk)
    known = KnownCopies(MASTER, {"late": LATE.crc32c})
    file.write(known)
    disk.unlink("/s/config/filter_copies.json")
    file.write(KnownCopies(MASTER, {"late": LATE.crc32c}))
    assert not disk.exists("/s/config/filter_copies.json")


def test_what_is_forgotten_stays_forgotten_after_a_power_cut():
    disk = SimDisk()
    disk.make_folder("/s/config")
    made(disk).clear()
    made(disk).write(KnownCopies(MASTER, {"late": LATE.crc32c}))
    file = made(disk)
    file.clear()
    assert file.read() == made(disk).read() == NOTHING_KNOWN
    for seed in range(10):
        assert made(disk.crash(random.Random(seed))).read() == NOTHING_KNOWN
    file.write(KnownCopies(MASTER, {"late": LATE.crc32c}))
    assert made(disk).read() == KnownCopies(MASTER, {"late": LATE.crc32c})
