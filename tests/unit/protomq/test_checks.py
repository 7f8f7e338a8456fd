"""Constructors take a group first and everything else by name; what is wrong says what to write."""

from __future__ import annotations

import inspect
import pydoc

import pytest

from protomq import Admin, AsyncProducer, AsyncPullConsumer, Producer, PullConsumer
from protomq._checks import GROUP_LENGTH_MAX, check_group
from protomq._producer_options import ProducerOptions
from protomq.errors import ConfigurationError
from protomq_broker.store.topics import GROUP_NAME_LENGTH_MAX

CLIENTS = [Producer, AsyncProducer, PullConsumer, AsyncPullConsumer]


def test_a_group_is_what_the_broker_takes() -> None:
    assert GROUP_LENGTH_MAX == GROUP_NAME_LENGTH_MAX
    assert check_group("") == ""
    assert check_group("a-Z_9") == "a-Z_9"
    for wrong in ("a b", "%RETRY%x", "ü", "g" * (GROUP_LENGTH_MAX + 1)):
        with pytest.raises(ConfigurationError, match="a group has 1 to 120 characters"):
            check_group(wrong)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_positional_address_is_told_where_it_belongs(client: type) -> None:
    with pytest.raises(ValueError, match=r"write namesrv='127\.0\.0\.1:10911'"):
        client("127.0.0.1:10911")
    with pytest.raises(TypeError, match=r"addresses of name servers are given as namesrv="):
        client(["127.0.0.1:10911"])
    with pytest.raises(TypeError, match="positional"):
        client("group", "127.0.0.1:10911")


@pytest.mark.parametrize("client", CLIENTS)
def test_all_but_the_group_is_by_name(client: type) -> None:
    first, *rest = inspect.signature(client).parameters.values()
    assert first.name == "group"
    assert {parameter.kind for parameter in rest} == {inspect.Parameter.KEYWORD_ONLY}
    assert client("shop", namesrv="127.0.0.1:1").group == "shop"


@pytest.mark.parametrize("client", [Producer, AsyncProducer])
def test_help_lists_each_setting_with_type_default_and_meaning(client: type) -> None:
    shown = pydoc.plain(pydoc.render_doc(client))
    for name, field in ProducerOptions.__dataclass_fields__.items():
        assert f"{name}: '{field.type}' = {field.default!r}" in shown, name
        assert f"`{name}`" in shown, name
    assert "settings" not in inspect.signature(client).parameters


def test_admin_takes_nothing_by_position() -> None:
    with pytest.raises(TypeError):
        Admin("127.0.0.1:10911")  # type: ignore[call-arg]
