"""The tree of commands, without processes and servers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from protomq_cli.exits import ExitCode
from protomq_cli.main import main

COMMANDS = [
    "standalone", "namesrv", "broker", "health",
    "send", "recall", "pull", "consume", "pop", "worker", "completion", "version", "topic list",
    "topic create", "topic describe", "topic delete", "group offsets", "group commit", "group delete",
    "group lag", "group reset", "group clone", "message query", "cluster list",
    "request", "message track", "trace show", "backup", "restore",
    "cluster status", "cluster forget", "cluster drain", "cluster spread",
    "cluster namesrv", "ha status", "ha wait", "ha forget", "ha cancel", "log dump", "log verify", "log repair", "log epochs",
    "bench producer", "bench batch", "bench consumer",
    "bench latency", "filter deploy", "filter list", "filter delete", "group set", "group show", "dlq list", "dlq show", "dlq replay",
    "transaction list", "transaction show", "transaction commit", "transaction rollback",
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine happens to have must not matter."""
    monkeypatch.setenv("PROTOMQ_CONFIG", "/dev/null")
    monkeypatch.setenv("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:1")


def test_ctrl_c_while_modules_are_imported_ends_it_without_a_trace(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    for module in ("protomq_cli", "protomq"):
        ended = subprocess.run(
            [sys.executable, "-m", module, "version"],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            check=False,
        )
        assert (ended.returncode, ended.stderr) == (130, b"")


def test_a_hangup_while_a_worker_is_imported_does_not_end_it(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGHUP)\nraise KeyboardInterrupt\n")
    for command, code in (("worker", 130), ("version", -1)):
        ended = subprocess.run([sys.executable, "-m", "protomq_cli", command], env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=False)
        assert ended.returncode == code


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"Usage: protomq {command}")


def test_every_command_of_the_tree_is_in_that_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-h"]) == 0
    shown = capsys.readouterr().out
    assert "Exit codes: 0 done" in shown
    words = re.findall(r"^  ([a-z]+)  ", shown.split("Commands:")[1], re.MULTILINE)
    assert set(words) == {command.split()[0] for command in COMMANDS}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["topik"], "No such command 'topik'. Did you mean 'topic'? `protomq --help` explains"),
        (["send", "t", "x", "-k", ""], "a key is expected, this is empty; leave --key out for none"),
        (["topic", "create"], "Missing argument 'TOPIC'"),
        (["pull", "t", "--offset", "nonsense"], "the forms are start, end, 47"),
        (["pull", "t", "--offset", "9:5"], "ends before it begins"),
        (["pull", "t", "--format", "%z"], "has no meaning"),
        (["pull", "t", "--transport", "pigeon"], "it is auto, remoting or grpc"),
        (["send", "t", "x", "--property", "nonsense"], "is not NAME=VALUE"),
        (["send", "t", "x", "-p", "a=1", "-p", "b=1", "-p", "a=2"], "a is given twice"),
        (["send", "t", "x", "-c", "0"], "send it once at least"),
        (["consume", "t", "-G", "-e"], "a name is expected, this is '-e'"),
        (["send", "t", "x", "--timeout", "soon"], "is no duration"),
        (["send", "t", "x", "--file", "y"], "not both"),
        (["bench", "producer", "--size", "big"], "is no size"),
        (["bench", "latency", "--rate", "0"], "must be above 0"),
        (["standalone", "--data-dir", ""], "it is empty"),
        (["log", "verify", ""], "it is empty"),
        (["group", "commit", "g", "t", "-O", "1:2"], "not a range"),
        (["message", "query", "t"], "give one of --key and --id"),
        (["message", "query", "t", "-k", "k", "-O", "7"], "here it is a time"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert complaint in shown.err
    assert len(shown.err.splitlines()) == 1


def test_a_group_without_a_verb_shows_its_help_and_is_wrong_usage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["topic"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Usage: protomq topic" in shown.err
    assert shown.err.splitlines()[-1].startswith("protomq: a command is missing")


def test_errors_are_json_when_output_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topic", "describe", "-o", "json"]) == 2
    assert json.loads(capsys.readouterr().err)["error"] == {
        "code": 2,
        "reason": "USAGE",
        "message": "Missing argument 'TOPIC'; `protomq topic describe --help` explains",
    }


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_call_the_program_back(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    assert "_PROTOMQ_COMPLETE" in capsys.readouterr().out


def test_commands_are_completed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_PROTOMQ_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "protomq topic de")
    monkeypatch.setenv("COMP_CWORD", "2")
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().out.split() == ["describe", "delete"]


@pytest.mark.parametrize(("given", "found"), [(None, "1"), ("4", "4")])
def test_a_server_starts_no_threads_for_linear_algebra_unless_it_is_told_to(
    given: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "OPENBLAS_NUM_THREADS"
    # That they are put back at the end, whatever is set here: no broker could be warm any more (tests/support/warm_servers.py).
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")
    monkeypatch.setenv(name, given or "")
    if given is None:
        monkeypatch.delenv(name)
    seen: list[str | None] = []

    def run_standalone(**_: object) -> int:
        seen.append(os.environ.get(name))
        return 0

    monkeypatch.setattr("protomq_cli.standalone.run_standalone", run_standalone)
    assert main(["standalone"]) == ExitCode.OK
    assert seen == [found]
