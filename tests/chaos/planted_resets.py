"""Bugs for the processes of a group that is reset, or that broadcasts: (patch, campaign, kind of members, faults, rules), by name.

As in `planted_groups.py`: each process has the bug; what a process needs not it does not import until then.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest import mock

from .planted_groups import ASYNC_ORDERLY, ORDERLY, PULL, PUSH


def takes_a_reset_for_a_commit() -> Any:
    """A reset has no number: members do not hear of it, and their next commits replace it."""
    from protomq_broker.store.state.offsets import ConsumerOffsets

    return mock.patch.object(ConsumerOffsets, "reset_epoch", return_value=0)


def begins_behind_the_time() -> Any:
    """The first message at a time, or later, is left out."""
    from protomq_broker.store.queues.log_reader import LogReader

    real = LogReader.offset_at_time

    def offset_at_time(self: Any, topic: str, queue_id: int, time_ms: int, **bound: bool) -> int:
        return min(real(self, topic, queue_id, time_ms, **bound) + 1, self.queue_range(topic, queue_id)[1])

    return mock.patch.object(LogReader, "offset_at_time", offset_at_time)


def resets_in_memory_only() -> Any:
    """A reset is answered, obeyed, and in no log: after a restart the group is where it was."""
    from protomq.v1.consumer_service_pb2 import CommitOffsetsRequest
    from protomq.v1.state_pb2 import OffsetsRecord
    from protomq_broker.offset_commits import _Record

    real = _Record.add

    def add(self: Any, commit: Any) -> None:
        if not commit.is_reset:
            real(self, commit)
            return
        request, position = CommitOffsetsRequest.FromString(commit.request.SerializeToString()), self._store.appended_position
        for offset in request.offsets:
            offset.reset_epoch = position
        self._store.offsets.apply(OffsetsRecord(commits=[request]).SerializeToString(), position - 1)
        self.commits.append(commit)

    return mock.patch.object(_Record, "add", add)


def goes_on_beside_its_listener() -> Any:
    """An orderly member whose group was reset does not wait for the listener that has a message of the queue."""
    from protomq._push_state import PushState

    real = PushState.offer

    def offer(self: Any, queue: Any, messages: Any) -> None:
        real(self, queue, messages)
        work = self._works.get(queue)
        if work is not None and work.is_busy and all(run.work is not work for run in self._runs):
            work.is_busy = False
            self._line_up(work)

    return mock.patch.object(PushState, "offer", offer)


def writes_down_what_is_in_hand() -> Any:
    """A member that broadcasts writes into its file what it has pulled, and not ended."""
    from protomq._local_offsets import StoredOffset
    from protomq._push_steps import ListenedPulls

    def where(self: Any) -> Any:
        states = self._queues.items()
        return {queue: StoredOffset(one.position, one.incarnation, one.log_epoch) for queue, one in states if one.position is not None}

    return mock.patch.object(ListenedPulls, "where", where)


def begins_at_the_beginning() -> Any:
    """A member that broadcasts does not look into its file."""
    from protomq._local_offsets import LocalOffsets

    real = LocalOffsets.open

    def open_(self: Any) -> Any:
        real(self)
        return {}

    return mock.patch.object(LocalOffsets, "open", open_)


class PlantedInMembers(NamedTuple):
    """A bug, the campaign that meets it, the kind of its members, the faults of its rounds, and the rules of which it breaks one."""

    plant: Callable[[], Any]
    campaign: str
    kind: int
    faults: tuple[str, ...]
    rules: str
    rounds: int = 4


BUGS: Final = (
    PlantedInMembers(takes_a_reset_for_a_commit, "resets", PUSH, ("reset",), "O[123]"),
    PlantedInMembers(begins_behind_the_time, "resets", PULL, ("reset",), "O[123]"),
    PlantedInMembers(resets_in_memory_only, "resets", ASYNC_ORDERLY, ("reset then broker",), "O[123]"),
    PlantedInMembers(goes_on_beside_its_listener, "resets", ORDERLY, ("reset",), "B4", rounds=8),
    PlantedInMembers(writes_down_what_is_in_hand, "broadcasts", 0, ("kill alone",), "P1", rounds=8),
    PlantedInMembers(begins_at_the_beginning, "broadcasts", 0, ("leave",), "P2"),
)


def environment_of(bug: PlantedInMembers) -> dict[str, str]:
    """What processes inherit to have the bug."""
    here = Path(__file__).parent
    paths = [str(here / "planted_in_child"), str(here.parents[1]), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CHAOS_BUG": f"{__name__}:{bug.plant.__name__}",
    }
