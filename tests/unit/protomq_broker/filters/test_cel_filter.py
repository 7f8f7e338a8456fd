"""CEL as a language of filters."""

import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq_broker.filters import cel_filter
from protomq_broker.filters.cel_filter import LENGTH_MAX, CelFilter
from protomq_broker.filters.errors import FilterError, FilterUnavailableError
from tests.unit.protomq_broker.filters.run_helpers import run_of

RUN = run_of(
    {"tag": "UA", "keys": ["k1", "k2"], "properties": {"delay": "45", "carrier": "UA"}},
    {"tag": "DL", "properties": {"delay": "late"}},
    {"body": b"body"},
)


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("TAGS == 'UA'", [0]),
        ("int(properties.delay) > 30", [0]),
        ("has(properties.delay) && properties.delay.startsWith('l')", [1]),
        ("properties['carrier'] == 'UA' || TAGS == 'DL'", [0, 1]),
        ("!('delay' in properties)", [2]),
        ("KEYS.contains('k2')", [0]),
        ("size == 4 && queueId == 0", [2]),
        ("bornTime >= 1700000000001", [1, 2]),
        ("messageId.endsWith('2') && shardingKey == '' && bornHost == ''", [2]),
        ("properties.exists(name, name.matches('^car'))", [0]),
        ("true", [0, 1, 2]),
        ("1 / (queueId - 0) == 1", []),
    ],
)
def test_what_an_expression_lets_through(expression, found):
    assert CelFilter(expression).matching(*RUN).indexes == found


@pytest.mark.parametrize(
    ("expression", "line", "column", "said"),
    [
        ("TAGS ==", 1, 8, "Syntax error"),
        ("", 1, 1, "the expression is empty$"),
        (" \n", 2, 1, "the expression is empty$"),
        ("true &&\n  nope == 1", 2, 3, "undeclared reference to 'nope'"),
        ("TAGS == 1", 1, 6, "no matching overload"),
        ("TAGS", 1, 1, "a filter is true or false"),
        ("'\ud800' == TAGS", 1, 2, "Unicode"),
        (" " * LENGTH_MAX + "true", 1, LENGTH_MAX + 1, "at most"),
        ("(" * 200 + "true" + ")" * 200, 1, 1, "limit exceeded"),
    ],
)
def test_what_is_no_filter_is_refused_with_its_place(expression, line, column, said):
    with pytest.raises(FilterError, match=said) as caught:
        CelFilter(expression)
    assert (caught.value.line, caught.value.column) == (line, column)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(x", "missing ): (x"),
        ("x**", "bad repetition operator: **"),
        (r"\1", r"invalid escape sequence: \1"),
        ("x{1001}", "invalid repetition size: {1001}"),
        ("[b-a]", "invalid character class range: b-a"),
    ],
)
def test_a_text_that_is_no_pattern_is_refused_as_that_and_with_its_place(pattern, why):
    expression = f"TAGS == 'a' || properties.exists(name, name.matches(r'{pattern}'))"
    with pytest.raises(FilterError) as caught:
        CelFilter(expression)
    assert str(caught.value) == f"the text is no pattern: {why}"
    assert caught.value.position == expression.index("r'")


def test_a_pattern_that_is_too_large_to_be_tried_is_refused_by_its_cost():
    before_s = time.process_time()
    with pytest.raises(FilterError, match="one message could take"):
        CelFilter(" || ".join([r"TAGS.matches(r'(\pL{500}){2}')"] * 100))
    assert time.process_time() - before_s < 3, "each try takes 80 ms"


def test_a_refusal_says_no_code_of_the_library():
    for expression in ("", "TAGS ==", "(" * 200 + "true" + ")" * 200):
        with pytest.raises(FilterError) as caught:
            CelFilter(expression)
        assert "INVALID_ARGUMENT" not in str(caught.value)


def test_a_body_that_is_not_asked_for_is_not_copied():
    run = run_of({"body": b"x" * 100, "tag": "UA"}, {"body": b"x" * 100})
    assert CelFilter("TAGS == 'UA'").matching(*run).indexes == [0]
    assert CelFilter("size == 100").matching(*run).indexes == [0, 1]
    assert CelFilter("size(TAGS) == 2").matching(*run).indexes == [0]


def test_a_slow_expression_is_asked_about_one_message_at_once():
    """One may take 5 ms."""
    assert CelFilter("true").records_min == 1


def test_what_an_expression_walks_through_is_bounded():
    hundred = "[" + ",".join(map(str, range(100))) + "]"
    endless = f"{hundred}.all(x, {hundred}.all(y, {hundred}.all(z, x + y + z >= 0)))"
    with pytest.raises(FilterError, match="at most 5 are allowed"):
        CelFilter(endless)


@given(st.text())
def test_nothing_but_its_own_error_comes_out_of_any_text(text):
    refusal = None
    try:
        CelFilter(text)
    except FilterError as error:
        refusal = error
    assert refusal is None or 0 <= refusal.position <= len(text)


def test_a_broker_without_the_library_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "cel_expr_python", None)
    cel_filter._environment.cache_clear()
    with pytest.raises(FilterUnavailableError, match=r"protomq-broker\[cel\]"):
        CelFilter("true")
    cel_filter._environment.cache_clear()
