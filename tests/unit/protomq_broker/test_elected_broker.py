"""What an elected broker does when its store fails or did not close well, and when its event loop closes. No store, no ports."""

from __future__ import annotations

import asyncio
import errno
from types import SimpleNamespace
from typing import Any

import pytest

from protomq_broker import elected_broker
from protomq_broker.config import BrokerConfig, EtcdConfig
from protomq_broker.elected_broker import CHANGE_GRACE_S, CannotLeadError, ElectedBroker, LogFailed
from protomq_broker.store.start.settings import make_folders
from protomq_broker.tail_file import TailFile
from protomq_broker.testing.simdisk import SimDisk
from protomq_ha.leadership_values import Role, StopLeading

ROOT = "/store"


def bare() -> ElectedBroker:
    """Nothing of it is open."""
    return ElectedBroker.__new__(ElectedBroker)


@pytest.mark.parametrize("is_closed_clean", [True, False])
def test_a_stop_is_clean_only_if_the_store_closed_clean(is_closed_clean: bool) -> None:
    disk = SimDisk()
    make_folders(disk, ROOT)
    first = TailFile(disk, ROOT, "one")
    first.open(syncs=False, is_lost=False)
    first.settle()

    async def stop(grace_s: float) -> None:
        pass

    async def run() -> None:
        broker = bare()
        store = SimpleNamespace(is_closed_clean=is_closed_clean)
        broker._todo, broker._tail, broker._watcher = asyncio.Queue(), first, None
        broker._worker = asyncio.create_task(asyncio.sleep(0))
        broker._settings = EtcdConfig()
        broker.leadership = SimpleNamespace(close=lambda: None, hand_over=lambda timeout_s: False)  # type: ignore[assignment]
        broker.process = SimpleNamespace(stop=stop, broker=SimpleNamespace(store=store))  # type: ignore[assignment]
        await broker.stop(0)

    asyncio.run(run())
    assert TailFile(disk, ROOT, "two").open(syncs=False, is_lost=False) is not is_closed_clean


class Failing:
    """A broker whose log has failed. Attribute: done, what was done about it, in order."""

    def __init__(self, role: Role, *, opens_after: int = 0, loses_its_end: bool = False) -> None:
        self.done: list[str] = []
        self._broker = broker = bare()
        broker._config = BrokerConfig(broker_name="b")
        broker._settings, broker._is_stopping = EtcdConfig(), False
        broker._tail = SimpleNamespace(doubt=lambda: self.done.append("doubts its end"))  # type: ignore[assignment]
        broker.leadership = SimpleNamespace(  # type: ignore[assignment]
            role=role,
            tail_may_be_lost=lambda: self.done.append("leaves the set"),
            hand_over=self._hand_over,
        )
        broker.process = self._process("the log failed")
        self._refusals, self._loses_its_end = opens_after, loses_its_end
        broker._make = self._make  # type: ignore[method-assign, assignment]

    def _hand_over(self, timeout_s: float) -> bool:
        self.done.append("hands over")
        return True

    def _process(self, failure: str, *, has_lost_its_end: bool = False) -> Any:
        async def start() -> None:
            self.done.append("starts")

        async def stop(grace_s: float) -> None:
            self.done.append("stops")

        return SimpleNamespace(
            broker=SimpleNamespace(
                store=SimpleNamespace(log_failure=failure, has_lost_its_end=has_lost_its_end),
                stop_following=lambda: self.done.append("follows nobody"),
                go_on_following=lambda: self.done.append("follows"),
            ),
            start=start,
            stop=stop,
        )

    def _make(self, *_: object) -> Any:
        if self._refusals:
            self._refusals -= 1
            self.done.append("cannot open")
            raise OSError(errno.ENOSPC, "full")
        return self._process("", has_lost_its_end=self._loses_its_end)

    def run(self) -> list[str]:
        asyncio.run(self._broker._do(LogFailed(self._broker.process)))
        return self.done


def test_a_slave_whose_log_has_failed_leaves_the_set_and_opens_its_store_until_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elected_broker, "FAILURE_LOOK_S", 0.001)
    assert Failing(Role.FOLLOWING, opens_after=2).run() == [
        "follows nobody", "leaves the set", "doubts its end", "stops", "cannot open", "cannot open", "starts", "follows",
    ]  # fmt: skip


def test_a_store_that_opens_again_with_damage_at_its_end_leaves_the_set() -> None:
    failing = Failing(Role.FOLLOWING, loses_its_end=True)
    asyncio.run(failing._broker._open_again())
    assert failing.done == ["stops", "leaves the set", "doubts its end", "starts"]


def test_a_store_that_is_to_lead_and_opens_with_damage_at_its_end_does_not_lead() -> None:
    with pytest.raises(CannotLeadError):
        asyncio.run(Failing(Role.OPENING, loses_its_end=True)._broker._lead(2))


def test_a_master_whose_log_has_failed_hands_over() -> None:
    assert Failing(Role.LEADING).run() == ["hands over"]


@pytest.mark.parametrize(("hands_over", "grace_s"), [(True, CHANGE_GRACE_S), (False, 9.0)])
def test_who_has_handed_over_lets_nobody_wait_for_what_it_cannot_confirm_any_more(hands_over: bool, grace_s: float) -> None:
    graces: list[float] = []

    async def stop(grace_s: float) -> None:
        graces.append(grace_s)

    async def run() -> None:
        broker = bare()
        broker._todo, broker._watcher = asyncio.Queue(), None
        broker._tail = SimpleNamespace(close=lambda is_clean: None)  # type: ignore[assignment]
        broker._config, broker._settings = BrokerConfig(broker_name="b"), EtcdConfig()
        broker._worker = asyncio.create_task(asyncio.sleep(0))
        broker.leadership = SimpleNamespace(close=lambda: None, hand_over=lambda timeout_s: hands_over)  # type: ignore[assignment]
        store = SimpleNamespace(is_closed_clean=True)
        broker.process = SimpleNamespace(stop=stop, broker=SimpleNamespace(store=store))  # type: ignore[assignment]
        await broker.stop(9.0)

    asyncio.run(run())
    assert graces == [grace_s]


def test_a_loop_that_closes_ends_no_thread_that_has_something_for_it() -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("Event loop is closed")

    broker = bare()
    broker._todo = asyncio.Queue()
    broker._loop = SimpleNamespace(is_closed=lambda: False, call_soon_threadsafe=refuse)  # type: ignore[assignment]
    broker._do_soon(StopLeading())
    assert broker._todo.empty()
