"""The start of a broker: what it refuses before it makes anything, and what is served while its name servers are asked."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from protomq.v1 import admin_service_pb2 as admin
from protomq.v1 import consumer_service_pb2 as consumer
from protomq.v1 import options_pb2
from protomq.v1 import send_service_pb2 as send
from protomq.v1.record_pb2 import Record
from protomq.v1.route_service_pb2 import RegisterBrokerRequest, RegisterBrokerResponse
from protomq.v1.state_pb2 import OffsetsRecord
from protomq.v1.topic_pb2 import Topic
from protomq.wire.topics import OFFSETS_TOPIC
from protomq_broker import broker as broker_module
from protomq_broker.broker_process import BrokerProcess
from protomq_broker.config import BrokerConfig, MetricsConfig
from protomq_broker.name_server_connections import NameServer
from protomq_broker.store.config import StoreConfig
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_runtime.addresses import ListenConfig
from protomq_runtime.errors import Code, ServiceError
from tests.integration.transport_callers import Caller, CallFailed, GrpcCaller, RemotingCaller
from tests.unit.protomq_broker.test_registration import FakeConnection, FakeNameServer

PATIENCE_S = 30.0
PING = "/protomq.v1.AdminService/Ping"
SEND = "/protomq.v1.SendService/Send"
CREATE_TOPIC = "/protomq.v1.AdminService/CreateTopic"
DELETE_TOPIC = "/protomq.v1.AdminService/DeleteTopic"
DELETE_GROUP = "/protomq.v1.AdminService/DeleteGroup"
COMMIT = "/protomq.v1.ConsumerService/CommitOffsets"
NEW_TOPIC = admin.CreateTopicRequest(topic=Topic(name="new", write_queues=1)).SerializeToString()
OLD_TOPIC = admin.DeleteTopicRequest(topic="old").SerializeToString()
OLD_GROUP = admin.DeleteGroupRequest(consumer_group="old").SerializeToString()
MESSAGE = send.SendRequest(topic="t", records=[Record(body=b"x")]).SerializeToString()


def config_in(
    folder: Path,
    listen: ListenConfig | None = None,
    metrics: MetricsConfig | None = None,
    namesrv: tuple[str, ...] = (),
) -> BrokerConfig:
    return BrokerConfig(
        data_dir=folder / "data",
        broker_name="b",
        listen=listen or ListenConfig(grpc_port=0, remoting_port=0),
        metrics=metrics or MetricsConfig(),
        namesrv=namesrv,
        store=StoreConfig(
            segment_size_bytes=4 << 20,
            disk_delete_ratio=0.97,
            disk_force_ratio=0.98,
            disk_refuse_ratio=0.99,
        ),
    )


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize("which", ["grpc", "remoting", "metrics", "one port for two"])
def test_a_taken_port_is_said_and_no_store_is_made(tmp_path: Path, taken: int, which: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    listen, metrics = ListenConfig(grpc_port=0, remoting_port=0), MetricsConfig()
    if which == "metrics":
        metrics = MetricsConfig(listen=f"127.0.0.1:{taken}")
    elif which == "one port for two":
        taken = port
        listen = ListenConfig(grpc_port=port, remoting_port=0)
        metrics = MetricsConfig(listen=f"127.0.0.1:{port}")
    else:
        listen = ListenConfig(
            grpc_port=taken if which == "grpc" else 0, remoting_port=taken if which == "remoting" else 0
        )
    why = rf"the port {taken} is taken; stop" if which != "one port for two" else "that is the port of gRPC; give another port"
    with pytest.raises(OSError, match=rf"127\.0\.0\.1:{taken} for .*: {why}"):
        BrokerProcess(config_in(tmp_path, listen, metrics))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("nosuch.invalid", "the host 'nosuch.invalid' is not known here"),
        ("192.0.2.1", "this machine has no such address"),
        ("x" * 64, "is not known here"),
    ],
)
def test_a_host_that_is_none_is_said_and_no_store_is_made(
    tmp_path: Path, host: str, told: str
) -> None:
    listen = ListenConfig(host=host, grpc_port=0, remoting_port=0)
    with pytest.raises(OSError, match="cannot listen on") as caught:
        BrokerProcess(config_in(tmp_path, listen))
    assert told in str(caught.value)
    assert not list(tmp_path.iterdir())


class SlowConnection(FakeConnection):
    """Answers a registration when `SlowNameServer.answer` is set."""

    def __init__(self, server: SlowNameServer) -> None:
        super().__init__(server)
        self._slow = server

    def register_broker(self, request: RegisterBrokerRequest) -> RegisterBrokerResponse:
        self._slow.asked.set()
        assert self._slow.answer.wait(PATIENCE_S)
        return super().register_broker(request)


class SlowNameServer(FakeNameServer):
    """A name server that takes its time. Events: `asked`, `answer`."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()
        self.answer = threading.Event()

    def as_name_server(self) -> NameServer:
        return NameServer("slow", lambda client_id: SlowConnection(self))


@pytest.fixture
def name_server() -> Iterator[SlowNameServer]:
    server = SlowNameServer()
    yield server
    server.answer.set()


def commit_of(group: str) -> bytes:
    offset = consumer.QueueOffset(topic="old", queue_id=0, queue_offset=0)
    return consumer.CommitOffsetsRequest(consumer_group=group, offsets=[offset]).SerializeToString()


def fill(store: Store) -> None:
    """A topic and a group of it, both "old"."""
    store.topics.add([TopicConfig("old")])  # no lane writes yet
    topic = store.topics.find("old")
    assert topic is not None
    request = consumer.CommitOffsetsRequest.FromString(commit_of("old"))
    request.offsets[0].topic_incarnation = topic.incarnation
    store.append_state(OFFSETS_TOPIC, [OffsetsRecord(commits=[request]).SerializeToString()])


@pytest.fixture(params=["remoting", "grpc"])
async def starting(
    tmp_path: Path,
    name_server: SlowNameServer,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> AsyncIterator[tuple[BrokerProcess, asyncio.Task[None], Caller, Caller]]:
    """A broker that waits for its name server, its start, and connections for administration and for sends."""
    monkeypatch.setattr(broker_module, "REGISTER_TIMEOUT_S", PATIENCE_S)
    process = BrokerProcess(config_in(tmp_path), name_servers=[name_server.as_name_server()])
    fill(process.broker.store)
    start = asyncio.create_task(process.start())
    assert await asyncio.to_thread(name_server.asked.wait, PATIENCE_S)
    server = process.server
    callers: list[Caller] = []
    for lane in (options_pb2.LANE_ADMIN, options_pb2.LANE_SEND):
        if request.param == "grpc":
            callers.append(GrpcCaller(server.grpc_port))
        else:
            callers.append(await RemotingCaller.connect(server.table, server.remoting_port, lane))
    yield process, start, callers[0], callers[1]
    for caller in callers:
        await caller.close()
    name_server.answer.set()
    await asyncio.wait([start])
    if not start.cancelled() and start.exception() is None:
        await process.stop(1)


async def test_while_name_servers_are_asked_the_ports_are_open_and_sends_wait(
    starting: tuple[BrokerProcess, asyncio.Task[None], Caller, Caller], name_server: SlowNameServer
) -> None:
    process, start, administration, sender = starting
    assert await administration.call(PING, b"") == b""
    sent = asyncio.create_task(sender.call(SEND, MESSAGE, PATIENCE_S))
    assert await administration.call(PING, b"") == b""
    assert [topic.name for topic in process.broker.store.topics.all()] == ["old"]
    assert not start.done()
    assert not sent.done()
    name_server.answer.set()
    await start
    assert send.SendResponse.FromString(await sent).queue_offset == 0


async def test_a_name_that_is_taken_ends_the_start_before_any_send_is_done(
    starting: tuple[BrokerProcess, asyncio.Task[None], Caller, Caller], name_server: SlowNameServer
) -> None:
    process, start, administration, sender = starting
    sent = asyncio.create_task(sender.call(SEND, MESSAGE, PATIENCE_S))
    status = await administration.call("/protomq.v1.AdminService/GetBrokerStatus", b"")
    assert admin.GetBrokerStatusResponse.FromString(status).broker_name == "b"
    appended = process.broker.store.appended_position
    name_server.taken = ServiceError(Code.FAILED_PRECONDITION, "NAME_TAKEN", "another one has it")
    name_server.answer.set()
    with pytest.raises(ServiceError, match="another one has it"):
        await start
    with pytest.raises(CallFailed) as caught:
        await sent
    assert (caught.value.status.reason, caught.value.status.metadata["definite"]) == ("SHUTTING_DOWN", "true")
    assert process.broker.store.appended_position == appended


CHANGES = [
    (CREATE_TOPIC, NEW_TOPIC),
    (COMMIT, commit_of("new")),
    (DELETE_GROUP, OLD_GROUP),
    (DELETE_TOPIC, OLD_TOPIC),
]


@pytest.mark.parametrize(("method", "payload"), CHANGES)
async def test_a_broker_whose_name_is_taken_changes_nothing_and_says_so(
    starting: tuple[BrokerProcess, asyncio.Task[None], Caller, Caller],
    name_server: SlowNameServer,
    method: str,
    payload: bytes,
) -> None:
    process, start, administration, _ = starting
    store = process.broker.store
    change = asyncio.create_task(administration.call(method, payload, PATIENCE_S))
    assert await administration.call(PING, b"") == b""
    appended = store.appended_position
    name_server.taken = ServiceError(Code.FAILED_PRECONDITION, "NAME_TAKEN", "another one has it")
    name_server.answer.set()
    with pytest.raises(ServiceError, match="another one has it"):
        await start
    with pytest.raises(CallFailed) as caught:
        await change
    status = caught.value.status
    assert (status.reason in ("NAME_TAKEN", "SHUTTING_DOWN"), status.metadata["definite"]) == (True, "true")
    assert store.appended_position == appended
    assert [topic.name for topic in store.topics.all()] == ["old"]


@pytest.mark.parametrize(("method", "payload"), CHANGES)
async def test_changes_wait_for_the_name_servers_and_are_made_then(
    starting: tuple[BrokerProcess, asyncio.Task[None], Caller, Caller],
    name_server: SlowNameServer,
    method: str,
    payload: bytes,
) -> None:
    process, start, administration, _ = starting
    store = process.broker.store
    appended = store.appended_position
    change = asyncio.create_task(administration.call(method, payload, PATIENCE_S))
    assert await administration.call(PING, b"") == b""
    assert not change.done()
    assert ([topic.name for topic in store.topics.all()], store.appended_position) == (["old"], appended)
    name_server.answer.set()
    await start
    await change
    names = {topic.name for topic in store.topics.all()}
    assert names == {CREATE_TOPIC: {"old", "new"}, DELETE_TOPIC: set[str]()}.get(method, {"old"})
    assert store.appended_position > appended
    assert store.offsets.has_group("new") == (method == COMMIT)


async def test_a_start_that_is_given_up_leaves_nothing_running(
    starting: tuple[BrokerProcess, asyncio.Task[None], Caller, Caller], name_server: SlowNameServer
) -> None:
    process, start, _, sender = starting
    sent = asyncio.create_task(sender.call(SEND, MESSAGE, PATIENCE_S))
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    name_server.answer.set()
    with pytest.raises(CallFailed, match="SHUTTING_DOWN"):
        await sent
    process.server.start_late_lanes()  # as the registration does when it ends late
    assert not any(lane.is_alive() for pool in process.server.pools.values() for lane in pool.lanes)


async def test_a_registration_that_comes_behind_the_stop_asks_no_name_server(
    tmp_path: Path, name_server: SlowNameServer
) -> None:
    name_server.answer.set()
    process = BrokerProcess(config_in(tmp_path), name_servers=[name_server.as_name_server()])
    await process.server.start()
    await process.stop(1)
    process.broker.register()
    assert not name_server.asked.is_set()


@pytest.mark.slow
async def test_name_servers_that_hang_delay_a_start_by_one_time_out_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeout_s = 3.0
    monkeypatch.setattr(broker_module, "REGISTER_TIMEOUT_S", timeout_s)
    with (
        socket.create_server(("127.0.0.1", 0)) as first,
        socket.create_server(("127.0.0.1", 0)) as second,
    ):
        silent = tuple(f"127.0.0.1:{each.getsockname()[1]}" for each in (first, second))
        process = BrokerProcess(config_in(tmp_path, namesrv=silent))
        began = time.monotonic()
        await process.start()
        try:
            assert time.monotonic() - began < 2 * timeout_s
            sender = GrpcCaller(process.server.grpc_port)
            assert send.SendResponse.FromString(await sender.call(SEND, MESSAGE)).queue_offset == 0
            await sender.close()
        finally:
            await process.stop(1)


def test_a_folder_of_somebody_else_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    """A store of RocketMQ, which has folders of the same names."""
    store = tmp_path / "store"
    files = {"commitlog/00000000000000000000": b"\x00\x00\x01\x10" * 1_250, "checkpoint": bytes(4_096), "lock": b"lock", "index/1": b"mine"}
    for name, content in files.items():
        (store / name).parent.mkdir(parents=True, exist_ok=True)
        (store / name).write_bytes(content)

    def protomq(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "protomq_cli", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.stdout == ""
        return done.returncode, done.stderr.splitlines()[-1]

    code, told = protomq("standalone", "-d", str(store), "--port", "0", "--remoting-port", "0")
    assert code == 6
    assert f"{store} is no store of protomq" in told
    code, told = protomq("log", "verify", str(store))
    assert code == 4
    assert "this is not a store" in told
    assert {str(path.relative_to(store)): path.read_bytes() for path in store.rglob("*") if path.is_file()} == files
