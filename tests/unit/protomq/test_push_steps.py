"""Where a push consumer's commits stand, while its queues come and go."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import pytest

from protomq import _methods
from protomq._consumer_options import ConsumerOptions
from protomq._consumer_steps import ConsumerSteps
from protomq._group_looks import LOOK_INTERVAL_S
from protomq._local_offsets import LocalOffsets
from protomq._methods import GET_GROUP, GET_OFFSETS
from protomq._pull_logic import PullOptions
from protomq._push_options import PushOptions
from protomq._push_results import failure_of_text
from protomq._push_state import PushState
from protomq._push_steps import ListenedPulls, PushSteps, Wanted
from protomq._seldom import SAID_AGAIN_S, SaidSeldom
from protomq._steps import Steps
from protomq._types import MessageQueue
from protomq.errors import (
    ConnectFailedError,
    IllegalFilterError,
    OffsetOutOfRangeError,
    TopicNotFoundError,
    TopicRecreatedError,
)
from protomq.v1.consumer_service_pb2 import GetOffsetsRequest, GetOffsetsResponse, QueueOffset
from protomq.v1.group_pb2 import GroupSettings
from protomq.v1.group_service_pb2 import GetGroupResponse, SendBackResponse, SentBack
from protomq.v1.pull_service_pb2 import PULL_STATUS_FOUND, PULL_STATUS_NO_NEW_MSG, PullResponse
from protomq.wire.record import RecordTemplate
from tests.support.fake_driver import FakeWorld, route_of
from tests.unit.protomq.test_push_state import Q0, Q1, finish, listener, messages


class World:
    """The parts of a consumer, with queues that stand at an offset."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.state = PushState(PushOptions(group="g"), {"t": listener()})
        self.pulls = ListenedPulls(PullOptions("g"))
        consumer = ConsumerSteps(ConsumerOptions(group="g"), lambda: self.now_s, state=self.pulls)
        self.steps = PushSteps(PushOptions(group="g"), consumer, self.state, {}, lambda: self.now_s)
        self.pulls.lowest_open = self.steps.lowest_open
        self.pulls.assign([Q0, Q1], {})
        self.pulls.start_all([Q0, Q1], {0: 5, 1: 0}, {})

    def take(self, first: int, count: int) -> None:
        """As if so many had been pulled from the first queue."""
        self.pulls.seek(Q0, first + count)
        self.state.offer(Q0, messages(first, count))


def test_a_commit_stands_at_the_lowest_message_that_is_open_or_where_pulls_are() -> None:
    world = World()
    assert world.pulls.to_commit(safe_only=True) == {}
    world.take(5, 3)
    world.pulls.user_came_back()
    assert world.pulls.to_commit(safe_only=False) == {}
    first, second = world.state.next_run(0.0, 3), world.state.next_run(0.0, 3)
    finish(world.state, second)
    assert world.pulls.to_commit(safe_only=True) == {}
    finish(world.state, first)
    assert world.pulls.to_commit(safe_only=True) == {Q0: 7}
    finish(world.state, world.state.next_run(0.0))
    assert world.pulls.to_commit(safe_only=True) == {Q0: 8}
    world.pulls.committed({Q0: 8})
    assert world.pulls.to_commit(safe_only=True) == {}


def test_a_queue_that_goes_is_committed_where_it_stood_and_forgotten() -> None:
    world = World()
    world.take(5, 3)
    first = world.state.next_run(0.0, 3)
    finish(world.state, first)
    slow = world.state.next_run(0.0, 3)
    assert slow is not None
    one = slow.messages.popleft()
    world.steps.gave_away([Q0, Q1])
    assert world.state.count == 0
    slow.done.append(one)
    world.state.ended(slow, 1.0)
    assert world.pulls.to_commit(safe_only=True) == {Q0: 6}


def test_a_queue_whose_broker_was_away_goes_on_with_what_was_not_done() -> None:
    world = World()
    world.take(5, 3)
    finish(world.state, world.state.next_run(0.0, 3))
    world.steps.gave_away([Q0])
    world.pulls.assign([Q1], {}, park=True)
    world.pulls.assign([Q0, Q1], {}, park=True)
    assert world.pulls.position(Q0) == 8
    world.steps.came([Q0])
    assert world.pulls.position(Q0) == 6
    assert world.steps.lowest_open(Q0) is None


def test_a_queue_that_is_lost_is_not_remembered() -> None:
    world = World()
    world.take(5, 3)
    world.steps.gave_away([Q0])
    world.steps.lost([Q0])
    assert world.steps.lowest_open(Q0) is None
    world.steps.came([Q0])
    assert world.pulls.position(Q0) == 8


def test_what_waits_of_a_topic_that_was_made_again_is_not_handed_out_until_it_is_subscribed_to_again() -> None:
    world = World()
    answer = PullResponse(status=PULL_STATUS_FOUND, next_offset=2, end_offset=2, topic_incarnation=7)
    for offset in range(2):
        record = answer.records.add()
        record.ParseFromString(RecordTemplate("t", 1, 0).encode(b"old", offset, 0))
        record.queue_offset = offset
    world.pulls.answered(world.pulls.begin(Q1), answer.SerializeToString(), 0.0)
    error = TopicRecreatedError("made again", metadata={"topic": "t"})
    ticket = world.pulls.begin(Q1)
    assert world.pulls.failed(ticket, error, 0.0) is error
    assert world.steps.take_trouble(error) == [Q1]
    assert world.pulls.take_parts(10) == [], "a listener may have one of them: two of a queue at a time would be in no order"


def test_another_subscription_in_the_place_of_one_begins_anew_however_soon_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is here was let through by the old filter: it is not for the new one."""
    options = PushOptions(group="g")
    world = FakeWorld(route_of("t", "b"))
    state = PushState(options, {"t": listener()})
    consumer = ConsumerSteps(options.consumer_options(), world.now_s, state=ListenedPulls(PullOptions("g")))
    wanted = {"t": Wanted("t", listener(), ("a",))}
    steps = PushSteps(options, consumer, state, wanted, world.now_s)
    world.driver.run(steps.start())
    unsubscribed: list[str] = []
    unsubscribe = consumer.unsubscribe

    def noted(topic: str) -> Steps[None]:
        unsubscribed.append(topic)
        return unsubscribe(topic)

    monkeypatch.setattr(consumer, "unsubscribe", noted)
    world.driver.run(steps.look())
    assert unsubscribed == []
    wanted["t"] = Wanted("t", listener(), ("b",))
    world.driver.run(steps.look())
    world.driver.run(steps.look())
    assert unsubscribed == ["t"]
    assert consumer._tags["t"] == ("b",)


def test_what_a_broker_never_takes_back_is_dealt_with_and_told(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.take(5, 1)
    run = world.state.next_run(0.0)
    assert run is not None
    world.state.settled(run, [run.messages.popleft()], [failure_of_text("boom")], 0.0)
    call = world.state.backs.begin(0.0)
    assert call is not None
    world.steps.back_failed(call, ConnectFailedError("away"))
    assert world.steps.lowest_open(Q0) == 5
    world.now_s = 1.0
    assert world.state.backs.begin(1.0) is call
    world.steps.back_failed(call, OffsetOutOfRangeError("expired"))
    assert world.steps.lowest_open(Q0) is None
    text = caplog.text
    assert "failed with 'boom' and cannot be given back, it does not come again: OFFSET_OUT_OF_RANGE expired" in text
    assert "broker b does not answer, trying again: away" in text


def test_the_first_dead_letter_of_a_topic_in_a_minute_is_told(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    servers = FakeWorld(route_of("t", "b"))
    results = [SentBack(attempt=1, due_time_ms=9), SentBack(attempt=1, dead_letter=True)]
    servers.answers[_methods.SEND_BACK] = lambda *_: SendBackResponse(results=results).SerializeToString()
    for first, found in ((5, ["<Message t/b/0@6>"]), (7, []), (9, ["<Message t/b/0@10>"])):
        world.take(first, 2)
        while (run := world.state.next_run(0.0)) is not None:
            world.state.settled(run, [run.messages.popleft()], [failure_of_text("boom")], 0.0)
            world.state.ended(run, 0.0)
        call = world.state.backs.begin(world.now_s)
        assert call is not None
        servers.driver.run(world.steps.back_steps(call))
        world.steps.back_done(call)
        assert [one for one in caplog.messages if "dead" in one] == [
            f"{name} is a dead letter, in %DLQ%g: boom (a further one is not logged for a minute)" for name in found
        ]
        caplog.clear()
        world.now_s += SAID_AGAIN_S / 2
    assert (world.state.failed_count, world.state.done_count) == (6, 6)


def test_dead_letters_are_waited_for_while_there_are_none_and_another_topic_is_not(caplog: pytest.LogCaptureFixture) -> None:
    options = PushOptions(group="watchers", begin="latest")
    for topic in ("%DLQ%g", "%RETRY%g"):
        world = FakeWorld(route_of(topic, "b"))
        world.route_script.extend([TopicNotFoundError("none"), TopicNotFoundError("none")])
        consumer = ConsumerSteps(options.consumer_options(), world.now_s, state=ListenedPulls(PullOptions("watchers")))
        wanted = {topic: Wanted(topic, listener())}
        steps = PushSteps(options, consumer, PushState(options, {topic: listener()}), wanted, world.now_s)
        if topic == "%RETRY%g":
            with pytest.raises(TopicNotFoundError):
                world.driver.run(steps.start())
            continue
        world.driver.run(steps.start())
        world.driver.run(steps.look())
        assert not consumer.subscriptions
        world.driver.run(steps.look())
        assert list(consumer.subscriptions) == [topic]
        assert consumer._made_again == {topic}, "so it begins at the first, whatever `begin` says"
    text = "topic %DLQ%g does not exist; the consumer waits until the first dead letter makes it: is the name right?"
    assert caplog.messages.count(text) == 1


@pytest.mark.parametrize(("options", "limit", "is_shut"), [
    ({"orderly": True}, 3, False), ({"orderly": True, "attempts_max": 9}, None, False), ({"broadcast": True}, None, True), ({}, None, False)
])  # fmt: skip
def test_what_a_consumer_obeys_of_its_groups_settings(
    options: dict[str, Any], limit: int | None, is_shut: bool, tmp_path: Path
) -> None:
    world = FakeWorld(route_of("t", "b"))
    answer = GetGroupResponse(settings=GroupSettings(version=1, retry_count_max=3, broadcast_enabled=False))
    world.answers[GET_GROUP] = lambda server, request: answer.SerializeToString()
    given = PushOptions(group="g", offset_folder=str(tmp_path), **options)
    state = PushState(given, {"t": listener()})
    consumer = ConsumerSteps(given.consumer_options(), world.now_s, state=ListenedPulls(PullOptions(given.consumer_group)))
    steps = PushSteps(given, consumer, state, {"t": Wanted("t", listener())}, world.now_s)
    world.driver.run(steps.start())
    assert (state.retry_count_max, consumer.state.is_shut) == (limit, is_shut)
    answer.settings.version, answer.settings.retry_count_max, answer.settings.broadcast_enabled = 2, 5, True
    world.advance(LOOK_INTERVAL_S)
    world.driver.run(steps.look())
    assert (state.retry_count_max, consumer.state.is_shut) == (5 if limit else None, False)
    asked = sum(method == GET_GROUP for _, method, *_ in world.calls)
    assert asked == (2 if limit or is_shut else 0)
    steps.close()


@pytest.mark.parametrize("is_all_done", [True, False])
def test_a_broadcasting_consumer_writes_down_where_it_stood_in_queues_that_its_broker_took_along(
    is_all_done: bool, tmp_path: Path
) -> None:
    world = FakeWorld(route_of("t", "a", "b"))
    options = PushOptions(group="g", offset_folder=str(tmp_path), broadcast=True)
    state = PushState(options, {"t": listener()})
    pulls = ListenedPulls(PullOptions("g", broadcasting=True))
    consumer = ConsumerSteps(options.consumer_options(), world.now_s, state=pulls)
    steps = PushSteps(options, consumer, state, {"t": Wanted("t", listener())}, world.now_s)
    pulls.lowest_open = steps.lowest_open
    world.driver.run(steps.start())
    world.driver.run(steps.save())
    queue = MessageQueue("t", "a", 0)
    pulls.seek(queue, 3)
    state.offer(queue, messages(0, 3, queue=queue))
    finish(state, state.next_run(0.0, 3))
    while is_all_done and (run := state.next_run(0.0)) is not None:
        finish(state, run)
    steps.gave_away([queue])
    pulls.assign([MessageQueue("t", "b", 0)], {}, park=True)
    world.driver.run(steps.save())
    steps.close()
    with closing(LocalOffsets(str(tmp_path), "g")) as file:
        assert file.open()[queue].queue_offset == (3 if is_all_done else 1)


@pytest.mark.parametrize(("is_last", "text"), [(False, "trying again"), (True, "comes again, here")])
def test_offsets_that_are_not_written_are_told_and_at_the_end_what_follows(
    is_last: bool, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = FakeWorld(route_of("t", "a"))
    options = PushOptions(group="g", offset_folder=str(tmp_path), broadcast=True)
    pulls = ListenedPulls(PullOptions("g", broadcasting=True))
    consumer = ConsumerSteps(options.consumer_options(), world.now_s, state=pulls)
    steps = PushSteps(options, consumer, PushState(options, {"t": listener()}), {"t": Wanted("t", listener())}, world.now_s)
    pulls.lowest_open = steps.lowest_open
    world.driver.run(steps.start())

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalOffsets, "save", fail)
    pulls.seek(MessageQueue("t", "a", 0), 3)
    world.driver.run(steps.save(is_last=is_last))
    steps.close()
    assert f"{tmp_path / 'g.json'}" in caplog.text
    assert text in caplog.text


def test_a_broadcasting_consumer_writes_down_what_is_done_behind_a_message_that_is_not(tmp_path: Path) -> None:
    world = FakeWorld(route_of("t", "a"))
    options = PushOptions(group="g", offset_folder=str(tmp_path), broadcast=True)
    queue = MessageQueue("t", "a", 0)

    def begun() -> tuple[PushSteps, PushState, ListenedPulls]:
        state = PushState(options, {"t": listener()})
        pulls = ListenedPulls(PullOptions("g", broadcasting=True))
        consumer = ConsumerSteps(options.consumer_options(), world.now_s, state=pulls)
        steps = PushSteps(options, consumer, state, {"t": Wanted("t", listener())}, world.now_s)
        pulls.lowest_open, pulls.done_behind, pulls.forked = steps.lowest_open, state.done_behind, state.forget_done
        world.driver.run(steps.start())
        return steps, state, pulls

    steps, state, pulls = begun()
    pulls.seek(queue, 5)
    pulls._state(queue).incarnation = 7
    state.offer(queue, messages(0, 5, queue=queue))
    runs = [state.next_run(0.0, 5) for _ in range(5)]
    for run in (runs[1], runs[2], runs[4]):
        finish(state, run)
    state.stop()
    world.driver.run(steps.save())
    steps.close()

    steps, state, pulls = begun()
    steps.came([queue])
    assert pulls.position(queue) == 0
    assert state.done_behind(queue) == {1, 2, 4}
    pulls.follow_fork(queue, 0, 1)
    assert state.done_behind(queue) == set(), "other messages may stand there now"
    steps.close()


@pytest.mark.parametrize("begin", ["earliest", "latest"])
def test_a_broadcasting_consumer_goes_on_where_it_stood_in_a_topic_that_it_takes_up_again(
    begin: Literal["earliest", "latest"], tmp_path: Path
) -> None:
    world = FakeWorld(route_of("t", "a"))
    options = PushOptions(group="g", offset_folder=str(tmp_path), broadcast=True, begin=begin)
    queue, wanted = MessageQueue("t", "a", 0), {"t": Wanted("t", listener())}
    state, pulls = PushState(options, {"t": listener()}), ListenedPulls(PullOptions("g", broadcasting=True))
    consumer = ConsumerSteps(options.consumer_options(), world.now_s, state=pulls)
    steps = PushSteps(options, consumer, state, wanted, world.now_s)
    pulls.lowest_open, pulls.done_behind, pulls.forked = steps.lowest_open, state.done_behind, state.forget_done
    world.driver.run(steps.start())
    pulls.seek(queue, 8)
    pulls._state(queue).incarnation, pulls._state(queue).log_epoch = 7, 3
    state.offer(queue, messages(5, 3, queue=queue))
    runs = [state.next_run(0.0, 3) for _ in range(3)]
    for run in (runs[0], runs[2]):
        finish(state, run)
    steps.gave_away([queue])
    pulls.assign([], {})
    pulls.assign([queue], {})
    steps.came([queue])
    assert (pulls.position(queue), pulls.incarnation(queue), pulls.log_epoch(queue)) == (6, 7, 3)
    assert state.done_behind(queue) == {7}
    steps.close()


@pytest.mark.parametrize(("epoch", "is_remembered"), [(3, True), (4, False)])
def test_what_is_done_behind_a_message_is_of_one_log_and_forgotten_where_another_one_answers(epoch: int, is_remembered: bool) -> None:
    """The next leader may lack it, and have other messages there; that the logs agree up to what is pulled says nothing of it."""
    state = PushState(PushOptions(group="g", broadcast=True), {"t": listener()})
    pulls = ListenedPulls(PullOptions("g", broadcasting=True))
    pulls.forked = state.forget_done
    pulls.assign([Q0], {})
    pulls.start_all([Q0], {Q0.queue_id: 5}, {}, 7, log_epoch=3)
    state.remember_done(Q0, {6, 7})
    ticket = pulls.begin(Q0)
    answer = PullResponse(status=PULL_STATUS_NO_NEW_MSG, next_offset=5, end_offset=5, log_epoch=epoch)
    pulls.answered(ticket, answer.SerializeToString(), 0.0)
    assert state.done_behind(Q0) == ({6, 7} if is_remembered else set())


def test_trouble_is_told_once_a_minute() -> None:
    world = World()
    said = SaidSeldom(lambda: world.now_s)
    assert said.is_due("a")
    assert not said.is_due("a")
    assert said.is_due("b")
    world.now_s = SAID_AGAIN_S
    assert said.is_due("a")
    assert world.steps.take_trouble(IllegalFilterError("no", metadata={"topic": "t"})) == []


def test_a_filter_that_a_broker_refuses_late_is_told_with_its_topic_and_what_it_means(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    world.steps.take_trouble(IllegalFilterError("line 1", metadata={"topic": "t"}))
    assert "group g, topic t: line 1; nothing of the topic is consumed" in caplog.text


def test_a_reset_of_the_groups_offset_forgets_what_is_here() -> None:
    world = World()
    world.pulls.moved = lambda queue: world.steps.lost([queue])
    world.take(5, 3)
    assert world.steps.lowest_open(Q0) == 5
    world.pulls.follow_reset(Q0, 2, 9)
    assert (world.steps.lowest_open(Q0), world.state.count) == (None, 0)
    assert world.pulls.to_commit(safe_only=True) == {}
    world.take(2, 3)
    world.pulls.follow_reset(Q0, 2, 9)  # Told once more: nothing has changed since.
    assert world.steps.lowest_open(Q0) == 2


def test_what_is_here_of_a_queue_is_forgotten_when_the_group_was_further_than_a_slave_had_said() -> None:
    world = World()
    world.pulls.moved = lambda queue: world.steps.lost([queue])
    world.pulls.follow_reset(Q0, 5, 9)  # By a pull: at a slave, perhaps.
    world.pulls.move_to(Q0, 8)
    world.state.offer(Q0, messages(5, 3))
    world.pulls.follow_kept(Q0, 6)
    assert world.steps.lowest_open(Q0) == 5, "listeners have them up to there"
    world.pulls.follow_kept(Q0, 100)
    assert (world.steps.lowest_open(Q0), world.state.count) == (None, 0)
    assert (world.pulls.position(Q0), world.pulls.to_commit(safe_only=True)) == (100, {})


def test_a_queue_that_comes_back_still_began_where_a_slave_said() -> None:
    world = World()
    world.pulls.follow_reset(Q0, 5, 9)
    world.pulls.move_to(Q0, 8)
    world.state.offer(Q0, messages(5, 3))
    world.steps.gave_away([Q0])
    world.pulls.assign([Q1], {}, park=True)
    world.pulls.assign([Q0, Q1], {}, park=True)
    world.steps.came([Q0])
    assert (world.pulls.position(Q0), world.pulls.began(Q0)) == (5, 5)


@pytest.mark.parametrize("answers", [True, False])
def test_who_goes_on_asks_each_broker_whether_the_offset_was_reset(answers: bool) -> None:
    """Nothing was pulled or committed lately that would have told it."""
    world, driven = World(), FakeWorld(route_of("t", "b"))
    world.pulls.start_all([Q0, Q1], {}, {}, reset_epochs={1: 6})
    moved: list[MessageQueue] = []
    world.pulls.moved = moved.append
    asked: list[list[int]] = []

    def offsets_of(_: str, data: bytes) -> bytes:
        asked.append(list(GetOffsetsRequest.FromString(data).queue_ids))
        told = [QueueOffset(queue_id=0, queue_offset=90, reset_epoch=8), QueueOffset(queue_id=1, queue_offset=0, reset_epoch=6)]
        return GetOffsetsResponse(offsets=told).SerializeToString()

    driven.answers[GET_OFFSETS] = offsets_of
    if not answers:
        driven.script.append(ConnectFailedError("away"))
    driven.driver.run(world.steps.follow_resets())
    assert (asked, moved) == (([[0, 1]], [Q0]) if answers else ([], []))
    assert [world.pulls.position(queue) for queue in (Q0, Q1)] == ([90, 0] if answers else [5, 0])
    assert [timeout_s for *_, timeout_s in driven.calls] == [pytest.approx(0.5, abs=0.01)]


def test_a_fork_takes_back_what_is_open_behind_it_and_gives_again_what_is_in_front() -> None:
    world = World()
    moved: list[object] = []
    world.pulls.moved = moved.append
    world.take(5, 5)
    finish(world.state, world.state.next_run(0.0, 2))
    world.pulls.follow_fork(Q0, 11, 3)
    assert (world.pulls.position(Q0), moved) == (10, []), "nothing that was handed out is lost"
    world.pulls.follow_fork(Q0, 8, 3)
    assert (world.pulls.position(Q0), moved) == (6, [Q0]), "6 and 7 are open, and are in this log"
    assert world.pulls.log_epoch(Q0) == 3
