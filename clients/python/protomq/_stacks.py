"""What threads and tasks are doing, as text: for whoever asks a client that runs somewhere. Values of the running process; no I/O.

Bounded: STACKS_MAX stacks, FRAMES_MAX frames of each, the innermost ones.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator
from types import CoroutineType, FrameType
from typing import Any, Final, NamedTuple

STACKS_MAX: Final = 200
FRAMES_MAX: Final = 40


class Stack(NamedTuple):
    """One thread or task, and the calls it is in, the innermost last."""

    name: str
    text: str


def thread_stacks() -> list[Stack]:
    """Of all threads of the process, but for the one that asks."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    found = [
        Stack(names.get(ident, f"thread {ident}"), _text(traceback.extract_stack(frame)))
        for ident, frame in sys._current_frames().items()
        if ident != own
    ]
    return sorted(found)[:STACKS_MAX]


def task_stacks() -> list[Stack]:
    """Of all tasks of the running loop, but for the one that asks; none where no loop runs."""
    # Where it is not in use, it is not loaded for this.
    asyncio: Any = sys.modules.get("asyncio")
    if asyncio is None:
        return []
    try:
        current = asyncio.current_task()
    except RuntimeError:
        return []
    tasks = [task for task in asyncio.all_tasks() if task is not current]
    found = []
    for task in tasks:
        lines = [(frame, frame.f_lineno) for frame in _frames(task.get_coro())]
        found.append(Stack(task.get_name(), _text(traceback.StackSummary.extract(iter(lines)))))
    return sorted(found)[:STACKS_MAX]


def _frames(coroutine: Any) -> Iterator[FrameType]:
    """Of a coroutine, and of what it awaits; what is awaited at last may be no coroutine."""
    while isinstance(coroutine, CoroutineType) and coroutine.cr_frame is not None:
        yield coroutine.cr_frame
        coroutine = coroutine.cr_await


def _text(summary: traceback.StackSummary) -> str:
    return "".join(traceback.format_list(summary[-FRAMES_MAX:]))
