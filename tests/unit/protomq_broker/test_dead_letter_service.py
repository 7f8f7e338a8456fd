"""Dead letters are listed and replayed: to their original topics, once each, whatever happens in between."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest

from protomq.v1.dead_letter_service_pb2 import (
    DeadLetters,
    ListDeadLettersRequest,
    ReplayDeadLettersRequest,
    ReplayDeadLettersResponse,
)
from protomq.v1.record_pb2 import Record
from protomq.wire.record import (
    BODY_SIZE_MAX_BYTES,
    FLAG_EXPIRED,
    FLAG_KIND_HALF,
    FLAGS_AT,
    FRONT_SIZE_MAX_BYTES,
    RecordTemplate,
    encode_front,
    encode_record_field,
)
from protomq.wire.topics import EXPIRED_TOPIC, TRANSACTIONS_TOPIC, dead_letter_topic
from protomq_broker import dead_letter_service
from protomq_broker.dead_letter_service import DeadLetterService
from protomq_broker.request_times import AHEAD_MAX_MS
from protomq_broker.store.log.append import AppendRequest
from protomq_broker.store.log.record_region import prove_region, set_kind
from protomq_broker.store.log.recovery import DamagedRange
from protomq_broker.store.state.group_settings import GroupSettings
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.state.transactions import Ending, ended_record
from protomq_broker.store.store import Store
from protomq_broker.store.tools.verify import verify
from protomq_broker.testing.simdisk import Fault, SimulatedCrash
from protomq_runtime.errors import ServiceError
from tests.support.retry_world import GROUP, TOPIC, Call, RetryWorld, failed, id_of
from tests.unit.protomq_broker.store.store_helpers import flip_in_log


class ReplayWorld(RetryWorld):
    """With the service; `die` makes dead letters."""

    def start(self) -> None:
        super().start()
        self.service = DeadLetterService(self.store, self.writer, self.permit, self.changes, self.clock)

    def die(self, *bodies: bytes, topic: str = TOPIC, queue_id: int = 0) -> None:
        before = len(self.read(topic, queue_id))
        self.send(*bodies, topic=topic, queue_id=queue_id)
        messages = self.read(topic, queue_id, before)
        self.send_back(messages, dead_letter=True, error="poison")

    def expire(self, *bodies: bytes, marks: int = FLAG_EXPIRED) -> None:
        """Half messages for queue 1 of TOPIC whose transactions nobody ends. `marks`: those of the copies; 0: an earlier version's."""
        template = RecordTemplate(TOPIC, 7, 0)
        for body in bodies:
            self._sequence += 1
            record = template.encode(body, self._sequence, 5)
            region = prove_region(bytearray(encode_record_field(record)), TOPIC, [len(record)])
            assert region is not None
            set_kind(region, FLAG_KIND_HALF)
            self.store.append([AppendRequest(region, 1)])
        self.store.flush()
        halves = [known.half for known in self.store.transactions.open_transactions()]
        copies = self.store.half_copies(halves, topic=EXPIRED_TOPIC).requests
        for copy in copies if not marks else ():
            flags = copy.region.data[FLAGS_AT : FLAGS_AT + 4]
            copy.region.data[FLAGS_AT : FLAGS_AT + 4] = (int.from_bytes(flags, "little") & ~FLAG_EXPIRED).to_bytes(4, "little")
        ended = ended_record([half.key for half in halves], bytes([Ending.EXPIRED]) * len(halves))
        self.writer.append_moved(copies, [(TRANSACTIONS_TOPIC, [ended])])
        self.store.flush()
        if self.store.topics.find(EXPIRED_TOPIC) is None:
            self.store.topics.add([TopicConfig(EXPIRED_TOPIC, 1, 1, writable=False)])

    def replay(self, **fields: Any) -> ReplayDeadLettersResponse:
        request = ReplayDeadLettersRequest(**{"consumer_group": GROUP, **fields})
        call = Call(request.SerializeToString(), self.lane)
        self.service.replay_dead_letters(call)  # type: ignore[arg-type]
        self.store.flush()
        if isinstance(call.outcome, Exception):
            raise call.outcome
        assert call.outcome is not None
        return ReplayDeadLettersResponse.FromString(call.outcome)

    def replay_all(self, **fields: Any) -> list[ReplayDeadLettersResponse]:
        answers = [self.replay(**fields)]
        while answers[-1].next_offset < answers[-1].end_offset:
            answers.append(self.replay(**{**fields, "begin_offset": answers[-1].next_offset}))
        return answers

    def damage(self, *offsets: int, end_offset: int = 0) -> None:
        """These dead letters are found damaged, each alone, or all up to `end_offset`."""
        for offset in offsets:
            name = dead_letter_topic(GROUP)
            start, end = (_place_of(self.store, name, each) for each in (offset, (end_offset or offset + 1) - 1))
            self.store._quarantine.add(DamagedRange(start[0], end[1], 0, "a flipped bit"))

    def listed(self, **fields: Any) -> list[DeadLetters]:
        request = ListDeadLettersRequest(**fields)
        return list(self.service.list_dead_letters(request, None).groups)  # type: ignore[arg-type]

    def replayed(self, topic: str = TOPIC, queue_id: int = 0) -> list[bytes]:
        found = self.read(topic, queue_id)
        return [record.body for record in found if record.transit.replayed_group]


def _place_of(store: Store, topic: str, offset: int) -> tuple[int, int]:
    (region,) = store.read(topic, 0, offset, 1, 1).regions
    start = region.file.base_position + region.offset
    return start, start + region.size_bytes


def refusal(call: Callable[[], Any]) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        call()
    return caught.value


def test_a_replayed_message_is_the_message_and_says_where_it_comes_from() -> None:
    world = ReplayWorld()
    world.die(b"a")
    (dead,) = world.dead_letters()
    answer = world.replay()
    assert (answer.replayed_count, answer.next_offset, answer.end_offset) == (1, 1, 1)
    original, copy = world.read(TOPIC)
    assert id_of(copy) == id_of(original) == id_of(dead)
    assert (copy.body, copy.crc32c) == (original.body, original.crc32c)
    transit = copy.transit
    assert (transit.attempt, transit.replayed_group, transit.last_error) == (0, GROUP, "poison")
    assert (transit.origin_topic, transit.origin_queue_offset) == (TOPIC, 0)
    assert world.send_back([copy]).results[0].attempt == 1, "its attempts begin anew"
    assert len(world.dead_letters()) == 1, "the dead letter stays"


@pytest.mark.parametrize("count", [1, 2, 40], ids=["one", "two", "alike"])
def test_a_retry_says_in_which_topic_its_group_had_the_message(count: int) -> None:
    world = ReplayWorld()
    for group in (GROUP, "other"):
        world.store.groups.put(GroupSettings(group, retry_count_max=2, retry_delays_ms=(5,)))

    def retries(messages: Sequence[Record], group: str) -> list[Record]:
        world.send_back(messages, group=group)
        world.deliver(10)
        return world.retries(group)[-count:]

    def topics(messages: Sequence[Record]) -> set[tuple[str, str]]:
        return {(each.transit.origin_topic, each.transit.consumed_topic) for each in messages}

    world.send(*(b"poison%d" % number for number in range(count)))
    first = retries(world.read(TOPIC), GROUP)
    assert topics(first) == {(TOPIC, "")}, "the one where it stood first"
    world.send_back([failed(message, dead_letter=True) for message in first])
    of_letters = retries(world.dead_letters(), "other")
    assert topics(of_letters) == {(TOPIC, f"%DLQ%{GROUP}")}
    assert topics(retries(of_letters, "other")) == {(TOPIC, f"%DLQ%{GROUP}")}, "a retry that fails stays what it is"
    world.send_back([failed(message, dead_letter=True) for message in of_letters], group="other")
    world.replay(consumer_group="other")
    replayed = world.read(TOPIC)[-count:]
    assert topics(replayed) == {(TOPIC, "")}
    assert topics(retries(replayed, GROUP)) == {(TOPIC, "")}


@pytest.mark.parametrize("count", [1, 40], ids=["one", "alike"])
def test_what_a_group_had_of_expired_transactions_goes_back_there_and_not_where_it_was_meant_for(count: int) -> None:
    """Of those who read dead letters of dead letters, too: nobody has committed these messages."""
    world = ReplayWorld()
    for group in (GROUP, "other"):
        world.store.groups.put(GroupSettings(group, retry_count_max=1, retry_delays_ms=(5,)))
    bodies = [b"nobody's%02d" % number for number in range(count)]
    world.expire(*bodies)
    world.send_back(world.read(EXPIRED_TOPIC))
    world.deliver(10)
    world.send_back(world.retries())
    world.send_back(world.dead_letters(), group="other", dead_letter=True)
    world.restart()
    for group in (GROUP, "other"):
        answer = world.replay(consumer_group=group)
        assert (answer.replayed_count, answer.without_topic_count) == (count, 0)
        assert [record.body for record in world.read(EXPIRED_TOPIC)[-count:]] == bodies
        assert {record.transit.replayed_group for record in world.read(EXPIRED_TOPIC)[-count:]} == {group}
    world.restart(world.disk.killed())
    world.send_back(world.read(EXPIRED_TOPIC)[-count:], dead_letter=True)
    assert world.replay().replayed_count == count, "what was replayed dies as any other"
    assert len(world.read(EXPIRED_TOPIC)) == 4 * count
    assert [world.read(TOPIC, queue_id) for queue_id in range(2)] == [[], []]
    assert verify("/s", disk=world.disk) == []


def test_a_dead_letter_of_an_expired_transaction_that_an_earlier_version_made_goes_back_there() -> None:
    world = ReplayWorld()
    world.expire(b"old", marks=0)
    world.send_back(world.read(EXPIRED_TOPIC), dead_letter=True)
    (dead,) = world.dead_letters()
    assert (dead.flags & FLAG_EXPIRED, dead.transit.consumed_topic) == (0, EXPIRED_TOPIC)
    assert world.replay().replayed_count == 1
    assert [record.flags & FLAG_EXPIRED for record in world.read(EXPIRED_TOPIC)] == [0, FLAG_EXPIRED]
    assert world.read(TOPIC) == []


def test_a_time_at_which_nothing_can_have_died_is_refused() -> None:
    world = ReplayWorld()
    world.die(b"a")
    request = ReplayDeadLettersRequest()
    now_ms = world.clock.now_ms()
    request.begin_time.FromMilliseconds(now_ms + AHEAD_MAX_MS)
    assert world.replay(begin_time=request.begin_time).replayed_count == 0, "clocks may differ"
    request.end_time.FromMilliseconds(now_ms + AHEAD_MAX_MS)
    span = {"begin_time": request.begin_time, "end_time": request.end_time}
    assert "end_time: is not after begin_time" in str(refusal(lambda: world.replay(**span)))
    request.begin_time.FromMilliseconds(now_ms + AHEAD_MAX_MS + 1)
    assert "begin_time: lies ahead" in str(refusal(lambda: world.replay(begin_time=request.begin_time)))
    assert world.replay(end_time=request.end_time).replayed_count == 1


def test_offsets_that_end_before_they_begin_are_refused() -> None:
    world = ReplayWorld()
    world.die(b"a")
    assert "end_offset: is before begin_offset" in str(refusal(lambda: world.replay(begin_offset=5, end_offset=2)))
    assert world.replay(begin_offset=1, end_offset=1).replayed_count == 0, "a replay in slices may end so"


def test_each_is_replayed_once_unless_asked_for_again() -> None:
    world = ReplayWorld()
    world.die(b"a", b"b")
    assert [answer.replayed_count for answer in world.replay_all()] == [2]
    world.die(b"c")
    (answer,) = world.replay_all()
    assert (answer.replayed_count, answer.known_count) == (1, 2)
    world.restart()
    world.restart(world.disk.killed())
    assert world.replay().replayed_count == 0
    assert world.replayed() == [b"a", b"b", b"c"]
    assert world.replay(again=True).replayed_count == 3
    assert len(world.replayed()) == 6


def test_dead_letters_between_which_only_a_seal_stands_are_replayed() -> None:
    world = ReplayWorld()
    world.send(b"a", b"b")
    for message in world.read(TOPIC):
        # Without an id the request leaves no record of itself: the copies are neighbours in the log.
        world.send_back([message], dead_letter=True, request_id=0)
    assert [answer.replayed_count for answer in world.replay_all()] == [2]
    assert world.replayed() == [b"a", b"b"]


def test_more_is_replayed_than_a_small_segment_takes() -> None:
    world = ReplayWorld()
    limit = world.store.append_size_max_bytes
    bodies = [b"%02d" % number + bytes(limit // 20) for number in range(40)]
    for body in bodies:
        world.die(body)
    assert sum(answer.replayed_count for answer in world.replay_all()) == len(bodies)
    assert world.replayed() == bodies


def test_many_are_replayed_in_slices_that_tell_how_far_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dead_letter_service, "SLICE_COUNT_MAX", 3)
    world = ReplayWorld()
    world.die(*(b"%d" % number for number in range(10)))
    answers = world.replay_all()
    assert [answer.next_offset for answer in answers] == [3, 6, 9, 10]
    assert {answer.end_offset for answer in answers} == {10}
    assert world.replayed() == [b"%d" % number for number in range(10)]


def test_by_id_by_offset_and_by_time() -> None:
    world = ReplayWorld()
    world.die(b"a", b"b")
    world.clock.time_ms += 1000
    world.die(b"c")
    dead = world.dead_letters()
    answer = world.replay(message_ids=[id_of(dead[1]), "0" * 40, id_of(dead[1])])
    assert answer.replayed_count == 1
    assert list(answer.unknown_message_ids) == ["0" * 40]
    assert answer.next_offset == answer.end_offset
    assert world.replay(message_ids=[id_of(dead[1])]).known_count == 1
    request = ReplayDeadLettersRequest()
    request.begin_time.FromMilliseconds(dead[2].store_time_ms)
    assert world.replay(begin_time=request.begin_time).replayed_count == 1
    assert world.replayed() == [b"b", b"c"]
    assert world.replay(end_time=request.begin_time, begin_offset=1).replayed_count == 0
    answer = world.replay(end_time=request.begin_time)
    assert (answer.replayed_count, answer.known_count, answer.end_offset) == (1, 1, 2)
    assert world.replay(begin_offset=0, end_offset=1).known_count == 1
    assert world.replayed() == [b"b", b"c", b"a"]


def test_what_has_no_topic_stays_and_is_counted() -> None:
    world = ReplayWorld()
    world.store.topics.create(TopicConfig("gone"))
    world.store.topics.create(TopicConfig("closed"))
    world.store.topics.create(TopicConfig("shrunk", 4, 4))
    world.die(b"a", topic="gone")
    world.die(b"b", topic="closed")
    world.die(b"c", topic="shrunk", queue_id=3)
    world.store.delete_topic("gone")
    world.store.topics.put([TopicConfig("closed", writable=False), TopicConfig("shrunk", 2, 4)])
    answer = world.replay()
    assert (answer.replayed_count, answer.without_topic_count) == (1, 2)
    assert world.replayed("shrunk", 1) == [b"c"]
    world.store.topics.create(TopicConfig("gone"))
    assert world.replay().replayed_count == 1, "a topic that is there again gets it"


def test_dead_letters_are_listed_with_what_was_replayed() -> None:
    world = ReplayWorld()
    assert world.listed() == []
    world.die(b"a", b"b")
    world.send(b"x")
    world.send_back(world.read(TOPIC, 0, 2), group="other", dead_letter=True)
    world.replay(end_offset=1)
    first, second = world.listed()
    assert (first.consumer_group, second.consumer_group) == (GROUP, "other")
    assert (first.min_offset, first.end_offset, first.replayed_count) == (0, 2, 1)
    assert first.last_store_time.ToMilliseconds() == world.dead_letters()[1].store_time_ms
    assert [each.consumer_group for each in world.listed(page_token=GROUP)] == ["other"]
    assert len(world.listed(page_size=1)) == 1


def test_a_topic_that_is_deleted_takes_what_is_known_with_it() -> None:
    world = ReplayWorld()
    world.die(b"a")
    world.replay()
    world.store.delete_topic(dead_letter_topic(GROUP))
    assert refusal(world.replay).reason == "TOPIC_NOT_FOUND"
    world.die(b"b")
    assert world.replay().replayed_count == 1


def test_what_changes_meanwhile_is_looked_at_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls replay the same, and a topic goes."""
    world = ReplayWorld()
    world.die(b"a", b"b")
    post = world.writer.post
    turns = 0

    def post_late(function: Callable[[], None]) -> None:
        nonlocal turns
        turns += 1
        if turns == 1:
            world.replay(end_offset=1)
        post(function)

    monkeypatch.setattr(world.writer, "post", post_late)
    answer = world.replay()
    assert (answer.replayed_count, answer.known_count) == (1, 1)
    assert world.replayed() == [b"a", b"b"]


def test_a_topic_that_shrinks_meanwhile_strands_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    world = ReplayWorld()
    world.store.topics.create(TopicConfig("shrunk", 8, 8))
    world.die(b"a", topic="shrunk", queue_id=7)
    post = world.writer.post

    def post_late(function: Callable[[], None]) -> None:
        for change in ((4, 8), (4, 4)):
            world.store.topics.put([TopicConfig("shrunk", *change)])
        post(function)

    monkeypatch.setattr(world.writer, "post", post_late)
    assert world.replay().replayed_count == 1
    assert world.replayed("shrunk", 3) == [b"a"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"consumer_group": ""}, "consumer_group"),
        ({"message_ids": ["x"]}, "message_ids"),
        ({"message_ids": ["0" * 40] * 257}, "at most 256"),
        ({"begin_offset": -1}, "begin_offset"),
        ({"end_offset": -1}, "end_offset"),
    ],
)
def test_bad_input_is_refused(fields: dict[str, Any], words: str) -> None:
    world = ReplayWorld()
    world.die(b"a")
    before = world.store.appended_position
    assert words in str(refusal(lambda: world.replay(**fields)))
    assert world.store.appended_position == before


@pytest.mark.parametrize("ends", ["kill", "power cut"])
def test_whatever_ends_it_each_is_replayed_once(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letter_service, "SLICE_COUNT_MAX", 2)
    bodies = [b"%d" % number for number in range(5)]
    for number in range(1, 200):
        world = ReplayWorld()
        world.die(*bodies)
        world.disk.fail_at(number, Fault.CRASH)
        ended = False
        try:
            world.replay()
            world.store.checkpoint()
            world.replay_all()
            ended = True
        except SimulatedCrash:
            pass
        disk = world.disk.killed() if ends == "kill" else world.disk.crash(random.Random(number))
        world.restart(disk)
        world.replay_all()
        assert world.replayed() == bodies, number
        if ended:
            return
    raise AssertionError("the work never came to its end")


def test_the_largest_message_with_the_longest_names_moves_as_a_record_that_a_log_may_have() -> None:
    """A larger one would be damage: a start, and each replica, would refuse it."""
    topic, first, second = "t" * 127, "a" * 120, "b" * 120
    world = ReplayWorld(segment=64 << 20)
    world.store.topics.create(TopicConfig(topic, 1, 1))
    for group in (first, second):
        world.store.groups.put(GroupSettings(group, retry_count_max=2, retry_delays_ms=(5,)))
    front = encode_front([], "", {"p": "v" * (FRONT_SIZE_MAX_BYTES - 11)})
    assert len(front) == FRONT_SIZE_MAX_BYTES
    record = RecordTemplate(topic, 7, 0).encode(bytes(BODY_SIZE_MAX_BYTES), 1, 5, front=front)
    region = prove_region(encode_record_field(record), topic, [len(record)])
    assert region is not None
    world.store.append([AppendRequest(region, 0)])
    world.store.flush()
    error = "e" * 1_000
    world.send_back(world.read(topic), group=first, dead_letter=True, error=error)
    world.replay(consumer_group=first)
    world.send_back(world.read(topic)[-1:], group=first, dead_letter=True, error=error)
    world.send_back(world.dead_letters(first)[-1:], group=second, error=error)
    world.deliver(10)
    (retry,) = world.retries(second)
    transit = retry.transit
    assert (transit.origin_topic, transit.replayed_group, transit.consumed_topic) == (topic, first, f"%DLQ%{first}")
    assert error.startswith(transit.last_error)
    assert len(transit.last_error) > 200
    world.store.close()
    assert verify("/s", disk=world.disk) == []


def test_what_is_named_by_id_is_replayed_in_slices_in_its_order() -> None:
    world = ReplayWorld()
    bodies = [b"%02d" % number + bytes(9_000) for number in range(20)]
    for body in bodies:
        world.die(body)
    ids = [id_of(letter) for letter in world.dead_letters()]
    wanted = [*reversed(ids), ids[3].lower(), "0" * 40, ids[3]]
    appended = world.store.appended_end_offset("%SYS%GROUPS", 0)
    answer = world.replay(message_ids=wanted)
    assert (answer.replayed_count, answer.known_count, list(answer.unknown_message_ids)) == (20, 0, ["0" * 40])
    assert world.store.appended_end_offset("%SYS%GROUPS", 0) - appended > 5, "sends can go on in between"
    assert world.replayed() == bodies
    answer = world.replay(message_ids=wanted, again=True)
    assert answer.replayed_count == 20
    assert world.replay(message_ids=wanted).known_count == 20
    assert world.replayed() == bodies * 2


def test_a_wrong_id_changes_nothing_though_others_of_its_request_are_right() -> None:
    world = ReplayWorld()
    world.die(b"a")
    (letter,) = world.dead_letters()
    assert "message_ids" in str(refusal(lambda: world.replay(message_ids=[id_of(letter), "x"])))
    assert world.replayed() == []


def test_who_deletes_dead_letters_while_some_are_replayed_by_id_ends_that(monkeypatch: pytest.MonkeyPatch) -> None:
    world = ReplayWorld()
    for number in range(3):
        world.die(b"%d" % number + bytes(16_000))
    append = dead_letter_service._Replay.append
    deletions = [dead_letter_topic(GROUP)]

    def appended(replay: Any, writer: Any) -> bool:
        done = append(replay, writer)
        while deletions:
            world.store.delete_topic(deletions.pop())
            world.send_back(world.read(TOPIC)[:1], dead_letter=True)
        return done

    monkeypatch.setattr(dead_letter_service._Replay, "append", appended)
    ids = [id_of(letter) for letter in world.dead_letters()]
    assert refusal(lambda: world.replay(message_ids=ids)).reason == "TOPIC_RECREATED"
    assert len(world.replayed()) == 1


@pytest.mark.parametrize("by_id", [False, True])
def test_a_replay_right_after_a_fail_over_leaves_nothing_out(by_id: bool) -> None:
    """Though the new master does not know yet that anything is confirmed."""
    world = ReplayWorld()
    world.die(b"a", b"b")
    fields = {"message_ids": [id_of(letter) for letter in world.dead_letters()]} if by_id else {}
    with mock.patch.object(Store, "open", partial(Store.open, waits_for_replicas=True)):
        world.restart()
    assert refusal(lambda: world.replay(**fields)).reason == "REPLICA_BEHIND"
    world.store.positions.wait_for_replicas(False)
    assert world.replay(**fields).replayed_count == 2


@pytest.mark.parametrize("by_id", [False, True])
def test_a_dead_letter_in_which_a_bit_flips_is_not_replayed(by_id: bool) -> None:
    world = ReplayWorld()
    bodies = [b"first", b"other", b"third"]
    for body in bodies:
        world.die(body)
    letters = world.dead_letters()
    flip_in_log(world.disk, world.store, letters[1].physical_offset)
    if by_id:
        assert refusal(lambda: world.replay(message_ids=[id_of(letters[1])])).reason == "CORRUPT_LOG"
        world.replay(message_ids=[id_of(letters[0]), id_of(letters[2])])
    else:
        assert world.replay().next_offset == 1
        assert list(world.replay(begin_offset=1).unreadable_runs) == [1, 2]
        world.replay(begin_offset=2)
    assert world.replayed() == [b"first", b"third"]
    (damage,) = world.store.damaged_ranges
    assert damage.start_position <= letters[1].physical_offset < damage.end_position


def one_by_one(count: int) -> ReplayWorld:
    """Each dead letter is an append of its own, so that each can be damaged alone."""
    world = ReplayWorld()
    world.send(*(b"%d" % number for number in range(count)))
    for message in world.read(TOPIC):
        world.send_back([message], dead_letter=True)
    return world


@pytest.mark.parametrize("is_repaired", [False, True])
def test_a_replay_skips_what_is_damaged_and_says_what(is_repaired: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    world = one_by_one(8)
    world.damage(0, 7)
    world.damage(3, end_offset=5)
    monkeypatch.setattr(world.store._quarantine, "is_repaired", lambda _: is_repaired)
    answers = world.replay_all()
    unreadable = [list(answer.unreadable_runs) for answer in answers if answer.unreadable_runs]
    lost = [list(answer.lost_runs) for answer in answers if answer.lost_runs]
    told, untold = (lost, unreadable) if is_repaired else (unreadable, lost)
    assert (told, untold) == ([[0, 1], [3, 5], [7, 8]], [])
    assert (sum(answer.replayed_count for answer in answers), answers[-1].next_offset) == (4, 8)
    assert world.replayed() == [b"1", b"2", b"5", b"6"]
    assert sum(answer.known_count for answer in world.replay_all()) == 4
    assert len(world.replayed()) == 4


def test_what_was_replayed_before_it_was_damaged_is_known_and_left_out_only_if_it_is_wanted_again() -> None:
    world = one_by_one(4)
    assert world.replay(begin_offset=1, end_offset=2).replayed_count == 1
    world.damage(0, end_offset=3)
    (damaged, rest) = world.replay_all()
    assert (list(damaged.unreadable_runs), damaged.known_count, rest.replayed_count) == ([0, 1, 2, 3], 1, 1)
    assert list(world.replay(again=True).unreadable_runs) == [0, 3]


def test_a_replay_of_offsets_says_nothing_of_damage_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    world = one_by_one(5)
    world.damage(1, end_offset=4)
    answer = world.replay(begin_offset=1, end_offset=3)
    assert (list(answer.unreadable_runs), answer.next_offset, answer.end_offset) == ([1, 3], 3, 3)
    monkeypatch.setattr(dead_letter_service, "SLICE_COUNT_MAX", 2)
    assert list(world.replay(begin_offset=1).unreadable_runs) == [1, 3]  # as many as a slice has


def test_what_is_healed_later_is_replayed_then() -> None:
    world = one_by_one(3)
    world.damage(1)
    world.replay_all()
    world.store._quarantine.replace(world.store._quarantine.ranges[0], [])
    assert sum(answer.replayed_count for answer in world.replay_all()) == 1
    assert world.replayed() == [b"0", b"2", b"1"]


def test_the_newest_dead_letter_is_as_old_as_the_one_before_it_if_it_is_damaged() -> None:
    world = one_by_one(2)
    first_ms = world.dead_letters()[0].store_time_ms
    world.damage(1)
    (listed,) = world.listed()
    assert listed.last_store_time.ToMilliseconds() == first_ms
