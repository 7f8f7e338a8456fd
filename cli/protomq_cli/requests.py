"""`request`: sends a message and shows the reply to it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from protomq_cli.connection import open_producer
from protomq_cli.message_text import body_fields
from protomq_cli.options import DEFAULT_TIMEOUT_S, Namesrv, Output, Timeout, TopicArgument
from protomq_cli.output import OutputFormat, print_object, stdout_named
from protomq_cli.sending import Keys, Properties, octets_of, properties_of


def request(
    topic: TopicArgument,
    body: Annotated[str, typer.Argument(metavar="BODY", show_default=False, help="Body.")],
    key: Keys = None,
    tag: Annotated[str, typer.Option("--tag", "-g", metavar="TAG", show_default="none", help="Tag.")] = "",
    properties: Properties = None,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:  # fmt: skip
    """Send a message and wait for the reply of whoever consumes it.

    \b
      protomq request prices 'EWR-LAX' --timeout 10s

    The reply is written to stdout as it is; -o json shows its properties,
    too, and the message that was sent.
    """
    keys = key or []
    with open_producer(namesrv, send_timeout_s=timeout) as producer:
        reply = producer.request(
            topic,
            octets_of(body),
            key=keys[0] if keys else None,
            keys=tuple(keys[1:]),
            tag=tag,
            properties=properties_of(properties),
        )
    if output.is_table:
        with stdout_named():
            sys.stdout.buffer.write(reply.body + b"\n")
        return
    row = {
        **body_fields(reply.body),
        "properties": dict(reply.properties),
        "message_id": reply.request.message_id,
        "topic": reply.request.queue.topic,
        "broker": reply.request.queue.broker_name,
    }
    print_object(row, output)
