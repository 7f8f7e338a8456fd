"""Which broker has which queue: the cache of routes, and its flavour for threads.

Rules:
- A route is trusted for 30 s, then looked up again behind the caller's back; the old one is used meanwhile. A route of a topic
  that does not exist yet (auto_create) is trusted for 2 s only. A producer then waits for the look-up, and trusts none that it has not
  sent by: somebody may make the topic meanwhile, at other brokers.
- A consumer that hears of changes from brokers trusts the routes of its group's retries for 5 minutes (`looks_seldom`).
- No server tells other clients. A producer has an error where a broker is closed (drained), and none when it is opened again. So
  while only some brokers of a topic may be written, a producer trusts its route for 1 s. After 5 minutes of that it is 5 s.
- After a routing error (`invalidate`) the next caller looks it up and waits, at most every 0.2 s per topic.
- A topic that was there, and that no name server knows now, may be there: a name server that starts knows none before brokers register.
  So its route stays in use, and its brokers say whether they have it. If one denies it, the name server is believed. Else after 5 minutes.
- While no name server answers, the last known route stays in use. A caller whose route is in doubt waits for 0.5 s. One that lacks a broker
  in the next answer stays in use for 4 s, unless a call has failed. That name server may have just started.

`_async_routes.AsyncRoutes` is the flavour for coroutines: the same `RouteBook`, with tasks where threads are here.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from . import _methods
from ._decoding import decoded
from ._name_servers import NameServerList, ask_all, ask_one
from ._outages import NAME_SERVERS, Outages
from ._retry import away_error, is_away
from ._steps import Driver, Steps
from ._transport_options import SOON
from ._types import BrokerAddress, MessageQueue, MethodInfo, Permission, Route
from .errors import ClosedError, NotFoundError, ProtocolError, ProtomqError

if TYPE_CHECKING:
    from ._transport import SyncTransport
    from .v1 import route_service_pb2

logger = logging.getLogger("protomq")

ROUTE_FRESH_S: Final = 30.0
"""RocketMQ's pollNameServerInterval."""
SELDOM_FRESH_S: Final = 300.0
"""For a consumer, where brokers say when the route is another one."""
AUTO_CREATE_FRESH_S: Final = 2.0
CLOSED_FRESH_S: Final = 1.0
"""For a producer, while a broker of the topic is drained or has slaves only: it may be opened again at any time."""
CLOSED_LONG_S: Final = 300.0
"""From then on it is looked for less often: it may be closed for good."""
CLOSED_LONG_FRESH_S: Final = 5.0
RETRY_AFTER_FAILURE_S: Final = 2.0
INVALIDATE_INTERVAL_S: Final = 0.2
MISSING_KEPT_S: Final = 300.0
"""A known topic that all name servers suddenly do not know: they, not the topic, may be new. Its broker may take long to start."""
BROKER_KEPT_S: Final = 4.0
"""A broker that is suddenly missing, while no error says so: a name server that starts hears from all brokers within 3 s."""
LACKING_FRESH_S: Final = 0.5
"""Until such a route is looked up again."""
REPLACED_LOOK_S: Final = 1.0
"""Between two look-ups for a broker that is silent while calls wait for it."""
OTHERS_LOOK_S: Final = 2.4
"""It is left out where somebody else has looked this topic, or another one of the broker, up within that time."""
AWAY_MAX: Final = 10_000
"""Most topics whose brokers have left the name server, of which the route is remembered, the latest."""
TIMEOUT_S: Final = 3.0
KNOWN_WAIT_S: Final = 0.5
"""For which a look-up holds up a caller that has a route. A name server and a broker may be gone together; others take sends."""
PAGE_SIZE: Final = 1000
"""Entries of a list in one answer."""

@dataclass(slots=True)
class _Entry:
    route: Route
    fresh_until_s: float
    fetched_at_s: float
    same_since_s: float
    """Since when look-ups have found this route."""
    invalid: bool = False
    is_denied: bool = False
    """A broker has said that it does not have the topic."""
    refreshing: bool = False
    doubt_count: int = 0
    """How often it was invalidated. The answer to a look-up that began before the last time may be from before that."""
    missing_since_s: float | None = None
    lacking_since_s: float | None = None
    """Since when name servers have not known all of its brokers."""


class RouteCache:
    """What is known about topics; time is handed in, no I/O. The caller holds a lock or runs on one loop."""

    def __init__(self, *, sends: bool = False) -> None:
        """`sends`: a producer's."""
        self._entries: dict[str, _Entry] = {}
        self._away: dict[str, _Entry] = {}
        """What was known of topics whose brokers have left the name server. One that starts has never heard of them."""
        self._sends = sends

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
        # By now the topic may be at some brokers: others would make it, too.
        return None if entry.route.auto_create and self._sends else entry.route

    def last_known(self, topic: str) -> Route | None:
        """Whatever was known last: for the time while no name server answers."""
        entry = self._entries.get(topic)
        return entry.route if entry is not None else None

    def newest_with(self, broker_name: str) -> tuple[Route, float] | None:
        """The route with that broker that was looked up last, and when."""
        entries = [entry for entry in self._entries.values() if broker_name in entry.route.brokers]
        newest = max(entries, key=lambda entry: entry.fetched_at_s, default=None)
        return None if newest is None else (newest.route, newest.fetched_at_s)

    def begin_refresh(self, topic: str) -> bool:
        """True for the one caller that is to look the topic up in the background."""
        entry = self._entries.get(topic)
        if entry is None or entry.refreshing:
            return False
        entry.refreshing = True
        return True

    def end_refresh(self, topic: str) -> None:
        """Nobody looks the topic up in the background: the next caller may."""
        entry = self._entries.get(topic)
        if entry is not None:
            entry.refreshing = False

    def doubt_count(self, topic: str) -> int:
        """For `store`, when a look-up begins."""
        entry = self._entries.get(topic)
        return 0 if entry is None else entry.doubt_count

    def store(self, route: Route, now_s: float, *, is_told: bool = False, doubt_count: int | None = None) -> Route:
        """Takes an answer. The old object stays if nothing changed, so that others may compare by identity.

        `is_told`: brokers say when the route is another one, so it is trusted for longer. `doubt_count`: when the look-up began; if there
        are more by now, the route is to be looked up once more.
        """
        old = self._entries.get(route.topic)
        if old is not None and _keeps_brokers(old, route, now_s):
            old.fresh_until_s, old.refreshing, old.missing_since_s = now_s + LACKING_FRESH_S, False, None
            return old.route
        same_since_s = now_s
        if old is not None and old.route == route:
            route, same_since_s = old.route, old.same_since_s
        fresh_s = SELDOM_FRESH_S if is_told else ROUTE_FRESH_S
        if route.auto_create:
            fresh_s = AUTO_CREATE_FRESH_S
        if route.is_partly_closed and self._sends:
            is_long = now_s - same_since_s >= CLOSED_LONG_S
            fresh_s = min(fresh_s, CLOSED_LONG_FRESH_S if is_long else CLOSED_FRESH_S)
        doubts = self.doubt_count(route.topic)
        if doubt_count is not None and doubts != doubt_count:
            fresh_s = 0.0
        self._away.pop(route.topic, None)
        self._entries[route.topic] = _Entry(route, now_s + fresh_s, now_s, same_since_s, doubt_count=doubts)
        return route

    def failed(self, topic: str, error: Exception, now_s: float) -> Route | None:
        """A look-up failed: the route to go on with, None if there is none."""
        is_topic_away = is_away(error)
        entry = self._entries.get(topic) or (None if is_topic_away else self._away.pop(topic, None))
        if entry is None:
            return None
        self._entries[topic] = entry
        entry.refreshing = False
        if isinstance(error, NotFoundError):
            entry.missing_since_s = (
                now_s if entry.missing_since_s is None else entry.missing_since_s
            )
            # A topic that was to be made on the first send is not known to be anywhere.
            is_believed = entry.is_denied or (entry.invalid and (is_topic_away or entry.route.auto_create))
            if is_believed or now_s - entry.missing_since_s >= MISSING_KEPT_S:
                del self._entries[topic]
                if is_topic_away and not entry.is_denied and not entry.route.auto_create:
                    entry.missing_since_s = None
                    self._away[topic] = entry
                    if len(self._away) > AWAY_MAX:
                        del self._away[next(iter(self._away))]
                return None
        entry.invalid = False
        entry.fresh_until_s = now_s + RETRY_AFTER_FAILURE_S
        return entry.route

    def invalidate(self, topic: str, *, may_be_old: bool = False, is_denied: bool = False) -> None:
        """A routing error: the next use looks it up first. `may_be_old`: a doubt: it may be used while it is looked up.

        `is_denied`: a broker says that it has no such topic. If the name server says so, too, there is none.
        """
        if is_denied:
            self._away.pop(topic, None)
        entry = self._entries.get(topic)
        if entry is not None:
            entry.is_denied = entry.is_denied or is_denied
            entry.invalid = entry.invalid or not may_be_old
            entry.fresh_until_s = 0.0
            entry.doubt_count += 1

    def forget_unmade(self, topic: str) -> None:
        """The route was only looked at: if the topic does not exist yet, it is looked up again before anything is sent by it."""
        entry = self._entries.get(topic)
        if entry is not None and entry.route.auto_create:
            del self._entries[topic]

    def release_refreshes(self) -> None:
        """After a fork: the threads that were refreshing are gone."""
        for entry in self._entries.values():
            entry.refreshing = False


def _keeps_brokers(old: _Entry, route: Route, now_s: float) -> bool:
    """Whether brokers that a new answer lacks may still be there."""
    if old.invalid or old.route.brokers.keys() <= route.brokers.keys():
        return False
    if old.lacking_since_s is None:
        old.lacking_since_s = now_s
    return now_s - old.lacking_since_s < BROKER_KEPT_S


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
    slaves: dict[tuple[str, int], BrokerAddress] = {}
    replaceable: set[str] = set()
    elected: set[str] = set()
    for broker in message.brokers:
        if broker.broker_id or broker.epoch:
            replaceable.add(broker.broker_name)
        if broker.epoch and not broker.broker_id:
            elected.add(broker.broker_name)
        if broker.broker_id:
            slaves[broker.broker_name, broker.broker_id] = broker_address(broker)
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
    readable_count = writable_count = known_count = 0
    for share in sorted(message.queues, key=lambda share: share.broker_name):
        name = share.broker_name
        if name not in brokers:
            continue
        broker_id, _, broker_permission = brokers[name]
        permission = Permission(share.permission)
        known_count += 1
        readable_count += permission.readable and broker_permission.readable
        writable_count += permission.writable and broker_permission.writable
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
        leaderless_brokers=tuple(sorted(name for name, best in brokers.items() if best[0] != 0)),
        slaves=slaves,
        is_write_permitted=writable_count > 0 or not known_count,
        is_read_permitted=readable_count > 0 or not known_count,
        is_partly_closed=0 < writable_count < known_count,
        lone_brokers=frozenset(brokers.keys() - replaceable),
        elected_brokers=frozenset(elected),
    )


def broker_address(broker: route_service_pb2.Broker) -> BrokerAddress:
    """The addresses that a broker advertises."""
    return BrokerAddress(broker.broker_name, broker.grpc_address, broker.remoting_address)


class RouteBook:
    """What both flavours have: name servers, the cache, and the steps of looking up. Any thread."""

    def __init__(self, namesrv: str | Sequence[str] | None = None, *, sends: bool = False) -> None:
        """`sends`: a producer's."""
        self.name_servers = NameServerList(namesrv)
        self._cache = RouteCache(sends=sends)
        self._outages = Outages()
        self._looked_s: dict[str, float] = {}
        """When a route was last looked up for a silent broker, by its name."""
        self._lock = threading.RLock()
        """Reentrant: a signal's handler may close a client on the thread that has it."""
        self._pid = os.getpid()
        self.looks_seldom: Callable[[str], bool] = lambda topic: False
        """Whether brokers say when the route of a topic is another one. Any thread calls it."""

    def cached(self, topic: str) -> Route | None:
        """The route, if it needs no look-up: for hot paths."""
        return self._cache.fresh(topic, time.monotonic())

    def last_known(self, topic: str) -> Route | None:
        """What was known last, without any look-up."""
        return self._cache.last_known(topic)

    def invalidate(self, topic: str, *, may_be_old: bool = False, is_denied: bool = False) -> None:
        """After an error with `stale_route`: the next `get` looks the topic up before it answers.

        `may_be_old`: the route is in doubt only; `current` answers with it, and looks it up behind the caller's back.
        `is_denied`: a broker said that it has no such topic.
        """
        with self._own_lock():
            self._cache.invalidate(topic, may_be_old=may_be_old, is_denied=is_denied)

    def forget_unmade(self, topic: str) -> None:
        """See RouteCache.forget_unmade."""
        with self._own_lock():
            self._cache.forget_unmade(topic)

    def look_up_behind(self, topic: str) -> None:
        """A known route is looked up again behind the caller's back, as new as it may be; `last_known` will tell."""
        raise NotImplementedError

    def is_replaced(self, address: BrokerAddress, silent_s: float) -> bool:
        """Whether a route names another master for the name of a broker that has been silent for `silent_s`, or longer.

        It does not wait: it has a route looked up, and the next call tells. A route from before the silence says nothing. One that
        somebody else has looked up since is as good: a consumer may look at its routes every 2 s anyway. Nobody takes the place of a broker
        without slaves that was not elected. A call that such a one holds has a route looked up no more often than it is anyway.
        """
        name, now_s = address.broker_name, time.monotonic()
        with self._own_lock():
            found = self._cache.newest_with(name)
            if found is None:
                return False
            route, fetched_at_s = found
            looked_s = self._looked_s.get(name, float("-inf"))
            age_s = now_s - fetched_at_s
            # The look-up of an earlier silence counts no more.
            is_new = age_s <= silent_s or (fetched_at_s >= looked_s and now_s - looked_s < 3 * REPLACED_LOOK_S)
            leads = route.brokers[name] == address or name in route.leaderless_brokers
            # A slave is silent as long as a consumer reads from it that has caught up.
            if is_new and not leads and address not in route.slaves.values():
                return True
            is_held_alone = name in route.lone_brokers and silent_s > SOON.silent_s
            look_age_s = ROUTE_FRESH_S if is_held_alone else min(silent_s, OTHERS_LOOK_S)
            is_due = now_s - looked_s >= REPLACED_LOOK_S and age_s >= look_age_s
            if is_due:
                self._looked_s[name] = now_s
        if is_due:
            self.look_up_behind(route.topic)
        return False

    def _wait_s(self, topic: str, timeout_s: float) -> float:
        """For how long a look-up may hold up its caller."""
        return timeout_s if self.last_known(topic) is None else min(timeout_s, KNOWN_WAIT_S)

    def _changed(self) -> None:
        """What is known of a topic is something else now."""

    def _own_lock(self) -> threading.RLock:
        """The lock; in a forked child a new one, for the old one may be held by a thread that is not there."""
        if self._pid != os.getpid():
            self._pid, self._lock = os.getpid(), threading.RLock()
            self._cache.release_refreshes()
        return self._lock

    def _look_up_steps(self, topic: str, timeout_s: float) -> Steps[Route]:
        # Who doubts the route from now on wants a newer answer than this one may be.
        doubt_count = self._cache.doubt_count(topic)
        try:
            answer = yield from ask_one(
                self.name_servers, _methods.GET_ROUTE, encode_get_route(topic), timeout_s
            )
            route = decode_route(answer)
        except Exception as error:  # Also one that is no ProtomqError: there are no threads for gRPC, say.
            with self._own_lock():
                known = self._cache.failed(topic, error, time.monotonic())
            if not isinstance(error, ProtomqError):
                raise
            if known is None and is_away(error):
                raise away_error(error) from error
            if known is None:
                raise
            if not isinstance(error, ClosedError):
                self._outages.failed(NAME_SERVERS, topic, error)
            return known
        self._outages.answered(NAME_SERVERS, topic)
        with self._own_lock():
            before = self._cache.last_known(topic)
            stored = self._cache.store(route, time.monotonic(), is_told=self.looks_seldom(topic), doubt_count=doubt_count)
        if before is not None and stored is not before:
            self._changed()
        return stored


class Routes(RouteBook):
    """Routes for threads. Any thread may call everything."""

    def __init__(
        self, transport: SyncTransport, namesrv: str | Sequence[str] | None = None, *, sends: bool = False
    ) -> None:
        super().__init__(namesrv, sends=sends)
        self._transport = transport
        self._sends = sends
        self._driver = Driver(transport)

    def get(self, topic: str, timeout_s: float = TIMEOUT_S) -> Route:
        """The route of a topic.

        Raises TopicNotFoundError (it does not exist and is not made on the first send) or NoRouteError: no name server answers. Or it
        says that all brokers are away that had the topic.
        """
        now_s = time.monotonic()
        route = self._cache.fresh(topic, now_s)  # A read of a dict: needs no lock.
        if route is not None:
            return route
        with self._own_lock():
            route = self._cache.known(topic, now_s)
        if route is not None:
            return self._refreshing(route)
        try:
            return self._driver.run(self._look_up_steps(topic, self._wait_s(topic, timeout_s)))
        except ProtomqError as error:
            # By a signal's handler, in the midst of the look-up.
            if self._sends and self._transport.is_closed and not isinstance(error, ClosedError):
                raise ClosedError("the producer was closed before the message was sent") from error
            raise

    def current(self, topic: str, timeout_s: float = TIMEOUT_S) -> Route:
        """As `get`, but waits only where nothing is known: an outdated route is looked up behind the caller's back."""
        route = self._cache.fresh(topic, time.monotonic())
        if route is not None:
            return route
        route = self._cache.last_known(topic)
        return self._refreshing(route) if route is not None else self.get(topic, timeout_s)

    def look_up_behind(self, topic: str) -> None:
        """See RouteBook.look_up_behind."""
        self.invalidate(topic, may_be_old=True)
        route = self._cache.last_known(topic)
        if route is not None:
            self._refreshing(route)

    def brokers(self, timeout_s: float = TIMEOUT_S) -> tuple[BrokerAddress, ...]:
        """All brokers that the name server knows, masters only."""
        from .v1 import route_service_pb2

        answer = self.ask(_methods.GET_CLUSTER_INFO, b"", timeout_s)
        info = route_service_pb2.GetClusterInfoResponse.FromString(answer)
        return tuple(broker_address(broker) for broker in info.brokers if broker.broker_id == 0)

    def topic_names(self, timeout_s: float = TIMEOUT_S, *, group_topics: bool = False) -> list[str]:
        """All topics that the name server knows. `group_topics`: also those of groups."""
        from .v1 import route_service_pb2 as pb

        names: list[str] = []
        request = pb.ListTopicNamesRequest(page_size=PAGE_SIZE, group_topics=group_topics)
        while True:
            data = self.ask(_methods.LIST_TOPIC_NAMES, request.SerializeToString(), timeout_s)
            answer = decoded(data, pb.ListTopicNamesResponse.FromString)
            names.extend(answer.topics)
            request.page_token = answer.next_page_token
            if not request.page_token:
                return names

    def ask(
        self, method: MethodInfo, request: bytes, timeout_s: float = TIMEOUT_S, knows: Callable[[bytes], bool] = lambda answer: True
    ) -> bytes:
        """What the first name server says that answers, and knows. See ask_one."""
        return self._driver.run(ask_one(self.name_servers, method, request, timeout_s, knows=knows))

    def ask_all(
        self, method: MethodInfo, request: bytes, timeout_s: float = TIMEOUT_S
    ) -> list[bytes | ProtomqError]:
        """What each name server says. See _name_servers.ask_all."""
        return self._driver.run(ask_all(self.name_servers, method, request, timeout_s))

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
                # No more threads now, or the interpreter ends: what is to be sent goes by the old route.
                with self._own_lock():
                    self._cache.end_refresh(route.topic)
        return route

    def _refresh(self, topic: str) -> None:
        try:
            self._driver.run(self._look_up_steps(topic, TIMEOUT_S))
        except ProtomqError as error:
            logger.debug("route of %s: %s", topic, error)
