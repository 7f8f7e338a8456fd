"""How rates grow with connections, with the size of bodies, and with a second broker beside the first. No floors."""

from __future__ import annotations

from collections.abc import Iterator

from tests.bench.bench import Bench, Result, create_topics, rate_of, row
from tests.bench.measure import Sample, median_of

TOPIC = "Growth"
QUEUES = 16
CONNECTIONS = (1, 4, 16, 64)
BODY_SIZES = (128, 1 << 10, 16 << 10, 256 << 10)
_BATCH_BYTES = 256 << 10
_BATCH_MAX = 256


@row("connections")
def connections(bench: Bench) -> Iterator[Result]:
    """1 to 64 connections: batches, single sends from threads, and pulls."""
    with bench.standalone() as broker:
        create_topics(broker, [TOPIC], QUEUES)
        for count in CONNECTIONS:
            sample = bench.load(
                "remoting.send_batches", broker, remoting=broker.values["remoting"], topics=[TOPIC],
                batch=256, size=1024, queues=QUEUES, connections=count,
            )  # fmt: skip
            yield rate_of(
                f"batch send, {count} connections", [sample], "1 KiB x 256, prebuilt, remoting"
            )
        for count in CONNECTIONS:
            sample = bench.load(
                "sdk.send_from_threads", broker, namesrv=broker.values["namesrv"], topic=TOPIC,
                threads=count, batch=1, size=1024,
            )  # fmt: skip
            yield rate_of(
                f"single sends, SDK, {count} threads",
                [sample],
                f"1 KiB; p50 {sample.p50_ms:.2f} ms",
            )
        for count in CONNECTIONS:
            sample = bench.load(
                "remoting.pull_raw", broker, remoting=broker.values["remoting"], topic=TOPIC,
                queue_id=0, size_max_bytes=1 << 20, connections=count,
            )  # fmt: skip
            yield _with_bytes(
                f"catch-up pull, raw, {count} connections", sample, "answers of 1 MiB"
            )


@row("body-sizes")
def body_sizes(bench: Bench) -> Iterator[Result]:
    """128 B to 256 KiB: batches of up to 256 KiB, single sends, and pulls of what the batches stored."""
    for size in BODY_SIZES:
        batch = max(1, min(_BATCH_MAX, _BATCH_BYTES // size))
        with bench.standalone() as broker:
            create_topics(broker, [TOPIC], 1)
            remoting = broker.values["remoting"]
            batches = bench.load(
                "remoting.send_batches", broker, remoting=remoting, topics=[TOPIC],
                batch=batch, size=size, queues=1, connections=2,
            )  # fmt: skip
            yield _with_bytes(
                f"batch send, {size:,} B x {batch}", batches, "prebuilt, remoting, 2 connections"
            )
            pulls = bench.load(
                "remoting.pull_raw",
                broker,
                remoting=remoting,
                topic=TOPIC,
                queue_id=0,
                size_max_bytes=4 << 20,
            )
            yield _with_bytes(f"catch-up pull, raw, {size:,} B", pulls, "one connection")
            single = bench.load(
                "sdk.send_from_coroutines", broker, namesrv=broker.values["namesrv"],
                topic=TOPIC, callers=64, size=size,
            )  # fmt: skip
            yield _with_bytes(f"single sends, SDK, 64 coroutines, {size:,} B", single, "remoting")


def _with_bytes(name: str, sample: Sample, how: str) -> Result:
    mib = median_of([sample], lambda s: s.bytes_rate / (1 << 20))
    return rate_of(name, [sample], f"{how}; {mib:,.0f} MiB/s")
