"""Groups that fail, retry and die over a simulated disk: crashes come at any operation, answers get lost, and the log is judged afterwards.

    F1   nothing is delivered before its time
    G1   what was answered is there: a send-back has its copy, with the attempt that was told. A message is a dead letter after exactly the
         configured attempts, unless the consumer said so, and a retry is within them. A request that is sent again is done once: no attempt
         of a message has two copies. No recall takes a retry back
    G5   a dead letter is replayed once

The log is read by the checker's own code (`log_files.py`), and judged by `check_retries`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from protomq.v1.dead_letter_service_pb2 import (
    ReplayDeadLettersRequest,
    ReplayDeadLettersResponse,
)
from protomq.v1.group_service_pb2 import SendBackRequest, SendBackResponse
from protomq.v1.record_pb2 import Record
from protomq_broker.alike_failures import ALIKE_MIN
from protomq_broker.dead_letter_service import DeadLetterService
from protomq_broker.recalls import Recalls
from protomq_broker.store.errors import StoreError
from protomq_broker.store.state.group_settings import GroupSettings
from protomq_broker.testing.simdisk import Fault, SimulatedCrash
from tests.support.ended_process import after_the_end, raise_if_disk_failed
from tests.support.forged_recalls import taken_back
from tests.support.retry_world import GROUP, TOPIC, Call, RetryWorld, failed, id_of

from .checker import Violation, check_store_files, parse_log

COPY, DUE = 2 << 8, 1 << 4
STEPS = 40
SEEDS_PER_LONG_LIFE = 20
"""Of so many, one has a second life, of messages that fail until they are dead by the default."""
RETRIES_BY_DEFAULT, ROUNDS_MAX = 16, 400
RETRY, DEAD = "%RETRY%group", "%DLQ%group"
DELAYS_MS = (50, 200, 1_000)
Attempt = tuple[str, int]
"""A message's id, and how often it was handed out."""


class Told(NamedTuple):
    """What an answer said of an attempt: whether it died, and when it may come again at the earliest (0: it died)."""

    is_dead: bool
    ready_ms: int


class RetriesWorld:
    """A broker's parts, what was sent to it, and what its answers said."""

    def __init__(self, seed: int, *, is_default: bool = False) -> None:
        """`is_default`: the group has as many retries as one that nobody has set up; else 0 to 3."""
        self.rng = random.Random(seed)
        self.limit = RETRIES_BY_DEFAULT if is_default else self.rng.randrange(0, 4)
        self.world = RetryWorld(segment=1 << 14)
        self.world.store.groups.put(
            GroupSettings(GROUP, retry_count_max=None if is_default else self.limit, retry_delays_ms=DELAYS_MS)
        )
        self.world.store.flush()
        self.is_patient = is_default
        """Nobody says before the last attempt that a message is dead."""
        self.sent: set[str] = set()
        self.told: dict[Attempt, Told] = {}
        self.may_be: dict[Attempt, Told] = {}
        """Of requests whose answers were lost: they may have been done."""
        self.killed_by_hand: set[str] = set()
        self.lost: list[SendBackRequest] = []
        self.seen: set[Attempt] = set()
        self.found: list[Violation] = []
        self.fired: Counter[str] = Counter()
        self.restart_count = 0
        self._request_id = 0

    # Steps.

    def send(self) -> None:
        """New messages."""
        count = self.rng.randint(1, 6)
        before = len(self.world.read(TOPIC))
        self.world.send(*(b"%09d" % self.rng.randrange(1 << 29) for _ in range(count)))
        self.sent |= {id_of(record) for record in self.world.read(TOPIC, 0, before)}

    def fail(self) -> None:
        """Messages that the group got and has not given back, some of them, fail."""
        attempts = {**self.told, **self.may_be}
        waiting = [
            record
            for record in [*self.world.read(TOPIC), *self.world.read(RETRY)]
            if (id_of(record), record.transit.attempt + 1) not in attempts
            and not record.transit.replayed_group
        ]
        if not waiting:
            return
        if self.rng.random() < 0.5:
            chosen = _run_from(waiting, self.rng.randrange(len(waiting)))
            self.fired["sent back in a run"] += len(chosen) if len(chosen) >= ALIKE_MIN else 0
        else:
            chosen = self.rng.sample(waiting, min(len(waiting), self.rng.randint(1, 5)))
        by_hand = not self.is_patient and self.rng.random() < 0.1
        fields = {"dead_letter": True} if by_hand else {}
        if by_hand:
            self.killed_by_hand |= {id_of(record) for record in chosen}
        self._request_id += 1
        request = SendBackRequest(
            consumer_group=GROUP,
            messages=[failed(record, error="no", **fields) for record in chosen],
            request_id=self._request_id,
        )
        self._ask(request, chosen)

    def _ask(self, request: SendBackRequest, chosen: Iterable[Record]) -> None:
        asked_ms = self.world.clock.time_ms
        by_hand = request.messages[0].dead_letter
        plans: dict[Attempt, Told] = {}
        for record in chosen:
            attempt = record.transit.attempt + 1
            is_dead = by_hand or attempt > self.limit
            delay_ms = 0 if is_dead else DELAYS_MS[min(attempt, len(DELAYS_MS)) - 1]
            plans[id_of(record), attempt] = Told(is_dead, asked_ms + delay_ms)
        for key, plan in plans.items():
            self.may_be.setdefault(key, plan)
        try:
            call = self.world.call(request)
            self.world.store.flush()
        except (StoreError, OSError):
            self.lost.append(request)
            raise
        except SimulatedCrash:
            self.lost.append(request)
            self.fired["killed while messages were sent back"] += 1
            raise
        if not isinstance(call.outcome, bytes):
            self.lost.append(request)
            raise_if_disk_failed(call.outcome)
            self.found.append(Violation("G1", f"refused: {call.outcome!r}"))
            return
        answer = SendBackResponse.FromString(call.outcome)
        self.fired["sent back"] += len(answer.results)
        self.fired["dead"] += sum(1 for result in answer.results if result.dead_letter)
        for (key, plan), result in zip(plans.items(), answer.results, strict=True):
            del self.may_be[key]
            self.told[key] = plan
            if (result.attempt, result.dead_letter) != (key[1], plan.is_dead):
                self.found.append(Violation("G1", f"{key}: the answer is {result}, not {plan} with the limit {self.limit}"))  # fmt: skip
        if self.rng.random() < 0.3:  # the answer is lost on its way
            self.lost.append(request)

    def send_again(self) -> None:
        """A request whose answer was lost."""
        if not self.lost:
            return
        request = self.lost.pop(self.rng.randrange(len(self.lost)))
        self.lost.append(request)  # until it comes through
        call = self.world.call(request)
        self.world.store.flush()
        self.lost.remove(request)
        if not isinstance(call.outcome, bytes):
            self.lost.append(request)
            raise_if_disk_failed(call.outcome)
            self.found.append(Violation("G1", f"sent again, refused: {call.outcome!r}"))
            return
        answer = SendBackResponse.FromString(call.outcome)
        self.fired["known when it was sent again"] += answer.repeated_request
        self.fired["done when it was sent again"] += not answer.repeated_request
        for message, result in zip(request.messages, answer.results, strict=True):
            key = message.message_id, result.attempt
            plan = self.may_be.pop(key, None)
            if plan is not None:
                self.told[key] = plan

    def deliver(self) -> None:
        """Time passes; what is due is delivered."""
        self.world.deliver(self.rng.choice((1, 49, 60, 250, 1_100)))

    def replay(self) -> None:
        """Some dead letters, or all."""
        if self.world.store.topics.find(DEAD) is None:
            return
        world = self.world
        request = ReplayDeadLettersRequest(consumer_group=GROUP, end_offset=self.rng.choice((0, 1, 3)))
        call = Call(request.SerializeToString(), world.lane)
        service = DeadLetterService(world.store, world.writer, world.permit, world.changes, world.clock)
        service.replay_dead_letters(call)  # type: ignore[arg-type]
        world.store.flush()
        if not isinstance(call.outcome, bytes):
            raise_if_disk_failed(call.outcome)
            self.found.append(Violation("G5", f"a replay is refused: {call.outcome!r}"))
            return
        answer = ReplayDeadLettersResponse.FromString(call.outcome)
        self.fired["replayed"] += answer.replayed_count
        self.fired["replayed before"] += answer.known_count

    def checkpoint(self) -> None:
        """Caches are written."""
        self.world.store.checkpoint()

    def restart(self, ends: str = "") -> None:
        """kill -9, or a power cut, without a warning; or that end."""
        self.restart_count += 1
        disk = self.world.disk
        disk.plan = None
        self.world.restart(after_the_end(disk, self.rng, ends))
        self.world.store.flush()

    # Judgement.

    def look(self) -> None:
        """F1, as consumers see it."""
        now_ms = self.world.clock.time_ms
        for record in self.world.read(RETRY):
            key = id_of(record), record.transit.attempt
            if key in self.seen:
                continue
            self.seen.add(key)
            self.fired["delivered again"] += 1
            plan = self.told.get(key) or self.may_be.get(key)
            if plan is None or now_ms < plan.ready_ms:
                self.found.append(Violation("F1", f"{key} is delivered at {now_ms}, {plan}"))

    def check(self) -> None:
        """All rules, by the log."""
        files = {path.removeprefix("/s/"): data for path, data in self.world.disk.files("/s").items()}
        records = [each.record for each in parse_log(files).records]
        self.found += check_retries(records, self.limit, self.told, self.killed_by_hand)
        world = self.world
        recalls = Recalls(world.store, world.config, "b", world.writer, world.waiting, world.log_time)
        for record in taken_back(recalls, world.store):
            self.found.append(Violation("G1", f"{id_of(record)} waits for its retry, and is recalled"))

    def end(self) -> list[Violation]:
        """All falls due, and the broker stops: what is wrong."""
        self.world.deliver(10**7)
        self.look()
        delivered = Counter((id_of(each), each.transit.attempt) for each in self.world.read(RETRY))
        for key, plan in self.told.items():
            if not plan.is_dead and delivered[key] != 1:
                self.found.append(Violation("G1", f"{key} is delivered {delivered[key]} times"))
        self.world.store.close()
        files = {path.removeprefix("/s/"): data for path, data in self.world.disk.files("/s").items()}
        return self.found + check_store_files(files)


def check_retries(
    records: Iterable[Record], limit: int, told: dict[Attempt, Told], killed_by_hand: set[str]
) -> list[Violation]:
    """G1 and G5 over the records of a log."""
    found: list[Violation] = []
    made: Counter[tuple[str, Attempt]] = Counter()
    replayed: Counter[str] = Counter()
    for record in records:
        if record.flags >> 8 & 7 != COPY >> 8:
            continue
        key = id_of(record), record.transit.attempt
        if record.transit.replayed_group:
            replayed[key[0]] += 1
        elif record.topic == DEAD:
            made[DEAD, key] += 1
            if key[1] != limit + 1 and key[0] not in killed_by_hand:
                found.append(Violation("G1", f"{key} is a dead letter, the limit is {limit} retries"))
        elif record.topic == RETRY and record.flags & DUE:
            made[RETRY, key] += 1
            if not 1 <= key[1] <= limit:
                found.append(Violation("G1", f"{key} is retried, the limit is {limit} retries"))
    for (topic, key), count in made.items():
        if count > 1:
            found.append(Violation("G1", f"{key} has {count} copies in {topic}"))
    for key, plan in told.items():
        topic = DEAD if plan.is_dead else RETRY
        if not made[topic, key]:
            found.append(Violation("G1", f"{key} was answered, and is not in {topic}"))
    found += [Violation("G5", f"{name} was replayed {count} times") for name, count in replayed.items() if count > 1]
    return found


def _run_from(records: Sequence[Record], first: int) -> list[Record]:
    """The record at an index, and those that follow it in its queue."""
    run = [records[first]]
    for record in records[first + 1 :]:
        if (record.topic, record.queue_offset) != (run[0].topic, run[-1].queue_offset + 1):
            break
        run.append(record)
    return run


def check_send_backs(seed: int, fired: Counter[str] | None = None) -> list[Violation]:
    """A script of steps and crashes, then all that is due; what is wrong after each. `fired`: counts what happened."""
    retries = RetriesWorld(seed)
    long_lived = RetriesWorld(seed, is_default=True)
    try:
        return _run(retries) or (_run_to_the_last(long_lived) if seed % SEEDS_PER_LONG_LIFE == 0 else [])
    finally:
        if fired is not None:
            fired.update(retries.fired)
            fired["17 deliveries, and dead"] += long_lived.fired["dead"]


def _run_to_the_last(retries: RetriesWorld) -> list[Violation]:
    """A few messages fail again and again, through crashes, until all are dead: after 17 deliveries each."""
    retries.send()
    retries.send()
    steps = (retries.fail, retries.send_again, lambda: retries.world.deliver(DELAYS_MS[-1]))
    for _ in range(ROUNDS_MAX):
        for step in steps:
            found = _step(retries, step, may_end=retries.rng.random() < 0.1)
            if found:
                return found
        alive = retries.sent - {id_of(record) for record in retries.world.read(DEAD)}
        if not alive:
            break
    else:
        return [Violation("G1", f"after {ROUNDS_MAX} rounds not all of {len(retries.sent)} messages are dead")]
    attempts = Counter(id_of(record) for record in retries.world.read(RETRY))
    for name in retries.sent:
        if attempts[name] != RETRIES_BY_DEFAULT:
            retries.found.append(Violation("G1", f"{name} is dead, and came again {attempts[name]} times"))
    return retries.end()


def _step(retries: RetriesWorld, step: Callable[[], None], *, may_end: bool) -> list[Violation]:
    """One step, within which the process may end; what is wrong after it."""
    if may_end:
        retries.world.disk.fail_at(retries.rng.randrange(1, 12), Fault.CRASH)
    try:
        step()
    except SimulatedCrash:
        retries.restart()
    except (StoreError, OSError) as error:
        return [Violation("crash", repr(error))]
    retries.world.disk.plan = None
    retries.look()
    retries.check()
    return retries.found


def _run(retries: RetriesWorld) -> list[Violation]:
    rng = retries.rng
    steps = (
        retries.send, retries.fail, retries.fail, retries.fail, retries.send_again, retries.deliver, retries.deliver,
        retries.replay, retries.checkpoint, retries.restart,
    )  # fmt: skip
    for number in range(STEPS):
        step = rng.choice(steps)
        found = _step(retries, step, may_end=rng.random() < 0.25 and step != retries.restart)
        if found:
            return [item._replace(message=f"step {number}, {step.__name__}: {item.message}") for item in found]
    return retries.end()
