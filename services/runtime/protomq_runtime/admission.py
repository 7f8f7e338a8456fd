"""When a lane refuses work: CoDel's rule on queue time, after folly's Codel.h.

A lane looks at the longest queue time of each turn of its loop. It is overloaded if that was above the target in every turn
of a whole interval. While it is, calls that have waited more than twice the target are refused, unparsed. A burst that is
worked off within the interval refuses nobody: that is where a fixed limit gives false alarms.

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

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """Limits of one lane.

    `queue_time_target_ms` 0: no rule on queue time (routing and administration, which must answer under overload).
    """

    depth_max: int = 10_000
    queue_time_target_ms: float = 50.0
    queue_time_interval_ms: float = 100.0

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
        "_interval",
        "_target",
        "_window_end",
        "_window_max",
        "_window_min",
        "last_max",
        "overloaded",
        "shed_after",
    )

    def __init__(self, config: AdmissionConfig) -> None:
        self._target = config.queue_time_target_ms / 1000
        self._interval = config.queue_time_interval_ms / 1000
        self.shed_after = 2 * self._target
        self.overloaded = False
        self.last_max = 0.0
        self._window_end = 0.0
        self._window_min = 0.0
        self._window_max = 0.0

    def observe(self, now: float, waited: float) -> None:
        """A turn with calls has begun; notes how long the oldest of them had waited."""
        if now < self._window_end:
            if waited < self._window_min:
                self._window_min = waited
            elif waited > self._window_max:
                self._window_max = waited
            return
        # A gap longer than an interval means that the lane has been idle: the old window says nothing any more.
        fresh = now - self._window_end <= self._interval
        self.overloaded = fresh and 0 < self._target < self._window_min
        self.last_max = self._window_max if fresh else waited
        self._window_end = now + self._interval
        self._window_min = self._window_max = waited

    def queue_time_us(self, now: float) -> int:
        """Longest wait in the last complete interval; 0 when the lane has been idle since. Any thread."""
        return int(self.last_max * 1e6) if now - self._window_end <= self._interval else 0
