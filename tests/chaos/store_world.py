"""L2: a store on a simulated disk, and what its callers know: every operation leaves its events in a history.

The world plays the broker: it asks `find_repeated` first, appends groups, and acknowledges when the promise of the flush mode holds.
Everything follows from the seed. A world can be forked onto a crash image, with all that its callers know.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError

from protomq._pull_answer import decode_records
from protomq._types import MessageQueue
from protomq.errors import ProtomqError
from protomq.v1.record_pb2 import Record, RecordBatch
from protomq.v1.state_pb2 import OffsetsRecord
from protomq.wire.hashing import key_hash_of, tag_code_of
from protomq.wire.record import RecordTemplate, encode_front, encode_record_field
from protomq.wire.topics import OFFSETS_TOPIC
from protomq_broker.store.config import StoreConfig
from protomq_broker.store.errors import (
    AppendTooLargeError,
    CorruptLogError,
    DiskFullError,
    StoreError,
    StoreFailedError,
)
from protomq_broker.store.log.append import AppendRequest
from protomq_broker.store.log.record_region import prove_region
from protomq_broker.store.queues.reading import ReadResult, ReadStatus, StoredPlace
from protomq_broker.store.queues.selection import NO_TAGS
from protomq_broker.store.state.send_errors import (
    RETRY_MAX_MS,
    ProducerIdTakenError,
    SendInFlightError,
    SendOutOfOrderError,
    SequenceExpiredError,
    TooManyProducersError,
)
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_broker.testing.simdisk import SimDisk

from .bodies import body_of, is_body_of, message_id
from .checker import Promise, Violation, check_history, check_store_files
from .history import Call, Event, History

ROOT: Final = "/s"
SEGMENT_SIZE_BYTES: Final = 4096
TOPICS: Final = ("orders", "payments")
GROUP: Final = "group"
QUEUES: Final = 2
ALL_QUEUES: Final = tuple((topic, queue) for topic in TOPICS for queue in range(QUEUES))
DETECTED: Final = "detected"
TAGS: Final = ("", "red", "blue")


class WorldClock:
    """A clock that moves when it is told, and may be set."""

    def __init__(self) -> None:
        self.wall_ms = 1_700_000_000_000
        self.passed_ms = 0

    def now_ms(self) -> int:
        """Wall clock."""
        return self.wall_ms

    def monotonic_ms(self) -> int:
        """Never jumps."""
        return self.passed_ms

    def monotonic(self) -> float:
        """The same in seconds."""
        return self.passed_ms / 1000

    def advance(self, milliseconds: int) -> None:
        """Time passes."""
        self.wall_ms += milliseconds
        self.passed_ms += milliseconds


@dataclass(slots=True)
class _Sender:
    """A producer: its id on the wire, its next sequence, and the last one that was acknowledged to it."""

    name: str
    producer_id: int
    next_sequence: int = 0
    acknowledged: int | None = None
    uncertain: list[_Order] = field(default_factory=list)
    shares_id: bool = False
    """Another producer has its id: what that one has stored says nothing of what was acknowledged to this one."""


@dataclass(slots=True)
class _Order:
    """A send that may be tried again with the same bytes."""

    sender: _Sender
    topic: str
    queue: int
    ids: list[str]
    first_sequence: int
    tag: str
    previous: int | None
    made_ms: int
    attempts: int = 0


class _Waiting:
    """Sends that are appended and wait for the disk."""

    __slots__ = ("call", "order", "position", "result")

    def __init__(self, position: int, call: Call, order: _Order, result: dict[str, Any]) -> None:
        self.position = position
        self.call = call
        self.order = order
        self.result = result


class _Commit(NamedTuple):
    """A commit of an offset: where it ends in the log; None: it was refused, and may be there all the same."""

    offset: int | None
    end_position: int | None


NOTHING_COMMITTED: Final = _Commit(None, 0)
StoreOpener = Callable[..., Store]


class StoreWorld:
    """See the module's docstring."""

    def __init__(
        self,
        seed: int,
        *,
        sync_flush: bool,
        disk: SimDisk | None = None,
        corruption: str = "refuse",
        opener: StoreOpener = Store.open,
    ) -> None:
        self.run = f"l2-{seed}"
        self.rng = random.Random(seed)
        self.sync_flush = sync_flush
        self.clock = WorldClock()
        self.disk = disk or SimDisk()
        self.opener = opener
        self.config = StoreConfig(
            segment_size_bytes=SEGMENT_SIZE_BYTES, sync_flush=sync_flush, checkpoint_interval_ms=1000, corruption=corruption,  # type: ignore[arg-type]
            disk_delete_ratio=1.0, disk_force_ratio=1.0, disk_refuse_ratio=1.0,
        )  # fmt: skip
        self.history = History()
        self.history.now_ns = self._tick
        self._ticks = 0
        self.senders = [_Sender(f"p{number}", self.rng.getrandbits(62) | 1) for number in range(3)]
        self.anonymous = _Sender("anon", 0)
        self.waiting: list[_Waiting] = []
        self.created: dict[str, int] = {}
        """Topics, and where the record ends that made each."""
        self.commits: dict[tuple[str, int], list[_Commit]] = {}
        """By queue: what the last start found, and the commits since."""
        self.kept_below: int | None = None
        """Up to where the last crash left the log for sure; None: all of it."""
        self.fallen_back: list[Violation] = []
        self.store: Store | None = None
        self.promise = Promise(suffix_loss=not sync_flush)
        self.lost_answers = 0.0
        """Share of the answers that do not arrive."""

    def _tick(self) -> int:
        self._ticks += 1
        return self._ticks

    # Life.

    def open(self) -> Store:
        """Starts the store; what that raises goes through."""
        self.store = self.opener(
            ROOT, self.config, clock=self.clock, disk=self.disk, background=False
        )
        self.history.epoch += 1
        self.store.positions.on_flushed.append(self._resolve)
        self._settle_commits(self.store)
        return self.store

    def close(self) -> None:
        """Stops it cleanly."""
        assert self.store is not None
        self.store.close()
        self._resolve(self.store.flushed_position)
        self.store = None

    def fork(self, kind: str, rng: random.Random, *, keep: float | None = None) -> StoreWorld:
        """A world after `kind` ("kill" or "power"): the image of the disk, and all that the callers know."""
        other = StoreWorld.__new__(StoreWorld)
        other.__dict__.update(self.__dict__)
        other.disk = self.disk.killed() if kind == "kill" else self.disk.crash(rng, keep=keep)
        other.rng = random.Random(rng.getrandbits(32))
        other.clock = WorldClock()
        other.clock.__dict__.update(self.clock.__dict__)
        other.history = History(events=list(self.history.events), epoch=self.history.epoch)
        other.history.now_ns = other._tick
        other.history._calls = self.history._calls
        senders = {
            id(sender): replace(sender, uncertain=[]) for sender in (*self.senders, self.anonymous)
        }
        other.senders = [senders[id(sender)] for sender in self.senders]
        other.anonymous = senders[id(self.anonymous)]
        for sender in self.senders:
            copy = senders[id(sender)]
            copy.uncertain = [replace(order, sender=copy) for order in sender.uncertain]
        for waiting in self.waiting:
            order = waiting.order
            owner = senders[id(order.sender)]
            if owner.producer_id:
                owner.uncertain.append(replace(order, sender=owner))
        other.waiting = []
        other.created = dict(self.created)
        flushed = self.store.flushed_position if self.store is not None else None
        if flushed is None and self._last_flushed is not None:
            flushed = self._last_flushed
        other.fallen_back = list(self.fallen_back)
        other.commits = {key: list(commits) for key, commits in self.commits.items()}
        if kind == "power":
            other.kept_below = flushed or 0
        other.store = None
        other.history.fact("crash", kind=kind, flushed=flushed)
        return other

    @property
    def _last_flushed(self) -> int | None:
        """What earlier crashes left for sure: it is durable all the same."""
        for event in reversed(self.history.events):
            if event.op == "crash":
                flushed: int | None = event.args.get("flushed")
                return flushed
        return None

    # Operations.

    def new_order(
        self,
        *,
        count: int = 1,
        size: int | None = None,
        sender: _Sender | None = None,
        topic: str | None = None,
    ) -> _Order:
        """A send that nobody has sent before."""
        rng = self.rng
        sender = sender or rng.choice((*self.senders, self.anonymous))
        sequence = sender.next_sequence
        sender.next_sequence += count
        ids = []
        for index in range(count):
            size_bytes = rng.choice((0, 1, 40, 120, 400)) if size is None else size
            ids.append(message_id(sender.name, sequence + index, size_bytes))
        return _Order(
            sender,
            topic or rng.choice(TOPICS),
            rng.randrange(QUEUES),
            ids,
            sequence,
            rng.choice(TAGS),
            sender.acknowledged,
            self.clock.passed_ms,
        )

    def send(self, orders: Sequence[_Order]) -> None:
        """Appends the orders as one group, as the send lane does."""
        assert self.store is not None
        store = self.store
        group: list[tuple[_Order, AppendRequest, Call]] = []
        for order in orders:
            call = self.history.invoke(
                order.sender.name, "send", topic=order.topic, queue=order.queue, ids=order.ids
            )
            request = self._request(order)
            try:
                found = self._find_repeated(order, request)
            except (SequenceExpiredError, SendOutOfOrderError) as error:
                call.info("SEQUENCE_EXPIRED", str(error))
                continue
            except ProducerIdTakenError as error:
                call.fail("PRODUCER_ID_TAKEN", str(error))
                continue
            except TooManyProducersError as error:
                (call.fail if order.attempts == 1 else call.info)("TOO_MANY", str(error))
                continue
            if found is None:
                group.append((order, request, call))
                continue
            result = {
                "status": "SEND_OK", "queue": found.queue_id, "offset": found.queue_offset, "repeated": True,
                "physical": found.physical_offset or -1,
            }  # fmt: skip
            self._acknowledge(_Waiting(store.appended_position, call, order, result))
        if not group:
            return
        try:
            end = store.append([request for _, request, _ in group])
        except DiskFullError as error:
            for _, _, call in group:
                call.fail("DISK_FULL", str(error))
            return
        except AppendTooLargeError as error:
            for _, _, call in group:
                call.fail("MESSAGE_TOO_LARGE", str(error))
            return
        except StoreFailedError as error:
            for order, _, call in group:
                call.info("STORE_FAILED", str(error))
                order.sender.uncertain.append(order)
            return
        for order, request, call in group:
            result = {
                "status": "SEND_OK",
                "queue": request.queue_id,
                "offset": request.queue_offset,
                "physical": request.physical_offset,
            }
            self._acknowledge(_Waiting(end, call, order, result))

    def _find_repeated(self, order: _Order, request: AppendRequest) -> StoredPlace | None:
        """As the SDK asks: what was never sent is sent as the first if the broker does not know what it has acknowledged."""
        assert self.store is not None
        order.attempts += 1
        try:
            return self.store.find_repeated(request, order.previous)
        except SendInFlightError:
            raise
        except (SequenceExpiredError, SendOutOfOrderError):
            order.sender.acknowledged = None
            if order.attempts > 1 or order.previous is None:
                raise
        order.previous = None
        return self.store.find_repeated(request)

    def _tell(self, waiting: _Waiting) -> None:
        """The answer goes out, and arrives or does not."""
        sender = waiting.order.sender
        if self.lost_answers and sender.producer_id and self.rng.random() < self.lost_answers:
            waiting.call.info("CONNECTION_LOST")
            sender.uncertain.append(waiting.order)
            return
        waiting.call.ok(**waiting.result)
        if sender.producer_id:
            sender.acknowledged = waiting.order.first_sequence + len(waiting.order.ids) - 1

    def _acknowledge(self, waiting: _Waiting) -> None:
        assert self.store is not None
        if not self.sync_flush or waiting.position <= self.store.flushed_position:
            self._tell(waiting)
        else:
            self.waiting.append(waiting)

    def _resolve(self, position: int) -> None:
        """The flushed position has moved, or never will."""
        assert self.store is not None
        left = []
        failed = bool(self.store.write_refusal)
        for waiting in self.waiting:
            if waiting.position <= position:
                self._tell(waiting)
            elif failed:
                waiting.call.info("STORE_FAILED")
                waiting.order.sender.uncertain.append(waiting.order)
            else:
                left.append(waiting)
        self.waiting = left

    def send_some(self, groups: int = 1) -> None:
        """Random sends."""
        for _ in range(groups):
            orders = [
                self.new_order(count=self.rng.choice((1, 1, 1, 2, 5)))
                for _ in range(self.rng.choice((1, 1, 2, 4)))
            ]
            self.send(orders)

    def retry_uncertain(self) -> None:
        """Sends again what nobody knows about, with the same sequences, as producers do. A first contact is tried for 15 minutes, and so is
        what has no id of its own.
        """
        for sender in self.senders:
            orders, sender.uncertain = sender.uncertain, []
            for order in orders:
                proves_itself = order.previous is not None and not sender.shares_id
                if proves_itself or self.clock.passed_ms - order.made_ms < RETRY_MAX_MS:
                    self.send([order])

    def flush(self) -> None:
        """Syncs the log."""
        assert self.store is not None
        self.store.flush()

    def checkpoint(self) -> None:
        """Writes a checkpoint; an error of the disk is housekeeping's to bear."""
        assert self.store is not None
        try:
            self.store.checkpoint()
        except OSError:
            pass

    def housekeeping(self) -> None:
        """A turn of the housekeeper, a while later."""
        assert self.store is not None
        self.clock.advance(self.rng.choice((10, 600, 1500)))
        self.store._upkeep.keeper.turn()

    def delete_old(self, count: int = 2) -> None:
        """Retention: the oldest segments go."""
        assert self.store is not None
        below = self.store.min_position + count * SEGMENT_SIZE_BYTES
        if below >= self.store.flushed_position:
            return
        self.history.fact("delete", below=below)
        try:
            self.store.delete_segments_below(below)
        except OSError:
            pass

    @staticmethod
    def topic_config(name: str) -> TopicConfig:
        """A topic with the queues of this world."""
        return TopicConfig(name, write_queues=QUEUES, read_queues=QUEUES)

    def create_topic(self) -> None:
        """A topic of a new name."""
        assert self.store is not None
        name = f"t{self.rng.getrandbits(24)}"
        try:
            self.store.topics.create(TopicConfig(name))
            if self.sync_flush:
                self.store.flush()
        except (StoreError, OSError):
            return
        self.created[name] = self.store.appended_position

    def commit_offsets(self) -> None:
        """A consumer group commits."""
        topic, queue = self.rng.choice(TOPICS), self.rng.randrange(QUEUES)
        self.commit_offset(topic, queue, self.rng.randrange(50))

    def commit_offset(self, topic: str, queue: int, offset: int) -> None:
        """A consumer group commits in a queue; the topic is made if it is not there."""
        assert self.store is not None
        end_position = None
        try:
            config = self.store.topics.find(topic) or self.store.topics.create(
                self.topic_config(topic)
            )
            record = OffsetsRecord()
            record.commits.add(consumer_group=GROUP).offsets.add(
                topic=topic,
                queue_id=queue,
                queue_offset=offset,
                topic_incarnation=config.incarnation,
            )
            end_position = self.store.append_state(OFFSETS_TOPIC, [record.SerializeToString()])
        except (StoreError, OSError):
            pass
        commits = self.commits.setdefault((topic, queue), [NOTHING_COMMITTED])
        commits.append(_Commit(offset, end_position))

    def committed(self, topic: str, queue: int) -> int | None:
        """What the group is told."""
        assert self.store is not None
        config = self.store.topics.find(topic)
        incarnation = config.incarnation if config is not None else 0
        return self.store.offsets.find(GROUP, topic, incarnation, queue)

    def _settle_commits(self, store: Store) -> None:
        """After a start: a commit that was there for sure has not fallen back (C3). From here on what is there counts."""
        for (topic, queue), commits in self.commits.items():
            found = self.committed(topic, queue)
            sure, *later = (commit.offset for commit in _surviving(commits, self.kept_below))
            if found not in (sure, *later):
                self.fallen_back.append(
                    Violation(
                        "C3",
                        f"the offset of {topic}/{queue} is {found}; {sure} was committed, then perhaps {later}",
                    )
                )
            self.commits[topic, queue] = [_Commit(found, 0)]
        if self.kept_below is not None:  # later ones are there or not, as far as the log goes
            self.created = {
                name: position
                for name, position in self.created.items()
                if position <= self.kept_below
            }
        self.kept_below = None

    # Reading.

    def records_of(self, result: ReadResult) -> list[list[Any]]:
        """What the checker wants to know of the records that were read."""
        data = b"".join(
            region.file.read(region.offset, region.size_bytes) for region in result.regions
        )
        offsets = (
            result.queue_offsets.tolist()
            if result.queue_offsets is not None
            else range(result.first_offset, result.first_offset + result.record_count)
        )
        seen: list[list[Any]] = []
        for start, size, offset in zip(
            result.starts.tolist(), result.sizes.tolist(), offsets, strict=True
        ):
            seen.append(seen_of(self.run, offset, data[start : start + size]))
        return seen

    def poll(self, topic: str, queue: int, offset: int, *, process: str = "r1") -> None:
        """One read."""
        assert self.store is not None
        call = self.history.invoke(process, "poll", topic=topic, queue=queue, offset=offset)
        result = self.store.read(
            topic, queue, offset, self.rng.choice((1, 7, 64)), self.rng.choice((1, 900, 1 << 20))
        )
        call.ok(records=self.records_of(result), next=result.next_offset)

    def poll_random(self) -> None:
        """A reader looks somewhere."""
        assert self.store is not None
        topic, queue = self.rng.choice(TOPICS), self.rng.randrange(QUEUES)
        low, high = self.store.queue_range(topic, queue)
        if low < high:
            self.poll(
                topic, queue, self.rng.randrange(low, high), process=f"r{len(self.history.events)}"
            )

    def scan(self) -> None:
        """Reads all there is."""
        assert self.store is not None
        store = self.store
        call = self.history.invoke("checker", "scan")
        queues = []
        for topic in TOPICS:
            for queue in range(QUEUES):
                start, end = store.queue_range(topic, queue)
                records: list[list[Any]] = []
                holes: list[int] = []
                at = start
                while at < end:
                    try:
                        result = store.read(topic, queue, at, 100, 1 << 20)
                    except CorruptLogError as error:
                        following = error.next_offset if error.next_offset > at else at + 1
                        holes += range(at, min(following, end))
                        at = following
                        continue
                    if result.status is ReadStatus.FOUND:
                        seen = self.records_of(result)
                        given = [record[0] for record in seen]
                        holes += (
                            [
                                missing
                                for missing in range(at, result.next_offset)
                                if missing not in given
                            ]
                            if self.promise.holes
                            else []
                        )
                        records += seen
                    elif self.promise.holes and result.status is ReadStatus.NO_MATCHED_MSG:
                        holes += range(at, result.next_offset)
                    else:
                        break
                    if result.next_offset <= at:
                        break
                    at = result.next_offset
                queues.append(
                    {
                        "topic": topic,
                        "queue": queue,
                        "min": start,
                        "end": end,
                        "records": records,
                        "holes": holes,
                    }
                )
        call.ok(queues=queues)

    def check_look_ups(self) -> list[Violation]:
        """Every readable message is found by its key, and by its id (D3)."""
        assert self.store is not None
        found: list[Violation] = []
        records = [
            (queue["topic"], queue["queue"], *record)
            for queue in self.history.events[-1].result["queues"]
            for record in queue["records"]
        ]
        for topic, queue, offset, id_, *_ in self.rng.sample(records, min(6, len(records))):
            by_key = [
                Record.FromString(data)
                for data in self.store.find_by_key_hash(topic, key_hash_of(id_))
            ]
            if not any(
                (r.topic, r.queue_id, r.queue_offset) == (topic, queue, offset) for r in by_key
            ):
                found.append(
                    Violation("D3", f"{id_} at {topic}/{queue}@{offset} is not found by its key")
                )
        return found

    def check_filters(
        self, queues: Sequence[tuple[str, int]] = ALL_QUEUES, tags: Sequence[str] = TAGS[1:]
    ) -> list[Violation]:
        """A filter by a tag gives every message that has it, and no other (B3). What the log has put into quarantine is skipped."""
        assert self.store is not None
        found: list[Violation] = []
        for topic, queue in queues:
            start, end = self.store.queue_range(topic, queue)
            for tag in tags:
                wanted = [
                    r.queue_offset for r in self._records(topic, queue, start, end) if r.tag == tag
                ]
                codes = frozenset((tag_code_of(tag),))
                given = [r.queue_offset for r in self._records(topic, queue, start, end, codes)]
                if wanted != given:
                    found.append(
                        Violation(
                            "B3",
                            f"the filter {tag!r} gives {given} of {topic}/{queue}, it is the tag of {wanted}",
                        )
                    )
        return found

    def _records(
        self, topic: str, queue: int, start: int, end: int, tag_codes: frozenset[int] = NO_TAGS
    ) -> list[Record]:
        """The records of a queue that a reader gets, with a filter or without; those that no longer parse are left out."""
        assert self.store is not None
        records: list[Record] = []
        while start < end:
            try:
                result = self.store.read(topic, queue, start, 100, 1 << 20, tag_codes)
            except CorruptLogError as error:
                start = max(error.next_offset, start + 1)
                continue
            data = b"".join(
                region.file.read(region.offset, region.size_bytes) for region in result.regions
            )
            for at, size in zip(result.starts.tolist(), result.sizes.tolist(), strict=True):
                with suppress(DecodeError):
                    records += RecordBatch.FromString(data[at : at + size]).records
            if result.next_offset <= start:
                break
            start = result.next_offset
        return records

    def check_settings(self) -> list[Violation]:
        """Topics that were created and offsets that were committed are there."""
        assert self.store is not None
        found = [
            Violation("C3", f"topic {name} is gone")
            for name in sorted(self.created)
            if self.store.topics.find(name) is None
        ]
        for (topic, queue), commits in self.commits.items():
            actual = self.committed(topic, queue)
            latest = next(c.offset for c in reversed(commits) if c.end_position is not None)
            if actual != latest:
                found.append(
                    Violation("C3", f"the offset of {topic}/{queue} is {actual}, not {latest}")
                )
        return found + self.fallen_back

    def verify(
        self, *, files: bool = True, skips: dict[int, tuple[int, int]] | None = None
    ) -> list[Violation]:
        """Opens if need be, reads everything, goes on for a bit, closes, and checks history and files."""
        try:
            store = self.store or self.open()
        except (StoreError, OSError) as error:
            return [Violation("D4", f"the start failed though nothing was damaged: {error!r}")]
        self.scan()
        found = self.check_look_ups() + self.check_settings()
        found += self.check_filters((self.rng.choice(ALL_QUEUES),), (self.rng.choice(TAGS[1:]),))
        if not store.write_refusal:
            self.retry_uncertain()
            self.send_some(2)
            self.flush()
            self.scan()
        synced = store.flushed_position
        self.close()
        if f"{ROOT}/abort" in self.disk.files(ROOT):  # only a start makes it well again
            return found + self.fork("kill", self.rng).verify(files=files, skips=skips)
        found += check_history(self.history.events, self.promise)
        if files:
            found += check_store_files(self.files(), synced=synced, skips=skips)
        return found

    def files(self) -> dict[str, bytes]:
        """The files of the store."""
        return {path[len(ROOT) + 1 :]: data for path, data in self.disk.files(ROOT).items()}

    def log_bytes(self) -> dict[str, bytes]:
        """The segments."""
        return self.disk.files(f"{ROOT}/commitlog")

    def _request(self, order: _Order) -> AppendRequest:
        template = RecordTemplate(order.topic, order.sender.producer_id, 0)
        records = []
        for index, id_ in enumerate(order.ids):
            front = encode_front((id_,), order.tag)
            records.append(
                template.encode(
                    body_of(self.run, id_),
                    order.first_sequence + index,
                    5,
                    key=id_,
                    tag=order.tag,
                    front=front,
                )
            )
        payload = b"".join(map(encode_record_field, records))
        region = prove_region(bytearray(payload), order.topic, [len(record) for record in records])
        assert region is not None
        return AppendRequest(region, order.queue)


def seen_of(run: str, offset: int, record_field: bytes) -> list[Any]:
    """A record field as the checker's `Seen`, through the SDK's eyes. What the SDK would not give to its user has the id DETECTED."""
    queue = MessageQueue("", "b", 0)
    try:
        message = decode_records(record_field, 0, (0,), (len(record_field),), (offset,), queue)[0]
        body, id_ = message.body, message.key
    except (ProtomqError, UnicodeDecodeError, IndexError):
        return [offset, DETECTED, False, 0, 0]
    right = is_body_of(run, id_, body) and message.queue_offset == offset
    return [offset, id_, right, message.store_time_ms, message.physical_offset]


class LogWatch(logging.Handler):
    """Counts what the store says: that every "sometimes" really happened."""

    SIGNS: Final = {
        "torn tail": "torn tail cut",
        "an fsync of the log failed": "fsync failed",
        "are rewritten and synced": "unsynced tail rewritten",
        "is rebuilt from the log": "derived rebuilt",
        "corrupt log": "quarantine",
        "topics are recovered from their queues": "topics recovered",
        "segments below": "segments deleted",
        "the log is truncated to": "log truncated",
        "clock: ": "clock doubted",
    }

    def __init__(self) -> None:
        super().__init__()
        self.fired: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        """logging's hook."""
        message = record.getMessage()
        for sign, name in self.SIGNS.items():
            if sign in message:
                self.fired[name] += 1


@contextmanager
def watch_log() -> Iterator[Counter[str]]:
    """Counts the store's messages, and keeps them off the terminal."""
    logger = logging.getLogger("protomq_broker.store")
    handler = LogWatch()
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield handler.fired
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


def last_scan(events: Sequence[Event]) -> dict[str, Any]:
    """What the last scan of a history saw."""
    for event in reversed(events):
        if event.op == "scan" and event.type == "ok":
            return event.result
    return {"queues": []}


def _surviving(commits: list[_Commit], flushed: int | None) -> list[_Commit]:
    """The last one that is there for sure, in front of the flushed position (None: all that was acknowledged is), and those after it."""
    sure = max(
        index
        for index, (_, end_position) in enumerate(commits)
        if end_position is not None and (flushed is None or end_position <= flushed)
    )
    return commits[sure:]
