"""Batch sends: prebuilt over both transports against the bare loops, and through the SDK from Python objects.

Each window has a server of its own on a new store, and is short: at a gigabyte a second it would soon be the disk that is measured,
and the kernel's reclaim of its page cache. On a virtual machine, memory that is touched for the first time costs several times what
used memory costs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial

from tests.bench.bench import Bench, Result, create_topics, rate_of, ratio_of, row, spread
from tests.bench.measure import Sample, interleave
from tests.bench.process import Server

TOPIC = "Batch"
QUEUES = 16
CONNECTIONS = 2
"""Two keep the server busy; with more the client only takes time from it."""
_SECONDS_MAX = 2.0
_ROUNDS_MIN = 3

_Load = Callable[[Server], Sample]


@row("batch-remoting")
def prebuilt_over_remoting(bench: Bench) -> Iterator[Result]:
    """1 KiB x 256 in prebuilt requests, against receiving, writing and answering the same frames."""
    short = _short(bench)

    def load(server: Server) -> Sample:
        return short.load(
            "remoting.send_batches", server, remoting=server.values["remoting"], topics=[TOPIC],
            batch=256, size=1024, queues=QUEUES, connections=CONNECTIONS,
        )  # fmt: skip

    samples = _interleave(
        short,
        {
            "ours": partial(on_new_broker, short, load),
            "bare": partial(_on, lambda: short.limit("remoting"), load),
        },
    )
    ours, theirs = samples["ours"], samples["bare"]
    how = f"1 KiB x 256, {CONNECTIONS} connections with a batch on its way each"
    yield rate_of("batch send, prebuilt, remoting", ours, f"{how}; {spread(ours)}")
    yield rate_of("bare loop: frame, file, answer", theirs, f"the same frames; {spread(theirs)}")
    yield ratio_of("batch send, prebuilt, remoting / bare loop", ours, theirs, 0.6, how)


@row("batch-grpc")
def prebuilt_over_grpc(bench: Bench) -> Iterator[Result]:
    """The same requests over gRPC, against a grpc.aio server that does nothing."""
    short = _short(bench)

    def load(server: Server) -> Sample:
        return short.load(
            "grpc_raw.send_batches", server, grpc_address=server.values["grpc"], topic=TOPIC,
            batch=256, size=1024, queues=QUEUES, callers=4,
        )  # fmt: skip

    samples = _interleave(
        short,
        {
            "ours": partial(on_new_broker, short, load),
            "bare": partial(_on, lambda: short.limit("grpc"), load),
        },
    )
    ours, theirs = samples["ours"], samples["bare"]
    how = "1 KiB x 256, 4 threads with a channel each (Python's gRPC)"
    yield rate_of("batch send, prebuilt, gRPC", ours, f"{how}; {spread(ours)}")
    yield rate_of("bare gRPC with the same bytes", theirs, spread(theirs))
    yield ratio_of("batch send, prebuilt, gRPC / bare gRPC", ours, theirs, 0.75, how)


@row("batch-sdk")
def through_the_sdk(bench: Bench) -> Iterator[Result]:
    """Producer.send_batch of lists of bytes."""
    short = _short(bench)

    def load(batch: int, threads: int, server: Server) -> Sample:
        return short.load(
            "sdk.send_from_threads", server, namesrv=server.values["namesrv"], topic=TOPIC,
            threads=threads, batch=batch, size=1024,
        )  # fmt: skip

    samples = _interleave(
        short,
        {
            f"x {batch}, {threads} thread{'s' if threads > 1 else ''}": partial(
                on_new_broker, short, partial(load, batch, threads)
            )
            for batch, threads in ((256, 1), (16, 1), (16, 8))
        },
    )
    for name, some in samples.items():
        how = f"1 KiB, records built from Python objects; {spread(some)}"
        yield rate_of(f"batch send, SDK, {name}", some, how)


def on_new_broker(bench: Bench, load: _Load, topic: str = TOPIC) -> Sample:
    """The load on a broker that was started for it."""
    with bench.standalone() as broker:
        create_topics(broker, [topic], QUEUES)
        return load(broker)


def _on(start: Callable[[], AbstractContextManager[Server]], load: _Load) -> Sample:
    with start() as server:
        return load(server)


def _short(bench: Bench) -> Bench:
    extent = bench.extent
    seconds, rounds = min(extent.seconds, _SECONDS_MAX), max(extent.rounds, _ROUNDS_MIN)
    return dataclasses.replace(
        bench, extent=dataclasses.replace(extent, seconds=seconds, rounds=rounds)
    )


def _interleave(bench: Bench, runs: dict[str, Callable[[], Sample]]) -> dict[str, list[Sample]]:
    return interleave(runs, bench.extent.rounds)
