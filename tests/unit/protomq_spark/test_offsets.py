"""Planning ranges: starts, ends, splitting, limits, data loss. No Spark, no broker."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("pyarrow", reason="protomq-spark needs pyarrow")
pytest.importorskip("protomq_spark", reason="clients/spark is not installed")

from hypothesis import given, settings
from hypothesis import strategies as st

from protomq._types import MessageQueue, QueueRange
from protomq_spark.offsets import (
    OffsetRange,
    StreamOffset,
    StreamState,
    assigned_queues,
    carried,
    clip,
    decode_state,
    encode_state,
    find_data_loss,
    from_stream_offset,
    limit_ends,
    pack,
    per_queue,
    ranges_between,
    resolve,
    split,
    times_wanted,
    to_stream_offset,
)
from protomq_spark.options import EARLIEST, LATEST, Bound, OptionError

A0, A1 = MessageQueue("t", "a", 0), MessageQueue("t", "a", 1)
B0 = MessageQueue("t", "b", 0)
RANGES = {A0: QueueRange(5, 50), A1: QueueRange(0, 0), B0: QueueRange(10, 20)}
QUEUES = [MessageQueue("t", f"b{n % 3}", n) for n in range(8)]
positions = st.dictionaries(st.sampled_from(QUEUES), st.integers(0, 10_000), max_size=8)


@settings(deadline=None)
@given(positions)
def test_an_offset_survives_the_checkpoint(found: dict[MessageQueue, int]) -> None:
    assert from_stream_offset(to_stream_offset(found)) == found


def test_a_broker_name_may_hold_a_colon() -> None:
    found = {MessageQueue("t", "rack:1:a", 3): 7}
    assert from_stream_offset(to_stream_offset(found)) == found


def test_a_query_keeps_its_name_in_the_checkpoint_and_old_checkpoints_have_none() -> None:
    state = StreamState({A0: 7, B0: 9}, "3f")
    assert decode_state(encode_state(state)) == state
    assert encode_state(state)["t"] == {"a:0": 7, "b:0": 9}
    assert decode_state({"t": {"a:0": 7}}) == StreamState({A0: 7})
    assert encode_state(StreamState({A0: 7})) == {"t": {"a:0": 7}}
    both = StreamState({A0: 7}, "3f", {("t", "a"): 2**63 - 1, ("t", "rack:1"): 2})
    assert decode_state(json.loads(json.dumps(encode_state(both)))) == both
    later: StreamOffset = {"@protomq": {"query": "3f", "of a later version": 1}, "t": {"a:0": 7}}
    assert decode_state(later) == StreamState({A0: 7}, "3f")


def test_words_are_resolved_per_queue() -> None:
    assert resolve("startingOffsets", Bound(word=EARLIEST), RANGES, {}) == {A0: 5, A1: 0, B0: 10}
    assert resolve("endingOffsets", Bound(word=LATEST), RANGES, {}) == {A0: 50, A1: 0, B0: 20}


def test_json_may_mix_offsets_and_words() -> None:
    bound = Bound(offsets={"t": {"a:0": 23, "a:1": LATEST, "b:0": EARLIEST}})
    assert resolve("startingOffsets", bound, RANGES, {}) == {A0: 23, A1: 0, B0: 10}


def test_a_plain_queue_number_is_enough_for_one_broker_and_refused_for_several() -> None:
    assert per_queue("o", {"t": {"0": 1, "1": 2}}, [A0, A1]) == {A0: 1, A1: 2}
    with pytest.raises(OptionError, match="write a:0 or b:0"):
        per_queue("o", {"t": {"0": 1, "a:1": 2}}, [A0, A1, B0])


def test_json_that_leaves_out_a_queue_or_names_a_strange_one_is_refused() -> None:
    with pytest.raises(OptionError, match=r"leaves out 1 queues .*a:1"):
        per_queue("o", {"t": {"0": 1}}, [A0, A1])
    with pytest.raises(OptionError, match="queue '7' of topic 't'"):
        per_queue("o", {"t": {"0": 1, "7": 1}}, [A0])
    with pytest.raises(OptionError, match="twice"):
        per_queue("o", {"t": {"0": 1, "a:0": 1}}, [A0])


def test_an_offset_beyond_the_end_is_refused() -> None:
    bound = Bound(offsets={"t": {"a:0": 51, "a:1": 0, "b:0": 10}})
    with pytest.raises(OptionError, match="51 is beyond the end of queue a:0"):
        resolve("startingOffsets", bound, RANGES, {})


def test_a_time_without_a_message_is_an_error_or_the_end() -> None:
    bound = Bound(time_ms=99)
    wanted = times_wanted("startingTimestamp", bound, sorted(RANGES))
    assert wanted == dict.fromkeys(RANGES, 99)
    found = {A0: 30, A1: 0, B0: 20}
    with pytest.raises(OptionError, match="has no message of that"):
        resolve("startingTimestamp", bound, RANGES, found)
    later = Bound(time_ms=99, later_is_latest=True)
    assert resolve("startingTimestamp", later, RANGES, found) == found


def test_assigned_queues_are_named_with_or_without_broker() -> None:
    assert assigned_queues({"t": ["0"]}, RANGES) == [A0, B0]
    assert assigned_queues({"t": ["a:1"]}, RANGES) == [A1]
    with pytest.raises(OptionError, match="no queue '9'"):
        assigned_queues({"t": ["9"]}, RANGES)


def test_a_new_queue_is_read_from_its_first_message() -> None:
    assert ranges_between({A0: 5}, {A0: 5, B0: 3}) == [OffsetRange(B0, 0, 3)]


def test_what_is_gone_is_found_and_clipped() -> None:
    wanted = [OffsetRange(A0, 0, 60), OffsetRange(B0, 12, 15)]
    lost = find_data_loss(wanted, RANGES)
    assert len(lost) == 2
    assert "offsets 0 to 4 are deleted" in lost[0]
    assert "offsets 50 to 59 are not there" in lost[1]
    assert clip(wanted, RANGES) == [OffsetRange(A0, 5, 50), OffsetRange(B0, 12, 15)]
    assert clip([OffsetRange(A0, 0, 3)], RANGES) == []


def test_a_queue_that_cannot_be_seen_stands_still() -> None:
    assert find_data_loss([OffsetRange(A0, 0, 9)], {}) == []
    assert carried({A0: 7, B0: 3}, {B0: 9}) == {A0: 7, B0: 9}


def test_one_big_queue_is_split_and_small_ones_are_not() -> None:
    parts = split([OffsetRange(A0, 0, 1000), OffsetRange(B0, 0, 10)], min_partitions=5)
    assert [part.queue for part in parts].count(B0) == 1
    assert len(parts) >= 5


ranges_strategy = st.lists(
    st.tuples(st.integers(0, 100), st.integers(1, 5000)), min_size=1, max_size=8
).map(lambda items: [OffsetRange(QUEUES[n], s, s + size) for n, (s, size) in enumerate(items)])


@settings(deadline=None)
@given(ranges_strategy, st.integers(0, 40), st.none() | st.integers(1, 700))
def test_splitting_loses_nothing_and_keeps_its_promises(
    ranges: list[OffsetRange], min_partitions: int, records_max: int | None
) -> None:
    parts = split(ranges, min_partitions, records_max)
    joined: list[OffsetRange] = []
    for part in parts:
        assert part.end > part.start
        if joined and joined[-1].queue == part.queue:
            assert joined[-1].end == part.start
            joined[-1] = joined[-1]._replace(end=part.end)
        else:
            joined.append(part)
    assert joined == ranges
    total = sum(item.end - item.start for item in ranges)
    assert len(parts) >= min(min_partitions, total)
    if records_max is not None:
        assert max(part.end - part.start for part in parts) <= records_max


@settings(deadline=None)
@given(ranges_strategy, st.none() | st.integers(1, 12))
def test_tasks_that_hold_several_parts_keep_their_order_and_are_no_more_than_asked_for(
    ranges: list[OffsetRange], partitions_max: int | None
) -> None:
    tasks = pack(ranges, partitions_max)
    assert [part for task in tasks for part in task] == ranges
    assert all(tasks)
    assert len(tasks) <= (partitions_max or len(ranges))
    total, largest = sum(r.end - r.start for r in ranges), max(r.end - r.start for r in ranges)
    if partitions_max is not None and partitions_max < len(ranges):
        shares = [sum(part.end - part.start for part in task) for task in tasks]
        assert max(shares) <= total / partitions_max + largest


@settings(deadline=None)
@given(positions, positions, st.integers(1, 20_000))
def test_a_limit_is_used_up_and_never_passed(
    start: dict[MessageQueue, int], more: dict[MessageQueue, int], count_max: int
) -> None:
    latest = {queue: start.get(queue, 0) + more.get(queue, 0) for queue in {*start, *more}}
    ends = limit_ends(start, latest, count_max)
    taken = {queue: ends[queue] - start.get(queue, 0) for queue in latest}
    lags = {queue: latest[queue] - start.get(queue, 0) for queue in latest}
    assert all(0 <= taken[queue] <= lags[queue] for queue in latest)
    assert sum(taken.values()) == min(count_max, sum(lags.values()))
    total = sum(lags.values())
    if total > count_max:
        assert all(abs(taken[q] - lags[q] * count_max / total) <= 1 for q in latest)


def test_no_queue_starves_beside_a_flooded_one() -> None:
    start, latest = dict.fromkeys(QUEUES, 0), dict.fromkeys(QUEUES, 1)
    latest[QUEUES[0]] = 1_000_000
    for _ in range(20):
        start = limit_ends(start, latest, 2)
        latest[QUEUES[0]] += 1000
    assert all(start[queue] == 1 for queue in QUEUES[1:])
