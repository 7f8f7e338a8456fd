"""The checkpoint: from where recovery has to start.

    offset  width
    0       8      magic "PMQCKPT" and the version, 1
    8       8      flushed_position: the log below it was on stable storage
    16      8      replay_position: every derived structure was durable up to here; recovery walks the log from here
    24      4      replay_crc32c: CRC of the seal that ends at replay_position
    28      4      epoch
    32      8      store_time_ms of the last append below replay_position
    40      8      first_position: start of the oldest segment
    48      4      first_crc32c: CRC of the seal that ended there, in the segment that was deleted; 0 if first_position is 0
    52      4      CRC-32C of bytes 0 to 51
                   all little-endian

Replaced atomically. RocketMQ keeps one time per derived file and starts at the oldest; here all are flushed together, so that one
position serves. A checkpoint that is missing, damaged or unreadable costs time, nothing else: the log is walked from its first segment.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from protomq.wire.hashing import crc32c
from protomq_broker.store.files.disk import Disk, write_file_atomically
from protomq_broker.store.files.side_files import read_cache

MAGIC: Final = b"PMQCKPT\x01"
LAYOUT: Final = struct.Struct("<8sQQIIQQI")
SIZE_BYTES: Final = LAYOUT.size + 4
assert SIZE_BYTES == 56


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """See the module's docstring; flushed_position >= replay_position."""

    flushed_position: int
    replay_position: int
    replay_crc32c: int
    epoch: int
    store_time_ms: int
    first_position: int
    first_crc32c: int


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    """The 56 bytes."""
    body = LAYOUT.pack(
        MAGIC,
        checkpoint.flushed_position,
        checkpoint.replay_position,
        checkpoint.replay_crc32c,
        checkpoint.epoch,
        checkpoint.store_time_ms,
        checkpoint.first_position,
        checkpoint.first_crc32c,
    )
    return body + crc32c(body).to_bytes(4, "little")


def decode_checkpoint(data: bytes) -> Checkpoint | None:
    """None if these are not the bytes of a checkpoint."""
    if len(data) != SIZE_BYTES or crc32c(data[:-4]) != int.from_bytes(data[-4:], "little"):
        return None
    magic, *values = LAYOUT.unpack_from(data)
    if magic != MAGIC:
        return None
    checkpoint = Checkpoint(*values)
    return checkpoint if checkpoint.flushed_position >= checkpoint.replay_position else None


def read_checkpoint(disk: Disk, path: str) -> Checkpoint | None:
    """None if there is none that holds."""
    data = read_cache(disk, path)
    return None if data is None else decode_checkpoint(data)


def write_checkpoint(disk: Disk, path: str, checkpoint: Checkpoint) -> None:
    """Replaces the checkpoint; durable when it returns."""
    assert checkpoint.flushed_position >= checkpoint.replay_position
    write_file_atomically(disk, path, encode_checkpoint(checkpoint))
