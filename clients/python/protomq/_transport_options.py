"""The options of a transport, as its users give them."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from ._checks import check_count, check_flag, check_name, check_seconds
from ._types import PEER_TIMEOUT_S, MethodInfo
from .errors import ConfigurationError, ConnectionLostError, ProtomqError, ServerError


class Watch(NamedTuple):
    """A call that had no answer for `silent_s` is in doubt: see `SyncTransport.is_replaced`. Then it is again after each `look_s`."""

    silent_s: float
    look_s: float


SOON: Final = Watch(1.0, 0.5)
HELD: Final = Watch(2.5, 2.0)
"""Of a call that a broker holds as long as it has nothing. So each client that waits asks a name server every 2 s, not more often."""
class LongHold(NamedTuple):
    """A call that the server may hold for as long as it is there, over the remoting port only.

    It may take `timeout_s`. When nothing was read for `silent_s`, the server is asked by an echo, and the call fails `ECHO_S` later.
    """

    timeout_s: float
    silent_s: float


ECHO_S: Final = 5.0
"""How long the answer to an echo may take: a slow network, a busy server."""
NEWS_S: Final = 0.5
"""From the look at a route that a doubt begins to the one at what it found."""
WATCHED_CONNECT_S: Final = 1.5
"""How long a watched call tries to connect at most. One lost SYN is sent again after 1 s."""


def given_up(address: str, method: MethodInfo) -> ConnectionLostError:
    """The error of a call whose server was silent until another one had its name."""
    error = ConnectionLostError(f"{address}: no answer to {method.path}, and another broker leads under its name")
    error.__cause__ = TimeoutError("silent")
    return error


def was_silent(error: ProtomqError) -> bool:
    """Whether nothing answered at all: a server that stopped, or a machine that is cut off. A port that refuses is something else."""
    return isinstance(error.__cause__ or error.__context__, TimeoutError | BlockingIOError)


def was_refused(error: ProtomqError) -> bool:
    """Whether nobody listens at the port."""
    return isinstance(error.__cause__ or error.__context__, ConnectionRefusedError)


def was_answered(error: ProtomqError) -> bool:
    """Whether a server has said why it takes no further connection."""
    return isinstance(error.__cause__, ServerError)


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """How to connect.

    `transport`: "auto" (remoting first, gRPC as fallback), "remoting" or "grpc" (that one only). `client_id`: shown to operators, host@pid
    where empty. It has 255 octets at most, and no control characters. `connections_idle_max`: blocking sockets kept per server and lane.
    `peer_timeout_s`: a server that does not answer for this time, not even probes, is gone, and its connection is closed. At least 3. Over
    gRPC at least 20, unless the server's own `connections.peer_timeout_ms` is lower: it refuses more frequent pings. A call that gets no
    answer ends with its own time-out, and closes a connection on which nothing came meanwhile. `spin`: a blocking call over the remoting
    port polls for its answer for up to 0.2 ms before it sleeps, if that helped lately. It costs processor time and spares a wake-up.
    """

    transport: Literal["auto", "remoting", "grpc"] = "auto"
    connect_timeout_s: float = 3.0
    client_id: str = ""
    connections_idle_max: int = 256
    peer_timeout_s: float = PEER_TIMEOUT_S
    spin: bool = True

    def __post_init__(self) -> None:
        if self.transport not in ("auto", "remoting", "grpc"):
            raise ConfigurationError(
                f'transport is "auto", "remoting" or "grpc", not {self.transport!r}'
            )
        check_seconds("connect_timeout_s", self.connect_timeout_s)
        check_name("client_id", self.client_id)
        check_flag("spin", self.spin)
        check_count("connections_idle_max", self.connections_idle_max, 0)
        if check_seconds("peer_timeout_s", self.peer_timeout_s) < 3:
            raise ConfigurationError(
                f"peer_timeout_s must be at least 3, it is {self.peer_timeout_s}"
            )

    def hello_client_id(self) -> str:
        """What the server's operator sees, 255 octets at most."""
        return (self.client_id or f"{socket.gethostname()}@{os.getpid()}")[:255]
