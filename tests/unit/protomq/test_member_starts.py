"""`resume=False` holds for queues that nobody of the group has had since the member began: others go on where the group is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protomq import MessageQueue
from protomq._consumer_options import ConsumerOptions
from protomq._consumer_steps import ConsumerSteps
from protomq._filters import NO_FILTER
from protomq.v1 import membership_service_pb2 as pb
from tests.support.fake_driver import FakeWorld, route_of

from .test_consumer_steps import Brokers
from .test_stopped_member import FakeMember

QUEUES = tuple(MessageQueue("T", "a", queue_id) for queue_id in range(4))


class JoiningMember(FakeMember):
    """A member "m" of a group that may have others."""

    others: tuple[pb.GroupMember, ...] = ()

    def wait_known(self, timeout_s: float) -> None:
        self.call()
        self.answer(*self.others)
        self.call()


class Joining:
    """A member that does not resume, of a group that has committed 5 in all queues."""

    def __init__(self, *others: pb.GroupMember, begin: str = "latest", auto_create: bool = False) -> None:
        route = route_of("T", "a", queues=4)
        self.world = FakeWorld(replace(route, auto_create=auto_create))
        self.brokers = Brokers(self.world)
        self.brokers.ends = dict.fromkeys(QUEUES, 9)
        self.brokers.committed = dict.fromkeys(QUEUES, 5)
        self.member = JoiningMember(self.world)
        self.member.others = others
        options = ConsumerOptions(group="g", begin=begin, resume=False)  # type: ignore[arg-type]
        self.steps = ConsumerSteps(options, self.world.now_s, member=self.member)
        self.world.driver.run(self.steps.subscribe("T", (), NO_FILTER))

    def others_are(self, *others: pb.GroupMember) -> None:
        self.member.others = others
        for _ in range(2):
            self.member.wait_known(0.0)
            self.world.driver.run(self.steps.before_poll())

    def positions(self) -> dict[int, int | None]:
        return {queue.queue_id: self.steps.state.position(queue) for queue in self.steps.state.queues}


def other(*queue_ids: int) -> pb.GroupMember:
    return pb.GroupMember(client_id="z", nonce=2, topics=[pb.MemberTopic(topic="T", queue_ids=queue_ids)])


def test_queues_that_another_member_had_go_on_where_it_committed() -> None:
    node = Joining(other(2, 3))
    assert node.positions() == {0: 9, 1: 9}
    node.brokers.committed |= dict.fromkeys(QUEUES[2:], 7)
    node.others_are()
    assert node.positions() == {0: 9, 1: 9, 2: 7, 3: 7}


def test_so_do_queues_that_another_had_which_were_not_of_the_members_share_then() -> None:
    node = Joining(other(0, 1, 2, 3))
    assert node.positions() == {}
    node.others_are()
    assert node.positions() == dict.fromkeys(range(4), 5)


def test_so_do_queues_that_were_free_when_the_other_was_to_take_them() -> None:
    node = Joining(other())
    assert node.positions() == {0: 9, 1: 9}
    node.brokers.committed |= dict.fromkeys(QUEUES[2:], 7)
    node.others_are()
    assert node.positions() == {0: 9, 1: 9, 2: 7, 3: 7}


def test_a_queue_that_comes_back_goes_on_where_it_was_committed() -> None:
    node = Joining(begin="earliest")
    assert node.positions() == dict.fromkeys(range(4), 0)
    assert node.brokers.committed == dict.fromkeys(QUEUES, 0), "else its next owner begins where the group was before"
    node.others_are(other())
    assert node.positions() == {0: 0, 1: 0}
    node.brokers.committed |= dict.fromkeys(QUEUES[2:], 7)
    node.others_are()
    assert node.positions() == {0: 0, 1: 0, 2: 7, 3: 7}


@pytest.mark.parametrize(("auto_create", "start"), [(True, 0), (False, 9)])
def test_nothing_is_skipped_of_a_topic_that_was_made_after_the_member_subscribed(auto_create: bool, start: int) -> None:
    node = Joining(other(0, 1, 2, 3), auto_create=auto_create)
    node.world.routes["T"] = route_of("T", "a", queues=4)
    node.brokers.committed.clear()  # The other one was killed before it could say where it began.
    node.others_are()
    assert node.positions() == dict.fromkeys(range(4), start)
    assert node.brokers.committed == dict.fromkeys(QUEUES, start)


def test_nothing_is_skipped_of_a_topic_that_was_made_again_in_a_queue_that_comes_from_another_member() -> None:
    node = Joining(other(2, 3))
    assert node.positions() == {0: 9, 1: 9}
    node.brokers.incarnation = 8
    node.brokers.committed.clear()  # The other one was killed before it could say where it began.
    node.others_are()
    assert node.positions() == {0: 9, 1: 9, 2: 0, 3: 0}, "of the first two a pull will tell"


def test_a_topic_that_is_subscribed_to_again_is_begun_again() -> None:
    node = Joining()
    node.world.driver.run(node.steps.unsubscribe("T"))
    node.brokers.committed = dict.fromkeys(QUEUES, 5)
    node.world.driver.run(node.steps.subscribe("T", (), NO_FILTER))
    assert node.positions() == dict.fromkeys(range(4), 9)
