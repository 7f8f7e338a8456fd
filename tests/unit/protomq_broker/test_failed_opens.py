"""While a store cannot be opened again the log says why and what to do, and does not fill."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from protomq_broker.failed_opens import TRIES_PER_LINE, FailedOpens, full_disk_named, start_named
from protomq_broker.store.config import StoreConfig
from protomq_broker.store.store import Store
from protomq_cli.connection import translate
from protomq_cli.exits import ExitCode

from .store.log_helpers import ManualClock, make_request
from .store.store_helpers import SEGMENT, commit


def failure(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free some space on the disk of /data/b"),
        (errno.EDQUOT, "free some space on the disk of /data/b"),
        (errno.EIO, "see to the disk of /data/b"),
    ],
)
def test_it_says_what_to_do(number: int, remedy: str, caplog: pytest.LogCaptureFixture) -> None:
    FailedOpens(Path("/data/b")).say(failure(number))
    assert os.strerror(number) in caplog.text
    assert f"To do: {remedy}; the broker tries again and goes on by itself" in caplog.text


def test_the_same_is_said_once_a_minute_and_news_at_once(caplog: pytest.LogCaptureFixture) -> None:
    opens = FailedOpens(Path("/data/b"))
    for _ in range(TRIES_PER_LINE):
        opens.say(failure(errno.ENOSPC))
    assert len(caplog.records) == 1
    opens.say(failure(errno.ENOSPC))
    assert len(caplog.records) == 2
    opens.say(failure(errno.EIO))
    assert len(caplog.records) == 3


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("path", [None, "/data/b/lock"])
def test_a_command_whose_disk_is_full_names_the_folder_and_says_what_to_do(number: int, path: str | None) -> None:
    with pytest.raises(OSError, match=os.strerror(number)) as caught, full_disk_named(Path("/data/b")):
        raise OSError(number, os.strerror(number), path)
    told = translate(caught.value)
    assert told is not None
    assert (told.exit_code, told.reason) == (ExitCode.REFUSED, "DISK_FULL")
    assert str(told) == f"{path or '/data/b'}: {os.strerror(number)}; free space on this disk, and run it again"


def test_other_errors_are_left_as_they_are() -> None:
    error = failure(errno.EIO)
    with pytest.raises(OSError, match="output error") as caught, full_disk_named(Path("/data/b")):
        raise error
    assert caught.value is error


def test_a_folder_in_the_place_of_a_file_of_the_store_is_named_with_what_to_do(tmp_path: Path) -> None:
    def open_at(root: Path) -> Store:
        return Store.open(str(root), StoreConfig(segment_size_bytes=SEGMENT), clock=ManualClock(), background=False)

    store = open_at(tmp_path / "made")
    store.append([make_request([b"x"])])
    commit(store, "group", "topic", 0, 1)
    store.checkpoint()
    store.close()
    files = [path.relative_to(tmp_path / "made") for path in (tmp_path / "made").rglob("*") if path.is_file()]
    told = set()
    for name in files:
        root = tmp_path / "copy"
        shutil.copytree(tmp_path / "made", root)
        (root / name).unlink()
        (root / name).mkdir()
        try:
            with start_named(root):
                open_at(root).close()
        except Exception as error:
            said = translate(error)
            assert said is not None, name
            assert said.exit_code is ExitCode.REFUSED, name
            assert f"{root / name}" in str(said), name
            assert "is a folder, and a file of the store belongs there: move the folder away" in str(said), name
            told.add(name.name)
        shutil.rmtree(root)
    assert told >= {"store.json", "storeId", "epochs.json", "log_front.json", "consumerOffsets.json", "checkpoint", "lock"}
    assert any("consumequeue" in str(name) and name.name in told for name in files)


def test_a_folder_elsewhere_is_no_file_of_the_store(tmp_path: Path) -> None:
    (tmp_path / "modules").mkdir()
    with pytest.raises(IsADirectoryError), start_named(tmp_path / "store"):
        (tmp_path / "modules").read_bytes()
