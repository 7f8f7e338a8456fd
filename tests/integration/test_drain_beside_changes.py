"""Somebody changes a topic beside `cluster drain`, its `--undo` and `cluster spread`: what was changed stays changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from protomq import Admin, Permission, TopicConfig
from protomq.errors import TopicNotFoundError
from protomq.testing import Broker
from protomq_cli.draining import close, reopen, still_open


class Beside(Admin):
    """Looks at topics; and then, before it changes any, somebody else does."""

    def __init__(self, namesrv: str) -> None:
        super().__init__(namesrv=namesrv)
        self.other = Admin(namesrv=namesrv)
        self.meanwhile: list[Callable[[Admin], Any]] = []

    def list_topics(self, broker_name: str | None = None, *, group_topics: bool = False) -> dict[str, list[TopicConfig]]:
        found = super().list_topics(broker_name, group_topics=group_topics)
        if self.meanwhile:
            self.meanwhile.pop(0)(self.other)
        return found


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker() as broker:
        yield broker


@pytest.fixture
def admin(broker: Broker) -> Iterator[Beside]:
    with Beside(broker.namesrv) as admin, admin.other:
        yield admin
        for name in ("grown", "gone", "other"):
            with suppress(TopicNotFoundError):
                admin.other.delete_topic(name)


def broker_of(admin: Admin) -> str:
    (name,) = {one.broker_name for one in admin.cluster_info()}
    return name


def queues(admin: Admin, topic: str) -> tuple[int, int, Permission]:
    (config,) = admin.describe_topic(topic).configs.values()
    return config.write_queues, config.read_queues, config.permission


@pytest.mark.parametrize("grown", [(4, 8), (8, 8)])
def test_queues_that_a_topic_gets_beside_a_drain_stay(admin: Beside, grown: tuple[int, int]) -> None:
    name = broker_of(admin)
    admin.create_topic("grown", write_queues=4)
    admin.create_topic("other", write_queues=4)
    admin.meanwhile.append(lambda other: other.create_topic("grown", write_queues=grown[0], read_queues=grown[1], update=True))
    known = set[Any]()
    close(admin, name, known)
    close(admin, name, known)
    assert queues(admin, "grown") == (*grown, Permission.READ)
    assert queues(admin, "other") == (4, 4, Permission.READ)
    assert still_open(admin, name, known) == ()


def test_queues_that_a_topic_gets_beside_an_undo_stay(admin: Beside) -> None:
    name = broker_of(admin)
    admin.create_topic("grown", write_queues=4)
    close(admin, name, set())
    admin.meanwhile.append(
        lambda other: other.create_topic(
            "grown", write_queues=4, read_queues=8, permission=Permission.READ, closed_from=Permission.READ_WRITE, update=True
        )
    )
    assert reopen(admin, name) == 1
    assert queues(admin, "grown") == (4, 8, Permission.READ_WRITE)


def test_a_topic_that_is_deleted_beside_a_drain_does_not_come_back(admin: Beside) -> None:
    name = broker_of(admin)
    admin.create_topic("gone", write_queues=4)
    admin.meanwhile.append(lambda other: other.delete_topic("gone"))
    close(admin, name, set())
    with pytest.raises(TopicNotFoundError):
        admin.describe_topic("gone")
    admin.create_topic("gone", write_queues=4)
    close(admin, name, set())
    admin.meanwhile.append(lambda other: other.delete_topic("gone"))
    assert reopen(admin, name) == 0
    with pytest.raises(TopicNotFoundError):
        admin.describe_topic("gone")


def test_a_topic_that_is_closed_for_good_beside_a_drain_is_not_opened_by_undo(admin: Beside) -> None:
    name = broker_of(admin)
    admin.create_topic("grown", write_queues=4)
    admin.meanwhile.append(lambda other: other.create_topic("grown", write_queues=4, permission=Permission.READ, update=True))
    close(admin, name, set())
    assert reopen(admin, name) == 0
    assert queues(admin, "grown") == (4, 4, Permission.READ)
