"""What the tests of the store as a whole share: a store on a simulated disk, and reading it from end to end."""

from __future__ import annotations

from protomq.v1.record_pb2 import RecordBatch
from protomq.v1.state_pb2 import OffsetsRecord
from protomq.wire.topics import OFFSETS_TOPIC
from protomq_broker.store.config import StoreConfig
from protomq_broker.store.errors import CorruptLogError
from protomq_broker.store.queues.reading import ReadStatus
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_broker.testing.simdisk import SimDisk

from .log_helpers import ManualClock

SEGMENT = 8192


def open_store(
    disk: SimDisk,
    *,
    clock: ManualClock | None = None,
    sync_flush: bool = False,
    corruption: str = "refuse",
    segment: int = SEGMENT,
    follows: bool = False,
) -> Store:
    config = StoreConfig(segment_size_bytes=segment, sync_flush=sync_flush, corruption=corruption)  # type: ignore[arg-type]
    return Store.open(
        "/s", config, clock=clock or ManualClock(), disk=disk, background=False, follows=follows
    )


def commit(store: Store, group: str, topic: str, queue_id: int, queue_offset: int) -> None:
    """What the broker does for a commit: the offset is appended, and applied."""
    config = store.topics.find(topic) or store.topics.create(TopicConfig(topic))
    record = OffsetsRecord()
    record.commits.add(consumer_group=group).offsets.add(
        topic=topic,
        queue_id=queue_id,
        queue_offset=queue_offset,
        topic_incarnation=config.incarnation,
    )
    store.append_state(OFFSETS_TOPIC, [record.SerializeToString()])


def committed(store: Store, group: str, topic: str, queue_id: int) -> int | None:
    """The offset that the group is told."""
    config = store.topics.find(topic)
    incarnation = config.incarnation if config is not None else 0
    return store.offsets.find(group, topic, incarnation, queue_id)


def read_all(
    store: Store, topic: str = "topic", queue_id: int = 0, *, offset: int | None = None
) -> list[tuple[int, bytes]]:
    """(queue offset, body) of everything in a queue, read in small steps through the regions."""
    offset = store.queue_range(topic, queue_id)[0] if offset is None else offset
    found: list[tuple[int, bytes]] = []
    while True:
        result = store.read(topic, queue_id, offset, 3, 2000)
        if result.status is not ReadStatus.FOUND:
            return found
        data = b"".join(
            region.file.read(region.offset, region.size_bytes) for region in result.regions
        )
        assert len(data) == result.regions_size_bytes
        records = RecordBatch.FromString(data).records
        assert len(records) == result.record_count
        for index, (start, size) in enumerate(
            zip(result.starts.tolist(), result.sizes.tolist(), strict=True)
        ):
            record = RecordBatch.FromString(data[start : start + size]).records[0]
            expected = (
                result.first_offset + index
                if result.queue_offsets is None
                else int(result.queue_offsets[index])
            )
            assert record.queue_offset == expected
            found.append((record.queue_offset, record.body))
        offset = result.next_offset


def read_all_until_damage(store: Store, queue_id: int) -> list[tuple[int, bytes]]:
    """(queue offset, nothing) of what a queue gives before its first damage, or before its end."""
    found: list[tuple[int, bytes]] = []
    while True:
        try:
            result = store.read("topic", queue_id, len(found), 10, 1 << 20)
        except CorruptLogError:
            return found
        if result.status is not ReadStatus.FOUND:
            return found
        found += [(result.first_offset + index, b"") for index in range(result.record_count)]


def flip_in_log(disk: SimDisk, store: Store, position: int, at: int = 5) -> None:
    """Damages one bit of a record in the page cache: of the first octet of its body, unless `at` says another octet."""
    path = store._folder.path_at(position)
    disk.flip_bit_in_cache(path, (position % store._folder.segment_size_bytes + at) * 8)
