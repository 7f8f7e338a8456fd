"""What the SDK tries again: where, how often, in which time. Pure decisions; the one loop that acts on them is `_call_steps.retried`.

    what                                  tries at most                               within                     pause
    name servers, for what they know      2 of each: the second where a connection    the call's time-out,       none
                                          was lost, which is opened again           shared among them
    name servers, all are told            1 of each                                   the same                   none
    a consumer's calls to a broker        3 (CALL)                                    request_timeout_s          50 ms, or as asked
      commits in `poll`, new queues       1 (ONCE); a `poll` makes up for it          0.5 s                      -
      the last commit, on close           any number, while it may pass (LAST_COMMIT) request_timeout_s          50 ms, doubling to 0.5 s
        of a queue that goes in `poll`    the same, at a broker that answers          request_timeout_s          50 ms, doubling to 0.5 s
                                            (GOING)
    send_back                             3 (CALL)                                    request_timeout_s          50 ms, or as asked
    receive (`_pop_steps.py`)             any number; without a hold 3 (CALL)         the hold and 5 s           50 ms, doubling to 0.5 s
    ack, nack, change_invisible           any number (SETTLE)                         request_timeout_s          50 ms, doubling to 0.5 s
    the end of a transaction              any number (UNTIL_THE_END)                  the call's time-out        50 ms, doubling to 1 s
    a reply                               any number (REPLY)                       the call's time-out        50 ms, doubling to 0.5 s
    a recall                              any number (RECALL)                         send_timeout_s             50 ms, doubling to 0.5 s
    Admin's calls to a broker             3, only while nothing happened (CHANGE)     request_timeout_s          50 ms, or as asked
    `Calls` (Spark, the command line)     any number (UNTIL_THE_END)                  the call's time-out        50 ms, doubling to 1 s
    a caller of requests makes itself     any number (LISTEN)                     the request's time-out     50 ms, doubling to 0.5 s
      known to a broker
    a send                                see below                                   send_timeout_s             10 ms, doubling to 0.5 s
    a pull                                any number: `poll` goes on for ever         the hold and 5 s each      0.1 s, doubling to 3 s

No layer below tries anything again: the transports make each call once, and gRPC's own retries are off. There is one exception: a call that
only reads, or may be carried out twice (`REPEATABLE`), where the server had closed the connection. It is made again, once, on a new one.
A try that falls from the remoting port over to gRPC is one try, since nothing was sent on the first way. "As asked": the server's
`retry_delay_ms`.

A broker that is silent, or was so in the same call, costs no try: another master may be elected. Then a call goes on until its time is
over, with pauses up to 0.5 s.

Nothing makes up for the last commit of a queue: its next owner begins there, and repeats what is not in it. So a broker that is busy, or
no master yet, costs no try either. On close neither does one that is away, which may be restarting. In `poll` that one ends it: a broker
that is gone must not hold up the queues of the others. What waiting hardly mends, as a topic that is deleted, is tried twice. All brokers
together are waited for that long, and each has 0.5 s at least. Who was away while another one was waited for has had that time, too.

A try of `ack`, `nack` and `change_invisible` gets half of the time that is left, as one of a send does. Its connection may be dead without
a word, and the next try opens another one.

Where the address is fixed (Admin), an error that suspects the route ends it: there is no other address.

A send is tried again within its total time-out (3 s), by these rules:

- An error that is not `retriable` ends it.
- The outcome is unknown (time-out, connection lost after the request was sent): the identical bytes go to the same broker
  once more. It recognises what it has already stored. So far, every message is stored exactly once.
- After that, and after errors that say "nothing happened", another broker is tried, up to `retries` times (RocketMQ's
  retryTimesWhenSendFailed, 2). If the outcome at the first broker is unknown, going to another one is the one exception to
  exactly-once. Then both may store the message, with the same message id. `retry_another_broker=False` rules it out. So a
  send that may go to any queue is tried at most 2 * (1 + retries) times: 6.
- A chosen queue, a sharding key, or a cluster of one broker leave no other broker: the same one is tried again. Attempts that no
  server answered do not count then: a broker that restarts is waited for, in the route as well. Nor do those that a slave answered, or a
  broker that is stopping: its master comes back, or another one is elected.
- A queue that a sharding key or a selector has chosen may not be written any more while its broker is drained. Then the queue is chosen
  again, by a new route, until the time is over. A queue that is named keeps the error. So does a batch of which a part is stored.
- Where no broker lets anybody write the topic, the route is asked for again for half a second: the permission may be back.
- A broker may ask for a long pause, as one whose disk is full does (10 s). The route is looked at each second meanwhile. Another master of
  that name ends the pause, or another broker for what may go to any queue. An elected master whose disk is full gives its lead away.
  If its pause is longer than the time that is left, the send waits for the next master.
- While the name server says that all brokers of the topic are away, the route is asked for again until the time is over.
- An attempt gets half of the time that is left, so that a lost answer leaves time to ask again. It ends early, as a lost connection does,
  where its broker is silent and the route names another master for it: see `SyncTransport.is_replaced`.

An error that ends a call or a send is `definite` only if every attempt was.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from ._checks import check_count
from ._transport_options import was_silent
from .errors import (
    BusyError,
    ConnectFailedError,
    ConnectionLostError,
    DeadlineExceededError,
    NoRouteError,
    NotMasterError,
    ProtomqError,
    QueueNotFoundError,
    ShuttingDownError,
    TopicNotFoundError,
    TransportError,
)

ATTEMPT_TIMEOUT_MIN_S: Final = 0.5
"""An attempt is not cut shorter than this, except by the total time-out."""

BACKOFF_FIRST_S: Final = 0.01
BACKOFF_MAX_S: Final = 0.5


AWAY_PAUSE_S: Final = 0.1
"""Between two looks at the name server for a topic whose brokers are away."""

PERMISSION_WAIT_S: Final = 0.5
"""How long a topic is looked up that no broker lets anybody write: a name server hears of a change within a fraction of that."""

ROUTE_LOOK_S: Final = 1.0
"""Between two looks at the route while a send pauses since its broker has asked for it."""
ROUTE_ANSWER_S: Final = 0.1
"""For which a look waits. What comes later is seen by the next one."""
LAST_TRY_S: Final = 0.5
"""What such a pause leaves of the time-out."""

PAUSE_MIN_S: Final = 0.05
"""Between two tries of a call, unless the server asks for more."""


@dataclass(frozen=True, slots=True)
class Retries:
    """How often a call is tried, within its time-out.

    `tries_max`: None: until the time is over. `pause_max_s`: the pause doubles up to it. `only_definite`: not after an error that leaves
    open whether something has happened. `outlasts`: these errors pass, and cost no try.
    """

    tries_max: int | None = 1
    pause_max_s: float = PAUSE_MIN_S
    only_definite: bool = False
    outlasts: tuple[type[ProtomqError], ...] = ()

    def of_call(
        self, deadline_s: float, clock: Callable[[], float], *, fixed_address: bool = False
    ) -> CallRetries:
        """The tries of one call, which ends at the deadline."""
        return CallRetries(self, deadline_s, clock, fixed_address=fixed_address)


ONCE: Final = Retries()
CALL: Final = Retries(3)
LAST_COMMIT: Final = Retries(
    2, pause_max_s=BACKOFF_MAX_S, outlasts=(BusyError, NotMasterError, DeadlineExceededError, TransportError, NoRouteError)
)
"""Nothing makes up for it: what its broker has not taken comes again."""
GOING: Final = Retries(1, pause_max_s=BACKOFF_MAX_S, outlasts=(BusyError, NotMasterError, DeadlineExceededError))
"""The last commit of a queue that goes while others stay, which a broker that is away must not hold up."""
CHANGE: Final = Retries(3, only_definite=True)
RECALL: Final = Retries(None, pause_max_s=BACKOFF_MAX_S)
LISTEN: Final = Retries(None, pause_max_s=BACKOFF_MAX_S)
REPLY: Final = Retries(None, pause_max_s=BACKOFF_MAX_S)
"""A service that replies to one after the other keeps all who come behind waiting."""
SETTLE: Final = Retries(None, pause_max_s=BACKOFF_MAX_S)
"""What was popped: a receipt is good for long, and a broker that restarts is back soon. To give up makes others do the work again."""
UNTIL_THE_END: Final = Retries(None, pause_max_s=1.0)


class CallRetries:
    """The tries of one call: it takes each failure and decides whether there is another. One thread or task."""

    __slots__ = ("_clock", "_deadline_s", "_fixed_address", "_pause_max_s", "_pause_s", "_retries", "_tries", "_waits")

    def __init__(
        self,
        retries: Retries,
        deadline_s: float,
        clock: Callable[[], float],
        *,
        fixed_address: bool,
    ) -> None:
        self._retries = retries
        self._deadline_s = deadline_s
        self._clock = clock
        self._fixed_address = fixed_address
        self._tries = 0
        self._pause_s = PAUSE_MIN_S
        self._pause_max_s = retries.pause_max_s
        self._waits = False
        """A silent broker's master may be elected now: tries do not count."""

    def decide(self, error: ProtomqError) -> float | None:
        """Seconds until the next try, None: there is none."""
        retries = self._retries
        if not self._fixed_address and retries.tries_max != 1 and was_silent(error):
            self._waits, self._pause_max_s = True, max(retries.pause_max_s, BACKOFF_MAX_S)
        if not self._waits and not isinstance(error, retries.outlasts):
            self._tries += 1
        if (
            not error.retriable
            or (retries.tries_max is not None and self._tries >= retries.tries_max)
            or (retries.only_definite and not error.definite)
            or (self._fixed_address and error.stale_route)
        ):
            return None
        pause_s = max((error.retry_delay_ms or 0) / 1000, self._pause_s)
        self._pause_s = min(self._pause_s * 2, self._pause_max_s)
        return pause_s if self._clock() + pause_s < self._deadline_s else None


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
    """The attempts of one request: it takes each failure and decides the next step. One thread or task."""

    __slots__ = ("_asked_again", "_policy", "_retries_left", "outcome_unknown")

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._retries_left = policy.retries
        self._asked_again = False
        self.outcome_unknown = False
        """An attempt may have stored the message."""

    def next_step(self, error: ProtomqError, *, has_other_broker: bool, queue_is_open: bool = False) -> NextStep:
        """The step after `error`. `queue_is_open`: the caller left the queue open. `has_other_broker`: and the route has another broker."""
        if not error.definite:
            self.outcome_unknown = True
        if not error.retriable or self._policy.retries == 0:
            return NextStep.GIVE_UP
        # The name server has a new number of queues moments later than the broker: the route is looked up until then.
        is_gone = queue_is_open and isinstance(error, QueueNotFoundError) and not self.outcome_unknown
        if is_gone and not (has_other_broker and self._retries_left):
            return NextStep.SAME_BROKER
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
        waited_for = ConnectFailedError | ConnectionLostError | NoRouteError | NotMasterError | ShuttingDownError
        if isinstance(error, waited_for):
            return NextStep.SAME_BROKER
        if self._retries_left == 0:
            return NextStep.GIVE_UP
        self._retries_left -= 1
        return NextStep.SAME_BROKER


def is_away(error: Exception) -> bool:
    """Whether the name server knows brokers that had the topic, and are not registered now: they restart, or another one is elected.

    It says so as TOPIC_NOT_FOUND; callers get `away_error`.
    """
    return isinstance(error, TopicNotFoundError | NoRouteError) and bool(error.metadata.get("missing_brokers"))


def away_error(error: ProtomqError) -> NoRouteError:
    """What callers hear of that: the topic is there, as far as is known, and nobody has deleted it."""
    return NoRouteError(error.message, metadata=error.metadata)


def knows_nobody(error: Exception) -> bool:
    """Whether a name server says that no broker is registered there: it may have just started, and says nothing of the topic."""
    return isinstance(error, TopicNotFoundError) and error.metadata.get("registered_brokers") == "0"


def is_denial(error: ProtomqError) -> bool:
    """Whether a broker, or a name server that knows of none that is away, says that it does not have the topic."""
    return isinstance(error, TopicNotFoundError) and not is_away(error)


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
        # Spread out those who were refused together.
        return error.retry_delay_ms / 1000 * rng.uniform(1.0, 1.5)
    return rng.uniform(0.5, 1.0) * min(
        BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** (failed_attempts - 1)
    )

