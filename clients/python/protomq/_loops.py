"""Loop: messages of a `poll` that a loop hands on one by one. Which of them it has handed on decides what may be committed.

A loop may end by `break` or an error. Somebody may commit in its midst, or close the consumer. Each time the messages that were handed on
are finished, and no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import length_hint

from ._message import Message
from ._types import MessageQueue


class Loop:
    """One `for` over a consumer.

    Attributes:
        left: hands on the messages. That of a list: no step of the loop costs anything more.
        moved: queues in which somebody has sought since: what is left of them says nothing any more.
    """

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self.left: Iterator[Message] = iter(self._messages)
        self.moved: set[MessageQueue] = set()
        self._taken: list[Message] = []

    def fill(self, messages: Iterable[Message]) -> None:
        """More, behind what is left."""
        self._messages = [*self.left, *messages]
        self.left = iter(self._messages)
        self.moved.clear()

    @property
    def is_through(self) -> bool:
        """Whether it hands on nothing more of what it was given, as it has handed on all, or was left."""
        return not length_hint(self.left)

    def unseen(self) -> list[Message]:
        """What was not handed on, also where the loop was left."""
        return self._taken + self._messages[len(self._messages) - length_hint(self.left) :]

    def unseen_offsets(self) -> dict[MessageQueue, int]:
        """By queue, the first message that was not handed on and may be yet."""
        first: dict[MessageQueue, int] = {}
        for message in self._messages[len(self._messages) - length_hint(self.left) :]:
            if message.queue not in self.moved:
                first.setdefault(message.queue, message.queue_offset)
        return first

    def take_unseen(self) -> list[Message]:
        """What was not handed on, and is not any more."""
        taken = list(self.left)
        self._taken += taken
        return [message for message in taken if message.queue not in self.moved]
