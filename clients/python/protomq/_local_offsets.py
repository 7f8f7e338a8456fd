"""Offsets of a broadcast consumer, in a file of its machine: each member gets all messages, so no broker keeps where it is.

The file is JSON: {"version": 1, "crc32": of the text of offsets, "offsets": [[topic, broker, queue id, offset, incarnation], ...]}.
"done" has for each queue what is done behind the offset, [[first, count], ...]; "done_crc32" is of its text and that of offsets. It is
written beside, synced, and renamed: a crash leaves the old one or the new one. One that is damaged is put aside and told; the consumer
then begins as if there were none. A lock on a file beside it keeps a second consumer of this machine away from it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Final, NamedTuple
from urllib.parse import quote

from ._types import MessageQueue
from .errors import ConfigurationError

try:
    import fcntl
except ImportError:  # Windows.
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("protomq")

VERSION: Final = 1
WORKER_PROCESS_VARIABLE: Final = "PROTOMQ_WORKER_PROCESS"
"""The number of a process of `protomq worker`, from 0. All of them run the same program, so they give the same `instance`."""
DEFAULT_FOLDER: Final = "~/.local/state/protomq/offsets"


class StoredOffset(NamedTuple):
    """Where a consumer is in a queue, the incarnation of the topic to which that belongs, and the epoch of the log; 0: not known.

    `done`: offsets behind it that are done, in runs of first and count: something before them was not.
    """

    queue_offset: int
    incarnation: int
    log_epoch: int = 0
    done: tuple[tuple[int, int], ...] = ()


def in_runs(offsets: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Offsets as runs of first and count."""
    runs: list[tuple[int, int]] = []
    for offset in sorted(offsets):
        if runs and offset == sum(runs[-1]):
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((offset, 1))
    return tuple(runs)


def of_runs(runs: Iterable[tuple[int, int]]) -> set[int]:
    """The offsets that `in_runs` was given."""
    return {offset for first, count in runs for offset in range(first, first + count)}


def instance_here(instance: str, environment: Mapping[str, str]) -> str:
    """The instance of a consumer in this process. The first process of a worker has the file that a program alone would have.

    Raises ConfigurationError if the variable is no number.
    """
    number = environment.get(WORKER_PROCESS_VARIABLE, "0")
    if not (number.isascii() and number.isdigit()):
        raise ConfigurationError(
            f"{WORKER_PROCESS_VARIABLE} is the number of this process among those that run the same program: 0, 1, 2; not {number!r}"
        )
    return f"{instance}#{int(number)}" if int(number) else instance


class LocalOffsets:
    """The file of one consumer. One thread at a time, but for `save`: a task that is cancelled leaves one behind that still runs."""

    def __init__(self, folder: str, group: str, instance: str = "") -> None:
        """`folder`: "": the default one. `instance`: tells consumers of one group on one machine apart."""
        name = quote(f"{group}@{instance}" if instance else group, safe="%@")
        self.path = Path(folder or DEFAULT_FOLDER).expanduser() / f"{name}.json"
        self._lock: IO[bytes] | None = None
        self._saving = threading.Lock()

    def open(self) -> dict[MessageQueue, StoredOffset]:
        """Takes the file, and reads it. Raises ConfigurationError if another consumer has it, or the folder cannot be used."""
        try:
            self._take()
        except BlockingIOError:
            self.close()
            raise ConfigurationError(
                f"another consumer of this machine has {self.path}: give this one a name of its own, instance=..., or another offset_folder"
            ) from None
        except (OSError, ValueError) as error:  # ValueError: a path with a zero byte.
            self.close()
            raise ConfigurationError(f"offsets cannot be kept at {self.path}: {error}; choose offset_folder") from error
        try:
            return decode(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        except OSError as error:
            self.close()
            raise ConfigurationError(f"offsets cannot be read from {self.path}: {error}; choose offset_folder") from error
        except ValueError as error:
            aside = self.path.with_suffix(".damaged")
            os.replace(self.path, aside)
            logger.error("%s is damaged, put aside as %s, consuming as if there were none: %s", self.path, aside.name, error)
            return {}

    def _take(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self.path.with_suffix(".lock").open("ab")
        if fcntl is not None:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def save(self, offsets: Mapping[MessageQueue, StoredOffset]) -> None:
        """Replaces the file, durably. Raises OSError; then the old one is as it was. Makes a folder again that somebody has deleted."""
        with self._saving:
            if not self.path.parent.exists():
                self.close()
                self._take()
            beside = self.path.with_suffix(".new")
            with beside.open("wb") as file:
                file.write(encode(offsets))
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, self.path)
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def close(self) -> None:
        """Somebody else may have it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def encode(offsets: Mapping[MessageQueue, StoredOffset]) -> bytes:
    """The octets of a file."""
    text = _text([[*queue, *stored[:2]] for queue, stored in offsets.items()])
    # They stand apart because earlier versions read rows of five.
    epochs = _text([stored.log_epoch for stored in offsets.values()])
    done = _text([stored.done for stored in offsets.values()])
    return (
        f'{{"version": {VERSION}, "crc32": {_crc32(text)}, "offsets": {text}, "log_epochs": {epochs}, '
        f'"done_crc32": {_crc32(text + done)}, "done": {done}}}\n'
    ).encode()


def decode(data: bytes) -> dict[MessageQueue, StoredOffset]:
    """What `encode` wrote. Raises ValueError for anything else."""
    content = json.loads(data)
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise ValueError("it is not of this version")
    text = _text(content.get("offsets"))
    if _crc32(text) != content.get("crc32"):
        raise ValueError("its CRC is wrong")
    rows = content["offsets"]
    epochs = content.get("log_epochs")
    if not isinstance(epochs, list) or len(epochs) != len(rows) or not all(type(each) is int for each in epochs):
        epochs = [0] * len(rows)
    done = content.get("done", [])
    if _crc32(text + _text(done)) != content.get("done_crc32") or len(done) != len(rows):
        done = [[]] * len(rows)  # Of an earlier version, or damaged: more comes again.
    return {
        MessageQueue(*row[:3]): StoredOffset(row[3], row[4], epoch, tuple((first, count) for first, count in runs))
        for row, epoch, runs in zip(rows, epochs, done, strict=True)
    }


def _text(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _crc32(text: str) -> int:
    return zlib.crc32(text.encode())
