"""Wakes a thread that sleeps in epoll."""

from __future__ import annotations

import os


class WakeUp:
    """An event descriptor to poll for. Any thread may set it.

    It closes with the object and not before. A post to a stopped lane must not write into a descriptor that belongs to
    somebody else by then.
    """

    __slots__ = ("descriptor",)

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def set(self) -> None:
        """Makes the descriptor readable."""
        os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        """Takes what has been set; the descriptor must be readable."""
        os.eventfd_read(self.descriptor)

    def __del__(self) -> None:
        os.close(self.descriptor)
