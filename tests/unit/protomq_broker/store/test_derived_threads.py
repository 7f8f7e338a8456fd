"""Readers, the writer and the flusher at the same time: readers never see half an entry, and nothing noted is lost."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from protomq_broker.store.files.disk import Disk
from protomq_broker.store.index.index import MessageIndex
from protomq_broker.store.log.append import AppendRequest
from protomq_broker.store.queues.consume_queue_table import ConsumeQueueTable
from tests.unit.protomq_broker.store.derived_helpers import Send, make_region

SIZE = 200


@pytest.fixture(autouse=True)
def eager_switches() -> Iterator[None]:
    """Threads change places every 10 microseconds."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def run_together(*works: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_readers_see_whole_entries_while_the_queue_grows_and_is_flushed(tmp_path: Path):
    table = ConsumeQueueTable(Disk(), str(tmp_path / "consumequeue"))
    table.load()
    queue = table.queue("t", 0)
    total = 60_000
    done = threading.Event()

    def write() -> None:
        rng = random.Random(1)
        position = 0
        while queue.end_offset < total or (  # the readers have to get a turn
            sum(map(bool, reads)) <= 10 and queue.end_offset < 20 * total
        ):
            request = AppendRequest(
                make_region(Send("t", 0, rng.choice([1, 1, 2, 50]), size=SIZE)),
                0,
                queue.end_offset,
                position,
            )
            table.apply([request])
            position += len(request.region.data)
        done.set()

    def flush() -> None:
        while not done.is_set():
            table.flush()
        table.checkpoint(1 << 40)

    def read() -> None:
        rng = random.Random(2)
        while not done.is_set():
            end = queue.end_offset
            start = rng.randrange(end + 1)
            count = rng.randint(1, 200)
            entries = queue.entries(start, count)
            assert len(entries) >= min(count, end - start)
            assert (entries["size"] >= SIZE).all()
            assert (np.diff(entries["position"].astype(np.int64)) == entries["size"][:-1]).all()
            reads.append(len(entries))

    reads: list[int] = []
    run_together(write, flush, read, read)
    assert sum(map(bool, reads)) > 10
    end = queue.end_offset
    whole = queue.entries(0, end)
    assert len(whole) == end
    table.flush()
    table.flush()
    assert not len(queue._buffer[1])
    assert queue.entries(0, end).tolist() == whole.tolist()
    table.close()


def test_nothing_noted_is_lost_while_the_index_is_flushed_and_searched(tmp_path: Path):
    index = MessageIndex(Disk(), str(tmp_path / "index"))
    index.load()
    total = 10_000
    done = threading.Event()

    def write() -> None:
        for number in range(total):
            records = 1 + number % 2
            region = make_region(Send("t", 0, records, 7, 0, 2 * number, key_hashes=[5] * records))
            index.apply([AppendRequest(region, 0, 0, 1000 * number)])
        done.set()

    def flush() -> None:
        while not done.is_set():
            index.flush()

    def search() -> None:
        seen = 0
        while not done.is_set():
            found = index.find_key(5, count_max=100_000)
            assert len(found) >= seen
            assert found == sorted(found, reverse=True)
            seen = len(found)

    run_together(write, flush, search)
    assert len(index.find_key(5, count_max=100_000)) == total * 3 // 2
    index.close()
