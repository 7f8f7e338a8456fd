"""What a store is made with: its folders, and the settings that shape the data on disk (`config/store.json`)."""

from __future__ import annotations

import logging

from protomq_broker.store.config import BACKUP_NAME, FORMAT_VERSION, StoreConfig, check_format
from protomq_broker.store.errors import StoreSettingsError
from protomq_broker.store.files.disk import Disk, read_json, sync_names_above
from protomq_broker.store.files.side_files import (
    SideFileDamagedError,
    read_json_file,
    size_of_file,
    write_json_file,
)
from protomq_broker.store.log.segment import SEGMENT_NAME

log = logging.getLogger(__name__)


def make_folders(disk: Disk, root: str) -> None:
    """Creates the store's folders, durably. Syncs those above the root too, since a start that was killed may have created any of them."""
    for folder in ("config", "commitlog", "boundaries", "consumequeue", "index", "repeatedsends", "timer"):
        disk.make_folder(f"{root}/{folder}")
    disk.fsync_dir(root)
    sync_names_above(disk, root)


def check_settings(disk: Disk, root: str, config: StoreConfig) -> None:
    """Compares the settings that shape the data on disk with those of the store. A new store saves them. Raises StoreSettingsError."""
    if disk.exists(f"{root}/{BACKUP_NAME}"):
        raise StoreSettingsError(
            f"{root}: this is a backup, or a restore that is not done ({BACKUP_NAME}): `protomq restore` makes a store of a backup"
        )
    path = f"{root}/config/store.json"
    ours = {"format_version": FORMAT_VERSION, "segment_size_bytes": config.segment_size_bytes}
    try:
        stored = read_json_file(disk, path)
    except SideFileDamagedError as error:
        plain = read_json(disk, path)
        if isinstance(plain, dict) and "format_version" in plain:
            check_format(path, plain)  # of an earlier version, which wrote no checksum
        stored = _settings_of_segments(disk, root, error)
        log.error("%s: its segments say what it was made with: %s", error, stored)
        if stored == ours:
            write_json_file(disk, path, ours)
    if stored is None:
        write_json_file(disk, path, ours)
        return
    check_format(path, stored)
    for name, value in ours.items():
        if stored.get(name) != value:
            raise StoreSettingsError(
                f"{path}: the store was made with {name} = {stored.get(name)}, not {value}"
            )


def _settings_of_segments(
    disk: Disk, root: str, error: SideFileDamagedError
) -> dict[str, int] | None:
    """Returns the settings that the segments of a store show; None if it has no segments. Raises StoreSettingsError if their sizes differ.
    """
    sizes: set[int | None] = set()
    names = [name for name in disk.list(f"{root}/commitlog") if SEGMENT_NAME.fullmatch(name)]
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
