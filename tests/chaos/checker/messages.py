"""Invariants A, B and I over a history.

What it looks at:

    send    args {topic, queue or None, ids, attempts}                       ok {status, queue, offset, physical, repeated}
    poll    args {topic, queue, offset}: one reader, one queue               ok {records: [Seen], next}
    scan    args {}: everything, by the checker at a quiet point             ok {queues: [{topic, queue, min, end, records: [Seen], holes}]}
    crash   args {kind: "kill" or "power", flushed: position or None}
    delete  args {below}: the log begins there now

`Seen` is [queue offset, id, body is right, store time, physical offset].

How loss is judged: everything that was acknowledged or read is known. A scan must show all that is known, at its place. After a
power cut under a promise that allows it, known messages may be missing if they are a suffix of the log (A5) that begins at or
behind what had been flushed; they are forgotten then. Nothing else may ever be missing. Only what was told while a power cut was
under way (after its event, before the next scan) is worth nothing: the cut takes a moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.history import Event

from .violations import Violation

ALLOWED_REASONS = frozenset(
    {
        "SYSTEM_BUSY", "DISK_FULL", "TOO_MANY", "SHUTTING_DOWN", "STORE_FAILED", "SEQUENCE_EXPIRED", "PRODUCER_FENCED", "DEADLINE_EXCEEDED",
        "CONNECT_FAILED", "CONNECTION_LOST", "REQUEST_TIMEOUT", "NO_ROUTE", "TOPIC_NOT_FOUND", "QUEUE_NOT_FOUND", "MESSAGE_TOO_LARGE",
        "INVALID_ARGUMENT", "CORRUPT_LOG", "SEND_IN_FLIGHT", "BATCH_INCOMPLETE", "FLUSH_DISK_TIMEOUT", "CRASHED", "ONE_WAY",
        "QUEUE_HEALING", "SEND_OUT_OF_ORDER",
    }
)  # fmt: skip

Place = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Promise:
    """What the system under test has promised.

    Attributes:
        suffix_loss: a power cut may cost a suffix of the log (ASYNC_FLUSH).
        loss_window_ns: and then only what was acknowledged so shortly before; None: what was flushed is known exactly.
        once: an uncertain send is stored at most once (producers with ids, whose retries are recognised).
        holes: parts of the log may be in quarantine: known messages there may be missing if the scan says so.
        allowed_reasons: of errors.
    """

    suffix_loss: bool = False
    loss_window_ns: int | None = None
    once: bool = True
    holes: bool = False
    allowed_reasons: frozenset[str] = ALLOWED_REASONS


@dataclass(slots=True)
class _Send:
    """A send: its ids, what came of it, how often it may be stored."""

    process: str
    topic: str
    ids: list[str]
    attempts: int
    outcome: str = "open"


@dataclass(slots=True)
class _Known:
    """A message that somebody was told of: acknowledged or read."""

    id: str
    physical: int
    ns: int
    how: str


@dataclass(slots=True)
class _State:
    promise: Promise
    sends: dict[str, _Send] = field(default_factory=dict)  # by the id of each of its messages
    open_calls: dict[int, _Send] = field(default_factory=dict)
    known: dict[Place, _Known] = field(default_factory=dict)
    # process, topic, queue -> last offset.
    last_sent: dict[tuple[str, str, int], int] = field(default_factory=dict)
    next_poll: dict[tuple[str, str, int], int] = field(default_factory=dict)
    deleted_below: int = 0
    power_cuts: list[Event] = field(default_factory=list)  # since the last scan
    found: list[Violation] = field(default_factory=list)

    def say(self, invariant: str, message: str) -> None:
        self.found.append(Violation(invariant, message))


def check_history(events: Sequence[Event], promise: Promise) -> list[Violation]:
    """All violations, in the order of the history."""
    state = _State(promise)
    for event in events:
        if event.type in ("fail", "info") and event.process != "nemesis":
            reason = event.result.get("reason", "")
            if reason not in promise.allowed_reasons:
                state.say(
                    "I1",
                    f"{event.process} {event.op}: {reason!r}: {event.result.get('message', '')}",
                )
        if event.op == "send":
            _take_send(state, event)
        elif event.op == "poll":
            _take_poll(state, event)
        elif event.op == "scan" and event.type == "ok":
            _take_scan(state, event)
        elif event.op == "crash" and event.args["kind"] == "power":
            state.power_cuts.append(event)
        elif event.op == "delete":
            state.deleted_below = max(state.deleted_below, event.args["below"])
    return state.found


def _take_send(state: _State, event: Event) -> None:
    args = event.args
    if event.type == "invoke":
        send = _Send(event.process, args["topic"], list(args["ids"]), args.get("attempts", 1))
        for id_ in send.ids:
            earlier = state.sends.get(id_)
            if earlier is not None:  # the same send again, by hand
                send.attempts += earlier.attempts
                if earlier.outcome != "fail":
                    send.outcome = earlier.outcome
            state.sends[id_] = send
        state.open_calls[event.call] = send
        return
    ended = state.open_calls.pop(event.call)
    if event.type != "ok" or event.result["status"] != "SEND_OK":
        definite = event.type == "fail"
        if ended.outcome == "open":
            ended.outcome = "fail" if definite else "info"
        return
    ended.outcome = "ok"
    result, topic = event.result, args["topic"]
    queue, offset = result["queue"], result["offset"]
    if args.get("queue") is not None and queue != args["queue"] and not result.get("repeated"):
        state.say(
            "A1",
            f"{args['ids'][0]} was for queue {args['queue']} and is acknowledged in queue {queue}",
        )
    if not result.get("repeated"):
        key = (event.process, topic, queue)
        if offset <= state.last_sent.get(key, -1):
            state.say(
                "B2",
                f"{event.process} was told offset {offset} of {topic}/{queue} after {state.last_sent[key]}",
            )
        state.last_sent[key] = offset + len(ended.ids) - 1
    for index, id_ in enumerate(ended.ids):
        physical = result["physical"] if index == 0 else -1
        _learn(state, (topic, queue, offset + index), id_, physical, event.ns, "acknowledged")


def _learn(state: _State, place: Place, id_: str, physical: int, ns: int, how: str) -> None:
    known = state.known.get(place)
    if known is None:
        state.known[place] = _Known(id_, physical, ns, how)
        return
    if known.id != id_:
        state.say("A7", f"{_name(place)} is {known.id} ({known.how}) and {id_} ({how})")
    if physical >= 0:
        if known.physical >= 0 and known.physical != physical:
            state.say("D1", f"{_name(place)} stands at {known.physical} and at {physical}")
        known.physical = physical


def _take_poll(state: _State, event: Event) -> None:
    if event.type != "ok":
        return
    args, records = event.args, event.result["records"]
    topic, queue = args["topic"], args["queue"]
    key = (event.process, topic, queue)
    expected = state.next_poll.get(key)
    if expected is not None and args["offset"] != expected and not args.get("seek"):
        state.say(
            "B3",
            f"{event.process} went on in {topic}/{queue} at {args['offset']}, not at {expected}",
        )
    _check_records(state, event, topic, queue, records, args["offset"])
    state.next_poll[key] = event.result["next"]
    if records and event.result["next"] != records[-1][0] + 1:
        state.say(
            "B3",
            f"{event.process} was sent on in {topic}/{queue} to {event.result['next']} behind {records[-1][0]}",
        )


def _check_records(
    state: _State, event: Event, topic: str, queue: int, records: list[list[Any]], offset: int
) -> None:
    """What holds for records that were read in order, from `offset` on without a gap."""
    last_time = last_physical = -1
    for record in records:
        at, id_, body_right, store_time_ms, physical = record
        place = (topic, queue, at)
        if at != offset:
            state.say("B1", f"{event.process} read {_name(place)} where {offset} was next")
        offset = at + 1
        send = state.sends.get(id_)
        if send is None or send.topic != topic:
            state.say("A6", f"{_name(place)} is {id_!r}, which nobody sent there")
            continue
        if not body_right:
            state.say("A1", f"the body of {id_} at {_name(place)} is not what was sent")
        if store_time_ms < last_time or physical <= last_physical:
            state.say(
                "B5",
                f"{_name(place)}: stored at {store_time_ms}, position {physical}, behind {last_time}, {last_physical}",
            )
        last_time, last_physical = store_time_ms, physical
        _learn(state, place, id_, physical, event.ns, "read")


def _take_scan(state: _State, event: Event) -> None:
    queues = event.result["queues"]
    present: dict[Place, list[Any]] = {
        (queue["topic"], queue["queue"], record[0]): record
        for queue in queues
        for record in queue["records"]
    }
    holes = {
        (queue["topic"], queue["queue"], at) for queue in queues for at in queue.get("holes", ())
    }
    starts = {(queue["topic"], queue["queue"]): queue["min"] for queue in queues}
    _judge_losses(state, present, holes, starts)
    for queue in queues:
        _check_scanned_queue(state, event, queue)
    _check_occurrences(state, present, holes, starts)
    state.power_cuts.clear()


def _judge_losses(
    state: _State,
    present: dict[Place, list[Any]],
    holes: set[Place],
    starts: dict[tuple[str, int], int],
) -> None:
    missing = []
    for place, known in state.known.items():
        record = present.get(place)
        if record is not None and record[1] == known.id:
            known.physical = record[4]
            continue
        if state.promise.holes and place in holes:
            continue
        if place[2] < starts.get(place[:2], 0) and known.physical < state.deleted_below:
            continue
        missing.append(place)
    if state.power_cuts:  # what was told while the power went proves nothing
        began_ns = state.power_cuts[-1].ns
        told_meanwhile = [place for place in missing if state.known[place].ns > began_ns]
        for place in told_meanwhile:
            del state.known[place]
        if told_meanwhile:
            missing = [place for place in missing if place in state.known]
            state.last_sent.clear()
            state.next_poll.clear()
    if not missing:
        return
    elsewhere = {record[1]: place for place, record in present.items()}
    for place in missing:
        id_ = state.known[place].id
        if id_ in elsewhere:
            state.say("A7", f"{id_} was at {_name(place)} and is at {_name(elsewhere[id_])}")
    _fill_in_positions(state)
    cuts = state.power_cuts
    if not state.promise.suffix_loss or not cuts:
        for place in missing:
            known, record = state.known[place], present.get(place)
            there = f"{record[1]} stands there" if record else "nothing is there"
            state.say("A1", f"{known.id}, {known.how} at {_name(place)}: {there}")
    else:
        # Each place is judged by the earliest cut it had lived through.
        lost = min(state.known[place].physical for place in missing)
        first_cut = cuts[0]
        flushed = max((cut.args.get("flushed") or 0 for cut in cuts), default=0)
        window = state.promise.loss_window_ns
        gone = set(missing)
        for place, known in state.known.items():
            if place not in gone and known.physical > lost and known.ns < first_cut.ns:
                state.say(
                    "A5",
                    f"{known.id} at position {known.physical} is there, what stood at {lost} is not: a hole, no suffix",
                )
                break
        for place in missing:
            known = state.known[place]
            if known.physical < flushed:
                state.say(
                    "A1",
                    f"{known.id} at {_name(place)}, position {known.physical}, is lost: {flushed} had been flushed",
                )
            if window is not None and known.ns < first_cut.ns - window:
                age = (first_cut.ns - known.ns) / 1e6
                state.say(
                    "A5",
                    f"{known.id} at {_name(place)} is lost, {age:.0f} ms after it was {known.how}",
                )
        state.last_sent.clear()
        state.next_poll.clear()
    for place in missing:
        del state.known[place]


def _fill_in_positions(state: _State) -> None:
    """A batch tells the position of its first record only; the others stand right behind it."""
    last = -1
    for place in sorted(state.known):
        known = state.known[place]
        if known.physical < 0:
            known.physical = last
        last = known.physical


def _check_scanned_queue(state: _State, event: Event, queue: dict[str, Any]) -> None:
    topic, number, holes = queue["topic"], queue["queue"], set(queue.get("holes", ()))
    run: list[list[Any]] = []
    expected = queue["min"]
    runs = []
    for record in queue["records"]:
        while expected in holes:
            expected += 1
            if run:
                runs.append(run)
                run = []
        if record[0] != expected:
            state.say("B1", f"{topic}/{number}: {record[0]} where {expected} is next")
            expected = record[0]
            if run:
                runs.append(run)
                run = []
        run.append(record)
        expected += 1
    if run:
        runs.append(run)
    while expected in holes:
        expected += 1
    if expected != queue["end"]:
        state.say(
            "B1", f"{topic}/{number}: {queue['end']} is its end, the last message is {expected - 1}"
        )
    for part in runs:
        _check_records(state, event, topic, number, part, part[0][0])


def _check_occurrences(
    state: _State,
    present: dict[Place, list[Any]],
    holes: set[Place],
    starts: dict[tuple[str, int], int],
) -> None:
    places: dict[str, list[Place]] = {}
    for place, record in present.items():
        places.setdefault(record[1], []).append(place)
    done: set[int] = set()
    for id_, found in places.items():
        send = state.sends.get(id_)
        if send is None:
            continue
        if send.outcome == "fail":
            state.say("A2", f"{id_} was refused for good and stands at {_name(found[0])}")
        limit = 1 if state.promise.once else send.attempts
        if len(found) > limit:
            state.say(
                "A3", f"{id_} is stored {len(found)} times: {', '.join(map(_name, sorted(found)))}"
            )
        if id(send) not in done and len(send.ids) > 1:
            done.add(id(send))
            _check_batch(state, send, places, holes, starts)


def _check_batch(
    state: _State,
    send: _Send,
    places: dict[str, list[Place]],
    holes: set[Place],
    starts: dict[tuple[str, int], int],
) -> None:
    first = sorted(places.get(send.ids[0], ()))
    expected = [
        [(place[0], place[1], place[2] + index) for place in first]
        for index in range(len(send.ids))
    ]
    actual = [sorted(places.get(id_, ())) for id_ in send.ids]
    if actual == expected:
        return
    if any(place[:2] in starts and starts[place[:2]] > 0 for group in actual for place in group):
        return  # its head may have been deleted for its age
    if holes and any(not group for group in actual):
        return
    state.say(
        "A4",
        f"the batch {send.ids[0]} … {send.ids[-1]} is torn: {actual[0][:1]} … {actual[-1][:1]}",
    )


def _name(place: Place) -> str:
    return f"{place[0]}/{place[1]}@{place[2]}"
