"""A call: by which route, how often, how long, and what each name server is asked. Time and servers are in memory."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq._call_steps import call_address, call_broker
from protomq._decoding import decoded
from protomq._methods import GET_OFFSETS, GET_ROUTE, PING
from protomq._name_servers import NameServerList, ask_all, ask_one
from protomq._retry import CALL, CHANGE, GOING, LAST_COMMIT, ONCE, UNTIL_THE_END, Retries
from protomq.errors import (
    ConfigurationError,
    ConnectFailedError,
    ConnectionLostError,
    InvalidArgumentError,
    NoRouteError,
    NotMasterError,
    ProtocolError,
    ProtomqError,
    QueueHealingError,
    QueueNotFoundError,
    RequestTimeoutError,
    SystemBusyError,
    TopicNotFoundError,
    TransportError,
    UnknownMethodError,
)
from protomq.v1.consumer_service_pb2 import GetOffsetsResponse
from tests.support.fake_driver import FakeWorld, address_of, route_of

A = address_of("a")


def call(world: FakeWorld, retries: Retries, timeout_s: float = 3.0) -> bytes:
    steps = call_broker("T", "a", GET_OFFSETS, (b"ask",), timeout_s, retries, world.now_s)
    return world.driver.run(steps)


def world_with(*errors: ProtomqError | bytes) -> FakeWorld:
    world = FakeWorld(route_of("T", "a"))
    world.script.extend(errors)
    return world


@pytest.mark.parametrize(
    ("retries", "tries"), [(ONCE, 1), (CALL, 3), (CHANGE, 3)]
)
def test_a_call_is_tried_so_often_and_then_raises_the_last_error(
    retries: Retries, tries: int
) -> None:
    world = world_with(*(SystemBusyError(str(number)) for number in range(9)))
    with pytest.raises(SystemBusyError, match=str(tries - 1)):
        call(world, retries)
    assert len(world.calls) == tries
    assert world.pauses == [0.05] * (tries - 1)


@pytest.mark.parametrize("retries", [GOING, LAST_COMMIT])
def test_the_last_commit_of_a_queue_outlasts_what_passes(retries: Retries) -> None:
    world = world_with(*(SystemBusyError("busy") for _ in range(7)))
    assert call(world, retries) == b""
    assert world.pauses == [0.05, 0.1, 0.2, 0.4, 0.5, 0.5, 0.5]


@pytest.mark.parametrize(("retries", "tries"), [(GOING, 1), (LAST_COMMIT, 2)])
def test_the_last_commit_of_a_queue_does_not_outlast_what_stays(retries: Retries, tries: int) -> None:
    world = world_with(*(QueueNotFoundError("gone") for _ in range(9)))
    with pytest.raises(QueueNotFoundError):
        call(world, retries)
    assert len(world.calls) == tries


def test_what_goes_in_a_poll_is_not_waited_for_where_its_broker_is_away() -> None:
    for error in (ConnectFailedError("x"), ConnectionLostError("x"), silent("x")):
        world = world_with(error)
        with pytest.raises(TransportError):
            call(world, GOING)
        assert (len(world.calls), world.pauses) == (1, [])


@pytest.mark.parametrize(("first", "is_definite"), [(ConnectionLostError("x"), False), (SystemBusyError("x"), True)])
def test_an_error_is_definite_only_if_no_earlier_try_may_have_been_carried_out(first: ProtomqError, is_definite: bool) -> None:
    """The stranger's case: the master carries the call out and dies before its answer comes, then only its slave answers."""
    world = world_with(first, *(NotMasterError(str(number)) for number in range(9)))
    with pytest.raises(NotMasterError) as caught:
        call(world, CALL)
    assert caught.value.definite is is_definite


def test_until_the_end_means_until_the_time_is_over() -> None:
    world = world_with(*(ConnectFailedError("x") for _ in range(99)))
    with pytest.raises(ConnectFailedError):
        call(world, UNTIL_THE_END, 10.0)
    assert world.pauses[:6] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0]
    assert set(world.pauses[5:]) == {1.0}
    assert 9.0 <= world.now_s() < 10.0
    assert len(world.calls) == len(world.pauses) + 1


def silent(text: str) -> ProtomqError:
    error = ConnectFailedError(text)
    error.__cause__ = TimeoutError()
    return error


def test_a_silent_broker_costs_no_tries_since_another_master_may_be_elected() -> None:
    world = world_with(*(silent("x") for _ in range(5)), *(NotMasterError("not yet") for _ in range(5)))
    assert call(world, CALL, 10.0) == b""
    assert world.pauses[:5] == [0.05, 0.1, 0.2, 0.4, 0.5]
    assert set(world.pauses[5:]) == {0.5}
    world = world_with(*(silent("x") for _ in range(99)))
    with pytest.raises(ConnectFailedError):
        call(world, CALL, 5.0)
    assert 4.0 <= world.now_s() < 5.0
    world = world_with(silent("x"))
    with pytest.raises(ConnectFailedError):
        call(world, ONCE)
    assert len(world.calls) == 1
    world = world_with(*(silent("x") for _ in range(9)))
    with pytest.raises(ConnectFailedError):
        world.driver.run(call_address(A, GET_OFFSETS, (b"ask",), 9.0, CHANGE, world.now_s))
    assert len(world.calls) == 1, "there is no other address"


def test_what_waiting_does_not_mend_is_raised_at_once() -> None:
    world = world_with(InvalidArgumentError("x"))
    with pytest.raises(InvalidArgumentError):
        call(world, UNTIL_THE_END)
    assert len(world.calls) == 1


def test_a_change_is_not_asked_for_again_where_it_may_have_happened() -> None:
    for error in (ConnectionLostError("x"), RequestTimeoutError("x"), QueueHealingError("x")):
        world = world_with(error)
        with pytest.raises(type(error)):
            call(world, CHANGE)
        assert len(world.calls) == 1


def test_a_server_says_how_long_to_wait() -> None:
    world = world_with(SystemBusyError("x", retry_delay_ms=700))
    assert call(world, CALL) == b""
    assert world.pauses == [0.7]


def test_an_error_that_suspects_the_route_has_it_looked_up_again() -> None:
    world = world_with(TopicNotFoundError("x"), SystemBusyError("x"))
    assert call(world, CALL) == b""
    assert world.forgotten == ["T"]
    assert world.looked_up == ["T", "T", "T"]


@pytest.mark.parametrize(
    ("error", "denied"),
    [
        (TopicNotFoundError("x"), ["T"]),
        (TopicNotFoundError("x", metadata={"missing_brokers": "a"}), []),
        (QueueNotFoundError("x"), []),
        (ConnectFailedError("x"), []),
    ],
)
def test_a_broker_denies_a_topic_where_it_does_not_have_it_and_nowhere_else(error: ProtomqError, denied: list[str]) -> None:
    world = world_with(error)
    with pytest.raises(type(error)):
        call(world, ONCE)
    assert (world.forgotten, world.denied) == (["T"], denied)


def test_a_broker_that_is_not_in_the_route_is_waited_for() -> None:
    world = FakeWorld(route_of("T", "b"))
    with pytest.raises(NoRouteError, match="no broker 'a'"):
        call(world, CALL)
    assert (world.calls, world.looked_up, world.forgotten) == ([], ["T"] * 3, ["T"] * 3)


def test_all_tries_share_the_time() -> None:
    world = world_with(SystemBusyError("x"))
    world.call_takes_s = 1.0
    call(world, CALL, 5.0)
    # A look-up takes a second, then the call; then 50 ms pass, and so again.
    assert [timeout_s for *_, timeout_s in world.calls] == pytest.approx([4.0, 1.95])


def test_where_the_address_is_fixed_a_suspected_route_ends_it() -> None:
    for error, tries in ((ConnectFailedError("x"), 1), (SystemBusyError("x"), 2)):
        world = world_with(error)
        steps = call_address(A, PING, (), 3.0, CALL, world.now_s)
        if tries == 1:
            with pytest.raises(ConnectFailedError):
                world.driver.run(steps)
        else:
            world.driver.run(steps)
        assert len(world.calls) == tries
        assert world.looked_up == []


ERRORS = st.sampled_from(
    [
        SystemBusyError("busy"), SystemBusyError("later", retry_delay_ms=300), ConnectFailedError("refused"),
        ConnectionLostError("lost"), RequestTimeoutError("late"), TopicNotFoundError("no topic"),
        InvalidArgumentError("wrong"), NoRouteError("no route"),
    ]
)  # fmt: skip


@given(
    errors=st.lists(ERRORS, max_size=12),
    retries=st.sampled_from([ONCE, CALL, GOING, LAST_COMMIT, CHANGE, UNTIL_THE_END]),
    timeout_s=st.floats(0.001, 20.0),
    call_takes_s=st.sampled_from([0.0, 0.02, 0.4]),
    fixed=st.booleans(),
)
def test_whatever_happens_tries_and_time_are_bounded_and_the_last_error_comes_out(
    errors: list[ProtomqError], retries: Retries, timeout_s: float, call_takes_s: float, fixed: bool
) -> None:
    world = FakeWorld(route_of("T", "a"), call_takes_s=call_takes_s)
    world.script.extend(errors)
    steps = (
        call_address(A, PING, (), timeout_s, retries, world.now_s)
        if fixed
        else call_broker("T", "a", PING, (), timeout_s, retries, world.now_s)
    )
    raised: ProtomqError | None = None
    try:
        world.driver.run(steps)
    except ProtomqError as error:
        raised = error
    tries = len(world.calls)
    outlasted = sum(isinstance(error, retries.outlasts) for error in errors[:tries])
    assert tries >= 1
    assert tries - outlasted <= (retries.tries_max or tries)
    assert raised is (errors[tries - 1] if tries <= len(errors) else None)
    # No pause leads beyond the end; only what was begun before it may end behind it.
    assert world.now_s() < timeout_s + 2 * call_takes_s + 0.001
    for passed in errors[: tries - 1]:
        assert passed.retriable
        assert passed.definite or not retries.only_definite
        assert not (fixed and passed.stale_route)
    assert len(world.pauses) == tries - 1
    least = [(passed.retry_delay_ms or 50) / 1000 for passed in errors]
    assert all(pause_s >= least_s for pause_s, least_s in zip(world.pauses, least, strict=False))


def test_an_answer_that_does_not_parse_is_an_error_of_the_protocol() -> None:
    with pytest.raises(ProtocolError):
        decoded(b"\xff", GetOffsetsResponse.FromString)


# -- name servers ------------------------------------------------------------------------------------------------------


def names(*addresses: str) -> NameServerList:
    """In this order."""
    found = NameServerList(list(addresses))
    found.prefer(next(server for server in found.in_order() if server.grpc_address == addresses[0]))
    return found


def asked(world: FakeWorld) -> list[str]:
    return [server for server, *_ in world.calls]


def test_name_servers_are_asked_in_turn_and_the_one_that_answers_is_kept() -> None:
    world, servers = world_with(ConnectFailedError("x"), TopicNotFoundError("x")), names("n1:1", "n2:1", "n3:1")
    world.script.append(b"route")
    assert world.driver.run(ask_one(servers, GET_ROUTE, b"", 3.0, world.now_s)) == b"route"
    assert asked(world) == ["n1:1", "n2:1", "n3:1"]
    assert [timeout_s for *_, timeout_s in world.calls] == pytest.approx([1.0, 1.5, 3.0])
    assert servers.in_order()[0].grpc_address == "n3:1"


def test_one_that_knows_is_believed_rather_than_one_that_has_just_started() -> None:
    world, servers = world_with(b"", ConnectFailedError("x"), b"known"), names("n1:1", "n2:1", "n3:1")
    assert world.driver.run(ask_one(servers, GET_ROUTE, b"", 3.0, world.now_s, bool)) == b"known"
    assert servers.in_order()[0].grpc_address == "n3:1"


@pytest.mark.parametrize("other", [b"", UnknownMethodError("x"), ConnectFailedError("x"), TopicNotFoundError("x")])
def test_where_none_knows_the_first_that_answers_is_believed(other: Any) -> None:
    world, servers = world_with(b"0", other), names("n1:1", "n2:1")
    assert world.driver.run(ask_one(servers, GET_ROUTE, b"", 3.0, world.now_s, lambda answer: answer == b"known")) == b"0"
    assert asked(world) == ["n1:1", "n2:1"]


def test_a_lost_connection_to_a_name_server_is_made_anew_once() -> None:
    world = world_with(*(ConnectionLostError("x") for _ in range(9)))
    with pytest.raises(NoRouteError):
        world.driver.run(ask_one(names("n1:1", "n2:1"), GET_ROUTE, b"", 3.0, world.now_s))
    assert asked(world) == ["n1:1", "n1:1", "n2:1", "n2:1"]
    assert world.pauses == []


def test_every_name_server_is_told_once_and_says_what_it_says() -> None:
    lost, foreign = ConnectionLostError("x"), UnknownMethodError("x")
    world = world_with(lost, foreign)
    answers = world.driver.run(ask_all(names("n1:1", "n2:1", "n3:1"), PING, b"", 3.0, world.now_s))
    assert asked(world) == ["n1:1", "n2:1", "n3:1"]
    assert answers[0] is lost
    assert isinstance(answers[1], ConfigurationError)
    assert answers[2] == b""


def test_what_is_no_name_server_is_said_to_be_none() -> None:
    world = world_with(UnknownMethodError("x"))
    with pytest.raises(ConfigurationError, match="is no name server"):
        world.driver.run(ask_one(names("n1:1", "n2:1"), GET_ROUTE, b"", 3.0, world.now_s))
