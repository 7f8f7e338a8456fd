"""A replica may follow over gRPC, with stubs that anybody generates: the same session, the same log, the same say in what is confirmed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from protomq.v1 import ha_service_pb2 as ha
from protomq.v1.ha_service_pb2_grpc import HaServiceStub
from protomq.v1.send_service_pb2 import SendStatus
from protomq_broker.ha_session import FollowSession
from protomq_broker.store.config import StoreConfig
from protomq_broker.store.store import Store
from protomq_ha.intake import LogPart
from protomq_runtime.clock import SystemClock
from tests.support.ha_brokers import NAME, SEGMENT_SIZE_BYTES, HaBroker, pair, running
from tests.support.waiting import PATIENCE_S, wait_for

SYNC = {"in_sync_replicas": 2, "min_in_sync_replicas": 1, "sync_timeout_ms": 30_000}
FETCHES = 2
HOLD_MS = 300


class GrpcReplica:
    """A store that follows a master over one channel. It proves each seal before it writes; a bad one raises."""

    def __init__(self, folder: Path, master: HaBroker) -> None:
        self.channel = grpc.insecure_channel(master.address.grpc_address)
        self.stub = HaServiceStub(self.channel)
        self.store = Store.open(
            folder, StoreConfig(segment_size_bytes=SEGMENT_SIZE_BYTES), clock=SystemClock(), background=False, follows=True
        )
        self.session = FollowSession(self.store, lambda write: write())
        self.parts = 0
        self._fetches: deque[grpc.Future[ha.FetchResponse]] = deque()

    def begin(self) -> None:
        """The first fetch: a session."""
        answer = self.stub.Fetch(self.session.begin_request(NAME, 1, "a replica over gRPC"), timeout=PATIENCE_S)
        assert self.session.began(answer, LogPart(memoryview(answer.log)))

    def fetch(self) -> None:
        """Has two fetches under way, and takes the next answer."""
        while len(self._fetches) < FETCHES:
            self._fetches.append(self.stub.Fetch.future(self.session.fetch_request(HOLD_MS), timeout=PATIENCE_S))
        answer = self._fetches.popleft().result()
        self.parts += bool(answer.log)
        assert self.session.took(answer, LogPart(memoryview(answer.log)))

    def fetch_until(self, is_reached: Callable[[], bool]) -> None:
        """Fetches until then."""

        def reached() -> bool:
            self.fetch()
            return is_reached()

        wait_for(reached)

    def take_rest(self) -> None:
        """Takes the answers of all that is under way, and asks for nothing more."""
        while self._fetches:
            answer = self._fetches.popleft().result()
            assert self.session.took(answer, LogPart(memoryview(answer.log)))

    def log_bytes(self) -> bytes:
        """All that it has."""
        regions = self.store.log_regions(0, self.store.appended_position)
        return b"".join(bytes(region.file.read(region.offset, region.size_bytes)) for region in regions)

    def close(self) -> None:
        """Its connection ends, and its store is closed."""
        self.channel.close()
        self.store.close()


@pytest.fixture
def master(tmp_path: Path) -> Iterator[HaBroker]:
    """A SYNC_MASTER, which begins alone."""
    master, _ = pair(tmp_path, "SYNC_MASTER", SYNC)
    with running(master):
        yield master


@pytest.fixture
def replica(tmp_path: Path, master: HaBroker) -> Iterator[GrpcReplica]:
    replica = GrpcReplica(tmp_path / "replica", master)
    try:
        yield replica
    finally:
        replica.close()


def test_an_empty_replica_gets_the_whole_log_and_is_in_sync(master: HaBroker, replica: GrpcReplica) -> None:
    for number in range(40):
        master.send(*[b"%d " % number * 6_000] * 20)
    end = master.status().end_position
    assert end > 2 * SEGMENT_SIZE_BYTES
    assert master.status().in_sync_count == 1
    replica.begin()
    replica.fetch_until(lambda: replica.store.appended_position == end)
    replica.fetch_until(lambda: master.status().in_sync_count == 2)
    assert replica.parts > 1
    assert replica.log_bytes() == master.log_bytes(end)
    (row,) = master.status().replicas
    assert (row.broker_id, row.in_sync, row.written_position, row.lag_bytes) == (1, True, end, 0)
    assert row.address == "a replica over gRPC"


def test_a_send_waits_for_the_acknowledgement_of_a_replica_over_grpc(master: HaBroker, replica: GrpcReplica) -> None:
    master.send(b"first")
    replica.begin()
    replica.fetch_until(lambda: master.status().in_sync_count == 2)
    replica.take_rest()
    before = replica.store.appended_position
    with ThreadPoolExecutor(1) as callers:
        send = callers.submit(master.send, b"second")
        wait_for(lambda: master.status().end_position > before)
        # It has been sent the message, and has not said that it has it.
        fetch = replica.session.fetch_request(HOLD_MS)
        answer = replica.stub.Fetch(fetch, timeout=PATIENCE_S)
        assert answer.log
        assert not send.done()
        assert master.status().confirmed_position == before
        assert replica.session.took(answer, LogPart(memoryview(answer.log)))
        replica.stub.Acknowledge(replica.session.acknowledgement(), timeout=PATIENCE_S)
        assert send.result(PATIENCE_S).status == SendStatus.SEND_STATUS_SEND_OK
    assert master.status().confirmed_position == replica.store.appended_position


def test_what_a_replica_over_grpc_was_not_sent_it_cannot_acknowledge(master: HaBroker, replica: GrpcReplica) -> None:
    master.send(b"first")
    replica.begin()
    request = replica.session.acknowledgement()
    request.written_position += 1 << 20
    with pytest.raises(grpc.RpcError) as refusal:
        replica.stub.Acknowledge(request, timeout=PATIENCE_S)
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    replica.fetch_until(lambda: master.status().in_sync_count == 2)


def test_a_replica_over_grpc_whose_connection_ends_is_out_and_comes_back_where_it_was(
    tmp_path: Path, master: HaBroker, replica: GrpcReplica
) -> None:
    master.send(b"first")
    replica.begin()
    replica.fetch_until(lambda: master.status().in_sync_count == 2)
    replica.channel.close()
    wait_for(lambda: master.status().in_sync_count == 1)
    master.send(b"while it was away")
    begun = replica.store.appended_position
    replica.store.close()
    again = GrpcReplica(tmp_path / "replica", master)
    try:
        again.begin()
        assert again.session.position >= begun
        again.fetch_until(lambda: master.status().in_sync_count == 2)
        end = master.status().end_position
        assert again.log_bytes() == master.log_bytes(end)
    finally:
        again.close()
