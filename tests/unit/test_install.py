"""What README.md and other pages say about installing is true of the pyprojects."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKSPACE: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
MEMBERS = [tomllib.loads((ROOT / folder / "pyproject.toml").read_text()) for folder in WORKSPACE["tool"]["uv"]["workspace"]["members"]]
EXTRAS: dict[str, dict[str, list[str]]] = {
    each["project"]["name"]: each["project"].get("optional-dependencies", {}) for each in MEMBERS
}
PLACES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    *(path for folder in ("deploy", "examples") for path in (ROOT / folder).rglob("*") if path.suffix in (".md", ".yaml", ".py")),
]


def test_an_install_of_the_checkout_has_every_extra_but_those_of_spark() -> None:
    open_ones, found = list(WORKSPACE["project"]["dependencies"]), set()
    while open_ones:
        match = re.match(r"([\w.-]+)(?:\[([\w,]+)\])?", open_ones.pop())
        assert match is not None
        for extra in (match[2] or "").split(","):
            if extra and match[1] in EXTRAS and (match[1], extra) not in found:
                found.add((match[1], extra))
                open_ones += EXTRAS[match[1]][extra]
    assert found == {(name, extra) for name, extras in EXTRAS.items() for extra in extras if name != "protomq-spark"}


@pytest.mark.parametrize("path", PLACES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_installs_from_the_checkout_since_no_index_has_protomq(path: Path) -> None:
    assert not re.findall(r"pip\s+install[^`\n#]*?[\s\"'](protomq\S*)", path.read_text())
