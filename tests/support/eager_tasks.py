"""Tasks that begin where they are created, as those of `asyncio.eager_task_factory` do, which Python has since 3.12."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any


class _Rest:
    """What is left of a coroutine that has begun and waits for `waited_for`."""

    def __init__(self, begun: Coroutine[Any, Any, Any], waited_for: object) -> None:
        self._begun = begun
        self._waited_for = waited_for

    def __await__(self) -> Generator[Any, Any, Any]:
        waited_for = self._waited_for
        while True:
            thrown: BaseException | None = None
            try:
                yield waited_for
            except BaseException as error:
                thrown = error
            try:
                waited_for = self._begun.send(None) if thrown is None else self._begun.throw(thrown)
            except StopIteration as end:
                return end.value


async def _finish(begun: Coroutine[Any, Any, Any], waited_for: object) -> Any:
    return await _Rest(begun, waited_for)


def eager_task_factory(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any], **kwargs: Any
) -> asyncio.Future[Any]:
    """For `loop.set_task_factory`. The first step sees the task of its creator as the current one."""
    assert isinstance(coroutine, Coroutine)
    try:
        waited_for = coroutine.send(None)
    except StopIteration as end:
        ended: asyncio.Future[Any] = loop.create_future()
        ended.set_result(end.value)
        return ended
    return asyncio.Task(_finish(coroutine, waited_for), loop=loop, **kwargs)
