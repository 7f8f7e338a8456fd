"""Name servers: their addresses, wherever they come from, and the steps of asking them.

Name servers are independent of each other. A client keeps one while it answers. It asks the others when that one does not answer or does
not know the topic: it may have been restarted a moment ago.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from ._environment import namesrv_addresses
from ._interrupts import comes_of_signal
from ._late_imports import fork_waits
from ._remoting_hello import split_address
from ._retry import is_away, knows_nobody
from ._steps import Block, CallServer, Steps
from ._types import BrokerAddress, MethodInfo
from .errors import (
    ConfigurationError,
    ConnectionLostError,
    NoRouteError,
    NotFoundError,
    ProtomqError,
    UnknownMethodError,
    WrongTypeError,
)

logger = logging.getLogger("protomq")

NAMESRV_ADDR_DEFAULT: Final = "127.0.0.1:9876;127.0.0.1:10911"
URL_REREAD_S: Final = 120.0
URL_RETRY_AFTER_S: Final = 2.0
_TRY_TIMEOUT_MIN_S: Final = 0.3
_URL_ANSWER_SIZE_MAX: Final = 64 << 10


class NameServerList:
    """The addresses of the name servers, wherever they come from. Any thread; no I/O but `read_url`."""

    def __init__(self, namesrv: str | Sequence[str] | None = None) -> None:
        if namesrv is None:
            namesrv = namesrv_addresses(os.environ) or NAMESRV_ADDR_DEFAULT
        self.url = ""
        self.trouble = ""
        """Why the URL could not be read last; empty: it could, or there is none."""
        self._servers: tuple[BrokerAddress, ...] = ()
        self._read_at_s = float("-inf")
        self._preferred = 0
        if isinstance(namesrv, str) and namesrv.strip().lower().startswith(
            ("http://", "https://")
        ):
            self.url = _checked_url(namesrv.strip())
        else:
            self._replace(parse_addresses(namesrv))

    def needs_reading(self, now_s: float) -> bool:
        """Whether the URL is to be read (again); never for fixed addresses."""
        return bool(self.url) and now_s - self._read_at_s >= URL_REREAD_S

    def read_url(self, timeout_s: float, now_s: float) -> None:
        """Reads the URL, unless another thread has done so meanwhile; a failure keeps what was known. Blocks."""
        with fork_waits:
            import http.client
            import urllib.request

        if not self.needs_reading(now_s):
            return
        # The next attempt after a failure comes soon, but not with every call.
        failed_at_s = now_s - URL_REREAD_S + URL_RETRY_AFTER_S
        if self._servers:
            self._read_at_s = failed_at_s  # Others go on with what is known meanwhile.
        try:
            with urllib.request.urlopen(self.url, timeout=timeout_s) as answer:
                text = answer.read(_URL_ANSWER_SIZE_MAX).decode()
            addresses = parse_addresses(text)
        except (OSError, ValueError, http.client.HTTPException) as error:
            cause = getattr(error, "reason", None)
            if comes_of_signal(cause if isinstance(cause, BaseException) else error):
                raise
            # `reason` of ours is a name for programs.
            why = error if isinstance(error, ProtomqError) else getattr(error, "reason", None) or error
            if isinstance(error, http.client.BadStatusLine):
                why = "what answers there does not speak HTTP"
            trouble = f"the list of name servers cannot be read from {self.url}: {why}"
            if trouble != self.trouble:
                logger.warning("%s", trouble)
            self.trouble = trouble
            self._read_at_s = failed_at_s
            return
        self.trouble = ""
        self._read_at_s = now_s
        if set(addresses) != {server.grpc_address for server in self._servers}:
            self._replace(addresses)

    def in_order(self) -> list[BrokerAddress]:
        """The servers to try, the one that answered last time first."""
        servers = self._servers
        first = self._preferred % len(servers) if servers else 0
        return [*servers[first:], *servers[:first]]

    def prefer(self, server: BrokerAddress) -> None:
        """This one answered."""
        if server in self._servers:
            self._preferred = self._servers.index(server)

    def _replace(self, addresses: Sequence[str]) -> None:
        # The port may be gRPC's or the remoting port: the transport finds out.
        self._servers = tuple(BrokerAddress("", address, address) for address in addresses)
        # Clients spread over the name servers.
        self._preferred = random.randrange(len(self._servers))


def _checked_url(url: str) -> str:
    """A URL that names a host. Raises ConfigurationError: none of its tries could succeed."""
    with fork_waits:
        import urllib.parse

    try:
        parts = urllib.parse.urlsplit(url)
        names_host = bool(parts.hostname) and parts.port != 0 and not any(map(str.isspace, url))
    except ValueError:
        names_host = False
    if not names_host:
        raise ConfigurationError(
            f"{url!r} is no URL of a list of name servers: write http://host:port/path, or host:port of a name server itself"
        )
    return url


def parse_addresses(text: str | Sequence[str]) -> list[str]:
    """host:port addresses, separated by semicolons, commas or white space, or a sequence of them."""
    if isinstance(text, str):
        parts = text.replace(";", " ").replace(",", " ").split()
    elif isinstance(text, list | tuple):
        parts = [part.strip() if isinstance(part, str) else part for part in text]
    else:
        raise WrongTypeError(f"namesrv is a str or a list of str, host:port each, not {text!r}")
    for part in parts:
        split_address(part)
    if not parts:
        raise ConfigurationError("no name server address given")
    return list(dict.fromkeys(parts))


def ask_one(
    names: NameServerList,
    method: MethodInfo,
    request: bytes,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    knows: Callable[[bytes], bool] = lambda answer: True,
) -> Steps[bytes]:
    """What the first name server says that answers; for methods that only read.

    `knows`: whether an answer has what is looked for. If none has, it is what the first one said that answers.

    Raises NotFoundError if none knows what was named, NoRouteError if none answers, ConfigurationError for what is none.
    """
    deadline_s = clock() + timeout_s
    yield from _read_url(names, timeout_s, clock)
    errors: list[ProtomqError] = []
    ignorant: bytes | None = None
    for server, try_timeout_s in _tries(names.in_order(), deadline_s, clock):
        try:
            answer = yield from _ask(server, method, request, clock() + try_timeout_s, clock)
        except ProtomqError as error:
            if ignorant is not None:
                continue
            if isinstance(error, UnknownMethodError):
                raise _no_name_server(server, method) from error
            if not error.retriable and not isinstance(error, NotFoundError):
                raise
            errors.append(error)
            continue
        if knows(answer):
            names.prefer(server)
            return answer
        ignorant = answer if ignorant is None else ignorant
    if ignorant is not None:
        return ignorant
    raise outcome_of_failures(errors, names)


def ask_all(
    names: NameServerList,
    method: MethodInfo,
    request: bytes,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> Steps[list[bytes | ProtomqError]]:
    """What each name server says, at least one. Raises NoRouteError."""
    deadline_s = clock() + timeout_s
    yield from _read_url(names, timeout_s, clock)
    answers: list[bytes | ProtomqError] = []
    for server, try_timeout_s in _tries(names.in_order(), deadline_s, clock):
        try:
            answers.append((yield CallServer(server, method, (request,), try_timeout_s)))
        except UnknownMethodError:
            answers.append(_no_name_server(server, method))
        except ProtomqError as error:
            answers.append(error)
    if not answers:
        raise outcome_of_failures((), names)
    return answers


def _read_url(
    names: NameServerList, timeout_s: float, clock: Callable[[], float]
) -> Steps[None]:
    if names.needs_reading(clock()):
        yield Block(partial(names.read_url, timeout_s / 2, clock()))


def _ask(
    server: BrokerAddress,
    method: MethodInfo,
    request: bytes,
    deadline_s: float,
    clock: Callable[[], float],
) -> Steps[bytes]:
    """Once; and once more where the connection was lost, as it is when the server was restarted since the last call."""
    try:
        # A signal's handler may have taken all the time, as a close does.
        answer: bytes = yield CallServer(server, method, (request,), max(deadline_s - clock(), _TRY_TIMEOUT_MIN_S))
    except ConnectionLostError:
        left_s = deadline_s - clock()
        if left_s <= 0:
            raise
        answer = yield CallServer(server, method, (request,), left_s)
    return answer


def _tries(
    servers: Sequence[BrokerAddress], deadline_s: float, clock: Callable[[], float]
) -> Iterator[tuple[BrokerAddress, float]]:
    """(server, time-out): what is left of the time is shared among those that are left, so that a dead one leaves some."""
    for i, server in enumerate(servers):
        left_s = deadline_s - clock()
        if left_s <= 0 and i:
            return
        yield server, max(left_s / (len(servers) - i), _TRY_TIMEOUT_MIN_S)


def _no_name_server(server: BrokerAddress, method: MethodInfo) -> ConfigurationError:
    """For a server that does not know a method of name servers."""
    name = method.path.rpartition("/")[2]
    return ConfigurationError(
        f"{server.grpc_address} is no name server, most likely a broker (or a name server too old for {name}). "
        "Give the address of `protomq namesrv`, port 9876 or 9877, or of `protomq standalone`",
        metadata={"namesrv": server.grpc_address},
    )


def outcome_of_failures(errors: Sequence[ProtomqError], names: NameServerList) -> ProtomqError:
    """One error for all name servers: "not found" counts more than silence, for it is an answer.

    Of such answers the first that names brokers which are away: another name server may have just started, and never heard of them. So
    one that knows no broker at all counts least.
    """
    answers = [error for error in errors if isinstance(error, NotFoundError)]
    if answers:
        return min(answers, key=lambda answer: (not is_away(answer), knows_nobody(answer)))
    where = names.url or ", ".join(server.grpc_address for server in names.in_order())
    if not errors and names.trouble:
        return NoRouteError(
            f"{names.trouble}; a URL names a list of addresses, a name server itself is written host:port",
            metadata={"namesrv": where},
        )
    why = "; ".join(str(error) for error in errors) or "the list of addresses is empty"
    return NoRouteError(
        f"no name server answers ({where}): {why}", metadata={"namesrv": where}
    )
