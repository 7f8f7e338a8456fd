"""Answers to a slave's fetches as they are received: the log in them is never copied, and all go through the same memory.

The decoder of protobuf copies a field when it decodes, and again when it is read. For the log that costs more than all the rest.
"""

from __future__ import annotations

from typing import Final

from google.protobuf.message import DecodeError

from protomq.v1 import ha_service_pb2 as ha
from protomq.wire.varints import read_varint
from protomq_ha.intake import LogPart

LOG_TAG: Final = ha.FetchResponse.LOG_FIELD_NUMBER << 3 | 2
FRONT_SIZE_BYTES: Final = 512 << 10
"""Room before an answer, for the beginning of an append whose end the answer brings."""

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


class AnswerMemory:
    """The memory of the large answers of one connection, one at a time. One thread."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def lend(self, size_bytes: int) -> memoryview:
        """Returns room for an answer of this size, in place of the last one."""
        end = FRONT_SIZE_BYTES + size_bytes
        if len(self._memory) < end:
            self._memory = bytearray(end)
        return memoryview(self._memory)[FRONT_SIZE_BYTES:end]

    def read(self, payload: bytes | memoryview) -> tuple[ha.FetchResponse, LogPart]:
        """Decodes an answer: (all but its log, its log). Raises DecodeError."""
        head_end, start = _find_log(payload)
        response = ha.FetchResponse.FromString(bytes(payload[:head_end]))
        if isinstance(payload, memoryview) and payload.obj is self._memory:
            memory = memoryview(self._memory)[: FRONT_SIZE_BYTES + len(payload)]
            return response, LogPart(memory, FRONT_SIZE_BYTES + start)
        return response, LogPart(memoryview(payload), start)


def _find_log(payload: bytes | memoryview) -> tuple[int, int]:
    """(where the field with the log begins, where the log begins); twice the end if there is none. Raises DecodeError."""
    at = 0
    try:
        while at < len(payload):
            tag, behind = read_varint(payload, at)
            kind = tag & 7
            size_bytes = {_FIXED64: 8, _FIXED32: 4}.get(kind, 0)
            if kind in (_VARINT, _LENGTH):
                value, behind = read_varint(payload, behind)
                size_bytes = value if kind == _LENGTH else 0
            elif not size_bytes:
                raise DecodeError(f"a field of an answer has the wire type {kind}")
            if tag == LOG_TAG:
                if behind + size_bytes != len(payload):
                    raise DecodeError("the log is not the last field of an answer")
                return at, behind
            at = behind + size_bytes
    except (IndexError, ValueError) as error:
        raise DecodeError("an answer ends within a field") from error
    return len(payload), len(payload)
