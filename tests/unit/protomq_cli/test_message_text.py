from __future__ import annotations

import base64
import json

import pytest

from protomq._message import Message
from protomq._types import MessageQueue
from protomq.errors import CorruptMessageError
from protomq.wire.record import RecordTemplate, encode_front
from protomq_cli.message_text import Template, body_fields, message_row, time_text

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
        "topic": "flights", "broker": "broker-a", "queue_id": 0, "queue_offset": 47,
        "message_id": "00000000000000AB000000010000000000000007", "keys": ["N1"], "tag": "AA",
        "properties": {"a": "1"}, "sharding_key": "N1", "born_time": "2021-06-01T00:00:00.250Z", "store_time": "",
        "physical_offset": 0, "size_bytes": 7, "body": "größe",
    }  # fmt: skip
    json.dumps(row)


def test_a_body_that_is_no_text_is_base64_under_another_name() -> None:
    body = b"\xff\x00\xfe"
    assert body_fields(body) == {"body_base64": base64.b64encode(body).decode()}
    assert body_fields(b"") == {"body": ""}


def test_a_template_writes_the_parts_that_it_names() -> None:
    message = message_of(b"x", key="N1", tag="AA", properties={"a": "ü"})
    template = Template(r"%t/%b/%q@%o %k %g %v %s %i %h 100%%\t\\\n")
    assert template.write(message).decode() == (
        "flights/broker-a/0@47 N1 AA x 1 00000000000000AB000000010000000000000007 "
        '{"a": "ü"} 100%\t\\\n'
    )


def test_a_template_writes_bodies_byte_by_byte() -> None:
    assert Template("%v").write(message_of(b"\xff\x00")) == b"\xff\x00"


@pytest.mark.parametrize("text", ["%q %o", "%v", "nothing of it"])
def test_a_damaged_message_is_an_error_whatever_the_template_names(text: str) -> None:
    record = message_of(b"sound").record.replace(b"sound", b"noise")
    damaged = Message.from_record(record, QUEUE, 47)
    with pytest.raises(CorruptMessageError, match=r"flights/broker-a/0@47.*CRC-32C is wrong"):
        Template(text).write(damaged)


@pytest.mark.parametrize("text", ["%", "%x", "a%", "\\q", "\\"])
def test_a_template_with_a_letter_without_meaning_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="has no meaning"):
        Template(text)


def test_times_are_iso_8601_in_utc_with_milliseconds() -> None:
    assert time_text(BORN_MS) == "2021-06-01T00:00:00.250Z"
    assert time_text(1_622_505_600_007).endswith(".007Z")
    assert time_text(0) == ""
