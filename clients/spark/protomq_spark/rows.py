"""From the rows of a DataFrame to messages: which columns mean what, and where the rows are cut. Pure.

Rules:
- A column that means nothing to the sink is an error that names it, not something silently left out.
- Rows are cut into windows by their number and size alone, never by how Spark happens to batch them: a task that runs again
  with the same rows cuts them at the same places.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa

from protomq._batching import PreparedRecord
from protomq._send_core import SendCore
from protomq.errors import ConfigurationError

from .options import OptionError

COLUMNS: Final = (
    "body",
    "topic",
    "key",
    "tags",
    "tag",
    "properties",
    "headers",
    "queue",
    "sharding_key",
)
_LATER: Final = ("delay", "delay_level", "delivery_time", "delivery_timestamp")
_ROW_SIZE_BYTES: Final = 160
"""What a row costs beside its body and texts; only for cutting windows."""


class Row(NamedTuple):
    """A message: the record, where it must go ("" and None: anywhere)."""

    record: PreparedRecord
    topic: str
    queue: str | None
    sharding_key: str | None


class BadRowError(ValueError):
    """A row that cannot be a message."""


def check_columns(names: Sequence[str], topic: str) -> None:
    """Raises OptionError unless the sink can write rows with these columns; `topic` is the option's."""
    later = [name for name in names if name in _LATER]
    if later:
        raise OptionError(f"column {later[0]!r}: this version delivers at once, it has no delays")
    unknown = [name for name in names if name not in COLUMNS]
    if unknown:
        raise OptionError(
            f"the sink has no column {', '.join(map(repr, unknown))}: select what is to be sent, of {', '.join(COLUMNS)}"
        )
    if "body" not in names:
        raise OptionError("the sink needs a column 'body' (binary or string)")
    if not topic and "topic" not in names:
        raise OptionError("the sink needs the option 'topic' or a column 'topic'")
    for one, other in (("properties", "headers"), ("tag", "tags")):
        if one in names and other in names:
            raise OptionError(f"columns {one!r} and {other!r} mean the same: leave one out")


def windows(
    batches: Iterable[pa.RecordBatch],
    topic: str,
    core: SendCore,
    rows_max: int,
    size_max_bytes: int,
) -> Iterator[list[Row]]:
    """All rows, in order, cut where one more would be too many or too much."""
    window: list[Row] = []
    size = 0
    for batch in batches:
        for row in rows_of(batch, topic, core):
            row_size = len(row.record[0]) + len(row.record[3]) + _ROW_SIZE_BYTES
            if window and (len(window) >= rows_max or size + row_size > size_max_bytes):
                yield window
                window, size = [], 0
            window.append(row)
            size += row_size
    if window:
        yield window


def rows_of(batch: pa.RecordBatch, topic: str, core: SendCore) -> list[Row]:
    """The rows of an Arrow batch. Raises BadRowError, MessageTooLargeError."""
    columns: dict[str, list[Any]] = {
        name: batch.column(index).to_pylist() for index, name in enumerate(batch.schema.names)
    }
    bodies = columns["body"]
    if None in bodies:
        raise BadRowError(
            "a row whose body is null: filter such rows out, or give them an empty body"
        )
    if bodies and isinstance(bodies[0], str):
        bodies = [body.encode() for body in bodies]
    nothing: list[Any] = [None] * len(bodies)
    topics = [topic] * len(bodies) if topic else columns["topic"]
    queues = [None if q is None else str(q) for q in columns.get("queue", nothing)]
    sharding_keys = columns.get("sharding_key", nothing)
    if columns.keys() <= {"body", "topic", "queue"}:
        records = core.prepare_many(bodies, topic, None, "")
    else:
        tags = columns.get("tags", columns.get("tag", nothing))
        properties = [
            _properties_of(p) for p in columns.get("properties", columns.get("headers", nothing))
        ]
        keys = [_text(key) for key in columns.get("key", nothing)]
        records = [
            core.prepare(body, key, (), tag or "", props, sharding_key)
            for body, key, tag, props, sharding_key in zip(
                bodies, keys, tags, properties, sharding_keys, strict=True
            )
        ]
    if not all(topics):
        raise BadRowError("a row without topic, and no option 'topic'")
    return list(map(Row, records, topics, queues, sharding_keys))


def _properties_of(value: Any) -> Mapping[str, str] | None:
    """A map comes as pairs, headers as dicts with binary values."""
    if not value:
        return None
    pairs = (
        [(entry["key"], entry["value"]) for entry in value] if isinstance(value[0], dict) else value
    )
    properties: dict[str, str] = {}
    for name, text in pairs:
        if name is None or text is None:
            raise BadRowError(f"property {name!r} has no value: null cannot be sent")
        if name in properties:
            raise BadRowError(f"property {name!r} stands twice in a row")
        properties[name] = _text(text) or ""
    return properties


def _text(value: str | bytes | None) -> str | None:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise BadRowError(f"a key or header that is no UTF-8 text: {error}") from None
    return value


def parse_queue(text: str, topic: str, queues: Sequence[Any]) -> Any:
    """The queue that "broker:0", or "0" where the topic has one broker, names. Raises ConfigurationError."""
    found = [
        queue
        for queue in queues
        if text in (f"{queue.broker_name}:{queue.queue_id}", str(queue.queue_id))
    ]
    if len(found) != 1:
        what = (
            "is on several brokers, write broker:queue" if found else "is not there to be written"
        )
        raise ConfigurationError(f"column 'queue': queue {text!r} of topic {topic!r} {what}")
    return found[0]
