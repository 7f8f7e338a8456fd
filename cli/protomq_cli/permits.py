"""Why a topic has no queue to read or to write: whether its permission forbids that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from protomq_cli.connection import open_admin
from protomq_cli.exits import CliError
from protomq_cli.partial import Missing

if TYPE_CHECKING:
    from protomq import Permission


def check_permitted(namesrv: str | None, timeout_s: float, topic: str, what: Literal["read", "written"]) -> None:
    """Raises NotPermittedError if no broker that answers permits it."""
    from protomq.errors import NotPermittedError, ProtomqError

    def permits(permission: Permission) -> bool:
        return permission.readable if what == "read" else permission.writable

    try:
        with open_admin(namesrv, timeout_s) as admin:
            configs = Missing().take(lambda: admin.describe_topic(topic)).configs
    except (ProtomqError, CliError):
        return
    if not any(permits(config.permission) for config in configs.values()):
        text = f"topic {topic!r} may not be {what}: its permission was taken away; ask the operator"
        raise NotPermittedError(text, metadata={"topic": topic})
