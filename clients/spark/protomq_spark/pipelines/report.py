"""What a run did: progress on the terminal, a JSON file and, where matplotlib is installed, a plot."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger("protomq_spark")


class RunReport:
    """The report of one run. One thread."""

    def __init__(self, pipeline: str, settings: Mapping[str, Any]) -> None:
        self.pipeline = pipeline
        self.settings = {name: str(value) for name, value in settings.items()}
        self.batches: list[dict[str, Any]] = []
        self.result: dict[str, Any] = {}
        self._began_s = time.monotonic()
        self._began_at = time.time()

    def batch(self, number: int, **numbers: int | float) -> None:
        """A micro-batch is done: one line on the terminal."""
        elapsed_s = round(time.monotonic() - self._began_s, 3)
        self.batches.append({"batch": number, "elapsed_s": elapsed_s, **numbers})
        told = ", ".join(f"{name} {value:,}" for name, value in numbers.items())
        say(f"batch {number}: {told} ({elapsed_s:.1f} s)")

    def write(self, folder: str) -> None:
        """report.json, and report.png if it can be drawn."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        content = {
            "pipeline": self.pipeline,
            "began_at": self._began_at,
            "elapsed_s": round(time.monotonic() - self._began_s, 3),
            "settings": self.settings,
            "result": self.result,
            "batches": self.batches,
        }
        (path / "report.json").write_text(json.dumps(content, indent=2) + "\n")
        try:
            self._plot(path / "report.png")
        except ImportError:
            say("no report.png: matplotlib is not installed")

    def _plot(self, path: Path) -> None:
        import matplotlib  # type: ignore[import-not-found, unused-ignore]

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(9, 4.5))
        names = [
            name
            for name in (self.batches[0] if self.batches else {})
            if name not in ("batch", "elapsed_s")
        ]
        for name in names:
            values = [batch.get(name, 0) for batch in self.batches]
            axes.plot(
                [batch["elapsed_s"] for batch in self.batches], values, marker="o", label=name
            )
        axes.set_xlabel("seconds")
        axes.set_title(f"protomq {self.pipeline}")
        if names:
            axes.legend()
        figure.savefig(path, dpi=120)
        pyplot.close(figure)


def say(line: str) -> None:
    """Progress goes to stderr."""
    sys.stderr.write(line + "\n")
