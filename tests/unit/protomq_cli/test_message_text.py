from __future__ import annotations

import base64
import json

import pytest

from protomq._message import Message
from protomq._types import MessageQueue
from protomq.errors import CorruptMessageError
from protomq.v1.record_pb2 import Transit
from protomq.wire.record import FLAG_KIND_COPY, FLAG_TRANSIT, RecordTemplate, encode_front
from protomq_cli.message_text import Template, body_fields, message_row, origin_text, time_text

QUEUE = MessageQueue("flights", "broker-a", 3)
BORN_MS = 1_622_505_600_250


def message_of(
    body: bytes, *, key: str = "", tag: str = "", properties: dict[str, str] | None = None
) -> Message:
    front = encode_front([key] if key else [], tag, properties, sharding_key=key)
    template = RecordTemplate("flights", producer_id=0xAB, producer_epoch=1)
    record = template.encode(body, 7, BORN_MS, key=key, tag=tag, front=front)
    return Message.from_record(record, QUEUE, 47)


def test_a_row_has_all_that_there_is_to_know() -> None:
    row = message_row(message_of("größe".encode(), key="N1", tag="AA", properties={"a": "1"}))
    assert row == {
        "topic": "flights", "broker": "broker-a", "queue_id": 3, "queue_offset": 47,
        "message_id": "00000000000000AB000000010000000000000007", "keys": ["N1"], "tag": "AA",
        "properties": {"a": "1"}, "sharding_key": "N1", "born_time": "2021-06-01T00:00:00.250Z", "store_time": "",
        "physical_offset": 0, "size_bytes": 7, "body": "größe",
    }  # fmt: skip
    json.dumps(row)


def test_a_born_time_in_microseconds_has_a_text_too() -> None:
    record = RecordTemplate("flights", 7, 0).encode(b"x", 1, BORN_MS * 1000)
    row = message_row(Message.from_record(record, QUEUE, 1))
    assert row["born_time"] == "9999-12-31T23:59:59.999Z"


def moved(**transit: object) -> Message:
    queue = MessageQueue("%DLQ%g", "broker-a", 0)
    record = RecordTemplate(queue.topic, 7, 0).encode(b"x", 1, 5, flags=FLAG_KIND_COPY | FLAG_TRANSIT)
    octets = Transit(**transit).SerializeToString()  # type: ignore[arg-type]
    at = record.index(b"\x3a\x06" + queue.topic.encode())
    return Message.from_record(record[:at] + b"\x32" + bytes([len(octets)]) + octets + record[at:], queue, 1)


def test_a_message_that_was_moved_says_where_it_came_from_and_why() -> None:
    message = moved(origin_topic="orders", origin_queue_id=3, origin_queue_offset=17, attempt=2, last_error="no account")
    row = message_row(message)
    assert row["origin"] == {"topic": "orders", "queue_id": 3, "queue_offset": 17}
    assert (row["attempt"], row["last_error"], origin_text(row)) == (2, "no account", "orders/3@17")
    assert "replayed_group" not in row
    assert Template("%O|%a|%e").write(message) == b"orders/3@17|2|no account"
    assert message_row(moved(origin_topic="orders", replayed_group="g"))["replayed_group"] == "g"


def test_of_a_message_that_was_in_no_queue_only_the_queue_is_said_where_it_was_to_come() -> None:
    row = message_row(moved(origin_topic="orders", origin_queue_id=3, origin_queue_offset=(1 << 64) - 1))
    assert row["origin"] == {"topic": "orders", "queue_id": 3}
    assert origin_text(row) == "orders/3"
    assert {"attempt", "last_error"}.isdisjoint(row)


def test_a_message_that_was_not_moved_has_no_origin() -> None:
    plain = message_of(b"x")
    assert {"attempt", "last_error", "origin", "replayed_group"}.isdisjoint(message_row(plain))
    assert Template("%O|%a|%e").write(plain) == b"|0|"


def test_a_body_that_is_no_text_is_base64_under_another_name() -> None:
    body = b"\xff\x00\xfe"
    assert body_fields(body) == {"body_base64": base64.b64encode(body).decode()}
    assert body_fields(b"") == {"body": ""}


def test_a_template_writes_the_parts_that_it_names() -> None:
    message = message_of(b"x", key="N1", tag="AA", properties={"a": "ü"})
    template = Template(r"%t/%b/%q@%o %k %g %v %s %i %h 100%%\t\\\n")
    assert template.write(message).decode() == (
        "flights/broker-a/3@47 N1 AA x 1 00000000000000AB000000010000000000000007 "
        '{"a": "ü"} 100%\t\\\n'
    )


def test_a_template_writes_bodies_byte_by_byte() -> None:
    assert Template("%v").write(message_of(b"\xff\x00")) == b"\xff\x00"


@pytest.mark.parametrize("text", ["%q %o", "%v", "nothing of it"])
def test_a_damaged_message_is_an_error_whatever_the_template_names(text: str) -> None:
    record = message_of(b"sound").record.replace(b"sound", b"noise")
    damaged = Message.from_record(record, QUEUE, 47)
    with pytest.raises(CorruptMessageError, match=r"flights/broker-a/3@47.*CRC-32C is wrong"):
        Template(text).write(damaged)


@pytest.mark.parametrize("text", ["%", "%x", "a%", "\\q", "\\"])
def test_a_template_with_a_letter_without_meaning_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="has no meaning"):
        Template(text)


def test_times_are_iso_8601_in_utc_with_milliseconds() -> None:
    assert time_text(BORN_MS) == "2021-06-01T00:00:00.250Z"
    assert time_text(1_622_505_600_007).endswith(".007Z")
    assert time_text(0) == ""
