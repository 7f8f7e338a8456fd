"""What is read ahead for pops is what the store would give, and is forgotten when it may not be true any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq_broker import pop_ahead
from protomq_broker.pop_ahead import AHEAD_COUNT, PopAhead
from protomq_broker.store.log.recovery import DamagedRange
from protomq_broker.store.queues.reading import ReadResult
from protomq_broker.store.state.popped_queue import QueueOfGroup

from .fake_broker import FakeBroker
from .test_pop_resets import reset
from .test_pop_service import Group

KEY = QueueOfGroup("group", "topic", 0)
SEGMENT = 8_192


def filled(sizes: Sequence[tuple[int, int]]) -> FakeBroker:
    """Requests to queue 0, each of some messages of one size; one to queue 1 behind every third."""
    broker = FakeBroker(segment=SEGMENT)
    for number, (count, size) in enumerate(sizes):
        broker.fill([bytes((number + 1,)) * size] * count)
        if number % 3 == 2:
            broker.fill([b"other"], queue_id=1)
    return broker


def as_values(result: ReadResult) -> tuple[object, ...]:
    return (
        result.status, result.next_offset, result.first_offset, result.starts.tolist(), result.sizes.tolist(),
        result.queue_offsets, result.regions, result.regions_size_bytes,
    )  # fmt: skip


def noted(broker: FakeBroker, offset: int = 0) -> PopAhead:
    ahead = PopAhead(broker.store)
    truth = ahead.truth(broker.topic.incarnation)
    ahead.note(KEY, truth, broker.store.read("topic", 0, offset, AHEAD_COUNT, 1 << 20))
    return ahead


def take(ahead: PopAhead, broker: FakeBroker, offset: int, count: int = 1) -> ReadResult | None:
    return ahead.take(KEY, ahead.truth(broker.topic.incarnation), offset, count, 1 << 20)


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 900)), min_size=1, max_size=14),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9), st.integers(1, 4_000)), min_size=1, max_size=6),
)
def test_what_is_taken_is_what_the_store_would_give(
    sizes: list[tuple[int, int]], pops: list[tuple[int, int, int]]
) -> None:
    broker = filled(sizes)
    end = broker.store.queue_range("topic", 0)[1]
    for offset, count, size_max_bytes in pops:
        if offset >= end:
            continue
        ahead = noted(broker)
        wanted = broker.store.read("topic", 0, offset, count, size_max_bytes)
        found = ahead.take(KEY, ahead.truth(broker.topic.incarnation), offset, count, size_max_bytes)
        if found is None:
            assert wanted.next_offset == end
        else:
            assert as_values(found) == as_values(wanted)


def _damage(broker: FakeBroker) -> None:
    broker.store._quarantine.add(DamagedRange(100, 200, 0, "a flipped bit"))


def _lead_again(broker: FakeBroker) -> None:
    broker.store._log.epoch += 1


def _delete(broker: FakeBroker) -> None:
    broker.store.checkpoint()
    assert broker.store.delete_segments_below(2 * SEGMENT)


@pytest.mark.parametrize("change", [_damage, _lead_again, _delete])
def test_nothing_is_taken_that_may_be_untrue(change: Callable[[FakeBroker], None]) -> None:
    broker = filled([(5, 900)] * 8)
    ahead = noted(broker)
    assert take(ahead, broker, 3) is not None
    change(broker)
    assert take(ahead, broker, 3) is None
    assert not ahead._found


def test_another_topic_of_the_name_has_nothing_ahead() -> None:
    broker = filled([(10, 9)])
    ahead = noted(broker)
    assert ahead.take(KEY, ahead.truth(broker.topic.incarnation + 1), 3, 1, 1 << 20) is None


def test_what_was_not_noted_is_not_there() -> None:
    broker = filled([(10, 9)])
    ahead = noted(broker, 5)
    assert take(ahead, broker, 4) is None
    assert take(ahead, broker, 5) is None  # The one before has shown that somebody is elsewhere.


def test_what_nobody_wants_is_forgotten() -> None:
    broker = filled([(10, 9)])
    ahead = noted(broker)
    ahead.forget_unwanted()
    assert take(ahead, broker, 3) is not None
    ahead.forget_unwanted()
    ahead.forget_unwanted()
    assert not ahead._found


def test_the_number_of_queues_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pop_ahead, "QUEUES_MAX", 2)
    broker = filled([(10, 9)])
    ahead = PopAhead(broker.store)
    truth = ahead.truth(broker.topic.incarnation)
    result = broker.store.read("topic", 0, 0, AHEAD_COUNT, 1 << 20)
    for number in range(5):
        ahead.note(KEY._replace(group=str(number)), truth, result)
        assert len(ahead._found) <= 2


def test_small_pops_share_a_look_and_get_each_message_once(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = filled([(5, 100)] * 12)
    read, looks = broker.store.read, []

    def counted(*wanted: object) -> ReadResult:
        looks.append(wanted)
        return read(*wanted)  # type: ignore[arg-type]

    monkeypatch.setattr(broker.store, "read", counted)
    group = Group(broker)
    offsets = [message.offset for _ in range(20) for message in group.pop(record_count_max=3)]
    assert offsets == list(range(60))
    assert len(looks) <= 3


def test_a_pop_gets_what_has_arrived_since_the_look() -> None:
    broker = filled([(5, 100)])
    group = Group(broker)
    assert len(group.pop(record_count_max=3)) == 3
    broker.fill([b"new"] * 4)
    assert [message.offset for message in group.pop(record_count_max=6)] == [3, 4, 5, 6, 7, 8]


def test_damage_that_is_found_behind_the_look_is_not_handed_out() -> None:
    broker = filled([(1, 100)] * 12)
    group = Group(broker)
    assert [message.offset for message in group.pop(record_count_max=2)] == [0, 1]
    region = broker.store.read("topic", 0, 3, 1, 1 << 20).regions[0]
    start = region.file.base_position + region.offset
    broker.store._quarantine.add(DamagedRange(start, start + region.size_bytes, 0, "a flipped bit"))
    assert [message.offset for message in group.pop(record_count_max=4)] == [2]


def test_a_reset_of_the_group_is_followed() -> None:
    broker = filled([(5, 100)] * 4)
    group, other = Group(broker), Group(broker, "other")
    assert [message.offset for message in group.pop(record_count_max=3)] == [0, 1, 2]
    assert [message.offset for message in other.pop(record_count_max=3)] == [0, 1, 2]
    reset(broker, queue_offset=9)  # Ahead of what was read.
    assert [message.offset for message in group.pop(record_count_max=3)] == [9, 10, 11]
    reset(broker, queue_offset=1)  # Behind it.
    assert [message.offset for message in group.pop(record_count_max=3)] == [1, 2, 3]
    assert [message.offset for message in other.pop(record_count_max=3)] == [3, 4, 5]
