"""The syntax of SQL92 filters: RocketMQ's (its SelectorParser), from text to nodes.

What would be read in two ways, or never match, is refused:
- `NOT a = 'x'`: SQL means NOT (a = 'x'), RocketMQ means (NOT a) = 'x'. It wants brackets here.
- A minus before anything but a number, and CONTAINS on what is no property: RocketMQ takes them, and they never match.
- A text, TRUE or FALSE where numbers are compared, as RocketMQ refuses it.

Taken here, though RocketMQ refuses it: 0.0. Pure; any thread.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, NamedTuple, cast

from lark import Lark, Token, Transformer, v_args
from lark.exceptions import UnexpectedCharacters, UnexpectedEOF, UnexpectedInput, UnexpectedToken

from .errors import FilterError
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
    is_condition,
)

LENGTH_MAX: Final = 8_192
"""Characters: some hundred values, which is what an expression is good for; more of them are a tag or a property."""
DEPTH_MAX: Final = 64
"""Brackets, NOTs and signs within each other."""
LITERALS_MAX: Final = 512
CONTAINS_LITERALS: Final = 8
"""As so many values a CONTAINS counts: 64 of them take 5 to 10 ms in a property of 32 KiB."""
LONG_MAX: Final = (1 << 63) - 1

_WORDS: Final = (
    "NOT", "AND", "OR", "BETWEEN", "IN", "TRUE", "FALSE", "NULL", "IS", "CONTAINS", "STARTSWITH", "ENDSWITH",
)  # fmt: skip
_GRAMMAR: Final = r"""
start: either
?either: both (OR both)*                               -> either
?both: equality (AND equality)*                        -> both
?equality: comparison
    | equality "=" comparison                          -> equal
    | equality _NOT_EQUAL comparison                        -> not_equal
    | equality IS NULL                                 -> is_null
    | equality IS NOT NULL                             -> is_not_null
?comparison: unary
    | unary COMPARISON unary                           -> compare
    | unary [NOT] (CONTAINS | STARTSWITH | ENDSWITH) STRING -> text_test
    | unary [NOT] BETWEEN unary AND unary              -> between
    | unary [NOT] IN "(" STRING ("," STRING)* ")"      -> in_list
?unary: "+" unary                                      -> plus
    | MINUS unary                                      -> minus
    | NOT unary                                        -> negated
    | primary
?primary: STRING                                       -> text
    | LONG                                             -> whole_number
    | DOUBLE                                           -> real_number
    | TRUE                                             -> true
    | FALSE                                            -> false
    | NULL                                             -> null
    | NAME                                             -> name
    | "(" either ")"                                   -> bracketed
_NOT_EQUAL.3: "<>"
COMPARISON.2: "<=" | ">=" | "<" | ">"
MINUS: "-"
NAME: /[a-z_$][a-z0-9_$]*/i
DOUBLE.3: /[0-9]+\.[0-9]*(e[+-]?[0-9]+)?|\.[0-9]+(e[+-]?[0-9]+)?|[0-9]+e[+-]?[0-9]+/i
LONG: /0|[1-9][0-9]*l?/i
STRING: /'(?:''|[^'])*'/
LINE_COMMENT.3: /--[^\n\r]*(\r\n|[\n\r])/
BLOCK_COMMENT.3: /\/\*[^*]*\*(\*|[^*\/][^*]*\*)*\//
SPACE: /[ \t\n\r\f]+/
%ignore SPACE
%ignore LINE_COMMENT
%ignore BLOCK_COMMENT
""" + "".join(f"{word}.2: /{word}(?![a-z0-9_$])/i\n" for word in _WORDS)

_READ_AS: Final = {
    "STRING": "a text in single quotes",
    "LONG": "a number",
    "DOUBLE": "a number",
    "NAME": "a property",
    "MINUS": "-",
    "$END": "the end",
    "EQUAL": "=",
    "_NOT_EQUAL": "<>",
    "LPAR": "(",
    "RPAR": ")",
    "COMMA": ",",
    "PLUS": "+",
}


class _Part(NamedTuple):
    """A node while it is built.

    Attributes:
        at: where it begins in the text.
        depth: of the nodes in it.
        literals: how many are in it.
        is_bare_not: it is a NOT without brackets around it.
        needs_minus: it is a number that has 64 bits with a minus before it only.
    """

    node: Node
    at: int
    depth: int = 1
    literals: int = 0
    is_bare_not: bool = False
    needs_minus: bool = False


class _WrongError(Exception):
    """What the rules below refuse; `parse` adds line and column."""

    def __init__(self, message: str, at: int, expected: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.at = at
        self.expected = expected


def parse(text: str) -> Node:
    """The condition that a text stands for. Raises FilterError."""
    if len(text) > LENGTH_MAX:
        raise FilterError(
            f"the expression has {len(text)} characters, at most {LENGTH_MAX} are allowed",
            text,
            LENGTH_MAX,
        )
    if not text.strip():
        raise FilterError("the expression is empty", text, len(text))
    try:
        part: _Part = _parser().parse(text)  # type: ignore[assignment] # the transformer makes it so
    except _WrongError as error:
        raise FilterError(str(error), text, error.at, error.expected) from None
    except UnexpectedInput as error:
        raise _unexpected(error, text) from None
    return part.node


@lru_cache(1)
def _parser() -> Lark:
    """Takes some 30 ms."""
    return Lark(_GRAMMAR, parser="lalr", lexer="basic", transformer=_Nodes())


_HINTS: Final = {
    '"': "a text stands in single quotes, a name in none",
    "!=": "SQL has no !=: unequal is <>",
    "!": "SQL has no !: write NOT",
    "&&": "SQL has no &&: write AND",
    "||": "conditions have no ||: write OR; tags alone are separated by it",
    ";": "a condition ends without ;",
}
"""What other languages write, and what to write instead."""


def _unexpected(error: UnexpectedInput, text: str) -> FilterError:
    names: set[str] = set()
    position, found = len(text), "the expression ends"
    if isinstance(error, UnexpectedToken):
        names = set(error.accepts or error.expected)
        if error.token.type != "$END":
            position = _at(error.token)
            found = f"{str(error.token)[:40]!r} was not expected"
            if text[position - 1 : position + 1] == "==":
                found = "SQL has no ==: equal is ="
            elif str(error.token).upper() == "LIKE":
                found = "there is no LIKE: CONTAINS, STARTSWITH and ENDSWITH look for a part of a text"
    elif isinstance(error, UnexpectedCharacters):
        position = cast("int", error.pos_in_stream)  # lark declares it None.
        found = f"{text[position : position + 1]!r} begins nothing"
        if text[position : position + 1] == "'":
            found = "this text has no closing quote"
        elif said := next((said for wrong, said in _HINTS.items() if text.startswith(wrong, position)), None):
            found = said
        elif text[position].isalnum():
            found = (
                f"{text[position]!r} cannot stand in a name here, only A-Z a-z 0-9 _ $: "
                f"CEL has any property, as properties['{text[position]}...'] == 'x'"
            )
    elif not isinstance(error, UnexpectedEOF):
        position = 0
    expected = tuple(sorted({_READ_AS.get(name, name) for name in names - {"COMPARISON"}}))
    if "COMPARISON" in names:
        expected += ("<", "<=", ">", ">=")
    wanted = f"; expected: {', '.join(expected)}" if expected else ""
    return FilterError(f"{found}{wanted}", text, position, expected)


def _built(node: Node, *parts: _Part, literals: int = 0, at: int | None = None) -> _Part:
    at = parts[0].at if at is None else at
    for part in parts:
        if part.needs_minus:
            raise _WrongError(f"whole numbers go up to {LONG_MAX}", part.at)
    depth = 1 + max((part.depth for part in parts), default=0)
    if depth > DEPTH_MAX:
        raise _WrongError(f"more than {DEPTH_MAX} conditions within each other", at)
    count = literals + sum(part.literals for part in parts)
    if count > LITERALS_MAX:
        raise _WrongError(f"more than {LITERALS_MAX} values; a CONTAINS counts as {CONTAINS_LITERALS}", at)
    return _Part(node, at, depth, count)


def _condition(part: _Part) -> Node:
    """The part where a condition is wanted."""
    if is_condition(part.node):
        return part.node
    if isinstance(part.node, Property):
        return Truth(part.node)
    raise _WrongError("a condition is expected here, this is a value", part.at, ("a condition",))


def _operand(part: _Part) -> Node:
    """The part where something is compared."""
    if part.is_bare_not:
        raise _WrongError(
            "SQL and RocketMQ read NOT differently before a comparison: put what it negates into brackets",
            part.at,
            ("NOT (...)",),
        )
    return part.node


def _comparable(part: _Part) -> Node:
    """The part on either side of = and <>."""
    node = _operand(part)
    if isinstance(node, Constant) and node.value is None:
        raise _WrongError("nothing equals NULL: write IS NULL or IS NOT NULL", part.at, ("a value",))
    return node


def _ordered(part: _Part) -> Node:
    """The part on either side of < and the like."""
    node = _operand(part)
    is_number = isinstance(node, Constant) and type(node.value) in (int, float)
    if is_number or isinstance(node, Property):
        return node
    raise _WrongError(
        "only numbers, and properties that hold them, are less or greater", part.at, ("a number", "a property")
    )


def _property(part: _Part, keyword: str) -> Property:
    node = _operand(part)
    if isinstance(node, Property):
        return node
    raise _WrongError(f"a property is expected before {keyword}", part.at, ("a property",))


def _text_of(token: Token) -> bytes:
    try:
        return str(token)[1:-1].replace("''", "'").encode()
    except UnicodeEncodeError:
        raise _WrongError("the text is not valid Unicode", _at(token)) from None


def _at(token: Token) -> int:
    return token.start_pos or 0


def _compared(operator: str, left: _Part, right: _Part) -> Node:
    return Compare(operator, _ordered(left), _ordered(right))


@v_args(inline=True)
class _Nodes(Transformer[Token, Any]):
    """What each rule of the grammar makes. It has no state."""

    def start(self, part: _Part) -> _Part:
        return part._replace(node=_condition(part))

    def either(self, *found: _Part | Token) -> _Part:
        parts = [part for part in found if isinstance(part, _Part)]
        if len(parts) == 1:
            return parts[0]
        return _built(Or(tuple(map(_condition, parts))), *parts)

    def both(self, *found: _Part | Token) -> _Part:
        parts = [part for part in found if isinstance(part, _Part)]
        if len(parts) == 1:
            return parts[0]
        return _built(And(tuple(map(_condition, parts))), *parts)

    def equal(self, left: _Part, right: _Part) -> _Part:
        nodes = _comparable(left), _comparable(right)
        for (one, part), other in zip(
            zip(nodes, (left, right), strict=True), reversed(nodes), strict=True
        ):
            is_value = isinstance(other, Constant) and not isinstance(other.value, bool)
            if is_value and is_condition(one):
                raise _WrongError("a condition is no value: it equals TRUE or FALSE", part.at)
        return _built(Equal(*nodes), left, right)

    def not_equal(self, left: _Part, right: _Part) -> _Part:
        equal = self.equal(left, right)
        return equal._replace(node=Not(equal.node))

    def is_null(self, part: _Part, *_: Token) -> _Part:
        return _built(IsNull(_operand(part)), part)

    def is_not_null(self, part: _Part, *_: Token) -> _Part:
        return _built(Not(IsNull(_operand(part))), part)

    def compare(self, left: _Part, operator: Token, right: _Part) -> _Part:
        return _built(_compared(str(operator), left, right), left, right)

    def text_test(self, part: _Part, negation: Token | None, keyword: Token, text: Token) -> _Part:
        word = str(keyword).upper()
        node = TextTest(word, _property(part, word), _text_of(text), negation is not None)
        return _built(node, part, literals=CONTAINS_LITERALS if word == "CONTAINS" else 1)

    def between(
        self, part: _Part, negation: Token | None, _: Token, low: _Part, _and: Token, high: _Part
    ) -> _Part:
        lower, upper = _ordered(low), _ordered(high)
        if (
            isinstance(lower, Constant)
            and isinstance(upper, Constant)
            and lower.value > upper.value  # type: ignore[operator] # both are numbers
        ):
            raise _WrongError("BETWEEN has the lower number first", low.at)
        if negation is None:
            return _built(
                And((_compared(">=", part, low), _compared("<=", part, high))), part, low, high
            )
        return _built(Or((_compared("<", part, low), _compared(">", part, high))), part, low, high)

    def in_list(self, part: _Part, negation: Token | None, _: Token, *texts: Token) -> _Part:
        values = tuple(map(_text_of, texts))
        node = In(_property(part, "IN"), values, negation is not None)
        return _built(node, part, literals=len(values))

    def plus(self, part: _Part) -> _Part:
        return self._signed(part, 1, part.at)

    def minus(self, sign: Token, part: _Part) -> _Part:
        return self._signed(part._replace(needs_minus=False), -1, _at(sign))

    def _signed(self, part: _Part, sign: int, at: int) -> _Part:
        node = part.node
        if isinstance(node, Constant) and type(node.value) in (int, float):
            value = sign * node.value  # type: ignore[operator]
            if type(value) is int and value > LONG_MAX and not part.needs_minus:
                raise _WrongError(f"whole numbers go up to {LONG_MAX}", part.at)
            return _built(Constant(value), part, at=at)
        raise _WrongError("only a number has a sign", part.at, ("a number",))

    def negated(self, word: Token, part: _Part) -> _Part:
        return _built(Not(_condition(part)), part, at=_at(word))._replace(is_bare_not=True)

    def bracketed(self, part: _Part) -> _Part:
        return _built(part.node, part)

    def text(self, token: Token) -> _Part:
        return _Part(Constant(_text_of(token)), _at(token), literals=1)

    def whole_number(self, token: Token) -> _Part:
        value = int(str(token).rstrip("lL")) if len(token) <= 20 else LONG_MAX + 2
        if value > LONG_MAX + 1:
            raise _WrongError(f"whole numbers go up to {LONG_MAX}", _at(token))
        return _Part(Constant(value), _at(token), literals=1, needs_minus=value > LONG_MAX)

    def real_number(self, token: Token) -> _Part:
        value = float(token)
        if value == float("inf"):
            raise _WrongError("the number is too large", _at(token))
        return _Part(Constant(value), _at(token), literals=1)

    def true(self, token: Token) -> _Part:
        return _Part(Constant(True), _at(token), literals=1)

    def false(self, token: Token) -> _Part:
        return _Part(Constant(False), _at(token), literals=1)

    def null(self, token: Token) -> _Part:
        return _Part(Constant(None), _at(token), literals=1)

    def name(self, token: Token) -> _Part:
        return _Part(Property(str(token)), _at(token))
