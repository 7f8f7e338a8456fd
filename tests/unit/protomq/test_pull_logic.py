"""PullState: one pull per queue, nothing lost by a seek, nothing committed that was not dealt with."""

from __future__ import annotations

import random
from unittest import mock

import pytest

from protomq import _pull_logic
from protomq._pull_logic import (
    BACKOFF_MAX_S,
    DELETED_AFTER_S,
    READ_AHEAD_MAX_BYTES,
    READ_PAUSE_MAX_S,
    SLAVE_PAUSE_S,
    PullOptions,
    PullState,
    Room,
    Ticket,
)
from protomq._types import MessageQueue
from protomq.errors import (
    ConfigurationError,
    ConnectFailedError,
    ConnectionLostError,
    CorruptLogError,
    InvalidArgumentError,
    NoRouteError,
    OffsetIllegalError,
    ProtocolError,
    SystemBusyError,
    TopicNotFoundError,
    TopicRecreatedError,
)
from protomq.v1 import pull_service_pb2
from protomq.wire.record import RecordTemplate, encode_front, encode_record_field
from tests.support.fake_server import encode_pull_answer

Q0, Q1 = MessageQueue("t", "a", 0), MessageQueue("t", "a", 1)


def state(*queues: MessageQueue, tags: tuple[str, ...] = (), **options: object) -> PullState:
    made = PullState(PullOptions("g", **options), random.Random(1))  # type: ignore[arg-type]
    made.assign(queues or (Q0,), {"t": tags})
    made.start_all(made.queues, {}, {}, incarnation=7)
    return made


def found(
    first: int, count: int, *, tag: str = "", next_offset: int | None = None, broken: int | None = None
) -> bytes:
    """`broken`: the record at this offset does not begin as a record does."""
    template = RecordTemplate("t", 1, 1)
    fields = []
    for i in range(first, first + count):
        record = template.encode(b"%d" % i, i, 1, tag=tag, front=encode_front((), tag))
        field = encode_record_field(record)
        fields.append((i, b"\xff" + field[1:] if i == broken else field))
    return encode_pull_answer(
        1, next_offset if next_offset is not None else first + count, 0, 1000, fields
    )


def pull(made: PullState, queue: MessageQueue = Q0, now_s: float = 0.0) -> Ticket:
    assert queue in made.due(now_s)
    return made.begin(queue)


def bodies(made: PullState, count_max: int = 100) -> list[bytes]:
    return [message.body for message in made.take(count_max)]


def test_a_queue_has_one_pull_in_flight() -> None:
    made = state(Q0, Q1)
    assert made.due(0.0) == [Q0, Q1]
    pull(made)
    assert made.due(0.0) == [Q1]


def request(made: PullState, ticket: Ticket) -> pull_service_pb2.PullRequest:
    return pull_service_pb2.PullRequest.FromString(made.encode_request(ticket))


@pytest.mark.parametrize(("hold_ms", "longer_ms"), [(0, 0), (200, 1_600), (15_000, 120_000), (60_000, 120_000)])
def test_pulls_of_topics_whose_routes_are_followed_may_rest_at_a_master(hold_ms: int, longer_ms: int) -> None:
    made = state(Q0, hold_ms=hold_ms)
    asked = request(made, pull(made))
    assert (asked.hold_ms, asked.quiet_hold_ms) == (hold_ms, 0)
    made.seek(Q0, 0)
    made.followed = {"t"}
    asked = request(made, pull(made))
    assert (asked.hold_ms, asked.quiet_hold_ms) == (hold_ms, longer_ms)


def test_a_pull_does_not_rest_at_a_slave() -> None:
    made = state()
    made.followed = {"t"}
    answer = pull_service_pb2.PullResponse.FromString(found(0, 1))
    answer.suggested_broker_id = 1
    made.answered(pull(made), answer.SerializeToString(), 0.0)
    assert made.suggested_broker_id(Q0) == 1
    assert request(made, pull(made)).quiet_hold_ms == 0


@pytest.mark.parametrize("way", ["seek", "give back", "drop", "assign", "tags", "elsewhere"])
def test_a_pull_that_does_not_count_any_more_is_told_once(way: str) -> None:
    made = state(Q0, Q1)
    dropped: list[Ticket] = []
    made.on_dropped = dropped.append
    made.answered(pull(made), found(0, 3), 0.0)
    ticket, other = made.begin(Q0, 5.0), made.begin(Q1, 6.0)
    if way == "seek":
        made.seek(Q0, 5)
    elif way == "give back":
        made.give_back(made.take(10))
    elif way == "drop":
        made.drop([Q0])
    elif way == "assign":
        made.assign([Q1], {"t": ()}, park=True)
    elif way == "tags":
        made.assign([Q0, Q1], {"t": ("red",)})
        assert dropped.pop() == other
    else:
        made.pull_elsewhere("t", {"b"})
        made.pull_elsewhere("u", {"a"})
        assert dropped == []
        made.pull_elsewhere("t", {"a"})
        assert dropped.pop() == other
        assert bodies(made) == [b"0", b"1", b"2"]  # What has come stays.
        assert made.due(0.0) == [Q0, Q1]
    assert dropped == [ticket]
    made.answered(ticket, found(3, 3), 0.0)
    assert bodies(made) == []
    made.drop([Q0, Q1])
    assert dropped in ([ticket], [ticket, other])


def test_the_next_pull_starts_when_an_answer_is_there_and_two_answers_wait_at_most() -> None:
    made = state()
    made.answered(pull(made), found(0, 3), 0.0)
    ticket = pull(made)
    assert ticket.queue_offset == 3
    made.answered(ticket, found(3, 3), 0.0)
    assert made.due(0.0) == []
    assert bodies(made, 2) == [b"0", b"1"]
    assert made.due(0.0) == []
    assert bodies(made, 3) == [b"2", b"3", b"4"]
    assert made.due(0.0) == [Q0]


def test_queues_take_turns() -> None:
    made = state(Q0, Q1)
    made.answered(pull(made, Q0), found(0, 4), 0.0)
    made.answered(pull(made, Q1), found(10, 2), 0.0)
    assert bodies(made, 2) == [b"0", b"1"]
    assert bodies(made, 2) == [b"10", b"11"]
    assert bodies(made, 9) == [b"2", b"3"]


def test_what_waits_takes_room() -> None:
    made = state(Q0, Q1)

    def taken() -> int:
        return READ_AHEAD_MAX_BYTES - made.room_bytes(0.0)

    assert taken() == 0
    first, second = found(0, 3), found(3, 3)
    made.answered(pull(made), first, 0.0)
    made.answered(pull(made), second, 0.0)
    made.answered(pull(made, Q1), first, 0.0)
    assert taken() == 2 * len(first) + len(second)
    made.take(2)
    assert taken() == 2 * len(first) + len(second)
    made.take(4)
    assert taken() == len(second)
    made.seek(Q0, 100)
    assert taken() == 0


def test_no_more_is_read_while_enough_waits_but_for_a_long_silence() -> None:
    made = state()
    with mock.patch.object(_pull_logic, "READ_AHEAD_MAX_BYTES", 10):
        assert made.room_bytes(100.0) == 10
        made.answered(pull(made), found(0, 1), 100.0)
        assert made.room_bytes(100.0) == 0
        assert made.room_bytes(100.0 + READ_PAUSE_MAX_S) == 1
        made.answered(pull(made), found(1, 1), 100.0 + READ_PAUSE_MAX_S)
        assert made.room_bytes(101.0 + READ_PAUSE_MAX_S) == 0
        made.assign((), {})
        assert made.room_bytes(100.0) == 10


def test_a_seek_drops_what_waits_and_what_is_on_its_way() -> None:
    made = state()
    made.answered(pull(made), found(0, 3), 0.0)
    ticket = pull(made)
    made.seek(Q0, 100)
    assert bodies(made) == []
    assert made.position(Q0) == 100
    fresh = pull(made)
    assert fresh.queue_offset == 100
    made.answered(ticket, found(3, 3), 0.0)  # Late.
    assert bodies(made) == []
    made.answered(fresh, found(100, 1), 0.0)
    assert bodies(made) == [b"100"]


def reset_to(next_offset: int, epoch: int) -> bytes:
    return pull_service_pb2.PullResponse(
        status=pull_service_pb2.PULL_STATUS_OFFSET_RESET, next_offset=next_offset, reset_epoch=epoch
    ).SerializeToString()


def test_a_reset_drops_what_was_pulled_and_goes_on_there() -> None:
    made = PullState(PullOptions("g"))
    made.assign([Q0, Q1], {})
    made.start_all(made.queues, {0: 5}, {}, 9, {0: 70})
    assert (made.reset_epoch(Q0), made.reset_epoch(Q1)) == (70, 0)
    made.answered(pull(made), found(5, 4), 0.0)
    assert bodies(made, 2) == [b"5", b"6"]
    ticket = pull(made)
    request = pull_service_pb2.PullRequest.FromString(made.encode_request(ticket))
    assert (request.HasField("reset_epoch"), request.reset_epoch) == (True, 70)
    made.answered(ticket, reset_to(2, 80), 0.0)
    made.user_came_back()
    assert (made.position(Q0), made.reset_epoch(Q0)) == (2, 80)
    assert made.uncommitted_count() == 0
    assert made.to_commit(safe_only=True) == {Q1: 0}, "the broker knows the offset to which it reset"
    assert bodies(made) == []
    ticket = pull(made)
    assert ticket.queue_offset == 2
    assert pull_service_pb2.PullRequest.FromString(made.encode_request(ticket)).reset_epoch == 80
    made.answered(ticket, found(2, 1), 0.0)
    assert bodies(made) == [b"2"]
    made.follow_reset(Q0, 2, 80)
    assert made.position(Q0) == 3, "a reset is followed once"
    made.follow_reset(MessageQueue("t", "a", 7), 0, 90)  # It went away meanwhile.


def diverged_at(next_offset: int, epoch: int) -> bytes:
    return pull_service_pb2.PullResponse(
        status=pull_service_pb2.PULL_STATUS_DIVERGED, next_offset=next_offset, log_epoch=epoch
    ).SerializeToString()


def in_epoch(payload: bytes, epoch: int) -> bytes:
    return pull_service_pb2.PullResponse(log_epoch=epoch).SerializeToString() + payload


def asked_epoch(made: PullState, ticket: Ticket) -> int:
    return pull_service_pb2.PullRequest.FromString(made.encode_request(ticket)).log_epoch


def test_a_fork_behind_what_was_handed_out_only_pulls_again() -> None:
    made = PullState(PullOptions("g"))
    made.assign([Q0], {})
    made.start_all(made.queues, {0: 0}, {}, 9, {}, 3)
    first = pull(made)
    assert asked_epoch(made, first) == 3, "the offset came with its epoch"
    made.answered(first, in_epoch(found(0, 6), 4), 0.0)
    assert bodies(made, 2) == [b"0", b"1"]
    ticket = pull(made)
    assert (ticket.queue_offset, asked_epoch(made, ticket)) == (6, 4)
    made.answered(ticket, diverged_at(4, 7), 0.0)
    again = pull(made)
    assert (again.queue_offset, asked_epoch(made, again), made.position(Q0)) == (2, 7, 2)
    assert bodies(made) == []


def test_a_fork_in_front_of_what_was_handed_out_is_gone_back_to_and_committed() -> None:
    made = PullState(PullOptions("g"))
    made.assign([Q0], {})
    made.start_all(made.queues, {0: 0}, {}, 9, {}, 3)
    made.answered(pull(made), in_epoch(found(0, 6), 3), 0.0)
    assert len(bodies(made)) == 6
    made.user_came_back()
    made.committed({Q0: 6})
    made.answered(pull(made), diverged_at(4, 7), 0.0)
    assert (made.position(Q0), made.to_commit(safe_only=True)) == (4, {Q0: 4})
    again = pull(made)
    assert (again.queue_offset, asked_epoch(made, again)) == (4, 7)
    made.answered(again, in_epoch(found(4, 2), 7), 0.0)
    assert bodies(made) == [b"4", b"5"]


def test_whoever_wants_errors_is_told_of_a_fork_until_it_seeks() -> None:
    made = PullState(PullOptions("g", offset_reset="error"))
    made.assign([Q0], {})
    made.start_all(made.queues, {0: 6}, {}, 9, {}, 3)
    for now_s in (0.0, 1.0):
        with pytest.raises(OffsetIllegalError, match="taken back, from 4 on") as caught:
            made.answered(pull(made, Q0, now_s), diverged_at(4, 7), now_s)
        assert caught.value.metadata["diverging_offset"] == "4"
    made.seek(Q0, 4)
    assert asked_epoch(made, pull(made)) == 3


def test_a_seek_ahead_says_nothing_of_what_it_jumps_over() -> None:
    made = PullState(PullOptions("g"))
    made.assign([Q0], {})
    made.start_all(made.queues, {0: 6}, {}, 9, {}, 3)
    made.seek(Q0, 9)
    assert asked_epoch(made, pull(made)) == 0


def begun_at_slave(queue_offset: int = 5) -> PullState:
    """A consumer that has had two messages from where a slave said."""
    made = PullState(PullOptions("g"))
    made.assign([Q0, Q1], {})
    made.start_all(made.queues, {0: queue_offset}, {}, 9, {}, by_slave=[Q0])
    made.answered(pull(made), found(queue_offset, 4), 0.0)
    assert len(bodies(made, 2)) == 2
    return made


def test_whoever_began_where_a_slave_said_says_so_until_a_commit_is_taken() -> None:
    made = begun_at_slave()
    assert (made.began(Q0), made.began(Q1), made.began(MessageQueue("t", "a", 7))) == (5, None, None)
    made.rewind()  # Ctrl-C: no wish to be somewhere else.
    made.assign([Q1], {}, park=True)  # Its broker is away for a while.
    made.assign([Q0, Q1], {}, park=True)
    assert made.began(Q0) == 5
    made.committed({Q0: 7})
    assert made.began(Q0) is None
    sought = begun_at_slave()
    sought.seek(Q0, 1)
    assert sought.began(Q0) is None, "it is where the program wants to be"
    sought.follow_kept(Q0, 100)  # The answer to a commit from before.
    assert sought.position(Q0) == 1


def test_what_the_group_had_committed_is_not_consumed_again_once_the_master_says_it() -> None:
    made = begun_at_slave()
    assert made.follow_kept(Q0, 100)
    assert (made.position(Q0), made.began(Q0), bodies(made)) == (100, 100, [])
    made.user_came_back()
    assert made.to_commit(safe_only=True) == {Q1: 0}
    made.follow_kept(MessageQueue("t", "a", 7), 100)  # It went away meanwhile.


def test_a_consumer_that_has_got_beyond_what_the_group_had_committed_goes_on_where_it_is() -> None:
    made = begun_at_slave()
    assert not made.follow_kept(Q0, 6)
    assert (made.position(Q0), made.began(Q0)) == (7, 5)
    made.user_came_back()
    assert made.to_commit(safe_only=True) == {Q0: 7, Q1: 0}


def test_a_consumer_that_began_behind_what_the_group_had_committed_skips_nothing() -> None:
    made = begun_at_slave(50)  # Its end, say: the slave did not know the group.
    assert made.follow_kept(Q0, 20)
    assert (made.position(Q0), made.began(Q0)) == (20, 20)


def test_what_a_reset_or_a_fork_told_may_be_from_a_slave_too() -> None:
    made = begun_at_slave()
    made.follow_fork(Q0, 3, 2)
    assert made.began(Q0) == 3
    made.follow_reset(Q0, 4, 80)
    assert made.began(Q0) == 4


def test_without_a_group_resets_are_not_followed() -> None:
    made = state()
    request = pull_service_pb2.PullRequest.FromString(made.encode_request(pull(made)))
    assert not request.HasField("reset_epoch")


def test_positions_follow_what_was_handed_out() -> None:
    made = state()
    made.answered(pull(made), found(0, 3, next_offset=7), 0.0)
    assert made.position(Q0) == 0
    made.take(2)
    assert made.position(Q0) == 2
    made.take(2)
    assert made.position(Q0) == 7  # Behind what the broker filtered out.


def test_only_what_was_dealt_with_is_safe_to_commit() -> None:
    made = state()
    assert made.to_commit(safe_only=True) == {Q0: 0}
    made.committed({Q0: 0})
    made.answered(pull(made), found(0, 4), 0.0)
    made.take(2)
    assert made.to_commit(safe_only=True) == {}
    assert made.to_commit(safe_only=False) == {Q0: 2}
    made.user_came_back()
    assert made.to_commit(safe_only=True) == {Q0: 2}
    made.take(1)
    assert made.to_commit(safe_only=True) == {Q0: 2}
    made.committed({Q0: 2})
    assert made.to_commit(safe_only=True) == {}


def test_what_the_broker_filtered_out_may_be_committed_unless_something_before_it_is_open() -> None:
    made = state()
    made.answered(pull(made), encode_pull_answer(3, 5, 0, 9, []), 0.0)
    assert made.to_commit(safe_only=True) == {Q0: 5}
    made.answered(pull(made), found(5, 1), 0.0)
    made.take(1)
    made.answered(pull(made), encode_pull_answer(3, 9, 0, 9, []), 0.0)
    assert made.position(Q0) == 9
    assert made.to_commit(safe_only=True) == {Q0: 5}
    made.user_came_back()
    assert made.to_commit(safe_only=True) == {Q0: 9}


def test_a_rewind_goes_back_to_what_was_dealt_with() -> None:
    made = state(Q0, Q1)
    made.answered(pull(made), found(0, 4), 0.0)
    made.take(2)
    made.user_came_back()
    made.take(2)
    made.rewind()
    assert (made.position(Q0), made.position(Q1)) == (2, 0)
    assert pull(made).queue_offset == 2


def test_messages_given_back_come_again() -> None:
    made = state()
    made.answered(pull(made), found(0, 4), 0.0)
    messages = made.take(4)
    made.give_back(messages[1:])
    assert made.position(Q0) == 1
    assert pull(made).queue_offset == 1


def test_of_a_queue_of_which_no_broker_has_said_a_word_nothing_is_committed() -> None:
    made = PullState(PullOptions("g"), random.Random(1))
    made.assign((Q0, Q1), {"t": ()})
    made.start_all((Q0,), {}, {}, incarnation=7)
    made.start_all((Q1,), {}, {})
    assert made.to_commit(safe_only=True) == {Q0: 0}, "the topic may have been made again without the other queue"
    assert made.to_commit(safe_only=False) == {Q0: 0, Q1: 0}, "the program asks for it"
    made.seek(Q1, 3)
    assert made.to_commit(safe_only=True) == {Q0: 0, Q1: 3}


def test_a_committed_offset_is_where_it_goes_on_and_is_not_committed_again() -> None:
    made = PullState(PullOptions("g"))
    made.assign([Q0, Q1], {})
    assert made.unresolved() == [Q0, Q1]
    assert made.due(0.0) == []
    made.start_all([Q0, Q1], {0: 55}, {Q1: 7})
    assert (made.position(Q0), made.position(Q1)) == (55, 7)
    assert made.to_commit(safe_only=True) == {Q1: 7}


def test_an_assignment_keeps_the_position_of_what_stays() -> None:
    made = state(Q0, Q1)
    made.seek(Q0, 42)
    made.answered(pull(made, Q1), found(0, 1), 0.0)
    assert made.assign([Q0], {}) == []
    assert made.position(Q0) == 42
    assert bodies(made) == []
    with pytest.raises(ConfigurationError):
        made.position(Q1)


def test_a_queue_whose_broker_was_away_goes_on_where_it_was() -> None:
    made = state(Q0, Q1)
    made.answered(pull(made, Q1), found(0, 5), 0.0)
    late = pull(made, Q1)
    made.take(2)
    assert made.assign([Q0], {}, park=True) == []
    assert bodies(made) == []
    assert made.assign([Q0, Q1], {}, park=True) == []
    assert made.position(Q1) == 2
    made.answered(late, found(5, 1), 0.0)
    assert bodies(made) == []
    assert pull(made, Q1).queue_offset == 2
    assert made.assign([Q0], {}) == []
    assert made.assign([Q0, Q1], {}) == [Q1]  # The user took it away: that is another matter.


def test_empty_answers_move_the_position_on() -> None:
    made = state()
    made.answered(pull(made), encode_pull_answer(3, 9, 0, 9, []), 0.0)
    assert made.position(Q0) == 9
    made.answered(pull(made), encode_pull_answer(2, 9, 0, 9, []), 0.0)
    assert made.due(0.0) == [Q0]


def test_without_a_hold_an_empty_queue_is_not_asked_in_a_tight_loop() -> None:
    made = state(hold_ms=0)
    made.answered(pull(made), encode_pull_answer(2, 0, 0, 0, []), 10.0)
    assert made.due(10.0) == []
    assert 0 < made.next_due_in_s(10.0) < 0.1
    assert made.due(10.1) == [Q0]


@pytest.mark.parametrize(("policy", "target"), [("nearest", 50), ("earliest", 50), ("latest", 90)])
def test_an_illegal_offset_is_handled_as_asked(policy: str, target: int) -> None:
    made = state(offset_reset=policy)
    made.answered(pull(made), encode_pull_answer(4, 50, 50, 90, []), 0.0)
    assert made.position(Q0) == target
    assert pull(made).queue_offset == target


def test_an_illegal_offset_can_be_an_error() -> None:
    made = state(offset_reset="error")
    with pytest.raises(OffsetIllegalError) as caught:
        made.answered(pull(made), encode_pull_answer(4, 50, 50, 90, []), 0.0)
    assert caught.value.metadata == {"queue_offset": "0", "min_offset": "50", "end_offset": "90"}
    made.seek(Q0, 50)
    assert pull(made).queue_offset == 50


def test_a_passing_error_pauses_the_queue_for_longer_and_longer() -> None:
    made = state()
    now_s, pauses = 0.0, []
    for _ in range(10):
        assert not made.failed(pull(made, now_s=now_s), ConnectionLostError("gone"), now_s)
        pauses.append(made.next_due_in_s(now_s))
        now_s += pauses[-1]
    assert 0.05 <= pauses[0] <= 0.1
    assert BACKOFF_MAX_S / 2 <= pauses[-1] <= BACKOFF_MAX_S
    made.answered(pull(made, now_s=now_s), found(0, 1), now_s)
    assert made.due(now_s) == [Q0]


def test_a_busy_broker_says_when_to_come_back() -> None:
    made = state()
    made.failed(pull(made), SystemBusyError("busy", retry_delay_ms=7_000), 0.0)
    assert made.due(6.9) == []
    assert made.due(7.0) == [Q0]


def test_an_error_that_does_not_pass_is_for_the_user() -> None:
    made = state()
    assert made.failed(pull(made), InvalidArgumentError("never"), 0.0)


def test_tags_are_compared_again() -> None:
    made = state(tags=("A", "B"))
    made.answered(pull(made), found(0, 2, tag="A"), 0.0)
    made.answered(pull(made), found(2, 2, tag="C"), 0.0)
    assert bodies(made) == [b"0", b"1"]
    assert made.position(Q0) == 4


def test_other_tags_keep_the_position_and_drop_what_was_pulled_with_the_old_ones() -> None:
    made = state(tags=("A",))
    made.answered(pull(made), found(0, 4, tag="A"), 0.0)
    late = pull(made)
    made.take(2)
    assert made.assign([Q0], {"t": ("B",)}) == []
    assert bodies(made) == []
    assert made.to_commit(safe_only=True) == {Q0: 0}
    made.answered(late, found(4, 1, tag="A"), 0.0)
    fresh = pull(made)
    assert (fresh.queue_offset, made.position(Q0)) == (2, 2)
    made.answered(fresh, found(6, 1, tag="B"), 0.0)
    assert bodies(made) == [b"6"]


def test_an_answer_that_leads_nowhere_is_an_error() -> None:
    made = state()
    with pytest.raises(ProtocolError):
        made.answered(pull(made), found(0, 1, next_offset=0), 0.0)
    assert made.due(0.0) == []


@pytest.mark.parametrize("queues", [(Q0, Q1), (Q1, Q0)])
def test_a_record_that_does_not_decode_takes_nothing_from_other_queues_and_is_pulled_again(
    queues: tuple[MessageQueue, MessageQueue],
) -> None:
    made = state(Q0, Q1)
    for queue in queues:
        made.answered(pull(made, queue), found(0, 4, broken=2 if queue == Q1 else None), 0.0)
    taken: list[tuple[MessageQueue, int]] = []
    error_count = 0
    for _ in range(2):
        try:
            parts = made.take_parts(100)
        except ProtocolError:
            error_count += 1
            continue
        taken += [(message.queue, message.queue_offset) for _, part in parts for message in part]
    assert taken == [(Q0, offset) for offset in range(4)]
    assert error_count == 1
    made.user_came_back()
    assert made.to_commit(safe_only=True) == {Q0: 4, Q1: 0}
    assert made.take_parts(100) == []
    assert Q1 not in made.due(BACKOFF_MAX_S - 0.1)
    made.answered(pull(made, Q1, BACKOFF_MAX_S), found(0, 4), 4.0)
    assert bodies(made) == [b"0", b"1", b"2", b"3"]


ONE_ANSWER_BYTES = len(found(0, 4))


@pytest.mark.parametrize(
    ("rooms", "total", "taken"),
    [
        ({Q0: Room(1, 1 << 20), Q1: Room(2, 1 << 20)}, Room(9, 1 << 20), {Q0: [0], Q1: [0, 1]}),
        ({Q0: Room(0, 1 << 20), Q1: Room(5, 1 << 20)}, Room(9, 1 << 20), {Q1: [0, 1, 2, 3, 4]}),
        ({Q0: Room(9, 1 << 20), Q1: Room(9, 1 << 20)}, Room(5, 1 << 20), {Q0: [0, 1, 2, 3], Q1: [0]}),
        ({Q0: Room(9, 1), Q1: Room(9, 300)}, Room(9, 1 << 20), {Q0: [0], Q1: [0, 1, 2]}),
        ({Q0: Room(9, 1 << 20), Q1: Room(9, 1 << 20)}, Room(9, 1), {Q0: [0]}),
        ({Q0: Room(-1, -1), Q1: Room(0, 0)}, Room(9, 1), {}),
        # Of messages there is no room left, of octets there is a little.
        ({Q0: Room(0, 1), Q1: Room(-1, 1)}, Room(9, 1 << 20), {}),
        ({Q0: Room(4, ONE_ANSWER_BYTES + 1), Q1: Room(0, 1)}, Room(9, 1 << 20), {Q0: [0, 1, 2, 3]}),
    ],
)
def test_no_more_is_taken_than_there_is_room_for(
    rooms: dict[MessageQueue, Room], total: Room, taken: dict[MessageQueue, list[int]]
) -> None:
    made = state(Q0, Q1)
    for queue in (Q0, Q1):
        made.answered(pull(made, queue), found(0, 4), 0.0)
        made.answered(pull(made, queue), found(4, 4), 0.0)
    parts = made.take_parts(100, room_of=lambda queue: total if queue is None else rooms[queue])
    found_offsets: dict[MessageQueue, list[int]] = {}
    for queue, part in parts:
        found_offsets.setdefault(queue, []).extend(message.queue_offset for message in part)
    assert found_offsets == taken
    rest = [message for _, part in made.take_parts(100) for message in part]
    assert len(rest) == 16 - sum(map(len, taken.values()))


def test_a_queue_with_a_record_that_does_not_decode_can_be_left() -> None:
    made = state(Q0, Q1)
    made.answered(pull(made, Q1), found(0, 4, broken=0), 0.0)
    made.answered(pull(made, Q1), found(4, 4), 0.0)
    with pytest.raises(ProtocolError):
        made.take(100)
    made.pause([Q1])
    made.seek(Q1, 1)
    made.drop([Q1])
    assert made.room_bytes(0.0) == READ_AHEAD_MAX_BYTES


def test_a_request_says_all_that_was_asked_for() -> None:
    made = state(tags=("A",), hold_ms=5, record_count_max=6, size_max_bytes=7)
    made.seek(Q0, 8)
    request = pull_service_pb2.PullRequest.FromString(made.encode_request(pull(made)))
    assert request == pull_service_pb2.PullRequest(
        topic="t", queue_id=0, queue_offset=8, record_count_max=6, size_max_bytes=7, hold_ms=5, tags=["A"],
        consumer_group="g", member=made.member_name(), topic_incarnation=7,
    )  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"hold_ms": -1},
        {"hold_ms": 60_001},
        {"record_count_max": 0},
        {"size_max_bytes": 17 << 20},
        {"offset_reset": "x"},
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        PullOptions(**options)  # type: ignore[arg-type]


def test_random_use_hands_out_every_message_once_and_in_order() -> None:
    rng = random.Random(20261121)
    for _ in range(50):
        made = state(Q0, Q1)
        ends = {Q0: rng.randrange(1, 40), Q1: rng.randrange(1, 40)}
        got: dict[MessageQueue, list[int]] = {Q0: [], Q1: []}
        flight: list[Ticket] = []
        now_s = 0.0
        while any(len(got[queue]) < ends[queue] for queue in ends):
            now_s += 1.0
            flight.extend(made.begin(queue) for queue in made.due(now_s))
            if flight and rng.random() < 0.6:
                ticket = flight.pop(rng.randrange(len(flight)))
                left = ends[ticket.queue] - ticket.queue_offset
                if rng.random() < 0.2:
                    made.failed(ticket, ConnectionLostError("x"), now_s)
                elif left:
                    made.answered(ticket, found(ticket.queue_offset, rng.randint(1, left)), now_s)
                else:
                    made.answered(
                        ticket, encode_pull_answer(2, ticket.queue_offset, 0, 0, []), now_s
                    )
            if rng.random() < 0.1:
                made.restart()
                # Some come late all the same.
                flight = [ticket for ticket in flight if rng.random() < 0.5]
            for message in made.take(rng.randint(1, 7)):
                got[message.queue].append(message.queue_offset)
        assert got == {queue: list(range(end)) for queue, end in ends.items()}


def recreated() -> TopicRecreatedError:
    return TopicRecreatedError("made again")


def test_pulls_and_commits_carry_the_incarnation_of_the_first_answer() -> None:
    made = PullState(PullOptions("g"), random.Random(1))
    made.assign((Q0, Q1), {})
    made.start_all([Q0], {}, {}, 7)
    made.start_all([Q1], {}, {})  # The topic was not there yet.
    assert [made.incarnation(queue) for queue in (Q0, Q1)] == [7, 0]
    requests = {}
    for queue in (Q0, Q1):
        ticket = pull(made, queue)
        requests[queue] = pull_service_pb2.PullRequest.FromString(made.encode_request(ticket))
        answer = pull_service_pb2.PullResponse(status=2, topic_incarnation=7)  # type: ignore[arg-type]
        made.answered(ticket, answer.SerializeToString(), 0.0)
    assert [request.topic_incarnation for request in requests.values()] == [7, 0]
    assert made.incarnation(Q1) == 7


def test_a_topic_that_was_made_again_is_told_until_it_is_assigned_anew() -> None:
    other = MessageQueue("u", "a", 0)
    made = PullState(PullOptions("g"), random.Random(1))
    made.assign((Q0, Q1, other), {})
    made.start_all([Q0, Q1], {0: 5, 1: 5}, {}, 7)
    made.start_all([other], {}, {}, 9)
    late = pull(made, Q1)
    assert made.failed(pull(made), recreated(), 0.0)
    made.seek(Q0, 6)
    assert made.to_commit(safe_only=True) == {other: 0}
    assert made.failed(pull(made, now_s=10.0), recreated(), 10.0)

    made.forget_gone(["t", "u"])
    assert made.assign((Q0, Q1, other), {}) == [Q0, Q1]
    made.start_all([Q0, Q1], {}, {}, 8)
    assert [made.position(queue) for queue in (Q0, Q1, other)] == [0, 0, 0]
    pull(made, Q1, now_s=20.0)
    made.answered(late, found(5, 2), 20.0)  # Of the topic before: nobody waits for it.
    assert bodies(made) == []


def deleted() -> TopicNotFoundError:
    return TopicNotFoundError("not here")


def test_a_topic_that_was_deleted_is_told_when_it_is_not_made_again_within_a_while() -> None:
    made = PullState(PullOptions("g"), random.Random(1))
    made.assign((Q0, Q1), {})
    made.start_all([Q0, Q1], {0: 5, 1: 5}, {}, 7)
    assert made.failed(pull(made), deleted(), 100.0) is None
    # The name server does not know it any more: the broker is not even asked.
    assert made.failed(pull(made, now_s=101.0), deleted(), 101.0, by_broker=False) is None
    told = made.failed(pull(made, now_s=100.0 + DELETED_AFTER_S), deleted(), 100.0 + DELETED_AFTER_S)
    assert isinstance(told, TopicNotFoundError)
    assert "topic 't' was deleted at broker 'a' while it was read" in str(told)
    assert not told.retriable
    assert made.to_commit(safe_only=True) == {}
    assert made.failed(pull(made, now_s=110.0), NoRouteError("no broker 'a'"), 110.0, by_broker=False)
    assert made.failed(pull(made, now_s=120.0), ConnectFailedError("down"), 120.0) is None
    assert isinstance(made.failed(pull(made, now_s=130.0), recreated(), 130.0), TopicRecreatedError)
    made.forget_gone(["u"])
    assert made.assign((Q0, Q1), {}) == []
    made.forget_gone(["t"])
    assert made.assign((Q0, Q1), {}) == [Q0, Q1]


def test_a_topic_that_is_there_again_was_not_deleted() -> None:
    made = PullState(PullOptions("g"), random.Random(1))
    made.assign((Q0,), {})
    made.start_all([Q0], {0: 5}, {}, 7)
    for now_s in (100.0, 200.0):
        assert made.failed(pull(made, now_s=now_s), deleted(), now_s) is None
        answer = pull_service_pb2.PullResponse(status=2, next_offset=5, topic_incarnation=7)  # type: ignore[arg-type]
        made.answered(pull(made, now_s=now_s + 50), answer.SerializeToString(), now_s + 50)
    assert made.failed(pull(made, now_s=300.0), deleted(), 300.0) is None
    damaged = CorruptLogError("damaged")
    assert made.failed(pull(made, now_s=400.0), damaged, 400.0) is damaged
    assert made.failed(pull(made, now_s=500.0), deleted(), 500.0) is None


@pytest.mark.parametrize(("incarnation", "by_broker"), [(0, True), (7, False)])
def test_a_topic_that_only_a_name_server_does_not_know_or_that_never_was_is_waited_for(
    incarnation: int, by_broker: bool
) -> None:
    made = PullState(PullOptions("g"), random.Random(1))
    made.assign((Q0,), {})
    made.start_all([Q0], {}, {}, incarnation)
    for now_s in range(100, 200, 10):
        ticket = pull(made, now_s=now_s)
        assert made.failed(ticket, deleted(), now_s, by_broker=by_broker) is None


def test_a_queue_that_is_held_back_waits_with_one_answer_and_leaves_the_others_their_room() -> None:
    made = state(Q0, Q1)
    made.answered(pull(made), found(0, 3), 0.0)
    room = made.room_bytes(0.0)
    made.hold_back([Q0])
    assert made.room_bytes(0.0) > room
    assert bodies(made) == []
    assert made.due(0.0) == [Q1]  # Of the one that is held an answer waits: it is not pulled.
    made.answered(pull(made, Q1), found(0, 1), 0.0)
    assert bodies(made) == [b"0"]
    made.hold_back([Q0])
    made.hold_back([])
    assert made.room_bytes(0.0) == room
    assert bodies(made) == [b"0", b"1", b"2"]


def test_a_pull_of_a_queue_that_was_held_back_meanwhile_waits_to_be_handed_out() -> None:
    made = state()
    ticket = pull(made)
    made.hold_back([Q0])
    made.answered(ticket, found(0, 2), 0.0)
    assert (bodies(made), made.due(0.0)) == ([], [])
    made.seek(Q0, 1)  # What waits is dropped, held or not.
    assert pull(made).queue_offset == 1
    made.hold_back([])
    assert bodies(made) == []


def test_a_queue_that_is_paused_keeps_its_place_and_is_not_paused_when_it_comes_back() -> None:
    made = state(Q0, Q1)
    made.answered(pull(made), found(0, 3), 0.0)
    room = made.room_bytes(0.0)
    made.pause([Q0])
    made.pause([Q0])
    made.hold_back([Q0])
    made.hold_back([])  # Something else held it, and does so no more.
    assert (made.paused, bodies(made), made.due(0.0)) == ((Q0,), [], [Q1])
    made.pause([Q0], is_paused=False)
    assert (made.paused, made.room_bytes(0.0)) == ((), room)
    assert bodies(made) == [b"0", b"1", b"2"]
    made.pause([Q0])
    made.assign((Q1,), {})
    made.assign((Q0, Q1), {})
    assert made.paused == ()
    with pytest.raises(ConfigurationError, match="not assigned"):
        made.pause([Q1, MessageQueue("T", "b", 9)])
    assert made.paused == ()


@pytest.mark.parametrize("way", ["pause", "schedule"])
def test_what_waited_while_a_queue_was_held_is_handed_out_once_it_is_known_that_no_reset_skipped_it(way: str) -> None:
    made = PullState(PullOptions("g"))
    made.assign((Q0, Q1), {})
    made.start_all((Q0, Q1), {}, {}, reset_epochs={})

    def hold(now_s: float, *queues: MessageQueue) -> None:
        if way == "schedule":
            made.hold_back(queues, now_s)
        elif queues:
            made.pause(queues)
        else:
            made.pause(made.paused, is_paused=False)

    hold(0.0, Q0, Q1)
    made.answered(pull(made), found(0, 2), 0.0)
    hold(1.0)
    assert (list(made.doubted), bodies(made), made.paused) == ([Q0], [], ()), "nothing waits of the other, whose pull tells of resets"
    hold(2.0, Q0)
    hold(2.9 if way == "pause" else 3.0)
    made.believe([Q0, MessageQueue("T", "a", 9)])
    assert (made.doubted, bodies(made)) == (frozenset(), [b"0", b"1"])
    made.answered(pull(made), found(2, 2), 0.0)
    hold(4.0, Q0)
    hold(5.0)
    made.follow_reset(Q0, 90, 8)
    made.believe([Q0])
    assert (bodies(made), pull(made).queue_offset) == ([], 90)


def test_what_waited_for_less_than_a_second_by_a_schedule_is_handed_out_at_once() -> None:
    made = PullState(PullOptions("g"))
    made.assign((Q0,), {})
    made.start_all((Q0,), {}, {}, reset_epochs={})
    made.answered(pull(made), found(0, 1), 0.0)
    made.hold_back([Q0], 1.0)
    made.hold_back([], 1.9)
    assert bodies(made) == [b"0"]


def test_of_one_queue_at_a_time_only_that_is_dealt_with() -> None:
    made = state(Q0, Q1)
    for queue in (Q0, Q1):
        made.answered(pull(made, queue), found(0, 3), 0.0)
    assert [(m.queue, m.queue_offset) for m in made.take(2, one_queue=True)] == [(Q0, 0), (Q0, 1)]
    made.user_came_back()
    assert made.to_commit(safe_only=True) == {Q0: 2, Q1: 0}
    assert {m.queue for m in made.take(9, one_queue=True)} == {Q1}
    assert [m.queue_offset for m in made.take(9, one_queue=True)] == [2]
    assert made.take(9, one_queue=True) == []


def advised(made: PullState, broker_id: int, first: int, now_s: float = 0.0) -> None:
    """One pull, whose answer says from which broker to go on."""
    advice = pull_service_pb2.PullResponse(suggested_broker_id=broker_id).SerializeToString()
    made.answered(pull(made, now_s=now_s), advice + found(first, 1), now_s)
    made.take(10)


def test_a_queue_is_pulled_where_the_last_answer_said() -> None:
    made = state(Q0, Q1)
    assert made.suggested_broker_id(Q0) == 0
    advised(made, 2, 0)
    assert (made.suggested_broker_id(Q0), made.suggested_broker_id(Q1)) == (2, 0)
    advised(made, 0, 1)
    assert made.suggested_broker_id(Q0) == 0


def test_a_slave_that_fails_is_left_at_once_and_for_a_while() -> None:
    made = state()
    advised(made, 2, 0)
    ticket = pull(made)
    assert made.leave_slave(ticket, ConnectFailedError("gone"), 1.0)
    assert made.suggested_broker_id(Q0) == 0
    assert made.due(1.0) == [Q0], "the master is pulled without a pause"
    advised(made, 2, 1, 1.0)
    assert made.suggested_broker_id(Q0) == 0
    advised(made, 2, 2, 1.0 + SLAVE_PAUSE_S)
    assert made.suggested_broker_id(Q0) == 2


def test_a_master_that_fails_is_not_left() -> None:
    made = state()
    ticket = pull(made)
    assert not made.leave_slave(ticket, ConnectFailedError("gone"), 0.0)
    assert made.is_under_way(ticket)


@pytest.mark.parametrize(
    "status",
    [pull_service_pb2.PULL_STATUS_OFFSET_ILLEGAL, pull_service_pb2.PULL_STATUS_DIVERGED, pull_service_pb2.PULL_STATUS_OFFSET_RESET],
)
def test_what_a_slave_has_no_offset_for_is_asked_of_the_master(status: int) -> None:
    made = state()
    advised(made, 2, 0)
    ticket = pull(made)
    made.answered(ticket, encode_pull_answer(status, 700, 700, 900, []), 0.0)
    assert (made.position(Q0), made.suggested_broker_id(Q0)) == (1, 0)
    assert pull(made).queue_offset == 1
    assert made.position(Q0) == 1, "nothing was skipped"


def test_a_seek_begins_at_the_master() -> None:
    made = state()
    advised(made, 2, 0)
    made.seek(Q0, 900)
    assert made.suggested_broker_id(Q0) == 0
