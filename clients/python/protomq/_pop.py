"""SimpleConsumer: messages for members of a group that have no queues of their own. From threads; `_async_pop` has the asyncio flavour."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

from ._checks import explain_unknown_settings
from ._connection_options import ConnectionOptions, connection_of
from ._late_imports import load_needed_modules
from ._message import Message
from ._pop_steps import (
    COUNT_DEFAULT,
    HOLD_DEFAULT_S,
    INVISIBLE_DEFAULT_S,
    PoppedQueue,
    PopSteps,
    Start,
)
from ._routes import Routes
from ._steps import Driver
from ._transport import SyncTransport
from ._types import PEER_TIMEOUT_S, Body, MessageQueue
from .errors import ClosedError

REQUEST_TIMEOUT_S: Final = 5.0

__all__ = ["PoppedQueue", "SimpleConsumer"]


class SimpleConsumer:
    """Receives messages that no other member of its group gets for a while, and acknowledges them.

        with SimpleConsumer("my-group") as consumer:
            while True:
                for message in consumer.receive("flights", invisible_s=30):
                    handle(message)
                    consumer.ack(message)

    What is not acknowledged within `invisible_s` is given to somebody again. Any thread may call everything; nothing is opened before the
    first use.
    """

    @explain_unknown_settings
    def __init__(
        self,
        group: str,
        *,
        namesrv: str | Sequence[str] | None = None,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        transport: Literal["auto", "remoting", "grpc"] = "auto",
        client_id: str = "",
        peer_timeout_s: float = PEER_TIMEOUT_S,
        spin: bool = True,
        connection: ConnectionOptions | None = None,
    ) -> None:
        """Makes a consumer; raises ConfigurationError.

        `request_timeout_s`: of an acknowledgement, all its tries together, and of looking up a route. All else: as in Producer.
        """
        self._steps = PopSteps(group, request_timeout_s)
        load_needed_modules("protomq.v1.pop_service_pb2")
        connection = connection_of(
            connection, namesrv=namesrv, transport=transport, client_id=client_id, peer_timeout_s=peer_timeout_s, spin=spin,
        )  # fmt: skip
        self._transport = SyncTransport(connection)
        self._routes = Routes(self._transport, connection.namesrv)
        self._driver = Driver(self._transport, self._routes)
        self._closed = False

    @property
    def group(self) -> str:
        """The consumer group."""
        return self._steps.group

    def receive(
        self,
        topic: str,
        count: int = COUNT_DEFAULT,
        *,
        invisible_s: float = INVISIBLE_DEFAULT_S,
        hold_s: float = HOLD_DEFAULT_S,
        queue: MessageQueue | None = None,
        tags: Iterable[str] = (),
        sql: str | None = None,
        cel: str | None = None,
        module: str | None = None,
        fifo: bool = False,
        start: Start = "earliest",
    ) -> list[Message]:
        """Up to `count` messages (1,024 at most), which nobody else gets for `invisible_s` (10 s to 12 h, by the broker's settings).

        Returns as soon as there are any, and an empty list if there are none for `hold_s` (60 at most). `queue`: only from there.
        `tags`, `sql`, `cel`, `module`: as in PullConsumer.subscribe; all members of a group use the same. `fifo`: of the messages with
        one sharding key one is out at a time; all members use it, or none. `start`: where a group begins that has never received from a
        queue, nor committed an offset.

        `message.queue` is a PoppedQueue: its `attempt` says which delivery this is. Raises TopicNotFoundError, IllegalFilterError,
        GroupDisabledError, TransportError.
        """
        self._check_open()
        wish = self._steps.wish(
            topic,
            count,
            invisible_s=invisible_s,
            hold_s=hold_s,
            queue=queue,
            tags=tags,
            sql=sql,
            cel=cel,
            module=module,
            fifo=fifo,
            start=start,
        )
        return self._driver.run(self._steps.receive(wish))

    def ack(self, messages: Message | Iterable[Message]) -> list[Message]:
        """These are done: nobody gets them again. Those that were done before, or that somebody else has by now, are returned.

        Many at once cost one call for each broker. Raises StaleReceiptError if none of them was held any more at one broker.
        """
        self._check_open()
        return self._driver.run(self._steps.ack(messages))

    def change_invisible(
        self, messages: Message | Iterable[Message], invisible_s: float
    ) -> list[Message]:
        """Nobody else gets these for `invisible_s` from now on (0 to 12 h), however long it was before. As `ack` else."""
        self._check_open()
        return self._driver.run(self._steps.change_invisible(messages, invisible_s))

    def nack(self, messages: Message | Iterable[Message], after_s: float = 0.0) -> list[Message]:
        """Gives these back: somebody gets them after `after_s`. As `ack` else."""
        return self.change_invisible(messages, after_s)

    def reply(
        self,
        message: Message,
        body: Body = b"",
        *,
        properties: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """See PullConsumer.reply."""
        self._check_open()
        self._driver.run(self._steps.reply(message, body, properties, timeout_s))

    def close(self) -> None:
        """Closes all connections. What was not acknowledged comes to others when its time is up."""
        self._closed = True
        self._transport.close()

    def __enter__(self) -> SimpleConsumer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the consumer is closed")
