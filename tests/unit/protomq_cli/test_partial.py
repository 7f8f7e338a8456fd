"""Several brokers are asked at the same time, and those that do not answer are named."""

from __future__ import annotations

from collections.abc import Callable
from threading import Barrier
from typing import NoReturn

import pytest

from protomq.errors import ConnectFailedError, RequestTimeoutError, TopicNotFoundError
from protomq_cli.exits import CliError
from protomq_cli.partial import Missing

MEETING_S = 5.0


def raising(error: Exception) -> Callable[[], NoReturn]:
    def call() -> NoReturn:
        raise error

    return call


def test_all_are_asked_at_the_same_time_and_who_is_silent_is_named() -> None:
    barrier = Barrier(3, timeout=MEETING_S)

    def meet() -> str:
        barrier.wait()
        return "here"

    def meet_and_fail() -> str:
        barrier.wait()
        raise RequestTimeoutError("no answer in time")

    missing = Missing()
    assert missing.ask_each({"a": meet, "b": meet_and_fail, "c": meet}) == {"a": "here", "c": "here"}
    assert missing.reasons() == {"b": "no answer in time"}
    assert missing.ask_each({"b": lambda: pytest.fail("it was silent a moment ago")}) == {}
    with pytest.raises(CliError, match=r"no answer from b \(no answer in time\)"):
        missing.check()


def test_what_one_says_of_the_topic_is_raised_unless_another_is_silent() -> None:
    unknown = TopicNotFoundError("no topic 'flights'")
    with pytest.raises(TopicNotFoundError):
        Missing().ask_each({"a": raising(unknown), "b": lambda: 1})
    with pytest.raises(ConnectFailedError):
        Missing().ask_each({"a": raising(ConnectFailedError("refused")), "b": raising(unknown)})
