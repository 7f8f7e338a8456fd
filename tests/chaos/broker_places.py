"""Where the brokers of a load are, and what is done to them meanwhile: one that is killed and comes back, or three that elect a master."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from random import Random
from typing import Final, Protocol

from protomq import Admin, SendResult, SendStatus
from protomq.errors import ProtomqError
from protomq.testing import Broker
from tests.support.elected_brokers import ElectedCluster, elected_cluster
from tests.support.ha_brokers import NAME, HaBroker
from tests.support.waiting import PATIENCE_S, wait_for

from .stepped_clock import LogTimeRange, SteppedClock

CLOCK_MIN_S: Final = 3_600.0
CLOCK_MAX_S: Final = 9 * 3_600.0
LATER_S: Final = 12 * 3_600.0
"""Longer than any clock is set ahead: a broker that believed one would deliver what is due then."""
APART_S: Final = 0.1
"""How far log times of several brokers may be apart whose wall clocks are right."""
MEMBERS: Final = 3
CHANGES: Final = ("kills", "switches", "stops")
ELECTION: Final = {"lease_ttl_ms": 2_000, "renew_interval_ms": 500}


def is_acknowledged(result: SendResult) -> bool:
    """Whether the message is on all copies that count."""
    return result.status in (SendStatus.SEND_OK, SendStatus.SLAVE_NOT_AVAILABLE)


class Place(Protocol):
    """The brokers. Attribute: namesrv."""

    namesrv: str

    def hurt(self) -> str:
        """Does them harm; returns the kind, when they are served again."""
        ...

    def early_max_s(self) -> float:
        """How much too early a message may come by now."""
        ...

    def end_hurt(self) -> None:
        """Nothing more happens: clocks are right."""
        ...


OpenPlace = Callable[[int, Path, Mapping[str, str]], AbstractContextManager[Place]]
"""Begins one for a seed, in a folder, with variables for its brokers."""


class _Clocks:
    """Of the brokers of a place. They are set by hours, ahead and back in turn."""

    def __init__(self, rng: Random, folder: Path, count: int, *, are_set: bool) -> None:
        self._rng, self._are_set = rng, are_set
        self.all = [SteppedClock(folder / f"clock-{number}") for number in range(count)]
        self._range = LogTimeRange(self.all)

    def step(self) -> None:
        """Each clock is another way off than before, or right."""
        if not self._are_set:
            return
        self._range.look()
        for clock in self.all:
            signs = [sign for sign in (-1, 0, 1) if not sign or sign * clock.offset_s <= 0]
            clock.set(self._rng.choice(signs) * self._rng.uniform(CLOCK_MIN_S, CLOCK_MAX_S))

    def spread_s(self) -> float:
        """How far log time may have been off, ahead and back together."""
        return self._range.look() if self._are_set else 0.0

    def set_right(self) -> None:
        self._range.look()
        for clock in self.all:
            clock.set(0)


class Standalone:
    """One broker, which is killed with SIGKILL."""

    def __init__(self, broker: Broker, clocks: _Clocks) -> None:
        self._broker, self._clocks = broker, clocks
        self.namesrv = broker.namesrv

    def hurt(self) -> str:
        self._clocks.step()
        self._broker.kill()
        self._broker.restart()
        return "kills"

    def early_max_s(self) -> float:
        return self._clocks.spread_s()

    def end_hurt(self) -> None:
        self._clocks.set_right()


@contextmanager
def _standalone(seed: int, folder: Path, environment: Mapping[str, str], *, sets_clocks: bool) -> Iterator[Place]:
    clocks = _Clocks(Random(f"{seed} clocks"), folder, 1, are_set=sets_clocks)
    with Broker(data_dir=folder, environment={**environment, **clocks.all[0].environment} if sets_clocks else environment) as broker:
        yield Standalone(broker, clocks)


def standalone(seed: int, folder: Path, environment: Mapping[str, str]) -> AbstractContextManager[Place]:
    """One broker, whose clock is right."""
    return _standalone(seed, folder, environment, sets_clocks=False)


def standalone_with_clock(seed: int, folder: Path, environment: Mapping[str, str]) -> AbstractContextManager[Place]:
    """One broker, whose wall clock is set again and again."""
    return _standalone(seed, folder, environment, sets_clocks=True)


class ElectedName:
    """Three brokers that elect their master: it is killed with SIGKILL, stopped for longer than its lease, or gives the lead away.

    Each of that comes once before any comes again.
    """

    def __init__(self, cluster: ElectedCluster, rng: Random, clocks: _Clocks | None = None) -> None:
        self.cluster, self._rng, self._clocks = cluster, rng, clocks
        self.namesrv = cluster.namesrv
        self._left: list[str] = []
        self._master: HaBroker
        self._epoch = 0

    def hurt(self) -> str:
        """The lead changes."""
        if self._clocks is not None:
            self._clocks.step()
        change = self.begin()
        self.end(change)
        # Until then the old master ends its callers' connections, and they try again.
        self.cluster.wait_leading(MEMBERS)
        return change

    def _is_new(self) -> bool:
        """Whether another one leads, and takes sends."""
        return max(self.cluster.led_epochs()) > self._epoch

    def begin(self) -> str:
        """The master is killed or stopped, or nothing happens yet."""
        self._master = self.cluster.wait_leading(MEMBERS)
        self._epoch = max(self.cluster.led_epochs())
        if not self._left:
            self._left = self._rng.sample(CHANGES, len(CHANGES))
        change = self._left.pop()
        if change == "kills":
            self._master.kill()
        elif change == "stops":
            self._master.process.send_signal(signal.SIGSTOP)
        return change

    def end(self, change: str) -> None:
        """Another one leads; the old master is back, a while after that if it was stopped."""
        if change == "switches":
            wait_for(self._switch, PATIENCE_S)
            # The old one says that it leads for a moment longer.
            wait_for(self._is_new, PATIENCE_S)
            return
        try:
            wait_for(self._is_new, PATIENCE_S)
            if change == "stops":
                time.sleep(self._rng.uniform(0, 2))
        finally:
            if change == "kills":
                self._master.start()
            else:
                self._master.process.send_signal(signal.SIGCONT)

    def _switch(self) -> bool:
        try:
            with Admin(namesrv=self.namesrv) as admin:
                admin.switch_master(NAME)
        except ProtomqError:  # a slave is not in sync yet
            return False
        return True

    def early_max_s(self) -> float:
        return APART_S + (self._clocks.spread_s() if self._clocks is not None else 0.0)

    def end_hurt(self) -> None:
        if self._clocks is not None:
            self._clocks.set_right()


@contextmanager
def _elected(seed: int, folder: Path, environment: Mapping[str, str], *, sets_clocks: bool) -> Iterator[Place]:
    rng = Random(f"{seed} changes")
    clocks = _Clocks(rng, folder, MEMBERS, are_set=sets_clocks)
    environments = [{**environment, **(clock.environment if sets_clocks else {})} for clock in clocks.all]
    with elected_cluster(folder, count=MEMBERS, election=ELECTION, environments=environments) as cluster:
        try:
            yield ElectedName(cluster, rng, clocks)
        except BaseException:
            print(cluster.last_lines(), file=sys.stderr)
            raise


def elected(seed: int, folder: Path, environment: Mapping[str, str]) -> AbstractContextManager[Place]:
    """Three brokers that elect their master."""
    return _elected(seed, folder, environment, sets_clocks=False)


def elected_with_clocks(seed: int, folder: Path, environment: Mapping[str, str]) -> AbstractContextManager[Place]:
    """The same, and their wall clocks are set, each in its own way."""
    return _elected(seed, folder, environment, sets_clocks=True)
