"""Held pops beside everything that may bring them messages, in random orders: none is held for what a new pop gets."""

from __future__ import annotations

import random
from typing import Any

import pytest

from protomq.v1.admin_service_pb2 import CreateTopicRequest, DeleteGroupRequest
from protomq.v1.consumer_service_pb2 import ResetOffsetsRequest
from protomq.v1.group_pb2 import GroupSettings
from protomq.v1.group_service_pb2 import PutGroupRequest
from protomq.v1.pop_service_pb2 import AckRequest, ChangeInvisibleRequest, PopRequest
from protomq.v1.record_pb2 import Attributes
from protomq.v1.topic_pb2 import Topic
from protomq_runtime.testing import FakeCall

from .fake_broker import ADMIN, CONSUMER, GROUP, POP, FakeBroker
from .test_pop_service import Popped, messages_of

STEPS = (*["send", "hold"] * 3, *["ack", "wait"] * 2, "pop", "change", "reset", "queues", "limit", "retain", "delete")
STEP_COUNT = 100


class World:
    """Group `fifo` pops in order, `some` wants one tag."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.broker = FakeBroker(segment=1 << 16)
        self.held: list[tuple[FakeCall, dict[str, Any]]] = []
        self.got: list[tuple[dict[str, Any], Popped]] = []

    def step(self, number: int) -> None:
        rng, broker = self.rng, self.broker
        step = rng.choice(STEPS)
        topic = broker.store.topics.find("topic")
        assert topic is not None
        if step == "send":
            bodies = [b"%d" % number + bytes(rng.choice([0, 0, 3_000])) for _ in range(rng.choice([1, 1, 3]))]
            attributes = Attributes(sharding_key=rng.choice(["", "a", "b"]))
            broker.fill(bodies, queue_id=rng.randrange(topic.write_queues), tag=rng.choice("ab"), attributes=attributes)
        elif step in ("pop", "hold"):
            self.pop(self.terms(topic.read_queues), 60_000 if step == "hold" else 0)
        elif step in ("ack", "change") and self.got:
            self.settle(is_ack=step == "ack")
        elif step == "wait":
            broker.advance(rng.choice([1, 500, 1_001, 10_001, 30_000]))
        elif step == "reset":
            place: dict[str, Any] = rng.choice([{"queue_offset": 0}, {"queue_offset": 2}, {"end": True}])
            group = rng.choice(["all", "some", "fifo"])
            broker.call(CONSUMER + "ResetOffsets", ResetOffsetsRequest(consumer_group=group, topic="topic", **place)).response()
        elif step == "queues":
            self.resize(rng.randint(1, 4), topic.read_queues)
        elif step == "limit":
            settings = GroupSettings(consumer_group=rng.choice(["all", "some", "fifo"]), retry_count_max=rng.choice([0, 1, 3]))
            broker.call(GROUP + "PutGroup", PutGroupRequest(settings=settings)).response()
        elif step == "delete":
            broker.call(ADMIN + "DeleteGroup", DeleteGroupRequest(consumer_group=rng.choice(["all", "some", "fifo"]), force=True))
        elif step == "retain":
            broker.store.checkpoint()
            broker.store.delete_segments_below(broker.store.appended_position - rng.choice([0, 20_000]))
            broker.server.run()

    def terms(self, queues: int) -> dict[str, Any]:
        group = self.rng.choice(["all", "some", "fifo"])
        terms: dict[str, Any] = {"consumer_group": group, "topic": "topic", "record_count_max": self.rng.choice([1, 2, 8])}
        terms |= {"invisible_ms": self.rng.choice([10_000, 60_000]), "fifo": group == "fifo", "tags": ["a"] if group == "some" else []}
        return terms | ({"queue_id": self.rng.randrange(queues)} if self.rng.random() < 0.3 else {})

    def pop(self, terms: dict[str, Any], hold_ms: int) -> int:
        call = self.broker.call(POP + "Pop", PopRequest(**terms, hold_ms=hold_ms))
        if not call.answered:
            self.held.append((call, terms))
            return 0
        found = [] if call.error is not None else messages_of(call)
        self.got += [(terms, message) for message in found]
        return len(found)

    def settle(self, *, is_ack: bool) -> None:
        terms, message = self.got.pop(self.rng.randrange(len(self.got)))
        named: dict[str, Any] = {"consumer_group": terms["consumer_group"], "topic": "topic"}
        request: AckRequest | ChangeInvisibleRequest = AckRequest(**named)
        if not is_ack:
            request = ChangeInvisibleRequest(**named, invisible_ms=self.rng.choice([0, 500, 20_000]), unseen=self.rng.random() < 0.2)
        request.messages.add(receipt=message.receipt, offset_runs=[message.offset, 1])
        self.broker.call(POP + ("Ack" if is_ack else "ChangeInvisible"), request)

    def resize(self, write_queues: int, read_queues: int) -> None:
        for queues in (max(write_queues, read_queues), write_queues):
            wanted = Topic(name="topic", write_queues=write_queues, read_queues=queues)
            self.broker.call(ADMIN + "CreateTopic", CreateTopicRequest(topic=wanted, update=True)).response()

    def check(self) -> None:
        """Who is held now waits for what is not there."""
        self.broker.advance(1)  # Timers count in seconds: one may be due a rounding later.
        self.collect()
        for call, terms in tuple(self.held):
            assert call.answered or not self.pop(terms, 0) or call.answered
        self.collect()

    def collect(self) -> None:
        answered = [each for each in self.held if each[0].answered]
        self.held = [each for each in self.held if each not in answered]
        for call, terms in answered:
            self.got += [(terms, message) for message in ([] if call.error is not None else messages_of(call))]


@pytest.mark.parametrize("seed", range(12))
def test_no_pop_is_held_for_what_a_new_one_gets(seed: int) -> None:
    world = World(seed)
    for number in range(STEP_COUNT):
        world.step(number)
        world.check()


def test_a_held_pop_gets_what_its_deleted_group_had_done() -> None:
    broker = FakeBroker()
    broker.fill([b"0"])
    terms: dict[str, Any] = {"consumer_group": "g", "topic": "topic"}
    (message,) = messages_of(broker.call(POP + "Pop", PopRequest(**terms)))
    ack = AckRequest(**terms)
    ack.messages.add(receipt=message.receipt, offset_runs=[message.offset, 1])
    broker.call(POP + "Ack", ack).response()
    held = broker.call(POP + "Pop", PopRequest(**terms, hold_ms=60_000))
    assert not held.answered

    broker.call(ADMIN + "DeleteGroup", DeleteGroupRequest(consumer_group="g", force=True)).response()

    assert held.answered, "a new pop would get the message at once"
    assert [each.offset for each in messages_of(held)] == [0]
