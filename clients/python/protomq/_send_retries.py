"""The further tries of a request whose first has failed: whether, when and where. No sockets, no waiting."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from ._permitted import no_master_of
from ._retry import LAST_TRY_S, ROUTE_LOOK_S, NextStep, RetryPlan, backoff_delay
from ._types import MessageQueue, Route
from .errors import (
    DiskFullError,
    ProtomqError,
    QueueNotFoundError,
    SendOutOfOrderError,
    SequenceExpiredError,
)

if TYPE_CHECKING:
    pass

from ._send_core import SendCore
from ._send_request import Request

logger = logging.getLogger("protomq.producer")

FIRST_CONTACT_RETRY_MAX_S: Final = 840.0
"""A broker forgets nobody within 15 minutes; a minute less, since its clock is not ours."""


class RequestRetries:
    """The further attempts of one request whose first has failed."""

    def __init__(
        self,
        core: SendCore,
        request: Request,
        deadline_s: float,
        route: Route,
    ) -> None:
        self._core = core
        self._request = request
        self._deadline_s = deadline_s
        self._route = route
        self._plan = RetryPlan(core.retry_policy)
        self._step = NextStep.GIVE_UP
        self._failed_attempts = 0
        self._unknown_at: set[str] = set()
        self._queue_is_gone = False
        self.is_last_wait = False
        """The pause lasts as long as there is time. Unless it `is_over`, there is no further try."""

    def decide(self, error: ProtomqError) -> float | None:
        """Seconds until the next attempt, None: no more. See `_call_steps.retried`."""
        self._failed_attempts += 1
        self.is_last_wait = False
        if self._can_begin_anew(error):
            self._step = NextStep.SAME_BROKER
            now_s = self._core.clock()
            return None if now_s >= self._deadline_s or self._is_too_late(now_s) else 0.0
        if not error.definite:
            self._unknown_at.add(self._request.queue.broker_name)
        is_open = self._request.queue_is_open
        others = is_open and len(self._route.writable_brokers) > 1
        self._step = self._plan.next_step(error, has_other_broker=others, queue_is_open=is_open)
        self._queue_is_gone = isinstance(error, QueueNotFoundError)
        if self._step is NextStep.GIVE_UP:
            return None
        delay_s = backoff_delay(self._failed_attempts, error, self._step, self._core.rng)
        now_s = self._core.clock()
        # An elected master gives its lead away soon, to one that has room, while its own pause says when it may have some itself.
        if now_s + delay_s >= self._deadline_s and isinstance(error, DiskFullError) and self._is_elected:
            self.is_last_wait = True
            delay_s = self._deadline_s - LAST_TRY_S - now_s
            if delay_s <= ROUTE_LOOK_S:
                return None
        due_s = now_s + delay_s
        if due_s >= self._deadline_s or self._is_too_late(due_s):
            return None
        queue = self._request.queue
        logger.info(
            "send to %s/%s/%d failed, trying again (%s) in %.3f s: %s",
            queue.topic, queue.broker_name, queue.queue_id, self._step.value, delay_s, error,
        )  # fmt: skip
        return delay_s

    @property
    def _is_elected(self) -> bool:
        return self._request.queue.broker_name in self._route.elected_brokers

    def looks(self, pause_s: float) -> bool:
        """Whether the route is to be looked at in a pause: another one may take the broker's place, or the message."""
        is_lone = self._request.queue.broker_name in self._route.lone_brokers
        return self._step is NextStep.SAME_BROKER and pause_s > ROUTE_LOOK_S and (not is_lone or self._may_move)

    @property
    def _may_move(self) -> bool:
        return self._request.queue_is_open and not self._plan.outcome_unknown

    def is_over(self, route: Route) -> bool:
        """Whether the route, as it is now, ends a pause that a broker has asked for."""
        request = self._request
        name = request.queue.broker_name
        address = route.brokers.get(name, request.address)
        if name not in route.leaderless_brokers and address != request.address:
            return True
        if self._may_move and any(writable != name for writable in route.writable_brokers):
            self._step = NextStep.ANOTHER_BROKER
            return True
        return False

    def _can_begin_anew(self, error: ProtomqError) -> bool:
        """The broker does not know what it has acknowledged. Whether this request is surely not stored there: then it goes as the first.

        One that is out of order is not, whatever became of earlier tries: the broker knows the producer, and looked for it first.
        """
        if not isinstance(error, SequenceExpiredError | SendOutOfOrderError):
            return False
        request = self._request
        broker_name = request.queue.broker_name
        self._core.forget_acknowledged(broker_name)
        may_be_stored = broker_name in self._unknown_at and isinstance(error, SequenceExpiredError)
        if request.previous_sequence is None or may_be_stored:
            return False
        logger.info("broker %s has forgotten this producer: %s", broker_name, error)
        request.aim(request.queue, None)
        return True

    def _is_too_late(self, due_s: float) -> bool:
        """A broker that has acknowledged nothing yet need not know the producer any more; asked again, it would store a second time."""
        return (
            bool(self._unknown_at)
            and self._request.previous_sequence is None
            and due_s > self._request.made_s + FIRST_CONTACT_RETRY_MAX_S
        )

    def aim(self, route: Route) -> None:
        """Points the request where the next attempt goes, by the route as it is now. Raises NoRouteError if only slaves are there."""
        self._route = route
        request = self._request
        if self._step is NextStep.ANOTHER_BROKER:
            self._move_to(self._core.choose_queue(route, avoid_broker=request.queue.broker_name))
        elif (
            request.queue_is_open
            and not self._plan.outcome_unknown
            and (self._queue_is_gone or request.queue not in route.write_queues)
        ):
            self._move_to(self._core.choose_queue(route))
        broker_name = request.queue.broker_name
        if broker_name in route.leaderless_brokers:
            # The address is a slave's, which would say no more than that.
            raise no_master_of(request.queue)
        # A broker that is no longer in the route may still answer for what it has stored: its last address is kept.
        request.address = route.brokers.get(broker_name, request.address)

    def _move_to(self, queue: MessageQueue) -> None:
        self._request.aim(queue, self._core.acknowledged(queue.broker_name))

    def final_error(self, error: ProtomqError) -> ProtomqError:
        """The error to raise in the end."""
        return self._plan.final_error(error)
