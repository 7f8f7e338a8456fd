"""Sends, pulls and starts against RocketMQ: equal durability, message size, queues and callers, windows interleaved."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Final

from tests.bench.bench import Bench, Result, create_topics
from tests.bench.measure import Sample, run_load
from tests.bench.peers.pair import PeerRow, latency_versus, running_pair, versus
from tests.bench.peers.rocketmq import QUEUES, TOPIC, RocketMQ
from tests.bench.process import Server
from tests.bench.rows.latency import RATE, THREADS, receipt
from tests.bench.rows.pull import fill
from tests.bench.rows.start import started

_IDLE_S: Final = 5.0


def batches(bench: Bench) -> Iterator[Result]:
    """Batches of 256 and of 16, 1 KiB."""
    # Each comparison has brokers of its own. On the store of the one before, to which ours wrote seven times as much as theirs, the page
    # cache would have to take memory that the machine has not used yet: writing to that costs several times as much.

    def prebuilt(broker: Server) -> Sample:
        return bench.load(
            "remoting.send_batches", broker, remoting=broker.values["remoting"],
            topics=[TOPIC], batch=256, size=1024, queues=QUEUES, connections=4,
        )  # fmt: skip

    def sdk(batch: int, threads: int, broker: Server) -> Sample:
        return bench.load(
            "sdk.send_from_threads", broker, namesrv=broker.values["namesrv"],
            topic=TOPIC, threads=threads, batch=batch, size=1024,
        )  # fmt: skip

    for name, batch, callers, send, floor in (
        ("batch 256, prebuilt", 256, 4, prebuilt, 2.5),
        ("batch 256, SDK", 256, 4, partial(sdk, 256, 4), 1.3),
        ("batch 16, SDK", 16, 8, partial(sdk, 16, 8), 1.3),
    ):
        with (
            running_pair(bench) as pair,
            pair.theirs.driver("send", threads=callers, batch=batch, size=1024) as driver,
        ):
            ours, theirs = pair.against_driver(partial(send, pair.ours), driver)
        how = f"1 KiB x {batch}, {callers} callers each, 16 queues, new stores"
        yield from versus(name, ours, theirs, floor, how)


def callers(bench: Bench) -> Iterator[Result]:
    """Single sends of 1 KiB from 64 coroutines, 64 and 256 threads."""
    with running_pair(bench) as pair:
        broker = pair.ours

        def coroutines() -> Sample:
            return bench.load(
                "sdk.send_from_coroutines", broker, namesrv=broker.values["namesrv"],
                topic=TOPIC, callers=64, size=1024,
            )  # fmt: skip

        def threads(count: int) -> Sample:
            return bench.load(
                "sdk.send_from_threads", broker, namesrv=broker.values["namesrv"],
                topic=TOPIC, threads=count, batch=1, size=1024,
            )  # fmt: skip

        with pair.theirs.driver("send", threads=64, size=1024) as driver:
            how = "1 KiB, one message a call, waiting for its answer"
            ours, theirs = pair.against_driver(coroutines, driver)
            yield from versus("64 coroutines against 64 threads", ours, theirs, 3.5, how)
            ours, theirs = pair.against_driver(partial(threads, 64), driver)
            yield from versus("64 threads", ours, theirs, 1.8, how)
        with pair.theirs.driver("send", threads=256, size=1024) as driver:
            ours, theirs = pair.against_driver(partial(threads, 256), driver)
            yield from versus("256 threads", ours, theirs, 1.2, how)
        with pair.theirs.driver("send", threads=1, size=1024) as driver:
            ours, theirs = pair.against_driver(partial(threads, 1), driver)
    yield from latency_versus("one caller, p50", ours, theirs, 0.6, "1 KiB", lambda s: s.p50_ms)


def consume(bench: Bench) -> Iterator[Result]:
    """Catching up: PullConsumer against a tuned push consumer."""
    messages = bench.extent.consume_messages
    with running_pair(bench) as pair:
        pair.our_turn(lambda: fill(pair.ours, TOPIC, QUEUES, messages))
        pair.their_turn(lambda: pair.theirs.run("fill", limit=messages, size=1024))
        # Its consumer needs some seconds to get going: what it has to read is more.
        total = 3 * messages
        pair.their_turn(lambda: pair.theirs.run("fill", limit=total - messages, size=1024))
        ours, theirs = pair.interleave(
            lambda: run_load(
                "sdk.consume", namesrv=pair.ours.values["namesrv"], topic=TOPIC,
                messages=messages, server_pids=pair.ours.pids,
            ),
            lambda: pair.theirs.run("push", total=total, size=1024, consumebatch=256, pullbatch=256),
        )  # fmt: skip
    how = "1 KiB, 16 queues; theirs: consume and pull batches of 256, the broker may answer 4 MiB, its median half second"
    yield from versus("catch-up consume", ours, theirs, 1.7, how)


def sync_flush(bench: Bench) -> Iterator[Result]:
    """SYNC_FLUSH with 64 callers."""
    with (
        running_pair(bench, {"store_sync_flush": "true"}, {"flushDiskType": "SYNC_FLUSH"}) as pair,
        pair.theirs.driver("send", threads=64, size=1024) as driver,
    ):
        broker = pair.ours
        ours, theirs = pair.against_driver(
            lambda: bench.load(
                "sdk.send_from_threads", broker, namesrv=broker.values["namesrv"],
                topic=TOPIC, threads=64, batch=1, size=1024,
            ),
            driver,
        )  # fmt: skip
    yield from versus("SYNC_FLUSH, 64 threads", ours, theirs, 1.5, "1 KiB")


def send_to_receipt(bench: Bench) -> Iterator[Result]:
    """1,000 messages a second."""
    with (
        running_pair(bench) as pair,
        pair.theirs.driver("e2e", threads=THREADS, rate=RATE, size=1024) as driver,
    ):
        ours, theirs = pair.against_driver(lambda: receipt(bench, pair.ours, TOPIC), driver)
    how = f"{RATE:,} msg/s from {THREADS} threads, 1 KiB, from the intended time of the send"
    yield from latency_versus("send to receipt, p50", ours, theirs, 0.5, how, lambda s: s.p50_ms)
    yield from latency_versus("send to receipt, p99", ours, theirs, 1.0, how, lambda s: s.p99_ms)


def start(bench: Bench) -> Iterator[Result]:
    """Starting empty, idle memory, and restarting after kill -9 with the same amount stored."""
    messages = bench.extent.stored_bytes // 1150
    ours_start, theirs_start, ours_restart, theirs_restart = [], [], [], []
    data = bench.new_folder("restart")
    with RocketMQ(pretouch=False) as theirs:
        server, seconds = started(data)
        ours_start.append(seconds)
        theirs_start.append(theirs.first_accepted_send())
        try:
            time.sleep(_IDLE_S)
            idle = server.resident_mib(), theirs.resident_mib()
            theirs.create_topic()
            create_topics(server, [TOPIC], QUEUES)
            fill(server, TOPIC, QUEUES, messages)
            theirs.run("fill", limit=messages, size=1024)
            for _ in range(bench.extent.rounds):
                server.kill()
                server, seconds = started(data)
                ours_restart.append(seconds)
                theirs.kill_broker()
                theirs_restart.append(theirs.first_accepted_send())
        finally:
            server.kill()
            shutil.rmtree(data, ignore_errors=True)
    stored = f"{bench.extent.stored_bytes / (1 << 30):.1f} GiB stored; without AlwaysPreTouch"
    for name, mine, peers, floor, how in (
        ("start until the first accepted send", ours_start, theirs_start, 0.4, "empty; its name server runs already, ours starts too"),
        ("restart after kill -9", ours_restart, theirs_restart, 0.3, stored),
    ):  # fmt: skip
        a, b = statistics.median(mine), statistics.median(peers)
        yield Result(f"{name}: protomq", a, "s", "less", how)
        yield Result(f"{name}: RocketMQ", b, "s", "less", how)
        yield Result(f"{name}: protomq / RocketMQ", a / b, "x", "less", how, floor)
    yield Result("idle memory: protomq", idle[0], "MiB", "less", "name server and broker", 120)
    yield Result(
        "idle memory: RocketMQ", idle[1], "MiB", "less", "name server and broker, 4 GiB heap"
    )


PEER_ROWS: Final[dict[str, PeerRow]] = {
    "batches": batches,
    "callers": callers,
    "consume": consume,
    "sync-flush": sync_flush,
    "send-to-receipt": send_to_receipt,
    "start": start,
}
