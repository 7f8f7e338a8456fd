"""What a broker shows on its metrics page. Everything is read from what is there anyway; nothing is counted for it.

The number of series is bounded by `metrics.series_max`: topics' counters come first, then the lags of groups, then ranges of queues. What
is left out is counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from protomq_runtime.metrics_page import Column, Table

from .store.errors import StoreError

if TYPE_CHECKING:
    from protomq_runtime.lane_pool import PoolStatus

    from .store.store import Store

_BROKER: Final = (
    Column("protomq_start_time_seconds", "started (s since 1970)", "When the process started"),
    Column("protomq_topics", "topics", "Number of topics"),
    Column("protomq_writes_refused", "writes refused", "1: no sends are taken now; `cluster status` says why"),
    Column("protomq_disk_used_ratio", "disk used", "Used part of the disk of the store, 0 to 1"),
    Column("protomq_resident_memory_bytes", "memory (bytes)", "Resident memory of the process"),
    Column("protomq_name_servers", "name servers", "Name servers that the broker registers with"),
    Column("protomq_name_servers_registered", "... that know it", "Those that know the broker now"),
    Column("protomq_log_damaged_ranges", "damaged ranges", "Parts of the log in quarantine"),
    Column("protomq_queue_files_damaged", "damaged queue files", "Consume queue files found damaged and not healed"),
    Column("protomq_queue_files_healed", "healed queue files", "Consume queue files made anew from the log", True),
)  # fmt: skip
_POSITIONS: Final = (
    Column("protomq_log_first_position_bytes", "first", "Lowest physical offset that is still stored"),
    Column("protomq_log_flushed_position_bytes", "flushed", "What is on stable storage"),
    Column("protomq_log_appended_position_bytes", "appended", "End of the log"),
    Column("protomq_log_readable_position_bytes", "readable", "What consumers may see"),
)  # fmt: skip
_LANES: Final = (
    Column("protomq_lane_threads", "threads", "Threads of the lane"),
    Column("protomq_lane_depth", "waiting", "Calls that wait"),
    Column("protomq_lane_depth_max", "may wait", "Calls that may wait before the lane is full"),
    Column("protomq_lane_queue_time_seconds", "longest wait (s)", "Longest wait of a call lately"),
    Column("protomq_lane_calls", "calls", "Calls taken", True),
    Column("protomq_lane_rejections", "refused", "Calls refused", True),
    Column("protomq_lane_connections", "connections", "Connections of the remoting port"),
    Column("protomq_lane_holds", "held", "Calls held now"),
)
_TOPICS: Final = (
    Column("protomq_topic_records_in", "messages in", "Messages stored", True),
    Column("protomq_topic_bytes_in", "bytes in", "Bytes stored", True),
    Column("protomq_topic_records_out", "messages out", "Messages given to consumers", True),
    Column("protomq_topic_bytes_out", "bytes out", "Bytes given to consumers", True),
)
_LAGS: Final = (
    Column("protomq_group_lag_records", "lag", "Readable messages from the group's committed offset on"),
    Column("protomq_group_committed_offset", "committed", "Offset at which the group goes on"),
)  # fmt: skip
_QUEUES: Final = (
    Column("protomq_queue_end_offset", "end offset", "One past the last readable offset"),
    Column("protomq_queue_first_offset", "first offset", "First offset that is still stored"),
)
_LEFT_OUT: Final = (
    Column("protomq_series_left_out", "series left out", "Beyond metrics.series_max"),
)


class BrokerMetrics:
    """Reads a broker's numbers. `tables` may be called by any thread, one at a time.

    `lane_statuses` gives the lanes; `name_servers` how many there are and how many of them know the broker; `write_refusal` why no
    writes are taken, "" if they are.
    """

    def __init__(
        self,
        store: Store,
        *,
        start_time_ms: int,
        series_max: int,
        lane_statuses: Callable[[], Sequence[PoolStatus]],
        name_servers: Callable[[], tuple[int, int]],
        write_refusal: Callable[[], str],
    ) -> None:
        self._store = store
        self._start_time_ms = start_time_ms
        self._series_max = series_max
        self._lane_statuses = lane_statuses
        self._name_servers = name_servers
        self._write_refusal = write_refusal
        self._left = 0
        self._left_out = 0

    def tables(self) -> Iterator[Table]:
        """All numbers as they are now."""
        self._left, self._left_out = self._series_max, 0
        yield self._broker()
        store = self._store
        positions = (
            store.min_position,
            store.flushed_position,
            store.appended_position,
            store.readable_position,
        )
        yield Table("Positions in the log (bytes)", (), _POSITIONS, [((), positions)])
        yield Table("Lanes", ("lane",), _LANES, [_lane_row(each) for each in self._lane_statuses()])
        yield Table("Topics, since the start", ("topic",), _TOPICS, list(self._topics()))
        yield Table("Groups", ("group", "topic", "queue"), _LAGS, list(self._lags()))
        yield Table("Queues", ("topic", "queue"), _QUEUES, list(self._queues()))
        yield Table("This page", (), _LEFT_OUT, [((), (self._left_out,))])

    def _broker(self) -> Table:
        store = self._store
        configured, registered = self._name_servers()
        numbers = (
            self._start_time_ms / 1_000,
            len(store.topics.all()),
            int(bool(self._write_refusal())),
            store.disk_used_ratio(),
            resident_memory_bytes(),
            configured,
            registered,
            len(store.damaged_ranges),
            len(store.damaged_files),
            store.healed_file_count,
        )
        return Table("Broker", (), _BROKER, [((), numbers)])

    def _topics(self) -> Iterator[tuple[Sequence[str], Sequence[float]]]:
        for topic in self._store.topics.all():
            if self._take(len(_TOPICS)):
                counters = self._store.counters_of(topic.name)
                numbers = (
                    counters.records_in,
                    counters.bytes_in,
                    counters.records_out,
                    counters.bytes_out,
                )
                yield (topic.name,), numbers

    def _lags(self) -> Iterator[tuple[Sequence[str], Sequence[float]]]:
        offsets = self._store.offsets
        for group, topics in sorted(offsets.groups().items()):
            for topic in sorted(topics):
                config = self._store.topics.find(topic)
                if config is None:
                    continue
                known_offsets = offsets.of_topic(group, topic, config.incarnation)
                for queue_id, committed in sorted(known_offsets.items()):
                    if not self._take(len(_LAGS)):
                        continue
                    known = self._range(topic, queue_id)
                    if known is not None:
                        lag = max(0, known[1] - committed)
                        yield (group, topic, str(queue_id)), (lag, committed)

    def _queues(self) -> Iterator[tuple[Sequence[str], Sequence[float]]]:
        for topic in self._store.topics.all():
            for queue_id in range(max(topic.read_queues, topic.write_queues)):
                if not self._take(len(_QUEUES)):
                    continue
                known = self._range(topic.name, queue_id)
                if known is not None:
                    yield (topic.name, str(queue_id)), (known[1], known[0])

    def _range(self, topic: str, queue_id: int) -> tuple[int, int] | None:
        try:
            return self._store.queue_range(topic, queue_id)
        except StoreError:
            return None  # It is being healed; the number of damaged files says so.

    def _take(self, count: int) -> bool:
        if self._left < count:
            self._left_out += count
            return False
        self._left -= count
        return True


def _lane_row(status: PoolStatus) -> tuple[Sequence[str], Sequence[float]]:
    numbers = (
        status.threads,
        status.depth,
        status.depth_max,
        status.queue_time_us / 1e6,
        status.calls,
        status.rejections,
        status.connections,
        status.holds,
    )
    return (status.lane,), numbers


def resident_memory_bytes() -> int:
    """Of this process."""
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
