"""What the tests of the log and of the store share: records, a clock, a log on a simulated disk."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from protomq.wire.log_walk import WalkedBlock
from protomq.wire.record import FLAG_MANY_KEYS, RecordTemplate, encode_front, encode_record_field
from protomq_broker.store.config import FORMAT_VERSION
from protomq_broker.store.files.disk import Disk, sync_names_above
from protomq_broker.store.files.side_files import write_json_file
from protomq_broker.store.log.append import AppendRequest, ScannedRecords
from protomq_broker.store.log.checkpoint import Checkpoint
from protomq_broker.store.log.commit_log import CommitLog, Reserve
from protomq_broker.store.log.epochs import UNKNOWN_EPOCHS, Epochs
from protomq_broker.store.log.positions import LogTail, Positions
from protomq_broker.store.log.record_region import prove_region
from protomq_broker.store.log.record_scan import read_trailers, record_field_at
from protomq_broker.store.log.recovery import (
    CorruptionMode,
    RecoveredLog,
    choose_start,
    recover_log,
)
from protomq_broker.store.log.segment import SegmentFolder
from protomq_broker.store.start.settings import SETTINGS_NAME
from protomq_broker.testing.simdisk import SimDisk

QUARANTINE_PATH = "/s/config/quarantine.json"
SEGMENT_SIZE_BYTES = 4096


class ManualClock:
    """A clock that stands still until it is told."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self.time_ms = now_ms

    def now_ms(self) -> int:
        return self.time_ms

    def monotonic_ms(self) -> int:
        return self.time_ms

    def monotonic(self) -> float:
        return self.time_ms / 1000


def make_record(
    body: bytes = b"body",
    *,
    topic: str = "topic",
    sequence: int = 0,
    producer_id: int = 7,
    tag: str = "",
) -> bytes:
    """A record field as a producer sends it."""
    return encode_record_field(
        RecordTemplate(topic, producer_id, 0).encode(body, sequence, 5, tag=tag)
    )


def make_request(
    bodies: Sequence[bytes] = (b"body",),
    *,
    topic: str = "topic",
    queue_id: int = 0,
    producer_id: int = 0,
    sequence: int = 0,
    tag: str = "",
    key: str = "",
    more_keys: Sequence[str] = (),
    due_time_ms: int | None = None,
) -> AppendRequest:
    """A request of as many records as there are bodies."""
    template = RecordTemplate(topic, producer_id, 0)
    front = encode_front((key, *more_keys) if key else (), tag)
    flags = FLAG_MANY_KEYS if more_keys else 0
    records = [
        template.encode(
            body, sequence + index, 5, key=key, tag=tag, front=front, flags=flags, due_time_ms=due_time_ms
        )
        for index, body in enumerate(bodies)
    ]
    payload = b"".join(map(encode_record_field, records))
    region = prove_region(bytearray(payload), topic, [len(record) for record in records])
    assert region is not None
    return AppendRequest(region, queue_id)


class Log:
    """A commit log on a simulated disk, without what is derived from it."""

    def __init__(
        self, disk: SimDisk | None = None, *, segment_size_bytes: int = SEGMENT_SIZE_BYTES
    ) -> None:
        self.disk = disk or SimDisk()
        self.disk.make_folder("/s/config")
        self.disk.make_folder("/s/commitlog")
        self.disk.fsync_dir("/s")
        if not self.disk.exists(f"/s/{SETTINGS_NAME}"):
            settings = {"format_version": FORMAT_VERSION, "segment_size_bytes": segment_size_bytes}
            write_json_file(self.disk, f"/s/{SETTINGS_NAME}", settings)
        sync_names_above(self.disk, "/s")
        self.folder = SegmentFolder(self.disk, "/s/commitlog", segment_size_bytes)
        self.folder.open()
        self.positions = Positions(LogTail(0, 0, 0), 0)
        self.log = CommitLog(self.disk, self.folder, self.positions)
        self.checkpoint: Checkpoint | None = None

    def append(self, *records: bytes, time_ms: int = 5, reserve: Reserve = Reserve.MESSAGES) -> LogTail:
        """Appends records as one group."""
        data = b"".join(records)
        self.log.position_for(len(data), reserve)
        tail = self.log.append((data,), len(records), time_ms)
        self.positions.publish(tail, ())
        return tail

    def sync(self) -> None:
        """Syncs all segments."""
        position = self.log.tail.position
        for segment in self.folder.files.values():
            self.disk.fdatasync(segment.fd)
        self.positions.note_flushed(position)

    def bytes_of(self) -> dict[str, bytes]:
        """Content of the segments."""
        return self.disk.files("/s/commitlog")


def recover(
    disk: Disk,
    *,
    checkpoint: Checkpoint | None = None,
    same_cache: bool = False,
    mode: CorruptionMode = "refuse",
    epochs: Epochs = UNKNOWN_EPOCHS,
    segment_size_bytes: int = SEGMENT_SIZE_BYTES,
) -> tuple[RecoveredLog, list[bytes], SegmentFolder]:
    """(what recovery says, the record fields it found, the segments)."""
    disk.make_folder("/s/commitlog")
    folder = SegmentFolder(disk, "/s/commitlog", segment_size_bytes)
    folder.open()
    fields: list[bytes] = []

    def take(block: WalkedBlock) -> None:
        fields.extend(
            bytes(block.data[start : start + size])
            for start, size in block.fields()
        )

    recovered = recover_log(
        disk,
        folder,
        choose_start(folder, checkpoint, checkpoint.replay_position if checkpoint else 0),
        checkpoint,
        same_cache=same_cache,
        mode=mode,
        quarantine_path=QUARANTINE_PATH,
        epochs=epochs,
        on_block=take,
    )
    return recovered, fields, folder


def scan_records(data: bytes, base_position: int) -> ScannedRecords:
    """What a replay reads of the records of an append that begins at `base_position`."""
    starts, sizes, position = [], [], 0
    while position < len(data):
        size, head = record_field_at(data, position, len(data))
        assert size >= 0, f"no record field at {position}"
        starts.append(position)
        sizes.append(head + size)
        position += head + size
    return read_trailers(
        data, base_position, np.array(starts, np.int64), np.array(sizes, np.int64)
    )
