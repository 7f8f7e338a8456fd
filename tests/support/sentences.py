"""How long the sentences of documents and public docstrings are: a reader should not need to go back to where one began.

    a sentence   ends at . ! ? or · before a space, at an empty line, an item of a list, a cell of a table
    a word       has a letter or a digit; what stands between backticks is one word, so is a link's address with its bracket
    left out     code (fenced, indented by four, behind `>>>`), drawings, and lines that are no prose
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

WORDS_MAX: Final = 25
"""Of a sentence (CONTRIBUTING.md)."""

_FENCE: Final = re.compile(r"^\s*(```|~~~)")
_ITEM: Final = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+")
_ATTRIBUTE: Final = re.compile(r"^\s*(?:Attributes:|\w+: )")
_LOGS: Final = ("debug", "info", "warning", "error", "exception", "critical")
_DRAWN: Final = re.compile(r"[^\s.:]  +\S")
"""A row of columns."""
_CODE: Final = re.compile(r"``.+?``|`[^`]+`", re.DOTALL)
_LINK: Final = re.compile(r"\]\([^)]*\)")
_END: Final = re.compile(r"(?<=[.!?·])[)\]\"'*_]*\s+(?=[^a-z])|(?<=[.!?])[)\]\"'*_]*$")
_ABBREVIATED: Final = re.compile(r"\b(e\.g|i\.e|etc|vs|cf|ca|resp|approx|No|Dr)\.$")


class Sentence(NamedTuple):
    line: int
    """Of the text, from 1: where it begins."""
    text: str
    words: int


def sentences_of_document(text: str) -> Iterator[Sentence]:
    """Those of a page of Markdown."""
    fenced = False
    lines: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if _FENCE.match(line):
            fenced = not fenced
            line = ""
        elif line.startswith("<!--") or fenced or (line.startswith("    ") and not lines):
            line = ""
        if line.lstrip().startswith("|"):
            yield from _of_paragraph(lines)
            lines = []
            for cell in re.split(r"(?<!\\)\|", line):
                yield from _of_paragraph([(number, cell)])
        elif not line.strip() or line.startswith("#"):
            yield from _of_paragraph(lines)
            lines = []
        elif _ITEM.match(line):
            yield from _of_paragraph(lines)
            lines = [(number, _ITEM.sub("", line))]
        else:
            lines.append((number, line))
    yield from _of_paragraph(lines)


def sentences_of_docstring(text: str) -> Iterator[Sentence]:
    """Those of a docstring, as `ast.get_docstring(clean=True)` gives it."""
    lines: list[tuple[int, str]] = []
    item = _ATTRIBUTE if "Attributes:" in text else _ITEM
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("    ") or line.lstrip().startswith(">>>") or _DRAWN.search(line):
            yield from _of_paragraph(lines)
            lines = []
        elif item.match(line) or (line.startswith(" ") and not lines):
            yield from _of_paragraph(lines)
            lines = [(number, item.sub("", line))]
        else:
            lines.append((number, line))
    yield from _of_paragraph(lines)


def docstrings_of(tree: ast.Module, *, private: bool = False) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring: of the module, of classes and functions, and of what is assigned (the string behind it)."""
    yield from _docstrings_in(tree, private=private)


def messages_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each message: of errors that are raised, of log lines, and of `help=`. A value that is filled in is one word."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            texts: list[ast.expr] = node.exc.args
        elif isinstance(node, ast.Call):
            is_log = isinstance(node.func, ast.Attribute) and node.func.attr in _LOGS
            texts = [*(node.args[:1] if is_log else ()), *(word.value for word in node.keywords if word.arg == "help")]
        else:
            continue
        yield from ((text.lineno, message) for text in texts if (message := _message_in(text)))


def _message_in(node: ast.expr) -> str:
    """Of a literal, or of literals that are added; "" if it is none."""
    if isinstance(node, ast.BinOp):
        return _message_in(node.left) + _message_in(node.right)
    if isinstance(node, ast.JoinedStr):
        return "".join(_message_in(part) if isinstance(part, ast.Constant) else "X" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _docstrings_in(node: ast.AST, *, private: bool) -> Iterator[tuple[int, str]]:
    body = getattr(node, "body", [])
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        if (clean := ast.get_docstring(node)) is not None:
            yield body[0].lineno, clean
    for before, statement in itertools.pairwise(body):
        if isinstance(before, ast.Assign | ast.AnnAssign) and _is_text(statement):
            target = before.targets[0] if isinstance(before, ast.Assign) else before.target
            if private or not _name_of(target).startswith("_"):
                yield statement.lineno, _cleaned(statement.value.value)
    for child in body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if private or not child.name.startswith("_") or child.name.endswith("__"):
                if isinstance(child, ast.ClassDef):
                    yield from _docstrings_in(child, private=private)
                elif (clean := ast.get_docstring(child)) is not None:
                    yield child.body[0].lineno, clean


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _name_of(node: ast.AST) -> str:
    return getattr(node, "id", "") or getattr(node, "attr", "")


def _cleaned(text: str) -> str:
    return inspect.cleandoc(text)


def _of_paragraph(lines: list[tuple[int, str]]) -> Iterator[Sentence]:
    if not lines:
        return
    starts, text = [], ""
    for number, line in lines:
        starts.append((len(text), number))
        text += line.strip() + " "
    hidden = _CODE.sub(lambda match: "C" + "_" * (len(match[0]) - 1), text)
    hidden = _LINK.sub(lambda match: "_" * len(match[0]), hidden)
    begin = 0
    for match in _END.finditer(hidden):
        if _ABBREVIATED.search(hidden[begin : match.start()]):
            continue
        yield from _sentence(starts, text, hidden, begin, match.end())
        begin = match.end()
    yield from _sentence(starts, text, hidden, begin, len(text))


def _sentence(starts: list[tuple[int, int]], text: str, hidden: str, begin: int, end: int) -> Iterator[Sentence]:
    words = sum(1 for word in hidden[begin:end].split() if re.search(r"[A-Za-z0-9]", word))
    if words:
        line = max(number for start, number in starts if start <= begin)
        yield Sentence(line, text[begin:end].strip(), words)
