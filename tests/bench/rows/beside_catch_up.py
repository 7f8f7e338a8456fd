"""What the master's sends lose while an empty slave catches up from its disk.

On two cores there are three busy processes then: senders, master and slave. Each would get two thirds of what it had, if nothing else
were lost. The master's own cost is its CPU per message. A slave that runs only where nobody else does (SCHED_IDLE) shows what is lost where
the slave has a machine of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import grpc

from protomq.v1.ha_service_pb2 import GetHaStatusRequest, GetHaStatusResponse
from protomq.v1.ha_service_pb2_grpc import HaServiceStub
from tests.bench.bench import Bench, Result, create_topics, program, rate_of, ratio_of, row, spread
from tests.bench.measure import Sample, median_of
from tests.bench.process import Server
from tests.support.waiting import wait_for

from .pull import fill
from .replication import ASYNC, NAME

PAST, TOPIC = "Past", "Beside"
QUEUES = 16
MESSAGES: Final = 2_500_000
"""The log that an empty slave fetches: it must take longer than a window."""
SECONDS: Final = 2.0
CALLERS: Final = 64
_BEGUN_BYTES: Final = 16 << 20
_TEXTS: Final = {"alone": "no slave", "beside": "a slave catches up", "idle": "a slave catches up in idle time"}


@row("sends-beside-catch-up")
def sends_beside_catch_up(bench: Bench) -> Iterator[Result]:
    """64 coroutines at a master without a slave, and at the same master while an empty slave fetches all of its log."""
    shares: dict[str, list[float]] = {"beside": [], "idle": []}

    def load() -> Sample:
        return bench.load(
            "sdk.send_from_coroutines", master, namesrv=master.values["namesrv"], topic=TOPIC, callers=CALLERS, size=1024,
            seconds=SECONDS, warm_up=0.5,
        )  # fmt: skip

    def alone() -> Sample:
        _forget_pages(master)
        return load()

    def beside(name: str) -> Sample:
        _forget_pages(master)
        with bench.slave(master, NAME, command=("chrt", "--idle", "0", program()) if name == "idle" else ()) as slave:
            wait_for(lambda: _status(slave).end_position > _BEGUN_BYTES)
            sample = load()
            shares[name].append(_status(slave).end_position / _status(master).end_position)
            if shares[name][-1] > 0.99:
                raise RuntimeError("the slave had caught up before the window ended: it needs more messages")
            return sample

    with bench.standalone(**ASYNC) as master:
        create_topics(master, [PAST, TOPIC], QUEUES)
        fill(master, PAST, QUEUES, MESSAGES)
        samples = bench.compare({"alone": alone, "beside": partial(beside, "beside"), "idle": partial(beside, "idle")})
    how = f"1 KiB, SDK, {CALLERS} coroutines, ASYNC_MASTER; the empty slave shares the two cores, and proves and writes what comes"
    p99_ms = {name: median_of(some, lambda sample: sample.p99_ms) for name, some in samples.items()}
    for name, text in _TEXTS.items():
        yield rate_of(f"single sends, {text}", samples[name], f"{how}; p99 {p99_ms[name]:.1f} ms; {spread(samples[name])}")
    for name, floor, cpu_floor in (("beside", 0.5, None), ("idle", 0.8, 1.3)):
        had = f"{how}; it had {min(shares[name]):.0%} to {max(shares[name]):.0%} of the log at the end of a window"
        yield ratio_of(f"single sends, {_TEXTS[name]} / no slave", samples[name], samples["alone"], floor, had)
        cpu = median_of(samples[name], lambda s: s.server_us) / median_of(samples["alone"], lambda s: s.server_us)
        yield Result(f"master's CPU per message, {_TEXTS[name]} / no slave", cpu, "x", "less", how, cpu_floor)


def _status(server: Server) -> GetHaStatusResponse:
    with grpc.insecure_channel(server.values["grpc"]) as channel:
        return HaServiceStub(channel).GetHaStatus(GetHaStatusRequest())


def _forget_pages(master: Server) -> None:
    """The log is on the disk, and not in memory, but for what the broker maps."""
    os.sync()
    for path in (Path(master.values["data"]) / "commitlog").iterdir():
        with _opened(path) as descriptor:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
