"""Ten thousand held pulls: what they cost in memory, how fast all are woken, and whether sends go on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

from tests.bench.bench import Bench, Result, create_topics, rate_of, ratio_of, row
from tests.bench.measure import Helper, Sample

TOPIC = "Held"
OTHER_TOPIC = "Beside"
QUEUES = 16
HOLDS = 10_000
CONNECTIONS = 100
_SETTLE_S = 1.0


@row("holds")
def holds(bench: Bench) -> Iterator[Result]:
    """Held pulls on the queues of one topic, while another process sends to another topic."""
    with bench.standalone() as broker:
        create_topics(broker, [TOPIC, OTHER_TOPIC], QUEUES)

        def send() -> Sample:
            return bench.load(
                "sdk.send_from_coroutines", broker,
                namesrv=broker.values["namesrv"], topic=OTHER_TOPIC, callers=64, size=1024,
            )  # fmt: skip

        send()  # Its memory is not that of the holds.
        with Helper(
            "holds.serve", remoting=broker.values["remoting"],
            topic=TOPIC, queues=QUEUES, connections=CONNECTIONS,
        ) as helper:  # fmt: skip
            time.sleep(_SETTLE_S)
            before = broker.resident_mib()
            helper.ask(f"hold {HOLDS}")
            time.sleep(_SETTLE_S)
            added = broker.resident_mib() - before
            answers = [helper.ask("wake") for _ in range(3)]
            wakes = [answer["seconds"] for answer in answers]

            def send_beside_holds() -> Sample:
                helper.ask(f"hold {HOLDS}")
                try:
                    return send()
                finally:
                    helper.ask("drop")

            helper.ask("drop")
            samples = bench.compare({"without": send, "with": send_beside_holds})
    how = f"{HOLDS:,} pulls over {CONNECTIONS} connections on {QUEUES} queues"
    refused = answers[-1]["refused"]
    yield Result("10,000 held pulls, memory", added, "MiB", "less", how, 150)
    yield Result(
        "10,000 held pulls, all woken", statistics.median(wakes), "s", "less",
        f"{how}, one message to each queue, until the last answer has arrived; {refused} pulls refused as overload", 1,
    )  # fmt: skip
    yield rate_of("sends beside 10,000 held pulls", samples["with"], "64 coroutines, SDK, 1 KiB")
    yield ratio_of(
        "sends beside 10,000 held pulls / without", samples["with"], samples["without"], 0.8, how
    )
