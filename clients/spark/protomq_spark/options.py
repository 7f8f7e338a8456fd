"""The options of the source and the sink: read once, on the driver, into frozen values that executors are given.

Rules:
- Names are compared without regard to case, as Spark does. Names known from Kafka's connector mean what they mean there;
  names of rocketmq-spark are aliases.
- An option that is not known, that contradicts another or that has a value it cannot have is an error that names it. The one
  exception are those that Spark itself adds (`checkpointLocation` ...).

Pure: no Spark, no sockets.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

from protomq.errors import ConfigurationError

from .schema import COLUMN_NAMES, DEFAULT_COLUMNS

DEFAULT_GROUP_PREFIX: Final = "spark-protomq-source"
BATCH_ID_MAX: Final = (1 << 31) - 1
"""The number of a micro-batch, or of a write among those of one name, is the upper half of its rows' sequences."""
EARLIEST: Final = -2
LATEST: Final = -1

Transport = Literal["auto", "remoting", "grpc"]
Offsets = dict[str, dict[str, int]]
"""Topic -> queue ("broker:0", or "0" where the topic has one broker) -> offset, or milliseconds."""

_SPARKS_OWN: Final = frozenset(("checkpointlocation", "queryname", "outputmode"))
_BATCH_ONLY: Final = ("endingOffsets", "endingOffsetsByTimestamp", "endingTimestamp")
_STREAM_ONLY: Final = ("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay")
_ALIASES: Final = {
    "nameserver": "protomq.namesrv",
    "topic": "subscribe",
    "group": "protomq.group.id",
    "subexpression": "tags",
    "pullbatchsize": "protomq.pullcountmax",
    "pulltimeout": "protomq.timeoutms",
}


_NOT_YET: Final = {
    "sql": "this version has no SQL filters, use 'tags' or where()",
} | dict.fromkeys(
    ("accesskey", "secretkey", "protomq.accesskey", "protomq.secretkey", "protomq.securitytoken"),
    "this version has no authentication: whoever reaches a broker may use it",
)
"""Options that will have a meaning, by lower-case name, and what to know until then."""


class OptionError(ConfigurationError):
    """A wrong option of the source or the sink; the text names it."""


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """How to reach the cluster."""

    namesrv: str
    transport: Transport = "auto"
    timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Subscription:
    """Which queues: exactly one of the three."""

    topics: tuple[str, ...] = ()
    pattern: str = ""
    assigned: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bound:
    """One end of what is to be read: a word (EARLIEST, LATEST), an offset of each queue, or a time.

    `times`: milliseconds of each queue instead of offsets. `time_ms`: one for all. `later_is_latest`: what to do where no
    message is that young: take the end instead of failing.
    """

    word: int | None = None
    offsets: Offsets | None = None
    times: Offsets | None = None
    time_ms: int | None = None
    later_is_latest: bool = False


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of a source."""

    client: ClientOptions
    subscription: Subscription
    start: Bound
    end: Bound
    columns: tuple[str, ...]
    tags: tuple[str, ...] = ()
    group: str = ""
    """Named by the user; "": one for each query, see `group_of`."""
    group_prefix: str = DEFAULT_GROUP_PREFIX
    offsets_max: int | None = None
    offsets_min: int | None = None
    trigger_delay_max_s: float = 900.0
    min_partitions: int = 0
    partitions_max: int | None = None
    records_max: int | None = None
    fail_on_data_loss: bool = True
    check_crc: bool = True
    corrupt_records: Literal["fail", "null", "skip"] = "fail"
    pull_size_max_bytes: int = 4 << 20
    pull_count_max: int = 32_768

    def group_of(self, query: str) -> str:
        """The consumer group of a query; `query` is the name that it remembers in its checkpoint."""
        return self.group or f"{self.group_prefix}-{query}"


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Options of a sink."""

    client: ClientOptions
    topic: str = ""
    write_id: str = ""
    batch_id: int = 0
    shard_by: Literal["", "key", "sharding_key", "none"] = ""
    compression: Literal["auto", "zstd", "lz4", "zlib", "none"] = "none"
    batch_rows: int = 4096
    batch_size_bytes: int = 1 << 20
    wait_store_ok: bool = True


class _Given:
    """The options that a user gave, taken one by one; what is left in the end is an error."""

    def __init__(self, options: Mapping[str, str], aliases: Mapping[str, str]) -> None:
        self._values: dict[str, tuple[str, str]] = {}  # Canonical name -> (name as given, value).
        self._known: list[str] = []
        for name, value in options.items():
            canonical = aliases.get(name.lower(), name.lower())
            if canonical in self._values:
                other = self._values[canonical][0]
                raise OptionError(f"options {other!r} and {name!r} mean the same: give one of them")
            self._values[canonical] = (name, value)

    def text(self, name: str, default: str = "") -> str:
        self._known.append(name)
        found = self._values.pop(name.lower(), None)
        return default if found is None else found[1].strip()

    def integer(self, name: str, default: int | None, least: int = 1, most: int = 1 << 62) -> Any:
        text = self.text(name)
        if not text:
            return default
        try:
            value = int(text)
        except ValueError:
            raise OptionError(f"option {name!r} must be a whole number, not {text!r}") from None
        if not least <= value <= most:
            raise OptionError(f"option {name!r} must be {least} to {most}, not {value}")
        return value

    def boolean(self, name: str, default: bool) -> bool:
        text = self.text(name).lower()
        if text in ("", "true", "false"):
            return default if not text else text == "true"
        raise OptionError(f'option {name!r} must be "true" or "false", not {text!r}')

    def choice(self, name: str, default: str, choices: tuple[str, ...]) -> Any:
        text = self.text(name, default).lower()
        if text != default and text not in choices:
            raise OptionError(f"option {name!r} must be one of {', '.join(choices)}, not {text!r}")
        return text

    def has(self, name: str) -> bool:
        return name.lower() in self._values

    def refuse_what_is_not_yet(self) -> None:
        for name, why in _NOT_YET.items():
            if name in self._values:
                raise OptionError(f"option {self._values[name][0]!r}: {why}")

    def refuse_the_rest(self, what: str) -> None:
        rest = [given for name, (given, _) in self._values.items() if name not in _SPARKS_OWN]
        if rest:
            hints = []
            lowered = {name.lower(): name for name in self._known}
            for name in rest:
                close = difflib.get_close_matches(name.lower(), list(lowered), 1)
                hints.append(f"{name!r}" + (f" (is {lowered[close[0]]!r} meant?)" if close else ""))
            raise OptionError(f"the {what} has no option {', '.join(hints)}")


def parse_read_options(options: Mapping[str, str], *, streaming: bool | None = None) -> ReadOptions:
    """`streaming` None: not known yet, whatever is right for one of the two passes. Raises OptionError."""
    given = _Given(options, _ALIASES)
    client = _client(given)
    subscription = _subscription(given)
    if streaming is not None:
        refused = _BATCH_ONLY if streaming else _STREAM_ONLY
        for name in filter(given.has, refused):
            what = "batch" if streaming else "stream"
            raise OptionError(f"option {name!r} is for a {what} query only")
    start = _bound(given, "starting", LATEST if streaming else EARLIEST)
    end = _bound(given, "ending", LATEST)
    if streaming is False and (start.word == LATEST or _mentions(start.offsets, LATEST)):
        raise OptionError("option 'startingOffsets' cannot be latest (-1) in a batch query")
    if end.word == EARLIEST or _mentions(end.offsets, EARLIEST):
        raise OptionError("option 'endingOffsets' cannot be earliest (-2)")
    offsets_max = given.integer("maxOffsetsPerTrigger", None)
    offsets_min = given.integer("minOffsetsPerTrigger", None)
    if given.has("maxTriggerDelay") and offsets_min is None:
        raise OptionError("option 'maxTriggerDelay' has a meaning with 'minOffsetsPerTrigger' only")
    if offsets_max is not None and offsets_min is not None and offsets_min > offsets_max:
        raise OptionError("option 'minOffsetsPerTrigger' is above 'maxOffsetsPerTrigger'")
    min_partitions = given.integer("minPartitions", 0)
    partitions_max = given.integer("maxPartitions", None)
    records_max = given.integer("maxRecordsPerPartition", None)
    if partitions_max is not None and partitions_max < min_partitions:
        raise OptionError("option 'minPartitions' is above 'maxPartitions'")
    if partitions_max is not None and records_max is not None:
        raise OptionError(
            "options 'maxPartitions' and 'maxRecordsPerPartition' contradict: give one"
        )
    read = ReadOptions(
        client=client,
        subscription=subscription,
        start=start,
        end=end,
        columns=_columns(given),
        tags=_tags(given),
        group=given.text("protomq.group.id"),
        group_prefix=given.text("groupIdPrefix", DEFAULT_GROUP_PREFIX),
        offsets_max=offsets_max,
        offsets_min=offsets_min,
        trigger_delay_max_s=_duration_s("maxTriggerDelay", given.text("maxTriggerDelay", "15m")),
        min_partitions=min_partitions,
        partitions_max=partitions_max,
        records_max=records_max,
        fail_on_data_loss=given.boolean("failOnDataLoss", True),
        check_crc=given.boolean("checkCrc", True),
        corrupt_records=given.choice("corruptRecords", "fail", ("fail", "null", "skip")),
        pull_size_max_bytes=given.integer("protomq.pullSizeMaxBytes", 4 << 20, 1, 16 << 20),
        pull_count_max=given.integer("protomq.pullCountMax", 32_768, 1, 32_768),
    )
    given.refuse_the_rest("source")
    return read


def parse_write_options(options: Mapping[str, str]) -> WriteOptions:
    """Raises OptionError."""
    given = _Given(options, {"nameserver": "protomq.namesrv"})
    write_id = given.text("writeId")
    if given.has("batchId") and not write_id:
        raise OptionError("option 'batchId' has a meaning with 'writeId' only")
    write = WriteOptions(
        client=_client(given),
        topic=given.text("topic"),
        write_id=write_id,
        batch_id=given.integer("batchId", 0, 0, BATCH_ID_MAX),
        shard_by=given.choice("shardBy", "", ("key", "sharding_key", "none")),
        compression=given.choice(
            "protomq.compression", "none", ("auto", "zstd", "lz4", "zlib", "none")
        ),
        batch_rows=given.integer("batchRows", 4096, 1, 32_768),
        batch_size_bytes=given.integer("batchSizeBytes", 1 << 20, 1, 4 << 20),
        wait_store_ok=given.boolean("protomq.waitStoreOk", True),
    )
    given.refuse_the_rest("sink")
    return write


def _client(given: _Given) -> ClientOptions:
    given.refuse_what_is_not_yet()
    namesrv = given.text("protomq.namesrv")
    if not namesrv:
        raise OptionError("option 'protomq.namesrv' (host:port of a name server) is required")
    return ClientOptions(
        namesrv,
        cast(Transport, given.choice("protomq.transport", "auto", ("auto", "remoting", "grpc"))),
        given.integer("protomq.timeoutMs", 30_000) / 1000,
    )


def _subscription(given: _Given) -> Subscription:
    named = [name for name in ("subscribe", "subscribePattern", "assign") if given.has(name)]
    if len(named) != 1:
        found = f", not {' and '.join(named)}" if named else ""
        raise OptionError(
            f"exactly one of the options 'subscribe', 'subscribePattern', 'assign' is needed{found}"
        )
    topics = tuple(t.strip() for t in given.text("subscribe").split(",") if t.strip())
    pattern = given.text("subscribePattern")
    assign = given.text("assign")
    if named == ["assign"]:
        return Subscription(assigned=_assigned(assign))
    if named == ["subscribe"]:
        if not topics:
            raise OptionError("option 'subscribe' names no topic")
        return Subscription(topics=tuple(dict.fromkeys(topics)))
    try:
        re.compile(pattern)
    except re.error as error:
        raise OptionError(f"option 'subscribePattern' is no regular expression: {error}") from None
    if not pattern:
        raise OptionError("option 'subscribePattern' is empty")
    return Subscription(pattern=pattern)


def _assigned(text: str) -> dict[str, tuple[str, ...]]:
    example = '{"topic": [0, 1]} or {"topic": ["broker-a:0"]}'
    parsed = _json("assign", text)
    if not isinstance(parsed, dict) or not parsed:
        raise OptionError(f"option 'assign' must be JSON like {example}")
    for queues in parsed.values():
        if not isinstance(queues, list) or not queues or any(_bad_queue(q) for q in queues):
            raise OptionError(f"option 'assign' must be JSON like {example}")
    return {topic: tuple(str(queue) for queue in queues) for topic, queues in parsed.items()}


def _bad_queue(queue: object) -> bool:
    if isinstance(queue, str):
        return not queue.rpartition(":")[2].isdecimal()
    return not isinstance(queue, int) or isinstance(queue, bool) or queue < 0


def _bound(given: _Given, which: str, default: int) -> Bound:
    """`which`: "starting" or "ending". The time for all goes before the times of queues, and those before offsets, as in Kafka."""
    time_ms = given.integer(f"{which}Timestamp", None, 0)
    times = given.text(f"{which}OffsetsByTimestamp")
    offsets = given.text(f"{which}Offsets")
    strategy = "latest"
    if which == "starting":
        name = "startingOffsetsByTimestampStrategy"
        strategy = given.choice(name, "error", ("error", "latest"))
    later_is_latest = strategy == "latest"
    if time_ms is not None:
        return Bound(time_ms=time_ms, later_is_latest=later_is_latest)
    if times:
        name = f"{which}OffsetsByTimestamp"
        return Bound(times=parse_offsets(name, times, 0), later_is_latest=later_is_latest)
    if not offsets:
        return Bound(word=default)
    word = {"earliest": EARLIEST, "latest": LATEST}.get(offsets.lower())
    if word is not None:
        return Bound(word=word)
    return Bound(offsets=parse_offsets(f"{which}Offsets", offsets, EARLIEST))


def parse_offsets(name: str, text: str, least: int) -> Offsets:
    """JSON of an offset or a time for each queue. Raises OptionError."""
    parsed = _json(name, text)
    example = '{"topic": {"broker-a:0": 23}}'
    if not isinstance(parsed, dict):
        raise OptionError(f"option {name!r} must be earliest, latest or JSON like {example}")
    for queues in parsed.values():
        if not isinstance(queues, dict):
            raise OptionError(f"option {name!r} must be JSON like {example}")
        for queue, value in queues.items():
            if _bad_queue(queue) or not isinstance(value, int) or isinstance(value, bool):
                raise OptionError(f"option {name!r}: {queue!r}: {value!r} is not like {example}")
            if value < least:
                raise OptionError(f"option {name!r}: {value} of queue {queue!r} is below {least}")
    return cast(Offsets, parsed)


def _json(name: str, text: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise OptionError(f"option {name!r} is no JSON: {error}") from None


def _mentions(offsets: Offsets | None, value: int) -> bool:
    return any(value in queues.values() for queues in (offsets or {}).values())


def _columns(given: _Given) -> tuple[str, ...]:
    headers = given.boolean("includeHeaders", False)
    text = given.text("columns")
    if not text:
        return (*DEFAULT_COLUMNS, "headers") if headers else DEFAULT_COLUMNS
    columns = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in columns if name not in COLUMN_NAMES]
    if unknown or not columns:
        raise OptionError(
            f"option 'columns': no column {', '.join(unknown)}; there are {', '.join(COLUMN_NAMES)}"
        )
    if headers and "headers" not in columns:
        raise OptionError("option 'includeHeaders' is true, but 'columns' does not name 'headers'")
    return columns


def _tags(given: _Given) -> tuple[str, ...]:
    """RocketMQ's "a || b", else tags by comma; "*" or nothing: all."""
    text = given.text("tags")
    tags = [tag.strip() for tag in text.split("||" if "||" in text else ",") if tag.strip()]
    if "*" in tags:
        if len(tags) > 1:
            raise OptionError("option 'tags': '*' means all, other tags beside it mean nothing")
        return ()
    for tag in tags:
        if "|" in tag:
            raise OptionError(f"option 'tags': no tag has a |, as {tag!r} has: write 'a || b', or 'a,b'")
    return tuple(dict.fromkeys(tags))


_UNITS_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def _duration_s(name: str, text: str) -> float:
    found = re.fullmatch(r"(\d+)\s*(ms|s|min|m|h|d)?", text)
    if found is None:
        raise OptionError(f"option {name!r} must be like 500ms, 30s or 15m, not {text!r}")
    return int(found[1]) * _UNITS_S[found[2] or "ms"]
