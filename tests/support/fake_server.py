"""A small remoting server for tests of the SDK: one thread, an in-memory store, and faults on request.

It speaks `protomq.wire.frames`, stamps records as a broker does, and answers the methods that the SDK calls: routing, send, pull
with holds, offsets, topics. What it can be told to do wrong:

    fail(method, status)      answer the next call of a method with an error
    stall(method)             never answer the next call of a method
    answer_once(method, data) answer the next call of a method with this
    drop(method)              close the connection instead of answering the next call
    stop() / start()          go away and come back on the same port
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent import futures
from typing import Any, ClassVar

from protomq import _methods
from protomq._types import MethodInfo
from protomq.v1 import (
    admin_service_pb2,
    consumer_service_pb2,
    membership_service_pb2,
    pull_service_pb2,
    record_pb2,
    remoting_pb2,
    route_service_pb2,
    send_service_pb2,
    topic_pb2,
)
from protomq.wire.frames import (
    CANCEL_METHOD_ID,
    ECHO_METHOD_ID,
    FLAG_ONE_WAY,
    HEADER,
    HELLO_METHOD_ID,
    MAGIC,
    encode_answer,
)
from protomq.wire.record import (
    STAMP,
    STAMP_TAGS,
    RecordTemplate,
    encode_message_id,
    encode_record_field,
)
from protomq.wire.status import RpcStatus, encode_status

CANCELLED = RpcStatus(1, "given up", "CANCELLED")
NOT_FOUND = RpcStatus(5, "no such topic", "TOPIC_NOT_FOUND")


def _no_such_method(server: FakeServer, payload: bytes) -> RpcStatus:
    """As a broker of an older version answers."""
    return RpcStatus(12, "no such method", "UNKNOWN_METHOD")


class FakeServer:
    """Name server and broker `broker_name` in one, on a port of 127.0.0.1."""

    def __init__(self, topics: dict[str, int] | None = None, broker_name: str = "broker-a") -> None:
        self.broker_name = broker_name
        self.topics = dict(topics or {})
        self.log: dict[tuple[str, int], list[bytes]] = defaultdict(list)
        self.min_offsets: dict[tuple[str, int], int] = defaultdict(int)
        self.committed: dict[tuple[str, str, int], int] = {}
        self.groups_in_use: set[str] = set()
        self.calls: list[tuple[int, bytes]] = []
        self.timeouts_ms: list[int] = []
        self.connections_accepted = 0
        self.brokers: list[route_service_pb2.Broker] = []
        self.auto_create = False
        """The route of a topic that is not there has two queues, as if a broker made it on the first send."""
        self.hello_refusals: list[RpcStatus] = []
        """What the next connections are refused with."""
        self._faults: dict[int, list[Any]] = defaultdict(list)
        self._lock = threading.RLock()
        self._physical = 0
        self._port = 0
        self._thread: threading.Thread | None = None

    # -- life ------------------------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def start(self) -> FakeServer:
        self._listener = socket.create_server(("127.0.0.1", self._port), reuse_port=False)
        self._port = self._listener.getsockname()[1]
        self._listener.setblocking(False)
        self._wake_in, self._wake_out = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._buffers: dict[socket.socket, bytearray] = {}
        self._holds: list[tuple[float, socket.socket, int, pull_service_pb2.PullRequest]] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="fake-server", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        if self._thread is None:
            return
        self._stopping = True
        self._wake()
        self._thread.join(60)
        self._thread = None
        for sock in (*self._buffers, self._listener, self._wake_in, self._wake_out):
            sock.close()
        self._selector.close()

    def __enter__(self) -> FakeServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wake(self) -> None:
        self._wake_out.send(b"x")

    # -- faults and data -------------------------------------------------------------------------------------------------

    def fail(self, method: Any, status: RpcStatus, times: int = 1) -> None:
        self._faults[method.method_id].extend([status] * times)

    def answer_once(self, method: Any, answer: bytes) -> None:
        self._faults[method.method_id].append(answer)

    def stall(self, method: Any, times: int = 1) -> None:
        self._faults[method.method_id].extend(["stall"] * times)

    def drop(self, method: Any) -> None:
        self._faults[method.method_id].append("drop")

    def append(self, topic: str, queue_id: int, bodies: Iterable[bytes], **fields: Any) -> None:
        """Stores messages as if a producer had sent them."""
        template = RecordTemplate(topic, 7, 1)
        for body in bodies:
            self.store(
                topic,
                queue_id,
                template.encode(body, len(self.log[topic, queue_id]), 1_700_000_000_000, **fields),
            )
        self._wake()

    def store(self, topic: str, queue_id: int, record: bytes) -> int:
        """Stamps and stores one record; its queue offset."""
        with self._lock:
            queue = self.log[topic, queue_id]
            offset = len(queue)
            values = (queue_id, 1_700_000_000_000 + offset * 1000, offset, self._physical)
            pairs = zip(STAMP_TAGS, values, strict=True)
            stamp = STAMP.pack(*(part for pair in pairs for part in pair))
            field = encode_record_field(record[: -STAMP.size] + stamp)
            self._physical += len(field)
            queue.append(field)
            return offset

    def called(self, method: Any) -> int:
        """How often a method was called."""
        return sum(1 for method_id, _ in self.calls if method_id == method.method_id)

    # -- the loop --------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            ends = [at_s for at_s, *_ in self._holds]
            timeout = max(min(ends) - time.monotonic(), 0) if ends else None
            for key, _ in self._selector.select(timeout):
                sock: socket.socket = key.fileobj  # type: ignore[assignment]
                if sock is self._listener:
                    self._accept()
                elif sock is self._wake_in:
                    self._wake_in.recv(4096)
                else:
                    self._read(sock)
            self._answer_holds()

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connections_accepted += 1
        self._buffers[sock] = bytearray()
        self._selector.register(sock, selectors.EVENT_READ)

    def _close(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        self._buffers.pop(sock, None)
        self._holds = [hold for hold in self._holds if hold[1] is not sock]
        sock.close()

    def _read(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            self._close(sock)
            return
        buffer = self._buffers[sock]
        buffer += data
        if buffer[:4] == MAGIC:
            del buffer[:4]
        while len(buffer) >= 16:
            length, request_id, method_id, flags, _, timeout_ms = HEADER.unpack_from(buffer)
            if len(buffer) < 4 + length:
                return
            payload = bytes(buffer[16 : 4 + length])
            del buffer[: 4 + length]
            self.timeouts_ms.append(timeout_ms)
            if not self._serve(sock, request_id, method_id, flags, payload):
                return

    def _serve(
        self, sock: socket.socket, request_id: int, method_id: int, flags: int, payload: bytes
    ) -> bool:
        if method_id == HELLO_METHOD_ID:
            self.hello = remoting_pb2.RemotingHello.FromString(payload)
            if self.hello_refusals:
                refusal = self.hello_refusals.pop(0)
                self._answer(sock, request_id, 0, encode_status(refusal), refusal.code)
                return True
            welcome = remoting_pb2.RemotingWelcome(
                server_name=self.broker_name, frame_size_max_bytes=32 << 20
            )
            self._answer(sock, request_id, 0, welcome.SerializeToString())
            return True
        if method_id == ECHO_METHOD_ID:
            self._answer(sock, request_id, method_id, b"")
            return True
        if method_id == CANCEL_METHOD_ID:
            for hold in [hold for hold in self._holds if hold[1:3] == (sock, request_id)]:
                self._holds.remove(hold)
                self._answer(sock, request_id, method_id, encode_status(CANCELLED), CANCELLED.code)
            return True
        self.calls.append((method_id, payload))
        fault = self._faults[method_id].pop(0) if self._faults[method_id] else None
        if fault == "stall":
            return True
        if fault == "drop":
            self._close(sock)
            return False
        if isinstance(fault, RpcStatus):
            self._answer(sock, request_id, method_id, encode_status(fault), fault.code)
            return True
        handler = self._handlers.get(method_id, _no_such_method)
        answer = fault if isinstance(fault, bytes) else handler(self, payload)
        if isinstance(answer, RpcStatus):
            self._answer(sock, request_id, method_id, encode_status(answer), answer.code)
        elif isinstance(answer, pull_service_pb2.PullRequest):
            self._holds.append((time.monotonic() + answer.hold_ms / 1000, sock, request_id, answer))
        elif answer is not None and not flags & FLAG_ONE_WAY:
            self._answer(sock, request_id, method_id, answer)
        return True

    def _answer(
        self, sock: socket.socket, request_id: int, method_id: int, payload: bytes, status: int = 0
    ) -> None:
        sock.setblocking(True)
        try:
            sock.sendall(encode_answer(request_id, method_id, len(payload), status) + payload)
        except OSError:
            pass

    def _answer_holds(self) -> None:
        now = time.monotonic()
        for hold in list(self._holds):
            at_s, sock, request_id, request = hold
            answer = self._pull_now(request, final=at_s <= now)
            if answer is not None:
                self._holds.remove(hold)
                self._answer(sock, request_id, _methods.PULL.method_id, answer)

    # -- methods ---------------------------------------------------------------------------------------------------------

    def _get_route(self, payload: bytes) -> bytes | RpcStatus:
        topic = route_service_pb2.GetRouteRequest.FromString(payload).topic
        auto_create = self.auto_create and topic not in self.topics
        if topic not in self.topics and not auto_create:
            return NOT_FOUND
        brokers = self.brokers or [self.as_broker()]
        count = self.topics.get(topic, 2)
        queues = [
            route_service_pb2.QueueRoute(
                broker_name=broker.broker_name, write_queues=count, read_queues=count
            )
            for broker in brokers
        ]
        route = route_service_pb2.Route(
            topic=topic, queues=queues, brokers=brokers, auto_create=auto_create
        )
        return route_service_pb2.GetRouteResponse(route=route).SerializeToString()

    def as_broker(self) -> route_service_pb2.Broker:
        return route_service_pb2.Broker(
            cluster="c", broker_name=self.broker_name, remoting_address=self.address
        )

    def _cluster_info(self, payload: bytes) -> bytes:
        return route_service_pb2.GetClusterInfoResponse(
            brokers=self.brokers or [self.as_broker()]
        ).SerializeToString()

    def _send(self, payload: bytes) -> bytes:
        request = send_service_pb2.SendRequest.FromString(payload)
        first = physical = 0
        for i, record in enumerate(request.records):
            physical = physical or self._physical
            offset = self.store(
                request.topic, request.queue_id, record.SerializeToString(deterministic=True)
            )
            first = first if i else offset
        return send_service_pb2.SendResponse(
            status=send_service_pb2.SEND_STATUS_SEND_OK,
            queue_id=request.queue_id,
            queue_offset=first,
            record_count=len(request.records),
            physical_offset=physical,
        ).SerializeToString()

    def _pull(self, payload: bytes) -> bytes | RpcStatus | pull_service_pb2.PullRequest:
        request = pull_service_pb2.PullRequest.FromString(payload)
        if request.topic not in self.topics:
            return NOT_FOUND
        return self._pull_now(request, final=not request.hold_ms) or request

    def _pull_now(self, request: pull_service_pb2.PullRequest, *, final: bool) -> bytes | None:
        key = (request.topic, request.queue_id)
        with self._lock:
            queue, minimum = self.log[key], self.min_offsets[key]
            end = len(queue)
            if not minimum <= request.queue_offset <= end:
                nearest = min(max(request.queue_offset, minimum), end)
                return encode_pull_answer(4, nearest, minimum, end, [])
            chosen: list[tuple[int, bytes]] = []
            size, at = 0, request.queue_offset
            while at < end and len(chosen) < (request.record_count_max or 32):
                field = queue[at]
                if chosen and size + len(field) > (request.size_max_bytes or 4 << 20):
                    break
                if not request.tags or tag_of(field) in request.tags:
                    chosen.append((at, field))
                    size += len(field)
                at += 1
        if chosen:
            return encode_pull_answer(1, at, minimum, end, chosen)
        if at > request.queue_offset:
            return encode_pull_answer(3, at, minimum, end, [])
        return encode_pull_answer(2, at, minimum, end, []) if final else None

    def _commit_offsets(self, payload: bytes) -> bytes:
        request = consumer_service_pb2.CommitOffsetsRequest.FromString(payload)
        for offset in request.offsets:
            self.committed[request.consumer_group, offset.topic, offset.queue_id] = (
                offset.queue_offset
            )
        return b""

    def _get_offsets(self, payload: bytes) -> bytes:
        request = consumer_service_pb2.GetOffsetsRequest.FromString(payload)
        answer = consumer_service_pb2.GetOffsetsResponse()
        for (group, topic, queue_id), offset in self.committed.items():
            if (
                group == request.consumer_group
                and topic == request.topic
                and queue_id in request.queue_ids
            ):
                answer.offsets.add(topic=topic, queue_id=queue_id, queue_offset=offset)
        return answer.SerializeToString()

    def _get_queue_range(self, payload: bytes) -> bytes | RpcStatus:
        request = consumer_service_pb2.GetQueueRangeRequest.FromString(payload)
        if request.topic not in self.topics:
            return NOT_FOUND
        answer = consumer_service_pb2.GetQueueRangeResponse()
        for i in request.queue_ids or range(self.topics[request.topic]):
            key = (request.topic, i)
            answer.ranges.add(
                queue_id=i, min_offset=self.min_offsets[key], end_offset=len(self.log[key])
            )
        return answer.SerializeToString()

    def _search_offset(self, payload: bytes) -> bytes:
        request = consumer_service_pb2.SearchOffsetRequest.FromString(payload)
        wanted = request.store_time.ToMilliseconds()
        queue = self.log[request.topic, request.queue_id]
        found = [
            i
            for i, field in enumerate(queue)
            if struct.unpack_from("<Q", field, len(field) - 28)[0] >= wanted
        ]
        return consumer_service_pb2.SearchOffsetResponse(
            queue_offset=found[0] if found else len(queue)
        ).SerializeToString()

    def _create_topic(self, payload: bytes) -> bytes:
        topic = admin_service_pb2.CreateTopicRequest.FromString(payload).topic
        self.topics[topic.name] = topic.write_queues or 8
        return admin_service_pb2.CreateTopicResponse(
            topic=self._as_topic(topic.name)
        ).SerializeToString()

    def _describe_topic(self, payload: bytes) -> bytes | RpcStatus:
        name = admin_service_pb2.DescribeTopicRequest.FromString(payload).topic
        if name not in self.topics:
            return NOT_FOUND
        answer = admin_service_pb2.DescribeTopicResponse(topic=self._as_topic(name))
        for i in range(self.topics[name]):
            answer.queues.add(
                queue_id=i, min_offset=self.min_offsets[name, i], end_offset=len(self.log[name, i])
            )
        return answer.SerializeToString()

    def _delete_topic(self, payload: bytes) -> bytes | RpcStatus:
        name = admin_service_pb2.DeleteTopicRequest.FromString(payload).topic
        return b"" if self.topics.pop(name, None) else NOT_FOUND

    def _list_topic_names(self, payload: bytes) -> bytes:
        request = route_service_pb2.ListTopicNamesRequest.FromString(payload)
        names = sorted(name for name in self.topics if name > request.page_token)
        page = names[: request.page_size or 1000]
        token = page[-1] if len(page) < len(names) else ""
        return route_service_pb2.ListTopicNamesResponse(
            topics=page, next_page_token=token
        ).SerializeToString()

    def _list_topics(self, payload: bytes) -> bytes:
        topics = [self._as_topic(name) for name in sorted(self.topics)]
        return admin_service_pb2.ListTopicsResponse(topics=topics).SerializeToString()

    def _list_groups(self, payload: bytes) -> bytes | RpcStatus:
        request = admin_service_pb2.ListGroupsRequest.FromString(payload)
        if request.topic and request.topic not in self.topics:
            return NOT_FOUND
        topics: dict[str, set[str]] = {}
        for group, topic, _ in self.committed:
            if group > request.page_token:
                topics.setdefault(group, set()).add(topic)
        names = sorted(g for g in topics if not request.topic or request.topic in topics[g])
        page = names[: request.page_size]
        answer = admin_service_pb2.ListGroupsResponse(
            next_page_token=page[-1] if len(names) > len(page) else ""
        )
        for name in page:
            answer.groups.add(consumer_group=name, topics=sorted(topics[name]))
        return answer.SerializeToString()

    def _delete_group(self, payload: bytes) -> bytes | RpcStatus:
        request = admin_service_pb2.DeleteGroupRequest.FromString(payload)
        group = request.consumer_group
        keys = [key for key in self.committed if key[0] == group]
        if not keys:
            return RpcStatus(5, "", "GROUP_NOT_FOUND", {"consumer_group": group})
        if group in self.groups_in_use and not request.force:
            return RpcStatus(9, "", "GROUP_IN_USE", {"consumer_group": group, "member": "m"})
        for key in keys:
            del self.committed[key]
        return b""

    def _broker_status(self, payload: bytes) -> bytes:
        return admin_service_pb2.GetBrokerStatusResponse(
            broker_name=self.broker_name
        ).SerializeToString()

    def _stats(self, payload: bytes) -> bytes:
        topics = [
            admin_service_pb2.TopicStats(
                topic=name, records_in=sum(len(self.log[name, i]) for i in range(count))
            )
            for name, count in self.topics.items()
        ]
        return admin_service_pb2.GetStatsResponse(topics=topics).SerializeToString()

    def _query_messages(self, payload: bytes) -> bytes:
        request = admin_service_pb2.QueryMessagesRequest.FromString(payload)
        found: list[bytes] = []  # As they stand in the log: their CRC covers octets.
        for (topic, _), fields in self.log.items():
            for field in fields:
                (record,) = record_pb2.RecordBatch.FromString(field).records
                identity = record.producer_id, record.producer_epoch, record.sequence
                if topic == request.topic and (
                    request.key in record.keys or request.message_id == encode_message_id(*identity)
                ):
                    found.append(field)
        return b"".join(found)

    def _ping(self, payload: bytes) -> bytes:
        return b""

    def _as_topic(self, name: str) -> topic_pb2.Topic:
        count = self.topics[name]
        return topic_pb2.Topic(
            name=name,
            write_queues=count,
            read_queues=count,
            permission=topic_pb2.PERMISSION_READ_WRITE,
        )

    def _hold_membership(self, payload: bytes) -> bytes | None:
        """Each member is alone in its group, and hears no news."""
        request = membership_service_pb2.HoldMembershipRequest.FromString(payload)
        if request.known_version == 2 and not request.claims_only:
            return None
        return membership_service_pb2.HoldMembershipResponse(
            version=2, broker_start=1, members=[] if request.claims_only else [request.member],
            expiry_ms=25_000, is_about_claims=request.claims_only,
        ).SerializeToString()  # fmt: skip

    def _leave_group(self, payload: bytes) -> bytes:
        return b""

    _handlers: ClassVar[dict[int, Callable[[FakeServer, bytes], Any]]] = {
        _methods.GET_ROUTE.method_id: _get_route,
        _methods.HOLD_MEMBERSHIP.method_id: _hold_membership,
        _methods.LEAVE_GROUP.method_id: _leave_group,
        _methods.GET_CLUSTER_INFO.method_id: _cluster_info,
        _methods.LIST_TOPIC_NAMES.method_id: _list_topic_names,
        _methods.SEND.method_id: _send,
        _methods.PULL.method_id: _pull,
        _methods.COMMIT_OFFSETS.method_id: _commit_offsets,
        _methods.GET_OFFSETS.method_id: _get_offsets,
        _methods.GET_QUEUE_RANGE.method_id: _get_queue_range,
        _methods.SEARCH_OFFSET.method_id: _search_offset,
        _methods.CREATE_TOPIC.method_id: _create_topic,
        _methods.DESCRIBE_TOPIC.method_id: _describe_topic,
        _methods.DELETE_TOPIC.method_id: _delete_topic,
        _methods.LIST_TOPICS.method_id: _list_topics,
        _methods.GET_BROKER_STATUS.method_id: _broker_status,
        _methods.GET_STATS.method_id: _stats,
        _methods.QUERY_MESSAGES.method_id: _query_messages,
        _methods.PING.method_id: _ping,
        _methods.LIST_GROUPS.method_id: _list_groups,
        _methods.DELETE_GROUP.method_id: _delete_group,
    }


def encode_pull_answer(
    status: Any, next_offset: int, min_offset: int, end_offset: int, chosen: list[tuple[int, bytes]]
) -> bytes:
    """A PullResponse as brokers write it: header, then the regions."""
    regions = b"".join(field for _, field in chosen)
    starts, at = [], 0
    for _, field in chosen:
        starts.append(at)
        at += len(field)
    dense = all(offset == chosen[0][0] + i for i, (offset, _) in enumerate(chosen))
    header = pull_service_pb2.PullResponse(
        status=status, next_offset=next_offset, min_offset=min_offset, end_offset=end_offset,
        regions_size_bytes=len(regions), record_starts=starts, record_sizes=[len(field) for _, field in chosen],
        queue_offsets=[] if dense else [offset for offset, _ in chosen], first_offset=chosen[0][0] if chosen else 0,
    )  # fmt: skip
    return header.SerializeToString() + regions


def tag_of(field: bytes) -> str:
    return str(record_pb2.RecordBatch.FromString(field).records[0].tag)


class FakeGrpcFront:
    """The methods of a FakeServer over gRPC (holds are answered when they end)."""

    def __init__(self, server: FakeServer, port: int = 0) -> None:
        import grpc

        self._server = server
        self._grpc = grpc.server(
            futures.ThreadPoolExecutor(4, thread_name_prefix="fake-grpc"),
            options=[("grpc.so_reuseport", 0)],
        )
        methods = {
            value.path: value for value in vars(_methods).values() if isinstance(value, MethodInfo)
        }

        class Handler(grpc.GenericRpcHandler):
            def service(_, details: Any) -> Any:
                method = methods.get(details.method)
                if method is None:
                    return None
                return grpc.unary_unary_rpc_method_handler(
                    lambda request, context: self._serve(method.method_id, request, context)
                )

        self._grpc.add_generic_rpc_handlers((Handler(),))
        self.port = self._grpc.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{self.port}"

    def _serve(self, method_id: int, request: bytes, context: Any) -> bytes:
        import grpc

        faults = self._server._faults[method_id]
        answer = (
            faults.pop(0) if faults else self._server._handlers[method_id](self._server, request)
        )
        if answer is None or answer == "stall":
            over = threading.Event()
            if context.add_callback(over.set):
                over.wait(context.time_remaining() + 1)
            return b""
        while isinstance(answer, pull_service_pb2.PullRequest):
            ends_s = time.monotonic() + answer.hold_ms / 1000
            while (
                found := self._server._pull_now(answer, final=time.monotonic() >= ends_s)
            ) is None:
                if not context.is_active():
                    return b""
                time.sleep(0.005)
            answer = found
        if isinstance(answer, RpcStatus):
            code = next(code for code in grpc.StatusCode if code.value[0] == answer.code)
            context.set_trailing_metadata((("grpc-status-details-bin", encode_status(answer)),))
            context.abort(code, answer.message)
        return bytes(answer)

    def __enter__(self) -> FakeGrpcFront:
        self._grpc.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._grpc.stop(0).wait()
