"""What the target of a worker may be, and what is said of one that is wrong."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from protomq import AsyncPushConsumer, PushConsumer
from protomq.hooks import ConsumeContext, Hook
from protomq_cli.worker_process import LoadError, load_consumer

HERE = Path.cwd()


async def make() -> PushConsumer:
    return PushConsumer("g")


def bill(message: object = None) -> PushConsumer:
    raise AssertionError(f"the listener was called, with {message!r}")


def bill_with_hooks(message: object = None) -> PushConsumer:
    raise AssertionError(f"the listener was called, with {message!r}")


def bill_by_hand(message: object) -> PushConsumer:
    raise AssertionError(f"the listener was called, with {message!r}")


def make_with_default(group: str = "g") -> PushConsumer:
    return PushConsumer(group)


class Hooked(Hook):
    def before_consume(self, context: ConsumeContext) -> None:
        """Nothing."""


@pytest.fixture(autouse=True)
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("told")
    vars(module).update(make=make, PushConsumer=PushConsumer, AsyncPushConsumer=AsyncPushConsumer, consumer=PushConsumer("g"))
    vars(module).update(bill=bill, bill_with_hooks=bill_with_hooks, bill_by_hand=bill_by_hand, make_with_default=make_with_default)
    module.consumer.subscribe("orders", bill)
    hooked = PushConsumer("h", hooks=[Hooked()])
    hooked.subscribe("orders", bill_with_hooks)
    vars(module)["hooked"] = hooked
    monkeypatch.setitem(sys.modules, "told", module)
    return module


def test_a_consumer_is_named_by_its_module(program: ModuleType) -> None:
    assert load_consumer("told:consumer") is program.consumer


def test_a_function_that_makes_a_consumer_may_have_arguments_with_defaults() -> None:
    assert load_consumer("told:make_with_default").group == "g"


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("./told:consumer", "'./told:consumer' names a file, not a module: write told:consumer"),
        (".told:consumer", "names a file, not a module: write told:consumer"),
        ("told.py:consumer", "'told.py:consumer' names a file, not a module: write told:consumer"),
        ("app/told.py:consumer", "names a file, not a module: write app.told:consumer"),
        (f"{HERE}/app/told.py:consumer", "names a file, not a module: write app.told:consumer"),
        ("/nowhere/told.py:consumer", "names a file, not a module: write told:consumer, and start the worker in /nowhere"),
        ("told:PushConsumer", "told:PushConsumer is the class: name a consumer that the module makes"),
        ("told:AsyncPushConsumer", "told:AsyncPushConsumer is the class: name a consumer that the module makes"),
        ("told:make", "told:make is a coroutine function: the worker calls it where no loop runs, write def instead of async def"),
        ("told:bill", "told:bill is a listener of told:consumer: write told:consumer"),
        ("told:bill_with_hooks", "told:bill_with_hooks is a listener of told:hooked: write told:hooked"),
        ("told:bill_by_hand", "told:bill_by_hand takes arguments, so it makes no consumer: name the consumer that it listens to"),
    ],
)
def test_a_target_that_is_none_is_refused_with_what_to_write(target: str, text: str) -> None:
    with pytest.raises(LoadError, match=re.escape(text) + "($|, as in )"):
        load_consumer(target)
