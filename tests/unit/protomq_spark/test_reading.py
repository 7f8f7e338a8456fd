"""Pulling ranges and planning micro-batches against a cluster made of plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

pytest.importorskip("pyarrow", reason="protomq-spark needs pyarrow")
pytest.importorskip("protomq_spark", reason="clients/spark is not installed")

from protomq import MessageQueue, QueueRange
from protomq.calls import Selection
from protomq.errors import BrokerMissingError, CorruptLogError, TopicRecreatedError
from protomq.records import PullAnswer, decode_pull_answer
from protomq.v1 import pull_service_pb2 as pb
from protomq.wire.record import RecordTemplate, encode_front
from protomq_spark.offsets import (
    DataLossError,
    Incarnations,
    OffsetRange,
    Seen,
    Share,
    StreamState,
    decode_state,
    encode_state,
    share_of,
)
from protomq_spark.options import ReadOptions, Subscription, parse_read_options
from protomq_spark.planning import Planner
from protomq_spark.pulling import PullSettings, read_range
from protomq_spark.records import Decoding

A0, A1 = MessageQueue("t", "a", 0), MessageQueue("t", "a", 1)


class FakeCluster:
    """One queue of messages `first` to `first + count`, some of them lost; and ranges for planning."""

    def __init__(
        self,
        count: int = 0,
        first: int = 0,
        lost: Iterable[int] = (),
        per_pull: int = 4,
        quarantine: range = range(0),
    ) -> None:
        self.first, self.end, self.lost, self.per_pull = first, first + count, set(lost), per_pull
        self.quarantine = quarantine
        self.found: dict[MessageQueue, QueueRange] = {}
        self.committed: dict[MessageQueue, int] = {}
        self.committed_in: dict[Share, int] = {}
        self.incarnation = 7
        self.gone = False
        """Whether a broker is away."""
        self.pulls: list[int] = []

    @property
    def calls(self) -> FakeCluster:
        return self

    def pull(
        self,
        queue: MessageQueue,
        at: int,
        *,
        record_count_max: int,
        size_max_bytes: int,
        selection: Selection,
        topic_incarnation: int,
    ) -> PullAnswer:
        self.pulls.append(at)
        if topic_incarnation not in (0, self.incarnation):
            raise TopicRecreatedError("another")
        if at in self.quarantine:
            raise CorruptLogError("bits", metadata={"next_offset": str(self.quarantine.stop)})
        answer = pb.PullResponse(min_offset=self.first, end_offset=self.end)
        if not self.first <= at <= self.end:
            answer.status, answer.next_offset = pb.PULL_STATUS_OFFSET_ILLEGAL, self.first
        elif at == self.end:
            answer.status, answer.next_offset = pb.PULL_STATUS_NO_NEW_MSG, at
        else:
            upto = min(at + min(record_count_max, self.per_pull), self.end)
            if at < self.quarantine.start:
                upto = min(upto, self.quarantine.start)
            answer.next_offset = upto
            template = RecordTemplate("t", 1, 0)
            for offset in range(at, upto):
                tag = "odd" if offset % 2 else "even"
                if offset in self.lost or (selection.tags and tag not in selection.tags):
                    continue
                record = answer.records.add()
                record.ParseFromString(
                    template.encode(b"%d" % offset, offset, 0, tag=tag, front=encode_front((), tag))
                )
                record.queue_offset = offset
            answer.status = (
                pb.PULL_STATUS_FOUND if answer.records else pb.PULL_STATUS_NO_MATCHED_MSG
            )
        return decode_pull_answer(answer.SerializeToString())

    def refresh(self) -> None: ...

    def queues(self, subscription: Subscription) -> list[MessageQueue]:
        return sorted(self.found)

    def all_queues(self, subscription: Subscription) -> list[MessageQueue]:
        if self.gone:
            raise BrokerMissingError("broker b is not registered any more")
        return self.queues(subscription)

    def see(self, queues: Iterable[MessageQueue]) -> Seen:
        ranges = {queue: self.found[queue] for queue in queues if queue in self.found}
        return Seen(ranges, {share_of(queue): self.incarnation for queue in ranges})

    def offsets_for_times(
        self, times: Mapping[MessageQueue, int], incarnations: Incarnations
    ) -> dict[MessageQueue, int]:
        return dict(times)

    def commit(
        self,
        group: str,
        offsets: Mapping[MessageQueue, int],
        incarnations: Incarnations,
        timeout_s: float,
    ) -> None:
        self.committed = dict(offsets)
        self.committed_in = dict(incarnations)


def read(
    cluster: FakeCluster, start: int, end: int, *, tags: tuple[str, ...] = (), fail: bool = True
) -> list[int]:
    decoding = Decoding(("queue_offset", "body"), tags=frozenset(tags))
    settings = PullSettings(decoding, tags, fail)
    rows = [
        row
        for batch in read_range(cluster, OffsetRange(A0, start, end), settings)  # type: ignore[arg-type]
        for row in batch.to_pylist()
    ]
    assert [b"%d" % row["queue_offset"] for row in rows] == [row["body"] for row in rows]
    return [row["queue_offset"] for row in rows]


def test_a_range_is_read_to_its_end_and_not_beyond() -> None:
    assert read(FakeCluster(20), 3, 14) == list(range(3, 14))
    assert read(FakeCluster(20), 5, 5) == []


def test_one_pull_is_made_for_each_answer() -> None:
    cluster = FakeCluster(12, per_pull=4)
    read(cluster, 0, 12)
    assert cluster.pulls == [0, 4, 8]


def test_tags_are_filtered_and_empty_stretches_passed_over() -> None:
    assert read(FakeCluster(12), 0, 11, tags=("odd",)) == [1, 3, 5, 7, 9]
    assert read(FakeCluster(12), 0, 11, tags=("none",)) == []


@pytest.mark.parametrize(
    ("cluster", "read_all", "named"),
    [
        (FakeCluster(10, first=5), list(range(5, 12)), "offsets 0 to 4: deleted"),
        (FakeCluster(8), list(range(8)), "offsets 8 to 11: not there any more"),
        (FakeCluster(20, lost=[2, 3]), [0, 1, *range(4, 12)], "2 damaged"),
        (FakeCluster(3, first=50), [], "deleted, the first is 50"),
        (FakeCluster(20, quarantine=range(2, 7)), [0, 1, *range(7, 12)], "offsets 2 to 6: damaged"),
        (FakeCluster(20, quarantine=range(10, 15)), list(range(10)), "offsets 10 to 11: damaged"),
    ],
)
def test_messages_that_are_gone_are_an_error_or_passed_over(
    cluster: FakeCluster, read_all: list[int], named: str
) -> None:
    with pytest.raises(DataLossError, match=named):
        read(cluster, 0, 12)
    assert read(cluster, 0, 12, fail=False) == read_all


def planner(cluster: FakeCluster, streaming: bool = True, **options: str) -> Planner:
    base = {"protomq.namesrv": "h:1", "subscribe": "t"}
    parsed: ReadOptions = parse_read_options(base | options, streaming=streaming)
    return Planner(parsed, cluster)  # type: ignore[arg-type]


def cluster_with(**ends: tuple[int, int]) -> FakeCluster:
    cluster = FakeCluster()
    names = {"a0": A0, "a1": A1}
    cluster.found = {names[name]: QueueRange(*found) for name, found in ends.items()}
    return cluster


def test_a_batch_is_planned_from_first_to_last() -> None:
    plan = planner(cluster_with(a0=(2, 9), a1=(0, 0)), streaming=False).plan_batch()
    assert plan == [OffsetRange(A0, 2, 9, 7)]


def test_a_batch_from_a_deleted_offset_fails_or_begins_later() -> None:
    options = {"startingOffsets": '{"t":{"0":0}}'}
    with pytest.raises(DataLossError, match="deleted"):
        planner(cluster_with(a0=(2, 9)), streaming=False, **options).plan_batch()
    lenient = planner(cluster_with(a0=(2, 9)), streaming=False, failOnDataLoss="false", **options)
    assert lenient.plan_batch() == [OffsetRange(A0, 2, 9, 7)]


def test_the_end_by_time_is_all_there_is_where_nothing_is_younger() -> None:
    plan = planner(cluster_with(a0=(0, 9)), streaming=False, endingTimestamp="99").plan_batch()
    assert plan == [OffsetRange(A0, 0, 9, 7)]


def test_a_stream_waits_for_enough_messages_or_long_enough() -> None:
    plan = planner(cluster_with(a0=(0, 9)), minOffsetsPerTrigger="10", maxTriggerDelay="60s")
    start = {A0: 0}
    _, latest = plan.latest(StreamState(start))
    assert plan.next_end(start, latest, None, 0.0, True) == start
    assert plan.next_end(start, latest, None, 59.0, True) == start
    assert plan.next_end(start, latest, None, 61.0, True) == {A0: 9}
    # The delay counts from the last batch.
    assert plan.next_end(start, latest, None, 62.0, True) == start
    # The trigger wants all there is.
    assert plan.next_end(start, latest, None, 62.0, False) == {A0: 9}


def test_a_stream_takes_no_more_than_it_may() -> None:
    plan = planner(cluster_with(a0=(0, 90), a1=(0, 10)), maxOffsetsPerTrigger="50")
    assert plan.next_end({A0: 0, A1: 0}, plan.latest(StreamState({}))[1], 50, 0.0, True) == {A0: 45, A1: 5}


def test_a_broker_that_is_away_stops_its_queues_only() -> None:
    state = StreamState({A0: 7, A1: 3})
    assert planner(cluster_with(a1=(0, 10))).latest(state)[1] == {A0: 7, A1: 10}


def test_a_queue_that_fell_behind_what_was_read_is_data_loss() -> None:
    with pytest.raises(DataLossError, match="lost its newest"):
        planner(cluster_with(a0=(0, 5))).latest(StreamState({A0: 8}))
    lenient = planner(cluster_with(a0=(0, 5)), failOnDataLoss="false")
    assert lenient.latest(StreamState({A0: 8}))[1] == {A0: 8}


OLD, NEW = {("t", "a"): 6}, {("t", "a"): 7}
SAID = r"topic 't' was deleted and created again at broker a\. "


def test_a_topic_that_was_made_again_is_data_loss_and_read_from_its_beginning_if_told_so() -> None:
    # Whatever the offsets look like.
    state = StreamState({A0: 4, A1: 3}, "q", OLD)
    with pytest.raises(DataLossError, match=SAID + ".*failOnDataLoss=false continues at its beginning"):
        planner(cluster_with(a0=(0, 5))).latest(state)
    lenient = planner(cluster_with(a0=(0, 5)), failOnDataLoss="false")
    now, latest = lenient.latest(state)
    assert now == StreamState({}, "q", NEW)
    assert latest == {A0: 5}  # A queue that the new one has not is forgotten.
    assert lenient.plan_between(state, now._replace(positions=latest)) == [OffsetRange(A0, 0, 5, 7)]


def test_an_incarnation_that_was_not_known_is_remembered() -> None:
    plan = planner(cluster_with(a0=(0, 5)))
    now, latest = plan.latest(StreamState({A0: 4}))
    assert now == StreamState({A0: 4}, "", NEW)
    assert plan.plan_between(StreamState({A0: 4}), now._replace(positions=latest)) == [
        OffsetRange(A0, 4, 5, 7)
    ]
    assert plan.initial("q") == StreamState({A0: 5}, "q", NEW)


def test_a_micro_batch_of_a_topic_that_was_made_again_since_it_was_planned_is_data_loss() -> None:
    start, end = StreamState({A0: 0}, "", OLD), StreamState({A0: 4}, "", OLD)
    with pytest.raises(DataLossError, match=SAID):
        planner(cluster_with(a0=(0, 5))).plan_between(start, end)
    lenient = planner(cluster_with(a0=(0, 5)), failOnDataLoss="false")
    assert lenient.plan_between(start, end) == []


def test_a_task_reads_one_incarnation_only() -> None:
    def rows(incarnation: int, fail: bool) -> int:
        settings = PullSettings(Decoding(("queue_offset",)), (), fail)
        wanted = OffsetRange(A0, 0, 9, incarnation)
        return sum(b.num_rows for b in read_range(FakeCluster(9), wanted, settings))  # type: ignore[arg-type]

    assert rows(7, True) == rows(0, True) == 9
    assert rows(6, False) == 0
    with pytest.raises(DataLossError, match=SAID):
        rows(6, True)


def test_a_new_queue_is_part_of_the_next_micro_batch() -> None:
    cluster = cluster_with(a0=(0, 5))
    plan = planner(cluster)
    cluster.found[A1] = QueueRange(0, 4)
    state, latest = plan.latest(StreamState({A0: 5}))
    end = state._replace(positions=latest)
    assert plan.plan_between(StreamState({A0: 5}), end) == [OffsetRange(A1, 0, 4, 7)]


@pytest.mark.parametrize("lenient", [True, False])
def test_a_new_queue_whose_first_messages_are_gone_is_read_from_those_that_are_there(lenient: bool) -> None:
    cluster = cluster_with(a0=(0, 5), a1=(5_000, 9_000))
    plan = planner(cluster, failOnDataLoss=str(not lenient).lower())
    batches: list[tuple[StreamState, StreamState]] = []
    logged = StreamState({A0: 5})
    for _ in range(3):
        state, latest = plan.latest(logged)
        end = state._replace(positions=plan.next_end(state.positions, latest, 3_000, 0.0, False))
        batches.append((logged, decode_state(encode_state(end))))
        logged = end
    assert batches[2] == (logged, logged)
    assert [plan.plan_between(*batch) for batch in batches] == [
        [OffsetRange(A1, 5_000, 8_000, 7)], [OffsetRange(A1, 8_000, 9_000, 7)], [],
    ]  # fmt: skip
    # A micro-batch that is planned again, when retention has passed its first messages, has lost them.
    cluster.found[A1] = QueueRange(6_000, 9_000)
    if lenient:
        assert plan.plan_between(*batches[0]) == [OffsetRange(A1, 6_000, 8_000, 7)]
    else:
        with pytest.raises(DataLossError, match="offsets 5000 to 5999 are deleted"):
            plan.plan_between(*batches[0])


def test_deleted_messages_take_no_share_of_a_micro_batch(caplog: pytest.LogCaptureFixture) -> None:
    cluster = cluster_with(a0=(1_000_000, 1_000_100), a1=(0, 100))
    lenient = planner(cluster, failOnDataLoss="false")
    logged = StreamState({A0: 0, A1: 0}, "", NEW)
    state, latest = lenient.latest(logged)
    end = lenient.next_end(state.positions, latest, 1_000, 0.0, True)
    assert end == {A0: 1_000_100, A1: 100}
    assert lenient.plan_between(logged, state._replace(positions=end)) == [
        OffsetRange(A0, 1_000_000, 1_000_100, 7), OffsetRange(A1, 0, 100, 7),
    ]  # fmt: skip
    assert "t/a:0: offsets 0 to 999999 are deleted" in caplog.text
    assert planner(cluster).latest(logged)[0] == logged


def test_a_batch_is_not_read_without_a_broker_that_is_away(caplog: pytest.LogCaptureFixture) -> None:
    cluster = cluster_with(a0=(0, 9))
    cluster.gone = True
    with pytest.raises(BrokerMissingError, match="broker b"):
        planner(cluster, streaming=False).plan_batch()
    lenient = planner(cluster, streaming=False, failOnDataLoss="false")
    assert lenient.plan_batch() == [OffsetRange(A0, 0, 9, 7)]
    assert "broker b is not registered any more" in caplog.text


def test_a_query_that_does_not_begin_at_the_first_messages_needs_all_brokers() -> None:
    cluster = cluster_with(a0=(0, 9))
    cluster.gone = True
    assert planner(cluster, startingOffsets="earliest").initial("q").positions == {A0: 0}
    for name, start in (("startingOffsets", "latest"), ("startingTimestamp", "5"), ("startingOffsets", '{"t":{"0":5}}')):
        with pytest.raises(BrokerMissingError, match="broker b"):
            planner(cluster, **{"failOnDataLoss": "false", name: start}).initial("q")  # type: ignore[arg-type]


def test_nothing_is_planned_between_equal_offsets() -> None:
    state = StreamState({A0: 5})
    assert planner(cluster_with(a0=(0, 5))).plan_between(state, state) == []


def test_a_commit_tells_the_cluster() -> None:
    cluster = cluster_with(a0=(0, 5))
    planner(cluster).commit(StreamState({A0: 4}, "", NEW), "g")
    assert (cluster.committed, cluster.committed_in) == ({A0: 4}, NEW)
