"""The one history format: what every process asked for, what it was told, and what was done to the system meanwhile.

JSON lines, one event each:

    process   who: "p3" a producer, "r1" a reader, "nemesis" who does harm, "checker" who reads everything at quiet points
    type      invoke, then one of: ok (it happened), fail (it did not and will not), info (it may have happened, for ever)
    op        send, poll, scan, crash, delete; see `checker/`
    args      what was asked for; repeated in the second event, so that each can be read alone
    result    what came back; of a failure: {"reason", "code", "message"}
    ns        monotonic clock
    epoch     how often the system has been started
    call      number that an invoke and its end share

An event of the nemesis is a fact: one event of type "info" and no invoke.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

EventType = Literal["invoke", "ok", "fail", "info"]


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a history."""

    process: str
    type: EventType
    op: str
    args: dict[str, Any]
    result: dict[str, Any]
    ns: int
    epoch: int
    call: int


class Call:
    """An operation that is under way: exactly one of its methods ends it."""

    __slots__ = ("_args", "_history", "_number", "_op", "_process")

    def __init__(
        self, history: History, process: str, op: str, args: dict[str, Any], number: int
    ) -> None:
        self._history = history
        self._process = process
        self._op = op
        self._args = args
        self._number = number

    def ok(self, **result: Any) -> None:
        """It happened."""
        self._end("ok", result)

    def fail(self, reason: str, message: str = "", code: int = 0) -> None:
        """It did not happen and will not."""
        self._end("fail", {"reason": reason, "message": message, "code": code})

    def info(self, reason: str, message: str = "", code: int = 0) -> None:
        """Nobody knows."""
        self._end("info", {"reason": reason, "message": message, "code": code})

    def _end(self, type_: EventType, result: dict[str, Any]) -> None:
        self._history.add(self._process, type_, self._op, self._args, result, self._number)


@dataclass(slots=True)
class History:
    """Collects events; any thread. `epoch` is set by who restarts the system."""

    events: list[Event] = field(default_factory=list)
    epoch: int = 0
    now_ns: Callable[[], int] = time.monotonic_ns
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _calls: int = 0

    def invoke(self, process: str, op: str, **args: Any) -> Call:
        """An operation begins."""
        with self._lock:
            self._calls += 1
            number = self._calls
        self.add(process, "invoke", op, args, {}, number)
        return Call(self, process, op, args, number)

    def fact(self, op: str, **args: Any) -> None:
        """Something was done to the system."""
        self.add("nemesis", "info", op, args, {}, 0)

    def add(
        self,
        process: str,
        type_: EventType,
        op: str,
        args: dict[str, Any],
        result: dict[str, Any],
        call: int,
    ) -> None:
        """Writes an event down."""
        with self._lock:
            self.events.append(
                Event(process, type_, op, args, result, self.now_ns(), self.epoch, call)
            )

    def save(self, path: Path) -> None:
        """Writes JSON lines."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(asdict(event)) + "\n" for event in self.events))


def load_history(lines: Iterable[str]) -> list[Event]:
    """Reads JSON lines back."""
    return [Event(**json.loads(line)) for line in lines if line.strip()]
