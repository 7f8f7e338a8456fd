"""Transaction handles. The answer to the send of a half message has one, and the producer gives it back to end the transaction."""

from __future__ import annotations

import struct
from binascii import a2b_base64, b2a_base64
from itertools import chain, repeat
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protomq.wire.record import encode_varint
from protomq_runtime.errors import ServiceError, invalid_argument

from .store.state.transactions import Key, TransactionKey

_HANDLE: Final = struct.Struct("<BQQIQ")
_COLUMNS: Final = (
    ("version", "u1"),
    ("position", "<u8"),
    ("producer_id", "<u8"),
    ("producer_epoch", "<u4"),
    ("sequence", "<u8"),
)
_ZERO_BITS: Final = ord("A")
"""In base64."""
_TO_URL: Final = bytes.maketrans(b"+/", b"-_")
_FROM_URL: Final = bytes.maketrans(b"-_", b"+/")
_VERSION: Final = 2
"""Version of the handle. 1 is a recall handle's."""


class TransactionHandle(NamedTuple):
    """What a handle says. It has the broker's name, too, which is compared.

    Attributes:
        key: who sent the half message.
        position: where it stood, or where its request began, when the handle was made. The message may have moved further on since.
    """

    key: TransactionKey
    position: int


class TransactionHandles(NamedTuple):
    """The same of several handles, as columns. The keys are plain tuples: they are looked up, and no more."""

    keys: list[Key]
    positions: list[int]


class Handles:
    """Writes and reads the handles of one broker.

    Those that come together are one text in base64. There each has zeros behind it, up to a multiple of three octets. In the text these are
    its last characters, which are cut off.
    """

    def __init__(self, broker_name: str) -> None:
        self._broker_name = broker_name
        self._tail = broker_name.encode()
        size = _HANDLE.size + len(self._tail)
        self._zeros = bytes(-size % 3)
        self._row = struct.Struct(f"{_HANDLE.format}{len(self._tail) + len(self._zeros)}s")
        self._padded_length = self._row.size // 3 * 4
        self._length = self._padded_length - len(self._zeros)
        self._cut = struct.Struct(f"{self._length}s{len(self._zeros)}x")
        """A handle in the text of several, without what its zeros become."""
        tail = f"V{self._row.size - _HANDLE.size}"
        self._columns = np.dtype([*_COLUMNS, ("tail", tail)])

    def encode(self, position: int, key: TransactionKey) -> str:
        """Text of letters, digits, - and _."""
        return self.encode_all(position, key[0], key[1], range(key[2], key[2] + 1))[0]

    def encode_all(
        self, position: int, producer_id: int, producer_epoch: int, sequences: range
    ) -> list[str]:
        """The handles of half messages that were sent together."""
        text = self._text(position, producer_id, producer_epoch, sequences).decode()
        length, step = self._length, self._padded_length
        return [text[at : at + length] for at in range(0, len(text), step)]

    def encode_fields(
        self, tag: bytes, position: int, producer_id: int, producer_epoch: int, sequences: range
    ) -> bytes:
        """The same as fields of a message, each with this tag."""
        text = self._text(position, producer_id, producer_epoch, sequences)
        head = tag + encode_varint(self._length)
        return head + head.join(chain.from_iterable(self._cut.iter_unpack(text)))

    def _text(
        self, position: int, producer_id: int, producer_epoch: int, sequences: range
    ) -> bytes:
        alike = map(repeat, (_VERSION, position, producer_id, producer_epoch))
        # `Struct.pack` gives what it lacks of the tail as zeros.
        octets = b"".join(map(self._row.pack, *alike, sequences, repeat(self._tail)))
        return b2a_base64(octets, newline=False).translate(_TO_URL)

    def decode_all(self, texts: NDArray[np.uint8]) -> TransactionHandles | None:
        """As `decode`, of texts of one length, the rows of an array; None unless all of them are handles of this broker."""
        count, length = texts.shape
        if length != self._length:
            return None
        padded = np.full((count, self._padded_length), _ZERO_BITS, np.uint8)
        padded[:, :length] = texts
        try:
            octets = a2b_base64(padded.tobytes().translate(_FROM_URL), strict_mode=True)
        except ValueError:
            return None
        if len(octets) != count * self._row.size:
            return None
        rows = np.frombuffer(octets, self._columns)
        if rows["version"].tobytes() != bytes((_VERSION,)) * count:
            return None
        if rows["tail"].tobytes() != (self._tail + self._zeros) * count:
            return None
        identities = (rows[name].tolist() for name in ("producer_id", "producer_epoch", "sequence"))
        return TransactionHandles(list(zip(*identities, strict=True)), rows["position"].tolist())

    def decode(self, text: str) -> TransactionHandle:
        """Raises ServiceError for what is no handle, or another broker's."""
        try:
            octets = a2b_base64(
                (text.encode() + b"=" * (-len(text) % 4)).translate(_FROM_URL), strict_mode=True
            )
            version, position, producer_id, epoch, sequence = _HANDLE.unpack_from(octets)
            tail = octets[_HANDLE.size :]
            broker_name = self._broker_name if tail == self._tail else tail.decode()
        except (struct.error, ValueError):  # that of base64 and of UTF-8 are ValueErrors
            raise _no_handle() from None
        if version != _VERSION:
            raise _no_handle()
        if broker_name != self._broker_name:
            raise invalid_argument(
                "transaction_handle",
                f"is of broker {broker_name!r}, this is {self._broker_name!r}: ask that one",
            )
        return TransactionHandle(TransactionKey(producer_id, epoch, sequence), position)


def _no_handle() -> ServiceError:
    return invalid_argument("transaction_handle", "is not a handle of a send")
