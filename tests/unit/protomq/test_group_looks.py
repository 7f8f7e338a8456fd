"""What consumers obey of their group's settings: the highest version of all brokers holds, and one that is away changes nothing."""

from __future__ import annotations

import logging

import pytest

from protomq import MessageQueue
from protomq._group_looks import FORGET_S, LOOK_AGAIN_S, LOOK_INTERVAL_S, GroupLooks
from protomq._methods import GET_GROUP
from protomq.errors import ConnectFailedError, UnknownMethodError
from protomq.v1 import group_service_pb2 as pb
from protomq.v1.group_pb2 import GroupSettings
from tests.support.fake_driver import FakeWorld, route_of

from .test_consumer_steps import A0, Brokers, Consumer

QUEUES = tuple(MessageQueue("T", name, 0) for name in "ab")


class Settings:
    """What brokers say of a group."""

    def __init__(self, world: FakeWorld) -> None:
        self.at: dict[str, GroupSettings] = {}
        self.sharing = ""
        world.answers[GET_GROUP] = self._answer

    def _answer(self, server: str, request: bytes) -> bytes:
        asked = pb.GetGroupRequest.FromString(request)
        assert asked.consumer_group == "g"
        self.is_broadcast = asked.broadcasting
        member = self.sharing if asked.broadcasting else ""
        return pb.GetGroupResponse(settings=self.at.get(server, GroupSettings()), sharing_member=member).SerializeToString()


@pytest.fixture
def world() -> FakeWorld:
    return FakeWorld(route_of("T", "a", "b"))


@pytest.fixture
def settings(world: FakeWorld) -> Settings:
    return Settings(world)


@pytest.fixture
def looks(world: FakeWorld) -> GroupLooks:
    return GroupLooks("g", world.now_s)


def without(flag: str, version: int) -> GroupSettings:
    settings = GroupSettings(version=version)
    setattr(settings, flag, False)
    return settings


def look(world: FakeWorld, looks: GroupLooks) -> int | None:
    world.driver.run(looks.look(QUEUES))
    return looks.retry_count_max


def test_the_highest_version_holds_until_all_brokers_have_a_lower_one(world: FakeWorld, settings: Settings, looks: GroupLooks) -> None:
    assert look(world, looks) is None
    settings.at = {"a": GroupSettings(version=2, retry_count_max=5), "b": GroupSettings(version=3, retry_count_max=0)}
    assert look(world, looks) == 0
    world.failures["b"].append(ConnectFailedError("away"))
    assert look(world, looks) == 0
    world.failures["a"].append(ConnectFailedError("away"))
    world.failures["b"].append(ConnectFailedError("away"))
    assert look(world, looks) == 0
    settings.at.clear()  # The group was deleted.
    assert look(world, looks) is None


def test_what_a_broker_said_holds_when_it_leaves_the_route_until_it_says_another_thing(
    world: FakeWorld, settings: Settings, looks: GroupLooks
) -> None:
    settings.at = {"a": GroupSettings(version=2, retry_count_max=5), "b": GroupSettings(version=3, retry_count_max=0)}
    assert look(world, looks) == 0
    for _ in range(2):
        world.driver.run(looks.look(QUEUES[:1]))
        assert looks.retry_count_max == 0, "b may come back with it"
    world.driver.run(looks.look(()))
    assert looks.retry_count_max == 0
    settings.at["b"] = GroupSettings(version=1, retry_count_max=9)
    assert look(world, looks) == 5


def test_a_broker_that_no_route_names_any_more_is_forgotten(world: FakeWorld, settings: Settings, looks: GroupLooks) -> None:
    settings.at = {"a": GroupSettings(version=2, retry_count_max=5), "b": GroupSettings(version=3, retry_count_max=0)}
    assert look(world, looks) == 0
    world.advance(FORGET_S)
    world.driver.run(looks.look(QUEUES[:1]))
    assert looks.retry_count_max == 0, "it may be restarting"
    world.advance(1)
    world.driver.run(looks.look(QUEUES[:1]))
    assert looks.retry_count_max == 5
    settings.at["b"] = GroupSettings(version=4, retry_count_max=1)
    assert look(world, looks) == 1
    world.failures["b"].append(ConnectFailedError("away"))
    world.advance(10 * FORGET_S)
    assert look(world, looks) == 1, "the route names it"


def test_brokers_are_asked_seldom_and_sooner_while_none_has_answered(world: FakeWorld, settings: Settings, looks: GroupLooks) -> None:
    assert looks.due_in_s(world.now_s()) == 0
    world.failures["a"].append(ConnectFailedError("away"))
    world.failures["b"].append(ConnectFailedError("away"))
    look(world, looks)
    assert looks.due_in_s(world.now_s()) == LOOK_AGAIN_S
    look(world, looks)
    assert looks.due_in_s(world.now_s()) == LOOK_INTERVAL_S


def test_a_broker_of_an_older_version_has_no_settings(world: FakeWorld, settings: Settings, looks: GroupLooks) -> None:
    world.failures["a"].append(UnknownMethodError("what?"))
    world.failures["b"].append(UnknownMethodError("what?"))
    assert look(world, looks) is None
    assert looks.due_in_s(world.now_s()) == LOOK_INTERVAL_S


@pytest.mark.parametrize("off", ["consume_enabled", "broadcast_enabled"])
def test_a_broadcasting_consumer_goes_by_the_settings_of_its_group(
    world: FakeWorld, settings: Settings, off: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    brokers = Brokers(world)
    brokers.ends[A0] = 5
    settings.at["a"] = without(off, 1)
    consumer = Consumer(world, broadcasting=True)
    consumer.subscribe()
    for _ in range(3):
        assert consumer.poll() == []
        world.advance(LOOK_INTERVAL_S)
    settings.at["a"] = GroupSettings(version=2, consume_enabled=True, broadcast_enabled=True)
    assert consumer.poll() == [(A0, 0), (A0, 1), (A0, 2)]
    settings.at["b"] = without(off, 3)
    world.advance(LOOK_INTERVAL_S)
    assert consumer.poll() == []
    world.failures["a"].append(ConnectFailedError("away"))
    world.failures["b"].append(ConnectFailedError("away"))
    world.advance(LOOK_INTERVAL_S)
    assert consumer.poll() == []
    assert [off in text or "again" in text for text in caplog.messages] == [True] * 3


def test_members_that_share_are_told_by_their_pulls_and_do_not_ask(world: FakeWorld, settings: Settings) -> None:
    Brokers(world)
    consumer = Consumer(world)
    consumer.subscribe()
    consumer.poll()
    assert not [one for one in world.calls if one[1] == GET_GROUP]


def test_a_broadcasting_consumer_says_once_that_members_share_the_group(
    world: FakeWorld, settings: Settings, looks: GroupLooks, caplog: pytest.LogCaptureFixture
) -> None:
    settings.sharing = "billing-7"
    look(world, looks)
    assert not settings.is_broadcast
    assert not caplog.messages
    for _ in range(2):
        world.driver.run(looks.look_at_broadcast(QUEUES))
    assert settings.is_broadcast
    (text,) = caplog.messages
    assert "the consumers of group g are not alike: billing-7 shares its queues" in text
