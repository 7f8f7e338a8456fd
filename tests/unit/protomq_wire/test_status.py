"""Errors keep everything on their way, and are what other implementations of google.rpc.Status read."""

from __future__ import annotations

import pytest
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from protomq.wire.status import RpcStatus, decode_status, encode_status

short_text = st.text(max_size=20)
statuses = st.builds(
    RpcStatus,
    code=st.integers(1, 16),
    message=short_text,
    reason=st.text(min_size=1, max_size=20),
    metadata=st.dictionaries(short_text, short_text, max_size=3),
    retry_delay_ms=st.none() | st.integers(0, 10**9),
    field_violations=st.lists(st.tuples(short_text, short_text), max_size=3).map(tuple),
)


@given(statuses)
def test_a_status_reads_back_as_it_was_written(status: RpcStatus) -> None:
    assert decode_status(encode_status(status)) == status


def test_a_status_without_details_reads_back() -> None:
    assert decode_status(encode_status(RpcStatus(5, "gone"))) == RpcStatus(5, "gone")


def test_the_bytes_are_those_of_google_rpc_status() -> None:
    # Written down from the definition: Status{code=8, message="b", details=[Any{type_url, value=ErrorInfo{reason="R", domain="protomq"}}]}
    info = b"\x0a\x01R\x12\x07protomq"
    detail = any_pb2.Any(
        type_url="type.googleapis.com/google.rpc.ErrorInfo", value=info
    ).SerializeToString()
    golden = b"\x08\x08\x12\x01b\x1a" + bytes((len(detail),)) + detail
    assert encode_status(RpcStatus(8, "b", "R")) == golden


def test_garbage_is_a_decode_error() -> None:
    with pytest.raises(DecodeError):
        decode_status(b"\xff\xff")
