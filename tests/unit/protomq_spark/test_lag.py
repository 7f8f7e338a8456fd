"""The lag pipeline's arithmetic, and the tables and plots of reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from protomq import MessageQueue
from protomq._types import QueueRange
from protomq_spark.pipelines.lag import (
    Sample,
    catch_up_s,
    group_rows,
    group_totals,
    of_reading_groups,
    queue_rows,
    skew,
    state_of,
    topic_rows,
)
from protomq_spark.pipelines.report import RunReport, charts_of_batches, end_of, short, text_table

A, B, NEW = (MessageQueue("t", "broker", n) for n in range(3))


def test_rates_follow_from_two_samples() -> None:
    first = Sample(10.0, {A: QueueRange(0, 100), B: QueueRange(0, 100)}, {"g": {A: 50}})
    last = Sample(
        20.0,
        {A: QueueRange(0, 200), B: QueueRange(40, 100), NEW: QueueRange(0, 50)},
        {"g": {A: 200, B: 60}},
    )
    queues = queue_rows([first, last])
    assert [(row["queue"], row["in_per_s"], row["stored"]) for row in queues] == [
        (0, 10.0, 200), (1, 0.0, 60), (2, 5.0, 50),
    ]  # fmt: skip
    rows = group_rows(first, last)
    assert [(row["lag"], row["read_per_s"]) for row in rows] == [(0, 15.0), (40, 2.0), (50, 0.0)]
    (total,) = group_totals(rows)
    assert (total["lag"], total["read_per_s"], total["in_per_s"]) == (90, 17.0, 15.0)
    assert (total["catch_up_s"], total["state"]) == (45.0, "catching up")
    (topic,) = topic_rows(queues)
    assert (topic["queues"], topic["in_per_s"], topic["in_skew"]) == (3, 15.0, 2.0)


def test_one_sample_has_no_rates() -> None:
    sample = Sample(1.0, {A: QueueRange(0, 10)}, {"g": {A: 4}})
    (row,) = group_rows(sample, sample)
    assert (row["lag"], row["read_per_s"], row["in_per_s"]) == (6, None, None)
    (total,) = group_totals([row])
    assert (total["catch_up_s"], total["state"]) == (None, "behind")


def test_a_group_that_is_behind_what_is_deleted_lags_by_what_is_left() -> None:
    sample = Sample(1.0, {A: QueueRange(50, 60)}, {"g": {A: 4}})
    assert group_rows(sample, sample)[0]["lag"] == 10


def test_a_topic_that_a_group_never_read_is_no_lag_of_it() -> None:
    other = MessageQueue("u", "broker", 0)
    sample = Sample(1.0, {A: QueueRange(0, 10), other: QueueRange(0, 99)}, {"g": {A: 4}, "h": {other: 90}})
    rows = of_reading_groups(group_rows(sample, sample))
    assert [(row["group"], row["topic"], row["lag"]) for row in rows] == [("g", "t", 6), ("h", "u", 9)]


def test_ends_that_went_back_have_grown_from_nothing_and_no_lag_is_below_zero() -> None:
    first = Sample(0.0, {A: QueueRange(0, 1000)}, {"g": {A: 900}})
    last = Sample(10.0, {A: QueueRange(0, 50)}, {"g": {A: 900}})
    (row,) = group_rows(first, last)
    assert (row["lag"], row["in_per_s"], row["read_per_s"]) == (0, 5.0, 0.0)
    (queue,) = queue_rows([first, last])
    assert (queue["stored"], queue["in_per_s"]) == (50, 5.0)


@pytest.mark.parametrize(
    ("lag", "read", "grown", "seconds", "state"),
    [
        (0, 0.0, 0.0, 0.0, "caught up"),
        (100, 0.0, 5.0, None, "stands still"),
        (100, 5.0, 5.0, None, "keeping pace"),
        (100, 4.0, 5.0, None, "falling behind"),
        (100, 15.0, 5.0, 10.0, "catching up"),
    ],
)
def test_states(lag: int, read: float, grown: float, seconds: float | None, state: str) -> None:
    assert catch_up_s(lag, read, grown) == seconds
    assert state_of(lag, read, grown) == state


def test_skew_is_one_where_all_are_equal() -> None:
    assert skew([5, 5, 5]) == 1.0
    assert skew([9, 0, 0]) == 3.0
    assert skew([0, 0]) is None
    assert skew([]) is None


def test_a_table_has_numbers_to_the_right() -> None:
    rows = [{"name": "a", "count": 1234, "rate": 1.25}, {"name": "bcd", "count": 5, "rate": None}]
    assert text_table(rows).splitlines() == [
        "NAME  COUNT  RATE", "a     1,234   1.2", "bcd       5     -",
    ]  # fmt: skip
    assert text_table([]) == "(nothing)"


def test_a_report_without_matplotlib_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    report = RunReport("archive", {"topic": "t"})
    report.batch(0, rows=5)
    report.write(str(tmp_path))
    assert (tmp_path / "report.json").exists()
    assert not (tmp_path / "report.png").exists()
    assert "pip install 'protomq-spark[report]'" in capsys.readouterr().err


def test_batches_that_are_told_of_together_keep_their_own_times() -> None:
    report = RunReport("transform", {})
    ends = [
        end_of({"timestamp": f"2100-01-01T00:00:{text}Z", "durationMs": {"triggerExecution": 500}})
        for text in ("05.250", "07.250")
    ]
    for number, ended_at in enumerate(ends):
        report.batch(number, ended_at=ended_at, messages=1)
    first, last = (batch["elapsed_s"] for batch in report.batches)
    assert last - first == pytest.approx(2.0)
    assert ends[1] == 4_102_444_807.75


def test_batches_are_a_panel_for_each_number() -> None:
    charts = charts_of_batches(
        [{"batch": 0, "elapsed_s": 1.5, "rows": 5}, {"batch": 1, "elapsed_s": 2.5, "rows": 6, "files": 1}]
    )
    assert [(chart.title, list(chart.places), dict(chart.series)) for chart in charts] == [
        ("rows, batch by batch", [1.5, 2.5], {"rows": [5, 6]}),
        ("files, batch by batch", [1.5, 2.5], {"files": [None, 1]}),
    ]


def test_numbers_at_an_axis_are_short_and_never_thousandths() -> None:
    assert [short(value) for value in (0, 0.2, 950, 50_000, 1_500_000, 2e9)] == [
        "0", "0.2", "950", "50k", "1.5M", "2G",
    ]  # fmt: skip
