"""The campaigns on the simulated disk, by seed: what the tests and `python -m tests.chaos` run.

A campaign runs seeds and raises CampaignFailed with the first one that is red and the command that replays it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from .checker import Violation, explain
from .planted import PLANTED, caught_by
from .store_clock import check_clock
from .store_damage import DamageReport, run_damage
from .store_loops import PLANS, STEPS, LoopReport, run_loops
from .store_topics import check_topics
from .store_world import watch_log


class CampaignFailed(AssertionError):
    """A seed is red."""

    def __init__(self, campaign: str, seed: int, case: str, violations: list[Violation]) -> None:
        super().__init__(
            f"{campaign}, seed {seed}: {case}\n{explain(violations)}\n\nreplay: .venv/bin/python -m tests.chaos {campaign} {seed}"
        )


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
            run_damage(seed, report, tries=tries)
            if report.failures:
                raise CampaignFailed("store-damage", seed, *report.failures[0])
            tally.seeds += 1
            tally.images += report.images
            tally.faults += report.images
            tally.fired += report.outcomes
        tally.fired += fired
    return tally


def store_clock(seeds: Iterable[int]) -> Tally:
    """A wall clock that jumps."""
    tally = Tally()
    with watch_log() as fired:
        for seed in seeds:
            violations = check_clock(seed)
            if violations:
                raise CampaignFailed("store-clock", seed, "the clock jumps", violations)
            tally.seeds += 1
        tally.fired += fired
    return tally


def store_topics(seeds: Iterable[int]) -> Tally:
    """Topics that are deleted and made anew."""
    tally = Tally()
    with watch_log() as fired:
        for seed in seeds:
            violations = check_topics(seed)
            if violations:
                raise CampaignFailed(
                    "store-topics", seed, "topics are deleted and made anew", violations
                )
            tally.seeds += 1
        tally.fired += fired
    return tally


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
