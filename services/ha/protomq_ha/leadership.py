"""One broker's part in the election of a master, which etcd decides. Values in, effects out: no clock, no socket, no thread.

Rules
- Only a member of the in-sync set runs, unless an operator has ordered it. The election writes the master key, which must not be there,
  and the epoch in the in-sync set, compared with the revision that was read. So two elections of one set cannot both win, and each has
  its own epoch.
- The master acknowledges only what every member of the set has (in_sync_set.py). A member that runs for master no longer follows anybody.
  So it has everything that was acknowledged, whatever the old master believes: safety does not need the lease.
- The lease counts on CLOCK_BOOTTIME, which neither jumps nor stands still in a suspend, from *sending* the renewal.
- A member that answers something its master has said does not run for the promise (the lease's time) after it has heard that. A master
  acknowledges while its lease lasts, or while the promises of all other members of its set bind them. A promise counts from when the
  master said what the member has answered. Else it waits: another one may lead by now.
- While etcd is away, nobody is elected, the set stays, and the master goes on as long as its members follow it. `problems` says so.
  So it is while etcd answers, and refuses to store anything: it is full, or wants a password. That lasts until it takes a write.
- The outcome of a transaction is unknown until etcd has a later revision of the key that it compared with. Each election, and each return
  of a master whose lease ran out, writes the in-sync set again. So a transaction that was under way before can no longer succeed.
- Where etcd has no in-sync set, the name is new, or etcd has lost its data. A member with messages writes a set of nobody then: only an
  operator knows who has the latest ones. An empty member leads a new name; it waits some seconds, so that members with messages can write
  that. If it leads all the same, they do not follow it (`Follow.may_lose`).
- A member of the set that hears nothing of its master writes where its log ends. When the lead is free, whoever has less waits a moment.
  So the others need not truncate their logs, for which sends would wait. That is a preference: nobody relies on it.
  A member without such a key has died with its master, or cannot lead. The new master does not wait long for it (`_absent`).
- etcd's answers do not go back. Where one does, etcd was replaced, or restored from a copy: it counts as it is.
- Such a copy may name a member as the master that has given the lead away since, and runs on. Its lease is as old as the copy, and it goes
  on renewing it. So a member that may not run deletes a master key of its own on that lease. Else nobody could run, not even by an order.
  Nor is such a key an election that it has won: the epoch of one is later than all that its log has.
- A store may have lost the end of its log by a crash of its machine, or by a repair. Such a store leaves the set before it runs. It
  writes the set even if it is not in it: an older master's transaction that adds it can then no longer be made.
- A start cuts what looks like a torn write. Damage of the last appends looks alike, and then that was acknowledged. A member whose end was
  cut stays in the set, and does not run until it has caught up. That is when it has all that its master had as the session began.
  If nobody leads, it runs if it is the last of the set. It also runs if all others have cut their logs, too, and none has more. They write
  that into etcd, behind the last change of the set (`LogEnd.is_cut`), and say nothing to a master until the set changes again. Some log
  lacks nothing; so does each that ends there or behind. So all members must be heard; else an operator decides.
  (Such a member must not leave the set for a master that etcd names: that one may be dead, and have lost more.)
- A start may skip damaged parts of the log. Then the store does not know which offsets it has given, and what was sent before. Such a
  member (`is_damaged`) leaves the set, and neither follows nor runs until its log is healed and opened again. The last member of the set
  stays, and leads: nobody has more.
- A member that has won, and cannot open its log to lead, deletes the master key and follows. It stays in the set, since it lacks nothing,
  until another one has opened its log. That one's disk may be the next to fail. If its lease ran out before etcd took that, it says so as
  soon as etcd takes it. It does not run again before it could open its log (`able`).
- A member whose disk is full says so in etcd (`full`). If it leads, it orders a switch to a member in sync that has not said so, and leaves
  the set. If there is none, it stays. So the lead comes back to it only if its disk has room, or if no member of the set has. When the lead
  is free, it lets members with room run first, for a moment: that is a preference, too.
- A member of the set writes its broker's id and address while somebody leads (`name`). That stays when it leaves the set, so others can
  say who is away. It takes away what other stores of the same broker wrote that are no more members: its folder was replaced. An operator
  may take it away, too. It is for people: nothing depends on it.
- Before it follows or runs, a process stands for its store in etcd (`start`). The number there rises with each start, and every ten
  seconds in which the log goes on. The folder has it first. So a folder with a lower number than etcd is an older copy: the store leaves
  the set, as above. With a higher one etcd's data is older, or a crash came in between. An election compares with that key: only the
  process that stands there wins.
- One process lives with a store, and one with a broker_id, as far as etcd's leases tell (`alive`). Another one waits until the lease has
  run out, unless both have the same folder: then its lock says that the other one is over.
- The election has a number in etcd, drawn by whoever finds none. Name servers tell by it whose epochs are comparable. Nothing here depends
  on it, so no election waits for it.

Times are milliseconds of CLOCK_BOOTTIME, handed in. Positions are bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple, Protocol

from .cluster_state import (
    ALIVE_PREFIX,
    ELECTION,
    END_PREFIX,
    FULL_PREFIX,
    IN_SYNC,
    MASTER,
    NAME_PREFIX,
    ORDER,
    PROMOTE_UNCLEAN,
    START_PREFIX,
    SWITCH,
    Alive,
    ClusterView,
    Compare,
    InSync,
    LogEnd,
    MemberName,
    MemberStart,
    Order,
    Put,
    Transaction,
    encode_alive,
    encode_election,
    encode_end,
    encode_full,
    encode_in_sync,
    encode_master,
    encode_name,
    encode_order,
    encode_start,
)
from .in_sync_set import InSyncSet, MemberReport
from .leadership_values import (
    Ask,
    Committed,
    CutSettled,
    Effect,
    ElectionKnown,
    Follow,
    GrantLease,
    Lead,
    Lease,
    NoteStart,
    ReadCluster,
    Refused,
    RenewLease,
    Request,
    Result,
    Role,
    Settings,
    StopFollowing,
    StopLeading,
    TailSettled,
)

NEVER_MS: Final = -(1 << 62)
HURRIED_INTERVAL_MS: Final = 50
"""Between two looks at etcd while the lead changes, or may: sends wait for it."""
LONGER_LOG_WAIT_MS: Final = 500
"""How long a member with a shorter log lets one with a longer log run first. A truncation takes longer."""
ABSENT_AFTER_READS: Final = 3
"""So many looks at etcd a member has to find its new master before it counts as dead. One that was heard of gets more."""
FULL_PAUSE_MS: Final = 60_000
"""How long a member counts as full after it has given the lead away for that. A disk may report room, and yet refuse messages (a quota)."""
FULL_PAUSE_MAX_MS: Final = 960_000
"""The same if that happens again and again: each time it is twice as long."""
START_INTERVAL_MS: Final = 10_000
"""While its log goes on, the number of a member's start rises after this time: older copies of its folder have a lower one."""
HURRIED_MAX_MS: Final = 60_000
"""From then on a member that hears nobody lead waits for an operator, or for a member that is to be started."""


class Pending(NamedTuple):
    """A request under way: at most one transaction, one reading and one about the lease."""

    kind: type
    request: Request
    sent_ms: int


class Leadership:
    """See the module's docstring. Methods return the effects, in order.

    Attributes: role; view: the newest known state of etcd; epoch, in_sync: set while it leads; own_epoch: the epoch at its log's end.
    """

    def __init__(
        self,
        settings: Settings,
        own_epoch: int,
        now_ms: int,
        *,
        log_is_empty: bool,
        tail_may_be_lost: bool,
        end_position: int = 0,
        cut_end: LogEnd | None = None,
        start_number: int = 0,
    ) -> None:
        """`cut_end`: see `end_was_cut`. `start_number`: the one that the folder has."""
        self.settings = settings
        self.role = Role.FOLLOWING
        self.own_epoch = own_epoch
        self.epoch = 0
        self.view: ClusterView | None = None
        self.in_sync: InSyncSet | None = None
        self._log_is_empty = log_is_empty
        self._tail_may_be_lost = tail_may_be_lost
        self._cut_end = cut_end
        self._has_left = self._led_cut = False
        """`_led_cut`: it was elected with a log whose end was cut."""
        self._told_cut_revision = 0
        """The revision of the set for which it may have told where its cut log ends."""
        self._farewell: Transaction | None = None
        """What takes this member out of the set."""
        # The promises of an earlier process of this store bind this one.
        self._heard_ms = now_ms
        self._spoke_ms = NEVER_MS
        """When this process answered a master last."""
        self._pending: dict[int, Pending] = {}
        self._next_number = 1
        self._lease = 0
        self._lease_until_ms = NEVER_MS
        # The lease of the master key, if the key is ours.
        self._master_lease = 0
        self._next_renewal_ms = self._next_read_ms = now_ms
        # After a transaction that failed, or may have failed, only a later read of etcd says what to do.
        self._is_fresh = False
        self._fresh_from = 0
        self._refusal = ""
        """Why etcd has refused something, and has taken no write since."""
        self._refused_pause_ms, self._next_write_ms = 0, now_ms
        """How long nothing more is written after that, and until when."""
        self._absent_since_ms = now_ms
        self._unknown_since_ms = now_ms
        """Since when etcd has no in-sync set, where it has none."""
        self._answered_ms = now_ms
        self._asked_before = 0
        """Requests with this number, or a higher one, were sent when `view` was known."""
        self._followed: Follow | None = None
        self._end_position = end_position
        """Of the log: while it follows as it was heard of last."""
        self._reports: Mapping[str, MemberReport] = {}
        self._successor = ""
        self._order_revision = 0
        self._order_since_ms = now_ms
        """Since when the present order waits."""
        self._next_end_ms = now_ms
        """When etcd may next be told where the log ends."""
        self._hand_over_until_ms = 0
        self._gave_away = False
        self._was_replaced = False
        """While it led, etcd's answers went back."""
        self._inability = ""
        """Why its log cannot be opened to lead; in OPENING it gives the lead back."""
        self._fullness = ""
        """Why its disk takes no messages."""
        self.is_damaged = False
        """Its start has skipped damaged parts of the log."""
        self._counts_as_full_until_ms, self._full_pause_ms = NEVER_MS, FULL_PAUSE_MS
        self._next_full_ms = self._next_give_away_ms = self._next_name_ms = now_ms
        """When etcd may next be told whether the disk is full, when a switch away from it may next be ordered, and when etcd may next be
        told whose store this is."""
        self._told_election, self._next_election_ms = 0, now_ms
        """The number of the election that the broker was told last, and when etcd may next be given one."""
        self._start_number = start_number
        self._has_noted_start = self._is_noting_start = self._stands = self._has_stood = False
        """`_stands`: as far as etcd was read, this process stands for its store."""
        self._next_number_ms, self._numbered_end = now_ms, end_position
        """When the number is to rise next, and where the log ended when it last did."""
        self._next_note_ms = self._next_stand_ms = now_ms
        """When the folder may next be given a number, and etcd be told."""
        self.is_leaving = False
        """It ends, so it leaves the set when it hands over: the next master waits for it no more."""
        self._absent_from_ms: int | None = None
        """From then on members that say nothing have died with the master before this one; None: it has handed over."""
        self._gone = ""
        """The last master whose lease ran out, as far as this member has seen."""

    # What others ask.

    @property
    def takes_sends(self) -> bool:
        """Whether sends may be appended."""
        return self.role is Role.LEADING

    @property
    def has_successor(self) -> bool:
        """It leads, and somebody could take over."""
        return self.role is Role.LEADING and self.in_sync is not None and bool(self._live_members(self.in_sync))

    def may_acknowledge(self, now_ms: int) -> bool:
        """Whether nobody else can lead, so that confirmed sends may be acknowledged."""
        if self.role not in (Role.LEADING, Role.HANDING_OVER) or self._gave_away:
            return False
        assert self.in_sync is not None
        if self._lease_lasts(now_ms):
            return True
        until_ms = self.in_sync.vouched_until(self.settings.trusted_ms, self._reports)
        return until_ms is None or now_ms < until_ms

    @property
    def late(self) -> frozenset[str]:
        """Of a master: members of its set that do not follow it now, or do not keep up. While etcd is away, they stay in the set."""
        in_sync = self.in_sync
        if in_sync is None or self.role not in (Role.LEADING, Role.HANDING_OVER):
            return frozenset()
        return in_sync.members - {in_sync.own} - self._live_members(in_sync).keys()

    def etcd_problem(self, now_ms: int) -> str:
        """Why nobody can take over, join or leave the set now; "" if all of that can be."""
        silent_ms = now_ms - self._answered_ms
        if silent_ms > self.settings.lease_ttl_ms:
            return f"etcd has not answered for {silent_ms // 1000} s: all goes on as it is, and nobody can take over"
        if self._refusal:
            return f"etcd refuses requests ({self._refusal}): all goes on as it is, and nobody can take over"
        return ""

    def problems(self, now_ms: int) -> list[str]:
        """Returns problems that an operator should know."""
        found = [*filter(None, [self.etcd_problem(now_ms)]), *self._problems_of_log()]
        view = self.view
        other = self._in_the_way(view) if view is not None else None
        if other is not None:
            found.append(
                f"another process lives with store {other.member} and broker_id {self.settings.broker_id}, at {other.address}"
                if other.member != self.settings.member
                else f"another process lives with a store of the same number (one folder is a copy of the other), at {other.address}"
            )
            found[-1] += ": this one neither follows nor leads until the other one has ended"
        found += self._problems_of_disk(now_ms)
        if view is not None and self.role is Role.FOLLOWING:
            found += self._problems_of_election(view)
            found += self._problems_of_order(view, now_ms)
        return found

    def _problems_of_log(self) -> list[str]:
        """Why this member cannot lead, or should not: its log does not open, or may lack something."""
        found = []
        if self._inability:
            found.append(f"this member could not lead when it was elected, and does not run until it can: {self._inability}")
        if self.is_damaged:
            found.append(
                "the start has skipped damaged parts of the log here: this member follows nobody, and leads only as the last of the in-sync"
                " set, until a replica has healed them. If none has them any more, give this member an empty folder. If no other member"
                " comes back, order an unclean promotion"
            )
        if self._cut_end is not None and not self._tail_may_be_lost:
            found.append(self._problem_of_cut())
        elif self._led_cut and self.role in (Role.LEADING, Role.HANDING_OVER):
            found.append(
                "this member leads although its start has cut the end of its log, since nobody in the in-sync set had more. If that was no"
                " torn write but damage, messages that were acknowledged last are lost"
            )
        return found

    def _problems_of_disk(self, now_ms: int) -> list[str]:
        if self._fullness and self.role is Role.LEADING:
            return ["the disk here is full, and the lead stays here until a member in sync has room"]
        if self._fullness:
            return [f"this member does not lead if another one can, since its disk is full: {self._fullness}"]
        if self._counts_as_full(now_ms):
            pause_s = (self._counts_as_full_until_ms - now_ms) // 1_000
            return [f"its disk has refused messages: for {pause_s} s more this member does not lead if another one can"]
        return []

    def _problems_of_election(self, view: ClusterView) -> list[str]:
        """Why nobody leads whom this member could follow."""
        found = []
        if view.in_sync is None:
            if self._has_past:
                found.append("etcd has no in-sync set of this name, and this store has had messages")
        elif view.master is None and not view.in_sync.members:
            found.append(
                "nobody leads, and etcd knows no member that has all that was acknowledged: if no other member has later messages than "
                "this store, order its unclean promotion"
            )
        elif self._is_ahead(view):
            text = (
                f"the log here has epoch {self.own_epoch}, and etcd knows {view.in_sync.epoch} only: this store was restored from a backup,"
                " or etcd's data is older than this log; nobody is followed."
            )
            if view.master is not None:
                text += f" etcd names {view.master.named}."
            if view.master is not None or view.in_sync.members:
                text += (
                    " If it was restored, and others of this name have its messages, stop this member, and begin it with an empty folder,"
                    " or with one of `protomq restore --slave`: nothing is lost."
                )
            found.append(
                f"{text} Only if no other member has later messages than this store, order its unclean promotion: what only others have is"
                " lost then"
            )
        elif view.master is None and self.settings.member not in view.in_sync.members:
            members = view.named(view.in_sync.members) or "none is left"
            found.append(
                "nobody leads, and this store may lack what was acknowledged: start a member of the in-sync set "
                f"({members}), or order an unclean promotion"
            )
        return found

    def _problems_of_order(self, view: ClusterView, now_ms: int) -> list[str]:
        """Why an unclean promotion is not taken."""
        order = view.order
        if order is None or order.kind != PROMOTE_UNCLEAN or now_ms < self._order_since_ms + self.settings.lease_ttl_ms:
            return []
        what = f"the order to promote {view.named(frozenset({order.target}))} waits"
        if view.master is not None:
            return [f"{what} until etcd names no master: now it names {view.master.named}"]
        return [f"{what} until that member takes it: start it, promote another one, or withdraw the order (protomq ha cancel)"]

    def _problem_of_cut(self) -> str:
        view = self.view
        others = view.in_sync.members - {self.settings.member} if view is not None and view.in_sync is not None else frozenset()
        unheard = view.named(frozenset(each for each in others if not self._says_cut(each))) if view is not None else ""
        return (
            "the start has cut the end of the log here, which may have been acknowledged: this member leads only if nobody in the in-sync"
            f" set has more. It waits for {unheard or 'a master'}. If nobody leads, start them. If they do not come back,"
            " order the unclean promotion of the member with the highest epoch and the furthest end_position (protomq ha promote --unclean)"
        )

    def is_hurried(self, now_ms: int) -> bool:
        """Whether sends may wait for what this member does: nobody leads, a master is silent for as long as a lease, or an order waits."""
        view = self.view
        if view is None or self.role in (Role.LEADING, Role.HANDING_OVER):
            return False
        if view.order is not None and now_ms < self._order_since_ms + HURRIED_MAX_MS:
            return True
        silent_ms = self._absent_since_ms if view.master is None else self._heard_ms + self.settings.lease_ttl_ms
        return silent_ms <= now_ms < silent_ms + HURRIED_MAX_MS

    # What happens.

    def tick(self, now_ms: int) -> list[Effect]:
        """Called at intervals, to do what the time requires."""
        return self._advance(now_ms)

    @property
    def may_speak(self) -> bool:
        """Whether this slave may tell its master which part of the log it has."""
        if self.role is not Role.FOLLOWING or self._followed is None or not self._stands:
            return False
        in_sync = self.view.in_sync if self.view is not None else None
        return in_sync is None or in_sync.revision != self._told_cut_revision

    def heard(self, now_ms: int) -> None:
        """Notes that the master has said something and this slave is about to answer. From now on its promise binds it."""
        self._heard_ms = self._spoke_ms = now_ms

    def followed(self, own_epoch: int, log_is_empty: bool, end: LogEnd) -> None:
        """Notes the state of the log after bytes of the master were stored. `end`: with the epoch of the last append."""
        self.own_epoch, self._log_is_empty, self._end_position = own_epoch, log_is_empty, end.position
        if self._cut_end is not None:
            self._cut_end = end._replace(is_cut=True)

    def tail_may_be_lost(self) -> None:
        """Notes that the end of this slave's log may be lost: it leaves the set, if it is in it."""
        self._tail_may_be_lost, self._has_left = True, False

    def end_was_cut(self, cut_end: LogEnd) -> None:
        """Notes that a start has cut the end of this slave's log, and where the log ends now, with the epoch of its last append."""
        self._cut_end = cut_end

    def start_noted(self, number: int, now_ms: int) -> list[Effect]:
        """Notes which number the store's folder has, after `NoteStart`. A full disk may have left it as it was."""
        self._start_number, self._has_noted_start, self._is_noting_start = number, True, False
        return self._advance(now_ms)

    def caught_up(self) -> list[Effect]:
        """Notes that this slave has all that its master had in its log when it was asked, since the start."""
        if self._cut_end is None:
            return []
        self._cut_end = None
        return [CutSettled()]

    @property
    def tail_is_in_doubt(self) -> bool:
        """Whether the end of the log may be lost, and this member has not left the set since."""
        return self._tail_may_be_lost

    @property
    def end_is_cut(self) -> bool:
        """Whether a start has cut the end of the log, and it has not caught up since."""
        return self._cut_end is not None

    @property
    def leads_with_cut_log(self) -> bool:
        """Whether it was elected with a log whose end a start had cut."""
        return self._led_cut and self.role is not Role.FOLLOWING

    def following_stopped(self, own_epoch: int, now_ms: int) -> list[Effect]:
        """Notes that this slave says nothing more to a master."""
        if self.role is Role.STOPPING:
            self.role, self.own_epoch = Role.RUNNING, own_epoch
        return self._advance(now_ms)

    def opened(self, epoch: int, end_position: int, now_ms: int) -> list[Effect]:
        """Notes that the log is open to lead, where it ends, and that its epoch is durable."""
        if self.role is Role.OPENING and epoch == self.epoch:
            assert self.in_sync is not None
            self.role, self.own_epoch, self._log_is_empty = Role.LEADING, epoch, False
            self._end_position, self._reports = end_position, {}
            self.in_sync.begin(end_position, now_ms, self._gone)
            self._absent_from_ms = now_ms + ABSENT_AFTER_READS * self.settings.read_interval_ms if self._gone else None
            self._gone = ""
        return self._advance(now_ms)

    def unable(self, epoch: int, why: str, now_ms: int) -> list[Effect]:
        """Notes that the log cannot be opened to lead, in this epoch: it gives the lead back, and runs no more until `able`."""
        if self.role is not Role.OPENING or epoch == self.epoch:
            self._inability = why
        return self._advance(now_ms)

    def able(self) -> None:
        """Notes that the log can be opened to lead, as far as one can know."""
        if self.role is not Role.OPENING:
            self._inability = ""

    def full(self, why: str, now_ms: int) -> list[Effect]:
        """Notes why the disk takes no messages, and has not for a while; "": it has room."""
        self._fullness = why
        return self._advance(now_ms)

    @property
    def is_full(self) -> bool:
        """Whether the disk is noted as full."""
        return bool(self._fullness)

    def _counts_as_full(self, now_ms: int) -> bool:
        """Whether another member should lead: the disk is full, or was when this one gave the lead away."""
        return self.is_full or (self.role is Role.FOLLOWING and now_ms < self._counts_as_full_until_ms)

    def _begin_full_pause(self, now_ms: int) -> None:
        """After it has given the lead away with a full disk."""
        is_again = now_ms < self._counts_as_full_until_ms + FULL_PAUSE_MS
        self._full_pause_ms = min(2 * self._full_pause_ms, FULL_PAUSE_MAX_MS) if is_again else FULL_PAUSE_MS
        self._counts_as_full_until_ms = now_ms + self._full_pause_ms

    @property
    def is_unable(self) -> bool:
        """Whether it does not run because its log could not be opened to lead."""
        return bool(self._inability)

    def report(
        self, end_position: int, reports: Mapping[str, MemberReport], now_ms: int
    ) -> list[Effect]:
        """Takes the end of this master's log and the reports of its slaves. Only written bytes count, or flushed ones under SYNC_FLUSH."""
        if self.role in (Role.LEADING, Role.HANDING_OVER):
            assert self.in_sync is not None
            self._end_position, self._reports = end_position, reports
            self.in_sync.confirm(end_position, reports)
        return self._advance(now_ms)

    def answered(self, number: int, result: Result, now_ms: int) -> list[Effect]:
        """Takes etcd's answer to a request; None: there was no answer."""
        pending = self._pending.pop(number)
        if result is not None:
            self._answered_ms = now_ms
        if isinstance(result, Refused):
            self._note_refused(result.why, now_ms)
        if isinstance(result, ClusterView):
            is_back = number >= self._asked_before
            self._note_view(result, now_ms, is_fresh=number >= self._fresh_from, may_go_back=is_back)
        elif isinstance(result, Lease):
            self._note_lease(result, pending.sent_ms, now_ms)
        elif isinstance(pending.request, Transaction):
            self._note_committed(pending.request, result, now_ms)
        return self._advance(now_ms)

    # What is known.

    def _note_lease(self, lease: Lease, sent_ms: int, now_ms: int) -> None:
        if lease.ttl_ms > 0:
            self._lease = lease.lease
            trusted_ms = min(lease.ttl_ms * 9 // 10, self.settings.trusted_ms)
            self._lease_until_ms = sent_ms + trusted_ms
        elif lease.lease == self._lease:
            self._lease, self._lease_until_ms = 0, NEVER_MS
            self._next_renewal_ms = now_ms

    def _note_refused(self, why: str, now_ms: int) -> None:
        """Etcd renews a lease all the same, and may be read: so this lasts until it takes a write. Asking it in a hurry does not help."""
        self._refusal = why
        self._refused_pause_ms = min(max(2 * self._refused_pause_ms, HURRIED_INTERVAL_MS), self.settings.lease_ttl_ms)
        self._next_write_ms = now_ms + self._refused_pause_ms

    def _may_write(self, now_ms: int) -> bool:
        """Whether a transaction may be asked for: the last one is over, what it did is known, and etcd has not just refused."""
        return self._is_fresh and not self._is_pending(Transaction) and now_ms >= self._next_write_ms

    def _lease_lasts(self, now_ms: int) -> bool:
        """Whether the lease of the master key has not run out yet."""
        return 0 != self._lease == self._master_lease and now_ms < self._lease_until_ms

    def _note_view(
        self, view: ClusterView, now_ms: int, *, is_fresh: bool, may_go_back: bool = False
    ) -> None:
        if self.view is not None and view.revision < self.view.revision:
            if not may_go_back:
                return
            self._was_replaced = self.in_sync is not None
        if view.in_sync is None and (self.view is None or self.view.in_sync is not None):
            self._unknown_since_ms = now_ms
        self._asked_before = self._next_number
        was_absent = self.view is not None and self.view.master is None
        if view.master is None and not was_absent:
            self._absent_since_ms = now_ms
        if self.view is None or view.key_revision(ORDER) != self.view.key_revision(ORDER):
            self._order_since_ms = now_ms
        self.view = view
        self._is_fresh = self._is_fresh or is_fresh
        master = view.master
        is_own = master is not None and master.member == self.settings.member
        self._master_lease = master.lease if master is not None and is_own else 0
        if master is not None and not is_own:
            self._gone = master.member
        elif view.in_sync is not None and view.in_sync.successor:
            self._gone = ""  # it has handed over, and is there
        if self.in_sync is not None and not self._is_deposed(view):
            assert view.in_sync is not None
            self.in_sync.settle(view.in_sync.members, view.in_sync.revision, now_ms)

    def _note_committed(self, transaction: Transaction, result: Result, now_ms: int) -> None:
        if isinstance(result, Committed) and transaction.puts:  # a full etcd deletes
            self._refusal, self._refused_pause_ms, self._next_write_ms = "", 0, now_ms
        if not isinstance(result, Committed) or not result.is_made:
            self._is_fresh, self._fresh_from = False, self._next_number
            self._next_read_ms = now_ms
        elif self.view is None or result.revision > self.view.revision:
            assert self.view is not None
            if transaction is self._farewell:
                self._has_left = self.role is Role.FOLLOWING
            self._note_view(self.view.after(transaction, result.revision), now_ms, is_fresh=True)

    @property
    def _has_past(self) -> bool:
        """Whether this store has messages, or has known an epoch: then the name is not new, whatever etcd has."""
        return not self._log_is_empty or self.own_epoch > 0

    @property
    def _unclean_epoch(self) -> int:
        """As etcd has it, while this member leads."""
        assert self.view is not None
        assert self.view.in_sync is not None
        return self.view.in_sync.unclean_epoch

    def _is_own(self, view: ClusterView) -> bool:
        """Whether the master key belongs to this member."""
        return view.master is not None and view.master.member == self.settings.member

    def _is_held_here(self, view: ClusterView) -> bool:
        """Whether the master key belongs to this member, and stays as long as this process renews its lease."""
        return self._is_own(view) and self._master_lease == self._lease

    def _is_ahead(self, view: ClusterView) -> bool:
        """Whether the log has an epoch that etcd does not know: etcd's data was lost, or is older."""
        return view.in_sync is not None and self.own_epoch > view.in_sync.epoch

    def _is_deposed(self, view: ClusterView) -> bool:
        """Whether etcd says that the lead of this epoch is over, or is no more the etcd that knew of it."""
        if self._was_replaced or self._is_succeeded(view):
            return True
        if view.in_sync is None or view.in_sync.epoch != self.epoch:
            return True
        if view.master is None:
            return view.in_sync.successor != ""
        return view.master.member != self.settings.member

    # What follows.

    def _advance(self, now_ms: int) -> list[Effect]:
        effects: list[Effect] = []
        if self.view is not None and self.view.election not in (0, self._told_election):
            self._told_election = self.view.election
            effects.append(ElectionKnown(self._told_election))
        if now_ms >= self._next_renewal_ms and not self._is_pending(GrantLease, RenewLease):
            self._next_renewal_ms = now_ms + self.settings.renew_interval_ms
            renewal = RenewLease(self._lease) if self._lease else None
            self._ask(effects, renewal or GrantLease(self.settings.lease_ttl_ms), now_ms)
        if now_ms >= self._next_read_ms and not self._is_pending(ReadCluster):
            self._next_read_ms = now_ms + self._read_interval_ms(now_ms)
            self._ask(effects, ReadCluster(), now_ms)
        view = self.view
        if view is None:
            return effects
        gives_back = self.role is Role.OPENING and self._inability != ""
        is_back = view.master is None and view.in_sync is not None and view.in_sync.is_given_back
        is_over = self._is_deposed(view) or (gives_back and is_back)
        if self.role in (Role.OPENING, Role.LEADING, Role.HANDING_OVER) and is_over:
            # Here, not where etcd is asked: it may be asked several times, or in vain.
            if self._gave_away and self.is_full:
                self._begin_full_pause(now_ms)
            self.role, self.in_sync, self.epoch, self._gave_away = Role.FOLLOWING, None, 0, False
            self._followed, self._was_replaced = None, False
            if not gives_back:  # else it does not lead
                effects.append(StopLeading())
        if self.role in (Role.FOLLOWING, Role.LEADING):
            self._stand(effects, view, now_ms)
        if self.role is Role.FOLLOWING and not self._stands:
            if self._followed is not None:
                self._followed = None
                effects.append(StopFollowing())
            return effects
        if self.role is Role.FOLLOWING:
            self._while_following(effects, view, now_ms)
        elif self.role is Role.RUNNING:
            self._while_running(effects, view, now_ms)
        elif self.role is not Role.STOPPING:
            self._while_leading(effects, view, now_ms)
        if self.role in (Role.FOLLOWING, Role.LEADING):
            self._tell_room(effects, view, now_ms)
            self._tell_name(effects, view, now_ms)
            self._begin_election(effects, view, now_ms)
            self._try_to_write(effects, view, now_ms)
        return effects

    def _read_interval_ms(self, now_ms: int) -> int:
        interval_ms = self.settings.read_interval_ms
        if self.is_hurried(now_ms):
            interval_ms = min(interval_ms, HURRIED_INTERVAL_MS)
        return max(interval_ms, self._refused_pause_ms)

    def _is_pending(self, *kinds: type) -> bool:
        return any(pending.kind in kinds for pending in self._pending.values())

    def _ask(self, effects: list[Effect], request: Request, now_ms: int) -> None:
        self._pending[self._next_number] = Pending(type(request), request, now_ms)
        effects.append(Ask(self._next_number, request))
        self._next_number += 1

    def _is_succeeded(self, view: ClusterView) -> bool:
        """Whether another process stands for this store since this one did."""
        start = view.starts.get(self.settings.member)
        return self._has_stood and start is not None and start.process != self.settings.process and start.number >= self._start_number

    def _stands_in(self, view: ClusterView) -> bool:
        """Whether this process stands for its store. Where etcd has lost that, nobody else does."""
        start = view.starts.get(self.settings.member)
        return self._has_stood if start is None else start.process == self.settings.process

    def _in_the_way(self, view: ClusterView) -> Alive | None:
        settings = self.settings
        return view.in_the_way(settings.member, settings.broker_id, settings.process, settings.place)

    def _stand(self, effects: list[Effect], view: ClusterView, now_ms: int) -> None:
        """Sees to it that this process stands for its store, and that the number of its start rises."""
        settings = self.settings
        start, alive = view.starts.get(settings.member), view.alive.get(str(settings.broker_id))
        is_own = start is not None and start.process == settings.process
        self._has_stood = self._has_stood or is_own
        self._stands = self._stands_in(view)
        known = start.number if start is not None else 0
        is_due = is_own and now_ms >= self._next_number_ms and self._end_position != self._numbered_end
        is_older = not is_own and (known > self._start_number or self._is_succeeded(view))
        if self._in_the_way(view) is not None or self._is_noting_start:
            return
        if is_due or is_older or not self._has_noted_start:
            if is_older:
                self.tail_may_be_lost()
            if now_ms >= self._next_note_ms:
                self._next_number_ms, self._numbered_end = now_ms + START_INTERVAL_MS, self._end_position
                self._next_note_ms, self._is_noting_start = now_ms + settings.lease_ttl_ms, True
                effects.append(NoteStart(max(known, self._start_number) + 1, is_older))
            return
        holds_id = alive is not None and alive.process == settings.process
        is_told = is_own and known == self._start_number and holds_id
        may_ask = now_ms >= self._next_stand_ms and now_ms < self._lease_until_ms and self._may_write(now_ms)
        if not is_told and may_ask:
            self._next_stand_ms = now_ms + settings.read_interval_ms
            keys = f"{START_PREFIX}{settings.member}", f"{ALIVE_PREFIX}{settings.broker_id}"
            puts = (
                Put(keys[0], encode_start(MemberStart(self._start_number, settings.process))),
                Put(keys[1], encode_alive(Alive(settings.member, settings.process, settings.place, settings.address)), self._lease),
            )
            self._ask(effects, Transaction(tuple(Compare(key, view.key_revision(key)) for key in keys), puts), now_ms)

    def _while_following(self, effects: list[Effect], view: ClusterView, now_ms: int) -> None:
        if self._tail_may_be_lost:
            self._leave(effects, view, now_ms)
        elif self.is_damaged:
            self._leave_to_others(effects, view, now_ms)
        if view.master is not None and not self._is_own(view):
            unclean_epoch = view.in_sync.unclean_epoch if view.in_sync is not None else 0
            follow = Follow(view.master.member, view.master.address, view.master.epoch, unclean_epoch)
            if follow != self._followed and not self._is_ahead(view):
                self._followed = follow
                effects.append(follow)
        elif self._may_run(view, now_ms):
            self.role, self._followed = Role.STOPPING, None
            effects.append(StopFollowing())
        elif self._is_held_here(view) and now_ms < self._lease_until_ms and self._may_write(now_ms):
            self._ask(effects, Transaction((Compare(MASTER, view.key_revision(MASTER)),), (), (MASTER,)), now_ms)
        if self.role is not Role.FOLLOWING:
            return
        if self._should_tell_end(view, now_ms):
            put = Put(f"{END_PREFIX}{self.settings.member}", encode_end(self._log_end), self._lease)
            compares: tuple[Compare, ...] = ()
            if self._cut_end is not None:  # others rely on it
                compares = tuple(Compare(key, view.key_revision(key)) for key in (MASTER, IN_SYNC))
                self._told_cut_revision = view.key_revision(IN_SYNC)
            # If etcd does not know the lease any more, it refuses until there is another one.
            self._next_end_ms = now_ms + self.settings.read_interval_ms
            self._ask(effects, Transaction(compares, (put,)), now_ms)
        elif self._has_past and self._may_write(now_ms):
            self._claim_past(effects, view, now_ms)

    @property
    def _log_end(self) -> LogEnd:
        return self._cut_end or LogEnd(self.own_epoch, self._end_position)

    def _says_cut(self, member: str) -> bool:
        """Whether this member of the set has said, since the last election and the last change of the set, that its log was cut."""
        view = self.view
        assert view is not None
        assert view.in_sync is not None
        end = view.ends.get(member)
        return end is not None and end.is_cut and view.key_revision(f"{END_PREFIX}{member}") > view.in_sync.revision

    def _has_most_of_cut_logs(self, in_sync: InSync, cut_end: LogEnd) -> bool:
        """Whether all other members of the set say that their logs were cut, too, and none of them has more."""
        assert self.view is not None
        own, ends = self.settings.member, self.view.ends
        others = in_sync.members - {own}
        return all(self._says_cut(each) and (ends[each], each) < (cut_end, own) for each in others)

    def _should_tell_end(self, view: ClusterView, now_ms: int) -> bool:
        """Whether this member may have to lead soon, together with others, and etcd does not know where its log ends."""
        own, in_sync = self.settings.member, view.in_sync
        if in_sync is None or own not in in_sync.members or len(in_sync.members) < 2:
            return False
        if self._tail_may_be_lost or self._inability or self.is_damaged:
            return False
        if self._cut_end is not None and view.master is not None:
            return False
        is_silent = now_ms >= self._heard_ms + self.settings.lease_ttl_ms // 2 and now_ms < self._lease_until_ms
        is_free = self._may_write(now_ms) and now_ms >= self._next_end_ms
        is_told = view.ends.get(own) == self._log_end and (self._cut_end is None or self._says_cut(own))
        return is_silent and is_free and not is_told

    def _tell_room(self, effects: list[Effect], view: ClusterView, now_ms: int) -> None:
        """Tells etcd that the disk here is full, or is no more."""
        own = self.settings.member
        counts_as_full = self._counts_as_full(now_ms)
        if (own in view.full) is counts_as_full or now_ms < self._next_full_ms or now_ms >= self._lease_until_ms:
            return
        if self._may_write(now_ms):
            self._next_full_ms = now_ms + self.settings.read_interval_ms
            key = f"{FULL_PREFIX}{own}"
            compares = tuple(Compare(each, view.key_revision(each)) for each in (MASTER, IN_SYNC))
            puts = (Put(key, encode_full(), self._lease),) if counts_as_full else ()
            self._ask(effects, Transaction(compares, puts, () if puts else (key,)), now_ms)

    def _tell_name(self, effects: list[Effect], view: ClusterView, now_ms: int) -> None:
        """Tells etcd whose store this member of the set is, and that it replaces others. While nobody leads, it keeps no election waiting
        for that."""
        own, name = self.settings.member, MemberName(self.settings.broker_id, self.settings.address)
        is_member = view.master is not None and view.in_sync is not None and own in view.in_sync.members
        replaced = view.named_in_vain(self.settings.broker_id)
        if not is_member or (view.names.get(own) == name and not replaced) or now_ms < self._next_name_ms:
            return
        if self._may_write(now_ms):
            self._next_name_ms = now_ms + self.settings.lease_ttl_ms
            compares = tuple(Compare(each, view.key_revision(each)) for each in (MASTER, IN_SYNC))
            put = Put(f"{NAME_PREFIX}{own}", encode_name(name))
            deletes = tuple(f"{prefix}{each}" for each in sorted(replaced) for prefix in (NAME_PREFIX, START_PREFIX))
            self._ask(effects, Transaction(compares, (put,), deletes), now_ms)

    def _begin_election(self, effects: list[Effect], view: ClusterView, now_ms: int) -> None:
        """Gives the election its number, where it has none. No election waits for that: somebody leads, or nobody could."""
        is_quiet = view.master is not None or view.in_sync is None or not view.in_sync.members
        if not self.settings.new_election or view.key_revision(ELECTION) or not is_quiet or now_ms < self._next_election_ms:
            return
        if self._may_write(now_ms):
            self._next_election_ms = now_ms + self.settings.lease_ttl_ms
            put = Put(ELECTION, encode_election(self.settings.new_election))
            self._ask(effects, Transaction((Compare(ELECTION, 0),), (put,)), now_ms)

    def _try_to_write(self, effects: list[Effect], view: ClusterView, now_ms: int) -> None:
        """Writes a key of its own again, after etcd has refused something: nothing else may be due for long."""
        settings = self.settings
        key = f"{ALIVE_PREFIX}{settings.broker_id}"
        alive = view.alive.get(str(settings.broker_id))
        is_own = alive is not None and alive.process == settings.process
        if self._refusal and is_own and self._may_write(now_ms) and now_ms < self._lease_until_ms:
            value = encode_alive(Alive(settings.member, settings.process, settings.place, settings.address))
            self._ask(effects, Transaction((Compare(key, view.key_revision(key)),), (Put(key, value, self._lease),)), now_ms)

    def _claim_past(self, effects: list[Effect], view: ClusterView, now_ms: int) -> None:
        """Notes in etcd, if it knows nothing of it, that there are messages of this epoch: nobody leads without them by itself."""
        in_sync = view.in_sync
        if view.master is not None or (in_sync is not None and (in_sync.members or not self._is_ahead(view))):
            return
        unclean_epoch = in_sync.unclean_epoch if in_sync is not None else 0
        compares = (Compare(MASTER, 0), Compare(IN_SYNC, view.key_revision(IN_SYNC)))
        value = encode_in_sync(self.own_epoch, frozenset(), unclean_epoch=unclean_epoch)
        self._ask(effects, Transaction(compares, (Put(IN_SYNC, value),)), now_ms)

    def _leave(self, effects: list[Effect], view: ClusterView, now_ms: int) -> None:
        """Leaves the set, because this store may lack something that it has acknowledged.

        Where etcd knows no member, the doubt stays: a copy of its data that names this one may be restored.
        """
        in_sync = view.in_sync
        if self._has_left or (in_sync is None and not self._has_past):
            self._settle_tail(effects)
        elif in_sync is None or not in_sync.members:
            return
        elif self._may_write(now_ms):
            self._farewell = self._without_itself(in_sync)
            self._ask(effects, self._farewell, now_ms)

    def _leave_to_others(self, effects: list[Effect], view: ClusterView, now_ms: int) -> None:
        """Leaves the set while its log is damaged, unless it is the last one there."""
        in_sync = view.in_sync
        if in_sync is None or self.settings.member not in in_sync.members or len(in_sync.members) < 2:
            return
        if self._may_write(now_ms):
            self._ask(effects, self._without_itself(in_sync), now_ms)

    def _without_itself(self, in_sync: InSync) -> Transaction:
        left = in_sync.members - {self.settings.member}
        successor = in_sync.successor if in_sync.successor in left else ""
        value = encode_in_sync(
            in_sync.epoch,
            left,
            successor,
            unclean_epoch=in_sync.unclean_epoch,
            is_given_back=in_sync.is_given_back,
        )
        return Transaction((Compare(IN_SYNC, in_sync.revision),), (Put(IN_SYNC, value),))

    def _settle_tail(self, effects: list[Effect]) -> None:
        self._tail_may_be_lost = False
        effects.append(TailSettled())

    def _is_ordered(self, view: ClusterView) -> bool:
        """Whether an operator wants this member to lead at any loss."""
        order = view.order
        return order is not None and (order.kind, order.target) == (
            PROMOTE_UNCLEAN,
            self.settings.member,
        )

    def _may_run(self, view: ClusterView, now_ms: int) -> bool:
        """Whether nobody else leads and this member may run for master."""
        own, in_sync = self.settings.member, view.in_sync
        if self._inability or now_ms >= self._lease_until_ms or (view.master is not None and not self._is_own(view)):
            return False
        if self._is_ordered(view):
            return True
        # A restored etcd may name this member although a later set, which it has forgotten, had more.
        if self._tail_may_be_lost or self._is_ahead(view):
            return False
        if in_sync is None:
            return not self._has_past and now_ms >= self._unknown_since_ms + self.settings.new_name_wait_ms
        if own not in in_sync.members or (self.is_damaged and len(in_sync.members) > 1):
            return False
        if self._cut_end is not None and not self._has_most_of_cut_logs(in_sync, self._cut_end):
            return False
        ttl_ms = self.settings.lease_ttl_ms
        if self._is_own(view) or in_sync.successor == own:
            return True
        if in_sync.members == {own}:
            # A copy of the master's folder may have left the set, and the master, which is cut off from etcd, trusts this promise.
            return now_ms >= self._spoke_ms + ttl_ms
        if in_sync.successor and now_ms < self._absent_since_ms + ttl_ms:
            return False
        others = in_sync.members - {own}
        has_less = any(end > self._log_end and not end.is_cut for each, end in view.ends.items() if each in others)
        has_less = has_less or (self._counts_as_full(now_ms) and not others <= view.full)
        free_ms = max(self._heard_ms + ttl_ms, self._absent_since_ms)
        return now_ms >= (free_ms + LONGER_LOG_WAIT_MS if has_less else self._heard_ms + ttl_ms)

    def _while_running(self, effects: list[Effect], view: ClusterView, now_ms: int) -> None:
        if not self._is_fresh or self._is_pending(Transaction):
            return
        own = self.settings.member
        if self._is_held_here(view) and view.master is not None and view.master.epoch > self.own_epoch:
            assert view.in_sync is not None
            self.role, self.epoch = Role.OPENING, view.master.epoch
            members, revision = view.in_sync.members, view.in_sync.revision
            self.in_sync = InSyncSet(own, members, revision, now_ms)
            self._led_cut = self._cut_end is not None
            if self._tail_may_be_lost:
                self._settle_tail(effects)
            effects += self.caught_up()  # nobody has more
            effects.append(Lead(self.epoch))
        elif self._stands_in(view) and self._may_run(view, now_ms):
            if self._may_write(now_ms):
                self._ask(effects, self._election(view), now_ms)
        else:
            self.role = Role.FOLLOWING

    def _election(self, view: ClusterView) -> Transaction:
        own, in_sync, is_ordered = self.settings.member, view.in_sync, self._is_ordered(view)
        known = in_sync.epoch if in_sync is not None else 0
        epoch = max(known, self.own_epoch) + 1
        alone = in_sync is None or is_ordered
        # The master whose lease ran out has had its time: it joins when it is back. One that gave the lead back is there.
        if alone or in_sync is None:
            members = frozenset({own})
        else:
            members = in_sync.members - (set() if in_sync.is_given_back else {self._gone})
        compares = [Compare(key, view.key_revision(key)) for key in (MASTER, IN_SYNC, f"{START_PREFIX}{own}")]
        unclean_epoch = in_sync.unclean_epoch if in_sync is not None else 0
        if is_ordered:
            compares.append(Compare(ORDER, view.key_revision(ORDER)))
            unclean_epoch = epoch
        return Transaction(
            tuple(compares),
            (
                Put(MASTER, encode_master(own, epoch, self.settings.address), self._lease),
                Put(IN_SYNC, encode_in_sync(epoch, members, unclean_epoch=unclean_epoch)),
            ),
            (ORDER,) if is_ordered else (),
        )

    def _while_leading(self, effects: list[Effect], view: ClusterView, now_ms: int) -> None:
        in_sync = self.in_sync
        assert in_sync is not None
        # All steps for an order compare with its key, so they end when another order replaces it.
        if (
            self.role is Role.HANDING_OVER
            and self._is_fresh
            and view.key_revision(ORDER) != self._order_revision
        ):
            self.role, self._gave_away = Role.LEADING, False
        if not self._may_write(now_ms):
            return
        if self.role is Role.OPENING and self._inability:
            self._ask(effects, self._give_back(view, in_sync), now_ms)
        elif view.master is None:
            if now_ms < self._lease_until_ms:
                self._ask(effects, self._return(in_sync), now_ms)
        elif self.role is Role.HANDING_OVER:
            self._hand_over(effects, view, in_sync, now_ms)
        elif self.role is Role.LEADING and view.order is not None:
            self._begin_order(effects, view, view.order, in_sync, now_ms)
        elif self.role is Role.LEADING:
            settings = self.settings
            wanted = in_sync.wanted(
                self._reports, settings.member_timeout_ms, settings.member_lost_timeout_ms, now_ms, self._absent(view, in_sync, now_ms)
            )
            if self._should_give_away(view, in_sync, now_ms):
                self._next_give_away_ms = now_ms + settings.lease_ttl_ms
                successor = self._furthest(view, in_sync)
                compares = (Compare(MASTER, view.master.revision), Compare(ORDER, 0))
                put = Put(ORDER, encode_order(SWITCH, successor))
                self._ask(effects, Transaction(compares, (put,)), now_ms)
            elif wanted != in_sync.members:
                in_sync.propose(wanted)
                compares = (Compare(MASTER, view.master.revision), Compare(IN_SYNC, in_sync.revision))
                put = Put(IN_SYNC, encode_in_sync(self.epoch, wanted, unclean_epoch=self._unclean_epoch))
                self._ask(effects, Transaction(compares, (put,)), now_ms)

    def _absent(self, view: ClusterView, in_sync: InSyncSet, now_ms: int) -> frozenset[str]:
        """Members that have not said where their logs end while the master before this one was silent for longer than its lease."""
        if self._absent_from_ms is None or now_ms < self._absent_from_ms:
            return frozenset()
        return in_sync.members - view.ends.keys()

    def _give_back(self, view: ClusterView, in_sync: InSyncSet) -> Transaction:
        unclean_epoch = self._unclean_epoch
        value = encode_in_sync(self.epoch, in_sync.members, unclean_epoch=unclean_epoch, is_given_back=True)
        compares = (Compare(MASTER, view.key_revision(MASTER)), Compare(IN_SYNC, in_sync.revision))
        return Transaction(compares, (Put(IN_SYNC, value),), (MASTER, f"{END_PREFIX}{self.settings.member}"))

    def _return(self, in_sync: InSyncSet) -> Transaction:
        """Writes the master key and the set again after the lease ran out and nobody was elected. So transactions of others that are under
        way fail.
        """
        own = self.settings
        master = encode_master(own.member, self.epoch, own.address)
        return Transaction(
            (Compare(MASTER, 0), Compare(IN_SYNC, in_sync.revision)),
            (
                Put(MASTER, master, self._lease),
                Put(IN_SYNC, encode_in_sync(self.epoch, in_sync.members, unclean_epoch=self._unclean_epoch)),
            ),
        )

    def _should_give_away(self, view: ClusterView, in_sync: InSyncSet, now_ms: int) -> bool:
        """Whether the disk here is full, and a member in sync has room."""
        is_due = self.is_full and self.settings.member in view.full and now_ms >= self._next_give_away_ms
        return is_due and bool(self._live_members(in_sync).keys() - view.full)

    def _furthest(self, view: ClusterView, in_sync: InSyncSet) -> str:
        """The member that is to lead next: who has most, of those with room if there are any; "" if nobody is in sync."""
        live = self._live_members(in_sync)
        return max(live, key=lambda each: (each not in view.full, live[each], each), default="")

    def _begin_order(
        self, effects: list[Effect], view: ClusterView, order: Order, in_sync: InSyncSet, now_ms: int
    ) -> None:
        """A switch begins, if there is somebody to switch to; else the order is taken back."""
        live = self._live_members(in_sync)
        target = order.target or self._furthest(view, in_sync)
        if order.kind == SWITCH and target in live:
            self.role, self._successor = Role.HANDING_OVER, target
            self._order_revision = order.revision
            self._hand_over_until_ms = now_ms + self.settings.hand_over_timeout_ms
        else:
            self._drop_order(effects, order.revision, now_ms)

    def _live_members(self, in_sync: InSyncSet) -> dict[str, int]:
        """Slaves of the set that keep up, and what they have."""
        return {
            each: self._reports[each].position
            for each in in_sync.members
            if each in self._reports and self._reports[each].is_live
        }

    def _drop_order(self, effects: list[Effect], revision: int, now_ms: int) -> None:
        self._ask(effects, Transaction((Compare(ORDER, revision),), (), (ORDER,)), now_ms)

    def _hand_over(
        self, effects: list[Effect], view: ClusterView, in_sync: InSyncSet, now_ms: int
    ) -> None:
        """Gives the lead away when the successor has the whole log; takes the order back when that takes too long."""
        report = self._reports.get(self._successor)
        has_all = report is not None and report.position >= self._end_position
        if now_ms >= self._hand_over_until_ms:
            self._drop_order(effects, self._order_revision, now_ms)
        elif has_all and self._successor in in_sync.members:
            self._gave_away = True
            # Sends of the next master wait for all members. This one follows some time later, or never.
            left = in_sync.members - {self.settings.member}
            members = left if self.is_leaving or self.is_full or len(left) > 1 else in_sync.members
            value = encode_in_sync(self.epoch, members, self._successor, unclean_epoch=self._unclean_epoch)
            revisions = (view.key_revision(MASTER), in_sync.revision, self._order_revision)
            compares = tuple(map(Compare, (MASTER, IN_SYNC, ORDER), revisions))
            self._ask(effects, Transaction(compares, (Put(IN_SYNC, value),), (MASTER, ORDER)), now_ms)


class KnowsTheEnd(Protocol):
    """A Leadership, or who drives one."""

    @property
    def tail_is_in_doubt(self) -> bool:
        """See Leadership."""

    @property
    def end_is_cut(self) -> bool:
        """See Leadership."""


def may_forget_doubt(leadership: KnowsTheEnd) -> bool:
    """Whether `TailSettled` holds still when its turn comes. The log may have failed meanwhile, when this member was in the set again."""
    return not leadership.tail_is_in_doubt


def may_forget_cut(leadership: KnowsTheEnd) -> bool:
    """Whether `CutSettled` holds still when its turn comes. The store may have been opened again meanwhile, and that has cut its end once
    more.
    """
    return not leadership.end_is_cut
