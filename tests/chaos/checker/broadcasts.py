"""What the members of a broadcasting group did, and what of it is wrong. Pure: times come with the events.

    M1   every member gets everything: it ended each acknowledged message, in any of its runs
    M2   a member knows where it is: below the first message of a queue that it had not ended nothing comes again once it has ended well;
         after a kill, below the first that it had not ended when it last wrote that down
    M3   no member gets a message twice while it runs, whatever its brokers do

What a member ended behind a message that it had not ended comes again. A member whose program keeps no offsets begins at the beginning each
time: M2 asks nothing of it.
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
            found.append(Violation("M1", f"{instance} did not get {len(missing)} of {len(history.acked_s)} messages: {missing[:5]}"))
        for run in names:
            counts["deliveries"] += got[run].total()
            twice = sorted(place for place, times in got[run].items() if times > 1)
            if twice:
                found.append(Violation("M3", f"{run} got {len(twice)} messages twice: {twice[:5]}"))
        if instance in keepers:
            found += _repeated(history, names, got, ended_s, counts)
    return found


def _repeated(
    history: GroupHistory,
    names: list[str],
    got: dict[str, Counter[tuple[str, int]]],
    ended_s: dict[str, dict[tuple[str, int], float]],
    counts: Counter[str],
) -> Iterable[Violation]:
    for before, run in pairwise(names):
        killed_s = history.killed_s.get(before)
        if killed_s is None:
            known_s = float("inf")
            counts["ended well"] += 1
        else:
            known_s = killed_s - (SAVED_S + LATE_S) * history.pace(killed_s - SAVED_S, killed_s)
            counts["came again after a kill"] += sum(place in ended_s[before] for place in got[run])
        floors: dict[str, int] = {}
        for queue, offset in sorted(got[before]):
            floor = floors.setdefault(queue, offset)
            if offset == floor and ended_s[before].get((queue, offset), float("inf")) < known_s:
                floors[queue] = offset + 1
        again = sorted((queue, offset) for queue, offset in got[run] if offset < floors.get(queue, 0))
        if again:
            how = "and it ended well" if killed_s is None else "long before it was killed"
            yield Violation("M2", f"{run} got {len(again)} messages below what {before} had ended, {how}: {again[:5]}")
