"""Who does not answer, or refuses, and what cannot be read: one warning when it begins, one when it is over, nothing between. Any thread.

A consumer asks each broker for each queue again and again; without this a broker that is down for a night fills the log.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Final

from ._retry import is_away
from .errors import NoRouteError, ProtomqError, ServerError, TopicNotFoundError, TransportError

logger = logging.getLogger("protomq")

NAME_SERVERS: Final = "the name server"
"""In the log."""


class Outages:
    """What went wrong with whom, since when."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since_s: dict[str, float] = {}
        self.told_of: set[str] = set()
        """Topics about which the user was warned: that they do not exist is no news."""

    def is_no_news(self, topic: str, error: ProtomqError) -> bool:
        """Whether the user knows it already."""
        return isinstance(error, TopicNotFoundError) and topic in self.told_of

    def failed(self, peer: str, topic: str, error: ProtomqError) -> None:
        """A call about a topic failed and will be made again. The first of a row is told.

        What only the topic suffers from is told apart from a peer that is down.
        """
        if self.is_no_news(topic, error):
            return
        is_no_broker_there = peer == NAME_SERVERS and is_away(error)
        if is_no_broker_there or not isinstance(error, TransportError | NoRouteError):
            peer = _about(peer, topic)
        if peer not in self._since_s:
            self._since_s[peer] = self._clock()
            if is_no_broker_there:
                what = "knows of no broker that is there"
            elif isinstance(error, ServerError):
                what = f"answers {error.reason}"
            else:
                what = "does not answer"
            logger.warning("%s %s, trying again: %s", peer, what, error)

    def answered(self, peer: str, topic: str, asked_s: float = math.inf) -> bool:
        """A call went well. `asked_s`: when it was sent. A held one may be answered long after the peer was back.

        Whether the peer did not answer until now.
        """
        if not self._since_s:  # Nearly always.
            return False
        is_back = False
        for name in (peer, _about(peer, topic)):
            since_s = self._since_s.pop(name, None)
            if since_s is not None:
                over_s = min(self._clock(), asked_s)
                logger.warning("%s answers again, after %.1f s", name, max(over_s - since_s, 0.0))
                is_back = is_back or name == peer
        return is_back

    def queues_changed(self, topic: str, count: int) -> None:
        """A subscribed topic has `count` queues to read now. Warns once if it has none, unless a broker has said why."""
        name = f"topic {topic}"
        if count:
            since_s = self._since_s.pop(name, None)
            if since_s is not None:
                logger.warning("%s can be read again, after %.1f s", name, self._clock() - since_s)
        elif not any(told == name or told.endswith(_about("", topic)) for told in self._since_s):
            self._since_s[name] = self._clock()
            logger.warning("%s", unreadable_text(topic))


def unreadable_text(topic: str) -> str:
    """The warning about a topic of which nothing can be read."""
    return (
        f"topic {topic} has no queue that can be read, by its permission or its brokers': the consumer waits; "
        f"`protomq topic describe {topic} -o json` shows the permission"
    )


def _about(peer: str, topic: str) -> str:
    return f"{peer}, asked about topic {topic},"
