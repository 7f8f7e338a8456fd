"""Transactions with commit, each caller waiting for both answers."""

from __future__ import annotations

from collections.abc import Iterator

from tests.bench.bench import Bench, Result, create_topics, rate_of, row, spread
from tests.bench.measure import Sample, median_of
from tests.bench.process import Server
from tests.bench.rows.single_send import from_coroutines, from_threads

TOPIC = "Single"
QUEUES = 16
CALLERS = 32


@row("transactions")
def transactions(bench: Bench) -> Iterator[Result]:
    """32 callers, threads and coroutines, beside plain sends of the same."""
    with bench.standalone() as broker:
        create_topics(broker, [TOPIC], QUEUES)
        samples = bench.compare(
            {
                "coroutines": lambda: commit(bench, broker, "coroutines", callers=CALLERS),
                "threads": lambda: commit(bench, broker, "threads", threads=CALLERS),
                "plain, coroutines": lambda: from_coroutines(bench, broker, CALLERS),
                "plain, threads": lambda: from_threads(bench, broker, CALLERS),
            }
        )
    for kind in ("coroutines", "threads"):
        some = samples[kind]
        p50, p99 = median_of(some, lambda s: s.p50_ms), median_of(some, lambda s: s.p99_ms)
        yield rate_of(
            f"transactions with commit, SDK, {CALLERS} {kind}",
            some,
            f"1 KiB, both answers awaited; p50 {p50:.2f} ms, p99 {p99:.2f} ms; {spread(some)}",
        )
        plain = samples[f"plain, {kind}"]
        yield rate_of(f"plain sends beside them, SDK, {CALLERS} {kind}", plain, f"1 KiB; {spread(plain)}")


def commit(bench: Bench, broker: Server, kind: str, *, topic: str = TOPIC, **parameters: int) -> Sample:
    """Callers that share one producer."""
    return bench.load(
        f"transactions.commit_from_{kind}", broker, namesrv=broker.values["namesrv"], topic=topic,
        size=1024, **parameters,
    )  # fmt: skip
