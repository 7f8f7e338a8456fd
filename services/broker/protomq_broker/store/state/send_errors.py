"""Why a send is refused for what is known of its producer, and where one that is stored already stands. See `repeated_sends.py`."""

from __future__ import annotations

from typing import Final, NamedTuple

from protomq_broker.store.errors import StoreError

RETRY_MAX_MS: Final = 15 * 60_000
"""The longest time after which a send may be tried again: whoever has sent within it is known."""


class RepeatedSend(NamedTuple):
    """Where a send was stored the first time: its first record. Where that enters no consume queue, `queue_offset` is NO_OFFSET, and it
    comes `ahead` records behind the one at `position` of the log."""

    topic: str
    queue_id: int
    queue_offset: int
    position: int = 0
    ahead: int = 0


class RepeatedSendError(StoreError):
    """A send that is refused for what is known of its producer."""

    def __init__(self, text: str, producer_id: int, producer_epoch: int, sequence: int = 0) -> None:
        super().__init__(text)
        self.producer_id = f"{producer_id:016X}"
        self.producer_epoch = producer_epoch
        self.sequence = sequence


class ProducerFencedError(RepeatedSendError):
    """A producer with the same id and a higher epoch, `newer_epoch`, has written."""

    def __init__(self, producer_id: int, producer_epoch: int, newer_epoch: int) -> None:
        super().__init__(
            f"producer {producer_id:016X} has started again with epoch {newer_epoch}: this one, of epoch {producer_epoch},"
            " is fenced off and must stop",
            producer_id,
            producer_epoch,
        )
        self.newer_epoch = newer_epoch


class SequenceExpiredError(RepeatedSendError):
    """It cannot be told any more whether this send is stored. `sequence`: its first. `previous_sequence`: the one that it names, where
    that is what is not known; else None.
    """

    def __init__(
        self,
        text: str,
        producer_id: int,
        producer_epoch: int,
        sequence: int = 0,
        previous_sequence: int | None = None,
    ) -> None:
        super().__init__(text, producer_id, producer_epoch, sequence)
        self.previous_sequence = previous_sequence


class PartlyStoredError(SequenceExpiredError):
    """Of this send `count` sequences from `first_known` on are stored, at `part`, and others are not."""

    def __init__(
        self,
        text: str,
        producer_id: int,
        producer_epoch: int,
        sequence: int,
        part: RepeatedSend,
        first_known: int,
        count: int,
    ) -> None:
        super().__init__(text, producer_id, producer_epoch, sequence)
        self.part = part
        self.first_known = first_known
        self.count = count


class ProducerIdTakenError(RepeatedSendError):
    """The sequences of this send are those of other messages: it is not stored, and will not be. `sequence`: its first."""


class SendInFlightError(SequenceExpiredError):
    """The same send is part of the group that is not appended yet: ask again after the append."""


class SendOutOfOrderError(RepeatedSendError):
    """The message that is to stand before this one, `sequence`, is not stored. Nor is this one."""


class TooManyProducersError(StoreError):
    """A million producers have sent within 15 minutes: nobody new is taken. `limit`: how many are."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"{limit} producers have sent within {RETRY_MAX_MS // 60_000} minutes, the most that the broker remembers;"
            " use fewer producers and keep them, or try again later"
        )
        self.limit = limit
