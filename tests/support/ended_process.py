"""What a process leaves on a simulated disk when it ends without a warning, and what it says when its disk fails."""

from __future__ import annotations

import random

from protomq_broker.testing.simdisk import SimDisk
from protomq_runtime.errors import ServiceError


def after_the_end(disk: SimDisk, rng: random.Random, ends: str = "") -> SimDisk:
    """The disk for the next one. `ends`: "kill", "power" or "power, nothing left" of what was not synced; a kill or "power" if empty."""
    if ends == "kill" or (not ends and rng.random() < 0.5):
        return disk.killed()
    return disk.crash(rng, keep=0.0 if ends == "power, nothing left" else None)


class DiskFailedError(Exception):
    """A call was refused since the disk failed: what has become of it nobody knows until the broker has started again."""


def is_disk_failure(error: object) -> bool:
    """Whether an answer says so."""
    return isinstance(error, ServiceError) and error.reason in ("STORE_FAILED", "DISK_FULL")


def raise_if_disk_failed(error: object) -> None:
    """DiskFailedError, if an answer says so."""
    if is_disk_failure(error):
        raise DiskFailedError(str(error))
