"""The trailer as arrays."""

from __future__ import annotations

from protomq.wire import record as layout
from protomq.wire.trailer_arrays import FIXED_TRAILER_DTYPE


def test_the_trailer_is_where_the_format_says() -> None:
    fields = FIXED_TRAILER_DTYPE.fields
    assert fields is not None
    for name, position in {
        "tag_code": layout.TAG_CODE_AT, "key_hash": layout.KEY_HASH_AT,
        "producer_id": layout.PRODUCER_ID_AT, "producer_epoch": layout.PRODUCER_EPOCH_AT,
        "sharding_hash": layout.SHARDING_HASH_AT,
        "sequence": layout.SEQUENCE_AT, "crc32c": layout.CRC32C_AT,
        "born_time_ms": layout.BORN_TIME_MS_AT, "flags": layout.FLAGS_AT,
        "queue_id": layout.QUEUE_ID_AT, "store_time_ms": layout.STORE_TIME_MS_AT,
        "queue_offset": layout.QUEUE_OFFSET_AT, "physical_offset": layout.PHYSICAL_OFFSET_AT,
    }.items():  # fmt: skip
        assert fields[name][1] == FIXED_TRAILER_DTYPE.itemsize + position
