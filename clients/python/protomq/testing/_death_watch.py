"""Ends a child when the process that started it is killed: a shell waits at a pipe that only that process holds."""

from __future__ import annotations

import subprocess
from typing import Final

# The number may have gone to another process, where /proc can tell.
_SCRIPT: Final = """
read -r line
[ "$line" = done ] && exit
[ -d /proc/self ] && ! grep -qs protomq "/proc/$1/cmdline" || kill -9 "$1"
[ -z "$2" ] || rm -rf "$2"
"""


class DeathWatch:
    """Kills a child, and removes a folder, when this process ends before `end` was called. Any thread."""

    def __init__(self, process_id: int, folder: str) -> None:
        """`folder`: "": none."""
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "protomq-death-watch", str(process_id), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def end(self) -> None:
        """The child has ended, or is somebody else's."""
        self._shell.communicate(b"done\n")
