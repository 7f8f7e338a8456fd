"""`python -m tests.bench [row ...]`: runs the benchmarks, prints them, writes build/bench.json and docs/benchmarks.md."""

from __future__ import annotations

import sys

from .bench import ROWS
from .command import run_command
from .rows import all_rows  # noqa: F401

if __name__ == "__main__":
    sys.exit(run_command({"bench": ROWS}))
