"""`topic create` looks who has the topic before it creates it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from protomq.errors import NoRouteError
from protomq_cli import topics


class Silent:
    """Calls of which no name server answers."""

    timeout_s = 0.0

    def find_route(self, topic: str) -> None:
        raise NoRouteError(f"no name server answers about {topic}")


def test_name_servers_that_do_not_answer_are_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    @contextmanager
    def calls(*_: Any) -> Iterator[Silent]:
        asked.append("calls")
        yield Silent()

    @contextmanager
    def admin(*_: Any) -> Iterator[None]:
        asked.append("admin")
        yield None

    monkeypatch.setattr(topics, "open_calls", calls)
    monkeypatch.setattr(topics, "open_admin", admin)
    with pytest.raises(NoRouteError):
        topics.create("t", namesrv=None, timeout=1.0)
    assert asked == ["calls"]
