"""A broker's parts for sends, pulls, send-backs and delays over a store on a simulated disk. The thread of the test is every lane."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from protomq.v1.group_service_pb2 import (
    FailedMessage,
    SendBackRequest,
    SendBackResponse,
)
from protomq.v1.record_pb2 import Record, RecordBatch
from protomq.wire.record import (
    RecordTemplate,
    encode_front,
    encode_message_id,
    encode_record_field,
)
from protomq.wire.topics import dead_letter_topic, retry_topic
from protomq_broker.config import BrokerConfig
from protomq_broker.delays import Delays
from protomq_broker.log_time import LogTime
from protomq_broker.send_backs import SendBacks
from protomq_broker.state_changes import StateChanges
from protomq_broker.store.config import StoreConfig
from protomq_broker.store.log.append import AppendRequest
from protomq_broker.store.log.record_region import prove_region
from protomq_broker.store.queues.reading import ReadStatus
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_broker.system_writer import SystemWriter
from protomq_broker.testing.simdisk import SimDisk
from protomq_broker.timer_mover import TimerMover
from protomq_broker.waiting_answers import WaitingAnswers
from protomq_broker.write_permit import WritePermit

ROOT = "/s"
TOPIC = "topic"
GROUP = "group"


class Clock:
    """Stands still until somebody moves it; `wall_offset_ms` is what somebody did to the wall clock."""

    def __init__(self) -> None:
        self.time_ms = 1_700_000_000_000
        self.wall_offset_ms = 0

    def now_ms(self) -> int:
        """The wall clock."""
        return self.time_ms + self.wall_offset_ms

    def monotonic_ms(self) -> int:
        """Goes on."""
        return self.time_ms

    def monotonic(self) -> float:
        """The same in seconds."""
        return self.time_ms / 1000


class Lane:
    """Runs what is posted at once, unless it is to wait in `posted`."""

    def __init__(self) -> None:
        self.waits = False
        self.posted: list[Callable[[], None]] = []

    def post(self, function: Callable[[], None]) -> None:
        """Another thread has something to do."""
        if self.waits:
            self.posted.append(function)
        else:
            function()

    def run(self) -> None:
        """Does what was posted."""
        self.waits = False
        while self.posted:
            self.posted.pop(0)()

    def call_later(self, delay_ms: int, function: Callable[[], None]) -> Any:
        """Nobody waits so long."""
        return _Never()


class _Never:
    def cancel(self) -> None:
        pass


class Call:
    """A call and its outcome."""

    answered = False

    deadline = None

    def __init__(self, payload: bytes, lane: Lane) -> None:
        self.payload = payload
        self.lane = lane
        self.outcome: bytes | Exception | None = None

    def hold_time_ms(self, hold_ms: int) -> int:
        """There is time."""
        return hold_ms

    def answer(self, payload: bytes) -> None:
        """It is done."""
        self.outcome, self.answered = payload, True

    def fail(self, error: Exception) -> None:
        """It is refused."""
        self.outcome, self.answered = error, True


class RetryWorld:
    """`start` opens the store; `restart` does it again, with what another disk has."""

    def __init__(
        self, disk: SimDisk | None = None, *, segment: int = 1 << 16, **settings: Any
    ) -> None:
        """`settings`: of BrokerConfig."""
        self.disk = disk or SimDisk()
        self.clock = Clock()
        self.config = BrokerConfig(**settings)
        self._store_config = StoreConfig(segment_size_bytes=segment, sync_flush=True)
        self._sequence = 0
        self.start()

    def start(self) -> None:
        """Opens the store, and makes the parts over it."""
        self.store = Store.open(
            ROOT, self._store_config, clock=self.clock, disk=self.disk, background=False
        )
        self.make_parts()

    def make_parts(self) -> None:
        """As a broker does that begins to lead with the store as it is."""
        self.permit = WritePermit()
        self.permit.give()
        self.lane = Lane()
        self.writer = SystemWriter(self.permit)
        self.writer.start(self.store, self.lane)  # type: ignore[arg-type]
        self.waiting = WaitingAnswers(self.store, self.clock)
        self.store.positions.on_flushed.append(lambda _: self.waiting.resolve())
        self.log_time = LogTime(self.clock, self.store.pending.log_time_ms)
        delays = Delays(
            self.log_time,
            self.config.delay_levels_ms,
            self.store.pending,
            count_max=self.config.delayed_count_max,
            size_max_bytes=self.config.delayed_size_max_bytes,
        )
        self.send_backs = SendBacks(
            self.store, self.config, self.writer, self.waiting, delays, self.log_time
        )
        self.changes = StateChanges(self.store, self.writer, self.waiting, self.config, lambda: None)
        self.mover = TimerMover(self.store, self.writer, self.log_time)
        if self.store.topics.find(TOPIC) is None:
            self.store.topics.create(TopicConfig(TOPIC, 2, 2))

    def restart(self, disk: SimDisk | None = None) -> None:
        """With another disk the process has died; else it stops."""
        if disk is None:
            self.store.close()
        else:
            self.disk = disk
        self.start()

    def send(
        self,
        *bodies: bytes,
        topic: str = TOPIC,
        queue_id: int = 0,
        key: str = "",
        producer_id: int = 7,
    ) -> None:
        """Appends messages, synced."""
        template = RecordTemplate(topic, producer_id, 0)
        records = [
            template.encode(
                body, self._sequence + index, 5, key=key, front=encode_front([key] if key else [])
            )
            for index, body in enumerate(bodies)
        ]
        fields = bytearray().join(map(encode_record_field, records))
        region = prove_region(fields, topic, [len(record) for record in records])
        assert region is not None
        self._sequence += len(bodies)
        self.store.append([AppendRequest(region, queue_id)])
        self.store.flush()

    def read(self, topic: str, queue_id: int = 0, offset: int = 0) -> list[Record]:
        """All readable messages of a queue from an offset on."""
        found: list[Record] = []
        while True:
            result = self.store.read(topic, queue_id, offset, 64, 1 << 20)
            if result.status is not ReadStatus.FOUND:
                return found
            data = b"".join(each.file.read(each.offset, each.size_bytes) for each in result.regions)
            found += RecordBatch.FromString(data).records
            offset = result.next_offset

    def retries(self, group: str = GROUP) -> list[Record]:
        """What the group got again."""
        return self.read(retry_topic(group))

    def dead_letters(self, group: str = GROUP) -> list[Record]:
        """What the group could not process."""
        return self.read(dead_letter_topic(group))

    def call(self, request: SendBackRequest) -> Call:
        """A SendBack, on its way or answered."""
        call = Call(request.SerializeToString(), self.lane)
        self.send_backs.send_back([call])  # type: ignore[list-item]
        return call

    def send_back(
        self,
        messages: Iterable[Record | FailedMessage],
        *,
        group: str = GROUP,
        request_id: int = 0,
        **fields: Any,
    ) -> SendBackResponse:
        """The answer; raises what the request is refused with. `fields`: of each FailedMessage."""
        request = SendBackRequest(
            consumer_group=group,
            messages=[failed(each, **fields) for each in messages],
            request_id=request_id,
        )
        call = self.call(request)
        self.store.flush()
        if isinstance(call.outcome, Exception):
            raise call.outcome
        assert call.outcome is not None, "not answered"
        return SendBackResponse.FromString(call.outcome)

    def deliver(self, after_ms: int = 0) -> None:
        """Time passes, and what is due is delivered."""
        self.clock.time_ms += after_ms
        while self.mover.deliver():
            pass
        self.store.flush()


def failed(message: Record | FailedMessage, **fields: Any) -> FailedMessage:
    """A message as its consumer got it."""
    if isinstance(message, FailedMessage):
        return message
    return FailedMessage(
        **{
            "topic": message.topic,
            "queue_id": message.queue_id,
            "queue_offset": message.queue_offset,
            "message_id": id_of(message),
            **fields,
        }
    )


def id_of(message: Record) -> str:
    """The message's id."""
    return encode_message_id(message.producer_id, message.producer_epoch, message.sequence)
