"""What a service manager is told: systemd's notification protocol (sd_notify), which is one datagram to a Unix socket.

A unit with Type=notify is started when the server is ready, not when its process is there.
"""

from __future__ import annotations

import logging
import os
import socket
from typing import Final

VARIABLE: Final = "NOTIFY_SOCKET"
READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"

logger = logging.getLogger(__name__)


def notify(state: str) -> None:
    """Sends it if somebody wants to know. Who is not there any more is logged: it stops no server."""
    path = os.environ.get(VARIABLE, "")
    if not path:
        return
    # A leading @ stands for the zero octet of an abstract socket.
    address = "\0" + path[1:] if path.startswith("@") else path
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.sendto(state.encode(), address)
    except OSError as error:
        logger.warning("%s=%s cannot be told %s: %s", VARIABLE, path, state, error)
