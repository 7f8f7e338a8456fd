"""The end of a forked child that comes back from a function of the program's to the consumer that has called it.

The child has a copy of its parent's consumer, and the one thread that forked. If that thread went on, the child would consume messages that
are with its parent. So it ends here, as `multiprocessing` ends its children.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from dataclasses import replace
from typing import Any, NoReturn

from . import _forks
from ._push_results import Listener


def end_child(error: BaseException | None = None) -> NoReturn:
    """Ends this process like a program that has returned from its main function, or raised `error`, without the parent's `atexit`."""
    code = 1
    try:
        code = _said(error)
        for thread in threading.enumerate():  # Of the child's own: no other survives a fork.
            if not thread.daemon and thread is not threading.current_thread():
                thread.join()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(code)


def _said(error: BaseException | None) -> int:
    """The exit code, after what Python says on stderr at such an end."""
    if error is None:
        return 0
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
        return 1
    if error.code is None or isinstance(error.code, int):
        return int(error.code or 0) & 0xFF
    sys.stderr.write(f"{error.code}\n")
    return 1


def ending_children(listener: Listener) -> Listener:
    """The listener; a child that was forked in its call ends with the call."""
    call = listener.call

    def call_here(given: Any) -> Any:
        fork_count = _forks.fork_count
        try:
            result = call(given)
        except BaseException as error:
            if _forks.fork_count != fork_count:
                end_child(error)
            raise
        if _forks.fork_count != fork_count:
            end_child()
        return result

    async def call_here_async(given: Any) -> Any:
        fork_count = _forks.fork_count
        try:
            result = await call(given)
        except BaseException as error:
            if _forks.fork_count != fork_count:
                end_child(error)
            raise
        if _forks.fork_count != fork_count:
            end_child()
        return result

    return replace(
        listener, call=call_here_async if listener.is_coroutine else call_here, function=listener.function or call
    )
