"""Delayed messages through kills, power cuts, clock steps, damage of the timer and retention; judged by what was answered, and by the log.

    F1   nobody gets a message before its time: by the log time of its delivery, and by true time as far as the clock may be wrong
    F3   what is due is delivered in the timer's next turn, unless its files are damaged
    F4   a recall wins or loses, never both: what was answered as recalled, now or before, is delivered to nobody, what was too late is
    F5   what was accepted is pending, delivered, or recalled: the broker has as many pending as that says
    F2   a message that is acknowledged and not recalled is delivered once its time has come, and one copy of it is in the log

Log time may gain a tenth on true time while the wall clock is ahead (`store/timer/log_time.py`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Final
from unittest import mock

from protomq.v1.record_pb2 import Record
from protomq.v1.send_service_pb2 import SendRequest
from protomq.v1.state_pb2 import TimerEnd, TimerRecord
from protomq.wire.recall_handle import RecallHandle, decode_handle, encode_handle
from protomq.wire.topics import TIMER_TOPIC
from protomq_broker.store.errors import StoreError
from protomq_broker.store.timer import timer_runs
from protomq_broker.store.timer.pending import PendingLimits
from protomq_broker.testing.simdisk import Fault, SimulatedCrash
from protomq_runtime.errors import ServiceError
from tests.support.delay_world import World
from tests.support.ended_process import after_the_end

from .checker import Violation, parse_log

STEPS: Final = 40
COPY: Final = 2
SMALL: Final = PendingLimits(near=8, fresh=3, far=5, runs_per_level=3)
LAST_MS: Final = 400_000
"""No message of a run is due later than this after its end."""


class _Sent:
    """One message: when it is due, by log time; not before which true time it may come; what is known of it."""

    def __init__(self, due_ms: int, earliest_ms: float, handle: str) -> None:
        self.due_ms = due_ms
        self.earliest_ms = earliest_ms
        self.handle = handle
        self.position = decode_handle(handle).position
        self.is_durable = False
        self.recalled_at: int | None = None  # where the log ended behind a recall that won
        self.is_recall_durable = False
        self.was_too_late = False
        # A power cut may have taken it back.
        self.is_uncertain = False
        self.is_recall_uncertain = False


class DelayRun:
    """A world, and what its client knows."""

    def __init__(self, seed: int, counts: Counter[str]) -> None:
        self.rng = random.Random(seed)
        self.counts = counts
        self.found: list[Violation] = []
        self.sent: dict[bytes, _Sent] = {}
        self.unanswered_ms: dict[bytes, float] = {}
        """Sends that were tried: the earliest true time that they may come at."""
        self.seen: dict[bytes, int] = {}
        """What a consumer got, and where the log ended then; under ASYNC_FLUSH a power cut may take it back."""
        self.is_damaged = False
        """Something of the timer's files was, so that what they say comes late: once they are healed."""
        self.numbers = count()
        self.boots = 1
        self.world = World()
        self._start()

    def say(self, invariant: str, message: str) -> None:
        self.found.append(Violation(invariant, message))

    def _start(self) -> None:
        self.world.start()
        self.world.store.pending._limits = SMALL
        if self.world.store.topics.find("filler") is None:
            self.world.send(b"first", topic="filler")
        self._run = self.world.mover._writer.run
        self.world.mover._writer.run = self._meanwhile  # type: ignore[method-assign]

    # Steps.

    def send(self) -> None:
        """One message or a few, with a delay or each with a time of its own."""
        bodies = [b"%d" % next(self.numbers) for _ in range(self.rng.randint(1, 4))]
        now_ms, true_ms = self.world.log_time.now_ms(), self.world.clock.time_ms
        dues_ms = [now_ms + self.rng.randrange(0, 60_000) for _ in bodies]
        if self.rng.random() < 0.5:
            dues_ms = [dues_ms[0]] * len(bodies)
            request = SendRequest(
                records=[Record(body=b) for b in bodies], delay_ms=dues_ms[0] - now_ms
            )
        else:
            records = [Record(body=b, due_time_ms=d) for b, d in zip(bodies, dues_ms, strict=True)]
            request = SendRequest(records=records)
        request.topic, request.queue_id = "topic", 0
        earliest_ms = {body: true_ms + (due_ms - now_ms) / 1.1 - 1 for body, due_ms in zip(bodies, dues_ms, strict=True)}
        self.unanswered_ms.update(earliest_ms)
        answer = self.world.request(request)
        handles = self._handles(answer.recall_handle, dues_ms)
        for body, due_ms, handle in zip(bodies, dues_ms, handles, strict=True):
            self.sent[body] = _Sent(due_ms, earliest_ms[body], handle)
        self.counts["sent"] += len(bodies)

    def _handles(self, first: str, dues_ms: list[int]) -> list[str]:
        """As a client makes them of the first."""
        known = decode_handle(first)
        position, handles = known.position, []
        for index, due_ms in enumerate(dues_ms):
            producer_id, epoch, sequence = known.message_id
            identity = (producer_id, epoch, sequence + index)
            handles.append(
                encode_handle(RecallHandle(known.broker_name, position, due_ms, identity))
            )
            record = self.world.store.record_at(position)
            assert record is not None
            position += len(record) + (2 if len(record) < 0x80 else 3)
        return handles

    def recall(self) -> None:
        """Of any message, delivered or not."""
        if not self.sent:
            return
        each = self.sent[self.rng.choice(sorted(self.sent))]
        try:
            answer = self.world.recall_answer(each.handle)
        except (SimulatedCrash, StoreError, OSError):
            self._doubt_recall(each)
            raise
        except ServiceError as error:
            if error.reason in ("STORE_FAILED", "DISK_FULL"):
                self._doubt_recall(each)
            # Of a message that cannot be read, a recall says that it cannot know.
            if error.reason not in ("QUEUE_HEALING", "CORRUPT_LOG"):
                raise
            return
        won = answer.recalled
        if answer.recalled_before and each.recalled_at is None:
            self.say("F4", f"{each.handle} was recalled before, says the broker, and nobody had recalled it")
        if won and each.recalled_at is not None and not each.is_recall_uncertain:
            self.say("F4", f"{each.handle} was recalled twice")
        if won:
            each.recalled_at = self.world.store.appended_position
            each.is_recall_durable = each.is_recall_uncertain = False
        elif each.recalled_at is None:
            each.was_too_late = True
        self.counts["recalled" if won else "too late"] += 1

    def _doubt_recall(self, each: _Sent) -> None:
        """Nobody was told what came of it."""
        if each.recalled_at is None:
            each.recalled_at, each.is_recall_uncertain = self.world.store.appended_position, True

    def deliver(self) -> None:
        """Time passes, and what is due comes."""
        self.world.log_time.save()
        self.world.clock.time_ms += self.rng.randrange(0, 15_000)
        self._deliver()

    def _deliver(self) -> None:
        now_ms = self.world.log_time.now_ms()
        try:
            self.world.deliver()
        except timer_runs.TimerDamagedError:
            self.counts["damage met"] += 1
            self.is_damaged = True
        self._look()
        if not self.is_damaged:
            self._judge_lateness(now_ms)
            self._judge_count()

    def _judge_lateness(self, now_ms: float) -> None:
        """F3: what was due is there, once the timer has had its turn."""
        for body, each in self.sent.items():
            is_owed = each.due_ms <= now_ms and each.recalled_at is None and not each.is_uncertain
            if is_owed and body not in self.seen:
                self.say("F3", f"{body!r} was due {now_ms - each.due_ms:.0f} ms ago, and is not delivered")
            self.counts["in time"] += is_owed

    def _judge_count(self) -> None:
        """F5, as far as everything was answered, and no power cut took anything back."""
        left = [each for body, each in self.sent.items() if body not in self.seen]
        pending = sum(each.recalled_at is None and not each.is_uncertain for each in left)
        doubted = sum(each.is_uncertain or each.is_recall_uncertain for each in left)
        doubted += len(self.unanswered_ms.keys() - self.sent.keys() - self.seen.keys())
        count = self.world.store.pending.count
        if not pending <= count <= pending + doubted:
            self.say("F5", f"{count} are pending, of {pending} that are to come, and {doubted} that nobody knows of")
        self.counts["counted"] += not doubted

    def _look(self) -> None:
        """At what a consumer gets."""
        now_ms = self.world.clock.time_ms
        bodies = self.world.delivered()
        for body in set(bodies) - self.seen.keys():
            earliest_ms = self.sent[body].earliest_ms if body in self.sent else self.unanswered_ms[body]
            if now_ms < earliest_ms:
                self.say("F1", f"{body!r} came {earliest_ms - now_ms:.0f} ms early")
            self.seen[body] = self.world.store.appended_position

    def _meanwhile(self, function: Callable[[], None]) -> None:
        """Between the taking of a batch and its append others get on."""
        if self.rng.random() < 0.3:
            self.recall()
        self._run(function)

    def step_clock(self) -> None:
        """Somebody sets the wall clock."""
        self.world.clock.wall_offset_ms = self.rng.choice((0, 3_600_000, -3_600_000, 30_000))

    def flush(self) -> None:
        self.world.store.flush()
        self._note_durable()

    def _note_durable(self) -> None:
        flushed = self.world.store.flushed_position
        for each in self.sent.values():
            each.is_durable |= each.position < flushed
            each.is_recall_durable |= each.recalled_at is not None and each.recalled_at <= flushed

    def checkpoint(self) -> None:
        self.world.store.checkpoint()
        self._note_durable()

    def retain(self) -> None:
        """Other messages fill the segments, and the oldest go."""
        for _ in range(30):
            self.world.send(bytes(4_000), topic="filler")
        self.checkpoint()
        try:
            self.world.store.delete_segments_below(self.world.store.appended_position)
        except StoreError:
            self.counts["kept"] += 1
            return
        self._note_durable()
        self.counts["retained"] += 1

    def heal(self) -> None:
        self.world.clock.time_ms += 60_000  # a failure is tried again after that
        for _ in range(50):
            self.world.store._upkeep.heal(self.world.clock.monotonic_ms())

    def damage(self) -> None:
        """Of the timer's files, all but what says where they are."""
        self.is_damaged = True
        for path, data in self.world.disk.files("/s/timer").items():
            if "/run." in path and len(data) > 40:
                self.world.disk.flip_bit(path, self.rng.randrange(8 * (len(data) - 40)))

    def crash(self) -> None:
        """kill -9 or a power cut, at rest or in the middle of something."""
        if self.rng.random() < 0.6:
            self.world.disk.fail_at(self.rng.randint(1, 12), Fault.CRASH)
            try:
                self.rng.choice((self._deliver, self.checkpoint, self.retain, self.flush))()
            except SimulatedCrash:
                self.counts["crashed in the middle"] += 1
            self.world.disk.plan = None
        is_kill = self.rng.random() < 0.5
        self.restart("kill" if is_kill else "power")

    def restart(self, ends: str) -> None:
        """After that end of the process."""
        self.world.disk.plan = None
        is_kill, flushed = ends == "kill", self.world.store.flushed_position
        if not is_kill:
            self.seen = {body: end for body, end in self.seen.items() if end <= flushed}
        self.world.disk = after_the_end(self.world.disk, self.rng, ends)
        if not is_kill:
            self._boot()
        self._start()
        self.world.store.flush()
        for each in self.sent.values():
            if not is_kill and not each.is_durable:  # nobody had promised it
                each.is_uncertain = True
            if not is_kill and each.recalled_at is not None and not each.is_recall_durable:
                each.is_recall_uncertain = True
        self._note_durable()
        self._look()
        self.counts["kills" if is_kill else "power cuts"] += 1

    def _boot(self) -> None:
        """The machine starts again, with a right clock. Only that is left, so log time begins there."""
        self.boots += 1
        self.world.boot_id = f"boot-{self.boots}"
        self.world.clock.wall_offset_ms = 0
        now_ms = self.world.clock.time_ms
        for each in self.sent.values():
            each.earliest_ms = min(each.earliest_ms, now_ms + (each.due_ms - now_ms) / 1.1 - 1)

    def lose_timer(self) -> None:
        """A clean stop; the timer's files are gone at the next start."""
        self.world.store.close()
        self.world.disk.remove("/s/timer")
        self._start()
        self._note_durable()
        self.counts["timer lost"] += 1

    # Judgement.

    def end(self) -> None:
        """Everything falls due; then each message is judged."""
        self.heal()
        self.world.clock.time_ms += LAST_MS
        for _ in range(3):
            self._deliver()
            self.heal()
        self._deliver()
        delivered = Counter(self.world.delivered())
        for body, times in delivered.items():
            if times > 1:
                self.say("F2", f"{body!r} stands in its queue {times} times")
        for body, each in self.sent.items():
            came = body in delivered or body in self.seen
            if each.recalled_at is not None and came and not each.is_recall_uncertain:
                self.say("F4", f"{body!r} was recalled, and delivered")
            is_promised = each.is_durable and not each.is_uncertain
            if each.recalled_at is None and not came and is_promised:
                said = ", though its recall was answered as too late" if each.was_too_late else ""
                self.say("F2", f"{body!r}, due {each.due_ms}, was never delivered{said}")
        self._judge_log()

    def _judge_log(self) -> None:
        """What stands in the log of deliveries: when, and of what."""
        files = {
            path.removeprefix("/s/"): data for path, data in self.world.disk.files("/s").items()
        }
        records = [each.record for each in parse_log(files).records]
        copies = Counter(
            bytes(r.body)
            for r in records
            if r.topic == "topic" and r.flags >> 8 & 7 == COPY and not r.HasField("due_time_ms")
        )
        for body, times in copies.items():
            if times > 1:
                self.say("F2", f"the log has {times} copies of {body!r}")
        for record in records:
            if record.topic != TIMER_TOPIC:
                continue
            told = TimerRecord.FromString(record.body)
            if (
                told.end == TimerEnd.TIMER_END_DELIVERED
                and max(told.due_times_ms) > told.log_time_ms
            ):
                self.say(
                    "F1", f"delivered at {told.log_time_ms} what is due at {max(told.due_times_ms)}"
                )


def check_delays(seed: int, counts: Counter[str] | None = None) -> list[Violation]:
    """One run."""
    with mock.patch.object(timer_runs, "BLOCK_ROWS", 4):
        run = DelayRun(seed, Counter() if counts is None else counts)
        steps: list[Callable[[], None]] = [
            *[run.send] * 5, *[run.deliver] * 5, *[run.recall] * 3, run.flush, run.checkpoint, run.retain, run.step_clock,
            run.step_clock, run.crash, run.crash, run.lose_timer, run.damage, run.heal,
        ]  # fmt: skip
        for _ in range(STEPS):
            run.rng.choice(steps)()
            if run.found:
                return run.found
        run.end()
        return run.found
