"""Values that are converted without pydantic are the ones that typer would give, and what is wrong is still refused in its words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from protomq_cli.exits import ExitCode
from protomq_cli.main import COMMANDS, Group, build_app, main
from protomq_cli.options import DEFAULT_TIMEOUT_S, timeout_option
from protomq_cli.output import OutputFormat
from protomq_cli.quick_values import ELSEWHERE, convert_quickly, quick_value
from protomq_cli.sending import CompressionName


@pytest.mark.parametrize(
    ("text", "annotation", "expected"),
    [
        ("flights", str, "flights"),
        ("", str, ""),
        ("7", int, 7),
        ("-7", int, -7),
        (7, int, 7),
        ("json", OutputFormat, OutputFormat.JSON),
        (OutputFormat.TABLE, OutputFormat, OutputFormat.TABLE),
        (__file__, Path, Path(__file__)),
        (None, int, None),
    ],
)
def test_what_is_plainly_right_is_converted(text: Any, annotation: Any, expected: Any) -> None:
    found = quick_value(text, annotation)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("text", "annotation"),
    [
        ("seven", int),
        ("1_000", int),
        (" 7", int),
        ("9" * 30, int),
        (True, int),
        ("JSON", OutputFormat),
        ("no such file", Path),
        ("0.5", float),
        (b"bytes", str),
        ("x", list[str]),
    ],
)
def test_all_else_is_left_to_typer(text: Any, annotation: Any) -> None:
    assert quick_value(text, annotation) is ELSEWHERE


def test_a_number_outside_its_range_is_left_to_typer() -> None:
    def found(text: str) -> Any:
        return quick_value(text, int, minimum=1, maximum=5)

    assert [found("1"), found("5")] == [1, 5]
    assert [found("0"), found("6")] == [ELSEWHERE, ELSEWHERE]


def test_a_parser_gets_the_text() -> None:
    assert quick_value("2m", float, parser=timeout_option) == 120
    with pytest.raises(typer.BadParameter):
        quick_value("never", float, parser=timeout_option)


LINES = [
    ["send", "t", "x", "--compression", "zlib", "--count", "3"],
    ["send", "t", "--file", __file__, "--key", "k"],
    ["send", "t", "--timeout", "2s", "--property", "a=b", "--property", "c=d"],
    ["pull", "t", "--offset", "1:3", "-o", "JSONL", "-b", "b"],
    ["standalone", "--port", "0", "--log-level", "error"],
    ["topic", "create", "t", "--queues", "4", "--broker", "b"],
    ["group", "list"],
    ["bench", "producer"],
]


def values(line: list[str], *, quickly: bool) -> dict[str, Any]:
    """What the command's function would get."""
    command: Any = typer.main.get_command(build_app(line))
    if quickly:
        convert_quickly(command)
    while words := getattr(command, "commands", {}):
        word, *line = line
        command = words[word]
    params: dict[str, Any] = command.make_context("it", line).params
    return params


@pytest.mark.parametrize("line", LINES, ids=" ".join)
def test_a_command_gets_the_values_that_typer_gives(line: list[str]) -> None:
    assert values(line, quickly=True) == values(line, quickly=False)


def test_what_is_wrong_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["standalone", "--port", "70000"]) == ExitCode.USAGE
    assert "it is 65535 at most" in capsys.readouterr().err
    assert main(["send"]) == ExitCode.USAGE
    assert "Missing argument 'TOPIC'" in capsys.readouterr().err
    assert main(["topic", "lst"]) == ExitCode.USAGE
    assert "Did you mean 'list'?" in capsys.readouterr().err


def test_words_that_name_a_command_build_that_one_alone() -> None:
    def commands(*words: str) -> dict[str, Any]:
        built: Any = typer.main.get_command(build_app(words))
        return {name: list(getattr(each, "commands", ())) for name, each in built.commands.items()}

    everything = {
        name: list(each.verbs) if isinstance(each, Group) else [] for name, each in COMMANDS.items()
    }
    assert commands("topic", "list", "-h") == {"topic": ["list"]}
    assert commands("send", "topic") == {"send": []}
    assert commands("topic", "lst") == {"topic": everything["topic"]}
    assert commands() == commands("tpic") == commands("--help") == everything


def test_a_short_command_imports_no_pydantic() -> None:
    code = (
        "import sys\n"
        "from protomq_cli.main import main\n"
        "code = main(['topic', 'list', '--namesrv', '127.0.0.1:1', '--output', 'json'])\n"
        "sys.exit('pydantic' in sys.modules or code != 3)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_defaults_are_not_converted() -> None:
    assert quick_value(DEFAULT_TIMEOUT_S, float, parser=timeout_option) == DEFAULT_TIMEOUT_S
    assert quick_value(CompressionName.ZLIB, CompressionName) is CompressionName.ZLIB
