"""Imports that wait until they are needed, and forks.

If another thread imports a module during a fork, the child inherits that module's lock. Then an import of the module in the child waits
for ever. So the SDK imports what every client needs when the first client is made, not with the first request. A fork waits for what is
imported even later: those imports stand under `fork_waits`.
"""

from __future__ import annotations

import importlib
import os
import threading
from typing import Final

from .wire import codecs

fork_waits: Final = threading.RLock()
"""To be held during a late import: no fork happens meanwhile. Reentrant: what is imported may import late, or fork."""

_NEEDED: Final = (
    "encodings.idna",  # By getaddrinfo.
    "google.protobuf.message",
    "protomq._compression",
    "protomq._pull_answer",
    "protomq.wire.status",
    "protomq.v1.consumer_service_pb2",
    "protomq.v1.pull_service_pb2",
    "protomq.v1.route_service_pb2",
    "protomq.v1.send_service_pb2",
)
"""What sends, pulls and their errors need; not grpc and numpy, which take long and most processes never need."""


def load_needed_modules(*more: str) -> None:
    """Imports what requests need, and the modules named; called by the constructor of every transport. 30 ms the first time."""
    with fork_waits:
        for name in (*_NEEDED, *more):
            importlib.import_module(name)
        # Others of these are not installed everywhere.
        codecs.zstd_module()
        codecs.lz4_module()


if hasattr(os, "register_at_fork"):  # Not on Windows.
    os.register_at_fork(
        before=fork_waits.acquire,
        after_in_parent=fork_waits.release,
        after_in_child=fork_waits.release,
    )
