"""Heals damage in the log of this broker, master or slave, with bytes from a replica. It runs on one thread.

    damage stands in quarantine   ->   ask the brokers of the same name for these bytes   ->   the store proves them and puts them in place

For what `protomq log repair` has filled, it asks once, and then seldom: other replicas mostly have the same padding.

Any replica may give the bytes, since the store proves them. A replica gives only bytes that it knows to be confirmed. While nothing is
damaged, the thread asks nobody.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from google.protobuf.message import DecodeError

from protomq_runtime.addresses import Address, parse_address_list
from protomq_runtime.errors import ServiceError

from .log_client import LogClient
from .name_server_connections import get_cluster_info
from .store.errors import StoreError

if TYPE_CHECKING:
    from .config import BrokerConfig
    from .store.log.recovery import DamagedRange
    from .store.store import Store

log = logging.getLogger("protomq.broker")

LOOK_INTERVAL_S: Final = 1.0
RETRY_INTERVAL_S: Final = 10.0
"""Pause after a range that no replica could heal."""
REPAIRED_LOOKS: Final = 600
"""It asks for a range that `protomq log repair` has filled at every so many looks."""
RANGE_SIZE_MAX_BYTES: Final = 256 << 20
"""Longest range that is healed, since the broker holds it in memory until it is proved."""

_EXPECTED: Final = (OSError, ServiceError, StoreError, DecodeError, ValueError)


class ReplicaHealing:
    """See the module's docstring. `start`, `close`: any thread."""

    def __init__(
        self, store: Store, replicas: Callable[[], Iterable[Address]], broker_name: str
    ) -> None:
        """`replicas` returns the addresses of the other brokers of this name; it may make calls."""
        self._store = store
        self._replicas = replicas
        self._broker_name = broker_name
        self._complaints: dict[DamagedRange, str] = {}
        self._looks: dict[DamagedRange, int] = {}  # at ranges that a repair has filled
        self._stopping = threading.Event()
        # Nothing is healed any more when `close` has returned: the store may be closed then.
        self._healing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="protomq-log-healing", daemon=True)

    def start(self) -> None:
        """Begins to look for damage."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. It is not waited for: a replica that is gone may keep it for seconds, and this broker is to lead at once."""
        with self._healing:
            self._stopping.set()

    def _run(self) -> None:
        pause_s = LOOK_INTERVAL_S
        while not self._stopping.wait(pause_s):
            pause_s = LOOK_INTERVAL_S
            ranges = self.ranges_to_heal()
            if ranges and not self.heal(ranges):
                pause_s = RETRY_INTERVAL_S

    def ranges_to_heal(self) -> list[DamagedRange]:
        """Returns the ranges for which replicas are to be asked now."""
        ranges = self._store.unhealed_ranges
        repaired = [damage for damage in ranges if self._store.is_repaired(damage.start_position)]
        self._looks = {damage: self._looks.get(damage, -1) + 1 for damage in repaired}
        return [damage for damage in ranges if self._looks.get(damage, 0) % REPAIRED_LOOKS == 0]

    def heal(self, ranges: Sequence[DamagedRange]) -> bool:
        """Heals the ranges that replicas can heal now. Returns whether all are healed."""
        try:
            replicas = list(self._replicas())
        except Exception as error:
            log.exception("replicas cannot be asked for what is damaged here")
            self._complain(ranges[0], str(error))
            return False
        self._complaints = {
            known: why for known, why in self._complaints.items() if known in ranges
        }
        healed = [self._heal(damage, replicas) for damage in ranges]
        return all(healed)

    def _heal(self, damage: DamagedRange, replicas: Sequence[Address]) -> bool:
        size_bytes = damage.end_position - damage.start_position
        reasons = []
        if size_bytes > RANGE_SIZE_MAX_BYTES:
            reasons.append(
                f"it is longer than {RANGE_SIZE_MAX_BYTES} bytes: give this broker an empty folder instead"
            )
            replicas = ()
        for address in replicas:
            if self._stopping.is_set():
                return True
            try:
                data = self._fetch(damage, address)
                with self._healing:
                    if self._stopping.is_set():
                        return True
                    self._store.heal_log(damage, data)
            except _EXPECTED as error:
                reasons.append(f"{address}: {error}")
                continue
            log.info(
                "positions %d to %d came from %s",
                damage.start_position,
                damage.end_position,
                address,
            )
            return True
        if reasons:
            self._complain(damage, "; ".join(reasons))
        return False

    def _fetch(self, damage: DamagedRange, address: Address) -> bytes:
        """Returns the bytes that a replica has for the range; fewer if it does not have all of them."""
        data = bytearray()
        with LogClient(address, f"healing of {self._broker_name}", self._broker_name) as client:
            while (at := damage.start_position + len(data)) < damage.end_position:
                part = client.read(at, damage.end_position - at)
                if not part or self._stopping.is_set():
                    break
                data += part
        return bytes(data)

    def _complain(self, damage: DamagedRange, reason: str) -> None:
        """Logs a repeated problem once."""
        if self._complaints.get(damage) != reason and not self._stopping.is_set():
            self._complaints[damage] = reason
            log.warning(
                "positions %d to %d of the log cannot be healed from a replica yet: %s",
                damage.start_position, damage.end_position, reason,
            )  # fmt: skip


def replicas_of(config: BrokerConfig, broker_name: str) -> list[Address]:
    """Returns the remoting ports of the other brokers of this name, as name servers know them, and the configured master of a slave."""
    found: dict[Address, None] = {}
    if config.broker_id and config.ha.master:
        found.update(dict.fromkeys(parse_address_list(config.ha.master)))
    for name_server in config.name_server_addresses:
        try:
            info = get_cluster_info(name_server, f"healing of {broker_name}")
        except (OSError, ServiceError):
            continue
        for broker in info.brokers:
            if broker.broker_name == broker_name and broker.broker_id != config.broker_id:
                found.update(dict.fromkeys(parse_address_list(broker.remoting_address)))
    return list(found)
