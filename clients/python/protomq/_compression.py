"""Compression of bodies: which codecs are here, and both directions.

Rules:
- A body is compressed if it is larger than the threshold (4 KiB, as RocketMQ's compressMsgBodyOverHowmuch), and if that makes it
  smaller. Else it travels as it is. Bits 0-2 of the record's `flags` say which it was.
- zlib is the default: every Python and every other language has it, so that any consumer can read what any producer sent.
- zstd and lz4 come with `pip install "protomq[compression]"`, at the consumers too. If the chosen codec is not installed, the
  producer uses zlib, logs that, and shows it in its attribute `compression`. So everybody can read the messages.
- Decompression never produces more than the caller allows: 1 MiB of zeros fits in 1 KiB, and the sender chooses what we unpack.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

from ._interrupts import comes_of_signal
from .errors import CompressionError, ConfigurationError
from .wire import codecs
from .wire.codecs import CodecError, unpack_body
from .wire.record import (
    BODY_SIZE_MAX_BYTES,
    COMPRESSION_LZ4,
    COMPRESSION_NONE,
    COMPRESSION_ZLIB,
    COMPRESSION_ZSTD,
)

logger = logging.getLogger("protomq.compression")

CompressionName = Literal["auto", "zstd", "lz4", "zlib", "none"]

COMPRESS_OVER_BYTES: Final = 4096
"""RocketMQ's default, compressMsgBodyOverHowmuch."""

DECOMPRESSED_SIZE_MAX_BYTES: Final = 8 * BODY_SIZE_MAX_BYTES
"""Default cap of what one body may unpack to: 32 MiB. 4 MiB of text can honestly come to that, a bomb comes to 4 GiB."""

FLAGS: Final[dict[str, int]] = {
    "none": COMPRESSION_NONE,
    "zlib": COMPRESSION_ZLIB,
    "lz4": COMPRESSION_LZ4,
    "zstd": COMPRESSION_ZSTD,
}

# Each library's own default level, except zlib: RocketMQ's 5.
LEVEL_DEFAULTS: Final = {"none": 0, "zlib": 5, "lz4": 0, "zstd": 3}


PIECE_SIZE_BYTES: Final = 256 << 10
"""Between two pieces of a large body it is asked whether to go on: 10 ms with zlib."""


def _go_on() -> None:
    """Nobody is in a hurry."""


class Compressor(NamedTuple):
    """A codec with its level. `name` is what is really used, after any fallback.

    `compress` takes a body, and what is called between its pieces, which may raise to give up.
    """

    name: str
    flag: int
    compress: Callable[[bytes, Callable[[], None]], bytes] | None


def make_compressor(name: str = "auto", level: int | None = None) -> Compressor:
    """The compressor for an option `compression`. "auto": zstd where it is installed, else zlib."""
    if name == "auto":
        name = "zstd" if codecs.zstd_module() is not None else "zlib"
    elif name == "zstd" and codecs.zstd_module() is None:
        logger.warning(
            'zstd is not installed, bodies are compressed with zlib; pip install "protomq[compression]"'
        )
        name, level = "zlib", None  # The level was meant for another codec.
    elif name == "lz4" and codecs.lz4_module() is None:
        logger.warning(
            'lz4 is not installed, bodies are compressed with zlib; pip install "protomq[compression]"'
        )
        name, level = "zlib", None
    if name not in FLAGS:
        raise ConfigurationError(
            f"compression must be one of auto, {', '.join(FLAGS)}, not {name!r}"
        )
    chosen = LEVEL_DEFAULTS[name] if level is None else level
    compress = _compress_function(name, chosen)
    if compress is not None:
        try:
            compress(b"", _go_on)
        except Exception as error:  # Each library has its own class.
            if comes_of_signal(error):
                raise
            raise ConfigurationError(
                f"compression_level {level} is no level of {name}: {error}"
            ) from error
    return Compressor(name, FLAGS[name], compress)


def compress_body(
    compressor: Compressor, body: bytes, check: Callable[[], None] = _go_on
) -> tuple[bytes, int]:
    """(body, flag) as they go into the record: unchanged and 0 where compression does not pay. `check` may raise to give up."""
    if compressor.compress is None:
        return body, COMPRESSION_NONE
    packed = compressor.compress(body, check)
    if len(packed) >= len(body):
        return body, COMPRESSION_NONE
    return packed, compressor.flag


def decompress(data: bytes, flags: int, size_max_bytes: int = DECOMPRESSED_SIZE_MAX_BYTES) -> bytes:
    """The body that `data` was before compression, as bits 0-2 of `flags` say.

    Raises CompressionError if the body is damaged, cut off, followed by more, or larger than `size_max_bytes`. Also if its codec
    is unknown or not installed.
    """
    try:
        return unpack_body(data, flags, size_max_bytes)
    except CodecError as error:
        raise CompressionError(str(error)) from error


def _compress_function(
    name: str, level: int
) -> Callable[[bytes, Callable[[], None]], bytes] | None:
    if name == "none":
        return None
    if name == "zlib":
        return _in_pieces(
            lambda body: zlib.compress(body, level), lambda: (b"", zlib.compressobj(level))
        )
    if name == "lz4":
        lz4 = codecs.lz4_module()

        def begin() -> tuple[bytes, Any]:
            stream = lz4.LZ4FrameCompressor(compression_level=level)
            return stream.begin(), stream

        return _in_pieces(lambda body: bytes(lz4.compress(body, compression_level=level)), begin)
    zstd = codecs.zstd_module()
    return _in_pieces(
        lambda body: bytes(zstd.compress(body, level=level)),
        lambda: (b"", zstd.ZstdCompressor(level=level)),
    )


def _in_pieces(
    at_once: Callable[[bytes], bytes], begin: Callable[[], tuple[bytes, Any]]
) -> Callable[[bytes, Callable[[], None]], bytes]:
    """`at_once` for small bodies; for large ones a stream, of which `begin` makes the head and the object."""

    def compress(body: bytes, check: Callable[[], None]) -> bytes:
        check()
        if len(body) <= PIECE_SIZE_BYTES:
            return at_once(body)
        head, stream = begin()
        parts = [head]
        pieces = memoryview(body)
        for start in range(0, len(body), PIECE_SIZE_BYTES):
            parts.append(stream.compress(pieces[start : start + PIECE_SIZE_BYTES]))
            check()
        parts.append(stream.flush())
        return b"".join(parts)

    return compress
