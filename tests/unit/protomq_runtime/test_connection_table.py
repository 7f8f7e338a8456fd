"""The table of a lane's connections: what the kernel is asked, who is closed when, and who is told."""

from __future__ import annotations

import logging
from typing import Any, cast

import pytest

from protomq_runtime import connection_table
from protomq_runtime.byte_stream import WANTS_TO_RECEIVE, WANTS_TO_SEND
from protomq_runtime.connection import PENDING_SIZE_MAX_BYTES, STALL_TIMEOUT_S, Connection
from protomq_runtime.connection_table import ConnectionTable
from protomq_runtime.framing import LARGE_STEP_BYTES
from protomq_runtime.principals import ANONYMOUS
from protomq_runtime.regions import ShortFileError
from protomq_runtime.testing import FakeLane
from tests.support.memory_stream import MemoryStream

from .test_connection import OwningLane


class FakePoll:
    """Keeps what it was asked for."""

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}
        self.change_count = 0

    def register(self, descriptor: int, mask: int) -> None:
        assert descriptor not in self.masks
        self.masks[descriptor] = mask

    def modify(self, descriptor: int, mask: int) -> None:
        assert descriptor in self.masks
        self.masks[descriptor] = mask
        self.change_count += 1

    def unregister(self, descriptor: int) -> None:
        del self.masks[descriptor]


class Table:
    """A table, its poll, its lane, and whom it has told of closings."""

    def __init__(self) -> None:
        self.poll = FakePoll()
        self.lane = OwningLane()
        self.closed: list[str] = []
        self.table = ConnectionTable("lane", self.poll, self.closed.append)

    def add(self, stream: MemoryStream | None = None, *, now: float = 0) -> Connection:
        stream = stream or MemoryStream()
        peer = f"192.0.2.1:{stream.fileno()}"
        connection = Connection(stream, peer, "client", ANONYMOUS, self.lane, 16 << 20, {})
        self.table.expect()
        self.table.add(connection, now)
        return connection

    def mask(self, connection: Connection) -> int:
        return self.poll.masks[connection.descriptor]


class HeldCall:
    def __init__(self, lane: FakeLane) -> None:
        self.lane = lane
        self.is_told = False

    def caller_gone(self) -> None:
        self.is_told = True


def begin_frame(connection: Connection, size: int) -> None:
    """The first bytes of a request of that size come."""
    header = (12 + size).to_bytes(4, "little") + bytes(12)
    shared = memoryview(bytearray(1 << 18))
    connection.reader.target(shared)[:16] = header
    assert connection.reader.received(shared, 16) == []


def test_who_is_on_the_way_counts_once() -> None:
    made = Table()
    made.table.expect()
    assert made.table.count == 1
    connection = made.add()
    assert made.table.count == 2
    made.table.close(connection)
    assert made.table.count == 1


def test_the_kernel_is_asked_for_what_a_connection_can_use_and_only_when_that_changes() -> None:
    made = Table()
    stream = MemoryStream(room=0)
    connection = made.add(stream)
    assert made.mask(connection) == WANTS_TO_RECEIVE
    connection.send_answer(1, 9, bytes(PENDING_SIZE_MAX_BYTES + 1))
    connection.flush(0)
    for _ in range(3):
        made.table.update_poll(connection)
    assert (made.mask(connection), made.poll.change_count) == (WANTS_TO_SEND, 1)
    stream.room = 1 << 30
    connection.pump(0)
    made.table.update_poll(connection)
    assert (made.mask(connection), made.poll.change_count) == (WANTS_TO_RECEIVE, 2)


def test_a_stream_that_must_send_before_it_receives_is_polled_for_that() -> None:
    made = Table()
    stream = MemoryStream(is_direct=False)
    connection = made.add(stream)
    stream.must_send_first = True
    made.table.update_poll(connection)
    assert made.mask(connection) == WANTS_TO_SEND


def test_frames_that_wait_are_resumed_when_the_answers_before_them_are_sent() -> None:
    made = Table()
    stream = MemoryStream(room=0)
    connection = made.add(stream)
    connection.send_answer(1, 9, bytes(PENDING_SIZE_MAX_BYTES + 1))
    connection.flush(0)
    connection.backlog = [cast("Any", None)]
    made.table.update_poll(connection)
    assert made.table.take_resumable() == []
    stream.room = 1 << 30
    connection.pump(0)
    made.table.update_poll(connection)
    assert made.table.take_resumable() == [connection]
    assert made.table.resumable == []


def test_frames_that_wait_are_resumed_once_in_a_turn_and_not_where_answers_wait_meanwhile() -> None:
    """A turn may ask twice for its poll: before it sends, and behind that. Each go makes answers, beyond what may be pending."""
    t = Table()
    connection = t.add()
    connection.backlog = [(1, 1, 0, 0, b"")]
    t.table.update_poll(connection)
    t.table.update_poll(connection)
    assert t.table.take_resumable() == [connection]
    t.table.update_poll(connection)
    connection.queue_size_bytes = PENDING_SIZE_MAX_BYTES + 1
    assert t.table.take_resumable() == []
    connection.queue_size_bytes = 0
    t.table.update_poll(connection)
    assert t.table.take_resumable() == [connection], "it is resumed when they are sent"


@pytest.mark.parametrize("is_direct", [True, False])
def test_bytes_that_no_poll_tells_of_are_looked_at(is_direct: bool) -> None:
    made = Table()
    stream = MemoryStream(is_direct=is_direct)
    stream.ahead_size_bytes = 3
    connection = made.add(stream)
    assert made.table.take_resumable() == ([] if is_direct else [connection])


def test_a_closed_connection_is_gone_for_everybody_and_closed_once() -> None:
    made = Table()
    stream = MemoryStream(is_direct=False)
    stream.ahead_size_bytes = 1
    connection = made.add(stream)
    other_lane = FakeLane()
    own, foreign = HeldCall(made.lane), HeldCall(other_lane)
    connection.held = {1: cast("Any", own), 2: cast("Any", foreign)}
    for _ in range(2):
        made.table.close(connection)
    assert (made.closed, stream.is_closed) == ([connection.peer], True)
    assert (made.poll.masks, made.table.by_descriptor, made.table.take_resumable()) == ({}, {}, [])
    assert (own.is_told, foreign.is_told) == (True, False)
    other_lane.run()  # a call of another lane is told on that one
    assert foreign.is_told


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (None, None),
        (ConnectionResetError(104, "Connection reset by peer"), logging.DEBUG),
        (BrokenPipeError(32, "Broken pipe"), logging.DEBUG),
        (OSError("no route to host"), logging.INFO),
        (ShortFileError("short"), logging.ERROR),
    ],
)
def test_the_log_says_why_unless_the_peer_has_left(
    error: BaseException | None, level: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    made = Table()
    with caplog.at_level(logging.DEBUG):
        made.table.close(made.add(), error)
    assert [record.levelno for record in caplog.records] == ([] if level is None else [level])


def test_who_stands_still_in_the_middle_of_something_is_dropped() -> None:
    made = Table()
    idle = made.add(now=0)
    in_frame = made.add(now=0)
    begin_frame(in_frame, 100)
    in_answer = made.add(MemoryStream(room=0), now=0)
    in_answer.send_answer(1, 9, b"x")
    in_answer.flush(0)
    made.table.sweep(STALL_TIMEOUT_S)
    assert made.closed == []
    made.table.sweep(STALL_TIMEOUT_S + 1)
    assert set(made.closed) == {in_frame.peer, in_answer.peer}
    assert list(made.table.by_descriptor.values()) == [idle]


def test_of_frames_that_never_end_the_oldest_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_table, "UNFINISHED_SIZE_MAX_BYTES", 3 * LARGE_STEP_BYTES)
    made = Table()
    connections = [made.add(now=number) for number in range(5)]
    for connection in connections:
        begin_frame(connection, 8 << 20)
    made.table.sweep(5)
    assert made.closed == [connection.peer for connection in connections[:2]]


def test_answers_that_have_not_left_are_known() -> None:
    made = Table()
    stream = MemoryStream(room=0)
    connection = made.add(stream)
    assert not made.table.has_unsent()
    connection.send_answer(1, 9, b"x")
    connection.flush(0)
    assert made.table.has_unsent()
    stream.room = 100
    connection.pump(0)
    assert not made.table.has_unsent()


def test_at_the_end_peers_are_told_before_they_are_closed_even_if_one_is_broken() -> None:
    class Broken(MemoryStream):
        def end(self, scratch: memoryview) -> None:
            raise OSError("reset")

    made = Table()
    streams = [Broken(), MemoryStream()]
    for stream in streams:
        made.add(stream)
    made.table.close_all(memoryview(bytearray(1)))
    assert [(stream.is_ended, stream.is_closed) for stream in streams] == [
        (False, True),
        (True, True),
    ]
    assert made.table.count == 0
