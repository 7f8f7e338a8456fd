"""A master's table of its slaves: their positions, which of them are in sync, and the confirmed position. No clock, socket or thread.

Rules
- A slave is an id and the random number of its store. It has one session at a time; each begins at a point of the log that both have.
  One store has one id at a time: of a store and its copy one follows, and only its acknowledgements count.
- An acknowledgement counts only up to what its session has sent: a higher one is refused, and nothing changes. Positions never go back
  within a session.
- A slave is in sync when it has all that was in the log `timeout_ms` ago, however little it gets at a time. It is out when it is later
  than that, silent for longer, `gap_max_bytes` behind, or its session ends.
- A master that waits for slaves waits for `copies_wanted - 1` of them, and for fewer where fewer are in sync, but never for fewer than
  `copies_min - 1`. What that many have is confirmed. What was confirmed stays so.

Positions are bytes of the log; times are milliseconds of a monotonic clock, handed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .in_sync_set import MemberReport


class ImpossibleAckError(Exception):
    """A slave acknowledges more than this session has sent, or less than before, or a flushed position above its written one.

    Attribute: field, `written_position` or `flushed_position`.
    """

    def __init__(self, field: str, description: str) -> None:
        super().__init__(description)
        self.field = field


class ReplicaTakenError(Exception):
    """Another store with this slave's id follows already, or a slave with another id and this store's number. Attribute: address, of that
    slave.
    """

    def __init__(self, other: Replica, store_id: int) -> None:
        is_copy = other.store_id == store_id
        what = "a store of the same number (one folder is a copy of the other)" if is_copy else "another store"
        super().__init__(f"a slave with broker_id {other.replica_id} and {what} follows already, from {other.address}")
        self.address = other.address


@dataclass(frozen=True, slots=True)
class Limits:
    """As in HaConfig. `copies_wanted`, `copies_min`: in_sync_replicas and min_in_sync_replicas, 1 where no slave is waited for.
    `counts_flushed`: what a slave has synced counts, not what it has written."""

    copies_wanted: int = 1
    copies_min: int = 1
    gap_max_bytes: int = 256 << 20
    timeout_ms: int = 20_000
    counts_flushed: bool = False


class Verdict(NamedTuple):
    """The rules for sends that follow from the table.

    Attributes:
        in_sync_count: copies that are in sync, the master's own among them.
        waits: whether sends wait for slaves; False: everything that the master has is confirmed.
        confirmed_position: the position that enough slaves have; 0 if too few are in sync.
        is_short: fewer copies are in sync than are wanted (SLAVE_NOT_AVAILABLE).
        refuses: fewer copies are in sync than must be.
    """

    in_sync_count: int
    waits: bool
    confirmed_position: int
    is_short: bool
    refuses: bool


@dataclass(slots=True)
class Confirmation:
    """Says whether enough copies have the confirmed part of the log.

    Attributes: is_short: fewer copies are in sync now; short_end: what was confirmed before that ended, by fewer copies.
    """

    is_short: bool = False
    short_end: int = 0

    def has_all_copies(self, position: int) -> bool:
        """Whether all wanted copies have the log up to `position`, which is confirmed."""
        return not self.is_short and position > self.short_end

    def change(self, verdict: Verdict, confirmed_position: int) -> None:
        """Takes another verdict. `confirmed_position`: the position before it. A slave that joins may lack what the others have confirmed.
        """
        if self.is_short and not verdict.is_short:
            self.short_end = confirmed_position
        self.is_short = verdict.is_short


class ReplicaView(NamedTuple):
    """A slave as an operator sees it; silence in milliseconds."""

    replica_id: int
    address: str
    is_in_sync: bool
    written_position: int
    flushed_position: int
    lag_bytes: int
    silence_ms: int


@dataclass(slots=True)
class Replica:
    """A slave whose session lasts.

    Attributes:
        sent_position: the session has sent the log up to there; written_position, flushed_position: it has said that it has that.
        heard_ms: when it said something; caught_up_ms: when the log had no more than it has now; None: never yet.
        goal: (where the log ended, when): caught up as of then, once it has that.
        said_ms: what it was told last was said then; asked_ms: what it has said follows what was said then. 0: nothing yet.
    """

    replica_id: int
    store_id: int
    session: int
    address: str
    sent_position: int
    written_position: int
    flushed_position: int
    heard_ms: int
    caught_up_ms: int | None = None
    goal: tuple[int, int] | None = None
    said_ms: int = 0
    asked_ms: int = 0


class ReplicaTable:
    """See the module's docstring."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._by_session: dict[int, Replica] = {}

    def __len__(self) -> int:
        return len(self._by_session)

    def find(self, session: int) -> Replica | None:
        """Returns the slave of a session that still lasts."""
        return self._by_session.get(session)

    def join(
        self, replica_id: int, store_id: int, session: int, address: str, position: int, now_ms: int
    ) -> list[int]:
        """Begins a session at `position`, a point that both logs have. Raises ReplicaTakenError.

        Returns the sessions that it ends: the earlier one of this slave, and those with its id or store that were silent for too long.
        """
        alike = [each for each in self._by_session.values() if each.replica_id == replica_id or each.store_id == store_id]
        for other in alike:
            is_same = (other.replica_id, other.store_id) == (replica_id, store_id)
            if not is_same and now_ms - other.heard_ms < self.limits.timeout_ms:
                raise ReplicaTakenError(other, store_id)
        earlier = next((each for each in alike if (each.replica_id, each.store_id) == (replica_id, store_id)), None)
        for other in alike:
            del self._by_session[other.session]
        # The slave's first acknowledgement says what it has synced.
        replica = Replica(replica_id, store_id, session, address, position, position, 0, now_ms)
        if earlier is not None:
            replica.caught_up_ms = earlier.caught_up_ms
        self._by_session[session] = replica
        return [other.session for other in alike]

    def leave(self, session: int) -> None:
        """Ends a session."""
        self._by_session.pop(session, None)

    def note_sent(self, session: int, end_position: int, log_end: int, now_ms: int) -> None:
        """Notes that the session has sent the log up to `end_position`; the log ends at `log_end`."""
        replica = self._by_session[session]
        assert replica.sent_position <= end_position <= log_end
        replica.sent_position = end_position
        if replica.goal is None:
            replica.goal = (log_end, now_ms)

    def note_acknowledged(
        self, session: int, written_position: int, flushed_position: int, log_end: int, now_ms: int
    ) -> None:
        """Notes which positions a slave has; the log ends at `log_end`. Raises ImpossibleAckError; then nothing has changed."""
        replica = self._by_session[session]
        if not replica.written_position <= written_position <= replica.sent_position:
            raise ImpossibleAckError(
                "written_position",
                f"is {written_position}; this session has sent the log up to {replica.sent_position}, "
                f"and was told {replica.written_position} before",
            )
        if not replica.flushed_position <= flushed_position <= written_position:
            raise ImpossibleAckError(
                "flushed_position",
                f"is {flushed_position}; it must be {replica.flushed_position}, as it was told before, "
                f"to {written_position}, which is written",
            )
        replica.written_position, replica.flushed_position = written_position, flushed_position
        replica.heard_ms = now_ms
        has = self._counted(replica)
        if has >= log_end:
            replica.caught_up_ms, replica.goal = now_ms, None
        elif replica.goal is not None and has >= replica.goal[0]:
            replica.caught_up_ms, replica.goal = replica.goal[1], None

    def note_said(self, session: int, said_ms: int) -> None:
        """Notes that the session is about to get a message."""
        self._by_session[session].said_ms = said_ms

    def check_heard(self, session: int, heard_ms: int) -> None:
        """Raises ImpossibleAckError if a slave was told nothing at `heard_ms` or later."""
        replica = self._by_session[session]
        if not 0 <= heard_ms <= replica.said_ms:
            raise ImpossibleAckError(
                "heard_ms", f"is {heard_ms}; this session was told something at {replica.said_ms} last"
            )

    def note_heard(self, session: int, heard_ms: int) -> None:
        """Notes that a slave answers what it was told at `heard_ms`. Raises ImpossibleAckError; then nothing has changed."""
        self.check_heard(session, heard_ms)
        replica = self._by_session[session]
        replica.asked_ms = max(replica.asked_ms, heard_ms)

    def reports(
        self, log_end: int, now_ms: int, silence_max_ms: int, late_max_ms: int
    ) -> dict[str, MemberReport]:
        """Returns reports of the slaves that have answered something in their session, for the in-sync set.

        A slave that is silent for `silence_max_ms` does not keep up. Nor does one that lacks what was in the log `late_max_ms` ago.
        """
        return {
            str(each.store_id): MemberReport(
                self._counted(each),
                now_ms - each.heard_ms < silence_max_ms and self._is_in_sync(each, log_end, now_ms, late_max_ms),
                each.asked_ms,
            )
            for each in self._by_session.values()
            if each.asked_ms
        }

    def silent(self, now_ms: int) -> Sequence[int]:
        """Returns the sessions of slaves that have been silent for too long."""
        return [
            session
            for session, replica in self._by_session.items()
            if now_ms - replica.heard_ms >= self.limits.timeout_ms
        ]

    def verdict(self, log_end: int, now_ms: int) -> Verdict:
        """Returns the present verdict; the log ends at `log_end`."""
        limits = self.limits
        has = sorted(
            (
                self._counted(each)
                for each in self._by_session.values()
                if self._is_in_sync(each, log_end, now_ms)
            ),
            reverse=True,
        )
        awaited = max(min(limits.copies_wanted - 1, len(has)), limits.copies_min - 1)
        confirmed = has[awaited - 1] if 0 < awaited <= len(has) else 0
        copies = len(has) + 1
        return Verdict(
            copies, awaited > 0, confirmed, copies < limits.copies_wanted, copies < limits.copies_min
        )

    def kept_position(self) -> int | None:
        """Slaves that follow need the log from this position on; None: no slave needs any."""
        return min((each.written_position for each in self._by_session.values()), default=None)

    def views(self, log_end: int, now_ms: int) -> list[ReplicaView]:
        """Returns all slaves that follow, sorted by id."""
        return sorted(
            ReplicaView(
                each.replica_id,
                each.address,
                self._is_in_sync(each, log_end, now_ms),
                each.written_position,
                each.flushed_position,
                max(log_end - each.written_position, 0),
                now_ms - each.heard_ms,
            )
            for each in self._by_session.values()
        )

    def _counted(self, replica: Replica) -> int:
        return replica.flushed_position if self.limits.counts_flushed else replica.written_position

    def _is_in_sync(
        self, replica: Replica, log_end: int, now_ms: int, late_max_ms: int | None = None
    ) -> bool:
        late_max_ms = self.limits.timeout_ms if late_max_ms is None else late_max_ms
        if replica.caught_up_ms is None or now_ms - replica.heard_ms >= self.limits.timeout_ms:
            return False
        if log_end - self._counted(replica) > self.limits.gap_max_bytes:
            return False
        return (
            self._counted(replica) >= log_end
            or now_ms - replica.caught_up_ms < late_max_ms
        )
