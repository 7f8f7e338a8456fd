"""A broker's table of metrics: the documents follow it, and what is read of a broker is all of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from protomq.v1.state_pb2 import TimerEnd
from protomq_broker import metrics
from protomq_broker.config import BrokerConfig
from protomq_broker.log_time import LogTime
from protomq_broker.metrics import DELAYS, DURATIONS, TABLES, BrokerMetrics
from protomq_broker.store.log.durations import Durations
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.state.transactions import Ending
from protomq_broker.store.store import Store
from protomq_broker.system_writer import SystemWriter
from protomq_broker.testing.simdisk import SimDisk
from protomq_broker.timer_mover import TimerMover
from protomq_broker.write_permit import WritePermit
from protomq_runtime.lane_pool import PoolStatus
from protomq_runtime.metrics import Kind, Numbers
from protomq_runtime.metrics_page import prometheus_text
from tests.support.delay_world import World as DelayWorld
from tests.support.transaction_world import COMMIT, ROLL_BACK
from tests.support.transaction_world import World as TransactionWorld
from tools.metrics_docs import PAGE, written_anew

from .fake_broker import FakeBroker
from .store.log_helpers import ManualClock, make_request
from .store.store_helpers import commit, open_store
from .test_pop_resets import reset
from .test_pop_service import Group

METRICS = [metric for table in TABLES for metric in table.metrics]


def shown_names() -> set[str]:
    """As Prometheus has them, with the ending of a counter."""
    return {each.prometheus_name + "_total" * (each.kind is Kind.COUNTER) for each in METRICS}


def test_no_two_metrics_share_a_name() -> None:
    assert len(METRICS) > 30
    assert len({metric.name for metric in METRICS}) == len(shown_names()) == len(METRICS)


def test_the_page_about_metrics_has_the_tables_of_the_source() -> None:
    page = PAGE.read_text("utf-8")
    assert page == written_anew(page), "run .venv/bin/python tools/metrics_docs.py"
    changed = page.replace("protomq_lane_holds", "protomq_lane_hold")
    assert changed != written_anew(changed) == page


def test_what_the_documents_name_is_there() -> None:
    documents = (PAGE, PAGE.with_name("operations.md"))
    text = "".join(page.read_text("utf-8") for page in documents)
    assert set(re.findall(r"`(protomq_[a-z_]+)`", text)) == shown_names() | {
        metric.prometheus_name for metric in METRICS if metric.kind is Kind.HISTOGRAM
    }


def numbers_of(
    store: Store, clock: ManualClock | None = None, mover: TimerMover | None = None
) -> list[Numbers]:
    """What a broker with this store says, and with a waiting pull of half a second."""
    holds = Durations(DURATIONS.metrics[2].bounds)
    holds.observe(0.5)
    log_time = LogTime(ManualClock(), 0)
    metrics = BrokerMetrics(
        store,
        start_time_ms=5_000,
        series_max=100,
        hold_durations=holds,
        now_ms=(clock or ManualClock()).now_ms,
        mover=mover or TimerMover(store, SystemWriter(WritePermit()), log_time),
        retries=lambda: (3, 2, 1, 0),
        replies=lambda: (4, 3, 2, 1),
        log_time=log_time,
        lane_statuses=lambda: [PoolStatus("send", 1, 2, 10, 1500, 77, 3, 4, 5)],
        name_servers=lambda: (3, 1, 2),
        memberships=lambda: (1, 2, 3, 0, 4.5, 6),
        locks=lambda: (1, 2, 3, 4, 5),
        failed_filters=lambda: 7,
        full_pops=lambda: 6,
        write_refusal=lambda: "",
        replication=lambda: (1, 2, 4_096, 0),
    )
    return list(metrics.numbers())


def samples_of(numbers: Iterable[Numbers]) -> dict[tuple[str, str], float]:
    """As Prometheus reads them: by name, and by the bound of a bucket."""
    return {
        (sample.name, sample.labels.get("le", "")): sample.value
        for family in text_string_to_metric_families(prometheus_text(numbers).decode())
        for sample in family.samples
    }


def read() -> list[Numbers]:
    """What a broker with one topic says."""
    store = open_store(SimDisk())
    store.topics.create(TopicConfig("topic"))
    store.append([make_request()])
    store.flush()
    numbers = numbers_of(store)
    store.close()
    return numbers


def test_a_broker_says_all_that_the_tables_have() -> None:
    numbers = read()
    assert tuple(each.table for each in numbers) == TABLES
    for table, rows in numbers:
        for labels, values in rows:
            assert len(labels) == len(table.attributes)
            assert len(values) == len(table.metrics)


def numbers_that_differ(write_refusal: str) -> BrokerMetrics:
    """What is read of a broker each number of which is another one: a stand-in for all that keeps any."""
    seconds = [Durations(table.metrics[at].bounds) for table, at in ((DURATIONS, 0), (DURATIONS, 1), (DURATIONS, 2), (DELAYS, 9))]
    for index, durations in enumerate(seconds):
        for _ in range(index + 1):
            durations.observe(2.0)
    appends, syncs, holds, lateness = seconds
    open_ = SimpleNamespace(open={5, 6, 7})
    topic = SimpleNamespace(name="t", read_queues=1, write_queues=1, incarnation=3)
    store: Any = SimpleNamespace(
        topics=SimpleNamespace(all=lambda: [topic], find=lambda _: topic),
        disk_used_ratio=lambda: 0.25,
        damaged_ranges=range(102),
        damaged_files=range(103),
        healed_file_count=104,
        healed_range_count=105,
        min_position=110,
        flushed_position=111,
        appended_position=112,
        readable_position=113,
        append_durations=appends,
        sync_durations=syncs,
        pending=SimpleNamespace(count=120, size_bytes=121),
        timer=SimpleNamespace(
            ended_counts={
                TimerEnd.TIMER_END_DELIVERED: 122, TimerEnd.TIMER_END_RECALLED: 123, TimerEnd.TIMER_END_DROPPED: 124,
            },
            carried_bytes=126,
        ),
        timer_rebuilt_count=127,
        transactions=SimpleNamespace(
            open_count=130, counts={Ending.COMMITTED: 131, Ending.ROLLED_BACK: 132, Ending.EXPIRED: 133}
        ),
        popped=SimpleNamespace(
            queues=lambda: [open_], groups=lambda: {"g": ["t"]}, queue_ids=lambda *_: [0],
            handed_out_count=141, acked_count=142, dead_count=143, lost_count=144
        ),
        store_time_of=lambda *_: 0,
        counters_of=lambda _: SimpleNamespace(records_in=150, bytes_in=151, records_out=152, bytes_out=153),
        offsets=SimpleNamespace(groups=lambda: {"g": ["t"]}, of_topic=lambda *_: {0: 9}),
        queue_range=lambda topic, queue_id: (160, 161),
    )  # fmt: skip
    return BrokerMetrics(
        store,
        start_time_ms=5_000,
        series_max=100,
        hold_durations=holds,
        now_ms=lambda: 0,
        mover=SimpleNamespace(unreadable_count=125, lateness=lateness),  # type: ignore[arg-type]
        retries=lambda: (201, 202, 203, 204),
        replies=lambda: (211, 212, 213, 214),
        log_time=SimpleNamespace(offset_ms=2_500),  # type: ignore[arg-type]
        lane_statuses=lambda: [PoolStatus(lane="send", threads=1, depth=2, depth_max=10, queue_time_us=1_500_000, calls=77, rejections=3,
                                          connections=4, holds=5)],
        name_servers=lambda: (221, 222, 223),
        memberships=lambda: (231, 232, 233, 234, 235.5, 236),
        locks=lambda: (241, 242, 243, 244, 245),
        failed_filters=lambda: 106,
        full_pops=lambda: 145,
        write_refusal=lambda: write_refusal,
        replication=lambda: (251, 252, 253, 254),
    )  # fmt: skip


def test_each_number_stands_under_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "lag_of", lambda *_: SimpleNamespace(lag=171, low_offset=172, delay_ms=173_000))
    monkeypatch.setattr(metrics, "resident_memory_bytes", lambda: 101)
    expected = {
        "protomq_start_time_seconds": 5, "protomq_topics": 1, "protomq_writes_refused": 1, "protomq_disk_used_ratio": 0.25,
        "protomq_resident_memory_bytes": 101, "protomq_name_servers": 221, "protomq_name_servers_registered": 222,
        "protomq_name_servers_refusing": 223,
        "protomq_log_damaged_ranges": 102, "protomq_queue_files_damaged": 103, "protomq_queue_files_healed_total": 104,
        "protomq_log_healed_ranges_total": 105, "protomq_filters_failed_total": 106,
        "protomq_log_first_position_bytes": 110, "protomq_log_flushed_position_bytes": 111,
        "protomq_log_appended_position_bytes": 112, "protomq_log_readable_position_bytes": 113,
        "protomq_log_append_duration_seconds_count": 1, "protomq_log_sync_duration_seconds_count": 2,
        "protomq_pull_hold_duration_seconds_count": 3,
        "protomq_ha_replicas": 251, "protomq_ha_in_sync_copies": 252, "protomq_ha_lag_bytes": 253, "protomq_ha_following": 254,
        "protomq_delayed_pending": 120, "protomq_delayed_pending_size_bytes": 121, "protomq_delayed_delivered_total": 122,
        "protomq_delayed_recalled_total": 123, "protomq_delayed_dropped_total": 124, "protomq_delayed_unreadable_total": 125,
        "protomq_delayed_carried_bytes_total": 126, "protomq_delayed_rebuilds_total": 127,
        "protomq_delayed_clock_offset_seconds": 2.5, "protomq_delayed_lateness_seconds_count": 4,
        "protomq_retries_total": 201, "protomq_dead_letters_total": 202, "protomq_send_backs_repeated_total": 203,
        "protomq_dead_letters_replayed_total": 204,
        "protomq_reply_callers": 211, "protomq_reply_waiting": 212, "protomq_replies_total": 213, "protomq_replies_refused_total": 214,
        "protomq_lane_threads": 1, "protomq_lane_depth": 2, "protomq_lane_depth_max": 10, "protomq_lane_queue_time_seconds": 1.5,
        "protomq_lane_calls_total": 77, "protomq_lane_rejections_total": 3, "protomq_lane_connections": 4, "protomq_lane_holds": 5,
        "protomq_transaction_open": 130, "protomq_transaction_committed_total": 131, "protomq_transaction_rolled_back_total": 132,
        "protomq_transaction_expired_total": 133,
        "protomq_pop_open": 3, "protomq_pop_handed_out_total": 141, "protomq_pop_acked_total": 142, "protomq_pop_dead_total": 143,
        "protomq_pop_lost_total": 144, "protomq_pop_queue_full_total": 145,
        "protomq_member_groups": 231, "protomq_member_members": 232, "protomq_member_changes_total": 233,
        "protomq_member_ownerless_queues": 234, "protomq_member_ownerless_time_seconds_total": 235.5,
        "protomq_member_commits_refused_total": 236,
        "protomq_lock_held": 241, "protomq_lock_granted_total": 242, "protomq_lock_expired_total": 243, "protomq_lock_freed_total": 244,
        "protomq_lock_commits_refused_total": 245,
        "protomq_topic_records_in_total": 150, "protomq_topic_bytes_in_total": 151, "protomq_topic_records_out_total": 152,
        "protomq_topic_bytes_out_total": 153,
        "protomq_group_lag_records": 171, "protomq_group_committed_offset": 172, "protomq_group_delay_seconds": 173,
        "protomq_queue_end_offset": 161, "protomq_queue_first_offset": 160,
        "protomq_series_left_out": 0,
    }  # fmt: skip
    histograms = {f"{each.prometheus_name}_count" for each in METRICS if each.kind is Kind.HISTOGRAM}
    counted = {each.prometheus_name + "_total" * (each.kind is Kind.COUNTER) for each in METRICS if each.kind is not Kind.HISTOGRAM}
    assert expected.keys() == counted | histograms, "a metric that is not compared here"
    found = {name: value for (name, bound), value in samples_of(numbers_that_differ("the disk is full").numbers()).items() if not bound}
    # The sums of histograms, and when their counting began, are no numbers of these.
    assert {name: value for name, value in found.items() if name in expected} == expected
    assert samples_of(numbers_that_differ("").numbers())["protomq_writes_refused", ""] == 0


def test_appends_fsyncs_and_holds_are_counted_by_their_durations() -> None:
    samples = samples_of(read())
    # The clock stands still: they took no time. The topic's record is an append, too.
    for name, count in (("protomq_log_append_duration", 2), ("protomq_log_sync_duration", 1)):
        assert samples[f"{name}_seconds_count", ""] == count
        assert samples[f"{name}_seconds_bucket", "5e-05"] == count
    holds = "protomq_pull_hold_duration_seconds"
    assert (samples[f"{holds}_bucket", "0.2"], samples[f"{holds}_bucket", "0.5"]) == (0, 1)
    assert samples[f"{holds}_sum", ""] == 0.5


def test_deliveries_are_counted_by_how_late_they_were() -> None:
    world = DelayWorld().start()
    for body in (b"first", b"second"):
        world.send(body, delay_ms=5_000)
    # Of those that one append delivers, each by its own due time.
    world.send(b"third", delay_ms=5_250)
    assert world.deliver(5_300) == [b"first", b"second", b"third"]
    world.send(b"fourth", delay_ms=1_000)
    world.deliver(8_201_000)
    samples = samples_of(numbers_of(world.store, mover=world.mover))
    late = "protomq_delayed_lateness_seconds"
    found = {bound: samples[f"{late}_bucket", bound] for bound in ("0.02", "0.05", "0.2", "0.5", "3600.0", "+Inf")}
    assert found == {"0.02": 0, "0.05": 1, "0.2": 1, "0.5": 3, "3600.0": 3, "+Inf": 4}
    assert samples[f"{late}_sum", ""] == pytest.approx(0.3 + 0.3 + 0.05 + 8_200)
    assert samples["protomq_delayed_delivered_total", ""] == 4
    world.store.close()


def test_ends_of_transactions_are_counted_each_by_its_kind() -> None:
    config = BrokerConfig(transaction_timeout_ms=1_000, transaction_check_interval_ms=1_000, transaction_check_max=1)
    world = TransactionWorld(config=config).start()
    handles = [world.half(b"%d" % number) for number in range(6)]
    committed, rolled_back = handles[:3], handles[3:5]
    for _ in range(2):  # A decision that is told again ends nothing.
        world.end(*((handle, COMMIT) for handle in committed), *((handle, ROLL_BACK) for handle in rolled_back))
    world.turns(1_000)
    world.turns(1_000)
    for number in range(4):
        world.half(b"open %d" % number)
    samples = samples_of(numbers_of(world.store))
    names = ("committed_total", "rolled_back_total", "expired_total", "open")
    assert [samples[f"protomq_transaction_{name}", ""] for name in names] == [3, 2, 1, 4]
    world.store.close()


def test_pops_are_counted_each_time_and_acknowledgements_once() -> None:
    broker = FakeBroker()
    broker.fill([b"%d" % number for number in range(6)])
    group = Group(broker)
    first = group.pop(record_count_max=4)
    group.change(first[:1], 0)
    again = group.pop(record_count_max=1)
    assert [(message.body, message.attempt) for message in again] == [(b"0", 2)]
    group.ack(first[1:3])
    group.ack([*again, first[1]])
    samples = samples_of(numbers_of(broker.store))
    names = ("handed_out_total", "acked_total", "open", "dead_total", "lost_total")
    assert [samples[f"protomq_pop_{name}", ""] for name in names] == [5, 3, 1, 0, 0]
    broker.store.close()


def test_groups_that_pull_and_groups_that_pop_are_behind_in_messages_and_in_seconds() -> None:
    broker = FakeBroker()
    for number in range(5):
        broker.fill([b"%d" % number], queue_id=number % 2)
        broker.clock.time_ms += 2_000
    commit(broker.store, "pulls", "topic", 0, 2)
    pops = Group(broker, "pops", queue_id=None)
    first = [*pops.pop(), *pops.pop()]
    pops.ack([message for message in first if message.body != b"2"])

    def groups() -> dict[tuple[str, ...], tuple[float, ...]]:
        """Lag, offset, delay of each queue of each group, as Prometheus gets them."""
        found: dict[tuple[str, ...], dict[str, float]] = {}
        for family in text_string_to_metric_families(prometheus_text(numbers_of(broker.store, broker.clock)).decode()):
            for sample in family.samples:
                if sample.name.startswith("protomq_group_"):
                    labels = tuple(sample.labels[name] for name in ("group", "topic", "queue"))
                    name = sample.name.removeprefix("protomq_group_")
                    assert name not in found.setdefault(labels, {}), "counted twice"
                    found[labels][name] = sample.value
        return {
            labels: (each["lag_records"], each["committed_offset"], each["delay_seconds"])
            for labels, each in found.items()
        }

    assert groups() == {
        ("pops", "topic", "0"): (1, 1, 6),
        ("pops", "topic", "1"): (0, 2, 0),
        ("pulls", "topic", "0"): (1, 2, 2),
        ("pulls", "topic", "1"): (2, 0, 8),
    }
    reset(broker, "pops", end=True)
    assert groups()["pops", "topic", "0"] == (0, 3, 0), "the reset has committed it, too"
