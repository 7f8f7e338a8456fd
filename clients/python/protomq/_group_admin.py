"""Consumer groups over all brokers. Each broker has its own copy of their settings, with a version; the highest holds. Used by Admin."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from . import _methods
from ._admin_values import BrokerInfo, ConsumerGroup
from ._checks import check_count, check_flag, check_group, check_topic
from ._late_imports import fork_waits
from ._topic_admin import no_broker_has
from .errors import (
    ConfigurationError,
    GroupNotFoundError,
    ProtomqError,
    SystemBusyError,
    TopicNotFoundError,
    WrongTypeError,
)

if TYPE_CHECKING:
    from ._admin_calls import AdminCalls

DELAY_MAX_MS: Final = 40 * 86_400_000
RETRY_DELAYS_MAX: Final = 64
RETRY_COUNT_MAX: Final = (1 << 31) - 1
VERSION_MAX: Final = 1 << 62
"""The highest version that a broker takes from whoever changes settings."""
SET_ATTEMPTS: Final = 3
"""Whoever sets a group up at the same moment may win; then it is done again on top of that."""


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """How the messages of a consumer group are delivered.

    `retry_limit` and `delays_ms` are what holds, defaults included. `retry_limit` is the number of retries before a message becomes a
    dead letter (None: no limit). `delays_ms` says how long each retry waits; the last one holds for all further ones. `retry_count_max`
    and `retry_delays_ms` are what was set: None and () stand for the defaults. `version`: the highest over all brokers; 0: nobody has set
    the group up.
    """

    name: str
    orderly: bool
    retry_count_max: int | None
    retry_delays_ms: tuple[int, ...]
    consume_enabled: bool
    broadcast_enabled: bool
    version: int
    retry_limit: int | None
    delays_ms: tuple[int, ...]


def get_group(
    admin: AdminCalls, group: str, brokers: Iterable[str] | None = None
) -> tuple[GroupSettings, dict[str, ProtomqError]]:
    """The settings with the highest version, and the brokers that did not answer."""
    with fork_waits:
        from .v1 import group_service_pb2 as pb

    check_wanted_group(group)

    def ask(broker: Any) -> pb.GetGroupResponse:
        request = pb.GetGroupRequest(consumer_group=group)
        return admin._call(broker.address, _methods.GET_GROUP, request, pb.GetGroupResponse)

    answers, failures = admin._answers(brokers, ask, slave_stands_in=True)
    newest = max((answer for _, answer in answers), key=lambda answer: answer.settings.version)
    limit = newest.retry_count_max
    return _settings(newest.settings, None if limit < 0 else limit, newest.retry_delays_ms), failures


def set_group(
    admin: AdminCalls,
    group: str,
    *,
    orderly: bool | None,
    retry_count_max: int | Literal["default"] | None,
    retry_delays_ms: Sequence[int] | None,
    consume_enabled: bool | None,
    broadcast_enabled: bool | None,
    brokers: Iterable[str] | None,
) -> tuple[GroupSettings, dict[str, ProtomqError]]:
    """Changes what is not None, at all brokers or those named; the settings that hold then, and the brokers that did not answer."""
    with fork_waits:
        from .v1 import group_pb2
        from .v1 import group_service_pb2 as pb

    if all(each is None for each in (orderly, retry_count_max, retry_delays_ms, consume_enabled, broadcast_enabled)):
        raise ConfigurationError(
            "nothing is set: give orderly, retry_count_max, retry_delays_ms, consume_enabled or broadcast_enabled; "
            "get_group has the settings"
        )
    for name, flag in (
        ("orderly", orderly),
        ("consume_enabled", consume_enabled),
        ("broadcast_enabled", broadcast_enabled),
    ):
        if flag is not None:
            check_flag(name, flag)
    if retry_count_max is not None and retry_count_max != "default":
        check_count("retry_count_max", retry_count_max, 0, RETRY_COUNT_MAX)
    delays_ms = None if retry_delays_ms is None else _checked_delays(retry_delays_ms)
    names = None if brokers is None else list(brokers)
    for _ in range(SET_ATTEMPTS):
        known, _failures = get_group(admin, group, names)
        count = known.retry_count_max if retry_count_max is None else retry_count_max
        wanted = group_pb2.GroupSettings(
            consumer_group=group,
            orderly=known.orderly if orderly is None else orderly,
            retry_count_max=None if count == "default" else count,
            retry_delays_ms=known.retry_delays_ms if delays_ms is None else delays_ms,
            consume_enabled=known.consume_enabled if consume_enabled is None else consume_enabled,
            broadcast_enabled=known.broadcast_enabled
            if broadcast_enabled is None
            else broadcast_enabled,
            # By the clock: two who change it at once, at brokers that do not know of each other, hardly take the same. Behind the highest
            # version, each broker is asked to take its next one.
            version=max(known.version + 1, time.time_ns() // 1_000) if known.version < VERSION_MAX else 0,
        )
        request = pb.PutGroupRequest(settings=wanted)
        held: list[Any] = []

        def ask(
            broker: Any, request: pb.PutGroupRequest = request, held: list[Any] = held
        ) -> None:
            settings = admin._call(broker.address, _methods.PUT_GROUP, request, pb.PutGroupResponse).settings
            if not request.settings.version:
                settings.version = 0
            held.append(settings)

        failures = admin._ask_each(names, ask)
        if all(settings == wanted for settings in held):
            return get_group(admin, group, names)[0], failures
    raise SystemBusyError(
        f"the settings of group {group!r} were changed by others {SET_ATTEMPTS} times meanwhile: look at them and try again"
    )


def list_group_settings(admin: AdminCalls) -> tuple[list[str], dict[str, ProtomqError]]:
    """Names of the groups that were set up at any broker, and the brokers that did not answer."""
    with fork_waits:
        from .v1 import group_service_pb2 as pb

    def ask(broker: Any) -> set[str]:
        request = pb.ListGroupSettingsRequest()
        pages = admin._pages(broker, _methods.LIST_GROUP_SETTINGS, request, pb.ListGroupSettingsResponse)
        return {settings.consumer_group for page in pages for settings in page.settings}

    answers, failures = admin._answers(None, ask, slave_stands_in=True)
    return sorted({name for _, names in answers for name in names}), failures


def list_groups(
    admin: AdminCalls, topic: str
) -> tuple[list[ConsumerGroup], dict[str, ProtomqError]]:
    """The groups that have committed, by name, and the brokers that did not answer. Raises TopicNotFoundError."""
    from .v1 import admin_service_pb2 as pb

    check_topic(topic)
    found: dict[str, set[str]] = {}

    def ask(broker: BrokerInfo) -> list[pb.ListGroupsResponse]:
        request = pb.ListGroupsRequest(topic=topic)
        try:
            return list(admin._pages(broker, _methods.LIST_GROUPS, request, pb.ListGroupsResponse))
        except TopicNotFoundError:
            return []

    answers, failures = admin._answers(None, ask, topic, slave_stands_in=True)
    for group in (group for _, pages in answers for page in pages for group in page.groups):
        found.setdefault(group.consumer_group, set()).update(group.topics)
    if topic and not any(pages for _, pages in answers):
        raise next(iter(failures.values()), no_broker_has(topic))
    groups = [ConsumerGroup(name, tuple(sorted(found[name]))) for name in sorted(found)]
    return groups, failures


def delete_group(
    admin: AdminCalls, group: str, brokers: Iterable[str] | None, *, force: bool
) -> tuple[list[str], dict[str, ProtomqError]]:
    """The brokers that knew it, and those that did not answer. Raises GroupNotFoundError if none did."""
    from .v1 import admin_service_pb2 as pb

    check_group(group)
    check_flag("force", force)
    deleted: list[str] = []

    def ask(broker: BrokerInfo) -> None:
        try:
            admin._call(
                broker.address,
                _methods.DELETE_GROUP,
                pb.DeleteGroupRequest(consumer_group=group, force=force),
                pb.DeleteGroupResponse,
            )
        except GroupNotFoundError:
            return
        deleted.append(broker.broker_name)

    failures = admin._ask_each(brokers, ask)
    if not deleted:
        nobody = GroupNotFoundError(
            f"group {group!r} has committed nothing at any broker",
            metadata={"consumer_group": group},
        )
        raise next(iter(failures.values()), nobody)
    return deleted, failures


def check_wanted_group(group: object) -> str:
    """The name of a group; an empty one is none. Raises ConfigurationError."""
    if not check_group(group):
        raise ConfigurationError("a group has a name, this is ''")
    return str(group)


def _checked_delays(delays_ms: object) -> list[int]:
    if isinstance(delays_ms, str | bytes) or not isinstance(delays_ms, Sequence):
        raise WrongTypeError(f"retry_delays_ms is a list of milliseconds, not {delays_ms!r}")
    check_count("the number of retry_delays_ms", len(delays_ms), 0, RETRY_DELAYS_MAX)
    return [check_count("each of retry_delays_ms", each, 0, DELAY_MAX_MS) for each in delays_ms]


def _settings(settings: Any, limit: int | None, delays_ms: Iterable[int]) -> GroupSettings:
    return GroupSettings(
        settings.consumer_group,
        settings.orderly,
        settings.retry_count_max if settings.HasField("retry_count_max") else None,
        tuple(settings.retry_delays_ms),
        settings.consume_enabled,
        settings.broadcast_enabled,
        settings.version,
        limit,
        tuple(delays_ms),
    )
