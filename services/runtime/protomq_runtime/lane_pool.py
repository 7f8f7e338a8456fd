"""The lanes of one service, and what an operator sees of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import cycle

from .admission import AdmissionConfig
from .dispatch import BoundMethod, PoolMethods
from .lane import Lane


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """What an operator sees of a pool."""

    lane: str
    threads: int
    depth: int
    depth_max: int
    queue_time_us: int
    """Longest wait of a call in the last interval."""
    calls: int
    rejections: int
    connections: int
    holds: int


class LanePool:
    """The lanes of one service. Built before the server starts; `status` and the picks: any thread."""

    def __init__(
        self,
        name: str,
        threads: int,
        admission: AdmissionConfig,
        methods_by_id: Mapping[int, BoundMethod],
        *,
        frame_size_max_bytes: int,
        on_connection_closed: Callable[[str], None],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        if threads < 1:
            raise ValueError(f"the lane {name} needs at least one thread, {threads} are configured")
        self.name = name
        self.siblings: Mapping[str, LanePool] = {name: self}
        """All pools of the server by name; set before the start."""
        self._admission = admission
        methods = PoolMethods(name, methods_by_id)
        self.lanes = [
            Lane(
                methods,
                index,
                admission,
                pick_lane=lambda other: self.siblings[other].pick_for_call(),
                frame_size_max_bytes=frame_size_max_bytes,
                on_connection_closed=on_connection_closed,
                on_fatal=on_fatal,
            )
            for index in range(threads)
        ]
        self._turns = cycle(self.lanes)

    def pick(self) -> Lane:
        """The lane for a new connection: the one with the fewest."""
        return min(self.lanes, key=lambda lane: lane.connection_count)

    def pick_for_call(self) -> Lane:
        """The lane for a single call: each in turn."""
        return next(self._turns)

    def status(self) -> PoolStatus:
        lanes = self.lanes
        return PoolStatus(
            lane=self.name,
            threads=len(lanes),
            depth=sum(lane.depth for lane in lanes),
            depth_max=self._admission.depth_max,
            queue_time_us=max(lane.queue_time_us() for lane in lanes),
            calls=sum(lane.call_count for lane in lanes),
            rejections=sum(lane.rejection_count for lane in lanes),
            connections=sum(lane.connection_count for lane in lanes),
            holds=sum(lane.holds for lane in lanes),
        )
