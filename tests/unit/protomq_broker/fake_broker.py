"""The broker's services over a store on a simulated disk and fake lanes: no thread, no socket, no clock that moves by itself."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message

from protomq.v1 import (
    admin_service_pb2,
    consumer_service_pb2,
    group_service_pb2,
    pop_service_pb2,
    pull_service_pb2,
    queue_lock_service_pb2,
    reply_service_pb2,
    send_service_pb2,
    track_service_pb2,
)
from protomq.v1.record_pb2 import Record
from protomq.v1.send_service_pb2 import SendRequest
from protomq_broker.admin_service import AdminService
from protomq_broker.config import BrokerConfig
from protomq_broker.consumer_service import ConsumerService
from protomq_broker.delays import Delays
from protomq_broker.filter_modules import FilterModules
from protomq_broker.group_service import GroupService
from protomq_broker.half_sends import HalfSends
from protomq_broker.log_time import LogTime
from protomq_broker.member_commits import MemberCommits
from protomq_broker.memberships import Memberships
from protomq_broker.offset_commits import OffsetCommits
from protomq_broker.pop_service import PopService
from protomq_broker.pop_time import PopTime
from protomq_broker.pull_service import PullService
from protomq_broker.queue_lock_service import QueueLockService
from protomq_broker.queue_locks import QueueLocks
from protomq_broker.recalls import Recalls
from protomq_broker.reply_service import ReplyService
from protomq_broker.send_backs import SendBacks
from protomq_broker.send_service import SendService
from protomq_broker.state_changes import StateChanges
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_broker.system_writer import SystemWriter
from protomq_broker.testing.simdisk import SimDisk
from protomq_broker.track_service import TrackService
from protomq_broker.transaction_checks import TransactionChecks
from protomq_broker.transaction_handles import Handles
from protomq_broker.waiting_answers import WaitingAnswers
from protomq_broker.write_permit import WritePermit
from protomq_ha.replicas import ReplicaView
from protomq_runtime.dispatch import DispatchTable
from protomq_runtime.errors import ServiceError
from protomq_runtime.testing import FakeCall, FakeServer

from .store.log_helpers import ManualClock
from .store.store_helpers import open_store

SEND = "/protomq.v1.SendService/Send"
PULL = "/protomq.v1.PullService/Pull"
CONSUMER = "/protomq.v1.ConsumerService/"
GROUP = "/protomq.v1.GroupService/"
REPLY = "/protomq.v1.ReplyService/"
ADMIN = "/protomq.v1.AdminService/"
POP = "/protomq.v1.PopService/"
LOCKS = "/protomq.v1.QueueLockService/"


def no_members(started_ms: int = 0) -> Memberships:
    """Groups without members, until a test says who is there."""
    return Memberships(
        started_ms, settle_ms=3_000, expiry_ms=120_000, gap_ms=25_000, queue_count=lambda _: 2, known_groups=()
    )


def delays_of(store: Store, config: BrokerConfig, log_time: LogTime) -> Delays:
    """With the limits of the configuration."""
    return Delays(
        log_time,
        config.delay_levels_ms,
        store.pending,
        count_max=config.delayed_count_max,
        size_max_bytes=config.delayed_size_max_bytes,
    )


def send_service(
    store: Store,
    config: BrokerConfig,
    clock: ManualClock,
    waiting: WaitingAnswers,
    writer: SystemWriter,
    log_time: LogTime | None = None,
) -> SendService:
    """With what it needs for delays and transactions; nothing is delivered or asked by itself."""
    log_time = log_time or LogTime(clock, store.pending.log_time_ms)
    delays = delays_of(store, config, log_time)
    recalls = Recalls(store, config, "b", writer, waiting, log_time)
    handles = Handles("b")
    halves = HalfSends(
        store.transactions,
        handles,
        count_max=config.transaction_count_max,
        size_max_bytes=config.transaction_size_max_bytes,
    )
    checks = TransactionChecks(store, writer, waiting, log_time, clock, handles)
    return SendService(store, config, clock, waiting, delays, recalls, halves, checks)


class FakeBroker:
    """Has the topic `topic` with two queues. Its lanes do what was posted when `call` is called, or `run`."""

    def __init__(
        self,
        *,
        disk: SimDisk | None = None,
        sync_flush: bool = False,
        is_permitted: bool = True,
        clock_ms: int = 1_700_000_000_000,
        segment: int = 1 << 20,
        **settings: Any,
    ) -> None:
        """`settings`: of BrokerConfig."""
        self.disk = disk or SimDisk()
        self.clock = ManualClock(clock_ms)
        self.store = open_store(self.disk, clock=self.clock, sync_flush=sync_flush, segment=segment)
        self.topic = self.store.topics.find("topic") or self.store.topics.create(TopicConfig("topic", 2, 2))
        self.permit = WritePermit()
        self.announced_count = 0
        config = BrokerConfig(**settings)
        writer = SystemWriter(self.permit)
        self.waiting = WaitingAnswers(self.store, self.clock)
        self.members: set[tuple[str, str, int]] = set()
        tokens = itertools.count(1)
        self.queue_locks = QueueLocks(
            self.store.locks, lambda *member: member in self.members, lambda: next(tokens), gap_ms=config.member_gap_ms
        )
        self.locks = QueueLockService(
            self.store, self.queue_locks, writer, self.waiting, config, self.clock
        )
        self.memberships = no_members(self.clock.monotonic_ms())
        self.commits = OffsetCommits(
            self.store, writer, self.waiting, config, self.queue_locks, MemberCommits(self.memberships)
        )
        log_time = LogTime(self.clock, self.store.pending.log_time_ms)
        self.send = send_service(self.store, config, self.clock, self.waiting, writer)
        self.send_backs = SendBacks(
            self.store,
            config,
            writer,
            self.waiting,
            delays_of(self.store, config, log_time),
            log_time,
        )
        modules = self.modules = FilterModules(self.disk, "/s/config/filters")
        self.slaves: Sequence[ReplicaView] = ()
        self.pull = PullService(self.store, config, self.commits, modules, self.clock, lambda: self.slaves)
        self.pop = PopService(
            self.store,
            config,
            writer,
            self.waiting,
            modules,
            self.pull.members,
            self.clock,
            PopTime(self.clock, self.store.popped.time_ms),
            "b",
        )

        def signal_reset(group: str) -> None:
            self.pull.signal_reset(group)
            self.pop.signal_group(group)

        def signal_deleted(topic: str) -> None:
            self.pull.signal_deleted(topic)
            self.pop.signal_deleted(topic)

        def signal_group(group: str) -> None:
            self.pull.signal_group(group)
            self.pop.signal_group(group)

        self.commits.listen_for_resets(signal_reset)
        self.commits.listen_for_deletions(self.pop.signal_group)
        self.store.on_topic_deleted = signal_deleted
        self.changes = StateChanges(self.store, writer, self.waiting, config, lambda: self.send.shortage)
        groups = GroupService(
            self.store,
            self.permit,
            self.changes,
            config.delay_levels_ms,
            signal_group,
            self.send_backs,
            lambda _, __: "",
        )
        self.replies = ReplyService(self.clock, config.hold_max_ms, lambda: self.permit.refusal)
        self.consumer = ConsumerService(self.store, self.commits, self.clock)
        table = DispatchTable()
        for module, name, service in (
            (send_service_pb2, "SendService", self.send),
            (pull_service_pb2, "PullService", self.pull),
            (pop_service_pb2, "PopService", self.pop),
            (consumer_service_pb2, "ConsumerService", self.consumer),
            (group_service_pb2, "GroupService", groups),
            (queue_lock_service_pb2, "QueueLockService", self.locks),
            (reply_service_pb2, "ReplyService", self.replies),
            (track_service_pb2, "TrackService", TrackService(self.store)),
            (admin_service_pb2, "AdminService", self._admin_service(config)),
        ):
            table.add_service(module.DESCRIPTOR.services_by_name[name], service)
        self.server = FakeServer(table)
        send_lane = self.server.lanes["send"]
        writer.start(self.store, send_lane)
        self.store.positions.on_arrival.append(self.pull.signal)
        self.store.positions.on_arrival.append(self.pop.signal)
        self.store.positions.on_flushed.append(lambda _: send_lane.post(self.waiting.resolve))
        if is_permitted:
            self.permit.give()
            self.pop.begin(self.server.lanes["pop"])

    def call(self, path: str, request: Message | bytes, **settings: Any) -> FakeCall:
        """The call, and everything that it posted is done."""
        call = self.server.call(path, request, **settings)
        self.server.run()
        return call

    def refusal(self, path: str, request: Message | bytes, **settings: Any) -> ServiceError:
        """The error of a call that is refused, and so changes nothing."""
        before = self.state()
        call = self.call(path, request, **settings)
        assert call.error is not None, "it was not refused"
        assert self.state() == before, "it was refused, and changed something"
        return call.error

    def state(self) -> tuple[Any, ...]:
        """What a refused call leaves as it is."""
        return (
            self.store.appended_position,
            self.store.topics.snapshot(),
            self.store.groups.all(),
            {group: sorted(topics) for group, topics in self.store.offsets.groups().items()},
            self.announced_count,
            [lane.holds for lane in self.server.lanes.values()],
        )

    def fill(
        self, bodies: Sequence[bytes], *, topic: str = "topic", queue_id: int = 0, **fields: Any
    ) -> None:
        """Sends the bodies as one request; `fields` are those of each record."""
        records = [Record(body=body, **fields) for body in bodies]
        self.call(SEND, SendRequest(topic=topic, queue_id=queue_id, records=records)).response()

    def advance(self, time_ms: int) -> None:
        """So much time passes, for the lanes and by the clock."""
        self.clock.time_ms += time_ms
        self.server.advance(time_ms)

    def _admin_service(self, config: BrokerConfig) -> AdminService:
        def announce() -> None:
            self.announced_count += 1

        return AdminService(
            self.store,
            config,
            broker_name="b",
            version="1",
            start_time_ms=self.clock.now_ms(),
            lane_status=list,
            announce=announce,
            write_refusal=lambda: self.store.write_refusal,
            commits=self.commits,
            members=self.pull.members,
            a_member=lambda group: min((name for of_group, name, _ in self.members if of_group == group), default=""),
            permit=self.permit,
            changes=self.changes,
            on_grown=self.pop.signal_grown,
        )


def told(error: ServiceError) -> tuple[str, str, dict[str, str]]:
    """(code, reason, metadata without `definite`) of a refusal."""
    metadata = dict(error.metadata)
    metadata.pop("definite")
    return error.code.name, error.reason, metadata
