"""gRPC tries nothing again below the SDK, which counts its tries: a server that is not available is asked once.

A server that says nothing at all costs no try, as over the remoting port.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import grpc
import grpc.aio
import pytest

from protomq import _methods
from protomq._grpc_transport import SILENT_S, AioGrpcLink, GrpcLink
from protomq._retry import CALL
from protomq._transport_options import was_silent
from protomq._types import MethodInfo
from protomq.errors import (
    ClosedError,
    ConnectFailedError,
    ConnectionLostError,
    ProtomqError,
    RequestTimeoutError,
)
from protomq.testing import FaultProxy, Faults
from tests.support.fake_server import FakeGrpcFront, FakeServer
from tests.support.waiting import PATIENCE_S, wait_for


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as made:
        yield made


class Unavailable(grpc.GenericRpcHandler):
    """Refuses every call as a proxy does whose server is gone."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def service(self, handler_call_details: Any) -> Any:
        self.called.append(handler_call_details.method)
        return grpc.unary_unary_rpc_method_handler(self._refuse)

    def _refuse(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        raise AssertionError("abort raises")


@pytest.mark.parametrize("method", [_methods.GET_ROUTE, _methods.PULL, _methods.COMMIT_OFFSETS, _methods.SEND])
async def test_a_call_over_grpc_is_made_once(method: MethodInfo) -> None:
    refusing = Unavailable()
    server = grpc.server(ThreadPoolExecutor(1), handlers=[refusing])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    link, aio_link = GrpcLink(address), AioGrpcLink(address)
    try:
        with pytest.raises(ConnectionLostError):
            link.call(method, (b"",), 60.0, False)
        assert refusing.called == [method.path]
        with pytest.raises(ConnectionLostError):
            await aio_link.call(method, (b"",), 60.0, False)
        assert refusing.called == [method.path] * 2
    finally:
        link.close()
        await aio_link.close()
        server.stop(None).wait(60)


class Held(grpc.GenericRpcHandler):
    """Answers no call before `ends` is set."""

    def __init__(self) -> None:
        self.began, self.ends = threading.Event(), threading.Event()
        self.both_began, self._numbers = threading.Event(), itertools.count()

    def service(self, handler_call_details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(self._hold)

    def _hold(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        if next(self._numbers) == 1:
            self.both_began.set()
        self.began.set()
        self.ends.wait(PATIENCE_S)
        return b""


@contextmanager
def held_server() -> Iterator[tuple[Held, str]]:
    held = Held()
    server = grpc.server(ThreadPoolExecutor(2), handlers=[held])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield held, address
    finally:
        held.ends.set()
        server.stop(None).wait(PATIENCE_S)


async def errors_of(address: str, timeout_s: float) -> list[ProtomqError]:
    """Of a commit, made by a thread and by a coroutine."""
    link, aio_link = GrpcLink(address), AioGrpcLink(address)
    errors: list[ProtomqError] = []
    try:
        for _ in range(2):  # gRPC makes the second call fail by what it knows of the first.
            with pytest.raises(ProtomqError) as caught:
                link.call(_methods.COMMIT_OFFSETS, (b"",), timeout_s, False)
            errors.append(caught.value)
            with pytest.raises(ProtomqError) as caught:
                await aio_link.call(_methods.COMMIT_OFFSETS, (b"",), timeout_s, False)
            errors.append(caught.value)
    finally:
        link.close()
        await aio_link.close()
    return errors


def assert_silent(errors: list[ProtomqError], kind: type[ProtomqError]) -> None:
    assert {type(error) for error in errors} == {kind}
    assert all(map(was_silent, errors))
    assert not [error for error in errors if "ipv4:" in str(error)], "gRPC's own text"
    retries = CALL.of_call(60.0, lambda: 0.0)
    assert None not in [retries.decide(error) for error in errors * 3], "none of these tries counts"


async def test_a_port_that_says_nothing_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert_silent(await errors_of(f"127.0.0.1:{listener.getsockname()[1]}", PATIENCE_S), ConnectFailedError)


async def test_a_machine_that_is_cut_off_is_silent() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        # Linux answers no more connections then.
        for _ in range(2):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        assert_silent(await errors_of(f"127.0.0.1:{listener.getsockname()[1]}", PATIENCE_S), ConnectFailedError)


async def test_a_server_that_does_not_answer_is_silent() -> None:
    with held_server() as (_, address):
        assert_silent(await errors_of(address, 0.1), RequestTimeoutError)


async def test_a_server_behind_a_slow_link_is_connected_at_the_first_try() -> None:
    """Before it can be used, HTTP/2 takes a round trip of 0.3 s here."""
    with held_server() as (held, address), FaultProxy(address, faults=Faults(delay_s=0.15)) as link:
        held.ends.set()
        for _ in range(3):
            sync_link, aio_link = GrpcLink(link.address), AioGrpcLink(link.address)
            try:
                assert sync_link.call(_methods.COMMIT_OFFSETS, (b"",), PATIENCE_S, False) == b""
                assert await aio_link.call(_methods.COMMIT_OFFSETS, (b"",), PATIENCE_S, False) == b""
            finally:
                sync_link.close()
                await aio_link.close()
        assert link.connections_accepted == 6, "no try was given up"


@pytest.mark.parametrize("is_watched", [False, True])
def test_a_channel_that_a_firewall_has_forgotten_costs_one_call(is_watched: bool) -> None:
    with held_server() as (held, address), FaultProxy(address) as proxy:
        held.ends.set()
        link = GrpcLink(proxy.address)

        def commit(timeout_s: float) -> bytes:
            return link.call(_methods.COMMIT_OFFSETS, (b"",), timeout_s, False, (lambda: False) if is_watched else None)

        try:
            for accepted in (1, 2, 3):
                assert commit(PATIENCE_S) == b""
                assert proxy.connections_accepted == accepted
                proxy.swallow()
                with pytest.raises(RequestTimeoutError):
                    commit(SILENT_S)
        finally:
            link.close()


async def test_a_channel_of_coroutines_that_a_firewall_has_forgotten_costs_one_call() -> None:
    with held_server() as (held, address), FaultProxy(address) as proxy:
        held.ends.set()
        link = AioGrpcLink(proxy.address)
        try:
            for accepted in (1, 2, 3):
                assert await link.call(_methods.COMMIT_OFFSETS, (b"",), PATIENCE_S, False) == b""
                assert proxy.connections_accepted == accepted
                proxy.swallow()
                with pytest.raises(RequestTimeoutError):
                    await link.call(_methods.COMMIT_OFFSETS, (b"",), SILENT_S, False)
        finally:
            await link.close()


async def test_calls_that_end_in_less_time_say_nothing_of_a_channel() -> None:
    with held_server() as (held, address), FaultProxy(address) as proxy:
        link, aio_link = GrpcLink(proxy.address), AioGrpcLink(proxy.address)
        try:
            for _ in range(3):
                with pytest.raises(RequestTimeoutError):
                    link.call(_methods.COMMIT_OFFSETS, (b"",), SILENT_S / 4, False)
                with pytest.raises(RequestTimeoutError):
                    await aio_link.call(_methods.COMMIT_OFFSETS, (b"",), SILENT_S / 4, False)
            held.ends.set()
            assert link.call(_methods.COMMIT_OFFSETS, (b"",), PATIENCE_S, False) == b""
            assert await aio_link.call(_methods.COMMIT_OFFSETS, (b"",), PATIENCE_S, False) == b""
            assert proxy.connections_accepted == 2
        finally:
            link.close()
            await aio_link.close()


async def test_a_held_call_on_a_connection_that_a_firewall_has_forgotten_ends_by_a_ping() -> None:
    """A ping each 1.5 s here, which has 0.5 s."""
    with held_server() as (held, address), FaultProxy(address) as proxy, ThreadPoolExecutor(1) as pool:
        link, aio_link = GrpcLink(proxy.address, peer_timeout_s=3.0), AioGrpcLink(proxy.address, peer_timeout_s=3.0)
        try:
            waiting = pool.submit(link.call, _methods.POP, (b"",), 20.0, False)
            aio_waiting = asyncio.ensure_future(aio_link.call(_methods.POP, (b"",), 20.0, False))
            assert await asyncio.to_thread(held.both_began.wait, PATIENCE_S)
            assert proxy.swallow() == 2
            with pytest.raises(ConnectionLostError) as caught:
                await aio_waiting
            assert was_silent(caught.value)
            error = await asyncio.to_thread(waiting.exception, PATIENCE_S)
            assert isinstance(error, ConnectionLostError)
            assert was_silent(error)
        finally:
            link.close()
            await aio_link.close()


class Named(grpc.GenericRpcHandler):
    """Answers what `quick` says at once, all else when `ends` is set."""

    def __init__(self) -> None:
        self.began, self.ends = threading.Event(), threading.Event()

    def service(self, handler_call_details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(self._answer)

    def _answer(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        if request == b"held":
            self.began.set()
        if request != b"quick":
            self.ends.wait(PATIENCE_S)
        return request


@contextmanager
def named_server() -> Iterator[tuple[Named, str]]:
    named = Named()
    server = grpc.server(ThreadPoolExecutor(20), handlers=[named])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield named, address
    finally:
        named.ends.set()
        server.stop(None).wait(PATIENCE_S)


def test_a_slow_server_ends_no_held_call_however_often_its_channel_is_left() -> None:
    with named_server() as (named, address), FaultProxy(address) as proxy, ThreadPoolExecutor(1) as pool:
        link = GrpcLink(proxy.address)
        try:
            held = pool.submit(link.call, _methods.POP, (b"held",), PATIENCE_S, False)
            begun = link.begin(_methods.PULL, b"held", PATIENCE_S)
            assert named.began.wait(PATIENCE_S)
            for accepted in (1, 2, 3):
                assert link.call(_methods.COMMIT_OFFSETS, (b"quick",), PATIENCE_S, False) == b"quick"
                assert proxy.connections_accepted == accepted
                with pytest.raises(RequestTimeoutError):
                    link.call(_methods.COMMIT_OFFSETS, (b"slow",), SILENT_S, False)
            assert len(link._left) == 1, "those without a call are closed"
            named.ends.set()
            assert held.result(PATIENCE_S) == begun.result(PATIENCE_S) == b"held"
            wait_for(lambda: not link._left)
        finally:
            link.close()


def test_an_answer_to_a_pull_says_that_a_channel_was_there() -> None:
    with named_server() as (_, address), FaultProxy(address) as proxy:
        link = GrpcLink(proxy.address)
        try:
            for accepted in (1, 2):
                assert link.begin(_methods.PULL, b"quick", PATIENCE_S).result(PATIENCE_S) == b"quick"
                assert proxy.connections_accepted == accepted
                wait_for(lambda: not link._current.calls)
                proxy.swallow()
                with pytest.raises(RequestTimeoutError):
                    link.call(_methods.COMMIT_OFFSETS, (b"",), SILENT_S, False)
            assert link._current.opened_s > link._heard_s
        finally:
            link.close()


async def test_a_slow_server_ends_no_held_call_of_coroutines_and_cancels_nobody() -> None:
    with named_server() as (named, address), FaultProxy(address) as proxy:
        link = AioGrpcLink(proxy.address)
        try:
            held = asyncio.ensure_future(link.call(_methods.POP, (b"held",), PATIENCE_S, False))
            assert await asyncio.to_thread(named.began.wait, PATIENCE_S)
            for accepted in (1, 2, 3):
                assert await link.call(_methods.COMMIT_OFFSETS, (b"quick",), PATIENCE_S, False) == b"quick"
                assert proxy.connections_accepted == accepted
                with pytest.raises(RequestTimeoutError):
                    await link.call(_methods.COMMIT_OFFSETS, (b"slow",), SILENT_S, False)
            assert len(link._left) == 1, "those without a call are closed"
            named.ends.set()
            assert await held == b"held"
            assert not link._left
        finally:
            await link.close()


async def test_a_server_that_never_says_anything_gets_no_connection_for_each_call() -> None:
    with held_server() as (_, address), FaultProxy(address) as proxy:
        link, aio_link = GrpcLink(proxy.address), AioGrpcLink(proxy.address)
        try:
            for _ in range(3):
                with pytest.raises(RequestTimeoutError):
                    link.call(_methods.COMMIT_OFFSETS, (b"",), SILENT_S, False)
                with pytest.raises(RequestTimeoutError):
                    await aio_link.call(_methods.COMMIT_OFFSETS, (b"",), SILENT_S, False)
            assert proxy.connections_accepted == 2
        finally:
            link.close()
            await aio_link.close()


async def test_a_port_that_refuses_is_not_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    errors = await errors_of(address, PATIENCE_S)
    assert {type(error) for error in errors} == {ConnectFailedError}
    assert {str(error) for error in errors} == {f"{address}: not connected over gRPC: connection refused"}
    assert not any(map(was_silent, errors))


@pytest.mark.parametrize("is_watched", [False, True])
def test_a_call_that_waits_when_its_channel_is_closed_says_so(is_watched: bool) -> None:
    with held_server() as (held, address), ThreadPoolExecutor(1) as pool:
        link = GrpcLink(address)
        waiting = pool.submit(link.call, _methods.POP, (b"",), PATIENCE_S, False, (lambda: False) if is_watched else None)
        assert held.began.wait(PATIENCE_S)
        link.close()
        error = waiting.exception(PATIENCE_S)
        assert isinstance(error, ClosedError)
        assert not error.definite, "the server may have done it"
        for one_way in (False, True):
            with pytest.raises(ClosedError):
                link.call(_methods.POP, (b"",), PATIENCE_S, one_way)


async def test_a_coroutine_that_waits_when_its_channel_is_closed_hears_so() -> None:
    with held_server() as (held, address):
        link = AioGrpcLink(address)
        waiting = asyncio.ensure_future(link.call(_methods.POP, (b"",), PATIENCE_S, False))
        assert await asyncio.to_thread(held.began.wait, PATIENCE_S)
        await link.close()
        with pytest.raises(ClosedError) as caught:
            await waiting
        assert not caught.value.definite, "the server may have done it"


def one_way_numbers(caplog: pytest.LogCaptureFixture) -> int:
    """How many one-way calls have failed, by the log."""
    texts = [record.getMessage() for record in caplog.records]
    numbers = [text.partition(" one-way call")[0] for text in texts if " one-way call" in text]
    return sum(1 if number == "a" else int(number) for number in numbers)


@pytest.mark.parametrize("is_async", [False, True])
async def test_one_way_calls_that_a_close_cuts_off_are_all_counted(is_async: bool, caplog: pytest.LogCaptureFixture) -> None:
    with held_server() as (held, address):
        if is_async:
            aio_link = AioGrpcLink(address)
            for _ in range(5):
                await aio_link.call(_methods.SEND, [b""], PATIENCE_S, True)
            assert await asyncio.to_thread(held.began.wait, PATIENCE_S)
            await aio_link.close()
        else:
            link = GrpcLink(address)
            for _ in range(5):
                link.call(_methods.SEND, [b""], PATIENCE_S, True)
            assert held.began.wait(PATIENCE_S)
            link.close()
        assert one_way_numbers(caplog) == 5


def test_a_server_that_is_back_is_called_at_once(server: FakeServer) -> None:
    """gRPC makes calls fail for a second after it was refused."""
    with FakeGrpcFront(server) as front:
        link = GrpcLink(front.address)
        link.call(_methods.PING, (b"",), PATIENCE_S, False)
    try:
        # At first it may know only that the connection is lost.
        with suppress(ConnectionLostError, ConnectFailedError):
            link.call(_methods.PING, (b"",), PATIENCE_S, False)
        with pytest.raises(ConnectFailedError):
            link.call(_methods.PING, (b"",), PATIENCE_S, False)
        with FakeGrpcFront(server, front.port):
            assert link.call(_methods.PING, (b"",), PATIENCE_S, False) == b""
            wait_for(lambda: not link._left)
    finally:
        link.close()


async def test_a_server_that_is_back_is_called_by_coroutines_at_once(server: FakeServer) -> None:
    with FakeGrpcFront(server) as front:
        link = AioGrpcLink(front.address)
        await link.call(_methods.PING, (b"",), PATIENCE_S, False)
    try:
        with suppress(ConnectionLostError, ConnectFailedError):
            await link.call(_methods.PING, (b"",), PATIENCE_S, False)
        with pytest.raises(ConnectFailedError):
            await link.call(_methods.PING, (b"",), PATIENCE_S, False)
        with FakeGrpcFront(server, front.port):
            assert await link.call(_methods.PING, (b"",), PATIENCE_S, False) == b""
            assert not link._left
    finally:
        await link.close()
