"""Records as bytes, for those who build connectors and tools on protomq: how requests are written, and answers to pulls read.

The layout is in `protomq.wire.record`, what it means in docs/wire.md; `protomq.calls` sends and pulls.
"""

from __future__ import annotations

from ._batching import RecordEncoder, make_front, refuse_large_body
from ._compression import (
    COMPRESS_OVER_BYTES,
    DECOMPRESSED_SIZE_MAX_BYTES,
    Compressor,
    compress_body,
    decompress,
    make_compressor,
)
from ._pull_answer import PullAnswer, decode_messages, decode_pull_answer
from ._types import PullStatus
from .wire.hashing import sharded_index

__all__ = [
    "COMPRESS_OVER_BYTES",
    "DECOMPRESSED_SIZE_MAX_BYTES",
    "Compressor",
    "PullAnswer",
    "PullStatus",
    "RecordEncoder",
    "compress_body",
    "decode_messages",
    "decode_pull_answer",
    "decompress",
    "make_compressor",
    "make_front",
    "refuse_large_body",
    "sharded_index",
]
