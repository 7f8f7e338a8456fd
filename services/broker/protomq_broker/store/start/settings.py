"""What a store is made with: its folders, and the settings that shape the data on disk (`config/store.json`).

A new store writes `config/store.json` before anything but its lock. So a folder with files and without that one is no store, unless it has
a log of ours.
"""

from __future__ import annotations

import logging
from typing import Final

from protomq.wire.log_walk import decode_seal
from protomq.wire.record import SEAL_SIZE_BYTES
from protomq_broker.store.config import (
    BACKUP_MARK,
    BACKUP_NAME,
    FORMAT_VERSION,
    StoreConfig,
    check_format,
)
from protomq_broker.store.errors import NotAStoreError, StoreSettingsError
from protomq_broker.store.files.disk import Disk, read_file, read_fully, read_json, sync_names_above
from protomq_broker.store.files.identity import has_store_id
from protomq_broker.store.files.lock import may_be_lock
from protomq_broker.store.files.side_files import (
    SideFileDamagedError,
    read_json_file,
    size_of_file,
    write_json_file,
)
from protomq_broker.store.log.segment import SEGMENT_NAME

log = logging.getLogger(__name__)

FOLDERS: Final = ("config", "commitlog", "boundaries", "consumequeue", "index", "repeatedsends", "timer")
SETTINGS_NAME: Final = "config/store.json"
RESTORED_SLAVE_NAME: Final = "config/restored_slave.json"
"""Is there from `restore --slave` until the store has followed a master."""
_OF_THE_FILE_SYSTEM: Final = "lost+found"


def begin_folder(disk: Disk, root: str) -> None:
    """Makes the folder of a store, durably, without what is in it. Raises NotAStoreError, StoreSettingsError; then nothing is changed."""
    if disk.exists(f"{root}/{BACKUP_NAME}"):
        raise StoreSettingsError(
            f"{root}: this is a backup, or a restore that is not done ({BACKUP_NAME}): `protomq restore` makes a store of a backup"
        )
    if _is_marked_as_backup(disk, root):
        raise StoreSettingsError(
            f"{root}: this is a backup that has lost its {BACKUP_NAME}: {SETTINGS_NAME} says what it is. A broker would change it. Bring"
            " that file back from a copy, or take another backup. If nobody else has this log, copy the folder, delete"
            f" {SETTINGS_NAME} in the copy, and start a broker there"
        )
    strangers = [] if is_store(disk, root) else _strangers(disk, root)
    if strangers:
        raise NotAStoreError(root, strangers)
    disk.make_folder(f"{root}/config")
    disk.fsync_dir(root)


def _is_marked_as_backup(disk: Disk, root: str) -> bool:
    path = f"{root}/{SETTINGS_NAME}"
    if disk.is_folder(path):
        return False
    try:
        settings = read_json_file(disk, path)
    except SideFileDamagedError:
        return False
    return isinstance(settings, dict) and settings.get(BACKUP_MARK) is True


def check_may_lead(disk: Disk, root: str) -> None:
    """Raises StoreSettingsError if the store was restored to follow, and has not. Another store may have begun its next epoch."""
    if disk.exists(f"{root}/{RESTORED_SLAVE_NAME}"):
        raise StoreSettingsError(
            f"{root}: `protomq restore --slave` made this store, and it has followed no master since. Start it as a slave beside its master"
            " (broker_role: SLAVE, broker_id: 1). For a master with a fixed role, restore the backup without --slave into an empty folder"
        )


def make_folders(disk: Disk, root: str) -> None:
    """Creates the store's folders, durably. Syncs those above the root too, since a start that was killed may have created any of them."""
    for folder in FOLDERS:
        disk.make_folder(f"{root}/{folder}")
    disk.fsync_dir(root)
    sync_names_above(disk, root)


def is_store(disk: Disk, root: str) -> bool:
    """Whether a folder is a store, a backup or a restore of ours. Its settings say so, even if damaged, or its number, or its log."""
    if disk.exists(f"{root}/{BACKUP_NAME}"):
        return True
    if disk.is_folder(f"{root}/config"):
        path = f"{root}/{SETTINGS_NAME}"
        content = (read_file(disk, path) or b"") if disk.exists(path) and not disk.is_folder(path) else b""
        if b'"segment_size_bytes"' in content or has_store_id(disk, root):
            return True
    return disk.is_folder(f"{root}/commitlog") and any(_is_segment(disk, root, name) for name in _segments_of(disk, root))


def _is_segment(disk: Disk, root: str, name: str) -> bool:
    """Whether a file of this name begins as each segment does, with the seal of an empty append at its position."""
    path = f"{root}/commitlog/{name}"
    if disk.is_folder(path):
        return False
    fd = disk.open_read_only(path)
    try:
        seal = decode_seal(read_fully(disk, fd, min(disk.size(fd), SEAL_SIZE_BYTES), 0), 0)
    finally:
        disk.close(fd)
    return seal is not None and seal.is_head and seal.start_position == int(name)


def _strangers(disk: Disk, root: str) -> list[str]:
    """What a folder has that no store has before it has its settings."""
    found: list[str] = []
    for name in disk.list(root):
        path = f"{root}/{name}"
        if name == _OF_THE_FILE_SYSTEM or (name == "lock" and may_be_lock(disk, path)):
            continue
        if name not in FOLDERS or not disk.is_folder(path):
            found.append(name)
            continue
        # Earlier versions made all folders first.
        expected = [f"{SETTINGS_NAME}.tmp"] if name == "config" else []
        found += [each for each in (f"{name}/{child}" for child in disk.list(path)) if each not in expected]
    return found


def check_settings(disk: Disk, root: str, config: StoreConfig) -> None:
    """Compares the settings that shape the data on disk with those of the store. A new store saves them. Raises StoreSettingsError."""
    path = f"{root}/{SETTINGS_NAME}"
    ours = {"format_version": FORMAT_VERSION, "segment_size_bytes": config.segment_size_bytes}
    try:
        stored = read_json_file(disk, path)
        if stored is None:
            stored = _settings_of_segments(disk, root, f"{path} is missing")
            if stored == ours:
                write_json_file(disk, path, ours)
    except SideFileDamagedError as error:
        plain = read_json(disk, path)
        if isinstance(plain, dict) and "format_version" in plain:
            check_format(path, plain)  # of an earlier version, which wrote no checksum
        stored = _settings_of_segments(disk, root, str(error))
        log.error("%s: its segments say what it was made with: %s", error, stored)
        if stored == ours:
            write_json_file(disk, path, ours)
    if stored is None:
        write_json_file(disk, path, ours)
        return
    check_format(path, stored)
    size_bytes = stored.get("segment_size_bytes")
    if size_bytes == config.segment_size_bytes:
        return
    if not _segments_of(disk, root):  # it has nothing that has this size
        write_json_file(disk, path, ours)
        return
    raise StoreSettingsError(
        f"{path}: the store was made with segment_size_bytes = {size_bytes}, not {config.segment_size_bytes}. A store"
        f" keeps it: set store.segment_size_bytes to {size_bytes}, or give the broker an empty folder"
    )


def _settings_of_segments(
    disk: Disk, root: str, error: str
) -> dict[str, int] | None:
    """Returns the settings that the segments of a store show; None if it has no segments. Raises StoreSettingsError if their sizes differ.
    """
    sizes: set[int | None] = set()
    names = _segments_of(disk, root)
    for name in names:
        sizes.add(size_of_file(disk, f"{root}/commitlog/{name}"))
    if not names:
        return None
    size_bytes = sizes.pop()
    if sizes or not size_bytes or any(int(name) % size_bytes for name in names):
        raise StoreSettingsError(
            f"{error}, and the segments do not show the settings of the store: restore the file or the store from a copy"
        )
    return {"format_version": FORMAT_VERSION, "segment_size_bytes": size_bytes}


def _segments_of(disk: Disk, root: str) -> list[str]:
    return [name for name in disk.list(f"{root}/commitlog") if SEGMENT_NAME.fullmatch(name)]
