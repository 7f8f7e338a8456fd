"""Whether what a send's numbers stand for is that send."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq.wire import record as layout
from protomq_broker.store.log.append import AppendRequest
from protomq_broker.store.log.record_region import prove_region
from protomq_broker.store.queues.reading import StoredPlace
from protomq_broker.store.state.send_errors import (
    PartlyStoredError,
    ProducerIdTakenError,
    RepeatedSendError,
    SequenceExpiredError,
)
from protomq_broker.store.store import Store
from protomq_broker.testing.simdisk import SimDisk

from .log_helpers import make_request
from .store_helpers import SEGMENT, open_store, read_all

P = 5


def send(bodies: Sequence[bytes], sequence: int = 0, **fields: object) -> AppendRequest:
    return make_request(bodies, producer_id=P, sequence=sequence, **fields)  # type: ignore[arg-type]


def store_new(store: Store, *requests: AppendRequest) -> None:
    for request in requests:
        assert store.find_repeated(request) is None
        store.append([request])


def numbers(first: int, end: int, word: bytes = b"body") -> list[bytes]:
    return [b"%s %d" % (word, number) for number in range(first, end)]


@pytest.mark.parametrize("sync_flush", [False, True])
@pytest.mark.parametrize("count", [1, 3, 50, 3000])
def test_the_same_messages_are_found_and_others_refused(count: int, sync_flush: bool):
    store = open_store(SimDisk(), segment=1 << 20, sync_flush=sync_flush)
    bodies = numbers(0, count)
    store_new(store, send(bodies))
    end = store.appended_position
    assert store.find_repeated(send(bodies)) == StoredPlace("topic", 0, 0, 53)
    for changed in {0, count // 2, count - 1}:
        others = [*bodies[:changed], b"BODY" + bodies[changed][4:], *bodies[changed + 1 :]]
        with pytest.raises(ProducerIdTakenError, match=f"sequence {changed} of") as caught:
            store.find_repeated(send(others))
        assert (caught.value.producer_id, caught.value.sequence) == (f"{P:016X}", 0)
    assert store.appended_position == end
    store_new(store, send([b"next"], count))  # nothing was claimed


def test_a_part_of_a_send_and_several_sends_in_one_are_compared_too():
    store = open_store(SimDisk(), segment=1 << 16)
    parts = ((0, 10), (10, 20), (25, 30))
    store_new(store, *(send(numbers(first, end), first) for first, end in parts))
    place = store.find_repeated(send(numbers(5, 15), 5))
    assert place is not None
    assert place.queue_offset == 5
    with pytest.raises(ProducerIdTakenError, match="sequence 12 of"):
        store.find_repeated(send([*numbers(5, 12), *numbers(12, 15, b"other")], 5))
    with pytest.raises(PartlyStoredError):
        store.find_repeated(send(numbers(15, 25), 15))
    with pytest.raises(PartlyStoredError):
        store.find_repeated(send(numbers(22, 40), 22))
    for first, end in ((15, 25), (22, 40), (22, 27), (0, 25)):
        with pytest.raises(ProducerIdTakenError):
            store.find_repeated(send(numbers(first, end, b"other"), first))


def test_a_map_in_another_order_is_the_same_message_and_another_property_is_not():
    def with_properties(*properties: tuple[str, str], crc: int | None = None) -> AppendRequest:
        entries = [layout.encode_front(properties={name: value}) for name, value in properties]
        front = b"".join(entries)
        record = layout.RecordTemplate("topic", P, 0).encode(b"body", 0, 5, front=front)
        region = prove_region(layout.encode_record_field(record), "topic", [len(record)])
        assert region is not None
        return AppendRequest(region, 0)

    store = open_store(SimDisk())
    store_new(store, with_properties(("a", "1"), ("b", "2")))
    assert store.find_repeated(with_properties(("b", "2"), ("a", "1"))) is not None
    with pytest.raises(ProducerIdTakenError):
        store.find_repeated(with_properties(("b", "2"), ("a", "2")))


def test_a_message_that_was_born_again_is_the_same():
    store = open_store(SimDisk())
    store_new(store, send([b"body"]))
    again = send([b"body"])
    at = len(again.region.data) + layout.BORN_TIME_MS_AT
    again.region.data[at : at + 8] = (77).to_bytes(8, "little")
    assert store.find_repeated(again) is not None


def test_of_what_retention_has_deleted_nobody_can_tell():
    store = open_store(SimDisk())
    store_new(store, send([b"x" * 5000]), send([b"y" * 5000], 1), send([b"z"], 2))
    store.checkpoint()
    assert store.delete_segments_below(SEGMENT) == SEGMENT
    with pytest.raises(SequenceExpiredError, match="deleted"):
        store.find_repeated(send([b"x" * 5000]))
    assert store.find_repeated(send([b"y" * 5000], 1)) is not None


def test_of_what_is_damaged_nobody_can_tell():
    disk = SimDisk()
    store = open_store(disk)
    store_new(store, send([b"x" * 100]), send([b"y"], 1))
    store.close()
    path = "/s/commitlog/" + "0" * 20
    damaged = disk.killed()
    damaged.flip_bit(path, 8 * 100)
    store = open_store(damaged, corruption="quarantine")
    with pytest.raises(SequenceExpiredError, match="cannot know"):
        store.find_repeated(send([b"x" * 100]))


@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(1, 5), st.sampled_from((b"one", b"two"))),
        max_size=14,
    )
)
def test_whoever_is_told_that_a_message_is_stored_finds_it(sends: list[tuple[int, int, bytes]]):
    """Two producers, `one` and `two`, with the same id and epoch, each with bodies of its own."""
    store = open_store(SimDisk(), segment=1 << 16)
    for first, count, who in sends:
        request = send(bodies := numbers(first, first + count, who), first)
        with suppress(RepeatedSendError):
            place = store.find_repeated(request)
            if place is None:
                store.append([request])
                place = StoredPlace("topic", 0, request.queue_offset, request.physical_offset)
            stored = [body for _, body in read_all(store)]
            assert stored[place.queue_offset : place.queue_offset + count] == bodies


def test_messages_that_are_in_no_queue_are_compared_where_they_stand():
    def due(bodies: Sequence[bytes], first: int) -> AppendRequest:
        template = layout.RecordTemplate("topic", P, 0)
        records = [
            template.encode(body, first + index, 5, due_time_ms=1 << 40)
            for index, body in enumerate(bodies)
        ]
        payload = b"".join(map(layout.encode_record_field, records))
        region = prove_region(payload, "topic", [len(record) for record in records])
        assert region is not None
        return AppendRequest(region, 0)

    store = open_store(SimDisk(), segment=1 << 16)
    bodies = numbers(0, 10)
    store_new(store, due(bodies, 0))
    assert read_all(store) == []
    assert store.find_repeated(due(bodies, 0)) is not None
    assert store.find_repeated(due(bodies[4:7], 4)) is not None
    with pytest.raises(PartlyStoredError):
        store.find_repeated(due(numbers(8, 12), 8))
    for first, end, other in ((0, 10, 9), (4, 7, 5), (8, 12, 9)):
        sent = numbers(first, end)
        sent[other - first] = b"other"
        with pytest.raises(ProducerIdTakenError, match=f"sequence {other} of"):
            store.find_repeated(due(sent, first))
