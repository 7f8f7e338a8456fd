"""Who a producer is, and the number of each of its messages.

A message id is (producer id, epoch, sequence). The broker knows a repeated send by it, so:

- the id is random, 64 bits, never 0 (0 means "no producer" on the wire), and new in a forked child. If two processes shared
  an id, the broker would take the messages of one for repetitions of the other's;
- sequences count from 0 over all topics and queues of the producer; `take` hands out consecutive ones to any thread;
- a number that was taken is never given back, even if its send failed: gaps mean nothing, repetitions mean "the same message".
"""

from __future__ import annotations

import secrets
import threading

from ._checks import check_count


def random_producer_id() -> int:
    """A random number in [1, 2**64)."""
    return secrets.randbits(64) or 1


class SequenceSource:
    """Hands out sequences. Any thread."""

    __slots__ = ("_lock", "_next", "producer_epoch", "producer_id")

    def __init__(self, producer_id: int | None = None, producer_epoch: int = 0) -> None:
        if producer_id is not None:
            check_count("producer_id", producer_id, 1, (1 << 64) - 1)
        check_count("producer_epoch", producer_epoch, 0, (1 << 32) - 1)
        self.producer_id = random_producer_id() if producer_id is None else producer_id
        self.producer_epoch = producer_epoch
        self._next = 0
        self._lock = threading.Lock()

    def take(self, count: int = 1) -> int:
        """The first of `count` consecutive sequences, which nobody else gets."""
        with self._lock:
            first = self._next
            self._next = first + count
        return first

    def renew(self) -> None:
        """Become another producer; for the child of a fork, in which no other thread runs."""
        self.producer_id = random_producer_id()
        self.producer_epoch = 0
        self._next = 0
        self._lock = threading.Lock()
