"""Dead letters over all brokers: which groups have some, and their replay, slice by slice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from . import _methods
from ._checks import check_flag, check_span, checked_texts
from ._group_admin import check_wanted_group
from ._late_imports import fork_waits
from .errors import ConfigurationError, ProtomqError, TopicNotFoundError, WrongTypeError

if TYPE_CHECKING:
    from ._admin_calls import AdminCalls
from .wire.topics import dead_letter_topic

IDS_MAX: Final = 256
"""In one call to a broker."""


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """Dead letters of a group over all brokers. `last_time`: when the newest one died; None if there is none any more."""

    group: str
    message_count: int
    replayed_count: int
    last_time: datetime | None


@dataclass(frozen=True, slots=True)
class DamagedLetters:
    """Dead letters of a broker, from `begin_offset` to before `end_offset`, that stand in a damaged part of its log.

    `is_lost`: they never come back, since `protomq log repair` has taken them out.
    """

    broker_name: str
    begin_offset: int
    end_offset: int
    is_lost: bool


@dataclass(frozen=True, slots=True)
class ReplayProgress:
    """How far a replay is, over all brokers.

    `replayed`: sent to their original topics by this replay. `known`: left out, since they had been replayed before. `without_topic`: left
    where they are, since their original topic is gone or takes no sends. `looked_at` of `total`: those that are to be looked at, as far as
    is known. `unknown_ids`: ids of which no broker that was asked has a dead letter. `damaged`: those that were left out, since they are
    damaged.
    """

    group: str
    replayed: int = 0
    known: int = 0
    without_topic: int = 0
    looked_at: int = 0
    total: int = 0
    unknown_ids: tuple[str, ...] = ()
    damaged: tuple[DamagedLetters, ...] = ()

    @property
    def unreadable(self) -> int:
        """How many are damaged; once a replica has healed them, another replay has them."""
        return sum(each.end_offset - each.begin_offset for each in self.damaged if not each.is_lost)

    @property
    def lost(self) -> int:
        """How many never come back, since `protomq log repair` has taken them out of the log."""
        return sum(each.end_offset - each.begin_offset for each in self.damaged if each.is_lost)


def list_dead_letters(
    admin: AdminCalls, brokers: Iterable[str] | None
) -> tuple[list[DeadLetters], dict[str, ProtomqError]]:
    """Of all groups, by name, and the brokers that did not answer."""
    with fork_waits:
        from .v1 import dead_letter_service_pb2 as pb

    found: dict[str, DeadLetters] = {}

    def ask(broker: Any) -> list[pb.ListDeadLettersResponse]:
        request = pb.ListDeadLettersRequest()
        return list(admin._pages(broker, _methods.LIST_DEAD_LETTERS, request, pb.ListDeadLettersResponse))

    answers, failures = admin._answers(brokers, ask, slave_stands_in=True)
    for one in (one for _, pages in answers for page in pages for one in page.groups):
        found[one.consumer_group] = _added(one, found.get(one.consumer_group))
    return [found[group] for group in sorted(found)], failures


def replay_dead_letters(
    admin: AdminCalls,
    group: str,
    *,
    message_ids: Iterable[str],
    begin: datetime | None,
    end: datetime | None,
    again: bool,
    brokers: Iterable[str] | None,
    on_progress: Callable[[ReplayProgress], None] | None,
) -> tuple[ReplayProgress, dict[str, ProtomqError]]:
    """Replays at each broker until it is done; what was done, and the brokers that could not. Raises TopicNotFoundError if none has any."""
    with fork_waits:
        from .v1 import dead_letter_service_pb2 as pb

    check_wanted_group(group)
    check_flag("again", again)
    ids = checked_texts("message_ids", message_ids)
    if ids and (begin is not None or end is not None):
        raise ConfigurationError("dead letters are replayed by id or by time: give one of the two")
    if on_progress is not None and not callable(on_progress):
        raise WrongTypeError(f"on_progress is a function, not {on_progress!r}")
    check_span("begin", begin, "end", end, "has died")
    times: dict[str, Any] = {name: time for name, time in (("begin_time", begin), ("end_time", end)) if time is not None}
    progress = ReplayProgress(group, total=len(ids))
    unknown = set(ids)
    has_any = False

    def call(broker: Any, **fields: Any) -> Any:
        nonlocal progress
        request = pb.ReplayDeadLettersRequest(consumer_group=group, again=again, **fields, **times)
        answer = admin._call(
            broker.address, _methods.REPLAY_DEAD_LETTERS, request, pb.ReplayDeadLettersResponse
        )
        progress = replace(
            progress,
            replayed=progress.replayed + answer.replayed_count,
            known=progress.known + answer.known_count,
            without_topic=progress.without_topic + answer.without_topic_count,
            damaged=(*progress.damaged, *_damaged_in(answer, broker.broker_name)),
        )
        return answer

    def tell(**changes: Any) -> None:
        nonlocal progress
        progress = replace(progress, **changes)
        if on_progress is not None:
            on_progress(progress)

    def ask(broker: Any) -> None:
        nonlocal has_any
        try:
            if ids:
                _replay_ids(broker)
            else:
                _replay_range(broker)
        except TopicNotFoundError:
            return
        has_any = True

    def _replay_ids(broker: Any) -> None:
        left = sorted(unknown)
        for start in range(0, len(left), IDS_MAX):
            part = left[start : start + IDS_MAX]
            missing = set(call(broker, message_ids=part).unknown_message_ids)
            unknown.difference_update(set(part) - missing)
            tell(looked_at=len(ids) - len(unknown))

    def _replay_range(broker: Any) -> None:
        answer = call(broker)
        seen = answer.replayed_count + answer.known_count + answer.without_topic_count
        seen += sum(each.end_offset - each.begin_offset for each in _damaged_in(answer, broker.broker_name))
        end_offset = answer.end_offset  # as of the first call: what dies meanwhile is for the next replay
        tell(
            looked_at=progress.looked_at + seen,
            total=progress.total + seen + max(end_offset - answer.next_offset, 0),
        )
        while (at := answer.next_offset) < end_offset:
            answer = call(broker, begin_offset=at, end_offset=end_offset)
            if answer.next_offset <= at:
                return  # they are gone
            tell(looked_at=progress.looked_at + answer.next_offset - at)

    failures = admin._ask_each(brokers, ask)
    if not has_any and not failures:
        raise TopicNotFoundError(
            f"group {group!r} has no dead letters at any broker. None of its messages has died, or there is no such group; "
            "list_dead_letters tells which groups have some",
            metadata={"topic": dead_letter_topic(group), "consumer_group": group},
        )
    return replace(progress, unknown_ids=tuple(sorted(unknown))), failures


def _damaged_in(answer: Any, broker_name: str) -> list[DamagedLetters]:
    told = ((False, answer.unreadable_runs), (True, answer.lost_runs))
    return [
        DamagedLetters(broker_name, first, following, is_lost)
        for is_lost, runs in told
        for first, following in zip(runs[::2], runs[1::2], strict=True)
    ]


def _added(one: Any, known: DeadLetters | None) -> DeadLetters:
    from datetime import UTC

    time = one.last_store_time.ToDatetime(UTC) if one.HasField("last_store_time") else None
    count = one.end_offset - one.min_offset
    if known is None:
        return DeadLetters(one.consumer_group, count, one.replayed_count, time)
    times = [each for each in (time, known.last_time) if each is not None]
    return DeadLetters(
        known.group,
        known.message_count + count,
        known.replayed_count + one.replayed_count,
        max(times, default=None),
    )
