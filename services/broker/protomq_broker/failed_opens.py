"""What an operator reads while a store cannot be opened again: why, what to do, and that the broker goes on by itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from .store.errors import StoreSettingsError
from .store.files.disk import DISK_FULL_ERRNOS

log = logging.getLogger("protomq.broker")

TRIES_PER_LINE: Final = 60
"""A store is tried about each second; the log need not have all of that."""


@contextmanager
def full_disk_named(folder: Path) -> Iterator[None]:
    """Around what writes into a folder: the error of a write does not say where its disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(folder)) from error


@contextmanager
def start_named(data_dir: Path) -> Iterator[None]:
    """Around a start: as `full_disk_named`, and StoreSettingsError for a folder that stands where a file of the store belongs."""
    try:
        with full_disk_named(data_dir):
            yield
    except IsADirectoryError as error:
        if not isinstance(error.filename, str) or not Path(error.filename).is_relative_to(data_dir):
            raise
        raise StoreSettingsError(
            f"{error.filename} is a folder, and a file of the store belongs there: move the folder away. Bring the file back from a copy "
            "if there is one; a start makes again what the log tells"
        ) from error


class FailedOpens:
    """The tries to open one store."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._said = ""
        self._tries = 0

    def say(self, error: OSError) -> None:
        """Logs a try that failed; the same again only after TRIES_PER_LINE of them."""
        self._tries += 1
        if str(error) == self._said and self._tries < TRIES_PER_LINE:
            return
        self._said, self._tries = str(error), 0
        if error.errno in DISK_FULL_ERRNOS:
            remedy = f"free some space on the disk of {self._data_dir}"
        else:
            remedy = f"see to the disk of {self._data_dir}"
        log.error(
            "the store cannot be opened again yet, and this broker serves nothing: %s. To do: %s; the broker tries again and goes on"
            " by itself",
            error,
            remedy,
        )  # fmt: skip
