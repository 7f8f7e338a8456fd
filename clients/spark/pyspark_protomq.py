"""How Spark finds `format("protomq")` by itself: it imports every top-level module named `pyspark_*` for its `DefaultSource`.

The import must be cheap and must not fail: Spark does it at the first use of any Python data source.
"""

from protomq_spark.source import ProtomqDataSource as DefaultSource

__all__ = ["DefaultSource"]
