"""Keeps the log of the brokers that are measured in the page cache.

Some machines take pages away that were idle for seconds, though memory is free. What a broker reads and checks again then differs from
run to run, and a version that checks nothing pays nothing. With the pages held, both sides of a comparison read from memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading
from pathlib import Path
from typing import Final, Self

LOOK_INTERVAL_S: Final = 0.05
_LOG_FILES: Final = "protomq-bench-*/*/store/commitlog/*"
_libc: Final = ctypes.CDLL(None, use_errno=True)


class HeldPages:
    """While it is open, segments are locked into memory as soon as they are there, and let go when they are deleted.

    Attribute: held_count: segments that were locked so far.
    """

    def __init__(self) -> None:
        self.held_count = 0
        self._mappings: dict[Path, mmap.mmap] = {}
        self._stopping = threading.Event()
        self._failure: OSError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._mappings.clear()

    def check(self) -> None:
        """Raises RuntimeError if segments could not be locked, or none was found: then what was measured was not held."""
        if self._failure is not None:
            raise RuntimeError(f"the pages of the log cannot be held: {self._failure}; try `ulimit -l unlimited`, or be root")
        if not self.held_count:
            raise RuntimeError(f"no segment was found as {tempfile.gettempdir()}/{_LOG_FILES}: nothing was held")

    def _run(self) -> None:
        while self._failure is None and not self._stopping.wait(LOOK_INTERVAL_S):
            found = set(Path(tempfile.gettempdir()).glob(_LOG_FILES))
            for path in found - self._mappings.keys():
                self._hold(path)
            for path in self._mappings.keys() - found:
                del self._mappings[path]

    def _hold(self, path: Path) -> None:
        try:
            descriptor = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return
        try:
            size_bytes = os.fstat(descriptor).st_size
            if not size_bytes:
                return  # it is being made
            mapping = mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED)
        finally:
            os.close(descriptor)
        # Of a writable mapping, for its address; nothing is written through it.
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        if _libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes)):
            number = ctypes.get_errno()
            self._failure = OSError(number, os.strerror(number), str(path))
        self.held_count += 1
        self._mappings[path] = mapping
