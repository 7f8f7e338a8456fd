"""The options that many commands share, so that they are spelled and explained in one way everywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final, TypeVar

import typer

from protomq_cli import completion
from protomq_cli.offsets import FORMS, OffsetRange, parse_offsets, parse_times
from protomq_cli.output import OutputFormat
from protomq_cli.settings import NAMESRV_VARIABLE
from protomq_cli.units import parse_count, parse_duration

T = TypeVar("T")

DEFAULT_TIMEOUT_S: Final = 5.0
_TIMEOUT_MIN_S: Final = 0.001
_TIMEOUT_MAX_S: Final = 864_000.0
"""Within what the SDK takes."""


def option_parser(parse: Callable[[str], T]) -> Callable[[str | T], T]:
    """What typer calls: with the text of the command line, or with a default that is parsed already."""

    def parse_option(value: str | T) -> T:
        if not isinstance(value, str):
            return value
        try:
            return parse(value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return parse_option


def _parse_offsets_now(text: str) -> OffsetRange:
    import time

    return parse_offsets(text, time.time_ns() // 1_000_000)


def _parse_times_now(text: str) -> OffsetRange:
    import time

    return parse_times(text, time.time_ns() // 1_000_000)


def _parse_folder(text: str) -> Path:
    if not text:
        raise ValueError("it is empty; the current folder is '.'")
    # Whoever makes names durable goes up from here, folder by folder.
    return Path(text).absolute()


def _parse_timeout(text: str) -> float:
    seconds = parse_duration(text)
    if not _TIMEOUT_MIN_S <= seconds <= _TIMEOUT_MAX_S:
        raise ValueError(f"it is 1ms to 10d, not {text}")
    return seconds


folder_option = option_parser(_parse_folder)
duration_option = option_parser(parse_duration)
timeout_option = option_parser(_parse_timeout)
count_option = option_parser(parse_count)
offsets_option = option_parser(_parse_offsets_now)
times_option = option_parser(_parse_times_now)

Namesrv = Annotated[
    str | None,
    typer.Option(
        "--namesrv",
        "-n",
        metavar="HOST:PORT",
        envvar=NAMESRV_VARIABLE,
        show_envvar=True,
        help="Name servers, several with ';' between. Without: config file, else this machine.",
    ),
]
Output = Annotated[
    OutputFormat,
    typer.Option("--output", "-o", help="How to print.", case_sensitive=False),
]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout",
        parser=timeout_option,
        metavar="TIME",
        show_default="5s",
        help="Give up after this time.",
    ),
]
OnBroker = Annotated[
    str | None,
    typer.Option(
        "--broker", "-b", metavar="NAME", show_default="on all", help="On this broker only."
    ),
]
OnQueues = Annotated[
    list[int] | None,
    typer.Option(
        "--queue", "-q", metavar="N", min=0, show_default="all", help="This queue only; can be repeated."
    ),
]
TopicArgument = Annotated[
    str,
    typer.Argument(
        metavar="TOPIC",
        autocompletion=completion.complete_topics,
        show_default=False,
        help="Topic.",
    ),
]
Offsets = Annotated[
    OffsetRange | None,
    typer.Option(
        "--offset",
        "-O",
        parser=offsets_option,
        metavar="OFFSET",
        show_default=False,
        help=f"Where to read: {FORMS}.",
    ),
]


def _transport(text: str) -> str:
    if text not in ("auto", "remoting", "grpc"):
        raise typer.BadParameter("it is auto, remoting or grpc")
    return text


TransportName = Annotated[
    str,
    typer.Option(
        "--transport",
        metavar="auto|remoting|grpc",
        parser=_transport,
        help="Remoting port, gRPC, or the first that answers.",
    ),
]
