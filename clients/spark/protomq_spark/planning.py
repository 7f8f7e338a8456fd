"""Planning a read, on the driver: where it starts and ends, what a micro-batch takes, what is gone.

The decisions are those of `offsets.py`; here the cluster is asked. Time is handed in.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from protomq._types import MessageQueue, QueueRange
from protomq.errors import ProtomqError

from .cluster import Cluster
from .offsets import (
    DataLossError,
    OffsetRange,
    Positions,
    carried,
    clip,
    find_data_loss,
    lag_of,
    limit_ends,
    queue_name,
    ranges_between,
    resolve,
    split,
    times_wanted,
)
from .options import Bound, ReadOptions

logger = logging.getLogger("protomq_spark")

COMMIT_TIMEOUT_S = 3.0


class Planner:
    """Plans the reads of one query. One thread."""

    def __init__(self, options: ReadOptions, cluster: Cluster) -> None:
        self._options = options
        self._cluster = cluster
        self._last_batch_s: float | None = None
        self._latest: Positions = {}

    # -- batch -------------------------------------------------------------------------------------------------------------

    def plan_batch(self) -> list[OffsetRange]:
        """The tasks of a batch query."""
        options = self._options
        ranges = self._ranges()
        start = self._resolve("starting", options.start, ranges)
        end = self._resolve("ending", options.end, ranges)
        return self._tasks(ranges_between(start, end), ranges)

    # -- stream ------------------------------------------------------------------------------------------------------------

    def initial(self) -> Positions:
        """Where a new query starts."""
        return self._resolve("starting", self._options.start, self._ranges())

    def latest(self, start: Positions) -> Positions:
        """Where the queues end now. Raises DataLossError if one ends before what was read already."""
        self._cluster.refresh()
        there = {queue: found.end_offset for queue, found in self._ranges().items()}
        fallen = [queue for queue in there if there[queue] < start.get(queue, 0)]
        if fallen:
            queue = fallen[0]
            self._lose(
                f"{queue.topic}/{queue_name(queue)} ends at {there[queue]}, but was read up to"
                f" {start[queue]} already: its broker has lost its newest messages"
            )
        self._latest = carried(start, there)
        return self._latest

    def last_seen(self) -> Positions:
        """What `latest` answered last; for reporting lag."""
        return self._latest

    def next_end(
        self, start: Positions, latest: Positions, count_max: int | None, now_s: float, wait: bool
    ) -> Positions:
        """The end of the next micro-batch. `wait`: whether minOffsetsPerTrigger counts; then too little means nothing, for now."""
        least = self._options.offsets_min
        if self._last_batch_s is None:
            self._last_batch_s = now_s
        lag = lag_of(start, latest)
        if wait and least is not None and lag < least:
            if now_s - self._last_batch_s < self._options.trigger_delay_max_s:
                return start
        if lag:
            self._last_batch_s = now_s
        return latest if count_max is None else limit_ends(start, latest, count_max)

    def plan_between(self, start: Positions, end: Positions) -> list[OffsetRange]:
        """The tasks of a micro-batch."""
        wanted = ranges_between(start, end)
        if not wanted:
            return []
        return self._tasks(wanted, self._cluster.ranges([item.queue for item in wanted]))

    def commit(self, end: Positions, group: str) -> None:
        """Tells the cluster how far the query is; only for those who look at lag: the checkpoint is what counts."""
        try:
            self._cluster.commit(group, end, COMMIT_TIMEOUT_S)
        except ProtomqError as error:
            logger.warning("offsets of group %s are not committed: %s", group, error)

    # ----------------------------------------------------------------------------------------------------------------------

    def _ranges(self) -> dict[MessageQueue, QueueRange]:
        return self._cluster.ranges(self._cluster.queues(self._options.subscription))

    def _resolve(
        self, which: str, bound: Bound, ranges: dict[MessageQueue, QueueRange]
    ) -> Positions:
        times_name = (
            f"{which}Timestamp" if bound.time_ms is not None else f"{which}OffsetsByTimestamp"
        )
        times = times_wanted(times_name, bound, sorted(ranges))
        name = times_name if times else f"{which}Offsets"
        if which == "ending" and times:
            # No message of that time or later: all there is.
            found = self._cluster.offsets_for_times(times)
            return {queue: min(found[queue], ranges[queue].end_offset) for queue in ranges}
        return resolve(name, bound, ranges, self._cluster.offsets_for_times(times))

    def _tasks(
        self, wanted: Sequence[OffsetRange], ranges: dict[MessageQueue, QueueRange]
    ) -> list[OffsetRange]:
        lost = find_data_loss(wanted, ranges)
        if lost:
            self._lose("; ".join(lost[:5]))
        options = self._options
        return split(clip(wanted, ranges), options.min_partitions, options.records_max)

    def _lose(self, text: str) -> None:
        if self._options.fail_on_data_loss:
            raise DataLossError(f"{text} (failOnDataLoss=false goes on without them)")
        logger.warning("messages are lost: %s", text)
