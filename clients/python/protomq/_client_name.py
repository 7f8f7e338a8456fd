"""What a client is called where nobody has named it."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable

from . import _forks


def drawn_name() -> str:
    """Host, process and a random number: containers have the same processes, and a process has several clients."""
    return f"{socket.gethostname()}@{os.getpid()}@{secrets.token_hex(4)}"


def client_name(wished: str) -> Callable[[], str]:
    """Returns the name: what is wished, else one that is drawn, and another one in a forked child."""
    drawn, fork_count = "", -1

    def name() -> str:
        nonlocal drawn, fork_count
        if not wished and fork_count != _forks.fork_count:
            drawn, fork_count = drawn_name(), _forks.fork_count
        return wished or drawn

    return name
