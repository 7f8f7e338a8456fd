"""`cluster spread`, `cluster namesrv`, `ha wait`: what they decide, without servers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from protomq import Permission, TopicConfig, TopicType
from protomq_cli.agreeing import is_agreed, wait_until_agreed
from protomq_cli.in_sync import judged, wait_until
from protomq_cli.spreading import wanted_topics


def topic(name: str, queues: int = 8, permission: Permission = Permission.READ_WRITE) -> TopicConfig:
    return TopicConfig(name, queues, queues, permission, incarnation=1, type=TopicType.NORMAL)


def test_a_topic_is_wanted_as_it_is_where_it_has_most_queues() -> None:
    topics = {"a": [topic("t", 2), topic("u")], "b": [topic("t", 4)], "new": [topic("own"), topic("t", 16)]}
    assert wanted_topics(topics, "new") == {"t": topic("t", 4), "u": topic("u")}


def test_a_topic_that_one_broker_has_closed_is_open() -> None:
    drained = topic("t", 8, Permission.READ)
    assert wanted_topics({"a": [drained], "b": [topic("t", 2)], "new": []}, "new") == {"t": topic("t", 2)}
    assert wanted_topics({"a": [drained], "new": []}, "new") == {"t": drained}


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


def state(broker_id: int, in_sync_count: int = 0) -> Any:
    return SimpleNamespace(broker_id=broker_id, in_sync_count=in_sync_count)


def test_copies_are_those_of_who_leads() -> None:
    assert judged([state(1), state(2)], 1) == (None, "nobody leads")
    assert judged([state(1), state(0, 2)], 3) == (state(0, 2), "2 of 3 copies in sync")
    assert judged([state(0, 3)], 3) == (state(0, 3), "")


def test_the_wait_says_what_is_left_once() -> None:
    looks = iter([(None, "nobody leads"), (None, "nobody leads"), (state(0, 2), "")])
    said: list[str] = []
    assert wait_until(lambda: next(looks), None, said.append, lambda: 0, lambda _: None) == (state(0, 2), "")
    assert said == ["nobody leads"]
    assert wait_until(lambda: (None, "nobody leads"), 0, said.append, lambda: 0, lambda _: None) == (None, "nobody leads")
