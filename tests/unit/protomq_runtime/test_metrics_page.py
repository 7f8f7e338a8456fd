"""The metrics page: the same numbers for people and for Prometheus, and callers that do not behave."""

from __future__ import annotations

import errno
import socket
import socketserver
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise

import pytest
from prometheus_client.parser import text_string_to_metric_families

from protomq_runtime import metrics_page
from protomq_runtime.addresses import Address
from protomq_runtime.metrics import Kind, Metric, Numbers, Row, Table
from protomq_runtime.metrics_page import ROWS_SHOWN_MAX, MetricsPage, html_page, prometheus_text
from tests.support.waiting import PATIENCE_S, wait_for

GROUPS = Table(
    "Groups",
    ("group", "queue"),
    (
        Metric("protomq.lag", "{record}", "lag", "How far behind"),
        Metric("protomq.in", "{record}", "messages in", "Stored", Kind.COUNTER),
    ),
)
BROKER = Table("Broker", (), (Metric("protomq.disk", "1", "disk used", "Used part"),))
SYNCS = Table("Syncs", (), (Metric("protomq.sync", "s", "fsync", "Time", Kind.HISTOGRAM, (0.1, 1.0)),))
NASTY = 'a"b\\c\n<script>'


class Syncs:
    def __init__(self, *counts: int) -> None:
        self.counts = counts
        self.sum = 2.5
        self.on_observed: Callable[[float], None] | None = None


TABLES = (
    Numbers(BROKER, [((), (0.25,))]),
    Numbers(GROUPS, [(("g", "0"), (7, 1_234_567)), ((NASTY, "1"), (0, 0))]),
    Numbers(SYNCS, [((), (Syncs(900, 1_000, 5),))]),
)


def test_prometheus_reads_what_was_written() -> None:
    families = list(text_string_to_metric_families(prometheus_text(TABLES).decode()))
    read = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }
    assert read == {
        ("protomq_disk_ratio",): 0.25,
        ("protomq_lag", "g", "0"): 7,
        ("protomq_lag", NASTY, "1"): 0,
        ("protomq_in_total", "g", "0"): 1_234_567,
        ("protomq_in_total", NASTY, "1"): 0,
        ("protomq_sync_seconds_bucket", "0.1"): 900,
        ("protomq_sync_seconds_bucket", "1.0"): 1_900,
        ("protomq_sync_seconds_bucket", "+Inf"): 1_905,
        ("protomq_sync_seconds_count",): 1_905,
        ("protomq_sync_seconds_sum",): 2.5,
    }
    assert {family.name: family.type for family in families} == {
        "protomq_disk_ratio": "gauge",
        "protomq_lag": "gauge",
        "protomq_in": "counter",
        "protomq_sync_seconds": "histogram",
    }


def test_people_read_names_as_they_are_and_numbers_with_separators() -> None:
    page = html_page("broker <a>", TABLES).decode()
    assert "<h1>broker &lt;a&gt;</h1>" in page
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "1,234,567" in page
    assert "disk used<td class=number>0.25" in page
    assert "fsync<td class=number>1,905: half within 1, 99 % within 1" in page
    assert "fsync<td class=number>0<" in html_page("t", [Numbers(SYNCS, [((), (Syncs(0, 0, 0),))])]).decode()


def test_of_a_long_table_people_see_the_largest_and_prometheus_all() -> None:
    rows: list[Row] = [((f"g{i}", "0"), (i, 0)) for i in range(ROWS_SHOWN_MAX + 3)]
    long = Numbers(GROUPS, rows)
    page = html_page("t", (long,)).decode()
    assert page.count("<td>g") == ROWS_SHOWN_MAX
    assert f"<td>g{ROWS_SHOWN_MAX + 2}<td>" in page
    assert "<td>g2<td>" not in page
    assert "3 more stand at /metrics." in page
    assert prometheus_text((long,)).count(b"\nprotomq_lag{") == ROWS_SHOWN_MAX + 3


@contextmanager
def running(tables: Sequence[Numbers] = TABLES) -> Iterator[MetricsPage]:
    page = MetricsPage(Address("127.0.0.1", 0), "t", lambda: tables)
    page.start()
    try:
        yield page
    finally:
        page.stop()
        assert not page.is_alive()


def get(page: MetricsPage, path: str) -> tuple[int, str, bytes]:
    try:
        with urllib.request.urlopen(f"http://{page.address}{path}", timeout=60) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read()


def test_both_pages_are_served_and_nothing_else() -> None:
    with running() as page:
        assert get(page, "/metrics") == (
            200, "text/plain; version=0.0.4; charset=utf-8", prometheus_text(TABLES),
        )  # fmt: skip
        assert get(page, "/?x=1") == (200, "text/html; charset=utf-8", html_page("t", TABLES))
        assert get(page, "/other")[0] == 404


def test_a_defect_is_no_more_than_an_error(caplog: pytest.LogCaptureFixture) -> None:
    broken = Numbers(GROUPS, [(("g", "0"), (1,))])  # A metric without its number.
    with running((broken,)) as page:
        assert get(page, "/")[0] == 500
        assert get(page, "/other")[0] == 404
    assert "the metrics page failed" in caplog.text


def test_who_says_nothing_is_cut_off_and_holds_up_nobody_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_page._Handler, "timeout", 0.2)
    with running() as page, socket.create_connection(page.address) as silent:
        silent.sendall(b"GET / HT")
        assert get(page, "/metrics")[0] == 200
        assert silent.recv(100) == b""


def test_who_sends_his_request_slowly_is_cut_off_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_page._Handler, "timeout", 0.5)
    with running() as page, socket.create_connection(page.address) as slow:

        def dribble() -> None:
            with suppress(OSError):  # Cut off.
                for octet in b"GET /" + b"x" * 100:
                    slow.sendall(bytes([octet]))
                    time.sleep(0.1)

        sender = threading.Thread(target=dribble)
        sender.start()
        started_s = time.monotonic()
        assert get(page, "/metrics")[0] == 200
        assert time.monotonic() - started_s < 5.0
        sender.join()


def test_without_descriptors_it_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals: list[float] = []

    def refuse(_: object) -> None:
        refusals.append(time.monotonic())
        raise OSError(errno.EMFILE, "too many open files")

    with running() as page:
        with monkeypatch.context() as patched:
            patched.setattr(socketserver.TCPServer, "get_request", refuse)
            with socket.create_connection(page.address):
                wait_for(lambda: len(refusals) > 3, PATIENCE_S)
            assert all(later - earlier > 0.09 for earlier, later in pairwise(refusals))
        assert get(page, "/metrics")[0] == 200


def test_a_port_that_is_taken_is_said() -> None:
    with running() as page, pytest.raises(OSError, match="for the metrics page"):
        MetricsPage(page.address, "t", tuple)


def test_a_page_that_was_not_started_can_be_stopped() -> None:
    MetricsPage(Address("127.0.0.1", 0), "t", tuple).stop()
