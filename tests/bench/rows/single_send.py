"""Single sends, each caller waiting for its answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.bench.bench import Bench, Result, create_topics, rate_of, ratio_of, row, spread
from tests.bench.foreign import foreign_client
from tests.bench.measure import Sample, median_of, run_foreign
from tests.bench.process import Server

TOPIC = "Single"
QUEUES = 16


@row("callers")
def callers(bench: Bench) -> Iterator[Result]:
    """64 coroutines, 64 and 256 threads, through the SDK over the remoting port."""
    with bench.standalone() as broker:
        create_topics(broker, [TOPIC], QUEUES)
        samples = bench.compare(
            {
                "64 coroutines": lambda: from_coroutines(bench, broker, 64),
                "64 threads": lambda: from_threads(bench, broker, 64),
                "256 threads": lambda: from_threads(bench, broker, 256),
            }
        )
    for name, some in samples.items():
        p50, p99 = median_of(some, lambda s: s.p50_ms), median_of(some, lambda s: s.p99_ms)
        yield rate_of(
            f"single sends, SDK, {name}",
            some,
            f"1 KiB; p50 {p50:.2f} ms, p99 {p99:.2f} ms; {spread(some)}",
        )


@row("one-caller")
def one_caller(bench: Bench) -> Iterator[Result]:
    """One thread, one message at a time."""
    with bench.standalone() as broker:
        create_topics(broker, [TOPIC], QUEUES)
        samples = bench.repeat(lambda: from_threads(bench, broker, 1))
    yield Result(
        "one caller, SDK, p50", median_of(samples, lambda s: s.p50_ms), "ms", "less",
        f"1 KiB; p99 {median_of(samples, lambda s: s.p99_ms):.3f} ms",
        broker_us=median_of(samples, lambda s: s.server_us),
        client_us=median_of(samples, lambda s: s.client_us),
    )  # fmt: skip


@row("unary-grpc")
def unary_grpc(bench: Bench) -> Iterator[Result]:
    """Send over gRPC from 64 callers of a client in Go, against an empty unary call on the same server."""
    client = foreign_client(bench)
    if client is None:
        return
    with bench.standalone() as broker:
        create_topics(broker, [TOPIC], QUEUES)
        samples = bench.compare(
            {
                "send": lambda: _foreign(bench, client, broker, TOPIC, "SendService/Send"),
                "ping": lambda: _foreign(bench, client, broker, "", "AdminService/Ping"),
            }
        )
    how = "64 goroutines on one connection (google.golang.org/grpc), records with a body only"
    yield rate_of(
        "unary Send, gRPC, Go client", samples["send"], f"1 KiB, {how}; {spread(samples['send'])}"
    )
    yield rate_of(
        "empty unary RPC, gRPC, Go client", samples["ping"], f"Ping; {spread(samples['ping'])}"
    )
    yield ratio_of("unary Send / empty unary RPC, gRPC", samples["send"], samples["ping"], 0.8, how)


@row("sync-flush")
def sync_flush(bench: Bench) -> Iterator[Result]:
    """64 callers under SYNC_FLUSH against the same under ASYNC_FLUSH."""
    with bench.standalone() as lazy, bench.standalone(store_sync_flush="true") as strict:
        for server in (lazy, strict):
            create_topics(server, [TOPIC], QUEUES)
        samples = bench.compare(
            {
                "sync": lambda: from_threads(bench, strict, 64),
                "async": lambda: from_threads(bench, lazy, 64),
                "sync, coroutines": lambda: from_coroutines(bench, strict, 64),
                "async, coroutines": lambda: from_coroutines(bench, lazy, 64),
            }
        )
    for kind in ("sync", "sync, coroutines"):
        what = "64 coroutines" if "coroutines" in kind else "64 threads"
        yield rate_of(f"SYNC_FLUSH, SDK, {what}", samples[kind], f"1 KiB; {spread(samples[kind])}")
    yield ratio_of(
        "SYNC_FLUSH / ASYNC_FLUSH, 64 threads", samples["sync"], samples["async"], 0.5, "SDK, 1 KiB"
    )
    yield ratio_of(
        "SYNC_FLUSH / ASYNC_FLUSH, 64 coroutines",
        samples["sync, coroutines"], samples["async, coroutines"], 0.5, "SDK, 1 KiB",
    )  # fmt: skip


def from_threads(
    bench: Bench, broker: Server, threads: int, size: int = 1024, *, topic: str = TOPIC, **more: int
) -> Sample:
    """Threads that share one producer."""
    return bench.load(
        "sdk.send_from_threads", broker, namesrv=broker.values["namesrv"], topic=topic,
        threads=threads, batch=1, size=size, **more,
    )  # fmt: skip


def from_coroutines(
    bench: Bench, broker: Server, callers: int, size: int = 1024, *, topic: str = TOPIC
) -> Sample:
    """Coroutines that share one producer."""
    return bench.load(
        "sdk.send_from_coroutines", broker, namesrv=broker.values["namesrv"], topic=topic,
        callers=callers, size=size,
    )  # fmt: skip


def _foreign(bench: Bench, client: Path, broker: Server, topic: str, method: str) -> Sample:
    return run_foreign(
        [
            str(client), "-target", broker.values["grpc"], "-topic", topic,
            "-method", f"/protomq.v1.{method}", "-warm-up", f"{bench.extent.warm_up_s}s",
            "-duration", f"{bench.extent.seconds}s", "-server-pids", ",".join(map(str, broker.pids)),
        ]
    )  # fmt: skip
