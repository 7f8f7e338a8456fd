"""Threads for functions that block, or never return: unlike an executor's they hold up no exit of the interpreter. Any thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

_R = TypeVar("_R")


class DaemonThreads:
    """Starts a thread where none is idle: whoever submits bounds how many there are."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._idle_count = 0
        self._number = 0
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()

    def submit(self, function: Callable[[], _R]) -> Future[_R]:
        """Runs it on a thread; done when it has returned. What it returns or raises is the future's."""
        future: Future[_R] = Future()
        with self._lock:
            if self._idle_count:
                self._idle_count -= 1
                starts = False
            else:
                self._number += 1
                starts = True
        self._work.put((future, function))
        if starts:
            threading.Thread(
                target=self._run, name=f"{self._name}-{self._number}", daemon=True
            ).start()
        return future

    def close(self) -> None:
        """Idle threads end, and those that are at work end after it."""
        for _ in range(self._number):
            self._work.put(None)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, function = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
            del item, future, function
            with self._lock:
                self._idle_count += 1
