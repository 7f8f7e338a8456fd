"""How members say how they stand: rates, bounds, stacks. No sockets."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass

import pytest

from protomq import PullConsumer, PushConsumer
from protomq import _describing as module
from protomq._describing import About, Rates, description, read_unlocked, settings_of
from protomq._pull_logic import QueueState
from protomq._stacks import FRAMES_MAX, STACKS_MAX, Stack, Stacks, task_stacks, thread_stacks
from protomq._types import MessageQueue


def test_rates_are_a_mean_of_the_last_minute() -> None:
    now_s = 0.0
    rates = Rates(lambda: now_s)
    assert rates.per_s({"done": 5}) == {}
    for second in range(100):
        now_s = float(second)
        rates.note({"done": 10 * second if second < 50 else 500})
    assert rates.per_s({"done": 500}) == {"done": pytest.approx((500 - 390) / 60)}
    now_s += 0.5
    rates.note({"done": 1_000_000})
    assert rates.per_s({"done": 500}) == {"done": pytest.approx((500 - 390) / 60.5)}, "noted once a second at most"


def test_settings_are_short_texts() -> None:
    @dataclass
    class Options:
        name: str = "x" * 1_000
        count: int = 3

    assert settings_of(Options()) == {"name": repr("x" * 1_000)[:200], "count": "3"}


def always_changing() -> str:
    raise RuntimeError("dictionary changed size during iteration")


def test_what_changes_while_it_is_read_is_read_again() -> None:
    tries: list[int] = []

    def read() -> str:
        tries.append(1)
        if len(tries) < 3:
            raise RuntimeError("dictionary changed size during iteration")
        return "found"

    assert read_unlocked(read) == "found"
    with pytest.raises(RuntimeError):
        read_unlocked(always_changing)


def test_what_is_too_much_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    queues = [QueueState(MessageQueue("T", "a", i), None if i else 7, None, 2, False) for i in range(10)]
    stacks = [Stack(f"thread {i}", "\ud800" + "x" * 1000) for i in range(10)]
    monkeypatch.setattr(module, "QUEUES_MAX", 4)
    monkeypatch.setattr(module, "SIZE_MAX_BYTES", 3_000)
    made = description(About("PullConsumer", {"a": "1"}, {"open": 3}, {"done": 0.5}), 0.0, queues, [Stacks(stacks, False)])
    assert made.is_cut
    assert [one.queue_id for one in made.queues] == [0, 1, 2, 3]
    assert (made.queues[0].position, made.queues[1].position, made.queues[0].committed_offset) == (7, -1, -1)
    assert [one.name for one in made.stacks] == ["thread 0", "thread 1"]
    assert made.ByteSize() < 3_000
    whole = description(About("PullConsumer", {}), 0.0, queues[:2], [Stacks(stacks[:1], False)])
    assert not whole.is_cut


def test_the_stack_of_a_thread_names_what_it_is_in() -> None:
    began, gate = threading.Event(), threading.Event()

    def stuck_here(depth: int) -> None:
        if depth:
            stuck_there(depth - 1)
        else:
            began.set()
            gate.wait()

    def stuck_there(depth: int) -> None:  # Two of them: the same line again and again would be told once.
        stuck_here(depth)

    thread = threading.Thread(target=stuck_here, args=(2 * FRAMES_MAX,), name="a-listener")
    thread.start()
    began.wait()
    try:
        found = thread_stacks()
        said = PullConsumer("g")._describe(wants_stacks=True)
    finally:
        gate.set()
        thread.join()
    (stack,) = [stack for stack in found.stacks if stack.name == "a-listener"]
    assert "stuck_here" in stack.text
    assert "gate.wait()" in stack.text
    assert stack.text.count("  File ") == FRAMES_MAX
    assert found.is_cut
    assert said.is_cut
    assert threading.current_thread().name not in [stack.name for stack in thread_stacks().stacks]


def test_a_description_says_that_threads_or_tasks_are_left_out() -> None:
    gate = threading.Event()
    threads = [threading.Thread(target=gate.wait) for _ in range(STACKS_MAX + 1)]
    for thread in threads:
        thread.start()
    try:
        assert (len(thread_stacks().stacks), thread_stacks().is_cut) == (STACKS_MAX, True)
        assert PullConsumer("g")._describe(wants_stacks=True).is_cut
        assert not PullConsumer("g")._describe(wants_stacks=False).is_cut
    finally:
        gate.set()
        for thread in threads:
            thread.join()

    async def look(count: int) -> Stacks:
        tasks = [asyncio.create_task(asyncio.sleep(60)) for _ in range(count)]
        await asyncio.sleep(0)
        found = task_stacks()
        for task in tasks:
            task.cancel()
        return found

    assert not asyncio.run(look(STACKS_MAX)).is_cut
    more = asyncio.run(look(STACKS_MAX + 1))
    assert (len(more.stacks), more.is_cut) == (STACKS_MAX, True)


def test_the_stack_of_a_task_has_what_it_awaits() -> None:
    async def inner_wait(gate: asyncio.Event) -> None:
        await gate.wait()

    async def outer(gate: asyncio.Event) -> None:
        await inner_wait(gate)

    async def look() -> Stacks:
        gate = asyncio.Event()
        task = asyncio.create_task(outer(gate), name="a-task")
        await asyncio.sleep(0)
        found = task_stacks()
        gate.set()
        await task
        return found

    ((stack,), is_cut) = asyncio.run(look())
    assert not is_cut
    assert stack.name == "a-task"
    assert stack.text.index("inner_wait(gate)") < stack.text.index("await gate.wait()")
    assert task_stacks() == ([], False), "where no loop runs"


def test_a_consumer_that_was_never_used_can_say_how_it_stands() -> None:
    with PullConsumer("g", namesrv="127.0.0.1:1", auto_commit=False) as consumer:
        said = consumer._describe(wants_stacks=False)
    assert (said.kind, said.settings["group"], len(said.queues), len(said.stacks)) == ("PullConsumer", "'g'", 0, 0)


def test_a_push_consumer_tells_counts_and_listeners() -> None:
    consumer = PushConsumer("g", namesrv="127.0.0.1:1", concurrency=3)

    @consumer.on("T")
    def bill(_: object) -> None: ...

    about = consumer._about()
    assert (about.kind, about.settings["listeners"], about.counts["concurrency"]) == (
        "PushConsumer", f"T: {bill.__qualname__}", 3
    )  # fmt: skip
