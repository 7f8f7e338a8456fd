"""Committing the offsets of a group at several brokers, in steps.

If one broker is silent or refuses, the others still take their offsets. A failure is reported once: a broker that is down by
`_outages.py`, a refusal by the log, until that broker takes offsets again.

A commit of a member names its membership. A broker that does not know it refuses the commit: it has given the member up, or has just
started. So the member calls it. If that is answered, the membership still stands, and the commit is made again; else it is dropped.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Collection, Mapping
from typing import Final, NamedTuple, TypeVar

from ._consumer_calls import ConsumerCalls, Limits
from ._hook_points import HookPoints
from ._offset_calls import CommitErrors, by_broker, without_gone_queues, without_lost_queues
from ._open_consumers import share_s
from ._outages import Outages
from ._pull_logic import PullState
from ._queue_locks import QueueLocks
from ._retry import ONCE
from ._steps import Steps
from ._types import Membership, MessageQueue
from .errors import (
    MemberUnknownError,
    NoRouteError,
    ProtomqError,
    QueueNotFoundError,
    QueueNotOwnedError,
    TransportError,
)

logger = logging.getLogger("protomq")

_T = TypeVar("_T")
Stands = Callable[[MessageQueue, bool], bool]
"""See MembershipState.stands."""
MembershipOf = Callable[[MessageQueue], Membership | None]
"""See MembershipState.membership."""
Rejoin = Callable[[str, str, float], Steps[None]]
"""See GroupShare.rejoin."""


def _commits_at(broker_name: str) -> str:
    """What the log calls the part of a broker that takes offsets."""
    return f"the commit service of broker {broker_name}"


def _never(topic: str, broker_name: str, timeout_s: float) -> Steps[None]:
    raise AssertionError("no commit names a membership")


def _hooked(
    hooks: HookPoints, topic: str, broker_name: str, offsets: Mapping[MessageQueue, int], steps: Steps[_T]
) -> Steps[_T]:
    """What the steps of a commit return, with the hooks around them."""
    context = hooks.before_commit(topic, broker_name, offsets)
    try:
        result = yield from steps
    except BaseException as error:
        hooks.after_commit(context, error)
        raise
    hooks.after_commit(context)
    return result


PATIENCE_MIN_S: Final = 0.5
"""What each broker has for a last commit, however long others were waited for."""


class _Mark(NamedTuple):
    """What an offset belongs to. Topics are made again, offsets reset, and queues locked again, while brokers answer."""

    incarnation: int
    reset_epoch: int | None
    log_epoch: int
    token: int
    began: int | None


class CommitSteps:
    """The commits of one consumer."""

    def __init__(
        self,
        group: str,
        calls: ConsumerCalls,
        state: PullState,
        outages: Outages,
        clock: Callable[[], float],
        locks: QueueLocks | None = None,
        stands: Stands = lambda _queue, by_calls: True,
        membership: MembershipOf = lambda _queue: None,
        rejoin: Rejoin = _never,
        is_doubtful: Callable[[MessageQueue], bool] = lambda _queue: False,
    ) -> None:
        """`stands`: whether a queue is certainly still this consumer's. `membership`: what a commit names, `rejoin`: makes it known.

        `is_doubtful`: it does not stand, and the broker may say yet that it does.
        """
        self._group = group
        self._calls = calls
        self._state = state
        self._outages = outages
        self._clock = clock
        self._locks = locks
        self._stands = stands
        self._membership = membership
        self._rejoin = rejoin
        self._is_doubtful = is_doubtful
        self.hooks: HookPoints | None = None
        """None: nobody watches commits."""
        self._troubles: dict[tuple[str, str], str] = {}
        """Why the last commit of a topic at a broker was refused, where another try does not help."""

    def commit_dealt_with(
        self,
        when: str,
        limits: Limits,
        *,
        ends_s: float = math.inf,
        is_last: bool = False,
        of: Collection[MessageQueue] | None = None,
    ) -> Steps[ProtomqError | None]:
        """Commits what was finished; a failure is logged, the next commit makes up for it, unless this is the last one.

        `of`: of these queues only. Returns the first error.
        """
        offsets = self._state.to_commit(safe_only=True)
        if of is not None:
            offsets = {queue: offset for queue, offset in offsets.items() if queue in of}
        return (yield from self.commit_or_log(offsets, when, limits, ends_s=ends_s, is_last=is_last))

    def commit_or_log(
        self,
        offsets: Mapping[MessageQueue, int],
        when: str,
        limits: Limits,
        *,
        ends_s: float = math.inf,
        is_last: bool = False,
    ) -> Steps[ProtomqError | None]:
        """Commits; a failure is logged: the caller tries again, unless this is the last time. Returns the first error."""
        errors = yield from self.commit(offsets, limits, ends_s, by_calls=True)
        for place, error in errors.items():
            topic, broker_name = place
            is_told = error.retriable or self._troubles.get(place) == error.reason
            is_told = self._outages.is_no_news(topic, error) or (is_told and not is_last)
            level = logging.DEBUG if is_told else logging.WARNING
            logger.log(
                level,
                "offsets of %s in %s/%s not committed %s: %s",
                self._group, topic, broker_name, when, error,
            )  # fmt: skip
        for place in by_broker(offsets):
            self._troubles.pop(place, None)
        self._troubles |= {place: error.reason for place, error in errors.items() if not error.retriable}
        return next(iter(errors.values()), None)

    def commit(
        self,
        offsets: Mapping[MessageQueue, int],
        limits: Limits,
        ends_s: float = math.inf,
        *,
        by_calls: bool = False,
    ) -> Steps[CommitErrors]:
        """Commits at every broker, for each of which `limits` hold, and `ends_s` for all. What went wrong.

        Of queues that others may have by now nothing is committed: MemberUnknownError. `by_calls`: see MembershipState.stands.

        One that does not answer is not asked for its other topics. One that was busy for all its time is asked once for each. One that has
        fewer queues now is asked again for those it has. For a last commit all brokers are waited for together; see PATIENCE_MIN_S.
        """
        errors: CommitErrors = {}
        silent: set[str] = set()
        busy: set[str] = set()
        parts = by_broker(offsets)
        # Of now, when the offsets are: while the first brokers answer, the member may give up what it has at the next ones.
        named = {key: {self._membership(queue) for queue in members} for key, members in parts.items()}
        marks = {queue: self._mark(queue, offset) for queue, offset in offsets.items()}
        waited_s = 0.0  # For brokers that did not take their offsets.
        for i, ((topic, broker_name), members) in enumerate(parts.items()):
            if broker_name in silent:
                continue
            if any(self._is_doubtful(queue) for queue in members):
                # It was stopped for a while: the broker is asked whether it knows the member still.
                with contextlib.suppress(ProtomqError):
                    yield from self._rejoin(topic, broker_name, min(limits.timeout_s, share_s(ends_s, len(parts) - i, self._clock())))
            part = {queue: offsets[queue] for queue in members if self._stands(queue, by_calls)}
            if len(part) < len(members):
                text = f"broker {broker_name} has not heard of this member in time: others may have its queues by now"
                errors[topic, broker_name] = MemberUnknownError(text)
                if not part:
                    continue
            left_s = share_s(ends_s, len(parts) - i, self._clock())
            if limits.retries.outlasts:  # Who was away while another one was waited for has had that time, too.
                left_s = min(left_s, max(limits.timeout_s - waited_s, PATIENCE_MIN_S))
            asked_s = self._clock()
            within = limits._replace(timeout_s=min(limits.timeout_s, left_s))
            if broker_name in busy:
                within = within._replace(retries=ONCE)
            several = named[topic, broker_name]
            member = several.pop() if len(several) == 1 else None
            try:
                try:
                    yield from self._commit_as(member, topic, broker_name, part, within, marks, by_calls)
                except QueueNotFoundError as error:
                    part, told = without_gone_queues(part, error)
                    if part:
                        yield from self._commit_part(topic, broker_name, part, within, marks, member)
                    raise told from error
                except QueueNotOwnedError as error:
                    part, lost = without_lost_queues(part, error)
                    if self._locks is not None:
                        self._locks.refused([queue for queue in lost if self._locks.token(queue) == marks[queue].token])
                    if part and lost:
                        yield from self._commit_part(topic, broker_name, part, within, marks, member)
                    raise
            except ProtomqError as error:
                waited_s += self._clock() - asked_s
                if error.retriable:
                    # A broker that refuses commits may answer pulls: these do not say that it takes commits again.
                    is_away = isinstance(error, TransportError | NoRouteError)
                    self._outages.failed(f"broker {broker_name}" if is_away else _commits_at(broker_name), topic, error)
                if isinstance(error, TransportError):
                    silent.add(broker_name)
                elif isinstance(error, limits.retries.outlasts):
                    busy.add(broker_name)
                errors[topic, broker_name] = error
            else:
                self._outages.answered(_commits_at(broker_name), topic)
        return errors

    def _commit_as(
        self,
        member: Membership | None,
        topic: str,
        broker_name: str,
        part: Mapping[MessageQueue, int],
        limits: Limits,
        marks: Mapping[MessageQueue, _Mark],
        by_calls: bool,
    ) -> Steps[None]:
        """Commits; once more if the broker did not know the membership, and does now. All within the time-out."""
        ends_s = self._clock() + limits.timeout_s
        try:
            yield from self._commit_part(topic, broker_name, part, limits, marks, member)
        except (MemberUnknownError, QueueNotOwnedError) as refusal:
            if member is None:
                raise
            try:
                yield from self._rejoin(topic, broker_name, share_s(ends_s, 2, self._clock()))
            except ProtomqError as error:
                raise refusal from error
            if any(self._membership(queue) != member or not self._stands(queue, by_calls) for queue in part):
                raise
            within = limits._replace(timeout_s=share_s(ends_s, 1, self._clock()))
            yield from self._commit_part(topic, broker_name, part, within, marks, member)

    def _commit_part(
        self,
        topic: str,
        broker_name: str,
        part: Mapping[MessageQueue, int],
        limits: Limits,
        marks: Mapping[MessageQueue, _Mark],
        member: Membership | None,
    ) -> Steps[None]:
        state = self._state
        steps = self._calls.commit(
            limits,
            self._group,
            topic,
            broker_name,
            part,
            {queue: marks[queue].incarnation for queue in part},
            {queue: marks[queue].reset_epoch for queue in part},
            {queue: marks[queue].token for queue in part},
            {queue: marks[queue].log_epoch for queue in part},
            member,
            {queue: marks[queue].began for queue in part},
        )
        resets, kept = yield from (steps if self.hooks is None else _hooked(self.hooks, topic, broker_name, part, steps))
        # What was said of the topic before is nothing to the one that was made again.
        here = [queue for queue in part if state.incarnation(queue) == marks[queue].incarnation]
        state.committed({queue: part[queue] for queue in here if queue not in resets and queue not in kept})
        for queue in here:
            if queue in resets:
                state.follow_reset(queue, *resets[queue])
            elif queue in kept:
                state.follow_kept(queue, kept[queue])

    def _mark(self, queue: MessageQueue, queue_offset: int) -> _Mark:
        state = self._state
        began = state.began(queue)
        if began is not None and queue_offset < began:
            began = None  # The program has chosen it.
        token = self._locks.token(queue) if self._locks is not None else 0
        return _Mark(state.incarnation(queue), state.reset_epoch(queue), state.log_epoch(queue), token, began)
