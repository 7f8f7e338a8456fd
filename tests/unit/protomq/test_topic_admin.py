"""Which brokers a topic is made at first, and whether anybody has to be asked for that."""

from __future__ import annotations

from typing import Any

import pytest

from protomq import Admin, BrokerInfo, Permission
from protomq.errors import TopicNotFoundError
from protomq.v1 import admin_service_pb2 as pb


def broker(name: str, number: int) -> BrokerInfo:
    return BrokerInfo("c", name, number, f"{name}{number}:8081", f"{name}{number}:10911", "", 7, Permission.READ_WRITE)


@pytest.mark.parametrize(("names", "looked_up"), [("a", []), ("ab", ["t"])])
def test_who_has_a_topic_is_looked_up_only_where_several_masters_are_asked(
    names: str, looked_up: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def look_up(topic: str, _: float) -> Any:
        asked.append(topic)
        raise TopicNotFoundError(f"no topic {topic!r}")

    with Admin(namesrv="nobody:1") as admin:
        monkeypatch.setattr(admin, "_cluster", lambda *_: ([broker(name, number) for name in names for number in (0, 1)], []))
        monkeypatch.setattr(admin, "_call", lambda _address, _method, request, _: pb.CreateTopicResponse(topic=request.topic))
        monkeypatch.setattr(admin._routes, "get", look_up)
        assert sorted(admin.create_topic("t", write_queues=2)) == list(names)
    assert asked == looked_up
