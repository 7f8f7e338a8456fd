"""What producers that nobody closed still have to send when the interpreter ends.

Python joins the sending threads first, and they send what waits in their lines. Then `finish_at_exit` of every living producer runs.
It reports what is left, or has failed unseen, in the log and in a RuntimeWarning, which Python shows by default.
"""

from __future__ import annotations

import atexit
import logging
import weakref
from typing import Protocol

from ._warnings import warn

logger = logging.getLogger("protomq.producer")


class Finishing(Protocol):
    """What may have something to send when the interpreter ends."""

    def finish_at_exit(self) -> int:
        """Waits a moment for what is on its way; how many messages are lost, or nobody knows of."""


_finishing: weakref.WeakSet[Finishing] = weakref.WeakSet()


def call_at_exit(producer: Finishing) -> None:
    """Has `producer.finish_at_exit()` called when the interpreter ends, if the producer lives then."""
    _finishing.add(producer)


def warn_of_loss(count: int, when: str) -> None:
    """Tells that messages were given to a producer and may not be stored."""
    text = (
        f"{count} message{'s were' if count > 1 else ' was'} not sent, or nobody knows: {when}, "
        "and the producer was not closed; use `with`, or call flush() or close()"
    )
    warn(logger, text)


@atexit.register
def _at_exit() -> None:
    lost = sum(producer.finish_at_exit() for producer in list(_finishing))
    if lost:
        warn_of_loss(lost, "the interpreter ended")
