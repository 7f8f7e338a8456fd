"""Tables on narrow terminals: what is shown, what is cut, what is left out."""

from __future__ import annotations

import io
import os
import re
from unittest import mock

import pytest

from protomq_cli import group_offsets
from protomq_cli.output import OutputFormat, RowStream, print_rows
from protomq_cli.table_fit import cut, fit, is_whole

COLUMNS = ("cluster", "broker", "broker_id", "grpc_address", "remoting_address", "start_time")
ROW = {
    "cluster": "DefaultCluster",
    "broker": "a-broker-that-is-named-after-a-machine-in-some-cloud",
    "broker_id": 0,
    "grpc_address": "192.168.100.101:8081",
    "remoting_address": "192.168.100.101:10911",
    "start_time": "2026-11-22T07:00:00.000Z",
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(width: int, monkeypatch: pytest.MonkeyPatch, output: str = "table") -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    expendable = ("start_time", "cluster")
    print_rows([ROW], COLUMNS, OutputFormat(output), stream, expendable=expendable)
    return re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())


@pytest.mark.parametrize("width", range(24, 200, 4))
def test_no_line_is_wider_than_the_terminal_and_no_number_address_or_time_is_broken(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shown(width, monkeypatch)
    table = text.partition("(")[0]
    assert max(map(len, table.splitlines())) <= width
    words = set(table.split())
    for name, value in ROW.items():
        title = name.upper().replace("_", "-")
        if title not in words:
            assert title in text.partition("(")[2], name  # Said to be left out.
        elif name not in ("cluster", "broker"):
            assert str(value) in words, name
    assert "BROKER" in words or width < 40


def test_a_wide_enough_terminal_shows_all_and_narrower_ones_less_and_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "left" not in shown(200, monkeypatch)
    assert str(ROW["broker"]) in shown(200, monkeypatch)
    assert "named-after-a-machi… " in shown(140, monkeypatch)
    assert "(START-TIME: -o wide)" in shown(100, monkeypatch)
    assert "(CLUSTER, START-TIME: -o wide)" in shown(80, monkeypatch)


def test_wide_shows_all_columns_whole_on_any_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(40, monkeypatch, "wide")
    assert all(str(value) in text for value in ROW.values())


def test_a_stream_on_a_narrow_terminal_leaves_columns_out_and_cuts_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    columns = {"topic": 16, "queue_offset": 12, "message_id": 20, "body": 0}
    row = {"topic": "t", "queue_offset": 47, "message_id": "1" * 20, "body": "x" * 200}
    for output, width in ((OutputFormat.TABLE, 40), (OutputFormat.WIDE, 400)):
        stream = Terminal()
        with RowStream(columns, output, stream, expendable=["topic"]) as out:
            out.print(row)
        lines = stream.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        assert "1" * 20 in lines[1]
        assert ("TOPIC" in lines[0]) == ("x" * 200 in lines[1]) == (output is OutputFormat.WIDE)


def test_what_fits_is_left_alone() -> None:
    widths = {"a": 10, "b": 20}
    assert fit(widths, {"a": 1, "b": 1}, ["a"], 30) == widths


def test_the_widest_text_is_cut_first_and_the_first_column_stays() -> None:
    assert fit({"a": 10, "b": 20}, {"a": 5, "b": 5}, [], 20) == {"a": 10, "b": 10}
    assert fit({"a": 10, "b": 20}, {"a": 5, "b": 20}, [], 20) == {"a": 10}
    assert fit({"a": 10, "b": 20}, {"a": 10, "b": 20}, ["a"], 5) == {"b": 20}


def test_numbers_addresses_ids_and_times_are_whole() -> None:
    assert is_whole("lag", [1, None, 2.5])
    assert is_whole("grpc_address", ["a:1"])
    assert not is_whole("topic", ["t", 1])


def test_a_cut_text_says_so() -> None:
    assert cut("abcdef", 6) == "abcdef"
    assert cut("abcdef", 4) == "abc…"


def test_a_narrow_terminal_shows_the_lag_of_a_group_and_no_offsets() -> None:
    columns = group_offsets._COLUMNS
    row = dict.fromkeys(columns, 1000) | {"group": "billing", "topic": "orders", "broker": "a"}
    stream = Terminal()
    with mock.patch.dict(os.environ, {"COLUMNS": "40"}):
        print_rows([row], columns, OutputFormat.TABLE, stream, expendable=group_offsets._EXPENDABLE)
    title = stream.getvalue().split("─")[0]
    assert re.findall(r"[A-Z-]+", re.sub(r"\x1b\[\d*m", "", title)) == ["BROKER", "QUEUE-ID", "LAG", "DELAY-S"]
