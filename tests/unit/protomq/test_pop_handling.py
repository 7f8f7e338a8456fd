"""Handlers of popped messages: when they are renewed, what is told of them, and what a refusal means. Steps, driven by the test."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from protomq import Reject, Retry, Suspend, _methods
from protomq._pop_handling import (
    AHEAD_SIZE_MAX_BYTES,
    Ahead,
    HandledCounts,
    Handling,
    HandlingOptions,
    Hold,
    Holds,
    hold_of,
)
from protomq._pop_steps import PopSteps, decode_pop_answer
from protomq._pull_logic import DELETED_AFTER_S
from protomq._steps import CallServer, Each, ForgetRoute, GetRoute, Pause
from protomq._types import BrokerAddress, DelayLevel, MessageQueue, Route
from protomq.errors import (
    ConfigurationError,
    StaleReceiptError,
    SystemBusyError,
    TopicNotFoundError,
)
from protomq.testing import FakeClock
from protomq.v1.group_service_pb2 import SendBackRequest, SendBackResponse
from protomq.v1.pop_service_pb2 import (
    AckRequest,
    AckResponse,
    ChangeInvisibleRequest,
    ChangeInvisibleResponse,
)

from .test_pop_steps import answer_of


class Brokers:
    """Two of them, which take everything; `stale` offsets are not held any more, `failures` are raised first."""

    def __init__(self, **options: Any) -> None:
        queues = tuple(MessageQueue("T", name, 1) for name in "ab")
        addresses = {name: BrokerAddress(name, "", f"{name}:1") for name in "ab"}
        self.route = Route("T", read_queues=queues, brokers=addresses)
        self.clock = FakeClock()
        steps = PopSteps("group", 5.0, self.clock.monotonic)
        wish = steps.wish(
            "T", 4, invisible_s=60.0, hold_s=0.0, queue=None, tags=(), sql=None, cel=None, module=None, fifo=False, start="earliest"
        )
        chosen = HandlingOptions(**{"invisible_s": 60.0, **options})
        self.handling = Handling(steps, wish, chosen, "handler", self.clock.monotonic)
        self.told: list[tuple[str, Any]] = []
        self.stale: dict[str, list[int]] = {"a": [], "b": []}
        self.failures: list[Exception] = []

    def run(self, steps: Any) -> Any:
        try:
            effect = next(steps)
            while True:
                try:
                    outcome = self._do(effect)
                except Exception as error:
                    effect = steps.throw(error)
                else:
                    effect = steps.send(outcome)
        except StopIteration as done:
            return done.value

    def _do(self, effect: Any) -> Any:
        match effect:
            case GetRoute():
                return self.route
            case Each(several):
                return [self.run(steps) for steps in several]
            case Pause(seconds):
                self.clock.advance(round(seconds * 1000))
            case ForgetRoute():
                return None
            case CallServer(address, method, payload, _):
                return self._call(address.broker_name, method, b"".join(payload))

    def _call(self, name: str, method: Any, payload: bytes) -> bytes:
        if self.failures:
            raise self.failures.pop(0)
        if method is _methods.SEND_BACK:
            self.told.append((name, SendBackRequest.FromString(payload)))
            back = SendBackResponse()
            back.results.add(dead_letter=True)
            return back.SerializeToString()
        classes: Any = {
            _methods.ACK: (AckRequest, AckResponse), _methods.CHANGE_INVISIBLE: (ChangeInvisibleRequest, ChangeInvisibleResponse),
        }[method]  # fmt: skip
        request = classes[0].FromString(payload)
        self.told.append((name, request))
        answer = classes[1]()
        named_count = 0
        for named in request.messages:
            named_count += sum(named.offset_runs[1::2])
            gone = [o for o in self.stale[name] if any(f <= o < f + n for f, n in zip(*[iter(named.offset_runs)] * 2, strict=True))]
            if gone:
                answer.stale_messages.add(receipt=named.receipt, offset_runs=[part for o in gone for part in (o, 1)])
                named_count -= len(gone)
        if not named_count:
            raise StaleReceiptError("nobody holds it")
        data: bytes = answer.SerializeToString()
        return data

    def begin(self, *names: str) -> list[Hold]:
        """Two messages of each broker, at offsets 40 and 41."""
        messages = [message for name in names for message in decode_pop_answer(answer_of([b"x", b"y"]), "T", name)]
        return [self.handling.holds.begin(message, self.clock.monotonic()) for message in messages]

    def renew(self, seconds: float) -> int:
        self.clock.advance(round(seconds * 1000))
        due_count = 0
        for name in "ab":
            if due := self.handling.holds.due(name, self.clock.monotonic()):
                self.run(self.handling.renew(due))
                due_count += len(due)
        return due_count

    def next_due_in_s(self) -> float:
        return min(self.handling.holds.next_due_in_s(name, self.clock.monotonic()) for name in "ab")


def test_messages_are_renewed_together_when_half_of_their_time_is_over_and_after_a_failure_soon() -> None:
    brokers = Brokers()
    holds = brokers.begin("a", "b")
    assert brokers.renew(29.9) == 0
    assert brokers.next_due_in_s() == pytest.approx(0.1)
    assert brokers.renew(0.1) == 4
    assert [(name, request.invisible_ms, len(request.messages)) for name, request in brokers.told] == [("a", 60_000, 2), ("b", 60_000, 2)]
    assert [hold.renewed_count for hold in holds] == [1] * 4
    brokers.handling.holds.end(holds[0])
    brokers.failures = [SystemBusyError("busy")] * 100  # of "a": beyond all tries
    assert brokers.renew(30) == 3
    assert [hold.renewed_count for hold in holds[1:]] == [1, 1, 1]
    brokers.failures.clear()
    assert brokers.next_due_in_s() == pytest.approx(9, abs=0.5)
    assert brokers.renew(9.5) == 3
    assert [hold.renewed_count for hold in holds] == [1, 2, 2, 2]
    assert not any(hold.is_lost for hold in holds)


def test_a_renewal_that_is_refused_is_told_to_the_handler_and_never_made_again(caplog: pytest.LogCaptureFixture) -> None:
    brokers = Brokers()
    first, second, third, fourth = brokers.begin("a", "b")
    brokers.stale = {"a": [40, 41], "b": [41]}  # of "a" all, of "b" one
    assert brokers.renew(30) == 4
    assert [hold.is_lost for hold in (first, second, third, fourth)] == [True, True, False, True]
    with pytest.raises(StaleReceiptError, match="somebody else has it"):
        fourth.check()
    third.check()
    assert brokers.renew(30) == 1
    brokers.handling.lost(first)
    assert brokers.handling.counts == (0, 0, 1)
    assert "is refused: it is done already, or somebody else has it by now. A handler calls no ack() of its own" in caplog.text


def test_a_message_whose_handler_has_returned_while_it_was_renewed_is_not_lost() -> None:
    brokers = Brokers()
    hold = brokers.begin("a")[0]
    brokers.handling.holds.end(hold)
    brokers.handling.holds.renewed([hold], [hold.message], 30.0)
    assert not hold.is_lost


def test_a_message_is_lost_when_its_time_is_up_before_whoever_renews_has_seen_it() -> None:
    brokers = Brokers()
    hold = brokers.begin("a")[0]
    assert brokers.renew(30) == 2
    brokers.clock.advance(59_999)
    hold.check()
    brokers.clock.advance(1)  # This process was stopped meanwhile, or cut off.
    with pytest.raises(StaleReceiptError, match=r"its time was up 0\.000 s ago"):
        hold.check()
    assert hold.is_lost
    assert brokers.renew(0) == 2  # The receipt was good: nobody had the message.
    hold.check()
    brokers.clock.advance(29_000)
    brokers.failures = [SystemBusyError("busy")] * 100
    assert brokers.renew(1) == 2
    brokers.clock.advance(30_000)
    assert hold.is_lost, "a renewal that failed is none"


def test_a_message_that_was_received_while_the_process_stood_still_is_lost() -> None:
    brokers = Brokers()
    asked_s = brokers.clock.monotonic()
    brokers.clock.advance(61_000)
    (message, _) = decode_pop_answer(answer_of([b"x", b"y"]), "T", "a")
    hold = brokers.handling.holds.begin(message, brokers.handling.handed_out_s(asked_s))
    assert hold.is_lost
    assert brokers.renew(0) == 1


def test_the_time_of_messages_goes_on_while_the_machine_sleeps() -> None:
    handling = Handling(PopSteps("group", 5.0), Brokers().handling.wish, HandlingOptions(), "handler")
    assert handling.holds.clock() == pytest.approx(time.clock_gettime(time.CLOCK_BOOTTIME), abs=60)


def test_behind_a_close_all_is_lost_and_nothing_is_told() -> None:
    brokers = Brokers()
    holds = brokers.begin("a")
    failure = brokers.handling.judged(Retry(delay=1.0))
    assert failure is not None
    brokers.handling.close()
    for hold in holds:
        assert hold.is_lost
        with pytest.raises(StaleReceiptError, match="its consumer was closed"):
            hold.check()
    brokers.handling.holds.renewed(holds, [], brokers.clock.monotonic())  # That was on its way.
    assert holds[0].is_lost
    for steps in (
        brokers.handling.renew(holds), brokers.handling.acknowledge(holds), brokers.handling.fail(holds[0], failure),
        brokers.handling.give_back(holds),
    ):  # fmt: skip
        brokers.run(steps)
    assert brokers.told == []
    assert brokers.handling.counts == (0, 0, 3)


def test_at_the_limit_a_message_is_renewed_no_more(caplog: pytest.LogCaptureFixture) -> None:
    brokers = Brokers(renew_limit_s=70.0)
    brokers.begin("a")
    assert [brokers.renew(30) for _ in range(4)] == [2, 2, 0, 0]
    assert brokers.next_due_in_s() == 30.0  # What would be received now is due then.
    assert sum("is renewed no more" in record.message for record in caplog.records) == 2


def test_an_end_is_counted_as_the_broker_takes_it() -> None:
    brokers = Brokers()
    brokers.stale["b"] = [40]
    brokers.run(brokers.handling.acknowledge(brokers.begin("a")))
    brokers.run(brokers.handling.acknowledge(brokers.begin("b")))
    assert brokers.handling.counts == HandledCounts(3, 0, 1)
    brokers.stale["b"] = [40, 41]
    brokers.run(brokers.handling.acknowledge(brokers.begin("a")))
    brokers.run(brokers.handling.acknowledge(brokers.begin("b")))
    assert brokers.handling.counts == HandledCounts(5, 0, 3)
    brokers.failures = [TopicNotFoundError("gone")] * 100
    brokers.run(brokers.handling.acknowledge(brokers.begin("a")))
    assert brokers.handling.counts == HandledCounts(5, 0, 5)


@pytest.mark.parametrize(
    ("outcome", "invisible_ms", "level", "error"),
    [
        (lambda handling: handling.raised(ValueError("no")), 30_000, 0, "ValueError: no"),  # the second delivery
        (lambda handling: handling.judged(Retry(delay=1.5, error="later")), 1_500, None, "later"),
        (lambda handling: handling.judged(Retry(delay=DelayLevel(2))), 5_000, 2, ""),
        (lambda handling: handling.judged(Retry), 30_000, 0, ""),
    ],
)
def test_a_message_that_fails_is_given_back_with_its_error(
    outcome: Callable[[Handling], Any], invisible_ms: int, level: int | None, error: str
) -> None:
    brokers = Brokers()
    hold = brokers.begin("a")[1]
    brokers.run(brokers.handling.fail(hold, outcome(brokers.handling)))
    ((_, request),) = brokers.told
    assert (request.invisible_ms, request.error) == (invisible_ms, error)
    assert (request.retry_level if request.HasField("retry_level") else None) == level
    assert brokers.handling.counts == (0, 1, 0)
    brokers.stale["a"] = [41]
    brokers.run(brokers.handling.fail(hold, outcome(brokers.handling)))
    assert brokers.handling.counts == (0, 1, 1)


def test_a_delay_that_no_broker_holds_is_the_longest_one_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    brokers = Brokers()
    results = Retry(delay=timedelta(days=1), error="tomorrow"), Suspend(86_400_000, "tomorrow")
    for hold, result in zip(brokers.begin("a"), results, strict=True):
        failure = brokers.handling.judged(result)
        assert failure is not None
        brokers.run(brokers.handling.fail(hold, failure))
    assert [(request.invisible_ms, request.error) for _, request in brokers.told] == [(12 * 3_600_000, "tomorrow")] * 2
    assert brokers.handling.counts == (0, 2, 0)
    assert sum("wants its message again after 86400 s" in record.message for record in caplog.records) == 1


def test_a_message_that_is_rejected_is_a_dead_letter_unless_somebody_else_has_it() -> None:
    brokers = Brokers()
    failure = brokers.handling.judged(Reject("never"))
    assert failure is not None
    hold = brokers.begin("a")[0]
    brokers.run(brokers.handling.fail(hold, failure))
    _, (_, back), (_, ack) = brokers.told
    assert (back.messages[0].error, back.messages[0].dead_letter, back.messages[0].queue_offset) == ("never", True, 40)
    assert list(ack.messages[0].offset_runs) == [40, 1]
    assert not back.messages[0].HasField("attempt")
    hold.message.queue.attempt = 5  # type: ignore[attr-defined]
    brokers.run(brokers.handling.fail(hold, failure))
    assert brokers.told[-2][1].messages[0].attempt == hold.message.attempt == 4
    brokers.stale["a"] = [40]
    brokers.told.clear()
    brokers.run(brokers.handling.fail(hold, failure))
    assert len(brokers.told) == 1
    assert brokers.handling.counts == (0, 2, 1)


def test_of_what_is_given_back_at_a_stop_only_what_a_handler_was_called_for_counts_as_a_delivery() -> None:
    brokers = Brokers()
    holds = brokers.begin("a")
    holds[1].is_begun = True
    brokers.run(brokers.handling.give_back(holds))
    assert [(told.unseen, told.invisible_ms, list(told.messages[0].offset_runs)) for _, told in brokers.told] == [
        (True, 0, [40, 1]),
        (False, 0, [41, 1]),
    ]


def test_nonsense_is_done_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    handling = Brokers().handling
    assert [handling.judged(42), handling.judged("?"), handling.judged(None)] == [None, None, None]
    assert sum("is no result" in record.message for record in caplog.records) == 1


def test_a_hold_is_found_while_its_handler_runs() -> None:
    brokers = Brokers()
    hold = brokers.begin("a")[0]
    assert hold_of(hold.message, [Brokers().handling, brokers.handling]) is hold
    brokers.handling.holds.end(hold)
    with pytest.raises(ConfigurationError, match="is not being handled"):
        hold_of(hold.message, [brokers.handling])


def test_what_another_try_does_not_change_is_raised_and_the_rest_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "protomq")
    handling = Brokers().handling
    for error in (SystemBusyError("busy"), SystemBusyError("busy"), None, None):
        handling.received(error)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    with pytest.raises(ConfigurationError):
        handling.received(ConfigurationError("wrong"))


def test_a_topic_that_is_missing_is_raised_at_the_start_and_later_when_it_stays_away() -> None:
    brokers, missing = Brokers(), TopicNotFoundError("gone")
    with pytest.raises(TopicNotFoundError):
        brokers.handling.received(missing)
    brokers.handling.received(None)
    brokers.handling.received(missing)
    brokers.clock.advance(round(DELETED_AFTER_S * 1000) - 1)
    brokers.handling.received(missing)
    brokers.handling.received(None)  # A broker that started, and was not known yet.
    brokers.handling.received(missing)
    brokers.clock.advance(round(DELETED_AFTER_S * 1000) + 1)
    with pytest.raises(TopicNotFoundError):
        brokers.handling.received(missing)




class Pool:
    """What waits for handlers, and the handlers that run; `body`: of all messages."""

    def __init__(self, body: bytes = b"x", **options: Any) -> None:
        self.options = HandlingOptions(**{"concurrency": 4, **options})
        self.ahead = Ahead(self.options)
        self.body = body
        self.running: list[Hold] = []
        self.waiting: list[Hold] = []

    def receive(self, now_s: float) -> int:
        count = self.ahead.room(now_s)
        for message in decode_pop_answer(answer_of([self.body] * count), "T", "a") if count else ():
            hold = Holds(self.options).begin(message, now_s)
            (self.running if self.ahead.begins(hold, stops=False) else self.waiting).append(hold)
        return count

    def end(self, count: int, now_s: float, *, stops: bool = False) -> None:
        for _ in range(count):
            self.running.pop(0)
            self.ahead.ended(now_s)
            following = self.ahead.next(now_s, stops=stops)
            if following is not None:
                self.waiting.remove(following)
                self.running.append(following)


def test_slow_handlers_get_no_message_ahead_and_quick_ones_a_quarter_second() -> None:
    pool = Pool()
    assert (pool.receive(0), pool.receive(0)) == (4, 0)
    pool.end(4, 10.0)
    assert pool.receive(10.0) == 8  # 4 in the last quarter of a second
    assert (len(pool.running), len(pool.waiting)) == (4, 4)
    assert pool.receive(10.1) == 0
    pool.end(2, 10.1)
    assert (len(pool.running), len(pool.waiting)) == (4, 2)
    assert pool.receive(10.1) == 4  # 6 have ended: half of that is waited for, then 6 wait again.
    pool.end(1, 20.0)  # They have become slow.
    assert (len(pool.waiting), pool.receive(20.0)) == (5, 0)


def test_what_waits_is_bounded_by_number_and_size() -> None:
    pool = Pool(ahead=10)
    counts = set()
    for turn in range(20):
        pool.end(len(pool.running), turn / 100)
        pool.receive(turn / 100)
        counts.add(len(pool.waiting))
    assert max(counts) == 10
    none = Pool(ahead=0)
    for turn in range(9):
        assert none.receive(turn / 100) == 4
        none.end(4, turn / 100)
    large = Pool(bytes(1 << 20), ahead=1_000)
    for turn in range(9):
        large.end(len(large.running), turn / 100)
        before = len(large.waiting)
        assert large.receive(turn / 100) == 0 or before < AHEAD_SIZE_MAX_BYTES >> 20


def test_what_is_lost_while_it_waits_is_not_handled_and_a_stop_leaves_the_rest() -> None:
    pool = Pool()
    pool.receive(0)
    pool.end(4, 1.0)
    pool.receive(1.0)
    lost, second, *others = pool.waiting
    lost.is_refused = True
    pool.waiting.remove(lost)
    pool.end(1, 1.0)
    assert second in pool.running
    pool.end(1, 1.0, stops=True)
    assert pool.ahead.busy_count == 3
    assert pool.ahead.clear() == others
    assert pool.ahead.clear() == []
