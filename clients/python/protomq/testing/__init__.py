"""For tests of applications: a real broker as a child process, and fakes.

    from protomq.testing import Broker

    with Broker() as broker:                  # or: async with Broker() as broker
        producer = Producer(namesrv=broker.namesrv)

With pytest, the plugin that comes with this package offers `protomq_server`, `protomq_topic` and `protomq_producer`.
The fakes: `FakeClock` and `FaultProxy` (a network with faults, from a seed). The simulated disk is the store's: `protomq_broker.testing`.
"""

from .broker import Broker, BrokerStartError
from .fakes import FakeClock, FaultProxy, Faults

__all__ = ["Broker", "BrokerStartError", "FakeClock", "FaultProxy", "Faults"]
