"""Producers in crowds and long rests: what is sent again behind them is stored once, or refused (A3).

The table of repeated sends is small here, so that a crowd of ten fills it; the rests are those of a real one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from protomq_broker.store.state.repeated_sends import RepeatedSends

from .checker import Violation
from .store_world import StoreWorld, _Sender

MINUTE_MS = 60_000
RESTS_MS = (MINUTE_MS, 14 * MINUTE_MS, 16 * MINUTE_MS, 3 * 60 * MINUTE_MS, 26 * 60 * MINUTE_MS)
LIMITS = {"producers_max": 6, "runs_per_producer_max": 8, "runs_max": 16}


@contextmanager
def small_tables() -> Iterator[None]:
    """Stores that know six producers."""
    with mock.patch.dict(RepeatedSends.__init__.__kwdefaults__ or {}, LIMITS):
        yield


def check_repeats(seed: int) -> list[Violation]:
    """Answers get lost; others come in crowds, the log rests, the broker is killed; then the sends are tried again."""
    with small_tables():
        world = StoreWorld(seed, sync_flush=bool(seed % 2))
        world.open()
        found: list[Violation] = []
        newcomers = itertools.count()
        for _ in range(24):
            match world.rng.choice(("lose", "lose", "send", "crowd", "rest", "retry", "kill")):
                case "lose":
                    world.lost_answers = 0.7
                    world.send([world.new_order(sender=world.rng.choice(world.senders), size=40)])
                    world.flush()
                    world.lost_answers = 0.0
                case "send":
                    world.send_some()
                case "crowd":
                    for _ in range(world.rng.randint(1, 10)):
                        sender = _Sender(f"c{next(newcomers)}", world.rng.getrandbits(62) | 1)
                        world.send([world.new_order(sender=sender, size=40)])
                        if world.rng.random() < 0.1:
                            world.senders.append(sender)
                case "rest":
                    world.clock.advance(world.rng.choice(RESTS_MS))
                    world.send([world.new_order(sender=world.anonymous, size=40)])
                case "retry":
                    world.flush()
                    world.retry_uncertain()
                case _:
                    if world.rng.random() < 0.5:
                        world.checkpoint()
                    world = world.fork(world.rng.choice(("kill", "power")), world.rng)
                    world.open()
            world.flush()
        found += world.verify()
    return found
