"""Reads from the files beside the log how far the log went. It changes nothing: a start and the offline commands judge the log by the same
proof.

A start takes the same from the derived structures that it loads, which cuts their files.
"""

from __future__ import annotations

from protomq_broker.store.files.disk import Disk
from protomq_broker.store.index import index
from protomq_broker.store.log.checkpoint import read_checkpoint
from protomq_broker.store.log.recovery import has_bytes_behind
from protomq_broker.store.log.segment import SegmentFolder
from protomq_broker.store.queues import consume_queue_table
from protomq_broker.store.queues.queue_ends import ends_below, read_saved_ends
from protomq_broker.store.state import sent_snapshot, transaction_files
from protomq_broker.store.timer import pending_state


def derived_position(disk: Disk, root: str) -> int:
    """Up to where derived structures had covered the log durably; never beyond the synced position. 0 if no file says so."""
    return max(
        consume_queue_table.end_position(disk, f"{root}/consumequeue"),
        index.end_position(disk, f"{root}/index"),
        sent_snapshot.stored_position(disk, f"{root}/repeatedsends"),
        pending_state.stored_position(disk, f"{root}/timer"),
        transaction_files.end_position(disk, f"{root}/transactions"),
    )


def written_position(disk: Disk, root: str) -> int:
    """Up to where consume queues have entries. The log was written that far, synced or not."""
    folder = f"{root}/consumequeue"
    ends = read_saved_ends(disk, f"{root}/config")
    if disk.is_folder(folder):
        ends += ends_below(disk, folder, folder)
    return max((end.end_position for end in ends), default=0)


def forget_unused_segments(disk: Disk, root: str, folder: SegmentFolder) -> None:
    """Forgets segments in which nothing was ever written, if a file says that there were segments before them. It is known where the log
    begins.

    Retention deletes nothing behind the checkpoint, and never the segment being written. So if only the segment made in advance is left,
    somebody has removed the log; retention has not shortened it.
    """
    first = next(iter(folder.files), 0)
    if not first or has_bytes_behind(disk, folder, first):
        return
    if folder.lost_front_end:
        folder.files = {}
        return
    if 0 < known_position(disk, root) < first:
        folder.files = {}


def known_position(disk: Disk, root: str) -> int:
    """Up to where a file beside the log says that there was a log; 0 if none does."""
    checkpoint = read_checkpoint(disk, f"{root}/checkpoint")
    known = max(checkpoint.replay_position if checkpoint else 0, derived_position(disk, root))
    return known or written_position(disk, root)
