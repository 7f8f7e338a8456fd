"""Rows of `group list` and `group offsets`: what the brokers say of the lag, who is asked, and what stands beyond the end is told."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from protomq import GroupLag, MessageQueue
from protomq.errors import PartialResultError, RequestTimeoutError, TopicNotFoundError
from protomq_cli import groups
from protomq_cli.exits import CliError, ExitCode
from protomq_cli.groups import _offset_row
from protomq_cli.output import OutputFormat

QUEUE = MessageQueue("t", "b", 3)


class FakeAdmin:
    """Brokers a and b, each with some lag in its topics. `silent` ones do not answer when they are asked for it; `asked` says how often."""

    def __init__(self, lags: dict[str, dict[str, int]], *, silent: Iterable[str] = (), names_groups: bool = True) -> None:
        """`lags`: by broker and topic. `names_groups`: whether silent brokers have named their groups before."""
        self.lags = lags
        self.silent = set(silent)
        self.names_groups = names_groups
        self.asked = dict.fromkeys(lags, 0)

    def cluster_info(self) -> list[Any]:
        return [SimpleNamespace(broker_name=name, broker_id=number) for name in self.lags for number in (0, 1)]

    def list_groups(self, topic: str) -> list[Any]:
        assert topic == ""
        silent = set() if self.names_groups else self.silent
        topics = {topic for name, lags in self.lags.items() if name not in silent for topic in lags}
        found = [SimpleNamespace(name=f"g{number}", topics=tuple(sorted(topics))) for number in range(3)]
        return self._whole(found, silent)

    def group_lag(self, group: str, topic: str, *, brokers: list[str] | None = None) -> list[GroupLag]:
        asked = list(self.lags) if brokers is None else brokers
        assert asked
        for name in asked:
            self.asked[name] += 1
        answers = [name for name in asked if name not in self.silent]
        has_topic = [name for name in answers if topic in self.lags[name]]
        if not has_topic and answers == asked:
            raise TopicNotFoundError(f"topic {topic!r} does not exist")
        found = [GroupLag(MessageQueue(topic, name, 0), None, 99, self.lags[name][topic], 0.0) for name in has_topic]
        return self._whole(found, self.silent.intersection(asked))

    def _whole(self, found: list[Any], silent: set[str]) -> list[Any]:
        if silent:
            raise PartialResultError("not all", found, {name: RequestTimeoutError(f"{name}: no answer in time") for name in silent})
        return found


def list_groups(admin: FakeAdmin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "open_admin", lambda *_: nullcontext(admin))
    groups.list_groups(topic=None, namesrv=None, output=OutputFormat.JSONL, timeout=5.0)


def rows(capsys: pytest.CaptureFixture[str]) -> list[tuple[str, str, int]]:
    return [tuple(json.loads(line).values()) for line in capsys.readouterr().out.splitlines()]


def test_the_lag_of_each_group_is_that_of_all_brokers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    list_groups(FakeAdmin({"a": {"t": 2}, "b": {"t": 3, "u": 1}}), monkeypatch)
    assert rows(capsys) == [(f"g{number}", topic, lag) for number in range(3) for topic, lag in (("t", 5), ("u", 1))]


@pytest.mark.parametrize(("names_groups", "count"), [(False, 0), (True, 1)])
def test_a_broker_that_is_silent_costs_the_time_out_once(
    names_groups: bool, count: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    admin = FakeAdmin({"a": {"t": 2}, "b": {"t": 3}}, silent="b", names_groups=names_groups)
    with pytest.raises(CliError, match=r"no answer from b \(b: no answer in time\)") as caught:
        list_groups(admin, monkeypatch)
    assert caught.value.exit_code == ExitCode.PARTIAL
    assert rows(capsys) == [(f"g{number}", "t", 2) for number in range(3)]
    assert admin.asked == {"a": 3, "b": count}


def test_a_topic_that_only_a_silent_broker_has_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CliError) as caught:
        list_groups(FakeAdmin({"a": {"u": 2}, "b": {"t": 3}}, silent="b"), monkeypatch)
    assert caught.value.exit_code == ExitCode.PARTIAL
    assert rows(capsys) == [(f"g{number}", "u", 2) for number in range(3)]


def test_nor_does_one_that_is_deleted_meanwhile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    admin = FakeAdmin({"a": {"t": 2, "u": 1}})
    found = admin.list_groups("")
    monkeypatch.setattr(admin, "list_groups", lambda _: found)
    del admin.lags["a"]["t"]
    list_groups(admin, monkeypatch)
    assert rows(capsys) == [(f"g{number}", "u", 1) for number in range(3)]


@pytest.mark.parametrize(("committed", "lag"), [(None, 20), (0, 20), (12, 18), (30, 0), (35, 0)])
def test_a_row_has_what_its_broker_says(
    committed: int | None, lag: int, capsys: pytest.CaptureFixture[str]
) -> None:
    row = _offset_row("g", GroupLag(QUEUE, committed, 30, lag, 0.0), min_offset=10)
    assert (row["min_offset"], row["committed_offset"], row["end_offset"], row["lag"]) == (10, committed, 30, lag)
    told = capsys.readouterr().err
    assert ("g has committed 35 in queue 3 of t at b, beyond its end 30" in told) == (committed == 35)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a group has a name, this is ''"),
        ("%DLQ%g", "%DLQ%g is a topic of a group: name the group, g"),
        ("%RETRY%g", "%RETRY%g is a topic of a group: name the group, g"),
        ("\u0433\u0440", "cannot be the name of a group: only A-Z"),
    ],
)
def test_what_cannot_be_the_name_of_a_group_is_refused_before_all_else(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        groups.parse_group(text)


def test_a_group_is_named() -> None:
    assert groups.parse_group("orders_1-a") == "orders_1-a"
