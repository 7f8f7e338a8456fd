"""How Spark finds `format("protomq-log")` by itself; see `pyspark_protomq`. One format for each such module."""

from protomq_spark.log_source import ProtomqLogDataSource as DefaultSource

__all__ = ["DefaultSource"]
