"""Filter modules over all brokers, masters and slaves: each has its own copies. Used by Admin."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from . import _methods
from ._admin_values import BrokerInfo, FilterModule
from ._checks import check_text
from ._late_imports import fork_waits
from .errors import ConfigurationError, NoRouteError, ProtomqError, WrongTypeError

if TYPE_CHECKING:
    from ._admin_calls import AdminCalls


MODULE_SIZE_MAX_BYTES: Final = 768 << 10
"""As the broker has it."""
_SLAVE_HINT: Final = "a slave that is back takes over what its master has, by itself"

Changed = tuple[list[str], dict[str, ProtomqError], str]
"""The brokers that were changed, the errors of others, both by label, and what the caller should know of these."""


def deploy_filter(
    admin: AdminCalls, name: str, module: bytes, brokers: Iterable[str] | None
) -> Changed:
    """The brokers that have it now, and those that did not answer."""
    with fork_waits:
        from .v1 import filter_service_pb2 as pb

    request = pb.DeployFilterRequest(name=check_text("name", name), module=_checked_module(module))

    def ask(broker: BrokerInfo) -> bool:
        admin._call(broker.address, _methods.DEPLOY_FILTER, request, pb.DeployFilterResponse)
        return True

    return _change(admin, brokers, ask)


def list_filters(
    admin: AdminCalls,
) -> tuple[dict[str, list[FilterModule]], dict[str, ProtomqError]]:
    """The modules by broker, and the brokers that did not answer."""
    with fork_waits:
        from .v1 import filter_service_pb2 as pb

    def ask(broker: BrokerInfo) -> list[FilterModule]:
        pages = admin._pages(
            broker, _methods.LIST_FILTERS, pb.ListFiltersRequest(), pb.ListFiltersResponse
        )
        return [FilterModule(one.name, one.size_bytes, one.crc32c) for page in pages for one in page.modules]

    answers, failures = admin._answers(None, ask, with_slaves=True)
    return {broker.label: modules for broker, modules in answers}, failures


def delete_filter(admin: AdminCalls, name: str, brokers: Iterable[str] | None) -> Changed:
    """The brokers that had it, and those that did not answer."""
    with fork_waits:
        from .v1 import filter_service_pb2 as pb

    request = pb.DeleteFilterRequest(name=check_text("name", name))

    def ask(broker: BrokerInfo) -> bool:
        answer = admin._call(
            broker.address, _methods.DELETE_FILTER, request, pb.DeleteFilterResponse
        )
        return answer.deleted

    return _change(admin, brokers, ask)


def _change(
    admin: AdminCalls, names: Iterable[str] | None, ask: Callable[[BrokerInfo], bool]
) -> Changed:
    """Asks masters, then their slaves. A slave takes over what its master has, so one without a master has changed for now only."""
    changed: list[str] = []
    asked: list[BrokerInfo] = []

    def ask_and_note(broker: BrokerInfo) -> None:
        asked.append(broker)
        if ask(broker):
            changed.append(broker.label)

    failures = admin._ask_each(names, ask_and_note, with_slaves=True)
    led = {broker.broker_name for broker in asked if not broker.broker_id}
    for name in dict.fromkeys(broker.broker_name for broker in asked):
        if name not in led:
            failures[name] = NoRouteError(
                f"no master of {name} is registered now, and its slaves take over what it has: repeat this when it is"
            )
    is_slave_missing = any("/" in label for label in failures)
    return changed, failures, _SLAVE_HINT if is_slave_missing else ""


def _checked_module(module: object) -> bytes:
    if not isinstance(module, bytes):
        raise WrongTypeError(f"module is bytes, those of a .wasm file, not {type(module).__name__}")
    if len(module) > MODULE_SIZE_MAX_BYTES:
        # Much larger, and no broker reads the request.
        raise ConfigurationError(f"a module has {MODULE_SIZE_MAX_BYTES:,} bytes at most, this one has {len(module)}")
    return module
