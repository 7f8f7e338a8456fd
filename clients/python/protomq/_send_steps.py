"""Sending in steps: the route that fits, one request with all its tries, and the requests of a batch. See _steps.py and _retry.py.

The first try of what gathers in a line is the hot path. Both producers make it by themselves, and come to `send_again` when it fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ._batching import PreparedRecord, split_records
from ._call_steps import forget_route, retried
from ._choices import Choices, choices_of_batch
from ._delays import When, broker_of_handle, check_unanswered, decode_recall, encode_recall
from ._methods import RECALL_MESSAGE, SEND
from ._outgoing import BatchResult, OutgoingMessage, Stored
from ._retry import (
    AWAY_PAUSE_S,
    PERMISSION_WAIT_S,
    RECALL,
    ROUTE_ANSWER_S,
    ROUTE_LOOK_S,
    attempt_timeout,
    is_away,
    is_denial,
)
from ._send_arguments import field_of, when_of_message
from ._send_core import SendCore
from ._send_request import Request, address_of, fits
from ._send_retries import RequestRetries
from ._steps import CallServer, Each, ForgetRoute, GetRoute, Pause, SendOneWay, Steps
from ._types import Body, MessageQueue, Route, Target
from .errors import (
    BatchIncompleteError,
    ClosedError,
    NoRouteError,
    NotPermittedError,
    ProtomqError,
    RequestTimeoutError,
)
from .wire.topics import rules_of

if TYPE_CHECKING:
    from ._selectors import QueueSelector


def route_for(
    core: SendCore, topic: str, queue: MessageQueue | None, deadline_s: float, *, waits_for_permission: bool = True
) -> Steps[Route]:
    """The route; looked up again where messages for the queue (None: any) have no place in what is known.

    While all brokers of the topic are away, or have slaves only, it is waited for until the deadline. Where none may be written, for a
    moment: the permission may have been given back just now. (Not with `waits_for_permission` False: of further tries, and recalls.)
    """
    permitted_by_s = core.clock() + PERMISSION_WAIT_S
    while True:
        try:
            route: Route = yield GetRoute(topic, max(deadline_s - core.clock(), 0.001))
            if fits(route, queue):
                return route
            yield ForgetRoute(topic)
            route = yield GetRoute(topic, max(deadline_s - core.clock(), 0.001))
            is_waited_for = bool(route.leaderless_brokers) or (
                waits_for_permission
                and not route.is_write_permitted
                and rules_of(topic).send
                and core.options.retries > 0
                and core.clock() + AWAY_PAUSE_S < permitted_by_s
            )
            if fits(route, queue) or queue is not None or not is_waited_for or core.clock() + AWAY_PAUSE_S >= deadline_s:
                return route
        except ProtomqError as error:
            if not is_away(error) or core.clock() + AWAY_PAUSE_S >= deadline_s:
                raise
        yield Pause(AWAY_PAUSE_S)
        yield ForgetRoute(topic)


def send_request(
    core: SendCore,
    route: Route,
    records: Sequence[PreparedRecord],
    target: Target,
    deadline_s: float,
) -> Steps[Stored]:
    """One request, with all its tries."""
    request = core.make_request(route, records, *target)
    try:
        return (yield from _attempt(core, request, deadline_s))
    except ProtomqError as error:
        return (yield from send_again(core, request, route, deadline_s, error))


def send_again(
    core: SendCore, request: Request, route: Route, deadline_s: float, error: ProtomqError
) -> Steps[Stored]:
    """The further tries of a request whose first has failed with `error`. Raises the last error."""
    topic = route.topic
    retries = RequestRetries(core, request, deadline_s, route)
    last_error = error

    def attempt() -> Steps[Stored]:
        try:
            retries.aim((yield from route_for(core, topic, None, deadline_s, waits_for_permission=False)))
            return (yield from _attempt(core, request, deadline_s))
        except ProtomqError as again:
            if _doubts_route(again):
                yield forget_route(topic, again)
            raise

    def decide(failed: ProtomqError) -> float | None:
        nonlocal last_error
        last_error = failed
        return retries.decide(failed)

    def pause(pause_s: float) -> Steps[None]:
        if (yield from _pause_until_over(topic, retries, pause_s)):
            return
        if retries.is_last_wait:
            raise last_error

    if _doubts_route(error):
        yield forget_route(topic, error)
    try:
        return (yield from retried(attempt, decide, error, pause))
    except ProtomqError as ended:
        raise retries.final_error(ended) from None


def _pause_until_over(topic: str, retries: RequestRetries, pause_s: float) -> Steps[bool]:
    """A pause; whether the route has ended it. It is looked at behind the caller's back: nothing says that it is wrong."""
    left_s = pause_s
    looks = retries.looks(pause_s)
    while looks and left_s > ROUTE_ANSWER_S:
        part_s = min(ROUTE_LOOK_S, left_s)
        left_s -= part_s
        yield Pause(part_s - ROUTE_ANSWER_S)
        yield ForgetRoute(topic, may_be_old=True)
        try:
            yield GetRoute(topic, ROUTE_ANSWER_S, may_be_old=True)
            yield Pause(ROUTE_ANSWER_S)
            route: Route = yield GetRoute(topic, ROUTE_ANSWER_S, may_be_old=True)
        except ClosedError:
            raise
        except ProtomqError:
            # Nothing is known of the topic: the next try tells why.
            looks = False
        else:
            if retries.is_over(route):
                return True
    if left_s > 0:
        yield Pause(left_s)
    return False


def _doubts_route(error: ProtomqError) -> bool:
    """A master that is stopped or cut off is silent: meanwhile another one may lead."""
    return error.stale_route or isinstance(error, RequestTimeoutError)


def _attempt(core: SendCore, request: Request, deadline_s: float) -> Steps[Stored]:
    started_s = core.clock()
    try:
        answer: bytes = yield CallServer(
            address_of(request), SEND, request.payload, attempt_timeout(deadline_s - started_s)
        )
        return core.answered(request, answer, started_s)
    except ProtomqError:
        core.failed(request, started_s)
        raise


def send_one_way(
    core: SendCore, message: OutgoingMessage, selector: QueueSelector | None, deadline_s: float
) -> Steps[None]:
    """One message whose outcome nobody learns, in one try."""
    check_unanswered(message.delay, message.deliver_at, time.time())
    message, context = core.before_send(message, is_one_way=True)
    error: BaseException | None = None
    try:
        record = core.prepare_message(message, deadline_s)
        route = yield from route_for(core, message.topic, message.queue, deadline_s)
        target = core.target_queue(route, message, selector)
        when = field_of(when_of_message(message))
        request = core.make_request(route, (record,), target, when)
        yield SendOneWay(
            address_of(request), SEND, request.payload, deadline_s - core.clock()
        )
    except BaseException as caught:
        error = caught
        raise
    finally:
        core.after_send(context, None, error)


def send_batch(
    core: SendCore,
    topic: str,
    messages: Sequence[Body | OutgoingMessage],
    keys: Sequence[str | None] | None,
    tags: str | Sequence[str],
    queue: MessageQueue | None,
    sharding_key: str | None,
    when: When | None,
    deadline_s: float,
    cached: Callable[[str], Route | None],
) -> Steps[BatchResult]:
    """Many messages of one topic, with the hooks around them. `when`: for messages that say nothing of it. `cached`: routes that need no
    look-up: an effect would cost a small batch a tenth of its time.
    """
    context = None
    if core.hooks.send:
        given = core.as_messages(topic, messages, keys, tags)
        context = core.hooks.before_send(topic, given, is_batch=True)
        messages, keys, tags = context.messages, None, ""
    try:
        records = core.prepare_many(messages, topic, keys, tags, deadline_s, when, sharding_key)
        route = cached(topic)
        if route is None or not fits(route, queue):
            route = yield from route_for(core, topic, queue, deadline_s)
        choices: Choices | None = None
        result: BatchResult | None = None
        while result is None:
            if choices is not None:
                route = yield from route_for(core, topic, queue, deadline_s)
            groups, places = core.group(route, records, messages, queue, sharding_key, when)
            try:
                result = yield from send_groups(core, route, groups, places, deadline_s)
            except NotPermittedError as refused:  # Nothing is stored.
                if choices is None:
                    choices = choices_of_batch(core, topic, messages, queue, sharding_key, deadline_s)
                yield from choices.again(refused)
    except BaseException as error:
        if context is not None:
            core.hooks.after_send(context, (), error)
        raise
    if context is not None:
        core.hooks.after_send(context, result, None)
    return result


def send_groups(
    core: SendCore,
    route: Route,
    groups: Mapping[Target, Sequence[PreparedRecord]],
    places: Sequence[tuple[Target, int]] | None,
    deadline_s: float,
) -> Steps[BatchResult]:
    """The requests of a batch: one after another within a queue. Over queues coroutines send them at the same time; a thread, one after
    another, begins no queue behind a failure.

    Raises BatchIncompleteError if some requests were stored and another failed.
    """
    errors: list[ProtomqError] = []
    fixed_size_bytes = core.encoder(route.topic).fixed_size_bytes

    def send_group(target: Target, records: Sequence[PreparedRecord]) -> Steps[list[Stored]]:
        stored: list[Stored] = []
        if errors:
            return stored
        try:
            for part in split_records(records, fixed_size_bytes, core.options.batch_size_max_bytes):
                stored.append((yield from send_request(core, route, part, target, deadline_s)))
        except ProtomqError as error:
            errors.append(error)
        return stored

    outcomes: list[list[Stored]]
    if len(groups) == 1:
        outcomes = [(yield from send_group(*next(iter(groups.items()))))]
    else:
        outcomes = yield Each([send_group(*group) for group in groups.items()])
    stored = [item for items in outcomes for item in items]
    if errors:
        if not stored:
            # A batch of which something may be stored is not told to be refused.
            raise next((error for error in errors if not error.definite), errors[0])
        raise BatchIncompleteError(
            f"{sum(item.count for item in stored)} of {sum(map(len, groups.values()))} messages are stored, then: {errors[0]}",
            stored,
        ) from errors[0]
    first_request: dict[Target, int] = {}
    count = 0
    for target, items in zip(groups, outcomes, strict=True):
        first_request[target] = count
        count += len(items)
    return BatchResult.of_groups(stored, first_request, places)


def recall(core: SendCore, topic: str, recall_handle: str, deadline_s: float) -> Steps[bool]:
    """Takes a delayed message back; whether it was in time. Tried again until the deadline: only the broker of the handle can.

    After a try whose answer is lost, "recalled before" is that try's own work. "Not pending" may be, too, where the broker does not know:
    then the error of that try is raised.
    """
    broker_name = broker_of_handle(recall_handle)
    payload = [encode_recall(topic, recall_handle)]
    lost: ProtomqError | None = None
    first_error: ProtomqError | None = None
    try:
        yield from route_for(core, topic, None, deadline_s, waits_for_permission=False)
    except ProtomqError as error:
        if is_denial(error):  # As a send, which is told so at once. All else is tried again.
            raise
        first_error = error

    def attempt() -> Steps[tuple[bool, bool]]:
        nonlocal lost
        try:
            # While another master is elected, it is waited for.
            route = yield from route_for(core, topic, None, deadline_s, waits_for_permission=False)
            if broker_name not in route.brokers:
                raise NoRouteError(
                    f"the handle names broker {broker_name!r}, which is not known to have the topic {topic!r}: it is away, or the handle is"
                    " cut short",
                    metadata={"topic": topic, "broker_name": broker_name},
                )
            timeout_s = attempt_timeout(deadline_s - core.clock())
            answer: bytes = yield CallServer(route.brokers[broker_name], RECALL_MESSAGE, payload, timeout_s)
        except ProtomqError as error:
            if _doubts_route(error):
                yield forget_route(topic, error)
            if not error.definite:
                lost = error
            raise
        return decode_recall(answer)

    decide = RECALL.of_call(deadline_s, core.clock).decide
    is_recalled, was_recalled = yield from retried(attempt, decide, first_error)
    if lost is None or is_recalled:
        return is_recalled
    if not was_recalled:
        raise lost
    return True
