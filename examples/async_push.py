"""Coroutines listen: many flights are tracked at once on one event loop. A second listener gets batches, with a result for each message."""

import asyncio
import os
import sys

from protomq import AsyncProducer, AsyncPushConsumer, Message, ProtomqError, Reject

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
TOPIC = "radar-positions"
FLIGHTS = {"N14228": 2, "N24211": 4, "N619AA": 2, "N804JB": -1, "N668DN": -6, "N39463": -4}


async def main() -> None:
    landed: dict[str, int] = {}
    under_way = most = 0
    batched: list[str] = []
    all_landed, all_batched = asyncio.Event(), asyncio.Event()
    tower = AsyncPushConsumer("tower-of-coroutines", namesrv=NAMESRV, concurrency=len(FLIGHTS))
    archive = AsyncPushConsumer("archive-of-positions", namesrv=NAMESRV)

    @tower.on(TOPIC)
    async def track(message: Message) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.2)  # Its radar answers; the loop goes on meanwhile.
        under_way -= 1
        landed[message.key] = int(message.body)
        if len(landed) == len(FLIGHTS):
            all_landed.set()

    @archive.on(TOPIC, batch_size=4)
    async def store(messages: list[Message]) -> list[Reject | None]:
        batched.extend(message.key for message in messages)
        if len(batched) >= len(FLIGHTS):
            all_batched.set()
        return [Reject("too early") if int(message.body) < -5 else None for message in messages]

    async with AsyncProducer(namesrv=NAMESRV) as producer:
        await asyncio.gather(
            *(producer.send(TOPIC, str(delay), key=plane) for plane, delay in FLIGHTS.items())
        )
    async with tower, archive:
        await asyncio.wait_for(asyncio.gather(all_landed.wait(), all_batched.wait()), 30)
    print(f"tracked {len(landed)} planes, {'several' if most > 1 else 'one'} at a time")
    print(f"stored {len(set(batched))} positions; {archive.counts.failed} was rejected")


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except ProtomqError as error:
        sys.exit(f"{error}; a server is to be started first: protomq standalone")
