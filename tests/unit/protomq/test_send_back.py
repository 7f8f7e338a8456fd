"""What is given back, in requests by broker; and where a message comes from."""

from __future__ import annotations

from collections.abc import Generator
from datetime import timedelta
from typing import Any

import pytest

from protomq import _methods
from protomq._message import Message
from protomq._send_back import (
    MESSAGES_MAX,
    SentBack,
    checked_messages,
    delay_fields,
    error_text,
    requests_for,
    send_back_steps,
)
from protomq._steps import CallServer, GetRoute
from protomq._transit import MessageOrigin
from protomq._types import BrokerAddress, DelayLevel, MessageQueue, Route
from protomq.errors import ConfigurationError, RequestTimeoutError, WrongTypeError
from protomq.v1.group_service_pb2 import SendBackRequest, SendBackResponse
from protomq.v1.group_service_pb2 import SentBack as SentBackMessage
from protomq.v1.record_pb2 import Transit
from protomq.wire.record import FLAG_KIND_COPY, FLAG_TRANSIT, RecordTemplate, encode_varint


def message(broker: str, offset: int, body: bytes = b"x", transit: Transit | None = None) -> Message:
    template = RecordTemplate("t", 7, 0)
    if transit is None:
        record = template.encode(body, offset, 5, key="k")
    else:
        octets = transit.SerializeToString()
        record = template.encode(body, offset, 5, flags=FLAG_KIND_COPY | FLAG_TRANSIT)
        at = record.index(b"\x3a\x01t")
        record = record[:at] + b"\x32" + encode_varint(len(octets)) + octets + record[at:]
    return Message.from_record(record, MessageQueue("t", broker, 0), offset)


def test_messages_go_to_their_brokers_as_many_at_a_time_as_fit() -> None:
    messages = [message("ab"[row % 2], row) for row in range(2 * MESSAGES_MAX + 2)]
    requests = requests_for(messages)
    assert [(one.broker_name, len(one.rows)) for one in requests] == [("a", 256), ("b", 256), ("a", 1), ("b", 1)]  # fmt: skip
    assert sorted(row for one in requests for row in one.rows) == list(range(len(messages)))
    large = [message("a", row, bytes(3 << 20)) for row in range(3)]
    assert [one.rows for one in requests_for(large)] == [[0], [1], [2]]


def run(steps: Generator[Any, Any, list[SentBack]], answers: list[Any]) -> tuple[list[SentBack], list[SendBackRequest]]:  # fmt: skip
    """The result, and the requests that were made; an answer that is an exception is raised."""
    asked = []
    address = BrokerAddress("a", "", "")
    route = Route("t", brokers={"a": address})
    try:
        effect = next(steps)
        while True:
            if isinstance(effect, GetRoute):
                effect = steps.send(route)
                continue
            if not isinstance(effect, CallServer):
                effect = steps.send(None)
                continue
            assert effect.method == _methods.SEND_BACK
            asked.append(SendBackRequest.FromString(b"".join(effect.payload)))
            answer = answers.pop(0)
            effect = steps.throw(answer) if isinstance(answer, Exception) else steps.send(answer)
    except StopIteration as done:
        return done.value, asked


def test_a_lost_answer_sends_the_same_octets_again() -> None:
    messages = [message("a", row) for row in range(2)]
    answer = SendBackResponse(
        results=[SentBackMessage(attempt=1, due_time_ms=1000), SentBackMessage(attempt=4, dead_letter=True)]
    ).SerializeToString()
    steps = send_back_steps("g", messages, {"error": "e"}, lambda _: 9, 3.0)
    results, asked = run(steps, [RequestTimeoutError("no answer"), answer])
    assert asked[0] == asked[1]
    assert asked[0].request_id
    assert [one.queue_offset for one in asked[0].messages] == [0, 1]
    first = asked[0].messages[0]
    assert (first.topic_incarnation, first.error, first.message_id) == (9, "e", messages[0].message_id)
    assert [(one.attempt, one.dead_letter) for one in results] == [(1, False), (4, True)]
    assert results[0].due_time is not None
    assert results[0].due_time.timestamp() == 1
    assert results[1].due_time is None
    other = run(send_back_steps("g", messages, {}, lambda _: 0, 3.0), [answer])[1]
    assert other[0].request_id != asked[0].request_id


def test_delays_are_those_of_a_send() -> None:
    assert delay_fields(None, dead_letter=False) == {}
    assert delay_fields(timedelta(minutes=1), dead_letter=False) == {"delay_ms": 60_000}
    assert delay_fields(0.5, dead_letter=False) == {"delay_ms": 500}
    assert delay_fields(DelayLevel(3), dead_letter=False) == {"delay_level": 3}
    assert delay_fields(None, dead_letter=True) == {"dead_letter": True}
    for delay in (-1, 41 * 86_400, DelayLevel(0)):
        with pytest.raises(ConfigurationError):
            delay_fields(delay, dead_letter=False)
    for wrong in ("1s", True, b""):
        with pytest.raises(WrongTypeError):
            delay_fields(wrong, dead_letter=False)


def test_what_a_message_failed_of_is_told_in_few_words() -> None:
    assert error_text(KeyError("x")) == "KeyError: 'x'"
    assert error_text("ä" * 600) == "ä" * 512
    assert error_text("\udcff") == "?"
    with pytest.raises(WrongTypeError):
        error_text(None)


def test_an_error_that_cannot_say_what_it_is_has_a_text_all_the_same() -> None:
    assert error_text(SpeechlessError()) == "SpeechlessError: <str() raised AttributeError>"


class SpeechlessError(Exception):
    """As of a library whose errors are made in an unusual way."""

    def __str__(self) -> str:
        return str(self.reason)  # type: ignore[attr-defined]


def test_a_message_or_several_are_taken() -> None:
    one = message("a", 0)
    assert checked_messages(one) == checked_messages([one]) == checked_messages(iter([one])) == [one]
    for wrong in (b"x", "x", 5, [one, b"x"]):
        with pytest.raises(WrongTypeError):
            checked_messages(wrong)


def test_a_message_says_where_it_comes_from() -> None:
    plain = message("a", 0)
    assert (plain.attempt, plain.last_error, plain.origin) == (0, "", None)
    transit = Transit(
        origin_topic="orders", origin_queue_id=2, origin_queue_offset=9, attempt=3, first_store_time_ms=77, last_error="no"
    )  # fmt: skip
    moved = message("a", 1, transit=transit)
    assert (moved.attempt, moved.last_error) == (3, "no")
    assert moved.origin == MessageOrigin("orders", 2, 9, 77)
    transit.origin_queue_offset = (1 << 64) - 1
    delayed = message("a", 1, transit=transit)
    assert delayed.origin is not None
    assert delayed.origin.queue_offset is None
