"""`log dump|verify|repair|epochs`: the commit log on disk, with no broker in between. They run where the files are."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from protomq_cli.exits import CliError, ExitCode
from protomq_cli.message_text import body_fields, time_text
from protomq_cli.options import Output, count_option, folder_option
from protomq_cli.output import OutputFormat, RowStream, print_rows

if TYPE_CHECKING:
    from protomq.v1.record_pb2 import Record
    from protomq.wire.log_walk import Seal
    from protomq_broker.store.tools.offline import LogItem
    from protomq_broker.store.tools.verify import Finding, FindingKind

_COLUMNS = {
    "position": 12, "size_bytes": 10, "kind": 6, "topic": 12, "queue_id": 8, "queue_offset": 12, "keys": 12,
    "tag": 6, "note": 0,
}  # fmt: skip
_KINDS = {0: "plain", 0x100: "half", 0x200: "copy", 0x300: "state"}
"""By the bits 8 to 10 of `flags`."""
_FINDING_COLUMNS = ("kind", "start_position", "end_position", "lost", "explanation", "path")
FINDINGS_SHOWN: Final = 10
"""Rows of one kind in a table of `log verify`."""
_EPOCH_COLUMNS = ("epoch", "start_position", "end_position", "led")
_REPAIR_COLUMNS = ("start_position", "end_position", "explanation", "kept")

StoreArgument = Annotated[
    Path,
    typer.Argument(parser=folder_option, metavar="DIR", show_default=False, help="Folder of the store (--data-dir)."),
]


def dump(
    store: StoreArgument,
    position: Annotated[
        int, typer.Option("--position", "-p", metavar="POSITION", min=0, help="From this physical offset on.")
    ] = 0,
    end_position: Annotated[
        int | None,
        typer.Option("--end", metavar="POSITION", min=0, show_default="the end of the log", help="Up to this one, not including."),
    ] = None,
    count: Annotated[
        int,
        typer.Option(
            "--count", "-c", parser=count_option, metavar="N", show_default="all", help="Maximum number of records."
        ),
    ] = 0,
    topic: Annotated[
        str | None, typer.Option("--topic", "-t", metavar="TOPIC", show_default="all", help="Records of this topic only.")
    ] = None,
    seals: Annotated[bool, typer.Option("--seals", help="Seals too; not with --topic.")] = False,
    output: Output = OutputFormat.JSONL,
) -> None:  # fmt: skip
    """Print the records of a log.

    They come in the order of the log, which is read as it lies on disk,
    also under a running broker. All formats but the table hold the bodies.
    """
    printed = 0
    with offline_store(store), RowStream(_COLUMNS, output) as stream:
        for row in _rows(store, position, end_position):
            if row["kind"] == "seal" and (topic is not None or not seals):
                continue
            if topic is not None and row["topic"] != topic:
                continue
            if count and printed >= count:
                break
            stream.print(row)
            printed += 1
        if topic is not None and printed == 0:
            raise CliError(
                ExitCode.NOT_FOUND, "TOPIC_NOT_FOUND", f"{store}: no record of topic {topic!r} there"
            )


def verify(store: StoreArgument, output: Output = OutputFormat.TABLE) -> None:
    """Check a store from end to end.

    Every byte of the log, the stamp of every record, and the consume queues.
    Nothing is changed. Under a running broker it checks only what the last
    checkpoint covers. Prints what it finds. The exit code is 1 for any damage,
    except a torn tail, which the next start cuts, and ranges that a repair has
    taken out.
    """
    with offline_store(store):
        from protomq_broker.store.config import BACKUP_NAME
        from protomq_broker.store.tools.backup_manifest import read_manifest
        from protomq_broker.store.tools.verify import FindingKind
        from protomq_broker.store.tools.verify import verify as verify_store

        findings = verify_store(store)
    shown = _first_of_each_kind(findings) if output.is_table else findings
    if shown or not output.is_table:
        print_rows([_finding_row(finding) for finding in shown], _FINDING_COLUMNS, output)
    for kind, count in Counter(finding.kind for finding in findings).items():
        if (left := count - FINDINGS_SHOWN) > 0 and output.is_table:
            sys.stderr.write(f"{left} more of {kind.value}; `-o jsonl` shows all\n")
    kinds = {finding.kind for finding in findings}
    damage = [finding for finding in findings if finding.kind in (FindingKind.CORRUPTION, FindingKind.QUARANTINE)]
    if FindingKind.BACKUP in kinds:
        advice = (
            f"this is a backup without a valid {BACKUP_NAME}, and `protomq restore` takes none: bring that file back from a copy, or make "
            "another backup in another folder, of the broker or a slave"
        )
    elif damage and (store / BACKUP_NAME).exists():
        position, manifest = damage[0].start_position, read_manifest(store)
        has_some = manifest is not None and position > manifest.first_position
        before = f"`protomq restore {store} NEW --position {position}` gives what stands before the damage. " if has_some else ""
        advice = (
            f"this is a backup: make another one in another folder, of the broker or a slave. If none has this log any more, {before}"
            "`protomq log repair` of a copy of the folder takes the damage out, and the rest can be restored"
        )
    elif damage:
        advice = f"damage of the log is taken out by `protomq log repair {store} --keep DIR`"
    elif kinds & {FindingKind.WRONG_STAMP, FindingKind.WRONG_ENTRY}:
        advice = "the log holds; what is derived from it does not agree, see above"
    else:
        notes = {
            FindingKind.TORN_TAIL: "a torn tail, which the next start cuts",
            FindingKind.REPAIRED: "what a repair has taken out",
        }
        found = " and ".join(note for kind, note in notes.items() if kind in kinds)
        if (manifest := read_manifest(store)) is not None and not manifest.end.position:
            found = "a backup that holds nothing yet, which `protomq restore` refuses:"
        sys.stderr.write(f"{store}: {found} only\n" if found else f"{store}: all is well\n")
        return
    number = "1 finding" if len(findings) == 1 else f"{len(findings)} findings"
    raise CliError(ExitCode.FAILURE, "DAMAGED", f"{store}: {number}; {advice}")


def repair(
    store: StoreArgument,
    keep: Annotated[
        Path,
        typer.Option("--keep", "-k", parser=folder_option, metavar="DIR", show_default=False, help="Where to put the bytes taken out."),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    output: Output = OutputFormat.TABLE,
) -> None:  # fmt: skip
    """Take damage out of a log, also what a broker has put into quarantine.

    First fetch what is damaged from a replica, if there is one. What you take
    out is lost: consumers get an error for it. The bytes are kept in --keep.
    No broker may be running on the store.
    """
    with offline_store(store):
        from protomq_broker.store.tools.repair import repair as repair_store
        from protomq_broker.store.tools.verify import FindingKind
        from protomq_broker.store.tools.verify import verify as verify_store

        if not yes:
            kinds = (FindingKind.CORRUPTION, FindingKind.QUARANTINE, FindingKind.TORN_TAIL)
            findings = [finding for finding in verify_store(store) if finding.kind in kinds]
            if findings:
                _confirm(findings)
        done = repair_store(store, keep)
    if not done:
        sys.stderr.write(f"{store}: the log is valid, nothing to repair\n")
        return
    print_rows([asdict(repaired) for repaired in done], _REPAIR_COLUMNS, output)


def epochs(store: StoreArgument, output: Output = OutputFormat.TABLE) -> None:
    """Print the epochs of a log.

    Each start of a broker begins one. `led`: this store wrote it as the
    leader; else its bytes come from another store, or nobody knows any
    more who wrote them.
    """
    with offline_store(store):
        from protomq_broker.store.tools.offline import epochs_of

        rows = epochs_of(store)
    print_rows(rows, _EPOCH_COLUMNS, output)


@contextmanager
def import_tools() -> Iterator[None]:
    """Around imports: the tools are part of the broker, which may not be installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        message = "the tools of the store are not installed; run `pip install .` in a checkout of protomq"
        raise CliError(ExitCode.USAGE, "NOT_INSTALLED", message) from error


@contextmanager
def offline_store(store: Path) -> Iterator[None]:
    """What the tools say about a folder that is no store is no failure of theirs."""
    with import_tools():
        from protomq_broker.store.errors import StoreSettingsError
    if not store.is_dir():
        raise CliError(
            ExitCode.NOT_FOUND,
            "STORE_NOT_FOUND",
            f"{store} is not a folder; give the --data-dir of the broker",
        )
    try:
        yield
    except StoreSettingsError as error:
        raise CliError(ExitCode.NOT_FOUND, "STORE_NOT_FOUND", str(error)) from error


def _confirm(findings: list[Finding]) -> None:
    print_rows(
        [_finding_row(finding) for finding in findings],
        _FINDING_COLUMNS,
        OutputFormat.TABLE,
        sys.stderr,
    )
    if not sys.stdin.isatty():
        raise CliError(
            ExitCode.USAGE, "NOT_CONFIRMED", "no terminal to ask on; add --yes to repair"
        )
    if not typer.confirm("Take it out?", err=True):
        raise CliError(ExitCode.FAILURE, "NOT_CONFIRMED", "nothing was changed")


def _rows(store: Path, position: int, end_position: int | None) -> Iterator[dict[str, Any]]:
    from protomq_broker.store.tools.offline import dump as dump_log

    for item in dump_log(store, start_position=position, end_position=end_position):
        if item.problem:
            raise CliError(
                ExitCode.FAILURE,
                "CORRUPT_LOG",
                f"{item.problem} at position {item.position}; `protomq log verify {store}` says more",
            )
        yield _item_row(item)


def _item_row(item: LogItem) -> dict[str, Any]:
    place = {"position": item.position, "size_bytes": item.size_bytes}
    if item.record is not None:
        return {**place, "kind": "record", **_record_row(item.record)}
    assert item.seal is not None
    return {**place, "kind": "seal", **_seal_row(item.seal)}


def _record_row(record: Record) -> dict[str, Any]:
    from protomq.wire.record import (
        FLAG_COMPRESSION_MASK,
        FLAG_KIND_MASK,
        NO_QUEUE_OFFSET,
        encode_message_id,
    )

    kind = _KINDS.get(record.flags & FLAG_KIND_MASK, "unknown")
    is_due = record.HasField("due_time_ms")
    facts = [kind] * (kind != "plain") + ["not due"] * is_due
    compressed = ", compressed" if record.flags & FLAG_COMPRESSION_MASK else ""
    return {
        "topic": record.topic,
        "queue_id": record.queue_id,
        "queue_offset": None if record.queue_offset == NO_QUEUE_OFFSET else record.queue_offset,
        "record_kind": kind,
        **({"due_time": time_text(record.due_time_ms)} if is_due else {}),
        "message_id": encode_message_id(record.producer_id, record.producer_epoch, record.sequence),
        "keys": list(record.keys),
        "tag": record.tag,
        "properties": dict(record.properties),
        "born_time": time_text(record.born_time_ms),
        "store_time": time_text(record.store_time_ms),
        "flags": record.flags,
        "crc32c": f"{record.crc32c:08x}",
        "note": ", ".join([*facts, f"body of {len(record.body)} B{compressed}"]),
        **body_fields(record.body),
    }


def _seal_row(seal: Seal) -> dict[str, Any]:
    return {
        "epoch": seal.epoch,
        "start_position": seal.start_position,
        "append_size_bytes": seal.size_bytes,
        "record_count": seal.record_count,
        "store_time": time_text(seal.store_time_ms),
        "synced_position": seal.synced_position,
        "crc32c": f"{seal.crc32c:08x}",
        "note": f"closes {seal.record_count} records, {seal.size_bytes} B from {seal.start_position}",
    }


def _first_of_each_kind(findings: Sequence[Finding]) -> list[Finding]:
    """One cause may be found in each append behind it."""
    seen: Counter[FindingKind] = Counter()
    shown = []
    for finding in findings:
        seen[finding.kind] += 1
        if seen[finding.kind] <= FINDINGS_SHOWN:
            shown.append(finding)
    return shown


def _finding_row(finding: Finding) -> dict[str, Any]:
    row = asdict(finding)
    row["kind"] = finding.kind.value
    row["lost"] = [
        f"{lost.topic}/{lost.queue_id}: {lost.first_offset} to {lost.end_offset - 1}"
        for lost in finding.lost
    ]
    return row
