"""When a lane refuses work: CoDel's rule on queue time (RFC 8289), with what is refused from folly's Codel.h.

A lane looks at the longest queue time of each turn of its loop. It is overloaded if that has been above the target for a whole
interval, and no longer once it is not. While it is, calls that have waited more than twice the target are refused, unparsed. A burst
that is worked off within the interval refuses nobody: that is where a fixed limit gives false alarms.

A queue time counts as far as the lane has worked meanwhile, by the CPU time of its thread. The rest it has waited for a CPU or for the
GIL, which others had. To refuse calls then gains nothing: they come again, and their answers were no nearer. 330 callers that wait for
their answers are 15 ms of work, and turns of 150 ms on a machine that others keep busy. In a lane that waits for the disk (send, pull, pop)
all time counts: another broker may have a faster one.

What carries the end of work that is done (`dispatch.never_shed`), as a commit, is not refused by this rule: others would do the work again.
So they would if a member could not say that it is there, or renew its locks. Commits alone can keep a lane overloaded for that long.

`depth_max` bounds the queue on which calls from gRPC and from other lanes wait. Calls on a lane's own connections wait in the socket
buffers, where TCP's flow control bounds them. Their lane takes them and serves them in the same turn.

What is measured: a lane reads everything that is there, in every turn, so a call waits for at most the turn before its own. A
call from gRPC or from another lane has the time of its arrival. For bytes on a socket the kernel tells no time. If the poll
returned at once, they may have lain there since the poll before, and that is assumed; else they have just come.

Why the target of a lane is 50 ms by default and not folly's 5: waiting callers make a queue as long as their number. 256
threads that send one message each stand at 10 ms, although the lane serves them as fast as it can. Refusing some of them would
only cost throughput. 2 x 50 ms is half of RocketMQ's fixed 200 ms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """Limits of one lane.

    `queue_time_target_ms` 0: no rule on queue time (routing and administration, which must answer under overload).
    `waits_for_disk`: the time that the lane does not work counts, too.
    """

    depth_max: int = 10_000
    queue_time_target_ms: float = 50.0
    queue_time_interval_ms: float = 100.0
    waits_for_disk: bool = False

    def __post_init__(self) -> None:
        if self.depth_max < 1:
            raise ValueError(f"depth_max must be at least 1, it is {self.depth_max}")
        if self.queue_time_target_ms < 0 or self.queue_time_interval_ms <= 0:
            raise ValueError(
                "queue_time_target_ms must not be negative, queue_time_interval_ms must be positive"
            )


class QueueTimeRule:
    """The state of the rule in one lane. Lane thread only; all times in seconds."""

    __slots__ = (
        "_above_since",
        "_counts_work",
        "_interval",
        "_target",
        "_turn_at",
        "_window_end",
        "_window_max",
        "_work_clock",
        "_worked",
        "last_max",
        "overloaded",
        "shed_after",
    )

    def __init__(self, config: AdmissionConfig, work_clock: Callable[[], float]) -> None:
        """`work_clock`: how long the lane's thread has worked; it is read by that thread."""
        self._target = config.queue_time_target_ms / 1000
        self._interval = config.queue_time_interval_ms / 1000
        self._counts_work = not config.waits_for_disk
        self._work_clock = work_clock
        self.shed_after = 2 * self._target
        self.overloaded = False
        self.last_max = 0.0
        self._turn_at = 0.0
        self._above_since: float | None = None
        """The first turn of a row in which the queue time was above the target."""
        self._worked = 0.0
        """The work clock in the last such turn."""
        self._window_end = 0.0
        self._window_max = 0.0

    def observe(self, now: float, waited: float) -> None:
        """A turn with calls has begun; notes how long the oldest of them had waited."""
        if waited > self._target > 0:
            self._observe_long(now, waited)
        else:
            self._above_since = None
            self.overloaded = False
        self._turn_at = now
        if now < self._window_end:
            if waited > self._window_max:
                self._window_max = waited
            return
        # A gap longer than an interval means that the lane has been idle: the old window says nothing any more.
        self.last_max = self._window_max if now - self._window_end <= self._interval else waited
        self._window_end = now + self._interval
        self._window_max = waited

    def _observe_long(self, now: float, waited: float) -> None:
        counted = waited
        if self._counts_work:
            # The clock is a system call, so it is read in long turns only. The first of a row begins the measurement.
            worked = self._work_clock()
            counted = worked - self._worked
            self._worked = worked
        was_idle = now - waited - self._turn_at > self._interval
        if self._above_since is None or was_idle or counted <= self._target:
            self._above_since = now
        self.overloaded = now - self._above_since >= self._interval

    def queue_time_us(self, now: float) -> int:
        """Longest wait in the last complete interval; 0 when the lane has been idle since. Any thread."""
        return int(self.last_max * 1e6) if now - self._window_end <= self._interval else 0
