"""What `consume` does while the queues of its group come and go. The consumer here is a list of what happens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from threading import Barrier
from types import SimpleNamespace
from typing import Any, cast

import pytest

from protomq import Message, MessageQueue, PullConsumer, QueueRange
from protomq.errors import (
    InternalError,
    MemberUnknownError,
    ProtomqError,
    RequestTimeoutError,
    TopicRecreatedError,
    TransportError,
)
from protomq_cli import following
from protomq_cli.exits import CliError
from protomq_cli.following import Follower, Span, TopicCheck
from protomq_cli.offsets import parse_offsets

ONE, OTHER = (MessageQueue("flights", "a", queue_id) for queue_id in (0, 1))
ELSEWHERE = MessageQueue("flights", "b", 2)


class FakeMessage:
    """As much of a message as `consume` looks at."""

    def __init__(self, queue: MessageQueue, queue_offset: int) -> None:
        self.queue = queue
        self.queue_offset = queue_offset


class FakeConsumer:
    """Each poll makes the next thing happen. A poll takes a second."""

    group = "readers"

    def __init__(self, *polls: Callable[[FakeConsumer], None]) -> None:
        self._polls = list(polls)
        self.follower: Follower
        self.positions: dict[MessageQueue, int] = {}
        self.stored: dict[MessageQueue, int] = {}
        self.commit_error: ProtomqError | None = None
        self.look_up_error: ProtomqError | None = None
        self.now_s = 0.0
        self._ready: list[FakeMessage] = []

    def come(self, *queues: MessageQueue) -> None:
        for queue in queues:
            self.positions[queue] = self.stored.get(queue, 0)
        self.follower.on_assigned(queues)

    def go(self, *queues: MessageQueue) -> None:
        self.follower.on_revoked(queues)
        for queue in queues:
            del self.positions[queue]

    def lose(self, *queues: MessageQueue) -> None:
        for queue in queues:
            del self.positions[queue]
        self.follower.on_lost(queues)

    def give(self, queue: MessageQueue, count: int) -> None:
        first = self.positions[queue]
        self._ready += [FakeMessage(queue, first + i) for i in range(count)]
        self.positions[queue] += count

    def pass_over(self, queue: MessageQueue, count: int) -> None:
        """Messages that the filter leaves out."""
        self.positions[queue] += count

    def assignment(self) -> tuple[MessageQueue, ...]:
        return tuple(self.positions)

    def position(self, queue: MessageQueue) -> int:
        return self.positions[queue]

    def seek(self, queue: MessageQueue, queue_offset: int) -> None:
        self.positions[queue] = queue_offset

    def poll(self, timeout_s: float, max_messages: int) -> Iterable[FakeMessage]:
        assert self._polls, "it polls though it should have ended"
        self.now_s += 1.0
        self._polls.pop(0)(self)
        ready, self._ready = self._ready, []
        return ready

    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    def commit(self, offsets: Mapping[MessageQueue, int]) -> None:
        if self.commit_error is not None:
            raise self.commit_error
        self.stored.update(offsets)

    def committed(self, queue: MessageQueue) -> int | None:
        if self.look_up_error is not None:
            raise self.look_up_error
        return self.stored.get(queue)


def follow(
    consumer: FakeConsumer,
    spans: Mapping[MessageQueue, Span],
    *,
    has_end: bool = True,
    count_max: int = 0,
    is_filtered: bool = False,
    takes_s: float = 0.0,
    check: Callable[[], Collection[str]] = lambda: (),
) -> list[tuple[int, int]]:
    """Runs until it ends. Returns the queue id and offset of each message that was shown."""
    shown: list[tuple[int, int]] = []

    def show(message: Message) -> None:
        shown.append((message.queue.queue_id, message.queue_offset))
        consumer.now_s += takes_s

    follower = consumer.follower = Follower(
        show, lambda: None, is_filtered=is_filtered, check=check, clock=lambda: consumer.now_s, wait=consumer.wait
    )
    follower.run(
        cast(PullConsumer, consumer), lambda: None, spans, has_end=has_end, count_max=count_max
    )
    return shown


def nothing(_: FakeConsumer) -> None:
    """A poll in which nothing happens."""


def up_to(end: int, begin: int | None = None, end_offset: int | None = None) -> Span:
    return Span(begin, end, 0, end if end_offset is None else end_offset)


def test_what_is_left_of_a_batch_that_takes_long_is_another_members_if_its_queue_is() -> None:
    """It was stopped (SIGSTOP), or its reader was, in the middle of a batch."""

    def give_both(it: FakeConsumer) -> None:
        it.give(ONE, 3)
        it.give(OTHER, 2)

    def come_back(it: FakeConsumer) -> None:
        it.stored[ONE] = 3  # The other one has consumed it.
        it.come(ONE)

    polls = (lambda it: it.lose(ONE), lambda it: it.give(OTHER, 2), come_back, lambda it: it.give(OTHER, 1))
    consumer = FakeConsumer(lambda it: it.come(ONE, OTHER), give_both, *polls)
    assert follow(consumer, {ONE: up_to(3), OTHER: up_to(2)}, takes_s=30.0) == [(0, 0), (1, 0), (1, 1)]


def test_of_a_topic_that_was_made_again_nothing_is_shown_and_no_offset_of_the_old_one_is_committed() -> None:
    def check() -> Collection[str]:
        if consumer.now_s > 2.0:
            raise TopicRecreatedError("another one")
        return ()

    def come_and_give(it: FakeConsumer) -> None:
        it.come(OTHER)
        it.give(OTHER, 9)

    consumer = FakeConsumer(lambda it: it.come(ONE), lambda it: it.give(ONE, 1), come_and_give)
    with pytest.raises(TopicRecreatedError):
        follow(consumer, {queue: up_to(9, begin=5) for queue in (ONE, OTHER)}, check=check)
    assert consumer.stored == {ONE: 6}


def come_with_one_message_of_each(it: FakeConsumer) -> None:
    it.come(ONE, ELSEWHERE)
    it.give(ONE, 1)
    it.give(ELSEWHERE, 1)


def test_what_a_broker_gives_that_does_not_say_which_topic_it_has_is_shown_once_it_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers: list[Collection[str]] = [{"b"}, {"b"}, ()]
    give = [lambda it: it.give(ELSEWHERE, 3 - it.positions[ELSEWHERE])] * 2
    consumer = FakeConsumer(come_with_one_message_of_each, nothing, *give)
    shown = follow(consumer, {}, has_end=False, count_max=4, check=lambda: answers.pop(0))
    assert shown == [(0, 0), (2, 0), (2, 1), (2, 2)]
    assert not answers
    assert consumer.stored == {ONE: 1, ELSEWHERE: 3}
    assert capsys.readouterr().err.count("broker b does not say whether it has the same topic still") == 1


def test_nothing_of_it_is_shown_if_it_says_that_it_has_another_one() -> None:
    def check() -> Collection[str]:
        if consumer.now_s > 2.0:
            raise TopicRecreatedError("another one")
        return {"b"}

    shown: list[int] = []
    consumer = FakeConsumer(come_with_one_message_of_each, lambda it: it.give(ELSEWHERE, 9))
    follower = consumer.follower = Follower(
        lambda message: shown.append(message.queue.queue_id),
        lambda: None,
        check=check,
        clock=lambda: consumer.now_s,
        wait=consumer.wait,
    )
    with pytest.raises(TopicRecreatedError):
        follower.run(cast(PullConsumer, consumer), lambda: None, {}, has_end=False, count_max=0)
    assert shown == [0]


class FakeCalls:
    """Brokers that tell the incarnation of their topic, unless it is 0."""

    def __init__(self, **incarnations: int) -> None:
        self.incarnations = incarnations
        self.timeout_s = 0.0

    def queue_ranges(self, topic: str, broker_name: str, *, topic_incarnation: int) -> Any:
        found = self.incarnations[broker_name]
        if not found:
            raise RequestTimeoutError("no answer in time")
        if topic_incarnation not in (0, found):
            raise TopicRecreatedError("another one")
        return SimpleNamespace(topic_incarnation=found)

    def close(self) -> None:
        pass


def test_the_check_names_those_that_do_not_answer() -> None:
    calls = FakeCalls(a=1, b=0)
    check = TopicCheck(cast(Any, calls), "flights")
    check.broker_names |= {"a", "b"}
    assert check() == {"b"}
    calls.incarnations.update(a=0, b=5)
    assert check() == {"a"}
    calls.incarnations.update(a=2)
    with pytest.raises(TopicRecreatedError):
        check()


class MeetingCalls(FakeCalls):
    """Each question waits until all brokers are asked."""

    def __init__(self, **incarnations: int) -> None:
        super().__init__(**incarnations)
        self.barrier = Barrier(len(incarnations), timeout=5.0)

    def queue_ranges(self, topic: str, broker_name: str, *, topic_incarnation: int) -> Any:
        self.barrier.wait()
        return super().queue_ranges(topic, broker_name, topic_incarnation=topic_incarnation)


def test_the_check_asks_all_at_the_same_time() -> None:
    check = TopicCheck(cast(Any, MeetingCalls(a=1, b=0, c=0)), "flights")
    check.broker_names |= {"a", "b", "c"}
    assert check() == {"b", "c"}


class StartingConsumer(FakeConsumer):
    """Looks offsets up, too: 0 to 9. `looked_up` is called for each queue."""

    def __init__(self, looked_up: Callable[[], None], *polls: Callable[[FakeConsumer], None]) -> None:
        super().__init__(*polls)
        self._looked_up = looked_up
        self.asked: list[str] = []

    def queues(self, topic: str) -> Sequence[MessageQueue]:
        return (ONE, ELSEWHERE)

    def queue_range(self, queue: MessageQueue) -> QueueRange:
        self._looked_up()
        self.asked.append(queue.broker_name)
        return QueueRange(0, 9)

    def subscribe(self, topic: str, tags: Sequence[str], **_: object) -> None:
        pass

    def assign(self, queues: Sequence[MessageQueue], tags: Sequence[str], **_: object) -> None:
        self.positions = dict.fromkeys(queues, 0)


def start(
    consumer: StartingConsumer, calls: FakeCalls, monkeypatch: pytest.MonkeyPatch, offset: str | None = "7:9", count_max: int = 0
) -> list[int]:
    """`consume -O OFFSET`. Returns the queues of what was shown."""
    shown: list[int] = []

    def open_consumer(*_: object, listener: Follower, **__: object) -> Any:
        consumer.follower = listener
        return nullcontext(consumer)

    monkeypatch.setattr(following, "open_calls", lambda *_, **__: calls)
    monkeypatch.setattr(following, "open_consumer", open_consumer)
    monkeypatch.setattr(following, "open_admin", lambda *_: nullcontext(SimpleNamespace(missing_brokers=lambda _: ())))
    following.follow(
        None, "flights", lambda message: shown.append(message.queue.queue_id), lambda: None, group=consumer.group,
        wanted=None if offset is None else parse_offsets(offset, 0), count_max=count_max,
        exit_at_end=False, tags=(), sql=None, cel=None, module=None, transport="auto",
        timeout_s=5.0,
    )  # fmt: skip
    return shown


def test_offsets_that_were_looked_up_in_another_topic_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = FakeCalls(a=1, b=1)
    consumer = StartingConsumer(lambda: calls.incarnations.update(a=2, b=2), come_with_one_message_of_each)
    with pytest.raises(TopicRecreatedError):
        start(consumer, calls, monkeypatch)
    assert consumer.stored == {}


def test_no_offsets_are_looked_up_at_a_broker_that_does_not_say_which_topic_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = FakeCalls(a=1, b=0)
    consumer = StartingConsumer(lambda: None, lambda it: it.come(ONE), lambda it: it.give(ONE, 2))
    with pytest.raises(CliError, match=r"no answer from b \(no answer in time\)"):
        start(consumer, calls, monkeypatch)
    assert consumer.asked == ["a"]
    assert consumer.stored == {ONE: 9}


def test_before_offsets_are_looked_up_all_brokers_are_asked_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = StartingConsumer(lambda: None, lambda it: it.come(ONE), lambda it: it.give(ONE, 2))
    with pytest.raises(CliError, match=r"no answer from b \(no answer in time\)"):
        start(consumer, MeetingCalls(a=1, b=0), monkeypatch)


def test_without_a_group_what_has_an_end_is_read_from_the_brokers_that_answer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = StartingConsumer(lambda: None, lambda it: it.give(ONE, 2))
    consumer.group = ""
    with pytest.raises(CliError, match=r"no answer from b \(no answer in time\)"):
        start(consumer, MeetingCalls(a=1, b=0), monkeypatch)
    assert consumer.positions == {ONE: 9}, "the queues of b would be waited for, one after the other"


def test_who_consumes_without_an_end_begins_with_the_brokers_that_answer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = MeetingCalls(a=0, b=1)

    def come_with_a_message(it: FakeConsumer) -> None:
        it.come(ELSEWHERE)
        it.give(ELSEWHERE, 1)

    consumer = StartingConsumer(lambda: None, come_with_a_message)
    assert start(consumer, calls, monkeypatch, offset=None, count_max=1) == [ELSEWHERE.queue_id]
    assert consumer.asked == [], "one that is silent would be waited for"


def test_who_consumes_without_an_end_ends_if_no_broker_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = StartingConsumer(lambda: None)
    with pytest.raises(RequestTimeoutError, match="no answer in time"):
        start(consumer, MeetingCalls(a=0, b=0), monkeypatch, offset=None)


def test_a_slow_reader_gets_each_message_once() -> None:
    def give_rest(it: FakeConsumer) -> None:
        for queue in (ONE, OTHER):
            it.give(queue, 3 - it.positions[queue])

    consumer = FakeConsumer(lambda it: it.come(ONE, OTHER), *[give_rest] * 9)
    shown = follow(consumer, {ONE: up_to(3), OTHER: up_to(3)}, takes_s=2.0)
    assert sorted(shown) == [(queue_id, offset) for queue_id in range(2) for offset in range(3)]
    assert consumer.stored == {ONE: 3, OTHER: 3}


def test_a_queue_that_comes_late_is_read_to_its_end() -> None:
    consumer = FakeConsumer(
        nothing, nothing, lambda it: it.come(ONE), lambda it: it.give(ONE, 3), nothing
    )
    assert follow(consumer, {ONE: up_to(3)}) == [(0, 0), (0, 1), (0, 2)]
    assert consumer.stored == {ONE: 3}


def test_a_queue_is_sought_when_it_first_comes_and_not_when_it_comes_back() -> None:
    consumer = FakeConsumer(
        lambda it: it.come(ONE),
        lambda it: it.give(ONE, 1),
        lambda it: it.come(OTHER),
        lambda it: it.go(ONE),
        lambda it: it.come(ONE),
        lambda it: it.give(ONE, 1),
        lambda it: it.give(OTHER, 2),
    )
    spans = {queue: Span(7, 9, 0, 9) for queue in (ONE, OTHER)}
    assert follow(consumer, spans) == [(0, 7), (0, 8), (1, 7), (1, 8)]


def test_a_queue_that_comes_after_the_first_share_goes_on_where_the_group_is() -> None:
    def come_late(it: FakeConsumer) -> None:
        it.now_s += 1.0
        it.stored[OTHER] = 8
        it.come(OTHER)

    consumer = FakeConsumer(
        lambda it: it.come(ONE), lambda it: it.give(ONE, 2), come_late, lambda it: it.give(OTHER, 1), nothing
    )
    spans = {queue: Span(7, 9, 0, 9) for queue in (ONE, OTHER)}
    assert follow(consumer, spans) == [(0, 7), (0, 8), (1, 8)]


def test_after_its_first_share_a_member_does_not_wait_for_queues_that_others_keep_at_their_ends() -> None:
    consumer = FakeConsumer(lambda it: it.come(ONE), lambda it: it.give(ONE, 2), nothing, nothing)
    consumer.stored[OTHER] = 9
    spans = {queue: Span(7, 9, 0, 9) for queue in (ONE, OTHER)}
    assert follow(consumer, spans) == [(0, 7), (0, 8)]


def test_what_a_filter_leaves_out_is_committed_but_nothing_behind_the_end() -> None:
    consumer = FakeConsumer(
        lambda it: it.come(ONE),
        lambda it: it.give(ONE, 1),
        lambda it: it.pass_over(ONE, 9),
    )
    assert follow(consumer, {ONE: up_to(5, end_offset=10)}, is_filtered=True) == [(0, 0)]
    assert consumer.stored == {ONE: 5}


def test_what_is_printed_again_after_a_reset_is_committed_again() -> None:
    def reset(it: FakeConsumer) -> None:
        assert it.stored == {ONE: 2}
        it.stored[ONE] = it.positions[ONE] = 0
        it.give(ONE, 2)

    consumer = FakeConsumer(lambda it: it.come(ONE), lambda it: it.give(ONE, 2), reset)
    assert follow(consumer, {}, has_end=False, count_max=4) == [(0, 0), (0, 1)] * 2
    assert consumer.stored == {ONE: 2}


def test_where_the_user_wants_to_begin_is_committed_though_nothing_comes() -> None:
    def interrupt(_: FakeConsumer) -> None:
        raise KeyboardInterrupt

    consumer = FakeConsumer(lambda it: it.come(ONE), interrupt)
    with pytest.raises(KeyboardInterrupt):
        follow(consumer, {ONE: Span(9, None, 0, 10), OTHER: Span(10, None, 0, 10)}, has_end=False)
    assert consumer.stored == {ONE: 9}


def test_what_is_left_of_a_batch_when_printing_fails_is_not_committed() -> None:
    def show(message: Message) -> None:
        if message.queue_offset == 2:
            raise BrokenPipeError

    def come_and_give(it: FakeConsumer) -> None:
        it.come(ONE)
        it.give(ONE, 5)

    consumer = FakeConsumer(come_and_give)
    follower = consumer.follower = Follower(show, lambda: None, is_filtered=True, clock=lambda: consumer.now_s)
    with pytest.raises(BrokenPipeError):
        follower.run(cast(PullConsumer, consumer), lambda: None, {}, has_end=False, count_max=0)
    consumer.go(ONE)  # As `close` does.
    assert consumer.stored == {ONE: 2}


def test_a_queue_of_another_member_is_at_its_end_when_the_group_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def other_commits(it: FakeConsumer) -> None:
        it.stored[OTHER] = 5

    consumer = FakeConsumer(
        lambda it: it.come(ONE), lambda it: it.give(ONE, 2), nothing, nothing, other_commits
    )
    assert follow(consumer, {ONE: up_to(2), OTHER: up_to(5)}) == [(0, 0), (0, 1)]
    told = capsys.readouterr().err
    assert told.count("waiting for 1 queue that this member of group readers does not have") == 1


def test_what_the_group_has_committed_is_not_the_end_of_a_queue_that_is_still_to_be_sought() -> None:
    consumer = FakeConsumer(nothing, nothing, lambda it: it.come(ONE), lambda it: it.give(ONE, 1))
    consumer.stored[ONE] = 10
    assert follow(consumer, {ONE: Span(8, 9, 0, 10)}) == [(0, 8)]


def test_who_waits_for_its_first_queue_for_a_moment_says_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    consumer = FakeConsumer(nothing, nothing, lambda it: it.come(ONE), lambda it: it.give(ONE, 1))
    assert follow(consumer, {ONE: up_to(1)}) == [(0, 0)]
    assert capsys.readouterr().err == ""


def test_a_broker_that_is_away_is_asked_again_how_far_others_are() -> None:
    def is_away(it: FakeConsumer) -> None:
        it.look_up_error = TransportError("it is away")

    def is_back(it: FakeConsumer) -> None:
        it.look_up_error, it.stored[ONE] = None, 4

    consumer = FakeConsumer(is_away, nothing, is_back)
    assert follow(consumer, {ONE: up_to(4)}) == []
    refused = FakeConsumer(nothing)
    refused.look_up_error = InternalError("it is broken")
    with pytest.raises(InternalError):
        follow(refused, {ONE: up_to(4)})


def test_without_a_group_a_queue_whose_broker_left_the_route_is_waited_for() -> None:
    consumer = FakeConsumer(
        lambda it: it.come(ONE),
        lambda it: it.go(ONE),
        nothing,
        nothing,
        lambda it: it.come(ONE),
        lambda it: it.give(ONE, 1),
    )
    consumer.group = ""
    consumer.look_up_error = InternalError("nobody commits anything")
    assert follow(consumer, {ONE: up_to(1)}) == [(0, 0)]
    assert consumer.stored == {}


def test_what_was_printed_is_committed_before_its_queue_goes() -> None:
    def go(it: FakeConsumer) -> None:
        before = dict(it.stored)
        it.now_s -= 1.0  # The second after which everything is committed is not over.
        it.go(ONE)
        assert (before, it.stored) == ({}, {ONE: 2})
        it.stored[ONE] = 9  # By its next owner.

    def come_and_give(it: FakeConsumer) -> None:
        it.now_s -= 1.0
        it.come(ONE)
        it.give(ONE, 2)

    consumer = FakeConsumer(come_and_give, go, lambda it: it.come(OTHER), lambda it: it.give(OTHER, 1))
    assert follow(consumer, {}, has_end=False, count_max=3) == [(0, 0), (0, 1), (1, 0)]
    assert consumer.stored == {ONE: 9, OTHER: 1}


def test_nothing_is_committed_for_a_queue_that_was_lost() -> None:
    def come_and_give(it: FakeConsumer) -> None:
        it.now_s -= 1.0
        it.come(ONE, OTHER)
        it.give(ONE, 2)

    def wake_up(it: FakeConsumer) -> None:
        it.commit_error = MemberUnknownError("readers: not heard of in time")

    def lose(it: FakeConsumer) -> None:
        it.commit_error = None
        it.lose(ONE)

    consumer = FakeConsumer(come_and_give, wake_up, lose, lambda it: it.give(OTHER, 1))
    assert follow(consumer, {}, has_end=False, count_max=3) == [(0, 0), (0, 1), (1, 0)]
    assert consumer.stored == {OTHER: 1}


def test_a_commit_that_fails_when_a_queue_goes_is_told_and_ends_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def come_and_give(it: FakeConsumer) -> None:
        it.now_s -= 1.0
        it.come(ONE, OTHER)
        it.give(ONE, 1)

    def go(it: FakeConsumer) -> None:
        it.commit_error = TransportError("it is away")
        it.go(ONE)
        it.commit_error = None

    consumer = FakeConsumer(come_and_give, go, lambda it: it.give(OTHER, 1))
    assert follow(consumer, {}, has_end=False, count_max=2) == [(0, 0), (1, 0)]
    assert "may print messages again: it is away" in capsys.readouterr().err
    assert consumer.stored == {OTHER: 1}


@pytest.mark.parametrize(
    ("begin", "end", "is_empty"),
    [(None, 0, True), (None, 1, False), (2, 4, False), (4, 4, True), (9, 4, True), (9, None, False)],
)
def test_what_is_empty_is_at_its_end_at_once(begin: int | None, end: int | None, is_empty: bool) -> None:
    assert Span(begin, end, 0, 4).is_empty is is_empty


def test_nothing_is_waited_for_where_nothing_is_wanted() -> None:
    assert follow(FakeConsumer(), {ONE: up_to(4, begin=9)}) == []


def test_the_user_is_told_where_a_queue_does_not_reach_to_the_first_offset(
    capsys: pytest.CaptureFixture[str],
) -> None:
    consumer = FakeConsumer(lambda it: it.come(ONE), lambda it: it.give(ONE, 5))
    assert follow(consumer, {ONE: up_to(4, begin=2, end_offset=0)}) == [(0, 2), (0, 3)]
    assert "queue 0 of flights at a ends at 0: waiting for offset 2" in capsys.readouterr().err
