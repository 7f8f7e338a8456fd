from google.protobuf import any_pb2

from protomq.v1 import error_pb2
from protomq.wire.status import decode_status
from protomq_runtime import errors
from protomq_runtime.errors import Code, ServiceError


def test_an_error_crosses_the_wire_with_everything_it_says():
    error = ServiceError(
        Code.RESOURCE_EXHAUSTED,
        "SYSTEM_BUSY",
        "busy",
        metadata={"lane": "send"},
        retry_delay_ms=150,
        field_violations=[("topic", "is empty")],
    )
    assert decode_status(error.encode()) == error.to_status()


def test_encoding_is_done_once():
    error = errors.invalid_argument("topic", "is empty")
    assert error.encode() is error.encode()


def test_every_helper_gives_a_reason_of_the_contract():
    made = [
        errors.invalid_argument("a", "b"),
        errors.unparsable("a.B"),
        errors.system_busy("send", 100),
        errors.unknown_method("x"),
        errors.internal(),
        errors.SHUTTING_DOWN,
        errors.DEADLINE_EXCEEDED,
    ]
    for error in made:
        assert f"ERROR_REASON_{error.reason}" in error_pb2.ErrorReason.DESCRIPTOR.values_by_name


def test_an_invalid_argument_names_its_field():
    assert errors.invalid_argument("topic", "is empty").message == "topic: is empty"
    assert errors.invalid_argument("", "the request is cut short").message == "the request is cut short"
    assert errors.invalid_argument("topic", "is empty").to_status().field_violations == (
        ("topic", "is empty"),
    )


def test_the_details_are_those_of_googleapis():
    data = errors.system_busy("send", 100).encode()
    assert any_pb2.Any.DESCRIPTOR.full_name == "google.protobuf.Any"
    assert b"type.googleapis.com/google.rpc.ErrorInfo" in data
    assert b"type.googleapis.com/google.rpc.RetryInfo" in data
