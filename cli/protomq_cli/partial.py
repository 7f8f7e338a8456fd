"""Some of several brokers do not answer: what the others say is printed, those that do not are named, the exit code is 7."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from protomq_cli.exits import CliError, ExitCode

if TYPE_CHECKING:
    from protomq.errors import ProtomqError

T = TypeVar("T")


class Missing:
    """The brokers that did not answer within one command, and why."""

    def __init__(self) -> None:
        self._failures: dict[str, ProtomqError] = {}

    def __contains__(self, broker_name: object) -> bool:
        return broker_name in self._failures

    def take(self, call: Callable[[], T]) -> T:
        """What a call says, even if it is a part of the whole."""
        from protomq.errors import PartialResultError

        try:
            return call()
        except PartialResultError as error:
            self._failures.update(error.failures)
            result: T = error.result
            return result

    def ask(self, broker_name: str, call: Callable[[], T]) -> T | None:
        """What a broker says, None if it does not; one that did not once is not asked again."""
        from protomq.errors import BusyError, NoRouteError, TransportError

        if broker_name in self._failures:
            return None
        try:
            return call()
        except (BusyError, NoRouteError, TransportError) as error:
            self._failures[broker_name] = error
            return None

    def raise_first(self) -> None:
        """Where nobody answered: the first error as it is."""
        for error in self._failures.values():
            raise error

    def check(self) -> None:
        """To be called when all is printed: raises CliError if something is missing."""
        if self._failures:
            why = "; ".join(f"{name} ({error})" for name, error in self._failures.items())
            raise CliError(
                ExitCode.PARTIAL,
                "PARTIAL_RESULT",
                f"what is printed is not all, no answer from {why}; `protomq cluster list` shows the addresses",
            )
