"""Whether the end of a log may be lost: known from start to start, and forgotten only when the store is out of the in-sync set."""

from __future__ import annotations

import pytest

from protomq_broker.store.files.side_files import TAIL_NAME, read_json_file, write_json_file
from protomq_broker.store.start.cut_note import note_cut
from protomq_broker.store.start.settings import make_folders
from protomq_broker.tail_file import TailFile
from protomq_broker.testing.simdisk import Fault, Operation, SimDisk

ROOT = "/store"


def opened(disk: SimDisk, boot_id: str, *, syncs: bool = False, is_lost: bool = False) -> TailFile:
    file = TailFile(disk, ROOT, boot_id)
    file.open(syncs=syncs, is_lost=is_lost)
    return file


def begun(*, syncs: bool = False) -> SimDisk:
    """A store that has settled once, on boot `one`, and runs."""
    disk = SimDisk()
    make_folders(disk, ROOT)
    first = opened(disk, "one", syncs=syncs)
    assert first.may_be_lost, "of a store without the file nothing is known"
    first.settle()
    return disk


def test_a_process_that_was_killed_has_lost_nothing() -> None:
    assert not opened(begun(), "one").may_be_lost


@pytest.mark.parametrize("boot_id", ["two", ""])
def test_a_machine_that_crashed_may_have(boot_id: str) -> None:
    disk = begun()
    assert opened(disk, boot_id).may_be_lost
    assert opened(disk, "two").may_be_lost, "until it is settled"


def test_not_behind_a_clean_stop() -> None:
    disk = begun()
    opened(disk, "one").close(is_clean=True)
    later = opened(disk, "two")
    assert not later.may_be_lost
    assert opened(disk, "three").may_be_lost, "that one did not stop cleanly"


def test_a_stop_that_was_not_clean_counts_as_none() -> None:
    disk = begun()
    opened(disk, "one").close(is_clean=False)
    assert opened(disk, "two").may_be_lost


def test_not_where_all_that_was_acknowledged_was_synced() -> None:
    assert not opened(begun(syncs=True), "two", syncs=True).may_be_lost


def test_the_run_that_ended_is_judged_by_its_own_flush_setting() -> None:
    assert opened(begun(syncs=False), "two", syncs=True).may_be_lost
    assert not opened(begun(syncs=True), "two", syncs=False).may_be_lost


def test_a_log_that_ends_with_damage_has_lost_its_end_until_it_is_out_of_the_set() -> None:
    disk = begun()
    file = opened(disk, "one", is_lost=True)
    assert file.may_be_lost
    assert opened(disk, "one").may_be_lost
    file.settle()
    assert not opened(disk, "one").may_be_lost


def test_a_log_that_was_cut_stays_so_until_it_has_caught_up() -> None:
    disk = begun()
    file = TailFile(disk, ROOT, "one")
    assert not file.open(syncs=False, is_lost=False, was_cut=True), "that is another doubt"
    assert file.was_cut
    opened(disk, "one").close(is_clean=True)
    again = opened(disk, "two")
    assert again.was_cut
    again.settle()
    assert opened(disk, "two").was_cut, "it is out of the set, and may come back"
    again.settle_cut()
    assert not opened(disk, "two").was_cut


def test_what_the_start_has_noted_counts_and_so_does_a_cut_of_a_store_that_was_opened_again() -> None:
    disk = begun()
    note_cut(disk, f"{ROOT}/config")
    file = opened(disk, "one")
    assert file.was_cut
    assert not file.may_be_lost
    file.settle_cut()
    note_cut(disk, f"{ROOT}/config")
    file.cut()
    file.close(is_clean=True)
    assert opened(disk, "one").was_cut


def test_a_store_whose_master_nobody_elects_has_no_file_to_note_a_cut_in() -> None:
    disk = SimDisk()
    make_folders(disk, ROOT)
    note_cut(disk, f"{ROOT}/config")
    assert not disk.exists(f"{ROOT}/{TAIL_NAME}")


def test_where_a_full_disk_does_not_take_the_note_the_end_may_be_lost() -> None:
    disk = begun()
    disk.plan = lambda operation: Fault.ENOSPC if operation.name in ("create", "pwrite", "truncate") else None
    note_cut(disk, f"{ROOT}/config")
    disk.plan = None
    assert opened(disk, "one").may_be_lost


def test_a_run_that_does_not_tell_its_flush_setting_did_not_sync() -> None:
    disk = begun()
    write_json_file(disk, f"{ROOT}/{TAIL_NAME}", {"boot_id": "one", "is_clean": False, "may_be_lost": False})
    assert opened(disk, "two", syncs=True).may_be_lost


def test_a_clean_stop_of_a_store_that_had_not_settled_settles_nothing() -> None:
    disk = begun()
    opened(disk, "two").close(is_clean=True)
    assert read_json_file(disk, f"{ROOT}/{TAIL_NAME}")["may_be_lost"] is True  # type: ignore[index]
    assert opened(disk, "two").may_be_lost


def test_a_full_disk_does_not_keep_the_store_from_opening_and_makes_its_end_doubtful_at_worst() -> None:
    def full(operation: Operation) -> Fault | None:
        return Fault.ENOSPC if operation.name in ("create", "pwrite", "truncate") else None

    disk = begun()
    disk.plan = full
    assert not opened(disk, "one").may_be_lost
    assert not opened(disk, "one").may_be_lost, "the file had it already"
    disk.plan = None
    opened(disk, "one").close(is_clean=True)
    disk.plan = full
    file = opened(disk, "two")
    assert not file.may_be_lost
    assert opened(disk, "two").may_be_lost, "the run before did not stop cleanly, and no file says how it began"
    disk.plan = None
    file.close(is_clean=True)
    assert not opened(disk, "three").may_be_lost


def test_a_broken_disk_does_keep_it_from_opening() -> None:
    disk = begun()
    disk.plan = lambda _: Fault.EIO
    with pytest.raises(OSError, match="Input/output"):
        opened(disk, "two")


def test_the_number_of_a_start_stays_from_start_to_start() -> None:
    disk = begun()
    file = opened(disk, "one")
    assert file.start_number == 0
    file.note_start(7, is_older_copy=False)
    file.settle_cut()
    assert opened(disk, "one").start_number == 7
    assert not opened(disk, "one").may_be_lost


def test_an_older_copy_is_in_doubt_before_it_has_its_number() -> None:
    """With that it is no older copy any more, and a crash may come in between."""
    disk = begun()
    file = opened(disk, "one")
    disk.plan = lambda operation: Fault.EIO if "start.json" in operation.path else None
    with pytest.raises(OSError, match="error"):
        file.note_start(8, is_older_copy=True)
    disk.plan = None
    again = opened(disk, "one")
    assert (again.start_number, again.may_be_lost) == (0, True)
    again.note_start(8, is_older_copy=True)
    again = opened(disk, "one")
    assert (again.start_number, again.may_be_lost) == (8, True)


def test_a_broker_of_an_earlier_version_that_ran_in_between_leaves_the_number() -> None:
    disk = begun()
    opened(disk, "one").note_start(3, is_older_copy=False)
    tail = {"boot_id": "one", "is_clean": True, "may_be_lost": False, "syncs": False, "was_cut": False}
    write_json_file(disk, f"{ROOT}/{TAIL_NAME}", tail)
    assert opened(disk, "one").start_number == 3


def test_a_full_disk_leaves_the_number_as_it_was() -> None:
    disk = begun()
    file = opened(disk, "one")
    file.note_start(3, is_older_copy=False)
    disk.fail_at(1, Fault.ENOSPC)
    with pytest.raises(OSError, match="No space"):
        file.note_start(4, is_older_copy=False)
    assert file.start_number == 3
