"""A group whose only name server is gone: the members go on, share again when one dies, and take in a new one once it is back."""

from __future__ import annotations

from pathlib import Path

import pytest

from protomq import Admin, Producer, PushConsumer
from protomq.errors import NoRouteError
from tests.support.body_files import bodies, member_process
from tests.support.named_brokers import running
from tests.support.namesrv import running_namesrv
from tests.support.waiting import PATIENCE_S, wait_for

MEMBERS = {
    "pull": """
import os, sys
from protomq import PullConsumer
line = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
with PullConsumer("g", namesrv=sys.argv[1], auto_commit_interval_s=0.1) as member:
    member.subscribe("t")
    for message in member:
        os.write(line, message.body + b"\\n")
""",
    "threads": """
import os, sys
from protomq import PushConsumer
line = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
member = PushConsumer("g", namesrv=sys.argv[1], commit_interval_s=0.1)
member.subscribe("t", lambda message: os.write(line, message.body + b"\\n") and None)
member.run()
""",
    "coroutines": """
import asyncio, os, sys
from protomq import AsyncPushConsumer
line = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
async def listen(message):
    os.write(line, message.body + b"\\n")
async def main():
    member = AsyncPushConsumer("g", namesrv=sys.argv[1], commit_interval_s=0.1)
    member.subscribe("t", listen)
    await member.run()
asyncio.run(main())
""",
}


def knows(admin: Admin) -> bool:
    """Whether the name server is back, and its broker too."""
    try:
        return "t" in admin.list_topic_names()
    except NoRouteError:
        return False


@pytest.mark.parametrize("kind", MEMBERS)
def test_members_go_on_without_a_name_server_and_take_over_and_one_joins_when_it_is_back(kind: str, tmp_path: Path) -> None:
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    with running_namesrv() as names, running(tmp_path / "broker", names.remoting, register_interval_ms=200):
        namesrv, port = str(names.remoting), names.remoting.port
        with (
            Admin(namesrv=namesrv) as admin,
            Producer(namesrv=namesrv) as producer,
            member_process(MEMBERS[kind], namesrv, one) as first,
            member_process(MEMBERS[kind], namesrv, two),
        ):
            admin.create_topic("t", write_queues=4, read_queues=4)

            def shares() -> list[int]:
                return sorted(sum(queue.topic == "t" for queue in found.queues) for found in admin.group_members("g"))

            def send(first: int) -> None:
                for number in range(first, first + 40):
                    producer.send("t", b"%d" % number)

            wait_for(lambda: shares() == [2, 2], PATIENCE_S)
            producer.queues("t")  # Who knows no route yet cannot send.
            names.process.kill()
            names.process.wait()
            send(0)
            wait_for(lambda: len(bodies(one, two)) == 40, PATIENCE_S)
            assert all(map(bodies, (one, two)))
            first.kill()
            send(40)
            wait_for(lambda: len(bodies(one, two)) == 80, PATIENCE_S)
            late = PushConsumer("g", namesrv=namesrv)
            late.subscribe("t", lambda _: None)
            with pytest.raises(NoRouteError):
                late.start()
            with running_namesrv(remoting_port=port):
                wait_for(lambda: knows(admin), PATIENCE_S)
                with member_process(MEMBERS[kind], namesrv, three):
                    wait_for(lambda: shares() == [2, 2], PATIENCE_S)
                    send(80)
                    wait_for(lambda: len(bodies(one, two, three)) == 120, PATIENCE_S)
    # What the killed one had not committed came again, nothing else.
    counts = bodies(one, two, three)
    assert {body for body, count in counts.items() if count > 1} <= set(bodies(one))
    assert set(bodies(two, three)) >= {str(number) for number in range(40, 120)}
