"""The program of `protomq worker` in a load: a listener that computes, and counts in a file that the load reads."""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import threading
import time
from pathlib import Path
from typing import Any, Final

from protomq import PushConsumer

COUNT: Final = struct.Struct("<Q")
"""What a process has done: its place in the file is its number."""
_BLOCK: Final = b"\0" * 1_024
"""Below 2,048 octets a hash keeps the interpreter, as a listener in Python does."""


def compute(steps: int) -> None:
    """Work for one core, always as much."""
    for _ in range(steps):
        hashlib.sha256(_BLOCK)


def steps_of(seconds: float) -> int:
    """How many steps take so long here, alone: the quickest of several tries."""
    steps = 1_000
    best_s = float("inf")
    for _ in range(20):
        began_s = time.perf_counter()
        compute(steps)
        best_s = min(best_s, time.perf_counter() - began_s)
    return max(1, round(steps * seconds / best_s))


def make() -> PushConsumer:
    """What COMPUTING_LISTENER says: name servers, topic, group, steps of a message, and the file, with commas between."""
    namesrv, topic, group, steps, path = os.environ["COMPUTING_LISTENER"].split(",")
    place = int(os.environ["PROTOMQ_WORKER_PROCESS"]) * COUNT.size
    with Path(path).open("r+b") as file:
        counts = mmap.mmap(file.fileno(), 0)
    done, lock = 0, threading.Lock()

    def listen(message: Any) -> None:
        nonlocal done
        compute(int(steps))
        with lock:
            done += 1
            COUNT.pack_into(counts, place, done)

    consumer = PushConsumer(group, namesrv=namesrv)
    consumer.subscribe(topic, listen)
    return consumer
