"""Transaction handles. The answer to the send of a half message has one, and the producer gives it back to end the transaction."""

from __future__ import annotations

import struct
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable
from typing import Final, NamedTuple

from protomq.wire.record import encode_message_id
from protomq_runtime.errors import ServiceError, invalid_argument

from .store.state.transactions import HalfMessage, TransactionKey

_HANDLE: Final = struct.Struct("<BQQIQ")
_TO_URL: Final = bytes.maketrans(b"+/", b"-_")
_FROM_URL: Final = bytes.maketrans(b"-_", b"+/")
_VERSION: Final = 2
"""Version of the handle. 1 is a recall handle's."""


class TransactionHandle(NamedTuple):
    """A decoded handle. The broker compares all fields.

    Attributes:
        broker_name: where the transaction is.
        position: where the half message stood, or where its request began, when the handle was made. The message may have moved further on
          since.
        key: who sent it.
    """

    broker_name: str
    position: int
    key: TransactionKey

    @property
    def message_id(self) -> str:
        """The id of the message."""
        return encode_message_id(*self.key)

    def names(self, half: HalfMessage) -> bool:
        """Whether the handle can mean this half message, which has the same key. Half messages are carried forward, never back."""
        return half.position >= self.position


class Handles:
    """Writes and reads the handles of one broker."""

    def __init__(self, broker_name: str) -> None:
        self._broker_name = broker_name
        self._tail = broker_name.encode()

    def encode(self, position: int, key: TransactionKey) -> str:
        """Text of letters, digits, - and _."""
        return self.encode_all(position, (key,))[0]

    def encode_all(self, position: int, keys: Iterable[TransactionKey]) -> list[str]:
        """The handles of half messages that were sent together."""
        tail = self._tail
        return [
            b2a_base64(_HANDLE.pack(_VERSION, position, *key) + tail, newline=False)
            .translate(_TO_URL)
            .rstrip(b"=")
            .decode()
            for key in keys
        ]

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
        return TransactionHandle(
            broker_name, position, TransactionKey(producer_id, epoch, sequence)
        )


def _no_handle() -> ServiceError:
    return invalid_argument("transaction_handle", "is not a handle of a send")
