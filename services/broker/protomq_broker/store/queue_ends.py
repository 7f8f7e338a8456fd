"""How far consume queues went, by what their files hold behind the table's position.

A start believes the table, and makes what lies behind it from the log. Where the log has lost a part, the entries behind the table's
position are all that is left of those messages: they are never served, but their offsets must not be given again, and readers are told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import numpy as np

from .disk import Disk, read_fully, remove_file
from .entry_check import salt_of, which_hold
from .selection import ENTRY_SIZE_BYTES
from .side_files import SideFileDamagedError, read_json_file, write_json_file

LOOK_COUNT: Final = 3_200
"""Entries at the end of a file that are looked at: the last ones may be torn."""
FILE_NAME: Final = "queue_ends.json"


class QueueEnd(NamedTuple):
    """How far a queue went.

    Attributes:
        topic, queue_id: the queue.
        min_offset: its first offset.
        end_offset: behind its last.
        position, end_position: of the record of the last entry in the log; -1 where only its offset is known.
    """

    topic: str
    queue_id: int
    min_offset: int
    end_offset: int
    position: int = -1
    end_position: int = -1


def end_in_file(
    disk: Disk, path: str, topic: str, queue_id: int, min_offset: int
) -> QueueEnd | None:
    """The last entry that holds in a file of a queue; None if none does."""
    start_offset = int(path.rpartition("/")[2]) // ENTRY_SIZE_BYTES
    fd = disk.open_read_only(path)
    try:
        count = disk.size(fd) // ENTRY_SIZE_BYTES
        first = max(0, count - LOOK_COUNT)
        size = (count - first) * ENTRY_SIZE_BYTES
        data = read_fully(disk, fd, size, first * ENTRY_SIZE_BYTES)
    finally:
        disk.close(fd)
    offset = start_offset + first
    entries, holds = which_hold(data, count - first, offset, salt_of(topic, queue_id))
    rows = np.flatnonzero(holds)
    if not len(rows):
        return None
    row = int(rows[-1])
    position, size, _ = entries[row].item()
    return QueueEnd(topic, queue_id, min_offset, offset + row + 1, position, position + size)


def ends_below(disk: Disk, folder: str, path: str) -> Iterator[QueueEnd]:
    """The ends of all queues below `path`: `folder`, that of all consume queues, or that of a topic or of a queue in it."""
    topic, _, queue_id = path[len(folder) + 1 :].partition("/")
    if not queue_id:
        for name in disk.list(path):
            if disk.is_folder(f"{path}/{name}"):
                yield from ends_below(disk, folder, f"{path}/{name}")
    elif queue_id.isdecimal():
        names = [name for name in disk.list(path) if name.isdecimal()]
        for name in reversed(names):
            min_offset = int(names[0]) // ENTRY_SIZE_BYTES
            end = end_in_file(disk, f"{path}/{name}", topic, int(queue_id), min_offset)
            if end is not None:
                yield end
                return


def save_ends(disk: Disk, config_folder: str, ends: Iterable[QueueEnd]) -> None:
    """Keeps the ends for the next start: this one ends here, and the files have been cut."""
    write_json_file(disk, f"{config_folder}/{FILE_NAME}", {"ends": list(ends)})


def read_saved_ends(disk: Disk, config_folder: str) -> list[QueueEnd]:
    """What `save_ends` has kept; nothing if that does not hold."""
    try:
        content = read_json_file(disk, f"{config_folder}/{FILE_NAME}") or {}
        return [QueueEnd(str(end[0]), *map(int, end[1:])) for end in content["ends"]]
    except (SideFileDamagedError, KeyError, TypeError, ValueError, IndexError):
        return []


def forget_saved_ends(disk: Disk, config_folder: str) -> None:
    """A start has taken them over."""
    remove_file(disk, f"{config_folder}/{FILE_NAME}")
