"""States in the log: after any crash, retention or not, a broker that finds nothing but commitlog/ tells its clients what the old one told.

A new consumer reads on and gets every message that is left. Three witnesses must agree: the broker that found its caches, the one that
found none, and the checker's own reading of the log.
"""

from __future__ import annotations

from contextlib import suppress

from protomq.v1.state_pb2 import GroupsRecord, LocksRecord, OffsetsRecord
from protomq.v1.topic_pb2 import Permission
from protomq.wire.topics import GROUPS_TOPIC, LOCKS_TOPIC, OFFSETS_TOPIC
from protomq_broker.store.errors import StoreError
from protomq_broker.store.state.group_settings import GroupSettings, group_to_message
from protomq_broker.store.state.locks import LockKey, LockOwner, locks_record
from protomq_broker.store.state.send_errors import (
    RETRY_MAX_MS,
    SendOutOfOrderError,
    SequenceExpiredError,
)
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.testing.simdisk import Fault, SimulatedCrash
from tests.support.lost_files import lose_all_but_log

from .checker import Violation, parse_log
from .checker.states import States, check_states, states_of
from .store_world import ROOT, SEGMENT_SIZE_BYTES, TOPICS, StoreWorld, _Order

GROUPS = ("group", "idle", "passing")
STEPS = 50
_PERMISSIONS = {
    (False, False): Permission.PERMISSION_NONE,
    (True, False): Permission.PERMISSION_READ,
    (False, True): Permission.PERMISSION_WRITE,
    (True, True): Permission.PERMISSION_READ_WRITE,
}
Messages = dict[tuple[str, int], list[bytes]]


class StatesWorld:
    """A world, and what producers were told of their sends: the order, its queue offset, and when."""

    def __init__(self, seed: int) -> None:
        self.world = StoreWorld(seed, sync_flush=True)
        self.world.open()
        self.sent: list[tuple[_Order, int, int]] = []

    # Operations.

    def change_topic(self) -> None:
        """A topic is made, or gets other settings."""
        rng, store = self.world.rng, self.world.store
        assert store is not None
        queues = rng.randrange(2, 5)
        topic = TopicConfig(rng.choice(TOPICS), queues, queues, rng.random() < 0.8, True)
        store.topics.put([topic])
        store.flush()

    def delete_topic(self) -> None:
        """A topic goes with all there is of it."""
        store = self.world.store
        assert store is not None
        name = self.world.rng.choice(TOPICS)
        self.sent = [sent for sent in self.sent if sent[0].topic != name]
        store.delete_topic(name)
        store.flush()

    def send(self) -> None:
        """Messages, often the first of their topic."""
        world, rng = self.world, self.world.rng
        assert world.store is not None
        sender = rng.choice(world.senders)
        order = world.new_order(count=rng.choice((1, 1, 3)), size=rng.choice((40, 600)), sender=sender)
        order.previous = None
        request = world._request(order)
        with suppress(SequenceExpiredError, SendOutOfOrderError):
            if world.store.find_repeated(request) is None:
                world.store.append([request])
                world.store.topics.add([TopicConfig(order.topic, 2, 2)])
                world.store.flush()
                self.sent.append((order, request.queue_offset, world.clock.passed_ms))

    def commit(self) -> None:
        """A group commits, in a topic that is there."""
        world, rng = self.world, self.world.rng
        assert world.store is not None
        topic = world.store.topics.find(rng.choice(TOPICS))
        if topic is None:
            return
        record = OffsetsRecord()
        if rng.random() < 0.15:
            record.deleted_groups.append(rng.choice(GROUPS))
        else:
            record.commits.add(consumer_group=rng.choice(GROUPS)).offsets.add(
                topic=topic.name,
                queue_id=rng.randrange(2),
                queue_offset=rng.randrange(9),
                topic_incarnation=topic.incarnation,
            )
        world.store.append_state(OFFSETS_TOPIC, [record.SerializeToString()])
        world.store.flush()

    def set_group(self) -> None:
        """A group gets settings, or loses them; sometimes with a version that is too low to count."""
        world, rng = self.world, self.world.rng
        assert world.store is not None
        group = rng.choice(GROUPS)
        if rng.random() < 0.2:
            record = GroupsRecord(deleted_groups=[group])
            world.store.append_state(GROUPS_TOPIC, [record.SerializeToString()])
            world.store.flush()
            return
        settings = GroupSettings(
            group,
            orderly=rng.random() < 0.5,
            retry_count_max=rng.choice((None, 0, 3)),
            retry_delays_ms=rng.choice(((), (5, 7))),
            consume_enabled=rng.random() < 0.5,
            version=rng.choice((0, 0, rng.randrange(1, 9))),
        )
        world.store.groups.put(settings)
        world.store.flush()

    def lock(self) -> None:
        """Members lock queues, give them up, or lose them; or a group goes."""
        world, rng = self.world, self.world.rng
        assert world.store is not None
        if rng.random() < 0.1:
            body = LocksRecord(deleted_groups=[rng.choice(GROUPS)]).SerializeToString()
        else:
            members = [None, *(LockOwner(rng.randrange(1, 1 << 64), name, 1) for name in "ab")]
            keys = {
                LockKey(rng.choice(GROUPS), topic.name, topic.incarnation, rng.randrange(2))
                for topic in world.store.topics.all()
                if rng.random() < 0.7
            }
            body = locks_record([(key, rng.choice(members)) for key in sorted(keys)])
        if body:
            world.store.append_state(LOCKS_TOPIC, [body])
            world.store.flush()

    def checkpoint(self) -> None:
        """Caches are written."""
        assert self.world.store is not None
        self.world.store.checkpoint()

    def retention(self) -> None:
        """Old segments go, as far as the checkpoint lets them."""
        store = self.world.store
        assert store is not None
        store.checkpoint()
        store.delete_segments_below(
            store.min_position + self.world.rng.randrange(1, 4) * SEGMENT_SIZE_BYTES
        )

    def rest(self) -> None:
        """Time passes."""
        self.world.clock.advance(self.world.rng.choice((1_000, 5 * 60_000, 20 * 60_000)))

    # What is told.

    def told(self) -> tuple[States, Messages]:
        """To clients of the broker that runs now."""
        world = self.world
        store = world.store
        assert store is not None
        states = States()
        messages: Messages = {}
        for topic in store.topics.all():
            states.topics[topic.name] = (
                topic.write_queues,
                topic.read_queues,
                _PERMISSIONS[topic.readable, topic.writable],
                topic.incarnation,
            )
            for queue_id in range(topic.read_queues):
                key = topic.name, queue_id
                start, end = states.ranges[key] = store.queue_range(*key)
                messages[key] = [record.body for record in world._records(*key, start, end)]
            for group in GROUPS:
                offsets = store.offsets.of_topic(group, topic.name, topic.incarnation)
                for queue_id, offset in offsets.items():
                    states.offsets[group, topic.name, queue_id] = offset
        states.locks = {(*key,): owner[:3] for key, owner in store.locks.all().items()}
        states.groups = {each.group: group_to_message(each) for each in store.groups.all()}
        return states, messages

    def check_repeats(self) -> list[Violation]:
        """A send that is tried again within 15 minutes is answered with its place, or refused; never stored twice."""
        world, found = self.world, []
        assert world.store is not None
        for order, queue_offset, sent_ms in self.sent:
            if world.clock.passed_ms - sent_ms >= RETRY_MAX_MS:
                continue
            try:
                place = world.store.find_repeated(world._request(order))
            except (SequenceExpiredError, SendOutOfOrderError):
                continue
            world.store._repeated.drop_claims()
            if place is None or place.queue_offset != queue_offset:
                found.append(
                    Violation(
                        "A3", f"{order.ids} at {order.topic}@{queue_offset} is known as {place}"
                    )
                )
        return found


def only_the_log(world: StoreWorld) -> StoreWorld:
    """The same broker on the same disk, of which nothing but commitlog/ is left."""
    after = world.fork("kill", world.rng)
    lose_all_but_log(after.disk, ROOT)
    return after


def check_three_witnesses(states: StatesWorld, kind: str) -> list[Violation]:
    """What stands on the disk after a crash, told three ways. The world goes on with one of the two brokers."""
    crashed = states.world.fork(kind, states.world.rng)
    seen = []
    worlds = [crashed.fork("kill", crashed.rng), only_the_log(crashed)]
    found: list[Violation] = []
    for world in worlds:
        states.world = world
        world.open()
        seen.append(states.told())
        found += states.check_repeats()
        log = states_of(parse_log(world.files()))
        found += check_states(log, seen[-1][0])
    if seen[0][0] != seen[1][0]:
        found.append(Violation("C3", f"with caches {seen[0][0]}, without {seen[1][0]}"))
    if seen[0][1] != seen[1][1]:
        found.append(Violation("B3", "a new consumer gets other messages where no cache is left"))
    states.world = worlds[crashed.rng.randrange(2)]
    return found


def _settled(states: States) -> tuple[object, ...]:
    """What neither caches nor retention change."""
    return states.topics, states.offsets, states.groups, states.locks


def check_states_of_log(seed: int) -> list[Violation]:
    """A script of operations and crashes; what is wrong after each crash."""
    states = StatesWorld(seed)
    rng = states.world.rng
    for number in range(STEPS):
        action = rng.choice(
            (
                states.change_topic, states.delete_topic, states.send, states.send, states.send, states.send, states.send,
                states.commit, states.commit, states.set_group, states.lock, states.checkpoint, states.retention,
                states.rest,
            )
        )  # fmt: skip
        before = states.told()
        is_killed = rng.random() < 0.4
        if is_killed:
            states.world.disk.fail_at(rng.randrange(1, 25), Fault.CRASH)
        try:
            action()
        except SimulatedCrash:
            pass
        except (StoreError, OSError) as error:
            return [Violation("crash", f"step {number}, {action.__name__}: {error!r}")]
        else:
            before = states.told()
            is_killed = rng.random() < 0.3
        states.world.disk.plan = None
        if not is_killed:
            continue
        changed = action in (states.checkpoint, states.retention, states.rest)
        found = check_three_witnesses(states, rng.choice(("kill", "power")))
        after = states.told()
        if changed and _settled(after[0]) != _settled(before[0]):
            found.append(Violation("C3", f"{after[0]}, it was {before[0]}"))
        if found:
            step = f"step {number}, {action.__name__}"
            return [item._replace(message=f"{step}: {item.message}") for item in found]
    return []
