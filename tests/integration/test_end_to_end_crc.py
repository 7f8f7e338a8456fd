"""A bit that flips between a producer's memory and a reader's is found by every reader, wherever in the producer's part it is.

The bit flips in a request, behind the producer's encoding: the fast path of the broker takes records as they are, so what is stored is
what a bad network card, a bad cable or a bad memory would have made of it, under seals that hold.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

import pytest

from protomq import (
    Admin,
    AsyncPullConsumer,
    Message,
    MessageQueue,
    OutgoingMessage,
    Producer,
    PullConsumer,
    SimpleConsumer,
)
from protomq._methods import SEND
from protomq._transport import SyncTransport
from protomq._transport_options import TransportOptions
from protomq._types import BrokerAddress
from protomq.errors import CorruptMessageError, IllegalDelayError, InvalidArgumentError
from protomq.testing import Broker
from protomq.v1.record_pb2 import Attributes, Record, Transit
from protomq.v1.send_service_pb2 import SendRequest, SendResponse
from protomq.wire.hashing import crc32c
from protomq.wire.record import RecordTemplate, encode_front, encode_message_id, encode_record_field

PLACES: Final = {
    "body": b"BODY", "key": b"KEY-", "second key": b"MORE", "tag": b"TAG-", "property's name": b"NAME", "property": b"VALU",
    "sharding key": b"SHAR", "born host": b"HOST",
}  # fmt: skip
TRANSPORTS: Final = pytest.mark.parametrize("transport", ["remoting", "grpc"])
Transport = Literal["remoting", "grpc"]


class Damaged(NamedTuple):
    """A topic with one queue: of its messages those at the odd offsets are damaged, each in another place."""

    broker: Broker
    topic: str
    ids: list[str]


def address_of(broker: Broker) -> BrokerAddress:
    return BrokerAddress("", broker.grpc_address, broker.remoting_address)


def send_raw(broker: Broker, *parts: bytes) -> SendResponse:
    with SyncTransport(TransportOptions("remoting")) as transport:
        answer = transport.call(address_of(broker), SEND, parts, 10.0)
        return SendResponse.FromString(answer)


def encode_one(topic: str, sequence: int) -> bytes:
    front = encode_front(["KEY-1", "MORE-2"], "TAG-3", {"NAME-4": "VALUE-5"}, "SHARD-6", "HOST-7")
    template = RecordTemplate(topic, 77, 0)
    return template.encode(
        b"BODY-8" + b"x" * 100, sequence, 5, key="KEY-1", tag="TAG-3", sharding_key="SHARD-6",
        front=front, flags=8,
    )  # fmt: skip


@pytest.fixture(scope="module")
def damaged() -> Iterator[Damaged]:
    with Broker() as broker:
        topic = "damaged-on-its-way"
        with Admin(namesrv=broker.namesrv) as admin:
            admin.create_topic(topic, write_queues=1, read_queues=1)
        records = []
        for sequence, mark in enumerate(
            octets for place in PLACES.values() for octets in (b"", place)
        ):
            record = encode_one(topic, sequence)
            if mark:
                record = record.replace(mark, bytes((mark[0] ^ 1,)) + mark[1:], 1)
            records.append(record)
        tail = SendRequest(topic=topic, queue_id=0, record_sizes=list(map(len, records)))
        answer = send_raw(broker, *map(encode_record_field, records), tail.SerializeToString())
        assert (answer.queue_offset, answer.record_count) == (0, len(records))
        yield Damaged(broker, topic, [encode_message_id(77, 0, n) for n in range(len(records))])


def assert_found(messages: list[Message], count: int) -> None:
    """Every second one is an error, whatever of it is asked for; the others are well."""
    assert [message.queue_offset for message in messages] == list(range(count))
    for message in messages:
        if message.queue_offset % 2 == 0:
            assert (message.key, message.tag, message.sharding_key) == ("KEY-1", "TAG-3", "SHARD-6")
            assert message.properties == {"NAME-4": "VALUE-5"}
            continue
        for name in ("body", "key", "keys", "tag", "properties", "sharding_key", "born_host"):
            with pytest.raises(CorruptMessageError) as caught:
                getattr(message, name)
            assert caught.value.metadata["queue_offset"] == str(message.queue_offset)


@TRANSPORTS
@pytest.mark.parametrize("tags", [(), ("TAG-3",)])
def test_a_consumer_finds_it(damaged: Damaged, transport: Transport, tags: tuple[str, ...]) -> None:
    got: list[Message] = []
    with PullConsumer(namesrv=damaged.broker.namesrv, transport=transport) as consumer:
        consumer.subscribe(damaged.topic, tags=tags)
        while len(got) < len(damaged.ids):
            got += consumer.poll(20)
    assert_found(got, len(damaged.ids))


@TRANSPORTS
@pytest.mark.parametrize("tags", [(), ("TAG-3",)])
def test_a_simple_consumer_finds_it_and_gets_what_stands_behind(damaged: Damaged, transport: Transport, tags: tuple[str, ...]) -> None:
    got: list[Message] = []
    group = f"simple-{transport}-{len(tags)}"
    with SimpleConsumer(group, namesrv=damaged.broker.namesrv, transport=transport) as consumer:
        while len(got) < len(damaged.ids):
            found = consumer.receive(damaged.topic, hold_s=20, tags=tags)
            assert not consumer.ack(found)
            got += found
    assert_found(got, len(damaged.ids))


async def test_an_async_consumer_finds_it(damaged: Damaged) -> None:
    got: list[Message] = []
    async with AsyncPullConsumer(namesrv=damaged.broker.namesrv) as consumer:
        await consumer.subscribe(damaged.topic)
        while len(got) < len(damaged.ids):
            got += await consumer.poll(20)
    assert_found(got, len(damaged.ids))


def test_a_lookup_finds_it(damaged: Damaged) -> None:
    with Admin(namesrv=damaged.broker.namesrv) as admin:
        found = [admin.query_by_id(damaged.topic, id_) for id_ in damaged.ids]
    assert_found([message for message in found if message is not None], len(damaged.ids))


@pytest.mark.parametrize("command", ["pull", "get"])
def test_the_command_line_says_so(damaged: Damaged, command: str) -> None:
    arguments = {
        "pull": ["pull", damaged.topic, "--offset", "0", "--count", "1", "-o", "jsonl"],
        "get": ["message", "query", damaged.topic, "--id", damaged.ids[0], "-o", "jsonl"],
    }
    protomq = [sys.executable, "-m", "protomq_cli"]
    environment = {"PROTOMQ_NAMESRV_ADDR": damaged.broker.namesrv, "PATH": "/usr/bin:/bin"}

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*protomq, *more], capture_output=True, text=True, env=environment, check=False
        )

    sound = run(*arguments[command])
    assert sound.returncode == 0, sound.stderr
    assert json.loads(sound.stdout)["tag"] == "TAG-3"
    arguments["pull"][3], arguments["get"][4] = "3", damaged.ids[3]
    failed = run(*arguments[command])
    assert failed.returncode != 0
    assert "is not what its producer wrote" in failed.stderr


def test_properties_whose_names_begin_alike_are_looked_up_whole(damaged: Damaged) -> None:
    """Serialisers write maps in orders of their own: the look-up answers with the octets of the log."""
    with Producer(namesrv=damaged.broker.namesrv) as producer:
        properties = {"a" * n: "b" for n in range(1, 9)}
        message = OutgoingMessage("many-properties", b"x", keys=("k",), properties=properties)
        sent = producer.send(message)
    with Admin(namesrv=damaged.broker.namesrv) as admin:
        (by_key,) = admin.query_by_key("many-properties", "k")
        by_id = admin.query_by_id("many-properties", sent.message_id)
    assert by_id is not None
    assert by_key.properties == by_id.properties == properties


@pytest.mark.parametrize("place", PLACES)
def test_a_broker_that_writes_a_record_anew_finds_it(damaged: Damaged, place: str) -> None:
    """By hand, without sizes and out of order: the CRC is compared before it is rewritten."""
    record = Record(
        body=b"BODY", keys=["KEY-", "MORE"], tag="TAG-", properties={"NAME": "VALU"},
        attributes=Attributes(sharding_key="SHAR", born_host="HOST"),
    )  # fmt: skip
    octets = record.SerializeToString()
    whole = octets + Record(crc32c=crc32c(octets)).SerializeToString()
    head = SendRequest(topic=damaged.topic, queue_id=0).SerializeToString()
    mark = PLACES[place]
    flipped = whole.replace(mark, bytes((mark[0] ^ 1,)) + mark[1:], 1)
    with pytest.raises(InvalidArgumentError, match="damaged on its way"):
        send_raw(damaged.broker, head, encode_record_field(flipped))


def test_what_is_the_brokers_is_refused_and_nothing_is_stored(damaged: Damaged) -> None:
    queue = MessageQueue(damaged.topic, "", 0)
    transit = Record(body=b"x", transit=Transit(origin_topic="other"))
    for record, error in (
        (transit, InvalidArgumentError),
        (Record(body=b"x", flags=1 << 9), InvalidArgumentError),
        (Record(body=b"x", flags=1 << 11), InvalidArgumentError),
        (Record(body=b"x", flags=1 << 4), InvalidArgumentError),
    ):
        request = SendRequest(topic=queue.topic, queue_id=0, records=[record])
        with pytest.raises(error):
            send_raw(damaged.broker, request.SerializeToString())
    template = RecordTemplate(damaged.topic, 78, 0)
    too_late = template.encode(b"later", 0, 5, due_time_ms=1 << 62)
    moved = template.encode(b"moved", 0, 5, front=transit.SerializeToString()[3:])
    for octets, error in ((too_late, IllegalDelayError), (moved, InvalidArgumentError)):
        tail = SendRequest(topic=queue.topic, queue_id=0, record_sizes=[len(octets)])
        with pytest.raises(error):
            send_raw(damaged.broker, encode_record_field(octets), tail.SerializeToString())
    with PullConsumer(namesrv=damaged.broker.namesrv) as consumer:
        (found,) = consumer.queues(damaged.topic)
        assert consumer.queue_range(found) == (0, len(damaged.ids))
