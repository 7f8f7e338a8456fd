"""The letters of docs/reliability.md are those that the campaigns of tests/chaos print: each of them has a row, and each row is printed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LETTER = re.compile(r"[A-Z]\d[a-z]?")
SOURCES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted((ROOT / "tests/chaos").rglob("*.py"))}


def rows_of(page: str) -> list[str]:
    """The letters in the first column of its table of invariants, ranges spelled out."""
    letters: list[str] = []
    for cell in re.findall(r"^\| ([A-Z]\d[a-z]?(?:(?:, | to )[A-Z]\d[a-z]?)*) \|", page, re.MULTILINE):
        first, is_range, last = cell.partition(" to ")
        letters += [f"{first[0]}{number}" for number in range(int(first[1]), int(last[1]) + 1)] if is_range else cell.split(", ")
    return letters


def letters_in(source: str) -> Iterator[str]:
    """The letters that a module can print: its texts that are nothing but one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and LETTER.fullmatch(node.value):
            yield node.value


def explained_in(source: str) -> list[str]:
    """The letters that the docstring of a module explains, a line each."""
    return re.findall(r"^    ([A-Z]\d[a-z]?) {2,}\S", ast.get_docstring(ast.parse(source), clean=False) or "", re.MULTILINE)


def test_each_letter_has_one_row_and_each_row_is_printed() -> None:
    rows = rows_of((ROOT / "docs/reliability.md").read_text())
    assert sorted(rows) == sorted(set(rows))
    assert set(rows) == {letter for source in SOURCES.values() for letter in letters_in(source)}


def test_a_module_explains_a_letter_once_and_prints_what_it_explains() -> None:
    for name, source in SOURCES.items():
        explained = explained_in(source)
        assert len(explained) == len(set(explained)), name
        assert set(explained) <= set(letters_in(source)), name


def test_what_is_missing_is_seen() -> None:
    assert rows_of("| A1 | one |\n| B1 to B3 | more |\n| D1, D2 | two |\n| else | no |\n") == ["A1", "B1", "B2", "B3", "D1", "D2"]
    assert list(letters_in('say("G3a", f"{x}"); find("A1" if x else "F2", "A1 is lost")')) == ["G3a", "A1", "F2"]
    assert explained_in('"""Text.\n\n    G1    one\n    G3a   two\n          G4 on\n"""\n') == ["G1", "G3a"]
