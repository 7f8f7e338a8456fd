"""docs/spark.md names every option there is, and none that there is not."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from protomq_spark import options
from protomq_spark.log_source import parse_log_options
from protomq_spark.options import parse_read_options, parse_write_options
from protomq_spark.pipelines.__main__ import PIPELINES, make_parser

TEXT = (Path(__file__).parents[3] / "docs" / "spark.md").read_text()
ANYWHERE = {"path", "broker"}
"""Options of the log's reader whose names are described in a row of the table without being alone there."""


def section(heading: str) -> str:
    found = re.search(rf"^(#+) {re.escape(heading)}\n(.*?)(?=^#{{1,3}} |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found is not None, heading
    return found[2]


def in_tables(text: str) -> set[str]:
    """What stands in backquotes in the first column of tables."""
    cells = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}


def asked_for(monkeypatch: pytest.MonkeyPatch, kind: str) -> set[str]:
    """The options that a parser looks at."""
    names: set[str] = set()
    look = options._Given.text

    def noting(self: options._Given, name: str, default: str = "") -> str:
        names.add(name)
        return look(self, name, default)

    monkeypatch.setattr(options._Given, "text", noting)
    if kind == "source":
        parse_read_options({"protomq.namesrv": "a:1", "subscribe": "t"})
    elif kind == "sink":
        parse_write_options({"protomq.namesrv": "a:1"})
    else:
        parse_log_options({"path": "/nowhere"})
    return names


def test_the_options_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    documented = in_tables(section("Options of the source"))
    aliases = {"nameServer", "topic", "group", "subExpression", "pullBatchSize", "pullTimeout"}
    assert {name.lower() for name in aliases} == set(options._ALIASES)
    assert documented == asked_for(monkeypatch, "source") | aliases


def test_the_options_of_the_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    text = section("Writing").partition("| option |")[2]
    assert in_tables(text) == asked_for(monkeypatch, "sink") | {"nameServer"}


def test_the_options_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    text = section("Reading the log without a broker")
    asked = asked_for(monkeypatch, "log")
    assert asked - in_tables(text) <= ANYWHERE | {"checkCrc"}
    assert in_tables(text) <= asked | {"subscribe"}


@pytest.mark.parametrize("name", sorted(PIPELINES))
def test_the_arguments_of_a_pipeline(name: str) -> None:
    parser = make_parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    known = {flag for action in commands.choices[name]._actions for flag in action.option_strings}
    common = {"-h", "--help", "--namesrv", "--master", "--report"}
    rows = re.findall(r"^\| (`--.*?) \|", section(name), re.MULTILINE)
    documented = {flag for row in rows for flag in re.findall(r"--[\w-]+", row)}
    assert documented == known - common
    # Commands are shown with flags that exist, and parse.
    for command in re.findall(rf"pipelines {name} (.*(?:\\\n.*)*)", section(name)):
        assert set(re.findall(r"(?<!\S)--[\w-]+", command)) <= known
