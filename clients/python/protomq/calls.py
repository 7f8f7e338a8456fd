"""Calls to the brokers of a cluster, for those who build connectors and tools on protomq: what clients do by themselves, one at a time.

    from protomq.calls import Calls

    with Calls(namesrv="127.0.0.1:9876") as calls:
        for queue in calls.route("orders").read_queues:
            found = calls.queue_ranges("orders", queue.broker_name).ranges[queue.queue_id]
            answer = calls.pull(queue, found.min_offset)
            for message in decode_messages(answer, queue): ...          from protomq.records

A call goes by the route of its topic. After an error that may pass it is made again, by the route as it is then, until its time is
over. `Calls(retries=ONCE)` makes it once only. Sending twice is safe where the records carry the numbers of a producer: brokers
recognise them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple, TypeVar, cast

from . import _methods
from ._admin_values import MissingBroker, missing_broker_of
from ._call_steps import call_broker, retried
from ._checks import check_seconds
from ._connection_options import ConnectionOptions, connection_of
from ._consumer_calls import CommittedOffsets, ConsumerCalls, FoundOffset, Limits, QueueRanges
from ._decoding import decoded
from ._filters import NO_FILTER, MessageFilter, checked_filter
from ._late_imports import fork_waits
from ._name_servers import NameServerList
from ._offset_calls import by_broker, checked_tags
from ._outgoing import SendStatus
from ._pull_answer import PullAnswer, decode_pull_answer
from ._retry import ONCE, UNTIL_THE_END, Retries, is_away
from ._routes import Routes
from ._steps import Block, Driver, Steps
from ._transport import SyncTransport
from ._types import MessageQueue, MethodInfo, PullStatus, QueueRange, Route
from .errors import NoRouteError, ProtocolError, ProtomqError, TopicNotFoundError

__all__ = [
    "ALL_MESSAGES",
    "ONCE",
    "UNTIL_THE_END",
    "Calls",
    "CommittedOffsets",
    "FoundOffset",
    "MissingBroker",
    "PullAnswer",
    "PullStatus",
    "QueueRange",
    "QueueRanges",
    "Retries",
    "Route",
    "Selection",
    "StoredRecords",
    "by_broker",
]

_T = TypeVar("_T")

TIMEOUT_S: Final = 30.0


class Selection(NamedTuple):
    """Which messages a broker is to give. It compares hashes of tags: compare `tags` with those of the messages."""

    tags: tuple[str, ...] = ()
    filter: MessageFilter = NO_FILTER

    @classmethod
    def of(
        cls,
        tags: Iterable[str] = (),
        *,
        sql: str | None = None,
        cel: str | None = None,
        module: str | None = None,
    ) -> Selection:
        """As PullConsumer.subscribe takes it. Raises ConfigurationError."""
        checked = checked_tags(tags)
        return cls(checked, checked_filter(checked, sql, cel, module))


ALL_MESSAGES: Final = Selection()


class StoredRecords(NamedTuple):
    """Where a request was stored: the offset of its first record. `repeated`: it was there already. `status`: what is promised."""

    queue_id: int
    queue_offset: int
    record_count: int
    repeated: bool
    status: SendStatus


class Calls:
    """Calls to brokers by topic, from threads. Any thread may call everything; sockets are opened lazily, and again after a fork."""

    def __init__(
        self,
        *,
        namesrv: str | Sequence[str] | None = None,
        transport: Literal["auto", "remoting", "grpc"] = "auto",
        client_id: str = "",
        connection: ConnectionOptions | None = None,
        timeout_s: float = TIMEOUT_S,
        retries: Retries = UNTIL_THE_END,
    ) -> None:
        """`namesrv` to `connection`: as in Producer. `timeout_s`: of each call, all its tries together, unless it has its own."""
        self.timeout_s = check_seconds("timeout_s", timeout_s)
        self._retries = retries
        connection = connection_of(
            connection, namesrv=namesrv, transport=transport, client_id=client_id
        )
        self._use(SyncTransport(connection), connection.namesrv)

    def _use(self, transport: SyncTransport, namesrv: str | Sequence[str] | None) -> None:
        self._transport = transport
        self._routes = Routes(transport, namesrv)
        transport.is_replaced = self._routes.is_replaced
        self._driver = Driver(transport, _SureRoutes(self))
        self._steps = ConsumerCalls()

    @property
    def name_servers(self) -> NameServerList:
        """Their addresses."""
        return self._routes.name_servers

    # -- routes ----------------------------------------------------------------------------------------------------------

    def route(self, topic: str, *, timeout_s: float | None = None) -> Route:
        """The route as it is cached (30 s at most), or as the name server answers when asked once.

        Raises TopicNotFoundError; but NoRouteError, which may pass, while all brokers are away that had the topic. So it does while no
        broker is there: then a topic that is not known need not be missing.
        """
        try:
            return self._routes.get(topic, timeout_s or self.timeout_s)
        except (TopicNotFoundError, NoRouteError) as error:
            if isinstance(error, TopicNotFoundError) or is_away(error):
                self._need_a_broker(f"whether there is a topic {topic!r}")
            raise

    def find_route(self, topic: str) -> Route | None:
        """The same, but None where the name server that answers does not know the topic, whether or not a broker is there.

        Raises NoRouteError if no name server answers.
        """
        try:
            return self._routes.get(topic, self.timeout_s)
        except TopicNotFoundError:
            return None
        except NoRouteError as error:
            if not is_away(error):
                raise
            return None

    def forget_route(self, topic: str) -> None:
        """The next look at the route asks the name server."""
        self._routes.invalidate(topic, is_denied=True)

    def topic_names(self) -> list[str]:
        """All topics that the name server knows, when asked once. Raises NoRouteError while no broker is there."""
        names = self._routes.topic_names(self.timeout_s)
        if not names:
            self._need_a_broker("which topics there are")
        return names

    def missing_brokers(self, topic: str = "") -> list[MissingBroker]:
        """Brokers that had the topic ("": any) and are away, when the name server is asked once: routes lack their queues.

        One of which another member is registered is not away. The name server keeps the list in memory, until a broker is back or forgotten
        (`protomq cluster forget`).
        """
        with fork_waits:
            from .v1 import route_service_pb2 as pb

        request = pb.GetClusterInfoRequest(topic=topic).SerializeToString()
        data = self._routes.ask(_methods.GET_CLUSTER_INFO, request, self.timeout_s)
        answer = decoded(data, pb.GetClusterInfoResponse.FromString)
        there = {broker.broker_name for broker in answer.brokers}
        return [
            missing_broker_of(gone)
            for gone in answer.missing_brokers
            if gone.broker.broker_name not in there
        ]

    def _need_a_broker(self, what: str) -> None:
        if not self._routes.brokers(self.timeout_s):
            servers = ", ".join(server.grpc_address for server in self.name_servers.in_order())
            raise NoRouteError(f"no broker is registered at {servers}: {what} cannot be known")

    # -- offsets ---------------------------------------------------------------------------------------------------------

    def queue_ranges(
        self,
        topic: str,
        broker_name: str,
        queue_ids: Iterable[int] = (),
        *,
        topic_incarnation: int = 0,
    ) -> QueueRanges:
        """What these queues hold, or all that the broker has of the topic. Another incarnation is refused (TopicRecreatedError); 0: any."""
        return self._driver.run(
            self._steps.queue_ranges(
                self._limits(), topic, broker_name, queue_ids, topic_incarnation
            )
        )

    def offset_for_time(
        self, queue: MessageQueue, when: datetime, *, topic_incarnation: int = 0
    ) -> FoundOffset:
        """The first offset stored at the time or later; the end offset if there is none."""
        return self._driver.run(
            self._steps.offset_for_time(self._limits(), queue, when, topic_incarnation)
        )

    def committed(
        self, group: str, topic: str, broker_name: str, queue_ids: Iterable[int]
    ) -> CommittedOffsets:
        """Where a group is in these queues."""
        return self._driver.run(
            self._steps.committed(self._limits(), group, topic, broker_name, queue_ids)
        )

    def commit(
        self,
        group: str,
        offsets: Mapping[MessageQueue, int],
        *,
        incarnations: Mapping[MessageQueue, int] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Stores where a group is: one call for each topic and broker, each of which takes all or none. The first error ends it."""
        for (topic, broker_name), members in by_broker(offsets).items():
            part = {queue: offsets[queue] for queue in members}
            self._driver.run(
                self._steps.commit(
                    self._limits(timeout_s), group, topic, broker_name, part, incarnations or {}
                )
            )

    # -- messages --------------------------------------------------------------------------------------------------------

    def pull(
        self,
        queue: MessageQueue,
        queue_offset: int,
        *,
        record_count_max: int = 1024,
        size_max_bytes: int = 4 << 20,
        selection: Selection = ALL_MESSAGES,
        topic_incarnation: int = 0,
        timeout_s: float | None = None,
    ) -> PullAnswer:
        """The records from an offset on; the broker does not wait for any. Raises CorruptLogError and the like."""
        with fork_waits:
            from .v1 import pull_service_pb2 as pb

        request = pb.PullRequest(
            topic=queue.topic,
            queue_id=queue.queue_id,
            queue_offset=queue_offset,
            record_count_max=record_count_max,
            size_max_bytes=size_max_bytes,
            tags=selection.tags,
            filter_type=cast(Any, selection.filter.type_number),
            filter=selection.filter.expression,
            topic_incarnation=topic_incarnation,
        )
        payload = (request.SerializeToString(),)
        return decode_pull_answer(self._call(queue, _methods.PULL, payload, timeout_s))

    def send(
        self, queue: MessageQueue, *request: bytes | memoryview, timeout_s: float | None = None
    ) -> StoredRecords:
        """Sends an encoded SendRequest, given whole or in pieces. The same octets go to the same broker in every try."""
        with fork_waits:
            from .v1 import send_service_pb2 as pb

        payload = cast(tuple[bytes, ...], request)  # A memoryview is as good.
        answer = decoded(
            self._call(queue, _methods.SEND, payload, timeout_s), pb.SendResponse.FromString
        )
        try:
            status = SendStatus(answer.status)
        except ValueError as error:
            raise ProtocolError(f"the answer to a send does not parse: {error}") from error
        return StoredRecords(answer.queue_id, answer.queue_offset, answer.record_count, answer.repeated_send, status)

    # --------------------------------------------------------------------------------------------------------------------

    def retried(
        self,
        attempt: Callable[[], _T],
        *,
        timeout_s: float | None = None,
        fatal: tuple[type[ProtomqError], ...] = (),
    ) -> _T:
        """What a function answers that asks a server: called again as a call is. `fatal`: not after these errors, retriable or not."""
        deadline_s = time.monotonic() + (timeout_s or self.timeout_s)
        tries = self._retries.of_call(deadline_s, time.monotonic)

        def decide(error: ProtomqError) -> float | None:
            return None if isinstance(error, fatal) else tries.decide(error)

        def once() -> Steps[_T]:
            found: _T = yield Block(attempt)
            return found

        return self._driver.run(retried(once, decide))

    def close(self) -> None:
        """Closes all connections. May be called twice."""
        self._transport.close()

    def __enter__(self) -> Calls:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _limits(self, timeout_s: float | None = None) -> Limits:
        return Limits(timeout_s or self.timeout_s, self._retries)

    def _call(
        self,
        queue: MessageQueue,
        method: MethodInfo,
        payload: Sequence[bytes],
        timeout_s: float | None,
    ) -> bytes:
        limits = self._limits(timeout_s)
        return self._driver.run(
            call_broker(queue.topic, queue.broker_name, method, payload, *limits)
        )


class _SureRoutes:
    """The routes as `Calls.route` gives them."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def get(self, topic: str, timeout_s: float) -> Route:
        return self._calls.route(topic, timeout_s=timeout_s)

    current = get

    def invalidate(self, topic: str, *, may_be_old: bool = False, is_denied: bool = False) -> None:
        self._calls._routes.invalidate(topic, may_be_old=may_be_old, is_denied=is_denied)
