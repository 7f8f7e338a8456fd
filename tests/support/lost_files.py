"""Files of a store that are lost. Its settings stay: a folder without them is no store."""

from __future__ import annotations

from collections.abc import Iterable

from protomq_broker.store.start.settings import SETTINGS_NAME
from protomq_broker.testing.simdisk import SimDisk


def lose(disk: SimDisk, *names: str, root: str = "/s") -> None:
    """Takes away files and folders of a store, as far as they are there; of the folder `config`, all but the settings."""
    for name in _each(disk, names, root):
        if disk.exists(f"{root}/{name}"):
            disk.remove(f"{root}/{name}")


def lose_all_but_log(disk: SimDisk, root: str = "/s") -> None:
    """Takes away all that comes from the log."""
    lose(disk, *(name for name in disk.list(root) if name != "commitlog"), root=root)


def _each(disk: SimDisk, names: Iterable[str], root: str) -> Iterable[str]:
    for name in names:
        if name == "config":
            yield from (f"config/{each}" for each in disk.list(f"{root}/config") if f"config/{each}" != SETTINGS_NAME)
        else:
            yield name
