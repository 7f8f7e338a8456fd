"""Latencies under steady load: from send to receipt, and of one lane beside another."""

from __future__ import annotations

from collections.abc import Iterator

from tests.bench.bench import Bench, Result, create_topics, row
from tests.bench.measure import LoadInBackground, Sample, median_of
from tests.bench.process import Server

TOPIC = "Latency"
QUEUES = 8
RATE = 1000
THREADS = 4
_LEAD_S = 1.0
"""The sender starts before the receiver has its pulls at the broker, and ends after it."""


@row("send-to-receipt")
def send_to_receipt(bench: Bench) -> Iterator[Result]:
    """1,000 messages a second, received by held pulls; sender and receiver are processes of their own."""
    with bench.standalone() as broker:
        create_topics(broker, [TOPIC], QUEUES)
        samples = bench.repeat(lambda: receipt(bench, broker, TOPIC))
    rate = median_of(samples, lambda s: s.rate)
    how = f"{RATE:,} msg/s from {THREADS} threads, 1 KiB, SDK; {rate:,.0f} msg/s received"
    for percent, value in (
        ("p50", median_of(samples, lambda s: s.p50_ms)),
        ("p99", median_of(samples, lambda s: s.p99_ms)),
    ):
        yield Result(
            f"send to receipt, {percent}", value, "ms", "less", how,
            broker_us=median_of(samples, lambda s: s.server_us),
            client_us=median_of(samples, lambda s: s.client_us),
        )  # fmt: skip


def receipt(
    bench: Bench, broker: Server, topic: str, receive: str = "sdk.receive", **parameters: str
) -> Sample:
    """One window of the receiver, which is the load `receive`."""
    warm_up, seconds = bench.extent.warm_up_s + _LEAD_S, bench.extent.seconds
    load = {"namesrv": broker.values["namesrv"], "topic": topic, "server_pids": []}
    with LoadInBackground(
        "sdk.send_paced", **load, threads=THREADS, size=1024, rate=RATE, warm_up=0.0,
        seconds=warm_up + seconds + _LEAD_S,
    ):  # fmt: skip
        return bench.load(
            receive, broker, namesrv=broker.values["namesrv"], topic=topic, warm_up=warm_up, **parameters
        )


@row("lanes")
def lanes(bench: Bench) -> Iterator[Result]:
    """Ping on the admin lane: alone, beside a saturated send lane, and beside a saturated gRPC front.

    The same frames to an idle process of its own, beside the same load, show what the kernel's scheduler adds by itself: broker and
    clients fill both cores.
    """
    with bench.standalone() as broker, bench.limit("remoting") as idle:
        create_topics(broker, [TOPIC], QUEUES)
        remoting = broker.values["remoting"]
        common = {
            "batch": 256, "size": 1024, "queues": QUEUES, "warm_up": 0.0,
            "seconds": bench.extent.seconds + 10, "server_pids": [],
        }  # fmt: skip

        def ping(server: Server = broker) -> Sample:
            return bench.load(
                "remoting.ping", server, remoting=server.values["remoting"], interval_ms=2
            )

        def beside_send_lane(server: Server = broker) -> Sample:
            with LoadInBackground(
                "remoting.send_batches", remoting=remoting, topics=[TOPIC], connections=2, **common
            ):
                return ping(server)

        def beside_grpc() -> Sample:
            with LoadInBackground(
                "grpc_raw.send_batches",
                grpc_address=broker.values["grpc"],
                topic=TOPIC,
                callers=4,
                **common,
            ):
                return ping()

        samples = bench.compare(
            {
                "nothing else": ping,
                "the send lane saturated": beside_send_lane,
                "the send lane saturated, of an idle process": lambda: beside_send_lane(idle),
                "the gRPC front saturated": beside_grpc,
            }
        )
    for beside, some in samples.items():
        for percent, value in (
            ("p50", median_of(some, lambda s: s.p50_ms)),
            ("p99", median_of(some, lambda s: s.p99_ms)),
        ):
            yield Result(
                f"ping beside {beside}, {percent}", value, "ms", "less",
                "remoting port, admin lane, every 2 ms by a timetable",
                floor=2.0 if (beside, percent) == ("the send lane saturated", "p99") else None,
            )  # fmt: skip
