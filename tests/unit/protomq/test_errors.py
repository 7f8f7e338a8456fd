"""Errors: one class per reason, attributes that retry loops can rely on, and the way from a status."""

from __future__ import annotations

import pickle

import pytest

from protomq import errors
from protomq.errors import ProtomqError, ServerError, error_from_status
from protomq.v1 import error_pb2
from protomq.wire.status import RpcStatus, decode_status, encode_status

REASONS = [
    name.removeprefix("ERROR_REASON_")
    for name, _ in error_pb2.ErrorReason.items()
    if not name.endswith("UNSPECIFIED")
]
CLASSES = [getattr(errors, name) for name in errors.__all__ if name != "error_from_status"]


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_of_the_contract_has_its_own_class(reason: str) -> None:
    error = error_from_status(RpcStatus(5, "text", reason))
    assert type(error).reason == reason
    assert isinstance(error, ServerError)
    assert type(error).__name__ in (errors.__doc__ or "")


def test_the_page_names_every_class() -> None:
    assert errors.__doc__ is not None
    assert [cls.__name__ for cls in CLASSES if cls.__name__ not in errors.__doc__] == []


def test_a_status_keeps_everything_on_its_way() -> None:
    status = RpcStatus(8, "busy", "SYSTEM_BUSY", {"lane": "send"}, 250, (("field", "why"),))
    error = error_from_status(decode_status(encode_status(status)))
    assert type(error) is errors.SystemBusyError
    assert (error.code, str(error), dict(error.metadata)) == (8, "busy", {"lane": "send"})
    assert (error.retry_delay_ms, error.field_violations) == (250, (("field", "why"),))
    assert error.retriable
    assert error.definite


def test_an_unknown_reason_keeps_its_name_and_is_taken_by_its_code() -> None:
    error = error_from_status(RpcStatus(9, "later version", "SOMETHING_NEW"))
    assert type(error) is errors.InternalError
    assert (error.reason, error.code, error.definite) == ("SOMETHING_NEW", 9, False)


def test_a_status_without_a_reason_is_taken_by_its_code() -> None:
    assert type(error_from_status(RpcStatus(14, ""))) is errors.ConnectionLostError
    assert type(error_from_status(RpcStatus(4, ""))) is errors.RequestTimeoutError


def test_time_outs_are_not_definite_and_are_time_outs_for_python_too() -> None:
    error = errors.RequestTimeoutError("late")
    assert isinstance(error, TimeoutError)
    assert not error.definite
    assert str(error) == "late"


@pytest.mark.parametrize("cls", CLASSES)
def test_errors_survive_pickling(cls: type[ProtomqError]) -> None:
    error = cls("text")
    error.metadata, error.retry_delay_ms, error.field_violations = {"a": "b"}, 5, (("f", "d"),)
    error.code = 77
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert (str(again), again.metadata, again.retry_delay_ms, again.code) == (
        "text",
        {"a": "b"},
        5,
        77,
    )
    assert again.field_violations == (("f", "d"),)


@pytest.mark.parametrize("cls", CLASSES)
def test_what_is_worth_a_new_route_is_worth_a_retry(cls: type[ProtomqError]) -> None:
    assert cls.retriable or not cls.stale_route
    assert cls.__doc__
    assert cls.reason == cls.reason.upper()
