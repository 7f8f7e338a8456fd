"""Replication: what a slave costs the master's sends, what waiting for it costs, and how fast an empty one catches up."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import grpc

from protomq.v1.ha_service_pb2 import GetHaStatusRequest
from protomq.v1.ha_service_pb2_grpc import HaServiceStub
from protomq_broker.ha_service import GATHER_MS
from protomq_ha.roles import HaConfig
from tests.bench.bench import Bench, Result, create_topics, rate_of, ratio_of, row, spread
from tests.bench.measure import Sample, median_of
from tests.bench.process import Server

from .pull import fill, log_file
from .single_send import from_coroutines, from_threads

TOPIC = "Replicated"
QUEUES = 16
CALLERS = 64
NAME = "pair"
ASYNC = {"broker_name": NAME, "broker_role": "ASYNC_MASTER"}
SYNC = {"broker_name": NAME, "broker_role": "SYNC_MASTER", "ha_in_sync_replicas": "2", "ha_min_in_sync_replicas": "2"}
MIB, GIB = 1 << 20, 1 << 30
TRANSFER_BYTES = HaConfig().transfer_size_bytes
"""Most of the log in one answer to a slave: the bare sendfile loop sends as much at a time."""
MESSAGE_BYTES = 1_148
"""Of a message of 1 KiB in the log."""
MESSAGES = 400_000
"""Less than a segment."""
_BEGUN_BYTES = 16 * MIB
"""A slave that has so much is under way: its start does not count."""
_LOOK_S = 0.02
_PATIENCE_S = 120.0


class Masters:
    """`alone`, `lazy` with a slave that it does not wait for, `strict` with one that it waits for."""

    def __init__(self, bench: Bench, stack: ExitStack) -> None:
        self.alone = stack.enter_context(bench.standalone())
        self.lazy = stack.enter_context(bench.standalone(**ASYNC))
        self.strict = stack.enter_context(bench.standalone(**SYNC))
        for master in (self.lazy, self.strict):
            stack.enter_context(bench.slave(master, NAME))
        for server in (self.alone, self.lazy, self.strict):
            create_topics(server, [TOPIC], QUEUES)
        for master in (self.lazy, self.strict):
            wait_in_sync(master)


@row("replicated-sends")
def sends(bench: Bench) -> Iterator[Result]:
    """64 callers: without a slave, with one, and waiting for it."""
    loads: dict[str, Callable[..., Sample]] = {f"{CALLERS} threads": from_threads, f"{CALLERS} coroutines": from_coroutines}
    with ExitStack() as stack:
        masters = Masters(bench, stack)
        samples = bench.compare(
            {
                f"{kind}, {name}": partial(load, bench, master, CALLERS, topic=TOPIC)
                for name, load in loads.items()
                for kind, master in (("alone", masters.alone), ("async", masters.lazy), ("sync", masters.strict))
            }
            | {kind: partial(_send_recent, bench, kind) for kind in ("sendfile", "mapped")}
        )
    how = "1 KiB, SDK, ASYNC_FLUSH, slave on the same machine"
    for name in loads:
        alone, lazy, strict = (samples[f"{kind}, {name}"] for kind in ("alone", "async", "sync"))
        yield rate_of(f"SYNC_MASTER with a slave, {name}", strict, f"{how}; {spread(strict)}")
        yield rate_of(f"ASYNC_MASTER with a slave, {name}", lazy, f"{how}; {spread(lazy)}")
        yield ratio_of(f"ASYNC_MASTER with a slave / without, {name}", lazy, alone, 0.7, how)
        cpu = median_of(lazy, lambda s: s.server_us) / median_of(alone, lambda s: s.server_us)
        yield Result(f"master's CPU per message, with a slave / without, {name}", cpu, "x", "less", how, 1.1)
        alone_us = median_of(alone, lambda s: s.server_us)
        for kind, by in (("sendfile", "sendfile"), ("mapped", "a mapping")):
            adds_us = median_of(samples[kind], lambda s: s.server_cpu_s * 1e6 * MESSAGE_BYTES / s.size_bytes)
            loop = f"a bare loop sends a growing file, {TRANSFER_BYTES // MIB} MiB each {GATHER_MS} ms: {adds_us:.2f} us a message"
            yield Result(f"the same with the bytes alone, by {by}, {name}", 1 + adds_us / alone_us, "x", "less", loop)


@row("replicated-batches")
def batches(bench: Bench) -> Iterator[Result]:
    """Batches of 256, waiting for the slave and not."""
    with ExitStack() as stack:
        masters = Masters(bench, stack)
        samples = bench.compare(
            {
                "sync": partial(_batches, bench, masters.strict),
                "async": partial(_batches, bench, masters.lazy),
                "alone": partial(_batches, bench, masters.alone),
            }
        )
    how = "1 KiB x 256, prebuilt, 2 connections with a batch on its way each, slave on the same machine"
    for kind, name in (("sync", "SYNC_MASTER"), ("async", "ASYNC_MASTER")):
        yield rate_of(f"batches, {name} with a slave", samples[kind], f"{how}; {spread(samples[kind])}")
    yield ratio_of("batches, SYNC_MASTER / ASYNC_MASTER, with a slave", samples["sync"], samples["async"], 0.5, how)
    yield ratio_of("batches, ASYNC_MASTER with a slave / without", samples["async"], samples["alone"], 0.7, how)


@row("catch-up-slave")
def catch_up(bench: Bench) -> Iterator[Result]:
    """An empty slave, against a bare sendfile loop over the same segment."""
    with bench.standalone(**ASYNC) as master:
        create_topics(master, [TOPIC], 1)
        fill(master, TOPIC, 1, MESSAGES)
        with bench.limit("sendfile", str(log_file(master))) as bare:
            samples = bench.compare(
                {
                    "slave": lambda: _catch_up(bench, master),
                    "bare": lambda: bench.load(
                        "remoting.read_sendfile_limit", bare, address=bare.values["remoting"], answer_bytes=TRANSFER_BYTES
                    ),
                    "write": lambda: _receive_and_write(bench),
                }
            )
    how = "1 KiB; the slave proves each seal, writes, and enters the messages into its queues"
    rates = [sample.bytes_rate / 1e9 for sample in samples["slave"]]
    yield Result("catch-up of an empty slave", statistics.median(rates), "GB/s", "more", how)
    cpu = [sample.server_cpu_s / (sample.size_bytes / GIB) for sample in samples["slave"]]
    yield Result("catch-up of an empty slave, its CPU", statistics.median(cpu), "s/GiB", "less", how)
    yield ratio_of(
        "catch-up of an empty slave / bare sendfile", samples["slave"], samples["bare"], 0.6, how,
        lambda sample: sample.bytes_rate,
    )  # fmt: skip
    yield ratio_of(
        "catch-up of an empty slave / bare loop: frame, file", samples["slave"], samples["write"], None,
        "the loop receives frames of 1 MiB, and writes them to a new file; no proof, no queues",
        lambda sample: sample.bytes_rate,
    )  # fmt: skip


def _receive_and_write(bench: Bench) -> Sample:
    """What a slave cannot do without, in one thread: the bytes come from a socket, and go to a file."""
    with bench.limit("remoting") as loop:
        return bench.load(
            "remoting.send_batches", loop, remoting=loop.values["remoting"], topics=[TOPIC],
            batch=MIB // MESSAGE_BYTES, size=1024, queues=1, connections=2,
        )  # fmt: skip


def _send_recent(bench: Bench, kind: str) -> Sample:
    """What a master cannot do without for a slave: what was just written goes to a socket."""
    folder = bench.new_folder("recent")
    path = folder / "segment"
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, GIB)
        with bench.limit(kind, str(path)) as loop:
            return bench.load(
                "remoting.read_recent_limit", loop, address=loop.values["remoting"], path=str(path),
                answer_bytes=TRANSFER_BYTES, interval_ms=GATHER_MS,
            )  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _batches(bench: Bench, server: Server) -> Sample:
    return bench.load(
        "remoting.send_batches", server, remoting=server.values["remoting"], topics=[TOPIC],
        batch=256, size=1024, queues=QUEUES, connections=2,
    )  # fmt: skip


def _catch_up(bench: Bench, master: Server) -> Sample:
    with grpc.insecure_channel(master.values["grpc"]) as channel:
        end = HaServiceStub(channel).GetHaStatus(GetHaStatusRequest()).end_position
    ends_s = time.perf_counter() + _PATIENCE_S
    with bench.slave(master, NAME) as slave, grpc.insecure_channel(slave.values["grpc"]) as channel:
        stub = HaServiceStub(channel)
        begun: tuple[float, int, float] | None = None
        while True:
            position, now_s = stub.GetHaStatus(GetHaStatusRequest()).end_position, time.perf_counter()
            if begun is None and position >= _BEGUN_BYTES:
                begun = (now_s, position, slave.cpu_seconds())
            if position >= end and begun is not None:
                cpu_s = slave.cpu_seconds() - begun[2]
                return Sample(1, now_s - begun[0], size_bytes=position - begun[1], server_cpu_s=cpu_s)
            assert now_s < ends_s, "the slave does not catch up"
            time.sleep(_LOOK_S)


def wait_in_sync(master: Server) -> None:
    """Until a slave follows and has everything."""
    ends_s = time.perf_counter() + _PATIENCE_S
    with grpc.insecure_channel(master.values["grpc"]) as channel:
        stub = HaServiceStub(channel)
        while not any(each.in_sync for each in stub.GetHaStatus(GetHaStatusRequest()).replicas):
            assert time.perf_counter() < ends_s, "no slave follows"
            time.sleep(_LOOK_S)
