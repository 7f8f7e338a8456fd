"""The rows against RocketMQ: equal durability, message size, queues and callers, windows interleaved."""

from __future__ import annotations

import shutil
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from tests.bench.bench import Bench, Result, create_topics, rate_of, ratio_of, spread
from tests.bench.measure import Sample, interleave, median_of, run_load
from tests.bench.peers.rocketmq import QUEUES, TOPIC, Driver, RocketMQ
from tests.bench.process import Server
from tests.bench.rows.latency import RATE, THREADS, receipt
from tests.bench.rows.pull import fill
from tests.bench.rows.start import started

_JVM_WARM_UP_S: Final = 5.0
"""The client's and the broker's JIT have most of what they will get; longer in a full run."""
_JVM_WARM_UP_FULL_S: Final = 25.0
_IDLE_S: Final = 5.0

PeerRow = Callable[[Bench], Iterator[Result]]


@dataclass(frozen=True, slots=True)
class _Pair:
    """Both sides running."""

    bench: Bench
    ours: Server
    theirs: RocketMQ

    def our_turn(self, run: Callable[[], Sample]) -> Sample:
        """Ours, with theirs stopped."""
        self.theirs.pause()
        try:
            return run()
        finally:
            self.theirs.resume()

    def their_turn(self, run: Callable[[], Sample]) -> Sample:
        """Theirs, with ours stopped."""
        self.ours.send_signal(signal.SIGSTOP)
        try:
            return run()
        finally:
            self.ours.send_signal(signal.SIGCONT)

    def interleave(
        self, ours: Callable[[], Sample], theirs: Callable[[], Sample]
    ) -> tuple[list[Sample], list[Sample]]:
        """Ours, theirs, ours, theirs."""
        samples = interleave(
            {
                "ours": partial(self.our_turn, ours),
                "theirs": partial(self.their_turn, theirs),
            },
            self.bench.extent.rounds,
        )
        return samples["ours"], samples["theirs"]

    def against_driver(
        self, ours: Callable[[], Sample], driver: Driver
    ) -> tuple[list[Sample], list[Sample]]:
        """The same with a Java client that stays warm."""
        extent = self.bench.extent
        warm_up = _JVM_WARM_UP_FULL_S if extent.name == "full" else _JVM_WARM_UP_S

        def theirs(warm_up_s: float, seconds: float) -> Sample:
            driver.resume()
            try:
                return driver.window(warm_up_s, seconds)
            finally:
                driver.pause()

        self.their_turn(partial(theirs, warm_up, 0.5))
        return self.interleave(ours, partial(theirs, 1.0, extent.seconds))


@contextmanager
def _pair(bench: Bench, *, sync_flush: bool = False) -> Iterator[_Pair]:
    ours_settings = {"store_sync_flush": "true"} if sync_flush else {}
    theirs_settings = {"flushDiskType": "SYNC_FLUSH"} if sync_flush else {}
    with ExitStack() as stack:
        theirs = stack.enter_context(RocketMQ(theirs_settings))
        theirs.start_broker()
        ours = stack.enter_context(bench.standalone(**ours_settings))
        create_topics(ours, [TOPIC], QUEUES)
        yield _Pair(bench, ours, theirs)


def _versus(
    name: str, ours: list[Sample], theirs: list[Sample], floor: float, how: str
) -> Iterator[Result]:
    yield rate_of(f"{name}: protomq", ours, f"{how}; {spread(ours)}")
    yield rate_of(f"{name}: RocketMQ", theirs, spread(theirs))
    yield ratio_of(f"{name}: protomq / RocketMQ", ours, theirs, floor, how)


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
            _pair(bench) as pair,
            pair.theirs.driver("send", threads=callers, batch=batch, size=1024) as driver,
        ):
            ours, theirs = pair.against_driver(partial(send, pair.ours), driver)
        how = f"1 KiB x {batch}, {callers} callers each, 16 queues, new stores"
        yield from _versus(name, ours, theirs, floor, how)


def callers(bench: Bench) -> Iterator[Result]:
    """Single sends of 1 KiB from 64 coroutines, 64 and 256 threads."""
    with _pair(bench) as pair:
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
            yield from _versus("64 coroutines against 64 threads", ours, theirs, 3.5, how)
            ours, theirs = pair.against_driver(partial(threads, 64), driver)
            yield from _versus("64 threads", ours, theirs, 1.8, how)
        with pair.theirs.driver("send", threads=256, size=1024) as driver:
            ours, theirs = pair.against_driver(partial(threads, 256), driver)
            yield from _versus("256 threads", ours, theirs, 1.2, how)
        with pair.theirs.driver("send", threads=1, size=1024) as driver:
            ours, theirs = pair.against_driver(partial(threads, 1), driver)
    yield from _latency("one caller, p50", ours, theirs, 0.6, "1 KiB", lambda s: s.p50_ms)


def _latency(
    name: str, ours: list[Sample], theirs: list[Sample], floor: float, how: str,
    value: Callable[[Sample], float | None],
) -> Iterator[Result]:  # fmt: skip
    mine, peers = median_of(ours, value), median_of(theirs, value)
    yield Result(f"{name}: protomq", mine, "ms", "less", how)
    yield Result(f"{name}: RocketMQ", peers, "ms", "less", how)
    yield Result(f"{name}: protomq / RocketMQ", mine / peers, "x", "less", how, floor)


def consume(bench: Bench) -> Iterator[Result]:
    """Catching up: PullConsumer against a tuned push consumer."""
    messages = bench.extent.consume_messages
    with _pair(bench) as pair:
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
    yield from _versus("catch-up consume", ours, theirs, 1.7, how)


def sync_flush(bench: Bench) -> Iterator[Result]:
    """SYNC_FLUSH with 64 callers."""
    with (
        _pair(bench, sync_flush=True) as pair,
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
    yield from _versus("SYNC_FLUSH, 64 threads", ours, theirs, 1.5, "1 KiB")


def send_to_receipt(bench: Bench) -> Iterator[Result]:
    """1,000 messages a second."""
    with (
        _pair(bench) as pair,
        pair.theirs.driver("e2e", threads=THREADS, rate=RATE, size=1024) as driver,
    ):
        ours, theirs = pair.against_driver(lambda: receipt(bench, pair.ours, TOPIC), driver)
    how = f"{RATE:,} msg/s from {THREADS} threads, 1 KiB, from the intended time of the send"
    yield from _latency("send to receipt, p50", ours, theirs, 0.5, how, lambda s: s.p50_ms)
    yield from _latency("send to receipt, p99", ours, theirs, 1.0, how, lambda s: s.p99_ms)


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
