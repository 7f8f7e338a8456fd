"""A change of several brokers: one has done it, one has answered that it refuses, one is silent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from protomq import Admin
from protomq.errors import (
    ConnectFailedError,
    DeadlineExceededError,
    DiskFullError,
    GroupInUseError,
    PartialResultError,
    ProtomqError,
    UnsupportedError,
)
from protomq_cli.exits import CliError, ExitCode
from protomq_cli.partial import Missing
from tests.support.cli import Finished, jsonl, run

NOBODY = "127.0.0.1:1"
UNSUPPORTED = UnsupportedError("wasmtime is not installed there")
UNSUPPORTED.code = 12


def change_of(error: ProtomqError, result: Any) -> Any:
    def change(*_: object, **__: object) -> Any:
        raise PartialResultError("some brokers did not answer", result, {"b": error})

    return change


def error_of(finished: Finished) -> tuple[int, str, str]:
    error = json.loads(finished.stderr.splitlines()[-1])["error"]
    return error["code"], error["reason"], error["message"]


@pytest.mark.parametrize(
    ("method", "result", "command"),
    [
        ("deploy_filter", ["a"], ("filter", "deploy", "f", __file__)),
        ("delete_filter", ["a"], ("filter", "delete", "f", "--yes")),
        ("delete_filter", [], ("filter", "delete", "f", "--yes")),
        ("delete_topic", ["a"], ("topic", "delete", "t", "--yes")),
        ("delete_group", ["a"], ("group", "delete", "g", "--yes")),
    ],
)
def test_who_has_answered_and_refused_is_not_told_to_be_silent(
    method: str, result: list[str], command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Admin, method, change_of(UNSUPPORTED, result))
    refused = run(*command, "-o", "jsonl", namesrv=NOBODY, code=1)
    assert [row["broker"] for row in jsonl(refused)] == result
    assert error_of(refused) == (1, "UNSUPPORTED", "broker b refuses: wasmtime is not installed there")
    monkeypatch.setattr(Admin, method, change_of(ConnectFailedError("refused"), result))
    code, reason, message = error_of(run(*command, "-o", "jsonl", namesrv=NOBODY, code=7))
    assert (code, reason) == (7, "PARTIAL_RESULT")
    assert "no answer from b (refused)" in message


def missing_of(**failures: ProtomqError) -> Missing:
    missing = Missing()

    def change() -> None:
        raise PartialResultError("some brokers did not answer", None, failures)

    missing.take(change)
    return missing


def test_a_change_has_the_reason_of_the_first_that_refuses_and_names_the_others() -> None:
    in_use, full = GroupInUseError("it has members"), DiskFullError("its disk is full")
    missing = missing_of(a=ConnectFailedError("nobody is there"), b=in_use, c=full, d=DeadlineExceededError("in no time"))
    with pytest.raises(CliError) as caught:
        missing.check_change()
    assert (caught.value.exit_code, caught.value.reason) == (ExitCode.REFUSED, "GROUP_IN_USE")
    assert caught.value.message == (
        "broker b refuses: it has members; add --force to delete it all the same; broker c refuses: its disk is full; free space on the "
        "broker's disk; no answer from a (nobody is there); d (in no time)"
    )


def test_who_did_not_do_it_in_time_is_silent() -> None:
    for error in (ConnectFailedError("nobody is there"), DeadlineExceededError("in no time")):
        with pytest.raises(CliError) as caught:
            missing_of(a=error).check_change()
        assert caught.value.exit_code is ExitCode.PARTIAL
    Missing().check_change()


def test_a_slave_that_refuses_is_told_what_becomes_of_it() -> None:
    with pytest.raises(CliError, match=r"^broker a/1 refuses: its disk is full; free .* disk; it copies it later$"):
        missing_of(**{"a/1": DiskFullError("its disk is full")}).check_change(of_slaves="it copies it later")
