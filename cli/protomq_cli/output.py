"""What commands print: one place for table, json, jsonl and yaml.

Lists and single objects are printed whole. A stream (pulled messages, say) is printed item by item and flushed, so `protomq
consume ... | head` shows each message when it arrives. On a terminal rich draws a table, as wide as the terminal (see
table_fit.py). A pipe gets plain columns, all of them, which cut and awk understand. Times are ISO 8601 in UTC.
"""

from __future__ import annotations

import codecs
import io
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from types import TracebackType
from typing import Any, Final, Self, TextIO

from protomq_cli.exits import CliError, ExitCode
from protomq_cli.table_fit import TEXT_WIDTH_MIN, cut, fit, is_whole

Row = Mapping[str, Any]

_INDENT: Final = 2
_ESCAPES: Final = "protomq.escapes"
_GAP: Final = 3
"""Between two columns of a table that rich draws."""


NO_OUTPUT: Final = "NO_OUTPUT"
"""The reason of an error: stdout takes nothing."""
ALL_DONE: Final = "; the command has done what it prints there"


class OutputFormat(StrEnum):
    """The values of `--output`; WIDE is a table with all its columns, however wide the terminal is."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    JSONL = "jsonl"
    YAML = "yaml"

    @property
    def is_table(self) -> bool:
        """Whether people read it."""
        return self in (OutputFormat.TABLE, OutputFormat.WIDE)


def colour_wanted(stream: TextIO) -> bool:
    """Whether to colour what goes to `stream`: on a terminal, unless NO_COLOR or TERM=dumb say no."""
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def print_rows(
    rows: Iterable[Row],
    columns: Sequence[str],
    output: OutputFormat,
    stream: TextIO | None = None,
    *,
    expendable: Sequence[str] = (),
) -> None:
    """A list of objects. A table shows `columns` only, the other formats show all that a row has.

    `expendable`: the columns that a narrow terminal goes without first; after them the last ones.
    """
    out = stream or sys.stdout
    rows = list(rows)
    with stdout_named(ALL_DONE):
        match output:
            case OutputFormat.TABLE | OutputFormat.WIDE:
                width = _width(out) if output is OutputFormat.TABLE else None
                _print_table(rows, columns, expendable, width, out)
            case OutputFormat.JSON:
                out.write(json.dumps(rows, indent=_INDENT, ensure_ascii=False, default=_plain) + "\n")
            case OutputFormat.JSONL:
                out.writelines(_json_line(row) + "\n" for row in rows)
            case OutputFormat.YAML:
                out.write(_yaml(rows) + "\n")


def print_object(row: Row, output: OutputFormat, stream: TextIO | None = None) -> None:
    """One object; as a table: a line for each of its values."""
    out = stream or sys.stdout
    with stdout_named(ALL_DONE):
        match output:
            case OutputFormat.TABLE | OutputFormat.WIDE:
                width = max((len(name) for name in row), default=0)
                out.writelines(f"{_title(name):<{width}}  {_cell(value)}\n" for name, value in row.items())
            case OutputFormat.JSON:
                out.write(json.dumps(row, indent=_INDENT, ensure_ascii=False, default=_plain) + "\n")
            case OutputFormat.JSONL:
                out.write(_json_line(row) + "\n")
            case OutputFormat.YAML:
                out.write(_yaml(row) + "\n")


def escape_what_cannot_be_written() -> None:
    """A stdout or stderr that is not UTF-8 (LANG, PYTHONIOENCODING) gets what its encoding lacks as JSON escapes it."""
    codecs.register_error(_ESCAPES, _escaped)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ESCAPES)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


class Discarded(io.StringIO):
    """Takes what nobody is to read, and keeps nothing of it."""

    def write(self, text: str) -> int:
        """Its length, as if it were written."""
        return len(text)


@contextmanager
def stdout_named(beside: str = "") -> Iterator[None]:
    """An error of writing to stdout names it, else it reads like one of a server; `beside`: what became of the rest of the command.

    A reader that has gone is no such error.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CliError(ExitCode.FAILURE, NO_OUTPUT, f"stdout cannot be written: {error.strerror or error}{beside}") from error


def flush_stdout(beside: str = "") -> None:
    """Lets the reader see what was printed."""
    with stdout_named(beside):
        sys.stdout.flush()


def require_stdout() -> None:
    """Raises CliError if the shell has closed stdout (`>&-`): what nobody can see must not count as consumed."""
    # `__main__` has opened this in its place.
    if getattr(sys.stdout, "name", "") == os.devnull:
        text = "stdout is closed, so no message is taken; to take them unseen, redirect it to /dev/null"
        raise CliError(ExitCode.FAILURE, NO_OUTPUT, text)


def forget_reader(stream: TextIO | None = None) -> None:
    """Nobody reads stdout (or `stream`) any more (`head`, a pager): it goes nowhere now. Else Python complains at exit, with code 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), (stream or sys.stdout).fileno())


class RowStream:
    """Objects that are printed as they come; use it with `with`, so that a JSON array is closed."""

    def __init__(
        self,
        columns: Mapping[str, int],
        output: OutputFormat,
        stream: TextIO | None = None,
        *,
        expendable: Sequence[str] = (),
        reports_work: bool = False,
    ) -> None:
        """`columns` are those of a table, with their widths: nobody knows yet what will come. The last takes what is left.

        `expendable`: see print_rows. `reports_work`: the rows say what the command does, which goes on when nobody reads them any more.
        """
        self._reports_work = reports_work
        self._output = output
        self._out = stream or sys.stdout
        self._columns = dict(columns)
        width = _width(self._out) if output is OutputFormat.TABLE else None
        self._cut_to = 0
        self._left_out: list[str] = []
        if width is not None and columns:
            needed = {
                name: max(size or TEXT_WIDTH_MIN, len(name)) + 2 for name, size in columns.items()
            }
            self._columns = {
                name: needed[name] - 2 for name in fit(needed, needed, expendable, width + 2)
            }
            self._left_out = [name for name in columns if name not in self._columns]
            *others, last = self._columns
            if last == list(columns)[-1] and columns[last] == 0:
                self._cut_to = width - sum(self._columns[name] + 2 for name in others)
                self._columns[last] = 0
        self._count = 0

    def print(self, row: Row) -> None:
        """One more object."""
        try:
            self._print(row)
        except BrokenPipeError:
            if not self._reports_work:
                raise
            self._lose_reader()

    def _print(self, row: Row) -> None:
        match self._output:
            case OutputFormat.TABLE | OutputFormat.WIDE:
                if self._count == 0:
                    self._print_cells({name: _title(name) for name in self._columns})
                self._print_cells(row)
            case OutputFormat.JSON:
                text = json.dumps(row, indent=_INDENT, ensure_ascii=False, default=_plain)
                with stdout_named():
                    self._out.write(("[\n" if self._count == 0 else ",\n") + text)
            case OutputFormat.JSONL:
                _write(self._out, _json_line(row))
            case OutputFormat.YAML:
                _write(self._out, _yaml([row]))
        self._count += 1

    def flush(self) -> None:
        """Let the reader see what was printed."""
        try:
            with stdout_named():
                self._out.flush()
        except BrokenPipeError:
            if not self._reports_work:
                raise
            self._lose_reader()

    def _lose_reader(self) -> None:
        forget_reader()
        self._out = Discarded()

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
        if isinstance(error, CliError) and error.reason == NO_OUTPUT:
            return
        if self._output is OutputFormat.JSON:
            _write(self._out, "[]" if self._count == 0 else "\n]")
        elif self._output is OutputFormat.YAML and self._count == 0:
            _write(self._out, "[]")
        elif self._left_out and self._count:
            _write(self._out, _left_out_line(self._left_out))
        with stdout_named():
            self._out.flush()

    def _print_cells(self, row: Row) -> None:
        cells = [f"{_cell(row.get(name)):<{width}}" for name, width in self._columns.items()]
        if self._cut_to:
            cells[-1] = cut(cells[-1], self._cut_to)
        _write(self._out, "  ".join(cells).rstrip())


def _width(out: TextIO) -> int | None:
    """How wide the terminal is; None: it is none."""
    return shutil.get_terminal_size().columns if out.isatty() else None


def _print_table(
    rows: Sequence[Row],
    columns: Sequence[str],
    expendable: Sequence[str],
    terminal_width: int | None,
    out: TextIO,
) -> None:
    cells = {name: [_cell(row.get(name)) for row in rows] for name in columns}
    numeric = {
        name: bool(rows) and all(isinstance(row.get(name), int | float) for row in rows)
        for name in columns
    }
    widths = {name: max(map(len, (_title(name), *cells[name]))) for name in columns}
    if out.isatty():
        if terminal_width is not None:
            widths = _fit_columns(rows, widths, expendable, terminal_width)
        _draw_table(cells, numeric, widths, out)
        left_out = [name for name in columns if name not in widths]
        if left_out:
            out.write(_left_out_line(left_out) + "\n")
        return
    for line in (map(_title, columns), *zip(*cells.values(), strict=True)):
        padded = [
            text.rjust(widths[name]) if numeric[name] else text.ljust(widths[name])
            for name, text in zip(columns, line, strict=True)
        ]
        out.write("  ".join(padded).rstrip() + "\n")


def _fit_columns(
    rows: Sequence[Row], widths: Mapping[str, int], expendable: Sequence[str], terminal_width: int
) -> dict[str, int]:
    """The columns that the terminal has room for, with their widths."""
    needed = {name: width + _GAP for name, width in widths.items()}
    minimums = {
        name: width + _GAP
        if is_whole(name, (row.get(name) for row in rows))
        else min(width, max(TEXT_WIDTH_MIN, len(name))) + _GAP
        for name, width in widths.items()
    }
    fitted = fit(needed, minimums, expendable, terminal_width + _GAP)
    return {name: width - _GAP for name, width in fitted.items()}


def _draw_table(
    cells: Mapping[str, Sequence[str]],
    numeric: Mapping[str, bool],
    widths: Mapping[str, int],
    out: TextIO,
) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for name, width in widths.items():
        table.add_column(
            _title(name),
            justify="right" if numeric[name] else "left",
            width=width,
            no_wrap=True,
            overflow="ellipsis",
        )
    for line in zip(*(cells[name] for name in widths), strict=True):
        table.add_row(*line)
    # What has been fitted is not to be fitted again: -o wide is as wide as it must be.
    width = max(sum(widths.values()) + _GAP * (len(widths) - 1), 1)
    # With a height, for else rich takes a dumb terminal to be 80 wide.
    console = Console(
        file=out, no_color=not colour_wanted(out), markup=False, width=width, height=25
    )
    console.print("", table, "", sep="\n")


def _left_out_line(columns: Sequence[str]) -> str:
    return f"({', '.join(map(_title, columns))}: -o wide)"


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
    from protomq.wire.texts import one_line

    return one_line(str(value))


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
    with stdout_named():
        out.write(line + "\n")
