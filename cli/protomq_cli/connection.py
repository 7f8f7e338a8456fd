"""From the command line to the SDK: what is opened, and what an error means for the user.

This is the only module that knows how the SDK's objects are made. It imports the SDK, but only inside functions: commands that
need no server must not pay for it.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from protomq_cli.exits import UNANSWERED, CliError, ExitCode, exit_code_of, hint_for, with_hint
from protomq_cli.settings import find_namesrv

if TYPE_CHECKING:
    from protomq import (
        Admin,
        AsyncProducer,
        Producer,
        ProtomqError,
        PullConsumer,
        SimpleConsumer,
    )
    from protomq.calls import Calls

_DISK_FULL_ERRNOS: Final = (errno.ENOSPC, errno.EDQUOT)

SILENCE_S: Final = 60.0
"""A broker that did not answer is not waited for again by the same command; one that runs for longer tries again."""


@contextmanager
def open_admin(namesrv: str | None, timeout_s: float, silence_s: float = SILENCE_S) -> Iterator[Admin]:
    """A client for administration; `timeout_s` is for each call. `silence_s`: see Admin."""
    from protomq import Admin

    _silence_log()
    with Admin(namesrv=find_namesrv(namesrv), request_timeout_s=timeout_s, silence_s=silence_s) as admin:
        yield admin


@contextmanager
def open_producer(namesrv: str | None, **options: Any) -> Iterator[Producer]:
    """A producer; `options` are the SDK's."""
    from protomq import Producer

    _silence_log()
    with Producer(namesrv=_namesrv_for(namesrv, options), **options) as producer:
        yield producer


@contextmanager
def open_consumer(namesrv: str | None, group: str = "", **options: Any) -> Iterator[PullConsumer]:
    """A pull consumer; `options` are the SDK's."""
    from protomq import PullConsumer

    _silence_log()
    with PullConsumer(group, namesrv=_namesrv_for(namesrv, options), **options) as consumer:
        yield consumer


@contextmanager
def open_simple_consumer(
    namesrv: str | None, group: str, **options: Any
) -> Iterator[SimpleConsumer]:
    """A simple consumer; `options` are the SDK's."""
    from protomq import SimpleConsumer

    _silence_log()
    with SimpleConsumer(group, namesrv=_namesrv_for(namesrv, options), **options) as consumer:
        yield consumer


def open_async_producer(namesrv: str | None, **options: Any) -> AsyncProducer:
    """A producer for coroutines; use it with `async with`."""
    from protomq import AsyncProducer

    _silence_log()
    return AsyncProducer(namesrv=_namesrv_for(namesrv, options), **options)


def open_calls(namesrv: str | None, transport: Any, *, tries_max: int = 1) -> Calls:
    """Calls that are made once, or a few times: what does not answer is told, and the others are asked."""
    from protomq.calls import Calls, Retries

    _silence_log()
    options = {"transport": transport}
    return Calls(namesrv=_namesrv_for(namesrv, options), transport=transport, retries=Retries(tries_max))


@contextmanager
def warnings_shown(logger_name: str = "protomq") -> Iterator[None]:
    """What the SDK warns of goes to stderr: a broker that is gone, one that is back, another member of the group."""
    import logging

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("protomq: %(message)s"))
    handler.setLevel(logging.WARNING)
    logger = logging.getLogger(logger_name)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _silence_log() -> None:
    """A command says itself what went wrong, in one line; one that goes on for long shows the log's warnings (`warnings_shown`)."""
    import logging

    logger = logging.getLogger("protomq")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())


def _namesrv_for(namesrv: str | None, options: dict[str, Any]) -> str:
    return find_namesrv(namesrv, grpc_only=options.get("transport") == "grpc")


def name_broker(error: ProtomqError, broker_name: str | None) -> ProtomqError:
    """The error with the broker that was asked, which is said with a connection that fails; None: it is not known."""
    if broker_name is not None:
        error.metadata = {"broker_name": broker_name, **error.metadata}
    return error


def translate(error: BaseException) -> CliError | None:
    """The error as the user shall see it; None for one that is a defect and deserves its trace."""
    # By name and attributes, not by class: neither the SDK nor a server is imported for an error that they did not raise.
    if isinstance(error, CliError):
        return error
    module = type(error).__module__
    message = str(error)
    if module.startswith("protomq.") and hasattr(error, "reason") and hasattr(error, "metadata"):
        code, reason = getattr(error, "code", 0), str(error.reason)
        broker = error.metadata.get("broker_name", "")
        if reason in UNANSWERED and broker:
            message = f"broker {broker} does not answer: {message}"
        if reason == "REQUEST_TIMEOUT" and message.startswith("no reply to message"):
            message += "; see whether a consumer of the topic runs, and replies"
        elif reason == "TOPIC_NOT_FOUND" and message.startswith("no broker is registered"):
            message = f"{message.partition('; ')[0]}; {hint_for('BROKER_NOT_FOUND')}"
        elif reason not in ("NOT_PERMITTED", "TOPIC_NOT_FOUND") or _can_be_created(error.metadata.get("topic", "")):
            message = with_hint(reason, message)
        if reason == "NO_ROUTE" and message.startswith("no name server answers"):
            message += "; start one with `protomq standalone`, or give its address by --namesrv or PROTOMQ_NAMESRV_ADDR"
        if reason == "NOT_PERMITTED":
            if " may not be written" in message:
                message = message.replace(hint_for(reason), hint_for("DRAINED"))
            message = message.replace("create NAME", f"create {error.metadata.get('topic', 'NAME')}")
        if reason == "BROKER_MISSING":
            message = message.replace("forget NAME", f"forget {broker}")
        return CliError(exit_code_of(code, reason), reason, message)
    if type(error).__name__ == "ServiceError":  # a server that cannot start
        return CliError(exit_code_of(error.code, str(error.reason)), str(error.reason), str(error.message))  # type: ignore[attr-defined]
    if module.startswith(("protomq_broker.store", "protomq_runtime.", "protomq_namesrv.")):
        name = type(error).__name__
        code = ExitCode.FAILURE
        if name in ("StoreLockedError", "StoreInUseError", "StoreSettingsError", "NotAStoreError", "WrongFolderError", "LogBehindError"):
            code = ExitCode.REFUSED
        elif name == "UnknownHostError":
            code = ExitCode.USAGE
        elif name == "NoBackupError":
            code = ExitCode.NOT_FOUND
        elif name == "CutError":
            code = ExitCode.USAGE
        elif name == "ConfigError":
            missing = isinstance(error.__cause__, FileNotFoundError)
            code = ExitCode.NOT_FOUND if missing else ExitCode.USAGE
        return CliError(code, _upper_snake(name.removesuffix("Error")), message)
    if isinstance(error, UnicodeEncodeError) and any("\udc80" <= letter <= "\udcff" for letter in error.object):
        # What Python makes of octets on the command line that are no UTF-8.
        return CliError(ExitCode.USAGE, "USAGE", f"{error.object!r} is no UTF-8, and names and texts are")
    if isinstance(error, FileNotFoundError):
        return CliError(ExitCode.NOT_FOUND, "FILE_NOT_FOUND", _os_message(error))
    if isinstance(error, IsADirectoryError | NotADirectoryError):
        return CliError(ExitCode.USAGE, "WRONG_FILE", _os_message(error))
    if isinstance(error, PermissionError):
        return CliError(ExitCode.NOT_PERMITTED, "FILE_NOT_PERMITTED", _os_message(error))
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return CliError(
            ExitCode.REFUSED,
            "PORT_IN_USE",
            f"{message}; stop what listens there, or choose another port",
        )
    if isinstance(error, OSError) and error.errno in _DISK_FULL_ERRNOS:
        return CliError(ExitCode.REFUSED, "DISK_FULL", f"{_os_message(error)}; free space on this disk, and run it again")
    if isinstance(error, OSError) and error.errno is not None:
        return CliError(ExitCode.FAILURE, "OS_ERROR", _os_message(error))
    return None


def _can_be_created(topic: str) -> bool:
    from protomq.wire.topics import rules_of

    return rules_of(topic).create


def _os_message(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def _upper_snake(name: str) -> str:
    return "".join("_" + c if c.isupper() and i else c for i, c in enumerate(name)).upper()
