"""A listener that forks, and whose child comes back to the consumer: the child ends there, and consumes nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from protomq import AsyncPushConsumer, PushConsumer
from protomq.errors import ConfigurationError

PROGRAM = """
import os, sys
from protomq import AsyncPushConsumer, Message, PushConsumer
from protomq.hooks import Hook
from protomq.testing import FakeGroup

kind, *ways = sys.argv[1:]
parent = os.getpid()


def say(text):
    os.write(1, ("" if os.getpid() == parent else "child ").encode() + text.encode() + b"\\n")


class Says(Hook):
    def after_consume(self, context):
        say(f"hook {len(context.messages)}")


def leave(way):
    print("not flushed yet")
    if way == "raise":
        raise ValueError("of the child")
    if way == "text":
        sys.exit("what went wrong")
    return sys.exit(int(way)) if way.isdigit() else way == "false" and False


def listen(given):
    message = given[0] if isinstance(given, list) else given
    say(message.body.decode())
    if message.body == b"0":
        for way in ways:
            child = os.fork()
            if not child:
                return leave(way)
            say(f"code {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")


async def listen_async(given):
    return listen(given)


make = AsyncPushConsumer if "async" in kind else PushConsumer
consumer = make("g", orderly="orderly" in kind, hooks=[Says()] if "hooks" in kind else ())
consumer.subscribe("t", listen_async if "coroutine" in kind else listen, batch_size=2 if "batch" in kind else None)
group = FakeGroup(consumer)
for number in range(3):
    group.send("t", b"%d" % number, queue_id=number)
group.deliver()
say("end")
"""

WAYS = {
    "return": (0, ""),
    "false": (0, ""),
    "raise": (1, "ValueError: of the child"),
    "0": (0, ""),
    "7": (7, ""),
    "text": (1, "what went wrong"),
}
"""How a child comes back: its exit code, and what it says."""


@pytest.mark.parametrize(
    "kind",
    ["sync", "sync coroutine", "async", "async coroutine", "sync orderly", "sync batch orderly", "sync hooks", "async coroutine hooks"],
)
@pytest.mark.parametrize("way", WAYS)
def test_a_child_ends_where_it_comes_back(kind: str, way: str) -> None:
    done, (code, said) = finished(kind), WAYS[way]
    lines = [line for line in done.stdout.splitlines() if not line.startswith("hook")]
    first, *of_children = lines[:-3]
    assert [first, *lines[-3:]] == ["0", "1", "2", "end"]
    assert len(of_children) == 2 * len(WAYS)
    begin = 2 * list(WAYS).index(way)
    assert of_children[begin : begin + 2] == ["not flushed yet", f"code {code}"]
    assert said in done.stderr
    assert done.returncode == 0


@cache
def finished(kind: str) -> subprocess.CompletedProcess[str]:
    """Once for all ways, each of which has a child of its own: the start costs more than the children."""
    return subprocess.run([sys.executable, "-c", PROGRAM, kind, *WAYS], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("make", [PushConsumer, AsyncPushConsumer])
@pytest.mark.parametrize("starting", [False, True])
def test_in_a_forked_child_nothing_of_a_consumer_is_waited_for(make: Callable[[str], Any], starting: bool) -> None:
    consumer = make("g")
    # As if it ran in the parent, where another thread holds the lock.
    consumer._starting, consumer._consumer = (object(), None) if starting else (None, object())
    lock = getattr(consumer, "_lock", None)
    if lock is not None:
        lock.acquire()
    child = os.fork()
    if not child:
        signal.alarm(20)
        try:
            for call in (consumer.suspend, consumer.resume, lambda: consumer.set_concurrency(3)):
                with pytest.raises(ConfigurationError, match="in the process that has started it"):
                    call()
            left = consumer.stop()
            os._exit(asyncio.run(left) if asyncio.iscoroutine(left) else left)
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    consumer._starting = consumer._consumer = None
