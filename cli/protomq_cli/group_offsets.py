"""`group lag`, `group reset`, `group clone`: what operators ask of the offsets of a group. The brokers do it, each all of it or nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from protomq_cli import completion
from protomq_cli.connection import open_admin
from protomq_cli.exits import CliError, ExitCode
from protomq_cli.groups import GroupArgument
from protomq_cli.offsets import AtTime, Exactly, FromEnd, FromStart, OffsetRange
from protomq_cli.options import (
    DEFAULT_TIMEOUT_S,
    Namesrv,
    OnBroker,
    OnQueues,
    Output,
    Timeout,
    TopicArgument,
    offsets_option,
)
from protomq_cli.output import OutputFormat, print_rows
from protomq_cli.partial import Missing
from protomq_cli.places import refuse_ahead

if TYPE_CHECKING:
    from protomq import Admin, GroupLag, MessageQueue, QueueRange

_COLUMNS: Final = (
    "group", "topic", "broker", "queue_id", "committed_offset", "end_offset", "lag", "delay_s",
)  # fmt: skip
_NAMED_MAX: Final = 3
"""Queues that one line names."""
_EXPENDABLE: Final = ("group", "topic", "committed_offset", "end_offset", "delay_s")
OneTopic = Annotated[
    str,
    typer.Option(
        "--topic", "-t", metavar="TOPIC", autocompletion=completion.complete_topics, show_default="all", help="In this topic only."
    ),
]  # fmt: skip


def lag(
    group: GroupArgument,
    topic: OneTopic = "",
    broker: OnBroker = None,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Show how far a group is behind, in messages and in seconds.

    DELAY-S is how long ago the first message was stored that the group has
    not consumed. A queue in which it has not committed or popped lags by all
    that is stored. Of a group that pops, LAG counts messages that were never
    handed out, and those that are not acknowledged; COMMITTED-OFFSET does not
    count.
    """
    missing = Missing()
    with open_admin(namesrv, timeout) as admin:
        brokers = None if broker is None else [broker]
        found = missing.take(lambda: admin.group_lag(group, topic, brokers=brokers))
    print_rows([_row(group, one) for one in found], _COLUMNS, output, expendable=_EXPENDABLE)
    missing.check()


def reset(
    group: GroupArgument,
    topic: TopicArgument,
    to: Annotated[
        OffsetRange,
        typer.Option(
            "--to", "-O", parser=offsets_option, metavar="PLACE", show_default=False,
            help="Where to go on: start, end, 47, @ms, @date, @-1h.",
        ),
    ],
    queue: OnQueues = None,
    create: Annotated[bool, typer.Option("--create", help="Although nobody knows the group yet.")] = False,
    broker: OnBroker = None,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:  # fmt: skip
    """Have a group go on elsewhere; --to end skips what has piled up.

    Each broker takes it for all queues or for none. Consumers of the group
    that are running go on there, too. If the group pops, so do its next pops,
    and what members hold now is theirs no more: their acknowledgements are
    refused. A group that has committed and popped nothing, was never set up
    and has no members is refused, unless with --create.
    """
    missing = Missing()
    brokers = None if broker is None else [broker]
    with open_admin(namesrv, timeout) as admin:
        place = _place(to)
        silent = Missing()
        if not create and not _is_known(admin, group, silent):
            silent.raise_first()  # Who does not answer may know the group.
            raise CliError(
                ExitCode.NOT_FOUND,
                "GROUP_NOT_FOUND",
                f"nobody knows the group {group!r}, nothing was changed; `protomq group list` shows the groups, --create makes a new one",
            )
        missing.take(lambda: admin.reset_offsets(group, topic, place, queue_ids=queue or (), brokers=brokers))
        found = missing.take(lambda: admin.group_lag(group, topic, brokers=brokers))
        if isinstance(place, int):
            queues = missing.take(lambda: admin.describe_topic(topic, brokers=brokers)).queues
            ranges = {one.queue: one.offsets for one in queues if not queue or one.queue.queue_id in queue}
            sys.stderr.writelines(f"protomq: {told}\n" for told in nearest_places(place, ranges))
    rows = [_row(group, one) for one in found if not queue or one.queue.queue_id in queue]
    print_rows(rows, _COLUMNS, output, expendable=_EXPENDABLE)
    missing.check_change()


def clone(
    source: Annotated[str, typer.Argument(metavar="SOURCE", show_default=False, help="The group whose offsets are copied.")],
    group: GroupArgument,
    topic: OneTopic = "",
    broker: OnBroker = None,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:  # fmt: skip
    """Have a group go on where another one is.

    It is a reset of GROUP. If SOURCE pops, GROUP gets everything that SOURCE
    has not acknowledged, and what lies behind the first such message. If it
    pushes, its retries are not copied: GROUP does not get what SOURCE has
    sent back.
    """
    missing = Missing()
    brokers = None if broker is None else [broker]
    with open_admin(namesrv, timeout) as admin:
        missing.take(lambda: admin.clone_offsets(source, group, topic, brokers=brokers))
        found = missing.take(lambda: admin.group_lag(group, topic, brokers=brokers))
        told = _retries_told(admin, source, group, brokers)
    print_rows([_row(group, one) for one in found], _COLUMNS, output, expendable=_EXPENDABLE)
    sys.stderr.write(told)
    missing.check_change()


def _retries_told(admin: Admin, source: str, group: str, brokers: list[str] | None) -> str:
    """What a clone has not: messages that the source has sent back. "" if it has no retries."""
    from protomq.errors import PartialResultError, ProtomqError
    from protomq.wire.topics import retry_topic

    try:
        lags = admin.group_lag(source, retry_topic(source), brokers=brokers)
    except PartialResultError as error:
        lags = error.result
    except ProtomqError:
        return ""
    count = sum(one.lag for one in lags)
    return (
        f"protomq: retries are not copied: {group} does not get what {source} has sent back and not consumed again"
        f" ({count:,} in {retry_topic(source)} now; more may wait for their delay)\n"
    )


def _is_known(admin: Admin, group: str, missing: Missing) -> bool:
    """Whether it has committed or popped, was set up, or has members: a mistyped name has none of them."""
    return (
        any(group == one.name for one in missing.take(admin.list_groups))
        or group in missing.take(admin.list_group_settings)
        or bool(missing.take(lambda: admin.group_members(group)))
    )


def _place(wanted: OffsetRange) -> Literal["earliest", "latest"] | datetime | int:
    """As the SDK takes it. Raises BadParameter for a range, and for a distance from either end."""
    place = wanted.begin
    if wanted.end is not None:
        raise typer.BadParameter("one place is wanted, not a range", param_hint="--to")
    refuse_ahead(place, "--to")
    if isinstance(place, AtTime):
        return datetime.fromtimestamp(place.time_ms / 1000, UTC)
    if isinstance(place, Exactly):
        return place.queue_offset
    if place == FromStart():
        return "earliest"
    if place == FromEnd():
        return "latest"
    raise typer.BadParameter("+2 and -3 differ by queue: `protomq group commit` takes them", param_hint="--to")


def nearest_places(queue_offset: int, ranges: Mapping[MessageQueue, QueueRange]) -> list[str]:
    """Where a group goes on in queues that do not have the offset to which it was reset."""
    ends = [f"queue {queue.queue_id} at {queue.broker_name} ends at {end}" for queue, (_, end) in ranges.items() if end < queue_offset]
    begins = [
        f"queue {queue.queue_id} at {queue.broker_name} begins at {first}" for queue, (first, _) in ranges.items() if first > queue_offset
    ]
    told = []
    if ends:
        queues, place = ("1 queue", "its end") if len(ends) == 1 else (f"{len(ends)} queues", "their ends")
        told.append(
            f"offset {queue_offset} is beyond the end of {queues}, so the group goes on at {place}: with what comes next ({_some(ends)})"
        )
    if begins:
        queues, place = ("1 queue", "its first message") if len(begins) == 1 else (f"{len(begins)} queues", "their first messages")
        told.append(f"offset {queue_offset} is not stored any more in {queues}, so the group goes on at {place} ({_some(begins)})")
    return told


def _some(texts: Sequence[str]) -> str:
    return ", ".join((*texts[:_NAMED_MAX], "…") if len(texts) > _NAMED_MAX else texts)


def _row(group: str, one: GroupLag) -> dict[str, object]:
    topic, broker_name, queue_id = one.queue
    return {
        "group": group,
        "topic": topic,
        "broker": broker_name,
        "queue_id": queue_id,
        "committed_offset": one.committed_offset,
        "end_offset": one.end_offset,
        "lag": one.lag,
        "delay_s": one.delay_s,
    }
