"""The codecs of bodies: which are installed, and how a body is unpacked within bounds.

zlib is in every Python; zstd is where Python is 3.14 or backports.zstd is installed, LZ4 where lz4 is.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Any

from .record import (
    COMPRESSION_LZ4,
    COMPRESSION_NONE,
    COMPRESSION_ZLIB,
    COMPRESSION_ZSTD,
    FLAG_COMPRESSION_MASK,
)


class CodecError(ValueError):
    """A body that cannot be unpacked. The message says why."""


def unpack_body(data: bytes, flags: int, size_max_bytes: int) -> bytes:
    """The body that `data` was before compression, as bits 0-2 of `flags` say.

    The data is exactly one zlib stream, or one frame. More data behind it is an error, since the body would be cut short otherwise.

    Raises CodecError if it is damaged, cut off, followed by more, or larger than `size_max_bytes`. Also if its codec is unknown or
    not installed. It never makes more than it may: 1 MiB of zeros fits in 1 KiB, and the sender chooses what is unpacked.
    """
    codec = flags & FLAG_COMPRESSION_MASK
    if codec == COMPRESSION_NONE:
        return data
    if codec == COMPRESSION_ZLIB:
        name, decompressor = "zlib", zlib.decompressobj()
    elif codec == COMPRESSION_LZ4:
        name, decompressor = "lz4", _installed(lz4_module(), "lz4").LZ4FrameDecompressor()
    elif codec == COMPRESSION_ZSTD:
        name, decompressor = "zstd", _installed(zstd_module(), "zstd").ZstdDecompressor()
    else:
        raise CodecError(f"unknown compression {codec} in a message; a newer protomq may know it")
    try:
        # One byte more than allowed tells "exactly the limit" from "more than the limit".
        body = decompressor.decompress(data, size_max_bytes + 1)
    except Exception as error:  # Each library has its own class: zlib.error, RuntimeError, ZstdError.
        raise CodecError(f"the {name} body of a message cannot be unpacked: {error}") from error
    if len(body) > size_max_bytes:
        raise CodecError(
            f"the {name} body of a message unpacks to more than the allowed {size_max_bytes} bytes"
        )
    if not decompressor.eof:
        raise CodecError(f"the {name} body of a message is cut off")
    if decompressor.unused_data:
        raise CodecError(
            f"the {name} body of a message goes on for {len(decompressor.unused_data)} bytes behind its end; "
            "a body is one zlib stream, or one frame"
        )
    return bytes(body)


@lru_cache(maxsize=1)
def zstd_module() -> Any:
    """compression.zstd (Python 3.14), backports.zstd, or None."""
    try:
        from compression import zstd  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        try:
            from backports import zstd
        except ImportError:
            return None
    return zstd


@lru_cache(maxsize=1)
def lz4_module() -> Any:
    """lz4.frame, or None."""
    try:
        import lz4.frame
    except ImportError:
        return None
    return lz4.frame


def _installed(module: Any, name: str) -> Any:
    if module is None:
        raise CodecError(
            f'a message is compressed with {name}, which is not installed; pip install "protomq[compression]"'
        )
    return module
