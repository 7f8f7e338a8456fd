"""The end of a lane, in order: it serves, then refuses what is new, then finishes what has begun, then it is over.

    SERVING ── refuse ──▶ REFUSING ── finish ──▶ FINISHING ── nothing is left, or the time is up ──▶ OVER

Between the two calls the services answer what they hold, and other lanes hand their last calls over. A pure state: no clock, no thread.
"""

from __future__ import annotations

from enum import IntEnum

from .errors import ServiceError


class Stage(IntEnum):
    """How far a lane has come. It never goes back."""

    SERVING = 0
    REFUSING = 1
    FINISHING = 2
    OVER = 3


class LaneShutdown:
    """Lane thread only. Times are in seconds of time.monotonic()."""

    def __init__(self) -> None:
        self.stage = Stage.SERVING
        self.refusal: ServiceError | None = None
        """What new calls are answered with; None while they are served."""
        self.finish_by: float | None = None
        """When the lane ends, whatever is left; None: not yet told to."""

    def refuse(self, refusal: ServiceError) -> None:
        """From now on new calls are refused. The first refusal counts."""
        if self.stage is Stage.SERVING:
            self.stage, self.refusal = Stage.REFUSING, refusal

    def finish(self, by: float) -> None:
        """The lane ends when nothing is left to do, and at `by` at the latest."""
        assert self.stage is Stage.REFUSING, f"a lane that is {self.stage.name} cannot finish"
        self.stage, self.finish_by = Stage.FINISHING, by

    def end_if(self, is_idle: bool, now: float) -> None:
        """A turn of a lane that finishes has ended: whether anything is left, and when that was."""
        assert self.finish_by is not None, f"a lane that is {self.stage.name} does not end"
        if is_idle or now >= self.finish_by:
            self.stage = Stage.OVER
