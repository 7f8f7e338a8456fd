"""Calls to the cluster that planning and reading need, with retries within the time-out.

One `Cluster` for each set of client options and process: Spark keeps Python workers, and so their connections, from task to
task. Sockets are made lazily and after a fork anew, so that nothing of a parent process is used.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from functools import cache, lru_cache
from typing import Final, TypeVar, cast

from protomq import _methods
from protomq._offset_calls import (
    broker_of,
    by_broker,
    decode_queue_ranges,
    decode_range_incarnation,
    decode_search_offset,
    encode_commit,
    encode_get_queue_range,
    encode_search_offset,
)
from protomq._routes import Routes
from protomq._transport import SyncTransport
from protomq._transport_options import TransportOptions
from protomq._types import MessageQueue, MethodInfo, QueueRange, Route
from protomq.errors import NoRouteError, NotFoundError, ProtomqError, TopicNotFoundError

from .offsets import Incarnations, Seen, Share, assigned_queues, share_of
from .options import ClientOptions, Subscription

_T = TypeVar("_T")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
PAUSE_MIN_S: Final = 0.05
PAUSE_MAX_S: Final = 1.0


class Cluster:
    """A cluster as seen by one process. Any thread may call everything."""

    def __init__(self, options: ClientOptions) -> None:
        self.options = options
        self.transport = SyncTransport(
            TransportOptions(
                transport=options.transport, connect_timeout_s=min(3.0, options.timeout_s)
            )
        )
        self.routes = Routes(self.transport, options.namesrv)
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

    def route(self, topic: str) -> Route:
        """A route that is at most some seconds old; a topic that only the first send would make is not there."""

        def look() -> Route:
            route = self.look_up(topic)
            if route.auto_create:
                self.routes.invalidate(topic)
                raise TopicNotFoundError(f"there is no topic {topic!r}", metadata={"topic": topic})
            return route

        # A topic that was there a moment ago may be missing because its broker restarts: wait for it.
        route = self.retried(look, fatal=() if topic in self._seen else (NotFoundError,))
        self._seen.add(topic)
        return route

    def look_up(self, topic: str, timeout_s: float | None = None) -> Route:
        """The route as it is cached, or as the name server answers when asked once. Raises TopicNotFoundError; but NoRouteError,
        which may pass, while no broker is there at all: then a topic that is not known need not be missing.
        """
        try:
            return self.routes.get(topic, timeout_s or self.options.timeout_s)
        except TopicNotFoundError:
            self._need_a_broker(f"whether there is a topic {topic!r}")
            raise

    def _need_a_broker(self, what: str) -> None:
        if not self.routes.brokers(self.options.timeout_s):
            servers = self.options.namesrv
            raise NoRouteError(f"no broker is registered at {servers}: {what} cannot be known")

    def refresh(self) -> None:
        """The next look at a route asks the name server: for planning a micro-batch that shall see new queues."""
        for topic in self._seen:
            self.routes.invalidate(topic)

    def look_up_anew(self, topic: str) -> Route:
        """The route as the name server has it now. Raises as `look_up`."""
        self.routes.invalidate(topic)
        return self.look_up(topic)

    def topic_names(self) -> list[str]:
        """All topics that the name server knows. Raises NoRouteError while no broker is there."""
        return self.retried(self._look_for_names)

    def _look_for_names(self) -> list[str]:
        from protomq.v1 import route_service_pb2 as pb

        names: list[str] = []
        token = ""
        while True:
            request = pb.ListTopicNamesRequest(page_size=1000, page_token=token).SerializeToString()
            answer = pb.ListTopicNamesResponse.FromString(
                self.routes.ask(_methods.LIST_TOPIC_NAMES, request, self.options.timeout_s)
            )
            names.extend(answer.topics)
            token = answer.next_page_token
            if not token:
                break
        if not names:
            self._need_a_broker("which topics there are")
        return names

    def see(self, queues: Iterable[MessageQueue]) -> Seen:
        """The range of each queue, and the incarnation of its topic: one call for each topic and broker."""
        found: dict[MessageQueue, QueueRange] = {}
        incarnations: dict[Share, int] = {}
        for (topic, broker_name), members in by_broker(queues).items():
            request = encode_get_queue_range(topic, [queue.queue_id for queue in members])
            answer = self.call(topic, broker_name, _methods.GET_QUEUE_RANGE, request)
            by_id = decode_queue_ranges(answer)
            found |= {queue: by_id[queue.queue_id] for queue in members if queue.queue_id in by_id}
            if incarnation := decode_range_incarnation(answer):
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
            request = encode_search_offset(queue, when, incarnations.get(share_of(queue), 0))
            answer = self.call(queue.topic, queue.broker_name, _methods.SEARCH_OFFSET, request)
            found[queue] = decode_search_offset(answer)
        return found

    def commit(
        self,
        group: str,
        offsets: Mapping[MessageQueue, int],
        incarnations: Incarnations,
        timeout_s: float,
    ) -> None:
        """Stores where a group is. Raises TopicRecreatedError where the incarnation is another."""
        for (topic, broker_name), members in by_broker(offsets).items():
            request = encode_commit(
                group,
                {queue: offsets[queue] for queue in members},
                dict.fromkeys(members, incarnations.get((topic, broker_name), 0)),
            )
            self.call(topic, broker_name, _methods.COMMIT_OFFSETS, request, timeout_s=timeout_s)

    # -- calls -------------------------------------------------------------------------------------------------------------

    def call(
        self,
        topic: str,
        broker_name: str,
        method: MethodInfo,
        *request: bytes | memoryview,
        timeout_s: float | None = None,
    ) -> bytes:
        """Calls a broker of a topic; again, by the route as it is then, after errors that may pass. `request`: its pieces."""
        limit_s = timeout_s or self.options.timeout_s
        pieces = cast(tuple[bytes, ...], request)  # A memoryview is as good.

        def attempt() -> bytes:
            try:
                address = broker_of(self.look_up(topic, limit_s), broker_name)
                return self.transport.call(address, method, pieces, limit_s)
            except ProtomqError as error:
                if error.stale_route:
                    self.routes.invalidate(topic)
                raise

        return self.retried(attempt, limit_s)

    def retried(
        self,
        attempt: Callable[[], _T],
        timeout_s: float | None = None,
        fatal: tuple[type[ProtomqError], ...] = (),
    ) -> _T:
        """What `attempt` answers; tried again after retriable errors until the time is over. `fatal`: not after these."""
        deadline_s = time.monotonic() + (timeout_s or self.options.timeout_s)
        pause_s = PAUSE_MIN_S
        while True:
            try:
                return attempt()
            except ProtomqError as error:
                if not error.retriable or isinstance(error, fatal):
                    raise
                wait_s = max((error.retry_delay_ms or 0) / 1000, pause_s)
                if time.monotonic() + wait_s >= deadline_s:
                    raise
            time.sleep(wait_s)
            pause_s = min(pause_s * 2, PAUSE_MAX_S)

    def close(self) -> None:
        """Closes all connections."""
        self.transport.close()


@lru_cache(maxsize=32)
def cluster_of(options: ClientOptions) -> Cluster:
    """The cluster object of this process for these options."""
    return Cluster(options)


@cache
def spare_collections() -> None:
    """Makes the tasks after the first one cheaper in this worker process: what is loaded by then is no garbage.

    PySpark's worker collects garbage after every task. With pandas and pyarrow loaded that is 10 to 40 ms of looking at
    modules, as much as reading ten thousand messages. What is made from now on is collected as ever.
    """
    gc.collect()
    gc.freeze()
