"""A cluster of brokers without sockets: transports that answer from memory, and make the faults a test asks for.

Each broker keeps what was sent to it and recognises repeated sends, as a real one does. A test scripts what becomes of the next
calls to a broker:

    cluster.script("a", TIMEOUT_AFTER_STORING, SystemBusyError("later"), ...)     then: all well

An item is an exception (raised, nothing stored), or `after_storing(exception)` (stored, then raised: the answer was lost).

All other methods are answered well, unless a test says what comes of their next calls at a server ("" are the name servers):

    cluster.fail("a", _methods.COMMIT_OFFSETS, ConnectionLostError("gone"), ...)      tries("a", COMMIT_OFFSETS) counts them
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from protomq import _methods
from protomq._async_transport import AsyncTransport
from protomq._transport import SyncTransport
from protomq._transport_options import LongHold
from protomq._types import BrokerAddress, MethodInfo
from protomq.errors import (
    NotPermittedError,
    ProtomqError,
    SendOutOfOrderError,
    SequenceExpiredError,
    TopicNotFoundError,
)
from protomq.v1 import admin_service_pb2, consumer_service_pb2, pull_service_pb2
from protomq.v1.record_pb2 import Record
from protomq.v1.route_service_pb2 import (
    Broker,
    GetClusterInfoRequest,
    GetClusterInfoResponse,
    GetRouteRequest,
    GetRouteResponse,
    MissingBroker,
    QueueRoute,
    Route,
)
from protomq.v1.send_service_pb2 import SendRequest, SendResponse, SendStatus
from protomq.v1.topic_pb2 import PERMISSION_READ, PERMISSION_READ_WRITE, Permission


@dataclass(frozen=True)
class AfterStoring:
    error: ProtomqError


def after_storing(error: ProtomqError) -> AfterStoring:
    """The broker stores the messages; the caller gets the error all the same."""
    return AfterStoring(error)


@dataclass
class SendCall:
    """One call of Send as it arrived."""

    broker_name: str
    payload: bytes
    timeout_s: float
    one_way: bool

    @property
    def request(self) -> SendRequest:
        return SendRequest.FromString(self.payload)


@dataclass
class FakeBroker:
    name: str
    queues: dict[tuple[str, int], list[Record]] = field(default_factory=lambda: defaultdict(list))
    repeated: dict[tuple[int, int, int], tuple[int, int]] = field(default_factory=dict)
    sequences: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    script: deque[ProtomqError | AfterStoring] = field(default_factory=deque)

    def forget(self, *sequences: int) -> None:
        """The producers, or of them what a power cut took back."""
        self.repeated = {
            identity: place
            for identity, place in self.repeated.items()
            if sequences and identity[2] not in sequences
        }
        self.sequences = {
            producer: known - set(sequences)
            for producer, known in self.sequences.items()
            if sequences
        }

    def store(self, request: SendRequest) -> SendResponse:
        first = request.records[0]
        identity = (first.producer_id, first.producer_epoch, first.sequence)
        known = self.repeated.get(identity)
        if known is None:
            stored = self.sequences.get(identity[:2])
            if request.HasField("previous_sequence"):
                if stored is None:
                    raise SequenceExpiredError("not known")
                if request.previous_sequence not in stored:
                    raise SendOutOfOrderError("not stored")
            stored = self.sequences.setdefault(identity[:2], set())
            stored.update(record.sequence for record in request.records)
            queue = self.queues[request.topic, request.queue_id]
            self.repeated[identity] = known = (request.queue_id, len(queue))
            queue.extend(request.records)
            again = False
        else:
            again = True
        queue_id, offset = known
        return SendResponse(
            status=SendStatus.SEND_STATUS_SEND_OK,
            queue_id=queue_id, queue_offset=offset, record_count=len(request.records), repeated_send=again,
        )  # fmt: skip


class FakeCluster:
    """Brokers with the topics that `topics` names: {topic: {broker: queues}}."""

    def __init__(self, topics: dict[str, dict[str, int]] | None = None) -> None:
        self.topics = topics or {"T": {"a": 4}}
        self.brokers = {
            name: FakeBroker(name) for shares in self.topics.values() for name in shares
        }
        self.calls: list[SendCall] = []
        self.committed: dict[tuple[str, str, int], int] = {}
        """By group, topic and queue id."""
        self._tries: Counter[tuple[str, str]] = Counter()
        self._failures: dict[tuple[str, str], deque[ProtomqError]] = defaultdict(deque)
        self.route_calls = 0
        self.away: set[str] = set()
        """Brokers that the name server has taken off the routes."""
        self.leaderless: set[str] = set()
        """Those of which only a slave is registered."""
        self.closed: set[str] = set()
        """Brokers that let nobody write, since they are drained; the name server says so once `told_closed` has their names, too."""
        self.told_closed: set[str] = set()
        self.on_send: Callable[[SendCall], None] | None = None
        self._lock = threading.Lock()

    def script(self, broker_name: str, *items: ProtomqError | AfterStoring) -> None:
        self.brokers[broker_name].script.extend(items)

    def fail(self, server: str, method: MethodInfo, *errors: ProtomqError) -> None:
        """What the next calls of a method at a broker (or "": at a name server) end with."""
        self._failures[server, method.path].extend(errors)

    def tries(self, server: str, method: MethodInfo) -> int:
        """How often a method was called there."""
        return self._tries[server, method.path]

    def stored(self, topic: str = "T") -> dict[tuple[str, int], list[bytes]]:
        """Bodies by (broker, queue)."""
        return {
            (broker.name, queue_id): [record.body for record in records]
            for broker in self.brokers.values()
            for (name, queue_id), records in broker.queues.items()
            if name == topic and records
        }

    def bodies(self, topic: str = "T") -> list[bytes]:
        """All bodies that are stored, sorted."""
        return sorted(body for bodies in self.stored(topic).values() for body in bodies)

    def answer(
        self,
        address: BrokerAddress,
        method: MethodInfo,
        payload: Sequence[bytes],
        timeout_s: float,
        one_way: bool,
    ) -> bytes:
        data = b"".join(payload)
        asked = (address.broker_name, method.path)
        self._tries[asked] += 1
        if self._failures[asked]:
            raise self._failures[asked].popleft()
        if method == _methods.GET_ROUTE:
            return self._answer_route(GetRouteRequest.FromString(data).topic)
        if method != _methods.SEND:
            return self._answer_other(address.broker_name, method, data)
        call = SendCall(address.broker_name, data, timeout_s, one_way)
        if self.on_send is not None:
            self.on_send(call)
        with self._lock:
            self.calls.append(call)
            broker = self.brokers[address.broker_name]
            outcome = broker.script.popleft() if broker.script else None
            if isinstance(outcome, ProtomqError):
                raise outcome
            if address.broker_name in self.closed:
                raise NotPermittedError(f"topic {call.request.topic} may not be written")
            response = broker.store(call.request)
            if isinstance(outcome, AfterStoring):
                raise outcome.error
        return b"" if one_way else response.SerializeToString()

    def _answer_other(self, broker_name: str, method: MethodInfo, data: bytes) -> bytes:
        consumer, admin = consumer_service_pb2, admin_service_pb2
        if method == _methods.GET_CLUSTER_INFO:
            asked_topic = GetClusterInfoRequest.FromString(data).topic
            missing = [
                MissingBroker(broker=self._broker(name), cause="its connection broke")
                for name in sorted(self.away)
                if not asked_topic or name in self.topics.get(asked_topic, {})
            ]
            info = GetClusterInfoResponse(brokers=self._brokers(), missing_brokers=missing)
            return info.SerializeToString()
        if method == _methods.GET_BROKER_STATUS:
            return admin.GetBrokerStatusResponse(broker_name=broker_name).SerializeToString()
        if method == _methods.GET_QUEUE_RANGE:
            asked = consumer.GetQueueRangeRequest.FromString(data)
            ranges = [consumer.QueueRange(queue_id=queue_id, end_offset=9) for queue_id in asked.queue_ids]
            return consumer.GetQueueRangeResponse(ranges=ranges, topic_incarnation=1).SerializeToString()
        if method == _methods.GET_OFFSETS:
            wanted = consumer.GetOffsetsRequest.FromString(data)
            offsets = [
                consumer.QueueOffset(queue_id=queue_id, queue_offset=self.committed[key])
                for queue_id in wanted.queue_ids
                if (key := (wanted.consumer_group, wanted.topic, queue_id)) in self.committed
            ]
            return consumer.GetOffsetsResponse(offsets=offsets, topic_incarnation=1).SerializeToString()
        if method == _methods.COMMIT_OFFSETS:
            commit = consumer.CommitOffsetsRequest.FromString(data)
            for one in commit.offsets:
                self.committed[commit.consumer_group, one.topic, one.queue_id] = one.queue_offset
        elif method == _methods.PULL:
            no_new = pull_service_pb2.PullStatus.PULL_STATUS_NO_NEW_MSG
            return pull_service_pb2.PullResponse(status=no_new).SerializeToString()
        return b""

    def _brokers(self) -> list[Broker]:
        return [self._broker(name) for name in self.brokers if name not in self.away]

    def _broker(self, name: str) -> Broker:
        broker_id = int(name in self.leaderless)
        # A slave takes no sends, and says so.
        permission = Permission.PERMISSION_READ if broker_id else Permission.PERMISSION_READ_WRITE
        return Broker(
            broker_name=name, broker_id=broker_id, permission=permission, grpc_address=f"{name}:1", remoting_address=f"{name}:2"
        )

    def _answer_route(self, topic: str) -> bytes:
        self.route_calls += 1
        shares = self.topics.get(topic)
        if shares is None:
            raise TopicNotFoundError(f"no topic {topic}")
        queues = [
            QueueRoute(
                broker_name=name,
                write_queues=count,
                read_queues=count,
                permission=PERMISSION_READ if name in self.told_closed else PERMISSION_READ_WRITE,
            )
            for name, count in shares.items()
            if name not in self.away
        ]
        return GetRouteResponse(
            route=Route(topic=topic, queues=queues, brokers=self._brokers())
        ).SerializeToString()


class FakeSyncTransport(SyncTransport):
    """Calls of threads, answered by the cluster."""

    def __init__(self, cluster: FakeCluster) -> None:
        super().__init__()
        self.cluster = cluster

    def call(
        self,
        address: BrokerAddress,
        method: MethodInfo,
        payload: Sequence[bytes],
        timeout_s: float,
        *,
        one_way: bool = False,
    ) -> bytes:
        return self.cluster.answer(address, method, payload, timeout_s, one_way)


class FakeAsyncTransport(AsyncTransport):
    """Calls of coroutines, answered by the cluster. `gate`, if set, is awaited before each send is answered."""

    def __init__(self, cluster: FakeCluster) -> None:
        super().__init__()
        self.cluster = cluster
        self.gate: Callable[[], object] | None = None

    async def call(
        self,
        address: BrokerAddress,
        method: MethodInfo,
        payload: Sequence[bytes],
        timeout_s: float,
        *,
        one_way: bool = False,
        long_hold: LongHold | None = None,
    ) -> bytes:
        if self.gate is not None and method == _methods.SEND:
            await self.gate()  # type: ignore[misc]
        return self.cluster.answer(address, method, payload, timeout_s, one_way)
