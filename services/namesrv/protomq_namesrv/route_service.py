"""RouteService: the RPCs of a name server, on the route lanes; holds and watchers.

A route is answered from bytes that the snapshot keeps, so GetRoute parses a request of some 30 bytes and builds nothing. A hold is
a call kept open; the lane that owns its connection tells when that breaks. A watcher is an event on the gRPC loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from protomq.v1.route_service_pb2 import (
    ForgetBrokerRequest,
    ForgetBrokerResponse,
    GetClusterInfoRequest,
    GetClusterInfoResponse,
    GetRouteRequest,
    GetRouteResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    HoldRegistrationRequest,
    HoldRegistrationResponse,
    ListTopicNamesRequest,
    ListTopicNamesResponse,
    RegisterBrokerRequest,
    RegisterBrokerResponse,
    Route,
    UnregisterBrokerRequest,
    UnregisterBrokerResponse,
    WatchRouteRequest,
    WatchRouteResponse,
)
from protomq.wire.topics import rules_of
from protomq_runtime.call import Call, CallContext, CallLane
from protomq_runtime.clock import Clock
from protomq_runtime.dispatch import raw, streaming
from protomq_runtime.errors import Code, ServiceError, too_many, unparsable
from protomq_runtime.server import Server
from protomq_runtime.timers import Timer

from .config import LimitsConfig, LivenessConfig
from .request_checks import (
    check_broker_name,
    check_topic,
    page_size_of,
    page_token_of,
    to_key,
    to_registration,
    to_version,
)
from .route_snapshot import BrokerKey
from .route_table import RouteTable

logger = logging.getLogger(__name__)

LANE: Final = "route"
"""Name of the pool of lanes, as options.proto has it."""

M = TypeVar("M", bound=Message)


class RouteService:
    """The implementation behind both transports. Its methods may run on several route lanes at once."""

    def __init__(
        self, table: RouteTable, liveness: LivenessConfig, limits: LimitsConfig, clock: Clock
    ) -> None:
        self._table = table
        self._liveness = liveness
        self._topic_count_max = limits.topic_count_max
        self._clock = clock
        self._watchers = _Watchers(limits.watcher_count_max)
        self._holds: set[_Hold] = set()
        self._stopping = False
        table.on_change = self._watchers.wake
        table.on_doubt = self._answer_holds
        table.on_changed_topics.append(self._answer_newest_hold)

    def start(self, server: Server) -> None:
        """The server's lanes run: look at deadlines from now on."""
        lane = server.pools[LANE].lanes[0]
        lane.post(lambda: self._scan(lane))

    def stop(self) -> None:
        """The server refuses new calls: answer the holds and end the streams. Any thread."""
        self._stopping = True
        self._answer_holds()
        self._watchers.wake()

    def register_broker(
        self, request: RegisterBrokerRequest, context: CallContext
    ) -> RegisterBrokerResponse:
        registration = to_registration(request, self._topic_count_max)
        known = registration.key in self._table.snapshot.registrations
        self._table.register(
            registration, self._clock.monotonic_ms(), is_returning=request.returning, time_ms=self._clock.now_ms()
        )
        if not known:
            broker = registration.broker
            logger.info(
                "broker %s (id %d, cluster %s) registered with %d topics from %s",
                broker.broker_name, broker.broker_id, broker.cluster, len(registration.topics), context.peer,
            )  # fmt: skip
        return RegisterBrokerResponse(expiry_ms=self._liveness.expiry_ms, tells_routes=True)

    def unregister_broker(
        self, request: UnregisterBrokerRequest, context: CallContext
    ) -> UnregisterBrokerResponse:
        key = to_key(request.broker_name, request.broker_id)
        if self._table.unregister(
            key,
            request.incarnation,
            self._clock.monotonic_ms(),
            store_id=request.store_id,
            time_ms=self._clock.now_ms(),
        ):
            logger.info("broker %s (id %d) unregistered", key.broker_name, key.broker_id)
        return UnregisterBrokerResponse()

    def heartbeat(self, request: HeartbeatRequest, context: CallContext) -> HeartbeatResponse:
        key = to_key(request.broker_name, request.broker_id)
        version = to_version(request.data_version)
        register_again = self._table.heartbeat(
            key,
            request.incarnation,
            version,
            self._clock.monotonic_ms(),
            store_id=request.store_id,
        )
        return HeartbeatResponse(register_again=register_again)

    @raw
    def get_route(self, call: Call) -> None:
        try:
            topic = _parse(GetRouteRequest, call.payload).topic
            encoded = self._table.snapshot.encoded_route(topic)
            if encoded is None:
                encoded = self._route_of_unknown(topic)
        except ServiceError as error:
            call.fail(error)
            return
        call.answer(encoded)

    @streaming
    async def watch_route(
        self, request: WatchRouteRequest, context: CallContext
    ) -> AsyncIterator[WatchRouteResponse]:
        check_topic(request.topic)
        none_yet = WatchRouteResponse(route=Route(topic=request.topic)).SerializeToString()
        told: bytes | None = None
        with self._watchers.watcher() as changed:
            while not self._stopping:
                changed.clear()  # Before the look, so that no change falls between the two.
                # A WatchRouteResponse has the bytes of a GetRouteResponse: a route in field 1.
                encoded = self._table.snapshot.encoded_route(request.topic) or none_yet
                if encoded != told:
                    yield WatchRouteResponse.FromString(encoded)
                    told = encoded
                await changed.wait()

    @raw
    def hold_registration(self, call: Call) -> None:
        try:
            request = _parse(HoldRegistrationRequest, call.payload)
            key = to_key(request.broker_name, request.broker_id)
            hold_id = self._table.open_hold(
                key, request.incarnation, self._clock.monotonic_ms(), store_id=request.store_id
            )
        except ServiceError as error:
            call.fail(error)
            return
        hold = _Hold(self, call, key, hold_id)
        self._holds.add(hold)
        call.hold(hold.break_off)
        hold_ms = call.hold_time_ms(self._liveness.hold_ms)
        hold.timer = call.lane.call_later(hold_ms, hold.answer)
        if self._table.has_changed_topics(key):
            call.lane.post(hold.answer)

    def list_topic_names(
        self, request: ListTopicNamesRequest, context: CallContext
    ) -> ListTopicNamesResponse:
        page, next_token = self._table.snapshot.topic_page(
            page_token_of(request.page_token),
            page_size_of(request.page_size),
            group_topics=request.group_topics,
        )
        return ListTopicNamesResponse(topics=page, next_page_token=next_token)

    def get_cluster_info(
        self, request: GetClusterInfoRequest, context: CallContext
    ) -> GetClusterInfoResponse:
        if request.topic:
            check_topic(request.topic)
        answer = self._table.snapshot.cluster_info(request.topic)
        answer.refused_brokers.extend(self._table.refusals.all(self._clock.monotonic_ms()))
        return answer

    def forget_broker(
        self, request: ForgetBrokerRequest, context: CallContext
    ) -> ForgetBrokerResponse:
        check_broker_name(request.broker_name)
        self._table.forget(request.broker_name)
        logger.info("broker %s forgotten, as %s asked", request.broker_name, context.peer)
        return ForgetBrokerResponse()

    def answer_to_hold(self, hold: _Hold) -> bytes:
        """What ends a hold: the topics of which the broker is to hear, if it has opened no other hold since."""
        topics = self._table.take_changed_topics(hold.key, hold.hold_id)
        return HoldRegistrationResponse(changed_topics=topics).SerializeToString()

    def end_hold(self, hold: _Hold, *, broken: bool) -> None:
        """A hold was answered or lost its caller; on its lane's thread."""
        self._holds.discard(hold)
        must_return = self._table.end_hold(
            hold.key, hold.hold_id, self._clock.monotonic_ms(), broken=broken
        )
        if broken and must_return:
            logger.info(
                "the connection of broker %s (id %d) broke; it has %d ms to come back",
                hold.key.broker_name, hold.key.broker_id, self._liveness.broken_grace_ms,
            )  # fmt: skip

    def _answer_holds(self, key: BrokerKey | None = None) -> None:
        """Answers the holds of a broker, or all: who has lost its name hears of it when it holds again, and takes no more sends."""
        for hold in tuple(self._holds):
            if key in (None, hold.key):
                hold.call.lane.post(hold.answer)

    def _answer_newest_hold(self, key: BrokerKey) -> None:
        """Answers the hold that a broker opened last: there are changed topics. Earlier ones would say nothing."""
        for hold in tuple(self._holds):
            if key == hold.key and self._table.is_newest_hold(key, hold.hold_id):
                hold.call.lane.post(hold.answer)

    def _route_of_unknown(self, topic: str) -> bytes:
        check_topic(topic)
        snapshot = self._table.snapshot
        creatable = rules_of(topic).create
        route = snapshot.auto_create_route(topic) if creatable else None
        if route is None:
            gone = ", ".join(snapshot.names_away(topic))
            remedy = (
                "create it, or let a broker create topics on the first send"
                if creatable
                else "it is of the system's own, which brokers make when they need them"
            )
            text = f"no broker has the topic {topic}; " + (f"not registered any more, but had it: {gone}" if gone else remedy)
            if not gone and not snapshot.registrations:
                # To make the topic would be refused, too.
                text = f"no broker is registered, so none has the topic {topic}; start one"
            raise ServiceError(
                Code.NOT_FOUND,
                "TOPIC_NOT_FOUND",
                text,
                metadata={"topic": topic, "missing_brokers": gone, "registered_brokers": str(len(snapshot.registrations))},
            )
        return GetRouteResponse(route=route).SerializeToString()

    def _scan(self, lane: CallLane) -> None:
        if self._stopping:
            return
        for removal in self._table.remove_silent(
            self._clock.monotonic_ms(), time_ms=self._clock.now_ms()
        ):
            logger.warning(
                "broker %s (id %d) removed: %s",
                removal.key.broker_name,
                removal.key.broker_id,
                removal.cause.value,
            )
        lane.call_later(self._liveness.scan_interval_ms, lambda: self._scan(lane))


class _Hold:
    """A HoldRegistration that waits. Only on the thread of the lane that owns the call."""

    __slots__ = ("_ended", "_service", "call", "hold_id", "key", "timer")

    def __init__(self, service: RouteService, call: Call, key: BrokerKey, hold_id: int) -> None:
        self._service = service
        self.call = call
        self.key = key
        self.hold_id = hold_id
        self.timer: Timer | None = None
        self._ended = False

    def answer(self) -> None:
        """Time is up, or there is news: the broker shall call again."""
        if not self._ended:
            self._end(broken=False)
            self.call.answer(self._service.answer_to_hold(self))

    def break_off(self) -> None:
        """The connection or the RPC ended without an answer."""
        if not self._ended:
            self._end(broken=True)

    def _end(self, *, broken: bool) -> None:
        self._ended = True
        if self.timer is not None:
            self.timer.cancel()
        self._service.end_hold(self, broken=broken)


class _Watchers:
    """The open WatchRoute streams. All of it runs on the gRPC loop, but for `wake`, which any thread may call."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._events: set[asyncio.Event] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextmanager
    def watcher(self) -> Iterator[asyncio.Event]:
        """An event for one stream, among those that a change sets."""
        if len(self._events) >= self._count_max:
            raise too_many(
                "watched routes",
                self._count_max,
                f"{self._count_max} routes are watched, the most that this name server allows; poll GetRoute instead",
            )
        self._loop = asyncio.get_running_loop()
        event = asyncio.Event()
        self._events.add(event)
        try:
            yield event
        finally:
            self._events.discard(event)

    def wake(self) -> None:
        loop = self._loop
        if loop is not None and self._events:
            loop.call_soon_threadsafe(self._set_all)

    def _set_all(self) -> None:
        for event in self._events:
            event.set()


def _parse(message_class: type[M], payload: bytes | bytearray) -> M:
    try:
        return message_class.FromString(bytes(payload))
    except DecodeError:
        raise unparsable(message_class.__name__) from None
