"""Brokers that this name server refuses, for operators: who, where, why, and when last. Nothing else depends on it.

- A broker that is refused asks again every few seconds, or ends. So an entry goes when it is `EXPIRY_MS` old, or when its broker
  registers. That is the store of that number at that address, or at another one in a start after the refusal. An earlier start is another
  copy of the folder, which has the name.
- At most `COUNT_MAX` entries of bounded size, for anybody may ask: the one that was refused longest ago goes first.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final, NamedTuple

from protomq.v1.route_service_pb2 import Broker, RefusedBroker
from protomq_runtime.errors import ServiceError

COUNT_MAX: Final = 256
EXPIRY_MS: Final = 300_000
ADDRESS_MAX: Final = 300
"""Most characters of an address that are kept. Names of hosts have 253."""
CAUSE_MAX: Final = 1_000
"""The same of a cause, which names the addresses of others."""


class _Key(NamedTuple):
    broker_name: str
    broker_id: int
    store_id: int
    grpc_address: str


class _Entry(NamedTuple):
    refused: RefusedBroker
    until_ms: int


class Refusals:
    """See the module's docstring. Any thread. Times are as in RouteTable."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[_Key, _Entry] = {}
        """Who was refused last is at the end."""

    def note(self, broker: Broker, error: ServiceError, now_ms: int, time_ms: int) -> None:
        """A broker was refused."""
        # Of a forged one, only what is shown is kept: the message may have any number of unknown fields.
        shown = Broker(
            cluster=broker.cluster,
            broker_name=broker.broker_name,
            broker_id=broker.broker_id,
            grpc_address=broker.grpc_address[:ADDRESS_MAX],
            remoting_address=broker.remoting_address[:ADDRESS_MAX],
            incarnation=broker.incarnation,
            store_id=broker.store_id,
            permission=broker.permission,
            epoch=broker.epoch,
            election_id=broker.election_id,
        )
        refused = RefusedBroker(broker=shown, reason=error.reason, cause=error.message[:CAUSE_MAX])
        refused.refused_time.FromMilliseconds(time_ms)
        with self._lock:
            key = _key_of(shown)
            self._entries.pop(key, None)
            self._entries[key] = _Entry(refused, now_ms + EXPIRY_MS)
            if len(self._entries) > COUNT_MAX:
                del self._entries[next(iter(self._entries))]

    def settle(self, broker: Broker) -> None:
        """A broker is registered: whatever it was refused before, also under another name, is over."""
        if not self._entries:
            return
        address = broker.grpc_address[:ADDRESS_MAX]
        with self._lock:
            over = [
                key
                for key, entry in self._entries.items()
                if key.store_id == broker.store_id
                and (key.grpc_address == address or (key.store_id and _is_later(broker, entry.refused)))
            ]
            for key in over:
                del self._entries[key]

    def all(self, now_ms: int) -> Sequence[RefusedBroker]:
        """Those that were refused lately, by name, id and address."""
        with self._lock:
            for key in [key for key, entry in self._entries.items() if entry.until_ms <= now_ms]:
                del self._entries[key]
            return [self._entries[key].refused for key in sorted(self._entries)]


def _is_later(broker: Broker, refused: RefusedBroker) -> bool:
    """Whether it was started after the other one was refused: an incarnation is the time of a start."""
    return broker.incarnation > max(refused.broker.incarnation, refused.refused_time.ToMilliseconds())


def _key_of(broker: Broker) -> _Key:
    return _Key(broker.broker_name, broker.broker_id, broker.store_id, broker.grpc_address)
