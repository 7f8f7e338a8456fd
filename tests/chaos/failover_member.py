"""A member of the simulated cluster of `failover_world`: one process at a time, on a simulated disk.

Real are Store, HaService with the table of replicas, Replication, SendService, LeadershipDriver with its Leadership, HaFollower with its
FollowSession, ReplicaHealing, LogTime, and the files of the tail, the confirmed position and log time. They need no thread here:

    LeadershipDriver    `SimDriver` ticks it, and carries its requests to the etcd of the world
    HaFollower          `Following` does in steps what its thread does in a loop (`_run`, `_follow_once`, `_fetch`), by its own methods
    ElectedBroker       `Member` does what its task does with the effects (`_do`, `_lead`, `_open_again`, `_watch_log`), in the same order
    flusher, upkeep     events of the world

The questions about the master's log before a truncation, and the bytes for healing, take no time here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.message import DecodeError

from protomq.v1 import (
    admin_service_pb2,
    dead_letter_service_pb2,
    group_service_pb2,
    log_service_pb2,
    send_service_pb2,
)
from protomq.v1 import ha_service_pb2 as ha
from protomq_broker.admin_service import AdminService
from protomq_broker.config import BrokerConfig, DecidedElection
from protomq_broker.confirmed_file import ConfirmedFile
from protomq_broker.dead_letter_service import DeadLetterService
from protomq_broker.delays import Delays
from protomq_broker.elected_broker import (
    FULL_LOOKS,
    CutFork,
    _cut_end_of,
    _has_skipped_more,
    _lack_of_room,
    is_to_be_reopened,
)
from protomq_broker.fetch_answers import AnswerMemory
from protomq_broker.follower_writer import FollowerWriter
from protomq_broker.group_service import GroupService
from protomq_broker.ha_follower import (
    HaFollower,
    NoMasterError,
    OtherPastError,
    SilencedError,
    SkippedPartsError,
    TruncatedError,
)
from protomq_broker.ha_session import FollowSession, OtherSegmentsError
from protomq_broker.half_sends import HalfSends
from protomq_broker.healed_reopens import HealedReopens
from protomq_broker.leadership_driver import LeadershipDriver
from protomq_broker.log_service import LogService
from protomq_broker.log_time import LogTime
from protomq_broker.log_time_file import LogTimeFile
from protomq_broker.recalls import Recalls
from protomq_broker.replica_healing import ReplicaHealing
from protomq_broker.replication import Replication
from protomq_broker.send_backs import SendBacks
from protomq_broker.send_service import SendService
from protomq_broker.slave_gate import not_master, refuse_changes
from protomq_broker.state_changes import StateChanges
from protomq_broker.store.errors import StoreError, StoreFailedError
from protomq_broker.store.store import Store
from protomq_broker.system_writer import SystemWriter
from protomq_broker.tail_file import TailFile
from protomq_broker.testing.simdisk import CAPACITY_BYTES, SimDisk
from protomq_broker.transaction_checks import TransactionChecks
from protomq_broker.transaction_handles import Handles
from protomq_broker.waiting_answers import WaitingAnswers
from protomq_broker.write_permit import WritePermit
from protomq_ha import leadership
from protomq_ha.cluster_state import ORDER, SWITCH, Compare, Put, Transaction, encode_order
from protomq_ha.leadership_values import (
    CutSettled,
    Effect,
    Follow,
    Lead,
    NoteStart,
    Result,
    Role,
    Settings,
    StopFollowing,
    StopLeading,
    TailSettled,
)
from protomq_runtime.dispatch import DispatchTable
from protomq_runtime.errors import ServiceError
from protomq_runtime.testing import FakeCall, FakeLane, FakeServer

if TYPE_CHECKING:
    from protomq_broker.store.log.agreement import LogPoint
    from protomq_broker.store.log.recovery import DamagedRange
    from protomq_ha.leadership_values import Ask
    from protomq_runtime.addresses import Address

    from .failover_world import FailoverWorld

NAME: Final = "b"
QUEUES: Final = 2
ROOT: Final = "/s"
FETCH: Final = "/protomq.v1.HaService/Fetch"
COMPARE: Final = "/protomq.v1.HaService/CompareLog"
SEND: Final = "/protomq.v1.SendService/Send"
READ_LOG: Final = "/protomq.v1.LogService/ReadLog"

SHORTER: Final = 3
"""All times are a third of the real ones, so that a life is short."""
LEASE_MS: Final = 1_000
HEARTBEAT_MS: Final = 150
SILENCE_MS: Final = 700
TICK_MS: Final = 50
HURRIED_TICK_MS: Final = 20
LOOK_MS: Final = 330
FLUSH_MS: Final = 170
NOTE_MS: Final = 150
BREAK_MS: Final = 4
"""Until the other end of a connection knows that a process has ended."""
FETCHES: Final = 2
PART_BYTES: Final = 1 << 20

_EXPECTED: Final = (
    OSError, ServiceError, NoMasterError, SilencedError, OtherSegmentsError, OtherPastError, SkippedPartsError, StoreError, DecodeError,
    ValueError,
)  # fmt: skip
_NO_THREAD: Final = SimpleNamespace(start=lambda: None, is_alive=lambda: False)

Reply = bytes | ServiceError


class MemberClock:
    """The clocks of a machine: the wall clock is stepped, the monotonic one stands still in a suspend, that since the boot does neither.

    Half of the clusters have wall clocks that differ.
    """

    def __init__(self, world: FailoverWorld) -> None:
        rng = world.rng
        self._world = world
        self.rate, self.boot_offset_ms = rng.uniform(0.97, 1.03), rng.uniform(0, 1e6)
        self.wall_offset_ms = world.clock_rng.uniform(-1, 1) * world.clocks_apart_ms
        self.asleep_ms = 0.0

    def boot_ms(self) -> int:
        return int(self.boot_offset_ms + self._world.now_ms * self.rate)

    def now_ms(self) -> int:
        return 1_700_000_000_000 + int(self._world.now_ms + self.wall_offset_ms)

    def monotonic_ms(self) -> int:
        return int(self.boot_offset_ms + self._world.now_ms * self.rate - self.asleep_ms)

    def monotonic(self) -> float:
        return self.monotonic_ms() / 1_000


class MemberLane(FakeLane):
    """A lane whose turns and timers are events of the world, until its server stops."""

    def __init__(self, member: Member, pool_name: str) -> None:
        super().__init__(pool_name)
        self._member = member
        self._is_due = self._is_closed = False

    def close(self) -> None:
        """It runs no more."""
        self._is_closed = True
        self.posted.clear()

    def post(self, function: Callable[[], None]) -> None:
        super().post(function)
        if not self._is_due:
            self._is_due = True
            self._member.at(0, self._turn)

    def _turn(self) -> None:
        self._is_due = False
        if not self._is_closed:
            self.run()

    def call_later(self, delay_ms: float, function: Callable[[], None]) -> Any:
        timer = _Timer(lambda: None if self._is_closed else function())
        self._member.at(delay_ms, timer.ring)
        return timer


class _Timer:
    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function

    def cancel(self) -> None:
        self._function = None

    def ring(self) -> None:
        function, self._function = self._function, None
        if function is not None:
            function()


class MemberCall(FakeCall):
    """A call whose answer goes to somebody."""

    on_done: Callable[[Reply], None] | None = None

    def answer(self, payload: bytes, regions: Sequence[Any] = (), regions_size_bytes: int = 0) -> None:
        super().answer(payload, regions, regions_size_bytes)
        if self.on_done is not None:
            self.on_done(b"".join([payload, *(region.file.read(region.offset, region.size_bytes) for region in regions)]))

    def fail(self, error: ServiceError) -> None:
        super().fail(error)
        if self.on_done is not None:
            self.on_done(error)


class Connection:
    """A slave's connection with its master. What travels one way keeps its order; where something is lost, nothing comes behind it."""

    def __init__(self, slave: Member, master: Member) -> None:
        self.slave, self.master = slave, master
        self.lives = slave.life, master.life
        self.is_broken = False
        self.stuck: set[str] = set()
        self.arrived_ms = {slave.name: 0.0, master.name: 0.0}
        self.calls: deque[MemberCall] = deque(maxlen=2 * FETCHES + 2)

    def ask(self, payload: bytes, on_reply: Callable[[Reply], None]) -> None:
        """A fetch."""
        self._carry(self.slave, self.master, partial(self._arrive, payload, on_reply))

    def _arrive(self, payload: bytes, on_reply: Callable[[Reply], None]) -> None:
        server = self.master.server
        if self.is_broken:
            return
        if server is None:
            self.master.at(BREAK_MS, self.end_for_slave)
            return

        def kind(*arguments: Any, **settings: Any) -> MemberCall:
            call = MemberCall(*arguments, **settings)
            call.on_done = lambda reply: self._carry(self.master, self.slave, partial(on_reply, reply))
            self.calls.append(call)
            return call

        server.call(FETCH, payload, kind=kind)  # type: ignore[arg-type]

    def _carry(self, source: Member, target: Member, function: Callable[[], None]) -> None:
        world = self.slave.world
        if self.is_broken or source.name in self.stuck:
            return
        if not target.is_up or (source.name, target.name) in world.cut:
            self.stuck.add(source.name)
            return
        at_ms = max(world.now_ms + world.delay_ms(source.name, target.name), self.arrived_ms[source.name])
        self.arrived_ms[source.name] = at_ms
        world.at(at_ms - world.now_ms, function, life=(target, target.life))

    def end_for_slave(self) -> None:
        """The slave notices, if a word of it comes through, that the master's end is closed."""
        slave, world = self.slave, self.slave.world
        if not self.is_broken and (self.master.name, slave.name) not in world.cut:
            world.at(BREAK_MS, slave.following.lost, self, life=(slave, self.lives[0]))

    def hang_up(self) -> None:
        """The slave closes it, or its process has ended; the master notices if a word of it comes through."""
        world, master = self.slave.world, self.master
        if not self.is_broken:
            self.is_broken = True
            if (self.slave.name, master.name) not in world.cut:
                world.at(BREAK_MS, self._gone, life=(master, self.lives[1]))

    def _gone(self) -> None:
        for call in list(self.calls):
            if not call.closed:
                call.hang_up()


class _MasterClient:
    """What `RemoteLog` asks: at once, if both ways are open."""

    def __init__(self, connection: Connection, address: Address) -> None:
        self.address = address
        self._connection = connection

    def call(self, method_id: int, payload: bytes, timeout_s: float, *, until_woken: bool = False) -> bytes:
        slave, master = self._connection.slave, self._connection.master
        return slave.ask_at_once(master, COMPARE, payload)


class Following:
    """The steps of HaFollower's thread."""

    def __init__(self, member: Member) -> None:
        self.member, self.world = member, member.world
        self.turn = 0
        self.connection: Connection | None = None
        self.session: FollowSession | None = None
        self.memory = AnswerMemory()
        self.under_way = 0
        self.heard_ms = 0.0
        self._begun_ms = 0
        self.is_of_another_past = False
        """It does not follow, for the master lacks what may have been confirmed here."""

    @property
    def follower(self) -> HaFollower:
        follower = self.member.replication.follower
        assert follower is not None
        return follower

    def begin(self) -> None:
        """See HaFollower._begin; and a pause before the next try ends."""
        self.hang_up()
        self.follower._pauses.begin_again()
        self.member.at(0, self._connect, self.turn)

    def hang_up(self) -> None:
        """No answer of what was begun counts any more."""
        self.turn += 1
        self.session = None
        self.under_way = 0
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.hang_up()

    def lost(self, connection: Connection) -> None:
        """The master's end is closed."""
        if connection is self.connection:
            self._ended(ConnectionError("the connection is lost"))

    def _ended(self, error: Exception | None) -> None:
        """See HaFollower._run: a pause, then the next try."""
        follower, member = self.follower, self.member
        self.hang_up()
        if isinstance(error, TruncatedError):
            self.world.fired["truncated"] += 1
            member.do_soon("reopen")
            return
        pause_s = follower._pause_after(error, self._begun_ms)
        self.is_of_another_past = isinstance(error, OtherPastError)
        if self.is_of_another_past:
            self.world.fired["refused to drop its log"] += 1
        member.at(1_000 * pause_s / SHORTER, self._connect, self.turn)

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except (TruncatedError, *_EXPECTED) as error:
            self._ended(error)

    def _connect(self, turn: int) -> None:
        if turn == self.turn and not self.follower._stopping.is_set():
            self._guarded(self._begin_session)

    def _begin_session(self) -> None:
        follower, member, world = self.follower, self.member, self.world
        self._begun_ms = follower._clock.monotonic_ms()
        address = follower._find_master()
        master = world.find_address(str(address))
        if master is None or not master.is_up or master.server is None or (member.name, master.name) in world.cut:
            raise ConnectionError(f"nobody listens at {address}")
        session = FollowSession(member.store, follower._writer.run)
        assert follower._target is not None
        request = session.begin_request(NAME, member.broker_id, member.address, follower._target.epoch)
        request.cluster = member.config.cluster
        connection = Connection(member, master)
        follower._check_whole(_MasterClient(connection, address))  # type: ignore[arg-type]
        self.connection = connection
        world.connections.append(connection)
        self.heard_ms = world.now_ms
        turn = self.turn
        connection.ask(
            request.SerializeToString(),
            lambda reply: self._take(turn, lambda: self._began(session, connection, address, reply)),
        )
        member.at(SILENCE_MS, self._look, turn)

    def _take(self, turn: int, step: Callable[[], None]) -> None:
        if turn == self.turn:
            self.heard_ms = self.world.now_ms
            delay_ms = self.member.disk_delay_ms
            if delay_ms:  # a slow disk: what has come waits for it
                self.member.at(delay_ms, self._take_late, turn, step)
            else:
                self._guarded(step)

    def _take_late(self, turn: int, step: Callable[[], None]) -> None:
        if turn == self.turn:
            self._guarded(step)

    def _look(self, turn: int) -> None:
        if turn != self.turn:
            return
        silent_ms = self.world.now_ms - self.heard_ms
        if silent_ms >= SILENCE_MS:
            self._ended(TimeoutError("the master is silent"))
        else:
            self.member.at(SILENCE_MS - silent_ms + 1, self._look, turn)

    def _read(self, reply: Reply) -> tuple[ha.FetchResponse, Any]:
        if isinstance(reply, ServiceError):
            raise reply
        memory = self.memory.lend(len(reply))
        memory[:] = reply
        return self.memory.read(memory)

    def _began(self, session: FollowSession, connection: Connection, address: Address, reply: Reply) -> None:
        """See HaFollower._follow_once."""
        response, part = self._read(reply)
        if session.began(response, part):
            self.session = session
            follower = self.follower
            follower._complaint = ""
            self._note(session)
            follower._heard(session)
            self._fetch()
        elif response.status == ha.FETCH_STATUS_DIVERGED:
            self.follower._truncate(_MasterClient(connection, address))  # type: ignore[arg-type]
        else:
            self._ended(None)

    def _note(self, session: FollowSession) -> None:
        self.follower._note(session)
        assert self.connection is not None
        self.member.line = self.connection.master.line

    def _fetch(self) -> None:
        """See HaFollower._fetch."""
        session, connection, turn = self.session, self.connection, self.turn
        assert session is not None
        assert connection is not None
        while self.under_way < FETCHES:
            self.follower._check_may_speak()
            request = session.fetch_request(HEARTBEAT_MS)
            self.under_way += 1
            connection.ask(request.SerializeToString(), lambda reply: self._take(turn, lambda: self._fetched(reply)))

    def _fetched(self, reply: Reply) -> None:
        session = self.session
        assert session is not None
        self.under_way -= 1
        if not session.took(*self._read(reply)):
            self._ended(None)
            return
        follower = self.follower
        follower._heard(session)
        self._note(session)
        self.world.check_slave(self.member)
        self._fetch()


class SimDriver(LeadershipDriver):
    """Without threads."""

    def __init__(self, member: Member) -> None:
        super().__init__(None, member.lease_clock_ms, member.do_soon, member.broker_id)  # type: ignore[arg-type]
        self.on_fork = lambda point: member.do_soon(CutFork(member, point))  # type: ignore[arg-type]
        self._askers = SimpleNamespace(submit=lambda function, ask: member.ask_etcd(ask))  # type: ignore[assignment]
        self._thread = _NO_THREAD  # type: ignore[assignment]

    @property
    def machine(self) -> Any:
        return self._begun

    def tick(self) -> float:
        """See `_run`. Returns the pause."""
        with self._lock:
            now_ms = self.now_ms()
            self._pass_on(self._begun.tick(now_ms))
            is_hurried = self._begun.is_hurried(now_ms)
        self._tell_standing()
        return HURRIED_TICK_MS if is_hurried else TICK_MS

    def answered(self, number: int, result: Result) -> None:
        """See `_ask`."""
        with self._lock:
            self._pass_on(self._begun.answered(number, result, self.now_ms()))
        self._tell_standing()


class Member:
    """See the module's docstring."""

    def __init__(self, world: FailoverWorld, number: int) -> None:
        self.world = world
        self.name, self.broker_id = f"b{number}", number + 1
        self.address = f"10.0.0.{number + 1}:1"
        self.clock = MemberClock(world)
        self.disk = SimDisk()
        self.boots = 1
        self.life = 0
        self.is_up = False
        self.paused_until_ms = 0.0
        self.waiting: list[tuple[Callable[..., None], tuple[Any, ...], Any]] = []
        self.disk_delay_ms = 0.0
        self.is_doubtful = self.is_damaged = self.is_damaged_at_end = self.is_replaced = self.is_cut = False
        """For the atlas of faults: whether its copy counts. `is_cut`: its start has cut a torn tail, and it has not caught up.
        `is_replaced`: until a process has begun there.
        """
        self.config = BrokerConfig(
            broker_name=NAME, broker_role="SLAVE", broker_id=self.broker_id, ha=world.ha, store=world.store_config,
            etcd=DecidedElection(member_timeout_ms=LEASE_MS),
        )  # fmt: skip
        self.line = self.kept_line = 0
        """The line of log time that it has begun, or has heard of; that of the file of log time. 0: its own clock."""
        self.server: FakeServer | None = None
        self.open_sends: dict[int, Callable[[Reply], None]] = {}

    # Its process.

    def at(self, delay_ms: float, function: Callable[..., None], *arguments: Any) -> None:
        """Calls it then, if this process lives that long."""
        self.world.at(delay_ms, function, *arguments, life=(self, self.life))

    def lease_clock_ms(self) -> int:
        """CLOCK_BOOTTIME; planted bugs read another one."""
        return self.clock.boot_ms()

    @property
    def member(self) -> str:
        return str(self.store.id)

    def start(self) -> None:
        """A process begins. See ElectedBroker.start."""
        world = self.world
        self.life += 1
        self.todo: deque[Effect | CutFork | str] = deque()
        self.is_work_due = self.is_changing = False
        self.asked: set[int] = set()
        self.other_looks = 0
        self.healed_reopens = HealedReopens()
        self.open_sends.clear()
        self.is_up = True
        self.following = Following(self)
        self._open_store()
        self.is_replaced = False
        self.tail = TailFile(self.disk, ROOT, f"boot {self.boots}")
        store = self.store
        may_be_lost = self.tail.open(
            syncs=world.sync_flush, is_lost=store.has_lost_its_end, was_cut=store.has_cut_its_end
        )
        world.fired["torn tails"] += store.has_cut_its_end
        self.is_cut = self.tail.was_cut
        self.driver = SimDriver(self)
        self._serve_as_slave()
        self.driver.begin(
            Settings(
                self.member, self.address, lease_ttl_ms=LEASE_MS, renew_interval_ms=270, read_interval_ms=120, member_timeout_ms=LEASE_MS,
                member_lost_timeout_ms=200, hand_over_timeout_ms=1_000, new_name_wait_ms=1_000,
                broker_id=self.broker_id, process=f"{self.name} {self.life}", place=self.name,
            ),
            store.epochs.highest_epoch,
            end_position=store.appended_position,
            tail_may_be_lost=may_be_lost,
            is_damaged=bool(store.skipped_ranges),
            cut_end=_cut_end_of(store) if self.tail.was_cut else None,
            start_number=self.tail.start_number,
        )  # fmt: skip
        rng = world.rng
        self.at(rng.uniform(0, TICK_MS), self._tick)
        self.at(rng.uniform(0, LOOK_MS), self._watch)
        self.at(rng.uniform(0, FLUSH_MS), self._keep)
        if self.is_cut or may_be_lost:
            world.began_in_doubt(self)

    def go_down(self, kind: str) -> None:
        """A kill, or a power cut."""
        if not self.is_up:
            return
        world = self.world
        world.note_state(self)
        self._break_connections()
        self.is_up = False
        self.life += 1
        self.server = None
        self.waiting.clear()
        self.paused_until_ms = 0.0
        self.disk.plan = None
        if kind == "power":
            self.boots += 1
            self.kept_line = 0
            self.is_doubtful = self.is_doubtful or not world.sync_flush
            self.disk = self.disk.crash(world.rng)
        else:
            self.disk = self.disk.killed()

    def _break_connections(self) -> None:
        """Whoever has one with this process notices, if a word of it comes through."""
        world = self.world
        for connection in world.connections:
            if connection.slave is self:
                connection.hang_up()
            elif connection.master is self and connection.lives[1] == self.life:
                connection.end_for_slave()
        sends, self.open_sends = self.open_sends, {}
        if (self.name, "clients") not in world.cut:
            for on_done in sends.values():
                world.at(BREAK_MS, on_done, world.connection_lost)

    def _tick(self) -> None:
        self.world.check_alone(self)
        self.world.check_log_time(self)
        self.at(self.driver.tick(), self._tick)

    # Etcd.

    def ask_etcd(self, ask: Ask) -> None:
        self.asked.add(ask.number)
        self.world.ask_etcd(self, ask)
        self.at(self.world.etcd_timeout_ms, self.answered, ask.number, None)

    def answered(self, number: int, result: Result) -> None:
        """Etcd's answer, or the time-out."""
        if number in self.asked:
            self.asked.discard(number)
            self.driver.answered(number, result)

    # Services.

    def _open_store(self) -> None:
        world = self.world
        self.store = Store.open(
            ROOT, world.store_config, clock=self.clock, disk=self.disk, background=False, draw=world.draw, follows=True
        )

    def _server(self, *services: tuple[Any, str, Any]) -> FakeServer:
        table = DispatchTable()
        for module, name, service in services:
            table.add_service(module.DESCRIPTOR.services_by_name[name], service)
        if not self.store.is_leading:
            refuse_changes(table, not_master(NAME, self.broker_id))
        server = FakeServer(table)
        server.lanes = {name: MemberLane(self, name) for name in server.lanes}
        return server

    def _begin_log_time(self) -> LogTime:
        """See Broker."""
        file = LogTimeFile(self.disk, ROOT, f"boot {self.boots}", self.clock.boot_ms)
        self.line = self.kept_line if file.load() is not None else 0
        self.log_time = LogTime(self.clock, self.store.pending.log_time_ms, file, self.clock.boot_ms)
        self.keep_log_time()
        return self.log_time

    def keep_log_time(self) -> None:
        """See Broker."""
        self.log_time.save()
        self.kept_line = self.line

    def _serve_as_slave(self) -> None:
        store = self.store
        store.on_writer = _call
        self.replication = replication = Replication(
            store, self.config, NAME, self.clock, self.world.draw, FollowerWriter(), lambda: None, self.driver, self._begin_log_time()
        )
        follower = replication.follower
        assert follower is not None
        replication._confirmed_file = follower._confirmed_file = ConfirmedFile(self.disk, ROOT)
        follower._begin = self.following.begin  # type: ignore[method-assign]
        logs = LogService(store, NAME, PART_BYTES)
        self.server = self._server((ha, "HaService", replication.service), (log_service_pb2, "LogService", logs))
        follower.start(self.address)

    def _serve_as_master(self, epoch: int) -> None:
        store, clock, world = self.store, self.clock, self.world
        config = BrokerConfig(
            broker_name=NAME, broker_role="SYNC_MASTER", broker_id=0, ha=world.ha, store=world.store_config, etcd=self.config.etcd,
            default_queues=QUEUES,
        )  # fmt: skip
        store.on_writer = _call
        permit = WritePermit()
        writer = SystemWriter(permit)
        self.replication = replication = Replication(
            store, config, NAME, clock, world.draw, FollowerWriter(), lambda: None, self.driver, self._begin_log_time()
        )
        file = replication._confirmed_file = ConfirmedFile(self.disk, ROOT)
        replication._notes = SimpleNamespace(  # type: ignore[assignment]
            start=lambda: self.at(NOTE_MS, self._note_confirmed, file, store), close=lambda: file.write(store.positions.confirmed)
        )
        self.waiting_answers = waiting = WaitingAnswers(store, clock)
        log_time = self.log_time
        delays = Delays(log_time, config.delay_levels_ms, store.pending, count_max=100, size_max_bytes=1 << 20)
        recalls = Recalls(store, config, NAME, writer, waiting, log_time)
        handles = Handles(NAME)
        halves = HalfSends(store.transactions, handles, count_max=100, size_max_bytes=1 << 20)
        checks = TransactionChecks(store, writer, waiting, log_time, clock, handles)
        self.send_service = SendService(store, config, clock, waiting, delays, recalls, halves, checks)
        changes = StateChanges(store, writer, waiting, config, lambda: self.send_service.shortage)
        send_backs = SendBacks(store, config, writer, waiting, delays, log_time)
        groups = GroupService(store, permit, changes, config.delay_levels_ms, lambda _: None, send_backs, lambda _, __: "")
        letters = DeadLetterService(store, writer, permit, changes, clock)
        nobody: Any = None
        admin = AdminService(
            store, config, broker_name=NAME, version="1", start_time_ms=0, lane_status=list, announce=lambda: None,
            write_refusal=lambda: "", commits=nobody, members=nobody, a_member=lambda _: "", permit=permit, changes=changes,
            on_grown=lambda _: None,
        )  # fmt: skip
        server = self.server = self._server(
            (ha, "HaService", replication.service),
            (log_service_pb2, "LogService", LogService(store, NAME, PART_BYTES)),
            (send_service_pb2, "SendService", self.send_service),
            (group_service_pb2, "GroupService", groups),
            (dead_letter_service_pb2, "DeadLetterService", letters),
            (admin_service_pb2, "AdminService", admin),
        )
        lane = server.lanes["send"]
        writer.start(store, lane)
        store.request_flush = self._request_flush
        self.is_flush_due = False
        store.positions.on_flushed.append(lambda _: lane.post(waiting.resolve))
        replication.begin(server.lanes["ha"], self.send_service, waiting, writer)
        permit.give()
        world.led(self, epoch)

    def _note_confirmed(self, file: ConfirmedFile, store: Store) -> None:
        """See ConfirmedNotes."""
        if store is self.store and store.is_leading:
            file.write(store.positions.confirmed)
            self.at(NOTE_MS, self._note_confirmed, file, store)

    def _stop_services(self, *, keeps_store: bool) -> None:
        """See Broker.close."""
        self.world.note_state(self)
        self._break_connections()
        server, self.server = self.server, None
        self.following.hang_up()
        replication = self.replication
        if replication.follower is not None:
            replication.follower.stop()
            if not keeps_store:
                replication._confirmed_file.write(self.store.positions.confirmed)
        else:
            replication.service.stop()
            replication._notes.close()
        for lane in server.lanes.values() if server is not None else ():
            lane.close()  # type: ignore[attr-defined]
        self.keep_log_time()
        if keeps_store:
            self.store.forget_listeners()
        else:
            self.store.close()

    # What clients and others ask.

    def take_call(self, path: str, payload: bytes, number: int, on_done: Callable[[Reply], None]) -> None:
        """A client's send has come, or an operator's change."""
        server = self.server
        if server is None or path not in server.table.by_path:
            on_done(self.world.not_master)
            return
        self.open_sends[number] = on_done

        def done(reply: Reply) -> None:
            if self.open_sends.pop(number, None) is not None:
                on_done(reply)

        def kind(*arguments: Any, **settings: Any) -> MemberCall:
            call = MemberCall(*arguments, **settings)
            call.on_done = done
            return call

        self.world.check_writer(self)
        server.call(path, payload, kind=kind)  # type: ignore[arg-type]

    def ask_at_once(self, other: Member, path: str, payload: bytes) -> bytes:
        """An answer without delay, if both ways are open."""
        cut = self.world.cut
        is_there = other.is_up and other.server is not None and other.paused_until_ms <= self.world.now_ms
        if not is_there or (self.name, other.name) in cut or (other.name, self.name) in cut:
            raise ConnectionError(f"{other.name} does not answer")
        assert other.server is not None
        replies: list[Reply] = []

        def kind(*arguments: Any, **settings: Any) -> MemberCall:
            call = MemberCall(*arguments, **settings)
            call.on_done = replies.append
            return call

        other.server.call(path, payload, kind=kind)  # type: ignore[arg-type]
        (reply,) = replies
        if isinstance(reply, ServiceError):
            raise reply
        return reply

    # In the background.

    def _request_flush(self) -> None:
        if not self.is_flush_due:
            self.is_flush_due = True
            self.at(self.disk_delay_ms + self.world.rng.uniform(0.5, 3), self._flush)

    def _flush(self) -> None:
        self.is_flush_due = False
        self.store.flush()

    def _keep(self) -> None:
        """What the upkeep does: what is not synced for its sake is so some time later; checkpoints."""
        rng, store = self.world.rng, self.store
        if not self.is_changing:
            self.keep_log_time()
            store.flush()
            if rng.random() < 0.15 and not store.log_failure:
                try:
                    store.checkpoint()
                except OSError:
                    self.world.fired["checkpoint failed"] += 1
        self.at(FLUSH_MS * rng.uniform(0.5, 1.5) + self.disk_delay_ms, self._keep)

    def _watch(self) -> None:
        """See ElectedBroker._watch_log and ReplicaHealing._run."""
        self.at(LOOK_MS, self._watch)
        if self.is_changing or self.todo:
            return
        store, driver = self.store, self.driver
        if store.log_failure and "truncated" not in store.log_failure:
            self.do_soon("log failed")
            return
        if driver.role is Role.FOLLOWING and (driver.is_damaged or store.has_healed_skipped_parts):
            if is_to_be_reopened(store, self.healed_reopens, self.clock.boot_ms()):
                self.world.fired["opened again when it was healed"] += 1
                self.do_soon("reopen")
        if driver.is_unable and driver.role is Role.FOLLOWING:
            self._try_room()
        self._look_for_room()
        if store.unhealed_ranges:
            self.heal()

    def heal(self) -> bool:
        """Takes from the others what is damaged here. Returns whether all is healed."""
        healing = ReplicaHealing(self.store, lambda: [member for member in self.world.members if member is not self], NAME)  # type: ignore[misc]
        healing._fetch = self._fetch_range  # type: ignore[assignment, method-assign]
        is_healed = healing.heal(self.store.unhealed_ranges)
        self.world.fired["damage healed"] += is_healed
        return is_healed

    def _fetch_range(self, damage: Any, other: Member) -> bytes:
        request = log_service_pb2.ReadLogRequest(
            broker_name=NAME, position=damage.start_position, size_max_bytes=damage.end_position - damage.start_position
        )
        payload = self.ask_at_once(other, READ_LOG, request.SerializeToString())
        return log_service_pb2.ReadLogResponse.FromString(payload).log

    def _try_room(self) -> None:
        try:
            self.store.check_room()
        except (OSError, StoreFailedError):
            return
        self.driver.able()

    def _look_for_room(self) -> None:
        """See ElectedBroker._look_for_room."""
        store, driver = self.store, self.driver
        lack = _lack_of_room(store, is_known=driver.is_full)
        self.other_looks = self.other_looks + 1 if bool(lack) is not driver.is_full else 0
        if self.other_looks >= (1 if lack and not store.is_leading else FULL_LOOKS):
            self.other_looks = 0
            self.world.fired["told that its disk is full"] += bool(lack)
            driver.full(lack)

    # Roles: see ElectedBroker.

    def do_soon(self, item: Effect | CutFork | str) -> None:
        self.todo.append(item)
        self._work_soon()

    def _work_soon(self) -> None:
        if not self.is_work_due:
            self.is_work_due = True
            self.at(self.world.rng.uniform(0.1, 3), self._work)

    def _work(self) -> None:
        self.is_work_due = False
        while self.todo and not self.is_changing:
            self._do(self.todo.popleft())

    def _do(self, item: Effect | CutFork | str) -> None:
        driver, rng = self.driver, self.world.rng
        follower = self.replication.follower
        if isinstance(item, Follow):
            if follower is not None:
                follower.go_on()
        elif isinstance(item, StopFollowing):
            self._stop_following()
            driver.following_stopped(self.store.epochs.highest_epoch)
        elif isinstance(item, Lead):
            self.is_changing = True
            store = self.store
            was_healed = not store.log_failure and store.has_healed_skipped_parts
            self.world.fired["opened again to lead, since it was healed"] += was_healed
            skipped = store.skipped_ranges if was_healed else ()
            had_lost_its_end = was_healed and store.has_lost_its_end
            self._stop_services(keeps_store=not (store.log_failure or was_healed))
            self.at(rng.uniform(1, 60), self._lead, item.epoch, was_healed, skipped, had_lost_its_end)
        elif isinstance(item, NoteStart):
            self.world.fired["older copy found"] += item.is_older_copy
            try:
                self.tail.note_start(item.number, is_older_copy=item.is_older_copy)
            except OSError:
                self.world.fired["start not noted"] += 1
            driver.start_noted(self.tail.start_number)
        elif isinstance(item, TailSettled) and leadership.may_forget_doubt(driver):
            try:
                self.tail.settle()
            except OSError:  # Then the next start leaves the set once more.
                self.world.fired["doubt not settled"] += 1
            self.is_doubtful = False
        elif isinstance(item, CutSettled) and leadership.may_forget_cut(driver):
            self.world.fired["led with a cut log"] += driver.role is not Role.FOLLOWING
            try:
                self.tail.settle_cut()
            except OSError:  # Then the next start waits for others once more.
                self.world.fired["cut not settled"] += 1
            self.is_cut = self.is_damaged_at_end = False
        elif isinstance(item, StopLeading):
            driver.machine.is_leaving = False
            self._reopen_soon()
        elif isinstance(item, CutFork):
            if driver.is_damaged and follower is not None:
                self._cut_fork(item.point)
        elif item == "reopen":
            if follower is not None:
                self._reopen_soon()
        elif item == "log failed" and self.store.log_failure:
            self._leave_failed_log()

    def _stop_following(self) -> None:
        follower = self.replication.follower
        if follower is not None:
            follower.stop()
            self.following.hang_up()

    def _leave_failed_log(self) -> None:
        world, driver = self.world, self.driver
        world.fired["log failed"] += 1
        if driver.role is Role.FOLLOWING:
            self._stop_following()
            self._doubt_tail()
            self._reopen_soon()
        elif driver.machine.has_successor and (self.name, "etcd") not in world.cut and world.etcd.is_up:
            driver.machine.is_leaving = True
            world.etcd.commit(Transaction((Compare(ORDER, 0),), (Put(ORDER, encode_order(SWITCH, "")),)))

    def _cut_fork(self, point: LogPoint) -> None:
        """See ElectedBroker._cut_fork."""
        self._stop_following()
        self._doubt_tail()
        if self.driver.role is not Role.FOLLOWING:
            return
        try:
            self.store.truncate_to(point)
        except (OSError, StoreError):
            self.world.fired["fork not cut yet"] += 1
            if self.replication.follower is not None:
                self.replication.follower.go_on()
            return
        self.world.fired["damaged fork cut"] += 1
        self._reopen_soon()

    def _doubt_tail(self) -> None:
        self.is_doubtful = True
        self.driver.tail_may_be_lost()
        try:
            self.tail.doubt()
        except OSError:
            self.world.fired["doubt not written"] += 1

    def _reopen_soon(self) -> None:
        self.is_changing = True
        self._stop_services(keeps_store=False)
        self.at(self.world.rng.uniform(1, 60), self._reopen)

    def _reopen(self) -> None:
        """Opens the store to follow, as soon as its disk has room."""
        try:
            self._open_store()
        except OSError:
            self.world.fired["opened later"] += 1
            self.at(LOOK_MS, self._reopen)
            return
        if self.store.has_lost_its_end:
            self._doubt_tail()
        self._note_cut()
        self.driver.damaged(bool(self.store.skipped_ranges))
        self._serve_as_slave()
        self._changed()

    def _note_cut(self) -> None:
        store = self.store
        if store.has_cut_its_end:
            self.is_cut = True
            self.tail.cut()
        if self.tail.was_cut:
            self.driver.end_was_cut(_cut_end_of(store))

    def _changed(self) -> None:
        self.is_changing = False
        self._work_soon()

    def _lead(self, epoch: int, was_healed: bool, skipped: Collection[DamagedRange], had_lost_its_end: bool) -> None:
        """`skipped`, `had_lost_its_end`: before the store was closed to be opened again, since it was healed."""
        driver = self.driver
        if was_healed or self.store.is_closed_clean or self.store.log_failure:
            try:
                self._open_store()
            except OSError as error:
                driver.unable(epoch, str(error))
                self._reopen()
                return
            driver.damaged(bool(self.store.skipped_ranges))
            self._note_cut()
            has_lost_its_end = self.store.has_lost_its_end and not had_lost_its_end
            if has_lost_its_end or _has_skipped_more(self.store, skipped) or self.store.has_cut_its_end:
                driver.unable(epoch, "its log was opened again, and is damaged")
                if has_lost_its_end:
                    self._doubt_tail()
                self._serve_as_slave()
                self._changed()
                return
        store = self.store
        try:
            store.lead(epoch, waits_for_replicas=True)
        except (OSError, StoreFailedError) as error:
            self.world.fired["cannot lead"] += 1
            driver.unable(epoch, str(error))
            if store.log_failure:
                store.close()
                self._reopen()
                return
            self._serve_as_slave()
            self._changed()
            return
        driver.opened(epoch, store.appended_position)
        self._serve_as_master(epoch)
        self._changed()

    # Faults.

    def fill_disk(self) -> None:
        self.disk.capacity_bytes = self.disk._used_bytes() + 2_000

    def free_disk(self) -> None:
        self.disk.capacity_bytes = CAPACITY_BYTES

    def replace_disk(self) -> None:
        """An empty folder in place of the store."""
        self.disk = SimDisk()
        self.boots += 1
        self.is_doubtful = self.is_damaged = self.is_damaged_at_end = self.is_cut = False
        self.kept_line = 0
        self.is_replaced = True


    def go_back(self, older: SimDisk) -> None:
        """Its folder is an older copy of itself."""
        self.disk = older.killed()
        self.disk.capacity_bytes = CAPACITY_BYTES
        self.is_doubtful, self.kept_line = True, 0


def _call(function: Callable[[], None]) -> None:
    function()
