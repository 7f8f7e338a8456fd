"""Ten thousand topics: batch sends over all of them against one topic, and starting with them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench.bench import Bench, Result, create_topics, rate_of, ratio_of, row, start_standalone
from tests.bench.loads.remoting import first_send
from tests.bench.measure import Sample, run_load
from tests.bench.process import Server

TOPICS = 10_000
QUEUES = 1


@row("topics")
def topics(bench: Bench) -> Iterator[Result]:
    """Batches of 256 x 1 KiB, each to the next topic."""
    names = [f"Topic-{number:05d}" for number in range(TOPICS)]
    data = bench.new_folder("topics")
    broker = start_standalone(data)
    try:
        created = create_topics(broker, names, QUEUES)

        def send(some: list[str]) -> Sample:
            return bench.load(
                "remoting.send_batches", broker, remoting=broker.values["remoting"],
                topics=some, batch=256, size=1024, queues=QUEUES, connections=2,
            )  # fmt: skip

        # One message each, and time for it: what is measured is sending to topics, not making the files of their queues.
        run_load(
            "remoting.send_batches", remoting=broker.values["remoting"], topics=names, batch=1, size=100,
            queues=QUEUES, connections=1, warm_up=0, seconds=120, limit=TOPICS, server_pids=broker.pids,
        )  # fmt: skip
        broker.wait_at_rest()
        samples = bench.compare({"one": lambda: send(names[:1]), "all": lambda: send(names)})
        yield rate_of(
            "batch send over 10,000 topics", samples["all"], "1 KiB x 256, prebuilt, remoting"
        )
        yield ratio_of(
            "batch send, 10,000 topics / one topic", samples["all"], samples["one"], 0.85,
            f"1 KiB x 256, prebuilt, remoting; made at {created.rate:,.0f} topics/s",
        )  # fmt: skip
        resident = broker.resident_mib()
        broker.stop()
        broker, seconds = _start(data, names[0])
        yield Result(
            "start with 10,000 topics, until a send is accepted", seconds, "s", "less",
            f"after a clean stop; {resident:,.0f} MiB resident before it", 5,
        )  # fmt: skip
    finally:
        broker.kill()
        shutil.rmtree(data, ignore_errors=True)


def _start(data: Path, topic: str) -> tuple[Server, float]:
    begin = time.perf_counter()
    server = start_standalone(data)
    return server, first_send(server.values["remoting"], topic, begin + 60) - begin
