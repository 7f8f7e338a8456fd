"""Recovers the log, and brings the derived structures to its end.

    derived.load < recover_log, which hands verified blocks to the derived structures < derived.truncate(end of the log)

Each derived structure says up to where it is complete (`replay_from`). The walk begins early enough for all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from protomq.wire.log_walk import WalkedBlock
from protomq_broker.store.derived import Derived
from protomq_broker.store.errors import CorruptLogError
from protomq_broker.store.log.boundaries import BoundaryFiles
from protomq_broker.store.log.checkpoint import Checkpoint
from protomq_broker.store.log.epochs import Epochs
from protomq_broker.store.log.recovery import (
    CorruptionMode,
    RecoveredLog,
    StartPoint,
    check_before,
    choose_start,
    find_absent,
    merged_ranges,
    read_quarantine,
    recover_log,
    rewrite_unsynced,
    skips_of,
    write_quarantine,
)
from protomq_broker.store.log.seals import LogWalker
from protomq_broker.store.log.segment import SegmentFolder
from protomq_broker.store.queues.queue_ends import ends_in, keep_ends_of_damage, save_ends
from protomq_broker.store.queues.repaired import is_within

from .cut_note import note_cut
from .log_replay import LogReplay, StartFiles

log = logging.getLogger(__name__)

START_CHECK_SIZE_BYTES: Final = 64 << 20
"""Bytes before the checkpoint that a start checks: 40 ms if they are in the page cache."""


def recover_store(
    files: StartFiles,
    mode: CorruptionMode,
    *,
    epochs: Epochs,
    same_cache: bool,
    boundaries: BoundaryFiles,
    on_walked: Callable[[WalkedBlock], None],
) -> RecoveredLog:
    """Recovers the log and brings the derived structures to its end. Raises CorruptLogError.

    `boundaries`: positions where a walk may begin, besides the heads of segments. `on_walked` is called with each block of the walk.
    """
    disk, derived = files.disk, files.derived
    quarantine_path = f"{files.config_folder}/quarantine.json"
    replay_from = [structure.replay_from for structure in derived]
    try:
        start = _start_of_walk(files, min(replay_from), quarantine_path)
        _check_before_start(files, start, boundaries, mode, quarantine_path, on_walked)
        replay = LogReplay(files, derived, start.position)

        def take(block: WalkedBlock) -> None:
            on_walked(block)
            replay.take(block)

        known_ends = (end.end_position for end in files.queues.known_ends)
        recovered = recover_log(
            disk,
            files.folder,
            start,
            files.checkpoint,
            same_cache=same_cache,
            mode=mode,
            quarantine_path=quarantine_path,
            epochs=epochs,
            derived_position=max(replay_from),
            written_position=max(known_ends, default=0) if same_cache else 0,
            on_block=take,
            before_cut=lambda: note_cut(disk, files.config_folder),
        )
    except CorruptLogError:
        # The files that had them are cut.
        if files.queues.known_ends:
            save_ends(disk, files.config_folder, files.queues.known_ends)
        raise
    replay.finish(recovered.tail.position)
    _note_repaired(files, recovered, replay)
    _name_damage(files)
    _rewrite_unsynced(files, recovered)
    _rebuild_broken(files, recovered)
    for structure in derived:
        structure.truncate(recovered.tail.position)
    # A structure whose files are ahead of the log has found it only now.
    _rebuild_broken(files, recovered)
    files.queues.keep_ends(recovered.damaged, files.deleted, recovered.tail.position)
    ends = ends_in(files.queues.all(), recovered.damaged)
    keep_ends_of_damage(disk, files.config_folder, recovered.damaged, ends)
    return recovered


def rebuild(files: StartFiles, recovered: RecoveredLog, derived: Sequence[Derived]) -> None:
    """Rebuilds derived structures from the recovered log, because the start had relied on wrong data."""
    _rebuild(files, recovered, derived)
    files.queues.keep_ends(recovered.damaged, files.deleted, recovered.tail.position)


def _start_of_walk(files: StartFiles, replay_from: int, quarantine_path: str) -> StartPoint:
    """Returns where the walk begins: early enough for all derived structures, and for segments that are absent."""
    start = choose_start(files.folder, files.checkpoint, replay_from)
    absent = find_absent(
        files.folder, start.position, read_quarantine(files.disk, quarantine_path)
    )
    # So that the walk comes upon it.
    return start if absent is None else choose_start(files.folder, files.checkpoint, absent)


def _check_before_start(
    files: StartFiles,
    start: StartPoint,
    boundaries: BoundaryFiles,
    mode: CorruptionMode,
    quarantine_path: str,
    on_walked: Callable[[WalkedBlock], None],
) -> None:
    """Checks the end of what lies before the checkpoint, if the walk begins there. Raises CorruptLogError."""
    checkpoint = files.checkpoint
    if checkpoint is None or not start.position == checkpoint.replay_position > 0:
        return
    head = _head_before(files.folder, checkpoint)
    nearer = _boundary_before(checkpoint, boundaries.read(head.position))
    modes: list[tuple[StartPoint, CorruptionMode]] = [(head, mode)]
    # A boundary is only a hint.
    if nearer is not None:
        modes.insert(0, (nearer, "refuse"))
    for first, its_mode in modes:
        try:
            check_before(
                files.disk,
                files.folder,
                first,
                checkpoint,
                mode=its_mode,
                quarantine_path=quarantine_path,
                on_block=on_walked,
            )
            break
        except CorruptLogError:
            if first is head:
                raise


def _boundary_before(
    checkpoint: Checkpoint, boundaries: Sequence[tuple[int, int]]
) -> StartPoint | None:
    """Returns the last boundary that is at least START_CHECK_SIZE_BYTES before the checkpoint; None if there is none."""
    end = checkpoint.replay_position - START_CHECK_SIZE_BYTES
    found = [StartPoint(position, crc) for position, crc in boundaries if position <= end]
    return found[-1] if found else None


def _head_before(folder: SegmentFolder, checkpoint: Checkpoint) -> StartPoint:
    """Returns where the check before the checkpoint begins: at the segment that ends with the checkpoint or contains it."""
    return choose_start(
        folder, replace(checkpoint, replay_position=1 << 62), checkpoint.replay_position - 1
    )


def _name_damage(files: StartFiles) -> None:
    """Logs which structures could not use their files."""
    for structure in files.derived:
        # Before the first checkpoint there are no such files yet.
        if structure.damage and (
            files.checkpoint is not None or not structure.damage.endswith("is gone")
        ):
            log.warning("%s: it is rebuilt from the log", structure.damage)


def _rewrite_unsynced(files: StartFiles, recovered: RecoveredLog) -> None:
    """Rewrites and syncs the end of the log, if it may not have been synced before."""
    end = recovered.tail.position
    if recovered.synced_position < end:
        log.info(
            "%d bytes from position %d on are rewritten and synced: they may not have been synced before",
            end - recovered.synced_position, recovered.synced_position,
        )  # fmt: skip
        rewrite_unsynced(files.disk, files.folder, recovered.synced_position, end)
        recovered.synced_position = end


def _rebuild_broken(files: StartFiles, recovered: RecoveredLog) -> None:
    broken = [structure for structure in files.derived if structure.needs_rebuild]
    if broken:
        _rebuild(files, recovered, broken)


def _rebuild(files: StartFiles, recovered: RecoveredLog, derived: Sequence[Derived]) -> None:
    for structure in derived:
        log.warning("%s is rebuilt from the log", type(structure).__name__)
        structure.start_rebuild()
    start = choose_start(files.folder, files.checkpoint, 0)
    replay = LogReplay(files, derived, start.position)
    skips = skips_of(recovered.damaged)
    for block in LogWalker(files.disk, files.folder, start.position, start.crc32c, skips=skips):
        replay.take(block)
    replay.finish(recovered.tail.position)
    _note_repaired(files, recovered, replay)


def _note_repaired(files: StartFiles, recovered: RecoveredLog, replay: LogReplay) -> None:
    """Puts into quarantine what a repair has taken out of the log before it came here: readers get an error for the lost messages."""
    news = [each for each in replay.repaired if not is_within(each.damage, recovered.damaged)]
    if not news:
        return
    ranges = [each.damage for each in news]
    recovered.damaged = merged_ranges([*recovered.damaged, *ranges])
    ends = [end for each in news for end in each.ends]
    keep_ends_of_damage(files.disk, files.config_folder, recovered.damaged, ends)
    write_quarantine(files.disk, f"{files.config_folder}/quarantine.json", recovered.damaged)
    files.queues.known_ends += ends
