"""Calls that hooks look at, from coroutines; see `_hooked_calls.py`."""

from __future__ import annotations

from collections.abc import Sequence

from ._async_transport import AsyncTransport
from ._hook_points import HookPoints
from ._transport_options import LongHold, TransportOptions
from ._types import BrokerAddress, MethodInfo


class AsyncHookedTransport(AsyncTransport):
    """See AsyncTransport."""

    def __init__(self, options: TransportOptions | None, hooks: HookPoints) -> None:
        super().__init__(options)
        self._hooks = hooks

    async def call(
        self,
        address: BrokerAddress,
        method: MethodInfo,
        payload: Sequence[bytes],
        timeout_s: float,
        *,
        one_way: bool = False,
        long_hold: LongHold | None = None,
    ) -> bytes:
        """See AsyncTransport.call."""
        context = self._hooks.before_call(address, method, sum(map(len, payload)), timeout_s, one_way)
        try:
            answer = await super().call(address, method, payload, timeout_s, one_way=one_way, long_hold=long_hold)
        except BaseException as error:
            self._hooks.after_call(context, error)
            raise
        self._hooks.after_call(context, answer)
        return answer


def async_transport_with(options: TransportOptions | None, hooks: HookPoints) -> AsyncTransport:
    """The transport of a client that has these hooks."""
    return AsyncHookedTransport(options, hooks) if hooks.call else AsyncTransport(options)
