"""For tests of applications: a real broker as a child process, and fakes.

    from protomq.testing import Broker

    with Broker() as broker:                  # or: async with Broker() as broker
        producer = Producer(namesrv=broker.namesrv)

With pytest, the plugin that comes with this package offers `protomq_server`, `protomq_topic` and `protomq_producer`.
The fakes: `FakeClock`, `FaultProxy` (a network with faults, from a seed) and `SimDisk` (a disk that fails on request; it stands
in for the broker's own, so it needs protomq-broker).
"""

from typing import TYPE_CHECKING

from .broker import Broker, BrokerStartError
from .fakes import FakeClock, FaultProxy, Faults

if TYPE_CHECKING:
    from .simdisk import Fault, SimDisk, SimulatedCrash

__all__ = ["Broker", "BrokerStartError", "FakeClock", "Fault", "FaultProxy", "Faults", "SimDisk", "SimulatedCrash"]


def __getattr__(name: str) -> object:
    # Late: the simulated disk is one of the broker's, which an application's environment need not have.
    if name in ("Fault", "SimDisk", "SimulatedCrash"):
        try:
            from . import simdisk
        except ModuleNotFoundError as error:
            if error.name != "protomq_broker":
                raise
            message = f"protomq.testing.{name} stands in for the broker's disk: run `pip install .` in a checkout of protomq"
            raise ModuleNotFoundError(message, name=error.name) from error

        return getattr(simdisk, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
