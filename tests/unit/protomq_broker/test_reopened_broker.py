"""A store that is to be opened again, on a disk that has no room for that at first; the process is made up."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from protomq_broker import reopened_broker
from protomq_broker.config import BrokerConfig
from protomq_broker.reopened_broker import ReopenedBroker


class _Process:
    """Attributes: made: all that there were; refusals: what opening the next ones raises; refused: one of them was raised."""

    made: ClassVar[list[_Process]] = []
    refusals: ClassVar[list[OSError]] = []
    refused: ClassVar[asyncio.Event]

    def __init__(self, config: BrokerConfig, *, on_truncated: Callable[[], None], start_time_ms: int) -> None:
        if self.made and self.refusals:
            self.refused.set()
            raise self.refusals.pop(0)
        self.counts_of: _Process | None = None  # from whose store counts go on
        self.broker = SimpleNamespace(config=config, store=SimpleNamespace(process=self, go_on_counting=self._go_on_counting))
        self.on_truncated = on_truncated
        self.start_time_ms = start_time_ms
        self.steps: list[str] = []
        self.made.append(self)

    def _go_on_counting(self, before: Any) -> None:
        self.counts_of = before.process

    def set_on_fatal(self, on_fatal: Callable[[BaseException], None]) -> None:
        self.on_fatal = on_fatal

    async def start(self) -> None:
        self.steps.append("start")

    async def stop(self, grace_s: float) -> None:
        self.steps.append("stop")


def refusal(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[_Process]:
    _Process.made.clear()
    _Process.refusals.clear()
    _Process.refused = asyncio.Event()
    monkeypatch.setattr(reopened_broker, "BrokerProcess", _Process)
    monkeypatch.setattr(reopened_broker, "ROOM_LOOK_S", 0)
    monkeypatch.setattr(reopened_broker, "with_ports_of", lambda process, config: config)
    return _Process.made


async def reopened(broker: ReopenedBroker) -> None:
    """Asks for it, and waits until it is over."""
    broker.process.on_truncated()  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    assert broker._reopening is not None
    await broker._reopening


def test_a_store_is_opened_again_as_soon_as_there_is_room(made: list[_Process]) -> None:
    fatal: list[BaseException] = []

    async def live() -> None:
        broker = ReopenedBroker(BrokerConfig(broker_name="b"))
        broker.set_on_fatal(fatal.append)
        await broker.start()
        _Process.refusals += [refusal(errno.ENOSPC), refusal(errno.EDQUOT)]
        await reopened(broker)
        await broker.stop(1)

    asyncio.run(live())
    assert not fatal
    assert [each.steps for each in made] == [["start", "stop"], ["start", "stop"]]
    assert [each.counts_of for each in made] == [None, made[0]]
    assert made[0].start_time_ms == made[1].start_time_ms > 0, "of the operating system's process"


def test_a_stop_while_there_is_no_room_stops_nothing_twice(made: list[_Process]) -> None:
    async def live() -> None:
        broker = ReopenedBroker(BrokerConfig(broker_name="b"))
        await broker.start()
        _Process.refusals += [refusal(errno.ENOSPC)] * 1_000
        refused = _Process.refused = asyncio.Event()
        broker.process.on_truncated()  # type: ignore[attr-defined]
        await refused.wait()
        await broker.stop(1)
        task: Any = broker._reopening
        await task

    asyncio.run(live())
    assert [each.steps for each in made] == [["start", "stop"]]


def test_any_other_error_ends_the_process(made: list[_Process]) -> None:
    fatal: list[BaseException] = []

    async def live() -> None:
        broker = ReopenedBroker(BrokerConfig(broker_name="b"))
        broker.set_on_fatal(fatal.append)
        await broker.start()
        _Process.refusals += [refusal(errno.EIO)]
        await reopened(broker)

    asyncio.run(live())
    assert [getattr(each, "errno", None) for each in fatal] == [errno.EIO]
    assert [each.steps for each in made] == [["start", "stop"]]
