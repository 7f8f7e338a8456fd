"""Many pending timers: what memory they take, and how late others are that fall due beside them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench.bench import Bench, Result, create_topics, row
from tests.bench.process import Server

TOPIC, DUE_TOPIC = "Timers", "Due"
QUEUES = 16
BODY_BYTES = 64
BATCH = 256
FILL_COUNT_MAX = 1_000_000
"""Of one load, which has a minute."""
DELAY_MIN_S, DELAY_MAX_S = 86_400.0, 30 * 86_400.0
DUE_RATE = 20_000
DUE_SECONDS = 5.0
LEAD_S = 10.0
"""Time for the sends of what falls due."""
REST_TIMEOUT_S = 120.0
MEMORY_MB_MAX = 200.0


@row("timers")
def timers(bench: Bench) -> Iterator[Result]:
    """`--timers` pending ones, a million by default: the broker's memory; 20,000 a second fall due beside them: how late, any early."""
    count = bench.extent.timers
    due_count = round(DUE_RATE * DUE_SECONDS)
    with bench.standalone(delayed_count_max=str(count + FILL_COUNT_MAX + due_count)) as broker:
        create_topics(broker, [TOPIC, DUE_TOPIC], QUEUES)
        _fill(bench, broker, 10 * BATCH)  # What a broker needs for its first messages is not of the timers.
        broker.wait_at_rest(REST_TIMEOUT_S)
        idle_mb, idle_own_mb = _resident_mb(broker)
        began_s = time.perf_counter()
        _fill(bench, broker, count)
        filled_s = time.perf_counter() - began_s
        broker.wait_at_rest(REST_TIMEOUT_S)
        full_mb, full_own_mb = _resident_mb(broker)
        how = f"{BODY_BYTES} B x {BATCH}, prebuilt, remoting, due in 1 to 30 days"
        disk_mb = _size_mb(broker)
        yield Result(
            f"{count:,} pending timers, memory", full_mb, "MB", "less",
            f"{how}; resident, name server in the same process; {full_own_mb:,.0f} MB without mapped files; {disk_mb:,.0f} MB in timer/",
            MEMORY_MB_MAX,
        )  # fmt: skip
        yield Result(
            f"{count:,} pending timers, memory above an idle broker", full_mb - idle_mb, "MB", "less",
            f"idle {idle_mb:,.0f} MB; {full_own_mb - idle_own_mb:,.0f} MB without mapped files",
        )  # fmt: skip
        yield Result(f"{count:,} pending timers, taken in", count / filled_s, "msg/s", "more", f"{how}, one connection; {filled_s:.0f} s")
        sample = bench.load(
            "timers.due", broker, namesrv=broker.values["namesrv"], topic=DUE_TOPIC, pending_topic=TOPIC, rate=DUE_RATE,
            due_s=time.time() + LEAD_S, warm_up=0.0, seconds=DUE_SECONDS,
        )  # fmt: skip
        how = f"{DUE_RATE:,} a second fall due for {DUE_SECONDS:.0f} s beside {count:,} pending; until a PullConsumer has them"
        assert sample.p50_ms is not None
        assert sample.p99_ms is not None
        assert sample.max_ms is not None
        yield Result("due messages late, p50", sample.p50_ms, "ms", "less", how)
        yield Result("due messages late, p99", sample.p99_ms, "ms", "less", f"{how}; at most {sample.max_ms:,.0f} ms", 1_000)
        yield Result(
            "due messages that came early", sample.extra["early"], "", "less",
            f"of {sample.messages:,}: by the consumer's clock, or by the store time that the broker gave them", 0,
        )  # fmt: skip


def _fill(bench: Bench, broker: Server, count: int) -> None:
    for start in range(0, count, FILL_COUNT_MAX):
        some = min(FILL_COUNT_MAX, count - start)
        bench.load(
            "timers.fill", broker, remoting=broker.values["remoting"], topic=TOPIC, batch=BATCH, size=BODY_BYTES, queues=QUEUES,
            count=some, delay_min_s=DELAY_MIN_S, delay_max_s=DELAY_MAX_S,
        )  # fmt: skip
        if count > FILL_COUNT_MAX:
            print(f"{start + some:,} of {count:,} timers are pending", file=sys.stderr, flush=True)


def _resident_mb(broker: Server) -> tuple[float, float]:
    """Of all processes: everything; what is no mapped file."""
    lines = [line.split() for pid in broker.pids for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    sizes = {name: sum(int(words[1]) for words in lines if words and words[0] == name) for name in ("VmRSS:", "RssAnon:")}
    return sizes["VmRSS:"] * 1024 / 1e6, sizes["RssAnon:"] * 1024 / 1e6


def _size_mb(broker: Server) -> float:
    """Of the timer's files."""
    folder = broker.log.parent / "store" / "timer"
    return sum(entry.stat().st_size for entry in os.scandir(folder)) / 1e6
