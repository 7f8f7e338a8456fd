"""A broker opens its own stores and empty folders. It touches nothing in any other folder."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping

import pytest

from protomq_broker.store.errors import NotAStoreError, StoreSettingsError
from protomq_broker.store.files.disk import write_file_atomically
from protomq_broker.store.files.side_files import write_json_file
from protomq_broker.store.start.settings import FOLDERS
from protomq_broker.store.tools.offline import open_offline
from protomq_broker.testing.simdisk import Fault, SimDisk, SimulatedCrash

from .log_helpers import make_request
from .store_helpers import SEGMENT, open_store, read_all

ROCKETMQ = {
    "commitlog/00000000000000000000": b"\x00\x00\x01\x10\xda\xa3\x20\xa7" * 625,
    "checkpoint": bytes(4096),
    "config/topics.json": b'{"dataVersion": {}, "topicConfigTable": {}}',
    "consumequeue/T/0/00000000000000000000": bytes(6000),
    "index/20260101000000000": bytes(400),
    "abort": b"",
    "lock": b"lock",
}
OTHERS: dict[str, Mapping[str, bytes]] = {
    "rocketmq": ROCKETMQ,
    "readme": {"README.md": b"mine"},
    "own index": {"index/mine.txt": b"mine"},
    "own transactions": {"transactions/mine.txt": b"mine"},
    "own file config": {"config": b"mine"},
    "own file commitlog": {"commitlog": b"mine"},
    "own lock": {"lock": b"mine"},
    "own large lock": {"lock": b'{"pid": 1}'.ljust(4000)},
    "own settings": {"config/store.json": b'{"format_version": 2}', "commitlog/00000000000000000000": b"hi"},
    "unparsable settings": {"config/store.json": b"theme = dark"},
    "settings that are a folder": {"config/store.json/mine": b"mine"},
    "own configuration": {"config/app.yaml": b"mine"},
    "backup that was hardly begun": {"backup.json.tmp": b"{"},
    "own folder": {"mine/file": b"mine"},
}


def filled(files: Mapping[str, bytes]) -> SimDisk:
    disk = SimDisk()
    for path, content in files.items():
        disk.make_folder(f"/s/{path}".rpartition("/")[0])
        write_file_atomically(disk, f"/s/{path}", content)
    return disk


@pytest.mark.parametrize("case", OTHERS)
def test_a_folder_with_other_files_is_refused_and_nothing_is_touched(case: str) -> None:
    disk = filled(OTHERS[case])
    before, operations = disk.files(), disk.operations
    with pytest.raises(NotAStoreError, match="/s is no store of protomq") as caught:
        open_store(disk)
    assert disk.files() == before
    assert disk.operations == operations
    assert any(name in str(caught.value) for name in caught.value.found)
    with pytest.raises(StoreSettingsError, match="not a store") as offline:
        open_offline("/s", disk)
    assert "start" not in str(offline.value)


def test_many_names_are_not_all_listed() -> None:
    disk = filled({f"mine{number}": b"" for number in range(9)})
    with pytest.raises(NotAStoreError, match=r"mine4 and 4 more\)"):
        open_store(disk)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"lost+found/#12": b"found"},
        {"lock": b""},
        {"lock": bytes(512)},
        {"lock": b'{"pid": 12, "cache_id": ""}'.ljust(511) + b"\n"},
        {"config/store.json.tmp": b'{"crc'},
    ],
)
def test_an_empty_folder_and_a_store_that_was_hardly_begun_are_taken(files: Mapping[str, bytes]) -> None:
    disk = filled(files)
    disk.make_folder("/s")
    store = open_store(disk)
    store.append([make_request()])
    store.close()
    assert read_all(open_store(disk)) == [(0, b"body")]


def test_the_empty_folders_of_an_earlier_version_are_taken() -> None:
    disk = filled({"lock": b""})
    for name in FOLDERS:
        disk.make_folder(f"/s/{name}")
    open_store(disk).close()
    assert disk.exists("/s/config/store.json")


def test_a_store_is_opened_again_after_a_crash_at_any_step_of_its_first_start() -> None:
    whole = SimDisk()
    open_store(whole)
    for number in range(1, whole.operations + 1):
        for seed in range(4):
            disk = SimDisk()
            disk.fail_at(number, Fault.CRASH)
            with pytest.raises(SimulatedCrash):
                open_store(disk).flush()
            after = disk.crash(random.Random(seed), keep=(0.0, 0.5, 0.5, 1.0)[seed])
            store = open_store(after)
            store.append([make_request()])
            assert read_all(store) == [(0, b"body")]


@pytest.mark.parametrize("lost", [(), ("config/storeId",)])
def test_a_store_without_its_settings_is_known_by_its_number_or_its_log(lost: tuple[str, ...]) -> None:
    """What its segments show must be what the broker is to open it with, else nothing is written."""
    disk = SimDisk()
    store = open_store(disk)
    store.append([make_request()])
    store.close()
    for name in ("config/store.json", *lost):
        disk.remove(f"/s/{name}")
    with pytest.raises(StoreSettingsError, match=f"segment_size_bytes = {SEGMENT}, not {2 * SEGMENT}"):
        open_store(disk, segment=2 * SEGMENT)
    assert not disk.exists("/s/config/store.json")
    assert read_all(open_store(disk)) == [(0, b"body")]


def test_a_log_that_begins_with_another_byte_is_none_of_ours() -> None:
    disk = SimDisk()
    store = open_store(disk)
    store.append([make_request()])
    store.close()
    for name in ("config/store.json", "config/storeId"):
        disk.remove(f"/s/{name}")
    disk.flip_bit(f"/s/commitlog/{0:020d}", 0)
    before = disk.files()
    with pytest.raises(NotAStoreError, match="needs that file back"):
        open_store(disk)
    assert disk.files() == before


def test_a_backup_is_refused_before_anything_is_made() -> None:
    disk = SimDisk()
    disk.make_folder("/s")
    write_json_file(disk, "/s/backup.json", json.loads("{}"))
    before = disk.files()
    with pytest.raises(StoreSettingsError, match="protomq restore"):
        open_store(disk)
    assert disk.files() == before
    assert not disk.exists("/s/config")
