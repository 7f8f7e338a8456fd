"""The in-sync set as its master must treat it: the set in etcd, united with every set that etcd may have by now.

Rules
- The set in etcd changes by compare-and-swap. While an outcome is unknown, etcd may have the old set or the new one, so members of both
  count. So the master never acknowledges what a member of the set in etcd lacks, whichever set that is.
- All proposals compare with the same revision: at most one of them was made. A later revision settles all of them.
- What every member has is confirmed. It never goes back.
- A member joins when it has all that is confirmed, and all that was in the log when this master began. What an earlier master has
  acknowledged is in there. What it said last must be an answer to something said since the set has been what it is. A member that leaves
  because it may have lost the end of its log writes the set. So what it had said before does not bring it back.
- A member that does not keep up for the time-out leaves; one whose session has ended, and that is not back, leaves sooner. The master
  before this one, whose lease ran out, has had that time already: it leaves at once, and joins when it is back. Who has died with it
  leaves sooner, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import NamedTuple


class MemberReport(NamedTuple):
    """A slave as its master sees it.

    Attributes:
        position: it has the log up to there, as far as it counts (written or flushed), by what it has said to this master in this epoch.
        is_live: it keeps up.
        asked_ms: what it has said last, it said after it had heard what this master said then.
    """

    position: int
    is_live: bool
    asked_ms: int


class InSyncSet:
    """Attributes:
    members: the set in etcd as of `revision`.
    start_position: the end of the log when this master began.
    confirmed_position: every member has the log up to there.
    """

    def __init__(self, own: str, members: frozenset[str], revision: int, now_ms: int) -> None:
        """`own`: the master's member name."""
        self.own = own
        self.members = members
        self.revision = revision
        self.start_position = 0
        self.confirmed_position = 0
        self._proposals: list[frozenset[str]] = []
        self._live_ms = dict.fromkeys(members, now_ms)
        self._met: set[str] = set()
        self._settled_ms = now_ms

    @property
    def others(self) -> frozenset[str]:
        """Everybody who may be in the set, except the master."""
        return self.members.union(*self._proposals) - {self.own}

    def begin(self, start_position: int, now_ms: int, gone: str = "") -> None:
        """Called when the master begins to take sends. All members get time to appear, except the one that is `gone`."""
        self.start_position = start_position
        self._live_ms = dict.fromkeys(self.members - {gone}, now_ms)
        self._met.clear()

    def propose(self, members: frozenset[str]) -> None:
        """Notes that a compare-and-swap to these members is about to be sent."""
        assert self.own in members
        if members not in self._proposals:
            self._proposals.append(members)

    def settle(self, members: frozenset[str], revision: int, now_ms: int) -> None:
        """Notes the members that etcd has at a revision. Does nothing if a newer revision is known."""
        if revision > self.revision:
            self.members, self.revision, self._settled_ms = members, revision, now_ms
            self._proposals.clear()

    def confirm(self, own_position: int, reports: Mapping[str, MemberReport]) -> int:
        """Returns the confirmed position, given the end of the master's log and the reports of the slaves."""
        positions = [reports[each].position if each in reports else 0 for each in self.others]
        self.confirmed_position = max(self.confirmed_position, min([own_position, *positions]))
        return self.confirmed_position

    def wanted(
        self,
        reports: Mapping[str, MemberReport],
        timeout_ms: int,
        lost_timeout_ms: int,
        now_ms: int,
        absent: Set[str] = frozenset(),
    ) -> frozenset[str]:
        """The members as they should be: those that keep up, and those that have caught up.

        `timeout_ms`: for a member that does not keep up; `lost_timeout_ms`: for one that has followed this master, and whose session has
        ended. It also holds for those that are `absent`, and have never followed this master.
        """
        floor = max(self.confirmed_position, self.start_position)
        live = {member for member, report in reports.items() if report.is_live}
        self._live_ms.update(dict.fromkeys(live, now_ms))
        self._met.update(reports)
        lost = (self._met - reports.keys()) | (absent - self._met)
        kept = {
            each
            for each in self.members & self._live_ms.keys()
            if now_ms - self._live_ms[each] < (lost_timeout_ms if each in lost else timeout_ms)
        }
        joins = {
            each
            for each in live
            if reports[each].position >= floor and reports[each].asked_ms >= self._settled_ms
        }
        return frozenset({self.own, *kept, *joins})

    def vouched_until(self, promise_ms: int, reports: Mapping[str, MemberReport]) -> int | None:
        """Returns until when the members' promises keep all others from leading; None: there is no other member, so nobody can lead.

        A member does not run for `promise_ms` after it has received the message that it answers. It cannot have received it before the
        master sent it.
        """
        asked = [reports[each].asked_ms if each in reports else 0 for each in self.others]
        return min(asked) + promise_ms if asked else None
