"""Two stores, one follows the other: crashes of both at any I/O, fail-overs, truncations, judged by their bytes and their answers.

    C4   no fail-over leaves a committed offset behind the end of its queue
    D6   what the follower has is the leader's, octet by octet
    R6   nothing that both had flushed is ever taken back, and nothing that a store has flushed goes with its power
    R7   a follower that has everything gives its leader's answers: messages, look-ups, offsets, topics, repeats, timers, transactions
    D4   a start after a crash succeeds, and what a store follows never makes it refuse one

Files are judged by invariant D besides. The world plays the two brokers: who leads, what is fetched, where the logs agree.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, Final

from protomq.v1.record_pb2 import Record, RecordBatch
from protomq.v1.state_pb2 import OffsetsRecord, TimerEnd
from protomq.wire.hashing import key_hash_of
from protomq.wire.record import (
    SEAL_SIZE_BYTES,
    RecordTemplate,
    encode_front,
    encode_record_field,
)
from protomq.wire.topics import OFFSETS_TOPIC, TIMER_TOPIC, TRANSACTIONS_TOPIC
from protomq_broker.store.config import StoreConfig
from protomq_broker.store.errors import CorruptLogError, ForeignBytesError, StoreError
from protomq_broker.store.log.agreement import START, LogPoint, last_agreed
from protomq_broker.store.log.append import AppendRequest
from protomq_broker.store.log.record_region import prove_region, set_kind
from protomq_broker.store.queues.reading import ReadStatus
from protomq_broker.store.state.send_errors import SequenceExpiredError
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.state.transactions import Ending, ended_record
from protomq_broker.store.store import Store
from protomq_broker.store.timer.timer import timer_record
from protomq_broker.store.tools.verify import verify
from protomq_broker.testing.simdisk import Fault, SimDisk, SimulatedCrash
from tests.support.moves import move_record

from .checker import Violation, check_store_files
from .store_world import WorldClock

SEGMENT_SIZE_BYTES: Final = 4096
TOPICS: Final = ("orders", "payments", "passing")
PRODUCER_ID: Final = 77
HALF: Final = 1 << 8
CACHES: Final = (
    "consumequeue",
    "index",
    "repeatedsends",
    "timer",
    "transactions",
    "boundaries",
    "checkpoint",
)


class _Node:
    """A store, and what is known of it for sure when it is gone."""

    def __init__(self, world: FollowWorld, name: str) -> None:
        self.world = world
        self.name = name
        self.disk = SimDisk()
        self.store: Store | None = None
        self.began_late = False

    @property
    def open_store(self) -> Store:
        assert self.store is not None
        return self.store

    def start(self, *, follows: bool) -> None:
        """Opens it; D4."""
        config = StoreConfig(
            segment_size_bytes=SEGMENT_SIZE_BYTES,
            sync_flush=self.world.sync_flush,
            disk_delete_ratio=1.0,
            disk_force_ratio=1.0,
            disk_refuse_ratio=1.0,
        )
        try:
            self.store = Store.open(
                "/s", config, clock=self.world.clock, disk=self.disk, background=False, follows=follows
            )  # fmt: skip
        except CorruptLogError as error:
            self.world.say("D4", f"{self.name} refuses to start: {error}")
            raise _Judged from error

    def go_down(self, kind: str) -> None:
        """A kill, a power cut, or a clean stop."""
        store, self.store = self.store, None
        self.disk.plan = None
        flushed = store.flushed_position if store is not None else 0
        if kind == "close" and store is not None:
            store.close()
        elif kind == "power":
            self.disk = self.disk.crash(self.world.rng)
        else:
            self.disk = self.disk.killed()
        self.flushed = flushed

    def came_back(self, *, truncated_to: int | None = None) -> None:
        """R6: what it had flushed is there."""
        expected = self.flushed if truncated_to is None else min(self.flushed, truncated_to)
        if self.open_store.appended_position < expected:
            self.world.say(
                "R6", f"{self.name} had flushed {expected}, and has {self.open_store.appended_position}"
            )  # fmt: skip

    def files(self) -> dict[str, bytes]:
        return {path.removeprefix("/s/"): data for path, data in self.disk.files("/s").items()}

    def log(self, start: int, end: int) -> bytes:
        """The bytes [start, end) of its log."""
        files = self.disk.files("/s/commitlog")
        parts = []
        for base in range(start - start % SEGMENT_SIZE_BYTES, end, SEGMENT_SIZE_BYTES):
            data = files[f"/s/commitlog/{base:020d}"]
            parts.append(data[max(start - base, 0) : end - base])
        return b"".join(parts)


class _Judged(Exception):
    """The verdict is there: the world cannot go on."""


class FollowWorld:
    """See the module's docstring."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"follow {seed}")
        self.sync_flush = bool(seed % 2)
        self.clock = WorldClock()
        self.found: list[Violation] = []
        self.sequence = 0
        self.ends: list[int] = []
        self.confirmed: LogPoint = START
        self.leader, self.follower = _Node(self, "a"), _Node(self, "b")
        self.leader.start(follows=False)
        self.follower.start(follows=True)
        self._make_topics()

    def say(self, invariant: str, message: str) -> None:
        self.found.append(Violation(invariant, message))

    # What clients and the leader do.

    def _note_end(self) -> None:
        self.ends.append(self.leader.open_store.appended_position)

    def _make_topics(self) -> None:
        """Those that a power cut took come again."""
        for topic in TOPICS[:2]:
            self.leader.open_store.topics.create(TopicConfig(topic))
        self._note_end()

    def _request(self, topic: str, count: int, kind: str) -> AppendRequest:
        due_ms = self.clock.now_ms() + self.rng.randrange(1, 9_000) if kind == "due" else None
        template = RecordTemplate(topic, PRODUCER_ID, 0)
        records = []
        for _ in range(count):
            key = f"k{self.sequence % 20}"
            body = b"%d " % self.sequence * self.rng.choice((1, 9, 40))
            records.append(
                template.encode(body, self.sequence, 5, key=key, front=encode_front([key]), due_time_ms=due_ms)
            )  # fmt: skip
            self.sequence += 1
        payload = b"".join(map(encode_record_field, records))
        region = prove_region(bytearray(payload), topic, [len(record) for record in records])
        assert region is not None
        if kind == "half":
            set_kind(region, HALF)
        return AppendRequest(region, self.rng.randrange(2))

    def send(self) -> None:
        """Groups of messages of all kinds."""
        self._make_topics()
        topics = [t for t in TOPICS if self.leader.open_store.topics.find(t) is not None]
        for _ in range(self.rng.randint(1, 4)):
            group = [
                self._request(self.rng.choice(topics), self.rng.choice((1, 1, 3)), self.rng.choice(("", "", "due", "half")))
                for _ in range(self.rng.randint(1, 3))
            ]  # fmt: skip
            self.leader.open_store.append(group)
            self._note_end()
            self.clock.advance(self.rng.randrange(50))
            if self.rng.random() < 0.4:  # so the seals to come say so
                self.leader_syncs()

    def commit(self) -> None:
        """An offset, perhaps with a copy of a message that moves."""
        self._make_topics()
        store = self.leader.open_store
        topic = store.topics.find("orders")
        assert topic is not None
        record, end = OffsetsRecord(), store.appended_end_offset("orders", 0)
        record.commits.add(consumer_group=self.rng.choice("gh")).offsets.add(
            topic="orders", queue_id=0, queue_offset=self.rng.randint(0, end), topic_incarnation=topic.incarnation
        )  # fmt: skip
        moved = []
        result = store.read("orders", 0, max(store.queue_range("orders", 0)[1] - 2, 0), 1, 1)
        if result.status is ReadStatus.FOUND and self.rng.random() < 0.5:
            region = result.regions[0]
            field = region.file.read(region.offset, region.size_bytes)
            moved.append(AppendRequest(move_record(field, "payments"), 1))
        store.append_moved(moved, [(OFFSETS_TOPIC, [record.SerializeToString()])])
        self._note_end()

    def end_timers(self) -> None:
        """Some delayed messages are pending no more."""
        store = self.leader.open_store
        self.clock.advance(self.rng.randrange(9_000))
        rows = store.pending.due(self.clock.now_ms(), self.rng.randint(1, 6))
        if len(rows):
            store.append_state(TIMER_TOPIC, [timer_record(rows, TimerEnd.TIMER_END_DELIVERED, self.clock.now_ms())])
            self._note_end()

    def end_transactions(self) -> None:
        """Some transactions are rolled back."""
        store = self.leader.open_store
        found = [one.half.key for one in store.transactions.open_transactions()]
        keys = self.rng.sample(found, min(len(found), self.rng.randint(1, 4)))
        if keys:
            endings = bytes([Ending.ROLLED_BACK]) * len(keys)
            store.append_state(TRANSACTIONS_TOPIC, [ended_record(keys, endings)])
            self._note_end()

    def delete_and_create(self) -> None:
        """A topic goes, or comes anew."""
        store = self.leader.open_store
        if store.topics.find("passing") is not None:
            store.delete_topic("passing")
        else:
            store.topics.create(TopicConfig("passing"))
        self._note_end()

    def leader_syncs(self) -> None:
        self.leader.open_store.flush()

    def leader_checkpoints(self) -> None:
        self.leader.open_store.checkpoint()

    def retention(self) -> None:
        """Old segments go, of what the follower has."""
        store = self.leader.open_store
        store.checkpoint()
        store.delete_segments_below(
            min(self.rng.randrange(store.appended_position + 1), self.confirmed.position)
        )
        self._note_end()

    # What the follower does.

    def replicate(self) -> None:
        """It fetches some of what it has not, and is told what is confirmed."""
        leader, follower = self.leader.open_store, self.follower.open_store
        if follower.appended_position < leader.min_position:
            self.follower.began_late = leader.min_position > 0
            start = leader.min_position
        else:
            start = follower.appended_position
        ends = sorted({end for end in self.ends if start < end <= leader.appended_position})
        if ends:
            end = self.rng.choice((ends[-1], self.rng.choice(ends)))
            data = self.leader.log(start, end)
            self._offer_damaged(start, data)
            follower.append_verbatim(start, data, previous_crc32c=leader.start_point.crc32c)
        if self.rng.random() < 0.4:
            follower.flush()
        self.tell_confirmed()

    def _offer_damaged(self, start: int, data: bytes) -> None:
        """D6: bytes with a flipped bit are refused."""
        leader, follower = self.leader.open_store, self.follower.open_store
        first = 0
        if follower.appended_position < start and leader.start_point.crc32c is None:
            # The leader has lost what proves the head that an empty log begins with.
            first = SEAL_SIZE_BYTES
            if len(data) <= first:
                return
        damaged = bytearray(data)
        damaged[self.rng.randrange(first, len(data))] ^= 1 << self.rng.randrange(8)
        try:
            follower.append_verbatim(start, bytes(damaged), previous_crc32c=leader.start_point.crc32c)
        except ForeignBytesError:
            return
        self.say("D6", f"{self.follower.name} takes damaged bytes for position {start}")
        raise _Judged

    def replicate_all(self) -> None:
        """It has all, and all of it is confirmed."""
        self.leader_syncs()
        while self.follower.open_store.appended_position < self.leader.open_store.appended_position:
            self.replicate()
        self.follower.open_store.flush()
        self.tell_confirmed()

    def tell_confirmed(self) -> None:
        """What both have flushed is there for good."""
        leader, follower = self.leader.open_store, self.follower.open_store
        position = min(leader.flushed_position, follower.flushed_position)
        follower.positions.note_replicated(position)
        if position > self.confirmed.position:
            point = follower.log_point(position)
            if point is not None and point == leader.log_point(position):
                self.confirmed = point

    def follower_checkpoints(self) -> None:
        self.follower.open_store.checkpoint()

    # Faults.

    def crash_leader(self) -> None:
        """It goes and comes back as the leader, in a new epoch."""
        self._restart_leader(self.rng.choice(("kill", "power", "power", "close")))

    def leader_rots(self) -> None:
        """A bit of its last segment changes. The follower, which has all, keeps all when it comes back, and heals it. R6."""
        self.replicate_all()
        leader, follower = self.leader.open_store, self.follower.open_store
        end = leader.appended_position
        base = (end - 1) // SEGMENT_SIZE_BYTES * SEGMENT_SIZE_BYTES
        if end - base <= SEAL_SIZE_BYTES:  # nothing stands behind its head, by which it could be proved
            return
        at = self.rng.randrange(base + SEAL_SIZE_BYTES, end) - base
        path = f"/s/commitlog/{base:020d}"
        self.leader.disk.flip_bit(path, 8 * at + self.rng.randrange(8))
        try:
            point = last_agreed(follower, leader, follower.epochs.rows[-1].epoch)
            if point is None or point.position < end:
                self.say("R6", f"truncates to {point} where the leader is damaged at {base + at}")
        except CorruptLogError:
            pass  # it asks again when that is healed
        for damage in leader.damaged_ranges:
            leader.heal_log(damage, self.follower.log(damage.start_position, damage.end_position))
        self._compare_bytes()

    def crash_follower(self) -> None:
        self._restart_follower(self.rng.choice(("kill", "power", "power", "close")))

    def follower_loses_power(self) -> None:
        """What it has not flushed is torn. The leader has, and its seals say so; those that this store led come before."""
        for _ in range(3):
            self.send()
            self.leader_syncs()
        leader, follower = self.leader.open_store, self.follower.open_store
        start = max(follower.appended_position, leader.min_position)
        follower.append_verbatim(
            start, self.leader.log(start, leader.appended_position), previous_crc32c=leader.start_point.crc32c
        )
        self._restart_follower("power")

    def fail_over(self, then: Callable[[], None] = lambda: None) -> None:
        """The leader is gone; the follower leads from where it is. The old one comes back as its follower, after `then`."""
        if not self.follower.open_store.appended_position:  # it has begun again: nobody takes it for in sync
            self.replicate_all()
        self.leader.go_down(self.rng.choice(("kill", "power", "close")))
        self.follower.open_store.lead()
        self.leader, self.follower = self.follower, self.leader
        self.leader.began_late = False
        self.ends = [e for e in self.ends if e <= self.leader.open_store.appended_position]
        self._note_end()
        then()
        self.follower.start(follows=True)
        self.follower.came_back()
        self.reconnect()

    def fail_over_between_twins(self) -> None:
        """Two messages of one size: the new leader never gets the one, the old leader never had the other."""
        self._make_topics()
        self.replicate_all()
        self._send_twin()
        self.fail_over(self._send_twin)

    def _send_twin(self) -> None:
        record = RecordTemplate("orders", 0, 0).encode(b"%030d" % self.rng.randrange(1 << 60), 0, 5)
        region = prove_region(bytearray(encode_record_field(record)), "orders", [len(record)])
        assert region is not None
        self.leader.open_store.append([AppendRequest(region, 0)])
        self._note_end()
        self.leader_syncs()

    def lose_caches(self) -> None:
        """All that is derived is gone from the follower."""
        self.follower.go_down("close")
        for name in CACHES:
            self.follower.disk.remove(f"/s/{name}") if self._has(name) else None
        for path in list(self.follower.disk.files("/s/config")):
            if path.removesuffix(".previous").endswith(
                ("opics.json", "Offsets.json", "State.json", "groups.json", "locks.json")
            ):
                self.follower.disk.remove(path)  # fmt: skip
        self.follower.start(follows=True)
        self.reconnect()

    def replace_follower(self) -> None:
        """Its disk is replaced: it is empty. What both had flushed is on the leader only, until this one has it."""
        self.replicate_all()
        self.retention()
        self.leader_syncs()
        self.follower = _Node(self, self.follower.name)
        self.follower.start(follows=True)
        self.confirmed = START
        self.replicate_all()

    def _has(self, name: str) -> bool:
        return any(path.startswith(f"/s/{name}") for path in self.follower.disk.files("/s"))

    def _restart_leader(self, kind: str) -> None:
        self.leader.go_down(kind)
        self.leader.start(follows=False)
        self.leader.came_back()
        self.ends = [e for e in self.ends if e <= self.leader.open_store.appended_position]
        self._note_end()
        self.reconnect()

    def _restart_follower(self, kind: str, truncated_to: int | None = None) -> None:
        self.follower.go_down(kind)
        self.follower.start(follows=True)
        self.follower.came_back(truncated_to=truncated_to)
        self.reconnect()

    def reconnect(self) -> None:
        """Where the logs agree; the follower truncates its own to there. That may be interrupted."""
        self._check_confirmed()
        leader, follower = self.leader.open_store, self.follower.open_store
        rows = follower.epochs.rows
        point = last_agreed(follower, leader, rows[-1].epoch if rows else 0) or START
        if point.position == follower.appended_position:
            self._compare_bytes()
            return
        if START.position < leader.min_position > point.position:
            point = START
        elif point.position < self.confirmed.position:
            self.say("R6", f"truncates to {point}, {self.confirmed} was confirmed")
        if point == START and follower.appended_position <= follower.min_position:
            return
        if self.rng.random() < 0.5:
            self.follower.disk.fail_at(self.rng.randint(1, 40), Fault.CRASH)
        try:
            point = follower.truncate_to(point)
            self.follower.go_down("close")
            self.follower.start(follows=True)
        except SimulatedCrash:
            pass
        self.follower.disk.plan = None
        if self.rng.random() < 0.5 or self.follower.store is None:
            self._restart_follower(self.rng.choice(("kill", "power")), truncated_to=point.position)
        else:
            self.reconnect()

    # Verdicts.

    def _check_confirmed(self) -> None:
        point, leader = self.confirmed, self.leader.open_store
        if leader.min_position < point.position and leader.log_point(point.position) != point:
            self.say("R6", f"the leader has lost {point}: {leader.log_point(point.position)}")

    def _compare_bytes(self) -> None:
        leader, follower = self.leader.open_store, self.follower.open_store
        start, end = max(leader.min_position, follower.min_position), follower.appended_position
        if start < end and self.follower.log(start, end) != self.leader.log(start, end):
            self.say("D6", f"the follower's log differs from its leader's within {start} and {end}")

    def compare(self) -> None:
        """D6 and R7, of a follower that has everything."""
        self.replicate_all()
        self._compare_bytes()
        ours, theirs = self.follower.open_store, self.leader.open_store
        floor = max(ours.min_position, theirs.min_position)  # one may have deleted more so far
        answers = (_answers(store, self.sequence, floor) for store in (ours, theirs))
        for (name, mine), (_, other) in zip(*answers, strict=False):
            is_forgotten = (
                self.follower.began_late and name.startswith("repeat") and mine == "expired"
            )
            if mine != other and not is_forgotten:
                self.say(
                    "R7",
                    f"{name}: the follower says {str(mine)[:300]}, the leader {str(other)[:300]}",
                )

    def check_committed(self) -> None:
        """C4, of both."""
        for node in (self.leader, self.follower):
            store = node.open_store
            topic = store.topics.find("orders")
            for group in "gh" if topic is not None else "":
                offset = store.offsets.find(group, "orders", topic.incarnation, 0) if topic is not None else None
                if offset is not None and offset > store.appended_end_offset("orders", 0):
                    self.say("C4", f"{node.name}: {group} committed {offset}, its queue ends at {store.appended_end_offset('orders', 0)}")

    def end(self) -> None:
        """Both are stopped; D over their files."""
        self.compare()
        for node in (self.leader, self.follower):
            node.open_store.flush()
            synced = node.open_store.flushed_position
            node.open_store.close()
            self.found += check_store_files(node.files(), synced=synced, deleted=True)
            for finding in verify("/s", disk=node.disk):
                self.say("D4", f"{node.name}: {finding}")


def _answers(store: Store, sequences: int, floor: int) -> Iterator[tuple[str, Any]]:
    """What a store says when it is asked for all that it has from position `floor` on."""
    found = [(topic.name, topic.incarnation) for topic in store.topics.all()]
    yield "topics", found
    for topic, incarnation in found:
        for queue_id in range(2):
            yield f"queue {topic}/{queue_id}", _read(store, topic, queue_id, floor)
            yield f"end {topic}/{queue_id}", store.appended_end_offset(topic, queue_id)
        for group in "gh":
            yield f"offset {group}", store.offsets.find(group, topic, incarnation, 0)
    for number in range(20):
        for topic, _ in found:
            found_by_key = store.find_by_key_hash(topic, key_hash_of(f"k{number}"))
            positions = [Record.FromString(record).physical_offset for record in found_by_key]
            yield f"key {number} in {topic}", [at for at in positions if at >= floor]
    for sequence in range(0, sequences, max(1, sequences // 25)):
        yield f"repeat of {sequence}", _place(store, sequence)
    rows = [row for part in store.pending.below(1 << 62) for row in part.tolist()]
    yield "timers", sorted(rows)
    yield "how many timers", (store.pending.count, store.pending.size_bytes)
    yield "octets of transactions", store.transactions.size_bytes
    yield (
        "transactions",
        sorted(
            (one.half.key, one.half.position, one.check_count)
            for one in store.transactions.open_transactions()
        ),
    )


def _read(store: Store, topic: str, queue_id: int, floor: int) -> list[tuple[int, int, bytes]]:
    found: list[tuple[int, int, bytes]] = []
    offset = store.queue_range(topic, queue_id)[0]
    while (result := store.read(topic, queue_id, offset, 50, 1 << 20)).status is ReadStatus.FOUND:
        data = b"".join(r.file.read(r.offset, r.size_bytes) for r in result.regions)
        found += [
            (record.physical_offset, record.queue_offset, record.body)
            for record in RecordBatch.FromString(data).records
            if record.physical_offset >= floor
        ]
        offset = result.next_offset
    return found


def _place(store: Store, sequence: int) -> Any:
    """Where the table of repeated sends has a sequence."""
    try:
        return store._repeated.admit(PRODUCER_ID, 0, sequence, 1, topic="orders")
    except SequenceExpiredError:
        return "expired"
    except StoreError as error:
        return type(error).__name__
    finally:
        store._repeated.drop_claims()


def check_torn_tails(seed: int) -> list[Violation]:
    """A follower loses its power again and again before it has flushed what its leader has; both take turns."""
    world = FollowWorld(seed)
    try:
        for _ in range(6):
            world.follower_loses_power()
            world.replicate_all()
            world.fail_over()
        world.end()
    except _Judged:
        pass
    return world.found


def check_following(seed: int, *, steps: int = 24) -> list[Violation]:
    """A random life of two stores; some operations end in a crash at one of their I/Os."""
    world = FollowWorld(seed)
    actions: tuple[Callable[[], None], ...] = (
        world.send, world.send, world.send, world.commit, world.commit, world.delete_and_create, world.end_timers,
        world.end_transactions, world.replace_follower, world.leader_syncs,
        world.leader_checkpoints, world.retention, world.replicate, world.replicate, world.replicate, world.replicate,
        world.follower_checkpoints, world.leader_rots, world.crash_leader, world.crash_follower,
        world.crash_follower, world.fail_over, world.fail_over_between_twins, world.lose_caches, world.compare,
    )  # fmt: skip
    of_follower = (world.replicate, world.follower_checkpoints)
    of_leader = (world.send, world.commit, world.leader_checkpoints, world.retention)
    try:
        for _ in range(steps):
            action = world.rng.choice(actions)
            victim = world.follower if action in of_follower else world.leader
            if action in (*of_follower, *of_leader) and world.rng.random() < 0.3:
                victim.disk.fail_at(world.rng.randint(1, 25), Fault.CRASH)
            try:
                action()
            except SimulatedCrash:
                kind = world.rng.choice(("kill", "power"))
                (world._restart_follower if victim is world.follower else world._restart_leader)(kind)  # fmt: skip
            for node in (world.leader, world.follower):
                node.disk.plan = None
            world.check_committed()
            if world.found:
                return world.found
        world.end()
    except _Judged:
        pass
    return world.found
