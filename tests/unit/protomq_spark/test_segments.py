"""Walking commit-log segments: every whole append is found, nothing else is, and damage is a range."""

from __future__ import annotations

import pytest

pytest.importorskip("pyarrow", reason="protomq-spark needs pyarrow")
pytest.importorskip("protomq_spark", reason="clients/spark is not installed")

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from protomq.wire.record import QUEUE_OFFSET_AT, RecordTemplate, encode_record_field, encode_seal
from protomq_spark.segments import Window, by_topic, find_append, in_queues, walk

BASE = 4096


def record(topic: str, body: bytes) -> bytes:
    return encode_record_field(RecordTemplate(topic, 7, 0).encode(body, 1, 2))


class Segment:
    """A segment under construction; `appends` are (start, end) of each, seal included."""

    def __init__(self) -> None:
        self.data = b""
        self.crc = 0
        self.appends: list[tuple[int, int]] = []
        self.append([])

    def append(self, fields: list[bytes]) -> None:
        content, start = b"".join(fields), len(self.data)
        seal = encode_seal(
            self.crc, content, epoch=0, start_position=BASE + start, record_count=len(fields),
            store_time_ms=1, synced_position=0,
        )  # fmt: skip
        self.crc = int.from_bytes(seal[-4:], "little")
        self.data += content + seal
        self.appends.append((start, len(self.data)))


def segment_of(*appends: list[bytes]) -> Segment:
    made = Segment()
    for fields in appends:
        made.append(fields)
    return made


def records_of(data: bytes, window: Window) -> list[bytes]:
    return [data[start:end] for start, end in zip(window.starts, window.ends, strict=True)]


bodies = st.lists(st.lists(st.binary(max_size=200), min_size=1, max_size=4), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None)
@given(bodies)
def test_all_records_are_found_and_the_zeros_end_the_log(appends: list[list[bytes]]) -> None:
    fields = [[record("t", body) for body in part] for part in appends]
    made = segment_of(*fields)
    data = made.data + bytes(100)
    window = walk(data, BASE, None, whole=True)
    assert (window.finished, window.reason) == (True, "")
    assert records_of(data, window) == [field for part in fields for field in part]
    assert window.walked_bytes == len(made.data)


@settings(max_examples=40, deadline=None)
@given(bodies, st.data())
def test_any_changed_octet_is_noticed_and_what_holds_in_front_of_it_is_kept(
    appends: list[list[bytes]], data: st.DataObject
) -> None:
    made = segment_of(*[[record("t", body) for body in part] for part in appends])
    at = data.draw(st.integers(made.appends[1][0], len(made.data) - 1))
    octets = bytearray(made.data)
    octets[at] ^= data.draw(st.integers(1, 255))
    window = walk(bytes(octets), BASE, None, whole=True)
    begin, _ = next(part for part in made.appends if part[0] <= at < part[1])
    assert window.walked_bytes == begin
    assert window.reason or window.finished


def test_what_entered_no_queue_is_known_by_its_offset() -> None:
    fields = [bytearray(record("t", b"%d" % n)) for n in range(3)]
    fields[1][QUEUE_OFFSET_AT : QUEUE_OFFSET_AT + 8] = b"\xff" * 8
    ends = np.cumsum([len(each) for each in fields])
    assert in_queues(b"".join(fields), ends).tolist() == [True, False, True]


def test_reading_goes_on_behind_damage() -> None:
    made = segment_of(*[[record("t", b"%d" % n * 50)] for n in range(5)])
    octets = bytearray(made.data)
    octets[made.appends[2][0] + 20] ^= 1
    data = bytes(octets)
    window = walk(data, BASE, None, whole=True)
    assert window.reason == "the CRC-32C of the append does not match its seal"
    damaged = data[window.walked_bytes :]
    following = find_append(damaged, BASE + window.walked_bytes, 1)
    assert following is not None
    assert window.walked_bytes + following == made.appends[3][0]


def test_octets_of_a_seal_in_a_body_are_not_taken_for_one() -> None:
    inner = segment_of([record("t", b"inner")]).data
    made = segment_of([record("t", inner)], [record("t", b"x")])
    window = walk(made.data, BASE, None, whole=True)
    assert len(window.starts) == 2
    # Not even where it is searched for: the place it names is another one.
    start = made.appends[1][0]
    found = find_append(made.data[start:], BASE + start, 1)
    assert found == made.appends[2][0] - start


@settings(max_examples=40, deadline=None)
@given(bodies, st.data())
def test_a_cut_anywhere_asks_for_more_and_gives_what_is_whole(
    appends: list[list[bytes]], data: st.DataObject
) -> None:
    made = segment_of(*[[record("t", body) for body in part] for part in appends])
    cut = data.draw(st.integers(0, len(made.data)))
    window = walk(made.data[:cut], BASE, None, whole=False)
    assert window.reason == ""
    assert window.walked_bytes == max([end for _, end in made.appends if end <= cut], default=0)
    following = walk(
        made.data[window.walked_bytes :], BASE + window.walked_bytes, window.crc, whole=True
    )
    assert following.reason == ""
    assert len(window.starts) + len(following.starts) == sum(map(len, appends))


def test_the_end_of_a_file_in_the_middle_of_an_append_is_said() -> None:
    made = segment_of([record("t", b"x" * 100)])
    for missing in (1, 60, 100):
        window = walk(made.data[:-missing], BASE, None, whole=True)
        assert window.reason
        assert window.starts == []


def test_records_are_grouped_by_topic_even_if_names_end_alike() -> None:
    topics = ["t", "at", "t", "x" * 100, "y" + "x" * 99, "x" * 100, "orders", "t"]
    fields = [record(topic, topic.encode() * 3) for topic in topics]
    data = b"".join(fields)
    ends = np.cumsum([len(field) for field in fields]).astype(np.int64)
    starts = ends - np.array([len(field) for field in fields])
    grouped = {topic: rows.tolist() for topic, rows in by_topic(data, starts, ends)}
    assert grouped == {
        topic: [n for n, other in enumerate(topics) if other == topic] for topic in topics
    }
