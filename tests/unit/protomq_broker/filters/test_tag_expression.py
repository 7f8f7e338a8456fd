"""Tags as RocketMQ writes them."""

import pytest

from protomq_broker.filters.errors import FilterError
from protomq_broker.filters.tag_expression import parse_tags


@pytest.mark.parametrize(
    ("text", "tags"),
    [("a", ("a",)), ("a || b||c", ("a", "b", "c")), ("a||a", ("a",)), ("*", ()), ("a || *", ()), ("", ()), ("a b", ("a b",))],
)
def test_tags(text, tags):
    assert parse_tags(text) == tags


@pytest.mark.parametrize(
    ("text", "column"), [("a ||", 5), ("|| a", 1), ("a || || b", 6), ("a | b", 3), ("a || b\n", 7)]
)
def test_what_is_no_tag_is_refused_with_its_place(text, column):
    with pytest.raises(FilterError) as caught:
        parse_tags(text)
    assert caught.value.column == column
