"""Log time that two threads keep at once: what is kept last is the later of the two."""

from __future__ import annotations

import threading
from pathlib import Path

from protomq_broker.log_time import LogTime
from protomq_broker.log_time_file import LogTimeFile
from protomq_broker.store.files.disk import Disk

from .store.log_helpers import ManualClock

WAIT_S = 5.0
AHEAD_MS = 3_600_000


class SlowDisk(Disk):
    """Its first write to a file waits until it may go on."""

    def __init__(self) -> None:
        self.has_come, self.may_go = threading.Event(), threading.Event()

    def create(self, path: str) -> int:
        if not self.has_come.is_set():
            self.has_come.set()
            assert self.may_go.wait(WAIT_S)
        return super().create(path)


def test_what_housekeeping_keeps_is_no_older_than_what_a_master_has_said(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    clock, disk = ManualClock(), SlowDisk()

    def file(of: Disk) -> LogTimeFile:
        return LogTimeFile(of, str(tmp_path), "boot", clock.monotonic_ms)

    log_time = LogTime(clock, 0, file(disk))
    housekeeping = threading.Thread(target=log_time.save)
    housekeeping.start()
    assert disk.has_come.wait(WAIT_S)
    follower = threading.Thread(target=log_time.follow, args=(clock.now_ms() + AHEAD_MS,))
    follower.start()
    follower.join(0.2)  # it may have to wait for the other one
    disk.may_go.set()
    housekeeping.join(WAIT_S)
    follower.join(WAIT_S)
    assert LogTime(clock, 0, file(Disk())).now_ms() == clock.now_ms() + AHEAD_MS
