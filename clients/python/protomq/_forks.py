"""Forks: which objects are to be told that they live in a child now, and a count for those that ask by themselves."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    """What has something to leave behind in a forked child."""

    def after_fork(self) -> None:
        """Called in the child, before anything else is."""


fork_count = 0
"""How many forks lie between this process and the first: it differs between parent and child, and costs no system call."""

grpc_is_lost = False
"""Whether this process was forked while gRPC ran in an event loop: every call of gRPC's library hangs here, or ends the process."""

_forkable: weakref.WeakSet[Forkable] = weakref.WeakSet()


def call_after_fork(producer: Forkable) -> None:
    """Has `producer.after_fork()` called in every forked child, for as long as the producer lives."""
    _forkable.add(producer)


def _after_fork() -> None:
    global fork_count
    fork_count += 1
    for producer in list(_forkable):
        producer.after_fork()


if hasattr(os, "register_at_fork"):  # Not on Windows.
    os.register_at_fork(after_in_child=_after_fork)
