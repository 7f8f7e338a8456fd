"""What a run did: progress on the terminal, a JSON file and a plot (where matplotlib is installed: `protomq-spark[report]`)."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

POLL_S: Final = 1
SHOW_TASKS_AFTER_S: Final = 2.0
"""What is over sooner needs no progress."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One panel of the plot. `series`: name -> values, one for each of `places`, which are numbers (line) or names (bar)."""

    title: str
    unit: str
    places: Sequence[Any]
    series: Mapping[str, Sequence[float | None]]
    kind: Literal["line", "bar"] = "line"
    place_unit: str = ""


class RunReport:
    """The report of one run. One thread."""

    def __init__(self, pipeline: str, settings: Mapping[str, Any]) -> None:
        self.pipeline = pipeline
        self.settings = {name: str(value) for name, value in settings.items()}
        self.batches: list[dict[str, Any]] = []
        self.result: dict[str, Any] = {}
        self.charts: list[Chart] = []
        """What to plot; if nothing, the numbers of the batches."""
        self.error: str | None = None
        self._began_s = time.monotonic()
        self._began_at = time.time()

    def elapsed_s(self) -> float:
        """Since the run began."""
        return round(time.monotonic() - self._began_s, 3)

    def batch(
        self, number: int, *, ended_at: float | None = None, **numbers: int | float
    ) -> None:
        """A micro-batch is done: one line on the terminal. `ended_at`: when, in seconds since 1970; None: just now."""
        elapsed_s = self.elapsed_s()
        if ended_at is not None:
            elapsed_s = max(round(ended_at - self._began_at, 3), 0.0)
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
            "elapsed_s": self.elapsed_s(),
            "error": self.error,
            "settings": self.settings,
            "result": self.result,
            "batches": self.batches,
            "charts": [asdict(chart) for chart in self.charts],
        }
        (path / "report.json").write_text(json.dumps(content, indent=2, default=str) + "\n")
        charts = self.charts or charts_of_batches(self.batches)
        if not charts:
            say("no report.png: there is nothing to plot")
            return
        try:
            plot(f"protomq {self.pipeline}", charts, path / "report.png")
        except ImportError:
            say("no report.png: matplotlib is not installed (pip install 'protomq-spark[report]')")


def charts_of_batches(batches: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """A panel for each number of the batches, over time."""
    names = dict.fromkeys(name for batch in batches for name in batch)
    places = [batch["elapsed_s"] for batch in batches]
    return [
        Chart(
            f"{name.replace('_', ' ')}, batch by batch", "", places,
            {name: [batch.get(name) for batch in batches]}, "line", "seconds",
        )
        for name in names
        if name not in ("batch", "elapsed_s")
    ]  # fmt: skip


def plot(title: str, charts: Sequence[Chart], path: Path) -> None:
    """The charts below each other. Raises ImportError without matplotlib."""
    # Not pyplot, which has state of its own and may want a screen.
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(9, 0.7 + 2.6 * len(charts)), layout="constrained")
    figure.suptitle(title)
    all_axes = figure.subplots(len(charts), squeeze=False)[:, 0]
    for axes, chart in zip(all_axes, charts, strict=True):
        shown = {name: values for name, values in chart.series.items() if any(v is not None for v in values)}
        for index, (name, values) in enumerate(shown.items()):
            # matplotlib leaves NaN out.
            heights = [float("nan") if value is None else float(value) for value in values]
            if chart.kind == "line":
                axes.plot(chart.places, heights, marker="o", markersize=4, label=name)
                continue
            width = 0.8 / len(shown)
            centres = [place - 0.4 + width * (index + 0.5) for place in range(len(chart.places))]
            axes.bar(centres, heights, width, label=name)
        if chart.kind == "bar":
            names = [str(place) for place in chart.places]
            slant = 0 if sum(map(len, names)) < 90 else 90 if len(names) > 24 else 30
            axes.set_xticks(
                range(len(names)), names, rotation=slant, fontsize=8, ha="right" if 0 < slant < 90 else "center"
            )
        axes.set_title(chart.title, fontsize=10)
        axes.set_ylabel(chart.unit)
        axes.set_xlabel(chart.place_unit)
        axes.set_ylim(0, max(axes.get_ylim()[1] * 1.05, 1.0))  # Nothing but zeros is a plot, too.
        if chart.place_unit == "seconds":  # Of the run.
            axes.set_xlim(left=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
        axes.grid(True, axis="y", alpha=0.3)
        if len(shown) > 1:
            axes.legend(fontsize=8)
    figure.savefig(path, format="png", dpi=100, metadata={"Title": title})


def short(value: float) -> str:
    """0.2, 950, 50k, 1.5M, 2G."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:g}{unit}"
    return f"{value:g}"


def text_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with the same columns as lines: numbers to the right, `-` for what is not known."""
    if not rows:
        return "(nothing)"
    names = list(rows[0])
    cells = [[_cell(row[name]) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    numeric = [all(isinstance(row[name], int | float | None) for row in rows) for name in names]

    def line(texts: Sequence[str]) -> str:
        aligned = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(texts, widths, numeric, strict=True)
        ]
        return "  ".join(aligned).rstrip()

    return "\n".join([line([name.upper() for name in names]), *map(line, cells)])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def answer(text: str) -> None:
    """What was asked for goes to stdout."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def say(line: str) -> None:
    """Progress goes to stderr."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


@contextmanager
def show_tasks(spark: SparkSession) -> Iterator[None]:
    """While a long Spark job runs: how many of its tasks are done, whenever that has changed."""
    tracker = spark.sparkContext.statusTracker()
    over = threading.Event()

    def look() -> None:
        told: tuple[int, int] | None = None
        wait_s = SHOW_TASKS_AFTER_S
        while not over.wait(wait_s):
            wait_s = POLL_S
            infos = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
            stages = [info for info in infos if info is not None]
            now = (sum(s.numCompletedTasks for s in stages), sum(s.numTasks for s in stages))
            if stages and now != told:
                told = now
                say(f"  {now[0]} of {now[1]} tasks")

    thread = threading.Thread(target=look, name="protomq-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def end_of(progress: Any) -> float:
    """When a micro-batch ended, in seconds since 1970: Spark reports several at once, later."""
    began_at = datetime.fromisoformat(progress["timestamp"].replace("Z", "+00:00")).timestamp()
    return began_at + float(progress["durationMs"]["triggerExecution"]) / 1000


def progress_of(query: StreamingQuery) -> Iterator[Any]:
    """The progress of each micro-batch that had rows, as it ends; until the query ends. Raises what the query raises.

    Spark keeps the last hundred only, so they are taken while it runs.
    """
    done = -1
    ended = False
    while not ended:
        ended = query.awaitTermination(POLL_S) is True
        for progress in query.recentProgress:
            if progress["batchId"] > done and progress["numInputRows"]:
                done = progress["batchId"]
                yield progress
