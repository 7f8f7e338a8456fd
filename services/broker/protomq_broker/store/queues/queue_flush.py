"""Writing the new entries of many queues: each to a file of its own, their check bits computed for all of them at once.

With ten thousand topics a flush finds a batch in each of a thousand queues. One by one, the array operations over their entries took
more of the interpreter, and so of the writer, than anything else (docs/profiles.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from .consume_queue import ConsumeQueue, Unwritten
from .entry_check import sealed_together

TOGETHER_SIZE_BYTES: Final = 256 << 10
"""Sealed at once: the arrays for it fit into a core's cache."""


def flush_together(
    queues: Sequence[ConsumeQueue], on_written: Callable[[ConsumeQueue], None]
) -> None:
    """As `ConsumeQueue.flush` of each, in this order; `on_written` is called with each queue that is done.

    After an OSError nothing is lost: queues without a call of `on_written` are still in memory.
    """
    group: list[tuple[ConsumeQueue, Unwritten]] = []
    size_bytes = 0
    for queue in queues:
        new = queue.unwritten()
        group.append((queue, new))
        size_bytes += len(new.entries)
        if size_bytes >= TOGETHER_SIZE_BYTES:
            _flush_group(group, on_written)
            group, size_bytes = [], 0
    if group:
        _flush_group(group, on_written)


def _flush_group(
    group: Sequence[tuple[ConsumeQueue, Unwritten]], on_written: Callable[[ConsumeQueue], None]
) -> None:
    offsets, parts, salts, _ = zip(*(new for _, new in group), strict=True)
    data = memoryview(sealed_together(parts, offsets, salts))
    at = 0
    for queue, new in group:
        size = len(new.entries)
        if size:
            queue.write(new.queue_offset, data[at : at + size])
        at += size
        if new.goes_on:
            queue.flush()
        on_written(queue)
