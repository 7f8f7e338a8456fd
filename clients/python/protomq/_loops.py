"""Loop: messages of a `poll` that a loop hands on one by one. Which of them it has handed on decides what may be committed.

A loop may end by `break` or an error. Somebody may commit in its midst, or close the consumer. Each time the messages that were handed on
are finished, and no others. Another loop that asks for more says nothing of the message that this one is at.
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
        is_over: the program has left it, so that what it has not handed on comes again. Any thread may say so: the garbage collector does.
    """

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self.left: Iterator[Message] = iter(self._messages)
        self.moved: set[MessageQueue] = set()
        self.is_over = False
        self._taken: list[Message] = []

    def fill(self, messages: Iterable[Message]) -> None:
        """More, behind what is left."""
        self._messages = [*self._unmoved(self.left), *messages]
        self.left = iter(self._messages)
        self._taken.clear()
        self.moved.clear()

    def came_back(self) -> None:
        """It asks for more: what it has handed on is finished."""
        self.fill(())

    @property
    def held_count(self) -> int:
        """Messages that it keeps in memory."""
        return len(self._messages)

    def open_offsets(self, *, with_current: bool = False) -> dict[MessageQueue, int]:
        """By queue, the first message that was not handed on. `with_current`: the one that the loop is at counts as such."""
        first: dict[MessageQueue, int] = {}
        for message in self.unseen(with_current=with_current):
            if message.queue not in self.moved:
                first.setdefault(message.queue, message.queue_offset)
        return first

    @property
    def is_through(self) -> bool:
        """Whether it hands on nothing more of what it was given, as it has handed on all, or was left."""
        return not length_hint(self.left)

    def unseen(self, *, with_current: bool = False) -> list[Message]:
        """What was not handed on, also where the loop was left. `with_current`: and the message that it is at."""
        start = len(self._messages) - length_hint(self.left) - len(self._taken)
        return self._messages[max(start - with_current, 0) :]

    @property
    def next_queue(self) -> MessageQueue | None:
        """Of the message that it hands on next; None: there is none."""
        left_count = length_hint(self.left)
        return self._messages[-left_count].queue if left_count else None

    def take_unseen(self) -> list[Message]:
        """What was not handed on, and is not any more. Called again, it says the same."""
        self._taken.extend(self.left)  # In one instruction: Ctrl-C finds it done, or nothing of it.
        return self._unmoved(self._taken)

    def _unmoved(self, messages: Iterable[Message]) -> list[Message]:
        return [message for message in messages if message.queue not in self.moved]
