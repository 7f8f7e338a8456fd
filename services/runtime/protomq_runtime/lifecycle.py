"""A server process from its start to its last breath; name server, broker and standalone use it.

The first SIGTERM or SIGINT stops gracefully, the second one exits at once. If a thread of the server fails, the process ends: a
broker that answers pings but appends nothing is worse than one that is gone. One line that starts with `ready` says that work is
taken; it is the only thing written to stdout. A ports file says the same to programs, and systemd is told (service_manager.py).
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

import aiofiles
import aiofiles.os
from google.protobuf.internal import api_implementation

from . import telemetry_setup
from .service_manager import READY, STOPPING, notify

logger = logging.getLogger(__name__)

EXIT_OK: Final = 0
EXIT_FATAL: Final = 70
"""EX_SOFTWARE of sysexits.h."""
SWITCH_INTERVAL_S: Final = 0.000_2
"""How long a thread may keep the GIL while another one wants it; Python's default is 5 ms.

A lane that ran long stretches of Python (4 ms a turn) delayed a ping on another lane. At p99 the delay was 8-12 ms with 5 ms, 2.0-3.3
ms with 0.5 ms, and 0.5-2.0 ms with 0.1 ms. Throughput of a saturated lane beside a saturated gRPC front did not differ measurably.
"""
MALLOC_SETTINGS: Final = {-8: 2, -3: 4 << 20, -1: 8 << 20}
"""For glibc's `mallopt`: M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD.

By default there are 8 arenas per core. The two thresholds follow the largest block that was ever freed, and each arena keeps up to twice
that. After a few dozen gRPC calls of 2 and 6 MiB, one after the other, the broker had up to 77 MiB more for good.
"""
GRACE_S: Final = 5.0
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Process(Protocol):
    """What is run: a Server, or something around one or several."""

    async def start(self) -> None: ...

    async def stop(self, grace_s: float) -> None: ...

    def set_on_fatal(self, on_fatal: Callable[[BaseException], None]) -> None: ...


def run_until_signal(
    process: Process,
    ready: Callable[[], Mapping[str, str]],
    *,
    ports_file: Path | None = None,
    grace_s: float = GRACE_S,
    service_name: str = "protomq",
) -> int:
    """Runs the process on a new event loop until a signal comes. The exit code: 0 after a graceful stop, 70 after a failure.

    `service_name` is what telemetry calls it unless OTEL_SERVICE_NAME does.
    `ready` is called after the start, when ports are known: names and values for the ready line. `ports_file` gets them as a JSON
    object, with the process id, and is removed at a graceful stop. Errors of the start are raised.
    """
    prepare_process()
    telemetry = telemetry_setup.set_up(service_name)
    try:
        return asyncio.run(_run(process, ready, ports_file, grace_s))
    finally:
        if telemetry is not None:
            telemetry.shut_down()
        # The process ends: the interpreter's last collection would look through all modules for nothing.
        gc.freeze()


def prepare_process() -> None:
    """Settings of the whole process. Raises RuntimeError if it cannot be run like this."""
    if not __debug__:
        raise RuntimeError("protomq relies on its assertions: do not run it with python -O")
    if api_implementation.Type() != "upb":
        raise RuntimeError(
            f"protobuf runs as {api_implementation.Type()!r}; the C implementation upb is needed"
        )
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # other libraries than glibc have none
        for parameter, value in MALLOC_SETTINGS.items():
            mallopt(parameter, value)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # One descriptor for each connection and each segment; the soft limit is 1,024 on most machines.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def say_ready(words: str) -> None:
    """Writes the ready line and tells systemd. If nobody reads stdout any more, it goes nowhere from here on, and the server works."""
    try:
        sys.stdout.write(f"ready {words}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    notify(READY)


async def _run(
    process: Process,
    ready: Callable[[], Mapping[str, str]],
    ports_file: Path | None,
    grace_s: float,
) -> int:
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    failures: list[BaseException] = []

    def on_signal(number: signal.Signals) -> None:
        logger.info("%s: stopping; a second signal exits at once", number.name)
        # From here on the kernel ends the process, even while this loop is held up.
        for each in SIGNALS:
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)
        over.set()

    def on_fatal(error: BaseException) -> None:
        failures.append(error)
        loop.call_soon_threadsafe(over.set)

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    process.set_on_fatal(on_fatal)
    await process.start()
    words = ready()
    if ports_file is not None:
        await _write_ports(ports_file, words)
    say_ready(" ".join(f"{name}={value}" for name, value in words.items()))
    await over.wait()
    notify(STOPPING)
    await process.stop(grace_s)
    if ports_file is not None:
        with suppress(FileNotFoundError):
            await aiofiles.os.remove(ports_file)
    return EXIT_FATAL if failures else EXIT_OK


async def _write_ports(path: Path, words: Mapping[str, str]) -> None:
    """Whole or not at all: somebody may be waiting for the file."""
    content = {"pid": os.getpid(), **words}
    temporary = path.with_name(f"{path.name}.tmp")
    async with aiofiles.open(temporary, "w", encoding="utf-8") as file:
        await file.write(json.dumps(content) + "\n")
    await aiofiles.os.replace(temporary, path)
