"""A kill, power cuts and failures at every I/O of what brokers do for delays, transactions, pops, and messages that fail.

For one seed, each of four worlds goes through a script that has each of its operations: sends with a delay and recalls; half messages,
decisions and questions; pops, acknowledgements, other invisible times, deaths and resets; send-backs, retries, dead letters and replays;
and checkpoints and retention under all of them. The script is run again and again: the process ends at the first I/O of the disk, at the
second, … until a run comes to its end without it. After it a broker starts with what a kill, or a power cut, has left, goes on with the
script, and is judged by the rules of its world (`store_delays.py`, `store_transactions.py`, `store_pops.py`, `store_retries.py`). In one
more round each I/O fails instead (EIO, no space, a short write, an fsync that loses its pages), and the broker ends after that step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple
from unittest import mock

from protomq_broker.store.errors import StoreError
from protomq_broker.store.timer import timer_runs
from protomq_broker.testing.simdisk import Fault, SimDisk, SimulatedCrash
from protomq_runtime.errors import ServiceError
from tests.support.ended_process import DiskFailedError

from .checker import Violation
from .store_delays import DelayRun
from .store_pops import PopWorld
from .store_retries import RetriesWorld
from .store_transactions import TransactionsWorld

IO_MAX: Final = 5_000
FAULTS: Final = (Fault.EIO, Fault.ENOSPC, Fault.SHORT, Fault.SYNC_LOST)
"""Each in its turn, at one I/O after another. The broker is ended after the step in which its disk fails."""
ENDS: Final = ("kill", "power", "power, nothing left")
"""How a process ends: the page cache stays; what was not synced goes in part; all of it goes."""
LONGEST_HOLD_MS: Final = 130_000


class Life(NamedTuple):
    """A world and its script.

    Attributes:
        disk: the one that it has now.
        restart: after an end of that kind.
        restart_count: how often it has started again, by itself or so.
        check: what is wrong after a step.
        end: what is wrong once all is drained.
    """

    disk: Callable[[], SimDisk]
    steps: Sequence[Callable[[], None]]
    restart: Callable[[str], None]
    restart_count: Callable[[], int]
    check: Callable[[], list[Violation]]
    end: Callable[[], list[Violation]]


def _delays(seed: int, ends: str) -> Life:
    run = DelayRun(seed, Counter())
    steps = (
        run.send, run.send, run.flush, run.recall, run.send, run.recall, run.deliver, run.checkpoint, run.deliver, run.send, run.recall,
        run.retain, run.deliver, run.send, run.flush, run.recall, run.deliver, run.deliver,
    )  # fmt: skip

    def end() -> list[Violation]:
        run.end()
        return run.found

    return Life(
        lambda: run.world.disk, steps, run.restart, lambda: run.counts["kills"] + run.counts["power cuts"], lambda: run.found, end
    )


def _transactions(seed: int, ends: str) -> Life:
    run = TransactionsWorld(seed)
    steps = (
        run.send, run.send, run.decide, run.pass_time, run.decide, run.deliver, run.checkpoint, run.send, run.fill, run.pass_time,
        run.fill, run.retention, run.decide, run.pass_time, run.deliver, run.decide,
    )  # fmt: skip
    return Life(lambda: run.world.disk, steps, run.restart, lambda: run.restart_count, run.check, run.check)


def _pops(seed: int, ends: str) -> Life:
    run = PopWorld(seed, ends=ends)

    def expire() -> None:
        run.pass_time(LONGEST_HOLD_MS)

    def end() -> list[Violation]:
        run.drain()
        return run.found

    steps = (
        run.send, run.pop, run.ack, run.pop, run.change, run.rest, run.send, run.pop, run.ack, expire, run.pop, expire, run.pop, expire,
        run.pop, expire, run.pop, run.retain, run.ack, run.reset, run.pop, run.ack, run.change, run.rest,
    )  # fmt: skip
    return Life(lambda: run.disk, steps, run.restart, lambda: run.did["restarts"], lambda: run.found, end)


def _send_backs(seed: int, ends: str) -> Life:
    run = RetriesWorld(seed)

    def check() -> list[Violation]:
        run.look()
        run.check()
        return run.found

    steps = (
        run.send, run.fail, run.deliver, run.send_again, run.fail, run.deliver, run.fail, run.checkpoint, run.deliver, run.fail,
        run.send_again, run.deliver, run.fail, run.replay, run.deliver, run.fail, run.replay,
    )  # fmt: skip
    return Life(lambda: run.world.disk, steps, run.restart, lambda: run.restart_count, check, run.end)


LIVES: Final[dict[str, Callable[[int, str], Life]]] = {
    "delays": _delays,
    "transactions": _transactions,
    "pops": _pops,
    "send-backs": _send_backs,
}


def check_crashes(
    seed: int, fired: Counter[str] | None = None, *, stride: int = 1, names: Iterable[str] = LIVES
) -> list[Violation]:
    """What is wrong in any run of the worlds with these names.

    `stride`: only each so-many-th I/O. `fired`: counts the ends by the step that each was in.
    """
    fired = Counter() if fired is None else fired
    with mock.patch.object(timer_runs, "BLOCK_ROWS", 4):
        for name in names:
            for how in (*ENDS, ""):
                for number in range(1 + seed % stride, IO_MAX, stride):
                    turn = number // stride + seed
                    fault = Fault.CRASH if how else FAULTS[turn % len(FAULTS)]
                    ends = how or ENDS[turn % len(ENDS)]
                    met, found = _live(LIVES[name](seed, ends), number, ends, fault)
                    if found:
                        case = f"{name}, I/O {number}, {fault.value}, {ends}"
                        return [item._replace(message=f"{case}: {item.message}") for item in found]
                    if not met:
                        break
                    fired[f"{name}: {how or fault.value} in {met}"] += 1
                else:
                    return [Violation("crash", f"{name}: the script does not come to its end")]
    return []


def _live(life: Life, number: int, ends: str, fault: Fault = Fault.CRASH) -> tuple[str, list[Violation]]:
    """Goes through a script in which an I/O fails, or its process ends there.

    Returns the step that this was in ("": it was over before), and what is wrong.
    """
    disk, before = life.disk(), life.restart_count()
    first = disk.operations + number
    disk.fail_at(number, fault)
    met = ""
    for step in life.steps:
        try:
            step()
        except (SimulatedCrash, StoreError, OSError, ServiceError, DiskFailedError):
            life.restart(ends)
        if not met and (disk.operations >= first or life.restart_count() > before):
            met = step.__name__
            if life.restart_count() == before:
                life.restart(ends)  # Its answer was out when it ended, or nobody was told that its disk had failed.
        found = life.check()
        if found:
            return met, found
    life.disk().plan = None
    return met, life.end()
