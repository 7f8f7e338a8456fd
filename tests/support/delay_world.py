"""The parts of a broker that delay messages, on a simulated disk and clocks, without threads: the test is the send lane and the mover."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from protomq.v1.record_pb2 import Record
from protomq.v1.send_service_pb2 import (
    RecallMessageRequest,
    RecallMessageResponse,
    SendRequest,
    SendResponse,
)
from protomq_broker.config import BrokerConfig
from protomq_broker.log_time import LogTime
from protomq_broker.log_time_file import LogTimeFile
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.system_writer import SystemWriter
from protomq_broker.testing.simdisk import SimDisk
from protomq_broker.timer_mover import TimerMover
from protomq_broker.waiting_answers import WaitingAnswers
from protomq_broker.write_permit import WritePermit
from protomq_runtime.errors import ServiceError
from tests.unit.protomq_broker.fake_broker import send_service
from tests.unit.protomq_broker.store.log_helpers import ManualClock
from tests.unit.protomq_broker.store.store_helpers import open_store, read_all

SEGMENT = 1 << 16
BROKER = "b"


class WallClock(ManualClock):
    """A clock that somebody sets."""

    wall_offset_ms = 0

    def now_ms(self) -> int:
        return self.time_ms + self.wall_offset_ms


class Lane:
    """Runs what is posted at once, and nothing later: the thread of the test is the send lane."""

    def post(self, function: Callable[[], None]) -> None:
        function()

    def call_later(self, wait_ms: float, function: Callable[[], None]) -> Lane:
        return self

    def cancel(self) -> None:
        pass


class Call:
    lane = None
    answered = False

    def __init__(self, request: Any) -> None:
        self.payload = request.SerializeToString()
        self.outcome: Any = None

    def hold_time_ms(self, hold_ms: int) -> int:
        return hold_ms

    def answer(self, payload: bytes) -> None:
        self.outcome = payload

    def fail(self, error: Exception) -> None:
        self.outcome = error


@dataclass
class World:
    """A broker's parts on a simulated disk."""

    disk: SimDisk = field(default_factory=SimDisk)
    clock: WallClock = field(default_factory=WallClock)
    config: BrokerConfig = field(default_factory=BrokerConfig)
    boot_id: str = "boot-1"
    """Of the machine: another one after a power cut."""

    def start(self) -> World:
        self.store = open_store(self.disk, clock=self.clock, segment=SEGMENT)
        if self.store.topics.find("topic") is None:
            self.store.topics.create(TopicConfig("topic"))
        permit = WritePermit()
        permit.give()
        writer = SystemWriter(permit)
        writer.start(self.store, Lane())  # type: ignore[arg-type]
        self.waiting = waiting = WaitingAnswers(self.store, self.clock)
        file = LogTimeFile(self.disk, self.store.root, self.boot_id, self.clock.monotonic_ms)
        self.log_time = LogTime(self.clock, self.store.pending.log_time_ms, file)
        self.store.on_housekeeping = self.log_time.save
        self.log_time.save()
        self.service = send_service(
            self.store, self.config, self.clock, waiting, writer, self.log_time
        )
        self.mover = TimerMover(self.store, writer, self.log_time)
        return self

    def restart(self, disk: SimDisk | None = None) -> World:
        if disk is None:
            self.store.close()
        self.disk = disk or self.disk
        return self.start()

    def request(self, request: SendRequest) -> SendResponse:
        call = Call(request)
        self.service.send([call])  # type: ignore[list-item]
        if isinstance(call.outcome, Exception):
            raise call.outcome
        return SendResponse.FromString(call.outcome)

    def send(self, *bodies: bytes, **fields: Any) -> SendResponse:
        fields = {"topic": "topic", "queue_id": 0, **fields}
        return self.request(SendRequest(records=[Record(body=body) for body in bodies], **fields))

    def recall(self, handle: str, topic: str = "topic") -> bool:
        return self.recall_answer(handle, topic).recalled

    def recall_answer(self, handle: str, topic: str = "topic") -> RecallMessageResponse:
        request = RecallMessageRequest(topic=topic, recall_handle=handle)
        call = Call(request)
        self.service.recall_message(call)  # type: ignore[arg-type]
        if isinstance(call.outcome, Exception):
            raise call.outcome
        return RecallMessageResponse.FromString(call.outcome)

    def deliver(self, after_ms: int = 0) -> list[bytes]:
        """What is in the queue once everything is delivered that is due then."""
        self.clock.time_ms += after_ms
        while self.mover.deliver():
            pass
        return self.delivered()

    def delivered(self) -> list[bytes]:
        return [body for _, body in read_all(self.store)]


def reason(call: Callable[[], Any], *, definite: bool = True) -> tuple[str, dict[str, str]]:
    with pytest.raises(ServiceError) as caught:
        call()
    metadata = dict(caught.value.metadata)
    assert metadata.pop("definite") == str(definite).lower()
    return caught.value.reason, metadata
