"""How many connections a real broker takes, how long a silent one may stay, and a peer whose machine has vanished."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from protomq._async_transport import AsyncTransport
from protomq._methods import CREATE_TOPIC, GET_BROKER_STATUS, PING, PULL
from protomq._transport import SyncTransport
from protomq._transport_options import TransportOptions
from protomq._types import BrokerAddress
from protomq.errors import ConnectFailedError, ProtomqError, TransportError
from protomq.testing import Broker
from protomq.v1.admin_service_pb2 import CreateTopicRequest, GetBrokerStatusResponse
from protomq.v1.pull_service_pb2 import PullRequest
from protomq.v1.topic_pb2 import Topic
from protomq_runtime.connection_limits import HELLO_TIMEOUT_S, ConnectionLimits
from tests.integration.test_sdk_consumer_and_broker import TRANSPORTS, Transport
from tests.support.vanishing_network import VanishingNetwork, why_no_network
from tests.support.waiting import PATIENCE_S, fastest_s, wait_for

TOPIC = "limits"
GRPC_MAX = 5
PEER_TIMEOUT_S = 4.0
RELEASED_S = 3 * PEER_TIMEOUT_S
"""What ends with the peer's time-out ends by then: far below the default of 60 s, and the 20 s below which gRPC forbids pings."""
DEADLINE_S = 0.7
ENDED_S = 2.5
"""A call with that deadline has ended by then, its caller's turn on a busy machine included."""
FAR_PEER_TIMEOUT_S = 60.0
"""Where something else is to end what waits."""


def address_of(broker: Broker) -> BrokerAddress:
    return BrokerAddress("b", broker.grpc_address, broker.remoting_address)


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def broker_with(folder: Path, **settings: object) -> Broker:
    environment = {f"PROTOMQ_{name.upper()}": str(value) for name, value in settings.items()}
    return Broker(data_dir=folder, environment=environment)


# How many.


def ping(channel: grpc.Channel, timeout_s: float = PATIENCE_S) -> bytes:
    method: Any = channel.unary_unary(PING.path)
    return bytes(method(b"", timeout=timeout_s))


def own_channel(address: str) -> grpc.Channel:
    return grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


def test_the_grpc_port_takes_so_many_connections_and_no_more(tmp_path: Path) -> None:
    with broker_with(tmp_path, connections_total_max=GRPC_MAX) as broker, ExitStack() as open_ones:
        address = broker.grpc_address
        channels = [open_ones.enter_context(own_channel(address)) for _ in range(GRPC_MAX)]
        for channel in channels:
            assert ping(channel) == b""
        with own_channel(address) as further:
            with pytest.raises(grpc.RpcError) as caught:
                ping(further, 2.0)
            assert caught.value.code() in (
                grpc.StatusCode.UNAVAILABLE,
                grpc.StatusCode.DEADLINE_EXCEEDED,
            )
            assert [ping(channel) for channel in channels] == [b""] * GRPC_MAX
            channels[0].close()
            wait_for(lambda: answers(further))


def test_a_grpc_connection_has_so_many_calls_under_way_and_no_more(tmp_path: Path) -> None:
    """A call that ends gives its place back; gRPC may refuse the next one for a moment (see `grpc_streams_max`)."""
    with broker_with(tmp_path, connections_grpc_streams_max=4) as broker:
        request = CreateTopicRequest(topic=Topic(name=TOPIC, write_queues=1, read_queues=1))
        pull = PullRequest(topic=TOPIC, hold_ms=60_000).SerializeToString()
        with SyncTransport() as caller, own_channel(broker.grpc_address) as channel:
            caller.call(address_of(broker), CREATE_TOPIC, [request.SerializeToString()], PATIENCE_S)
            method: Any = channel.unary_unary(PULL.path)
            calls = [method.future(pull, timeout=120) for _ in range(4)]
            wait_for(lambda: held_pulls(caller, address_of(broker)) == 4)
            with pytest.raises(grpc.RpcError) as caught:
                ping(channel, 1.0)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED, caught.value
            assert [call for call in calls if call.done()] == []
            calls[0].cancel()
            wait_for(lambda: answers(channel))
            wait_for(lambda: held_pulls(caller, address_of(broker)) == 3)


def held_pulls(caller: SyncTransport, address: BrokerAddress) -> int:
    answer = caller.call(address, GET_BROKER_STATUS, [b""], PATIENCE_S)
    return sum(lane.holds for lane in GetBrokerStatusResponse.FromString(answer).lanes)


def answers(channel: grpc.Channel) -> bool:
    try:
        return ping(channel, 1.0) == b""
    except grpc.RpcError:
        return False


def is_closed(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        while sock.recv(4096):  # gRPC greets with its settings
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def test_connections_that_say_nothing_give_their_place_back(tmp_path: Path) -> None:
    with broker_with(tmp_path, connections_total_max=GRPC_MAX) as broker, ExitStack() as open_ones:
        began = time.monotonic()
        silent = [
            open_ones.enter_context(socket.create_connection(host_and_port(address)))
            for address in (broker.grpc_address, broker.remoting_address)
            for _ in range(GRPC_MAX)
        ]
        wait_for(lambda: all(map(is_closed, silent)))
        # gRPC alone gives them two minutes.
        assert time.monotonic() - began < 4 * HELLO_TIMEOUT_S
        with own_channel(broker.grpc_address) as channel:
            wait_for(lambda: answers(channel))


def test_a_connection_costs_no_more_than_is_said(tmp_path: Path) -> None:
    """docs/reliability.md says how much memory one takes."""
    with broker_with(tmp_path) as broker, ExitStack() as open_ones:
        first = open_ones.enter_context(own_channel(broker.grpc_address))
        ping(first)
        before = resident_bytes(broker)
        for _ in range(100):
            ping(open_ones.enter_context(own_channel(broker.grpc_address)))
        assert resident_bytes(broker) - before < 100 * (200 << 10)


def resident_bytes(broker: Broker) -> int:
    pages = Path(f"/proc/{broker.process_id}/statm").read_text().split()[1]
    return int(pages) * 4096


@pytest.mark.parametrize("field", ["total_max", "grpc_streams_max", "peer_timeout_ms"])
def test_limits_that_make_no_sense_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"connections.{field}"):
        ConnectionLimits(**{field: 0})


# A machine that vanishes.


@pytest.fixture
def network() -> Iterator[VanishingNetwork]:
    reason = why_no_network()
    if reason:
        pytest.skip(reason)
    with VanishingNetwork() as made:
        yield made


@pytest.fixture
def far_broker(network: VanishingNetwork, tmp_path: Path) -> Iterator[Broker]:
    """A broker on the other side."""
    broker = broker_with(
        tmp_path,
        listen_host=network.inside,
        connections_peer_timeout_ms=round(PEER_TIMEOUT_S * 1000),
        namesrv="",
    )
    network.run_inside(broker.start)
    try:
        request = CreateTopicRequest(topic=Topic(name=TOPIC, write_queues=1, read_queues=1))
        with SyncTransport() as caller:
            caller.call(address_of(broker), CREATE_TOPIC, [request.SerializeToString()], PATIENCE_S)
        yield broker
    finally:
        network.heal()
        broker.stop()


def options_for(
    transport: Transport, peer_timeout_s: float = PEER_TIMEOUT_S
) -> TransportOptions:
    return TransportOptions(transport, peer_timeout_s=peer_timeout_s, connect_timeout_s=1.0)


def holds_of(broker: Broker, network: VanishingNetwork) -> int:
    """Pulls held, asked from inside, where the network is whole."""

    def ask() -> int:
        with SyncTransport() as caller:
            return held_pulls(caller, address_of(broker))

    return network.run_inside(ask)


@TRANSPORTS
def test_holds_of_callers_that_vanish_are_released_within_the_bound(
    network: VanishingNetwork, far_broker: Broker, transport: Transport
) -> None:
    """At the broker and at the callers, who wait no longer either."""
    took_s = fastest_s(lambda: release_s(network, far_broker, transport), RELEASED_S, tries=3)
    assert took_s < RELEASED_S


def release_s(network: VanishingNetwork, far_broker: Broker, transport: Transport) -> float:
    """Time from the moment when four callers vanish until both sides have given up."""
    pull = PullRequest(topic=TOPIC, queue_id=0, hold_ms=60_000).SerializeToString()
    port = host_and_port(
        far_broker.grpc_address if transport == "grpc" else far_broker.remoting_address
    )[1]
    ended: list[tuple[float, BaseException]] = []

    def hold(caller: SyncTransport) -> None:
        try:
            caller.call(address_of(far_broker), PULL, [pull], 90.0)
        except ProtomqError as error:
            ended.append((time.monotonic(), error))

    network.heal()
    with ExitStack() as stack:
        callers = [stack.enter_context(SyncTransport(options_for(transport))) for _ in range(4)]
        threads = [threading.Thread(target=hold, args=(caller,), daemon=True) for caller in callers]
        for thread in threads:
            thread.start()
        wait_for(lambda: holds_of(far_broker, network) == 4)
        assert network.connections_inside(port) >= 4
        vanished_at = time.monotonic()
        network.vanish()
        # The broker's side.
        wait_for(lambda: holds_of(far_broker, network) == 0)
        wait_for(lambda: network.connections_inside(port) == 0)
        released_at = time.monotonic()
        # The callers' side: nobody waits for the time of the call.
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
    assert len(ended) == 4
    assert all(isinstance(error, TransportError) for _, error in ended)
    return max(released_at, *(at for at, _ in ended)) - vanished_at


@TRANSPORTS
def test_calls_end_with_their_deadline_and_go_on_when_the_network_is_back(
    network: VanishingNetwork, far_broker: Broker, transport: Transport
) -> None:
    address = address_of(far_broker)
    with SyncTransport(options_for(transport, FAR_PEER_TIMEOUT_S)) as caller:

        def call_s() -> float:
            began = time.monotonic()
            with pytest.raises(TransportError):
                caller.call(address, PING, [b""], DEADLINE_S)
            return time.monotonic() - began

        assert caller.call(address, PING, [b""], PATIENCE_S) == b""
        network.vanish()
        for _ in range(3):  # The first, on a connection that was good; those after it.
            assert fastest_s(call_s, ENDED_S) < ENDED_S
        network.heal()
        wait_for(lambda: is_answered(caller, address))


def is_answered(caller: SyncTransport, address: BrokerAddress) -> bool:
    try:
        return caller.call(address, PING, [b""], 1.0) == b""
    except TransportError:
        return False


@TRANSPORTS
def test_asyncio_calls_end_with_their_deadline_and_go_on_too(
    network: VanishingNetwork, far_broker: Broker, transport: Transport
) -> None:
    address = address_of(far_broker)

    async def run() -> None:
        async with AsyncTransport(options_for(transport, FAR_PEER_TIMEOUT_S)) as caller:
            assert await caller.call(address, PING, [b""], PATIENCE_S) == b""
            network.vanish()
            took_s: list[float] = []
            while len(took_s) < 5 and min(took_s, default=ENDED_S) >= ENDED_S:
                began = time.monotonic()
                calls = [caller.call(address, PING, [b""], DEADLINE_S) for _ in range(50)]
                results = await asyncio.gather(*calls, return_exceptions=True)
                took_s.append(time.monotonic() - began)
                assert all(isinstance(result, TransportError) for result in results)
            assert min(took_s) < ENDED_S, took_s
            network.heal()
            ends = time.monotonic() + PATIENCE_S
            while True:
                try:
                    assert await caller.call(address, PING, [b""], 1.0) == b""
                    return
                except TransportError:
                    assert time.monotonic() < ends

    asyncio.run(run())


def test_what_was_sent_to_a_peer_that_vanished_is_given_up(
    network: VanishingNetwork, far_broker: Broker
) -> None:
    """Answers on their way: the kernel repeats them, and does not probe meanwhile; without TCP_USER_TIMEOUT that takes 15 minutes."""
    took_s = fastest_s(lambda: give_up_s(network, far_broker), RELEASED_S, tries=3)
    assert 1 < took_s < RELEASED_S


def give_up_s(network: VanishingNetwork, far_broker: Broker) -> float:
    """Time from an answer to a peer that has vanished until its connection is closed."""
    network.heal()
    address = address_of(far_broker)
    port = host_and_port(far_broker.remoting_address)[1]
    with SyncTransport(options_for("remoting")) as caller:
        pull = PullRequest(topic=TOPIC, queue_id=0, hold_ms=1_500).SerializeToString()
        failed: list[ProtomqError] = []

        def hold() -> None:
            try:
                caller.call(address, PULL, [pull], 30.0)
            except ProtomqError as error:
                failed.append(error)

        thread = threading.Thread(target=hold)
        thread.start()
        wait_for(lambda: holds_of(far_broker, network) == 1)
        network.vanish()
        wait_for(lambda: holds_of(far_broker, network) == 0)  # answered, into the void
        assert network.connections_inside(port) >= 1
        answered_at = time.monotonic()
        wait_for(lambda: network.connections_inside(port) == 0)
        took_s = time.monotonic() - answered_at
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert failed
        assert not isinstance(failed[0], ConnectFailedError)
        return took_s
