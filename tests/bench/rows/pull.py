"""Catching up: raw bytes against a bare sendfile loop, and messages through the SDK."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.bench.bench import Bench, Result, create_topics, rate_of, ratio_of, row, spread
from tests.bench.measure import Sample, median_of, run_load
from tests.bench.process import Server

TOPIC = "CatchUp"
QUEUES = 4
BATCH = 256


def fill(broker: Server, topic: str, queues: int, messages: int, size: int = 1024) -> Sample:
    """Messages of one size, with keys, spread over the queues in batches."""
    return run_load(
        "remoting.send_batches", remoting=broker.values["remoting"], topics=[topic], batch=BATCH, size=size,
        queues=queues, connections=1, warm_up=0, seconds=600, limit=messages, with_keys=True,
        server_pids=broker.pids,
    )  # fmt: skip


def log_file(broker: Server) -> Path:
    """The first segment of the broker's log."""
    return min((Path(broker.values["data"]) / "commitlog").iterdir())


@row("pull-raw")
def raw(bench: Bench) -> Iterator[Result]:
    """Pulls of up to 4 MiB from one queue; the limit is sendfile from the same segment in answers of the same size."""
    # Less than a segment, so that both read the same file.
    messages = 800_000
    with bench.standalone() as broker:
        create_topics(broker, [TOPIC], 1)
        fill(broker, TOPIC, 1, messages)

        def ours() -> Sample:
            return bench.load(
                "remoting.pull_raw", broker, remoting=broker.values["remoting"],
                topic=TOPIC, queue_id=0, size_max_bytes=4 << 20,
            )  # fmt: skip

        answer_bytes = int(ours().extra["answer_bytes"])
        with bench.limit("sendfile", str(log_file(broker))) as bare:
            samples = bench.compare(
                {
                    "ours": ours,
                    "bare": lambda: bench.load(
                        "remoting.read_sendfile_limit", bare,
                        address=bare.values["remoting"], answer_bytes=answer_bytes,
                    ),
                }
            )  # fmt: skip
    for name, some in (("catch-up pull, raw", "ours"), ("bare sendfile loop", "bare")):
        yield Result(
            name, median_of(samples[some], lambda s: s.bytes_rate / 1e9), "GB/s", "more",
            f"answers of {answer_bytes / (1 << 20):.2f} MiB, one connection",
            broker_us=median_of(samples["ours"], lambda s: s.server_us) if some == "ours" else None,
            client_us=median_of(samples["ours"], lambda s: s.client_us) if some == "ours" else None,
        )  # fmt: skip
    yield ratio_of(
        "catch-up pull, raw / bare sendfile", samples["ours"], samples["bare"], 0.8,
        "the same file, sizes and client", lambda s: s.bytes_rate,
    )  # fmt: skip


@row("consume")
def consume(bench: Bench) -> Iterator[Result]:
    """PullConsumer.poll, every message touched."""
    messages = bench.extent.consume_messages
    for size, count in ((1024, messages), (128, 2 * messages)):
        with bench.standalone() as broker:
            create_topics(broker, [TOPIC], QUEUES)
            fill(broker, TOPIC, QUEUES, count, size)
            samples = bench.repeat(
                partial(
                    run_load, "sdk.consume", namesrv=broker.values["namesrv"], topic=TOPIC,
                    messages=count, server_pids=broker.pids,
                )
            )  # fmt: skip
        yield rate_of(
            f"catch-up consume, SDK, {size} B", samples,
            f"{QUEUES} queues; body, key, offset touched, CRC checked; {spread(samples)}",
        )  # fmt: skip
