"""Thousands of held pulls from one process, told line by line what to do (see measure.Helper).

    hold N     pull N times at the ends of the queues, held
    wake       send one message to each queue and wait until every held pull is answered; then hold again
    drop       hang up

A pull that is refused as overload (SYSTEM_BUSY) is made again, as a consumer does, and counted.
"""

from __future__ import annotations

import json
import selectors
import sys
import time
from typing import Any, Final, NamedTuple

from protomq.v1 import pull_service_pb2, send_service_pb2
from protomq.wire.frames import HEADER, LENGTH_SIZE_BYTES
from tests.bench.batches import (
    LANE_PULL,
    LANE_SEND,
    PULL_METHOD_ID,
    SEND_METHOD_ID,
    RawConnection,
)

_HOLD_MS: Final = 60_000
_WAKE_TIMEOUT_S: Final = 30.0
_BURST: Final = 200
_BURST_PAUSE_S: Final = 0.02
_QUIET_S: Final = 0.5
_RESOURCE_EXHAUSTED: Final = 8


class _Caller(NamedTuple):
    connection: RawConnection
    received: bytearray
    pulls: dict[int, int]
    """Queue of each pull under way, by request id."""


def serve(remoting: str, topic: str, queues: int, connections: int) -> None:
    """Until standard input ends."""
    holds = _Holds(remoting, topic, queues, connections)
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        answer: dict[str, Any] = {}
        if command == "hold":
            holds.hold(int(argument))
        elif command == "wake":
            answer = {"seconds": holds.wake(), "refused": holds.refused}
        else:
            holds.drop()
        print(json.dumps(answer), flush=True)


class _Holds:
    """`refused` counts pulls that had to be made again."""

    def __init__(self, remoting: str, topic: str, queues: int, connections: int) -> None:
        self.refused = 0
        self._remoting = remoting
        self._topic = topic
        self._connection_count = connections
        self._callers: list[_Caller] = []
        self._selector = selectors.EpollSelector()
        self._sender = RawConnection(remoting, LANE_SEND)
        self._count = 0
        self._ends = [0] * queues
        for queue in range(queues):  # One message, whose answer tells the end of the queue.
            self._send(queue)

    def _send(self, queue: int) -> None:
        request = send_service_pb2.SendRequest(topic=self._topic, queue_id=queue)
        request.records.add().body = b"wake"
        answer = self._sender.call(SEND_METHOD_ID, (request.SerializeToString(),))
        self._ends[queue] = send_service_pb2.SendResponse.FromString(answer).queue_offset + 1

    def hold(self, count: int) -> None:
        """Pull `count` times, spread over connections and queues."""
        while len(self._callers) < self._connection_count:
            caller = _Caller(RawConnection(self._remoting, LANE_PULL), bytearray(), {})
            caller.connection.socket.setblocking(False)
            self._selector.register(caller.connection.socket, selectors.EVENT_READ, caller)
            self._callers.append(caller)
        for number in range(count):
            if number % _BURST == _BURST - 1:
                time.sleep(_BURST_PAUSE_S)
            self._pull(self._callers[number % len(self._callers)], number % len(self._ends))
        self._count = count
        # A hold has no answer that could be waited for; that none comes is what can be seen.
        if early := self._answers(_QUIET_S, count):
            raise RuntimeError(f"{early} pulls were answered instead of held")

    def wake(self) -> float:
        """Messages for all; the seconds until the last pull is answered."""
        begin = time.perf_counter()
        for queue in range(len(self._ends)):
            self._send(queue)
        answered = 0
        while answered < self._count and time.perf_counter() < begin + _WAKE_TIMEOUT_S:
            answered += self._answers(1.0, self._count - answered)
        seconds = time.perf_counter() - begin
        if answered < self._count:
            raise RuntimeError(f"{answered} of {self._count} held pulls were woken")
        self.hold(self._count)
        return seconds

    def drop(self) -> None:
        """Close all connections; the broker forgets the holds."""
        for caller in self._callers:
            self._selector.unregister(caller.connection.socket)
            caller.connection.close()
        self._callers = []
        self._count = 0

    def _pull(self, caller: _Caller, queue: int) -> None:
        request = pull_service_pb2.PullRequest(
            topic=self._topic, queue_id=queue, queue_offset=self._ends[queue], hold_ms=_HOLD_MS
        )
        caller.connection.socket.setblocking(True)
        request_id = caller.connection.send(PULL_METHOD_ID, (request.SerializeToString(),))
        caller.connection.socket.setblocking(False)
        caller.pulls[request_id] = queue

    def _answers(self, timeout_s: float, wanted: int) -> int:
        """Count pulls that are answered, until `wanted` are or nothing comes for the time-out."""
        count = 0
        while count < wanted:
            ready = self._selector.select(timeout_s)
            if not ready:
                break
            for key, _ in ready:
                caller: _Caller = key.data
                data = caller.connection.socket.recv(1 << 20)
                if not data:
                    raise ConnectionError("the broker closed a connection with held pulls")
                caller.received.extend(data)
                count += self._take_frames(caller)
        return count

    def _take_frames(self, caller: _Caller) -> int:
        buffer, position, count = caller.received, 0, 0
        refused = []
        while len(buffer) - position >= HEADER.size:
            length, request_id, _, _, status, _ = HEADER.unpack_from(buffer, position)
            end = position + LENGTH_SIZE_BYTES + length
            if end > len(buffer):
                break
            queue = caller.pulls.pop(request_id)
            if status == _RESOURCE_EXHAUSTED:
                refused.append(queue)
            elif status:
                payload = bytes(buffer[position + HEADER.size : end])
                raise RuntimeError(f"status {status}: {payload!r}")
            else:
                count += 1
            position = end
        del buffer[:position]
        if refused:
            self.refused += len(refused)
            time.sleep(_BURST_PAUSE_S)
            for queue in refused:
                self._pull(caller, queue)
        return count
