"""PullConsumer and AsyncPullConsumer against a server on a real socket."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing
from datetime import UTC, datetime
from functools import partial
from typing import Any, cast

import pytest

from protomq import (
    AsyncPullConsumer,
    Message,
    MessageQueue,
    PullConsumer,
    QueueListener,
    QueueRange,
    _methods,
    _pull_logic,
)
from protomq.errors import (
    ClosedError,
    ConfigurationError,
    CorruptLogError,
    NoRouteError,
    OffsetIllegalError,
    TopicNotFoundError,
)
from protomq.hooks import CallContext, ConsumeContext, Hook, ReceiveContext
from protomq.wire.record import encode_front
from protomq.wire.status import RpcStatus
from tests.support.fake_server import FakeGrpcFront, FakeServer
from tests.support.interrupts import interrupted_everywhere
from tests.support.waiting import PATIENCE_S, async_wait_for, wait_for

Q0, Q1 = MessageQueue("t", "broker-a", 0), MessageQueue("t", "broker-a", 1)
HOLD_S = 15  # A pull that finds nothing is held so long.
BASE_MS = 1_700_000_000_000  # The store time of the fake server's offset 0; one second per offset.


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer({"t": 2}) as made:
        yield made


def consumer(server: FakeServer, group: str = "g", **options: object) -> PullConsumer:
    return PullConsumer(group, namesrv=server.address, **options)  # type: ignore[arg-type]


def drain(source: PullConsumer, count: int) -> list[Message]:
    got: list[Message] = []
    ends_s = time.monotonic() + PATIENCE_S
    while len(got) < count and time.monotonic() < ends_s:
        got.extend(source.poll(0.5))
    return got


def fill(server: FakeServer, count: int = 10) -> None:
    for queue_id in (0, 1):
        server.append("t", queue_id, [b"%d-%d" % (queue_id, i) for i in range(count)])


def test_all_messages_come_once_and_in_order(server: FakeServer) -> None:
    fill(server, 1000)
    with consumer(server) as source:
        source.subscribe("t")
        got = drain(source, 2000)
        for queue_id in (0, 1):
            bodies = [message.body for message in got if message.queue_id == queue_id]
            assert bodies == [b"%d-%d" % (queue_id, i) for i in range(1000)]
        assert source.poll(0) == []
        assert source.transport == "remoting"


def test_answers_stay_in_the_kernel_while_enough_waits(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two queues' answers are there: the second is read only when the first has been handed out, and then nothing is missing."""
    fill(server, 100)
    monkeypatch.setattr(_pull_logic, "READ_AHEAD_MAX_BYTES", 1)
    with consumer(server) as source:
        source.subscribe("t")
        got: list[Message] = []
        while len(got) < 200:
            part = source.poll(PATIENCE_S, max_messages=7)
            assert part
            got.extend(part)
            assert len(source._state._line) <= 1
        for queue_id in (0, 1):
            bodies = [message.body for message in got if message.queue_id == queue_id]
            assert bodies == [b"%d-%d" % (queue_id, i) for i in range(100)]


def test_a_held_pull_ends_when_a_message_arrives(server: FakeServer) -> None:
    with consumer(server) as source:
        source.subscribe("t")
        assert source.poll(0.05) == []
        timer = threading.Timer(0.1, server.append, ("t", 1, [b"x"]))
        timer.start()
        started_s = time.monotonic()
        assert [message.body for message in source.poll(PATIENCE_S)] == [b"x"]
        assert time.monotonic() - started_s < HOLD_S - 1
        timer.join()
        wait_for(lambda: server.called(_methods.PULL) >= 3)
        # Two holds, and the next one of the queue that had a message.
        assert server.called(_methods.PULL) == 3


def test_poll_returns_at_most_what_is_asked_for_and_waits_no_longer_than_told(
    server: FakeServer,
) -> None:
    fill(server)
    with consumer(server) as source:
        source.subscribe("t")
        assert len(source.poll(PATIENCE_S, max_messages=3)) == 3
        drain(source, 17)
        started_s = time.monotonic()
        assert source.poll(0.1) == []
        assert 0.09 <= time.monotonic() - started_s < HOLD_S - 1


def test_positions_are_committed_on_close_and_taken_up_again(server: FakeServer) -> None:
    fill(server)
    with consumer(server) as source:
        source.subscribe("t")
        assert len(drain(source, 20)) == 20
        assert source.committed(Q0) is None
    assert server.committed == {("g", "t", 0): 10, ("g", "t", 1): 10}
    server.append("t", 0, [b"new"])
    with consumer(server) as source:
        source.subscribe("t")
        assert [message.body for message in drain(source, 1)] == [b"new"]
    with consumer(server, resume=False) as source:
        source.subscribe("t")
        assert len(drain(source, 21)) == 21


def test_after_an_exception_the_last_batch_comes_again(server: FakeServer) -> None:
    server.append("t", 0, [b"%d" % i for i in range(6)])

    def work_that_fails() -> None:
        with consumer(server) as source:
            source.assign([Q0])
            source.poll(PATIENCE_S, max_messages=2)
            source.poll(PATIENCE_S, max_messages=2)
            raise KeyError

    with pytest.raises(KeyError):
        work_that_fails()
    assert server.committed == {("g", "t", 0): 2}


def test_leaving_the_loop_gives_back_what_was_not_seen(server: FakeServer) -> None:
    server.append("t", 0, [b"%d" % i for i in range(6)])
    with consumer(server) as source:
        source.assign([Q0])
        for message in source:
            if message.body == b"2":
                break
        assert source.position(Q0) == 3
        assert source.poll(PATIENCE_S)[0].body == b"3"
        source.seek(Q0, 5)
    assert server.committed == {("g", "t", 0): 5}


async def test_leaving_an_async_loop_gives_back_what_was_not_seen(server: FakeServer) -> None:
    server.append("t", 0, [b"%d" % i for i in range(6)])
    async with AsyncPullConsumer("g", namesrv=server.address) as source:
        await source.assign([Q0])
        async for message in source:
            if message.body == b"2":
                break
    assert server.committed == {("g", "t", 0): 3}


async def test_an_async_loop_that_was_left_is_followed_by_what_it_had_not_handed_on(server: FakeServer) -> None:
    server.append("t", 0, [b"%d" % i for i in range(6)])
    async with AsyncPullConsumer("g", namesrv=server.address) as source:
        await source.assign([Q0])
        async for message in source:
            if message.body == b"2":
                break
        assert (await source.poll(PATIENCE_S))[0].body == b"3"


def test_a_commit_in_a_loop_is_of_what_the_loop_has_handed_on(server: FakeServer) -> None:
    server.append("t", 0, [b"%d" % i for i in range(6)])
    committed = []
    with consumer(server, auto_commit=False) as source:
        source.assign([Q0])
        for message in source:
            source.commit()
            committed.append(server.committed["g", "t", 0])
            if message.body == b"5":
                break
    assert committed == [1, 2, 3, 4, 5, 6]


async def test_a_commit_in_an_async_loop_is_so_too(server: FakeServer) -> None:
    server.append("t", 0, [b"%d" % i for i in range(6)])
    committed = []
    async with AsyncPullConsumer("g", namesrv=server.address, auto_commit=False) as source:
        await source.assign([Q0])
        async for message in source:
            await source.commit()
            committed.append(server.committed["g", "t", 0])
            if message.body == b"5":
                break
    assert committed == [1, 2, 3, 4, 5, 6]


def test_a_close_in_the_midst_of_a_loop_ends_it_and_commits_what_it_has_handed_on(server: FakeServer) -> None:
    server.append("t", 0, [b"%d" % i for i in range(6)])
    source = consumer(server)
    source.assign([Q0])
    seen = []
    for message in source:
        seen.append(message.body)
        if message.body == b"2":
            source.close()
    assert seen == [b"0", b"1", b"2"]
    assert server.committed == {("g", "t", 0): 3}


async def test_so_does_a_close_in_the_midst_of_an_async_loop(server: FakeServer) -> None:
    server.append("t", 0, [b"%d" % i for i in range(6)])
    source = AsyncPullConsumer("g", namesrv=server.address)
    await source.assign([Q0])
    seen = []
    async for message in source:
        seen.append(message.body)
        if message.body == b"2":
            await source.close()
    assert seen == [b"0", b"1", b"2"]
    assert server.committed == {("g", "t", 0): 3}


async def test_tasks_that_share_a_consumer_commit_on_close_what_the_slowest_loop_has_handed_on(server: FakeServer) -> None:
    server.append("t", 0, [b"%d" % i for i in range(600)])
    source = AsyncPullConsumer("g", namesrv=server.address)
    await source.assign([Q0])
    slow, fast = aiter(source), aiter(source)
    assert [(await anext(slow)).body for _ in range(3)] == [b"0", b"1", b"2"]
    assert int((await anext(fast)).body) >= 512
    await source.close()
    assert server.committed == {("g", "t", 0): 3}


async def test_an_async_loop_that_was_closed_hands_on_nothing(server: FakeServer) -> None:
    server.append("t", 0, [b"%d" % i for i in range(6)])
    async with AsyncPullConsumer("g", namesrv=server.address) as source:
        await source.assign([Q0])
        async with aclosing(cast(Any, aiter(source))) as loop:
            assert (await anext(loop)).body == b"0"
        assert await anext(loop, None) is None
        assert await source.position(Q0) == 1


def test_who_polls_beside_a_loop_commits_nothing_that_the_loop_has_not_handed_on(server: FakeServer) -> None:
    server.append("t", 0, [b"%d" % i for i in range(6)])
    with consumer(server, auto_commit_interval_s=0.001) as source:
        source.assign([Q0])
        loop = iter(source)
        assert [next(loop).body for _ in range(2)] == [b"0", b"1"]
        time.sleep(0.002)
        source.poll(0)
        time.sleep(0.002)
        source.poll(0)
        assert server.committed == {("g", "t", 0): 2}
        assert [next(loop).body for _ in range(4)] == [b"2", b"3", b"4", b"5"]
    assert server.committed == {("g", "t", 0): 6}


def test_a_seek_in_a_loop_holds_when_the_loop_is_left(server: FakeServer) -> None:
    server.append("t", 0, [b"%d" % i for i in range(6)])
    with consumer(server) as source:
        source.assign([Q0])
        for _ in source:
            source.seek(Q0, 4)
            break
        assert source.position(Q0) == 4
    assert server.committed == {("g", "t", 0): 4}


def test_commits_in_poll_are_of_what_was_dealt_with(server: FakeServer) -> None:
    server.append("t", 0, [b"%d" % i for i in range(6)])
    with consumer(server, auto_commit_interval_s=0.001) as source:
        source.assign([Q0])
        source.poll(PATIENCE_S, max_messages=2)
        time.sleep(0.002)
        source.poll(PATIENCE_S, max_messages=2)
        assert server.committed == {("g", "t", 0): 2}
        source.commit()
        assert server.committed == {("g", "t", 0): 4}
        assert source.committed(Q0) == 4
        source.commit({Q0: 1})
        assert server.committed == {("g", "t", 0): 1}


def test_without_a_group_nothing_is_committed(server: FakeServer) -> None:
    fill(server)
    with consumer(server, "") as source:
        source.subscribe("t")
        drain(source, 20)
        with pytest.raises(ConfigurationError):
            source.commit()
    assert server.called(_methods.COMMIT_OFFSETS) == 0


@pytest.mark.parametrize(
    ("begin", "first"),
    [("earliest", 3), ("latest", 10), (datetime.fromtimestamp(BASE_MS / 1000 + 6.5, UTC), 7)],
)
def test_a_new_group_begins_where_it_is_told_to(
    server: FakeServer, begin: object, first: int
) -> None:
    fill(server)
    server.min_offsets["t", 0] = 3
    with consumer(server, begin=begin) as source:
        source.assign([Q0])
        assert source.position(Q0) == first
        server.append("t", 0, [b"new"])
        assert source.poll(PATIENCE_S)[0].queue_offset == first


def test_seeking(server: FakeServer) -> None:
    fill(server)
    server.min_offsets["t", 1] = 2
    with consumer(server) as source:
        source.subscribe("t")
        drain(source, 18)
        source.seek_to_time(datetime.fromtimestamp(BASE_MS / 1000 + 8, UTC))
        assert sorted(message.queue_offset for message in drain(source, 4)) == [8, 8, 9, 9]
        source.seek_to_begin()
        assert (source.position(Q0), source.position(Q1)) == (0, 2)
        source.seek_to_end([Q0])
        assert source.position(Q0) == 10
        source.seek(Q0, 9)
        assert {message.queue_offset for message in drain(source, 9) if message.queue == Q0} == {9}
        with pytest.raises(ConfigurationError):
            source.seek(Q0, -1)
        with pytest.raises(ConfigurationError):
            source.seek(MessageQueue("t", "broker-a", 7), 1)


def test_questions_about_queues(server: FakeServer) -> None:
    fill(server)
    server.min_offsets["t", 0] = 3
    with consumer(server) as source:
        assert source.queues("t") == (Q0, Q1)
        assert source.queue_range(Q0) == QueueRange(3, 10)
        assert (source.min_offset(Q0), source.end_offset(Q0)) == (3, 10)
        assert source.offset_for_time(Q0, datetime.fromtimestamp(BASE_MS / 1000 + 4, UTC)) == 4
        assert source.committed(Q0) is None
        assert source.assignment() == ()


def test_tags_are_filtered_at_the_broker_and_again_here(server: FakeServer) -> None:
    for i, tag in enumerate(["A", "B", "A", "C"]):
        server.append("t", 0, [b"%d" % i], tag=tag, front=encode_front((), tag))
    with consumer(server) as source:
        source.subscribe("t", tags=["A", "C"])
        assert [message.body for message in drain(source, 3)] == [b"0", b"2", b"3"]
        with pytest.raises(ConfigurationError):
            source.subscribe("t", tags="A")
        source.subscribe("t", tags=["B"])
        server.append("t", 0, [b"4"], tag="A", front=encode_front((), "A"))
        server.append("t", 0, [b"5"], tag="B", front=encode_front((), "B"))
        assert [message.body for message in drain(source, 1)] == [b"5"]


@pytest.mark.parametrize("tags", [["*"], ["A", "*"]])
def test_the_tag_star_means_all_as_in_rocketmq(server: FakeServer, tags: list[str]) -> None:
    for i, tag in enumerate(["A", "B", ""]):
        server.append("t", 0, [b"%d" % i], tag=tag, front=encode_front((), tag))
    with consumer(server) as source:
        source.subscribe("t", tags=tags)
        assert [message.body for message in drain(source, 3)] == [b"0", b"1", b"2"]


async def test_the_tag_star_means_all_for_the_async_consumer_too(server: FakeServer) -> None:
    for i, tag in enumerate(["A", "B", ""]):
        server.append("t", 0, [b"%d" % i], tag=tag, front=encode_front((), tag))
    async with AsyncPullConsumer(namesrv=server.address, begin="earliest") as source:
        await source.subscribe("t", tags=["*"])
        got: list[bytes] = []
        while len(got) < 3:
            got.extend(message.body for message in await source.poll(10))
    assert got == [b"0", b"1", b"2"]


def test_an_illegal_offset(server: FakeServer) -> None:
    fill(server)
    server.min_offsets["t", 0] = 6
    with consumer(server) as source:
        source.assign([Q0])
        source.seek(Q0, 2)
        assert source.poll(PATIENCE_S)[0].queue_offset == 6
    with consumer(server, offset_reset="error") as source:
        source.assign([Q0])
        source.seek(Q0, 99)
        with pytest.raises(OffsetIllegalError):
            source.poll(PATIENCE_S)
        source.seek(Q0, 9)
        assert source.poll(PATIENCE_S)[0].queue_offset == 9


def test_errors_that_pass_are_not_seen_and_others_are(server: FakeServer) -> None:
    fill(server)
    server.fail(_methods.PULL, RpcStatus(8, "busy", "SYSTEM_BUSY", retry_delay_ms=10))
    server.drop(_methods.PULL)
    with consumer(server) as source:
        source.subscribe("t")
        assert len(drain(source, 20)) == 20
        server.fail(
            _methods.PULL, RpcStatus(15, "damaged", "CORRUPT_LOG", {"queue_offset": "12"}), times=2
        )
        source.seek(Q0, 0)
        with pytest.raises(CorruptLogError) as caught:
            source.poll(PATIENCE_S)
        assert caught.value.metadata["queue_offset"] == "12"


def test_a_broker_that_comes_back_is_used_again(server: FakeServer) -> None:
    fill(server)
    with consumer(server) as source:
        source.subscribe("t")
        drain(source, 20)
        server.stop()
        assert source.poll(0.1) == []
        server.start()
        server.append("t", 1, [b"back"])
        assert [message.body for message in drain(source, 1)] == [b"back"]


def test_a_broker_that_is_down_is_two_lines_in_the_log(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    fill(server)
    with consumer(server, auto_commit_interval_s=0.05) as source:
        source.subscribe("t")
        drain(source, 20)
        with caplog.at_level(logging.INFO, "protomq"):
            server.stop()
            for _ in range(40):  # Each pulls both queues again, commits, and looks for routes.
                source._routes.invalidate("t")
                assert source.poll(0.05) == []
            server.start()
            server.append("t", 1, [b"back"])
            drain(source, 1)
            source.queues("t")
    about = [line for line in caplog.messages if "name server" not in line]
    assert [line.split(",")[0] for line in about] == [
        "broker broker-a does not answer",
        "broker broker-a answers again",
    ]
    assert len(caplog.messages) - len(about) <= 2


def test_a_dead_broker_does_not_hold_up_the_others(server: FakeServer) -> None:
    with socket.create_server(
        ("127.0.0.1", 0), backlog=1
    ) as deaf:  # It accepts, and never answers.
        broker = server.as_broker()
        dead = server.as_broker()
        dead.broker_name, dead.remoting_address = "broker-0", f"127.0.0.1:{deaf.getsockname()[1]}"
        server.brokers = [dead, broker]
        with consumer(server, "", request_timeout_s=0.3) as source:
            source.subscribe("t")
            assert len(source.assignment()) == 4
            fill(server)
            started_s = time.monotonic()
            assert len(drain(source, 20)) == 20
            for i in range(5):
                server.append("t", 0, [b"%d" % i])
                assert len(drain(source, 1)) == 1
            assert time.monotonic() - started_s < HOLD_S - 1  # So long a pull of the deaf one takes.


def test_a_topic_that_grows_is_consumed_whole(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protomq._routes.INVALIDATE_INTERVAL_S", 0.0)
    fill(server)
    with consumer(server, begin="latest") as source:
        source.subscribe("t")
        assert source.poll(0.05) == []
        server.topics["t"] = 3
        server.append("t", 2, [b"third"])
        source._routes.invalidate("t")
        # Not lost, for it is new.
        assert [message.body for message in drain(source, 1)] == [b"third"]


def test_subscribing_to_nothing(server: FakeServer) -> None:
    with consumer(server) as source:
        with pytest.raises(ConfigurationError):
            source.poll(0)
        with pytest.raises(TopicNotFoundError):
            source.subscribe("unknown")
        source.subscribe("t")
        source.unsubscribe("t")
        assert source.assignment() == ()


def test_no_name_server(server: FakeServer) -> None:
    server.stop()
    with consumer(server) as source, pytest.raises(NoRouteError):
        source.subscribe("t")


def test_name_servers_may_go_while_it_runs(server: FakeServer) -> None:
    with FakeServer({"t": 2}) as names:
        names.brokers = [server.as_broker()]
        source = consumer(names)
        source.subscribe("t")
    fill(server)  # The name server is gone.
    source._routes.invalidate("t")
    assert len(drain(source, 20)) == 20
    source.close()


def test_a_closed_consumer_says_so_and_close_ends_a_poll_in_another_thread(
    server: FakeServer,
) -> None:
    source = consumer(server)
    source.subscribe("t")
    got: list[object] = []

    def poll() -> None:
        got.append(source.poll(PATIENCE_S))

    thread = threading.Thread(target=poll)
    thread.start()
    wait_for(lambda: server.called(_methods.PULL))
    source.close()
    thread.join(PATIENCE_S)
    assert got == [[]]
    source.close()
    assert list(source) == []
    with pytest.raises(ClosedError):
        source.poll(0)


def test_grpc_carries_the_pulls_where_the_remoting_port_is_closed(server: FakeServer) -> None:
    fill(server)
    with FakeGrpcFront(server) as front:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            closed = f"127.0.0.1:{listener.getsockname()[1]}"
        broker = server.as_broker()
        broker.remoting_address, broker.grpc_address = closed, front.address
        server.brokers = [broker]
        with consumer(server, hold_ms=300) as source:
            source.subscribe("t")
            assert len(drain(source, 20)) == 20
            assert source.transport == "grpc"
            timer = threading.Timer(0.05, server.append, ("t", 0, [b"late"]))
            timer.start()
            assert [message.body for message in drain(source, 1)] == [b"late"]
            timer.join()
            server.fail(_methods.PULL, RpcStatus(15, "damaged", "CORRUPT_LOG"), times=2)
            source.seek(Q0, 0)
            with pytest.raises(CorruptLogError):
                source.poll(PATIENCE_S)
        assert server.committed["g", "t", 1] == 10


def test_a_forked_child_goes_on_with_its_own_connection_and_says_so(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    server.append("t", 0, [b"%d" % i for i in range(4)])
    with consumer(server) as source:
        source.assign([Q0])
        assert len(source.poll(PATIENCE_S, max_messages=2)) == 2
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                bodies = [message.body for message in source.poll(PATIENCE_S)]
                source.close()
                code = 0 if bodies == [b"2", b"3"] and caplog.text.count("was made before this process was forked") == 1 else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert [message.body for message in source.poll(PATIENCE_S)] == [b"2", b"3"]
        assert "forked" not in caplog.text
        server.append("t", 0, [b"4"])
        assert [message.body for message in drain(source, 1)] == [b"4"]


def test_messages_travel_between_processes(server: FakeServer) -> None:
    server.append("t", 0, [b"body"], key="k", front=encode_front(["k"], "", {"a": "b"}))
    with consumer(server) as source:
        source.assign([Q0])
        message = pickle.loads(pickle.dumps(source.poll(PATIENCE_S)[0]))
    assert (message.body, message.key, dict(message.properties)) == (b"body", "k", {"a": "b"})
    assert (message.queue, message.queue_offset) == (Q0, 0)


def test_an_interrupted_poll_loses_nothing(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(server)
    with consumer(server, "") as source:
        source.subscribe("t")
        got = source.poll(PATIENCE_S, max_messages=3)
        take = source._state.take

        def interrupted(count_max: int, **settings: bool) -> list[Message]:
            if take(count_max, **settings):
                raise KeyboardInterrupt
            return []

        with monkeypatch.context() as patched:
            patched.setattr(source._state, "take", interrupted)
            with pytest.raises(KeyboardInterrupt):
                source.poll(PATIENCE_S)
        got += drain(source, 17)
    assert len(got) == len({(message.queue, message.queue_offset) for message in got}) == 20


class CtrlC(Hook):
    """Ctrl-C meets one of its methods once: the first time that there are messages, or a pull has its answer."""

    def __init__(self, place: str) -> None:
        self.place = place

    def _come_to(self, place: str) -> None:
        if self.place == place:
            self.place = ""
            raise KeyboardInterrupt

    def keeps(self, message: Message) -> bool:
        self._come_to("keeps")
        return True

    def before_consume(self, context: ConsumeContext) -> None:
        self._come_to("before_consume")

    def after_receive(self, context: ReceiveContext) -> None:
        if context.messages:
            self._come_to("after_receive")

    def before_call(self, context: CallContext) -> None:
        if context.method.endswith("/Pull"):
            self._come_to("before_call")

    def after_call(self, context: CallContext) -> None:
        if context.method.endswith("/Pull"):
            self._come_to("after_call")


@pytest.mark.parametrize("way", ["poll", "loop"])
@pytest.mark.parametrize("place", ["keeps", "before_consume", "after_receive", "before_call", "after_call"])
@pytest.mark.parametrize("is_async", [False, True])
def test_ctrl_c_in_a_hook_loses_nothing(server: FakeServer, is_async: bool, place: str, way: str) -> None:
    """What was not returned comes again, and no commit counts it."""
    server.append("t", 0, [b"%d" % number for number in range(4)])
    hook = CtrlC(place)
    loop = asyncio.new_event_loop()
    if is_async:
        other = AsyncPullConsumer("g", namesrv=server.address, hooks=[hook])
        loop.run_until_complete(other.assign([Q0]))
        over = aiter(other)

        def take() -> object:
            return loop.run_until_complete(other.poll(PATIENCE_S) if way == "poll" else cast(Any, anext(over)))

        def commit() -> None:
            loop.run_until_complete(other.commit())

        def close() -> None:
            loop.run_until_complete(other.close())
    else:
        source = consumer(server, hooks=[hook])
        source.assign([Q0])

        def take() -> object:
            return source.poll(PATIENCE_S) if way == "poll" else next(iter(source))

        commit, close = source.commit, source.close
    try:
        with pytest.raises(KeyboardInterrupt):
            take()
        assert hook.place == ""
        for task in asyncio.all_tasks(loop):  # As asyncio.run does.
            task.cancel()
        commit()
        assert server.committed.get(("g", "t", 0), 0) == 0
        taken = take()
        first = taken[0] if isinstance(taken, list) and taken else taken
        assert isinstance(first, Message), "nobody pulls it"
        assert first.body == b"0"
    finally:
        close()
        loop.close()


def interrupt_waits(source: PullConsumer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C meets each `poll` that has nothing more to return."""
    take, is_begun = source._state.take, False

    def interrupted(count_max: int, **settings: bool) -> list[Message]:
        nonlocal is_begun
        messages = take(count_max, **settings)
        if is_begun and not messages:
            raise KeyboardInterrupt
        is_begun = is_begun or bool(messages)
        return messages

    monkeypatch.setattr(source._state, "take", interrupted)


def use_up(source: PullConsumer, way: str) -> None:
    if way == "loop":
        for _ in source:
            pass
    elif way == "scheduled":
        source.run_scheduled(lambda queue, messages: 0)
    while True:
        source.poll(PATIENCE_S)


@pytest.mark.parametrize("way", ["poll", "loop", "scheduled"])
@pytest.mark.parametrize("end", ["with", "caught", "close"])
def test_an_interrupted_wait_leaves_what_was_finished_before_it_to_the_last_commit(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, way: str, end: str
) -> None:
    server.append("t", 0, [b"%d" % number for number in range(10)])
    source = consumer(server, "g")
    source.assign([Q0])
    interrupt_waits(source, monkeypatch)
    if end == "with":
        with pytest.raises(KeyboardInterrupt), source:
            use_up(source, way)
    elif end == "caught":
        with source, pytest.raises(KeyboardInterrupt):
            use_up(source, way)
    else:
        with pytest.raises(KeyboardInterrupt):
            use_up(source, way)
        source.close()
    assert server.committed == {("g", "t", 0): 10}


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_in_a_loop_takes_back_the_message_that_the_loop_is_at_and_no_other(server: FakeServer, error: type[BaseException]) -> None:
    server.append("t", 0, [b"%d" % number for number in range(10)])

    def work() -> None:
        with consumer(server, "g") as source:
            source.assign([Q0])
            for message in source:
                if message.body == b"6":
                    raise error

    with pytest.raises(error):
        work()
    assert server.committed == {("g", "t", 0): 6}


async def test_so_does_an_error_in_an_async_loop(server: FakeServer) -> None:
    server.append("t", 0, [b"%d" % number for number in range(10)])

    async def work() -> None:
        async with AsyncPullConsumer("g", namesrv=server.address) as source:
            await source.assign([Q0])
            async for message in source:
                if message.body == b"6":
                    raise ValueError("6")

    with pytest.raises(ValueError, match="6"):
        await work()
    assert server.committed == {("g", "t", 0): 6}


@pytest.mark.parametrize("way", ["poll", "loop", "scheduled"])
async def test_a_cancelled_wait_leaves_what_was_finished_before_it_to_the_last_commit(server: FakeServer, way: str) -> None:
    server.append("t", 0, [b"%d" % number for number in range(10)])
    source = AsyncPullConsumer("g", namesrv=server.address)
    await source.assign([Q0])
    count = 0

    async def work() -> None:
        nonlocal count
        async with source:
            if way == "loop":
                async for _ in source:
                    count += 1
            elif way == "scheduled":

                def pull(_: MessageQueue, messages: Sequence[Message]) -> int:
                    nonlocal count
                    count += len(messages)
                    return 0

                await source.run_scheduled(pull)
            while True:
                count += len(await source.poll(PATIENCE_S))

    task = asyncio.create_task(work())
    await async_wait_for(lambda: count == 10 and not source._state._handed_out)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.committed == {("g", "t", 0): 10}


@pytest.mark.parametrize(("end", "committed"), [("returns", 3), ("raises", 0), ("exits", 0)])
@pytest.mark.parametrize("closer", ["pull", "another"])
def test_a_scheduled_pull_says_by_its_end_what_is_done_also_if_the_consumer_is_closed_meanwhile(
    server: FakeServer, end: str, committed: int, closer: str
) -> None:
    server.append("t", 0, [b"%d" % number for number in range(3)])
    source = consumer(server)
    source.assign([Q0])
    closing: list[threading.Thread] = []

    def pull(_: MessageQueue, messages: Sequence[Message]) -> int:
        assert len(messages) == 3
        if closer == "pull":
            source.close()
        else:
            closing.append(threading.Thread(target=source.close))
            closing[0].start()
            wait_for(lambda: source._closed)
            time.sleep(0.1)
        if end == "raises":
            raise ValueError("broken")
        if end == "exits":
            raise SystemExit
        return 0

    if end == "exits":
        with pytest.raises(SystemExit):
            source.run_scheduled(pull)
    else:
        source.run_scheduled(pull)
    for thread in closing:
        thread.join(PATIENCE_S)
    assert server.committed.get(("g", "t", 0), 0) == committed
    with pytest.raises(ClosedError):
        source.poll(0)


@pytest.mark.parametrize(("end", "committed"), [("returns", 3), ("raises", 0), ("cancelled", 0)])
@pytest.mark.parametrize("closer", ["pull", "another"])
async def test_a_scheduled_pull_of_coroutines_says_by_its_end_what_is_done(
    server: FakeServer, end: str, committed: int, closer: str
) -> None:
    server.append("t", 0, [b"%d" % number for number in range(3)])
    source = AsyncPullConsumer("g", namesrv=server.address)
    await source.assign([Q0])
    closing: list[asyncio.Task[None]] = []

    async def pull(_: MessageQueue, messages: Sequence[Message]) -> int:
        assert len(messages) == 3
        if closer == "pull":
            await source.close()
        else:
            closing.append(asyncio.create_task(source.close()))
            await async_wait_for(lambda: source._closed)
            await asyncio.sleep(0.1)
        if end == "raises":
            raise ValueError("broken")
        if end == "cancelled":
            raise asyncio.CancelledError
        return 0

    if end == "cancelled":
        with pytest.raises(asyncio.CancelledError):
            await source.run_scheduled(pull)
    else:
        await source.run_scheduled(pull)
    await asyncio.gather(*closing)
    assert server.committed.get(("g", "t", 0), 0) == committed
    with pytest.raises(ClosedError):
        await source.poll(0)


async def test_a_close_right_behind_the_end_of_a_scheduled_pull_of_coroutines_commits_it(server: FakeServer) -> None:
    """The task of `run_scheduled` has ended before the one that closes looks for it."""
    server.append("t", 0, [b"%d" % number for number in range(3)])
    source = AsyncPullConsumer("g", namesrv=server.address)
    await source.assign([Q0])
    begun, end = asyncio.Event(), asyncio.Event()

    async def pull(_: MessageQueue, messages: Sequence[Message]) -> int:
        assert len(messages) == 3
        begun.set()
        await end.wait()
        return 0

    running = asyncio.create_task(source.run_scheduled(pull))
    await asyncio.wait_for(begun.wait(), PATIENCE_S)
    end.set()
    await source.close()
    await running
    assert server.committed.get(("g", "t", 0), 0) == 3


def test_a_close_waits_for_a_scheduled_pull_within_the_request_time_out(server: FakeServer) -> None:
    server.append("t", 0, [b"0"])
    source = consumer(server, request_timeout_s=0.3)
    source.assign([Q0])
    begun, end = threading.Event(), threading.Event()

    def pull(_: MessageQueue, messages: Sequence[Message]) -> int:
        begun.set()
        assert end.wait(PATIENCE_S)
        return 0

    puller = threading.Thread(target=source.run_scheduled, args=(pull,))
    puller.start()
    assert begun.wait(PATIENCE_S)
    began_s = time.monotonic()
    source.close()
    assert 0.2 < time.monotonic() - began_s < 3
    assert not server.committed.get(("g", "t", 0)), "nobody knows whether it is done"
    end.set()
    puller.join(PATIENCE_S)
    assert not puller.is_alive()


def polled(way: str, loops: list[Any], source: PullConsumer) -> object:
    """Polls, or begins a loop, which is noted in `loops`."""
    if way == "poll":
        return source.poll(PATIENCE_S, max_messages=3)
    loops.append(iter(source))
    return next(loops[-1])


class Watching(Hook):
    """Is called around each `poll`."""

    def after_receive(self, context: ReceiveContext) -> None:
        self.count = len(context.messages)


@pytest.mark.parametrize("hooks", [[], [Watching()]], ids=["plain", "hooks"])
@pytest.mark.parametrize("way", ["poll", "loop"])
def test_a_poll_that_is_interrupted_anywhere_loses_nothing(server: FakeServer, hooks: list[Hook], way: str) -> None:
    server.append("t", 0, [b"%d" % number for number in range(10)])
    losses: list[tuple[str, list[int]]] = []
    loops: list[Any] = []
    with ExitStack() as stack:

        def made() -> PullConsumer:
            source = stack.enter_context(consumer(server, "", hooks=hooks))
            source.assign([Q0])
            assert len(source.poll(PATIENCE_S, max_messages=3)) == 3
            return source

        for place, source in interrupted_everywhere(made, partial(polled, way, loops)):
            found = [message.queue_offset for message in source.poll(PATIENCE_S, max_messages=7)]
            if found[:1] != [3]:
                losses.append((place, found))
            source.close()
        for loop in loops:
            loop.close()
    assert losses == []


@pytest.mark.parametrize("hooks", [[], [Watching()]], ids=["plain", "hooks"])
@pytest.mark.parametrize("way", ["poll", "loop"])
def test_a_signals_handler_that_closes_the_consumer_anywhere_in_a_poll_and_exits_commits_nothing_of_what_was_not_returned(
    server: FakeServer, hooks: list[Hook], way: str
) -> None:
    server.append("t", 0, [b"%d" % number for number in range(10)])
    losses: list[tuple[str, int]] = []
    ends: set[int] = set()
    loops: list[Any] = []
    with ExitStack() as stack:

        def made() -> PullConsumer:
            server.committed.clear()
            source = stack.enter_context(consumer(server, hooks=hooks))
            source.assign([Q0])
            assert len(source.poll(PATIENCE_S, max_messages=3)) == 3
            return source

        for place, _ in interrupted_everywhere(made, partial(polled, way, loops), SystemExit, PullConsumer.close):
            end = server.committed.get(("g", "t", 0), 0)
            ends.add(end)
            if end > 3:
                losses.append((place, end))
        for loop in loops:
            loop.close()
    assert losses == []
    assert 3 in ends


@pytest.mark.parametrize("place", ["exchange", "take"])
def test_a_poll_ends_with_nothing_where_a_signals_handler_closes_its_consumer(
    server: FakeServer, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.append("t", 0, [b"x"])
    with consumer(server) as source:
        source.assign([Q0])
        name = "encode_request" if place == "exchange" else "take"
        whole: Callable[..., Any] = getattr(source._state, name)

        def closed_half_way(*given: Any, **named: Any) -> Any:
            source.close()
            return whole(*given, **named)

        monkeypatch.setattr(source._state, name, closed_half_way)
        assert source.poll(PATIENCE_S) == []


def test_threads_share_a_consumer(server: FakeServer) -> None:
    fill(server, 500)
    got: list[Message] = []
    with consumer(server) as source:
        source.subscribe("t")

        def work() -> None:
            while len(got) < 1000:
                got.extend(source.poll(0.1, max_messages=10))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert len({(message.queue, message.queue_offset) for message in got}) == len(got) == 1000


# -- asyncio -------------------------------------------------------------------------------------------------------------


def async_consumer(server: FakeServer, group: str = "g", **options: object) -> AsyncPullConsumer:
    return AsyncPullConsumer(group, namesrv=server.address, **options)  # type: ignore[arg-type]


async def async_drain(source: AsyncPullConsumer, count: int) -> list[Message]:
    got: list[Message] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(got) < count:
            got.extend(await source.poll(0.5))
    return got


async def test_async_answers_stay_in_the_kernel_while_enough_waits(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight queues' answers of 300 KiB are there; two at most are in memory, and nothing is missing in the end."""
    monkeypatch.setattr(_pull_logic, "READ_AHEAD_MAX_BYTES", 1)
    server.topics["wide"] = 8
    for queue_id in range(8):
        server.append("wide", queue_id, [bytes(30_000)] * 10)
    most = 0
    got: list[Message] = []
    async with async_consumer(server) as source:
        await source.subscribe("wide")
        async with asyncio.timeout(PATIENCE_S):
            while len(got) < 80:
                got.extend(await source.poll(0.5, max_messages=7))
                await async_wait_for(lambda: server.called(_methods.PULL) >= 8)
                for _ in range(20):  # As if the user did something else meanwhile.
                    await asyncio.sleep(0)
                    most = max(most, len(source._state._line))
    assert most <= 2
    for queue_id in range(8):
        offsets = [message.queue_offset for message in got if message.queue_id == queue_id]
        assert offsets == list(range(10))


async def test_async_all_messages_come_once_and_in_order(server: FakeServer) -> None:
    fill(server, 1000)
    async with async_consumer(server) as source:
        await source.subscribe("t")
        got = await async_drain(source, 2000)
        for queue_id in (0, 1):
            bodies = [message.body for message in got if message.queue_id == queue_id]
            assert bodies == [b"%d-%d" % (queue_id, i) for i in range(1000)]
        assert await source.poll(0) == []
        assert source.transport == "remoting"
        assert await source.committed(Q0) is None
    assert server.committed == {("g", "t", 0): 1000, ("g", "t", 1): 1000}


async def test_async_hold_seek_and_questions(server: FakeServer) -> None:
    fill(server)
    async with async_consumer(server, begin="latest") as source:
        assert await source.queues("t") == (Q0, Q1)
        await source.assign([Q0])
        assert source.assignment() == (Q0,)
        assert await source.position(Q0) == 10
        assert await source.poll(0.05) == []
        asyncio.get_running_loop().call_later(0.05, lambda: server.append("t", 0, [b"x"]))
        assert [message.body for message in await source.poll(PATIENCE_S)] == [b"x"]
        source.seek(Q0, 8)
        assert [message.queue_offset for message in await source.poll(PATIENCE_S)] == [8, 9, 10]
        await source.seek_to_time(datetime.fromtimestamp(BASE_MS / 1000 + 9, UTC))
        assert await source.position(Q0) == 9
        await source.seek_to_begin()
        assert await source.position(Q0) == 0
        await source.seek_to_end()
        assert await source.position(Q0) == 11
        await source.commit()
        assert await source.committed(Q0) == 11
        assert (await source.min_offset(Q0), await source.end_offset(Q0)) == (0, 11)


async def test_async_iteration_gives_back_what_was_not_seen(server: FakeServer) -> None:
    server.append("t", 0, [b"%d" % i for i in range(6)])
    async with async_consumer(server) as source:
        await source.assign([Q0])
        messages: Callable[[], object] = source.__aiter__
        iterator = messages()
        seen = [await anext(iterator) for _ in range(3)]  # type: ignore[call-overload]
        await iterator.aclose()  # type: ignore[attr-defined]
        assert [message.body for message in seen] == [b"0", b"1", b"2"]
        assert [message.body for message in await source.poll(PATIENCE_S)] == [b"3", b"4", b"5"]


async def test_async_errors_that_pass_are_not_seen_and_others_are(server: FakeServer) -> None:
    fill(server)
    server.fail(_methods.PULL, RpcStatus(8, "busy", "SYSTEM_BUSY", retry_delay_ms=10))
    server.drop(_methods.PULL)
    async with async_consumer(server) as source:
        await source.subscribe("t")
        assert len(await async_drain(source, 20)) == 20
        server.fail(_methods.PULL, RpcStatus(15, "damaged", "CORRUPT_LOG"), times=2)
        source.seek(Q0, 0)
        with pytest.raises(CorruptLogError):
            await source.poll(PATIENCE_S)


async def test_async_grpc(server: FakeServer) -> None:
    fill(server)
    with FakeGrpcFront(server) as front:
        broker = server.as_broker()
        broker.grpc_address = front.address
        server.brokers = [broker]
        source = AsyncPullConsumer("g", namesrv=front.address, transport="grpc", hold_ms=200)
        async with source:
            await source.subscribe("t")
            assert len(await async_drain(source, 20)) == 20
            assert source.transport == "grpc"
        assert server.committed["g", "t", 1] == 10


async def test_async_closed(server: FakeServer) -> None:
    source = async_consumer(server)
    with pytest.raises(TopicNotFoundError):
        await source.subscribe("unknown")
    await source.subscribe("t")
    waiting = asyncio.ensure_future(source.poll(PATIENCE_S))
    await async_wait_for(lambda: server.called(_methods.PULL) == 2)  # One for each queue.
    await source.close()
    assert await waiting == []
    await source.close()
    with pytest.raises(ClosedError):
        await source.poll(0)


async def test_a_broker_that_is_down_is_two_lines_in_the_log_of_coroutines_too(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    fill(server)
    async with AsyncPullConsumer(
        "g", namesrv=server.address, auto_commit_interval_s=0.05
    ) as source:
        await source.subscribe("t")
        while not await source.poll(1.0):
            pass
        with caplog.at_level(logging.INFO, "protomq"):
            server.stop()
            for _ in range(20):
                await source.poll(0.05)
            server.start()
            server.append("t", 1, [b"back"])
            ends_s = time.monotonic() + PATIENCE_S
            while not any("broker-a answers again" in line for line in caplog.messages):
                await source.poll(0.2)
                assert time.monotonic() < ends_s
    about = [line for line in caplog.messages if "name server" not in line]
    assert [line.split(",")[0] for line in about] == [
        "broker broker-a does not answer",
        "broker broker-a answers again",
    ]


def test_a_listener_is_told_on_close_and_may_commit_then(server: FakeServer) -> None:
    class Commits(QueueListener):
        def __init__(self) -> None:
            self.revoked: list[MessageQueue] = []

        def on_revoked(self, queues: Sequence[MessageQueue]) -> None:
            self.revoked.extend(queues)
            source.commit({Q0: 3})

    fill(server)
    listener = Commits()
    source = PullConsumer("g", namesrv=server.address, auto_commit=False, listener=listener)
    source.subscribe("t")
    assert drain(source, 20)
    source.close()
    source.close()
    assert sorted(listener.revoked) == [Q0, Q1]
    with consumer(server) as after:
        assert after.committed(Q0) == 3


def test_an_async_listener_is_told_on_close_and_may_commit_then(server: FakeServer) -> None:
    class Commits(QueueListener):
        async def on_revoked(self, queues: Sequence[MessageQueue]) -> None:
            await self.source.commit(dict.fromkeys(queues, 4))

        source: AsyncPullConsumer

    async def run() -> None:
        listener = Commits()
        source = listener.source = AsyncPullConsumer(
            "g", namesrv=server.address, auto_commit=False, listener=listener
        )
        await source.subscribe("t")
        await source.poll()
        await source.close()

    fill(server)
    asyncio.run(run())
    with consumer(server) as after:
        assert [after.committed(queue) for queue in (Q0, Q1)] == [4, 4]
