"""The background work of a store. It writes files of derived structures, prepares the next segment, makes checkpoints, deletes old
segments, scrubs, and checks that its folder still exists.

The housekeeping thread calls `turn` every flush interval; each duty knows by the monotonic clock when it is due. All of this can wait:
after a disk error the store logs it, appends go on, and the next turn tries again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Final, NamedTuple, Protocol

from protomq.wire.log_walk import decode_seal
from protomq.wire.record import SEAL_SIZE_BYTES
from protomq_broker.store.config import StoreConfig
from protomq_broker.store.derived import Derived
from protomq_broker.store.errors import StoreError
from protomq_broker.store.files.disk import UNREADABLE_ERRNOS, Disk
from protomq_broker.store.files.side_files import (
    SideFileDamagedError,
    read_json_file,
    write_json_file,
)
from protomq_broker.store.log.append import CorruptRecordError
from protomq_broker.store.log.commit_log import CommitLog

from .retention import Look, RetentionDecision, RetentionRules, RetentionState, SegmentAge, decide

log = logging.getLogger(__name__)

RETENTION_INTERVAL_MS: Final = 10_000
"""RocketMQ's cleanResourceInterval."""
STATE_INTERVAL_MS: Final = 60_000
HOUR_MS: Final = 3_600_000
_FAILURES: Final = (OSError, StoreError, CorruptRecordError)
"""A duty that ends with one of these is tried again. Anything else ends the thread, and with it all writes."""


class Clock(Protocol):
    """The clocks that the store reads."""

    def now_ms(self) -> int:
        """Milliseconds since 1970 by the wall clock, which may jump."""
        ...

    def monotonic_ms(self) -> int:
        """Milliseconds since some moment; never goes back."""
        ...

    def monotonic(self) -> float:
        """Seconds since some moment, to the microsecond; never goes back."""
        ...


class StoreActions(NamedTuple):
    """Functions of the store that housekeeping calls.

    Attributes:
        checkpoint: makes everything durable and writes the checkpoint; False: replicas lack something of it, so it is due again.
        uncheckpointed_bytes: bytes that were appended since the last checkpoint.
        delete_segments_below: deletes old segments that nobody needs; returns where the log starts now.
        keep_from_position: the log is needed from this position on; None if nobody needs it.
        set_refusal: refuses writes with a reason, "" takes them again.
        scrub: reads some of the old segments again, given the monotonic clock.
        heal: heals damaged files of consume queues and of the timer, some at a time, given the monotonic clock.
        look_for_space: checks whether a disk that was full has space again.
        fail: stops all writes for good, with a reason.
        keep_time: keeps the broker's clock for the next start.
        write_notes: writes the notes beside the log that the disk did not take.
    """

    checkpoint: Callable[[], bool]
    uncheckpointed_bytes: Callable[[], int]
    delete_segments_below: Callable[[int], int]
    keep_from_position: Callable[[], int | None]
    set_refusal: Callable[[str], None]
    scrub: Callable[[int], None]
    heal: Callable[[int], None]
    look_for_space: Callable[[], None]
    fail: Callable[[str], None]
    keep_time: Callable[[], None]
    write_notes: Callable[[], None]


class Housekeeper:
    """See the module's docstring. One thread at a time."""

    def __init__(
        self,
        disk: Disk,
        root: str,
        config: StoreConfig,
        clock: Clock,
        commit_log: CommitLog,
        derived: Sequence[Derived],
        actions: StoreActions,
    ) -> None:
        self._disk = disk
        self._root = root
        self._config = config
        self._clock = clock
        self._log = commit_log
        self._derived = derived
        self._actions = actions
        self._rules = RetentionRules(
            config.retention_hours * HOUR_MS,
            config.delete_hour,
            config.disk_delete_ratio,
            config.disk_force_ratio,
            config.disk_refuse_ratio,
        )
        self._newest_ms: dict[int, int] = {}  # of the segments that are full
        self._state = _read_state(disk, self._state_path)
        self._refusal = ""
        self._warning = ""
        self._failures: dict[str, str] = {}
        """Duties that have failed, and why: that is logged once."""
        now_ms = clock.monotonic_ms()
        self._checkpoint_due_ms = now_ms + config.checkpoint_interval_ms
        self._retention_due_ms = now_ms
        self._state_due_ms = now_ms + STATE_INTERVAL_MS

    def turn(self) -> None:
        """Does the duties that are due. If the log has failed, it only heals queues, since reading goes on."""
        now_ms = self._clock.monotonic_ms()
        if not self._log.failure:
            self._write(now_ms)
        try:
            self._actions.heal(now_ms)
        except _FAILURES as error:
            log.warning("healing of damaged files failed and will be tried again: %s", error)

    def _write(self, now_ms: int) -> None:
        duties: Mapping[str, Callable[[int], None]] = {
            "looking for the log's file": lambda _: self._look_for_loss(),
            "keeping the time": lambda _: self._actions.keep_time(),
            "writing notes": lambda _: self._actions.write_notes(),
            "looking for space": lambda _: self._actions.look_for_space(),
            "preparing a segment": lambda _: self._prepare_segment(),
            "the checkpoint": self._checkpoint,
            "writing derived files": lambda _: self._write_derived(),
            "retention": self._retain,
            "the scrub": self._actions.scrub,
        }
        # Each by itself: on a full disk most of them fail, and retention must still come to free it.
        for name, duty in duties.items():
            if self._log.failure:
                return
            try:
                duty(now_ms)
                self._failures.pop(name, None)
            except _FAILURES as error:
                if self._failures.get(name) != str(error):
                    log.warning("housekeeping: %s failed and will be tried again: %s", name, error)
                self._failures[name] = str(error)

    def _look_for_loss(self) -> None:
        lost = self._log.lost_path()
        if lost:
            self._actions.fail(
                f"the log's file {lost} is gone, or another one has its name: somebody has removed or moved the store's folder while"
                " the broker ran. Nothing is written any more. Stop the broker, bring the folder back, and start it again"
            )

    def _prepare_segment(self) -> None:
        if self._log.is_next_segment_due():
            self._log.prepare_next_segment()

    def _checkpoint(self, now_ms: int) -> None:
        grown = self._actions.uncheckpointed_bytes()
        if grown and (
            now_ms >= self._checkpoint_due_ms or grown >= self._config.checkpoint_size_bytes
        ):
            self._checkpoint_due_ms = now_ms + self._config.checkpoint_interval_ms
            if not self._actions.checkpoint():
                self._checkpoint_due_ms = now_ms

    def _write_derived(self) -> None:
        """The checkpoint is not due or has failed. Memory must still be written to files."""
        if self._actions.uncheckpointed_bytes():
            for structure in self._derived:
                structure.flush()

    def save(self) -> None:
        """Saves the state of the clocks for the next start."""
        self._actions.keep_time()
        if self._state is not None:
            write_json_file(
                self._disk, self._state_path, {**asdict(self._state), "monotonic_ms": None}
            )

    @property
    def _state_path(self) -> str:
        return f"{self._root}/config/retention.json"

    def _retain(self, now_ms: int) -> None:
        if now_ms < self._retention_due_ms:
            return
        self._retention_due_ms = now_ms + RETENTION_INTERVAL_MS
        # Both at once: a process that was stopped in between would take the wall clock for one that has jumped.
        wall_ms, monotonic_ms = self._clock.now_ms(), self._clock.monotonic_ms()
        usage = self._disk.usage(self._root)
        look = Look(
            wall_ms,
            time.localtime(wall_ms // 1000).tm_hour,
            monotonic_ms,
            self._segments(),
            usage.total_bytes,
            usage.used_ratio,
            self._actions.keep_from_position(),
        )
        decision = decide(self._state, look, self._rules)
        self._state = decision.state
        # First of all: if nothing can be deleted, messages must not take the space that freeing the disk needs.
        if decision.write_refusal != self._refusal:
            self._refusal = decision.write_refusal
            log.warning("writes: %s", self._refusal or "accepted again")
            self._actions.set_refusal(self._refusal)
        if decision.delete:
            self._delete(decision, usage.free_bytes)
        if decision.clock_warning != self._warning:
            self._warning = decision.clock_warning
            log.warning("clock: %s", self._warning or "right again")
        if now_ms >= self._state_due_ms:
            self._state_due_ms = now_ms + STATE_INTERVAL_MS
            self.save()

    def _delete(self, decision: RetentionDecision, free_bytes: int) -> None:
        # Where all that is alive in them may not fit, they go one by one: each makes space for the next one. All at once, less is written.
        ends = [segment.end_position for segment in decision.delete]
        is_tight = free_bytes < sum(segment.size_bytes for segment in decision.delete)
        first = 0
        try:
            for end in ends if is_tight else ends[-1:]:
                first = self._actions.delete_segments_below(end)
        finally:
            # Segments that a recovery would need stay until the next checkpoint.
            count = sum(segment.end_position <= first for segment in decision.delete)
            if count:
                log.info("%d segments are deleted: %s", count, decision.reason)

    def _segments(self) -> list[SegmentAge]:
        """The segments that have been written to, oldest first."""
        tail = self._log.tail
        ages = []
        files = self._log.folder.files
        self._newest_ms = {
            base: time_ms for base, time_ms in self._newest_ms.items() if base in files
        }
        for base in sorted(base for base in files if base < tail.position):
            segment = files[base]
            time_ms = self._newest_ms.get(base)
            if time_ms is None and segment.end_position <= tail.position:
                seal = decode_seal(
                    segment.read_if_readable(segment.size_bytes - SEAL_SIZE_BYTES, SEAL_SIZE_BYTES), 0
                )
                time_ms = self._newest_ms[base] = (
                    seal.store_time_ms if seal is not None else tail.store_time_ms
                )
            ages.append(
                SegmentAge(
                    base,
                    segment.end_position,
                    segment.size_bytes,
                    tail.store_time_ms if time_ms is None else time_ms,
                )
            )
        return ages


def _read_state(disk: Disk, path: str) -> RetentionState | None:
    try:
        return RetentionState(**(read_json_file(disk, path) or {}))
    except SideFileDamagedError as error:
        log.warning("%s: retention starts its clock again", error)
        return None
    except OSError as error:
        if error.errno not in UNREADABLE_ERRNOS:
            raise
        log.error("%s: retention starts its clock again", error)
        return None
    except TypeError:
        return None
