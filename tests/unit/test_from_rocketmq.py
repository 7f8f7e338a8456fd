"""docs/from_rocketmq.md names what there is: classes, methods and defaults are those of the code."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import protomq

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "from_rocketmq.md").read_text()
OURS = {name for name in protomq.__all__ if inspect.isclass(getattr(protomq, name))}
DEFAULTS = re.findall(r"`(\w+)\((\w+)=([^`]+)\)`", PAGE.split("## Defaults")[1].split("## What is different")[0])
METHODS = re.findall(r"`(\w+)\.(\w+)`", PAGE)


@pytest.mark.parametrize(("owner", "setting", "value"), DEFAULTS)
def test_a_default_is_that_of_the_code(owner: str, setting: str, value: str) -> None:
    assert inspect.signature(getattr(protomq, owner)).parameters[setting].default == ast.literal_eval(value)


@pytest.mark.parametrize(("owner", "method"), METHODS)
def test_a_method_is_there(owner: str, method: str) -> None:
    if owner not in OURS:
        assert (owner, method) == ("consumerOffset", "json"), f"{owner} is no class of protomq"
        return
    member = getattr(protomq, owner)
    assert hasattr(member, method) or method in getattr(member, "__annotations__", {})


def test_the_page_has_something_to_compare() -> None:
    assert len(DEFAULTS) >= 12
    assert len(METHODS) >= 12
    for name in ("Producer", "PullConsumer", "PushConsumer", "SimpleConsumer", "Admin"):
        assert f"`{name}" in PAGE
