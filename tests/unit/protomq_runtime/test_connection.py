"""A connection sends what its turns have answered: whole, in order, however little its stream takes at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protomq.wire.frames import HEADER_SIZE_BYTES, decode_header
from protomq.wire.status import decode_status
from protomq_runtime.byte_stream import WANTS_TO_RECEIVE, WANTS_TO_SEND
from protomq_runtime.connection import (
    PENDING_SIZE_MAX_BYTES,
    PUMP_PIECES_MAX,
    SENDFILE_SIZE_MIN_BYTES,
    Connection,
)
from protomq_runtime.errors import unknown_method
from protomq_runtime.principals import ANONYMOUS
from protomq_runtime.regions import Region, ShortFileError
from protomq_runtime.testing import FakeLane
from tests.support.memory_stream import MemoryStream

FILE_SIZE_BYTES = 200_000


class OwningLane(FakeLane):
    def __init__(self) -> None:
        super().__init__()
        self.dirty: list[Connection] = []
        self.foreign_count = 0

    def deliver(self, answers: list[Any]) -> None:
        raise AssertionError("no other lane answers here")


def connection_over(stream: MemoryStream) -> Connection:
    return Connection(stream, "192.0.2.1:4000", "client", ANONYMOUS, OwningLane(), 1 << 20, {})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("connection") / "file"
    made.write_bytes(bytes(number * 7 % 251 for number in range(FILE_SIZE_BYTES)))
    return made


class HeldCall:
    def __init__(self, lane: FakeLane) -> None:
        self.lane = lane
        self.told: list[str] = []

    def caller_gone(self) -> None:
        self.told.append("gone")

    def cancel(self) -> None:
        self.told.append("cancelled")


def test_the_small_answers_of_a_turn_are_one_send() -> None:
    stream = MemoryStream()
    connection = connection_over(stream)
    for request_id in (1, 2, 3):
        connection.send_answer(request_id, 9, b"abc")
    assert connection.lane.dirty == [connection]
    assert connection.flush(0)
    assert stream.operations == ["send"]
    headers = [
        decode_header(stream.sent, at) for at in range(0, len(stream.sent), HEADER_SIZE_BYTES + 3)
    ]
    assert [(header.request_id, header.length) for header in headers] == [(1, 15), (2, 15), (3, 15)]


def test_an_error_is_an_answer_with_its_status() -> None:
    stream = MemoryStream()
    connection = connection_over(stream)
    error = unknown_method("x")
    connection.send_error(5, 9, error)
    connection.flush(0)
    assert decode_header(stream.sent).status == error.code
    assert decode_status(bytes(stream.sent[HEADER_SIZE_BYTES:])).reason == "UNKNOWN_METHOD"


def test_large_regions_are_left_to_the_stream_and_small_ones_go_with_the_rest(path: Path) -> None:
    with path.open("rb") as file:
        stream = MemoryStream()
        connection = connection_over(stream)
        small, large = Region(file, 0, 100), Region(file, 100, SENDFILE_SIZE_MIN_BYTES)
        connection.send_answer(1, 9, b"head", [small, large, small], 200 + large.size_bytes)
        assert connection.flush(0)
    assert stream.operations == ["pieces", "region", "pieces"]
    data = path.read_bytes()
    body = b"head" + data[:100] + data[100 : 100 + large.size_bytes] + data[:100]
    assert stream.sent[HEADER_SIZE_BYTES:] == body


@settings(deadline=None, max_examples=60)
@given(
    answers=st.lists(
        st.tuples(
            st.binary(max_size=50),
            st.lists(
                st.tuples(st.integers(0, 50_000), st.sampled_from([1, 90, 33_000, 70_000])),
                max_size=4,
            ),
        ),
        min_size=1,
        max_size=6,
    ),
    rooms=st.lists(st.integers(0, 40_000), max_size=30),
    in_turns=st.booleans(),
)
def test_whatever_the_stream_takes_at_once_all_is_sent_in_order(
    path: Path, answers: list[tuple[bytes, list[tuple[int, int]]]], rooms: list[int], in_turns: bool
) -> None:
    data = path.read_bytes()
    stream = MemoryStream(room=0)
    connection = connection_over(stream)
    expected = b""
    with path.open("rb") as file:
        for number, (payload, places) in enumerate(answers):
            regions = [Region(file, offset, size) for offset, size in places]
            body = payload + b"".join(data[at : at + size] for at, size in places)
            connection.send_answer(number, 9, payload, regions, len(body) - len(payload))
            expected += bytes(connection.out[-2 - len(regions)]) + body  # type: ignore[arg-type]
            if in_turns and connection.out:
                connection.flush(number)
        if connection.out:
            connection.flush(0)
        for room in [*rooms, 1 << 30]:
            stream.room = room
            assert connection.queue_size_bytes == len(expected) - len(stream.sent)
            is_empty = connection.pump(1)
            assert is_empty == (not connection.queue)
    while connection.queue:  # a pump ends after 8 MiB
        connection.pump(1)
    assert bytes(stream.sent) == expected
    assert connection.queue_size_bytes == 0


def test_what_only_waiting_answers_need_is_there_only_while_they_wait() -> None:
    """An empty deque takes 760 octets, and nearly all of thousands of connections at rest have nothing to send."""
    stream = MemoryStream(room=10)
    connection = connection_over(stream)
    assert connection.queue is None
    connection.send_answer(1, 9, b"abc")
    assert not connection.flush(0)
    assert connection.queue
    assert not connection.pump(0)
    stream.room = 1 << 10
    assert connection.pump(0)
    assert connection.queue is None
    assert connection.pump(0)


def test_a_request_id_that_is_used_again_stands_for_the_later_call() -> None:
    """No client of ours does that. Nobody waits for the earlier answer, and it must not be held when the connection is gone."""
    lane = FakeLane()
    earlier, later = HeldCall(lane), HeldCall(lane)
    connection = connection_over(MemoryStream())
    connection.watch(cast("Any", earlier), 7)
    connection.watch(cast("Any", later), 7)
    lane.run()
    assert (earlier.told, later.told) == (["gone"], [])
    connection.unwatch(cast("Any", earlier), 7)
    connection.cancel(7)
    lane.run()
    assert (earlier.told, later.told) == (["gone"], ["cancelled"])
    connection.unwatch(cast("Any", later), 7)
    assert not connection.held


def test_very_many_small_regions_are_sent_in_several_turns(path: Path) -> None:
    """Each of them is read by itself, and the lane's other calls wait meanwhile."""
    with path.open("rb") as file:
        stream = MemoryStream()
        connection = connection_over(stream)
        regions = [Region(file, 150 * number, 3) for number in range(1_000)]
        connection.send_answer(1, 9, b"", regions, 3_000)
        assert not connection.flush(0)
        assert connection.queue is not None
        assert len(connection.queue) == 1_002 - PUMP_PIECES_MAX
        assert connection.wanted_events() & WANTS_TO_SEND
        turns = 1
        while not connection.pump(0):
            turns += 1
        assert turns == 1_002 // PUMP_PIECES_MAX
        expected = b"".join(path.read_bytes()[150 * n : 150 * n + 3] for n in range(1_000))
        assert bytes(stream.sent)[HEADER_SIZE_BYTES:] == expected


def test_who_does_not_read_is_not_read_from() -> None:
    stream = MemoryStream(room=0)
    connection = connection_over(stream)
    assert connection.wanted_events() == WANTS_TO_RECEIVE
    connection.send_answer(1, 9, bytes(100))
    assert not connection.flush(0)
    assert connection.wanted_events() == WANTS_TO_RECEIVE | WANTS_TO_SEND
    connection.send_answer(2, 9, bytes(PENDING_SIZE_MAX_BYTES))
    assert not connection.flush(0)
    assert (connection.wanted_events(), connection.is_clogged) == (WANTS_TO_SEND, True)
    stream.room = 1 << 30
    assert connection.pump(0)
    assert (connection.wanted_events(), connection.is_clogged) == (WANTS_TO_RECEIVE, False)


def test_frames_that_wait_keep_others_from_being_read() -> None:
    connection = connection_over(MemoryStream())
    connection.backlog = [cast("Any", None)]
    assert connection.wanted_events() == 0


def test_progress_is_noted_when_something_was_sent() -> None:
    stream = MemoryStream(room=0)
    connection = connection_over(stream)
    connection.send_answer(1, 9, b"x")
    connection.flush(10)
    connection.pump(20)
    assert connection.progress_at == 10
    stream.room = 1
    connection.pump(30)
    assert connection.progress_at == 30


def test_a_file_that_is_too_short_is_told(path: Path) -> None:
    with path.open("rb") as file:
        connection = connection_over(MemoryStream())
        connection.send_answer(1, 9, b"", [Region(file, FILE_SIZE_BYTES - 1, 9)], 9)
        with pytest.raises(ShortFileError):
            connection.flush(0)


def test_nothing_is_sent_on_a_closed_connection() -> None:
    connection = connection_over(MemoryStream())
    connection.closed = True
    connection.send_answer(1, 9, b"x")
    connection.send_error(1, 9, unknown_method("x"))
    assert (connection.out, connection.lane.dirty) == ([], [])
