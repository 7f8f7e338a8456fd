"""What SQL92 filters mean: RocketMQ's rules, node by node, as closures over the values of one message.

A row holds a value for each name of the expression, in the order of `names`. It is the octets of a property, a number for a numeric
field of the message, or None where there is none. What a condition is:

    left = right            both missing: true. Left missing: unknown. Right missing: false.
    left < right, ...       one missing: unknown
    IN, NOT IN              missing: unknown
    IS NULL                 never unknown
    CONTAINS and the like   missing, or an empty text to look for: false, with NOT too
    a property as condition missing: unknown; else false, since a property is a text
    NOT, AND, OR            three-valued: unknown AND false is false, unknown OR true is true

Values of two kinds: a text beside a number is converted to that kind of number (whole: 64 bits). Beside TRUE or FALSE it is true if it
says so. Two texts are equal octet by octet; with < both have to be numbers. A text that is no such number ends the evaluation: the
message does not match, unless what stands before it has decided already. Pure.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Final, NoReturn, TypeAlias

from .sql_nodes import (
    And,
    Compare,
    Constant,
    Equal,
    In,
    IsNull,
    Node,
    Not,
    Or,
    Property,
    TextTest,
    Truth,
)

Value: TypeAlias = bytes | int | float | bool | None
Row: TypeAlias = Sequence[bytes | int | None]
Rule: TypeAlias = Callable[[Row], Value]

_WHOLE: Final = re.compile(rb"([+-]?)(?=[0-9])0*+([1-9][0-9]{0,18})?")
_REAL: Final = re.compile(
    rb"[\x00-\x20]*+([+-]?(?:[0-9]++\.?[0-9]*+|\.[0-9]++)(?:[eE][+-]?[0-9]++)?)[fFdD]?[\x00-\x20]*+"
)
"""Nothing is tried twice (`++`): else a thousand digits with a letter behind them take 40 ms."""
_NUMBER_SIZE_MAX: Final = 1_000
"""Octets: converting longer ones takes longer than it should."""
_REAL_SIZE_LONG: Final = 40
_DIGITS_ALWAYS_FIT: Final = 18
_SHORT_SEARCH_SIZE: Final = 6
_LONG_TEXT_SIZES: Final = range(2_500, 30_000)
_COMPARISONS: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


def _contains(text: bytes, search: bytes) -> bool:
    """`search in text`, in a time that the text's size bounds.

    Python searches in texts of these sizes by comparing at each place, which takes ten times as long at worst. In a larger one it goes
    through the text once. So such a text is made larger, by an octet that ends no match.
    """
    if len(text) in _LONG_TEXT_SIZES and len(search) >= _SHORT_SEARCH_SIZE:
        text = text.ljust(_LONG_TEXT_SIZES.stop, b"\1" if search[-1] == 0 else b"\0")
    return search in text


_TEXT_TESTS: Final[Mapping[str, Callable[[bytes, bytes], bool]]] = {
    "CONTAINS": _contains, "STARTSWITH": bytes.startswith, "ENDSWITH": bytes.endswith,
}  # fmt: skip


def names_in(node: Node) -> tuple[str, ...]:
    """The names of properties and fields in a condition, each once."""
    found: dict[str, None] = {}

    def walk(node: Node) -> None:
        match node:
            case Property():
                found[node.name] = None
            case Equal() | Compare():
                walk(node.left)
                walk(node.right)
            case IsNull() | TextTest() | In() | Truth() | Not():
                walk(node.operand)
            case And() | Or():
                for operand in node.operands:
                    walk(operand)
            case Constant():
                pass

    walk(node)
    return tuple(found)


def rule_of(node: Node, names: Sequence[str]) -> Rule:
    """The closure that gives the node's value for a row. It raises ValueError where the evaluation ends without one."""
    match node:
        case Constant():
            value = node.value
            return lambda row: value
        case Property():
            return operator.itemgetter(names.index(node.name))
        case Equal():
            return _equal(node, names)
        case Compare():
            return _compare(node, names)
        case IsNull():
            operand = rule_of(node.operand, names)
            return lambda row: operand(row) is None
        case TextTest():
            return _text_test(node, names)
        case In():
            return _in(node, names)
        case Truth():
            operand = rule_of(node.operand, names)
            return lambda row: None if operand(row) is None else False
        case Not():
            return _not(rule_of(node.operand, names))
        case And():
            return _all_of([rule_of(operand, names) for operand in node.operands])
        case Or():
            return _one_of([rule_of(operand, names) for operand in node.operands])


def _not(operand: Rule) -> Rule:
    def rule(row: Row) -> Value:
        value = operand(row)
        return None if value is None else not value

    return rule


def _all_of(operands: Sequence[Rule]) -> Rule:
    def rule(row: Row) -> Value:
        result: bool | None = True
        for operand in operands:
            value = operand(row)
            if not value:
                if value is not None:
                    return False
                result = None
        return result

    return rule


def _one_of(operands: Sequence[Rule]) -> Rule:
    def rule(row: Row) -> Value:
        result: bool | None = False
        for operand in operands:
            value = operand(row)
            if value:
                return True
            if value is None:
                result = None
        return result

    return rule


def _equal(node: Equal, names: Sequence[str]) -> Rule:
    left, right = rule_of(node.left, names), rule_of(node.right, names)

    def rule(row: Row) -> Value:
        one, other = left(row), right(row)
        if one is None:
            return True if other is None else None
        return False if other is None else _are_equal(one, other)

    def equals_text(row: Row) -> Value:
        one = left(row)
        if type(one) is bytes:
            return one == wanted
        return None if one is None else _are_equal(one, wanted)

    if isinstance(node.right, Constant) and isinstance(node.right.value, bytes):
        wanted = node.right.value
        return equals_text
    return rule


def _compare(node: Compare, names: Sequence[str]) -> Rule:
    left, right = rule_of(node.left, names), rule_of(node.right, names)
    holds = _COMPARISONS[node.operator]

    def rule(row: Row) -> Value:
        one, other = left(row), right(row)
        if one is None or other is None:
            return None
        if type(one) is bytes:
            one = _real(one) if type(other) is bytes else _as_number(one, other)
        if type(other) is bytes:
            other = _as_number(other, one)
        return holds(one, other)  # type: ignore[arg-type] # both are numbers

    def rule_of_whole(row: Row) -> Value:
        one = left(row)
        if one is None:
            return None
        return holds(_whole(one) if type(one) is bytes else one, limit)  # type: ignore[arg-type] # a number

    if isinstance(node.right, Constant) and type(node.right.value) is int:
        limit = node.right.value
        return rule_of_whole
    return rule


def _text_test(node: TextTest, names: Sequence[str]) -> Rule:
    if not node.search:
        return lambda row: False
    operand, search, negated = rule_of(node.operand, names), node.search, node.negated
    holds = _TEXT_TESTS[node.keyword]

    def rule(row: Row) -> Value:
        value = operand(row)
        return type(value) is bytes and holds(value, search) is not negated

    return rule


def _in(node: In, names: Sequence[str]) -> Rule:
    operand, values, negated = rule_of(node.operand, names), frozenset(node.values), node.negated

    def rule(row: Row) -> Value:
        value = operand(row)
        return (value in values) is not negated if type(value) is bytes else None

    return rule


def _are_equal(one: Value, other: Value) -> bool:
    if type(one) is bytes and type(other) is not bytes:
        one = _as_kind_of(one, other)
    elif type(other) is bytes and type(one) is not bytes:
        other = _as_kind_of(other, one)
    # True equals 1 in Python, and nothing but TRUE here.
    return (type(one) is bool) == (type(other) is bool) and one == other


def _as_kind_of(text: bytes, other: Value) -> Value:
    return len(text) == len(b"true") and text.lower() == b"true" if type(other) is bool else _as_number(text, other)


def _as_number(text: bytes, other: Value) -> float:
    return _whole(text) if type(other) is int else _real(text)


def _whole(text: bytes) -> int:
    if len(text) <= _DIGITS_ALWAYS_FIT and text.isdigit():
        return int(text)
    found = _WHOLE.fullmatch(text) if len(text) <= _NUMBER_SIZE_MAX else None
    if found is not None:
        value = int(found[1] + (found[2] or b"0"))
        if -(1 << 63) <= value < 1 << 63:
            return value
    raise ValueError("not a whole number of 64 bits")


def _real(text: bytes) -> float:
    if len(text) > _REAL_SIZE_LONG:
        return _long_real(text) if len(text) <= _NUMBER_SIZE_MAX else _no_number()
    return _short_real(text)


def _short_real(text: bytes) -> float:
    found = _REAL.fullmatch(text)
    return _no_number() if found is None else float(found[1])


_long_real = lru_cache(64)(_short_real)
"""To convert a thousand digits takes 50 us, and an expression may compare them 500 times."""


def _no_number() -> NoReturn:
    raise ValueError("no number")
