"""A group of push consumers in processes of their own: they share, one is killed, and its messages come to the other."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protomq import Admin, Producer
from protomq.testing import Broker
from tests.support.waiting import PATIENCE_S, wait_for

MEMBER = """
import os, sys
from protomq import PushConsumer

namesrv, seen = sys.argv[1:]
consumer = PushConsumer("g", namesrv=namesrv, commit_interval_s=0.1)
line = os.open(seen, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

@consumer.on("t")
def listen(message):
    os.write(line, message.body + b"\\n")

consumer.run()
"""


@contextmanager
def push_process(broker: Broker, seen: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A member whose listener writes down each body."""
    process = subprocess.Popen([sys.executable, "-c", MEMBER, broker.namesrv, str(seen)])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def bodies(*files: Path) -> Counter[str]:
    return Counter(line for file in files if file.exists() for line in file.read_text().splitlines())


def shares(admin: Admin) -> list[int]:
    """How many queues of the topic each member has."""
    return sorted(sum(queue.topic == "t" for queue in member.queues) for member in admin.group_members("g"))


def test_a_killed_members_messages_come_to_the_other_and_nobody_is_said_to_differ(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    with Broker() as broker, Admin(namesrv=broker.namesrv) as admin, Producer(namesrv=broker.namesrv) as producer:
        admin.create_topic("t", write_queues=8, read_queues=8)
        with push_process(broker, one) as first, push_process(broker, two):
            wait_for(lambda: shares(admin) == [4, 4], PATIENCE_S)
            for number in range(400):
                producer.send("t", b"%d" % number)
            wait_for(lambda: len(bodies(one)) and len(bodies(two)), PATIENCE_S)
            first.kill()
            for number in range(400, 800):
                producer.send("t", b"%d" % number)
            wait_for(lambda: len(bodies(one, two)) == 800, PATIENCE_S)
        told = broker.log_text()
    assert max(bodies(one, two).values()) <= 2
    assert "not alike" not in told
