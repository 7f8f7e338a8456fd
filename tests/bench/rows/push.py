"""Push consumers with listeners that count, beside a pull consumer of the same messages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Final

from tests.bench.bench import Bench, Result, create_topics, rate_of, ratio_of, row, spread
from tests.bench.measure import Sample, run_load
from tests.bench.rows.pull import fill

TOPIC: Final = "Pushes"
QUEUES: Final = 16
CASES: Final[dict[str, tuple[int | None, bool]]] = {
    "one message a call": (None, False),
    "256 a call": (256, False),
    "orderly": (None, True),
}
"""(messages a call, whether each queue is in order)"""
COMPUTED: Final = 100_000
WORKERS: Final = (1, 4)
LISTENER_MS: Final = 1.0


@row("push")
def push(bench: Bench) -> Iterator[Result]:
    """One process with 20 threads, 1 KiB; each turn is another group, so that all messages are there again."""
    messages = bench.extent.consume_messages
    groups = count()
    with bench.standalone() as broker:
        create_topics(broker, [TOPIC], QUEUES)
        fill(broker, TOPIC, QUEUES, messages)

        def pulled() -> Sample:
            return run_load(
                "sdk.consume", namesrv=broker.values["namesrv"], topic=TOPIC, messages=messages,
                server_pids=broker.pids,
            )  # fmt: skip

        def pushed(case: str) -> Sample:
            batch_size, orderly = CASES[case]
            return run_load(
                "push.listen", namesrv=broker.values["namesrv"], topic=TOPIC, group=f"group{next(groups)}",
                messages=messages, batch_size=batch_size, orderly=orderly, server_pids=broker.pids,
            )  # fmt: skip

        samples = bench.compare({"pull": pulled} | {case: partial(pushed, case) for case in CASES})
    how = f"1 KiB, {QUEUES} queues"
    yield rate_of("pull consumer beside push consumers", samples["pull"], f"{how}; {spread(samples['pull'])}")
    for case in CASES:
        yield rate_of(f"push consumer, {case}", samples[case], f"{how}, 20 threads, listeners count; {spread(samples[case])}")
    yield ratio_of(
        "push consumer, orderly / concurrently", samples["orderly"], samples["one message a call"], 0.6, how
    )


@row("workers")
def workers(bench: Bench) -> Iterator[Result]:
    """`protomq worker` with one process and with four, whose listener computes: threads of one process share a core."""
    groups = count()
    with bench.standalone() as broker:
        create_topics(broker, [TOPIC], QUEUES)
        fill(broker, TOPIC, QUEUES, COMPUTED)

        def computed(processes: int) -> Sample:
            return bench.load(
                "workers.compute", broker, namesrv=broker.values["namesrv"], topic=TOPIC, group=f"group{next(groups)}",
                processes=processes, messages=COMPUTED, listener_ms=LISTENER_MS,
            )  # fmt: skip

        samples = bench.compare({str(processes): partial(computed, processes) for processes in WORKERS})
    how = f"1 KiB, {QUEUES} queues, 20 threads a process, a listener that computes for {LISTENER_MS:g} ms"
    one, many = (samples[str(processes)] for processes in WORKERS)
    for processes, found in zip(WORKERS, (one, many), strict=True):
        yield rate_of(f"protomq worker, --processes {processes}", found, f"{how}; {spread(found)}")
    yield ratio_of(f"protomq worker, {WORKERS[1]} processes / {WORKERS[0]}", many, one, 1.8, f"{how}; two cores")
