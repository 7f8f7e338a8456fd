"""What the kind of a record and its due time decide, when it is appended and after every way of reading the log back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protomq.v1.record_pb2 import Record, RecordBatch
from protomq.wire.hashing import hash63
from protomq.wire.record import (
    FLAG_KIND_COPY,
    FLAG_KIND_HALF,
    FLAG_KIND_STATE,
    NO_QUEUE_OFFSET,
    SEAL_SIZE_BYTES,
    RecordTemplate,
    encode_front,
    encode_record_field,
)
from protomq_broker.store.errors import CorruptLogError
from protomq_broker.store.log.append import AppendRequest
from protomq_broker.store.log.record_region import prove_region, set_kind
from protomq_broker.store.queues.consume_queue import ConsumeQueueDamagedError
from protomq_broker.store.queues.reading import ReadStatus
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_broker.store.tools.repair import repair
from protomq_broker.store.tools.verify import FindingKind, verify
from protomq_broker.testing.simdisk import SimDisk
from tests.chaos.checker.log_files import check_store_files, parse_log
from tests.support.examples import examples
from tests.support.region_parts import parts_of

from .derived_helpers import table_content
from .store_helpers import open_store, read_all

TOPICS = ("a", "b")
DUE_MS = 1_800_000_000_000


class Sent(NamedTuple):
    """One request. `due`: for each record whether it has a due time."""

    kind: int
    due: tuple[bool, ...]
    topic: str
    queue_id: int

    @property
    def is_of_a_producer(self) -> bool:
        """What is sent twice is recognised."""
        return self.kind in (0, FLAG_KIND_HALF)

    def is_visible(self, index: int) -> bool:
        """As the table of kinds has it."""
        return self.kind != FLAG_KIND_HALF and not self.due[index]


@st.composite
def sends(draw: st.DrawFn) -> Sent:
    """Requests of all kinds."""
    kind = draw(st.sampled_from([0, 0, FLAG_KIND_HALF, FLAG_KIND_COPY, FLAG_KIND_STATE]))
    size = st.lists(st.booleans(), min_size=1, max_size=6)
    due = draw(size) if kind != FLAG_KIND_STATE else [False]
    return Sent(kind, tuple(due), draw(st.sampled_from(TOPICS)), draw(st.integers(0, 1)))


def requests_of(sent: Sent, number: int, first: int = 0) -> list[AppendRequest]:
    """As the broker would hand them to the store: a region each for what has a due time and what has none."""
    producer_id = 7 if sent.is_of_a_producer else 0
    template = RecordTemplate(sent.topic, producer_id, 0)
    records = [
        template.encode(
            _body(number, index),
            number * 10 + first + index,
            5,
            key=f"key{number}",
            front=encode_front([f"key{number}"]),
            due_time_ms=DUE_MS + index if due else None,
        )
        for index, due in enumerate(sent.due)
    ]
    payload = bytearray().join(map(encode_record_field, records))
    region = prove_region(payload, sent.topic, [len(record) for record in records])
    assert region is not None
    parts = parts_of(region)
    for part in parts:
        set_kind(part, sent.kind)
        if sent.kind == FLAG_KIND_COPY:
            part.identities = np.zeros((part.count, 3), np.uint64)
    return [AppendRequest(part, sent.queue_id) for part in parts]


def _body(number: int, index: int) -> bytes:
    return b"%d.%d" % (number, index)


class World:
    """A store, and what was appended to it."""

    def __init__(self, groups: Sequence[Sequence[Sent]]) -> None:
        self.disk = SimDisk()
        self.store = open_store(self.disk)
        self.sent: list[Sent] = []
        self.requests: list[AppendRequest] = []
        for topic in TOPICS:
            self.store.topics.create(TopicConfig(topic))
        for group in groups:
            together: list[AppendRequest] = []
            for sent in group:
                together += requests_of(sent, len(self.sent))
                self.sent.append(sent)
            self.store.append(together)
            self.requests += together

    def check(self, store: Store) -> None:
        """Queues have what is visible, keys and ids find it, repeats are recognised, nothing more."""
        queues: dict[tuple[str, int], list[bytes]] = {}
        for number, sent in enumerate(self.sent):
            for index in range(len(sent.due)):
                if sent.is_visible(index):
                    queues.setdefault((sent.topic, sent.queue_id), []).append(_body(number, index))
        for topic in TOPICS:
            for queue_id in range(2):
                wanted = queues.get((topic, queue_id), [])
                assert [body for _, body in read_all(store, topic, queue_id)] == wanted
        for number, sent in enumerate(self.sent):
            self._check_look_ups(store, number, sent)
        for request in self.requests:
            if request.region.producer_id:
                place = store.find_repeated(request)
                assert place is not None
                assert place.queue_id == request.queue_id
                assert place.queue_offset == request.queue_offset
                assert place.physical_offset == request.physical_offset

    def _check_look_ups(self, store: Store, number: int, sent: Sent) -> None:
        visible = [index for index in range(len(sent.due)) if sent.is_visible(index)]
        if sent.kind == FLAG_KIND_STATE:
            visible = []
        by_key = store.find_by_key_hash(sent.topic, hash63(f"key{number}".encode()))
        found = {Record.FromString(data).body for data in by_key}
        assert found == {_body(number, index) for index in visible}
        if sent.is_of_a_producer:
            for index in range(len(sent.due)):
                by_id = list(store.find_by_message_id(sent.topic, (7, 0, number * 10 + index)))
                assert len(by_id) == (index in visible)


@settings(max_examples=examples(100))
@given(st.lists(st.lists(sends(), min_size=1, max_size=4), min_size=1, max_size=5))
def test_each_kind_is_taken_by_its_structures_live_and_after_each_replay(
    groups: list[list[Sent]],
) -> None:
    world = World(groups)
    world.check(world.store)
    live = table_content(world.store._repeated)
    world.store.close()
    assert verify("/s", disk=world.disk) == []
    files = _files_of(world.disk)
    assert check_store_files(files) == []
    for at, _, record in parse_log(files).records:
        if record.topic not in TOPICS:
            continue
        number, _, index = record.body.decode().partition(".")
        is_visible = world.sent[int(number)].is_visible(int(index))
        assert (record.queue_offset == NO_QUEUE_OFFSET) != is_visible, at

    store = open_store(world.disk)
    world.check(store)
    store.close()
    queue_files = _queue_files_of(world.disk)
    for path in list(world.disk.files("/s")):
        if not path.startswith(("/s/commitlog", "/s/config", "/s/lock")):
            world.disk.unlink(path)
    rebuilt = open_store(world.disk)
    assert table_content(rebuilt._repeated) == live
    world.check(rebuilt)
    rebuilt.close()
    assert _queue_files_of(world.disk) == queue_files
    assert verify("/s", disk=world.disk) == []


def _queue_files_of(disk: SimDisk) -> dict[str, bytes]:
    files = disk.files("/s/consumequeue")
    return {path: data for path, data in files.items() if not path.endswith(".bin")}


def _files_of(disk: SimDisk) -> dict[str, bytes]:
    return {path.removeprefix("/s/"): data for path, data in disk.files("/s").items()}


def test_the_same_send_in_one_group_with_another_is_recognised_by_its_position() -> None:
    """Delayed messages of one producer that stand one behind the other make one run: the second is found in it."""
    world = World([[Sent(0, (True,), "a", 0), Sent(0, (False,), "a", 0)]])
    first = requests_of(Sent(0, (True, True), "a", 0), 5)
    second = requests_of(Sent(0, (True,), "a", 0), 5, first=2)
    world.store.append(first + second)
    place = world.store.find_repeated(second[0])
    assert place is not None
    assert place.physical_offset == second[0].physical_offset > first[0].physical_offset
    world.store.close()
    store = open_store(world.disk)
    assert store.find_repeated(second[0]) == place
    store.close()


def test_a_wrong_stamp_of_a_record_that_enters_no_queue_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("protomq_broker.store.appending.is_queued", lambda flags: True)
    monkeypatch.setattr("protomq_broker.store.topic_counts.is_queued", lambda flags: True)
    monkeypatch.setattr(
        "protomq_broker.store.queues.consume_queue_table.is_queued", lambda flags: True
    )
    world = World([[Sent(FLAG_KIND_HALF, (False,), "a", 0)]])
    world.store.close()
    monkeypatch.undo()
    (finding,) = verify("/s", disk=world.disk)
    assert finding.explanation == "offset 0 in a record with flags 0x100"


def _given_out(store: Store, topic: str, queue_id: int) -> tuple[dict[int, bytes], int]:
    """(body by offset of all that can be read of a queue, how often it told of lost messages)."""
    found: dict[int, bytes] = {}
    lost = offset = 0
    while True:
        try:
            result = store.read(topic, queue_id, offset, 1, 1 << 20)
        except CorruptLogError as error:
            if error.next_offset <= offset:
                raise
            offset, lost = error.next_offset, lost + 1
            continue
        if result.status is not ReadStatus.FOUND:
            return found, lost
        (region,) = result.regions
        data = region.file.read(region.offset, region.size_bytes)
        found[result.first_offset] = RecordBatch.FromString(data).records[0].body
        offset = result.next_offset


@settings(max_examples=25)
@given(st.lists(st.lists(sends(), min_size=1, max_size=3), min_size=3, max_size=6), st.data())
def test_damage_takes_no_offset_and_shows_nothing_that_was_hidden(
    groups: list[list[Sent]], data: st.DataObject
) -> None:
    """Set aside by a start, and taken out by a repair: queues go on as they were, whatever kinds stand in the damaged range."""
    world = World([*groups, [Sent(0, (False,), topic, queue) for topic in TOPICS for queue in range(2)]])  # fmt: skip
    before = {
        (topic, queue): dict(read_all(world.store, topic, queue))
        for topic in TOPICS
        for queue in range(2)
    }
    last = world.requests[-4].physical_offset
    world.store.close()
    # Not in the seal in front of the last append: only what follows could tell that this one holds, and nothing does.
    position = data.draw(st.integers(SEAL_SIZE_BYTES, last - SEAL_SIZE_BYTES - 1))
    world.disk.flip_bit(f"/s/commitlog/{0:020d}", position * 8)
    if data.draw(st.booleans()):
        for folder in ("consumequeue", "index", "repeatedsends"):
            world.disk.remove(f"/s/{folder}")
    world.disk.unlink("/s/checkpoint")

    def expect(store: Store) -> None:
        for (topic, queue), bodies in before.items():
            found, lost = _given_out(store, topic, queue)
            assert found.items() <= bodies.items()
            assert lost or found == bodies
            assert max(found) == max(bodies)
            assert store.queue_range(topic, queue)[1] == max(bodies) + 1

    store = open_store(world.disk, corruption="quarantine")
    expect(store)
    store.close()
    kinds = {finding.kind for finding in verify("/s", disk=world.disk)}
    assert kinds == {FindingKind.QUARANTINE}
    repair("/s", "/keep", disk=world.disk)
    store = open_store(world.disk)
    expect(store)
    store.close()
    assert {finding.kind for finding in verify("/s", disk=world.disk)} == {FindingKind.REPAIRED}


def test_a_damaged_queue_file_is_healed_with_the_entries_of_visible_records_alone() -> None:
    world = World([[Sent(0, (False, True, False), "a", 0), Sent(FLAG_KIND_HALF, (False,), "a", 0)]])
    world.store.append(requests_of(Sent(FLAG_KIND_COPY, (False, True), "a", 0), 1))
    world.store.close()
    bodies = [b"0.0", b"0.2", b"1.0"]
    path = f"/s/consumequeue/a/0/{0:020d}"
    for entry in range(3):
        world.disk.flip_bit(path, entry * 160 + 3)
    store = open_store(world.disk)
    with pytest.raises(ConsumeQueueDamagedError):
        read_all(store, "a", 0)
    store._upkeep.keeper.turn()
    assert [body for _, body in read_all(store, "a", 0)] == bodies
    assert store.healed_file_count == 1
    store.close()
    assert verify("/s", disk=world.disk) == []
