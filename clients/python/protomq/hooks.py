"""Hooks: methods of the program that a client calls before and after its own work.

    class Audit(Hook):
        def after_send(self, context):
            count(context.topic, failed=context.error is not None)

    Producer(hooks=[Audit()])         any client takes `hooks`, of threads and of coroutines alike

A hook has the methods that it needs; the others cost nothing. RocketMQ's models: SendMessageHook, ConsumeMessageHook, FilterMessageHook,
EndTransactionHook, RPCHook.

Rules:
- A hook never breaks the work that it watches: the client logs what a hook raises, once for each method, and goes on. Only on the main
  thread an interrupt goes through, and a SystemExit where no event loop runs.
- The client calls the methods on the thread, or in the task, that does the work. They are plain functions and must not wait.
- `before_...` methods are called in the order of the hooks, `after_...` methods in the opposite order, both with the same context.
- A hook keeps its data about one call in `context.notes`, under its own key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._message import Message
    from ._outgoing import OutgoingMessage, SendResult
    from ._transactions import TransactionDecision
    from ._types import MessageQueue

__all__ = [
    "CallContext",
    "CommitContext",
    "ConsumeContext",
    "EndTransactionContext",
    "Hook",
    "ReceiveContext",
    "SendContext",
    "SettleContext",
]


@dataclass(slots=True, eq=False)
class SendContext:
    """One call of `send` and the like.

    Attributes:
        group: the producer group; "" if there is none.
        topic: where the messages go.
        messages: the messages to send. `before_send` may replace them; their number and topic must stay.
        is_batch: whether the call was `send_batch`.
        is_one_way: nobody will know whether the message was stored: after it there are neither results nor an error.
        client_id: the client's id, as the brokers see it.
        results: where the messages are stored, in their order; empty before the send and after an error.
        server_address: host:port of the broker that has them; "" before, and if there are several.
        error: why the call failed.
        duration_s: duration of the call in seconds.
        notes: data of the hooks.
    """

    group: str
    topic: str
    messages: list[OutgoingMessage]
    is_batch: bool = False
    is_one_way: bool = False
    client_id: str = ""
    results: Sequence[SendResult] = ()
    error: BaseException | None = None
    duration_s: float = 0.0
    server_address: str = ""
    notes: dict[object, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class ConsumeContext:
    """Messages that the program has got.

    A push consumer, and `handle` of a simple one: around the call of a listener. A pull consumer: from `poll` until the program comes back
    for more, or closes; what a loop was left before is not done. `receive` of a simple consumer: one message, until `ack` or `nack`; of a
    message with neither there is no after.

    Attributes:
        group: of the consumer; "" if it has none.
        messages: one or more, of one topic where a listener gets them.
        listener: the name of the push consumer's listener; "" of other consumers.
        client_id: the client's id, as the brokers see it.
        failures: for each message why it is not done, None if it is done; empty before.
        server_address: host:port of the messages' broker; "" if there are several. Of its master, where a slave was read.
        error: what the listener raised.
        duration_s: seconds until the messages were done.
        notes: data of the hooks.
    """

    group: str
    messages: Sequence[Message]
    listener: str = ""
    client_id: str = ""
    failures: Sequence[str | None] = ()
    error: BaseException | None = None
    duration_s: float = 0.0
    server_address: str = ""
    notes: dict[object, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class ReceiveContext:
    """One `poll` of a pull consumer, or one `receive` of a simple one, also of its `handle`.

    Attributes:
        group: of the consumer; "" if it has none.
        topic: that of a `receive`; "" of a `poll`, which may bring messages of several.
        messages: what it has brought; empty before, and if there was nothing.
        server_address: host:port of their broker; "" before, and if there are several.
        client_id: of the client, as the brokers see it.
        error: what it raised.
        duration_s: until it returned, the waiting included.
        notes: of the hooks.
    """

    group: str
    topic: str = ""
    client_id: str = ""
    messages: Sequence[Message] = ()
    error: BaseException | None = None
    duration_s: float = 0.0
    server_address: str = ""
    notes: dict[object, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class SettleContext:
    """Popped messages of which brokers are told what became of them, by the program or for a handler.

    Attributes:
        group: of the consumer.
        operation: "ack" or "nack".
        messages: of one or several topics; those of several callers where they are told together.
        server_address: host:port of their broker; "" if there are several.
        client_id: of the client, as the brokers see it.
        stale: those that were not held any more; empty before.
        error: what it raised.
        duration_s: until the brokers had answered.
        notes: of the hooks.
    """

    group: str
    operation: str
    messages: Sequence[Message]
    client_id: str = ""
    stale: Sequence[Message] = ()
    error: BaseException | None = None
    duration_s: float = 0.0
    server_address: str = ""
    notes: dict[object, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class CommitContext:
    """Offsets of a group that one broker is told, by the program's `commit` or by the client itself. Local files are no broker.

    Attributes:
        group: of the consumer.
        topic, broker_name: whose queues these are.
        offsets: by queue, the next message to consume.
        server_address: host:port of the broker; "" if it is not known.
        client_id: of the client, as the brokers see it.
        error: why the broker did not take them.
        duration_s: until it answered.
        notes: of the hooks.
    """

    group: str
    topic: str
    broker_name: str
    offsets: Mapping[MessageQueue, int]
    client_id: str = ""
    error: BaseException | None = None
    duration_s: float = 0.0
    server_address: str = ""
    notes: dict[object, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class EndTransactionContext:
    """A decision on a transaction, which the client sends to its broker.

    Attributes:
        group: of the producer.
        topic, broker_name: where the half message is.
        message_id: of the message; it keeps it.
        transaction_handle: names the transaction.
        decision: COMMIT or ROLL_BACK.
        is_check: whether the broker had asked.
        error: why the broker did not get the decision; None before, and if it did.
        duration_s: seconds until the broker answered.
        notes: data of the hooks.
    """

    group: str
    topic: str
    broker_name: str
    message_id: str
    transaction_handle: str
    decision: TransactionDecision
    is_check: bool
    error: BaseException | None = None
    duration_s: float = 0.0
    notes: dict[object, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class CallContext:
    """A call to a server: one try. Pulls and other calls that a server holds are among them.

    Attributes:
        server: the name of the broker; of a name server its address.
        method: as gRPC has it: "/protomq.v1.SendService/Send".
        request_size_bytes, answer_size_bytes: of the encoded messages, without frames.
        timeout_s: the call's time-out.
        is_one_way: there will be no answer.
        error: what the call raised.
        duration_s: seconds until the answer or the error.
        notes: data of the hooks.
    """

    server: str
    method: str
    request_size_bytes: int
    timeout_s: float
    is_one_way: bool = False
    answer_size_bytes: int = 0
    error: BaseException | None = None
    duration_s: float = 0.0
    notes: dict[object, Any] = field(default_factory=dict)


class Hook:
    """Derive from it, and write the methods that are needed."""

    def before_send(self, context: SendContext) -> None:
        """Called before messages are sent; nothing of them is encoded yet."""

    def after_send(self, context: SendContext) -> None:
        """Called after the send: the messages are stored (`context.results`), not stored (`context.error`), or nobody knows
        (`context.is_one_way`).
        """

    def before_consume(self, context: ConsumeContext) -> None:
        """Called before the program gets messages."""

    def after_consume(self, context: ConsumeContext) -> None:
        """Called when the program is done with the messages; `context.failures` has the outcome."""

    def before_receive(self, context: ReceiveContext) -> None:
        """The program asks for messages."""

    def after_receive(self, context: ReceiveContext) -> None:
        """It gets them (`context.messages`, which may be none), or an error."""

    def before_settle(self, context: SettleContext) -> None:
        """Brokers are to be told that popped messages are done, or given back."""

    def after_settle(self, context: SettleContext) -> None:
        """They have taken it, but for `context.stale`, or not (`context.error`)."""

    def before_commit(self, context: CommitContext) -> None:
        """A broker is to be told offsets."""

    def after_commit(self, context: CommitContext) -> None:
        """It has taken them, or not (`context.error`)."""

    def keeps(self, message: Message) -> bool:
        """Returns whether the program gets a message; one that it does not get counts as done. If a hook raises, the program gets the
        message.
        """
        return True

    def before_end_transaction(self, context: EndTransactionContext) -> None:
        """Called before a decision is sent to its broker."""

    def after_end_transaction(self, context: EndTransactionContext) -> None:
        """Called after the broker has taken the decision, or not (`context.error`)."""

    def before_call(self, context: CallContext) -> None:
        """Called before a request goes to a server."""

    def after_call(self, context: CallContext) -> None:
        """Called when the request is answered, or has failed (`context.error`)."""
