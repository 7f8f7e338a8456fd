"""The name server: which broker has which topics, and which brokers are alive.

A ladder: `route_snapshot` (immutable, what is served) < `route_table` (what changes it, pure) < `route_service` (the RPCs,
holds and watchers) < `server` (both transports) < `main` (the process). `direct_connection` lets a broker of the same process
register without a socket.
"""

__version__ = "0.1.0"
