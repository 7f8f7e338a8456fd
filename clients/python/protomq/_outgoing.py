"""What is sent and what comes back: OutgoingMessage, SendResult, SendStatus, BatchResult."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, TypeVar, overload

from ._types import Body, Delay, MessageQueue
from .wire.recall_handle import RecallHandle, decode_handle, encode_handle
from .wire.record import encode_message_id

if TYPE_CHECKING:
    from datetime import datetime


_T = TypeVar("_T")


class SendStatus(IntEnum):
    """What is promised (protomq.v1.SendStatus without prefix). In all four the message is appended.

    SEND_OK says that the broker's promise holds. With the others a power cut or a fail-over may take the message back. The SDK does not
    try again: send it again if it must stay.
    """

    SEND_OK = 1
    FLUSH_DISK_TIMEOUT = 2
    FLUSH_SLAVE_TIMEOUT = 3
    SLAVE_NOT_AVAILABLE = 4

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class OutgoingMessage:
    """A message to send, where the keyword form of `send` is not handy; hooks and selectors are given this form too.

    `body`: bytes, or what a body codec encodes (`protomq.body_codecs`); hooks and selectors are given bytes. `key` is the first key
    (None or "": there is none), `keys` are further ones: 64 together, none empty. Look-ups find the message by each. `queue` is where
    it must go; `sharding_key` keeps its order ("" is none, as on the wire). A property has a name; its value may be empty, and
    arrives so. `delay`, `deliver_at`: see `Producer.send`.
    """

    topic: str
    body: Body
    key: str | None = None
    keys: Sequence[str] = ()
    tag: str = ""
    properties: Mapping[str, str] | None = None
    sharding_key: str | None = None
    queue: MessageQueue | None = None
    delay: Delay | None = None
    deliver_at: datetime | None = None


class SendResult:
    """Where a message is stored. Immutable.

    `physical_offset` is that of the request's first message: one record's place within a request is the broker's business.
    `repeated_send`: the broker knew the message from an earlier attempt; it is stored once, at the place named here.
    `recall_handle`: takes a delayed message back, see `Producer.recall`; "" of any other. A delayed message has the `queue_offset` -1:
    it gets one when it is delivered.
    """

    __slots__ = (
        "_identity", "physical_offset", "queue", "queue_offset", "recall_handle", "repeated_send", "status",
    )  # fmt: skip

    def __init__(
        self,
        status: SendStatus,
        queue: MessageQueue,
        queue_offset: int,
        physical_offset: int,
        repeated_send: bool,
        identity: tuple[int, int, int],
        recall_handle: str = "",
    ) -> None:
        self.status = status
        self.queue = queue
        self.queue_offset = queue_offset
        self.physical_offset = physical_offset
        self.repeated_send = repeated_send
        self._identity = identity
        self.recall_handle = recall_handle

    @property
    def message_id(self) -> str:
        """40 hex digits: producer id, epoch, sequence."""
        return encode_message_id(*self._identity)

    def __repr__(self) -> str:
        topic, broker_name, queue_id = self.queue
        repeated = ", repeated" if self.repeated_send else ""
        return f"<SendResult {self.status.name} {topic}/{broker_name}/{queue_id}@{self.queue_offset}{repeated} id={self.message_id}>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SendResult):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    def __hash__(self) -> int:
        return hash((self._identity, self.queue, self.queue_offset))


class DelayedPlaces(NamedTuple):
    """Where the records of a delayed request stand: the handles of its messages are made of it.

    Attributes:
        first: handle of the first.
        sizes: of the record fields, in bytes.
        due_times_ms: of each; 0: that of the first.
    """

    first: str
    sizes: Sequence[int]
    due_times_ms: Sequence[int]

    def handle(self, index: int) -> str:
        """Of one message; "" where the broker has told none, or one of a kind that is not known here."""
        if not index:
            return self.first
        try:
            first = decode_handle(self.first)
        except ValueError:
            return ""
        producer_id, epoch, sequence = first.message_id
        return encode_handle(
            RecallHandle(
                first.broker_name,
                first.position + sum(self.sizes[:index]),
                self.due_times_ms[index] or first.due_time_ms,
                (producer_id, epoch, sequence + index),
            )
        )


class Stored:
    """The answer to one request: a run of messages in one queue."""

    __slots__ = (
        "count",
        "delayed",
        "first_offset",
        "first_sequence",
        "identity",
        "physical_offset",
        "queue",
        "repeated_send",
        "status",
    )

    def __init__(
        self,
        status: SendStatus,
        queue: MessageQueue,
        first_offset: int,
        physical_offset: int,
        repeated_send: bool,
        identity: tuple[int, int],
        first_sequence: int,
        count: int,
        delayed: DelayedPlaces | None = None,
    ) -> None:
        self.status = status
        self.queue = queue
        self.first_offset = first_offset
        self.physical_offset = physical_offset
        self.repeated_send = repeated_send
        self.identity = identity
        self.first_sequence = first_sequence
        self.count = count
        self.delayed = delayed

    def result(self, index: int) -> SendResult:
        """The result of one message of the request."""
        delayed = self.delayed
        return SendResult(
            self.status,
            self.queue,
            self.first_offset + index if delayed is None else -1,
            self.physical_offset,
            self.repeated_send,
            (*self.identity, self.first_sequence + index),
            "" if delayed is None else delayed.handle(index),
        )


class BatchResult(Sequence[SendResult]):
    """The results of a batch, in the order of its messages; each is made when it is looked at."""

    __slots__ = ("_places", "_stored")

    def __init__(
        self, stored: Sequence[Stored], places: Sequence[tuple[int, int]] | None = None
    ) -> None:
        self._stored = stored
        # For each message (request, index in it); None: the messages lie in order in the requests.
        self._places = places

    @classmethod
    def of_groups(
        cls,
        stored: Sequence[Stored],
        first_request: Mapping[_T, int],
        places: Sequence[tuple[_T, int]] | None,
    ) -> BatchResult:
        """`first_request`: index of the first request of each target; `places`: for each message its target and index there."""
        if places is None:
            return cls(stored)
        found: list[tuple[int, int]] = []
        for target, index in places:
            request = first_request[target]
            while index >= stored[request].count:
                index -= stored[request].count
                request += 1
            found.append((request, index))
        return cls(stored, found)

    def __len__(self) -> int:
        return (
            len(self._places)
            if self._places is not None
            else sum(stored.count for stored in self._stored)
        )

    @overload
    def __getitem__(self, index: int) -> SendResult: ...
    @overload
    def __getitem__(self, index: slice) -> list[SendResult]: ...
    def __getitem__(self, index: int | slice) -> SendResult | list[SendResult]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if index < 0:
            raise IndexError("batch result index out of range")
        if self._places is not None:
            request, place = self._places[index]
            return self._stored[request].result(place)
        for stored in self._stored:
            if index < stored.count:
                return stored.result(index)
            index -= stored.count
        raise IndexError("batch result index out of range")

    def __iter__(self) -> Iterator[SendResult]:
        if self._places is not None:
            return (self._stored[request].result(place) for request, place in self._places)
        return (stored.result(index) for stored in self._stored for index in range(stored.count))

    @property
    def requests(self) -> Sequence[Stored]:
        """One for each request that carried the batch."""
        return self._stored

    def __repr__(self) -> str:
        return f"<BatchResult of {len(self)} messages in {len(self._stored)} requests>"
