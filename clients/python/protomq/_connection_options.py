"""How a client reaches its cluster: one object for all clients, or its parts one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ._client_name import drawn_name
from ._transport_options import TransportOptions
from ._types import PEER_TIMEOUT_S
from .errors import ConfigurationError, WrongTypeError


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions(TransportOptions):
    """How to reach a cluster; every client takes it as `connection`, so that an application says it once.

        cluster = ConnectionOptions(namesrv="10.0.0.1:9876;10.0.0.2:9876", client_id="billing")
        producer, consumer = Producer(connection=cluster), PullConsumer("g", connection=cluster)

    `namesrv`: host:port[;host:port], a sequence of addresses, or a URL that lists them; None: PROTOMQ_NAMESRV_ADDR, else 127.0.0.1:9876 and
    127.0.0.1:10911 (a name server, a standalone). `transport`: "auto" (remoting first, gRPC as fallback), "remoting" or "grpc" (that one
    only). `connect_timeout_s`: to connect, 3 s. `client_id`: shown to operators, host@pid where empty; 255 octets at most, without control
    characters. `connections_idle_max`: blocking sockets kept per server and lane. `peer_timeout_s`: a server that does not answer for this
    time, not even probes, is gone. At least 3; over gRPC at least 20, unless the servers' own `connections.peer_timeout_ms` is lower.
    `spin`: a blocking call looks for its answer for up to 0.2 ms before it sleeps, where that was of use lately; coroutines never spin.
    """

    namesrv: str | Sequence[str] | None = None


def connection_of(
    connection: ConnectionOptions | None,
    *,
    namesrv: str | Sequence[str] | None = None,
    transport: Literal["auto", "remoting", "grpc"] = "auto",
    client_id: str = "",
    peer_timeout_s: float = PEER_TIMEOUT_S,
    spin: bool = True,
    group: str = "",
) -> ConnectionOptions:
    """The options of a client: the object that it was given, or its parts. Raises ConfigurationError for both at once.

    `group`: names the client to operators where nothing else does.
    """
    apart = {
        "namesrv": namesrv, "transport": transport, "client_id": client_id, "peer_timeout_s": peer_timeout_s, "spin": spin,
    }  # fmt: skip
    if connection is None:
        connection = ConnectionOptions(**apart)  # type: ignore[arg-type]
    elif not isinstance(connection, ConnectionOptions):
        raise WrongTypeError(f"connection is a ConnectionOptions, not {connection!r}")
    else:
        defaults = ConnectionOptions()
        beside = [name for name, value in apart.items() if value != getattr(defaults, name)]
        if beside:
            raise ConfigurationError(
                f"{', '.join(beside)} beside connection would be lost: give them to the ConnectionOptions"
            )
    if group and not connection.client_id:
        client_id = f"{group}@{drawn_name()}"[:255]
        connection = dataclasses.replace(connection, client_id=client_id)
    return connection
