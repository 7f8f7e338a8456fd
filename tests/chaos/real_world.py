"""L3: a real broker as a child process, producers and readers that use the SDK and the wire, one history.

Producers are honest: an error is `fail` only if the SDK says that it is definite. Readers pull raw regions and check every byte with
protobuf and CRC-32C. At the end of a round the store's files are copied and recovered aside, so that they can be checked each time.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

from google.protobuf.message import DecodeError

from protomq import Producer
from protomq._methods import (
    COMMIT_OFFSETS,
    CREATE_TOPIC,
    GET_BROKER_STATUS,
    GET_OFFSETS,
    GET_QUEUE_RANGE,
    PULL,
)
from protomq._transport import SyncTransport
from protomq._transport_options import TransportOptions
from protomq._types import BrokerAddress, MessageQueue, MethodInfo
from protomq.errors import BatchIncompleteError, ProtomqError, QueueHealingError
from protomq.testing import Broker
from protomq.v1.admin_service_pb2 import CreateTopicRequest, GetBrokerStatusResponse
from protomq.v1.consumer_service_pb2 import (
    CommitOffsetsRequest,
    GetOffsetsRequest,
    GetOffsetsResponse,
    GetQueueRangeRequest,
    GetQueueRangeResponse,
)
from protomq.v1.pull_service_pb2 import PullRequest, PullResponse, PullStatus
from protomq.v1.topic_pb2 import Topic
from protomq_broker.store.config import StoreConfig
from protomq_broker.store.store import Store
from protomq_runtime.clock import SystemClock
from tests.support.waiting import PATIENCE_S, wait_for

from .bodies import body_of, is_body_of, message_id
from .checker import (
    Promise,
    Violation,
    check_commits,
    check_history,
    check_store_files,
    is_whole,
    parse_log,
    records_in,
)
from .checker.log_files import read_files
from .checker.protoc import decode_with_protoc, why_not
from .history import History

HISTORIES: Final = Path(__file__).parents[2] / "build/chaos"
BROKER_NAME: Final = "chaos"
TOPIC: Final = "chaos-topic"
GROUP: Final = "chaos-group"
QUEUES: Final = 4
SEGMENT_SIZE_BYTES: Final = 1 << 20
DETECTED: Final = "detected"
"""Stands in place of the id of a record that is not what its CRC says: the SDK gives its user an error."""
HEALED_WITHIN_S: Final = 10.0
"""A queue of these small stores heals within one flush interval, 0.5 s; the machine may be busy."""
ASYNC_LOSS_NS: Final = 5_000_000_000
"""Flush interval of 500 ms, the sync itself, and a loaded machine."""


class RealWorld:
    """One broker, its clients, and what they know. `close` at the end."""

    def __init__(
        self,
        seed: int,
        *,
        sync_flush: bool,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        segment_size_bytes: int = SEGMENT_SIZE_BYTES,
    ) -> None:
        self.run = f"l3-{seed}"
        self.seed = seed
        self.rng = random.Random(seed)
        self.sync_flush = sync_flush
        self.segment_size_bytes = segment_size_bytes
        self.history = History()
        self.promise = Promise(suffix_loss=not sync_flush, loss_window_ns=ASYNC_LOSS_NS)
        self._temporary = None if folder else Path(tempfile.mkdtemp(prefix="protomq-chaos-"))
        self.folder = folder or self._temporary
        assert self.folder is not None
        self.environment = {
            "PROTOMQ_BROKER_NAME": BROKER_NAME,
            "PROTOMQ_STORE_SYNC_FLUSH": str(sync_flush).lower(),
            "PROTOMQ_STORE_SEGMENT_SIZE_BYTES": str(segment_size_bytes),
            "PROTOMQ_STORE_CHECKPOINT_INTERVAL_MS": "400",
            "PROTOMQ_STORE_DISK_DELETE_RATIO": "1.0",
            "PROTOMQ_STORE_DISK_FORCE_RATIO": "1.0",
            "PROTOMQ_STORE_DISK_REFUSE_RATIO": "1.0",
            **(environment or {}),
        }
        self.broker = self._new_broker()
        self._sequences: dict[str, int] = {}
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._transport = SyncTransport()

    def _new_broker(self) -> Broker:
        return Broker(data_dir=self.folder, environment=self.environment)

    # Life.

    @property
    def store_folder(self) -> Path:
        """The store's root."""
        assert self.folder is not None
        return self.folder / "store"

    @property
    def address(self) -> BrokerAddress:
        """Of the broker, past any proxy."""
        return BrokerAddress(BROKER_NAME, self.broker.grpc_address, self.broker.remoting_address)

    def start(self) -> None:
        """Starts the broker; the topic is there afterwards."""
        self.broker.start()
        self.history.epoch += 1
        self._transport.close()
        self._transport = SyncTransport()
        topic = CreateTopicRequest(topic=Topic(name=TOPIC, write_queues=QUEUES, read_queues=QUEUES))
        self._transport.call(self.address, CREATE_TOPIC, [topic.SerializeToString()], 10.0)

    def kill(self) -> None:
        """kill -9."""
        self.history.fact("crash", kind="kill", flushed=None)
        self.broker.kill()

    def stop(self) -> None:
        """SIGTERM, and the end of the process."""
        os.kill(self.broker.process_id, signal.SIGTERM)
        end = time.monotonic() + 20
        while self.broker.running and time.monotonic() < end:
            time.sleep(0.02)
        self.broker.kill()

    def renew_broker(self) -> None:
        """Another process, with what stands in `environment` now."""
        self.broker = self._new_broker()

    def pause(self, seconds: float) -> None:
        """SIGSTOP, a while, SIGCONT."""
        os.kill(self.broker.process_id, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(self.broker.process_id, signal.SIGCONT)

    def close(self) -> None:
        """Ends everything."""
        self.end_load()
        self._transport.close()
        if self.broker.running:
            self.broker.kill()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def rss_bytes(self) -> int:
        """Resident memory of the broker."""
        pages = int(Path(f"/proc/{self.broker.process_id}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    # Load.

    def begin_load(
        self,
        producers: int = 3,
        *,
        readers: int = 1,
        namesrv: str | None = None,
        timeout_s: float = 3.0,
        pace_s: float = 0.004,
    ) -> None:
        """Producers and readers run until `end_load`."""
        self._stopping.clear()
        address = namesrv or self.broker.namesrv
        for number in range(producers):
            arguments = (
                f"p{number}",
                address,
                timeout_s,
                pace_s,
                random.Random(self.rng.getrandbits(32)),
            )
            self._threads.append(
                threading.Thread(target=self._produce, args=arguments, daemon=True)
            )
        for number in range(readers):
            arguments_ = (f"r{number}", random.Random(self.rng.getrandbits(32)))
            self._threads.append(
                threading.Thread(target=self._follow, args=arguments_, daemon=True)
            )
        arguments_ = (f"c{self.history.epoch}", random.Random(self.rng.getrandbits(32)))
        self._threads.append(threading.Thread(target=self._commit, args=arguments_, daemon=True))
        for thread in self._threads:
            thread.start()

    def wait_for_sends(self, count: int) -> None:
        """Waits until this number of the load's sends is answered: on a busy machine its producers begin late."""
        events = self.history.events
        begin = len(events)
        wait_for(lambda: outcomes(events[begin:]).get("ok", 0) >= count, PATIENCE_S, pause_s=0.01)

    def end_load(self) -> None:
        """Waits until every operation has its end."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive(), "a client hangs"
        self._threads = []

    @contextmanager
    def load(self, **arguments: Any) -> Iterator[None]:
        """`begin_load` and `end_load`."""
        self.begin_load(**arguments)
        try:
            yield
        finally:
            self.end_load()

    def new_ids(self, process: str, count: int, rng: random.Random) -> list[str]:
        """Names for messages that nobody has sent."""
        first = self._sequences.get(process, 0)
        self._sequences[process] = first + count
        return [
            message_id(process, first + index, rng.choice((0, 1, 100, 1000, 8000)))
            for index in range(count)
        ]

    def _produce(
        self, process: str, namesrv: str, timeout_s: float, pace_s: float, rng: random.Random
    ) -> None:
        transport: Literal["auto", "grpc"] = rng.choice(("auto", "auto", "grpc"))
        with Producer(
            process, namesrv=namesrv, send_timeout_s=timeout_s, transport=transport
        ) as producer:
            while not self._stopping.is_set():
                self.send_once(producer, process, rng)
                time.sleep(pace_s * rng.random())

    def send_once(
        self, producer: Producer, process: str, rng: random.Random, *, count: int | None = None
    ) -> str:
        """One send, single, one-way or batch; how it ended."""
        count = count or rng.choice((1, 1, 1, 1, 3, 20))
        ids = self.new_ids(process, count, rng)
        queue = rng.choice((None, *range(QUEUES)))
        target = None if queue is None else MessageQueue(TOPIC, BROKER_NAME, queue)
        # Retries are recognised, so that a send with all of them is one attempt.
        call = self.history.invoke(process, "send", topic=TOPIC, queue=queue, ids=ids)
        try:
            if count == 1 and rng.random() < 0.1:
                producer.send_one_way(TOPIC, body_of(self.run, ids[0]), key=ids[0], queue=target)
                call.info("ONE_WAY")
                return "info"
            if count == 1:
                result = producer.send(TOPIC, body_of(self.run, ids[0]), key=ids[0], queue=target)
            else:
                batch = producer.send_batch(
                    TOPIC, [body_of(self.run, id_) for id_ in ids], keys=ids, queue=target
                )
                result = batch[0]
        except BatchIncompleteError as error:
            call.info(error.reason, error.message)
            return "info"
        except ProtomqError as error:
            if error.definite:
                call.fail(error.reason, error.message, error.code)
                return "fail"
            call.info(error.reason, error.message, error.code)
            return "info"
        physical = -1 if result.repeated_send else result.physical_offset
        call.ok(
            status=result.status.name,
            queue=result.queue.queue_id,
            offset=result.queue_offset,
            physical=physical,
            repeated=result.repeated_send,
        )
        return "ok"

    def _commit(self, process: str, rng: random.Random) -> None:
        """A consumer that commits, forward and back, anywhere in the queues."""
        with SyncTransport() as transport:
            while not self._stopping.is_set():
                queue = rng.randrange(QUEUES)
                try:
                    self._commit_once(process, queue, rng, transport)
                except (ProtomqError, KeyError):
                    if self._stopping.wait(0.02):
                        return
                time.sleep(0.004 * rng.random())

    def _commit_once(
        self, process: str, queue: int, rng: random.Random, transport: SyncTransport
    ) -> None:
        ranges = GetQueueRangeRequest(topic=TOPIC, queue_ids=[queue])
        answer = transport.call(self.address, GET_QUEUE_RANGE, [ranges.SerializeToString()], 2.0)
        end_offset = GetQueueRangeResponse.FromString(answer).ranges[0].end_offset
        request = CommitOffsetsRequest(consumer_group=GROUP)
        offset = rng.randint(0, end_offset)
        request.offsets.add(topic=TOPIC, queue_id=queue, queue_offset=offset)
        call = self.history.invoke(
            process, "commit", group=GROUP, topic=TOPIC, queue=queue, offset=offset
        )
        try:
            transport.call(self.address, COMMIT_OFFSETS, [request.SerializeToString()], 2.0)
        except ProtomqError as error:
            end = call.fail if error.definite else call.info
            end(error.reason, error.message, error.code)
            raise
        except KeyError:
            call.fail("CONNECT_FAILED")
            raise
        call.ok()

    def look_at_commits(self) -> None:
        """Reads what the group has committed; nobody commits meanwhile."""
        call = self.history.invoke("checker", "committed")
        request = GetOffsetsRequest(consumer_group=GROUP, topic=TOPIC)
        answer = self._transport.call(self.address, GET_OFFSETS, [request.SerializeToString()], 10)
        offsets = GetOffsetsResponse.FromString(answer).offsets
        call.ok(
            group=GROUP,
            topic=TOPIC,
            offsets=[[offset.queue_id, offset.queue_offset] for offset in offsets],
        )

    def forget_caches(self) -> None:
        """The broker is dead: all files go but the log, which says all that they do."""
        for path in self.store_folder.iterdir():
            if path.is_dir() and path.name != "commitlog":
                shutil.rmtree(path)
            elif path.is_file():
                path.unlink()

    def status(self) -> GetBrokerStatusResponse:
        """What the broker says of itself."""
        answer = self._transport.call(self.address, GET_BROKER_STATUS, [b""], 10.0)
        return GetBrokerStatusResponse.FromString(answer)

    # Reading.

    def _call_while_it_heals(
        self, transport: SyncTransport, method: MethodInfo, request: bytes, timeout_s: float
    ) -> bytes:
        """A call that is made again as long as the answer is that the queue heals, HEALED_WITHIN_S at most."""
        end = time.monotonic() + HEALED_WITHIN_S
        while True:
            try:
                return transport.call(self.address, method, [request], timeout_s)
            except QueueHealingError as error:
                if time.monotonic() > end:
                    raise
                time.sleep((error.retry_delay_ms or 50) / 1000)

    def _pull(
        self, request: PullRequest, transport: SyncTransport, timeout_s: float = 5.0
    ) -> tuple[PullResponse, bytes]:
        answer = transport.call(self.address, PULL, [request.SerializeToString()], timeout_s)
        return PullResponse.FromString(answer), answer

    def _pull_past_damage(
        self, request: PullRequest, transport: SyncTransport
    ) -> tuple[list[list[Any]], int]:
        """(records, offset to go on at); one by one where an answer does not parse. Raises ProtomqError."""
        try:
            answer = self._call_while_it_heals(transport, PULL, request.SerializeToString(), 15.0)
            response = PullResponse.FromString(answer)
            return self._seen(response, answer), response.next_offset
        except DecodeError:
            if request.record_count_max == 1:
                return [], request.queue_offset + 1
        request.record_count_max = 1
        return self._pull_past_damage(request, transport)

    def _seen(self, response: PullResponse, answer: bytes) -> list[list[Any]]:
        seen: list[list[Any]] = []
        octets = records_in(answer)
        for index, (record, raw) in enumerate(zip(response.records, octets, strict=True)):
            offset = (
                response.queue_offsets[index]
                if response.queue_offsets
                else response.first_offset + index
            )
            id_ = record.keys[0] if record.keys else "?"
            if not is_whole(raw, record.crc32c):
                id_ = DETECTED
            right = is_body_of(self.run, id_, record.body) and record.queue_offset == offset
            seen.append([offset, id_, right, record.store_time_ms, record.physical_offset])
        return seen

    def _follow(self, process: str, rng: random.Random) -> None:
        """A reader at the tail of every queue."""
        process = f"{process}.{self.history.epoch}.{rng.getrandbits(24)}"
        at = dict.fromkeys(range(QUEUES), 0)
        transport_name: Literal["auto", "grpc"] = rng.choice(("auto", "auto", "grpc"))
        with SyncTransport(TransportOptions(transport_name)) as transport:
            while not self._stopping.is_set():
                queue = rng.randrange(QUEUES)
                try:
                    at[queue] = self._poll(
                        process, queue, at[queue], transport, hold_ms=rng.choice((0, 0, 30))
                    )
                except (ProtomqError, KeyError):
                    if self._stopping.wait(0.02):
                        return

    def _poll(
        self, process: str, queue: int, offset: int, transport: SyncTransport, *, hold_ms: int
    ) -> int:
        request = PullRequest(
            topic=TOPIC, queue_id=queue, queue_offset=offset, record_count_max=500, hold_ms=hold_ms
        )
        call = self.history.invoke(process, "poll", topic=TOPIC, queue=queue, offset=offset)
        try:
            response, answer = self._pull(request, transport)
        except ProtomqError as error:
            call.info(error.reason, error.message, error.code)
            raise
        except KeyError:
            call.info("CONNECT_FAILED")
            raise
        if response.status == PullStatus.PULL_STATUS_OFFSET_ILLEGAL:
            call.info("CRASHED", "the queue is shorter than it was")
            self._stopping.wait(0.05)
            return offset
        call.ok(records=self._seen(response, answer), next=response.next_offset)
        return response.next_offset

    def scan(self, *, holes: bool = False) -> dict[str, Any]:
        """Reads everything there is, through the wire; nobody sends meanwhile."""
        call = self.history.invoke("checker", "scan")
        result = self.read_all(holes=holes)
        call.ok(**result)
        return result

    def read_all(self, *, holes: bool = False) -> dict[str, Any]:
        """As `scan`, beside others; nothing of it gets into the history."""
        queues = []
        for queue in range(QUEUES):
            request = GetQueueRangeRequest(topic=TOPIC, queue_ids=[queue])
            answer = self._call_while_it_heals(
                self._transport, GET_QUEUE_RANGE, request.SerializeToString(), 10.0
            )
            queue_range = GetQueueRangeResponse.FromString(answer).ranges[0]
            start, end = queue_range.min_offset, queue_range.end_offset
            records: list[list[Any]] = []
            lost: list[int] = []
            at = start
            while at < end:
                pull = PullRequest(
                    topic=TOPIC, queue_id=queue, queue_offset=at, record_count_max=2000
                )
                try:
                    seen, following = self._pull_past_damage(pull, self._transport)
                except ProtomqError as error:
                    if not holes or error.reason != "CORRUPT_LOG":
                        raise
                    seen, following = [], int(error.metadata.get("next_offset", at + 1))
                if following <= at:
                    break
                if holes:
                    given = {record[0] for record in seen}
                    lost += [
                        offset for offset in range(at, min(following, end)) if offset not in given
                    ]
                records += seen
                at = following
            queues.append(
                {
                    "topic": TOPIC,
                    "queue": queue,
                    "min": start,
                    "end": end,
                    "records": records,
                    "holes": lost,
                }
            )
        return {"queues": queues}

    # Checking.

    def check(self) -> list[Violation]:
        """The history so far; one that shows a violation is kept in build/chaos, since a busy machine does not do the same twice."""
        events = self.history.events
        found = check_history(events, self.promise) + check_commits(events, self.promise)
        if found:
            self.history.save(HISTORIES / f"{self.store_folder.parent.name}.jsonl")
        return found

    def check_files(self, *, rebuild: bool = False) -> tuple[list[Violation], bool]:
        """Recovers a copy of the store (the broker is dead) and checks its files; `rebuild`: again without what is derived.

        (What is wrong, whether protoc was there to parse the log.)
        """
        with tempfile.TemporaryDirectory(prefix="protomq-copy-") as name:
            copy = Path(name) / "store"
            shutil.copytree(self.store_folder, copy)
            recover_copy(copy, self.sync_flush, self.segment_size_bytes)
            files = read_files(copy)
            found = check_store_files(files)
            log = parse_log(files)
            parsed = not why_not()
            if parsed:
                parts = []
                for path in sorted(path for path in files if path.startswith("commitlog/")):
                    base = int(path.rpartition("/")[2])
                    part = files[path][: max(log.end - base, 0)]
                    count = sum(
                        base <= record.position < base + len(part) for record in log.records
                    )
                    parts.append((part, count))
                found += decode_with_protoc(parts)
            if rebuild:
                found += check_rebuild(copy, files, self.sync_flush, self.segment_size_bytes)
        return found, parsed


def recover_copy(folder: Path, sync_flush: bool, segment_size_bytes: int) -> None:
    """A start and a clean stop."""
    config = StoreConfig(segment_size_bytes=segment_size_bytes, sync_flush=sync_flush)
    Store.open(folder, config, clock=SystemClock(), background=False).close()


def check_rebuild(
    folder: Path, files: Mapping[str, bytes], sync_flush: bool, segment_size_bytes: int
) -> list[Violation]:
    """D3: without any derived file, a start makes byte-identical consume queues."""
    for name in ("consumequeue", "index", "repeatedsends"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "checkpoint").unlink(missing_ok=True)
    recover_copy(folder, sync_flush, segment_size_bytes)
    again = read_files(folder)
    found = [
        Violation("D3", f"{path} is not what it was")
        for path in sorted({*files, *again})
        if path.startswith("consumequeue/")
        and not path.endswith("table.bin")
        and files.get(path) != again.get(path)
    ]
    return found + check_store_files(again)


def outcomes(events: Sequence[Any]) -> dict[str, int]:
    """How many sends ended how."""
    counts: dict[str, int] = {}
    for event in events:
        if event.op == "send" and event.type != "invoke":
            name = "one-way" if event.result.get("reason") == "ONE_WAY" else event.type
            counts[name] = counts.get(name, 0) + 1
    return counts
