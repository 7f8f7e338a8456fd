"""Pulls whose messages have to match a filter: SQL92, CEL or a module of a user. Pulls with tags alone are none of these.

A pull searches in turns of its lane (`lane_turns.py`), so its result comes later than its call. Holds that wait for the same messages share
one search. Lane thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from protomq.wire.hashing import tag_code_of
from protomq_runtime.errors import DEADLINE_EXCEEDED, ServiceError
from protomq_runtime.regions import read_regions

from .filter_searches import FilterSearches, filter_failure, language_of
from .filtered_read import FilteredRead
from .filters.errors import FilterFailedError
from .filters.filter_book import FilterKey
from .filters.languages import MODULE, compile_filter
from .pull_answer import RECORD_COUNT_DEFAULT, SIZE_DEFAULT_BYTES, Found
from .topic_access import check_incarnation, read_one_incarnation

if TYPE_CHECKING:
    from protomq.v1.pull_service_pb2 import PullRequest
    from protomq_runtime.call import Call, CallLane
    from protomq_runtime.regions import Region

    from .filter_modules import FilterModules
    from .filters.filter_book import Filter
    from .holds import Hold
    from .store.queues.reading import LogRegion, ReadResult
    from .store.state.topics import TopicConfig
    from .store.store import Store


class FilteredPulls:
    """See the module's docstring. `topic_of` returns the topic that a request may read, or raises ServiceError. `fail` answers a pull that
    found an error. `check_news` raises ServiceError for a result that this broker may soon know better.
    """

    def __init__(
        self,
        store: Store,
        topic_of: Callable[[PullRequest], TopicConfig],
        modules: FilterModules,
        monotonic: Callable[[], float],
        fail: Callable[[Call, PullRequest, ServiceError], None],
        check_news: Callable[[PullRequest, int, ReadResult], None],
    ) -> None:
        self._check_news = check_news
        self._store = store
        self._fail = fail
        self._topic_of = topic_of
        self._monotonic = monotonic
        self._searches = FilterSearches(partial(compile_filter, module=modules.read))

    def begin(
        self,
        call: Call,
        request: PullRequest,
        key: FilterKey,
        take: Callable[[Found, Filter], None],
    ) -> None:
        """Calls `take` with what the pull finds. An error becomes the call's answer."""

        def is_over() -> bool:
            is_late = call.deadline is not None and self._monotonic() > call.deadline
            return is_late or call.answered or call.closed

        def use(filter_: Filter) -> None:
            def end(found: Found | ServiceError) -> None:
                if call.answered:
                    return
                if is_over():
                    call.fail(DEADLINE_EXCEEDED)
                elif isinstance(found, ServiceError):
                    self._fail(call, request, found)
                else:
                    take(found, filter_)

            self._search(call.lane, request, filter_, request.queue_offset, is_over, end)

        # The filter first: who begins to consume learns what is wrong with it, also before the topic's first message.
        self._searches.find(call, key, use)

    def search_for(
        self, holds: Sequence[Hold], ended: Callable[[Hold, Found | ServiceError], None]
    ) -> None:
        """Searches once for all these holds, which wait for the same messages, and calls `ended` for each with the result."""
        group = []
        for hold in holds:
            if hold.is_searching:
                hold.is_signalled = True
            else:
                hold.is_searching, hold.is_signalled = True, False
                group.append(hold)
        if not group:
            return
        first = group[0]
        assert first.filter is not None

        def end(found: Found | ServiceError) -> None:
            again = []
            for hold in group:
                hold.is_searching = False
                if hold.call.answered:  # The caller has gone.
                    continue
                ended(hold, found)
                if hold.is_signalled and not hold.call.answered:
                    again.append(hold)
            if again:
                self.search_for(again, ended)

        self._search(
            first.call.lane,
            first.request,
            first.filter,
            first.queue_offset,
            lambda: all(hold.call.answered for hold in group),
            end,
        )

    def forget_module(self, name: str) -> None:
        """Forgets a module that was replaced or deleted. Any thread."""
        self._searches.forget(FilterKey(MODULE, name))

    @property
    def failed_count(self) -> int:
        """How many pulls a module has failed, or searches that several held ones share."""
        return self._searches.failed_count

    def stop(self) -> None:
        """Makes all searches answer with what they have found so far. Any thread."""
        self._searches.stop()

    def close(self) -> None:
        """Ends the compiler's thread. Call it when no lane runs any more."""
        self._searches.close()

    def _search(
        self,
        lane: CallLane,
        request: PullRequest,
        filter_: Filter,
        queue_offset: int,
        is_over: Callable[[], bool],
        end: Callable[[Found | ServiceError], None],
    ) -> None:
        incarnation = request.topic_incarnation
        tag_codes = frozenset(tag_code_of(tag.decode()) for tag in filter_.tags)

        def topic() -> TopicConfig:
            found = self._topic_of(request)
            check_incarnation(found, incarnation)
            return found

        def look(queue_offset: int, count_max: int, size_max_bytes: int) -> ReadResult:
            nonlocal incarnation
            result, read_topic = read_one_incarnation(
                self._store,
                topic,
                lambda topic: self._store.read(
                    topic.name, request.queue_id, queue_offset, count_max, size_max_bytes, tag_codes
                ),
            )
            incarnation = read_topic.incarnation
            self._check_news(request, queue_offset, result)
            return result

        def done(result: ReadResult | Exception) -> None:
            if isinstance(result, Exception):
                if isinstance(result, FilterFailedError):
                    self._searches.note_failure(result, (request.topic, request.queue_id, read.failed_offset), request)
                end(filter_failure(result, language_of(request)))
                return
            self._store.count_read(request.topic, result)
            end(Found(result, incarnation))

        read = FilteredRead(
            look,
            _bytes_of,
            filter_,
            queue_offset,
            request.record_count_max or RECORD_COUNT_DEFAULT,
            request.size_max_bytes or SIZE_DEFAULT_BYTES,
            self._monotonic,
            time.thread_time,
        )
        self._searches.search(
            lane, read, lambda result: self._store.regions_hold(result.regions), is_over, done
        )


def _bytes_of(regions: Sequence[LogRegion]) -> bytes:
    # The store's regions have the same three fields as the runtime's: the store cannot import that one.
    pieces = read_regions(cast("list[Region]", regions))
    if len(pieces) == 1:
        # It is usually the whole of what was read. Copying 4 MiB would take a millisecond.
        whole = memoryview(pieces[0]).obj
        if isinstance(whole, bytes) and len(whole) == len(pieces[0]):
            return whole
    return b"".join(pieces)
