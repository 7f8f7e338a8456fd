"""What the demo counts of a group whose member is killed."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from protomq import MessageQueue
from protomq_cli.demo_group import Handled, Shared
from protomq_cli.demo_member import name_of, runs_of


class Given(NamedTuple):
    """As much of a message as a run needs."""

    queue: MessageQueue
    queue_offset: int


PLACES = st.lists(st.builds(Given, st.builds(MessageQueue, st.just("flights"), st.just("a"), st.integers(0, 2)), st.integers(0, 9)))


@given(PLACES)
def test_every_delivery_is_counted_whatever_runs_it_comes_in(places: list[Given]) -> None:
    handled = Handled()
    runs = [(str(queue), int(first), int(end)) for queue, first, end in runs_of(places)]  # type: ignore[arg-type]
    assert handled.add(runs) == len(places)
    assert handled.message_count == len(set(places))
    assert handled.repeat_count == len(places) - len(set(places))
    for place in places:
        assert handled.times[name_of(place.queue)][place.queue_offset] == places.count(place)


def test_neighbours_of_one_queue_are_one_run() -> None:
    queue, other = MessageQueue("flights", "a", 0), MessageQueue("flights", "a", 1)
    places = [Given(queue, 3), Given(queue, 4), Given(other, 5), Given(queue, 6)]
    assert runs_of(places) == [["a/0", 3, 5], ["a/1", 5, 6], ["a/0", 6, 7]]  # type: ignore[arg-type]


def test_the_line_has_all_counts() -> None:
    line = Shared(message_count=3000, repeat_count=11, killed_after=400, queue_count=4, takeover_s=0.25).line()
    for part in ("3,000 messages handled", "none lost", "11 of them twice", "after 400 messages", "4 queues", "250 ms"):
        assert part in line
