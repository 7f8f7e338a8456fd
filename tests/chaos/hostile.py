"""A hostile client: bytes that no honest client sends, at both ports, by seed.

Each attack is a function that gets an `Enemy`; the enemy writes down the status of every answer it gets. What must hold afterwards: the
broker lives, honest traffic went on, its memory is bounded, and no answer is UNKNOWN or INTERNAL (I1).
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

import grpc

from protomq import Producer
from protomq.v1.options_pb2 import LANE_ADMIN, LANE_CONSUMER, LANE_PULL, LANE_SEND, Lane
from protomq.v1.pull_service_pb2 import PullRequest
from protomq.v1.remoting_pb2 import RemotingHello
from protomq.wire.frames import HEADER, HEADER_SIZE_BYTES, MAGIC, decode_header, encode_request

TOPIC: Final = "enemy"
"""A topic of its own: what the enemy stores is stored, and nobody honest reads it."""
SEND, PULL = 0x0201, 0x0301
METHODS: Final = (
    SEND,
    PULL,
    0x0101,
    0x0104,
    0x0401,
    0x0402,
    0x0403,
    0x0501,
    0x0502,
    0x0503,
    0x0505,
    0x0507,
    0x0508,
    0,
    1,
    0xFFFF,
)
PATHS: Final = (
    "/protomq.v1.SendService/Send", "/protomq.v1.PullService/Pull", "/protomq.v1.ConsumerService/CommitOffsets",
    "/protomq.v1.AdminService/CreateTopic", "/protomq.v1.RouteService/GetRoute", "/protomq.v1.RouteService/RegisterBroker",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.health.v1.Health/Check", "/no.such.Service/Method",
)  # fmt: skip
STATUSES_ALLOWED: Final = frozenset(
    {
        0, grpc.StatusCode.INVALID_ARGUMENT.value[0], grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], grpc.StatusCode.UNAUTHENTICATED.value[0],
        grpc.StatusCode.PERMISSION_DENIED.value[0], grpc.StatusCode.UNIMPLEMENTED.value[0], grpc.StatusCode.OUT_OF_RANGE.value[0],
        grpc.StatusCode.NOT_FOUND.value[0], grpc.StatusCode.FAILED_PRECONDITION.value[0], grpc.StatusCode.DEADLINE_EXCEEDED.value[0],
        grpc.StatusCode.ALREADY_EXISTS.value[0],
    }
)  # fmt: skip


class Enemy:
    """Where to strike, with what randomness, and what came back."""

    def __init__(self, remoting: str, grpc_address: str, seed: int) -> None:
        host, _, port = remoting.rpartition(":")
        self.remoting = (host, int(port))
        self.grpc_address = grpc_address
        self.rng = random.Random(seed)
        self.statuses: Counter[int] = Counter()
        self.closed = 0

    @contextlib.contextmanager
    def connection(self, lane: Lane.ValueType | None = None) -> Iterator[socket.socket]:
        """A TCP connection to the remoting port; with a hello if a lane is given."""
        connection = socket.create_connection(self.remoting, 5.0)
        try:
            connection.settimeout(3.0)
            if lane is not None:
                hello = RemotingHello(lane=lane, client_id="enemy").SerializeToString()
                connection.sendall(MAGIC + encode_request(1, 0, len(hello), 3000) + hello)
                self.read_answer(connection)
            yield connection
        finally:
            connection.close()

    def read_answer(self, connection: socket.socket) -> int | None:
        """Reads a frame, notes its status; None if the connection was closed."""
        head = _receive(connection, HEADER_SIZE_BYTES)
        if head is None:
            self.closed += 1
            return None
        header = decode_header(head)
        if _receive(connection, header.length - 12) is None:
            self.closed += 1
            return None
        self.statuses[header.status] += 1
        return header.status

    def ask(self, connection: socket.socket, method: int, payload: bytes) -> int | None:
        """One request and its answer."""
        try:
            connection.sendall(encode_request(2, method, len(payload), 2000) + payload)
            return self.read_answer(connection)
        except OSError:
            self.closed += 1
            return None


def _receive(connection: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        try:
            part = connection.recv(min(size - len(parts), 1 << 20))
        except OSError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)


def noise_without_magic(enemy: Enemy) -> None:
    """Random bytes, HTTP, TLS, half a magic."""
    for start in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        MAGIC[:2],
        MAGIC[:3] + b"\x02",
    ):
        with enemy.connection() as connection, contextlib.suppress(OSError):
            connection.sendall(start + enemy.rng.randbytes(enemy.rng.choice((0, 1, 100, 100_000))))
            connection.shutdown(socket.SHUT_WR)
            _receive(connection, 1)


def broken_frames(enemy: Enemy) -> None:
    """Lengths that lie, before and behind the hello."""
    rng = enemy.rng
    for lane in (None, LANE_SEND, LANE_PULL, LANE_ADMIN):
        for length in (0, 1, 11, 12, 13, 0x7FFFFFFF, 0xFFFFFFFF, 33 << 20):
            with enemy.connection(lane) as connection, contextlib.suppress(OSError):
                if lane is None:
                    connection.sendall(MAGIC)
                header = HEADER.pack(
                    length,
                    rng.getrandbits(32),
                    rng.choice(METHODS),
                    rng.getrandbits(8),
                    rng.getrandbits(8),
                    rng.getrandbits(32),
                )
                connection.sendall(header + rng.randbytes(rng.choice((0, 5, 200))))
                connection.shutdown(socket.SHUT_WR)
                enemy.read_answer(connection)


def noise_in_payloads(enemy: Enemy) -> None:
    """Whole frames of every method with bytes that are no message, or a little wrong."""
    rng = enemy.rng
    good = PullRequest(topic=TOPIC, queue_id=1, queue_offset=0).SerializeToString()
    for lane in (LANE_SEND, LANE_PULL, LANE_CONSUMER, LANE_ADMIN):
        with enemy.connection(lane) as connection:
            for method in METHODS[:-3]:
                for size in (0, 1, 7, 300):
                    payload = rng.randbytes(size) if rng.random() < 0.6 else _mutated(good, rng)
                    if enemy.ask(connection, method, payload) is None:
                        break
                else:
                    continue
                break


def _mutated(data: bytes, rng: random.Random) -> bytes:
    content = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        content[rng.randrange(len(content))] = rng.getrandbits(8)
    return bytes(content)


def wild_numbers(enemy: Enemy) -> None:
    """Requests that parse and make no sense."""
    wild = (-1, 0, 1, 2**31 - 1, 2**62, -(2**62))
    with enemy.connection(LANE_PULL) as connection:
        for value in wild:
            small = max(-(2**31), min(value, 2**31 - 1))
            for request in (
                PullRequest(topic=TOPIC, queue_id=small),
                PullRequest(topic=TOPIC, queue_offset=value),
                PullRequest(topic=TOPIC, record_count_max=small),
                PullRequest(topic=TOPIC, size_max_bytes=value),
                PullRequest(topic=TOPIC, tags=["t"] * 5000),
                PullRequest(topic="x" * 100_000),
                PullRequest(topic="../../etc/passwd"),
                PullRequest(topic=TOPIC, consumer_group="g" * 70_000, commit_offset=value),
            ):
                enemy.ask(connection, PULL, request.SerializeToString())


def deep_nesting(enemy: Enemy) -> None:
    """Groups in groups in records, and length-delimited fields in each other."""
    tail = b"\x22" + bytes((len(TOPIC),)) + TOPIC.encode()
    with enemy.connection(LANE_SEND) as connection:
        for depth in (50, 98, 99, 100, 101, 1000, 100_000):
            groups = b"\xa3\x06" * depth + b"\xa4\x06" * depth
            record = b"\x0a\x01x" + groups
            enemy.ask(connection, SEND, b"\x0a" + _varint(len(record)) + record + tail)
            enemy.ask(connection, SEND, b"\xa3\x06" * depth)
            nested = b""
            for _ in range(min(depth, 1000)):
                nested = b"\x2a" + _varint(len(nested)) + nested
            enemy.ask(connection, SEND, b"\x0a" + _varint(len(nested)) + nested + tail)


def memory_bombs(enemy: Enemy) -> None:
    """Few bytes that become many objects, and requests up to the limit of a frame."""
    tail = b"\x22" + bytes((len(TOPIC),)) + TOPIC.encode()
    bombs = (
        b"\x0a\x00" * (2 << 20) + tail,  # empty records
        b"\x0a\x02\x0a\x00" * (1 << 20) + tail,
        (b"\x0a\x04" + b"\x12\x00" * 2) * 300_000 + tail,  # empty keys
        tail
        + b"\x32"
        + _varint(4 << 20)
        + b"\x01\x00\x00\x00" * (1 << 20),  # a million sizes for no records
        tail + b"\x9a\x06\x00" * (1 << 20),  # unknown fields
        bytes(8 << 20),
    )
    for bomb in bombs:
        with enemy.connection(LANE_SEND) as connection:
            enemy.ask(connection, SEND, bomb)
    with enemy.connection(LANE_PULL) as connection:
        enemy.ask(
            connection,
            PULL,
            b"\x3a\x00" * (2 << 20) + b"\x0a" + bytes((len(TOPIC),)) + TOPIC.encode(),
        )
    with enemy.connection(LANE_CONSUMER) as connection:
        enemy.ask(connection, 0x0401, b"\x12\x00" * (2 << 20))
        enemy.ask(connection, 0x0403, b"\x0a\x01t" + b"\x10\x00" * (2 << 20))


def lying_sizes(enemy: Enemy) -> None:
    """`record_sizes` that do not fit the records."""
    rng = enemy.rng
    record = b"\x0a\x05hello"
    tail = b"\x22" + bytes((len(TOPIC),)) + TOPIC.encode()
    with enemy.connection(LANE_SEND) as connection:
        for _ in range(60):
            count = rng.randrange(1, 60)
            records = (b"\x0a" + bytes((len(record),)) + record) * count
            sizes = [
                rng.choice((len(record), 0, 1, rng.getrandbits(32), len(record) + 1))
                for _ in range(rng.choice((count, count, 1, 200)))
            ]
            packed = struct.pack(f"<{len(sizes)}I", *sizes)
            enemy.ask(connection, SEND, records + tail + b"\x32" + _varint(len(packed)) + packed)


def silent_connections(enemy: Enemy) -> None:
    """Connections that say nothing, and some that say half a hello, one byte at a time."""
    connections = [socket.create_connection(enemy.remoting, 5.0) for _ in range(150)]
    host, _, port = enemy.grpc_address.rpartition(":")
    connections += [socket.create_connection((host, int(port)), 5.0) for _ in range(50)]
    hello = RemotingHello(lane=LANE_PULL).SerializeToString()
    frame = MAGIC + encode_request(1, 0, len(hello)) + hello
    try:
        for index in range(len(frame) - 1):
            for connection in connections[:20]:
                with contextlib.suppress(OSError):
                    connection.send(frame[index : index + 1])
            time.sleep(0.02)
    finally:
        for connection in connections:
            connection.close()


def slow_readers(enemy: Enemy) -> None:
    """Many large pulls on many connections, and nobody reads the answers."""
    request = PullRequest(
        topic=TOPIC, queue_id=0, record_count_max=32_768, size_max_bytes=16 << 20
    ).SerializeToString()
    frames = b"".join(
        encode_request(number, PULL, len(request), 0) + request for number in range(50)
    )
    with contextlib.ExitStack() as stack:
        for _ in range(24):
            connection = stack.enter_context(enemy.connection(LANE_PULL))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(0.2)
            with contextlib.suppress(OSError):
                connection.sendall(frames)
        time.sleep(1.0)


def slow_writer(enemy: Enemy) -> None:
    """A large frame that comes in drops, on many connections, and never ends."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(enemy.connection(LANE_SEND)) for _ in range(40)]
        for connection in connections:
            connection.sendall(encode_request(1, SEND, 4 << 20))
        for _ in range(20):
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.sendall(enemy.rng.randbytes(2000))
            time.sleep(0.02)


def grpc_slow_readers(enemy: Enemy) -> None:
    """Many large pulls over gRPC by clients whose HTTP/2 window is 0: their answers are never sent. Others are served meanwhile."""
    host, port = enemy.remoting
    # Noise gets no smaller: to try is most of what these sends cost.
    with Producer(namesrv=f"{host}:{port}", compression="none") as producer:
        for _ in range(24):
            producer.send_batch(TOPIC, [enemy.rng.randbytes(64_000) for _ in range(8)])
    payloads = [
        PullRequest(
            topic=TOPIC, queue_id=queue, record_count_max=32_768, size_max_bytes=16 << 20
        ).SerializeToString()
        for queue in range(4)
    ]
    grpc_host, _, grpc_port = enemy.grpc_address.rpartition(":")
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            connection = stack.enter_context(
                socket.create_connection((grpc_host, int(grpc_port)), 5.0)
            )
            connection.sendall(
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _http2(4, 0, 0, b"\0\4\0\0\0\0")
            )
            for number in range(24):
                connection.sendall(_http2_call(2 * number + 1, PATHS[1], payloads[number % 4]))
        time.sleep(1.5)  # Nothing tells when the broker has made what it makes of these.
        with grpc.insecure_channel(
            enemy.grpc_address, options=[("grpc.max_receive_message_length", -1)]
        ) as channel:
            before = sum(enemy.statuses.values()) - enemy.statuses[0]
            for payload in payloads * 3:
                _grpc_call(enemy, channel, PATHS[1], payload)
            assert sum(enemy.statuses.values()) - enemy.statuses[0] == before, (
                "an honest pull failed"
            )


def _http2(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _http2_call(stream: int, path: str, payload: bytes) -> bytes:
    """A whole gRPC request: its headers, none of them compressed, and its message."""
    headers = b"\x83\x86"  # POST, http
    for name, value in (
        (":path", path),
        (":authority", "enemy"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ):
        headers += b"\0" + bytes((len(name),)) + name.encode()
        headers += bytes((len(value),)) + value.encode()
    message = b"\0" + struct.pack(">I", len(payload)) + payload
    return _http2(1, 4, stream, headers) + _http2(0, 1, stream, message)


def grpc_noise(enemy: Enemy) -> None:
    """Whatever is no HTTP/2 at the gRPC port, or begins like it."""
    host, _, port = enemy.grpc_address.rpartition(":")
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for start in (
        b"",
        preface,
        preface + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00",
        b"GET / HTTP/1.1\r\n\r\n",
        MAGIC,
    ):
        with (
            socket.create_connection((host, int(port)), 5.0) as connection,
            contextlib.suppress(OSError),
        ):
            connection.settimeout(0.3)
            connection.sendall(start + enemy.rng.randbytes(enemy.rng.choice((1, 500, 50_000))))
            connection.recv(100)


def grpc_calls(enemy: Enemy) -> None:
    """Calls with payloads that are no messages, too large, bombs, compressed bombs; metadata beyond the limit."""
    rng = enemy.rng
    options = [("grpc.max_send_message_length", -1), ("grpc.max_metadata_size", 1 << 20)]
    with grpc.insecure_channel(enemy.grpc_address, options=options) as channel:
        for path in PATHS:
            streaming = "Reflection" in path
            for payload in (
                b"",
                rng.randbytes(50),
                b"\x0a\x00" * (1 << 20),
                bytes(6 << 20),
                b"\xa3\x06" * 200,
            ):
                _grpc_call(enemy, channel, path, payload, streaming=streaming)
        _grpc_call(enemy, channel, PATHS[0], bytes(64 << 20), compression=grpc.Compression.Gzip)
        _grpc_call(enemy, channel, PATHS[1], b"", metadata=(("x-large", "y" * 100_000),))
        _grpc_call(
            enemy,
            channel,
            PATHS[1],
            b"",
            metadata=tuple((f"x-{number}", "y") for number in range(500)),
        )


def _grpc_call(
    enemy: Enemy,
    channel: grpc.Channel,
    path: str,
    payload: bytes,
    *,
    streaming: bool = False,
    compression: grpc.Compression | None = None,
    metadata: tuple[tuple[str, str], ...] = (),
) -> None:
    try:
        if streaming:
            stream: Any = channel.stream_stream(path)
            list(stream(iter([payload]), timeout=3.0))
        else:
            unary: Any = channel.unary_unary(path)
            unary(payload, timeout=3.0, compression=compression, metadata=metadata)
    except grpc.RpcError as error:
        enemy.statuses[error.code().value[0]] += 1
    else:
        enemy.statuses[0] += 1


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


ATTACKS: Final[tuple[Callable[[Enemy], None], ...]] = (
    noise_without_magic, broken_frames, noise_in_payloads, wild_numbers, deep_nesting, memory_bombs, lying_sizes, silent_connections,
    slow_readers, slow_writer, grpc_noise, grpc_calls, grpc_slow_readers,
)  # fmt: skip
