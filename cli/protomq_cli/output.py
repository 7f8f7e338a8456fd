"""What commands print: one place for table, json, jsonl and yaml.

Lists and single objects are printed whole; a stream (pulled messages, say) is printed item by item and flushed,
so that `protomq consume ... | head` shows each message when it arrives. A table is drawn by rich on a terminal; into a
pipe go plain columns, which cut and awk understand. Times are ISO 8601 in UTC.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from types import TracebackType
from typing import Any, Final, Self, TextIO

Row = Mapping[str, Any]

_INDENT: Final = 2


class OutputFormat(StrEnum):
    """The values of `--output`."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"
    YAML = "yaml"


def colour_wanted(stream: TextIO) -> bool:
    """Whether to colour what goes to `stream`: on a terminal, unless NO_COLOR or TERM=dumb say no."""
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def print_rows(
    rows: Iterable[Row], columns: Sequence[str], output: OutputFormat, stream: TextIO | None = None
) -> None:
    """A list of objects. A table shows `columns` only, the other formats show all that a row has."""
    out = stream or sys.stdout
    rows = list(rows)
    match output:
        case OutputFormat.TABLE:
            _print_table(rows, columns, out)
        case OutputFormat.JSON:
            _write(out, json.dumps(rows, indent=_INDENT, ensure_ascii=False, default=_plain))
        case OutputFormat.JSONL:
            for row in rows:
                _write(out, _json_line(row))
        case OutputFormat.YAML:
            _write(out, _yaml(rows))


def print_object(row: Row, output: OutputFormat, stream: TextIO | None = None) -> None:
    """One object; as a table: a line for each of its values."""
    out = stream or sys.stdout
    match output:
        case OutputFormat.TABLE:
            width = max((len(name) for name in row), default=0)
            for name, value in row.items():
                _write(out, f"{_title(name):<{width}}  {_cell(value)}")
        case OutputFormat.JSON:
            _write(out, json.dumps(row, indent=_INDENT, ensure_ascii=False, default=_plain))
        case OutputFormat.JSONL:
            _write(out, _json_line(row))
        case OutputFormat.YAML:
            _write(out, _yaml(row))


class RowStream:
    """Objects that are printed as they come; use it with `with`, so that a JSON array is closed."""

    def __init__(
        self, columns: Mapping[str, int], output: OutputFormat, stream: TextIO | None = None
    ) -> None:
        """`columns` are those of a table, with their widths: nobody knows yet what will come."""
        self._columns = columns
        self._output = output
        self._out = stream or sys.stdout
        self._count = 0

    def print(self, row: Row) -> None:
        """One more object."""
        match self._output:
            case OutputFormat.TABLE:
                if self._count == 0:
                    self._print_cells({name: _title(name) for name in self._columns})
                self._print_cells(row)
            case OutputFormat.JSON:
                text = json.dumps(row, indent=_INDENT, ensure_ascii=False, default=_plain)
                self._out.write(("[\n" if self._count == 0 else ",\n") + text)
            case OutputFormat.JSONL:
                _write(self._out, _json_line(row))
            case OutputFormat.YAML:
                _write(self._out, _yaml([row]))
        self._count += 1

    def flush(self) -> None:
        """Let the reader see what was printed."""
        self._out.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, BrokenPipeError) or (isinstance(error, Exception) and not self._count):
            return  # Nobody reads any more; or all there is to say is the error.
        if self._output is OutputFormat.JSON:
            _write(self._out, "[]" if self._count == 0 else "\n]")
        elif self._output is OutputFormat.YAML and self._count == 0:
            _write(self._out, "[]")
        self._out.flush()

    def _print_cells(self, row: Row) -> None:
        cells = [f"{_cell(row.get(name)):<{width}}" for name, width in self._columns.items()]
        _write(self._out, "  ".join(cells).rstrip())


def _print_table(rows: Sequence[Row], columns: Sequence[str], out: TextIO) -> None:
    cells = [[_cell(row.get(name)) for name in columns] for row in rows]
    numeric = [
        bool(rows) and all(isinstance(row.get(name), int | float) for row in rows)
        for name in columns
    ]
    if out.isatty():
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
        for name, right in zip(columns, numeric, strict=True):
            table.add_column(_title(name), justify="right" if right else "left", overflow="fold")
        for line in cells:
            table.add_row(*line)
        Console(file=out, no_color=not colour_wanted(out), markup=False).print(table)
        return
    lines = [[_title(name) for name in columns], *cells]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    for line in lines:
        padded = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        ]
        _write(out, "  ".join(padded).rstrip())


def _title(name: str) -> str:
    return name.upper().replace("_", "-")


def _cell(value: Any) -> str:
    """A value as it stands in a table: one line, `-` for nothing."""
    if value is None or value == "" or value == [] or value == {}:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.3f}".rstrip("0").rstrip(".")
    if isinstance(value, Mapping):
        return ",".join(f"{name}={_cell(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ",".join(_cell(item) for item in value)
    text = str(value)
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    )


def _json_line(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False, separators=(",", ":"), default=_plain)


def _yaml(content: Any) -> str:
    import yaml

    plain = json.loads(json.dumps(content, default=_plain))
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True).rstrip("\n")


def _plain(value: Any) -> Any:
    """What json does not know: the object's own text."""
    return str(value)


def _write(out: TextIO, line: str) -> None:
    out.write(line + "\n")
