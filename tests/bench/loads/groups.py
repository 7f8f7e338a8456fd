"""Members of a group, for one broker: many raw ones, and some of the SDK. Each is told line by line what to do (see measure.Helper)."""

from __future__ import annotations

import asyncio
import json
import os
import selectors
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from protomq import AsyncPushConsumer, Message, MessageQueue, Producer, PullConsumer, QueueListener
from protomq.v1 import membership_service_pb2 as pb
from protomq.wire.frames import HEADER, LENGTH_SIZE_BYTES
from tests.bench.batches import RawConnection

_LANE_CONSUMER: Final = 4
_HOLD_METHOD_ID: Final = 0x0B01
_HOLD_MS: Final = 15_000
_PATIENCE_S: Final = 120.0
_RESOURCE_EXHAUSTED: Final = 8
_AGAIN_S: Final = 0.2
"""After which a member that is refused as overload calls again, as the SDK does."""


class _RawMember:
    """A connection that holds a call, again and again."""

    __slots__ = ("_member", "_received", "_start", "_version", "again_s", "connection", "count")

    def __init__(self, remoting: str, topic: str, number: int) -> None:
        self.connection = RawConnection(remoting, _LANE_CONSUMER)
        self.again_s = 0.0
        self.count = 0
        """Members in the last answer that had some."""
        self._member = pb.GroupMember(
            client_id=f"host-{number:04}@{number}@0123abcd",
            nonce=number + 1,
            topics=[pb.MemberTopic(topic=topic), pb.MemberTopic(topic="%RETRY%benched")],
            allocation="average",
            client_version="protomq-python 1.0",
        )
        self._received = bytearray()
        self._version = self._start = 0

    def call(self) -> None:
        """Joins, or says that it is still there."""
        request = pb.HoldMembershipRequest(
            consumer_group="benched", member=self._member, hold_ms=_HOLD_MS, known_version=self._version, broker_start=self._start
        )
        self.connection.socket.setblocking(True)
        self.connection.send(_HOLD_METHOD_ID, (request.SerializeToString(),))
        self.connection.socket.setblocking(False)

    def read(self) -> int:
        """Takes what has come, and calls again after an answer; the number of its octets."""
        data = self.connection.socket.recv(1 << 20)
        if not data:
            raise ConnectionError("the broker closed the connection of a member")
        received = self._received
        received.extend(data)
        if len(received) < HEADER.size:
            return 0
        length, _, _, _, status, _ = HEADER.unpack_from(received)
        end = LENGTH_SIZE_BYTES + length
        if len(received) < end:
            return 0
        payload = bytes(received[HEADER.size : end])
        del received[:end]
        if status == _RESOURCE_EXHAUSTED:
            self.again_s = time.perf_counter() + _AGAIN_S
            return 0
        if status:
            raise RuntimeError(f"status {status}: {payload!r}")
        answer = pb.HoldMembershipResponse.FromString(payload)
        self._version, self._start = answer.version, answer.broker_start
        if not answer.is_unchanged:
            self.count = len(answer.members)
        self.call()
        return len(payload)


def raw(remoting: str, topic: str) -> None:
    """`join N`: all at once, until each knows all. `rest S`: they do nothing but call again, for this number of seconds."""
    members: list[_RawMember] = []
    selector = selectors.EpollSelector()
    refused: set[_RawMember] = set()
    refusals = 0

    def answer_for(seconds: float, count: int = 0) -> tuple[float, int]:
        """Until all know `count` members, or for this time. Seconds, and octets that came."""
        nonlocal refusals
        began, size_bytes = time.perf_counter(), 0
        missing = {member for member in members if member.count != count}
        while (left_s := began + seconds - time.perf_counter()) > 0 and (missing or not count):
            for member in [member for member in refused if member.again_s <= time.perf_counter()]:
                refused.discard(member)
                member.again_s = 0.0
                member.call()
            for key, _ in selector.select(min(left_s, _AGAIN_S / 2 if refused else 0.5)):
                member = key.data
                size_bytes += member.read()
                if member.again_s and member not in refused:
                    refused.add(member)
                    refusals += 1
                if member.count == count:
                    missing.discard(member)
                else:
                    missing.add(member)
        if count and missing:
            raise RuntimeError(f"{len(missing)} of {count} members do not know all others after {seconds:.0f} s")
        return time.perf_counter() - began, size_bytes

    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "connect":
            members += [_RawMember(remoting, topic, number) for number in range(int(argument))]
            for member in members:
                selector.register(member.connection.socket, selectors.EVENT_READ, member)
            seconds, size_bytes = 0.0, 0
        elif command == "join":
            began = time.perf_counter()
            for member in members:
                member.call()
            _, size_bytes = answer_for(_PATIENCE_S, len(members))
            seconds = time.perf_counter() - began
        else:
            seconds, size_bytes = answer_for(float(argument))
        print(json.dumps({"seconds": seconds, "mib": size_bytes / (1 << 20), "refused": refusals}), flush=True)


class _Member(QueueListener):
    """A PullConsumer on a thread of its own, which polls."""

    def __init__(self, namesrv: str, topic: str) -> None:
        self._namesrv = namesrv
        self._topic = topic
        self.queues: frozenset[MessageQueue] = frozenset()
        self.changed_s = 0.0
        self.got_s: dict[bytes, float] = {}
        self._is_over = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def on_assigned(self, queues: Sequence[MessageQueue]) -> None:
        self._note(self.queues | frozenset(queues))

    def on_revoked(self, queues: Sequence[MessageQueue]) -> None:
        self._note(self.queues - frozenset(queues))

    def on_lost(self, queues: Sequence[MessageQueue]) -> None:
        self.on_revoked(queues)

    def _note(self, queues: frozenset[MessageQueue]) -> None:
        self.queues, self.changed_s = queues, time.monotonic()

    def _run(self) -> None:
        with PullConsumer("benched", namesrv=self._namesrv, listener=self) as consumer:
            consumer.subscribe(self._topic)
            while not self._is_over.is_set():
                for message in consumer.poll(0.5):
                    self.got_s[message.body] = time.monotonic()

    def end(self) -> None:
        self._is_over.set()


def sdk(namesrv: str, topic: str) -> None:
    """`join N`: that many more. `shares`: the queues of each, and when any changed last. `got`: bodies with their times."""
    members: list[_Member] = []
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        answer: dict[str, Any] = {"pid": os.getpid(), "now_s": time.monotonic()}
        if command == "join":
            members += [_Member(namesrv, topic) for _ in range(int(argument))]
        elif command == "shares":
            answer["queues"] = [sorted(queue.queue_id for queue in member.queues) for member in members]
            answer["changed_s"] = max((member.changed_s for member in members), default=0.0)
        else:
            answer["got"] = {body.decode(): time_s for member in members for body, time_s in member.got_s.items()}
        print(json.dumps(answer), flush=True)
    for member in members:
        member.end()
    for member in members:
        member.thread.join(5.0)


def push(namesrv: str, topic: str, number: int, size: int) -> None:
    """`start N`: that many push consumers, each `size` of them in one group. `rest S`: they wait for that long."""

    async def run() -> None:
        consumers: list[AsyncPushConsumer] = []
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            command, _, argument = line.strip().partition(" ")
            if command == "start":
                for index in range(int(argument)):
                    consumer = AsyncPushConsumer(f"benched-{(number * int(argument) + index) // size}", namesrv=namesrv)
                    consumer.subscribe(topic, _ignore)
                    await consumer.start()
                    consumers.append(consumer)
            else:
                await asyncio.sleep(float(argument))
            print(json.dumps({"count": len(consumers)}), flush=True)

    asyncio.run(run())


async def _ignore(message: Message) -> None:
    """A listener to which nothing comes."""


def send_to_each(namesrv: str, topic: str, queue_ids: Sequence[int], body: str) -> None:
    """One message to each of these queues."""
    with Producer(namesrv=namesrv) as producer:
        by_id = {queue.queue_id: queue for queue in producer.queues(topic)}
        for queue_id in queue_ids:
            producer.send(topic, f"{body} {queue_id}".encode(), queue=by_id[queue_id])
