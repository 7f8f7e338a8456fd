"""What is read from a pipe piece by piece, and ends with Ctrl-C, whenever that comes."""

from __future__ import annotations

import io
import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


def chunks(stream: io.BufferedReader, size_max_bytes: int) -> Iterator[bytes]:
    """Yields what has come, at once, up to the end of the stream. Raises KeyboardInterrupt at Ctrl-C.

    Python calls a signal's handler between two instructions. For one that comes just before a blocking read, that is when more has come.
    So this waits for input and signals first.
    """
    if not _can_wait(stream):
        while chunk := stream.read1(size_max_bytes):
            yield chunk
        return
    number = stream.fileno()
    while True:
        with _told_of_signals() as told:
            select.select([number, told], [], [])
        # What the stream has read ahead would not show.
        if not (chunk := os.read(number, size_max_bytes)):
            return
        yield chunk


def _can_wait(stream: io.BufferedReader) -> bool:
    try:
        return stream.fileno() >= 0 and threading.current_thread() is threading.main_thread()
    except OSError:  # io.UnsupportedOperation: it is in memory
        return False


@contextmanager
def _told_of_signals() -> Iterator[int]:
    """A file descriptor that can be read once a signal has come."""
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)
