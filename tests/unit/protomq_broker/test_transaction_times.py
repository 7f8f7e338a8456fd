"""When producers are asked, whatever the wall clock does: a half message has its time by the clock by which checks fall due."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from protomq.v1.record_pb2 import Record
from protomq.v1.send_service_pb2 import SendRequest
from protomq_broker import transaction_checks
from protomq_broker.check_clock import CheckClock
from protomq_broker.store.state.transactions import due_record
from protomq_broker.store.tools.verify import verify
from tests.support.transaction_world import ROLL_BACK, SEGMENT, World, checks_of

HOUR_MS = 3_600_000
STEPS_MS = [-5_000, -600_000, -HOUR_MS]


@pytest.fixture
def world() -> World:
    return World().start()


def asked_after_ms(world: World, *, until_ms: int = 60_000, step_ms: int = 500) -> dict[bytes, list[int]]:
    """When each transaction is asked about from now on, by the monotonic clock."""
    asked: dict[bytes, list[int]] = {}
    for passed_ms in range(0, until_ms + 1, step_ms):
        call = world.wait()
        world.turns(step_ms if passed_ms else 0)
        if not call.answered:
            call.on_close()
            continue
        for check in checks_of(call):
            asked.setdefault(check.message.body, []).append(passed_ms)
    return asked


def is_in_time(times_ms: list[int], wanted_ms: list[int]) -> bool:
    """Not early, nor later than the clock's slew and two turns."""
    return len(times_ms) == len(wanted_ms) and all(
        wanted <= time <= 1.02 * wanted + 1_000 for time, wanted in zip(times_ms, wanted_ms, strict=True)
    )


@pytest.mark.parametrize("back_ms", STEPS_MS)
@pytest.mark.parametrize("since_ms", [0, 3_000, 20_000, 700_000])
def test_a_clock_that_is_set_back_makes_no_producer_be_asked_early(world: World, back_ms: int, since_ms: int) -> None:
    world.request(SendRequest(topic="fill", queue_id=0, records=[Record(body=b"before")]))
    world.clock.wall_offset_ms = back_ms
    world.turns(since_ms)
    world.half(b"after")
    asked = asked_after_ms(world)
    assert is_in_time(asked[b"after"], [6_000, 36_000]), asked


@pytest.mark.parametrize("only_log", [False, True])
@pytest.mark.parametrize("has_segments_deleted", [False, True])
def test_a_start_keeps_the_times_of_transactions(world: World, only_log: bool, has_segments_deleted: bool) -> None:
    world.request(SendRequest(topic="fill", queue_id=0, records=[Record(body=b"before")]))
    world.clock.wall_offset_ms = -HOUR_MS
    world.turns(20_000)
    handle = world.half(b"half")
    due_ms = world.listed().transactions[0].next_check_time_ms
    if has_segments_deleted:
        for _ in range(10):
            world.request(SendRequest(topic="fill", queue_id=0, records=[Record(body=bytes(30_000))]))
        world.store.checkpoint()
        world.store.delete_segments_below(world.store.appended_position)
        assert world.store.min_position >= SEGMENT
    world.store.close()
    if only_log:
        for name in world.disk.list("/s"):
            if name != "commitlog":
                world.disk.remove(f"/s/{name}")
    world.clock.wall_offset_ms = 0  # it is set right, and ahead of nothing that was stored
    world.restart(world.disk)
    (known,) = world.listed().transactions
    assert known.next_check_time_ms == due_ms
    assert is_in_time(asked_after_ms(world)[b"half"], [6_000, 36_000])
    assert handle
    world.store.close()
    assert verify("/s", disk=world.disk) == []


@pytest.mark.parametrize("back_ms", STEPS_MS)
@pytest.mark.parametrize("is_checked", [False, True])
def test_a_start_with_a_clock_that_is_behind_asks_neither_early_nor_late(world: World, back_ms: int, is_checked: bool) -> None:
    """After another boot of the machine, too: then log time begins at the wall clock, behind the times of what is open."""
    world.request(SendRequest(topic="fill", queue_id=0, records=[Record(body=b"before")]))
    world.clock.wall_offset_ms = back_ms
    world.turns(700_000)
    world.half(b"half")
    if is_checked:
        world.turns(7_000)
    world.restart()
    wanted_ms = [30_000, 60_000] if is_checked else [6_000, 36_000]
    assert is_in_time(asked_after_ms(world, until_ms=63_000 if is_checked else 60_000)[b"half"], wanted_ms)


def test_starts_that_follow_each_other_put_nothing_off_for_ever(world: World) -> None:
    world.half(b"half")
    world.clock.wall_offset_ms = -HOUR_MS
    world.log_time = world.checks._log_time
    for _ in range(5):
        world.turns(4_000)
        world.restart()
    assert [known.check_count for known in world.listed().transactions] == [1], "each start gave it its six seconds again"


def test_half_messages_of_an_earlier_version_have_their_time_when_the_clock_is_behind(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It left no word of the time but the store time, which stands still while the clock is behind."""
    world.request(SendRequest(topic="fill", queue_id=0, records=[Record(body=b"before")]))
    world.clock.wall_offset_ms = -600_000
    world.turns(300_000)
    with monkeypatch.context() as patch:
        patch.setattr(world.checks, "begun_record", lambda _: None)
        world.half(b"half")
    world.log_time = world.checks._log_time
    world.restart()
    assert is_in_time(asked_after_ms(world)[b"half"], [6_000, 36_000])


def test_a_start_gives_many_transactions_their_times_in_slices(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """200,000 of them took 2.5 s at once, in which the broker took no sends."""
    monkeypatch.setattr(transaction_checks, "AMENDED_COUNT_MAX", 10)
    world.request(SendRequest(topic="fill", queue_id=0, records=[Record(body=b"before")]))
    world.clock.wall_offset_ms = -600_000
    world.turns(700_000)
    handles = [world.half(b"%d" % number) for number in range(25)]
    world.restart()
    amended = Mock(side_effect=world.store.transactions.amended)
    monkeypatch.setattr(world.store.transactions, "amended", amended)
    now_ms = world.checks.now_ms()

    def late() -> int:
        return sum(known.due_ms > now_ms + 6_000 for known in world.store.transactions.open_transactions())

    assert late() == 15, "a start amends the first of them"
    world.end((handles[0], ROLL_BACK), (handles[-1], ROLL_BACK))
    world.half(b"new")
    for left in (5, 0, 0):
        world.lane.fire()
        assert late() <= left
    assert amended.call_count == 2
    assert is_in_time(asked_after_ms(world)[b"7"], [6_000, 36_000])


def test_what_the_disk_does_not_take_of_the_new_times_is_said_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction_checks, "AMENDED_COUNT_MAX", 10)
    world.request(SendRequest(topic="fill", queue_id=0, records=[Record(body=b"before")]))
    world.clock.wall_offset_ms = -600_000
    world.turns(700_000)
    for number in range(25):
        world.half(b"%d" % number)
    world.restart()
    with monkeypatch.context() as patch:
        patch.setattr(world.checks._writer, "append", Mock(side_effect=OSError(28, "no space left on device")))
        world.lane.fire()
    world.lane.fire(transaction_checks.RETRY_INTERVAL_MS)
    world.lane.fire()
    assert {known.due_ms - world.checks.now_ms() <= 6_000 for known in world.store.transactions.open_transactions()} == {True}


def test_checks_that_the_disk_does_not_take_are_said_once(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world.half(b"half")
    world.clock.time_ms += 6_000
    with monkeypatch.context() as patch:
        patch.setattr(world.checks._writer, "append", Mock(side_effect=OSError(28, "no space left on device")))
        for _ in range(10):
            world.lane.fire(HOUR_MS)
    assert caplog.text.count("transactions could not be checked") == 1
    assert 0 in asked_after_ms(world)[b"half"]


@pytest.mark.parametrize("count", [100, 450])
def test_many_half_messages_of_one_request_have_their_times(world: World, count: int) -> None:
    """Also where their append has no room for the record that says so."""
    world.request(SendRequest(topic="fill", queue_id=0, records=[Record(body=b"before")]))
    world.clock.wall_offset_ms = -HOUR_MS
    world.turns(60_000)
    records = [world.record(b"%03d" % number) for number in range(count)]
    world.request(SendRequest(topic="topic", queue_id=0, records=records, half=True))
    now_ms = world.checks.now_ms()
    assert len(world.store.transactions.open_transactions()) == count
    assert {known.due_ms for known in world.store.transactions.open_transactions()} == {now_ms + 6_000}


def test_nothing_more_is_stored_while_the_clock_is_right(world: World) -> None:
    world.half(b"first")
    before = world.store.appended_position
    world.half(b"again")
    one = world.store.appended_position - before
    world.clock.wall_offset_ms = -HOUR_MS
    world.turns(1_000)
    before = world.store.appended_position
    world.half(b"later")
    assert world.store.appended_position - before > one


def test_one_that_gets_its_time_back_is_asked_about_once_then(world: World) -> None:
    world.half(b"half")
    (known,) = world.store.transactions.open_transactions()
    position = world.store.appended_position
    for due_ms in (known.due_ms, known.due_ms + 1, known.due_ms, known.due_ms + 1, known.due_ms):
        world.store.transactions.apply(due_record([known._replace(due_ms=due_ms)]), position)
    assert world.store.transactions.due(known.due_ms, 10).to_check == [known.half]


def test_after_a_crash_with_a_clock_that_is_behind_each_is_asked_about_once(world: World) -> None:
    """A start gives them the times that they have already, in another order."""
    world.request(SendRequest(topic="fill", queue_id=0, records=[Record(body=b"before")]))
    world.clock.wall_offset_ms = -HOUR_MS
    for number, producer_id in enumerate((9, 5, 1)):
        world.turns(1_000)
        record = world.record(b"half %d" % number)
        record.producer_id, record.sequence = producer_id, 0
        world.request(SendRequest(topic="topic", queue_id=0, records=[record], half=True))
    world.store.close()
    for name in world.disk.list("/s"):
        if name != "commitlog":
            world.disk.remove(f"/s/{name}")
    world.restart(world.disk)
    for _ in range(16):
        world.turns(500)
    assert [known.check_count for known in world.store.transactions.open_transactions()] == [1, 1, 1]


# The clock by itself.


def test_the_clock_of_checks_approaches_log_time_slowly_and_never_goes_back() -> None:
    clock = CheckClock(1_000_000, 0)
    assert clock.now_ms(1_000_000, 1_060_000, 0) == 1_060_000  # set ahead by a minute, and then right
    last_ms = 0
    for monotonic_ms in range(7, 3_100_000, 7):
        now_ms = clock.now_ms(1_000_000 + monotonic_ms, 1_060_000, monotonic_ms)
        assert now_ms >= last_ms
        last_ms = now_ms
        if monotonic_ms == 700_000:
            assert abs(now_ms - (1_060_000 + 700_000 - 14_000)) <= 1
    assert last_ms == 1_000_000 + monotonic_ms
