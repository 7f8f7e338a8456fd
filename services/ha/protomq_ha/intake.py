"""Joins the parts that a slave was sent, in any order, into one run of bytes that continues its log.

Answers to fetches that are under way together may come in any order, and may end within an append. Those that do not continue the run wait
for those before them.
"""

from __future__ import annotations

from typing import NamedTuple


class LogPart(NamedTuple):
    """A part of the log, where it was received.

    Attributes: memory: ends with the part; start: where in it the part begins. What stands before may be overwritten if it is writable.
    """

    memory: memoryview
    start: int = 0

    @property
    def size_bytes(self) -> int:
        """Size of the part."""
        return len(self.memory) - self.start

    @property
    def octets(self) -> memoryview:
        """The part."""
        return self.memory[self.start :]

    def behind(self, rest: bytes) -> memoryview:
        """The bytes `rest` and the part behind them, without a copy of the part if there is room before it."""
        start = self.start - len(rest)
        if not rest:
            return self.octets
        if start < 0 or self.memory.readonly:
            return memoryview(b"".join((rest, self.octets)))
        self.memory[start : self.start] = rest
        return self.memory[start:]


class Intake:
    """Attribute: position: the bytes before it are in the log."""

    def __init__(self, position: int) -> None:
        self.position = position
        self._run = memoryview(b"")
        self._later: dict[int, bytes] = {}

    @property
    def end_position(self) -> int:
        """Where the run ends."""
        return self.position + len(self._run)

    @property
    def waiting_count(self) -> int:
        """Number of parts that do not continue the run yet."""
        return len(self._later)

    def add(self, position: int, part: LogPart) -> memoryview:
        """Takes a part. Returns the whole run from `self.position` on, which lasts as long as the part's memory, or until `stored`.

        Raises ValueError for an empty part, or one that is there already.
        """
        end = self.end_position
        size_bytes = part.size_bytes
        if position < end or not size_bytes or position in self._later:
            raise ValueError(f"{size_bytes} bytes for position {position} continue nothing: there is everything below {end}")
        if position > end:
            # Its memory is used again before its turn comes.
            self._later[position] = bytes(part.octets)
            return self._run
        self._run = part.behind(bytes(self._run))
        following = []
        end = self.end_position
        while (later := self._later.pop(end, None)) is not None:
            following.append(later)
            end += len(later)
        if following:
            self._run = memoryview(b"".join((self._run, *following)))
        return self._run

    def stored(self, position: int) -> None:
        """Notes that the log has the run up to `position` now. The rest is copied: the memory of the parts is needed no longer."""
        assert self.position <= position <= self.end_position
        self._run = memoryview(bytes(self._run[position - self.position :]))
        self.position = position
