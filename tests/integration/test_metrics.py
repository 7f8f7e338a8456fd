"""The metrics page of a real broker: what it shows is what happened."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from protomq import (
    Admin,
    Message,
    Producer,
    PullConsumer,
    PushConsumer,
    SimpleConsumer,
    TransactionDecision,
    TransactionProducer,
)
from protomq.errors import DiskFullError
from protomq_broker.config import MetricsConfig
from protomq_broker.store.state.popped_queue import OPEN_MAX
from protomq_cli.child import parse_ready_line
from protomq_runtime.config import ConfigError, load_config
from tests.support.waiting import wait_for
from tests.support.warm_servers import ServerPopen

QUEUES = 2
LABELS = ("lane", "group", "topic", "queue")


@contextmanager
def broker(folder: Path, *, refuse_ratio: float = 0.99, **metrics: object) -> Iterator[dict[str, str]]:
    """The words of its ready line. `refuse_ratio`: used part of the disk from which writes are refused."""
    lines = "".join(f"  {name}: {value}\n" for name, value in metrics.items())
    config = folder / "broker.yaml"
    config.write_text(
        f"data_dir: {folder / 'data'}\ndefault_queues: {QUEUES}\n"
        "listen: {grpc_port: 0, remoting_port: 0}\n"
        f"store: {{disk_delete_ratio: {refuse_ratio - 2e-7}, disk_force_ratio: {refuse_ratio - 1e-7}, disk_refuse_ratio: {refuse_ratio}}}\n"
        f"metrics:\n  listen: 127.0.0.1:0\n{lines}"
    )
    command = [sys.executable, "-m", "protomq_cli", "standalone", "-c", str(config)]
    with ServerPopen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield parse_ready_line(process.stdout.readline())
        finally:
            process.terminate()
            assert process.wait(30) == 0


def get(address: str, path: str) -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=30) as answer:
        return str(answer.read().decode())


def scrape(address: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(sample.labels[name] for name in LABELS if name in sample.labels)): sample.value
        for family in text_string_to_metric_families(get(address, "/metrics"))
        for sample in family.samples
    }


def send(namesrv: str, topic: str, count: int) -> None:
    with Producer(namesrv=namesrv) as producer:
        for number in range(count):
            producer.send(topic, b"%d" % number)


@pytest.mark.slow
def test_the_page_shows_what_happened(tmp_path: Path) -> None:
    with broker(tmp_path) as words:
        send(words["namesrv"], "orders", 10)
        with PullConsumer("readers", namesrv=words["namesrv"]) as consumer:
            consumer.subscribe("orders")
            got: list[Message] = []
            while len(got) < 10:
                got.extend(consumer.poll(timeout_s=10))
            consumer.commit()
            assert consumer.poll(timeout_s=0.1) == []  # It waits at the queues' ends.
        send(words["namesrv"], "orders", 4)
        wait_for(lambda: scrape(words["metrics"])["protomq_pull_hold_duration_seconds_count",] > 0)
        numbers = scrape(words["metrics"])
        page = get(words["metrics"], "/")
    assert numbers["protomq_topic_records_in_total", "orders"] == 14
    assert numbers["protomq_topic_records_out_total", "orders"] >= 10
    ends = [numbers["protomq_queue_end_offset", "orders", str(queue)] for queue in range(QUEUES)]
    assert sum(ends) == 14
    lags = [numbers["protomq_group_lag_records", "readers", "orders", str(q)] for q in range(QUEUES)]
    assert sum(lags) == 4
    assert numbers["protomq_lane_calls_total", "send"] == 14
    assert numbers["protomq_lane_holds", "pull"] == 0
    assert numbers["protomq_log_append_duration_seconds_count",] >= 14
    assert 0 < numbers["protomq_log_append_duration_seconds_sum",] < 60
    assert 0 < numbers["protomq_disk_used_ratio",] < 1
    assert numbers["protomq_log_appended_position_bytes",] == numbers["protomq_log_readable_position_bytes",] > 14
    assert numbers["protomq_log_damaged_ranges",] == numbers["protomq_queue_files_damaged",] == 0
    assert (numbers["protomq_name_servers",], numbers["protomq_name_servers_registered",]) == (1, 1)
    assert numbers["protomq_writes_refused",] == numbers["protomq_series_left_out",] == 0
    assert "<td>readers<td>orders<td>0" in page


@pytest.mark.slow
def test_what_becomes_of_messages_is_counted_each_under_its_own_name(tmp_path: Path) -> None:
    """No two counts are alike, so that none can take the place of another."""
    hour_s = 3_600
    with broker(tmp_path) as words, Admin(namesrv=words["namesrv"]) as admin:
        namesrv = words["namesrv"]
        for topic in ("later", "gone", "failed", "popped", "booked", "asked"):
            admin.create_topic(topic, write_queues=1, read_queues=1)
        with Producer(namesrv=namesrv) as producer:
            for _ in range(2):
                producer.send("later", b"soon", delay=0.05)
            handles = [producer.send("later", b"late", delay=hour_s).recall_handle for _ in range(7)]
            assert [producer.recall("later", handle) for handle in handles[:3]] == [True] * 3
            producer.send("gone", b"", delay=0.5)
            admin.delete_topic("gone")
            for _ in range(6):
                producer.send("failed", b"")
                producer.send("popped", b"")
        with PullConsumer("failing", namesrv=namesrv) as consumer:
            consumer.subscribe("failed")
            got: list[Message] = []
            while len(got) < 6:
                got += consumer.poll(timeout_s=10)
            consumer.send_back(got[:4], delay=hour_s)
            consumer.send_back(got[4:], dead_letter=True)
        assert admin.replay_dead_letters("failing", message_ids=[got[4].message_id]).replayed == 1
        with SimpleConsumer("popping", namesrv=namesrv) as pops:
            held: list[Message] = []
            while len(held) < 6:
                held += pops.receive("popped", hold_s=1)
            pops.ack(held[:5])
        with TransactionProducer("desk", lambda asked: TransactionDecision.UNKNOWN, namesrv=namesrv) as desk:
            for _ in range(3):
                desk.send("booked", b"", execute=lambda sent: TransactionDecision.COMMIT)
            for _ in range(2):
                desk.send("booked", b"", execute=lambda sent: TransactionDecision.ROLL_BACK)
            desk.send("booked", b"", execute=lambda sent: TransactionDecision.UNKNOWN)
        with Producer(namesrv=namesrv) as asking, PullConsumer("answering", namesrv=namesrv) as answering:
            answering.subscribe("asked")
            with ThreadPoolExecutor(1) as executor:
                replies = [executor.submit(asking.request, "asked", b"", timeout_s=30) for _ in range(2)]
                asked: list[Message] = []
                while len(asked) < 2:
                    for message in answering.poll(timeout_s=10):
                        answering.reply(message, b"")
                        asked.append(message)
                assert [reply.result(30).body for reply in replies] == [b"", b""]
        wait_for(lambda: scrape(words["metrics"])["protomq_delayed_dropped_total",] > 0)
        numbers = {name: value for (name, *labels), value in scrape(words["metrics"]).items() if not labels}
    expected = {
        # What waits for its next try waits in the same timer.
        "protomq_delayed_pending": 4 + 4, "protomq_delayed_delivered_total": 2, "protomq_delayed_recalled_total": 3,
        "protomq_delayed_dropped_total": 1, "protomq_delayed_unreadable_total": 0, "protomq_delayed_lateness_seconds_count": 2,
        "protomq_retries_total": 4, "protomq_dead_letters_total": 2, "protomq_send_backs_repeated_total": 0,
        "protomq_dead_letters_replayed_total": 1,
        "protomq_pop_handed_out_total": 6, "protomq_pop_acked_total": 5, "protomq_pop_open": 1, "protomq_pop_dead_total": 0,
        "protomq_pop_lost_total": 0, "protomq_pop_queue_full_total": 0,
        "protomq_transaction_committed_total": 3, "protomq_transaction_rolled_back_total": 2, "protomq_transaction_open": 1,
        "protomq_transaction_expired_total": 0,
        "protomq_replies_total": 2, "protomq_replies_refused_total": 0,
        "protomq_ha_replicas": 0, "protomq_ha_in_sync_copies": 1, "protomq_ha_lag_bytes": 0, "protomq_ha_following": 0,
    }  # fmt: skip
    assert {name: numbers[name] for name in expected} == expected


@pytest.mark.slow
def test_a_broker_whose_disk_is_full_counts_as_one_that_refuses_writes(tmp_path: Path) -> None:
    with broker(tmp_path, refuse_ratio=1e-6) as words:
        wait_for(lambda: scrape(words["metrics"])["protomq_writes_refused",] == 1)
        with pytest.raises(DiskFullError):
            send(words["namesrv"], "orders", 1)


@pytest.mark.slow
def test_a_pop_that_meets_a_full_queue_is_counted_and_so_are_locks_and_members(tmp_path: Path) -> None:
    with broker(tmp_path) as words, Admin(namesrv=words["namesrv"]) as admin:
        namesrv = words["namesrv"]
        admin.create_topic("popped", write_queues=1, read_queues=1)
        admin.create_topic("orderly", write_queues=3, read_queues=3)
        with Producer(namesrv=namesrv) as producer:
            for _ in range(11):
                producer.send_batch("popped", [b""] * 1_000)
        with SimpleConsumer("popping", namesrv=namesrv) as pops:
            held = 0
            while held < OPEN_MAX:
                held += len(pops.receive("popped", count=256, invisible_s=600, hold_s=0))
            assert scrape(words["metrics"])["protomq_pop_queue_full_total",] == 0
            assert pops.receive("popped", hold_s=0) == []
        push = PushConsumer("orderly", namesrv=namesrv, orderly=True)
        push.subscribe("orderly", lambda message: None)
        with push:
            # The queue of its retries, too.
            wait_for(lambda: scrape(words["metrics"])["protomq_lock_held",] == 4)
            numbers = {name: value for (name, *labels), value in scrape(words["metrics"]).items() if not labels}
    assert (numbers["protomq_pop_queue_full_total"], numbers["protomq_pop_open"]) == (1, OPEN_MAX)
    assert (numbers["protomq_lock_granted_total"], numbers["protomq_lock_expired_total"], numbers["protomq_lock_freed_total"]) == (4, 0, 0)
    assert (numbers["protomq_member_groups"], numbers["protomq_member_members"]) == (1, 1)
    assert numbers["protomq_lock_commits_refused_total"] == numbers["protomq_member_commits_refused_total"] == 0


@pytest.mark.slow
def test_the_number_of_series_is_bounded(tmp_path: Path) -> None:
    with broker(tmp_path, series_max=6) as words:
        send(words["namesrv"], "one", 1)
        send(words["namesrv"], "two", 1)
        numbers = scrape(words["metrics"])
    named = [key for key in numbers if key[0].startswith(("protomq_topic_", "protomq_group_", "protomq_queue_")) and len(key) > 1]
    assert len(named) == 6
    assert numbers["protomq_series_left_out",] == 2 * (4 + 2 * QUEUES) - 6


def test_a_place_to_listen_that_makes_no_sense_is_refused() -> None:
    for listen in ("9464", "http://127.0.0.1:9464", "127.0.0.1:x", "127.0.0.1:65536"):
        with pytest.raises(ConfigError):
            load_config(MetricsConfig, environment={"PROTOMQ_LISTEN": listen})
