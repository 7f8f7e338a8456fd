"""Company: who is waited for in a line, how long, and when no longer."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import pytest

from protomq._company import PAUSE_MIN_S, Company
from protomq._lines import Entry, Line
from tests.support.waiting import wait_for

LONG_S = 60.0
"""A wait that takes this long fails a test."""


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def in_thread(run: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def joined(*threads: threading.Thread) -> bool:
    for thread in threads:
        thread.join(10)
    return not any(thread.is_alive() for thread in threads)


def test_a_leader_waits_until_all_who_were_answered_together_are_there() -> None:
    company = Company(together_s=LONG_S)
    company.expect(3)
    company.arrive()  # the leader
    leader = in_thread(company.wait)
    wait_for(lambda: company._gate is not None, pause_s=0.001)
    company.arrive()
    assert leader.is_alive()
    company.arrive()
    assert joined(leader)
    company.wait()  # nobody is missing


def test_nobody_waits_for_one_who_was_answered_alone() -> None:
    company = Company(together_s=LONG_S)
    company.expect(1)
    assert not company.is_expected
    company.wait()


def test_who_comes_late_waits_for_nobody() -> None:
    clock = Clock()
    company = Company(together_s=LONG_S, clock=clock)
    company.expect(3)
    clock.now_s = LONG_S
    company.wait()
    assert not company.is_expected
    # It is not that the wait was of no use: there was none.
    company.expect(2)
    assert company.is_expected


def test_a_wait_that_was_of_no_use_is_followed_by_a_pause_that_grows() -> None:
    clock = Clock()
    company = Company(together_s=0.001, clock=clock)
    pauses_s: list[float] = []
    for _ in range(3):
        began_s = clock.now_s
        company.expect(2)
        company.wait()  # for somebody who does not come
        company.expect(2)
        assert not company.is_expected
        while not company.is_expected:
            clock.now_s += PAUSE_MIN_S / 2
            company.expect(2)
        pauses_s.append(clock.now_s - began_s)
        company.arrive()
        company.arrive()
    assert pauses_s[0] < pauses_s[1] < pauses_s[2] < 0.1


def test_only_one_of_several_leaders_waits() -> None:
    company = Company(together_s=LONG_S)
    company.expect(4)
    company.arrive()
    leader = in_thread(company.wait)
    wait_for(lambda: company._gate is not None, pause_s=0.001)
    company.arrive()
    company.wait()  # the other one
    company.arrive()
    company.arrive()
    assert joined(leader)


def test_a_leader_that_is_interrupted_leaves_no_gate_behind() -> None:
    company = Company(together_s=LONG_S)
    company.expect(2)

    def interrupt() -> None:
        wait_for(lambda: company._gate is not None, pause_s=0.001)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    interrupter = in_thread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        company.wait()
    assert joined(interrupter)
    assert not company.is_expected
    company.wait()


def test_a_line_sends_its_company_in_one_request() -> None:
    company = Company(together_s=LONG_S)
    line = Line("T", None, count_max=1000, size_max_bytes=1 << 20, company=company)
    entries = [Entry((b"", "", "", b"", 0, 0, 0), 100.0) for _ in range(4)]
    company.expect(3)
    assert line.enter(entries[0])
    gathered = entries[:1]
    leader = in_thread(lambda: line.gather(gathered))
    wait_for(lambda: company._gate is not None, pause_s=0.001)
    for follower in entries[1:3]:
        assert not line.enter(follower)
        line.arrive()
    assert joined(leader)
    assert gathered == entries[:3]
    assert not line.enter(entries[3])
    assert line.leave() == ([entries[3]], entries[3])


def test_a_line_without_company_gathers_nobody() -> None:
    line = Line("T", None, count_max=1000, size_max_bytes=1 << 20)
    first, second = (Entry((b"", "", "", b"", 0, 0, 0), 100.0) for _ in range(2))
    assert line.enter(first)
    assert not line.enter(second)
    gathered = [first]
    line.gather(gathered)
    assert gathered == [first]
