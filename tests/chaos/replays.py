"""What happened in a seed of a simulated world, as one number: two runs of it must give the same.

python -m tests.chaos.replays WORLD SEED
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Callable
from typing import Final

from .failover_world import live_failover
from .ha_world import live_ha
from .leadership_world import LeadershipWorld
from .store_world import watch_log


def _failover(seed: int, fired: Counter[str]) -> str:
    return live_failover(seed, fired).digest()


def _ha(seed: int, fired: Counter[str]) -> str:
    world = live_ha(seed, fired)
    disks = [world.master.disk, *(slave.disk for slave in world.slaves)]
    files = [[(path, content) for path, content in disk.files("/s").items() if path != "/s/lock"] for disk in disks]  # it names a process
    return _digest(files, [disk.operations for disk in disks], world.found, world.clock.passed_ms)


def _leadership(seed: int, fired: Counter[str]) -> str:
    world = LeadershipWorld(seed, fired)
    world.run()
    logs = [(broker.disk.member, broker.disk.log, broker.clock_ms()) for broker in world.brokers]
    return _digest(logs, world.acknowledged, world.epochs, world.etcd.revision, world.event_count, world.found)


def _digest(*facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()


WORLDS: Final[dict[str, Callable[[int, Counter[str]], str]]] = {
    "failover-sim": _failover,
    "ha": _ha,
    "leadership": _leadership,
}


def replay(world: str, seed: int) -> str:
    """The number of a seed."""
    fired: Counter[str] = Counter()
    with watch_log():
        digest = WORLDS[world](seed, fired)
    return _digest(digest, sorted(fired.items()))


if __name__ == "__main__":
    print(replay(sys.argv[1], int(sys.argv[2])))
