"""From the rows of a DataFrame to messages: which columns mean what, and where the rows are cut. Pure.

Rules:
- A column that means nothing to the sink is an error that names it, not something silently left out.
- Rows are cut into windows by their number and size alone, never by how Spark happens to batch them. So a task that runs
  again with the same rows cuts them at the same places.
- Rows stay columns. No Python object is made for a row of bodies, keys and tags; properties and the text of a sharding key cost one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from protomq.errors import ConfigurationError, MessageTooLargeError
from protomq.records import (
    COMPRESS_OVER_BYTES,
    Compressor,
    compress_body,
    make_front,
    refuse_large_body,
)
from protomq.wire.hashing import key_hash_of, sharding_hash_of, tag_code_of
from protomq.wire.record import BODY_SIZE_MAX_BYTES, FRONT_SIZE_MAX_BYTES, encode_varint

from .checksums import hash63_of_pieces
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
_TEXTS: Final = ("body", "topic", "key", "tags", "tag", "sharding_key")
_LATER: Final = ("delay", "delay_level", "delivery_time", "delivery_timestamp")
_ROW_SIZE_BYTES: Final = 160
"""What a row costs beside its body and texts; only for cutting windows."""


ShardBy: TypeAlias = Literal["", "key", "sharding_key", "none"]
"""Which column chooses the queue; "": sharding_key where there is one, else key, as in Kafka."""
Place: TypeAlias = tuple[str, str | None]
"""Where a row must go: topic, and queue as it is named; None where that is open."""


class Rows(NamedTuple):
    """Rows in order, column by column. Arrays of Arrow are binary without nulls."""

    bodies: pa.BinaryArray
    """As they are stored: compressed where the flags say so."""
    fronts: pa.BinaryArray | None
    """Fields 2 to 5 of each record: keys, tag, properties, attributes. None: no row can have any."""
    key_hashes: NDArray[np.uint64]
    tag_codes: NDArray[np.int64]
    sharding_hashes: NDArray[np.uint32]
    flags: NDArray[np.uint32]
    places: Sequence[Place] | None
    """None: all go to the topic of the option, and none to a queue that it names."""
    shards: NDArray[np.uint64] | None = None
    """hash63 of the text that chooses the queue of a row that names none, 0 where nothing does; None: nothing does in any row."""

    @property
    def row_count(self) -> int:
        """How many rows."""
        return len(self.bodies)

    def part(self, start: int, stop: int) -> Rows:
        """The rows [start, stop), which are views."""
        return Rows(
            self.bodies[start:stop],
            None if self.fronts is None else self.fronts[start:stop],
            self.key_hashes[start:stop],
            self.tag_codes[start:stop],
            self.sharding_hashes[start:stop],
            self.flags[start:stop],
            None if self.places is None else self.places[start:stop],
            None if self.shards is None else self.shards[start:stop],
        )

    def pick(self, indices: Sequence[int] | NDArray[np.int64]) -> Rows:
        """These rows, in this order."""
        picked = np.asarray(indices, np.int64)
        return Rows(
            self.bodies.take(pa.array(picked)),
            None if self.fronts is None else self.fronts.take(pa.array(picked)),
            self.key_hashes[picked],
            self.tag_codes[picked],
            self.sharding_hashes[picked],
            self.flags[picked],
            None if self.places is None else [self.places[index] for index in picked.tolist()],
            None if self.shards is None else self.shards[picked],
        )


def joined(parts: Sequence[Rows]) -> Rows:
    """The rows of all parts, one after the other; the parts have the same columns."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    return Rows(
        pa.concat_arrays([part.bodies for part in parts]),
        None if first.fronts is None else pa.concat_arrays([part.fronts for part in parts]),
        np.concatenate([part.key_hashes for part in parts]),
        np.concatenate([part.tag_codes for part in parts]),
        np.concatenate([part.sharding_hashes for part in parts]),
        np.concatenate([part.flags for part in parts]),
        None if first.places is None else [p for part in parts for p in part.places or ()],
        None
        if first.shards is None
        else np.concatenate([part.shards for part in parts if part.shards is not None]),
    )


class BadRowError(ValueError):
    """A row that cannot be a message."""


def check_columns(names: Sequence[str], topic: str, shard_by: ShardBy = "") -> None:
    """Raises OptionError unless the sink can write rows with these columns; `topic` and `shard_by` are the options'."""
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
    if shard_by in ("key", "sharding_key") and shard_by not in names:
        raise OptionError(f"option 'shardBy' is {shard_by!r}, but there is no such column")


def check_types(kinds: Mapping[str, str]) -> None:
    """Raises OptionError for a column that must be text or bytes and is not; `kinds`: Spark's names of the columns' types."""
    for name in _TEXTS:
        kind = kinds.get(name, "string")
        if not kind.startswith(("string", "binary", "char", "varchar")):
            raise OptionError(
                f"column {name!r} is {kind}: it must be string or binary; cast({name} AS STRING), or to_json, makes it so"
            )


def shard_column(names: Iterable[str], shard_by: ShardBy) -> str | None:
    """The column that chooses the queue of a row that names none; None: queues are taken in turn."""
    if shard_by == "none":
        return None
    wanted = (shard_by,) if shard_by else ("sharding_key", "key")
    return next((name for name in wanted if name in names), None)


def windows(
    batches: Iterable[pa.RecordBatch],
    topic: str,
    compressor: Compressor,
    rows_max: int,
    size_max_bytes: int,
    shard_by: ShardBy = "",
) -> Iterator[Rows]:
    """All rows, in order, cut where one more would be too many or too much."""
    window: list[Rows] = []
    count = size = 0
    for batch in batches:
        rows = rows_of(batch, topic, compressor, shard_by)
        ends = np.cumsum(sizes_of(rows.bodies) + sizes_of(rows.fronts) + _ROW_SIZE_BYTES)
        at = before = 0
        while at < rows.row_count:
            # How many more of the rows fit.
            fit = int(np.searchsorted(ends, before + size_max_bytes - size, "right")) - at
            fit = min(fit, rows_max - count)
            if fit <= 0:
                if window:
                    yield joined(window)
                    window, count, size = [], 0, 0
                    continue
                fit = 1  # A row that is larger than a window has one of its own.
            window.append(rows.part(at, at + fit))
            at += fit
            count, size = count + fit, size + int(ends[at - 1]) - before
            before = int(ends[at - 1])
    if window:
        yield joined(window)


def sizes_of(pieces: pa.BinaryArray | None) -> NDArray[np.int64] | int:
    """The length of each piece in bytes; 0 for None."""
    return 0 if pieces is None else np.diff(bounds_of(pieces))


def bounds_of(pieces: pa.BinaryArray) -> NDArray[np.int64]:
    """Where the pieces begin in their buffer, and where the last one ends."""
    count, offset = len(pieces), pieces.offset
    if not count:
        return np.zeros(1, np.int64)
    bounds = np.frombuffer(pieces.buffers()[1], np.int32, count + 1, 4 * offset)
    return bounds.astype(np.int64)


def rows_of(
    batch: pa.RecordBatch, topic: str, compressor: Compressor, shard_by: ShardBy = ""
) -> Rows:
    """The rows of an Arrow batch. Raises BadRowError, MessageTooLargeError."""
    columns: dict[str, pa.Array] = dict(zip(batch.schema.names, batch.columns, strict=True))
    if columns["body"].null_count:
        raise BadRowError(
            "a row whose body is null: filter such rows out, or give them an empty body"
        )
    bodies, flags = _compressed(_binary(columns["body"], "body"), compressor)
    sharding_hashes = _zeros(batch, np.uint32)
    if columns.keys() <= {"body", "topic", "queue"}:
        fronts, key_hashes, tag_codes = None, _zeros(batch, np.uint64), _zeros(batch, np.int64)
    elif columns.keys() <= {"body", "topic", "queue", "key", "tags", "tag"}:
        fronts, key_hashes, tag_codes = _short_fronts(batch.num_rows, columns)
    else:
        fronts, key_hashes, tag_codes, sharding_hashes = _fronts(batch.num_rows, columns)
    if (
        fronts is not None
        and (largest := int(np.max(sizes_of(fronts), initial=0))) > FRONT_SIZE_MAX_BYTES
    ):
        raise MessageTooLargeError(
            f"keys, tag, properties and sharding key of a row come to {largest} bytes, {FRONT_SIZE_MAX_BYTES} are allowed",
            metadata={"limit_bytes": str(FRONT_SIZE_MAX_BYTES)},
        )
    shards = {None: None, "key": key_hashes}.get(chooses := shard_column(columns, shard_by))
    if chooses == "sharding_key":
        shards = _hashes(_texts(columns["sharding_key"], "sharding_key"))
    places = _places(batch.num_rows, columns, topic)
    return Rows(bodies, fronts, key_hashes, tag_codes, sharding_hashes, flags, places, shards)


def _zeros(batch: pa.RecordBatch, kind: type[Any]) -> NDArray[Any]:
    return np.zeros(batch.num_rows, kind)


def _binary(column: pa.Array, name: str) -> pa.BinaryArray:
    kind = column.type
    if not (
        pa.types.is_binary(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_large_string(kind)
    ):
        raise BadRowError(f"column {name!r} is {kind}: it must be binary or string")
    return column.cast(pa.binary())


def _compressed(
    bodies: pa.BinaryArray, compressor: Compressor
) -> tuple[pa.BinaryArray, NDArray[np.uint32]]:
    """Bodies as they are stored, and their flags."""
    flags = np.zeros(len(bodies), np.uint32)
    sizes = sizes_of(bodies)
    large = np.flatnonzero(sizes > COMPRESS_OVER_BYTES)
    if compressor.compress is not None and len(large):
        stored = bodies.to_pylist()
        for row in large.tolist():
            stored[row], flags[row] = compress_body(compressor, stored[row])
        bodies = pa.array(stored, pa.binary())
        sizes = sizes_of(bodies)
    largest = int(np.max(sizes, initial=0))
    if largest > BODY_SIZE_MAX_BYTES:
        raise refuse_large_body(largest)
    return bodies, flags


# -- what stands between body and trailer --------------------------------------------------------------------------------


def _short_fronts(
    count: int, columns: Mapping[str, pa.Array]
) -> tuple[pa.BinaryArray, NDArray[np.uint64], NDArray[np.int64]]:
    """Keys and tags and nothing else: what most messages have."""
    fields: list[Any] = []
    key_hashes = np.zeros(count, np.uint64)
    tag_codes = np.zeros(count, np.int64)
    if "key" in columns:
        keys = _texts(columns["key"], "key")
        sizes = np.diff(bounds_of(keys))
        key_hashes = _hashes(keys)
        fields += [heads_of(b"\x12", sizes, sizes > 0), keys]
    if (column := columns.get("tags", columns.get("tag"))) is not None:
        tags = _texts(column, "tags").dictionary_encode()
        names = [name.decode() for name in tags.dictionary.to_pylist()]
        codes = np.array([tag_code_of(name) for name in names], np.int64)
        tag_codes = codes[tags.indices.to_numpy(zero_copy_only=False)] if names else tag_codes
        texts = [make_front(None, (), name, None, None, "")[1] for name in names]
        fields.append(pa.array(texts, pa.binary()).take(tags.indices))
    return pc.binary_join_element_wise(*fields, b""), key_hashes, tag_codes


def _hashes(texts: pa.BinaryArray) -> NDArray[np.uint64]:
    """hash63 of each; 0 of an empty one."""
    bounds = bounds_of(texts)
    hashes = np.zeros(len(texts), np.uint64)
    there = bounds[1:] > bounds[:-1]
    if there.any():
        raw = texts.buffers()[2].to_pybytes()
        hashes[there] = hash63_of_pieces(raw, bounds[:-1][there], bounds[1:][there])
    return hashes


def heads_of(
    tag: bytes, sizes: NDArray[np.int64], there: NDArray[np.bool_] | None = None
) -> pa.BinaryArray:
    """The tag and the length of a field for each size; nothing where it is not `there`."""
    distinct, indices = np.unique(sizes, return_inverse=True)
    heads = [tag + encode_varint(size) for size in distinct.tolist()]
    if there is not None:
        heads.append(b"")
        indices = np.where(there, indices, len(heads) - 1)
    return pa.array(heads, pa.binary()).take(pa.array(indices))


def _texts(column: pa.Array, name: str) -> pa.BinaryArray:
    """As UTF-8; null is the same as nothing."""
    try:
        texts = _binary(column, name).cast(pa.string())
    except pa.ArrowInvalid as error:
        raise BadRowError(f"column {name!r} has a text that is no UTF-8: {error}") from None
    return texts.fill_null("").cast(pa.binary())


def _fronts(
    count: int, columns: Mapping[str, pa.Array]
) -> tuple[pa.BinaryArray, NDArray[np.uint64], NDArray[np.int64], NDArray[np.uint32]]:
    """Row by row: properties have to be sorted by name, and no two rows need to have the same."""
    nothing: list[Any] = [None] * count

    def values(*names: str) -> list[Any]:
        return next((columns[name].to_pylist() for name in names if name in columns), nothing)

    fronts: list[bytes] = []
    key_hashes: list[int] = []
    tag_codes: list[int] = []
    sharding_hashes: list[int] = []
    for key, tag, properties, sharding_key in zip(
        values("key"), values("tags", "tag"), values("properties", "headers"),
        values("sharding_key"), strict=True,
    ):  # fmt: skip
        first, front, _ = make_front(
            _text(key), (), tag or "", _properties_of(properties), sharding_key, ""
        )
        fronts.append(front)
        key_hashes.append(key_hash_of(first))
        tag_codes.append(tag_code_of(tag or ""))
        sharding_hashes.append(sharding_hash_of(sharding_key or ""))
    return (
        pa.array(fronts, pa.binary()),
        np.array(key_hashes, np.uint64),
        np.array(tag_codes, np.int64),
        np.array(sharding_hashes, np.uint32),
    )


def _places(count: int, columns: Mapping[str, pa.Array], topic: str) -> Sequence[Place] | None:
    if topic and "queue" not in columns:
        return None
    nothing: list[Any] = [None] * count
    topics = [topic] * count if topic else columns["topic"].to_pylist()
    if not all(topics):
        raise BadRowError("a row without topic, and no option 'topic'")
    queues = columns["queue"].to_pylist() if "queue" in columns else nothing
    named = [None if queue is None else str(queue) for queue in queues]
    return list(zip(topics, named, strict=True))


def _properties_of(value: Any) -> Mapping[str, str] | None:
    """A map comes as pairs, headers as dicts with binary values."""
    if not value:
        return None
    pairs = (
        [(entry["key"], entry["value"]) for entry in value] if isinstance(value[0], dict) else value
    )
    properties: dict[str, str] = {}
    for name, text in pairs:
        if name == "":
            raise BadRowError("a property or header without a name cannot be sent")
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
