"""The threads that unpack bodies: for whom they do it, how much waits for them, and what becomes of a region that is damaged meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from protomq.v1.pull_service_pb2 import PullRequest
from protomq_broker import plain_body_workers, pull_service
from protomq_broker.config import BrokerConfig
from protomq_broker.filter_modules import FilterModules
from protomq_broker.plain_body_workers import CALL_OVERHEAD_BYTES, PlainBodyWorkers
from protomq_broker.pull_service import PullService
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.testing.simdisk import SimDisk
from protomq_runtime.errors import ServiceError

from .store.log_helpers import ManualClock, make_request
from .store.store_helpers import SEGMENT, open_store

PATIENCE_S = 30.0


class StubCall:
    """A call that is its own lane: what is posted is done at once."""

    transport = "remoting"
    peer = "peer"

    def __init__(
        self, payload: bytes = b"", *, answered: bool = False, closed: bool = False, is_late: bool = False
    ) -> None:
        self.payload = payload
        self.answered, self.closed = answered, closed
        self.deadline = time.monotonic() - 1 if is_late else None
        self.lane = self
        self.outcome: bytes | str | None = None
        self.ended = threading.Event()

    def post(self, function: Callable[[], None]) -> None:
        function()
        self.ended.set()

    def answer(self, payload: bytes, regions: Any = (), regions_size_bytes: int = 0) -> None:
        self.outcome = payload

    def fail(self, error: ServiceError) -> None:
        self.outcome = error.reason


@pytest.fixture
def workers() -> Iterator[PlainBodyWorkers]:
    made = PlainBodyWorkers(1)
    yield made
    made.close()


def run(workers: PlainBodyWorkers, call: StubCall, size_bytes: int, go_on: threading.Event) -> list[str]:
    """What was made for the call, when `go_on` is set."""
    made: list[str] = []

    def make() -> Callable[[], None]:
        assert go_on.wait(PATIENCE_S)
        made.append("made")
        return lambda: call.answer(b"plain")

    workers.run(cast("Any", call), size_bytes, make)
    return made


@pytest.mark.parametrize(
    ("over", "outcome"),
    [
        ({"answered": True}, None),
        ({"closed": True}, "DEADLINE_EXCEEDED"),
        ({"is_late": True}, "DEADLINE_EXCEEDED"),
        ({}, b"plain"),
    ],
)
def test_nothing_is_unpacked_for_a_caller_that_has_gone(
    workers: PlainBodyWorkers, over: dict[str, Any], outcome: object
) -> None:
    call, go_on = StubCall(**over), threading.Event()
    go_on.set()
    made = run(workers, call, 1, go_on)
    assert call.ended.wait(PATIENCE_S)
    assert (bool(made), call.outcome) == (not over, outcome)


def test_what_waits_is_bounded_by_what_is_to_be_read(
    workers: PlainBodyWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_body_workers, "PENDING_SIZE_MAX_BYTES", 10 * CALL_OVERHEAD_BYTES)
    go_on = threading.Event()
    calls = [StubCall() for _ in range(4)]
    sizes = [3 * CALL_OVERHEAD_BYTES, 3 * CALL_OVERHEAD_BYTES, 2 * CALL_OVERHEAD_BYTES, CALL_OVERHEAD_BYTES]
    for call, size_bytes in zip(calls, sizes, strict=True):
        run(workers, call, size_bytes, go_on)
    assert [call.outcome for call in calls] == [None, None, "SYSTEM_BUSY", None]
    go_on.set()
    for call in (calls[0], calls[1], calls[3]):
        assert call.ended.wait(PATIENCE_S)
        assert call.outcome == b"plain"
    later = StubCall()
    run(workers, later, 9 * CALL_OVERHEAD_BYTES, go_on)
    assert later.ended.wait(PATIENCE_S)
    assert later.outcome == b"plain"


def test_a_region_that_is_damaged_before_a_worker_reads_it_is_not_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk, clock = SimDisk(), ManualClock()
    store = open_store(disk, clock=clock)
    store.topics.create(TopicConfig("topic"))
    request = make_request([bytes(300)])
    store.append([request])
    store.flush()
    service = PullService(
        store,
        BrokerConfig(),
        cast("Any", None),
        FilterModules(disk, "/s/config/filters"),
        clock,
    )
    waiting: list[Callable[[], Callable[[], None]]] = []
    monkeypatch.setattr(PlainBodyWorkers, "run", lambda self, call, size_bytes, make: waiting.append(make))
    monkeypatch.setattr(
        pull_service, "read_regions", lambda regions: [part.file.read(*part[1:]) for part in regions]
    )
    call = StubCall(PullRequest(topic="topic", plain_bodies=True).SerializeToString())
    service.pull(cast("Any", call))
    position = request.physical_offset
    disk.flip_bit("/s/commitlog/" + "0" * 20, (position % SEGMENT + 40) * 8)
    clock.time_ms += 1000
    waiting.pop()()()
    assert call.outcome == "CORRUPT_LOG"
    assert not waiting
