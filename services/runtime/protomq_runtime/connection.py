"""One connection of the remoting port: what its lane reads from it, and what waits to be sent. Lane thread only.

Outgoing data passes two stages, so that the usual case (small answers, a stream that takes them) is one join and one send:

    out      what this turn has answered: bytes and regions, in order; flushed once, at the end of the turn
    queue    what the stream did not take: sent when it takes more. Large regions by themselves, runs of small pieces together

If more than PENDING_SIZE_MAX_BYTES wait for a peer that does not read its answers, the lane stops reading from it. It drops the
peer when nothing could be sent for STALL_TIMEOUT_S. If a file is too short for a promised region, the connection closes: the
header is out already, so no error can follow.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias

from protomq.wire.frames import encode_answer

from .byte_stream import WANTS_TO_RECEIVE, WANTS_TO_SEND, ByteStream
from .call import Call, CallLane
from .errors import ServiceError
from .framing import Frame, FrameReader
from .principals import Principal
from .regions import Region, read_regions

PENDING_SIZE_MAX_BYTES: Final = 1 << 20
FOREIGN_SIZE_MAX_BYTES: Final = 32 << 20
"""Above this, other lanes refuse calls of a peer that does not read its answers. Two of the largest answers fit."""
foreign_sizes: Final = threading.Lock()
"""Held for `Connection.foreign_size_bytes`, which changes with large answers only."""
STALL_TIMEOUT_S: Final = 60.0
CANCELLED_COUNT_MAX: Final = 1_024
"""Calls given up before they were held, of which a connection remembers so: those that it has answered since are among them."""
SENDFILE_SIZE_MIN_BYTES: Final = 32 << 10
"""Below this, copying through user space costs less than a system call for each region."""
GATHER_SIZE_BYTES: Final = 256 << 10
"""Small pieces are sent together up to this."""
PUMP_SIZE_MAX_BYTES: Final = 8 << 20
"""Maximum number of bytes that one connection sends before the lane turns to the others."""
PUMP_PIECES_MAX: Final = 256
"""Maximum number of pieces before that, too: scattered small regions cost a system call each, so a thousand of them take 2 to 3 ms."""

_Queue: TypeAlias = deque[bytes | memoryview | Region]


class ConnectionLane(CallLane, Protocol):
    """The lane that owns a connection, as the connection and its calls see it."""

    dirty: list[Connection]
    """Connections that were answered to in this turn; the list stays the same one."""
    foreign_count: int
    """Calls of this lane's connections that other lanes are busy with."""

    def deliver(self, answers: list[Any]) -> None:
        """As AnswerSink: answers of another lane for connections of this one."""
        ...


class Connection:
    """A connected peer, owned by one lane."""

    __slots__ = (
        "backlog",
        "backlog_read_at",
        "cancelled",
        "client_id",
        "closed",
        "descriptor",
        "foreign_size_bytes",
        "held",
        "is_direct",
        "lane",
        "out",
        "out_has_regions",
        "out_size_bytes",
        "peer",
        "poll_mask",
        "principal",
        "progress_at",
        "queue",
        "queue_size_bytes",
        "reader",
        "recv_into",
        "send",
        "stream",
    )

    def __init__(
        self,
        stream: ByteStream,
        peer: str,
        client_id: str,
        principal: Principal,
        lane: ConnectionLane,
        frame_size_max_bytes: int,
        request_sizes_max_bytes: Mapping[int, int],
    ) -> None:
        self.stream = stream
        self.descriptor = stream.fileno()
        self.is_direct = stream.is_direct
        self.recv_into = stream.recv_into
        self.send = stream.send
        self.peer = peer
        self.client_id = client_id
        self.principal = principal
        self.lane = lane
        self.reader = FrameReader(frame_size_max_bytes, request_sizes_max_bytes)
        self.closed = False
        self.poll_mask = 0
        self.out: list[bytes | Region] = []
        self.out_has_regions = False
        self.out_size_bytes = 0
        self.queue: _Queue | None = None
        """None: nothing waits. An empty deque takes 760 octets, and there are thousands of connections at rest."""
        self.queue_size_bytes = 0
        self.progress_at = 0.0
        self.foreign_size_bytes = 0
        """Answers that other lanes have made and this one has not taken; with `foreign_sizes` held."""
        self.held: dict[int, Call] = {}
        """Calls that are to hear when their caller goes away, or gives them up, by request id."""
        self.cancelled: dict[int, None] = {}
        """Ids of calls that were given up and not held by then, the oldest first."""
        self.backlog: list[Frame] = []
        """Frames received while too much was pending; served when it has been sent."""
        self.backlog_read_at = 0.0
        """When they were read: their deadlines count from there."""

    @property
    def is_clogged(self) -> bool:
        """Whether too much waits to be sent for more to be read or begun."""
        return self.queue_size_bytes > PENDING_SIZE_MAX_BYTES

    @property
    def is_overloaded(self) -> bool:
        """Whether so much was made for a peer that does not read it that no more may be made. Any thread."""
        waiting = self.foreign_size_bytes + self.out_size_bytes + self.queue_size_bytes
        return waiting > FOREIGN_SIZE_MAX_BYTES

    def wanted_events(self) -> int:
        """What to poll for: no reading while too much waits to be sent."""
        wanted = 0 if self.backlog or self.is_clogged else WANTS_TO_RECEIVE
        if self.queue:
            wanted |= WANTS_TO_SEND
        return self.stream.poll_mask(wanted)

    def watch(self, call: Call, request_id: int) -> None:
        """The call is held: it is to hear when its caller goes away, or gives it up."""
        before = self.held.get(request_id)
        if before is not None:  # No client of ours uses an id twice at once.
            before.lane.post(before.caller_gone)
        self.held[request_id] = call
        if request_id in self.cancelled:
            del self.cancelled[request_id]
            call.lane.post(call.cancel)

    def unwatch(self, call: Call, request_id: int) -> None:
        """The call is held no more. Harmless if it was not."""
        if self.held.get(request_id) is call:
            del self.held[request_id]

    def cancel(self, request_id: int) -> None:
        """Its caller gives a call up: it ends if it is held, or when it would be."""
        call = self.held.get(request_id)
        if call is not None:
            call.lane.post(call.cancel)
            return
        self.cancelled[request_id] = None
        if len(self.cancelled) > CANCELLED_COUNT_MAX:
            del self.cancelled[next(iter(self.cancelled))]

    def send_answer(
        self,
        request_id: int,
        method_id: int,
        payload: bytes,
        regions: Sequence[Region] = (),
        regions_size_bytes: int = 0,
    ) -> None:
        """Adds an answer to what the turn sends."""
        if self.closed:
            return
        if not self.out:
            self.lane.dirty.append(self)
        size = len(payload) + regions_size_bytes
        self.out.append(encode_answer(request_id, method_id, size))
        self.out.append(payload)
        self.out_size_bytes += size
        if regions:
            self.out.extend(regions)
            self.out_has_regions = True

    def send_error(self, request_id: int, method_id: int, error: ServiceError) -> None:
        """Adds an error to what the turn sends."""
        if self.closed:
            return
        if not self.out:
            self.lane.dirty.append(self)
        payload = error.encode()
        self.out.append(encode_answer(request_id, method_id, len(payload), int(error.code)))
        self.out.append(payload)

    def flush(self, now: float) -> bool:
        """Sends what the turn has answered. True if all is sent; else it waits until more is taken. Raises OSError, ShortFileError."""
        out = self.out
        if self.queue is None and not self.out_has_regions:
            data = b"".join(out)  # type: ignore[arg-type]
            out.clear()
            self.out_size_bytes = 0
            try:
                sent = self.send(data)
            except BlockingIOError:
                sent = 0
            if sent == len(data):
                return True
            self.queue = deque((memoryview(data)[sent:],))
            self.queue_size_bytes = len(data) - sent
            self.progress_at = now
            return False
        waited = self.queue is not None
        self._enqueue(out)
        self.out = []
        self.out_has_regions = False
        self.out_size_bytes = 0
        if waited:
            return False
        self.progress_at = now
        return self.pump(now)

    def pump(self, now: float) -> bool:
        """Sends from the queue. True if it is empty now. Raises OSError, ShortFileError."""
        queue = self.queue
        if queue is None:
            return True
        budget, pieces_left = PUMP_SIZE_MAX_BYTES, PUMP_PIECES_MAX
        while queue and budget > 0 and pieces_left > 0:
            item = queue[0]
            if isinstance(item, tuple) and item.size_bytes >= SENDFILE_SIZE_MIN_BYTES:
                wanted = item.size_bytes
                sent = self._send_region(queue, item)
                pieces_left -= 1
            else:
                pieces, wanted = _take_small(queue, pieces_left)
                pieces_left -= len(pieces)
                sent = self._send_pieces(queue, pieces, wanted)
            self.queue_size_bytes -= sent
            budget -= sent
            if sent:
                self.progress_at = now
            if sent < wanted:
                break
        if queue:
            return False
        self.queue = None
        return True

    def _enqueue(self, items: list[bytes | Region]) -> None:
        size = 0
        for item in items:
            size += item.size_bytes if isinstance(item, tuple) else len(item)
        if self.queue is None:
            self.queue = deque()
        self.queue.extend(items)
        self.queue_size_bytes += size

    def _send_region(self, queue: _Queue, region: Region) -> int:
        """Sends from the region at the head of the queue and cuts off what is sent."""
        try:
            sent = self.stream.send_region(region)
        except BlockingIOError:
            return 0
        if sent == region.size_bytes:
            queue.popleft()
        else:
            queue[0] = region._replace(offset=region.offset + sent, size_bytes=region.size_bytes - sent)
        return sent

    def _send_pieces(self, queue: _Queue, pieces: list[bytes | memoryview], size: int) -> int:
        """Sends pieces taken from the queue; what is not sent goes back to its head."""
        try:
            sent = self.stream.send_pieces(pieces, more=bool(queue))
        except BlockingIOError:
            sent = 0
        if sent < size:
            whole = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            queue.appendleft(memoryview(whole)[sent:])
        return sent


def _take_small(queue: _Queue, count_max: int) -> tuple[list[bytes | memoryview], int]:
    """Takes headers, payloads and small regions off the queue, up to GATHER_SIZE_BYTES and at least one. (pieces, size)"""
    pieces: list[bytes | memoryview] = []
    regions: list[Region] = []
    size = 0
    while queue and size < GATHER_SIZE_BYTES and len(pieces) + len(regions) < count_max:
        item = queue[0]
        if isinstance(item, tuple):
            if item.size_bytes >= SENDFILE_SIZE_MIN_BYTES:
                break
            regions.append(item)
            size += item.size_bytes
        else:
            if regions:
                pieces += read_regions(regions)
                regions.clear()
            pieces.append(item)
            size += len(item)
        queue.popleft()
    pieces += read_regions(regions)
    return pieces, size
