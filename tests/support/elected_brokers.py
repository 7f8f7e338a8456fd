"""Three brokers of one name with a real etcd and a name server, and a producer that counts what was acknowledged, and when."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc

from protomq import MessageQueue, Producer, SendStatus
from protomq.errors import ProtomqError
from protomq.testing import FaultProxy
from protomq.v1.ha_service_pb2 import GetHaStatusRequest
from protomq.v1.ha_service_pb2_grpc import HaServiceStub
from protomq.v1.pull_service_pb2 import PullRequest
from protomq.v1.pull_service_pb2_grpc import PullServiceStub
from protomq.v1.send_service_pb2 import SendStatus as WireStatus

from .etcd_server import EtcdMembers
from .ha_brokers import NAME, TOPIC, HaBroker
from .namesrv import running_namesrv
from .waiting import PATIENCE_S, wait_for

SEND_OK: Final = WireStatus.SEND_STATUS_SEND_OK
CHANGE_TEXT: Final = "the slave's services ended in"
SAID_LINES: Final = 60
LEADS_PATTERN: Final = re.compile(rf"this broker leads {NAME} in epoch (\d+)")


class Links(NamedTuple):
    """Of one broker: `etcd`, to each member of etcd; `remoting`, by which its slaves and clients reach it. Its gRPC port stays open."""

    etcd: tuple[FaultProxy, ...]
    remoting: FaultProxy

    @property
    def all(self) -> tuple[FaultProxy, ...]:
        """Both kinds."""
        return (*self.etcd, self.remoting)


@dataclass
class ElectedCluster:
    """Processes; those that are killed are started again by whoever kills them. `links`: of each broker, if they can be cut."""

    etcd: EtcdMembers
    brokers: Sequence[HaBroker]
    namesrv: str
    links: Sequence[Links] = ()

    def led_epochs(self) -> Counter[int]:
        """In how many brokers' logs each epoch was led."""
        found = (LEADS_PATTERN.findall(broker.log_text()) for broker in self.brokers)
        return Counter(int(epoch) for epochs in found for epoch in epochs)

    def last_epoch_beside(self, broker: HaBroker) -> int:
        """The last epoch that another broker than this one has led. On a busy machine the lead may have come back since."""
        found = (LEADS_PATTERN.findall(other.log_text()) for other in self.brokers if other is not broker)
        return max((int(epoch) for epochs in found for epoch in epochs), default=0)

    def last_lines(self) -> str:
        """What the brokers have said last, which is gone with their folders."""
        return "\n".join("\n".join([f"--- {each.folder.name}", *each.log_text().splitlines()[-SAID_LINES:]]) for each in self.brokers)

    def last_change(self) -> str:
        """What the broker that began to lead last says of its change of role; "" if none does."""
        lines = [line for broker in self.brokers for line in broker.log_text().splitlines() if CHANGE_TEXT in line]
        return max(lines, default="").rpartition(": ")[2]

    def leading(self, *, copies: int = 1) -> HaBroker | None:
        """The broker that leads with so many copies in sync, if there is one that can be asked.

        That of the last epoch: a master that was stopped may say that it leads, in the moment in which it wakes up.
        """
        last: tuple[int, int, HaBroker] | None = None
        for broker in self.brokers:
            try:
                with grpc.insecure_channel(broker.address.grpc_address) as channel:
                    status = HaServiceStub(channel).GetHaStatus(GetHaStatusRequest(), timeout=1) if broker.is_up else None
            except grpc.RpcError:
                continue
            if status is None or status.leadership.state != "LEADING":
                continue
            if last is None or status.leadership.epoch > last[0]:
                last = status.leadership.epoch, status.in_sync_count, broker
        return last[2] if last is not None and last[1] >= copies else None

    def wait_leading(self, copies: int = 3) -> HaBroker:
        """Until one leads with so many copies in sync."""
        found: list[HaBroker] = []

        def leads() -> bool:
            broker = self.leading(copies=copies)
            found[:] = [broker] if broker is not None else []
            return bool(found)

        wait_for(leads, 2 * PATIENCE_S)
        return found[0]

    def bodies(self, queue_id: int = 0) -> list[bytes]:
        """All that a reader gets of this queue at the master."""
        found: list[bytes] = []
        with grpc.insecure_channel(self.wait_leading(1).address.grpc_address) as channel:
            stub = PullServiceStub(channel)
            while True:
                request = PullRequest(topic=TOPIC, queue_id=queue_id, queue_offset=len(found), record_count_max=1_000)
                answer = stub.Pull(request, timeout=PATIENCE_S)
                if not answer.records:
                    return found
                found += [record.body for record in answer.records]


def read_all(broker: HaBroker, first_offset: int = 0, end_s: float = PATIENCE_S, queue_id: int = 0) -> list[bytes]:
    """What this broker gives of a queue from an offset on, until it gives nothing more, refuses, or `end_s` seconds are over."""
    found: list[bytes] = []
    ends_s = time.monotonic() + end_s
    try:
        with grpc.insecure_channel(broker.address.grpc_address) as channel:
            stub = PullServiceStub(channel)
            while True:
                offset = first_offset + len(found)
                request = PullRequest(topic=TOPIC, queue_id=queue_id, queue_offset=offset, record_count_max=1_000)
                answer = stub.Pull(request, timeout=2)
                if not answer.records:
                    return found
                found += [record.body for record in answer.records]
                if end_s and time.monotonic() > ends_s:
                    return found
    except grpc.RpcError:
        return found


class ReadingThread:
    """Reads queues by all brokers in turn, masters and slaves, each message once. Attribute: bodies, by queue and offset."""

    def __init__(self, cluster: ElectedCluster, queue_ids: Sequence[int]) -> None:
        self._cluster = cluster
        self.bodies: dict[int, list[bytes]] = {queue_id: [] for queue_id in queue_ids}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> ReadingThread:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            for broker in self._cluster.brokers:
                for queue_id, bodies in self.bodies.items():
                    if broker.is_up:
                        bodies += read_all(broker, len(bodies), 2, queue_id)
                self._stopping.wait(0.1)


@dataclass
class CountingProducer:
    """Sends 0, 1, 2 ... one after the other to a queue, and waits for each, or `batch_count` in a call: `with` begins and ends it.

    Attributes: acknowledged: the numbers that were answered SEND_OK or SLAVE_NOT_AVAILABLE, so on all copies that count; times_s: when.
    """

    namesrv: str
    queue_id: int = 0
    batch_count: int = 1
    acknowledged: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> CountingProducer:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        good = (SendStatus.SEND_OK, SendStatus.SLAVE_NOT_AVAILABLE)
        queue = MessageQueue(TOPIC, NAME, self.queue_id)
        with Producer(namesrv=self.namesrv) as producer:
            while not self._stopping.is_set():
                numbers = range(number, number + self.batch_count)
                bodies = [b"%d" % each for each in numbers]
                try:
                    if self.batch_count == 1:
                        statuses = [producer.send(TOPIC, *bodies, queue=queue, timeout_s=10).status]
                    else:
                        statuses = [each.status for each in producer.send_batch(TOPIC, bodies, queue=queue, timeout_s=10)]
                    if all(status in good for status in statuses):
                        self.acknowledged += numbers
                        self.times_s.append(time.monotonic())
                except ProtomqError as error:
                    self.failures.append(f"{number}: {error}")
                number += self.batch_count

    def wait_for_more(self, count: int = 20) -> None:
        """Until so many more are acknowledged."""
        wanted = len(self.acknowledged) + count
        wait_for(lambda: len(self.acknowledged) >= wanted, 2 * PATIENCE_S)

    def longest_pause_s(self, since_s: float) -> float:
        """The longest time without an acknowledged message."""
        times = [each for each in self.times_s if each >= since_s - 1]
        return max(b - a for a, b in pairwise(times))

    def first_answer_s(self, since_s: float) -> float:
        """When the first message after that time was acknowledged."""
        return next(each for each in self.times_s if each > since_s)

    def check(self, bodies: Sequence[bytes]) -> None:
        """All that was acknowledged is there once, in order; what was not may be there, once."""
        there = [int(body) for body in bodies]
        assert there == sorted(set(there)), "each once, in order"
        lost = set(self.acknowledged) - set(there)
        assert not lost, f"{len(lost)} acknowledged messages are lost: {sorted(lost)[:20]}"


class CountingProducers:
    """Several of them, each with a queue of its own: `with` begins and ends all. `batch_counts`: by queue, what each sends in a call."""

    def __init__(self, namesrv: str, batch_counts: Mapping[int, int]) -> None:
        self.all = [CountingProducer(namesrv, queue_id, count) for queue_id, count in batch_counts.items()]

    def __enter__(self) -> CountingProducers:
        for producer in self.all:
            producer.__enter__()
        return self

    def __exit__(self, *_: Any) -> None:
        for producer in self.all:
            producer.__exit__()

    def wait_for_more(self, count: int = 20) -> None:
        """Until each has so many more acknowledged."""
        wanted = [(producer, len(producer.acknowledged) + count) for producer in self.all]
        wait_for(lambda: all(len(producer.acknowledged) >= enough for producer, enough in wanted), 2 * PATIENCE_S)

    def longest_pause_s(self, since_s: float) -> float:
        """The longest time in which one of them was not answered."""
        return max(producer.longest_pause_s(since_s) for producer in self.all)

    def first_answer_s(self, since_s: float) -> float:
        """When the first of them was answered after that time."""
        return min(producer.first_answer_s(since_s) for producer in self.all)


@contextmanager
def elected_cluster(
    folder: Path,
    *,
    has_links: bool = False,
    count: int = 3,
    etcd_count: int = 1,
    election: Mapping[str, Any] | None = None,
    environments: Sequence[Mapping[str, str]] = (),
    liveness_ms: Mapping[str, int] | None = None,
    **settings: Any,
) -> Iterator[ElectedCluster]:
    """So many brokers, of which one leads with all in sync. `has_links`: which can be cut. `etcd_count`: members of the etcd.

    `environments`: of each broker; `settings`: of all, and `election`: below `etcd`. `liveness_ms`: of the name server.
    """
    etcd = EtcdMembers(folder / "etcd", etcd_count)
    brokers: list[HaBroker] = []
    links: list[Links] = []
    try:
        with running_namesrv(**(liveness_ms or {})) as namesrv:
            etcd.start()
            address = str(namesrv.remoting)
            if has_links:
                links += [Links(tuple(FaultProxy(each.address) for each in etcd.members), FaultProxy()) for _ in range(count)]
            brokers += [
                HaBroker(
                    folder / f"broker-{number}",
                    "SYNC_MASTER",
                    number,
                    namesrv=[address],
                    etcd={"endpoints": etcd.urls, **(election or {})},
                    **settings,
                )
                for number in range(1, count + 1)
            ]
            for broker, link in zip(brokers, links, strict=False):
                broker.configure(etcd={"endpoints": [f"http://{each.address}" for each in link.etcd]})
                broker.listen(advertised_remoting_port=int(link.remoting.address.rpartition(":")[2]))
            for broker, environment in zip(brokers, environments, strict=False):
                broker.environment = environment
            with ThreadPoolExecutor() as starters:
                list(starters.map(HaBroker.start, brokers))
            for broker, link in zip(brokers, links, strict=False):
                link.remoting.target = broker.address.remoting_address
            cluster = ElectedCluster(etcd, brokers, address, links)
            # On a busy machine the first copies may be late: it may be there more than once.
            wait_for(lambda: cluster.wait_leading(count).send(b"makes the topic").status == SEND_OK, PATIENCE_S)
            yield cluster
    finally:
        for broker in brokers:
            broker.kill()
        etcd.kill()
        for link in links:
            for proxy in link.all:
                proxy.close()
