"""Messages of all kinds that move: crashes come while they do, and the log is judged by an own reading of it.

    M1   a message moves once: as many copies as the record of progress says, whatever the crash
    M2   a copy is its original, octet by octet in fields 1 to 5, with its id, and says where that stood
    M3   a half message and one with a due time are read by nobody; what may be read is read in its place
    M4   a send that is repeated is answered with its first place; a copy is nobody's send

Files are judged by invariant D besides.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import NamedTuple

from protomq.v1.record_pb2 import Record, RecordBatch
from protomq.v1.state_pb2 import OffsetsRecord
from protomq.wire.record import RecordTemplate, encode_front, encode_record_field
from protomq.wire.topics import OFFSETS_TOPIC
from protomq_broker.store.config import StoreConfig
from protomq_broker.store.errors import StoreError
from protomq_broker.store.log.append import AppendRequest
from protomq_broker.store.log.record_region import prove_region, set_kind
from protomq_broker.store.queues.reading import ReadStatus
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_broker.testing.simdisk import Fault, SimDisk, SimulatedCrash
from tests.support.moves import move_record

from .checker import Violation, check_store_files, parse_log
from .checker.log_files import LogRecord
from .store_world import WorldClock

HALF, COPY = 1, 2
TOPICS = ("orders", "target")
PRODUCER_ID = 77
SEGMENT_SIZE_BYTES = 1 << 16


class _Sent(NamedTuple):
    """A message that was appended: what makes it again, and where it stands."""

    sequence: int
    is_half: bool
    due_time_ms: int | None
    position: int

    @property
    def is_hidden(self) -> bool:
        return self.is_half or self.due_time_ms is not None

    def request(self) -> AppendRequest:
        """The send, as its producer repeats it."""
        template = RecordTemplate(TOPICS[0], PRODUCER_ID, 0)
        key = f"key{self.sequence}"
        body = b"%d" % self.sequence * (1 + self.sequence % 40)
        record = template.encode(
            body, self.sequence, 5, key=key, front=encode_front([key]), due_time_ms=self.due_time_ms
        )  # fmt: skip
        region = prove_region(bytearray(encode_record_field(record)), TOPICS[0], [len(record)])
        assert region is not None
        if self.is_half:
            set_kind(region, HALF << 8)
        return AppendRequest(region, 0)


class _MoveWorld:
    """A store, what was sent to it, and how many of the hidden messages were moved for certain, or may have been."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = WorldClock()
        self.disk = SimDisk()
        self.sent: list[_Sent] = []
        self.found: list[Violation] = []
        self.store = self._open()
        for topic in TOPICS:
            self.store.topics.create(TopicConfig(topic))
        self.store.checkpoint()

    def _open(self) -> Store:
        config = StoreConfig(segment_size_bytes=SEGMENT_SIZE_BYTES, sync_flush=True)
        return Store.open("/s", config, clock=self.clock, disk=self.disk, background=False)

    def say(self, invariant: str, message: str) -> None:
        self.found.append(Violation(invariant, message))

    def send(self) -> None:
        """A group of messages of any kind, synced."""
        group: list[_Sent] = []
        for _ in range(self.rng.randint(1, 4)):
            is_half = self.rng.random() < 0.3
            due_ms = self.clock.now_ms() + 1000 if self.rng.random() < 0.3 else None
            group.append(_Sent(len(self.sent) + len(group), is_half, due_ms, 0))
        requests = [each.request() for each in group]
        self.store.append(requests)
        self.store.flush()
        for each, request in zip(group, requests, strict=True):
            self.sent.append(each._replace(position=request.physical_offset))

    def progress(self) -> int:
        """Hidden messages that were moved, as the state tells."""
        topic = self.store.topics.find(TOPICS[0])
        assert topic is not None
        return self.store.offsets.find("mover", topic.name, topic.incarnation, 0) or 0

    def move(self) -> None:
        """Moves the next hidden messages, with the progress; the process may end at any operation."""
        hidden = [each for each in self.sent if each.is_hidden]
        done = self.progress()
        batch = hidden[done : done + self.rng.randint(1, 3)]
        if not batch:
            return
        files = _files(self.disk)
        fields = {each.position: _field_of(files, each) for each in parse_log(files).records}
        copies = [
            AppendRequest(move_record(fields[each.position], self.rng.choice(TOPICS)), 0)
            for each in batch
        ]
        topic = self.store.topics.find(TOPICS[0])
        assert topic is not None
        record = OffsetsRecord()
        record.commits.add(consumer_group="mover").offsets.add(
            topic=topic.name,
            queue_id=0,
            queue_offset=done + len(batch),
            topic_incarnation=topic.incarnation,
        )
        if self.rng.random() < 0.5:
            self.disk.fail_at(self.rng.randint(1, 4), Fault.CRASH)
        try:
            self.store.append_moved(copies, [(OFFSETS_TOPIC, [record.SerializeToString()])])
            self.store.flush()
            if self.rng.random() < 0.3:
                self.store.checkpoint()
        except SimulatedCrash:
            self.restart()
        self.disk.plan = None

    def restart(self) -> None:
        """kill -9, or a power cut."""
        is_kill = self.rng.random() < 0.5
        self.disk = self.disk.killed() if is_kill else self.disk.crash(self.rng)
        self.store = self._open()
        self.store.flush()

    def lose_derived(self) -> None:
        """A clean stop; all that is derived from the log is gone at the next start."""
        self.store.close()
        for folder in ("consumequeue", "index", "repeatedsends"):
            self.disk.remove(f"/s/{folder}")
        self.store = self._open()

    def check(self) -> None:
        """M1 to M4 now."""
        report = parse_log(_files(self.disk))
        records = [each.record for each in report.records if each.record.topic in TOPICS]
        originals = {r.sequence: r for r in records if r.flags >> 8 & 7 != COPY}
        copies = [r for r in records if r.flags >> 8 & 7 == COPY]
        hidden = [each.sequence for each in self.sent if each.is_hidden]
        if [r.sequence for r in copies] != hidden[: self.progress()]:
            self.say("M1", f"moved {[r.sequence for r in copies]}, the progress says {self.progress()} of {hidden}")  # fmt: skip
        for copy in copies:
            self._check_copy(originals[copy.sequence], copy)
        for topic in TOPICS:
            wanted = [r.physical_offset for r in records if r.topic == topic and _is_visible(r)]
            if self._read(topic) != wanted:
                self.say("M3", f"{topic}: {self._read(topic)} are read, not {wanted}")
        for each in self.sent:
            self._check_repeat(each)

    def _check_copy(self, original: Record, copy: Record) -> None:
        fronts = [(r.body, list(r.keys), r.crc32c, r.producer_id) for r in (original, copy)]
        transit = copy.transit
        origin = (transit.origin_topic, transit.origin_queue_id, transit.origin_queue_offset)
        stood = (original.topic, original.queue_id, original.queue_offset)
        if fronts[0] != fronts[1] or origin != stood:
            self.say("M2", f"the copy of {original.sequence} is {fronts[1]} from {origin}, not {fronts[0]} from {stood}")  # fmt: skip

    def _check_repeat(self, each: _Sent) -> None:
        try:
            place = self.store.find_repeated(each.request())
        except StoreError as error:
            self.say("M4", f"the repeat of {each.sequence} is refused: {error}")
            return
        if place is None or place.physical_offset != each.position:
            self.say("M4", f"the repeat of {each.sequence}, at {each.position}, is answered {place}")
            self.store._repeated.drop_claims()

    def _read(self, topic: str) -> list[int]:
        positions: list[int] = []
        offset = 0
        while (result := self.store.read(topic, 0, offset, 8, 1 << 20)).status is ReadStatus.FOUND:
            data = b"".join(r.file.read(r.offset, r.size_bytes) for r in result.regions)
            positions += [r.physical_offset for r in RecordBatch.FromString(data).records]
            offset = result.next_offset
        return positions

    def close(self) -> None:
        """A clean stop; D over its files."""
        self.store.close()
        self.found += check_store_files(_files(self.disk))


def check_moves(seed: int) -> list[Violation]:
    """Sends and moves, kills and power cuts, and starts without anything that is derived."""
    world = _MoveWorld(seed)
    for _ in range(16):
        step = world.rng.choice((world.send, world.send, world.move, world.move, world.restart, world.lose_derived))  # fmt: skip
        step()
        world.check()
        if world.found:
            return world.found
    world.close()
    return world.found


def _is_visible(record: Record) -> bool:
    return record.flags >> 8 & 7 != HALF and not record.HasField("due_time_ms")


def _field_of(files: Mapping[str, bytes], record: LogRecord) -> bytes:
    base = record.position - record.position % SEGMENT_SIZE_BYTES
    at = record.position - base
    return files[f"commitlog/{base:020d}"][at : at + record.size_bytes]


def _files(disk: SimDisk) -> dict[str, bytes]:
    return {path.removeprefix("/s/"): data for path, data in disk.files("/s").items()}
