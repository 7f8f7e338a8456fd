"""Messages that wait for their time are tracked: where they will come, and when, until they come or are recalled."""

from __future__ import annotations

from unittest import mock

import pytest

from protomq.v1.record_pb2 import Record
from protomq.v1.send_service_pb2 import SendRequest
from protomq.v1.track_service_pb2 import (
    MessagePlace,
    PlaceKind,
    TrackMessageRequest,
    TrackMessageResponse,
)
from protomq.wire.record import encode_message_id, encode_record_field
from protomq_broker.store.log.append import AppendRequest
from protomq_broker.store.timer.timer_runs import TimerDamagedError
from protomq_broker.track_service import TrackService
from protomq_broker.waiting_messages import find_waiting
from tests.support.delay_world import World
from tests.support.moves import move_record

IDENTITY = (7, 1, 3)


@pytest.fixture
def world() -> World:
    return World().start()


def track(world: World) -> TrackMessageResponse:
    request = TrackMessageRequest(message_id=encode_message_id(*IDENTITY))
    answer = TrackService(world.store).track_message(request, None)  # type: ignore[arg-type]
    assert isinstance(answer, TrackMessageResponse)
    return answer


def places(world: World) -> list[tuple[str, str, int]]:
    return [
        (PlaceKind.Name(place.kind).removeprefix("PLACE_KIND_"), place.topic, place.queue_offset)
        for place in track(world).places
    ]


def send(world: World, delay_ms: int, sequence: int = IDENTITY[2]) -> str:
    record = Record(body=b"x" * sequence, producer_id=7, producer_epoch=1, sequence=sequence)
    answer = world.request(SendRequest(topic="topic", records=[record], delay_ms=delay_ms))
    return answer.recall_handle


def wait_for_retry(world: World, group: str, delay_ms: int, error: str) -> None:
    """As SendBack does for a message that a group could not process."""
    field = encode_record_field(Record(
        body=b"x", topic="topic", tag_code=0, key_hash=0, sharding_hash=0, producer_id=7, producer_epoch=1, sequence=3, crc32c=0,
        born_time_ms=1, flags=0, queue_id=0, store_time_ms=1, queue_offset=0, physical_offset=0,
    ).SerializeToString())  # fmt: skip
    due_ms = world.log_time.now_ms() + delay_ms
    region = move_record(field, f"%RETRY%{group}", due_time_ms=due_ms, attempts=1, last_error=error)
    world.store.append_moved([AppendRequest(region, 0)], [])


def test_a_delayed_message_waits_until_its_time_and_is_delivered_then(world: World) -> None:
    send(world, 5_000)
    (place,) = track(world).places
    assert place == MessagePlace(
        kind=PlaceKind.PLACE_KIND_WAITING, topic="topic", queue_offset=-1,
        store_time_ms=place.store_time_ms, due_time_ms=world.log_time.now_ms() + 5_001,
    )  # fmt: skip
    world.deliver(5_001)
    assert places(world) == [("DELAYED", "topic", 0)]


def test_a_start_finds_again_what_waits(world: World) -> None:
    send(world, 5_000)
    world.restart()
    assert places(world) == [("WAITING", "topic", -1)]


def test_a_recalled_message_waits_no_more(world: World) -> None:
    handle = send(world, 5_000)
    assert world.recall(handle)
    assert places(world) == []


def test_retries_of_several_groups_wait_with_their_attempts_and_errors(world: World) -> None:
    wait_for_retry(world, "late", 9_000, "no stock")
    wait_for_retry(world, "soon", 1_000, "no account")
    told = [(place.consumer_group, place.attempt, place.last_error) for place in track(world).places]
    assert told == [("soon", 1, "no account"), ("late", 1, "no stock")]
    world.deliver(2_001)
    assert places(world)[-1] == ("WAITING", "%RETRY%late", -1)


def test_what_waits_for_a_topic_that_is_gone_comes_nowhere(world: World) -> None:
    send(world, 5_000)
    world.store.delete_topic("topic")
    assert places(world) == []


def test_other_messages_that_wait_are_not_it(world: World) -> None:
    for sequence in (1, 2, 4):
        send(world, 1_000 * sequence, sequence)
    assert places(world) == []
    assert track(world).unsearched_count == 0


def test_a_search_ends_at_its_limit_and_says_so(world: World) -> None:
    for sequence in range(9):
        send(world, 1_000 * (sequence + 1), sequence)
    found = find_waiting(world.store, (7, 1, 8), count_max=5)
    assert (list(found.records), found.unsearched_count) == ([], 4)
    found = find_waiting(world.store, (7, 1, 4), count_max=5)
    assert ([record.sequence for record in found.records], found.unsearched_count) == ([4], 4)


def test_a_message_that_is_delivered_during_the_search_is_told_of_once(world: World) -> None:
    send(world, 5_000)
    everywhere = world.store.find_everywhere

    def delivered_before(identity: tuple[int, int, int], count_max: int) -> object:
        world.deliver(5_001)
        return everywhere(identity, count_max)

    with mock.patch.object(world.store, "find_everywhere", delivered_before):
        assert places(world) == [("DELAYED", "topic", 0)]


def test_a_timer_that_cannot_be_read_leaves_all_unsearched(world: World) -> None:
    send(world, 5_000)
    with mock.patch.object(world.store.pending, "below", side_effect=TimerDamagedError("rebuilding")):
        answer = track(world)
    assert (list(answer.places), answer.unsearched_count) == ([], 1)
