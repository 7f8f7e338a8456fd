"""Bugs for the processes of a group and its brokers: (patch, faults, the rule that has to be broken), by name.

`planted_in_child/sitecustomize.py` enters a patch when a process's Python starts. Each process has it; what a process needs not it does not
import until then.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest import mock

PULL, LOCKED, PUSH, ASYNC, ORDERLY, ASYNC_ORDERLY = range(6)
"""Seeds with these kinds of members: their place in `group_member.KINDS`."""


def gives_a_locked_queue_to_whoever_asks() -> Any:
    """The broker gives a queue that has an owner to the next one who asks."""
    from protomq_broker.queue_locks import QueueLocks
    from protomq_broker.store.state.locks import LockOwner

    def take(self: Any, keys: Any, client_id: str, nonce: int, now_ms: int, wall_clock_ms: int = 0) -> Any:
        owners = []
        for key in keys:
            owner = self._table.owner(key)
            if owner is None or not owner.has_name(client_id, nonce):
                owner = LockOwner(self._draw(), client_id, nonce, True, wall_clock_ms)
            self._renew(key, owner, now_ms)
            owners.append(owner)
        return list(zip(keys, owners, strict=True)), owners

    return mock.patch.object(QueueLocks, "take", take)


def takes_commits_with_old_tokens() -> Any:
    """The broker does not look at the token of a commit."""
    from protomq_broker.queue_locks import QueueLocks

    return mock.patch.object(QueueLocks, "may_commit", return_value=True)


def does_not_look_whose_commit_it_is() -> Any:
    """The broker does not look at the membership that a commit names."""
    from protomq_broker.member_commits import MemberCommits

    return mock.patch.object(MemberCommits, "check")


def commits_what_is_in_hand() -> Any:
    """A member commits behind messages that its listeners still have."""
    from protomq._pull_logic import PullState
    from protomq._push_steps import ListenedPulls

    real = PullState.to_commit

    def to_commit(self: Any, *, safe_only: bool) -> Any:
        for state in self._queues.values():
            state.safe_position = state.position
        return real(self, safe_only=True)

    return mock.patch.object(ListenedPulls, "to_commit", to_commit)


def says_nothing_of_the_dead() -> Any:
    """A member whose call breaks is taken out, and nobody hears of it."""
    from protomq_broker.memberships import Memberships

    real = Memberships.left

    def left(self: Any, name: str, key: Any, now_ms: int) -> bool:
        group = self.find(name)
        version = group.version if group is not None else 0
        real(self, name, key, now_ms)
        if group is not None:
            group.version = version
        return False

    return mock.patch.object(Memberships, "left", left)


def leaves_locks_behind() -> Any:
    """Locks of a member that is gone stay until their time is over."""
    from protomq_broker.queue_locks import QueueLocks

    return mock.patch.object(QueueLocks, "gone", return_value=[])


def begins_before_the_commit() -> Any:
    """A member begins three messages before what was committed."""
    from protomq._pull_logic import PullState

    real = PullState.start_all

    def start_all(self: Any, queues: Any, committed: Any, *rest: Any, **named: Any) -> Any:
        return real(self, queues, {queue_id: max(offset - 3, 0) for queue_id, offset in committed.items()}, *rest, **named)

    return mock.patch.object(PullState, "start_all", start_all)


def gives_away_without_a_commit() -> Any:
    """A member that gives queues away does not commit what is done; it commits only now and then."""
    from protomq._commit_steps import CommitSteps

    real = CommitSteps.commit_dealt_with

    def commit_dealt_with(self: Any, when: str, *rest: Any, **named: Any) -> Any:
        if when == "when they went":
            return None
        return (yield from real(self, when, *rest, **named))

    return mock.patch.object(CommitSteps, "commit_dealt_with", commit_dealt_with)


def goes_on_after_a_stop() -> Any:
    """A member that wakes up trusts that it still has what it had; no broker refuses its commits, which would tell it."""
    from protomq._membership_logic import MembershipState, _Broker

    does_not_look_whose_commit_it_is().__enter__()
    mock.patch.object(MembershipState, "stands", return_value=True).__enter__()
    return mock.patch.object(_Broker, "is_late", return_value=False)


def skips_what_failed() -> Any:
    """A member whose orderly listener fails goes on as if it had not."""
    from protomq import _push_state

    real = _push_state.judge_in_order

    def judge(options: Any, retry_count_max: Any, messages: Any, failures: Any) -> Any:
        return real(options, retry_count_max, messages, [None for _ in failures])

    return mock.patch.object(_push_state, "judge_in_order", judge)


SEEDS: Final = 3
"""A bug that needs luck is met by one of this number of runs."""


class PlantedInGroup(NamedTuple):
    """A bug, the kind of members that meet it, the faults of its rounds and their number, and the rules of which it breaks one."""

    plant: Callable[[], Any]
    kind: int
    faults: tuple[str, ...]
    rules: str
    rounds: int = 3


BUGS: Final = (
    PlantedInGroup(gives_a_locked_queue_to_whoever_asks, ORDERLY, ("join", "leave"), "(B[34]|C[35])", rounds=8),
    PlantedInGroup(takes_commits_with_old_tokens, ORDERLY, ("stop in a commit",), "(B3|C[35])"),
    PlantedInGroup(does_not_look_whose_commit_it_is, PULL, ("stop in a commit",), "(B3|C[23])"),
    PlantedInGroup(commits_what_is_in_hand, PUSH, ("join",), "C1a"),
    PlantedInGroup(says_nothing_of_the_dead, PULL, ("kill alone",), "C6"),
    PlantedInGroup(leaves_locks_behind, ORDERLY, ("kill alone",), "C6"),
    PlantedInGroup(begins_before_the_commit, LOCKED, ("join",), "(B3|C3)"),
    PlantedInGroup(gives_away_without_a_commit, ASYNC_ORDERLY, ("join",), "C2"),
    PlantedInGroup(skips_what_failed, ORDERLY, ("join",), "(B4|C1a)"),
    PlantedInGroup(goes_on_after_a_stop, PUSH, ("stop anywhere",), "(B[34]|C[37])"),
)


def environment_of(bug: PlantedInGroup) -> dict[str, str]:
    """What processes inherit to have the bug."""
    here = Path(__file__).parent
    paths = [str(here / "planted_in_child"), str(here.parents[1]), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CHAOS_BUG": f"{__name__}:{bug.plant.__name__}",
    }
