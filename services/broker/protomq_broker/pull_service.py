"""PullService: reads messages and holds pulls that find none.

An answer is a header and regions of the log as they stand on disk; no record is opened, but for plain bodies, on threads of their own
(`plain_body_workers.py`). It runs on several lanes; what a lane holds is its
own (`holds.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from protomq.v1.consumer_service_pb2 import QueueOffset
from protomq.v1.pull_service_pb2 import PullRequest, PullResponse, PullStatus
from protomq.wire.hashing import tag_code_of
from protomq.wire.record import NOT_IN_TAGS, encode_varint
from protomq_runtime.dispatch import raw
from protomq_runtime.errors import invalid_argument, too_many, unparsable
from protomq_runtime.regions import read_regions

from .group_members import GroupMembers
from .holds import Hold, LaneHolds, QueueKey
from .plain_bodies import with_plain_bodies
from .plain_body_workers import PlainBodyWorkers
from .store.log.durations import Durations
from .store.queues.reading import ReadResult, ReadStatus
from .store.state.topics import QUEUES_MAX
from .store_errors import to_service_error
from .topic_access import (
    check_committed_offset,
    check_group_name,
    check_incarnation,
    check_read_queue,
    read_one_incarnation,
    readable_topic,
)

if TYPE_CHECKING:
    from protomq_runtime.call import Call, CallLane
    from protomq_runtime.clock import Clock
    from protomq_runtime.regions import Region

    from .config import BrokerConfig
    from .offset_commits import OffsetCommits
    from .store.state.topics import TopicConfig
    from .store.store import Store

RECORD_COUNT_DEFAULT = 32
RECORD_COUNT_MAX = 32_768
SIZE_DEFAULT_BYTES = 4 << 20
SIZE_MAX_BYTES = 16 << 20
GRPC_SIZE_MAX_BYTES = SIZE_DEFAULT_BYTES - (512 << 10)
"""Of the messages in an answer over gRPC, whatever was asked for: with the index of up to 32,768 of them it is what a gRPC client accepts
by default, 4 MiB, and an answer is in memory as long as nobody reads it. One message is always given, also one that makes the answer
larger than 4 MiB."""
TAGS_MAX = 256
HOLD_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
"""From a queue that is busy to the longest hold."""
MEMBER_SIZE_MAX = 255

_STATUS = {
    ReadStatus.FOUND: PullStatus.PULL_STATUS_FOUND,
    ReadStatus.NO_NEW_MSG: PullStatus.PULL_STATUS_NO_NEW_MSG,
    ReadStatus.NO_MATCHED_MSG: PullStatus.PULL_STATUS_NO_MATCHED_MSG,
    ReadStatus.OFFSET_ILLEGAL: PullStatus.PULL_STATUS_OFFSET_ILLEGAL,
}


class _Found(NamedTuple):
    """What a look found, and the incarnation of the topic in which it did."""

    result: ReadResult
    incarnation: int


class PullService:
    """Implements protomq.v1.PullService. `signal` may be called by any thread, the rest by the pull lanes."""

    def __init__(
        self, store: Store, config: BrokerConfig, commits: OffsetCommits, clock: Clock
    ) -> None:
        self._store = store
        self._commits = commits
        self._config = config
        self.members = GroupMembers(clock)
        self.hold_durations = Durations(HOLD_BOUNDS_S)
        """From the hold of a pull until it is answered or its caller gone."""
        self._monotonic = clock.monotonic
        self._holds: dict[CallLane, LaneHolds] = {}
        self._plain_bodies = PlainBodyWorkers(config.lanes.pull_threads)
        self._stopping = False

    @raw
    def pull(self, call: Call) -> None:
        """Answers with messages, or holds the call."""
        try:
            request, tag_codes = self._read_request(call)
            found = self._look(request, request.queue_offset, tag_codes)
            if request.HasField("commit_offset"):
                self._commit(request, found.incarnation)
        except Exception as error:
            call.fail(to_service_error(error))
            return
        group = request.consumer_group
        if group:
            self.members.seen(group, request.member or call.peer, request.hold_ms)
        if request.member and group:
            self.members.pulled(_queue_of_group(request), request.member)
        if request.hold_ms > 0 and not self._stopping and _nothing_yet(found.result):
            self._hold(call, request, tag_codes, found)
        else:
            self._answer(call, request, found)

    def signal(self, keys: Iterable[QueueKey]) -> None:
        """Messages of these queues have become readable."""
        for holds in tuple(self._holds.values()):
            holds.signal(keys)

    def signal_deleted(self, topic: str) -> None:
        """The topic was deleted: who waits for its messages is answered."""
        self.signal([(topic, queue_id) for queue_id in range(QUEUES_MAX)])

    def stop(self) -> None:
        """Answers all holds with what there is; from now on nothing is held. Called by the server when it stops; any thread."""
        self._stopping = True
        for lane, holds in tuple(self._holds.items()):
            lane.post(partial(self._release, holds))

    def close(self) -> None:
        """Ends the threads of its own; no lane runs any more."""
        self._plain_bodies.close()

    def _release(self, holds: LaneHolds) -> None:
        for hold in holds.all():
            self._expire(hold)

    def _read_request(self, call: Call) -> tuple[PullRequest, frozenset[int]]:
        try:
            request = PullRequest.FromString(bytes(call.payload))
        except DecodeError as error:
            raise unparsable("protomq.v1.PullRequest") from error
        if request.queue_offset < 0:
            raise invalid_argument(
                "queue_offset", "must be 0 or above; ask GetQueueRange for the range"
            )
        if not 0 <= request.record_count_max <= RECORD_COUNT_MAX:
            raise invalid_argument(
                "record_count_max", f"must be 0 (for {RECORD_COUNT_DEFAULT}) to {RECORD_COUNT_MAX}"
            )
        if not 0 <= request.size_max_bytes <= SIZE_MAX_BYTES:
            raise invalid_argument(
                "size_max_bytes", f"must be 0 (for {SIZE_DEFAULT_BYTES}) to {SIZE_MAX_BYTES}"
            )
        if not 0 <= request.hold_ms <= self._config.hold_max_ms:
            raise invalid_argument("hold_ms", f"must be 0 to {self._config.hold_max_ms}")
        if len(request.member) > MEMBER_SIZE_MAX:
            raise invalid_argument("member", f"has at most {MEMBER_SIZE_MAX} characters")
        if len(request.tags) > TAGS_MAX:
            raise invalid_argument("tags", f"at most {TAGS_MAX}")
        wrong = next(filter(NOT_IN_TAGS.search, request.tags), None)
        if wrong is not None:
            raise invalid_argument(
                "tags", f"no message has the tag {wrong!r}: give the tags one by one, without ||"
            )
        if request.consumer_group or request.HasField("commit_offset"):
            check_group_name(request.consumer_group)
        if request.HasField("commit_offset"):
            topic = self._topic_of(request)
            check_committed_offset(self._store, topic, request.queue_id, request.commit_offset)
        if call.transport == "grpc" or request.plain_bodies:
            wanted = request.size_max_bytes or SIZE_DEFAULT_BYTES
            request.size_max_bytes = min(wanted, GRPC_SIZE_MAX_BYTES)
        return request, frozenset(map(tag_code_of, request.tags))

    def _topic_of(self, request: PullRequest) -> TopicConfig:
        topic = readable_topic(self._store, request.topic)
        check_incarnation(topic, request.topic_incarnation)
        check_read_queue(topic, request.queue_id)
        return topic

    def _look(self, request: PullRequest, queue_offset: int, tag_codes: frozenset[int]) -> _Found:
        result, topic = read_one_incarnation(
            self._store,
            lambda: self._topic_of(request),
            lambda topic: self._store.read(
                topic.name,
                request.queue_id,
                queue_offset,
                request.record_count_max or RECORD_COUNT_DEFAULT,
                request.size_max_bytes or SIZE_DEFAULT_BYTES,
                tag_codes,
            ),
        )
        return _Found(result, topic.incarnation)

    def _commit(self, request: PullRequest, incarnation: int) -> None:
        """Has the offset appended that the pull commits, and does not wait for it."""
        offset = QueueOffset(
            topic=request.topic,
            queue_id=request.queue_id,
            queue_offset=request.commit_offset,
            topic_incarnation=incarnation,
        )
        self._commits.commit_in_passing(request.consumer_group, offset)

    def _hold(
        self, call: Call, request: PullRequest, tag_codes: frozenset[int], found: _Found
    ) -> None:
        lane = call.lane
        holds = self._holds.get(lane)
        if holds is None:
            holds = self._holds[lane] = LaneHolds(lane.post, self._wake)
        limit = self._config.lanes.hold_max // self._config.lanes.pull_threads
        if lane.holds >= limit:
            message = f"{limit} pulls are held already; pull without a hold, or at another broker"
            call.fail(too_many("held pulls of a lane", limit, message, retry_delay_ms=1_000))
            return
        hold = Hold(
            (request.topic, request.queue_id),
            call,
            request,
            tag_codes,
            found.result.next_offset,
            self._monotonic(),
        )
        holds.add(hold)
        call.hold(lambda: self._drop(hold))
        # Between the look and the entry a message may have arrived, or the topic gone, that nobody signalled to us.
        topic = self._store.topics.find(request.topic)
        if (
            topic is None
            or topic.incarnation != found.incarnation
            or self._store.queue_range(request.topic, request.queue_id)[1] > hold.queue_offset
        ):
            self._look_again(hold)
        if not call.answered:
            hold_ms = call.hold_time_ms(request.hold_ms)
            hold.timer = lane.call_later(hold_ms, lambda: self._expire(hold))

    def _wake(self, holds: LaneHolds, woken: Sequence[Hold]) -> None:
        """Answers those for which there is something now. Many who wait for the same are looked up once."""
        looks: dict[tuple[object, ...], _Found] = {}
        for hold in woken:
            request = hold.request
            wanted = (
                hold.key, hold.queue_offset, hold.tag_codes, request.record_count_max, request.size_max_bytes,
                request.topic_incarnation,
            )  # fmt: skip
            found = looks.get(wanted)
            if found is None:
                found = self._look_for(hold)
                if found is None:
                    continue
                looks[wanted] = found
            self._answer_or_keep(hold, found)

    def _look_again(self, hold: Hold) -> None:
        found = self._look_for(hold)
        if found is not None:
            self._answer_or_keep(hold, found)

    def _look_for(self, hold: Hold) -> _Found | None:
        """What there is for the hold; None if that was an error, with which the call is answered then."""
        try:
            return self._look(hold.request, hold.queue_offset, hold.tag_codes)
        except Exception as error:
            self._drop(hold)
            hold.call.fail(to_service_error(error))
            return None

    def _answer_or_keep(self, hold: Hold, found: _Found) -> None:
        if _nothing_yet(found.result):
            hold.queue_offset = found.result.next_offset
            return
        self._drop(hold)
        self._answer(hold.call, hold.request, found)

    def _expire(self, hold: Hold) -> None:
        found = self._look_for(hold)
        if found is not None:
            self._drop(hold)
            self._answer(hold.call, hold.request, found)

    def _drop(self, hold: Hold) -> None:
        if self._holds[hold.call.lane].remove(hold):
            self.hold_durations.observe(self._monotonic() - hold.began_s)
        if hold.timer is not None:
            hold.timer.cancel()
            hold.timer = None

    def _answer(self, call: Call, request: PullRequest, found: _Found) -> None:
        result = found.result
        other = ""
        if request.member and request.consumer_group:
            other = self.members.other(_queue_of_group(request), request.member)
        # The store's regions have the same three fields as the runtime's: the store cannot import that one.
        regions = cast("list[Region]", result.regions)
        if request.plain_bodies and regions:
            size_max_bytes = request.size_max_bytes or SIZE_DEFAULT_BYTES

            def unpack() -> Callable[[], None]:
                if not self._store.regions_hold(result.regions):  # it waited for a worker meanwhile
                    return lambda: self._answer_anew(call, request)
                stored = b"".join(read_regions(regions))
                plain = with_plain_bodies(result, stored, size_max_bytes)
                if plain is None:
                    header = encode_header(result, found.incarnation, other)
                    return lambda: call.answer(header, regions, result.regions_size_bytes)
                payload = encode_header(plain[0], found.incarnation, other) + plain[1]
                return lambda: call.answer(payload)

            self._plain_bodies.run(call, result.regions_size_bytes, unpack)
            return
        header = encode_header(result, found.incarnation, other)
        call.answer(header, regions, result.regions_size_bytes)

    def _answer_anew(self, call: Call, request: PullRequest) -> None:
        try:
            found = self._look(request, request.queue_offset, frozenset(map(tag_code_of, request.tags)))
        except Exception as error:
            call.fail(to_service_error(error))
        else:
            self._answer(call, request, found)


def _queue_of_group(request: PullRequest) -> tuple[str, str, int]:
    return request.consumer_group, request.topic, request.queue_id


def encode_header(result: ReadResult, topic_incarnation: int, other_member: str = "") -> bytes:
    """The fields of a PullResponse that stand in front of the regions; the packed arrays are copied, not walked."""
    response = PullResponse(
        status=_STATUS[result.status],
        next_offset=result.next_offset,
        min_offset=result.min_offset,
        end_offset=result.end_offset,
        topic_incarnation=topic_incarnation,
        other_member=other_member,
    )
    if not result.regions_size_bytes:
        return response.SerializeToString()
    response.regions_size_bytes = result.regions_size_bytes
    response.first_offset = result.first_offset
    parts = [response.SerializeToString()]
    _append_packed(parts, b"\x4a", result.starts)  # 9, record_starts
    _append_packed(parts, b"\x52", result.sizes)  # 10, record_sizes
    if result.queue_offsets is not None:
        _append_packed(parts, b"\x5a", result.queue_offsets)  # 11
    return b"".join(parts)


def _append_packed(parts: list[bytes], tag: bytes, values: NDArray[Any]) -> None:
    data = values.tobytes()
    parts += (tag, encode_varint(len(data)), data)


def _nothing_yet(result: ReadResult) -> bool:
    """Whether a pull goes on waiting: at the end of the queue, or nothing that was there matched and the end is reached."""
    if result.status is ReadStatus.NO_NEW_MSG:
        return True
    return result.status is ReadStatus.NO_MATCHED_MSG and result.next_offset >= result.end_offset
