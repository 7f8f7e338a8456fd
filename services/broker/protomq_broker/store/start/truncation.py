"""Truncates a log to the last point at which it agrees with its leader's. An intent is written first; the next start completes it.

    config/truncation.json    {"position": n, "epoch": e, "crc32c": c}: the log is to end there

An open follower writes the intent, durably, and takes no more bytes. The start that finds it does these steps in order, each durably:

    1   what was derived from the log, and snapshots of states: those that may report something behind the point go; so does a confirmed
        position behind it
    2   the checkpoint, if it reports more than the point: it says that the log is synced up to there
    3   the epochs behind the point, ranges in quarantine behind it, and ends of queues in such ranges
    4   the log behind the point: later segments go, the rest of its segment reads as zeros
    5   the intent

If it is interrupted anywhere, the next start does all steps again. It rebuilds from the log what step 1 removed.

A derived structure's files say how far they reach; what of it lies behind the end of the log is cut off at the start. Snapshots of a
completed checkpoint contain nothing behind its `flushed_position`. Newer ones belong to a checkpoint that was not completed, and may
contain anything. A checkpoint covers what is confirmed, and a leader that was elected has all of that: so as a rule nothing has to go.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Final

from protomq_broker.store.files.disk import Disk, remove_file
from protomq_broker.store.files.lock import StoreLock
from protomq_broker.store.files.side_files import (
    CONFIRMED_NAME,
    SideFileDamagedError,
    empty_folder,
    read_json_file,
    write_json_file,
)
from protomq_broker.store.index import index
from protomq_broker.store.log.agreement import START, LogPoint
from protomq_broker.store.log.boundaries import BoundaryFiles
from protomq_broker.store.log.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from protomq_broker.store.log.epochs import EPOCHS_NAME, read_epochs, write_epochs
from protomq_broker.store.log.recovery import read_quarantine, rewrite_unsynced, write_quarantine
from protomq_broker.store.log.segment import SegmentFolder
from protomq_broker.store.queues import consume_queue_table
from protomq_broker.store.queues.queue_ends import read_saved_ends, save_ends
from protomq_broker.store.state import sent_snapshot, transaction_files
from protomq_broker.store.timer import pending_state

from .front_note import keep_front

log = logging.getLogger(__name__)

TRUNCATION_NAME: Final = "config/truncation.json"

_END_POSITIONS: Final = {
    "consumequeue": consume_queue_table.end_position,
    "index": index.end_position,
    "repeatedsends": sent_snapshot.end_position,
    "timer": pending_state.end_position,
    "transactions": transaction_files.end_position,
}
"""Derived structures by folder, each with the function that reads up to where its files reach."""


def intend_truncation(disk: Disk, root: str, point: LogPoint) -> None:
    """Makes the next start truncate the log to `point`, up to which it is synced. Durable when this returns. Raises OSError."""
    write_json_file(disk, f"{root}/{TRUNCATION_NAME}", point._asdict())


def is_truncation_intended(disk: Disk, root: str) -> bool:
    """Whether the next start finds an intent, which may be gone after a power cut."""
    return disk.exists(f"{root}/{TRUNCATION_NAME}")


def complete_truncation(disk: Disk, root: str, folder: SegmentFolder, lock: StoreLock) -> None:
    """Completes an intent if there is one. Called at a start, before anything but the segments is open. Raises OSError."""
    path = f"{root}/{TRUNCATION_NAME}"
    point = _read_intent(disk, path)
    if point is None:
        return
    log.warning(
        "the log is truncated to position %d, where it agrees with its leader's", point.position
    )
    # Extra entries in consume queues no longer prove that the log was written that far.
    lock.previous_cache_id = ""
    lock.publish("")
    checkpoint = read_checkpoint(disk, f"{root}/checkpoint")
    _discard(disk, root, point, checkpoint)
    rewrite_unsynced(disk, folder, _synced_position(disk, root, checkpoint, point), point.position)
    _lower_checkpoint(disk, root, folder, point, checkpoint)
    _lower_marks(disk, root, point)
    if point.position < folder.first_position:
        keep_front(disk, root, folder, 0)
        folder.remove(sorted(folder.files, reverse=True))
    else:
        folder.clear_from(point.position)
    remove_file(disk, path)


def discard_derived(disk: Disk, root: str) -> None:
    """Removes everything that is derived from the log, snapshots too: the start rebuilds it. Durable when this returns. Raises OSError."""
    _discard(disk, root, START, None)


def _read_intent(disk: Disk, path: str) -> LogPoint | None:
    try:
        content = read_json_file(disk, path)
    except SideFileDamagedError as error:
        log.error(
            "%s: the log stays as it is, until its leader says again where it is to end", error
        )
        remove_file(disk, path)
        return None
    if content is None:
        return None
    return LogPoint(int(content["position"]), int(content["epoch"]), int(content["crc32c"]))


def _discard(disk: Disk, root: str, point: LogPoint, checkpoint: Checkpoint | None) -> None:
    """Removes files that may contain something behind the point."""
    kept = 0
    if checkpoint is not None and checkpoint.flushed_position <= point.position:
        kept = checkpoint.replay_position
    for name, end_position in _END_POSITIONS.items():
        path = f"{root}/{name}"
        if not disk.is_folder(path) or 0 < end_position(disk, path) <= point.position:
            continue
        empty_folder(disk, path)
        disk.fsync_dir(path)
    for name in disk.list(f"{root}/config"):
        path = f"{root}/config/{name}"
        # What is confirmed is no snapshot of a state: it stays so, as far as the log has it.
        if _snapshot_position(disk, path) > (point.position if path.endswith(CONFIRMED_NAME) else kept):
            remove_file(disk, path)
    BoundaryFiles(disk, f"{root}/boundaries").cut(point.position)  # else a start walks the segment from its head


def _snapshot_position(disk: Disk, path: str) -> int:
    """The position of a snapshot of a state; -1 if the file is no snapshot or is damaged, so that it is ignored anyway."""
    if not path.removesuffix(".previous").endswith(".json") or path.endswith(TRUNCATION_NAME):
        return -1
    try:
        content: Any = read_json_file(disk, path)
        return int(content["position"])
    except (SideFileDamagedError, KeyError, TypeError, ValueError):
        return -1


def _synced_position(disk: Disk, root: str, checkpoint: Checkpoint | None, point: LogPoint) -> int:
    """Returns how far the files say the log is synced. The start writes everything behind it again, as every start does."""
    flushed = checkpoint.flushed_position if checkpoint is not None else 0
    synced = max(flushed, read_epochs(disk, f"{root}/{EPOCHS_NAME}").synced_position)
    return min(synced, point.position)


def _lower_checkpoint(
    disk: Disk, root: str, folder: SegmentFolder, point: LogPoint, checkpoint: Checkpoint | None
) -> None:
    path = f"{root}/checkpoint"
    if checkpoint is None or checkpoint.flushed_position <= point.position:
        return
    first = folder.first_position
    if first and checkpoint.first_position != first:  # with which CRC the log begins is not known
        remove_file(disk, path)
        return
    if point.position < first:
        remove_file(disk, path)
        return
    if checkpoint.replay_position <= point.position:
        lowered = replace(checkpoint, flushed_position=point.position)
    else:
        lowered = Checkpoint(
            point.position,
            first,
            checkpoint.first_crc32c if first else 0,
            point.epoch,
            0,
            checkpoint.first_position,
            checkpoint.first_crc32c,
        )
    write_checkpoint(disk, path, lowered)


def _lower_marks(disk: Disk, root: str, point: LogPoint) -> None:
    path = f"{root}/{EPOCHS_NAME}"
    epochs = read_epochs(disk, path)
    if epochs.is_known:
        write_epochs(disk, path, epochs.truncated(point.position, point.epoch))
    path = f"{root}/config/quarantine.json"
    damaged = read_quarantine(disk, path)
    kept = [damage for damage in damaged if damage.end_position <= point.position]
    if kept != damaged:
        write_quarantine(disk, path, kept)
    folder = f"{root}/config"
    ends = read_saved_ends(disk, folder)
    kept_ends = [end for end in ends if end.end_position <= point.position]
    if kept_ends != ends:
        save_ends(disk, folder, kept_ends)
