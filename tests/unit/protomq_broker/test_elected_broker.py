"""What an elected broker does when its store did not close well, and when its event loop closes under it. No store, no ports."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from protomq_broker.config import EtcdConfig
from protomq_broker.elected_broker import ElectedBroker
from protomq_broker.store.opening import make_folders
from protomq_broker.tail_file import TailFile
from protomq_broker.testing.simdisk import SimDisk
from protomq_ha.leadership_values import StopLeading

ROOT = "/store"


def bare() -> ElectedBroker:
    """Nothing of it is open."""
    return ElectedBroker.__new__(ElectedBroker)


@pytest.mark.parametrize("is_closed_clean", [True, False])
def test_a_stop_is_clean_only_if_the_store_closed_clean(is_closed_clean: bool) -> None:
    disk = SimDisk()
    make_folders(disk, ROOT)
    first = TailFile(disk, ROOT, "one")
    first.open(syncs=False)
    first.settle()

    async def stop(grace_s: float) -> None:
        pass

    async def run() -> None:
        broker = bare()
        store = SimpleNamespace(is_closed_clean=is_closed_clean)
        broker._todo, broker._tail = asyncio.Queue(), first
        broker._worker = asyncio.create_task(asyncio.sleep(0))
        broker._settings = EtcdConfig()
        broker.leadership = SimpleNamespace(close=lambda: None, hand_over=lambda timeout_s: False)  # type: ignore[assignment]
        broker.process = SimpleNamespace(stop=stop, broker=SimpleNamespace(store=store))  # type: ignore[assignment]
        await broker.stop(0)

    asyncio.run(run())
    assert TailFile(disk, ROOT, "two").open(syncs=False) is not is_closed_clean


def test_a_loop_that_closes_ends_no_thread_that_has_something_for_it() -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("Event loop is closed")

    broker = bare()
    broker._todo = asyncio.Queue()
    broker._loop = SimpleNamespace(is_closed=lambda: False, call_soon_threadsafe=refuse)  # type: ignore[assignment]
    broker._do_soon(StopLeading())
    assert broker._todo.empty()
