"""`cluster drain`: what it closes, what it waits for, what `--undo` opens."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from protomq import Permission
from protomq.errors import (
    BrokerMissingError,
    ConnectFailedError,
    GroupNotFoundError,
    InvalidArgumentError,
    NotMasterError,
    PartialResultError,
    ProtomqError,
    RequestTimeoutError,
    TopicNotFoundError,
)
from protomq_cli import draining
from protomq_cli.draining import Rest, close, reopen, rest_of, wait_until_drained
from protomq_cli.exits import CliError
from protomq_cli.output import OutputFormat
from protomq_cli.partial import Missing


class FakeAdmin:
    """Two brokers, a and b, and what was asked of them."""

    def __init__(self, **permissions: dict[str, Permission]) -> None:
        """`permissions`: of each broker's topics."""
        self.permissions = permissions
        self.closed_from: dict[tuple[str, str], Permission] = {}
        self.incarnations: dict[str, int] = {}
        self.lags: dict[tuple[str, str], int] = {}
        self.transactions: list[str] = []
        self.replica_lag_bytes = 0
        self.delayed_messages = [0]
        self.unread: dict[str, int] = {}
        self.letters: dict[str, tuple[int, int]] = {}
        self.meanwhile: list[Callable[[], None]] = []
        self.away: list[str] = []
        self.silent: list[str] = []

    def cluster_info(self) -> list[Any]:
        return [SimpleNamespace(broker_name=name, broker_id=0) for name in self.permissions]

    def list_topics(
        self, broker: str | None = None, *, group_topics: bool = False
    ) -> dict[str, list[Any]]:
        assert broker is not None, "others may be missing"
        return {
            name: [
                SimpleNamespace(
                    name=topic,
                    incarnation=self.incarnations.get(topic, 1),
                    permission=permission,
                    write_queues=4,
                    read_queues=6,
                    closed_from=self.closed_from.get((name, topic), Permission.UNSPECIFIED),
                )
                for topic, permission in topics.items()
                if group_topics or not topic.startswith("%")
            ]
            for name, topics in self.permissions.items()
            if broker in (None, name)
        }

    def create_topic(
        self,
        topic: str,
        *,
        brokers: list[str],
        permission: Permission,
        closed_from: Permission,
        only_if: Any,
        **settings: Any,
    ) -> None:
        assert topic != "TRANS_CHECK_MAX_TIME_TOPIC", "only the broker creates and writes it"
        assert settings == {"write_queues": 4, "read_queues": 6, "update": True}
        for broker in brokers:
            assert (only_if.name, only_if.permission) == (topic, self.permissions[broker][topic]), "as it was seen"
            self.permissions[broker][topic] = permission
            self.closed_from[broker, topic] = closed_from

    def list_groups(self) -> list[Any]:
        groups = {group for group, _ in self.lags}
        found = [
            SimpleNamespace(name=group, topics=tuple(t for g, t in self.lags if g == group))
            for group in sorted(groups)
        ]
        if self.away:
            raise PartialResultError("not all", found, {name: BrokerMissingError(f"{name} is gone") for name in self.away})
        return found

    def group_lag(self, group: str, topic: str, *, brokers: list[str]) -> list[Any]:
        assert brokers == ["a"]
        if self.lags[group, topic] < 0:
            raise GroupNotFoundError("no such group")
        return [SimpleNamespace(lag=self.lags[group, topic]), SimpleNamespace(lag=0)]

    def describe_topic(self, topic: str, *, brokers: list[str]) -> Any:
        assert brokers == ["a"]
        if topic not in self.permissions["a"]:
            raise TopicNotFoundError("no such topic")
        return SimpleNamespace(message_count=self.unread.get(topic, 0))

    def list_dead_letters(self, *, brokers: list[str]) -> list[Any]:
        assert brokers == ["a"]
        return [
            SimpleNamespace(group=group, message_count=count, replayed_count=replayed)
            for group, (count, replayed) in self.letters.items()
        ]

    def list_transactions(self, *, brokers: list[str]) -> list[str]:
        assert brokers == ["a"]
        if self.meanwhile:
            self.meanwhile.pop(0)()
        return self.transactions

    def broker_status(self, broker: str) -> list[Any]:
        assert broker == "a"
        known = self.delayed_messages
        count = known.pop(0) if len(known) > 1 else known[0]
        return [SimpleNamespace(delayed_messages=count)]

    def ha_status(self, broker: str) -> list[Any]:
        found = [SimpleNamespace(broker_id=1, lag_bytes=99)]
        if broker not in self.silent:
            found.insert(0, SimpleNamespace(broker_id=0, lag_bytes=self.replica_lag_bytes))
        if self.silent:
            raise PartialResultError("not all", found, {name: RequestTimeoutError(f"{name} is silent") for name in self.silent})
        return found


R, W, RW, NONE = Permission.READ, Permission.WRITE, Permission.READ_WRITE, Permission.NONE


def test_all_topics_of_the_broker_are_closed_and_those_of_others_are_not() -> None:
    admin: Any = FakeAdmin(a={"t": RW, "w": W, "r": R, "%RETRY%g": RW}, b={"t": RW})
    known: set[draining.Closed] = set()
    assert close(admin, "a", known) == 3
    assert known == {("t", 1), ("w", 1), ("r", 1)}
    assert admin.permissions == {"a": {"t": R, "w": NONE, "r": R, "%RETRY%g": RW}, "b": {"t": RW}}


def test_undo_gives_each_topic_the_permission_of_before() -> None:
    before = {"t": RW, "w": W, "archive": R, "none": NONE, "TRANS_CHECK_MAX_TIME_TOPIC": R}
    admin: Any = FakeAdmin(a=dict(before), b={"t": RW, "archive": RW})
    for _ in range(2):
        close(admin, "a", set())
    assert admin.permissions["a"] == before | {"t": R, "w": NONE}
    admin.permissions["a"]["later"] = RW
    assert reopen(admin, "a") == 2
    assert admin.permissions == {"a": {**before, "later": RW}, "b": {"t": RW, "archive": RW}}
    assert reopen(admin, "a") == 0


def test_undo_does_not_wait_and_says_so() -> None:
    with pytest.raises(typer.BadParameter, match="--undo does not wait: leave --wait out"):
        draining.drain("a", undo=True, wait=5.0, namesrv="127.0.0.1:1")


def test_what_is_left_is_what_groups_have_not_consumed_there_and_what_the_slave_lacks() -> None:
    admin: Any = FakeAdmin(a={"t": R, "u": R, "%RETRY%g": RW}, b={"elsewhere": RW})
    assert rest_of(admin, "a", Missing()).is_nothing
    admin.lags = {
        ("g", "t"): 3,
        ("g", "%RETRY%g"): 2,
        ("g", "elsewhere"): 50,
        ("h", "u"): 0,
        ("i", "t"): -1,
    }
    assert rest_of(admin, "a", Missing()) == Rest({"g": 5})
    admin.transactions, admin.replica_lag_bytes = ["half"], 7
    assert str(rest_of(admin, "a", Missing())) == "g: 5 messages, 1 open transactions, its slave lacks 7 bytes"


def test_what_nobody_has_read_keeps_the_broker() -> None:
    admin: Any = FakeAdmin(a={"t": R, "new": R, "TRANS_CHECK_MAX_TIME_TOPIC": R, "RMQ_SYS_TRACE_TOPIC": R})
    admin.lags = {("g", "t"): 0}
    admin.unread = {"t": 9, "new": 3, "TRANS_CHECK_MAX_TIME_TOPIC": 1, "RMQ_SYS_TRACE_TOPIC": 50}
    rest = rest_of(admin, "a", Missing())
    assert rest == Rest(unread={"new": 3, "TRANS_CHECK_MAX_TIME_TOPIC": 1})
    assert str(rest) == "TRANS_CHECK_MAX_TIME_TOPIC: 1 messages that no group has read, new: 3 messages that no group has read"


def test_dead_letters_keep_the_broker_until_they_are_replayed_or_read() -> None:
    admin: Any = FakeAdmin(a={"t": R, "%DLQ%g": R, "%DLQ%h": R})
    admin.lags = {("g", "t"): 0}
    admin.letters = {"g": (40, 10), "h": (5, 5)}
    assert rest_of(admin, "a", Missing()) == Rest(unread={"%DLQ%g": 30})
    admin.lags["reader", "%DLQ%g"] = 2
    assert rest_of(admin, "a", Missing()) == Rest({"reader": 2})
    admin.lags["reader", "%DLQ%g"] = 0
    assert rest_of(admin, "a", Missing()).is_nothing


@pytest.mark.parametrize("counts", [[2], [2, 0], [0, 2]], ids=["waits", "fell due", "sent back"])
def test_a_message_that_waits_for_its_time_keeps_the_broker(counts: list[int]) -> None:
    admin: Any = FakeAdmin(a={"t": R, "%RETRY%g": RW})
    admin.delayed_messages = counts
    rest = rest_of(admin, "a", Missing())
    assert rest == Rest(delayed_messages=2)
    assert not rest.is_nothing
    assert str(rest) == "2 messages wait for their time"


def test_the_table_says_what_is_left_each_in_its_column() -> None:
    rest = Rest({"b": 3, "a": 4}, 5, 6, replica_lag_bytes=7, unread={"t": 11}, silent_slaves=("x/1",))
    assert draining._row("x", 2, rest) == {
        "broker": "x",
        "closed_topics": 2,
        "messages": 18,
        "groups_behind": ["a", "b"],
        "unread_topics": ["t"],
        "open_transactions": 5,
        "delayed_messages": 6,
        "replica_lag_bytes": 7,
        "silent_slaves": ["x/1"],
        "may_be_removed": False,
    }
    assert draining._row("x", 2, rest).keys() == set(draining._COLUMNS)


def test_a_topic_that_is_created_while_it_waits_is_closed_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    admin: Any = FakeAdmin(a={"t": RW})
    admin.transactions = ["half"]
    admin.meanwhile = [lambda: admin.permissions["a"].update(new=RW), admin.transactions.clear]
    monkeypatch.setattr(draining, "open_admin", lambda *_: nullcontext(admin))
    monkeypatch.setattr(draining, "LOOK_INTERVAL_S", 0.0)
    draining.drain("a", output=OutputFormat.JSONL)
    assert admin.permissions == {"a": {"t": R, "new": R}}
    assert json.loads(capsys.readouterr().out)["closed_topics"] == 2


@pytest.mark.parametrize("looks_before", [0, 1], ids=["at the end", "in between"])
def test_a_topic_that_is_opened_again_beside_a_drain_ends_it(looks_before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may remove the broker then. The drain does not close it again: whoever opened it was told that it is open."""
    admin: Any = FakeAdmin(a={"t": RW, "u": RW})
    admin.transactions = ["half"] * looks_before
    admin.meanwhile = [lambda: reopen(admin, "a") and admin.transactions.clear()]
    monkeypatch.setattr(draining, "open_admin", lambda *_: nullcontext(admin))
    monkeypatch.setattr(draining, "LOOK_INTERVAL_S", 0.0)
    with pytest.raises(CliError, match="t, u at a was closed, and somebody has opened it meanwhile") as caught:
        draining.drain("a", output=OutputFormat.JSONL)
    assert (caught.value.exit_code, caught.value.reason) == (6, "OPENED_AGAIN")
    assert admin.permissions == {"a": {"t": RW, "u": RW}}


def test_a_topic_that_is_made_while_it_looks_for_the_last_time_is_closed_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one of a name that was closed, and deleted."""
    admin: Any = FakeAdmin(a={"t": RW})

    def make() -> None:
        admin.permissions["a"].update(t=RW, new=RW)
        admin.incarnations["t"] = 2

    admin.meanwhile = [make]
    monkeypatch.setattr(draining, "open_admin", lambda *_: nullcontext(admin))
    monkeypatch.setattr(draining, "LOOK_INTERVAL_S", 0.0)
    draining.drain("a", output=OutputFormat.JSONL)
    assert admin.permissions == {"a": {"t": R, "new": R}}
    told = capsys.readouterr()
    assert told.err.splitlines()[0] == "a: topic t was made meanwhile, topic new was made meanwhile"
    assert json.loads(told.out)["closed_topics"] == 2


@pytest.mark.parametrize(("wait_s", "looks"), [(None, 4), (2.0, 3), (0.0, 1)])
def test_it_looks_until_nothing_is_left_or_the_time_is_over(
    wait_s: float | None, looks: int
) -> None:
    rests = [Rest({"g": 5}), Rest({"g": 5}), Rest(open_transactions=1), Rest()]
    said: list[str] = []
    now, looked = 0.0, 0

    def look() -> Rest:
        nonlocal looked
        looked += 1
        return rests[looked - 1]

    def pause(seconds: float) -> None:
        nonlocal now
        now += seconds

    rest = wait_until_drained(look, wait_s, said.append, lambda: now, pause)
    assert looked == looks
    assert rest == rests[looks - 1]
    assert (
        said == ["g: 5 messages", "1 open transactions"][: max(0, min(looks - 1, 2))]
        if wait_s is None
        else True
    )
    assert len(said) == len(set(said)), "said once"


def drained_by(*looks: Rest | ProtomqError, wait_s: float | None = None, is_known: bool = False) -> tuple[Rest, list[str]]:
    """What is left behind these looks, one after the other, and what was said."""
    left, now = list(looks), 0.0
    said: list[str] = []

    def look() -> Rest:
        found = left.pop(0)
        if isinstance(found, ProtomqError):
            raise found
        return found

    def pause(seconds: float) -> None:
        nonlocal now
        now += seconds

    return wait_until_drained(look, wait_s, said.append, lambda: now, pause, is_known=is_known), said


AWAY = ConnectFailedError("connection refused")


def test_a_broker_that_is_away_while_it_is_drained_is_asked_again() -> None:
    rest, said = drained_by(Rest({"g": 5}), AWAY, NotMasterError("a slave"), AWAY, Rest({"g": 1}), Rest())
    assert rest.is_nothing
    assert [text.split(":")[0] for text in said] == ["g", *["asked again, since it did not answer"] * 3, "g"]


@pytest.mark.parametrize(
    ("looks", "wait_s"),
    [([AWAY], None), ([Rest({"g": 5}), AWAY, AWAY, AWAY], 2.0), ([Rest({"g": 5}), InvalidArgumentError("no such call")], None)],
    ids=["nobody knows the name", "the time is over", "it would answer the same again"],
)
def test_a_broker_that_does_not_answer_is_an_error_in_the_end(looks: list[Rest | ProtomqError], wait_s: float | None) -> None:
    with pytest.raises((ConnectFailedError, InvalidArgumentError)):
        drained_by(*looks, wait_s=wait_s)


def test_a_broker_that_is_away_when_it_begins_is_asked_again_if_a_name_server_knows_it() -> None:
    rest, said = drained_by(AWAY, NotMasterError("a slave"), Rest(), is_known=True)
    assert rest.is_nothing
    assert [text.split(":")[0] for text in said] == ["asked again, since it did not answer"] * 2
    with pytest.raises(ConnectFailedError):
        drained_by(AWAY, AWAY, AWAY, is_known=True, wait_s=2.0)


@pytest.mark.parametrize("name", ["a", "typo"])
def test_who_knows_the_name_is_asked_when_it_begins(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remembering, asking = FakeAdmin(a={"t": RW}), FakeAdmin(a={"t": R})
    admins(monkeypatch, remembering, asking)
    monkeypatch.setattr(draining, "LOOK_INTERVAL_S", 0.0)

    def fail(broker: str) -> Any:
        raise AWAY

    monkeypatch.setattr(remembering, "list_topics", fail)
    with nullcontext() if name == "a" else pytest.raises(ConnectFailedError):
        draining.drain(name, output=OutputFormat.JSONL)


def test_a_slave_that_is_silent_is_waited_for_and_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What it lacks is not known. The master says the rest: so the looks begin and go on."""
    remembering, asking = FakeAdmin(a={"t": RW}), FakeAdmin(a={"t": R})
    remembering.silent, asking.silent = ["a/2"], ["a/2"]
    admins(monkeypatch, remembering, asking)
    monkeypatch.setattr(draining, "LOOK_INTERVAL_S", 0.0)
    with pytest.raises(CliError, match="a is not empty: its slave a/2 does not answer; run it again") as caught:
        draining.drain("a", wait=0.0, output=OutputFormat.JSONL)
    assert caught.value.reason == "NOT_DRAINED"
    assert json.loads(capsys.readouterr().out)["silent_slaves"] == ["a/2"]
    # It answers again: who remembers that it was silent is not asked.
    asking.meanwhile = [lambda: None, asking.silent.clear]
    draining.drain("a", output=OutputFormat.JSONL)
    told = capsys.readouterr()
    assert json.loads(told.out)["may_be_removed"] is True
    assert told.err.splitlines()[0] == "a: its slave a/2 does not answer"


def test_a_master_that_is_silent_tells_no_lag() -> None:
    admin: Any = FakeAdmin(a={"t": R})
    admin.silent = ["a", "a/2"]
    with pytest.raises(RequestTimeoutError, match="a is silent"):
        rest_of(admin, "a", Missing())


def test_behind_a_failure_those_are_asked_again_that_were_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    remembering, asking = FakeAdmin(a={"t": RW}), FakeAdmin(a={"t": R})
    remembering.transactions = ["half"]
    admins(monkeypatch, remembering, asking)
    monkeypatch.setattr(draining, "LOOK_INTERVAL_S", 0.0)

    def fail() -> None:
        raise AWAY

    remembering.meanwhile = [lambda: None, fail]
    draining.drain("a", output=OutputFormat.JSONL)
    assert remembering.meanwhile == []


def test_another_broker_that_is_away_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    admin: Any = FakeAdmin(a={"t": RW})
    admin.away = ["c"]
    monkeypatch.setattr(draining, "open_admin", lambda *_: nullcontext(admin))
    draining.drain("a", output=OutputFormat.JSONL)
    told = capsys.readouterr()
    assert json.loads(told.out)["may_be_removed"] is True
    assert "c was not asked which groups it knows: c is gone" in told.err


def admins(monkeypatch: pytest.MonkeyPatch, remembering: FakeAdmin, asking: FakeAdmin) -> None:
    """`remembering`: what an Admin says that does not ask silent brokers again; `asking`: what one says that does."""

    def open_admin(namesrv: str | None, timeout_s: float, silence_s: float = 60.0) -> Any:
        return nullcontext(remembering if silence_s else asking)

    monkeypatch.setattr(draining, "open_admin", open_admin)


def test_a_broker_that_is_back_by_now_is_no_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    remembering, asking = FakeAdmin(a={"t": RW}), FakeAdmin(a={"t": R})
    remembering.away = ["c"]
    admins(monkeypatch, remembering, asking)
    draining.drain("a", output=OutputFormat.JSONL)
    assert "was not asked" not in capsys.readouterr().err


def test_what_a_broker_knows_that_is_back_by_now_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    remembering, asking = FakeAdmin(a={"t": RW}), FakeAdmin(a={"t": R})
    remembering.away = ["c"]
    asking.lags["known-at-c", "t"] = 3
    admins(monkeypatch, remembering, asking)
    with pytest.raises(CliError, match="known-at-c: 3 messages"):
        draining.drain("a", wait=0.0, output=OutputFormat.JSONL)
    assert "was not asked" not in capsys.readouterr().err


def test_the_broker_itself_must_say_which_groups_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    admin: Any = FakeAdmin(a={"t": RW})
    admin.away = ["c", "a"]
    monkeypatch.setattr(draining, "open_admin", lambda *_: nullcontext(admin))
    with pytest.raises(BrokerMissingError, match="a is gone"):
        draining.drain("a", wait=0.0, output=OutputFormat.JSONL)
