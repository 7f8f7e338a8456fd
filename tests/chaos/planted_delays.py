"""Bugs of delayed messages, put in on purpose: see `planted.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from unittest import mock

from protomq_broker.log_time_file import LogTimeFile
from protomq_broker.store.appending import Appender
from protomq_broker.store.housekeeping.carry_forward import CarryForward
from protomq_broker.store.log.append import AppendRequest
from protomq_broker.store.log.commit_log import Reserve
from protomq_broker.store.timer import rebuild
from protomq_broker.store.timer.log_time import LogClock
from protomq_broker.store.timer.pending import PendingTimers
from protomq_broker.store.timer.timer import Watch
from protomq_broker.store.timer.timer_rows import NO_ROWS
from protomq_broker.system_writer import SystemWriter
from protomq_broker.timer_mover import TimerMover

Patch = Any


def _patch(target: Any, name: str, value: Any) -> Patch:
    return mock.patch.object(target, name, value)


def _delivers_early() -> Patch:
    """Messages fall due five seconds before their time."""
    real = PendingTimers.due

    def due(self: PendingTimers, now_ms: int, count_max: int) -> Any:
        return real(self, now_ms + 5_000, count_max)

    return _patch(PendingTimers, "due", due)


def _follows_the_wall_clock() -> Patch:
    """A clock that somebody sets an hour ahead delivers an hour early."""
    return _patch(LogClock, "now_ms", lambda self, wall_ms, monotonic_ms: wall_ms)


def _starts_at_the_wall_clock() -> Patch:
    """A broker that is killed while the clock is an hour ahead delivers an hour early."""
    return _patch(LogTimeFile, "load", lambda self: None)


def _delivers_in_two_appends() -> Patch:
    """The copies are appended, and then the record that tells of it: a crash in between delivers again."""

    def append_moved(
        self: Appender,
        copies: Sequence[AppendRequest],
        states: Sequence[tuple[str, Sequence[bytes]]],
        reserve: Reserve = Reserve.STATE,
    ) -> int:
        end_position = self.append(copies) if copies else 0
        for segment in self._log.folder.files.values():
            self._log._disk.fdatasync(segment.fd)
        for topic, bodies in states:
            end_position = self.append_state(topic, bodies, reserve)
        return end_position

    return _patch(Appender, "append_moved", append_moved)


def _misses_recalls_meanwhile() -> Patch:
    """A message that was recalled while its copy was made is delivered."""
    real = TimerMover._append

    def append(self: TimerMover, copies: Any, gone: Any, watch: Watch, deleted: Any) -> None:
        real(self, copies, gone, Watch(), deleted)  # one that has seen nothing

    return _patch(TimerMover, "_append", append)


def _answers_recalls_that_it_does_not_append() -> Patch:
    """A recall is answered as won, and nothing says so."""
    return _patch(SystemWriter, "append", lambda self, topic, bodies: self._store.appended_position)


def _forgets_what_falls_due_next_at_a_start() -> Patch:
    """What the timer's file has in memory's place is not taken over."""
    real = PendingTimers._load_files

    def load(self: PendingTimers) -> str:
        found = real(self)
        self._set_near(NO_ROWS)
        return found

    return _patch(PendingTimers, "_load_files", load)


def _loses_pending_messages_with_their_segment() -> Patch:
    """Nothing is carried forward."""
    return _patch(CarryForward, "_carry_pending", lambda self, cut: None)


def _rebuilds_without_what_ended() -> Patch:
    """A timer that is rebuilt while it runs delivers again what was delivered or recalled."""
    return _patch(rebuild.TimerRebuild, "_take_ends", lambda self, end: iter(()))


def _delivers_late() -> Patch:
    """Messages fall due five seconds after their time."""
    real = PendingTimers.due
    return _patch(PendingTimers, "due", lambda self, now_ms, count_max: real(self, now_ms - 5_000, count_max))


def _counts_twice_at_a_start() -> Patch:
    """What the timer's file has is counted twice."""
    real = PendingTimers._load_files

    def load(self: PendingTimers) -> str:
        found = real(self)
        self._count *= 2
        return found

    return _patch(PendingTimers, "_load_files", load)


BUGS: Final[Mapping[str, Callable[[], Patch]]] = {
    "delivers early": _delivers_early,
    "delivers late": _delivers_late,
    "counts what is pending twice at a start": _counts_twice_at_a_start,
    "follows the wall clock": _follows_the_wall_clock,
    "starts at the wall clock": _starts_at_the_wall_clock,
    "delivers in two appends": _delivers_in_two_appends,
    "misses recalls meanwhile": _misses_recalls_meanwhile,
    "answers recalls that it does not append": _answers_recalls_that_it_does_not_append,
    "forgets what falls due next at a start": _forgets_what_falls_due_next_at_a_start,
    "loses pending messages with their segment": _loses_pending_messages_with_their_segment,
    "rebuilds without what ended": _rebuilds_without_what_ended,
}
