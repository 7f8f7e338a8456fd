"""The machine of %SYS%POP: the same records make the same state, from the log, from a cache, or said again."""

from __future__ import annotations

from protomq.v1.state_pb2 import HandOut, PopRecord
from protomq.wire.topics import POP_TOPIC
from protomq_broker.store.state.pop import PopState
from protomq_broker.store.state.popped_queue import QueueOfGroup
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.testing.simdisk import SimDisk

from .store_helpers import open_store

KEY = QueueOfGroup("g", "t", 0)


def machine(disk: SimDisk | None = None, end_position: int = 10_000) -> PopState:
    disk = disk or SimDisk()
    disk.make_folder("/s/config")
    return PopState(disk, "/s/config/popState.json", 0, end_position)


def hand_out(number: int, first: int, count: int, *, group: str = "g", incarnation: int = 7) -> bytes:
    record = PopRecord(time_ms=100 * number)
    told = record.queues.add(
        consumer_group=group, topic="t", topic_incarnation=incarnation, next_offset=first + count
    )
    told.hand_outs.append(
        HandOut(number=number, time_ms=100 * number, deadline_ms=100 * number + 50, attempt=1, runs=[first, count])
    )
    return record.SerializeToString()


def ack(first: int, count: int) -> bytes:
    record = PopRecord(time_ms=1)
    record.queues.add(consumer_group="g", topic="t", topic_incarnation=7, acked_runs=[first, count])
    return record.SerializeToString()


def told(state: PopState) -> list[bytes]:
    return sorted(known.statement().SerializeToString() for known in state.queues())


def test_a_snapshot_and_the_records_behind_it_make_the_state_that_all_records_make() -> None:
    records = [hand_out(1, 0, 5), ack(0, 2), hand_out(2, 5, 5), ack(3, 4), hand_out(3, 10, 1, group="h")]
    for saved_at in range(len(records) + 1):
        for replay_from in range(saved_at + 1):  # the cache may know more than its position says
            disk = SimDisk()
            first = machine(disk)
            for position, body in enumerate(records[:saved_at]):
                first.apply(body, position * 10)
            snapshot = first.unsaved()
            if snapshot is not None:
                assert snapshot.end_position == (saved_at - 1) * 10 + 1
                snapshot.save(replay_from * 10)
                assert first.unsaved() is None
            second = machine(disk)
            for position, body in enumerate(records):
                if position * 10 >= second.replay_from:
                    second.apply(body, position * 10)
            whole = machine()
            for position, body in enumerate(records):
                whole.apply(body, position * 10)
            assert told(second) == told(whole)
            assert second.time_ms == whole.time_ms == 300


def test_what_was_acknowledged_is_remembered_by_who_applies_it_and_else_known_to_be_forgotten() -> None:
    records = [hand_out(1, 0, 5), ack(0, 2), hand_out(2, 5, 5), ack(2, 1)]
    disk = SimDisk()
    first = machine(disk)
    for position, body in enumerate(records[:3]):
        first.apply(body, position * 10)
    snapshot = first.unsaved()
    assert snapshot is not None
    snapshot.save(25)
    first.apply(records[3], 30)
    second = machine(disk)
    second.apply(records[3], 30)
    for state, acked, is_whole in ((first, [0, 3], True), (second, [2, 1], False)):
        known = state.find(KEY, 7)
        assert known is not None
        assert known.acknowledged.parted([0, 3], 1, 100)[0] == acked
        assert known.acknowledged.is_whole(1, 100) is is_whole
    # Said again for the retention, by who knows it.
    whole = first.carry(50)[0]()
    first.apply(whole, 60)
    known = first.find(KEY, 7)
    assert known is not None
    assert known.acknowledged.parted([0, 3], 1, 100)[0] == [0, 3]
    assert known.acknowledged.is_whole(1, 100)


def test_of_a_group_that_was_deleted_nobody_knows_what_it_has_acknowledged_before() -> None:
    state = machine()
    deleted = PopRecord(deleted_groups=["g"]).SerializeToString()
    for position, body in enumerate((hand_out(1, 0, 5), ack(0, 5), deleted, hand_out(2, 0, 5))):
        state.apply(body, position * 10)
    known = state.find(KEY, 7)
    assert known is not None
    assert not known.acknowledged.is_whole(1, 100)
    assert known.acknowledged.is_whole(2, 200)


def test_what_is_carried_forward_is_all_that_is_needed_of_what_goes() -> None:
    state = machine()
    for position, body in enumerate((hand_out(1, 0, 5), ack(1, 2), hand_out(2, 5, 5, group="h"))):
        state.apply(body, position * 10)
    carriers = state.carry(15)
    state.apply(ack(0, 1), 30)  # meanwhile
    bodies = [carrier() for carrier in carriers]
    assert len(bodies) == 1
    before = told(state)
    state.apply(bodies[0], 40)
    assert told(state) == before
    behind = machine()  # a log that begins at the cut
    for position, body in ((20, hand_out(2, 5, 5, group="h")), (30, ack(0, 1)), (40, bodies[0])):
        behind.apply(body, position)
    assert told(behind) == before
    assert state.carry(20) == []
    assert carriers[0]() == b"", "it stands behind the cut now"


def test_a_deleted_group_and_a_topic_that_is_gone_are_forgotten() -> None:
    state = machine()
    state.apply(hand_out(1, 0, 5), 0)
    state.apply(hand_out(1, 0, 5, group="h"), 10)
    assert state.groups() == {"g": ["t"], "h": ["t"]}
    state.apply(PopRecord(deleted_groups=["g"]).SerializeToString(), 20)
    assert not state.has_group("g")
    assert state.has_group("h")
    state.keep(lambda topic: 8)
    assert state.groups() == {}


def test_what_was_popped_of_a_deleted_topic_does_not_come_back_with_one_of_the_same_incarnation() -> None:
    state = machine()
    state.apply(hand_out(1, 0, 5), 20)
    state.apply(hand_out(1, 0, 5, group="h"), 40)
    state.keep({"t": 7}.get, {"t": 30})
    assert state.groups() == {"h": ["t"]}


def test_pops_of_a_topic_begin_anew_though_it_has_the_incarnation_of_one_that_was_deleted() -> None:
    disk = SimDisk()
    store = open_store(disk)
    store.topics.put([TopicConfig("t", incarnation=7)])
    store.append_state(POP_TOPIC, [hand_out(1, 0, 5)])
    store.append_state(POP_TOPIC, [hand_out(2, 5, 5)])
    store.delete_topic("t")
    store.topics.put([TopicConfig("t", incarnation=7)])
    store.append_state(POP_TOPIC, [hand_out(1, 0, 1)])
    popped = [known.statement() for known in store.popped.queues()]
    assert [told.next_offset for told in popped] == [1]
    store = open_store(disk.killed())
    assert [known.statement() for known in store.popped.queues()] == popped


def test_queues_with_open_messages_are_known_beyond_those_that_a_topic_has() -> None:
    disk = SimDisk()
    state = machine(disk)
    record = PopRecord(time_ms=1)
    for group, queue_id in (("g", 0), ("g", 5), ("g", 6), ("h", 9)):
        told = record.queues.add(consumer_group=group, topic="t", topic_incarnation=7, queue_id=queue_id, next_offset=1)
        told.hand_outs.append(HandOut(number=1, time_ms=1, deadline_ms=50, attempt=1, runs=[0, 1]))
    state.apply(record.SerializeToString(), 0)
    snapshot = state.unsaved()
    assert snapshot is not None
    snapshot.save(10)
    for each in (state, machine(disk)):
        assert each.open_queues_from("g", "t", 7, 0) == [0, 5, 6]
        assert each.open_queues_from("g", "t", 7, 6) == [6]
        assert each.open_queues_from("g", "t", 7, 7) == each.open_queues_from("g", "t", 8, 0) == []
        acked = PopRecord(time_ms=2)
        acked.queues.add(consumer_group="g", topic="t", topic_incarnation=7, queue_id=5, acked_runs=[0, 1])
        each.apply(acked.SerializeToString(), 20)
        assert each.open_queues_from("g", "t", 7, 1) == [6]
        each.apply(PopRecord(deleted_groups=["g"]).SerializeToString(), 30)
        assert each.open_queues_from("g", "t", 7, 0) == []
        assert each.open_queues_from("h", "t", 7, 4) == [9]
        each.keep(lambda topic: None)
        assert each.open_queues_from("h", "t", 7, 4) == []


def test_what_goes_with_an_earlier_topic_does_not_hide_queues_of_the_one_of_that_name() -> None:
    state = machine()
    for incarnation, queue_ids in ((7, (0, 5, 6)), (8, (5,))):
        record = PopRecord()
        for queue_id in queue_ids:
            told = record.queues.add(consumer_group="g", topic="t", queue_id=queue_id, topic_incarnation=incarnation, next_offset=1)
            told.hand_outs.append(HandOut(number=1, time_ms=1, deadline_ms=50, attempt=1, runs=[0, 1]))
        state.apply(record.SerializeToString(), incarnation)
    state.keep(lambda name: 8)
    assert state.queue_ids("g", "t") == [5]
    assert state.open_queues_from("g", "t", 8, 4) == [5]


def test_another_incarnation_of_the_topic_begins_anew() -> None:
    state = machine()
    state.apply(hand_out(1, 0, 5), 0)
    state.apply(hand_out(1, 0, 2, incarnation=8), 10)
    assert state.find(KEY, 7) is None
    known = state.find(KEY, 8)
    assert known is not None
    assert (known.next_offset, list(known.open)) == (2, [0, 1])


def test_a_record_that_does_not_hold_changes_nothing() -> None:
    state = machine()
    state.apply(hand_out(1, 0, 5), 0)
    before = told(state)
    broken = PopRecord()
    broken.queues.add(consumer_group="g", topic="t", topic_incarnation=7, acked_runs=[0])
    state.apply(broken.SerializeToString(), 10)
    state.apply(b"\xff", 20)
    assert told(state) == before
