"""A broker that the name server had and has no more: every command that would have asked it says so."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from protomq import Message, MessageQueue, PullConsumer, PushConsumer, QueueRange
from protomq.calls import Calls
from tests.support.cli import PROTOMQ, Finished, jsonl, run
from tests.support.namesrv import running_namesrv
from tests.support.waiting import wait_for
from tests.support.warm_servers import ServerPopen


def test_a_broker_that_the_name_server_has_lost_is_missed_until_it_is_forgotten(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(running_namesrv())
        namesrv = str(server.remoting)
        brokers = {name: stack.enter_context(_broker(tmp_path, name, namesrv)) for name in ("a", "b")}
        run("topic", "create", "t", "-q", "1", namesrv=namesrv)
        run("topic", "create", "only-b", "-q", "1", "-b", "b", namesrv=namesrv)
        run("topic", "create", "only-a", "-q", "1", "-b", "a", namesrv=namesrv)
        for name in brokers:
            run("send", "t", f"at {name}", "-b", name, "-k", "k", namesrv=namesrv)
        run("group", "commit", "g", "t", "-O", "end", namesrv=namesrv)
        brokers["b"].kill()
        wait_for(lambda: _missing_since(namesrv)["b"] is not None)
        assert _missing_since(namesrv)["a"] is None
        partial = [
            ["pull", "t", "-c", "0"],
            ["consume", "t", "--exit", "-O", "start"],
            ["group", "offsets", "g", "t"],
            ["group", "commit", "g", "t", "-O", "start"],
            ["group", "list"],
            ["message", "query", "t", "-k", "k"],
            ["topic", "describe", "t"],
            ["topic", "list"],
            ["topic", "create", "new", "-q", "1"],
            ["topic", "delete", "t", "--yes"],
            ["cluster", "status"],
        ]
        # Who waits for what comes is told at the start, and goes on.
        waiting = run("consume", "t", "-G", "g2", "-c", "1", namesrv=namesrv)
        assert "broker b is not registered any more" in waiting.stderr
        assert len(jsonl(waiting)) == 1
        for command in partial:
            shown = run(*command, "-o", "jsonl", namesrv=namesrv, code=7)
            error = json.loads(shown.stderr.splitlines()[-1])["error"]
            assert error["reason"] == "PARTIAL_RESULT"
            assert re.search(
                r"no answer from b \(broker b is not registered any more, since 20.*; it was at 127\.0\.0\.1:\d+\); "
                r"start b again, or `protomq cluster forget b` if it will not come back",
                error["message"],
            ), error
            assert {row.get("broker", "a") for row in jsonl(shown)} == {"a"}, command
        # What needs nothing of it is whole.
        run("pull", "only-a", namesrv=namesrv, code=0)
        run("group", "commit", "g", "only-a", "-O", "end", namesrv=namesrv)
        run("group", "lag", "g", "-t", "only-a", namesrv=namesrv)
        run("group", "reset", "g", "only-a", "--to", "end", "--create", namesrv=namesrv)
        run("cluster", "status", "-b", "a", namesrv=namesrv)
        # What needs it alone does not reach it.
        alone = [
            ["pull", "only-b"],
            ["pull", "t", "-b", "b"],
            ["send", "only-b", "x", "-b", "b"],
            ["consume", "only-b", "--exit"],
            ["group", "offsets", "g", "only-b"],
            ["topic", "describe", "only-b"],
            ["topic", "delete", "only-b", "--yes"],
            ["cluster", "status", "-b", "b"],
        ]
        for command in alone:
            shown = run(*command, "-o", "jsonl", namesrv=namesrv, code=3)
            error = json.loads(shown.stderr.splitlines()[-1])["error"]
            assert error["reason"] == "BROKER_MISSING", command
            assert "broker b is not registered any more, since 20" in error["message"]
            assert "`protomq cluster forget b`" in error["message"]
        assert _missing_of_calls(namesrv, "t", "only-b", "only-a", "") == [["b"], ["b"], [], ["b"]]
        run("cluster", "forget", "b", namesrv=namesrv)
        assert _missing_of_calls(namesrv, "t", "") == [[], []]
        assert list(_missing_since(namesrv)) == ["a"]
        run("topic", "list", namesrv=namesrv)
        assert "no broker b is missing" in run("cluster", "forget", "b", namesrv=namesrv, code=4).stderr
        assert "stop it first" in run("cluster", "forget", "a", namesrv=namesrv, code=6).stderr


def test_a_silent_broker_costs_only_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(running_namesrv())
        namesrv = str(server.remoting)
        brokers = {name: stack.enter_context(_broker(tmp_path, name, namesrv)) for name in ("a", "b")}
        run("topic", "create", "t", "-q", "1", namesrv=namesrv)
        run("group", "set", "g", "--retries", "0", namesrv=namesrv)
        for name in brokers:
            run("topic", "create", f"only-{name}", "-q", "1", "-b", name, namesrv=namesrv)
            run("send", "t", f"at {name}", "-b", name, namesrv=namesrv)
        with _failing("g", "t", namesrv):
            wait_for(lambda: len(jsonl(run("dlq", "show", "g", "-o", "jsonl", namesrv=namesrv, code=(0, 4)))) == 2)
        stack.enter_context(_failing("g", "only-a", namesrv))
        asked = PullConsumer.queue_range

        def dying(self: PullConsumer, queue: MessageQueue) -> QueueRange:
            found = asked(self, queue)
            if queue.broker_name == "b":
                brokers["b"].kill()
                brokers["b"].wait()
            return found

        with monkeypatch.context() as patch:
            patch.setattr(PullConsumer, "queue_range", dying)
            _check_show(namesrv, "b dies between two calls of one command")
        for when in ("b does not answer", "b is missed"):
            _check_show(namesrv, when)
            for command in (["dlq", "show", "g", "--id", "0" * 40], ["group", "info", "g", "nobody"], ["group", "locks", "nobody"]):
                assert _reason(run(*command, "-o", "jsonl", namesrv=namesrv, code=7)) == "PARTIAL_RESULT", (when, command)
            for transport in ("auto", "grpc"):
                pop = ["pop", "-c", "0", "-f", "%v\\n", "--transport", transport]
                popped = run(*pop, "t", "-G", f"{transport}-{when.replace(' ', '-')}", namesrv=namesrv, code=7)
                assert popped.stdout == "at a\n"
                assert "no answer from b" in popped.stderr
                assert run(*pop, "only-b", "-G", "g", namesrv=namesrv, code=3).stdout == ""
            # What needs nothing of it is whole.
            info = json.loads(run("group", "info", "g", "-o", "json", namesrv=namesrv).stdout)
            assert info["kind"] == "PushConsumer"
            reset = jsonl(run("group", "reset", "g", "t", "--to", "end", "-b", "a", "-o", "jsonl", namesrv=namesrv))
            assert [(row["broker"], row["lag"]) for row in reset] == [("a", 0)]
            wait_for(lambda: _missing_since(namesrv)["b"] is not None)


def _failing(group: str, topic: str, namesrv: str) -> PushConsumer:
    def fail(message: Message) -> None:
        raise ValueError(message.body)

    consumer = PushConsumer(group, namesrv=namesrv)
    consumer.subscribe(topic, fail)
    return consumer


def _check_show(namesrv: str, when: str) -> None:
    shown = run("dlq", "show", "g", "--timeout", "1s", "-o", "jsonl", namesrv=namesrv, code=7)
    assert [row["body"] for row in jsonl(shown)] == ["at a"], when
    assert _reason(shown) == "PARTIAL_RESULT"


def _reason(finished: Finished) -> str:
    return str(json.loads(finished.stderr.splitlines()[-1])["error"]["reason"])


def test_a_group_that_one_broker_refuses_to_delete_is_told_to_be_in_use(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(running_namesrv())
        namesrv = str(server.remoting)
        for name in ("a", "b"):
            stack.enter_context(_broker(tmp_path, name, namesrv))
            run("topic", "create", f"only-{name}", "-q", "1", "-b", name, namesrv=namesrv)
            run("group", "commit", "g", f"only-{name}", "-O", "end", namesrv=namesrv)
        stack.enter_context(_failing("g", "only-b", namesrv))
        wait_for(lambda: jsonl(run("group", "members", "g", "-o", "jsonl", namesrv=namesrv)))
        for deleted in (["a"], []):
            refused = run("group", "delete", "g", "--yes", "-o", "jsonl", namesrv=namesrv, code=6)
            assert [row["broker"] for row in jsonl(refused)] == deleted
            assert _reason(refused) == "GROUP_IN_USE"
            assert "add --force" in refused.stderr


def test_the_question_before_a_topic_goes_at_one_broker_counts_its_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("protomq_cli.topics.ask_to_delete", asked.append)
    with ExitStack() as stack:
        server = stack.enter_context(running_namesrv())
        namesrv = str(server.remoting)
        for name, count in (("a", 1), ("b", 3)):
            stack.enter_context(_broker(tmp_path, name, namesrv))
            run("topic", "create", "t", "-q", "1", "-b", name, namesrv=namesrv)
            run("send", "t", "x", "-b", name, "-c", str(count), namesrv=namesrv)
        run("topic", "delete", "t", "-b", "a", namesrv=namesrv)
        run("topic", "delete", "t", namesrv=namesrv)
    assert asked == ["Delete topic t with 1 messages on a?", "Delete topic t with 3 messages?"]


def test_a_topic_that_is_refused_where_it_exists_is_made_nowhere(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(running_namesrv())
        namesrv = str(server.remoting)
        for name in ("a", "b"):
            stack.enter_context(_broker(tmp_path, name, namesrv))
        run("topic", "create", "t", "-q", "1", "-b", "b", namesrv=namesrv)
        for permission in ("read-write", "none"):
            run("topic", "create", "t", "-q", "1", "-b", "b", "-p", permission, "-u", namesrv=namesrv)
            refused = run("topic", "create", "t", "-q", "4", "-o", "json", namesrv=namesrv, code=6)
            assert _reason(refused) == "TOPIC_EXISTS"
            assert [row["broker"] for row in jsonl(run("topic", "list", "-o", "jsonl", namesrv=namesrv))] == ["b"]


def test_who_creates_a_topic_where_only_others_have_it_is_told_how_its_groups_miss_nothing(tmp_path: Path) -> None:
    with running_namesrv() as server:
        namesrv = str(server.remoting)
        with _broker(tmp_path, "a", namesrv):
            assert run("topic", "create", "t", "-q", "1", namesrv=namesrv).stderr == "", "nobody has it"
            run("send", "t", "first", namesrv=namesrv)
            with _broker(tmp_path, "b", namesrv):
                assert run("topic", "create", "t", "-q", "1", "-b", "b", namesrv=namesrv).stderr == "", "it has no groups"
                run("topic", "delete", "t", "--yes", "-b", "b", namesrv=namesrv)
                run("group", "commit", "g", "t", "-O", "end", namesrv=namesrv)
                run("group", "set", "g", "--retries", "3", "-b", "a", namesrv=namesrv)
                (told,) = run("topic", "create", "t", "-q", "1", namesrv=namesrv).stderr.splitlines()
                assert "topic t is new at b" in told
                assert "they miss what comes before: g." in told
                run("send", "t", "second", "-b", "b", namesrv=namesrv)
                run(*re.findall("`protomq (.*)`", told)[0].split(), namesrv=namesrv)
                rows = jsonl(run("group", "lag", "g", "-o", "jsonl", namesrv=namesrv))
                assert [row["lag"] for row in rows if row["broker"] == "b"] == [1]
                assert run("topic", "create", "t", "-q", "1", namesrv=namesrv).stderr == ""


def test_a_missing_broker_that_is_back_is_missed_no_more(tmp_path: Path) -> None:
    with running_namesrv() as server:
        namesrv = str(server.remoting)
        with _broker(tmp_path, "a", namesrv), _broker(tmp_path, "b", namesrv) as gone:
            gone.terminate()  # An orderly stop takes as much out of the answers as any other.
            assert gone.wait(20) == 0
            assert "it was stopped" in run("topic", "list", namesrv=namesrv, code=7).stderr
            with _broker(tmp_path, "b", namesrv):
                run("topic", "list", namesrv=namesrv)
                for name in ("grpc_address", "remoting_address"):
                    row = jsonl(run("cluster", "list", "-o", "jsonl", namesrv=namesrv))[0]
                    for command in (["topic", "list"], ["send", "t", "x"], ["consume", "t"]):
                        refused = run(*command, namesrv=str(row[name]), code=2)
                        assert "is no name server, most likely a broker" in refused.stderr


def test_every_name_server_is_told_to_forget(tmp_path: Path) -> None:
    with running_namesrv() as one, running_namesrv() as other:
        both = [str(one.remoting), str(other.remoting)]
        with _broker(tmp_path, "a", *both):
            run("topic", "create", "only-a", namesrv=both[0])
        for namesrv in both:
            wait_for(lambda: _missing_since(namesrv).get("a") is not None)  # noqa: B023
        nowhere = run("send", "only-a", "x", namesrv=both[0], code=3).stderr
        assert "broker a is not registered any more" in nowhere
        run("cluster", "forget", "a", namesrv=";".join(both))
        assert [_missing_since(namesrv) for namesrv in both] == [{}, {}]


def _missing_of_calls(namesrv: str, *topics: str) -> list[list[str]]:
    """For each topic what a connector is told."""
    with Calls(namesrv=namesrv) as calls:
        return [[gone.broker.broker_name for gone in calls.missing_brokers(topic)] for topic in topics]


@contextmanager
def _broker(folder: Path, name: str, *namesrv: str) -> Iterator[subprocess.Popen[str]]:
    """Ready, and killed at the end."""
    config = folder / f"{name}.yaml"
    config.write_text(
        f"data_dir: {folder}/{name}\nbroker_name: {name}\nnamesrv: {json.dumps(namesrv)}\n"
        "listen: {grpc_port: 0, remoting_port: 0}\nstore: {segment_size_bytes: 4194304}\n"
    )
    command = [*PROTOMQ, "broker", "-c", str(config)]
    with ServerPopen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("ready ")
            yield process
        finally:
            process.kill()


def _missing_since(namesrv: str) -> dict[str, object]:
    rows = jsonl(run("cluster", "list", "-o", "jsonl", namesrv=namesrv))
    return {str(row["broker"]): row["missing_since"] for row in rows}
