"""No other pull waits for more than 5 ms while queues are searched: what a turn of the pull lane costs, in CPU time, which no other process
on the machine makes longer."""

from __future__ import annotations

import time

import pytest

from protomq.v1.pull_service_pb2 import FilterType, PullRequest
from protomq.v1.record_pb2 import Record
from protomq.v1.send_service_pb2 import SendRequest
from protomq_broker import filtered_pulls
from protomq_runtime.testing import FakeCall
from tests.support.waiting import wait_for
from tests.support.wasm_modules import COPIES, FILLS, LATE, TOUCHES, that_does, that_loops
from tests.unit.protomq_broker.fake_broker import PULL, SEND, FakeBroker

SEARCHES = 2
PART_COUNT, PARTS = 500, 16
TURN_S = 0.005
PART_WITHIN = 0.99


@pytest.fixture(scope="module")
def filled() -> FakeBroker:
    """Messages of 128 octets, with four properties each."""
    broker = FakeBroker(segment=1 << 24)
    broker.pull._filtered._monotonic = time.monotonic  # Its own clock stands still: no slice would end.
    for part in range(PARTS):
        records = [
            Record(
                body=bytes(128),
                properties={"delay": str(number % 100), "dest": f"D{number % 100}", "origin": "ZRH", "gate": str(part)},
            )
            for number in range(PART_COUNT)
        ]
        broker.call(SEND, SendRequest(topic="topic", queue_id=0, records=records)).response()
    broker.modules.write("late", LATE)
    broker.modules.write("slow", that_loops(55_000, matches=0))
    broker.modules.write("fills", that_does(FILLS))
    broker.modules.write("copies", that_does(COPIES))
    broker.modules.write("grows", that_does(f"(drop (memory.grow (i32.const 127))) {FILLS}", pages=1))
    broker.modules.write("touches", that_does(TOUCHES))
    return broker


def turns_s(
    broker: FakeBroker, text: str, kind: FilterType.ValueType, *, first_offset: int = 0, failing_count: int = 0
) -> list[float]:
    """What the turns of the pull lane take while some pulls search all there is, one after another. `failing_count`: so many pulls that
    begin with the first message come before.
    """
    lane = broker.server.lanes["pull"]
    found: list[float] = []

    def run() -> None:
        while lane.posted:
            function, began_s = lane.posted.popleft(), time.thread_time()
            function()
            found.append(time.thread_time() - began_s)

    def search(offset: int) -> FakeCall:
        request = PullRequest(topic="topic", queue_offset=offset, filter_type=kind, filter=text)
        return broker.server.call(PULL, request)

    def is_answered() -> bool:
        run()
        return all(call.answered for call in calls)

    for _ in range(failing_count):
        calls = [search(0) for _ in range(SEARCHES)]
        wait_for(is_answered, pause_s=0.001)
    offsets = [first_offset] * SEARCHES
    while min(offsets) < PARTS * PART_COUNT:
        calls = [search(offset) for offset in offsets]
        wait_for(is_answered, pause_s=0.001)
        offsets = [call.response(lambda region: b"").next_offset for call in calls]
    return found


def late_turn_s(turns: list[float]) -> float:
    """What all but one of a hundred are within."""
    return sorted(turns)[int(len(turns) * PART_WITHIN)]


@pytest.fixture(autouse=True)
def memory_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filtered_pulls, "read_regions", lambda regions: [part.file.read(*part[1:]) for part in regions])


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("delay > 98", FilterType.FILTER_TYPE_SQL92),
        ("delay >= 0", FilterType.FILTER_TYPE_SQL92),
        ("dest = 'D99'", FilterType.FILTER_TYPE_SQL92),
        ("dest ENDSWITH '9' AND origin IN ('ZRH', 'GVA') OR gate IS NULL", FilterType.FILTER_TYPE_SQL92),
        ("properties.dest == 'D99'", FilterType.FILTER_TYPE_CEL),
        ("late", FilterType.FILTER_TYPE_MODULE),
        # It needs for each message what a module may.
        ("slow", FilterType.FILTER_TYPE_MODULE),
    ],
)
def test_a_turn_of_the_pull_lane_is_short_whatever_is_searched(filled: FakeBroker, text: str, kind: FilterType.ValueType) -> None:
    turns = turns_s(filled, text, kind)
    assert len(turns) > SEARCHES
    assert late_turn_s(turns) <= TURN_S, f"{late_turn_s(turns) * 1000:.1f} ms at p99 of {len(turns)} turns, at most {max(turns) * 1000:.1f}"


@pytest.mark.parametrize("module", ["fills", "copies", "grows"])
def test_a_turn_is_short_where_one_instruction_of_a_module_is_beyond_its_limit(filled: FakeBroker, module: str) -> None:
    """Such an instruction runs to its end before the limit is noticed."""
    turns = turns_s(filled, module, FilterType.FILTER_TYPE_MODULE, first_offset=PARTS * PART_COUNT, failing_count=100)
    assert late_turn_s(turns) <= TURN_S, f"{late_turn_s(turns) * 1000:.1f} ms at p99 of {len(turns)} turns"


def test_a_turn_is_short_where_a_module_uses_all_of_its_memory(filled: FakeBroker) -> None:
    turns = turns_s(filled, "touches", FilterType.FILTER_TYPE_MODULE, first_offset=PARTS * PART_COUNT - 500)
    assert late_turn_s(turns) <= TURN_S, f"{late_turn_s(turns) * 1000:.1f} ms at p99 of {len(turns)} turns"


@pytest.mark.parametrize(
    ("text", "kind"), [("properties.dest == 'D99'", FilterType.FILTER_TYPE_CEL), ("slow", FilterType.FILTER_TYPE_MODULE)]
)
def test_slices_without_an_end_are_seen(
    filled: FakeBroker, text: str, kind: FilterType.ValueType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protomq_broker.filter_searches.SLICE_S", 10.0)
    turns = turns_s(filled, text, kind)
    assert late_turn_s(turns) > TURN_S
