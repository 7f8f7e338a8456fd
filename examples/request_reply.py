"""A price service: callers ask for the price of a flight, and wait for the reply of whichever instance gets the request."""

import os
import sys
import threading

from protomq import Producer, ProtomqError, PullConsumer
from protomq.errors import CallerGoneError, RequestTimeoutError

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
TOPIC = "prices"
MILES = {"EWR-LAX": 2454, "JFK-SFO": 2586, "LGA-ORD": 733}


def serve(stop: threading.Event) -> None:
    with PullConsumer("price-service", namesrv=NAMESRV) as consumer:
        consumer.subscribe(TOPIC)
        while not stop.is_set():
            for message in consumer.poll(0.1):
                flight = message.value(str)
                if flight not in MILES:
                    continue  # No reply: the caller's time will be up.
                try:
                    consumer.reply(message, {"usd": round(MILES[flight] * 0.11, 2)})
                except CallerGoneError:
                    print("nobody waits any more for the price of", flight)


def main() -> None:
    stop = threading.Event()
    service = threading.Thread(target=serve, args=(stop,))
    with Producer("desk", namesrv=NAMESRV) as producer:
        producer.send(TOPIC, b"no request")  # The topic is there; nobody waits for a reply to this one.
        service.start()
        try:
            for flight in MILES:
                reply = producer.request(TOPIC, flight, timeout_s=30)
                print(flight, "costs", reply.value(dict)["usd"], "USD")
            try:
                producer.request(TOPIC, "EWR-MOON", timeout_s=0.5)
            except RequestTimeoutError:
                print("EWR-MOON: no reply")
        finally:
            stop.set()
            service.join()


if __name__ == "__main__":
    try:
        main()
    except ProtomqError as error:
        sys.exit(f"{error}; a server is to be started first: protomq standalone")
