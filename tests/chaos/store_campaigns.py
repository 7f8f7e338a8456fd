"""The campaigns on the simulated disk, by seed: what the tests and `python -m tests.chaos` run.

A campaign runs seeds and raises CampaignFailed with the first one that is red and the command that replays it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from hypothesis import Phase, core, settings
from hypothesis.stateful import run_state_machine_as_test

from .checker import Violation, explain
from .failover_world import check_failover
from .ha_world import check_ha
from .leadership_world import (
    check_copy_under_brokers,
    check_cut_logs,
    check_late_answers,
    check_leadership,
    check_older_etcd,
    check_quotas,
    check_restored_etcd,
    check_two_operators,
)
from .planted import PLANTED, caught_by
from .store_clock import check_clock
from .store_crashes import check_crashes
from .store_damage import DamageReport, run_damage
from .store_delays import check_delays
from .store_follow import check_following
from .store_loops import PLANS, STEPS, LoopReport, run_loops
from .store_machine import StoreMachine
from .store_moves import check_moves
from .store_pops import check_pops
from .store_repeats import check_repeats
from .store_retries import check_send_backs
from .store_states import check_states_of_log
from .store_topics import check_topics
from .store_transactions import check_transactions
from .store_world import watch_log

SEEDS_PER_QUOTA: Final = 20
"""Of so many lives one more is lived with disks that report room, and take nothing: five minutes. Two have an etcd that was restored."""


class CampaignFailed(AssertionError):
    """A seed is red. `rounds_each`: rounds with each seed, for campaigns that have them."""

    def __init__(
        self,
        campaign: str,
        seed: int,
        case: str,
        violations: Sequence[Violation],
        *,
        rounds_each: int | None = None,
    ) -> None:
        command = f".venv/bin/python -m tests.chaos {campaign} {seed}"
        if rounds_each is not None:
            command += f" --rounds {rounds_each}"
        super().__init__(
            f"{campaign}, seed {seed}: {case}\n{explain(violations)}\n\nreplay: {command}"
        )


@contextmanager
def names_its_seed(campaign: str, seed: int, *, rounds_each: int | None = None) -> Iterator[None]:
    """Whatever goes wrong inside tells its seed and the command that replays it."""
    try:
        yield
    except CampaignFailed:
        raise
    except Exception as error:
        violation = Violation("crash", f"{type(error).__name__}: {error}")
        raise CampaignFailed(
            campaign, seed, "it did not get to its end", [violation], rounds_each=rounds_each
        ) from error


@dataclass(slots=True)
class Tally:
    """What a campaign did."""

    seeds: int = 0
    images: int = 0
    faults: int = 0
    fired: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        fired = ", ".join(f"{name} {count}" for name, count in sorted(self.fired.items()))
        return f"{self.seeds} seeds, {self.faults} faults, {self.images} images; {fired}"


def store_loops(seeds: Iterable[int], *, stride: int = 1, offset: int = 0) -> Tally:
    """Every operation x every I/O x every fault; with `stride` only each so-many-th pair of operation and fault."""
    tally = Tally()
    pairs = [(name, plan) for name in STEPS for plan in PLANS]
    with watch_log() as fired:
        for seed in seeds:
            report = LoopReport()
            with names_its_seed("store-loops", seed):
                for name, plan in pairs[(seed + offset) % stride :: stride]:
                    run_loops(seed, report, steps={name: STEPS[name]}, plans=(plan,))
            if report.failures:
                raise CampaignFailed("store-loops", seed, *report.failures[0])
            tally.seeds += 1
            tally.images += report.images
            tally.faults += report.faults
            tally.fired += report.fired
        tally.fired += fired
    return tally


def store_damage(seeds: Iterable[int], *, tries: int = 6) -> Tally:
    """Damaged files."""
    tally = Tally()
    with watch_log() as fired:
        for seed in seeds:
            report = DamageReport()
            with names_its_seed("store-damage", seed):
                run_damage(seed, report, tries=tries)
            if report.failures:
                raise CampaignFailed("store-damage", seed, *report.failures[0])
            tally.seeds += 1
            tally.images += report.images
            tally.faults += report.images
            tally.fired += report.outcomes
        tally.fired += fired
    return tally


def _run(
    campaign: str,
    case: str,
    seeds: Iterable[int],
    check: Callable[[int, Counter[str]], list[Violation]],
) -> Tally:
    """A campaign whose seeds are scripts of their own. `check` says what is wrong with one, and counts what happened in it."""
    tally = Tally()
    with watch_log() as fired:
        for seed in seeds:
            with names_its_seed(campaign, seed):
                violations = check(seed, tally.fired)
            if violations:
                raise CampaignFailed(campaign, seed, case, violations)
            tally.seeds += 1
        tally.fired += fired
    return tally


def store_clock(seeds: Iterable[int]) -> Tally:
    """A wall clock that jumps."""
    return _run("store-clock", "the clock jumps", seeds, lambda seed, _: check_clock(seed))


def store_topics(seeds: Iterable[int]) -> Tally:
    """Topics that are deleted and created again."""
    return _run(
        "store-topics",
        "topics are deleted and created again",
        seeds,
        lambda seed, _: check_topics(seed),
    )


def store_transactions(seeds: Iterable[int]) -> Tally:
    """Half messages, decisions and questions, with crashes, clocks that are set, and retention."""
    return _run("store-transactions", "transactions begin and end", seeds, check_transactions)


def store_crashes(seeds: Iterable[int], *, stride: int = 1) -> Tally:
    """A kill and power cuts at every I/O of delays, transactions, pops and send-backs; with `stride` at each so-many-th."""
    return _run("store-crashes", "the process ends", seeds, lambda seed, fired: check_crashes(seed, fired, stride=stride))


def store_states(seeds: Iterable[int]) -> Tally:
    """Brokers that find nothing but the log, also after retention."""
    return _run(
        "store-states", "all caches are deleted", seeds, lambda seed, _: check_states_of_log(seed)
    )


def store_repeats(seeds: Iterable[int]) -> Tally:
    """Sends that are tried again behind crowds of producers, long rests and kills."""
    return _run(
        "store-repeats", "producers come and go", seeds, lambda seed, _: check_repeats(seed)
    )


def store_moves(seeds: Iterable[int]) -> Tally:
    """Messages of all kinds that move, through kills and power cuts."""
    return _run("store-moves", "messages move", seeds, lambda seed, _: check_moves(seed))


def store_pops(seeds: Iterable[int]) -> Tally:
    """Members of a group that pop, through kills and power cuts at any I/O, steps of the clock, and retention."""
    return _run("store-pops", "messages are popped", seeds, check_pops)


def store_retries(seeds: Iterable[int]) -> Tally:
    """Messages that fail, are retried and die, are replayed; answers get lost, and crashes come at any operation."""
    return _run("store-retries", "messages fail", seeds, check_send_backs)


def store_delays(seeds: Iterable[int]) -> Tally:
    """Delayed messages and recalls, through kills, power cuts, clock steps, damage of the timer and retention."""
    return _run("store-delays", "messages are delayed", seeds, check_delays)


def store_follow(seeds: Iterable[int]) -> Tally:
    """Two stores, one of which follows the other, through crashes, fail-overs and truncations."""
    return _run(
        "store-follow", "one store follows another", seeds, lambda seed, _: check_following(seed)
    )


def ha(seeds: Iterable[int]) -> Tally:
    """A SYNC_MASTER and its slaves: crashes, cut connections, strangers, truncations."""
    return _run("ha", "slaves follow a master", seeds, check_ha)


def leadership(seeds: Iterable[int]) -> Tally:
    """Brokers that decide in etcd who leads, through crashes, partitions, pauses and clocks that jump."""
    return _run("leadership", "brokers decide who leads", seeds, _check_leadership)


def _check_leadership(seed: int, fired: Counter[str]) -> list[Violation]:
    found = check_leadership(seed, fired)
    if found or seed % SEEDS_PER_QUOTA:
        return found
    found = check_quotas(seed, fired) or check_restored_etcd(seed, fired) or check_older_etcd(seed, fired)
    found = found or check_copy_under_brokers(seed, fired) or check_two_operators(seed, fired)
    return found or check_late_answers(seed, fired) or check_cut_logs(seed, fired)


def failover_sim(seeds: Iterable[int]) -> Tally:
    """A whole cluster: stores, their election, clients, network, disks and clocks."""
    return _run("failover-sim", "a cluster lives through faults", seeds, check_failover)


def store_machine(seeds: Iterable[int], *, rounds_each: int | None = None, shrinks: bool = True) -> Tally:
    """Scripts of up to 40 steps that hypothesis makes, 100 or `rounds_each` with each seed.

    A red one is shrunk, which may take half a minute.
    """
    tally = Tally()
    phases = tuple(Phase) if shrinks else (Phase.generate,)
    # The suite's profile derandomizes, so that each seed would run the same scripts.
    chosen = settings(
        max_examples=rounds_each or 100,
        stateful_step_count=40,
        deadline=None,
        database=None,
        phases=phases,
        derandomize=False,
    )
    with watch_log() as fired:
        for seed in seeds:
            with names_its_seed("store-machine", seed, rounds_each=rounds_each), _hypothesis_seed(seed):
                run_state_machine_as_test(StoreMachine, settings=chosen)
            tally.seeds += 1
        tally.fired += fired
    return tally


@contextmanager
def _hypothesis_seed(seed: int) -> Iterator[None]:
    """As pytest's --hypothesis-seed: there is no other way for state machines."""
    module: Any = core
    before, module.global_force_seed = module.global_force_seed, seed
    try:
        yield
    finally:
        module.global_force_seed = before


def planted_bugs(seeds: Iterable[int]) -> Tally:
    """Every planted bug is caught within the seeds, and the same drills are silent without it."""
    tally = Tally()
    seeds = list(seeds)
    with watch_log():
        for planted in PLANTED:
            caught = caught_by(planted, seeds)
            if caught is None:
                raise AssertionError(
                    f"the planted bug {planted.name!r} was not caught by seeds {seeds[0]} to {seeds[-1]}"
                )
            seed, _ = caught
            violations = planted.drill(seed)
            if violations:
                raise CampaignFailed(
                    "planted",
                    seed,
                    f"the drill of {planted.name!r} is red without the bug",
                    violations,
                )
            tally.fired[planted.name] += 1
            tally.seeds += 1
    return tally
