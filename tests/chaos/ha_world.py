"""A SYNC_MASTER, its slaves and their network in one process, by one seed: crashes of all, cut connections, slow answers, strangers.

    R1   a send that was answered SEND_OK was written on as many copies as it waited for; or it is synced there, where the master syncs
    R2   nothing is readable, on the master or on a slave, before that many copies have it, as long as they are in sync
    R3   a slave's log is its master's, octet by octet, up to where its session has come
    R4   what nobody has sent or acknowledged by the rules moves nothing
    R5   when all is quiet, every slave has everything, and sends are answered SEND_OK
    R6   no crash and no power cut makes a master look like an older copy of itself, which no slave would follow

Real are HaService, the table of replicas, what follows for sends (`Replication`), `FollowSession` and the stores, on simulated disks. The
world plays the sockets, the clock, and the thread of each slave. A power cut of the master may take back what it has not synced: SEND_OK of
that time is judged against the slaves alone.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

from protomq.v1 import ha_service_pb2 as ha
from protomq.wire.record import RecordTemplate, encode_record_field
from protomq_broker.config import BrokerConfig
from protomq_broker.fetch_answers import AnswerMemory
from protomq_broker.follower_writer import FollowerWriter
from protomq_broker.ha_follower import kept_safely
from protomq_broker.ha_session import FollowSession
from protomq_broker.replication import Replication
from protomq_broker.store.config import StoreConfig
from protomq_broker.store.errors import StoreError
from protomq_broker.store.log.agreement import START, last_agreed
from protomq_broker.store.log.append import AppendRequest
from protomq_broker.store.log.record_region import prove_region
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_broker.testing.simdisk import Fault, SimDisk, SimulatedCrash
from protomq_ha.intake import LogPart
from protomq_ha.replicas import Confirmation
from protomq_ha.roles import HaConfig
from protomq_runtime.dispatch import DispatchTable
from protomq_runtime.errors import ServiceError
from protomq_runtime.testing import FakeCall, FakeServer

from .checker import Violation
from .store_world import WorldClock

SEGMENT_SIZE_BYTES: Final = 4096
HEARTBEAT_MS: Final = 100
FETCH: Final = "/protomq.v1.HaService/Fetch"
ACKNOWLEDGE: Final = "/protomq.v1.HaService/Acknowledge"
QUIET_ROUNDS: Final = 400


class _Sent(NamedTuple):
    """A send that waits for its answer: where its append ends, and its bytes' place."""

    start: int
    end: int


class _Master:
    """A store that leads, its HaService on a lane without a thread, and what follows for sends."""

    def __init__(self, world: HaWorld, disk: SimDisk) -> None:
        self.disk = disk
        config = BrokerConfig(
            broker_name="b",
            broker_role="SYNC_MASTER",
            ha=world.ha,
            store=world.store_config,
        )
        self.store = Store.open(
            "/s", config.store, clock=world.clock, disk=disk, background=False, draw=world.draw
        )
        self.send = SimpleNamespace(confirmation=Confirmation(), shortage=None)
        waiting = SimpleNamespace(resolve=lambda: None)
        writer = SimpleNamespace(post=lambda function: function())
        replication = Replication(
            self.store, config, "b", world.clock, world.draw, FollowerWriter(), lambda: None
        )
        table = DispatchTable()
        service = ha.DESCRIPTOR.services_by_name["HaService"]
        table.add_service(service, replication.service)
        self.replication = replication
        self.server = FakeServer(table)
        self.lane = self.server.lanes["ha"]
        replication.begin(self.lane, self.send, waiting, writer)  # type: ignore[arg-type]
        self.lane.run()
        self.sent: list[_Sent] = []


class _Slave:
    """A store that follows, and its thread's place in the exchange."""

    def __init__(self, world: HaWorld, number: int) -> None:
        self.world = world
        self.number = number
        self.disk = SimDisk()
        self.store: Store | None = None
        self.session: FollowSession | None = None
        self.memory = AnswerMemory()
        self.calls: deque[FakeCall] = deque()
        self.cut_position = 0
        """What it had written when a power cut took some of it, of the log of the master that is."""

    def start(self) -> None:
        """Opens it; a truncation that was intended is done."""
        self.store = Store.open(
            "/s",
            self.world.store_config,
            clock=self.world.clock,
            disk=self.disk,
            background=False,
            draw=self.world.draw,
            follows=True,
        )

    def hang_up(self) -> None:
        """The connection is cut: both sides notice."""
        for call in self.calls:
            call.hang_up()
        self.calls.clear()
        self.session = None

    def go_down(self, kind: str) -> None:
        """A kill, or a power cut."""
        self.hang_up()
        if self.store is not None and kind == "power":
            self.cut_position = max(self.cut_position, self.store.appended_position)
        self.store = None
        self.disk.plan = None
        self.disk = self.disk.crash(self.world.rng) if kind == "power" else self.disk.killed()


class HaWorld:
    """See the module's docstring."""

    def __init__(self, seed: int, fired: Counter[str]) -> None:
        self.rng = random.Random(f"ha {seed}")
        self.fired = fired
        self.clock = WorldClock()
        self.found: list[Violation] = []
        self.sync_flush = bool(seed % 2)
        copies = 2 + seed // 2 % 2
        self.ha = HaConfig(
            in_sync_replicas=copies,
            min_in_sync_replicas=1 + seed // 4 % copies,
            heartbeat_interval_ms=HEARTBEAT_MS,
            timeout_ms=10 * HEARTBEAT_MS,
            gap_max_bytes=20_000,
            transfer_size_bytes=self.rng.choice((4 << 10, 16 << 10)),
        )
        self.store_config = StoreConfig(
            segment_size_bytes=SEGMENT_SIZE_BYTES,
            sync_flush=self.sync_flush,
            disk_delete_ratio=1.0,
            disk_force_ratio=1.0,
            disk_refuse_ratio=1.0,
        )
        self._draws = 0
        self._part_sizes = random.Random(f"part sizes {seed}")
        self.sequence = 0
        self.master = _Master(self, SimDisk())
        self.slaves = [_Slave(self, number) for number in range(1, copies)]
        for slave in self.slaves:
            slave.start()

    def draw(self) -> int:
        self._draws += 1
        return self._draws

    def say(self, rule: str, message: str) -> None:
        self.found.append(Violation(rule, message))

    # What clients do.

    def send(self) -> None:
        """A message, unless too few copies are in sync."""
        master = self.master
        if master.send.shortage is not None:
            self.fired["refused"] += 1
            return
        if master.store.topics.find("t") is None:
            master.store.topics.create(TopicConfig("t"))
        template = RecordTemplate("t", 7, 0)
        body = b"%d " % self.sequence * self.rng.choice((1, 20, 150))
        record = template.encode(body, self.sequence, 5)
        self.sequence += 1
        region = prove_region(bytearray(encode_record_field(record)), "t", [len(record)])
        assert region is not None
        start = master.store.appended_position
        end = master.store.append([AppendRequest(region, 0)])
        master.sent.append(_Sent(start, end))
        if self.sync_flush and self.rng.random() < 0.7:
            master.store.flush()

    def master_syncs(self) -> None:
        self.master.store.flush()

    def checkpoint(self) -> None:
        """And retention, now and then."""
        store = self.master.store
        store.checkpoint()
        kept = store.keep_from_position()
        end = self.rng.randrange(store.appended_position + 1)
        if kept is not None and self.rng.random() < 0.5:
            store.delete_segments_below(min(end, kept))

    def answer_sends(self) -> None:
        """What SendService does: what is readable is answered with the status of the moment. R1."""
        master = self.master
        readable = master.store.readable_position
        while master.sent and master.sent[0].end <= readable:
            sent = master.sent.pop(0)
            if not master.send.confirmation.has_all_copies(sent.end):
                self.fired["SLAVE_NOT_AVAILABLE"] += 1
                continue
            self.fired["SEND_OK"] += 1
            copies = 1 + sum(self._has(slave, sent) for slave in self.slaves)
            if copies < self.ha.in_sync_replicas:
                self.say("R1", f"SEND_OK for {sent}, and {copies} copies have it")

    def _has(self, slave: _Slave, sent: _Sent) -> bool:
        store = slave.store
        if not self.sync_flush and sent.end <= slave.cut_position:
            # It was written there, as promised. A power cut may take that, before the last of the other slaves has it.
            return True
        if store is None:  # it has what its disk has
            return sent.end <= slave_end(slave)
        has = store.flushed_position if self.sync_flush else store.appended_position
        if has < sent.end or store.min_position > sent.start:
            return False
        return log_of(store, sent.start, sent.end) == log_of(self.master.store, sent.start, sent.end)

    # What slaves do.

    def some_slave(self) -> _Slave:
        return self.rng.choice(self.slaves)

    def slave_steps(self, slave: _Slave | None = None) -> None:
        """A slave's thread gets a turn: it connects, asks, or takes an answer."""
        slave = slave or self.some_slave()
        if slave.store is None:
            slave.start()
        try:
            if slave.session is None:
                self._connect(slave)
            elif len(slave.calls) < 2:
                request = slave.session.fetch_request(HEARTBEAT_MS)
                # Most slaves ask for as much as the master gives, those on slow links for less.
                request.size_max_bytes = self._part_sizes.choice((0, 0, 0, 1_500))
                slave.calls.append(self.master.server.call(FETCH, request))
            else:
                self._take_answer(slave)
        except SimulatedCrash:
            self.fired["crash within a step"] += 1
            slave.go_down(self.rng.choice(("kill", "power")))
        except (ServiceError, StoreError, ValueError) as error:
            self.fired[f"session ended: {type(error).__name__}"] += 1
            slave.hang_up()

    def _connect(self, slave: _Slave) -> None:
        assert slave.store is not None
        session = FollowSession(slave.store, lambda function: function())
        request = session.begin_request("b", slave.number, "")
        answer, part = self._response(slave, self.master.server.call(FETCH, request))
        if session.began(answer, part):
            slave.session = session
        elif answer.status == ha.FETCH_STATUS_DIVERGED:
            self.fired["truncated"] += 1
            point = last_agreed(slave.store, self.master.store, slave.store.epoch) or START
            if kept := kept_safely(slave.store, point.position):
                self.say("R6", f"slave {slave.number} would not drop what stands behind {point.position}: it was safe up to {kept}")
            slave.store.truncate_to(point)
            slave.go_down("kill")

    def _take_answer(self, slave: _Slave) -> None:
        answered = [call for call in slave.calls if call.answered]
        if not answered or slave.session is None:
            return
        # Over gRPC the answers of two calls may come in any order.
        call = self.rng.choice(answered)
        slave.calls.remove(call)
        if not slave.session.took(*self._response(slave, call)):
            slave.hang_up()
            return
        self._compare(slave)

    def _response(self, slave: _Slave, call: FakeCall) -> tuple[ha.FetchResponse, LogPart]:
        """An answer, in the same memory as the slave's last one."""
        response: Any = call.response(lambda region: region.file.read(region.offset, region.size_bytes))  # type: ignore[attr-defined]
        payload = response.SerializeToString()
        memory = slave.memory.lend(len(payload))
        memory[:] = payload
        return slave.memory.read(memory)

    def _compare(self, slave: _Slave) -> None:
        """R2 and R3."""
        ours, theirs = slave.store, self.master.store
        assert ours is not None
        start, end = max(ours.min_position, theirs.min_position), ours.appended_position
        start = max(start, end - 3 * SEGMENT_SIZE_BYTES)
        if start < end and log_of(ours, start, end) != log_of(theirs, start, end):
            self.say("R3", f"slave {slave.number}'s log differs within {start} and {end}")
        if ours.readable_position > theirs.readable_position:
            self.say(
                "R2",
                f"slave {slave.number} gives {ours.readable_position}, {theirs.readable_position} is confirmed",
            )

    def check_readable(self) -> None:
        """R2, of the master: what counts as confirmed stands on as many slaves as are waited for, also while some are not in sync."""
        store = self.master.store
        verdict = self.master.replication.service.verdict
        wanted = max(min(self.ha.in_sync_replicas, verdict.in_sync_count), self.ha.min_in_sync_replicas) - 1
        if not store.positions.waits_for_replicas or not verdict.confirmed_position or wanted <= 0:
            return
        self.fired["judged with all in sync" if verdict.in_sync_count > len(self.slaves) else "judged with some in sync"] += 1
        # Whoever is down is looked at only if the others are too few: that takes an opening of its store.
        having = 0
        for slave in sorted(self.slaves, key=lambda each: each.store is None):
            if having < wanted and self._written(slave) >= verdict.confirmed_position:
                having += 1
        if having < wanted:
            has = [self._written(slave) for slave in self.slaves]
            self.say("R2", f"{verdict.confirmed_position} counts as confirmed, {wanted} are waited for, the slaves have {has}")

    def _written(self, slave: _Slave) -> int:
        """Up to where a slave has the master's log, or has had it before a power cut took it, as far as that counts."""
        store = slave.store
        if store is None:
            has = slave_end(slave)
        else:
            has = store.flushed_position if self.sync_flush else store.appended_position
        return has if self.sync_flush else max(has, slave.cut_position)

    def slave_syncs(self) -> None:
        self._background(lambda store: store.flush())

    def slave_checkpoints(self) -> None:
        self._background(lambda store: store.checkpoint())

    def _background(self, work: Callable[[Store], object]) -> None:
        slave = self.some_slave()
        if slave.store is None:
            return
        try:
            work(slave.store)
        except SimulatedCrash:
            self.fired["crash in the background"] += 1
            slave.go_down(self.rng.choice(("kill", "power")))

    # Faults.

    def cut(self) -> None:
        self.some_slave().hang_up()

    def crash_slave(self) -> None:
        """At once, or at one of the next I/Os."""
        slave = self.some_slave()
        if slave.store is None:
            return
        if self.rng.random() < 0.5:
            slave.disk.fail_at(self.rng.randint(1, 12), Fault.CRASH)
        else:
            slave.go_down(self.rng.choice(("kill", "power")))

    def crash_master(self) -> None:
        """It comes back in a new epoch; all connections are gone, and sends without an answer with them."""
        kind = self.rng.choice(("kill", "power"))
        self.fired[f"master: {kind}"] += 1
        disk = self.master.disk
        for slave in self.slaves:
            slave.hang_up()
            slave.cut_position = 0
        self.master = _Master(self, disk.crash(self.rng) if kind == "power" else disk.killed())

    def stranger(self) -> None:
        """R4."""
        server, service = self.master.server, self.master.replication.service
        before = (service.verdict, [view[:6] for view in service.views])
        position = self.rng.randrange(1 << 20)
        sessions = [slave.session for slave in self.slaves if slave.session is not None]
        requests: list[tuple[str, Any]] = [
            (ACKNOWLEDGE, ha.AcknowledgeRequest(session=1 << 60, written_position=position)),
            (FETCH, ha.FetchRequest(broker_name="other", broker_id=1, store_id=9)),
            (FETCH, ha.FetchRequest(broker_name="b", broker_id=0, store_id=9)),
        ]
        if sessions:
            beyond = self.master.store.appended_position + 1 + position
            own = self.rng.choice(sessions)._session
            requests.append((ACKNOWLEDGE, ha.AcknowledgeRequest(session=own, written_position=beyond)))
        path, request = self.rng.choice(requests)
        server.call(path, request)
        after = (service.verdict, [view[:6] for view in service.views])
        if [view[:4] for view in before[1]] != [view[:4] for view in after[1]]:
            self.say("R4", f"{request} has moved {before} to {after}")

    def pass_time(self) -> None:
        time_ms = self.rng.choice((1, 10, HEARTBEAT_MS, 4 * HEARTBEAT_MS, 12 * HEARTBEAT_MS))
        self.clock.advance(time_ms)
        self.master.lane.advance(time_ms)

    # The end.

    def settle(self) -> None:
        """R5: no more faults; everybody gets turns."""
        for slave in self.slaves:
            slave.disk.plan = None
        for _ in range(QUIET_ROUNDS):
            for slave in self.slaves:
                self.slave_steps(slave)
            self.clock.advance(5)
            self.master.lane.advance(5)
            self.master.store.flush()
            self.answer_sends()
            if self.found or self._is_settled():
                break
        else:
            ends = [slave.store.appended_position for slave in self.slaves if slave.store is not None]
            self.say("R5", f"the master's log ends at {self.master.store.appended_position}, the slaves' at {ends}, "
                f"{len(self.master.sent)} sends have no answer, {self.master.replication.service.verdict}")  # fmt: skip
            return
        before = self.fired["SEND_OK"]
        self.send()
        for _ in range(QUIET_ROUNDS):
            for slave in self.slaves:
                self.slave_steps(slave)
            self.clock.advance(5)
            self.master.lane.advance(5)
            self.master.store.flush()
            self.answer_sends()
        if self.fired["SEND_OK"] == before and not self.found:
            self.say("R5", f"a send has no SEND_OK: {self.master.replication.service.verdict}")

    def _is_settled(self) -> bool:
        end = self.master.store.appended_position
        return (
            not self.master.sent
            and not self.master.send.confirmation.is_short
            and all(
                slave.store is not None
                and slave.store.appended_position == end == slave.store.readable_position
                for slave in self.slaves
            )
        )


def log_of(store: Store, start: int, end: int) -> bytes:
    """The bytes of a store's log."""
    return b"".join(
        region.file.read(region.offset, region.size_bytes) for region in store.log_regions(start, end)
    )


def slave_end(slave: _Slave) -> int:
    """Where the log of a slave that is down ends, by opening a copy of its disk."""
    store = Store.open(
        "/s",
        slave.world.store_config,
        clock=slave.world.clock,
        disk=slave.disk.killed(),
        background=False,
        follows=True,
    )
    return store.flushed_position if slave.world.sync_flush else store.appended_position


def check_ha(seed: int, fired: Counter[str], *, steps: int = 250) -> list[Violation]:
    """A random life of a master and its slaves."""
    return live_ha(seed, fired, steps=steps).found


def live_ha(seed: int, fired: Counter[str], *, steps: int = 250) -> HaWorld:
    """A life; the world at its end."""
    world = HaWorld(seed, fired)
    often: tuple[Callable[[], None], ...] = (world.send, world.slave_steps, world.slave_steps, world.slave_steps, world.slave_steps)
    seldom: tuple[Callable[[], None], ...] = (
        world.master_syncs, world.slave_syncs, world.slave_checkpoints, world.checkpoint, world.cut, world.crash_slave,
        world.crash_master, world.stranger, world.stranger, world.pass_time, world.pass_time,
    )  # fmt: skip
    for _ in range(steps):
        world.rng.choice(often if world.rng.random() < 0.9 else seldom)()
        world.master.lane.run()
        world.answer_sends()
        world.check_readable()
        if world.found:
            return world
    world.settle()
    return world
