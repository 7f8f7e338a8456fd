"""Delivery against RocketMQ: transactions, pops, filters, push consumers, delays, slaves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, Final

from tests.bench.bench import Bench, Result, create_topics, rate_of, ratio_of
from tests.bench.measure import Sample, run_load
from tests.bench.peers.pair import THEIRS, Pair, PeerRow, latency_versus, running_pair, seen, versus
from tests.bench.peers.rocketmq import QUEUES, TOPIC, RocketMQ
from tests.bench.rows import transactions as our_transactions
from tests.bench.rows.latency import RATE, THREADS, receipt
from tests.bench.rows.pull import fill
from tests.bench.rows.single_send import from_coroutines, from_threads

_CALLERS: Final = our_transactions.CALLERS
_POP_CALLERS: Final = 16
_POP_MEMBERS: Final = 4
_SMALL_BYTES: Final = 128
_KINDS: Final = 100
_HA_CALLERS: Final = 64


def transactions(bench: Bench) -> Iterator[Result]:
    """Transactions with commit, 32 callers."""
    with (
        running_pair(bench) as pair,
        pair.theirs.driver("transaction", threads=_CALLERS, size=1024) as driver,
    ):
        commit = partial(our_transactions.commit, bench, pair.ours, topic=TOPIC)
        runs = {
            f"{_CALLERS} {kind}{'' if waits else ', one-way'}": partial(
                commit, kind, wait_for_end=waits, **{parameter: _CALLERS}
            )
            for kind, parameter in (("threads", "threads"), ("coroutines", "callers"))
            for waits in (True, False)
        }
        samples = pair.all_against_driver(runs, driver)
    how = f"1 KiB, 16 queues; theirs: {_CALLERS} threads, its client does not wait for the answer to the commit"
    for name in runs:
        floor = 2.0 if "threads" in name else 4.0
        says = "; ours waits for both answers" if "one-way" not in name else "; nor does ours"
        yield from versus(
            f"transactions with commit, {name}", samples[name], samples[THEIRS], floor, how + says
        )


def pop(bench: Bench) -> Iterator[Result]:
    """Pop and acknowledge, beside its proxy and its gRPC client."""
    messages = bench.extent.consume_messages
    groups = count()

    def popped(pair: Pair, load: str, part: int, **parameters: Any) -> Sample:
        return _load(
            pair, load, group=f"group{next(groups)}", messages=messages // part, **parameters
        )

    with running_pair(bench, proxy=True) as pair:
        pair.our_turn(lambda: fill(pair.ours, TOPIC, QUEUES, messages))
        pair.their_turn(lambda: pair.theirs.run("fill", limit=messages // 4, size=1024))
        threads = partial(popped, pair, "pop.pop_and_ack", members=_POP_MEMBERS, acks_alone=False)
        coroutines = partial(popped, pair, "pop.pop_in_coroutines", count=32, callers=_POP_CALLERS)
        with pair.theirs.simple_driver(threads=_POP_CALLERS, count=32) as driver:
            samples = pair.all_against_driver(
                {
                    "pull": partial(_load, pair, "sdk.consume", messages=messages),
                    "one ack, coroutines": partial(coroutines, 4, acks_alone=False),
                    "one ack, threads": partial(threads, 4, count=32),
                    "an ack for each": partial(coroutines, 10, acks_alone=True),
                    "256": partial(threads, 1, count=256),
                },
                driver,
            )
    ours = {"coroutines": f"{_POP_CALLERS} coroutines", "threads": f"{_POP_MEMBERS} members"}
    theirs = f"theirs: proxy in the broker's process, {_POP_CALLERS} threads, the acks of a call together"
    for case, floor, who in (
        ("one ack, coroutines", 15.0, ours["coroutines"]),
        ("one ack, threads", 15.0, ours["threads"]),
        ("an ack for each", 4.0, f"{ours['coroutines']}, the acks of a call together"),
    ):
        how = f"1 KiB; ours: {who}; {theirs}"
        yield from versus(
            f"pop + ack, 32 a call, {case}", samples[case], samples[THEIRS], floor, how
        )
    yield rate_of("pop + ack, 256 a call: protomq", samples["256"], seen(samples["256"]))
    yield ratio_of(
        "pop + ack, 256 a call / pull consumer, both ours", samples["256"], samples["pull"], 0.3,
        f"1 KiB; {ours['threads']}; pull consumer: {seen(samples['pull'])}",
    )  # fmt: skip


def filters(bench: Bench) -> Iterator[Result]:
    """A filter in the broker that keeps 1 of 100 small messages."""
    messages = bench.extent.consume_messages
    with running_pair(bench, theirs={"enablePropertyFilter": "true"}) as pair:
        pair.our_turn(lambda: _load(pair, "filters.fill", messages=messages, size=_SMALL_BYTES))
        pair.their_turn(
            lambda: pair.theirs.run("fill", limit=messages, size=_SMALL_BYTES, kinds=_KINDS)
        )
        for name, ours, theirs, floor in (
            ("SQL92", {"sql": "delay > 98"}, {"sql": "delay > 98"}, 2.0),
            ("tag", {"tags": ["tag99"]}, {"tags": "tag99"}, None),
        ):
            mine, peers = pair.interleave(
                partial(
                    _load, pair, "filters.consume", messages=messages, at_client=False, passes=2, subscription=ours
                ),
                partial(
                    pair.theirs.run, "push", total=messages, size=_SMALL_BYTES, share=_KINDS,
                    consumebatch=256, pullbatch=256, **theirs,
                ),
            )  # fmt: skip
            how = f"{_SMALL_BYTES} B and four properties, 16 queues, messages that were looked at; theirs: its median half second"
            yield from versus(f"filter that keeps 1 of 100, {name}", mine, peers, floor, how)


def push(bench: Bench) -> Iterator[Result]:
    """Push consumers that catch up, with listeners that count."""
    messages = bench.extent.consume_messages
    groups = count()
    with running_pair(bench) as pair:
        pair.our_turn(lambda: fill(pair.ours, TOPIC, QUEUES, messages))
        # Its consumer needs some seconds to get going: what it has to read is more.
        total = 3 * messages // 2
        pair.their_turn(lambda: pair.theirs.run("fill", limit=total, size=1024))

        def pushed(batch_size: int | None, orderly: bool = False) -> Sample:
            return _load(
                pair, "push.listen", group=f"group{next(groups)}", messages=messages, batch_size=batch_size, orderly=orderly, parts=True,
            )  # fmt: skip

        single = pair.take_turns(
            {"one": partial(pushed, None), "orderly": partial(pushed, None, orderly=True)},
            partial(pair.theirs.run, "push", total=total, size=1024),
        )
        ours, theirs = pair.interleave(
            partial(pushed, 256),
            partial(
                pair.theirs.run, "push", total=total, size=1024, consumebatch=256, pullbatch=256
            ),
        )
    how = "1 KiB, 16 queues, 20 threads each; of both the median half second"
    yield from versus("push consumer, one message a call", single["one"], single[THEIRS], 1.2, how)
    yield from versus("push consumer, 256 a call", ours, theirs, 1.2, how)
    yield ratio_of(
        "push consumer, orderly / concurrently, both ours", single["orderly"], single["one"], 0.6,
        f"1 KiB, one message a call; {seen(single['orderly'])}",
    )  # fmt: skip


def push_receipt(bench: Bench) -> Iterator[Result]:
    """1,000 messages a second, received by push consumers."""
    groups = count()
    with (
        running_pair(bench) as pair,
        pair.theirs.driver("e2e", threads=THREADS, rate=RATE, size=1024) as driver,
    ):
        ours, theirs = pair.against_driver(
            lambda: receipt(bench, pair.ours, TOPIC, "push.receive", group=f"group{next(groups)}"),
            driver,
        )
    how = f"{RATE:,} msg/s from {THREADS} threads, 1 KiB, from the intended time of the send"
    name = "send to receipt, push consumer"
    yield from latency_versus(f"{name}, p50", ours, theirs, 0.5, how, lambda s: s.p50_ms)
    yield from latency_versus(f"{name}, p99", ours, theirs, None, how, lambda s: s.p99_ms, 2.0)


def delays(bench: Bench) -> Iterator[Result]:
    """Single sends with delay level 1 (1 s)."""
    with (
        running_pair(bench) as pair,
        pair.theirs.driver("send", threads=_HA_CALLERS, size=1024, delay=1) as driver,
    ):
        ours, theirs = pair.against_driver(
            partial(from_threads, bench, pair.ours, _HA_CALLERS, topic=TOPIC, delay_level=1), driver
        )
    how = "1 KiB, 64 threads each, delivered meanwhile"
    yield from versus("sends with delay level 1, 64 threads", ours, theirs, None, how)


def sync_master(bench: Bench) -> Iterator[Result]:
    """SYNC_MASTER with a slave, in-sync 2, 64 callers."""
    with (
        _replicated(bench) as pair,
        pair.theirs.driver("send", threads=_HA_CALLERS, size=1024) as driver,
    ):
        samples = pair.all_against_driver(
            {
                "threads": partial(from_threads, bench, pair.ours, _HA_CALLERS, topic=TOPIC),
                "coroutines": partial(from_coroutines, bench, pair.ours, _HA_CALLERS, topic=TOPIC),
            },
            driver,
        )
    how = f"1 KiB, in-sync 2, ASYNC_FLUSH; theirs: {_HA_CALLERS} threads"
    for kind, floor in (("threads", 1.5), ("coroutines", 4.0)):
        name = f"SYNC_MASTER, {_HA_CALLERS} {kind}"
        yield from versus(name, samples[kind], samples[THEIRS], floor, how)


@contextmanager
def _replicated(bench: Bench) -> Iterator[Pair]:
    """Both sides with a slave. Ours refuses sends that it cannot give to the slave; of theirs only SEND_OK counts."""
    sync = {
        "broker_name": "pair", "broker_role": "SYNC_MASTER", "ha_in_sync_replicas": "2", "ha_min_in_sync_replicas": "2",
    }  # fmt: skip
    with RocketMQ({"brokerRole": "SYNC_MASTER", "inSyncReplicas": "2"}, slave=True) as theirs:
        theirs.start_broker()
        with bench.standalone(**sync) as master, bench.slave(master, "pair"):
            create_topics(master, [TOPIC], QUEUES)
            # Until the master takes sends; not one of its turns measures what comes before.
            run_load(
                "sdk.send_from_threads", namesrv=master.values["namesrv"], topic=TOPIC, threads=1, batch=1, size=64,
                warm_up=0.0, seconds=1.0, server_pids=[],
            )  # fmt: skip
            yield Pair(bench, master, theirs)


def _load(pair: Pair, load: str, **parameters: Any) -> Sample:
    """A load of ours that ends by itself."""
    broker = pair.ours
    return run_load(
        load, namesrv=broker.values["namesrv"], topic=TOPIC, **parameters, server_pids=broker.pids
    )


DELIVERY_ROWS: Final[dict[str, PeerRow]] = {
    "transactions": transactions,
    "pop": pop,
    "filters": filters,
    "push": push,
    "push-receipt": push_receipt,
    "delays": delays,
    "sync-master": sync_master,
}
