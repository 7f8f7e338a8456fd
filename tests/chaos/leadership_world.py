"""Brokers that decide who leads, etcd, the network between them and all their clocks, on one seed and in one thread.

Faults: kills, power cuts, pauses, suspends, links cut one way or both, etcd away, etcd full, answers lost or late by seconds, requests
done long after their time-out, wall clocks that jump, logs whose ends a start cuts (torn writes, or damage that looks like one), replaced
stores, operators who order switches and unclean promotions, folders that go back to an older copy, copies of stores that start beside
them, elected brokers whose disk does not take the new epoch, an etcd that loses its data.

Rules (the letters are those of docs/reliability.md)
    L1  each epoch has one writer, and a later election has a higher epoch
    L2  a new master has all that was acknowledged, unless its election was ordered unclean
    L3  an old master acknowledges nothing once another one has been elected, and knows it; but for orders
    L4  nobody from outside the in-sync set is elected without an order
    L5  when all faults are over, somebody leads within 12 s, takes sends, and all logs become equal
    L6  nobody drops what was acknowledged, but for orders
    L7  where no disk takes messages, the lead stays somewhere
    L8  an election keeps its number as long as etcd has its data
    L9  an operator's order replaces only the one that its operator has seen

Where etcd has lost its data, two members may go on from two pasts. So only L6 holds then, and whoever does not follow has to say why.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any, Final, NamedTuple

from protomq_ha import orders
from protomq_ha.cluster_state import (
    MASTER,
    ORDER,
    PROMOTE_UNCLEAN,
    SWITCH,
    Put,
    Transaction,
    encode_order,
)
from protomq_ha.leadership_values import Ask, Refused, Role
from protomq_ha.orders import OrderStandsError

from .checker import Violation
from .leadership_broker import BLOCK, HOLD_MS, SETTLE_MS, STEP_MS, TICK_MS, Disk, Entry, SimBroker
from .leadership_etcd import SimEtcd

FAULTY_MS: Final = 25_000
ELECTED_MS: Final = 12_000
EQUAL_MS: Final = 6_000
SEND_EVERY_MS: Final = 80
DEAF_MS: Final = 3_000
QUOTA_MINUTES: Final = 5
OPERATOR_MS: Final = 60
"""Between an operator's look at etcd and the order, at most: a broker does both."""
WITHDRAWN_MS: Final = 3_000
"""Until another operator withdraws an order, at most."""
SWITCH_MS: Final = 2_000
"""In which the lead goes from one to the next, where no lease has to run out."""
ETCD_TIMEOUTS_MS: Final = (500, 1_000, 2_500)
LATE_ANSWER_MS: Final = (1_000, 2_400)
"""How late an answer of etcd may come, and is waited for still with the longest time-out."""


KINDS: Final = (
    "kill", "power", "pause", "pause", "suspend", "cut", "cut", "cut etcd", "cut etcd", "etcd away", "clock", "replace", "switch", "switch",
    "unclean", "all down",
)  # fmt: skip
"""Faults, as often as they come."""


class Mood(NamedTuple):
    """What a life is like. Attributes: kinds: of faults; loss, slow: shares of messages that are lost, and that come late by seconds;
    full: share of elections whose winner cannot open its log to lead; forgets: etcd may lose its data; deafens: a master that has handed
    over hears nothing of etcd for some seconds; reopens: slaves open their stores again just when they have caught up; fails: their logs
    fail soon after they have left the set; copied: share of faults by copies of folders; hasty: share of changes of the lead, or of
    the set, with a fault close behind."""

    kinds: tuple[str, ...]
    loss: float
    slow: float
    full: float = 0.0
    forgets: bool = False
    deafens: bool = False
    reopens: bool = False
    fails: bool = False
    copied: float = 0.0
    hasty: float = 0.0

    @classmethod
    def drawn(cls, rng: Random) -> Mood:
        """Half of all lives have a few kinds of faults only, which then come often."""
        kinds = KINDS if rng.random() < 0.5 else tuple(rng.sample(KINDS, rng.randint(2, 5)))
        return cls(kinds, rng.choice((0.0, 0.0, 0.02, 0.1)), rng.choice((0.0, 0.02, 0.1, 0.3)))


class LeadershipWorld:
    """A life of three brokers, or two."""

    def __init__(self, seed: int, fired: Counter[str], mood: Mood | None = None, *, count: int = 0) -> None:
        """`count`: of brokers; 0: it is drawn."""
        self.rng = Random(seed)
        # Of its own, so that all else of a seed is as it is without full disks.
        self.disks = Random(f"disks of {seed}")
        has_faults = mood is None
        mood = mood or Mood.drawn(self.rng)._replace(full=self.disks.choice((0.0, 0.0, 0.3)), forgets=self.disks.random() < 0.25)
        # The same without logs that are cut.
        self.tears = Random(f"tears of {seed}")
        self.torn = self.tears.choice((0.0, 0.0, 0.4)) if has_faults else 0.4 * mood.reopens
        self.kinds, self.loss, self.slow, self.full, self.forgets, self.deafens, self.reopens, self.fails, _, _ = mood
        self.failures = Random(f"failures of {seed}")
        self.operators = Random(f"operators of {seed}")
        # The same without copies of folders.
        self.copies = Random(f"copies of {seed}")
        self.copied = self.copies.choice((0.0, 0.0, 0.3)) if has_faults else mood.copied
        self.snapshots: list[Disk] = []
        self.folders = 0
        # The same without faults in such moments.
        self.moments = Random(f"moments of {seed}")
        self.refusals = Random(f"refusals of {seed}")
        self.hasty = self.moments.choice((0.0, 0.0, 0.3)) if has_faults else mood.hasty
        self.block = self.moments.choice((2, BLOCK)) if self.hasty else BLOCK
        self.answers_late_ms: dict[str, float] = {}
        """How much later than others a broker gets etcd's answers."""
        self.etcd_timeout_ms = self.rng.choice(ETCD_TIMEOUTS_MS)
        self.fired = fired
        self.now_ms = 0.0
        self.has_quotas = False
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...], Any]] = []
        self.event_count = 0
        self.found: list[Violation] = []
        self.numbers = self.heads = self.sessions = self.members = 0
        self.counts_flushed = self.rng.random() < 0.4
        self.cut: set[tuple[str, str]] = set()
        self.etcd = SimEtcd(self.rng)
        self.epochs: dict[int, tuple[str, int]] = {}
        self.is_clean: dict[int, bool] = {}
        self.last_epoch = 0
        self.owes_loss = False
        self.acknowledged: dict[int, Entry] = {}
        self.owed: set[Entry] = set()
        """What was acknowledged since the last order: nobody may drop it."""
        self.was_forgotten = False
        self.set_before: frozenset[str] | None = None
        self.order_before = ""
        self.count = count or self.rng.choice((2, 3, 3))
        self.brokers: list[SimBroker] = []
        for number in range(self.count):
            self.brokers.append(SimBroker(self, number, self.new_disk()))

    def new_disk(self) -> Disk:
        self.members += 1
        self.folders += 1
        return Disk(f"m{self.members}", folder=self.folders)

    def copy_of(self, disk: Disk) -> Disk:
        """Another folder with the same store."""
        self.folders += 1
        return replace(disk, log=list(disk.log), folder=self.folders)

    def is_known_as_older(self, disk: Disk) -> bool:
        """Whether etcd has a later start of this store. A copy of what the last start has is not told from the store itself."""
        start = self.etcd.view.starts.get(disk.member)
        return start is not None and start.number > disk.start_number

    def has_another_copy(self, broker: SimBroker) -> bool:
        """Whether another disk is in the set that has lost nothing, and no disk has lost anything."""
        others = [other.disk for other in self.brokers if other is not broker]
        in_sync = self.etcd.view.in_sync
        if in_sync is None or any(disk.is_damaged or disk.may_lack_tail or disk.is_older_copy for disk in others):
            return False
        return any(disk.member in in_sync.members for disk in others)

    def say(self, rule: str, message: str) -> None:
        self.found.append(Violation(rule, f"{self.now_ms / 1000:.3f} s: {message}"))

    def find(self, member: str, name: str) -> SimBroker | None:
        return next((each for each in self.brokers if (each.disk.member, each.name) == (member, name)), None)

    # Time and network.

    def at(self, delay_ms: float, function: Callable[..., None], *arguments: Any, life: Any = None) -> None:
        """Calls it then, if the process lives that long; `life`: (broker, its life)."""
        self.event_count += 1
        heapq.heappush(self.events, (self.now_ms + delay_ms, self.event_count, function, arguments, life))

    def run_until(self, end_ms: float) -> None:
        while self.events and self.events[0][0] <= end_ms and not self.found:
            self.now_ms, _, function, arguments, life = heapq.heappop(self.events)
            if life is not None:
                broker, number = life
                if broker.life != number:
                    continue
                if broker.paused_until_ms > self.now_ms:
                    broker.waiting.append((function, arguments, life))
                    continue
            function(*arguments)
        self.now_ms = end_ms

    def delay_ms(self) -> float:
        return self.rng.uniform(300, 5_000) if self.rng.random() < self.slow else self.rng.uniform(1, 15)

    def is_lost(self, source: str, target: str) -> bool:
        return (source, target) in self.cut or self.rng.random() < self.loss

    def send(
        self, source: SimBroker, target: SimBroker, function: Callable[..., None], *arguments: Any
    ) -> None:
        """A message; what comes for a process that has ended is lost."""
        if not self.is_lost(source.name, target.name) and target.is_up:
            self.at(self.delay_ms(), function, *arguments, life=(target, target.life))

    def ask_etcd(self, broker: SimBroker, ask: Ask) -> None:
        """A request on its way: it may be done after the broker has given it up, or has ended."""
        if not self.is_lost(broker.name, "etcd"):
            self.at(self.delay_ms(), self.do, broker, broker.life, ask)

    def do(self, broker: SimBroker, life: int, ask: Ask) -> None:
        if not self.etcd.is_up:
            return
        self.etcd.expire(self.now_ms)
        self.note_before()
        revision, election = self.etcd.revision, self.etcd.view.election
        result = self.etcd.do(ask.request, self.now_ms)
        if isinstance(result, Refused) and isinstance(ask.request, Transaction) and self.refusals.random() < 0.1:
            self.etcd.commit(ask.request)  # a quota that it has just reached
        if election and self.etcd.view.election != election:
            self.say("L8", f"{broker.disk.member} gives the election {election} the number {self.etcd.view.election}")
        if isinstance(ask.request, Transaction) and self.etcd.revision != revision:
            self.check_transaction(broker, life)
            self.hurt_soon()
            in_sync = self.etcd.view.in_sync
            if self.deafens and in_sync is not None and in_sync.successor and self.etcd.view.master is None:
                self.cut_for(DEAF_MS, ("etcd", broker.name))
        if not self.is_lost("etcd", broker.name):
            late_ms = self.answers_late_ms.get(broker.name, 0.0)
            self.at(self.delay_ms() + late_ms, broker.answered, ask.number, result, life=(broker, life))

    # Rules.

    def check_transaction(self, broker: SimBroker, life: int) -> None:
        view = self.etcd.view
        if view.master is None or view.master.revision != view.revision:
            return
        epoch, member = view.master.epoch, view.master.member
        is_ordered = self.order_before == member
        if is_ordered:
            self.owed.clear()
        if self.was_forgotten:
            self.fired["elected since etcd has forgotten"] += 1
            return
        if epoch == self.last_epoch and self.epochs.get(epoch, (member,))[0] == member:
            self.fired["returned"] += 1
            return
        if epoch <= self.last_epoch:
            self.say("L1", f"{member} is elected for epoch {epoch}, {self.last_epoch} was before")
        before = self.set_before
        if before is not None and member not in before and not is_ordered:
            self.say("L4", f"{member} is elected, {sorted(before)} is the in-sync set")
        self.epochs[epoch] = (member, life)
        self.last_epoch = epoch
        # A loss by order is known when its master opens; one that died before that leaves it to the next of the same set.
        self.owes_loss = self.owes_loss or is_ordered
        self.is_clean[epoch] = not self.owes_loss
        self.fired["elected" if not is_ordered else "elected unclean"] += 1
        if before is not None and member in before and len(before) > 1:
            self.fired["elected of several"] += 1

    def note_before(self) -> None:
        """What an election in this step is judged by."""
        view = self.etcd.view
        self.set_before = view.in_sync.members if view.in_sync is not None else None
        order = view.order
        self.order_before = order.target if order is not None and order.kind == PROMOTE_UNCLEAN else ""

    def check_lead(self, broker: SimBroker, epoch: int) -> None:
        """A new master opens its log; one that slept since its election, and opens it behind another's, acknowledges nothing."""
        if self.was_forgotten:
            return
        if epoch < self.last_epoch:
            self.fired["opened too late"] += 1
            return
        self.owes_loss = False
        log = broker.disk.log
        lacks = [at for at, entry in self.acknowledged.items() if at >= len(log) or log[at] != entry]
        if lacks and self.is_clean.get(epoch, True):
            what = f"{len(lacks)} of what was acknowledged, from {min(lacks)} on"
            self.say("L2", f"{broker.disk.member} leads epoch {epoch} and lacks {what}")
        for at in lacks:
            del self.acknowledged[at]
        self.fired["lost by order"] += len(lacks)

    def check_dropped(self, broker: SimBroker, entries: list[Entry]) -> None:
        """A broker drops the end of its log to follow another one."""
        lost = self.owed.intersection(entries)
        if lost:
            self.say("L6", f"{broker.disk.member} drops {len(lost)} of what was acknowledged, without an order: {sorted(lost)[:3]}")

    def check_writer(self, broker: SimBroker) -> None:
        if self.was_forgotten:
            return
        writer = self.epochs.get(broker.machine.epoch)
        if writer != (broker.disk.member, broker.life):
            self.say("L1", f"{broker.disk.member} writes epoch {broker.machine.epoch}, which is that of {writer}")

    def check_alone(self, broker: SimBroker) -> None:
        """A broker believes that it may acknowledge."""
        if self.was_forgotten:
            return
        later = [epoch for epoch in self.epochs if epoch > broker.machine.epoch]
        if later and all(self.is_clean[epoch] for epoch in later):
            begun = f"epoch {broker.machine.epoch}, and {max(later)} has begun"
            self.say("L3", f"{broker.disk.member} may acknowledge in {begun}")

    def check_acknowledged(self, broker: SimBroker, positions: list[int]) -> None:
        """A broker answers its senders."""
        self.check_alone(broker)
        if self.was_forgotten:
            in_sync = self.etcd.view.in_sync
            # An operator has to stop the old master before: else what it acknowledges behind the order is lost by it, too.
            if in_sync is None or broker.machine.epoch >= in_sync.unclean_epoch:
                self.owed.update(broker.disk.log[at] for at in positions)
            self.fired["acknowledged"] += len(positions)
            return
        if any(epoch > broker.machine.epoch for epoch in self.epochs):
            return
        for at in positions:
            entry = broker.disk.log[at]
            self.owed.add(entry)
            if self.acknowledged.setdefault(at, entry) != entry:
                self.say("L2", f"{entry} is acknowledged at {at}, as {self.acknowledged[at]} was")
            self.fired["acknowledged"] += 1
        if positions and self.etcd.view.master is None:
            self.fired["acknowledged without a lease"] += 1

    # Faults.

    def hurt_soon(self) -> None:
        """The lead or the set has just changed: members may rely on what others do not have yet. So a fault comes close behind, one that
        hits those who matter now, or any. Or whoever is away is back."""
        if not self.is_faulty or self.moments.random() >= self.hasty:
            return
        view, before = self.etcd.view, self.set_before
        when_ms = self.moments.choice((20, 200, 1_000)) * self.moments.uniform(0.3, 1.7)
        joined = view.in_sync.members - before if view.in_sync is not None and before is not None else frozenset()
        is_led_anew = view.master is not None and view.master.revision == view.revision
        if self.moments.random() < 0.3:
            self.at(when_ms, self.moments.choice((self.come_back, self.fault)))
        elif is_led_anew and view.master is not None:
            self.at(when_ms / 5, self.trade_places, view.master.member)
        elif joined:
            self.at(when_ms / 5, self.leave_alone, min(joined))

    def trade_places(self, member: str) -> None:
        """All but this one are killed, if they are up, and else are back."""
        self.fired["others traded places"] += 1
        away = [broker for broker in self.brokers if not broker.is_up]
        self.leave_alone(member)
        self.cut.clear()
        for broker in away:
            self.revive(broker)

    def leave_alone(self, member: str) -> None:
        """All but this one are killed, and are back some seconds later."""
        self.fired["left alone"] += 1
        for broker in self.brokers:
            if broker.disk.member != member and broker.is_up:
                broker.kill()
                self.at(self.moments.uniform(4_000, 9_000), self.revive, broker)

    def come_back(self) -> None:
        """All who are away are back, and all links are whole."""
        self.cut.clear()
        for broker in self.brokers:
            self.revive(broker)

    def fault(self) -> None:
        """One of them, and when it is over."""
        rng = self.rng
        broker = rng.choice(self.brokers)
        if rng.random() < 0.5:
            broker = next((each for each in self.brokers if each.machine.role is Role.LEADING), broker)
        kind = rng.choice(self.kinds)
        if self.forgets and self.disks.random() < 0.15:
            kind = "forget"
        length_ms = rng.choice((400, 2_000, 4_000, 8_000)) * rng.uniform(0.5, 1.5)
        if self.copied:
            self.snapshots.append(self.copy_of(self.copies.choice(self.brokers).disk))
            if self.copies.random() < self.copied:
                self.copy_a_folder(length_ms)
                return
        if kind in ("kill", "power", "replace", "all down"):
            victims = self.brokers if kind == "all down" else [broker]
            for victim in victims:
                if victim.is_up:
                    victim.cut_power() if kind == "power" or rng.random() < 0.2 else victim.kill()
                    if kind == "replace" and rng.random() < 0.3:
                        victim.disk = self.new_disk()
                    self.at(rng.choice((50.0, length_ms)), self.revive, victim)
        elif kind in ("pause", "suspend"):
            broker.paused_until_ms = max(broker.paused_until_ms, self.now_ms + length_ms)
            self.at(length_ms, self.wake, broker)
            if kind == "suspend":
                broker.asleep_ms += length_ms
        elif kind in ("cut", "cut etcd"):
            other = "etcd" if kind == "cut etcd" else rng.choice([each.name for each in self.brokers])
            links = rng.choice(([(broker.name, other)], [(other, broker.name)], [(broker.name, other), (other, broker.name)]))
            self.cut_for(length_ms, *links)
        elif kind == "etcd away" and self.refusals.random() < 0.4:
            self.fired["etcd refuses"] += 1
            self.etcd.refusal, self.etcd.refuses_reads = "no space", self.refusals.random() < 0.5
            self.at(length_ms, self.stop_refusing)
        elif kind == "etcd away":
            self.etcd.is_up = False
            self.at(length_ms, lambda: self.etcd.come_back(self.now_ms))
        elif kind == "forget":
            self.etcd.forget()
            self.was_forgotten = True
        elif kind == "clock":
            broker.wall_offset_ms += rng.choice((-1, 1)) * rng.uniform(1_000, 60_000)
        else:
            self.order(kind, broker)
            if self.operators.random() < 0.2:
                self.at(self.operators.uniform(0, WITHDRAWN_MS), self.withdraw_order)
        self.fired[kind] += 1

    def copy_a_folder(self, length_ms: float) -> None:
        """A member's folder goes back to an older copy of itself, or a copy starts beside it, with an id of its own or with the same."""
        snapshot = self.copies.choice(self.snapshots)
        broker = next((each for each in self.brokers if each.disk.member == snapshot.member), None)
        if broker is None or not self.is_known_as_older(snapshot) or snapshot.may_lack_tail or snapshot.was_cut:
            return
        disk = self.copy_of(snapshot)
        disk.is_older_copy = True
        if self.copies.random() < 0.5:
            if not self.has_another_copy(broker):
                return
            self.fired["older folder"] += 1
            broker.kill()
            broker.disk = disk
            if self.copies.random() < 0.5:
                self.stop_all(broker, STEP_MS)
            self.at(STEP_MS, self.revive, broker)
        elif len(self.brokers) == self.count:
            self.fired["copy beside its store"] += 1
            copy = SimBroker(self, self.count, disk, broker.broker_id if self.copies.random() < 0.3 else 0)
            self.brokers.append(copy)
            self.at(length_ms, self.end_copy, copy)

    def end_copy(self, copy: SimBroker) -> None:
        """It is gone for good."""
        if copy in self.brokers:
            copy.kill()
            self.brokers.remove(copy)

    def cut_for(self, length_ms: float, *links: tuple[str, str]) -> None:
        """No message takes these ways."""
        self.cut.update(links)
        self.at(length_ms, self.cut.difference_update, links)

    def wake(self, broker: SimBroker) -> None:
        """All that came in the pause is seen now, in its order."""
        if self.now_ms >= broker.paused_until_ms:
            waiting, broker.waiting = broker.waiting, []
            for function, arguments, life in waiting:
                self.at(0, function, *arguments, life=life)

    @property
    def is_faulty(self) -> bool:
        """Whether faults still come."""
        return self.now_ms < FAULTY_MS - SETTLE_MS

    def stop_all(self, last: SimBroker, delay_ms: float = SETTLE_MS) -> None:
        """All processes are killed, the last one after a delay. It is back at once, and the others are some seconds later."""
        for broker in self.brokers:
            if broker is not last and broker.is_up:
                broker.kill()
                self.at(self.tears.uniform(4_000, 9_000), self.revive, broker)
        self.at(delay_ms, self.restart, last, life=(last, last.life))

    def restart(self, broker: SimBroker) -> None:
        """Kills a process, and starts it again."""
        broker.kill()
        self.at(STEP_MS, self.revive, broker)

    def revive(self, broker: SimBroker) -> None:
        if not broker.is_up and broker in self.brokers:
            broker.start()

    def order(self, kind: str, broker: SimBroker) -> None:
        """An operator's; an unclean one where nobody leads. Some write over whatever is there, by a tool of etcd."""
        view = self.etcd.view
        if kind == "switch":
            wanted = SWITCH, self.rng.choice(("", broker.disk.member))
        elif view.master is None and view.in_sync is not None:
            wanted = PROMOTE_UNCLEAN, broker.disk.member
        else:
            return
        if self.operators.random() < 0.3:
            self.etcd.commit(Transaction((), (Put(ORDER, encode_order(*wanted)),)))
        else:
            self.leave_order(*wanted)

    def withdraw_order(self) -> None:
        """The same: it looks, and takes away what it has seen."""
        seen = self.etcd.view
        transaction = orders.to_withdraw(seen)
        if transaction is not None:
            self.at(self.operators.uniform(0, OPERATOR_MS), self.write_order, transaction, seen.key_revision(ORDER))

    def leave_order(self, kind: str, target: str) -> None:
        """A broker does it for an operator: it looks at etcd, and writes the order a moment later, if it may be written."""
        seen = self.etcd.view
        try:
            transaction = orders.to_leave(seen, kind, target)
        except OrderStandsError:
            self.fired["order refused"] += 1
            return
        if transaction is not None:
            self.at(self.operators.uniform(0, OPERATOR_MS), self.write_order, transaction, seen.key_revision(ORDER))

    def write_order(self, transaction: Transaction, seen_revision: int) -> None:
        if not self.etcd.is_up:
            return
        self.etcd.expire(self.now_ms)
        revision = self.etcd.view.key_revision(ORDER)
        done = self.etcd.commit(transaction)
        if done is None or not done.is_made:
            self.fired["order came too late"] += 1
        elif revision != seen_revision:
            self.say("L9", f"an order that saw revision {seen_revision} replaces revision {revision}: {self.etcd.view.order}")
        else:
            what = "order replaced another one" if transaction.puts else "order withdrawn"
            self.fired[what] += revision > 0

    # A life.

    def run(self) -> None:
        rng = self.rng
        self.at(0, self.clients)
        when_ms = 1_000.0
        while when_ms < FAULTY_MS:
            when_ms += rng.choice((100, 800, 1_500, 3_000)) * rng.uniform(0.5, 1.5)
            if when_ms < FAULTY_MS:
                self.at(when_ms, self.fault)
        self.run_until(FAULTY_MS)
        if not self.found:
            self.heal()

    @property
    def leader(self) -> SimBroker:
        """Who leads."""
        return next(each for each in self.brokers if each.is_up and each.machine.role is Role.LEADING)

    @property
    def is_led(self) -> bool:
        """Whether somebody leads, or is about to."""
        leading = (Role.LEADING, Role.HANDING_OVER, Role.OPENING)
        return any(broker.is_up and broker.machine.role in leading for broker in self.brokers)

    def run_until_all_are_in_sync(self) -> None:
        """Nobody has sent anything yet."""
        self.run_to(lambda: self.in_sync_count == len(self.brokers))

    def run_to(self, happens: Callable[[], bool]) -> None:
        """In small steps, until it has happened."""
        while not happens():
            assert self.now_ms < FAULTY_MS, "nothing is in its way"
            self.run_until(self.now_ms + STEP_MS)

    def switch(self) -> None:
        """An operator has the lead given to another one, and all are in sync again."""
        former = self.leader
        self.order("switch", self.rng.choice([each for each in self.brokers if each is not former]))
        self.run_to(lambda: former.machine.role is Role.FOLLOWING and self.in_sync_count == len(self.brokers))

    @property
    def in_sync_count(self) -> int:
        """Members of the set in etcd; 0 while nobody leads."""
        view = self.etcd.view
        return len(view.in_sync.members) if view.in_sync is not None and view.master is not None else 0

    def clients(self) -> None:
        for broker in self.brokers:
            if broker.is_up and broker.paused_until_ms <= self.now_ms:
                broker.send()
        self.at(SEND_EVERY_MS, self.clients)

    def stop_refusing(self) -> None:
        """Etcd has room, and asks for no password."""
        self.etcd.refusal = ""

    def heal(self) -> None:
        """All faults end; then somebody must lead."""
        for copy in self.brokers[self.count :]:
            self.end_copy(copy)
        self.loss = self.slow = self.full = 0.0
        self.cut.clear()
        if not self.etcd.is_up:
            self.etcd.come_back(self.now_ms)
        self.stop_refusing()
        for broker in self.brokers:
            broker.paused_until_ms = self.now_ms
            self.wake(broker)
            self.revive(broker)
        self.run_until(self.now_ms + ELECTED_MS)
        self.etcd.expire(self.now_ms)
        view = self.etcd.view
        if not self.found and view.master is None:
            members = view.in_sync.members if view.in_sync is not None else frozenset()
            here = {broker.disk.member for broker in self.brokers}
            # Whoever has cut its log waits for those that were replaced.
            waiting = set() if members <= here else {broker.disk.member for broker in self.brokers if broker.disk.was_cut}
            if members & here - waiting and not self.was_forgotten:
                self.say("L5", f"nobody leads, though {sorted(members & here - waiting)} could")
                return
            self.fired["needed an order"] += 1
            self.leave_order(PROMOTE_UNCLEAN, self.brokers[0].disk.member)
        before = self.numbers
        acknowledged = self.fired["acknowledged"]
        self.run_until(self.now_ms + EQUAL_MS)
        if self.found:
            return
        if self.numbers == before or self.fired["acknowledged"] == acknowledged:
            roles = {broker.name: broker.machine.role.value for broker in self.brokers}
            self.say("L5", f"no send is taken and acknowledged at the end: {roles}")
            return
        if self.was_forgotten:
            self.check_said()
            return
        there = self.brokers
        lengths = [len(broker.disk.log) for broker in there]
        shared = min(lengths)
        if max(lengths) - shared > 60 or any(b.disk.log[:shared] != there[0].disk.log[:shared] for b in there):
            self.say("L5", f"logs differ at the end: {lengths}")


    def check_said(self) -> None:
        """Whoever neither leads nor follows with the log of the master says why."""
        leader = next((each for each in self.brokers if each.machine.role is Role.LEADING), None)
        for broker in self.brokers:
            shared = min(len(broker.disk.log), len(leader.disk.log)) if leader is not None else 0
            is_there = leader is not None and shared and broker.disk.log[:shared] == leader.disk.log[:shared]
            if not is_there and not broker.refused and not broker.machine.problems(broker.clock_ms()):
                self.say("L5", f"{broker.disk.member} does not follow, and does not say why")
        self.fired["refused to drop its log"] += sum(broker.refused for broker in self.brokers)


def check_young_cluster(seed: int, fired: Counter[str]) -> list[Violation]:
    """All members have the head of the log, and two a message that was not acknowledged, when those two are killed. The third one leads."""
    world = LeadershipWorld(seed, fired, Mood((), 0.0, 0.0), count=3)
    world.run_until_all_are_in_sync()
    master = world.leader
    heir, other = world.rng.sample([each for each in world.brokers if each is not master], 2)
    world.cut.add((master.name, heir.name))
    master.send()
    world.run_until(world.now_ms + 2 * HOLD_MS)
    assert len(other.disk.log) == len(master.disk.log) > len(heir.disk.log) > 0
    for victim in world.rng.sample([master, other], 2):
        victim.kill()
    world.at(0, world.clients)
    world.run_until(world.now_ms + ELECTED_MS)
    fired["a young heir"] += heir.machine.role is Role.LEADING
    world.heal()
    return world.found


def check_restored_etcd(seed: int, fired: Counter[str]) -> list[Violation]:
    """A master acknowledges alone, and is killed. Then etcd is restored from a copy that names the others, who lack that.

    The copy is of the same epoch, and the master has written down what is confirmed. Or it is older, and that is not written down yet.
    """
    world = LeadershipWorld(seed, fired, Mood((), 0.0, 0.0), count=3)
    world.run_until_all_are_in_sync()
    copy, first = world.etcd.copy(), world.leader
    is_older = world.rng.random() < 0.5
    if is_older:
        world.switch()
    master = world.leader
    assert (master is not first) is is_older
    for other in world.brokers:
        if other is not master:
            other.kill()
    world.run_to(lambda: world.in_sync_count == 1)
    master.send()
    world.run_to(lambda: len(world.owed) > 0)
    if not is_older:
        world.run_until(world.now_ms + 2 * TICK_MS)
    master.kill()
    world.etcd.restore(copy, world.now_ms)
    world.was_forgotten = True
    world.at(0, world.clients)
    for other in world.brokers:
        if other is not master:
            world.revive(other)
    world.run_until(world.now_ms + ELECTED_MS)
    assert world.leader is not master
    world.revive(master)
    world.run_until(world.now_ms + EQUAL_MS)
    fired["kept from a restored etcd"] += master.refused
    world.heal()
    return world.found


def check_older_etcd(seed: int, fired: Counter[str]) -> list[Violation]:
    """A member misses what the others acknowledge, and all are killed. Then etcd is restored from a copy that is older than all their logs,
    and that member, which the copy names, is back first. It may not lead before an operator has looked."""
    world = LeadershipWorld(seed, fired, Mood((), 0.0, 0.0), count=3)
    world.run_until_all_are_in_sync()
    copy = world.etcd.copy()
    world.switch()
    master = world.leader
    late = world.rng.choice([each for each in world.brokers if each is not master])
    master.send()
    world.run_to(lambda: late.disk.log == master.disk.log and late.disk.own_epoch == master.machine.epoch)
    late.kill()
    world.run_to(lambda: world.in_sync_count == len(world.brokers) - 1)
    acknowledged = len(world.owed)
    master.send()
    world.run_to(lambda: len(world.owed) > acknowledged)
    for broker in world.brokers:
        if broker.is_up:
            broker.kill()
    world.etcd.restore(copy, world.now_ms)
    world.was_forgotten = True
    world.at(0, world.clients)
    world.revive(late)
    world.run_until(world.now_ms + ELECTED_MS)
    fired["ahead of a restored etcd"] += 1
    if late.machine.role is not Role.FOLLOWING:
        world.say("L2", f"{late.disk.member} leads by itself, though etcd was restored, and lacks what was acknowledged")
    elif not late.machine.problems(late.clock_ms()):
        world.say("L5", f"{late.disk.member} does not lead, and does not say why")
    if not world.found:
        for broker in world.brokers:
            world.revive(broker)
        world.etcd.commit(Transaction((), (Put(ORDER, encode_order(PROMOTE_UNCLEAN, master.disk.member)),)))
        world.heal()
    return world.found


def check_copy_under_brokers(seed: int, fired: Counter[str]) -> list[Violation]:
    """The lead changes some times, and all is acknowledged. Then etcd is restored from a copy of before, while all brokers run on. None of
    them leads by itself, and whomever an operator promotes leads, in a later epoch."""
    world = LeadershipWorld(seed, fired, Mood((), 0.0, 0.0), count=3)
    world.run_until_all_are_in_sync()
    copy = world.etcd.copy()
    world.at(0, world.clients)
    for _ in range(world.rng.randint(1, 3)):
        world.switch()
        world.run_until(world.now_ms + SWITCH_MS)
    epoch = world.leader.machine.epoch
    world.etcd.restore(copy, world.now_ms)
    world.was_forgotten = True
    promoted = world.rng.choice(world.brokers)
    orders_ms = world.rng.choice((0, ELECTED_MS))  # before the brokers have seen the copy, or long behind that
    world.run_until(world.now_ms + orders_ms)
    fired["restored under brokers"] += 1
    if orders_ms and world.is_led:
        world.say("L2", "somebody leads by itself, though etcd was restored")
    world.etcd.commit(Transaction((), (Put(ORDER, encode_order(PROMOTE_UNCLEAN, promoted.disk.member)),)))
    world.run_until(world.now_ms + ELECTED_MS)
    if promoted.machine.role is not Role.LEADING:
        world.say("L5", f"{promoted.disk.member} does not take the order to lead: etcd has {world.etcd.view.master}")
    elif promoted.machine.epoch <= epoch:
        world.say("L1", f"{promoted.disk.member} leads epoch {promoted.machine.epoch}, {epoch} was before")
    if not world.found:
        world.heal()
    return world.found


def check_quotas(seed: int, fired: Counter[str]) -> list[Violation]:
    """All disks report room, and refuse what a master writes. The lead must not go round: each change stops what readers get, too."""
    world = LeadershipWorld(seed, fired, Mood((), 0.0, 0.0), count=3)
    world.run_until_all_are_in_sync()
    world.has_quotas = True
    world.at(0, world.clients)
    for minute in range(QUOTA_MINUTES):
        elected_before = fired["elected"]
        world.run_until(world.now_ms + 60_000)
        changes = fired["elected"] - elected_before
        fired["given away for a quota"] += changes
        if changes > (2 if minute == QUOTA_MINUTES - 1 else 2 * len(world.brokers)):
            world.say("L7", f"{changes} changes of the master in a minute, and no disk takes anything")
        if not world.is_led:  # the lead may be on its way
            world.run_until(world.now_ms + SWITCH_MS)
        if not world.is_led:
            world.say("L7", "nobody leads, and readers have only what slaves give")
    world.has_quotas = False
    if not world.found:
        world.heal()
    return world.found


def check_two_operators(seed: int, fired: Counter[str]) -> list[Violation]:
    """The only member of the set dies, and a switch stands that nobody takes. Two operators have the others promoted at about that time,
    each another one. One of them leads; the order of the other one was refused, or replaced before it was taken."""
    world = LeadershipWorld(seed, fired, Mood((), 0.0, 0.0), count=3)
    world.run_until_all_are_in_sync()
    master = world.leader
    others = [each for each in world.brokers if each is not master]
    for other in others:
        other.kill()
    world.run_to(lambda: world.in_sync_count == 1)
    master.send()
    world.run_to(lambda: len(world.owed) > 0)
    master.kill()
    world.run_until(world.now_ms + ELECTED_MS)
    world.etcd.expire(world.now_ms)
    world.leave_order(SWITCH, master.disk.member)
    for other in others:
        world.revive(other)
    world.at(0, world.clients)
    world.run_until(world.now_ms + SWITCH_MS)
    assert world.etcd.view.order is not None
    for other in world.operators.sample(others, 2):
        world.at(world.operators.uniform(0, 4 * OPERATOR_MS), world.leave_order, PROMOTE_UNCLEAN, other.disk.member)
    world.run_until(world.now_ms + SWITCH_MS)
    if not world.found and not world.is_led:
        world.say("L5", f"nobody leads by the order: {world.etcd.view.order}")
    if not world.found:
        world.heal()
    return world.found


def check_late_answers(seed: int, fired: Counter[str]) -> list[Violation]:
    """Etcd renews the master's lease, and its answer takes some time, in which the master is cut off from all. Another one leads when the
    lease has run out. The old one has stopped before, since its lease counts from when it sent the renewal."""
    world = LeadershipWorld(seed, fired, Mood((), 0.0, 0.0), count=3)
    world.etcd_timeout_ms = max(ETCD_TIMEOUTS_MS)
    world.run_until_all_are_in_sync()
    world.at(0, world.clients)
    world.run_until(world.now_ms + world.rng.uniform(0, SWITCH_MS))
    master = world.leader
    lease = world.etcd.leases[world.etcd.rows[MASTER].lease]
    ends_ms = lease.ends_ms
    world.answers_late_ms[master.name] = world.rng.uniform(*LATE_ANSWER_MS)
    world.run_to(lambda: lease.ends_ms > ends_ms)
    world.answers_late_ms.clear()
    for name in ("etcd", *(other.name for other in world.brokers if other is not master)):
        world.cut.update(((master.name, name), (name, master.name)))
    world.run_until(world.now_ms + ELECTED_MS)
    fired["renewed by a late answer"] += 1
    view = world.etcd.view
    if not world.found and (view.master is None or view.master.member == master.disk.member):
        world.say("L5", f"no other one leads: etcd has {view.master}")
    if not world.found:
        world.heal()
    return world.found


def check_cut_logs(seed: int, fired: Counter[str]) -> list[Violation]:
    """All are killed, and all starts cut the ends of their logs. One of them may take damage for a torn write, and has lost what was
    acknowledged: it says so to the others, and one that has the most leads."""
    world = LeadershipWorld(seed, fired, Mood((), 0.0, 0.0))
    world.run_until_all_are_in_sync()
    world.at(0, world.clients)
    world.run_until(world.now_ms + world.rng.uniform(SETTLE_MS, SWITCH_MS))
    world.torn = 1.0
    for broker in world.brokers:
        broker.kill()
        world.at(world.tears.uniform(STEP_MS, SETTLE_MS), world.revive, broker)
    world.run_until(world.now_ms + ELECTED_MS)
    fired["all logs were cut"] += 1
    if not world.found:
        world.heal()
    return world.found


def check_leadership(seed: int, fired: Counter[str], mood: Mood | None = None) -> list[Violation]:
    """A random life."""
    world = LeadershipWorld(seed, fired, mood)
    world.run()
    return world.found
