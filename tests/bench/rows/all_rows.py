"""Imports every module of rows, in the order of the table."""

from . import batch_send, single_send, transactions, delays, timers, pull, pop, retries, push, groups  # noqa: F401, I001
from . import filters, latency, holds, topics, start, growth, shards, replication, distance, beside_catch_up, failover  # noqa: F401
