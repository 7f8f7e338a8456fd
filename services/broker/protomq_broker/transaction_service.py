"""TransactionService: ends transactions, holds the calls by which producers hear of checks, and lists what is open. On the send lane."""

from __future__ import annotations

import struct
from bisect import bisect_left
from functools import lru_cache, partial
from itertools import starmap
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar

from google.protobuf.message import DecodeError, Message

from protomq.v1.transaction_service_pb2 import (
    EndTransactionRequest,
    EndTransactionResponse,
    ListTransactionsRequest,
    ListTransactionsResponse,
    OpenTransaction,
    TransactionDecision,
    TransactionEnd,
    TransactionEnded,
    WaitForChecksRequest,
)
from protomq.wire.record import MESSAGE_ID_LENGTH, decode_message_id, encode_message_id
from protomq_runtime.dispatch import drained, raw
from protomq_runtime.errors import ServiceError, invalid_argument, unparsable

from .store.log.record_scan import record_field_at
from .store.state.half_copies import first_halves
from .store.state.transactions import Ending
from .store_errors import tells_store_errors, to_service_error
from .topic_access import check_group_name, check_topic_name
from .transaction_checks import record_of
from .transaction_endings import ENDED_NOW, Outcome, Wanted, new_wanted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from protomq_runtime.call import Call, CallContext

    from .config import BrokerConfig
    from .store.state.transactions import OpenTransaction as Known
    from .store.state.transactions import TransactionKey
    from .store.store import Store
    from .transaction_checks import TransactionChecks
    from .transaction_endings import TransactionEndings
    from .transaction_handles import Handles
    from .waiting_answers import WaitingAnswers
    from .write_permit import WritePermit

ENDS_MAX: Final = 4_096
"""Most decisions in one request."""
LISTED_MAX: Final = 100
"""Open transactions that one answer lists."""
LOOKED_AT_MAX: Final = 2_000
"""Most open transactions that one answer examines on the send lane: sends wait 1 to 2 ms for it."""
_ENDINGS: Final = {
    TransactionDecision.TRANSACTION_DECISION_COMMIT: Ending.COMMITTED,
    TransactionDecision.TRANSACTION_DECISION_ROLL_BACK: Ending.ROLLED_BACK,
}

_ID_HEAD: Final = bytes((TransactionEnded.MESSAGE_ID_FIELD_NUMBER << 3 | 2, MESSAGE_ID_LENGTH))
_TAKEN_HEAD: Final = (
    bytes((EndTransactionResponse.RESULTS_FIELD_NUMBER << 3 | 2, len(_ID_HEAD) + MESSAGE_ID_LENGTH))
    + _ID_HEAD
)
"""What stands before the message's id in the result of a decision that was taken: two fields with a length each."""
_ID: Final = struct.Struct(">QIQ")
"""A message id: its digits are those of these octets."""
_key_of: Final[Callable[[Wanted], TransactionKey]] = attrgetter("key")
_END_TAGS: Final = bytes(
    (
        EndTransactionRequest.ENDS_FIELD_NUMBER << 3 | 2,
        TransactionEnd.TRANSACTION_HANDLE_FIELD_NUMBER << 3 | 2,
    )
)
_DECISION_TAG: Final = TransactionEnd.DECISION_FIELD_NUMBER << 3

M = TypeVar("M", bound=Message)


class TransactionService:
    """Implements protomq.v1.TransactionService. All methods on the send lane's thread."""

    def __init__(
        self,
        store: Store,
        config: BrokerConfig,
        permit: WritePermit,
        waiting: WaitingAnswers,
        handles: Handles,
        endings: TransactionEndings,
        checks: TransactionChecks,
    ) -> None:
        self._store = store
        self._config = config
        self._permit = permit
        self._waiting = waiting
        self._handles = handles
        self._endings = endings
        self._checks = checks

    def stop(self) -> None:
        """Refuses new calls, and answers the waiting ones."""
        self._checks.stop()

    @drained
    def end_transaction(self, calls: list[Call]) -> None:
        """Ends what has arrived by now with one append."""
        asked: list[tuple[Call, Sequence[Wanted | ServiceError]]] = []
        decisions: list[Wanted] = []
        for call in calls:
            try:
                if self._permit.refusal is not None:
                    raise self._permit.refusal
                usual = self._usual(call.payload)
                wanted: Sequence[Wanted | ServiceError] = usual or self._parsed(call)
            except Exception as error:
                call.fail(to_service_error(error))
                continue
            asked.append((call, wanted))
            decisions += usual or (each for each in wanted if isinstance(each, Wanted))
        outcomes = self._endings.end(decisions) if decisions else []
        if len(asked) == 1 and len(outcomes) == len(asked[0][1]):
            self._answer(*asked[0], outcomes)
        else:
            others = iter(outcomes)
            for call, wanted in asked:
                self._answer(call, wanted, [_outcome(each, others) for each in wanted])
        self._waiting.request_flush()

    def _usual(self, payload: bytes | bytearray) -> list[Wanted] | None:
        """What a request of several decisions wants, if all have the size of the first one and name transactions of this broker; else None.

        That is how an SDK writes them. No object is made for each field.
        """
        size = len(payload)
        if size < 4 or payload[1] >= 0x80:
            return None
        stride, head = payload[1] + 2, bytes(payload[:4])
        length = stride - 6
        if size % stride or not stride < size <= ENDS_MAX * stride or head[3] != length:
            return None  # One alone is read faster by the parser.
        if head[::2] != _END_TAGS:
            return None
        heads, texts, tags, what = zip(*_end_row(length).iter_unpack(payload), strict=True)
        endings = list(map(_ENDINGS.get, what))
        if set(heads) != {head} or set(tags) != {_DECISION_TAG} or None in endings:
            return None
        handles = self._handles.decode_all(texts)
        return None if handles is None else list(map(new_wanted, zip(*handles, endings, strict=True)))

    def _parsed(self, call: Call) -> list[Wanted | ServiceError]:
        ends = _parse(call, EndTransactionRequest).ends
        if not 0 < len(ends) <= ENDS_MAX:
            raise invalid_argument("ends", f"has {len(ends)} decisions, 1 to {ENDS_MAX} are allowed")
        return [self._wanted(end) for end in ends]

    def _wanted(self, end: TransactionEnd) -> Wanted | ServiceError:
        ending = _ENDINGS.get(end.decision)
        try:
            handle = self._handles.decode(end.transaction_handle)
            if ending is None:
                raise invalid_argument("decision", "is COMMIT or ROLL_BACK")
        except ServiceError as error:
            return error
        return Wanted(*handle, ending)

    def _answer(
        self, call: Call, wanted: Sequence[Wanted | ServiceError], outcomes: Sequence[Outcome]
    ) -> None:
        if len(outcomes) == 1 and outcomes[0].error is not None:
            call.fail(outcomes[0].error)
            return
        if outcomes.count(ENDED_NOW) == len(outcomes):
            payload = _all_taken(wanted)
        else:
            payload = b"".join(map(_result_field, wanted, outcomes))
        # Of a decision that came twice, the first may not be on the disk yet.
        position = self._store.appended_position
        if self._waiting.is_stored(position):
            call.answer(payload)
            return
        wait_ms = call.hold_time_ms(self._config.sync_flush_timeout_ms)
        self._waiting.wait(call.lane, position, wait_ms, partial(_answer, call, payload))

    @raw
    def wait_for_checks(self, call: Call) -> None:
        """Holds the call until there is something to ask."""
        try:
            request = _parse(call, WaitForChecksRequest)
            check_group_name(request.producer_group, "producer_group")
            if request.hold_ms < 0:
                raise invalid_argument("hold_ms", "is below 0")
            if self._permit.refusal is not None:
                raise self._permit.refusal
        except Exception as error:
            call.fail(to_service_error(error))
            return
        hold_ms = call.hold_time_ms(min(request.hold_ms, self._config.hold_max_ms))
        self._checks.wait(request.producer_group, call, hold_ms)

    @tells_store_errors
    def list_transactions(
        self, request: ListTransactionsRequest, context: CallContext
    ) -> ListTransactionsResponse:
        """See the service."""
        _check_listing(request)
        # Transactions stand in the order of the log. An answer covers a part of them, and says where the next one goes on.
        all_open = self._store.transactions.open_transactions()
        begin = bisect_left(all_open, request.position, key=lambda known: known.half.position)
        end = begin + LOOKED_AT_MAX
        found = [known for known in all_open[begin:end] if _matches(known, request)]
        response = ListTransactionsResponse()
        chosen = found[: min(max(request.count_max, 0) or LISTED_MAX, LISTED_MAX)]
        looked_at = first_halves([known.half for known in chosen])
        fields = dict(self._checks.fields_of(looked_at))
        for known in chosen[: len(looked_at)]:
            field = fields.get(known.half)
            group = "" if field is None else record_of(field).attributes.producer_group
            if request.producer_group not in ("", group):
                continue
            listed = self._listed(known, group)
            if request.with_messages and field is not None:
                size, head = record_field_at(field, 0, len(field))
                listed.record = field[head : head + size]
            response.transactions.append(listed)
        if len(found) > len(looked_at):
            response.next_position = found[len(looked_at)].half.position
        elif len(all_open) > end:
            response.next_position = all_open[end].half.position
        return response

    def _listed(self, known: Known, group: str) -> OpenTransaction:
        half = known.half
        return OpenTransaction(
            transaction_handle=self._handles.encode(half.position, half.key),
            topic=half.topic,
            queue_id=half.queue_id,
            message_id=encode_message_id(*half.key),
            producer_group=group,
            store_time_ms=half.store_time_ms,
            check_count=known.check_count,
            next_check_time_ms=known.due_ms,
            size_bytes=half.size_bytes,
        )


def _outcome(wanted: Wanted | ServiceError, outcomes: Iterator[Outcome]) -> Outcome:
    return Outcome(wanted) if isinstance(wanted, ServiceError) else next(outcomes)


def _check_listing(request: ListTransactionsRequest) -> None:
    """Refuses bad names: a mistyped id or name would look as if there were no transactions."""
    if request.topic:
        check_topic_name(request.topic)
    if request.producer_group:
        check_group_name(request.producer_group, "producer_group")
    if request.message_id:
        try:
            decode_message_id(request.message_id)
        except ValueError as error:
            raise invalid_argument("message_id", str(error)) from None
    for name in ("count_max", "position"):
        if getattr(request, name) < 0:
            raise invalid_argument(name, "must be 0 or above")


def _matches(known: Known, request: ListTransactionsRequest) -> bool:
    half = known.half
    return request.topic in ("", half.topic) and request.message_id in (
        "",
        encode_message_id(*half.key),
    )


def _parse(call: Call, kind: type[M]) -> M:
    try:
        return kind.FromString(bytes(call.payload))
    except DecodeError:
        raise unparsable(kind.DESCRIPTOR.full_name) from None


@lru_cache(maxsize=64)
def _end_row(length: int) -> struct.Struct:
    """A decision in a request: two tags with their lengths, a handle of this length, the tag of the decision, the decision."""
    return struct.Struct(f"4s{length}sBB")


def _all_taken(wanted: Sequence[Any]) -> bytes:
    """An EndTransactionResponse: what `_result_field` gives for decisions that are taken, without a step for each."""
    ids = b"".join(starmap(_ID.pack, map(_key_of, wanted)))
    fields = ids.hex("-", _ID.size).upper().encode().replace(b"-", _TAKEN_HEAD)
    return _TAKEN_HEAD + fields


def _result_field(wanted: Wanted | ServiceError, outcome: Outcome) -> bytes:
    """A field of EndTransactionResponse. Nearly all decisions are taken, and have an id: for those no message object is made."""
    if outcome is ENDED_NOW and isinstance(wanted, Wanted):
        return _TAKEN_HEAD + wanted.message_id.encode()
    error, repeated = outcome
    result = TransactionEnded(
        error_reason=error.reason if error is not None else "",
        error_message=error.message if error is not None else "",
        repeated_decision=repeated,
        message_id=wanted.message_id if isinstance(wanted, Wanted) else "",
    )
    return EndTransactionResponse(results=[result]).SerializeToString()


def _answer(call: Call, payload: bytes, failure: Exception | None) -> None:
    """The decisions are stored, or are not known to be."""
    if call.answered:  # its time was up before
        return
    if failure is not None:
        call.fail(to_service_error(failure))
        return
    call.answer(payload)
