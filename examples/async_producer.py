"""A thousand coroutines send at the same time; what is waiting travels together, with no delay when the line is idle."""

import asyncio
import os
import sys
import time

from protomq import AsyncProducer, ProtomqError

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
COUNT = 1000


async def main() -> None:
    async with AsyncProducer(namesrv=NAMESRV) as producer:
        begin = time.perf_counter()
        sends = [
            producer.send("orders", f"order {n}".encode(), key=f"order-{n}") for n in range(COUNT)
        ]
        results = await asyncio.gather(*sends)
        elapsed_s = time.perf_counter() - begin
    queues = {result.queue.queue_id for result in results}
    print(
        f"sent {len(results)} messages to {len(queues)} queues, {COUNT / elapsed_s:,.0f} a second"
    )


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except ProtomqError as error:
        sys.exit(f"{error}; a server is to be started first: protomq standalone")
