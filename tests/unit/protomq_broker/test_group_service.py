"""GroupService through fake lanes: settings of groups, and pulls of one that is switched off."""

from __future__ import annotations

from typing import Any

import pytest

from protomq.v1.admin_service_pb2 import DeleteGroupRequest
from protomq.v1.consumer_service_pb2 import CommitOffsetsRequest, QueueOffset
from protomq.v1.group_pb2 import GroupSettings
from protomq.v1.group_service_pb2 import (
    GetGroupRequest,
    GetGroupResponse,
    ListGroupSettingsRequest,
    PutGroupRequest,
)
from protomq.v1.pull_service_pb2 import PullRequest
from protomq_broker.store.state.group_settings import GroupSettings as StoredSettings

from .fake_broker import ADMIN, CONSUMER, GROUP, PULL, FakeBroker, told

MINUTES_MS = [60_000 * minute for minute in range(1, 11)]


def put(broker: FakeBroker, **fields: Any) -> GroupSettings:
    request = PutGroupRequest(settings=GroupSettings(**{"consumer_group": "g", **fields}))
    settings = broker.call(GROUP + "PutGroup", request).response().settings
    assert isinstance(settings, GroupSettings)
    return settings


def get(broker: FakeBroker, group: str = "g") -> GetGroupResponse:
    response = broker.call(GROUP + "GetGroup", GetGroupRequest(consumer_group=group)).response()
    assert isinstance(response, GetGroupResponse)
    return response


def pull(group: str = "g", **fields: Any) -> PullRequest:
    return PullRequest(topic="topic", queue_id=0, consumer_group=group, **fields)


def test_without_settings_there_are_the_defaults_and_what_they_come_to() -> None:
    found = get(FakeBroker())
    assert (found.settings.version, found.retry_count_max) == (0, 16)
    assert list(found.retry_delays_ms) == [10_000, 30_000, *MINUTES_MS, 1_200_000, 1_800_000, 3_600_000, 7_200_000]  # fmt: skip
    assert found.settings.consume_enabled
    assert found.settings.broadcast_enabled


def test_settings_are_stored_and_told() -> None:
    broker = FakeBroker()
    stored = put(broker, orderly=True, retry_delays_ms=[5, 7], broadcast_enabled=False)
    found = get(broker)
    assert found.settings == stored
    assert (found.retry_count_max, list(found.retry_delays_ms)) == (-1, [5, 7])
    assert (stored.version, stored.orderly, stored.broadcast_enabled) == (1, True, False)
    assert get(broker, "other").settings.version == 0


def test_the_delays_are_those_of_the_brokers_levels() -> None:
    assert list(get(FakeBroker(delay_levels="1s 2s 3s 4s")).retry_delays_ms) == [3_000, 4_000]
    assert list(get(FakeBroker(delay_levels="1s")).retry_delays_ms) == [1_000]


def test_settings_with_no_higher_version_change_nothing_and_are_told_so() -> None:
    broker = FakeBroker()
    first = put(broker, retry_count_max=3, version=9)
    assert put(broker, retry_count_max=4, version=9) == first
    assert put(broker, retry_count_max=4, version=10).retry_count_max == 4


def test_a_group_at_the_highest_version_can_still_be_set_up() -> None:
    """One that it has from before there was a limit, and one at the limit."""
    broker = FakeBroker()
    assert put(broker, version=1 << 62).version == 1 << 62
    assert put(broker, retry_count_max=2).version == (1 << 62) + 1
    broker.store.groups.put(StoredSettings("g", version=(1 << 63) - 2))
    for count in (3, 4, 5):
        held = put(broker, retry_count_max=count)
        assert (held.retry_count_max, held.version) == (count, (1 << 63) - 1)
        assert get(broker).settings == held


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"consumer_group": ""}, "settings.consumer_group"),
        ({"consumer_group": "%RETRY%g"}, "settings.consumer_group"),
        ({"retry_count_max": -1}, "settings.retry_count_max"),
        ({"retry_delays_ms": [-1]}, "settings.retry_delays_ms"),
        ({"version": -1}, "settings.version"),
        ({"version": (1 << 62) + 1}, "settings.version"),
        ({"version": (1 << 63) - 1}, "settings.version"),
    ],
)
def test_settings_that_no_group_can_have_are_refused(fields: dict[str, Any], field: str) -> None:
    request = PutGroupRequest(settings=GroupSettings(**{"consumer_group": "g", **fields}))
    error = FakeBroker().refusal(GROUP + "PutGroup", request)
    assert told(error)[:2] == ("INVALID_ARGUMENT", "INVALID_ARGUMENT")
    assert field in str(error.field_violations)


def test_groups_are_listed_in_pages() -> None:
    broker = FakeBroker()
    for name in ("b", "c", "a"):
        put(broker, consumer_group=name)
    names: list[str] = []
    token = ""
    while True:
        request = ListGroupSettingsRequest(page_size=2, page_token=token)
        page = broker.call(GROUP + "ListGroupSettings", request).response()
        names += [settings.consumer_group for settings in page.settings]
        token = page.next_page_token
        if not token:
            break
    assert names == ["a", "b", "c"]


def test_a_group_that_is_switched_off_gets_nothing_until_it_is_on() -> None:
    broker = FakeBroker()
    broker.fill([b"x"])
    put(broker, consume_enabled=False)
    error = broker.refusal(PULL, pull())
    assert told(error) == ("FAILED_PRECONDITION", "GROUP_DISABLED", {"consumer_group": "g"})
    assert "; `protomq group set g --consume` switches it on" in error.message
    assert broker.call(PULL, pull("other")).error is None
    assert broker.call(PULL, PullRequest(topic="topic")).error is None
    put(broker, consume_enabled=True)
    assert broker.call(PULL, pull()).error is None


def test_pulls_that_are_held_are_refused_when_their_group_is_switched_off() -> None:
    broker = FakeBroker()
    held = [broker.call(PULL, pull(group, hold_ms=10_000)) for group in ("g", "other")]
    assert not any(call.answered for call in held)
    put(broker, retry_count_max=1)
    assert not any(call.answered for call in held)
    put(broker, consume_enabled=False)
    assert held[0].error is not None
    assert held[0].error.reason == "GROUP_DISABLED"
    assert not held[1].answered
    broker.fill([b"x"])
    assert held[1].answered
    assert held[1].error is None


@pytest.mark.parametrize("commits", [False, True])
def test_a_group_that_is_deleted_has_the_defaults_again(commits: bool) -> None:
    broker = FakeBroker()
    put(broker, retry_count_max=1)
    if commits:
        offset = QueueOffset(topic="topic", queue_id=0, queue_offset=0)
        request = CommitOffsetsRequest(consumer_group="g", offsets=[offset])
        broker.call(CONSUMER + "CommitOffsets", request).response()
    broker.call(ADMIN + "DeleteGroup", DeleteGroupRequest(consumer_group="g")).response()
    assert get(broker).settings.version == 0
    assert not broker.store.offsets.has_group("g")
    error = broker.refusal(ADMIN + "DeleteGroup", DeleteGroupRequest(consumer_group="g"))
    assert error.reason == "GROUP_NOT_FOUND"


def test_settings_wait_for_the_permit() -> None:
    broker = FakeBroker(is_permitted=False)
    request = PutGroupRequest(settings=GroupSettings(consumer_group="g"))
    call = broker.call(GROUP + "PutGroup", request)
    assert not call.answered
    assert get(broker).settings.version == 0
    broker.permit.give()
    broker.server.run()
    assert call.response().settings.version == 1
