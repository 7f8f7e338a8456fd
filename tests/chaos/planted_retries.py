"""Bugs of retries and dead letters, put in on purpose: `check_send_backs` must catch each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final
from unittest import mock

from protomq_broker import failed_messages, recalls, send_backs
from protomq_broker.log_time import LogTime
from protomq_broker.store.log.flusher import LogFlusher
from protomq_broker.store.log.move import move_records
from protomq_broker.store.state.group_settings import plan_retry
from protomq_broker.store.state.groups import GroupTable
from protomq_broker.store.state.replayed import OffsetRuns
from protomq_broker.system_writer import SystemWriter
from protomq_broker.timer_mover import TimerMover


def _one_retry_more() -> Any:
    """The limit is taken for the number of deliveries that fail before the last one."""
    return mock.patch.object(
        send_backs,
        "plan_retry",
        lambda settings, levels_ms, failed_count, asked=None: plan_retry(
            settings, levels_ms, max(failed_count - 1, 1), asked
        ),
    )


def _requests_are_forgotten() -> Any:
    """A request that is sent again is done again."""
    return mock.patch.object(GroupTable, "has_sent_back", lambda self, key: key < 0)


def _requests_are_forgotten_by_a_start() -> Any:
    """The records are appended, and nobody reads them back."""
    real = GroupTable.__init__

    def init(self: GroupTable, *arguments: Any) -> None:
        real(self, *arguments)
        self.replay_from = 1 << 62

    return mock.patch.object(GroupTable, "__init__", init)


def _attempts_are_not_counted() -> Any:
    """A copy says what its message said."""
    real = move_records

    def move(*arguments: Any, **named: Any) -> Any:
        return real(*arguments, **{**named, "attempts": 0})

    return mock.patch.object(failed_messages, "move_records", move)


def _the_clock_of_delays_is_ahead() -> Any:
    """The mover looks at a clock that is 40 ms ahead of the one that due times were made with."""
    real = LogTime.now_ms
    def deliver(self: TimerMover, real_deliver: Any = TimerMover.deliver) -> bool:
        with mock.patch.object(LogTime, "now_ms", lambda clock: real(clock) + 40):
            found: bool = real_deliver(self)
        return found

    return mock.patch.object(TimerMover, "deliver", deliver)


def _answered_before_it_is_stored() -> Any:
    """An answer does not wait for the disk, and a flush is only said."""
    def flush(self: LogFlusher) -> int:
        self._positions.note_flushed(self._positions.appended)
        return self._positions.flushed

    return mock.patch.object(LogFlusher, "flush", flush)


def _dead_letters_are_lost() -> Any:
    """What has no retries left goes nowhere, beside messages that have some."""
    real = failed_messages.copies_for

    def copies(*arguments: Any) -> Any:
        found = real(*arguments)
        return found[:1] if len(found) > 1 else found

    return mock.patch.object(send_backs, "copies_for", copies)


def recalls_take_whatever_waits() -> Any:
    """A recall compares time and id, and not how the message came there."""
    return mock.patch.object(recalls, "_are_sent", lambda found, is_there: is_there | True)


def _replays_are_not_remembered() -> Any:
    """Each replay begins anew."""
    return mock.patch.object(GroupTable, "replayed", return_value=OffsetRuns())


def the_replay_is_told_apart() -> Any:
    """The record of a replay is an append of its own, behind the copies: a crash comes in between."""
    real = SystemWriter.append_moved

    def append(self: SystemWriter, copies: Any, states: Any) -> int:
        position = real(self, copies, ())
        for topic, bodies in states:
            position = self.append(topic, bodies)
        return position

    return mock.patch.object(SystemWriter, "append_moved", append)


RETRY_BUGS: Final[tuple[tuple[str, Callable[[], Any]], ...]] = (
    ("retries once more than it was told", _one_retry_more),
    ("does a send-back that is sent again", _requests_are_forgotten),
    ("forgets send-backs at a start", _requests_are_forgotten_by_a_start),
    ("counts no attempts", _attempts_are_not_counted),
    ("delivers retries early", _the_clock_of_delays_is_ahead),
    ("answers send-backs before the sync", _answered_before_it_is_stored),
    ("loses dead letters", _dead_letters_are_lost),
    ("recalls retries", recalls_take_whatever_waits),
    ("replays dead letters again", _replays_are_not_remembered),
    ("tells of a move in an append of its own", the_replay_is_told_apart),
)
