"""Takes the bytes of one remoting connection apart into frames. A plain state machine: no socket, no clock.

The owner reads with `recv_into(reader.target(shared))` and passes the count to `reader.received(shared, count)`. `shared` is one
buffer for all connections of a lane, so an idle connection owns no buffer. Three states:

    empty    the next byte begins a frame; the shared buffer is read into from its start
    rest     the start of a small frame was left over and is kept; it is put before what comes
    large    a frame longer than LARGE_SIZE_BYTES is under way and has a bytearray of its own, into which the socket writes

Behind a large frame the next one is probably large as well. Then only its header is read into the shared buffer, and its payload goes
straight to its bytearray. One system call more saves copying a quarter of a megabyte.

What a peer claims costs nothing until it has sent it: a large frame's bytearray starts with at most LARGE_STEP_BYTES and doubles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeAlias

from protomq.wire.frames import (
    FLAG_ANSWER,
    FLAG_ONE_WAY,
    HEADER,
    HEADER_SIZE_BYTES,
    LENGTH_SIZE_BYTES,
)

SHARED_BUFFER_SIZE_BYTES: Final = 256 << 10
LARGE_SIZE_BYTES: Final = 32 << 10
"""Payloads above this are handed out as `bytearray`: the send path stamps records in place."""
LARGE_STEP_BYTES: Final = 1 << 20
LENGTH_MIN: Final = HEADER_SIZE_BYTES - LENGTH_SIZE_BYTES

assert LARGE_SIZE_BYTES + HEADER_SIZE_BYTES < SHARED_BUFFER_SIZE_BYTES, (
    "a rest must fit before the shared buffer"
)

Frame: TypeAlias = tuple[int, int, int, int, "bytes | bytearray"]
"""(request_id, method_id, marks, timeout_ms, payload); marks: the flags, and the status 8 bits above them, which is 0 in a request."""

MARKS_MAX: Final = FLAG_ONE_WAY
"""Marks above this are those of no request: its caller means something that this version does not know."""

_unpack_header = HEADER.unpack_from


class FrameError(Exception):
    """The peer does not speak the protocol: the connection cannot be used any further. `frames`: what was complete before that."""

    def __init__(self, what: str, frames: Sequence[Frame]) -> None:
        super().__init__(what)
        self.frames = frames


class FrameReader:
    """State of one connection. Owner's thread only."""

    __slots__ = (
        "_expect_large",
        "_filled",
        "_header",
        "_large",
        "_payload_size",
        "_request_sizes_max_bytes",
        "_rest",
        "_size_max_bytes",
    )

    def __init__(
        self,
        frame_size_max_bytes: int,
        request_sizes_max_bytes: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """`request_sizes_max_bytes`: of the payload, by method number; what is not named is limited by the frame size only."""
        self._size_max_bytes = frame_size_max_bytes
        self._request_sizes_max_bytes = request_sizes_max_bytes
        self._rest: bytes = b""
        self._large: bytearray | None = None
        self._expect_large = False
        self._filled = 0
        self._payload_size = 0
        self._header: tuple[int, int, int, int] = (0, 0, 0, 0)

    @property
    def in_frame(self) -> bool:
        """Whether a frame has been begun and not finished."""
        return self._large is not None or bool(self._rest)

    @property
    def held_size_bytes(self) -> int:
        """Memory that an unfinished large frame has."""
        return len(self._large) if self._large is not None else 0

    def target(self, shared: memoryview) -> memoryview:
        """Where the next bytes of the connection go. Never empty; the view must be dropped before `received` is called."""
        if self._large is not None:
            return memoryview(self._large)[self._filled :]
        rest = self._rest
        if rest:
            size = len(rest)
            shared[:size] = rest
            return shared[size:]
        return shared[:HEADER_SIZE_BYTES] if self._expect_large else shared

    def received(self, shared: memoryview, count: int) -> list[Frame]:
        """The frames completed by the `count` bytes that stand in `target` now. Raises FrameError."""
        if self._large is not None:
            return self._received_large(count)
        end = len(self._rest) + count
        at = 0
        self._expect_large = False
        frames: list[Frame] = []
        size_max_bytes = self._size_max_bytes
        while end - at >= HEADER_SIZE_BYTES:
            length, request_id, method_id, flags, status, timeout_ms = _unpack_header(shared, at)
            if length > size_max_bytes or length < LENGTH_MIN or flags & FLAG_ANSWER:
                raise FrameError(self._explain(length, flags), frames)
            marks = flags | status << 8
            next_at = at + LENGTH_SIZE_BYTES + length
            if next_at > end:
                if length > LARGE_SIZE_BYTES:
                    limit = self._request_sizes_max_bytes.get(method_id, size_max_bytes)
                    if length - LENGTH_MIN > limit:
                        raise FrameError(
                            f"a request of {length - LENGTH_MIN} bytes, method {method_id:#06x} takes {limit}",
                            frames,
                        )
                    self._begin_large(
                        (request_id, method_id, marks, timeout_ms),
                        length - LENGTH_MIN,
                        shared[at + HEADER_SIZE_BYTES : end],
                    )
                    at = end
                break
            payload = shared[at + HEADER_SIZE_BYTES : next_at]
            frames.append(
                (
                    request_id,
                    method_id,
                    marks,
                    timeout_ms,
                    bytes(payload) if length <= LARGE_SIZE_BYTES else bytearray(payload),
                )
            )
            at = next_at
        self._rest = bytes(shared[at:end]) if at < end else b""
        return frames

    def _begin_large(
        self, header: tuple[int, int, int, int], payload_size: int, begun: memoryview
    ) -> None:
        size = max(min(payload_size, LARGE_STEP_BYTES), len(begun))
        self._large = bytearray(size)
        self._large[: len(begun)] = begun
        self._filled = len(begun)
        self._payload_size = payload_size
        self._header = header

    def _received_large(self, count: int) -> list[Frame]:
        large = self._large
        assert large is not None
        self._filled += count
        if self._filled < len(large):
            return []
        missing = self._payload_size - self._filled
        if missing:
            large.extend(bytes(min(missing, len(large))))
            return []
        self._large = None
        self._expect_large = True
        return [(*self._header, large)]

    def _explain(self, length: int, flags: int) -> str:
        if length < LENGTH_MIN:
            return f"a frame of length {length}, shorter than its header"
        if length > self._size_max_bytes:
            return f"a frame of length {length}, the limit is {self._size_max_bytes}"
        return f"an answer (flags {flags:#x}) where a request was expected"
