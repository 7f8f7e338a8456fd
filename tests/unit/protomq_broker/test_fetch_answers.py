"""The log in an answer is found without decoding it, and the same memory takes one answer after another."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from protomq.v1 import ha_service_pb2 as ha
from protomq_broker.fetch_answers import AnswerMemory

ANSWER = ha.FetchResponse(
    status=ha.FETCH_STATUS_OK, session=1 << 63, position=5, confirmed_position=1 << 40, counts_flushed=True, said_ms=7
)


@given(
    answers=st.lists(
        st.builds(
            ha.FetchResponse,
            status=st.sampled_from([ha.FETCH_STATUS_OK, ha.FETCH_STATUS_SESSION_ENDED]),
            session=st.integers(0, (1 << 64) - 1),
            position=st.integers(0, 1 << 50),
            counts_flushed=st.booleans(),
            log=st.binary(max_size=300),
        )
    )
)
def test_an_answer_is_what_protobuf_makes_of_it(answers: list[ha.FetchResponse]) -> None:
    memory = AnswerMemory()
    for answer in answers:
        payload = answer.SerializeToString()
        lent = memory.lend(len(payload))
        lent[:] = payload
        for received in (payload, lent):
            response, part = memory.read(received)
            assert part.octets == answer.log
            assert part.behind(b"rest") == b"rest" + answer.log
            whole = ha.FetchResponse.FromString(response.SerializeToString())
            whole.log = answer.log
            assert whole == answer


def test_a_field_that_nobody_knows_yet_is_stepped_over() -> None:
    log = ha.FetchResponse(log=b"log").SerializeToString()
    for unknown in (b"\x72\x02xx", b"\xa5\x01four", b"\xa1\x01eight...", b"\xa0\x01\x80\x01"):
        response, part = AnswerMemory().read(ANSWER.SerializeToString() + unknown + log)
        assert bytes(part.octets) == b"log"
        assert response.said_ms == 7


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        (ANSWER.SerializeToString() + b"\x7a\x05log", "not the last"),
        (ANSWER.SerializeToString() + b"\x7a\x02log", "not the last"),
        (ANSWER.SerializeToString() + b"\x7a", "ends within"),
        (b"\x08", "ends within"),
        (b"\x08" + b"\xff" * 11, "ends within"),
        (b"\x0b", "wire type 3"),
    ],
)
def test_what_is_no_answer_is_refused(payload: bytes, problem: str) -> None:
    with pytest.raises(DecodeError, match=problem):
        AnswerMemory().read(payload)
