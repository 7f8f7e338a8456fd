"""A request whose messages are alike is read as a parser reads it, or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq.v1.group_service_pb2 import AlikeFailures as EncodedFailures
from protomq.v1.group_service_pb2 import FailedMessage, SendBackRequest
from protomq_broker import alike_failures
from protomq_broker.alike_failures import (
    ALIKE_MIN,
    MESSAGES_MAX,
    NAMED_MAX,
    messages_of,
    read_alike,
)

DELAYS = st.one_of(
    st.just({}),
    st.builds(lambda level: {"delay_level": level}, st.integers(0, 18)),
    st.builds(lambda delay_ms: {"delay_ms": delay_ms}, st.integers(-1, 1 << 40)),
    st.builds(lambda dead: {"dead_letter": dead}, st.booleans()),
)
FIELDS = st.builds(
    lambda fields, delay: {**fields, **delay},
    st.fixed_dictionaries(
        {"topic": st.text(max_size=8), "queue_id": st.integers(0, 300), "error": st.text(max_size=200)},
        optional={"topic_incarnation": st.integers(0, 1 << 62), "attempt": st.integers(0, 20)},
    ),
    DELAYS,
)
FIRST_OFFSETS = st.integers(0, 300) | st.integers(0, (1 << 63) - 41)


def request_of(
    fields: dict[str, Any], first: int, count: int, *, has_ids: bool = True, request_id: int = 9, group: str = "group"
) -> SendBackRequest:
    ids = [f"{number * 0x1234567:040X}" if has_ids else "" for number in range(count)]
    messages = [
        FailedMessage(**fields, queue_offset=first + row, message_id=message_id)
        for row, message_id in enumerate(ids)
    ]
    return SendBackRequest(consumer_group=group, messages=messages, request_id=request_id)


def agrees(payload: bytes) -> bool:
    """Whether the request was read by arrays; fails if a parser reads something else."""
    alike = read_alike(payload)
    if alike is None:
        return False
    request = SendBackRequest.FromString(payload)
    assert (alike.group, alike.has_request_id) == (request.consumer_group, bool(request.request_id))
    assert alike.message_count == len(request.messages)
    messages = iter(request.messages)
    for run in alike.runs:
        ours = list(islice(messages, run.message_count))
        assert run.first == ours[0]
        assert run.ids == b"".join(bytes.fromhex(each.message_id) for each in ours)
        assert run.queue_ids.tolist() == [each.queue_id for each in ours]
        assert run.queue_offsets.tolist() == [each.queue_offset for each in ours]
        for message in ours:
            message.queue_id, message.queue_offset = run.first.queue_id, run.first.queue_offset
            message.message_id = run.first.message_id
            assert message == run.first
            assert alike.said == said_of(message)
    assert not list(messages)
    assert {bool(run.ids) for run in alike.runs} in ({True}, {False})
    return True


def said_of(message: FailedMessage) -> bytes:
    """What it says of the failure, encoded."""
    said = FailedMessage()
    said.CopyFrom(message)
    for field in ("topic", "queue_id", "queue_offset", "topic_incarnation", "message_id"):
        said.ClearField(field)
    return said.SerializeToString()


@given(FIELDS, FIRST_OFFSETS, st.integers(1, 40), st.booleans(), st.sampled_from([0, 1, 1 << 63]), st.text(max_size=9))
def test_what_consumers_send_is_read_as_a_parser_reads_it(
    fields: dict[str, Any], first: int, count: int, has_ids: bool, request_id: int, group: str
) -> None:
    request = request_of(fields, first, count, has_ids=has_ids, request_id=request_id, group=group)
    is_read = agrees(request.SerializeToString())
    runs = {each.ByteSize() for each in request.messages}  # offsets get longer, never shorter again
    assert is_read is (count >= ALIKE_MIN * len(runs) and bool(group))


@given(
    FIELDS,
    st.lists(st.tuples(st.integers(0, 200), st.integers(100, 400), st.integers(1, 9)), min_size=1, max_size=12),
    st.booleans(),
    st.lists(st.tuples(st.integers(0), st.integers(0, 255)), max_size=2),
)
def test_runs_of_several_queues_are_read_as_a_parser_reads_them_or_not_at_all(
    fields: dict[str, Any], runs: list[tuple[int, int, int]], has_ids: bool, changes: list[tuple[int, int]]
) -> None:
    payload = bytearray(request_of_runs(fields, runs, has_ids=has_ids).SerializeToString())
    for at, octet in changes:
        payload[at % len(payload)] = octet
    is_read = agrees(bytes(payload))
    places = [(queue_id, first + row) for queue_id, first, count in runs for row in range(count)]
    assert changes or not is_read or len(set(places)) == len(places)
    if not changes and all(count >= 2 * ALIKE_MIN for _, _, count in runs) and len(set(places)) == len(places):
        assert is_read, "the offsets of a run get longer once at most"


def request_of_runs(
    fields: dict[str, Any], runs: Iterable[tuple[int, int, int]], *, has_ids: bool = True
) -> SendBackRequest:
    """Runs of (queue, first offset, messages)."""
    request = SendBackRequest(consumer_group="group", request_id=9)
    for queue_id, first, count in runs:
        request.MergeFrom(
            SendBackRequest(messages=request_of({**fields, "queue_id": queue_id}, first, count, has_ids=has_ids).messages)
        )
    return request


def test_runs_that_failed_in_another_way_or_share_a_message_or_are_short_are_left_to_the_parser() -> None:
    fields = {"topic": "topic", "error": "some"}
    assert agrees(request_of_runs(fields, [(1, 200, 5), (2, 300, 1), (1, 205, 4)]).SerializeToString())
    other = request_of_runs({**fields, "error": "else"}, [(2, 300, 5)])
    without_ids = request_of_runs(fields, [(2, 300, 5)], has_ids=False)
    for more in (other, without_ids):
        request = request_of_runs(fields, [(1, 200, 5)])
        request.messages.extend(more.messages)
        assert read_alike(request.SerializeToString()) is None
    assert read_alike(request_of_runs(fields, [(1, 200, 5), (2, 200, 5), (1, 204, 5)]).SerializeToString()) is None
    shrinking = [(1, offset, 1) for row in range(15) for offset in (200 + row, row)]
    assert read_alike(request_of_runs(fields, shrinking).SerializeToString()) is None


def test_messages_that_are_no_neighbours_are_read_as_those_are() -> None:
    fields = {"topic": "topic", "error": "some"}
    for runs in (
        [(1, 200 + 7 * row, 1) for row in range(30)],
        [(1, 900 - row, 1) for row in range(30)],
        [(row * 5 % 13, 200 + row, 1) for row in range(1, 13)],
        [(1, 200, 3), (2, 200, 2)],
        [(300, 200, 3), (16_000, 200, 2)],
        [(0, 0, 9), (0, 500, 4)],
        [(3, 0, 40)],
    ):
        assert agrees(request_of_runs(fields, runs).SerializeToString())
    assert read_alike(request_of_runs(fields, [(1, 200 + row % 20, 1) for row in range(21)]).SerializeToString()) is None


@given(FIELDS, st.integers(128, 1 << 20), st.lists(st.tuples(st.integers(0), st.integers(0, 255)), max_size=3))
def test_any_octets_are_read_as_a_parser_reads_them_or_not_at_all(
    fields: dict[str, Any], first: int, changes: list[tuple[int, int]]
) -> None:
    payload = bytearray(request_of(fields, first, 5).SerializeToString())
    for at, octet in changes:
        payload[at % len(payload)] = octet
    is_read = agrees(bytes(payload))
    assert is_read or changes or len({(first + row).bit_length() for row in range(5)}) > 1


@pytest.mark.parametrize(
    "change",
    [
        lambda messages: messages[2].MergeFrom(FailedMessage(error="else")),
        lambda messages: messages[3].MergeFrom(FailedMessage(queue_offset=200)),
        lambda messages: messages[1].MergeFrom(FailedMessage(topic="other")),
        lambda messages: messages[1].MergeFrom(FailedMessage(message_id="1" * 38 + " 1")),
        lambda messages: messages[1].MergeFrom(FailedMessage(message_id="x" * 40)),
        lambda messages: messages[1].MergeFrom(FailedMessage(attempt=2)),
        lambda messages: messages[4].ClearField("message_id"),
    ],
)
def test_messages_that_differ_are_left_to_the_parser(change: Any) -> None:
    request = request_of({"topic": "topic", "queue_id": 3, "error": "some", "attempt": 1}, 200, 5)
    assert agrees(request.SerializeToString())
    change(request.messages)
    assert read_alike(request.SerializeToString()) is None


def test_a_field_that_comes_twice_is_left_to_the_parser() -> None:
    message = FailedMessage(topic="topic", queue_offset=200).SerializeToString()
    doubled = message + FailedMessage(queue_offset=200).SerializeToString()
    payload = b"\x0a\x05group" + (b"\x12" + bytes([len(doubled)]) + doubled) * 4
    assert len(SendBackRequest.FromString(payload).messages) == 4
    assert read_alike(payload) is None


def test_the_last_offset_that_a_message_may_have_is_read_as_any_other() -> None:
    assert agrees(request_of({"topic": "topic"}, (1 << 63) - 5, 5).SerializeToString())


def test_a_request_with_too_many_messages_costs_no_more_than_a_full_one() -> None:
    fields = {"topic": "t", "queue_id": 1, "attempt": 1}
    many = request_of_runs(fields, [(1, 200 + 10 * row, 3) for row in range(10 * MESSAGES_MAX)])
    with mock.patch.object(alike_failures, "_read_run", wraps=alike_failures._read_run) as read_run:
        assert read_alike(many.SerializeToString()) is None
    assert read_run.call_count <= MESSAGES_MAX // 3 + 1
    assert read_alike(request_of(fields, 200, MESSAGES_MAX + 1).SerializeToString()) is None
    full = read_alike(request_of(fields, 200, MESSAGES_MAX).SerializeToString())
    assert full is not None
    assert full.message_count == MESSAGES_MAX


def named(runs: Iterable[tuple[int, int, int]], ids: bytes = b"", **common: Any) -> SendBackRequest:
    """A request that names the runs itself: (queue, first offset, count)."""
    queue_ids, firsts, counts = zip(*runs, strict=True)
    failures = EncodedFailures(
        common=FailedMessage(**common), queue_ids=queue_ids, first_offsets=firsts, message_counts=counts, message_ids=ids
    )
    return SendBackRequest(consumer_group="group", request_id=9, alike=failures)


@given(
    FIELDS,
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99) | st.just(1 << 62), st.integers(-1, 300)), min_size=1, max_size=9),
    st.booleans(),
)
def test_runs_that_a_request_names_are_its_messages(
    fields: dict[str, Any], runs: list[tuple[int, int, int]], has_ids: bool
) -> None:
    common = {name: value for name, value in fields.items() if name != "queue_id"}
    places = [(queue_id, first + row) for queue_id, first, count in runs for row in range(count)]
    ids = [f"{number * 0x1234567:040X}" if has_ids else "" for number in range(len(places))]
    request = named(runs, bytes.fromhex("".join(ids)), **common)
    alike = read_alike(request.SerializeToString())
    if any(count < 1 or first >= 1 << 62 for _, first, count in runs) or len(places) > NAMED_MAX:
        assert alike is None
        with pytest.raises(ValueError, match="has "):
            messages_of(request)
        return
    assert messages_of(request) == [
        FailedMessage(**common, queue_id=queue_id, queue_offset=queue_offset, message_id=message_id)
        for (queue_id, queue_offset), message_id in zip(places, ids, strict=True)
    ]
    if len(set(places)) < len(places):
        assert alike is None, "said by the other way"
        return
    assert alike is not None
    assert (alike.group, alike.has_request_id, alike.message_count) == ("group", True, len(places))
    (run,) = alike.runs
    assert run.first == FailedMessage(**common)
    assert list(zip(run.queue_ids.tolist(), run.queue_offsets.tolist(), strict=True)) == places
    assert run.ids == bytes.fromhex("".join(ids))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda request: request.alike.queue_ids.append(1), "a queue, a first offset and a number"),
        (lambda request: request.alike.ClearField("message_counts"), "one run at least"),
        (lambda request: request.alike.message_counts.__setitem__(0, 1025), "has not 1 to 1024 messages"),
        (lambda request: request.alike.queue_ids.__setitem__(0, -1), "a queue or an offset that none can be"),
        (lambda request: request.alike.first_offsets.__setitem__(0, -1), "a queue or an offset that none can be"),
        (lambda request: setattr(request.alike, "message_ids", bytes(41)), "an id of 20 octets"),
        (lambda request: setattr(request.alike.common, "queue_id", 1), "in common"),
        (lambda request: setattr(request.alike.common, "queue_offset", 1), "in common"),
        (lambda request: setattr(request.alike.common, "message_id", "0" * 40), "in common"),
        (lambda request: request.messages.add(topic="topic"), "stands beside messages"),
    ],
)
def test_runs_that_cannot_be_are_told(change: Any, text: str) -> None:
    request = named([(0, 7, 2)], bytes(40), topic="topic")
    assert read_alike(request.SerializeToString()) is not None
    change(request)
    assert read_alike(request.SerializeToString()) is None
    with pytest.raises(ValueError, match=text):
        messages_of(request)
