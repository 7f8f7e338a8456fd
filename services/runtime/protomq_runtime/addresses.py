"""Addresses: what a server listens on, what it tells others, and how lists of name servers are written.

The two differ in containers and behind NAT: a broker listens on 0.0.0.0:10911 and is reached as broker-0.example:31911. Only the
advertised one ever leaves the process.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

PORT_MAX: Final = 65_535
WILDCARD_HOSTS: Final = frozenset(("", "0.0.0.0", "::"))

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,253}")
_IPV6: Final = re.compile(r"[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9_.-]{1,32})?")
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*://")


class Address(NamedTuple):
    """A host (name, IPv4, or IPv6 without brackets) and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, default_port: int | None = None) -> Address:
    """`host:port`, `[ipv6]:port`, or without the port where there is a default. Raises ValueError saying what is wrong."""
    stripped = text.strip()
    if _SCHEME.match(stripped):
        raise ValueError(f"{text!r} is a URL, expected host:port")
    if stripped.startswith("["):
        host, bracket, rest = stripped[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"{text!r} is not [ipv6]:port")
        port_text = rest[1:] if rest else None
        if not (_IPV6.fullmatch(host) and ":" in host):
            raise ValueError(f"{text!r} has no IPv6 address between the brackets")
    else:
        if stripped.count(":") > 1:
            raise ValueError(
                f"{text!r} has more than one colon; an IPv6 address stands in brackets: [::1]:9876"
            )
        host, colon, after = stripped.partition(":")
        port_text = after if colon else None
        if not _NAME.fullmatch(host):
            raise ValueError(f"{text!r} has no host name before the port")
    if port_text is None:
        if default_port is None:
            raise ValueError(f"{text!r} has no port, expected host:port")
        return Address(host, default_port)
    if not (port_text.isascii() and port_text.isdigit() and 0 < int(port_text) <= PORT_MAX):
        raise ValueError(f"{text!r} has no port between 1 and {PORT_MAX} behind the colon")
    return Address(host, int(port_text))


def is_host(text: str) -> bool:
    """Whether it is a host name, or an address without brackets, as it stands in an `Address`."""
    return _NAME.fullmatch(text) is not None or (":" in text and _is_ipv6(text))


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def parse_listen_address(text: str) -> Address:
    """The same for a listener of one's own, where the port 0 stands for a free one. Raises ValueError."""
    host, colon, port = text.strip().rpartition(":")
    if colon and port == "0":
        return parse_address(f"{host}:1")._replace(port=0)
    return parse_address(text)


def parse_address_list(text: str, default_port: int | None = None) -> Sequence[Address]:
    """Addresses separated by `;` (RocketMQ's way), commas or white space; repetitions are dropped, the order is kept."""
    parts = (part for part in re.split(r"[;,\s]+", text) if part)
    return tuple(dict.fromkeys(parse_address(part, default_port) for part in parts))


@dataclass(frozen=True, slots=True)
class ListenConfig:
    """Where a server listens, and under which addresses others shall reach it. Nothing here changes at run time."""

    host: str = "127.0.0.1"
    """Interface to listen on; 0.0.0.0 or :: for all."""
    grpc_port: int = 8081
    """Port of gRPC; 0: a free one."""
    remoting_port: int = 10_911
    """Port of frames; 0: a free one."""
    advertised_host: str = ""
    """Name or address that clients use; empty: `host`, or this machine's outgoing address if that is a wildcard."""
    advertised_grpc_port: int = 0
    """Port that clients use; 0: the port listened on."""
    advertised_remoting_port: int = 0
    """Port that clients use; 0: the port listened on."""
    ports_file: Path | None = None
    """Written when the server is ready: a JSON object of the addresses and the process id, for programs that start it. Removed at
    the stop."""

    def __post_init__(self) -> None:
        for name in (
            "grpc_port",
            "remoting_port",
            "advertised_grpc_port",
            "advertised_remoting_port",
        ):
            port = getattr(self, name)
            if not 0 <= port <= PORT_MAX:
                raise ValueError(f"listen.{name} is {port}; it must be 0 to {PORT_MAX}")
        if self.grpc_port and self.grpc_port == self.remoting_port:
            raise ValueError(
                f"listen.grpc_port and listen.remoting_port are both {self.grpc_port}; they must differ"
            )
        if self.advertised_host in WILDCARD_HOSTS - {""}:
            raise ValueError(
                f"listen.advertised_host is {self.advertised_host}; nobody can connect to that"
            )
        if self.advertised_host and not is_host(self.advertised_host):
            raise ValueError(
                f"listen.advertised_host is {self.advertised_host!r}; it must be a host name or an address, without a port or brackets"
            )


class AdvertisedAddresses(NamedTuple):
    """What a server tells others."""

    grpc: Address
    remoting: Address


def advertised_addresses(
    config: ListenConfig,
    bound_grpc_port: int,
    bound_remoting_port: int,
    peer: Address | None = None,
) -> AdvertisedAddresses:
    """The addresses to advertise once the ports are known.

    `peer` shares a network with the clients, such as the first name server. A wildcard listener without a configured name
    advertises the interface that leads there.
    """
    host = config.advertised_host or config.host
    if host in WILDCARD_HOSTS:
        host = outgoing_host(peer)
    return AdvertisedAddresses(
        Address(host, config.advertised_grpc_port or bound_grpc_port),
        Address(host, config.advertised_remoting_port or bound_remoting_port),
    )


def outgoing_host(peer: Address | None = None) -> str:
    """This machine's address on the way to `peer` (or to anywhere), 127.0.0.1 if there is no way out. Sends no packet."""
    # TEST-NET-1 of RFC 5737: routed by default, reaches nobody.
    host, port = peer or Address("192.0.2.1", 9)
    try:
        candidates = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return "127.0.0.1"
    for family, kind, protocol, _, target in candidates:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"
