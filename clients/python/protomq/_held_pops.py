"""Pops that brokers may hold: each has an id, by which its hold is ended (`GiveUpPop`). And the calls of `receive` that wait for them.

A call that is given up has its answer all the same. Whoever waits for it gives back messages that were on their way.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

from . import _forks
from ._late_imports import fork_waits

GIVE_UP_S: Final = 5.0
"""How long a broker may take to hear that a call is given up."""
_ID_SIZE_BYTES: Final = 16
_ID_FIELD: Final = bytes((14 << 3 | 2, _ID_SIZE_BYTES))
"""PopRequest.hold_id, which brokers read fastest where it stands behind all else."""


class HeldPop(NamedTuple):
    """Where it is held. `fork_count`: of the process that waits for it."""

    topic: str
    broker_name: str
    fork_count: int


class HeldPops:
    """Of one consumer. Any thread."""

    def __init__(self) -> None:
        self._pops: dict[bytes, HeldPop] = {}
        self._receives: set[object] = set()
        self._fork_count = _forks.fork_count
        self._over: Future[None] | None = None

    @contextmanager
    def receive(self) -> Iterator[None]:
        """A call of `receive` is under way, with all that it gives back at its end."""
        if self._fork_count != _forks.fork_count:
            self._receives, self._fork_count = set(), _forks.fork_count  # Those of a parent's threads do not end here.
        receives, this_one = self._receives, object()
        receives.add(this_one)
        try:
            yield
        finally:
            receives.discard(this_one)
            self._look()

    def over(self) -> Future[None]:
        """What is done when no `receive` is under way. No further one begins."""
        self._over = Future()
        over = self._over
        self._look()
        return over

    def _look(self) -> None:
        over = self._over
        if over is not None and (not self._receives or self._fork_count != _forks.fork_count):
            with suppress(InvalidStateError):  # Another thread was faster.
                over.set_result(None)

    def begin(self, topic: str, broker_name: str) -> bytes:
        """A pop that may be held is about to be made: its id."""
        hold_id = secrets.token_bytes(_ID_SIZE_BYTES)
        self._pops[hold_id] = HeldPop(topic, broker_name, _forks.fork_count)
        return hold_id

    def end(self, hold_id: bytes) -> None:
        """It is over."""
        self._pops.pop(hold_id, None)

    def pops(self) -> list[tuple[bytes, HeldPop]]:
        """Those of this process, by id."""
        return [(hold_id, held) for hold_id, held in list(self._pops.items()) if held.fork_count == _forks.fork_count]


def id_field(hold_id: bytes) -> bytes:
    """What is to stand at the end of a pop's request."""
    return _ID_FIELD + hold_id


def encoded_give_up(hold_id: bytes) -> bytes:
    """The request that ends a hold."""
    with fork_waits:
        from .v1 import pop_service_pb2 as pb

    return pb.GiveUpPopRequest(hold_id=hold_id).SerializeToString()


def give_up_of(request: Sequence[bytes]) -> bytes | None:
    """The request that gives an encoded pop up; None: it is not held, and ends soon by itself."""
    with fork_waits:
        from .v1 import pop_service_pb2 as pb

    pop = pb.PopRequest.FromString(b"".join(request))
    return encoded_give_up(pop.hold_id) if pop.hold_id else None
