"""Bugs of replication that are put in on purpose: `planted.py` has them in its list; the drill is `check_ha`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Final
from unittest import mock

from protomq.v1 import ha_service_pb2 as ha
from protomq_broker.ha_service import HaService
from protomq_broker.ha_session import FollowSession
from protomq_broker.replication import Replication
from protomq_broker.store.log.agreement import START, LogPoint, LogView
from protomq_broker.store.log.positions import Positions
from protomq_ha.intake import LogPart
from protomq_ha.replicas import ReplicaTable, Verdict

from . import ha_world
from .checker import Violation


def acknowledges_before_it_writes() -> Any:
    """A slave says that it has what it was sent, before its log has it."""
    fetch_request = FollowSession.fetch_request

    def lie(self: FollowSession, hold_ms: int) -> ha.FetchRequest:
        request = fetch_request(self, hold_ms)
        request.written_position = request.flushed_position = max(
            self._intake.end_position, request.written_position
        )
        return request

    return mock.patch.object(FollowSession, "fetch_request", lie)


def does_not_sync() -> Any:
    """And says that it has synced all the same."""
    took = FollowSession.took
    fetch_request = FollowSession.fetch_request

    def take(self: FollowSession, response: ha.FetchResponse, part: LogPart) -> bool:
        with mock.patch.object(self._store, "flush"):
            return took(self, response, part)

    def lie(self: FollowSession, hold_ms: int) -> ha.FetchRequest:
        request = fetch_request(self, hold_ms)
        request.flushed_position = request.written_position
        return request

    return mock.patch.multiple(FollowSession, took=take, fetch_request=lie)


def takes_any_acknowledgement() -> Any:
    """Whatever a session says that it has counts, sent or not."""

    def note(
        self: ReplicaTable, session: int, written: int, flushed: int, log_end: int, now_ms: int
    ) -> None:
        replica = self._by_session[session]
        replica.written_position, replica.flushed_position = written, flushed
        replica.heard_ms = replica.caught_up_ms = now_ms

    return mock.patch.object(ReplicaTable, "note_acknowledged", note)


def goes_on_without_agreement() -> Any:
    """The master takes any point for one of its own."""
    begin = HaService._begin_session

    def trust(self: HaService, call: Any, request: ha.FetchRequest) -> None:
        position = request.end.position
        with mock.patch.object(
            type(self._store),
            "log_point",
            lambda store, at: LogPoint(position, request.end.epoch, request.end.crc32c)
            if at <= store.appended_position
            else None,
        ):
            begin(self, call, request)

    return mock.patch.object(HaService, "_begin_session", trust)


def truncates_by_length() -> Any:
    """Logs are taken to agree up to the end of the shorter one."""

    def shorter(ours: LogView, theirs: LogView, last_epoch: int) -> LogPoint | None:
        ends = [view.epoch_end(1 << 40) for view in (ours, theirs)]
        position = min(end[1] for end in ends if end is not None) if all(ends) else 0
        return ours.log_point(position) or START

    return mock.patch.object(ha_world, "last_agreed", shorter)


def a_slave_serves_what_it_has() -> Any:
    """Confirmed or not."""
    took = FollowSession.took

    def take(self: FollowSession, response: ha.FetchResponse, part: LogPart) -> bool:
        response.confirmed_position = max(response.confirmed_position, response.end_position)
        return took(self, response, part)

    return mock.patch.object(FollowSession, "took", take)


def sends_wait_for_nobody() -> Any:
    """A SYNC_MASTER answers when it has the message itself."""

    def wait(self: Positions, wanted: bool) -> None:
        pass

    return mock.patch.object(Positions, "wait_for_replicas", wait)


def the_fastest_slave_is_enough() -> Any:
    """However many are waited for."""
    verdict = ReplicaTable.verdict

    def hasty(self: ReplicaTable, log_end: int, now_ms: int) -> Verdict:
        found = verdict(self, log_end, now_ms)
        has = [self._counted(each) for each in self._by_session.values()]
        return found._replace(confirmed_position=max(has, default=0)) if found.waits else found

    return mock.patch.object(ReplicaTable, "verdict", hasty)


def nobody_is_awaited_while_one_is_away() -> Any:
    """With one slave out of sync the others are not waited for either."""
    verdict = ReplicaTable.verdict

    def hasty(self: ReplicaTable, log_end: int, now_ms: int) -> Verdict:
        found = verdict(self, log_end, now_ms)
        return found._replace(confirmed_position=log_end) if found.waits and found.is_short and found.in_sync_count > 1 else found

    return mock.patch.object(ReplicaTable, "verdict", hasty)


def never_tells_that_more_is_confirmed() -> Any:
    """A slave that has everything is not told that it may serve it."""
    return mock.patch.object(HaService, "_news", return_value=(0, 0))


def verdicts_get_lost() -> Any:
    """Nobody tells sends that a slave has come."""
    return mock.patch.object(Replication, "_note_verdict", return_value=None)


BUGS: Final[tuple[tuple[str, Callable[[], Any]], ...]] = (
    ("acknowledges before it writes", acknowledges_before_it_writes),
    ("claims syncs that were not made", does_not_sync),
    ("takes any acknowledgement", takes_any_acknowledgement),
    ("goes on where logs do not agree", goes_on_without_agreement),
    ("truncates a slave by length", truncates_by_length),
    ("serves on a slave what is not confirmed", a_slave_serves_what_it_has),
    ("waits for no slave", sends_wait_for_nobody),
    ("waits for the fastest slave alone", the_fastest_slave_is_enough),
    ("waits for nobody while one slave is away", nobody_is_awaited_while_one_is_away),
    ("never tells slaves what is confirmed", never_tells_that_more_is_confirmed),
    ("loses what follows for sends", verdicts_get_lost),
)  # fmt: skip


def drill(seed: int) -> list[Violation]:
    """A life of a master and its slaves."""
    return ha_world.check_ha(seed, Counter())
