from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protomq.testing.simdisk import SimDisk
from protomq_broker.store.repeated_sends import (
    IDLE_MAX_MS,
    ProducerFencedError,
    RepeatedSend,
    RepeatedSends,
    SendInFlightError,
    SequenceExpiredError,
)
from tests.unit.protomq_broker.store.derived_helpers import ListLog, Send

FOLDER = "/s/repeatedsends"
P = 7


def make_sends(log: ListLog, disk: SimDisk | None = None, **limits: int) -> RepeatedSends:
    sends = RepeatedSends(disk or SimDisk(), FOLDER, end_offset_of=log.next_offset, **limits)
    return sends


def store(table: RepeatedSends, log: ListLog, *sends: Send) -> None:
    for send in sends:
        assert admit(table, send) is None
    table.apply(log.append(*sends))


def admit(table: RepeatedSends, send: Send) -> RepeatedSend | None:
    return table.admit(
        send.producer_id, send.producer_epoch, send.first_sequence, send.records, topic=send.topic
    )


def send(
    first: int,
    records: int = 1,
    *,
    queue_id: int = 0,
    epoch: int = 0,
    producer_id: int = P,
    topic: str = "topic",
) -> Send:
    return Send(topic, queue_id, records, producer_id, epoch, first)


def test_a_new_send_is_new_and_a_repeated_one_is_known():
    log = ListLog()
    table = make_sends(log)
    store(table, log, send(0, 10), send(10, 5, queue_id=3), send(15))
    assert admit(table, send(0, 10)) == RepeatedSend("topic", 0, 0)
    assert admit(table, send(10, 5)) == RepeatedSend("topic", 3, 0)
    assert admit(table, send(15)) == RepeatedSend("topic", 0, 10)
    assert admit(table, send(12, 2)) == RepeatedSend("topic", 3, 2)
    assert admit(table, send(16)) is None


def test_a_producer_that_stays_in_one_queue_has_one_run():
    log = ListLog()
    table = make_sends(log)
    for first in range(0, 1000, 10):
        store(table, log, send(first, 10))
    assert not table._producers[P].firsts
    assert admit(table, send(730, 10)) == RepeatedSend("topic", 0, 730)


def test_another_producer_in_between_ends_a_run():
    log = ListLog()
    table = make_sends(log)
    store(table, log, send(0, 5))
    store(table, log, send(0, 3, producer_id=8))
    store(table, log, send(5, 5))
    assert admit(table, send(5, 5)) == RepeatedSend("topic", 0, 8)
    assert admit(table, send(0, 3, producer_id=8)) == RepeatedSend("topic", 0, 5)


def test_sequences_may_come_in_any_order():
    log = ListLog()
    table = make_sends(log)
    firsts = list(range(0, 300, 3))
    random.Random(4).shuffle(firsts)
    for first in firsts:
        store(table, log, send(first, 3))
    for index, first in enumerate(firsts):
        assert admit(table, send(first, 3)) == RepeatedSend("topic", 0, 3 * index)


def test_sends_without_a_producer_are_never_known():
    log = ListLog()
    table = make_sends(log)
    for _ in range(2):
        store(table, log, send(0, 5, producer_id=0))
    assert table.producer_count() == 0


def test_a_lower_epoch_is_fenced_and_a_higher_one_begins_anew():
    log = ListLog()
    table = make_sends(log)
    store(table, log, send(0, 5, epoch=3))
    with pytest.raises(ProducerFencedError):
        admit(table, send(5, epoch=2))
    store(table, log, send(0, 5, epoch=4))
    assert admit(table, send(0, 5, epoch=4)) == RepeatedSend("topic", 0, 5)
    with pytest.raises(ProducerFencedError):
        admit(table, send(0, 5, epoch=3))


@pytest.mark.parametrize(("first", "count"), [(8, 5), (15, 10), (5, 20), (9, 2), (0, 30)])
def test_a_send_of_which_only_a_part_is_known_is_refused(first: int, count: int):
    log = ListLog()
    table = make_sends(log)
    store(table, log, send(10, 10))
    with pytest.raises(SequenceExpiredError, match="some of them"):
        admit(table, send(first, count))


def test_a_send_put_together_from_two_sends_is_refused():
    log = ListLog()
    table = make_sends(log)
    store(table, log, send(0, 10), send(10, 10, queue_id=1))
    with pytest.raises(SequenceExpiredError, match="some of them"):
        admit(table, send(5, 10))


def test_the_same_send_twice_in_a_group_is_in_flight():
    log = ListLog()
    table = make_sends(log)
    assert admit(table, send(0, 5)) is None
    assert admit(table, send(5, 5)) is None
    assert admit(table, send(20, 5)) is None
    for first, count in ((0, 5), (5, 5), (22, 1), (3, 4), (18, 3)):
        with pytest.raises(SendInFlightError):
            admit(table, send(first, count))
    assert admit(table, send(12, 5)) is None
    table.apply(log.append(send(0, 5), send(5, 5), send(20, 5), send(12, 5)))
    assert admit(table, send(12, 5)) == RepeatedSend("topic", 0, 15)
    assert admit(table, send(17, 3)) is None


def test_epochs_are_kept_apart_within_a_group():
    table = make_sends(ListLog())
    assert admit(table, send(0, 5)) is None
    assert admit(table, send(0, 5, epoch=1)) is None
    with pytest.raises(ProducerFencedError):
        admit(table, send(5, 5))


def test_a_group_that_could_not_be_stored_leaves_nothing():
    table = make_sends(ListLog())
    assert admit(table, send(0, 5)) is None
    table.drop_claims()
    assert admit(table, send(0, 5)) is None


def test_an_unknown_sequence_below_the_floor_is_refused():
    log = ListLog()
    table = make_sends(log, runs_per_producer_max=8)
    for first in range(0, 40, 2):  # gaps: every send is a run of its own
        store(table, log, send(first))
    floor = table._producers[P].floor
    assert floor > 0
    with pytest.raises(SequenceExpiredError, match="forgotten"):
        admit(table, send(0))
    with pytest.raises(SequenceExpiredError, match="forgotten"):
        admit(table, send(floor - 1))
    assert admit(table, send(floor)) is None
    table.drop_claims()
    assert admit(table, send(38)) == RepeatedSend("topic", 0, 19)
    assert len(table._producers[P].firsts) <= 8
    assert table._older_run_count == len(table._producers[P].firsts)


def test_the_producer_used_least_recently_is_forgotten_first():
    log = ListLog()
    table = make_sends(log, producers_max=3)
    for producer_id in (1, 2, 3):
        store(table, log, send(0, producer_id=producer_id))
    store(table, log, send(1, producer_id=1))
    store(table, log, send(0, producer_id=4))
    assert set(table._producers) == {3, 1, 4}


def test_all_producers_together_have_a_limit():
    log = ListLog()
    table = make_sends(log, runs_max=64, runs_per_producer_max=1000)
    for first in range(0, 100, 2):
        store(table, log, send(first, producer_id=1))
    for first in range(0, 400, 2):
        store(table, log, send(first, producer_id=2))
    assert table._older_run_count <= 64
    assert table._older_run_count == sum(
        len(producer.firsts) for producer in table._producers.values()
    )
    assert admit(table, send(398, producer_id=2)) is not None


def test_producers_that_rest_for_a_day_are_forgotten():
    log = ListLog()
    table = make_sends(log)
    table.expire(1_000)
    store(table, log, send(0, producer_id=1))
    table.expire(2_000)
    store(table, log, send(0, producer_id=2))
    table.expire(1_000 + IDLE_MAX_MS)
    assert set(table._producers) == {2}


def test_what_was_stored_in_a_topic_that_is_gone_is_neither_known_nor_new():
    log = ListLog()
    table = make_sends(log)
    store(table, log, send(0, 5), send(5, 5, topic="other"))
    table.remove_topic("topic")
    with pytest.raises(SequenceExpiredError, match="deleted"):
        admit(table, send(0, 5))
    assert admit(table, send(5, 5, topic="other")) == RepeatedSend("other", 0, 0)
    log.restart("topic")
    store(table, log, send(10, 5))
    assert admit(table, send(10, 5)) == RepeatedSend("topic", 0, 0)


def test_a_sequence_used_for_another_topic_is_refused():
    log = ListLog()
    table = make_sends(log)
    store(table, log, send(0, 5))
    with pytest.raises(SequenceExpiredError, match="used for topic"):
        admit(table, send(0, 5, topic="other"))


def test_sequences_at_the_end_of_their_range_do_no_harm():
    log = ListLog()
    table = make_sends(log)
    last = (1 << 64) - 1
    store(table, log, send(last, producer_id=last, epoch=(1 << 32) - 1))
    store(table, log, send((1 << 63) - 5, 5), send(3))
    assert admit(table, send((1 << 63) - 5, 5)) == RepeatedSend("topic", 0, 1)
    table.checkpoint(log.end)


def test_the_snapshot_brings_everything_back():
    disk, log = SimDisk(), ListLog()
    table = make_sends(log, disk, runs_per_producer_max=8)
    for first in range(0, 60, 2):
        store(
            table,
            log,
            send(first, queue_id=first % 3),
            send(first, producer_id=9, topic="other", epoch=first),
        )
    table.remove_topic("other")
    table.checkpoint(log.end)
    again = make_sends(log, disk, runs_per_producer_max=8)
    again.load()
    assert again.replay_from == log.end
    assert again._producers[P].floor == table._producers[P].floor
    assert again._producers[P].older_runs().tolist() == table._producers[P].older_runs().tolist()
    assert admit(again, send(58)) == admit(table, send(58))
    with pytest.raises(ProducerFencedError):
        admit(again, send(0, producer_id=9, epoch=1))
    store(again, log, send(1000), send(1002))


@pytest.mark.parametrize("bit", [0, 70, 300, 900])
def test_a_damaged_snapshot_is_no_snapshot(bit: int):
    disk, log = SimDisk(), ListLog()
    table = make_sends(log, disk)
    store(table, log, send(0, 5), send(5, 5, queue_id=1))
    table.checkpoint(log.end)
    disk.flip_bit(f"{FOLDER}/table.bin", bit)
    again = make_sends(log, disk)
    again.load()
    assert (again.replay_from, again.producer_count()) == (0, 0)
    again.replay(log.scanned())
    assert admit(again, send(5, 5)) == RepeatedSend("topic", 1, 0)


def test_what_the_log_has_lost_is_new_again():
    disk, log = SimDisk(), ListLog()
    table = make_sends(log, disk)
    store(table, log, send(0, 5))
    position = log.end
    store(table, log, send(5, 5), send(10, 5, queue_id=1))
    table.checkpoint(position)  # the snapshot holds more than is durable
    log.cut(position)
    again = make_sends(log, disk)
    again.load()
    again.truncate(log.end)
    assert admit(again, send(0, 5)) == RepeatedSend("topic", 0, 0)
    assert admit(again, send(5, 5)) is None
    assert admit(again, send(10, 5)) is None


def test_a_cut_while_running_forgets_what_is_cut():
    disk, log = SimDisk(), ListLog()
    table = make_sends(log, disk)
    store(table, log, send(0, 5))
    position = log.end
    store(table, log, send(5, 5), send(20, 1), send(10, 5, queue_id=1))
    table.checkpoint(log.end)
    log.cut(position)
    table.truncate(position)
    assert admit(table, send(5, 5)) is None
    table.drop_claims()
    store(table, log, send(100, 9, producer_id=3))  # takes the offsets that were cut
    again = make_sends(log, disk)
    again.load()
    again.replay(log.scanned(position))
    again.truncate(log.end)
    assert admit(again, send(5, 5)) is None
    assert admit(again, send(0, 5)) == RepeatedSend("topic", 0, 0)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(5, 60))
def test_after_any_history_what_is_stored_is_known_and_nothing_else(seed: int, steps: int):
    rng = random.Random(seed)
    disk, log = SimDisk(), ListLog()
    table = make_sends(log, disk)
    durable = 0
    for _ in range(steps):
        action = rng.choice(["append"] * 8 + ["repeat"] * 4 + ["checkpoint", "power cut", "cut"])
        stored = {(r.producer_id, r.sequence): r for r in log.records}
        if action == "append":
            sends: list[Send] = []
            for _ in range(rng.randint(1, 4)):
                producer_id, first, count = (
                    rng.choice([1, 2]),
                    rng.randrange(0, 120),
                    rng.randint(1, 6),
                )
                if any((producer_id, s) in stored for s in range(first, first + count)):
                    continue
                taken = {
                    (s.producer_id, s.first_sequence + index)
                    for s in sends
                    for index in range(s.records)
                }
                if taken & {(producer_id, s) for s in range(first, first + count)}:
                    continue
                sends.append(send(first, count, queue_id=rng.randrange(2), producer_id=producer_id))
            if sends:
                store(table, log, *sends)
        elif action == "repeat":
            first, count = rng.randrange(0, 125), rng.randint(1, 6)
            known = [stored[1, s] for s in range(first, first + count) if (1, s) in stored]
            if len(known) == count and all(
                r.queue_id == known[0].queue_id and r.queue_offset == known[0].queue_offset + i
                for i, r in enumerate(known)
            ):
                expected = RepeatedSend("topic", known[0].queue_id, known[0].queue_offset)
                assert admit(table, send(first, count, producer_id=1)) == expected
            elif known:
                with pytest.raises(SequenceExpiredError):
                    admit(table, send(first, count, producer_id=1))
            else:
                assert admit(table, send(first, count, producer_id=1)) is None
                table.drop_claims()
        elif action == "checkpoint":
            durable = rng.choice([b for b in log.boundaries if b >= durable])
            table.checkpoint(durable)
        elif action == "cut":
            end = rng.choice(log.boundaries)
            durable = min(durable, end)
            log.cut(end)
            table.truncate(end)
        else:
            disk = disk.crash(rng)
            log.cut(rng.choice([b for b in log.boundaries if b >= durable]))
            table = load_with_queues_as_of(durable, log, disk)
            assert table.replay_from <= durable
            table.replay(log.scanned(table.replay_from))
            table.truncate(log.end)


def load_with_queues_as_of(position: int, log: ListLog, disk: SimDisk) -> RepeatedSends:
    """Loads when the consume queues know what lies below `position` only: they follow the log first."""

    def end_offset_of(topic: str, queue_id: int) -> int:
        return sum(r.position < position for r in log.of_queue(topic, queue_id))

    table = RepeatedSends(disk, FOLDER, end_offset_of=end_offset_of)
    table.load()
    table._end_offset_of = log.next_offset
    return table
