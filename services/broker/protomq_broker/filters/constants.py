"""The constants that every message must contain which an SQL92 filter lets through: found in the expression, looked for in raw records.

`a = 'x' AND b > 5` is true only of messages with the octets of `x`, of the name `a`, and of the name `b`. A clause is a choice: one of its
literals at least stands in every match. Rules:
- A text stands in a record as it is, one octet behind the other, whatever library wrote the record. Lengths do not (a length may be
  written wider than needed); the last octet of a length below 128 is the length, or 0.
- An evaluation that ends without a value is no match. So only two cases count: a condition is true, or, for NOT, false.
- Names of the message's own fields prove nothing: these need no property.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from .fields import KEYS, OWN_FIELDS, TAGS
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

CHOICES_MAX: Final = 8
"""Literals of a clause: each of them is a pass over the records."""


@dataclass(frozen=True, slots=True)
class Literal:
    """Octets that a match contains; `is_whole`: as a whole text, behind its length."""

    octets: bytes
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class Clause:
    """One of `literals` stands in every match. `is_name`: they are names of properties; `is_tag`: it has one as its tag."""

    literals: frozenset[Literal]
    is_name: bool = False
    is_tag: bool = False


def best_clause(node: Node) -> Clause | None:
    """What to look for in the raw records; None: there is nothing."""
    return _best(_needed(node, True), CHOICES_MAX)


def needed_tags(node: Node) -> frozenset[bytes]:
    """The tags of which every match has one; empty: any, or none."""
    clauses = [clause for clause in _needed(node, True) if clause.is_tag]
    best = min(clauses, key=lambda clause: len(clause.literals), default=None)
    return frozenset(literal.octets for literal in best.literals) if best else frozenset()


def _best(clauses: Iterable[Clause], choices_max: int) -> Clause | None:
    """The clause that few records can be expected to meet: a long value rather than a short one, a value rather than a name."""
    found = [clause for clause in clauses if len(clause.literals) <= choices_max]
    return max(
        found,
        key=lambda clause: (
            not clause.is_name,
            min(len(literal.octets) + literal.is_whole for literal in clause.literals),
            -len(clause.literals),
        ),
        default=None,
    )


def _needed(node: Node, outcome: bool) -> list[Clause]:
    """What stands in every message for which the node is `outcome`: all of these clauses hold."""
    match node:
        case Not():
            return _needed(node.operand, not outcome)
        case And() | Or():
            if isinstance(node, And) is outcome:
                return [clause for part in node.operands for clause in _needed(part, outcome)]
            return _one_of([_needed(part, outcome) for part in node.operands])
        case Equal(left, right):
            return _of_equal(left, right, outcome)
        case Compare():
            return _names(node.left, node.right)
        case IsNull():
            return [] if outcome else _names(node.operand)
        case TextTest():
            if not outcome:  # So it is of a message without the property.
                return []
            found = [] if node.negated else _parts(node.operand, node.search)
            return found + _names(node.operand)
        case In():
            found = [] if node.negated is outcome else _values(node.operand, node.values)
            return found + _names(node.operand)
        case Truth():
            return _names(node.operand)
        case Constant() | Property():
            return []


def _of_equal(left: Node, right: Node, outcome: bool) -> list[Clause]:
    found: list[Clause] = []
    if outcome:
        for one, other in ((left, right), (right, left)):
            if isinstance(other, Constant):  # So neither is missing.
                found += _names(one)
                if isinstance(one, Property) and isinstance(other.value, bytes):
                    found += _values(one, (other.value,))
        return found
    return _names(left)  # A missing right one is unequal.


def _one_of(parts: Sequence[list[Clause]]) -> list[Clause]:
    """What holds if one of the parts does: a clause that chooses among the best ones of each."""
    tags = [
        min((c for c in part if c.is_tag), key=lambda c: len(c.literals), default=None)
        for part in parts
    ]
    found: list[Clause] = []
    if all(tags):
        literals = frozenset().union(*(clause.literals for clause in tags if clause))
        found.append(Clause(literals, is_tag=True))
    best = [_best(part, CHOICES_MAX) for part in parts]
    if all(best):
        chosen = [clause for clause in best if clause]
        literals = frozenset().union(*(clause.literals for clause in chosen))
        found.append(Clause(literals, is_name=any(clause.is_name for clause in chosen)))
    return found


def _names(*nodes: Node) -> list[Clause]:
    """The properties have values, so their names are there."""
    return [
        Clause(frozenset((Literal(node.name.encode(), True),)), is_name=True)
        for node in nodes
        if isinstance(node, Property) and node.name not in OWN_FIELDS
    ]


def _values(node: Property, values: Sequence[bytes]) -> list[Clause]:
    """The property has one of the values."""
    if node.name == TAGS:
        # An empty one is none.
        return [Clause(frozenset(Literal(value, True) for value in values), is_tag=True)] if all(values) else []
    if node.name == KEYS:
        return _parts(node, values[0]) if len(values) == 1 else []
    if node.name in OWN_FIELDS or not all(values):  # An empty text may be left out.
        return []
    return [Clause(frozenset(Literal(value, True) for value in values))]


def _parts(node: Node, search: bytes) -> list[Clause]:
    """The text of the property has a part."""
    if not isinstance(node, Property) or not search:
        return []
    if node.name == KEYS:
        if b" " in search:  # May be one key and the next.
            return []
    elif node.name != TAGS and node.name in OWN_FIELDS:
        return []
    return [Clause(frozenset((Literal(search),)))]
