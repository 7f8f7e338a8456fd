"""A name server as a process of its own, which notices within two seconds that a broker has gone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from protomq_runtime.addresses import Address, parse_address

from .warm_servers import ServerPopen

# Short, and yet longer than a busy machine may keep a process waiting.
LIVENESS = {
    "PROTOMQ_LIVENESS_HOLD_MS": "300ms",
    "PROTOMQ_LIVENESS_BROKEN_GRACE_MS": "1000ms",
    "PROTOMQ_LIVENESS_RENEWAL_GRACE_MS": "1500ms",
    "PROTOMQ_LIVENESS_SCAN_INTERVAL_MS": "50ms",
}


class Namesrv(NamedTuple):
    """The process and where it listens."""

    process: subprocess.Popen[str]
    grpc: Address
    remoting: Address


@contextmanager
def running_namesrv(
    port: int = 0, remoting_port: int = 0, **liveness_ms: int
) -> Iterator[Namesrv]:
    """Killed at the end. `liveness_ms`: fields of its configuration, without their `_ms`."""
    environment = {f"PROTOMQ_LIVENESS_{name.upper()}_MS": str(v) for name, v in liveness_ms.items()}
    command = [
        sys.executable,
        "-m",
        "protomq_namesrv",
        f"--port={port}",
        f"--remoting-port={remoting_port}",
    ]
    process = ServerPopen(
        command,
        env={**os.environ, **LIVENESS, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            ready, *places = process.stdout.readline().split()
            assert ready == "ready"
            addresses = dict(place.split("=") for place in places)
            yield Namesrv(
                process, parse_address(addresses["grpc"]), parse_address(addresses["remoting"])
            )
        finally:
            process.kill()
