"""One message of a hundred: filtered by the broker, against getting all and filtering them at the client; and pulls beside that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from tests.bench.bench import Bench, Result, create_topics, rate_of, ratio_of, row, spread
from tests.bench.measure import LoadInBackground, Sample, median_of, run_load
from tests.bench.process import Server

TOPIC: Final = "Filters"
EMPTY: Final = "FiltersEmpty"
QUEUES: Final = 4
SIZE: Final = 128
SUBSCRIPTIONS: Final[dict[str, tuple[dict[str, Any], float | None, str]]] = {
    "SQL92, each evaluated": ({"sql": "delay > 98"}, 1.5, "delay > 98"),
    "SQL92, a constant": ({"sql": "dest = 'D99'"}, 5.0, "dest = 'D99'"),
    "tag": ({"tags": ["tag99"]}, 10.0, "tags=['tag99']"),
    "CEL": ({"cel": "properties.dest == 'D99'"}, None, "properties.dest == 'D99'"),
}


def _fill(bench: Bench, broker: Server) -> int:
    messages = bench.extent.consume_messages // 2
    create_topics(broker, [TOPIC, EMPTY], QUEUES)
    run_load(
        "filters.fill", namesrv=broker.values["namesrv"], topic=TOPIC, messages=messages, size=SIZE,
        server_pids=broker.pids,
    )  # fmt: skip
    return messages


@row("filters")
def filters(bench: Bench) -> Iterator[Result]:
    """A consumer that wants 1 of 100 messages: the broker filters, or the client gets all."""
    with bench.standalone() as broker:
        messages = _fill(bench, broker)

        def consume(subscription: dict[str, Any], at_client: bool = False) -> Sample:
            return run_load(
                "filters.consume", namesrv=broker.values["namesrv"], topic=TOPIC, messages=messages,
                subscription=subscription, at_client=at_client, server_pids=broker.pids,
            )  # fmt: skip

        samples = bench.compare(
            {"client": lambda: consume({}, at_client=True)}
            | {
                name: (lambda wanted=wanted: consume(wanted))
                for name, (wanted, _, _) in SUBSCRIPTIONS.items()
            }
        )
    how = f"{SIZE} B and four properties, {QUEUES} queues; "
    yield rate_of("all sent, filtered at the client", samples["client"], f"{how}{spread(samples['client'])}")
    for name, (_, floor, text) in SUBSCRIPTIONS.items():
        yield rate_of(f"filter: {name}", samples[name], f"{how}{text}; {spread(samples[name])}")
        yield ratio_of(
            f"1 of 100, {name}: broker's filter / client's", samples[name], samples["client"], floor, text
        )


@row("filters-beside")
def beside(bench: Bench) -> Iterator[Result]:
    """Pulls without a filter while two consumers search the topic without end, each message evaluated."""
    with bench.standalone() as broker:
        messages = _fill(bench, broker)

        def pulls() -> Sample:
            return bench.load(
                "filters.pulls", broker, remoting=broker.values["remoting"], topic=EMPTY, interval_ms=2
            )

        def searched() -> Sample:
            search = {
                "namesrv": broker.values["namesrv"], "topic": TOPIC, "messages": messages, "at_client": False,
                "subscription": {"sql": "delay > 98"}, "server_pids": [], "endless": True,
            }  # fmt: skip
            with LoadInBackground("filters.consume", **search), LoadInBackground("filters.consume", **search):
                return pulls()

        samples = bench.compare({"alone": pulls, "beside": searched})
    for name, floor in (("alone", None), ("beside", 5.0)):
        yield Result(
            f"pull without a filter, p99, {name if name == 'alone' else 'beside two searches'}",
            median_of(samples[name], lambda s: s.p99_ms), "ms", "less",
            f"p50 {median_of(samples[name], lambda s: s.p50_ms):.2f} ms; one at a time, every 2 ms", floor,
        )  # fmt: skip
