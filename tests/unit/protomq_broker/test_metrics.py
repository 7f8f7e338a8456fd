"""The metrics that a broker shows are those that docs/operations.md names."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from protomq_broker import metrics
from protomq_runtime.metrics_page import Column

ROOT = Path(__file__).parents[3]


def documented() -> set[str]:
    """Names in the table; `a_{b,c}_d` stands for two, `..._d` for the name before with another end."""
    text = (ROOT / "docs/operations.md").read_text("utf-8")
    section = text.partition("### The metrics page")[2].partition("\n### ")[0]
    names: list[str] = []
    for name in re.findall(r"`((?:protomq_|\.\.\.)[a-z_{},]+)`", section):
        if name.startswith("..."):
            name = names[-1].replace("_in_", "_out_")
        parts = [part.split(",") for part in re.split(r"[{}]", name)]
        names += ["".join(choice) for choice in itertools.product(*parts)]
    return set(names)


def shown() -> set[str]:
    tables = [value for name, value in vars(metrics).items() if re.fullmatch(r"_[A-Z_]+", name)]
    columns = [each for table in tables for each in table if isinstance(each, Column)]
    return {each.metric + ("_total" if each.is_total else "") for each in columns}


def test_the_documents_name_every_metric_and_no_other() -> None:
    assert len(shown()) > 30
    assert documented() == shown()
