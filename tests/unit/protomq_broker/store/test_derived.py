"""A structure that is put into the store's list of what is derived follows the log, and nothing else of the store knows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from protomq.wire.record import FLAG_DUE_TIME
from protomq_broker.store.log.append import AppendRequest, ScannedRecords
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store_files import StoreFiles
from protomq_broker.testing.simdisk import SimDisk

from .log_helpers import make_request
from .store_helpers import open_store


class Follower:
    """Knows the positions of all records, and what was asked of it."""

    replay_from = 0
    needs_rebuild = False
    damage = ""
    outlives_topics = False
    takes_plain = True

    def __init__(self) -> None:
        self.positions: list[int] = []
        self.told: list[tuple[Any, ...]] = []

    def load(self, log_start: int) -> None:
        self.told.append(("load", log_start))

    def start_rebuild(self) -> None:
        self.told.append(("start_rebuild",))

    def replay(self, records: ScannedRecords) -> None:
        self.positions += records.positions.tolist()

    def pass_over(self, start_position: int, end_position: int) -> None:
        self.told.append(("pass_over", start_position, end_position))

    def truncate(self, end_position: int) -> None:
        self.told.append(("truncate", end_position))

    def apply(self, requests: Sequence[AppendRequest]) -> None:
        for each in requests:
            starts = each.region.starts
            at = each.physical_offset
            self.positions += [at] if starts is None else (starts + at).tolist()

    def forget_deleted(self, positions: Mapping[str, int]) -> None:
        self.told.append(("forget_deleted", *positions.items()))

    def remove_topic(self, topic: str) -> None:
        self.told.append(("remove_topic", topic))

    def flush(self) -> None:
        self.told.append(("flush",))

    def checkpoint(self, position: int) -> None:
        self.told.append(("checkpoint", position))

    def delete_below(self, log_start: int) -> None:
        self.told.append(("delete_below", log_start))

    def close(self) -> None:
        self.told.append(("close",))


@pytest.fixture
def followers(monkeypatch: pytest.MonkeyPatch) -> list[Follower]:
    """One more in the list of each store that is opened."""
    made: list[Follower] = []
    begin = StoreFiles.__init__

    def begin_with_one_more(self: StoreFiles, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        made.append(Follower())
        self.derived = (*self.derived, made[-1])

    monkeypatch.setattr(StoreFiles, "__init__", begin_with_one_more)
    return made


def test_a_structure_in_the_list_follows_appends_checkpoints_deletions_and_starts(
    followers: list[Follower],
) -> None:
    disk = SimDisk()
    store = open_store(disk)
    store.topics.create(TopicConfig("b"))
    store.append([make_request(topic="a"), make_request([b"1", b"2", b"3"], topic="b")])
    store.append([make_request(topic="a")])
    store.delete_topic("b")
    store.close()
    (before,) = followers
    deleted_end = store.appended_position
    created, *_, deleted = before.positions
    a, *of_b, another = before.positions[1:-1]
    assert len(of_b) == 3
    assert ("remove_topic", "b") in before.told
    assert before.told[-2:] == [("checkpoint", store.appended_position), ("close",)]

    store = open_store(disk)
    again = followers[-1]
    assert again.told[0] == ("load", 0)
    assert again.positions[:4] == [created, a, another, deleted], "b is deleted"
    assert ("truncate", deleted_end) in again.told
    store.close()


def test_a_structure_that_takes_no_plain_messages_is_told_of_groups_with_others(
    followers: list[Follower], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Follower, "takes_plain", False)
    store = open_store(SimDisk())
    (follower,) = followers
    store.append([make_request()])
    store.append([make_request(), make_request([b"1", b"2"])])
    assert not follower.positions
    store.topics.create(TopicConfig("b"))
    assert len(follower.positions) == 1, "the record of the topic"
    delayed = make_request()
    delayed.region.flags = FLAG_DUE_TIME
    delayed.region.due_times_ms = 5
    plain = [make_request(), make_request()]
    store.append([plain[0], delayed, plain[1]])
    assert follower.positions[1:] == [
        each.physical_offset for each in (plain[0], delayed, plain[1])
    ]
    store.close()
