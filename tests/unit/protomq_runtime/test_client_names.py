"""The name of a client in its hello, which is cut at 255 octets, as docs/wire.md says."""

from __future__ import annotations

from protomq_runtime.remoting_server import cut


def test_a_name_is_cut_in_octets_and_between_characters() -> None:
    assert cut("é" * 200) == "é" * 127
    assert cut("x" * 300) == "x" * 255
    assert cut("é" * 127 + "x") == "é" * 127 + "x"
