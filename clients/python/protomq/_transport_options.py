"""The options of a transport, as its users give them."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Literal

from ._checks import check_count, check_flag, check_seconds, check_text
from ._types import PEER_TIMEOUT_S
from .errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """How to connect.

    `transport`: "auto" (remoting first, gRPC as fallback), "remoting" or "grpc" (that one only). `client_id`: shown to operators,
    host@pid where empty. `connections_idle_max`: blocking sockets kept per server and lane. `peer_timeout_s`: a server that does not
    answer for this time, not even probes, is gone, and its connection is closed. At least 3. Over gRPC at least 20, unless the server's
    own `connections.peer_timeout_ms` is lower: it refuses more frequent pings. A call that gets no answer ends with its own time-out,
    and closes a connection on which nothing came meanwhile. `spin`: a blocking call over the remoting port polls for its answer for up
    to 0.2 ms before it sleeps, if that helped lately. It costs processor time and spares a wake-up.
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
        check_text("client_id", self.client_id)
        check_flag("spin", self.spin)
        check_count("connections_idle_max", self.connections_idle_max, 0)
        if check_seconds("peer_timeout_s", self.peer_timeout_s) < 3:
            raise ConfigurationError(
                f"peer_timeout_s must be at least 3, it is {self.peer_timeout_s}"
            )

    def hello_client_id(self) -> str:
        """What the server's operator sees, at most 255 characters."""
        return (self.client_id or f"{socket.gethostname()}@{os.getpid()}")[:255]
