"""Appends commits of consumer offsets to the log. A commit is an append like any other, and so is the deletion of a group.

Commits come from the consumer lane (CommitOffsets) and the pull lanes (a pull may commit an offset). The send lane appends all that have
arrived in one record, if they fit. A caller of CommitOffsets gets its answer when a send would get SEND_OK. It waits for the disk no longer
than a send; then it gets DEADLINE_EXCEEDED, not definite. A pull does not wait: the broker keeps the offset, and retries until it is in the
log.

A reset is a commit with its own epoch, in its own record. A member names the epoch that it knows. It learns of a newer one by its next
commit, whose offset is refused, or by its pull (`listen_for_resets`).

A member that began where a slave said (`began_offset`) knows nothing of what the group has committed since. Its offset is taken only if it
has done all from the group's offset on, and got further. So what was answered is not taken back.

A queue that the group pops goes on where its pops are, not at a committed offset. So a reset of it is a record of %SYS%POP too, in the same
append: nothing of the queue is open then (`popped_queue.py`). The commit is for members that pull: a group may change from pops to pulls.

While the send lane is blocked, for example by a disk that hangs, waiting commits are limited. Above ARRIVED_SIZE_MAX_BYTES further ones are
refused (SYSTEM_BUSY). Of offsets that pulls commit, the newest of PASSING_MAX queues are kept.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from protomq.v1.admin_service_pb2 import DeleteGroupResponse
from protomq.v1.consumer_service_pb2 import CommitOffsetsRequest, CommitOffsetsResponse, QueueOffset
from protomq.v1.state_pb2 import GroupsRecord, LocksRecord, OffsetsRecord, PoppedQueue, PopRecord
from protomq.wire.record import encode_varint
from protomq.wire.topics import GROUPS_TOPIC, LOCKS_TOPIC, OFFSETS_TOPIC, POP_TOPIC
from protomq_runtime.errors import system_busy

from .queue_locks import not_owned
from .said_once import SaidOnce
from .store.state.locks import LockKey, locks_record
from .store.state.offsets import OffsetKey, TooManyGroupsError
from .store.state.popped_queue import QueueOfGroup
from .store_errors import to_service_error
from .topic_access import check_incarnation, existing_topic, group_not_found

if TYPE_CHECKING:
    from protomq_runtime.call import Call, CallLane
    from protomq_runtime.errors import ServiceError
    from protomq_runtime.timers import Timer

    from .config import BrokerConfig
    from .member_commits import MemberCommits
    from .queue_locks import QueueLocks
    from .store.store import Store
    from .system_writer import SystemWriter
    from .waiting_answers import WaitingAnswers

log = logging.getLogger("protomq.broker")

RECORD_SIZE_BYTES = 256 << 10
"""Most bytes of commits in one record; the rest goes into the next one. The limit keeps one append on the send lane short."""
RETRY_INTERVAL_MS = 1_000
BUSY_RETRY_DELAY_MS = 100
ARRIVED_SIZE_MAX_BYTES = 32 << 20
"""Most bytes of commits that callers wait for and that the send lane has not appended: about a million offsets."""
COMMIT_OVERHEAD_BYTES = 1_000
"""Bytes that a waiting commit counts besides its own: an empty one costs memory, too."""
PASSING_MAX = 100_000
"""Most offsets kept from pulls while the log takes no appends. More are dropped, since no pull waits for them; the log says how many."""
PASSING_SLICE = 2_000
"""Most of these offsets that are examined for one record."""

_COMMITS_TAG = bytes((OffsetsRecord.COMMITS_FIELD_NUMBER << 3 | 2,))
_ANSWER = CommitOffsetsResponse().SerializeToString()
assert DeleteGroupResponse().SerializeToString() == _ANSWER, "both say nothing"


_NOTHING: Final[Mapping[OffsetKey, QueueOffset]] = {}


class _Commit(NamedTuple):
    """A commit to be appended; each offset names the incarnation of its topic. `call` waits for the answer; None: nobody waits.

    `is_reset`: members of the group must go on at these offsets. `resets`: offsets that were refused, because they were reset meanwhile;
    `kept`: because the group has others. `earlier`: what pulls had committed in its queues when it came; it is dropped once this commit
    is appended.
    """

    request: CommitOffsetsRequest
    call: Call | None
    is_reset: bool = False
    resets: Sequence[QueueOffset] = ()
    kept: Sequence[QueueOffset] = ()
    earlier: Mapping[OffsetKey, QueueOffset] = _NOTHING

    @property
    def is_compared(self) -> bool:
        """Whether it depends on all that was committed before, which has to be in the log."""
        return self.is_reset or any(offset.HasField("began_offset") for offset in self.request.offsets)


class OffsetCommits:
    """`commit`, `commit_in_passing` and `delete_group`: any thread. `close`: the broker. All else: the send lane."""

    def __init__(
        self,
        store: Store,
        writer: SystemWriter,
        waiting: WaitingAnswers,
        config: BrokerConfig,
        locks: QueueLocks,
        members: MemberCommits,
    ) -> None:
        self._store = store
        self._locks = locks
        self._members = members
        self._config = config
        self._writer = writer
        self._waiting = waiting
        # Protects the next six fields; never held over an append.
        self._arriving = threading.Lock()
        self._arrived: deque[_Commit] = deque()
        self._arrived_size_bytes = 0
        self._is_posted = False
        self._passing: dict[OffsetKey, QueueOffset] = {}  # what pulls committed, newest only
        self._taken: dict[OffsetKey, QueueOffset] = {}
        """The part of `_passing` that this turn of the send lane appends. Offsets that come
        meanwhile go into `_passing`: they are newer.
        """
        self._dropped_count = 0  # since the last warning
        self._retry: Timer | None = None
        self._said = SaidOnce()
        self._tell_reset: Callable[[str], None] = lambda _: None
        self._tell_deleted: Callable[[str], None] = lambda _: None

    def listen_for_resets(self, listener: Callable[[str], None]) -> None:
        """Registers a listener, called on the send lane with a group once a reset of its offsets is stored. Call before the broker runs."""
        self._tell_reset = listener

    def listen_for_deletions(self, listener: Callable[[str], None]) -> None:
        """Registers a listener, called on the send lane with a group that was deleted. Call before the broker runs."""
        self._tell_deleted = listener

    def commit(
        self, request: CommitOffsetsRequest, call: Call, *, is_reset: bool = False
    ) -> None:
        """Appends the offsets and answers the call. `is_reset`: running members of the group must go on at these offsets."""
        # A few bytes may ask for a reset of thousands of queues.
        size_bytes = (request.ByteSize() if is_reset else len(call.payload)) + COMMIT_OVERHEAD_BYTES
        with self._arriving:
            has_room = self._arrived_size_bytes + size_bytes <= ARRIVED_SIZE_MAX_BYTES
            if has_room:
                self._arrived_size_bytes += size_bytes
                self._arrived.append(_Commit(request, call, is_reset, earlier=self._passing_in(request)))
        if has_room:
            self._post()
        else:
            call.fail(system_busy("send", BUSY_RETRY_DELAY_MS))

    def commit_in_passing(self, group: str, offset: QueueOffset) -> None:
        """Appends one offset for which nobody waits."""
        key = OffsetKey(group, offset.topic, offset.queue_id)
        with self._arriving:
            count = len(self._passing) + len(self._taken)
            if count < PASSING_MAX or key in self._passing:
                self._passing[key] = offset
            else:
                self._dropped_count += 1
        self._post()

    def delete_group(self, group: str, call: Call) -> None:
        """Appends a record that deletes the group with its offsets and settings, behind all that has arrived, and answers the call."""
        self._writer.post(partial(self._delete, group, call))

    def write(self) -> None:
        """Appends what has arrived by now. If that fails, each caller gets the error; offsets of pulls are kept.

        While the log takes no appends, offsets of pulls wait; the send lane tries once a second, however many pulls come.
        """
        with self._arriving:
            self._is_posted = False  # what arrives from here on posts again
            waiting, self._arrived = self._arrived, deque()
            self._arrived_size_bytes = 0
            if self._retry is None:
                self._taken, self._passing = self._passing, {}
        while waiting:
            self._append_waiting(waiting)
        while self._taken and self._append_passing():
            pass
        with self._arriving:
            self._passing = self._taken | self._passing  # what failed, unless a newer one has come
            self._taken = {}

    def close(self) -> None:
        """Appends the rest. Call it when no lane runs any more."""
        self._retry = None
        self.write()

    def _passing_in(self, request: CommitOffsetsRequest) -> Mapping[OffsetKey, QueueOffset]:
        """What pulls have committed in the queues of the request. Under the lock."""
        if not self._passing and not self._taken:
            return _NOTHING
        earlier = {}
        for offset in request.offsets:
            key = OffsetKey(request.consumer_group, offset.topic, offset.queue_id)
            found = self._passing.get(key) or self._taken.get(key)
            if found is not None:
                earlier[key] = found
        return earlier

    def _drop_passing(self, earlier: Mapping[OffsetKey, QueueOffset]) -> None:
        """Drops what pulls have committed, where it is still this: something later is in the log."""
        with self._arriving:
            for key, offset in earlier.items():
                for passing in (self._passing, self._taken):
                    if passing.get(key) is offset:
                        del passing[key]

    def _post(self) -> None:
        with self._arriving:
            is_posted, self._is_posted = self._is_posted, True
        if not is_posted:
            self._writer.post(self.write)

    def _delete(self, group: str, call: Call) -> None:
        self.write()
        with self._arriving:
            earlier = {key: offset for key, offset in self._passing.items() if key.group == group}
        deletion = _Commit(CommitOffsetsRequest(consumer_group=group), call)
        states = []
        if self._store.offsets.has_group(group):
            record = OffsetsRecord(deleted_groups=[group]).SerializeToString()
            states.append((OFFSETS_TOPIC, [record]))
        if self._store.groups.has_settings(group):
            record = GroupsRecord(deleted_groups=[group]).SerializeToString()
            states.append((GROUPS_TOPIC, [record]))
        if self._store.popped.has_group(group):
            record = PopRecord(deleted_groups=[group]).SerializeToString()
            states.append((POP_TOPIC, [record]))
        if self._store.locks.of_group(group):
            record = LocksRecord(deleted_groups=[group]).SerializeToString()
            states.append((LOCKS_TOPIC, [record]))
        if not states:
            # It may rest on a deletion that is not stored yet.
            self._answer_when_stored([deletion], self._store.appended_position, group_not_found(group))
            return
        try:
            position = self._writer.append_moved((), states)
        except Exception as error:
            _answer([deletion], error)
            return
        self._drop_passing(earlier)
        self._tell_deleted(group)
        self._answer_when_stored([deletion], position)

    def _append_waiting(self, waiting: deque[_Commit]) -> None:
        """Appends and answers the commits that fit into one record; takes at least one from `waiting`."""
        record = _Record(self._store, self._locks, self._members)
        while waiting and record.size_bytes < RECORD_SIZE_BYTES:
            # A commit names the last reset that it knows, which is compared with the log. So a reset needs its own record.
            if record.commits and waiting[0].is_compared:
                break
            commit = waiting.popleft()
            try:
                record.add(commit)
            except Exception as error:
                _answer([commit], error)
            if commit.is_reset:
                break
        try:
            position = record.append(self._writer)
        except Exception as error:
            _answer(record.commits, error)
            return
        for commit in record.commits:
            if commit.earlier:
                self._drop_passing(commit.earlier)
        self._answer_when_stored(record.commits, position)

    def _answer_when_stored(self, commits: Sequence[_Commit], position: int, refusal: Exception | None = None) -> None:
        """`refusal`: what the callers get then."""
        if self._waiting.is_stored(position):
            self._stored(commits, refusal, None)
            return
        for commit in commits:
            assert commit.call is not None
            wait_ms = commit.call.hold_time_ms(self._config.sync_flush_timeout_ms)
            stored = partial(self._stored, [commit], refusal)
            self._waiting.wait(self._writer.lane, position, wait_ms, stored)
        self._waiting.request_flush()

    def _stored(self, commits: Sequence[_Commit], refusal: Exception | None, error: Exception | None) -> None:
        _answer(commits, error or refusal)
        for commit in commits:
            if commit.is_reset:  # Appended it is, whatever the disk says: the members may know.
                group, count = commit.request.consumer_group, len(commit.request.offsets)
                log.info("the offsets of group %s were reset in %d queues", group, count)
                self._tell_reset(group)

    def _append_passing(self) -> bool:
        """Appends the offsets of pulls that fit into one record. Returns whether they are in the log; if not, they are tried again."""
        record = _Record(self._store, self._locks, self._members)
        with self._arriving:
            passing = list(islice(self._taken.items(), PASSING_SLICE))
        done: list[OffsetKey] = []
        for key, offset in passing:
            request = CommitOffsetsRequest(consumer_group=key.group, offsets=[offset])
            try:
                record.add(_Commit(request, None))
            except Exception as error:  # its topic has gone since, say, or other groups have come
                if self._said.is_due(key):
                    log.warning(
                        "an offset that group %s committed by a pull in queue %d of topic %s is refused: %s",
                        key.group, key.queue_id, key.topic, error,
                    )  # fmt: skip
            done.append(key)
            if record.size_bytes >= RECORD_SIZE_BYTES:
                break
        try:
            record.append(self._writer)
        except Exception as error:
            with self._arriving:
                kept_count = len(self._taken.keys() | self._passing.keys())
                dropped_count = self._dropped_count
                self._dropped_count = 0
            log.warning(
                "offsets that pulls committed are not in the log yet, %d of them, and %d were dropped since the last attempt: %s",
                kept_count, dropped_count, error,
            )  # fmt: skip
            self._retry_later()
            return False
        with self._arriving:
            for key in done:
                self._taken.pop(key, None)  # else a commit has come meanwhile
        return True

    def _retry_later(self) -> None:
        def retry() -> None:
            self._retry = None
            self.write()

        self._retry = self._writer.lane.call_later(RETRY_INTERVAL_MS, retry)


class _Record:
    """The commits of one record."""

    def __init__(self, store: Store, locks: QueueLocks, members: MemberCommits) -> None:
        self._store = store
        self._locks = locks
        self._members = members
        self._parts: list[bytes] = []
        self._groups: set[str] = set()
        self._popped: list[PoppedQueue] = []
        self._overtaken: set[LockKey] = set()
        """Queues whose locks end: others commit there, and the owner is not there. It must not go on from its own offset."""
        self.commits: list[_Commit] = []
        self.size_bytes = 0

    def add(self, commit: _Commit) -> None:
        """Adds the whole commit, unless it changes nothing. Raises ServiceError or TooManyGroupsError; then nothing of it is added.

        Only the holder of a queue's lock may commit in it, and who names a membership only in queues that it has. A reset comes from an
        operator, and is always taken.

        Offsets that name another reset than the last one are left out: `commits` has them as `resets`. It has as `kept` those that would
        take back what was committed.
        """
        store, request = self._store, commit.request
        group = request.consumer_group
        offsets = store.offsets
        is_known = group not in self._groups and not commit.is_reset
        resets: list[QueueOffset] = []
        kept: list[QueueOffset] = []
        taken: list[QueueOffset] = []
        popped: list[PoppedQueue] = []
        overtaken: set[LockKey] = set()
        # First: who commits in the topic before has lost no lock, but the topic.
        for offset in request.offsets:
            check_incarnation(existing_topic(store, offset.topic), offset.topic_incarnation)
        if not commit.is_reset:
            if request.HasField("member"):
                self._members.check(request)
                request.ClearField("member")  # It was needed for the check only.
            overtaken = self._check_locks(group, request.offsets)
        for offset in request.offsets:
            place = (group, offset.topic, offset.topic_incarnation, offset.queue_id)
            current = offsets.find(*place)
            epoch = offsets.reset_epoch(*place)
            if commit.is_reset:
                reset = self._reset_of_popped(group, offset)
                if reset is not None:
                    popped.append(reset)
                offset.reset_epoch = store.appended_position
            elif epoch and offset.HasField("reset_epoch") and offset.reset_epoch != epoch:
                assert current is not None, "only a committed offset has been reset"
                offset.queue_offset, offset.reset_epoch = current, epoch
                offset.lock_token = 0
                offset.ClearField("began_offset")
                resets.append(offset)
                continue
            elif epoch:
                offset.reset_epoch = epoch
            else:
                offset.ClearField("reset_epoch")
            if offset.HasField("began_offset"):
                is_news = current is None or offset.began_offset <= current <= offset.queue_offset
                offset.ClearField("began_offset")
                if not is_news:
                    assert current is not None
                    offset.queue_offset, offset.lock_token = current, 0
                    kept.append(offset)
                    continue
            taken.append(offset)
            is_known = is_known and offset.queue_offset == current
        if len(taken) < len(request.offsets):
            request = CommitOffsetsRequest(consumer_group=group, offsets=taken)
            left_out = {OffsetKey(group, offset.topic, offset.queue_id) for offset in (*resets, *kept)}
            earlier = {key: offset for key, offset in commit.earlier.items() if key not in left_out}
            commit = commit._replace(resets=resets, kept=kept, earlier=earlier)
            # Nothing is said of their queues: who has a lock there goes on.
            overtaken = {key for key in overtaken if OffsetKey(key.group, key.topic, key.queue_id) not in left_out}
        is_told = is_known or not taken
        if not is_told and group not in self._groups:
            new_count = sum(1 for other in self._groups if not offsets.has_group(other))
            # A group that pops is let in: its number is limited elsewhere, and what has piled up must be skippable.
            if not popped and not offsets.has_room_for(group, new_count):
                raise TooManyGroupsError
        self.commits.append(commit)
        self._popped += popped
        self._overtaken |= overtaken
        if is_told:
            return  # as it is: the answer waits for the record that said so, if that is not stored yet
        # The tokens were needed for the check only.
        for offset in taken:
            offset.lock_token = 0
        data = request.SerializeToString()
        self._groups.add(group)
        self._parts.append(_COMMITS_TAG + encode_varint(len(data)) + data)
        self.size_bytes += len(data)

    def _reset_of_popped(self, group: str, offset: QueueOffset) -> PoppedQueue | None:
        """What the log says of a reset to this offset; None if the group has never popped the queue."""
        state = self._store.popped
        with state.lock:
            known = state.find(QueueOfGroup(group, offset.topic, offset.queue_id), offset.topic_incarnation)
            return None if known is None else known.reset_to(offset.queue_offset)

    def _check_locks(self, group: str, offsets: Iterable[QueueOffset]) -> set[LockKey]:
        """Raises ServiceError QUEUE_NOT_OWNED if another member has the lock of a queue. Returns the locks that end if all is taken."""
        refused: list[tuple[LockKey, int]] = []
        overtaken: set[LockKey] = set()
        for offset in offsets:
            key = LockKey(group, offset.topic, offset.topic_incarnation, offset.queue_id)
            if not self._locks.may_commit(key, offset.lock_token) or (offset.lock_token and key in self._overtaken):
                refused.append((key, offset.queue_id))
            elif not offset.lock_token and self._store.locks.owner(key) is not None:
                overtaken.add(key)
        if refused:
            self._locks.refused_commit_count += 1
            first = refused[0][0]
            owner = self._store.locks.owner(first)
            ids = [queue_id for key, queue_id in refused if key.topic == first.topic]
            raise not_owned(group, first.topic, ids, owner.client_id if owner is not None else "")
        return overtaken

    def append(self, writer: SystemWriter) -> int:
        """Appends the record, that of locks and that of popped queues in one append, each if it is not empty.

        Returns the position up to which the log must be stored before callers are answered.
        """
        body = b"".join(self._parts)
        states = [(OFFSETS_TOPIC, [body])] if body else []
        if self._overtaken:
            states.append((LOCKS_TOPIC, [locks_record((key, None) for key in sorted(self._overtaken))]))
        if self._popped:
            states.append((POP_TOPIC, [PopRecord(queues=self._popped).SerializeToString()]))
        if len(states) > 1:
            writer.append_moved((), states)
        elif states:
            writer.append(*states[0])
        return self._store.appended_position


def _answer(commits: Sequence[_Commit], error: Exception | None) -> None:
    """Answers the calls, each on its lane, with one hand-over for all calls of a lane."""
    by_lane: dict[CallLane, list[tuple[Call, bytes]]] = {}
    for commit in commits:
        if commit.call is not None:
            answer = _ANSWER
            if commit.resets or commit.kept:
                answer = CommitOffsetsResponse(resets=commit.resets, kept=commit.kept).SerializeToString()
            by_lane.setdefault(commit.call.lane, []).append((commit.call, answer))
    failure = None if error is None else to_service_error(error)
    for lane, calls in by_lane.items():
        lane.post(partial(_answer_here, calls, failure))


def _answer_here(calls: Sequence[tuple[Call, bytes]], failure: ServiceError | None) -> None:
    for call, answer in calls:
        if failure is None:
            call.answer(answer)
        else:
            call.fail(failure)
