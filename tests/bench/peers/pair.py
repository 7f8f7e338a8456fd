"""Both sides of a comparison, and what comes of it: windows interleaved, one side stopped while the other is measured."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from tests.bench.bench import Bench, Result, create_topics, rate_of, ratio_of, spread
from tests.bench.measure import Sample, interleave, median_of
from tests.bench.peers.rocketmq import QUEUES, TOPIC, Driver, RocketMQ
from tests.bench.process import Server

_JVM_WARM_UP_S: Final = 5.0
"""The client's and the broker's JIT have most of what they will get; longer in a full run."""
_JVM_WARM_UP_FULL_S: Final = 25.0

THEIRS: Final = "RocketMQ"

PeerRow = Callable[[Bench], Iterator[Result]]


@dataclass(frozen=True, slots=True)
class Pair:
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

    def take_turns(
        self, ours: Mapping[str, Callable[[], Sample]], theirs: Callable[[], Sample]
    ) -> dict[str, list[Sample]]:
        """Each of ours, then theirs, and so on; theirs under the key `THEIRS`."""
        runs = {name: partial(self.our_turn, run) for name, run in ours.items()}
        runs[THEIRS] = partial(self.their_turn, theirs)
        return interleave(runs, self.bench.extent.rounds)

    def interleave(
        self, ours: Callable[[], Sample], theirs: Callable[[], Sample]
    ) -> tuple[list[Sample], list[Sample]]:
        """Ours, theirs, ours, theirs."""
        samples = self.take_turns({"ours": ours}, theirs)
        return samples["ours"], samples[THEIRS]

    def against_driver(
        self, ours: Callable[[], Sample], driver: Driver
    ) -> tuple[list[Sample], list[Sample]]:
        """The same with a Java client that stays warm."""
        return self.interleave(ours, self.warmed_up(driver))

    def all_against_driver(
        self, ours: Mapping[str, Callable[[], Sample]], driver: Driver
    ) -> dict[str, list[Sample]]:
        """`take_turns` with a Java client that stays warm."""
        return self.take_turns(ours, self.warmed_up(driver))

    def warmed_up(self, driver: Driver) -> Callable[[], Sample]:
        """Warms a Java client up; what it returns measures one window of it, for a turn of theirs."""
        extent = self.bench.extent
        warm_up = _JVM_WARM_UP_FULL_S if extent.name == "full" else _JVM_WARM_UP_S

        def window(warm_up_s: float, seconds: float) -> Sample:
            driver.resume()
            try:
                return driver.window(warm_up_s, seconds)
            finally:
                driver.pause()

        def measured() -> Sample:
            sample = window(1.0, extent.seconds)
            if not sample.messages:
                raise RuntimeError(
                    f"the Java client did nothing in {sample.seconds:.1f} s; {sample.errors} calls failed"
                )
            return sample

        self.their_turn(partial(window, warm_up, 0.5))
        return measured


@contextmanager
def running_pair(
    bench: Bench,
    ours: Mapping[str, str] | None = None,
    theirs: Mapping[str, str] | None = None,
    *,
    proxy: bool = False,
) -> Iterator[Pair]:
    """Both sides with a topic of 16 queues on new stores. `ours`, `theirs`: settings; `proxy`: theirs has one."""
    with ExitStack() as stack:
        peer = stack.enter_context(RocketMQ(theirs, proxy=proxy))
        peer.start_broker()
        server = stack.enter_context(bench.standalone(**(ours or {})))
        create_topics(server, [TOPIC], QUEUES)
        yield Pair(bench, server, peer)


def versus(
    name: str, ours: list[Sample], theirs: list[Sample], floor: float | None, how: str
) -> Iterator[Result]:
    """Rates: ours, theirs, and the ratio of their medians."""
    yield rate_of(f"{name}: protomq", ours, f"{how}; {seen(ours)}")
    yield rate_of(f"{name}: RocketMQ", theirs, seen(theirs))
    yield ratio_of(f"{name}: protomq / RocketMQ", ours, theirs, floor, how)


def latency_versus(
    name: str, ours: list[Sample], theirs: list[Sample], floor: float | None, how: str,
    value: Callable[[Sample], float | None], floor_ms: float | None = None,
) -> Iterator[Result]:  # fmt: skip
    """Latencies: ours (at most `floor_ms`), theirs, and the ratio of their medians (at most `floor`)."""
    mine, peers = median_of(ours, value), median_of(theirs, value)
    yield Result(f"{name}: protomq", mine, "ms", "less", how, floor_ms)
    yield Result(f"{name}: RocketMQ", peers, "ms", "less", seen(theirs))
    yield Result(f"{name}: protomq / RocketMQ", mine / peers, "x", "less", how, floor)


def seen(samples: list[Sample]) -> str:
    """Least and most of the rates, and the calls that failed, for `how`."""
    errors = sum(sample.errors for sample in samples)
    return spread(samples) + (f"; {errors:,} calls failed" if errors else "")
