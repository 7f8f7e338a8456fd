"""What consumers that nobody closed do when the interpreter ends: all of them, within one limit."""

from __future__ import annotations

import warnings

import pytest

from protomq import _open_consumers
from protomq._name_servers import NameServerList
from protomq._open_consumers import COMMITS_AT_EXIT_S, closed, opened
from protomq._types import MessageQueue


class Clock:
    """Time that passes when somebody waits."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


class Consumer:
    """Its broker takes `takes_s` for an answer; what is left at the limit is not committed."""

    end_call = "close"

    def __init__(self, group: str, clock: Clock, takes_s: float = 0.0) -> None:
        self.group = group
        self.limit_s: float | None = None
        self._clock = clock
        self._takes_s = takes_s
        opened(self, NameServerList("127.0.0.1:1"))

    def assignment(self) -> tuple[MessageQueue, ...]:
        return ()

    def finish_at_exit(self, timeout_s: float) -> int:
        self.limit_s = timeout_s
        self._clock.now_s += min(self._takes_s, timeout_s)
        return int(self._takes_s > timeout_s)


class Broken(Consumer):
    """Fails in a way that nobody foresaw."""

    def finish_at_exit(self, timeout_s: float) -> int:
        raise RuntimeError("can't start new thread at interpreter shutdown")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(_open_consumers, "time", made)
    monkeypatch.setattr(_open_consumers, "_open", {})
    return made


def test_all_consumers_have_one_limit_together_and_each_its_share(clock: Clock) -> None:
    consumers = [Consumer(f"g{i}", clock, takes_s=60.0) for i in range(4)]
    consumers.append(Consumer("quick", clock, takes_s=0.01))
    with pytest.warns(RuntimeWarning) as told:
        _open_consumers._at_exit()
    assert clock.now_s - 100.0 <= COMMITS_AT_EXIT_S
    assert [str(warning.message).split(" are not")[0][-2:] for warning in told] == [
        "g0", "g1", "g2", "g3"
    ]  # fmt: skip
    assert consumers[-1].limit_s == pytest.approx(COMMITS_AT_EXIT_S / 5)


def test_what_a_quick_one_leaves_is_for_the_others(clock: Clock) -> None:
    quick, slow = Consumer("quick", clock, 0.0), Consumer("slow", clock, COMMITS_AT_EXIT_S)
    _open_consumers._at_exit()
    assert (quick.limit_s, slow.limit_s) == (COMMITS_AT_EXIT_S / 2, COMMITS_AT_EXIT_S)


def test_an_error_of_one_is_told_and_the_others_commit_all_the_same(clock: Clock) -> None:
    first, second, third = Broken("g1", clock), Consumer("g2", clock), Consumer("g3", clock)
    with pytest.warns(RuntimeWarning, match="group g1 could not commit .*can't start new thread"):
        _open_consumers._at_exit()
    assert None not in (second.limit_s, third.limit_s)
    closed(first)


def test_where_warnings_are_errors_all_have_committed_before_the_first(clock: Clock) -> None:
    slow, quick = Consumer("slow", clock, 60.0), Consumer("quick", clock)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="group slow"):
            _open_consumers._at_exit()
    assert slow.limit_s
    assert quick.limit_s
