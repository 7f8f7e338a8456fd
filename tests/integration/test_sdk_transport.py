"""Both flavours of the transport against a server on a real socket: answers, errors, time-outs, fall-back, forks."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import grpc
import pytest

from protomq import Producer, _grpc_transport, _methods, _remoting_sync
from protomq._async_transport import AsyncTransport
from protomq._remoting_async import AsyncConnection
from protomq._transport import Choice, SyncTransport
from protomq._transport_options import TransportOptions
from protomq._types import BrokerAddress, MethodInfo
from protomq.errors import (
    ClosedError,
    ConfigurationError,
    ConnectFailedError,
    ConnectionLostError,
    ForeignProtocolError,
    ProtocolError,
    RequestTimeoutError,
    ServerError,
    SystemBusyError,
    TopicNotFoundError,
    UnknownMethodError,
)
from protomq.hooks import CallContext, Hook
from protomq.v1 import pull_service_pb2, route_service_pb2, send_service_pb2
from protomq.v1.reply_service_pb2 import WaitForRepliesRequest
from protomq.wire.frames import HEADER, encode_answer
from protomq.wire.status import RpcStatus, encode_status
from tests.support.fake_server import FakeGrpcFront, FakeServer
from tests.support.waiting import PATIENCE_S, async_wait_for, wait_for

BUSY = RpcStatus(8, "busy", "SYSTEM_BUSY", {"lane": "send"}, 123)
PING = b""


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer({"t": 1}) as made:
        yield made


@pytest.fixture
def transport() -> Iterator[SyncTransport]:
    with SyncTransport() as made:
        yield made


def remoting(server: FakeServer) -> BrokerAddress:
    return BrokerAddress("broker-a", "", server.address)


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def pull_request(hold_ms: int = 0, **fields: Any) -> bytes:
    return pull_service_pb2.PullRequest(topic="t", hold_ms=hold_ms, **fields).SerializeToString()


class Raw:
    """A listener that answers whatever a connection sends with fixed bytes, after a welcome if it is told so.

    Then it waits for the connection's end, unless it is told not to.
    """

    def __init__(self, answer: bytes, *, welcome: bool = False, waits: bool = True) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._answer, self._welcome, self._waits = answer, welcome, waits
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with sock:
                sock.recv(4096)
                if self._welcome:
                    sock.sendall(encode_answer(0, 0, 0))
                    sock.recv(4096)
                if self._answer:
                    sock.sendall(self._answer)
                    if self._waits:
                        sock.recv(4096)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)


# -- sync ----------------------------------------------------------------------------------------------------------------


def test_a_call_is_answered_and_the_socket_used_again(
    server: FakeServer, transport: SyncTransport
) -> None:
    for _ in range(5):
        assert transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S) == b""
    assert server.connections_accepted == 1
    assert transport.kind(remoting(server)) == "remoting"
    assert server.hello.lane == _methods.LANE_ADMIN
    assert server.hello.client_id.endswith(f"@{os.getpid()}")


def test_sockets_of_addresses_that_a_broker_had_before_are_closed(
    server: FakeServer, transport: SyncTransport
) -> None:
    open_before: set[str] = set()
    for round_number in range(5):
        with FakeServer({"t": 1}) as moved:
            for address in (server, moved):
                transport.call(remoting(address), _methods.PING, (PING,), PATIENCE_S)
        if round_number == 0:
            open_before = set(os.listdir("/proc/self/fd"))
    # Those of the last address are closed with the next one; those of servers that live are used again.
    assert len(os.listdir("/proc/self/fd")) <= len(open_before)
    assert server.connections_accepted == 1


def test_each_lane_has_its_own_connection(server: FakeServer, transport: SyncTransport) -> None:
    transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)
    transport.call(remoting(server), _methods.PULL, (pull_request(),), PATIENCE_S)
    assert server.connections_accepted == 2


def test_the_pieces_of_a_payload_arrive_as_one(
    server: FakeServer, transport: SyncTransport
) -> None:
    request = pull_service_pb2.PullRequest(
        topic="t", tags=[f"tag-{i}" for i in range(2000)]
    ).SerializeToString()
    pieces = [request[i : i + 7] for i in range(0, len(request), 7)]  # More than one sendmsg takes.
    transport.call(remoting(server), _methods.PULL, pieces, PATIENCE_S)
    assert server.calls[-1] == (_methods.PULL.method_id, request)


def test_a_large_request_and_a_large_answer(server: FakeServer, transport: SyncTransport) -> None:
    server.append("t", 0, [bytes(1 << 20)] * 8)
    answer = transport.call(
        remoting(server),
        _methods.PULL,
        (pull_request(record_count_max=8, size_max_bytes=16 << 20),),
        PATIENCE_S,
    )
    assert len(pull_service_pb2.PullResponse.FromString(answer).records) == 8
    big = send_service_pb2.SendRequest(topic="t" * (12 << 20)).SerializeToString()
    transport.call(remoting(server), _methods.SEND, (big,), PATIENCE_S)
    assert server.calls[-1][1] == big


def test_the_deadline_goes_on_the_wire(server: FakeServer, transport: SyncTransport) -> None:
    transport.call(remoting(server), _methods.PING, (PING,), 1000.5)
    assert 900_000 <= server.timeouts_ms[-1] <= 1_000_500


def test_an_error_of_the_server_is_its_exception_and_the_socket_stays(
    server: FakeServer, transport: SyncTransport
) -> None:
    server.fail(_methods.PING, BUSY)
    with pytest.raises(SystemBusyError) as caught:
        transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)
    assert (caught.value.retry_delay_ms, dict(caught.value.metadata)) == (123, {"lane": "send"})
    transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)
    assert server.connections_accepted == 1


def test_after_a_time_out_the_socket_is_not_used_again(
    server: FakeServer, transport: SyncTransport
) -> None:
    transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)
    server.stall(_methods.PING)
    started_s = time.monotonic()
    with pytest.raises(RequestTimeoutError) as caught:
        transport.call(remoting(server), _methods.PING, (PING,), 0.1)
    assert time.monotonic() - started_s >= 0.09
    assert not caught.value.definite
    transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)
    assert server.connections_accepted == 2


def test_a_lost_connection_is_not_definite_and_the_next_call_works(
    server: FakeServer, transport: SyncTransport
) -> None:
    server.drop(_methods.CREATE_TOPIC)
    with pytest.raises(ConnectionLostError) as caught:
        transport.call(remoting(server), _methods.CREATE_TOPIC, (PING,), PATIENCE_S)
    assert not caught.value.definite
    transport.call(remoting(server), _methods.CREATE_TOPIC, (PING,), PATIENCE_S)


def test_a_restarted_server_costs_an_idle_socket_no_call(
    server: FakeServer, transport: SyncTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protomq._remoting_sync._IDLE_TRUSTED_S", 0.0)
    transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)
    server.stop()
    server.start()
    transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)
    assert server.called(_methods.PING) == 2
    assert server.connections_accepted == 2


@pytest.mark.parametrize("method", [_methods.ACK, _methods.CHANGE_INVISIBLE, _methods.RECALL_MESSAGE], ids=lambda method: method.path)
def test_what_a_second_try_cannot_tell_is_not_sent_to_a_server_that_has_closed(
    server: FakeServer, transport: SyncTransport, method: MethodInfo
) -> None:
    for _ in range(3):
        with pytest.raises(UnknownMethodError):  # It answers. The connection was used a moment ago.
            transport.call(remoting(server), method, (b"",), PATIENCE_S)
        server.stop()
        server.start()


def test_a_server_that_was_restarted_a_moment_ago_costs_no_read(server: FakeServer, transport: SyncTransport) -> None:
    for method in (_methods.PING, _methods.GET_BROKER_STATUS):
        with suppress(ServerError):
            transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)
        server.stop()
        server.start()
        before = server.called(method)
        with suppress(ServerError):  # The connection is trusted: it was used within the last second.
            transport.call(remoting(server), method, (PING,), PATIENCE_S)
        assert server.called(method) == before + 1
    server.drop(_methods.PING)
    server.drop(_methods.PING)
    with pytest.raises(ConnectionLostError):  # Once, and not for ever.
        transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)
    transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)


def test_a_server_that_is_gone_for_good_is_not_said_to_have_got_nothing(server: FakeServer, transport: SyncTransport) -> None:
    transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)
    server.stop()
    with pytest.raises(ConnectionLostError) as caught:
        transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)
    assert not caught.value.definite
    with pytest.raises(ConnectFailedError):
        transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)


def test_a_call_that_may_not_be_carried_out_twice_is_made_once(server: FakeServer, transport: SyncTransport) -> None:
    transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)
    server.drop(_methods.CREATE_TOPIC)
    before = server.called(_methods.CREATE_TOPIC)
    with pytest.raises(ConnectionLostError):
        transport.call(remoting(server), _methods.CREATE_TOPIC, (PING,), PATIENCE_S)
    assert server.called(_methods.CREATE_TOPIC) == before + 1


@pytest.mark.parametrize("is_lost", [False, True])
async def test_an_error_of_the_second_connection_leaves_open_what_came_of_the_first(
    server: FakeServer, transport: SyncTransport, is_lost: bool
) -> None:
    def fail_next() -> None:
        if is_lost:
            server.drop(_methods.PING)
        server.fail(_methods.PING, BUSY)

    async with AsyncTransport() as loops:
        transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)
        await loops.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)
        fail_next()
        with pytest.raises(SystemBusyError) as caught:
            transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)
        assert caught.value.definite is not is_lost
        fail_next()
        with pytest.raises(SystemBusyError) as caught:
            await loops.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)
        assert caught.value.definite is not is_lost


async def test_a_second_connection_that_is_refused_leaves_open_what_came_of_the_first(server: FakeServer, transport: SyncTransport) -> None:
    """A broker that stops has carried the call out, and takes no connections any more."""
    async with AsyncTransport() as loops:
        transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)
        await loops.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)
        for is_sync in (True, False):
            server.drop(_methods.PING)
            server.hello_refusals.append(BUSY)
            with pytest.raises(SystemBusyError) as caught:
                await call_by(transport if is_sync else loops, server)
            assert not caught.value.definite


async def call_by(transport: SyncTransport | AsyncTransport, server: FakeServer) -> None:
    answer = transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)
    if not isinstance(answer, bytes):
        await answer


async def test_a_connection_that_turns_out_to_be_closed_costs_a_coroutine_no_read(server: FakeServer) -> None:
    async with AsyncTransport() as transport:
        await transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)
        server.stop()
        server.start()
        # Nothing has been awaited since: the loop has not heard of it.
        await transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)
        assert server.called(_methods.PING) == 2
        server.drop(_methods.CREATE_TOPIC)
        with pytest.raises(ConnectionLostError):
            await transport.call(remoting(server), _methods.CREATE_TOPIC, (PING,), PATIENCE_S)
        server.drop(_methods.PING)
        server.drop(_methods.PING)
        await transport.call(remoting(server), _methods.GET_BROKER_STATUS, (PING,), PATIENCE_S)
        with pytest.raises(ConnectionLostError):
            await transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)


def test_nobody_listening_is_definite(transport: SyncTransport) -> None:
    address = BrokerAddress("b", "", f"127.0.0.1:{unused_port()}")
    with pytest.raises(ConnectFailedError) as caught:
        transport.call(address, _methods.PING, (PING,), PATIENCE_S)
    assert caught.value.definite
    assert transport.kind(address) == ""


def test_a_one_way_call_waits_for_nothing(server: FakeServer, transport: SyncTransport) -> None:
    server.stall(_methods.PING)
    assert transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S, one_way=True) == b""
    assert transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S) == b""
    assert server.called(_methods.PING) == 2
    assert server.connections_accepted == 1


def test_threads_do_not_share_a_socket(server: FakeServer, transport: SyncTransport) -> None:
    server.append("t", 0, [b"%d" % i for i in range(50)])
    wrong: list[object] = []

    def work(offset: int) -> None:
        for _ in range(50):
            data = transport.call(
                remoting(server),
                _methods.PULL,
                (pull_request(queue_offset=offset, record_count_max=1),),
                PATIENCE_S,
            )
            if pull_service_pb2.PullResponse.FromString(data).records[0].body != b"%d" % offset:
                wrong.append(offset)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert server.connections_accepted <= 8


def test_an_answer_to_another_request_is_a_protocol_error(transport: SyncTransport) -> None:
    with Raw(encode_answer(77, _methods.PING.method_id, 0), welcome=True) as raw:
        with pytest.raises(ProtocolError):
            transport.call(BrokerAddress("b", "", raw.address), _methods.PING, (PING,), PATIENCE_S)


def test_a_closed_transport_says_so(server: FakeServer, transport: SyncTransport) -> None:
    transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)
    transport.close()
    transport.close()
    with pytest.raises(ClosedError):
        transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)


def test_a_refused_hello_is_the_servers_error(transport: SyncTransport) -> None:
    status = encode_status(BUSY)
    with Raw(encode_answer(0, 0, len(status), 8) + status) as raw:
        with pytest.raises(SystemBusyError):
            transport.call(BrokerAddress("b", "", raw.address), _methods.PING, (PING,), PATIENCE_S)


NO_PLACE = encode_status(RpcStatus(8, "no place for a further connection", "TOO_MANY", {"what": "connections", "limit": "2"}))
REFUSAL = encode_answer(0, 0, len(NO_PLACE), 8) + NO_PLACE
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
"""An HTTP/2 SETTINGS frame without a setting: shorter than a header of the remoting port."""


async def called(address: BrokerAddress, *, over: str, flavour: str) -> str:
    """Makes a call over the transport "auto" or "remoting", and returns what it went over."""
    options = TransportOptions(transport=over)  # type: ignore[arg-type]
    if flavour == "async":
        async with AsyncTransport(options) as transport:
            await transport.call(address, _methods.PING, (PING,), PATIENCE_S)
            return transport.kind(address) + str(round(transport._choice._grpc_until[address] - time.monotonic()))
    with SyncTransport(options) as sync:
        await asyncio.to_thread(sync.call, address, _methods.PING, (PING,), PATIENCE_S)
        return sync.kind(address) + str(round(sync._choice._grpc_until[address] - time.monotonic()))


@pytest.mark.parametrize("flavour", ["sync", "async"])
@pytest.mark.parametrize(
    ("answer", "until", "said"),
    [
        (REFUSAL, "grpc30", "no place for a further connection"),
        (b"", "grpc30", "closed the connection instead of answering the hello"),
        (REFUSAL[:10], "grpc30", "closed the connection instead of answering the hello"),
        (REFUSAL[:20], "grpc30", "closed the connection instead of answering the hello"),
        (SETTINGS, "grpc600", "does not speak protomq's remoting protocol"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "grpc600", "does not speak protomq's remoting protocol"),
    ],
)
async def test_a_port_that_greets_nobody_is_told_and_tried_again(
    server: FakeServer, caplog: pytest.LogCaptureFixture, flavour: str, answer: bytes, until: str, said: str
) -> None:
    with FakeGrpcFront(server) as front, Raw(answer, waits=False) as raw, caplog.at_level(logging.WARNING, "protomq"):
        address = BrokerAddress("broker-a", front.address, raw.address)
        assert await called(address, over="auto", flavour=flavour) == until
        (told,) = caplog.messages
        assert "remoting port of broker-a" in told
        assert raw.address in told
        assert said in told
        with pytest.raises(ConnectFailedError, match=said) as caught:
            await called(address, over="remoting", flavour=flavour)
        assert raw.address in str(caught.value)
        assert isinstance(caught.value, ForeignProtocolError) == (until == "grpc600")


async def test_coroutines_that_wait_for_one_connection_raise_an_exception_object_each() -> None:
    address = BrokerAddress("b", "", f"127.0.0.1:{unused_port()}")
    async with AsyncTransport() as transport:
        calls = [transport.call(address, _methods.PING, (PING,), PATIENCE_S) for _ in range(3)]
        errors = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(error) for error in errors] == [ConnectFailedError] * 3
    assert len({id(error) for error in errors}) == 3, "they would write into each other's traceback"
    assert {type(error.__cause__) for error in errors if isinstance(error, Exception)} == {ConnectionRefusedError}


@pytest.mark.parametrize("flavour", ["sync", "async"])
async def test_a_server_of_one_port_that_has_no_place_is_not_asked_over_grpc(flavour: str) -> None:
    with Raw(REFUSAL) as raw:
        address = BrokerAddress("", raw.address, raw.address)
        with pytest.raises(ConnectFailedError, match="no place"):
            await called(address, over="auto", flavour=flavour)


def ends_in_time(work: Any) -> None:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE_S / 6)
    assert not thread.is_alive(), "it waits for a lock that it has itself"


def test_a_signals_handler_may_close_a_transport_that_loads_grpc(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading it takes long: a SIGTERM may well come then. The handler runs on the thread that loads."""
    made: list[Any] = []
    transport = SyncTransport(TransportOptions(transport="grpc"))

    class Interrupted(_grpc_transport.GrpcLink):
        def __init__(self, *arguments: Any) -> None:
            transport.close()
            super().__init__(*arguments)
            made.append(self)

    def work() -> None:
        with pytest.raises(ClosedError):
            transport.call(address, _methods.PING, (PING,), PATIENCE_S)
        done.set()

    done = threading.Event()
    monkeypatch.setattr(_grpc_transport, "GrpcLink", Interrupted)
    with FakeGrpcFront(server) as front:
        address = BrokerAddress("b", front.address, server.address)
        ends_in_time(work)
        assert done.is_set()
        assert [link._closed for link in made] == [True]


def test_a_signals_handler_may_close_a_transport_where_a_held_call_begins(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.stall(_methods.WAIT_FOR_REPLIES)
    transport = SyncTransport()
    get_ident = threading.get_ident

    def interrupted() -> int:
        if sys._getframe(1).f_code.co_name == "_exchange_held":
            transport.close()
        return get_ident()

    def work() -> None:
        with pytest.raises(ClosedError):
            transport.call(remoting(server), _methods.WAIT_FOR_REPLIES, (b"",), PATIENCE_S)
        done.set()

    done = threading.Event()
    monkeypatch.setattr(threading, "get_ident", interrupted)
    ends_in_time(work)
    assert done.is_set()


def test_a_transport_that_a_signals_handler_closes_keeps_no_link_that_is_made_just_then(server: FakeServer) -> None:
    transport = SyncTransport()

    class Interrupted(dict[Any, Any]):
        def __setitem__(self, key: Any, link: Any) -> None:
            made.append(link)
            transport.close()
            super().__setitem__(key, link)

    made: list[Any] = []
    transport._links = Interrupted()
    with pytest.raises(ClosedError):
        transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)
    assert [link._closed for link in made] == [True]
    assert not transport._links


def test_a_signals_handler_may_close_a_link_that_renews_its_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    link = _grpc_transport.GrpcLink("127.0.0.1:1")
    opened = link._open
    renewed: list[Any] = []

    def interrupted() -> Any:
        link.close()
        renewed.append(opened())
        return renewed[0]

    def is_closed() -> bool:
        with suppress(grpc.RpcError):
            try:
                renewed[0].channel.unary_unary("/x")(b"", timeout=0.1)
            except ValueError:
                return True
        return False

    monkeypatch.setattr(link, "_open", interrupted)
    ends_in_time(lambda: link._renew(link._current))
    wait_for(is_closed)


def test_a_hook_may_close_a_producer_on_the_thread_that_waits_for_replies(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    server.topics["t"] = 1
    server.answer_once(_methods.WAIT_FOR_REPLIES, b"")
    server.answer_once(_methods.WAIT_FOR_REPLIES, b"")

    class Closes(Hook):
        def before_call(self, context: CallContext) -> None:
            if context.method == _methods.WAIT_FOR_REPLIES.path and threading.current_thread().name == "protomq-replies":
                producer.close()

    producer = Producer(namesrv=server.address, hooks=[Closes()])
    with pytest.raises(ClosedError):
        producer.request("t", b"?", timeout_s=PATIENCE_S)
    wait_for(lambda: producer._transport._closed)
    assert "cannot join" not in caplog.text


@pytest.mark.parametrize("over", ["remoting", "grpc"])
def test_a_producer_on_a_shared_transport_that_is_closed_waits_for_replies_no_more(server: FakeServer, over: Any) -> None:
    """Its goodbye is the last that the broker hears of it, also where its thread was just about to wait again."""
    server.topics["t"] = 1
    server.answer_once(_methods.WAIT_FOR_REPLIES, b"")
    server.stall(_methods.WAIT_FOR_REPLIES)
    server.answer_once(_methods.WAIT_FOR_REPLIES, b"")
    closing = threading.Event()
    with FakeGrpcFront(server) as front, SyncTransport(TransportOptions(transport=over)) as shared:
        server.brokers.append(route_service_pb2.Broker(broker_name="broker-a", grpc_address=front.address, remoting_address=server.address))
        call, end_held, is_about_to_wait = shared.call, shared.end_held, threading.Event()
        calls: list[tuple[MethodInfo, bytes]] = []

        def late_call(address: BrokerAddress, method: MethodInfo, *rest: Any, **options: Any) -> bytes:
            if threading.current_thread().name == "protomq-replies" and method is _methods.WAIT_FOR_REPLIES and not closing.is_set():
                is_about_to_wait.set()
                assert closing.wait(PATIENCE_S)
            calls.append((method, b"".join(rest[0])))
            return call(address, method, *rest, **options)

        def told_end_held(threads: Any) -> None:
            closing.set()
            end_held(threads)

        shared.call, shared.end_held = late_call, told_end_held  # type: ignore[method-assign]
        producer = Producer(namesrv=server.address, transport=shared)
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(producer.request, "t", b"?", timeout_s=PATIENCE_S)
            assert is_about_to_wait.wait(PATIENCE_S)
            wait_for(lambda: any(method is _methods.SEND for method, _ in calls))
            producer.close()
            with pytest.raises(ClosedError):
                asking.result(PATIENCE_S)
        assert "protomq-replies" not in [thread.name for thread in threading.enumerate()]
        waits = [WaitForRepliesRequest.FromString(payload) for method, payload in calls if method is _methods.WAIT_FOR_REPLIES]
        assert [(wait.hold_ms > 0, wait.leaves) for wait in waits] == [(False, False), (True, False), (False, True)]


def test_a_forked_child_has_its_own_connections(
    server: FakeServer, transport: SyncTransport
) -> None:
    transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)
    assert server.connections_accepted == 2
    assert server.called(_methods.PING) == 3


FORKED = """
import asyncio, os, sys, time
from protomq import _methods
from protomq._async_transport import AsyncTransport
from protomq._transport import SyncTransport
from protomq._types import BrokerAddress

grpc_address, closed_address = sys.argv[1:]
over_grpc, falls_back = BrokerAddress("b", grpc_address, ""), BrokerAddress("b", grpc_address, closed_address)


def called(client, address, loop=None):
    try:
        calling = client.call(address, _methods.PING, (b"",), 2.0)
        return "answered" if (loop.run_until_complete(calling) if loop else calling) == b"" else "?"
    except Exception as error:
        return type(error).__name__


def in_child(what):
    pid = os.fork()
    if pid == 0:
        sys.stdout.write(what() + "\\n")
        sys.stdout.flush()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


loop, client = asyncio.new_event_loop(), AsyncTransport(OPTIONS)
print(called(client, over_grpc, loop), flush=True)
in_child(lambda: called(client, over_grpc, asyncio.new_event_loop()))
in_child(lambda: called(AsyncTransport(OPTIONS), over_grpc, asyncio.new_event_loop()))
in_child(lambda: called(SyncTransport(OPTIONS), over_grpc))
in_child(lambda: called(AsyncTransport(), falls_back, asyncio.new_event_loop()))
in_child(lambda: called(SyncTransport(), falls_back))
print(called(client, over_grpc, loop), flush=True)
loop.run_until_complete(client.close())
del client
in_child(lambda: called(SyncTransport(OPTIONS), over_grpc))
""".replace("OPTIONS", "__import__('protomq._transport_options', fromlist=['']).TransportOptions(transport='grpc')")


def test_a_child_that_was_forked_while_grpc_ran_in_an_event_loop_is_told_so(server: FakeServer) -> None:
    with FakeGrpcFront(server) as front:
        child = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", FORKED, front.address, f"127.0.0.1:{unused_port()}"],
            capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
    told = ["ConfigurationError"] * 3 + ["ConnectFailedError"] * 2
    assert child.stdout.split() == ["answered", *told, "answered", "answered"], child.stderr


# -- the choice ----------------------------------------------------------------------------------------------------------


def test_grpc_is_used_where_the_remoting_port_is_closed(
    server: FakeServer, transport: SyncTransport, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeGrpcFront(server) as front, caplog.at_level(logging.WARNING, "protomq"):
        address = BrokerAddress("b", front.address, f"127.0.0.1:{unused_port()}")
        for _ in range(3):
            transport.call(address, _methods.PING, (PING,), PATIENCE_S)
        assert transport.kind(address) == "grpc"
        assert len([record for record in caplog.records if "using gRPC" in record.message]) == 1
        server.fail(_methods.PING, BUSY)
        with pytest.raises(SystemBusyError) as caught:
            transport.call(address, _methods.PING, (PING,), PATIENCE_S)
        assert caught.value.retry_delay_ms == 123
        server.stall(_methods.PING)
        with pytest.raises(RequestTimeoutError):
            transport.call(address, _methods.PING, (PING,), 0.2)
        transport.close()


def test_a_port_that_turns_out_to_be_grpcs_is_used_as_such(
    server: FakeServer, transport: SyncTransport, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeGrpcFront(server) as front, caplog.at_level(logging.WARNING, "protomq"):
        address = BrokerAddress("", front.address, front.address)
        transport.call(address, _methods.PING, (PING,), PATIENCE_S)
        assert transport.kind(address) == "grpc"
        assert caplog.records == []
        transport.close()


def test_the_remoting_port_is_used_again_when_it_is_back(
    server: FakeServer, transport: SyncTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeGrpcFront(server) as front:
        address = BrokerAddress("b", front.address, server.address)
        server.stop()
        transport.call(address, _methods.PING, (PING,), PATIENCE_S)
        assert transport.kind(address) == "grpc"
        server.start()
        transport.call(address, _methods.PING, (PING,), PATIENCE_S)
        assert transport.kind(address) == "grpc"  # Not yet.
        monkeypatch.setattr(transport._choice, "_grpc_until", {address: 0.0})
        transport.call(address, _methods.PING, (PING,), PATIENCE_S)
        assert transport.kind(address) == "remoting"
        transport.close()


def test_a_remoting_port_that_stays_away_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """It is tried again every 30 s; it is told again only when it was back in between."""
    choice = Choice("auto")
    address = BrokerAddress("broker-a", "h:1", "h:2")
    for now_s in (0.0, 31.0, 62.0):
        assert choice.try_remoting(address, now_s)
        choice.fell_back(address, ConnectFailedError("refused"), now_s)
    assert len(caplog.messages) == 1
    choice.reached(address)
    choice.fell_back(address, ConnectFailedError("refused"), 100.0)
    assert len(caplog.messages) == 2


def test_a_fall_back_that_fails_itself_does_not_last(server: FakeServer, transport: SyncTransport) -> None:
    with FakeGrpcFront(server) as front:
        address = BrokerAddress("b", front.address, server.address)
        server.stop()
        transport.call(address, _methods.PING, (PING,), PATIENCE_S)
        assert transport.kind(address) == "grpc"
    server.start()
    with pytest.raises((ConnectFailedError, ConnectionLostError)):
        transport.call(address, _methods.PING, (PING,), PATIENCE_S)
    transport.call(address, _methods.PING, (PING,), PATIENCE_S)
    assert transport.kind(address) == "remoting"


def test_a_server_of_one_port_that_was_silent_is_not_taken_for_grpcs(server: FakeServer, transport: SyncTransport) -> None:
    """A name server that is stopped for a while: the kernel takes connections, and nothing answers a hello."""
    address = BrokerAddress("", server.address, server.address)
    server.stop()
    with socket.create_server(("127.0.0.1", int(server.address.rpartition(":")[2]))):
        with pytest.raises(ConnectFailedError, match="no answer to the hello"):
            transport.call(address, _methods.PING, (PING,), 0.5)
    server.start()
    transport.call(address, _methods.PING, (PING,), PATIENCE_S)
    assert transport.kind(address) == "remoting"


def test_a_broken_remoting_port_falls_back_within_the_call(
    server: FakeServer, transport: SyncTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a call is that is made too often for a look at its socket.
    monkeypatch.setattr(_remoting_sync, "LOOKED_AT_FIRST", frozenset())
    with FakeGrpcFront(server) as front:
        address = BrokerAddress("b", front.address, server.address)
        transport.call(address, _methods.PING, (PING,), PATIENCE_S)
        assert transport.kind(address) == "remoting"
        server.stop()
        with pytest.raises(ConnectionLostError):
            # The pooled socket: it may have happened.
            transport.call(address, _methods.CREATE_TOPIC, (PING,), PATIENCE_S)
        transport.call(address, _methods.PING, (PING,), PATIENCE_S)
        assert transport.kind(address) == "grpc"
        transport.close()


def refuse_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no remoting port takes another connection, as at its limit of them."""

    def refuse(*_: object) -> None:
        raise ConnectFailedError("it takes no more connections")

    monkeypatch.setattr(_remoting_sync, "connect", refuse)


def test_calls_that_are_held_go_on_where_another_thread_falls_back_to_grpc(
    server: FakeServer, transport: SyncTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeGrpcFront(server) as front, ThreadPoolExecutor(1) as threads:
        address = BrokerAddress("b", front.address, server.address)
        held = threads.submit(transport.call, address, _methods.PULL, (pull_request(1_000),), PATIENCE_S)
        wait_for(lambda: len(server.calls) == 1)
        pool = transport._links[address, _methods.LANE_PULL]
        refuse_connections(monkeypatch)
        transport.call(address, _methods.PULL, (pull_request(),), PATIENCE_S)
        assert transport.kind(address) == "grpc"
        held.result(PATIENCE_S)
        assert isinstance(pool, _remoting_sync.ConnectionPool)
        assert not pool._idle, "a connection that nobody uses any more stays open"
        transport.close()


def test_a_close_ends_calls_that_are_held_where_another_thread_has_fallen_back_to_grpc(
    server: FakeServer, transport: SyncTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeGrpcFront(server) as front, ThreadPoolExecutor(1) as threads:
        address = BrokerAddress("b", front.address, server.address)
        held = threads.submit(transport.call, address, _methods.PULL, (pull_request(600_000),), 600.0)
        wait_for(lambda: len(server.calls) == 1)
        refuse_connections(monkeypatch)
        transport.call(address, _methods.PULL, (pull_request(),), PATIENCE_S)
        assert not held.done()
        transport.close()
        with pytest.raises(ClosedError):
            held.result(PATIENCE_S)


HELD_CALLS = [_methods.PULL, _methods.POP, _methods.HOLD_MEMBERSHIP, _methods.WAIT_FOR_REPLIES, _methods.WAIT_FOR_CHECKS]


@pytest.fixture(params=["remoting", "grpc"])
def held_at(server: FakeServer, request: pytest.FixtureRequest) -> Iterator[BrokerAddress]:
    """A server that answers no call of HELD_CALLS, over either transport."""
    for method in HELD_CALLS:
        server.stall(method, 2)
    if request.param == "remoting":
        yield BrokerAddress("b", "", server.address)
        return
    with FakeGrpcFront(server) as front:
        yield BrokerAddress("b", front.address, "")


@pytest.mark.parametrize("method", HELD_CALLS, ids=lambda method: method.path.rpartition("/")[2])
def test_a_close_ends_each_call_that_a_server_holds(transport: SyncTransport, held_at: BrokerAddress, method: Any) -> None:
    with ThreadPoolExecutor(1) as threads:
        held = threads.submit(transport.call, held_at, method, (b"",), 600.0)
        wait_for(lambda: is_held(transport), PATIENCE_S)
        transport.close()
        with pytest.raises(ClosedError):
            held.result(PATIENCE_S)


def is_held(transport: SyncTransport) -> bool:
    return any(getattr(link, "_held", None) for link in transport._links.values())


def test_a_client_ends_calls_that_are_held_for_its_threads_and_no_others(transport: SyncTransport, held_at: BrokerAddress) -> None:
    def call(own: list[int]) -> bytes:
        own.append(threading.get_ident())
        return transport.call(held_at, _methods.WAIT_FOR_CHECKS, (b"",), 600.0)

    with ThreadPoolExecutor(2) as threads:
        own: list[int] = []
        other = threads.submit(call, [])
        wait_for(lambda: is_held(transport), PATIENCE_S)
        held = threads.submit(call, own)
        wait_for(lambda: sum(len(getattr(link, "_held", ())) for link in transport._links.values()) == 2, PATIENCE_S)
        transport.end_held(set(own))
        with pytest.raises(ClosedError):
            held.result(PATIENCE_S)
        assert not other.done()
        transport.close()
        with pytest.raises(ClosedError):
            other.result(PATIENCE_S)


def test_an_order_of_an_operator_is_not_sent_over_a_pooled_socket_that_its_server_has_closed(
    server: FakeServer, transport: SyncTransport
) -> None:
    with FakeGrpcFront(server) as front:
        address = BrokerAddress("b", front.address, server.address)
        transport.call(address, _methods.PING, (PING,), PATIENCE_S)
        server.stop()
        transport.call(address, _methods.CREATE_TOPIC, (PING,), PATIENCE_S)
        assert transport.kind(address) == "grpc"


def test_one_transport_alone_can_be_asked_for(server: FakeServer) -> None:
    with FakeGrpcFront(server) as front:
        both = BrokerAddress("b", front.address, server.address)
        with SyncTransport(TransportOptions(transport="grpc")) as only_grpc:
            only_grpc.call(both, _methods.PING, (PING,), PATIENCE_S)
            assert only_grpc.kind(both) == "grpc"
        with SyncTransport(TransportOptions(transport="remoting")) as only_remoting:
            with pytest.raises(ConnectFailedError):
                only_remoting.call(
                    BrokerAddress("b", front.address, ""), _methods.PING, (PING,), PATIENCE_S
                )


def test_a_dead_server_is_a_failed_connection_without_loading_grpc(
    transport: SyncTransport,
) -> None:
    dead = f"127.0.0.1:{unused_port()}"
    with pytest.raises(ConnectFailedError):
        transport.call(BrokerAddress("b", dead, dead), _methods.PING, (PING,), PATIENCE_S)


def test_options_are_checked() -> None:
    with pytest.raises(ConfigurationError):
        TransportOptions(transport="udp")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError):
        TransportOptions(connect_timeout_s=0)


# -- asyncio -------------------------------------------------------------------------------------------------------------


async def test_a_loop_that_is_busy_blames_no_server(server: FakeServer) -> None:
    async with AsyncTransport(TransportOptions(connect_timeout_s=0.3)) as transport:
        for _ in range(3):
            asyncio.get_running_loop().call_soon(asyncio.get_running_loop().call_soon, time.sleep, 0.6)
            await transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)
            server.stop()
            server.start()


async def test_many_coroutines_share_one_connection(server: FakeServer) -> None:
    server.append("t", 0, [b"%d" % i for i in range(200)])
    async with AsyncTransport() as transport:

        async def one(offset: int) -> bytes:
            request = pull_request(queue_offset=offset, record_count_max=1)
            data = await transport.call(remoting(server), _methods.PULL, (request,), PATIENCE_S)
            return pull_service_pb2.PullResponse.FromString(data).records[0].body

        assert await asyncio.gather(*map(one, range(200))) == [b"%d" % i for i in range(200)]
        assert server.connections_accepted == 1
        assert transport.kind(remoting(server)) == "remoting"


async def test_answers_come_in_any_order(server: FakeServer) -> None:
    async with AsyncTransport() as transport:
        held = asyncio.ensure_future(
            transport.call(remoting(server), _methods.PULL, (pull_request(hold_ms=60_000),), 90.0)
        )
        quick = await transport.call(remoting(server), _methods.PULL, (pull_request(),), PATIENCE_S)
        assert (
            pull_service_pb2.PullResponse.FromString(quick).status
            == pull_service_pb2.PULL_STATUS_NO_NEW_MSG
        )
        assert not held.done()
        server.append("t", 0, [b"x"])
        assert pull_service_pb2.PullResponse.FromString(await held).records[0].body == b"x"


async def test_large_and_small_answers_follow_each_other(server: FakeServer) -> None:
    server.append(
        "t",
        0,
        [
            bytes([i]) * size
            for i, size in enumerate([10, 200_000, 65_000, 1, 70_000, 131_072, 3, 1 << 20])
        ],
    )
    async with AsyncTransport() as transport:

        async def one(offset: int) -> bytes:
            request = pull_request(queue_offset=offset, record_count_max=1)
            data = await transport.call(remoting(server), _methods.PULL, (request,), PATIENCE_S)
            return pull_service_pb2.PullResponse.FromString(data).records[0].body

        for _ in range(5):
            bodies = await asyncio.gather(*map(one, range(8)))
            assert [(body[0], len(body)) for body in bodies] == [
                (0, 10), (1, 200_000), (2, 65_000), (3, 1), (4, 70_000), (5, 131_072), (6, 3), (7, 1 << 20),
            ]  # fmt: skip


async def test_time_outs_of_different_length_end_in_their_order(server: FakeServer) -> None:
    async with AsyncTransport() as transport:
        await transport.call(remoting(server), _methods.PING, (PING,), 60.0)
        for _ in range(3):
            server.stall(_methods.PING)
        started_s = time.monotonic()
        ended: list[float] = []

        async def one(timeout_s: float) -> None:
            with pytest.raises(RequestTimeoutError):
                await transport.call(remoting(server), _methods.PING, (PING,), timeout_s)
            ended.append(timeout_s)

        await asyncio.gather(one(0.9), one(0.3), one(0.6))
        assert ended == [0.3, 0.6, 0.9]
        assert time.monotonic() - started_s >= 0.89
        await transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)
        # Nothing had come at all since they were sent: it may have been the connection.
        assert server.connections_accepted == 2


async def test_a_connection_that_is_alive_survives_a_time_out(server: FakeServer) -> None:
    async with AsyncTransport() as transport:
        server.stall(_methods.PING)
        slow = asyncio.ensure_future(transport.call(remoting(server), _methods.PING, (PING,), 1.0))
        await async_wait_for(lambda: server.called(_methods.PING) == 1)
        await transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)
        with pytest.raises(RequestTimeoutError):
            await slow
        await transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)
        assert server.connections_accepted == 1  # Late answers are told apart by their ids.


async def test_a_silent_connection_serves_its_last_calls_and_no_new_ones(
    server: FakeServer,
) -> None:
    async with AsyncTransport() as transport:
        held = asyncio.ensure_future(
            transport.call(remoting(server), _methods.PULL, (pull_request(hold_ms=60_000),), 90.0)
        )
        await async_wait_for(lambda: server.called(_methods.PULL) == 1)
        server.stall(_methods.PULL)
        with pytest.raises(RequestTimeoutError):
            await transport.call(remoting(server), _methods.PULL, (pull_request(),), 0.05)
        await transport.call(remoting(server), _methods.PULL, (pull_request(),), PATIENCE_S)
        assert server.connections_accepted == 2
        server.append("t", 0, [b"x"])
        assert pull_service_pb2.PullResponse.FromString(await held).records[0].body == b"x"


async def test_a_cancelled_call_is_forgotten(server: FakeServer) -> None:
    async with AsyncTransport() as transport:
        await transport.call(remoting(server), _methods.PULL, (pull_request(),), PATIENCE_S)
        request = pull_request(hold_ms=60_000)
        call = asyncio.ensure_future(
            transport.call(remoting(server), _methods.PULL, (request,), 90.0)
        )
        await async_wait_for(lambda: server.called(_methods.PULL) == 2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        connection = next(iter(transport._connections.values()))
        assert connection._pending == {}
        server.append("t", 0, [b"late"])
        await transport.call(remoting(server), _methods.PULL, (pull_request(),), PATIENCE_S)


async def test_errors_and_lost_connections_reach_every_waiting_coroutine(
    server: FakeServer,
) -> None:
    async with AsyncTransport() as transport:
        server.fail(_methods.PING, BUSY)
        with pytest.raises(SystemBusyError):
            await transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)
        server.stall(_methods.CREATE_TOPIC)
        server.stall(_methods.CREATE_TOPIC)
        server.drop(_methods.CREATE_TOPIC)
        calls = [transport.call(remoting(server), _methods.CREATE_TOPIC, (PING,), PATIENCE_S) for _ in range(3)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [ConnectionLostError] * 3
        await transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)


async def test_the_first_calls_share_one_hello(server: FakeServer) -> None:
    async with AsyncTransport() as transport:
        await asyncio.gather(
            *(transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S) for _ in range(20))
        )
        assert server.connections_accepted == 1


async def test_async_one_way(server: FakeServer) -> None:
    async with AsyncTransport() as transport:
        assert (
            await transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S, one_way=True) == b""
        )
        await transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)
        assert server.called(_methods.PING) == 2


async def test_async_falls_back_to_grpc(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeGrpcFront(server) as front, caplog.at_level(logging.WARNING, "protomq"):
        closed = BrokerAddress("b", front.address, f"127.0.0.1:{unused_port()}")
        foreign = BrokerAddress("", front.address, front.address)
        async with AsyncTransport() as transport:
            for address in (closed, foreign):
                await transport.call(address, _methods.PING, (PING,), PATIENCE_S)
                await transport.call(address, _methods.PING, (PING,), PATIENCE_S)
                assert transport.kind(address) == "grpc"
            server.fail(_methods.PING, RpcStatus(5, "none", "TOPIC_NOT_FOUND"))
            with pytest.raises(TopicNotFoundError):
                await transport.call(closed, _methods.PING, (PING,), PATIENCE_S)
        assert len([record for record in caplog.records if "using gRPC" in record.message]) == 1


async def test_an_async_fall_back_that_fails_itself_does_not_last(server: FakeServer) -> None:
    async with AsyncTransport() as transport:
        with FakeGrpcFront(server) as front:
            address = BrokerAddress("b", front.address, server.address)
            server.stop()
            await transport.call(address, _methods.PING, (PING,), PATIENCE_S)
            assert transport.kind(address) == "grpc"
        server.start()
        with pytest.raises((ConnectFailedError, ConnectionLostError)):
            await transport.call(address, _methods.PING, (PING,), PATIENCE_S)
        await transport.call(address, _methods.PING, (PING,), PATIENCE_S)
        assert transport.kind(address) == "remoting"


async def test_a_coroutine_does_not_take_a_silent_server_of_one_port_for_grpcs(server: FakeServer) -> None:
    address = BrokerAddress("", server.address, server.address)
    server.stop()
    async with AsyncTransport(TransportOptions(connect_timeout_s=0.1)) as transport:
        with socket.create_server(("127.0.0.1", int(server.address.rpartition(":")[2]))):
            with pytest.raises(ConnectFailedError):
                await transport.call(address, _methods.PING, (PING,), 1.0)
            await async_wait_for(lambda: not transport._opening)  # Or the next call would share its failure.
        server.start()
        await transport.call(address, _methods.PING, (PING,), PATIENCE_S)
        assert transport.kind(address) == "remoting"


async def test_async_dead_and_closed(server: FakeServer) -> None:
    transport = AsyncTransport()
    dead = f"127.0.0.1:{unused_port()}"
    with pytest.raises(ConnectFailedError):
        await transport.call(BrokerAddress("b", dead, dead), _methods.PING, (PING,), PATIENCE_S)
    await transport.close()
    await transport.close()
    with pytest.raises(ClosedError):
        await transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)


def test_an_async_transport_starts_anew_on_the_next_loop(server: FakeServer) -> None:
    transport = AsyncTransport()

    async def once() -> None:
        await transport.call(remoting(server), _methods.PING, (PING,), PATIENCE_S)
        for connection in transport._connections.values():
            connection.close()  # What ends with the loop would warn of its open socket.

    asyncio.run(once())
    asyncio.run(once())
    assert server.called(_methods.PING) == 2


async def test_an_answer_that_makes_no_sense_ends_the_connection() -> None:
    with Raw(HEADER.pack(3, 1, 1, 1, 0, 0), welcome=True) as raw:
        async with AsyncTransport() as transport:
            with pytest.raises(ProtocolError):
                await transport.call(
                    BrokerAddress("b", "", raw.address), _methods.PING, (PING,), PATIENCE_S
                )


async def test_a_slow_reader_holds_its_callers_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clogged = asyncio.Event()
    pause_writing = AsyncConnection.pause_writing

    def pause(connection: AsyncConnection) -> None:
        pause_writing(connection)
        clogged.set()

    monkeypatch.setattr(AsyncConnection, "pause_writing", pause)
    listener = socket.create_server(("127.0.0.1", 0))
    held: list[socket.socket] = []

    def accept() -> None:
        sock, _ = listener.accept()
        held.append(sock)
        sock.recv(4096)
        sock.sendall(encode_answer(0, 0, 0))

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    address = BrokerAddress("b", "", f"127.0.0.1:{listener.getsockname()[1]}")
    async with AsyncTransport() as transport:
        calls = [
            asyncio.ensure_future(transport.call(address, _methods.SEND, (bytes(1 << 20),), 3.0))
            for _ in range(40)
        ]
        await clogged.wait()  # More is queued than the kernel's buffers hold, so it stays like that.
        late = transport.call(address, _methods.SEND, (b"",), 0.1)
        with pytest.raises(ConnectFailedError) as caught:  # Nothing of it was sent.
            await late
        assert caught.value.definite
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} <= {RequestTimeoutError, ConnectFailedError}
    thread.join()
    held[0].close()
    listener.close()
