"""The table of repeated sends of a whole store: live, after a start, and made from the log alone."""

from __future__ import annotations

import random

import pytest

from protomq_broker.store.state.send_errors import SequenceExpiredError
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_broker.testing.simdisk import SimDisk

from .derived_helpers import table_content
from .log_helpers import ManualClock, make_request
from .store_helpers import open_store

MINUTE_MS = 60_000


def work(store: Store, clock: ManualClock, rng: random.Random, sequences: dict[int, int]) -> None:
    """Sends of several producers to two topics, with rests; now and then the one topic is deleted."""
    for _ in range(30):
        group = []
        for producer_id in rng.sample(list(sequences), 2):
            request = make_request(
                [b"x"] * rng.randint(1, 3),
                topic=rng.choice(("kept", "gone")),
                queue_id=rng.randrange(2),
                producer_id=producer_id,
                sequence=sequences[producer_id],
            )
            sequences[producer_id] += request.region.count + rng.choice((0, 0, 2))
            assert store.find_repeated(request) is None
            group.append(request)
        store.append(group)
        for request in group:
            if store.topics.find(request.region.topic) is None:
                store.topics.create(TopicConfig(request.region.topic))
        clock.time_ms += rng.choice((0, 1, MINUTE_MS, 20 * MINUTE_MS, 3 * 60 * MINUTE_MS))
        if rng.random() < 0.1 and store.topics.find("gone") is not None:
            store.delete_topic("gone")
        if rng.random() < 0.1:
            store.checkpoint()


def content(store: Store) -> dict[int, tuple[object, ...]]:
    """What the table knows; of messages in a deleted topic, that they were sent."""
    found: dict[int, tuple[object, ...]] = {}
    for producer_id, (epoch, floor, used_ms, runs) in table_content(store._repeated).items():
        kept: list[tuple[int, int, object, int]] = []
        for first, end, queue, offset in runs:
            if queue is None and kept and kept[-1][1:3] == (first, None):
                kept[-1] = (kept[-1][0], end, None, 0)
            else:
                kept.append((first, end, queue, 0 if queue is None else offset))
        found[producer_id] = epoch, floor, used_ms, kept
    return found


def test_it_is_the_same_live_after_a_start_and_from_the_log_alone():
    for seed in range(12):
        rng = random.Random(seed)
        disk, clock = SimDisk(), ManualClock()
        sequences = dict.fromkeys(range(1, 9), 0)
        store = open_store(disk, clock=clock, segment=1 << 16)
        work(store, clock, rng, sequences)
        store = open_store(disk := disk.killed(), clock=clock, segment=1 << 16)
        work(store, clock, rng, sequences)
        expected = content(store)
        started = open_store(disk.killed(), clock=clock, segment=1 << 16)
        assert content(started) == expected
        bare = disk.killed()
        bare.remove("/s/repeatedsends")
        from_log = open_store(bare, clock=clock, segment=1 << 16)
        assert content(from_log) == expected


def test_a_repeat_into_a_topic_that_was_made_anew_is_not_taken_for_what_stands_there_now():
    disk, clock = SimDisk(), ManualClock()
    store = open_store(disk, clock=clock, segment=1 << 16)
    store.topics.create(TopicConfig("topic"))
    sent = make_request([b"old"], producer_id=5, sequence=0)
    assert store.find_repeated(sent) is None
    store.append([sent])
    store.checkpoint()
    store.delete_topic("topic")
    store.topics.create(TopicConfig("topic"))
    other = make_request([b"new"], producer_id=6, sequence=0)
    assert store.find_repeated(other) is None
    store.append([other])
    for now in (store, open_store(disk.killed(), clock=clock, segment=1 << 16)):
        with pytest.raises(SequenceExpiredError):
            now.find_repeated(make_request([b"old"], producer_id=5, sequence=0))
