"""Tells when something blocks an event loop, and what: a listener that is a coroutine function and never waits.

A thread asks the loop for a sign of life. Where it gets none for a second, it looks at what the loop's thread is doing. Nothing is added
to what runs in the loop but four callbacks a second.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Final

from ._push_results import Listener

logger = logging.getLogger("protomq")

BLOCKED_S: Final = 1.0


class LoopWatch:
    """Watches the running loop until `close`."""

    def __init__(self, listeners: Callable[[], Iterable[Listener]], blocked_s: float = BLOCKED_S) -> None:
        self._listeners = listeners
        self._blocked_s = blocked_s
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="protomq-loop-watch", daemon=True).start()

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()

    def _watch(self) -> None:
        alive = threading.Event()
        while not self._closed.is_set():
            alive.clear()
            try:
                self._loop.call_soon_threadsafe(alive.set)
            except RuntimeError:
                return  # The loop is closed.
            if not alive.wait(self._blocked_s) and not self._closed.is_set():
                self._tell()
                # One that is closed drops what it was to call.
                while not alive.wait(self._blocked_s) and not self._loop.is_closed():
                    pass
            self._closed.wait(self._blocked_s / 4)

    def _tell(self) -> None:
        frame = sys._current_frames().get(self._thread_id)
        codes = {code: listener for listener in self._listeners() if (code := _code_of(listener.function or listener.call))}
        found = _listener_in(frame, codes)
        if frame is None or found is None:
            return  # Somebody else's: it has been a listener's loop for no longer than others'.
        place = traceback.extract_stack(frame)[-1]
        logger.warning(
            "%s blocks the event loop for more than %g s, at %s:%s in %s. Await there, or make the listener a plain function, which gets "
            "a thread",
            found.name, self._blocked_s, place.filename, place.lineno, place.name,
        )  # fmt: skip


def _listener_in(frame: FrameType | None, codes: dict[CodeType, Listener]) -> Listener | None:
    while frame is not None:
        if frame.f_code in codes:
            return codes[frame.f_code]
        frame = frame.f_back
    return None


def _code_of(call: object) -> CodeType | None:
    function = getattr(call, "__func__", call)
    if not hasattr(function, "__code__"):
        function = vars(type(call)).get("__call__")
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None
