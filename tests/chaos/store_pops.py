"""Pops: members of a group receive, acknowledge, hold for longer and give back, and an operator resets it; crashes come at any I/O, and the
wall clock jumps.

    G1    at least once: in the end each message was delivered or is dead, none is left over. Each delivery says a higher attempt than the
          one before, and none more than the group's limit. A message is dead after exactly as many deliveries as that, and once
    G2    a dead letter says what a holder said last of why it failed
    G3a   nobody gets a message within the invisible time of another holder, restarts and clock steps included
    G3b   what was acknowledged, and answered so, never comes again
    G3c   a receipt settles nothing once somebody else got the message
    G3d   what nobody settles is back within a second of the end of its invisible time: who asks then for all that there is gets it. A
          restart goes on with the time that the log knows
    G4    in order: a message of a key comes when those before it are acknowledged or dead
    O4    what a reset skipped never comes; what it goes back to comes again, as if it were new, whatever was known of it

The broker is the real one but for its threads: services on fake lanes over a store on a simulated disk. Answers wait for the disk, so
nothing that was answered may be taken back, not by a power cut either. Time is the checker's own: it passes for everybody, whatever the
clocks say.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from protomq.v1.consumer_service_pb2 import ResetOffsetsRequest
from protomq.v1.pop_service_pb2 import AckRequest, ChangeInvisibleRequest, PopRequest, PopResponse
from protomq.v1.record_pb2 import Attributes, Record, RecordBatch
from protomq.v1.send_service_pb2 import SendRequest
from protomq_broker.pop_pipeline import TELL_INTERVAL_MS
from protomq_broker.store.queues.reading import ReadStatus
from protomq_broker.store.state.group_settings import GroupSettings
from protomq_broker.testing.simdisk import Fault, SimDisk, SimulatedCrash
from protomq_runtime.testing import FakeCall
from tests.support.ended_process import after_the_end, is_disk_failure, raise_if_disk_failed
from tests.unit.protomq_broker.fake_broker import CONSUMER, POP, SEND, FakeBroker

from .checker import Violation

GROUP: Final = "group"
RETRIES: Final = 3
RETRIES_BY_DEFAULT: Final = 16
ROUNDS_MAX: Final = 300
SEEDS_PER_LONG_LIFE: Final = 5
"""Of so many, one has a second life, of messages that nobody acknowledges, with the retries that a group has by default."""
STEPS: Final = 150
INVISIBLE_MS: Final = (10_000, 30_000, 120_000)
CHANGES_MS: Final = (0, 5_000, 60_000, 300_000)
PART_MS: Final = 10_000
"""So much time passes at a time."""
BACK_MS: Final = 1_000
"""How much later than its invisible time says a message may be back."""
RECEIVE_COUNT_MAX: Final = 1_000
"""More than a world has."""
CLOCK_STEPS_MS: Final = (0, 0, -7_200_000, 7_200_000, 5_000)
SEGMENT_SIZE_BYTES: Final = 1 << 13
CACHES: Final = ("config/popState.json", "consumequeue", "checkpoint")


@dataclass(slots=True)
class _Message:
    """What the members of the group know of one message."""

    body: bytes
    key: str
    queue_id: int
    number: int
    attempt: int = 0
    held_until_ms: int = 0
    back_at_ms: int = 0
    """When it is back, unless somebody settles it."""
    receipt: bytes = b""
    is_acked: bool = False
    may_be_acked: bool = False
    is_skipped: bool = False
    earlier_deaths: int = 0
    """Dead letters of it from before it was reset the last time."""
    errors: set[str] = field(default_factory=lambda: {""})
    """What may be known of why it failed: more than one where the outcome of a call is not known."""
    ack_receipts: set[bytes] = field(default_factory=set)
    """By which it may have been acknowledged, also before a reset."""

    def reset(self, *, is_skipped: bool, deaths: int) -> None:
        """The group goes on before it, as if it were new, or behind it."""
        self.attempt = self.held_until_ms = self.back_at_ms = 0
        self.receipt = b""
        self.is_acked = self.may_be_acked = False
        self.is_skipped, self.earlier_deaths = is_skipped, deaths
        self.errors = {""}


@dataclass(slots=True)
class _Held:
    """A delivery that a member may settle."""

    message: _Message
    receipt: bytes
    offset: int


class PopWorld:
    """A broker, what was sent to it, and what members of a group were given."""

    def __init__(self, seed: int, *, ends: str = "", is_default: bool = False) -> None:
        """`ends`: how its process ends each time; drawn, if empty. `is_default`: the retries of a group that is not set up."""
        self.ends = ends
        self.retries = RETRIES_BY_DEFAULT if is_default else RETRIES
        self.rng = random.Random(seed)
        self.fifo = self.rng.random() < 0.5
        self.disk = SimDisk()
        self.passed_ms = 0
        self.messages: dict[bytes, _Message] = {}
        self.sent_count = 0
        self.has_crashed = False
        self.recorded_ms = 0
        """When the log heard of the time last."""
        self.doubt_ms = 0
        """What an answer that nobody got may have handed out, or held for longer, is back then."""
        self.held: list[_Held] = []
        self.found: list[Violation] = []
        self.did: Counter[str] = Counter()
        self.letters: dict[int, bytes] = {}
        """The messages that were seen among the dead letters, by offset there."""
        self.broker = self._open(1_700_000_000_000)
        self.broker.store.groups.put(GroupSettings(GROUP, retry_count_max=None if is_default else RETRIES))
        self._settle_disk()

    def _open(self, clock_ms: int) -> FakeBroker:
        return FakeBroker(disk=self.disk, sync_flush=True, clock_ms=clock_ms, segment=SEGMENT_SIZE_BYTES)

    def _settle_disk(self) -> None:
        """What was posted is done, and the disk has confirmed it."""
        for _ in range(4):
            self.broker.server.run()
            self.broker.store.flush()
        self.broker.server.run()

    def say(self, invariant: str, message: str) -> None:
        self.found.append(Violation(invariant, message))

    # Steps.

    def send(self) -> None:
        """Some messages, of a few keys."""
        queue_id = self.rng.randrange(2)
        new: list[_Message] = []
        for _ in range(self.rng.randint(1, 5)):
            number = self.sent_count
            self.sent_count += 1
            new.append(_Message(b"%d " % number + bytes(self.rng.choice((10, 900))), self.rng.choice(("", "a", "b")), queue_id, number))
        records = [Record(body=each.body, attributes=Attributes(sharding_key=each.key)) for each in new]
        call = self._call(SEND, SendRequest(topic="topic", queue_id=queue_id, records=records))
        if call is not None:
            raise_if_disk_failed(call.error)
            call.response()
            self.messages.update({each.body: each for each in new})

    def pop(self) -> None:
        """A member receives."""
        begun = [self._begin_pop()]
        self._finish()
        self._take_all(begun)
        self._come_back()

    def receive_all(self) -> None:
        """A member receives until nothing comes: what nobody has any more has come by then."""
        for queue_id in range(2):
            before = -1
            while self.did["delivered"] > before:
                before = self.did["delivered"]
                request = PopRequest(
                    consumer_group=GROUP, topic="topic", record_count_max=RECEIVE_COUNT_MAX, fifo=self.fifo,
                    invisible_ms=self.rng.choice(INVISIBLE_MS), queue_id=queue_id,
                )  # fmt: skip
                begun = [(self._call(POP + "Pop", request, waits=False), request.invisible_ms)]
                self._finish()
                self._take_all(begun)
                self._come_back()
        if self.passed_ms < self.doubt_ms + BACK_MS:
            return
        self.did["looks for what is back"] += 1
        deaths = self.see_dead_letters()
        left = [each for each in self.messages.values() if not (each.is_acked or each.is_skipped or self._is_dead(each, deaths))]
        for message in left:
            is_first = not (self.fifo and message.key) or not any(
                (other.key, other.queue_id) == (message.key, message.queue_id) and other.number < message.number for other in left
            )
            late_ms = self.passed_ms - message.back_at_ms
            if is_first and late_ms >= BACK_MS and not message.may_be_acked:
                self.say("G3d", f"message {message.body.split()[0].decode()} was to be back {late_ms} ms ago, and does not come")

    def _begin_pop(self) -> tuple[FakeCall | None, int]:
        request = PopRequest(
            consumer_group=GROUP, topic="topic", record_count_max=self.rng.randint(1, 6), fifo=self.fifo,
            invisible_ms=self.rng.choice(INVISIBLE_MS),
        )  # fmt: skip
        if self.rng.random() < 0.5:
            request.queue_id = self.rng.randrange(2)
        return self._call(POP + "Pop", request, waits=False), request.invisible_ms

    def _begin_planned_pop(self) -> tuple[FakeCall | None, int]:
        """What it gets is planned, and not appended."""
        begun = self._begin_pop()
        try:
            self.broker.server.lanes["pop"].run()
        except SimulatedCrash:
            self.restart()
            return None, 0
        return begun

    def _take_all(self, begun: Sequence[tuple[FakeCall | None, int]]) -> None:
        for call, invisible_ms in begun:
            if call is not None and call.answered and call.error is None and call.answer_payload is not None:
                self._take(call, invisible_ms)
            else:
                self._doubt(INVISIBLE_MS[-1])

    def _doubt(self, hold_ms: int) -> None:
        self.doubt_ms = max(self.doubt_ms, self.passed_ms + hold_ms)

    def _take(self, call: FakeCall, invisible_ms: int) -> None:
        answer: PopResponse = PopResponse.FromString(call.answer_payload or b"")
        data = b"".join(region.file.read(region.offset, region.size_bytes) for region in call.regions)  # type: ignore[attr-defined]
        records = RecordBatch.FromString(data).records
        hand_outs = [each for each in answer.hand_outs for _ in range(each.record_count)]
        for record, offset, hand_out in zip(records, answer.queue_offsets, hand_outs, strict=True):
            message = self.messages.get(record.body)
            if message is None:  # its send was not answered
                message = self._note(record, hand_out.queue_id)
            self.did["delivered"] += 1
            self._check_delivery(message, hand_out.attempt)
            message.attempt = max(message.attempt, hand_out.attempt)
            message.held_until_ms = message.back_at_ms = self.passed_ms + invisible_ms
            self.recorded_ms = self.passed_ms
            message.receipt = hand_out.receipt
            self.held.append(_Held(message, hand_out.receipt, offset))

    def _note(self, record: Record, queue_id: int) -> _Message:
        number = int(record.body.split()[0])
        message = self.messages[record.body] = _Message(record.body, record.attributes.sharding_key, queue_id, number)
        return message

    def _check_delivery(self, message: _Message, attempt: int) -> None:
        name = message.body.split()[0].decode()
        if self.passed_ms < message.held_until_ms:
            self.say("G3a", f"message {name} came {message.held_until_ms - self.passed_ms} ms early")
        if message.is_acked:
            self.say("G3b", f"message {name} came after it was acknowledged")
        if message.is_skipped:
            self.say("O4", f"message {name} came after a reset had skipped it")
        if not message.attempt < attempt <= self.retries + 1:
            self.say("G1", f"message {name} came with attempt {attempt} after {message.attempt}")
        if self.fifo and message.key:
            deaths = self.see_dead_letters()
            for other in self.messages.values():
                is_before = (other.key, other.queue_id) == (message.key, message.queue_id) and other.number < message.number
                is_done = other.is_acked or other.may_be_acked or other.is_skipped or self._is_dead(other, deaths)
                if is_before and not is_done:
                    self.say("G4", f"message {name} came before {other.body.split()[0].decode()}, of the same key")

    def ack(self) -> None:
        """A member acknowledges some of what it was given, long ago maybe; at the same moment another one receives, or has begun to."""
        some = self._some_held()
        request = AckRequest(consumer_group=GROUP, topic="topic")
        for held in some:
            request.messages.add(receipt=held.receipt, offset_runs=[held.offset, 1])
            held.message.may_be_acked = True
        if not some:
            return
        for held in some:
            held.message.ack_receipts.add(held.receipt)
        begun = [self._begin_planned_pop()] if self.rng.random() < 0.5 else []
        call = self._call(POP + "Ack", request, waits=False)
        if call is not None and self.rng.random() < 0.5:
            begun.append(self._begin_pop())
        self._finish()
        if call is not None and call.answered:
            done = self._done(call, some)
            for held in done:
                held.message.is_acked = True
            self.did["acked"] += len(done)
        self._take_all(begun)
        self._come_back()

    def change(self) -> None:
        """A member holds for another time, or gives back."""
        some = self._some_held()
        invisible_ms = self.rng.choice(CHANGES_MS)
        self.did["changes"] += 1
        error = "" if invisible_ms == 60_000 else f"error {self.did['changes']}"
        request = ChangeInvisibleRequest(consumer_group=GROUP, topic="topic", invisible_ms=invisible_ms, error=error)
        for held in some:
            request.messages.add(receipt=held.receipt, offset_runs=[held.offset, 1])
        if not some:
            return
        before = {id(held.message): held.message.held_until_ms for held in some}
        for held in some:  # as long as it is not known what has become of it, anybody may have it earlier
            held.message.held_until_ms = min(held.message.held_until_ms, self.passed_ms + invisible_ms)
        errors_before = {id(held.message): held.message.errors for held in some}
        for held in some:
            held.message.errors = held.message.errors | ({error} if error else set())
        call = self._call(POP + "ChangeInvisible", request, waits=False)
        self._finish()
        if call is not None and call.answered:
            done = self._done(call, some)
            for held in some:
                is_done = held in done
                held.message.held_until_ms = before[id(held.message)]
                if is_done:
                    held.message.held_until_ms = held.message.back_at_ms = self.passed_ms + invisible_ms
                held.message.errors = {error} if is_done and error else errors_before[id(held.message)]
            self.did["changed"] += len(done)
        else:
            self._doubt(invisible_ms)
        self._come_back()

    def _some_held(self) -> list[_Held]:
        """Of different messages."""
        some = self.rng.sample(self.held, min(len(self.held), self.rng.randint(1, 4)))
        return list({id(held.message): held for held in some}.values())

    def _done(self, call: FakeCall, some: Sequence[_Held]) -> list[_Held]:
        raise_if_disk_failed(call.error)
        if call.error is not None:
            assert call.error.reason == "STALE_RECEIPT", call.error
            return []
        stale = {(each.receipt, each.offset_runs[0]) for each in call.response().stale_messages}
        assert all(list(each.offset_runs[1::2]) == [1] for each in call.response().stale_messages)
        done = [held for held in some if (held.receipt, held.offset) not in stale]
        for held in done:
            # It is said again that it was acknowledged, if a reset has skipped it since: that changes nothing.
            is_repeated = held.message.is_skipped and held.receipt in held.message.ack_receipts
            if held.receipt != held.message.receipt and not is_repeated:
                self.say("G3c", f"an old receipt settled message {held.message.body.split()[0].decode()}")
        return done

    def reset(self) -> None:
        """An operator has the group go on elsewhere, and asks until that is answered. A member has begun to receive before that, maybe."""
        request = ResetOffsetsRequest(consumer_group=GROUP, topic="topic", queue_ids=self.rng.choice(([], [0], [1])))
        if self.rng.random() < 0.3:
            request.end = True
        else:
            request.queue_offset = self.rng.randrange(self.sent_count // 2 + 1)
        answered: FakeCall | None = None
        while answered is None:
            deaths = self.see_dead_letters()
            parts = [self._parted(queue_id, request) for queue_id in request.queue_ids or range(2)]
            call = self._call(CONSUMER + "ResetOffsets", request, waits=False)
            # Both are on their way to the send lane, the reset in front: what the pop gets, it gets behind the reset.
            begun = [self._begin_planned_pop()] if call is not None and self.rng.random() < 0.5 else []
            self._finish()
            answered = call if call is not None and call.answered else None
            is_refused = answered is not None and is_disk_failure(answered.error)
            if is_refused:
                answered, self.has_crashed = None, True
            if answered is not None or (not is_refused and any(pop is not None and pop.answered for pop, _ in begun)):
                for skipped, fresh in parts:
                    self._note_reset(skipped, fresh, deaths)
            self._take_all(begun)
            self._come_back()
        answered.response()
        self.did["resets"] += 1

    def _parted(self, queue_id: int, request: ResetOffsetsRequest) -> tuple[list[_Message], list[_Message]]:
        """The messages of a queue: those that the reset skips, and those that come then."""
        first, end = self.broker.store.queue_range("topic", queue_id)
        at = end if request.end else min(max(request.queue_offset, first), end)
        fresh: dict[bytes, _Message] = {}
        for offset, record in self._read("topic", queue_id):
            message = self.messages.get(record.body) or self._note(record, queue_id)
            if offset >= at:
                fresh[record.body] = message
        mine = [message for message in self.messages.values() if message.queue_id == queue_id]
        return [message for message in mine if message.body not in fresh], list(fresh.values())

    def _note_reset(self, skipped: Sequence[_Message], fresh: Sequence[_Message], deaths: Counter[bytes]) -> None:
        for message in skipped:
            message.reset(is_skipped=True, deaths=deaths[message.body])
        for message in fresh:
            message.reset(is_skipped=False, deaths=deaths[message.body])
        self.did["skipped"] += len(skipped)

    def rest(self) -> None:
        """Time passes."""
        self.pass_time(self.rng.choice((1_000, 9_000, 31_000, 130_000)))

    def pass_time(self, time_ms: int) -> None:
        """So much."""
        while time_ms > 0:
            part_ms = min(time_ms, PART_MS)
            time_ms -= part_ms
            self.passed_ms += part_ms
            try:
                self.broker.advance(part_ms)
                self._settle_disk()
            except SimulatedCrash:
                self.restart()
            # Somebody ends a broker whose log has failed. The log hears of no time until then, so all of it would count once more.
            if self.broker.store.log_failure:
                self.restart()

    def fault(self) -> None:
        """The process will end at one of the next operations of the disk."""
        self.disk.fail_at(self.rng.randint(1, 12), Fault.CRASH)

    def restart(self, ends: str = "") -> None:
        """kill -9 or a power cut, or that end; the wall clock is another one, and caches may be lost."""
        self.did["restarts"] += 1
        self.has_crashed = False
        self.disk.plan = None
        self.disk = after_the_end(self.disk, self.rng, ends or self.ends)
        if self.rng.random() < 0.3:
            for name in CACHES:
                self.disk.remove(f"/s/{name}")
        down_ms = self.rng.choice((0, 20_000))
        self.passed_ms += down_ms
        # Pop time goes on where the log ends: the time since then counts once more.
        again_ms = min(self.passed_ms - down_ms - self.recorded_ms, TELL_INTERVAL_MS + 2 * PART_MS) + down_ms
        for message in self.messages.values():
            # What ends in the last millisecond that the log knows is back in the next one.
            if message.back_at_ms >= self.passed_ms - again_ms:
                message.back_at_ms += again_ms
        if self.doubt_ms >= self.passed_ms - again_ms:
            self.doubt_ms += again_ms
        self.recorded_ms = self.passed_ms
        self.broker = self._open(self.broker.clock.time_ms + down_ms + self.rng.choice(CLOCK_STEPS_MS))
        self._settle_disk()

    def retain(self) -> None:
        """Old segments go."""
        store = self.broker.store
        try:
            store.checkpoint()
            before = store.min_position
            self.see_dead_letters()
            cut = store.appended_position - self.rng.randrange(3) * SEGMENT_SIZE_BYTES
            store.delete_segments_below(min(cut, self._first_fresh_position()))
            self.did["segments"] += (store.min_position - before) // SEGMENT_SIZE_BYTES
            self._settle_disk()
        except SimulatedCrash:
            self.restart()

    def _first_fresh_position(self) -> int:
        """Where the first message stands that nobody has popped: retention would take it, as it takes any that is too old."""
        store = self.broker.store
        next_offsets = {known.key.queue_id: known.next_offset for known in store.popped.queues()}
        positions = [store.appended_position]
        for queue_id in range(2):
            offset = next_offsets.get(queue_id, 0)
            result = store.read("topic", queue_id, offset, 1, 1)
            if result.status is ReadStatus.FOUND:
                region = result.regions[0]
                positions.append(region.file.base_position + region.offset)
        return min(positions)

    def _call(self, path: str, request: Any, *, waits: bool = True) -> FakeCall | None:
        try:
            call = self.broker.server.call(path, request)
            if waits:
                self._settle_disk()
        except SimulatedCrash:
            self.restart()
            return None
        return call if call.answered or not waits else None

    def _finish(self) -> None:
        """What is under way is done, unless the process ends before: what was answered by then is answered."""
        try:
            self._settle_disk()
        except SimulatedCrash:
            self.disk.plan = None
            self.has_crashed = True

    def _come_back(self) -> None:
        """The process starts again, if it ended."""
        if self.has_crashed:
            self.restart()

    # The end.

    def _read(self, topic: str, queue_id: int) -> Iterator[tuple[int, Record]]:
        """All that is readable, with its offsets."""
        offset, end = self.broker.store.queue_range(topic, queue_id)
        while offset < end:
            result = self.broker.store.read(topic, queue_id, offset, 16, 1 << 20)
            assert result.status is ReadStatus.FOUND
            data = b"".join(r.file.read(r.offset, r.size_bytes) for r in result.regions)
            yield from enumerate(RecordBatch.FromString(data).records, result.first_offset)
            offset = result.next_offset

    def see_dead_letters(self) -> Counter[bytes]:
        """Checks those that are new. Returns how many there have been of each message."""
        for offset, record in self._read(f"%DLQ%{GROUP}", 0):
            if offset not in self.letters:
                self.letters[offset] = record.body
                self._check_letter(record)
        return Counter(self.letters.values())

    def _check_letter(self, record: Record) -> None:
        name = record.body.split()[0].decode()
        message = self.messages.get(record.body)
        attempt, error = record.transit.attempt, record.transit.last_error
        earlier_deaths = message.earlier_deaths if message is not None else 0
        if Counter(self.letters.values())[record.body] > earlier_deaths + 1:
            self.say("G1", f"message {name} is dead twice")
        if attempt != self.retries + 1:
            self.say("G1", f"message {name} is dead after {attempt} deliveries")
        if message is not None and error not in message.errors:
            self.say("G2", f"message {name} is dead of {error!r}, and failed of {sorted(message.errors)}")
        if message is not None and message.is_skipped:
            self.say("O4", f"message {name} is dead, although a reset had skipped it")
        self.did["dead"] += 1
        self.did["dead with an error"] += bool(error)

    def _is_dead(self, message: _Message, deaths: Counter[bytes]) -> bool:
        """Whether it has died since the last reset."""
        return deaths[message.body] > message.earlier_deaths

    def _is_drained(self) -> bool:
        store = self.broker.store
        known = {each.key.queue_id: each for each in store.popped.queues()}
        return all(
            queue_id in known
            and not known[queue_id].open
            and known[queue_id].next_offset == store.queue_range("topic", queue_id)[1]
            for queue_id in range(2)
        )

    def drain(self) -> None:
        """All that is left is received and acknowledged; then nothing is left."""
        self.disk.plan = None
        last_ms = max(self.passed_ms, self.doubt_ms, *(message.back_at_ms for message in self.messages.values()))
        self.pass_time(last_ms - self.passed_ms + BACK_MS)
        self.receive_all()
        for _ in range(300):
            self.pass_time(310_000)
            before = self.did["delivered"]
            begun = [self._begin_pop()]
            self._finish()
            self._take_all(begun)
            fresh = self.held[len(self.held) - (self.did["delivered"] - before) :]
            request = AckRequest(consumer_group=GROUP, topic="topic")
            for held in fresh:
                request.messages.add(receipt=held.receipt, offset_runs=[held.offset, 1])
            if fresh:
                call = self._call(POP + "Ack", request)
                assert call is not None
                call.response()
                for held in fresh:
                    held.message.is_acked = True
            elif self._is_drained():
                break
        deaths = self.see_dead_letters()
        for message in self.messages.values():
            name = message.body.split()[0].decode()
            if message.is_skipped:
                continue
            is_dead = self._is_dead(message, deaths)
            if not message.attempt and not is_dead:
                self.say("G1", f"message {name} was never delivered")
            if not (message.is_acked or message.may_be_acked or is_dead):
                self.say("G1", f"message {name} is left over: delivered {message.attempt} times, and not acknowledged")
            if message.is_acked and is_dead:
                self.say("G3b", f"message {name} was acknowledged, and is dead")
        left = [known.key for known in self.broker.store.popped.queues() if known.open]
        if left:
            self.say("G1", f"messages are open that nobody gets: {left}")


def _check_to_the_last(seed: int, did: Counter[str]) -> list[Violation]:
    """Nobody acknowledges anything: messages are dead after 17 deliveries each."""
    world = PopWorld(seed, is_default=True)
    world.send()
    world.send()
    steps: tuple[Callable[[], None], ...] = (world.pop, world.change, lambda: world.pass_time(INVISIBLE_MS[-1] + 1_000))
    for _ in range(ROUNDS_MAX):
        for step in steps:
            if world.rng.random() < 0.05:
                world.fault()
            step()
        world.held.clear()  # The old ones stay stale.
        if world.found or set(world.see_dead_letters()) >= set(world.messages):
            break
    else:
        left = set(world.messages) - set(world.see_dead_letters())
        world.say("G1", f"after {ROUNDS_MAX} rounds {len(left)} of {len(world.messages)} messages are not dead")
    did["17 deliveries, and dead"] += sum(world.see_dead_letters().values())
    return world.found


def check_pops(seed: int, did: Counter[str] | None = None) -> list[Violation]:
    """Members of a group, resets, kills and power cuts at any I/O, clock steps, retention, lost caches."""
    world = PopWorld(seed)
    steps: dict[Callable[[], None], int] = {
        world.send: 6, world.pop: 14, world.ack: 5, world.change: 3, world.rest: 12, world.fault: 2, world.restart: 1, world.retain: 3,
        world.reset: 1, world.receive_all: 2,
    }  # fmt: skip
    for _ in range(STEPS):
        world.rng.choices(list(steps), list(steps.values()))[0]()
        if world.found:
            return world.found
    world.drain()
    did = Counter() if did is None else did
    did.update(world.did)
    return world.found or (_check_to_the_last(seed, did) if seed % SEEDS_PER_LONG_LIFE == 0 else [])
