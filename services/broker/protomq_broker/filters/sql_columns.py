"""SQL92 conditions over many messages at once: what `sql_rules.py` says of one, said by arrays.

    outcome of a record     true | false | neither (unknown), or open: the record's own rule has to be asked

Conditions that have such a rule compare a property or a field of the message with a constant, or ask whether it is there. An expression
with any other condition, or with very many, has none. Open are texts that are no whole number, where one is needed. As in the rules, AND
and OR ask nothing that stands behind what has decided. Pure.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .fields import OWN_NUMBERS, Columns, Texts
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
)

COMPARISONS_MAX: Final = 32
"""Most constants that an expression compares: each costs some array operations, however few records are asked about."""
_DIGITS_MAX: Final = 18
"""So many always fit into 64 bits."""
_ZERO: Final = np.uint8(ord("0"))
_MINUS: Final = ord("-")
_PLUS: Final = ord("+")

Flags: TypeAlias = NDArray[np.bool_]


class Outcome(NamedTuple):
    """Of each record; where `is_open`, the other two say nothing."""

    is_true: Flags
    is_false: Flags
    is_open: Flags


ColumnRule: TypeAlias = Callable[[Columns], Outcome]
_Compare: TypeAlias = Callable[[NDArray[np.int64], Any], Flags]
_COMPARISONS: Final[Mapping[str, _Compare]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


def column_rule_of(node: Node) -> ColumnRule | None:
    """The rule for many records; None if a condition has none."""
    return _rule_of(node) if comparison_count(node) <= COMPARISONS_MAX else None


def comparison_count(node: Node) -> int:
    """How many constants an expression compares with something."""
    match node:
        case And() | Or():
            return sum(map(comparison_count, node.operands))
        case Not():
            return comparison_count(node.operand)
        case In():
            return len(node.values)
        case _:
            return 1


def rule_comparison_count(node: Node) -> int:
    """How many comparisons the rule for one message makes: it finds a value among others at once."""
    match node:
        case And() | Or():
            return sum(map(rule_comparison_count, node.operands))
        case Not():
            return rule_comparison_count(node.operand)
        case _:
            return 1


def _rule_of(node: Node) -> ColumnRule | None:
    match node:
        case Not():
            operand = _rule_of(node.operand)
            return None if operand is None else _not(operand)
        case And() | Or():
            operands = [rule for rule in map(_rule_of, node.operands) if rule is not None]
            if len(operands) < len(node.operands):
                return None
            return _all_of(operands) if isinstance(node, And) else _one_of(operands)
        case Equal(Property(name), Constant(bytes() as text)):
            return _text_rule(name, lambda columns, texts: _equals(columns, texts, text))
        case Equal(Property(name), Constant(value)) if type(value) is int:
            return _number_rule(name, operator.eq, value)
        case Compare(symbol, Property(name), Constant(value)) if type(value) is int:
            return _number_rule(name, _COMPARISONS[symbol], value)
        case In(Property(name), values, negated):
            return _text_rule(
                name, lambda columns, texts: _is_among(columns, texts, values) != negated
            )
        case TextTest("STARTSWITH" | "ENDSWITH", Property(name), search, negated) if search:
            return _begins_or_ends(name, search, node.keyword == "STARTSWITH", negated)
        case IsNull(Property(name)) if name not in OWN_NUMBERS:
            return _is_missing(name)
        case _:
            return None


def _not(operand: ColumnRule) -> ColumnRule:
    def rule(columns: Columns) -> Outcome:
        is_true, is_false, is_open = operand(columns)
        return Outcome(is_false, is_true, is_open)

    return rule


def _all_of(operands: Sequence[ColumnRule]) -> ColumnRule:
    first, *others = operands

    def rule(columns: Columns) -> Outcome:
        is_true, is_false, is_open = first(columns)
        for operand in others:
            outcome = operand(columns)
            is_open = is_open | (outcome.is_open & ~is_false)
            is_true = is_true & outcome.is_true
            is_false = is_false | outcome.is_false
        return Outcome(is_true, is_false, is_open)

    return rule


def _one_of(operands: Sequence[ColumnRule]) -> ColumnRule:
    return _not(_all_of([_not(operand) for operand in operands]))


def _text_rule(name: str, test: Callable[[Columns, Texts], Flags]) -> ColumnRule | None:
    """Unknown where there is no text. A number of the message's own is no text."""
    if name in OWN_NUMBERS:
        return None

    def rule(columns: Columns) -> Outcome:
        texts = columns.texts(name)
        never = np.zeros(columns.count, np.bool_)
        if texts is None:
            return Outcome(never, never, never)
        is_there, holds = texts.starts >= 0, test(columns, texts)
        return Outcome(is_there & holds, is_there & ~holds, never)

    return rule


def _number_rule(name: str, compare: _Compare, limit: int) -> ColumnRule:
    """Unknown where there is no value. Open where it is a text that is no whole number."""

    def rule(columns: Columns) -> Outcome:
        texts = columns.texts(name)
        never = np.zeros(columns.count, np.bool_)
        if name in OWN_NUMBERS:
            holds = compare(columns.own_numbers(name), limit)
            # A property of the same name goes first.
            return Outcome(holds, ~holds, never if texts is None else texts.starts >= 0)
        if texts is None:
            return Outcome(never, never, never)
        numbers, is_number = _whole_numbers(columns, texts)
        holds = compare(numbers, limit)
        return Outcome(is_number & holds, is_number & ~holds, (texts.starts >= 0) & ~is_number)

    return rule


def _is_missing(name: str) -> ColumnRule:
    def rule(columns: Columns) -> Outcome:
        texts = columns.texts(name)
        never = np.zeros(columns.count, np.bool_)
        is_missing = ~never if texts is None else texts.starts < 0
        return Outcome(is_missing, ~is_missing, never)

    return rule


def _begins_or_ends(name: str, search: bytes, at_start: bool, negated: bool) -> ColumnRule | None:
    """False where there is no text, negated too."""
    if name in OWN_NUMBERS:
        return None

    def rule(columns: Columns) -> Outcome:
        texts = columns.texts(name)
        never = np.zeros(columns.count, np.bool_)
        if texts is None:
            return Outcome(never, ~never, never)
        holds = texts.ends - texts.starts >= len(search)
        at = texts.starts if at_start else texts.ends - len(search)
        holds[holds] = columns.has_text(at[holds], search)
        holds = (holds != negated) & (texts.starts >= 0)
        return Outcome(holds, ~holds, never)

    return rule


def _equals(columns: Columns, texts: Texts, wanted: bytes) -> Flags:
    is_equal = texts.ends - texts.starts == len(wanted)
    if wanted:
        is_equal[is_equal] = columns.has_text(texts.starts[is_equal], wanted)
    return is_equal


def _is_among(columns: Columns, texts: Texts, values: Sequence[bytes]) -> Flags:
    is_among = np.zeros(columns.count, np.bool_)
    for value in values:
        is_among |= _equals(columns, texts, value)
    return is_among


def _whole_numbers(columns: Columns, texts: Texts) -> tuple[NDArray[np.int64], Flags]:
    """The numbers that the texts are, and which texts are one: a sign or none, and 1 to 18 digits."""
    octets = columns.octets
    is_there = texts.starts >= 0
    first = octets[texts.starts]
    is_negative = (first == _MINUS) & is_there
    is_signed = is_negative | ((first == _PLUS) & is_there)
    starts = texts.starts + is_signed
    sizes = texts.ends - starts
    is_number = (sizes > 0) & (sizes <= _DIGITS_MAX)
    numbers = np.zeros(columns.count, np.int64)
    for at in range(int(sizes.max(initial=0, where=is_number))):
        # Behind a text of a front there are octets enough.
        digits = octets[starts + at] - _ZERO
        has_digit = sizes > at
        is_number &= ~has_digit | (digits <= 9)
        numbers = np.where(has_digit, numbers * 10 + digits, numbers)
    return np.where(is_negative, -numbers, numbers), is_number
