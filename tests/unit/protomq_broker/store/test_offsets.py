from __future__ import annotations

import json

import pytest

from protomq.testing.simdisk import SimDisk
from protomq.v1.consumer_service_pb2 import CommitOffsetsRequest
from protomq_broker.store import offsets as offsets_module
from protomq_broker.store.offsets import ConsumerOffsets, TooManyGroupsError

PATH = "/s/config/consumerOffsets.json"


def make_offsets(disk: SimDisk | None = None) -> ConsumerOffsets:
    disk = disk or SimDisk()
    disk.make_folder("/s/config")
    return ConsumerOffsets(disk, PATH)


def test_what_was_committed_is_found():
    offsets = make_offsets()
    offsets.commit("g", "t", 0, 5)
    offsets.commit("g", "t", 3, 7)
    offsets.commit("g", "t", 0, 4)
    assert offsets.find("g", "t", 0) == 4
    assert offsets.of_topic("g", "t") == {0: 4, 3: 7}
    assert (
        offsets.find("g", "t", 1) is offsets.find("g", "u", 0) is offsets.find("h", "t", 0) is None
    )
    assert offsets.of_topic("h", "t") == {}
    assert offsets.groups() == {"g": ["t"]}


def test_the_file_is_written_when_something_has_changed():
    disk = SimDisk()
    offsets = make_offsets(disk)
    assert not offsets.flush()
    offsets.commit("g", "t", 1, 5)
    assert offsets.flush()
    offsets.commit("g", "t", 1, 5)
    assert not offsets.flush()
    assert json.loads(disk.content(PATH)) == {"g": {"t": {"1": 5}}}
    assert make_offsets(disk).of_topic("g", "t") == {1: 5}


def test_a_file_that_could_not_be_written_is_written_later():
    disk = SimDisk()
    offsets = make_offsets(disk)
    offsets.commit("g", "t", 1, 5)
    disk.capacity_bytes = 0
    with pytest.raises(OSError):
        offsets.flush()
    disk.capacity_bytes = 1 << 20
    assert offsets.flush()


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {"g": 5},
        {"g": {"t": 3}},
        {"g": {"t": {"x": 1}}},
        {"g": {"t": {"1": -1}}},
        {"g": {"t": {"1": True}}},
    ],
)
def test_what_is_wrong_in_the_file_is_left_out(value: object):
    disk = SimDisk()
    disk.make_folder("/s/config")
    fd = disk.create(PATH)
    disk.pwrite(fd, json.dumps(value).encode(), 0)
    assert make_offsets(disk).groups() == {}


def test_changes_go_into_the_log_once_and_come_back_from_it():
    offsets = make_offsets()
    offsets.commit("g", "t", 1, 5)
    offsets.commit("h", "t", 1, 6)
    offsets.commit("g", "u", 2, 7)
    offsets.commit("g", "t", 1, 8)
    bodies = offsets.changed_since_last()
    assert [CommitOffsetsRequest.FromString(body).consumer_group for body in bodies] == ["g", "h"]
    assert offsets.changed_since_last() == []
    other = make_offsets()
    for body in bodies:
        assert other.replay(body)
    assert other.of_topic("g", "t") == {1: 8}
    assert other.of_topic("g", "u") == {2: 7}
    assert other.of_topic("h", "t") == {1: 6}
    assert other.changed_since_last() == []
    assert other.flush()


def test_what_did_not_get_into_the_log_comes_again_as_it_is_by_then():
    offsets = make_offsets()
    offsets.commit("g", "t", 1, 5)
    offsets.commit("g", "gone", 1, 5)
    bodies = offsets.changed_since_last()
    offsets.commit("g", "t", 1, 9)
    offsets.remove_topic("gone")
    offsets.mark_changed(bodies)
    (body,) = offsets.changed_since_last()
    request = CommitOffsetsRequest.FromString(body)
    assert [(o.topic, o.queue_id, o.queue_offset) for o in request.offsets] == [("t", 1, 9)]


def test_a_record_that_is_none_changes_nothing():
    offsets = make_offsets()
    assert not offsets.replay(b"\xff\xff\xff")
    assert not offsets.flush()


def test_many_offsets_make_several_records(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(offsets_module, "OFFSETS_PER_RECORD_MAX", 3)
    offsets = make_offsets()
    for queue_id in range(8):
        offsets.commit("g", "t", queue_id, 1)
    bodies = offsets.changed_since_last()
    assert [len(CommitOffsetsRequest.FromString(body).offsets) for body in bodies] == [3, 3, 2]


def test_a_topic_that_is_removed_takes_its_offsets_with_it():
    disk = SimDisk()
    offsets = make_offsets(disk)
    offsets.commit("g", "t", 1, 5)
    offsets.commit("g", "u", 1, 5)
    offsets.commit("h", "t", 1, 5)
    offsets.remove_topic("t")
    assert offsets.groups() == {"g": ["u"]}
    assert offsets.of_topic("g", "t") == {}
    assert len(offsets.changed_since_last()) == 1
    offsets.flush()
    assert make_offsets(disk).groups() == {"g": ["u"]}


def test_there_is_a_limit_to_groups(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(offsets_module, "GROUPS_MAX", 2)
    offsets = make_offsets()
    offsets.commit("a", "t", 0, 1)
    offsets.commit("b", "t", 0, 1)
    offsets.commit("a", "u", 0, 1)
    with pytest.raises(TooManyGroupsError):
        offsets.commit("c", "t", 0, 1)
