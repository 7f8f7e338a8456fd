"""Some of several brokers do not answer: what the others say is printed, those that do not are named, the exit code is 7."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

from protomq_cli.connection import name_broker, translate
from protomq_cli.exits import CliError, ExitCode
from protomq_cli.side_by_side import side_by_side

if TYPE_CHECKING:
    from protomq import Admin, MessageQueue, MissingBroker, PullConsumer
    from protomq.errors import ProtomqError

T = TypeVar("T")


class Missing:
    """The brokers that did not answer within one command, and why."""

    def __init__(self) -> None:
        self._failures: dict[str, ProtomqError] = {}
        self._expected: dict[str, ProtomqError] = {}
        """Of brokers that will not answer, if they are asked."""

    def __contains__(self, broker_name: object) -> bool:
        return broker_name in self._failures

    def note(self, brokers: Iterable[MissingBroker]) -> None:
        """Brokers that cannot even be asked: the name server has them no more."""
        self._failures |= {gone.broker.broker_name: gone.error for gone in brokers}

    def expect(self, silent: Missing) -> None:
        """These did not answer a moment ago: who wants something of them need not wait again."""
        self._expected |= silent._failures

    def forget(self, brokers: Iterable[MissingBroker]) -> None:
        """Nothing is missing of these: what they have comes when they are back."""
        for gone in brokers:
            self._failures.pop(gone.broker.broker_name, None)

    def take(self, call: Callable[[], T]) -> T:
        """What a call says, even if it is a part of the whole."""
        from protomq.errors import PartialResultError

        try:
            return call()
        except PartialResultError as error:
            self._failures.update(error.failures)
            result: T = error.result
            return result

    def answering(self, admin: Admin) -> list[str] | None:
        """The brokers that have not failed, for a call of many: each further try costs the time-out. None: all, while none has failed."""
        if not self._failures:
            return None
        names = [one.broker_name for one in admin.cluster_info() if not one.broker_id and one.broker_name not in self]
        return names or None

    def ask(self, broker_name: str, call: Callable[[], T]) -> T | None:
        """What a broker says, None if it does not; one that did not once is not asked again."""
        from protomq.errors import BusyError, NoRouteError, TopicNotFoundError, TransportError

        if not self._may_answer(broker_name):
            return None
        try:
            return call()
        except TopicNotFoundError:
            self.raise_first()
            raise
        except (BusyError, NoRouteError, TransportError) as error:
            self._failures[broker_name] = error
            return None

    def ask_each(self, calls: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        """What brokers say that are asked at the same time, by name, without those that do not answer."""
        names = [name for name in calls if self._may_answer(name)]
        answers = dict(zip(names, side_by_side([calls[name] for name in names]), strict=True))
        said = {name: self.ask(name, answer) for name, answer in answers.items()}
        return {name: answer for name, answer in said.items() if answer is not None}

    def _may_answer(self, broker_name: str) -> bool:
        if broker_name in self._expected:
            self._failures.setdefault(broker_name, self._expected[broker_name])
        known = self._failures.get(broker_name)
        # Without a master it has slaves, which may answer.
        return known is None or known.reason == "NO_ROUTE"

    def queues(self, consumer: PullConsumer, topic: str) -> tuple[MessageQueue, ...]:
        """The queues of a topic. Where nobody knows it, one that does not answer may: then its error is raised."""
        from protomq.errors import NoRouteError, TopicNotFoundError

        try:
            return consumer.queues(topic)
        except (NoRouteError, TopicNotFoundError):
            self.raise_first()
            raise

    def reasons(self) -> dict[str, str]:
        """Why each did not answer."""
        return {name: str(error) for name, error in self._failures.items()}

    def clear(self) -> None:
        """All are asked again."""
        self._failures.clear()

    def raise_first(self, broker_name: str | None = None) -> None:
        """Where nobody answered: the first error as it is, or that of one broker."""
        for name, error in self._failures.items():
            if broker_name in (None, name):
                raise name_broker(error, name)

    def check(self, of_slaves: str = "") -> None:
        """To be called when all is printed: raises CliError if something is missing. `of_slaves`: what is added if one is a slave."""
        if not self._failures:
            return
        why = "; ".join(f"{name} ({error})" for name, error in self._failures.items())
        gone = [name for name, error in self._failures.items() if error.reason == "BROKER_MISSING"]
        hint = "`protomq cluster list` shows the addresses"
        if gone:
            hint = f"start {gone[0]} again, or `protomq cluster forget {gone[0]}` if it will not come back"
        if of_slaves and any("/" in name for name in self._failures):
            hint = f"{of_slaves}; {hint}"
        raise CliError(
            ExitCode.PARTIAL, "PARTIAL_RESULT", f"the output is incomplete: no answer from {why}; {hint}"
        )

    def check_change(self, of_slaves: str = "") -> None:
        """As `check`, where something was to be changed: with the reason and the exit code of the first broker that has refused that."""
        refused = {name: said for name, error in self._failures.items() if (said := _refusal(error)) is not None}
        if not refused:
            self.check(of_slaves)
            return
        told = [f"broker {name} refuses: {said.message}" for name, said in refused.items()]
        silent = [f"{name} ({error})" for name, error in self._failures.items() if name not in refused]
        if silent:
            told.append(f"no answer from {'; '.join(silent)}")
        if of_slaves and any("/" in name for name in self._failures):
            told.append(of_slaves)
        first = next(iter(refused.values()))
        raise CliError(first.exit_code, first.reason, "; ".join(told))


def _refusal(error: ProtomqError) -> CliError | None:
    """What a broker has said that refused; None: it did not answer, or not in time."""
    from protomq.errors import ServerError

    said = translate(error) if isinstance(error, ServerError) else None
    return None if said is None or said.exit_code is ExitCode.UNREACHABLE else said
