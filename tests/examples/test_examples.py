"""Every example is run as its reader would run it, against a real broker, and must print what it promises."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from protomq.testing import Broker
from tests.support.small_segments import small_segments_broker

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STAND_IN = Path(__file__).resolve().parents[1] / "support/grpcurl.py"


def run_example(broker: Broker, name: str, *arguments: str, **environment: str) -> str:
    """Its output; fails with what it wrote to stderr."""
    interpreter = [sys.executable, "-W", "error"] if name.endswith(".py") else ["bash"]
    finished = subprocess.run(
        [*interpreter, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "PROTOMQ_NAMESRV_ADDR": broker.remoting_address, **environment},
        check=False,
    )
    assert finished.returncode == 0, f"{name}: exit code {finished.returncode}\n{finished.stderr}"
    return finished.stdout


def test_send_receive() -> None:
    with Broker() as broker:  # of its own: the README's programs use the same topic
        lines = run_example(broker, "send_receive.py").splitlines()
    assert lines[0].startswith("sent <SendResult SEND_OK greetings/")
    assert lines[1:] == ["received k1 hello"]


def test_group_members(protomq_server: Broker) -> None:
    assert run_example(protomq_server, "group_members.py").splitlines() == [
        "two members: 2 and 2 queues",
        "the brokers know 2 members",
        "one member: 4 queues",
        "received 8 orders",
    ]


def test_retry(protomq_server: Broker) -> None:
    lines = run_example(protomq_server, "retry.py").splitlines()
    error = "no account: 100 EUR to nobody"
    assert lines == [
        *(f"delivery {number} failed: {error}" for number in (1, 2, 3)),
        f"dead letter from payments: ValueError: {error}",
        "replayed: 1",
    ]


def test_push_consumer(protomq_server: Broker) -> None:
    lines = run_example(protomq_server, "push_consumer.py").splitlines()
    assert sorted(lines[:-2]) == [
        "N14228 to IAH left 2 minutes late",
        "N24211 to IAH left 4 minutes late",
        "N39463 to ORD left 4 minutes early, said the second time",
    ]
    assert lines[-2:] == ["stopped, 0 left", "dead letter: a flight without a plane: no tail number"]


@pytest.mark.parametrize(
    "name",
    [
        "allocations", "async_producer", "async_push", "batch", "bodies", "broadcast", "cel_filter", "delayed",
        "fastapi_app", "fifo_pop", "filter_module",
        "group_members", "group_settings", "hooks", "message_track", "naive_client", "ordered_by_key", "orderly_push", "own_codec",
        "pop_handler", "push_consumer", "queue_listener", "request_reply", "reset_offsets", "retry", "scheduled_pull", "seek_by_time",
        "simple_consumer", "spans", "sql_filter", "tag_filter", "transaction", "worker",
    ],
)  # fmt: skip
def test_without_a_server_an_example_says_what_to_start(name: str) -> None:
    finished = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), "127.0.0.1:1"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PROTOMQ_NAMESRV_ADDR": "127.0.0.1:1"},
        check=False,
    )
    assert finished.returncode == 1
    assert "a server is to be started first: protomq standalone" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_send_receive_has_ten_lines_of_code() -> None:
    text = (EXAMPLES / "send_receive.py").read_text()
    code = [line for line in text.splitlines() if line.strip() and not line.startswith('"""')]
    assert len(code) <= 10


def test_an_example_without_a_server_says_so_in_one_traceback_that_ends_with_it() -> None:
    words = [sys.executable, str(EXAMPLES / "send_receive.py")]
    environment = {**os.environ, "PROTOMQ_NAMESRV_ADDR": "127.0.0.1:1"}
    finished = subprocess.run(words, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert finished.stderr.count("Traceback (most recent call last)") == 1
    assert finished.stderr.splitlines()[-1] == (
        "protomq.errors.NoRouteError: no name server answers (127.0.0.1:1): 127.0.0.1:1: [Errno 111] Connection refused"
    )


def test_async_producer(protomq_server: Broker) -> None:
    assert re.match(
        r"sent 1000 messages to [1-8] queues, [\d,]+ a second\n",
        run_example(protomq_server, "async_producer.py"),
    )


def test_batch(protomq_server: Broker) -> None:
    lines = run_example(protomq_server, "batch.py").splitlines()
    assert re.fullmatch(r"stored 100 in queue \d, offsets 0 to 99", lines[0])
    assert (
        len([line for line in lines[1:] if re.fullmatch(r"[0-9A-F]{40} at offset \d+", line)]) == 3
    )


def test_sql_filter(protomq_server: Broker) -> None:
    assert run_example(protomq_server, "sql_filter.py").splitlines() == [
        "MQ4576 from LGA, 101 minutes late",
        "UA856 from EWR, 144 minutes late",
        "UA1086 from LGA, 134 minutes late",
    ]


def test_simple_consumer(protomq_server: Broker) -> None:
    lines = run_example(protomq_server, "simple_consumer.py").splitlines()
    assert lines == ["gave back bag 2", *(f"loaded bag {number}" for number in range(4))]


def test_pop_handler(protomq_server: Broker) -> None:
    assert run_example(protomq_server, "pop_handler.py").splitlines() == [
        "5 done, 1 failed",
        "N804JB is a dead letter: it stands in the hangar",
    ]


def test_tag_filter(protomq_server: Broker) -> None:
    output = run_example(protomq_server, "tag_filter.py")
    assert output == "AA flight 1141\nDL flight 461\n"


def test_delayed(protomq_server: Broker) -> None:
    for _ in range(2):  # What the first run has left is not of the second.
        assert run_example(protomq_server, "delayed.py").splitlines() == [
            "tomorrow's reminder is taken back",
            "now",
            "in one: the broker's level 1",
            "in two seconds",
        ]


def test_transaction(protomq_server: Broker) -> None:
    lines = run_example(protomq_server, "transaction.py").splitlines()
    assert lines == [
        "12A booked",
        "12B booked",
        "12A was taken: nobody is told",
        "told: 12A is booked",
        "told: 12B is booked",
        "told: 14C is booked",
    ]



def test_bodies(protomq_server: Broker) -> None:
    assert run_example(protomq_server, "bodies.py").splitlines() == [
        "B6 to BQN, -1 minutes (Departure)",
        "UA to IAH, 2 minutes (Departure)",
        "dead letter: CLT - SchemaError: Departure: dep_delay: Input should be a valid integer, unable to parse string as an integer",
    ]


def test_broadcast(protomq_server: Broker) -> None:
    assert run_example(protomq_server, "broadcast.py").splitlines() == [
        f"{gate}: {change}"
        for gate in ("gate C70", "gate D41")
        for change in ("AA1141 leaves from D40", "UA1545 leaves from C71")
    ]


def test_worker(protomq_server: Broker) -> None:
    assert run_example(protomq_server, "worker.py").splitlines() == [
        "AA1141 rolled for 12 minutes",
        "MQ4576 rolled for 30 minutes",
        "UA1545 rolled for 17 minutes",
        "UA1714 rolled for 21 minutes",
        "the worker ended with 0",
    ]


def test_fastapi_app(protomq_server: Broker) -> None:
    assert run_example(protomq_server, "fastapi_app.py").splitlines() == [
        "ready: True",
        "booked: SEND_OK",
        "ticket: 12A",
        "ticket: 1A",
    ]


def test_hooks(protomq_server: Broker) -> None:
    assert run_example(protomq_server, "hooks.py").splitlines() == [
        "DL 3: A1 (from desk-7)", "DL 7: A9 (from desk-7)", "UA 12: B4 (from desk-7)",
        "sent 4, consumed 3, failed 0",
    ]  # fmt: skip


def test_request_reply(protomq_server: Broker) -> None:
    assert run_example(protomq_server, "request_reply.py").splitlines() == [
        "EWR-LAX costs 269.94 USD",
        "JFK-SFO costs 284.46 USD",
        "LGA-ORD costs 80.63 USD",
        "EWR-MOON: no reply",
    ]


def test_ordered_by_key(protomq_server: Broker) -> None:
    lines = run_example(protomq_server, "ordered_by_key.py").splitlines()
    assert lines == [f"{plane} -> boarding, taxi, take-off, landing" for plane in ("N14228", "N24211", "N619AA")]


def test_seek_by_time(protomq_server: Broker) -> None:
    output = run_example(protomq_server, "seek_by_time.py")
    assert re.fullmatch(
        r"stored since [\d:]{8}: \['late', 'late', 'late', 'late', 'late'\]\n", output
    )


def test_naive_client(protomq_server: Broker) -> None:
    named = run_example(protomq_server, "naive_client.py", PROTOMQ_NAMESRV_ADDR=protomq_server.grpc_address).splitlines()
    lines = run_example(protomq_server, "naive_client.py", protomq_server.grpc_address).splitlines()
    assert [named[0], lines[0]] == ["sent 3 to queue 0 from offset 0", "sent 3 to queue 0 from offset 3"]
    for first, printed in ((0, named), (3, lines)):
        assert printed[1:] == [f"offset {first + n}: message {n} (key key-{n})" for n in range(3)]


def test_decode_segment(tmp_path: Path) -> None:
    with small_segments_broker(tmp_path / "broker") as broker:
        run_example(broker, "send_receive.py")
        # Also under a running broker: what is appended is never changed.
        segment = next(tmp_path.glob("**/commitlog/*"))
        text = run_example(broker, "decode_segment.py", str(segment))
        # What `make demo` sets up is enough: no protoc is on the PATH of most.
        without = run_example(broker, "decode_segment.py", str(segment), PATH="/nowhere")
        damaged = tmp_path / "damaged"
        # A key, not a body.
        damaged.write_bytes(segment.read_bytes().replace(b"\x12\x02k1", b"\x12\x02k3", 1))
        with pytest.raises(AssertionError, match="is not what its producer wrote"):
            run_example(broker, "decode_segment.py", str(damaged))
        for other in ("/etc/passwd", "/nonexist", "/dev/null", str(tmp_path)):
            with pytest.raises(AssertionError, match=f"decode_segment: {other} is no segment"):
                run_example(broker, "decode_segment.py", other)
    assert without.replace(" ", "") == text.replace(" ", "")
    assert re.search(r'^records \{\n  body: "hello"\n  keys: "k1"\n', text, re.MULTILINE)
    assert re.search(r"^seals \{\n  epoch: 1\n", text, re.MULTILINE)


def test_orderly_push(protomq_server: Broker) -> None:
    assert run_example(protomq_server, "orderly_push.py").splitlines() == [
        "22R: UA1545 (try 1), UA1714 (try 3), AA1141 (try 1)",
        "31L: B6725 (try 1), DL461 (try 1)",
    ]


def test_async_push(protomq_server: Broker) -> None:
    assert run_example(protomq_server, "async_push.py").splitlines() == [
        "tracked 6 planes, several at a time",
        "stored 6 positions; 1 was rejected",
    ]


def test_allocations(protomq_server: Broker) -> None:
    assert run_example(protomq_server, "allocations.py").splitlines() == [
        "Average        anna: 0 1 2, ben: 3 4 5, cleo: 6 7",
        "Circle         anna: 0 3 6, ben: 1 4 7, cleo: 2 5",
        "ConsistentHash anna: 3, ben: 0 1 2 5, cleo: 4 6 7",
        "Configured     this member has 2 3",
    ]


def test_spans(protomq_server: Broker) -> None:
    assert run_example(protomq_server, "spans.py").splitlines() == [
        "the message carries traceparent",
        "send traced-flights: PRODUCER, group: nobody's",
        "process traced-flights: CONSUMER, group: radar",
        "the second is a child of the first: True",
    ]


def test_queue_listener(protomq_server: Broker) -> None:
    lines = run_example(protomq_server, "queue_listener.py").splitlines()
    assert re.fullmatch(r"committed \d queues", lines[0])
    assert lines[1:] == ["AA1141 at 2,000 feet", "DL461 at 9,000 feet"]


def test_cel_filter(protomq_server: Broker) -> None:
    lines = run_example(protomq_server, "cel_filter.py").splitlines()
    assert lines == ["AA1141 to MIA", "B6507 to FLL", "UA1714 to IAH", "UA856 to SFO"]


def test_filter_module(protomq_server: Broker) -> None:
    assert run_example(protomq_server, "filter_module.py") == "late: MQ4576\nlate: UA856\n"


def test_fifo_pop(protomq_server: Broker) -> None:
    lines = run_example(protomq_server, "fifo_pop.py").splitlines()
    assert lines == [f"{plane} -> unload, clean, refuel, board" for plane in ("N14228", "N24211", "N619AA")]


def test_message_track(protomq_server: Broker) -> None:
    assert run_example(protomq_server, "message_track.py").splitlines() == [
        "attempt 2: JFK to LAX",
        "SENT in suitcases: belt-7 CONSUMED",
        "RETRY in %RETRY%belt-7: belt-7 CONSUMED the belt stands",
        "trace: SENT by check-in",
        "trace: CONSUMED by belt-7",
        "trace: CONSUMED by belt-7",
    ]


def test_reset_offsets(protomq_server: Broker) -> None:
    assert run_example(protomq_server, "reset_offsets.py").splitlines() == [
        "report: ['EWR-LAX 270', 'JFK-SFO 284']",
        "report, again: ['EWR-LAX 270', 'JFK-SFO 284']",
        "audit, from where report is: ['LGA-ORD 81']",
        "lag of report: 1",
        "without its backlog: 0",
    ]


def test_group_settings(protomq_server: Broker) -> None:
    assert run_example(protomq_server, "group_settings.py").splitlines() == [
        "the kitchen is closed",
        "it is open, with 3 retries",
        "180 meals to gate D8",
    ]


def test_scheduled_pull(protomq_server: Broker) -> None:
    assert run_example(protomq_server, "scheduled_pull.py").splitlines() == [
        "5 rows, from 1000 kg on",
        "5 rows, from 1005 kg on",
        "2 rows, from 1010 kg on",
    ]


def test_own_codec(protomq_server: Broker) -> None:
    for _ in range(2):
        assert run_example(protomq_server, "own_codec.py") == "text/x-position Position(plane='N14228', feet=35000)\n"


def test_fake_group(protomq_server: Broker) -> None:
    assert run_example(protomq_server, "fake_group.py").splitlines() == [
        "12A is paid at the second try, 10 seconds later",
        "dead letter: a ticket without a seat",
        "the first member has all queues, and billed 2C and 3C again",
    ]


def test_grpcurl(protomq_server: Broker, tmp_path: Path) -> None:
    if shutil.which("grpcurl") is None:
        stand_in = tmp_path / "grpcurl"
        stand_in.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STAND_IN}" "$@"\n')
        stand_in.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    output = run_example(protomq_server, "grpcurl.sh", protomq_server.grpc_address, PATH=path)
    assert "\nprotomq.v1.SendService\n" in output
    assert "RecallMessage" in output
    assert '"status": "SEND_STATUS_SEND_OK"' in output
    assert '"status": "PULL_STATUS_FOUND"' in output
    assert '"body": "aGVsbG8="' in output
    assert '"topic": "by-hand"' in output


def test_each_example_is_tested_and_listed() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    listed = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.glob("*.*"):
        if path.name != "README.md":
            assert f'"{path.name}"' in tests, path.name
            assert f"({path.name})" in listed, path.name


def test_each_example_has_topics_of_its_own() -> None:
    """They share one broker, and none is to read what another one sent."""
    topics = [
        found[1]
        for path in sorted(EXAMPLES.glob("*.py"))
        if (found := re.search(r'^TOPIC\b.*? = "([^"]+)"', path.read_text(), re.MULTILINE))
    ]
    assert len(topics) > 10
    assert len(set(topics)) == len(topics), sorted(topics)
