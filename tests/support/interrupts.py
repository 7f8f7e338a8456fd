"""Ctrl-C at each place where it can come: the interpreter looks for signals where a function begins, and behind each call of C code."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, Final

PLACES_MAX: Final = 2_000


class _InterruptAt:
    """A profiler that raises an error at one of these places, in the SDK's code of this thread, as a signal handler does."""

    def __init__(self, number: int, error: type[BaseException], handler: Callable[[], object]) -> None:
        self._left = number
        self._error = error
        self._handler = handler
        self.place = ""

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event not in ("call", "c_return") or "/clients/python/protomq/" not in frame.f_code.co_filename:
            return
        self._left -= 1
        if not self._left:
            self.place = f"{frame.f_code.co_qualname}:{frame.f_lineno} {event}"
            sys.setprofile(None)
            self._handler()
            raise self._error


def interrupted_everywhere(
    make: Callable[[], Any],
    work: Callable[[Any], object],
    error: type[BaseException] = KeyboardInterrupt,
    handler: Callable[[Any], object] = lambda _: None,
) -> Iterator[tuple[str, Any]]:
    """What `make` made, after `work` on it was interrupted: at its first place, at its second, and so on to its last; and the place.

    `handler`: what the signal's handler does with it before it raises the error.
    """
    gc.collect()
    for number in range(1, PLACES_MAX):
        made = make()
        interrupt = _InterruptAt(number, error, partial(handler, made))
        # Nobody hears of an interrupt while objects that other tests have left are collected.
        gc.disable()
        sys.setprofile(interrupt)
        try:
            work(made)
        except error:
            assert interrupt.place
        else:
            assert not interrupt.place, f"nobody heard of it: {interrupt.place}"
            return
        finally:
            sys.setprofile(None)
            gc.enable()
        yield interrupt.place, made
    raise AssertionError("the work has no end")
