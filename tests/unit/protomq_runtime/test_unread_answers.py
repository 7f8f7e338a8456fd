"""What is in memory for callers that do not read, without sockets."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from protomq_runtime.unread_answers import UnreadAnswers

SIZE_MAX = 100


def test_an_answer_waits_until_there_is_room_for_it_on_its_connection() -> None:
    unread = UnreadAnswers(SIZE_MAX)
    started: list[str] = []
    unread.begin("a", 60, lambda: started.append("a1"))
    unread.begin("a", 60, lambda: started.append("a2"))
    unread.begin("a", 10, lambda: started.append("a3"))  # It would fit, but keeps its place.
    unread.begin("b", 60, lambda: started.append("b1"))
    assert started == ["a1", "b1"]
    unread.settle("a", 60)
    assert started == ["a1", "b1", "a2", "a3"]


def test_an_answer_larger_than_the_bound_is_alone() -> None:
    unread = UnreadAnswers(SIZE_MAX)
    started: list[int] = []
    for number, size in enumerate((500, 1, 500)):
        unread.begin("a", size, lambda number=number: started.append(number))  # type: ignore[misc]
    assert started == [0]
    unread.settle("a", 500)
    assert started == [0, 1]
    unread.settle("a", 1)
    assert started == [0, 1, 2]


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 150), st.booleans()), max_size=60)
)
def test_every_answer_is_started_once_in_order_and_the_bound_holds(
    steps: list[tuple[str, int, bool]],
) -> None:
    unread = UnreadAnswers(SIZE_MAX)
    under_way: dict[str, list[int]] = {"a": [], "b": []}
    sizes: dict[str, list[int]] = {"a": [], "b": []}
    count: Counter[str] = Counter()

    def begin(peer: str, size: int) -> None:
        number = len(sizes[peer])
        sizes[peer].append(size)

        def start() -> None:
            assert count[peer] == number
            count[peer] += 1
            under_way[peer].append(size)
            assert len(under_way[peer]) == 1 or sum(under_way[peer]) <= SIZE_MAX

        unread.begin(peer, size, start)

    for peer, size, settles in steps:
        if settles and under_way[peer]:
            unread.settle(peer, under_way[peer].pop(0))
        else:
            begin(peer, size)
    for peer, answers in under_way.items():
        while answers:
            unread.settle(peer, answers.pop())
        assert count[peer] == len(sizes[peer])
    assert not unread._connections
