"""Open transactions over all brokers: which there are, and an operator's decision on one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from . import _methods
from ._checks import check_text
from ._late_imports import fork_waits
from ._message import Message
from ._transactions import TransactionDecision, wanted_end
from ._types import MessageQueue
from .errors import ConfigurationError, ProtomqError, TransactionNotFoundError

if TYPE_CHECKING:
    from ._admin_calls import AdminCalls

_PAGE_SIZE: Final = 100


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction that nobody has ended.

    Attributes:
        message_id: of its half message.
        queue: where that goes.
        group: whose producers are asked; "": nobody's.
        store_time_ms: when it was stored, in milliseconds since 1970.
        check_count: how often it was asked.
        next_check_time_ms: when it is asked next, or expires.
        size_bytes: of its record in the log.
        transaction_handle: names it to its broker.
        message: the half message, where it was asked for and can be read.
    """

    message_id: str
    queue: MessageQueue
    group: str
    store_time_ms: int
    check_count: int
    next_check_time_ms: int
    size_bytes: int
    transaction_handle: str
    message: Message | None = None


def list_transactions(
    admin: AdminCalls,
    *,
    topic: str = "",
    group: str = "",
    message_id: str = "",
    with_messages: bool = False,
    brokers: Iterable[str] | None = None,
) -> tuple[list[OpenTransaction], dict[str, ProtomqError]]:
    """The open ones, the oldest first, and the brokers that did not answer."""
    with fork_waits:
        from .v1 import transaction_service_pb2 as pb

    wanted = pb.ListTransactionsRequest(
        topic=check_text("topic", topic),
        producer_group=check_text("group", group),
        message_id=check_text("message_id", message_id).upper(),
        count_max=_PAGE_SIZE,
        with_messages=with_messages,
    )
    def ask(broker: Any) -> list[OpenTransaction]:
        found: list[OpenTransaction] = []
        request = pb.ListTransactionsRequest()
        request.CopyFrom(wanted)
        while True:
            answer = admin._call(
                broker.address, _methods.LIST_TRANSACTIONS, request, pb.ListTransactionsResponse
            )
            found.extend(_open(each, broker.broker_name) for each in answer.transactions)
            if not answer.next_position:
                return found
            request.position = answer.next_position

    answers, failures = admin._answers(brokers, ask)
    return sorted((each for _, found in answers for each in found), key=lambda each: each.store_time_ms), failures


def end_transaction(
    admin: AdminCalls, message_id: str, decision: TransactionDecision, broker: str | None = None
) -> OpenTransaction:
    """Ends the open transaction of a message; what it was.

    Raises TransactionNotFoundError if no broker has it open, or what a broker that did not answer raised; ConfigurationError if several
    have it open. `broker`: the one that is asked.
    """
    with fork_waits:
        from .v1 import transaction_service_pb2 as pb

    decision = wanted_end(decision)
    if not message_id:
        raise ConfigurationError("message_id is empty")
    found, failures = list_transactions(admin, message_id=message_id, brokers=None if broker is None else [broker])
    if not found:
        nobody = "no broker has an" if broker is None else f"broker {broker} has no"
        not_found = TransactionNotFoundError(
            f"{nobody} open transaction of message {message_id}: it has ended, or there never was one",
            metadata={"message_id": message_id},
        )
        raise next(iter(failures.values()), not_found)
    transaction, *others = found
    if others:
        names = ", ".join(each.queue.broker_name for each in found)
        raise ConfigurationError(
            f"message {transaction.message_id} has several open transactions, at {names}. A store that was copied under another name has "
            "those of the other one. Stop one of these brokers, or name the one at which it is to end"
        )

    def ask(at: Any) -> None:
        request = pb.EndTransactionRequest()
        request.ends.add(
            transaction_handle=transaction.transaction_handle, decision=int(decision)
        )
        admin._call(
            at.address, _methods.END_TRANSACTION, request, pb.EndTransactionResponse
        )

    for error in admin._ask_each([transaction.queue.broker_name], ask).values():
        raise error
    return transaction


def _open(each: Any, broker_name: str) -> OpenTransaction:
    queue = MessageQueue(each.topic, broker_name, each.queue_id)
    return OpenTransaction(
        each.message_id,
        queue,
        each.producer_group,
        each.store_time_ms,
        each.check_count,
        each.next_check_time_ms,
        each.size_bytes,
        each.transaction_handle,
        Message.from_record(each.record, queue, -1) if each.record else None,
    )
