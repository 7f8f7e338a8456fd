"""SQL92 filters the plain way: random expressions as nested tuples, their text, and what they say of a message. No code of the broker's.

A message is a dict of texts. `evaluate` gives True, False, None (unknown), or raises Ended where RocketMQ's evaluation throws.
"""

import re

from hypothesis import strategies as st


class Ended(Exception):
    """No value: a text is not the number that is needed."""


NAMES = ("a", "b", "delay")
texts = st.sampled_from(
    ("", "x", "xy", "x'y", "5", "-5", "07", "5.5", "1e1", "true", "TRUE", "ü", "longer text")
)
messages = st.dictionaries(st.sampled_from(NAMES), texts)
_properties = st.sampled_from(NAMES).map(lambda name: ("name", name))
_numbers = (st.integers(-20, 20) | st.sampled_from((0.0, 5.5, -5.0, 10.0))).map(
    lambda number: ("number", number)
)
_values = (
    _properties
    | _numbers
    | texts.map(lambda text: ("text", text))
    | st.booleans().map(lambda truth: ("truth", truth))
)
_ordered = _properties | _numbers


def _leaves():
    pair = st.tuples(_values, _values).filter(
        # A condition is compared with a property or a condition only; TRUE is one.
        lambda pair: not any(one[0] == "truth" and two[0] in ("text", "number") for one, two in (pair, pair[::-1]))
    )
    return st.one_of(
        st.tuples(st.sampled_from(("=", "<>")), pair).map(lambda made: (made[0], *made[1])),
        st.tuples(st.sampled_from(("<", "<=", ">", ">=")), _ordered, _ordered),
        st.tuples(st.just("null"), _values, st.booleans()),
        st.tuples(st.sampled_from(("CONTAINS", "STARTSWITH", "ENDSWITH")), _properties, texts, st.booleans()),
        st.tuples(st.just("in"), _properties, st.lists(texts, min_size=1, max_size=4), st.booleans()),
        st.tuples(st.just("between"), _properties, st.integers(-9, 0), st.integers(0, 9), st.booleans()),
        st.tuples(st.just("is"), _properties),
        st.booleans().map(lambda truth: ("truth", truth)),
        st.just(("nothing",)),
    )


def _is_compared(node):
    return node[0] not in ("is", "nothing")


expressions = st.recursive(
    _leaves(),
    lambda inner: st.one_of(
        st.tuples(st.just("not"), inner),
        st.tuples(st.sampled_from(("AND", "OR")), st.lists(inner, min_size=2, max_size=4)),
        st.tuples(st.sampled_from(("=", "<>")), inner.filter(_is_compared), inner.filter(_is_compared)),
    ),
    max_leaves=8,
)


def quoted(text):
    return "'" + text.replace("'", "''") + "'"


def text_of(node):
    """The expression as a user writes it, with all brackets."""
    kind = node[0]
    if kind == "name":
        return node[1]
    if kind == "number":
        return str(node[1])
    if kind == "text":
        return quoted(node[1])
    if kind == "truth":
        return "TRUE" if node[1] else "false"
    if kind == "nothing":
        return "Null"
    if kind in ("=", "<>", "<", "<=", ">", ">="):
        return f"({text_of(node[1])} {kind} {text_of(node[2])})"
    if kind == "null":
        return f"({text_of(node[1])} IS {'NOT ' if node[2] else ''}NULL)"
    if kind in ("CONTAINS", "STARTSWITH", "ENDSWITH"):
        return f"({node[1][1]} {'not ' if node[3] else ''}{kind} {quoted(node[2])})"
    if kind == "in":
        return f"({node[1][1]} {'NOT ' if node[3] else ''}in ({', '.join(map(quoted, node[2]))}))"
    if kind == "between":
        return f"({node[1][1]} {'NOT ' if node[4] else ''}BETWEEN {node[2]} AND {node[3]})"
    if kind == "is":
        return f"({node[1][1]})"
    if kind == "not":
        return f"(NOT {text_of(node[1])})"
    return "(" + f" {kind} ".join(map(text_of, node[1])) + ")"


def evaluate(node, message):
    kind = node[0]
    if kind == "name":
        return message.get(node[1])
    if kind in ("number", "text", "truth"):
        return node[1]
    if kind == "nothing":
        return None
    if kind in ("=", "<>"):
        result = _equal(evaluate(node[1], message), evaluate(node[2], message))
        return result if kind == "=" else _not(result)
    if kind in ("<", "<=", ">", ">="):
        return _less(kind, evaluate(node[1], message), evaluate(node[2], message))
    if kind == "null":
        return (evaluate(node[1], message) is None) is not node[2]
    if kind in ("CONTAINS", "STARTSWITH", "ENDSWITH"):
        value = message.get(node[1][1])
        if value is None or not node[2]:
            return False
        holds = {"CONTAINS": node[2] in value, "STARTSWITH": value[: len(node[2])] == node[2],
                 "ENDSWITH": value[-len(node[2]) :] == node[2]}[kind]  # fmt: skip
        return holds != node[3]
    if kind == "in":
        value = message.get(node[1][1])
        return None if value is None else (value in node[2]) != node[3]
    if kind == "between":
        value = message.get(node[1][1])
        low, high = ("<", ">") if node[4] else (">=", "<=")
        first = _less(low, value, node[2])
        if first is node[4]:  # RocketMQ makes it OR and AND, which stop here.
            return first
        second = _less(high, value, node[3])
        return second if second is node[4] else None if None in (first, second) else not node[4]
    if kind == "is":
        return None if message.get(node[1][1]) is None else False
    if kind == "not":
        return _not(evaluate(node[1], message))
    decides, seen_unknown = kind == "OR", False
    for part in node[1]:
        value = evaluate(part, message)
        if value is decides:
            return decides
        seen_unknown = seen_unknown or value is None
    return None if seen_unknown else not decides


def _not(value):
    return None if value is None else not value


def _equal(left, right):
    if left is None:
        return True if right is None else None
    if right is None:
        return False
    if isinstance(left, str) and not isinstance(right, str):
        left = _like(left, right)
    elif isinstance(right, str) and not isinstance(left, str):
        right = _like(right, left)
    return isinstance(left, bool) == isinstance(right, bool) and left == right


def _less(operator, left, right):
    if left is None or right is None:
        return None
    if isinstance(left, str) and isinstance(right, str):
        left, right = _double(left), _double(right)
    elif isinstance(left, str):
        left = _like(left, right)
    elif isinstance(right, str):
        right = _like(right, left)
    return {"<": left < right, "<=": left <= right, ">": left > right, ">=": left >= right}[operator]


def _like(text, other):
    if isinstance(other, bool):
        return text.lower() == "true"
    if isinstance(other, float):
        return _double(text)
    if not re.fullmatch("[+-]?[0-9]+", text):
        raise Ended(text)
    return int(text)


def _double(text):
    if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", text):
        raise Ended(text)
    return float(text)


def matches(node, message):
    try:
        return evaluate(node, message) is True
    except Ended:
        return False
