from __future__ import annotations

import io
import json
import sys

import pytest
import yaml

from protomq_cli.output import (
    OutputFormat,
    RowStream,
    colour_wanted,
    escape_what_cannot_be_written,
    print_object,
    print_rows,
)

ROWS = [
    {"topic": "flights", "queues": 8, "permission": "READ_WRITE", "extra": None},
    {"topic": "ö\n", "queues": 16, "permission": "READ", "extra": [1, 2]},
]
COLUMNS = ("topic", "queues", "permission")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def rows_as(output: OutputFormat) -> str:
    stream = io.StringIO()
    print_rows(ROWS, COLUMNS, output, stream)
    return stream.getvalue()


def test_a_table_in_a_pipe_is_plain_aligned_columns() -> None:
    assert rows_as(OutputFormat.TABLE).splitlines() == [
        "TOPIC    QUEUES  PERMISSION",
        "flights       8  READ_WRITE",
        "ö\\n          16  READ",
    ]


def test_a_table_on_a_terminal_is_drawn() -> None:
    stream = Terminal()
    print_rows(ROWS, COLUMNS, OutputFormat.TABLE, stream)
    assert "flights" in stream.getvalue()
    assert "─" in stream.getvalue()


def test_json_jsonl_and_yaml_hold_all_that_a_row_has() -> None:
    assert json.loads(rows_as(OutputFormat.JSON)) == ROWS
    assert [json.loads(line) for line in rows_as(OutputFormat.JSONL).splitlines()] == ROWS
    assert yaml.safe_load(rows_as(OutputFormat.YAML)) == ROWS


@pytest.mark.parametrize("output", list(OutputFormat))
def test_no_rows_are_still_a_valid_document(output: OutputFormat) -> None:
    stream = io.StringIO()
    print_rows([], COLUMNS, output, stream)
    text = stream.getvalue()
    match output:
        case OutputFormat.TABLE | OutputFormat.WIDE:
            assert text == "TOPIC  QUEUES  PERMISSION\n"
        case OutputFormat.JSONL:
            assert text == ""
        case _:
            assert yaml.safe_load(text) == []


def test_an_object_as_a_table_has_a_line_for_each_value() -> None:
    stream = io.StringIO()
    print_object({"status": "SEND_OK", "queue_offset": 47, "tags": {}}, OutputFormat.TABLE, stream)
    assert stream.getvalue() == "STATUS        SEND_OK\nQUEUE-OFFSET  47\nTAGS          -\n"


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("output", [OutputFormat.JSON, OutputFormat.JSONL, OutputFormat.YAML])
def test_a_stream_is_a_valid_document_however_long(output: OutputFormat, count: int) -> None:
    stream = io.StringIO()
    items = [{"offset": n, "body": "é"} for n in range(count)]
    with RowStream({"offset": 6}, output, stream) as out:
        for item in items:
            out.print(item)
    text = stream.getvalue()
    if output is OutputFormat.JSONL:
        assert [json.loads(line) for line in text.splitlines()] == items
    elif output is OutputFormat.JSON:
        assert json.loads(text) == items
    else:
        assert yaml.safe_load(text) == items


def test_a_stream_as_a_table_has_one_header() -> None:
    stream = io.StringIO()
    with RowStream({"offset": 6, "body": 4}, OutputFormat.TABLE, stream) as out:
        out.print({"offset": 1, "body": "a\tb"})
        out.print({"offset": 2, "body": "c"})
    assert stream.getvalue() == "OFFSET  BODY\n1       a\\tb\n2       c\n"


def test_a_stream_in_a_narrow_terminal_keeps_its_text_and_says_what_it_leaves_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    columns = {"offset": 12, "store_time": 24, "body": 0}
    with RowStream(columns, OutputFormat.TABLE, stream, expendable=("store_time",)) as out:
        out.print({"offset": 1, "store_time": "now", "body": "x" * 40})
    assert stream.getvalue().splitlines() == [
        "OFFSET        BODY",
        "1             " + "x" * 25 + "…",
        "(STORE-TIME: -o wide)",
    ]


def test_an_interrupted_json_stream_is_closed_all_the_same() -> None:
    stream = io.StringIO()
    out = RowStream({}, OutputFormat.JSON, stream)
    out.print({"a": 1})
    out.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert json.loads(stream.getvalue()) == [{"a": 1}]


def test_colour_is_for_terminals_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert colour_wanted(Terminal())
    assert not colour_wanted(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colour_wanted(Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not colour_wanted(Terminal())


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
@pytest.mark.parametrize("output", [OutputFormat.JSON, OutputFormat.JSONL])
def test_json_is_json_whatever_the_encoding_of_stdout(
    monkeypatch: pytest.MonkeyPatch, encoding: str, output: OutputFormat
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding))
    escape_what_cannot_be_written()
    row = {"body": "h\u00e9llo \u2603 \U0001f6eb", "lone": "\udcff"}
    print_rows([row], tuple(row), output)
    print_rows([row], tuple(row), OutputFormat.TABLE)
    sys.stdout.flush()
    text, table = written.getvalue().decode(encoding).split("BODY")
    found = json.loads(text)
    assert (found[0] if isinstance(found, list) else found) == row
    assert ("\\u2603" in table) == (encoding != "utf-8")
