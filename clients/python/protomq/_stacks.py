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


class Stacks(NamedTuple):
    """`is_cut`: there are more, or one of them has more calls."""

    stacks: list[Stack]
    is_cut: bool


def thread_stacks() -> Stacks:
    """Of all threads of the process, but for the one that asks."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    found = [
        (names.get(ident, f"thread {ident}"), traceback.extract_stack(frame))
        for ident, frame in sys._current_frames().items()
        if ident != own
    ]
    return _listed(found)


def task_stacks() -> Stacks:
    """Of all tasks of the running loop, but for the one that asks; none where no loop runs."""
    # Where it is not in use, it is not loaded for this.
    asyncio: Any = sys.modules.get("asyncio")
    if asyncio is None:
        return Stacks([], False)
    try:
        current = asyncio.current_task()
    except RuntimeError:
        return Stacks([], False)
    tasks = [task for task in asyncio.all_tasks() if task is not current]
    found = []
    for task in tasks:
        lines = [(frame, frame.f_lineno) for frame in _frames(task.get_coro())]
        found.append((task.get_name(), traceback.StackSummary.extract(iter(lines))))
    return _listed(found)


def _frames(coroutine: Any) -> Iterator[FrameType]:
    """Of a coroutine, and of what it awaits; what is awaited at last may be no coroutine."""
    while isinstance(coroutine, CoroutineType) and coroutine.cr_frame is not None:
        yield coroutine.cr_frame
        coroutine = coroutine.cr_await


def _listed(found: list[tuple[str, traceback.StackSummary]]) -> Stacks:
    listed = sorted([Stack(name, "".join(traceback.format_list(summary[-FRAMES_MAX:]))) for name, summary in found])
    is_cut = len(listed) > STACKS_MAX or any(len(summary) > FRAMES_MAX for _, summary in found)
    return Stacks(listed[:STACKS_MAX], is_cut)
