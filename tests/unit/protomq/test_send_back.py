"""What is given back, in requests by broker; and where a message comes from."""

from __future__ import annotations

from collections.abc import Generator
from datetime import timedelta
from typing import Any

import pytest

from protomq import _methods
from protomq._message import Message
from protomq._retry import CALL
from protomq._send_back import (
    MESSAGES_MAX,
    BackPayload,
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
from protomq.errors import (
    ConfigurationError,
    InvalidArgumentError,
    RequestTimeoutError,
    WrongTypeError,
)
from protomq.v1.group_service_pb2 import FailedMessage, SendBackRequest, SendBackResponse
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


def answer_for(messages: list[Message], *, takes_alike: bool = True) -> bytes:
    results = [SentBackMessage(attempt=1, due_time_ms=1000)] * len(messages)
    return SendBackResponse(results=results, takes_alike=takes_alike).SerializeToString()


def messages_of(request: SendBackRequest) -> list[FailedMessage]:
    """What the runs of a request name."""
    ids = request.alike.message_ids.hex(" ", -20).upper().split()
    columns = (request.alike.queue_ids, request.alike.first_offsets, request.alike.message_counts)
    places = [(queue_id, first + row) for queue_id, first, count in zip(*columns, strict=True) for row in range(count)]
    found = []
    for (queue_id, queue_offset), message_id in zip(places, ids, strict=True):
        found.append(FailedMessage(queue_id=queue_id, queue_offset=queue_offset, message_id=message_id))
        found[-1].MergeFrom(request.alike.common)
    return found


def test_a_broker_that_takes_runs_is_sent_runs() -> None:
    brokers: set[str] = set()
    messages = [message("a", row) for row in (0, 1, 2, 5, 6)]

    def give_back() -> SendBackRequest:
        steps = send_back_steps("g", messages, {"error": "e", "delay_ms": 7}, lambda _: 9, 3.0, alike_brokers=brokers)
        results, (asked,) = run(steps, [answer_for(messages)])
        assert len(results) == 5
        return asked

    plain, runs = give_back(), give_back()
    assert brokers == {"a"}
    assert not plain.HasField("alike")
    assert not runs.messages
    assert runs.consumer_group == "g"
    assert runs.request_id not in (0, plain.request_id)
    assert list(runs.alike.queue_ids) == [0, 0]
    assert list(runs.alike.first_offsets) == [0, 5]
    assert list(runs.alike.message_counts) == [3, 2]
    assert runs.alike.message_ids.hex().upper() == "".join(each.message_id for each in messages)
    assert messages_of(runs) == list(plain.messages)
    other = SendBackRequest.FromString(BackPayload("g", "b", [(message("b", 0), {})], lambda _: 9, brokers).octets)
    assert len(other.messages) == 1, "each broker says it for itself"


def test_an_earlier_version_that_has_the_broker_s_name_now_is_sent_messages() -> None:
    brokers = {"a"}
    messages = [message("a", row) for row in range(3)]
    refused = InvalidArgumentError(
        "messages: are 1 to 256, not 0", field_violations=[("messages", "are 1 to 256, not 0")]
    )
    lost = RequestTimeoutError("no answer")
    steps = send_back_steps("g", messages, {}, lambda _: 9, 3.0, alike_brokers=brokers)
    results, asked = run(steps, [lost, refused, lost, answer_for(messages, takes_alike=False)])
    assert len(results) == 3
    assert [one.HasField("alike") for one in asked] == [True, True, False, False]
    assert asked[0] == asked[1]
    assert asked[2] == asked[3]
    assert messages_of(asked[0]) == list(asked[2].messages)
    assert asked[0].request_id != asked[2].request_id, "another request: what was done is done twice"
    assert not brokers
    steps = send_back_steps("g", messages, {}, lambda _: 9, 3.0, alike_brokers={"a"})
    wrong = InvalidArgumentError("other", field_violations=[("messages[0].message_id", "is not that")])
    with pytest.raises(InvalidArgumentError, match="other"):
        run(steps, [wrong])


def test_an_earlier_version_refuses_more_than_it_takes_and_is_asked_for_fewer() -> None:
    brokers = {"a"}
    failed: list[tuple[Message, dict[str, Any]]] = [(message("a", row), {}) for row in range(MESSAGES_MAX + 1)]
    refused = InvalidArgumentError("messages: are 1 to 256, not 0", field_violations=[("messages", "are 1 to 256, not 0")])
    payload = BackPayload("g", "a", failed, lambda _: 9, brokers)
    with pytest.raises(InvalidArgumentError, match="not 0"):
        run(payload.call_steps("t", 3.0, CALL), [refused])
    assert not brokers, "the next ones are named message by message"
    small = BackPayload("g", "a", failed[:MESSAGES_MAX], lambda _: 9, brokers)
    assert len(SendBackRequest.FromString(small.octets).messages) == MESSAGES_MAX


def test_messages_that_did_not_fail_alike_are_named_one_by_one() -> None:
    messages = [message("a", row) for row in range(3)]

    def is_alike(*errors: str, incarnations: tuple[int, int] = (9, 9)) -> bool:
        failed = [(each, {"error": error}) for each, error in zip(messages, errors, strict=True)]
        left = iter((incarnations[0], *incarnations, *incarnations))
        payload = BackPayload("g", "a", failed, lambda _: next(left, 9), {"a"})
        return SendBackRequest.FromString(payload.octets).HasField("alike")

    assert is_alike("e", "e", "e")
    assert not is_alike("e", "e", "f")
    messages[1] = message("a", 7)
    assert not is_alike("e", "e", "e", incarnations=(9, 8))


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
    assert error_text("ä" * 600) == "ä" * 256
    assert error_text("e" + "ä" * 600) == "e" + "ä" * 255, "no half character"
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
