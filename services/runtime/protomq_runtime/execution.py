"""Runs a method for a call: the one place where both transports dispatch, and where exceptions become statuses.

A ServiceError is the answer; anything else is a defect: INTERNAL for the caller, the trace in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from .call import Call
from .dispatch import BoundMethod
from .errors import ServiceError, internal, unparsable

logger = logging.getLogger(__name__)


def run_plain(call: Call) -> None:
    """Parses the request, calls the method, serialises its response."""
    bound = call.bound
    method = bound.method
    try:
        request = method.request_class.FromString(call.payload)  # type: ignore[arg-type]  # Takes a bytearray, too.
    except DecodeError:
        call.fail(unparsable(method.request_class.DESCRIPTOR.full_name))
        return
    try:
        response = bound.function(request, call)
        payload = response.SerializeToString()
    except ServiceError as error:
        call.fail(error)
        return
    except Exception:
        logger.exception("%s failed for %s", method.path, call.peer)
        call.fail(internal())
        return
    call.answer(payload)


def run_raw(call: Call) -> None:
    """Calls the method with the undecoded call; it answers now or later."""
    try:
        call.bound.function(call)
    except Exception as error:
        fail_unanswered((call,), error)


def run_drained(bound: BoundMethod, calls: list[Call]) -> None:
    """Calls the method with all calls of this turn."""
    try:
        bound.function(calls)
    except Exception as error:
        fail_unanswered(calls, error)


def fail_unanswered(calls: Sequence[Call], error: Exception) -> None:
    """Of a method that has raised `error`."""
    if not isinstance(error, ServiceError):
        logger.error("%s failed for %s", calls[0].method.path, calls[0].peer, exc_info=error)
        error = internal()
    for call in calls:
        if not call.answered:
            call.fail(error)
