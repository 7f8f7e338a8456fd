"""A broadcasting group with real processes: its members and its two brokers are killed, members end well, all of them come back.

There is a member of each kind (`group_member.BROADCAST_KINDS`), each with its own name and file of offsets, but for the pull consumer,
which begins at the beginning each time. checker/broadcasts.py has the rules.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Final

from .checker import Violation
from .checker.broadcasts import check_broadcast, instance_of, missing_of
from .group_member import BROADCAST_KINDS
from .group_rounds import GAP_S, GroupWorld, Member

KEEPERS: Final = ("broadcast", "async-broadcast")
FAULTS: Final = ("kill", "kill", "broker", "broker and member", "leave")


class BroadcastWorld(GroupWorld):
    """A group all of whose members get all messages."""

    send_pause_s = 0.03

    def __init__(self, seed: int, folder: Path, counts: Counter[str]) -> None:
        super().__init__(seed, folder, counts, GAP_S)
        self.runs: dict[str, list[str]] = {kind: [] for kind in BROADCAST_KINDS}

    def judge(self) -> list[Violation]:
        """What is wrong."""
        return self.found + check_broadcast(self.history, self.runs, KEEPERS, self.counts)

    def settle(self, besides: str = "") -> None:
        """Waits until each member that runs consumes each queue."""
        since_s = time.monotonic()

        def is_consumed() -> bool:
            with self.lock:
                return all(
                    any(got.time_s > since_s and got.member == run for got in reversed(self.history.got[queue]))
                    for queue in self.queues
                    for run in self.members
                )

        if not self.wait(is_consumed):
            self.say("P1", "not all members consume all queues")

    def round(self, fault: str) -> None:
        """Then all members run for a while: long enough to write down where they are, or not."""
        super().round(fault)
        self.join_all()
        self._stopping.wait(self.rng.uniform(0.2, 2.5))

    def share_out(self) -> None:
        """They share nothing."""

    def join_all(self) -> None:
        """All members run."""
        while len(self.members) < len(BROADCAST_KINDS):
            self._join()

    def _join(self) -> None:
        kind = next(kind for kind in BROADCAST_KINDS if kind not in map(instance_of, self.members))
        run = f"{kind}.{len(self.runs[kind]) + 1}"
        self.runs[kind].append(run)
        self.members[run] = Member(self, run, kind, kind, str(self.folder / "offsets"))

    def _is_all_done(self) -> bool:
        with self.lock:
            return not any(missing_of(self.history, kind) for kind in BROADCAST_KINDS)


def broadcast_rounds(seed: int, rounds: int, folder: Path, counts: Counter[str], faults: tuple[str, ...] = FAULTS) -> list[Violation]:
    """What is wrong."""
    world = BroadcastWorld(seed, folder, counts)
    with world.running():
        for _ in range(rounds):
            world.round(world.rng.choice(faults))
            if world.found:
                break
        world.round("leave")
    return world.judge()
