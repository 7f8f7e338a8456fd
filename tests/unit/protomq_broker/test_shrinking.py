"""Topics that get fewer queues and more again, while messages wait: each is delivered once, to a queue that takes messages at that time."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from protomq.v1.send_service_pb2 import SendRequest
from protomq_broker.store.state.topics import TopicConfig
from tests.support.transaction_world import COMMIT, World

QUEUES_MAX = 6
DELAY_MS = 1_000

steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["delayed", "half", "half, delayed"]), st.integers(0, QUEUES_MAX - 1)),
        st.tuples(st.just("queues"), st.integers(1, QUEUES_MAX)),
        st.tuples(st.sampled_from(["read less", "commit", "wait", "restart", "kill"]), st.just(0)),
    ),
    max_size=25,
)


class Shrinking:
    """A topic whose number of queues changes as docs/operations.md says."""

    def __init__(self) -> None:
        self.world = World().start()
        self.write_queues = self.read_queues = 1
        self.handles: list[str] = []
        self.sent: list[bytes] = []
        self.seen: list[Counter[bytes]] = [Counter() for _ in range(QUEUES_MAX)]
        self.change(QUEUES_MAX, QUEUES_MAX)

    def change(self, write_queues: int, read_queues: int) -> None:
        self.write_queues, self.read_queues = write_queues, read_queues
        self.world.store.topics.put([TopicConfig("topic", write_queues, read_queues)])

    def send(self, kind: str, queue_id: int) -> None:
        body = b"%d" % len(self.sent)
        self.sent.append(body)
        queue_id %= self.write_queues
        delay_ms = DELAY_MS if "delayed" in kind else 0
        if "half" in kind:
            fields: dict[str, Any] = {"delay_ms": delay_ms} if delay_ms else {}
            self.handles.append(self.world.half(body, queue_id=queue_id, **fields))
        else:
            record = self.world.record(body)
            self.world.request(SendRequest(topic="topic", queue_id=queue_id, records=[record], delay_ms=delay_ms))

    def commit(self, count: int) -> None:
        chosen, self.handles = self.handles[:count], self.handles[count:]
        if chosen:
            self.world.end(*((handle, COMMIT) for handle in chosen))

    def wait(self) -> None:
        self.world.clock.time_ms += DELAY_MS + 1
        while self.world.mover.deliver():
            pass

    def do(self, step: str, number: int) -> None:
        match step:
            case "queues":
                self.change(number, max(number, self.read_queues))
            case "read less":
                self.change(self.write_queues, self.write_queues)
            case "commit":
                self.commit(3)
            case "wait":
                self.wait()
            case "restart":
                self.world.restart()
            case "kill":
                self.world.restart(self.world.disk.killed())
            case _:
                self.send(step, number)
        self.check()

    def check(self) -> None:
        """What has come since stands where messages are taken."""
        now = [Counter(self.world.delivered("topic", queue_id)) for queue_id in range(QUEUES_MAX)]
        for queue_id, (before, found) in enumerate(zip(self.seen, now, strict=True)):
            assert found == before or queue_id < self.write_queues
        self.seen = now


@settings(max_examples=100, deadline=None)
@given(steps)
def test_whatever_waits_while_a_topic_changes_its_queues_comes_once_where_it_can_be_read(chosen: list[tuple[str, int]]) -> None:
    shrinking = Shrinking()
    for step in chosen:
        shrinking.do(*step)
    shrinking.commit(len(shrinking.handles))
    shrinking.check()
    shrinking.wait()
    shrinking.check()
    assert sum(shrinking.seen, Counter()) == Counter(shrinking.sent)
    assert shrinking.world.store.pending.count == 0


def test_a_topic_that_shrinks_twice_and_grows_strands_nothing() -> None:
    shrinking = Shrinking()
    for kind in ("delayed", "half", "half, delayed"):
        for queue_id in range(QUEUES_MAX):
            shrinking.do(kind, queue_id)
    for step in (("queues", 4), ("commit", 0), ("read less", 0), ("queues", 1), ("read less", 0), ("wait", 0), ("kill", 0), ("queues", 6)):
        shrinking.do(*step)
    shrinking.commit(len(shrinking.handles))
    shrinking.wait()
    shrinking.check()
    assert sum(shrinking.seen, Counter()) == Counter(shrinking.sent)
