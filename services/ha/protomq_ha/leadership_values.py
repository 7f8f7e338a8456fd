"""The inputs and outputs of leadership.py: settings, requests to etcd with their answers, and effects."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from .cluster_state import ClusterView, Transaction


@dataclass(frozen=True, slots=True)
class Settings:
    """Attributes:
    member: this store; address: where others reach it; broker_id: while it follows.
    lease_ttl_ms: of the master key; also the time for which a member's promise binds it. Etcd grants no less than 2 s by default.
    renew_interval_ms: between two renewals; read_interval_ms: between two looks at etcd.
    member_timeout_ms: a member that does not keep up for this time leaves the set; member_lost_timeout_ms: one whose session has ended, and
        that is not back.
    hand_over_timeout_ms: how long a switch may keep sends waiting before it is called off.
    new_name_wait_ms: how long an empty member waits for members with messages where etcd has no in-sync set.
    new_election: the random number that this member writes as that of the election, where etcd has none; 0: it writes none.
    process: a random text of this process; place: which folder it has locked, on which start of which machine.
    """

    member: str
    address: str
    lease_ttl_ms: int = 3_000
    renew_interval_ms: int = 800
    read_interval_ms: int = 300
    member_timeout_ms: int = 3_000
    member_lost_timeout_ms: int = 500
    hand_over_timeout_ms: int = 3_000
    new_name_wait_ms: int = 3_000
    broker_id: int = 0
    new_election: int = 0
    process: str = ""
    place: str = ""

    @property
    def trusted_ms(self) -> int:
        """How long to rely on a lease or a promise. It is shorter than the lease, since two clocks may differ in speed by a tenth."""
        return self.lease_ttl_ms * 9 // 10


class ReadCluster(NamedTuple):
    """Reads all present keys of the name (linearizable). The answer is a ClusterView."""


class GrantLease(NamedTuple):
    """A new lease; answered with a Lease."""

    ttl_ms: int


class RenewLease(NamedTuple):
    """Renews a lease. The answer is a Lease; ttl_ms 0: it has run out."""

    lease: int


class Lease(NamedTuple):
    """A lease, and how long etcd says it lasts from now on."""

    lease: int
    ttl_ms: int


class Committed(NamedTuple):
    """The outcome of a transaction: it was made as `revision`, or not made because a comparison was false."""

    is_made: bool
    revision: int


class Refused(NamedTuple):
    """Etcd answers, and does not do it, as it says why: it is full, or wants a password. A full one may have done it all the same."""

    why: str


Request = ReadCluster | GrantLease | RenewLease | Transaction
Result = ClusterView | Lease | Committed | Refused | None
"""None: no answer came, or an unreadable one. The request may have been done, or may still be done."""


class Ask(NamedTuple):
    """Send a request to etcd. The driver must call `answered` with the same number, whatever happens."""

    number: int
    request: Request


class Follow(NamedTuple):
    """Follow this master. `unclean_epoch`: of the last unclean promotion, 0 if there was none."""

    member: str
    address: str
    epoch: int
    unclean_epoch: int = 0

    def may_lose(self, last_epoch: int) -> bool:
        """Whether a log that ends with this epoch may lose what was confirmed: an operator has ordered it after that epoch."""
        return last_epoch < self.unclean_epoch


class OwnLog(NamedTuple):
    """What a member knows of its log when it is to follow another master.

    Attributes:
        end: where it ends.
        epoch: with which it ends.
        confirmed: up to where it is confirmed, as is written down.
        has_led: this member wrote some of it as the leader.
    """

    end: int
    epoch: int
    confirmed: int
    has_led: bool

    def kept_for(self, follow: Follow, *, shares_past: bool) -> int:
        """Up to where the log is not to be dropped to follow this master. It may have been acknowledged, and no order allows to lose it.

        `shares_past`: both logs were begun as one, as one can see.
        """
        if follow.may_lose(self.epoch):
            return 0
        # Each epoch has one writer. If the master's is that of this log from another one, etcd did not know of that when it gave it again.
        is_etcd_older = self.epoch >= follow.epoch
        # What is confirmed is written down now and then only. In a past of its own, all of it may have been.
        is_alone = not shares_past and (self.confirmed or self.has_led)
        return self.end if is_etcd_older or is_alone else self.confirmed


class StopFollowing(NamedTuple):
    """Say nothing to any master any more, then call `following_stopped`."""


class Lead(NamedTuple):
    """Open the log to lead with this epoch; call `opened` when the epoch is durable."""

    epoch: int


class StopLeading(NamedTuple):
    """Another broker leads, or may lead. Acknowledge no send, and follow when told whom."""


class TailSettled(NamedTuple):
    """The store is out of the set, so the driver may forget that the end of its log may be lost."""


class CutSettled(NamedTuple):
    """The store has caught up, or leads, so the driver may forget that a start has cut the end of its log."""


class ElectionKnown(NamedTuple):
    """This is the number of the election: name servers are to be told."""

    number: int


class NoteStart(NamedTuple):
    """Write this number of a start into the store's folder, durably, and call `start_noted` with the number that the folder has then.

    `is_older_copy`: etcd knows a later start. What the folder lacks may have been acknowledged: note with it that the end may be lost.
    """

    number: int
    is_older_copy: bool


Effect = Ask | Follow | StopFollowing | Lead | StopLeading | TailSettled | CutSettled | ElectionKnown | NoteStart


class Role(Enum):
    """What a broker does about the lead.

    FOLLOWING     another one leads, or nobody does
    STOPPING      wants to lead: stops following first, so that it says to no master any more that it has something
    RUNNING       the compare-and-swap of the master key is under way
    OPENING       has won: the log is opened to lead, and the epoch made durable
    LEADING       takes sends
    HANDING_OVER  takes no sends; gives the lead away when the successor has everything
    """

    FOLLOWING = "FOLLOWING"
    STOPPING = "STOPPING"
    RUNNING = "RUNNING"
    OPENING = "OPENING"
    LEADING = "LEADING"
    HANDING_OVER = "HANDING_OVER"
