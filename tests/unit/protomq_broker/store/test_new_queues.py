"""Groups begin at the first message of queues that their topics get, also where no member is there."""

from __future__ import annotations

from protomq.v1.consumer_service_pb2 import (
    CommitOffsetsRequest,
    GetOffsetsRequest,
    GetOffsetsResponse,
    QueueOffset,
)
from protomq.v1.pop_service_pb2 import PopRequest, PopStart
from protomq.v1.state_pb2 import OffsetsRecord
from protomq.wire.topics import OFFSETS_TOPIC, QUEUES_MAX
from protomq_broker.store.state.new_queues import OFFSETS_IN_RECORD, Growth, begin_at_first
from protomq_broker.store.state.topics import TopicConfig
from tests.unit.protomq_broker.fake_broker import CONSUMER, POP, FakeBroker


def starts(bodies: list[bytes]) -> list[tuple[str, int, int, int]]:
    """(group, queue, offset, incarnation) of each start that the records tell."""
    return [
        (commit.consumer_group, offset.queue_id, offset.queue_offset, offset.topic_incarnation)
        for body in bodies
        for commit in OffsetsRecord.FromString(body).commits
        for offset in commit.offsets
    ]


def grown(old: int, new: int) -> Growth:
    return Growth("t", 7, range(old, new))


def test_each_group_begins_in_each_new_queue_of_which_the_log_says_nothing_yet() -> None:
    found = starts(begin_at_first(grown(2, 4), {"pulls": {0, 1}, "both": {1, 3}}, {"pops": {0}, "both": {2}}))
    assert found == [("pops", 2, 0, 7), ("pops", 3, 0, 7), ("pulls", 2, 0, 7), ("pulls", 3, 0, 7)]


def test_without_groups_nothing_is_said() -> None:
    assert begin_at_first(grown(2, 4), {}, {}) == []
    assert begin_at_first(grown(2, 4), {"g": {0, 2, 3}}) == []


def test_many_groups_make_several_records() -> None:
    bodies = begin_at_first(grown(1, 101), {f"g{number}": {0} for number in range(12)})
    sizes = [len(starts([body])) for body in bodies]
    assert sizes == [OFFSETS_IN_RECORD, 1_200 - OFFSETS_IN_RECORD]


def committed(broker: FakeBroker, group: str) -> dict[int, int]:
    call = broker.call(CONSUMER + "GetOffsets", GetOffsetsRequest(consumer_group=group, topic="topic"))
    assert call.error is None
    return {offset.queue_id: offset.queue_offset for offset in GetOffsetsResponse.FromString(call.answer_payload or b"").offsets}


def incarnation_of(broker: FakeBroker) -> int:
    topic = broker.store.topics.find("topic")
    assert topic is not None
    return topic.incarnation


def grow(broker: FakeBroker, queues: int) -> None:
    broker.store.topics.put([TopicConfig("topic", queues, queues)])


def test_a_topic_that_grows_tells_where_its_groups_begin_and_a_start_still_knows() -> None:
    broker = FakeBroker()
    offset = QueueOffset(topic="topic", queue_id=1, queue_offset=0)
    assert broker.call(CONSUMER + "CommitOffsets", CommitOffsetsRequest(consumer_group="pulls", offsets=[offset])).error is None
    pop = PopRequest(consumer_group="pops", topic="topic", start=PopStart.POP_START_END)
    assert broker.call(POP + "Pop", pop).error is None
    had = broker.store.topics.find("topic")
    assert had is not None
    count = had.read_queues
    grow(broker, count + 2)
    new = {count: 0, count + 1: 0}
    # Queue 0 is not new: a member begins there as it says.
    assert committed(broker, "pulls") == {1: 0} | new
    assert committed(broker, "pops") == new
    assert committed(broker, "nobody") == {}
    broker.store.close()
    again = FakeBroker(disk=broker.disk)
    assert committed(again, "pulls") == {1: 0} | new


def test_a_queue_that_comes_back_keeps_what_was_committed_there() -> None:
    broker = FakeBroker()
    grow(broker, 4)
    offsets = [QueueOffset(topic="topic", queue_id=3, queue_offset=0)]
    assert broker.call(CONSUMER + "CommitOffsets", CommitOffsetsRequest(consumer_group="g", offsets=offsets)).error is None
    grow(broker, 2)
    before = broker.store.appended_position
    assert committed(broker, "g") == {3: 0}
    grow(broker, 4)
    assert committed(broker, "g") == {2: 0, 3: 0}
    assert broker.store.appended_position > before


def test_a_topic_of_many_groups_gets_queues_though_their_starts_take_more_than_one_append() -> None:
    broker = FakeBroker()
    commits = [
        CommitOffsetsRequest(consumer_group=f"g{number}", offsets=[QueueOffset(topic="topic", topic_incarnation=incarnation_of(broker))])
        for number in range(60)
    ]
    broker.store.append_state(OFFSETS_TOPIC, [OffsetsRecord(commits=commits).SerializeToString()])
    before = broker.store.appended_position
    grow(broker, QUEUES_MAX)
    assert broker.store.appended_position - before > broker.store.append_size_max_bytes
    assert committed(broker, "g59") == dict.fromkeys(range(2, QUEUES_MAX), 0) | {0: 0}
