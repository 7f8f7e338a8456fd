"""The loop of a lane, turned by hand: no thread runs. Its peers are the other ends of socket pairs."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from protomq.v1 import pull_service_pb2, send_service_pb2
from protomq.wire.frames import (
    HEADER_SIZE_BYTES,
    LENGTH_SIZE_BYTES,
    decode_header,
    encode_cancel,
    encode_echo,
    encode_request,
)
from protomq.wire.status import decode_status
from protomq_runtime import lane as lane_module
from protomq_runtime.admission import AdmissionConfig
from protomq_runtime.byte_stream import ByteStream, TcpStream
from protomq_runtime.call import Call
from protomq_runtime.connection import CANCELLED_COUNT_MAX, PENDING_SIZE_MAX_BYTES, STALL_TIMEOUT_S
from protomq_runtime.dispatch import DispatchTable, drained, never_shed, raw
from protomq_runtime.errors import SHUTTING_DOWN
from protomq_runtime.lane import Lane
from protomq_runtime.lane_pool import LanePool
from protomq_runtime.lane_shutdown import Stage
from protomq_runtime.principals import ANONYMOUS
from tests.support.user_space_stream import UserSpaceStream

SEND, RECALL, PULL = 0x0201, 0x0202, 0x0301
_sockets: list[socket.socket] = []


class EchoSend:
    """Answers each call with its request; keeps the sizes of its groups."""

    def __init__(self) -> None:
        self.groups: list[int] = []
        self.recall_answer = b""
        self.recalled: list[bytes] = []

    @drained
    def send(self, calls: list[Call]) -> None:
        self.groups.append(len(calls))
        for call in calls:
            call.answer(bytes(call.payload))

    @never_shed
    @raw
    def recall_message(self, call: Call) -> None:
        self.recalled.append(bytes(call.payload))
        call.answer(self.recall_answer)


class HoldingPull:
    """Holds every call."""

    def __init__(self) -> None:
        self.held: list[Call] = []
        self.gone_count = 0

    @raw
    def pull(self, call: Call) -> None:
        self.held.append(call)
        call.hold(self._note_gone)

    def _note_gone(self) -> None:
        self.gone_count += 1


class Lanes:
    """A lane for sends and one for pulls, neither of which is started."""

    def __init__(self, admission: AdmissionConfig | None = None) -> None:
        self.send_service, self.pull_service = EchoSend(), HoldingPull()
        table = DispatchTable()
        table.add_service(
            send_service_pb2.DESCRIPTOR.services_by_name["SendService"], self.send_service
        )
        table.add_service(
            pull_service_pb2.DESCRIPTOR.services_by_name["PullService"], self.pull_service
        )
        self.closed: list[str] = []
        self.pools = {
            name: LanePool(
                name,
                1,
                admission or AdmissionConfig(queue_time_target_ms=0),
                table.by_id,
                frame_size_max_bytes=1 << 20,
                on_connection_closed=self.closed.append,
                on_fatal=_fail,
            )
            for name in ("send", "pull")
        }
        for pool in self.pools.values():
            pool.siblings = self.pools
        self.send, self.pull = (pool.lanes[0] for pool in self.pools.values())

    def close(self) -> None:
        for lane in (self.send, self.pull):
            lane._table.close_all(memoryview(bytearray(9)))
            lane._poll.close()

    def connect(self, lane: Lane, make_stream: type = TcpStream) -> Peer:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        peer = Peer(theirs)
        stream: ByteStream = make_stream(ours)
        lane.adopt(stream, f"peer-{len(_sockets)}", "client", ANONYMOUS, b"")
        turn(lane)
        return peer


def turn(lane: Lane) -> None:
    """One turn that does not sleep, whether there is anything to do or not."""
    lane.post(lambda: None)
    lane.turn()


def is_over(lane: Lane) -> bool:
    return lane._shutdown.stage is Stage.OVER


def _fail(error: BaseException) -> None:
    raise AssertionError("no lane runs here") from error


class Peer:
    """The other end of a connection."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(60)
        self.socket = sock
        _sockets.append(sock)

    def ask(
        self, *payloads: bytes, method_id: int = SEND, timeout_ms: int = 0, one_way: bool = False
    ) -> None:
        for number, payload in enumerate(payloads):
            header = encode_request(number, method_id, len(payload), timeout_ms, one_way=one_way)
            self.socket.sendall(header + payload)

    def answer(self) -> tuple[int, int, bytes]:
        """(request id, status, payload) of the next answer."""
        header = decode_header(self._read(HEADER_SIZE_BYTES))
        return (
            header.request_id,
            header.status,
            self._read(header.length + LENGTH_SIZE_BYTES - HEADER_SIZE_BYTES),
        )

    def reason(self) -> str:
        return decode_status(self.answer()[2]).reason

    def has_nothing(self) -> bool:
        self.socket.setblocking(False)
        try:
            self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        finally:
            self.socket.settimeout(60)
        return False

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:  # MSG_WAITALL does not wait on a socket with a time-out.
            piece = self.socket.recv(size - len(data))
            assert piece, "closed"
            data += piece
        return data


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    made = Lanes()
    yield made
    made.close()
    while _sockets:
        _sockets.pop().close()


def test_what_is_there_in_one_turn_is_one_group_over_all_connections(lanes: Lanes) -> None:
    peers = [lanes.connect(lanes.send) for _ in range(3)]
    for peer in peers:
        peer.ask(b"a", b"bc")
    turn(lanes.send)
    assert lanes.send_service.groups == [6]
    for peer in peers:
        assert [peer.answer(), peer.answer()] == [(0, 0, b"a"), (1, 0, b"bc")]
    assert lanes.send.open_call_count == 0


def test_a_one_way_call_is_done_and_not_answered(lanes: Lanes) -> None:
    peer = lanes.connect(lanes.send)
    peer.ask(b"a", one_way=True)
    turn(lanes.send)
    assert lanes.send_service.groups == [1]
    assert peer.has_nothing()


def test_a_call_of_another_lane_is_done_there_and_answered_by_the_owner(lanes: Lanes) -> None:
    peer = lanes.connect(lanes.pull)
    peer.ask(b"a")
    turn(lanes.pull)
    assert (lanes.pull.foreign_count, lanes.send.depth) == (1, 1)
    turn(lanes.send)
    assert peer.has_nothing()
    turn(lanes.pull)
    assert peer.answer() == (0, 0, b"a")
    assert lanes.pull.foreign_count == 0


@pytest.mark.parametrize("lane", ["send", "pull"])
def test_a_call_is_told_when_its_caller_goes(lanes: Lanes, lane: str) -> None:
    owner = lanes.pools[lane].lanes[0]
    peer = lanes.connect(owner)
    peer.ask(b"", method_id=PULL)
    turn(owner)
    if lane == "send":
        turn(lanes.pull)  # the call
        turn(lanes.send)  # it is watched from now on
    assert lanes.pull.holds == 1
    peer.socket.close()
    turn(owner)
    if lane == "send":
        turn(lanes.pull)
    assert (lanes.pull_service.gone_count, lanes.pull.holds, len(lanes.closed)) == (1, 0, 1)


@pytest.mark.parametrize("lane", ["send", "pull"])
@pytest.mark.parametrize("is_held_by_then", [True, False])
def test_a_held_call_ends_when_its_caller_gives_it_up(lanes: Lanes, lane: str, is_held_by_then: bool) -> None:
    owner = lanes.pools[lane].lanes[0]
    peer = lanes.connect(owner)
    peer.ask(b"", b"", method_id=PULL)

    def turns() -> None:
        for each in (owner, lanes.pull, owner, lanes.pull, owner):
            turn(each)

    if is_held_by_then:
        turns()
        assert (lanes.pull.holds, peer.has_nothing()) == (2, True)
    peer.socket.sendall(encode_cancel(1))
    turns()
    assert (lanes.pull_service.gone_count, lanes.pull.holds, owner.connection_count) == (1, 1, 1)
    request_id, status, payload = peer.answer()
    assert (request_id, status, decode_status(payload).reason) == (1, 1, "CANCELLED")
    (connection,) = owner._table.by_descriptor.values()
    assert (len(connection.held), len(connection.cancelled)) == (1, 0)
    peer.socket.close()
    turns()
    assert (lanes.pull_service.gone_count, lanes.pull.holds) == (2, 0)


def test_a_call_that_is_answered_cannot_be_given_up(lanes: Lanes) -> None:
    peer = lanes.connect(lanes.send)
    peer.ask(b"a")
    turn(lanes.send)
    peer.socket.sendall(b"".join(encode_cancel(number) for number in range(CANCELLED_COUNT_MAX + 2)))
    turn(lanes.send)
    peer.ask(b"b")
    turn(lanes.send)
    assert [peer.answer(), peer.answer()] == [(0, 0, b"a"), (0, 0, b"b")]
    (connection,) = lanes.send._table.by_descriptor.values()
    assert len(connection.cancelled) == CANCELLED_COUNT_MAX


@pytest.mark.parametrize("lane", ["send", "pull"])
def test_a_call_that_was_given_up_too_late_does_not_end_the_next_one_of_its_number(lanes: Lanes, lane: str) -> None:
    """Request ids in flight differ; one that was answered may be used again."""
    owner = lanes.pools[lane].lanes[0]
    peer = lanes.connect(owner)

    def turns() -> None:
        for each in (owner, lanes.pull, owner, lanes.pull, owner):
            turn(each)

    peer.ask(b"", method_id=PULL)
    turns()
    lanes.pull_service.held.pop().answer(b"found")
    turns()
    peer.socket.sendall(encode_cancel(0))  # They cross.
    turns()
    assert peer.answer() == (0, 0, b"found")
    peer.ask(b"", method_id=PULL)
    turns()
    assert (lanes.pull.holds, lanes.pull_service.gone_count, peer.has_nothing()) == (1, 0, True)


def test_a_lane_tells_that_it_is_there_while_it_holds_what_it_was_asked(lanes: Lanes) -> None:
    peer = lanes.connect(lanes.pull)
    peer.ask(b"", method_id=PULL)
    turn(lanes.pull)
    peer.socket.sendall(encode_echo(9))
    turn(lanes.pull)
    assert (peer.answer(), lanes.pull.holds, lanes.pull.open_call_count) == ((9, 0, b""), 1, 1)
    lanes.pull.refuse(SHUTTING_DOWN)
    peer.socket.sendall(encode_echo(10))
    turn(lanes.pull)
    assert peer.answer() == (10, 0, b"")


def test_a_call_whose_time_is_over_is_dropped_unstarted(lanes: Lanes) -> None:
    peer = lanes.connect(lanes.send)
    peer.ask(b"a", timeout_ms=1)

    def linger() -> None:
        ends = time.monotonic() + 0.003
        while time.monotonic() < ends:
            pass

    lanes.send.call_later(0, linger)  # timers run between the reading and the group
    turn(lanes.send)
    assert lanes.send_service.groups == []
    assert peer.reason() == "DEADLINE_EXCEEDED"


def test_an_unknown_method_is_told_and_a_broken_frame_ends_the_connection(lanes: Lanes) -> None:
    peer = lanes.connect(lanes.send)
    peer.ask(b"", method_id=0x7777)
    turn(lanes.send)
    assert peer.reason() == "UNKNOWN_METHOD"
    peer.socket.sendall(bytes(16))
    turn(lanes.send)
    assert peer.socket.recv(1) == b""
    assert lanes.send.connection_count == 0


@pytest.mark.parametrize("cut", [True, False])
def test_what_came_before_a_broken_frame_is_done_however_it_was_cut(lanes: Lanes, cut: bool) -> None:
    peer = lanes.connect(lanes.send)
    peer.ask(b"first", b"second", one_way=True)
    if cut:
        turn(lanes.send)
    peer.socket.sendall(bytes(HEADER_SIZE_BYTES))
    turn(lanes.send)
    turn(lanes.send)
    assert lanes.send_service.groups == [2]
    assert not lanes.send._table.by_descriptor


@pytest.mark.parametrize("begins_frame", [True, False])
def test_who_takes_no_answers_is_dropped_whatever_it_sends_meanwhile(lanes: Lanes, begins_frame: bool) -> None:
    lanes.send_service.recall_answer = bytes(PENDING_SIZE_MAX_BYTES // 2)
    peer = lanes.connect(lanes.send)
    (connection,) = lanes.send._table.by_descriptor.values()
    peer.ask(b"", method_id=RECALL)
    turn(lanes.send)
    assert connection.queue
    assert not connection.is_clogged
    connection.progress_at -= STALL_TIMEOUT_S + 1
    if begins_frame:
        peer.socket.sendall(encode_request(1, SEND, 10)[:3])
        turn(lanes.send)
    lanes.send._sweep()
    assert connection.closed


def test_a_full_queue_refuses_calls_of_other_lanes(lanes: Lanes) -> None:
    full = Lanes(AdmissionConfig(depth_max=2, queue_time_target_ms=0))
    peer = full.connect(full.pull)
    peer.ask(b"1", b"2", b"3")
    turn(full.pull)
    assert peer.reason() == "SYSTEM_BUSY"
    assert (full.send.rejection_count, full.send.depth) == (1, 2)
    full.close()


@pytest.mark.parametrize("of_other_lane", [False, True])
def test_while_a_lane_is_overloaded_it_serves_what_is_never_shed(lanes: Lanes, of_other_lane: bool) -> None:
    busy = Lanes(AdmissionConfig(queue_time_target_ms=1e-6, queue_time_interval_ms=1e-6))
    busy.send_service.recall_answer = b"done"
    peer = busy.connect(busy.pull if of_other_lane else busy.send)
    # Turns without a sleep between them are a queue of their length, of which a nanosecond is too much here.
    for _ in range(3):
        turn(busy.send)
    assert busy.send._calls.rule.overloaded
    peer.ask(b"send")
    peer.ask(b"recall", method_id=RECALL)
    if of_other_lane:
        turn(busy.pull)
    turn(busy.send)
    turn(busy.pull)
    assert peer.reason() == "SYSTEM_BUSY"
    assert peer.answer()[1:] == (0, b"done")
    assert busy.send.rejection_count == 1
    busy.close()


def test_the_turn_of_another_lane_that_has_read_a_call_is_no_wait_in_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The send lane has nothing to do; a connection of the pull lane, whose turns are long, brings it calls."""
    busy = Lanes(AdmissionConfig(queue_time_target_ms=10, queue_time_interval_ms=20, waits_for_disk=True))
    peer = busy.connect(busy.pull)
    served = busy.pull._calls._methods[PULL]
    monkeypatch.setattr(served, "function", lambda call: time.sleep(0.05))
    for _ in range(4):
        peer.ask(b"slow", method_id=PULL, one_way=True)
        peer.ask(b"send")
        turn(busy.pull)
        turn(busy.send)
        turn(busy.pull)
        assert peer.answer()[1:] == (0, b"send")
    assert busy.send.rejection_count == 0
    busy.close()


@pytest.mark.parametrize(("event_count", "waits"), [(1, False), (1_000, True)])
def test_a_poll_that_is_long_since_it_finds_much_has_not_slept(
    lanes: Lanes, monkeypatch: pytest.MonkeyPatch, event_count: int, waits: bool
) -> None:
    """Of 300 connections it took 0.35 ms, of 700 a whole one. What it found has lain there for a turn."""
    lane, now = lanes.send, [time.monotonic()]

    class LongPoll:
        def poll(self, timeout: float, maxevents: int) -> list[tuple[int, int]]:
            now[0] += 0.002
            return [(-1, 1)] * event_count

    with monkeypatch.context() as patched:
        patched.setattr(lane, "_poll", LongPoll())
        patched.setattr(lane_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
        lane.turn()
        now[0] += 0.2  # The turn had so much to do.
        lane.turn()
    assert lane._calls.rule.last_max == pytest.approx(0.202 if waits else 0.0, abs=0.001)


def test_a_full_queue_refuses_also_what_is_never_shed(lanes: Lanes) -> None:
    full = Lanes(AdmissionConfig(depth_max=2, queue_time_target_ms=0))
    peer = full.connect(full.pull)
    peer.ask(b"1", b"2", b"3", method_id=RECALL)
    turn(full.pull)
    assert peer.reason() == "SYSTEM_BUSY"
    full.close()


def test_what_is_posted_is_done_in_order_and_harms_nobody(
    lanes: Lanes, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[int] = []

    def fail() -> None:
        raise RuntimeError("of a service")

    for function in (lambda: done.append(1), fail, lambda: done.append(2)):
        lanes.send.post(function)
    lanes.send.call_later(0, fail)
    lanes.send.call_later(0, lambda: done.append(3))
    lanes.send.call_later(0, lambda: done.append(4)).cancel()
    turn(lanes.send)
    assert done == [1, 2, 3]
    assert [record.message for record in caplog.records] == [
        "lane-send-0: a posted function failed",
        "lane-send-0: a timer failed",
    ]


def test_a_lane_that_finishes_waits_for_what_it_holds_and_refuses_what_is_new(lanes: Lanes) -> None:
    peer = lanes.connect(lanes.pull)
    peer.ask(b"", method_id=PULL)
    turn(lanes.pull)
    lanes.pull.refuse(SHUTTING_DOWN)
    lanes.pull.finish(3600)
    turn(lanes.pull)
    assert not is_over(lanes.pull)
    peer.ask(b"", method_id=PULL)
    turn(lanes.pull)
    assert peer.reason() == "SHUTTING_DOWN"
    (held,) = lanes.pull_service.held
    lanes.pull.post(lambda: held.answer(b"at last"))
    turn(lanes.pull)
    assert peer.answer() == (0, 0, b"at last")
    assert is_over(lanes.pull)


def test_a_lane_that_finishes_does_not_wait_beyond_its_time(lanes: Lanes) -> None:
    lanes.connect(lanes.pull).ask(b"", method_id=PULL)
    turn(lanes.pull)
    lanes.pull.refuse(SHUTTING_DOWN)
    lanes.pull.finish(0)
    turn(lanes.pull)
    assert lanes.pull.open_call_count == 1
    assert is_over(lanes.pull)


def test_over_a_stream_that_receives_ahead_every_call_is_done(lanes: Lanes) -> None:
    peer = lanes.connect(lanes.send, UserSpaceStream)
    sizes = [0, 1, 100, 40_000, 5, 3]
    peer.ask(*(bytes(size) for size in sizes))
    answers: list[Any] = []
    for _ in range(1_000):
        turn(lanes.send)
        while not peer.has_nothing():
            answers.append(peer.answer())
        if len(answers) == len(sizes):
            break
    assert [(number, status, len(payload)) for number, status, payload in answers] == [
        (number, 0, size) for number, size in enumerate(sizes)
    ]


def test_a_connection_whose_frames_never_end_with_a_read_is_not_taken_for_one_that_stands_still(lanes: Lanes) -> None:
    """Each read brings a frame and the beginning of the next one, as of a producer that sends faster than the lane reads."""
    peer = lanes.connect(lanes.send)
    (connection,) = lanes.send._table.by_descriptor.values()
    connection.progress_at -= STALL_TIMEOUT_S + 1
    frame = encode_request(0, SEND, 10, one_way=True) + bytes(10)
    peer.socket.sendall(frame + frame[:25])
    turn(lanes.send)
    assert connection.reader.in_frame
    lanes.send._sweep()
    peer.socket.sendall(frame[25:])
    turn(lanes.send)
    assert lanes.send_service.groups == [1, 1], "it was closed in the middle of a frame that has just begun"


def test_the_time_of_calls_that_wait_for_their_caller_to_read_counts_from_when_they_were_read(lanes: Lanes) -> None:
    service = lanes.send_service
    service.recall_answer = bytes(PENDING_SIZE_MAX_BYTES + 1)
    peer = lanes.connect(lanes.send)
    (connection,) = lanes.send._table.by_descriptor.values()
    for method_id, payload in ((RECALL, b"first"), (RECALL, b"second"), (SEND, b"third"), (PULL, b"fourth")):
        peer.ask(payload, method_id=method_id, timeout_ms=60_000)
    turn(lanes.send)
    assert service.recalled == [b"first"]
    connection.backlog_read_at -= 61
    answers: list[tuple[int, int, bytes]] = []
    reader = threading.Thread(target=lambda: answers.extend(peer.answer() for _ in range(4)))
    reader.start()
    while reader.is_alive():
        turn(lanes.send)
        turn(lanes.pull)
    reasons = [decode_status(payload).reason for _, status, payload in answers if status]
    assert reasons == ["DEADLINE_EXCEEDED"] * 3
    assert (service.recalled, service.groups, lanes.pull_service.held) == ([b"first"], [], [])


def test_what_waited_for_its_caller_to_read_does_not_count_as_time_in_the_queue_of_another_lane(lanes: Lanes) -> None:
    """That lane took itself for overloaded, and refused what its caller had still time for."""
    lanes.send_service.recall_answer = bytes(PENDING_SIZE_MAX_BYTES + 1)
    peer = lanes.connect(lanes.send)
    (connection,) = lanes.send._table.by_descriptor.values()
    peer.ask(b"first", method_id=RECALL, timeout_ms=60_000)
    peer.ask(b"second", method_id=PULL, timeout_ms=60_000)
    turn(lanes.send)
    connection.backlog_read_at -= 30
    reader = threading.Thread(target=peer.answer)
    reader.start()
    while reader.is_alive() or not lanes.pull_service.held:
        turn(lanes.send)
        turn(lanes.pull)
    assert lanes.pull._calls.rule.last_max < 10
    (call,) = lanes.pull_service.held
    assert call.deadline is not None
    assert call.deadline < time.monotonic() + 45, "its time counts from when it was read"
