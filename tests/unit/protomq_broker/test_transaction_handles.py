"""Handles of transactions: those that are written or read together are what each by itself is."""

from __future__ import annotations

import base64
import random
import struct

import numpy as np
import pytest
from numpy.typing import NDArray

from protomq.v1.send_service_pb2 import SendResponse
from protomq_broker.store.state.transactions import TransactionKey
from protomq_broker.transaction_handles import Handles
from protomq_runtime.errors import ServiceError


def rows(texts: list[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(texts), np.uint8).reshape(len(texts), -1)


NAMES = ["b", "bb", "bbb", "broker-é", "x" * 127]


@pytest.mark.parametrize("name", NAMES)
def test_handles_that_are_written_together_are_in_base64_each(name: str) -> None:
    handles = Handles(name)
    written = handles.encode_all(2**40, 2**63 + 1, 9, range(7, 40))
    for sequence, text in zip(range(7, 40), written, strict=True):
        octets = struct.pack("<BQQIQ", 2, 2**40, 2**63 + 1, 9, sequence) + name.encode()
        assert text == base64.urlsafe_b64encode(octets).rstrip(b"=").decode()
        assert text == handles.encode(2**40, TransactionKey(2**63 + 1, 9, sequence))
    read = handles.decode_all(rows([text.encode() for text in written]))
    assert read is not None
    assert list(zip(*read, strict=True)) == [handles.decode(text) for text in written]
    assert (read.keys[-1], read.positions[-1]) == (TransactionKey(2**63 + 1, 9, 39), 2**40)


@pytest.mark.parametrize("name", NAMES)
def test_fields_of_an_answer_are_those_that_protobuf_would_write(name: str) -> None:
    handles = Handles(name)
    tag = bytes((SendResponse.TRANSACTION_HANDLES_FIELD_NUMBER << 3 | 2,))
    for sequences in (range(7, 8), range(7, 40)):
        expected = SendResponse(transaction_handles=handles.encode_all(2**40, 5, 9, sequences))
        assert handles.encode_fields(tag, 2**40, 5, 9, sequences) == expected.SerializeToString()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(40))
def test_handles_are_read_together_only_if_each_by_itself_is_one(name: str, seed: int) -> None:
    rng, handles = random.Random(seed), Handles(name)
    texts = [text.encode() for text in handles.encode_all(5, 6, 7, range(rng.randrange(1, 9)))]
    number = rng.randrange(len(texts))
    wrong = bytearray(texts[number])
    wrong[rng.randrange(len(wrong))] = rng.choice(b"=A-_+/ \n\0\xffBCw")
    texts[number] = bytes(wrong)
    if rng.random() < 0.2:
        texts = [text[:-1] for text in texts]
    together = handles.decode_all(rows(texts))
    if together is not None:
        each = [handles.decode(text.decode()) for text in texts]
        assert list(zip(*together, strict=True)) == each


def test_no_handle_and_those_of_others_are_not_read_together() -> None:
    handles = Handles("b")
    own = [text.encode() for text in handles.encode_all(1, 2, 3, range(4))]
    (other,) = (text.encode() for text in Handles("c").encode_all(1, 2, 3, range(1)))
    assert handles.decode_all(rows([*own, other])) is None
    assert handles.decode_all(rows([b"\x00" * len(own[0])])) is None
    with pytest.raises(ServiceError):
        handles.decode(other.decode())
