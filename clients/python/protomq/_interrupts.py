"""What a signal handler raises is for the program, whatever it is: a TimeoutError of an alarm is no time-out of the network.

A handler may raise at any place in the main thread. Ctrl-C is told by its class. Other errors are told by where they come from: Python
gives a handler the frame that it interrupts.
"""

from __future__ import annotations

import threading


def is_interrupt(error: BaseException) -> bool:
    """Whether it is no Exception, or a signal handler has raised it: its place says nothing of what was done there."""
    return not isinstance(error, Exception) or comes_of_signal(error)


def comes_of_signal(error: BaseException) -> bool:
    """Whether a signal handler has raised it."""
    trace = error.__traceback__
    if trace is None or threading.get_ident() != threading.main_thread().ident:
        return False
    while trace.tb_next is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        for value in trace.tb_frame.f_locals.values():
            # *arguments are a tuple.
            if value is frame or (type(value) is tuple and any(each is frame for each in value)):
                return True
    return False


def interrupt_behind(error: BaseException) -> BaseException | None:
    """What a signal handler has raised, where `error` came of it. None: of nothing.

    `threading.Condition.wait` does not take its lock back where it is interrupted right behind letting it go. Then whoever waited lets
    it go once more, which is an error.
    """
    if not is_interrupt(error) and "lock" not in str(error):
        return None  # A program may call in its `except KeyboardInterrupt`: what fails there has that one behind it, too.
    seen: BaseException | None = error
    while seen is not None and not is_interrupt(seen):
        seen = seen.__context__
    return seen
