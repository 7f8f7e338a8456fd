"""What to read: from options and the state of the queues to ranges of offsets. Pure: no Spark, no sockets, no clock.

An offset of a stream, as it stands in a checkpoint, is {"topic": {"broker:queue": offset}, "@protomq": {...}}. No topic can be
called "@protomq". There stands what a query must remember besides its positions (`StreamState`).

Rules:
- A queue that was not there when the query began is read from its first message that is there when it is first seen.
- A queue that cannot be seen now (its broker is away) stands still: its end is its start.
- Limits hand out shares in proportion to lag; nothing starves, and the limit is never passed.
- Offsets belong to one incarnation of their topic at one broker. A topic that was deleted and created again has another: positions of the
  old one are no place in it. An incarnation that is not known (0, an old checkpoint) is taken for the one that is there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

from protomq import MessageQueue, QueueRange

from .options import EARLIEST, LATEST, Bound, Offsets, OptionError

StreamOffset = dict[str, dict[str, Any]]
Positions = dict[MessageQueue, int]
Share = tuple[str, str]
"""What one broker has of a topic: topic, broker name."""
Incarnations = Mapping[Share, int]

_NONE_KNOWN: Final[Incarnations] = {}
_NOWHERE: Final[Positions] = {}
_REMEMBERED: Final = "@protomq"


class DataLossError(RuntimeError):
    """Messages that were to be read are gone, and failOnDataLoss is true."""


class OffsetRange(NamedTuple):
    """A part of a queue: the messages [start, end) of an incarnation of its topic; 0: not known which."""

    queue: MessageQueue
    start: int
    end: int
    incarnation: int = 0


class Seen(NamedTuple):
    """What the brokers said of queues."""

    ranges: Mapping[MessageQueue, QueueRange]
    incarnations: Incarnations = _NONE_KNOWN


class StreamState(NamedTuple):
    """A place in a stream, and what a query remembers with it in its checkpoint."""

    positions: Positions
    query: str = ""
    """A random name that the query was given when it began; "" in checkpoints of versions that gave none."""
    incarnations: Incarnations = _NONE_KNOWN
    """Those to which the positions belong, as far as they are known."""
    begun: Positions = _NOWHERE
    """First messages of queues that were seen later, where they were not at 0: a micro-batch that begins before them has no position."""


# -- offsets as Spark keeps them ------------------------------------------------------------------------------------------


def encode_state(state: StreamState) -> StreamOffset:
    """The offset of a stream; equal states are equal as text."""
    remembered: dict[str, Any] = {"query": state.query} if state.query else {}
    if state.incarnations:
        remembered["incarnations"] = encode_incarnations(state.incarnations)
    if state.begun:
        remembered["begun"] = to_stream_offset(state.begun)
    offset = to_stream_offset(state.positions)
    return {_REMEMBERED: remembered, **offset} if remembered else offset


def decode_state(offset: StreamOffset) -> StreamState:
    """The inverse of `encode_state`; what a later version may remember beside is skipped."""
    remembered = offset.get(_REMEMBERED, {})
    incarnations = decode_incarnations(remembered.get("incarnations", {}))
    begun = from_stream_offset(remembered.get("begun", {}))
    return StreamState(from_stream_offset(offset), remembered.get("query", ""), incarnations, begun)


def encode_incarnations(incarnations: Incarnations) -> dict[str, dict[str, int]]:
    """{"topic": {"broker": incarnation}}, sorted."""
    encoded: dict[str, dict[str, int]] = {}
    for topic, broker_name in sorted(incarnations):
        encoded.setdefault(topic, {})[broker_name] = incarnations[topic, broker_name]
    return encoded


def decode_incarnations(encoded: Mapping[str, Mapping[str, int]]) -> Incarnations:
    """The inverse of `encode_incarnations`."""
    return {(topic, name): n for topic, shares in encoded.items() for name, n in shares.items()}


def to_stream_offset(positions: Mapping[MessageQueue, int]) -> StreamOffset:
    """Sorted, so that equal offsets are equal as text."""
    offset: StreamOffset = {}
    for queue in sorted(positions):
        offset.setdefault(queue.topic, {})[queue_name(queue)] = positions[queue]
    return offset


def from_stream_offset(offset: StreamOffset) -> Positions:
    """The inverse of `to_stream_offset`."""
    positions: Positions = {}
    for topic, queues in offset.items():
        if topic == _REMEMBERED:
            continue
        for name, position in queues.items():
            broker_name, _, queue_id = name.rpartition(":")
            positions[MessageQueue(topic, broker_name, int(queue_id))] = position
    return positions


def queue_name(queue: MessageQueue) -> str:
    """broker:queue."""
    return f"{queue.broker_name}:{queue.queue_id}"


# -- which queues, from where to where ---------------------------------------------------------------------------------------


def assigned_queues(
    assigned: Mapping[str, Sequence[str]], queues: Iterable[MessageQueue]
) -> list[MessageQueue]:
    """The queues that the option `assign` names. Raises OptionError for those that are not there."""
    known = list(queues)
    chosen: list[MessageQueue] = []
    for topic, names in assigned.items():
        for name in names:
            found = [queue for queue in known if queue.topic == topic and _is_named(queue, name)]
            if not found:
                raise OptionError(f"option 'assign': topic {topic!r} has no queue {name!r}")
            chosen += found
    return sorted(set(chosen))


def _is_named(queue: MessageQueue, name: str) -> bool:
    return name in (queue_name(queue), str(queue.queue_id))


def per_queue(name: str, given: Offsets, queues: Sequence[MessageQueue]) -> Positions:
    """What JSON says for each queue. Raises OptionError if it leaves one out, is ambiguous or names one that is not there."""
    values: Positions = {}
    for queue in queues:
        named = given.get(queue.topic, {})
        full, short = queue_name(queue), str(queue.queue_id)
        if full in named and short in named:
            raise OptionError(
                f"option {name!r} names queue {full} of {queue.topic!r} twice, the second time as {short!r}"
            )
        if full in named:
            values[queue] = named[full]
        elif short in named:
            brokers = {q.broker_name for q in queues if q.topic == queue.topic}
            if len(brokers) > 1:
                raise OptionError(
                    f"option {name!r}: queue {short!r} of topic {queue.topic!r} is on several brokers:"
                    f" write {' or '.join(sorted(f'{broker}:{short}' for broker in brokers))}"
                )
            values[queue] = named[short]
    for topic, named in given.items():
        for key in named:
            if not any(queue.topic == topic and _is_named(queue, key) for queue in queues):
                raise OptionError(
                    f"option {name!r} names queue {key!r} of topic {topic!r}: not read"
                )
    missing = [queue for queue in queues if queue not in values]
    if missing:
        names = ", ".join(f"{queue.topic}/{queue_name(queue)}" for queue in missing[:5])
        raise OptionError(
            f"option {name!r} leaves out {len(missing)} queues ({names}): -2 is earliest, -1 latest"
        )
    return values


def times_wanted(name: str, bound: Bound, queues: Sequence[MessageQueue]) -> Positions:
    """For which time the offset of each queue must be looked up; empty if the bound is no time."""
    if bound.time_ms is not None:
        return dict.fromkeys(queues, bound.time_ms)
    if bound.times is not None:
        return per_queue(name, bound.times, queues)
    return {}


def resolve(
    name: str,
    bound: Bound,
    ranges: Mapping[MessageQueue, QueueRange],
    found_by_time: Mapping[MessageQueue, int],
) -> Positions:
    """The offset of each queue. Raises OptionError."""
    queues = sorted(ranges)
    if found_by_time:
        too_young = [queue for queue in queues if found_by_time[queue] >= ranges[queue].end_offset]
        if too_young and not bound.later_is_latest:
            first = too_young[0]
            raise OptionError(
                f"option {name!r}: queue {queue_name(first)} of topic {first.topic!r} has no message of that"
                " time or later (startingOffsetsByTimestampStrategy=latest takes the end then)"
            )
        return {queue: found_by_time[queue] for queue in queues}
    if bound.offsets is not None:
        given = per_queue(name, bound.offsets, queues)
        for queue in queues:
            if given[queue] > ranges[queue].end_offset:
                raise OptionError(
                    f"option {name!r}: {given[queue]} is beyond the end of queue {queue_name(queue)} of topic"
                    f" {queue.topic!r}, which is {ranges[queue].end_offset}"
                )
        return {queue: _of_word(given[queue], ranges[queue]) for queue in queues}
    assert bound.word is not None
    return {queue: _of_word(bound.word, ranges[queue]) for queue in queues}


def _of_word(value: int, queue_range: QueueRange) -> int:
    if value == EARLIEST:
        return queue_range.min_offset
    return queue_range.end_offset if value == LATEST else value


# -- topics that were made again ------------------------------------------------------------------------------------------------


def share_of(queue: MessageQueue) -> Share:
    """Where its incarnation stands."""
    return queue.topic, queue.broker_name


def made_again(before: Incarnations, now: Incarnations) -> list[Share]:
    """What was deleted and created again between two looks."""
    return sorted(share for share, known in before.items() if now.get(share, known) != known)


def without(positions: Positions, gone: Collection[Share]) -> Positions:
    """The positions that still mean something."""
    return {queue: at for queue, at in positions.items() if share_of(queue) not in gone}


def say_made_again(share: Share) -> str:
    """What happened, and what to do."""
    topic, broker_name = share
    return (
        f"topic {topic!r} was deleted and created again at broker {broker_name}. What was not read of the old one is gone, and its"
        " offsets mean nothing in the new one. A query without a past (a stream: with a new checkpoint) reads the new one"
    )


# -- ranges ------------------------------------------------------------------------------------------------------------------


def ranges_between(
    start: Positions, end: Positions, incarnations: Incarnations = _NONE_KNOWN
) -> list[OffsetRange]:
    """What is to be read: nothing where the end is not above the start. A queue without a start is new: from 0."""
    return [
        OffsetRange(queue, start.get(queue, 0), end[queue], incarnations.get(share_of(queue), 0))
        for queue in sorted(end)
        if end[queue] > start.get(queue, 0)
    ]


def find_data_loss(
    wanted: Iterable[OffsetRange], available: Mapping[MessageQueue, QueueRange]
) -> list[str]:
    """What of the ranges is not there any more, one line for each queue. Queues that cannot be seen are skipped."""
    lost: list[str] = []
    for queue, start, end, _ in wanted:
        there = available.get(queue)
        if there is None:
            continue
        where = f"{queue.topic}/{queue_name(queue)}"
        if start < there.min_offset:
            lost.append(
                f"{where}: offsets {start} to {min(end, there.min_offset) - 1} are deleted (first: {there.min_offset})"
            )
        if end > there.end_offset:
            lost.append(
                f"{where}: offsets {max(start, there.end_offset)} to {end - 1} are not there (end: {there.end_offset})"
            )
    return lost


def clip(
    wanted: Iterable[OffsetRange], available: Mapping[MessageQueue, QueueRange]
) -> list[OffsetRange]:
    """The ranges without what is gone."""
    clipped: list[OffsetRange] = []
    for item in wanted:
        there = available.get(item.queue)
        start, end = item.start, item.end
        if there is not None:
            start, end = max(start, there.min_offset), min(end, there.end_offset)
        if end > start:
            clipped.append(item._replace(start=start, end=end))
    return clipped


def split(
    ranges: Sequence[OffsetRange], min_partitions: int = 0, records_max: int | None = None
) -> list[OffsetRange]:
    """The tasks: at least `min_partitions` of them as far as there are records, none above `records_max` records.

    Large ranges are cut into more parts than small ones; the parts of a range are as equal as can be.
    """
    total = sum(item.end - item.start for item in ranges)
    target = total / min_partitions if min_partitions > len(ranges) else float("inf")
    if records_max is not None:
        target = min(target, records_max)
    parts: list[OffsetRange] = []
    for item in ranges:
        start, size = item.start, item.end - item.start
        # Rounded up: the target is a size that a part must not pass.
        count = 1 if target >= size else min(size, -int(-size // target))
        bounds = [start + size * index // count for index in range(count + 1)]
        parts += [item._replace(start=low, end=high) for low, high in pairwise(bounds)]
    return parts


def pack(parts: Sequence[OffsetRange], partitions_max: int | None) -> list[tuple[OffsetRange, ...]]:
    """The parts by task: one in each, or at most `partitions_max` tasks, of neighbours with about as many messages in each.

    It follows from the parts alone: a micro-batch that is planned again has the same tasks.
    """
    if partitions_max is None or len(parts) <= partitions_max:
        return [(part,) for part in parts]
    total = sum(part.end - part.start for part in parts)
    tasks: dict[int, list[OffsetRange]] = {}
    before = 0
    for part in parts:
        tasks.setdefault(before * partitions_max // total, []).append(part)
        before += part.end - part.start
    return [tuple(members) for members in tasks.values()]


def limit_ends(start: Positions, latest: Positions, count_max: int) -> Positions:
    """The ends of a batch of at most `count_max` messages, in proportion to the lag of each queue.

    What is left after rounding down goes first to queues that would get nothing, in another order with every batch. Then it
    goes to those that were rounded down most.
    """
    lags = {queue: max(latest[queue] - start.get(queue, 0), 0) for queue in sorted(latest)}
    total = sum(lags.values())
    if total <= count_max:
        return dict(latest)
    shares = {queue: lag * count_max // total for queue, lag in lags.items()}
    left = count_max - sum(shares.values())
    nothing = [queue for queue, share in shares.items() if lags[queue] and not share]
    if nothing:
        turn = sum(start.values()) % len(nothing)
        nothing = nothing[turn:] + nothing[:turn]
    rounded = [queue for queue, share in shares.items() if share and share < lags[queue]]
    rounded.sort(key=lambda queue: -(lags[queue] * count_max % total))
    for queue in (nothing + rounded)[:left]:
        shares[queue] += 1
    return {queue: start.get(queue, 0) + shares[queue] for queue in lags}


def lag_of(start: Positions, latest: Positions) -> int:
    """Messages between two offsets."""
    return sum(max(end - start.get(queue, 0), 0) for queue, end in latest.items())


def carried(start: Positions, latest: Positions) -> Positions:
    """`latest`, with queues that cannot be seen now standing still, and none going back."""
    return {queue: max(latest.get(queue, 0), start.get(queue, 0)) for queue in {*start, *latest}}
