"""What a broker takes of a member. Beyond its number of topics a subscription is refused at once; a member whose reports a broker refuses
consumes nothing there, and its program hears why."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest

from protomq import AsyncPushConsumer, MessageQueue, PushConsumer
from protomq._consumer_options import ConsumerOptions
from protomq._consumer_steps import ConsumerSteps
from protomq._filters import NO_FILTER
from protomq._membership_logic import BACKOFF_MAX_S, CLAIM_WAIT_S, TOPICS_MAX, MembershipState
from protomq._methods import COMMIT_OFFSETS
from protomq._pull_logic import PullOptions
from protomq._push_options import PushOptions
from protomq._push_state import PushState
from protomq._push_steps import ListenedPulls, PushSteps, Wanted
from protomq.allocation import Average
from protomq.errors import (
    ConfigurationError,
    InvalidArgumentError,
    MemberUnknownError,
    ProtomqError,
    SystemBusyError,
    TooManyError,
    UnknownMethodError,
)
from protomq.testing import FakeGroup
from protomq.v1 import membership_service_pb2 as pb
from protomq.wire.topics import retry_topic
from tests.support.fake_driver import FakeWorld, address_of, route_of

from .test_push_state import listener
from .test_stopped_member import A0, GAP_S, FakeMember, Node

TOO_LONG = "member.topics: has 257 topics, 256 at most are allowed"
A1, B0 = MessageQueue("T", "a", 1), MessageQueue("T", "b", 0)


def many(count: int) -> list[str]:
    return [f"t{i}" for i in range(count)]


class Consumer:
    """A pull consumer in a world that has all topics."""

    def __init__(self, **options: Any) -> None:
        topics = [*many(TOPICS_MAX + 10), retry_topic("g")]
        self.world = FakeWorld(*[route_of(topic, "a") for topic in topics])
        checked = ConsumerOptions(**options)
        member = FakeMember(self.world) if checked.shares else None
        self.steps = ConsumerSteps(checked, self.world.now_s, member=member)

    def subscribe(self, *topics: str) -> None:
        for topic in topics:
            self.world.driver.run(self.steps.subscribe(topic, (), NO_FILTER))


def test_a_member_has_so_many_topics_and_one_more_is_refused_and_changes_nothing() -> None:
    consumer = Consumer(group="g")
    consumer.subscribe(*many(TOPICS_MAX))
    before, calls, looked_up = dict(consumer.steps.subscriptions), len(consumer.world.calls), len(consumer.world.looked_up)
    for topic in ("t256", retry_topic("g")):
        with pytest.raises(ConfigurationError, match=f"cannot subscribe to '{topic}'.*256 topics at most.*another group"):
            consumer.subscribe(topic)
    assert consumer.steps.subscriptions == before
    assert (len(consumer.world.calls), len(consumer.world.looked_up)) == (calls, looked_up)
    consumer.subscribe("t0")
    consumer.world.driver.run(consumer.steps.unsubscribe("t0"))
    consumer.subscribe("t256")


@pytest.mark.parametrize("options", [{}, {"group": "g", "broadcasting": True}])
def test_a_consumer_that_is_no_member_has_as_many_topics_as_it_wants(options: dict[str, Any]) -> None:
    consumer = Consumer(**options)
    consumer.subscribe(*many(TOPICS_MAX + 2))
    assert len(consumer.steps.subscriptions) == TOPICS_MAX + 2


def test_a_topic_that_still_has_queues_to_be_committed_counts() -> None:
    state = MembershipState("g", "m", Average())
    address = {"a": address_of("a")}
    state.want(dict.fromkeys(many(TOPICS_MAX), ""), address, {})
    state.claim([MessageQueue("t0", "a", 0)])
    left = many(TOPICS_MAX)[1:]
    state.want(dict.fromkeys(left, ""), address, {})
    with pytest.raises(ConfigurationError, match="256 topics"):
        state.check_room(left, "t256")
    state.claim([])
    state.check_room(left, "t256")


@pytest.mark.parametrize("client", [PushConsumer, AsyncPushConsumer])
def test_a_push_consumer_has_a_place_for_its_retries_and_refuses_one_topic_more(client: Any) -> None:
    consumer = client("g")
    for topic in many(TOPICS_MAX - 1):
        consumer.subscribe(topic, print)
    for subscribe in (lambda: consumer.subscribe("more", print), lambda: consumer.on("more")(print)):
        with pytest.raises(ConfigurationError, match=r"of group 'g' cannot subscribe to 'more'.*256 topics"):
            subscribe()
    assert "more" not in consumer._wanted
    assert "more" not in consumer._listeners
    consumer.unsubscribe("t0")
    consumer.subscribe("more", print)


@pytest.mark.parametrize("client", [PushConsumer, AsyncPushConsumer])
def test_a_broadcasting_push_consumer_is_no_member(client: Any) -> None:
    consumer = client("g", broadcast=True)
    for topic in many(TOPICS_MAX + 1):
        consumer.subscribe(topic, print)
    assert len(consumer._wanted) == TOPICS_MAX + 1


def test_a_fake_group_refuses_what_a_broker_does() -> None:
    consumer = PushConsumer("g")
    group = FakeGroup(consumer)
    seen: list[str] = []
    for topic in many(TOPICS_MAX - 1):
        consumer.subscribe(topic, lambda message: seen.append(message.topic))
    with pytest.raises(ConfigurationError, match="256 topics"):
        consumer.subscribe("more", print)
    group.send("t254", b"")
    assert group.deliver() == 1
    assert seen == ["t254"]


# -- reports that a broker refuses ---------------------------------------------------------------------------------------------


def refuse(node: Node, error: ProtomqError) -> None:
    """The broker refuses the call that is under way, or the next one."""
    state = node.member.state
    if node.member.ticket is None or state._brokers["a"].number != node.member.ticket.number or not state._brokers["a"].in_flight:
        node.member.call()
    assert node.member.ticket is not None
    state.failed(node.member.ticket, error, node.world.now_s())


def poll(node: Node) -> None:
    node.poll()
    node.steps.raise_trouble()


@pytest.mark.parametrize("error", [InvalidArgumentError(TOO_LONG), TooManyError("the group has 2000 members already")])
def test_a_member_whose_reports_are_refused_gives_its_queues_up_and_commits_nothing(
    error: ProtomqError, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node()
    refuse(node, error)
    assert not node.steps.stands(A0)
    node.world.advance(5.0)
    with contextlib.suppress(InvalidArgumentError):
        poll(node)
    assert node.steps.state.queues == ()
    assert node.lost.queues == [A0]
    assert node.commits() == 0
    assert "does not take m as a member of g, so nothing is consumed there" in caplog.text
    assert "gives up 1 queues" in caplog.text
    with pytest.raises(MemberUnknownError):
        node.world.driver.run(node.steps.commit({A0: 5}))
    assert node.commits() == 0


def test_what_another_report_does_not_change_is_raised_by_each_poll_behind_a_refusal_until_one_is_accepted() -> None:
    node = Node()
    for _ in range(3):
        refuse(node, InvalidArgumentError(TOO_LONG, field_violations=[("member.topics", TOO_LONG)]))
        with pytest.raises(InvalidArgumentError, match=r"broker a does not take m as a member of g.*257 topics") as raised:
            poll(node)
        assert raised.value.field_violations == (("member.topics", TOO_LONG),)
        poll(node)
        node.world.advance(BACKOFF_MAX_S)
    node.member.call()
    node.member.answer()
    poll(node)
    node.member.call()
    node.member.answer()
    poll(node)
    assert node.steps.state.queues == (A0,)


def test_a_group_that_is_full_is_waited_for_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    node = Node()
    for _ in range(3):
        refuse(node, TooManyError("full"))
        poll(node)
        node.world.advance(BACKOFF_MAX_S)
    assert caplog.text.count("does not take m") == 1
    assert caplog.text.count("gives up") == 1


def test_another_report_is_made_at_once_and_the_refusal_of_the_one_before_is_no_news() -> None:
    node = Node()
    refuse(node, InvalidArgumentError(TOO_LONG))
    state = node.member.state
    assert state.due(node.world.now_s()) == []
    state.want({"T": "tags a"}, {"a": address_of("a")}, {})
    assert state.due(node.world.now_s()) == ["a"]
    assert state.take_refusal() is None


def test_a_broker_that_is_too_busy_for_reports_until_it_has_given_the_member_up_takes_it_no_more() -> None:
    node = Node()
    node.world.advance(GAP_S * 0.8)
    refuse(node, SystemBusyError("busy"))
    poll(node)
    assert list(node.steps.state.queues) == [A0]
    node.world.advance(GAP_S * 0.2)
    refuse(node, SystemBusyError("busy"))
    poll(node)
    assert list(node.steps.state.queues) == []


def test_nothing_is_taken_of_a_broker_that_refuses_however_long_it_does() -> None:
    """Others see this member at other brokers, so nobody else may have its queues. It cannot know."""
    state = MembershipState("g", "m", Average())
    queues: dict[str, Sequence[MessageQueue]] = {"T": [A0, B0]}
    state.want({"T": ""}, {name: address_of(name) for name in "ab"}, {})
    now_s, share = 0.0, None
    while now_s <= 3 * CLAIM_WAIT_S:
        ticket, *_ = state.begin("a", now_s)
        state.failed(ticket, InvalidArgumentError(TOO_LONG), now_s)
        ticket, _, request, _ = state.begin("b", now_s)
        member = pb.HoldMembershipRequest.FromString(request).member
        answer = pb.HoldMembershipResponse(version=2, broker_start=1, expiry_ms=25_000, members=[member])
        state.answered(ticket, answer.SerializeToString(), now_s)
        share = state.share(queues, now_s)
        assert share is not None
        assert A0 not in share
        state.claim(share)
        state.take_lost()
        now_s += 10.0
    assert share == [B0]


def test_a_broker_that_refuses_is_told_that_the_member_leaves_for_it_may_know_it_from_before() -> None:
    node = Node()
    refuse(node, InvalidArgumentError(TOO_LONG))
    assert [leave.is_away for leave in node.member.state.leave_requests()] == [False]


def test_a_broker_that_has_refused_and_is_an_older_one_now_is_consumed_as_such() -> None:
    node = Node()
    refuse(node, TooManyError("full"))
    poll(node)
    node.world.advance(BACKOFF_MAX_S)
    refuse(node, UnknownMethodError("an older version"))
    poll(node)
    assert list(node.steps.state.queues) == [A0]
    assert node.steps.stands(A0)


class Refused(FakeMember):
    """Its broker refuses it from the beginning."""

    def wait_known(self, timeout_s: float) -> None:
        self.call()
        assert self.ticket is not None
        self.state.failed(self.ticket, InvalidArgumentError(TOO_LONG), self._world.now_s())


def push_steps(world: FakeWorld, member: FakeMember) -> tuple[PushSteps, ConsumerSteps]:
    options = PushOptions(group="g")
    consumer = ConsumerSteps(options.consumer_options(), world.now_s, state=ListenedPulls(PullOptions("g")), member=member)
    state = PushState(options, {"T": listener()})
    return PushSteps(options, consumer, state, {"T": Wanted("T", listener())}, world.now_s), consumer


class RefusedLater(FakeMember):
    """Its broker refuses it when it has claimed its share."""

    def wait_granted(self, timeout_s: float) -> None:
        super().wait_granted(timeout_s)
        assert self.ticket is not None
        self.state.failed(self.ticket, InvalidArgumentError(TOO_LONG), self._world.now_s())


@pytest.mark.parametrize("later", [False, True])
def test_a_start_that_a_broker_refuses_is_refused(later: bool) -> None:
    world = FakeWorld(route_of("T", "a"), route_of(retry_topic("g"), "a"))
    steps, consumer = push_steps(world, RefusedLater(world) if later else Refused(world))
    with pytest.raises(InvalidArgumentError, match="257 topics"):
        world.driver.run(steps.start())
    assert consumer.state.queues == (), "what it had would be committed, in vain, when it is closed"


def test_a_push_consumer_that_a_broker_refuses_later_ends_by_that() -> None:
    world = FakeWorld(route_of("T", "a"), route_of(retry_topic("g"), "a"))
    member = FakeMember(world)
    steps, consumer = push_steps(world, member)
    world.driver.run(steps.start())
    member.call()
    assert member.ticket is not None
    member.state.failed(member.ticket, InvalidArgumentError(TOO_LONG), world.now_s())
    world.driver.run(consumer.before_poll())
    with pytest.raises(InvalidArgumentError) as raised:
        consumer.raise_trouble()
    with pytest.raises(InvalidArgumentError, match="257 topics"):
        steps.take_trouble(raised.value)
    assert steps.take_trouble(InvalidArgumentError("a pull's")) == []
    assert [method for _, method, *_ in world.calls if method == COMMIT_OFFSETS] == []


def test_what_a_broker_says_of_others_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Clients in other languages may have any name, and a condition may have several lines."""
    node = Node()
    node.member.answer_more = lambda: pb.HoldMembershipResponse(difference="\x1b[31mred\n does not consume T, m does")  # type: ignore[method-assign]
    node.member.answer()
    assert r"\x1b[31mred\n does not consume T" in caplog.messages[-1]
    assert caplog.messages[-1].isprintable()
