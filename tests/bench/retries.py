"""What a retry costs the broker, in plain sends: CPU of its own code, without sockets. `python -m tests.bench.retries`

    plain send   one message a call, 32 calls in a turn of the send lane: as 32 callers do
    retry        SendBack of one message a call, or of 32, and its delivery when it is due

All over a store on a real disk, in one process, in turns; the least of several runs counts. "Retry of a failed message costs <= 3 plain
sends" is the ratio for calls of 32, as a consumer sends back what it has polled.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from protomq.v1.group_service_pb2 import FailedMessage, SendBackRequest
from protomq.v1.send_service_pb2 import SendRequest
from protomq.wire.record import RecordTemplate, encode_front, encode_record_field
from protomq_broker.config import BrokerConfig
from protomq_broker.delays import Delays
from protomq_broker.half_sends import HalfSends
from protomq_broker.log_time import LogTime
from protomq_broker.recalls import Recalls
from protomq_broker.send_backs import SendBacks
from protomq_broker.send_service import SendService
from protomq_broker.store.config import StoreConfig
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_broker.system_writer import SystemWriter
from protomq_broker.timer_mover import TimerMover
from protomq_broker.waiting_answers import WaitingAnswers
from protomq_broker.write_permit import WritePermit
from tests.support.retry_world import Call, Clock, Lane

TOPIC, GROUP = "Retried", "group"
BODY_SIZE_BYTES = 1_024
CALLERS = 32
TURNS = 40
RUNS = 7


class Parts:
    """What of a broker does it, over a store in a folder."""

    def __init__(self, folder: str) -> None:
        self.clock = Clock()
        self.store = Store.open(
            Path(folder), StoreConfig(segment_size_bytes=64 << 20), clock=self.clock, background=False
        )
        self.store.topics.create(TopicConfig(TOPIC, 1, 1))
        permit = WritePermit()
        permit.give()
        self.lane = Lane()
        writer = SystemWriter(permit)
        writer.start(self.store, self.lane)  # type: ignore[arg-type]
        config = BrokerConfig()
        waiting = WaitingAnswers(self.store, self.clock)
        log_time = LogTime(self.clock, 0)
        delays = Delays(
            log_time, config.delay_levels_ms, self.store.pending, count_max=1 << 30, size_max_bytes=1 << 40
        )
        recalls = Recalls(self.store, config, "b", writer, waiting, log_time)
        halves: Any = HalfSends.__new__(HalfSends)  # no send here is half
        self.sends = SendService(self.store, config, self.clock, waiting, delays, recalls, halves, halves)
        self.send_backs = SendBacks(self.store, config, writer, waiting, delays, log_time)
        self.mover = TimerMover(self.store, writer, log_time)
        self._template = RecordTemplate(TOPIC, 7, 0)
        self._sequence = 0

    def send_calls(self) -> list[Call]:
        """A turn of sends, encoded as clients do."""
        calls = []
        for _ in range(CALLERS):
            record = self._template.encode(
                bytes(BODY_SIZE_BYTES), self._sequence, 5, key="k", front=encode_front(["k"])
            )
            self._sequence += 1
            request = SendRequest(topic=TOPIC, queue_id=0, record_sizes=[len(record)])
            calls.append(Call(encode_record_field(record) + request.SerializeToString(), self.lane))
        return calls

    def back_calls(self, first: int, each: int) -> list[Call]:
        """The same messages, sent back by `each` in a call."""
        return [
            Call(
                SendBackRequest(
                    consumer_group=GROUP,
                    messages=[
                        FailedMessage(topic=TOPIC, queue_offset=offset, error="ValueError: no such flight")
                        for offset in range(at, at + each)
                    ],
                    request_id=at + 1,
                ).SerializeToString(),
                self.lane,
            )
            for at in range(first, first + CALLERS, each)
        ]

    def send_back(self, calls: list[Call]) -> None:
        """A turn of them."""
        self.lane.waits = True
        self.send_backs.send_back(calls)  # type: ignore[arg-type]
        self.lane.run()
        assert all(isinstance(call.outcome, bytes) for call in calls), calls[0].outcome

    def deliver(self) -> None:
        """All that waits."""
        self.clock.time_ms += 1 << 30
        while self.mover.deliver():
            pass


def cpu_us(work: Callable[[], object]) -> float:
    """CPU time of the thread."""
    began = time.thread_time()
    work()
    return (time.thread_time() - began) * 1e6


def measure(parts: Parts) -> dict[str, float]:
    """CPU per message of one run, in microseconds."""
    spent = dict.fromkeys(("send", "back, 1 a call", "back, 32 a call", "deliver"), 0.0)
    for turn in range(TURNS):
        calls = parts.send_calls()
        first = parts.store.queue_range(TOPIC, 0)[1]
        spent["send"] += cpu_us(lambda calls=calls: parts.sends.send(calls))  # type: ignore[misc]
        parts.store.flush()
        each = (1, CALLERS)[turn % 2]
        backs = parts.back_calls(first, each)
        spent[f"back, {each} a call"] += 2 * cpu_us(lambda backs=backs: parts.send_back(backs))  # type: ignore[misc]
    spent["deliver"] = cpu_us(parts.deliver)
    return {name: time_us / (TURNS * CALLERS) for name, time_us in spent.items()}


def main() -> dict[str, float]:
    """Prints the figures; the ratios are the result."""
    with tempfile.TemporaryDirectory() as folder:
        parts = Parts(folder)
        runs = [measure(parts) for _ in range(RUNS)]
        parts.store.close()
    least = {name: min(run[name] for run in runs) for name in runs[0]}
    for name, time_us in least.items():
        print(f"{name:18} {time_us:7.1f} us of CPU a message")
    ratios = {
        name: (least[f"back, {name}"] + least["deliver"]) / least["send"]
        for name in ("1 a call", "32 a call")
    }
    for name, ratio in ratios.items():
        print(f"a retry, {name:9}  {ratio:7.2f} plain sends")
    return ratios


if __name__ == "__main__":
    main()
