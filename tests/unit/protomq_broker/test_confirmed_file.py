"""What is confirmed is written down now and then, and at the end."""

from __future__ import annotations

import logging
import random
import threading

import pytest

from protomq_broker.confirmed_file import ConfirmedFile, ConfirmedNotes
from protomq_broker.testing.simdisk import SimDisk


class _File(ConfirmedFile):
    """Attribute: has_more, set with each write."""

    def __init__(self) -> None:
        disk = SimDisk()
        disk.make_folder("/s/config")
        super().__init__(disk, "/s")
        self.has_more = threading.Event()

    def write(self, position: int) -> None:
        super().write(position)
        self.has_more.set()


def test_a_master_that_is_killed_has_written_down_what_was_confirmed() -> None:
    file, confirmed = _File(), 70
    notes = ConfirmedNotes(file, lambda: confirmed, 0.001)
    notes.start()
    assert file.has_more.wait(60)
    assert file.read() == 70
    confirmed = 90
    notes.close()
    assert file.read() == 90


def test_a_master_that_never_began_writes_it_down_when_it_stops() -> None:
    file = _File()
    ConfirmedNotes(file, lambda: 70, 600).close()
    assert file.read() == 70


def test_a_disk_that_takes_no_note_is_complained_of_once(caplog: pytest.LogCaptureFixture) -> None:
    disk = SimDisk()
    disk.make_folder("/s/config")
    file = ConfirmedFile(disk, "/s")
    room, disk.capacity_bytes = disk.capacity_bytes, 1
    with caplog.at_level(logging.WARNING):
        file.write(70)
        file.write(80)
        assert len(caplog.records) == 1
        disk.capacity_bytes = room
        file.write(90)
        disk.capacity_bytes = 1
        file.write(95)
    assert len(caplog.records) == 2
    assert file.read() == 90


@pytest.mark.parametrize("has_room", [True, False])
def test_what_a_power_cut_has_removed_is_confirmed_no_more_when_other_messages_stand_there(has_room: bool) -> None:
    """The next crash may come before the next note."""
    disk = SimDisk()
    disk.make_folder("/s/config")
    disk.fsync_dir("/")
    disk.fsync_dir("/s")
    ConfirmedFile(disk, "/s").write(90)
    if not has_room:
        disk.capacity_bytes = 1
    assert ConfirmedFile(disk, "/s").read_within(70) == 70
    left = disk.crash(random.Random(1), keep=0.0)
    assert ConfirmedFile(left, "/s").read_within(100) == (70 if has_room else 0)


def test_what_the_log_has_stays_confirmed() -> None:
    disk = SimDisk()
    disk.make_folder("/s/config")
    ConfirmedFile(disk, "/s").write(90)
    assert ConfirmedFile(disk, "/s").read_within(90) == 90
    assert ConfirmedFile(disk, "/s").read_within(95) == 90
