"""For tests of applications: a real broker as a child process, and fakes.

    from protomq.testing import Broker

    with Broker() as broker:                  # or: async with Broker() as broker
        producer = Producer(namesrv=broker.namesrv)

With pytest, the plugin that comes with this package offers `protomq_server`, `protomq_topic`, `protomq_producer` and `protomq_group`.
The fakes: `FakeGroup` (the members of a group, without a broker), `FakeClock` and `FaultProxy` (a network with faults, from a seed).
The simulated disk is the store's: `protomq_broker.testing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .broker import Broker, BrokerStartError
from .fakes import FakeClock, FaultProxy, Faults

if TYPE_CHECKING:
    from .fake_group import DeadLetter as DeadLetter
    from .fake_group import FakeGroup as FakeGroup
    from .fake_group import FakeMember as FakeMember

__all__ = ["Broker", "BrokerStartError", "DeadLetter", "FakeClock", "FakeGroup", "FakeMember", "FaultProxy", "Faults"]


def __getattr__(name: str) -> object:
    """What needs the whole SDK is loaded when it is used: pytest loads this package with its plugins."""
    if name in ("FakeGroup", "FakeMember", "DeadLetter"):
        from . import fake_group

        return getattr(fake_group, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
