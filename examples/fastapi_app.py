"""A FastAPI application that sends bookings and consumes them: `uvicorn fastapi_app:app`. Run as a program, it calls itself."""

import asyncio
import os
import sys
from typing import Annotated

import httpx
from fastapi import Depends, FastAPI
from pydantic import BaseModel

from protomq import AsyncProducer, ConnectionOptions, ProtomqError
from protomq.asgi import Messaging

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
TOPIC = "web-bookings"


class Booking(BaseModel):
    flight: str
    seat: str


messaging = Messaging("web", connection=ConnectionOptions(namesrv=NAMESRV))
tickets = messaging.consumer("tickets")
app = FastAPI(lifespan=messaging.lifespan)
printed: asyncio.Queue[Booking] = asyncio.Queue()


@app.post("/bookings")
async def book(booking: Booking, producer: Annotated[AsyncProducer, Depends(messaging.producer)]) -> dict[str, str]:
    result = await producer.send(TOPIC, booking, key=booking.seat)
    return {"status": str(result.status)}


@app.get("/ready")
async def ready() -> bool:
    return messaging.is_running


@tickets.on(TOPIC)
async def print_ticket(booking: Booking) -> None:
    await printed.put(booking)


async def main() -> None:
    async with messaging.lifespan():  # The topic is there after this; the consumer starts with it.
        await (await messaging.producer()).send(TOPIC, Booking(flight="UA1545", seat="1A"))
    transport = httpx.ASGITransport(app=app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://app") as client:
        print("ready:", (await client.get("/ready")).json())
        answer = await client.post("/bookings", json={"flight": "UA1545", "seat": "12A"})
        print("booked:", answer.json()["status"])
        for seat in sorted([(await printed.get()).seat, (await printed.get()).seat]):
            print("ticket:", seat)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except ProtomqError as error:
        sys.exit(f"{error}; a server is to be started first: protomq standalone")
