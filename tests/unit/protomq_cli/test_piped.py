"""What is read from a pipe comes at once, and Ctrl-C ends the wait for more, whenever it comes."""

from __future__ import annotations

import _thread
import io
import os
import threading
from pathlib import Path

import pytest

from protomq_cli.piped import chunks


def test_what_has_come_is_there_at_once_and_the_end_ends_it() -> None:
    reading, writing = os.pipe()
    with open(reading, "rb") as stream:
        found = chunks(stream, 4)
        os.write(writing, b"ab")
        assert next(found) == b"ab"
        os.write(writing, b"cdefg")
        assert [next(found), next(found)] == [b"cdef", b"g"]
        os.close(writing)
        assert list(found) == []


def test_what_is_in_memory_is_read_too() -> None:
    assert b"".join(chunks(io.BufferedReader(io.BytesIO(b"abcdef")), 4)) == b"abcdef"


def test_an_interrupt_that_breaks_off_no_system_call_ends_the_wait() -> None:
    """As Ctrl-C just before a blocking read: Python notes it, and the read begins."""
    reading, writing = os.pipe()
    waiting = Path(f"/proc/self/task/{threading.get_native_id()}/stat")

    begun = threading.Event()
    ended = threading.Event()
    gave_up = threading.Event()

    def interrupt() -> None:
        begun.wait()
        asleep = 0
        while asleep < 50:  # Else it may only wait for this thread.
            asleep = asleep + 1 if waiting.read_text().rpartition(")")[2].split()[0] == "S" else 0
        _thread.interrupt_main()
        if not ended.wait(10):
            gave_up.set()
            os.close(writing)

    def read(stream: io.BufferedReader) -> None:
        begun.set()  # An interrupt before this would end the test run.
        next(chunks(stream, 4))

    thread = threading.Thread(target=interrupt)
    with open(reading, "rb") as stream:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            read(stream)
        ended.set()
        thread.join()
    assert not gave_up.is_set(), "it waited for the end of the stream"
    os.close(writing)


def test_a_wait_leaves_the_process_as_it_was() -> None:
    reading, writing = os.pipe()
    before = len(os.listdir("/proc/self/fd"))
    with open(reading, "rb") as stream:
        os.write(writing, b"a")
        next(chunks(stream, 1))
        assert len(os.listdir("/proc/self/fd")) == before
    os.close(writing)
