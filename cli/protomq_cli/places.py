"""What `--offset` means in the queues of a running system."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import typer

from protomq_cli.offsets import AtTime, OffsetRange, Place, resolve

if TYPE_CHECKING:
    from protomq import MessageQueue, PullConsumer, QueueRange

AHEAD_MAX_MS: Final = 60_000
"""By so much clocks may differ."""


def refuse_ahead(
    place: Place, option: str, why: str = "so all that is stored would be skipped; if that is wanted, write end"
) -> None:
    """Raises BadParameter for a time at which nothing can be stored yet: a mistyped year would skip all. `why`: what would happen."""
    if isinstance(place, AtTime) and place.time_ms > time.time() * 1000 + AHEAD_MAX_MS:
        when = datetime.fromtimestamp(place.time_ms / 1000, UTC).isoformat(sep=" ", timespec="seconds")
        raise typer.BadParameter(f"{when} lies ahead, {why}", param_hint=option)


def resolve_in_queue(
    consumer: PullConsumer, queue: MessageQueue, wanted: OffsetRange, queue_range: QueueRange | None = None
) -> tuple[int, int | None]:
    """[begin, end) of a range in one queue; the end is None where the range has none. `queue_range`: of the queue, if it is known."""
    return resolve_range(wanted, queue_range or consumer.queue_range(queue), lambda when: consumer.offset_for_time(queue, when))


def resolve_range(
    wanted: OffsetRange, queue_range: QueueRange, offset_for_time: Callable[[datetime], int]
) -> tuple[int, int | None]:
    """The same for a queue whose range is known. `offset_for_time` asks its broker."""
    min_offset, end_offset = queue_range

    def at_time(time_ms: int) -> int:
        return offset_for_time(datetime.fromtimestamp(time_ms / 1000, UTC))

    begin = resolve(wanted.begin, min_offset, end_offset, at_time)
    if wanted.end is None:
        return begin, None
    return begin, resolve(wanted.end, min_offset, end_offset, at_time)
