"""A call to a broker, in steps: route -> address -> call -> again, as `_retry.py` says -> decode.

All calls of a client go through here, except for the two hot paths, whose first try has no time for it. Sends make their first try by
themselves, and come here when it fails. Pulls, of which many are in flight at once, have a loop of their own (`_pull_logic.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from ._retry import Retries, is_denial
from ._steps import CallServer, ForgetRoute, GetRoute, Pause, Steps
from ._types import BrokerAddress, MessageQueue, MethodInfo, Route
from .errors import NoRouteError, ProtomqError

_T = TypeVar("_T")


def pause_for(pause_s: float) -> Steps[None]:
    """Time passes until the next try."""
    yield Pause(pause_s)


def retried(
    attempt: Callable[[], Steps[_T]],
    decide: Callable[[ProtomqError], float | None],
    first_error: ProtomqError | None = None,
    pause: Callable[[float], Steps[None]] = pause_for,
) -> Steps[_T]:
    """What an attempt returns. `decide` takes each failure, and says how many seconds to wait before the next; None: it was the last.

    `first_error`: of an attempt that was made already. The error that ends it is `definite` only if each was: an attempt whose answer was
    lost may have been carried out. `pause`: waits; it may raise what ends the call.
    """
    error = first_error
    may_be_done = False
    while True:
        if error is None:
            try:
                return (yield from attempt())
            except ProtomqError as caught:
                error = caught
        pause_s = decide(error)
        may_be_done = may_be_done or not error.definite
        if pause_s is None:
            error.definite = not may_be_done
            raise error
        error = None
        if pause_s:
            yield from pause(pause_s)


def call_broker(
    topic: str,
    broker_name: str,
    method: MethodInfo,
    payload: Sequence[bytes],
    timeout_s: float,
    retries: Retries,
    clock: Callable[[], float] = time.monotonic,
    other_topics: Collection[str] = (),
) -> Steps[bytes]:
    """The encoded answer of a broker that has the topic, by the route as it is then. `timeout_s`: for all tries.

    `other_topics`: by whose routes the broker is looked for, one after the other, while it is not found by the topic's own.
    """
    deadline_s = clock() + timeout_s
    topics = list(dict.fromkeys((topic, *other_topics)))
    misses = 0

    def attempt() -> Steps[bytes]:
        nonlocal misses
        by = topics[misses % len(topics)]
        address = None
        try:
            route: Route = yield GetRoute(by, max(deadline_s - clock(), 0.001))
            address = broker_of(route, broker_name)
            answer: bytes = yield CallServer(
                address, method, payload, max(deadline_s - clock(), 0.001)
            )
        except ProtomqError as error:
            misses += address is None
            if error.stale_route:
                yield forget_route(by, error)
            raise
        return answer

    return (yield from retried(attempt, retries.of_call(deadline_s, clock).decide))


def forget_route(topic: str, error: ProtomqError, *, may_be_old: bool = False) -> ForgetRoute:
    """After an error of a broker: if it says that it does not have the topic, a name server that agrees is believed."""
    return ForgetRoute(topic, may_be_old, is_denial(error))


def call_address(
    address: BrokerAddress,
    method: MethodInfo,
    payload: Sequence[bytes],
    timeout_s: float,
    retries: Retries,
    clock: Callable[[], float] = time.monotonic,
) -> Steps[bytes]:
    """The encoded answer of the server at an address that no route tells: of one that was named. `timeout_s`: for all tries."""
    deadline_s = clock() + timeout_s

    def attempt() -> Steps[bytes]:
        answer: bytes = yield CallServer(
            address, method, payload, max(deadline_s - clock(), 0.001)
        )
        return answer

    decide = retries.of_call(deadline_s, clock, fixed_address=True).decide
    return (yield from retried(attempt, decide))


def pull_address(route: Route | None, queue: MessageQueue, broker_id: int) -> BrokerAddress | None:
    """Where a queue is pulled: at the broker that was suggested, while the route has it, else where all else goes. None: not known."""
    if route is None:
        return None
    slave = route.slaves.get((queue.broker_name, broker_id)) if broker_id else None
    return slave or route.brokers.get(queue.broker_name)


def broker_of(route: Route, broker_name: str) -> BrokerAddress:
    """The addresses of a broker; raises NoRouteError if the route does not name it."""
    address = route.brokers.get(broker_name)
    if address is None:
        raise NoRouteError(
            f"no broker {broker_name!r} is known to have the topic {route.topic!r}",
            metadata={"topic": route.topic, "broker_name": broker_name},
        )
    return address
