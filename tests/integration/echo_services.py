"""Small implementations of the real services, each doing what one test wants: echo, hold, fail, serve a file."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from protomq.v1 import admin_service_pb2, pull_service_pb2, route_service_pb2, send_service_pb2
from protomq_runtime.call import Call, CallContext, CallLane
from protomq_runtime.dispatch import DispatchTable, drained, raw, streaming
from protomq_runtime.errors import SHUTTING_DOWN, Code, ServiceError, invalid_argument
from protomq_runtime.regions import Region
from protomq_runtime.server import Server


class EchoAdmin:
    """Plain. DescribeTopic says what it was asked; some topics fail."""

    def ping(self, request: Message, context: CallContext) -> admin_service_pb2.PingResponse:
        return admin_service_pb2.PingResponse()

    def describe_topic(
        self, request: admin_service_pb2.DescribeTopicRequest, context: CallContext
    ) -> admin_service_pb2.DescribeTopicResponse:
        if request.topic == "":
            raise invalid_argument("topic", "is empty")
        if request.topic == "missing":
            raise ServiceError(
                Code.NOT_FOUND, "TOPIC_NOT_FOUND", "no such topic", metadata={"topic": "missing"}
            )
        if request.topic == "defect":
            raise RuntimeError("secret of the server")
        response = admin_service_pb2.DescribeTopicResponse()
        if request.topic == "who calls":
            response.topic.name = context.principal.name or "nobody in particular"
            return response
        response.topic.name = f"{request.topic} {context.peer} {context.deadline is not None}"
        return response

    def list_topics(
        self, request: Any, context: CallContext
    ) -> admin_service_pb2.ListTopicsResponse:
        """A large answer without regions: page_size MiB."""
        return admin_service_pb2.ListTopicsResponse(next_page_token="x" * (request.page_size << 20))

    def create_topic(self, request: Any, context: CallContext) -> Any:
        raise NotImplementedError

    delete_topic = get_broker_status = get_stats = query_messages = list_groups = delete_group = create_topic


class EchoSend:
    """Drained. Answers how many calls came together, and how long the first one's topic is."""

    def __init__(self) -> None:
        self.groups: list[int] = []
        self.payload_types: set[type] = set()
        self.one_way_payloads: list[bytes] = []
        self.waiting = False
        self.gate: threading.Event | None = None
        """If set, the lane waits here before it answers: the test's way to make a queue."""

    @raw
    def recall_message(self, call: Call) -> None:
        call.answer(b"")

    @drained
    def send(self, calls: list[Call]) -> None:
        if self.gate is not None:
            self.waiting = True
            self.gate.wait(60)
        self.groups.append(len(calls))
        for call in calls:
            self.payload_types.add(type(call.payload))
            request = send_service_pb2.SendRequest.FromString(call.payload)  # type: ignore[arg-type]
            if request.topic == "defect":
                raise RuntimeError("after some answers")
            if request.topic == "one-way":
                self.one_way_payloads.append(bytes(call.payload))
            call.answer(
                send_service_pb2.SendResponse(
                    record_count=len(calls), queue_offset=len(request.topic)
                ).SerializeToString()
            )


class FilePull:
    """Raw. Serves regions of a file, or holds."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("rb")
        self.held: list[tuple[CallLane, Call]] = []
        self.dropped = threading.Semaphore(0)
        self.holding = threading.Semaphore(0)
        self.served = 0

    @raw
    def pull(self, call: Call) -> None:
        request = pull_service_pb2.PullRequest.FromString(call.payload)  # type: ignore[arg-type]
        self.served += 1
        if request.topic == "hold":
            self.hold(call, request.hold_ms)
        elif request.topic == "twice":
            call.answer(b"")
            call.answer(b"")
        elif request.topic == "defect":
            raise RuntimeError("before an answer")
        else:
            regions = self.regions(request)
            size = sum(region.size_bytes for region in regions)
            header = pull_service_pb2.PullResponse(
                status=pull_service_pb2.PULL_STATUS_FOUND, regions_size_bytes=size
            )
            call.answer(header.SerializeToString(), regions, size)

    def regions(self, request: pull_service_pb2.PullRequest) -> list[Region]:
        offset, size = request.queue_offset, request.size_max_bytes
        if request.topic == "scatter":
            count = request.record_count_max
            return [Region(self.file, offset + index * 2 * size, size) for index in range(count)]
        return [Region(self.file, offset, size)]

    def hold(self, call: Call, hold_ms: int) -> None:
        entry = (call.lane, call)
        self.held.append(entry)

        def on_timeout() -> None:
            self.held.remove(entry)
            call.answer(b"")

        def on_close() -> None:
            timer.cancel()
            self.held.remove(entry)
            self.dropped.release()

        timer = call.lane.call_later(call.hold_time_ms(hold_ms), on_timeout)
        call.hold(on_close)
        self.holding.release()

    def stop(self) -> None:
        for lane, call in list(self.held):
            lane.post(lambda call=call: call.fail(SHUTTING_DOWN))  # type: ignore[misc]


class EchoRoute:
    """Streams as many answers as the topic has letters."""

    def __init__(self) -> None:
        self.started_with: Server | None = None

    def start(self, server: Server) -> None:
        self.started_with = server

    @streaming
    async def watch_route(self, request: Any, context: CallContext) -> Any:
        if request.topic == "missing":
            raise ServiceError(Code.NOT_FOUND, "TOPIC_NOT_FOUND", "no such topic")
        if request.topic == "who calls":
            assert context.principal.name == "alice"
        for _ in request.topic:
            yield route_service_pb2.WatchRouteResponse()
        if request.topic == "defect":
            raise RuntimeError("secret of the server")

    def get_route(self, request: Any, context: CallContext) -> Any:
        raise NotImplementedError

    register_broker = unregister_broker = heartbeat = hold_registration = get_route
    list_topic_names = get_cluster_info = forget_broker = get_route


class Services:
    """The implementations and their table."""

    def __init__(self, path: Path) -> None:
        self.admin = EchoAdmin()
        self.send = EchoSend()
        self.pull = FilePull(path)
        self.route = EchoRoute()
        self.table = DispatchTable()
        for module, name, implementation in (
            (admin_service_pb2, "AdminService", self.admin),
            (send_service_pb2, "SendService", self.send),
            (pull_service_pb2, "PullService", self.pull),
            (route_service_pb2, "RouteService", self.route),
        ):
            self.table.add_service(module.DESCRIPTOR.services_by_name[name], implementation)
