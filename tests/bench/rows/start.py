"""Starting: empty, idle, after a crash with gigabytes stored; and importing the SDK."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench.bench import Bench, Result, create_topics, row, start_standalone
from tests.bench.loads.remoting import first_send
from tests.bench.process import ROOT, Server

from .pull import fill

TOPIC = "Start"
STORED_TOPIC = "Stored"
_TIMEOUT_S = 120.0
_IDLE_S = 3.0
_IMPORT = (
    "import time; begin = time.perf_counter(); {}; print((time.perf_counter() - begin) * 1000)"
)


@row("start")
def start(bench: Bench) -> Iterator[Result]:
    """Standalone on an empty folder."""
    seconds, resident = [], []
    for _ in range(bench.extent.rounds + 1):
        data = bench.new_folder("start")
        server, took = started(data)
        seconds.append(took)
        time.sleep(_IDLE_S)
        resident.append(server.resident_mib())
        server.kill()
        shutil.rmtree(data, ignore_errors=True)
    yield Result(
        "start until the first accepted send", statistics.median(seconds), "s", "less",
        "standalone, empty folder, from the start of the process",
    )  # fmt: skip
    yield Result(
        "idle resident memory", statistics.median(resident), "MiB", "less",
        f"standalone (name server and broker), {_IDLE_S:.0f} s after the first send", 120,
    )  # fmt: skip


@row("import")
def import_sdk(bench: Bench) -> Iterator[Result]:
    """The SDK alone, and with the names that a first line of an application imports."""
    for name, statement in (
        ("import of the SDK", "import protomq"),
        (
            "import of the SDK with its clients",
            "from protomq import AsyncProducer, Producer, PullConsumer",
        ),
    ):
        times = []
        for _ in range(5):
            command = [sys.executable, "-c", _IMPORT.format(statement)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=60)
            times.append(float(done.stdout) / 1000)
        yield Result(name, statistics.median(times), "s", "less", statement, 0.3)


@row("restart")
def restart(bench: Bench) -> Iterator[Result]:
    """After kill -9 right after the load, with everything stored; the page cache is as the crash left it."""
    stored = bench.extent.stored_bytes
    data = bench.new_folder("restart")
    server, _ = started(data)
    try:
        create_topics(server, [STORED_TOPIC], 16)
        fill(server, STORED_TOPIC, 16, stored // 1150)
        resident = server.resident_mib()
        times = []
        for _ in range(bench.extent.rounds):
            server.kill()
            server, took = started(data)
            times.append(took)
            fill(server, STORED_TOPIC, 16, 20_000)  # Something after the last checkpoint.
        server.stop()
        server, clean = started(data)
    finally:
        server.kill()
        shutil.rmtree(data, ignore_errors=True)
    size = f"{stored / (1 << 30):.1f} GiB stored"
    yield Result(
        "restart after kill -9, until a send is accepted",
        statistics.median(times),
        "s",
        "less",
        size,
    )
    yield Result("restart after a clean stop, until a send is accepted", clean, "s", "less", size)
    yield Result(
        "resident memory after the load", resident, "MiB", "less", f"{size}, 16 queues, 1 KiB x 256"
    )


def started(data: Path) -> tuple[Server, float]:
    """A broker on a folder, and the seconds from the start of its process to its first accepted send."""
    begin = time.perf_counter()
    server = start_standalone(data)
    try:
        return server, first_send(server.values["remoting"], TOPIC, begin + _TIMEOUT_S) - begin
    except BaseException:
        server.kill()
        raise
