"""`cluster spread`, `cluster namesrv`, `ha wait`: what they decide, without servers."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from protomq import KnownMember, LeadershipStatus, Permission, TopicConfig, TopicType
from protomq.errors import (
    PartialResultError,
    ProtomqError,
    RequestTimeoutError,
    TopicExistsError,
    TopicNotFoundError,
)
from protomq_cli import in_sync
from protomq_cli.agreeing import is_agreed, wait_until_agreed
from protomq_cli.exits import CliError, ExitCode
from protomq_cli.in_sync import judged, wait_until
from protomq_cli.output import OutputFormat
from protomq_cli.spreading import spread_to, wanted_topics


def topic(name: str, queues: int = 8, permission: Permission = Permission.READ_WRITE) -> TopicConfig:
    return TopicConfig(name, queues, queues, permission, incarnation=1, type=TopicType.NORMAL)


def test_a_topic_is_wanted_as_it_is_where_it_has_most_queues() -> None:
    topics = {"a": [topic("t", 2), topic("u")], "b": [topic("t", 4)], "new": [topic("own"), topic("t", 16)]}
    assert wanted_topics(topics, "new") == {"t": topic("t", 4), "u": topic("u")}


def test_a_topic_that_one_broker_has_closed_is_open() -> None:
    drained = topic("t", 8, Permission.READ)
    assert wanted_topics({"a": [drained], "b": [topic("t", 2)], "new": []}, "new") == {"t": topic("t", 2)}
    assert wanted_topics({"a": [drained], "new": []}, "new") == {"t": drained}


def test_a_topic_of_a_broker_that_is_drained_is_as_it_was_before_that() -> None:
    """Nobody else has it: else nobody would take its messages when that broker is gone."""
    drained = replace(topic("t", 8, Permission.READ), closed_from=Permission.READ_WRITE)
    write_only = replace(topic("u", 8, Permission.NONE), closed_from=Permission.WRITE)
    wanted = wanted_topics({"a": [drained, write_only], "new": []}, "new")
    assert wanted == {"t": topic("t"), "u": topic("u", 8, Permission.WRITE)}


class FakeAdmin:
    """a has topic t and a group, c is new, and b does not answer: it has u, says the name server."""

    def __init__(self) -> None:
        self.error: ProtomqError = RequestTimeoutError("no answer in time")
        self.done: list[tuple[str, ...]] = []

    def _partly(self, result: Any) -> Any:
        raise PartialResultError("not all", result, {"b": self.error})

    def list_topics(self) -> Any:
        return self._partly({"a": [topic("t", 2)], "c": []})

    def list_filters(self) -> Any:
        return self._partly({"a": [], "c": []})

    def list_groups(self) -> Any:
        return self._partly([SimpleNamespace(name="g", topics=("t",))])

    def list_group_settings(self) -> Any:
        return self._partly(["g"])

    def get_group(self, group: str) -> Any:
        return self._partly(SimpleNamespace(orderly=True))

    def set_group(self, group: str, *, orderly: bool) -> Any:
        assert orderly, "as it is"
        self.done.append(("set", group))
        return self._partly(None)

    def group_lag(self, group: str, name: str, *, brokers: list[str]) -> list[Any]:
        return []

    def reset_offsets(self, group: str, name: str, place: str, *, brokers: list[str]) -> None:
        self.done.append(("reset", group, name, *brokers))

    def create_topic(
        self, name: str, *, brokers: list[str], update: bool, only_if: TopicConfig | None, **settings: Any
    ) -> dict[str, TopicConfig]:
        assert only_if == (topic(name, 2) if update else None), "what somebody changes meanwhile stays changed"
        self.done.append(("create", name, *brokers))
        return {brokers[0]: topic(name, 2)}


def brokers_of(name: str) -> set[str]:
    return {"t": {"a"}, "u": {"b"}}[name]


def test_a_topic_is_spread_though_a_broker_is_away_that_does_not_have_it() -> None:
    admin = FakeAdmin()
    ((config, begun, is_new),) = spread_to(admin, "c", ["t"], brokers_of)  # type: ignore[arg-type]
    assert (config, begun, is_new) == (topic("t", 2), ["g"], True)
    assert admin.done == [("set", "g"), ("create", "t", "c"), ("reset", "g", "t", "c"), ("create", "t", "c")]


@pytest.mark.parametrize("error", [TopicExistsError("changed; set update"), TopicNotFoundError("gone")])
@pytest.mark.parametrize("is_update", [False, True])
def test_who_changes_a_topic_beside_a_spread_is_not_told_to_force_it(error: ProtomqError, is_update: bool) -> None:
    class Changed(FakeAdmin):
        def create_topic(self, name: str, *, update: bool, **settings: Any) -> dict[str, TopicConfig]:
            if update == is_update:
                raise error
            return super().create_topic(name, update=update, **settings)

    with pytest.raises(CliError, match="somebody has changed or deleted topic t of c meanwhile; run it again") as caught:
        spread_to(Changed(), "c", ["t"], brokers_of)  # type: ignore[arg-type]
    assert caught.value.exit_code is ExitCode.REFUSED


@pytest.mark.parametrize("names", [None, ["u"], ["t", "u"]])
def test_nothing_is_changed_while_a_broker_is_away_that_has_what_is_to_be_spread(names: list[str] | None) -> None:
    admin = FakeAdmin()
    with pytest.raises(CliError, match=r"b does not answer \(no answer in time\), .*no topic was changed") as caught:
        spread_to(admin, "c", names, brokers_of)  # type: ignore[arg-type]
    assert (caught.value.exit_code, caught.value.reason) == (ExitCode.UNREACHABLE, "BROKER_MISSING")
    assert admin.done == []


def test_the_new_broker_itself_has_to_answer() -> None:
    with pytest.raises(RequestTimeoutError):
        spread_to(FakeAdmin(), "b", ["t"], brokers_of)  # type: ignore[arg-type]


def row(**changes: Any) -> dict[str, Any]:
    return {"name_server": "h:1", "brokers": 2, "lacks": [], "problem": ""} | changes


def test_name_servers_agree_when_each_answers_and_lacks_nothing() -> None:
    assert is_agreed([row(), row()])
    assert not is_agreed([row(), row(lacks=["a/0"])])
    assert not is_agreed([row(problem="no answer"), row()])


def test_the_wait_ends_when_they_agree_or_the_time_is_over() -> None:
    looks = iter([[row(lacks=["a/0"])], [row()]])
    times = iter(range(100))
    assert wait_until_agreed(lambda: next(looks), None, lambda: next(times), lambda _: None) == [row()]
    apart = [row(lacks=["a/0"])]
    assert wait_until_agreed(lambda: apart, 3, lambda: next(times), lambda _: None) == apart


def state(broker_id: int, in_sync_count: int = 0, leadership: LeadershipStatus | None = None) -> Any:
    return SimpleNamespace(broker_id=broker_id, in_sync_count=in_sync_count, leadership=leadership)


def test_copies_are_those_of_who_leads() -> None:
    assert judged([state(1), state(2)], 1) == (None, "nobody leads")
    assert judged([state(1), state(0, 2)], 3) == (state(0, 2), "2 of 3 copies in sync")
    assert judged([state(0, 3)], 3) == (state(0, 3), "")


LEADS = LeadershipStatus("m1", "LEADING", 3, "m1", ("m1", "m2", "m3"), (), 1, (KnownMember("m2", 2, "h:2"),))


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({"late": ("m2",)}, "broker_id 2 at h:2 is in the in-sync set, and does not keep up: sends wait for it"),
        ({"late": ("m3",)}, "store m3 is in the in-sync set, and does not keep up: sends wait for it"),
        ({"etcd_problem": "etcd is full"}, "etcd is full"),
    ],
)
def test_copies_that_sends_wait_for_and_an_etcd_that_is_away_let_nobody_stop_the_next_one(changes: dict[str, Any], left: str) -> None:
    """Though more are in sync than are asked for."""
    assert judged([state(0, 3, LEADS)], 2)[1] == ""
    assert judged([state(0, 3, replace(LEADS, **changes))], 2)[1] == left


def master(in_sync_count: int) -> Any:
    return SimpleNamespace(broker_id=0, in_sync_count=in_sync_count, lag_bytes=0, leadership=None)


def waited(monkeypatch: pytest.MonkeyPatch, *looks: Any) -> None:
    """`ha wait pair --copies 2`, where an Admin finds this; one that remembers who was silent finds the first for ever."""
    left = list(looks)

    def open_admin(namesrv: str | None, timeout_s: float, silence_s: float = 60.0) -> Any:
        def ha_status(broker: str) -> Any:
            found = left[0] if silence_s or len(left) == 1 else left.pop(0)
            if isinstance(found, ProtomqError):
                raise found
            return found

        return nullcontext(SimpleNamespace(ha_status=ha_status))

    monkeypatch.setattr(in_sync, "open_admin", open_admin)
    monkeypatch.setattr(in_sync, "LOOK_INTERVAL_S", 0.0)
    in_sync.wait_in_sync("pair", 2, wait=1.0, output=OutputFormat.JSONL)


def silent(*answering: Any) -> PartialResultError:
    return PartialResultError("some brokers did not answer: pair/2: silent", list(answering))


def test_a_silent_slave_keeps_nobody_waiting_who_needs_fewer_copies(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited(monkeypatch, silent(state(1), master(2)))
    assert json.loads(capsys.readouterr().out) == {"broker": "pair", "in_sync": 2, "lag_bytes": 0}
    with pytest.raises(CliError, match="1 of 2 copies in sync; some brokers did not answer: pair/2"):
        waited(monkeypatch, silent(state(1), master(1)))


def test_a_master_that_was_silent_at_one_look_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited(monkeypatch, RequestTimeoutError("silent"), silent(), [master(2)])
    assert json.loads(capsys.readouterr().out)["in_sync"] == 2


def test_the_wait_says_what_is_left_once() -> None:
    looks = iter([(None, "nobody leads"), (None, "nobody leads"), (state(0, 2), "")])
    said: list[str] = []
    assert wait_until(lambda: next(looks), None, said.append, lambda: 0, lambda _: None) == (state(0, 2), "")
    assert said == ["nobody leads"]
    assert wait_until(lambda: (None, "nobody leads"), 0, said.append, lambda: 0, lambda _: None) == (None, "nobody leads")
