"""What a process leaves on a simulated disk when it ends without a warning."""

from __future__ import annotations

import random

from protomq_broker.testing.simdisk import SimDisk


def after_the_end(disk: SimDisk, rng: random.Random, ends: str = "") -> SimDisk:
    """The disk for the next one. `ends`: "kill", "power" or "power, nothing left" of what was not synced; a kill or "power" if empty."""
    if ends == "kill" or (not ends and rng.random() < 0.5):
        return disk.killed()
    return disk.crash(rng, keep=0.0 if ends == "power, nothing left" else None)
