"""For tests of applications: a real broker as a child process, and fakes.

    from protomq.testing import Broker

    with Broker() as broker:                  # or: async with Broker() as broker
        producer = Producer(broker.namesrv)

With pytest, the plugin that comes with this package offers `protomq_server`, `protomq_topic` and `protomq_producer`.
`FaultProxy` (TCP faults, from a seed) and `FakeClock` stand in `protomq.testing.fakes`.
"""

from .broker import Broker, BrokerStartError
from .fakes import FakeClock, FaultProxy, Faults

__all__ = ["Broker", "BrokerStartError", "FakeClock", "FaultProxy", "Faults"]
