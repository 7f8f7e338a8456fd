"""Prebuilt batches over gRPC, from threads with a channel each; the same client against the broker and against bare gRPC."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import grpc

from tests.bench.batches import BatchTemplate
from tests.bench.measure import Counter, Sample, Window

SEND_PATH = "/protomq.v1.SendService/Send"


def _identity(data: bytes) -> bytes:
    return data


def send_batches(
    grpc_address: str,
    topic: str,
    batch: int,
    size: int,
    queues: int,
    callers: int,
    warm_up: float,
    seconds: float,
    server_pids: Sequence[int],
) -> Sample:
    """Each caller sends a prebuilt batch and waits for the answer."""
    counters = [Counter() for _ in range(callers)]
    window = Window(counters, server_pids)
    stop = threading.Event()

    def call(number: int) -> None:
        counter = counters[number]
        template = BatchTemplate(topic, batch, size)
        tails = [template.tail(queue) for queue in range(queues)]
        turn = number
        options = [
            ("grpc.max_send_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),  # A connection each.
        ]
        try:
            with grpc.insecure_channel(grpc_address, options) as channel:
                send = channel.unary_unary(SEND_PATH, _identity, _identity)
                while not stop.is_set():
                    template.advance()
                    request = bytes(template.records) + tails[turn % queues]
                    turn += 1
                    begin = time.perf_counter()
                    send(request, timeout=30)
                    if window.counting:
                        counter.latencies_s.append(time.perf_counter() - begin)
                    counter.messages += batch
                    counter.size_bytes += batch * size
        except Exception as error:
            counter.note_error(error)

    threads = [threading.Thread(target=call, args=(n,), daemon=True) for n in range(callers)]
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
