"""A log whose front is deleted tells all states: an empty follower and a start without caches know what the leader knows."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from protomq.v1.state_pb2 import GroupsRecord, HandOut, PopRecord, TimerEnd
from protomq.wire.record import FLAG_KIND_HALF, RecordTemplate, encode_front, encode_record_field
from protomq.wire.runs import runs_of
from protomq.wire.topics import (
    GROUPS_TOPIC,
    LOCKS_TOPIC,
    POP_TOPIC,
    TIMER_TOPIC,
    TRANSACTIONS_TOPIC,
)
from protomq_broker.store.log.append import AppendRequest
from protomq_broker.store.log.record_region import prove_region, set_kind
from protomq_broker.store.state.group_settings import GroupSettings
from protomq_broker.store.state.locks import LockKey, LockOwner, locks_record
from protomq_broker.store.state.popped_queue import QueueOfGroup
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.state.transactions import Ending, checked_record, ended_record
from protomq_broker.store.store import Store
from protomq_broker.store.timer.carrying import copies_of
from protomq_broker.store.timer.timer import timer_record
from protomq_broker.store.tools.verify import verify
from protomq_broker.testing.simdisk import SimDisk
from tests.support.lost_files import lose_all_but_log

from .log_helpers import ManualClock, make_request
from .store_helpers import commit, committed, open_store
from .test_following import disk_of, log_of

SEGMENT = 16 << 10
TOPICS = ("orders", "payments", "passing")
GROUPS = ("g", "h")


class Life:
    """A leader to which everything happens that leaves a state."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.store = open_store(SimDisk(), clock=self.clock, segment=SEGMENT)
        self.sequence = 0
        self.ends: list[int] = []

    def step(self) -> None:
        actions: tuple[Callable[[], None], ...] = (
            self.send, self.send, self.send_late, self.send_late, self.send_half, self.end_timers, self.end_timers, self.recall,
            self.end_transactions, self.check_transactions, self.pop, self.acknowledge, self.commit, self.set_group,
            self.send_back, self.replay, self.lock, self.delete_topic,
        )  # fmt: skip
        for topic in TOPICS:
            if self.store.topics.find(topic) is None:
                self.store.topics.create(TopicConfig(topic))
                self.ends.append(self.store.appended_position)
        self.rng.choice(actions)()
        self.ends.append(self.store.appended_position)
        self.clock.time_ms += self.rng.randrange(200)

    def _request(self, *, due_ms: int | None = None, is_half: bool = False) -> AppendRequest:
        topic = self.rng.choice(TOPICS)
        template = RecordTemplate(topic, 77, 0)
        body = b"%d " % self.sequence * self.rng.choice((1, 9, 80))
        record = template.encode(body, self.sequence, 5, front=encode_front(()), due_time_ms=due_ms)
        self.sequence += 1
        region = prove_region(bytearray(encode_record_field(record)), topic, [len(record)])
        assert region is not None
        if is_half:
            set_kind(region, FLAG_KIND_HALF)
        return AppendRequest(region, self.rng.randrange(2))

    def send(self) -> None:
        self.store.append([self._request() for _ in range(self.rng.randint(1, 4))])

    def send_late(self) -> None:
        now_ms = self.clock.time_ms
        self.store.append([self._request(due_ms=now_ms + self.rng.randrange(20_000)) for _ in range(self.rng.randint(1, 4))])

    def send_half(self) -> None:
        self.store.append([self._request(is_half=True) for _ in range(2)])

    def end_timers(self) -> None:
        store = self.store
        rows = store.pending.due(self.clock.time_ms, 5)
        if not len(rows):
            return
        copies = copies_of(rows, store.read_records, store.has_topic_of, keeps_due_times=False)
        ends = ((copies.rows, TimerEnd.TIMER_END_DELIVERED), (copies.dropped, TimerEnd.TIMER_END_DROPPED))
        bodies = [timer_record(part, end, self.clock.time_ms) for part, end in ends if len(part)]
        store.append_moved(copies.requests, [(TIMER_TOPIC, bodies)])

    def recall(self) -> None:
        rows = [row for part in self.store.pending.below(1 << 62) for row in part]
        if rows:
            row = np.array([self.rng.choice(rows)])
            body = timer_record(row, TimerEnd.TIMER_END_RECALLED, self.clock.time_ms, (77, 0, self.rng.randrange(1 << 40)))
            self.store.append_state(TIMER_TOPIC, [body])

    def _some_open(self) -> list[Any]:
        known = [one.half.key for one in self.store.transactions.open_transactions()]
        return self.rng.sample(known, min(len(known), 2))

    def end_transactions(self) -> None:
        if keys := self._some_open():
            endings = bytes(self.rng.choice(tuple(Ending)) for _ in keys)
            self.store.append_state(TRANSACTIONS_TOPIC, [ended_record(keys, endings)])

    def check_transactions(self) -> None:
        if keys := self._some_open():
            self.store.append_state(TRANSACTIONS_TOPIC, [checked_record(keys, self.clock.time_ms)])

    def _popped(self) -> tuple[PopRecord, Any, Any]:
        """A record, what it is to tell of a queue, and what is known of that."""
        group, name, queue_id = self.rng.choice(GROUPS), self.rng.choice(TOPICS), self.rng.randrange(2)
        topic = self.store.topics.find(name)
        assert topic is not None
        record = PopRecord(time_ms=self.clock.time_ms)
        told = record.queues.add(
            consumer_group=group, topic=name, topic_incarnation=topic.incarnation, queue_id=queue_id
        )
        return record, told, self.store.popped.find(QueueOfGroup(group, name, queue_id), topic.incarnation)

    def pop(self) -> None:
        record, told, known = self._popped()
        first, end = self.store.queue_range(told.topic, told.queue_id)
        first = max(first, known.next_offset if known is not None else 0)
        if first == end:
            return
        number = known.hand_out_count + 1 if known is not None else 1
        told.next_offset = end
        now_ms = self.clock.time_ms
        told.hand_outs.append(
            HandOut(number=number, time_ms=now_ms, deadline_ms=now_ms + 500, attempt=1, runs=[first, end - first])
        )
        self.store.append_state(POP_TOPIC, [record.SerializeToString()])

    def acknowledge(self) -> None:
        record, told, known = self._popped()
        if known is None or not known.open:
            return
        some = self.rng.sample(sorted(known.open), self.rng.randint(1, len(known.open)))
        which = self.rng.choice((told.acked_runs, told.acked_runs, told.dead_runs, told.waiting_runs))
        which.extend(runs_of(sorted(some)))
        self.store.append_state(POP_TOPIC, [record.SerializeToString()])

    def commit(self) -> None:
        name = self.rng.choice(TOPICS)
        end = self.store.appended_end_offset(name, 0)
        commit(self.store, self.rng.choice(GROUPS), name, 0, self.rng.randint(0, end))

    def set_group(self) -> None:
        group = self.rng.choice(GROUPS)
        if self.rng.random() < 0.3:
            self.store.append_state(GROUPS_TOPIC, [GroupsRecord(deleted_groups=[group]).SerializeToString()])
        else:
            self.store.groups.put(GroupSettings(group, retry_count_max=self.rng.randrange(5)))

    def send_back(self) -> None:
        record = GroupsRecord(sent_back=[self.rng.randrange(1, 1 << 60)], sent_back_times_ms=[self.clock.time_ms])
        self.store.append_state(GROUPS_TOPIC, [record.SerializeToString()])

    def replay(self) -> None:
        record, first = GroupsRecord(), self.rng.randrange(50)
        record.replayed.add(consumer_group=self.rng.choice(GROUPS), topic_incarnation=3, runs=[first, first + 2])
        self.store.append_state(GROUPS_TOPIC, [record.SerializeToString()])

    def lock(self) -> None:
        topic = self.store.topics.find(self.rng.choice(TOPICS))
        assert topic is not None
        key = LockKey(self.rng.choice(GROUPS), topic.name, topic.incarnation, self.rng.randrange(2))
        owner = LockOwner(self.rng.randrange(1, 99), "a", 1) if self.rng.random() < 0.7 else None
        body = locks_record([(key, owner)])
        if body:
            self.store.append_state(LOCKS_TOPIC, [body])

    def delete_topic(self) -> None:
        if self.rng.random() < 0.3:
            self.store.delete_topic("passing")

    def retain(self) -> None:
        """What retention does, up to somewhere."""
        self.store.checkpoint()
        self.store.delete_segments_below(self.rng.randrange(self.store.appended_position + 1))
        self.ends.append(self.store.appended_position)


def states(store: Store) -> dict[str, Any]:
    """All that is derived from the log, but for what is documented to be forgotten with its front."""
    pending = store.pending
    rows = [row for part in pending.below(1 << 62) for row in part.tolist()]
    topics = sorted(store.topics.all(), key=lambda topic: topic.name)
    incarnations = {(topic.name, topic.incarnation) for topic in topics}  # others are forgotten sooner or later
    known = store.transactions.known()
    return {
        "timer": sorted(rows),
        "timer's count": (pending.count, len(rows)),
        "timer's octets": pending.size_bytes,
        "log time": pending.log_time_ms,
        "transactions": sorted(known.open),
        "transactions' octets": store.transactions.size_bytes,
        "topics": topics,
        "queues": {(t.name, q): store.queue_range(t.name, q) for t in topics for q in range(3)},
        "offsets": {(g, t.name): committed(store, g, t.name, 0) for g in GROUPS for t in topics},
        "groups": sorted(store.groups.all(), key=lambda group: group.group),
        "sent back": [(key, request.time_ms) for key, request in store.groups._sent_back.all()],
        "replayed": {group: [n for n in range(60) if n in store.groups.replayed(group, 3)] for group in GROUPS},
        "locks": sorted(store.locks.all().items()),
        "pops": {each.key: str(each.statement()) for each in store.popped.queues() if (each.key.topic, each.incarnation) in incarnations},
        "pop time": store.popped.time_ms,
    }  # fmt: skip


def differences(store: Store, leader: Store) -> dict[str, tuple[Any, Any]]:
    ours, theirs = states(store), states(leader)
    return {name: (mine, theirs[name]) for name, mine in ours.items() if mine != theirs[name]}


def late_follower(life: Life) -> Store:
    """A store that was empty, and got in parts all that the leader has; it makes checkpoints, and starts anew at times."""
    leader, rng = life.store, life.rng
    follower = open_store(SimDisk(), clock=life.clock, segment=SEGMENT, follows=True)
    start = leader.min_position
    while start < leader.appended_position:
        end = rng.choice([end for end in life.ends if start < end][:40])
        follower.append_verbatim(start, log_of(disk_of(leader), start, end, SEGMENT))
        follower.positions.note_replicated(end)
        start = end
        if rng.random() < 0.5:
            follower.checkpoint()
        if rng.random() < 0.3:
            disk = disk_of(follower)
            follower.flush()
            follower = open_store(disk.killed(), clock=life.clock, segment=SEGMENT, follows=True)
            start = follower.appended_position
    follower.positions.note_replicated(leader.readable_position)
    return follower


@pytest.mark.parametrize("seed", range(8))
def test_an_empty_follower_and_a_start_without_caches_know_what_the_leader_knows(seed: int) -> None:
    life = Life(seed)
    for _ in range(4):
        for _ in range(60):
            life.step()
        life.retain()
        leader = life.store
        follower = late_follower(life)
        assert differences(follower, leader) == {}
        follower.checkpoint()
        follower.close()
        assert verify("/s", disk=disk_of(follower)) == []
        leader.flush()
        bare = disk_of(leader).killed()
        lose_all_but_log(bare)
        assert differences(open_store(bare, clock=life.clock, segment=SEGMENT), leader) == {}
        # It goes on as what it is by its caches, or by its log alone.
        if life.rng.random() < 0.5:
            life.store = open_store(disk_of(leader).killed(), clock=life.clock, segment=SEGMENT)
            life.ends.append(life.store.appended_position)
    assert life.store.min_position > 0


def test_an_empty_follower_does_not_count_timers_whose_messages_are_deleted() -> None:
    life = Life(1)
    store = life.store
    store.topics.create(TopicConfig("orders"))
    store.topics.create(TopicConfig("payments"))
    store.topics.create(TopicConfig("passing"))
    first = store.appended_position
    life.send_late()
    while store.appended_position < SEGMENT + 100:
        store.append([make_request([b"x" * 500], topic="orders")])
    life.clock.time_ms += 60_000
    life.end_timers()
    store.checkpoint()
    store.delete_segments_below(2 * SEGMENT)
    assert store.min_position > first
    follower = open_store(SimDisk(), clock=life.clock, segment=SEGMENT, follows=True)
    start = store.min_position
    follower.append_verbatim(start, log_of(disk_of(store), start, store.appended_position, SEGMENT))
    assert follower.pending.count == store.pending.count == 0
    assert follower.pending.size_bytes == 0
    follower.checkpoint()
    follower.close()
