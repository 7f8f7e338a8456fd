"""A slave that is far away: batches are confirmed a round trip later, and no fewer of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Final

from tests.bench.bench import Bench, Result, create_topics, rate_of, ratio_of, row, spread
from tests.bench.measure import Sample, median_of
from tests.bench.process import Server, python_module

from .replication import ASYNC, NAME, QUEUES, SYNC, wait_in_sync

TOPIC: Final = "Distant"
ROUND_TRIPS_MS: Final = (0.0, 0.5, 2.0, 10.0)
CONNECTIONS, IN_FLIGHT = 2, 32
FLOOR_MS: Final = 2.0
SECONDS: Final = 2.0
"""Of each window, in the long runs, too: all logs of this row are on the disk until it ends."""


@row("replicated-batches-far")
def far_batches(bench: Bench) -> Iterator[Result]:
    """64 batches of 256 in flight: SYNC_MASTER with round trips to its slave, and ASYNC_MASTER with a slave beside it."""
    with ExitStack() as stack:
        masters = {_name(ms): _master(bench, stack, SYNC, ms) for ms in ROUND_TRIPS_MS}
        lazy = _master(bench, stack, ASYNC, 0.0)
        samples = bench.compare({name: partial(_load, bench, each) for name, each in (*masters.items(), ("async", lazy))})
    how = f"1 KiB x 256, prebuilt, {CONNECTIONS * IN_FLIGHT} in flight on {CONNECTIONS} connections, slave on the same machine"
    for ms in ROUND_TRIPS_MS:
        some = samples[_name(ms)]
        p50_ms = median_of(some, lambda sample: sample.p50_ms)
        yield rate_of(f"batches in flight, SYNC_MASTER, {_name(ms)}", some, f"{how}; a batch takes {p50_ms:.0f} ms; {spread(some)}")
    yield rate_of("batches in flight, ASYNC_MASTER with a slave", samples["async"], f"{how}; {spread(samples['async'])}")
    near = samples[_name(0.0)]
    for ms in ROUND_TRIPS_MS:
        some = samples[_name(ms)]
        floor = 0.4 if ms == FLOOR_MS else None
        yield ratio_of(f"batches in flight, SYNC_MASTER {_name(ms)} / ASYNC_MASTER", some, samples["async"], floor, how)
        if ms:
            yield ratio_of(f"batches in flight, SYNC_MASTER {_name(ms)} / without", some, near, 0.7, how)


def _name(round_trip_ms: float) -> str:
    return f"round trip of {round_trip_ms:g} ms" if round_trip_ms else "no round trip"


def _master(bench: Bench, stack: ExitStack, settings: dict[str, str], round_trip_ms: float) -> Server:
    """With its slave at that distance."""
    master = stack.enter_context(bench.standalone(**settings))
    far = python_module("tests.bench.distant_slave", f"{round_trip_ms:g}")
    stack.enter_context(bench.slave(master, NAME, command=far))
    create_topics(master, [TOPIC], QUEUES)
    wait_in_sync(master)
    return master


def _load(bench: Bench, master: Server) -> Sample:
    # Else each load pays for the pages that the one before it has left to be written.
    os.sync()
    return bench.load(
        "in_flight.send_batches", master, remoting=master.values["remoting"], topic=TOPIC,
        batch=256, size=1024, queues=QUEUES, connections=CONNECTIONS, in_flight=IN_FLIGHT, seconds=SECONDS, warm_up=0.5,
    )  # fmt: skip
