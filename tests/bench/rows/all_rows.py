"""Imports every module of rows, in the order of the table."""

from . import batch_send, single_send, transactions, delays, pull, pop, push, filters, latency, holds, topics, start, growth, shards  # noqa: F401, I001
