"""ReplyService through a fake lane: what is held, what ends it, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from protomq.v1.reply_service_pb2 import ReplyRequest, WaitForRepliesRequest
from protomq_broker.config import BrokerConfig
from protomq_broker.reply_calls import GRACE_MS, SETTLE_MS
from protomq_broker.reply_service import REPLY_SIZE_MAX_BYTES
from protomq_runtime.errors import Code, ServiceError
from protomq_runtime.testing import FakeCall

from .fake_broker import REPLY, FakeBroker, told


@pytest.fixture
def broker() -> FakeBroker:
    """One that has settled."""
    broker = FakeBroker()
    broker.advance(SETTLE_MS)
    return broker


def wait(broker: FakeBroker, caller_id: str = "c", hold_ms: int = 15_000, **fields: Any) -> FakeCall:
    request = WaitForRepliesRequest(caller_id=caller_id, hold_ms=hold_ms, **fields)
    return broker.call(REPLY + "WaitForReplies", request)


def reply(broker: FakeBroker, caller_id: str = "c", **fields: Any) -> FakeCall:
    request = ReplyRequest(**{"caller_id": caller_id, "call_id": "call", "body": b"r", **fields})
    return broker.call(REPLY + "Reply", request)


def given(call: FakeCall) -> list[tuple[int, str, bytes, dict[str, str]]]:
    return [
        (each.reply_id, each.reply.call_id, each.reply.body, dict(each.reply.properties))
        for each in call.response().replies
    ]


def reason(call: FakeCall) -> str:
    assert call.error is not None, "it was not refused"
    return call.error.reason


def definite(call: FakeCall) -> bool:
    assert call.error is not None, "it was not refused"
    return call.error.metadata["definite"] == "true"


def test_a_reply_comes_down_the_held_call_and_is_answered_when_the_caller_has_it(
    broker: FakeBroker,
) -> None:
    held = wait(broker)
    assert held.is_held
    replied = reply(broker, properties={"a": "b"})
    assert given(held) == [(1, "call", b"r", {"a": "b"})]
    assert replied.is_held
    assert broker.replies.numbers() == (1, 1, 0, 0)
    again = wait(broker, received_reply_ids=[1])
    assert again.is_held
    replied.response()
    assert broker.replies.numbers() == (1, 0, 1, 0)


def test_a_hold_ends_with_nothing(broker: FakeBroker) -> None:
    held = wait(broker, hold_ms=2_000)
    broker.advance(2_000)
    assert given(held) == []
    assert given(wait(broker, hold_ms=0)) == []


def test_a_longer_hold_than_the_broker_gives_ends_with_the_brokers_time(broker: FakeBroker) -> None:
    held = wait(broker, hold_ms=86_400_000)
    broker.advance(BrokerConfig().hold_max_ms - 1)
    assert held.is_held
    broker.advance(1)
    assert given(held) == []


def test_a_reply_waits_for_its_caller_for_a_while(broker: FakeBroker) -> None:
    held = wait(broker)
    held.hang_up()
    replied = reply(broker)
    assert replied.is_held
    broker.advance(GRACE_MS)
    assert reason(replied) == "CALLER_GONE"
    assert definite(replied)
    assert reason(reply(broker, "nobody")) == "CALLER_GONE"
    assert told(reply(broker, "nobody").error or ServiceError(Code.OK, "", "")) == (
        "NOT_FOUND", "CALLER_GONE", {"caller_id": "nobody"},
    )  # fmt: skip
    assert broker.replies.numbers()[3] == 3


def test_a_reply_that_was_given_and_of_which_nobody_speaks_is_not_definite(
    broker: FakeBroker,
) -> None:
    held = wait(broker)
    replied = reply(broker)
    assert given(held)
    broker.advance(GRACE_MS)
    assert reason(replied) == "CALLER_GONE"
    assert not definite(replied)


def test_a_replier_that_hangs_up_takes_its_reply_back(broker: FakeBroker) -> None:
    wait(broker, hold_ms=0)
    replied = reply(broker)
    replied.hang_up()
    assert wait(broker).is_held
    assert broker.replies.numbers() == (1, 0, 0, 0)
    broker.advance(GRACE_MS)


def test_the_later_of_two_callers_with_one_id_gets_the_replies(broker: FakeBroker) -> None:
    first, second = wait(broker), wait(broker)
    assert reason(first) == "CALLER_GONE"
    reply(broker)
    assert len(given(second)) == 1


def test_callers_that_wait_are_answered_when_the_broker_stops(broker: FakeBroker) -> None:
    held = wait(broker)
    broker.replies.stop()
    broker.server.run()
    assert given(held) == []
    assert given(wait(broker)) == [], "nothing is held any more"


def test_a_caller_that_begins_to_wait_while_the_broker_stops_is_answered_too(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = FakeCall.hold

    def stop_meanwhile(call: FakeCall, on_gone: Any) -> None:
        hold(call, on_gone)
        broker.replies.stop()

    monkeypatch.setattr(FakeCall, "hold", stop_meanwhile)
    assert given(wait(broker)) == []


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        ("WaitForReplies", WaitForRepliesRequest(), "caller_id"),
        ("WaitForReplies", WaitForRepliesRequest(caller_id="c" * 256), "caller_id"),
        ("WaitForReplies", WaitForRepliesRequest(caller_id="c", hold_ms=-1), "hold_ms"),
        ("WaitForReplies", WaitForRepliesRequest(caller_id="c", hold_ms=86_400_001), "hold_ms"),
        ("WaitForReplies", WaitForRepliesRequest(caller_id="c", received_reply_ids=range(2_001)), "received_reply_ids"),
        ("Reply", ReplyRequest(call_id="call"), "caller_id"),
        ("Reply", ReplyRequest(caller_id="c"), "call_id"),
    ],
)  # fmt: skip
def test_an_illegal_request_is_refused(
    broker: FakeBroker, method: str, request_: Any, field: str
) -> None:
    error = broker.refusal(REPLY + method, request_)
    assert (error.reason, [each[0] for each in error.field_violations]) == ("INVALID_ARGUMENT", [field])


def test_a_reply_that_is_too_large_or_unreadable_is_refused(broker: FakeBroker) -> None:
    wait(broker)
    assert reason(reply(broker, body=bytes(REPLY_SIZE_MAX_BYTES))) == "MESSAGE_TOO_LARGE"
    for method in ("WaitForReplies", "Reply"):
        assert reason(broker.call(REPLY + method, b"\xff")) == "INVALID_ARGUMENT"


def test_a_broker_that_leads_nothing_takes_no_callers() -> None:
    broker = FakeBroker(is_permitted=False)
    broker.permit.refuse(ServiceError(Code.UNAVAILABLE, "SHUTTING_DOWN", "it stops"))
    assert reason(wait(broker)) == reason(reply(broker)) == "SHUTTING_DOWN"
