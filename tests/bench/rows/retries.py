"""What a message that fails costs the broker, in plain sends."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Final

from tests.bench.bench import Bench, Result, create_topics, rate_of, row, spread
from tests.bench.measure import Sample, median_of, run_load
from tests.bench.rows.pull import BATCH, fill
from tests.bench.rows.single_send import TOPIC as SINGLE_TOPIC
from tests.bench.rows.single_send import from_coroutines

TOPIC: Final = "Failing"
QUEUES: Final = 16
MEMBERS: Final = 4
DELAY_S: Final = 1.0
CASES: Final = {256: 80_000, 32: 80_000, 1: 2_000}
"""Messages a call: messages in all. So many that what the broker does while it waits for their delay hardly counts."""
PUSHED: Final = 80_000
PUSH_DELAY_S: Final = 5.0
"""Longer than the listeners need for all: none of them gets a message twice."""
FILLED: Final = 20 * QUEUES * BATCH
"""As many batches in each queue, so that each member finds its part."""
PLAIN_SENDS_MAX: Final = 3.0


@row("retries")
def retries(bench: Bench) -> Iterator[Result]:
    """Poll, send-back and delivery of messages that fail, beside single sends of 64 coroutines: broker CPU per message."""
    groups = count()
    with bench.standalone() as broker:
        create_topics(broker, [TOPIC, SINGLE_TOPIC], QUEUES)
        fill(broker, TOPIC, QUEUES, FILLED)

        def failing(at_once: int) -> Sample:
            return run_load(
                "retries.send_back", namesrv=broker.values["namesrv"], remoting=broker.values["remoting"], topic=TOPIC,
                group=f"group{next(groups)}", members=MEMBERS, messages=CASES[at_once], count=at_once, delay_s=DELAY_S,
                server_pids=broker.pids,
            )  # fmt: skip

        def pushed() -> Sample:
            return run_load(
                "retries.fail_all", namesrv=broker.values["namesrv"], remoting=broker.values["remoting"], topic=TOPIC,
                group=f"group{next(groups)}", messages=PUSHED, delay_s=PUSH_DELAY_S, server_pids=broker.pids,
            )  # fmt: skip

        samples = bench.compare(
            {"plain": lambda: from_coroutines(bench, broker, 64), "push": pushed}
            | {str(at_once): (lambda at_once=at_once: failing(at_once)) for at_once in CASES}
        )
    plain_us = median_of(samples["plain"], lambda sample: sample.server_us)
    plain = f"broker CPU; a plain send: {plain_us:.2f} us, one message a call from 64 coroutines"
    how = f"1 KiB, {QUEUES} queues; a push consumer whose listener returns Retry, and delivery after {PUSH_DELAY_S:.0f} s"
    yield rate_of("failed messages of a push consumer", samples["push"], f"{how}; {spread(samples['push'])}")
    yield Result(
        "a failed message of a push consumer / a plain send",
        median_of(samples["push"], lambda sample: sample.server_us) / plain_us, "x", "less", plain, floor=PLAIN_SENDS_MAX,
    )  # fmt: skip
    how = f"1 KiB, {QUEUES} queues, {MEMBERS} members; poll, send-back, and delivery after {DELAY_S:.0f} s"
    for at_once in CASES:
        some = samples[str(at_once)]
        yield rate_of(f"failed messages, {at_once} a call", some, f"{how}; {spread(some)}")
        yield Result(
            f"a failed message, {at_once} a call / a plain send",
            median_of(some, lambda sample: sample.server_us) / plain_us, "x", "less", plain,
            floor=PLAIN_SENDS_MAX if at_once > 1 else None,
        )  # fmt: skip
