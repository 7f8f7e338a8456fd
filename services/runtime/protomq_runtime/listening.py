"""Sockets to listen on, and why there is none: said so that whoever started the server knows what to change.

A server that makes something at its start calls `check_can_listen` before: a start that is refused leaves nothing behind.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping

from .addresses import Address


class UnknownHostError(OSError):
    """Nobody can listen at a host of that name."""


def bound_socket(address: Address, what: str) -> socket.socket:
    """A socket at this address (port 0: a free one), on which `what` is to listen. Raises OSError that says what to do.

    SO_REUSEADDR, so that a restart need not wait; never SO_REUSEPORT, which would let two servers share a port.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, UnicodeError) as error:  # UnicodeError: no name of a host can be written so
        bound.close()
        kind = UnknownHostError if isinstance(error, UnicodeError | socket.gaierror) else OSError
        raise kind(f"cannot listen on {address} for {what}: {_remedy(error, address)}") from None
    return bound


def check_can_listen(addresses: Mapping[str, Address]) -> None:
    """Raises OSError unless each of these can be listened on now, all at the same time; keys say what for."""
    taken: dict[Address, str] = {}
    for what, address in addresses.items():
        if address.port and address in taken:  # the kernel minds only when somebody listens already
            raise OSError(f"cannot listen on {address} for {what}: that is the port of {taken[address]}; give another port")
        taken[address] = what
        bound_socket(address, what).close()


def _remedy(error: OSError | UnicodeError, address: Address) -> str:
    if isinstance(error, UnicodeError | socket.gaierror):
        return f"the host {address.host!r} is not known here; give an address of this machine, or 0.0.0.0 for all"
    if error.errno == errno.EADDRINUSE:
        return _is_taken(address)
    if error.errno == errno.EADDRNOTAVAIL:
        return "this machine has no such address; give one that it has, or 0.0.0.0 for all"
    if error.errno == errno.EACCES:
        return f"the port {address.port} is for privileged users; give one from 1024 on"
    return error.strerror or str(error)


def _is_taken(address: Address) -> str:
    return f"the port {address.port} is taken; stop who has it, or give another port"
