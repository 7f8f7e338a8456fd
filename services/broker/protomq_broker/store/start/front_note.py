"""Notes where the log begins: what stands before that, retention has deleted. So a start knows a segment that is lost from one that is old.

    config/log_front.json    {"first_position": n}

Retention writes the note, durably, before it deletes, and so does a follower whose empty log begins where its leader's does. If segments
behind the noted position are missing at a start, they are lost, as any other damage. A crash between the note and the deletion leaves
older segments: the log has them, and the note is taken back to them.

A full disk may not take the note. Then it is removed, since segments must go, and written when they are gone. Where there is no note, the
last checkpoint says where the log began. A store without both begins with its first segment: it is new, or of a version that wrote none.
Such a version may also have deleted segments, and have left a note of before. So a note, or a checkpoint, is believed only if the log
itself does not say that it begins further on (`state/log_front.py`).
"""

from __future__ import annotations

import logging

from google.protobuf.message import DecodeError

from protomq.v1.state_pb2 import LogRecord
from protomq.wire.log_walk import WalkedBlock
from protomq.wire.topics import LOG_TOPIC
from protomq_broker.store.files.disk import DISK_FULL_ERRNOS, Disk, remove_file
from protomq_broker.store.files.side_files import (
    SideFileDamagedError,
    read_json_file,
    write_json_file,
)
from protomq_broker.store.log.append import CorruptRecordError
from protomq_broker.store.log.checkpoint import read_checkpoint
from protomq_broker.store.log.record_scan import read_trailers
from protomq_broker.store.log.recovery import StartPoint, find_resync, read_quarantine
from protomq_broker.store.log.seals import LogWalker
from protomq_broker.store.log.segment import SegmentFolder

from .log_proof import known_position
from .log_replay import state_records

log = logging.getLogger(__name__)

FRONT_NAME = "config/log_front.json"


def keep_front(disk: Disk, root: str, folder: SegmentFolder, position: int) -> bool:
    """Notes that the log begins at `position`, durably; whether the disk had the space for it. Raises OSError."""
    path = f"{root}/{FRONT_NAME}"
    try:
        write_json_file(disk, path, {"first_position": position})
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        remove_file(disk, path)
        return False
    finally:
        folder.front = position
    return True


def settle_front(disk: Disk, root: str, folder: SegmentFolder) -> None:
    """Finds where the log begins at a start, and notes it if the note says something else. Raises OSError."""
    find_front(disk, root, folder)
    if _read_note(disk, root) != folder.front:
        keep_front(disk, root, folder, folder.first_position)


def find_front(disk: Disk, root: str, folder: SegmentFolder, known: int | None = None) -> None:
    """Tells the folder of segments where the log begins. Changes nothing on the disk. `known`: what a backup knows, without a note."""
    noted = _read_note(disk, root) if known is None else known
    first = next(iter(folder.files), None)
    if first is None:  # it is lost as a whole, or is still to begin
        has_begun = known is not None or known_position(disk, root) > (noted or 0)
        folder.front = (noted or 0) if has_begun else 0
        return
    folder.front = first
    if noted is None:
        noted = _checkpointed_front(disk, root)
    if noted is None or noted >= first:
        return
    is_certain = known is not None or _is_quarantined(disk, root, noted, first)
    if is_certain or not _says_it_begins(disk, folder, first):
        folder.front = noted


def _read_note(disk: Disk, root: str) -> int | None:
    try:
        content = read_json_file(disk, f"{root}/{FRONT_NAME}")
        return None if content is None else int(content["first_position"])
    except (SideFileDamagedError, KeyError, TypeError, ValueError) as error:
        log.warning("the note of where the log begins does not hold, the checkpoint or the first segment tells: %s", error)
        return None


def _checkpointed_front(disk: Disk, root: str) -> int | None:
    checkpoint = read_checkpoint(disk, f"{root}/checkpoint")
    return checkpoint.first_position if checkpoint is not None else None


def _is_quarantined(disk: Disk, root: str, start: int, end: int) -> bool:
    """Whether an earlier start has found [start, end) lost."""
    return any(
        damage.start_position <= start and end <= damage.end_position
        for damage in read_quarantine(disk, f"{root}/config/quarantine.json")
    )


def _says_it_begins(disk: Disk, folder: SegmentFolder, first: int) -> bool:
    """Whether a record in the log says that it begins at its first segment, or further on: it was appended before anything was deleted."""
    at: StartPoint | None = StartPoint(first, None)
    while at is not None:
        walker = LogWalker(disk, folder, at.position, at.crc32c)
        if any(_last_start(block) >= first for block in walker):
            return True
        found = find_resync(disk, folder, walker.position)
        at = StartPoint(*found) if found is not None else None
    return False


def _last_start(block: WalkedBlock) -> int:
    """The furthest position at which a record in a block says that the log begins; 0 if none does."""
    starts, sizes = block.records()
    if not len(starts):
        return 0
    try:
        records = read_trailers(block.data, block.base_position, starts, sizes)
        found = [LogRecord.FromString(body) for _, body in state_records(block, records, LOG_TOPIC)]
    except (CorruptRecordError, DecodeError):
        return 0
    return max((record.start.position for record in found), default=0)
