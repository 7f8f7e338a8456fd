"""Bugs for the process of a real broker: (patch, campaign, the rule that has to be broken), by name.

`planted_in_child/sitecustomize.py` enters a patch when the broker's Python starts. Only broker parts are imported here: each start pays.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest import mock

from protomq.wire.runs import offsets_in, runs_of
from protomq_broker import send_backs
from protomq_broker.pop_settling import PopSettler
from protomq_broker.pop_time import PopTime
from protomq_broker.store.state.acknowledged import Acknowledged
from protomq_broker.store.state.group_settings import plan_retry
from protomq_broker.store.state.popped_queue import OpenMessages
from protomq_broker.store.state.transactions import Decision, Ending, Transactions, Verdict
from protomq_broker.store.timer.log_time import LogClock
from protomq_broker.store.timer.pending import PendingTimers
from protomq_broker.system_writer import SystemWriter
from protomq_broker.transaction_endings import TransactionEndings


def delivers_early() -> Any:
    """Messages fall due five seconds before their time, for a delay or for a retry."""
    real = PendingTimers.due
    return mock.patch.object(PendingTimers, "due", lambda self, now_ms, count_max: real(self, now_ms + 5_000, count_max))


def believes_the_wall_clock() -> Any:
    """Log time is what the wall clock says."""
    return mock.patch.object(LogClock, "now_ms", lambda self, wall_ms, monotonic_ms: wall_ms)


def answers_recalls_that_it_does_not_append() -> Any:
    """A recall is answered as won, and nothing says so."""
    return mock.patch.object(SystemWriter, "append", lambda self, topic, bodies: self._store.appended_position)


def retries_once_more() -> Any:
    """The limit is taken for the number of deliveries that fail before the last one."""
    def plan(settings: Any, levels_ms: Any, failed_count: int, asked: Any = None) -> Any:
        return plan_retry(settings, levels_ms, max(failed_count - 1, 1), asked)

    return mock.patch.object(send_backs, "plan_retry", plan)


def commits_what_is_in_hand() -> Any:
    """A consumer commits behind messages that its listeners still have."""
    # Not with the broker parts above: a broker needs none of it.
    from protomq._pull_logic import PullState
    from protomq._push_steps import ListenedPulls

    real = PullState.to_commit

    def to_commit(self: Any, *, safe_only: bool) -> Any:
        for state in self._queues.values():
            state.safe_position = state.position
        return real(self, safe_only=True)

    return mock.patch.object(ListenedPulls, "to_commit", to_commit)


def commits_what_is_rolled_back() -> Any:
    """Each decision is appended as a commit."""
    real = TransactionEndings._append

    def append(self: TransactionEndings, halves: Any, endings: bytes) -> Any:
        return real(self, halves, bytes([Ending.COMMITTED]) * len(endings))

    return mock.patch.object(TransactionEndings, "_append", append)


def takes_the_other_decision() -> Any:
    """A transaction that has ended is answered as ended so, whatever is wanted."""
    real = Transactions.decide

    def decide(self: Transactions, key: Any, wanted: Ending) -> Decision:
        found = real(self, key, wanted)
        return found._replace(verdict=Verdict.REPEATED) if found.verdict is Verdict.CONTRADICTED else found

    return mock.patch.object(Transactions, "decide", decide)


def ends_holds_at_a_start() -> Any:
    """Pop time begins an hour ahead of what the log says: nobody has any message after a restart."""
    real = PopTime.__init__

    def begin(self: PopTime, clock: Any, floor_ms: int) -> None:
        real(self, clock, floor_ms + 3_600_000 if floor_ms else 0)

    return mock.patch.object(PopTime, "__init__", begin)


def acknowledges_in_memory_only() -> Any:
    """What is acknowledged is known, and not in the log when it is answered, or later."""
    real = PopSettler._store_and_answer

    def store_and_answer(self: PopSettler, turn: Any, settled: Any) -> None:
        if turn.told:
            self._state.apply(turn.record.SerializeToString(), self._store.appended_position - 1)
            turn.told.clear()
        real(self, turn, settled)

    return mock.patch.object(PopSettler, "_store_and_answer", store_and_answer)


def forgets_whose_receipt_it_is() -> Any:
    """Which pop a message is of is not kept over a restart: then any receipt of it is good, also one of an earlier pop."""
    real_begin, real = PopTime.__init__, OpenMessages.held_and_lost
    began_ms = []

    def begin(self: PopTime, clock: Any, floor_ms: int) -> None:
        real_begin(self, clock, floor_ms)
        began_ms.append(self.now_ms())

    def held_and_lost(self: OpenMessages, runs: Any, number: int, time_ms: int) -> Any:
        held, lost = real(self, runs, number, time_ms)
        kept = [offset for offset in offsets_in(lost) if offset in self.open and self.open[offset].time_ms <= began_ms[-1]]
        return runs_of([*offsets_in(held), *kept]), runs_of(offset for offset in offsets_in(lost) if offset not in kept)

    mock.patch.object(PopTime, "__init__", begin).__enter__()
    return mock.patch.object(OpenMessages, "held_and_lost", held_and_lost)


def takes_each_stale_receipt_for_a_repeated_one() -> Any:
    """What is not held any more counts as acknowledged by the same receipt before."""
    return mock.patch.object(Acknowledged, "parted", lambda _, runs, *__: (list(runs), []))


def gives_keys_together() -> Any:
    """Popped messages of one sharding key do not wait for each other."""
    return mock.patch.object(OpenMessages, "is_group_open", return_value=False)


class PlantedInChild(NamedTuple):
    """A bug, the campaign that meets it, the rule that it breaks, and how many rounds that takes.

    `invisible_s`: for which pops ask. Where a hold is to outlive a restart, it is longer than one on a busy machine.
    """

    plant: Callable[[], Any]
    campaign: str
    rule: str
    rounds: int = 1
    invisible_s: float = 1.0
    seed: int = 1


BUGS: Final = (
    PlantedInChild(delivers_early, "kill_delays", "F1"),
    PlantedInChild(delivers_early, "kill_retries", "F1"),
    PlantedInChild(believes_the_wall_clock, "clock_delays", "F1", rounds=4),
    PlantedInChild(answers_recalls_that_it_does_not_append, "kill_delays", "F4"),
    PlantedInChild(retries_once_more, "kill_retries", "G1"),
    PlantedInChild(commits_what_is_in_hand, "kill_retries", "G1", rounds=12),
    PlantedInChild(commits_what_is_rolled_back, "kill_transactions", "E2", rounds=3),
    PlantedInChild(takes_the_other_decision, "kill_transactions", "E3", rounds=6),
    PlantedInChild(ends_holds_at_a_start, "kill_pops", "G3a", invisible_s=5.0),
    PlantedInChild(acknowledges_in_memory_only, "kill_pops", "G3b", rounds=2),
    PlantedInChild(acknowledges_in_memory_only, "failover_pops", "G3b", rounds=3),
    PlantedInChild(gives_keys_together, "kill_pops", "G4", seed=2),
    PlantedInChild(forgets_whose_receipt_it_is, "kill_pops", "G3c", rounds=20, invisible_s=0.5),
    PlantedInChild(takes_each_stale_receipt_for_a_repeated_one, "kill_pops", "G3c"),
)


def environment_of(bug: PlantedInChild) -> dict[str, str]:
    """What a broker's process inherits to have the bug."""
    here = Path(__file__).parent
    paths = [str(here / "planted_in_child"), str(here.parents[1]), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CHAOS_BUG": f"{__name__}:{bug.plant.__name__}",
    }
