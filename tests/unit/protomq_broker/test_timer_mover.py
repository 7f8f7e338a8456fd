"""Delivery of delayed messages by a store: on time, once, or recalled; whatever ends the process or the power."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest

from protomq.v1.record_pb2 import Record
from protomq.v1.send_service_pb2 import (
    RecallMessageRequest,
    SendRequest,
    SendResponse,
)
from protomq.v1.state_pb2 import TimerEnd, TimerRecord
from protomq.wire import record as layout
from protomq.wire.recall_handle import decode_handle, encode_handle
from protomq.wire.topics import TIMER_TOPIC
from protomq_broker import recalls, timer_mover
from protomq_broker.config import BrokerConfig
from protomq_broker.recalls import CANDIDATES_MAX
from protomq_broker.store.errors import DiskFullError, StoreError
from protomq_broker.store.log.recovery import DamagedRange
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.timer import recalled
from protomq_broker.store.timer.timer import timer_record
from protomq_broker.store.timer.timer_rows import MESSAGE, make_rows
from protomq_broker.store.tools.repair import repair
from protomq_broker.store.tools.verify import verify
from protomq_broker.testing.simdisk import Fault, SimulatedCrash
from protomq_runtime.errors import ServiceError
from tests.support import delay_world
from tests.support.delay_world import BROKER, SEGMENT, Call, World, reason
from tests.unit.protomq_broker.store.store_helpers import flip_in_log, open_store, read_all
from tests.unit.protomq_broker.store.test_following import log_of


@pytest.fixture
def world() -> World:
    return World().start()


def test_a_message_is_delivered_when_it_is_due_and_not_before(world: World) -> None:
    answer = world.send(b"later", delay_ms=5_000)
    assert (answer.queue_id, answer.queue_offset, answer.record_count) == (0, -1, 1)
    assert world.deliver(5_000) == []
    assert world.deliver(1) == [b"later"]
    assert world.deliver(100_001) == [b"later"]


def test_the_largest_message_that_is_taken_is_delivered_and_holds_up_no_other(world: World) -> None:
    """Segments are small here: its copy has to fit into one, too."""
    taken, refused = 1_000, SEGMENT
    while refused - taken > 1:
        size = (taken + refused) // 2
        try:
            world.send(bytes(size), delay_ms=1_000)
            taken = size
        except ServiceError:
            refused = size
    assert reason(lambda: world.send(bytes(refused), delay_ms=1_000))[0] == "MESSAGE_TOO_LARGE"
    world.send(b"small", delay_ms=2_000)
    delivered = world.deliver(2_001)
    assert bytes(taken) in delivered
    assert delivered[-1] == b"small"


def test_the_mover_gives_way_to_others_and_not_to_itself(world: World) -> None:
    world.send(b"later", delay_ms=5_000)
    assert world.mover.others_append
    assert world.deliver(5_001) == [b"later"]
    assert not world.mover.others_append
    world.send(b"another", delay_ms=5_000)
    assert world.mover.others_append


def test_the_mover_knows_whether_a_batch_took_all_that_was_due(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer_mover, "BATCH_COUNT_MAX", 2)
    for body in (b"1", b"2", b"3"):
        world.send(body, delay_ms=5_000)
    world.clock.time_ms += 5_001
    assert (world.mover.deliver(), world.mover.has_more) == (True, True)
    assert (world.mover.deliver(), world.mover.has_more) == (True, False)
    assert (world.mover.deliver(), world.mover.has_more) == (False, False)


@pytest.mark.parametrize("count", [1, 2, 513])
def test_a_record_of_what_ended_is_encoded_as_protobuf_does_it(count: int) -> None:
    numbers = np.arange(count)
    rows = make_rows(numbers + 170, numbers * 1_000_003, numbers + 1_200, MESSAGE)
    message = TimerRecord(
        positions=rows["position"].tolist(),
        due_times_ms=rows["due_ms"].tolist(),
        sizes=rows["size"].tolist(),
        end=TimerEnd.TIMER_END_DROPPED,
        log_time_ms=77,
    )
    assert timer_record(rows, TimerEnd.TIMER_END_DROPPED, 77) == message.SerializeToString()


def test_the_copy_is_the_message(world: World) -> None:
    record = Record(body=b"later", keys=["k1", "k2"], tag="t", properties={"a": "b"})
    sent = world.request(SendRequest(topic="topic", queue_id=0, records=[record], delay_level=1))
    (before,) = [Record.FromString(world.store.record_at(sent.physical_offset) or b"")]
    world.deliver(1_001)
    result = world.store.read("topic", 0, 0, 10, 10_000)
    (region,) = result.regions
    data = region.file.read(region.offset, region.size_bytes)
    copy = Record.FromString(data[2:] if data[1] < 0x80 else data[3:])
    for name in ("body", "keys", "tag", "properties", "crc32c", "born_time_ms", "sequence"):
        assert getattr(copy, name) == getattr(before, name)
    assert not copy.HasField("due_time_ms")
    assert copy.flags == layout.FLAG_KIND_COPY | layout.FLAG_TRANSIT | layout.FLAG_MANY_KEYS
    assert (copy.queue_id, copy.queue_offset) == (0, 0)
    assert copy.transit.first_store_time_ms == before.store_time_ms


@pytest.mark.parametrize(("level", "delay_ms"), [(1, 1_000), (5, 60_000), (18, 7_200_000)])
def test_levels_are_names_of_durations(world: World, level: int, delay_ms: int) -> None:
    world.send(b"later", delay_level=level)
    assert world.deliver(delay_ms) == []
    assert world.deliver(1) == [b"later"]


def test_each_message_of_a_request_has_its_own_time(world: World) -> None:
    now_ms = world.clock.now_ms()
    records = [Record(body=b"%d" % at, due_time_ms=now_ms + 1_000 * (5 - at)) for at in range(5)]
    answer = world.request(SendRequest(topic="topic", queue_id=0, records=records))
    assert decode_handle(answer.recall_handle).due_time_ms == now_ms + 5_000, "of the first"
    assert world.deliver(999) == []
    assert world.deliver(1_001) == [b"4", b"3"]
    assert world.deliver(10_001) == [b"4", b"3", b"2", b"1", b"0"]


def test_whole_records_get_their_time_in_place(world: World) -> None:
    template = layout.RecordTemplate("topic", 7, 0)
    records = [template.encode(b"%d" % at, at, 5, due_time_ms=1) for at in range(40)]
    request = SendRequest(topic="topic", queue_id=0, delay_ms=2_000)
    request.record_sizes.extend(map(len, records))
    call = Call(request)
    call.payload = b"".join(map(layout.encode_record_field, records)) + call.payload
    world.service.send([call])  # type: ignore[list-item]
    assert SendResponse.FromString(call.outcome).record_count == 40
    assert world.deliver(2_000) == []
    assert world.deliver(1) == [b"%d" % at for at in range(40)]


def test_what_is_due_in_the_past_is_delivered_at_once(world: World) -> None:
    world.request(
        SendRequest(topic="topic", queue_id=0, records=[Record(body=b"x", due_time_ms=1)])
    )
    world.send(b"y", delay_ms=0)
    assert world.deliver() == [b"x", b"y"]


def test_delays_that_nobody_can_have_are_refused_and_nothing_is_stored(world: World) -> None:
    day_ms = 86_400_000
    before = world.store.appended_position
    assert reason(lambda: world.send(b"x", delay_level=19)) == (
        "ILLEGAL_DELAY",
        {"field": "delay_level", "value": "19", "limit": "18"},
    )
    assert reason(lambda: world.send(b"x", delay_level=0))[0] == "ILLEGAL_DELAY"
    assert reason(lambda: world.send(b"x", delay_ms=40 * day_ms + 1)) == (
        "ILLEGAL_DELAY",
        {"field": "delay_ms", "value": str(40 * day_ms + 1), "limit": str(40 * day_ms)},
    )
    assert reason(lambda: world.send(b"x", delay_ms=-5)) == (
        "ILLEGAL_DELAY",
        {"field": "delay_ms", "value": "-5", "limit": "0"},
    )
    far = Record(body=b"x", due_time_ms=world.clock.now_ms() + 41 * day_ms)
    request = SendRequest(topic="topic", records=[far])
    assert reason(lambda: world.request(request))[1]["field"] == "due_time_ms"
    mixed = SendRequest(
        topic="topic", records=[Record(body=b"x", due_time_ms=1), Record(body=b"y")]
    )
    assert reason(lambda: world.request(mixed))[0] == "INVALID_ARGUMENT"
    assert world.store.appended_position == before
    assert world.store.pending.count == 0
    world.send(b"x", delay_ms=40 * day_ms)
    assert world.deliver(40 * day_ms + 1) == [b"x"]


def test_there_is_a_limit_of_what_waits() -> None:
    world = World(config=BrokerConfig(delayed_count_max=2)).start()
    world.send(b"a", b"b", delay_ms=1_000)
    assert reason(lambda: world.send(b"c", delay_ms=1))[0] == "TOO_MANY"
    world.send(b"now")
    world.deliver(1_001)
    world.send(b"c", delay_ms=1)
    world = World(config=BrokerConfig(delayed_size_max_bytes=100)).start()
    world.send(b"a", delay_ms=1_000)
    assert reason(lambda: world.send(b"c", delay_ms=1))[1]["limit"] == "100"


def test_more_falls_due_at_once_than_a_small_segment_takes(world: World) -> None:
    bodies = [b"%02d" % number + bytes(2_000) for number in range(60)]
    for body in bodies:
        world.send(body, delay_ms=1_000)
    assert sum(map(len, bodies)) > SEGMENT
    assert world.deliver(1_001) == bodies


def test_a_recall_wins_or_loses(world: World) -> None:
    won, lost = (world.send(body, delay_ms=1_000).recall_handle for body in (b"won", b"lost"))
    assert world.recall(won)
    assert not world.recall(won), "it was recalled before"
    assert world.deliver(1_001) == [b"lost"]
    assert not world.recall(lost)
    assert world.restart().deliver(100_001) == [b"lost"]
    assert not world.recall(won)
    assert world.store.pending.count == world.store.pending.size_bytes == 0


def test_a_recall_that_comes_to_another_broker_is_told_which_one_to_ask(world: World) -> None:
    """That one may have another message of this time and id: an id is a producer's, which sends to several."""
    handle = decode_handle(world.send(b"here", delay_ms=1_000).recall_handle)
    other = encode_handle(handle._replace(broker_name="a"))
    assert reason(lambda: world.recall(other)) == ("INVALID_ARGUMENT", {})
    assert world.deliver(1_001) == [b"here"]


def send_many(world: World, count: int, due_ms: int) -> list[str]:
    """The recall handles of so many messages that all fall due at one moment."""
    return [
        world.request(
            SendRequest(topic="topic", queue_id=0, records=[Record(body=b"%d" % number, due_time_ms=due_ms)])
        ).recall_handle
        for number in range(count)
    ]


def test_each_of_many_messages_with_one_due_time_can_be_recalled(world: World) -> None:
    handles = send_many(world, 2 * CANDIDATES_MAX + 100, world.clock.now_ms() + 1_000)
    world.send(b"after", delay_ms=2_000)
    assert world.recall(handles[0])
    assert world.recall_answer(handles[0]).recalled_before, "though more are pending than are looked at"
    assert world.recall(handles[-1])
    assert world.recall(handles[CANDIDATES_MAX])
    assert not world.recall(handles[-1]), "it was recalled before"
    delivered = world.deliver(1_001)
    assert len(delivered) == 2 * CANDIDATES_MAX + 97
    assert not {b"0", b"%d" % CANDIDATES_MAX, b"%d" % (2 * CANDIDATES_MAX + 99)} & set(delivered)


def test_a_recall_that_cannot_look_at_all_messages_of_its_moment_does_not_say_too_late(world: World) -> None:
    handles = send_many(world, CANDIDATES_MAX + 2, world.clock.now_ms() + 10_000_000)
    for _ in range(60):
        world.send(bytes(5_000))
    world.store.checkpoint()
    assert world.store.delete_segments_below(world.store.appended_position) > 0
    said = {"what": "candidates of a recall", "limit": str(CANDIDATES_MAX)}
    assert reason(lambda: world.recall(handles[CANDIDATES_MAX + 1])) == ("TOO_MANY", said)
    assert world.recall(handles[CANDIDATES_MAX - 1]), "they were carried forward"
    assert world.recall(handles[0])
    assert world.recall(handles[CANDIDATES_MAX + 1]), "two were recalled, so it is among the first"
    world.request(
        SendRequest(topic="topic", queue_id=0, records=[
            Record(body=b"later", due_time_ms=decode_handle(handles[0]).due_time_ms) for _ in range(4)
        ])
    )
    assert world.recall_answer(handles[0]).recalled_before, "which needs no search"


def test_a_recall_reads_no_more_than_a_part_of_large_messages_that_fall_due_with_its_own(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sends wait for it, and all that it reads is in memory."""
    monkeypatch.setattr(recalls, "CANDIDATES_SIZE_MAX_BYTES", 100_000)
    due_ms = world.clock.now_ms() + 10_000_000
    sent = [
        world.request(SendRequest(topic="topic", queue_id=0, records=[Record(body=bytes(9_000), due_time_ms=due_ms)]))
        for _ in range(30)
    ]
    read_sizes: list[int] = []
    read_records = world.store.read_records

    def read(positions: Any, sizes: Any) -> Any:
        read_sizes.append(int(sizes.sum()))
        return read_records(positions, sizes)

    monkeypatch.setattr(world.store, "read_records", read)
    first, *_, last = (one.recall_handle for one in sent)
    assert world.recall(first)
    assert world.recall_answer(first).recalled_before
    moved = encode_handle(decode_handle(last)._replace(position=1))
    said = {"what": "bytes of candidates of a recall", "limit": "100000"}
    assert reason(lambda: world.recall(moved)) == ("TOO_MANY", said)
    near = encode_handle(decode_handle(last)._replace(position=sent[-5].physical_offset - 1))
    assert world.recall(near), "it is among the first"
    assert max(read_sizes) <= 100_000


def test_a_recall_that_is_made_again_is_told_that_the_first_one_won(world: World) -> None:
    """Its answer was lost. Between the two may come a checkpoint, a kill, and the loss of the timer's files."""
    early, late, other = (world.send(body, delay_ms=10_000).recall_handle for body in (b"early", b"late", b"other"))
    assert world.recall(early)
    world.store.checkpoint()
    assert world.recall(late)
    world.restart(world.disk.killed())
    assert world.recall_answer(early).recalled_before, "a checkpoint wrote it down"
    assert world.recall_answer(late).recalled_before, "the log says so"
    assert world.deliver(10_001) == [b"other"]
    world.store.close()
    world.disk.remove("/s/timer")
    world.start()
    told = [world.recall_answer(handle).recalled_before for handle in (early, late, other)]
    assert told == [True, True, False], "the log alone tells"


def test_the_repeat_of_a_recall_waits_until_the_first_one_is_stored(world: World) -> None:
    handle = world.send(b"x", delay_ms=10_000).recall_handle
    assert world.recall(handle)
    with mock.patch.object(world.waiting, "wait") as waited:
        request = RecallMessageRequest(topic="topic", recall_handle=handle)
        world.service.recall_message(Call(request))  # type: ignore[arg-type]
    assert waited.call_args.args[1] == world.store.appended_position


def test_a_recall_takes_back_nothing_of_a_topic_that_was_deleted_and_made_again(world: World) -> None:
    old = world.send(b"old", delay_ms=10_000).recall_handle
    world.store.delete_topic("topic")
    world.store.topics.create(TopicConfig("topic", 1, 1))
    new = world.send(b"new", delay_ms=10_000).recall_handle
    for _ in range(2):
        assert not world.recall(old), "it is dropped when it is due"
        assert not world.recall_answer(old).recalled_before
    assert world.recall(new)
    assert world.deliver(10_001) == []


def test_only_the_last_recalls_are_remembered(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recalled, "RECALLED_COUNT_MAX", 3)
    handles = [world.send(b"%d" % at, delay_ms=10_000).recall_handle for at in range(4)]
    assert all(map(world.recall, handles))
    assert [world.recall_answer(handle).recalled_before for handle in handles] == [False, True, True, True]
    assert [world.restart().recall_answer(handle).recalled_before for handle in handles] == [False, True, True, True]


def test_a_recall_of_a_message_that_cannot_be_read_does_not_say_too_late(world: World) -> None:
    sent = [world.send(b"%d" % at, delay_ms=1_000) for at in range(3)]
    world.store.close()
    world.disk.flip_bit(f"/s/commitlog/{0:020d}", (sent[1].physical_offset + 4) * 8)
    store = open_store(world.disk, clock=world.clock, segment=SEGMENT, corruption="quarantine")
    store.close()
    world.store = store
    world.start()
    assert reason(lambda: world.recall(sent[1].recall_handle))[0] == "CORRUPT_LOG"
    assert world.recall(sent[2].recall_handle)
    assert world.deliver(1_001) == [b"0"]


def test_a_recall_between_the_taking_and_the_append_wins(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = [world.send(b"%d" % at, delay_ms=1_000).recall_handle for at in range(3)]
    read_records = world.store.read_records
    recalls = [handles[1]]

    def read_slowly(positions: Any, sizes: Any) -> Any:
        found = read_records(positions, sizes)
        if recalls:
            monkeypatch.setattr(world.store, "read_records", read_records)
            assert world.recall(recalls.pop())
        return found

    monkeypatch.setattr(world.store, "read_records", read_slowly)
    assert world.deliver(1_001) == [b"0", b"2"]


def replaced_once_before(world: World, run: Callable[..., None]) -> Callable[..., None]:
    """`run`, before whose first call the topic is deleted and created again: the copies are prepared by then."""
    done: list[bool] = []

    def run_later(function: Callable[[], None]) -> None:
        if not done:
            done.append(True)
            world.store.delete_topic("topic")
            world.store.topics.create(TopicConfig("topic"))
        run(function)

    return run_later


def test_a_topic_that_is_deleted_between_the_taking_and_the_append_gets_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.send(b"old", delay_ms=1_000)
    writer = world.mover._writer
    monkeypatch.setattr(writer, "run", replaced_once_before(world, writer.run))
    assert world.deliver(1_001) == []
    assert world.store.timer.ended_counts[TimerEnd.TIMER_END_DROPPED] == 1


def test_a_topic_that_is_deleted_while_its_messages_are_carried_gets_none_of_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.send(b"old", delay_ms=10_000_000)
    world.store.topics.create(TopicConfig("filler"))
    for _ in range(60):
        world.send(bytes(5_000), topic="filler")
    world.store.checkpoint()
    monkeypatch.setattr(
        world.store._carried,
        "_on_writer",
        replaced_once_before(world, world.store._on_writer),
    )
    assert world.store.delete_segments_below(world.store.appended_position) > 0
    assert world.deliver(10_000_001) == []
    assert world.store.timer.ended_counts[TimerEnd.TIMER_END_DROPPED] == 1


def test_a_handle_is_compared(world: World) -> None:
    handle = world.send(b"x", delay_ms=1_000).recall_handle
    known = decode_handle(handle)
    assert (known.broker_name, known.due_time_ms) == (BROKER, world.clock.now_ms() + 1_001)
    assert reason(lambda: world.recall("nonsense"))[0] == "INVALID_ARGUMENT"
    assert reason(lambda: world.recall(""))[0] == "INVALID_ARGUMENT"
    assert reason(lambda: world.recall("é" + handle))[0] == "INVALID_ARGUMENT"
    assert reason(lambda: world.recall(handle, "missing"))[0] == "TOPIC_NOT_FOUND"
    world.store.topics.create(TopicConfig("other"))
    assert reason(lambda: world.recall(handle, "other"))[0] == "INVALID_ARGUMENT"
    other = world.send(b"y", delay_ms=1_000)
    assert other.recall_handle != handle
    assert world.recall(handle)


def test_a_repeated_send_gets_its_handle_again_and_is_delivered_once(world: World) -> None:
    template = layout.RecordTemplate("topic", 7, 0)
    request = SendRequest(topic="topic", queue_id=0, delay_ms=1_000)
    request.records.append(Record.FromString(template.encode(b"x", 1, 5)))
    first = world.request(request)
    world.clock.time_ms += 500
    again = world.request(request)
    assert again.repeated_send
    assert again.recall_handle == first.recall_handle
    assert world.deliver(501) == [b"x"]
    assert world.request(request).repeated_send
    assert world.deliver(5_001) == [b"x"]


def test_pending_messages_are_found_neither_by_queue_nor_by_id(world: World) -> None:
    sent = world.send(b"x", delay_ms=1_000)
    identity = layout.decode_message_id(sent.message_id)
    assert list(world.store.find_by_message_id("topic", identity)) == []
    assert world.store.queue_range("topic", 0) == (0, 0)
    world.deliver(1_001)
    (found,) = world.store.find_by_message_id("topic", identity)
    assert Record.FromString(found).body == b"x"


@pytest.mark.parametrize(("write_queues", "read_queues"), [(4, 8), (4, 4)])
@pytest.mark.parametrize("restarts", [False, True])
def test_what_falls_due_goes_to_queues_that_the_topic_still_has(
    world: World, write_queues: int, read_queues: int, restarts: bool
) -> None:
    """A topic that shrinks in two steps: what waited for a queue that goes can be read, at either step, and is delivered once."""
    topics = world.store.topics
    topics.put([TopicConfig("topic", 8, 8)])
    handles = [world.send(b"%d" % queue_id, queue_id=queue_id, delay_ms=5_000).recall_handle for queue_id in range(8)]
    for change in ((4, 8), (write_queues, read_queues)):
        topics.put([TopicConfig("topic", *change)])
    if restarts:
        world.restart()
    assert world.recall(handles[6])
    world.deliver(5_001)
    found = [[body for _, body in read_all(world.store, "topic", queue_id)] for queue_id in range(8)]
    assert found == [[b"0", b"4"], [b"1", b"5"], [b"2"], [b"3", b"7"], [], [], [], []]
    world.store.flush()
    assert verify("/s", disk=world.disk) == []
    world.restart(world.disk.killed())
    assert world.deliver(100_000) == [b"0", b"4"]
    assert world.store.pending.count == 0
    assert not world.recall(handles[7])


def test_what_waits_while_its_topic_shrinks_and_grows_again_goes_where_it_was_sent(world: World) -> None:
    topics = world.store.topics
    topics.put([TopicConfig("topic", 8, 8)])
    world.send(b"x", queue_id=7, delay_ms=5_000)
    for change in ((4, 8), (4, 4), (8, 8)):
        topics.put([TopicConfig("topic", *change)])
    world.deliver(5_001)
    assert [body for _, body in read_all(world.store, "topic", 7)] == [b"x"]


def test_a_topic_that_shrinks_while_a_batch_is_on_its_way_strands_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.store.topics.put([TopicConfig("topic", 8, 8)])
    world.send(b"x", queue_id=7, delay_ms=5_000)
    run = world.mover._writer.run

    def run_late(function: Callable[[], None]) -> None:
        for change in ((4, 8), (4, 4)):
            world.store.topics.put([TopicConfig("topic", *change)])
        run(function)

    monkeypatch.setattr(world.mover._writer, "run", run_late)
    world.deliver(5_001)
    assert [body for _, body in read_all(world.store, "topic", 3)] == [b"x"]


def test_messages_of_a_deleted_topic_are_dropped(world: World) -> None:
    world.send(b"old", delay_ms=1_000)
    world.store.delete_topic("topic")
    world.store.topics.create(TopicConfig("topic"))
    world.send(b"new", delay_ms=1_000)
    assert world.deliver(1_001) == [b"new"]
    assert world.store.pending.count == 0
    assert world.store.timer.ended_counts[TimerEnd.TIMER_END_DROPPED] == 1


def test_a_topic_of_which_only_delayed_messages_tell_comes_back(world: World) -> None:
    world.send(b"x", delay_ms=1_000)
    world.store.close()
    world.disk.remove("/s/config/topics.json")
    world.store = open_store(world.disk, clock=world.clock, segment=SEGMENT)
    world.store.close()
    world.start()
    assert world.deliver(1_001) == [b"x"]


def test_what_is_pending_outlives_its_segment(world: World) -> None:
    handles = [
        world.send(b"%d" % at, delay_ms=10_000_000 + at % 2).recall_handle for at in range(10)
    ]
    assert world.recall(handles[3])
    for _ in range(60):
        world.send(bytes(5_000))
    world.store.checkpoint()
    first = world.store.delete_segments_below(world.store.appended_position)
    assert first > 0
    assert world.store.pending.count == 9
    assert world.recall(handles[5]), "by its due time and id: it stands elsewhere now"
    assert world.recall_answer(handles[5]).recalled_before
    assert not world.recall(handles[3])
    world.restart()
    world.disk.remove("/s/timer")  # the log alone tells
    world.restart()
    delivered = world.deliver(10_000_002)
    assert [body for body in delivered if len(body) == 1] == [
        b"0",
        b"2",
        b"4",
        b"6",
        b"8",
        b"1",
        b"7",
        b"9",
    ]


def test_a_damaged_record_is_not_delivered_and_holds_up_nothing() -> None:
    world = World().start()
    positions = [world.send(b"%d" % at, delay_ms=1_000).physical_offset for at in range(3)]
    world.store.close()
    segment = f"/s/commitlog/{0:020d}"
    world.disk.flip_bit(segment, (positions[1] + 4) * 8)
    world.store = None  # type: ignore[assignment]
    store = open_store(world.disk, clock=world.clock, segment=SEGMENT, corruption="quarantine")
    store.close()
    world.store = store
    world.start()
    assert sorted(world.deliver(1_001)) == [b"0", b"2"]
    assert world.deliver(1_001) == world.delivered()


def test_what_had_ended_before_its_record_was_damaged_hides_nothing_that_waits(world: World) -> None:
    """A start finds the record that says of its delivery, and not the message: it counted as one that is pending no more."""
    sent = [world.send(b"%d" % at, delay_ms=1_000) for at in range(2)]
    assert world.deliver(1_001) == [b"0", b"1"]
    late = world.send(b"late", delay_ms=100_000)
    world.store.flush()
    world.send(b"behind", topic="filler")
    world.store.flush()
    disk = world.disk.killed()
    disk.flip_bit(f"/s/commitlog/{0:020d}", (sent[0].physical_offset + 4) * 8)
    store = open_store(disk, clock=world.clock, segment=SEGMENT, corruption="quarantine")
    assert (len(store.damaged_ranges), len(store.pending.due(1 << 62, 10))) == (1, 1)
    store.close()
    world.restart(disk)
    size_bytes = int(world.store.pending.due(1 << 62, 10)["size"][0])
    assert (world.store.pending.count, world.store.pending.size_bytes) == (1, size_bytes)
    assert b"late" in world.deliver(100_001)
    assert world.store.pending.count == world.store.pending.size_bytes == 0
    assert not world.recall(late.recall_handle)


def test_a_checkpoint_holds_where_the_record_of_what_had_ended_is_damaged(world: World) -> None:
    sent = world.send(b"x", delay_ms=1_000)
    world.send(b"between", topic="filler")
    assert world.deliver(1_001) == [b"x"]
    world.store.flush()
    world.send(b"behind", topic="filler")
    world.store.flush()
    disk = world.disk.killed()
    disk.flip_bit(f"/s/commitlog/{0:020d}", (sent.physical_offset + 4) * 8)
    store = open_store(disk, clock=world.clock, segment=SEGMENT, corruption="quarantine")
    store.checkpoint()
    assert store.pending.count == store.pending.size_bytes == 0
    store.close()


def test_a_recall_of_what_a_start_could_not_read_does_not_say_that_none_is_pending(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = world.send(b"x", delay_ms=100_000)
    for _ in range(2):
        world.send(b"behind", topic="filler")
        world.store.flush()
    disk = world.disk.killed()
    bit = (sent.physical_offset + 4) * 8
    disk.flip_bit(f"/s/commitlog/{0:020d}", bit)
    monkeypatch.setattr(delay_world, "open_store", partial(open_store, corruption="quarantine"))
    world.restart(disk)
    assert world.store.pending.count == 0
    with pytest.raises(ServiceError) as caught:
        world.recall(sent.recall_handle)
    assert caught.value.reason == "CORRUPT_LOG"
    disk.flip_bit(f"/s/commitlog/{0:020d}", bit)  # healed
    world.restart()
    assert world.recall(sent.recall_handle)
    assert world.deliver(200_000) == []


def test_a_recall_of_what_was_carried_to_where_a_start_could_not_read_does_not_say_that_none_is_pending(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = world.send(b"x", delay_ms=10_000_000)
    for _ in range(60):
        world.send(bytes(5_000), topic="filler")
    world.store.checkpoint()
    assert world.store.delete_segments_below(world.store.appended_position) > 0
    (position,) = world.store.pending.due(1 << 62, 10)["position"].tolist()
    for _ in range(2):
        world.send(b"behind", topic="filler")
        world.store.flush()
    disk = world.disk.killed()
    disk.remove("/s/timer")
    begin, at = divmod(position, SEGMENT)
    damaged = f"/s/commitlog/{begin * SEGMENT:020d}", (at + 4) * 8
    disk.flip_bit(*damaged)
    monkeypatch.setattr(delay_world, "open_store", partial(open_store, corruption="quarantine"))
    world.restart(disk)
    assert world.store.pending.count == 0
    with pytest.raises(ServiceError) as caught:
        world.recall(sent.recall_handle)
    assert caught.value.reason == "CORRUPT_LOG"
    disk.flip_bit(*damaged)  # healed
    world.restart()
    assert world.recall(sent.recall_handle)


def _damaged_while_open(world: World, *sent: SendResponse) -> bytes:
    """The mover is to be the first who reads these messages. Returns the log as a replica has it."""
    world.store.flush()
    end = world.store.appended_position
    world.restart()
    log = log_of(world.disk, 0, end, SEGMENT)
    for answer in sent:
        world.disk.flip_bit(f"/s/commitlog/{answer.physical_offset // SEGMENT * SEGMENT:020d}", (answer.physical_offset % SEGMENT + 30) * 8)
    return log


def _heal(world: World, log: bytes, damage: DamagedRange) -> None:
    world.store.heal_log(damage, log[damage.start_position : damage.end_position])


def test_what_falls_due_in_a_damaged_part_is_delivered_once_it_is_healed(world: World) -> None:
    sent = [world.send(b"%d" % at, delay_ms=1_000) for at in range(6)]
    log = _damaged_while_open(world, sent[1], sent[4])
    assert world.deliver(1_001) == [b"0", b"2", b"3", b"5"]
    assert (world.store.pending.count, world.mover.unreadable_count) == (2, 2)
    first, second = world.store.damaged_ranges
    _heal(world, log, second)
    assert world.deliver() == [b"0", b"2", b"3", b"5", b"4"]
    assert world.mover.unreadable_count == 2, "the other one is not read again"
    _heal(world, log, first)
    assert world.deliver() == [b"0", b"2", b"3", b"5", b"4", b"1"]
    assert world.store.pending.count == world.store.pending.size_bytes == 0
    assert sorted(world.restart().deliver(10_000)) == [b"%d" % at for at in range(6)]


def test_what_is_healed_while_it_is_set_aside_is_looked_at_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    log = _damaged_while_open(world, world.send(b"x", delay_ms=1_000))
    set_aside = world.store.pending.set_aside

    def heal_first(rows: Any) -> None:
        _heal(world, log, *world.store.damaged_ranges)
        set_aside(rows)

    monkeypatch.setattr(world.store.pending, "set_aside", heal_first)
    assert world.deliver(1_001) == [b"x"]


def test_what_was_set_aside_may_be_recalled_when_it_is_healed(world: World) -> None:
    sent = [world.send(b"%d" % at, delay_ms=1_000) for at in range(2)]
    log = _damaged_while_open(world, *sent)
    assert world.deliver(1_001) == []
    for damage in world.store.damaged_ranges:
        _heal(world, log, damage)
    assert world.recall(sent[0].recall_handle)
    assert world.deliver() == [b"1"]
    assert world.store.pending.count == 0


def test_what_was_set_aside_waits_no_more_when_its_segment_goes(world: World) -> None:
    _damaged_while_open(world, world.send(b"x", delay_ms=1_000))
    assert world.deliver(1_001) == []
    for _ in range(60):
        world.send(bytes(5_000), topic="filler")
    world.store.checkpoint()
    assert world.store.pending.count == 1
    assert world.store.delete_segments_below(world.store.appended_position) > SEGMENT
    assert world.deliver() == []
    assert world.store.pending.count == world.store.pending.size_bytes == 0


def test_what_a_repair_has_taken_out_waits_no_more(world: World, caplog: pytest.LogCaptureFixture) -> None:
    sent = [world.send(b"%d" % at, delay_ms=1_000) for at in range(3)]
    _damaged_while_open(world, sent[1])
    assert world.deliver(1_001) == [b"0", b"2"]
    world.store.close()
    repair("/s", "/kept", disk=world.disk)
    world.restart()
    assert world.store.pending.count == 1
    for _ in range(3):
        with mock.patch.object(world.store, "append_moved", side_effect=DiskFullError), pytest.raises(DiskFullError):
            world.mover.deliver()
    assert "are lost" not in caplog.text
    assert world.deliver() == [b"0", b"2"]
    assert world.store.pending.count == world.store.pending.size_bytes == 0
    assert caplog.text.count("1 delayed messages are lost: `protomq log repair` has taken them out") == 1
    assert world.restart().store.pending.count == 0


def test_a_clock_that_is_set_ahead_delivers_nothing_early(world: World) -> None:
    world.send(b"x", delay_ms=60_000)
    world.clock.wall_offset_ms = 3_600_000
    assert world.deliver(50_001) == []
    assert world.log_time.offset_ms > 3_000_000
    assert world.deliver(10_001) == [b"x"]
    world.clock.wall_offset_ms = -3_600_000
    world.send(b"y", delay_ms=1_000)
    assert world.deliver(2_001) == [b"x", b"y"]


def test_log_time_does_not_go_back_over_a_restart(world: World) -> None:
    world.send(b"x", delay_ms=1_000)
    world.deliver(1_001)
    delivered_ms = world.log_time.now_ms()
    world.clock.wall_offset_ms = -86_400_000
    assert world.restart().log_time.now_ms() >= delivered_ms


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_restart_does_not_believe_a_clock_that_is_set_ahead(world: World, is_killed: bool) -> None:
    world.send(b"x", delay_ms=60_000)
    world.clock.time_ms += 10_000
    world.log_time.save()
    world.clock.wall_offset_ms = 3_600_000
    world.clock.time_ms += 20_000  # no broker runs
    world.restart(world.disk.killed() if is_killed else None)
    assert world.deliver(25_001) == []
    assert world.deliver(6_001) == [b"x"]


def test_another_boot_believes_the_wall_clock(world: World) -> None:
    world.send(b"x", delay_ms=60_000)
    world.boot_id = "boot-2"
    world.clock.wall_offset_ms = 60_001  # the boot time of the new boot says nothing
    assert world.restart().deliver() == [b"x"]


def test_a_damaged_note_of_log_time_is_not_believed(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.store.close()
    world.disk.flip_bit("/s/config/logTime", 8 * 50)
    world.clock.wall_offset_ms = 5_000
    with caplog.at_level("INFO", logger="protomq.broker"):
        world.start()
    assert world.log_time.offset_ms == 0
    assert "/s/config/logTime does not hold" in caplog.text


def test_records_that_do_not_parse_change_nothing(world: World) -> None:
    world.send(b"x", delay_ms=1_000)
    uneven = TimerRecord(positions=[1], due_times_ms=[], sizes=[1]).SerializeToString()
    for body in (b"\xff", uneven, b""):
        world.store.append_state(TIMER_TOPIC, [body])
    assert world.deliver(1_001) == [b"x"]


def work(world: World, sent: dict[bytes, str]) -> None:
    """A bit of everything. `sent`: bodies that were answered -> what must become of them."""
    for at in range(6):
        body = b"%d" % at
        handle = world.send(body, delay_ms=1_000 * at).recall_handle
        sent[body] = "delivered"
        if at in (2, 4):
            sent[body] = "either"
            assert world.recall(handle)
            sent[body] = "recalled"
        if at == 3:
            world.deliver(2_001)
            world.store.flush()
            world.store.checkpoint()
    world.deliver(1_500)
    world.store.flush()
    world.store.checkpoint()
    world.deliver(5_001)
    world.store.flush()


@pytest.mark.parametrize("ends", ["kill", "power cut"])
def test_whatever_ends_it_each_message_is_delivered_once_or_recalled(ends: str) -> None:
    """At each operation in turn. A power cut may take back what was not synced, whole appends from the end."""
    for number in range(1, 400):
        world = World().start()
        world.store.flush()
        world.disk.fail_at(number, Fault.CRASH)
        sent: dict[bytes, str] = {}
        try:
            work(world, sent)
        except SimulatedCrash:
            ended = False
        else:
            ended = True
        if ends == "kill":
            world.restart(world.disk.killed())
        else:
            world.restart(world.disk.crash(random.Random(number)))
        delivered = world.deliver(100_001)
        assert len(delivered) == len(set(delivered)), "delivered twice"
        assert world.store.pending.count == world.store.pending.size_bytes == 0
        if ends == "kill":
            for body, fate in sent.items():
                assert fate == "either" or (body in delivered) == (fate == "delivered"), (
                    number,
                    body,
                )
        world.store.close()
        assert verify("/s", disk=world.disk) == []
        if ended:
            return
    raise AssertionError("the work never came to its end")


@pytest.mark.parametrize("count", [3, 60])
def test_a_message_in_which_a_bit_flips_while_it_waits_is_not_delivered_and_holds_up_nothing(count: int) -> None:
    world = World().start()
    bodies = [b"later-%02d" % at for at in range(count)]
    positions = [world.send(body, delay_ms=1_000).physical_offset for body in bodies]
    flip_in_log(world.disk, world.store, positions[1])
    assert sorted(world.deliver(1_001)) == [bodies[0], *bodies[2:]]
    (damage,) = world.store.damaged_ranges
    assert damage.start_position <= positions[1] < damage.end_position
    assert world.mover.unreadable_count == 1


def test_a_trailer_in_which_a_bit_flips_holds_up_nothing(world: World) -> None:
    positions = [world.send(b"later-%d" % at, delay_ms=1_000).physical_offset for at in range(3)]
    record = world.store.record_at(positions[1])
    assert record is not None
    flip_in_log(world.disk, world.store, positions[1], at=3 + len(record) - layout.STAMP_SIZE_BYTES)
    assert sorted(world.deliver(1_001)) == [b"later-0", b"later-2"]


@pytest.mark.parametrize("count", [3, 60])
def test_a_message_that_came_damaged_is_delivered_as_it_came(world: World, count: int) -> None:
    template = layout.RecordTemplate("topic", 7, 0)
    records = [template.encode(b"later-%02d" % at, at, 5) for at in range(count)]
    records[1] = records[1].replace(b"later", b"l8ter")
    request = SendRequest(topic="topic", queue_id=0, delay_ms=2_000)
    request.record_sizes.extend(map(len, records))
    call = Call(request)
    call.payload = b"".join(map(layout.encode_record_field, records)) + call.payload
    world.service.send([call])  # type: ignore[list-item]
    assert SendResponse.FromString(call.outcome).record_count == count
    delivered = world.deliver(2_001)
    assert (len(delivered), delivered[:2]) == (count, [b"later-00", b"l8ter-01"])
    assert world.store.damaged_ranges == []


@pytest.mark.parametrize("is_healed", [False, True])
def test_what_is_pending_is_not_carried_forward_with_a_flipped_bit(
    world: World, caplog: pytest.LogCaptureFixture, is_healed: bool
) -> None:
    positions = [world.send(b"later-%d" % at, delay_ms=10_000_000).physical_offset for at in range(3)]
    for _ in range(60):
        world.send(bytes(5_000))
    world.store.checkpoint()
    flip_in_log(world.disk, world.store, positions[1])
    with pytest.raises(StoreError, match="they stay until the next try"):
        world.store.delete_segments_below(world.store.appended_position)
    assert (world.store.min_position, world.store.pending.count) == (0, 3)
    (damage,) = world.store.damaged_ranges
    if is_healed:
        flip_in_log(world.disk, world.store, positions[1])
        world.store._quarantine.replace(damage, [])
    for _ in range(3):
        with mock.patch.object(world.store, "flush", return_value=0), pytest.raises(StoreError, match="could not be synced"):
            world.store.delete_segments_below(world.store.appended_position)
    assert "are lost" not in caplog.text
    for _ in range(3):  # What is lost is pending until it is due: the next passes come upon it again.
        assert world.store.delete_segments_below(world.store.appended_position) > positions[2]
        for _ in range(60):
            world.send(bytes(5_000))
        world.store.checkpoint()
    assert caplog.text.count("1 delayed messages are damaged, and are lost with their segment") == int(not is_healed)
    bodies = [b"later-0", b"later-1", b"later-2"] if is_healed else [b"later-0", b"later-2"]
    assert [body for body in world.deliver(10_000_001) if len(body) < 10] == bodies
