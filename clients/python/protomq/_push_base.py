"""What both flavours of the push consumer have beside what waits: who listens to what, and how it stands."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from . import _forks
from ._checks import check_count, check_subscribed
from ._client_name import client_name
from ._connection_options import ConnectionOptions
from ._describing import About, Rates, settings_of
from ._filters import checked_filter
from ._hook_points import HookPoints
from ._hooked_consuming import hooked_listener
from ._membership_logic import check_topic_count
from ._of_one_process import OfOneProcess
from ._offset_calls import checked_tags
from ._push_options import CONCURRENCY_MAX, PushOptions
from ._push_results import Listener
from ._push_state import PushState
from ._push_steps import Wanted
from ._seldom import SaidSeldom
from ._trace import Tracer, traced
from .errors import ClientError, ConfigurationError, WrongTypeError
from .wire.topics import retry_topic

logger = logging.getLogger("protomq")

TAKE_COUNT_MAX = 256
"""Messages that are taken at a time."""
TICK_S = 0.1
"""How often listeners that are at work are looked at."""
IDLE_TICK_S = 1.0
REVOKE_TIMEOUT_S = 1.0
"""How long a queue that goes to another member waits for listeners: that member has nothing of it meanwhile."""

Function = TypeVar("Function", bound=Callable[..., Any])


class PushCounts(NamedTuple):
    """How a push consumer stands.

    `open`: messages here that are not done, of `size_bytes` octets; `waiting`: those of them that no listener has. Since its start:

    `done`: those that were given back, too. `refused`: those that failed and do not come again: no broker took them back, or nothing is
    given back (`broadcast`). `failed`: how often a message failed: it was given back, was dropped, or is tried again in order.
    """

    open: int
    waiting: int
    size_bytes: int
    done: int
    refused: int
    failed: int


class PushBase(OfOneProcess):
    """One consumer."""

    _consumer: object | None
    _starting: object | None
    """The start that is under way."""

    def __init__(self, options: PushOptions) -> None:
        self.options = options
        self._wanted: dict[str, Wanted] = {}
        self._listeners: dict[str, Listener] = {}
        """By topic, also of one that was unsubscribed: see `unsubscribe`."""
        self._state = PushState(options, self._listeners)
        self._seldom = SaidSeldom(time.monotonic)
        self._concurrency = options.concurrency
        self._hooks = HookPoints(options.group, options.hooks)
        self._tracer: Tracer | None = None
        self._rates = Rates()
        self._death: BaseException | None = None
        """What a thread or task of the consumer has died of; it stops itself then."""
        self._is_ending = False
        """Whether what it has of its own must end."""
        self._fork_count = _forks.fork_count
        """Where it was made, then where it was started: threads and tasks stay behind in a fork."""

    def _start_hooks(self, connection: ConnectionOptions) -> None:
        self._hooks.named_by(client_name(connection.client_id))
        if self.options.trace:
            self._tracer = traced(self._hooks, connection, connection.namesrv)

    @property
    def group(self) -> str:
        """Whose messages these are."""
        return self.options.group

    @property
    def concurrency(self) -> int:
        """How many messages are with listeners at a time."""
        return self._concurrency

    @property
    def is_suspended(self) -> bool:
        """Whether `suspend` was called, and `resume` not yet."""
        return self._state.is_suspended

    @property
    def is_running(self) -> bool:
        """Whether it has started here, has not been stopped, and has not stopped by itself.

        The log says what it died of, if it stopped by itself. In a child that was forked since, it has not started.
        """
        raise NotImplementedError

    @property
    def counts(self) -> PushCounts:
        """How it stands; a snapshot, from any thread."""
        state = self._state
        refused = state.backs.refused_count + state.dropped_count
        return PushCounts(
            state.count, state.waiting_count, state.size_bytes, state.done_count, refused, state.failed_count
        )

    def _about(self) -> About:
        """What it says of itself to an operator who asks; without a lock."""
        counts = self.counts._asdict()
        return About(
            type(self).__name__,
            settings_of(self.options) | {"listeners": ", ".join(f"{topic}: {one.name}" for topic, one in self._listeners.items())},
            {**counts, "running": self._state.running_count, "concurrency": self._concurrency, "suspended": int(self.is_suspended)},
            self._rates.per_s({"done": counts["done"]}),
            self._state.open_counts(),
        )

    def _note_rates(self) -> None:
        self._rates.note({"done": self._state.done_count})

    def on(
        self,
        topic: str | None = None,
        *,
        tags: Iterable[str] = (),
        sql: str | None = None,
        cel: str | None = None,
        module: str | None = None,
        batch_size: int | None = None,
    ) -> Callable[[Function], Function]:
        """A decorator of listeners; see `subscribe`.

        @consumer.on("orders", tags=["paid"])
        def bill(message): ...
        """
        if callable(topic):
            raise WrongTypeError(
                f'on takes a topic: write @consumer.on("orders") above {getattr(topic, "__name__", "it")}, not @consumer.on alone'
            )
        if topic is None:
            raise WrongTypeError('on takes a topic: write @consumer.on("orders")')
        check_subscribed(topic)

        def listens(listener: Function) -> Function:
            self.subscribe(
                topic, listener, tags=tags, sql=sql, cel=cel, module=module, batch_size=batch_size
            )
            return listener

        return listens

    def subscribe(
        self,
        topic: str,
        listener: Callable[..., Any],
        *,
        tags: Iterable[str] = (),
        sql: str | None = None,
        cel: str | None = None,
        module: str | None = None,
        batch_size: int | None = None,
    ) -> None:
        """Gives messages of a topic to `listener`, a function or a coroutine function, one a call; `batch_size`: in lists up to that long.
        A list is of one queue; of an orderly consumer it is in order.

        A type hint says what it takes: the message, or the value in its body, `order: Order` (see `protomq.body_codecs`); with a second
        argument `message: Message` both.

        `tags`, `sql`, `cel`, `module`: which messages, as in PullConsumer.subscribe. Once the consumer has started, it is subscribed soon
        after, and what goes wrong is logged. The group's retries go to the listener of the topic in which the group had the message.

        Raises ConfigurationError if the topic has a listener already: `unsubscribe` it first to have another one. So it does for the 256th
        topic: a member of a group has 256 at most, and one of them has its retries. With `broadcast` there is no such limit.
        """
        check_subscribed(topic)
        self._check_may_subscribe()
        if topic in self._wanted:
            raise ConfigurationError(
                f"topic {topic!r} has a listener here already, and a group has one subscription of a topic. Look at message.tag in one "
                "listener, use a consumer with another group, or unsubscribe first"
            )
        if not self.options.broadcast:
            check_topic_count(self.group, {*self._wanted, retry_topic(self.group)}, topic)
        checked = checked_tags(tags)
        filter_ = checked_filter(checked, sql, cel, module)
        made = self._hooked(listener, batch_size)
        self._listeners[topic] = made
        self._wanted[topic] = Wanted(topic, made, checked, filter_)
        self._look()

    def _listen_as(self, other: PushBase) -> None:
        """Subscribes to what another one is subscribed to, with its listeners. The hooks around them are its own: they know the client."""
        for topic, listener in other._listeners.items():
            self._listeners[topic] = self._hooked(listener.function, listener.batch_size)
        for topic, wanted in other._wanted.items():
            self._wanted[topic] = replace(wanted, listener=self._listeners[topic])

    def _hooked(self, listener: object, batch_size: int | None) -> Listener:
        return hooked_listener(Listener.of(listener, batch_size), self._hooks, in_order=self.options.orderly)

    def _listens(self, function: object) -> bool:
        """Whether this is one of the listeners, for the worker."""
        return any(function in (one.function, one.call) for one in self._listeners.values())

    def unsubscribe(self, topic: str) -> None:
        """Ends a subscription: soon after, no message of the topic is begun any more, but for its retries.

        Retries of all topics of a group stand in the same queues. Those of this topic that come here go to the listener that it had, until
        another one is subscribed. Without a listener they would fail until they are dead letters.
        """
        if self._wanted.pop(topic, None) is None:
            raise ConfigurationError(f"topic {topic!r} has no listener here")
        self._look()

    def _check_may_subscribe(self) -> None:
        """Raises ConfigurationError where a listener would never be called."""
        if self._is_ending:
            raise ConfigurationError(f"the push consumer of group {self.group!r} has stopped: make another one")

    def _check_may_start(self) -> None:
        """Raises ConfigurationError where it has started, or starts."""
        if self._consumer is None and self._starting is None and not self._is_ending:
            return
        if self._is_ending or self._is_left_behind:
            raise ConfigurationError("a push consumer is started once; make another one")
        raise ConfigurationError(
            f"the push consumer of group {self.group!r} runs already, and goes on: it is started once, by start(), run() or `with`"
        )

    @property
    def _is_left_behind(self) -> bool:
        """In a forked child: threads, tasks, and who holds the locks, are its parent's."""
        return (self._consumer is not None or self._starting is not None) and self._fork_count != _forks.fork_count

    def _check_is_here(self) -> None:
        if self._is_left_behind:
            raise ConfigurationError(f"the consumer of group {self.group!r} runs in the process that has started it, not in this child")

    def _look(self) -> None:
        """Something else is wanted."""

    def _checked_concurrency(self, concurrency: int) -> int:
        return check_count("concurrency", concurrency, 1, CONCURRENCY_MAX)

    def _note_death(self, error: BaseException, name: str) -> None:
        """Nobody must take a consumer for a running one that has lost a thread: it would keep its queues from other members."""
        logger.critical("%s of the push consumer of group %s has died: the consumer stops", name, self.group, exc_info=error)
        self._death = self._death or error

    def _raise_death(self) -> None:
        if self._death is not None:
            raise ClientError(f"the push consumer of group {self.group} stopped by itself: {self._death!r}") from self._death

    def _left_text(self, count: int) -> str:
        return (
            f"group {self.group}: {count} message(s) were not done when the consumer stopped; they come again, and those that a "
            "listener has still may be done twice"
        )
