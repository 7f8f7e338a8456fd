"""Two brokers under one supervisor (`protomq broker --shards 2`) against one. No floor: here clients and brokers share two cores."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.bench.bench import Bench, Result, rate_of, row, spread
from tests.bench.measure import Sample
from tests.bench.process import Server

TOPIC = "Shards"
_CONFIGURATION = """\
broker_name: bench
data_dir: {data}
namesrv: ["{name_server}"]
listen: {{host: 127.0.0.1, grpc_port: 0, remoting_port: 0}}
"""


@row("shards")
def shards(bench: Bench) -> Iterator[Result]:
    """Single sends from coroutines and batches, over one and two brokers."""
    with _brokers(bench, 1) as (one, one_at), _brokers(bench, 2) as (two, two_at):

        def single(broker: Server, name_server: str) -> Sample:
            return bench.load(
                "sdk.send_from_coroutines",
                broker,
                namesrv=name_server,
                topic=TOPIC,
                callers=64,
                size=1024,
            )

        def batch(broker: Server, name_server: str) -> Sample:
            return bench.load(
                "sdk.send_from_threads", broker, namesrv=name_server, topic=TOPIC,
                threads=4, batch=256, size=1024,
            )  # fmt: skip

        samples = bench.compare(
            {
                "single sends, SDK, 64 coroutines, 1 broker": partial(single, one, one_at),
                "single sends, SDK, 64 coroutines, --shards 2": partial(single, two, two_at),
                "batch send, SDK, x 256, 4 threads, 1 broker": partial(batch, one, one_at),
                "batch send, SDK, x 256, 4 threads, --shards 2": partial(batch, two, two_at),
            }
        )
    for name, some in samples.items():
        yield rate_of(name, some, f"1 KiB, a name server of its own; {spread(some)}")


@contextmanager
def _brokers(bench: Bench, count: int) -> Iterator[tuple[Server, str]]:
    """The supervisor of so many brokers, and the address of their name server."""
    folder = bench.new_folder("shards")
    program = str(Path(sys.executable).with_name("protomq"))
    try:
        with Server([program, "namesrv", "--port", "0"], folder / "namesrv.log") as name_server:
            address = name_server.values["remoting"]
            configuration = folder / "broker.yaml"
            configuration.write_text(
                _CONFIGURATION.format(data=folder / "data", name_server=address), "utf-8"
            )
            command = [program, "broker", "--config", str(configuration), "--shards", str(count)]
            with Server(command, folder / "broker.log") as broker:
                yield broker, address
    finally:
        shutil.rmtree(folder, ignore_errors=True)
