"""Pops with real processes: members of a group receive and acknowledge while a broker is killed with SIGKILL again and again, or while the
lead of three changes (`broker_places`).

    G3a   nobody gets a message within the invisible time of another holder
    G3b   what was acknowledged, and answered so, never comes again (a kill takes nothing back)
    G3c   a receipt is of one pop: whoever acknowledges after another one got the message is told that he is too late
    G1    at least once: in the end each message that was sent was acknowledged, or is a dead letter, once, after as many deliveries as its
          group allows
    G4    in order (even seeds): a message of a sharding key comes when those of its key in front of it are acknowledged or dead
    I2    after each kill messages are delivered again

An acknowledgement that a kill fell into may be stored, though nobody was told so: its further try is answered as the first would have been.
Where the broker has forgotten that, the acknowledgement fails. Such a message may come again or not, and G1 asks nothing of it. A stale
receipt excuses nothing.

Not all messages are acknowledged at once. Some are never, some later, mostly when their time is over: before or after another member has
them, on this side of a kill or on the other. Some are renewed before that. And of some messages the first deliveries fail, up to 20:
members give them back, until they are done, or dead.

A master that was stopped may send an answer when it wakes up, long after the invisible time; another member has the message by then. The
number of the delivery tells who had it first.

Invisible times count from before a member asks, by one clock of this process: a broker that begins to count later holds for longer.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest import mock

from protomq import (
    Admin,
    Message,
    OutgoingMessage,
    PoppedQueue,
    Producer,
    PullConsumer,
    SimpleConsumer,
)
from protomq._methods import CHANGE_INVISIBLE
from protomq._transport import SyncTransport
from protomq._types import BrokerAddress, MethodInfo
from protomq.errors import ProtomqError, StaleReceiptError

from .broker_places import OpenPlace, is_acknowledged, standalone
from .checker import Violation

TOPIC: Final = "popped"
MEMBERS: Final = 3
INVISIBLE_S: Final = 1.0
PATIENCE_S: Final = 120.0
PART_AT_ONCE: Final = 0.6
PART_LATE: Final = 0.25
RETRIES: Final = 16
FAILURES: Final = (1, 2, 5, RETRIES, RETRIES + 1, RETRIES + 4)
PART_FAILING: Final = 0.1
PART_RENEWED: Final = 0.5
"""Of those that are acknowledged later."""
BACK_AFTER_S: Final = (0.0, 0.05, 0.2)
KEYS: Final = 40
BACKLOG_MAX: Final = 300
"""Of messages in order, which come one after another."""
DEAD_TOPIC: Final = "%DLQ%members"
Line = tuple[int, str]
"""A queue, and a sharding key: messages of both come one after another."""


class _Delivery(NamedTuple):
    """A message as a member got it."""

    message: Message
    number: int
    """How often the message had come by then."""


@dataclass
class _Group:
    """What the members know together."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    held_until_s: dict[bytes, float] = field(default_factory=dict)
    attempts: dict[bytes, int] = field(default_factory=dict)
    """The highest number that a delivery of it had."""
    times: Counter[bytes] = field(default_factory=Counter)
    acked: set[bytes] = field(default_factory=set)
    unknown: set[bytes] = field(default_factory=set)
    sent: set[bytes] = field(default_factory=set)
    lines: dict[Line, dict[int, bytes]] = field(default_factory=lambda: defaultdict(dict))
    """What was sent of each key to each queue, by offset."""
    may_be_acked: set[bytes] = field(default_factory=set)
    dead: Counter[bytes] = field(default_factory=Counter)
    overtaken: dict[bytes, bytes] = field(default_factory=dict)
    """Messages behind which another one of their key came: they must be dead, by a delivery whose answer was lost."""
    found: list[Violation] = field(default_factory=list)
    delivered_count: int = 0
    late_count: int = 0
    """Acknowledgements that were too late, since another member had the message."""
    overtaken_count: int = 0
    """Answers that came when the message had been given to another member since."""
    stopping: threading.Event = field(default_factory=threading.Event)

    def take(self, message: Message, asked_s: float) -> _Delivery:
        """A member got a message for which it asked then."""
        assert isinstance(message.queue, PoppedQueue)
        body, attempt = message.body, message.queue.attempt
        with self.lock:
            self.delivered_count += 1
            before = self.attempts.get(body, 0)
            if attempt == before:
                self.found.append(Violation("G3a", f"{body!r} came twice as delivery {attempt}"))
            elif attempt < before:
                self.overtaken_count += 1
                return _Delivery(message, 0)
            self.attempts[body] = attempt
            if attempt > RETRIES + 1 or body in self.dead:
                self.found.append(Violation("G1", f"{body!r} came as delivery {attempt}, and is {self.dead[body]} dead letters"))
            self._check_order(message)
            early_s = self.held_until_s.get(body, 0.0) - time.monotonic()
            if early_s > 0:
                self.found.append(Violation("G3a", f"{body!r} came {early_s:.3f} s early"))
            if body in self.acked:
                self.found.append(Violation("G3b", f"{body!r} came after it was acknowledged"))
            self.held_until_s[body] = asked_s + INVISIBLE_S
            self.times[body] += 1
            return _Delivery(message, self.times[body])

    def _check_order(self, message: Message) -> None:
        line = self.lines.get((message.queue.queue_id, message.sharding_key)) if message.sharding_key else None
        for offset, other in (line or {}).items():
            is_over = other in self.acked or other in self.may_be_acked or self.attempts.get(other, 0) > RETRIES
            if offset < message.queue_offset and not is_over:
                self.overtaken[other] = message.body

    def begin_nack(self, delivery: _Delivery, back_s: float) -> None:
        """A member is about to give it back: somebody may have it then."""
        body = delivery.message.body
        assert isinstance(delivery.message.queue, PoppedQueue)
        with self.lock:
            if self.attempts[body] == delivery.message.queue.attempt:
                self.held_until_s[body] = min(self.held_until_s[body], back_s)

    def note_settled(self, delivery: _Delivery, passed_on: set[bytes], tries: int, until_s: float | None = None) -> None:
        """It was given back, or is held until then, and the member was not told that he is too late."""
        body = delivery.message.body
        assert isinstance(delivery.message.queue, PoppedQueue)
        with self.lock:
            if body in passed_on and tries <= 1:
                self.found.append(Violation("G3c", f"{body!r} was settled with the receipt of an earlier delivery"))
            if until_s is not None and self.attempts[body] == delivery.message.queue.attempt:
                self.held_until_s[body] = max(self.held_until_s[body], until_s)

    def bury(self, letter: Message) -> None:
        """It is a dead letter."""
        body = letter.body
        with self.lock:
            self.dead[body] += 1
            if letter.attempt != RETRIES + 1 or self.dead[body] > 1 or body in self.acked:
                text = f"{body!r} is dead {self.dead[body]} times, as attempt {letter.attempt}"
                self.found.append(Violation("G1", f"{text}{', and was acknowledged' if body in self.acked else ''}"))

    def passed_on(self, deliveries: Sequence[_Delivery]) -> set[bytes]:
        """Those that have come again since."""
        with self.lock:
            return {one.message.body for one in deliveries if self.times[one.message.body] > one.number}

    def note_acks(self, deliveries: Sequence[_Delivery], stale: set[bytes] | None, passed_on: set[bytes]) -> None:
        """A member acknowledged; it was told that `stale` were too late, or that nobody knows (None). `passed_on` is from before."""
        with self.lock:
            for one in deliveries:
                body = one.message.body
                if stale is None:
                    self.unknown.add(body)
                elif body in stale:
                    self.late_count += body in passed_on
                elif body in passed_on:
                    self.found.append(Violation("G3c", f"{body!r} was acknowledged with the receipt of an earlier delivery"))
                else:
                    self.acked.add(body)

    def open_messages(self) -> set[bytes]:
        """What was sent and must still come; nothing once something is wrong."""
        with self.lock:
            return set() if self.found else self.sent - self.acked - self.unknown - self.dead.keys()


def _produce(namesrv: str, group: _Group, has_keys: bool) -> None:
    number = 0
    with Producer(namesrv=namesrv) as producer:
        while not group.stopping.is_set():
            if has_keys and len(group.open_messages()) > BACKLOG_MAX:
                group.stopping.wait(0.05)
                continue
            bodies = [b"%d" % (number + index) for index in range(20)]
            keys = [f"k{(number + index) % KEYS}" if has_keys else None for index in range(20)]
            messages = [OutgoingMessage(TOPIC, body, sharding_key=key) for body, key in zip(bodies, keys, strict=True)]
            number += len(bodies)
            try:
                results = list(producer.send_batch(TOPIC, messages))
            except ProtomqError:
                continue
            if not all(map(is_acknowledged, results)):
                continue
            with group.lock:
                group.sent.update(bodies)
                for body, key, result in zip(bodies, keys, results, strict=True):
                    if key is not None:
                        group.lines[result.queue.queue_id, key][result.queue_offset] = body
            group.stopping.wait(0.02)


def _see_dead_letters(namesrv: str, group: _Group) -> None:
    with PullConsumer(namesrv=namesrv) as reader:
        while not group.stopping.is_set() or group.open_messages():
            try:
                if not reader.assignment():
                    reader.subscribe(DEAD_TOPIC)
                for letter in reader.poll(0.2):
                    group.bury(letter)
            except ProtomqError:  # none is dead yet, or the broker is
                group.stopping.wait(0.1)


def failures_of(seed: int, body: bytes) -> int:
    """How many deliveries of a message fail."""
    rng = random.Random(f"{seed} {body.decode()}")
    return rng.choice(FAILURES) if rng.random() < PART_FAILING else 0


def _consume(namesrv: str, group: _Group, seed: int, member: int, counts: Counter[str]) -> None:
    rng, fifo = random.Random(seed + member), seed % 2 == 0
    later: list[tuple[float, _Delivery]] = []
    renewed: list[tuple[float, _Delivery]] = []
    with SimpleConsumer("members", namesrv=namesrv) as consumer:
        while not group.stopping.is_set() or group.open_messages():
            asked_s = time.monotonic()
            try:
                messages = consumer.receive(TOPIC, 8, invisible_s=INVISIBLE_S, hold_s=0.5, fifo=fifo)
            except ProtomqError:
                group.stopping.wait(0.05)
                messages = []
            now, failed = [], []
            for message in messages:
                delivery, drawn = group.take(message, asked_s), rng.random()
                assert isinstance(message.queue, PoppedQueue)
                if message.queue.attempt <= failures_of(seed, message.body):
                    failed.append(delivery)
                elif drawn < PART_AT_ONCE:
                    now.append(delivery)
                elif drawn < PART_AT_ONCE + PART_LATE:
                    later.append((asked_s + rng.uniform(0.5, 5.0) * INVISIBLE_S, delivery))
                    if rng.random() < PART_RENEWED:
                        renewed.append((asked_s + rng.uniform(0.2, 0.8) * INVISIBLE_S, delivery))
            _acknowledge(consumer, group, now)
            for delivery in failed:
                counts["given back"] += _give_back(consumer, group, delivery, rng.choice(BACK_AFTER_S))
            for at_s, delivery in renewed:
                if at_s <= time.monotonic():
                    counts["renewed"] += _renew(consumer, group, delivery)
            renewed = [one for one in renewed if one[0] > time.monotonic()]
            now_s = time.monotonic()
            for at_s, delivery in later:
                if at_s <= now_s:
                    _acknowledge(consumer, group, [delivery])
            later = [one for one in later if one[0] > now_s]


def _acknowledge(consumer: SimpleConsumer, group: _Group, deliveries: Sequence[_Delivery]) -> None:
    """None of them twice, so that it is known by its body which one was too late."""
    if not deliveries:
        return
    passed_on = group.passed_on(deliveries)
    with group.lock:
        group.may_be_acked.update(one.message.body for one in deliveries)
    stale: set[bytes] | None
    try:
        stale = {message.body for message in consumer.ack([one.message for one in deliveries])}
    except StaleReceiptError:
        stale = {one.message.body for one in deliveries}
    except ProtomqError:
        stale = None
    group.note_acks(deliveries, stale, passed_on)


def _settle(call: Callable[[], list[Message]], group: _Group, delivery: _Delivery, until_s: float | None = None) -> bool:
    """Whether it was done. `until_s`: nobody else gets the message before, if so."""
    passed_on, tries_before = group.passed_on([delivery]), _TRIES.count
    try:
        stale = call()
    except ProtomqError:
        return False
    if not stale:
        group.note_settled(delivery, passed_on, _TRIES.count - tries_before, until_s)
    return not stale


def _give_back(consumer: SimpleConsumer, group: _Group, delivery: _Delivery, after_s: float) -> bool:
    group.begin_nack(delivery, time.monotonic() + after_s)
    return _settle(lambda: consumer.nack(delivery.message, after_s, error="it fails"), group, delivery)


def _renew(consumer: SimpleConsumer, group: _Group, delivery: _Delivery) -> bool:
    until_s = time.monotonic() + INVISIBLE_S
    return _settle(lambda: consumer.change_invisible(delivery.message, INVISIBLE_S), group, delivery, until_s)


class _Tries(threading.local):
    """How often this thread has sent another invisible time."""

    count = 0


_TRIES: Final = _Tries()


@contextmanager
def _counted_tries() -> Iterator[None]:
    """The SDK tries again by itself: with a broker that was killed, and where the lead has changed, of which only the SDK knows when."""
    real = SyncTransport.call

    def call(transport: SyncTransport, address: BrokerAddress, method: MethodInfo, *rest: Any, **named: Any) -> bytes:
        _TRIES.count += method is CHANGE_INVISIBLE
        return real(transport, address, method, *rest, **named)

    with mock.patch.object(SyncTransport, "call", call):
        yield


def pop_rounds(
    seed: int, rounds: int, folder: Path, counts: Counter[str], open_place: OpenPlace = standalone
) -> list[Violation]:
    """What is wrong."""
    rng = random.Random(seed)
    group, fifo = _Group(), seed % 2 == 0
    settled: Counter[str] = Counter()
    settings = {"PROTOMQ_POP_INVISIBLE_MIN_MS": "100"}
    with open_place(seed, folder, settings) as place, _counted_tries():
        with Admin(namesrv=place.namesrv) as admin:
            admin.set_group("members", retry_count_max=RETRIES)
        threads = [
            threading.Thread(target=_produce, args=(place.namesrv, group, fifo), daemon=True),
            threading.Thread(target=_see_dead_letters, args=(place.namesrv, group), daemon=True),
        ]
        threads += [
            threading.Thread(target=_consume, args=(place.namesrv, group, seed, member, settled), daemon=True)
            for member in range(MEMBERS)
        ]
        for thread in threads:
            thread.start()
        for _ in range(rounds):
            goal = group.delivered_count + rng.randint(20, 200)
            deadline_s = time.monotonic() + PATIENCE_S
            while group.delivered_count < goal and time.monotonic() < deadline_s and not group.found:
                group.stopping.wait(0.01)
            if group.found:
                break
            if group.delivered_count < goal:
                group.found.append(Violation("I2", f"{goal - group.delivered_count} messages short, and no more for {PATIENCE_S:.0f} s"))
                break
            counts[place.hurt()] += 1
        group.stopping.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        for body, other in group.overtaken.items():
            if body not in group.dead:
                group.found.append(Violation("G4", f"{other!r} came before {body!r} of its key was acknowledged"))
        left = group.open_messages()
        if left:
            group.found.append(Violation("G1", f"{len(left)} messages were not acknowledged, and are not dead: {sorted(left)[:5]}"))
    counts.update(settled)
    counts.update({"in order" if fifo else "in any order": 1, "dead letters": sum(group.dead.values())})
    counts.update({"deliveries": group.delivered_count, "acknowledged too late": group.late_count})
    counts["overtaken"] += group.overtaken_count
    return group.found
