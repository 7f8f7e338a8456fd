"""The servers' client of the remoting port, against a peer that answers byte for byte what a test says."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest

from protomq.v1 import options_pb2
from protomq.v1.remoting_pb2 import RemotingHello, RemotingWelcome
from protomq.wire import frames
from protomq.wire.status import RpcStatus, encode_status
from protomq_runtime import remoting_client
from protomq_runtime.addresses import Address
from protomq_runtime.errors import Code, ServiceError
from protomq_runtime.remoting_client import NotRemotingError, RemotingClient, WokenError

METHOD_ID = 0x0104
WELCOME = RemotingWelcome(server_name="s", frame_size_max_bytes=1 << 20).SerializeToString()


class Peer:
    """The accepted end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.hello: RemotingHello | None = None

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.connection.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def read_frame(self) -> tuple[frames.FrameHeader, bytes]:
        header = frames.decode_header(self.read(frames.HEADER_SIZE_BYTES))
        return header, self.read(
            header.length - frames.HEADER_SIZE_BYTES + frames.LENGTH_SIZE_BYTES
        )

    def welcome(self) -> None:
        assert self.read(len(frames.MAGIC)) == frames.MAGIC
        header, payload = self.read_frame()
        self.hello = RemotingHello.FromString(payload)
        self.answer(header.request_id, WELCOME, method_id=frames.HELLO_METHOD_ID)

    def answer(
        self, request_id: int, payload: bytes, status: int = 0, method_id: int = METHOD_ID
    ) -> None:
        self.connection.sendall(
            frames.encode_answer(request_id, method_id, len(payload), status) + payload
        )


@contextmanager
def peer_that(script: Callable[[Peer], None]) -> Iterator[Address]:
    """A listening socket whose first connection runs the script and is closed then."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            script(Peer(connection))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with listener:
        yield Address("127.0.0.1", listener.getsockname()[1])
        thread.join(60)
    assert not thread.is_alive()


def connect(address: Address) -> RemotingClient:
    return RemotingClient(address, options_pb2.LANE_ROUTE, "test", timeout_s=2)


def test_hello_names_lane_and_caller_and_the_welcome_is_kept() -> None:
    hellos = []

    def script(peer: Peer) -> None:
        peer.welcome()
        hellos.append(peer.hello)

    with peer_that(script) as address, connect(address) as client:
        assert client.welcome.server_name == "s"
    assert hellos == [RemotingHello(lane=options_pb2.LANE_ROUTE, client_id="test")]


def test_call_returns_the_payload_of_its_answer() -> None:
    def script(peer: Peer) -> None:
        peer.welcome()
        header, payload = peer.read_frame()
        assert (header.method_id, header.flags, header.timeout_ms) == (METHOD_ID, 0, 2_000)
        peer.answer(header.request_id, payload[::-1])

    with peer_that(script) as address, connect(address) as client:
        assert client.call(METHOD_ID, b"abc", 2) == b"cba"


def test_answers_in_another_order_and_in_small_pieces_find_their_requests() -> None:
    def script(peer: Peer) -> None:
        peer.welcome()
        held, _ = peer.read_frame()
        first, _ = peer.read_frame()
        second, _ = peer.read_frame()
        stream = b"".join(
            frames.encode_answer(header.request_id, METHOD_ID, 3) + payload
            for header, payload in ((second, b"two"), (first, b"one"), (held, b"end"))
        )
        for byte in stream:
            peer.connection.sendall(bytes((byte,)))

    with peer_that(script) as address, connect(address) as client:
        held = client.start(METHOD_ID, b"", 60)
        first = client.start(METHOD_ID, b"", 2)
        assert client.call(METHOD_ID, b"", 2) == b"two"
        answer = client.wait((first,), 2)
        assert answer is not None
        assert (answer.request_id, answer.unwrap()) == (first, b"one")
        answer = client.wait((held,), 2)
        assert answer is not None
        assert answer.unwrap() == b"end"


@pytest.mark.parametrize("piece", [1 << 10, 100_003, 1 << 22])
def test_large_answers_arrive_whole_whatever_they_are_cut_into(piece: int) -> None:
    large = [bytes(range(256)) * 1_000, b"x" * 300_000, b"y" * 70_000]

    def script(peer: Peer) -> None:
        peer.welcome()
        headers = [peer.read_frame()[0] for _ in range(4)]
        stream = b"".join(
            frames.encode_answer(header.request_id, METHOD_ID, len(payload)) + payload
            for header, payload in zip(headers, [*large, b"end"], strict=True)
        )
        for at in range(0, len(stream), piece):
            peer.connection.sendall(stream[at : at + piece])

    with peer_that(script) as address, connect(address) as client:
        ids = [client.start(METHOD_ID, b"", 60) for _ in range(4)]
        for request_id, payload in zip(reversed(ids), [b"end", *reversed(large)], strict=True):
            answer = client.wait((request_id,), 60)
            assert answer is not None
            assert answer.unwrap() == payload


def test_large_answers_are_received_in_lent_memory_but_not_over_one_that_nobody_has_taken() -> None:
    large = [b"x" * 300_000, b"y" * 200_000, b"z" * 250_000]
    memory, lent = bytearray(300_000), []

    def lend(size_bytes: int) -> memoryview:
        lent.append(size_bytes)
        return memoryview(memory)[:size_bytes]

    def script(peer: Peer) -> None:
        peer.welcome()
        for payload in large:
            header, _ = peer.read_frame()
            peer.answer(header.request_id, payload)

    with peer_that(script) as address, RemotingClient(
        address, options_pb2.LANE_ROUTE, "test", timeout_s=60, lend=lend
    ) as client:
        first, second = (client.start(METHOD_ID, b"", 60) for _ in range(2))
        answer = client.wait((second,), 60)
        assert answer is not None
        assert answer.octets == large[1]
        assert lent == [300_000], "the first answer, which waits there, would be lost"
        answer = client.wait((first,), 60)
        assert answer is not None
        assert isinstance(answer.octets, memoryview)
        assert answer.octets.obj is memory
        assert answer.unwrap() == large[0]
        third = client.ask(METHOD_ID, b"", 60)
        assert third.octets == large[2]
        assert lent == [300_000, 250_000]


@pytest.mark.parametrize("size_bytes", [1_000, 300_000])
def test_how_long_an_answer_took_to_come_counts_from_its_first_bytes(size_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may hold a call for long, and its answer come at once."""
    go_on, now_s = threading.Event(), [100.0]

    def script(peer: Peer) -> None:
        peer.welcome()
        header, _ = peer.read_frame()
        octets = frames.encode_answer(header.request_id, METHOD_ID, size_bytes) + bytes(size_bytes)
        peer.connection.sendall(octets[:500])
        assert go_on.wait(60)
        peer.connection.sendall(octets[500:])
        header, _ = peer.read_frame()
        peer.answer(header.request_id, b"at once")

    with peer_that(script) as address, connect(address) as client:
        monkeypatch.setattr(remoting_client, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
        request_id, count = client.start(METHOD_ID, b"", 60), client.received_count
        now_s[0] += 50
        while client.received_count == count:
            assert client.wait((request_id,), 0.0) is None
        now_s[0] += 7
        go_on.set()
        answer = client.wait((request_id,), 60)
        assert answer is not None
        assert (len(answer.octets), answer.took_s) == (size_bytes, 7)
        assert client.received_count >= count + 2
        assert client.ask(METHOD_ID, b"", 60).took_s == 0


def test_what_is_told_wants_no_answer() -> None:
    heard: list[tuple[frames.FrameHeader, bytes]] = []

    def script(peer: Peer) -> None:
        peer.welcome()
        heard.append(peer.read_frame())
        header, _ = peer.read_frame()
        peer.answer(header.request_id, b"asked")

    with peer_that(script) as address, connect(address) as client:
        client.tell(METHOD_ID, b"told", 60)
        assert client.call(METHOD_ID, b"", 60) == b"asked"
    ((header, payload),) = heard
    assert (header.method_id, header.flags, payload) == (METHOD_ID, frames.FLAG_ONE_WAY, b"told")


def test_connection_that_closes_within_a_large_answer_ends_the_wait() -> None:
    def script(peer: Peer) -> None:
        peer.welcome()
        header, _ = peer.read_frame()
        peer.connection.sendall(frames.encode_answer(header.request_id, METHOD_ID, 1 << 20) + bytes(100_000))

    with peer_that(script) as address, connect(address) as client:
        request_id = client.start(METHOD_ID, b"", 60)
        with pytest.raises(ConnectionResetError):
            client.wait((request_id,), 60)


def test_error_answer_is_raised_with_its_reason() -> None:
    status = RpcStatus(5, "no such thing", "BROKER_NOT_FOUND", {"k": "v"})

    def script(peer: Peer) -> None:
        peer.welcome()
        header, _ = peer.read_frame()
        peer.answer(header.request_id, encode_status(status), status=5)

    with peer_that(script) as address, connect(address) as client:
        with pytest.raises(ServiceError, match="no such thing") as error:
            client.call(METHOD_ID, b"", 2)
    assert (error.value.code, error.value.reason) == (Code.NOT_FOUND, "BROKER_NOT_FOUND")
    assert error.value.metadata == {"k": "v", "definite": "true"}


@pytest.mark.parametrize(
    "greeting",
    [
        bytes.fromhex("000000040000000000"),
        bytes.fromhex("00001204000000000000030000006400040000ffff000600004000"),
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"",
    ],
    ids=["empty HTTP/2 settings", "HTTP/2 settings", "HTTP/1.1", "closed at once"],
)
def test_peer_that_speaks_something_else_is_recognised(greeting: bytes) -> None:
    with peer_that(lambda peer: peer.connection.sendall(greeting)) as address:
        with pytest.raises(NotRemotingError):
            connect(address)


def test_request_frame_from_a_server_is_refused() -> None:
    def script(peer: Peer) -> None:
        peer.connection.sendall(frames.encode_request(1, 7, 0))

    with peer_that(script) as address, pytest.raises(NotRemotingError):
        connect(address)


def test_closed_connection_ends_a_wait_with_an_error() -> None:
    def script(peer: Peer) -> None:
        peer.welcome()
        peer.read_frame()

    with peer_that(script) as address, connect(address) as client:
        held = client.start(METHOD_ID, b"", 60)
        with pytest.raises(ConnectionResetError):
            client.wait((held,), 5)


def test_wake_from_another_thread_ends_a_wait() -> None:
    done = threading.Event()

    def script(peer: Peer) -> None:
        peer.welcome()
        done.wait(60)

    with peer_that(script) as address, connect(address) as client:
        threading.Timer(0.01, client.wake).start()
        assert client.wait((), 5) is None
        client.wake()
        assert client.wait((), 5) is None, "a wake before the wait counts"
        assert client.wait((), 0) is None
        done.set()
    client.wake()


def test_wake_ends_a_call_that_is_made_until_then() -> None:
    done = threading.Event()

    def script(peer: Peer) -> None:
        peer.welcome()
        done.wait(60)

    with peer_that(script) as address, connect(address) as client:
        client.wake()
        with pytest.raises(WokenError, match="not waited for any more"):
            client.call(METHOD_ID, b"", 60, until_woken=True)
        client.wake()
        with pytest.raises(TimeoutError, match="did not answer"):
            client.call(METHOD_ID, b"", 0.02)
        done.set()


def test_silent_peer_ends_a_call_with_a_time_out() -> None:
    done = threading.Event()

    def script(peer: Peer) -> None:
        peer.welcome()
        done.wait(60)

    with peer_that(script) as address, connect(address) as client:
        with pytest.raises(TimeoutError, match="did not answer"):
            client.call(METHOD_ID, b"", 0.02)
        done.set()


class _SlowLink:
    """What `ask` needs of a client: with each wait, which takes its whole time, a piece of the answer comes, `pieces` in all."""

    def __init__(self, pieces: int, *, is_whole: bool) -> None:
        self.address, self.pieces, self.is_whole = Address("far", 1), pieces, is_whole
        self.now_s = 0.0
        self.received_count, self.is_woken = 7, False

    def start(self, method_id: int, payload: bytes, timeout_s: float) -> int:
        return 1

    def wait(self, request_ids: tuple[int, ...], timeout_s: float) -> str | None:
        assert timeout_s > 0
        self.now_s += timeout_s
        if not self.pieces:
            return "answer" if self.is_whole else None
        self.pieces -= 1
        self.received_count += 1
        return None


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("pieces", [0, 1, 30])
def test_an_answer_of_which_more_comes_is_not_late(pieces: int, is_whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slave behind a slow link asks for 64 KiB first. It got nothing, for ever, where these needed more than 2 s."""
    link = _SlowLink(pieces, is_whole=is_whole)
    monkeypatch.setattr(remoting_client, "time", SimpleNamespace(monotonic=lambda: link.now_s))
    ask = partial(RemotingClient.ask, link, METHOD_ID, b"", 2.0)  # type: ignore[arg-type]
    if is_whole:
        answer: object = ask()
        assert answer == "answer"
    else:
        with pytest.raises(TimeoutError, match="did not answer within 2 s"):
            ask()
    assert link.now_s == 2.0 * (pieces + 1)


def test_wake_ends_a_hello_that_is_not_answered() -> None:
    clients: list[RemotingClient] = []
    is_over = threading.Event()

    def script(peer: Peer) -> None:
        peer.read(len(frames.MAGIC))
        clients[0].wake()
        assert is_over.wait(60)

    with peer_that(script) as address:
        try:
            with pytest.raises(WokenError):
                RemotingClient(address, options_pb2.LANE_ROUTE, "test", timeout_s=60, on_connecting=clients.append)
        finally:
            is_over.set()


def test_wake_ends_a_connection_that_is_not_taken() -> None:
    """As where a host is gone. A listener whose queue is full answers nothing either."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, socket.socket() as first, socket.socket() as second:
        for each in (first, second):
            each.setblocking(False)
            each.connect_ex(listener.getsockname())
        with pytest.raises(WokenError):
            RemotingClient(
                Address(*listener.getsockname()), options_pb2.LANE_ROUTE, "test", timeout_s=60, on_connecting=RemotingClient.wake
            )
        with pytest.raises(TimeoutError):
            RemotingClient(Address(*listener.getsockname()), options_pb2.LANE_ROUTE, "test", timeout_s=0.01)


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address(*listener.getsockname())
    with pytest.raises(ConnectionRefusedError):
        connect(address)
