"""Planning a read, on the driver: where it starts and ends, what a micro-batch takes, what is gone.

The decisions are those of `offsets.py`; here the cluster is asked. Time is handed in.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from protomq import MessageQueue
from protomq.errors import BrokerMissingError, ProtomqError

from .cluster import Cluster
from .offsets import (
    DataLossError,
    OffsetRange,
    Positions,
    Seen,
    StreamState,
    carried,
    clip,
    find_data_loss,
    lag_of,
    limit_ends,
    made_again,
    queue_name,
    ranges_between,
    resolve,
    say_made_again,
    share_of,
    split,
    times_wanted,
    without,
)
from .options import EARLIEST, Bound, ReadOptions

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
        seen = self._cluster.see(self._queues_of_batch())
        start = self._resolve("starting", options.start, seen)
        end = self._resolve("ending", options.end, seen)
        return self._tasks(ranges_between(start, end, seen.incarnations), seen)

    def _queues_of_batch(self) -> list[MessageQueue]:
        """All; without those of a broker that stays away only if losses are accepted."""
        subscription = self._options.subscription
        try:
            return self._cluster.all_queues(subscription)
        except BrokerMissingError as error:
            if self._options.fail_on_data_loss:
                raise
            logger.warning("read without what a broker stores: %s", error)
            return self._cluster.queues(subscription)

    # -- stream ------------------------------------------------------------------------------------------------------------

    def initial(self, query: str) -> StreamState:
        """Where a new query starts; `query` is its name. Raises BrokerMissingError.

        A queue that is seen later is read from its first message. If that is not the start, brokers that are away are waited for.
        """
        start = self._options.start
        look = self._cluster.queues if start.word == EARLIEST else self._cluster.all_queues
        seen = self._cluster.see(look(self._options.subscription))
        positions = self._resolve("starting", start, seen)
        return StreamState(positions, query, seen.incarnations)

    def latest(self, state: StreamState) -> tuple[StreamState, Positions]:
        """The state as it counts now, and where the queues end now.

        Raises DataLossError if a topic was made again, or a queue ends before what was read already.
        """
        seen = self._see()
        state = self._current(state, seen)
        there = {queue: found.end_offset for queue, found in seen.ranges.items()}
        # What is deleted counts in no limit; if it was to be read, `plan_between` says so.
        start = dict(state.positions)
        begun = dict(state.begun)
        for queue, found in seen.ranges.items():
            if queue not in start:
                if found.min_offset:
                    start[queue] = begun[queue] = found.min_offset
            elif not self._options.fail_on_data_loss:
                start[queue] = max(start[queue], found.min_offset)
        state = state._replace(positions=start, begun=begun)
        fallen = [queue for queue in there if there[queue] < start.get(queue, 0)]
        if fallen:
            queue = fallen[0]
            self._lose(
                f"{queue.topic}/{queue_name(queue)} ends at {there[queue]}, but was read up to"
                f" {start[queue]} already: its broker has lost its newest messages"
            )
        self._latest = carried(start, there)
        return state, self._latest

    def _current(self, state: StreamState, seen: Seen) -> StreamState:
        """What is known of topics that were made again, forgotten; and what was not known, remembered."""
        gone = made_again(state.incarnations, seen.incarnations)
        for share in gone:
            self._lose(say_made_again(share), "continues at its beginning")
        return state._replace(
            positions=without(state.positions, gone),
            begun=without(state.begun, gone),
            incarnations={**state.incarnations, **seen.incarnations},
        )

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

    def plan_between(self, start: StreamState, end: StreamState) -> list[OffsetRange]:
        """The tasks of a micro-batch. Raises DataLossError."""
        # What was made again between the two begins at its beginning.
        known = without(start.positions, made_again(start.incarnations, end.incarnations))
        known = {**end.begun, **known}
        wanted = ranges_between(known, end.positions, end.incarnations)
        if not wanted:
            return []
        seen = self._cluster.see([item.queue for item in wanted])
        gone = made_again(end.incarnations, seen.incarnations)
        for share in gone:
            self._lose(say_made_again(share), "continues at its beginning")
        return self._tasks([item for item in wanted if share_of(item.queue) not in gone], seen)

    def commit(self, state: StreamState, group: str) -> None:
        """Tells the cluster how far the query is; only for those who look at lag: the checkpoint is what counts."""
        try:
            self._cluster.commit(group, state.positions, state.incarnations, COMMIT_TIMEOUT_S)
        except ProtomqError as error:
            logger.warning("offsets of group %s are not committed: %s", group, error)

    # ----------------------------------------------------------------------------------------------------------------------

    def _see(self) -> Seen:
        """The queues as they are now, new ones too."""
        self._cluster.refresh()
        return self._cluster.see(self._cluster.queues(self._options.subscription))

    def _resolve(self, which: str, bound: Bound, seen: Seen) -> Positions:
        ranges = seen.ranges
        times_name = (
            f"{which}Timestamp" if bound.time_ms is not None else f"{which}OffsetsByTimestamp"
        )
        times = times_wanted(times_name, bound, sorted(ranges))
        name = times_name if times else f"{which}Offsets"
        if which == "ending" and times:
            # No message of that time or later: all there is.
            found = self._cluster.offsets_for_times(times, seen.incarnations)
            return {queue: min(found[queue], ranges[queue].end_offset) for queue in ranges}
        found = self._cluster.offsets_for_times(times, seen.incarnations)
        return resolve(name, bound, ranges, found)

    def _tasks(self, wanted: Sequence[OffsetRange], seen: Seen) -> list[OffsetRange]:
        lost = find_data_loss(wanted, seen.ranges)
        if lost:
            self._lose("; ".join(lost[:5]))
        options = self._options
        return split(clip(wanted, seen.ranges), options.min_partitions, options.records_max)

    def _lose(self, text: str, instead: str = "continues without them") -> None:
        if self._options.fail_on_data_loss:
            raise DataLossError(f"{text} (failOnDataLoss=false {instead})")
        logger.warning("messages are lost: %s", text)
