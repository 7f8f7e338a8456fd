from __future__ import annotations

import json
import random
import resource

import pytest

from protomq_broker.store.files import side_files
from protomq_broker.store.files.disk import sync_names_above
from protomq_broker.store.files.side_files import (
    OpenFiles,
    SideFileDamagedError,
    cut_file,
    read_json_file,
    read_state_file,
    remove_tree,
    size_of_file,
    write_json_file,
    write_state_file,
)
from protomq_broker.testing.simdisk import Fault, SimDisk, SimulatedCrash

MAGIC = b"TESTING1"


def make_disk(*paths: str) -> SimDisk:
    disk = SimDisk()
    disk.make_folder("/s/a/b")
    sync_names_above(disk, "/s/a/b")
    for path in paths:
        disk.close(disk.create(path))
    return disk


def test_a_state_file_comes_back_whole_or_not_at_all():
    disk = make_disk()
    assert read_state_file(disk, "/s/x", MAGIC) is None
    write_state_file(disk, "/s/x", MAGIC, b"payload")
    assert read_state_file(disk, "/s/x", MAGIC) == b"payload"
    assert read_state_file(disk, "/s/x", b"TESTING2") is None
    size = len(disk.content("/s/x"))
    for bit in range(8 * size):
        disk.flip_bit("/s/x", bit)
        assert read_state_file(disk, "/s/x", MAGIC) is None
        disk.flip_bit("/s/x", bit)
    for cut in range(size):
        other = disk.killed()
        other.cut("/s/x", cut)
        assert read_state_file(other, "/s/x", MAGIC) is None


def test_after_a_power_cut_a_state_file_is_the_old_or_the_new_one():
    for seed in range(50):
        disk = make_disk()
        write_state_file(disk, "/s/x", MAGIC, b"old" * 500)
        disk.fail_at(1 + seed % 5, Fault.CRASH)
        try:
            write_state_file(disk, "/s/x", MAGIC, b"new" * 700)
        except SimulatedCrash:
            assert read_state_file(disk.crash(random.Random(seed)), "/s/x", MAGIC) in (
                b"old" * 500,
                b"new" * 700,
            )


def test_open_files_are_bounded_and_a_forgotten_one_lives_as_long_as_it_is_used():
    paths = [f"/s/{n}" for n in range(6)]
    disk = make_disk(*paths)
    files = OpenFiles(disk, 3)
    held = files.get(paths[0])
    for path in paths:
        files.get(path)
    assert len(files) == 3
    assert disk.open_descriptors == 4
    assert disk.pread(held.fileno(), 1, 0) == b""
    assert files.get(paths[5]) is files.get(paths[5])
    del held
    assert disk.open_descriptors == 3
    files.forget_below("/s")
    assert disk.open_descriptors == 0


def test_who_goes_through_more_files_than_may_be_open_finds_most_of_them_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[str] = []
    open_file = SimDisk.open

    def open_and_count(disk: SimDisk, path: str) -> int:
        opened.append(path)
        return open_file(disk, path)

    monkeypatch.setattr(SimDisk, "open", open_and_count)
    paths = [f"/s/{n}" for n in range(100)]
    disk = make_disk(*paths)
    files = OpenFiles(disk, 90)
    for path in paths * 10:
        files.get(path)
    assert len(files) == disk.open_descriptors == 90
    assert len(opened) < 400


def test_a_file_is_forgotten_by_its_path_and_a_folder_with_all_below_it():
    paths = ["/s/a/1", "/s/a/b/2", "/s/ab"]
    disk = make_disk(*paths)
    files = OpenFiles(disk)
    for path in paths:
        files.get(path)
    files.forget("/s/a")
    assert len(files) == 3
    files.forget("/s/a/1")
    files.forget("/s/a/1")
    assert disk.open_descriptors == 2
    first = files.get("/s/a/1")
    assert first is files.get("/s/a/1")
    del first
    files.forget_below("/s/a")
    assert len(files) == disk.open_descriptors == 1
    assert files.get("/s/ab") is files.get("/s/ab")
    files.forget_below("")
    assert len(files) == disk.open_descriptors == 0


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(1_024, 256), (11_300, 300), (20_000, 9_000), (1 << 20, 16_384), (-1, 16_384)],
)
def test_open_files_leave_room_for_connections(
    limit: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert side_files.open_files_max() == expected


def test_a_file_that_is_not_there_is_made_only_on_request():
    files = OpenFiles(make_disk())
    with pytest.raises(FileNotFoundError):
        files.get("/s/new")
    assert files.get("/s/new", create=True) is files.get("/s/new")


def test_sizes_cuts_and_removal_do_not_mind_what_is_missing():
    disk = make_disk("/s/a/b/c")
    disk.overwrite("/s/a/b/c", 0, b"")
    file = OpenFiles(disk).get("/s/a/b/c")
    disk.pwrite(file.fd, b"12345", 0)
    assert size_of_file(disk, "/s/a/b/c") == 5
    assert size_of_file(disk, "/s/none") is None
    cut_file(disk, "/s/a/b/c", 9)
    cut_file(disk, "/s/a/b/c", 2)
    cut_file(disk, "/s/none", 2)
    assert disk.content("/s/a/b/c") == b"12"
    remove_tree(disk, "/s/a")
    remove_tree(disk, "/s/none")
    assert disk.list("/s") == []


def test_a_json_file_is_for_people_to_read_and_holds_or_is_damaged():
    disk = SimDisk()
    disk.make_folder("/s")
    path = "/s/a.json"
    assert read_json_file(disk, path) is None
    value = {"b": [1, "ü"], "a": {}}
    write_json_file(disk, path, value)
    assert json.loads(disk.content(path))["content"] == value
    assert read_json_file(disk, path) == value
    whole = disk.content(path)
    for size in range(len(whole)):
        disk.cut(path, size)
        with pytest.raises(SideFileDamagedError):
            read_json_file(disk, path)
        write_json_file(disk, path, value)
    for bit in range(len(whole) * 8):
        disk.flip_bit(path, bit)
        with pytest.raises(SideFileDamagedError, match=path):
            read_json_file(disk, path)
        disk.flip_bit(path, bit)
    disk.overwrite(path, len(whole), b" ")
    with pytest.raises(SideFileDamagedError):
        read_json_file(disk, path)
