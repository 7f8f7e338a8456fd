"""What the members of a group did whose offsets were reset while they ran, and what of it is wrong. Pure: times come with the events.

    O1   all of it comes again: after the last reset each acknowledged message from the new offset on was begun and ended
    O2   members follow: the first message at the new offset is begun soon, whoever has the queue by then
    O3   nobody undoes a reset: who asks where the group is is told the new offset, or one up to which all was ended since
    O4   what a reset skips is skipped: messages below the new offset are begun no more, soon after

A reset to a time, or to the end, has no offset that is known beforehand: which messages were acknowledged before then, and which were sent
after. What lies between them may come or not. B4 to C6 of `groups.py` hold here, too. A member may finish what it had.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from .groups import GroupHistory, allowed_silence_s, check_owners
from .violations import Violation

BACKLOG_MESSAGE_S: Final = 0.03
"""Longest mean time of a message with its member. A queue's first message may wait for what others have of other queues."""


@dataclass(frozen=True, slots=True)
class Reset:
    """Of all queues: to `offset`, or, if that is None, between what was acknowledged at `since_s` and what was not yet sent at `until_s`.

    Times are of the monotonic clock; `asked_s`, `answered_s`: of the operator's call, all its tries.
    """

    asked_s: float
    answered_s: float
    offset: int | None = None
    since_s: float = 0.0
    until_s: float = 0.0

    def bounds(self, history: GroupHistory, queue: str) -> tuple[int, int]:
        """The group was reset to an offset of the queue from the first to the second of these."""
        if self.offset is not None:
            return self.offset, self.offset
        acked = {offset: time_s for (name, offset), time_s in history.acked_s.items() if name == queue}
        low = max((offset + 1 for offset, time_s in acked.items() if time_s < self.since_s), default=0)
        later = (offset for offset in acked if history.sent_s[queue, offset] > self.until_s)
        return low, min(later, default=max(acked, default=-1) + 1)


def first_of(history: GroupHistory, reset: Reset, queue: str) -> int | None:
    """The first acknowledged message of a queue that must come after a reset; None: there is none yet."""
    high = reset.bounds(history, queue)[1]
    return min((offset for name, offset in history.acked_s if name == queue and offset >= high), default=None)


def owed(history: GroupHistory, reset: Reset | None, queue: str, until_s: float = float("inf")) -> list[int]:
    """Acknowledged messages of a queue that were to be ended again after a reset, and were not. `until_s`: of those acknowledged then."""
    since_s, high = (0.0, 0) if reset is None else (reset.asked_s, reset.bounds(history, queue)[1])
    began_s: dict[tuple[str, int], float] = {}
    for got in history.got[queue]:
        if got.time_s > since_s:
            began_s.setdefault((got.member, got.offset), got.time_s)
    missing = []
    for (name, offset), acked_s in history.acked_s.items():
        if name != queue or offset < high or acked_s > until_s:
            continue
        ends = history.done[queue].get(offset, ())
        if not any(time_s >= began_s.get((member, offset), float("inf")) for time_s, member in ends):
            missing.append(offset)
    return sorted(missing)


def check_resets(history: GroupHistory, resets: list[Reset], queues: Iterable[str], counts: Counter[str]) -> list[Violation]:
    """What is wrong; what is only counted goes to `counts`."""
    found = check_owners(history, counts)
    counts["acked"] += len(history.acked_s)
    counts["commits refused or ignored"] += sum(history.refused.values())
    last = resets[-1] if resets else None
    for queue in queues:
        if missing := owed(history, last, queue):
            found.append(Violation("O1", f"{len(missing)} messages of {queue} did not come again after {last}: {missing[:5]}"))
        for reset, following in zip(resets, [*resets[1:], None], strict=True):
            next_s = float("inf") if following is None else following.asked_s
            found += _judge(history, queue, reset, next_s, counts)
    return found


def _judge(history: GroupHistory, queue: str, reset: Reset, next_s: float, counts: Counter[str]) -> Iterable[Violation]:
    low, high = reset.bounds(history, queue)
    began_s: dict[int, float] = {}
    for got in history.got[queue]:
        if reset.asked_s < got.time_s:
            began_s.setdefault(got.offset, got.time_s)
        if reset.answered_s < got.time_s < next_s and got.offset < low:
            late_s, allowed_s = got.time_s - reset.answered_s, allowed_silence_s(history, queue, reset.answered_s, got.time_s)
            counts["begun below a reset"] += 1
            if late_s > allowed_s:
                yield Violation("O4", f"{got.member} has {queue} {got.offset} {late_s:.1f} s after {reset}, {allowed_s:.1f} s are allowed")
    acked = sorted(offset for name, offset in history.acked_s if name == queue)
    first = first_of(history, reset, queue)
    if first is not None:
        begin_s = max(reset.answered_s, history.acked_s[queue, first])
        backlog = sum(name_s < reset.answered_s for name_s in history.acked_s.values()) - low
        ends_s = min(began_s.get(first, float("inf")), next_s)
        if begin_s < next_s:
            allowed_s = allowed_silence_s(history, queue, begin_s, ends_s) + BACKLOG_MESSAGE_S * max(backlog, 0)
            if ends_s - begin_s > allowed_s:
                yield Violation("O2", f"{queue} {first} did not come within {allowed_s:.1f} s after {reset}")
            elif first in began_s:
                counts["followed ms, longest"] = max(counts["followed ms, longest"], round((ends_s - begin_s) * 1000))
    yield from _undone(history, queue, reset, next_s, (low, high), acked)


def _undone(
    history: GroupHistory, queue: str, reset: Reset, next_s: float, bounds: tuple[int, int], acked: list[int]
) -> Iterable[Violation]:
    began: dict[int, list[tuple[float, str]]] = defaultdict(list)
    for got in history.got[queue]:
        if got.time_s > reset.asked_s:
            began[got.offset].append((got.time_s, got.member))
    ended_s: dict[int, float] = {}
    for offset, several in began.items():
        ends = history.done[queue].get(offset, ())
        both = [end_s for end_s, member in ends if any(who == member and began_s <= end_s for began_s, who in several)]
        ended_s[offset] = min(both, default=float("inf"))
    low, high = bounds
    for (member, name), fetches in history.fetches.items():
        for fetch in fetches:
            if name != queue or not reset.answered_s < fetch.began_s or not fetch.time_s < next_s:
                continue
            if fetch.offset < low:
                yield Violation("O3", f"{member} was told {queue} {fetch.offset} after {reset}, at least {low} was to be")
            below = acked[bisect_left(acked, high) : bisect_left(acked, fetch.offset)]
            open_ = [one for one in below if ended_s.get(one, float("inf")) > fetch.time_s]
            if open_:
                yield Violation("O3", f"{member} was told {queue} {fetch.offset} after {reset}, and nobody had ended {open_[:5]} since")
