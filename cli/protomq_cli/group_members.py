"""`group members`: who consumes for a group now, and what each has."""

from __future__ import annotations

from typing import Final

from protomq_cli.connection import open_admin
from protomq_cli.groups import GroupArgument
from protomq_cli.options import DEFAULT_TIMEOUT_S, Namesrv, OnBroker, Output, Timeout
from protomq_cli.output import OutputFormat, print_rows
from protomq_cli.partial import Missing

_COLUMNS: Final = (
    "member", "topic", "filter", "queues", "queue_ids", "peer", "allocation", "member_s", "silent_s", "version",
)  # fmt: skip


def members(
    group: GroupArgument,
    broker: OnBroker = None,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """List the members of a group, with the queues that each has.

    SILENT-S is how long nobody has heard of a member: 0 while it holds a
    call. Consumers that assign their queues themselves are no members.
    """
    missing = Missing()
    with open_admin(namesrv, timeout) as admin:
        brokers = None if broker is None else [broker]
        found = missing.take(lambda: admin.group_members(group, brokers=brokers))
    rows = [
        {
            "member": member.client_id,
            "topic": topic,
            "filter": wanted,
            "queues": sum(queue.topic == topic for queue in member.queues),
            "queue_ids": " ".join(
                f"{queue.broker_name}/{queue.queue_id}" for queue in member.queues if queue.topic == topic
            ),
            "peer": member.peer,
            "allocation": member.allocation,
            "member_s": round(member.member_s, 1),
            "silent_s": round(member.silent_s, 1),
            "version": member.client_version,
        }
        for member in found
        for topic, wanted in sorted(member.filters.items())
    ]
    print_rows(rows, _COLUMNS, output, expendable=("version", "peer", "queue_ids"))
    missing.check()
