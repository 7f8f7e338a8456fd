"""The one place where the store's errors become status codes with reasons."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from protomq_runtime.errors import (
    Code,
    ServiceError,
    corrupt_log,
    internal,
    invalid_argument,
    too_many,
)

from .said_once import SaidOnce
from .store.errors import (
    AppendTooLargeError,
    CorruptLogError,
    DiskFullError,
    NotLeadingError,
    StoreError,
    StoreFailedError,
    TooManyCandidatesError,
)
from .store.index.index_runs import IndexDamagedError
from .store.log.append import CorruptRecordError
from .store.queues.consume_queue import ConsumeQueueDamagedError
from .store.state.group_settings import GroupSettingsError
from .store.state.groups import GROUPS_SET_UP_MAX, TooManySettingsError
from .store.state.offsets import GROUPS_MAX, TooManyGroupsError
from .store.state.send_errors import (
    ProducerFencedError,
    ProducerIdTakenError,
    RepeatedSendError,
    SendOutOfOrderError,
    SequenceExpiredError,
    TooManyProducersError,
)
from .store.state.topics import IncarnationGivenError, InvalidNameError
from .store.timer.timer_runs import TimerDamagedError

log = logging.getLogger("protomq.broker")
_damage_said = SaidOnce()

P = ParamSpec("P")
R = TypeVar("R")

RETRY_DISK_FULL_MS = 10_000
RETRY_HEALING_MS = 100
RETRY_TIMER_MS = 1_000
RETRY_TOO_MANY_MS = 1_000


def tells_store_errors(method: Callable[P, R]) -> Callable[P, R]:
    """Decorates a plain method of a service: turns errors of the store into the ServiceErrors of `to_service_error`."""

    @wraps(method)
    def told(*arguments: P.args, **named: P.kwargs) -> R:
        try:
            return method(*arguments, **named)
        except Exception as error:
            raise to_service_error(error) from error

    return told


def to_service_error(error: Exception) -> ServiceError:
    """Returns the caller's error for `error`. An unexpected one is logged with its trace and becomes INTERNAL."""
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, DiskFullError):
        return ServiceError(
            Code.RESOURCE_EXHAUSTED, "DISK_FULL", str(error), retry_delay_ms=RETRY_DISK_FULL_MS
        )
    if isinstance(error, StoreFailedError):
        return ServiceError(Code.FAILED_PRECONDITION, "STORE_FAILED", str(error))
    if isinstance(error, NotLeadingError):
        return ServiceError(Code.FAILED_PRECONDITION, "NOT_MASTER", str(error))
    if isinstance(error, AppendTooLargeError):
        return ServiceError(
            Code.INVALID_ARGUMENT,
            "MESSAGE_TOO_LARGE",
            str(error),
            metadata={
                "size_bytes": str(error.size_bytes),
                "limit_bytes": str(error.size_max_bytes),
            },
        )
    if isinstance(error, TooManyProducersError):
        return too_many("producers", error.limit, str(error), retry_delay_ms=RETRY_TOO_MANY_MS)
    if isinstance(error, RepeatedSendError):
        return _of_repeated_send(error)
    if isinstance(error, TooManyGroupsError):
        return too_many("consumer groups", GROUPS_MAX, str(error))
    if isinstance(error, TooManySettingsError):
        return too_many("groups that are set up", GROUPS_SET_UP_MAX, str(error))
    if isinstance(error, GroupSettingsError):
        return invalid_argument(error.field, str(error))
    if isinstance(error, CorruptLogError | CorruptRecordError):
        return of_corrupt_log(error)
    if isinstance(error, TooManyCandidatesError):
        return too_many("candidates of a look-up", error.limit, str(error))
    if isinstance(error, ConsumeQueueDamagedError) and error.is_healing:  # the store has said it
        return ServiceError(
            Code.UNAVAILABLE,
            "QUEUE_HEALING",
            f"{error}; the broker heals it from the log",
            metadata={"queue_offset": str(error.queue_offset)},
            retry_delay_ms=RETRY_HEALING_MS,
        )
    if isinstance(error, TimerDamagedError):  # the store has said it
        return ServiceError(
            Code.UNAVAILABLE,
            "QUEUE_HEALING",
            f"{error}; ask again then",
            metadata={"queue_offset": "-1"},
            retry_delay_ms=RETRY_TIMER_MS,
        )
    if isinstance(error, ConsumeQueueDamagedError | IndexDamagedError):
        log.error("damage in a derived file: %s", error)
        offset = getattr(error, "queue_offset", None)
        return corrupt_log(str(error), {} if offset is None else {"queue_offset": offset})
    if isinstance(error, IncarnationGivenError):
        return ServiceError(
            Code.ALREADY_EXISTS,
            "TOPIC_EXISTS",
            str(error),
            metadata={
                "topic": error.topic,
                "wanted": str(error.wanted),
                "current": str(error.current),
            },
        )
    if isinstance(error, InvalidNameError):
        return invalid_argument("name", str(error))
    if isinstance(error, StoreError):
        log.error("the store refuses: %s", error)
        return ServiceError(Code.FAILED_PRECONDITION, "STORE_FAILED", str(error))
    if isinstance(error, OSError):
        log.error("the disk fails: %s", error)
        return ServiceError(
            Code.FAILED_PRECONDITION, "STORE_FAILED", f"the broker's disk failed: {error}"
        )
    log.error("a defect of the broker", exc_info=error)
    return internal()


def of_corrupt_log(
    error: CorruptLogError | CorruptRecordError, *, found_count: int | None = None
) -> ServiceError:
    """Makes a CORRUPT_LOG error. `found_count`: number of messages that a look-up had found, all newer than the damage.

    The broker logs each damaged place once a minute, not with each answer.
    """
    is_due = _damage_said.is_due((getattr(error, "path", ""), error.position))
    log.log(logging.ERROR if is_due else logging.DEBUG, "damage in the log: %s", error)
    known: dict[str, object] = {"position": error.position}
    message = str(error)
    if isinstance(error, CorruptLogError) and error.lost is not None:
        known |= error.lost._asdict()
        known["is_lost"] = str(error.is_gone).lower()
    if found_count is not None:
        known["found_count"] = found_count
        if found_count:
            message += f". {found_count} newer ones were found: a record_count_max of {found_count} gives them"
    return corrupt_log(message, known)


def _of_repeated_send(error: RepeatedSendError) -> ServiceError:
    if isinstance(error, SendOutOfOrderError):
        return ServiceError(
            Code.FAILED_PRECONDITION,
            "SEND_OUT_OF_ORDER",
            str(error),
            metadata={
                "producer_id": error.producer_id,
                "producer_epoch": str(error.producer_epoch),
                "previous_sequence": str(error.sequence),
            },
        )
    if isinstance(error, ProducerFencedError):
        return ServiceError(
            Code.FAILED_PRECONDITION,
            "PRODUCER_FENCED",
            str(error),
            metadata={
                "producer_id": error.producer_id,
                "producer_epoch": str(error.producer_epoch),
                "newer_epoch": str(error.newer_epoch),
            },
        )
    if isinstance(error, ProducerIdTakenError):
        return ServiceError(
            Code.ALREADY_EXISTS,
            "PRODUCER_ID_TAKEN",
            str(error),
            metadata={
                "producer_id": error.producer_id,
                "producer_epoch": str(error.producer_epoch),
                "sequence": str(error.sequence),
            },
        )
    if isinstance(error, SequenceExpiredError) and error.previous_sequence is not None:
        return ServiceError(
            Code.FAILED_PRECONDITION,
            "SEQUENCE_EXPIRED",
            str(error),
            metadata={
                "producer_id": error.producer_id,
                "producer_epoch": str(error.producer_epoch),
                "sequence": str(error.sequence),
                "previous_sequence": str(error.previous_sequence),
            },
        )
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "SEQUENCE_EXPIRED",
        str(error),
        metadata={
            "producer_id": error.producer_id,
            "producer_epoch": str(error.producer_epoch),
            "sequence": str(error.sequence),
        },
    )
