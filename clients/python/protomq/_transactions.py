"""Transactions: what a producer says of them, what it is asked, and the calls for both. See _transaction_producer.py.

Decisions of many callers on transactions of one broker travel together: while a request is on its way, the next ones gather.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache, partial
from itertools import chain
from operator import attrgetter
from typing import Any, Final, NamedTuple

from ._call_steps import call_broker
from ._checks import never_run_text, short
from ._decoding import decoded
from ._fields import field_values
from ._message import Message
from ._methods import END_TRANSACTION, WAIT_FOR_CHECKS
from ._outgoing import SendResult, SendStatus
from ._retry import UNTIL_THE_END
from ._seldom import SaidSeldom
from ._steps import CallServer, Steps
from ._types import BrokerAddress, MessageQueue
from .errors import (
    ClosedError,
    ConfigurationError,
    NotConfirmedError,
    ProtocolError,
    ProtomqError,
    TransactionEndedError,
    TransactionNotFoundError,
    WrongTypeError,
    error_from_status,
)
from .v1 import transaction_service_pb2 as pb
from .wire.record import MESSAGE_ID_LENGTH, encode_varint
from .wire.status import RpcStatus

logger = logging.getLogger("protomq.producer")

HOLD_S: Final = 30.0
"""How long a broker holds the call by which a producer tells it that it is there."""
HOLD_MARGIN_S: Final = 5.0
PAUSE_S: Final = 1.0
"""Before a broker is called again that did not answer."""
TOPIC_PAUSE_S: Final = 30.0
"""Between two looks whether other brokers have the topics now."""
ENDS_MAX: Final = 1_024
"""Decisions in one request."""


class TransactionDecision(IntEnum):
    """What is to become of a half message (RocketMQ: LocalTransactionState)."""

    UNKNOWN = 0
    """Not decided yet: the broker asks again later."""
    COMMIT = 1
    """It is delivered."""
    ROLL_BACK = 2
    """Nobody gets it."""

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class TransactionCheck:
    """A question of a broker: what has become of this transaction?

    Attributes:
        message: the half message, as a consumer would get it; its queue offset means nothing.
        check_count: how often it was asked, this time included; after the fifteenth, unless the broker is configured otherwise, it expires.
        transaction_handle: what the send of the half message answered, or another name of the same.
    """

    message: Message
    check_count: int
    transaction_handle: str


@dataclass(frozen=True, slots=True)
class TransactionResult:
    """What came of `TransactionProducer.send`.

    Attributes:
        half: where the half message was stored.
        decision: what the local work said. ROLL_BACK, too, where `half.status` is FLUSH_SLAVE_TIMEOUT or FLUSH_DISK_TIMEOUT: then there
            was no local work.
        is_ended: whether the broker has taken that decision, or no broker has what was to be rolled back. If not, it asks later: see
            `TransactionProducer`. False, too, where `wait_for_end` was: then it is not known yet.
    """

    half: SendResult
    decision: TransactionDecision
    is_ended: bool


_new_result: Final[Callable[[type[TransactionResult]], TransactionResult]] = object.__new__
_set_half, _set_decision, _set_is_ended = (
    vars(TransactionResult)[name].__set__ for name in ("half", "decision", "is_ended")
)


def result_of(half: SendResult, decision: TransactionDecision, is_ended: bool) -> TransactionResult:
    """As the class makes it, at half the time: what is frozen is set by name there, and here by its slot."""
    result = _new_result(TransactionResult)
    _set_half(result, half)
    _set_decision(result, decision)
    _set_is_ended(result, is_ended)
    return result


_SEND_OK: Final = SendStatus.SEND_OK
_UNCONFIRMED: Final = (SendStatus.FLUSH_SLAVE_TIMEOUT, SendStatus.FLUSH_DISK_TIMEOUT)
_DECISIONS: Final = {decision: bytes((0x10, decision)) for decision in TransactionDecision}
"""The field of a decision; none of those that are told is the default."""
_TAKEN_HEAD: Final = bytes((0x0A, MESSAGE_ID_LENGTH + 2, 0x22, MESSAGE_ID_LENGTH))
"""What stands before the message's id in the result of a decision that was taken."""


class End(NamedTuple):
    """A decision on its way.

    `topic`: one that the broker has, by which its address is known. `message_id`: only where hooks are told. `is_check`: the broker had
    asked.
    """

    topic: str
    broker_name: str
    handle: str
    decision: TransactionDecision
    message_id: str = ""
    is_check: bool = False


_topic_of: Final[Callable[[End], str]] = attrgetter("topic")
new_end: Final[Callable[[Iterable[Any]], End]] = partial(tuple.__new__, End)
"""As the class makes it, but without a call of Python for each."""


def decision_of(returned: object) -> TransactionDecision:
    """What a local execution says: it commits by returning None, or returns another decision.

    Raises WrongTypeError for anything else. False or "ROLL_BACK" may say that the work failed, and a row number that it was done. Only the
    check listener knows, so the transaction is left open.
    """
    if returned is None:  # nearly all
        return TransactionDecision.COMMIT
    if not isinstance(returned, TransactionDecision):
        raise WrongTypeError(
            f"execute returns None, which commits, or a TransactionDecision, not {short(returned)}. The transaction is left open, and the "
            "broker asks the check listener"
        )
    return returned


def refuse_never_run(returned: object) -> None:
    """Raises WrongTypeError for a coroutine or generator that a local execution returned: nothing was done, and it is rolled back."""
    if inspect.isgenerator(returned) or inspect.isasyncgen(returned) or inspect.iscoroutine(returned):
        raise WrongTypeError(
            f"execute returned {never_run_text(returned)}, so nothing was done, and the transaction is rolled back; "
            "coroutine functions are for AsyncTransactionProducer"
        )


def check_decision(returned: object, what: str) -> TransactionDecision:
    """Raises WrongTypeError for what is no decision."""
    if not isinstance(returned, TransactionDecision):
        raise WrongTypeError(f"{what} returns a TransactionDecision, not {returned!r}")
    return returned


def wanted_end(decision: object) -> TransactionDecision:
    """The decision by which a caller ends a transaction. Raises WrongTypeError, or ConfigurationError for UNKNOWN."""
    checked = check_decision(decision, "the caller")
    if checked is TransactionDecision.UNKNOWN:
        raise ConfigurationError("a transaction ends with COMMIT or ROLL_BACK")
    return checked


def listener_decision(returned: object) -> TransactionDecision:
    """What a check listener decides. Raises WrongTypeError for what is no decision."""
    return check_decision(returned, "a check listener")


def may_be_stored(error: BaseException) -> bool:
    """Whether the half message may be stored though its send raised this: no answer in time, say, or an interrupt."""
    return not (isinstance(error, ProtomqError) and error.definite)


def say_listener_failed(check: TransactionCheck, error: BaseException, seldom: SaidSeldom) -> None:
    """What the listener of a check raised, or that it returned no decision. Each open transaction is asked about again and again."""
    if seldom.is_due(type(error).__name__):
        logger.error(
            "the check of the transaction of message %s failed; it is asked again later (a further %s is not logged for a minute)",
            check.message.message_id, type(error).__name__, exc_info=error,
        )  # fmt: skip


def is_unconfirmed(half: SendResult) -> bool:
    """Whether a fail-over, or a power cut, may take back a half message: no local work is done for it.

    SLAVE_NOT_AVAILABLE is not meant: all copies that may lead next have the message. A master that is alone goes on as its settings say.
    """
    status = half.status
    return status is not _SEND_OK and status in _UNCONFIRMED


def say_unconfirmed(half: SendResult, seldom: SaidSeldom) -> None:
    """While a replica is silent, each half message is answered so."""
    if seldom.is_due(half.status.name):
        logger.warning(
            "the half message %s was answered %s. The local work is not done, and it is rolled back (a further one is not logged for a "
            "minute)",
            half.message_id, half.status.name,
        )  # fmt: skip


def not_begun(half: SendResult, refusal: ProtomqError | None) -> NotConfirmedError:
    """For a caller whose local work is to begin. `refusal`: why the half message is not known to be rolled back, if it is not."""
    if refusal is None:
        what = "it is rolled back"
    elif isinstance(refusal, TransactionEndedError):
        what = f"it was to be rolled back, and somebody else has ended it: {refusal}"
    else:
        what = f"it is to be rolled back: the broker may not know yet, and ask the check listener: {refusal}"
    error = NotConfirmedError(
        f"the half message was answered {half.status.name}, so no transaction is begun: {what}",
        metadata={
            "topic": half.queue.topic, "broker_name": half.queue.broker_name, "message_id": half.message_id, "status": half.status.name,
        },
    )  # fmt: skip
    error.definite = refusal is None
    return error


def not_rolled_back(message_id: str, error: ProtomqError) -> ProtomqError | None:
    """Of a roll-back that the broker did not take, while another error is what the program hears: what is logged, unless nobody has it."""
    say_not_taken(message_id, TransactionDecision.ROLL_BACK, error)
    return None if isinstance(error, TransactionNotFoundError) else error


def say_not_taken(message_id: str, decision: TransactionDecision, error: BaseException) -> None:
    """A decision that the broker did not take, or may not have."""
    if isinstance(error, TransactionNotFoundError):
        if decision is TransactionDecision.ROLL_BACK:
            logger.info("%s", _gone_text(message_id, decision))
        else:
            logger.error("%s: what was done for it is not told to consumers", _gone_text(message_id, decision))
        return
    if isinstance(error, TransactionEndedError):
        logger.error("the transaction of message %s is to %s, and has ended otherwise: %s", message_id, decision, error)
        return
    logger.warning(
        "the broker may not know yet that the transaction of message %s is to %s, it will ask: %s",
        message_id,
        decision,
        error,
    )


def say_not_told(count: int, why: str) -> None:
    """Decisions that nobody waits for, and nobody goes on with."""
    logger.warning(
        "the broker may not know yet of %d decision%s on transactions, it will ask: %s. Close the producer before: use `with`, or `async "
        "with`, or call close()",
        count, "s" if count > 1 else "", why,
    )  # fmt: skip


def note_not_taken(message_id: str, decision: TransactionDecision, error: ProtomqError) -> bool:
    """Whether the transaction has ended all the same: no broker has what was to be rolled back. Otherwise the broker asks later.

    Raises the error where asking again would be answered alike: not where the producer was closed meanwhile. A lost answer to an earlier
    try does not explain that there is no such transaction: the broker remembers what it has ended.
    """
    is_gone = isinstance(error, TransactionNotFoundError)
    if is_gone and decision is TransactionDecision.COMMIT:
        raise _gone(message_id, decision, error)
    if error.definite and not error.retriable and not is_gone and not isinstance(error, ClosedError):
        raise error
    say_not_taken(message_id, decision, error)
    return is_gone


def _gone(message_id: str, decision: TransactionDecision, error: ProtomqError) -> TransactionNotFoundError:
    gone = TransactionNotFoundError(f"{_gone_text(message_id, decision)}. The broker: {error.message}", metadata=error.metadata)
    gone.definite = error.definite
    return gone


def _gone_text(message_id: str, decision: TransactionDecision) -> str:
    return (
        f"the transaction of message {message_id} is to {decision}, and the broker has none that is open: a fail-over has taken the half "
        "message back, its topic was deleted, or it ended long ago. Nobody is asked about it"
    )


def end_steps(
    ends: Sequence[End], timeout_s: float, topics: Iterable[str] = ()
) -> Steps[list[bool | ProtomqError]]:
    """Tells one broker of decisions; of each, whether the transaction had ended so before, or why it was refused. Raises what the call
    raises. It is tried until the time is over: a decision that comes twice is answered as the first time.

    `topics`: that the broker had, besides those of the decisions. By any of them it is found, though others were deleted since.
    """
    payload = [_end_fields(ends)]
    topic, broker_name = ends[0].topic, ends[0].broker_name
    others = dict.fromkeys(chain(map(_topic_of, ends), topics))
    answer = yield from call_broker(
        topic, broker_name, END_TRANSACTION, payload, timeout_s, UNTIL_THE_END, other_topics=others
    )
    return _outcomes(ends, answer)


def _end_fields(ends: Sequence[End]) -> bytes:
    """An EndTransactionRequest. Nearly always all decisions are one, and the handles have one size: then there is no step for each."""
    handles = [end.handle.encode() for end in ends]
    decisions = [end.decision for end in ends]
    if len(set(decisions)) > 1 or len(set(map(len, handles))) > 1:
        return b"".join(map(_end_field, handles, decisions))
    head, what = _end_head(len(handles[0])), _DECISIONS[decisions[0]]
    return b"%b%b%b" % (head, (what + head).join(handles), what)


def _end_field(handle: bytes, decision: TransactionDecision) -> bytes:
    """A field of EndTransactionRequest: what a message object would give, at a fraction of the time."""
    return b"%b%b%b" % (_end_head(len(handle)), handle, _DECISIONS[decision])


@lru_cache(maxsize=64)
def _end_head(handle_size: int) -> bytes:
    """What stands before a handle of this size."""
    head = b"\x0a" + encode_varint(handle_size)
    return b"\x0a" + encode_varint(len(head) + handle_size + 2) + head


def _outcomes(ends: Sequence[End], answer: bytes) -> list[bool | ProtomqError]:
    if _are_taken(answer, len(ends)):
        return [False] * len(ends)
    results = decoded(answer, pb.EndTransactionResponse.FromString).results
    if len(results) != len(ends):
        raise ProtocolError(f"{len(ends)} decisions were told, the broker answered {len(results)}")
    found: list[bool | ProtomqError] = []
    for result in results:
        if result.error_reason:
            status = RpcStatus(0, result.error_message, result.error_reason)
            refusal = error_from_status(status)
            refusal.code = type(refusal).code
            found.append(refusal)
        else:
            found.append(result.repeated_decision)
    return found


def _are_taken(answer: bytes, count: int) -> bool:
    """Whether the answer has this number of results, each with its message's id and nothing else: the usual one, told without a parser."""
    size = len(_TAKEN_HEAD) + MESSAGE_ID_LENGTH
    return (
        len(answer) == count * size
        and answer.isascii()
        and all(answer[at::size] == _TAKEN_HEAD[at : at + 1] * count for at in range(len(_TAKEN_HEAD)))
    )


def topic_in_turn(topics: Collection[str], failures: int) -> str:
    """By whose route a broker is found that was not reached so often: one that it had may have been deleted."""
    return list(topics)[failures % len(topics)]


def wait_steps(
    address: BrokerAddress, broker_name: str, group: str, hold_s: float = HOLD_S
) -> Steps[list[TransactionCheck]]:
    """Tells a broker that a producer of the group is there, and waits for what it asks."""
    request = pb.WaitForChecksRequest(producer_group=group, hold_ms=int(hold_s * 1000))
    answer: bytes = yield CallServer(
        address, WAIT_FOR_CHECKS, [request.SerializeToString()], hold_s + HOLD_MARGIN_S
    )
    return [_check_of(octets, broker_name) for octets in field_values(answer, 1)]


def _check_of(octets: bytes, broker_name: str) -> TransactionCheck:
    asked = pb.TransactionCheck.FromString(octets)
    # The record as it stands: what its CRC covers may be written in more than one way.
    (record,) = field_values(octets, 2)
    queue = MessageQueue(asked.message.topic, broker_name, asked.message.queue_id)
    message = Message.from_record(record, queue, -1)
    return TransactionCheck(message, asked.check_count, asked.transaction_handle)


