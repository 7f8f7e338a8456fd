"""Changes of topics and of settings, and replays of dead letters: appended on the send lane, answered when a send would be.

    lane of the call   reads the request
    send lane          refuses it if a send would be refused for want of slaves; else changes the state, which appends the record
    lane of the call   answers, once the log is stored, up to where it ended then, as SEND_OK promises

So an answer also waits if nothing had to be changed: the record that said so before may not be stored yet. So does a refusal for what is
there, or is not. A deletion that is said again may rest on one that is not stored yet. A call waits no longer than a send; then it gets
DEADLINE_EXCEEDED, not definite. It also does if sends are not taken any more by then. What waits is an entry in `WaitingAnswers`, not a
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from protomq_runtime.errors import Code, ServiceError

from .store_errors import to_service_error
from .waiting_answers import NOT_COPIED_IN_TIME

if TYPE_CHECKING:
    from protomq_runtime.call import Call

    from .config import BrokerConfig
    from .store.store import Store
    from .system_writer import SystemWriter
    from .waiting_answers import WaitingAnswers

Answer = Callable[[], bytes]
"""Makes the response. Called on the call's lane."""
Outcome = Answer | Exception | None
"""What becomes of a call. None: nothing yet, the service goes on with it."""
SAYS_WHAT_IS_THERE: Final = frozenset({Code.NOT_FOUND, Code.ALREADY_EXISTS})
"""Codes of refusals that hold only if what the log has by now is stored."""


class StateChanges:
    """See the module's docstring. `shortage` says why no send is taken now; None: they are taken."""

    def __init__(
        self,
        store: Store,
        writer: SystemWriter,
        waiting: WaitingAnswers,
        config: BrokerConfig,
        shortage: Callable[[], ServiceError | None],
    ) -> None:
        self._store = store
        self._writer = writer
        self._waiting = waiting
        self._config = config
        self._shortage = shortage

    def make(self, calls: Sequence[Call], change: Callable[[], Sequence[Outcome]]) -> None:
        """Has `change` called on the send lane, and answers the calls. It returns what becomes of each of them; what it raises becomes of
        all. Any thread.
        """
        self._writer.post(partial(self._make, calls, change))

    def _make(self, calls: Sequence[Call], change: Callable[[], Sequence[Outcome]]) -> None:
        outcomes: Sequence[Outcome] = [self._shortage()] * len(calls)
        if outcomes[0] is None:
            try:
                outcomes = change()
            except Exception as error:
                outcomes = [error] * len(calls)
        position = self._store.appended_position
        for call, outcome in zip(calls, outcomes, strict=True):
            outcome = to_service_error(outcome) if isinstance(outcome, Exception) else outcome
            if isinstance(outcome, ServiceError) and outcome.code not in SAYS_WHAT_IS_THERE:
                call.lane.post(partial(call.fail, outcome))
            elif outcome is not None:
                wait_ms = call.hold_time_ms(self._config.sync_flush_timeout_ms)
                self._waiting.wait(self._writer.lane, position, wait_ms, partial(self._stored, call, outcome))
        self._waiting.request_flush()

    def _stored(self, call: Call, answer: Answer | ServiceError, failure: Exception | None) -> None:
        # Fewer copies than min_in_sync_replicas have confirmed it, or this broker has lost the lead meanwhile, and another may have it.
        if failure is None and self._shortage() is not None:
            failure = NOT_COPIED_IN_TIME
        call.lane.post(partial(_answer_here, call, answer, failure))


def _answer_here(call: Call, answer: Answer | ServiceError, failure: Exception | None) -> None:
    try:
        if failure is not None:
            raise failure
        if isinstance(answer, ServiceError):
            raise answer
        payload = answer()
    except Exception as error:
        call.fail(to_service_error(error))
    else:
        call.answer(payload)
