"""The store with its real threads on a real disk: one writer, readers, flusher, housekeeping, retention."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from protomq.v1.record_pb2 import RecordBatch
from protomq.wire.hashing import crc32c
from protomq.wire.record import RecordTemplate, encode_record_field, encode_varint
from protomq_broker.store.config import StoreConfig
from protomq_broker.store.log.append import AppendRequest
from protomq_broker.store.log.record_region import prove_region
from protomq_broker.store.queues.reading import ReadStatus
from protomq_broker.store.store import Store
from protomq_broker.store.tools.verify import verify

APPENDS = 600
BATCH = 40


class RealClock:
    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    monotonic = staticmethod(time.monotonic)


def make_request(queue_id: int) -> AppendRequest:
    template = RecordTemplate("topic", 0, 0)
    records = [template.encode(os.urandom(200 + index), index, 5) for index in range(BATCH)]
    region = prove_region(
        b"".join(map(encode_record_field, records)), "topic", [len(record) for record in records]
    )
    assert region is not None
    return AppendRequest(region, queue_id)


def read_to(store: Store, queue_id: int, end: int, deadline: float) -> int:
    """Reads a queue as it grows; how many messages held. Order, density and bodies are checked."""
    offset = 0
    while offset < end and time.monotonic() < deadline:
        result = store.read("topic", queue_id, offset, 200, 1 << 20)
        if result.status is not ReadStatus.FOUND:
            time.sleep(0.001)
            continue
        data = b"".join(
            os.pread(region.file.fileno(), region.size_bytes, region.offset)
            for region in result.regions
        )
        for record in RecordBatch.FromString(data).records:
            assert record.queue_offset == offset
            assert record.crc32c == crc32c(b"\x0a" + encode_varint(len(record.body)) + record.body)
            offset += 1
        assert offset == result.next_offset
    return offset


@pytest.mark.parametrize("sync_flush", [False, True])
def test_readers_see_every_message_once_and_in_order_while_the_log_grows(
    tmp_path: Path, sync_flush: bool
) -> None:
    others = set(threading.enumerate())
    config = StoreConfig(
        segment_size_bytes=1 << 20,
        sync_flush=sync_flush,
        flush_interval_ms=5,
        checkpoint_interval_ms=20,
        disk_delete_ratio=0.97,
        disk_force_ratio=0.98,
        disk_refuse_ratio=0.99,
    )
    store = Store.open(tmp_path, config, clock=RealClock())
    found: dict[int, int] = {}
    deadline = time.monotonic() + 120
    readers = [
        threading.Thread(
            target=lambda q=queue: found.update(
                {q: read_to(store, q, APPENDS // 2 * BATCH, deadline)}
            )
        )
        for queue in range(2)
    ]
    for reader in readers:
        reader.start()
    for index in range(APPENDS):
        store.append([make_request(index % 2)])
        store.request_flush()
    for reader in readers:
        reader.join()
    assert found == {0: APPENDS // 2 * BATCH, 1: APPENDS // 2 * BATCH}
    assert store.write_refusal == ""
    assert verify(tmp_path) == [], "while it is running"
    store.close()
    assert verify(tmp_path) == []
    assert not [thread for thread in set(threading.enumerate()) - others if thread.name.startswith("protomq-")]
    reopened = Store.open(tmp_path, config, clock=RealClock())
    assert reopened.queue_range("topic", 1) == (0, APPENDS // 2 * BATCH)
    reopened.close()
