"""A broker whose disk is slow, full or scant when it is told to: a small library that is preloaded into the process. Needs gcc."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

SOURCE = Path(__file__).with_name("sick_disk.c")


def why_no_sick_disk() -> str:
    """Why it cannot be built here; "" if it can."""
    return "" if shutil.which("gcc") else "gcc is not installed"


def build_library(folder: Path) -> Path:
    """The library, in this folder."""
    library = folder / "sick_disk.so"
    command = ["gcc", "-shared", "-fPIC", "-O2", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return library


class SickDisk:
    """The disk of one process. Attribute: environment, which the process needs."""

    def __init__(self, folder: Path, library: Path) -> None:
        self._slow, self._full, self._scant = (folder / f"disk-is-{how}" for how in ("slow", "full", "scant"))
        folder.mkdir(parents=True, exist_ok=True)
        self._library = library

    @cached_property
    def environment(self) -> dict[str, str]:
        """The library, and where it looks."""
        return {
            "LD_PRELOAD": str(self._library),
            "PROTOMQ_CHAOS_SLOW_DISK": str(self._slow),
            "PROTOMQ_CHAOS_FULL_DISK": str(self._full),
            "PROTOMQ_CHAOS_SCANT_DISK": str(self._scant),
        }

    @contextmanager
    def slow(self, sync_ms: int) -> Iterator[None]:
        """Each sync takes so much longer."""
        self._slow.write_bytes(bytes(sync_ms))
        try:
            yield
        finally:
            self._slow.unlink()

    @contextmanager
    def full(self) -> Iterator[None]:
        """Nothing has space any more."""
        self._full.touch()
        try:
            yield
        finally:
            self._full.unlink()

    @contextmanager
    def scant(self) -> Iterator[None]:
        """It is full enough that a broker takes no more messages. Whoever writes all the same finds space."""
        self._scant.touch()
        try:
            yield
        finally:
            self._scant.unlink()
