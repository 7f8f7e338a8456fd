"""The client in Go: built with the Go toolchain if there is one, its modules come by the Go module proxy."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from tests.bench.process import ROOT

if TYPE_CHECKING:
    from tests.bench.bench import Bench

_BUILD_TIMEOUT_S = 300


def foreign_client(bench: Bench) -> Path | None:
    """The program, built if need be; None, and a note in the table, if it cannot be built here."""
    go = shutil.which("go")
    if go is None:
        bench.notes.append("unary-grpc was not measured: there is no Go toolchain here")
        return None
    program = ROOT / "build" / "bench" / "foreign"
    program.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(__file__).parent
    done = subprocess.run(
        [go, "build", "-o", str(program), "."],
        cwd=folder, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        bench.notes.append(
            f"unary-grpc was not measured: go build said {done.stderr.strip()[-300:]}"
        )
        return None
    return program
