"""Who calls, and the place where that will be found out.

    RemotingHello.authorization   ┐
    gRPC metadata `authorization` ┴→ Authenticator ─→ Principal of the connection or call ─→ `call.principal`

There is no authentication yet: every caller is anonymous, and nothing depends on who it is. The place exists so that it can be added
without touching a service or the wire. Until then credentials are refused, not ignored. Their sender must not believe that somebody
checked them, and a secret must not travel on a plain connection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from .errors import Code, ServiceError

AUTHORIZATION_KEY: Final = "authorization"
"""Of gRPC metadata, and the name of the field in the hello."""
AUTHORIZATION_SIZE_MAX_BYTES: Final = 2048
"""A server without authentication takes a hello of 4,096 octets and ends the connection for a longer one: this leaves room for the rest."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Somebody whom the server knows. `name` is empty for whoever is not known."""

    name: str


ANONYMOUS: Final = Principal("")


class Authenticator(Protocol):
    """Finds out who a caller is. Any thread; it must not wait, since it is called where all connections and gRPC calls come in."""

    def authenticate(self, authorization: str, peer: str) -> Principal:
        """`authorization` is empty where the caller gave none. Raises ServiceError: the connection or the call is refused with it."""
        ...


class NoAuthentication:
    """Takes everybody as nobody in particular."""

    def authenticate(self, authorization: str, peer: str) -> Principal:
        if authorization:
            raise ServiceError(
                Code.UNIMPLEMENTED,
                "UNSUPPORTED",
                f"{AUTHORIZATION_KEY}: this server has no authentication and looks at no credentials; leave them out",
                metadata={"field": AUTHORIZATION_KEY},
            )
        return ANONYMOUS


def check_authorization_size(authorization: str) -> None:
    """Raises ServiceError for credentials that no server takes."""
    size_bytes = len(authorization.encode())
    if size_bytes > AUTHORIZATION_SIZE_MAX_BYTES:
        raise ServiceError(
            Code.INVALID_ARGUMENT,
            "MESSAGE_TOO_LARGE",
            f"{AUTHORIZATION_KEY} has {size_bytes} bytes, at most {AUTHORIZATION_SIZE_MAX_BYTES} are taken; use a shorter token",
            metadata={
                "field": AUTHORIZATION_KEY,
                "size_bytes": str(size_bytes),
                "limit_bytes": str(AUTHORIZATION_SIZE_MAX_BYTES),
            },
        )
