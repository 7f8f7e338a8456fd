"""A broker's table of metrics: the documents follow it, and what is read of a broker is all of it."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from protomq_broker.config import BrokerConfig
from protomq_broker.log_time import LogTime
from protomq_broker.metrics import DURATIONS, TABLES, BrokerMetrics
from protomq_broker.store.log.durations import Durations
from protomq_broker.store.state.topics import TopicConfig
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
        name_servers=lambda: (2, 1),
        memberships=lambda: (1, 2, 3, 0, 4.5, 6),
        locks=lambda: (1, 2, 3, 4, 5),
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
    }
    reset(broker, "pops", end=True)
    assert groups()["pops", "topic", "0"] == (0, 3, 0), "the reset has committed it, too"
