"""Runs one campaign for some seeds: what a red run tells to type.

python -m tests.chaos CAMPAIGN SEED [COUNT] [--rounds ROUNDS]
python -m tests.chaos planted
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from . import process_campaigns, store_campaigns
from .group_rounds import STOPS

CAMPAIGNS: dict[str, Callable[..., Any]] = {
    "store-loops": store_campaigns.store_loops,
    "store-crashes": store_campaigns.store_crashes,
    "store-follow": store_campaigns.store_follow,
    "ha": store_campaigns.ha,
    "store-damage": store_campaigns.store_damage,
    "store-clock": store_campaigns.store_clock,
    "store-topics": store_campaigns.store_topics,
    "store-states": store_campaigns.store_states,
    "store-transactions": store_campaigns.store_transactions,
    "store-repeats": store_campaigns.store_repeats,
    "store-moves": store_campaigns.store_moves,
    "store-pops": store_campaigns.store_pops,
    "store-delays": store_campaigns.store_delays,
    "store-retries": store_campaigns.store_retries,
    "store-machine": store_campaigns.store_machine,
    "leadership": store_campaigns.leadership,
    "failover-sim": store_campaigns.failover_sim,
    "planted": store_campaigns.planted_bugs,
    "kill": process_campaigns.kill,
    "kill-retries": process_campaigns.kill_retries,
    "kill-delays": process_campaigns.kill_delays,
    "kill-transactions": process_campaigns.kill_transactions,
    "kill-pops": process_campaigns.kill_pops,
    "clock-delays": process_campaigns.clock_delays,
    "failover-retries": process_campaigns.failover_retries,
    "failover-delays": process_campaigns.failover_delays,
    "failover-transactions": process_campaigns.failover_transactions,
    "failover-pops": process_campaigns.failover_pops,
    "failover-groups": process_campaigns.failover_groups,
    "groups": process_campaigns.groups,
    "groups-stops": lambda seeds, **options: process_campaigns.groups(seeds, faults=STOPS, **options),
    "resets": process_campaigns.resets,
    "broadcasts": process_campaigns.broadcasts,
    "power": process_campaigns.power,
    "proxy": process_campaigns.proxy,
    "spark": process_campaigns.spark,
    "full-disk": process_campaigns.full_disk,
    "failed-sync": process_campaigns.failed_sync,
    "damage": process_campaigns.damage,
    "queue-damage": process_campaigns.queue_damage,
    "lock": process_campaigns.lock,
    "names": process_campaigns.names,
    "failover": process_campaigns.failover,
    "failover-pair": lambda seeds, **options: process_campaigns.failover(seeds, members=2, **options),
    "failover-kills": lambda seeds, **options: process_campaigns.failover(seeds, faults=("kill",), **options),
    "hostile": process_campaigns.hostile,
}


def main(arguments: list[str]) -> int:
    """The exit code."""
    options: dict[str, int] = {}
    if "--rounds" in arguments[:-1]:
        at = arguments.index("--rounds")
        options["rounds_each"] = int(arguments[at + 1])
        arguments = arguments[:at] + arguments[at + 2 :]
    if not arguments or arguments[0] not in CAMPAIGNS:
        print(f"{__doc__}\ncampaigns: {', '.join(CAMPAIGNS)}", file=sys.stderr)
        return 2
    first = int(arguments[1]) if len(arguments) > 1 else 1
    count = int(arguments[2]) if len(arguments) > 2 else (40 if arguments[0] == "planted" else 1)
    began = time.monotonic()
    try:
        tally = CAMPAIGNS[arguments[0]](range(first, first + count), **options)
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    print(
        f"{arguments[0]}, seeds {first} to {first + count - 1}: nothing is wrong, {time.monotonic() - began:.0f} s: {tally}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
