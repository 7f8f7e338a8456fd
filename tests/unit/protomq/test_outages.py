"""Outages: one line when somebody goes, one when it is back."""

from __future__ import annotations

import logging

import pytest

from protomq._outages import Outages
from protomq.errors import (
    ConnectFailedError,
    NotPermittedError,
    SystemBusyError,
    TopicNotFoundError,
)


def test_an_outage_is_one_line_and_its_end_another(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "protomq")
    now_s = 0.0
    outages = Outages(lambda: now_s)
    outages.answered("broker a", "t")
    for now_s in range(100):
        outages.failed("broker a", f"t{now_s % 3}", ConnectFailedError("refused"))
    outages.answered("broker b", "t")
    outages.answered("broker a", "t")
    outages.answered("broker a", "t")
    assert caplog.messages == [
        "broker a does not answer, trying again: refused",
        "broker a answers again, after 99.0 s",
    ]


def test_an_outage_ends_when_the_call_was_sent_that_is_answered_however_long_that_was_held(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    outages = Outages(lambda: now_s)
    for asked_s in (2.0, -1.0):
        now_s = 0.0
        outages.failed("broker a", "t", ConnectFailedError("refused"))
        now_s = 62.0
        outages.answered("broker a", "t", asked_s)
    assert caplog.messages[1::2] == ["broker a answers again, after 2.0 s", "broker a answers again, after 0.0 s"]


def test_what_one_topic_suffers_from_does_not_take_turns_with_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "protomq")
    outages = Outages(lambda: 0.0)
    for _ in range(10):
        outages.failed("broker a", "t", SystemBusyError("later"))
        outages.answered("broker a", "u")
    outages.answered("broker a", "t")
    assert caplog.messages == [
        "broker a, asked about topic t, answers SYSTEM_BUSY, trying again: later",
        "broker a, asked about topic t, answers again, after 0.0 s",
    ]


def test_that_a_topic_does_not_exist_is_no_news_where_the_user_was_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "protomq")
    outages = Outages(lambda: 0.0)
    outages.told_of.add("t")
    for topic in ("t", "u"):
        outages.failed("broker a", topic, TopicNotFoundError("none"))
    outages.failed("broker a", "t", SystemBusyError("later"))
    assert caplog.messages == [
        "broker a, asked about topic u, answers TOPIC_NOT_FOUND, trying again: none",
        "broker a, asked about topic t, answers SYSTEM_BUSY, trying again: later",
    ]


def test_a_topic_without_queues_is_told_once_unless_a_broker_has_said_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "protomq")
    outages = Outages(lambda: 0.0)
    for count in (0, 0, 2, 3):
        outages.queues_changed("t", count)
    outages.failed("broker a", "u", NotPermittedError("ask"))
    outages.queues_changed("u", 0)
    outages.queues_changed("u", 2)
    assert [line.partition(":")[0] for line in caplog.messages] == [
        "topic t has no queue that can be read, by its permission or its brokers'",
        "topic t can be read again, after 0.0 s",
        "broker a, asked about topic u, answers NOT_PERMITTED, trying again",
    ]
