"""What it costs to look for a pattern: CEL's `matches`, for which the library compiles the pattern (RE2's) again for each text.

RE2 never goes back in a text. It makes the states of an automaton as it meets them, and keeps them. A pattern of few states costs some
nanoseconds for an octet. One of very many (`a.{14}b`, of 2^14) makes it build a state for each octet, two hundred times as much. So the
states are counted here, for patterns that Python reads as RE2 does. Any other pattern is taken to have very many. Pure.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field
from functools import lru_cache
from re import _constants as ops
from re import _parser as parser
from typing import Any, Final, NamedTuple

_COMPILE_NS: Final = 2_500.0
_WEIGHT_NS: Final = 400.0
_OCTET_NS: Final = 5.0
_STATE_NS: Final = 250.0
_ALIVE_NS: Final = 60.0
_MANY_NS: Final = 1_200.0
_MANY_PLACE_NS: Final = 10.0
_STATES_MAX: Final = 128
_BOUNDARY_FACTOR: Final = 4
"""More states where `\\b` stands: RE2 keeps in them what kind of character came before."""
_PLACES_MAX: Final = 64
_CLASS_WEIGHT: Final = 10.0
_UNICODE_CLASS_WEIGHT: Final = 5_000.0
_POINT_MAX: Final = 0x10FFFF
_DIFFERENT: Final = re.compile(r"\[:|\(\?(?![is]*:|P<)|\\Z")
"""What RE2 reads in another way, or what makes states that are not counted here."""
_OUTSIDE: Final = re.compile(r"\\.|\[\^?\]?", re.DOTALL)
_INSIDE: Final = re.compile(r"\\.|\[:\w+:\]|\]", re.DOTALL)
_NAMED: Final = {
    "[:alnum:]": "0-9A-Za-z", "[:alpha:]": "A-Za-z", "[:ascii:]": "\\x00-\\x7f", "[:blank:]": "\\t ", "[:cntrl:]": "\\x00-\\x1f\\x7f",
    "[:digit:]": "0-9", "[:graph:]": "!-~", "[:lower:]": "a-z", "[:print:]": " -~", "[:punct:]": "!-/:-@\\[-`{-~", "[:space:]": "\\s",
    "[:upper:]": "A-Z", "[:word:]": "\\w", "[:xdigit:]": "0-9A-Fa-f",
}  # fmt: skip
_FLAGS: Final = re.compile(r"\(\?[is]+\)")
_REPEATS: Final = re.compile(r"\{(\d+)(?:,(\d*))?\}")

Ranges = tuple[tuple[int, int], ...]
_CATEGORIES: Final[dict[Any, Ranges]] = {
    ops.CATEGORY_DIGIT: ((48, 57),),
    ops.CATEGORY_SPACE: ((9, 13), (32, 32)),
    ops.CATEGORY_WORD: ((48, 57), (65, 90), (95, 95), (97, 122)),
}
_NOT: Final = {
    ops.CATEGORY_NOT_DIGIT: ops.CATEGORY_DIGIT,
    ops.CATEGORY_NOT_SPACE: ops.CATEGORY_SPACE,
    ops.CATEGORY_NOT_WORD: ops.CATEGORY_WORD,
}


class Pattern(NamedTuple):
    """What one look into a text costs: `compile_ns`, and the less of `states_ns` + `octet_ns` an octet, and `state_ns` an octet."""

    compile_ns: float
    states_ns: float
    octet_ns: float
    state_ns: float


@lru_cache(256)
def pattern_of(pattern: str) -> Pattern:
    """What the pattern costs. A pattern that RE2 refuses costs no more."""
    read = _read(pattern)
    weight = _weight_unread(pattern) if read is None else _weight(read[0]) * (1 + read[1])
    try:
        if read is None:
            raise _UncountedError
        places = _Places(read[1])
        states, alive = places.count_states(places.add(read[0]))
    except _UncountedError:
        state_ns = _MANY_NS + _MANY_PLACE_NS * weight
        return Pattern(_COMPILE_NS + _WEIGHT_NS * weight, 0.0, state_ns, state_ns)
    state_ns = _STATE_NS + _ALIVE_NS * alive
    return Pattern(_COMPILE_NS + _WEIGHT_NS * weight, states * state_ns, _OCTET_NS, state_ns)


def _read(pattern: str) -> tuple[Any, bool] | None:
    """The pattern's tree, and whether case counts nothing; None where RE2 may read it in another way."""
    flags = _FLAGS.match(pattern)
    if flags is not None:  # Whether a point takes a line break, too, makes no more states.
        pattern = pattern[flags.end() :]
    pattern = _without_names(pattern)
    if _DIFFERENT.search(pattern):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return parser.parse(pattern, re.ASCII), flags is not None and "i" in flags[0]
    except (re.error, OverflowError, RecursionError, Warning):
        return None


def _without_names(pattern: str) -> str:
    """The pattern with ranges in the place of names such as `[:alpha:]`, which Python does not know."""
    parts, at, place = [], 0, _OUTSIDE
    while found := place.search(pattern, at):
        text = found[0]
        parts += [pattern[at : found.start()], _NAMED.get(text, text)]
        at = found.end()
        if text[0] == "[" and place is _OUTSIDE:
            place = _INSIDE
        elif text == "]":
            place = _OUTSIDE
    return "".join(parts) + pattern[at:]


class _UncountedError(Exception):
    """The states were not counted: there are too many, or RE2 and Python read the pattern differently."""


def _weight_unread(pattern: str) -> float:
    weight = len(pattern) * _CLASS_WEIGHT + _UNICODE_CLASS_WEIGHT * len(re.findall(r"\\[pP]|\(\?[^:]|\[:", pattern))
    for repeat in _REPEATS.finditer(pattern):
        weight *= 2 * max(int(repeat[1]), int(repeat[2] or 0), 1)
    return weight


def _weight(tree: Any) -> float:
    """Instructions, more or less: of RE2's program."""
    weight = 0.0
    for op, value in tree:
        if op is ops.LITERAL:
            weight += 1 if value < 0x80 else 4
        elif op in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            low, high, inner = value
            count = low if high is ops.MAXREPEAT else high
            weight += 1 + _weight(inner) * (2 * count if count > 1 else 1)
        elif op is ops.SUBPATTERN:
            weight += 2 + _weight(value[3]) * (2 if value[1] & re.IGNORECASE else 1)
        elif op is ops.BRANCH:
            weight += sum(1 + _weight(branch) for branch in value[1])
        elif op is ops.IN:
            weight += 2 + len(value) if _ranges_of(value)[-1][1] < 0x80 else _CLASS_WEIGHT + 4 * len(value)
        elif op is ops.AT:
            weight += 1
        else:
            weight += _CLASS_WEIGHT
    return weight


class _Part(NamedTuple):
    """A part of a pattern: the places at which it begins, ends, and begins at the start of the text, the preferred ones first.

    Attributes: is_empty, is_empty_at_start: it may be. is_lazy: and rather is.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]
    at_start: tuple[int, ...]
    is_empty: bool
    is_empty_at_start: bool
    is_lazy: bool = False


_NOTHING: Final = _Part((), (), (), True, True)


@dataclass
class _Places:
    """The places of a pattern that stand for one character each, and which ones may follow each (Glushkov's automaton).

    RE2's states are lists of places: the same places in another order of preference are another state. So the order counts here, too.
    """

    folds_case: bool = False
    ranges: list[Ranges] = field(default_factory=list)
    follows: list[list[int]] = field(default_factory=list)
    lazy_links: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    """They come behind all others, an outer one before an inner one."""
    has_boundary: bool = False

    def add(self, tree: Any) -> _Part:
        part = _NOTHING
        for op, value in tree:
            part = self._behind(part, self._one(op, value))
        return part

    def count_states(self, whole: _Part) -> tuple[int, int]:
        """How many states an automaton has that looks for the pattern everywhere in a text, and the most places of a state."""
        for lasts, firsts in reversed(self.lazy_links):
            self._link(lasts, firsts)
        cuts = sorted({0, *(cut for ranges in self.ranges for low, high in ranges for cut in (low, high + 1))})
        accepted = {
            tuple(any(low <= cut <= high for low, high in ranges) for ranges in self.ranges) for cut in cuts
        }
        begun = [tuple(dict.fromkeys(whole.first + whole.at_start))]
        known = set(begun)
        while begun:
            state = begun.pop()
            for accepts in accepted:
                places = [after for place in state if accepts[place] for after in self.follows[place]]
                after = tuple(dict.fromkeys((*places, *whole.first)))
                if after not in known:
                    known.add(after)
                    begun.append(after)
                    if len(known) > _STATES_MAX:
                        raise _UncountedError
        count = len(known) * (_BOUNDARY_FACTOR if self.has_boundary else 1)
        return count, max(map(len, known))

    def _one(self, op: Any, value: Any) -> _Part:
        if op is ops.LITERAL:
            return self._place(((value, value),))
        if op is ops.NOT_LITERAL:
            return self._place(_others(((value, value),)))
        if op is ops.ANY:
            return self._place(_others(((10, 10),)))
        if op is ops.IN:
            return self._place(_ranges_of(value))
        if op is ops.SUBPATTERN:
            _, flags, _, inner = value
            before, self.folds_case = self.folds_case, self.folds_case or bool(flags & re.IGNORECASE)
            part = self.add(inner)
            self.folds_case = before
            return part
        if op is ops.BRANCH:
            parts = [self.add(branch) for branch in value[1]]
            return _Part(
                tuple(place for part in parts for place in part.first),
                tuple(place for part in parts for place in part.last),
                tuple(place for part in parts for place in part.at_start),
                any(part.is_empty for part in parts),
                any(part.is_empty_at_start for part in parts),
                parts[0].is_empty,
            )
        if op in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            low, high, inner = value
            return self._repeat(low, high, inner, op is ops.MIN_REPEAT)
        if op is ops.AT and value in (ops.AT_BEGINNING, ops.AT_BEGINNING_STRING):
            return _Part((), (), (), False, True)
        if op is ops.AT and value in (ops.AT_END, ops.AT_BOUNDARY, ops.AT_NON_BOUNDARY):
            self.has_boundary |= value is not ops.AT_END
            return _NOTHING
        raise _UncountedError

    def _place(self, ranges: Ranges) -> _Part:
        place = len(self.ranges)
        if place >= _PLACES_MAX:
            raise _UncountedError
        self.ranges.append(_folded(ranges) if self.folds_case else ranges)
        self.follows.append([])
        return _Part((place,), (place,), (place,), False, False)

    def _behind(self, one: _Part, other: _Part) -> _Part:
        self._link(one.last, other.first)
        return _Part(
            _either(one.first, other.first, one.is_empty, one.is_lazy),
            _either(other.last, one.last, other.is_empty, other.is_lazy),
            _either(one.at_start, other.at_start, one.is_empty_at_start, one.is_lazy),
            one.is_empty and other.is_empty,
            one.is_empty_at_start and other.is_empty_at_start,
            one.is_lazy and other.is_lazy,
        )

    def _repeat(self, low: Any, high: Any, tree: Any, is_lazy: bool) -> _Part:
        is_endless = high is ops.MAXREPEAT
        optional = 1 if is_endless and not low else 0 if is_endless else high - low
        # x{2,4} is xx(x(x)?)?; x{2,} is xx+.
        tail = _NOTHING
        for _ in range(optional):
            one = self._looped(tree, is_lazy) if is_endless else self.add(tree)
            tail = self._behind(one, tail)._replace(is_empty=True, is_empty_at_start=True, is_lazy=is_lazy)
        part = _NOTHING
        for number in range(low):
            is_last = is_endless and number == low - 1
            part = self._behind(part, self._looped(tree, is_lazy) if is_last else self.add(tree))
        return self._behind(part, tail)

    def _looped(self, tree: Any, is_lazy: bool) -> _Part:
        one = self.add(tree)
        if is_lazy:
            self.lazy_links.append((one.last, one.first))
        else:
            self._link(one.last, one.first)
        return one

    def _link(self, lasts: tuple[int, ...], firsts: tuple[int, ...]) -> None:
        for place in lasts:
            self.follows[place] += firsts


def _either(one: tuple[int, ...], other: tuple[int, ...], has_both: bool, other_first: bool) -> tuple[int, ...]:
    if not has_both:
        return one
    return other + one if other_first else one + other


def _folded(ranges: Ranges) -> Ranges:
    """With the other case of the letters in them."""
    found = list(ranges)
    for low, high in ranges:
        for letters, other in (((65, 90), 32), ((97, 122), -32)):
            both = max(low, letters[0]), min(high, letters[1])
            if both[0] <= both[1]:
                found.append((both[0] + other, both[1] + other))
    return tuple(found)


def _others(ranges: Ranges) -> Ranges:
    found = []
    begin = 0
    for low, high in sorted(ranges):
        if begin < low:
            found.append((begin, low - 1))
        begin = max(begin, high + 1)
    return (*found, (begin, _POINT_MAX)) if begin <= _POINT_MAX else tuple(found)


def _ranges_of(items: Any) -> Ranges:
    ranges: list[tuple[int, int]] = []
    is_negated = False
    for op, value in items:
        if op is ops.NEGATE:
            is_negated = True
        elif op is ops.LITERAL:
            ranges.append((value, value))
        elif op is ops.RANGE:
            ranges.append(value)
        elif op is ops.CATEGORY:
            ranges += _CATEGORIES[value] if value in _CATEGORIES else _others(_CATEGORIES[_NOT[value]])
        else:
            raise _UncountedError
    return _others(tuple(ranges)) if is_negated else tuple(ranges)
