"""Half messages: what their sends have other than plain ones. See _send_core.py; no sockets, no waiting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ._batching import RecordEncoder
from ._hook_points import HookPoints
from ._outgoing import SendResult, SendStatus, Stored
from ._producer_options import ProducerOptions
from ._send_core import SendCore
from ._send_request import Request
from ._transactions import End, TransactionDecision, new_end, wanted_end
from ._types import MessageQueue
from .errors import ConfigurationError, ProtocolError
from .wire.record import encode_varint

_HALF_FIELD: Final = b"\x58\x01"
"""SendRequest.half = true."""


class HalfResult(SendResult):
    """Where a half message was stored. `transaction_handle` names its transaction; `queue_offset` is -1 until it is committed."""

    __slots__ = ("transaction_handle",)

    transaction_handle: str


class HalfStored(Stored):
    """The answer to a request of half messages."""

    __slots__ = ("handles",)

    handles: Sequence[str]

    def result(self, index: int) -> HalfResult:
        """See `Stored`."""
        result = HalfResult(
            self.status,
            self.queue,
            -1,
            self.physical_offset,
            self.repeated_send,
            (*self.identity, self.first_sequence + index),
        )
        result.transaction_handle = self.handles[index]
        return result


def end_of(half: object, decision: TransactionDecision, *, for_hooks: bool) -> End:
    """The end of the transaction that a half message began. `for_hooks`: with its message id.

    Raises ConfigurationError for another result and for UNKNOWN, WrongTypeError for what is no decision.
    """
    if not isinstance(half, HalfResult):
        raise ConfigurationError("only the result of a half message names a transaction")
    return end_of_half(half, wanted_end(decision), for_hooks=for_hooks)


def end_of_half(half: HalfResult, decision: TransactionDecision, *, for_hooks: bool) -> End:
    """The same of values that need no check."""
    topic, broker_name, _ = half.queue
    message_id = half.message_id if for_hooks else ""
    return new_end((topic, broker_name, half.transaction_handle, decision, message_id, False))


class HalfEncoder(RecordEncoder):
    """Writes requests of half messages."""

    def encode_tail(self, sizes: Sequence[int], queue_id: int, wait_store_ok: bool = True) -> bytes:
        """See `RecordEncoder`."""
        return super().encode_tail(sizes, queue_id, wait_store_ok) + _HALF_FIELD


class HalfCore(SendCore):
    """The part of a transaction producer that does not wait."""

    encoder_class = HalfEncoder

    def __init__(self, options: ProducerOptions, hooks: HookPoints | None = None) -> None:
        super().__init__(options, hooks)
        group = options.group.encode()
        field = b"\x1a" + encode_varint(len(group)) + group
        # Attributes.producer_group; another occurrence of `attributes` before it is merged with it.
        self._front_end = b"\x2a" + encode_varint(len(field)) + field

    def _stored(
        self, request: Request, status: SendStatus, queue: MessageQueue, response: Any
    ) -> Stored:
        count, handles = response.record_count, list(response.transaction_handles)
        if len(handles) != count:
            raise ProtocolError(
                f"{count} half messages were sent, the broker answered {len(handles)} handles: it is of an earlier version"
            )
        half = HalfStored(
            status,
            queue,
            -1,
            response.physical_offset,
            response.repeated_send,
            request.identity,
            request.first_sequence,
            count,
        )
        half.handles = handles
        return half
