"""The trailer of a record as numpy sees it: `record.FIXED_TRAILER` of many records. Apart from it, since numpy is slow to import."""

from __future__ import annotations

from typing import Final

import numpy as np

from .record import FIXED_TRAILER_SIZE_BYTES, STAMP_SIZE_BYTES

_STAMP: Final = [
    ("queue_id_tag", "V2"),
    ("queue_id", "<u4"),
    ("store_time_tag", "V2"),
    ("store_time_ms", "<u8"),
    ("queue_offset_tag", "V2"),
    ("queue_offset", "<u8"),
    ("physical_offset_tag", "V2"),
    ("physical_offset", "<u8"),
]

STAMP_DTYPE: Final = np.dtype(_STAMP)
"""What the broker stamps: the end of the trailer."""

FIXED_TRAILER_DTYPE: Final = np.dtype(
    [
        ("tag_code_tag", "u1"),
        ("tag_code", "<i8"),
        ("key_hash_tag", "u1"),
        ("key_hash", "<u8"),
        ("sharding_hash_tag", "u1"),
        ("sharding_hash", "<u4"),
        ("producer_id_tag", "u1"),
        ("producer_id", "<u8"),
        ("producer_epoch_tag", "u1"),
        ("producer_epoch", "<u4"),
        ("sequence_tag", "u1"),
        ("sequence", "<u8"),
        ("crc32c_tag", "u1"),
        ("crc32c", "<u4"),
        ("born_time_ms_tag", "V2"),
        ("born_time_ms", "<u8"),
        ("flags_tag", "V2"),
        ("flags", "<u4"),
        *_STAMP,
    ]
)
"""The trailer behind topic and due time."""

assert STAMP_DTYPE.itemsize == STAMP_SIZE_BYTES
assert FIXED_TRAILER_DTYPE.itemsize == FIXED_TRAILER_SIZE_BYTES
