"""What a CEL expression may cost: no legal one stops the broker for long, whatever the message."""

import time

import pytest
from cel_expr_python import cel
from hypothesis import given, settings
from hypothesis import strategies as st

from protomq_broker.filters import cel_cost
from protomq_broker.filters.cel_cost import MessageSize, cost_of, fields_of
from protomq_broker.filters.cel_filter import CelFilter
from protomq_broker.filters.cel_tree import tree_of
from protomq_broker.filters.errors import FilterError
from tests.unit.protomq_broker.filters.run_helpers import run_of

THIRTY = "[" + ",".join(map(str, range(30))) + "]"
TEN = "[" + ",".join(map(str, range(10))) + "]"
HUNDRED = "[" + ",".join(map(str, range(100))) + "]"
NO_LIMIT = MessageSize(32 << 10, (32 << 10) // 6)


@pytest.mark.parametrize(
    ("expression", "begins"),
    [
        (f"{TEN}.all(c, {THIRTY}.all(a, {THIRTY}.all(b, !properties.l.contains('{'x' * 1500}y'))))", "('xxx"),
        (f"{THIRTY}.all(a, {THIRTY}.all(b, !properties.l.contains('{'x' * 1500}y')))", "('xxx"),
        (f"{HUNDRED}.map(a, {'+'.join(['properties.l'] * 20)}).size() > 0", "+properties.l)."),
        (f"{HUNDRED}.all(a, {HUNDRED}.all(b, a + b > 0 && a + b < 900))", "(b, a + b"),
        ("properties.l.matches('a.{14}b')", "('a"),
        ("properties.l.matches('((x{1,30}){1,30})y')", "('(("),
        (r"properties.l.matches('\\pL{1000}')", "('"),
        ("properties.l.matches('[a[:alpha:]].{14}[[:upper:]]')", "('["),
        ("properties.l.matches('(?i:a).{14}b')", "('("),
        ("properties.all(k, properties.all(j, properties.all(i, i != j)))", "(i, i != j)"),
    ],
)
def test_what_could_take_long_is_refused_with_the_place_that_does(expression, begins):
    with pytest.raises(FilterError, match=r"one message could take .* ms, at most 5 are allowed") as caught:
        CelFilter(expression)
    assert expression[caught.value.position :].startswith(begins), expression[caught.value.position :]


@pytest.mark.parametrize(
    ("expression", "column", "said"),
    [
        ("TAGS.matches(properties.pattern)", 24, "a text in quotes"),
        ("google.protobuf.Int32Value{value: 1} == 1", 1, "makes no google.protobuf.Int32Value"),
    ],
)
def test_what_has_no_bound_is_refused(expression, column, said):
    with pytest.raises(FilterError, match=said) as caught:
        CelFilter(expression)
    assert caught.value.column == column


@pytest.mark.parametrize(
    "expression",
    [
        "TAGS == 'UA' && int(properties.delay) > 30 && properties.origin in ['JFK', 'LGA']",
        "properties.exists(k, k.startsWith('x-'))",
        "properties.all(k, properties[k] != '')",
        "['a', 'b', 'c'].exists(k, k in properties && properties[k].contains('x'))",
        f"properties.l.contains('{'x' * 2_000}')",
        "properties.url.matches('^https?://[a-z.]+/(a|b)+[0-9]{2,4}$') && properties.mail.matches('[a-z]+@[a-z]+\\\\.com')",
        "properties.l.matches('(?i)[a-k]+@x|y')",
        "properties.l.matches('^(?i:error|warn)$')",
        "properties.l.matches('^[[:alpha:]_][][:alnum:]_]{0,30}[^[:space:]]$')",
        "properties.l.matches('.*?x') || properties.l.matches('\\\\bx')",
        f"{HUNDRED}.exists(a, string(a) == properties.delay)",
        "timestamp(properties.at).getHours('Europe/Zurich') > 8",
        "(properties.a + properties.b + properties.c).size() > 10",
        f"{HUNDRED}.map(a, a * 2).filter(a, a > 7).size() == 3",
    ],
)
def test_usual_expressions_are_asked_about_messages_of_any_size(expression):
    assert CelFilter(expression)._largest == NO_LIMIT


def test_a_message_that_is_too_large_for_an_expression_does_not_match(caplog):
    many = {f"x{number}": "" for number in range(257)}
    run = run_of({"properties": many}, {"properties": dict(list(many.items())[:-1])})
    some = CelFilter("properties.filter(k, k.startsWith('x')).size() > 1")
    assert some.matching(*run).indexes == some.matching(*run).indexes == [1]
    assert caplog.text.count("is too large for the CEL filter") == 1
    assert "up to 256 properties" in caplog.text
    part_of = "properties.l.contains(properties.m)"
    assert CelFilter(part_of)._largest.front_bytes < 32_000
    run = run_of({"properties": {"l": "x" * 32_000, "m": "x"}}, {"properties": {"l": "x" * 3_000, "m": "x"}})
    assert CelFilter(part_of).matching(*run).indexes == [1]
    run = run_of({"properties": {"l": "x", "m": "x"}, "body": b"x" * 100_000})
    for expression in (part_of, part_of + " && size > 0"):  # A body counts nothing, whether it is read or not.
        assert CelFilter(expression).matching(*run).indexes == [0]


class Ticks:
    """Counts the octets of all texts that an evaluation shows it."""

    def __init__(self):
        self.octets = 0

    def __call__(self, text):
        self.octets += len(text.encode())
        return True


TEXTS = st.one_of(st.sampled_from(["", "a", "bb", "é", "c" * 50]))


@st.composite
def conditions(draw, names=(), depth=0):
    """Conditions that show texts to `tick` within loops within each other."""

    def text():
        kinds = ["literal", "field", "sum", "looked up", *["name"] * (3 * bool(names))]
        match draw(st.sampled_from(kinds)):
            case "name":
                return draw(st.sampled_from(names))
            case "field":
                return draw(st.sampled_from(["TAGS", "properties.l"]))
            case "looked up":
                return f"properties[{draw(st.sampled_from([*names, repr('l')]))}]"
            case "sum":
                one = draw(st.sampled_from([*names, "TAGS", "'xyz'"]))
                return f"({one} + {draw(st.sampled_from([*names, 'properties.l']))} + string({one}))"
        return repr(draw(TEXTS))

    def many():
        literal = "[" + ", ".join(text() for _ in range(draw(st.integers(1, 4)))) + "]"
        kinds = ["properties", literal, f"{literal}.map(m, m + TAGS)", "properties.map(m, properties[m])"]
        kinds += [f"properties.filter(m, {literal}.exists(i, i != m))", f"({literal} + properties.map(m, m))"]
        kinds += [f"[{literal}, ['z']][0]", "{'k': TAGS, TAGS: 'v'}"]
        return draw(st.sampled_from(kinds))

    if depth == 3 or (depth and draw(st.booleans())):
        return f"(tick({text()}) && tick({text()}))"
    name = f"v{depth}"
    macro = draw(st.sampled_from(["all", "exists_one", "filter"]))
    inner = draw(conditions((*names, name), depth + 1))
    loop = f"{many()}.{macro}({name}, {inner})"
    return f"({loop}.size() >= 0)" if macro == "filter" else f"({loop} || true)" if macro == "exists_one" else loop


@settings(max_examples=200, deadline=None)
@given(conditions(), st.dictionaries(st.text("abl", min_size=1, max_size=3), TEXTS, max_size=6), TEXTS)
def test_an_evaluation_makes_no_more_steps_than_it_was_priced_at(expression, properties, tag):
    ticks = Ticks()
    texts = [cel.Type.STRING]
    overload = cel.Overload("tick_string", cel.Type.BOOL, texts, False, ticks)
    kinds = {"properties": cel.Type.Map(cel.Type.STRING, cel.Type.STRING), "TAGS": cel.Type.STRING}
    environment = cel.NewEnv(variables=kinds, functions=[cel.FunctionDecl("tick", [overload])])
    compiled = environment.compile(expression)
    properties = {**properties, "l": "long"}
    front = len(tag.encode()) + sum(len((name + value).encode()) for name, value in properties.items())
    fields = fields_of(MessageSize(front, len(properties)), {"properties": "MAP", "TAGS": "STRING"})
    price_ns = 1e9
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(cel_cost._CONVERSIONS, "tick", price_ns)
        cost = cost_of(tree_of(compiled.serialize()), expression, fields)
    try:
        compiled.eval(data={"properties": properties, "TAGS": tag}).value()
    except (RuntimeError, ValueError):
        pass  # A property that is not there. What was done before counts.
    assert ticks.octets * price_ns <= cost.total_ns


def largest_accepted(expression_of):
    """The filter of the most parts that is accepted."""
    least, most = 1, 4_000
    accepted = CelFilter(expression_of(1))
    while least <= most:
        middle = (least + most) // 2
        try:
            accepted, least = CelFilter(expression_of(middle)), middle + 1
        except FilterError:
            most = middle - 1
    return accepted


def any_of(part):
    return lambda count: f"[{','.join([part] * count)}].all(b, b)"


def over(body):
    return lambda count: f"[{','.join(map(str, range(count)))}]{body}"


@pytest.mark.parametrize(
    "expression_of",
    [
        any_of("properties.l.contains('xxy')"),
        any_of(f"properties.l.contains('{'x' * 500}y')"),
        any_of("properties.l.matches('([ab]a?b?){2}c')"),
        any_of("size(properties.l + properties.l + properties.l) > 0"),
        any_of("properties == properties"),
        over(".map(x, x).map(y, y + 1).size() > 0"),
        over(f".all(x, {THIRTY}.all(y, x + y >= 0))"),
        over(".all(x, properties.all(k, properties[k].contains(string(x)) || true))"),
        lambda count: f"properties.map(k, {'+'.join(['k'] * count)}).size() > 0",
        lambda count: f"properties.all(k, {'&&'.join(['properties[k] != TAGS'] * count)})",
    ],
)
def test_the_largest_expressions_that_are_accepted_are_done_in_time(expression_of):
    """At their worst messages. A busy machine takes twice as long as a quiet one, in CPU time too."""
    condition = largest_accepted(expression_of)
    front, count = condition._largest
    count = min(count, front // 12) - 2
    texts = ["x" * (front - 100), ("ab" * front)[: front - 100]]
    for properties in ({"l": texts[0]}, {"l": texts[1]}, {f"{number:04x}": "" for number in range(count)}):
        run = run_of({"properties": properties})
        taken = []
        for _ in range(5):
            began_s = time.thread_time()
            assert condition.matching(*run).examined == 1
            taken.append(time.thread_time() - began_s)
        assert min(taken) < 0.015
