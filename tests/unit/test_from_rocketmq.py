"""docs/from_rocketmq.md and docs/from_kafka.md name what there is: classes, methods and defaults are those of the code."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import protomq
from protomq_broker.config import BrokerConfig
from protomq_runtime.config import variable_of, variables_of

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "from_rocketmq.md").read_text()
KAFKA = (DOCS / "from_kafka.md").read_text()
OURS = {name for name in protomq.__all__ if inspect.isclass(getattr(protomq, name))}
DEFAULT = re.compile(r"`(\w+)\((\w+)=([^`]+)\)`")
DEFAULTS = DEFAULT.findall(PAGE.split("## Defaults")[1].split("## What is different")[0])
KAFKA_DEFAULTS = DEFAULT.findall(KAFKA.split("## Words")[1])
METHODS = re.findall(r"`(\w+)\.(\w+)`", PAGE)
KAFKA_METHODS = re.findall(r"`([A-Z]\w+)\.(\w+)`", KAFKA)
KAFKA_SETTINGS = re.findall(r"`((?:store|ha|member)[._][\w.]+|auto_create_topics|default_queues)`", KAFKA)


@pytest.mark.parametrize(("owner", "setting", "value"), [*DEFAULTS, *KAFKA_DEFAULTS])
def test_a_default_is_that_of_the_code(owner: str, setting: str, value: str) -> None:
    assert inspect.signature(getattr(protomq, owner)).parameters[setting].default == ast.literal_eval(value)


@pytest.mark.parametrize(("owner", "method"), [*METHODS, *KAFKA_METHODS])
def test_a_method_is_there(owner: str, method: str) -> None:
    if owner not in OURS:
        assert (owner, method) == ("consumerOffset", "json"), f"{owner} is no class of protomq"
        return
    member = getattr(protomq, owner)
    assert hasattr(member, method) or method in getattr(member, "__annotations__", {})


@pytest.mark.parametrize("setting", KAFKA_SETTINGS)
def test_a_setting_of_a_broker_is_there(setting: str) -> None:
    assert variable_of(setting) in variables_of(BrokerConfig)


def test_the_pages_have_something_to_compare() -> None:
    assert len(KAFKA_DEFAULTS) >= 10
    assert len(KAFKA_METHODS) >= 6
    assert len(KAFKA_SETTINGS) >= 6
    assert len(DEFAULTS) >= 12
    assert len(METHODS) >= 12
    for name in ("Producer", "PullConsumer", "PushConsumer", "SimpleConsumer", "Admin"):
        assert f"`{name}" in PAGE
