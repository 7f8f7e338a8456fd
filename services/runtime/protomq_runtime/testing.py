"""Fakes for unit tests of services: lanes without threads, calls without a transport. Nothing happens by itself, and nothing waits.

    server = FakeServer(table)
    call = server.call("/protomq.v1.PullService/Pull", PullRequest(...))    the method runs now, as a lane would run it
    call.error, call.response()                                             its outcome; neither while it is held
    server.run()              what was posted is done, on all lanes         server.advance(1_000): timers that are due by then
    call.hang_up()            the caller goes away

A `FakeCall` keeps the rules of `Call`: it is answered once, and held once. What it does not do: admission, deadlines before the start,
the order in which several threads meet.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import Message

from .call import AnswerSink, Call
from .dispatch import BoundMethod, DispatchTable, Style
from .errors import Code, ServiceError
from .execution import run_drained, run_plain, run_raw
from .principals import ANONYMOUS, Principal
from .regions import Region
from .timers import Timer, Timers

STEPS_MAX = 10_000
"""Of what is posted: more is a service that posts for ever."""


class FakeLane:
    """A CallLane that does what it is told to, when it is told to. Its clock begins at 0 and stands still."""

    def __init__(self, pool_name: str = "fake") -> None:
        self.pool_name = pool_name
        self.answer_count = 0
        self.holds = 0
        self.now_ms = 0.0
        self.posted: deque[Callable[[], None]] = deque()
        self.timers = Timers()

    def post(self, function: Callable[[], None]) -> None:
        self.posted.append(function)

    def call_later(self, delay_ms: float, function: Callable[[], None]) -> Timer:
        return self.timers.add((self.now_ms + delay_ms) / 1000, function)

    def hand_back(self, sink: AnswerSink, answer: Any) -> None:
        self.posted.append(lambda: sink.deliver([answer]))

    def run(self) -> int:
        """Does what was posted, and what that posts; how many functions there were."""
        count = 0
        while self.posted:
            count += 1
            assert count <= STEPS_MAX, "this posts for ever"
            self.posted.popleft()()
        return count

    def advance(self, time_ms: float) -> None:
        """Lets time pass: calls what is due by then, each at its time, and does what is posted."""
        end_ms = self.now_ms + time_ms
        self.run()
        while (next_at := self.timers.next_at()) is not None and next_at * 1000 <= end_ms:
            self.now_ms = max(self.now_ms, next_at * 1000)
            for function in self.timers.due(next_at):
                function()
            self.run()
        self.now_ms = end_ms


class FakeCall(Call):
    """A call that came over the remoting port."""

    def __init__(
        self,
        lane: FakeLane,
        bound: BoundMethod,
        request: Message | bytes,
        *,
        timeout_s: float | None = None,
        peer: str = "192.0.2.1:4000",
        principal: Principal = ANONYMOUS,
    ) -> None:
        self.lane = lane
        self.bound = bound
        self.payload = request if isinstance(request, bytes) else request.SerializeToString()
        self.received = time.monotonic()
        self.deadline = None if timeout_s is None else self.received + timeout_s
        self.answered = False
        self._on_close = None
        self.span = None
        self.answer_payload: bytes | None = None
        """What it was answered with, without the regions; None: not answered, or with an error."""
        self.regions: Sequence[Region] = ()
        self.error: ServiceError | None = None
        self._peer = peer
        self._principal = principal
        self._is_closed = False

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def principal(self) -> Principal:
        return self._principal

    @property
    def closed(self) -> bool:
        return self._is_closed

    @property
    def is_held(self) -> bool:
        """Whether it waits for something, and is to be told if its caller goes."""
        return self._on_close is not None

    def answer(
        self, payload: bytes, regions: Sequence[Region] = (), regions_size_bytes: int = 0
    ) -> None:
        assert regions_size_bytes == sum(region.size_bytes for region in regions)
        self._finish(Code.OK)
        self.answer_payload, self.regions = payload, regions

    def fail(self, error: ServiceError) -> None:
        self._finish(error.code)
        self.error = error

    def response(self, read: Callable[[Region], bytes] | None = None) -> Any:
        """The response message; `read` gives a region's bytes where there are any. Raises the error, or AssertionError if there is none."""
        if self.error is not None:
            raise self.error
        assert self.answer_payload is not None, "not answered yet"
        parts = [self.answer_payload]
        if self.regions:
            assert read is not None, "the answer has regions"
            parts += map(read, self.regions)
        return self.method.response_class.FromString(b"".join(parts))

    def hang_up(self) -> None:
        """The caller goes away."""
        self._is_closed = True
        self.caller_gone()

    def _watch(self) -> None:
        if self._is_closed:
            self.lane.post(self.caller_gone)


class FakeGrpcCall(FakeCall):
    """A call that came by gRPC."""

    transport = "grpc"


class FakeServer:
    """The methods of a table, and one fake lane for each pool."""

    def __init__(self, table: DispatchTable) -> None:
        self.table = table
        self.lanes = {name: FakeLane(name) for name in table.lane_names}

    def call(
        self,
        path: str,
        request: Message | bytes,
        *,
        kind: type[FakeCall] = FakeCall,
        timeout_s: float | None = None,
        peer: str = "192.0.2.1:4000",
    ) -> FakeCall:
        """Runs the method for one request."""
        (call,) = self.call_together(path, [request], kind=kind, timeout_s=timeout_s, peer=peer)
        return call

    def call_together(
        self,
        path: str,
        requests: Sequence[Message | bytes],
        *,
        kind: type[FakeCall] = FakeCall,
        timeout_s: float | None = None,
        peer: str = "192.0.2.1:4000",
    ) -> list[FakeCall]:
        """Runs the method for requests that arrive in one turn of its lane."""
        bound = self.table.by_path[path]
        lane = self.lanes[bound.method.lane]
        calls = [kind(lane, bound, request, timeout_s=timeout_s, peer=peer) for request in requests]
        if bound.style is Style.DRAINED:
            run_drained(bound, list(calls))
        else:
            for call in calls:
                (run_raw if bound.style is Style.RAW else run_plain)(call)
        return calls

    def run(self) -> None:
        """Does what was posted on all lanes, until nothing is left."""
        while any(lane.run() for lane in self.lanes.values()):
            pass

    def advance(self, time_ms: float) -> None:
        """Lets time pass on all lanes."""
        for lane in self.lanes.values():
            lane.advance(time_ms)
        self.run()
