"""Calls that hooks look at: transports that tell them, for clients that have such hooks. Others have the transports as they are."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from . import _forks, _methods
from ._hook_points import HookPoints
from ._pull_multiplexer import Outcome, PullMultiplexer
from ._transport import SyncTransport
from ._transport_options import LongHold, TransportOptions
from ._types import BrokerAddress, MethodInfo
from .errors import ClosedError
from .hooks import CallContext

HELD: Final = frozenset({_methods.WAIT_FOR_CHECKS.method_id})
"""Hooks hear of their end while `close` runs, whenever their threads come to it."""


class HookedTransport(SyncTransport):
    """See SyncTransport."""

    def __init__(self, options: TransportOptions | None, hooks: HookPoints) -> None:
        super().__init__(options)
        self.hooks = hooks
        self._held: dict[int, CallContext] = {}
        """By the ids of the contexts."""

    def call(
        self,
        address: BrokerAddress,
        method: MethodInfo,
        payload: Sequence[bytes],
        timeout_s: float,
        *,
        one_way: bool = False,
    ) -> bytes:
        """See SyncTransport.call."""
        context = self.hooks.before_call(address, method, sum(map(len, payload)), timeout_s, one_way)
        is_held = method.method_id in HELD
        if is_held:
            self._held[id(context)] = context
        outcome: bytes | BaseException = b""
        try:
            outcome = super().call(address, method, payload, timeout_s, one_way=one_way)
        except BaseException as error:
            outcome = error
            raise
        finally:
            if not is_held or self._held.pop(id(context), None) is not None:
                self.hooks.after_call(context, outcome)
        return outcome

    def close(self) -> None:
        """See SyncTransport.close."""
        super().close()
        if self._fork_count == _forks.fork_count:
            _tell_closed(self.hooks, self._held)


class HookedMultiplexer(PullMultiplexer):
    """See PullMultiplexer."""

    def __init__(self, transport: HookedTransport, method: MethodInfo = _methods.PULL) -> None:
        super().__init__(transport, method)
        self._hooks = transport.hooks
        self._contexts: dict[Any, CallContext] = {}

    def send(
        self, address: BrokerAddress, ticket: Any, payload: bytes, timeout_s: float, long_hold: LongHold | None = None
    ) -> None:
        """See PullMultiplexer.send."""
        self._contexts[ticket] = self._hooks.before_call(address, self._method, len(payload), timeout_s)
        super().send(address, ticket, payload, timeout_s, long_hold)

    def wait(self, timeout_s: float, size_max_bytes: int) -> list[Outcome]:
        """See PullMultiplexer.wait."""
        outcomes = super().wait(timeout_s, size_max_bytes)
        for outcome in outcomes:
            context = self._contexts.pop(outcome.ticket, None)
            if context is not None:
                self._hooks.after_call(context, outcome.result)
        return outcomes

    def close(self) -> None:
        """See PullMultiplexer.close."""
        super().close()
        _tell_closed(self._hooks, self._contexts)

    def abandon(self) -> None:
        """See PullMultiplexer.abandon."""
        self._contexts.clear()
        super().abandon()


def _tell_closed(hooks: HookPoints, under_way: dict[Any, CallContext]) -> None:
    """Of calls that a server holds while their client is closed."""
    while under_way:
        with suppress(KeyError):  # It has ended in its thread just now.
            _, context = under_way.popitem()
            hooks.after_call(context, ClosedError("the client was closed while a server held the call"))


def transport_with(options: TransportOptions | None, hooks: HookPoints) -> SyncTransport:
    """The transport of a client that has these hooks."""
    return HookedTransport(options, hooks) if hooks.call else SyncTransport(options)


def multiplexer_with(transport: SyncTransport, method: MethodInfo = _methods.PULL) -> PullMultiplexer:
    """Held calls over a transport."""
    if isinstance(transport, HookedTransport):
        return HookedMultiplexer(transport, method)
    return PullMultiplexer(transport, method)
