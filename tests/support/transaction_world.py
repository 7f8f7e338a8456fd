"""A broker's transactions on a simulated disk: what its send lane has, and a thread of a test in place of the lane."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from protomq.v1.record_pb2 import Attributes, Record, RecordBatch
from protomq.v1.send_service_pb2 import SendRequest, SendResponse
from protomq.v1.transaction_service_pb2 import (
    EndTransactionRequest,
    EndTransactionResponse,
    ListTransactionsRequest,
    ListTransactionsResponse,
    TransactionCheck,
    TransactionDecision,
    TransactionEnd,
    TransactionEnded,
    WaitForChecksRequest,
    WaitForChecksResponse,
)
from protomq_broker.config import BrokerConfig
from protomq_broker.log_time import LogTime
from protomq_broker.store.config import StoreConfig
from protomq_broker.store.queues.reading import ReadStatus
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_broker.system_writer import SystemWriter
from protomq_broker.testing.simdisk import SimDisk, SimulatedCrash
from protomq_broker.timer_mover import TimerMover
from protomq_broker.transaction_endings import TransactionEndings
from protomq_broker.transaction_service import TransactionService
from protomq_broker.waiting_answers import WaitingAnswers
from protomq_broker.write_permit import WritePermit
from tests.support.delay_world import WallClock
from tests.unit.protomq_broker.fake_broker import send_service
from tests.unit.protomq_broker.store.store_helpers import read_all

SEGMENT = 1 << 16
COMMIT = TransactionDecision.TRANSACTION_DECISION_COMMIT
ROLL_BACK = TransactionDecision.TRANSACTION_DECISION_ROLL_BACK
PRODUCER = 77


class FakeTimer:
    def __init__(self, delay_ms: float, function: Callable[[], None]) -> None:
        self.delay_ms = delay_ms
        self.function = function
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Lane:
    """Runs what is posted at once: the thread of the test is the send lane. Its timers wait for the test."""

    def __init__(self) -> None:
        self.timers: list[FakeTimer] = []
        self.holds = 0

    def post(self, function: Callable[[], None]) -> None:
        function()

    def call_later(self, delay_ms: float, function: Callable[[], None]) -> FakeTimer:
        self.timers.append(FakeTimer(delay_ms, function))
        return self.timers[-1]

    def fire(self, delay_max_ms: float = 0) -> None:
        """Calls what was to wait no longer than this."""
        due = [timer for timer in self.timers if timer.delay_ms <= delay_max_ms]
        self.timers = [timer for timer in self.timers if timer not in due]
        for timer in due:
            if not timer.is_cancelled:
                timer.function()


class Call:
    def __init__(self, request: Any, lane: Lane) -> None:
        self.payload = request.SerializeToString()
        self.lane = lane
        self.outcome: Any = None
        self.on_close: Callable[[], None] = lambda: None
        self.closed = False

    @property
    def answered(self) -> bool:
        return self.outcome is not None

    def hold_time_ms(self, hold_ms: float) -> float:
        return hold_ms

    def hold(self, on_close: Callable[[], None]) -> None:
        self.on_close = on_close

    def answer(self, payload: bytes) -> None:
        assert self.outcome is None
        self.outcome = payload

    def fail(self, error: Exception) -> None:
        assert self.outcome is None
        self.outcome = error

    def result(self) -> bytes:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        assert self.outcome is not None, "not answered yet"
        return bytes(self.outcome)


@dataclass
class World:
    """A broker's parts on a simulated disk."""

    disk: SimDisk = field(default_factory=SimDisk)
    clock: WallClock = field(default_factory=WallClock)
    config: BrokerConfig = field(default_factory=BrokerConfig)
    sync_flush: bool = False
    log_time: LogTime | None = None
    """Of the start before, on the same boot of the machine; None: it begins at the wall clock."""
    sequence: int = 0

    def start(self) -> World:
        config = StoreConfig(segment_size_bytes=SEGMENT, sync_flush=self.sync_flush)
        self.store = Store.open(
            "/s",
            config,
            clock=self.clock,
            disk=self.disk,
            background=False,
            check_plan=self.config.check_plan,
        )
        if self.store.topics.find("topic") is None:
            self.store.topics.create(TopicConfig("topic"))
        self.permit = WritePermit()
        self.permit.give()
        self.lane = Lane()
        writer = SystemWriter(self.permit)
        writer.start(self.store, self.lane)  # type: ignore[arg-type]
        self.waiting = WaitingAnswers(self.store, self.clock)
        self.sends = send_service(self.store, self.config, self.clock, self.waiting, writer, self.log_time)
        self.checks = self.sends._checks
        log_time = self.checks._log_time
        endings = TransactionEndings(self.store, writer, log_time)
        self.service = TransactionService(
            self.store,
            self.config,
            self.permit,
            self.waiting,
            self.checks._handles,
            endings,
            self.checks,
            lambda: self.sends.shortage,
        )
        self.mover = TimerMover(self.store, writer, log_time)
        self.checks.begin()
        return self

    def restart(self, disk: SimDisk | None = None) -> World:
        if disk is None:
            self.store.close()
        self.disk = disk or self.disk
        return self.start()

    def call(self, method: Callable[[Any], None], request: Any, *, drained: bool = True) -> Call:
        call = Call(request, self.lane)
        method([call] if drained else call)
        if self.sync_flush:
            try:
                self.store.flush()
            except SimulatedCrash:
                if not call.answered:  # who was answered has the answer, whatever comes then
                    raise
            self.waiting.resolve()
        return call

    def record(self, body: bytes, group: str = "g", **fields: Any) -> Record:
        self.sequence += 1
        return Record(
            body=body,
            attributes=Attributes(producer_group=group),
            producer_id=PRODUCER,
            sequence=self.sequence,
            **fields,
        )

    def request(self, request: SendRequest) -> SendResponse:
        return SendResponse.FromString(self.call(self.sends.send, request).result())

    def half(self, body: bytes = b"half", group: str = "g", **fields: Any) -> str:
        """The handle of a half message that is sent now."""
        fields = {"topic": "topic", "queue_id": 0, **fields}
        records = [self.record(body, group)]
        (handle,) = self.request(SendRequest(records=records, half=True, **fields)).transaction_handles
        return handle

    def end(self, *ends: tuple[str, Any]) -> list[TransactionEnded]:
        request = EndTransactionRequest(
            ends=[TransactionEnd(transaction_handle=handle, decision=what) for handle, what in ends]
        )
        payload = self.call(self.service.end_transaction, request).result()
        return list(EndTransactionResponse.FromString(payload).results)

    def wait(self, group: str = "g", hold_ms: int = 1_000) -> Call:
        request = WaitForChecksRequest(producer_group=group, hold_ms=hold_ms)
        return self.call(self.service.wait_for_checks, request, drained=False)

    def turns(self, after_ms: int = 0) -> None:
        """What is due then is done."""
        self.clock.time_ms += after_ms
        while self.checks.turn():
            pass

    def listed(self, **fields: Any) -> ListTransactionsResponse:
        return self.service.list_transactions(ListTransactionsRequest(**fields), None)  # type: ignore[arg-type]

    def open(self) -> list[str]:
        return [each.message_id for each in self.listed().transactions]

    def delivered(self, topic: str = "topic", queue_id: int = 0) -> list[bytes]:
        return [body for _, body in read_all(self.store, topic, queue_id)]


def checks_of(call: Call) -> list[TransactionCheck]:
    return list(WaitForChecksResponse.FromString(call.result()).checks)


def positions_read(store: Store, topic: str, queue_id: int) -> list[int]:
    """Physical offsets of all messages of a queue, as a consumer gets them."""
    found: list[int] = []
    offset, end = store.queue_range(topic, queue_id)
    while offset < end:
        result = store.read(topic, queue_id, offset, 32, 1 << 20)
        if result.status is not ReadStatus.FOUND:
            break
        data = b"".join(part.file.read(part.offset, part.size_bytes) for part in result.regions)
        found += [record.physical_offset for record in RecordBatch.FromString(data).records]
        offset = result.next_offset
    return found
