"""The metrics of a broker: their tables, and how to read them. Only durations are counted for metrics; all other numbers exist anyway.

The number of series is bounded by `metrics.series_max`: topics' counters come first, then the lags of groups, then ranges of queues. A
metric counts the series left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Final

from protomq.v1.state_pb2 import TimerEnd
from protomq_runtime.metrics import LANES, Kind, Metric, Numbers, Row, Table, lane_numbers

from .group_lag import lag_of, queues_of
from .pull_service import HOLD_BOUNDS_S
from .store.errors import StoreError
from .store.log.durations import DISK_BOUNDS_S, LATE_BOUNDS_S, Durations
from .store.state.popped_queue import QueueOfGroup
from .store.state.transactions import Ending

if TYPE_CHECKING:
    from protomq_runtime.lane_pool import PoolStatus

    from .log_time import LogTime
    from .store.store import Store
    from .timer_mover import TimerMover

BROKER: Final = Table(
    "Broker",
    (),
    (
        Metric("protomq.start_time", "s", "started (s since 1970)", "When the process started"),
        Metric("protomq.topics", "{topic}", "topics", "Number of topics"),
        Metric("protomq.writes_refused", "", "writes refused", "1: no sends are taken now; `cluster status` says why"),
        Metric("protomq.disk.used", "1", "disk used", "Used part of the disk of the store"),
        Metric("protomq.resident_memory", "By", "memory (bytes)", "Resident memory of the process"),
        Metric("protomq.name_servers", "{server}", "name servers", "Name servers that the broker registers with"),
        Metric("protomq.name_servers_registered", "{server}", "... that know it", "Those that know the broker now"),
        Metric(
            "protomq.name_servers_refusing", "{server}", "... that refuse it",
            "Those that refuse the broker its name; `cluster list` says why",
        ),
        Metric("protomq.log.damaged_ranges", "{range}", "damaged ranges", "Parts of the log in quarantine"),
        Metric(
            "protomq.queue_files.damaged", "{file}", "damaged queue files",
            "Consume queue files found damaged and not healed",
        ),
        Metric(
            "protomq.queue_files.healed", "{file}", "healed queue files",
            "Consume queue files that were healed from the log", Kind.COUNTER,
        ),
        Metric(
            "protomq.log.healed_ranges", "{range}", "healed ranges",
            "Damaged parts of the log that were healed from a replica", Kind.COUNTER,
        ),
        Metric(
            "protomq.filters_failed", "{call}", "failed filters",
            "Pulls and pops that ended since a module failed at a message; held pulls that share a search count once", Kind.COUNTER,
        ),
    ),
)  # fmt: skip
POSITIONS: Final = Table(
    "Positions in the log (bytes)",
    (),
    (
        Metric("protomq.log.first_position", "By", "first", "Lowest physical offset that is still stored"),
        Metric("protomq.log.flushed_position", "By", "flushed", "What is on stable storage"),
        Metric("protomq.log.appended_position", "By", "appended", "End of the log"),
        Metric("protomq.log.readable_position", "By", "readable", "What consumers may see"),
    ),
)  # fmt: skip
DURATIONS: Final = Table(
    "Durations since the start (s)",
    (),
    (
        Metric(
            "protomq.log.append_duration", "s", "append",
            "Time of an append to the log, of many messages or one, until consume queues and index have them too",
            Kind.HISTOGRAM, DISK_BOUNDS_S,
        ),
        Metric(
            "protomq.log.sync_duration", "s", "fsync", "Time of an fsync of the log", Kind.HISTOGRAM, DISK_BOUNDS_S,
        ),
        Metric(
            "protomq.pull.hold_duration", "s", "hold", "Time that a pull was held, until its answer or until its caller was gone",
            Kind.HISTOGRAM, HOLD_BOUNDS_S,
        ),
    ),
)  # fmt: skip
TRANSACTIONS: Final = Table(
    "Transactions",
    (),
    (
        Metric("protomq.transaction.open", "{transaction}", "open", "Transactions that nobody has ended"),
        Metric("protomq.transaction.committed", "{transaction}", "committed", "Transactions that were committed", Kind.COUNTER),
        Metric("protomq.transaction.rolled_back", "{transaction}", "rolled back", "Transactions that were rolled back", Kind.COUNTER),
        Metric(
            "protomq.transaction.expired", "{transaction}", "expired",
            "Transactions about which nobody could say anything", Kind.COUNTER,
        ),
    ),
)  # fmt: skip
TOPICS: Final = Table(
    "Topics, since the start",
    ("topic",),
    (
        Metric("protomq.topic.records_in", "{record}", "messages in", "Messages stored", Kind.COUNTER),
        Metric("protomq.topic.bytes_in", "By", "bytes in", "Bytes stored", Kind.COUNTER),
        Metric("protomq.topic.records_out", "{record}", "messages out", "Messages given to consumers", Kind.COUNTER),
        Metric("protomq.topic.bytes_out", "By", "bytes out", "Bytes given to consumers", Kind.COUNTER),
    ),
)  # fmt: skip
GROUPS: Final = Table(
    "Groups",
    ("group", "topic", "queue"),
    (
        Metric(
            "protomq.group.lag_records", "{record}", "lag",
            "Readable messages that the group has not consumed, in each queue of its topics; "
            "if it pops: not handed out, or not acknowledged",
        ),
        Metric(
            "protomq.group.committed_offset", "", "committed",
            "Offset below which the group has consumed everything; if it only pulls: the offset that it has committed",
        ),
        Metric(
            "protomq.group.delay", "s", "delay (s)",
            "How long ago the first message was stored that the group has not consumed; 0: there is none. "
            "If it is damaged: the next one that can be read",
        ),
    ),
)  # fmt: skip
QUEUES: Final = Table(
    "Queues",
    ("topic", "queue"),
    (
        Metric("protomq.queue.end_offset", "", "end offset", "One past the last readable offset"),
        Metric("protomq.queue.first_offset", "", "first offset", "First offset that is still stored"),
    ),
)
DELAYS: Final = Table(
    "Delayed messages",
    (),
    (
        Metric("protomq.delayed.pending", "{record}", "pending", "Messages that wait for their time"),
        Metric("protomq.delayed.pending_size", "By", "pending (bytes)", "Bytes of the log that their records have"),
        Metric("protomq.delayed.delivered", "{record}", "delivered", "Messages that fell due and were delivered", Kind.COUNTER),
        Metric("protomq.delayed.recalled", "{record}", "recalled", "Messages that were taken back", Kind.COUNTER),
        Metric(
            "protomq.delayed.dropped", "{record}", "dropped", "Messages that fell due when their topic was gone", Kind.COUNTER,
        ),
        Metric(
            "protomq.delayed.unreadable", "{record}", "unreadable",
            "Messages that fell due and stand in a damaged part of the log", Kind.COUNTER,
        ),
        Metric(
            "protomq.delayed.carried", "By", "carried (bytes)",
            "Bytes of pending messages that were appended again before their segment went", Kind.COUNTER,
        ),
        Metric(
            "protomq.delayed.rebuilds", "{rebuild}", "rebuilds", "How often the timer's files were rebuilt from the log",
            Kind.COUNTER,
        ),
        Metric(
            "protomq.delayed.clock_offset", "s", "clock ahead (s)", "The wall clock less log time, by which messages fall due",
        ),
        Metric(
            "protomq.delayed.lateness", "s", "late", "From its due time until a message is delivered", Kind.HISTOGRAM,
            LATE_BOUNDS_S,
        ),
    ),
)  # fmt: skip
POPS: Final = Table(
    "Pops",
    (),
    (
        Metric("protomq.pop.open", "{record}", "open", "Messages that are held, due, or wait for their sharding key"),
        Metric("protomq.pop.handed_out", "{record}", "handed out", "Messages handed out, each time", Kind.COUNTER),
        Metric("protomq.pop.acked", "{record}", "acked", "Messages acknowledged", Kind.COUNTER),
        Metric("protomq.pop.dead", "{record}", "dead", "Messages that went to the dead letters, or stay there", Kind.COUNTER),
        Metric("protomq.pop.lost", "{record}", "lost", "Messages that were given up, since the log has lost them", Kind.COUNTER),
        Metric(
            "protomq.pop.queue_full", "{pop}", "queue full",
            "Pops that got nothing new of a queue, since 10,000 of its messages are open", Kind.COUNTER,
        ),
    ),
)  # fmt: skip
RETRIES: Final = Table(
    "Retries and dead letters, since the start",
    (),
    (
        Metric("protomq.retries", "{record}", "retries", "Messages that groups sent back and that are delivered again", Kind.COUNTER),
        Metric("protomq.dead_letters", "{record}", "dead letters", "Messages that became dead letters", Kind.COUNTER),
        Metric(
            "protomq.send_backs.repeated", "{request}", "known requests",
            "Requests that sent messages back and were known already: their answers had been lost", Kind.COUNTER,
        ),
        Metric("protomq.dead_letters.replayed", "{record}", "replayed", "Dead letters that were replayed", Kind.COUNTER),
    ),
)  # fmt: skip
REPLICATION: Final = Table(
    "Replication",
    (),
    (
        Metric("protomq.ha.replicas", "{replica}", "slaves", "Of a master: slaves that follow it"),
        Metric(
            "protomq.ha.in_sync_copies", "{copy}", "copies in sync",
            "Of a master: copies of its log that are in sync, its own among them",
        ),
        Metric(
            "protomq.ha.lag", "By", "lag",
            "Of a master: what its slowest slave has not of the log; of a slave: what it has not of its master's",
        ),
        Metric("protomq.ha.following", "", "follows", "1: a slave that follows its master; 0: one that does not, and all masters"),
    ),
)  # fmt: skip
REPLIES: Final = Table(
    "Request and reply",
    (),
    (
        Metric("protomq.reply.callers", "{caller}", "callers", "Callers that wait for replies here, or did within the last 10 s"),
        Metric("protomq.reply.waiting", "{reply}", "waiting", "Replies that their callers do not have yet"),
        Metric("protomq.replies", "{reply}", "replies", "Replies that reached their callers, since the start", Kind.COUNTER),
        Metric("protomq.replies.refused", "{reply}", "refused", "Replies whose callers were gone, since the start", Kind.COUNTER),
    ),
)  # fmt: skip
MEMBERS: Final = Table(
    "Members of consumer groups",
    (),
    (
        Metric("protomq.member.groups", "{group}", "groups", "Groups with members at this broker"),
        Metric("protomq.member.members", "{member}", "members", "Members at this broker, of all groups"),
        Metric("protomq.member.changes", "{change}", "changes", "Members that came or went, each a rebalance of its group", Kind.COUNTER),
        Metric(
            "protomq.member.ownerless_queues", "{queue}", "ownerless queues",
            "Queues here of the members' topics that no member has, over all groups",
        ),
        Metric(
            "protomq.member.ownerless_time", "s", "ownerless (queue seconds)",
            "Queues without an owner times seconds, since the start and over all groups", Kind.COUNTER,
        ),
        Metric(
            "protomq.member.commits_refused", "{commit}", "commits refused",
            "Commits that named a membership that is over or not known yet, or another's queue, since the start", Kind.COUNTER,
        ),
    ),
)  # fmt: skip
LOCKS: Final = Table(
    "Locks of queues",
    (),
    (
        Metric("protomq.lock.held", "{queue}", "held", "Queues here that one member of a group has to itself"),
        Metric("protomq.lock.granted", "{lock}", "granted", "Locks that were given, since the start", Kind.COUNTER),
        Metric("protomq.lock.expired", "{lock}", "expired", "Locks that nobody renewed in time, since the start", Kind.COUNTER),
        Metric("protomq.lock.freed", "{lock}", "freed", "Locks of members that were gone, since the start", Kind.COUNTER),
        Metric(
            "protomq.lock.commits_refused", "{commit}", "commits refused",
            "Commits without the token of their queue's lock: what was finished comes again, to the owner", Kind.COUNTER,
        ),
    ),
)  # fmt: skip
LEFT_OUT: Final = Table(
    "Left out",
    (),
    (Metric("protomq.series_left_out", "{series}", "series left out", "Series beyond `metrics.series_max`"),),
)  # fmt: skip
TABLES: Final = (
    BROKER, POSITIONS, DURATIONS, REPLICATION, DELAYS, RETRIES, REPLIES, LANES, TRANSACTIONS, POPS, MEMBERS, LOCKS, TOPICS, GROUPS,
    QUEUES, LEFT_OUT,
)  # fmt: skip
"""All tables that a broker shows, in this order."""


class BrokerMetrics:
    """Reads a broker's numbers. `numbers` may be called by any thread, one at a time.

    `hold_durations`: of pulls; `mover`, `log_time`: of delayed messages; `retries`, `replies`: the numbers of RETRIES and REPLIES.
    `lane_statuses` gives the lanes; `name_servers` how many there are, how many of them know the broker, and how many refuse it.
    `memberships`, `locks`, `replication`: the numbers of MEMBERS, LOCKS and REPLICATION. `full_pops`: how many pops met a full queue.
    `failed_filters`: how often a module of a user failed. `write_refusal`: why the broker takes no writes, "" if it takes them.
    """

    def __init__(
        self,
        store: Store,
        *,
        start_time_ms: int,
        series_max: int,
        hold_durations: Durations,
        now_ms: Callable[[], int],
        mover: TimerMover,
        retries: Callable[[], tuple[int, int, int, int]],
        replies: Callable[[], tuple[int, int, int, int]],
        log_time: LogTime,
        lane_statuses: Callable[[], Sequence[PoolStatus]],
        name_servers: Callable[[], tuple[int, int, int]],
        memberships: Callable[[], tuple[int, int, int, int, float, int]],
        locks: Callable[[], tuple[int, int, int, int, int]],
        failed_filters: Callable[[], int],
        full_pops: Callable[[], int],
        write_refusal: Callable[[], str],
        replication: Callable[[], tuple[int, int, int, int]],
    ) -> None:
        self._store = store
        self._start_time_ms = start_time_ms
        self._series_max = series_max
        self._hold_durations = hold_durations
        self._mover = mover
        self._retries = retries
        self._replies = replies
        self._now_ms = now_ms
        self._log_time = log_time
        self._lane_statuses = lane_statuses
        self._name_servers = name_servers
        self._memberships = memberships
        self._locks = locks
        self._failed_filters = failed_filters
        self._full_pops = full_pops
        self._write_refusal = write_refusal
        self._replication = replication
        self._left = 0
        self._left_out = 0

    def numbers(self) -> Iterator[Numbers]:
        """All numbers as they are now: TABLES, in their order."""
        self._left, self._left_out = self._series_max, 0
        yield self._broker()
        store = self._store
        positions = (
            store.min_position,
            store.flushed_position,
            store.appended_position,
            store.readable_position,
        )
        yield Numbers(POSITIONS, [((), positions)])
        durations = (store.append_durations, store.sync_durations, self._hold_durations)
        yield Numbers(DURATIONS, [((), durations)])
        yield Numbers(REPLICATION, [((), self._replication())])
        yield self._delays()
        yield Numbers(RETRIES, [((), self._retries())])
        yield Numbers(REPLIES, [((), self._replies())])
        yield lane_numbers(self._lane_statuses())
        transactions = store.transactions
        ended = (transactions.counts[ending] for ending in Ending)
        yield Numbers(TRANSACTIONS, [((), (transactions.open_count, *ended))])
        yield Numbers(POPS, [((), self._pops())])
        yield Numbers(MEMBERS, [((), self._memberships())])
        yield Numbers(LOCKS, [((), self._locks())])
        yield Numbers(TOPICS, list(self._topics()))
        yield Numbers(GROUPS, list(self._lags()))
        yield Numbers(QUEUES, list(self._queues()))
        yield Numbers(LEFT_OUT, [((), (self._left_out,))])

    def _broker(self) -> Numbers:
        store = self._store
        configured, registered, refusing = self._name_servers()
        numbers = (
            self._start_time_ms / 1_000,
            len(store.topics.all()),
            int(bool(self._write_refusal())),
            store.disk_used_ratio(),
            resident_memory_bytes(),
            configured,
            registered,
            refusing,
            len(store.damaged_ranges),
            len(store.damaged_files),
            store.healed_file_count,
            store.healed_range_count,
            self._failed_filters(),
        )
        return Numbers(BROKER, [((), numbers)])

    def _delays(self) -> Numbers:
        store = self._store
        ended = store.timer.ended_counts
        return Numbers(
            DELAYS,
            [
                (
                    (),
                    (
                        store.pending.count,
                        store.pending.size_bytes,
                        ended[TimerEnd.TIMER_END_DELIVERED],
                        ended[TimerEnd.TIMER_END_RECALLED],
                        ended[TimerEnd.TIMER_END_DROPPED],
                        self._mover.unreadable_count,
                        store.timer.carried_bytes,
                        store.timer_rebuilt_count,
                        self._log_time.offset_ms / 1_000,
                        self._mover.lateness,
                    ),
                )
            ],
        )

    def _pops(self) -> tuple[int, ...]:
        popped = self._store.popped
        return (
            sum(len(known.open) for known in popped.queues()),
            popped.handed_out_count,
            popped.acked_count,
            popped.dead_count,
            popped.lost_count,
            self._full_pops(),
        )

    def _topics(self) -> Iterator[Row]:
        for topic in self._store.topics.all():
            if self._take(len(TOPICS.metrics)):
                counters = self._store.counters_of(topic.name)
                numbers = (
                    counters.records_in,
                    counters.bytes_in,
                    counters.records_out,
                    counters.bytes_out,
                )
                yield (topic.name,), numbers

    def _lags(self) -> Iterator[Row]:
        now_ms = self._now_ms()
        # All groups that have not touched a queue are at its first message.
        store_time_of = cache(self._store.store_time_of)
        known = {
            (group, topic)
            for groups in (self._store.offsets.groups(), self._store.popped.groups())
            for group, topics in groups.items()
            for topic in topics
        }
        for group, topic in sorted(known):
            config = self._store.topics.find(topic)
            if config is None:
                continue
            queue_ids, committed = queues_of(self._store, group, config)
            for queue_id in queue_ids:
                if not self._take(len(GROUPS.metrics)):
                    continue
                queue = QueueOfGroup(group, topic, queue_id)
                try:
                    lag = lag_of(self._store, queue, config.incarnation, committed.get(queue_id), now_ms, store_time_of)
                except StoreError:
                    # The queue is being healed; the number of damaged files says so.
                    continue
                yield (group, topic, str(queue_id)), (lag.lag, lag.low_offset, lag.delay_ms / 1_000)

    def _queues(self) -> Iterator[Row]:
        for topic in self._store.topics.all():
            for queue_id in range(max(topic.read_queues, topic.write_queues)):
                if not self._take(len(QUEUES.metrics)):
                    continue
                known = self._range(topic.name, queue_id)
                if known is not None:
                    yield (topic.name, str(queue_id)), (known[1], known[0])

    def _range(self, topic: str, queue_id: int) -> tuple[int, int] | None:
        try:
            return self._store.queue_range(topic, queue_id)
        except StoreError:
            # The queue is being healed; the number of damaged files says so.
            return None

    def _take(self, count: int) -> bool:
        if self._left < count:
            self._left_out += count
            return False
        self._left -= count
        return True


def resident_memory_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
