"""Producers in crowds and long rests: what is sent again behind them is stored once, or refused (A3).

Some producers have the id of another one, as a copied configuration gives it. Whoever of them is told that a message is stored finds it
there (A1), and it is not the other one's; who has its id for itself is never told that it is taken (A9).

The table of repeated sends is small here, so that a crowd of ten fills it; the rests are those of a real one.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

from protomq_broker.store.state.repeated_sends import RepeatedSends

from .checker import Violation
from .history import Event
from .store_world import StoreWorld, _Sender

ID_TAKEN = "PRODUCER_ID_TAKEN"
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
        world.promise = replace(world.promise, allowed_reasons=world.promise.allowed_reasons | {ID_TAKEN})
        world.open()
        found: list[Violation] = []
        newcomers = itertools.count()
        for _ in range(24):
            match world.rng.choice(
                ("lose", "lose", "send", "crowd", "copy", "rest", "retry", "kill")
            ):
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
                case "copy":
                    sender = _copy_of(world.rng.choice(world.senders), next(newcomers), world.rng)
                    world.senders.append(sender)
                    for _ in range(3):
                        count = world.rng.choice((1, 1, 3))
                        world.send([world.new_order(sender=sender, count=count, size=40)])
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
        found += _wrongly_taken(world.history.events, world.senders)
    return found


def _copy_of(sender: _Sender, number: int, rng: random.Random) -> _Sender:
    """Another producer with its id, which begins again or where the one has come to."""
    first = rng.choice((0, max(0, sender.next_sequence - 2), sender.next_sequence))
    sender.shares_id = True
    return _Sender(f"k{number}", sender.producer_id, first, shares_id=True)


def _wrongly_taken(events: Sequence[Event], senders: Sequence[_Sender]) -> list[Violation]:
    """Refusals of a producer's own messages: nobody else has its id (A9)."""
    shared = Counter(sender.producer_id for sender in senders)
    alone = {sender.name for sender in senders if shared[sender.producer_id] == 1}
    return [
        Violation("A9", f"{event.process} has its id for itself and is told {event.result}")
        for event in events
        if event.result.get("reason") == ID_TAKEN and event.process in alone
    ]
