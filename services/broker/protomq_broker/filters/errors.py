"""What is wrong with a filter: the expression or module, never the message that it is asked about."""

from __future__ import annotations


class FilterError(Exception):
    """A filter that cannot be used.

    Attributes:
        position: characters before the place that is wrong.
        line, column: of that place, from 1.
        expected: what could have stood there, as a reader would write it; empty where that is not the matter.
    """

    def __init__(
        self, message: str, text: str = "", position: int = 0, expected: tuple[str, ...] = ()
    ) -> None:
        position = min(position, len(text))
        self.position = position
        self.line = text.count("\n", 0, position) + 1
        self.column = position - (text.rfind("\n", 0, position) + 1) + 1
        self.expected = expected
        super().__init__(message)


class FilterFailedError(FilterError):
    """A module of a user that fails while it looks at a message.

    Attributes:
        queue: topic and id of the queue of that message, and its offset there; None: not known yet.
    """

    queue: tuple[str, int, int] | None = None


class FilterUnavailableError(Exception):
    """This broker cannot evaluate filters of this kind: a library is not installed. The text says which."""
