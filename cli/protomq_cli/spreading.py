"""`cluster spread`: a broker that was added gets what the others have: topics, and where groups begin in them, and settings of groups.

    settings   of groups go to all brokers: how often a message is retried must not depend on where it was stored
    topic      is made there and takes no messages yet
    groups     that consume the topic elsewhere begin there with its first message, whether a member runs now or not
    open       the topic takes messages, and producers find it within seconds

Interrupted, it is run again: what is done already stays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from protomq_cli.connection import open_admin, open_calls
from protomq_cli.draining import BrokerArgument
from protomq_cli.exits import CliError, ExitCode
from protomq_cli.options import DEFAULT_TIMEOUT_S, Namesrv, Output, Timeout
from protomq_cli.output import OutputFormat, print_rows
from protomq_cli.partial import Missing

if TYPE_CHECKING:
    from protomq import Admin, ConsumerGroup, TopicConfig
    from protomq.calls import Calls

_COLUMNS: Final = ("topic", "broker", "write_queues", "read_queues", "permission", "groups", "is_new")


def spread(
    broker: BrokerArgument,
    topics: Annotated[
        list[str] | None,
        typer.Option("--topic", "-t", metavar="TOPIC", show_default="all that others have", help="Only this one; can be repeated."),
    ] = None,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:  # fmt: skip
    """Give a broker the topics and group settings of the others.

    For one that was added: it has registered, and has no topics yet. Each
    topic has as many queues there as where it has most, and groups begin
    with its first message. What is sent with a sharding key may go to
    another queue from then on. While a broker does not answer that has one
    of them, no topic is changed.
    """
    with open_admin(namesrv, timeout) as admin, open_calls(namesrv, "auto") as calls:
        calls.timeout_s = timeout
        rows = [_row(broker, *done) for done in spread_to(admin, broker, topics, partial(_brokers_of, admin, calls))]
    print_rows(rows, _COLUMNS, output)


def spread_to(
    admin: Admin, broker: str, names: Sequence[str] | None, brokers_of: Callable[[str], Collection[str]]
) -> list[tuple[TopicConfig, list[str], bool]]:
    """The topics that the broker has then, groups that begin there, and whether the topic is new. Raises CliError.

    `brokers_of`: names of those that have a topic, whether they answer or not.
    """
    missing = Missing()
    topics = missing.take(admin.list_topics)
    missing.raise_first(broker)
    _check_missing(missing, names, brokers_of)
    if broker not in topics:
        raise CliError(
            ExitCode.NOT_FOUND,
            "BROKER_NOT_FOUND",
            f"no broker {broker} is registered; `protomq cluster list` shows all there are",
        )
    wanted = wanted_topics(topics, broker)
    unknown = sorted(set(names or ()) - set(wanted))
    if unknown:
        raise CliError(ExitCode.NOT_FOUND, "TOPIC_NOT_FOUND", f"no other broker has the topic {unknown[0]}")
    _check_filters(admin, broker, missing)
    for group in missing.take(admin.list_group_settings):
        known = missing.take(partial(admin.get_group, group))
        # What is set already: then all brokers have the newest settings.
        missing.take(partial(admin.set_group, group, orderly=known.orderly))
    groups = missing.take(admin.list_groups)
    # One that has left meanwhile may have known of groups.
    missing.raise_first(broker)
    _check_missing(missing, names, brokers_of)
    has = {topic.name: topic for topic in topics[broker]}
    return [
        _spread_topic(admin, broker, topic, has.get(name), groups)
        for name, topic in wanted.items()
        if not names or name in names
    ]


def _brokers_of(admin: Admin, calls: Calls, topic: str) -> set[str]:
    from protomq.errors import NoRouteError, TopicNotFoundError

    gone = {one.broker.broker_name for one in admin.missing_brokers(topic)}
    try:
        route = calls.route(topic)
    except TopicNotFoundError:
        return gone
    except NoRouteError as error:
        if not error.metadata.get("missing_brokers"):
            raise
        return gone
    return gone if route.auto_create else gone.union(queue.broker_name for queue in (*route.read_queues, *route.write_queues))


def _check_missing(missing: Missing, names: Sequence[str] | None, brokers_of: Callable[[str], Collection[str]]) -> None:
    """Raises CliError if one that does not answer may have one of the topics: its groups would begin too late at the new broker."""
    for name, why in missing.reasons().items():
        held = [topic for topic in names or () if name in brokers_of(topic)]
        if names and not held:
            continue
        what = f"has the topic {held[0]}" if held else "may have topics that nobody else has"
        raise CliError(
            ExitCode.UNREACHABLE,
            "BROKER_MISSING",
            f"{name} does not answer ({why}), {what}, and groups that nobody else knows; no topic was changed. Start it again, or"
            f" `protomq cluster forget {name}` if it will not come back. Topics that it does not have are spread with --topic",
        )


def wanted_topics(topics: Mapping[str, Iterable[TopicConfig]], broker: str) -> dict[str, TopicConfig]:
    """What the broker is to have, by name: each topic that any other has, as on the broker with the widest permission and most
    queues. One that is drained counts as it was before that: the new broker may be the one that takes its place."""
    wanted: dict[str, TopicConfig] = {}

    def size(topic: TopicConfig) -> tuple[int, int, int]:
        return int(topic.permission), topic.write_queues, topic.read_queues

    for name, found in sorted(topics.items()):
        if name == broker:
            continue
        for each in found:
            topic = _as_open(each)
            known = wanted.get(topic.name)
            if known is None or size(topic) > size(known):
                wanted[topic.name] = topic
    return dict(sorted(wanted.items()))


def _as_open(topic: TopicConfig) -> TopicConfig:
    """A topic as it is when nothing closes it for a while."""
    from protomq import Permission

    if topic.closed_from is Permission.UNSPECIFIED:
        return topic
    return replace(topic, permission=topic.closed_from, closed_from=Permission.UNSPECIFIED)


def _check_filters(admin: Admin, broker: str, missing: Missing) -> None:
    """Consumers whose filter the broker lacks would be refused there. Slaves (`name/id`) have what their masters have."""
    from protomq.errors import PartialResultError

    try:
        everywhere = admin.list_filters()
    except PartialResultError as error:
        if not all("/" in name or name in missing for name in error.failures):
            raise
        everywhere = error.result
    filters = {name: {module.name for module in found} for name, found in everywhere.items() if "/" not in name}
    lacks = set().union(*filters.values()) - filters.get(broker, set())
    if lacks:
        raise CliError(
            ExitCode.REFUSED,
            "FILTERS_MISSING",
            f"{broker} has no filter {', '.join(sorted(lacks))}, which others have; nothing was changed: first"
            f" `protomq filter deploy NAME FILE --broker {broker}`",
        )


def _spread_topic(
    admin: Admin, broker: str, topic: TopicConfig, has: TopicConfig | None, groups: Iterable[ConsumerGroup]
) -> tuple[TopicConfig, list[str], bool]:
    from protomq import Permission

    closed = {Permission.READ_WRITE: Permission.READ, Permission.WRITE: Permission.NONE}
    config = has
    if config is None:
        # Nothing is stored there before it is said where the groups begin.
        config = _create(admin, broker, topic, closed.get(topic.permission, topic.permission))
    begun = [group.name for group in groups if topic.name in group.topics and _begins(admin, broker, group.name, topic.name)]
    for group in begun:
        admin.reset_offsets(group, topic.name, "earliest", brokers=[broker])
    if has is None or has.permission in closed.values():
        config = _create(admin, broker, topic, topic.permission, only_if=config)
    return config, begun, has is None


def _begins(admin: Admin, broker: str, group: str, topic: str) -> bool:
    """Whether the group has committed nothing in the topic there."""
    from protomq.errors import GroupNotFoundError

    try:
        lags = admin.group_lag(group, topic, brokers=[broker])
    except GroupNotFoundError:
        return True
    return all(each.committed_offset is None for each in lags)


def _create(admin: Admin, broker: str, topic: TopicConfig, permission: Any, *, only_if: TopicConfig | None = None) -> TopicConfig:
    """`only_if`: the topic as it is there; what somebody else has changed or deleted meanwhile is not undone. Raises CliError then."""
    from protomq.errors import TopicExistsError, TopicNotFoundError

    try:
        made = admin.create_topic(
            topic.name,
            write_queues=topic.write_queues,
            read_queues=topic.read_queues,
            permission=permission,
            update=only_if is not None,
            type=topic.type,
            brokers=[broker],
            only_if=only_if,
        )
    except (TopicExistsError, TopicNotFoundError) as error:
        text = f"somebody has changed or deleted topic {topic.name} of {broker} meanwhile; run it again"
        raise CliError(ExitCode.REFUSED, error.reason, text) from error
    return made[broker]


def _row(broker: str, topic: TopicConfig, groups: list[str], is_new: bool) -> dict[str, Any]:
    return {
        "topic": topic.name,
        "broker": broker,
        "write_queues": topic.write_queues,
        "read_queues": topic.read_queues,
        "permission": topic.permission.name.lower().replace("_", "-"),
        "groups": groups,
        "is_new": is_new,
    }
