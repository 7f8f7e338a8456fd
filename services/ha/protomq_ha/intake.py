"""Joins the parts that a slave was sent, in any order, into one run of bytes that continues its log.

Answers to fetches that are under way together may come in any order, and may end within an append. Those that do not continue the run wait
for those before them.
"""

from __future__ import annotations


class Intake:
    """Attribute: position: the bytes before it are in the log."""

    def __init__(self, position: int) -> None:
        self.position = position
        self._run = b""
        self._later: dict[int, bytes] = {}

    @property
    def end_position(self) -> int:
        """Where the run ends."""
        return self.position + len(self._run)

    @property
    def waiting_count(self) -> int:
        """Number of parts that do not continue the run yet."""
        return len(self._later)

    def add(self, position: int, data: bytes) -> bytes:
        """Takes a part. Returns the whole run from `self.position` on. Raises ValueError for an empty part, or one that is there already.
        """
        if position < self.end_position or not data or position in self._later:
            raise ValueError(
                f"{len(data)} bytes for position {position} continue nothing: there is everything below {self.end_position}"
            )
        self._later[position] = data
        parts = [self._run] if self._run else []
        end = self.end_position
        while (part := self._later.pop(end, None)) is not None:
            parts.append(part)
            end += len(part)
        # One part alone is not copied.
        self._run = parts[0] if len(parts) == 1 else b"".join(parts)
        return self._run

    def stored(self, position: int) -> None:
        """Notes that the log has the run up to `position` now."""
        assert self.position <= position <= self.end_position
        self._run = self._run[position - self.position :]
        self.position = position
