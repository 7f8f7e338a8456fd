"""Conditions over many messages at once say what the rule of one message says of each, or leave it open."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq_broker.filters.fields import FieldReader
from protomq_broker.filters.sql_columns import COMPARISONS_MAX, column_rule_of
from protomq_broker.filters.sql_filter import SqlFilter
from protomq_broker.filters.sql_rules import names_in, rule_of
from protomq_broker.filters.sql_syntax import parse
from tests.unit.protomq_broker.filters.run_helpers import all_matching, run_of

TEXTS = ("", "7", "-7", "+7", "0099", "123456789012345678", "9223372036854775808", "7.5", "seven", "a longer text", "-")
CONDITIONS = (
    "a > 5", "a <= -7", "a = 7", "a <> 99", "a >= 123456789012345678", "a = 'seven'", "a <> ''", "a = 'a longer text'",
    "a IN ('7', 'a longer text', '')", "a NOT IN ('seven')", "a IS NULL", "a IS NOT NULL", "a STARTSWITH 'a longer t'",
    "a NOT STARTSWITH '7'", "a ENDSWITH 'ger text'", "b BETWEEN -7 AND 7", "b = '7'", "TAGS = 'seven'", "TAGS IS NULL",
    "KEYS = '7'", "KEYS IS NULL", "size = 1", "size > 0", "queueOffset < 1", "bornTime >= 1700000000001", "queueId = 0",
)  # fmt: skip
conditions = st.recursive(
    st.sampled_from(CONDITIONS),
    lambda inner: st.one_of(
        inner.map("NOT ({})".format),
        st.tuples(inner, st.sampled_from(("AND", "OR")), inner).map(lambda made: f"({made[0]}) {made[1]} ({made[2]})"),
    ),
    max_leaves=5,
)
texts = st.sampled_from(TEXTS)
messages = st.fixed_dictionaries(
    {},
    optional={
        "body": st.sampled_from((b"", b"x", b"x" * 200)),
        "tag": texts,
        "keys": st.lists(texts, max_size=2),
        "properties": st.dictionaries(st.sampled_from(("a", "b", "aa", "size")), texts),
    },
)


@given(conditions, st.lists(messages, min_size=1, max_size=8))
def test_the_rule_for_arrays_says_what_the_rule_for_a_row_says(text, some):
    node = parse(text)
    names = names_in(node)
    run = run_of(*some * 24)  # so many that they are walked with numpy
    rule, reader = column_rule_of(node), FieldReader(names)
    assert rule is not None
    columns = reader.columns(*run)
    assert columns is not None
    is_true, is_false, is_open = rule(columns)
    row_rule = rule_of(node, names)
    for index, row in enumerate(reader.parsed(*run)):
        if columns.is_odd[index]:
            continue
        try:
            said = row_rule(row)
        except ValueError:
            assert is_open[index]
            continue
        if not is_open[index]:
            assert (bool(is_true[index]), bool(is_false[index])) == (said is True, said is False)


@given(conditions, st.lists(messages, min_size=1, max_size=8))
def test_many_messages_are_filtered_as_one_by_one(text, some):
    data, starts, sizes = run_of(*some * 24)
    made = SqlFilter(text)
    wanted = [i for i in range(len(starts)) if made.matching(data, starts[i : i + 1], sizes[i : i + 1]).indexes]
    assert all_matching(made, data, starts, sizes) == wanted


@pytest.mark.parametrize("text", ["a > 98", "a = 'x' AND b <> 'y'", "a BETWEEN 1 AND 5", "size > 5", "TAGS IN ('x', 'y')"])
def test_plain_numbers_and_texts_leave_nothing_open(text):
    run = run_of(*[{"tag": "x", "properties": {"a": str(i), "b": "y"}, "body": b"x" * i} for i in range(100)])
    columns = FieldReader(names_in(parse(text))).columns(*run)
    rule = column_rule_of(parse(text))
    assert columns is not None
    assert rule is not None
    assert not np.count_nonzero(rule(columns).is_open | columns.is_odd)


@pytest.mark.parametrize(
    "text",
    ["a CONTAINS 'x'", "a = b", "a > 5.5", "a = 1 AND b CONTAINS 'x'", "size = '4'", " OR ".join(["a = 1"] * (COMPARISONS_MAX + 1))],
)
def test_what_has_no_rule_for_arrays_is_filtered_all_the_same(text):
    assert column_rule_of(parse(text)) is None
    made = SqlFilter(text)
    data, starts, sizes = run_of(*[{"properties": {"a": "1", "b": "x"}, "body": b"1234"}] * 30)
    wanted = [i for i in range(30) if made.matching(data, starts[i : i + 1], sizes[i : i + 1]).indexes]
    assert all_matching(made, data, starts, sizes) == wanted
