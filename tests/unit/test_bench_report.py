"""What of the measured rows stands in the README."""

from __future__ import annotations

from pathlib import Path

from tests.bench.report import write_summary

DOCS = """\
| what | value | floor | broker / client CPU per message | how |
|---|---:|---|---|---|
| batch send | 1,000 msg/s |  | 1.00 / 2.00 µs | 1 KiB |
| pull / bare sendfile | 0.9 x | ≥ 0.8 |  | 1 KiB |
| pop / pull | 0.1 x | ≥ 0.3 **missed** |  | 1 KiB |
| batch send: protomq / RocketMQ | 3 x | ≥ 2 |  | 1 KiB |
| batch send: RocketMQ | 300 msg/s |  |  |  |
"""


def test_the_readme_shows_rows_beside_peers_and_missed_floors_and_counts_the_rest(tmp_path: Path) -> None:
    docs, readme = tmp_path / "benchmarks.md", tmp_path / "README.md"
    docs.write_text(DOCS, "utf-8")
    readme.write_text("before\n<!-- benchmarks: begin -->\nold\n<!-- benchmarks: end -->\nafter\n", "utf-8")

    write_summary(docs, readme)

    assert readme.read_text("utf-8") == (
        "before\n<!-- benchmarks: begin -->\n\n"
        "| what | value | floor |\n|---|---:|---|\n"
        "| pop / pull | 0.1 x | ≥ 0.3 **missed** |\n"
        "| batch send: protomq / RocketMQ | 3 x | ≥ 2 |\n\n"
        "1 more rows have a floor, and reach it.\n"
        "<!-- benchmarks: end -->\nafter\n"
    )
