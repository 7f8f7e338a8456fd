"""A member of a group in a process of its own, which says on stdout what it does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from protomq.testing import Broker


@contextmanager
def member_process(program: str, broker: Broker) -> Iterator[subprocess.Popen[str]]:
    """Runs a program, whose first argument is the name server. Killed at the end."""
    process = subprocess.Popen([sys.executable, "-c", program, broker.namesrv], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def read_until(process: subprocess.Popen[str], line: str) -> None:
    """Waits until the process says this line."""
    assert process.stdout is not None
    for found in process.stdout:
        if found.strip() == line:
            return
    raise AssertionError(f"the member ended without {line!r}")
