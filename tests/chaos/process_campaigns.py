"""The campaigns with real processes, by seed: what the tests and `python -m tests.chaos` run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from . import process_rounds as rounds
from .broadcast_rounds import FAULTS as BROADCAST_FAULTS
from .broadcast_rounds import broadcast_rounds
from .broker_places import (
    OpenPlace,
    elected,
    elected_with_clocks,
    standalone,
    standalone_with_clock,
)
from .checker import Violation
from .delivery_rounds import World, delay_rounds, retry_rounds, transaction_rounds
from .failover_rounds import FAULTS, failover_rounds
from .group_rounds import FAILOVERS, ElectedGroupWorld, GroupWorld, group_rounds, told
from .group_rounds import FAULTS as GROUP_FAULTS
from .group_rounds import GAP_S as GROUP_GAP_S
from .names_world import name_rounds
from .pop_rounds import pop_rounds
from .reset_rounds import FAULTS as RESET_FAULTS
from .reset_rounds import reset_rounds
from .spark_world import spark_rounds
from .store_campaigns import CampaignFailed, names_its_seed


def _run(
    campaign: str,
    seeds: Iterable[int],
    round_: Callable[[int, Counter[str]], list[Violation]],
    *,
    rounds_each: int | None = None,
) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        with names_its_seed(campaign, seed, rounds_each=rounds_each):
            violations = round_(seed, counts)
            if violations:
                raise CampaignFailed(campaign, seed, campaign, violations, rounds_each=rounds_each)
    return counts


def kill(seeds: Iterable[int], *, rounds_each: int = 5) -> Counter[str]:
    """kill -9 under load; odd seeds under SYNC_FLUSH."""
    return _run(
        "kill",
        seeds,
        lambda seed, counts: rounds.kill_rounds(
            seed, rounds_each, counts, sync_flush=bool(seed % 2)
        ),
        rounds_each=rounds_each,
    )


def power(seeds: Iterable[int], *, rounds_each: int = 2) -> Counter[str]:
    """Power cuts; odd seeds under SYNC_FLUSH."""
    return _run(
        "power",
        seeds,
        lambda seed, counts: rounds.power_cut_rounds(
            seed, rounds_each, counts, sync_flush=bool(seed % 2)
        ),
        rounds_each=rounds_each,
    )


def proxy(seeds: Iterable[int], *, rounds_each: int = 2) -> Counter[str]:
    """Retried sends through a faulty proxy."""
    return _run(
        "proxy",
        seeds,
        lambda seed, counts: rounds.proxy_rounds(seed, rounds_each, counts),
        rounds_each=rounds_each,
    )


def spark(seeds: Iterable[int], *, rounds_each: int = 8, bug: str = "") -> Counter[str]:
    """Spark copies a topic; in each round brokers, connections or Spark's processes are done harm. `bug`: of `recorded_sink.BUGS`."""
    return _run(
        "spark",
        seeds,
        lambda seed, counts: spark_rounds(seed, rounds_each, counts, bug=bug),
        rounds_each=rounds_each,
    )


def full_disk(seeds: Iterable[int]) -> Counter[str]:
    """A full disk."""
    return _run("full-disk", seeds, rounds.full_disk)


def failed_sync(seeds: Iterable[int]) -> Counter[str]:
    """A failed fsync."""
    with tempfile.TemporaryDirectory(prefix="protomq-shim-") as name:
        return _run(
            "failed-sync", seeds, lambda seed, counts: rounds.failed_sync(seed, Path(name), counts)
        )


def damage(seeds: Iterable[int]) -> Counter[str]:
    """Damaged files between two runs."""
    return _run("damage", seeds, rounds.damaged_files)


def queue_damage(seeds: Iterable[int], *, rounds_each: int = 2) -> Counter[str]:
    """Damaged consume queue files under a running broker; odd seeds under SYNC_FLUSH."""
    return _run(
        "queue-damage",
        seeds,
        lambda seed, counts: rounds.damaged_queues(seed, rounds_each, counts),
        rounds_each=rounds_each,
    )


def lock(seeds: Iterable[int]) -> Counter[str]:
    """A second broker."""
    return _run("lock", seeds, rounds.second_broker)


def names(seeds: Iterable[int], *, rounds_each: int = 8) -> Counter[str]:
    """Two brokers with one name."""
    return _run(
        "names",
        seeds,
        lambda seed, counts: name_rounds(seed, rounds_each, counts),
        rounds_each=rounds_each,
    )


def failover(
    seeds: Iterable[int], *, rounds_each: int = 8, faults: tuple[str, ...] = FAULTS, members: int = 3
) -> Counter[str]:
    """Brokers of one name that elect their master in a real etcd; odd seeds under SYNC_FLUSH."""
    return _run(
        "failover" if members == 3 else "failover-pair",
        seeds,
        lambda seed, counts: failover_rounds(seed, rounds_each, counts, faults, members),
        rounds_each=rounds_each,
    )


def hostile(seeds: Iterable[int]) -> Counter[str]:
    """A hostile client beside honest ones."""
    return _run("hostile", seeds, rounds.hostile_round)


def _deliver(
    campaign: str,
    seeds: Iterable[int],
    run: Callable[[int, int, Path, OpenPlace], World],
    rounds_each: int,
    place: OpenPlace = standalone,
) -> Counter[str]:
    def round_(seed: int, counts: Counter[str]) -> list[Violation]:
        with tempfile.TemporaryDirectory(prefix="protomq-kills-") as name:
            world = run(seed, rounds_each, Path(name), place)
        counts.update(world.counts)
        return world.found

    return _run(campaign, seeds, round_, rounds_each=rounds_each)


def _pop(campaign: str, seeds: Iterable[int], rounds_each: int, place: OpenPlace = standalone) -> Counter[str]:
    def round_(seed: int, counts: Counter[str]) -> list[Violation]:
        with tempfile.TemporaryDirectory(prefix="protomq-kills-") as name:
            return pop_rounds(seed, rounds_each, Path(name), counts, place)

    return _run(campaign, seeds, round_, rounds_each=rounds_each)


def kill_retries(seeds: Iterable[int], *, rounds_each: int = 20) -> Counter[str]:
    """kill -9 of brokers and of consumers, under listeners that fail."""
    return _deliver("kill-retries", seeds, retry_rounds, rounds_each)


def kill_delays(seeds: Iterable[int], *, rounds_each: int = 20) -> Counter[str]:
    """kill -9 under delayed messages and their recalls."""
    return _deliver("kill-delays", seeds, delay_rounds, rounds_each)


def clock_delays(seeds: Iterable[int], *, rounds_each: int = 20) -> Counter[str]:
    """The same, and the broker's wall clock is set by hours."""
    return _deliver("clock-delays", seeds, delay_rounds, rounds_each, standalone_with_clock)


def kill_transactions(seeds: Iterable[int], *, rounds_each: int = 20) -> Counter[str]:
    """kill -9 under transactions."""
    return _deliver("kill-transactions", seeds, transaction_rounds, rounds_each)


def kill_pops(seeds: Iterable[int], *, rounds_each: int = 20) -> Counter[str]:
    """kill -9 under pops."""
    return _pop("kill-pops", seeds, rounds_each)


def failover_retries(seeds: Iterable[int], *, rounds_each: int = 6) -> Counter[str]:
    """The lead of three brokers changes, and consumers are killed, under listeners that fail."""
    return _deliver("failover-retries", seeds, retry_rounds, rounds_each, elected)


def failover_delays(seeds: Iterable[int], *, rounds_each: int = 6) -> Counter[str]:
    """The same under delayed messages and their recalls, and wall clocks are set by hours."""
    return _deliver("failover-delays", seeds, delay_rounds, rounds_each, elected_with_clocks)


def failover_transactions(seeds: Iterable[int], *, rounds_each: int = 6) -> Counter[str]:
    """The same under transactions."""
    return _deliver("failover-transactions", seeds, transaction_rounds, rounds_each, elected)


def failover_pops(seeds: Iterable[int], *, rounds_each: int = 6) -> Counter[str]:
    """The same under pops."""
    return _pop("failover-pops", seeds, rounds_each, elected)


def groups(
    seeds: Iterable[int],
    *,
    rounds_each: int = 12,
    faults: tuple[str, ...] = GROUP_FAULTS,
    undisturbed_kills: int = 0,
    gap_s: float = GROUP_GAP_S,
    campaign: str = "groups",
    make_world: type[GroupWorld] = GroupWorld,
) -> Counter[str]:
    """Members of a group and its brokers are killed, members are stopped and woken, come and go; a kind of member for each seed.

    `undisturbed_kills`: so many more of each seed, while nothing else happens, to see how long take-overs last. `gap_s`: after which a
    silent member is given up.
    """
    take_overs: list[float] = []

    def round_(seed: int, counts: Counter[str]) -> list[Violation]:
        folder = Path(tempfile.mkdtemp(prefix="protomq-groups-"))
        found, seconds = group_rounds(
            seed, rounds_each, folder, counts, faults, undisturbed_kills=undisturbed_kills, gap_s=gap_s, make_world=make_world
        )
        if found:
            print(f"what members, brokers and checker said stands in {folder}")
        else:
            shutil.rmtree(folder)
        take_overs.extend(seconds)
        return found

    counts = _run(campaign, seeds, round_, rounds_each=rounds_each)
    counts.update(told(take_overs))
    return counts


def failover_groups(seeds: Iterable[int], *, rounds_each: int = 6) -> Counter[str]:
    """The lead of three brokers changes, and members of a group are killed, also at the same time; a kind of member for each seed."""
    return groups(seeds, rounds_each=rounds_each, faults=FAILOVERS, campaign="failover-groups", make_world=ElectedGroupWorld)


def resets(seeds: Iterable[int], *, rounds_each: int = 10, faults: tuple[str, ...] = RESET_FAULTS) -> Counter[str]:
    """Offsets of a group are reset while its members and brokers are killed; a kind of member for each seed."""
    return _keep_if_red("resets", seeds, rounds_each, partial(reset_rounds, faults=faults))


def broadcasts(seeds: Iterable[int], *, rounds_each: int = 10, faults: tuple[str, ...] = BROADCAST_FAULTS) -> Counter[str]:
    """Members of a broadcasting group and its brokers are killed; all members get all messages."""
    return _keep_if_red("broadcasts", seeds, rounds_each, partial(broadcast_rounds, faults=faults))


def _keep_if_red(
    campaign: str, seeds: Iterable[int], rounds_each: int, run: Callable[[int, int, Path, Counter[str]], list[Violation]]
) -> Counter[str]:
    def round_(seed: int, counts: Counter[str]) -> list[Violation]:
        folder = Path(tempfile.mkdtemp(prefix=f"protomq-{campaign}-"))
        found = run(seed, rounds_each, folder, counts)
        if found:
            print(f"what members, brokers and checker said stands in {folder}")
        else:
            shutil.rmtree(folder)
        return found

    return _run(campaign, seeds, round_, rounds_each=rounds_each)


def first_seed() -> int:
    """Where random campaigns begin: PROTOMQ_CHAOS_SEED, else 1, so that a run is repeatable unless it is told otherwise."""
    return int(os.environ.get("PROTOMQ_CHAOS_SEED", "1"))
