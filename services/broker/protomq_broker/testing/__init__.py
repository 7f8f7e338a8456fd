"""For tests of the broker and its store: the simulated disk. What tests of applications need is in `protomq.testing`."""

from .simdisk import Fault, Operation, SimDisk, SimulatedCrash

__all__ = ["Fault", "Operation", "SimDisk", "SimulatedCrash"]
