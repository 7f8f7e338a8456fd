"""Loads of raw frames over the remoting port: what the broker and the port can do, without the SDK."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from protomq.v1 import admin_service_pb2, pull_service_pb2, send_service_pb2
from tests.bench.batches import (
    CREATE_TOPIC_METHOD_ID,
    LANE_ADMIN,
    LANE_PULL,
    LANE_SEND,
    PING_METHOD_ID,
    PULL_METHOD_ID,
    SEND_METHOD_ID,
    BatchTemplate,
    RawConnection,
)
from tests.bench.measure import Counter, Sample, Window

_PULL_HEADER_ALLOWANCE_BYTES: Final = 2 << 20
"""A pull answer has its header beside the bytes that were asked for, and one message may be larger than those."""

_BLOCK_BYTES: Final = 64 << 10


def send_batches(
    remoting: str,
    topics: Sequence[str],
    batch: int,
    size: int,
    queues: int,
    connections: int,
    warm_up: float,
    seconds: float,
    server_pids: Sequence[int],
    limit: int = 0,
    with_keys: bool = False,
    delay_level: int = 0,
) -> Sample:
    """Each connection sends a prebuilt batch and waits for its answer, from a thread of its own.

    With `limit` it ends after so many messages instead of after `seconds`. The topics and queues are taken in turn. `delay_level` 0:
    without a delay.
    """
    counters = [Counter() for _ in range(connections)]
    window = Window(counters, server_pids)
    stop = threading.Event()
    encoded = [topic.encode() for topic in topics]
    delay = (
        send_service_pb2.SendRequest(delay_level=delay_level).SerializeToString()
        if delay_level
        else b""
    )

    def call(counter: Counter) -> None:
        number = counters.index(counter)
        template = BatchTemplate(
            topics[0], batch, size, with_keys=with_keys, is_delayed=delay_level > 0
        )
        tails = {topic: _tails(template, topic, queues) for topic in encoded[:1]}
        turn = number
        try:
            with RawConnection(remoting, LANE_SEND) as connection:
                connection.use_large_buffers()
                while not stop.is_set():
                    topic = encoded[turn % len(encoded)]
                    template.set_topic(topic)
                    template.advance()
                    if topic not in tails:
                        tails[topic] = _tails(template, topic, queues)
                    tail = tails[topic][turn % queues]
                    # With one topic the queues are taken in turn; with many each has its own turn.
                    turn += connections if len(encoded) > 1 else 1
                    begin = time.perf_counter()
                    connection.call(SEND_METHOD_ID, (template.records, tail, delay))
                    if window.counting:
                        counter.latencies_s.append(time.perf_counter() - begin)
                    counter.messages += batch
                    counter.size_bytes += batch * size
                    if limit and counter.messages * connections >= limit:
                        return
        except Exception as error:
            counter.note_error(error)

    if not limit:
        _run_threads(call, counters, window, stop, warm_up, seconds)
        return window.sample()
    threads = [threading.Thread(target=call, args=(c,), daemon=True) for c in counters]
    window.begin()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    window.end()
    return window.sample()


def _tails(template: BatchTemplate, topic: bytes, queues: int) -> list[bytes]:
    template.set_topic(topic)
    return [template.tail(queue) for queue in range(queues)]


def pull_raw(
    remoting: str,
    topic: str,
    queue_id: int,
    size_max_bytes: int,
    warm_up: float,
    seconds: float,
    server_pids: Sequence[int],
    connections: int = 1,
) -> Sample:
    """Pull from the start of a queue as fast as the bytes come, looking at nothing but the header; start again at the end."""
    counters = [Counter() for _ in range(connections)]
    window = Window(counters, server_pids)
    stop = threading.Event()
    sizes: list[int] = []

    def pull(counter: Counter) -> None:
        buffer = memoryview(bytearray(size_max_bytes + _PULL_HEADER_ALLOWANCE_BYTES))
        offset = 0
        try:
            with RawConnection(remoting, LANE_PULL) as connection:
                connection.use_large_buffers()
                while not stop.is_set():
                    request = pull_service_pb2.PullRequest(
                        topic=topic, queue_id=queue_id, queue_offset=offset,
                        record_count_max=32_768, size_max_bytes=size_max_bytes,
                    )  # fmt: skip
                    connection.send(PULL_METHOD_ID, (request.SerializeToString(),))
                    payload_size = connection.receive_header()
                    connection.receive_payload_into(buffer[:payload_size])
                    status, next_offset, end_offset, regions = _pull_header(buffer)
                    if status != pull_service_pb2.PULL_STATUS_FOUND:
                        raise RuntimeError(f"pull at {offset} of {end_offset}: status {status}")
                    counter.messages += next_offset - offset
                    counter.size_bytes += regions
                    sizes.append(regions)
                    offset = 0 if next_offset >= end_offset else next_offset
        except Exception as error:
            counter.note_error(error)

    _run_threads(pull, counters, window, stop, warm_up, seconds)
    return window.sample({"answer_bytes": sum(sizes) // max(len(sizes), 1)})


def _run_threads(
    call: Callable[[Counter], None],
    counters: Sequence[Counter],
    window: Window,
    stop: threading.Event,
    warm_up: float,
    seconds: float,
) -> None:
    """A thread per counter, until the window has passed."""
    threads = [threading.Thread(target=call, args=(c,), daemon=True) for c in counters]
    for thread in threads:
        thread.start()
    time.sleep(warm_up)
    window.begin()
    time.sleep(seconds)
    window.end()
    stop.set()
    for thread in threads:
        thread.join(10)


def _pull_header(buffer: memoryview) -> tuple[int, int, int, int]:
    """Status, next offset, end offset and size of the regions: the first fields of the answer, varints of one-byte tags."""
    values: dict[int, int] = {}
    position = 0
    while 8 not in values:
        number = buffer[position] >> 3
        if buffer[position] & 7 or number not in (4, 5, 6, 7, 8):
            break
        position += 1
        value = shift = 0
        while True:
            byte = buffer[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        values[number] = value
    return values.get(4, 0), values.get(5, 0), values.get(7, 0), values.get(8, 0)


def read_sendfile_limit(
    address: str,
    answer_bytes: int,
    warm_up: float,
    seconds: float,
    server_pids: Sequence[int],
) -> Sample:
    """The same client against the bare sendfile loop of `limits`: it sends a frame and receives `answer_bytes` of the file."""
    counter = Counter()
    window = Window([counter], server_pids)
    stop = threading.Event()

    def read(counter: Counter) -> None:
        buffer = memoryview(bytearray(answer_bytes))
        size = answer_bytes.to_bytes(8, "little")
        with RawConnection(address, LANE_PULL) as connection:
            connection.use_large_buffers()
            while not stop.is_set():
                connection.send(PULL_METHOD_ID, (size,))
                connection.receive_payload_into(buffer[: connection.receive_header()])
                counter.messages += 1
                counter.size_bytes += answer_bytes

    _run_threads(read, [counter], window, stop, warm_up, seconds)
    return window.sample()


def read_recent_limit(
    address: str,
    path: str,
    answer_bytes: int,
    interval_ms: float,
    warm_up: float,
    seconds: float,
    server_pids: Sequence[int],
) -> Sample:
    """The bare sendfile loop on a file that grows: at intervals this writes `answer_bytes` to it, 64 KiB at a time, and then receives them.

    It begins at the start of the file, which is large enough.
    """
    counter = Counter()
    window = Window([counter], server_pids)
    stop = threading.Event()

    def read(counter: Counter) -> None:
        buffer = memoryview(bytearray(answer_bytes))
        block = os.urandom(_BLOCK_BYTES)
        size = answer_bytes.to_bytes(8, "little")
        file = os.open(path, os.O_RDWR)
        position, due = 0, time.perf_counter()
        with RawConnection(address, LANE_PULL) as connection:
            connection.use_large_buffers()
            while not stop.is_set():
                for at in range(position, position + answer_bytes, _BLOCK_BYTES):
                    os.pwrite(file, block, at)
                position += answer_bytes
                due += interval_ms / 1000
                time.sleep(max(due - time.perf_counter(), 0))
                connection.send(PULL_METHOD_ID, (size,))
                connection.receive_payload_into(buffer[: connection.receive_header()])
                counter.messages += 1
                counter.size_bytes += answer_bytes
        os.close(file)

    _run_threads(read, [counter], window, stop, warm_up, seconds)
    return window.sample()


def ping(
    remoting: str, interval_ms: float, warm_up: float, seconds: float, server_pids: Sequence[int]
) -> Sample:
    """Ping on the admin lane by a timetable.

    A ping counts from its intended time if the one before it was late. Else it counts from when this process woke up for it: how
    late its own timer is, on cores that are both busy, delays no caller of the broker.
    """
    counter = Counter()
    window = Window([counter], server_pids)
    interval = interval_ms / 1000
    with RawConnection(remoting, LANE_ADMIN) as connection:
        intended = begin = time.perf_counter()
        while intended < begin + warm_up + seconds:
            if not window.counting and intended >= begin + warm_up:
                window.begin()
            start = intended
            if (early := intended - time.perf_counter()) > 0:
                time.sleep(early)
                start = time.perf_counter()
            connection.call(PING_METHOD_ID, ())
            if window.counting:
                counter.latencies_s.append(time.perf_counter() - start)
                counter.messages += 1
            intended += interval
        window.end()
    return window.sample()


def create_topics(
    remoting: str, topics: Sequence[str], queues: int, server_pids: Sequence[int]
) -> Sample:
    """Create the topics, many requests on their way at a time."""
    counter = Counter()
    window = Window([counter], server_pids)
    chunk = 200
    with RawConnection(remoting, LANE_ADMIN) as connection:
        window.begin()
        for start in range(0, len(topics), chunk):
            names = topics[start : start + chunk]
            for name in names:
                request = admin_service_pb2.CreateTopicRequest()
                request.topic.name = name
                request.topic.write_queues = request.topic.read_queues = queues
                connection.send(CREATE_TOPIC_METHOD_ID, (request.SerializeToString(),))
            for _ in names:
                connection.receive_payload_into(memoryview(bytearray(connection.receive_header())))
                counter.messages += 1
        window.end()
    return window.sample()


def first_send(remoting: str, topic: str, until: float) -> float:
    """Try to send one message until it is accepted; the time (perf_counter) at which it was. Raises RuntimeError after `until`."""
    request = send_service_pb2.SendRequest(topic=topic)
    request.records.add().body = b"first"
    payload = request.SerializeToString()
    last = "no try"
    while time.perf_counter() < until:
        try:
            with RawConnection(remoting, LANE_SEND) as connection:
                answer = connection.call(SEND_METHOD_ID, (payload,))
                accepted = time.perf_counter()
                response = send_service_pb2.SendResponse.FromString(answer)
                if response.status == send_service_pb2.SEND_STATUS_SEND_OK:
                    return accepted
                last = f"status {response.status}"
        except (OSError, RuntimeError) as error:
            last = str(error)
        time.sleep(0.005)
    raise RuntimeError(f"no send was accepted: {last}")
