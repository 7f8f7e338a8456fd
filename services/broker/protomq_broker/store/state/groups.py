"""Settings of consumer groups, which requests sent messages back, and which dead letters were replayed; a state machine over the log.

    record of %SYS%GROUPS   its body is a GroupsRecord (state.proto): groups that were set up or changed, or whose settings are forgotten;
                            requests that were done
    config/groups.json      {"position": n, "groups": {"<name>": [position, "<GroupSettings in hexadecimal>"], …},
                             "sent_back": "<rows of requests in hexadecimal>",
                             "replayed": [["<group>", incarnation, since, [start, end, …]], …]}

Rules:
- The records are the truth, the file is a cache (`snapshots.py`). A group's position is where its newest record stands.
- Of two settings the one with the higher version holds, in whatever order their records come.
- A group that nobody has set up has the defaults, and no record.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError

from protomq.v1.group_pb2 import GroupSettings as GroupMessage
from protomq.v1.state_pb2 import GroupsRecord
from protomq.wire.topics import GROUPS_TOPIC
from protomq_broker.store.errors import StoreError
from protomq_broker.store.files.disk import Disk

from .group_settings import (
    VERSION_MAX,
    GroupSettings,
    GroupSettingsError,
    group_from_message,
    group_to_message,
)
from .machine import Carrier, Snapshot, StateAppend
from .replayed import OffsetRuns, ReplayedLetters
from .sent_back import SentBackRequests, dump
from .snapshots import SnapshotFiles

log = logging.getLogger(__name__)
T = TypeVar("T")

GROUPS_SET_UP_MAX: Final = 100_000
CARRIED_COUNT: Final = 500
"""Groups in a slice of what is carried forward."""
CARRIED_KEY_COUNT: Final = 5_000
"""Requests in a slice."""


class TooManySettingsError(StoreError):
    """More groups have settings than a broker keeps."""

    def __init__(self) -> None:
        super().__init__(
            f"{GROUPS_SET_UP_MAX} groups are set up already; delete one that nobody needs"
        )


class GroupTable:
    """The groups that were set up. Questions: any thread; `put`, `apply`, `has_sent_back`: the writer.

    Attributes:
        append: how changes get into the log; set before the first one.
        disabled: groups that may not consume; replaced, never changed.
        replay_from: after the construction: the records before this position are in it already.
    """

    topic = GROUPS_TOPIC

    def __init__(self, disk: Disk, path: str, log_start: int, end_position: int) -> None:
        """Reads the cache of a log that goes from `log_start` to `end_position`."""
        self.append: StateAppend | None = None
        self.disabled: frozenset[str] = frozenset()
        self._files = SnapshotFiles(disk, path)
        self._lock = threading.Lock()  # of what is below: held while it changes and is copied
        self._settings: dict[str, GroupSettings] = {}
        self._positions: dict[str, int] = {}
        self._sent_back = SentBackRequests()
        self._replayed = ReplayedLetters()
        self._change_count = self._saved_count = 0
        self._end_position = 0  # behind the start of the last record that was applied
        self.replay_from = self._files.load(self._load, log_start, end_position)
        self._note_disabled()

    # Questions.

    def find(self, group: str) -> GroupSettings:
        """The settings of a group, the defaults if it has none. Raises GroupSettingsError for what is no name of a group."""
        return self._settings.get(group) or GroupSettings(group)

    def has_settings(self, group: str) -> bool:
        """Whether the group was set up."""
        return group in self._settings

    def all(self) -> list[GroupSettings]:
        """The groups that were set up, by name."""
        with self._lock:
            return [self._settings[name] for name in sorted(self._settings)]

    def has_sent_back(self, key: int) -> bool:
        """Whether the request with this key is known to be done."""
        return key in self._sent_back

    def replayed(self, group: str, incarnation: int) -> OffsetRuns:
        """Offsets of the dead letters of a group that were replayed, in this incarnation of %DLQ%group. Not to be changed."""
        return self._replayed.of(group, incarnation)

    # Changes.

    def put(self, settings: GroupSettings) -> GroupSettings:
        """Gives a group settings; with version 0 they get the next one, at the highest version the same again. The result are those that
        hold now: others, if the version of these is no higher.

        Nobody waits for the disk here. Raises TooManySettingsError, and what `StateAppend` raises.
        """
        assert self.append is not None
        known = self._settings.get(settings.group)
        if known is None and len(self._settings) >= GROUPS_SET_UP_MAX:
            raise TooManySettingsError
        version = 0 if known is None else known.version
        if not settings.version or settings.version > version:
            message = group_to_message(settings)
            message.version = settings.version or min(version + 1, VERSION_MAX)
            self.append(GroupsRecord(settings=[message]).SerializeToString())
        return self.find(settings.group)

    # The machine.

    def apply(self, body: bytes, position: int) -> Sequence[str]:
        """See `StateMachine`; a body that is no GroupsRecord changes nothing, and is said."""
        try:
            record = GroupsRecord.FromString(body)
            found = list(map(group_from_message, record.settings))
        except (DecodeError, GroupSettingsError) as error:
            log.error("the record of %s at position %d is none: %s", GROUPS_TOPIC, position, error)
            return ()
        with self._lock:
            for group in record.deleted_groups:
                self._settings.pop(group, None)
                self._positions.pop(group, None)
                self._replayed.forget(group)
            for settings in found:
                known = self._settings.get(settings.group)
                if known is None or settings.version >= known.version:
                    self._settings[settings.group] = settings
                    self._positions[settings.group] = position
            if record.sent_back:
                self._sent_back.note(record.sent_back, record.sent_back_times_ms, position)
            for told in record.replayed:
                self._replayed.note(told, position)
            self._change_count += 1
            self._end_position = position + 1
            if found or record.deleted_groups:
                self._note_disabled()
        return ()

    def carry(self, cut: int) -> Sequence[Carrier]:
        """See `StateMachine`."""
        with self._lock:
            names = [name for name, position in self._positions.items() if position < cut]
            keys, groups = self._sent_back.below(cut), self._replayed.below(cut)
        return [
            *(Carrier(partial(self._carried, cut=cut), part) for part in _slices(names, CARRIED_COUNT)),
            *(Carrier(partial(self._carried_keys, cut=cut), part) for part in _slices(keys, CARRIED_KEY_COUNT)),
            *(Carrier(partial(self._carried_replays, cut=cut), [group]) for group in groups),
        ]

    def unsaved(self) -> Snapshot | None:
        """See `StateMachine`."""
        with self._lock:
            if self._change_count == self._saved_count:
                return None
            change_count, end_position = self._change_count, self._end_position
            known, positions = dict(self._settings), dict(self._positions)
            sent_back, replayed = self._sent_back.all(), self._replayed.dump()

        def save(position: int) -> None:
            groups = {
                name: [positions[name], group_to_message(settings).SerializeToString().hex()]
                for name, settings in known.items()
            }
            self._files.save(
                {
                    "position": position,
                    "groups": groups,
                    "sent_back": dump(sent_back),
                    "replayed": replayed,
                }
            )
            self._saved_count = change_count

        return Snapshot(end_position, save)

    # Parts.

    def _carried(self, names: Sequence[str], cut: int) -> bytes:
        """A record that says again those of the groups whose newest record stands before `cut`. The writer."""
        alive = [name for name in names if self._positions.get(name, cut) < cut]
        messages = [group_to_message(self._settings[name]) for name in alive]
        return GroupsRecord(settings=messages).SerializeToString()

    def _carried_keys(self, keys: Sequence[int], cut: int) -> bytes:
        """A record that says again those of the requests whose newest record stands before `cut`. The writer."""
        times_ms = self._sent_back.times_of(keys, cut)
        return GroupsRecord(
            sent_back=times_ms.keys(), sent_back_times_ms=times_ms.values()
        ).SerializeToString()

    def _carried_replays(self, groups: Sequence[str], cut: int) -> bytes:
        """A record that says again which dead letters of the groups were replayed. The writer."""
        return GroupsRecord(replayed=self._replayed.told(groups, cut)).SerializeToString()

    def _note_disabled(self) -> None:
        self.disabled = frozenset(
            name for name, settings in self._settings.items() if not settings.consume_enabled
        )

    def _load(self, content: Any) -> None:
        positions: dict[str, int] = {}
        found: dict[str, GroupSettings] = {}
        for name, (position, octets) in content["groups"].items():
            try:
                message = GroupMessage.FromString(bytes.fromhex(octets))
            except DecodeError as error:
                raise ValueError(f"settings of {name!r} that do not parse") from error
            found[name] = group_from_message(message)
            positions[name] = int(position)
        sent_back = SentBackRequests.load(content["sent_back"])
        self._replayed = ReplayedLetters.load(content["replayed"])
        self._sent_back = sent_back
        self._settings, self._positions = found, positions


def _slices(items: Sequence[T], count: int) -> list[Sequence[T]]:
    return [items[start : start + count] for start in range(0, len(items), count)]
