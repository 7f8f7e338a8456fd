"""PullService: reads messages and holds pulls that find none.

An answer is a header and regions of the log as they stand on disk. The service opens records only to make plain bodies, on other threads
(`plain_body_workers.py`). It runs on several lanes; each lane has its own holds (`holds.py`).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, cast

from protomq.v1.consumer_service_pb2 import QueueOffset
from protomq.wire.hashing import tag_code_of
from protomq.wire.record import NOT_IN_TAGS
from protomq.wire.topics import QUEUES_MAX
from protomq_ha.roles import BrokerRole
from protomq_ha.slave_reads import MASTER_ID, SlaveReads
from protomq_runtime.dispatch import raw
from protomq_runtime.errors import ServiceError, invalid_argument, too_many
from protomq_runtime.regions import read_regions

from .filter_searches import key_of
from .filtered_pulls import FilteredPulls
from .forks import fork_answer
from .found_log import FoundLog
from .group_members import MEMBER_SIZE_MAX, GroupMembers
from .holds import Hold, LaneHolds, QueueKey
from .plain_bodies import with_plain_bodies
from .plain_body_workers import PlainBodyWorkers
from .pull_answer import (
    RECORD_COUNT_DEFAULT,
    SIZE_DEFAULT_BYTES,
    Found,
    encode_header,
    end_position,
    nothing_yet,
)
from .pull_requests import complete, parse_request, shortened_hold_ms
from .pull_resets import reset_answer
from .slave_gate import check_not_behind, not_master
from .store.errors import StoreError
from .store.log.durations import Durations
from .store.queues.reading import ReadResult, ReadStatus
from .store.state.offsets import TooManyGroupsError
from .store_errors import to_service_error
from .topic_access import (
    check_committed_offset,
    check_group_name,
    check_incarnation,
    check_read_queue,
    group_disabled,
    read_one_incarnation,
    readable_topic,
)

if TYPE_CHECKING:
    from protomq.v1.pull_service_pb2 import PullRequest
    from protomq_ha.replicas import ReplicaView
    from protomq_runtime.call import Call, CallLane
    from protomq_runtime.clock import Clock
    from protomq_runtime.regions import Region

    from .config import BrokerConfig
    from .filter_modules import FilterModules
    from .filters.filter_book import Filter
    from .offset_commits import OffsetCommits
    from .store.state.topics import TopicConfig
    from .store.store import Store

RECORD_COUNT_MAX = 32_768
SIZE_MAX_BYTES = 16 << 20
TAGS_MAX = 256
_NO_TAGS: Final[frozenset[int]] = frozenset()
HOLD_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0)
"""Bucket bounds in seconds, from a busy queue to the longest hold."""
QUIET_HOLDS: Final = 2
"""A quiet hold lasts that many of the longest other holds at most."""
QUIET_PARTS: Final = 64
"""A quiet hold ends this part of itself earlier at most."""
SKIPPED_HOLD_MS = 1_000
"""A hold that has skipped messages which do not match ends after this time: the caller learns its offset, and its lag falls."""

class PullService:
    """Implements protomq.v1.PullService. `signal` may be called by any thread, the rest by the pull lanes."""

    def __init__(
        self,
        store: Store,
        config: BrokerConfig,
        commits: OffsetCommits,
        modules: FilterModules,
        clock: Clock,
        slaves: Callable[[], Sequence[ReplicaView]] = tuple,
    ) -> None:
        """`slaves`: those that follow this broker, as of the last look."""
        self._slaves = slaves
        lag_max_bytes = round(memory_size_bytes() * config.ha.slave_read_memory_ratio)
        self._slave_reads = SlaveReads(config.broker_id, lag_max_bytes if config.ha.slave_read_enabled else None)
        self._store = store
        self._groups = store.groups
        self._commits = commits
        self._config = config
        self._found = FoundLog(store)
        self.members = GroupMembers(clock)
        self.hold_durations = Durations(HOLD_BOUNDS_S)
        """Time from the hold of a pull until its answer, or until its caller is gone."""
        self._monotonic = clock.monotonic
        self._holds: dict[CallLane, LaneHolds] = {}
        self._plain_bodies = PlainBodyWorkers(config.lanes.pull_threads)
        self._filtered = FilteredPulls(
            store, self._topic_of, modules, clock.monotonic, self._fail, self._check_news
        )
        self._stopping = False
        # Once, not for each hold.
        self._on_expiry, self._on_drop = self._expire, self._drop

    @raw
    def pull(self, call: Call) -> None:
        """Answers with messages, or holds the call."""
        try:
            request, tag_codes = self._read_request(call)
            if request.filter_type:
                filter_key = key_of(request)
                if filter_key is not None:
                    take = partial(self._take_found, call, request, tag_codes)
                    self._filtered.begin(call, request, filter_key, take)
                    return
        except Exception as error:
            call.fail(to_service_error(error))
            return
        try:
            found = self._look(request, request.queue_offset, tag_codes)
        except Exception as error:
            self._fail(call, request, to_service_error(error))
            return
        self._take_found(call, request, tag_codes, found)

    def _fail(self, call: Call, request: PullRequest, error: ServiceError) -> None:
        """Answers with an error; whoever stands at damage and must go on elsewhere learns that instead."""
        answer = None
        topic = self._store.topics.find(request.topic)
        if topic is not None and error.reason in ("CORRUPT_LOG", "QUEUE_HEALING"):
            with contextlib.suppress(StoreError):
                answer = self._detour(request, topic.incarnation)
        if answer is None:
            call.fail(error)
        else:
            call.answer(answer)

    def _detour(self, request: PullRequest, incarnation: int) -> bytes | None:
        """Returns the answer to a pull that must go on elsewhere than at its offset; None if it need not.

        Asked after the look: before it, a follower may not yet have heard of the epoch of what the look finds.
        """
        fork = fork_answer(self._store, request, incarnation)
        return fork or reset_answer(self._store, request, incarnation)

    def _take_found(
        self,
        call: Call,
        request: PullRequest,
        tag_codes: frozenset[int],
        found: Found,
        filter_: Filter | None = None,
    ) -> None:
        """Answers with what was found, or holds the call."""
        try:
            answer = self._detour(request, found.incarnation)
            if answer is not None:
                call.answer(answer)
                return
            if request.HasField("commit_offset"):
                self._commit(request, found.incarnation)
        except Exception as error:
            call.fail(to_service_error(error))
            return
        group, hold_ms = request.consumer_group, self._hold_ms(call, request)
        if group:
            member = sys.intern(request.member)
            self.members.seen(group, member or call.peer, hold_ms)
            if member:
                self.members.pulled(_queue_of_group(request), member, hold_ms)
        if hold_ms > 0 and not self._stopping and nothing_yet(found.result):
            self._hold(call, request, hold_ms, tag_codes, found, filter_)
        else:
            self._answer(call, request, found)

    def signal(self, keys: Iterable[QueueKey]) -> None:
        """Called when messages of these queues have become readable. Any thread."""
        for holds in tuple(self._holds.values()):
            holds.signal(keys)

    def signal_deleted(self, topic: str) -> None:
        """Answers the pulls that wait for messages of a deleted topic."""
        self.signal([(topic, queue_id) for queue_id in range(QUEUES_MAX)])

    def signal_group(self, group: str) -> None:
        """Refuses the waiting pulls of a group whose new settings forbid it to consume. Any thread."""
        for lane, holds in tuple(self._holds.items()):
            lane.post(partial(self._refuse_disabled, holds, group))

    def signal_reset(self, group: str) -> None:
        """Answers waiting pulls of a group whose offsets were reset. Any thread."""
        for lane, holds in tuple(self._holds.items()):
            lane.post(partial(self._answer_resets, holds, group))

    def forget_module(self, name: str) -> None:
        """Forgets a filter module that was replaced or deleted. Any thread."""
        self._filtered.forget_module(name)

    @property
    def failed_filter_count(self) -> int:
        """How often a module of a user has failed at a message."""
        return self._filtered.failed_count

    def stop(self) -> None:
        """Answers all holds with what they have; from now on no pull is held. The server calls it when it stops; any thread."""
        self._stopping = True
        self._filtered.stop()
        for lane, holds in tuple(self._holds.items()):
            lane.post(partial(self._release, holds))

    def close(self) -> None:
        """Ends the service's threads. Call it when no lane runs any more."""
        self._plain_bodies.close()
        self._filtered.close()

    def _refuse_disabled(self, holds: LaneHolds, group: str) -> None:
        if group in self._groups.disabled:
            for hold in holds.all():
                if hold.group == group:
                    self._look_again(hold)

    def _answer_resets(self, holds: LaneHolds, group: str) -> None:
        for hold in holds.all():
            if hold.group == group:
                self._answer_if_reset(hold, hold.request)

    def _answer_if_reset(self, hold: Hold, request: PullRequest) -> None:
        """Answers the hold if the offset from which it goes on was reset."""
        topic = self._store.topics.find(request.topic)
        if topic is None:  # Whoever deleted it sees to its holds.
            return
        try:
            answer = reset_answer(self._store, request, topic.incarnation)
        except Exception as error:
            self._drop(hold)
            hold.call.fail(to_service_error(error))
            return
        if answer is not None:
            self._drop(hold)
            hold.call.answer(answer)

    def _release(self, holds: LaneHolds) -> None:
        for hold in holds.all():
            self._expire(hold)

    def _read_request(self, call: Call) -> tuple[PullRequest, frozenset[int]]:
        request = parse_request(call)
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
        request.hold_ms = shortened_hold_ms(request.hold_ms, self._config.hold_max_ms)
        if len(request.member) > MEMBER_SIZE_MAX:
            raise invalid_argument("member", f"has at most {MEMBER_SIZE_MAX} characters")
        complete(call, request)
        if len(request.tags) > TAGS_MAX:
            raise invalid_argument("tags", f"at most {TAGS_MAX}")
        wrong = next(filter(NOT_IN_TAGS.search, request.tags), None)
        if wrong is not None:
            raise invalid_argument(
                "tags", f"no message has the tag {wrong!r}: give the tags one by one, without ||"
            )
        if (
            request.consumer_group
            or request.HasField("commit_offset")
            or request.HasField("reset_epoch")
        ):
            check_group_name(request.consumer_group)
        if request.HasField("commit_offset"):
            if self._config.role is BrokerRole.SLAVE:
                raise not_master(self._config.broker_name, self._config.broker_id)
            topic = self._topic_of(request)
            check_committed_offset(self._store, topic, request.queue_id, request.commit_offset)
            if not self._store.offsets.has_room_for(request.consumer_group):
                raise TooManyGroupsError  # nobody would tell that the offset is not kept
        # An empty set of its own for each held pull would cost 216 octets.
        return request, frozenset(map(tag_code_of, request.tags)) if request.tags else _NO_TAGS

    def _topic_of(self, request: PullRequest) -> TopicConfig:
        disabled = self._groups.disabled
        if disabled and request.consumer_group in disabled:
            raise group_disabled(request.consumer_group)
        topic = readable_topic(self._store, request.topic)
        check_incarnation(topic, request.topic_incarnation)
        check_read_queue(topic, request.queue_id)
        return topic

    def _look(self, request: PullRequest, queue_offset: int, tag_codes: frozenset[int]) -> Found:
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
        if result.regions_size_bytes:
            self._store.count_read(topic.name, result)
        self._check_news(request, queue_offset, result)
        return Found(result, topic.incarnation)

    def _check_news(self, request: PullRequest, queue_offset: int, result: ReadResult) -> None:
        """Raises ServiceError for an offset that is illegal only as far as this broker knows yet. Or it stands behind messages that are
        appended and may not be read yet: a reset to the end does.
        """
        if result.status is ReadStatus.OFFSET_ILLEGAL and (
            self._lacks_news(request.log_epoch)
            or queue_offset <= self._store.appended_end_offset(request.topic, request.queue_id)
        ):
            check_not_behind(request.topic, request.queue_id, queue_offset, result.end_offset)

    def _lacks_news(self, log_epoch: int) -> bool:
        """Whether a master, or this broker in a moment, may be able to read further. Then an offset that is too high is not illegal
        (KIP-207). `log_epoch`: that the caller knows; if it is above ours, another one leads, and this broker has not learned it yet.
        """
        return (
            self._config.role is BrokerRole.SLAVE
            or log_epoch > self._store.last_epoch
            or not self._found.is_readable
        )

    def _commit(self, request: PullRequest, incarnation: int) -> None:
        """Hands the offset that the pull commits to the send lane, and does not wait for it."""
        offset = QueueOffset(
            topic=request.topic,
            queue_id=request.queue_id,
            queue_offset=request.commit_offset,
            topic_incarnation=incarnation,
        )
        if request.HasField("reset_epoch"):
            offset.reset_epoch = request.reset_epoch
        self._commits.commit_in_passing(request.consumer_group, offset)

    def _hold_ms(self, call: Call, request: PullRequest) -> int:
        """How long to hold the pull. Who reads from a slave is to look for the master again before long; over gRPC nobody can ask whether
        the broker is there.
        """
        hold_ms = request.hold_ms
        if request.quiet_hold_ms <= hold_ms or not hold_ms or call.transport != "remoting" or self._config.role is BrokerRole.SLAVE:
            return hold_ms
        return max(hold_ms, min(request.quiet_hold_ms, QUIET_HOLDS * self._config.hold_max_ms))

    def _hold(
        self,
        call: Call,
        request: PullRequest,
        hold_ms: int,
        tag_codes: frozenset[int],
        found: Found,
        filter_: Filter | None,
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
            (sys.intern(request.topic), request.queue_id),
            call,
            request,
            tag_codes,
            found.result.next_offset,
            self._monotonic(),
            filter_,
            on_expiry=self._on_expiry,
            on_drop=self._on_drop,
        )
        hold_s = call.hold_time_ms(hold_ms) / 1_000
        hold.ends_s = hold.began_s + hold_s
        is_quiet = hold_s * 1_000 > request.hold_ms
        if is_quiet:
            hold.ends_s = together_s(call.peer, hold.ends_s, hold_s)
        holds.add(hold)
        call.hold(hold)
        # Between the look and the entry of the hold a message may have arrived, or the topic was deleted, before anybody signalled this
        # hold.
        topic = self._store.topics.find(request.topic)
        if (
            topic is None
            or topic.incarnation != found.incarnation
            or self._store.queue_range(request.topic, request.queue_id)[1] > hold.queue_offset
        ):
            self._look_again(hold)
        if not call.answered:
            self._answer_if_reset(hold, request)
        # `stop` may have looked for holds before this lane had its first one. It says first that it stops.
        if self._stopping and not call.answered:
            self._expire(hold)
        if call.answered or hold.timer is not None:
            return
        if is_quiet and hold.queue_offset == hold.first_offset:
            call_later = partial(lane.call_later, self._left_ms(hold))
            holds.end_together(hold, round(hold.ends_s * 1_000), call_later)
        else:
            self._set_timer(hold)

    def _left_ms(self, hold: Hold) -> float:
        return max((hold.ends_s - self._monotonic()) * 1_000, 1.0)

    def _set_timer(self, hold: Hold) -> None:
        hold_ms = self._left_ms(hold)
        if hold.queue_offset > hold.first_offset:
            hold_ms = min(hold_ms, SKIPPED_HOLD_MS)
        hold.timer = hold.call.lane.call_later(hold_ms, hold.expire)

    def _wake(self, holds: LaneHolds, woken: Sequence[Hold]) -> None:
        """Answers the holds for which there are messages now. Holds that wait for the same share one look."""
        looks: dict[tuple[object, ...], Found] = {}
        filtered: dict[tuple[object, ...], list[Hold]] = {}
        for hold in woken:
            request = hold.request
            wanted = (
                hold.key, hold.queue_offset, hold.tag_codes, request.record_count_max, request.size_max_bytes,
                request.topic_incarnation, hold.filter,
            )  # fmt: skip
            if hold.filter is not None:
                filtered.setdefault(wanted, []).append(hold)
                continue
            found = looks.get(wanted)
            if found is None:
                found = self._look_for(hold, request)
                if found is None:
                    continue
                looks[wanted] = found
            self._answer_or_keep(hold, request, found)
        for group in filtered.values():
            self._filtered.search_for(group, self._end_search)

    def _end_search(self, hold: Hold, found: Found | ServiceError) -> None:
        """Takes the result of a search for a hold with a filter."""
        if isinstance(found, ServiceError):
            self._drop(hold)
            hold.call.fail(found)
        elif hold.is_expired or self._stopping:
            self._drop(hold)
            self._answer(hold.call, hold.request, found)
        else:
            self._answer_or_keep(hold, hold.request, found)

    def _look_again(self, hold: Hold) -> None:
        if hold.filter is not None:
            self._filtered.search_for([hold], self._end_search)
            return
        request = hold.request
        found = self._look_for(hold, request)
        if found is not None:
            self._answer_or_keep(hold, request, found)

    def _look_for(self, hold: Hold, request: PullRequest) -> Found | None:
        """Looks for messages for the hold. Returns None after an error; then the call has been answered with it."""
        try:
            return self._look(request, hold.queue_offset, hold.tag_codes)
        except Exception as error:
            self._drop(hold)
            hold.call.fail(to_service_error(error))
            return None

    def _answer_or_keep(self, hold: Hold, request: PullRequest, found: Found) -> None:
        if nothing_yet(found.result):
            is_first = hold.queue_offset == hold.first_offset < found.result.next_offset
            hold.queue_offset = found.result.next_offset
            if is_first:
                hold.cancel_timer()
                self._set_timer(hold)
            return
        self._drop(hold)
        self._answer(hold.call, request, found)

    def _expire(self, hold: Hold) -> None:
        if hold.filter is not None:
            hold.is_expired = True
            self._look_again(hold)
            return
        request = hold.request
        found = self._look_for(hold, request)
        if found is not None:
            self._drop(hold)
            self._answer(hold.call, request, found)

    def _drop(self, hold: Hold) -> None:
        if self._holds[hold.call.lane].remove(hold):
            self.hold_durations.observe(self._monotonic() - hold.began_s)
        hold.cancel_timer()

    def _suggested_broker(self, request: PullRequest, result: ReadResult) -> int:
        """Returns the id of the broker from which to pull next."""
        if result.next_offset >= result.end_offset:
            return MASTER_ID
        log_end = self._store.appended_position
        return self._slave_reads.suggest(request.queue_id, end_position(result), log_end, self._slaves())

    def _answer(self, call: Call, request: PullRequest, found: Found) -> None:
        result = found.result
        other = ""
        if request.member and request.consumer_group:
            other = self.members.other(_queue_of_group(request), request.member)
        epoch = self._store.last_epoch
        broker_id = self._suggested_broker(request, result)
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
                    header = encode_header(result, found.incarnation, epoch, other, broker_id)
                    return lambda: call.answer(header, regions, result.regions_size_bytes)
                payload = encode_header(plain[0], found.incarnation, epoch, other, broker_id) + plain[1]
                return lambda: call.answer(payload)

            self._plain_bodies.run(call, result.regions_size_bytes, unpack)
            return
        header = encode_header(result, found.incarnation, epoch, other, broker_id)
        call.answer(header, regions, result.regions_size_bytes)

    def _answer_anew(self, call: Call, request: PullRequest) -> None:
        filter_key = key_of(request) if request.filter_type else None
        if filter_key is not None:
            self._filtered.begin(
                call, request, filter_key, lambda found, _: self._answer(call, request, found)
            )
            return
        try:
            found = self._look(request, request.queue_offset, frozenset(map(tag_code_of, request.tags)))
        except Exception as error:
            call.fail(to_service_error(error))
        else:
            self._answer(call, request, found)


def together_s(peer: str, ends_s: float, hold_s: float) -> float:
    """When a quiet hold ends: a little earlier, together with others of its caller. These are answered, and made again, in one go.

    Each turn of a lane for a caller at rest costs more than a pull. Without this, pulls that are made together part more with each round.
    """
    grid_s = hold_s / QUIET_PARTS
    # Not all callers at once.
    phase_s = (hash(peer) & 0xFFFF) / 0x10000 * grid_s
    return ends_s - (ends_s - phase_s) % grid_s


def memory_size_bytes() -> int:
    """Returns the memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _queue_of_group(request: PullRequest) -> tuple[str, str, int]:
    return sys.intern(request.consumer_group), sys.intern(request.topic), request.queue_id
