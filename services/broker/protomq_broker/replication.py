"""Replication of one broker. On a master it applies to sends what follows from the slaves; on a slave it runs the thread that follows.

This module connects; `ha_service.py` serves slaves, `ha_follower.py` follows, `protomq_ha` decides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from protomq_ha.roles import BrokerRole
from protomq_runtime.errors import Code, ServiceError

from .confirmed_file import ConfirmedFile, ConfirmedNotes
from .ha_follower import HaFollower
from .ha_service import HaService
from .store.files.disk import Disk

if TYPE_CHECKING:
    from protomq_ha.replicas import Verdict
    from protomq_runtime.call import CallLane
    from protomq_runtime.clock import Clock

    from .config import BrokerConfig
    from .follower_writer import FollowerWriter
    from .leadership_driver import LeadershipDriver
    from .log_time import LogTime
    from .send_service import SendService
    from .store.store import Store
    from .system_writer import SystemWriter
    from .waiting_answers import WaitingAnswers

log = logging.getLogger("protomq.broker")

RETRY_DELAY_MS = 1_000
CHANGING_DELAY_MS = 100
_WELL = "answered SEND_OK again"


class Replication:
    """See the module's docstring. Attributes: service; follower, of a slave, else None."""

    def __init__(
        self,
        store: Store,
        config: BrokerConfig,
        broker_name: str,
        clock: Clock,
        draw: Callable[[], int],
        follower_writer: FollowerWriter,
        on_truncated: Callable[[], None],
        leadership: LeadershipDriver | None = None,
        log_time: LogTime | None = None,
    ) -> None:
        """`on_truncated`: on a slave, called when the store has to be opened again. `leadership`: given where the master is elected.
        `log_time`: a master tells it, and a slave takes that of its master.
        """
        self._leadership = leadership
        self._confirmed_file = ConfirmedFile(Disk(), store.root)
        self._store = store
        self._config = config
        self._broker_name = broker_name
        self._is_sync = config.role is BrokerRole.SYNC_MASTER
        self.follower: HaFollower | None = None
        if config.role is BrokerRole.SLAVE:
            self.follower = HaFollower(
                store,
                config,
                broker_name,
                clock,
                follower_writer,
                self._confirmed_file,
                on_truncated,
                leadership,
                log_time,
            )
        elif config.ha.master:
            # Not refused: who changes the roles of two brokers may leave it in both files.
            log.warning("ha.master is not used: broker_role is %s, and only a SLAVE follows", config.role.value)
        follower = self.follower
        self.service = HaService(
            store,
            config,
            clock,
            broker_name,
            draw,
            self._note_verdict,
            (lambda: follower.view) if follower is not None else None,
            leadership,
            log_time,
        )
        self._notes = ConfirmedNotes(
            self._confirmed_file, lambda: store.positions.confirmed, config.ha.heartbeat_interval_ms / 1_000
        )
        """Of a master that was elected."""
        self._confirmed_position = 0
        """The confirmed position after all verdicts so far. The ha lane."""
        self._outcome_said = _WELL
        self._send: SendService | None = None
        self._waiting: WaitingAnswers | None = None
        self._writer: SystemWriter | None = None

    def begin(
        self, lane: CallLane, send: SendService, waiting: WaitingAnswers, writer: SystemWriter
    ) -> None:
        """Starts when all lanes but the send lane run. `lane`: the lane of the HaService. A slave begins to follow only with `follow`."""
        if self.follower is not None:
            return
        self._send, self._waiting, self._writer = send, waiting, writer
        positions = self._store.positions
        if self._leadership is not None:
            # A confirmed position stays confirmed under any leader; everything above it waits for the in-sync set.
            positions.note_replicated(self._confirmed_file.read_within(positions.appended))
            positions.on_appended.append(self._confirm_alone)
            self._notes.start()
        self._apply(self.service.verdict)
        self._store.keep_from_position = lambda: self.service.kept_position
        self.service.begin(lane)

    def follow(self, own_address: str) -> None:
        """Makes a slave begin to follow. `own_address`: the address that the master shows."""
        if self.follower is not None:
            self.follower.start(own_address)

    def counts(self) -> tuple[int, int, int, int]:
        """The numbers of metrics.REPLICATION. Any thread."""
        end = self._store.appended_position
        if self.follower is not None:
            view = self.follower.view
            return 0, 0, max(view.end_position - end, 0), int(not view.problem)
        service, views = self.service, self.service.views
        lag = max((end - view.written_position for view in views), default=0)
        if service.standing.late:  # each member of the set has what is confirmed
            lag = max(lag, end - self._store.positions.confirmed)
        return len(views), service.in_sync_count, max(lag, 0), 0

    def close(self, *, keeps_store: bool = False) -> None:
        """Stops replication. Call it when no lane runs any more. `keeps_store`: it stays open, and knows what is confirmed."""
        if self.follower is not None and keeps_store:
            self.follower.stop()
        elif self.follower is not None:
            self.follower.close()
        elif self._leadership is not None:
            self._notes.close()

    def _confirm_alone(self, end_position: int) -> None:
        """Confirms an append for which no other copy is needed. The send lane."""
        assert self._leadership is not None
        assert self._send is not None
        if not self.service.standing.alone:
            return
        standing = self._leadership.confirm_alone(end_position)
        if standing.alone:
            verdict = self.service.verdict_of(standing)
            self._send.confirmation.change(verdict, self._confirmed_position)
            self._store.positions.note_replicated(standing.confirmed_position)

    def _note_verdict(self, verdict: Verdict) -> None:
        """Takes a new verdict. The ha lane."""
        if not self._is_sync:
            return
        positions = self._store.positions
        confirmed_before = max(self._confirmed_position, positions.replicated)
        self._confirmed_position = max(confirmed_before, verdict.confirmed_position)
        if not verdict.is_short:
            positions.note_replicated(verdict.confirmed_position)
        assert self._writer is not None
        self._writer.post(lambda: self._apply(verdict, confirmed_before))

    def _apply(self, verdict: Verdict, confirmed_before: int = 0) -> None:
        """Applies a verdict to sends; on the send lane, or before it begins. `confirmed_before`: up to where the log was confirmed before
        it.
        """
        assert self._send is not None
        assert self._waiting is not None
        if not self._is_sync:
            return
        positions = self._store.positions
        send = self._send
        send.confirmation.change(verdict, confirmed_before)
        if positions.waits_for_replicas is not verdict.waits:
            positions.wait_for_replicas(verdict.waits)
        if verdict.is_short:
            # First the send lane must know that fewer copies have the log: otherwise it answers SEND_OK in between.
            positions.note_replicated(verdict.confirmed_position)
            self.service.signal(verdict.confirmed_position)
        outcome = self._outcome(verdict)
        if outcome != self._outcome_said:
            self._outcome_said = outcome
            log.warning("%d of %d copies are in sync: sends are %s", verdict.in_sync_count, self._config.ha.in_sync_replicas, outcome)
        send.shortage = self._shortage(verdict) if verdict.refuses else None
        if self._leadership is not None and not self.service.standing.takes_sends:
            send.shortage = changing_hands(self._broker_name)
        self._waiting.resolve()

    def _outcome(self, verdict: Verdict) -> str:
        """Says what becomes of sends."""
        if verdict.refuses:
            wanted = self._config.ha.min_in_sync_replicas
            if verdict.in_sync_count >= wanted:
                return "refused, since this broker does not lead yet, or not any more"
            return f"refused, since min_in_sync_replicas is {wanted}"
        return "answered SLAVE_NOT_AVAILABLE" if verdict.is_short else _WELL

    def _shortage(self, verdict: Verdict) -> ServiceError:
        wanted = self._config.ha.min_in_sync_replicas
        return ServiceError(
            Code.UNAVAILABLE,
            "NOT_ENOUGH_REPLICAS",
            f"{verdict.in_sync_count} copies are in sync, min_in_sync_replicas is {wanted}: nothing was stored; use another broker, "
            "or try again when the slaves are back",
            metadata={
                "in_sync_count": str(verdict.in_sync_count),
                "min_in_sync_replicas": str(wanted),
            },
            retry_delay_ms=RETRY_DELAY_MS,
        )


def changing_hands(broker_name: str) -> ServiceError:
    """Makes an error for a broker that gives up the lead, or may have lost it."""
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "NOT_MASTER",
        f"this broker does not lead {broker_name} now: nothing was stored; ask the route who does, and try again",
        metadata={"broker_name": broker_name, "broker_id": "0"},
        retry_delay_ms=CHANGING_DELAY_MS,
    )
