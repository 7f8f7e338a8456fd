"""Members in processes of their own that write down the bodies of what they get, a line each."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def member_process(program: str, namesrv: str, seen: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs `program`, whose arguments these are from the second on. Killed at the end."""
    process = subprocess.Popen([sys.executable, "-c", program, namesrv, str(seen), *arguments])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def bodies(*files: Path) -> Counter[str]:
    """What they have written so far."""
    return Counter(line for file in files if file.exists() for line in file.read_text().splitlines())
