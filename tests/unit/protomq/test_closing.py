"""The end of a client of an event loop goes on whoever is cancelled, and how often; where its loop ends it hurries."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Coroutine

import pytest

from protomq import _closing
from protomq._closing import Closing


class Client:
    """Its end waits until it `may_end`. `said`: what was done, in order."""

    def __init__(self) -> None:
        self.closing = Closing("nothing")
        self.said: list[str] = []
        self.may_end = asyncio.Event()
        self.hurries = self._hurry
        self.error: BaseException | None = None

    async def close(self) -> str:
        return await self.closing.wait(self._end, self.hurries, lambda: self.said.append("aborted"))

    async def _end(self) -> str:
        self.said.append("begun")
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        self.said.append("ended")
        return "result"

    async def _hurry(self) -> str:
        await asyncio.sleep(0)
        self.said.append("hurried")
        return "hurried result"


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def cancel_until_it_ends(task: asyncio.Task[str]) -> None:
    """As anyio's scopes do, at each await."""
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)


async def test_a_caller_that_is_cancelled_again_and_again_ends_and_the_end_goes_on() -> None:
    client = Client()
    for _ in range(3):
        caller = asyncio.create_task(client.close())
        await turns()
        await cancel_until_it_ends(caller)
        assert caller.cancelled()
    second = asyncio.create_task(client.close())
    await turns()
    assert not second.done(), "it waits for the same end"
    client.may_end.set()
    assert await second == "result"
    assert client.said == ["begun", "ended"]
    assert await client.close() == "nothing"


async def test_of_two_callers_one_gets_the_result() -> None:
    client = Client()
    client.may_end.set()
    outcomes = await asyncio.gather(client.close(), client.close())
    assert list(outcomes) == ["result", "nothing"]
    assert client.closing.is_over


async def test_what_belongs_to_the_end_does_not_wait_for_it() -> None:
    seen: list[bool] = []
    closing = Closing(None)

    async def look() -> None:
        seen.append(closing.is_own)

    async def end() -> None:
        await look()
        await asyncio.gather(look())

    await closing.wait(end, end, list)
    await look()
    assert seen == [True, True, False]


async def test_an_end_that_nobody_refers_to_is_not_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_closing, "HURRY_S", 0.01)
    said: list[str] = []

    async def begin() -> None:
        class Alone:
            def __init__(self) -> None:
                self.closing = Closing(None)
                self.never_set = asyncio.get_running_loop().create_future()

            async def end(self) -> None:
                try:
                    # Nothing but the task itself refers to what it waits for.
                    await self.never_set
                except BaseException as error:
                    said.append(type(error).__name__)
                    raise

        alone = Alone()
        caller = asyncio.create_task(alone.closing.wait(alone.end, alone.end, list))
        await turns()
        caller.cancel()

    await begin()
    await turns()
    gc.collect()
    assert said == []
    (task,) = (one for one in asyncio.all_tasks() if one.get_name() == "protomq-closing")
    task.cancel()
    await turns()
    assert said[:1] == ["CancelledError"]


def ended_with_the_loop(client_of: Callable[[], Client], main: Callable[[Client], Coroutine[None, None, None]]) -> Client:
    """What is left when `asyncio.run` has returned, which cancels all tasks at its end."""

    async def run() -> Client:
        client = client_of()
        await main(client)
        return client

    return asyncio.run(run())


async def give_up_closing(client: Client) -> None:
    caller = asyncio.create_task(client.close())
    await turns()
    caller.cancel()


def test_the_end_of_the_loop_makes_it_hurry() -> None:
    client = ended_with_the_loop(Client, give_up_closing)
    assert client.said == ["begun", "hurried"]


def test_so_it_does_where_a_caller_still_waits() -> None:
    async def main(client: Client) -> None:
        caller = asyncio.create_task(client.close())
        await turns()
        assert not caller.done()

    assert ended_with_the_loop(Client, main).said == ["begun", "hurried"]


def test_an_end_that_is_begun_when_the_loop_ends_is_done_in_order() -> None:
    async def main(client: Client) -> None:
        async def use() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                client.may_end.set()
                client.said.append(await client.close())

        task = asyncio.create_task(use())
        await turns()
        assert not task.done()

    assert ended_with_the_loop(Client, main).said == ["begun", "ended", "result"]


@pytest.mark.parametrize("turn_count", [1, 2])
def test_a_loop_that_ends_right_after_it_was_begun_makes_it_hurry_too(turn_count: int) -> None:
    async def main(client: Client) -> None:
        caller = asyncio.create_task(client.close())
        await turns(turn_count)
        assert not caller.done()
        # As programs do whose signal handlers cancel all tasks, before the loop does.
        for task in asyncio.all_tasks() - {asyncio.current_task(), caller}:
            task.cancel()

    said = ended_with_the_loop(Client, main).said
    assert said == (["hurried"] if turn_count == 1 else ["begun", "hurried"])


async def test_a_hurry_is_tried_again_where_it_waited_for_what_the_end_of_the_loop_has_cancelled() -> None:
    client = Client()
    client.error = ValueError()
    client.may_end.set()
    other = asyncio.get_running_loop().create_future()
    other.cancel()
    done = asyncio.get_running_loop().create_future()
    done.set_result(None)
    tries = iter([other, done])

    async def hurry() -> str:
        await next(tries)
        client.said.append("hurried")
        return ""

    client.hurries = hurry
    with pytest.raises(ValueError):
        await client.close()
    assert client.said == ["begun", "hurried", "aborted"]


def test_a_hurry_that_is_cancelled_all_the_time_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_closing, "HURRY_S", 0.05)

    async def main(client: Client) -> None:
        caller = asyncio.create_task(client.close())
        await turns()
        assert client.closing.task is not None
        while not client.closing.task.done():
            client.closing.task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await caller

    assert ended_with_the_loop(Client, main).said == ["begun", "aborted"]


def test_a_hurry_that_takes_too_long_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_closing, "HURRY_S", 0.01)

    def client_of() -> Client:
        client = Client()

        async def hurry() -> str:
            client.said.append("hurries")
            await asyncio.Event().wait()
            return ""

        client.hurries = hurry
        return client

    assert ended_with_the_loop(client_of, give_up_closing).said == ["begun", "hurries", "aborted"]


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError])
async def test_an_end_that_fails_is_done_in_a_hurry_and_its_first_caller_gets_the_error(error: type[BaseException]) -> None:
    client = Client()
    client.error = error()
    client.may_end.set()
    if error is ValueError:
        with pytest.raises(ValueError):
            await client.close()
        assert client.said == ["begun", "hurried", "aborted"]
    else:
        assert await client.close() == "hurried result"
        assert client.said == ["begun", "hurried"]
    assert await client.close() == "nothing"


async def test_an_error_that_nobody_waits_for_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    client = Client()
    client.error = ValueError("why")
    await give_up_closing(client)
    await turns()
    client.may_end.set()
    with caplog.at_level(logging.ERROR, "protomq"):
        await turns(9)
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[1] is client.error
