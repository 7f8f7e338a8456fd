"""A message as text: as an object for json, yaml and tables, or by a template.

A body is shown as text when it is UTF-8, else as base64 under another name, so that no byte is lost or misread. Templates
are those of rpk and kcat with RocketMQ's words, `%t %q %o %k %v\\n`; they write bodies as they are, byte by byte.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from protomq import Message

TABLE_COLUMNS: Final = {
    "queue_id": 8, "queue_offset": 12, "store_time": 24, "keys": 12, "tag": 8, "body": 0,
}  # fmt: skip
"""Columns of messages as a table, with their widths."""
MOVED_COLUMNS: Final = {"attempt": 7, "origin": 20, "last_error": 24}
"""More of them, where messages come again or have come from elsewhere: retries, dead letters, expired transactions."""

TEMPLATE_HELP: Final = (
    "%t topic, %b broker, %q queue, %o offset, %k key, %g tag, %v body, %s its size, %d store time, "
    "%i message id, %h properties, %a attempt, %e last error, %O origin, %% percent; \\n \\t as usual"
)

DATETIME_MAX_MS: Final = 253_402_300_799_999
"""The last millisecond that a datetime can be."""


def time_text(time_ms: int) -> str:
    """ISO 8601 in UTC with milliseconds; empty for a time that is not known, and the end of the year 9999 for a later one."""
    if time_ms <= 0:
        return ""
    time_ms = min(time_ms, DATETIME_MAX_MS)
    moment = datetime.fromtimestamp(time_ms // 1000, UTC).replace(microsecond=time_ms % 1000 * 1000)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def body_fields(body: bytes) -> dict[str, str]:
    """The body under the name that says how it is written."""
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}


def message_row(message: Message) -> dict[str, Any]:
    """All that there is to know about a message. Raises CorruptMessageError for a damaged one."""
    body = message.body
    return {
        "topic": message.topic,
        "broker": message.queue.broker_name,
        "queue_id": message.queue_id,
        "queue_offset": message.queue_offset,
        "message_id": message.message_id,
        "keys": list(message.keys),
        "tag": message.tag,
        "properties": dict(message.properties),
        "sharding_key": message.sharding_key,
        "born_time": time_text(message.born_time_ms),
        "store_time": time_text(message.store_time_ms),
        "physical_offset": message.physical_offset,
        "size_bytes": len(body),
        **_moved_fields(message),
        **body_fields(body),
    }


def _moved_fields(message: Message) -> dict[str, Any]:
    """What a message has that comes again or has come from elsewhere, as far as it has it."""
    fields: dict[str, Any] = {}
    if message.attempt:
        fields["attempt"] = message.attempt
    if message.last_error:
        fields["last_error"] = message.last_error
    origin = message.origin
    if origin is not None:
        fields |= origin_field(origin.topic, origin.queue_id, origin.queue_offset)
    if message.replayed_group:
        fields["replayed_group"] = message.replayed_group
    return fields


def origin_field(topic: str, queue_id: int, queue_offset: int | None) -> dict[str, Any]:
    """Where a message stood before it was moved, as a field of its row. Without an offset if it was in no queue."""
    place: dict[str, Any] = {"topic": topic, "queue_id": queue_id}
    if queue_offset is not None:
        place["queue_offset"] = queue_offset
    return {"origin": place}


def origin_text(row: Mapping[str, Any]) -> str:
    """The origin that a row has, in short: topic/queue@offset; empty if it has none."""
    place = row.get("origin")
    if place is None:
        return ""
    at = f"@{place['queue_offset']}" if "queue_offset" in place else ""
    return f"{place['topic']}/{place['queue_id']}{at}"


_PARTS: Final[dict[str, Callable[[Message], bytes]]] = {
    "t": lambda message: message.topic.encode(),
    "b": lambda message: message.queue.broker_name.encode(),
    "q": lambda message: b"%d" % message.queue_id,
    "o": lambda message: b"%d" % message.queue_offset,
    "k": lambda message: message.key.encode(),
    "g": lambda message: message.tag.encode(),
    "v": lambda message: message.body,
    "s": lambda message: b"%d" % len(message.body),
    "d": lambda message: time_text(message.store_time_ms).encode(),
    "i": lambda message: message.message_id.encode(),
    "a": lambda message: b"%d" % message.attempt,
    "e": lambda message: message.last_error.encode(),
    "O": lambda message: origin_text(_moved_fields(message)).encode(),
    "h": lambda message: json.dumps(dict(message.properties), ensure_ascii=False).encode(),
}
_ESCAPES: Final = {"n": b"\n", "t": b"\t", "r": b"\r", "0": b"\0", "\\": b"\\"}


class Template:
    """Writes messages by a template. Raises ValueError for a letter in `text` that has no meaning."""

    def __init__(self, text: str) -> None:
        self._parts: list[bytes | Callable[[Message], bytes]] = []
        for piece in re.findall(r"%.?|\\.?|[^%\\]+", text, re.DOTALL):
            self._parts.append(_parse_piece(piece))

    def write(self, message: Message) -> bytes:
        """The message, as the template wants it. Raises CorruptMessageError for a damaged one, whatever the template names."""
        if message.is_damaged:
            message.keys  # noqa: B018  # Raises.
        return b"".join(
            [part if isinstance(part, bytes) else part(message) for part in self._parts]
        )


def _parse_piece(piece: str) -> bytes | Callable[[Message], bytes]:
    sign, letter = piece[0], piece[1:]
    if piece == "%%":
        return b"%"
    if sign == "%":
        if letter not in _PARTS:
            raise ValueError(
                f"{piece!r} in the template has no meaning; there are: {TEMPLATE_HELP}"
            )
        return _PARTS[letter]
    if sign == "\\":
        if letter not in _ESCAPES:
            raise ValueError(
                f"{piece!r} in the template has no meaning; write \\\\ for a backslash"
            )
        return _ESCAPES[letter]
    return piece.encode()
