"""The parts of a parsed SQL92 expression. Texts are UTF-8: equality, prefixes and parts are the same there as among characters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Constant:
    """A literal; None is NULL."""

    value: bytes | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Property:
    """A property of the message, or one of its own fields (`fields.OWN_FIELDS`)."""

    name: str


@dataclass(frozen=True, slots=True)
class Equal:
    """`left = right`; `<>` is its negation."""

    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class Compare:
    """`left operator right`, with one of < <= > >=; both are numbers or properties."""

    operator: str
    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class IsNull:
    """`operand IS NULL`."""

    operand: Node


@dataclass(frozen=True, slots=True)
class TextTest:
    """`operand [NOT] CONTAINS | STARTSWITH | ENDSWITH 'search'`."""

    keyword: str
    operand: Node
    search: bytes
    negated: bool


@dataclass(frozen=True, slots=True)
class In:
    """`operand [NOT] IN ('a', 'b')`."""

    operand: Property
    values: tuple[bytes, ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class Truth:
    """A property where a condition is wanted."""

    operand: Property


@dataclass(frozen=True, slots=True)
class Not:
    """`NOT operand`."""

    operand: Node


@dataclass(frozen=True, slots=True)
class And:
    """All of these."""

    operands: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Or:
    """One of these."""

    operands: tuple[Node, ...]


Node: TypeAlias = (
    Constant | Property | Equal | Compare | IsNull | TextTest | In | Truth | Not | And | Or
)
CONDITIONS = (Equal, Compare, IsNull, TextTest, In, Truth, Not, And, Or)
"""What is true, false or unknown; so are the constants TRUE, FALSE and NULL."""


def is_condition(node: Node) -> bool:
    """Whether a node is true, false or unknown, and no text or number."""
    if isinstance(node, Constant):
        return node.value is None or isinstance(node.value, bool)
    return isinstance(node, CONDITIONS)
