"""What goes back in which call, and what comes of an error."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq._push_backs import GATHER_S, MISSING_TRIES_MAX, PAUSE_MAX_S, Back, BackCall, BackLine
from protomq._retry import away_error
from protomq._types import MessageQueue
from protomq.errors import (
    ConnectFailedError,
    IllegalDelayError,
    InvalidArgumentError,
    OffsetOutOfRangeError,
    ProtomqError,
    TooManyError,
    TopicNotFoundError,
)
from tests.unit.protomq.test_push_state import message

A, B = MessageQueue("t", "a", 0), MessageQueue("t", "b", 0)


def back(offset: int, queue: MessageQueue = A, **fields: Any) -> Back:
    return Back(None, message(offset, queue), fields)


def line(*backs: Back) -> BackLine:
    made = BackLine()
    for one in backs:
        made.add(one)
    return made


def begin(made: BackLine, now_s: float = 0.0) -> BackCall:
    call = made.begin(now_s)
    assert call is not None
    return call


def places(call: BackCall) -> list[int]:
    return [one.message.queue_offset for one in call.backs]


def test_failures_of_a_broker_go_in_one_call_and_brokers_are_independent() -> None:
    made = line(*(back(i) for i in range(300)), back(0, B))
    first, second = begin(made), begin(made)
    assert (len(first.backs), first.broker_name) == (256, "a")
    assert (len(second.backs), second.broker_name) == (1, "b")
    assert made.begin(0.0) is None
    made.done(first, 0.0)
    assert made.begin(0.0) is None
    assert made.next_due_in_s(0.0) == GATHER_S
    assert places(begin(made, GATHER_S)) == list(range(256, 300))
    assert made.has_any({A})
    assert made.count == 45


def test_neighbours_stand_side_by_side_in_a_call_whatever_the_order_in_which_they_failed() -> None:
    other = MessageQueue("t", "a", 1)
    call = begin(line(back(3), back(9, other), back(2), back(8, other), back(1)))
    assert [(one.message.queue.queue_id, one.message.queue_offset) for one in call.backs] == [
        (0, 1), (0, 2), (0, 3), (1, 8), (1, 9)
    ]  # fmt: skip


def test_a_broker_that_is_away_is_asked_again_with_the_same_call_after_growing_pauses() -> None:
    made = line(back(1), back(2))
    call = begin(made)
    now_s, pauses = 0.0, []
    for _ in range(8):
        assert made.failed(call, ConnectFailedError("away"), now_s) == ()
        assert made.begin(now_s) is None
        pauses.append(made.next_due_in_s(now_s))
        now_s += pauses[-1]
        made.add(back(9))  # What fails meanwhile waits: the octets of the call stay.
        assert begin(made, now_s) is call
    assert pauses == [1, 2, 4, 8, 16, PAUSE_MAX_S, PAUSE_MAX_S, PAUSE_MAX_S]
    assert places(call) == [1, 2]
    made.done(call, now_s)
    assert places(begin(made, now_s + GATHER_S)) == [9] * 8


def test_more_is_gathered_behind_a_call_unless_the_next_one_is_full() -> None:
    made = line(back(0))
    call = begin(made)
    made.add(back(1))
    made.done(call, 10.0)
    assert made.begin(10.0) is None
    for offset in range(2, 257):
        made.add(back(offset))
    call = begin(made, 10.0)
    assert places(call) == list(range(1, 257))
    made.done(call, 10.0)
    made.add(back(300))
    assert made.begin(10.0 + GATHER_S / 2) is None
    call = begin(made, 10.0 + GATHER_S)
    assert places(call) == [300]
    made.done(call, 10.1)
    made.add(back(301))
    assert places(begin(made, 20.0)) == [301], "behind a pause it goes at once"


def test_of_messages_that_failed_alike_more_go_to_a_broker_that_takes_runs() -> None:
    made = line(*(back(i, error="e") for i in range(1500)), *(back(i, B, error="e") for i in range(300)))
    made.alike_brokers.add("a")
    many, few = begin(made), begin(made)
    assert (many.broker_name, places(many)) == ("a", list(range(1024)))
    assert (few.broker_name, len(few.backs)) == ("b", 256)
    for offset in range(1500, 2047):
        made.add(back(offset, error="e"))
    made.done(many, 0.0)
    assert made.begin(0.0) is None
    made.add(back(2047, error="e"))
    assert places(begin(made)) == list(range(1024, 2048)), "full, so it does not wait for more"


def full(*behind: Back) -> BackCall:
    """What goes of 256 messages that failed alike, and those behind them, to a broker that takes runs."""
    made = line(*(back(i, error="e") for i in range(256)), *behind)
    made.alike_brokers.add("a")
    return begin(made)


def test_what_failed_otherwise_goes_with_256_at_most() -> None:
    assert len(full(back(256, error="e")).backs) == 257
    assert len(full(back(256, error="f"), back(257, error="e")).backs) == 256
    assert len(full(back(256, MessageQueue("other", "a", 0), error="e")).backs) == 256
    made = line(back(0, error="f"), *(back(i, error="e") for i in range(1, 400)))
    made.alike_brokers.add("a")
    assert len(begin(made).backs) == 256


def test_a_large_call_that_is_refused_goes_again_in_small_ones_and_only_one_of_these_one_by_one() -> None:
    made = line(*(back(i, error="e") for i in range(600)), back(0, B, error="e"))
    made.alike_brokers.update("ab")
    error = InvalidArgumentError("message 300 has another id")
    call = begin(made)
    made.done(begin(made), 0.0)
    assert made.failed(call, error, 0.0) == ()
    sizes: list[int] = []
    refused: list[Back] = []
    for offset in range(600, 700):
        made.add(back(offset, error="e"))
    while (next_call := made.begin(0.0)) is not None:
        sizes.append(len(next_call.backs))
        if 300 in places(next_call):
            refused += made.failed(next_call, error, 0.0)
        else:
            made.done(next_call, 0.0)
    assert sizes == [256, 256, *[1] * 256, 88]
    assert [one.message.queue_offset for one in refused] == [300]
    assert places(begin(made, GATHER_S)) == list(range(600, 700))


def test_a_small_call_does_not_take_those_behind_it_that_may_go_in_a_large_one() -> None:
    other = MessageQueue("t", "a", 1)
    made = line(*(back(i, (A, other)[i % 2], error="e") for i in range(600)))
    made.alike_brokers.add("a")
    assert made.failed(begin(made), InvalidArgumentError("no"), 0.0) == ()
    made.drop({other})
    for offset in range(600, 1600):
        made.add(back(offset, error="e"))
    sizes = []
    for _ in range(3):
        call = begin(made)
        sizes.append(len(call.backs))
        made.done(call, -GATHER_S)
    assert sizes == [256, 44, 1000]


def test_a_call_that_is_refused_for_one_messages_sake_goes_again_one_by_one() -> None:
    made = line(*(back(i) for i in range(3)))
    error = OffsetOutOfRangeError("gone")
    assert made.failed(begin(made), error, 0.0) == ()
    refused: list[Back] = []
    for _ in range(3):
        call = begin(made)
        assert len(call.backs) == 1
        if places(call) == [1]:
            refused += made.failed(call, error, 0.0)
        else:
            made.done(call, 0.0)
    assert [one.message.queue_offset for one in refused] == [1]
    assert (made.refused_count, made.has_any()) == (1, False)
    made.add(back(7))
    made.add(back(8))
    assert places(begin(made, GATHER_S)) == [7, 8]


def test_a_message_whose_delay_is_illegal_goes_without_it() -> None:
    made = line(back(0, delay_level=99, error="e"))
    assert made.failed(begin(made), IllegalDelayError("no such level"), 0.0) == ()
    call = begin(made)
    assert call.backs[0].fields == {"error": "e"}
    (refused,) = made.failed(call, IllegalDelayError("still"), 0.0)
    assert refused.message.queue_offset == 0


def no_level(limit: int) -> IllegalDelayError:
    """What a broker says that has so many delay levels."""
    return IllegalDelayError("no such level", metadata={"field": "delay_level", "value": "99", "limit": str(limit)})


def test_a_level_beyond_the_last_counts_as_the_last() -> None:
    made = line(back(0, delay_level=99, error="e"))
    assert made.failed(begin(made), no_level(3), 0.0) == ()
    call = begin(made)
    assert call.backs[0].fields == {"delay_level": 3, "error": "e"}
    assert call.payload is None, "it is another request"
    assert made.failed(call, no_level(3), 0.0) == ()
    assert begin(made).backs[0].fields == {"error": "e"}


@pytest.mark.parametrize("count", [3, 600])
def test_messages_beyond_the_last_level_go_again_in_one_call(count: int) -> None:
    made = line(*(back(i, delay_level=5, error="e") for i in range(count)))
    made.alike_brokers.add("a")
    made.add(back(count, delay_level=2))
    made.add(back(count + 1))
    refused = begin(made)
    assert made.failed(refused, no_level(3), 0.0) == ()
    again = begin(made)
    assert places(again) == places(refused)
    assert [one.fields.get("delay_level") for one in again.backs[:count]] == [3] * count
    made.done(again, 0.0)
    if made.has_any():
        made.done(begin(made, GATHER_S), 0.0)
    assert not made.has_any()


@pytest.mark.parametrize("error", [TooManyError("full"), TopicNotFoundError("not yet")])
def test_what_may_pass_is_tried_again(error: ProtomqError) -> None:
    made = line(back(0))
    call, now_s = begin(made), 0.0
    for _ in range(MISSING_TRIES_MAX - 1):
        assert made.failed(call, error, now_s) == ()
        now_s += PAUSE_MAX_S
        assert begin(made, now_s) is call


def test_a_topic_that_stays_away_is_not_waited_for_for_ever() -> None:
    made = line(back(0))
    refused: list[Back] = []
    now_s = 0.0
    for _ in range(MISSING_TRIES_MAX):
        call = begin(made, now_s)
        refused += made.failed(call, TopicNotFoundError("deleted"), now_s)
        now_s += PAUSE_MAX_S
    assert [one.message.queue_offset for one in refused] == [0]


def test_brokers_that_are_away_are_waited_for_however_long_it_takes() -> None:
    made = line(back(0))
    call, now_s = begin(made), 0.0
    away = away_error(TopicNotFoundError("away", metadata={"missing_brokers": "a"}))
    for _ in range(2 * MISSING_TRIES_MAX):
        assert made.failed(call, away, now_s) == ()
        now_s += PAUSE_MAX_S
        assert begin(made, now_s) is call


def test_what_is_dropped_of_a_call_under_way_holds_up_no_other_when_its_topic_is_gone() -> None:
    made = line(back(0), *(back(i, MessageQueue("deleted", "a", 0)) for i in range(3)), back(1))
    call = begin(made)
    made.drop({MessageQueue("deleted", "a", 0)})
    assert made.failed(call, ConnectFailedError("away"), 0.0) == (), "it may have been done: the same again"
    assert begin(made, 1.0) is call
    assert made.failed(call, TopicNotFoundError("deleted"), 1.0) == ()
    again = begin(made, 3.0)
    assert (again is call, places(again)) == (False, [0, 1])
    made.drop({A})
    assert made.failed(again, ConnectFailedError("away"), 3.0) == ()
    assert not made.has_any()
    assert made.begin(100.0) is None


def test_what_is_dropped_is_not_given_back() -> None:
    made = line(back(0), back(0, B), back(1))
    made.drop({A})
    assert not made.has_any({A})
    assert begin(made).broker_name == "b"
    assert made.begin(0.0) is None


SCRIPTS = st.lists(st.sampled_from(["add", "add many", "begin", "done", "away", "refused", "later"]), max_size=80)


@given(SCRIPTS, st.booleans())
def test_each_message_is_taken_by_the_broker_or_refused_once(script: list[str], takes_runs: bool) -> None:
    made, now_s, added = BackLine(), 0.0, 0
    if takes_runs:
        made.alike_brokers.add("a")
    ended: list[int] = []
    call: BackCall | None = None

    def finish(one: BackCall, refuses: bool) -> None:
        if refuses:
            ended.extend(b.message.queue_offset for b in made.failed(one, OffsetOutOfRangeError("no"), now_s))
        else:
            made.done(one, now_s)
            ended.extend(places(one))

    for kind in script:
        if kind == "add":
            made.add(back(added))
            added += 1
        elif kind == "add many":
            for _ in range(200):
                made.add(back(added))
                added += 1
        elif kind == "later":
            now_s += 3.0
        elif kind == "begin" and call is None:
            call = made.begin(now_s)
        elif call is not None and kind == "away":
            assert made.failed(call, ConnectFailedError("away"), now_s) == ()
            call = None
        elif call is not None and kind in ("done", "refused"):
            finish(call, kind == "refused")
            call = None
        assert made.count == added - len(ended)
    if call is not None:
        finish(call, False)
    now_s += PAUSE_MAX_S
    while made.has_any():
        finish(begin(made, now_s), False)
        now_s += 2 * GATHER_S
    assert sorted(ended) == list(range(added))
