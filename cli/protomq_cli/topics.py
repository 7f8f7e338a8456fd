"""`topic list|create|describe|delete`."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from protomq.wire.topics import QUEUES_MAX
from protomq_cli.asking import ask_to_delete
from protomq_cli.connection import open_admin, open_calls
from protomq_cli.message_text import time_text
from protomq_cli.options import (
    DEFAULT_TIMEOUT_S,
    Namesrv,
    OnBroker,
    Output,
    Timeout,
    TopicArgument,
)
from protomq_cli.output import OutputFormat, print_rows
from protomq_cli.partial import Missing

if TYPE_CHECKING:
    from protomq import QueueStatus, TopicConfig


class PermissionName(StrEnum):
    """What clients may do with a topic."""

    READ_WRITE = "read-write"
    READ = "read"
    WRITE = "write"
    NONE = "none"


class TopicTypeName(StrEnum):
    """Which messages a topic takes."""

    NORMAL = "normal"
    FIFO = "fifo"
    DELAY = "delay"
    TRANSACTION = "transaction"
    MIXED = "mixed"


GROUPS_NAMED_MAX: Final = 10
_COLUMNS = ("topic", "broker", "write_queues", "read_queues", "permission", "type")
_QUEUE_COLUMNS = (
    "topic",
    "broker",
    "queue_id",
    "min_offset",
    "end_offset",
    "messages",
    "last_store_time",
)


def list_topics(
    group_topics: Annotated[
        bool, typer.Option("--group-topics", help="Those of groups, too: retries and dead letters.")
    ] = False,
    broker: OnBroker = None,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """List the topics of all brokers.

    A topic that several brokers share has a row for each of them.
    """
    missing = Missing()
    with open_admin(namesrv, timeout) as admin:
        rows = [
            _topic_row(topic, broker_name)
            for broker_name, topics in missing.take(
                lambda: admin.list_topics(broker, group_topics=group_topics)
            ).items()
            for topic in topics
        ]
    rows.sort(key=lambda row: (row["topic"], row["broker"]))
    print_rows(rows, _COLUMNS, output)
    missing.check()


def create(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", show_default=False, help="Name of the topic.")],
    queues: Annotated[
        int | None,
        typer.Option("--queues", "-q", metavar="N", min=1, max=QUEUES_MAX, show_default="the broker's, 8", help="Queues on each broker."),
    ] = None,
    read_queues: Annotated[
        int | None,
        typer.Option(
            "--read-queues", metavar="N", min=1, max=QUEUES_MAX, show_default="as --queues",
            help="Queues that can be read; more than --queues while a topic shrinks, never fewer.",
        ),
    ] = None,
    permission: Annotated[
        PermissionName, typer.Option("--permission", "-p", help="What clients may do.")
    ] = PermissionName.READ_WRITE,
    type: Annotated[
        TopicTypeName | None,
        typer.Option("--type", "-t", show_default="mixed; with --update as it is", help="Which messages it takes."),
    ] = None,
    update: Annotated[bool, typer.Option("--update", "-u", help="Change the topic if it exists.")] = False,
    broker: OnBroker = None,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:  # fmt: skip
    """Create a topic, or change one.

    To create what exists already with the same settings is no error.

    To grow it, raise --queues (read queues follow). Where order matters, stop
    the producers before, until the groups have no lag. To shrink it, lower
    --queues first and give --read-queues as before; wait until consumers
    have read the queues that go; then lower --read-queues. What groups have
    not consumed there is told; it can be read again with more read queues.

    Where a broker gets a topic that others have, `cluster spread` says where
    its groups begin. This command names them, and does not.
    """
    from protomq import Permission, TopicType

    missing = Missing()
    had = _queues_before(topic, namesrv, timeout)
    with warnings.catch_warnings(record=True) as told, open_admin(namesrv, timeout) as admin:
        warnings.simplefilter("always", RuntimeWarning)
        made = missing.take(
            lambda: admin.create_topic(
                topic,
                write_queues=queues or 0,
                read_queues=read_queues or 0,
                permission=Permission[permission.name],
                type=TopicType[type.name] if type else TopicType.UNSPECIFIED,
                update=update,
                brokers=None if broker is None else [broker],
            )
        )
        new = sorted(made.keys() - had.keys()) if had else []
        groups = [group.name for group in missing.take(lambda: admin.list_groups(topic))] if new else []
    sys.stderr.writelines(f"protomq: {each.message}\n" for each in told)
    sys.stderr.writelines(_told_of_groups(topic, name, groups) for name in new if groups)
    sys.stderr.writelines(
        _told_of_order(config, name, had.get(name, 0))
        for name, config in made.items()
        if had and config.type is TopicType.FIFO and config.write_queues != had.get(name, 0)
    )
    print_rows([_topic_row(config, name) for name, config in made.items()], _COLUMNS, output)
    missing.check_change()


def _queues_before(topic: str, namesrv: str | None, timeout_s: float) -> dict[str, int]:
    """How many queues each broker has that can be written; where the topic is closed, read. As a name server knows.

    Raises NoRouteError if none answers: nobody has to wait for that twice.
    """
    with open_calls(namesrv, "auto") as calls:
        calls.timeout_s = timeout_s
        route = calls.find_route(topic)
    if route is None or route.auto_create:
        return {}
    read, written = (Counter(queue.broker_name for queue in queues) for queues in (route.read_queues, route.write_queues))
    return {**read, **written}


def _told_of_order(topic: TopicConfig, broker: str, queues_before: int) -> str:
    """What a change of the number of queues does to a topic whose messages are consumed in order."""
    return (
        f"protomq: topic {topic.name} takes messages in order, and has {topic.write_queues} write queues at {broker} now"
        f" ({queues_before} before). Some sharding keys go to another queue, where their messages may be consumed before older ones."
        " If its producers run, stop them now, until the groups have no lag (`protomq group lag`)\n"
    )


def _told_of_groups(topic: str, broker: str, groups: Sequence[str]) -> str:
    """Where groups begin at a broker that is new for their topic."""
    names = ", ".join((*groups[:GROUPS_NAMED_MAX], "…") if len(groups) > GROUPS_NAMED_MAX else groups)
    return (
        f"protomq: topic {topic} is new at {broker}, and others have it. Groups that consume it begin there when a member runs; with"
        f' begin "latest" they miss what comes before: {names}. `protomq cluster spread {broker} --topic {topic}` has them begin at the'
        " first message\n"
    )


def describe(
    topic: TopicArgument,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Show settings and queues of a topic.

    END-OFFSET is one past the last message; MESSAGES is how many are
    stored. The table shows the queues, the other formats the settings too.
    """
    missing = Missing()
    with open_admin(namesrv, timeout) as admin:
        found = missing.take(lambda: admin.describe_topic(topic))
    queues = [_queue_row(status) for status in found.queues]
    if output.is_table:
        print_rows(queues, _QUEUE_COLUMNS, output, expendable=("topic", "min_offset"))
        missing.check()
        return
    rows = [_topic_row(config, name) for name, config in found.configs.items()]
    for row in rows:
        row["queues"] = [
            {name: value for name, value in queue.items() if name not in ("topic", "broker")}
            for queue in queues
            if queue["broker"] == row["broker"]
        ]
    print_rows(rows, _COLUMNS, output)
    missing.check()


def delete(
    topic: TopicArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    broker: OnBroker = None,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Delete a topic with all that belongs to it.

    Its queues and the offsets committed for it go too. Asks first; where
    nobody can answer (no terminal) it wants --yes.
    """
    missing = Missing()
    brokers = None if broker is None else [broker]
    with open_admin(namesrv, timeout) as admin:
        if not yes:
            count = missing.take(lambda: admin.describe_topic(topic, brokers=brokers)).message_count
            ask_to_delete(
                f"Delete topic {topic} with {count:,} messages{f' on {broker}' if broker else ''}?"
            )
        deleted = missing.take(lambda: admin.delete_topic(topic, brokers=brokers))
    rows = [{"topic": topic, "broker": name, "deleted": True} for name in deleted]
    print_rows(rows, ("topic", "broker", "deleted"), output)
    missing.check_change()


def _topic_row(topic: TopicConfig, broker_name: str) -> dict[str, Any]:
    return {
        "topic": topic.name,
        "broker": broker_name,
        "write_queues": topic.write_queues,
        "read_queues": topic.read_queues,
        "permission": topic.permission.name.lower().replace("_", "-"),
        "type": topic.type.name.lower(),
        "incarnation": topic.incarnation,
    }


def _queue_row(status: QueueStatus) -> dict[str, Any]:
    topic, broker_name, queue_id = status.queue
    min_offset, end_offset = status.offsets
    last = status.last_store_time
    return {
        "topic": topic,
        "broker": broker_name,
        "queue_id": queue_id,
        "min_offset": min_offset,
        "end_offset": end_offset,
        "messages": end_offset - min_offset,
        "last_store_time": None if last is None else time_text(round(last.timestamp() * 1000)),
    }
