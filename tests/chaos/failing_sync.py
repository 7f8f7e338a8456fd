"""A broker whose fsync fails when it is told to: a small library that is preloaded into the process. Needs gcc."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("failing_sync.c")


def why_no_shim() -> str:
    """Why it cannot be built here; "" if it can."""
    return "" if shutil.which("gcc") else "gcc is not installed"


def build_shim(folder: Path) -> tuple[dict[str, str], Path]:
    """(environment for the broker, the file whose existence makes every sync fail)."""
    library, trigger = folder / "failing_sync.so", folder / "syncs-fail"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O2", "-o", str(library), str(SOURCE), "-ldl"],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return {"LD_PRELOAD": str(library), "PROTOMQ_CHAOS_FAIL_SYNC": str(trigger)}, trigger
