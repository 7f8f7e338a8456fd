"""Whether, where and when a send is tried again. Pure decisions; tenacity waits and counts.

A send is tried again within its total time-out (3 s), by these rules:

- An error that is not `retriable` ends it.
- The outcome is unknown (time-out, connection lost after the request was sent): the identical bytes go to the same broker
  once more, which recognises what it has already stored. So far, every message is stored exactly once.
- After that, and after errors that say "nothing happened", another broker is tried, up to `retries` times (RocketMQ's
  retryTimesWhenSendFailed, 2). Going to another broker with the outcome of the first unknown is the one exception to
  exactly-once: the message may then be stored on both, with the same message id. `retry_another_broker=False` rules it out.
- A chosen queue, a sharding key, or a cluster of one broker leave no other broker: the same one is tried again. Attempts that no
  server answered do not count then: a broker that restarts is waited for, in the route as well.
- An attempt gets half of the time that is left, so that a lost answer leaves time to ask again.

An error that ends a send is `definite` only if every attempt was.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from ._checks import check_count
from ._late_imports import fork_waits
from .errors import ConnectFailedError, ConnectionLostError, NoRouteError, ProtomqError

ATTEMPT_TIMEOUT_MIN_S: Final = 0.5
"""An attempt is not cut shorter than this, except by the total time-out."""

BACKOFF_FIRST_S: Final = 0.01
BACKOFF_MAX_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and where to try again.

    `retries`: further brokers to try; 0: one attempt and no more. `retry_another_broker`: whether to, when the outcome at
    the first is unknown.
    """

    retries: int = 2
    retry_another_broker: bool = True

    def __post_init__(self) -> None:
        check_count("retries", self.retries, 0, 16)


class NextStep(Enum):
    """What to do after a failed attempt."""

    GIVE_UP = "give up"
    SAME_BROKER = "same broker"
    ANOTHER_BROKER = "another broker"


class RetryPlan:
    """The attempts of one request: told of each failure, it decides the next step. One thread or task."""

    __slots__ = ("_asked_again", "_policy", "_retries_left", "outcome_unknown")

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._retries_left = policy.retries
        self._asked_again = False
        self.outcome_unknown = False
        """An attempt may have stored the message."""

    def next_step(self, error: ProtomqError, *, has_other_broker: bool) -> NextStep:
        """The step after `error`. `has_other_broker`: the caller left the queue open and the route has another broker."""
        if not error.definite:
            self.outcome_unknown = True
        if not error.retriable or self._policy.retries == 0:
            return NextStep.GIVE_UP
        if not has_other_broker:
            return self._same_broker(error)
        if not error.definite and not self._asked_again:
            self._asked_again = True
            return NextStep.SAME_BROKER
        if self.outcome_unknown and not self._policy.retry_another_broker:
            return self._same_broker(error)
        if self._retries_left == 0:
            return NextStep.GIVE_UP
        self._retries_left -= 1
        self._asked_again = False
        return NextStep.ANOTHER_BROKER

    def final_error(self, error: ProtomqError) -> ProtomqError:
        """The error to raise: not definite if any attempt may have stored the message."""
        if self.outcome_unknown and error.definite:
            error.definite = False
        return error

    def _same_broker(self, error: ProtomqError) -> NextStep:
        if isinstance(error, ConnectFailedError | ConnectionLostError | NoRouteError):
            return NextStep.SAME_BROKER
        if self._retries_left == 0:
            return NextStep.GIVE_UP
        self._retries_left -= 1
        return NextStep.SAME_BROKER


def attempt_timeout(left_s: float) -> float:
    """How long the next attempt may take when `left_s` is left of the total."""
    return max(left_s / 2, min(left_s, ATTEMPT_TIMEOUT_MIN_S), 0.001)


def backoff_delay(
    failed_attempts: int, error: ProtomqError, step: NextStep, rng: random.Random
) -> float:
    """Seconds to wait before the next attempt: what the server asked for, else random and growing; none before another broker."""
    if step is NextStep.ANOTHER_BROKER:
        return 0.0
    if error.retry_delay_ms is not None:
        return (
            error.retry_delay_ms / 1000 * rng.uniform(1.0, 1.5)
        )  # Spread out those who were refused together.
    return rng.uniform(0.5, 1.0) * min(
        BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** (failed_attempts - 1)
    )


def tenacity_options(decide: Callable[[ProtomqError], float | None]) -> dict[str, Any]:
    """Arguments for tenacity.Retrying or AsyncRetrying. `decide` answers the seconds to wait after an error, or None to give up."""
    with fork_waits:
        import tenacity  # 30 ms of import, and most processes never need a retry.

    decided: list[float] = [0.0]

    def again(error: BaseException) -> bool:
        delay_s = decide(error) if isinstance(error, ProtomqError) else None
        decided[0] = delay_s or 0.0
        return delay_s is not None

    return {
        "retry": tenacity.retry_if_exception(again),
        "wait": lambda _state: decided[0],
        "stop": tenacity.stop_never,
        "reraise": True,
    }
