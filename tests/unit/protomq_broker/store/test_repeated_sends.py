from __future__ import annotations

import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protomq_broker.store.state import producer_table
from protomq_broker.store.state.producer_runs import run_count
from protomq_broker.store.state.producer_table import ProducerTable
from protomq_broker.store.state.repeated_sends import RepeatedSends
from protomq_broker.store.state.send_errors import (
    RETRY_MAX_MS,
    ProducerFencedError,
    ProducerIdTakenError,
    RepeatedSend,
    SendInFlightError,
    SendOutOfOrderError,
    SequenceExpiredError,
    TooManyProducersError,
)
from protomq_broker.store.state.sent_runs import IDLE_MAX_MS, IDLE_STEP_MS, SWEEP_STEP_MS
from protomq_broker.testing.simdisk import SimDisk
from tests.support.examples import examples
from tests.unit.protomq_broker.store.derived_helpers import ListLog, Send, table_content

FOLDER = "/s/repeatedsends"
P = 7


def make_sends(log: ListLog, disk: SimDisk | None = None, **limits: int) -> RepeatedSends:
    sends = RepeatedSends(disk or SimDisk(), FOLDER, end_offset_of=log.next_offset, **limits)
    return sends


def store(table: RepeatedSends, log: ListLog, *sends: Send) -> None:
    for send in sends:
        assert admit(table, send, now_ms=log.time_ms) is None
    table.apply(log.append(*sends))


def admit(
    table: RepeatedSends, send: Send, previous: int | None = None, *, now_ms: int = 0
) -> RepeatedSend | None:
    return table.admit(
        send.producer_id,
        send.producer_epoch,
        send.first_sequence,
        send.records,
        topic=send.topic,
        previous_sequence=previous,
        now_ms=lambda: now_ms,
    )


def knows(table: RepeatedSends, producer_id: int) -> bool:
    return table._table.find(producer_id) >= 0


def older_runs(table: RepeatedSends, producer_id: int = P) -> int:
    runs = table._table.older.get(table._table.find(producer_id))
    return 0 if runs is None else run_count(runs)


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
    assert older_runs(table) == 0
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
    assert table._table.count == 0


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
    floor = table._runs.floor(table._table.find(P))
    assert floor > 0
    with pytest.raises(SequenceExpiredError, match="forgotten"):
        admit(table, send(0))
    with pytest.raises(SequenceExpiredError, match="forgotten"):
        admit(table, send(floor - 1))
    assert admit(table, send(floor)) is None
    table.drop_claims()
    assert admit(table, send(38)) == RepeatedSend("topic", 0, 19)
    assert older_runs(table) <= 8
    assert table._table.older_count == older_runs(table)


def test_all_producers_together_have_a_limit():
    log = ListLog()
    table = make_sends(log, runs_max=64, runs_per_producer_max=1000)
    for first in range(0, 100, 2):
        store(table, log, send(first, producer_id=1))
    for first in range(0, 400, 2):
        store(table, log, send(first, producer_id=2))
    assert table._table.older_count <= 64
    assert table._table.older_count == older_runs(table, 1) + older_runs(table, 2)
    assert admit(table, send(398, producer_id=2)) is not None


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
    for first, count in ((0, 5), (1, 2), (3, 5)):
        with pytest.raises(ProducerIdTakenError, match="used for topic"):
            admit(table, send(first, count, topic="other"))


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
    assert table_content(again) == table_content(table)
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
    assert (again.replay_from, again._table.count) == (0, 0)
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


# What a producer names as sent before.


def test_a_previous_sequence_that_is_stored_lets_a_send_pass():
    log = ListLog()
    table = make_sends(log)
    store(table, log, send(0, 5), send(5, 5, queue_id=1), send(10, 5))
    for previous in (14, 7, 0, 4):
        assert admit(table, send(100), previous) is None
        table.drop_claims()


def test_a_producer_that_is_not_known_must_not_name_one():
    log = ListLog()
    table = make_sends(log)
    with pytest.raises(SequenceExpiredError, match="not known"):
        admit(table, send(5), 4)
    store(table, log, send(0, 5))
    with pytest.raises(SequenceExpiredError, match="not known"):
        admit(table, send(5, epoch=1), 4)
    assert admit(table, send(5, epoch=1)) is None


def test_a_send_that_is_stored_is_answered_whatever_it_names():
    log = ListLog()
    table = make_sends(log)
    store(table, log, send(10, 5))
    assert admit(table, send(10, 5), 9) == RepeatedSend("topic", 0, 0)


def test_behind_a_send_that_is_not_stored_none_passes():
    log = ListLog()
    table = make_sends(log)
    store(table, log, send(0, 5))
    with pytest.raises(SendOutOfOrderError):  # 5 to 9 was refused
        admit(table, send(10, 5), 9)
    with pytest.raises(SendOutOfOrderError):
        admit(table, send(15, 5), 14)
    store(table, log, send(5, 5))
    assert admit(table, send(10, 5), 9) is None
    assert admit(table, send(15, 5), 14) is None  # one of the same group


def test_the_one_before_may_be_in_the_group_of_a_first_contact():
    log = ListLog()
    table = make_sends(log)
    assert admit(table, send(0, 5)) is None
    assert admit(table, send(5, 5), 4) is None
    with pytest.raises(SendOutOfOrderError):
        admit(table, send(20, 5), 19)
    table.drop_claims()  # the group was refused
    with pytest.raises(SequenceExpiredError):
        admit(table, send(5, 5), 4)


def test_a_previous_sequence_below_the_floor_is_believed():
    log = ListLog()
    table = make_sends(log, runs_per_producer_max=8)
    for first in range(0, 40, 2):
        store(table, log, send(first))
    assert admit(table, send(50), 1) is None
    with pytest.raises(SendOutOfOrderError):
        admit(table, send(60), 37)


# Whom it forgets, and when.


def test_nobody_who_has_sent_within_15_minutes_is_forgotten():
    log = ListLog(time_ms=10**9)
    table = make_sends(log, producers_max=10)
    for producer_id in range(1, 11):
        store(table, log, send(0, producer_id=producer_id))
        log.time_ms += 10_000
    for minutes in (1, 5, 12):
        log.time_ms = 10**9 + minutes * 60_000
        with pytest.raises(TooManyProducersError):
            admit(table, send(0, producer_id=99), now_ms=log.time_ms)
        assert admit(table, send(0, producer_id=1)) == RepeatedSend("topic", 0, 0)
        table.drop_claims()
    store(table, log, send(1, producer_id=1))  # who is known may go on


def test_in_a_full_table_all_who_rest_for_15_minutes_are_forgotten_together():
    log = ListLog(time_ms=10**9)
    table = make_sends(log, producers_max=10)
    for producer_id in range(1, 11):
        store(table, log, send(0, producer_id=producer_id))
        log.time_ms += 10_000
    store(table, log, send(1, producer_id=2))
    log.time_ms = 10**9 + RETRY_MAX_MS + 45_000
    store(table, log, send(0, producer_id=99))
    assert [p for p in range(1, 11) if knows(table, p)] == [2, 6, 7, 8, 9, 10]
    with pytest.raises(SequenceExpiredError):
        admit(table, send(1, producer_id=1), 0)
    assert knows(table, 99)


def test_in_a_group_no_more_new_ones_are_taken_than_there_is_room_for():
    log = ListLog(time_ms=10**9)
    table = make_sends(log, producers_max=4)
    store(table, log, send(0, producer_id=1), send(0, producer_id=2))
    log.time_ms += RETRY_MAX_MS + SWEEP_STEP_MS
    store(table, log, send(0, producer_id=3), send(0, producer_id=4))
    sends = [send(0, producer_id=5), send(0, producer_id=6), send(0, producer_id=7)]
    for one in sends[:2]:
        assert admit(table, one, now_ms=log.time_ms) is None
    with pytest.raises(TooManyProducersError):
        admit(table, sends[2], now_ms=log.time_ms)
    table.apply(log.append(*sends[:2]))
    assert table._table.count == 4


def test_more_than_the_limit_of_producers_and_a_repeat_is_still_known():
    log = ListLog(time_ms=10**9)
    table = make_sends(log, producers_max=100)
    store(table, log, send(0, 5))
    refused = 0
    for producer_id in range(1_000, 1_200):
        try:
            store(table, log, send(0, producer_id=producer_id))
        except TooManyProducersError:
            refused += 1
    assert refused == 101
    assert admit(table, send(0, 5)) == RepeatedSend("topic", 0, 0)


def test_a_producer_that_rests_for_a_day_of_the_log_is_forgotten():
    log = ListLog(time_ms=100 * IDLE_STEP_MS)
    table = make_sends(log)
    store(table, log, send(0, producer_id=1))
    log.time_ms += IDLE_MAX_MS
    store(table, log, send(0, producer_id=2))
    assert not knows(table, 1)
    assert knows(table, 2)
    with pytest.raises(SequenceExpiredError):
        admit(table, send(0, producer_id=1), 0)


def test_while_nothing_is_stored_nobody_is_forgotten():
    log = ListLog(time_ms=10**9)
    table = make_sends(log)
    store(table, log, send(0))
    assert admit(table, send(0), now_ms=10**9 + 10 * IDLE_MAX_MS) == RepeatedSend("topic", 0, 0)


def test_older_runs_of_those_who_rest_go_first():
    log = ListLog(time_ms=10**9)
    table = make_sends(log, runs_max=10, runs_per_producer_max=1000)
    for first in range(0, 20, 2):
        store(table, log, send(first, producer_id=1))
    log.time_ms += RETRY_MAX_MS + SWEEP_STEP_MS
    for first in range(0, 10, 2):
        store(table, log, send(first, producer_id=2))
    assert older_runs(table, 2) == 4
    with pytest.raises(SequenceExpiredError, match="forgotten"):
        admit(table, send(4, producer_id=1))
    assert admit(table, send(18, producer_id=1)) == RepeatedSend("topic", 0, 9)
    store(table, log, send(20, producer_id=1))
    assert table_content(table)[1][1] == 18


def test_a_forgotten_producer_may_come_back():
    log = ListLog(time_ms=10**9)
    table = make_sends(log, producers_max=2)
    store(table, log, send(0, producer_id=1), send(7, producer_id=2))
    log.time_ms += RETRY_MAX_MS + SWEEP_STEP_MS
    store(table, log, send(0, producer_id=3))
    store(table, log, send(9, producer_id=2))
    assert set(table_content(table)) == {2, 3}
    assert admit(table, send(9, producer_id=2)) == RepeatedSend("topic", 0, 3)
    assert admit(table, send(7, producer_id=2)) is None  # 15 minutes have passed


def test_a_table_made_from_a_log_whose_beginning_is_gone_takes_nothing_old_for_new():
    disk, log = SimDisk(), ListLog()
    table = make_sends(log, disk)
    store(table, log, send(0, 5))
    position = log.end
    store(table, log, send(5, 5))
    again = make_sends(log, disk)
    again.load(position)
    again.replay(log.scanned(position))
    again.truncate(log.end)
    with pytest.raises(SequenceExpiredError):
        admit(again, send(0, 5))
    assert admit(again, send(5, 5)) == RepeatedSend("topic", 0, 5)
    assert admit(again, send(0, 5, producer_id=8)) is None


def test_a_snapshot_is_of_the_moment_at_which_it_was_begun(monkeypatch: pytest.MonkeyPatch):
    disk, log = SimDisk(), ListLog(time_ms=10**9)
    monkeypatch.setattr(producer_table, "SNAPSHOT_STEP", 8)
    table = make_sends(log, disk, runs_per_producer_max=8)
    for producer_id in range(1, 60):
        store(table, log, send(0, producer_id=producer_id))
    for first in range(2, 20, 2):
        store(table, log, send(first, producer_id=5), send(first, producer_id=50))
    before = table_content(table)
    table._lock = threading.RLock()  # type: ignore[assignment]  # the writer's turn comes between two steps, on this thread
    table.freeze()
    position = log.end
    real_take = ProducerTable.take

    def take(self: ProducerTable) -> object:
        log.time_ms += 1_000
        for producer_id in (5, 6, 30, 50, 9_000 + log.time_ms):
            store(table, log, send(log.time_ms, producer_id=producer_id))
        if log.time_ms > 10**9 + 2_000:
            log.time_ms += 2 * IDLE_MAX_MS
            store(table, log, send(log.time_ms, producer_id=8))
        return real_take(self)

    monkeypatch.setattr(ProducerTable, "take", take)
    table.checkpoint(position)
    again = make_sends(log, disk, runs_per_producer_max=8)
    again.load()
    assert table_content(again) == before
    again.replay(log.scanned(position))
    assert table_content(again) == table_content(table)


def test_a_snapshot_knows_nothing_of_what_a_leader_tells_after_it_was_begun():
    """A power cut may take the record that tells it, and then nothing of it is in the log."""
    leaders = ListLog(time_ms=10**9)
    leader = make_sends(leaders)
    store(leader, leaders, send(0, topic="gone"), send(0, producer_id=8))
    store(leader, leaders, send(1, topic="gone"), send(1, producer_id=8, queue_id=3))
    leader.remove_topic("gone")
    disk, log = SimDisk(), ListLog(time_ms=10**9)
    table = make_sends(log, disk)
    store(table, log, send(0), send(0, producer_id=8))
    before = table_content(table)
    table.freeze()
    table.take_told(leader.told_of([P, 8]), log.end + 1_000, lambda topic: False)
    assert table_content(table) != before
    table.checkpoint(log.end)
    again = make_sends(log, disk)
    again.load()
    assert table_content(again) == before
    assert admit(again, send(0)) == RepeatedSend("topic", 0, 0)
    assert admit(again, send(1, producer_id=8)) is None


@pytest.mark.slow
@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 1 << 32), st.integers(20, 120))
def test_the_same_log_makes_the_same_table(seed: int, steps: int):
    """Live, from the log alone, and from a snapshot taken anywhere with what the log has behind it."""
    rng = random.Random(seed)
    disk, log = SimDisk(), ListLog(time_ms=10**9)
    limits = {"producers_max": 6, "runs_per_producer_max": 5, "runs_max": 12}
    table = make_sends(log, disk, **limits)
    sequences = dict.fromkeys(range(1, 12), 0)
    epochs = dict.fromkeys(sequences, 0)
    for _ in range(steps):
        action = rng.choice(["append"] * 9 + ["rest", "snapshot"])
        if action == "append":
            sends: list[Send] = []
            for _ in range(rng.randint(1, 3)):
                producer_id = rng.choice(list(sequences))
                epochs[producer_id] += rng.random() < 0.03
                first = sequences[producer_id] + rng.choice((0, 0, 0, 3))
                count = rng.randint(1, 3)
                one = send(
                    first,
                    count,
                    queue_id=rng.randrange(2),
                    producer_id=producer_id,
                    epoch=epochs[producer_id],
                )
                try:
                    assert admit(table, one, now_ms=log.time_ms) is None
                except TooManyProducersError:
                    continue
                sequences[producer_id] = first + count
                sends.append(one)
            log.time_ms += rng.choice((0, 1, 400, 60_000))
            if sends:
                table.apply(log.append(*sends))
            table.drop_claims()
        elif action == "rest":
            log.time_ms += rng.choice((RETRY_MAX_MS // 2, RETRY_MAX_MS, IDLE_STEP_MS, IDLE_MAX_MS))
        else:
            table.checkpoint(log.end)
    expected = table_content(table)
    from_snapshot = make_sends(log, disk, **limits)
    from_snapshot.load()
    from_log = make_sends(log, SimDisk(), **limits)
    for other in (from_snapshot, from_log):
        start = other.replay_from
        while start < log.end:  # in blocks, as a recovery reads it
            end = rng.choice([b for b in log.boundaries if b > start])
            other.replay(log.scanned(start, end))
            start = end
        other.truncate(log.end)
        assert table_content(other) == expected


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
            table = make_sends(log, disk)
            table.load()
            assert table.replay_from <= durable
            table.replay(log.scanned(table.replay_from))
            table.truncate(log.end)
            durable = log.end  # a start syncs what it finds


def test_who_is_refused_for_want_of_room_costs_no_look_at_all_the_others(
    monkeypatch: pytest.MonkeyPatch,
):
    log = ListLog(time_ms=10**9)
    table = make_sends(log, producers_max=2)
    store(table, log, send(0, producer_id=1), send(0, producer_id=2))
    looks: list[int] = []

    def look(self: ProducerTable, time_ms: int) -> int:
        looks.append(time_ms)
        return 0

    monkeypatch.setattr(ProducerTable, "count_used_until", look)
    for later_ms in (0, 1, 10, 999, 1_000, 1_500):
        with pytest.raises(TooManyProducersError):
            admit(table, send(0, producer_id=9), now_ms=10**9 + later_ms)
        table.drop_claims()
    assert len(looks) == 2


def test_in_a_group_what_is_stored_behind_a_gap_is_recognised_though_the_group_fills_the_gap():
    log = ListLog()
    table = make_sends(log)
    store(table, log, send(0, 10), send(20, 10))
    assert admit(table, send(10, 5)) is None
    assert admit(table, send(15, 5)) is None
    found = admit(table, send(20, 10))
    assert found is not None
    assert found.queue_offset == 10
    assert admit(table, send(30, 5)) is None, "behind all that is known"
    assert admit(table, send(35, 5)) is None
    with pytest.raises(SendInFlightError):
        admit(table, send(35, 5))
    with pytest.raises(SendInFlightError):
        admit(table, send(15, 5))
