"""The real disk's operations, on a real file system."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest

from protomq_broker.store.files.disk import (
    Disk,
    read_file,
    read_fully,
    read_json,
    remove_file,
    write_file_atomically,
    write_fully,
)
from protomq_broker.testing.simdisk import Fault, SimDisk


def test_preallocated_space_that_nobody_wrote_is_not_listed_as_written(tmp_path: Path) -> None:
    disk = Disk()
    fd = disk.create(str(tmp_path / "file"))
    disk.allocate(fd, 4 << 20)
    assert disk.size(fd) == 4 << 20
    disk.pwrite(fd, b"x" * 100, 1 << 20)
    ranges = disk.written_ranges(fd, 0, 4 << 20)
    assert any(start <= 1 << 20 < end for start, end in ranges)
    covered = sum(end - start for start, end in ranges)
    assert covered <= 4 << 20
    disk.truncate(fd, 1 << 20)
    disk.allocate(fd, 4 << 20)
    assert read_fully(disk, fd, 4 << 20, 0) == bytes(4 << 20)
    assert disk.written_ranges(fd, 8 << 20, 9 << 20) == []
    disk.close(fd)


def test_folders_and_names(tmp_path: Path) -> None:
    disk = Disk()
    folder = str(tmp_path / "a" / "b")
    assert disk.list(folder) == []
    disk.make_folder(folder)
    disk.make_folder(folder)
    assert disk.is_folder(folder)
    write_file_atomically(disk, f"{folder}/x.json", b'{"a": 1}')
    assert read_json(disk, f"{folder}/x.json") == {"a": 1}
    assert disk.list(folder) == ["x.json"]
    remove_file(disk, f"{folder}/x.json")
    remove_file(disk, f"{folder}/x.json")
    assert read_json(disk, f"{folder}/x.json") is None
    disk.remove_folder(folder)
    assert not disk.exists(folder)
    assert 0 <= disk.usage(str(tmp_path)).used_ratio <= 1


@pytest.mark.parametrize("simulated", [False, True])
def test_the_names_of_a_file_are_counted(simulated: bool, tmp_path: Path) -> None:
    disk = SimDisk() if simulated else Disk()
    one, two, other = (f"{tmp_path}/{name}" for name in ("one", "two", "other"))
    disk.make_folder(str(tmp_path))
    fd = disk.create(one)
    assert disk.name_count(fd) == 1
    disk.link(one, two)
    assert disk.name_count(fd) == 2
    disk.close(disk.create(other))
    disk.rename(other, one)
    assert disk.name_count(fd) == 1
    disk.unlink(two)
    assert disk.name_count(fd) == 0
    disk.close(fd)


def test_a_file_that_is_no_json_is_none(tmp_path: Path) -> None:
    write_file_atomically(Disk(), str(tmp_path / "x"), b"{")
    assert read_json(Disk(), str(tmp_path / "x")) is None
    assert read_file(Disk(), str(tmp_path / "x")) == b"{"


def test_a_short_write_is_gone_on_with() -> None:
    disk = SimDisk()
    disk.make_folder("/s")
    fd = disk.create("/s/file")
    disk.fail_at(1, Fault.SHORT)
    write_fully(disk, fd, b"abcdefg", 2)
    assert disk.content("/s/file") == b"\x00\x00abcdefg"


def test_a_disk_that_takes_nothing_is_an_error() -> None:
    class FullDisk(SimDisk):
        def pwrite(self, fd: int, data: bytes | bytearray | memoryview, position: int) -> int:  # type: ignore[override]
            return 0

    disk = FullDisk()
    disk.make_folder("/s")
    with pytest.raises(OSError) as caught:
        write_fully(disk, disk.create("/s/file"), b"abc", 0)
    assert caught.value.errno == errno.EIO


def test_a_file_system_can_be_synced_as_a_whole(tmp_path: Path) -> None:
    disk = Disk()
    fd = disk.open_folder(str(tmp_path))
    disk.sync_file_system(fd)
    disk.close(fd)
    with pytest.raises(OSError) as caught:
        disk.sync_file_system(fd)
    assert caught.value.errno == errno.EBADF


def test_a_simulated_file_system_synced_as_a_whole_survives_a_power_cut() -> None:
    disk = SimDisk()
    disk.make_folder("/s")
    folder = disk.open_folder("/s")
    disk.pwrite(disk.create("/s/file"), b"abc", 0)
    assert disk.crash(random.Random(0), keep=0.0).files() == {}
    disk.sync_file_system(folder)
    assert disk.crash(random.Random(0), keep=0.0).files() == {"/s/file": b"abc"}


def write_synced(disk: SimDisk, path: str, data: bytes) -> None:
    fd = disk.create(path)
    disk.pwrite(fd, data, 0)
    disk.fsync(fd)
    disk.close(fd)


def test_a_new_folder_on_the_simulated_disk_is_lost_with_all_in_it_until_the_one_above_is_synced() -> (
    None
):
    disk = SimDisk()
    disk.make_folder("/a/b")
    write_synced(disk, "/a/b/file", b"abc")
    disk.fsync_dir("/a/b")
    disk.fsync_dir("/a")
    after = disk.killed().crash(random.Random(0), keep=0.0)
    assert not after.exists("/a")
    assert after.files() == {}
    disk.fsync_dir("/")
    after = disk.crash(random.Random(0), keep=0.0)
    assert after.files() == {"/a/b/file": b"abc"}
    assert after.crash(random.Random(0), keep=0.0).files() == {"/a/b/file": b"abc"}


def test_a_removed_folder_on_the_simulated_disk_comes_back_as_it_was() -> None:
    disk = SimDisk()
    disk.make_folder("/a")
    write_synced(disk, "/a/file", b"old")
    disk.fsync_dir("/a")
    disk.fsync_dir("/")
    disk.unlink("/a/file")
    disk.remove_folder("/a")
    assert disk.list("/") == []
    assert disk.crash(random.Random(0), keep=0.0).files() == {"/a/file": b"old"}
    disk.make_folder("/a")
    write_synced(disk, "/a/file", b"new")
    disk.fsync_dir("/a")
    seen = {disk.crash(random.Random(seed)).files().get("/a/file") for seed in range(200)}
    assert seen == {b"old", b"new", None}
    assert disk.crash(random.Random(0), keep=0.0).files() == {"/a/file": b"old"}
    disk.fsync_dir("/")
    assert disk.crash(random.Random(0), keep=0.0).files() == {"/a/file": b"new"}


def test_making_and_removing_folders_can_fail_like_anything_else() -> None:
    disk = SimDisk()
    disk.fail_at(2, Fault.ENOSPC)
    with pytest.raises(OSError) as caught:
        disk.make_folder("/a/b")
    assert caught.value.errno == errno.ENOSPC
    assert disk.is_folder("/a")
    assert not disk.is_folder("/a/b")
    disk.fail_at(1, Fault.EIO)
    with pytest.raises(OSError):
        disk.remove_folder("/a")
    assert disk.is_folder("/a")
    with pytest.raises(FileNotFoundError):
        disk.fsync_dir("/b")
