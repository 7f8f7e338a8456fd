from __future__ import annotations

import json

import pytest

from protomq.errors import NotPermittedError, ProtomqError, TopicNotFoundError
from protomq_cli.connection import translate
from protomq_cli.exits import (
    UNANSWERED,
    CliError,
    ExitCode,
    error_line,
    exit_code_of,
    wants_json_errors,
)
from protomq_runtime.errors import RULES, Code


def test_each_status_code_has_an_exit_code() -> None:
    expected = {
        3: 2,
        4: 3,
        5: 4,
        6: 6,
        7: 5,
        8: 6,
        9: 6,
        10: 6,
        11: 2,
        13: 1,
        14: 3,
        15: 1,
        16: 5,
        99: 1,
    }
    assert {code: int(exit_code_of(code, "")) for code in expected} == expected


def test_what_a_server_that_is_reached_refuses_is_refused() -> None:
    said = [reason for reason, rule in RULES.items() if rule.code is Code.UNAVAILABLE]
    assert "NOT_ENOUGH_REPLICAS" in said
    assert {exit_code_of(Code.UNAVAILABLE.value, reason) for reason in said} == {ExitCode.REFUSED}
    assert {exit_code_of(Code.UNAVAILABLE.value, reason) for reason in (*UNANSWERED, "NO_ROUTE")} == {ExitCode.UNREACHABLE}


def test_an_error_is_one_line_whatever_it_holds() -> None:
    error = CliError(ExitCode.NOT_FOUND, "TOPIC_NOT_FOUND", "no topic\n  'x';\tmake it")
    assert error_line(error, as_json=False) == "protomq: no topic 'x'; make it"


def told(error: ProtomqError) -> str:
    translated = translate(error)
    assert translated is not None
    return translated.message


def test_where_no_broker_is_registered_no_topic_is_to_be_made() -> None:
    error = TopicNotFoundError("no broker is registered, so none has the topic t; start one", metadata={"topic": "t"})
    assert told(error) == (
        "no broker is registered, so none has the topic t; `protomq cluster list` shows the brokers, `protomq broker -c FILE` starts one"
    )


def test_a_topic_that_may_not_be_written_may_be_one_of_a_drained_broker() -> None:
    written = NotPermittedError("topic 't' may not be written: x; ask the operator", metadata={"topic": "t"})
    assert told(written) == (
        "topic 't' may not be written: x; if its broker was drained, `protomq cluster drain BROKER --undo` opens all its topics again, "
        "else `protomq topic create t --update --permission read-write` this one"
    )
    read = NotPermittedError("topic 't' may not be read: x; ask the operator", metadata={"topic": "t"})
    assert told(read) == "topic 't' may not be read: x; `protomq topic create t --update --permission read-write` allows it"


def test_an_error_as_json_has_code_reason_and_message() -> None:
    error = CliError(ExitCode.NOT_FOUND, "TOPIC_NOT_FOUND", "no topic “x”")
    assert json.loads(error_line(error, as_json=True)) == {
        "error": {"code": 4, "reason": "TOPIC_NOT_FOUND", "message": "no topic “x”"}
    }


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["topic", "list", "-o", "json"], True),
        (["topic", "list", "-o", "jsonl"], True),
        (["topic", "list", "--output=json"], True),
        (["topic", "list", "-ojson"], True),
        (["topic", "list", "-o", "yaml"], False),
        (["topic", "list", "-o"], False),
        (["send", "t", "--", "-o", "json"], False),
        (["send", "t", "json"], False),
        ([], False),
    ],
)
def test_the_format_of_errors_is_known_before_arguments_are_parsed(
    arguments: list[str], wanted: bool
) -> None:
    assert wants_json_errors(arguments) is wanted


def test_a_name_that_is_far_too_long_is_cut() -> None:
    error = CliError(ExitCode.USAGE, "USAGE", f"this is {'n' * 5000} and /a/path/{'x' * 150} is whole")
    for as_json in (False, True):
        line = error_line(error, as_json=as_json)
        assert f"{'n' * 60}…{'n' * 10} (5,000 characters) and /a/path/{'x' * 150} is whole" in line
        assert len(line) < 500
