"""ASYNC_MASTER: what a promoted slave lacks is within what `ha status` reported last, and what was sent after that."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import NamedTuple

import grpc

from protomq.testing import FaultProxy
from protomq.v1.pull_service_pb2 import PullRequest
from protomq.v1.pull_service_pb2_grpc import PullServiceStub
from protomq.v1.send_service_pb2 import SendStatus
from tests.support.ha_brokers import TOPIC, HaBroker, pair, running
from tests.support.waiting import PATIENCE_S, wait_for

BODY_BYTES = 4 << 10
BATCH = 16
LAG_BYTES = 1 << 20
STORE = {"segment_size_bytes": 32 << 20}


class Report(NamedTuple):
    """What the master said of its slave, and what had been acknowledged before it was asked."""

    end_position: int
    written_position: int
    lag_bytes: int
    acknowledged: int


class Sender:
    """Sends 0, 1, 2 ... in batches to queue 0 until the broker is gone. Attribute: acknowledged, how many of them."""

    def __init__(self, broker: HaBroker) -> None:
        self.acknowledged = 0
        self._broker = broker
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Sender:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def _run(self) -> None:
        while True:
            numbers = range(self.acknowledged, self.acknowledged + BATCH)
            try:
                answer = self._broker.send(*[b"%d" % number + bytes(BODY_BYTES) for number in numbers])
            except Exception:  # killed
                return
            assert answer.status == SendStatus.SEND_STATUS_SEND_OK
            self.acknowledged += BATCH


def numbers(broker: HaBroker) -> list[int]:
    """What a reader gets of queue 0."""
    found: list[int] = []
    with grpc.insecure_channel(broker.address.grpc_address) as channel:
        stub = PullServiceStub(channel)
        while True:
            answer = stub.Pull(PullRequest(topic=TOPIC, queue_offset=len(found), record_count_max=200), timeout=PATIENCE_S)
            if not answer.records:
                return found
            found += [int(record.body.rstrip(b"\0")) for record in answer.records]


def test_a_promoted_slave_lacks_no_more_than_was_reported_and_what_was_sent_after_that(tmp_path: Path) -> None:
    reports: list[Report] = []
    with FaultProxy() as link:
        link.set(rate_bytes_per_s=1_000_000)
        master, slave = pair(tmp_path, "ASYNC_MASTER", {"timeout_ms": 20_000}, store=STORE)
        with running(master):
            link.target = master.address.remoting_address
            slave.configure(ha={"heartbeat_interval_ms": 300, "timeout_ms": 20_000, "master": link.address})
            try:
                slave.start()
                wait_for(lambda: len(master.status().replicas) == 1)
                with Sender(master) as sender:

                    def is_far_behind() -> bool:
                        acknowledged = sender.acknowledged
                        status = master.status()
                        (replica,) = status.replicas
                        reports.append(Report(status.end_position, replica.written_position, replica.lag_bytes, acknowledged))
                        return replica.lag_bytes > LAG_BYTES and replica.written_position > LAG_BYTES

                    wait_for(is_far_behind)
                    master.kill()
                shutil.rmtree(master.folder)
                assert slave.stop() == 0
                slave.configure(broker_role="ASYNC_MASTER", broker_id=0, ha={})
                slave.start()
                kept = numbers(slave)
                end = slave.status().end_position
            finally:
                slave.kill()
    last = reports[-1]
    assert last.lag_bytes == last.end_position - last.written_position
    # Nothing is missing in the middle, and nothing that the slave had acknowledged.
    assert kept == list(range(len(kept)))
    assert end >= last.written_position
    lost_before = last.acknowledged - len(kept)
    assert 0 < lost_before * BODY_BYTES <= last.lag_bytes
    assert kept
    for report in reports:
        assert (report.acknowledged - len(kept)) * BODY_BYTES <= report.lag_bytes
