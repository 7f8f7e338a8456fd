"""The first frames of a connection to the remoting port, for both flavours. Pure functions.

A gRPC port betrays itself at once: it answers with an HTTP/2 SETTINGS frame, which is no welcome. Or it closes, as a remoting port does,
too, that is about to end. So who closes without a word is not taken for either.
"""

from __future__ import annotations

from typing import Final

from .errors import (
    ConfigurationError,
    ConnectFailedError,
    ForeignProtocolError,
    ProtomqError,
    TooManyError,
    WrongTypeError,
    error_from_status,
)
from .wire.frames import (
    FLAG_ANSWER,
    HEADER,
    HEADER_SIZE_BYTES,
    HELLO_METHOD_ID,
    LENGTH_SIZE_BYTES,
    MAGIC,
)
from .wire.record import encode_varint

VERSION: Final = "0.1.0"
"""Version of this SDK; a test compares it with the package's."""

_LENGTH_EXTRA: Final = HEADER_SIZE_BYTES - LENGTH_SIZE_BYTES
_WELCOME_SIZE_MAX_BYTES: Final = 64 << 10


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port"; raises ConfigurationError."""
    if not isinstance(address, str):
        raise WrongTypeError(f"an address is a str of the form host:port, not {address!r}")
    scheme, is_url, rest = address.strip().partition("://")
    if is_url:
        raise ConfigurationError(
            f"an address has the form host:port, without {scheme}://: write {rest.partition('/')[0]!r}"
        )
    host, _, port = address.strip().rpartition(":")
    in_brackets = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if in_brackets else host
    # The limits of DNS: what is beyond them ends in an error of Python's own in the middle of a connect.
    labels = bare.removesuffix(".").split(".")
    if (
        any(not 0 < len(label) < 64 for label in labels)
        or any(character.isspace() or character in "/@?#[]" for character in bare)
        or (":" in bare and not in_brackets)
        or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536)
    ):
        raise ConfigurationError(
            f"an address has the form host:port, with a port from 1 to 65535; this is {address!r}"
        )
    return bare, int(port)


def encode_hello(lane: int, client_id: str) -> bytes:
    """MAGIC and the hello frame. RemotingHello is encoded by hand, so that the hot path loads no protobuf."""
    client, version = client_id.encode("ascii", "replace")[:255], VERSION.encode()
    payload = b"".join(
        (
            bytes((0x08, lane, 0x12)), encode_varint(len(client)), client,
            b"\x1a", encode_varint(len(version)), version,
        )
    )  # fmt: skip
    return MAGIC + HEADER.pack(_LENGTH_EXTRA + len(payload), 0, HELLO_METHOD_ID, 0, 0, 0) + payload


def check_welcome_header(header: bytes | memoryview, address: str) -> tuple[int, int] | None:
    """(size of the welcome's payload, status); None: more is to come. Raises ForeignProtocolError if this is no answer to a hello.

    `header`: what has come of it. An HTTP/2 SETTINGS frame may be shorter.
    """
    if len(header) < LENGTH_SIZE_BYTES:
        return None
    size = int.from_bytes(header[:LENGTH_SIZE_BYTES], "little") - _LENGTH_EXTRA
    is_begun = 0 <= size <= _WELCOME_SIZE_MAX_BYTES
    if is_begun and len(header) < HEADER_SIZE_BYTES:
        return None
    if is_begun:
        _, request_id, method_id, flags, status, _ = HEADER.unpack(header)
        if (request_id, method_id, flags) == (0, HELLO_METHOD_ID, FLAG_ANSWER):
            return size, status
    raise ForeignProtocolError(f"{address} does not speak protomq's remoting protocol")


def closed_unheard(address: str) -> ConnectFailedError:
    """The error of a port that closes before its welcome is complete."""
    return ConnectFailedError(f"{address} closed the connection instead of answering the hello")


def error_of_refusal(status: int, payload: bytes, address: str) -> ProtomqError:
    """The exception for a hello whose status is not 0. A port that has no place is as good as one that cannot be reached."""
    refusal = error_of_answer(status, payload)
    if not isinstance(refusal, TooManyError):
        return refusal
    failure = ConnectFailedError(f"{address}: {refusal}")
    failure.__cause__ = refusal
    return failure


def error_of_answer(status: int, payload: bytes) -> ProtomqError:
    """The exception for an answer whose status is not 0."""
    from google.protobuf.message import DecodeError

    from .wire.status import RpcStatus, decode_status

    try:
        decoded = decode_status(payload)
    except DecodeError:
        decoded = RpcStatus(status, "the server's error does not parse")
    return error_from_status(decoded)
