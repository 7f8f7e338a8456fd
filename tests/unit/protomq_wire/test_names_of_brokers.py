"""What a broker may be called: a name, or that of its machine room, @ and a name."""

from __future__ import annotations

import pytest

from protomq.wire.broker_names import is_broker_name


@pytest.mark.parametrize("name", ["a", "north@a", "dc-1.eu@broker-a.example", "_@_", "x" * 127, f"{'x' * 63}@{'y' * 63}"])
def test_names_that_a_broker_may_have(name: str) -> None:
    assert is_broker_name(name)


@pytest.mark.parametrize(
    "name",
    ["", "@", "a@", "@a", "north@east@a", "north@-a", "north@.a", "-a", ".a", "a b", "a/b", "ä", "x" * 128, f"{'x' * 64}@{'y' * 63}"],
)
def test_names_that_no_broker_may_have(name: str) -> None:
    assert not is_broker_name(name)
