"""Delayed messages: what a delay costs the send, and how fast due messages leave while plain sends go on."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from tests.bench.bench import Bench, Result, create_topics, rate_of, ratio_of, row, spread
from tests.bench.measure import Sample, interleave
from tests.bench.process import Server
from tests.bench.rows.batch_send import on_new_broker
from tests.bench.rows.single_send import from_coroutines

TOPIC, DELAYED_TOPIC = "Single", "Delays"
QUEUES = 16
CALLERS = 64
SECONDS = 2.0
ROUNDS_MIN = 3
DUE_COUNT = 1_000_000
PRELOAD_S = 6.0
"""Time for the delayed sends, before they are due."""
RAMP_S = 0.3
"""Time from the due time until all runs at its rate."""


@row("delays")
def delays(bench: Bench) -> Iterator[Result]:
    """Batches with a delay of level 1 beside plain ones; then due messages beside plain sends, and each alone."""
    short = dataclasses.replace(
        bench,
        extent=dataclasses.replace(
            bench.extent, seconds=SECONDS, rounds=max(bench.extent.rounds, ROUNDS_MIN)
        ),
    )
    yield from _sends(short)
    yield from _due(short)


def _sends(bench: Bench) -> Iterator[Result]:
    def load(level: int, broker: Server) -> Sample:
        return bench.load(
            "remoting.send_batches", broker, remoting=broker.values["remoting"], topics=[DELAYED_TOPIC],
            batch=256, size=1024, queues=QUEUES, connections=2, delay_level=level,
        )  # fmt: skip

    samples = _interleave(
        bench,
        {
            name: partial(on_new_broker, bench, partial(load, level), DELAYED_TOPIC)
            for name, level in (("plain", 0), ("delayed", 1))
        },
    )
    how = "1 KiB x 256, prebuilt, remoting, 2 connections"
    yield rate_of(
        "batch send, delay level 1",
        samples["delayed"],
        f"{how}; deliveries begin after 1 s; {spread(samples['delayed'])}",
    )
    yield ratio_of(
        "batch send, delay level 1 / without", samples["delayed"], samples["plain"], 0.6, how
    )


def _due(bench: Bench) -> Iterator[Result]:
    plain: dict[str, list[Sample]] = {"beside": []}

    def beside() -> Sample:
        delivered, sent = _deliver(bench, with_sends=True)
        assert sent is not None
        plain["beside"].append(sent)
        return delivered

    def alone(broker: Server) -> Sample:
        return from_coroutines(bench, broker, CALLERS)

    samples = _interleave(
        bench,
        {
            "sends": partial(on_new_broker, bench, alone, TOPIC),
            "due": lambda: _deliver(bench, with_sends=False)[0],
            "both": beside,
        },
    )
    how = f"1 KiB, {DUE_COUNT:,} messages due at one time, {QUEUES} queues"
    yield rate_of(
        "due messages delivered, nothing else", samples["due"], f"{how}; {spread(samples['due'])}"
    )
    yield rate_of(
        "due messages delivered beside plain sends", samples["both"],
        f"{how}; {CALLERS} coroutines send, SDK, 1 KiB; {spread(samples['both'])}", floor=100_000,
    )  # fmt: skip
    yield ratio_of(
        "plain sends beside due messages / alone", plain["beside"], samples["sends"], 0.6,
        f"{CALLERS} coroutines, SDK, 1 KiB; {spread(plain['beside'])}",
    )  # fmt: skip


def _deliver(bench: Bench, *, with_sends: bool) -> tuple[Sample, Sample | None]:
    """Due messages on a new broker; the plain sends have the same window."""
    with bench.standalone() as broker:
        create_topics(broker, [DELAYED_TOPIC, TOPIC], QUEUES)
        due_s = time.time() + PRELOAD_S
        sent: list[Sample] = []

        def send() -> None:
            time.sleep(max(due_s - time.time() - 1.0, 0))
            warm_up = due_s + RAMP_S - time.time()
            sent.append(
                from_coroutines(
                    dataclasses.replace(
                        bench, extent=dataclasses.replace(bench.extent, warm_up_s=warm_up)
                    ),
                    broker,
                    CALLERS,
                )
            )

        sender = threading.Thread(target=send)
        if with_sends:
            sender.start()
        delivered = bench.load(
            "delays.deliver", broker, remoting=broker.values["remoting"], topic=DELAYED_TOPIC, batch=256, size=1024,
            queues=QUEUES, count=DUE_COUNT, due_s=due_s, warm_up=RAMP_S,
        )  # fmt: skip
        if with_sends:
            sender.join()
        return delivered, sent[0] if sent else None


def _interleave(bench: Bench, runs: dict[str, Callable[[], Sample]]) -> dict[str, list[Sample]]:
    return interleave(runs, bench.extent.rounds)
