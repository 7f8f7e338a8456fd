"""Pops with their acknowledgements, beside a pull consumer of the same messages."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Final

from tests.bench.bench import Bench, Result, create_topics, rate_of, ratio_of, row, spread
from tests.bench.measure import Sample, run_load
from tests.bench.rows.pull import fill

TOPIC: Final = "Pops"
QUEUES: Final = 16
MEMBERS: Final = 4
CASES: Final = {
    "32 a call, one ack": (32, False, 4),
    "32 a call, an ack for each": (32, True, 20),
    "256 a call, one ack": (256, False, 1),
}
"""(messages a call, whether each is acknowledged alone, part of the messages that is popped)"""


@row("pop")
def pop(bench: Bench) -> Iterator[Result]:
    """Members of a group, 1 KiB; each turn is another group, so that all messages are there again."""
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

        def popped(case: str) -> Sample:
            at_once, acks_alone, part = CASES[case]
            return run_load(
                "pop.pop_and_ack", namesrv=broker.values["namesrv"], topic=TOPIC, group=f"group{next(groups)}",
                messages=messages // part, count=at_once, members=MEMBERS, acks_alone=acks_alone, server_pids=broker.pids,
            )  # fmt: skip

        samples = bench.compare(
            {"pull": pulled} | {case: (lambda case=case: popped(case)) for case in CASES}
        )
    how = f"1 KiB, {QUEUES} queues"
    yield rate_of("pull consumer beside pops", samples["pull"], f"{how}; {spread(samples['pull'])}")
    for case in CASES:
        yield rate_of(f"pop + ack, {case}", samples[case], f"{how}, {MEMBERS} members; {spread(samples[case])}")
    yield ratio_of(
        "pop + ack, 256 a call / pull consumer", samples["256 a call, one ack"], samples["pull"], 0.3, how
    )
