"""Which broker has which queue: name servers, the cache of routes, and its sync flavour.

Rules:
- A route is trusted for 30 s, then looked up again behind the caller's back; the old one is used meanwhile. A route of a topic
  that does not exist yet (auto_create) is trusted for 2 s only.
- After a routing error (`invalidate`) the next caller looks it up and waits, at most every 0.2 s per topic.
- While no name server answers, the last known route stays in use.
- Name servers are independent of each other: one is kept while it answers, the others are asked when it does not, or when it
  does not know the topic (it may have been restarted a moment ago).

`_async_routes.AsyncRoutes` is the asyncio flavour over the same `NameServerList` and `RouteCache`.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from . import _methods
from ._environment import namesrv_addresses
from ._late_imports import fork_waits
from ._outages import Outages
from ._remoting_hello import split_address
from ._types import BrokerAddress, MessageQueue, MethodInfo, Permission, Route
from .errors import (
    ConfigurationError,
    NoRouteError,
    NotFoundError,
    ProtocolError,
    ProtomqError,
    UnknownMethodError,
    WrongTypeError,
)

if TYPE_CHECKING:
    from ._transport import SyncTransport
    from .v1 import route_service_pb2

logger = logging.getLogger("protomq")

NAMESRV_ADDR_DEFAULT: Final = "127.0.0.1:9876;127.0.0.1:10911"

ROUTE_FRESH_S: Final = 30.0
"""RocketMQ's pollNameServerInterval."""
AUTO_CREATE_FRESH_S: Final = 2.0
RETRY_AFTER_FAILURE_S: Final = 2.0
INVALIDATE_INTERVAL_S: Final = 0.2
MISSING_KEPT_S: Final = 10.0
"""A known topic that all name servers suddenly do not know: they, not the topic, may be new."""
URL_REREAD_S: Final = 120.0
TIMEOUT_S: Final = 3.0
NAME_SERVERS: Final = "the name server"
"""In the log."""
_TRY_TIMEOUT_MIN_S: Final = 0.3
_URL_ANSWER_SIZE_MAX: Final = 64 << 10


class NameServerList:
    """The addresses of the name servers, wherever they come from. Any thread; no I/O but `read_url`."""

    def __init__(self, namesrv: str | Sequence[str] | None = None) -> None:
        if namesrv is None:
            namesrv = namesrv_addresses(os.environ) or NAMESRV_ADDR_DEFAULT
        self.url = ""
        self.trouble = ""
        """Why the URL could not be read last; empty: it could, or there is none."""
        self._servers: tuple[BrokerAddress, ...] = ()
        self._read_at_s = float("-inf")
        self._preferred = 0
        if isinstance(namesrv, str) and namesrv.strip().lower().startswith(
            ("http://", "https://")
        ):
            self.url = namesrv.strip()
        else:
            self._replace(parse_addresses(namesrv))

    def needs_reading(self, now_s: float) -> bool:
        """Whether the URL is to be read (again); never for fixed addresses."""
        return bool(self.url) and now_s - self._read_at_s >= URL_REREAD_S

    def read_url(self, timeout_s: float, now_s: float) -> None:
        """Reads the URL; a failure keeps what was known. Blocks."""
        with fork_waits:
            import http.client
            import urllib.request

        # The next attempt after a failure comes soon, but not with every call.
        self._read_at_s = now_s - URL_REREAD_S + RETRY_AFTER_FAILURE_S
        try:
            with urllib.request.urlopen(self.url, timeout=timeout_s) as answer:
                text = answer.read(_URL_ANSWER_SIZE_MAX).decode()
            addresses = parse_addresses(text)
        except (OSError, ValueError, http.client.HTTPException) as error:
            why = getattr(error, "reason", None) or error
            trouble = f"the list of name servers cannot be read from {self.url}: {why}"
            if trouble != self.trouble:
                logger.warning("%s", trouble)
            self.trouble = trouble
            return
        self.trouble = ""
        self._read_at_s = now_s
        if set(addresses) != {server.grpc_address for server in self._servers}:
            self._replace(addresses)

    def in_order(self) -> list[BrokerAddress]:
        """The servers to try, the one that answered last time first."""
        servers = self._servers
        first = self._preferred % len(servers) if servers else 0
        return [*servers[first:], *servers[:first]]

    def prefer(self, server: BrokerAddress) -> None:
        """This one answered."""
        if server in self._servers:
            self._preferred = self._servers.index(server)

    def _replace(self, addresses: Sequence[str]) -> None:
        # The port may be gRPC's or the remoting port: the transport finds out.
        self._servers = tuple(BrokerAddress("", address, address) for address in addresses)
        self._preferred = random.randrange(
            len(self._servers)
        )  # Clients spread over the name servers.


def parse_addresses(text: str | Sequence[str]) -> list[str]:
    """host:port addresses, separated by semicolons, commas or white space, or a sequence of them."""
    if isinstance(text, str):
        parts = text.replace(";", " ").replace(",", " ").split()
    elif isinstance(text, list | tuple):
        parts = [part.strip() if isinstance(part, str) else part for part in text]
    else:
        raise WrongTypeError(f"namesrv is a str or a list of str, host:port each, not {text!r}")
    for part in parts:
        split_address(part)
    if not parts:
        raise ConfigurationError("no name server address given")
    return list(dict.fromkeys(parts))


@dataclass(slots=True)
class _Entry:
    route: Route
    fresh_until_s: float
    fetched_at_s: float
    invalid: bool = False
    refreshing: bool = False
    missing_since_s: float | None = None


class RouteCache:
    """What is known about topics; time is handed in, no I/O. The caller holds a lock or runs on one loop."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def fresh(self, topic: str, now_s: float) -> Route | None:
        """A route that needs no look-up."""
        entry = self._entries.get(topic)
        if entry is None or now_s >= entry.fresh_until_s:
            return None
        return entry.route

    def known(self, topic: str, now_s: float) -> Route | None:
        """A route that may be used while it is looked up again."""
        entry = self._entries.get(topic)
        if entry is None or (entry.invalid and now_s - entry.fetched_at_s >= INVALIDATE_INTERVAL_S):
            return None
        return entry.route

    def last_known(self, topic: str) -> Route | None:
        """Whatever was known last: for the time while no name server answers."""
        entry = self._entries.get(topic)
        return entry.route if entry is not None else None

    def begin_refresh(self, topic: str) -> bool:
        """True for the one caller that is to look the topic up in the background."""
        entry = self._entries.get(topic)
        if entry is None or entry.refreshing:
            return False
        entry.refreshing = True
        return True

    def store(self, route: Route, now_s: float) -> Route:
        """Takes an answer. The old object stays if nothing changed, so that others may compare by identity."""
        old = self._entries.get(route.topic)
        if old is not None and old.route == route:
            route = old.route
        fresh_s = AUTO_CREATE_FRESH_S if route.auto_create else ROUTE_FRESH_S
        self._entries[route.topic] = _Entry(route, now_s + fresh_s, now_s)
        return route

    def failed(self, topic: str, error: ProtomqError, now_s: float) -> Route | None:
        """A look-up failed: the route to go on with, None if there is none."""
        entry = self._entries.get(topic)
        if entry is None:
            return None
        entry.refreshing = False
        if isinstance(error, NotFoundError):
            entry.missing_since_s = (
                now_s if entry.missing_since_s is None else entry.missing_since_s
            )
            if entry.invalid or now_s - entry.missing_since_s >= MISSING_KEPT_S:
                del self._entries[topic]
                return None
        entry.invalid = False
        entry.fresh_until_s = now_s + RETRY_AFTER_FAILURE_S
        return entry.route

    def invalidate(self, topic: str) -> None:
        """A routing error: the next use looks it up first."""
        entry = self._entries.get(topic)
        if entry is not None:
            entry.invalid = True
            entry.fresh_until_s = 0.0

    def release_refreshes(self) -> None:
        """After a fork: the threads that were refreshing are gone."""
        for entry in self._entries.values():
            entry.refreshing = False


def decode_route(data: bytes) -> Route:
    """The Route in an encoded GetRouteResponse; raises ProtocolError."""
    from google.protobuf.message import DecodeError

    from .v1 import route_service_pb2

    try:
        answer = route_service_pb2.GetRouteResponse.FromString(data)
    except DecodeError as error:
        raise ProtocolError(f"the name server's answer does not parse: {error}") from error
    return _route_of(answer.route)


def encode_get_route(topic: str) -> bytes:
    """An encoded GetRouteRequest."""
    from .v1 import route_service_pb2

    return route_service_pb2.GetRouteRequest(topic=topic).SerializeToString()


def _route_of(message: route_service_pb2.Route) -> Route:
    brokers: dict[str, tuple[int, BrokerAddress, Permission]] = {}
    for broker in message.brokers:
        best = brokers.get(broker.broker_name)
        if best is None or broker.broker_id < best[0]:
            brokers[broker.broker_name] = (
                broker.broker_id,
                broker_address(broker),
                Permission(broker.permission),
            )
    write_queues: list[MessageQueue] = []
    read_queues: list[MessageQueue] = []
    writable_brokers: list[str] = []
    for share in sorted(message.queues, key=lambda share: share.broker_name):
        name = share.broker_name
        if name not in brokers:
            continue
        broker_id, _, broker_permission = brokers[name]
        permission = Permission(share.permission)
        if permission.readable and broker_permission.readable:
            read_queues.extend(
                MessageQueue(message.topic, name, i) for i in range(share.read_queues)
            )
        if (
            permission.writable
            and broker_permission.writable
            and broker_id == 0
            and share.write_queues
        ):
            write_queues.extend(
                MessageQueue(message.topic, name, i) for i in range(share.write_queues)
            )
            writable_brokers.append(name)
    return Route(
        topic=message.topic,
        write_queues=tuple(write_queues),
        read_queues=tuple(read_queues),
        brokers={name: address for name, (_, address, _) in brokers.items()},
        writable_brokers=tuple(writable_brokers),
        auto_create=message.auto_create,
    )


def broker_address(broker: route_service_pb2.Broker) -> BrokerAddress:
    """The addresses that a broker advertises."""
    return BrokerAddress(broker.broker_name, broker.grpc_address, broker.remoting_address)


def tries(
    servers: Sequence[BrokerAddress], deadline_s: float
) -> Iterator[tuple[BrokerAddress, float]]:
    """(server, time-out): what is left of the time is shared among those that are left, so that a dead one leaves some."""
    for i, server in enumerate(servers):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 and i:
            return
        yield server, max(left_s / (len(servers) - i), _TRY_TIMEOUT_MIN_S)


def no_name_server(server: BrokerAddress, method: MethodInfo) -> ConfigurationError:
    """For a server that does not know a method of name servers."""
    name = method.path.rpartition("/")[2]
    return ConfigurationError(
        f"{server.grpc_address} is no name server, most likely a broker (or a name server too old for {name}): "
        "give the address of `protomq namesrv`, port 9876 or 9877, or of `protomq standalone`",
        metadata={"namesrv": server.grpc_address},
    )


def outcome_of_failures(errors: Sequence[ProtomqError], names: NameServerList) -> ProtomqError:
    """One error for all name servers: "not found" counts more than silence, for it is an answer."""
    for error in errors:
        if isinstance(error, NotFoundError):
            return error
    where = names.url or ", ".join(server.grpc_address for server in names.in_order())
    if not errors and names.trouble:
        return NoRouteError(
            f"{names.trouble}; a URL names a list of addresses, a name server itself is written host:port",
            metadata={"namesrv": where},
        )
    why = "; ".join(str(error) for error in errors) or "the list of addresses is empty"
    return NoRouteError(
        f"no name server answers ({where}): {why}", metadata={"namesrv": where}
    )


class Routes:
    """Routes for threads. Any thread may call everything."""

    def __init__(
        self, transport: SyncTransport, namesrv: str | Sequence[str] | None = None
    ) -> None:
        self.name_servers = NameServerList(namesrv)
        self._transport = transport
        self._cache = RouteCache()
        self._outages = Outages()
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def get(self, topic: str, timeout_s: float = TIMEOUT_S) -> Route:
        """The route of a topic.

        Raises TopicNotFoundError (it does not exist and is not made on the first send) or NoRouteError.
        """
        now_s = time.monotonic()
        route = self._cache.fresh(topic, now_s)  # A read of a dict: needs no lock.
        if route is not None:
            return route
        with self._own_lock():
            route = self._cache.known(topic, now_s)
        return self._refreshing(route) if route is not None else self._look_up(topic, timeout_s)

    def current(self, topic: str, timeout_s: float = TIMEOUT_S) -> Route:
        """As `get`, but waits only where nothing is known: an outdated route is looked up behind the caller's back."""
        route = self._cache.fresh(topic, time.monotonic())
        if route is not None:
            return route
        route = self._cache.last_known(topic)
        return self._refreshing(route) if route is not None else self.get(topic, timeout_s)

    def last_known(self, topic: str) -> Route | None:
        """What was known last, without any look-up."""
        return self._cache.last_known(topic)

    def invalidate(self, topic: str) -> None:
        """After an error with `stale_route`: the next `get` looks the topic up before it answers."""
        with self._own_lock():
            self._cache.invalidate(topic)

    def brokers(self, timeout_s: float = TIMEOUT_S) -> tuple[BrokerAddress, ...]:
        """All brokers that the name server knows, masters only."""
        from .v1 import route_service_pb2

        answer = self.ask(_methods.GET_CLUSTER_INFO, b"", timeout_s)
        info = route_service_pb2.GetClusterInfoResponse.FromString(answer)
        return tuple(broker_address(broker) for broker in info.brokers if broker.broker_id == 0)

    def ask(self, method: MethodInfo, request: bytes, timeout_s: float = TIMEOUT_S) -> bytes:
        """Calls a method of RouteService at the first name server that answers it.

        Raises NotFoundError if none knows what was named, NoRouteError if none answers, ConfigurationError for what is none.
        """
        deadline_s = time.monotonic() + timeout_s
        names = self.name_servers
        if names.needs_reading(time.monotonic()):
            names.read_url(timeout_s / 2, time.monotonic())
        errors: list[ProtomqError] = []
        for server, try_timeout_s in tries(names.in_order(), deadline_s):
            try:
                answer = self._transport.call(server, method, (request,), try_timeout_s)
            except UnknownMethodError as error:
                raise no_name_server(server, method) from error
            except ProtomqError as error:
                if not error.retriable and not isinstance(error, NotFoundError):
                    raise
                errors.append(error)
                continue
            names.prefer(server)
            return answer
        raise outcome_of_failures(errors, names)

    def ask_all(
        self, method: MethodInfo, request: bytes, timeout_s: float = TIMEOUT_S
    ) -> list[bytes | ProtomqError]:
        """Calls a method of RouteService at every name server: what each of them says, at least one. Raises NoRouteError."""
        deadline_s = time.monotonic() + timeout_s
        names = self.name_servers
        if names.needs_reading(time.monotonic()):
            names.read_url(timeout_s / 2, time.monotonic())
        answers: list[bytes | ProtomqError] = []
        for server, try_timeout_s in tries(names.in_order(), deadline_s):
            try:
                answers.append(self._transport.call(server, method, (request,), try_timeout_s))
            except UnknownMethodError:
                answers.append(no_name_server(server, method))
            except ProtomqError as error:
                answers.append(error)
        if not answers:
            raise outcome_of_failures((), names)
        return answers

    def _own_lock(self) -> threading.Lock:
        """The lock; in a forked child a new one, for the old one may be held by a thread that is not there."""
        if self._pid != os.getpid():
            self._pid, self._lock = os.getpid(), threading.Lock()
            self._cache.release_refreshes()
        return self._lock

    def _refreshing(self, route: Route) -> Route:
        """The route as it is; one thread looks it up meanwhile."""
        with self._own_lock():
            begun = self._cache.begin_refresh(route.topic)
        if begun:
            refresh = threading.Thread(
                target=self._refresh, args=(route.topic,), name="protomq-route", daemon=True
            )
            try:
                refresh.start()
            except RuntimeError:
                pass  # The interpreter ends: what is still to be sent goes by the old route.
        return route

    def _look_up(self, topic: str, timeout_s: float) -> Route:
        try:
            route = decode_route(self.ask(_methods.GET_ROUTE, encode_get_route(topic), timeout_s))
        except ProtomqError as error:
            with self._own_lock():
                known = self._cache.failed(topic, error, time.monotonic())
            if known is None:
                raise
            self._outages.failed(NAME_SERVERS, topic, error)
            return known
        self._outages.answered(NAME_SERVERS, topic)
        with self._own_lock():
            return self._cache.store(route, time.monotonic())

    def _refresh(self, topic: str) -> None:
        try:
            self._look_up(topic, TIMEOUT_S)
        except ProtomqError as error:
            logger.debug("route of %s: %s", topic, error)
