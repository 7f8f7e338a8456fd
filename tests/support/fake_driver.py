"""Steps without sockets, clocks and sleeps: servers answer from a script, routes stand in a dict, and time passes when a test says so."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from protomq._steps import Driver
from protomq._types import BrokerAddress, MessageQueue, MethodInfo, Route
from protomq.errors import NoRouteError, ProtomqError
from protomq.testing import FakeClock


def address_of(name: str) -> BrokerAddress:
    return BrokerAddress(name, f"{name}:1", f"{name}:2")


def route_of(topic: str, *broker_names: str, queues: int = 1) -> Route:
    """A topic with so many queues at each broker."""
    found = tuple(
        MessageQueue(topic, name, queue_id) for name in broker_names for queue_id in range(queues)
    )
    return Route(topic, found, found, {name: address_of(name) for name in broker_names}, broker_names)


class FakeWorld:
    """All that a driver drives, in memory.

    `script` says what comes of the next calls, whoever is called: an answer or an error. `failures` says it of one server. Then
    `answers` has a function (server, request) for some methods; all other answers are empty. Each call and each look-up
    takes `call_takes_s`, of which a caller with a shorter time-out notices nothing: no error is made here. `now_s` is the clock.
    """

    def __init__(self, *routes: Route, call_takes_s: float = 0.0) -> None:
        self.routes = {route.topic: route for route in routes}
        self.script: deque[bytes | ProtomqError] = deque()
        self.failures: defaultdict[str, deque[ProtomqError]] = defaultdict(deque)
        self.answers: dict[MethodInfo, Callable[[str, bytes], bytes]] = {}
        self.route_script: deque[ProtomqError] = deque()
        self.calls: list[tuple[str, MethodInfo, bytes, float]] = []
        """(broker name or address, method, request, time-out)"""
        self.looked_up: list[str] = []
        self.forgotten: list[str] = []
        self.denied: list[str] = []
        self.pauses: list[float] = []
        self.call_takes_s = call_takes_s
        self._clock = FakeClock()
        self.driver = Driver(self, self, self._pause)

    def now_s(self) -> float:
        return self._clock.monotonic()

    def call(
        self,
        address: BrokerAddress,
        method: MethodInfo,
        payload: Sequence[bytes],
        timeout_s: float,
        *,
        one_way: bool = False,
    ) -> bytes:
        self._pass(self.call_takes_s)
        server, request = address.broker_name or address.grpc_address, b"".join(payload)
        self.calls.append((server, method, request, timeout_s))
        if self.failures[server]:
            raise self.failures[server].popleft()
        if not self.script:
            return self.answers[method](server, request) if method in self.answers else b""
        outcome = self.script.popleft()
        if isinstance(outcome, ProtomqError):
            raise outcome
        return outcome

    def get(self, topic: str, timeout_s: float) -> Route:
        self._pass(self.call_takes_s)
        self.looked_up.append(topic)
        if self.route_script:
            raise self.route_script.popleft()
        if topic not in self.routes:
            raise NoRouteError(topic)
        return self.routes[topic]

    current = get

    def invalidate(self, topic: str, *, may_be_old: bool = False, is_denied: bool = False) -> None:
        self.forgotten.append(topic)
        if is_denied:
            self.denied.append(topic)

    def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self._pass(seconds)

    def advance(self, seconds: float) -> None:
        """Time passes."""
        self._pass(seconds)

    def _pass(self, seconds: float) -> None:
        self._clock.advance(round(seconds * 1000))
