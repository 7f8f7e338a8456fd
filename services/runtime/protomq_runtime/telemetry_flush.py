"""The end of telemetry: what is not sent yet is sent, within a limit, and what was not taken is said.

OpenTelemetry's SDK waits at the end of a process as long as its exporters try: 10 s for each signal whose collector is gone. A server
that is to stop must not wait for those who watch it.

Imports OpenTelemetry's SDK.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, Final

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor

logger = logging.getLogger(__name__)

FLUSH_TIMEOUT_S: Final = 2.0
"""For all providers together, side by side."""


class CountingSpanProcessor(BatchSpanProcessor):
    """Sends spans in batches, and counts those that nobody has taken yet. Any thread."""

    def __init__(self, exporter: Any) -> None:
        self._counting = threading.Lock()
        self._untaken_count = 0
        _watch(exporter, self._note_export)
        super().__init__(exporter)

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            self._count(1)
        super().on_end(span)

    def untaken(self) -> str:
        """What its collector has not taken, for people; "" if it has all."""
        return f"{self._untaken_count} spans" if self._untaken_count else ""

    def _note_export(self, batch: Any, is_taken: bool) -> None:
        if is_taken:
            self._count(-len(batch))

    def _count(self, change: int) -> None:
        with self._counting:
            self._untaken_count += change


class LastMetrics:
    """Whether an exporter of metrics was given the values that they had at the end."""

    def __init__(self, exporter: Any) -> None:
        self._is_ending = False
        self._is_taken = False
        _watch(exporter, self._note_export)

    def end(self) -> None:
        """What is taken from now on is the last."""
        self._is_ending = True

    def untaken(self) -> str:
        """What its collector has not taken, for people; "" if it has all."""
        return "" if self._is_taken else "the last values of the metrics"

    def _note_export(self, batch: Any, is_taken: bool) -> None:
        self._is_taken = self._is_ending and is_taken


class Telemetry:
    """The providers that a server has set up for itself, until `shut_down`."""

    def __init__(self) -> None:
        self._providers: list[Any] = []
        self._spans: list[CountingSpanProcessor] = []
        self._metrics: list[LastMetrics] = []

    def add_tracers(self, provider: Any, spans: list[CountingSpanProcessor]) -> None:
        """A provider of tracers, and what sends its spans."""
        self._providers.append(provider)
        self._spans += spans

    def add_meters(self, provider: Any, metrics: list[LastMetrics]) -> None:
        """A provider of meters, and what its exporters send."""
        self._providers.append(provider)
        self._metrics += metrics

    def shut_down(self, timeout_s: float = FLUSH_TIMEOUT_S) -> None:
        """Sends what is left, within a time-out, and logs what was dropped."""
        deadline = time.monotonic() + timeout_s
        for metrics in self._metrics:
            metrics.end()
        # Daemons: one that hangs in a request to its collector is left behind when the process ends.
        threads = [
            threading.Thread(target=provider.shutdown, name="telemetry flush", daemon=True)
            for provider in self._providers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        untaken = [spans.untaken() for spans in self._spans]
        untaken += [metrics.untaken() for metrics in self._metrics]
        dropped = ", ".join(text for text in untaken if text)
        if dropped:
            logger.warning(
                "telemetry is dropped at the stop, since its collector did not take it within %g s: %s",
                timeout_s, dropped,
            )  # fmt: skip


def _watch(exporter: Any, note: Any) -> None:
    """Has `note` called after each export, with the batch and whether it was taken."""
    export = exporter.export

    def watched(batch: Any, *arguments: Any, **named: Any) -> Any:
        result = None
        try:
            result = export(batch, *arguments, **named)
        finally:
            note(batch, getattr(result, "name", "") == "SUCCESS")
        return result

    exporter.export = watched
