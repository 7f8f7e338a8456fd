"""Choosing a queue again: of messages whose key or selector has chosen one that is gone, or may not be written any more. Steps.

A queue goes while its topic shrinks; it may not be written while its broker is drained. The name server says so moments later than the
broker. So the route is looked up until it leads elsewhere, or the time is over. A message that names its queue keeps the error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ._outgoing import OutgoingMessage
from ._retry import AWAY_PAUSE_S, BACKOFF_MAX_S
from ._send_core import SendCore
from ._steps import ForgetRoute, Pause, Steps
from .errors import NotPermittedError, ProtomqError, QueueNotFoundError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._selectors import QueueSelector
    from ._types import Body, MessageQueue

CHOSE_BADLY: Final = (QueueNotFoundError, NotPermittedError)
"""The errors after which another queue may be chosen."""


class Choices:
    """The choices of one message or batch. `is_chosen`: a key or a selector chooses; `is_named`: it names its queue."""

    __slots__ = ("_core", "_deadline_s", "_is_chosen", "_is_named", "_pause_s", "_topic", "_was_missing")

    def __init__(
        self, core: SendCore, topic: str, deadline_s: float, *, is_chosen: bool, is_named: bool
    ) -> None:
        self._core = core
        self._topic = topic
        self._deadline_s = deadline_s
        self._is_chosen = is_chosen
        self._is_named = is_named
        self._pause_s = 0.0
        self._was_missing = False

    def again(self, error: ProtomqError) -> Steps[None]:
        """Returns when the queue is to be chosen again; the route is looked up before. Raises the error if there is no other choice."""
        # Not definite: an earlier try may have stored it. The sequences of a new choice would not be recognised.
        if self._is_named or not error.definite:
            raise error
        if isinstance(error, QueueNotFoundError) and not self._was_missing:
            self._was_missing = True
            return
        if not self._is_chosen or not self._core.options.retries:
            raise error
        if self._core.clock() + self._pause_s >= self._deadline_s:
            raise error
        if self._pause_s:
            yield Pause(self._pause_s)
        self._pause_s = min(self._pause_s * 2 or AWAY_PAUSE_S, BACKOFF_MAX_S)
        yield ForgetRoute(self._topic)


def choices_of(
    core: SendCore, message: OutgoingMessage, selector: QueueSelector | None, deadline_s: float
) -> Choices:
    """Those of one message."""
    is_chosen = bool(message.sharding_key) or selector is not None
    return Choices(core, message.topic, deadline_s, is_chosen=is_chosen, is_named=message.queue is not None)


def choices_of_batch(
    core: SendCore,
    topic: str,
    messages: Sequence[Body | OutgoingMessage],
    queue: MessageQueue | None,
    sharding_key: str | None,
    deadline_s: float,
) -> Choices:
    """Those of a batch of which nothing is stored. One message that names its queue leaves all where they are."""
    own = [message for message in messages if isinstance(message, OutgoingMessage)]
    is_chosen = bool(sharding_key) or any(message.sharding_key for message in own)
    is_named = queue is not None or any(message.queue is not None for message in own)
    return Choices(core, topic, deadline_s, is_chosen=is_chosen, is_named=is_named)
