"""The checker of tests/support/load.py finds what it is for: missed messages, queues out of order, messages that are stored twice."""

from __future__ import annotations

import pytest

from protomq import MessageQueue
from tests.support.load import Load

ONE, OTHER = MessageQueue("t", "a", 0), MessageQueue("t", "a", 1)


@pytest.fixture
def load() -> Load:
    """Three messages were acknowledged, and consumed."""
    load = Load("127.0.0.1:1", "t", "g")
    load.acknowledged = {b"0": ONE, b"1": OTHER, b"2": ONE}
    load.consumed = {ONE: [0, 2], OTHER: [1]}
    return load


def test_what_is_whole_passes_and_repeats_are_counted(load: Load) -> None:
    load.check()
    load.consumed[ONE] = [0, 2, 0, 2]
    load.check()
    assert (load.repeats, load.stored_twice) == (2, 0)


def test_a_message_that_was_not_acknowledged_may_be_there(load: Load) -> None:
    load.consumed[OTHER].append(3)
    load.check()


@pytest.mark.parametrize(
    ("consumed", "said"),
    [
        ({ONE: [0], OTHER: [1]}, r"1 acknowledged messages were missed: \[2\]"),
        ({ONE: [2, 0], OTHER: [1]}, "out of order"),
        ({ONE: [0], OTHER: [1, 2]}, r"not in the queue that was acknowledged: \[2\]"),
        ({ONE: [0, 2], OTHER: [1, 2]}, "in two queues"),
    ],
)
def test_what_is_wrong_is_found(load: Load, consumed: dict[MessageQueue, list[int]], said: str) -> None:
    load.consumed = consumed
    with pytest.raises(AssertionError, match=said):
        load.check()
