"""The last point at which two logs agree: a store that comes back truncates its log to it, and follows from there.

Two logs agree at a point if an append of the same epoch ends there in both, with the same CRC of the chain. Then they are the same
before that point. Each epoch has one writer. So of an epoch that both have, one log has the beginning of what the other has: they
agree where the shorter part ends. Where they do not, an epoch was begun twice, and the one before it is asked.

Pure logic: who asks the other store is not its business.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

from protomq_broker.store.errors import CorruptLogError


class LogPoint(NamedTuple):
    """The end of an append: its position, the epoch of the append, and the CRC of its seal. All 0: the beginning of a log."""

    position: int
    epoch: int
    crc32c: int


START: Final = LogPoint(0, 0, 0)


class LogView(Protocol):
    """What a log says about itself."""

    def epoch_end(self, epoch: int) -> tuple[int, int] | None:
        """(the last epoch not above `epoch` that the log has, where it ends there); None if it has none."""

    def log_point(self, position: int) -> LogPoint | None:
        """The point at a position; None if no append ends there. Raises CorruptLogError: nobody can tell, the log is damaged there."""


def last_agreed(ours: LogView, theirs: LogView, last_epoch: int) -> LogPoint | None:
    """The last point at which the logs agree; None if there is none: then ours has nothing of theirs. `last_epoch`: of our log.

    Where ours is damaged, it ends before that. Raises CorruptLogError: theirs is damaged where it is asked.
    """
    epoch = last_epoch
    while True:
        here, there = ours.epoch_end(epoch), theirs.epoch_end(epoch)
        if here is None or there is None:
            break
        if here[0] != there[0]:
            epoch = min(here[0], there[0])
            continue
        epoch = here[0]
        point = _agreed_at(ours, theirs, min(here[1], there[1]))
        if point is not None:
            return point
        epoch -= 1
        if epoch < 0:
            break
    return _agreed_at(ours, theirs, START.position)


def _agreed_at(ours: LogView, theirs: LogView, position: int) -> LogPoint | None:
    try:
        point = ours.log_point(position)
    except CorruptLogError as damage:
        return _agreed_at(ours, theirs, damage.position)
    return point if point is not None and point == theirs.log_point(position) else None
