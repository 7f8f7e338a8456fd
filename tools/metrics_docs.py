"""Writes the tables of docs/metrics.md from those of the broker (protomq_broker/metrics.py). A test says when that was forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from protomq_broker.metrics import TABLES
from protomq_runtime.metrics import Kind, Metric

PAGE = Path(__file__).resolve().parent.parent / "docs/metrics.md"
BEGIN, END = "<!-- metrics: begin -->\n", "<!-- metrics: end -->\n"


def written_anew(page: str) -> str:
    """The page with its tables as they must be."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n".join(_lines()) + "\n" + END + after


def _lines() -> Iterator[str]:
    for table in TABLES:
        attributes = ", ".join(f"`{name}`" for name in table.attributes) or "none"
        yield f"\n### {table.title}\n\nAttributes: {attributes}.\n"
        yield "| Prometheus | OpenTelemetry | unit | kind | meaning |\n|---|---|---|---|---|"
        yield from map(_row, table.metrics)
        for metric in table.metrics:
            if metric.bounds:
                bounds = ", ".join(f"{bound:g}" for bound in metric.bounds)
                yield f"\nBounds of `{metric.name}`: {bounds}."


def _row(metric: Metric) -> str:
    name = metric.prometheus_name + ("_total" if metric.kind is Kind.COUNTER else "")
    unit = f"`{metric.unit}`" if metric.unit else ""
    return f"| `{name}` | `{metric.name}` | {unit} | {metric.kind.value} | {metric.help} |"


if __name__ == "__main__":
    PAGE.write_text(written_anew(PAGE.read_text("utf-8")), "utf-8")
