"""Drives the state machine `protomq_ha.leadership` in a broker: sends its requests to etcd, ticks it, and answers the broker's threads from
it. One lock protects the machine.

    ha lane            report: what the slaves have -> what is confirmed, and may be answered
    send lane          confirm_alone: the same after an append, where no other member is waited for
    follower's thread  target, may_speak, heard, followed
                       on_fork: what this slave's damaged log has behind this point, the master's never had
    elected_broker     is told all effects but `Ask`, in order; answers with opened or unable, following_stopped

Nothing here knows a store or a socket.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, NamedTuple

from protomq_ha.cluster_state import (
    ELECTION,
    IN_SYNC,
    NAME_PREFIX,
    START_PREFIX,
    SWITCH,
    Alive,
    ClusterView,
    Compare,
    LogEnd,
    MemberName,
    Put,
    Transaction,
    encode_election,
)
from protomq_ha.leadership import Leadership
from protomq_ha.leadership_values import (
    Ask,
    Committed,
    Effect,
    Follow,
    ReadCluster,
    Refused,
    Result,
    Role,
    Settings,
    StopFollowing,
    StopLeading,
)
from protomq_ha.orders import OrderStandsError, standing_order, to_leave, to_withdraw, withdrawn_by

if TYPE_CHECKING:
    from protomq_ha.in_sync_set import MemberReport

    from .etcd_gateway import EtcdGateway
    from .store.log.agreement import LogPoint

log = logging.getLogger("protomq.broker")

TICK_S: Final = 0.05
HURRIED_TICK_S: Final = 0.01
"""The same while the lead changes: sends wait for it."""
HAND_OVER_LOOK_S: Final = 0.02
ASKERS: Final = 4
"""Threads that ask etcd. At most one transaction, one read, one request about the lease and one operator's order are under way."""


class Standing(NamedTuple):
    """The rules that hold for a master's sends now.

    Attributes:
        copies: number of members of the in-sync set, with the master itself.
        confirmed_position: all of them have the log up to this position, and sends below it may be acknowledged.
        takes_sends: whether sends may be appended.
        alone: whether the master waits for no other member.
        late: number of members of the set that do not follow the master now, or do not keep up.
    """

    copies: int
    confirmed_position: int
    takes_sends: bool
    alone: bool
    late: int = 0


NO_STANDING: Final = Standing(1, 0, False, False)


class LeadershipView(NamedTuple):
    """What the broker knows of who leads."""

    member: str
    state: str
    epoch: int
    master: str
    in_sync: tuple[str, ...]
    problems: tuple[str, ...]
    broker_id: int = 0
    """While it follows."""
    known: tuple[tuple[str, MemberName], ...] = ()
    """Members that are in the in-sync set or were, and the brokers that they are of."""
    late: tuple[str, ...] = ()
    """Of a master: members of the set that do not follow it now, or do not keep up."""
    etcd_problem: str = ""
    """Why nobody can take over, join or leave the set."""


class OrderRefusedError(Exception):
    """The order was not left, because etcd cannot be reached."""


class OrderPendingError(OrderRefusedError):
    """The order was not left, because another order is there."""


class OrderUncertainError(OrderRefusedError):
    """Nobody knows whether the order was left."""


class UnknownMemberError(Exception):
    """Etcd knows no such member that may be forgotten."""


class LeadershipDriver:
    """See the module's docstring. Call `begin` first; before it nobody leads and this broker follows nobody."""

    def __init__(
        self, etcd: EtcdGateway, now_ms: Callable[[], int], on_effect: Callable[[Effect], None], broker_id: int = 0
    ) -> None:
        """`now_ms`: CLOCK_BOOTTIME. `broker_id`: while it follows.

        `on_effect` is called under the lock, on any thread, so it must only pass the effect on."""
        self._etcd = etcd
        self.now_ms = now_ms
        self._on_effect = on_effect
        self._broker_id = broker_id
        self._lock = threading.Lock()
        self._machine: Leadership | None = None
        self._target: Follow | None = None
        self._confirmed_position = 0
        self._found_election = 0
        self._closing = threading.Event()
        self._askers = ThreadPoolExecutor(ASKERS, "protomq-etcd")
        self._thread = threading.Thread(target=self._run, name="protomq-leadership", daemon=True)
        self.on_standing: Callable[[], None] = lambda: None
        """Called on any thread when `report` may return something else. Set by the broker that leads."""
        self.on_fork: Callable[[LogPoint], None] = lambda point: None
        """Called on the follower's thread if a damaged log is to end at this point. Set by the elected broker."""

    def find_election(self, new: int) -> None:
        """Looks up the number of the election before the broker registers, and writes this new one where etcd has none. Takes some seconds
        at worst. If etcd does not answer, `ElectionKnown` comes later.
        """
        view = self._etcd.ask(ReadCluster())
        if isinstance(view, ClusterView) and not view.key_revision(ELECTION):
            self._etcd.ask(Transaction((Compare(ELECTION, 0),), (Put(ELECTION, encode_election(new)),)))
            view = self._etcd.ask(ReadCluster())
        if isinstance(view, ClusterView):
            self._found_election = view.election

    def in_the_way(self, member: str, process: str, place: str) -> Alive | None:
        """Looks up which other process lives with this store or this broker's id, before the broker registers. None: there is none, or etcd
        does not answer."""
        view = self._etcd.ask(ReadCluster())
        return view.in_the_way(member, self._broker_id, process, place) if isinstance(view, ClusterView) else None

    @property
    def election(self) -> int:
        """The number of the election; 0: etcd has none, as far as this broker knows."""
        view = self._machine.view if self._machine is not None else None
        return view.election if view is not None else self._found_election

    def begin(
        self,
        settings: Settings,
        own_epoch: int,
        *,
        end_position: int,
        tail_may_be_lost: bool,
        is_damaged: bool = False,
        cut_end: LogEnd | None = None,
        start_number: int = 0,
    ) -> None:
        """Starts the machine, once the store is open and follows. `end_position`: of its log. `is_damaged`: see `damaged`. `cut_end`: see
        `end_was_cut`. `start_number`: the one that the folder has.
        """
        with self._lock:
            self._machine = Leadership(
                settings,
                own_epoch,
                self.now_ms(),
                log_is_empty=not end_position,
                end_position=end_position,
                tail_may_be_lost=tail_may_be_lost,
                cut_end=cut_end,
                start_number=start_number,
            )
            self._machine.is_damaged = is_damaged
        self._thread.start()

    def close(self) -> None:
        """Stops asking etcd and giving effects."""
        with self._lock:
            self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self._askers.shutdown(wait=True, cancel_futures=True)
        self._etcd.close()

    # A slave.

    @property
    def target(self) -> Follow | None:
        """Returns whom to follow; None: nobody. A damaged slave only compares its log with that of the master (`is_damaged`)."""
        return self._target

    def may_speak(self, target: Follow) -> bool:
        """Whether this slave may tell this master now which part of the log it has."""
        with self._lock:
            machine = self._machine
            return machine is not None and machine.may_speak and self._target == target

    def heard(self, own_epoch: int, end: LogEnd, *, has_caught_up: bool) -> None:
        """Notes that the master has said something, which is stored. What the slave says to it from now on binds the slave.

        `end`: of its log, with the epoch of the last append. `has_caught_up`: it has all that the master had when the session began.
        """
        with self._lock:
            machine = self._machine
            if machine is not None:
                machine.heard(self.now_ms())
                machine.followed(own_epoch, not end.position, end)
                if has_caught_up:
                    self._pass_on(machine.caught_up())

    def following_stopped(self, own_epoch: int) -> None:
        """Notes that this slave says nothing more to a master."""
        with self._lock:
            machine = self._begun
            self._pass_on(machine.following_stopped(own_epoch, self.now_ms()))

    def start_noted(self, number: int) -> None:
        """Notes which number of a start the folder has, after `NoteStart`."""
        with self._lock:
            self._pass_on(self._begun.start_noted(number, self.now_ms()))

    def tail_may_be_lost(self) -> None:
        """Notes that this slave's log has failed: it leaves the set before it may run, and joins again when it has caught up."""
        with self._lock:
            self._begun.tail_may_be_lost()

    def end_was_cut(self, cut_end: LogEnd) -> None:
        """Notes that a start has cut the end of this slave's log, and where it ends. It leads only if nobody in the set has more."""
        with self._lock:
            self._begun.end_was_cut(cut_end)

    @property
    def tail_is_in_doubt(self) -> bool:
        """Whether the end of the log may be lost, and this member has not left the set since."""
        return self._begun.tail_is_in_doubt

    @property
    def end_is_cut(self) -> bool:
        """Whether a start has cut the end of the log, and it has not caught up since."""
        return self._begun.end_is_cut

    @property
    def leads_with_cut_log(self) -> bool:
        """Whether this member was elected with a log whose end a start had cut."""
        return self._begun.leads_with_cut_log

    def damaged(self, is_damaged: bool) -> None:
        """Notes whether the store opened without some parts of its log. Then it follows nobody, and leads only as the last of its set."""
        with self._lock:
            self._begun.is_damaged = is_damaged

    @property
    def is_damaged(self) -> bool:
        """Whether the store was opened without some parts of its log."""
        machine = self._machine
        return machine is not None and machine.is_damaged

    # A master.

    def opened(self, epoch: int, end_position: int) -> None:
        """Notes that the log is open to lead."""
        with self._lock:
            self._confirmed_position = 0
            self._pass_on(self._begun.opened(epoch, end_position, self.now_ms()))

    def unable(self, epoch: int, why: str) -> None:
        """Notes that the log cannot be opened to lead in this epoch: the lead goes back, and this member does not run until `able`."""
        with self._lock:
            self._pass_on(self._begun.unable(epoch, why, self.now_ms()))

    def able(self) -> None:
        """Notes that the log can be opened to lead again."""
        with self._lock:
            self._begun.able()

    def full(self, why: str) -> None:
        """Notes why this member's disk takes no messages; "": it has room. A master gives the lead to a member that has room."""
        with self._lock:
            self._pass_on(self._begun.full(why, self.now_ms()))

    @property
    def is_full(self) -> bool:
        """Whether this member's disk is noted as full."""
        machine = self._machine
        return machine is not None and machine.is_full

    @property
    def is_unable(self) -> bool:
        """Whether this member does not run because its log could not be opened to lead."""
        machine = self._machine
        return machine is not None and machine.is_unable

    def report(self, end_position: int, reports: Mapping[str, MemberReport]) -> Standing:
        """Tells the machine where the log ends and what the slaves have. Returns the standing that follows."""
        with self._lock:
            self._pass_on(self._begun.report(end_position, reports, self.now_ms()))
            return self._standing()

    def confirm_alone(self, end_position: int) -> Standing:
        """Does the same as `report` after an append if this master waits for nobody; otherwise this confirms nothing."""
        with self._lock:
            machine = self._begun
            in_sync = machine.in_sync
            if machine.role is Role.LEADING and in_sync is not None and not in_sync.others:
                in_sync.confirm(end_position, {})
            return self._standing()

    def hand_over(self, timeout_s: float) -> bool:
        """This master ends, or its log has failed: another member leads, if one can, and this one leaves the set. Waits for that; whether
        this one leads no more.
        """
        until_ms = self.now_ms() + int(1_000 * timeout_s)
        with self._lock:
            machine = self._machine
            if machine is None or not machine.has_successor:
                return False
            machine.is_leaving = True
        is_left, next_try_ms = False, 0
        try:
            while self.role in (Role.LEADING, Role.HANDING_OVER):
                now_ms = self.now_ms()
                if now_ms >= until_ms:
                    log.warning("the lead was not handed over within %.1f s", timeout_s)
                    return False
                if not is_left and now_ms >= next_try_ms:
                    is_left = self._leave_switch()
                    next_try_ms = now_ms + machine.settings.read_interval_ms
                self._closing.wait(HAND_OVER_LOOK_S)
            return True
        except OrderRefusedError as error:
            log.warning("the lead is not handed over: %s", error)
            return False
        finally:
            with self._lock:
                machine.is_leaving = False

    def _leave_switch(self) -> bool:
        """Returns whether a switch is left to whichever is furthest. False: another order stands. It is a switch as well, or is taken back.

        Raises OrderRefusedError.
        """
        try:
            self.order(SWITCH, "")
        except OrderPendingError:
            return False
        return True

    def _standing(self) -> Standing:
        machine = self._begun
        in_sync = machine.in_sync
        if in_sync is None or machine.role not in (Role.LEADING, Role.HANDING_OVER):
            return NO_STANDING._replace(confirmed_position=self._confirmed_position)
        if machine.may_acknowledge(self.now_ms()):
            self._confirmed_position = max(self._confirmed_position, in_sync.confirmed_position)
        return Standing(
            len(in_sync.members),
            self._confirmed_position,
            machine.takes_sends,
            alone=not in_sync.others,
            late=len(machine.late),
        )

    # An operator.

    @property
    def role(self) -> Role:
        """What this broker is now: leading, following, or in between."""
        machine = self._machine
        return machine.role if machine is not None else Role.FOLLOWING

    @property
    def may_have_lost(self) -> bool:
        """Whether another member may lead by now, so that what this one knows may be old. Any thread."""
        with self._lock:
            machine = self._machine
            return machine is None or not machine.may_acknowledge(self.now_ms())

    def view(self) -> LeadershipView:
        """Returns what the broker knows of who leads."""
        with self._lock:
            machine = self._machine
            if machine is None:
                return LeadershipView("", Role.FOLLOWING.value, 0, "", (), ("it has not begun",), self._broker_id)
            known, now_ms = machine.view, self.now_ms()
            in_sync = known.in_sync if known is not None else None
            master = known.master if known is not None else None
            problems = machine.problems(now_ms)
            if machine.role is Role.LEADING and not machine.may_acknowledge(now_ms):
                problems.append("the lease has run out, and not all members are heard of: nothing is acknowledged")
            return LeadershipView(
                machine.settings.member,
                machine.role.value,
                in_sync.epoch if in_sync is not None else 0,
                master.member if master is not None else "",
                tuple(sorted(in_sync.members)) if in_sync is not None else (),
                tuple(problems),
                self._broker_id,
                tuple(sorted(known.names.items())) if known is not None else (),
                tuple(sorted(machine.late)),
                machine.etcd_problem(now_ms),
            )

    def order(self, kind: str, target: str) -> str:
        """Writes an order into etcd, or finds it there (see `orders.py`). Returns which other one it has replaced, "" if none. Raises
        OrderRefusedError. Takes some seconds at worst.
        """
        return self._change_order(lambda view: to_leave(view, kind, target))

    def withdraw_order(self, request_id: str = "") -> str:
        """Takes the order away that stands. Returns which one that was, "" if none stood. Raises OrderRefusedError. Takes some seconds at
        worst. A request that comes again by its id gets the answer that it had.
        """
        return self._change_order(lambda view: to_withdraw(view, request_id), request_id)

    def _change_order(self, change: Callable[[ClusterView], Transaction | None], request_id: str = "") -> str:
        view = self._etcd.ask(ReadCluster())
        if not isinstance(view, ClusterView):
            raise OrderRefusedError(f"{_outage(view)}: nobody can take over, and no order can be left")
        try:
            transaction = change(view)
        except OrderStandsError as error:
            raise OrderPendingError(f"another order is there: {error}. Nothing was changed") from None
        if transaction is None:
            return withdrawn_by(view, request_id) or ""
        done = self._etcd.ask(transaction)
        if not isinstance(done, Committed):
            why = f"{_outage(done)}, and" if isinstance(done, Refused) else "etcd"
            raise OrderUncertainError(f"{why} has not said whether it has the order: look at the status")
        if not done.is_made:
            # An earlier try of the same request may have been faster.
            now = self._etcd.ask(ReadCluster()) if request_id else None
            if isinstance(now, ClusterView) and (answer := withdrawn_by(now, request_id)):
                return answer
            raise OrderPendingError("another order was left or taken at the same time. Nothing was changed: look at the status")
        return standing_order(view)

    def forget(self, broker_id: int) -> None:
        """Has etcd forget the members of a broker of this name. Raises UnknownMemberError: there is none outside the in-sync set;
        OrderRefusedError. Takes some seconds at worst.
        """
        view = self._etcd.ask(ReadCluster())
        if not isinstance(view, ClusterView):
            raise OrderRefusedError(f"{_outage(view)}: nobody is forgotten")
        forgotten = view.named_in_vain(broker_id)
        if not forgotten:
            known = {name.broker_id for name in view.names.values()}
            there = ", ".join(map(str, sorted(known))) or "none"
            why = "it is in the in-sync set" if broker_id in known else f"etcd knows no such broker, only {there}"
            raise UnknownMemberError(f"broker_id {broker_id} cannot be forgotten: {why}")
        keys = tuple(f"{prefix}{member}" for member in sorted(forgotten) for prefix in (NAME_PREFIX, START_PREFIX))
        done = self._etcd.ask(Transaction((Compare(IN_SYNC, view.key_revision(IN_SYNC)),), (), keys))
        if not isinstance(done, Committed) or not done.is_made:
            why = f"{_outage(done)}, and" if isinstance(done, Refused) else "etcd"
            raise OrderRefusedError(f"{why} has not said that it is forgotten: ask again")

    # The thread, and etcd.

    @property
    def _begun(self) -> Leadership:
        assert self._machine is not None, "begin comes first"
        return self._machine

    def _run(self) -> None:
        while not self._closing.is_set():
            pause_s = TICK_S
            try:
                with self._lock:
                    now_ms = self.now_ms()
                    self._pass_on(self._begun.tick(now_ms))
                    if self._begun.is_hurried(now_ms):
                        pause_s = HURRIED_TICK_S
                self._tell_standing()
            except Exception:
                # Without ticks nobody renews the lease or notices its end.
                log.exception("a tick of the leadership failed")
            self._closing.wait(pause_s)

    def _tell_standing(self) -> None:
        if self.role in (Role.LEADING, Role.HANDING_OVER):
            self.on_standing()

    def _pass_on(self, effects: list[Effect]) -> None:
        """Runs under the lock, so that everybody sees the effects in one order."""
        for effect in effects:
            if isinstance(effect, Ask):
                if not self._closing.is_set():
                    self._askers.submit(self._ask, effect)
                continue
            if isinstance(effect, Follow):
                self._target = effect
            elif isinstance(effect, StopFollowing | StopLeading):
                self._target = None
            self._on_effect(effect)

    def _ask(self, ask: Ask) -> None:
        result: Result = None
        try:
            result = self._etcd.ask(ask.request)
        except Exception:
            log.exception("a request to etcd failed")
        if self._closing.is_set():
            return
        with self._lock:
            self._pass_on(self._begun.answered(ask.number, result, self.now_ms()))
        self._tell_standing()


def _outage(result: Result) -> str:
    return f"etcd refuses requests ({result.why})" if isinstance(result, Refused) else "etcd does not answer"
