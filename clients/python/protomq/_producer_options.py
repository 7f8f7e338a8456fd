"""Settings of producers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypedDict

from ._batching import REQUEST_SIZE_MAX_BYTES
from ._checks import (
    check_count,
    check_flag,
    check_group,
    check_seconds,
    check_text,
)
from ._compression import COMPRESS_OVER_BYTES, CompressionName
from ._hook_points import check_hooks

if TYPE_CHECKING:
    from .hooks import Hook

SEND_TIMEOUT_S: Final = 3.0
"""RocketMQ's sendMsgTimeout; it covers all attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerOptions:
    """Settings of a producer. The defaults are RocketMQ's where it has the setting.

    - `group`: name of the producer group, which the servers' operators see.
    - `send_timeout_s`: seconds that a send may take, 0.001 or more; compression and all attempts together.
    - `retries`: attempts after the first, 0 to 16. `retry_another_broker`: they may go to another broker, if the queue is open.
    - `compression`: "zlib", which every consumer can read in any language. "zstd" and "lz4" are faster, but consumers need
      them installed. "auto" is zstd where it is installed here, else zlib; or "none".
    - `compression_level`: None for the codec's own.
    - `compress_over_bytes`: larger bodies are compressed, up to 32 MiB: consumers unpack no more.
    - `fault_tolerance`: leave slow and failing brokers alone for a while.
    - `wait_store_ok`: a send waits until the message is stored as its broker promises. If False, it waits neither for the disk nor
      for replicas. Then a power cut or a fail-over may take the message, in spite of SEND_OK.
    - `hooks`: code of yours that is called around sends, decisions on transactions and calls (protomq.hooks).
    - `trace`: each send is told in RMQ_SYS_TRACE_TOPIC, in the background (docs/track.md).
    - `born_host`: sent along with every message if given.
    - `producer_id`, `producer_epoch`: a stable identity; random and 0 by default. Whoever restarts with the same id must raise the epoch,
      and no two may have the same: else a message may be refused with ProducerIdTakenError.
    - `batch_size_max_bytes`: where `send_batch` splits.
    - `coalesce_size_max_bytes`, `coalesce_count_max`: the most that concurrent sends are gathered into one request.
    - `pending_size_max_bytes`: how much may wait to be sent; whoever sends more waits for room.
    """

    group: str = ""
    send_timeout_s: float = SEND_TIMEOUT_S
    retries: int = 2
    retry_another_broker: bool = True
    compression: CompressionName = "zlib"
    compression_level: int | None = None
    compress_over_bytes: int = COMPRESS_OVER_BYTES
    fault_tolerance: bool = False
    wait_store_ok: bool = True
    hooks: Sequence[Hook] = ()
    trace: bool = False
    born_host: str = ""
    producer_id: int | None = None
    producer_epoch: int = 0
    batch_size_max_bytes: int = REQUEST_SIZE_MAX_BYTES
    coalesce_size_max_bytes: int = 1 << 20
    coalesce_count_max: int = 1024
    pending_size_max_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        check_group(self.group)
        check_seconds("send_timeout_s", self.send_timeout_s)
        check_count("batch_size_max_bytes", self.batch_size_max_bytes, 1, 16 << 20)
        if self.compression_level is not None:
            check_count("compression_level", self.compression_level, -(1 << 17), 22)
        check_text("born_host", self.born_host)
        check_text("compression", self.compression)
        for name in ("retry_another_broker", "fault_tolerance", "wait_store_ok", "trace"):
            check_flag(name, getattr(self, name))
        check_hooks(self.hooks)
        for name in (
            "coalesce_size_max_bytes",
            "coalesce_count_max",
            "pending_size_max_bytes",
            "compress_over_bytes",
        ):
            check_count(name, getattr(self, name), 1)


class ProducerSettings(TypedDict, total=False):
    """Keyword arguments of Producer and AsyncProducer: the fields of ProducerOptions but its group (a test compares them)."""

    send_timeout_s: float
    retries: int
    retry_another_broker: bool
    compression: CompressionName
    compression_level: int | None
    compress_over_bytes: int
    fault_tolerance: bool
    wait_store_ok: bool
    hooks: Sequence[Hook]
    trace: bool
    born_host: str
    producer_id: int | None
    producer_epoch: int
    batch_size_max_bytes: int
    coalesce_size_max_bytes: int
    coalesce_count_max: int
    pending_size_max_bytes: int
