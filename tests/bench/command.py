"""The command line of both benchmarks."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from . import report
from .bench import FULL, QUICK, Bench, Extent, RowFunction

_QUIET_LOAD: Final = 1.0


def run_command(
    sections: Mapping[str, Mapping[str, RowFunction]], before: Callable[[], None] | None = None
) -> int:
    """Runs the rows that the command line names; 0 if every one could be measured, whatever its value.

    `sections`: tables of docs/benchmarks.md, each with its rows. A table is written when all its rows have been measured on this machine.
    """
    all_rows = {name: function for rows in sections.values() for name, function in rows.items()}
    section_of = {name: section for section, rows in sections.items() for name in rows}
    options = _options(" and ".join(sections), all_rows)
    if options.list:
        for name, function in all_rows.items():
            print(f"{name:<16} {(function.__doc__ or '').strip()}")
        return 0
    # Whoever ends the benchmark ends its servers too: the blocks that started them are left in order.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    if before is not None:
        before()
    load = os.getloadavg()[0]
    if load > _QUIET_LOAD:
        print(
            f"warning: the load average is {load:.1f}: other processes take part", file=sys.stderr
        )
    folder = Path(tempfile.mkdtemp(prefix="protomq-bench-"))
    bench = Bench(_extent(options), folder)
    rows: list[dict[str, Any]] = []
    failed = []
    try:
        for name in options.rows or all_rows:
            begin = time.perf_counter()
            try:
                for result in all_rows[name](bench):
                    report.print_result(result)
                    rows.append(report.to_json(section_of[name], name, bench.extent.name, load, result))
            except Exception:
                traceback.print_exc()
                failed.append(name)
            print(f"-- {name}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        everything = report.write_rows(rows)
    for note in bench.notes:
        print(f"note: {note}")
    for section, some in sections.items():
        if not report.write_docs(section, [*some], everything, bench.notes):
            print(f"{section} in {report.DOCS_PATH} is as it was: some rows have never been measured here")
    report.write_summary()
    if failed:
        print(f"could not be measured: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _extent(options: argparse.Namespace) -> Extent:
    extent = FULL if options.full else QUICK
    changes: dict[str, Any] = {}
    if options.seconds:
        changes["seconds"] = options.seconds
    if options.rounds:
        changes["rounds"] = options.rounds
    if options.stored_gib:
        changes["stored_bytes"] = int(options.stored_gib * (1 << 30))
    if options.messages:
        changes["consume_messages"] = options.messages
    if options.timers:
        changes["timers"] = options.timers
    return dataclasses.replace(extent, **changes)


def _options(section: str, all_rows: Mapping[str, RowFunction]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=f"Runs the benchmarks of {section}.")
    parser.add_argument("rows", nargs="*", metavar="row", help="rows to run; all if none is named")
    parser.add_argument("--list", action="store_true", help="show the rows")
    parser.add_argument(
        "--full", action="store_true", help="long windows, three rounds, 6 GiB stored"
    )
    parser.add_argument("--seconds", type=float, help="length of a window")
    parser.add_argument("--rounds", type=int, help="how often each is measured")
    parser.add_argument("--stored-gib", type=float, help="what a restart finds stored")
    parser.add_argument("--messages", type=int, help="what a catching-up consumer finds stored")
    parser.add_argument("--timers", type=int, help="delayed messages that are pending in the row timers")
    options = parser.parse_args()
    if unknown := [name for name in options.rows if name not in all_rows]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(all_rows)}")
    return options
