"""The metrics page: the same numbers for people and for Prometheus, and callers that do not behave."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from prometheus_client.parser import text_string_to_metric_families

from protomq_runtime import metrics_page
from protomq_runtime.addresses import Address
from protomq_runtime.metrics_page import (
    ROWS_SHOWN_MAX,
    Column,
    MetricsPage,
    Table,
    html_page,
    prometheus_text,
)

COLUMNS = (
    Column("pmq_lag", "lag", "How far behind"),
    Column("pmq_in", "messages in", "Stored", is_total=True),
)
NASTY = 'a"b\\c\n<script>'


def table(rows: Sequence[tuple[Sequence[str], Sequence[float]]]) -> Table:
    return Table("Groups", ("group", "queue"), COLUMNS, rows)


TABLES = (
    Table("Broker", (), (Column("pmq_disk", "disk used", "Ratio"),), [((), (0.25,))]),
    table([(("g", "0"), (7, 1_234_567)), ((NASTY, "1"), (0, 0))]),
)


def test_prometheus_reads_what_was_written() -> None:
    families = list(text_string_to_metric_families(prometheus_text(TABLES).decode()))
    read = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }
    assert read == {
        ("pmq_disk",): 0.25,
        ("pmq_lag", "g", "0"): 7,
        ("pmq_lag", NASTY, "1"): 0,
        ("pmq_in_total", "g", "0"): 1_234_567,
        ("pmq_in_total", NASTY, "1"): 0,
    }
    assert {family.name: family.type for family in families} == {
        "pmq_disk": "gauge",
        "pmq_lag": "gauge",
        "pmq_in": "counter",
    }


def test_people_read_names_as_they_are_and_numbers_with_separators() -> None:
    page = html_page("broker <a>", TABLES).decode()
    assert "<h1>broker &lt;a&gt;</h1>" in page
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "1,234,567" in page
    assert "disk used<td class=number>0.25" in page


def test_of_a_long_table_people_see_the_largest_and_prometheus_all() -> None:
    long = table([((f"g{i}", "0"), (i, 0)) for i in range(ROWS_SHOWN_MAX + 3)])
    page = html_page("t", (long,)).decode()
    assert page.count("<td>g") == ROWS_SHOWN_MAX
    assert f"<td>g{ROWS_SHOWN_MAX + 2}<td>" in page
    assert "<td>g2<td>" not in page
    assert "3 more stand at /metrics." in page
    assert prometheus_text((long,)).count(b"\npmq_lag{") == ROWS_SHOWN_MAX + 3


@contextmanager
def running(tables: Sequence[Table] = TABLES) -> Iterator[MetricsPage]:
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
    broken = Table("t", (), COLUMNS, [((), (1,))])  # a column without its number
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


def test_a_port_that_is_taken_is_said() -> None:
    with running() as page, pytest.raises(OSError, match="for the metrics page"):
        MetricsPage(page.address, "t", tuple)


def test_a_page_that_was_not_started_can_be_stopped() -> None:
    MetricsPage(Address("127.0.0.1", 0), "t", tuple).stop()
