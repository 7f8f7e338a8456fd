"""One broker: its store, its services on their lanes, its registration with the name servers.

    Store  <-  services: send, pull, pop, consumer, group, transaction, admin, filter  <-  Server (lanes, remoting port, gRPC)

This module puts them together and carries the store's signals to the lanes; it decides nothing.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from protomq.v1 import (
    admin_service_pb2,
    consumer_service_pb2,
    dead_letter_service_pb2,
    filter_service_pb2,
    group_service_pb2,
    ha_service_pb2,
    log_service_pb2,
    membership_service_pb2,
    pop_service_pb2,
    pull_service_pb2,
    queue_lock_service_pb2,
    reply_service_pb2,
    route_service_pb2,
    send_service_pb2,
    track_service_pb2,
    transaction_service_pb2,
)
from protomq.v1.admin_service_pb2 import LaneStatus
from protomq.v1.topic_pb2 import DataVersion, Permission
from protomq_ha.roles import BrokerRole
from protomq_runtime import telemetry
from protomq_runtime.addresses import (
    AdvertisedAddresses,
    ListenConfig,
    advertised_addresses,
)
from protomq_runtime.admission import AdmissionConfig
from protomq_runtime.clock import boottime_ms
from protomq_runtime.errors import SHUTTING_DOWN
from protomq_runtime.metrics import LANES
from protomq_runtime.server import LaneConfig, Server

from .admin_service import AdminService
from .consumer_service import ConsumerService
from .dead_letter_service import DeadLetterService
from .delays import Delays
from .filter_copies import CopiesFile
from .filter_follower import FilterClient, FilterFollower
from .filter_modules import FilterModules
from .filter_service import FilterService
from .follower_writer import FollowerWriter
from .group_service import GroupService
from .ha_follower import check_master
from .half_sends import HalfSends
from .log_service import LogService
from .log_time import LogTime
from .log_time_file import LogTimeFile
from .member_commits import MemberCommits
from .membership_service import MembershipService
from .memberships import Memberships
from .metrics import BrokerMetrics
from .name_server_connections import NameServer, remote_name_server
from .offset_commits import OffsetCommits
from .pop_service import PopService
from .pop_time import PopTime
from .pull_service import PullService
from .queue_lock_service import QueueLockService
from .queue_locks import QueueLocks
from .recalls import Recalls
from .registration import BrokerRegistration, BrokerTopics
from .replica_healing import ReplicaHealing, replicas_of
from .replication import Replication
from .reply_service import ReplyService
from .send_backs import SendBacks
from .send_service import SendService
from .slave_gate import not_master, refuse_changes
from .state_changes import StateChanges
from .store.files.disk import Disk, read_boot_id
from .store.state.topics import topic_to_message
from .store.store import Store
from .system_writer import SystemWriter
from .timer_mover import TimerMover
from .track_service import TrackService
from .transaction_checks import TransactionChecks
from .transaction_endings import TransactionEndings
from .transaction_handles import Handles
from .transaction_service import TransactionService
from .waiting_answers import WaitingAnswers
from .write_permit import WritePermit

if TYPE_CHECKING:
    from protomq_runtime.clock import Clock
    from protomq_runtime.dispatch import DispatchTable
    from protomq_runtime.errors import ServiceError

    from .config import BrokerConfig
    from .leadership_driver import LeadershipDriver
    from .store.state.topics import TopicsSnapshot

log = logging.getLogger("protomq.broker")

ANNOUNCED_COUNT_MAX = 500
ANNOUNCE_TIMEOUT_S = 0.5
REGISTER_TIMEOUT_S = 2.0
"""How long a start waits for the name servers. A broker serves without them when they are down."""
NAME_TIMEOUT_S = 5.0
"""How long a start waits for its name if the broker that has it is gone. Name servers give that one up soon."""
SEND_LANE = "send"
POP_LANE = "pop"
HA_LANE = "ha"
LATE_LANES = (SEND_LANE,)
"""These lanes start last: a send waits until the name servers have said whether the broker's name is free."""


def broker_name_of(config: BrokerConfig) -> str:
    """The configured name; the default is the host's."""
    return config.broker_name or socket.gethostname()


class Election(NamedTuple):
    """The election that made this process. `epoch`: the epoch in which it leads; None: it follows."""

    leadership: LeadershipDriver
    epoch: int | None


class Broker:
    """One broker. Construct it (this opens the store), call `add_services`, make the server (it calls `start`), call `register`, at the end
    `close`.

    `name_servers` are used in addition to the configured ones. Raises what `Store.open` raises.
    """

    def __init__(
        self,
        config: BrokerConfig,
        clock: Clock,
        version: str,
        name_servers: Iterable[NameServer] = (),
        on_truncated: Callable[[], None] = lambda: None,
        election: Election | None = None,
        store: Store | None = None,
        start_time_ms: int | None = None,
    ) -> None:
        """`on_truncated`: called on a slave when its log must be truncated to a prefix of its master's, so its store must be opened again.
        `election`: given where brokers elect their master. `store`: one that is open, and leads or follows as the role says, given up by
        another broker (`close`); None: it is opened here. `start_time_ms`: when the process started; None: now.
        """
        self._election = election
        leadership = election.leadership if election is not None else None
        self.config = config
        self.name = broker_name_of(config)
        self._clock = clock
        self._start_time_ms = clock.now_ms() if start_time_ms is None else start_time_ms
        self._name_servers = tuple(name_servers)
        self._permit = WritePermit()
        self._writer = SystemWriter(self._permit)
        self._is_slave = config.role is BrokerRole.SLAVE
        if self._is_slave:
            self._permit.refuse(not_master(self.name, config.broker_id))
        follower_writer = FollowerWriter()
        on_writer = follower_writer.run if self._is_slave else self._writer.run
        if store is not None:
            assert store.is_leading is not self._is_slave
            store.on_writer = on_writer
        self.store = store or Store.open(
            Path(config.data_dir),
            config.store,
            clock=clock,
            queues_default=config.default_queues,
            draw=lambda: secrets.randbits(63) or 1,
            on_writer=on_writer,
            check_plan=config.check_plan,
            follows=self._is_slave,
            epoch=election.epoch if election is not None else None,
            waits_for_replicas=election is not None,
        )
        log_time_file = LogTimeFile(Disk(), self.store.root, read_boot_id(), boottime_ms)
        self._log_time = LogTime(clock, self.store.pending.log_time_ms, log_time_file, boottime_ms)
        self.store.on_housekeeping = self._log_time.save
        # Housekeeping comes later: who is killed before that would begin at the wall clock again.
        self._log_time.save()
        self._replication = Replication(
            self.store,
            config,
            self.name,
            clock,
            lambda: secrets.randbits(63) or 1,
            follower_writer,
            on_truncated,
            leadership,
            self._log_time,
        )
        self._healing = ReplicaHealing(
            self.store, lambda: replicas_of(config, self.name), self.name
        )
        self._waiting = WaitingAnswers(self.store, clock)
        self._wire_groups(config, clock)
        delays = self._wire_sends(config, clock)
        self._wire_reads(config, clock)
        self._wire_changes(config, clock, delays, version)
        self._server: Server | None = None
        # The lock protects the next two fields: a start that was given up may still be running for a while.
        self._registering = threading.Lock()
        self._registration: BrokerRegistration | None = None
        self._is_unregistered = False
        self._is_starting = True
        self._announced_topics: tuple[TopicsSnapshot, BrokerTopics] | None = None

    def _wire_groups(self, config: BrokerConfig, clock: Clock) -> None:
        """Members of groups, their locks and their commits."""
        memberships = Memberships(
            clock.monotonic_ms(),
            settle_ms=config.member_settle_ms,
            expiry_ms=config.member_expiry_ms,
            gap_ms=config.member_gap_ms,
            queue_count=self._read_queues,
            known_groups=self.store.offsets.groups(),
            takes_commits=not self._is_slave,
        )
        self._memberships = MembershipService(
            memberships,
            clock,
            broker_start=secrets.randbits(63) or 1,
            hold_max_ms=config.hold_max_ms,
            beside=self._others_beside,
            tells_routes=self._tells_routes,
        )
        locks = QueueLocks(
            self.store.locks,
            self._memberships.is_member,
            lambda: secrets.randbits(63) | 1,
            gap_ms=config.member_gap_ms,
        )
        self._locks = QueueLockService(
            self.store, locks, self._writer, self._waiting, config, clock
        )
        self._memberships.listen_for_gone(self._locks.gone)
        self._lock_counts = locks.counts
        self._commits = OffsetCommits(self.store, self._writer, self._waiting, config, locks, MemberCommits(memberships))

    def _wire_sends(self, config: BrokerConfig, clock: Clock) -> Delays:
        """Sends, and what comes of messages that wait: delays and transactions."""
        self._mover = TimerMover(self.store, self._writer, self._log_time)
        delays = Delays(
            self._log_time,
            config.delay_levels_ms,
            self.store.pending,
            count_max=config.delayed_count_max,
            size_max_bytes=config.delayed_size_max_bytes,
        )
        recalls = Recalls(
            self.store, config, self.name, self._writer, self._waiting, self._log_time
        )
        handles = Handles(self.name)
        halves = HalfSends(
            self.store.transactions,
            handles,
            count_max=config.transaction_count_max,
            size_max_bytes=config.transaction_size_max_bytes,
        )
        self._checks = TransactionChecks(
            self.store, self._writer, self._waiting, self._log_time, clock, handles
        )
        self._transactions = TransactionService(
            self.store,
            config,
            self._permit,
            self._waiting,
            handles,
            TransactionEndings(self.store, self._writer, self._log_time),
            self._checks,
            lambda: self._send.shortage,
        )
        self._send = SendService(
            self.store, config, clock, self._waiting, delays, recalls, halves, self._checks
        )
        return delays

    def _wire_reads(self, config: BrokerConfig, clock: Clock) -> None:
        """Pulls and pops, and the filters of both."""
        modules = FilterModules(Disk(), f"{config.data_dir}/config/filters")
        self._pull = PullService(
            self.store, config, self._commits, modules, clock, lambda: self._replication.service.views
        )
        self._memberships.listen_for_left(self._pull.members.left)
        self._commits.listen_for_resets(self._signal_reset)
        self._pop = PopService(
            self.store,
            config,
            self._writer,
            self._waiting,
            modules,
            self._pull.members,
            clock,
            PopTime(clock, self.store.popped.time_ms),
            self.name,
        )
        self._commits.listen_for_deletions(self._pop.signal_group)
        self._filters = FilterService(modules, self._forget_module, self.store.id)
        self._filter_follower = self._follow_filters(modules)
        self.store.on_topic_deleted = self._signal_deleted

    def _wire_changes(self, config: BrokerConfig, clock: Clock, delays: Delays, version: str) -> None:
        """Offsets, retries, settings of groups, dead letters, replies, and administration."""
        self._consumer = ConsumerService(self.store, self._commits, clock, self._may_have_lost_lead)
        self._send_backs = SendBacks(
            self.store, config, self._writer, self._waiting, delays, self._log_time
        )
        # A change that a fail-over would take back must not be taken where a send is not.
        changes = StateChanges(self.store, self._writer, self._waiting, config, lambda: self._send.shortage)
        self._groups = GroupService(
            self.store,
            self._permit,
            changes,
            config.delay_levels_ms,
            self._signal_group,
            self._send_backs,
            self._came_beside,
        )
        self._dead_letters = DeadLetterService(self.store, self._writer, self._permit, changes, clock)
        first_reply_id = secrets.randbits(62) | 1
        self._replies = ReplyService(
            clock, config.hold_max_ms, lambda: self._permit.refusal, first_reply_id
        )
        self._admin = AdminService(
            self.store,
            config,
            broker_name=self.name,
            version=version,
            start_time_ms=self._start_time_ms,
            lane_status=self._lane_status,
            announce=self._announce,
            write_refusal=self._write_refusal,
            commits=self._commits,
            members=self._pull.members,
            a_member=self._memberships.a_member,
            permit=self._permit,
            changes=changes,
            on_grown=self._pop.signal_grown,
        )

    def add_services(self, table: DispatchTable) -> None:
        """Puts the broker's services into the table, and adds the broker's hook after the services' hooks."""
        for module, name, service in (
            (send_service_pb2, "SendService", self._send),
            (pull_service_pb2, "PullService", self._pull),
            (pop_service_pb2, "PopService", self._pop),
            (consumer_service_pb2, "ConsumerService", self._consumer),
            (group_service_pb2, "GroupService", self._groups),
            (membership_service_pb2, "MembershipService", self._memberships),
            (queue_lock_service_pb2, "QueueLockService", self._locks),
            (dead_letter_service_pb2, "DeadLetterService", self._dead_letters),
            (reply_service_pb2, "ReplyService", self._replies),
            (admin_service_pb2, "AdminService", self._admin),
            (filter_service_pb2, "FilterService", self._filters),
            (track_service_pb2, "TrackService", TrackService(self.store)),
            (transaction_service_pb2, "TransactionService", self._transactions),
            (ha_service_pb2, "HaService", self._replication.service),
            (log_service_pb2, "LogService", LogService(self.store, self.name, self.config.ha.transfer_size_bytes)),
        ):
            table.add_service(module.DESCRIPTOR.services_by_name[name], service)
        if self._is_slave:
            refuse_changes(table, not_master(self.name, self.config.broker_id))
        table.add_hooks(self)

    def lane_configs(self) -> Mapping[str, LaneConfig]:
        """Threads and limits of the broker's lanes."""
        lanes = self.config.lanes
        return {
            SEND_LANE: LaneConfig(1, AdmissionConfig(depth_max=lanes.send_depth_max, waits_for_disk=True)),
            # A cold disk makes pulls wait without any overload: more patience than with the other lanes.
            "pull": LaneConfig(
                lanes.pull_threads,
                AdmissionConfig(
                    depth_max=lanes.pull_depth_max,
                    queue_time_target_ms=1_000,
                    queue_time_interval_ms=2_000,
                    waits_for_disk=True,
                ),
            ),
            # One thread: only this thread plans which messages a pop gets.
            POP_LANE: LaneConfig(1, AdmissionConfig(depth_max=lanes.pop_depth_max, waits_for_disk=True)),
            "consumer": LaneConfig(
                lanes.consumer_threads, AdmissionConfig(depth_max=lanes.consumer_depth_max)
            ),
            "admin": LaneConfig(
                lanes.admin_threads,
                AdmissionConfig(depth_max=lanes.admin_depth_max, queue_time_target_ms=0),
            ),
            # What slaves acknowledge is never refused: sends wait for it.
            HA_LANE: LaneConfig(1, AdmissionConfig(queue_time_target_ms=0)),
        }

    def start(self, server: Server) -> None:
        """The server calls this hook before it accepts connections: connects the store's signals to the lanes. The server knows its ports
        already.
        """
        self._server = server
        metrics = self.metrics()
        telemetry.publish(lambda: (each for each in metrics.numbers() if each.table is not LANES))
        send_lane = server.pools[SEND_LANE].lanes[0]
        self._writer.start(self.store, send_lane)
        positions = self.store.positions
        positions.on_arrival.append(self._pull.signal)
        positions.on_arrival.append(self._pop.signal)
        positions.on_flushed.append(lambda position: send_lane.post(self._waiting.resolve))
        ha_lane = server.pools[HA_LANE].lanes[0]
        self._replication.service.name_problem = self._name_problem
        self._replication.begin(ha_lane, self._send, self._waiting, self._writer)

    def register(self) -> None:
        """Registers with the name servers once the ports are open, then starts the send lane and gives the permit for all other changes.

        The broker asks all name servers at once. It waits at most 2 s for one that does not answer, and not at all for one that refuses
        connections. If the name belongs to a broker that is gone and about to be given up, it waits for that too, 5 s at most. Raises
        ServiceError NAME_TAKEN if a name server says that the name belongs to another broker; then nothing has changed. Raises ConfigError
        if `ha.master` is not this slave's master for sure.
        """
        server = self._server
        assert server is not None, "start comes first"
        if self._is_slave and self._election is None and self.config.ha.master:
            check_master(self.config, self.name)
        deadline = time.monotonic() + REGISTER_TIMEOUT_S
        registration = self._make_registration(server)
        with self._registering:
            if self._is_unregistered:
                return
            self._registration = registration
            self.store.topics.on_change = partial(self._topics_changed, registration)
            if self._is_slave:
                # Name servers know all its topics before it leads, or its master is away: their routes are by what it has registered.
                self.store.topics.on_applied = self.store.topics.on_change
            registration.start()
        is_elected = self._election is not None and not self._is_slave
        # The name of an elected master is its own by etcd: no name server has to say so first. One that refuses it knows a later master.
        if not is_elected:
            registration.wait_tried(deadline - time.monotonic())
            registration.wait_for_name(NAME_TIMEOUT_S)
        self._is_starting = False
        for refusal in () if is_elected else registration.refusals():
            self._permit.refuse(refusal)
            raise refusal
        if self._is_slave:
            server.start_late_lanes()
            self._healing.start()
            self._replication.follow(str(self.advertised_addresses(server).grpc))
            registration.wait_registered(max(deadline - time.monotonic(), 0.0))
            return
        if not self._permit.give():
            return  # the start was given up
        server.start_late_lanes()
        self._mover.start()
        self._healing.start()
        self._writer.post(self._checks.begin)
        self._writer.post(self._locks.arm)
        pop_lane = server.pools[POP_LANE].lanes[0]
        pop_lane.post(partial(self._pop.begin, pop_lane))
        # A program that waits for the ready line expects to find the broker. The broker's name servers may be starting at the same time.
        registration.wait_registered(max(deadline - time.monotonic(), 0.0))

    def _make_registration(self, server: Server) -> BrokerRegistration:
        servers = [
            *self._name_servers,
            *map(remote_name_server, self.config.name_server_addresses),
        ]
        if not servers:
            log.warning("no name server is configured (namesrv): no client finds this broker")
        advertised = self.advertised_addresses(server)
        return BrokerRegistration(
            route_service_pb2.Broker(
                cluster=self.config.cluster,
                broker_name=self.name,
                broker_id=self.config.broker_id,
                grpc_address=str(advertised.grpc),
                remoting_address=str(advertised.remoting),
                # A wall clock that was set back would lock the broker out, until name servers have forgotten its last start; so would the
                # log time of a master.
                incarnation=self._log_time.own_ms(),
                store_id=self.store.id,
                epoch=(self._election.epoch or 0) if self._election is not None else 0,
                election_id=self._election.leadership.election if self._election is not None else 0,
                permission=Permission.PERMISSION_READ_WRITE,
                auto_create_queues=self.config.default_queues
                if self.config.auto_create_topics and not self._is_slave
                else 0,
            ),
            self._topics,
            servers,
            self._clock,
            heartbeat_interval_ms=self.config.register_interval_ms,
            on_name_refusal=self._note_name_refusal,
            on_routes_changed=self._memberships.routes_changed,
            may_have_lost_lead=self._is_refused_as_former_master,
        )

    def unregister(self) -> None:
        """Tells the name servers to send no new clients: the first step of a stop. Fails all changes that still wait for the permit."""
        self._permit.refuse(SHUTTING_DOWN)
        with self._registering:
            self._is_unregistered = True
            registration, self._registration = self._registration, None
        if registration is not None:
            registration.stop()

    def tell_election(self, election_id: int) -> None:
        """Tells the name servers by which election this broker leads, or follows."""
        with self._registering:
            registration = self._registration
        if registration is not None:
            registration.tell_election(election_id)

    def go_on_following(self) -> None:
        """Follows another master. Used where the master is elected."""
        if self._replication.follower is not None:
            self._replication.follower.go_on()

    def stop_following(self) -> None:
        """Stops following: this slave says nothing to any master from now on. Used where the master is elected."""
        if self._replication.follower is not None:
            self._replication.follower.stop()

    def close(self, *, keeps_store: bool = False) -> None:
        """Writes the last offsets and closes the store. The last step of a stop, when no lane runs any more.

        `keeps_store`: the store stays open, for another broker.
        """
        if self._filter_follower is not None:
            self._filter_follower.close()
        self._writer.close()
        self._healing.close()
        self._replication.close(keeps_store=keeps_store)
        self._mover.close()
        self._pull.close()
        self._pop.close()
        if self._server is not None:
            self._commits.close()
        if keeps_store:
            # Who leads next goes on with what this slave has heard.
            self._log_time.save()
            self.store.forget_listeners()
        else:
            self.store.close()

    def advertised_addresses(self, server: Server) -> AdvertisedAddresses:
        """Returns the addresses under which clients reach this broker."""
        listen: ListenConfig = self.config.listen
        peer = next(iter(self.config.name_server_addresses), None)
        return advertised_addresses(listen, server.grpc_port, server.remoting_port, peer)

    def metrics(self) -> BrokerMetrics:
        """Returns the broker's metrics; one thread may read them."""
        return BrokerMetrics(
            self.store,
            start_time_ms=self._start_time_ms,
            series_max=self.config.metrics.series_max,
            hold_durations=self._pull.hold_durations,
            now_ms=self._clock.now_ms,
            mover=self._mover,
            retries=self._retry_counts,
            log_time=self._log_time,
            lane_statuses=lambda: self._server.lane_statuses() if self._server else (),
            name_servers=self._name_server_counts,
            replies=self._replies.numbers,
            memberships=self._memberships.counts,
            locks=self._lock_counts,
            failed_filters=lambda: self._pull.failed_filter_count + self._pop.failed_filter_count,
            full_pops=lambda: self._pop.pipeline.planner.full_count,
            write_refusal=self._write_refusal,
            replication=self._replication.counts,
        )

    def _topics_changed(self, registration: BrokerRegistration) -> None:
        registration.notify_changed()
        self._memberships.topics_changed()

    def _tells_routes(self) -> bool:
        registration = self._registration
        return registration is not None and registration.tells_routes()

    def _read_queues(self, topic: str) -> int:
        """Returns how many queues of the topic consumers can read here; 0 if the topic is unknown or not readable."""
        found = self.store.topics.find(topic)
        return found.read_queues if found is not None and found.readable else 0

    def _signal_deleted(self, topic: str) -> None:
        self._pull.signal_deleted(topic)
        self._pop.signal_deleted(topic)

    def _signal_reset(self, group: str) -> None:
        self._pull.signal_reset(group)
        self._pop.signal_group(group)

    def _others_beside(self) -> dict[str, str]:
        return self._pull.members.beside()

    def _came_beside(self, group: str, peer: str) -> str:
        self._pull.members.came_beside(group, "a consumer in broadcast mode", peer)
        return self._memberships.a_member(group)

    def _signal_group(self, group: str) -> None:
        self._pull.signal_group(group)
        self._pop.signal_group(group)

    def _follow_filters(self, modules: FilterModules) -> FilterFollower | None:
        """Makes a slave copy the filter modules of its master. Who leads forgets what it knew of a master."""
        known = CopiesFile(Disk(), self.store.root)
        follower = self._replication.follower
        if follower is None:
            try:
                known.clear()
            except OSError as error:  # No reason not to lead: at worst, a module is to be deployed again.
                log.warning("what is known of a former master's filter modules could not be forgotten: %s", error)
            return None
        client_id = f"slave {self.config.broker_id} of {self.name}"
        copies = FilterFollower(
            modules,
            known,
            self._forget_module,
            lambda: not follower.view.problem,
            lambda master: FilterClient(master, client_id),
        )
        follower.on_following = copies.begin
        return copies

    def _forget_module(self, name: str) -> None:
        self._pull.forget_module(name)
        self._pop.forget_module(name)

    def _name_server_counts(self) -> tuple[int, int, int]:
        registration = self._registration
        if registration is None:
            return 0, 0, 0
        return registration.name_server_count, registration.registered_count(), len(registration.refusals())

    def _note_name_refusal(self, refusal: ServiceError | None) -> None:
        """Called on a registration thread. A broker that has lost its name takes no sends, since consumers look for its messages at the
        other broker.
        """
        self._send.refusal = refusal
        if refusal is not None and self._is_starting:
            return  # `register` raises it: it is said once.
        if refusal is not None:
            effect = "no client finds this slave" if self._is_slave else "no sends are taken"
            if self._is_refused_as_former_master():
                log.warning("%s: another broker may lead %s by now", effect, self.name)
            else:
                log.error("%s until the name is free: %s", effect, refusal.message)
        else:
            log.warning("the name %s is this broker's again%s", self.name, "" if self._is_slave else ": sends are taken")

    def _name_problem(self) -> str:
        refusal = self._send.refusal
        return refusal.message if refusal is not None else ""

    def _retry_counts(self) -> tuple[int, int, int, int]:
        counts = self._send_backs.counts
        return counts.retried, counts.dead, counts.repeated, self._dead_letters.replayed_count

    def _may_have_lost_lead(self) -> bool:
        return self._election is not None and self._election.leadership.may_have_lost

    def _is_refused_as_former_master(self) -> bool:
        """Whether a refusal of the name may mean no more than that: it was stopped, or etcd was away, and it is not told yet."""
        return not self._is_slave and self._may_have_lost_lead()

    def _write_refusal(self) -> str:
        refusal = self._send.refusal or self._send.shortage
        return refusal.message if refusal is not None else self.store.write_refusal

    def _announce(self) -> None:
        """Waits until the name servers know the topics, so that the creator of a topic can ask for its route. Does not wait above
        ANNOUNCED_COUNT_MAX topics: registering them takes longer than a caller wants to wait.
        """
        registration = self._registration
        if registration is not None and len(self.store.topics.all()) <= ANNOUNCED_COUNT_MAX:
            registration.wait_announced(ANNOUNCE_TIMEOUT_S)

    def _topics(self) -> BrokerTopics:
        """Returns the registered topics, rebuilt only after a change. The registration's threads call it."""
        snapshot = self.store.topics.snapshot()
        known = self._announced_topics
        if known is not None and known[0] is snapshot:
            return known[1]
        topics = BrokerTopics(
            DataVersion(time_ms=snapshot.version.time_ms, counter=snapshot.version.counter),
            [topic_to_message(topic) for topic in snapshot.topics],
        )
        self._announced_topics = (snapshot, topics)
        return topics

    def _lane_status(self) -> list[LaneStatus]:
        if self._server is None:
            return []
        return [
            LaneStatus(
                lane=status.lane,
                threads=status.threads,
                depth=status.depth,
                depth_max=status.depth_max,
                queue_time_us=status.queue_time_us,
                calls=status.calls,
                rejections=status.rejections,
                connections=status.connections,
                holds=status.holds,
            )
            for status in self._server.lane_statuses()
        ]
