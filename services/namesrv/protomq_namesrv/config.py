"""Configuration of a name server: one frozen object, a section per component. Nothing here changes at run time.

RocketMQ's name server listens on every interface. This one listens on the loopback interface by default, since it has no
authentication yet. `--host 0.0.0.0`, `listen.host` in the file or PROTOMQ_LISTEN_HOST change that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protomq_runtime.addresses import ListenConfig
from protomq_runtime.connection_limits import ConnectionLimits

GRPC_PORT_DEFAULT = 9876
"""RocketMQ's name server port."""
REMOTING_PORT_DEFAULT = 9877


@dataclass(frozen=True, slots=True)
class LivenessConfig:
    """When a broker counts as gone."""

    expiry_ms: int = 120_000
    """A broker is removed after this time without a heartbeat; RocketMQ's brokerChannelExpiredTime. 1,000 to 3,600,000."""
    hold_ms: int = 10_000
    """A broker's hold is answered after this time, and the broker calls again. So a peer that vanished without a word (a cut cable
    sends no FIN) is noticed within hold_ms + renewal_grace_ms + scan_interval_ms. 100 to 60,000."""
    renewal_grace_ms: int = 10_000
    """Time in which a broker whose hold was answered must call again. 100 to 60,000."""
    broken_grace_ms: int = 3_000
    """Time in which a broker whose connection broke during its hold may come back: a blip is no outage. 0 to 60,000."""
    newcomer_ms: int = 10_000
    """For this time after its first registration a broker loses its name to a broker with another store that had it before. After a restart
    of the name server its brokers come back within some seconds, in no order. 0 to 600,000."""
    scan_interval_ms: int = 1_000
    """How often deadlines are looked at. 10 to 30,000."""

    def __post_init__(self) -> None:
        _check_range("liveness.expiry_ms", self.expiry_ms, 1_000, 3_600_000)
        _check_range("liveness.hold_ms", self.hold_ms, 100, 60_000)
        _check_range("liveness.renewal_grace_ms", self.renewal_grace_ms, 100, 60_000)
        _check_range("liveness.broken_grace_ms", self.broken_grace_ms, 0, 60_000)
        _check_range("liveness.newcomer_ms", self.newcomer_ms, 0, 600_000)
        _check_range("liveness.scan_interval_ms", self.scan_interval_ms, 10, 30_000)


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """What a name server takes at most; beyond it, callers get RESOURCE_EXHAUSTED, TOO_MANY."""

    broker_count_max: int = 1_024
    """Registered brokers; as many that are missing are remembered besides. 1 to 65,536."""
    topic_count_max: int = 100_000
    """Topics of one broker. 1 to 1,000,000."""
    watcher_count_max: int = 10_000
    """Open WatchRoute streams. 0 to 1,000,000."""

    def __post_init__(self) -> None:
        _check_range("limits.broker_count_max", self.broker_count_max, 1, 65_536)
        _check_range("limits.topic_count_max", self.topic_count_max, 1, 1_000_000)
        _check_range("limits.watcher_count_max", self.watcher_count_max, 0, 1_000_000)


@dataclass(frozen=True, slots=True)
class NamesrvConfig:
    """All of a name server."""

    name: str = "namesrv"
    """For the operator's eyes: the name in the remoting port's welcome."""
    listen: ListenConfig = field(
        default_factory=lambda: ListenConfig(
            grpc_port=GRPC_PORT_DEFAULT, remoting_port=REMOTING_PORT_DEFAULT
        )
    )
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    """How many connections the ports take, and when a silent peer is gone."""
    liveness: LivenessConfig = field(default_factory=LivenessConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    route_threads: int = 1
    """Lanes that serve routes. 1 to 16."""

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise ValueError(f"name is {self.name!r}; it must not be empty")
        _check_range("route_threads", self.route_threads, 1, 16)


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; it must be {low} to {high}")
