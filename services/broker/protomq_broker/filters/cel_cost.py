"""What one evaluation of a CEL expression can cost at most. Nothing stops the library in the middle of one, and the broker waits for it.

    cost      = the sum over all parts of (rounds of the loops around it) x (its price, by the octets and elements that it may touch)
    message   has so many octets beside its body: each text of it has so many at most, all properties together, too

The elements of a list, or of the properties, together have no more octets than the whole. So a loop over them touches the whole once, and
not once per round: `Size.shared_by`. The prices are what the library takes at worst, in nanoseconds of one core. Each octet of a text that
an evaluation makes has a price, so this bounds memory, too. Conditions decide nothing here: all that could run is counted. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from protomq.wire.record import FRONT_SIZE_MAX_BYTES

from .cel_patterns import pattern_of
from .cel_tree import Call, ListOf, Literal, Loop, MapOf, Name, Select, Tree
from .errors import FilterError

COST_MAX_NS: Final = 5e6
_PART_NS: Final = 25.0
_PROPERTY_NS: Final = 500.0
"""To take a property out of the record and to give it to the library."""
_ELEMENT_NS: Final = 50.0
"""To copy a list's element, or to compare it: the library copies the whole list to append one element."""
_ENTRY_NS: Final = 250.0
"""To make or compare an entry of a map."""
_COPIED_NS: Final = 1.0
"""An octet that is copied, into memory that is freed when the evaluation ends."""
_COMPARED_NS: Final = 1.0
_READ_NS: Final = 4.0
"""An octet that is decoded, or counted as a part of a character."""
_PARSED_NS: Final = 2.0
_PARSED_TIME_NS: Final = 20.0
_SEARCHED_NS: Final = 9.0
_SEARCHED_PAIR_NS: Final = 0.018
"""An octet of the text with one of what is looked for. Where the text is full of its beginning, the library compares it at each place."""
_ZONE_NS: Final = 100_000.0
"""To look up a time zone by its name."""
_PROPERTY_SIZE_MIN: Final = 6
_SCALAR_SIZE: Final = 40
"""Octets of a number, a time or a Boolean as a text, and of a message id."""

_LOGIC: Final = frozenset(
    ("_&&_", "_||_", "!_", "@not_strictly_false", "_-_", "_*_", "_/_", "_%_", "-_", "dyn", "type")
)
_COMPARISONS: Final = frozenset(("_==_", "_!=_", "_<_", "_<=_", "_>_", "_>=_"))
_CONVERSIONS: Final = {
    **dict.fromkeys(("int", "uint", "double", "bool"), _PARSED_NS),
    **dict.fromkeys(("timestamp", "duration"), _PARSED_TIME_NS),
}
_TIME_PARTS: Final = re.compile(r"get(FullYear|Month|DayOf\w+|Date|Hours|Minutes|Seconds|Milliseconds)")


class Cost(NamedTuple):
    """Nanoseconds, and the character at which the part stands that needs most of them."""

    total_ns: float
    position: int


@dataclass(frozen=True, slots=True)
class Size:
    """The most that a value can be.

    Attributes:
        octets: of the text, or of all texts in it.
        count: elements of the list or map; 0 of anything else.
        element: the largest element. Of a map: the larger one of key and value.
        shared_by: loops in all of whose rounds together the values have that many octets.
        of_properties: 1: it is the map of the properties. 2: it is one of its keys.
        is_number: or a Boolean, a time, a type.
    """

    octets: float = 0
    count: float = 0
    element: Size | None = None
    shared_by: frozenset[int] = frozenset()
    of_properties: int = 0
    is_number: bool = False


_MAP, _KEY = 1, 2
_SCALAR: Final = Size(_SCALAR_SIZE, is_number=True)


class MessageSize(NamedTuple):
    """Octets of a message beside its body, and how many properties it has, at most."""

    front_bytes: int
    property_count: int


_FRONT_SIZES: Final = [kib << 10 for kib in (32, 24, 16, 12, 8, 6, 4)]
assert _FRONT_SIZES[0] == FRONT_SIZE_MAX_BYTES
_PROPERTY_COUNT_USUAL: Final = 256
_MESSAGE_SIZES: Final = [
    MessageSize(front, count)
    for front in _FRONT_SIZES
    for count in (front // _PROPERTY_SIZE_MIN, _PROPERTY_COUNT_USUAL)
]


def largest_message(tree: Tree, expression: str, variables: Mapping[str, str]) -> MessageSize:
    """The largest messages about which an expression can be asked within COST_MAX_NS; `variables`: their types by their names.

    Raises FilterError where the smallest ones that a filter must do for cost more.
    """
    cost = Cost(0, 0)
    largest, *between, smallest = _MESSAGE_SIZES
    # The smallest one second: a refusal is found out at once.
    for size in (largest, smallest):
        cost = cost_of(tree, expression, fields_of(size, variables))
        if cost.total_ns <= COST_MAX_NS:
            return next(
                (
                    other
                    for other in (between if size is smallest else ())
                    if cost_of(tree, expression, fields_of(other, variables)).total_ns <= COST_MAX_NS
                ),
                size,
            )
    raise FilterError(
        f"one message could take {cost.total_ns / 1e6:,.0f} ms, at most {COST_MAX_NS / 1e6:.0f} are allowed. Most of it is needed here: "
        "go through fewer elements, join or look for shorter texts, or take a pattern with fewer repetitions",
        expression,
        cost.position,
    )


def fields_of(size: MessageSize, variables: Mapping[str, str]) -> dict[str, Size]:
    """How large the variables are in a message of that size."""
    text = Size(size.front_bytes)
    properties = Size(size.front_bytes, size.property_count, text, of_properties=_MAP)
    by_type = {"STRING": text, "MAP": properties, "INT": _SCALAR}
    return {name: by_type[kind] for name, kind in variables.items()}


def cost_of(tree: Tree, expression: str, fields: Mapping[str, Size]) -> Cost:
    """What an evaluation costs at most. Raises FilterError for what has no bound."""
    meter = _Meter(expression)
    meter.size_of(tree, dict(fields), {})
    if meter.has_properties:
        meter.add(0, _PROPERTY_NS * fields["properties"].count)
    return Cost(meter.total_ns, max(meter.by_position, key=lambda at: meter.by_position[at], default=0))


def _rounds(loops: Mapping[int, float], shared_by: frozenset[int] = frozenset()) -> float:
    rounds = 1.0
    for loop, count in loops.items():
        if loop not in shared_by:
            rounds *= count
    return rounds


def _largest(*sizes: Size | None) -> Size | None:
    known = [size for size in sizes if size is not None]
    if not known:
        return None
    return Size(
        max(size.octets for size in known),
        max(size.count for size in known),
        _largest(*(size.element for size in known)),
        frozenset.intersection(*(size.shared_by for size in known)),
        is_number=all(size.is_number for size in known),
    )


def _values(size: Size | None) -> float:
    """Elements, those of elements too."""
    return 0 if size is None else size.count * (1 + _values(size.element))


@dataclass
class _Meter:
    expression: str
    total_ns: float = 0
    by_position: dict[int, float] = field(default_factory=dict)
    has_properties: bool = False
    loop_count: int = 0

    def add(self, position: int, ns: float) -> None:
        self.total_ns += ns
        self.by_position[position] = self.by_position.get(position, 0) + ns

    def size_of(self, tree: Tree, scope: dict[str, Size], loops: dict[int, float]) -> Size:
        """The size of what the part gives; what it costs is added."""
        self.add(tree.position, _PART_NS * _rounds(loops))
        match tree:
            case Literal(text=text):
                return _SCALAR if text is None else Size(len(text))
            case Name(name=name):
                size = scope.get(name, _SCALAR)
                self.has_properties |= size.of_properties == _MAP
                return size
            case Select(operand=operand, field=name):
                whole = self.size_of(operand, scope, loops)
                return self._looked_up(tree, whole, Size(len(name)), loops)
            case ListOf(elements=elements):
                return self._list(tree, [self.size_of(each, scope, loops) for each in elements], loops)
            case MapOf():
                return self._map(tree, scope, loops)
            case Loop():
                return self._loop(tree, scope, loops)
            case Call():
                return self._call(tree, [self.size_of(each, scope, loops) for each in tree.arguments], loops)

    def _looked_up(self, tree: Tree, whole: Size, key: Size, loops: Mapping[int, float]) -> Size:
        self.add(tree.position, _ENTRY_NS / 2 * _rounds(loops) + self._read(key, loops, _COMPARED_NS))
        element = whole.element or _SCALAR
        shared_by = whole.shared_by
        if whole.of_properties == _MAP and key.of_properties == _KEY:
            shared_by = key.shared_by
        return replace(element, octets=max(whole.octets, _SCALAR_SIZE), shared_by=shared_by)

    def _read(self, size: Size, loops: Mapping[int, float], price_ns: float) -> float:
        return size.octets * price_ns * _rounds(loops, size.shared_by)

    def _list(self, tree: ListOf, elements: list[Size], loops: Mapping[int, float]) -> Size:
        self.add(tree.position, _ELEMENT_NS * len(elements) * _rounds(loops))
        shared_by = (_largest(*elements) or Size()).shared_by
        return Size(sum(each.octets for each in elements), len(elements), _largest(*elements), shared_by)

    def _map(self, tree: MapOf, scope: dict[str, Size], loops: dict[int, float]) -> Size:
        if tree.type_name:
            raise self._refusal(tree, f"a filter makes no {tree.type_name}: use a text, a number, a list or a map")
        parts = [
            self.size_of(part, scope, loops) for entry in tree.entries for part in entry if part is not None
        ]
        self.add(tree.position, _ENTRY_NS * len(tree.entries) * _rounds(loops))
        self.add(tree.position, sum(self._read(part, loops, _COMPARED_NS) for part in parts))
        shared_by = (_largest(*parts) or Size()).shared_by
        return Size(sum(part.octets for part in parts), len(tree.entries), _largest(*parts), shared_by)

    def _loop(self, tree: Loop, scope: dict[str, Size], loops: dict[int, float]) -> Size:
        whole = self.size_of(tree.range, scope, loops)
        self.size_of(tree.first, scope, loops)
        self.loop_count += 1
        loop = self.loop_count
        inner = {**loops, loop: whole.count}
        element = whole.element or _SCALAR
        # Elements of one size are taken as they are. Of the properties, or of a long text among short ones, the octets are shared.
        if element.octets * whole.count > 2 * whole.octets or whole.of_properties == _MAP:
            is_key = _KEY if whole.of_properties == _MAP else 0
            element = replace(element, octets=whole.octets, shared_by=whole.shared_by | {loop}, of_properties=is_key)
        within = {**scope, tree.element: element, tree.accumulator: _SCALAR}
        self.size_of(tree.condition, within, inner)
        if not isinstance(tree.first, ListOf):  # It decides, or counts.
            self.size_of(tree.step, within, inner)
            return self.size_of(tree.result, {**scope, tree.accumulator: _SCALAR}, loops)
        # map and filter: list + [element], if at all. The whole list is copied in each round.
        step = tree.step
        if isinstance(step, Call) and step.function == "_?_:_":
            self.size_of(step.arguments[0], within, inner)
            step = step.arguments[1]
        assert isinstance(step, Call), "map or filter"
        one = self.size_of(step.arguments[1], within, inner)
        self.add(tree.position, (4 * _PART_NS + _ELEMENT_NS * (whole.count + 1)) * _rounds(inner))
        octets = one.octets * (1 if loop in one.shared_by else whole.count)
        made = Size(octets, whole.count, one.element, one.shared_by - {loop})
        return self.size_of(tree.result, {**scope, tree.accumulator: made}, loops)

    def _call(self, tree: Call, sizes: list[Size], loops: dict[int, float]) -> Size:
        name, at, rounds = tree.function, tree.position, _rounds(loops)
        if name in _LOGIC:
            return sizes[0] if name == "dyn" else _SCALAR
        if name == "_?_:_":
            return _largest(*sizes[1:]) or _SCALAR
        if name in _COMPARISONS:
            octets = min(self._read(size, loops, _COMPARED_NS) for size in sizes)
            self.add(at, octets + _ENTRY_NS * min(map(_values, sizes)) * rounds)
            return _SCALAR
        if name == "_+_":
            if all(size.is_number for size in sizes):
                return _SCALAR
            self.add(at, sum(self._read(size, loops, _COPIED_NS) for size in sizes if not size.count))
            self.add(at, _ELEMENT_NS * sum(size.count for size in sizes) * rounds)
            return _together(sizes)
        if name == "_[_]":
            return self._looked_up(tree, sizes[0], sizes[1], loops)
        if name == "@in":
            one, many = sizes
            if many.of_properties == _MAP:
                self._looked_up(tree, many, one, loops)
            else:
                self.add(at, (many.octets * _COMPARED_NS + _ELEMENT_NS * many.count * (1 + _values(one))) * rounds)
            return _SCALAR
        if name == "size":
            self.add(at, self._read(sizes[0], loops, _READ_NS) if not sizes[0].count else 0)
            return _SCALAR
        if name in ("string", "bytes"):
            self.add(at, self._read(sizes[0], loops, _READ_NS))
            return Size(max(sizes[0].octets, _SCALAR_SIZE), shared_by=sizes[0].shared_by)
        if name in _CONVERSIONS:
            self.add(at, self._read(sizes[0], loops, _CONVERSIONS[name]))
            return _SCALAR
        if _TIME_PARTS.fullmatch(name):
            self.add(at, (_ZONE_NS if len(sizes) > 1 else _ENTRY_NS) * rounds)
            return _SCALAR
        if name in ("startsWith", "endsWith"):
            self.add(at, min(self._read(size, loops, _COMPARED_NS) for size in sizes))
            return _SCALAR
        if name == "contains":
            text, part = sizes
            self.add(at, self._read(text, loops, _SEARCHED_NS + _SEARCHED_PAIR_NS * part.octets))
            return _SCALAR
        if name == "matches":
            self.add(at, self._matches(tree, sizes[0], loops))
            return _SCALAR
        raise self._refusal(tree, f"filters have no function {name}")

    def _matches(self, tree: Call, text: Size, loops: Mapping[int, float]) -> float:
        pattern = tree.arguments[1]
        if not isinstance(pattern, Literal) or pattern.text is None:
            raise self._refusal(pattern, "the pattern of matches() is a text in quotes: of no other one it is known what it costs")
        known = pattern_of(pattern.text.decode())
        counted = known.states_ns * _rounds(loops) + self._read(text, loops, known.octet_ns)
        return known.compile_ns * _rounds(loops) + min(counted, self._read(text, loops, known.state_ns))

    def _refusal(self, tree: Tree, message: str) -> FilterError:
        return FilterError(message, self.expression, tree.position)


def _together(sizes: list[Size]) -> Size:
    largest = _largest(*sizes) or _SCALAR
    octets, count = sum(size.octets for size in sizes), sum(size.count for size in sizes)
    return Size(octets, count, largest.element, largest.shared_by)
