"""What both flavours of the pull consumer have beside what waits: options, steps, and what is told to whom."""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ._checks import check_seconds
from ._client_name import client_name
from ._connection_options import ConnectionOptions
from ._consumer_options import ConsumerOptions
from ._consumer_steps import ConsumerSteps
from ._describing import About, description, read_unlocked, settings_of
from ._hook_points import HookPoints
from ._hooked_consuming import HandedOut
from ._member_driver import MemberDriver
from ._membership_logic import MembershipState
from ._message import Message
from ._of_one_process import OfOneProcess
from ._offset_calls import subscribed_queues
from ._open_consumers import shared_queue, shared_queue_text, uncommitted_text
from ._pull_logic import PullState, Ticket, logger
from ._pull_schedule import ScheduledRun
from ._queue_listener import QueueListener
from ._requests import reply_steps, reply_timeout_s
from ._routes import RouteBook
from ._send_back import (
    SentBack,
    brokers_of,
    checked_messages,
    delay_fields,
    error_text,
    require_group,
    retry_topic_steps,
    send_back_steps,
)
from ._stacks import task_stacks, thread_stacks
from ._steps import Steps
from ._trace import Tracer, traced
from ._types import Body, BrokerAddress, Delay, MessageQueue, Route
from ._warnings import warn
from .errors import ClosedError, ConfigurationError, WrongTypeError

if TYPE_CHECKING:
    from .v1 import membership_service_pb2 as pb


class ConsumerBase(OfOneProcess):
    """One consumer. The flavour makes `_hooks` and `_routes`."""

    _hooks: HookPoints
    _routes: RouteBook
    end_call = "close"
    """See OpenConsumer.end_call."""

    def __init__(
        self,
        options: ConsumerOptions,
        listener: QueueListener | None = None,
        member: MemberDriver | None = None,
    ) -> None:
        self.options = options
        if listener is not None and not isinstance(listener, QueueListener):
            raise WrongTypeError(f"listener is a QueueListener, not {listener!r}")
        self._steps = ConsumerSteps(
            options, listener=listener, state=self._new_state(options), member=member
        )
        self._state = self._steps.state
        self._state.on_dropped = _gives_up(self)
        self._long_hold = options.long_hold
        self._warned_of_member = False
        self._tracer: Tracer | None = None
        self._handed: HandedOut | None = None
        self._auto_commits = options.auto_commits
        self._pid = os.getpid()
        self._is_newly_forked = False
        """Whether this is a forked child in which nothing was polled yet."""
        self._closed = False
        self._scheduled: ScheduledRun | None = None
        """A `run_scheduled` of another thread or task, or of this one."""
        self._was_cut_off = False
        """Whether a `close` was interrupted, so that the next one is to do all that is left."""
        self._began_s = time.monotonic()
        self.about: Callable[[], About] = partial(About, type(self).__name__, settings_of(options))
        """What it says of itself; a push consumer above it says more."""
        self.name: Callable[[], str] | None = None
        """What it is called as a member; None: it is none."""
        if member is not None:
            state = member.state
            self.name = lambda: state.key[0]
            member.state.describe = _describes(self)
        self._says_goodbye = False

    def _start_hooks(self, connection: ConnectionOptions) -> None:
        """Once there is a transport."""
        self._hooks.named_by(self.name or client_name(connection.client_id))
        if self.options.trace:
            self._tracer = traced(self._hooks, connection, connection.namesrv)
        if self._hooks.commit:
            self._steps.commits.hooks = self._hooks
        if self._hooks.consume:
            self._handed = HandedOut(self._hooks)

    def _describe(self, wants_stacks: bool) -> pb.MemberDescription:
        """For an operator. The thread, or a task, of its membership."""
        about = read_unlocked(self.about)
        queues = read_unlocked(lambda: self._state.described(about.open_counts))
        stacks = (task_stacks(), thread_stacks()) if wants_stacks else ()
        return description(about, self._began_s, queues, stacks)

    def _new_state(self, options: ConsumerOptions) -> PullState:
        """What decides about its pulls."""
        return PullState(options.pull_options())

    @property
    def group(self) -> str:
        """Whose offsets are committed; "": nobody's."""
        return self.options.group

    def assignment(self) -> tuple[MessageQueue, ...]:
        """The queues being consumed."""
        return self._steps.assignment()

    def paused(self) -> tuple[MessageQueue, ...]:
        """Of those, the ones that are paused."""
        return self._state.paused

    @staticmethod
    def _membership_state(options: ConsumerOptions, connection: ConnectionOptions) -> MembershipState:
        name = connection.client_id
        if options.instance_name:
            name = f"{socket.gethostname()}@{options.instance_name}"
        return MembershipState(options.group, name, options.allocation, options.machine_room, locks_queues=options.lock_queues)

    def __del__(self) -> None:
        member = getattr(self, "_member", None)
        if member is not None and getattr(self, "_pid", 0) == os.getpid():
            member.abandon()
        # Nobody has it any more, and nobody closed it: too late for a call to a broker, for this may run anywhere.
        if getattr(self, "_closed", True) or not self._auto_commits or self._pid != os.getpid():
            return
        if count := self._state.uncommitted_count():
            warn(logger, uncommitted_text(self, count, "nobody used it any more"))

    def finish_at_exit(self, timeout_s: float) -> int:
        """See OpenConsumer.finish_at_exit."""
        raise NotImplementedError

    def _look_around(self) -> None:
        """A `poll` that waits goes on. Any thread, or the loop's."""
        raise NotImplementedError

    def _give_up_pull(self, ticket: Ticket) -> None:
        """Its outcome does not count any more: the broker is to hold it no longer."""
        raise NotImplementedError

    def _check_open(self) -> None:
        if self._closed and not self._says_goodbye:
            raise ClosedError("the consumer is closed")

    def _goodbye(self) -> Steps[None]:
        """The listener is told that all queues go; it may commit, as `close` has not committed yet."""
        self._says_goodbye = True
        try:
            yield from self._steps.say_goodbye()
        finally:
            self._says_goodbye = False

    def _check_group(self) -> None:
        if not self.group:
            raise ConfigurationError("a consumer without a group commits nothing")

    def _check_something_to_poll(self) -> None:
        if not self._steps.subscriptions and not self._steps.assigned:
            raise ConfigurationError("nothing to poll: subscribe to a topic or assign queues first")

    def _send_back_steps(
        self,
        messages: Message | Iterable[Message],
        error: str | BaseException,
        delay: Delay | None,
        dead_letter: bool,
    ) -> Steps[list[SentBack]]:
        """Of `send_back`, its arguments checked."""
        group = require_group(self.group)
        fields = {"error": error_text(error), **delay_fields(delay, dead_letter=dead_letter)}
        found = checked_messages(messages)
        timeout_s = self.options.request_timeout_s
        return send_back_steps(
            group, found, fields, self._state.incarnation, timeout_s, alike_brokers=self._state.alike_brokers
        )

    def _reply_steps(
        self,
        message: Message,
        body: Body,
        properties: Mapping[str, str] | None,
        timeout_s: float | None,
    ) -> Steps[None]:
        """Of `reply`, its arguments checked."""
        if timeout_s is None:
            timeout_s = reply_timeout_s(self.options.request_timeout_s)
        return reply_steps(message, body, properties, check_seconds("timeout_s", timeout_s))

    def _retry_topic_steps(self) -> Steps[str]:
        """Of `subscribe_retries`: the topic."""
        group = require_group(self.group)
        queues = subscribed_queues(self._steps.assigned, self._steps.subscriptions)
        return retry_topic_steps(group, brokers_of(queues), self.options.request_timeout_s)

    def _doubts(self, routes: Iterable[Route]) -> list[str]:
        """What the user may not have meant; each is told once."""
        found = self._steps.doubts(routes)
        queue = None if self._warned_of_member else shared_queue(self)
        if queue is not None:
            self._warned_of_member = True
            self._state.warned_of_other()
            found.append(shared_queue_text(self.group, queue))
        return found

    def _known_address(self, queue: MessageQueue) -> BrokerAddress | None:
        """Where a pull goes, if that needs no look-up: nearly always."""
        return self._steps.known_address(self._routes.cached(queue.topic), queue)

    def _addresses(self) -> set[BrokerAddress]:
        """Of the brokers that it consumes from."""
        topics = {queue.topic for queue in self._state.queues}
        routes = [self._routes.last_known(topic) for topic in topics]
        return {address for route in routes if route is not None for address in route.brokers.values()}


def wakes(consumer: Any) -> Callable[[], None]:
    """Makes the consumer's `poll` look around; keeps nobody's consumer alive."""
    reference = weakref.ref(consumer)

    def wake() -> None:
        found = reference()
        if found is not None:
            found._look_around()

    return wake


def _gives_up(consumer: ConsumerBase) -> Callable[[Ticket], None]:
    """As `wakes`."""
    reference = weakref.ref(consumer)

    def give_up(ticket: Ticket) -> None:
        found = reference()
        if found is not None:
            found._give_up_pull(ticket)

    return give_up


def _describes(consumer: ConsumerBase) -> Callable[[bool], pb.MemberDescription]:
    """As `wakes`."""
    reference = weakref.ref(consumer)

    def describe(wants_stacks: bool) -> pb.MemberDescription:
        found = reference()
        if found is None:
            raise ClosedError("nobody uses the consumer any more")
        return found._describe(wants_stacks)

    return describe
