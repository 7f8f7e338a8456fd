"""SQL92 filters: what is an expression, and what is said of a text that is none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq_broker.filters.errors import FilterError
from protomq_broker.filters.sql_nodes import (
    And,
    Compare,
    Constant,
    Equal,
    In,
    Not,
    Or,
    Property,
    Truth,
)
from protomq_broker.filters.sql_syntax import (
    CONTAINS_LITERALS,
    DEPTH_MAX,
    LENGTH_MAX,
    LITERALS_MAX,
    parse,
)

A, B = Property("a"), Property("b")
X = Constant(b"x")


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("a = 'x'", Equal(A, X)),
        ("a <> 'it''s'", Not(Equal(A, Constant(b"it's")))),
        ("'x' = a", Equal(X, A)),
        ("a > 5", Compare(">", A, Constant(5))),
        ("a > 5L", Compare(">", A, Constant(5))),
        ("a >= - 5.5E1", Compare(">=", A, Constant(-55.0))),
        ("a < .5", Compare("<", A, Constant(0.5))),
        ("a < 5.", Compare("<", A, Constant(5.0))),
        ("a < 0.0", Compare("<", A, Constant(0.0))),
        ("a between 1 And 2", And((Compare(">=", A, Constant(1)), Compare("<=", A, Constant(2))))),
        ("a NOT BETWEEN 1 AND 2", Or((Compare("<", A, Constant(1)), Compare(">", A, Constant(2))))),
        ("a in ('x', 'y')", In(A, (b"x", b"y"), False)),
        ("a NOT IN ('x')", In(A, (b"x",), True)),
        ("a", Truth(A)),
        ("a AND b OR a", Or((And((Truth(A), Truth(B))), Truth(A)))),
        ("a AND (b OR a)", And((Truth(A), Or((Truth(B), Truth(A)))))),
        ("NOT a", Not(Truth(A))),
        ("TRUE", Constant(True)),
        ("null", Constant(None)),
        ("notable = 'x'", Equal(Property("notable"), X)),
        ("$in_1 = 'x'", Equal(Property("$in_1"), X)),
        ("a /* not b */ = -- c\n 'x'", Equal(A, X)),
        ("a = 'ü\n'", Equal(A, Constant("ü\n".encode()))),
    ],
)
def test_an_expression_is_read_as_rocketmq_reads_it(text, node):
    assert parse(text) == node


@pytest.mark.parametrize(
    ("text", "line", "column", "said"),
    [
        ("", 1, 1, "the expression is empty$"),
        (" \n", 2, 1, "the expression is empty$"),
        ("a = ", 1, 5, "the expression ends; expected: "),
        ("a == 5", 1, 4, "no ==: equal is ="),
        ("a = 1 AND\n  b > > 3", 2, 7, "'>' was not expected"),
        ("(a", 1, 3, r"expected: \)"),
        ("a)", 1, 2, r"'\)' was not expected"),
        ("a = 'x", 1, 5, "no closing quote"),
        ("a = \"x\"", 1, 5, "a text stands in single quotes"),
        ("a != 'x'", 1, 3, "unequal is <>"),
        ("! (a = 'x')", 1, 1, "write NOT"),
        ("a = 1 && b = 2", 1, 7, "write AND"),
        ("a = 1 || b = 2", 1, 7, "write OR"),
        ("a = 1;", 1, 6, "ends without ;"),
        ("# = 1", 1, 1, "begins nothing"),
        ("ключ = 'x'", 1, 1, r"'к' cannot stand in a name here, only A-Z a-z 0-9 _ \$: CEL has any property"),
        ("größe = 1", 1, 3, "'ö' cannot stand in a name here"),
        ("a LIKE 'x%'", 1, 3, "there is no LIKE: CONTAINS"),
        ("a IN (5)", 1, 7, "expected: a text in single quotes"),
        ("a = 007", 1, 6, "'0' was not expected"),
        ("5", 1, 1, "a condition is expected"),
        ("a AND 'x'", 1, 7, "a condition is expected"),
        ("NOT a = 'x'", 1, 1, "brackets"),
        ("b AND NOT a IS NULL", 1, 7, "brackets"),
        ("a = NULL", 1, 5, "IS NULL"),
        ("a > 'x'", 1, 5, "only numbers"),
        ("a BETWEEN 'x' AND 'y'", 1, 11, "only numbers"),
        ("TRUE > 1", 1, 1, "only numbers"),
        ("a BETWEEN 5 AND 3", 1, 11, "lower number first"),
        ("(a > 5) = 'x'", 1, 2, "TRUE or FALSE"),
        ("-a > 3", 1, 2, "only a number has a sign"),
        ("5 IN ('x')", 1, 1, "a property is expected"),
        ("(a = 'x') CONTAINS 'x'", 1, 2, "a property is expected"),
        ("a = 9223372036854775808", 1, 5, "up to 9223372036854775807"),
        ("a > +9223372036854775808", 1, 6, "up to 9223372036854775807"),
        ("a = -(9223372036854775808)", 1, 7, "up to 9223372036854775807"),
        ("a = - -9223372036854775808", 1, 7, "up to 9223372036854775807"),
        ("a = -9223372036854775809", 1, 6, "up to 9223372036854775807"),
        ("a BETWEEN 1 AND 9223372036854775808", 1, 17, "up to 9223372036854775807"),
        ("a = 1e400", 1, 5, "too large"),
        ("a = '\ud800'", 1, 5, "Unicode"),
    ],
)
def test_what_is_no_expression_is_refused_with_its_place(text, line, column, said):
    with pytest.raises(FilterError, match=said) as caught:
        parse(text)
    assert (caught.value.line, caught.value.column) == (line, column)
    assert caught.value.position == len("".join(text.splitlines(True)[: line - 1])) + column - 1


def test_what_could_stand_there_is_listed():
    with pytest.raises(FilterError) as caught:
        parse("a IS 5")
    assert caught.value.expected == ("NOT", "NULL")


@pytest.mark.parametrize(
    "text",
    [
        "a" * (LENGTH_MAX + 1),
        "(" * DEPTH_MAX + "a" + ")" * DEPTH_MAX,
        "NOT " * DEPTH_MAX + "a",
        "a" + " = b" * DEPTH_MAX,
        "a > " + "- " * DEPTH_MAX + "5",
        "a IN ('" + "','".join(map(str, range(LITERALS_MAX + 1))) + "')",
        " OR ".join(f"a={i}" for i in range(LITERALS_MAX + 1)),
        " OR ".join(f"a CONTAINS '{i}'" for i in range(LITERALS_MAX // CONTAINS_LITERALS + 1)),
        "(" * 4_000 + "a" + ")" * 4_000,
    ],
    ids=len,
)
def test_an_expression_is_bounded(text):
    with pytest.raises(FilterError, match=r"at most|more than"):
        parse(text)


def test_an_expression_may_be_as_large_as_the_bounds_say():
    parse(" OR ".join(f"a={i}" for i in range(LITERALS_MAX)))
    parse(" OR ".join(f"a CONTAINS '{i}'" for i in range(LITERALS_MAX // CONTAINS_LITERALS)))
    parse("(" * (DEPTH_MAX - 2) + "a = 5" + ")" * (DEPTH_MAX - 2))
    assert parse("a = -9223372036854775808") == parse("a = -9223372036854775808L")


_pieces = st.sampled_from(
    ["a", "NOT", "AND", "OR", "=", "<>", "<", "(", ")", "'x'", "5", "1.5", "-", "+", "IN", ",", "BETWEEN", "IS",
     "NULL", "CONTAINS", "TRUE", "--", "/*", "*/", "'", "\n", "é"]
)  # fmt: skip


@given(st.text() | st.lists(_pieces).map(" ".join) | st.lists(_pieces).map("".join))
def test_nothing_but_its_own_error_comes_out_of_any_text(text):
    refusal = None
    try:
        parse(text)
    except FilterError as error:
        refusal = error
    if refusal is not None:
        assert 0 <= refusal.position <= len(text)
        assert refusal.line >= 1
        assert refusal.column >= 1
        assert str(refusal)
