"""Bugs of following that are put in on purpose: `planted.py` has them in its list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from unittest import mock

from protomq.wire.log_walk import Seal, WalkedBlock, walk_appends
from protomq_broker.store import following
from protomq_broker.store.leading import Leadership
from protomq_broker.store.log import verbatim
from protomq_broker.store.log.agreement import LogPoint, LogView
from protomq_broker.store.log.epochs import Epochs
from protomq_broker.store.start import truncation
from protomq_broker.store.store_files import StoreFiles

from . import store_follow
from .checker import Violation


def seals_are_not_checked() -> Any:
    """A follower takes bytes by their layout, whatever their seals say."""

    def walk(data: bytes, base_position: int, previous_crc32c: int | None) -> WalkedBlock:
        block = walk_appends(data, base_position, previous_crc32c)
        return block if not block.problem else _trusted(data, base_position, block)

    return mock.patch.object(verbatim, "walk_appends", walk)


def _trusted(data: bytes, base_position: int, block: WalkedBlock) -> WalkedBlock:
    """As if the chain had gone on: the first append that does not hold ends it, but all of the bytes count."""
    if not block.seals:
        block.seals.append(Seal(1, base_position, len(data) - 53, 0, 0, 0, 1))
    block.size_bytes, block.problem = len(data), ""
    return block


def synced_positions_are_believed() -> Any:
    """What the seals say was synced counts, whoever wrote them."""

    def synced_by(self: Epochs, seals: Sequence[Seal]) -> int:
        return max(seal.synced_position for seal in seals)

    return mock.patch.object(Epochs, "synced_by", synced_by)


def truncates_by_length() -> Any:
    """Logs are taken to agree up to the end of the shorter one."""

    def shorter(ours: LogView, theirs: LogView, last_epoch: int) -> LogPoint | None:
        ends = [view.epoch_end(1 << 40) for view in (ours, theirs)]
        position = min(end[1] for end in ends if end is not None) if all(ends) else 0
        return ours.log_point(position)

    return mock.patch.object(store_follow, "last_agreed", shorter)


def damage_is_no_end() -> Any:
    """Where a log is damaged, it says that no append ends."""
    return mock.patch.object(Leadership, "_point_in", return_value=None)


def epochs_are_not_durable() -> Any:
    """The table of epochs is never written."""

    def keep(self: StoreFiles, epochs: Epochs) -> None:
        self.epochs = epochs

    return mock.patch.object(StoreFiles, "keep_epochs", keep)


def snapshots_survive_a_truncation() -> Any:
    """What tells of the part that was truncated stays, and is believed once the log is long enough."""
    return mock.patch.object(truncation, "_discard")


def states_are_not_followed() -> Any:
    """State records are stored, and their machines are not told."""
    return mock.patch.object(following.LogFollowers, "_apply_state")


def drill(seed: int) -> list[Violation]:
    """Some lives of two stores."""
    return store_follow.check_following(seed)


BUGS: Final = (
    ("follows bytes whose seals do not hold", seals_are_not_checked, drill),
    ("believes the synced positions of another store", synced_positions_are_believed, store_follow.check_torn_tails),
    ("truncates by length", truncates_by_length, drill),
    ("says that no append ends where its log is damaged", damage_is_no_end, drill),
    ("never writes its epochs", epochs_are_not_durable, store_follow.check_torn_tails),
    ("keeps what tells of a truncated part", snapshots_survive_a_truncation, drill),
    ("does not follow states", states_are_not_followed, drill),
)
"""(name, what plants it, where it shows)."""
