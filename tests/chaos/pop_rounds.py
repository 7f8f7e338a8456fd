"""Pops with real processes: members of a group receive and acknowledge while a broker is killed with SIGKILL again and again.

    E1   nobody gets a message within the invisible time of another holder
    E2   what was acknowledged, and answered so, never comes again (a kill takes nothing back)
    E5   at least once: in the end each message that was sent was acknowledged
    I2   after each kill messages are delivered again

An acknowledgement that a kill fell into may be stored, though nobody was told so: its further try finds a stale receipt. Such a message may
come again or not, and E5 asks nothing of it, as of one whose acknowledgement failed. A stale receipt without a kill excuses nothing.

Invisible times count from before a member asks, by one clock of this process: a broker that begins to count later holds for longer.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from protomq import Producer, SimpleConsumer
from protomq.errors import ProtomqError
from protomq.testing import Broker

from .checker import Violation

TOPIC: Final = "popped"
MEMBERS: Final = 3
INVISIBLE_S: Final = 1.0
PATIENCE_S: Final = 120.0


@dataclass
class _Group:
    """What the members know together."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    held_until_s: dict[bytes, float] = field(default_factory=dict)
    acked: set[bytes] = field(default_factory=set)
    unknown: set[bytes] = field(default_factory=set)
    kill_count: int = 0
    """Kills that began or ended: odd while the broker is down."""
    sent: set[bytes] = field(default_factory=set)
    found: list[Violation] = field(default_factory=list)
    delivered_count: int = 0
    stopping: threading.Event = field(default_factory=threading.Event)

    def take(self, body: bytes, asked_s: float) -> None:
        """A member got a message for which it asked then."""
        with self.lock:
            self.delivered_count += 1
            early_s = self.held_until_s.get(body, 0.0) - time.monotonic()
            if early_s > 0:
                self.found.append(Violation("E1", f"{body!r} came {early_s:.3f} s early"))
            if body in self.acked:
                self.found.append(Violation("E2", f"{body!r} came after it was acknowledged"))
            self.held_until_s[body] = asked_s + INVISIBLE_S

    def note_acks(self, bodies: set[bytes], stale: set[bytes] | None, kill_count: int) -> None:
        """A member acknowledged `bodies`; it was told that `stale` were too late, or got no answer (None). `kill_count` is from before."""
        with self.lock:
            if stale is None:
                self.unknown |= bodies
                return
            self.acked |= bodies - stale
            if kill_count % 2 or self.kill_count != kill_count:
                self.unknown |= stale

    def open_messages(self) -> set[bytes]:
        """What was sent and must still come."""
        with self.lock:
            return self.sent - self.acked - self.unknown


def _produce(namesrv: str, group: _Group) -> None:
    number = 0
    with Producer(namesrv=namesrv) as producer:
        while not group.stopping.is_set():
            bodies = [b"%d" % (number + index) for index in range(20)]
            number += len(bodies)
            try:
                producer.send_batch(TOPIC, bodies)
            except ProtomqError:
                continue
            with group.lock:
                group.sent.update(bodies)
            group.stopping.wait(0.02)


def _consume(namesrv: str, group: _Group, rng: random.Random) -> None:
    with SimpleConsumer("members", namesrv=namesrv) as consumer:
        while not group.stopping.is_set() or group.open_messages():
            asked_s = time.monotonic()
            try:
                messages = consumer.receive(TOPIC, 8, invisible_s=INVISIBLE_S, hold_s=0.5)
            except ProtomqError:
                group.stopping.wait(0.05)
                continue
            for message in messages:
                group.take(message.body, asked_s)
            kept = [message for message in messages if rng.random() < 0.8]
            kill_count = group.kill_count
            stale: set[bytes] | None
            try:
                stale = {message.body for message in consumer.ack(kept)} if kept else set()
            except ProtomqError:
                stale = None
            group.note_acks({message.body for message in kept}, stale, kill_count)


def pop_rounds(seed: int, rounds: int, folder: Path) -> tuple[list[Violation], int]:
    """Violations, and how many messages were delivered."""
    rng = random.Random(seed)
    group = _Group()
    settings = {"PROTOMQ_POP_INVISIBLE_MIN_MS": "100"}
    with Broker(data_dir=folder, environment=settings) as broker:
        threads = [threading.Thread(target=_produce, args=(broker.namesrv, group), daemon=True)]
        threads += [
            threading.Thread(target=_consume, args=(broker.namesrv, group, random.Random(seed + member)), daemon=True)
            for member in range(MEMBERS)
        ]
        for thread in threads:
            thread.start()
        for _ in range(rounds):
            goal = group.delivered_count + rng.randint(20, 200)
            deadline_s = time.monotonic() + PATIENCE_S
            while group.delivered_count < goal and time.monotonic() < deadline_s:
                group.stopping.wait(0.01)
            if group.delivered_count < goal:
                group.found.append(Violation("I2", f"{goal - group.delivered_count} messages short, and no more for {PATIENCE_S:.0f} s"))
                break
            group.kill_count += 1
            broker.kill()
            broker.restart()
            group.kill_count += 1
        group.stopping.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        left = group.open_messages()
        if left:
            group.found.append(Violation("E5", f"{len(left)} messages were not acknowledged: {sorted(left)[:5]}"))
    return group.found, group.delivered_count
