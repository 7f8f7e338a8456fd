"""The demo's group: two members in processes of their own share a topic, one is killed with SIGKILL, and nothing is lost.

What a member had finished and not committed comes again, to the other one. Both counts are checked and printed.
"""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from protomq_cli.exits import CliError, ExitCode
from protomq_cli.units import format_ms

STALL_S: Final = 30.0
"""If nobody is given a message within this time, the missing ones are lost."""
POLLS: Final = 256
"""A topic is shared out in so many polls, more or less."""
KILLED_AFTER: Final = 8
"""The first member is killed when it has finished one of so many messages."""

Run = tuple[str, int, int]
"""(queue, first offset, end offset)."""


@dataclass(slots=True)
class Handled:
    """Which messages were given to members, and how often."""

    times: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(int)))

    def add(self, runs: Iterable[Run]) -> int:
        """Takes what a member was given; the number of messages."""
        added = 0
        for queue, first_offset, end_offset in runs:
            times = self.times[queue]
            for offset in range(first_offset, end_offset):
                times[offset] += 1
            added += end_offset - first_offset
        return added

    @property
    def message_count(self) -> int:
        """Different messages."""
        return sum(len(times) for times in self.times.values())

    @property
    def repeat_count(self) -> int:
        """Deliveries beyond the first of each message."""
        return sum(times - 1 for queue in self.times.values() for times in queue.values())


@dataclass(slots=True)
class Shared:
    """How it went. `takeover_s`: from the kill to the first message of a queue of the killed member."""

    message_count: int
    repeat_count: int
    killed_after: int
    queue_count: int
    takeover_s: float

    def line(self) -> str:
        """For people."""
        return (
            f"group of two members: one was killed (-9) after {self.killed_after:,} messages, the other took its {self.queue_count} queues "
            f"over in {format_ms(self.takeover_s)} ms.\n{self.message_count:,} messages handled, none lost, {self.repeat_count:,} of them "
            "twice (handled by the killed one, not yet committed)"
        )


class _Member:
    """A process of demo_member, and what it said last."""

    def __init__(self, namesrv: str, group: str, topic: str, count_max: int) -> None:
        command = [sys.executable, "-m", "protomq_cli.demo_member", namesrv, group, topic, str(count_max)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.queues: list[str] = []
        self.handled = 0

    def read(self, handled: Handled) -> list[Run]:
        """What it says now. Raises CliError if it ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise CliError(ExitCode.FAILURE, "CHECK_FAILED", "demo failed: a member of the group ended by itself")
        said = json.loads(line)
        self.queues = said["queues"]
        runs: list[Run] = [(queue, first, end) for queue, first, end in said["runs"]]
        self.handled += handled.add(runs)
        return runs

    def go_on(self) -> None:
        """It may commit, and poll again."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """It leaves the group; afterwards it is gone in any case."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(STALL_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextmanager
def _two_members(namesrv: str, group: str, topic: str, count_max: int) -> Iterator[tuple[_Member, _Member]]:
    members = [_Member(namesrv, group, topic, count_max)]
    try:
        members.append(_Member(namesrv, group, topic, count_max))
        yield members[0], members[1]
    finally:
        for member in members:
            member.end()


def share(namesrv: str, group: str, topic: str, total: int) -> Shared:
    """Has two members consume the `total` messages of a topic, and kills the first one. Raises CliError if messages are missing."""
    handled = Handled()
    with (
        _two_members(namesrv, group, topic, max(1, total // POLLS)) as (first, second),
        selectors.DefaultSelector() as selector,
    ):
        for each in (first, second):
            assert each.process.stdout is not None
            selector.register(each.process.stdout, selectors.EVENT_READ, each)
        killed_s = takeover_s = 0.0
        orphans: set[str] = set()
        waiting: list[_Member] = []
        last_s = time.monotonic()
        while handled.message_count < total or not takeover_s:
            if time.monotonic() - last_s > STALL_S:
                raise CliError(
                    ExitCode.FAILURE,
                    "CHECK_FAILED",
                    f"demo failed: the group handled {handled.message_count:,} of {total:,} messages, then nothing for {STALL_S:g} s",
                )
            for key, _ in selector.select(STALL_S):
                member: _Member = key.data
                runs = member.read(handled)
                waiting.append(member)
                if runs:
                    last_s = time.monotonic()
                if killed_s and not takeover_s and any(queue in orphans for queue, _, _ in runs):
                    takeover_s = time.monotonic() - killed_s
                shares = bool(first.queues and second.queues) and not set(first.queues) & set(second.queues)
                if member is first and runs and shares and first.handled >= total // KILLED_AFTER:
                    selector.unregister(key.fileobj)
                    orphans = set(first.queues)
                    first.process.kill()
                    killed_s = time.monotonic()
                    waiting.remove(first)
                # Until both have a share they take turns, else the one that came first would be through before the other is there.
                if killed_s or shares or len(waiting) == 2:
                    for each in waiting:
                        each.go_on()
                    waiting.clear()
        return Shared(handled.message_count, handled.repeat_count, first.handled, len(orphans), takeover_s)
