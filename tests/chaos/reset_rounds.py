"""Resets of a group with real processes: its offsets are moved, by offset, by time, to the start and to the end, while its members run.
Meanwhile members and the two brokers are killed, also while a reset is under way; members join and leave.

A run has one kind of member, by its seed (`group_member.KINDS`). checker/resets.py has the rules.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Literal

from protomq import Admin
from protomq.errors import ProtomqError

from .checker import Violation
from .checker.resets import Reset, check_resets, first_of, owed
from .group_member import GROUP, TOPIC
from .group_rounds import BROKERS, GAP_S, GroupWorld

DEPTH_MAX: Final = 40
"""How many messages of each queue a reset takes back at most, but for one to the start, of a young group."""
YOUNG_COUNT: Final = 600
BACK_MAX_S: Final = 8.0
ROUNDING_S: Final = 0.01
"""Store times are whole milliseconds of the broker's clock."""
RESETS: Final = ("reset", "reset then kill", "reset then broker", "reset as broker dies")
FAULTS: Final = (*RESETS, *RESETS, "kill", "broker", "join", "leave")


class ResetWorld(GroupWorld):
    """A group whose offsets an operator moves."""

    send_pause_s = 0.03

    def __init__(self, seed: int, folder: Path, counts: Counter[str]) -> None:
        super().__init__(seed, folder, counts, GAP_S)
        self.resets: list[Reset] = []

    def judge(self) -> list[Violation]:
        """What is wrong."""
        return self.found + check_resets(self.history, self.resets, self.queues, self.counts)

    # -- what happens ----------------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        self._move()
        self._follow()

    def _reset_then_kill(self) -> None:
        self._move()
        self._kill()
        self._follow()

    def _reset_then_broker(self) -> None:
        self._move()
        self._broker()
        self._follow()

    def _reset_as_broker_dies(self) -> None:
        operator = threading.Thread(target=self._move, daemon=True)
        operator.start()
        self._stopping.wait(self.rng.uniform(0.0, 0.01))
        self._broker()
        operator.join()
        self._follow()

    def _move(self) -> None:
        """The group's offsets: until all brokers say that they did it. What was tried before is the same."""
        with self.lock:
            ends = {queue: max((o for name, o in self.history.acked_s if name == queue), default=0) for queue in self.queues}
        kind = self.rng.choice(("offset", "offset", "time", "time", "end", "start"))
        if kind == "start" and sum(ends.values()) > YOUNG_COUNT:
            kind = "offset"
        self.counts[f"resets: {kind}"] += 1
        asked_s = time.monotonic()
        back_s = self.rng.uniform(0.5, BACK_MAX_S)
        lowest = min(ends.values())
        offset = 0 if kind == "start" else max(lowest - self.rng.randrange(DEPTH_MAX), 0)
        when = datetime.now(UTC) - timedelta(seconds=back_s)
        places: dict[str, Literal["earliest", "latest"] | datetime | int] = {
            "offset": offset, "time": when, "end": "latest", "start": "earliest",
        }  # fmt: skip
        to = places[kind]
        with Admin(namesrv=self.namesrv, request_timeout_s=1.0) as admin:

            def is_done() -> bool:
                try:
                    return admin.reset_offsets(GROUP, TOPIC, to) == sorted(BROKERS)
                except ProtomqError:
                    return False

            if not self.wait(is_done) and not self.found:
                self.say("I2", f"the offsets cannot be reset to {to}")
        answered_s = time.monotonic()
        if kind == "time":
            moved = Reset(asked_s, answered_s, None, asked_s - back_s - ROUNDING_S, asked_s - back_s + ROUNDING_S)
        elif kind == "end":
            moved = Reset(asked_s, answered_s, None, asked_s, answered_s)
        else:
            moved = Reset(asked_s, answered_s, offset)
        with self.lock:
            self.resets.append(moved)

    def _follow(self) -> None:
        """Waits for the first messages behind the new offsets; half of the times for all that there were."""
        reset = self.resets[-1]

        def has_begun() -> bool:
            with self.lock:
                for queue in self.queues:
                    first = first_of(self.history, reset, queue)
                    if not any(got.offset == first and got.time_s > reset.asked_s for got in reversed(self.history.got[queue])):
                        return False
                return True

        def is_all_there() -> bool:
            with self.lock:
                return not any(owed(self.history, reset, queue, reset.answered_s) for queue in self.queues)

        if not self.wait(has_begun):
            self.say("O2", f"members do not follow {reset}")
        elif self.rng.random() < 0.5 and not self.wait(is_all_there):
            with self.lock:
                missing = {queue: owed(self.history, reset, queue, reset.answered_s)[:5] for queue in self.queues}
            self.say("O1", f"these did not come again after {reset}: {missing}")

    def _is_all_done(self) -> bool:
        last = self.resets[-1] if self.resets else None
        with self.lock:
            return not any(owed(self.history, last, queue) for queue in self.queues)


def reset_rounds(seed: int, rounds: int, folder: Path, counts: Counter[str], faults: tuple[str, ...] = FAULTS) -> list[Violation]:
    """What is wrong."""
    world = ResetWorld(seed, folder, counts)
    counts[f"kind: {world.kind}"] += 1
    with world.running():
        for _ in range(rounds):
            world.round(world.rng.choice(faults))
            if world.found:
                break
    return world.judge()
