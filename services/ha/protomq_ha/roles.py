"""What a broker is in its pair, and the numbers of replication."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

COPIES_MAX: Final = 16


class BrokerRole(Enum):
    """RocketMQ's brokerRole."""

    ASYNC_MASTER = "ASYNC_MASTER"
    """Waits for no slave."""
    SYNC_MASTER = "SYNC_MASTER"
    """Answers a send when enough slaves have it."""
    SLAVE = "SLAVE"
    """Follows the master of its name, and changes nothing by itself."""

    @classmethod
    def named(cls, name: str) -> BrokerRole:
        """Returns the role with this name. Raises ValueError for an unknown name."""
        try:
            return cls[name]
        except KeyError:
            names = ", ".join(cls.__members__)
            raise ValueError(f"broker_role is {name!r}; it must be one of {names}") from None


@dataclass(frozen=True, slots=True)
class HaConfig:
    """Replication. On a master, but for what is said to be a slave's.

    Attributes:
        in_sync_replicas: SYNC_MASTER: copies that a send waits for, the master's own among them (RocketMQ: inSyncReplicas). 1 to 16.
        min_in_sync_replicas: SYNC_MASTER: copies without which sends are refused (RocketMQ: minInSyncReplicas, 1). 1 to in_sync_replicas.
        sync_timeout_ms: SYNC_MASTER: how long a send waits for slaves before it is answered FLUSH_SLAVE_TIMEOUT (RocketMQ: slaveTimeout,
            3 s).
        heartbeat_interval_ms: longest silence of a master towards a slave (RocketMQ: haSendHeartbeatInterval, 5 s). On a slave: the longest
            that it asks for.
        timeout_ms: the silence of a slave after which it is out (RocketMQ: haHousekeepingInterval, 20 s). At least two heartbeats. A slave
            connects again after two heartbeats of silence, an elected one after etcd.member_timeout_ms.
        gap_max_bytes: a slave that is further behind is out (RocketMQ: haMaxGapNotInSync, 256 MiB).
        transfer_size_bytes: largest part of the log in one answer (RocketMQ: haTransferBatchSize, 32 KiB). 4 KiB to 16 MiB. On a slave:
            the largest that it asks for.
        slave_read_enabled: consumers that lag are told to pull from a slave (RocketMQ: slaveReadEnable, off). A slave keeps them until they
            have caught up. While the master is away, consumers read from a slave in any case. On here: who runs a slave has the memory
            of two machines, and old reads push the newest messages out of the master's.
        slave_read_memory_ratio: messages further behind the end of the log than this part of the memory are read from a slave (RocketMQ:
            accessMessageInMemoryMaxRatio, 40 %). 0 to 100. With 0 these are all but the newest of a queue.
        master: on a slave: host:port of its master's remoting port (RocketMQ: haMasterAddress); "" asks the name servers. A master
            does not use it.
    """

    in_sync_replicas: int = 2
    min_in_sync_replicas: int = 1
    sync_timeout_ms: int = 3_000
    heartbeat_interval_ms: int = 5_000
    timeout_ms: int = 20_000
    gap_max_bytes: int = 256 << 20
    transfer_size_bytes: int = 4 << 20
    slave_read_enabled: bool = True
    slave_read_memory_ratio: float = 0.4
    master: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.in_sync_replicas <= COPIES_MAX:
            raise ValueError(f"in_sync_replicas is {self.in_sync_replicas}; it must be 1 to {COPIES_MAX}")
        if not 1 <= self.min_in_sync_replicas <= self.in_sync_replicas:
            raise ValueError(
                f"min_in_sync_replicas is {self.min_in_sync_replicas}; it must be 1 to {self.in_sync_replicas} (in_sync_replicas)"
            )
        for name in ("sync_timeout_ms", "heartbeat_interval_ms", "gap_max_bytes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.timeout_ms < 2 * self.heartbeat_interval_ms:
            raise ValueError(
                f"timeout_ms is {self.timeout_ms}; it must be at least two heartbeats, {2 * self.heartbeat_interval_ms}"
            )
        if not 4 << 10 <= self.transfer_size_bytes <= 16 << 20:
            raise ValueError(
                f"transfer_size_bytes is {self.transfer_size_bytes}; it must be {4 << 10} to {16 << 20}"
            )
        if not 0 <= self.slave_read_memory_ratio <= 100:
            raise ValueError(f"slave_read_memory_ratio is {self.slave_read_memory_ratio}; it must be 0 to 100")
