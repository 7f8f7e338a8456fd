"""Consumer groups: how soon members share, how soon the rest takes over from one that is killed, and what a thousand members cost."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack

from tests.bench.bench import Bench, Result, create_topics, row
from tests.bench.loads.groups import send_to_each
from tests.bench.measure import Helper

TOPIC = "Shared"
QUEUES = 1_024
MEMBERS = 64
PUSH_QUEUES = 16
PROCESSES = 4
"""Each with a part of the members: threads of one interpreter would wait for each other."""
MANY = 1_000
_SETTLE_S = 2.0
_REST_S = 45.0
"""Three calls of each member."""
_PUSH_REST_S = 120.0
"""As long as the longest holds: each pull is made again once."""
_PATIENCE_S = 120.0


@row("groups")
def groups(bench: Bench) -> Iterator[Result]:
    """Members of one group at one broker: of the SDK, and a thousand raw ones."""
    yield from _shares(bench)
    yield from _many(bench)
    for size in (1, 10):
        yield from _pushing(bench, size)


def _shares(bench: Bench) -> Iterator[Result]:
    joins, takes = [], []
    for _ in range(bench.extent.rounds):
        with bench.standalone() as broker, ExitStack() as stack:
            create_topics(broker, [TOPIC], QUEUES)
            namesrv = broker.values["namesrv"]
            helpers = [
                stack.enter_context(Helper("groups.sdk", namesrv=namesrv, topic=TOPIC)) for _ in range(PROCESSES)
            ]
            for helper in helpers:
                helper.ask(f"join {MEMBERS // PROCESSES - (helper is helpers[0])}")
            _wait_shared(helpers, MEMBERS - 1)
            last = stack.enter_context(Helper("groups.sdk", namesrv=namesrv, topic=TOPIC))
            joined_s = last.ask("join 1")["now_s"]
            joins.append(_wait_shared([*helpers, last], MEMBERS) - joined_s)
            answer = last.ask("shares")
            (queue_ids,) = answer["queues"]
            killed_s = time.monotonic()
            os.kill(answer["pid"], signal.SIGKILL)
            send_to_each(namesrv, TOPIC, queue_ids, "after")
            wanted = {f"after {queue_id}" for queue_id in queue_ids}
            takes.append(max(_wait_got(helpers, wanted)) - killed_s)
    how = f"{MEMBERS} PullConsumers in {PROCESSES + 1} processes, {QUEUES:,} queues of one broker; median of {len(joins)}"
    yield Result(
        f"{MEMBERS} members, {QUEUES:,} queues, all shared out", statistics.median(joins), "s", "less",
        f"{how}; from the start of the last member, with its connections, until no queue moves any more, complete and disjoint", 1,
    )  # fmt: skip
    yield Result(
        "a killed member's queues are consumed again", statistics.median(takes), "s", "less",
        f"{how}; from kill -9 until another member has a message of the last of its queues", 2,
    )  # fmt: skip


def _wait_shared(helpers: list[Helper], count: int) -> float:
    """Waits until all queues have one owner each, and for a moment more; when the last one moved."""
    ends_s = time.monotonic() + _PATIENCE_S
    stable_s, sizes = 0.0, list[int]()
    while time.monotonic() < ends_s:
        answers = [helper.ask("shares") for helper in helpers]
        shares = [queue_ids for answer in answers for queue_ids in answer["queues"]]
        changed_s = max(answer["changed_s"] for answer in answers)
        sizes = sorted(map(len, shares))
        is_complete = sorted(queue_id for queue_ids in shares for queue_id in queue_ids) == [*range(QUEUES)]
        if is_complete and len(sizes) == count and sizes[-1] - sizes[0] <= 1:
            if changed_s == stable_s and time.monotonic() > changed_s + _SETTLE_S:
                return changed_s
            stable_s = changed_s
        time.sleep(0.1)
    raise RuntimeError(f"{count} members have not shared {QUEUES} queues within {_PATIENCE_S:.0f} s: {sizes}")


def _wait_got(helpers: list[Helper], bodies: set[str]) -> list[float]:
    ends_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < ends_s:
        got: dict[str, float] = {}
        for helper in helpers:
            got |= helper.ask("got")["got"]
        if bodies <= got.keys():
            return [got[body] for body in bodies]
        time.sleep(0.1)
    raise RuntimeError("messages of the killed member's queues did not come")


def _many(bench: Bench) -> Iterator[Result]:
    with bench.standalone() as broker:
        create_topics(broker, [TOPIC], QUEUES)
        with Helper("groups.raw", remoting=broker.values["remoting"], topic=TOPIC) as helper:
            time.sleep(_SETTLE_S)
            before_mib = broker.resident_mib()
            helper.ask(f"connect {MANY}")
            cpu_s = broker.cpu_seconds()
            joined = helper.ask("join")
            join_cpu_s = broker.cpu_seconds() - cpu_s
            helper.ask("rest 20")  # The last of what they were told.
            added_mib = broker.resident_mib() - before_mib
            cpu_s = broker.cpu_seconds()
            helper.ask(f"rest {_REST_S}")
            percent = (broker.cpu_seconds() - cpu_s) / _REST_S * 100
    how = f"{MANY:,} members of one group, a connection each, with 2 topics"
    yield Result(f"{MANY:,} members, memory", added_mib, "MiB", "less", f"{how}; broker, after the join", 50)
    yield Result(f"{MANY:,} members at rest, CPU", percent, "% of a core", "less", f"{how}, which call again each 15 s, without pulls", 3)
    yield Result(
        f"{MANY:,} members join at once", joined["seconds"], "s", "less",
        f"{how}; until each knows all others: {joined['mib']:,.0f} MiB of answers, {join_cpu_s:.1f} s of broker CPU, "
        f"{joined['refused']} calls refused as overload",
    )  # fmt: skip


def _pushing(bench: Bench, size: int) -> Iterator[Result]:
    """A thousand push consumers in groups of `size`, to which nothing comes."""
    with bench.standalone() as broker, ExitStack() as stack:
        create_topics(broker, [TOPIC], PUSH_QUEUES)
        time.sleep(_SETTLE_S)
        before_mib = broker.resident_mib()
        helpers = [
            stack.enter_context(Helper("groups.push", namesrv=broker.values["namesrv"], topic=TOPIC, number=number, size=size))
            for number in range(PROCESSES)
        ]
        for helper in helpers:
            helper.ask(f"start {MANY // PROCESSES}")
        helpers[0].ask(f"rest {_SETTLE_S + 20}")
        added_mib = broker.resident_mib() - before_mib
        cpu_s = broker.cpu_seconds()
        helpers[0].ask(f"rest {_PUSH_REST_S}")
        percent = (broker.cpu_seconds() - cpu_s) / _PUSH_REST_S * 100
    how = (
        f"AsyncPushConsumers in {PROCESSES} processes, {MANY // size:,} groups of {size}, a topic of {PUSH_QUEUES} queues to which nothing "
        "comes; standalone, so with its name server"
    )
    yield Result(f"{MANY:,} push consumers in groups of {size}, memory", added_mib, "MiB", "less", how, 50)
    yield Result(f"{MANY:,} push consumers in groups of {size} at rest, CPU", percent, "% of a core", "less", how, 3)
