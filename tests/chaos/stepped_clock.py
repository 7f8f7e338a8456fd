"""The wall clock of one broker's process, which somebody sets while it runs; its monotonic clocks go on.

`planted_in_child/sitecustomize.py` calls `follow` when the process starts. The offset is in a file that the process maps, so that it
holds from one look at the clock to the next, and for the process that is started after a kill. All parts of a broker look at
`SystemClock`. `time.time` itself stays right: gRPC compares it with deadlines that its C core has from the kernel.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from protomq_runtime.clock import SystemClock

VARIABLE: Final = "CHAOS_CLOCK"
_OFFSET_NS: Final = struct.Struct("<q")


def follow(path: str) -> None:
    """In the process: its wall clock is off by what the file says, from now on."""
    with open(path, "rb") as file:
        offset = mmap.mmap(file.fileno(), _OFFSET_NS.size, access=mmap.ACCESS_READ)

    def now_ms(clock: SystemClock) -> int:
        return (time.time_ns() + int(_OFFSET_NS.unpack_from(offset)[0])) // 1_000_000

    SystemClock.now_ms = now_ms  # type: ignore[method-assign,assignment]


class SteppedClock:
    """The clock of one process, or of those that come after each other in one place. Attribute: offset_s, how far it is off."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(_OFFSET_NS.size))
        self.offset_s = 0.0

    @property
    def environment(self) -> dict[str, str]:
        """What the process needs."""
        here = Path(__file__).parent
        paths = [str(here / "planted_in_child"), str(here.parents[1]), os.environ.get("PYTHONPATH", "")]
        return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), VARIABLE: str(self._file)}

    def set(self, offset_s: float) -> None:
        """Ahead of the right time by so much; below zero: behind it."""
        self.offset_s = offset_s
        with self._file.open("r+b", buffering=0) as file:
            file.write(_OFFSET_NS.pack(round(offset_s * 1e9)))


FOLLOWED: Final = 0.1
"""Of each second in which a wall clock is off, log time gains or loses so much (docs/delay.md)."""
UNSEEN_S: Final = 0.3
"""For the time in which a broker is down, and its log time follows nothing, or less."""
HEARD_S: Final = 1.0
"""A slave may be so far ahead of a master whose log time is slower: by a tenth of what `HeardTime` looks back."""


class LogTimeRange:
    """Between which bounds log time of brokers with these clocks has been, seen from the right time. Any thread.

    `look` before a clock is set. A slave has its master's log time, and any of them may be the master: so all clocks are followed by one.
    """

    def __init__(self, clocks: Sequence[SteppedClock]) -> None:
        self._clocks = clocks
        self._lock = threading.Lock()
        self._looked_s = time.monotonic()
        self._ahead_s = self._behind_s = self._ahead_max_s = self._behind_max_s = 0.0

    def look(self) -> float:
        """How far apart any two log times were at most, those of different moments too."""
        with self._lock:
            now_s = time.monotonic()
            followed_s, self._looked_s = FOLLOWED * (now_s - self._looked_s), now_s
            is_ahead = any(clock.offset_s > 0 for clock in self._clocks)
            is_behind = any(clock.offset_s < 0 for clock in self._clocks)
            self._ahead_s = max(self._ahead_s + (followed_s if is_ahead else -followed_s), 0.0)
            self._behind_s = max(self._behind_s + (followed_s if is_behind else -followed_s), 0.0)
            self._ahead_max_s = max(self._ahead_max_s, self._ahead_s)
            self._behind_max_s = max(self._behind_max_s, self._behind_s)
            return self._ahead_max_s + self._behind_max_s + UNSEEN_S + HEARD_S * (len(self._clocks) > 1)
