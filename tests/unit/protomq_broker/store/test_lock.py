"""The lock and the abort file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from protomq_broker.store.errors import StoreLockedError
from protomq_broker.store.files.disk import Disk
from protomq_broker.store.files.lock import AbortFile, StoreLock, is_locked
from protomq_broker.testing.simdisk import Fault, SimDisk


def test_on_a_real_disk_a_second_lock_is_refused_and_names_the_process(tmp_path: Path) -> None:
    lock = StoreLock(Disk(), str(tmp_path))
    assert is_locked(Disk(), str(tmp_path))
    with pytest.raises(StoreLockedError) as caught:
        StoreLock(Disk(), str(tmp_path))
    assert caught.value.pid == os.getpid()
    lock.release()
    assert not is_locked(Disk(), str(tmp_path))
    StoreLock(Disk(), str(tmp_path)).release()


def test_the_cache_id_is_kept_until_a_new_one_is_published() -> None:
    disk = SimDisk()
    disk.make_folder("/s")
    lock = StoreLock(disk, "/s")
    assert lock.previous_cache_id == ""
    lock.publish("boot-7")
    lock.release()
    lock = StoreLock(disk, "/s")
    assert lock.previous_cache_id == "boot-7"
    lock.release()
    assert StoreLock(disk, "/s").previous_cache_id == "boot-7", (
        "a start that did not get through recovery leaves it"
    )


@pytest.mark.parametrize("content", [b"", b"\xff" * 600, b"[]", b'{"pid": "x", "cache_id": 5}'])
def test_a_lock_file_full_of_anything_is_taken(content: bytes) -> None:
    disk = SimDisk()
    disk.make_folder("/s")
    fd = disk.create("/s/lock")
    disk.pwrite(fd, content, 0)
    disk.close(fd)
    assert StoreLock(disk, "/s").previous_cache_id == ""


def test_the_abort_file_is_there_until_a_clean_stop() -> None:
    disk = SimDisk()
    disk.make_folder("/s")
    abort = AbortFile(disk, "/s")
    assert not abort.found
    abort.write()
    assert AbortFile(disk, "/s").found
    abort.remove()
    abort.remove()
    assert not AbortFile(disk, "/s").found


def test_the_page_cache_of_another_mount_is_another_one(tmp_path: Path) -> None:
    disk = Disk()
    assert disk.cache_id(str(tmp_path)) == disk.cache_id(str(tmp_path)) != ""
    assert disk.cache_id(str(tmp_path)) != disk.cache_id("/proc") or "/0" in disk.cache_id("/proc")


@pytest.mark.parametrize("fault", ["reads", "writes"])
def test_an_error_of_the_lock_names_it(fault: str) -> None:
    disk = SimDisk()
    disk.make_folder("/s")
    StoreLock(disk, "/s").release()
    if fault == "reads":
        disk.spoil("/s/lock")
    else:
        disk.fail_at(1, Fault.EIO)
    with pytest.raises(OSError, match="Input/output error: '/s/lock'"):
        StoreLock(disk, "/s")
    disk = disk.killed()
    assert not is_locked(disk, "/s")
