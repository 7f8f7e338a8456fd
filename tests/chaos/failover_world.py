"""A whole cluster in one process, on one seed: brokers, etcd, producers, readers, their network, disks and clocks.

Two or three members with real stores on simulated disks, whose master is elected (`failover_member`); etcd's leases as a model; producers
with ids that try again at the new master, readers of master and slaves (`failover_clients`). The checker is that of the real rounds.

Faults: kills, power cuts with torn writes, crashes at any I/O, pauses, suspends, links and members cut off both ways or one way, slow links
with loss, wall clocks that are stepped, slow and full disks, a flipped byte, etcd away and with a new leader, empty slaves in the place of
slaves, members and links that flap, all members down, planned switches.

    A, B   the rules of checker/messages.py: nothing lost that was acknowledged or read, order, nothing twice, each place has one value
    D6     the logs of all members are equal, octet by octet, when all is quiet
    D8     what was damaged is healed from another member by then
    L1     each epoch has one writer, and a later election has a higher epoch
    L3     an old master acknowledges nothing once another one has been elected
    L4     nobody from outside the in-sync set is elected
    L5     when all faults are over, somebody leads, all members are in sync, and sends are answered SEND_OK
    R2     a master confirms, and gives readers, only what all members of the in-sync set have had, or a master before it has confirmed;
           a slave serves nothing that no master has confirmed
    F      the log times of masters are one line, which is about as fast as time

Where stores do not sync, the machine of a member must not lose power while no other good copy is in the in-sync set: that is not promised.
The same holds for damage, and for members that are replaced. Of a flip in the last appends a start believes that it is a torn tail.

Nothing is deleted by its age here (`store_follow`, `ha_world` do that). An unclean promotion is ordered only where members say that they
wait for others, and those were replaced (`leadership_world` does more).
"""

from __future__ import annotations

import hashlib
import heapq
import json
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from random import Random
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from protomq.wire.record import SEAL_SIZE_BYTES
from protomq_broker.replication import changing_hands
from protomq_broker.store.config import StoreConfig
from protomq_broker.store.errors import CorruptLogError, DiskFullError
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_broker.store.timer.log_time import HEARD_FOR_MS, SLEW_RATIO
from protomq_broker.testing.simdisk import CAPACITY_BYTES, Fault, SimDisk, SimulatedCrash
from protomq_ha.cluster_state import PROMOTE_UNCLEAN, SWITCH, Transaction
from protomq_ha.leadership_values import Role
from protomq_ha.orders import OrderStandsError, to_leave
from protomq_ha.roles import HaConfig
from protomq_runtime.errors import Code, ServiceError

from .checker import Promise, Violation, check_history
from .checker.messages import ALLOWED_REASONS
from .failover_clients import TOPIC, Operator, Producer, Reader, scan_of
from .failover_keepers import LetterKeeper, TopicKeeper
from .failover_member import (
    BREAK_MS,
    HEARTBEAT_MS,
    QUEUES,
    ROOT,
    SEND,
    SILENCE_MS,
    Connection,
    Member,
    Reply,
)
from .ha_world import log_of
from .history import History
from .leadership_etcd import SimEtcd

if TYPE_CHECKING:
    from protomq_ha.leadership_values import Ask

SEGMENT_SIZE_BYTES: Final = 16 << 10
FAULTY_MS: Final = 5_000
QUIET_MAX_MS: Final = 9_000
QUIET_STEP_MS: Final = 100
LAST_APPENDS_BYTES: Final = 400
LOOKS: Final = 8
MONOTONIC_MAX: Final = 1.03
LOG_TIME_MAX: Final = MONOTONIC_MAX * (1 + SLEW_RATIO)
LOG_TIME_MIN: Final = 0.97 * (1 - SLEW_RATIO)
EARLY_MAX_MS: Final = 2 * HEARD_FOR_MS * (MONOTONIC_MAX - LOG_TIME_MIN)
"""What a master has said counts so long, while its log time may be slower than the slave's clock."""
LATE_MAX_MS: Final = 500
"""An answer comes late by slow links and disks. A slave may have had one answer only."""
ROUNDING_MS: Final = 3
RESEND_MS: Final = 200
"""What the network loses comes so much later."""
REASONS: Final = ALLOWED_REASONS | {"NOT_MASTER", "NOT_ENOUGH_REPLICAS"}

KINDS: Final = (
    "kill", "kill", "kill", "power cut", "power cut", "crash at an I/O", "pause", "pause", "suspend", "cut both ways", "cut one way",
    "cut off", "cut off", "slow link", "clock step", "slow disk", "full disk", "flipped byte", "etcd away", "etcd leader lost",
    "empty slave", "flapping", "flapping link", "all down", "switch", "switch",
)  # fmt: skip
"""Faults, as often as they come."""
IN_A_CHANGE: Final = "in a change"
"""The same, of drills only: a master that is asked for a change loses its slaves, and is killed before they are out of sync."""


class LinePoint(NamedTuple):
    """A master's log time, as it was read at a time of the world. `line`: see Member. `leads`: whose, in which epoch."""

    at_ms: float
    log_time_ms: int
    line: int
    leads: tuple[str, int, int]


class FailoverWorld:
    """See the module's docstring."""

    def __init__(self, seed: int, fired: Counter[str], kinds: tuple[str, ...] = ()) -> None:
        """`kinds`: of faults, instead of drawn ones."""
        self.run = f"sim-{seed}"
        self.rng = rng = Random(f"failover {seed}")
        self.fired = fired
        self.now_ms = 0.0
        self.is_healing = self.is_over = False
        self.found: list[Violation] = []
        self.history = History(now_ns=lambda: int(self.now_ms * 1e6))
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...], Any]] = []
        self._event_count = self._draws = self._sends = 0
        self.sync_flush = rng.random() < 0.5
        self.etcd_timeout_ms = rng.choice((250, 500))
        self.delay_max_ms = rng.choice((3, 8, 20))
        self.clock_rng = Random(f"clocks {seed}")
        self.clocks_apart_ms = self.clock_rng.choice((0, 60_000))
        self.kinds = kinds or (KINDS if rng.random() < 0.5 else tuple(rng.sample(KINDS, rng.randint(2, 5))))
        count = rng.choice((2, 2, 3))
        self.ha = HaConfig(
            in_sync_replicas=2,
            min_in_sync_replicas=rng.choice((1, 1, 2)),
            sync_timeout_ms=rng.choice((200, 900)),
            heartbeat_interval_ms=HEARTBEAT_MS,
            timeout_ms=SILENCE_MS,
            transfer_size_bytes=rng.choice((4 << 10, 64 << 10)),
        )
        self.store_config = StoreConfig(
            segment_size_bytes=SEGMENT_SIZE_BYTES,
            sync_flush=self.sync_flush,
            corruption="quarantine",
            disk_delete_ratio=1.0,
            disk_force_ratio=1.0,
            disk_refuse_ratio=1.0,
        )
        # Of its own, so that all else of a seed is as it is without copies of folders.
        self.copies = Random(f"copies {seed}")
        self.copied = self.copies.choice((0.0, 0.0, 0.25)) if not kinds else 0.0
        # The same without faults that follow such a start.
        self.moments = Random(f"moments {seed}")
        self.hasty = self.moments.choice((0.0, 0.0, 0.4)) if not kinds else 0.8
        """Share of starts in doubt that are followed by a fault."""
        self.waits_for_a_change = False
        self.snapshots: list[tuple[str, int, SimDisk]] = []
        """Copies of folders: of which store, with which number of its start."""
        self.cut: set[tuple[str, str]] = set()
        self.slow: dict[tuple[str, str], float] = {}
        self.etcd = SimEtcd(rng)
        self.not_master = changing_hands("b")
        self.connection_lost = ServiceError(Code.UNAVAILABLE, "CONNECTION_LOST", "the broker has gone", definite=False)
        self.timed_out = ServiceError(Code.DEADLINE_EXCEEDED, "REQUEST_TIMEOUT", "no answer came", definite=False)
        self.route: Member | None = None
        self._route_epoch = 0
        self.epochs: dict[int, tuple[str, int]] = {}
        self.writers: dict[int, tuple[str, int]] = {}
        self.line: LinePoint | None = None
        self._line_count, self._idle_ms = 0, 0.0
        """How many lines of log time were begun; how long processes have been paused, or machines suspended, together."""
        self.confirmed = 0
        """The furthest position that a master has confirmed."""
        self.had: dict[str, int] = {}
        """Up to where each store has had the log, synced where that counts. A power cut may have taken some of it since."""
        self.connections: list[Connection] = []
        self.members = [Member(self, number) for number in range(count)]
        for member in self.members:
            self._start(member)
        self.producers = [Producer(self, number) for number in range(2)]
        self.readers = [Reader(self, number) for number in range(QUEUES)]
        self.operator = Operator(self)
        self.keepers = (TopicKeeper(self), LetterKeeper(self))

    def draw(self) -> int:
        self._draws += 1
        return self._draws

    def say(self, rule: str, message: str) -> None:
        self.found.append(Violation(rule, f"{self.now_ms / 1000:.3f} s: {message}"))

    # Time and network.

    def at(self, delay_ms: float, function: Callable[..., None], *arguments: Any, life: Any = None) -> None:
        """Calls it then, if the process lives that long; `life`: (member, its life)."""
        self._event_count += 1
        heapq.heappush(self._events, (self.now_ms + delay_ms, self._event_count, function, arguments, life))

    def run_until(self, end_ms: float) -> None:
        events = self._events
        while events and events[0][0] <= end_ms and not self.found:
            self.now_ms, _, function, arguments, life = heapq.heappop(events)
            if life is None:
                function(*arguments)
                continue
            member, number = life
            if member.life != number:
                continue
            if member.paused_until_ms > self.now_ms:
                member.waiting.append((function, arguments, life))
                continue
            try:
                function(*arguments)
                self.note_state(member)
            except SimulatedCrash:
                self._crashed(member)
        self.now_ms = end_ms

    def note_state(self, member: Member) -> None:
        """What a member has, and confirms, after each thing that it does, though it crashes in it."""
        if member.is_up:
            store = member.store
            end = store.flushed_position if self.sync_flush else store.appended_position
            if end > self.had.get(member.member, 0):
                self.had[member.member] = end
            self.note_confirmed(member)

    def _crashed(self, member: Member) -> None:
        """At an I/O."""
        self.fired["crashed at an I/O"] += 1
        kind = "power" if self.rng.random() < 0.5 and self._may_lose(member, is_power=True) else "kill"
        member.go_down(kind)
        self.at(self.rng.choice((40.0, 800.0)), self._start, member)

    def _start(self, member: Member) -> None:
        if member.is_up:
            return
        try:
            member.start()
        except SimulatedCrash:
            self._crashed(member)
        except OSError:  # its disk is full: its supervisor tries again
            self.fired["start failed"] += 1
            member.go_down("kill")
            self.at(500, self._start, member)

    def began_in_doubt(self, member: Member) -> None:
        """A start has cut its log, or may lack its end: until it has caught up, it must know that. So its process may end again, while
        others are away."""
        if "kill" in self.kinds and self.moments.random() < self.hasty:
            self.at(self.moments.choice((20, 100, 300)) * self.moments.uniform(0.3, 1.7), self._later, self._end_again, member)

    def _end_again(self, member: Member) -> None:
        self.fired["ended again in doubt"] += 1
        for each in self.members:
            self._down(each, "kill", 30.0 if each is member else self.moments.uniform(1_500, 3_000))

    def asked(self, master: Member) -> None:
        """A keeper asks a master for a change."""
        if self.waits_for_a_change and not self.is_healing and self.moments.random() < 0.5:
            self.waits_for_a_change = False
            names = [each.name for each in self.members if each is not master]
            self._cut_for(2 * SILENCE_MS, *((master.name, name) for name in names), *((name, master.name) for name in names))
            self.at(self.moments.uniform(60, 400), self._later, self._down, master, "kill", self.moments.uniform(1_500, 3_000))

    def delay_ms(self, source: str, target: str) -> float:
        delay_ms = self.rng.uniform(0.3, self.delay_max_ms)
        slow_ms = self.slow.get((source, target))
        if slow_ms is not None:
            delay_ms += slow_ms
            if self.rng.random() < 0.05:
                delay_ms += RESEND_MS
        return delay_ms

    def find_address(self, address: str) -> Member | None:
        return next((member for member in self.members if member.address == address), None)

    def to_member(self, member: Member, payload: bytes, on_reply: Callable[[Reply], None], path: str = SEND) -> None:
        """A client's send or an operator's change, and its answer."""
        self._sends += 1
        if ("clients", member.name) in self.cut:
            return
        if not member.is_up:
            self.at(BREAK_MS, on_reply, self.connection_lost)
            return

        def answer(reply: Reply) -> None:
            if (member.name, "clients") not in self.cut:
                self.at(self.delay_ms(member.name, "clients"), on_reply, reply)

        delay_ms = self.delay_ms("clients", member.name)
        self.at(delay_ms, member.take_call, path, payload, self._sends, answer, life=(member, member.life))

    def ask_etcd(self, member: Member, ask: Ask) -> None:
        """A request on its way: it may be done after the member has given it up, or has ended."""
        if (member.name, "etcd") not in self.cut:
            self.at(self.delay_ms(member.name, "etcd"), self._do, member, member.life, member.member, ask)

    def _do(self, member: Member, life: int, store: str, ask: Ask) -> None:
        etcd = self.etcd
        if not etcd.is_up:
            return
        etcd.expire(self.now_ms)
        before, revision = etcd.view.in_sync, etcd.revision
        result = etcd.do(ask.request, self.now_ms)
        if isinstance(ask.request, Transaction) and etcd.revision != revision:
            self._check_election(store, life, before.members if before is not None else None)
        if ("etcd", member.name) not in self.cut:
            self.at(self.delay_ms("etcd", member.name), member.answered, ask.number, result, life=(member, life))

    # Rules.

    def _check_election(self, store: str, life: int, before: frozenset[str] | None) -> None:
        view = self.etcd.view
        if view.master is None or view.master.revision != view.revision:
            return
        epoch, winner = view.master.epoch, view.master.member
        if self.epochs.get(epoch) == (store, life):
            self.fired["returned"] += 1
            return
        if epoch <= max(self.epochs, default=0):
            self.say("L1", f"{winner} is elected for epoch {epoch}, {max(self.epochs)} was before")
        if before is not None and winner not in before:
            self.say("L4", f"{winner} is elected, {sorted(before)} is the in-sync set")
        self.fired["elected"] += 1
        if self.epochs and self.epochs[max(self.epochs)][0] != winner:
            self.fired["fail-overs"] += 1
        self.epochs[epoch] = (winner, life)

    def check_writer(self, member: Member) -> None:
        """A send is about to be appended, if it is not refused."""
        if member.store.is_leading and member.send_service.shortage is None:
            epoch, writer = member.store.epoch, (member.member, member.life)
            if self.epochs.get(epoch) != writer or self.writers.setdefault(epoch, writer) != writer:
                self.say("L1", f"{writer} writes epoch {epoch}, which is that of {self.epochs.get(epoch)}")

    def check_alone(self, member: Member) -> None:
        """Whether it believes that it may acknowledge, and may not."""
        machine = member.driver.machine
        if machine.role in (Role.LEADING, Role.HANDING_OVER) and machine.epoch < max(self.epochs):
            self.fired["an old master that does not know it"] += 1
            if machine.may_acknowledge(member.lease_clock_ms()):
                self.say("L3", f"{member.name} may acknowledge in epoch {machine.epoch}, and {max(self.epochs)} has begun")

    def check_log_time(self, member: Member) -> None:
        """F. What has a time is neither early nor late by more than a slave may be mistaken of its master's log time, and has slept."""
        if member.driver.role is not Role.LEADING or not member.store.is_leading or member.driver.machine.epoch != max(self.epochs):
            return
        before, leads = self.line, (member.name, member.life, member.driver.machine.epoch)
        line = before.line if before is not None else 0
        if not member.line or member.line != line:
            # It has lost power, or heard nothing of one that had lost power and then led.
            self.fired["log time began anew"] += before is not None
            self._line_count += 1
            member.line, before = self._line_count, None
        now = self.line = LinePoint(self.now_ms, member.log_time.now_ms(), member.line, leads)
        if before is None:
            return
        passed_ms, gained_ms = now.at_ms - before.at_ms, now.log_time_ms - before.log_time_ms
        is_same = now.leads == before.leads
        self.fired["log time went on at the next master"] += not is_same
        early_ms, late_ms = gained_ms - passed_ms * LOG_TIME_MAX, passed_ms * LOG_TIME_MIN - gained_ms
        for what, apart_ms, max_ms in (("early", early_ms, EARLY_MAX_MS), ("late", late_ms, LATE_MAX_MS)):
            if apart_ms > (ROUNDING_MS if is_same else max_ms) + self._idle_ms:
                self.say("F", f"log time of {member.name} is {apart_ms:.0f} ms {what}, {passed_ms:.0f} ms after that of {before.leads}")

    def check_slave(self, member: Member) -> None:
        """R2. After each answer of its master."""
        for master in self.members:
            self.note_confirmed(master)
        mine = member.store.readable_position
        if mine > self.confirmed:
            self.say("R2", f"{member.name} serves up to {mine}, and masters have confirmed {self.confirmed}")

    def note_confirmed(self, member: Member) -> None:
        """R2, of masters. What was confirmed by a master stays so."""
        if not (member.is_up and member.store.is_leading and member.store.positions.confirmed > self.confirmed):
            return
        self.confirmed = member.store.positions.confirmed
        in_sync = self.etcd.view.in_sync
        # L3 is about one that was deposed.
        if in_sync is None or in_sync.epoch != member.driver.machine.epoch:
            return
        self.fired["confirmed"] += 1
        lacking = {each: self.had.get(each, 0) for each in in_sync.members if self.had.get(each, 0) < self.confirmed}
        if lacking:
            self.say("R2", f"{member.name} confirms {self.confirmed}, and members in sync have had {lacking}")

    def led(self, member: Member, epoch: int) -> None:
        """A master takes sends: name servers tell so."""
        if epoch == max(self.epochs):
            self.operator.check(member)
            for keeper in self.keepers:
                keeper.check_new_master(member)
        if member.store.topics.find(TOPIC) is None:
            try:
                member.store.topics.create(TopicConfig(TOPIC, QUEUES, QUEUES))
            except DiskFullError:
                self.fired["topic made later"] += 1  # by a send
        if epoch > self._route_epoch:
            self._route_epoch = epoch
            self.at(self.rng.uniform(5, 60), self._tell_route, member, epoch)

    def _tell_route(self, member: Member, epoch: int) -> None:
        if epoch == self._route_epoch:
            self.route = member

    # Faults.

    def _may_lose(self, member: Member, *, is_power: bool) -> bool:
        """Whether a member's copy, or its end, may be lost: another good one is in the in-sync set."""
        if is_power and self.sync_flush:
            return True
        if any(other.is_damaged or other.is_damaged_at_end or other.is_doubtful for other in self.members if other is not member):
            return False
        in_sync = self.etcd.view.in_sync
        if in_sync is None or not in_sync.members:
            return False
        stores = {other.member for other in self.members if other is not member and not other.is_replaced}
        return bool(stores & in_sync.members)

    def fault(self) -> None:
        """One of them, and when it is over."""
        rng, kind = self.rng, self.rng.choice(self.kinds)
        member = rng.choice(self.members)
        if rng.random() < 0.55:
            member = next((each for each in self.members if each.is_up and each.driver.role is Role.LEADING), member)
        length_ms = rng.choice((150, 700, 1_500, 2_500)) * rng.uniform(0.6, 1.4)
        if self.copied:
            self._take_snapshot()
            if self.copies.random() < self.copied:
                kind = "older folder"
        if not self._do_fault(kind, member, length_ms):
            return
        self.fired[kind] += 1
        self.history.fact("fault", kind=kind, member=member.name)

    def _do_fault(self, kind: str, member: Member, length_ms: float) -> bool:
        rng = self.rng
        if kind in ("kill", "power cut"):
            is_power = kind == "power cut"
            if not member.is_up or (is_power and not self._may_lose(member, is_power=True)):
                return False
            self._down(member, "power" if is_power else "kill", rng.choice((30.0, length_ms)))
        elif kind == "crash at an I/O":
            if not member.is_up:
                return False
            member.disk.fail_at(rng.randint(1, 25), Fault.CRASH)
        elif kind in ("pause", "suspend"):
            if not member.is_up:
                return False
            self._idle_ms += length_ms * MONOTONIC_MAX
            member.paused_until_ms = max(member.paused_until_ms, self.now_ms + length_ms)
            self.at(length_ms, self._wake, member)
            if kind == "suspend":
                member.clock.asleep_ms += length_ms * member.clock.rate
        elif kind in ("cut both ways", "cut one way", "cut off", "slow link"):
            self._hurt_links(kind, member, length_ms)
        elif kind == "clock step":
            member.clock.wall_offset_ms += rng.choice((-1, 1)) * rng.uniform(500, 60_000)
        elif kind == "slow disk":
            member.disk_delay_ms = rng.choice((30.0, 200.0))
            self.at(length_ms, setattr, member, "disk_delay_ms", 0.0)
        elif kind == "full disk":
            if not member.is_up:
                return False
            member.fill_disk()
            self.at(length_ms + 700, self._free, member)
        elif kind == "flipped byte":
            return self._flip(member)
        elif kind in ("etcd away", "etcd leader lost"):
            self.etcd.is_up = False
            self.at(length_ms if kind == "etcd away" else rng.uniform(50, 300), self._etcd_back)
        elif kind == "older folder":
            return self._go_back()
        elif kind == IN_A_CHANGE:
            self.waits_for_a_change = True
        elif kind == "empty slave":
            return self._replace(member, length_ms)
        elif kind == "flapping":
            for turn in range(4):
                self.at(turn * 250 * rng.uniform(0.8, 1.2), self._later, self._down, member, "kill", 60.0)
        elif kind == "flapping link":
            other = rng.choice([*(each.name for each in self.members if each is not member), "etcd"])
            for turn in range(5):
                length_ms = 100 * rng.uniform(0.5, 1.5)
                self.at(turn * 200, self._later, self._cut_for, length_ms, (member.name, other), (other, member.name))
        elif kind == "all down":
            is_power = self.sync_flush and rng.random() < 0.5
            for each in self.members:
                self._down(each, "power" if is_power else "kill", rng.uniform(30, 900))
        else:
            return self._order(SWITCH, rng.choice(("", rng.choice(self.members).member)))
        return True

    def _order(self, kind: str, target: str) -> bool:
        """An operator's order, as LeadershipDriver.order leaves it. False: another one stands, and stays."""
        try:
            transaction = to_leave(self.etcd.view, kind, target)
        except OrderStandsError:
            self.fired["order refused"] += 1
            return False
        if transaction is not None:
            self.fired["order replaced another one"] += self.etcd.view.order is not None
            self.etcd.commit(transaction)
        return True

    def _later(self, fault: Callable[..., None], *arguments: Any) -> None:
        """One of several, unless all faults are over by now."""
        if not self.is_healing:
            fault(*arguments)

    def _hurt_links(self, kind: str, member: Member, length_ms: float) -> None:
        rng = self.rng
        others = [each.name for each in self.members if each is not member]
        other = rng.choice([*others, "etcd", "clients"])
        ways = [(member.name, other), (other, member.name)]
        if kind == "slow link":
            slow_ms = rng.choice((2.0, 50.0))
            for way in ways:
                self.slow[way] = slow_ms
                self.at(length_ms, self._hurry, way)
        elif kind == "cut one way":
            self._cut_for(length_ms, rng.choice(ways))
        elif kind == "cut both ways":
            self._cut_for(length_ms, *ways)
        else:  # from all but its clients, half the time
            names = [*others, "etcd", *(["clients"] if rng.random() < 0.5 else [])]
            self._cut_for(length_ms, *((member.name, name) for name in names), *((name, member.name) for name in names))

    def _cut_for(self, length_ms: float, *ways: tuple[str, str]) -> None:
        self.cut.update(ways)
        self.at(length_ms, self.cut.difference_update, ways)

    def _hurry(self, way: tuple[str, str]) -> None:
        self.slow.pop(way, None)

    def _down(self, member: Member, kind: str, length_ms: float) -> None:
        if member.is_up:
            member.go_down(kind)
            self.at(length_ms, self._start, member)

    def _wake(self, member: Member) -> None:
        """All that came in the pause is seen now, in its order."""
        if self.now_ms >= member.paused_until_ms:
            waiting, member.waiting = member.waiting, []
            for function, arguments, life in waiting:
                self.at(0, function, *arguments, life=life)

    def _etcd_back(self) -> None:
        """A new leader of etcd gives all leases their whole time again."""
        self.etcd.come_back(self.now_ms)

    def _free(self, member: Member) -> None:
        member.free_disk()

    def _flip(self, member: Member) -> bool:
        """On the disk of a member that is down, or goes down for it: in what its log has there."""
        rng = self.rng
        end = member.store.flushed_position
        if member.is_damaged or member.is_damaged_at_end or member.is_replaced or not end or not self._may_lose(member, is_power=False):
            return False
        length_ms = rng.uniform(30, 500)
        if member.is_up:
            self._down(member, "kill", length_ms)
        whole = self._end_of_a_start(member)
        disk = member.disk
        # The last appends are rarely such that a start cuts them. Some members look for them.
        for _ in range(LOOKS if self.moments.random() < self.hasty else 1):
            position = rng.randrange(end) if rng.random() < 0.5 else end - 1 - rng.randrange(min(end, LAST_APPENDS_BYTES))
            member.disk = self._flipped(disk, position)
            if self._end_of_a_start(member) < whole:
                break
        if self._end_of_a_start(member) < whole:
            self.fired["damage that looks like a torn tail"] += 1
            member.is_damaged_at_end = True
        else:
            member.is_damaged = True
        return True

    def _flipped(self, disk: SimDisk, position: int) -> SimDisk:
        """A copy with another bit there in its log."""
        flipped = disk.killed()
        segments = sorted(path for path in flipped.files(ROOT) if "/commitlog/" in path)
        path = segments[min(position // SEGMENT_SIZE_BYTES, len(segments) - 1)]
        flipped.flip_bit(path, 8 * (position % SEGMENT_SIZE_BYTES) + self.rng.randrange(8))
        return flipped

    def _end_of_a_start(self, member: Member) -> int:
        """Where its log would end. Damage of the last appends looks like a torn write, if nothing says that they were synced."""
        disk = member.disk.killed()
        disk.capacity_bytes = CAPACITY_BYTES
        store = Store.open(ROOT, self.store_config, clock=member.clock, disk=disk, background=False, follows=True)
        return store.appended_position

    def _take_snapshot(self) -> None:
        member = self.copies.choice(self.members)
        is_sound = not (member.is_damaged or member.is_damaged_at_end or member.is_doubtful or member.is_replaced or member.is_cut)
        if member.is_up and is_sound and not member.is_changing:
            self.snapshots.append((member.member, member.tail.start_number, member.disk.killed()))

    def _go_back(self) -> bool:
        """A member's folder goes back to an older copy, of which etcd knows that it is one."""
        if not self.snapshots:
            return False
        store, number, disk = self.copies.choice(self.snapshots)
        member = next((each for each in self.members if each.is_up and each.member == store), None)
        start = self.etcd.view.starts.get(store)
        if member is None or start is None or start.number <= number or not self._may_lose(member, is_power=False):
            return False
        if self.copies.random() < 0.5:
            for each in self.members:
                self._down(each, "kill", 30.0 if each is member else self.copies.uniform(1_500, 3_000))
        else:
            self._down(member, "kill", 30.0)
        member.go_back(disk)
        return True

    def _replace(self, member: Member, length_ms: float) -> bool:
        """A slave, by one with an empty folder."""
        is_master = member.is_up and member.driver.role is not Role.FOLLOWING
        # Whoever has cut its log waits for the others, and an operator knows that.
        in_sync = self.etcd.view.in_sync
        is_spare = in_sync is not None and any(
            each.is_up and not each.is_cut and each.member in in_sync.members for each in self.members if each is not member
        )
        if is_master or not is_spare or not self._may_lose(member, is_power=False):
            return False
        if member.is_up:
            self._down(member, "kill", length_ms)
        member.replace_disk()
        return True

    # A life.

    def live(self) -> None:
        """Faults, quiet, and what the checker says."""
        rng = self.rng
        when_ms = rng.uniform(700, 1_300)
        while when_ms < FAULTY_MS:
            self.at(when_ms, self.fault)
            when_ms += rng.choice((150, 700, 1_400)) * rng.uniform(0.5, 1.5)
        self.run_until(FAULTY_MS)
        if not self.found:
            self._heal()
        if not self.found:
            self.found += check_history(self.history.events, Promise(allowed_reasons=REASONS))

    def _heal(self) -> None:
        """All faults end."""
        self.is_healing = True
        self.cut.clear()
        self.slow.clear()
        if not self.etcd.is_up:
            self._etcd_back()
        for member in self.members:
            member.disk_delay_ms = 0.0
            member.paused_until_ms = self.now_ms
            self._wake(member)
            member.disk.plan = None
            member.free_disk()
            self._start(member)
            if member.store.log_failure and member.driver.role is not Role.FOLLOWING:
                # Nobody could take over. Its operator starts it again.
                self._down(member, "kill", 10.0)
        self.at(0, self._mend)
        begun_ms, acknowledged = self.now_ms, self.fired["SEND_OK"]
        while not self.found and not self._is_quiet(acknowledged):
            if self.now_ms - begun_ms > QUIET_MAX_MS:
                self.say("L5", f"not all is well again: {self._state()}")
            self.run_until(self.now_ms + QUIET_STEP_MS)
        self.fired["ms until all was well"] += int(self.now_ms - begun_ms)
        self.is_over = True
        end_ms = self.now_ms + 4_000
        while not self.found and not self._is_settled():
            if self.now_ms > end_ms:
                self.say("L5", f"the last sends do not end: {self._state()}")
            self.run_until(self.now_ms + QUIET_STEP_MS)
        if not self.found:
            self._scan()

    def _mend(self) -> None:
        """An operator starts what has stopped by itself again."""
        for member in self.members:
            self._start(member)
            if member.store.log_failure and member.driver.role is Role.LEADING and not member.driver.machine.has_successor:
                self._down(member, "kill", 10.0)
            # It led a log that nobody else had begun, and nothing of that was confirmed. It cannot be sure of it; its operator is.
            is_unconfirmed = member.following.is_of_another_past and member.store.positions.confirmed <= SEAL_SIZE_BYTES
            if is_unconfirmed:
                self.fired["given an empty folder"] += 1
                self._down(member, "kill", 10.0)
                member.replace_disk()
        self._promote_cut()
        self.at(500, self._mend)

    def _promote_cut(self) -> None:
        """Does what the status says where all who are left of the in-sync set have cut their logs: nobody comes back who may have more."""
        view = self.etcd.view
        if view.in_sync is None or view.master is not None:
            return
        left = [member for member in self.members if member.member in view.in_sync.members]
        is_waiting = all(member.is_up and not member.is_changing and member.driver.machine.end_is_cut for member in left)
        if left and len(left) < len(view.in_sync.members) and is_waiting:
            furthest = max(left, key=lambda member: (member.store.epoch, member.store.appended_position))
            self.fired["promoted uncleanly"] += 1
            self._order(PROMOTE_UNCLEAN, furthest.member)

    def _is_quiet(self, acknowledged: int) -> bool:
        view = self.etcd.view
        if view.in_sync is None or view.master is None or view.order is not None:
            return False
        stores = {member.member for member in self.members}
        return (
            # One that has just started with damage may not have left the set yet.
            all(member.is_up and not member.is_changing and not member.driver.is_damaged for member in self.members)
            and view.in_sync.members == stores
            and self.fired["SEND_OK"] >= acknowledged + 2
        )

    def _is_settled(self) -> bool:
        is_asking = any(producer.call is not None for producer in self.producers) or any(keeper.asked for keeper in self.keepers)
        if is_asking or any(member.is_changing for member in self.members):
            return False
        ends = {(member.store.appended_position, member.store.readable_position) for member in self.members}
        return len(ends) == 1 and len(set(ends.pop())) == 1

    def _state(self) -> str:
        view = self.etcd.view
        members = {
            member.name: (
                member.member, member.driver.role.value, member.store.appended_position, member.store.readable_position,
                member.store.log_failure, member.replication.follower.view.problem if member.replication.follower else "",
                [producer.call is not None for producer in self.producers],
            )
            for member in self.members
        }  # fmt: skip
        return f"master {view.master}, in sync {view.in_sync}, order {view.order}, {members}"

    def _scan(self) -> None:
        """Reads everything, on each member."""
        start = max(member.store.min_position for member in self.members)
        logs = {log_of(member.store, start, member.store.appended_position) for member in self.members if not member.is_damaged}
        if len(logs) > 1:
            self.say("D6", f"logs differ behind {start}")
        for member in self.members:
            if not member.is_damaged:
                self.operator.check(member)
            call = self.history.invoke(f"checker {member.name}", "scan")
            for _ in range(20):
                try:
                    call.ok(queues=scan_of(self.run, member.store))
                    for keeper in self.keepers:
                        keeper.check(member)
                    break
                except CorruptLogError:
                    self.fired["damage met by a scan"] += 1
                    member.heal()
            else:
                self.say("D8", f"{member.name} is damaged still: {member.store.damaged_ranges}")

    def digest(self) -> str:
        """Of all that happened."""
        whole = hashlib.sha256()
        for event in self.history.events:
            whole.update(json.dumps(asdict(event)).encode())
        for member in self.members:
            for path, content in member.disk.files(ROOT).items():
                if path == f"{ROOT}/lock":  # it names this process
                    continue
                whole.update(path.encode() + content)
        whole.update(repr(sorted(self.fired.items())).encode())
        whole.update(f"{self._event_count} {self.now_ms}".encode())
        return whole.hexdigest()


def check_failover(seed: int, fired: Counter[str], kinds: tuple[str, ...] = ()) -> list[Violation]:
    """A life. `kinds`: of faults, instead of drawn ones."""
    return live_failover(seed, fired, kinds).found


def live_failover(seed: int, fired: Counter[str], kinds: tuple[str, ...] = ()) -> FailoverWorld:
    """A life; the world at its end."""
    # What brokers tell of all these faults would fill the memory of whoever keeps it.
    logger = logging.getLogger("protomq.broker")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        world = FailoverWorld(seed, fired, kinds)
        world.live()
    finally:
        logger.disabled = was_disabled
    return world
