"""The metrics page of a real broker: what it shows is what happened."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from protomq import Message, Producer, PullConsumer
from protomq_broker.config import MetricsConfig
from protomq_cli.child import parse_ready_line
from protomq_runtime.config import ConfigError, load_config
from tests.support.waiting import wait_for

QUEUES = 2
LABELS = ("lane", "group", "topic", "queue")


@contextmanager
def broker(folder: Path, **metrics: object) -> Iterator[dict[str, str]]:
    """The words of its ready line."""
    lines = "".join(f"  {name}: {value}\n" for name, value in metrics.items())
    config = folder / "broker.yaml"
    config.write_text(
        f"data_dir: {folder / 'data'}\ndefault_queues: {QUEUES}\n"
        "listen: {grpc_port: 0, remoting_port: 0}\n"
        "store: {disk_delete_ratio: 0.97, disk_force_ratio: 0.98, disk_refuse_ratio: 0.99}\n"
        f"metrics:\n  listen: 127.0.0.1:0\n{lines}"
    )
    command = [sys.executable, "-m", "protomq_cli", "standalone", "-c", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
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
