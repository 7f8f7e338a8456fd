"""Messages that a group could not process: a copy of each goes to %RETRY%group, to be delivered after a delay, or to %DLQ%group.

    consumer lane   reads the requests of a turn > finds the records > plans > makes the copies
                    by arrays, if the messages of a request are alike (`alike_failures.py`)
    send lane                                                                                   appends them, of all that has arrived

Rules:
- All requests of one group in a turn are looked up and copied together, which costs little more than one request. If one of them is known
  already or refused, each is prepared by itself. Requests with runs of messages that failed alike are prepared together, by arrays.
- All messages of a request are copied, or none. The copies and the record that the request is done are one append, so the broker recognises
  a repeated request, and does nothing. It does so even if it cannot read the messages any more: who is refused asks with other requests.
- A master before may have given out what this one may not serve yet. That is refused for now only.
- The record says how often its message was handed out. A consumer that retried by itself may name a higher number, never a lower one.
- Answered when a SEND_OK would be given, as a commit of offsets is.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import groupby, islice
from typing import TYPE_CHECKING, Final, NamedTuple

from google.protobuf.message import DecodeError

from protomq.v1.group_service_pb2 import FailedMessage, SendBackRequest, SendBackResponse, SentBack
from protomq.v1.state_pb2 import GroupsRecord
from protomq.wire.topics import (
    DEAD_LETTER_PREFIX,
    GROUPS_TOPIC,
    TopicClass,
    class_of,
    dead_letter_topic,
    group_of,
    retry_topic,
)
from protomq_runtime.errors import ServiceError, invalid_argument, unparsable

from .alike_failures import MESSAGES_MAX, NAMED_MAX, AlikeFailures, messages_of, read_alike
from .delays import illegal_delay
from .failed_messages import (
    Place,
    RetryPlan,
    copies_alike,
    copies_for,
    find_alike,
    find_messages,
    place_of,
)
from .found_log import FoundLog
from .store.errors import StoreError
from .store.state.group_settings import GroupSettings, plan_retry
from .store.state.topics import topic_of_broker
from .store.timer.delay_levels import DelayError, checked_delay_ms, delay_of_level, due_behind
from .store_errors import to_service_error
from .topic_access import check_group_name, check_incarnation, existing_topic

if TYPE_CHECKING:
    from protomq_runtime.call import Call

    from .config import BrokerConfig
    from .delays import Delays
    from .log_time import LogTime
    from .store.log.append import AppendRequest
    from .store.store import Store
    from .system_writer import SystemWriter
    from .waiting_answers import WaitingAnswers

log = logging.getLogger("protomq.broker")

SIZE_MAX_BYTES: Final = 8 << 20
"""Most bytes of messages in one request; a single message may be larger."""
APPEND_SIZE_BYTES: Final = 1 << 20
"""Most bytes of copies in one append. The limit keeps one append on the send lane short."""
ATTEMPT_MAX: Final = (1 << 31) - 2
_NOT_KNOWN: Final = RetryPlan(0, 0)
"""Of a request that was done before, whose messages cannot be read any more."""
_TAKES_ALIKE: Final = SendBackResponse(takes_alike=True).SerializeToString()


@dataclass(slots=True)
class RetryCounts:
    """Counters since the start.

    Attributes: retried: messages sent to retry topics; dead: messages that became dead letters; repeated: requests that were known already.
    """

    retried: int = 0
    dead: int = 0
    repeated: int = 0


class _Asked(NamedTuple):
    """A request that was read.

    Attributes:
        key: the request's identity; 0 if a repeat must be done again.
        message_count: how many messages it names.
        messages, places: what it names, and where each was pulled; none if they are alike.
        alike: what it names, if they are.
    """

    call: Call
    group: str
    key: int
    message_count: int
    messages: Sequence[FailedMessage] = ()
    places: Sequence[Place] = ()
    alike: AlikeFailures | None = None


class _Prepared(NamedTuple):
    """Requests of one group with their copies, and the answer to each. `sources`: topics of the messages with their incarnations.

    `refusal`: why a single request cannot be done. If it was done before, that does not matter.
    """

    asked: Sequence[_Asked]
    sources: Sequence[tuple[str, int]]
    copies: Sequence[AppendRequest]
    outcomes: Sequence[_Outcome]
    refusal: Exception | None = None

    @property
    def size_bytes(self) -> int:
        return sum(len(copy.region.data) for copy in self.copies)


@dataclass(slots=True)
class _Outcome:
    """What becomes of the messages of a request: runs of those that have one plan. `is_repeat`: the request was done before."""

    runs: Sequence[tuple[RetryPlan, int]]
    is_repeat: bool = False

    def encoded(self) -> bytes:
        """The SendBackResponse."""
        parts = [_encoded_results(plan, count, self.is_repeat) for plan, count in self.runs]
        if self.is_repeat:
            parts.append(SendBackResponse(repeated_request=True).SerializeToString())
        return b"".join([*parts, _TAKES_ALIKE])


# Requests that come together mostly share a plan, and name as many messages.
@lru_cache(maxsize=16)
def _encoded_results(plan: RetryPlan, count: int, is_repeat: bool) -> bytes:
    """What a SendBackResponse says of `count` messages that have one plan."""
    if plan.due_time_ms is None:
        result = SentBack(attempt=plan.attempt, dead_letter=True)
    else:
        result = SentBack(attempt=plan.attempt, due_time_ms=0 if is_repeat else plan.due_time_ms)
    return SendBackResponse(results=[result]).SerializeToString() * count


@dataclass(slots=True)
class _Arrived:
    """Requests that wait for the send lane."""

    requests: deque[_Prepared] = field(default_factory=deque)
    is_posted: bool = False


class SendBacks:
    """`send_back`: the consumer lane. All else: the send lane."""

    def __init__(
        self,
        store: Store,
        config: BrokerConfig,
        writer: SystemWriter,
        waiting: WaitingAnswers,
        delays: Delays,
        log_time: LogTime,
    ) -> None:
        self._store = store
        self._found = FoundLog(store)
        self._levels_ms = config.delay_levels_ms
        self._wait_ms = config.sync_flush_timeout_ms
        self._writer = writer
        self._waiting = waiting
        self._delays = delays
        self._log_time = log_time
        self._lock = threading.Lock()  # of the next one; never held over an append
        self._arrived = _Arrived()
        self.counts = RetryCounts()

    def send_back(self, calls: Iterable[Call]) -> None:
        """Prepares the copies, has the send lane append them, and answers the calls, which came in one turn of their lane."""
        groups: dict[str, list[_Asked]] = {}
        alike_groups: dict[tuple[str, bytes, bool], list[_Asked]] = {}
        prepared: list[_Prepared] = []
        for call in calls:
            payload = bytes(call.payload)
            alike = read_alike(payload)
            if alike is None:
                asked = self._read(call, payload)
                if asked is not None:
                    groups.setdefault(asked.group, []).append(asked)
                continue
            key = _key_of(payload) if alike.has_request_id else 0
            asked = _Asked(call, alike.group, key, alike.message_count, alike=alike)
            alike_groups.setdefault((alike.group, alike.said, bool(alike.runs[0].ids)), []).append(asked)
        for group in alike_groups.values():
            for together in _bundles(group):
                found, others = self._prepare_alike_all(together)
                prepared += found
                for each in others:
                    again = self._read(each.call, bytes(each.call.payload))
                    if again is not None:
                        groups.setdefault(again.group, []).append(again)
        for group in groups.values():
            for together in _bundles(group):
                prepared += self._prepare_all(together)
        self._hand_over(prepared)

    # The consumer lane.

    def _read(self, call: Call, payload: bytes) -> _Asked | None:
        """Reads a request message by message. None if it is wrong: then the call is answered."""
        try:
            request = SendBackRequest.FromString(payload)
            messages = messages_of(request)
            places = list(map(place_of, messages))
            _check(request, places)
        except DecodeError:
            call.fail(unparsable("protomq.v1.SendBackRequest"))
        except ValueError as error:
            call.fail(invalid_argument("alike", str(error)))
        except Exception as error:
            call.fail(to_service_error(error))
        else:
            key = _key_of(payload) if request.request_id else 0
            return _Asked(call, request.consumer_group, key, len(messages), messages, places)
        return None

    def _prepare_all(self, asked: Sequence[_Asked]) -> list[_Prepared]:
        """Prepares the requests together, or each by itself if that fails."""
        try:
            return [self._prepare(asked)]
        except Exception as error:
            if len(asked) > 1:
                return [prepared for each in asked for prepared in self._prepare_all([each])]
            if asked[0].key:
                # Whether it was done before, the send lane knows.
                return [_Prepared(asked, (), (), [_Outcome([(_NOT_KNOWN, asked[0].message_count)])], error)]
            asked[0].call.fail(to_service_error(error))
            return []

    def _prepare_each(self, asked: Iterable[_Asked]) -> None:
        """Prepares each request by itself, message by message."""
        prepared: list[_Prepared] = []
        for each in asked:
            again = each if each.alike is None else self._read(each.call, bytes(each.call.payload))
            if again is not None:
                prepared += self._prepare_all([again])
        self._hand_over(prepared)

    def _hand_over(self, prepared: Sequence[_Prepared]) -> None:
        """Has the send lane append the copies."""
        if not prepared:
            return
        with self._lock:
            self._arrived.requests.extend(prepared)
            is_posted, self._arrived.is_posted = self._arrived.is_posted, True
        if not is_posted:
            self._writer.post(self._write)

    def _prepare_alike_all(self, asked: Sequence[_Asked]) -> tuple[list[_Prepared], list[_Asked]]:
        """Prepares the requests together, or each by itself if that cannot be. Also returns those that have to be read one by one."""
        together = self._prepare_alike(asked)
        if together is not None:
            return [together], []
        if len(asked) == 1:
            return [], list(asked)
        prepared, others = [], []
        for each in asked:
            alone = self._prepare_alike([each])
            if alone is not None:
                prepared.append(alone)
            else:
                others.append(each)
        return prepared, others

    def _prepare_alike(self, asked: Sequence[_Asked]) -> _Prepared | None:
        """Makes the copies for requests whose messages are alike, and say the same. None if they have to be read message by message, which
        also says what is wrong, if anything is.
        """
        runs = [run for each in asked if each.alike is not None for run in each.alike.runs]
        group, first = asked[0].group, runs[0].first
        try:
            check_group_name(group)
            for topic in {run.first.topic for run in runs}:
                if topic.startswith(DEAD_LETTER_PREFIX):
                    return None
                _check_topic(group, topic, 0)
            known = find_alike(self._store, runs)
            if known is None:
                return None
            found, sources = known
            size_max_bytes = SIZE_MAX_BYTES if len(asked) == 1 else APPEND_SIZE_BYTES
            if found.size_bytes > size_max_bytes:
                return None
            now_ms = self._log_time.now_ms()
            settings = self._store.groups.find(group)
            plan_of = {
                attempt: self._plan_one(settings, 0, first, attempt, now_ms) for attempt in set(found.attempts)
            }
            topics = retry_topic(group), dead_letter_topic(group)
            if len(plan_of) == 1:
                (plan,) = plan_of.values()
                outcomes = [_Outcome([(plan, each.message_count)]) for each in asked]
                copies = copies_alike(found, first.error, plan, *topics, now_ms)
            else:
                plans = [plan_of[attempt] for attempt in found.attempts]
                left = iter(plans)
                outcomes = [_Outcome(_runs_of(islice(left, each.message_count))) for each in asked]
                copies = copies_for(found, [first.error] * len(plans), plans, *topics, now_ms)
        except (ServiceError, StoreError, OSError):
            return None
        except Exception:
            # Neither may one group's records fail what others ask in the same turn: the long way judges each request by itself.
            log.exception("messages of group %s that failed alike are read one by one", group)
            return None
        return _Prepared(asked, sources, copies, outcomes)

    def _prepare(self, asked: Sequence[_Asked]) -> _Prepared:
        """Makes the copies for these requests. Raises ServiceError, StoreError."""
        group = asked[0].group
        messages = [message for each in asked for message in each.messages]
        places = [place for each in asked for place in each.places]
        lacks_news = not self._found.is_readable
        size_max_bytes = SIZE_MAX_BYTES if len(asked) == 1 else APPEND_SIZE_BYTES
        found, incarnations = find_messages(self._store, messages, places, size_max_bytes, lacks_news=lacks_news)
        settings = self._store.groups.find(group)
        now_ms = self._log_time.now_ms()
        plans = self._plan(settings, asked, found.attempts, now_ms)
        copies = copies_for(
            found,
            [each.error for each in messages],
            plans,
            retry_topic(group),
            dead_letter_topic(group),
            now_ms,
        )
        left = iter(plans)
        outcomes = [_Outcome(_runs_of(islice(left, len(each.messages)))) for each in asked]
        return _Prepared(asked, incarnations, copies, outcomes)

    def _plan(
        self,
        settings: GroupSettings,
        asked: Sequence[_Asked],
        attempts: Sequence[int],
        now_ms: int,
    ) -> list[RetryPlan]:
        """What becomes of each message. Those that ask for the same share one plan. `attempts`: how often each was handed out before."""
        plans: dict[tuple[object, ...], RetryPlan] = {}
        found = []
        attempts_left = iter(attempts)
        for each in asked:
            for number, message in enumerate(each.messages):
                attempt = next(attempts_left)
                if attempt and message.topic.startswith(DEAD_LETTER_PREFIX):
                    attempt = 0  # So often another group had it. This one begins, and has all its own attempts.
                delay = message.WhichOneof("delay")
                wanted = (
                    attempt,
                    message.attempt if message.HasField("attempt") else None,
                    delay,
                    getattr(message, delay) if delay else None,
                )
                plan = plans.get(wanted)
                if plan is None:
                    plan = plans[wanted] = self._plan_one(settings, number, message, attempt, now_ms)
                found.append(plan)
        return found

    def _plan_one(
        self,
        settings: GroupSettings,
        number: int,
        message: FailedMessage,
        attempt: int,
        now_ms: int,
    ) -> RetryPlan:
        if message.HasField("attempt"):
            if not attempt <= message.attempt <= ATTEMPT_MAX:
                raise invalid_argument(
                    f"messages[{number}].attempt",
                    f"is {message.attempt}, the message was handed out {attempt} times before: give that or more, {ATTEMPT_MAX} at most",
                )
            attempt = message.attempt
        delay_ms = None
        if message.WhichOneof("delay") != "dead_letter" or not message.dead_letter:
            asked_ms = self._asked_delay_ms(message)
            delay_ms = plan_retry(settings, self._levels_ms, attempt + 1, asked_ms)
        return RetryPlan(attempt + 1, None if delay_ms is None else due_behind(delay_ms, now_ms))

    def _asked_delay_ms(self, message: FailedMessage) -> int | None:
        asked = message.WhichOneof("delay")
        try:
            if asked == "delay_level":
                return delay_of_level(self._levels_ms, message.delay_level)
            return checked_delay_ms(message.delay_ms) if asked == "delay_ms" else None
        except DelayError as error:
            raise illegal_delay(error) from error

    # The send lane.

    def _write(self) -> None:
        """Appends what has arrived by now."""
        with self._lock:
            self._arrived.is_posted = False  # what arrives from here on posts again
            waiting, self._arrived.requests = self._arrived.requests, deque()
        while waiting:
            self._append(waiting)

    def _append(self, waiting: deque[_Prepared]) -> None:
        """Appends and answers the requests that fit into one append; takes at least one from `waiting`."""
        group = _Together(self._store, self._delays)
        apart: list[_Prepared] = []
        while waiting and group.size_bytes < APPEND_SIZE_BYTES:
            prepared = waiting.popleft()
            try:
                group.add(prepared)
            except Exception as error:
                if len(prepared.asked) > 1:
                    apart.append(prepared)
                else:
                    _answer(prepared, error)
        self._append_all(group)
        for prepared in apart:  # behind the append, of which they may have repeats
            prepared.asked[0].call.lane.post(partial(self._prepare_each, prepared.asked))

    def _append_all(self, group: _Together) -> None:
        try:
            position = group.append(self._writer, self._log_time.now_ms())
        except Exception as error:
            for prepared in group.taken:
                _answer(prepared, error)
            return
        for prepared in group.taken:
            for outcome in prepared.outcomes:
                self._count(outcome)
        if self._waiting.is_stored(position):
            for prepared in group.taken:
                _answer(prepared, None)
            return
        for prepared in group.taken:
            for asked, outcome in zip(prepared.asked, prepared.outcomes, strict=True):
                wait_ms = asked.call.hold_time_ms(self._wait_ms)
                alone = prepared._replace(asked=[asked], outcomes=[outcome])
                self._waiting.wait(self._writer.lane, position, wait_ms, partial(_answer, alone))
        self._waiting.request_flush()

    def _count(self, outcome: _Outcome) -> None:
        if outcome.is_repeat:
            self.counts.repeated += 1
            return
        for plan, count in outcome.runs:
            if plan.due_time_ms is None:
                self.counts.dead += count
            else:
                self.counts.retried += count


class _NotTogetherError(Exception):
    """One of several requests was done before, so each must be prepared by itself."""


class _Together:
    """Requests that are appended together."""

    def __init__(self, store: Store, delays: Delays) -> None:
        self._store = store
        self._delays = delays
        self._keys: set[int] = set()
        self.taken: list[_Prepared] = []
        self.size_bytes = 0

    def add(self, prepared: _Prepared) -> None:
        """Adds requests. A single request that was done before is added without its copies. Raises ServiceError if they cannot be done any
        more, _NotTogetherError if one of several was done before.
        """
        known = [each.key for each in prepared.asked if each.key and self._is_known(each.key)]
        if known and len(prepared.asked) > 1:
            raise _NotTogetherError
        if known:
            (outcome,) = prepared.outcomes
            outcome.is_repeat = True
            self.taken.append(prepared)
            return
        if prepared.refusal is not None:
            raise prepared.refusal
        for name, incarnation in prepared.sources:
            check_incarnation(existing_topic(self._store, name), incarnation)
        for copy in prepared.copies:
            if copy.region.due_times_ms is not None:
                self._delays.check(copy.region)
                self._delays.check_room()
        self._keys.update(each.key for each in prepared.asked if each.key)
        self.taken.append(prepared)
        self.size_bytes += prepared.size_bytes

    def _is_known(self, key: int) -> bool:
        return key in self._keys or self._store.groups.has_sent_back(key)

    def append(self, writer: SystemWriter, now_ms: int) -> int:
        """Appends the new copies. Returns the position up to which the log must be stored before callers are answered."""
        new = [each for each in self.taken if not each.outcomes[0].is_repeat]
        copies = [copy for each in new for copy in each.copies]
        if copies:
            topics = dict.fromkeys(copy.region.topic for copy in copies)
            missing = [name for name in topics if self._store.topics.find(name) is None]
            if missing:
                self._store.topics.add(map(topic_of_broker, missing))
            keys = [asked.key for each in new for asked in each.asked if asked.key]
            record = GroupsRecord(sent_back=keys, sent_back_times_ms=[now_ms] * len(keys))
            states = [(GROUPS_TOPIC, [record.SerializeToString()])] if keys else []
            writer.append_moved(copies, states)
        return self._store.appended_position


def _check(request: SendBackRequest, places: Sequence[Place]) -> None:
    """Raises ServiceError for a request that is wrong in any state of the broker."""
    group = request.consumer_group
    check_group_name(group)
    count_max = NAMED_MAX if request.HasField("alike") else MESSAGES_MAX
    if not 1 <= len(places) <= count_max:
        raise invalid_argument("messages", f"are 1 to {count_max}, not {len(places)}")
    if len(set(places)) < len(places):
        raise invalid_argument("messages", "names a message twice; name each once")
    for topic in dict.fromkeys(topic for topic, _, _ in places):
        _check_topic(group, topic, next(number for number, place in enumerate(places) if place[0] == topic))


def _check_topic(group: str, topic: str, number: int) -> None:
    """Raises ServiceError for messages that another group got again, and for what is a dead letter of the group already. `number`: of the
    first one in the request.
    """
    if class_of(topic) is TopicClass.DEAD_LETTER and group_of(topic) == group:
        raise invalid_argument(
            f"messages[{number}].topic", f"{topic!r} has the dead letters of {group!r} itself: ReplayDeadLetters sends them again"
        )
    if class_of(topic) is TopicClass.RETRY and group_of(topic) != group:
        raise invalid_argument(
            f"messages[{number}].topic", f"{topic!r} has the retries of another group than {group!r}"
        )


def _runs_of(plans: Iterable[RetryPlan]) -> list[tuple[RetryPlan, int]]:
    return [(plan, sum(1 for _ in run)) for plan, run in groupby(plans)]


def _bundles(asked: Iterable[_Asked]) -> Iterator[list[_Asked]]:
    """Yields requests to prepare together: at most as many messages as one request may have, and no request twice."""
    bundle: list[_Asked] = []
    keys: set[int] = set()
    count = 0
    for each in asked:
        if bundle and (count + each.message_count > MESSAGES_MAX or (each.key and each.key in keys)):
            yield bundle
            bundle, keys, count = [], set(), 0
        bundle.append(each)
        keys.add(each.key)
        count += each.message_count
    if bundle:
        yield bundle


def _key_of(payload: bytes) -> int:
    """Hashes everything that a request says. Two requests that chose one id by chance still differ."""
    return int.from_bytes(blake2b(payload, digest_size=8).digest(), "little") or 1


def _answer(prepared: _Prepared, error: Exception | None) -> None:
    prepared.asked[0].call.lane.post(partial(_answer_here, prepared, error))


def _answer_here(prepared: _Prepared, error: Exception | None) -> None:
    for asked, outcome in zip(prepared.asked, prepared.outcomes, strict=True):
        if error is not None:
            asked.call.fail(to_service_error(error))
        else:
            asked.call.answer(outcome.encoded())
