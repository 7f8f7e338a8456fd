"""What runs, what is done, what goes back: the push consumer's decisions, against a model that is simpler than they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protomq._message import Message
from protomq._push_options import PushOptions
from protomq._push_results import Failure, Listener, failure_of_text
from protomq._push_state import RUN_COUNT_MAX, PushState, Run
from protomq._types import MessageQueue
from protomq.v1.record_pb2 import Transit
from protomq.wire.record import FLAG_KIND_COPY, FLAG_TRANSIT, RecordTemplate, encode_varint

Q0, Q1 = MessageQueue("t", "b", 0), MessageQueue("t", "b", 1)
RETRIES = MessageQueue("%RETRY%g", "b", 0)
DEAD_LETTERS = MessageQueue("%DLQ%other", "b", 0)
FAILED = failure_of_text("no")
DEAD = Failure({"error": "no", "dead_letter": True})


def message(
    offset: int, queue: MessageQueue = Q0, body: bytes = b"x", origin: str = "", attempt: int = 1, consumed: str = ""
) -> Message:
    template = RecordTemplate(queue.topic, 7, 0)
    if not origin:
        return Message.from_record(template.encode(body, offset, 5), queue, offset)
    octets = Transit(origin_topic=origin, attempt=attempt, consumed_topic=consumed).SerializeToString()
    record = template.encode(body, offset, 5, flags=FLAG_KIND_COPY | FLAG_TRANSIT)
    at = record.index(b"\x3a" + bytes([len(queue.topic)]) + queue.topic.encode())
    record = record[:at] + b"\x32" + encode_varint(len(octets)) + octets + record[at:]
    return Message.from_record(record, queue, offset)


def messages(first: int, count: int, queue: MessageQueue = Q0) -> list[Message]:
    return [message(offset, queue) for offset in range(first, first + count)]


def listener(name: str = "f", batch_size: int | None = None) -> Listener:
    return Listener(lambda _: None, name, False, batch_size)


def state(batch_size: int | None = None, **options: Any) -> PushState:
    return PushState(PushOptions(group="g", **options), {"t": listener(batch_size=batch_size)})


def offsets(run: Run | None) -> list[int]:
    assert run is not None
    return [one.queue_offset for one in run.messages]


def finish(made: PushState, run: Run | None, now_s: float = 0.0) -> list[int]:
    """All of a run is done."""
    assert run is not None
    found = offsets(run)
    while run.messages:
        run.done.append(run.messages.popleft())
    made.ended(run, now_s)
    return found


def quick(made: PushState) -> None:
    """Listeners are known to be fast."""
    made.offer(Q1, messages(0, 1, Q1))
    finish(made, made.next_run(0.0))


def test_a_slow_message_holds_back_the_commit_and_never_the_others() -> None:
    made = state()
    made.offer(Q0, messages(10, 5))
    slow = made.next_run(0.0, 5)
    assert offsets(slow) == [10]
    for _ in range(4):
        finish(made, made.next_run(0.0, 5), 1.0)
    assert (made.lowest_open(Q0), made.count) == (10, 1)
    made.offer(Q0, messages(15, 1))
    finish(made, made.next_run(0.0), 1.0)
    assert made.lowest_open(Q0) == 10
    finish(made, slow)
    assert (made.lowest_open(Q0), made.count, made.size_bytes) == (None, 0, 0)


def runs_of_four(made: PushState, count: int) -> list[Run]:
    """Each with the next four messages of Q0, from 10 on."""
    quick(made)
    found = []
    for number in range(count):
        made.offer(Q0, messages(10 + 4 * number, 4))
        run = made.next_run(0.0)
        assert run is not None
        assert len(run.messages) == 4
        found.append(run)
    return found


def test_a_queue_that_goes_takes_no_message_along_behind_which_others_are_done() -> None:
    made = state()
    first, second, third = runs_of_four(made, 3)
    slow = first.messages.popleft()  # With its listener now.
    finish(made, second)
    third.done.append(third.messages.popleft())
    made.revoke([Q0])
    assert (offsets(first), offsets(third)) == ([11, 12, 13], [])
    assert made.next_run(0.0, 3) is None
    made.ended(third, 0.0)
    first.done.append(slow)
    finish(made, first)
    assert made.lowest_open(Q0) == 19


def test_a_queue_that_goes_takes_no_message_along_behind_which_others_are_with_listeners() -> None:
    made = state()
    first, second, third = runs_of_four(made, 3)
    slow, quick_one = first.messages.popleft(), second.messages.popleft()
    made.revoke([Q0])
    assert (offsets(first), offsets(second), offsets(third)) == ([11, 12, 13], [], []), "nobody has begun with the third run"
    second.done.append(quick_one)
    made.ended(second, 0.0)
    first.done.append(slow)
    finish(made, first)
    assert made.lowest_open(Q0) == 15


def test_of_a_queue_that_others_have_nothing_more_begins() -> None:
    made = state()
    first, second = runs_of_four(made, 2)
    finish(made, second)
    made.revoke([Q0])
    assert offsets(first) == [10, 11, 12, 13]
    made.drop([Q0])
    assert offsets(first) == []


def test_a_queue_that_goes_keeps_nothing_for_listeners_of_before_a_reset() -> None:
    made = state()
    quick(made)
    made.offer(Q0, messages(100, 4))
    before = made.next_run(0.0)
    assert before is not None
    before.messages.popleft()  # With its listener, which may finish it.
    made.drop([Q0])
    (run,) = runs_of_four(made, 1)
    run.messages.popleft()
    made.revoke([Q0])
    assert offsets(run) == [], "nothing is done behind what has begun"


def test_a_queue_that_goes_does_not_wait_for_listeners_of_before_a_reset_unless_in_order() -> None:
    for orderly in (False, True):
        made = state(orderly=orderly)
        made.offer(Q0, messages(100, 4))
        before = made.next_run(0.0)
        assert before is not None
        before.messages.popleft()
        assert made.is_running([Q0])
        made.drop([Q0])
        assert made.is_running([Q0]) is orderly
        assert made.is_running(), "a stop waits for it"


def test_what_was_done_before_goes_to_no_listener_again_and_is_known_until_all_before_it_is_done() -> None:
    made = state(broadcast=True)
    made.remember_done(Q0, {11, 12, 14, 16})
    assert made.done_behind(Q0) == {11, 12, 14, 16}
    made.offer(Q0, messages(10, 3))
    assert (made.lowest_open(Q0), made.done_behind(Q0), made.count) == (10, {11, 12, 14, 16}, 1)
    made.offer(Q0, messages(13, 5))
    run = made.next_run(0.0)
    assert offsets(run) == [10]
    assert made.done_behind(Q0) == {11, 12, 14, 16}
    finish(made, run)
    assert made.lowest_open(Q0) == 13
    left = []
    while (run := made.next_run(0.0)) is not None:
        left += finish(made, run)
    assert left == [13, 15, 17]
    assert (made.lowest_open(Q0), made.done_behind(Q0), made.count, made.size_bytes) == (None, set(), 0, 0)


@pytest.mark.parametrize("forget", [PushState.forget_done, lambda made, queue: made.drop([queue])])
def test_what_was_done_before_is_forgotten_with_its_queue_or_its_log(forget: Callable[[PushState, MessageQueue], None]) -> None:
    made = state(broadcast=True)
    made.remember_done(Q0, {1})
    forget(made, Q0)
    assert made.done_behind(Q0) == set()
    made.offer(Q0, messages(0, 2))
    assert made.count == 2


def test_there_is_room_for_what_the_bounds_leave() -> None:
    made = state(queue_count_max=10, queue_span_max=8, queue_size_max_bytes=1000, count_max=12, size_max_bytes=1500)
    assert (made.room(Q0), made.room(None)) == ((8, 1000), (12, 1500))
    made.offer(Q0, messages(0, 3))
    made.offer(Q1, messages(0, 4, Q1))
    size_bytes = messages(0, 1)[0].size_bytes
    assert made.room(Q0) == (5, 1000 - 3 * size_bytes)
    assert made.room(None) == (5, 1500 - 7 * size_bytes)
    slow, *others = [made.next_run(0.0, 3) for _ in range(3)]
    for run in others:
        finish(made, run)
    assert made.room(Q0)[0] + made.room(Q1)[0] == 5 + 5
    finish(made, slow)


def test_fast_listeners_get_long_runs_and_slow_ones_share_them_out() -> None:
    made = state()
    quick(made)
    made.offer(Q0, messages(0, 600))
    assert made.runs_wanted() == 3
    assert len(offsets(made.next_run(0.0, 20))) == RUN_COUNT_MAX
    slow = state()
    slow.offer(Q1, messages(0, 1, Q1))
    finish(slow, slow.next_run(0.0), 0.002)
    slow.offer(Q0, messages(0, 10))
    assert slow.runs_wanted() == 10
    assert len(offsets(slow.next_run(0.0, 10))) == 1
    assert len(offsets(slow.next_run(0.0, 1))) == 2


@pytest.mark.parametrize("orderly", [False, True])
def test_a_run_is_of_whole_batches_while_there_are_enough(orderly: bool) -> None:
    made = state(batch_size=3, orderly=orderly)
    made.offer(Q1, messages(0, 3, Q1))
    # 1.1 ms a message: within the time of a run a thread does four.
    finish(made, made.next_run(0.0), 0.0033)
    made.offer(Q0, messages(0, 11))
    counts = []
    while (run := made.next_run(0.0)) is not None:
        counts.append(run.count)
        finish(made, run, 0.0011 * run.count)
    assert sum(counts) == 11
    assert all(count % 3 == 0 for count in counts[:-1]), counts


def test_what_stands_behind_a_message_that_takes_long_goes_to_others() -> None:
    made = state()
    quick(made)
    made.offer(Q0, messages(0, 9))
    run = made.next_run(0.0)
    assert run is not None
    run.current = run.messages.popleft()
    assert made.tick(1.0) == []
    assert made.next_run(1.0) is None  # It may be about to go on.
    assert made.tick(1.1) == []
    assert made.runs_wanted() == 1
    stolen = made.next_run(1.1)
    assert offsets(stolen) == [5, 6, 7, 8]
    assert offsets(run) == [1, 2, 3, 4]
    finish(made, stolen, 1.2)
    while (more := made.next_run(1.2)) is not None:
        finish(made, more, 1.3)
    assert made.lowest_open(Q0) == 0
    run.done.append(run.current)
    assert made.lowest_open(Q0) is None
    made.ended(run, 2.0)
    assert not made.is_running()


def test_while_the_group_is_shut_no_listener_gets_a_message_and_then_they_go_on_in_order() -> None:
    made = state(broadcast=True)
    quick(made)
    made.offer(Q0, messages(0, 9))
    run = made.next_run(0.0)
    assert run is not None
    run.current = run.messages.popleft()
    made.offer(Q1, messages(1, 1, Q1))
    made.shut(True)
    assert (made.next_run(0.0), made.runs_wanted(), made.held()) == (None, 0, None)
    assert not run.messages, "what its listener has not begun waits, too"
    made.tick(1.0)
    made.tick(1.1)
    assert made.next_run(1.1) is None
    run.done.append(run.current)
    made.ended(run, 2.0)
    assert (made.count, made.waiting_count, made.next_run(2.0)) == (9, 9, None)
    made.shut(False)
    assert made.held() == set()
    assert made.runs_wanted() > 0
    found: list[int] = []
    while (more := made.next_run(3.0)) is not None:
        found += [offset for offset in finish(made, more, 3.0) if more.work.queue == Q0]
    assert (found, made.count) == (list(range(1, 9)), 0)


def test_a_message_that_takes_too_long_is_given_back_and_what_its_listener_says_counts_no_more() -> None:
    made = state(consume_timeout_s=900)
    made.offer(Q0, messages(0, 1))
    run = made.next_run(0.0)
    assert run is not None
    run.current = one = run.messages.popleft()
    assert made.tick(1.0) == []
    assert made.tick(900.9) == []
    (overdue,) = made.tick(901.0)
    assert (overdue.listener.name, list(overdue.messages), overdue.keeps) == ("f", [one], False)
    assert made.tick(2000.0) == []
    call = made.backs.begin(902.0)
    assert call is not None
    assert [back.fields["error"] for back in call.backs] == ["f was not done with it after 900 s"]
    made.backs.done(call, 0.0)
    made.given_back(call.backs)
    assert (made.lowest_open(Q0), made.done_count) == (None, 1)
    made.settled(run, [one], [FAILED], 903.0)
    run.done.append(one)
    made.ended(run, 903.0)
    assert (made.count, made.done_count, made.has_backs()) == (0, 1, False)


def test_a_message_that_takes_too_long_in_order_is_told_once_and_stays() -> None:
    made = state(consume_timeout_s=900, orderly=True)
    made.offer(Q0, messages(0, 2))
    for began_s in (0.0, 2_000.0):
        run = made.next_run(began_s)
        assert run is not None
        run.current = one = run.messages.popleft()
        assert made.tick(began_s + 1.0) == made.tick(began_s + 900.9) == []
        (overdue,) = made.tick(began_s + 901.0)
        assert (overdue.listener.name, list(overdue.messages), overdue.keeps) == ("f", [one], True)
        assert made.tick(began_s + 1_900.0) == []
        assert not made.has_backs()
        assert made.lowest_open(Q0) == one.queue_offset
        run.done.append(one)
        made.ended(run, began_s + 1_901.0)
    assert (made.count, made.done_count) == (0, 2), "what its listener says counts"


def test_a_failed_message_is_open_until_the_broker_has_it() -> None:
    made = state()
    made.offer(Q0, messages(0, 2))
    first, second = made.next_run(0.0, 2), made.next_run(0.0, 2)
    assert first is not None
    made.settled(first, [first.messages.popleft()], [FAILED], 0.0)
    made.ended(first, 0.0)
    finish(made, second)
    assert made.lowest_open(Q0) == 0
    call = made.backs.begin(0.0)
    assert call is not None
    assert made.has_backs({Q0})
    made.backs.done(call, 0.0)
    made.given_back(call.backs)
    assert made.lowest_open(Q0) is None
    assert not made.has_backs()


def test_what_is_full_is_not_taken_from_until_a_quarter_is_gone() -> None:
    for options in ({"queue_count_max": 8}, {"queue_size_max_bytes": 8 * message(0).size_bytes}):
        made = state(**options)
        made.offer(Q0, messages(0, 7))
        assert made.held() == set()
        made.offer(Q0, messages(7, 1))
        made.offer(Q1, messages(0, 2, Q1))
        assert made.held() == {Q0}
        finish(made, made.next_run(0.0, 10))
        finish(made, made.next_run(0.0, 10))
        assert not made.has_room_again()
        while made.waiting_count:
            finish(made, made.next_run(0.0, 10), 1.0)
        assert made.has_room_again()
        assert not made.has_room_again()
        assert made.held() == set()


def test_the_span_of_a_queue_has_a_limit_though_all_but_one_are_done() -> None:
    made = state(queue_span_max=10)
    made.offer(Q0, messages(0, 10))
    slow = made.next_run(0.0, 10)
    for _ in range(9):
        finish(made, made.next_run(0.0, 10), 1.0)
    assert (made.count, made.held()) == (1, {Q0})
    finish(made, slow, 1.0)
    assert made.held() == set()


def test_the_consumer_has_limits_of_its_own() -> None:
    for options in ({"count_max": 4}, {"size_max_bytes": 4 * message(0).size_bytes}):
        made = state(**options)
        made.offer(Q0, messages(0, 2))
        made.offer(Q1, messages(0, 2, Q1))
        assert made.held() is None
        finish(made, made.next_run(0.0, 4), 1.0)
        finish(made, made.next_run(0.0, 4), 1.0)
        assert made.has_room_again()
        assert made.held() == set()


def test_an_orderly_queue_has_one_run_and_goes_on_with_the_message_that_failed() -> None:
    made = state(orderly=True, suspend_ms=500)
    quick(made)
    made.offer(Q0, messages(0, 4))
    made.offer(Q1, messages(1, 1, Q1))
    run = made.next_run(0.0)
    assert run is not None
    assert offsets(run) == [0, 1, 2, 3]
    assert offsets(made.next_run(0.0)) == [1]
    assert made.next_run(0.0) is None
    run.done.append(run.messages.popleft())
    made.settled(run, [run.messages.popleft()], [FAILED], 10.0)
    assert not run.messages
    made.ended(run, 10.0)
    assert made.lowest_open(Q0) == 1
    assert made.next_run(10.4) is None
    assert made.next_due_in_s(10.4) == 0.5 + 10.0 - 10.4
    again = made.next_run(10.5)
    assert again is not None
    made.settled(again, [again.messages.popleft()], [Failure({"error": "e"}, 2000)], 11.0)
    made.ended(again, 11.0)
    assert made.next_run(12.9) is None
    assert [finish(made, made.next_run(13.0), 13.0) for _ in range(3)] == [[1], [2], [3]]
    assert made.lowest_open(Q0) is None


def test_an_orderly_message_is_a_dead_letter_when_its_attempts_are_spent_or_when_it_is_rejected() -> None:
    made = state(orderly=True, attempts_max=2)
    quick(made)
    made.offer(Q0, messages(0, 3))
    for now_s in (0.0, 5.0):
        run = made.next_run(now_s)
        assert run is not None
        made.settled(run, [run.messages.popleft()], [FAILED], now_s)
        if run.messages:
            assert offsets(run) == [1, 2]  # It goes on behind the dead letter.
            made.settled(run, [run.messages.popleft()], [DEAD], now_s)
            run.done.append(run.messages.popleft())
        made.ended(run, now_s)
    call = made.backs.begin(9.0)
    assert call is not None
    assert [(b.message.queue_offset, b.fields) for b in call.backs] == [
        (0, {"error": "no", "dead_letter": True, "attempt": 1}),
        (1, {"error": "no", "dead_letter": True}),
    ]
    assert made.failed_count == 3


def test_an_orderly_batch_goes_on_with_its_first_message_that_failed_whatever_was_said_behind_it() -> None:
    made = state(4, orderly=True, suspend_ms=500, attempts_max=3)
    quick(made)
    made.offer(Q0, messages(0, 7))

    def settle(now_s: float, failures: dict[int, Failure]) -> list[int]:
        run = made.next_run(now_s)
        assert run is not None
        batch = [run.messages.popleft() for _ in range(4)]
        made.settled(run, batch, [failures.get(one.queue_offset) for one in batch], now_s)
        assert not run.messages
        made.ended(run, now_s)
        return [one.queue_offset for one in batch]

    assert settle(0.0, {1: DEAD, 2: Failure({"error": "e"}, 2000), 3: FAILED}) == [0, 1, 2, 3]
    assert made.failed_count == 3
    assert (made.lowest_open(Q0), made.next_run(1.9)) == (1, None)
    call = made.backs.begin(1.0)
    assert call is not None
    assert [back.message.queue_offset for back in call.backs] == [1]
    made.backs.done(call, 1.0)
    made.given_back(call.backs)
    assert settle(2.0, {4: FAILED, 2: FAILED}) == [2, 3, 4, 5], "3 was done, and comes again behind 2"
    assert made.lowest_open(Q0) == 2
    assert settle(4.0, dict.fromkeys(range(2, 6), FAILED)) == [2, 3, 4, 5]
    call = made.backs.begin(4.0)
    assert call is not None
    assert [(one.message.queue_offset, one.fields["attempt"]) for one in call.backs] == [(2, 2)]
    assert made.next_run(4.4) is None
    run = made.next_run(4.5)
    assert run is not None
    assert [(one.queue_offset, one.attempt) for one in run.messages] == [(3, 2), (4, 2), (5, 1), (6, 0)]
    finish(made, run)
    assert made.count == 1


@pytest.mark.parametrize(
    ("queue", "attempt", "attempts", "given_back"),
    [(RETRIES, 1, [1, 2, 3], 3), (DEAD_LETTERS, 4, [4, 1, 2], 2)],
)
def test_an_orderly_message_says_how_often_it_was_handed_out_before_and_so_does_what_gives_it_back(
    queue: MessageQueue, attempt: int, attempts: list[int], given_back: int
) -> None:
    made = state(orderly=True)
    quick(made)
    made.offer(queue, [message(0, queue, origin="t", attempt=attempt)])
    seen = []
    for now_s in (0.0, 5.0, 10.0):
        run = made.next_run(now_s)
        assert run is not None
        one = run.messages.popleft()
        seen.append(one.attempt)
        made.settled(run, [one], [DEAD if now_s == 10.0 else FAILED], now_s)
        made.ended(run, now_s)
    assert seen == attempts
    call = made.backs.begin(20.0)
    assert call is not None
    assert [back.fields for back in call.backs] == [{"error": "no", "dead_letter": True, "attempt": given_back}]


def test_an_orderly_message_that_is_tried_again_says_why_its_last_try_failed() -> None:
    made = state(orderly=True)
    quick(made)
    made.offer(Q0, [message(0)])
    seen = []
    for now_s, failure in ((0.0, FAILED), (5.0, Failure({}, 10)), (10.0, failure_of_text("later"))):
        run = made.next_run(now_s)
        assert run is not None
        one = run.messages.popleft()
        seen.append((one.attempt, one.last_error))
        made.settled(run, [one], [failure], now_s)
        made.ended(run, now_s)
    run = made.next_run(20.0)
    assert run is not None
    seen.append((run.messages[0].attempt, run.messages[0].last_error))
    assert seen == [(0, ""), (1, "no"), (2, ""), (3, "later")]


def test_an_orderly_message_is_tried_as_often_as_its_group_says_unless_the_consumer_says_so_itself() -> None:
    def tries(limit: int | None, queue: MessageQueue = Q0, origin: str = "", **options: Any) -> int:
        made = state(orderly=True, **options)
        made.retry_count_max = limit
        made.offer(queue, [message(0, queue, origin=origin)])
        for number in range(1, 10):
            run = made.next_run(number * 10.0)
            assert run is not None
            made.settled(run, [run.messages.popleft()], [FAILED], number * 10.0)
            made.ended(run, number * 10.0)
            if made.backs.count:
                call = made.backs.begin(number * 10.0)
                assert call is not None
                assert call.backs[0].fields["dead_letter"]
                return number
        return 0

    assert tries(None) == 0
    assert [tries(0), tries(2)] == [1, 3]
    assert tries(2, attempts_max=5) == 5
    assert tries(2, RETRIES, "t") == 2, "it was handed out once before"
    assert tries(2, DEAD_LETTERS, "t") == 3, "to another group"


def test_a_damaged_message_is_given_back_without_a_number() -> None:
    made = state(orderly=True)
    quick(made)
    record = bytearray(message(0, body=b"x" * 8).record)
    record[4] ^= 1
    made.offer(Q0, [Message.from_record(bytes(record), Q0, 0)])
    for now_s, failure in ((0.0, FAILED), (5.0, DEAD)):
        run = made.next_run(now_s)
        assert run is not None
        assert run.messages[0].is_damaged
        made.settled(run, [run.messages.popleft()], [failure], now_s)
        made.ended(run, now_s)
    call = made.backs.begin(9.0)
    assert call is not None
    assert "attempt" not in call.backs[0].fields


def test_a_run_of_retries_is_of_one_listener() -> None:
    listeners = {"t": listener("a"), "u": listener("b")}
    made = PushState(PushOptions(group="g"), listeners)
    quick(made)
    made.offer(
        RETRIES, [message(i, RETRIES, origin=origin) for i, origin in enumerate(("t", "t", "u", "gone"))]
    )
    runs = [made.next_run(0.0), made.next_run(0.0), made.next_run(0.0)]
    assert [(run.listener.name, offsets(run)) for run in runs if run] == [
        ("a", [0, 1]), ("b", [2]), ("no listener", [3]),
    ]  # fmt: skip


@pytest.mark.parametrize("topic", ["%DLQ%other", "TRANS_CHECK_MAX_TIME_TOPIC"])
def test_a_retry_comes_to_the_listener_of_the_topic_in_which_its_group_had_the_message_and_to_no_other(topic: str) -> None:
    def name_of(consumed: str, *topics: str) -> str:
        made = PushState(PushOptions(group="g"), {one: listener(one) for one in topics})
        made.offer(RETRIES, [message(0, RETRIES, origin="t", consumed=consumed)])
        run = made.next_run(0.0)
        assert run is not None
        return run.listener.name

    assert name_of(topic, topic, "%DLQ%more", "t") == topic
    assert name_of("", topic, "t") == "t", "the group had it in the topic where it stood first"
    assert name_of(topic, "t") == "no listener", "another had it as a dead letter"
    assert name_of("", topic) == "no listener", "this consumer has no listener for t any more"


def test_a_suspended_consumer_begins_nothing_and_takes_nothing() -> None:
    made = state()
    made.offer(Q0, messages(0, 2))
    made.is_suspended = True
    assert (made.next_run(0.0), made.runs_wanted(), made.held()) == (None, 0, None)
    made.is_suspended = False
    assert offsets(made.next_run(0.0)) == [0]


@pytest.mark.parametrize("orderly", [False, True])
def test_what_a_run_has_not_begun_when_its_consumer_is_suspended_waits(orderly: bool) -> None:
    made = state(orderly=orderly)
    quick(made)
    made.offer(Q0, messages(0, 5))
    run = made.next_run(0.0)
    assert run is not None
    current = run.messages.popleft()
    made.suspend()
    assert (offsets(run), made.waiting_count) == ([], 4)
    run.done.append(current)
    made.ended(run, 1.0)
    made.resume()
    wanted = made.resumes_wanted
    assert wanted is not None
    made.resumed(wanted)
    assert offsets(made.next_run(1.0))[0] == 1


def test_runs_of_a_queue_wait_in_its_order_while_their_consumer_is_suspended() -> None:
    made = state()
    runs = runs_of_four(made, 4)
    for run in runs:
        run.done.append(run.messages.popleft())
    made.suspend()
    for run in runs:
        made.ended(run, 1.0)
    made.resume()
    made.resumed(made.resumes_wanted or 0)
    found: list[int] = []
    while (run_now := made.next_run(1.0)) is not None:
        found += finish(made, run_now, 1.0)
    assert found == [11, 12, 13, 15, 16, 17, 19, 20, 21, 23, 24, 25]


def test_who_is_resumed_begins_when_it_is_known_whether_the_offset_was_reset() -> None:
    made = state()
    made.resume()
    assert made.resumes_wanted is None, "it was not suspended"
    made.offer(Q0, messages(0, 1))
    made.is_suspended = True
    made.resume()
    assert (made.is_suspended, made.runs_wanted(), made.next_run(0.0), made.held()) == (False, 0, None, None)
    first = made.resumes_wanted
    assert first is not None
    made.is_suspended = True
    made.resume()
    made.resumed(first)
    assert made.next_run(0.0) is None, "it was suspended again since the look began"
    second = made.resumes_wanted
    assert second is not None
    made.resumed(second)
    assert (made.resumes_wanted, offsets(made.next_run(0.0))) == (None, [0])


def test_a_stop_lets_what_was_begun_end_and_leaves_the_rest_open() -> None:
    made = state()
    quick(made)
    made.offer(Q0, messages(0, 5))
    run = made.next_run(0.0)
    assert run is not None
    one = run.messages.popleft()
    made.stop()
    assert not run.messages
    assert made.next_run(0.0) is None
    run.done.append(one)
    made.ended(run, 0.0)
    assert (made.lowest_open(Q0), made.is_running()) == (1, False)


def test_of_a_queue_that_is_dropped_nothing_counts_any_more() -> None:
    made = state(queue_count_max=2)
    made.offer(Q0, messages(0, 3))
    made.offer(Q1, messages(0, 1, Q1))
    first, second = made.next_run(0.0, 9), made.next_run(0.0, 9)
    assert first is not None
    assert second is not None
    assert made.is_running({Q0})
    made.drop({Q0})
    assert (made.count, made.lowest_open(Q0), made.held()) == (1, None, set())
    for run in (first, second):
        if run.messages:
            made.settled(run, [run.messages.popleft()], [FAILED], 0.0)
        made.ended(run, 0.0)
    assert made.count == 1 - len(made.backs._brokers) or made.has_backs({Q1})
    made.offer(Q0, messages(7, 1))
    assert made.lowest_open(Q0) == 7


def test_an_orderly_queue_that_was_dropped_goes_on_when_the_listener_of_before_is_done() -> None:
    made = state(orderly=True, suspend_ms=500)
    made.offer(Q0, messages(0, 4))
    before = made.next_run(0.0)
    assert before is not None
    held = before.messages.popleft()
    for first in (7, 2, 8):
        made.drop({Q0})
        made.offer(Q0, messages(first, 2))
        assert (made.next_run(0.0, 9), made.runs_wanted()) == (None, 0), "it has a listener yet"
    made.offer(Q1, messages(0, 1, Q1))
    assert finish(made, made.next_run(0.0, 9)) == [0], "other queues do not wait"
    made.settled(before, [held], [FAILED], 1.0)
    made.ended(before, 1.0)
    assert (made.lowest_open(Q0), made.runs_wanted()) == (8, 1), "what it said counts no more"
    assert finish(made, made.next_run(1.0), 1.0) == [8]
    assert finish(made, made.next_run(1.0), 1.0) == [9]


def test_an_orderly_queue_that_comes_back_after_the_listener_of_before_was_done_does_not_wait() -> None:
    made = state(orderly=True)
    made.offer(Q0, messages(0, 1))
    before = made.next_run(0.0)
    made.drop({Q0})
    finish(made, before)
    made.offer(Q0, messages(5, 1))
    assert offsets(made.next_run(0.0)) == [5]


def test_without_order_a_queue_that_was_dropped_waits_for_no_listener_of_before() -> None:
    made = state()
    made.offer(Q0, messages(0, 1))
    assert offsets(made.next_run(0.0)) == [0]
    made.drop({Q0})
    made.offer(Q0, messages(5, 1))
    assert offsets(made.next_run(0.0)) == [5]


@st.composite
def scripts(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    kinds = st.sampled_from(["offer", "take", "one", "fail", "end", "back", "tick", "suspend"])
    return draw(st.lists(st.tuples(kinds, st.integers(0, 3), st.integers(1, 7)), max_size=60))


@settings(max_examples=150)
@given(scripts(), st.booleans())
def test_whatever_happens_the_commit_is_at_the_lowest_message_that_is_not_done(
    script: list[tuple[str, int, int]], orderly: bool
) -> None:
    """The model: a set of open offsets for each queue. What was handed to a listener twice at a time is found as well."""
    made = state(orderly=orderly, suspend_ms=1)
    queues = (Q0, Q1)
    ends = dict.fromkeys(queues, 0)
    open_offsets: dict[MessageQueue, set[int]] = {queue: set() for queue in queues}
    runs: list[Run] = []
    with_listeners: dict[int, tuple[MessageQueue, int]] = {}
    now_s = 0.0
    for kind, which, count in script:
        now_s += 0.01
        run = runs[which % len(runs)] if runs else None
        if kind == "offer":
            queue = queues[which % 2]
            made.offer(queue, messages(ends[queue], count, queue))
            open_offsets[queue] |= set(range(ends[queue], ends[queue] + count))
            ends[queue] += count
        elif kind == "take":
            if (new := made.next_run(now_s, count)) is not None:
                runs.append(new)
        elif kind in ("one", "fail") and run is not None and run.messages:
            one = run.messages.popleft()
            place = (one.queue, one.queue_offset)
            assert place not in with_listeners.values()
            if orderly:
                assert one.queue_offset == min(open_offsets[one.queue])
            if kind == "one":
                run.done.append(one)
                open_offsets[one.queue].discard(one.queue_offset)
            else:
                made.settled(run, [one], [FAILED], now_s)
        elif kind == "end" and run is not None:
            while run.messages:
                one = run.messages.popleft()
                run.done.append(one)
                open_offsets[one.queue].discard(one.queue_offset)
            made.ended(run, now_s)
            runs.remove(run)
        elif kind == "back" and (call := made.backs.begin(now_s)) is not None:
            made.backs.done(call, 0.0)
            made.given_back(call.backs)
            for back in call.backs:
                open_offsets[back.message.queue].discard(back.message.queue_offset)
        elif kind == "tick":
            made.tick(now_s)
        elif kind == "suspend":
            made.is_suspended = not made.is_suspended
        for queue in queues:
            assert made.lowest_open(queue) == min(open_offsets[queue], default=None)
        assert made.count == sum(map(len, open_offsets.values()))
    made.is_suspended = False
    for _ in range(200):
        now_s += 0.01
        for run in runs:
            finish(made, run, now_s)
        runs = [run] if (run := made.next_run(now_s)) is not None else []
        if (call := made.backs.begin(now_s)) is not None:
            made.backs.done(call, 0.0)
            made.given_back(call.backs)
    assert (made.count, made.size_bytes, made.waiting_count, made.is_running()) == (0, 0, 0, False)


def test_a_listener_that_assigns_bodies_changes_no_bound_and_no_commit() -> None:
    """It did: a consumer whose listener unpacked in place was full for ever, with nothing in it."""
    made = state(size_max_bytes=10_000, queue_size_max_bytes=10_000)
    for first in range(0, 100, 2):
        made.offer(Q0, [message(offset, body=b"x" * 5000) for offset in range(first, first + 2)])
        assert made.room(None).size_bytes < 0
        while (run := made.next_run(0.0)) is not None:
            for one in run.messages:
                one.body = b""
            finish(made, run)
        assert (made.count, made.size_bytes, made.held()) == (0, 0, set())
        assert made.room(Q0) == (made.options.queue_count_max, 10_000)


def test_in_order_each_try_gets_the_stored_body() -> None:
    made = state(batch_size=3, orderly=True)
    made.offer(Q0, messages(0, 3))
    run = made.next_run(0.0)
    assert run is not None
    batch = list(run.messages)
    run.messages.clear()
    for one in batch:
        one.body = b"unpacked"
    made.settled(run, batch, [None, FAILED, None], 0.0)
    made.ended(run, 0.0)
    again = made.next_run(100.0)
    assert again is not None
    assert [(one.queue_offset, one.body) for one in again.messages] == [(1, b"x"), (2, b"x")]
