"""Writes the tables of docs/settings.md from the typed configurations of the servers. A test says when that was forgotten."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from protomq_broker.config import BrokerConfig
from protomq_namesrv.config import NamesrvConfig
from protomq_runtime.config import variable_of

PAGE = Path(__file__).resolve().parent.parent / "docs/settings.md"
BEGIN, END = "<!-- settings: begin -->\n", "<!-- settings: end -->\n"

SERVERS: Final = {"A broker": BrokerConfig(), "A name server": NamesrvConfig()}

ROCKETMQ: Final = {
    "A broker": {
        "data_dir": "storePathRootDir",
        "cluster": "brokerClusterName",
        "broker_name": "brokerName",
        "broker_role": "brokerRole",
        "broker_id": "brokerId",
        "namesrv": "namesrvAddr",
        "listen.host": "bindAddress",
        "listen.grpc_port": "grpcServerPort (proxy)",
        "listen.remoting_port": "listenPort",
        "listen.advertised_host": "brokerIP1",
        "connections.peer_timeout_ms": "serverChannelMaxIdleTimeSeconds",
        "auto_create_topics": "autoCreateTopicEnable",
        "default_queues": "defaultTopicQueueNums",
        "sync_flush_timeout_ms": "syncFlushTimeout",
        "delay_levels": "messageDelayLevel",
        "pop_invisible_min_ms": "minInvisibleTimeMillsForRecv (proxy)",
        "pop_invisible_max_ms": "maxInvisibleTimeMills (proxy)",
        "transaction_timeout_ms": "transactionTimeOut",
        "transaction_check_interval_ms": "transactionCheckInterval",
        "transaction_check_max": "transactionCheckMax",
        "member_expiry_ms": "channelExpiredTimeout",
        "register_interval_ms": "registerNameServerPeriod",
        "ha.in_sync_replicas": "inSyncReplicas",
        "ha.min_in_sync_replicas": "minInSyncReplicas",
        "ha.sync_timeout_ms": "slaveTimeout",
        "ha.heartbeat_interval_ms": "haSendHeartbeatInterval",
        "ha.timeout_ms": "haHousekeepingInterval",
        "ha.gap_max_bytes": "haMaxGapNotInSync",
        "ha.transfer_size_bytes": "haTransferBatchSize",
        "ha.slave_read_enabled": "slaveReadEnable",
        "ha.slave_read_memory_ratio": "accessMessageInMemoryMaxRatio",
        "ha.master": "haMasterAddress",
        "etcd.endpoints": "enableControllerMode, controllerAddr",
        "metrics.listen": "metricsPromExporterHost, metricsPromExporterPort",
        "lanes.send_depth_max": "sendThreadPoolQueueCapacity",
        "lanes.pull_threads": "pullMessageThreadPoolNums",
        "lanes.pull_depth_max": "pullThreadPoolQueueCapacity",
        "lanes.consumer_threads": "consumerManageThreadPoolNums",
        "lanes.consumer_depth_max": "consumerManagerThreadPoolQueueCapacity",
        "lanes.admin_threads": "adminBrokerThreadPoolNums",
        "store.segment_size_bytes": "mappedFileSizeCommitLog",
        "store.sync_flush": "flushDiskType",
        "store.flush_interval_ms": "flushIntervalCommitLog",
        "store.retention_hours": "fileReservedTime",
        "store.delete_hour": "deleteWhen",
        "store.disk_delete_ratio": "diskMaxUsedSpaceRatio",
        "store.disk_force_ratio": "diskSpaceCleanForciblyRatio",
        "store.disk_refuse_ratio": "diskSpaceWarningLevelRatio",
    },
    "A name server": {
        "listen.host": "bindAddress",
        "listen.remoting_port": "listenPort",
        "connections.peer_timeout_ms": "serverChannelMaxIdleTimeSeconds",
        "liveness.expiry_ms": "brokerChannelExpiredTime",
        "liveness.scan_interval_ms": "scanNotActiveBrokerInterval",
        "route_threads": "clientRequestThreadPoolNums",
    },
}
"""RocketMQ 5.3's names of settings that do the same, or nearly."""

TIMES_MS: Final = {"h": 3_600_000, "min": 60_000, "s": 1_000, "ms": 1}
SIZES: Final = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}


class Setting(NamedTuple):
    """One field of a configuration, by its dotted name."""

    key: str
    default: str
    meaning: str


def settings_of(config: Any, prefix: str = "") -> Iterator[Setting]:
    """All settings of a server, those of its sections behind its own."""
    meanings = _meanings_of(type(config))
    fields = [(field.name, getattr(config, field.name)) for field in dataclasses.fields(config)]
    for name, value in fields:
        if not dataclasses.is_dataclass(value):
            yield Setting(prefix + name, default_text(name, value), meanings[name])
    for name, value in fields:
        if dataclasses.is_dataclass(value):
            yield from settings_of(value, f"{prefix}{name}.")


def default_text(name: str, value: object) -> str:
    """A default as a file or an environment variable may have it; "" for none."""
    if isinstance(value, bool):
        return str(value).lower()
    if name.endswith("_ms") and isinstance(value, int) and value:
        return _in_units(value, TIMES_MS)
    if "_bytes" in name and isinstance(value, int) and value:
        return _in_units(value, SIZES)
    return "" if value in (None, ()) else str(value)


def written_anew(page: str) -> str:
    """The page with its tables as they must be."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n".join(_lines()) + "\n" + END + after


def _lines() -> Iterator[str]:
    for title, config in SERVERS.items():
        yield f"\n## {title}\n"
        yield "| setting | environment | default | RocketMQ | meaning |\n|---|---|---|---|---|"
        for key, default, meaning in settings_of(config):
            shown = f"`{default}`" if default else "none"
            yield f"| `{key}` | `{variable_of(key)}` | {shown} | {ROCKETMQ[title].get(key, '')} | {meaning} |"


def _in_units(value: int, units: dict[str, int]) -> str:
    unit = next(unit for unit, size in units.items() if not value % size)
    return f"{value // units[unit]}{unit}"


def _meanings_of(config_class: type) -> dict[str, str]:
    """Of each field what its class says: in a text behind the field, or in the list `Attributes` of the docstring."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(config_class))).body
    assert isinstance(tree, ast.ClassDef)
    listed = (ast.get_docstring(tree) or "").partition("Attributes:\n")[2]
    found = dict(re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", listed, re.MULTILINE))
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = ast.literal_eval(text.value)
    return {name: " ".join(text.split()).replace("|", "\\|") for name, text in found.items()}


if __name__ == "__main__":
    PAGE.write_text(written_anew(PAGE.read_text("utf-8")), "utf-8")
