"""Delays of sends: when a message falls due, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from protomq_runtime.errors import Code, ServiceError, invalid_argument, too_many

from .store.log.kinds import MIXED
from .store.timer.delay_levels import (
    DelayError,
    check_due,
    checked_delay_ms,
    delay_of_level,
    due_behind,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .log_time import LogTime
    from .store.log.append import RecordRegion
    from .store.timer.pending import PendingTimers

RETRY_FULL_MS: Final = 10_000


class Delays:
    """Checks the delays that sends ask for. Used on the send lane only."""

    def __init__(
        self,
        log_time: LogTime,
        levels_ms: Sequence[int],
        pending: PendingTimers,
        *,
        count_max: int,
        size_max_bytes: int,
    ) -> None:
        self._log_time = log_time
        self._levels_ms = levels_ms
        self._pending = pending
        self._count_max = count_max
        self._size_max_bytes = size_max_bytes

    def due_time_ms(self, header: Any) -> int | None:
        """Returns the due time that the request's header gives to all its messages; None if the header gives none. Raises ServiceError."""
        delay = header.WhichOneof("delay")
        if delay is None:
            return None
        try:
            if delay == "delay_level":
                delay_ms = delay_of_level(self._levels_ms, header.delay_level)
            else:
                delay_ms = checked_delay_ms(header.delay_ms)
        except DelayError as error:
            raise illegal_delay(error) from error
        return due_behind(delay_ms, self._log_time.now_ms())

    def check(self, region: RecordRegion) -> None:
        """Raises ServiceError if the broker never takes such messages. At least one of them has a due time."""
        if region.flags == MIXED:
            raise invalid_argument(
                "records",
                "some records have due_time_ms and some do not: send these in separate requests",
            )
        now_ms = self._log_time.now_ms()
        try:
            check_due("due_time_ms", int(np.max(region.due_times_ms)), now_ms)  # type: ignore[arg-type]
        except DelayError as error:
            raise illegal_delay(error) from error

    def check_room(self) -> None:
        """Raises ServiceError if the broker takes no more delayed messages now. A repeat of one that it has is to be known before."""
        pending = self._pending
        if pending.count >= self._count_max:
            raise _full("pending messages", self._count_max)
        if pending.size_bytes >= self._size_max_bytes:
            raise _full("bytes of pending messages", self._size_max_bytes)


def _full(what: str, limit: int) -> ServiceError:
    return too_many(
        what,
        limit,
        f"the broker has {limit} {what}, delayed ones, and refuses more until some are delivered: try again later, or at another broker",
        retry_delay_ms=RETRY_FULL_MS,
    )


def illegal_delay(error: DelayError) -> ServiceError:
    """Makes an ILLEGAL_DELAY error with the refused value and the nearest allowed one."""
    return ServiceError(
        Code.INVALID_ARGUMENT,
        "ILLEGAL_DELAY",
        f"{error}; nothing was stored",
        metadata={"field": error.field, "value": str(error.value), "limit": str(error.limit)},
    )
