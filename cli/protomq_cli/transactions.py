"""`transaction list|show|commit|rollback`: half messages that nobody has committed or rolled back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from protomq_cli.connection import open_admin
from protomq_cli.exits import CliError, ExitCode
from protomq_cli.message_text import message_row, time_text
from protomq_cli.options import DEFAULT_TIMEOUT_S, Namesrv, OnBroker, Output, Timeout
from protomq_cli.output import OutputFormat, print_object, print_rows
from protomq_cli.partial import Missing

if TYPE_CHECKING:
    from protomq import OpenTransaction, TransactionDecision

_COLUMNS = ("message_id", "topic", "group", "store_time", "checks", "next_check", "broker")
_EXPENDABLE = ("broker", "next_check", "group")

MessageId = Annotated[
    str, typer.Argument(metavar="MESSAGE_ID", show_default=False, help="Id of the half message.")
]


def list_transactions(
    topic: Annotated[
        str, typer.Option("--topic", "-t", metavar="TOPIC", show_default=False, help="Only those of this topic.")
    ] = "",
    group: Annotated[
        str, typer.Option("--group", "-g", metavar="GROUP", show_default=False, help="Only those of this producer group.")
    ] = "",
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:  # fmt: skip
    """List the open transactions of all brokers, the oldest first.

    Their messages are stored, and nobody gets them. Brokers ask any
    producer of the group what is to become of them.
    """
    missing = Missing()
    with open_admin(namesrv, timeout) as admin:
        found = missing.take(lambda: admin.list_transactions(topic=topic, group=group))
    print_rows([_row(each) for each in found], _COLUMNS, output, expendable=_EXPENDABLE)
    missing.check()


def show(
    message_id: MessageId,
    broker: OnBroker = None,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Show an open transaction with its message."""
    missing = Missing()
    with open_admin(namesrv, timeout) as admin:
        found = missing.take(
            lambda: admin.list_transactions(
                message_id=message_id, with_messages=True, brokers=None if broker is None else [broker]
            )
        )
    if not found:
        missing.check()
        nobody = "no broker has an" if broker is None else f"broker {broker} has no"
        raise CliError(
            ExitCode.NOT_FOUND,
            "TRANSACTION_NOT_FOUND",
            f"{nobody} open transaction of message {message_id!r}; `protomq transaction list` shows all there are",
        )
    transaction, *others = found
    if others:
        names = ", ".join(each.queue.broker_name for each in found)
        raise CliError(
            ExitCode.USAGE,
            "CONFIGURATION",
            f"message {transaction.message_id} has several open transactions, at {names}; `protomq transaction list` shows them. "
            "--broker NAME chooses one",
        )
    row = _row(transaction) | {"transaction_handle": transaction.transaction_handle}
    if transaction.message is not None:
        row = message_row(transaction.message) | row
    print_object(row, output)


def commit(
    message_id: MessageId,
    broker: OnBroker = None,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Commit an open transaction: its message is delivered.

    Its producer, if there is one, is not asked.
    """
    _end(message_id, "COMMIT", broker, namesrv, output, timeout)


def rollback(
    message_id: MessageId,
    broker: OnBroker = None,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Roll an open transaction back: nobody gets its message.

    Its producer, if there is one, is not asked.
    """
    _end(message_id, "ROLL_BACK", broker, namesrv, output, timeout)


def _end(
    message_id: str, name: str, broker: str | None, namesrv: str | None, output: OutputFormat, timeout: float
) -> None:
    from protomq import TransactionDecision

    decision: TransactionDecision = TransactionDecision[name]
    with open_admin(namesrv, timeout) as admin:
        transaction = admin.end_transaction(message_id, decision, broker=broker)
    ended = {"COMMIT": "committed", "ROLL_BACK": "rolled back"}[name]
    row = {"message_id": transaction.message_id, "topic": transaction.queue.topic, "ended": ended}
    print_object(row, output)


def _row(transaction: OpenTransaction) -> dict[str, Any]:
    queue = transaction.queue
    return {
        "message_id": transaction.message_id,
        "topic": queue.topic,
        "broker": queue.broker_name,
        "queue_id": queue.queue_id,
        "group": transaction.group,
        "store_time": time_text(transaction.store_time_ms),
        "checks": transaction.check_count,
        "next_check": time_text(transaction.next_check_time_ms),
        "size_bytes": transaction.size_bytes,
    }
