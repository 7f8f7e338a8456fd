"""TransactionService: ends transactions, holds the calls by which producers hear of checks, and lists what is open. On the send lane."""

from __future__ import annotations

import struct
from bisect import bisect_left
from functools import lru_cache, partial
from itertools import starmap
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import numpy as np
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
from .transaction_endings import ENDED_NOW, Decisions, Outcome, joined

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from protomq_runtime.call import Call, CallContext

    from .config import BrokerConfig
    from .store.state.transactions import Key
    from .store.state.transactions import OpenTransaction as Known
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
_ENDING_OCTETS: Final = bytes(_ENDINGS.get(octet, 0) for octet in range(256))  # type: ignore[call-overload]
"""The same, by the octet of a decision; 0: there is none."""

_ID_HEAD: Final = bytes((TransactionEnded.MESSAGE_ID_FIELD_NUMBER << 3 | 2, MESSAGE_ID_LENGTH))
_TAKEN_HEAD: Final = (
    bytes((EndTransactionResponse.RESULTS_FIELD_NUMBER << 3 | 2, len(_ID_HEAD) + MESSAGE_ID_LENGTH))
    + _ID_HEAD
)
"""What stands before the message's id in the result of a decision that was taken: two fields with a length each."""
_ID: Final = struct.Struct(">QIQ")
"""A message id: its digits are those of these octets."""
_END_TAGS: Final = bytes(
    (
        EndTransactionRequest.ENDS_FIELD_NUMBER << 3 | 2,
        TransactionEnd.TRANSACTION_HANDLE_FIELD_NUMBER << 3 | 2,
    )
)
_DECISION_TAG: Final = TransactionEnd.DECISION_FIELD_NUMBER << 3

_Asked = tuple["Call", Decisions, "Sequence[ServiceError | None]"]
"""A call with what `_usual` or `_parsed` says of it."""
_NO_DECISIONS: Final = Decisions([], [], b"")

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
        shortage: Callable[[], ServiceError | None],
    ) -> None:
        """`shortage` says why no send is taken now, as on a change of the lead; None: they are taken."""
        self._store = store
        self._config = config
        self._permit = permit
        self._waiting = waiting
        self._handles = handles
        self._endings = endings
        self._checks = checks
        self._shortage = shortage

    def stop(self) -> None:
        """Refuses new calls, and answers the waiting ones."""
        self._checks.stop()

    @drained
    def end_transaction(self, calls: list[Call]) -> None:
        """Ends what has arrived by now, with one append if it is not large."""
        asked: list[_Asked] = []
        for call in calls:
            try:
                if self._permit.refusal is not None:
                    raise self._permit.refusal
                usual = self._usual(call.payload)
                asked.append((call, usual, ()) if usual is not None else (call, *self._parsed(call)))
            except Exception as error:
                call.fail(to_service_error(error))
        if not asked:
            return
        decisions = joined([decided for _, decided, _ in asked])
        self._end(asked, decisions, [])

    def _end(self, asked: Sequence[_Asked], left: Decisions, outcomes: list[Outcome]) -> None:
        """Ends what one turn takes of the decisions that are left, and answers the calls with the outcomes once all are made."""
        # Between turns the lead may have gone.
        failure = self._shortage() if outcomes else None
        try:
            if failure is None:
                count = self._endings.first_turn(left)
                now, left = (left, _NO_DECISIONS) if count == len(left.keys) else left.parted(count)
                outcomes += self._endings.end(now) if now.keys else []
        except Exception as error:
            failure = to_service_error(error)
        if failure is not None:
            left = _NO_DECISIONS
        if left.keys:
            asked[0][0].lane.post(partial(self._end, asked, left, outcomes))
            return
        start = 0
        for call, decided, refusals in asked:
            end = start + len(decided.keys)
            if failure is not None and end > len(outcomes):
                # Who calls tells all of them again, where the lead is by then: those that were taken are repeats there.
                call.fail(failure)
            else:
                self._answer(call, decided, outcomes[start:end], refusals)
            start = end
        self._waiting.request_flush()

    def _usual(self, payload: bytes | bytearray) -> Decisions | None:
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
        rows = np.frombuffer(payload, _end_row(length))
        count = len(rows)
        endings = rows["decision"].tobytes().translate(_ENDING_OCTETS)
        if 0 in endings or rows["head"].tobytes() != head * count:
            return None
        if rows["decision_tag"].tobytes() != bytes((_DECISION_TAG,)) * count:
            return None
        handles = self._handles.decode_all(rows["handle"])
        return None if handles is None else Decisions(*handles, endings)

    def _parsed(self, call: Call) -> tuple[Decisions, list[ServiceError | None]]:
        """The decisions of a request that can be taken, and for each of its fields None, or why it is refused."""
        ends = _parse(call, EndTransactionRequest).ends
        if not 0 < len(ends) <= ENDS_MAX:
            raise invalid_argument("ends", f"has {len(ends)} decisions, 1 to {ENDS_MAX} are allowed")
        decisions = Decisions([], [], b"")
        refusals: list[ServiceError | None] = []
        endings = bytearray()
        for end in ends:
            try:
                handle = self._handles.decode(end.transaction_handle)
                if end.decision not in _ENDINGS:
                    raise invalid_argument("decision", "is COMMIT or ROLL_BACK")
            except ServiceError as error:
                refusals.append(error)
                continue
            refusals.append(None)
            decisions.keys.append(handle.key)
            decisions.positions.append(handle.position)
            endings.append(_ENDINGS[end.decision])
        return decisions._replace(endings=bytes(endings)), refusals

    def _answer(
        self, call: Call, decisions: Decisions, outcomes: Sequence[Outcome], refusals: Sequence[ServiceError | None]
    ) -> None:
        """`refusals`: as `_parsed` gives them; nothing if none of the decisions was refused."""
        count = len(refusals) or len(outcomes)
        refusal: ServiceError | None = None
        if outcomes.count(ENDED_NOW) == count:
            payload = _all_taken(decisions.keys)
        else:
            results = map(_Result, decisions.keys, outcomes)
            answered = [next(results) if refusal is None else _Result(None, Outcome(refusal)) for refusal in refusals or [None] * count]
            refusal = answered[0].outcome.error if count == 1 else None
            if refusal is not None and refusal.reason != "TRANSACTION_ENDED":
                call.fail(refusal)
                return
            payload = b"".join(map(_result_field, answered))
        # Of two decisions on one transaction, the first may not be on the disk yet. Nobody learns of it before.
        position = self._store.appended_position
        if self._waiting.is_stored(position):
            _answer(call, payload, refusal, None)
            return
        wait_ms = call.hold_time_ms(self._config.sync_flush_timeout_ms)
        self._waiting.wait(call.lane, position, wait_ms, partial(_answer, call, payload, refusal))

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
def _end_row(length: int) -> np.dtype[np.void]:
    """A decision in a request: two tags with their lengths, a handle of this length, the tag of the decision, the decision."""
    return np.dtype([("head", "V4"), ("handle", "u1", (length,)), ("decision_tag", "u1"), ("decision", "u1")])


class _Result(NamedTuple):
    """What is answered to a decision. `key`: None where its handle, or what it wants, cannot be read."""

    key: Key | None
    outcome: Outcome


def _all_taken(keys: Sequence[Key]) -> bytes:
    """An EndTransactionResponse: what `_result_field` gives for decisions that are taken, without a step for each."""
    ids = b"".join(starmap(_ID.pack, keys))
    fields = ids.hex("-", _ID.size).upper().encode().replace(b"-", _TAKEN_HEAD)
    return _TAKEN_HEAD + fields


def _result_field(result: _Result) -> bytes:
    """A field of EndTransactionResponse."""
    error, repeated = result.outcome
    ended = TransactionEnded(
        error_reason=error.reason if error is not None else "",
        error_message=error.message if error is not None else "",
        repeated_decision=repeated,
        message_id=encode_message_id(*result.key) if result.key is not None else "",
    )
    return EndTransactionResponse(results=[ended]).SerializeToString()


def _answer(call: Call, payload: bytes, refusal: ServiceError | None, failure: Exception | None) -> None:
    """The decisions are stored, or are not known to be. `refusal`: of the only one."""
    if call.answered:  # its time was up before
        return
    if failure is not None:
        call.fail(to_service_error(failure))
    elif refusal is not None:
        call.fail(refusal)
    else:
        call.answer(payload)
