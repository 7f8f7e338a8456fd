"""What the servers of protomq share: lanes, both transports, configuration, life cycle, telemetry.

Services stand above this package and know neither sockets nor gRPC; the store knows nothing of it.
"""

__version__ = "0.1.0"
