"""Retries, delays and transactions with real processes: clients work while a broker is killed with SIGKILL again and again, or while the
lead of three changes (`broker_places`). Of the two members of the group that retries, one is a process that is killed, too, and so is one
of the producers of transactions.

    G1   a failed message is delivered once for each attempt, or more often; after the last one that its group allows it is a dead letter,
         and no other message is
    G2   a dead letter has its first message's id, key and topic, and the last error
    F1   nothing comes before its time: no delayed message, and no retry
    F2   what was delayed, and answered so, stands in its queue once
    F3   what is delayed, by a time or by a level, comes at most LATE_S late, and as long as its brokers were away
    F4   a recall that won: never delivered; one that lost: delivered
    E1   a transaction that ended as committed is delivered, and stands in its queue once. Work is done for half messages that all copies
         in sync have, and for no other; none of these is taken back
    E2   one that was rolled back is never delivered
    E3   a first decision is final: the other one is refused, and the same one is answered, however late
    E5   a transaction that nobody decided is asked about until somebody does, whichever producer of the group that is
    E6   once a decision was answered, its transaction is asked about once more at most; what is under way then does not count

A call that a kill fell into, and that was not answered, may or may not have happened: nothing is asked of it but what holds for both.
A copy for a retry is made by whoever gives the message back: when a kill takes a commit, a message comes twice, and so may its dead letter.
That is counted. So is what a consumer had in hand when it was killed, and what its group then gets again. Times are of the machine's
monotonic clock, which all its processes have: from before a message is sent until it is there. Where wall clocks are set, log time follows
them by a tenth; a message may be early by that.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO, Final, Literal

from protomq import (
    Admin,
    DelayLevel,
    Message,
    Producer,
    PullConsumer,
    PushConsumer,
    SendResult,
    TransactionCheck,
    TransactionDecision,
    TransactionProducer,
)
from protomq.errors import (
    NoRouteError,
    ProtomqError,
    TopicNotFoundError,
    TransactionEndedError,
    TransactionNotFoundError,
)

from .broker_places import LATER_S, OpenPlace, Place, is_acknowledged, standalone
from .checker import Violation
from .pace import measured_pace

PATIENCE_S: Final = 120.0
GROUP: Final = "workers"
TOPIC: Final = "work"
COMMIT_INTERVAL_S: Final = 0.2
RETRIES: Final = 16
RETRY_DELAYS_S: Final = (0.1, 0.2, 0.3)
SEND_PAUSE_S: Final = 0.04
"""Between messages that are retried: each is delivered seven times."""
DELAY_MAX_S: Final = 1.5
LEVELS_S: Final = (0.2, 0.5, 1.0, 1.4)
PART_BY_LEVEL: Final = 0.3
PART_LATER: Final = 0.02
LATE_S: Final = 1.0
"""How late a message may be before it counts as one that does not come."""


@dataclass
class World:
    """What the clients of a run know together."""

    seed: int
    retries: int = 0
    """Of its group."""
    outages_s: list[tuple[float, float]] = field(default_factory=list)
    paces: list[tuple[float, float]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    stopping: threading.Event = field(default_factory=threading.Event)
    found: list[Violation] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def say(self, rule: str, text: str) -> None:
        """Something is wrong."""
        with self.lock:
            self.found.append(Violation(rule, text))

    def count(self, what: str, by: int = 1) -> None:
        """Something took place."""
        with self.lock:
            self.counts[what] += by

    def draw(self, body: bytes) -> random.Random:
        """The same numbers for the same message in each run of a seed."""
        return random.Random(f"{self.seed} {body.decode()}")

    def hurt_under(self, place: Place, rounds: int, what: str) -> None:
        """Does the brokers harm, each time once 5 to 60 more of `what` took place."""
        rng = random.Random(self.seed)
        for _ in range(rounds):
            goal = self.counts[what] + rng.randint(5, 60)
            deadline_s = time.monotonic() + PATIENCE_S
            while self.counts[what] < goal and not self.found:
                if time.monotonic() > deadline_s:
                    self.say("I2", f"{self.counts[what]} {what}, and no more for {PATIENCE_S:.0f} s")
                self.stopping.wait(0.01)
            if self.found:
                return
            begin_s = time.monotonic()
            self.count(place.hurt())
            self.outages_s.append((begin_s, time.monotonic()))
        place.end_hurt()

    def note_pace(self, time_s: float, pace: float) -> None:
        """How busy the machine is."""
        with self.lock:
            self.paces.append((time_s, pace))

    def allowed_late_s(self, begin_s: float, end_s: float) -> float:
        """How late something may be that was to come between these times: a second, longer on a busy machine, and outages."""
        paces = [pace for time_s, pace in self.paces if begin_s - 1 <= time_s <= end_s + 1]
        away_s = sum(back_s - away_s for away_s, back_s in self.outages_s if away_s <= end_s and begin_s <= back_s)
        return (LATE_S + away_s) * (sum(paces) / len(paces) if paces else 1.0)

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Until it is so; for PATIENCE_S at most: the caller then says what is missing."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not is_done() and time.monotonic() < deadline_s:
            time.sleep(0.02)


@contextmanager
def _at_work(world: World, *work: Callable[[], None]) -> Iterator[None]:
    """Clients in threads, which end when the world is stopping."""
    threads = [threading.Thread(target=each, daemon=True) for each in work]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        world.stopping.set()
        for thread in threads:
            thread.join(PATIENCE_S)
            if thread.is_alive():
                world.say("I2", "a client does not end")


# --- retries ----------------------------------------------------------------------------------------


@dataclass
class _Deliveries:
    """What listeners were given, by (body, attempt): how often, when first, when that attempt first failed, and whether any ended it.

    A message whose only listener was killed has come, and is not ended: it must come again.
    """

    ended: set[tuple[bytes, int]] = field(default_factory=set)
    times: Counter[tuple[bytes, int]] = field(default_factory=Counter)
    came_s: dict[tuple[bytes, int], float] = field(default_factory=dict)
    failed_s: dict[tuple[bytes, int], float] = field(default_factory=dict)

    def note(self, step: str, key: tuple[bytes, int], time_s: float) -> None:
        """A message `came` to a listener, or `failed` or was `done` there. Steps of several processes come in any order."""
        if step == "came":
            self.times[key] += 1
        else:
            self.ended.add(key)
        steps = {"came": self.came_s, "failed": self.failed_s}.get(step)
        if steps is not None:
            steps[key] = min(steps.get(key, time_s), time_s)


def failures_of(world: World, body: bytes) -> int:
    """How many deliveries of a message fail: some, or all that the group allows, or more."""
    limit = world.retries
    return world.draw(body).choice((0, 0, 0, 1, 2, min(5, limit), limit, limit + 1, limit + 4))


def retry_rounds(seed: int, rounds: int, folder: Path, open_place: OpenPlace = standalone) -> World:
    """Listeners that fail by seed, one of them in a process that is killed."""
    world, seen = World(seed, RETRIES), _Deliveries()
    sent: dict[bytes, tuple[str, str]] = {}
    group, topic = GROUP, TOPIC

    def note(step: str, body: bytes, attempt: int, time_s: float) -> None:
        with world.lock:
            seen.note(step, (body, attempt), time_s)
        if step == "came":
            world.count("deliveries")

    def listen(message: Message) -> None:
        note("came", message.body, message.attempt, time.monotonic())
        if message.attempt < failures_of(world, message.body):
            note("failed", message.body, message.attempt, time.monotonic())
            raise ValueError(f"no {message.attempt}")
        note("done", message.body, message.attempt, time.monotonic())

    def produce() -> None:
        with Producer(namesrv=place.namesrv) as producer:
            number = 0
            while not world.stopping.is_set():
                body, number = b"%d" % number, number + 1
                try:
                    result = producer.send(topic, body, key=f"k{number}")
                except ProtomqError:
                    continue
                if is_acknowledged(result):
                    with world.lock:
                        sent[body] = (result.message_id, f"k{number}")
                world.stopping.wait(SEND_PAUSE_S)

    with open_place(seed, folder, {}) as place:
        with Admin(namesrv=place.namesrv) as admin:
            admin.create_topic(topic, write_queues=2, read_queues=2)
            delays_ms = [round(delay_s * 1000) for delay_s in RETRY_DELAYS_S]
            admin.set_group(group, retry_count_max=RETRIES, retry_delays_ms=delays_ms)
        consumer = PushConsumer(group, namesrv=place.namesrv, commit_interval_s=COMMIT_INTERVAL_S, concurrency=4)
        consumer.on(topic)(listen)
        with consumer:
            with _at_work(world, produce, lambda: _kill_consumers(world, place.namesrv, note)):
                world.hurt_under(place, rounds, "deliveries")
                world.wait(lambda: world.counts["consumers killed"] >= -(-rounds // 2) or bool(world.found))
                if world.counts["consumers killed"] < -(-rounds // 2) and not world.found:
                    world.say("I2", f"no consumer got messages for {PATIENCE_S:.0f} s")
            buried = {body for body in sent if failures_of(world, body) > RETRIES}
            wanted = {(body, attempt) for body in sent for attempt in range(min(failures_of(world, body), RETRIES) + 1)}
            world.wait(lambda: wanted <= seen.ended and not consumer.counts.open)
        dead = _dead_letters(place, group, buried)
        early_max_s = place.early_max_s()
    _judge_retries(world, seen, sent, wanted, dead, early_max_s)
    return world


def _kill_consumers(
    world: World, namesrv: str, note: Callable[[str, bytes, int, float], None]
) -> None:
    """Consumers in processes of their own, one after the other: each is killed once it was given 5 to 40 messages, or when all ends."""
    rng = random.Random(f"{world.seed} consumers")
    while not world.stopping.is_set():
        goal, open_ = rng.randint(5, 40), Counter[tuple[bytes, int]]()
        with _process(world, "failing_consumer", namesrv, str(world.retries)) as (consumer, lines):
            given_count = 0
            for line in lines:
                step, body, attempt, time_s = line.split()
                key = body, int(attempt)
                note(step.decode(), *key, float(time_s))
                open_[key] += 1 if step == b"came" else -1
                given_count += step == b"came"
                if given_count >= goal:
                    consumer.kill()  # what it wrote before is read to the end
        if given_count:
            world.count("consumers killed")
        world.count("killed with a message in hand", sum(open_.values()))


@contextmanager
def _process(world: World, module: str, namesrv: str, argument: str) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """A client in a process of its own, and the lines that it writes. It is killed when all ends."""
    command = [sys.executable, "-m", f"tests.chaos.{module}", namesrv, str(world.seed), argument]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as process:
        threading.Thread(target=_kill_at_the_end, args=(world, process), daemon=True).start()
        assert process.stdout is not None
        yield process, process.stdout


def _kill_at_the_end(world: World, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        if world.stopping.wait(0.1):
            process.kill()
            return


def _dead_letters(place: Place, group: str, wanted: set[bytes]) -> list[Message]:
    """All that there are, once these are among them or PATIENCE_S is over. Where none was made there is no topic."""
    found: list[Message] = []
    deadline_s = time.monotonic() + PATIENCE_S
    with PullConsumer(namesrv=place.namesrv) as reader:
        while wanted - {one.body for one in found} and time.monotonic() < deadline_s:
            try:
                if not reader.assignment():
                    reader.subscribe(f"%DLQ%{group}")
                found += reader.poll(0.5)
            except (NoRouteError, TopicNotFoundError):
                time.sleep(0.2)
        return found + (reader.poll(1.0) if found else [])


def _judge_retries(
    world: World,
    seen: _Deliveries,
    sent: dict[bytes, tuple[str, str]],
    wanted: set[tuple[bytes, int]],
    dead: list[Message],
    early_max_s: float,
) -> None:
    missing = sorted(wanted - seen.ended)
    if missing:
        world.say("G1", f"{len(missing)} deliveries did not take place, or were not ended by any listener: {missing[:5]}")
    for (body, attempt), came_s in seen.came_s.items():
        if not attempt:
            continue
        before_s = seen.failed_s.get((body, attempt - 1))
        wait_s = RETRY_DELAYS_S[min(attempt, len(RETRY_DELAYS_S)) - 1]
        if before_s is None:
            world.say("G1", f"{body!r} came as attempt {attempt}, and the attempt before it had not failed")
        elif came_s < before_s + wait_s - early_max_s:
            world.say("F1", f"{body!r} came {before_s + wait_s - came_s:.3f} s early as attempt {attempt}")
    for body, attempt in seen.times:
        if attempt > min(failures_of(world, body), RETRIES):
            world.say("G1", f"{body!r} was delivered as attempt {attempt}, of {failures_of(world, body)} failures")
    buried = Counter(one.body for one in dead)
    for body in sent:
        last = seen.times[body, RETRIES] if failures_of(world, body) > RETRIES else 0
        if not min(last, 1) <= buried[body] <= last:
            world.say("G1", f"{body!r} failed for the last time {last} times, and is {buried[body]} dead letters")
    for one in dead:
        error = f"ValueError: no {RETRIES}"
        if one.attempt != RETRIES + 1 or one.last_error != error or one.origin is None or one.origin.topic != "work":
            world.say("G2", f"{one.body!r} is a dead letter of {one.origin}, attempt {one.attempt}: {one.last_error}")
        if one.body in sent and (one.message_id, one.key) != sent[one.body]:
            world.say("G2", f"{one.body!r} was {sent[one.body]}, and is {one.message_id}, {one.key}")
    world.counts["sent"] = len(sent)
    world.counts["dead letters"] = len(dead)
    world.counts["deliveries twice"] = sum(times - 1 for times in seen.times.values())


# --- delays -----------------------------------------------------------------------------------------


@dataclass
class _Delayed:
    """What is known of a message: the earliest time that it may come, whether it was acknowledged, and how a recall of it was."""

    due_s: float
    latest_due_s: float = 0.0
    """Its delay counts from when the broker gets it: from this time at the latest."""
    is_sent: bool = False
    is_later: bool = False
    """Due when all is over."""
    recalled: Literal["", "won", "lost", "unknown"] = ""

    def must_come(self) -> bool:
        """Whether it is to be delivered, whatever a kill fell into."""
        return self.is_sent and not self.is_later and self.recalled in ("", "lost")


def delay_rounds(seed: int, rounds: int, folder: Path, open_place: OpenPlace = standalone) -> World:
    """Messages with delays of up to DELAY_MAX_S, some of them recalled; a few are due long after the end."""
    world = World(seed)
    topic = "reminders"
    sent: dict[bytes, _Delayed] = {}
    came: Counter[bytes] = Counter()
    came_s: dict[bytes, float] = {}

    def produce(name: str) -> None:
        number = 0
        with Producer(namesrv=place.namesrv) as producer:
            while not world.stopping.is_set():
                body, number = f"{name} {number}".encode(), number + 1
                rng = world.draw(body)
                is_later = rng.random() < PART_LATER
                level = rng.randrange(len(LEVELS_S)) if rng.random() < PART_BY_LEVEL and not is_later else None
                delay_s = LATER_S if is_later else rng.uniform(0.001, DELAY_MAX_S) if level is None else LEVELS_S[level]
                told = sent[body] = _Delayed(time.monotonic() + delay_s, is_later=is_later)
                try:
                    result = producer.send(topic, body, delay=timedelta(seconds=delay_s) if level is None else DelayLevel(level + 1))
                except ProtomqError:
                    continue
                if not is_acknowledged(result):
                    continue
                handle = result.recall_handle
                told.latest_due_s = time.monotonic() + delay_s
                told.is_sent = True
                world.count("delayed")
                world.count("delayed by a level", level is not None)
                if rng.random() < 0.3:
                    told.recalled = _recall(producer, handle, rng.uniform(0.0, min(delay_s, 0.2)))

    def _recall(producer: Producer, handle: str, wait_s: float) -> Literal["won", "lost", "unknown"]:
        world.stopping.wait(wait_s)
        answer: Literal["won", "lost", "unknown"]
        try:
            answer = "won" if producer.recall(topic, handle) else "lost"
        except ProtomqError:
            answer = "unknown"
        world.count(f"recalls {answer}")
        return answer

    def consume() -> None:
        with PullConsumer(namesrv=place.namesrv) as consumer:
            consumer.subscribe(topic)
            while not is_over.is_set():
                try:
                    messages = consumer.poll(0.2)
                except ProtomqError:
                    is_over.wait(0.05)
                    continue
                for message in messages:
                    early_s = sent[message.body].due_s - time.monotonic()
                    if early_s > place.early_max_s():
                        world.say("F1", f"{message.body!r} came {early_s:.3f} s early")
                    came[message.body] += 1
                    # When it came to its queue: a consumer may take seconds to find a broker that is back.
                    now_s, ago_s = time.monotonic(), time.time() - message.store_time_ms / 1000
                    came_s.setdefault(message.body, now_s - max(ago_s, 0.0))

    is_over = threading.Event()
    levels = {"PROTOMQ_DELAY_LEVELS": " ".join(f"{round(level_s * 1000)}ms" for level_s in LEVELS_S)}
    with open_place(seed, folder, levels) as place, measured_pace(world.note_pace):
        with Admin(namesrv=place.namesrv) as admin:
            admin.create_topic(topic, write_queues=2, read_queues=2)
        reader = threading.Thread(target=consume, daemon=True)
        reader.start()
        with _at_work(world, partial(produce, "a"), partial(produce, "b"), partial(produce, "c")):
            world.hurt_under(place, rounds, "delayed")
        world.wait(lambda: all(came[body] for body, told in sent.items() if told.must_come()))
        last_s = max((each.due_s for each in sent.values() if not each.is_later), default=0.0)
        late_max_s = LATE_S + place.early_max_s()
        world.wait(lambda: time.monotonic() > last_s + late_max_s)
        is_over.set()
        reader.join(PATIENCE_S)
        stored = stored_bodies(place, topic)
    for body, told in sent.items():
        if told.must_come() and body in came_s:
            late_s = came_s[body] - told.latest_due_s
            allowed_s = late_max_s - LATE_S + world.allowed_late_s(told.latest_due_s, came_s[body])
            world.counts["late ms, longest"] = max(world.counts["late ms, longest"], round(late_s * 1000))
            if late_s > allowed_s:
                world.say("F3", f"{body!r} came {late_s:.2f} s late, {allowed_s:.2f} s are allowed")
        times = stored[body]
        if times > 1 or (told.must_come() and times != 1):
            world.say("F4" if told.recalled == "lost" else "F2", f"{body!r} stands in its queue {times} times: {told}")
        elif told.must_come() and not came[body]:
            world.say("F2", f"{body!r} is stored, and its consumer did not get it")
        if told.recalled == "won" and (times or came[body]):
            world.say("F4", f"{body!r} was recalled, and delivered")
    world.counts["delivered"] = len(came)
    return world


def stored_bodies(place: Place, topic: str) -> Counter[bytes]:
    """How often each message stands in the queues of a topic, from their first to their last."""
    found: Counter[bytes] = Counter()
    with PullConsumer(namesrv=place.namesrv) as reader:
        left = {queue: end for queue in reader.queues(topic) if (end := reader.queue_range(queue)[1])}
        if left:
            reader.subscribe(topic)
        deadline_s = time.monotonic() + PATIENCE_S
        while left and time.monotonic() < deadline_s:
            for message in reader.poll(1.0):
                found[message.body] += 1
                if message.queue_offset + 1 >= left.get(message.queue, message.queue_offset + 2):
                    del left[message.queue]
    return found


# --- transactions -----------------------------------------------------------------------------------


COMMIT, ROLL_BACK, UNKNOWN = TransactionDecision.COMMIT, TransactionDecision.ROLL_BACK, TransactionDecision.UNKNOWN
OFTEN: Final = {
    "PROTOMQ_TRANSACTION_TIMEOUT_MS": "300",
    "PROTOMQ_TRANSACTION_CHECK_INTERVAL_MS": "300",
    "PROTOMQ_TRANSACTION_CHECK_MAX": "1000",
}


BOOKINGS: Final = "bookings"
DESK: Final = "desk"
PART_DECIDED: Final = 0.8
"""Of the others a producer says that it does not know. So of all, 60 of 100 are committed, and 20 rolled back, by who sent them."""
PART_COMMITTED: Final = 0.75
LATE_END_S: Final = (0.1, 2.0)
"""After which a producer says after all what is to become of such a message: before or after others of its group were asked."""


def decision_on(world: World, body: bytes) -> TransactionDecision:
    """What the database of the producers says of a message, whoever asks."""
    return COMMIT if world.draw(body).random() < PART_COMMITTED else ROLL_BACK


def first_word_on(world: World, body: bytes) -> TransactionDecision:
    """What who sends a message says of it at once."""
    return decision_on(world, body) if world.draw(body + b" work").random() < PART_DECIDED else UNKNOWN


def _open_transactions(admin: Admin) -> str:
    """How many, or why nobody can say; "" if there are none."""
    try:
        count = len(list(admin.list_transactions()))
    except ProtomqError as error:  # the lead is changing still
        return f"unknown ({error})"
    return str(count) if count else ""


def _kill_producers(world: World, namesrv: str, note: Callable[[str, bytes], None]) -> None:
    """Producers in processes of their own, one after the other: each is killed as it decides a transaction, or when all ends."""
    rng, number = random.Random(f"{world.seed} producers"), 0
    while not world.stopping.is_set():
        goal, open_, number = rng.randint(3, 30), set[bytes](), number + 1
        with _process(world, "dying_producer", namesrv, f"process-{number}") as (producer, lines):
            half_count = 0
            for line in lines:
                step, body = line.rstrip().split(b" ", 1)
                note(step.decode(), body)
                half_count += step == b"half"
                (open_.add if step == b"half" else open_.discard)(body)
                if half_count >= goal and step == b"half":
                    producer.kill()  # what it wrote before is read to the end
        if half_count:
            world.count("producers killed")
        world.count("killed with a transaction in hand", len(open_))


def transaction_rounds(seed: int, rounds: int, folder: Path, open_place: OpenPlace = standalone) -> World:
    """Commits, rolls back, and leaves open; producers go, or are killed, in the middle of their work: others of their group answer."""
    world = World(seed)
    topic, group = BOOKINGS, DESK
    decided: dict[bytes, TransactionDecision] = {}
    answered_s: dict[bytes, float] = {}
    """When a decision was answered."""
    late_checks: Counter[bytes] = Counter()
    """Questions that were not under way when a decision was answered, by message."""
    halves: set[bytes] = set()
    tried: set[bytes] = set()

    def check(asked: TransactionCheck) -> TransactionDecision:
        world.count("checks")
        ended_s = answered_s.get(asked.message.body)
        if ended_s is not None:
            now_s = time.monotonic()
            is_late = now_s - ended_s > world.allowed_late_s(ended_s, now_s)
            with world.lock:
                late_checks[asked.message.body] += is_late
            world.count("checks after a decision")
        return decision_on(world, asked.message.body)

    def end_late(producer: TransactionProducer, half: SendResult, body: bytes) -> None:
        try:
            producer.end(half, decision_on(world, body))
        except TransactionEndedError as error:
            world.say("E3", f"{body!r} ended otherwise: {error}")
        except ProtomqError:
            world.count("late decisions without an answer")
        else:
            world.count("late decisions")

    def contradict(producer: TransactionProducer, half: SendResult, decision: TransactionDecision) -> None:
        other = ROLL_BACK if decision is COMMIT else COMMIT
        try:
            producer.end(half, other)
        except TransactionEndedError:
            world.count("contradictions refused")
        except ProtomqError:
            world.count("contradictions without an answer")
        else:
            world.say("E3", f"{half.message_id} ended as {decision}, and then as {other}")

    def produce(name: str) -> None:
        number = 0
        late: list[tuple[float, SendResult, bytes]] = []
        while not world.stopping.is_set():
            with TransactionProducer(group, check, topics=[topic], namesrv=place.namesrv) as producer:
                for _ in range(30):
                    body, number = f"{name} {number}".encode(), number + 1
                    rng = world.draw(body + b" late")
                    decision = first_word_on(world, body)
                    tried.add(body)
                    for _, half, other in [each for each in late if each[0] < time.monotonic()]:
                        end_late(producer, half, other)
                    late = [each for each in late if each[0] >= time.monotonic()]

                    done: list[SendResult] = []

                    def work(half: SendResult, said: TransactionDecision = decision, into: list[SendResult] = done) -> TransactionDecision:
                        into.append(half)
                        return said

                    try:
                        told = producer.send(topic, body, execute=work)
                    except ProtomqError as error:
                        if done and error.definite and isinstance(error, TransactionEndedError):
                            world.say("E3", f"{body!r}: {error}")
                        if done and isinstance(error, TransactionNotFoundError):
                            world.say("E1", f"the work for {body!r} was done, and its half message is not there: {error}")
                        continue
                    if bool(done) != is_acknowledged(told.half):
                        world.say("E1", f"{told.half!r}: its work was {'done' if done else 'not done'}")
                    if not done:
                        world.count("halves that were not confirmed")
                        continue
                    world.count("halves")
                    halves.add(body)
                    if decision is UNKNOWN and rng.random() < 0.5:
                        late.append((time.monotonic() + rng.uniform(*LATE_END_S), told.half, body))
                    elif told.is_ended:
                        decided[body] = decision
                        answered_s[body] = time.monotonic()
                        if rng.random() < 0.1:
                            contradict(producer, told.half, decision)
                    if world.stopping.is_set():
                        return

    def note(step: str, body: bytes) -> None:
        tried.add(body)
        if step == "half":
            halves.add(body)
            world.count("halves")
        elif step == "ended":
            decided[body], answered_s[body] = decision_on(world, body), time.monotonic()

    with open_place(seed, folder, OFTEN) as place, measured_pace(world.note_pace):
        with Admin(namesrv=place.namesrv) as admin:
            admin.create_topic(topic, write_queues=2, read_queues=2)
        with _at_work(world, partial(produce, "a"), partial(produce, "b"), lambda: _kill_producers(world, place.namesrv, note)):
            world.hurt_under(place, rounds, "halves")
            world.wait(lambda: world.counts["producers killed"] >= -(-rounds // 4) or bool(world.found))
            if world.counts["producers killed"] < -(-rounds // 4) and not world.found:
                world.say("I2", f"no producer sent anything for {PATIENCE_S:.0f} s")
        with (
            TransactionProducer(group, check, topics=[topic], namesrv=place.namesrv),
            Admin(namesrv=place.namesrv) as admin,
        ):
            world.wait(lambda: not _open_transactions(admin))
            left = _open_transactions(admin)
        if left:
            world.say("E5", f"{left} transactions are open, {PATIENCE_S:.0f} s after the last kill")
        stored = stored_bodies(place, topic)
    for body in tried:
        is_committed, times = decision_on(world, body) is COMMIT, stored[body]
        if times and not is_committed:
            world.say("E2", f"{body!r} was to be rolled back, and stands in its queue {times} times")
        elif times > 1 or (is_committed and body in halves and times != 1):
            world.say("E1", f"{body!r} was to be committed, and stands in its queue {times} times")
    for body, times in late_checks.items():
        if times > 1:
            world.say("E6", f"{body!r} was asked about {times} times after its decision was answered")
    for body in stored.keys() - tried:
        world.say("E1", f"{body!r} was never sent")
    world.counts["committed"] = sum(stored.values())
    world.counts["left open"] = len(halves - decided.keys())
    return world
