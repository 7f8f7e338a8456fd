"""Frames of the remoting port.

A client opens a TCP connection, sends MAGIC and then frames; the server answers with frames, in any order. All numbers are
little-endian.

    +0   u32  length       bytes that follow this field: 12 + size of the payload
    +4   u32  request_id   chosen by the caller, echoed in the answer (RocketMQ: opaque)
    +8   u16  method       number of the method (option `remoting` in the .proto files); 0: hello
    +10  u8   flags        bit 0: answer; bit 1: one-way, no answer wanted
    +11  u8   status       in an answer: a gRPC status code, 0 = OK; else 0
    +12  u32  timeout_ms   in a request: time left to answer it, 0 = no limit; else 0
    +16  ...  payload      the protobuf message; in an answer with status != 0: google.rpc.Status

The first frame is method 0 with a RemotingHello and is answered with a RemotingWelcome. Method 1, one-way, gives up the call whose request
id it has. Method 2 is an echo: whoever reads it answers at once.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

MAGIC: Final = b"PMQ\x01"
"""First bytes of a connection; the last is the version of the framing."""

HEADER: Final = struct.Struct("<IIHBBI")
HEADER_SIZE_BYTES: Final = HEADER.size
LENGTH_SIZE_BYTES: Final = 4
assert HEADER_SIZE_BYTES == 16

HELLO_METHOD_ID: Final = 0
CANCEL_METHOD_ID: Final = 1
ECHO_METHOD_ID: Final = 2
FLAG_ANSWER: Final = 1
FLAG_ONE_WAY: Final = 2

FRAME_SIZE_MAX_BYTES: Final = 32 << 20
"""Largest length field that a peer has to take: a pull answer of 16 MiB with its header, and room."""


def encode_cancel(request_id: int) -> bytes:
    """The whole frame that gives up the call of this id."""
    return encode_request(request_id, CANCEL_METHOD_ID, 0, one_way=True)


def encode_echo(request_id: int) -> bytes:
    """The whole frame that asks whether the server is there."""
    return encode_request(request_id, ECHO_METHOD_ID, 0)


class FrameHeader(NamedTuple):
    """The fixed part of a frame, decoded."""

    length: int
    request_id: int
    method_id: int
    flags: int
    status: int
    timeout_ms: int


def decode_header(buffer: bytes | bytearray | memoryview, offset: int = 0) -> FrameHeader:
    """The header at `offset` of `buffer`, which must hold 16 bytes there."""
    return FrameHeader._make(HEADER.unpack_from(buffer, offset))


def encode_request(
    request_id: int,
    method_id: int,
    payload_size_bytes: int,
    timeout_ms: int = 0,
    *,
    one_way: bool = False,
) -> bytes:
    """Header of a request; the payload follows it."""
    flags = FLAG_ONE_WAY if one_way else 0
    return HEADER.pack(
        HEADER_SIZE_BYTES - LENGTH_SIZE_BYTES + payload_size_bytes,
        request_id,
        method_id,
        flags,
        0,
        timeout_ms,
    )


def encode_answer(
    request_id: int, method_id: int, payload_size_bytes: int, status: int = 0
) -> bytes:
    """Header of an answer; the payload (and the regions, counted in its size) follow it."""
    return HEADER.pack(
        HEADER_SIZE_BYTES - LENGTH_SIZE_BYTES + payload_size_bytes,
        request_id,
        method_id,
        FLAG_ANSWER,
        status,
        0,
    )
