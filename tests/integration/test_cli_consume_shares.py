"""`protomq consume` as a member of a group whose queues another member has: it waits for them, and says so."""

from __future__ import annotations

import secrets
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from protomq import MessageQueue, PullConsumer
from protomq.testing import Broker
from tests.support.cli import PROTOMQ, environment_with, run
from tests.support.waiting import wait_for


@pytest.fixture
def topic(protomq_server: Broker) -> str:
    """One queue with the messages 0 to 9."""
    namesrv, name = protomq_server.remoting_address, f"shared-{secrets.token_hex(4)}"
    run("topic", "create", name, "-q", "1", namesrv=namesrv)
    run("send", name, namesrv=namesrv, stdin="".join(f"{n}\n" for n in range(10)))
    return name


@contextmanager
def waiting(namesrv: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`consume` in a process of its own, once it has said that it waits."""
    with subprocess.Popen(
        [*PROTOMQ, "consume", *arguments, "-f", "%v"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment_with(namesrv),
    ) as process:
        try:
            assert process.stderr is not None
            assert "waiting for 1 queue that this member of group readers does not have" in process.stderr.readline()
            yield process
        finally:
            process.kill()


@contextmanager
def member(namesrv: str, topic: str) -> Iterator[tuple[PullConsumer, MessageQueue]]:
    """A member that has the only queue."""
    with PullConsumer("readers", namesrv=namesrv, auto_commit=False) as consumer:
        consumer.subscribe(topic)
        wait_for(lambda: bool(consumer.poll(0.1)))
        [queue] = consumer.assignment()
        yield consumer, queue


@pytest.mark.parametrize(("offset", "shown"), [([], "56789"), (["-O", "8"], "89"), (["-O", "2:4"], "23")])
def test_a_member_without_a_queue_goes_on_when_the_other_leaves(
    protomq_server: Broker, topic: str, offset: list[str], shown: str
) -> None:
    namesrv = protomq_server.remoting_address
    with member(namesrv, topic) as (other, queue):
        other.commit({queue: 5})
        with waiting(namesrv, topic, "-G", "readers", "-e", *offset) as process:
            other.close()
            assert process.communicate(timeout=60) == (shown, "")
            assert process.returncode == 0


def test_a_member_without_a_queue_ends_when_the_other_has_consumed_all(
    protomq_server: Broker, topic: str
) -> None:
    namesrv = protomq_server.remoting_address
    with member(namesrv, topic) as (other, queue), waiting(namesrv, topic, "-G", "readers", "-e") as process:
        other.commit({queue: 10})
        assert process.communicate(timeout=60) == ("", "")
        assert process.returncode == 0


@pytest.mark.parametrize("options", [["-e"], ["-O", "2:4"], ["-O", "2:4", "-e"]])
def test_a_member_that_waits_for_a_queue_of_a_topic_that_is_made_again_prints_nothing_of_the_new_one(
    protomq_server: Broker, topic: str, options: list[str]
) -> None:
    namesrv = protomq_server.remoting_address
    with member(namesrv, topic) as (other, _), waiting(namesrv, topic, "-G", "readers", *options) as process:
        run("topic", "delete", topic, "--yes", namesrv=namesrv)
        run("topic", "create", topic, "-q", "1", namesrv=namesrv)
        run("send", topic, namesrv=namesrv, stdin="new\n" * 10)
        other.close()
        shown, said = process.communicate(timeout=60)
    assert (shown, process.returncode) == ("", 6)
    assert f"topic {topic!r} was deleted and created again" in said.splitlines()[-1]
    assert said.endswith("; start again, to read the topic as it is now\n")
    assert said.count("start again") == 1


def test_two_members_with_a_filter_and_an_end_both_end(protomq_server: Broker) -> None:
    namesrv, name = protomq_server.remoting_address, f"shared-{secrets.token_hex(4)}"
    run("topic", "create", name, "-q", "2", namesrv=namesrv)
    for queue in ("0", "1"):
        run("send", name, "--queue", queue, "--tag", "a", namesrv=namesrv, stdin="1\n2\n3\n")
        run("send", name, "--queue", queue, "--tag", "b", namesrv=namesrv, stdin="x\n")
    command = [*PROTOMQ, "consume", name, "-G", "readers", "-e", "-g", "a", "-f", "%v"]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment_with(namesrv)) for _ in range(2)
    ]
    try:
        shown = "".join(process.communicate(timeout=60)[0] for process in processes)
    finally:
        for process in processes:
            process.kill()
    assert sorted(shown) == list("112233")


def test_a_member_that_was_sent_to_an_offset_follows_a_reset_of_its_group(
    protomq_server: Broker, topic: str
) -> None:
    namesrv = protomq_server.remoting_address
    command = [*PROTOMQ, "consume", topic, "-G", "reset-later", "-O", "start", "-c", "13", "-f", "%v\n"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment_with(namesrv)) as process:
        try:
            assert process.stdout is not None
            shown = [process.stdout.readline() for _ in range(10)]
            run("group", "reset", "reset-later", topic, "--to", "7", namesrv=namesrv)
            shown += process.stdout.read().splitlines(keepends=True)
        finally:
            process.kill()
    assert "".join(shown).split() == [*"0123456789", *"789"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_what_was_printed_before_a_signal_is_committed(
    protomq_server: Broker, topic: str, number: signal.Signals, code: int
) -> None:
    namesrv, group = protomq_server.remoting_address, f"signal-{number}"
    command = [*PROTOMQ, "consume", topic, "-G", group, "-f", "%v\n"]
    # Else a line can be read before it counts as printed.
    environment = {name: value for name, value in environment_with(namesrv).items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            shown = [process.stdout.readline() for _ in range(10)]
            process.send_signal(number)
            assert process.wait(60) == code
        finally:
            process.kill()
    assert "".join(shown).split() == list("0123456789")
    assert run("consume", topic, "-G", group, "-e", namesrv=namesrv).stdout == ""
