"""A member that is stopped past its time and wakes up: others have its queues, so it begins and commits nothing of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import pytest

from protomq import MessageQueue
from protomq._consumer_options import ConsumerOptions
from protomq._consumer_steps import ConsumerSteps
from protomq._filters import NO_FILTER
from protomq._membership_logic import (
    CLAIM_HOLD_MS,
    EXPIRY_PART,
    HOLD_S,
    MembershipState,
    MemberTicket,
)
from protomq._methods import COMMIT_OFFSETS
from protomq._queue_listener import QueueListener
from protomq._queue_locks import QueueLocks
from protomq.allocation import Average
from protomq.errors import (
    ConnectFailedError,
    ConnectionLostError,
    MemberUnknownError,
    SystemBusyError,
)
from protomq.v1 import membership_service_pb2 as pb
from protomq.v1.consumer_service_pb2 import CommitOffsetsRequest
from tests.support.fake_driver import FakeWorld, route_of

GAP_S = 25.0
A0 = MessageQueue("T", "a", 0)


class FakeMember:
    """Makes the calls of a membership when a test says so; broker "a" takes everybody."""

    def __init__(self, world: FakeWorld) -> None:
        self.state = MembershipState("g", "m", Average())
        self.lock = contextlib.nullcontext()
        self._world = world
        self.ticket: MemberTicket | None = None
        self._said = pb.GroupMember()
        self.asked = 0

    def call(self) -> None:
        self.ticket, _, request, _ = self.state.begin("a", self._world.now_s())
        self._said = pb.HoldMembershipRequest.FromString(request).member

    def answer(self, *others: pb.GroupMember) -> None:
        assert self.ticket is not None
        answer = pb.HoldMembershipResponse(version=2, broker_start=1, expiry_ms=int(GAP_S * 1000), members=[self._said, *others])
        answer.MergeFrom(self.answer_more())
        self.state.answered(self.ticket, answer.SerializeToString(), self._world.now_s())

    def answer_more(self) -> pb.HoldMembershipResponse:
        """What else the broker says."""
        return pb.HoldMembershipResponse()

    def fail(self) -> None:
        assert self.ticket is not None
        self.state.failed(self.ticket, ConnectionLostError("gone"), self._world.now_s())

    def poke(self) -> None:
        pass

    def wait_known(self, timeout_s: float) -> None:
        self.call()
        self.answer()
        self.call()

    def wait_granted(self, timeout_s: float) -> None:
        self.wait_known(timeout_s)

    def wait_answered(self, broker_name: str, timeout_s: float) -> None:
        self.asked += 1
        self.when_asked()

    def when_asked(self) -> None:
        """The broker takes the member as it is."""
        self.call()
        self.answer()
        self.call()


class Lost(QueueListener):
    def __init__(self) -> None:
        self.queues: list[MessageQueue] = []

    def on_lost(self, queues: Sequence[MessageQueue]) -> None:
        self.queues += queues


class Node:
    """A member with queue a/0, of which it has dealt with five messages that are not committed."""

    def __init__(self) -> None:
        self.world = FakeWorld(route_of("T", "a"))
        self.member, self.lost = FakeMember(self.world), Lost()
        self.steps = ConsumerSteps(
            ConsumerOptions(group="g", auto_commit_interval_s=5.0), self.world.now_s, self.lost, member=self.member
        )
        self.world.driver.run(self.steps.subscribe("T", (), NO_FILTER))
        assert self.steps.state.queues == (A0,)
        self.steps.state.start_all([A0], {0: 0}, {}, 7)
        self.steps.state.seek(A0, 5)
        self.steps.state.user_came_back()
        assert self.steps.state.to_commit(safe_only=True) == {A0: 5}

    def poll(self) -> None:
        self.world.driver.run(self.steps.before_poll())

    def commits(self) -> int:
        return sum(method == COMMIT_OFFSETS for _, method, *_ in self.world.calls)


@pytest.fixture
def node() -> Node:
    return Node()


def test_one_that_goes_on_commits(node: Node) -> None:
    node.world.advance(HOLD_S)
    node.member.answer()
    node.member.call()
    node.poll()
    assert node.commits() == 1
    assert not node.lost.queues


@pytest.mark.parametrize("first", ["poll", "old answer", "old answer and call", "error and call"])
def test_one_that_wakes_up_commits_nothing_whoever_runs_first(node: Node, first: str) -> None:
    node.world.advance(GAP_S + HOLD_S)
    assert not node.steps.stands(A0)
    if "answer" in first:
        node.member.answer()
    if "error" in first:
        node.member.fail()
    if "call" in first:
        node.member.call()
    assert not node.steps.stands(A0)
    node.poll()
    assert node.commits() == 0
    assert node.lost.queues == [A0]


def test_the_last_commit_and_that_of_the_program_say_that_others_may_have_the_queues(node: Node) -> None:
    node.world.advance(GAP_S + HOLD_S)
    assert isinstance(node.world.driver.run(node.steps.commit_last("on close")), MemberUnknownError)
    with pytest.raises(MemberUnknownError):
        node.world.driver.run(node.steps.commit({A0: 5}))
    assert node.commits() == 0


def test_while_calls_fail_for_long_nothing_is_committed_until_one_is_answered(node: Node) -> None:
    for _ in range(int(GAP_S)):
        node.member.fail()
        node.world.advance(1.0)
        node.member.call()
    node.poll()
    assert node.commits() == 0
    assert not node.lost.queues
    node.member.answer()
    node.world.advance(5.0)
    node.poll()
    assert node.commits() == 1


def test_calls_that_fail_for_a_moment_do_not_hold_commits_up(node: Node) -> None:
    node.world.advance(HOLD_S)
    node.member.fail()
    node.member.call()
    node.poll()
    assert node.commits() == 1
    assert HOLD_S < GAP_S * EXPIRY_PART


@pytest.mark.parametrize("locks", [False, True])
def test_while_calls_fail_for_long_nothing_of_a_locked_queue_is_begun_for_its_lock_may_be_over(locks: bool) -> None:
    node = Node()
    if locks:
        node.steps.locks = QueueLocks("g", lambda: node.member.state.key, node.world.now_s)
    for second in range(int(GAP_S)):
        assert node.steps.stands(A0), second
        node.member.fail()
        node.world.advance(1.0)
        node.member.call()
        if second >= GAP_S * EXPIRY_PART - 2:
            break
    node.world.advance(2.0)
    assert node.steps.stands(A0) is not locks
    node.member.answer()
    assert node.steps.stands(A0)


class Told(QueueListener):
    """What is told, in order; `meanwhile` happens while queues go."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, tuple[int, ...]]] = []
        self.meanwhile: list[Callable[[], None]] = []

    def on_assigned(self, queues: Sequence[MessageQueue]) -> None:
        self.lines.append(("came", tuple(queue.queue_id for queue in queues)))

    def on_revoked(self, queues: Sequence[MessageQueue]) -> None:
        self.lines.append(("went", tuple(queue.queue_id for queue in queues)))
        if self.meanwhile:
            self.meanwhile.pop()()


def other(name: str) -> pb.GroupMember:
    return pb.GroupMember(client_id=name, nonce=2, topics=[pb.MemberTopic(topic="T")])


class Sharing:
    """A member "m" with all four queues of a topic; others come and go."""

    def __init__(self) -> None:
        self.world, self.told = FakeWorld(route_of("T", "a", queues=4)), Told()
        self.member = FakeMember(self.world)
        self.steps = ConsumerSteps(ConsumerOptions(group="g"), self.world.now_s, self.told, member=self.member)
        self.world.driver.run(self.steps.subscribe("T", (), NO_FILTER))
        self.steps.state.start_all(self.steps.state.queues, dict.fromkeys(range(4), 0), {}, 7)
        self.told.lines.clear()
        self.others: tuple[pb.GroupMember, ...] = ()

    def others_are(self, *names: str) -> None:
        self.others = tuple(map(other, names))
        self.member.call()
        self.member.answer(*self.others)

    def poll(self) -> None:
        self.world.driver.run(self.steps.before_poll())
        if self.member.state.has_open_claims():
            self.member.call()
            self.member.answer(*self.others)
            self.world.driver.run(self.steps.before_poll())


def test_a_queue_that_goes_while_others_go_is_told_and_committed_as_they_are() -> None:
    node = Sharing()
    for queue in node.steps.state.queues:
        node.steps.state.seek(queue, 5)
    node.steps.state.user_came_back()
    node.told.meanwhile = [lambda: node.others_are("y", "z", "zz")]
    node.others_are("z")
    node.poll()
    assert node.told.lines == [("went", (2, 3)), ("went", (1,))]
    assert [queue.queue_id for queue in node.steps.state.queues] == [0]
    commits = [CommitOffsetsRequest.FromString(request) for _, method, request, _ in node.world.calls if method == COMMIT_OFFSETS]
    assert [[offset.queue_id for offset in commit.offsets] for commit in commits] == [[2, 3], [1]]


def with_some_to_commit() -> Sharing:
    """A member that has dealt with five messages of each of its four queues."""
    node = Sharing()
    for queue in node.steps.state.queues:
        node.steps.state.seek(queue, 5)
    node.steps.state.user_came_back()
    return node


def commits_of(node: Sharing) -> list[list[int]]:
    """The queues of each commit."""
    requests = [CommitOffsetsRequest.FromString(request) for _, method, request, _ in node.world.calls if method == COMMIT_OFFSETS]
    return [[offset.queue_id for offset in request.offsets] for request in requests]


@pytest.mark.parametrize("refusals", [1, 7])
def test_a_queue_that_goes_while_its_broker_is_busy_is_free_only_when_it_is_committed(
    refusals: int, caplog: pytest.LogCaptureFixture
) -> None:
    node = with_some_to_commit()
    said: list[list[int]] = []

    def busy_for_a_while(server: str, request: bytes) -> bytes:
        ticket, _, hold, _ = node.member.state.begin("a", node.world.now_s())
        node.member.ticket, node.member._said = ticket, pb.HoldMembershipRequest.FromString(hold).member
        said.append(list(node.member._said.topics[0].queue_ids))
        node.member.answer(*node.others)
        if len(said) <= refusals:
            raise SystemBusyError("busy")
        return b""

    node.world.answers[COMMIT_OFFSETS] = busy_for_a_while
    node.others_are("z")
    node.poll()
    assert commits_of(node) == [[2, 3]] * (refusals + 1)
    assert said == [[0, 1, 2, 3]] * (refusals + 1)
    assert [queue.queue_id for queue in node.steps.state.queues] == [0, 1]
    assert "not committed" not in caplog.text


def test_a_queue_that_goes_uncommitted_is_told_each_time_that_happens(caplog: pytest.LogCaptureFixture) -> None:
    node = with_some_to_commit()
    node.world.failures["a"].extend(SystemBusyError("busy") for _ in range(99))
    begun_s = node.world.now_s()
    for others in (["z"], ["y", "z", "zz"]):
        node.others_are(*others)
        node.poll()
    assert 4.8 < node.world.now_s() - begun_s < 6.0
    assert [text for text in caplog.messages if "not committed" in text] == ["offsets of g in T/a not committed when they went: busy"] * 2


def test_a_queue_that_goes_holds_up_no_other_where_its_broker_is_away(caplog: pytest.LogCaptureFixture) -> None:
    node = with_some_to_commit()
    node.world.failures["a"].extend(ConnectFailedError("gone") for _ in range(9))
    node.others_are("z")
    node.poll()
    assert node.world.pauses == []
    assert [text for text in caplog.messages if "not committed" in text] == ["offsets of g in T/a not committed when they went: gone"]


def cut_off_after_1_s(node: Sharing) -> None:
    """Each poll is within `asyncio.wait_for`, and the broker does not answer a commit in time."""

    def cut_off(server: str, request: bytes) -> bytes:
        node.world.advance(1.0)
        raise asyncio.CancelledError

    node.world.answers[COMMIT_OFFSETS] = cut_off


def poll_until_cut_off(node: Sharing) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        node.poll()


def test_polls_that_are_cut_off_again_and_again_give_a_queue_away_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    node = with_some_to_commit()
    cut_off_after_1_s(node)
    node.others_are("z")
    begun_s = node.world.now_s()
    for _ in range(20):
        poll_until_cut_off(node)
    assert [queue.queue_id for queue in node.steps.state.queues] == [0, 1]
    assert node.told.lines == [("went", (2, 3))]
    assert node.world.now_s() - begun_s < node.steps.options.request_timeout_s + 2
    assert caplog.text.count("each poll was cut off before that") == 1


def test_what_a_poll_that_was_cut_off_did_not_give_away_goes_in_the_next_one() -> None:
    node = with_some_to_commit()
    cut_off_after_1_s(node)
    node.others_are("z")
    poll_until_cut_off(node)
    assert len(node.steps.state.queues) == 4
    del node.world.answers[COMMIT_OFFSETS]
    assert not node.steps.is_settled(node.world.routes.get)
    node.poll()
    assert [queue.queue_id for queue in node.steps.state.queues] == [0, 1]
    assert node.told.lines == [("went", (2, 3))]
    assert commits_of(node) == [[2, 3], [2, 3]]
    assert node.steps.is_settled(node.world.routes.get)


def test_a_topic_goes_in_the_next_poll_where_its_unsubscribe_was_cut_off() -> None:
    world = FakeWorld(route_of("T", "a"), route_of("U", "a"))
    told = Told()
    steps = ConsumerSteps(ConsumerOptions(group="g"), world.now_s, told)
    for topic in ("T", "U"):
        world.driver.run(steps.subscribe(topic, (), NO_FILTER))
    told.lines.clear()

    def interrupt() -> None:
        raise KeyboardInterrupt

    told.meanwhile = [interrupt]
    with pytest.raises(KeyboardInterrupt):
        world.driver.run(steps.unsubscribe("T"))
    world.driver.run(steps.before_poll())
    assert [queue.topic for queue in steps.state.queues] == ["U"]
    assert told.lines == [("went", (0,)), ("went", (0,))]


def test_a_queue_that_is_wanted_again_once_its_listener_was_told_that_it_goes_comes_as_a_new_one() -> None:
    node = with_some_to_commit()
    cut_off_after_1_s(node)
    node.others_are("z")
    poll_until_cut_off(node)
    del node.world.answers[COMMIT_OFFSETS]
    node.others_are()
    node.poll()
    assert node.told.lines == [("went", (2, 3)), ("came", (2, 3))]
    assert len(node.steps.state.queues) == 4


def test_a_queue_that_comes_back_while_it_goes_comes_as_a_new_one() -> None:
    node = Sharing()
    node.told.meanwhile = [node.others_are]
    node.others_are("z")
    node.poll()
    assert node.told.lines == [("went", (2, 3)), ("came", (2, 3))]
    assert len(node.steps.state.queues) == 4


def test_a_queue_is_not_taken_before_its_broker_has_said_that_nobody_was_faster() -> None:
    node = Sharing()
    node.others_are("z")
    node.poll()
    assert [queue.queue_id for queue in node.steps.state.queues] == [0, 1]
    node.others_are()  # The list says that 2 and 3 are free.
    node.world.driver.run(node.steps.before_poll())
    assert [queue.queue_id for queue in node.steps.state.queues] == [0, 1]
    faster = other("z")
    faster.topics.add(topic="T", queue_ids=[3])
    ticket, _, request, _ = node.member.state.begin("a", node.world.now_s())
    said = pb.HoldMembershipRequest.FromString(request)
    assert list(said.member.topics[0].queue_ids) == [0, 1, 2, 3]
    assert said.hold_ms == CLAIM_HOLD_MS
    assert said.claims_only
    assert said.known_version == 2
    node.member.ticket = ticket
    node.member.answer(faster)
    node.world.driver.run(node.steps.before_poll())
    assert 3 not in [queue.queue_id for queue in node.steps.state.queues]
    _, _, request, _ = node.member.state.begin("a", node.world.now_s())
    said = pb.HoldMembershipRequest.FromString(request)
    assert 3 not in said.member.topics[0].queue_ids
    assert said.hold_ms > CLAIM_HOLD_MS


class QuickMember(FakeMember):
    """Its thread hears that its claims are granted before anybody asks whether they are."""

    def __init__(self, world: FakeWorld) -> None:
        super().__init__(world)
        self.pokes_with_claims = 0

    def poke(self) -> None:
        self.pokes_with_claims += self.state.has_open_claims()
        # The first is of the look that makes the claims, the second tells of the queues after that look.
        if self.pokes_with_claims == 2:
            self.wait_known(0.0)

    def wait_granted(self, timeout_s: float) -> None:
        raise AssertionError("nothing is waited for")


def test_claims_that_are_granted_before_anybody_waits_are_queues_when_subscribe_returns() -> None:
    world = FakeWorld(route_of("T", "a"))
    steps = ConsumerSteps(ConsumerOptions(group="g"), world.now_s, Lost(), member=QuickMember(world))
    world.driver.run(steps.subscribe("T", (), NO_FILTER))
    assert steps.state.queues == (A0,)
