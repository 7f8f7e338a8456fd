"""Batches of which many are in flight, over the remoting port: what a round trip costs is seen only where none waits for the one before."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from tests.bench.batches import LANE_SEND, SEND_METHOD_ID, BatchTemplate, RawConnection
from tests.bench.measure import Counter, Sample, Window


def send_batches(
    remoting: str,
    topic: str,
    batch: int,
    size: int,
    queues: int,
    connections: int,
    in_flight: int,
    warm_up: float,
    seconds: float,
    server_pids: Sequence[int],
) -> Sample:
    """Each connection keeps `in_flight` prebuilt batches under way, from a thread of its own. Latencies are those of whole batches.

    Answers to sends come in the order of the sends: each goes to the next queue, and all are stored by one writer.
    """
    counters = [Counter() for _ in range(connections)]
    window = Window(counters, server_pids)
    stop = threading.Event()

    def call(counter: Counter, turn: int) -> None:
        template = BatchTemplate(topic, batch, size)
        tails = [template.tail(queue) for queue in range(queues)]
        begun_s: deque[float] = deque()
        try:
            with RawConnection(remoting, LANE_SEND) as connection:
                connection.use_large_buffers()
                while not stop.is_set():
                    while len(begun_s) < in_flight:
                        template.advance()
                        begun_s.append(time.perf_counter())
                        connection.send(SEND_METHOD_ID, (template.records, tails[turn % queues]))
                        turn += connections
                    connection.receive_payload_into(memoryview(bytearray(connection.receive_header())))
                    took_s = time.perf_counter() - begun_s.popleft()
                    if window.counting:
                        counter.latencies_s.append(took_s)
                    counter.messages += batch
                    counter.size_bytes += batch * size
        except Exception as error:
            counter.note_error(error)

    threads = [threading.Thread(target=call, args=(c, turn), daemon=True) for turn, c in enumerate(counters)]
    for thread in threads:
        thread.start()
    time.sleep(warm_up)
    window.begin()
    time.sleep(seconds)
    window.end()
    stop.set()
    for thread in threads:
        thread.join(10)
    return window.sample()
