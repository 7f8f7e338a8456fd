"""OffsetCommits over a store on a simulated disk: its lane is a list of what was posted, and of what is due later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from protomq.testing.simdisk import SimDisk
from protomq.v1.consumer_service_pb2 import QueueOffset
from protomq_broker.offset_commits import OffsetCommits
from protomq_broker.store.errors import DiskFullError
from protomq_broker.store.store import Store
from protomq_broker.store.topics import TopicConfig
from protomq_broker.system_writer import SystemWriter

from .store.store_helpers import committed, open_store


class StubLane:
    """Runs what is posted when it is told to; timers never go off by themselves."""

    def __init__(self) -> None:
        self.posted: list[Callable[[], None]] = []
        self.due: list[Callable[[], None]] = []

    def post(self, function: Callable[[], None]) -> None:
        self.posted.append(function)

    def call_later(self, delay_ms: float, function: Callable[[], None]) -> object:
        self.due.append(function)
        return function

    def run(self, functions: list[Callable[[], None]]) -> None:
        while functions:
            functions.pop(0)()


def make_commits() -> tuple[OffsetCommits, StubLane, Store, int]:
    store, lane, writer = open_store(SimDisk()), StubLane(), SystemWriter()
    writer.start(store, cast("Any", lane))
    return OffsetCommits(store, writer), lane, store, store.topics.create(TopicConfig("topic")).incarnation


def refuse(*_: object) -> int:
    raise DiskFullError("the disk is full")


def commit_by_pull(commits: OffsetCommits, incarnation: int, queue_offset: int) -> None:
    commits.commit_in_passing(
        "group",
        QueueOffset(topic="topic", queue_id=0, queue_offset=queue_offset, topic_incarnation=incarnation),
    )


@pytest.mark.parametrize("how", ["the timer", "the end"])
def test_what_pulls_commit_while_the_log_takes_nothing_is_said_once_and_appended_later(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commits, lane, store, incarnation = make_commits()
    with monkeypatch.context() as patch:
        patch.setattr(store, "append_state", refuse)
        for queue_offset in range(5):
            commit_by_pull(commits, incarnation, queue_offset)
            lane.run(lane.posted)
    assert caplog.text.count("not in the log yet") == len(lane.due) == 1
    assert committed(store, "group", "topic", 0) is None

    if how == "the timer":
        lane.run(lane.due)
    else:
        commits.close()

    assert committed(store, "group", "topic", 0) == 4
