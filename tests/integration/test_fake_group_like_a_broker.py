"""FakeGroup against a real broker: the same messages, and listeners that say the same, have the same deliveries and dead letters."""

from __future__ import annotations

import random
import threading
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from protomq import (
    Admin,
    Message,
    MessageQueue,
    Producer,
    PullConsumer,
    PushConsumer,
    Reject,
    Retry,
    Suspend,
)
from protomq.errors import TopicNotFoundError
from protomq.testing import Broker, FakeGroup
from tests.support.waiting import wait_for

QUEUE_COUNT: Final = 4
SCENES: Final = 24
SAYS: Final[tuple[Any, ...]] = (
    None, None, 17, Retry, Retry(delay=0), Retry(delay=0.02, error="later"), Retry(error="as the group says"), Reject(), Reject("no"),
    Suspend(1), Suspend(error="s"), ValueError(""), ValueError("é" * 300), ValueError("y" * 600),
)  # fmt: skip
"""What a listener returns, or raises, of a message."""


@dataclass(frozen=True)
class Sent:
    """A message, and what is said of it at its first delivery, the next one, and so on; then it is done."""

    body: bytes
    key: str
    tag: str
    properties: dict[str, str] | None
    sharding_key: str | None
    queue_id: int
    delay_s: float
    says: list[Any]


class Scene:
    """A group with one member, by its seed."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.name = f"scene-{seed}"
        self.orderly = rng.random() < 0.5
        self.batch_size = rng.choice([None, None, 1, 3])
        # Without order it depends on threads which messages come together.
        self.says_of_each = not self.orderly or rng.random() < 0.5
        self.attempts_max = rng.choice([None, 1, 3]) if self.orderly else None
        self.retry_count_max = rng.choice([None, 0, 1, 3])
        self.retry_delays_ms = rng.choice([[10], [10, 40]])
        self.tags = rng.choice([(), (), ("A",)])
        self.is_coroutine = rng.random() < 0.3
        self.sent = [
            Sent(
                b"%d" % number, rng.choice(["", "k"]), rng.choice(["", "A", "B"]), rng.choice([None, {"a": "1"}]), rng.choice([None, "s"]),
                rng.randrange(QUEUE_COUNT), 0.05 if not self.orderly and rng.random() < 0.2 else 0.0,
                rng.choices(SAYS, k=rng.randrange(6)),
            )
            for number in range(rng.randrange(3, 14))
        ]  # fmt: skip


class Deliveries:
    """What the listener of a scene has got, by message, and in order the calls for each queue of the topic."""

    def __init__(self, scene: Scene, namesrv: str | None = None) -> None:
        self.by_body: defaultdict[bytes, list[Any]] = defaultdict(list)
        self.calls: defaultdict[int, list[list[bytes]]] = defaultdict(list)
        self._left = {sent.body: list(sent.says) for sent in scene.sent}
        self._scene = scene
        self._lock = threading.Lock()
        self.consumer = PushConsumer(
            scene.name, namesrv=namesrv, orderly=scene.orderly, attempts_max=scene.attempts_max, suspend_ms=10, commit_interval_s=1.0
        )
        listener = self._listen_async if scene.is_coroutine else self._listen
        self.consumer.subscribe(scene.name, listener, tags=scene.tags, batch_size=scene.batch_size)

    @property
    def count(self) -> int:
        with self._lock:
            return sum(map(len, self.by_body.values()))

    async def _listen_async(self, given: Any) -> Any:
        return self._listen(given)

    def _listen(self, given: Any) -> Any:
        messages: list[Message] = [given] if self._scene.batch_size is None else given
        assert len({message.queue for message in messages}) == 1
        with self._lock:
            said = [self._said(message) for message in messages]
            if messages[0].queue.topic == self._scene.name:
                self.calls[messages[0].queue_id].append([message.body for message in messages])
        if self._scene.batch_size is not None and self._scene.says_of_each:
            return said
        first = next((one for one in said if one is not None), None)
        if isinstance(first, ValueError):
            raise ValueError(str(first))
        return first

    def _said(self, message: Message) -> Any:
        self.by_body[message.body].append((*described(message), message.own_tries))
        left = self._left[message.body]
        return left.pop(0) if left else None


def described(message: Message) -> tuple[Any, ...]:
    """All that does not depend on the clock."""
    origin = message.origin
    of_origin = None if origin is None else (origin.topic, origin.queue_id, origin.queue_offset is None)
    if origin is not None:
        assert origin.store_time_ms <= message.store_time_ms
    queue_id = message.queue_id if "%" not in message.topic else None
    return (
        message.body, message.topic, queue_id, message.attempt, message.last_error, message.key, message.tag, dict(message.properties),
        message.sharding_key, of_origin,
    )  # fmt: skip


def of_fake(scene: Scene) -> tuple[Deliveries, list[Any]]:
    deliveries = Deliveries(scene)
    group = FakeGroup(
        deliveries.consumer,
        retry_count_max=scene.retry_count_max,
        retry_delays_s=[delay_ms / 1000 for delay_ms in scene.retry_delays_ms],
        queue_count=QUEUE_COUNT,
    )
    for sent in scene.sent:
        group.send(
            scene.name, sent.body, key=sent.key, tag=sent.tag, properties=sent.properties, sharding_key=sent.sharding_key,
            queue_id=None if sent.sharding_key else sent.queue_id, delay_s=sent.delay_s,
        )  # fmt: skip
    group.deliver()
    while group.waiting:
        group.advance(group.next_due_in_s)
        group.deliver()
    assert all(dead.error == dead.message.last_error for dead in group.dead_letters)
    return deliveries, [described(dead.message) for dead in group.dead_letters]


def send_all(scene: Scene, broker: Broker, producer: Producer) -> None:
    with Admin(namesrv=broker.namesrv) as admin:
        admin.create_topic(scene.name, write_queues=QUEUE_COUNT, read_queues=QUEUE_COUNT)
        admin.set_group(scene.name, retry_count_max=scene.retry_count_max, retry_delays_ms=scene.retry_delays_ms)
    (broker_name,) = {queue.broker_name for queue in producer.queues(scene.name)}
    for sent in scene.sent:
        producer.send(
            scene.name, sent.body, key=sent.key, tag=sent.tag, properties=sent.properties, sharding_key=sent.sharding_key,
            queue=None if sent.sharding_key else MessageQueue(scene.name, broker_name, sent.queue_id), delay=sent.delay_s or None,
        )  # fmt: skip


def dead_letters_of(scene: Scene, broker: Broker, count: int) -> list[Any]:
    """Those that there are, if there are not more than `count`."""
    found: list[Message] = []
    topic = f"%DLQ%{scene.name}"
    with PullConsumer(namesrv=broker.namesrv) as consumer:

        def is_there() -> bool:
            with suppress(TopicNotFoundError):
                return bool(consumer.queues(topic))
            return False

        if not count:
            assert not is_there(), scene.name
            return []
        wait_for(is_there)  # The name server may not know it yet.
        consumer.subscribe(topic)
        consumer.seek_to_begin()
        assert sum(map(consumer.end_offset, consumer.assignment())) == count, scene.name
        while len(found) < count:
            found += consumer.poll(20)
    return [described(message) for message in found]


def test_deliveries_and_dead_letters_are_those_of_a_broker(protomq_server: Broker) -> None:
    scenes = [Scene(seed) for seed in range(SCENES)]
    fakes = [of_fake(scene) for scene in scenes]
    with Producer(namesrv=protomq_server.namesrv) as producer:
        for scene in scenes:
            send_all(scene, protomq_server, producer)
    real = [Deliveries(scene, protomq_server.namesrv) for scene in scenes]
    for deliveries in real:
        deliveries.consumer.start()
    try:
        for deliveries, (expected, _) in zip(real, fakes, strict=True):
            wait_for(lambda own=deliveries, other=expected: own.count >= other.count)  # type: ignore[misc]
    finally:
        left_counts = [deliveries.consumer.stop() for deliveries in real]
    assert not any(left_counts)
    says: Counter[str] = Counter()
    for scene, deliveries, (expected, dead) in zip(scenes, real, fakes, strict=True):
        assert deliveries.by_body == expected.by_body, scene.name
        if scene.orderly:
            assert deliveries.calls == expected.calls, scene.name
        found = dead_letters_of(scene, protomq_server, len(dead))
        assert sorted(found, key=repr) == sorted(dead, key=repr), scene.name
        says["dead"] += len(dead)
        says["retries"] += sum(len(each) - 1 for each in expected.by_body.values())
    assert min(says["dead"], says["retries"]) > 20
