"""Calls to the cluster that planning and reading need; each is tried again within the time-out.

One `Cluster` for each set of client options and process: Spark keeps Python workers, and so their connections, from task to
task. Sockets are opened lazily, and again after a fork, so that nothing of a parent process is used.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache, lru_cache
from typing import Final, TypeVar

from protomq import MessageQueue
from protomq.calls import Calls, MissingBroker, QueueRange, Route, by_broker
from protomq.errors import NoRouteError, NotFoundError, TopicNotFoundError

from .offsets import Incarnations, Seen, Share, assigned_queues, share_of
from .options import ClientOptions, Subscription

_T = TypeVar("_T")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Cluster:
    """A cluster as seen by one process. Any thread may call everything."""

    def __init__(self, options: ClientOptions) -> None:
        self.options = options
        self.calls = Calls(
            namesrv=options.namesrv, transport=options.transport, timeout_s=options.timeout_s
        )
        self._seen: set[str] = set()

    # -- topics and queues -----------------------------------------------------------------------------------------------

    def queues(self, subscription: Subscription) -> list[MessageQueue]:
        """The queues of a subscription as the routes have them now. Raises TopicNotFoundError for a topic that is named and missing."""
        if subscription.pattern:
            pattern = re.compile(subscription.pattern)
            topics = [name for name in self.topic_names() if pattern.fullmatch(name)]
        else:
            topics = [*subscription.topics, *subscription.assigned]
        found: list[MessageQueue] = []
        for topic in topics:
            try:
                found += self.route(topic).read_queues
            except TopicNotFoundError:
                if not subscription.pattern:  # One of a pattern may go between two calls.
                    raise
        if subscription.assigned:
            return assigned_queues(subscription.assigned, found)
        return sorted(found)

    def all_queues(self, subscription: Subscription) -> list[MessageQueue]:
        """The same, with none left out since its broker is away: that is waited for. Raises BrokerMissingError, too."""
        # A queue that is named with its broker is there, or an error already.
        topics = [""] if subscription.pattern else [
            *subscription.topics,
            *(topic for topic, names in subscription.assigned.items() if not all(":" in name for name in names)),
        ]  # fmt: skip

        def look() -> list[MessageQueue]:
            self.refresh()
            return self.queues(subscription)

        return self._whole(topics, look)

    def _whole(self, topics: Sequence[str], look: Callable[[], _T]) -> _T:
        """What a look finds while no broker is away that had one of the topics ("": any)."""

        def attempt() -> _T:
            gone = self._missing(topics)
            try:
                found = look()
            except NoRouteError as error:
                for broker in gone if error.metadata.get("missing_brokers") else ():  # Who is away, since when and why, says more.
                    raise broker.error from error
                raise
            # One that has gone since is as little in it as one that has just come.
            for broker in gone or self._missing(topics):
                raise broker.error
            return found

        return self.calls.retried(attempt, fatal=(NotFoundError,))

    def _missing(self, topics: Sequence[str]) -> list[MissingBroker]:
        return [broker for topic in topics for broker in self.calls.missing_brokers(topic)]

    def route(self, topic: str) -> Route:
        """A route that is at most some seconds old; a topic that only the first send would make is not there."""

        def look() -> Route:
            route = self.calls.route(topic)
            if route.auto_create:
                self.calls.forget_route(topic)
                raise TopicNotFoundError(f"there is no topic {topic!r}", metadata={"topic": topic})
            return route

        # A topic that was there a moment ago may be missing because its broker restarts: wait for it.
        route = self.calls.retried(look, fatal=() if topic in self._seen else (NotFoundError,))
        self._seen.add(topic)
        return route

    def refresh(self) -> None:
        """The next look at a route asks the name server: for planning a micro-batch that shall see new queues."""
        for topic in self._seen:
            self.calls.forget_route(topic)

    def write_queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """The queues of a topic to write, in the order on which all clients agree. Raises NoRouteError, TopicNotFoundError.

        Which rows go to which queue follows from all of them: a broker that is away, or has no master, is waited for.
        """

        def look() -> tuple[MessageQueue, ...]:
            # A worker keeps routes from task to task; one that was changed since would have queues that are gone.
            self.calls.forget_route(topic)
            route = self.calls.route(topic)
            if route.leaderless_brokers:
                raise NoRouteError(f"broker {route.leaderless_brokers[0]} of topic {topic!r} has no master")
            if not route.write_queues:
                raise NoRouteError(f"topic {topic!r} has no queue that can be written")
            return route.write_queues

        return self._whole([topic], look)

    def topic_names(self) -> list[str]:
        """All topics that the name server knows. Raises NoRouteError while no broker is there."""
        return self.calls.retried(self.calls.topic_names)

    def see(self, queues: Iterable[MessageQueue]) -> Seen:
        """The range of each queue, and the incarnation of its topic: one call for each topic and broker."""
        found: dict[MessageQueue, QueueRange] = {}
        incarnations: dict[Share, int] = {}
        for (topic, broker_name), members in by_broker(queues).items():
            ids = [queue.queue_id for queue in members]
            by_id, incarnation = self.calls.queue_ranges(topic, broker_name, ids)
            found |= {queue: by_id[queue.queue_id] for queue in members if queue.queue_id in by_id}
            if incarnation:
                incarnations[topic, broker_name] = incarnation
        return Seen(found, incarnations)

    def offsets_for_times(
        self, times_ms: Mapping[MessageQueue, int], incarnations: Incarnations
    ) -> dict[MessageQueue, int]:
        """The first offset that was stored at the time of each queue or later, its end if there is none.

        Raises TopicRecreatedError where the incarnation is another.
        """
        found: dict[MessageQueue, int] = {}
        for queue, time_ms in times_ms.items():
            when = _EPOCH + timedelta(milliseconds=time_ms)
            incarnation = incarnations.get(share_of(queue), 0)
            answer = self.calls.offset_for_time(queue, when, topic_incarnation=incarnation)
            found[queue] = answer.queue_offset
        return found

    def commit(
        self,
        group: str,
        offsets: Mapping[MessageQueue, int],
        incarnations: Incarnations,
        timeout_s: float,
    ) -> None:
        """Stores where a group is. Raises TopicRecreatedError where the incarnation is another."""
        known = {queue: incarnations.get(share_of(queue), 0) for queue in offsets}
        self.calls.commit(group, offsets, incarnations=known, timeout_s=timeout_s)

    def close(self) -> None:
        """Closes all connections."""
        self.calls.close()


@lru_cache(maxsize=32)
def cluster_of(options: ClientOptions) -> Cluster:
    """The cluster object of this process for these options."""
    return Cluster(options)


@cache
def spare_collections() -> None:
    """Makes the tasks after the first one cheaper in this worker process: what is loaded by then is no garbage.

    PySpark's worker collects garbage after every task. With pandas and pyarrow loaded that is 10 to 40 ms of looking at
    modules, as much as reading ten thousand messages. What is made from now on is collected as always.
    """
    gc.collect()
    gc.freeze()
