"""Notes that a start cuts the end of the log.

Damage of the last appends looks like a torn write: nothing on the disk tells them apart once the end is cut. So a broker whose master is
elected must know it even if this start is killed right after the cut. It keeps what it knows of its log's end in one file
(`protomq_broker.tail_file`), and other stores have none.
"""

from __future__ import annotations

from protomq_broker.store.files.disk import DISK_FULL_ERRNOS, Disk, remove_file
from protomq_broker.store.files.side_files import (
    TAIL_NAME,
    SideFileDamagedError,
    read_json_file,
    write_json_file,
)


def note_cut(disk: Disk, config_folder: str) -> None:
    """Notes it in the file of the tail, if the store has one. A full disk may not take that: then nothing is known of the end any more."""
    path = f"{config_folder}/{TAIL_NAME.removeprefix('config/')}"
    try:
        known = read_json_file(disk, path)
    except SideFileDamagedError:
        return  # Nothing is known.
    if known is None or known.get("was_cut") is True:
        return
    try:
        write_json_file(disk, path, {**known, "was_cut": True})
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        remove_file(disk, path)
