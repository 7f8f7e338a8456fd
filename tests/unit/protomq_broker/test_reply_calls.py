"""Who waits for replies and who gets them: every call has one outcome, and no reply is lost between two waits of its caller."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from protomq_broker.reply_calls import (
    ANSWER_SIZE_MAX_BYTES,
    GRACE_MS,
    REPLY_OVERHEAD_BYTES,
    SETTLE_MS,
    Delivered,
    Effect,
    Given,
    Refused,
    Replaced,
    ReplyCalls,
    TooMany,
    WaitingReply,
)

T = SETTLE_MS + 1
"""A time at which the broker has settled."""


def calls(**limits: int) -> ReplyCalls:
    return ReplyCalls(0, **limits)


def test_a_reply_goes_to_the_held_wait_and_is_delivered_when_its_caller_says_so() -> None:
    made = calls()
    assert made.wait("c", "wait 1", T) == []
    assert made.reply("c", b"r", "reply", T) == [Given("wait 1", [WaitingReply(1, b"r")])]
    assert made.reply_count == 1
    assert made.wait("c", "wait 2", T, received=[1]) == [Delivered("reply")]
    assert (made.reply_count, made.size_bytes, made.counts.delivered) == (0, 0, 1)


def test_a_reply_waits_for_a_caller_that_is_between_two_waits() -> None:
    made = calls()
    assert made.wait("c", "wait 1", T, is_held=False) == [Given("wait 1", [])]
    assert made.reply("c", b"r", "reply", T) == []
    assert made.wait("c", "wait 2", T + GRACE_MS) == [Given("wait 2", [WaitingReply(1, b"r")])]


def test_what_was_given_and_not_named_is_given_again() -> None:
    made = calls()
    made.wait("c", "wait 1", T)
    made.reply("c", b"1", "reply 1", T)
    made.reply("c", b"2", "reply 2", T)
    both = [WaitingReply(1, b"1"), WaitingReply(2, b"2")]
    assert made.wait("c", "wait 2", T) == [Given("wait 2", both)], "the first answer was lost"
    assert made.wait("c", "wait 3", T, received=[1, 1, 77]) == [Delivered("reply 1"), Given("wait 3", both[1:])]


def test_a_reply_that_nobody_wants_is_refused() -> None:
    made = calls()
    made.wait("c", "wait 1", T)
    made.reply("c", b"r", "reply", T)
    assert made.wait("c", "wait 2", T, unwanted=[1]) == [Refused("reply", "c", was_given=False)]
    assert made.counts.refused == 1


def test_a_caller_that_is_not_known_or_gone_gets_no_replies() -> None:
    made = calls()
    assert made.reply("c", b"r", "reply 1", T) == [Refused("reply 1", "c", was_given=False)]
    made.wait("c", "wait", T)
    assert made.waiter_left("c", "wait", T)
    assert made.reply("c", b"r", "reply 2", T + GRACE_MS) == []
    assert made.reply("c", b"r", "reply 3", T + GRACE_MS + 1) == [Refused("reply 3", "c", was_given=False)]
    assert made.reply_ends("reply 2") == [Refused("reply 2", "c", was_given=False)]
    assert made.caller_count(T + GRACE_MS + 1) == 0


def test_while_the_broker_settles_an_unknown_caller_may_come_back() -> None:
    made = calls()
    assert made.reply("c", b"r", "reply", SETTLE_MS - 1) == []
    assert made.wait("c", "wait", SETTLE_MS) == [Given("wait", [WaitingReply(1, b"r")])]
    assert made.reply_ends("reply") == [Refused("reply", "c", was_given=True)], "it may have it"


def test_of_two_held_waits_the_later_one_counts() -> None:
    made = calls()
    made.wait("c", "old", T)
    assert made.wait("c", "new", T) == [Replaced("old", "c")]
    assert not made.waiter_left("c", "old", T)
    assert made.wait_ends("c", "old", T) == []
    # One that is not held takes nothing away from the one that is.
    assert made.wait("c", "asks", T, is_held=False) == [Given("asks", ())]
    assert made.reply("c", b"r", "reply", T) == [Given("new", [WaitingReply(1, b"r")])]


def test_a_caller_that_waits_for_long_stays() -> None:
    made = calls()
    made.wait("c", "wait", T)
    late = T + 6 * GRACE_MS
    assert made.caller_count(late) == 1
    assert made.wait_ends("c", "wait", late) == [Given("wait", ())]
    assert made.reply("c", b"r", "reply", late + GRACE_MS) == []


def test_a_replier_that_leaves_takes_its_reply_back() -> None:
    made = calls()
    made.wait("c", "wait", T, is_held=False)
    made.reply("c", b"r", "reply", T)
    made.replier_left("reply")
    made.replier_left("reply")
    assert made.reply_ends("reply") == []
    assert made.wait("c", "wait 2", T) == []
    assert made.size_bytes == 0


def test_a_caller_that_leaves_is_gone_at_once() -> None:
    made = calls()
    made.wait("c", "held", T)
    made.reply("c", b"1", "reply 1", T)
    made.reply("c", b"2", "reply 2", T)
    assert made.wait("c", "bye", T, is_held=False, received=[1], leaves=True) == [
        Delivered("reply 1"),
        Refused("reply 2", "c", was_given=False),
        Given("bye", ()),
    ]
    assert made.reply("c", b"3", "reply 3", T) == [Refused("reply 3", "c", was_given=False)]
    made.wait("c", "held", T)
    assert made.wait("c", "bye", T, is_held=False, leaves=True) == [Replaced("held", "c"), Given("bye", ())]
    assert made.caller_count(T) == 0


def test_a_caller_that_leaves_while_the_broker_settles_is_gone_at_once() -> None:
    made = calls(callers_max=2)
    for caller in ("seen", "not seen", "one more"):  # of these no two are there at a time
        if caller != "not seen":
            made.wait(caller, "held", 0)
        made.wait(caller, "bye", 1, is_held=False, leaves=True)
        assert made.reply(caller, b"1", "reply 1", 2) == [Refused("reply 1", caller, was_given=False)]
    made.wait("seen", "bye", 3, is_held=False, leaves=True)
    assert made.reply("unknown", b"2", "reply 2", 3) == []
    assert made.wait("one more", "held again", 4) == []
    assert made.reply("one more", b"3", "reply 3", 4) == [Given("held again", [WaitingReply(2, b"3")])]


def test_what_waits_is_bounded() -> None:
    made = calls(callers_max=2, replies_max=2, size_max_bytes=3 * REPLY_OVERHEAD_BYTES + 30)
    for caller_id in ("a", "b"):
        made.wait(caller_id, caller_id, T, is_held=False)
    assert made.wait("c", "c", T) == [TooMany("c", "callers", 2)]
    made.reply("a", b"0123456789", 1, T)
    made.reply("a", b"0123456789", 2, T)
    assert made.reply("a", b"", 3, T) == [TooMany(3, "replies of a caller", 2)]
    assert made.reply("b", b"0123456789!", 4, T) == [TooMany(4, "bytes of replies", made.size_bytes + 10 + REPLY_OVERHEAD_BYTES)]
    assert made.reply("b", b"0123456789", 5, T) == []
    late = T + GRACE_MS + 1
    for waiter in (1, 2, 5):
        made.reply_ends(waiter)
    assert made.wait("c", "c", late) == [], "those that are gone make room"
    settling = calls(callers_max=1)
    settling.wait("a", "a", 0)
    assert settling.reply("b", b"", "reply", 0) == [TooMany("reply", "callers", 1)]


def test_an_answer_has_a_limited_size_but_at_least_one_reply() -> None:
    made = calls()
    made.wait("c", "w", T, is_held=False)
    for number in range(3):
        made.reply("c", bytes(ANSWER_SIZE_MAX_BYTES // 2), number, T)
    made.reply("c", bytes(ANSWER_SIZE_MAX_BYTES + 1), 3, T)

    def given_ids(effects: list[Effect]) -> list[int]:
        (effect,) = [each for each in effects if isinstance(each, Given)]
        return [reply.reply_id for reply in effect.replies]

    assert given_ids(made.wait("c", "w", T)) == [1, 2]
    assert given_ids(made.wait("c", "w", T, received=[1, 2])) == [3]
    assert given_ids(made.wait("c", "w", T, received=[3])) == [4]


CALLERS = st.sampled_from("abc")
EVENTS = st.one_of(
    st.tuples(st.just("wait"), CALLERS, st.booleans(), st.booleans(), st.just(False)),
    st.tuples(st.just("wait"), CALLERS, st.just(False), st.booleans(), st.just(True)),
    st.tuples(st.just("reply"), CALLERS),
    st.tuples(st.just("end wait"), st.integers(0, 40)),
    st.tuples(st.just("end reply"), st.integers(0, 40)),
    st.tuples(st.just("leave"), st.integers(0, 40)),
    st.tuples(st.just("time"), st.integers(0, 2 * GRACE_MS)),
)


@given(st.lists(EVENTS, max_size=60), st.integers(0, T))
def test_every_call_has_one_outcome_and_what_is_not_received_comes_again(
    events: list[Any], now_ms: int
) -> None:
    made = calls(callers_max=2, replies_max=3)
    outcomes: Counter[Hashable] = Counter()
    left: set[Hashable] = set()
    waits: list[tuple[str, str]] = []
    replies: list[str] = []
    unsaid: dict[str, list[int]] = {}
    """By caller: what it got and has not said yet."""
    open_of: dict[str, dict[str, None]] = {}
    """By caller: replies that were taken and have no outcome, in their order."""

    def see(effects: list[Effect]) -> None:
        for effect in effects:
            outcomes[effect.waiter] += 1
            if isinstance(effect, Delivered | Refused | TooMany):
                for known in open_of.values():
                    known.pop(str(effect.waiter), None)
            if isinstance(effect, Given):
                caller = next(name for name, waiter in waits if waiter == effect.waiter)
                unsaid[caller] = [reply.reply_id for reply in effect.replies]
                if effect.replies:
                    assert [reply.reply.decode() for reply in effect.replies] == list(open_of[caller])

    for event in events:
        match event:
            case ("wait", caller, is_held, says, leaves):
                waiter = f"w{len(waits)}"
                waits.append((caller, waiter))
                said = unsaid.pop(caller, []) if says else []
                see(made.wait(caller, waiter, now_ms, is_held=is_held, received=said, leaves=leaves))
            case ("reply", caller):
                waiter = f"r{len(replies)}"
                replies.append(waiter)
                open_of.setdefault(caller, {})[waiter] = None
                see(made.reply(caller, waiter.encode(), waiter, now_ms))
            case ("end wait", number) if number < len(waits):
                caller, waiter = waits[number]
                see(made.wait_ends(caller, waiter, now_ms))
            case ("end reply", number) if number < len(replies):
                see(made.reply_ends(replies[number]))
            case ("leave", number) if number < len(replies) and not outcomes[replies[number]]:
                left.add(replies[number])
                made.replier_left(replies[number])
                for known in open_of.values():
                    known.pop(replies[number], None)
            case ("time", passed_ms):
                now_ms += passed_ms
    assert made.reply_count == sum(map(len, open_of.values()))
    for waiter in replies:
        see(made.reply_ends(waiter))
    for caller, waiter in waits:
        see(made.wait_ends(caller, waiter, now_ms))
    assert all(outcomes[waiter] == (waiter not in left) for waiter in replies)
    assert all(outcomes[waiter] == 1 for _, waiter in waits)
    assert (made.reply_count, made.size_bytes) == (0, 0)
