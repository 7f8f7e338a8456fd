"""What steps need of the driver of a membership, and what both drivers share."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Iterable, Iterator
from typing import Any, Final, Protocol

from ._membership_logic import LeaveRequest, MembershipState, MemberTicket
from ._types import BrokerAddress
from .errors import ProtomqError

LOOK_MAX_S: Final = 5.0
"""A driver looks around that often, for calls that take too long."""
LEAVE_TIMEOUT_S: Final = 0.5
"""For each broker that a member leaves; for those together that are away."""


class MemberDriver(Protocol):
    """What steps need of a driver."""

    state: MembershipState

    @property
    def lock(self) -> contextlib.AbstractContextManager[Any]:
        """To be had for everything that is asked of `state`."""

    def poke(self) -> None:
        """There may be calls to make."""

    def wait_known(self, timeout_s: float) -> Awaitable[None] | None:
        """Waits until each broker was asked once; a coroutine awaits the result."""

    def wait_granted(self, timeout_s: float) -> Awaitable[None] | None:
        """Waits until brokers have answered what this member claims; a coroutine awaits the result."""

    def wait_answered(self, broker_name: str, timeout_s: float) -> Awaitable[None] | None:
        """Makes the call that `MembershipState.ask` wants, and waits until it is answered; a coroutine awaits the result."""


def leaves(requests: Iterable[LeaveRequest]) -> Iterator[tuple[BrokerAddress, bytes, float]]:
    """Address, request and time-out of the calls by which a thread leaves brokers, one after the other."""
    away_until_s: float | None = None
    for address, payload, is_away in requests:
        timeout_s = LEAVE_TIMEOUT_S
        if is_away:
            away_until_s = away_until_s or time.monotonic() + LEAVE_TIMEOUT_S
            timeout_s = away_until_s - time.monotonic()
        if timeout_s > 0:
            yield address, payload, timeout_s


def take_outcome(state: MembershipState, ticket: MemberTicket, result: bytes | ProtomqError) -> None:
    """How a call ended."""
    now_s = time.monotonic()
    try:
        if isinstance(result, ProtomqError):
            raise result
        state.answered(ticket, result, now_s)
    except ProtomqError as error:
        state.failed(ticket, error, now_s)
