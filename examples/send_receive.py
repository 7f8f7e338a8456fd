"""Send a message and receive it. First, in another terminal: protomq standalone"""

import os

from protomq import Producer, PullConsumer

namesrv = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")

with Producer(namesrv=namesrv) as producer:
    print("sent", producer.send("greetings", b"hello", key="k1"))

with PullConsumer("greeters", namesrv=namesrv) as consumer:
    consumer.subscribe("greetings")
    for message in consumer.poll(timeout_s=5.0):
        print("received", message.key, message.body.decode())
