"""Exit codes, and errors as one line that says what to do.

0  done            3  server not reachable, or no answer in time     6  refused: busy, full or a conflict
1  failed          4  no such topic, queue, message, group           130  interrupted (Ctrl-C)
2  wrong usage     5  not permitted                               7    partial: some brokers did not answer
"""

from __future__ import annotations

import json
import re
from enum import IntEnum
from typing import Final

EXIT_CODES_HELP: Final = (
    "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not reachable or timed out, 4 not found, "
    "5 not permitted, 6 refused (busy, full, conflict), 7 partial (some brokers did not answer), 130 interrupted."
)


class ExitCode(IntEnum):
    """What the shell sees."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    UNREACHABLE = 3
    NOT_FOUND = 4
    NOT_PERMITTED = 5
    REFUSED = 6
    PARTIAL = 7
    INTERRUPTED = 130


class CliError(Exception):
    """A command cannot do what was asked. The message says what to do; it is all the user sees."""

    def __init__(self, exit_code: ExitCode, reason: str, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.reason = reason
        self.message = message


_BY_STATUS_CODE: Final = {
    1: ExitCode.FAILURE,  # CANCELLED
    2: ExitCode.FAILURE,  # UNKNOWN
    3: ExitCode.USAGE,  # INVALID_ARGUMENT
    4: ExitCode.UNREACHABLE,  # DEADLINE_EXCEEDED
    5: ExitCode.NOT_FOUND,
    6: ExitCode.REFUSED,  # ALREADY_EXISTS
    7: ExitCode.NOT_PERMITTED,
    8: ExitCode.REFUSED,  # RESOURCE_EXHAUSTED
    9: ExitCode.REFUSED,  # FAILED_PRECONDITION
    10: ExitCode.REFUSED,  # ABORTED
    11: ExitCode.USAGE,  # OUT_OF_RANGE
    12: ExitCode.FAILURE,  # UNIMPLEMENTED
    13: ExitCode.FAILURE,  # INTERNAL
    14: ExitCode.UNREACHABLE,  # UNAVAILABLE
    15: ExitCode.FAILURE,  # DATA_LOSS
    16: ExitCode.NOT_PERMITTED,  # UNAUTHENTICATED
}
"""gRPC status codes."""

UNANSWERED: Final = ("CONNECT_FAILED", "CONNECTION_LOST", "REQUEST_TIMEOUT")
"""Reasons of errors where a server did not say anything."""

_REFUSALS: Final = ("NOT_ENOUGH_REPLICAS", "QUEUE_HEALING", "REPLICA_BEHIND", "SHUTTING_DOWN")
"""Reasons of UNAVAILABLE with which a server that was reached refuses."""

_UNANSWERED_HINT: Final = "see whether it runs; `protomq cluster list` shows the brokers and their addresses"
_HINTS: Final = {
    **dict.fromkeys(UNANSWERED, _UNANSWERED_HINT),
    "BROKER_MISSING": "start it again, or `protomq cluster forget NAME` if it will not come back",
    "BROKER_NOT_FOUND": "`protomq cluster list` shows the brokers, `protomq broker -c FILE` starts one",
    "GROUP_NOT_FOUND": "`protomq group list` shows the groups",
    "GROUP_DISABLED": "`protomq group set GROUP --consume` switches it on",
    "GROUP_IN_USE": "add --force to delete it all the same",
    "TOPIC_NOT_FOUND": "`protomq topic list` shows the topics, `protomq topic create NAME` makes one",
    "TOPIC_EXISTS": "add --update to change it",
    "OFFSET_OUT_OF_RANGE": "`protomq topic describe` shows the range",
    "TOPIC_RECREATED": "start again, to read the topic as it is now",
    "QUEUE_NOT_FOUND": "`protomq topic describe NAME` shows its queues",
    "NOT_PERMITTED": "`protomq topic create NAME --update --permission read-write` allows it",
    "DRAINED": (  # Of NOT_PERMITTED, where a message is sent.
        "if its broker was drained, `protomq cluster drain BROKER --undo` opens all its topics again, "
        "else `protomq topic create NAME --update --permission read-write` this one"
    ),
    "SYSTEM_BUSY": "try again in a moment",
    "DISK_FULL": "free space on the broker's disk",
    "STORE_FAILED": "look at the broker's log, then restart it",
    "SHUTTING_DOWN": "try again when it is back",
    "QUEUE_HEALING": "try again in a moment; `protomq cluster status` shows how far it is",
    "OFFSET_NOT_FOUND": "the group has not committed one yet",
    "CORRUPT_LOG": "`protomq log verify DIR` on the broker's host shows the damage",
}


_HINTS_INSTEAD: Final = (
    "GROUP_DISABLED", "GROUP_IN_USE", "GROUP_NOT_FOUND", "NOT_PERMITTED", "TOPIC_EXISTS", "TOPIC_NOT_FOUND", "TOPIC_RECREATED",
)  # fmt: skip
"""Of these the server's own advice, behind a semicolon, is for programs."""


def with_hint(reason: str, message: str) -> str:
    """The message and what to do about it, said once."""
    hint = hint_for(reason)
    if reason in _HINTS_INSTEAD:
        message = message.partition("; ")[0]
    return f"{message}; {hint}" if hint else message


def exit_code_of(status_code: int, reason: str) -> ExitCode:
    """The exit code for a gRPC status code, and the reason that came with it."""
    if reason in _REFUSALS:
        return ExitCode.REFUSED
    return _BY_STATUS_CODE.get(status_code, ExitCode.FAILURE)


def hint_for(reason: str) -> str:
    """What to do about an error of this reason; empty if the message must do."""
    return _HINTS.get(reason, "")


_LONG_WORD: Final = re.compile(r"\S{201,}")


def _cut(word: re.Match[str]) -> str:
    text = word.group()
    return f"{text[:60]}…{text[-10:]} ({len(text):,} characters)"


def error_line(error: CliError, *, as_json: bool) -> str:
    """What is written to stderr, without the line's end. A word is cut that no terminal shows whole: names that are far too long."""
    message = _LONG_WORD.sub(_cut, " ".join(error.message.split()))
    if as_json:
        content = {"code": int(error.exit_code), "reason": error.reason, "message": message}
        return json.dumps({"error": content}, ensure_ascii=False)
    return f"protomq: {message}"


def wants_json_errors(arguments: list[str]) -> bool:
    """Whether `-o json` or `-o jsonl` stands among the arguments.

    Asked before they are parsed, since what is wrong may be the arguments themselves.
    """
    for index, argument in enumerate(arguments):
        value = ""
        if argument in ("-o", "--output"):
            value = arguments[index + 1] if index + 1 < len(arguments) else ""
        elif argument.startswith("--output="):
            value = argument.partition("=")[2]
        elif argument.startswith("-o") and not argument.startswith("--"):
            value = argument[2:].removeprefix("=")
        elif argument == "--":
            return False
        if value in ("json", "jsonl"):
            return True
    return False
