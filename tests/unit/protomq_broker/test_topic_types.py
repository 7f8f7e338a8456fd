"""Topic types: what does not fit its topic is refused, and nothing of it is stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from protomq.v1.admin_service_pb2 import CreateTopicRequest, CreateTopicResponse
from protomq.v1.record_pb2 import Attributes, Record
from protomq.v1.send_service_pb2 import SendRequest
from protomq.v1.topic_pb2 import Topic, TopicType
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.topic_types import NAMES
from protomq_runtime.errors import ServiceError
from tests.support.delay_world import World, reason

from .fake_broker import ADMIN, SEND, FakeBroker

NORMAL = TopicType.TOPIC_TYPE_NORMAL
FIFO = TopicType.TOPIC_TYPE_FIFO
DELAY = TopicType.TOPIC_TYPE_DELAY
TRANSACTION = TopicType.TOPIC_TYPE_TRANSACTION
MIXED = TopicType.TOPIC_TYPE_MIXED
ALL = (NORMAL, FIFO, DELAY, TRANSACTION)
ZERO_CHECKSUM = "order-43043437002"
"""A sharding key whose CRC-32C is 0."""


def record(body: bytes = b"x", sharding_key: str = "", **fields: Any) -> Record:
    made = Record(body=body, **fields)
    if sharding_key:
        made.attributes.CopyFrom(Attributes(sharding_key=sharding_key))
    return made


def sends(kind: TopicType.ValueType) -> Sequence[SendRequest]:
    """Requests of this type: one message, several, with what decides less."""
    if kind == NORMAL:
        return [SendRequest(records=[record()]), SendRequest(records=[record(), record()])]
    if kind == FIFO:
        return [
            SendRequest(records=[record(sharding_key=key) for key in keys], queue_id=0)
            for keys in ("a", "ab", [ZERO_CHECKSUM])
        ]
    if kind == DELAY:
        return [
            SendRequest(records=[record()], delay_level=1),
            SendRequest(records=[record(due_time_ms=1, sharding_key="a"), record(due_time_ms=2)]),
        ]
    return [half(0), half(1, sharding_key="a", delay_ms=5)]


def half(sequence: int, sharding_key: str = "", **fields: Any) -> SendRequest:
    made = record(producer_id=7, sequence=sequence)
    made.attributes.CopyFrom(Attributes(producer_group="group", sharding_key=sharding_key))
    return SendRequest(records=[made], half=True, **fields)


@pytest.mark.parametrize("wanted", ALL)
def test_a_topic_takes_its_type_and_no_other(wanted: TopicType.ValueType) -> None:
    world = World().start()
    world.store.topics.put([TopicConfig("topic", type=wanted)])
    for kind in ALL:
        for request in sends(kind):
            request.topic = "topic"
            before = world.store.appended_position
            if kind == wanted:
                assert world.request(request).record_count == len(request.records)
                continue
            assert reason(lambda: world.request(request)) == (  # noqa: B023
                "TOPIC_TYPE_MISMATCH",
                {"topic": "topic", "topic_type": NAMES[wanted], "message_type": NAMES[kind]},
            )
            assert world.store.appended_position == before


def test_a_topic_that_nobody_gave_a_type_takes_everything() -> None:
    world = World().start()
    for kind in ALL:
        for request in sends(kind):
            request.topic = "new"
            world.request(request)
    made = world.store.topics.find("new")
    assert made is not None
    assert made.type == MIXED


@pytest.mark.parametrize("wanted", [NORMAL, FIFO])
def test_messages_of_which_some_have_a_sharding_key_fit_neither(wanted: TopicType.ValueType) -> None:
    world = World().start()
    world.store.topics.put([TopicConfig("topic", type=wanted)])
    request = SendRequest(topic="topic", records=[record(), record(sharding_key="a")])
    assert reason(lambda: world.request(request))[1]["message_type"] == "mixed"


def test_what_is_refused_is_no_repeat_and_stops_no_other_send() -> None:
    broker = FakeBroker()
    broker.store.topics.put([TopicConfig("fifo", type=FIFO)])
    refused = SendRequest(topic="fifo", records=[record(producer_id=7, sequence=0)])
    first, second = broker.call(SEND, refused), broker.call(SEND, refused)
    for call in (first, second):
        assert isinstance(call.error, ServiceError)
        assert call.error.reason == "TOPIC_TYPE_MISMATCH"
    broker.store.topics.put([TopicConfig("fifo", type=NORMAL)])
    assert broker.call(SEND, refused).error is None
    broker.store.topics.put([TopicConfig("fifo", type=FIFO)])
    assert broker.call(SEND, refused).error is None, "stored before the type was changed: a repeat"


def test_the_type_is_kept_and_changed() -> None:
    world = World().start()
    world.store.topics.put([TopicConfig("topic", type=DELAY)])
    for remove_cache in (False, True):
        world.store.close()
        if remove_cache:
            world.disk.remove("/s/config/topics.json")
        world.start()
        found = world.store.topics.find("topic")
        assert found is not None
        assert found.type == DELAY


def test_an_update_that_names_no_type_leaves_it() -> None:
    broker = FakeBroker()

    def create(update: bool = False, **fields: Any) -> int | str:
        """The type that it has now, or why not."""
        request = CreateTopicRequest(topic=Topic(name="orders", **fields), update=update)
        call = broker.call(ADMIN + "CreateTopic", request)
        if call.error is not None:
            return call.error.reason
        return CreateTopicResponse.FromString(call.answer_payload or b"").topic.type

    assert create(type=FIFO) == FIFO
    assert create() == FIFO
    assert create(update=True, write_queues=9) == FIFO
    assert create(write_queues=9, type=NORMAL) == "TOPIC_EXISTS"
    assert create(update=True, write_queues=9, type=NORMAL) == NORMAL
    assert create(update=True, type=77) == "INVALID_ARGUMENT"
