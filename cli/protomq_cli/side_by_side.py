"""Questions to several brokers at the same time: who waits for those that are silent waits once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def side_by_side(calls: Sequence[Callable[[], T]]) -> list[Callable[[], T]]:
    """For each call, in their order, what gives its result or raises its error. They run at the same time."""
    if len(calls) < 2:
        return list(calls)
    futures: list[Future[T]] = []
    for call in calls:
        future: Future[T] = Future()
        # A daemon: one that waits for a silent broker holds up nobody who presses Ctrl-C.
        threading.Thread(target=_run, args=(call, future), name="protomq-asks", daemon=True).start()
        futures.append(future)
    return [future.result for future in futures]


def _run(call: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
