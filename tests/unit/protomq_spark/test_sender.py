"""Where the rows of a task go, against a cluster without sockets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("pyarrow", reason="protomq-spark needs pyarrow")
pytest.importorskip("protomq_spark", reason="clients/spark is not installed")

import pyarrow as pa

from protomq import MessageQueue, SendStatus, _routes
from protomq.errors import BrokerMissingError, NoRouteError, NotConfirmedError, TopicNotFoundError
from protomq.v1.send_service_pb2 import SendRequest, SendResponse
from protomq.wire.hashing import sharded_index
from protomq_spark.cluster import Cluster
from protomq_spark.options import ClientOptions, Subscription, parse_write_options
from protomq_spark.sender import SEQUENCES_PER_BATCH, Identity, RowSender
from tests.support.fake_cluster import FakeBroker, FakeCluster, FakeSyncTransport

COUNT = 100
FIRST = Identity("q", 0)


@pytest.fixture
def fake() -> FakeCluster:
    return FakeCluster({"T": {"a": 3, "b": 2}})


@pytest.fixture
def cluster(fake: FakeCluster) -> Iterator[Cluster]:
    made = Cluster(ClientOptions("h:1"))
    made.calls._use(FakeSyncTransport(fake), "h:1")
    yield made
    made.close()


def rows(*columns: str) -> pa.RecordBatch:
    keys = [f"k{n % 7}" if n % 10 else "" for n in range(COUNT)]
    return pa.RecordBatch.from_pydict(
        {"body": [b"%d" % n for n in range(COUNT)], **dict.fromkeys(columns, keys)}
    )


def send(
    cluster: Cluster, batch: pa.RecordBatch, identity: Identity = FIRST, shard_by: str = ""
) -> None:
    given = {"protomq.namesrv": "h:1", "topic": "T", "batchRows": "20"}
    if shard_by:
        given["shardBy"] = shard_by
    RowSender(cluster, parse_write_options(given), identity).send([batch])


@pytest.mark.parametrize(("column", "shard_by"), [("key", ""), ("key", "key"), ("sharding_key", "")])
def test_the_rows_of_one_key_are_in_one_queue_in_their_order(
    fake: FakeCluster, cluster: Cluster, column: str, shard_by: str
) -> None:
    send(cluster, rows(column), shard_by=shard_by)
    queues = sorted(("a", n) for n in range(3)) + sorted(("b", n) for n in range(2))
    stored = fake.stored()
    for k in range(7):
        wanted = [b"%d" % n for n in range(COUNT) if n % 7 == k and n % 10]
        found = stored[queues[sharded_index(f"k{k}", 5)]]
        assert [body for body in found if body in wanted] == wanted
    in_turn = {b"%d" % n for n in range(0, COUNT, 10)}
    assert len([queue for queue, found in stored.items() if in_turn & set(found)]) == 5
    assert sum(map(len, stored.values())) == COUNT


def test_without_a_shard_windows_go_to_the_queues_in_turn(
    fake: FakeCluster, cluster: Cluster
) -> None:
    send(cluster, rows("key"), shard_by="none")
    assert sorted(map(len, fake.stored().values())) == [20] * 5


def test_writes_of_one_name_that_follow_each_other_are_one_producer(
    fake: FakeCluster, cluster: Cluster
) -> None:
    for batch_id in (0, 1):
        send(cluster, rows(), Identity("write\0T\0name", 0, batch_id))
    records = [record for call in fake.calls for record in call.request.records]
    assert len({record.producer_id for record in records}) == 1
    assert sorted(record.sequence for record in records) == [
        first + n for first in (0, SEQUENCES_PER_BATCH) for n in range(COUNT)
    ]


def test_the_queues_to_write_are_those_of_now(
    fake: FakeCluster, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_routes, "INVALIDATE_INTERVAL_S", 0.0)
    assert len(cluster.write_queues("T")) == 5
    fake.topics["T"] = {"a": 1, "b": 1}
    assert len(cluster.write_queues("T")) == 2


def brief(fake: FakeCluster) -> Cluster:
    """A cluster whose calls give up after a moment."""
    made = Cluster(ClientOptions("h:1", timeout_s=0.3))
    made.calls._use(FakeSyncTransport(fake), "h:1")
    return made


def test_rows_of_a_broker_that_is_away_are_not_sent_to_another(fake: FakeCluster) -> None:
    """An attempt stored rows at both brokers and failed; what runs next must not store them at one of them again."""
    queues = brief(fake).write_queues("T")
    send(brief(fake), rows(), shard_by="none")
    stored = fake.stored()
    assert {broker for broker, _ in stored} == {"a", "b"}
    fake.away = {"b"}
    with pytest.raises(BrokerMissingError, match="broker b is not registered any more"):
        send(brief(fake), rows(), shard_by="none")
    assert fake.stored() == stored
    fake.away, fake.leaderless = set(), {"b"}
    with pytest.raises(NoRouteError, match="broker b of topic 'T' has no master"):
        send(brief(fake), rows(), shard_by="none")
    fake.leaderless = set()
    send(brief(fake), rows(), shard_by="none")
    assert fake.stored() == stored
    # One that never had the topic is not waited for.
    fake.topics["U"], fake.brokers["c"] = {"c": 1}, FakeBroker("c")
    fake.away = {"c"}
    assert brief(fake).write_queues("T") == queues


@pytest.mark.parametrize("again", [True, False])
def test_a_broker_that_goes_or_comes_while_queues_are_looked_up_is_waited_for(
    fake: FakeCluster, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    monkeypatch.setattr(_routes, "INVALIDATE_INTERVAL_S", 0.0)
    fake.away = {"b"} if again else set()
    answer, looks = fake._answer_route, iter([{"b"}])

    def moving(topic: str) -> bytes:
        fake.away = next(looks, set())
        try:
            return answer(topic)
        finally:
            if again:
                fake.away = set()

    monkeypatch.setattr(fake, "_answer_route", moving)
    assert len(cluster.write_queues("T")) == 5


@pytest.mark.parametrize(
    ("given", "is_waited_for"),
    [
        (Subscription(topics=("T",)), True),
        (Subscription(pattern="T"), True),
        (Subscription(assigned={"T": ("0",)}), True),
        (Subscription(assigned={"T": ("a:0",)}), False),
    ],
)
def test_queues_of_a_broker_that_is_away_are_not_left_out(
    fake: FakeCluster, given: Subscription, is_waited_for: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = brief(fake)
    monkeypatch.setattr(cluster, "topic_names", lambda: ["T"])
    fake.away = {"b"}
    assert {queue.broker_name for queue in cluster.queues(given)} == {"a"}
    if is_waited_for:
        with pytest.raises(BrokerMissingError, match="broker b"):
            cluster.all_queues(given)
    else:
        assert cluster.all_queues(given) == [MessageQueue("T", "a", 0)]


class Hesitant(FakeBroker):
    """Whose slave, or disk, does not confirm the first answers in time."""

    statuses: tuple[SendStatus, ...] = ()

    def store(self, request: SendRequest) -> SendResponse:
        answer = super().store(request)
        if self.statuses:
            (status, *rest) = self.statuses
            self.statuses = tuple(rest)
            answer.status = int(status)  # type: ignore[assignment]
        return answer


@pytest.mark.parametrize("status", [SendStatus.FLUSH_SLAVE_TIMEOUT, SendStatus.FLUSH_DISK_TIMEOUT])
@pytest.mark.parametrize("waits", [True, False])
def test_rows_that_a_fail_over_may_take_back_are_sent_again_until_they_are_confirmed(
    fake: FakeCluster, cluster: Cluster, status: SendStatus, waits: bool
) -> None:
    broker = fake.brokers["a"] = Hesitant("a")
    broker.statuses = (status, status, SendStatus.SLAVE_NOT_AVAILABLE)
    given = {"protomq.namesrv": "h:1", "topic": "T", "shardBy": "none", "protomq.waitStoreOk": str(waits)}
    sent = RowSender(cluster, parse_write_options(given), FIRST).send([rows()])
    assert (sent.rows, sent.repeated_rows, sum(map(len, fake.stored().values()))) == (COUNT, 0, COUNT)
    assert len(fake.calls) == (3 if waits else 1)
    assert len({call.payload for call in fake.calls}) == 1


def test_a_task_whose_rows_are_not_confirmed_in_time_fails(fake: FakeCluster) -> None:
    broker = fake.brokers["a"] = Hesitant("a")
    broker.statuses = (SendStatus.FLUSH_SLAVE_TIMEOUT,) * 99
    with pytest.raises(NotConfirmedError, match=r"T/a:0.*FLUSH_SLAVE_TIMEOUT") as caught:
        send(brief(fake), rows(), shard_by="none")
    assert not caught.value.definite


def test_of_a_topic_whose_brokers_are_all_away_the_error_names_one(fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.away = {"a", "b"}

    def away(_: str) -> bytes:
        raise TopicNotFoundError("no broker has it", metadata={"topic": "T", "missing_brokers": "a, b"})

    monkeypatch.setattr(fake, "_answer_route", away)
    with pytest.raises(NoRouteError, match="no broker is registered at h:1"):
        brief(fake).write_queues("T")
    fake.topics["U"], fake.brokers["c"] = {"c": 1}, FakeBroker("c")
    with pytest.raises(BrokerMissingError, match="broker a is not registered"):
        brief(fake).write_queues("T")
    with pytest.raises(NoRouteError, match="no broker has it"):
        brief(fake).queues(Subscription(topics=("T",)))
