"""What the CEL library made of an expression: its tree, out of the `cel.expr.CheckedExpr` that the library writes. Pure.

Macros are there as the loops that they stand for: `range.all(x, ...)` is a Loop over the range with an accumulator `@result`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from protomq.wire.varints import read_varint


@dataclass(frozen=True, slots=True)
class Literal:
    """A constant. `text`: of a text or octets, else None."""

    position: int
    text: bytes | None


@dataclass(frozen=True, slots=True)
class Name:
    """A variable."""

    position: int
    name: str


@dataclass(frozen=True, slots=True)
class Select:
    """`operand.field`, or has(operand.field)."""

    position: int
    operand: Tree
    field: str


@dataclass(frozen=True, slots=True)
class Call:
    """A function or operator, with what stands before the point, if anything does, as its first argument."""

    position: int
    function: str
    arguments: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class ListOf:
    """`[a, b]`."""

    position: int
    elements: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class MapOf:
    """`{a: b}`; with a `type_name`, a message of that type."""

    position: int
    type_name: str
    entries: tuple[tuple[Tree | None, Tree], ...]


@dataclass(frozen=True, slots=True)
class Loop:
    """Goes through `range`; `step` gives the accumulator's next value."""

    position: int
    element: str
    range: Tree
    accumulator: str
    first: Tree
    condition: Tree
    step: Tree
    result: Tree


Tree: TypeAlias = Literal | Name | Select | Call | ListOf | MapOf | Loop

_VARINT: Final = 0
_FIXED64: Final = 1
_LENGTH: Final = 2
_TEXT_KINDS: Final = (6, 7)
_Field: TypeAlias = "int | bytes"


def calls_of(tree: Tree | None) -> Iterator[Call]:
    """All calls in a tree."""
    match tree:
        case Select(operand=operand):
            yield from calls_of(operand)
        case Call(arguments=parts) | ListOf(elements=parts):
            if isinstance(tree, Call):
                yield tree
            for part in parts:
                yield from calls_of(part)
        case MapOf(entries=entries):
            for entry in entries:
                for each in entry:
                    yield from calls_of(each)
        case Loop():
            for part in (tree.range, tree.first, tree.condition, tree.step, tree.result):
                yield from calls_of(part)


def tree_of(serialized: bytes) -> Tree:
    """The tree of a serialized expression: of an Any with a CheckedExpr in it. Positions count characters."""
    checked = _one(serialized, 2)
    source = _one(checked, 5)
    positions = {_number(entry, 1): _number(entry, 2) for entry in _all(source, 4)}
    return _tree(_one(checked, 4), positions)


def _tree(data: bytes, positions: dict[int, int]) -> Tree:
    fields = dict(_fields(data))
    at = positions.get(_as_number(fields.pop(2, 0)), 0)
    kind, content = next(iter(fields.items()))
    assert isinstance(content, bytes)

    def part(number: int) -> Tree:
        return _tree(_one(content, number), positions)

    def parts(number: int) -> tuple[Tree, ...]:
        return tuple(_tree(each, positions) for each in _all(content, number))

    match kind:
        case 3:
            return Literal(at, next((text for which, text in _fields(content) if which in _TEXT_KINDS), None))  # type: ignore[arg-type]
        case 4:
            return Name(at, _text(content, 1))
        case 5:
            return Select(at, part(1), _text(content, 2))
        case 6:
            return Call(at, _text(content, 2), parts(1) + parts(3))
        case 7:
            return ListOf(at, parts(1))
        case 8:
            entries = tuple(
                (next((_tree(key, positions) for key in _all(entry, 3)), None), _tree(_one(entry, 4), positions))
                for entry in _all(content, 2)
            )
            return MapOf(at, _text(content, 1), entries)
        case 9:
            assert not _all(content, 8), "a loop with two variables"
            return Loop(at, _text(content, 1), part(2), _text(content, 3), part(4), part(5), part(6), part(7))
    raise AssertionError(f"an expression of the kind {kind}")


def _fields(data: bytes) -> Iterator[tuple[int, _Field]]:
    at = 0
    while at < len(data):
        tag, at = read_varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, at = read_varint(data, at)
            yield number, value
            continue
        size = 8
        if kind == _LENGTH:
            size, at = read_varint(data, at)
        else:
            assert kind == _FIXED64, kind
        yield number, data[at : at + size]
        at += size


def _all(data: bytes, number: int) -> list[bytes]:
    return [value for which, value in _fields(data) if which == number and isinstance(value, bytes)]


def _one(data: bytes, number: int) -> bytes:
    return next(iter(_all(data, number)), b"")


def _text(data: bytes, number: int) -> str:
    return _one(data, number).decode()


def _number(data: bytes, number: int) -> int:
    return _as_number(next((value for which, value in _fields(data) if which == number), 0))


def _as_number(value: _Field) -> int:
    assert isinstance(value, int)
    return value
