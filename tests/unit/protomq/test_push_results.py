"""What a listener returns, and what is made of it; settings that are not as they should be."""

from __future__ import annotations

import copy
import pickle
from datetime import timedelta
from typing import Any, get_type_hints

import pytest

from protomq import AsyncPushConsumer, PushConsumer, Reject, Retry, Suspend
from protomq._push_options import PushOptions, PushSettings
from protomq._push_results import Failure, Listener, judge
from protomq._types import DelayLevel
from protomq.errors import ConfigurationError, ProtomqError, SchemaError, WrongTypeError
from protomq.hooks import ConsumeContext, Hook
from protomq.testing import FakeGroup
from tests.unit.protomq.test_pop_handling import Brokers


@pytest.mark.parametrize(
    ("result", "failure"),
    [
        (None, None),
        (Retry(), Failure({"error": ""})),
        (Retry, Failure({"error": ""})),
        (Retry(delay=0.5, error="e"), Failure({"error": "e", "delay_ms": 500}, 500)),
        (Retry(delay=timedelta(minutes=1)), Failure({"error": "", "delay_ms": 60_000}, 60_000)),
        (Retry(delay=DelayLevel(3)), Failure({"error": "", "delay_level": 3}, 10_000)),
        (Reject("bad"), Failure({"error": "bad", "dead_letter": True})),
        (Reject, Failure({"error": "", "dead_letter": True})),
        (Suspend(20), Failure({"error": "", "delay_ms": 20}, 20)),
        (Suspend, Failure({"error": ""})),
        (Suspend(), Failure({"error": ""})),
        (Suspend(error="no"), Failure({"error": "no"})),
    ],
)
def test_results_are_failures_or_none(result: object, failure: Failure | None) -> None:
    assert judge(result, 1) == ([failure], "")
    assert judge(result, 3) == ([failure] * 3, "")


def test_a_list_has_a_result_for_each_message() -> None:
    found = judge([None, Reject("x"), Retry()], 3)
    assert found.failures == [None, Failure({"error": "x", "dead_letter": True}), Failure({"error": ""})]
    assert judge([Retry()], 1).failures == [Failure({"error": ""})]


@pytest.mark.parametrize("result", [[], [None, None], (Retry(), Retry()), [None] * 3])
def test_of_a_batch_of_one_a_list_of_another_length_comes_again(result: list[object]) -> None:
    failures, told = judge(result, 1, is_batch=True)
    text = f"returned {len(result)} results for 1 message"
    assert (failures, told) == ([Failure({"error": f"the listener {text}"})], f"{text}: it comes again")


def test_without_a_batch_a_list_of_results_comes_again_and_one_of_values_is_no_result() -> None:
    for result in ([Retry(5), Retry(5)], (None, Reject), [Suspend, None]):
        failures, told = judge(result, 1)
        assert failures == [Failure({"error": "the listener returned 2 results for 1 message"})]
        assert told == "returned 2 results for 1 message: it comes again"
    for value in ([], [1, 2], ("a", "b", "c")):
        failures, told = judge(value, 1)
        assert failures == [None]
        assert "which is no result: the message is done" in told


RESULTS = [Retry(5, "e"), Retry(timedelta(seconds=1)), Reject("bad"), Suspend(20, "later")]


@pytest.mark.parametrize("said", [*RESULTS, Retry, Reject])
@pytest.mark.parametrize("client", [PushConsumer, AsyncPushConsumer])
@pytest.mark.parametrize("kind", ["function", "batch", "coroutine", "typed", "hooked"])
def test_what_is_raised_means_what_it_means_returned(said: Any, client: Any, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    def outcome(raises: bool) -> object:
        def listen(_: object) -> object:
            if raises:
                raise said
            return said

        async def listen_async(message: object) -> object:
            return listen(message)

        def listen_text(text: str) -> object:
            return listen(text)

        consumer = client("g", hooks=[SilentHook()] if kind == "hooked" else [])
        listener = {"coroutine": listen_async, "typed": listen_text}.get(kind, listen)
        consumer.subscribe("t", listener, batch_size=2 if kind == "batch" else None)
        group = FakeGroup(consumer)
        group.send("t", b"x")
        assert group.deliver() == 1
        return ([one.last_error for one in group.waiting], group.next_due_in_s, [one.error for one in group.dead_letters], group.done)

    assert outcome(raises=True) == outcome(raises=False)
    assert outcome(raises=True) != ([], float("inf"), [], [])
    assert not caplog.records


class SilentHook(Hook):
    """Sees that nothing was raised."""

    def after_consume(self, context: ConsumeContext) -> None:
        assert context.error is None


def test_a_popped_message_whose_handler_raises_a_result_is_settled_by_it(caplog: pytest.LogCaptureFixture) -> None:
    handling = Brokers().handling
    for said in RESULTS:
        assert handling.raised(said) == handling.judged(said)
    assert not caplog.records


def test_results_are_equal_copied_and_pickled_as_values_are() -> None:
    for said in RESULTS:
        for copied in (copy.copy(said), pickle.loads(pickle.dumps(said))):
            assert (copied, hash(copied), str(copied)) == (said, hash(said), repr(said))
    assert Retry(5) != Retry(6)
    assert repr(Retry(5)) == "Retry(delay=5, error='')"


def test_nonsense_is_done_and_told() -> None:
    for nonsense in (True, 0, "ok", object(), {}):
        failures, told = judge(nonsense, 1)
        assert failures == [None]
        assert "which is no result: the message is done" in told
    failures, told = judge([None], 2)
    assert told == "returned 1 results for 2 messages: they come again"
    assert [one.error for one in failures if one] == ["the listener returned 1 results for 2 messages"] * 2
    failures, told = judge(ValueError("v"), 1)
    assert (failures, told) == ([Failure({"error": "ValueError: v"})], "returned ValueError('v'): taken as raised")


class Speechless(SchemaError):
    """Says nothing of itself."""

    def __str__(self) -> str:
        raise RuntimeError("no session")

    __repr__ = __str__


def test_what_cannot_be_shown_is_told_all_the_same() -> None:
    error = "Speechless: <str() raised RuntimeError>"
    for result in (Speechless("x"), [Speechless("x")]):
        failures, told = judge(result, 1)
        assert failures == [Failure({"error": error, "dead_letter": True})]
        assert told.endswith("<str() raised RuntimeError>")
    value = type("Row", (), {"__repr__": Speechless.__repr__})()
    assert judge(value, 1).nonsense.startswith("returned <repr() raised RuntimeError>, which is no result")
    lost = type("LostError", (ValueError,), {"__repr__": Speechless.__repr__})("gone")
    assert judge(lost, 1) == ([Failure({"error": "LostError: gone"})], "returned <repr() raised RuntimeError>: taken as raised")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Retry(delay=-1), "delay is 0 seconds to 40 days"),
        (lambda: Retry(delay="1s"), "delay is a timedelta"),  # type: ignore[arg-type]
        (lambda: Suspend(0), "delay_ms"),
        (lambda: Reject(5), "error is a str or an exception"),  # type: ignore[arg-type]
        (lambda: Listener.of(5), "a listener is a function"),
        (lambda: Listener.of(print, 0), "batch_size"),
        (lambda: PushConsumer(""), "a push consumer has a group"),
        (lambda: PushConsumer("g", concurrency=0), "concurrency"),
        (lambda: PushConsumer("g", queue_count_max=0), "queue_count_max"),
        (lambda: PushConsumer("g", drain_timeout_s=-1), "drain_timeout_s"),
        (lambda: PushConsumer("g", attempts_max=0), "attempts_max"),
        (lambda: PushConsumer("g", thread=4), "has no setting 'thread'"),  # type: ignore[call-arg]
        (lambda: PushConsumer("g").subscribe("t", 5), "a listener is a function"),  # type: ignore[arg-type]
        (lambda: PushConsumer("g").subscribe(["t"], print), "topic is a str"),  # type: ignore[arg-type]
        (lambda: PushConsumer("g").on("t", tags=5)(print), "tags is a list of str"),  # type: ignore[arg-type]
        (lambda: PushConsumer("g").on("t", tags=["a"], sql="a = 1")(print), "sql"),
        (lambda: PushConsumer("g").unsubscribe("t"), "has no listener"),
        (lambda: PushConsumer("g").start(), "nothing to consume"),
        (lambda: PushConsumer("g").set_concurrency(0), "concurrency"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_with_what_is_wrong(make: Any, text: str) -> None:
    with pytest.raises(ProtomqError) as caught:
        make()
    assert isinstance(caught.value, ConfigurationError | WrongTypeError)
    assert text in str(caught.value)


def test_a_topic_has_one_listener() -> None:
    consumer = PushConsumer("g")
    consumer.subscribe("t", print, tags=["created"])
    with pytest.raises(ConfigurationError, match=r"has a listener here already.*unsubscribe"):
        consumer.on("t", tags=["paid"])(print)
    consumer.unsubscribe("t")
    consumer.subscribe("t", print, tags=["paid"])


def test_settings_are_the_options() -> None:
    assert {*PushSettings.__annotations__, "group"} == {*PushOptions.__dataclass_fields__}
    assert get_type_hints(PushOptions).keys() == {*PushSettings.__annotations__, "group"}


def test_listeners_are_functions_coroutines_and_objects_with_a_call() -> None:
    async def coroutine(message: object) -> None: ...

    class Object:
        async def __call__(self, message: object) -> None: ...

    assert not Listener.of(print).is_coroutine
    assert Listener.of(coroutine).is_coroutine
    assert Listener.of(Object()).is_coroutine
    assert Listener.of(Object()).name.endswith("Object")
