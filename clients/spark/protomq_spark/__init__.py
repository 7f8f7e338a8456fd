"""protomq for PySpark.

    spark.read.format("protomq").option("protomq.namesrv", "host:9876").option("subscribe", "orders").load()

Spark finds the formats by itself once this package is installed on the driver (`pyspark_protomq`). Nothing here imports
pyspark before it is used: the cluster brings it. Names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .batches import send_batch as send_batch
    from .sender import SentRows as SentRows
    from .source import ProtomqDataSource as ProtomqDataSource
    from .udf import send_partition as send_partition
    from .udf import send_udf as send_udf

__version__ = "0.1.0"

_LAZY = {
    "ProtomqDataSource": "source",
    "send_batch": "batches",
    "send_partition": "udf",
    "send_udf": "udf",
}

__all__ = ["ProtomqDataSource", "send_batch", "send_partition", "send_udf", "__version__"]


def __getattr__(name: str) -> object:
    module_name = _LAZY.get(name)
    if module_name is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f".{module_name}", __name__), name)
    globals()[name] = value
    return value
