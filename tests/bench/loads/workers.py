"""`protomq worker` with listeners that compute."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.bench.bench import program
from tests.bench.computing import COUNT, steps_of
from tests.bench.measure import Sample
from tests.bench.process import ROOT, cpu_seconds, descendants

PATIENCE_S = 60.0


def compute(
    namesrv: str,
    topic: str,
    group: str,
    processes: int,
    messages: int,
    listener_ms: float,
    seconds: float,
    warm_up: float,
    server_pids: Sequence[int],
) -> Sample:
    """What all processes together have done in the window, which begins when each of them has had messages.

    Raises RuntimeError if one gets none, or if the topic's messages do not last.
    """
    with tempfile.NamedTemporaryFile(prefix="protomq-computing-") as file:
        file.truncate(COUNT.size * processes)
        path = Path(file.name)

        def done() -> list[int]:
            return [count for (count,) in COUNT.iter_unpack(path.read_bytes())]

        given = f"{namesrv},{topic},{group},{steps_of(listener_ms / 1_000)},{path}"
        with _worker(processes, given) as worker:
            _wait(lambda: all(done()), f"one of {processes} processes gets no messages")
            time.sleep(warm_up)
            pids = descendants(worker.pid)
            began = time.perf_counter(), sum(done()), cpu_seconds(pids), cpu_seconds(server_pids)
            time.sleep(seconds)
            ended = time.perf_counter(), sum(done()), cpu_seconds(pids), cpu_seconds(server_pids)
    if ended[1] >= messages:
        raise RuntimeError(f"{messages} messages did not last for {processes} processes")
    took_s, count, client_s, server_s = (end - begin for begin, end in zip(began, ended, strict=True))
    return Sample(messages=int(count), seconds=took_s, client_cpu_s=client_s, server_cpu_s=server_s)


@contextmanager
def _worker(processes: int, given: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [program(), "worker", "tests.bench.computing:make", "--processes", str(processes), "--status", "0s"]
    worker = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "COMPUTING_LISTENER": given})
    try:
        yield worker
    finally:
        worker.terminate()
        try:
            worker.wait(PATIENCE_S)
        finally:
            worker.kill()


def _wait(is_so: Callable[[], bool], otherwise: str) -> None:
    ends_s = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() >= ends_s:
            raise RuntimeError(otherwise)
        time.sleep(0.02)
