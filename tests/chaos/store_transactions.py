"""Transactions of a broker whose process and power end at any operation of its disk, and whose clock is set.

Half messages, decisions that come twice or contradict each other, questions and their answers, delays, checkpoints, retention; after a
crash the broker has its caches, or nothing but the log. Its log is judged by an own reading (`checker/transactions.py`, E), and beside it:

    E1   no recall takes a committed message back that waits for its time
    E3   a decision is answered the same each time
    E4   nobody reads a half message, by offset, key or id
    E6   the broker tells the same as its log, and forgets no question that it asked
    E8   nobody is asked early, by a clock that nobody sets; once too early where the wall clock was set ahead
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from protomq.v1.record_pb2 import Record
from protomq.v1.send_service_pb2 import SendRequest
from protomq.wire.topics import EXPIRED_TOPIC
from protomq_broker.store.errors import StoreError
from protomq_broker.testing.simdisk import Fault, SimulatedCrash
from protomq_runtime.errors import ServiceError
from tests.support.ended_process import after_the_end, raise_if_disk_failed
from tests.support.forged_recalls import taken_back
from tests.support.lost_files import lose_all_but_log
from tests.support.transaction_world import (
    COMMIT,
    PRODUCER,
    ROLL_BACK,
    SEGMENT,
    World,
    checks_of,
    positions_read,
)

from .checker import Violation, parse_log
from .checker.transactions import (
    IMMUNITY_MS,
    INTERVAL_MS,
    Key,
    TransactionLog,
    check_answers,
    transactions_of,
)

STEPS = 60
QUEUES = 2
TOPIC = "topic"
FASTEST = 1.1
"""How much faster than the monotonic clock log time may be, which follows the wall clock."""
INEXACT_MS = 20


class Promises:
    """E8: since when each open transaction waits for its next question, by the monotonic clock."""

    def __init__(self) -> None:
        self._waits: dict[Key, tuple[int, int | None, bool]] = {}
        """By id: how often it was asked about; since when it waits, None if nobody knows; whether it may be asked about too early."""

    def set_ahead(self) -> None:
        """Somebody has set the wall clock ahead: each open one may be asked about once, too early."""
        self._waits = {key: (count, since_ms, True) for key, (count, since_ms, _) in self._waits.items()}

    def check(self, open_: dict[Key, int], now_ms: int, *, has_crashed: bool) -> list[Violation]:
        """What the log has open after a step, by id how often it was asked about."""
        found = []
        waits: dict[Key, tuple[int, int | None, bool]] = {}
        for key, count in open_.items():
            if key not in self._waits:
                waits[key] = count, now_ms if not count else None, False
                continue
            before, since_ms, may_be_early = self._waits[key]
            if count == before:
                waits[key] = before, since_ms, may_be_early
            elif count < before:  # a power cut took the question back
                waits[key] = count, None, may_be_early
            else:
                least_ms = (INTERVAL_MS if before else IMMUNITY_MS) / FASTEST - INEXACT_MS
                if since_ms is not None and not may_be_early and now_ms - since_ms < least_ms:
                    found.append(Violation("E8", f"{key} is asked about {now_ms - since_ms} ms after its beginning, or the last question"))
                # The next start still has to see that store times are ahead, if this step did not end.
                waits[key] = count, now_ms, may_be_early and has_crashed
        self._waits = waits
        return found


class TransactionsWorld:
    """A broker, and what it has answered."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = World(sync_flush=True).start()
        self.handles: dict[Key, str] = {}
        self.decided: dict[Key, int] = {}
        self.truth: dict[Key, Any] = {}
        self.found: list[Violation] = []
        self.last_endings: list[int] = []
        self.ended: set[Key] = set()
        self.asked: dict[Key, int] = {}
        self.promises = Promises()
        self.has_crashed = False
        self.restart_count = 0

    # Operations.

    def send(self) -> None:
        """Half messages, some with a delay."""
        rng, world = self.rng, self.world
        records = [
            world.record(b"x" * rng.choice((5, 300)), keys=["k"]) for _ in range(rng.choice((1, 1, 3)))
        ]
        delay: dict[str, Any] = {"delay_ms": rng.choice((1, 20_000))} if rng.random() < 0.3 else {}
        answer = world.request(
            SendRequest(
                topic=TOPIC, queue_id=rng.randrange(QUEUES), records=records, half=True, **delay
            )
        )
        for record, handle in zip(records, answer.transaction_handles, strict=True):
            key = PRODUCER, 0, record.sequence
            self.handles[key] = handle
            self.truth[key] = rng.choice((COMMIT, ROLL_BACK, None))

    def fill(self) -> None:
        """Plain messages, which make the log grow."""
        for _ in range(3):
            records = [Record(body=bytes(self.rng.choice((10, 20_000))))]
            self.world.request(SendRequest(topic="fill", queue_id=0, records=records))

    def decide(self) -> None:
        """Decisions, some of them again, some of them other than before."""
        if not self.handles:
            return
        keys = self.rng.choices(sorted(self.handles)[-12:], k=self.rng.randint(1, 4))
        self._end([(key, self.rng.choice((COMMIT, ROLL_BACK))) for key in keys])

    def _end(self, ends: list[tuple[Key, Any]]) -> None:
        wanted = [(self.handles[key], decision) for key, decision in ends]
        try:
            results = [result.error_reason for result in self.world.end(*wanted)]
        except ServiceError as error:
            raise_if_disk_failed(error)
            results = [error.reason]
        for (key, decision), reason in zip(ends, results, strict=True):
            if not reason:
                if self.decided.setdefault(key, int(decision)) != int(decision):
                    self._say("E3", f"{key} was answered as {self.decided[key]} and as {decision}")
            elif self.decided.get(key) == int(decision) and not self.world.store.min_position:
                self._say("E3", f"{key} was answered as {decision}, and again with {reason}")

    def pass_time(self) -> None:
        """Producers are asked, if any is there."""
        world, rng = self.world, self.rng
        call = world.wait() if rng.random() < 0.6 else None
        world.turns(rng.choice((1_000, 6_000, 30_000, 31_000)))
        if call is None:
            return
        if not call.answered:
            call.on_close()
            return
        ends = []
        for check in checks_of(call):
            key = PRODUCER, 0, check.message.sequence
            if key in self.decided:
                self._say("E6", f"{key} was answered as {self.decided[key]}, and a producer is asked about it")
            decision = self.truth.get(key)
            if key in self.handles and decision is not None:
                ends.append((key, decision))
        if ends:
            self._end(ends)

    def deliver(self) -> None:
        """What is delayed is delivered, if it is due."""
        while self.world.mover.deliver():
            pass
        self.world.store.flush()

    def set_clock(self) -> None:
        """Somebody sets the wall clock."""
        step_ms = self.rng.choice((-3_600_000, -20_000, 3_600_000, 60_000))
        self.world.clock.wall_offset_ms += step_ms
        if step_ms > 0:
            self.promises.set_ahead()

    def checkpoint(self) -> None:
        """Caches are written."""
        self.world.store.checkpoint()

    def retention(self) -> None:
        """Old segments go."""
        store = self.world.store
        store.checkpoint()
        store.delete_segments_below(store.min_position + self.rng.randint(1, 3) * SEGMENT)

    def restart(self, ends: str = "") -> None:
        """kill -9 or a power cut, or that end; sometimes all files but the log are gone."""
        self.restart_count += 1
        self.asked = {}  # a power cut may take back questions that nobody heard of
        disk = after_the_end(self.world.disk, self.rng, ends)
        if self.rng.random() < 0.3:
            lose_all_but_log(disk)
        self.world.restart(disk)
        self.world.store.flush()

    # What is judged.

    def check(self) -> list[Violation]:
        """What is wrong now."""
        files = {
            path.removeprefix("/s/"): data for path, data in self.world.disk.files("/s").items()
        }
        log = transactions_of(parse_log(files))
        self.last_endings = list(log.endings.values())
        self.ended.update(log.endings)
        for key, count in log.open.items():
            if count < self.asked.get(key, 0):
                self._say("E6", f"{key} was asked about {self.asked[key]} times, now {count}")
        self.asked = dict(log.open)
        found = self.promises.check(log.open, self.world.clock.time_ms, has_crashed=self.has_crashed)
        found += self.found + log.violations + check_answers(log, self.handles, self.decided, self.ended)
        found += [
            Violation("E1", f"{record.sequence} was committed, and is recalled")
            for record in taken_back(self.world.sends._recalls, self.world.store)
        ]
        return found + self._check_told(log)

    def _check_told(self, log: TransactionLog) -> list[Violation]:
        store = self.world.store
        open_ = {known.half.key: known.check_count for known in store.transactions.open_transactions()}
        found = []
        if open_ != log.open:
            found.append(Violation("E6", f"the broker has open {open_}, the log {log.open}"))
        listed = self.world.listed().transactions
        if len(listed) != min(len(open_), 100):
            found.append(Violation("E6", f"{len(listed)} are listed, {len(open_)} are open"))
        for topic, queue_id in ((TOPIC, 0), (TOPIC, 1), (EXPIRED_TOPIC, 0)):
            read = positions_read(store, topic, queue_id)
            wanted = log.visible.get((topic, queue_id), [])
            if read != wanted:
                found.append(Violation("E4", f"{topic}/{queue_id}: {read} are read, not {wanted}"))
        for key in log.open:
            if list(store.find_by_message_id(TOPIC, key)):
                found.append(Violation("E4", f"{key} is open, and found by its id"))
        return found

    def _say(self, invariant: str, message: str) -> None:
        self.found.append(Violation(invariant, message))


def check_transactions(seed: int, fired: Counter[str] | None = None) -> list[Violation]:
    """A script of operations and crashes; what is wrong after each of them. `fired`: counts what has happened."""
    fired = Counter() if fired is None else fired
    world = TransactionsWorld(seed)
    rng = world.rng
    for number in range(STEPS):
        action = rng.choice(
            (
                world.send, world.send, world.send, world.decide, world.decide, world.decide, world.fill, world.pass_time,
                world.pass_time, world.pass_time, world.deliver, world.set_clock, world.checkpoint, world.retention,
            )
        )  # fmt: skip
        may_crash = rng.random() < 0.4
        if may_crash:
            world.world.disk.fail_at(rng.randrange(1, 25), Fault.CRASH)
        world.has_crashed = False
        try:
            action()
        except SimulatedCrash:
            world.has_crashed = True
            fired[f"crash in {action.__name__}"] += 1
        except (StoreError, OSError) as error:
            return [Violation("crash", f"step {number}, {action.__name__}: {error!r}")]
        world.world.disk.plan = None
        if world.has_crashed or may_crash or rng.random() < 0.2:
            world.restart()
        found = world.check()
        fired.update(f"ended as {ending}" for ending in world.last_endings)
        if found:
            step = f"step {number}, {action.__name__}"
            return [item._replace(message=f"{step}: {item.message}") for item in found]
    return []
