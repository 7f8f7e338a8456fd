"""One request of a producer: messages on their way to one queue, and where it goes. No sockets, no waiting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ._batching import (
    PreparedRecord,
    RecordEncoder,
)
from ._outgoing import DelayedPlaces
from ._types import BrokerAddress, MessageQueue, Route
from .errors import NoRouteError

if TYPE_CHECKING:
    pass


class Request:
    """Messages on their way to one queue, with their sequences; the payload is the same in every attempt at a broker."""

    __slots__ = (
        "address",
        "delay_field",
        "encoder",
        "first_sequence",
        "identity",
        "made_s",
        "payload",
        "previous_sequence",
        "queue",
        "queue_is_open",
        "records",
        "wait_store_ok",
    )  # fmt: skip

    def __init__(
        self,
        encoder: RecordEncoder,
        identity: tuple[int, int],
        records: Sequence[PreparedRecord],
        first_sequence: int,
        queue: MessageQueue,
        address: BrokerAddress | None,
        queue_is_open: bool,
        wait_store_ok: bool,
        previous_sequence: int | None,
        made_s: float,
        delay_field: bytes | None = None,
    ) -> None:
        self.encoder = encoder
        self.identity = identity
        self.records = records
        self.first_sequence = first_sequence
        self.address = address
        """None: the route does not name the broker; see `address_of`."""
        self.queue_is_open = queue_is_open
        self.wait_store_ok = wait_store_ok
        self.made_s = made_s
        self.delay_field = delay_field
        """As in `Target`."""
        self.aim(queue, previous_sequence)

    def aim(self, queue: MessageQueue, previous_sequence: int | None) -> None:
        """At a queue; `previous_sequence`: what its broker must have of this producer, None: nothing. The same records and sequences."""
        self.queue = queue
        self.previous_sequence = previous_sequence
        self.payload = self.encoder.encode_request(
            self.records,
            self.first_sequence,
            queue.queue_id,
            self.wait_store_ok,
            previous_sequence,
            self.delay_field or b"",
        )


def fits(route: Route, queue: MessageQueue | None) -> bool:
    """Whether messages for the queue (None: any) have a place to go by this route; where not, it may be outdated."""
    return bool(route.write_queues) if queue is None else queue.broker_name in route.brokers


def address_of(request: Request) -> BrokerAddress:
    """Where the request goes. Raises NoRouteError where its broker is not in the route: it may be away for a moment."""
    if request.address is None:
        queue = request.queue
        raise NoRouteError(
            f"no broker {queue.broker_name!r} is known to have the topic {queue.topic!r}",
            metadata={"topic": queue.topic, "broker_name": queue.broker_name},
        )
    return request.address


def places_of(request: Request, recall_handle: str) -> DelayedPlaces:
    """Where the records of a delayed request stand."""
    if len(request.records) == 1:
        return DelayedPlaces(recall_handle, (), ())
    due_times_ms = [record[4] >> 32 for record in request.records]
    sizes = request.encoder.field_sizes(request.records)
    return DelayedPlaces(recall_handle, sizes, due_times_ms)
