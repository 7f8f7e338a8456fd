"""The checker on histories written by hand: each broken promise is named, a kept one is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.chaos.checker import Promise, check_commits, check_history, parse_log
from tests.chaos.history import Event, History, load_history

pytestmark = pytest.mark.chaos

SYNC, ASYNC = Promise(), Promise(suffix_loss=True)


def send(
    history: History,
    *ids: str,
    offset: int,
    physical: int,
    process: str = "p",
    repeated: bool = False,
) -> None:
    call = history.invoke(process, "send", topic="t", queue=0, ids=list(ids))
    call.ok(status="SEND_OK", queue=0, offset=offset, physical=physical, repeated=repeated)


def seen(
    offset: int, id_: str, *, physical: int | None = None, right: bool = True, time_ms: int = 1
) -> list[object]:
    return [offset, id_, right, time_ms, offset * 100 if physical is None else physical]


def scan(history: History, *records: list[object], start: int = 0, end: int | None = None) -> None:
    end = len(records) if end is None else end
    queue = {
        "topic": "t",
        "queue": 0,
        "min": start,
        "end": end,
        "records": list(records),
        "holes": [],
    }
    history.invoke("checker", "scan").ok(queues=[queue])


def three(history: History) -> None:
    for number in range(3):
        send(history, f"p-{number}-1", offset=number, physical=number * 100)


def poll(history: History, offset: int, *records: list[object], following: int) -> None:
    history.invoke("r", "poll", topic="t", queue=0, offset=offset).ok(
        records=list(records), next=following
    )


def all_is_well(history: History) -> None:
    three(history)
    scan(history, *(seen(number, f"p-{number}-1") for number in range(3)))


def a_suffix_is_lost(history: History) -> None:
    three(history)
    history.fact("crash", kind="power", flushed=100)
    scan(history, seen(0, "p-0-1"))
    send(history, "p-9-1", offset=1, physical=100)
    scan(history, seen(0, "p-0-1"), seen(1, "p-9-1"))


def a_hole_is_lost(history: History) -> None:
    three(history)
    history.fact("crash", kind="power", flushed=0)
    scan(history, seen(0, "p-0-1"), seen(2, "p-2-1"), end=3)


def one_moves_up(history: History) -> None:
    three(history)
    history.fact("crash", kind="power", flushed=0)
    scan(history, seen(0, "p-0-1"), seen(1, "p-2-1", physical=200))


def more_is_lost_than_was_unsynced(history: History) -> None:
    three(history)
    history.fact("crash", kind="power", flushed=200)
    scan(history, seen(0, "p-0-1"))


def one_is_lost(history: History) -> None:
    three(history)
    history.fact("crash", kind="kill", flushed=None)
    scan(history, seen(0, "p-0-1"), seen(1, "p-1-1"))


def a_body_is_wrong(history: History) -> None:
    three(history)
    scan(history, seen(0, "p-0-1"), seen(1, "p-1-1", right=False), seen(2, "p-2-1"))


def a_refused_send_is_there(history: History) -> None:
    history.invoke("p", "send", topic="t", queue=0, ids=["p-0-1"]).fail("DISK_FULL")
    scan(history, seen(0, "p-0-1"))


def an_uncertain_send_is_there_once(history: History) -> None:
    history.invoke("p", "send", topic="t", queue=0, ids=["p-0-1"]).info("REQUEST_TIMEOUT")
    scan(history, seen(0, "p-0-1"))


def an_uncertain_send_is_there_twice(history: History) -> None:
    history.invoke("p", "send", topic="t", queue=0, ids=["p-0-1"]).info("REQUEST_TIMEOUT")
    scan(history, seen(0, "p-0-1"), seen(1, "p-0-1"))


def a_batch_is_torn(history: History) -> None:
    send(history, "p-0-1", "p-1-1", offset=0, physical=0)
    history.fact("crash", kind="power", flushed=0)
    scan(history, seen(0, "p-0-1", physical=0))


def nobody_sent_it(history: History) -> None:
    three(history)
    scan(history, *(seen(number, f"p-{number}-1") for number in range(3)), seen(3, "x-0-1"))


def an_offset_has_two_values(history: History) -> None:
    send(history, "p-0-1", offset=0, physical=0)
    send(history, "q-0-1", offset=0, physical=0, process="q")


def an_offset_is_left_out(history: History) -> None:
    three(history)
    scan(history, seen(0, "p-0-1"), seen(1, "p-1-1"), seen(3, "p-2-1"), end=4)


def sends_go_back(history: History) -> None:
    send(history, "p-0-1", offset=5, physical=0)
    send(history, "p-1-1", offset=4, physical=100)


def a_reader_skips(history: History) -> None:
    three(history)
    poll(history, 0, seen(0, "p-0-1"), following=1)
    poll(history, 2, seen(2, "p-2-1"), following=3)


def time_goes_back(history: History) -> None:
    three(history)
    scan(
        history,
        seen(0, "p-0-1", time_ms=9),
        seen(1, "p-1-1", time_ms=8),
        seen(2, "p-2-1", time_ms=9),
    )


def an_error_that_nobody_knows(history: History) -> None:
    history.invoke("p", "send", topic="t", queue=0, ids=["p-0-1"]).info("INTERNAL")


@pytest.mark.parametrize(
    ("write", "promise", "broken"),
    [
        (all_is_well, SYNC, set()),
        (a_suffix_is_lost, ASYNC, set()),
        (an_uncertain_send_is_there_once, SYNC, set()),
        (a_suffix_is_lost, SYNC, {"A1"}),
        (a_hole_is_lost, ASYNC, {"A5"}),
        (one_moves_up, ASYNC, {"A7"}),
        (more_is_lost_than_was_unsynced, ASYNC, {"A1"}),
        (one_is_lost, ASYNC, {"A1"}),
        (a_body_is_wrong, SYNC, {"A1"}),
        (a_refused_send_is_there, SYNC, {"A2"}),
        (an_uncertain_send_is_there_twice, SYNC, {"A3"}),
        (a_batch_is_torn, ASYNC, {"A4"}),
        (nobody_sent_it, SYNC, {"A6"}),
        (an_offset_has_two_values, SYNC, {"A7"}),
        (an_offset_is_left_out, SYNC, {"B1"}),
        (sends_go_back, SYNC, {"B2"}),
        (a_reader_skips, SYNC, {"B3"}),
        (time_goes_back, SYNC, {"B5"}),
        (an_error_that_nobody_knows, SYNC, {"I1"}),
    ],
)
def test_the_checker_names_what_is_broken(
    write: Callable[[History], None], promise: Promise, broken: set[str]
) -> None:
    history = History()
    write(history)
    names = {violation.invariant for violation in check_history(history.events, promise)}
    assert names == broken if not broken else broken <= names, names


def test_a_history_goes_to_a_file_and_back(tmp_path_factory: pytest.TempPathFactory) -> None:
    history = History()
    all_is_well(history)
    path = tmp_path_factory.mktemp("history") / "history.jsonl"
    history.save(path)
    events: list[Event] = load_history(path.read_text().splitlines())
    assert events == history.events


def test_garbage_behind_the_end_of_a_log_is_seen() -> None:
    report = parse_log({"commitlog/00000000000000000000": bytes(100) + b"x" + bytes(100)})
    assert [violation.invariant for violation in report.violations] == ["D5"]


def commit(history: History, offset: int, end: str = "ok") -> None:
    call = history.invoke("c", "commit", group="g", topic="t", queue=0, offset=offset)
    if end == "ok":
        call.ok()
    elif end == "fail":
        call.fail("DISK_FULL")
    else:
        call.info("CONNECTION_LOST")


def look(history: History, offset: int | None) -> None:
    offsets = [] if offset is None else [[0, offset]]
    history.invoke("checker", "committed").ok(group="g", topic="t", offsets=offsets)


@pytest.mark.parametrize(
    ("ends", "allowed"),
    [
        (("ok", "ok", "ok"), {3}),
        (("ok", "ok", "info"), {2, 3}),
        (("ok", "info", "info"), {1, 2, 3}),
        (("ok", "info", "ok"), {2, 3}),
        (("ok", "fail", "fail"), {1}),
        (("info", "fail", "fail"), {None, 1}),
    ],
)
def test_an_acknowledged_commit_never_falls_back(
    ends: tuple[str, ...], allowed: set[int | None]
) -> None:
    for offset in (None, 1, 2, 3, 4):
        history = History()
        for number, end in enumerate(ends):
            commit(history, number + 1, end)
        history.fact("crash", kind="kill", flushed=None)
        look(history, offset)
        assert bool(check_commits(history.events, ASYNC)) == (offset not in allowed)


def test_a_commit_of_which_nobody_knows_is_done_by_the_broker_that_had_it_or_never() -> None:
    for epoch, wrong in ((0, 0), (1, 1)):
        history = History()
        commit(history, 1, "info")
        history.fact("crash", kind="kill", flushed=None)
        history.epoch = epoch
        commit(history, 2)
        look(history, 1)
        assert len(check_commits(history.events, ASYNC)) == wrong


def test_a_power_cut_may_take_commits_back_only_where_that_is_allowed_and_once() -> None:
    for promise, wrong in ((SYNC, 1), (ASYNC, 0)):
        history = History()
        commit(history, 1)
        commit(history, 2)
        history.fact("crash", kind="power", flushed=None)
        look(history, 1)
        assert len(check_commits(history.events, promise)) == wrong
        look(history, 2)
        assert len(check_commits(history.events, promise)) == wrong + 1
