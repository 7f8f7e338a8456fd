"""The file of a broadcast consumer: what was saved is read, a damaged one is told, and two consumers never share one."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq._local_offsets import (
    LocalOffsets,
    StoredOffset,
    decode,
    encode,
    in_runs,
    instance_here,
    of_runs,
)
from protomq._types import MessageQueue
from protomq.errors import ConfigurationError

Q0 = MessageQueue("t", "b", 0)
OFFSETS = st.dictionaries(
    st.builds(MessageQueue, st.text(max_size=9), st.text(max_size=9), st.integers(0, 1 << 31)),
    st.builds(StoredOffset, *[st.integers(0, (1 << 63) - 1)] * 3, st.sets(st.integers(0, 200)).map(in_runs)),
)


@given(OFFSETS)
def test_what_is_encoded_is_decoded(offsets: dict[MessageQueue, StoredOffset]) -> None:
    assert decode(encode(offsets)) == offsets


@given(OFFSETS, st.data())
def test_what_was_changed_is_another_text_of_the_same_or_is_refused(
    offsets: dict[MessageQueue, StoredOffset], data: st.DataObject
) -> None:
    octets = bytearray(encode(offsets))
    octets[data.draw(st.integers(0, len(octets) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = decode(bytes(octets))
    except ValueError:
        return
    # The epochs are help, not truth: with another one, a fork may be seen late.
    assert {queue: stored[:2] for queue, stored in found.items()} == {
        queue: stored[:2] for queue, stored in offsets.items()
    }
    # What is skipped has to be true.
    assert all(stored.done in ((), offsets[queue].done) for queue, stored in found.items())


@given(st.sets(st.integers(0, 50)))
def test_offsets_in_runs_are_those_offsets(offsets: set[int]) -> None:
    runs = in_runs(offsets)
    assert of_runs(runs) == offsets
    assert all(first + count < following for (first, count), (following, _) in pairwise(runs))


def test_a_file_of_an_earlier_version_has_no_epochs() -> None:
    octets = encode({Q0: StoredOffset(5, 6, 7)})
    assert decode(octets[: octets.index(b', "log_epochs"')] + b"}") == {Q0: StoredOffset(5, 6)}


def test_a_file_of_an_earlier_version_says_nothing_of_what_is_done() -> None:
    octets = encode({Q0: StoredOffset(5, 6, 7, ((8, 2),))})
    assert decode(octets) == {Q0: StoredOffset(5, 6, 7, ((8, 2),))}
    assert decode(octets[: octets.index(b', "done_crc32"')] + b"}") == {Q0: StoredOffset(5, 6, 7)}


def test_a_cut_file_is_refused() -> None:
    octets = encode({Q0: StoredOffset(5, 6)})
    for size in range(len(octets) - 1):
        with pytest.raises(ValueError):
            decode(octets[:size])


def test_a_file_is_kept_over_restarts_and_belongs_to_one(tmp_path: Path) -> None:
    first = LocalOffsets(str(tmp_path / "new"), "g%1")
    assert first.open() == {}
    first.save({Q0: StoredOffset(5, 6)})
    first.save({Q0: StoredOffset(7, 6)})
    with pytest.raises(ConfigurationError, match="give this one a name of its own"):
        LocalOffsets(str(tmp_path / "new"), "g%1").open()
    other = LocalOffsets(str(tmp_path / "new"), "g%1", "two")
    assert other.open() == {}
    other.close()
    first.close()
    again = LocalOffsets(str(tmp_path / "new"), "g%1")
    assert again.open() == {Q0: StoredOffset(7, 6)}
    again.close()


def test_a_folder_that_was_deleted_meanwhile_is_made_again_and_belongs_to_one(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    first = LocalOffsets(str(folder), "g")
    first.open()
    first.save({Q0: StoredOffset(5, 6)})
    shutil.rmtree(folder)
    first.save({Q0: StoredOffset(7, 6)})
    with pytest.raises(ConfigurationError, match="another consumer"):
        LocalOffsets(str(folder), "g").open()
    first.close()
    again = LocalOffsets(str(folder), "g")
    assert again.open() == {Q0: StoredOffset(7, 6)}
    again.close()


def test_a_damaged_file_is_put_aside_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = LocalOffsets(str(tmp_path), "g")
    made.path.write_bytes(b"{}")
    assert made.open() == {}
    assert "is damaged, put aside as g.damaged" in caplog.text
    assert (tmp_path / "g.damaged").read_bytes() == b"{}"
    made.save({Q0: StoredOffset(1, 2)})
    made.close()
    assert made.open() == {Q0: StoredOffset(1, 2)}
    made.close()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="choose offset_folder"):
        LocalOffsets(str(tmp_path / "file" / "x"), "g").open()


def test_a_file_that_cannot_be_read_is_told_and_left_to_others(tmp_path: Path) -> None:
    made = LocalOffsets(str(tmp_path), "g")
    made.path.mkdir()
    with pytest.raises(ConfigurationError, match=r"cannot be read from .*choose offset_folder"):
        made.open()
    made.path.rmdir()
    other = LocalOffsets(str(tmp_path), "g")
    assert other.open() == {}
    other.close()


def test_processes_of_a_worker_have_instances_of_their_own() -> None:
    number = "PROTOMQ_WORKER_PROCESS"
    assert [instance_here("", environment) for environment in ({}, {number: "0"}, {number: "1"}, {number: "12"})] == ["", "", "#1", "#12"]
    assert [instance_here("mine", {number: text}) for text in ("0", "2")] == ["mine", "mine#2"]
    for wrong in ("", "x", "-1", "\u0661"):
        with pytest.raises(ConfigurationError, match="the number of this process"):
            instance_here("mine", {number: wrong})


def test_whenever_a_save_is_killed_the_file_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    made = LocalOffsets(str(tmp_path), "g")
    made.open()
    old, new = {Q0: StoredOffset(5, 6)}, {Q0: StoredOffset(1 << 40, 6)}
    made.save(old)
    found: list[dict[MessageQueue, StoredOffset]] = []

    def look(frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        # Before each line of `save`, and at its end.
        if frame.f_code is LocalOffsets.save.__code__ and event in ("line", "return"):
            found.append(decode(made.path.read_bytes()))
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        made.save(new)
    finally:
        sys.settrace(before)
    made.close()
    changes = [one for one, following in zip(found, [*found[1:], None], strict=True) if one != following]
    assert changes == [old, new]
    assert found.count(old) >= 4, "it looked at each step"


def test_the_new_file_is_synced_before_it_takes_the_name_and_the_folder_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a power cut leaves one of the two as well."""
    made = LocalOffsets(str(tmp_path), "g")
    made.open()
    steps: list[tuple[str, bytes]] = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(number: int) -> None:
        place = Path(os.readlink(f"/proc/self/fd/{number}"))
        steps.append((place.name, b"" if place.is_dir() else place.read_bytes()))
        fsync(number)

    def note_replace(source: Path, target: Path) -> None:
        steps.append(("rename", source.read_bytes()))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    offsets = {Q0: StoredOffset(5, 6)}
    made.save(offsets)
    made.close()
    octets = encode(offsets)
    assert steps == [("g.new", octets), ("rename", octets), (tmp_path.name, b"")]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_save_that_fails_leaves_the_old_file_and_the_next_one_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    made = LocalOffsets(str(tmp_path), "g")
    made.open()
    made.save({Q0: StoredOffset(5, 6)})

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match="no space"):
            made.save({Q0: StoredOffset(7, 6)})
    assert decode(made.path.read_bytes()) == {Q0: StoredOffset(5, 6)}
    made.save({Q0: StoredOffset(9, 6)})
    made.close()
    assert made.open() == {Q0: StoredOffset(9, 6)}
    made.close()


def test_a_folder_that_no_disk_has_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"offsets cannot be kept at .*: embedded null byte; choose offset_folder"):
        LocalOffsets(str(tmp_path / "a\0b"), "g").open()


def test_a_save_that_a_cancelled_task_has_left_behind_does_not_mix_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = LocalOffsets(str(tmp_path), "g")
    file.open()
    in_midst, goes_on = threading.Event(), threading.Event()
    sync = os.fsync

    def slow_sync(descriptor: int) -> None:
        if not in_midst.is_set():
            in_midst.set()
            assert goes_on.wait(60)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", slow_sync)
    with ThreadPoolExecutor(2) as pool:
        left_behind = pool.submit(file.save, {Q0: StoredOffset(1, 7)})
        assert in_midst.wait(60)
        next_one = pool.submit(file.save, {Q0: StoredOffset(2, 7)})
        wait((next_one,), 0.2)
        goes_on.set()
        assert (left_behind.exception(60), next_one.exception(60)) == (None, None)
    file.close()
    assert file.open() == {Q0: StoredOffset(2, 7)}
    file.close()
