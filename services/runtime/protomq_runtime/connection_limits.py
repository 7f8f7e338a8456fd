"""What strangers may cost a server in connections, and when a peer that says nothing counts as gone."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Final

HELLO_TIMEOUT_S: Final = 5.0
"""Time within which a connection must say which protocol it speaks, at both ports."""
PROBES: Final = 3


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of connections. Nothing here changes at run time.

    Attributes:
        total_max: connections that each of the two ports takes, 1 to 1,000,000. Further ones are closed. At the remoting port up to 256 of
            them first wait half a second for a place, and all are told TOO_MANY.
        per_address_max: connections of one address at the remoting port; 0: no limit of its own. (gRPC's library has none.)
        grpc_streams_max: calls under way on one gRPC connection; a client keeps further ones back. 1 to 1,000,000. The library counts a
            call until the server has let go of it, a client until it has the answer. So one that stands at the limit may have its
            next call refused with UNAVAILABLE. Nothing was done then. (That count is the guard against calls opened and reset at speed.)
        peer_timeout_ms: a peer that answers nothing for this time, not even probes, is gone: its connection is closed, and what was held
            for it is released. 3,000 to 3,600,000.
    """

    total_max: int = 10_000
    per_address_max: int = 0
    grpc_streams_max: int = 10_000
    peer_timeout_ms: int = 60_000

    def __post_init__(self) -> None:
        for name, low, high in (
            ("total_max", 1, 1_000_000),
            ("per_address_max", 0, 1_000_000),
            ("grpc_streams_max", 1, 1_000_000),
            ("peer_timeout_ms", 3_000, 3_600_000),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"connections.{name} is {value}; it must be {low} to {high}")


def watch_peer(sock: socket.socket, peer_timeout_ms: int) -> None:
    """Has the kernel close the connection when its peer is gone: probes where nothing is under way, a limit for what is not confirmed.

    Without that limit, bytes that were sent to a machine that has vanished are repeated for a quarter of an hour, and not probed. It also
    ends a peer that is alive but takes nothing for that time while bytes wait for it. Lanes do the same with what waits in them.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, peer_timeout_ms // 2_000)
    sock.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(peer_timeout_ms // (2_000 * PROBES), 1)
    )
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, peer_timeout_ms)


def grpc_options(limits: ConnectionLimits) -> list[tuple[str, int]]:
    """The same for gRPC's library, as channel arguments of a server. Its keepalive sets TCP_USER_TIMEOUT too."""
    ping_interval_ms = limits.peer_timeout_ms // 2
    ping_timeout_ms = limits.peer_timeout_ms // 6
    return [
        ("grpc.max_allowed_incoming_connections", limits.total_max),
        ("grpc.max_concurrent_streams", limits.grpc_streams_max),
        ("grpc.server_handshake_timeout_ms", round(HELLO_TIMEOUT_S * 1000)),
        ("grpc.keepalive_time_ms", ping_interval_ms),
        ("grpc.keepalive_timeout_ms", ping_timeout_ms),
        # What counts where another ping is under way already, as mostly. Its default is 60 s.
        ("grpc.http2.ping_timeout_ms", ping_timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Clients behind NAT may ping every 10 s, even without calls.
        ("grpc.http2.min_ping_interval_without_data_ms", min(10_000, ping_timeout_ms)),
    ]
