"""FORMAT.md shows the bytes that the code writes."""

from __future__ import annotations

import re
from pathlib import Path

import protomq_broker.store
from protomq.v1.record_pb2 import RecordBatch
from protomq.wire.record import RecordTemplate, encode_front, encode_record_field
from protomq_broker.store.config import StoreConfig
from protomq_broker.store.index.index_rows import BLOCK_MARK, message_id_hash
from protomq_broker.store.log.append import AppendRequest
from protomq_broker.store.log.record_region import prove_region
from protomq_broker.store.store import Store
from protomq_broker.testing.simdisk import SimDisk

from .log_helpers import ManualClock


def hex_blocks() -> list[bytes]:
    text = (Path(protomq_broker.store.__path__[0]) / "FORMAT.md").read_text()
    return [
        b"".join(bytes.fromhex(line[8:]) for line in block.strip().splitlines())
        for block in re.findall(r"```hex\n(.*?)```", text, re.DOTALL)
    ]


def test_the_worked_example_is_what_a_new_store_writes() -> None:
    segment, queue, checkpoint = hex_blocks()
    disk = SimDisk()
    clock = ManualClock(1_700_000_000_000)
    store = Store.open(
        "/s", StoreConfig(segment_size_bytes=4096), clock=clock, disk=disk, background=False
    )
    record = RecordTemplate("t", 1, 0).encode(
        b"hello", 0, 1_699_999_999_999, tag="a", front=encode_front((), "a")
    )
    region = prove_region(encode_record_field(record), "t", [len(record)])
    assert region is not None
    assert store.append([AppendRequest(region, 2)]) == len(segment)
    store.checkpoint()
    assert disk.content(f"/s/commitlog/{0:020d}") == segment.ljust(4096, b"\x00")
    assert disk.content(f"/s/consumequeue/t/2/{0:020d}") == queue
    assert disk.content("/s/checkpoint") == checkpoint


def test_the_example_is_a_record_batch() -> None:
    batch = RecordBatch.FromString(hex_blocks()[0])
    assert [record.body for record in batch.records] == [b"hello"]
    assert [seal.record_count for seal in batch.seals] == [0, 1]


def test_the_hashes_of_message_ids_are_those_of_the_index() -> None:
    text = (Path(protomq_broker.store.__path__[0]) / "FORMAT.md").read_text()
    one, block = re.findall(r"`([0-9A-F]{16})`", text)
    assert int(one, 16) == message_id_hash(1, 0, 0)
    assert int(block, 16) == message_id_hash(1, 0, BLOCK_MARK)
