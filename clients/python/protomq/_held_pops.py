"""Pops that brokers may hold: each has an id, by which its hold is ended (`GiveUpPop`). And the calls of `receive` that wait for them.

A call that is given up has its answer all the same. Whoever waits for it gives back messages that were on their way.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from itertools import count
from typing import Final, NamedTuple, TypeAlias

from . import _forks
from ._late_imports import fork_waits

GIVE_UP_S: Final = 5.0
"""How long a broker may take to hear that a call is given up."""
_ID_SIZE_BYTES: Final = 16
_NUMBER_SIZE_BYTES: Final = 6
"""Of an id. The rest of it is random, once for each consumer and process."""
_ID_FIELD: Final = bytes((14 << 3 | 2, _ID_SIZE_BYTES))
"""PopRequest.hold_id, which brokers read fastest where it stands behind all else."""


Receive: TypeAlias = tuple[int, int]
"""A call of `receive`: its thread, and its number."""


class HeldPop(NamedTuple):
    """Where it is held. `fork_count`: of the process that waits for it."""

    topic: str
    broker_name: str
    fork_count: int


class HeldPops:
    """Of one consumer. Any thread."""

    def __init__(self) -> None:
        self._pops: dict[bytes, HeldPop] = {}
        self._receives: set[Receive] = set()
        self._over: Future[None] | None = None
        self._closing_threads: set[int] = set()
        self._start()

    def _start(self) -> None:
        self._fork_count = _forks.fork_count
        self._prefix = secrets.token_bytes(_ID_SIZE_BYTES - _NUMBER_SIZE_BYTES)
        self._numbers = count()

    def began(self) -> Receive:
        """A call of `receive` is under way, until it has given back what nobody takes."""
        if self._fork_count != _forks.fork_count:
            self._receives = set()  # Those of a parent's threads do not end here.
            self._start()
        receive = threading.get_ident(), next(self._numbers)
        self._receives.add(receive)
        return receive

    def ended(self, receive: Receive) -> None:
        """It is over."""
        self._receives.discard(receive)
        if self._over is not None:
            self._look()

    def over(self, closing_thread: int = 0) -> Future[None]:
        """What is done when no `receive` is under way; no further one begins. All who close wait for the same.

        `closing_thread`: that of whoever waits, if it is a thread. A `receive` of its own, which a signal handler has interrupted, cannot
        end meanwhile.
        """
        self._closing_threads.add(closing_thread)
        over = self._over
        if over is None:
            over = self._over = Future()
        self._look()
        return over

    def _look(self) -> None:
        of_others = [receive for receive in list(self._receives) if receive[0] not in self._closing_threads]
        if self._over is not None and (not of_others or self._fork_count != _forks.fork_count):
            with suppress(InvalidStateError):  # Another thread was faster.
                self._over.set_result(None)

    def begin(self, topic: str, broker_name: str) -> bytes:
        """A pop that may be held is about to be made: its id."""
        hold_id = self._prefix + next(self._numbers).to_bytes(_NUMBER_SIZE_BYTES, "big")
        self._pops[hold_id] = HeldPop(topic, broker_name, self._fork_count)
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
