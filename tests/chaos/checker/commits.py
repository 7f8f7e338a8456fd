"""Invariant C3 over a history: an acknowledged commit does not fall back.

What it looks at:

    commit      args {group, topic, queue, offset}: one committer for each queue of a group, one call after the other    ok {}
    committed   by the checker at a quiet point                    ok {group, topic, offsets: [[queue, offset]]}
    crash       args {kind: "kill" or "power"}

What is found is the last commit that was acknowledged, or one that was tried after it and of which nobody knows. After a power cut under
a promise that allows it (ASYNC_FLUSH), it may be any that was tried before.
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
    open_calls: dict[int, tuple[Queue, int]] = {}
    for event in events:
        if event.op == "commit":
            if event.type == "invoke":
                args = event.args
                queue = (args["group"], args["topic"], args["queue"])
                open_calls[event.call] = queue, args["offset"]
                possible.setdefault(queue, [None]).append(args["offset"])
                tried.setdefault(queue, {None}).add(args["offset"])
                continue
            queue, offset = open_calls.pop(event.call)
            if event.type == "ok":
                possible[queue] = [offset]
            elif event.type == "fail":
                possible[queue].pop()
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
                possible[queue] = [offset_there]
    return found
