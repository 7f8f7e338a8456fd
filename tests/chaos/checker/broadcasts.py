"""What the members of a broadcasting group did, and what of it is wrong. Pure: times come with the events.

    P1   every member gets everything: it ended each acknowledged message, in any of its runs
    P2   a member knows where it is: below the first message of a queue that it had not ended nothing comes again once it has ended well;
         after a kill, below the first that it had not ended when it last wrote that down
    P3   no member gets a message twice while it and the broker run; when the broker was away, only what it ended shortly before

A member gives up the queues of a broker that is away, until the route has them again. It then begins where they stood. What it ended behind
a message that it had not ended comes again. So may what it ended since it last wrote that down, if the member ends meanwhile. One whose
program keeps no offsets begins at the beginning each time: P2 asks nothing of it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import Final

from .groups import LATE_S, GroupHistory
from .violations import Violation

SAVED_S: Final = 2.5
"""Longest time from the end of a message until the member's file says so: a look each second, and a message before it that takes long."""


def _known_since_s(history: GroupHistory, time_s: float) -> float:
    """What had ended then is known to be ended at this time."""
    return time_s - (SAVED_S + LATE_S) * history.pace(time_s - SAVED_S, time_s)


def instance_of(run: str) -> str:
    """Of a run, "push.3", the member that is started again and again."""
    return run.partition(".")[0]


def missing_of(history: GroupHistory, instance: str) -> list[tuple[str, int]]:
    """Acknowledged messages that a member has not ended."""
    return sorted(
        (queue, offset)
        for queue, offset in history.acked_s
        if all(instance_of(run) != instance for _, run in history.done[queue].get(offset, ()))
    )


def check_broadcast(
    history: GroupHistory, runs: dict[str, list[str]], keepers: Iterable[str], counts: Counter[str]
) -> list[Violation]:
    """What is wrong; what is only counted goes to `counts`. `runs`: of each member, in their order; `keepers`: those with offsets."""
    found: list[Violation] = []
    counts["acked"] += len(history.acked_s)
    got: dict[str, Counter[tuple[str, int]]] = defaultdict(Counter)
    for queue, several in history.got.items():
        for one in several:
            got[one.member][queue, one.offset] += 1
    ended_s: dict[str, dict[tuple[str, int], float]] = defaultdict(dict)
    for queue, offsets in history.done.items():
        for offset, ends in offsets.items():
            for time_s, run in ends:
                ended_s[run][queue, offset] = time_s
    for instance, names in runs.items():
        missing = missing_of(history, instance)
        if missing:
            found.append(Violation("P1", f"{instance} did not get {len(missing)} of {len(history.acked_s)} messages: {missing[:5]}"))
        for run in names:
            counts["deliveries"] += got[run].total()
            twice = sorted(place for place, times in got[run].items() if times > 1 and not _is_of_an_outage(history, run, place))
            counts["came again after an outage"] += sum(times > 1 for times in got[run].values()) - len(twice)
            if twice:
                found.append(Violation("P3", f"{run} got {len(twice)} messages twice: {twice[:5]}"))
        if instance in keepers:
            found += _repeated(history, names, got, ended_s, counts)
    return found


def _is_of_an_outage(history: GroupHistory, run: str, place: tuple[str, int]) -> bool:
    """Whether the broker was away between each two times that the member got the message, and this was ended shortly before, or later."""
    queue, offset = place
    got_s = [got.time_s for got in history.got[queue] if got.member == run and got.offset == offset]
    ended_s = [time_s for time_s, member in history.done[queue].get(offset, ()) if member == run]
    downs = history.downs[queue.partition("/")[0]]
    for first_s, again_s in pairwise(got_s):
        end_s = min((time_s for time_s in ended_s if first_s <= time_s < again_s), default=again_s)
        between = [down for down in downs if first_s < down.end_s and down.begin_s < again_s]
        if not any(end_s > _known_since_s(history, down.begin_s) for down in between):
            return False
    return True


def _repeated(
    history: GroupHistory,
    names: list[str],
    got: dict[str, Counter[tuple[str, int]]],
    ended_s: dict[str, dict[tuple[str, int], float]],
    counts: Counter[str],
) -> Iterable[Violation]:
    for before, run in pairwise(names):
        killed_s = history.killed_s.get(before)
        ends_s = history.left_s.get(before, float("inf")) if killed_s is None else killed_s
        counts["ended well"] += killed_s is None
        if killed_s is not None:
            counts["came again after a kill"] += sum(place in ended_s[before] for place in got[run])
        floors: dict[str, int] = {}
        for queue in {queue for queue, _ in got[before]}:
            known_s = float("inf") if killed_s is None else _known_since_s(history, killed_s)
            last_s = max(one.time_s for one in history.got[queue] if one.member == before)
            for down in history.downs[queue.partition("/")[0]]:
                if last_s < down.end_s and down.begin_s < ends_s:
                    known_s = min(known_s, _known_since_s(history, down.begin_s))
            floor = min(offset for name, offset in got[before] if name == queue)
            while ended_s[before].get((queue, floor), float("inf")) < known_s:
                floor += 1
            floors[queue] = floor
        again = sorted((queue, offset) for queue, offset in got[run] if offset < floors.get(queue, 0))
        if again:
            how = "and it ended well" if killed_s is None else "long before it was killed"
            yield Violation("P2", f"{run} got {len(again)} messages below what {before} had ended, {how}: {again[:5]}")
