"""A byte of a consume queue flips under a running broker: consumers are kept waiting, not failed, and get everything, once and in order."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

import pytest

from protomq import Admin, Producer, PullConsumer
from protomq._methods import GET_QUEUE_RANGE, PULL
from protomq._transport import SyncTransport
from protomq._transport_options import TransportOptions
from protomq._types import BrokerAddress
from protomq.errors import CorruptLogError, QueueHealingError
from protomq.testing import Broker
from protomq.v1.consumer_service_pb2 import GetQueueRangeRequest
from protomq.v1.pull_service_pb2 import PullRequest, PullResponse
from tests.integration.test_sdk_consumer_and_broker import TRANSPORTS, Transport, drain
from tests.support.cli import run
from tests.support.waiting import PATIENCE_S, wait_for

COUNT = 500
TOPIC = "healing"


@pytest.fixture
def broker(tmp_path: Path):
    """A broker that was restarted: no entry is in memory."""
    environment = {
        "PROTOMQ_STORE_SEGMENT_SIZE_BYTES": str(1 << 20),
        "PROTOMQ_STORE_DISK_DELETE_RATIO": "1.0",
        "PROTOMQ_STORE_DISK_FORCE_RATIO": "1.0",
        "PROTOMQ_STORE_DISK_REFUSE_RATIO": "1.0",
    }
    with Broker(data_dir=tmp_path, environment=environment) as made:
        with Admin(namesrv=made.namesrv) as admin:
            admin.create_topic(TOPIC, write_queues=1, read_queues=1)
        with Producer(namesrv=made.namesrv) as producer:
            producer.send_batch(TOPIC, [b"%d" % number for number in range(COUNT)])
        made.stop()
        made.start()
        yield made


def queue_file(broker: Broker) -> Path:
    (found,) = broker.data_dir.glob(f"store/consumequeue/{TOPIC}/0/*")
    return found


def flip(path: Path, at: int) -> bytes:
    """Flips a bit in place; what the file was before."""
    before = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([before[at] ^ 0x10]))
    return before


def is_flushed(broker: Broker) -> bool:
    status = cluster_status(broker)
    return status["flushed_position"] == status["appended_position"]


def cluster_status(broker: Broker) -> dict[str, object]:
    (status,) = json.loads(run("cluster", "status", "-o", "json", namesrv=broker.namesrv).stdout)
    assert isinstance(status, dict)
    return status


@TRANSPORTS
def test_a_flipped_byte_heals_under_a_consumer(broker: Broker, transport: Transport) -> None:
    path = queue_file(broker)
    before = flip(path, 20 * (COUNT // 2) + 5)
    with PullConsumer(namesrv=broker.namesrv, transport=transport) as source:
        source.subscribe(TOPIC)
        got = drain(source, COUNT)
    assert [message.body for message in got] == [b"%d" % number for number in range(COUNT)]
    assert [message.queue_offset for message in got] == list(range(COUNT))
    status = cluster_status(broker)
    assert (status["healed_queue_files"], status["damaged_queue_files"]) == (1, 0)
    assert path.read_bytes() == before
    with Admin(namesrv=broker.namesrv) as admin:
        (state,) = admin.broker_status()
    assert (state.healed_queue_files, state.damaged_queues, state.log_damages) == (1, (), ())


@TRANSPORTS
def test_all_methods_say_that_it_passes_by_itself(broker: Broker, transport: Transport) -> None:
    # Of the last entry: what every look at the queue reads.
    flip(queue_file(broker), 20 * COUNT - 3)
    address = BrokerAddress("", broker.grpc_address, broker.remoting_address)
    ranges = GetQueueRangeRequest(topic=TOPIC, queue_ids=[0]).SerializeToString()
    pull = PullRequest(topic=TOPIC, queue_offset=0, record_count_max=COUNT).SerializeToString()
    told: list[QueueHealingError] = []
    answer = b""
    with SyncTransport(TransportOptions(transport)) as caller:
        for method, request in ((GET_QUEUE_RANGE, ranges), (PULL, pull)):
            ends = time.monotonic() + PATIENCE_S
            while time.monotonic() < ends:
                try:
                    answer = caller.call(address, method, [request], PATIENCE_S)
                    break
                except QueueHealingError as error:
                    told.append(error)
                    time.sleep((error.retry_delay_ms or 0) / 1000)
    assert len(PullResponse.FromString(answer).records) == COUNT
    assert transport == "grpc" or told, "gRPC asks again by itself"
    assert all(error.retriable and not error.definite and error.retry_delay_ms for error in told)


def test_damage_of_the_log_in_that_place_is_told_with_its_range(broker: Broker) -> None:
    segment = broker.data_dir / "store/commitlog" / f"{0:020d}"
    entries = queue_file(broker).read_bytes()
    position = int.from_bytes(entries[-20:-13], "little")
    with Producer(namesrv=broker.namesrv) as producer:
        for _ in range(3):  # behind it the log holds, and is synced
            producer.send(TOPIC, b"behind")
    wait_for(lambda: len(queue_file(broker).read_bytes()) == 20 * (COUNT + 3))
    wait_for(lambda: is_flushed(broker))
    with segment.open("r+b") as file:
        file.seek(position + 40)
        file.write(b"\xff" * 8)
    flip(queue_file(broker), 20 * COUNT - 3)
    with PullConsumer(namesrv=broker.namesrv) as source:
        source.subscribe(TOPIC)
        ends = time.monotonic() + PATIENCE_S
        damages: object = []
        while not damages and time.monotonic() < ends:
            with suppress(CorruptLogError):
                source.poll(0.1)
            damages = cluster_status(broker)["log_damages"]
    assert isinstance(damages, list)
    (damage,) = damages
    assert damage["start_position"] <= position < damage["end_position"]
