"""Pulls with filters: compiles their filters, and searches their queues slice by slice in turns of the pull's lane.

    find      the compiled filter, from the book, or made on the book's thread first
    search    slices of a `FilteredRead`, one a turn, those of a lane one after another, until it answers

`find` and `search`: a call's lane.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from protomq.v1.pull_service_pb2 import FilterType
from protomq_runtime.errors import Code, ServiceError, invalid_argument, system_busy, unsupported

from .filtered_read import FilteredRead
from .filters.errors import FilterError, FilterFailedError, FilterUnavailableError
from .filters.filter_book import Filter, FilterBook, FilterKey, Refused
from .filters.languages import MODULE
from .lane_turns import SLICE_S, LaneTurns
from .said_once import SaidOnce
from .store_errors import to_service_error

if TYPE_CHECKING:
    from protomq.v1.pull_service_pb2 import PullRequest
    from protomq_runtime.call import Call, CallLane

    from .store.queues.reading import ReadResult

log = logging.getLogger("protomq.broker")

EXPRESSION_SIZE_MAX: Final = 8_192
"""Most characters of an expression. The broker does not keep a longer one, not even to remember that it is wrong."""
RETRY_DELAY_MS: Final = 100

_TAGS_ONLY: Final = (FilterType.FILTER_TYPE_UNSPECIFIED, FilterType.FILTER_TYPE_TAG)
_LANGUAGES: Final = {
    FilterType.FILTER_TYPE_SQL92: "SQL92",
    FilterType.FILTER_TYPE_CEL: "CEL",
    FilterType.FILTER_TYPE_MODULE: MODULE,
}


class _Reader(Protocol):
    """A pull or a pop."""

    @property
    def consumer_group(self) -> str: ...


class FilterSearches:
    """See the module's docstring. `failed_count`: how often a module has failed at a message."""

    def __init__(self, compile_: Callable[[FilterKey], Filter]) -> None:
        self._book = FilterBook(compile_)
        self._turns: dict[CallLane, LaneTurns] = {}
        self._stopping = False
        self._said = SaidOnce()
        self.failed_count = 0

    def find(self, call: Call, key: FilterKey, use: Callable[[Filter], None]) -> None:
        """Calls `use` on the call's lane with the compiled filter, at once if it is known. Fails the call if the filter cannot be compiled.
        """
        made = self._book.find(key)
        if made is not None:
            _use(call, key, made, use)
            return
        lane = call.lane
        if not self._book.prepare(
            key, lambda made: lane.post(lambda: _use(call, key, made, use))
        ):
            call.fail(system_busy("pull", RETRY_DELAY_MS))

    def search(
        self,
        lane: CallLane,
        read: FilteredRead,
        holds: Callable[[ReadResult], bool],
        is_over: Callable[[], bool],
        done: Callable[[ReadResult | Exception], None],
    ) -> None:
        """Searches a queue in turns of the lane. `holds`: whether a result that took several turns is still sound. `is_over`: whether
        nobody waits any more.
        """

        def step() -> bool:
            if is_over():
                done(read.so_far())
                return False
            try:
                result = read.advance(SLICE_S)
                if result is None:
                    if not self._stopping:
                        return True
                    result = read.so_far()
                if read.slice_count > 1 and not holds(result):
                    read.restart()
                    return True
            except Exception as error:
                done(error)
            else:
                done(result)
            return False

        turns = self._turns.get(lane)
        if turns is None:
            turns = self._turns[lane] = LaneTurns(lane.post)
        turns.add(step)

    def note_failure(self, error: FilterFailedError, queue: tuple[str, int, int], reader: _Reader) -> None:
        """A module has failed at a message, whose place the error is to tell. Nothing behind it reaches the caller."""
        error.queue = queue
        self.failed_count += 1
        if self._said.is_due((queue, reader.consumer_group)):
            topic, queue_id, queue_offset = queue
            log.warning(
                "group %s gets nothing with its module from message %d of queue %d of topic %s on: %s. Deploy one that does not fail there,"
                " or consume without it", reader.consumer_group or "(none)", queue_offset, queue_id, topic, error,
            )  # fmt: skip

    def forget(self, key: FilterKey) -> None:
        """Forgets a compiled filter, because the module of its name has changed. Any thread."""
        self._book.forget(key)

    def stop(self) -> None:
        """Makes all searches answer with what they have found so far. Any thread."""
        self._stopping = True

    def close(self) -> None:
        """Ends the compiler's thread. Call it when no lane runs any more."""
        self._book.close()


def key_of(request: PullRequest) -> FilterKey | None:
    """Returns the filter that a pull asks for; None if it asks for tags only. Raises ServiceError for an illegal filter."""
    kind = request.filter_type
    if kind in _TAGS_ONLY:
        return None
    if kind not in _LANGUAGES:
        raise unsupported("filter_type", f"this broker has no filters of the type {kind}")
    language = _LANGUAGES[kind]
    if request.tags:
        raise invalid_argument("tags", "cannot stand beside a filter: put TAGS into that")
    if len(request.filter) > EXPRESSION_SIZE_MAX:
        text = f"the expression has {len(request.filter)} characters, at most {EXPRESSION_SIZE_MAX} are allowed"
        raise illegal_filter(FilterError(text, request.filter, EXPRESSION_SIZE_MAX), language)
    return FilterKey(language, request.filter)


def language_of(request: PullRequest) -> str:
    """Returns the name of the language of a pull's filter, for messages."""
    return _LANGUAGES[request.filter_type]


def illegal_filter(error: FilterError, language: str) -> ServiceError:
    """ILLEGAL_FILTER: what is wrong with an expression, and where."""
    place = "" if language == MODULE else f", line {error.line}, column {error.column}"
    return ServiceError(
        Code.INVALID_ARGUMENT,
        "ILLEGAL_FILTER",
        f"{language} filter{place}: {error}",
        metadata={
            "language": language,
            "position": str(error.position),
            "line": str(error.line),
            "column": str(error.column),
            "expected": ", ".join(error.expected),
        },
    )


def _failed_filter(error: FilterFailedError, queue: tuple[str, int, int]) -> ServiceError:
    """ILLEGAL_FILTER: at which message a module has failed."""
    topic, queue_id, queue_offset = queue
    return ServiceError(
        Code.INVALID_ARGUMENT,
        "ILLEGAL_FILTER",
        f"{MODULE} filter, at message {queue_offset} of queue {queue_id} of topic {topic}: {error}",
        metadata={
            "language": MODULE,
            "position": str(error.position),
            "line": str(error.line),
            "column": str(error.column),
            "expected": "",
            "topic": topic,
            "queue_id": str(queue_id),
            "queue_offset": str(queue_offset),
        },
    )


def filter_failure(error: Exception, language: str) -> ServiceError:
    """Returns the error for a caller whose filter cannot be compiled, or fails while it runs."""
    if isinstance(error, FilterFailedError) and error.queue is not None:
        return _failed_filter(error, error.queue)
    if isinstance(error, FilterError):
        return illegal_filter(error, language)
    if isinstance(error, FilterUnavailableError):
        return unsupported("filter_type", str(error))
    return to_service_error(error)


def _use(call: Call, key: FilterKey, made: Filter | Refused, use: Callable[[Filter], None]) -> None:
    if isinstance(made, Refused):
        call.fail(filter_failure(made.error, key.language))
    else:
        use(made)
