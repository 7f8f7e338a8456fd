"""Results on the terminal, in build/bench.json and in docs/benchmarks.md.

build/bench.json keeps the rows of earlier runs that were not measured again. docs/benchmarks.md has generated tables between markers; what
stands outside of them is written by hand and kept.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from .bench import Result
from .process import ROOT

JSON_PATH: Final = ROOT / "build" / "bench.json"
DOCS_PATH: Final = ROOT / "docs" / "benchmarks.md"
README_PATH: Final = ROOT / "README.md"
PEERS: Final = ("/ RocketMQ", "/ Kafka")
"""How the names of the rows end that compare protomq with another broker."""


def format_value(value: float) -> str:
    """Three digits that mean something."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def format_floor(result: Result) -> str:
    """The floor and whether it is reached."""
    if result.floor is None:
        return ""
    sign = "\u2265" if result.better == "more" else "\u2264"
    return f"{sign} {format_value(result.floor)} {'ok' if result.holds else 'MISSED'}"


def print_result(result: Result) -> None:
    """One line, as soon as it is known."""
    cpu = " ".join(
        f"{who} {value:.2f} us"
        for who, value in (("broker", result.broker_us), ("client", result.client_us))
        if value is not None
    )
    value = f"{format_value(result.value)} {result.unit}"
    print(f"{result.name:<58} {value:>16}  {format_floor(result):<14} {cpu}", flush=True)


def to_json(
    section: str, row: str, extent: str, load_before: float, result: Result
) -> dict[str, Any]:
    """A row of build/bench.json. `load_before` is the machine's load average when the run began."""
    return {
        "section": section,
        "row": row,
        "name": result.name,
        "value": round(result.value, 6),
        "unit": result.unit,
        "floor": result.floor,
        "better": result.better,
        "holds": result.holds,
        "how": result.how,
        "broker_us": result.broker_us and round(result.broker_us, 3),
        "client_us": result.client_us and round(result.client_us, 3),
        "extent": extent,
        "load_before": round(load_before, 1),
        "measured": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def read_rows(path: Path = JSON_PATH) -> list[dict[str, Any]]:
    """The rows of earlier runs."""
    try:
        rows = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return []
    return rows if isinstance(rows, list) else []


def write_rows(new: Sequence[dict[str, Any]], path: Path = JSON_PATH) -> list[dict[str, Any]]:
    """Put the new rows in the place of the old ones of the same section and row; the whole is returned."""
    measured = {(row["section"], row["row"]) for row in new}
    kept = [row for row in read_rows(path) if (row["section"], row["row"]) not in measured]
    rows = [*kept, *new]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return rows


def machine() -> dict[str, Any]:
    """What it was measured on."""
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version()}


def write_docs(
    section: str,
    order: Sequence[str],
    rows: Iterable[dict[str, Any]],
    notes: Sequence[str],
    path: Path = DOCS_PATH,
) -> bool:
    """Put the table of a section between its markers, notes below it.

    False, and nothing is written, if a row of `order` was never measured and no note says why.
    """
    mine = [row for row in rows if row["section"] == section]
    missing = set(order) - {row["row"] for row in mine}
    if any(not any(note.startswith(name) for note in notes) for name in missing):
        return False
    mine.sort(key=lambda row: order.index(row["row"]) if row["row"] in order else len(order))
    if not _replace(path, section, _table(mine, notes)):
        raise ValueError(f"{path} has no markers for {section}")
    return True


def write_summary(docs: Path = DOCS_PATH, path: Path = README_PATH) -> None:
    """Put what a reader compares between the markers of the README: of the docs' rows with a floor those beside a peer, and each that
    missed it.
    """
    lines = ["", "| what | value | floor |", "|---|---:|---|"]
    held_count = 0
    for line in docs.read_text("utf-8").splitlines():
        cells = line.removeprefix("| ").split(" | ")
        if not line.startswith("| ") or len(cells) < 3 or not cells[2].startswith(("\u2265", "\u2264")):
            continue
        if cells[0].endswith(PEERS) or cells[2].endswith("**missed**"):
            lines.append(f"| {cells[0]} | {cells[1]} | {cells[2]} |")
        else:
            held_count += 1
    lines += ["", f"{held_count} more rows have a floor, and reach it."]
    _replace(path, "benchmarks", "\n".join(lines))


def _replace(path: Path, name: str, text: str) -> bool:
    """Replace what stands between the markers of a name; False if the file has none."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, found_begin, rest = path.read_text("utf-8").partition(begin)
    _, found_end, tail = rest.partition(end)
    if not found_begin or not found_end:
        return False
    path.write_text(f"{head}{begin}\n{text}\n{end}{tail}", "utf-8")
    return True


def _floor_cell(row: dict[str, Any]) -> str:
    if row["floor"] is None:
        return ""
    sign = "\u2265" if row["better"] == "more" else "\u2264"
    return f"{sign} {format_value(row['floor'])}" + ("" if row["holds"] else " **missed**")


def _table(rows: Sequence[dict[str, Any]], notes: Sequence[str]) -> str:
    facts = machine()
    days = sorted({row["measured"][:10] for row in rows})
    extents = sorted({row["extent"] for row in rows})
    load = max(row.get("load_before", 0.0) for row in rows)
    words = [
        f"{facts['cpu']}, {facts['cores']} cores, Python {facts['python']}",
        " to ".join(dict.fromkeys((days[0], days[-1]))),
        f"{'/'.join(extents)} run",
        f"load average before it: up to {load:.1f}",
    ]
    lines = [
        "",
        "; ".join(words) + ".",
        "",
        "| what | value | floor | broker / client CPU per message | how |",
        "|---|---:|---|---|---|",
    ]
    for row in rows:
        cpu = ""
        if row["broker_us"] is not None and row["client_us"] is not None:
            cpu = f"{row['broker_us']:.2f} / {row['client_us']:.2f} \u00b5s"
        value = f"{format_value(row['value'])} {row['unit']}"
        lines.append(f"| {row['name']} | {value} | {_floor_cell(row)} | {cpu} | {row['how']} |")
    lines += [f"\n{note}" for note in notes]
    return "\n".join(lines)
