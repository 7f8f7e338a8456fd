"""A member that is stopped for longer than its own clock allows, and less than its broker waits: it asks before it gives anything up."""

from __future__ import annotations

import pytest

from protomq._membership_logic import CLAIM_HOLD_MS, DOUBT_S, HOLD_S
from protomq.errors import ConnectionLostError, MemberUnknownError
from protomq.v1 import membership_service_pb2 as pb
from tests.unit.protomq.test_stopped_member import A0, GAP_S, Node, other

LATE_S = HOLD_S + 17.0
"""Since its last call was sent: the broker answered that after HOLD_S, and has waited for 17 s."""


def waking() -> Node:
    """It has called again, since the answer lay there or not; it does not know more yet."""
    node = Node()
    node.member.when_asked = lambda: None  # type: ignore[method-assign]
    node.world.advance(LATE_S)
    return node


def asked(node: Node) -> pb.HoldMembershipRequest:
    """Its call, as its driver makes it."""
    assert node.member.state.due(node.world.now_s()) == ["a"]
    ticket, _, request, timeout_s = node.member.state.begin("a", node.world.now_s())
    assert timeout_s == DOUBT_S
    node.member.ticket = ticket
    return pb.HoldMembershipRequest.FromString(request)


def answer(
    node: Node, request: pb.HoldMembershipRequest, *others: pb.GroupMember, version: int = 2, start: int = 1, is_confirmed: bool = False
) -> None:
    assert node.member.ticket is not None
    said = pb.HoldMembershipResponse(
        version=version, broker_start=start, expiry_ms=int(GAP_S * 1000), members=[request.member, *others], is_confirmed=is_confirmed
    )
    node.member.state.answered(node.member.ticket, said.SerializeToString(), node.world.now_s())


@pytest.mark.parametrize("first", ["poll", "old answer", "old error"])
@pytest.mark.parametrize("is_confirmed", [True, False])
def test_it_goes_on_where_the_broker_says_that_it_was_a_member_all_along_whoever_runs_first(first: str, is_confirmed: bool) -> None:
    node = waking()
    if first == "old answer":
        node.member.answer()
    if first == "old error":
        node.member.fail()
    else:
        node.poll()
    assert not node.steps.stands(A0)
    node.world.advance(0.2)
    epoch = node.member.state.membership(A0)
    request = asked(node)
    assert request.only_if_member
    assert not request.claims_only
    assert request.hold_ms == CLAIM_HOLD_MS
    assert [list(topic.queue_ids) for topic in request.member.topics] == [[0]]
    node.poll()
    assert not node.steps.stands(A0)
    assert node.commits() == 0
    news = node.member.state.news
    # One of an earlier version does not confirm, and says that nothing has changed.
    answer(node, request, version=9 if is_confirmed else 2, is_confirmed=is_confirmed)
    assert node.member.state.news > news
    assert node.steps.stands(A0)
    assert node.member.state.membership(A0) == epoch
    node.world.advance(5.0)
    node.poll()
    assert node.commits() == 1
    assert not node.lost.queues
    assert not pb.HoldMembershipRequest.FromString(node.member.state.begin("a", node.world.now_s())[2]).only_if_member


@pytest.mark.parametrize(("version", "start"), [(3, 1), (2, 5)])
def test_it_gives_its_queues_up_where_a_broker_of_an_earlier_version_may_have_given_it_up(version: int, start: int) -> None:
    node = waking()
    node.poll()
    answer(node, asked(node), other("z"), version=version, start=start)
    assert not node.steps.stands(A0)
    node.poll()
    assert node.lost.queues == [A0]
    assert node.commits() == 0


def test_it_gives_its_queues_up_where_the_broker_knows_it_no_more() -> None:
    node = waking()
    node.poll()
    asked(node)
    assert node.member.ticket is not None
    node.member.state.failed(node.member.ticket, MemberUnknownError("no"), node.world.now_s())
    assert not node.steps.stands(A0)
    node.poll()
    assert node.lost.queues == [A0]
    assert node.commits() == 0


def test_it_asks_again_where_the_connection_is_gone_and_gives_its_queues_up_when_nobody_answers_in_time() -> None:
    node = waking()
    node.poll()
    asked(node)
    assert node.member.ticket is not None
    node.member.state.failed(node.member.ticket, ConnectionLostError("gone"), node.world.now_s())
    node.poll()
    assert not node.lost.queues
    node.world.advance(0.2)
    assert asked(node).only_if_member
    node.world.advance(DOUBT_S)
    assert not node.steps.stands(A0)
    node.poll()
    assert node.lost.queues == [A0]
    assert node.commits() == 0


def test_a_commit_of_the_program_waits_for_the_word_of_the_broker() -> None:
    node = waking()

    def when_asked() -> None:
        answer(node, asked(node), is_confirmed=True)

    node.member.when_asked = when_asked  # type: ignore[method-assign]
    node.world.driver.run(node.steps.commit({A0: 5}))
    assert node.commits() == 1
    assert node.member.asked == 1


def test_no_poll_is_due_while_it_waits_for_the_word_of_the_broker() -> None:
    node = waking()
    node.poll()
    asked(node)
    assert node.steps.group_due_in_s(node.world.now_s()) > 0.0


def test_what_others_have_by_a_late_answer_goes_only_when_it_is_sure_and_with_a_last_commit() -> None:
    node = waking()
    node.member.answer(other("a"))  # First in the order of names: it is to have the only queue.
    node.poll()
    assert list(node.steps.state.queues) == [A0]
    request = asked(node)
    answer(node, request, other("a"), is_confirmed=True)
    node.poll()
    assert not node.steps.state.queues
    assert node.commits() == 1
    assert not node.lost.queues


def test_an_answer_that_it_reads_too_late_confirms_nothing() -> None:
    node = waking()
    node.poll()
    request = asked(node)
    node.world.advance(LATE_S)
    node.poll()
    assert node.lost.queues == [A0]
    answer(node, request, is_confirmed=True)
    assert node.commits() == 0
