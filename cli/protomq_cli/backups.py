"""`backup` and `restore`: a copy of a broker's log that is a broker's whole memory, and a store made of it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import time_ns
from typing import TYPE_CHECKING, Annotated, Any

import typer

from protomq_cli.connection import open_admin
from protomq_cli.exits import CliError, ExitCode
from protomq_cli.logs import import_tools, offline_store
from protomq_cli.message_text import time_text
from protomq_cli.offsets import AtTime, OffsetRange
from protomq_cli.options import (
    DEFAULT_TIMEOUT_S,
    Namesrv,
    Output,
    Timeout,
    folder_option,
    times_option,
)
from protomq_cli.output import OutputFormat, print_rows
from protomq_cli.places import refuse_ahead

if TYPE_CHECKING:
    from protomq_broker.log_client import LogClient
    from protomq_broker.store.tools.backup_manifest import CopyReport

_COLUMNS = (
    "broker", "first_position", "end_position", "end_time", "copied_bytes", "linked_bytes", "earliest_position", "earliest_time",
)  # fmt: skip
_EXPENDABLE = ("first_position", "earliest_position")


Folder = Annotated[
    Path,
    typer.Argument(
        parser=folder_option,
        metavar="DIR",
        show_default=False,
        help="Folder of the backup: new, or that of the last time.",
    ),
]
FromBroker = Annotated[
    str | None,
    typer.Option(
        "--broker",
        "-b",
        metavar="NAME|HOST:PORT",
        show_default=False,
        help="The broker: its name (NAME/1 is its slave 1), or its remoting port.",
    ),
]
FromStore = Annotated[
    Path | None,
    typer.Option(
        "--store",
        parser=folder_option,
        metavar="DIR",
        show_default=False,
        help="Its store on this machine: sealed segments become hard links.",
    ),
]
BackupArgument = Annotated[
    Path,
    typer.Argument(
        parser=folder_option,
        metavar="BACKUP",
        show_default=False,
        help="Folder of the backup. It stays as it is.",
    ),
]
NewStore = Annotated[
    Path,
    typer.Argument(
        parser=folder_option,
        metavar="DIR",
        show_default=False,
        help="Folder of the new store (--data-dir): new, or empty.",
    ),
]
UpToTime = Annotated[
    OffsetRange | None,
    typer.Option(
        "--time",
        parser=times_option,
        metavar="@TIME",
        show_default="the end",
        help="Up to what was stored at this time: @2026-08-01T12:00, @-1h.",
    ),
]
UpToPosition = Annotated[
    int | None,
    typer.Option(
        "--position",
        "-p",
        metavar="POSITION",
        min=0,
        show_default="the end",
        help="Up to this physical offset.",
    ),
]
AsSlave = Annotated[
    bool,
    typer.Option(
        "--slave",
        help="The store is that of a slave, or of an elected member whose master runs: it follows, and fetches what is newer.",
    ),
]


def backup(
    folder: Folder,
    broker: FromBroker = None,
    store: FromStore = None,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Copy the log of a broker: all that it knows.

    The broker goes on working, and may be a slave. What DIR has already is
    not copied again. Each seal is proved. Killed at any moment, it is run
    again. Check a backup with `protomq log verify DIR`.

    With --store and without --broker the broker has to be stopped.
    """
    with import_tools():
        from protomq_broker.failed_opens import full_disk_named
        from protomq_broker.store.tools.backup import back_up
        from protomq_broker.store.tools.backup_source import FolderSource, LinkingSource
        from protomq_broker.store.tools.offline import check_is_store
    _refuse_inside(folder)
    if broker is None:
        if store is None:
            raise CliError(
                ExitCode.USAGE,
                "USAGE",
                "name the broker with --broker, or a store whose broker is stopped with --store",
            )
        with offline_store(store), full_disk_named(folder):
            report = back_up(FolderSource(store), folder)
    else:
        if store is not None:
            # Else nothing would be linked, and nobody would hear of it.
            with offline_store(store):
                check_is_store(store)
        with _client(broker, namesrv, timeout) as client, full_disk_named(folder):
            report = back_up(client if store is None else LinkingSource(client, store), folder)
    _print(report, output)


def restore(
    backup_folder: BackupArgument,
    folder: NewStore,
    time: UpToTime = None,
    position: UpToPosition = None,
    slave: AsSlave = False,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Make a store of a backup, as it was at a time or position.

    Messages, offsets, topics, timers, transactions: all that stood in the
    log then. Each seal is proved. The first start of the broker rebuilds
    queues and index from it. It is a new store: while the old one lives
    under the broker's name, name servers refuse it.

    With --slave it is a replica of a broker that lives.
    """
    with import_tools():
        from protomq_broker.failed_opens import full_disk_named
        from protomq_broker.store.errors import CutError
        from protomq_broker.store.tools.backup import restore as restore_store
        from protomq_broker.store.tools.backup_manifest import Cut, read_manifest
    _refuse_inside(folder)
    cut = Cut()
    if time is not None:
        if not isinstance(time.begin, AtTime) or time.end is not None:
            raise CliError(
                ExitCode.USAGE, "USAGE", "--time takes a time, such as @-1h or @2026-08-01T12:00"
            )
        refuse_ahead(time.begin, "--time", "so all would be restored; if that is wanted, leave --time out")
        cut = cut._replace(time_ms=time.begin.time_ms)
    if position is not None:
        cut = cut._replace(position=position)
    try:
        with full_disk_named(folder):
            report = restore_store(backup_folder, folder, cut, is_slave=slave, now_ms=time_ns() // 1_000_000)
    except CutError as error:
        text = re.sub(r"(\d+) ms since 1970", lambda found: time_text(int(found[1])), str(error))
        raise CliError(ExitCode.USAGE, "CUT", text) from error
    _print(report, output)
    kept = read_manifest(backup_folder)
    if time is not None and kept is not None and kept.end_time_ms < cut.time_ms:
        told = f"the backup ends with what was stored at {time_text(kept.end_time_ms)}, before --time: all of it is restored"
        sys.stderr.write(f"{folder}: {told}\n")
    who = "a slave, or an elected member whose master runs," if slave else "a broker"
    sys.stderr.write(f"{folder}: start {who} with this as its data_dir\n")


def _refuse_inside(folder: Path) -> None:
    """Raises CliError for a folder in a store or a backup: whoever removes or copies the one takes the other with it."""
    for outer in folder.resolve().parents:
        if (outer / "commitlog").is_dir():
            text = f"{folder} lies in {outer}, which is a store or a backup: take another folder"
            raise CliError(ExitCode.REFUSED, "WRONG_FOLDER", text)


@contextmanager
def _client(broker: str, namesrv: str | None, timeout_s: float) -> Iterator[LogClient]:
    from protomq_broker.log_client import LogClient
    from protomq_runtime.addresses import parse_address_list

    name = ""
    if ":" not in broker:
        name, broker = _find(broker, namesrv, timeout_s)
    try:
        address = parse_address_list(broker)[0]
    except ValueError as error:
        raise CliError(ExitCode.USAGE, "USAGE", f"--broker: {error}") from error
    try:
        client = LogClient(address, "protomq backup", name, timeout_s=timeout_s)
    except TimeoutError as error:
        raise CliError(
            ExitCode.UNREACHABLE,
            "TIMEOUT",
            f"{address}: no answer within {timeout_s:g} s (--timeout); give the remoting port of a broker that runs",
        ) from error
    except OSError as error:
        raise CliError(
            ExitCode.UNREACHABLE,
            "CONNECT_FAILED",
            f"{address}: {error}; give the remoting port of a broker that runs",
        ) from error
    with client:
        try:
            yield client
        except (ConnectionError, TimeoutError) as error:
            raise CliError(
                ExitCode.UNREACHABLE,
                "CONNECTION_LOST",
                f"{error}; run it again: it goes on where it was",
            ) from error


def _find(name: str, namesrv: str | None, timeout_s: float) -> tuple[str, str]:
    """(name, address of its remoting port) of a broker that a name server knows."""
    wanted, _, id_text = name.partition("/")
    with open_admin(namesrv, timeout_s) as admin:
        for each in admin.cluster_info():
            if each.broker_name == wanted and str(each.broker_id) == (id_text or "0"):
                return wanted, each.address.remoting_address
    raise CliError(
        ExitCode.NOT_FOUND,
        "BROKER_NOT_FOUND",
        f"no broker {name}; `protomq cluster list` shows the brokers",
    )


def _print(report: CopyReport, output: OutputFormat) -> None:
    manifest = report.manifest
    row: dict[str, Any] = {
        "broker": manifest.broker_name,
        "first_position": manifest.first_position,
        "end_position": manifest.end.position,
        "end_time": time_text(manifest.end_time_ms),
        "copied_bytes": report.copied_bytes,
        "linked_bytes": report.linked_bytes,
        "earliest_position": manifest.complete_from,
        "earliest_time": time_text(manifest.complete_time_ms),
    }
    print_rows([row], _COLUMNS, output, expendable=_EXPENDABLE)
