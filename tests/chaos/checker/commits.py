"""Invariant C3 over a history: an acknowledged commit does not fall back.

What it looks at:

    commit      args {group, topic, queue, offset}: one committer for each queue of a group, one call after the other    ok {}
    committed   by the checker at a quiet point                    ok {group, topic, offsets: [[queue, offset]]}
    crash       args {kind: "kill" or "power"}

What is found is the last commit that was acknowledged, or one that was tried after it and of which nobody knows. Such a one may also be
under way in the broker still, and be done behind a later one, for as long as that broker runs. After a power cut under a promise
that allows it (ASYNC_FLUSH), it may be any that was tried before.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.chaos.history import Event

from .messages import Promise
from .violations import Violation

Queue = tuple[str, str, int]


def check_commits(events: Sequence[Event], promise: Promise) -> list[Violation]:
    """All violations, in the order of the history."""
    found: list[Violation] = []
    possible: dict[Queue, list[int | None]] = {}
    """By queue: what may be found; the first is what was acknowledged or found last."""
    tried: dict[Queue, set[int | None]] = {}
    late: dict[Queue, list[tuple[int, int]]] = {}
    """By queue: (start of the system, offset) of commits that may still be under way in the broker that was started then."""
    open_calls: dict[int, tuple[Queue, int, int]] = {}
    for event in events:
        if event.op == "commit":
            if event.type == "invoke":
                args = event.args
                queue = (args["group"], args["topic"], args["queue"])
                open_calls[event.call] = queue, args["offset"], event.epoch
                possible.setdefault(queue, [None]).append(args["offset"])
                tried.setdefault(queue, {None}).add(args["offset"])
                continue
            queue, offset, epoch = open_calls.pop(event.call)
            if event.type == "ok":
                under_way = [other for start, other in late.get(queue, []) if start == event.epoch]
                possible[queue] = [offset, *under_way]
            elif event.type == "fail":
                possible[queue].pop()
            else:
                late.setdefault(queue, []).append((epoch, offset))
        elif event.op == "crash" and event.args["kind"] == "power" and promise.suffix_loss:
            for queue, offsets in possible.items():
                offsets += tried[queue] - set(offsets)
        elif event.op == "committed" and event.type == "ok":
            result = event.result
            there = dict(map(tuple, result["offsets"]))
            for queue, offsets in possible.items():
                if queue[:2] != (result["group"], result["topic"]):
                    continue
                offset_there = there.get(queue[2])
                if offset_there not in offsets:
                    found.append(
                        Violation(
                            "C3",
                            f"{queue[0]} stands at {offset_there} in {queue[1]}/{queue[2]}: "
                            f"{offsets[0]} was acknowledged, then {offsets[1:]} tried",
                        )
                    )
                under_way = [other for start, other in late.get(queue, []) if start == event.epoch]
                possible[queue] = [offset_there, *under_way]
    return found
