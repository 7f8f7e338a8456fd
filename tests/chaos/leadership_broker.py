"""A broker of the simulation: a log of entries, what it says to its master or slaves, and a real Leadership."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from protomq_ha import leadership
from protomq_ha.cluster_state import LogEnd
from protomq_ha.in_sync_set import MemberReport
from protomq_ha.leadership import Leadership
from protomq_ha.leadership_values import (
    Ask,
    CutSettled,
    Effect,
    Follow,
    Lead,
    NoteStart,
    OwnLog,
    Result,
    Role,
    Settings,
    StopFollowing,
    StopLeading,
    TailSettled,
)

if TYPE_CHECKING:
    from .leadership_world import LeadershipWorld

TICK_MS: Final = 100
FULL_AFTER_MS: Final = 3_000
"""A master says that its disk is full when it has refused messages for this time."""
SETTLE_MS: Final = 300
"""Until a broker has done what its machine has said, at most."""
OPEN_MS: Final = 3_000
"""The same while its store is being opened again."""
STEP_MS: Final = 7
HOLD_MS: Final = 150
SILENCE_MS: Final = 800
BREAK_MS: Final = 5
"""Until the other end of a connection knows that a process has ended."""
BLOCK: Final = 20
"""Entries in an answer to a slave, at most."""
HEAD_END: Final = 1
"""Position behind the head of a log."""


class Entry(NamedTuple):
    """Of a log. The first one is its head, which no other log has; its number is below 0."""

    epoch: int
    number: int


@dataclass(slots=True)
class Disk:
    """What outlives a process. `flushed` entries outlive a power cut; `may_lack_tail` until the machine says that it is settled;
    `was_cut`: a start has cut the log's end, until then, too; `is_damaged`: that was more than a torn write; `confirmed`: as masters have
    said, or it has known as a master.
    """

    member: str
    log: list[Entry] = field(default_factory=list)
    flushed: int = 0
    epoch: int = 0
    may_lack_tail: bool = False
    was_cut: bool = False
    is_damaged: bool = False
    has_led: bool = False
    confirmed: int = 0
    start_number: int = 0
    is_older_copy: bool = False
    """For the atlas of faults: until its store has left the set, its log may lack what it had."""
    folder: int = 0
    """Which folder it is: a copy is another one."""

    @property
    def own_epoch(self) -> int:
        return max(self.epoch, self.log[-1].epoch if self.log else 0)


class Fetch(NamedTuple):
    """A slave says what it has.

    Attributes: position: as far as it counts; written: where the answer is to begin; log: all of it, to begin a session; heard_ms: the
        master's clock in the answer before; is_answered: False for an acknowledgement alone.
    """

    slave: SimBroker
    life: int
    session: int
    epoch: int
    position: int
    written: int
    log: list[Entry] | None
    heard_ms: int
    is_answered: bool


class SimBroker:
    """One process at a time."""

    has_own_head = True
    """Whether the head of a log is that of no other log; planted bugs make heads alike."""

    def __init__(self, world: LeadershipWorld, number: int, disk: Disk, broker_id: int = 0) -> None:
        """`broker_id`: 0: one of its own."""
        rng = world.rng
        self.world, self.name, self.broker_id, self.disk = world, f"b{number}", broker_id or number + 1, disk
        self.rate, self.boot_offset_ms = rng.uniform(0.97, 1.03), rng.uniform(0, 1e6)
        self.wall_offset_ms = self.asleep_ms = 0.0
        self.life = 0
        self.is_up = False
        self.paused_until_ms = 0.0
        self.waiting: list[tuple[Callable[..., None], tuple[Any, ...], Any]] = []
        self.start()

    # Clocks and life.

    def clock_ms(self) -> int:
        """CLOCK_BOOTTIME; planted bugs read another one."""
        return self.boot_ms()

    def boot_ms(self) -> int:
        return int(self.boot_offset_ms + self.world.now_ms * self.rate)

    def start(self) -> None:
        """A process begins."""
        self.life += 1
        self.is_up = True
        self.cut_log()
        disk = self.disk
        self.machine = Leadership(
            Settings(
                self.disk.member, self.name, broker_id=self.broker_id, new_election=1_000 * self.broker_id + self.life,
                process=f"{self.name} {self.life}", place=f"folder {self.disk.folder}",
            ),
            self.disk.own_epoch,
            self.clock_ms(),
            log_is_empty=not self.disk.log,
            end_position=len(self.disk.log),
            tail_may_be_lost=self.disk.may_lack_tail,
            cut_end=LogEnd(disk.log[-1].epoch, len(disk.log), is_cut=True) if disk.was_cut else None,
            start_number=disk.start_number,
        )  # fmt: skip
        self.asked: set[int] = set()
        self.refused = False
        self.is_full = False
        self.leads_since_ms: float | None = None
        self.confirmed = 0
        self.follows: Follow | None = None
        self.session, self.has_agreed = 0, False
        self.heard_master_ms = 0
        self.last_heard_ms = 0.0
        self.reports: dict[str, tuple[int, int, float]] = {}
        self.sessions: dict[str, int] = {}
        self.unanswered: list[int] = []
        self.world.at(self.world.rng.uniform(0, TICK_MS), self.tick, life=(self, self.life))

    def cut_log(self) -> None:
        """A start finds a torn write behind the log, or takes damage of its last entries for one."""
        world, disk = self.world, self.disk
        if len(disk.log) <= HEAD_END or world.tears.random() >= world.torn:
            return
        disk.was_cut = True
        world.fired["log cut"] += 1
        if world.tears.random() < 0.5 and world.has_another_copy(self):
            disk.is_damaged = True
            del disk.log[max(HEAD_END, len(disk.log) - world.tears.randint(1, 4)) :]
            disk.flushed = min(disk.flushed, len(disk.log))
            world.fired["end damaged"] += 1

    def kill(self) -> None:
        """What was written stays. Whoever has a session with it sees its connection break."""
        self.is_up = False
        self.life += 1
        self.break_sessions()

    def break_sessions(self) -> None:
        """Whoever is its master hears of it."""
        member = self.disk.member
        for other in self.world.brokers:
            if other.is_up and member in other.sessions:
                session = other.sessions[member]
                self.world.at(BREAK_MS, other.lose, member, session, life=(other, other.life))

    def lose(self, member: str, session: int) -> None:
        """As a master: a slave's connection has broken."""
        if self.sessions.get(member) == session:
            del self.sessions[member]
            self.reports.pop(member, None)
            self.report(self.clock_ms())

    def cut_power(self) -> None:
        """What was not flushed may be gone, unless another disk has lost something already."""
        self.kill()
        disk = self.disk
        if any(other.disk.is_damaged or other.disk.is_older_copy for other in self.world.brokers if other is not self):
            return
        if not self.world.counts_flushed:
            disk.may_lack_tail = True
        del disk.log[self.world.rng.randint(disk.flushed, len(disk.log)) :]
        disk.flushed = len(disk.log)

    @property
    def end(self) -> int:
        """The end of the log as far as it counts."""
        return self.disk.flushed if self.world.counts_flushed else len(self.disk.log)

    def tick(self) -> None:
        world, disk, now_ms = self.world, self.disk, self.clock_ms()
        world.at(TICK_MS, self.tick, life=(self, self.life))
        if self.machine.may_acknowledge(now_ms):
            world.check_alone(self)
        if world.counts_flushed or world.rng.random() < 0.2:
            disk.flushed = len(disk.log)
        self.look_for_room(now_ms)
        role = self.machine.role
        if role in (Role.LEADING, Role.HANDING_OVER):
            self.note_confirmed()
            self.report(now_ms)
        else:
            self.run(self.machine.tick(now_ms))
        if self.follows is not None and world.now_ms - self.last_heard_ms > SILENCE_MS:
            self.begin_session()
        elif self.has_agreed and self.follows is not None and world.counts_flushed:
            self.fetch(None, is_answered=False)

    def look_for_room(self, now_ms: int) -> None:
        """Its disk is full for some seconds, now and then."""
        world = self.world
        if world.has_quotas:
            self.meet_quota()
        elif self.is_full and (not world.full or world.disks.random() < 0.02):
            self.is_full = False
        elif not self.is_full and world.full and world.disks.random() < 0.01:
            self.is_full = True
            world.fired["disk full"] += 1
            if self.machine.role is Role.LEADING:
                world.fired["master's disk full"] += 1
        if self.is_full is not self.machine.is_full:
            self.run(self.machine.full("its disk is full" if self.is_full else "", now_ms))

    def meet_quota(self) -> None:
        """Its disk reports room, and refuses what a master writes."""
        if self.machine.role not in (Role.LEADING, Role.HANDING_OVER):
            self.leads_since_ms, self.is_full = None, False
            return
        self.leads_since_ms = self.leads_since_ms or self.world.now_ms
        self.is_full = self.world.now_ms - self.leads_since_ms >= FULL_AFTER_MS

    def note_confirmed(self) -> None:
        """As a master, now and then: so what it has acknowledged last is not in it."""
        self.disk.confirmed = max(self.disk.confirmed, self.confirmed)

    # Effects.

    def run(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Ask):
                self.asked.add(effect.number)
                self.world.ask_etcd(self, effect)
                life = (self, self.life)
                timeout_ms = self.world.etcd_timeout_ms
                self.world.at(timeout_ms, self.answered, effect.number, None, life=life)
            elif isinstance(effect, Follow):
                self.follows = effect
                self.begin_session()
            elif isinstance(effect, StopFollowing):
                self.stop_following()
                delay_ms = self.world.rng.uniform(1, 50)
                self.world.at(delay_ms, self.following_stopped, life=(self, self.life))
            elif isinstance(effect, Lead):
                delay_ms = self.world.rng.uniform(5, 300)
                self.world.at(delay_ms, self.open, effect.epoch, life=(self, self.life))
            elif isinstance(effect, StopLeading):
                self.unanswered.clear()
                self.reports.clear()
            elif isinstance(effect, CutSettled):
                self.settle_cut_soon()
            elif isinstance(effect, NoteStart):
                self.world.at(self.world.copies.uniform(0, 2 * STEP_MS), self.note_start, effect, life=(self, self.life))
            elif isinstance(effect, TailSettled):
                self.settle_tail_soon()

    def note_start(self, effect: NoteStart) -> None:
        """The folder has the number before etcd has it."""
        disk = self.disk
        disk.start_number = effect.number
        disk.may_lack_tail = disk.may_lack_tail or effect.is_older_copy
        self.world.fired["older copy found"] += effect.is_older_copy
        self.run(self.machine.start_noted(effect.number, self.clock_ms()))

    def settle_tail_soon(self) -> None:
        """As the cut below, but its broker opens its store meanwhile, since its log has failed."""
        world, life = self.world, (self, self.life)
        if not world.fails:
            self.settle_tail()
            return
        delay_ms = world.failures.uniform(0, OPEN_MS)
        if world.is_faulty and world.failures.random() < 0.5:
            world.at(delay_ms, self.fail_log, life=life)
        world.at(delay_ms + 1, self.settle_tail, life=life)

    def settle_tail(self) -> None:
        """What the log may have lacked is forgotten, if it may be."""
        if leadership.may_forget_doubt(self.machine):
            self.disk.may_lack_tail = self.disk.is_older_copy = False

    def fail_log(self) -> None:
        """A slave's disk fails, just when it is in the set again. It may have lost what it has acknowledged last."""
        world, disk = self.world, self.disk
        in_sync = world.etcd.view.in_sync
        if self.machine.role is not Role.FOLLOWING or in_sync is None or disk.member not in in_sync.members:
            return
        world.fired["log failed"] += 1
        self.break_sessions()
        self.session = 0
        if world.has_another_copy(self):
            del disk.log[max(HEAD_END, len(disk.log) - world.failures.randint(1, 4)) :]
            disk.flushed = min(disk.flushed, len(disk.log))
        disk.may_lack_tail = True
        self.machine.tail_may_be_lost()
        # It does not leave the set before all are down.
        world.stop_all(self, STEP_MS)

    def settle_cut_soon(self) -> None:
        """It is done behind what the broker does now, such as opening its store again."""
        world, life = self.world, (self, self.life)
        world.fired["led with a cut log"] += self.machine.role is not Role.FOLLOWING
        world.at(world.tears.uniform(0, SETTLE_MS), self.settle_cut, life=life)
        if world.reopens and world.is_faulty and self.machine.role is Role.FOLLOWING:
            world.at(world.tears.uniform(0, SETTLE_MS), self.reopen, life=life)

    def settle_cut(self) -> None:
        """The start's cut is forgotten, if it may be."""
        if leadership.may_forget_cut(self.machine):
            self.disk.was_cut = self.disk.is_damaged = False

    def reopen(self) -> None:
        """A slave's process opens its store again, and that may cut its log's end, too."""
        if self.machine.role is not Role.FOLLOWING:
            return
        self.world.fired["opened again"] += 1
        self.break_sessions()
        self.session = 0
        disk = self.disk
        self.cut_log()
        if disk.was_cut:
            self.machine.end_was_cut(LogEnd(disk.log[-1].epoch, len(disk.log), is_cut=True))
        # It does not catch up before all are down.
        self.world.stop_all(self)

    def answered(self, number: int, result: Result) -> None:
        """Etcd's answer, or the time-out."""
        if number in self.asked:
            self.asked.discard(number)
            self.run(self.machine.answered(number, result, self.clock_ms()))
            self.answer_sends()

    # Leading.

    def open(self, epoch: int) -> None:
        world = self.world
        if world.disks.random() < world.full:
            world.fired["cannot lead"] += 1
            self.run(self.machine.unable(epoch, "its disk is full", self.clock_ms()))
            self.find_room()
            return
        self.disk.epoch, self.disk.has_led = epoch, True
        self.confirmed = 0
        if not self.disk.log:
            world.heads += 1
            self.disk.log.append(Entry(epoch, -world.heads))
        self.disk.flushed = len(self.disk.log)
        self.reports.clear()
        self.sessions.clear()
        self.world.check_lead(self, epoch)
        self.run(self.machine.opened(epoch, len(self.disk.log), self.clock_ms()))

    def find_room(self) -> None:
        """Looks now and then whether its log could be opened to lead."""
        if not self.machine.is_unable:
            return
        if self.world.disks.random() >= self.world.full:
            self.machine.able()
        self.world.at(self.world.disks.uniform(500, 3_000), self.find_room, life=(self, self.life))

    def send(self) -> None:
        """A client's message, if this broker takes it."""
        if self.machine.takes_sends and not self.is_full:
            self.world.numbers += 1
            self.unanswered.append(len(self.disk.log))
            self.disk.log.append(Entry(self.machine.epoch, self.world.numbers))
            self.world.check_writer(self)

    def report(self, now_ms: int) -> None:
        """What the slaves have said goes to the machine; what is confirmed then is answered."""
        live_ms = 2 * SILENCE_MS
        reports = {
            member: MemberReport(position, self.world.now_ms - at_ms < live_ms, asked_ms)
            for member, (position, asked_ms, at_ms) in self.reports.items()
        }
        self.run(self.machine.report(self.end, reports, now_ms))
        self.answer_sends()

    def answer_sends(self) -> None:
        """Acknowledges what may be acknowledged."""
        in_sync = self.machine.in_sync
        if in_sync is None or not self.machine.may_acknowledge(self.clock_ms()):
            return
        confirmed = self.confirmed = in_sync.confirmed_position
        if not self.unanswered:
            return
        self.world.check_acknowledged(self, [at for at in self.unanswered if at < confirmed])
        self.unanswered = [at for at in self.unanswered if at >= confirmed]

    def take_fetch(self, fetch: Fetch) -> None:
        """As a master: what a slave has, and what it gets."""
        role, log = self.machine.role, self.disk.log
        if role not in (Role.LEADING, Role.HANDING_OVER) or fetch.epoch != self.machine.epoch:
            return
        member = fetch.slave.disk.member
        if fetch.log is not None:
            agreed = next(
                (at for at, pair in enumerate(zip(log, fetch.log, strict=False)) if pair[0] != pair[1]),
                min(len(log), len(fetch.log)),
            )
            self.sessions[member] = fetch.session
            self.reports.pop(member, None)
            self.reply(fetch, agreed)
            return
        if self.sessions.get(member) != fetch.session or fetch.life != fetch.slave.life:
            return
        self.reports[member] = (fetch.position, fetch.heard_ms, self.world.now_ms)
        self.report(self.clock_ms())
        if not fetch.is_answered:
            return
        delay_ms = 0 if fetch.written < len(log) else HOLD_MS
        self.world.at(delay_ms, self.reply, fetch, fetch.written, life=(self, self.life))

    def reply(self, fetch: Fetch, position: int) -> None:
        if self.machine.role not in (Role.LEADING, Role.HANDING_OVER) or fetch.epoch != self.machine.epoch:
            return  # A broker that leads no more has ended the sessions of its slaves.
        entries = self.disk.log[position : position + self.world.block]
        arguments = (fetch.session, position, entries, self.clock_ms(), self.confirmed, len(self.disk.log))
        self.world.send(self, fetch.slave, fetch.slave.take_entries, *arguments)

    # Following.

    def stop_following(self) -> None:
        self.follows = None
        self.session = 0

    def following_stopped(self) -> None:
        self.run(self.machine.following_stopped(self.disk.own_epoch, self.clock_ms()))

    def begin_session(self) -> None:
        self.world.sessions += 1
        self.last_heard_ms = self.world.now_ms
        self.session, self.has_agreed, self.first_master_end = self.world.sessions, False, 1 << 60
        self.fetch(list(self.disk.log))

    def fetch(self, log: list[Entry] | None, *, is_answered: bool = True) -> None:
        """The word that says what this slave has."""
        follow = self.follows
        if follow is None or not self.machine.may_speak:
            return
        master = self.world.find(follow.member, follow.address)
        if master is not None:
            heard_ms = self.heard_master_ms if log is None else 0
            has = (self.end, len(self.disk.log))
            fetch = Fetch(
                self, self.life, self.session, follow.epoch, *has, log, heard_ms, is_answered
            )
            self.world.send(self, master, master.take_fetch, fetch)

    def may_drop(self, position: int, follow: Follow) -> bool:
        """Whether the log may end there to follow this master: see HaFollower."""
        log, disk = self.disk.log, self.disk
        if not log:
            return True
        own = OwnLog(len(log), log[-1].epoch, min(disk.confirmed, len(log)), disk.has_led)
        shares_past = position > HEAD_END or (position == HEAD_END and self.has_own_head)
        return own.kept_for(follow, shares_past=shares_past) <= position

    def take_entries(self, session: int, position: int, entries: list[Entry], said_ms: int, confirmed: int, master_end: int) -> None:
        """The log from a position on: at the start of a session that is where both agree."""
        log = self.disk.log
        if session != self.session or self.follows is None:
            return
        if not self.has_agreed:
            self.refused = not self.may_drop(position, self.follows)
            if self.refused:
                self.session = 0
                return
            self.has_agreed = True
            self.world.check_dropped(self, log[position:])
            del log[position:]
            self.disk.flushed = min(self.disk.flushed, position)
            self.disk.confirmed = min(self.disk.confirmed, position)
        elif position != len(log):
            return
        self.heard_master_ms, self.last_heard_ms = said_ms, self.world.now_ms
        log.extend(entries)
        self.disk.confirmed = max(self.disk.confirmed, min(confirmed, len(log)))
        self.machine.heard(self.clock_ms())
        self.machine.followed(self.disk.own_epoch, not log, LogEnd(log[-1].epoch if log else 0, len(log)))
        self.first_master_end = min(self.first_master_end, master_end)
        if self.end >= self.first_master_end:
            self.run(self.machine.caught_up())
        self.fetch(None)
