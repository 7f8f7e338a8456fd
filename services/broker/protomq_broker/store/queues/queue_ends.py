"""How far consume queues went, where the log alone would not tell.

A start believes the table, and makes what lies behind it from the log. Where the log has lost a part, only the entries of the queues
are left of those messages. They are never served, but their offsets must not be given again, and readers get an error. The files of
queues may be deleted. So config/ has the ends of queues in damaged ranges too, as long as the ranges are in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from protomq_broker.store.files.disk import Disk, remove_file
from protomq_broker.store.files.side_files import (
    SideFileDamagedError,
    read_entries,
    read_json_file,
    write_json_file,
)
from protomq_broker.store.log.recovery import DamagedRange

from .consume_queue import ConsumeQueue, ConsumeQueueDamagedError
from .entry_check import salt_of, which_hold
from .selection import ENTRY_SIZE_BYTES

log = logging.getLogger(__name__)

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
        data = read_entries(disk, fd, size, first * ENTRY_SIZE_BYTES)
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


def ends_in(queues: Iterable[ConsumeQueue], damaged: Sequence[DamagedRange]) -> list[QueueEnd]:
    """How far the queues went within each damaged range; of those that have nothing there, nothing."""
    ends = []
    for queue in queues:
        for damage in damaged:
            try:
                end_offset = queue.first_at_or_beyond(damage.end_position)
                if queue.first_at_or_beyond(damage.start_position) == end_offset:
                    continue
                position, size, _ = queue.entry(end_offset - 1)
            except ConsumeQueueDamagedError:  # nothing is given again that it may have had
                end_offset, position, size = queue.end_offset, damage.start_position, 0
            ends.append(
                QueueEnd(
                    queue.topic, queue.queue_id, queue.known_min_offset, end_offset, position, position + size,
                )
            )  # fmt: skip
    return ends


def ends_lost_in(ends: Iterable[QueueEnd], damaged: Sequence[DamagedRange]) -> list[QueueEnd]:
    """Those of which the log may have lost the last message."""
    return [
        end
        for end in ends
        if any(end.position < 0 or damage.start_position <= end.position < damage.end_position for damage in damaged)
    ]


def keep_ends_of_damage(
    disk: Disk, config_folder: str, damaged: Sequence[DamagedRange], ends: Iterable[QueueEnd]
) -> None:
    """Keeps those of `ends`, and of those kept before, that stand in damaged ranges: all that the log has of these messages may go."""
    furthest: dict[tuple[str, int, int], QueueEnd] = {}
    for end in (*read_saved_ends(disk, config_folder), *ends):
        for damage in damaged:
            if damage.start_position <= end.position < damage.end_position:
                key = (end.topic, end.queue_id, damage.start_position)
                if key not in furthest or furthest[key].end_offset < end.end_offset:
                    furthest[key] = end
    kept = [furthest[key] for key in sorted(furthest)]
    if not kept:
        remove_file(disk, f"{config_folder}/{FILE_NAME}")
    else:
        save_ends(disk, config_folder, kept)


def save_ends(disk: Disk, config_folder: str, ends: Iterable[QueueEnd]) -> None:
    """Keeps the ends for the next start: this one ends here, and the files have been cut. What the file has is not written again."""
    found = list(ends)
    if found != read_saved_ends(disk, config_folder):
        write_json_file(disk, f"{config_folder}/{FILE_NAME}", {"ends": found})


def read_saved_ends(disk: Disk, config_folder: str) -> list[QueueEnd]:
    """What is kept; nothing if that does not hold, which is said."""
    try:
        content = read_json_file(disk, f"{config_folder}/{FILE_NAME}") or {"ends": ()}
        return [QueueEnd(str(end[0]), *map(int, end[1:])) for end in content["ends"]]
    except (SideFileDamagedError, KeyError, TypeError, ValueError, IndexError) as error:
        log.error(
            "%s/%s: the ends of queues in damaged ranges are lost: %s",
            config_folder,
            FILE_NAME,
            error,
        )
        return []
