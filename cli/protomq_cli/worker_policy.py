"""What a supervisor of worker processes decides: whom to start, stop and kill, and when. No I/O, time handed in.

    down ──start──▶ starting ──ready──▶ up ──stop──▶ stopping ──exit──▶ down
     ▲                 └────────── exit ────┴─────────── exit ──────────┘

Rules:
- A process that dies is started again after 1 s, doubling to 30 s with each death in a row. One that lived for a minute begins at 1 s.
- One that is not ready in time is killed, and counts as one that died: the death of a start, however long that took.
- A stop asks all at once, and kills those that are not done in time.
- A replacement goes one by one. A process is asked to stop, and a new one takes its place. Only when that is ready, the next is
  asked.
- A program that cannot be loaded (exit code 2) before any process was ever ready will not load the next time: the supervisor ends.

One thread.
"""

from __future__ import annotations

import signal
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

BACKOFF_MIN_S: Final = 1.0
BACKOFF_MAX_S: Final = 30.0
LIVED_S: Final = 60.0
UNLOADABLE: Final = 2
"""Exit code of a process whose program is not there or is none."""
UNREACHABLE: Final = 3
"""Of one that found no server when it started."""


class Doing(Enum):
    """What is to be done with the process of a slot."""

    START = "start"
    STOP = "stop"
    KILL = "kill"


class Action(NamedTuple):
    """One thing to do."""

    doing: Doing
    slot: int


class Phase(Enum):
    """Of the process of a slot."""

    DOWN = "down"
    STARTING = "starting"
    UP = "up"
    STOPPING = "stopping"


@dataclass(slots=True)
class Slot:
    """A process, or the place of one."""

    index: int
    phase: Phase = Phase.DOWN
    start_at_s: float = 0.0
    """When down: not before."""
    started_s: float = 0.0
    kill_at_s: float = 0.0
    deaths: int = 0
    """In a row."""
    restarts: int = 0
    """Since the supervisor's start, replacements not counted."""
    was_killed: bool = False
    was_ready: bool = False
    """The process that is there."""


class WorkerPolicy:
    """A number of processes."""

    def __init__(self, count: int, stop_timeout_s: float, start_timeout_s: float = float("inf")) -> None:
        self.slots = [Slot(index) for index in range(count)]
        self.is_stopping = False
        self._stop_timeout_s = stop_timeout_s
        self._start_timeout_s = start_timeout_s
        self._to_replace: deque[int] = deque()
        self._replacing: int | None = None
        self._was_ready = False
        self._code = 0

    def step(self, now_s: float) -> list[Action]:
        """What is to be done now. Each action is told once: report what comes of it."""
        self._go_on_replacing(now_s)
        actions = []
        for slot in self.slots:
            if slot.phase is Phase.DOWN:
                if not self.is_stopping and slot.start_at_s <= now_s:
                    slot.phase, slot.started_s, slot.was_ready = Phase.STARTING, now_s, False
                    actions.append(Action(Doing.START, slot.index))
            elif self.is_stopping and slot.phase is not Phase.STOPPING:
                actions.append(self._stop(slot, now_s))
            elif slot.phase is Phase.STOPPING and slot.kill_at_s <= now_s and not slot.was_killed:
                slot.was_killed = True
                actions.append(Action(Doing.KILL, slot.index))
            elif slot.index == self._replacing and slot.kill_at_s == 0.0 and slot.phase is not Phase.STOPPING:
                actions.append(self._stop(slot, now_s))
            elif self._waits_for_start(slot) and slot.started_s + self._start_timeout_s <= now_s:
                slot.was_killed = True
                actions.append(Action(Doing.KILL, slot.index))
        return actions

    def next_step_s(self, now_s: float) -> float:
        """Seconds until `step` may have something by the passing of time alone; infinity if it has not."""
        times = [slot.start_at_s for slot in self.slots if slot.phase is Phase.DOWN and not self.is_stopping]
        times += [slot.kill_at_s for slot in self.slots if slot.phase is Phase.STOPPING and not slot.was_killed]
        times += [slot.started_s + self._start_timeout_s for slot in self.slots if self._waits_for_start(slot)]
        return max(min(times, default=float("inf")) - now_s, 0.0)

    def ready(self, index: int) -> None:
        """The process consumes."""
        slot = self.slots[index]
        self._was_ready = slot.was_ready = True
        if slot.phase is Phase.STARTING:
            slot.phase = Phase.UP

    def exited(self, index: int, code: int, now_s: float) -> None:
        """The process is no more; `code`: below 0 for a signal."""
        slot = self.slots[index]
        was_asked, was_killed = slot.phase is Phase.STOPPING, slot.was_killed
        slot.phase = Phase.DOWN
        slot.was_killed = False
        if self.is_stopping:
            # One that has not begun loses nothing: it may not take SIGTERM yet, or looks for a server.
            is_unbegun = not slot.was_ready and code in (-signal.SIGTERM, UNREACHABLE)
            if code != 0 and not is_unbegun and not self._code:
                self._code = 1
        elif was_asked:
            slot.start_at_s, slot.deaths = now_s, 0
        else:
            if now_s - slot.started_s >= LIVED_S and not was_killed:
                slot.deaths = 0
            slot.deaths += 1
            slot.restarts += 1
            slot.start_at_s = now_s + min(BACKOFF_MIN_S * 2 ** min(slot.deaths - 1, 10), BACKOFF_MAX_S)
            if code == UNLOADABLE and not self._was_ready:
                self._code = UNLOADABLE
                self.is_stopping = True

    def stop(self, now_s: float) -> None:
        """All are to end. Said again: at once."""
        if self.is_stopping:
            # Also of those that are not asked yet: the first one came a moment ago.
            self._stop_timeout_s = 0.0
            for slot in self.slots:
                slot.kill_at_s = min(slot.kill_at_s, now_s)
        self.is_stopping = True

    def replace(self) -> None:
        """Each process is to be replaced. Said again while that goes on: begins again."""
        if not self.is_stopping:
            self._to_replace = deque(slot.index for slot in self.slots)

    @property
    def exit_code(self) -> int | None:
        """Of the supervisor: 0 all ended in order, 1 some did not, 2 the program cannot be loaded; None: it goes on."""
        if not self.is_stopping or any(slot.phase is not Phase.DOWN for slot in self.slots):
            return None
        return self._code

    def _waits_for_start(self, slot: Slot) -> bool:
        return slot.phase is Phase.STARTING and not slot.was_killed

    def _stop(self, slot: Slot, now_s: float) -> Action:
        slot.phase = Phase.STOPPING
        slot.kill_at_s = now_s + self._stop_timeout_s
        return Action(Doing.STOP, slot.index)

    def _go_on_replacing(self, now_s: float) -> None:
        if self._replacing is not None and self.slots[self._replacing].phase is Phase.UP:
            if self.slots[self._replacing].kill_at_s:  # It is the new one.
                self._replacing = None
        if self._replacing is None and self._to_replace and not self.is_stopping:
            slot = self.slots[self._to_replace.popleft()]
            self._replacing = slot.index
            slot.kill_at_s = 0.0
            if slot.phase is Phase.DOWN:  # Its next process is new anyway.
                slot.kill_at_s = now_s
