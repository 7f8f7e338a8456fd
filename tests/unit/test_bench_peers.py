"""How turns of two sides are taken, and what comes of their samples. No process is started."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from tests.bench.bench import FULL, QUICK, Bench
from tests.bench.measure import Sample
from tests.bench.peers.delivery_rows import DELIVERY_ROWS
from tests.bench.peers.pair import THEIRS, Pair, latency_versus, seen, versus
from tests.bench.peers.rows import PEER_ROWS


class _Recorder:
    """Whatever is called on it is noted under its name."""

    def __init__(self, name: str, events: list[str]) -> None:
        self._name = name
        self._events = events

    def __getattr__(self, method: str) -> Callable[..., Sample]:
        def note(*arguments: object) -> Sample:
            self._events.append(" ".join([self._name, method, *map(str, arguments)]))
            return _sample(100)

        return note


def _sample(rate: int, **more: Any) -> Sample:
    return Sample(messages=2 * rate, seconds=2.0, **more)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(os, "sync", lambda: None)
    return []


def _pair(events: list[str], rounds: int = 2, extent: str = "quick") -> Pair:
    base = FULL if extent == "full" else QUICK
    bench = Bench(dataclasses.replace(base, rounds=rounds, seconds=3.0), Path("unused"))
    sides = (_Recorder("ours", events), _Recorder("theirs", events))
    return Pair(bench, *cast("Any", sides))


def test_turns_alternate_and_the_other_side_is_stopped(events: list[str]) -> None:
    def run(name: str) -> Callable[[], Sample]:
        def turn() -> Sample:
            events.append(name)
            return _sample(1)

        return turn

    samples = _pair(events).take_turns({"a": run("A"), "b": run("B")}, run("PEER"))
    our_turns = ["theirs pause", "A", "theirs resume", "theirs pause", "B", "theirs resume"]
    their_turn = ["ours send_signal 19", "PEER", "ours send_signal 18"]
    assert events == 2 * (our_turns + their_turn)
    assert {name: len(some) for name, some in samples.items()} == {"a": 2, "b": 2, THEIRS: 2}


def test_a_side_goes_on_after_a_turn_that_failed(events: list[str]) -> None:
    def fail() -> Sample:
        raise RuntimeError("no")

    pair = _pair(events)
    for turn in (pair.our_turn, pair.their_turn):
        with pytest.raises(RuntimeError, match="no"):
            turn(fail)
    assert events == ["theirs pause", "theirs resume", "ours send_signal 19", "ours send_signal 18"]


@pytest.mark.parametrize(("extent", "warm_up"), [("quick", "5.0"), ("full", "25.0")])
def test_a_java_client_is_warmed_up_once_and_runs_in_its_turns_only(
    extent: str, warm_up: str, events: list[str]
) -> None:
    driver = cast("Any", _Recorder("driver", events))
    _pair(events, rounds=1, extent=extent).against_driver(lambda: _sample(1), driver)
    assert [event for event in events if event.startswith("driver")] == [
        "driver resume",
        f"driver window {warm_up} 0.5",
        "driver pause",
        "driver resume",
        "driver window 1.0 3.0",
        "driver pause",
    ]


def test_a_java_client_that_does_nothing_is_no_row(events: list[str]) -> None:
    class Idle(_Recorder):
        def window(self, *_: float) -> Sample:
            return _sample(0, errors=3)

    with pytest.raises(RuntimeError, match=r"did nothing in 2\.0 s; 3 calls failed"):
        _pair(events).against_driver(lambda: _sample(1), cast("Any", Idle("driver", events)))


def test_rates_give_the_ratio_of_their_medians() -> None:
    ours, theirs = [_sample(n) for n in (100, 300, 200)], [_sample(n) for n in (50, 10, 60)]
    mine, peers, ratio = versus("row", ours, theirs, 4.5, "how")
    assert (mine.value, peers.value, ratio.value) == (200.0, 50.0, 4.0)
    assert (mine.holds, peers.holds, ratio.holds) == (None, None, False)
    assert mine.how == "how; 100 to 300"
    assert ratio.name == "row: protomq / RocketMQ"


def test_a_ratio_without_a_floor_only_informs() -> None:
    assert [result.holds for result in versus("row", [_sample(1)], [_sample(2)], None, "")] == [None] * 3


def test_latencies_have_a_floor_each_and_one_for_their_ratio() -> None:
    ours, theirs = [_sample(1, p99_ms=1.8)], [_sample(1, p99_ms=3.0)]
    mine, peers, ratio = latency_versus("row", ours, theirs, 0.5, "", lambda s: s.p99_ms, 2.0)
    assert (mine.holds, peers.holds, ratio.holds) == (True, None, False)
    assert ratio.value == pytest.approx(0.6)
    assert ratio.better == mine.better == "less"


def test_calls_that_failed_are_said() -> None:
    assert seen([_sample(5), _sample(7)]) == "5 to 7"
    assert seen([_sample(5, errors=1_000), _sample(7)]) == "5 to 7; 1,000 calls failed"


def test_no_row_hides_another_one() -> None:
    assert not PEER_ROWS.keys() & DELIVERY_ROWS.keys()
    assert all(function.__doc__ for function in (PEER_ROWS | DELIVERY_ROWS).values())
