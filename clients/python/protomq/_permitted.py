"""The errors of a topic of which no queue can be written or read: it is not permitted, or there is none."""

from __future__ import annotations

from ._types import MessageQueue, Route
from .errors import NoRouteError, NotPermittedError, ProtomqError
from .wire.topics import rules_of


def nothing_to_write(route: Route) -> ProtomqError:
    """The error of a send for which the route has no queue."""
    if route.leaderless_brokers and rules_of(route.topic).send:
        # Slaves take no sends, so the name server calls the topic read-only.
        return _no_master(f"topic {route.topic!r}", route.topic, ", ".join(route.leaderless_brokers))
    if route.is_write_permitted:
        return NoRouteError(f"topic {route.topic!r} has no queue that can be written", metadata={"topic": route.topic})
    return not_permitted(route.topic, "written")


def no_master_of(queue: MessageQueue) -> NoRouteError:
    """The error of a send to a queue of whose broker only slaves are registered; other brokers may take the topic."""
    return _no_master(f"queue {queue.queue_id} of topic {queue.topic!r} at {queue.broker_name}", queue.topic, queue.broker_name)


def _no_master(what: str, topic: str, broker_names: str) -> NoRouteError:
    text = f"{what} cannot be written now: no master of {broker_names} is registered, only slaves are"
    return NoRouteError(text, metadata={"topic": topic, "broker_name": broker_names})


def nothing_to_read(route: Route) -> ProtomqError:
    """The error of a read for which the route has no queue."""
    if route.is_read_permitted:
        return NoRouteError(f"topic {route.topic!r} has no queue that can be read", metadata={"topic": route.topic})
    return not_permitted(route.topic, "read")


def not_permitted(topic: str, what: str) -> NotPermittedError:
    """The error of a topic that may not be read or written."""
    if what == "written" and not rules_of(topic).send:
        text = f"topic {topic!r} may not be written: only the broker writes it; send to a topic of your own"
    else:
        text = f"topic {topic!r} may not be {what}: its permission was taken away; ask the operator"
    return NotPermittedError(text, metadata={"topic": topic})
