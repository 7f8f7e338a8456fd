"""Configuration of a broker. Defaults are RocketMQ's (BrokerConfig, MessageStoreConfig 5.3) unless a reason stands beside them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from protomq.wire.broker_names import NAME_RULE, is_broker_name
from protomq.wire.topics import QUEUES_MAX
from protomq_ha.roles import BrokerRole, HaConfig
from protomq_runtime.addresses import (
    PORT_MAX,
    WILDCARD_HOSTS,
    Address,
    ListenConfig,
    parse_address_list,
    parse_listen_address,
)
from protomq_runtime.connection_limits import ConnectionLimits

from .store.config import StoreConfig
from .store.state.transactions import CheckPlan
from .store.timer.delay_levels import ROCKETMQ_LEVELS, parse_levels

THREADS_MAX: Final = 64
DEPTH_MAX: Final = 10_000_000
BROKER_ID_MAX: Final = (1 << 31) - 1
"""Answers to pulls name a slave by its id, in 32 bits."""
INVISIBLE_MAX_MS: Final = 30 * 24 * 3_600_000
_OF_WINDOWS: Final = re.compile(r"\\|^[A-Za-z]:/")
"""A receipt cannot hold a longer time than some 49 days."""


@dataclass(frozen=True, slots=True)
class LaneSizes:
    """Threads and waiting calls of each lane. A lane that is full refuses with SYSTEM_BUSY.

    Attributes:
        send_depth_max: calls that may wait to be appended (RocketMQ: sendThreadPoolQueueCapacity 10,000). The lane has one thread.
        pull_threads: RocketMQ has 16 + 2 x cores. A lane here serves thousands of calls a turn, and threads share one GIL. So two
            are enough to keep a cold read from delaying the others.
        pull_depth_max: calls that may wait (RocketMQ: 100,000).
        pop_depth_max: pops and acknowledgements that may wait. The lane has one thread.
        hold_max: pulls that may be held at once over all pull lanes, and as many pops.
        consumer_threads: threads for offsets and look-ups.
        consumer_depth_max: calls that may wait.
        admin_threads: threads for administration.
        admin_depth_max: calls that may wait.
    """

    send_depth_max: int = 10_000
    pull_threads: int = 2
    pull_depth_max: int = 100_000
    pop_depth_max: int = 100_000
    hold_max: int = 200_000
    consumer_threads: int = 1
    consumer_depth_max: int = 10_000
    admin_threads: int = 1
    admin_depth_max: int = 1_000

    def __post_init__(self) -> None:
        for lane_field in fields(self):
            largest = THREADS_MAX if lane_field.name.endswith("_threads") else DEPTH_MAX
            value = getattr(self, lane_field.name)
            if not 1 <= value <= largest:
                raise ValueError(f"{lane_field.name} is {value}; it must be 1 to {largest}")


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """The metrics page: plain HTTP, for people at / and for Prometheus at /metrics.

    Attributes:
        listen: host:port, the port 0 for a free one; "": there is no page. Whoever reaches it sees names of topics and groups.
        series_max: maximum number of series of topics, groups and queues; each costs about 5 us of Python when it is read. 0 to 10,000,000.
    """

    listen: str = ""
    series_max: int = 20_000

    def __post_init__(self) -> None:
        if self.listen:
            try:
                parse_listen_address(self.listen)
            except ValueError as error:
                raise ValueError(f"listen: {error}") from None
        if not 0 <= self.series_max <= 10_000_000:
            raise ValueError(f"series_max is {self.series_max}; it must be 0 to 10000000")


@dataclass(frozen=True, slots=True)
class EtcdConfig:
    """The etcd in which brokers of one name elect their master. docs/ha.md, "Fail-over".

    Attributes:
        endpoints: URLs of etcd's members, http://host:2379; several in one text are separated by `;`. None: roles are fixed,
          and no other setting of etcd may stand there.
        prefix: of all keys; behind it stand the cluster and the broker's name.
        lease_ttl_ms: how long a master that does not renew its lease stays the master. Whole seconds, 2 s (the least that etcd grants) to
          60 s.
        renew_interval_ms: between two renewals of the lease; at most a third of it.
        read_interval_ms: between two looks at etcd.
        member_timeout_ms: a slave that does not keep up for this time leaves the in-sync set, and sends wait for it no more.
        member_lost_timeout_ms: the same for one whose connection has broken, and that is not back; not above member_timeout_ms.
        hand_over_timeout_ms: how long a switch may keep sends waiting before the master cancels it.
    """

    endpoints: tuple[str, ...] = ()
    prefix: str = "/protomq"
    lease_ttl_ms: int = 3_000
    renew_interval_ms: int = 800
    read_interval_ms: int = 300
    member_timeout_ms: int = 3_000
    member_lost_timeout_ms: int = 500
    hand_over_timeout_ms: int = 3_000

    def __post_init__(self) -> None:
        for url in self.urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
                raise ValueError(f"endpoints has {url!r}; each must be http://host:port or https://host:port")
            if not _has_port(url):
                raise ValueError(f"endpoints has {url!r}, with no port between 1 and {PORT_MAX}")
        if not self.prefix.startswith("/") or self.prefix.endswith("/"):
            raise ValueError(f"prefix is {self.prefix!r}; it must begin with a slash, and end without one")
        if not 2_000 <= self.lease_ttl_ms <= 60_000 or self.lease_ttl_ms % 1_000:
            raise ValueError(f"lease_ttl_ms is {self.lease_ttl_ms}; it must be 2000 to 60000, whole seconds")
        if not 0 < self.renew_interval_ms <= self.lease_ttl_ms // 3:
            raise ValueError(
                f"renew_interval_ms is {self.renew_interval_ms}; it must be 1 to {self.lease_ttl_ms // 3}, a third of lease_ttl_ms"
            )
        for name in ("read_interval_ms", "member_timeout_ms", "member_lost_timeout_ms", "hand_over_timeout_ms"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.member_lost_timeout_ms > self.member_timeout_ms:
            raise ValueError(
                f"member_lost_timeout_ms is {self.member_lost_timeout_ms}; it must not be above member_timeout_ms, {self.member_timeout_ms}"
            )

    @property
    def urls(self) -> Sequence[str]:
        """The URLs in `endpoints`, without repeats."""
        parts = re.split(r"[;,\s]+", ";".join(self.endpoints))
        return tuple(dict.fromkeys(part for part in parts if part))


@dataclass(frozen=True, slots=True)
class DecidedElection(EtcdConfig):
    """The settings of a broker that leads or follows by an election: `endpoints` is empty, since it asks nobody."""

    @classmethod
    def of(cls, etcd: EtcdConfig) -> DecidedElection:
        """The same settings without the endpoints."""
        return cls(**{each.name: getattr(etcd, each.name) for each in fields(etcd) if each.name != "endpoints"})


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """One broker process. Nothing here changes at run time.

    Attributes:
        data_dir: the folder of the store.
        cluster: name of the cluster (RocketMQ: DefaultCluster).
        broker_name: name of the broker; "" takes the host's name, as RocketMQ does. "room@name" says in which machine room it is.
        broker_role: ASYNC_MASTER, SYNC_MASTER or SLAVE (RocketMQ: brokerRole); docs/ha.md says what each promises.
        broker_id: 0 is the master, slaves are above; a slave has its master's broker_name. Where the master is elected: its id while it
            follows, above 0, another one for each broker of the name.
        namesrv: addresses of the name servers, host:port, of their gRPC or remoting ports; several in one text are separated by `;`.
        listen: where the broker listens, and under which addresses clients reach it. The host is 127.0.0.1, unlike RocketMQ's:
            nothing is open to the network unless it is asked for. Ports: gRPC 8081 (RocketMQ's proxy), remoting 10911.
        connections: how many connections the ports take, and when a silent peer is gone.
        auto_create_topics: create a topic on the first send to it (RocketMQ: autoCreateTopicEnable, on).
        default_queues: number of queues of a topic whose creator names no number (RocketMQ: 8).
        sync_flush_timeout_ms: how long a send waits for the disk before it is answered FLUSH_DISK_TIMEOUT (RocketMQ: 5 s). A commit of
            offsets waits as long, and then is answered DEADLINE_EXCEEDED.
        hold_max_ms: longest hold of a call; who asks for more gets that. A quiet pull (`quiet_hold_ms`) lasts twice as long at most.
        delay_levels: durations of the delay levels, level 1 first, as RocketMQ's messageDelayLevel: numbers with ms, s, m, h or d. None may
            be shorter than the one before, which RocketMQ allows.
        pop_invisible_min_ms: shortest time for which a popped message may be invisible (RocketMQ's proxy: 10 s).
        pop_invisible_max_ms: longest such time (RocketMQ's proxy: 12 h).
        delayed_count_max: messages that may wait for their time. Each takes 24 octets of disk besides its record, and no memory.
        delayed_size_max_bytes: most bytes of their records in total. Retention has to write them again if they are still waiting.
        transaction_timeout_ms: age of a half message when its producer is asked about it first (RocketMQ: transactionTimeOut, 6 s).
        transaction_check_interval_ms: between two such questions (RocketMQ: transactionCheckInterval, 30 s).
        transaction_check_max: number of questions (RocketMQ: transactionCheckMax, 15); the transaction expires one interval after the last.
        transaction_count_max: transactions that may be open. Each takes 1 KiB of memory.
        transaction_size_max_bytes: most bytes of their half messages in total. Retention has to write them again if they are still open.
        member_settle_ms: how long after a start the lists of members count as incomplete: members that a restart has cut off come back.
            At a slave: after a group's first member came.
        member_gap_ms: a member that held a call, was answered, and does not call again within this time is gone. Members of the SDK hold
            their calls for 15 s, or for 0.6 of this time if that is less.
        member_expiry_ms: a member that only beats, and holds no call, is gone after this time (RocketMQ: 120 s).
        register_interval_ms: between two heartbeats to a name server (RocketMQ: 30 s).
        ha: replication.
        etcd: where the master is elected; broker_role is SYNC_MASTER then, on all brokers of the name.
        metrics: the metrics page.
        lanes: sizes of the lanes.
        store: configuration of the store.
    """

    data_dir: Path = Path("protomq-data")
    cluster: str = "DefaultCluster"
    broker_name: str = ""
    broker_role: str = "ASYNC_MASTER"
    broker_id: int = 0
    namesrv: tuple[str, ...] = ()
    listen: ListenConfig = field(default_factory=ListenConfig)
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    auto_create_topics: bool = True
    default_queues: int = 8
    sync_flush_timeout_ms: int = 5_000
    hold_max_ms: int = 60_000
    delay_levels: str = ROCKETMQ_LEVELS
    pop_invisible_min_ms: int = 10_000
    pop_invisible_max_ms: int = 43_200_000
    delayed_count_max: int = 10_000_000
    delayed_size_max_bytes: int = 64 << 30
    transaction_timeout_ms: int = 6_000
    transaction_check_interval_ms: int = 30_000
    transaction_check_max: int = 15
    transaction_count_max: int = 200_000
    transaction_size_max_bytes: int = 4 << 30
    member_settle_ms: int = 3_000
    member_gap_ms: int = 25_000
    member_expiry_ms: int = 120_000
    register_interval_ms: int = 30_000
    ha: HaConfig = field(default_factory=HaConfig)
    etcd: EtcdConfig = field(default_factory=EtcdConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    lanes: LaneSizes = field(default_factory=LaneSizes)
    store: StoreConfig = field(default_factory=StoreConfig)

    def __post_init__(self) -> None:
        if not 1 <= self.default_queues <= QUEUES_MAX:
            raise ValueError(f"default_queues must be 1 to {QUEUES_MAX}, not {self.default_queues}")
        # Here it would be one folder, of this whole name, in the current one.
        if _OF_WINDOWS.search(str(self.data_dir)):
            raise ValueError(f"data_dir is '{self.data_dir}'; it is written with slashes, as in /data/mq")
        self._check_role()
        check_name("cluster", self.cluster)
        if self.broker_name:
            check_name("broker_name", self.broker_name)
        try:
            parse_address_list(";".join(self.namesrv))
        except ValueError as error:
            raise ValueError(f"namesrv: {error}") from None
        for name in (
            "sync_flush_timeout_ms",
            "hold_max_ms",
            "register_interval_ms",
            "member_gap_ms",
            "member_expiry_ms",
            "pop_invisible_min_ms",
            "delayed_count_max",
            "delayed_size_max_bytes",
            "transaction_timeout_ms",
            "transaction_check_interval_ms",
            "transaction_check_max",
            "transaction_count_max",
            "transaction_size_max_bytes",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")

        if self.member_settle_ms < 0:
            raise ValueError(f"member_settle_ms must be 0 or more, not {self.member_settle_ms}")
        least, most = self.pop_invisible_min_ms, self.pop_invisible_max_ms
        if not least <= most <= INVISIBLE_MAX_MS:
            raise ValueError(
                f"pop_invisible_max_ms is {most}; it must be {least} (pop_invisible_min_ms) to {INVISIBLE_MAX_MS}"
            )
        try:
            parse_levels(self.delay_levels)
        except ValueError as error:
            raise ValueError(f"delay_levels: {error}") from None

    def _check_role(self) -> None:
        role = BrokerRole.named(self.broker_role)
        if self.broker_id > BROKER_ID_MAX:
            raise ValueError(f"broker_id is {self.broker_id}; it must be 0 to {BROKER_ID_MAX}")
        if self.etcd.endpoints:
            self._check_elected(role)
        elif type(self.etcd) is EtcdConfig and self.etcd != EtcdConfig():
            unused = EtcdConfig()
            names = [f"etcd.{each.name}" for each in fields(EtcdConfig) if getattr(self.etcd, each.name) != getattr(unused, each.name)]
            raise ValueError(
                f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} set, and etcd.endpoints is not: nobody would elect the master."
                " Set it, or leave out the others"
            )
        elif self.broker_id < 0 or (self.broker_id > 0) != (role is BrokerRole.SLAVE):
            raise ValueError(
                f"broker_id is {self.broker_id} and broker_role {role.value}: a master has the id 0, a SLAVE one above 0"
            )
        if role is BrokerRole.SLAVE and not self.broker_name:
            raise ValueError("broker_name is empty: a SLAVE has the name of its master")
        if self.ha.master:
            try:
                master = parse_address_list(self.ha.master)[0]
            except ValueError as error:
                raise ValueError(f"ha.master: {error}") from None
            self._check_other(master)

    def _check_other(self, master: Address) -> None:
        listen = self.listen
        hosts = {listen.host, listen.advertised_host}
        if listen.host in WILDCARD_HOSTS | {"127.0.0.1", "::1", "localhost"}:
            hosts |= {"127.0.0.1", "::1", "localhost"}
        ports = {listen.grpc_port, listen.remoting_port, listen.advertised_remoting_port, listen.advertised_grpc_port}
        if master.host in hosts and master.port in ports - {0}:
            raise ValueError(f"ha.master is {master}, this broker itself; it must be the remoting port of its master")

    def _check_elected(self, role: BrokerRole) -> None:
        if role is not BrokerRole.SYNC_MASTER:
            raise ValueError(
                f"broker_role is {role.value}, and etcd.endpoints elects the master: it must be SYNC_MASTER, on each broker of the name"
            )
        if self.broker_id <= 0 or not self.broker_name:
            raise ValueError(
                "where etcd.endpoints elects the master, each broker has the same broker_name, and a broker_id above 0 of its own"
            )
        if self.ha.master:
            raise ValueError("ha.master and etcd.endpoints exclude each other: etcd says who leads")

    @property
    def role(self) -> BrokerRole:
        """`broker_role`."""
        return BrokerRole[self.broker_role]

    @property
    def delay_levels_ms(self) -> tuple[int, ...]:
        """The durations of `delay_levels`, level 1 first."""
        return parse_levels(self.delay_levels)

    @property
    def check_plan(self) -> CheckPlan:
        """When producers are asked about their transactions."""
        return CheckPlan(
            self.transaction_timeout_ms,
            self.transaction_check_interval_ms,
            self.transaction_check_max,
        )

    @property
    def name_server_addresses(self) -> Sequence[Address]:
        """The addresses in `namesrv`, without repeats."""
        return parse_address_list(";".join(self.namesrv))


def _has_port(url: str) -> bool:
    """Whether a client can connect to the URL's port, or it names none."""
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False


def check_name(what: str, name: str) -> None:
    """Raises ValueError for a name that name servers refuse. `what`: the name's field, for the message."""
    if not is_broker_name(name):
        raise ValueError(f"{what} is {name!r}; it must be {NAME_RULE}")
