"""Bodies come back as they were; what is damaged, too large or unknown is an error; a missing codec falls back visibly."""

from __future__ import annotations

import logging
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq import _compression
from protomq._compression import compress_body, decompress, make_compressor
from protomq.errors import CompressionError, ConfigurationError
from protomq.wire import codecs

CODECS = ["zlib", "lz4", "zstd"]


@pytest.mark.parametrize("codec", CODECS)
@given(body=st.binary(max_size=2000).map(lambda data: data * 4))
def test_a_body_comes_back_as_it_was(codec: str, body: bytes) -> None:
    packed, flag = compress_body(make_compressor(codec), body)
    assert decompress(packed, flag | 8) == body
    assert flag == 0 or len(packed) < len(body)


@pytest.mark.parametrize("codec", CODECS)
def test_text_gets_smaller_and_levels_are_taken(codec: str) -> None:
    body = b"to be or not to be, " * 1000
    for level in (None, 1, 9):
        packed, flag = compress_body(make_compressor(codec, level), body)
        assert flag == _compression.FLAGS[codec]
        assert len(packed) < len(body) // 10
        assert decompress(packed, flag) == body


def test_a_body_that_does_not_get_smaller_stays_as_it_is() -> None:
    body = random.Random(1).randbytes(6000)
    assert compress_body(make_compressor("zstd"), body) == (body, 0)
    assert compress_body(make_compressor("none"), bytes(10_000)) == (bytes(10_000), 0)


@pytest.mark.parametrize("codec", CODECS)
def test_output_is_capped(codec: str) -> None:
    packed, flag = compress_body(make_compressor(codec), bytes(1 << 20))
    assert decompress(packed, flag, 1 << 20) == bytes(1 << 20)
    with pytest.raises(CompressionError, match="more than the allowed"):
        decompress(packed, flag, (1 << 20) - 1)


@pytest.mark.parametrize("codec", CODECS)
def test_damage_is_an_error(codec: str) -> None:
    packed, flag = compress_body(make_compressor(codec), b"abcdefgh" * 1000)
    with pytest.raises(CompressionError):
        decompress(packed[:-3], flag)
    with pytest.raises(CompressionError):
        decompress(b"\xff" * 20, flag)
    with pytest.raises(CompressionError):
        decompress(b"", flag)


@pytest.mark.parametrize("codec", CODECS)
def test_what_stands_behind_the_end_is_an_error_and_not_cut(codec: str) -> None:
    packed, flag = compress_body(make_compressor(codec), b"abcdefgh" * 1000)
    for tail in (packed, b"junk", b"\x00"):
        with pytest.raises(CompressionError, match=f"{len(tail)} bytes behind its end"):
            decompress(packed + tail, flag)
    # The output stays bounded: the first of two that would be too large is not unpacked, whatever follows it.
    with pytest.raises(CompressionError, match="more than the allowed"):
        decompress(packed + packed, flag, 7_999)


@pytest.mark.parametrize("codec", CODECS)
def test_a_large_body_is_one_stream_and_can_be_given_up_between_its_pieces(codec: str) -> None:
    body = b"".join(b"%d," % i for i in range(300_000))
    assert len(body) > 4 * _compression.PIECE_SIZE_BYTES
    calls = []
    packed, flag = compress_body(make_compressor(codec), body, lambda: calls.append(1))
    assert decompress(packed, flag) == body
    assert len(calls) >= 5

    def give_up() -> None:
        calls.pop()
        if len(calls) < 3:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        compress_body(make_compressor(codec), body, give_up)


def test_a_level_that_a_codec_does_not_have_is_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match="compression_level 22 is no level of zlib"):
        make_compressor("zlib", 22)


def test_an_unknown_codec_is_an_error() -> None:
    with pytest.raises(CompressionError, match="unknown compression 7"):
        decompress(b"x", 7)
    with pytest.raises(ConfigurationError):
        make_compressor("brotli")


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_codec_that_is_not_installed_is_replaced_by_zlib_and_that_is_logged(
    codec: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    packed, flag = compress_body(make_compressor(codec), bytes(5000))
    monkeypatch.setattr(codecs, f"{codec}_module", lambda: None)
    with caplog.at_level(logging.WARNING, "protomq"):
        compressor = make_compressor(codec, 19)
    assert compressor.name == "zlib"
    assert "protomq[compression]" in caplog.text
    assert decompress(*compress_body(compressor, bytes(5000))) == bytes(5000)
    with pytest.raises(CompressionError, match="not installed"):
        decompress(packed, flag)


def test_auto_is_zstd_where_installed_else_zlib(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_compressor("auto").name == "zstd"
    monkeypatch.setattr(codecs, "zstd_module", lambda: None)
    assert make_compressor("auto").name == "zlib"
