"""A start that cuts the end of a log says so, and whoever elects its master knows it from then on, whenever that start is killed."""

from __future__ import annotations

import random

import pytest

from protomq_broker.store.files.side_files import TAIL_NAME
from protomq_broker.store.store import Store
from protomq_broker.tail_file import TailFile
from protomq_broker.testing.simdisk import Fault, SimDisk, SimulatedCrash

from .store_helpers import SEGMENT, open_store
from .test_following import disk_of, fill

FIRST = "/s/commitlog/00000000000000000000"


def damaged_end(*, is_elected: bool = True) -> tuple[SimDisk, int]:
    """(the disk of a killed store, in whose last append a bit has changed; where the log ended)."""
    store = open_store(SimDisk())
    disk = disk_of(store)
    if is_elected:
        tail = TailFile(disk, "/s", "one")
        tail.open(syncs=False, is_lost=False)
        tail.settle()
    fill(store, 6)
    end = store.appended_position
    assert end < SEGMENT
    disk = disk.killed()
    disk.flip_bit(FIRST, 8 * (end - 80))
    return disk, end


def tail_of(store: Store, boot_id: str = "one") -> TailFile:
    file = TailFile(disk_of(store), "/s", boot_id)
    file.open(syncs=True, is_lost=store.has_lost_its_end, was_cut=store.has_cut_its_end)
    return file


def test_a_start_that_cuts_its_log_says_so_and_the_next_one_knows_it() -> None:
    disk, end = damaged_end()
    store = open_store(disk, follows=True)
    assert store.appended_position < end
    assert store.has_cut_its_end
    again = open_store(disk_of(store).killed(), follows=True)
    assert not again.has_cut_its_end
    assert tail_of(again).was_cut, "though nothing but the note tells"
    assert not tail_of(again).may_be_lost


def test_a_start_that_finds_its_log_whole_cuts_nothing() -> None:
    disk, end = damaged_end()
    disk.flip_bit(FIRST, 8 * (end - 80))
    store = open_store(disk, follows=True)
    assert store.appended_position == end
    assert not store.has_cut_its_end
    assert not tail_of(store).was_cut


def test_a_store_whose_master_nobody_elects_keeps_no_note() -> None:
    disk, _ = damaged_end(is_elected=False)
    store = open_store(disk)
    assert store.has_cut_its_end
    assert not disk_of(store).exists(f"/s/{TAIL_NAME}")


@pytest.mark.parametrize("is_power", [False, True])
def test_the_cut_is_known_wherever_a_start_is_killed(is_power: bool) -> None:
    rng = random.Random(1)
    for number in range(1, 200):
        disk, _ = damaged_end()
        if is_power:
            disk.sync_file_system(disk.open_read_only(FIRST))
        disk.fail_at(number, Fault.CRASH)
        try:
            open_store(disk, follows=True)
        except SimulatedCrash:
            pass
        else:
            assert number > 5
            return
        store = open_store(disk.crash(rng) if is_power else disk.killed(), follows=True)
        file = tail_of(store)
        assert file.was_cut, f"killed at I/O {number}"
    raise AssertionError("no start came to its end")
