"""Sends of half messages: decides which are refused, and makes the handles that end their transactions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from protomq.v1.record_pb2 import RecordBatch
from protomq.v1.send_service_pb2 import SendResponse
from protomq.wire.record import FLAG_KIND_HALF
from protomq.wire.topics import why_no_group
from protomq_runtime.errors import ServiceError, invalid_argument, too_many

from .store.log.front import producer_groups_of
from .store.log.record_region import set_kind
from .store.state.half_messages import region_keys, region_sequences
from .store.state.send_errors import ProducerIdTakenError
from .topic_access import check_group_name

if TYPE_CHECKING:
    from .store.log.append import AppendRequest, RecordRegion
    from .store.state.transactions import Transactions
    from .transaction_handles import Handles

RETRY_FULL_MS: Final = 10_000
_HANDLE_TAG: Final = bytes((SendResponse.TRANSACTION_HANDLES_FIELD_NUMBER << 3 | 2,))


class HalfSends:
    """Checks and marks half messages. Used on the send lane only."""

    def __init__(
        self,
        transactions: Transactions,
        handles: Handles,
        *,
        count_max: int,
        size_max_bytes: int,
    ) -> None:
        self._transactions = transactions
        self._handles = handles
        self._count_max = count_max
        self._size_max_bytes = size_max_bytes

    def mark(self, region: RecordRegion, has_identity: bool) -> None:
        """Marks the messages of a request as half messages. Raises ServiceError if they cannot be."""
        if not has_identity:
            raise invalid_argument(
                "records[0].producer_id",
                "a half message has a producer id: without one, a send that is repeated would begin a second transaction",
            )
        if any(map(why_no_group, filter(None, producer_groups_of(region.data)))):
            _refuse_groups(region)
        set_kind(region, FLAG_KIND_HALF)

    def check(self, region: RecordRegion) -> None:
        """Raises ServiceError or ProducerIdTakenError if the broker refuses these new half messages."""
        transactions = self._transactions
        if transactions.open_count + region.count > self._count_max:
            raise _full("open transactions", self._count_max)
        if transactions.size_bytes + len(region.data) > self._size_max_bytes:
            raise _full("bytes of half messages", self._size_max_bytes)
        if not transactions.knows_any(
            region.producer_id, region.producer_epoch, region_sequences(region)
        ):
            return
        key = next(filter(transactions.knows, region_keys(region)))
        raise ProducerIdTakenError(
            f"sequence {key.sequence} of producer {key.producer_id:016X} with epoch {key.producer_epoch} belongs to another"
            " transaction. Two producers have this id, or one was restarted with its old epoch. Give each an id of its own,"
            " and a restarted one a higher epoch",
            *key,
        )

    def handle_fields_of(self, request: AppendRequest) -> bytes:
        """Returns the handles of half messages that were just appended, as fields of a SendResponse: it would look at each by itself."""
        region = request.region
        return self._handles.encode_fields(
            _HANDLE_TAG, request.physical_offset, region.producer_id, region.producer_epoch, region_sequences(region)
        )

    def handles_at(self, position: int, region: RecordRegion) -> list[str]:
        """Of half messages that stand from a position on, or stood there when they were sent."""
        return self._handles.encode_all(
            position, region.producer_id, region.producer_epoch, region_sequences(region)
        )


def _refuse_groups(region: RecordRegion) -> None:
    """Raises ServiceError for the first message of a group whose producers could not be asked."""
    for index, record in enumerate(RecordBatch.FromString(bytes(region.data)).records):
        group = record.attributes.producer_group
        if group:
            check_group_name(group, f"records[{index}].attributes.producer_group")


def _full(what: str, limit: int) -> ServiceError:
    return too_many(
        what,
        limit,
        f"the broker has {limit} {what}, and refuses more until some are ended: try again later, or at another broker",
        retry_delay_ms=RETRY_FULL_MS,
    )
