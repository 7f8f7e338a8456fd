"""One session of a slave with its master: makes the requests, and acts on each answer. No socket, clock or thread.

    begin_request -> began     the session, or why there is none
    fetch_request -> took      what an answer brought is stored, synced where the master counts that, and readable as far as confirmed
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from protomq.v1 import ha_service_pb2 as ha
from protomq_ha.intake import Intake, LogPart

from .store.errors import DiskFullError
from .store.log.agreement import START, LogPoint

if TYPE_CHECKING:
    from .store.store import Store


class OtherSegmentsError(Exception):
    """The master's segments have another size."""


class FollowSession:
    """Attributes:
    position: end of the part of the master's log that is stored here.
    end_position: where the master's log ended at its last answer.
    log_time_ms: the master's log time then; 0: it did not say it.
    """

    def __init__(self, store: Store, on_writer: Callable[[Callable[[], int]], int]) -> None:
        """`on_writer` calls a function while nobody else writes, and returns its result."""
        self.end_position = self.log_time_ms = 0
        self._first_end_position = 0
        self._store = store
        self._on_writer = on_writer
        self._session = 0
        self._intake = Intake(0)
        self._previous_crc32c: int | None = None
        self._heard_ms = 0
        self._confirmed_position = 0

    @property
    def position(self) -> int:
        """See the class."""
        return self._intake.position

    @property
    def has_caught_up(self) -> bool:
        """Whether all is stored here that the master had when the session began: synced, too, if the master counts that."""
        return self.position >= self._first_end_position

    def begin_request(
        self, broker_name: str, broker_id: int, address: str, epoch: int = 0
    ) -> ha.FetchRequest:
        """Returns the first fetch. `epoch`: the epoch in which the master leads; 0: roles are fixed."""
        store = self._store
        tail = store.positions.tail
        end = LogPoint(tail.position, store.epoch, tail.crc32c) if tail.position else START
        request = ha.FetchRequest(
            broker_name=broker_name,
            broker_id=broker_id,
            store_id=store.id,
            address=address,
            written_position=tail.position,
            flushed_position=store.flushed_position,
            epoch=epoch,
        )
        request.end.MergeFrom(ha.LogPoint(position=end.position, epoch=end.epoch, crc32c=end.crc32c))
        return request

    def began(self, response: ha.FetchResponse, part: LogPart) -> bool:
        """Takes the first answer and returns whether the session lasts. Raises OtherSegmentsError, and what `took` raises."""
        own_size_bytes = self._store.config.segment_size_bytes
        if response.segment_size_bytes != own_size_bytes:
            raise OtherSegmentsError(
                f"the master's segments have {response.segment_size_bytes} bytes, those here {own_size_bytes}: "
                "give both the same store.segment_size_bytes, and this slave an empty folder"
            )
        self._session = response.session
        # If this log is empty, it begins where the master's log begins.
        self._intake = Intake(response.position)
        if response.HasField("previous_crc32c"):
            self._previous_crc32c = response.previous_crc32c
        self._first_end_position = response.end_position
        return self.took(response, part)

    def fetch_request(self, hold_ms: int) -> ha.FetchRequest:
        """Returns the next fetch, which reports what is stored by now."""
        position = self._intake.position
        return ha.FetchRequest(
            session=self._session,
            written_position=position,
            flushed_position=min(self._store.flushed_position, position),
            hold_ms=hold_ms,
            heard_ms=self._heard_ms,
        )

    def acknowledgement(self) -> ha.AcknowledgeRequest:
        """Returns what says the same while no fetch is due."""
        fetch = self.fetch_request(0)
        return ha.AcknowledgeRequest(
            session=fetch.session,
            written_position=fetch.written_position,
            flushed_position=fetch.flushed_position,
            heard_ms=fetch.heard_ms,
        )

    def took(self, response: ha.FetchResponse, part: LogPart) -> bool:
        """Stores the log in an answer, notes its positions, and returns whether the session lasts. Raises StoreError, ValueError.

        `part`: the log in the answer. Its memory is needed no longer when this has returned.
        """
        if response.status != ha.FETCH_STATUS_OK:
            return False
        store, intake = self._store, self._intake
        self._confirmed_position = max(self._confirmed_position, response.confirmed_position)
        if part.octets:
            run = intake.add(response.position, part)
            at = intake.position
            before = self._previous_crc32c
            try:
                end = self._on_writer(lambda: store.append_verbatim(at, run, may_end_within=True, previous_crc32c=before))
            except DiskFullError:
                self._note_confirmed()  # of what is stored: it waits for nothing else
                raise
            intake.stored(end)
            if response.counts_flushed or store.config.sync_flush:
                store.flush()
        self._note_confirmed()
        self.end_position, self.log_time_ms = response.end_position, response.log_time_ms
        self._heard_ms = max(self._heard_ms, response.said_ms)
        return True

    def _note_confirmed(self) -> None:
        # No more than is stored here: behind that, the log of the next master may be another one.
        self._store.positions.note_replicated(min(self._confirmed_position, self._store.appended_position))
