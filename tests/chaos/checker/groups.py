"""What the members of a group did, and what of it is wrong. Pure: times come with the events.

    B3    nobody begins below what he was told; a queue's members get each message once, and in order where the queue has order
    B4    no two have a queue: no member has a message of it while another one still has one. In order: while it has one itself, either, and
          nobody begins a message before those in front of it were ended, so that one that fails holds up its queue
    C1a   no commit is ahead: all messages below an accepted commit were ended before
    C1b   at least once: each acknowledged message was ended by a member
    C2    a queue that goes from one to another by a join or a leave takes its commit along: no message comes again. After a kill, only what
          was in hand and what was ended within the time of a commit: else somewhen a commit had time to be made, and was lost
    C3    no step back: nobody is told less than what was committed when he asked; accepted commits only grow
    C5    no commit with a token is accepted after another member was given the queue
    C6    take-over: no queue with messages is silent for longer than promised
    C7    a member that was stopped begins nothing of its queues when it wakes, if others have them

What a stopped member had in hand it may finish, and counts; so do messages that come again since their commit was lost with a kill. One
message may be between the check and the listener when a stop falls: it counts, two are wrong. The commit that a stopped member was about to
send is refused when others have its queues, with a lock or without: it excuses nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

from .violations import Violation

PROMISED_S: Final = 2.0
"""A killed member's queues are consumed again within this time."""
REVOKE_S: Final = 1.0
"""How long a queue that goes waits for the listeners of its messages."""
RETURN_S: Final = 2.0
"""Longest pause between two tries of a member to reach a broker that was away. The broker takes its commits when it has heard of it."""
COMMIT_S: Final = 5.0
"""How often a consumer commits by default: what a crash takes back at most."""
WORLD: Final = "world"
"""Who tells what is done to members and brokers, and what producers were told."""
LATE_S: Final = 3.0
"""How much later a busy machine may be."""


class Span(NamedTuple):
    """From a time to a time, in seconds."""

    begin_s: float
    end_s: float

    def meets(self, begin_s: float, end_s: float) -> bool:
        return self.begin_s <= end_s and begin_s <= self.end_s


class Got(NamedTuple):
    """A member has a message."""

    time_s: float
    member: str
    offset: int


class Fetch(NamedTuple):
    """A member asked where the group is in a queue."""

    time_s: float
    began_s: float
    offset: int


@dataclass
class Commit:
    """An offset that went out, and when it was accepted."""

    member: str
    queue: str
    offset: int
    token: int
    sent_s: float
    accepted_s: float | None = None


@dataclass
class GroupHistory:
    """All that is known of a run. `gap_s`, `settle_s`: the settings of its brokers."""

    gap_s: float
    settle_s: float
    is_locked: bool = False
    is_ordered: bool = False
    is_held_up: bool = False
    """Members have one message of a queue at a time, and one that fails comes again before those behind it."""
    commit_s: float = COMMIT_S
    """How often members commit."""
    got: dict[str, list[Got]] = field(default_factory=lambda: defaultdict(list))
    done: dict[str, dict[int, list[tuple[float, str]]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    failed: dict[str, dict[int, list[tuple[float, str]]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    fetches: dict[tuple[str, str], list[Fetch]] = field(default_factory=lambda: defaultdict(list))
    tokens: dict[str, list[tuple[float, str, int]]] = field(default_factory=lambda: defaultdict(list))
    commits: list[Commit] = field(default_factory=list)
    open_commits: dict[tuple[str, int], list[Commit]] = field(default_factory=lambda: defaultdict(list))
    refused: Counter[str] = field(default_factory=Counter)
    refused_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    sent_s: dict[tuple[str, int], float] = field(default_factory=dict)
    """Of acknowledged messages: when they were sent first."""
    acked_s: dict[tuple[str, int], float] = field(default_factory=dict)
    killed_s: dict[str, float] = field(default_factory=dict)
    left_s: dict[str, float] = field(default_factory=dict)
    stops: dict[str, list[Span]] = field(default_factory=lambda: defaultdict(list))
    stopping_s: dict[str, float] = field(default_factory=dict)
    downs: dict[str, list[Span]] = field(default_factory=lambda: defaultdict(list))
    """Of a broker."""
    paces: list[tuple[float, float]] = field(default_factory=list)
    """When, and how many times slower than alone a thread came along: others may be at work on the machine."""

    def pace(self, begin_s: float, end_s: float) -> float:
        """The mean of that time; 1.0 on a quiet machine."""
        found = [pace for time_s, pace in self.paces if begin_s - 1.0 <= time_s <= end_s + 1.0]
        return sum(found) / len(found) if found else 1.0

    def note(self, who: str, line: str) -> str:
        """Takes a line of a member, or of the world around them; the step that it tells."""
        step, time_text, *rest = line.split()
        (self._note_world if who == WORLD else self._note_member)(who, step, float(time_text), rest)
        return step

    def _note_world(self, who: str, step: str, time_s: float, rest: list[str]) -> None:
        match step, rest:
            case "acked", (queue, offset, sent_s):
                self.sent_s[queue, int(offset)], self.acked_s[queue, int(offset)] = float(sent_s), time_s
            case "killed", (member,):
                self.killed_s[member] = time_s
            case "stopped", (member, begin_s):
                self.stops[member].append(Span(float(begin_s), time_s))
            case "down", (broker, begin_s):
                self.downs[broker].append(Span(float(begin_s), time_s))
            case "pace", (pace,):
                self.paces.append((time_s, float(pace)))
            case _:
                raise ValueError(f"{who} said {step!r} {rest}")

    def _note_member(self, member: str, step: str, time_s: float, rest: list[str]) -> None:
        match step, rest:
            case "got", (queue, offset):
                self.got[queue].append(Got(time_s, member, int(offset)))
            case "done", (queue, offset):
                self.done[queue][int(offset)].append((time_s, member))
            case "failed", (queue, offset):
                self.failed[queue][int(offset)].append((time_s, member))
            case "fetched", (queue, offset, began):
                self.fetches[member, queue].append(Fetch(time_s, float(began), int(offset)))
            case "token", (queue, token):
                self.tokens[queue].append((time_s, member, int(token)))
            case "commit", (number, queue, offset, token):
                commit = Commit(member, queue, int(offset), int(token), time_s)
                self.commits.append(commit)
                self.open_commits[member, int(number)].append(commit)
            case "committed", (number, _):
                for commit in self.open_commits.pop((member, int(number))):
                    commit.accepted_s = time_s
            case "refused", (number, reason):
                del self.open_commits[member, int(number)]
                self.refused[reason] += 1
                self.refused_s[member].append(time_s)
            case "stopping", ():
                self.stopping_s[member] = time_s
            case "left", ():
                self.left_s[member] = time_s
            case _:
                raise ValueError(f"{member} said {step!r} {rest}")

    def was_stopped(self, member: str, begin_s: float, end_s: float) -> bool:
        return any(stop.meets(begin_s, end_s) for stop in self.stops[member])


def check_group(history: GroupHistory, counts: Counter[str]) -> list[Violation]:
    """What is wrong; what is only counted goes to `counts`."""
    checks = (_missed, _ahead, _steps_back, _two_owners, _old_tokens, _silences, _woken, _handed_over, _overtaken, _lost_commits)
    return _found_by(checks, history, counts)


def check_owners(history: GroupHistory, counts: Counter[str]) -> list[Violation]:
    """B4, C5 and C6, which hold wherever a group was reset to."""
    return _found_by((_two_owners, _old_tokens, _silences), history, counts)


def _found_by(
    checks: Iterable[Callable[[GroupHistory, Counter[str]], Iterable[Violation]]], history: GroupHistory, counts: Counter[str]
) -> list[Violation]:
    for several in history.got.values():
        several.sort()
    return [found for check in checks for found in check(history, counts)]


def _missed(history: GroupHistory, counts: Counter[str]) -> Iterable[Violation]:
    missing = [f"{queue} {offset}" for queue, offset in history.acked_s if not history.done[queue].get(offset)]
    counts["acked"] += len(history.acked_s)
    if missing:
        yield Violation("C1b", f"{len(missing)} of {len(history.acked_s)} messages were ended by nobody: {sorted(missing)[:5]}")


def _ready_s(history: GroupHistory) -> dict[str, list[float]]:
    """By queue and offset: from when on all messages below it were ended, as far as they are."""
    ready_s: dict[str, list[float]] = {}
    for queue, done in history.done.items():
        times = ready_s[queue] = [0.0]
        while (several := done.get(len(times) - 1)) is not None:
            times.append(max(times[-1], min(several)[0]))
    return ready_s


def _ahead(history: GroupHistory, counts: Counter[str]) -> Iterable[Violation]:
    ready_s = _ready_s(history)
    for commit in history.commits:
        if commit.accepted_s is None:
            continue
        counts["commits"] += 1
        times = ready_s.get(commit.queue, [0.0])
        if commit.offset >= len(times) or times[commit.offset] > commit.accepted_s:
            yield Violation("C1a", f"{commit.member} committed {commit.queue} {commit.offset} before all below it was ended")


def _steps_back(history: GroupHistory, counts: Counter[str]) -> Iterable[Violation]:
    accepted: dict[str, list[Commit]] = defaultdict(list)
    for commit in history.commits:
        if commit.accepted_s is not None:
            accepted[commit.queue].append(commit)
    for queue, commits in accepted.items():
        by_end = sorted(commits, key=lambda one: one.accepted_s or 0.0)
        for member in {one.member for one in commits} | {got.member for got in history.got[queue]}:
            for fetch in history.fetches[member, queue]:
                highest = max((one.offset for one in commits if (one.accepted_s or 0.0) < fetch.began_s), default=-1)
                if fetch.offset < highest:
                    yield Violation("C3", f"{member} was told {queue} {fetch.offset}, {highest} was committed before")
        highest, index = -1, 0
        for commit in sorted(commits, key=lambda one: one.sent_s):
            while index < len(by_end) and (by_end[index].accepted_s or 0.0) < commit.sent_s:
                highest, index = max(highest, by_end[index].offset), index + 1
            if commit.offset < highest:
                yield Violation("C3", f"{commit.member} committed {queue} {commit.offset}, and {highest} was committed before")
    for queue, several in history.got.items():
        last: dict[str, tuple[int, int]] = {}
        seen: dict[str, set[int]] = defaultdict(set)
        for got in several:
            fetches = history.fetches[got.member, queue]
            reign = sum(fetch.began_s < got.time_s for fetch in fetches)
            if not reign:
                yield Violation("B3", f"{got.member} has {queue} {got.offset}, and never asked where the group is")
                continue
            floor = fetches[reign - 1].offset
            before = last.get(got.member)
            is_new = before is None or before[0] != reign
            if is_new:
                seen[got.member].clear()
            if got.offset < floor:
                yield Violation("B3", f"{got.member} has {queue} {got.offset}, and was told {floor}")
            elif got.offset in seen[got.member] and not _has_failed(history, queue, got):
                yield Violation("B3", f"{got.member} has {queue} {got.offset} twice, of one look-up")
            elif history.is_ordered and not is_new and before is not None and not _follows(history, queue, got, before[1]):
                yield Violation("B3", f"{got.member} has {queue} {got.offset} behind {before[1]}")
            elif history.is_ordered and is_new and got.offset != max(floor, 0):
                yield Violation("B3", f"{got.member} begins {queue} with {got.offset}, and was told {floor}")
            seen[got.member].add(got.offset)
            last[got.member] = reign, got.offset


def _has_failed(history: GroupHistory, queue: str, got: Got) -> bool:
    """Whether it failed at this member before, so that it comes again."""
    return any(member == got.member and time_s <= got.time_s for time_s, member in history.failed[queue].get(got.offset, ()))


def _follows(history: GroupHistory, queue: str, got: Got, offset_before: int) -> bool:
    return got.offset == offset_before + 1 or (got.offset == offset_before and _has_failed(history, queue, got))


def _ends_s(history: GroupHistory, queue: str, got: Got) -> tuple[float, bool]:
    """Until when a member certainly has a message, and whether it was ended after a stop."""
    ended = [*history.done[queue].get(got.offset, ()), *history.failed[queue].get(got.offset, ())]
    done_s = min((time_s for time_s, member in ended if member == got.member and time_s >= got.time_s), default=float("inf"))
    ends_s = min(done_s, history.killed_s.get(got.member, float("inf")))
    for stop in history.stops[got.member]:
        if stop.meets(got.time_s, ends_s):
            return min(max(stop.begin_s, got.time_s), ends_s), done_s > stop.end_s and done_s < float("inf")
    return (ends_s if ends_s < float("inf") else got.time_s), False


def _two_owners(history: GroupHistory, counts: Counter[str]) -> Iterable[Violation]:
    on_waking = {got for _, found in _begun_on_waking(history) for _, got in found}
    for queue, several in history.got.items():
        until_s: dict[str, tuple[float, int]] = {}
        for got in several:
            if got in on_waking:
                continue  # C7 judges it.
            for member, (other_s, offset) in until_s.items():
                if (member != got.member or history.is_held_up) and other_s > got.time_s:
                    who = "it" if member == got.member else member
                    yield Violation("B4", f"{got.member} has {queue} {got.offset} while {who} has {offset}")
            ends_s, is_late = _ends_s(history, queue, got)
            counts["finished after waking"] += is_late
            until_s[got.member] = max(until_s.get(got.member, (0.0, 0)), (ends_s, got.offset))
    counts["deliveries"] += sum(map(len, history.got.values()))
    for queue, several in history.got.items():
        failed_count = sum(map(len, history.failed[queue].values()))
        counts["failed"] += failed_count
        counts["deliveries twice"] += max(len(several) - len({got.offset for got in several}) - failed_count, 0)


def _old_tokens(history: GroupHistory, counts: Counter[str]) -> Iterable[Violation]:
    counts["commits refused for their queue"] += history.refused["QUEUE_NOT_OWNED"]
    counts["commits refused as no member"] += history.refused["MEMBER_UNKNOWN"]
    if not history.is_locked:
        return
    for commit in history.commits:
        if commit.accepted_s is None:
            continue
        if not commit.token:
            yield Violation("C5", f"{commit.member} committed {commit.queue} {commit.offset} without a token")
        granted = [time_s for time_s, _, token in history.tokens[commit.queue] if token == commit.token]
        since_s = max(granted, default=0.0)
        for time_s, member, token in history.tokens[commit.queue]:
            if token != commit.token and since_s < time_s < commit.sent_s:
                yield Violation("C5", f"{commit.member} committed {commit.queue} {commit.offset} after {member} had locked it")
                break


def allowed_silence_s(history: GroupHistory, queue: str, begin_s: float, end_s: float) -> float:
    """How long a queue may be silent at that time: others take over, its broker comes back, stopped members are given up."""
    stop_s = 1.6 * history.gap_s + 0.5
    # Who died with a broker and had its locks counts as gone once he has not come back for the gap.
    back_s = PROMISED_S + (max(history.gap_s + 1.0, history.settle_s) if history.is_locked else history.settle_s)
    allowed_s = PROMISED_S + LATE_S
    for down in history.downs[queue.partition("/")[0]]:
        if down.meets(begin_s - back_s, end_s):
            allowed_s += down.end_s - down.begin_s + back_s
    stops = (stop for several in history.stops.values() for stop in several)
    allowed_s += sum(stop_s + PROMISED_S for stop in stops if stop.meets(begin_s - stop_s, end_s))
    return allowed_s * history.pace(begin_s, end_s)


def _silences(history: GroupHistory, counts: Counter[str]) -> Iterable[Violation]:
    for queue, several in history.got.items():
        for before, got in pairwise(several):
            begin_s = max(before.time_s, history.acked_s.get((queue, got.offset), 0.0))
            silent_s = got.time_s - begin_s
            if silent_s < 0.5:
                continue
            counts["silent queue ms"] += round(silent_s * 1000)
            allowed_s = allowed_silence_s(history, queue, begin_s, got.time_s)
            if silent_s > allowed_s:
                who = f"between {before.member} and {got.member}"
                yield Violation("C6", f"{queue} was silent for {silent_s:.1f} s {who}, {allowed_s:.1f} s are allowed")


def take_overs_s(history: GroupHistory) -> list[float]:
    """How long it took until a killed member's queues were consumed again, where nothing else happened at that time."""
    found = []
    stops = [stop for several in history.stops.values() for stop in several]
    for member, killed_s in history.killed_s.items():
        window = killed_s - history.settle_s - 2.0, killed_s + PROMISED_S
        if any(span.meets(*window) for several in history.downs.values() for span in several) or any(stop.meets(*window) for stop in stops):
            continue
        for queue, several in history.got.items():
            behind = [got for got in several if got.time_s <= killed_s]
            later = [got for got in several if got.time_s > killed_s]
            if behind and later and behind[-1].member == member and behind[-1].time_s > killed_s - 0.5:
                found.append(later[0].time_s - max(killed_s, history.acked_s.get((queue, later[0].offset), 0.0)))
    return sorted(found)


def _begun_on_waking(history: GroupHistory) -> list[tuple[str, list[tuple[str, Got]]]]:
    """Of each stop: the member, and (queue, message) of what it began when it woke, before it asked again where the group is, though others
    had these queues."""
    found = []
    for member, stops in history.stops.items():
        for stop in stops:
            begun: list[tuple[str, Got]] = []
            for queue, several in history.got.items():
                others = [got for got in several if got.member != member and stop.begin_s < got.time_s < stop.end_s]
                if not others:
                    continue
                fetches_s = [fetch.time_s for fetch in history.fetches[member, queue] if fetch.time_s > stop.end_s]
                fetched_s = min(fetches_s, default=float("inf"))
                begun += [(queue, got) for got in several if got.member == member and stop.end_s < got.time_s < fetched_s]
            found.append((member, begun))
    return found


def _woken(history: GroupHistory, counts: Counter[str]) -> Iterable[Violation]:
    for member, begun in _begun_on_waking(history):
        # A batch is handed over at one time.
        times = {got.time_s: f"{queue} {got.offset}" for queue, got in begun}
        counts["begun on waking"] += len(times)
        if len(times) > 1:
            yield Violation("C7", f"{member} woke up, and began {sorted(times.values())} though others had these queues")


def _handed_over(history: GroupHistory, counts: Counter[str]) -> Iterable[Violation]:
    on_waking = {got for _, found in _begun_on_waking(history) for _, got in found}
    unanswered_s: dict[tuple[str, str], list[float]] = defaultdict(list)
    for commit in history.commits:
        if commit.accepted_s is None:
            unanswered_s[commit.member, commit.queue].append(commit.sent_s)
    for queue, several in history.got.items():
        downs = history.downs[queue.partition("/")[0]]
        last: dict[int, Got] = {}
        for got in several:
            if got in on_waking:
                continue  # C7 judges it.
            before = last.get(got.offset)
            last[got.offset] = got
            if before is None or any(
                who == before.member and before.time_s <= time_s <= got.time_s
                for time_s, who in history.failed[queue].get(got.offset, ())
            ):
                continue
            member, span = before.member, (before.time_s - REVOKE_S, got.time_s)
            uncommitted = (before.time_s - REVOKE_S - RETURN_S, got.time_s)
            # Its commit may be lost with a kill, a stop, or a broker, or a busy machine lets it work for too long; then it comes again. So
            # does what was ended behind a message that took too long.
            is_excused = (
                history.killed_s.get(member, float("inf")) <= got.time_s
                or _ends_late(history, queue, several, before)
                or history.was_stopped(member, before.time_s - history.gap_s, got.time_s)
                or any(down.meets(*uncommitted) for down in downs)
                or any(span[0] <= time_s <= span[1] for time_s in history.refused_s[member])
                or any(sent_s > before.time_s for sent_s in unanswered_s[member, queue])
            )
            if not is_excused:
                text = f"{queue} {got.offset} came to {member}, and again to {got.member}, and nobody was killed or stopped"
                yield Violation("C2", text)


def _ends_late(history: GroupHistory, queue: str, several: Iterable[Got], got: Got) -> bool:
    """Whether a member that had a message had one in front of it, or this one, for longer than a queue that goes waits."""
    in_hand = (each for each in several if each.member == got.member and each.offset <= got.offset and each.time_s <= got.time_s)
    for offset, begun_s in {each.offset: each.time_s for each in in_hand}.items():
        ends_s = [time_s for time_s, who in history.done[queue].get(offset, ()) if who == got.member and time_s >= begun_s]
        if ends_s and min(ends_s) > got.time_s + REVOKE_S:
            return True
    return False


def _overtaken(history: GroupHistory, counts: Counter[str]) -> Iterable[Violation]:
    if not history.is_held_up:
        return
    on_waking = {got for _, found in _begun_on_waking(history) for _, got in found}
    ready_s = _ready_s(history)
    for queue, several in history.got.items():
        times = ready_s.get(queue, [0.0])
        for got in several:
            is_ready = got.offset < len(times) and times[got.offset] <= got.time_s
            if not is_ready and got not in on_waking:  # C7 judges those.
                yield Violation("B4", f"{got.member} has {queue} {got.offset}, and not all messages in front of it were ended")


def _lost_commits(history: GroupHistory, counts: Counter[str]) -> Iterable[Violation]:
    ready_s = _ready_s(history)
    for queue, several in history.got.items():
        times = ready_s.get(queue, [0.0])
        spans = _disturbances(history, queue)
        for got in several:
            if got.offset + 1 >= len(times) or times[got.offset + 1] >= got.time_s:
                continue  # not ended by then
            counts["ended, and came again"] += 1
            quiet_s = _longest_quiet_s(spans, times[got.offset + 1], got.time_s)
            allowed_s = (history.commit_s + REVOKE_S + RETURN_S) * history.pace(times[got.offset + 1], got.time_s)
            if quiet_s > allowed_s:
                text = f"{got.member} has {queue} {got.offset} again, and for {quiet_s:.1f} s after its end nothing kept its commit back"
                yield Violation("C2", text)


def _disturbances(history: GroupHistory, queue: str) -> list[Span]:
    """When something happened that may keep commits of a queue back, in their order: to members, or to its broker."""
    points = [*history.killed_s.values(), *history.left_s.values(), *history.stopping_s.values()]
    points += [time_s for several in history.refused_s.values() for time_s in several]
    points += [fetch.time_s for (_, name), fetches in history.fetches.items() if name == queue for fetch in fetches]
    spans = [Span(time_s, time_s) for time_s in points]
    spans += [Span(down.begin_s, down.end_s + history.settle_s) for down in history.downs[queue.partition("/")[0]]]
    spans += [Span(stop.begin_s, stop.end_s + history.gap_s) for several in history.stops.values() for stop in several]
    return sorted(spans)


def _longest_quiet_s(spans: Iterable[Span], begin_s: float, end_s: float) -> float:
    """The longest stretch between two times that meets none of the spans."""
    longest_s, at_s = 0.0, begin_s
    for span in spans:
        if span.end_s < begin_s or span.begin_s > end_s:
            continue
        longest_s, at_s = max(longest_s, span.begin_s - at_s), max(at_s, span.end_s)
    return max(longest_s, end_s - at_s)
