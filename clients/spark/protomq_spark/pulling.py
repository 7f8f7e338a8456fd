"""Reading a range of a queue, on an executor: pulls in, Arrow batches out.

Rules:
- While Spark takes one batch, the next is decoded and the one behind it is on its way. Only these three are in memory, even if
  the range is long.
- Errors that may pass are retried within the time-out, which counts from the last message that arrived. So a broker that
  restarts costs only a pause, since the place in the queue is known.
- Messages that are gone are an error, or skipped and said in the log, as failOnDataLoss has it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from protomq import MessageQueue
from protomq.calls import PullAnswer, PullStatus, Selection
from protomq.errors import CorruptLogError, TopicRecreatedError

from .cluster import Cluster
from .offsets import DataLossError, OffsetRange, say_made_again, share_of
from .records import Decoding, decode_records

logger = logging.getLogger("protomq_spark")

ANSWERS_AHEAD: Final = 2
"""Answers that a task has asked for beyond the batch that Spark has: one is decoded, one is on its way. A thread for each."""


@dataclass(frozen=True, slots=True)
class PullSettings:
    """How to read a range."""

    decoding: Decoding
    tags: tuple[str, ...] = ()
    fail_on_data_loss: bool = True
    size_max_bytes: int = 4 << 20
    count_max: int = 32_768


def read_range(
    cluster: Cluster, wanted: OffsetRange, settings: PullSettings
) -> Iterator[pa.RecordBatch]:
    """The messages of a range, in order. Raises DataLossError, CorruptMessageError, or the error of the last attempt."""
    with ThreadPoolExecutor(ANSWERS_AHEAD, thread_name_prefix="protomq-read") as helpers:
        decoding: Future[pa.RecordBatch | None] | None = None
        for position, answer in _answers(cluster, wanted, settings, helpers):
            before = decoding
            decoding = helpers.submit(_decode, wanted, position, answer, settings)
            yield from _batches(before)
        yield from _batches(decoding)


def _batches(decoding: Future[pa.RecordBatch | None] | None) -> Iterator[pa.RecordBatch]:
    batch = None if decoding is None else decoding.result()
    if batch is not None and batch.num_rows:
        yield batch


def _answers(
    cluster: Cluster, wanted: OffsetRange, settings: PullSettings, ahead: ThreadPoolExecutor
) -> Iterator[tuple[int, PullAnswer]]:
    """The answers with messages, and from which offset on each was pulled; the next is on its way by then."""
    position = wanted.start
    pending = ahead.submit(_pull, cluster, wanted, position, settings)
    while position < wanted.end:
        try:
            answer = pending.result()
        except TopicRecreatedError:
            text = say_made_again(share_of(wanted.queue))
            if settings.fail_on_data_loss:
                raise DataLossError(f"{text} (failOnDataLoss=false continues without it)") from None
            logger.warning("messages are lost: %s", text)
            return
        except CorruptLogError as error:
            position = _behind_damage(wanted, position, error, settings)
            if position < wanted.end:
                pending = ahead.submit(_pull, cluster, wanted, position, settings)
            continue
        following = _next_position(wanted, position, answer, settings)
        if following < wanted.end:
            pending = ahead.submit(_pull, cluster, wanted, following, settings)
        if answer.status is PullStatus.FOUND:
            yield position, answer
        position = following


def _pull(
    cluster: Cluster, wanted: OffsetRange, position: int, settings: PullSettings
) -> PullAnswer:
    return cluster.calls.pull(
        wanted.queue,
        position,
        record_count_max=min(settings.count_max, wanted.end - position),
        size_max_bytes=settings.size_max_bytes,
        selection=Selection(settings.tags),
        topic_incarnation=wanted.incarnation,
    )


def _next_position(
    wanted: OffsetRange, position: int, answer: PullAnswer, settings: PullSettings
) -> int:
    """Where to go on; the end of the range if there is nothing more. Raises DataLossError."""
    queue, end = wanted.queue, wanted.end
    if answer.status is PullStatus.FOUND:
        if not settings.tags:
            _check_dense(queue, position, answer, settings)
        return max(answer.next_offset, position + 1)
    if answer.status is PullStatus.NO_MATCHED_MSG:
        return max(answer.next_offset, position + 1)
    if answer.status is PullStatus.OFFSET_ILLEGAL and position < answer.min_offset:
        upto = min(answer.min_offset, end)
        _lost(queue, position, upto, f"deleted, the first is {answer.min_offset}", settings)
        return upto
    # The end was readable when it was planned: what is missing now was lost with the broker's memory.
    _lost(
        queue, position, end, f"not there any more, the queue ends at {answer.end_offset}", settings
    )
    return end


def _behind_damage(
    wanted: OffsetRange, position: int, error: CorruptLogError, settings: PullSettings
) -> int:
    """Where to go on after a part of the log that the broker has in quarantine. Raises DataLossError, or the error if it does not say."""
    next_offset = int(error.metadata.get("next_offset", "-1"))
    if next_offset <= position:
        raise error
    following = min(next_offset, wanted.end)
    _lost(wanted.queue, position, following, f"damaged on the broker's disk: {error}", settings)
    return following


def _check_dense(
    queue: MessageQueue, position: int, answer: PullAnswer, settings: PullSettings
) -> None:
    """Without a filter every offset must come: a hole is a message that the log has lost."""
    offsets = answer.queue_offsets
    expected = answer.next_offset - position
    if len(offsets) < expected:
        _lost(queue, position, answer.next_offset, f"{expected - len(offsets)} damaged", settings)


def _lost(queue: MessageQueue, start: int, end: int, why: str, settings: PullSettings) -> None:
    text = f"{queue.topic}/{queue.broker_name}:{queue.queue_id}: of the offsets {start} to {end - 1}: {why}"
    if settings.fail_on_data_loss:
        raise DataLossError(f"{text} (failOnDataLoss=false continues without them)")
    logger.warning("messages are lost: %s", text)


def _decode(
    wanted: OffsetRange, position: int, answer: PullAnswer, settings: PullSettings
) -> pa.RecordBatch | None:
    starts = np.asarray(answer.starts).astype(np.int64) + answer.base
    ends = starts + np.asarray(answer.sizes)
    offsets = np.asarray(answer.queue_offsets).astype(np.int64)
    inside = (offsets >= position) & (offsets < wanted.end)
    if not inside.all():
        starts, ends, offsets = starts[inside], ends[inside], offsets[inside]
    if not len(offsets):
        return None
    return decode_records(answer.raw, starts, ends, offsets, wanted.queue, settings.decoding)
