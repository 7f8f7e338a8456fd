"""One contract over both transports: the same services, the same calls, the same answers and errors.

`remoting` calls on a connection of the service's own lane, `foreign` on a connection of another lane, `grpc` by gRPC.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from protomq.v1 import (
    admin_service_pb2,
    options_pb2,
    pull_service_pb2,
    route_service_pb2,
    send_service_pb2,
)
from protomq.v1.remoting_pb2 import RemotingHello
from protomq.wire.frames import (
    HEADER_SIZE_BYTES,
    MAGIC,
    decode_header,
    encode_answer,
    encode_request,
)
from protomq.wire.record import encode_varint
from protomq.wire.status import GRPC_STATUS_DETAILS_KEY, decode_status
from protomq_runtime import remoting_server, telemetry
from protomq_runtime.addresses import Address
from protomq_runtime.admission import AdmissionConfig
from protomq_runtime.connection import FOREIGN_SIZE_MAX_BYTES
from protomq_runtime.connection_limits import ConnectionLimits
from protomq_runtime.errors import Code
from protomq_runtime.framing import LARGE_STEP_BYTES
from protomq_runtime.remoting_client import RemotingClient
from protomq_runtime.server import LaneConfig, Server
from tests.integration.echo_services import Services
from tests.integration.transport_callers import (
    Caller,
    CallFailed,
    GrpcCaller,
    RemotingCaller,
    hello,
    read_answer,
)
from tests.support.waiting import async_wait_for

SEND = "/protomq.v1.SendService/Send"
PULL = "/protomq.v1.PullService/Pull"
PING = "/protomq.v1.AdminService/Ping"
DESCRIBE = "/protomq.v1.AdminService/DescribeTopic"
LIST = "/protomq.v1.AdminService/ListTopics"
FILE_SIZE_BYTES = 3 << 20


@pytest.fixture(scope="session")
def file_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("regions") / "file"
    path.write_bytes(random.Random(1).randbytes(FILE_SIZE_BYTES))
    return path


@pytest.fixture
async def services(file_path: Path) -> AsyncIterator[Services]:
    made = Services(file_path)
    yield made
    made.pull.file.close()


@pytest.fixture
async def server(services: Services) -> AsyncIterator[Server]:
    made = Server(
        services.table,
        name="echo",
        version="1",
        lanes={"send": LaneConfig(1, AdmissionConfig(depth_max=20, queue_time_target_ms=0))},
    )
    await made.start()
    yield made
    await made.stop(1)


@pytest.fixture(params=["remoting", "foreign", "grpc"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def connect(server: Server, transport: str, path: str) -> Caller:
    if transport == "grpc":
        return GrpcCaller(server.grpc_port)
    lane = server.table.by_path[path].method.lane
    if transport == "foreign":
        lane = "pull" if lane == "admin" else "admin"
    return await RemotingCaller.connect(
        server.table, server.remoting_port, options_pb2.Lane.Value(f"LANE_{lane.upper()}")
    )


@pytest.fixture
async def callers(server: Server, transport: str) -> AsyncIterator[dict[str, Caller]]:
    made = {path: await connect(server, transport, path) for path in (SEND, PULL, DESCRIBE)}
    yield made
    for caller in made.values():
        await caller.close()


def pull_request(**fields: object) -> bytes:
    return pull_service_pb2.PullRequest(**fields).SerializeToString()  # type: ignore[arg-type]


def describe_request(topic: str) -> bytes:
    return admin_service_pb2.DescribeTopicRequest(topic=topic).SerializeToString()


async def status_of(call: Awaitable[bytes]) -> tuple[int, str]:
    with pytest.raises(CallFailed) as caught:
        await call
    return caught.value.status.code, caught.value.status.reason


# What a service sees and answers.


async def test_a_plain_method_answers_and_knows_its_caller(callers):
    answer = await callers[DESCRIBE].call(DESCRIBE, describe_request("flights"))
    name, peer, has_deadline = admin_service_pb2.DescribeTopicResponse.FromString(
        answer
    ).topic.name.split()
    assert name == "flights"
    assert peer.startswith("127.0.0.1:")
    assert has_deadline == "True"


async def test_an_empty_request_and_an_empty_answer_pass(callers):
    assert await callers[DESCRIBE].call(PING, b"") == b""


async def test_drained_calls_are_each_answered(callers):
    requests = [
        send_service_pb2.SendRequest(topic="t" * length).SerializeToString() for length in range(10)
    ]
    answers = await asyncio.gather(*(callers[SEND].call(SEND, request) for request in requests))
    offsets = [send_service_pb2.SendResponse.FromString(answer).queue_offset for answer in answers]
    assert offsets == list(range(10))


@pytest.mark.parametrize("size", [1, 1000, 31_000, 40_000, 300_000, 2_500_000])
async def test_requests_of_all_sizes_arrive_as_they_were_sent(callers, size):
    request = send_service_pb2.SendRequest(topic="t" * size).SerializeToString()
    answer = send_service_pb2.SendResponse.FromString(await callers[SEND].call(SEND, request))
    assert answer.queue_offset == size


async def test_large_payloads_of_the_remoting_port_can_be_written_to(callers, services, transport):
    await callers[SEND].call(
        SEND, send_service_pb2.SendRequest(topic="t" * 40_000).SerializeToString()
    )
    assert services.send.payload_types == {bytes if transport == "grpc" else bytearray}


@pytest.mark.parametrize(
    ("offset", "size"), [(0, 0), (7, 100), (5, 40_000), (1, FILE_SIZE_BYTES - 1)]
)
async def test_an_answer_ends_with_the_bytes_of_its_region(callers, file_path, offset, size):
    answer = await callers[PULL].call(PULL, pull_request(queue_offset=offset, size_max_bytes=size))
    header = pull_service_pb2.PullResponse(
        status=pull_service_pb2.PULL_STATUS_FOUND, regions_size_bytes=size
    ).SerializeToString()
    assert answer == header + file_path.read_bytes()[offset : offset + size]


@pytest.mark.parametrize(("count", "size"), [(3, 10), (2000, 100), (60, 9000), (20, 70_000)])
async def test_scattered_regions_are_joined_and_what_lies_between_is_left_out(
    callers, file_path, count, size
):
    answer = await callers[PULL].call(
        PULL,
        pull_request(topic="scatter", queue_offset=3, size_max_bytes=size, record_count_max=count),
    )
    data = file_path.read_bytes()
    expected = b"".join(
        data[3 + index * 2 * size : 3 + index * 2 * size + size] for index in range(count)
    )
    assert answer.endswith(expected)
    assert len(answer) < len(expected) + 20


@pytest.mark.parametrize("size", [100, 200_000])
async def test_the_span_of_a_grpc_call_tells_whether_its_regions_could_be_read(services, size):
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry.instrument(services.table, provider.get_tracer("test"))
    server = Server(services.table, name="echo", version="1")
    await server.start()
    caller = GrpcCaller(server.grpc_port)
    try:
        await caller.call(PULL, pull_request(queue_offset=0, size_max_bytes=size))
        beyond = pull_request(queue_offset=FILE_SIZE_BYTES - size + 1, size_max_bytes=size)
        assert await status_of(caller.call(PULL, beyond)) == (Code.DATA_LOSS, "CORRUPT_LOG")
    finally:
        await caller.close()
        await server.stop(1)
    codes = [
        (span.attributes or {})["rpc.grpc.status_code"] for span in exporter.get_finished_spans()
    ]
    assert codes == [Code.OK, Code.DATA_LOSS]


async def test_many_pulls_at_once_are_answered_in_full(callers, file_path):
    data = file_path.read_bytes()
    requests = [(offset, 200_000 - offset) for offset in range(0, 100_000, 5_000)]
    answers = await asyncio.gather(
        *(
            callers[PULL].call(PULL, pull_request(queue_offset=at, size_max_bytes=size))
            for at, size in requests
        )
    )
    for answer, (offset, size) in zip(answers, requests, strict=True):
        assert answer.endswith(data[offset : offset + size])


async def test_large_answers_from_memory_pass(callers):
    answers = await asyncio.gather(
        *(
            callers[DESCRIBE].call(
                LIST, admin_service_pb2.ListTopicsRequest(page_size=2).SerializeToString()
            )
            for _ in range(5)
        )
    )
    assert {
        len(admin_service_pb2.ListTopicsResponse.FromString(answer).next_page_token)
        for answer in answers
    } == {2 << 20}


# Errors.


async def test_an_error_comes_with_reason_and_details(callers):
    with pytest.raises(CallFailed) as caught:
        await callers[DESCRIBE].call(DESCRIBE, describe_request(""))
    status = caught.value.status
    assert (status.code, status.reason) == (Code.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    assert status.field_violations == (("topic", "is empty"),)
    with pytest.raises(CallFailed) as caught:
        await callers[DESCRIBE].call(DESCRIBE, describe_request("missing"))
    assert (caught.value.status.reason, caught.value.status.metadata) == (
        "TOPIC_NOT_FOUND",
        {"topic": "missing", "definite": "true"},
    )


async def test_a_request_that_does_not_parse_is_an_invalid_argument(callers):
    assert await status_of(callers[DESCRIBE].call(DESCRIBE, b"\xff\xff")) == (3, "INVALID_ARGUMENT")


@pytest.mark.parametrize(
    ("path", "request_bytes"),
    [
        (DESCRIBE, describe_request("defect")),
        (PULL, pull_request(topic="defect")),
        (SEND, send_service_pb2.SendRequest(topic="defect").SerializeToString()),
    ],
)
async def test_a_defect_is_internal_and_its_trace_stays_in_the_log(
    callers, caplog, path, request_bytes
):
    with pytest.raises(CallFailed) as caught:
        await callers[path].call(path, request_bytes)
    assert (caught.value.status.code, caught.value.status.reason) == (Code.INTERNAL, "INTERNAL")
    assert "secret" not in str(caught.value.status)
    assert "RuntimeError" in caplog.text
    assert await callers[DESCRIBE].call(PING, b"") == b""


async def test_a_second_answer_is_a_defect_that_is_logged_and_harms_nobody(callers, caplog):
    assert await callers[PULL].call(PULL, pull_request(topic="twice")) == b""
    assert await callers[PULL].call(PULL, pull_request(size_max_bytes=1)) != b""
    assert "a call is answered once" in caplog.text


async def test_a_full_queue_refuses_what_is_too_much_and_serves_the_rest(
    callers, services, server, transport
):
    services.send.gate = threading.Event()
    first = asyncio.create_task(callers[SEND].call(SEND, b""))
    await async_wait_for(lambda: server.pools["send"].status().calls or services.send.waiting)
    calls = [asyncio.create_task(callers[SEND].call(SEND, b"")) for _ in range(60)]
    # The last ones to pass wait in the socket (of the lane itself) or on the queue (of everybody else).
    await async_wait_for(
        lambda: transport == "remoting" or len([call for call in calls if call.done()]) == 40
    )
    services.send.gate.set()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    refusals = [answer.status for answer in answers if isinstance(answer, CallFailed)]
    assert sum(isinstance(answer, bytes) for answer in answers) == (
        60 if transport == "remoting" else 20
    )
    if transport != "remoting":
        assert {(refusal.code, refusal.reason) for refusal in refusals} == {
            (Code.RESOURCE_EXHAUSTED, "SYSTEM_BUSY")
        }
        assert all(refusal.retry_delay_ms for refusal in refusals)
        assert server.pools["send"].status().rejections == 40
    assert await first != b""


async def test_a_group_that_grows_too_large_is_handed_over_early(callers, services, monkeypatch):
    monkeypatch.setattr("protomq_runtime.lane_calls.DRAINED_COUNT_MAX", 7)
    monkeypatch.setattr("protomq_runtime.lane_calls.DRAINED_SIZE_MAX_BYTES", 100_000)
    for _ in range(5):
        await asyncio.gather(*(callers[SEND].call(SEND, b"") for _ in range(20)))
    request = send_service_pb2.SendRequest(topic="t" * 40_000).SerializeToString()
    await asyncio.gather(*(callers[SEND].call(SEND, request) for _ in range(20)))
    assert sum(services.send.groups) == 120
    assert max(services.send.groups) <= 7


class Overload:
    """A queue-time rule that finds every call too old."""

    overloaded = True
    shed_after = -1.0

    def observe(self, now: float, waited: float) -> None:
        pass

    def queue_time_us(self, now: float) -> int:
        return 1


@pytest.mark.parametrize("path", [SEND, PULL, PING])
async def test_an_overloaded_lane_refuses_before_it_parses(callers, server, path):
    pool = server.pools[server.table.by_path[path].method.lane]
    pool.lanes[0]._calls.rule = Overload()
    caller = callers[DESCRIBE if path == PING else path]
    assert await status_of(caller.call(path, b"\xff\xff")) == (
        Code.RESOURCE_EXHAUSTED,
        "SYSTEM_BUSY",
    )
    assert pool.status().rejections == 1


async def test_a_call_whose_deadline_has_passed_is_not_started(callers, services, transport):
    services.send.gate = threading.Event()
    first = asyncio.create_task(callers[SEND].call(SEND, b""))
    late = asyncio.create_task(
        callers[SEND].call(
            SEND, send_service_pb2.SendRequest(topic="late").SerializeToString(), 0.05
        )
    )
    if transport == "grpc":
        with pytest.raises(grpc.aio.AioRpcError):
            await late
        services.send.gate.set()
    else:
        await asyncio.sleep(0.06)
        services.send.gate.set()
        await asyncio.wait([late])
    await first
    served = sum(services.send.groups)
    assert served in (1, 2)


async def test_the_status_of_a_lane_counts_calls(callers, server):
    await callers[DESCRIBE].call(PING, b"")
    status = server.pools["admin"].status()
    assert (status.lane, status.calls, status.threads, status.depth, status.rejections) == (
        "admin",
        1,
        1,
        0,
        0,
    )


# Holds.


async def test_a_hold_ends_with_its_time(callers, services):
    assert await callers[PULL].call(PULL, pull_request(topic="hold", hold_ms=20)) == b""
    assert services.pull.held == []


async def test_a_hold_ends_before_its_caller_stops_waiting(callers, services, server):
    answer = await callers[PULL].call(PULL, pull_request(topic="hold", hold_ms=60_000), 0.5)
    assert answer == b""
    assert server.pools["pull"].status().holds == 0


async def test_what_was_held_is_forgotten_with_its_answer(callers, services, server):
    for _ in range(3):
        await callers[PULL].call(PULL, pull_request(topic="hold", hold_ms=1))
    lanes = [lane for pool in server.pools.values() for lane in pool.lanes]
    connections = [connection for lane in lanes for connection in lane._table.by_descriptor.values()]
    await async_wait_for(lambda: not any(connection.held for connection in connections))


async def test_a_hold_is_dropped_when_its_caller_goes_away(callers, services, server, transport):
    call = asyncio.create_task(callers[PULL].call(PULL, pull_request(topic="hold", hold_ms=60_000)))
    await async_wait_for(lambda: services.pull.held)
    assert server.pools["pull"].status().holds == 1
    if transport == "grpc":
        call.cancel()
    else:
        await callers[PULL].close()
        call.cancel()
    await async_wait_for(lambda: not services.pull.held)
    assert services.pull.dropped.acquire(timeout=60)
    assert server.pools["pull"].status().holds == 0
    assert server.pools["pull"].lanes[0].open_call_count == 0


async def test_a_thousand_holds_do_not_stop_other_calls(callers, services):
    holds = [
        asyncio.create_task(
            callers[PULL].call(PULL, pull_request(topic="hold", hold_ms=60_000), 30)
        )
        for _ in range(1000)
    ]
    await async_wait_for(lambda: len(services.pull.held) == 1000)
    assert await callers[PULL].call(PULL, pull_request(size_max_bytes=1)) != b""
    assert await callers[DESCRIBE].call(PING, b"") == b""
    services.pull.stop()
    answers = await asyncio.gather(*holds, return_exceptions=True)
    assert {answer.status.reason for answer in answers if isinstance(answer, CallFailed)} == {
        "SHUTTING_DOWN"
    }


# The end.


async def test_a_stop_answers_holds_and_takes_no_time(callers, services, server):
    hold = asyncio.create_task(
        callers[PULL].call(PULL, pull_request(topic="hold", hold_ms=60_000), 60)
    )
    await async_wait_for(lambda: services.pull.held)
    started = asyncio.get_running_loop().time()
    await server.stop(30)
    assert asyncio.get_running_loop().time() - started < 20  # The hold has 60 s.
    assert await status_of(hold) == (Code.UNAVAILABLE, "SHUTTING_DOWN")
    assert not any(lane.is_alive() for pool in server.pools.values() for lane in pool.lanes)


async def test_a_stop_finishes_what_has_begun_and_refuses_what_is_new(services, server, transport):
    caller = await connect(server, transport, SEND)
    other = await connect(server, transport, DESCRIBE)
    services.send.gate = threading.Event()
    begun = asyncio.create_task(caller.call(SEND, b""))
    lane = server.pools["send"].lanes[0]
    await other.call(PING, b"")
    await async_wait_for(lambda: lane.call_count)
    if transport == "foreign":
        assert server.pools["admin"].lanes[0].foreign_count == 1
    stop = asyncio.create_task(server.stop(60))
    lanes = [lane for name in ("admin", "pull") for lane in server.pools[name].lanes]
    await async_wait_for(lambda: all(lane._shutdown.refusal is not None for lane in lanes))
    refused = await asyncio.gather(other.call(PING, b""), return_exceptions=True)
    services.send.gate.set()
    assert await begun != b""
    await stop
    assert isinstance(refused[0], Exception)
    await caller.close()
    await other.close()


# The remoting port alone.


async def open_raw(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", server.remoting_port)


async def shut(writer: asyncio.StreamWriter) -> None:
    writer.close()
    try:
        await writer.wait_closed()
    except OSError:
        pass


async def is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        return await asyncio.wait_for(reader.read(), 60) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "data",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"PMQ\x02" + bytes(16),
        MAGIC + encode_request(1, 0x0501, 0),
        MAGIC + encode_request(1, 0, 1 << 20),
        MAGIC + bytes(16),
        MAGIC + encode_answer(1, 0, 0),
        bytes(100),
    ],
)
async def test_who_does_not_say_hello_is_sent_away(server, data):
    reader, writer = await open_raw(server)
    writer.write(data)
    assert await is_closed(reader)
    await shut(writer)
    await async_wait_for(lambda: server._remoting.connection_count == 0)


async def test_a_hello_may_come_in_pieces_and_with_calls_behind_it(server):
    reader, writer = await open_raw(server)
    for byte in MAGIC + hello(options_pb2.LANE_ADMIN):
        writer.write(bytes((byte,)))
        await writer.drain()
    assert (await read_answer(reader))[0] == 0
    await shut(writer)
    reader, writer = await open_raw(server)
    writer.write(
        MAGIC
        + hello(options_pb2.LANE_ADMIN)
        + encode_request(7, 0x0508, 0)
        + encode_request(8, 0x0508, 0)
    )
    assert [(await read_answer(reader))[0] for _ in range(3)] == [0, 0, 0]
    await shut(writer)


@pytest.mark.parametrize("lane", [options_pb2.LANE_UNSPECIFIED, options_pb2.LANE_CONSUMER, 99])
async def test_a_lane_that_is_not_served_is_refused_with_an_answer(server, lane):
    reader, writer = await open_raw(server)
    writer.write(MAGIC + hello(lane))
    status, payload = await read_answer(reader)
    assert status == decode_status(payload).code != 0
    assert await is_closed(reader)
    await shut(writer)


async def test_a_hello_that_does_not_parse_is_refused_with_an_answer(server):
    reader, writer = await open_raw(server)
    writer.write(MAGIC + encode_request(1, 0, 2) + b"\xff\xff")
    assert (await read_answer(reader))[0] == Code.INVALID_ARGUMENT
    await shut(writer)


@pytest.mark.parametrize(
    ("at", "value", "field"), [(10, 0xF0, "flags"), (10, 4, "flags"), (11, 5, "status")]
)
@pytest.mark.parametrize("method_id", [0x0508, 0x0201])
async def test_what_no_request_has_in_its_header_is_refused_and_the_connection_lives(
    server, at, value, field, method_id
):
    reader, writer = await open_raw(server)
    writer.write(MAGIC + hello(options_pb2.LANE_ADMIN))
    assert (await read_answer(reader))[0] == 0
    frame = bytearray(encode_request(7, method_id, 0))
    frame[at] = value
    writer.write(bytes(frame))
    status, payload = await read_answer(reader)
    error = decode_status(payload)
    assert (status, error.reason) == (Code.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    assert field in error.message
    one_way = bytearray(encode_request(7, method_id, 0, one_way=True))
    one_way[10] |= 0x80
    writer.write(bytes(one_way) + encode_request(8, 0x0508, 0))
    assert (await read_answer(reader))[0] == 0  # of the second: the first wants no answer
    await shut(writer)


async def test_silence_is_ended(server):
    server._remoting._hello_timeout_s = 0.05
    reader, writer = await open_raw(server)
    assert await is_closed(reader)
    await shut(writer)


async def test_an_unknown_number_is_unimplemented(server):
    caller = await RemotingCaller.connect(
        server.table, server.remoting_port, options_pb2.LANE_ADMIN
    )
    assert await status_of(caller.call("/protomq.v1.Unknown/Unknown", b"")) == (
        Code.UNIMPLEMENTED,
        "UNKNOWN_METHOD",
    )
    await caller.close()


@pytest.mark.parametrize(
    "data", [encode_request(1, 1, 1 << 30), encode_answer(1, 1, 0), b"\x00" * 16, b"\xff" * 64]
)
async def test_garbage_after_the_hello_closes_the_connection_and_nothing_else(server, data):
    good = await RemotingCaller.connect(server.table, server.remoting_port, options_pb2.LANE_ADMIN)
    reader, writer = await open_raw(server)
    writer.write(MAGIC + hello(options_pb2.LANE_ADMIN))
    await read_answer(reader)
    writer.write(data)
    assert await is_closed(reader)
    await shut(writer)
    assert await good.call(PING, b"") == b""
    assert server.pools["admin"].status().connections == 1
    await good.close()


@pytest.mark.parametrize("lane", [options_pb2.LANE_SEND, options_pb2.LANE_ADMIN])
async def test_a_one_way_call_is_done_and_not_answered(server, services, lane):
    caller = await RemotingCaller.connect(server.table, server.remoting_port, lane)
    caller.send_one_way(SEND, send_service_pb2.SendRequest(topic="one-way").SerializeToString())
    await async_wait_for(lambda: services.send.one_way_payloads)
    assert await caller.call(PING, b"") == b""
    caller.send_one_way(DESCRIBE, describe_request("missing"))
    assert await caller.call(PING, b"") == b""
    await caller.close()


async def test_a_region_beyond_the_end_of_the_file_closes_the_connection(server, caplog):
    caller = await RemotingCaller.connect(server.table, server.remoting_port, options_pb2.LANE_PULL)
    for offset, size in ((FILE_SIZE_BYTES - 10, 100), (FILE_SIZE_BYTES - 10, 100_000)):
        with pytest.raises(ConnectionResetError):
            await caller.call(PULL, pull_request(queue_offset=offset, size_max_bytes=size))
        await caller.close()
        caller = await RemotingCaller.connect(
            server.table, server.remoting_port, options_pb2.LANE_PULL
        )
    assert caplog.text.count("file") >= 2
    await caller.close()


async def test_who_does_not_read_is_not_read_from_and_harms_nobody(server, services, file_path):
    sock = socket.create_connection(("127.0.0.1", server.remoting_port))
    sock.sendall(MAGIC + hello(options_pb2.LANE_PULL))
    request = pull_request(size_max_bytes=FILE_SIZE_BYTES)
    sock.recv(4096)
    sock.setblocking(False)
    frame = encode_request(1, 0x0301, len(request)) + request
    sent = 0
    while True:
        try:
            sent += sock.send(frame * 1000)
        except BlockingIOError:
            await asyncio.sleep(0.01)
            if not services.pull.served or sent == 0:
                continue
            before = services.pull.served
            await asyncio.sleep(0.05)
            if before == services.pull.served:
                break
    assert services.pull.served * len(frame) < sent
    good = await RemotingCaller.connect(server.table, server.remoting_port, options_pb2.LANE_PULL)
    assert (await good.call(PULL, pull_request(size_max_bytes=100))).endswith(
        file_path.read_bytes()[:100]
    )
    sock.close()
    await async_wait_for(lambda: server.pools["pull"].status().connections == 1)
    await good.close()


async def test_a_slow_reader_gets_every_answer_in_order_and_in_full(server, file_path):
    """Small, scattered and large regions in turn through a small window: every kind of partial send."""
    data = file_path.read_bytes()
    rng = random.Random(6)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    sock.connect(("127.0.0.1", server.remoting_port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=4096)
    writer.write(MAGIC + hello(options_pb2.LANE_PULL))
    await read_answer(reader)
    expected = []
    for request_id in range(60):
        offset, size, count = (
            rng.randrange(1000),
            rng.choice([0, 10, 3000, 33_000, 500_000]),
            rng.choice([1, 1, 40]),
        )
        count = count if size < 33_000 else 1
        request = pull_request(
            topic="scatter", queue_offset=offset, size_max_bytes=size, record_count_max=count
        )
        writer.write(encode_request(request_id, 0x0301, len(request)) + request)
        expected.append(
            b"".join(
                data[offset + index * 2 * size : offset + index * 2 * size + size]
                for index in range(count)
            )
        )
    for want in expected:
        status, payload = await read_answer(reader)
        assert status == 0
        assert payload[len(payload) - len(want) :] == want
        assert len(payload) < len(want) + 20
    await shut(writer)


async def test_who_stands_still_in_the_middle_of_something_is_dropped(server):
    request = pull_request(size_max_bytes=FILE_SIZE_BYTES)
    lane = server.pools["pull"].lanes[0]
    in_frame = MAGIC + hello(options_pb2.LANE_PULL) + encode_request(1, 0x0301, 100) + b"x"
    in_answer = (
        MAGIC
        + hello(options_pb2.LANE_PULL)
        + (encode_request(1, 0x0301, len(request)) + request) * 3
    )
    idle = MAGIC + hello(options_pb2.LANE_PULL)
    sockets = [socket.create_connection(("127.0.0.1", server.remoting_port)) for _ in range(3)]
    for sock, data in zip(sockets, (in_frame, in_answer, idle), strict=True):
        sock.sendall(data)
    await async_wait_for(
        lambda: (
            [bool(c.queue) or c.reader.in_frame for c in lane._table.by_descriptor.values()].count(True)
            == 2
            and lane.connection_count == 3
        )
    )

    def are_dropped() -> bool:
        for connection in list(lane._table.by_descriptor.values()):
            connection.progress_at -= 61  # once more each time: the answer may still be filling the buffers of the kernel
        lane.post(lane._sweep)
        return lane.connection_count == 1

    await async_wait_for(are_dropped)
    (left,) = lane._table.by_descriptor.values()
    assert left.peer.endswith(f":{sockets[2].getsockname()[1]}"), "the idle one stays"
    for sock in sockets:
        sock.close()


async def test_large_answers_from_memory_do_not_pile_up(server):
    """More calls in one read than may be pending: the rest waits and is answered when there is room."""
    reader, writer = await open_raw(server)
    request = admin_service_pb2.ListTopicsRequest(page_size=1).SerializeToString()
    writer.write(MAGIC + hello(options_pb2.LANE_ADMIN))
    await read_answer(reader)
    writer.write((encode_request(1, 0x0504, len(request)) + request) * 40)
    lane = server.pools["admin"].lanes[0]
    await async_wait_for(lambda: lane.call_count > 0)
    assert lane.call_count < 40
    for _ in range(40):
        assert len((await read_answer(reader))[1]) > 1 << 20
    await shut(writer)


async def test_another_lane_makes_no_more_answers_than_a_caller_may_leave_unread(server):
    reader, writer = await open_raw(server)
    request = admin_service_pb2.ListTopicsRequest(page_size=1).SerializeToString()
    writer.write(MAGIC + hello(options_pb2.LANE_PULL))
    await read_answer(reader)
    count = 200
    writer.write((encode_request(1, 0x0504, len(request)) + request) * count)
    lane = server.pools["admin"].lanes[0]
    await async_wait_for(lambda: lane.call_count == count)
    assert lane.rejection_count > count // 2, "most were never made"
    answers = [await read_answer(reader) for _ in range(count)]
    made = [payload for status, payload in answers if not status]
    assert 0 < sum(map(len, made)) < FOREIGN_SIZE_MAX_BYTES + (8 << 20)
    for status, payload in answers:
        if status:
            assert decode_status(payload).reason == "SYSTEM_BUSY"
    writer.write(encode_request(1, 0x0504, len(request)) + request)
    assert (await read_answer(reader))[0] == 0, "once it has read them, it is served"
    await shut(writer)


async def test_connections_are_limited_in_total_and_by_address(services):
    for limits in (ConnectionLimits(total_max=2), ConnectionLimits(per_address_max=2)):
        server = Server(services.table, name="echo", version="1", limits=limits, grpc_port=None)
        await server.start()
        callers = [
            await RemotingCaller.connect(server.table, server.remoting_port, options_pb2.LANE_ADMIN)
            for _ in range(2)
        ]
        reader, writer = await open_raw(server)
        assert decode_status((await asyncio.wait_for(reader.read(), 60))[HEADER_SIZE_BYTES:]).reason == "TOO_MANY"
        await shut(writer)
        await callers.pop().close()
        await async_wait_for(lambda: server.pools["admin"].status().connections == 1)  # noqa: B023
        callers.append(
            await RemotingCaller.connect(server.table, server.remoting_port, options_pb2.LANE_ADMIN)
        )
        assert await callers[-1].call(PING, b"") == b""
        for caller in callers:
            await caller.close()
        await server.stop(1)


@pytest.mark.parametrize("field", ["total_max", "per_address_max"])
@pytest.mark.parametrize("waiters_max", [remoting_server.PLACE_WAITERS_MAX, 0])
async def test_who_gets_no_place_is_told_why(services, monkeypatch, field, waiters_max):
    monkeypatch.setattr(remoting_server, "PLACE_WAITERS_MAX", waiters_max)
    limits = ConnectionLimits(**{field: 1})
    server = Server(services.table, name="echo", version="1", limits=limits, grpc_port=None)
    await server.start()
    staying = await RemotingCaller.connect(server.table, server.remoting_port, options_pb2.LANE_ADMIN)
    try:
        for request_id in (0, 7):
            reader, writer = await open_raw(server)
            if waiters_max:
                hello = RemotingHello(lane=options_pb2.LANE_ADMIN).SerializeToString()
                writer.write(MAGIC + encode_request(request_id, 0, len(hello)) + hello)
            answer = await asyncio.wait_for(reader.read(), 60)
            header = decode_header(answer)
            assert (header.request_id, header.method_id) == (request_id if waiters_max else 0, 0)
            status = decode_status(answer[HEADER_SIZE_BYTES:])
            assert (header.status, status.reason, status.metadata["limit"]) == (8, "TOO_MANY", "1")
            await shut(writer)
        reader, writer = await open_raw(server)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        if waiters_max:
            assert await asyncio.wait_for(reader.read(), 60) == b"", "it would not understand that"
        await shut(writer)
    finally:
        await staying.close()
        await server.stop(1)


@pytest.fixture(params=["total_max", "per_address_max"])
async def full_server(services: Services, request: Any) -> AsyncIterator[Server]:
    """With a limit of two connections, one of which is taken."""
    limits = ConnectionLimits(**{request.param: 2})
    server = Server(services.table, name="echo", version="1", limits=limits, grpc_port=None)
    await server.start()
    staying = await RemotingCaller.connect(
        server.table, server.remoting_port, options_pb2.LANE_ADMIN
    )
    yield server
    await staying.close()
    await server.stop(1)


async def test_a_closed_connection_of_a_busy_lane_does_not_count_against_a_limit(full_server):
    first = await RemotingCaller.connect(
        full_server.table, full_server.remoting_port, options_pb2.LANE_ADMIN
    )
    busy = threading.Event()
    (lane,) = full_server.pools["admin"].lanes
    lane.post(busy.wait)  # It does not see the closing before it has done this.
    await first.close()
    connecting = asyncio.create_task(
        RemotingCaller.connect(
            full_server.table, full_server.remoting_port, options_pb2.LANE_ADMIN
        )
    )
    await async_wait_for(lambda: full_server._remoting._waiters)
    busy.set()
    second = await asyncio.wait_for(connecting, 60)
    assert await second.call(PING, b"") == b""
    await second.close()


async def test_an_address_at_its_limit_keeps_no_other_one_out(services, monkeypatch):
    monkeypatch.setattr(remoting_server, "PLACE_WAITERS_MAX", 2)
    monkeypatch.setattr(remoting_server, "PLACE_TIMEOUT_S", 60.0)
    limits = ConnectionLimits(per_address_max=1)
    server = Server(services.table, name="echo", version="1", limits=limits, grpc_port=None)
    await server.start()
    crowd = [socket.create_connection(("127.0.0.1", server.remoting_port)) for _ in range(4)]
    await async_wait_for(lambda: server._remoting is not None and len(server._remoting._waiters) == 2)
    other = socket.create_connection(
        ("127.0.0.1", server.remoting_port), source_address=("127.0.0.2", 0)
    )
    other.settimeout(60)
    hello = RemotingHello(lane=options_pb2.LANE_ADMIN).SerializeToString()
    await asyncio.to_thread(other.sendall, MAGIC + encode_request(1, 0, len(hello)) + hello)
    assert await asyncio.to_thread(other.recv, 1), "it is greeted"
    for each in (*crowd, other):
        each.close()
    await server.stop(1)


async def test_connections_that_come_and_go_at_the_limit_are_all_taken(full_server):
    address = Address("127.0.0.1", full_server.remoting_port)
    ping = full_server.table.by_path[PING].method_id

    def churn() -> None:
        for _ in range(300):
            client = RemotingClient(address, options_pb2.LANE_ADMIN, "churn", timeout_s=60)
            assert client.call(ping, b"", 60) == b""
            client.close()

    await asyncio.to_thread(churn)


async def test_connections_are_spread_over_the_threads_of_a_pool(services):
    server = Server(
        services.table,
        name="echo",
        version="1",
        lanes={"pull": LaneConfig(threads=3)},
        grpc_port=None,
    )
    await server.start()
    callers = await asyncio.gather(
        *(
            RemotingCaller.connect(server.table, server.remoting_port, options_pb2.LANE_PULL)
            for _ in range(12)
        )
    )
    answers = await asyncio.gather(
        *(caller.call(PULL, pull_request(size_max_bytes=9)) for caller in callers)
    )
    assert len(answers) == 12
    assert [lane.connection_count for lane in server.pools["pull"].lanes] == [4, 4, 4]
    for caller in callers:
        await caller.close()
    await server.stop(1)


async def test_random_damage_never_stops_the_server(server):
    rng = random.Random(5)
    request = send_service_pb2.SendRequest(topic="t" * 50).SerializeToString()
    whole = (
        MAGIC
        + hello(options_pb2.LANE_SEND)
        + (encode_request(3, 0x0201, len(request), 1000) + request) * 5
    )
    for _ in range(150):
        damaged = bytearray(whole[: rng.randrange(1, len(whole) + 1)])
        for _ in range(rng.randrange(4)):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        _, writer = await open_raw(server)
        writer.write(damaged)
        await shut(writer)
    good = await RemotingCaller.connect(server.table, server.remoting_port, options_pb2.LANE_SEND)
    assert await good.call(SEND, request) != b""
    await good.close()
    await async_wait_for(
        lambda: (
            server._remoting.connection_count <= 1 or server.pools["send"].status().connections == 0
        )
    )


# gRPC alone.


@pytest.fixture
async def channel(server: Server) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as made:
        yield made


async def test_a_stream_gives_its_answers_and_its_error(channel):
    call = channel.unary_stream(
        "/protomq.v1.RouteService/WatchRoute",
        request_serializer=route_service_pb2.WatchRouteRequest.SerializeToString,
        response_deserializer=route_service_pb2.WatchRouteResponse.FromString,
    )
    assert (
        len([answer async for answer in call(route_service_pb2.WatchRouteRequest(topic="abc"))])
        == 3
    )
    for topic, code in (
        ("missing", grpc.StatusCode.NOT_FOUND),
        ("defect", grpc.StatusCode.INTERNAL),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [answer async for answer in call(route_service_pb2.WatchRouteRequest(topic=topic))]
        assert caught.value.code() is code
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize("excess_bytes", [0, 1])
async def test_a_stream_takes_no_larger_request_than_other_methods(channel, server, excess_bytes):
    path = "/protomq.v1.RouteService/WatchRoute"
    limit = server.table.by_path[path].method.request_size_max_bytes
    known = route_service_pb2.WatchRouteRequest(topic="missing").SerializeToString()
    # A field of a later version.
    size = limit + excess_bytes - len(known) - 4
    request = known + b"\x4a" + encode_varint(size) + bytes(size)
    assert len(request) == limit + excess_bytes
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [answer async for answer in channel.unary_stream(path)(request)]
    wanted = grpc.StatusCode.INVALID_ARGUMENT if excess_bytes else grpc.StatusCode.NOT_FOUND
    assert caught.value.code() is wanted


async def test_health_is_told_for_every_service_and_ends_with_the_stop(channel, server):
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    for name in ("", *server.table.service_names):
        assert (await check(health_pb2.HealthCheckRequest(service=name))).status == 1
    with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
        await check(health_pb2.HealthCheckRequest(service="unknown"))
    await server._grpc.refuse()
    assert (await check(health_pb2.HealthCheckRequest(service=""))).status == 2


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_services_and_describes_messages_and_methods(channel, version):
    info = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    symbols = [
        "protomq.v1.SendService",
        "protomq.v1.SendRequest",
        "protomq.v1.SendService.Send",
        "protomq.v1.Nothing.Send",
    ]
    requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
    requests += [
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol) for symbol in symbols
    ]
    answers = [answer async for answer in info(iter(requests))]
    names = {service.name for service in answers[0].list_services_response.service}
    assert {
        "protomq.v1.SendService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
    } <= names
    assert [answer.WhichOneof("message_response") for answer in answers[1:]] == [
        *["file_descriptor_response"] * 3,
        "error_response",
    ]


async def test_a_taken_port_is_an_error_and_leaves_nothing_behind(server, services):
    for ports in ({"grpc_port": server.grpc_port}, {"remoting_port": server.remoting_port}):
        other = Server(services.table, name="other", version="1", **ports)
        with pytest.raises(OSError, match="cannot listen"):
            await other.start()
        assert not any(lane.is_alive() for pool in other.pools.values() for lane in pool.lanes)


async def refusal_of(call: Callable[[], Awaitable[Any]]) -> grpc.aio.AioRpcError:
    """The error of a call. grpc.aio makes one of its own if the answer comes before it has sent the message: then it calls again."""
    for _ in range(10):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call()
        if caught.value.details() != "Internal error from Core":
            return caught.value
    raise AssertionError("no call got as far as its answer")


@pytest.mark.parametrize(
    "path",
    [
        "/protomq.v1.SendService/Nothing",
        "/protomq.v1.Nothing/Send",
        "/x",
        "/a/" + "b" * 3_000,
        "/grpc.health.v1.Health/X",
    ],
)
async def test_a_method_that_is_not_there_is_told_with_its_reason(server: Server, path: str) -> None:
    expected = {"definite": "true", "method": path[:200]}
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as made:
        channel: Any = made

        async def requests() -> AsyncIterator[bytes]:
            yield b"x"

        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: channel.unary_unary(path)(b"x"),
            lambda: channel.stream_unary(path)(requests()),
            lambda: channel.unary_stream(path)(b"x").read(),
            lambda: channel.stream_stream(path)(requests()).read(),
        ]
        for call in calls:
            error = await refusal_of(call)
            assert error.code() is grpc.StatusCode.UNIMPLEMENTED
            details = error.trailing_metadata()[GRPC_STATUS_DETAILS_KEY]
            assert isinstance(details, bytes)
            status = decode_status(details)
            assert (status.reason, status.metadata) == ("UNKNOWN_METHOD", expected)


async def test_hooks_are_called_with_the_server(server, services):
    assert services.route.started_with is server


async def test_an_oversized_request_is_refused_and_not_read(services):
    server = Server(services.table, name="echo", version="1", request_size_max_bytes=10_000)
    await server.start()
    caller = GrpcCaller(server.grpc_port)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await caller.call(SEND, bytes(10_001))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await caller.close()
    remoting = await RemotingCaller.connect(
        server.table, server.remoting_port, options_pb2.LANE_SEND
    )
    assert await remoting.call(PING, bytes(0)) == b""
    with pytest.raises(ConnectionResetError):
        await remoting.call(SEND, bytes(10_001))
    await remoting.close()
    await server.stop(1)


async def test_the_log_is_quiet_when_all_is_well(callers, caplog):
    with caplog.at_level(logging.INFO):
        await callers[DESCRIBE].call(PING, b"")
    assert [record for record in caplog.records if record.name.startswith("protomq")] == []


async def test_a_method_that_needs_no_large_requests_takes_none(server: Server) -> None:
    large = pull_request(topic="t", tags=["x" * (2 << 20)])
    caller = await connect(server, "grpc", PULL)
    assert await status_of(caller.call(PULL, large)) == (Code.INVALID_ARGUMENT, "MESSAGE_TOO_LARGE")
    await caller.close()
    remoting = await connect(server, "remoting", PULL)
    with pytest.raises(ConnectionResetError):  # refused by its length, before it is received
        await remoting.call(PULL, large)
    await remoting.close()


async def test_reflection_describes_the_details_of_errors(server: Server) -> None:
    from grpc_reflection.v1alpha import reflection_pb2_grpc

    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]
        request = reflection_pb2.ServerReflectionRequest(
            file_containing_symbol="google.rpc.ErrorInfo"
        )
        answers = [answer async for answer in stub.ServerReflectionInfo(iter([request]))]
    assert any(
        b"ErrorInfo" in file for file in answers[0].file_descriptor_response.file_descriptor_proto
    )


async def test_frames_that_never_end_do_not_fill_the_memory(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protomq_runtime.connection_table.UNFINISHED_SIZE_MAX_BYTES", 3 << 20)
    lane = server.pools["send"].lanes[0]
    callers = [await connect(server, "remoting", SEND) for _ in range(5)]
    await async_wait_for(lambda: len(lane._table.by_descriptor) == 5)
    connections = list(lane._table.by_descriptor.values())
    try:
        for caller in callers:
            assert isinstance(caller, RemotingCaller)
            # A little less than the first step of a frame's memory: each holds exactly that.
            caller.writer.write(encode_request(1, 0x0201, 15 << 20) + bytes(LARGE_STEP_BYTES // 2))
            await caller.writer.drain()
        await async_wait_for(lambda: all(c.reader.held_size_bytes for c in connections))
        assert {c.reader.held_size_bytes for c in connections} == {LARGE_STEP_BYTES}
        swept = threading.Event()
        lane.post(lane._table._bound_unfinished)
        lane.post(swept.set)
        await async_wait_for(swept.is_set)
        assert sum(not c.closed for c in connections) == 3
    finally:
        for caller in callers:
            await caller.close()
