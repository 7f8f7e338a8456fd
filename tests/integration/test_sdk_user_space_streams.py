"""The suite of the SDK's transports once more, over connections whose bytes pass through user space, as they will with TLS."""

from __future__ import annotations

import socket
import time

import pytest

from protomq import MessageQueue, PullConsumer
from protomq import _remoting_sync as remoting_sync
from protomq._byte_streams import BlockingStream
from protomq._pull_logic import Ticket
from protomq._pull_multiplexer import PullMultiplexer
from protomq._remoting_hello import split_address
from protomq._remoting_sync import PipelinedConnection
from protomq._transport import SyncTransport
from protomq._types import BrokerAddress
from protomq.errors import ConnectFailedError, RequestTimeoutError
from protomq.wire.frames import FLAG_ANSWER, HEADER
from tests.integration.test_sdk_transport import *  # noqa: F403
from tests.support.fake_server import FakeServer
from tests.support.user_space_stream import UserSpaceBlockingStream
from tests.support.waiting import PATIENCE_S


@pytest.fixture(autouse=True)
def in_user_space(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_stream(address: str, timeout_s: float, peer_timeout_s: float) -> BlockingStream:
        try:
            return UserSpaceBlockingStream(
                socket.create_connection(split_address(address), timeout_s)
            )
        except OSError as error:
            raise ConnectFailedError(f"{address}: {error}") from error

    monkeypatch.setattr(remoting_sync, "open_stream", open_stream)


def test_a_consumer_gets_everything_in_order() -> None:
    with FakeServer({"t": 4}) as server:
        for queue_id in range(4):
            server.append("t", queue_id, [b"%d-%d" % (queue_id, number) for number in range(500)])
        with PullConsumer("g", namesrv=server.address) as consumer:
            consumer.subscribe("t")
            got: dict[int, list[bytes]] = {queue_id: [] for queue_id in range(4)}
            ends_s = time.monotonic() + PATIENCE_S
            while sum(map(len, got.values())) < 2_000 and time.monotonic() < ends_s:
                for message in consumer.poll(0.5):
                    got[message.queue_id].append(message.body)
    for queue_id, bodies in got.items():
        assert bodies == [b"%d-%d" % (queue_id, number) for number in range(500)]


def test_an_answer_that_no_selector_tells_of_is_not_waited_for() -> None:
    """Both answers come in one record; the first `wait` has room for one of them."""
    ours, theirs = socket.socketpair()
    connection = PipelinedConnection(UserSpaceBlockingStream(ours), "peer")
    address = BrokerAddress("b", "", "peer")
    with theirs, SyncTransport() as transport:
        multiplexer = PullMultiplexer(transport)
        transport.open_pipelined = lambda *_: connection  # type: ignore[method-assign]
        tickets = [Ticket(MessageQueue("t", "b", queue_id), 0, 0) for queue_id in (0, 1)]
        for ticket in tickets:
            multiplexer.send(address, ticket, b"", PATIENCE_S)
        ended: list[Ticket] = []
        header = HEADER.size - 4
        theirs.settimeout(PATIENCE_S)
        while not multiplexer._connections:
            assert multiplexer.wait(PATIENCE_S, 1) == []
        theirs.sendall(
            b"".join(
                HEADER.pack(header + 1, number, 1, FLAG_ANSWER, 0, 0) + b"x" for number in (1, 2)
            )
        )
        for _ in tickets:
            # One without anything to read would have none.
            (outcome,) = multiplexer.wait(PATIENCE_S, 1)
            assert outcome.result == b"x"
            ended.append(outcome.ticket)
        assert ended == tickets
        multiplexer.close()


def test_a_server_that_hangs_is_given_up_while_another_one_answers() -> None:
    addresses = [BrokerAddress("hangs", "", "hangs"), BrokerAddress("answers", "", "answers")]
    pairs = {address: socket.socketpair() for address in addresses}
    connections = {
        address: PipelinedConnection(UserSpaceBlockingStream(ours), address.broker_name)
        for address, (ours, _) in pairs.items()
    }
    hanging, answering = addresses
    with SyncTransport() as transport, pairs[hanging][1], pairs[answering][1] as theirs:
        multiplexer = PullMultiplexer(transport)
        transport.open_pipelined = lambda address, *_: connections[address]  # type: ignore[method-assign]
        for address, timeout_s in ((hanging, 0.2), (answering, PATIENCE_S)):
            multiplexer.send(address, Ticket(MessageQueue("t", address.broker_name, 0), 0, 0), b"", timeout_s)
        while len(multiplexer._connections) < 2:
            assert multiplexer.wait(PATIENCE_S, 1) == []
        lost: list[Ticket] = []
        for number in range(2, 10_000):
            theirs.sendall(HEADER.pack(HEADER.size - 4 + 1, number, 1, FLAG_ANSWER, 0, 0) + b"x")
            multiplexer.send(answering, Ticket(MessageQueue("t", "answers", 0), 0, 0), b"", PATIENCE_S)
            for outcome in multiplexer.wait(PATIENCE_S, 1 << 20):
                if isinstance(outcome.result, RequestTimeoutError):
                    lost.append(outcome.ticket)
            if lost:
                break
            time.sleep(0.001)
        assert [ticket.queue.broker_name for ticket in lost] == ["hangs"]
        assert answering in multiplexer._connections
        multiplexer.close()
