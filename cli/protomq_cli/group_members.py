"""`group members`, `group info`: who consumes for a group now, what each has, and how one of them stands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from protomq_cli.connection import open_admin
from protomq_cli.exits import CliError, ExitCode, with_hint
from protomq_cli.groups import GroupArgument
from protomq_cli.options import DEFAULT_TIMEOUT_S, Namesrv, OnBroker, Output, Timeout
from protomq_cli.output import OutputFormat, print_object, print_rows
from protomq_cli.partial import Missing

if TYPE_CHECKING:
    from protomq import Admin

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
        if not found:
            missing.check()  # Who does not answer may know the group.
            check_known(admin, group)
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


def info(
    group: GroupArgument,
    member: Annotated[
        str | None,
        typer.Argument(metavar="[MEMBER]", show_default="the only one", help="As `group members` names it."),
    ] = None,
    stacks: Annotated[
        bool, typer.Option("--stacks", help="Also what its threads and tasks are doing.")
    ] = False,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Ask a member of a group how it stands: settings, counts, queues.

    The question goes down the call that the member holds at its brokers, so
    nothing has to be opened where it runs. One that is stopped, or whose
    event loop is blocked, does not answer. Of two members of one name, one
    answers.
    """
    with open_admin(namesrv, timeout) as admin:
        report = admin.describe_member(group, _member_named(admin, group, member), stacks=stacks)
    queues = [
        {
            "topic": one.queue.topic,
            "queue": f"{one.queue.broker_name}/{one.queue.queue_id}",
            "position": one.position,
            "committed": one.committed_offset,
            "open": one.open_count,
            "paused": one.is_paused,
        }
        for one in report.queues
    ]
    row = {
        "kind": report.kind,
        "version": report.version,
        "running_s": round(report.running_s, 1),
        **report.counts,
        **{f"{name}_per_s": round(rate, 2) for name, rate in report.rates.items()},
        "is_cut": report.is_cut,
        "settings": report.settings,
    }
    if not output.is_table:
        said = {"stacks": dict(report.stacks)} if stacks else {}
        print_object(row | {"queues": queues} | said, output)
        return
    settings = "  ".join(f"{name}={value}" for name, value in report.settings.items())
    print_object(row | {"settings": settings}, output)
    print_rows(queues, ("topic", "queue", "position", "committed", "open", "paused"), output)
    for name, text in report.stacks:
        typer.echo(f"\n{name}\n{text}", nl=False)


def check_known(admin: Admin, group: str) -> None:
    """Raises CliError if no broker has an offset, a setting or a member of the group."""
    silent = Missing()
    names = {one.name for one in silent.take(admin.list_groups)}
    if group not in names and not silent.take(lambda: admin.get_group(group)).version:
        silent.check()  # Who does not answer may know it.
        raise CliError(ExitCode.NOT_FOUND, "GROUP_NOT_FOUND", with_hint("GROUP_NOT_FOUND", f"no broker knows the group {group!r}"))


def _member_named(admin: Admin, group: str, member: str | None) -> str:
    """The member that is asked: the one named, else the only one."""
    silent = Missing()
    names = sorted({one.client_id for one in silent.take(lambda: admin.group_members(group))})
    if member in names:
        return member
    if member is not None or len(names) != 1:
        silent.check()  # Who does not answer may know another one.
    if not names:
        check_known(admin, group)
    if member is None and len(names) == 1:
        return names[0]
    has = f"its members are {', '.join(names)}" if names else "it has no members now"
    asked = "which member?" if member is None else f"group {group!r} has no member {member!r};"
    code = ExitCode.USAGE if member is None and names else ExitCode.NOT_FOUND
    raise CliError(code, "MEMBER_UNKNOWN", f"{asked} {has}; `protomq group members {group}` shows them")
