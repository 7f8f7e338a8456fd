"""Filter modules over all brokers: each has its own copies. Used by Admin."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from . import _methods
from ._admin_values import BrokerInfo, FilterModule
from ._checks import check_text
from ._late_imports import fork_waits
from .errors import ProtomqError, WrongTypeError

if TYPE_CHECKING:
    from ._admin_calls import AdminCalls


def deploy_filter(
    admin: AdminCalls, name: str, module: bytes, brokers: Iterable[str] | None
) -> tuple[list[str], dict[str, ProtomqError]]:
    """The brokers that have it now, and those that did not answer."""
    with fork_waits:
        from .v1 import filter_service_pb2 as pb

    request = pb.DeployFilterRequest(name=check_text("name", name), module=_checked_module(module))
    deployed: list[str] = []

    def ask(broker: BrokerInfo) -> None:
        admin._call(broker.address, _methods.DEPLOY_FILTER, request, pb.DeployFilterResponse)
        deployed.append(broker.broker_name)

    return deployed, admin._ask_each(brokers, ask)


def list_filters(
    admin: AdminCalls,
) -> tuple[dict[str, list[FilterModule]], dict[str, ProtomqError]]:
    """The modules by broker, and the brokers that did not answer."""
    with fork_waits:
        from .v1 import filter_service_pb2 as pb

    found: dict[str, list[FilterModule]] = {}

    def ask(broker: BrokerInfo) -> None:
        pages = admin._pages(
            broker, _methods.LIST_FILTERS, pb.ListFiltersRequest(), pb.ListFiltersResponse
        )
        found[broker.broker_name] = [
            FilterModule(one.name, one.size_bytes, one.crc32c) for page in pages for one in page.modules
        ]

    return found, admin._ask_each(None, ask)


def delete_filter(
    admin: AdminCalls, name: str, brokers: Iterable[str] | None
) -> tuple[list[str], dict[str, ProtomqError]]:
    """The brokers that had it, and those that did not answer."""
    with fork_waits:
        from .v1 import filter_service_pb2 as pb

    request = pb.DeleteFilterRequest(name=check_text("name", name))
    deleted: list[str] = []

    def ask(broker: BrokerInfo) -> None:
        answer = admin._call(
            broker.address, _methods.DELETE_FILTER, request, pb.DeleteFilterResponse
        )
        if answer.deleted:
            deleted.append(broker.broker_name)

    return deleted, admin._ask_each(brokers, ask)


def _checked_module(module: object) -> bytes:
    if not isinstance(module, bytes):
        raise WrongTypeError(f"module is bytes, those of a .wasm file, not {type(module).__name__}")
    return module
