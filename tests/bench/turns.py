"""`python -m tests.bench.turns BEFORE AFTER [row ...]`: what a change costs the broker, as CPU time per message.

BEFORE and AFTER are checkouts with an environment each (`git worktree add`, `make env`). A row runs in both by turns,
so that a machine that changes its speed does so for both. Which goes first alternates, since the second finds warmer caches. Each
turn gives one ratio; the table has their median and its 95 % confidence interval. The checkouts' own benchmark pages are overwritten.

`--hold-pages` keeps the log in memory meanwhile. Some machines take idle pages away; a version that checks what comes from the disk then
pays for that, and one without a check does not.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Final, NamedTuple

from .held_pages import HeldPages

ROWS: Final = ("batch-remoting", "batch-sdk", "callers", "one-caller", "pull-raw", "consume")
"""What every user pays: sends of all kinds, pulls raw and through the SDK."""
_LINE: Final = re.compile(r"^(?P<name>\S.*?)\s{2,}[\d.,]+ \S.*?\bbroker (?P<us>[\d.]+) us")


class Interval(NamedTuple):
    """A median with the ends of its confidence interval."""

    low: float
    median: float
    high: float


def confidence_interval(values: Sequence[float]) -> Interval:
    """The 95 % interval of the median by order statistics (no distribution is assumed); all of the range below 6 values."""
    ordered = sorted(values)
    n = len(ordered)
    rank = 0
    below = 0.0  # that at most `rank` of n values lie under the median
    while rank < n // 2 and below + math.comb(n, rank) / 2**n <= 0.025:
        below += math.comb(n, rank) / 2**n
        rank += 1
    rank = max(rank - 1, 0)
    return Interval(ordered[rank], statistics.median(ordered), ordered[n - 1 - rank])


def broker_us_of(output: str) -> dict[str, float]:
    """CPU time of the broker per message in microseconds, by name, from a benchmark's output; bare loops are no broker, and left out."""
    found = {}
    for line in output.splitlines():
        match = _LINE.match(line)
        if match is not None and not match["name"].startswith("bare "):
            found[match["name"]] = float(match["us"])
    return found


def measure(checkout: Path, row: str, seconds: float) -> dict[str, float]:
    """One turn of a row in a checkout. Raises RuntimeError with what was printed if it cannot be measured."""
    command = [str(checkout / ".venv/bin/python"), "-m", "tests.bench", row]
    done = subprocess.run(
        [*command, "--rounds", "1", "--seconds", str(seconds)],
        cwd=checkout, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = broker_us_of(done.stdout)
    if done.returncode or not found:
        raise RuntimeError(f"{checkout}: {row}: ended with {done.returncode}\n{done.stderr}")
    return found


def table_of(before: dict[str, list[float]], after: dict[str, list[float]]) -> Iterable[str]:
    """Markdown, a line for each name that both have."""
    yield "| broker CPU per message | before | after | after / before | 95 % | turns |"
    yield "|---|---:|---:|---:|---:|---:|"
    for name, old in before.items():
        new = after.get(name, [])
        if len(new) != len(old):
            continue
        ratio = confidence_interval([b / a for a, b in zip(old, new, strict=True)])
        yield (
            f"| {name} | {statistics.median(old):.2f} us | {statistics.median(new):.2f} us "
            f"| {ratio.median:.3f} | {ratio.low:.3f} to {ratio.high:.3f} | {len(old)} |"
        )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Broker CPU per message of two checkouts, in turns.")
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("rows", nargs="*", default=ROWS, metavar="row")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a window")
    parser.add_argument("--hold-pages", action="store_true", help="lock the log's pages into memory")
    options = parser.parse_args()
    checkouts = (options.before.resolve(), options.after.resolve())
    seen: tuple[dict[str, list[float]], dict[str, list[float]]] = ({}, {})
    with HeldPages() if options.hold_pages else nullcontext() as held:
        for turn in range(options.turns):
            for row in options.rows:
                for side in (0, 1) if turn % 2 == 0 else (1, 0):
                    for name, us in measure(checkouts[side], row, options.seconds).items():
                        seen[side].setdefault(name, []).append(us)
                    if held is not None:
                        held.check()
            print(f"turn {turn + 1} of {options.turns}", file=sys.stderr, flush=True)
    print("\n".join(table_of(*seen)))


if __name__ == "__main__":
    main()
