"""How much of the log a slave asks for at a time: what its link brings in half a second. No clock or socket.

A part confirms nothing before all of it is there. On a fast link large parts cost least. On a slow one they would take longer than a send
or a lease waits.
"""

from __future__ import annotations

from typing import Final

LEAST_BYTES: Final = 64 << 10
"""A slave begins with it, and never asks for less, unless it is configured to."""
PART_S: Final = 0.5
"""A part that takes longer was too large."""


class PartSize:
    """Doubles with each whole part that comes in half the time, and falls at once to what would have come in time.

    Only what is asked for grows: a small part says nothing of a large one. Attribute: size_bytes, what to ask for.
    """

    def __init__(self, largest_bytes: int) -> None:
        self._largest_bytes = largest_bytes
        self._least_bytes = min(LEAST_BYTES, largest_bytes)
        self.size_bytes = self._least_bytes

    def note(self, size_bytes: int, took_s: float) -> None:
        """Notes that a part has come, and how long that took from its first bytes to its last."""
        if took_s > PART_S:
            fits_bytes = int(size_bytes * PART_S / took_s)
            self.size_bytes = max(min(self.size_bytes, fits_bytes), self._least_bytes)
        elif size_bytes >= self.size_bytes and took_s <= PART_S / 2:
            self.size_bytes = min(2 * self.size_bytes, self._largest_bytes)
