"""What goes on in a store without anybody asking: it syncs, saves, deletes, scrubs and heals, on two threads of its own.

    protomq-flush          syncs the log
    protomq-housekeeping   the duties of `housekeeping/housekeeping.py`, with healing of queues and of the timer
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Final

from .housekeeping.housekeeping import Clock, Housekeeper, StoreActions
from .housekeeping.log_healing import LogHealer
from .housekeeping.scrub import Scrubber
from .log.flusher import BackgroundThread
from .open_log import OpenLog
from .queues.heal import LogState, QueueHealer
from .saving import Saver
from .store_files import StoreFiles
from .timer.rebuild import TimerRebuild
from .timer.timer import TimerState

CONFIRM_PAUSE_S: Final = 0.005
"""Between two looks whether replicas have what a checkpoint covers."""


class Upkeep:
    """See the module's docstring.

    Attributes:
        keeper: the duties of housekeeping.
        log_healer: replaces damage of the log by the bytes of a replica.
        queue_healer: heals damaged files of consume queues.
        timer_rebuild: rebuilds damaged files of the timer.
        scrubber: reads old segments again.
    """

    def __init__(
        self,
        files: StoreFiles,
        open_log: OpenLog,
        timer: TimerState,
        saver: Saver,
        clock: Clock,
        *,
        on_writer: Callable[[Callable[[], None]], None],
        keep_from_position: Callable[[], int | None],
        keep_time: Callable[[], None],
        write_notes: Callable[[], None],
    ) -> None:
        """Connects the parts; no thread runs yet. `keep_from_position`, `keep_time`, `write_notes`: as in `StoreActions`."""
        commit_log, positions, flusher, refusals, start, quarantine, checked, reader = open_log
        self._log = commit_log
        self._positions = positions
        self._flusher = flusher
        disk, config, folder = files.disk, files.config, files.folder
        self.log_healer = LogHealer(disk, files.root, commit_log, flusher, quarantine, checked, start.point, files.waiting_ranges)
        self.scrubber = Scrubber(
            disk, folder, config.scrub_bytes_per_s, start.point, quarantine, checked, files.queues
        )
        self._saver = saver
        self._is_scrubbing = config.scrub_bytes_per_s > 0
        self.queue_healer = QueueHealer(
            disk,
            folder,
            files.queues,
            LogState(
                lambda: commit_log.tail.position,
                lambda: positions.flushed,
                lambda: files.topics.deleted,
                quarantine,
            ),
        )
        self.timer_rebuild = TimerRebuild(
            disk,
            folder,
            files.pending,
            timer,
            files.queues,
            reader,
            quarantine,
            start_point=start.point,
            end_position=lambda: positions.appended,
            on_writer=on_writer,
        )
        self.keeper = Housekeeper(
            disk,
            files.root,
            config,
            clock,
            commit_log,
            files.derived,
            StoreActions(
                saver.checkpoint,
                lambda: saver.unsaved_bytes,
                saver.delete_segments_below,
                keep_from_position,
                refusals.refuse,
                self.scrub,
                self.heal,
                refusals.look_for_space,
                saver.fail_lost,
                keep_time,
                write_notes,
            ),
        )
        self._flush_thread = BackgroundThread(
            "protomq-flush", config.flush_interval_ms, self._flush, self._crashed
        )
        self._keep_thread = BackgroundThread(
            "protomq-housekeeping", config.flush_interval_ms, self.keeper.turn, self._crashed
        )
        files.queues.watch_damage(self._keep_thread.wake)

    def start(self) -> None:
        """Starts both threads."""
        self._saver.pause = partial(threading.Event().wait, CONFIRM_PAUSE_S)
        self._flush_thread.start()
        self._keep_thread.start()

    def stop(self) -> None:
        """Stops both threads, and waits for what they are doing."""
        self._flush_thread.stop()
        self._keep_thread.stop()

    def request_flush(self) -> None:
        """Wakes the flusher. What is appended during a sync is covered by the next one. Any thread."""
        self._flush_thread.wake()

    def scrub(self, now_ms: int) -> None:
        """Reads some of the old segments again, if that is wanted. `now_ms`: monotonic time."""
        if self._is_scrubbing:
            self.scrubber.step(now_ms, self._positions.flushed)

    def heal(self, now_ms: int) -> None:
        """Heals some of the damaged files of consume queues and of the timer. `now_ms`: monotonic time."""
        self.queue_healer.step(now_ms)
        self.timer_rebuild.step(now_ms)

    def _flush(self) -> None:
        self._flusher.flush()

    def _crashed(self, error: BaseException) -> None:
        self._log.fail(f"a background thread of the store has ended: {error!r}")
        self._positions.note_failed()
