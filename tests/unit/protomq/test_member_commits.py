"""Commits of a member name its membership. A broker refuses those of one that is over; one that it does not know yet is made known."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest

from protomq import MessageQueue
from protomq._consumer_options import ConsumerOptions
from protomq._consumer_steps import ConsumerSteps
from protomq._filters import NO_FILTER
from protomq._membership_logic import CLAIM_HOLD_MS, HOLD_S, MembershipState
from protomq._methods import COMMIT_OFFSETS
from protomq._types import BrokerAddress
from protomq.allocation import Average
from protomq.errors import (
    MemberUnknownError,
    ProtomqError,
    QueueNotOwnedError,
    TooManyError,
    UnknownMethodError,
)
from protomq.v1 import membership_service_pb2 as pb
from protomq.v1.consumer_service_pb2 import CommitOffsetsRequest, CommittingMember
from tests.support.fake_driver import FakeWorld, address_of, route_of

from .test_stopped_member import A0, GAP_S, Node, Sharing


@pytest.fixture
def node() -> Node:
    return Node()


def sent(world: FakeWorld) -> list[tuple[str, CommitOffsetsRequest]]:
    """Commits, and to whom."""
    return [
        (server, CommitOffsetsRequest.FromString(request)) for server, method, request, _ in world.calls if method == COMMIT_OFFSETS
    ]


def commits(world: FakeWorld) -> list[CommitOffsetsRequest]:
    return [request for _, request in sent(world)]


def refuse(node: Node | Sharing, *errors: ProtomqError) -> None:
    node.world.failures["a"].extend(errors)


def say_lost(node: Node) -> None:
    """The broker has given the member up, and another one has the queue."""
    node.member.call()
    assert node.member.ticket is not None
    node.member.state.failed(node.member.ticket, MemberUnknownError("gone"), node.world.now_s())


def test_a_commit_names_the_membership(node: Node) -> None:
    node.world.driver.run(node.steps.commit({A0: 5}))
    (request,) = commits(node.world)
    client_id, nonce = node.member.state.key
    assert request.member == CommittingMember(client_id=client_id, nonce=nonce, member_epoch=1)


def test_one_that_was_given_up_and_joined_again_is_another_membership(node: Node) -> None:
    node.world.advance(GAP_S + HOLD_S)
    node.poll()
    node.member.call()
    node.member.answer()
    node.poll()
    node.member.call()
    node.member.answer()
    node.poll()
    assert node.steps.state.queues == (A0,)
    node.world.driver.run(node.steps.commit({A0: 5}))
    assert [request.member.member_epoch for request in commits(node.world)] == [2]


@pytest.mark.parametrize("how", ["assigned", "locks", "no member", "another topic", "no groups"])
def test_what_is_not_shared_by_a_membership_is_committed_without_one(node: Node, how: str) -> None:
    queue = A0
    if how == "assigned":
        node.steps.assigned = (A0,)
    if how == "locks":
        node.steps = ConsumerSteps(ConsumerOptions(group="g", lock_queues=True), node.world.now_s, member=node.member)
    if how == "no member":
        node.steps = ConsumerSteps(ConsumerOptions(group="g"), node.world.now_s)
    if how == "another topic":
        queue = MessageQueue("U", "a", 0)
        node.world.routes["U"] = route_of("U", "a")
    if how == "no groups":
        assert node.member.ticket is not None
        node.member.state.failed(node.member.ticket, UnknownMethodError("what?"), node.world.now_s())
    node.world.driver.run(node.steps.commit({queue: 5}))
    assert [request.HasField("member") for request in commits(node.world)] == [False]


def test_one_that_locks_its_queues_says_that_its_commits_do_not_name_it(node: Node) -> None:
    def epoch() -> int:
        return pb.HoldMembershipRequest.FromString(node.member.state.begin("a", node.world.now_s())[2]).member.member_epoch

    assert epoch() == 1
    ConsumerSteps(ConsumerOptions(group="g", lock_queues=True), node.world.now_s, member=node.member)
    assert epoch() == 0


@pytest.mark.parametrize("error", [MemberUnknownError("who?"), QueueNotOwnedError("whose?", metadata={"queue_ids": "0"})])
def test_a_broker_that_does_not_know_the_membership_yet_is_called_and_gets_the_commit_again(
    node: Node, error: ProtomqError, caplog: pytest.LogCaptureFixture
) -> None:
    refuse(node, error)
    node.world.advance(5.0)
    node.poll()
    assert node.member.asked == 1
    assert [offset.queue_offset for request in commits(node.world) for offset in request.offsets] == [5, 5]
    assert len({request.member.member_epoch for request in commits(node.world)}) == 1
    assert node.steps.state.to_commit(safe_only=True) == {}
    assert caplog.text == ""
    assert not node.lost.queues


def test_one_that_the_broker_has_given_up_drops_the_commit_and_the_queue(node: Node) -> None:
    refuse(node, MemberUnknownError("who?"))
    node.member.when_asked = lambda: say_lost(node)  # type: ignore[method-assign]
    node.world.advance(5.0)
    node.poll()
    assert (node.member.asked, len(commits(node.world))) == (1, 1)
    node.poll()
    assert node.lost.queues == [A0]
    assert len(commits(node.world)) == 1


def test_the_commit_of_the_program_tells_that_the_membership_is_over(node: Node) -> None:
    refuse(node, MemberUnknownError("who?"))
    node.member.when_asked = lambda: say_lost(node)  # type: ignore[method-assign]
    with pytest.raises(MemberUnknownError, match="who"):
        node.world.driver.run(node.steps.commit({A0: 5}))
    assert len(commits(node.world)) == 1


def test_a_broker_that_goes_on_refusing_is_asked_once(node: Node) -> None:
    refuse(node, MemberUnknownError("who?"), MemberUnknownError("still?"))
    with pytest.raises(MemberUnknownError, match="still"):
        node.world.driver.run(node.steps.commit({A0: 5}))
    assert (node.member.asked, len(commits(node.world))) == (1, 2)


def test_what_a_broker_that_takes_no_such_member_refused_is_not_committed_again(node: Node) -> None:
    def say_full() -> None:
        node.member.call()
        assert node.member.ticket is not None
        node.member.state.failed(node.member.ticket, TooManyError("full"), node.world.now_s())

    refuse(node, MemberUnknownError("who?"))
    node.member.when_asked = say_full  # type: ignore[method-assign]
    node.world.advance(5.0)
    node.poll()
    assert [request.HasField("member") for request in commits(node.world)] == [True]
    node.world.advance(5.0)
    node.poll()
    assert len(commits(node.world)) == 1
    assert node.lost.queues == [A0]


def test_the_last_commits_are_made_again_too() -> None:
    node = Node()
    refuse(node, MemberUnknownError("who?"))
    assert node.world.driver.run(node.steps.commit_last("on close")) is None
    assert len(commits(node.world)) == 2


def test_what_goes_is_committed_before_its_broker_hears_that_it_is_free_though_the_broker_has_just_started() -> None:
    node = Sharing()
    for queue in node.steps.state.queues:
        node.steps.state.seek(queue, 5)
    node.steps.state.user_came_back()
    said: list[list[int]] = []

    def look() -> None:
        ticket, _, request, _ = node.member.state.begin("a", node.world.now_s())
        node.member.ticket = ticket
        node.member._said = pb.HoldMembershipRequest.FromString(request).member
        said.append(list(node.member._said.topics[0].queue_ids))
        node.member.answer(*node.others)

    node.member.when_asked = look  # type: ignore[method-assign]
    node.others_are("z")
    refuse(node, MemberUnknownError("who?"))
    node.poll()
    assert said == [[0, 1, 2, 3]]
    assert [[offset.queue_id for offset in request.offsets] for request in commits(node.world)] == [[2, 3], [2, 3]]
    assert [queue.queue_id for queue in node.steps.state.queues] == [0, 1]


def test_queues_that_are_others_are_left_out_and_the_rest_is_committed() -> None:
    node = Sharing()
    q0, q1 = node.steps.state.queues[:2]
    error = QueueNotOwnedError("whose?", metadata={"queue_ids": "1", "owner": "z"})
    refuse(node, error, error)
    with pytest.raises(QueueNotOwnedError):
        node.world.driver.run(node.steps.commit({q0: 5, q1: 5}))
    assert [[offset.queue_id for offset in request.offsets] for request in commits(node.world)] == [[0, 1], [0, 1], [0]]
    assert all(request.HasField("member") for request in commits(node.world))


def test_while_one_broker_answers_the_member_may_give_up_what_it_has_at_the_next_and_names_the_membership_that_is_over() -> None:
    world = FakeWorld(route_of("T", "a", "b"))
    state = MembershipState("g", "m", Average())
    member = TwoBrokers(world, state)
    steps = ConsumerSteps(ConsumerOptions(group="g", auto_commit=False), world.now_s, member=member)
    world.driver.run(steps.subscribe("T", (), NO_FILTER))
    queues = dict.fromkeys(steps.state.queues, 5)
    assert len(queues) == 2
    epochs = {queue.broker_name: state.membership(queue) for queue in queues}

    def stop_and_poll(server: str, request: bytes) -> bytes:
        if server == "a":
            world.advance(GAP_S + HOLD_S)
            member.call_all()
            for _ in range(3):
                world.driver.run(steps.before_poll())
                member.call_all()
            assert set(steps.state.queues) == set(queues), "they have come back"
        return b""

    world.answers[COMMIT_OFFSETS] = stop_and_poll
    world.driver.run(steps.commit(queues))
    named = {server: request.member for server, request in sent(world)}
    before = epochs["b"]
    assert before is not None
    assert named["b"].member_epoch == before.member_epoch
    now = state.membership(MessageQueue("T", "b", 0))
    assert now is not None
    assert now.member_epoch != before.member_epoch


class TwoBrokers:
    """Makes the calls of a membership to two brokers, which take everybody."""

    def __init__(self, world: FakeWorld, state: MembershipState) -> None:
        self.state = state
        self.lock = contextlib.nullcontext()
        self._world = world

    def call_all(self) -> None:
        for name in ("a", "b"):
            ticket, _, request, _ = self.state.begin(name, self._world.now_s())
            said = pb.HoldMembershipRequest.FromString(request).member
            answer = pb.HoldMembershipResponse(version=2, broker_start=1, expiry_ms=int(GAP_S * 1000), members=[said])
            self.state.answered(ticket, answer.SerializeToString(), self._world.now_s())

    def poke(self) -> None:
        pass

    def wait_known(self, timeout_s: float) -> None:
        self.call_all()

    def wait_granted(self, timeout_s: float) -> None:
        self.call_all()

    def wait_answered(self, broker_name: str, timeout_s: float) -> None:
        self.call_all()


def test_the_queues_of_a_topic_that_is_not_wanted_any_more_are_the_members_until_their_last_commit() -> None:
    node = Sharing()
    for queue in node.steps.state.queues:
        node.steps.state.seek(queue, 5)
    node.steps.state.user_came_back()
    said: list[pb.GroupMember] = []

    def look(server: str, request: bytes) -> bytes:
        _, _, call, _ = node.member.state.begin("a", node.world.now_s())
        said.append(pb.HoldMembershipRequest.FromString(call).member)
        return b""

    node.world.answers[COMMIT_OFFSETS] = look
    node.world.driver.run(node.steps.unsubscribe("T"))
    (request,) = commits(node.world)
    assert request.HasField("member")
    assert [(topic.topic, list(topic.queue_ids)) for topic in said[0].topics] == [("T", [0, 1, 2, 3])]
    _, _, call, _ = node.member.state.begin("a", node.world.now_s())
    assert not pb.HoldMembershipRequest.FromString(call).member.topics
    assert node.member.state.membership(A0) is None


def test_a_broker_that_is_asked_answers_at_once_where_the_route_has_it_and_an_answer_from_before_is_none(node: Node) -> None:
    state, now_s = node.member.state, node.world.now_s()
    state.ask("a", BrokerAddress("a", "new:1", "new:2"))
    assert state.due(now_s) == ["a"]
    assert not state.is_answered("a")
    node.member.answer()
    assert not state.is_answered("a"), "it was on its way"
    ticket, address, request, _ = state.begin("a", now_s)
    assert address.remoting_address == "new:2"
    assert pb.HoldMembershipRequest.FromString(request).hold_ms == CLAIM_HOLD_MS
    node.member.ticket = ticket
    node.member.fail()
    assert not state.is_answered("a"), "it is called again"
    node.member.call()
    node.member.answer()
    assert state.is_answered("a")
    _, _, request, _ = state.begin("a", now_s)
    assert pb.HoldMembershipRequest.FromString(request).hold_ms > CLAIM_HOLD_MS
    assert state.is_answered("who?")


def test_a_commit_that_a_new_master_refuses_makes_the_member_call_the_new_master(node: Node) -> None:
    moved = address_of("a")._replace(remoting_address="master:2")
    node.world.routes["T"] = dataclasses.replace(node.world.routes["T"], brokers={"a": moved})
    called: list[str] = []

    def look() -> None:
        node.member.ticket, address, request, _ = node.member.state.begin("a", node.world.now_s())
        called.append(address.remoting_address)
        node.member._said = pb.HoldMembershipRequest.FromString(request).member
        node.member.answer()

    node.member.when_asked = look  # type: ignore[method-assign]
    refuse(node, MemberUnknownError("who?"))
    node.world.driver.run(node.steps.commit({A0: 5}))
    assert called == ["master:2"]
    assert len(commits(node.world)) == 2
