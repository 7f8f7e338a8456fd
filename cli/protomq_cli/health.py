"""`health`: whether a server takes calls, by its gRPC health service (grpc.health.v1). Healthchecks of containers are commands.

The request and the answer are one field each, so their few bytes stand here and the generated package is not needed.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from protomq_cli.exits import CliError, ExitCode
from protomq_cli.options import DEFAULT_TIMEOUT_S, Output, Timeout
from protomq_cli.output import OutputFormat, print_rows

METHOD: Final = "/grpc.health.v1.Health/Check"
SERVING: Final = b"\x08\x01"
"""HealthCheckResponse with status = SERVING."""


def health(
    address: Annotated[
        str,
        typer.Argument(metavar="HOST:PORT", show_default=False, help="gRPC port of a broker or name server."),
    ],
    service: Annotated[
        str,
        typer.Option("--service", metavar="NAME", show_default="the whole server", help="One service: protomq.v1.SendService."),
    ] = "",
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:  # fmt: skip
    """Ask one server whether it serves; exit code 0 says yes.

    3: it does not answer. 6: it answers, and takes no calls (it stops).
    """
    if is_serving(address, service, timeout):
        print_rows([{"address": address, "status": "serving"}], ("address", "status"), output)
        return
    raise CliError(ExitCode.REFUSED, "NOT_SERVING", f"{address} answers, and takes no calls: it is stopping")


def is_serving(address: str, service: str, timeout_s: float) -> bool:
    """Whether the server takes calls. Raises CliError if it does not say."""
    import grpc

    host, _, port = address.rpartition(":")
    if "/" in address or not (host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        # gRPC would look the whole up as a name, and say that nobody answers.
        raise CliError(ExitCode.USAGE, "USAGE", f"an address has the form host:port, with a port from 1 to 65535; this is {address!r}")
    size = len(service.encode())
    if size > 127:
        raise CliError(ExitCode.USAGE, "USAGE", "--service is longer than the name of any service")
    request = bytes((0x0A, size)) + service.encode() if service else b""
    with grpc.insecure_channel(address) as channel:
        check: Any = channel.unary_unary(METHOD, request_serializer=None, response_deserializer=None)
        try:
            answer: bytes = check(request, timeout=timeout_s)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise CliError(ExitCode.NOT_FOUND, "NO_SUCH_SERVICE", f"{address} has no service {service}") from error
            raise CliError(
                ExitCode.UNREACHABLE,
                "UNREACHABLE",
                f"{address} does not answer gRPC: {error.details()}; the gRPC port is asked, as the ready line names it",
            ) from error
    return answer == SERVING
