"""Addresses as people write them, and what a server advertises."""

from __future__ import annotations

import re
from typing import Any

import pytest

from protomq_runtime.addresses import (
    Address,
    ListenConfig,
    advertised_addresses,
    outgoing_host,
    parse_address,
    parse_address_list,
)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("localhost:9876", Address("localhost", 9876)),
        (" 10.0.0.1:1 ", Address("10.0.0.1", 1)),
        (
            "broker-0.broker.ns.svc.cluster.local:65535",
            Address("broker-0.broker.ns.svc.cluster.local", 65_535),
        ),
        ("[::1]:9876", Address("::1", 9876)),
        ("[fe80::1%eth0]:9876", Address("fe80::1%eth0", 9876)),
    ],
)
def test_address_is_parsed(text: str, address: Address) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":9876",
        "host",
        "host:",
        "host:0",
        "host:65536",
        "host:-1",
        "host:٣",
        "::1:9876",
        "[::1]",
        "[::1]9876",
        "[host]:1",
        "http://host:9876",
        "ho st:1",
        "a/b:1",
        "host:1:2",
        "[::1:9876",
    ],
)
def test_malformed_address_is_refused_and_quoted(text: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_address(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("text", ["host:1", "[::1]:1"])
def test_address_is_written_as_it_is_parsed(text: str) -> None:
    assert str(parse_address(text)) == text


def test_missing_port_is_the_default_one() -> None:
    assert parse_address("host", 9876) == Address("host", 9876)
    assert parse_address("[::1]", 9876) == Address("::1", 9876)


def test_list_is_separated_by_semicolons_commas_or_space_and_keeps_its_order_without_repetitions() -> (
    None
):
    assert parse_address_list("b:1;a:2, c ;b:1;", 3) == (
        Address("b", 1),
        Address("a", 2),
        Address("c", 3),
    )
    assert parse_address_list("  ") == ()


def test_bound_ports_are_advertised_by_default() -> None:
    addresses = advertised_addresses(ListenConfig(grpc_port=0, remoting_port=0), 5_001, 5_002)
    assert addresses == (Address("127.0.0.1", 5_001), Address("127.0.0.1", 5_002))


def test_configured_addresses_are_advertised_instead_of_those_listened_on() -> None:
    config = ListenConfig(
        host="0.0.0.0",
        advertised_host="mq.example",
        advertised_grpc_port=31_081,
        advertised_remoting_port=31_911,
    )
    addresses = advertised_addresses(config, 8_081, 10_911)
    assert addresses == (Address("mq.example", 31_081), Address("mq.example", 31_911))


def test_wildcard_is_never_advertised() -> None:
    addresses = advertised_addresses(
        ListenConfig(host="0.0.0.0"), 1, 2, peer=Address("127.0.0.1", 9_876)
    )
    assert addresses.grpc == Address("127.0.0.1", 1)
    with pytest.raises(ValueError, match="nobody can connect"):
        ListenConfig(advertised_host="0.0.0.0")


def test_outgoing_host_of_an_unreachable_peer_is_this_machine() -> None:
    assert outgoing_host(Address("256.0.0.1.invalid", 1)) == "127.0.0.1"


@pytest.mark.parametrize(
    "fields", [{"grpc_port": -1}, {"remoting_port": 65_536}, {"grpc_port": 7, "remoting_port": 7}]
)
def test_impossible_ports_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="listen"):
        ListenConfig(**fields)


@pytest.mark.parametrize("host", ["a b", "h:1", "[::1]", "http://h", "ä", "a/b", "::zz"])
def test_an_advertised_host_that_is_no_host_is_refused(host: str) -> None:
    said = f"listen.advertised_host is {host!r}; it must be a host name or an address, without a port"
    with pytest.raises(ValueError, match=re.escape(said)):
        ListenConfig(advertised_host=host)


@pytest.mark.parametrize("host", ["mq.example", "10.0.0.1", "::1", "fe80::1%eth0", "a_b-c"])
def test_hosts_that_clients_can_reach_may_be_advertised(host: str) -> None:
    assert ListenConfig(advertised_host=host).advertised_host == host
