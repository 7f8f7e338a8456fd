"""Registration of a broker that lives in the same process as the name server: calls instead of a socket.

The class has the methods of the broker's `NameServerConnection` and belongs to one thread, but for `wake`. A hold needs nothing:
neither process can lose the other.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from protomq.v1.route_service_pb2 import (
    HeartbeatRequest,
    HeartbeatResponse,
    HoldRegistrationRequest,
    RegisterBrokerRequest,
    RegisterBrokerResponse,
    UnregisterBrokerRequest,
    UnregisterBrokerResponse,
)
from protomq_runtime.clock import Clock

from .config import LimitsConfig, LivenessConfig
from .request_checks import to_key, to_registration, to_version
from .route_snapshot import BrokerKey
from .route_table import RouteTable


class DirectConnection:
    """To the name server that has this table."""

    def __init__(
        self, table: RouteTable, liveness: LivenessConfig, limits: LimitsConfig, clock: Clock
    ) -> None:
        self._table = table
        self._expiry_ms = liveness.expiry_ms
        self._topic_count_max = limits.topic_count_max
        self._clock = clock
        self._event = threading.Event()
        self._key: BrokerKey | None = None
        table.on_changed_topics.append(self._hear)

    def register_broker(self, request: RegisterBrokerRequest) -> RegisterBrokerResponse:
        registration = to_registration(request, self._topic_count_max)
        self._key = registration.key
        self._table.register(
            registration,
            self._clock.monotonic_ms(),
            is_returning=request.returning,
            time_ms=self._clock.now_ms(),
        )
        return RegisterBrokerResponse(expiry_ms=self._expiry_ms, tells_routes=True)

    def unregister_broker(self, request: UnregisterBrokerRequest) -> UnregisterBrokerResponse:
        key = to_key(request.broker_name, request.broker_id)
        self._table.unregister(
            key,
            request.incarnation,
            self._clock.monotonic_ms(),
            store_id=request.store_id,
            time_ms=self._clock.now_ms(),
        )
        return UnregisterBrokerResponse()

    def heartbeat(self, request: HeartbeatRequest) -> HeartbeatResponse:
        key = to_key(request.broker_name, request.broker_id)
        version = to_version(request.data_version)
        again = self._table.heartbeat(
            key,
            request.incarnation,
            version,
            self._clock.monotonic_ms(),
            store_id=request.store_id,
        )
        return HeartbeatResponse(register_again=again)

    def open_hold(self, request: HoldRegistrationRequest) -> None:
        """Nothing to hold."""

    def wait(self, timeout_s: float) -> bool:
        self._event.wait(timeout_s)
        self._event.clear()
        return False

    def take_changed_topics(self) -> Sequence[str]:
        return self._table.take_changed_topics(self._key) if self._key is not None else ()

    def wake(self) -> None:
        self._event.set()

    def close(self) -> None:
        self._table.on_changed_topics.remove(self._hear)

    def _hear(self, key: BrokerKey) -> None:
        if key == self._key:
            self._event.set()
