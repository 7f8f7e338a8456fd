"""Fixtures for pytest; loaded by itself wherever protomq is installed, so it imports next to nothing before it is used.

- `protomq_server` (session): a running Broker; with pytest-xdist one for each worker.
- `protomq_topic` (function): the name of a new topic with 8 queues that no other test uses.
- `protomq_producer` (function): a Producer for that server, closed after the test.
- `protomq_group` (function): makes a FakeGroup of a consumer, which needs no server.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from protomq import Producer
    from protomq.testing import Broker, FakeGroup


@pytest.fixture(scope="session")
def protomq_server() -> Iterator[Broker]:
    """A standalone protomq for the whole session."""
    from protomq.testing import Broker

    with Broker() as broker:
        yield broker


@pytest.fixture
def protomq_topic(protomq_server: Broker, request: pytest.FixtureRequest) -> str:
    """A topic of its own for each test."""
    from protomq import Admin

    # Readable where it turns up in a log, and unique over workers and sessions that share a broker.
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", request.node.name)[:60].strip("-")
    name = f"{readable}-{uuid.uuid4().hex[:12]}"
    with Admin(namesrv=protomq_server.namesrv) as admin:
        admin.create_topic(name, write_queues=8, read_queues=8)
    return name


@pytest.fixture
def protomq_producer(protomq_server: Broker) -> Iterator[Producer]:
    """A producer, closed after the test."""
    from protomq import Producer

    with Producer(namesrv=protomq_server.namesrv) as producer:
        yield producer


@pytest.fixture
def protomq_group() -> Callable[..., FakeGroup]:
    """`protomq_group(consumer, retry_count_max=2)`: the group of a consumer that is not started."""
    from protomq.testing import FakeGroup

    return FakeGroup
